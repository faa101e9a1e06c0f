"""How a batch is cut into splits on the device, by its valid lengths: one small kernel, no sync.

All sequences' tiles stand in a row, one sequence after the other, and every worker gets an equal stretch of it: a
worker is a program of stage 1 for one kv head and row block, and as many run as the GPU holds at once. Where a stretch
ends within a sequence, the sequence is cut. Sequences of as many tiles each are cut evenly or not at all, where that
makes the stretch longer by an eighth at most; among others there is a gap after each, for what beginning one costs. For
a batch-invariant plan a sequence's own length cuts it, and workers get the splits that begin in their stretch.

A plan is int32 memory: the *table*, with a column for each sequence and one more, of SEQLENS, FIRST (the first key that
a query may see), BEGIN (its first tile in that row of all tiles), OFFSETS (its splits, as `SplitPlan` has them) and
PARTS; an *item* for each split: sequence, first key, one past the last, length of the sequence, its splits, and the
place of this one's state among the parts that stage 2 merges; and for each *worker* its first item and a copy of that,
so that one load gives it all it needs to begin. It ends where the next worker begins.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdecoding.gpu.steps import clamped, queries_of
from flashdecoding.lengths import GAP_TILES

RECORD = tl.constexpr(8)  # numbers of an item (six are used) and of a worker (seven): one sector of memory
SEQLENS, FIRST, BEGIN, OFFSETS, PARTS = (tl.constexpr(row) for row in range(5))
TABLE_ROWS = 5
GAP = tl.constexpr(GAP_TILES)  # tiles that beginning a sequence counts as: its first keys take as long to come


@triton.jit(
    do_not_specialize=["batch", "capacity", "q_len", "tokens", "window", "workers", "least_tiles", "most_splits"]
)
def plan_kernel(
    spans, cut, batch, capacity, q_len, tokens, window, workers, least_tiles,
    most_splits, TILE: tl.constexpr, LANES: tl.constexpr, WORKERS: tl.constexpr, INVARIANT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program cuts the batch, LANES sequences or WORKERS workers at once. A worker's stretch, or with INVARIANT a
    split, has at least ``least_tiles`` tiles; with INVARIANT a sequence has at most ``most_splits`` splits.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lanes = tl.arange(0, LANES)
    total, some, shortest, longest = 0, 0, 2147483647, 0
    for start in range(0, batch, LANES):
        b = start + lanes
        ok = b < batch
        first, end = reach(spans, b, ok, capacity, q_len, tokens, window)
        tl.store(cut.table_ptr + SEQLENS * cut.pitch + b, end, mask=ok)
        tl.store(cut.table_ptr + FIRST * cut.pitch + b, first, mask=ok)
        tiles = pieces(end - first, TILE)
        total += tl.sum(tl.where(ok, tiles, 0), 0)
        some += tl.sum((ok & (tiles > 0)).to(tl.int32), 0)
        shortest = tl.minimum(shortest, tl.min(tl.where(ok, tiles, 2147483647), 0))
        longest = tl.maximum(longest, tl.max(tl.where(ok, tiles, 0), 0))
    tl.debug_barrier()
    gap = tl.where(shortest == longest, 0, GAP)
    total += some * gap
    share = tl.maximum(pieces(total, workers), 1)
    if not INVARIANT:
        share = tl.maximum(share, least_tiles)
        if shortest == longest:
            share = even_share(share, tl.maximum(longest, 1))
    tile, items, parts = 0, 0, 0
    for start in range(0, batch, LANES):
        b = start + lanes
        ok = b < batch
        end = tl.load(cut.table_ptr + SEQLENS * cut.pitch + b, mask=ok, other=0)
        first = tl.load(cut.table_ptr + FIRST * cut.pitch + b, mask=ok, other=0)
        tiles = pieces(end - first, TILE)
        counted = tl.where(tiles > 0, tiles + gap, 0)
        begin = tile + tl.cumsum(counted, 0) - counted
        if INVARIANT:
            size = tl.maximum(pieces(tiles, most_splits), least_tiles)
            splits = pieces(tiles, size)
        else:
            splits = tl.where(tiles > 0, (begin + tiles - 1) // share - begin // share + 1, 0)
        merged = tl.where(splits > 1, splits, 0)
        offset = items + tl.cumsum(splits, 0) - splits
        part = parts + tl.cumsum(merged, 0) - merged
        tl.store(cut.table_ptr + BEGIN * cut.pitch + b, begin, mask=ok)
        tl.store(cut.table_ptr + OFFSETS * cut.pitch + b, offset, mask=ok)
        tl.store(cut.table_ptr + PARTS * cut.pitch + b, part, mask=ok)
        if INVARIANT:
            write_items(cut, b, first, end, size * TILE, splits, offset, part)
        else:
            past = first + keys_of(share - begin % share, end - first, TILE)  # the border
            store_item(cut.items_ptr + offset * RECORD, b, first, past, end, splits, part, splits > 0)
        tile += tl.sum(counted, 0)
        items += tl.sum(splits, 0)
        parts += tl.sum(merged, 0)
    tl.store(cut.table_ptr + OFFSETS * cut.pitch + batch, items)
    tl.debug_barrier()
    for start in range(0, workers + 1, WORKERS):
        worker = start + tl.arange(0, WORKERS)
        write_workers(
            cut, worker, worker <= workers, batch, total, share, items, least_tiles, most_splits, TILE, INVARIANT
        )


@triton.jit
def reach(spans, b, ok, capacity, q_len, tokens, window):
    """[first, end) of the keys that a sequence's queries may see; empty without queries."""
    if spans.seqlens_ptr is None:
        end = tl.zeros_like(b) + capacity
    else:
        end = clamped(spans.seqlens_ptr, b, ok, capacity)
    first = tl.zeros_like(b)
    if spans.kv_begin_ptr is not None:
        first = clamped(spans.kv_begin_ptr, b, ok, capacity)
    _, queries = queries_of(spans.q_offsets_ptr, b, ok, tokens, q_len)
    if window is not None:
        first = tl.maximum(first.to(tl.int64), end - (queries.to(tl.int64) + window - 1)).to(tl.int32)
    return tl.minimum(tl.where(queries > 0, first, end), end), end


@triton.jit
def even_share(share, length):
    """A stretch up to an eighth longer, if sequences of this length are so cut evenly, or not at all."""
    splits = length // share
    even = tl.where(splits > 0, pieces(length, tl.maximum(splits, 1)), pieces(share, length) * length)
    return tl.where(even - share <= share // 8, even, share)


@triton.jit
def pieces(x, size):
    """x / size, rounded up, for any x >= 0: x + size - 1 might be too large for its type."""
    return x // size + (x % size != 0).to(x.dtype)


@triton.jit
def keys_of(tiles, most, TILE: tl.constexpr):
    """Keys of some tiles, at most as many as there are."""
    return tl.minimum(tiles.to(tl.int64) * TILE, most).to(tl.int32)


@triton.jit
def store_item(at, b, begin, past, end, splits, part, ok):
    tl.store(at, b, mask=ok)
    tl.store(at + 1, begin, mask=ok)
    tl.store(at + 2, past, mask=ok)
    tl.store(at + 3, end, mask=ok)
    tl.store(at + 4, splits, mask=ok)
    tl.store(at + 5, part, mask=ok)


@triton.jit
def write_items(cut, b, first, end, size, splits, offset, part):
    """All items of each lane's sequence, 16 at once."""
    for start in range(0, tl.max(splits, 0), 16):
        number = start + tl.arange(0, 16)[None, :]
        at = cut.items_ptr + (offset[:, None] + number) * RECORD
        begin = first[:, None] + number * size[:, None]
        past = begin + tl.minimum(end[:, None] - begin, size[:, None])
        same = number * 0  # one number for all of a sequence
        store_item(
            at, b[:, None] + same, begin, past, end[:, None] + same, splits[:, None] + same, part[:, None] + number,
            number < splits[:, None],
        )  # fmt: skip


@triton.jit
def write_workers(
    cut, worker, ok, batch, total, share, items, least_tiles, most_splits, TILE: tl.constexpr, INVARIANT: tl.constexpr
):
    """The workers' records, and by default the items that begin where a stretch does, within a sequence."""
    border = worker.to(tl.int64) * share
    ok_here = ok & (border < total)
    border = tl.minimum(border, total).to(tl.int32)
    low = tl.zeros_like(worker)
    high = low + batch
    while tl.max(high - low, 0) > 1:  # the last sequence that begins at the border or before
        middle = (low + high) // 2
        after = tl.load(cut.table_ptr + BEGIN * cut.pitch + middle, mask=ok_here, other=0) > border
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
    at = cut.table_ptr + low
    first = tl.load(at + FIRST * cut.pitch, mask=ok_here, other=0)
    end = tl.load(at + SEQLENS * cut.pitch, mask=ok_here, other=0)
    begin = tl.load(at + BEGIN * cut.pitch, mask=ok_here, other=0)
    offset = tl.load(at + OFFSETS * cut.pitch, mask=ok_here, other=0)
    splits = tl.load(at + 1 + OFFSETS * cut.pitch, mask=ok_here, other=0) - offset
    record = cut.workers_ptr + worker * RECORD
    if INVARIANT:
        tiles = pieces(end - first, TILE)
        number = pieces(border - begin, tl.maximum(pieces(tiles, most_splits), least_tiles))
        written = ok_here
    else:
        number = worker - begin // share
        written = ok_here & ((number == 0) | (number >= splits))
    item = tl.where(ok_here, offset + tl.minimum(number, splits), items)  # in the gap, that of the next sequence
    some = written & (item < items)
    for field in tl.static_range(6):
        tl.store(record + 1 + field, tl.load(cut.items_ptr + item * RECORD + field, mask=some, other=0), mask=some)
    if not INVARIANT:
        cuts = ok_here & (number > 0) & (number < splits)
        part = tl.load(at + PARTS * cut.pitch, mask=ok_here, other=0) + number
        key = first + (border - begin) * TILE
        past = key + keys_of(share, end - key, TILE)
        store_item(record + 1, low, key, past, end, splits, part, cuts)
        store_item(cut.items_ptr + item * RECORD, low, key, past, end, splits, part, cuts)
    tl.store(record, item, mask=ok)
