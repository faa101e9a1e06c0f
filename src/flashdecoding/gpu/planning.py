"""How a batch is cut into splits on the device, by its valid lengths: one small kernel, no sync.

All sequences' tiles stand in a row, one sequence after the other, and every worker gets an equal stretch of it: a
worker is a program of stage 1 for one kv head and row block, and as many run as the GPU holds at once. Where a stretch
ends within a sequence, the sequence is cut. For a batch-invariant plan a sequence's own length cuts it, and workers get
the splits that begin in their stretch.

A plan is int32 memory: the *table*, with a column for each sequence and one more, of SEQLENS, FIRST (the first key that
a query may see), OFFSETS (a sequence's splits, as `SplitPlan` has them) and PARTS; an *item* for each split: sequence,
first key, one past the last, length of the sequence, its splits, and the place of this one's state among the parts that
stage 2 merges; and for each *worker* its first item, a copy of that, and one past its last item, so that one load gives
it all it needs to begin.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashdecoding.gpu.steps import clamped, queries_of

RECORD = tl.constexpr(8)  # numbers of an item (six are used) and of a worker: one sector of memory
LAST = tl.constexpr(7)  # of a worker's record: one past its last item
SEQLENS, FIRST, OFFSETS, PARTS = (tl.constexpr(row) for row in range(4))
TABLE_ROWS = 4


@triton.jit(
    do_not_specialize=["batch", "capacity", "q_len", "tokens", "window", "workers", "least_tiles", "most_splits"]
)
def plan_kernel(
    seqlens_ptr, kv_begin_ptr, q_offsets_ptr, cut, batch, capacity, q_len, tokens, window, workers, least_tiles,
    most_splits, TILE: tl.constexpr, LANES: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """One program cuts the batch. A worker's stretch, or with INVARIANT a split, has at least ``least_tiles`` tiles;
    with INVARIANT a sequence has at most ``most_splits`` splits.
    """
    lanes = tl.arange(0, LANES)
    total = tl.zeros([], tl.int64)
    for start in range(0, batch, LANES):
        b = start + lanes
        ok = b < batch
        first, end = reach(seqlens_ptr, kv_begin_ptr, q_offsets_ptr, b, ok, capacity, q_len, tokens, window)
        tl.store(cut.table_ptr + SEQLENS * cut.pitch + b, end, mask=ok)
        tl.store(cut.table_ptr + FIRST * cut.pitch + b, first, mask=ok)
        total += tl.sum(tl.where(ok, pieces(end - first, TILE), 0).to(tl.int64), 0)
    tl.debug_barrier()
    if INVARIANT:
        share = tl.maximum(pieces(total, workers), 1)
    else:
        share = tl.maximum(pieces(total, workers), least_tiles)
    tile = tl.zeros([], tl.int64)
    items = 0
    parts = 0
    for start in range(0, batch, LANES):
        b = start + lanes
        ok = b < batch
        end = tl.load(cut.table_ptr + SEQLENS * cut.pitch + b, mask=ok, other=0)
        first = tl.load(cut.table_ptr + FIRST * cut.pitch + b, mask=ok, other=0)
        tiles = pieces(end - first, TILE).to(tl.int64)
        begin = tile + tl.cumsum(tiles, 0) - tiles
        if INVARIANT:
            size = tl.maximum(pieces(tiles, most_splits), least_tiles)
            short = tl.zeros_like(size)
        else:
            size = tl.zeros_like(tiles) + share
            short = begin % share  # what the first split lacks of a stretch
        splits = pieces(tiles + tl.where(tiles > 0, short, 0), size).to(tl.int32)
        merged = tl.where(splits > 1, splits, 0)
        offset = items + tl.cumsum(splits, 0) - splits
        part = parts + tl.cumsum(merged, 0) - merged
        tl.store(cut.table_ptr + OFFSETS * cut.pitch + b, offset, mask=ok)
        tl.store(cut.table_ptr + PARTS * cut.pitch + b, part, mask=ok)
        write_items(cut, b, first, end, size * TILE, short * TILE, splits, offset, part)
        write_starts(cut, begin, tiles, share, size, short, offset)
        tile += tl.sum(tiles, 0)
        items += tl.sum(splits, 0)
        parts += tl.sum(merged, 0)
    tl.store(cut.table_ptr + OFFSETS * cut.pitch + batch, items)
    for start in range(pieces(total, share).to(tl.int32), workers + 1, LANES):
        tl.store(cut.workers_ptr + (start + lanes) * RECORD, items, mask=start + lanes <= workers)
    tl.debug_barrier()
    for start in range(0, workers, LANES):
        copy_first_items(cut, start + lanes, start + lanes < workers)


@triton.jit
def reach(seqlens_ptr, kv_begin_ptr, q_offsets_ptr, b, ok, capacity, q_len, tokens, window):
    """[first, end) of the keys that a sequence's queries may see; empty without queries."""
    if seqlens_ptr is None:
        end = tl.zeros_like(b) + capacity
    else:
        end = clamped(seqlens_ptr, b, ok, capacity)
    first = tl.zeros_like(b)
    if kv_begin_ptr is not None:
        first = clamped(kv_begin_ptr, b, ok, capacity)
    _, queries = queries_of(q_offsets_ptr, b, ok, tokens, q_len)
    if window is not None:
        first = tl.maximum(first.to(tl.int64), end - (queries.to(tl.int64) + window - 1)).to(tl.int32)
    return tl.minimum(tl.where(queries > 0, first, end), end), end


@triton.jit
def pieces(x, size):
    """x / size, rounded up, for any x >= 0: x + size - 1 might be too large for its type."""
    return x // size + (x % size != 0).to(x.dtype)


@triton.jit
def write_items(cut, b, first, end, size, short, splits, offset, part):
    """The items of each lane's sequence, 16 at once; the first split has ``short`` keys less than ``size``."""
    for start in range(0, tl.max(splits, 0), 16):
        number = start + tl.arange(0, 16)[None, :]
        here = number < splits[:, None]
        at = cut.items_ptr + (offset[:, None] + number) * RECORD
        key = number * size[:, None] - short[:, None]
        past = tl.minimum(first[:, None] + key + size[:, None], end[:, None])
        tl.store(at, b[:, None] + number * 0, mask=here)
        tl.store(at + 1, (first[:, None] + tl.maximum(key, 0)).to(tl.int32), mask=here)
        tl.store(at + 2, past.to(tl.int32), mask=here)
        tl.store(at + 3, end[:, None] + number * 0, mask=here)
        tl.store(at + 4, splits[:, None] + number * 0, mask=here)
        tl.store(at + 5, part[:, None] + number, mask=here)


@triton.jit
def write_starts(cut, begin, tiles, share, size, short, offset):
    """First items of the workers whose stretches begin in each lane's sequence, 16 at once."""
    worker = pieces(begin, share)
    count = (pieces(begin + tiles, share) - worker).to(tl.int32)
    for start in range(0, tl.max(count, 0), 16):
        number = start + tl.arange(0, 16)[None, :]
        past = (worker[:, None] + number) * share - begin[:, None]  # tiles of the sequence before the stretch
        item = offset[:, None] + pieces(past + short[:, None], size[:, None]).to(tl.int32)
        at = cut.workers_ptr + (worker[:, None] + number) * RECORD
        tl.store(at, item, mask=number < count[:, None])


@triton.jit
def copy_first_items(cut, worker, ok):
    """Each worker's first item into its record, and where the next worker begins."""
    at = cut.workers_ptr + worker * RECORD
    first = tl.load(at, mask=ok, other=0)
    past = tl.load(at + RECORD, mask=ok, other=0)
    for field in tl.static_range(6):
        number = tl.load(cut.items_ptr + first * RECORD + field, mask=ok & (first < past), other=0)
        tl.store(at + 1 + field, number, mask=ok)
    tl.store(at + LAST, past, mask=ok)
