"""The two stages as Triton kernels.

`planning.py` has cut the batch into splits. Stage 1 (:func:`split_kernel`): a program is one (worker, kv head, row
block), and a worker has a few splits. Its rows are queries x heads that share the kv head, at least 16 of them, as the
matrix unit has it. Stage 2 (:func:`merge_kernel`): a program merges the splits of an output row in order. A sequence
with one split is finished by stage 1, one with none by stage 2. Records of arguments: `arguments.py`.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdecoding.gpu.planning import OFFSETS, PARTS, RECORD
from flashdecoding.gpu.steps import (
    INFINITY,
    LOG2_E,
    cache_rows,
    clamped,
    key_position,
    keys_up_to,
    load_block,
    locate,
    masked,
    normaliser,
    ordered_sum,
    position_of,
    product,
    queries_of,
    soft_cap,
    softmax_step,
    store_block,
    store_results,
    weigh,
)


@triton.jit
def write_rows(pointer, offsets, ok, row0, row1, stride_d, E0: tl.constexpr, E1: tl.constexpr, DV: tl.constexpr):
    """Rows of o in their two column blocks."""
    store_block(pointer, offsets, ok, row0, stride_d, 0, DV, E0)
    if E1:
        store_block(pointer, offsets, ok, row1, stride_d, E0, DV, E1)


@triton.jit
def scaled(o, factor):
    """o * factor by rows; 0 where the factor is, whatever o holds."""
    return tl.where(factor[:, None] == 0.0, 0.0, o * factor[:, None])


@triton.jit
def visible_range(position, kv_begin, kv_end, kv_start, blocks, window, CAUSAL: tl.constexpr):
    """[low, high) of the keys that may be seen from a position, by length, causal and window."""
    low = position * 0 + kv_begin
    high = position * 0 + kv_end
    if CAUSAL:
        high = tl.minimum(high, keys_up_to(position, kv_start, blocks))
    if window is not None:
        low = tl.maximum(low, keys_up_to(position - window, kv_start, blocks))
    return tl.minimum(low, kv_end).to(tl.int32), high.to(tl.int32)  # high is at most kv_end


@triton.jit
def seen_by(seq, q_head, i, key, low, high, kv_start, q_start, queries, blocks, mask, TREE: tl.constexpr):
    """Which keys of a tile each row sees."""
    sees = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    if mask is not None:
        m_rows = seq.to(tl.int64) * mask.stride_b + q_head.to(tl.int64) * mask.stride_h
        m_rows += i.to(tl.int64) * mask.stride_q
        column = key_position(key, kv_start, blocks) - q_start
        sees = masked(mask, m_rows, key, column, queries, sees, TREE)
    return sees


@triton.jit
def lacks_pages(pages, page_row, begin, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether a page that keys [begin, end) stand on does not exist."""
    lost = tl.zeros([BLOCK], tl.int32)
    for start in range(begin // PAGE_SIZE, (end + PAGE_SIZE - 1) // PAGE_SIZE, BLOCK):
        number = start + tl.arange(0, BLOCK)
        wanted = number < (end + PAGE_SIZE - 1) // PAGE_SIZE
        page = tl.load(page_row + number.to(tl.int64) * pages.stride_p, mask=wanted & (begin < end), other=0)
        lost = lost | (wanted & ((page < 0) | (page >= pages.pages))).to(tl.int32)
    return tl.max(lost, 0) != 0


# Which numbers are 1 or multiples of 16 must not choose another order of summation, nor compile the kernel anew.
@triton.jit(
    do_not_specialize=["mask", "slopes", "window", "kv_heads", "group", "max_rows", "tokens", "capacity", "q_len"]
)
def split_kernel(
    q, k, v, out, results, parts, cut, places, pages, mask, slopes, sinks_ptr,
    scores, cap, window, blocks, kv_heads, group, max_rows, tokens, capacity, q_len,
    D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, DIFFER: tl.constexpr, WIDE: tl.constexpr, TREE: tl.constexpr, LATENT: tl.constexpr,
    SHIFT: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr, SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stage 1: a worker's splits, one after the other."""
    head = tl.program_id(0) % kv_heads
    worker = cut.workers_ptr + tl.program_id(0) // kv_heads * RECORD
    first = tl.load(worker)
    if PDL:
        gdc_launch_dependents()  # stage 2 may take its place; it waits for the end of this
    for item in range(first, tl.load(worker + RECORD)):
        record = tl.where(item == first, worker + 1, cut.items_ptr + item * RECORD)
        attend(
            record, head, q, k, v, out, results, parts, places, pages, mask, slopes, sinks_ptr, scores, cap, window,
            blocks, kv_heads, group, max_rows, tokens, capacity, q_len, D, DV, D0, D1, E0, E1, BLOCK_M, BLOCK_N,
            PAGE_SIZE, CAUSAL, DIFFER, WIDE, TREE, LATENT, SHIFT, STAGES, LEVELS, SUM,
        )  # fmt: skip


@triton.jit
def attend(
    item_ptr, head, q, k, v, out, results, parts, places, pages, mask, slopes, sinks_ptr,
    scores, cap, window, blocks, kv_heads, group, max_rows, tokens, capacity, q_len,
    D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, DIFFER: tl.constexpr, WIDE: tl.constexpr, TREE: tl.constexpr, LATENT: tl.constexpr,
    SHIFT: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One split, one kv head, one row block. DIFFER: rows may see different keys of a tile. WIDE: offsets within a
    sequence, or within a page, may not be int32. LATENT: v is the first columns of k.
    """
    seq, begin, end = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    splits, part = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    kv_end = tl.minimum(tl.load(item_ptr + 3), capacity)
    q_first, queries = queries_of(places.q_offsets_ptr, seq, seq >= 0, tokens, q_len)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_begin = 0
    if places.kv_begin_ptr is not None:
        kv_begin = clamped(places.kv_begin_ptr, seq, seq >= 0, capacity)
    kv_start = position_of(places.kv_start_ptr, seq, 0)
    i, g = row // group, row % group
    row_ok = i < queries
    q_head = head * group + g
    q_start = position_of(places.q_start_ptr, seq, kv_start + kv_end - queries)
    position = q_start + i
    if DIFFER:
        low, high = visible_range(position, kv_begin, kv_end, kv_start, blocks, window, CAUSAL)
        high = tl.where(row_ok, high, 0)
        end = tl.minimum(end, tl.max(tl.where(low < high, high, 0), 0))
        begin = tl.minimum(tl.maximum(begin, tl.min(tl.where(low < high, low, 2147483647), 0)), end)
    else:  # one query
        low, high = visible_range(q_start, kv_begin, kv_end, kv_start, blocks, window, CAUSAL)
        end = tl.where(queries > 0, tl.minimum(end, high), 0)
        begin = tl.minimum(tl.maximum(begin, low), end)

    token = (q_first + i).to(tl.int64)
    q_rows = seq.to(tl.int64) * q.stride_b + token * q.stride_s + q_head.to(tl.int64) * q.stride_h
    q0 = (load_block(q.ptr, q_rows, row_ok, q.stride_d, 0, D, D0) * scores.sign).to(q.ptr.dtype.element_ty)
    if D1:
        q1 = (load_block(q.ptr, q_rows, row_ok, q.stride_d, D0, D, D1) * scores.sign).to(q.ptr.dtype.element_ty)
    if slopes is not None:
        slope = tl.load(slopes.ptr + seq * slopes.stride_b + q_head, mask=row_ok, other=0.0).to(SUM)
        last = tl.maximum(tl.minimum(high, end) - 1, begin) + i * 0
        anchor = tl.abs(position - key_position(last, kv_start, blocks))

    k_base = k.ptr + head.to(tl.int64) * k.stride_h
    v_base = v.ptr + head.to(tl.int64) * v.stride_h
    page_row = k_base
    if pages is not None:
        page_row = pages.ptr + seq.to(tl.int64) * pages.stride_b
    else:
        k_base += seq.to(tl.int64) * k.stride_b
        v_base += seq.to(tl.int64) * v.stride_b
    lane = tl.arange(0, BLOCK_N)
    m = tl.full([BLOCK_M], -INFINITY, SUM)
    l = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    o0 = tl.zeros([BLOCK_M, E0], SUM)
    if E1:
        o1 = tl.zeros([BLOCK_M, E1], SUM)
    else:
        o1 = o0
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + lane
        inside = key < end
        if DIFFER:
            sees = seen_by(seq, q_head, i, key, low, high, kv_start, q_start, queries, blocks, mask, TREE)
            inside = inside & (tl.max(sees.to(tl.int32), 0) != 0)
        page, slot, exists = locate(pages, page_row, key, inside, PAGE_SIZE)
        rows = cache_rows(k, pages, page, slot, WIDE)
        k0 = load_block(k_base, rows, exists, k.stride_d, 0, D, D0)
        s = product(q0, tl.trans(k0), tl.zeros([BLOCK_M, BLOCK_N], SUM))
        if D1:
            k1 = load_block(k_base, rows, exists, k.stride_d, D0, D, D1)
            s = product(q1, tl.trans(k1), s)
        if cap is not None:
            s = soft_cap(s * scores.scale, cap)
        if slopes is not None:
            if cap is None:
                s = s * scores.scale
            distance = tl.abs(position[:, None] - key_position(key, kv_start, blocks)[None, :])
            s -= slope[:, None] * (distance - anchor[:, None]).to(SUM)
        seen = inside[None, :]
        if DIFFER:
            seen = sees & seen
        s = tl.where(seen, s, -INFINITY)
        p, m, l, shrink = softmax_step(s, m, l, scores.unit * LOG2_E, SHIFT)
        if tl.float32 == SUM:
            p = p.to(v.ptr.dtype.element_ty)
        if LATENT:
            v0 = k0
            v_rows = rows
        else:
            v_rows = cache_rows(v, pages, page, slot, WIDE)
            v0 = load_block(v_base, v_rows, exists, v.stride_d, 0, DV, E0)
        o0 = weigh(o0, shrink, p, v0, seen, DIFFER)
        if E1:
            v1 = load_block(v_base, v_rows, exists, v.stride_d, E0, DV, E1)
            o1 = weigh(o1, shrink, p, v1, seen, DIFFER)

    if pages is not None:  # noqa: SIM102 - one is for the compiler, the other for the GPU
        if lacks_pages(pages, page_row, begin, end, PAGE_SIZE, BLOCK_N):
            for start in range(begin, end, BLOCK_N):
                key = start + lane
                sees = (key < end)[None, :] & row_ok[:, None]
                if DIFFER:
                    sees &= seen_by(seq, q_head, i, key, low, high, kv_start, q_start, queries, blocks, mask, TREE)
                page, _, _ = locate(pages, page_row, key, key < end, PAGE_SIZE)
                lost = sees & ((page < 0) | (page >= pages.pages))[None, :]
                m = tl.where(tl.max(lost.to(tl.int32), 1) != 0, float("nan"), m)
            l = tl.where((m == m)[:, None], l, float("nan"))
    m *= scores.unit
    if slopes is not None:
        m -= slope * anchor.to(SUM)
    numerator = 2.0**-SHIFT  # l and o carry 2**SHIFT
    if DIFFER or slopes is not None or tl.float64 == SUM:
        l = ordered_sum(l, BLOCK_M, BLOCK_N, LEVELS) * numerator
    else:  # the scores' layout is that of the product: nothing else chooses it
        l = tl.sum(l, 1) * numerator
    m = tl.where(l == 0.0, -INFINITY, m)
    if splits == 1:
        if sinks_ptr is None:
            f = normaliser(m, l, None) * numerator
        else:
            f = normaliser(m, l, tl.load(sinks_ptr + q_head, mask=row_ok, other=0.0).to(SUM)) * numerator
        o_rows = seq.to(tl.int64) * out.stride_b + token * out.stride_s + q_head.to(tl.int64) * out.stride_h
        write_rows(out.ptr, o_rows, row_ok, scaled(o0, f), scaled(o1, f), out.stride_d, E0, E1, DV)
        at = seq.to(tl.int64) * results.stride_b + q_head.to(tl.int64) * results.stride_h + token * results.stride_s
        store_results(results, at, row_ok, m, l)
    else:
        f = normaliser(m, l, None) * numerator
        at = (part.to(tl.int64) * kv_heads + head) * max_rows + row
        write_rows(parts.o_ptr, at * DV, row_ok, scaled(o0, f), scaled(o1, f), 1, E0, E1, DV)
        tl.store(parts.ml_ptr + at * 2, m, mask=row_ok)
        tl.store(parts.ml_ptr + at * 2 + 1, l, mask=row_ok)


@triton.jit(do_not_specialize=["kv_heads", "group", "max_rows", "tokens", "q_len"])
def merge_kernel(
    out, results, parts, cut, places, sinks_ptr, kv_heads, group, max_rows, tokens, q_len,
    DV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Stage 2 (2.4.2): the states of a row's splits, in order, become BLOCKS column blocks of the output."""
    rows = kv_heads * max_rows
    seq, head = tl.program_id(0) // rows, tl.program_id(0) % rows // max_rows
    row = tl.program_id(0) % max_rows
    offsets = cut.table_ptr + OFFSETS * cut.pitch + seq
    splits = tl.load(offsets + 1) - tl.load(offsets)
    first = tl.load(cut.table_ptr + PARTS * cut.pitch + seq)
    q_first, queries = queries_of(places.q_offsets_ptr, seq, seq >= 0, tokens, q_len)
    if splits == 1 or row >= queries * group:
        return
    if PDL:
        gdc_wait()
    q_head = head * group + row % group
    token = (q_first + row // group).to(tl.int64)
    o_row = seq.to(tl.int64) * out.stride_b + token * out.stride_s + q_head.to(tl.int64) * out.stride_h
    part = (first.to(tl.int64) * kv_heads + head) * max_rows + row
    for block in tl.static_range(BLOCKS):
        e = (tl.program_id(1) * BLOCKS + block) * BLOCK_E + tl.arange(0, BLOCK_E)
        m, l, o = merge_parts(parts, part, kv_heads * max_rows, splits, e, DV, BLOCK_E, BLOCK_S)
        if sinks_ptr is None:
            f = normaliser(m, l, None)
        else:
            f = normaliser(m, l, tl.load(sinks_ptr + q_head).to(m.dtype))
        o = tl.where(f == 0.0, 0.0, o * f).to(out.ptr.dtype.element_ty)
        tl.store(out.ptr + o_row + e.to(tl.int64) * out.stride_d, o, mask=e < DV)
        if block == 0 and tl.program_id(1) == 0:
            at = seq.to(tl.int64) * results.stride_b + q_head.to(tl.int64) * results.stride_h
            store_results(results, at + token * results.stride_s, True, m, l)


@triton.jit
def merge_parts(parts, part, stride, splits, e, DV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr):
    """m, l and the numerator over ``splits`` states, the first at ``part`` and each ``stride`` further on."""
    SUM: tl.constexpr = parts.ml_ptr.dtype.element_ty
    m = tl.full([], -INFINITY, SUM)
    l = tl.zeros([], SUM)
    o = tl.zeros([BLOCK_E], SUM)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        ok = split < splits
        at = part + split.to(tl.int64) * stride
        part_m = tl.load(parts.ml_ptr + at * 2, mask=ok, other=-INFINITY)
        part_l = tl.load(parts.ml_ptr + at * 2 + 1, mask=ok, other=0.0)
        part_o = tl.load(parts.o_ptr + at[:, None] * DV + e[None, :], mask=ok[:, None] & (e < DV)[None, :], other=0.0)
        top = tl.maximum(m, tl.max(part_m, 0))
        base = tl.where(top == -INFINITY, 0.0, top)
        weight = tl.exp2((part_m - base) * LOG2_E) * part_l
        shrink = tl.exp2((m - base) * LOG2_E)
        o = o * shrink + tl.sum(part_o.to(SUM) * weight[:, None], 0)
        l = l * shrink + tl.sum(weight, 0)
        m = top
    return m, l, o
