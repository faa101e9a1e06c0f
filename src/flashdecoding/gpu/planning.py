"""How a batch is cut into splits on the device, by its valid lengths: one small kernel, no sync."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(4)  # int32: sequence, first key, one past the last, nothing
SEQUENCE_FIELDS = tl.constexpr(
    8
)  # int64: kv_end, kv_begin, first query, queries, q_start, kv_start, first item, splits


@triton.jit
def plan_kernel(
    seqlens, kv_begin, q_offsets, q_start, kv_start, items, sequences, batch, capacity, q_len, window, most_items,
    TILE: tl.constexpr, BB: tl.constexpr, BI: tl.constexpr, LENGTHS: tl.constexpr, BEGINS: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Cut a batch into splits of equally many tiles, as long as there are at most ``most_items``; one program."""
    lanes = tl.arange(0, BB)
    longest = 1
    for start in range(0, batch, BB):
        b = start + lanes
        ok = b < batch
        first, end, queries, q_first, position, piece = sequence_facts(
            seqlens, kv_begin, q_offsets, q_start, kv_start, b, ok, capacity, q_len, window,
            LENGTHS, BEGINS, PACKED, STARTS, PIECES, WINDOW,
        )  # fmt: skip
        record = sequences + b * SEQUENCE_FIELDS
        tl.store(record, end, mask=ok)
        tl.store(record + 1, first, mask=ok)
        tl.store(record + 2, q_first, mask=ok)
        tl.store(record + 3, queries, mask=ok)
        tl.store(record + 4, position, mask=ok)
        tl.store(record + 5, piece, mask=ok)
        longest = tl.maximum(longest, tl.max(tl.where(ok, tl.cdiv(tl.maximum(end - first, 0), TILE), 0), 0))
    tl.debug_barrier()
    low, high = 1, longest
    while low < high:
        middle = (low + high) // 2
        count = 0
        for start in range(0, batch, BB):
            tiles, ok = sequence_tiles(sequences, start + lanes, batch, TILE)
            count += tl.sum(tl.where(ok, tl.maximum(tl.cdiv(tiles, middle), 1), 0), 0)
        if count <= most_items:
            high = middle
        else:
            low = middle + 1
    total = 0
    for start in range(0, batch, BB):
        b = start + lanes
        tiles, ok = sequence_tiles(sequences, b, batch, TILE)
        splits = tl.where(ok, tl.maximum(tl.cdiv(tiles, low), 1), 0)
        before = total + tl.cumsum(splits, 0) - splits
        total += tl.sum(splits, 0)
        record = sequences + b * SEQUENCE_FIELDS
        tl.store(record + 6, before, mask=ok)
        tl.store(record + 7, splits, mask=ok)
        end = tl.load(record, mask=ok, other=0).to(tl.int32)
        first = tl.load(record + 1, mask=ok, other=0).to(tl.int32)
        split = tl.arange(0, BI)[None, :]
        for first_split in range(0, tl.max(splits, 0), BI):
            number = first_split + split
            here = ok[:, None] & (number < splits[:, None])
            at = items + (before[:, None] + number) * ITEM_FIELDS
            # Tiles are shared out evenly: split s has tiles s * tiles // splits up to the next one's first.
            some = tl.maximum(splits, 1)[:, None].to(tl.int64)
            begin = (number.to(tl.int64) * tiles[:, None] // some).to(tl.int32) * TILE + first[:, None]
            stop = ((number + 1).to(tl.int64) * tiles[:, None] // some).to(tl.int32) * TILE + first[:, None]
            tl.store(at, b[:, None] + number * 0, mask=here)
            tl.store(at + 1, begin, mask=here)
            tl.store(at + 2, tl.minimum(stop, end[:, None]), mask=here)
    for start in range(total, most_items, BB):
        rest = start + lanes
        tl.store(items + rest * ITEM_FIELDS, -1, mask=rest < most_items)


@triton.jit
def sequence_tiles(sequences, b, batch, TILE: tl.constexpr):
    ok = b < batch
    record = sequences + b * SEQUENCE_FIELDS
    keys = tl.load(record, mask=ok, other=0) - tl.load(record + 1, mask=ok, other=0)
    return tl.cdiv(tl.maximum(keys, 0).to(tl.int32), TILE), ok


@triton.jit
def sequence_facts(
    seqlens, kv_begin, q_offsets, q_start, kv_start, b, ok, capacity, q_len, window,
    LENGTHS: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr, STARTS: tl.constexpr, PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """First and end of the keys that a sequence's queries may see; queries, and where they and the keys begin."""
    if LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(seqlens + b, mask=ok, other=0), 0), capacity).to(tl.int32)
    else:
        end = tl.zeros_like(b) + capacity
    first = tl.zeros_like(b)
    if BEGINS:
        first = tl.minimum(tl.maximum(tl.load(kv_begin + b, mask=ok, other=0), 0), capacity).to(tl.int32)
    if PACKED:
        q_first = tl.load(q_offsets + b, mask=ok, other=0)
        queries = tl.minimum(tl.load(q_offsets + b + 1, mask=ok, other=0) - q_first, q_len)
    else:
        q_first, queries = tl.zeros_like(b), tl.zeros_like(b) + q_len
    piece = tl.zeros_like(b).to(tl.int64)
    if PIECES:
        piece = tl.load(kv_start + b, mask=ok, other=0).to(tl.int64)
    if STARTS:
        position = tl.load(q_start + b, mask=ok, other=0).to(tl.int64)
    else:
        position = piece + end - queries
    if WINDOW and not STARTS:
        first = tl.maximum(first, end - (queries + window - 1))
    first = tl.where(queries > 0, first, end)
    return first, end, queries, q_first, position, piece
