"""Stage 1: a program is one (worker, kv head, row block), and a worker has a few splits (`planning.py`).

Its rows are queries x heads that share the kv head, at least 16 of them, as the matrix unit has it, so that K and V are
read once for all of them. Tiles are one pipelined loop, whose product would spread a V that is not finite to rows that
do not see it, where rows see different keys. A split with such an outcome is computed again by a loop that takes care.
Records of arguments: `arguments.py`.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdecoding.gpu.planning import RECORD
from flashdecoding.gpu.steps import (
    INFINITY,
    clamped,
    fold,
    load_block,
    normalised,
    normaliser,
    position_of,
    queries_of,
    store_block,
    store_results,
)
from flashdecoding.gpu.tile import attend_tile, has_bad
from flashdecoding.gpu.visible import key_position, keys_up_to, lacks_pages, lost_rows, visible_range


# A number that happens to be 1 or a multiple of 16 must not compile the kernel anew. (Strides in records may, and one
# query should.)
@triton.jit(do_not_specialize=["window", "tokens", "capacity"], do_not_specialize_on_alignment=["q_len"])
def split_kernel(
    q, k, v, out, results, parts, cut, places, pages, mask, slopes, sinks,
    scores, cap, window, blocks, tokens, capacity, q_len, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLDS: tl.constexpr, PLACES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr, TWINS: tl.constexpr,
    CAUSAL: tl.constexpr, DIFFER: tl.constexpr, TREE: tl.constexpr, LATENT: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A worker's splits, one after the other. DIFFER: rows may see different keys. WIDE: see `cache_rows`. TWINS: v has
    the strides of k. LATENT: v is the first columns of k. PDL: this may be placed before what comes earlier has ended,
    and stage 2 before this has.
    """
    head = tl.program_id(0) % KV_HEADS
    worker = cut.workers_ptr + tl.program_id(0) // KV_HEADS * RECORD
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    i, q_head = row // GROUP, head * GROUP + row % GROUP
    if PDL:
        gdc_wait()  # nothing is read or written before
        gdc_launch_dependents()
    item, past = tl.load(worker), tl.load(worker + RECORD)
    seq, begin, end, length, splits, part = load_item(worker + 1, True)
    while item < past:
        item += 1
        following = load_item(cut.items_ptr + item * RECORD, item < past)
        kv_end = tl.minimum(length, capacity)
        q_first, queries = queries_of(places.q_offsets_ptr, seq, seq >= 0, tokens, q_len)
        token = (q_first + i).to(tl.int64)
        m, l, o0, o1 = attend(
            seq, begin, end, kv_end, token, i, queries, head, q_head, q, k, v, places, pages, mask, slopes, scores,
            cap, window, blocks, capacity, D, DV, D0, D1, E0, E1, BLOCK_M, BLOCK_N, FOLDS, PLACES,
            PAGE_SIZE, WIDE, TWINS, CAUSAL, DIFFER, TREE, LATENT, SHIFT, STAGES, SUM,
        )  # fmt: skip
        ok = i < queries
        if splits == 1:
            sink = None
            if sinks is not None:
                sink = tl.load(sinks.ptr + q_head, mask=ok, other=0.0).to(SUM)
            f = normaliser(m, l, sink) * 2.0**-SHIFT
            at = seq.to(tl.int64) * out.stride_b + token * out.stride_s + q_head.to(tl.int64) * out.stride_h
            write_rows(out.ptr, at, ok, o0, o1, f, out.stride_d, E0, E1, DV)
            at = seq.to(tl.int64) * results.stride_b + q_head.to(tl.int64) * results.stride_h
            store_results(results, at + token * results.stride_s, ok, m, l)
        else:
            at = (part.to(tl.int64) * KV_HEADS + head) * (q_len * GROUP) + row
            write_rows(parts.o_ptr, at * DV, ok, o0, o1, normaliser(m, l, None) * 2.0**-SHIFT, 1, E0, E1, DV)
            tl.store(parts.ml_ptr + at * 2, m, mask=ok)
            tl.store(parts.ml_ptr + at * 2 + 1, l, mask=ok)
        seq, begin, end, length, splits, part = following


@triton.jit
def load_item(at, ok):
    """Sequence, first key, one past the last, length of the sequence, its splits, the place of this one's state."""
    seq = tl.load(at, mask=ok, other=0)
    begin, end = tl.load(at + 1, mask=ok, other=0), tl.load(at + 2, mask=ok, other=0)
    length, splits = tl.load(at + 3, mask=ok, other=0), tl.load(at + 4, mask=ok, other=0)
    return seq, begin, end, length, splits, tl.load(at + 5, mask=ok, other=0)


@triton.jit
def write_rows(ptr, rows, ok, o0, o1, factor, stride_d, E0: tl.constexpr, E1: tl.constexpr, DV: tl.constexpr):
    """Rows of o times their factors, in two column blocks."""
    store_block(ptr, rows, ok, normalised(o0, factor[:, None]), stride_d, 0, DV, E0)
    if E1:
        store_block(ptr, rows, ok, normalised(o1, factor[:, None]), stride_d, E0, DV, E1)


@triton.jit
def attend(
    seq, begin, end, kv_end, token, i, queries, head, q_head, q, k, v, places, pages, mask, slopes, scores,
    cap, window, blocks, capacity,
    D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLDS: tl.constexpr, PLACES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr, TWINS: tl.constexpr,
    CAUSAL: tl.constexpr, DIFFER: tl.constexpr, TREE: tl.constexpr, LATENT: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """m and l of one split, and the numerator o in two column blocks, times 2**SHIFT."""
    kv_begin = 0
    if places.kv_begin_ptr is not None:
        kv_begin = clamped(places.kv_begin_ptr, seq, seq >= 0, capacity)
    kv_start = position_of(places.kv_start_ptr, seq, 0)
    q_start = position_of(places.q_start_ptr, seq, kv_start + kv_end - queries)
    position = q_start + i
    ok = i < queries
    if DIFFER:
        low, high = visible_range(position, kv_begin, kv_end, kv_start, blocks, window, CAUSAL)
        high = tl.where(ok, high, 0)
        sees_some = low < high
        end = tl.minimum(end, tl.max(tl.where(sees_some, high, 0), 0))
        begin = tl.minimum(tl.maximum(begin, tl.min(tl.where(sees_some, low, 2147483647), 0)), end)
        # All rows see keys [common, past) of the split.
        common = tl.max(tl.where(ok, low, 0), 0)
        past = tl.minimum(tl.min(tl.where(ok, high, 2147483647), 0), end)
        if TREE:
            past = tl.minimum(past, tl.minimum(keys_up_to(q_start - 1, kv_start, blocks), kv_end).to(tl.int32))
    else:  # one query
        low, high = visible_range(q_start, kv_begin, kv_end, kv_start, blocks, window, CAUSAL)
        end = tl.where(queries > 0, tl.minimum(end, high), 0)
        begin = tl.minimum(tl.maximum(begin, low), end)
        common, past = begin, end
    if slopes is None:
        slope, anchor = 0.0, 0.0
    else:
        slope = tl.load(slopes.ptr + seq * slopes.stride_b + q_head, mask=ok, other=0.0).to(SUM)
        last = tl.maximum(tl.minimum(high, end) - 1, begin) + i * 0
        anchor = tl.abs(position - key_position(last, kv_start, blocks))

    q_rows = seq.to(tl.int64) * q.stride_b + token * q.stride_s + q_head.to(tl.int64) * q.stride_h
    q0 = (load_block(q.ptr, q_rows, ok, q.stride_d, 0, D, D0) * scores.sign).to(q.ptr.dtype.element_ty)
    q1 = q0
    if D1:
        q1 = (load_block(q.ptr, q_rows, ok, q.stride_d, D0, D, D1) * scores.sign).to(q.ptr.dtype.element_ty)
    k_base = k.ptr + head.to(tl.int64) * k.stride_h
    v_base = v.ptr + head.to(tl.int64) * v.stride_h
    page_row = k_base
    if pages is None:
        k_base += seq.to(tl.int64) * k.stride_b
        v_base += seq.to(tl.int64) * v.stride_b
    else:
        page_row = pages.ptr + seq.to(tl.int64) * pages.stride_b
    m = tl.full([BLOCK_M], -INFINITY, SUM)
    l = tl.zeros([BLOCK_M, BLOCK_N >> FOLDS], SUM)
    lost = l
    o0 = tl.zeros([BLOCK_M, E0], SUM)
    o1 = o0
    if E1:
        o1 = tl.zeros([BLOCK_M, E1], SUM)
    rows = (seq, q_head, i, low, high, kv_start, q_start, queries)
    cache = (k, v, k_base, v_base, page_row)
    FAST: tl.constexpr = not DIFFER or (tl.float32 == SUM and (mask is None or TREE))
    fast_end = end
    # With causal and window a tile gives the same bits in both loops (tests/test_contract.py), so that a split may be
    # computed again. With a draft tree a few results in ten thousand differ, and another row's V would decide which
    # bits a row gets: its tiles always go through the second loop.
    if TREE:
        fast_end = tl.minimum(begin + tl.maximum(past - begin, 0) // BLOCK_N * BLOCK_N, end)
    if FAST:
        for start in tl.range(begin, fast_end, BLOCK_N, num_stages=STAGES):
            m, l, lost, o0, o1 = attend_tile(
                start, fast_end, common, past, m, l, lost, o0, o1, q0, q1, rows, cache, pages, mask, slopes, position,
                kv_start, slope, anchor, scores, cap, blocks, D, DV, D0, D1, E0, E1, BLOCK_N, FOLDS, PAGE_SIZE,
                WIDE, TWINS, DIFFER, TREE, LATENT, False, SHIFT, SUM,
            )  # fmt: skip
    if DIFFER:
        if FAST:
            spoilt = has_bad(o0)
            if E1:
                spoilt = spoilt | has_bad(o1)
        else:
            spoilt = begin < end
        if spoilt:
            m = tl.full([BLOCK_M], -INFINITY, SUM)
            l = tl.zeros([BLOCK_M, BLOCK_N >> FOLDS], SUM)
            lost = l
            o0 = tl.zeros([BLOCK_M, E0], SUM)
            o1 = o0
            if E1:
                o1 = tl.zeros([BLOCK_M, E1], SUM)
        if TREE or spoilt:
            for start in tl.range(tl.where(spoilt, begin, fast_end), end, BLOCK_N, num_stages=1):
                m, l, lost, o0, o1 = attend_tile(
                    start, end, common, past, m, l, lost, o0, o1, q0, q1, rows, cache, pages, mask, slopes, position,
                    kv_start, slope, anchor, scores, cap, blocks, D, DV, D0, D1, E0, E1, BLOCK_N, FOLDS,
                    PAGE_SIZE, WIDE, TWINS, DIFFER, TREE, LATENT, True, SHIFT, SUM,
                )  # fmt: skip
    l += lost
    if pages is not None:  # noqa: SIM102 - one is for the compiler, the other for the GPU
        if lacks_pages(pages, page_row, begin, end, PAGE_SIZE, 1024):
            m = lost_rows(m, rows, ok, begin, end, pages, page_row, mask, blocks, BLOCK_N, PAGE_SIZE, DIFFER, TREE)
            l = tl.where((m == m)[:, None], l, float("nan"))
    m *= scores.unit
    if slopes is not None:
        m -= slope * anchor.to(SUM)
    l = tl.reshape(fold(l, PLACES, False), [BLOCK_M]) * 2.0**-SHIFT
    return tl.where(l == 0.0, -INFINITY, m), l, o0, o1
