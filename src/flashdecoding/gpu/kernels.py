"""The two stages as Triton kernels.

The plan (:func:`plan_kernel`) cuts a batch by its valid lengths, on the device. Stage 1 (:func:`split_kernel`): a
program is one (split, kv head, row block). Its rows are queries x heads that share the kv head, at least 16 of them, as
the matrix unit has it. Stage 2 (:func:`merge_kernel`): one program an output row merges the splits in order. A sequence
with one split is finished by stage 1.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashdecoding.gpu.steps import (
    INFINITY,
    LN_2,
    LOG2_E,
    cache_rows,
    key_position,
    keys_up_to,
    normaliser,
    ordered_sum,
    soft_cap,
    softmax_step,
)

ITEM_FIELDS = tl.constexpr(4)  # sequence, first key, one past the last, unused
SEQUENCE_FIELDS = tl.constexpr(
    8
)  # int64: kv_end, kv_begin, first query, queries, q_start, kv_start, first item, splits


@triton.jit
def scaled(o, factor):
    """o * factor by rows; 0 where the factor is, whatever o holds."""
    return tl.where(factor[:, None] == 0.0, 0.0, o * factor[:, None])


@triton.jit
def write_rows(pointer, offsets, ok, row0, row1, stride_d, E0: tl.constexpr, E1: tl.constexpr, DV: tl.constexpr):
    """Rows of o in their two column blocks."""
    e = tl.arange(0, E0)
    inside = ok[:, None] & (e < DV)[None, :]
    tl.store(pointer + offsets[:, None] + e[None, :] * stride_d, row0.to(pointer.dtype.element_ty), mask=inside)
    if E1:
        e1 = E0 + tl.arange(0, E1)
        inside = ok[:, None] & (e1 < DV)[None, :]
        tl.store(pointer + offsets[:, None] + e1[None, :] * stride_d, row1.to(pointer.dtype.element_ty), mask=inside)


# What a view of a mask or of slopes has for strides must not choose another order of summation.
@triton.jit(
    do_not_specialize=["mask_stride_b", "mask_stride_h", "mask_stride_q", "mask_stride_k", "slopes_stride_b"],
    do_not_specialize_on_alignment=["mask", "slopes", "sinks"],
)
def split_kernel(
    q, k, v, out, lse, state_m, state_l, part_o, part_ml, items, sequences, pages, mask, slopes, sinks,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d, out_stride_b, out_stride_h, out_stride_s, out_stride_d,
    lse_stride_b, lse_stride_h, lse_stride_s, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    pages_stride_b, pages_stride_p, slopes_stride_b,
    kv_heads, max_rows, page_count, unit, q_sign, score_scale, cap, window, kv_block, kv_stride,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCKED: tl.constexpr, MULTI: tl.constexpr, MASK: tl.constexpr,
    CAPPED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STATE: tl.constexpr,
    LATENT: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Stage 1. MASK: 0 none, 1 dense, 2 a draft tree. MULTI: more than one query, so rows see different keys."""
    item = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    at = items + item * ITEM_FIELDS
    seq = tl.load(at)
    if seq < 0:
        return
    begin, end = tl.load(at + 1), tl.load(at + 2)
    record = sequences + seq * SEQUENCE_FIELDS
    kv_end, kv_begin = tl.load(record).to(tl.int32), tl.load(record + 1).to(tl.int32)
    q_first, q_len = tl.load(record + 2).to(tl.int32), tl.load(record + 3).to(tl.int32)
    q_start, kv_start = tl.load(record + 4), tl.load(record + 5)
    splits = tl.load(record + 7).to(tl.int32)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    if tl.program_id(1) * BM >= q_len * GROUP:
        return
    i, g = row // GROUP, row % GROUP
    row_ok = i < q_len
    q_head = head * GROUP + g
    position = q_start + i
    low = tl.zeros([BM], tl.int64) + kv_begin
    high = tl.zeros([BM], tl.int64) + kv_end
    if CAUSAL:
        high = tl.minimum(high, keys_up_to(position, kv_start, kv_block, kv_stride, BLOCKED))
    if WINDOW:
        low = tl.maximum(low, keys_up_to(position - window, kv_start, kv_block, kv_stride, BLOCKED))
    high = tl.where(row_ok, high, 0).to(tl.int32)  # at most kv_end
    low = tl.minimum(low, kv_end).to(tl.int32)
    end = tl.minimum(end, tl.max(tl.where(low < high, high, 0), 0))
    begin = tl.minimum(tl.maximum(begin, tl.min(tl.where(low < high, low, 2147483647), 0)), end)

    # Packed queries are one row of q, with a stride of 0 from sequence to sequence; else q_first is 0.
    q_batch = seq.to(tl.int64)
    d0 = tl.arange(0, D0)
    q_rows = q_batch * q_stride_b + (q_first + i).to(tl.int64) * q_stride_s + q_head.to(tl.int64) * q_stride_h
    q0 = tl.load(q + q_rows[:, None] + d0[None, :] * q_stride_d, mask=row_ok[:, None] & (d0 < D)[None, :], other=0.0)
    q0 = (q0 * q_sign).to(q.dtype.element_ty)
    if D1:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(
            q + q_rows[:, None] + d1[None, :] * q_stride_d, mask=row_ok[:, None] & (d1 < D)[None, :], other=0.0
        )
        q1 = (q1 * q_sign).to(q.dtype.element_ty)
    if ALIBI:
        slope = tl.load(slopes + seq * slopes_stride_b + q_head, mask=row_ok, other=0.0).to(SUM)
        last = tl.maximum(tl.minimum(high, end) - 1, begin)
        anchor = tl.abs(position - key_position(last, kv_start, kv_block, kv_stride, BLOCKED))

    k_base = k + head.to(tl.int64) * k_stride_h
    v_base = v + head.to(tl.int64) * v_stride_h
    page_row = pages + seq.to(tl.int64) * pages_stride_b
    if not PAGE:
        k_base += seq.to(tl.int64) * k_stride_b
        v_base += seq.to(tl.int64) * v_stride_b
    e0 = tl.arange(0, E0)
    m = tl.full([BM], -INFINITY, SUM)
    l = tl.zeros([BM, BN], SUM)
    o0 = tl.zeros([BM, E0], SUM)
    if E1:
        o1 = tl.zeros([BM, E1], SUM)
    else:
        o1 = o0
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        key = start + tl.arange(0, BN)
        inside = key < end
        if MULTI or MASK:
            sees = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            if MASK:
                m_rows = seq.to(tl.int64) * mask_stride_b + q_head.to(tl.int64) * mask_stride_h
                m_rows += i.to(tl.int64) * mask_stride_q
                if MASK == 2:
                    column = key_position(key, kv_start, kv_block, kv_stride, BLOCKED) - q_start
                    drafted = (column >= 0) & (column < q_len)
                    word = tl.load(
                        mask + m_rows[:, None] + column.to(tl.int64)[None, :] * mask_stride_k,
                        mask=sees & drafted[None, :], other=1,
                    )  # fmt: skip
                else:
                    word = tl.load(
                        mask + m_rows[:, None] + key.to(tl.int64)[None, :] * mask_stride_k, mask=sees, other=0
                    )
                sees = sees & (word != 0)
            inside = inside & (tl.max(sees.to(tl.int32), 0) != 0)
        rows, exists = cache_rows(page_row, key, inside, page_count, k_stride_b, k_stride_s, pages_stride_p, PAGE)
        k0 = tl.load(
            k_base + rows[:, None] + d0[None, :] * k_stride_d, mask=exists[:, None] & (d0 < D)[None, :], other=0.0
        )
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1:
            k1 = tl.load(
                k_base + rows[:, None] + d1[None, :] * k_stride_d, mask=exists[:, None] & (d1 < D)[None, :], other=0.0
            )
            s += tl.dot(q1, tl.trans(k1), input_precision="ieee")
        s = s.to(SUM)
        if CAPPED:
            s = soft_cap(s * score_scale, cap)
        if ALIBI:
            if not CAPPED:
                s = s * score_scale
            distance = tl.abs(position[:, None] - key_position(key, kv_start, kv_block, kv_stride, BLOCKED)[None, :])
            s -= slope[:, None] * (distance - anchor[:, None]).to(SUM)
        if PAGE:  # a page that does not exist
            s = tl.where(exists[None, :], s, float("nan"))
        if MULTI or MASK:
            s = tl.where(sees & inside[None, :], s, -INFINITY)
        else:
            s = tl.where(inside[None, :], s, -INFINITY)
        p, m, l, shrink = softmax_step(s, m, l, unit * LOG2_E, SHIFT)
        p = p.to(v.dtype.element_ty)
        if LATENT:
            v0 = k0
        else:
            v_rows, _ = cache_rows(page_row, key, inside, page_count, v_stride_b, v_stride_s, pages_stride_p, PAGE)
            v0 = tl.load(
                v_base + v_rows[:, None] + e0[None, :] * v_stride_d,
                mask=exists[:, None] & (e0 < DV)[None, :],
                other=0.0,
            )
        o0 *= shrink[:, None]
        if MULTI or MASK:
            wide = v0.to(tl.float32)
            bad = wide * 0.0 != 0.0
            v0 = tl.where(bad, 0.0, v0).to(v.dtype.element_ty)
            if tl.max(tl.max(bad.to(tl.int32), 1), 0) != 0:
                count = tl.dot((sees & inside[None, :]).to(tl.float16), bad.to(tl.float16))
                o0 = tl.where(count > 0, float("nan"), o0)
        if tl.float32 == SUM:
            o0 = tl.dot(p, v0, o0, input_precision="ieee")
        else:
            o0 += tl.dot(p, v0, input_precision="ieee").to(SUM)
        if E1:
            e1 = E0 + tl.arange(0, E1)
            if LATENT:
                v_rows = rows
            v1 = tl.load(
                v_base + v_rows[:, None] + e1[None, :] * v_stride_d,
                mask=exists[:, None] & (e1 < DV)[None, :],
                other=0.0,
            )
            o1 *= shrink[:, None]
            if MULTI or MASK:
                bad1 = v1.to(tl.float32) * 0.0 != 0.0
                v1 = tl.where(bad1, 0.0, v1).to(v.dtype.element_ty)
                if tl.max(tl.max(bad1.to(tl.int32), 1), 0) != 0:
                    count1 = tl.dot((sees & inside[None, :]).to(tl.float16), bad1.to(tl.float16))
                    o1 = tl.where(count1 > 0, float("nan"), o1)
            if tl.float32 == SUM:
                o1 = tl.dot(p, v1, o1, input_precision="ieee")
            else:
                o1 += tl.dot(p, v1, input_precision="ieee").to(SUM)

    m *= unit
    if ALIBI:
        m -= slope * anchor.to(SUM)
    numerator = 2.0**-SHIFT  # l and o carry 2**SHIFT
    l = ordered_sum(l, BM, BN, LEVELS) * numerator
    m = tl.where(l == 0.0, -INFINITY, m)
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks + q_head, mask=row_ok, other=0.0).to(SUM)
        else:
            sink = m
        f = normaliser(m, l, sink, SINKS) * numerator
        o_rows = q_batch * out_stride_b + (q_first + i).to(tl.int64) * out_stride_s
        o_rows += q_head.to(tl.int64) * out_stride_h
        write_rows(out, o_rows, row_ok, scaled(o0, f), scaled(o1, f), out_stride_d, E0, E1, DV)
        l_rows = q_batch * lse_stride_b + q_head.to(tl.int64) * lse_stride_h + (q_first + i).to(tl.int64) * lse_stride_s
        if LSE:
            tl.store(lse + l_rows, m + tl.log2(l) * LN_2, mask=row_ok)
        if STATE:
            tl.store(state_m + l_rows, m, mask=row_ok)
            tl.store(state_l + l_rows, l, mask=row_ok)
    else:
        f = normaliser(m, l, m, False) * numerator
        part = (item.to(tl.int64) * kv_heads + head) * max_rows + row
        write_rows(part_o, part * DV, row_ok, scaled(o0, f), scaled(o1, f), 1, E0, E1, DV)
        tl.store(part_ml + part * 2, m, mask=row_ok)
        tl.store(part_ml + part * 2 + 1, l, mask=row_ok)


@triton.jit
def merge_kernel(
    part_o, part_ml, out, lse, state_m, state_l, sequences, sinks,
    out_stride_b, out_stride_h, out_stride_s, out_stride_d, lse_stride_b, lse_stride_h, lse_stride_s,
    kv_heads, max_rows,
    GROUP: tl.constexpr, DV: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Stage 2 for one row (2.4.2): states of its splits, in order, become the output."""
    seq = tl.program_id(0)
    head, row = tl.program_id(1) // max_rows, tl.program_id(1) % max_rows
    record = sequences + seq * SEQUENCE_FIELDS
    q_first, q_len = tl.load(record + 2).to(tl.int32), tl.load(record + 3).to(tl.int32)
    first, splits = tl.load(record + 6).to(tl.int32), tl.load(record + 7).to(tl.int32)
    if splits < 2 or row >= q_len * GROUP:
        return
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    SUM: tl.constexpr = part_ml.dtype.element_ty
    m = tl.full([], -INFINITY, SUM)
    l = tl.zeros([], SUM)
    o = tl.zeros([BE], SUM)
    for start in range(0, splits, BS):
        split = start + tl.arange(0, BS)
        ok = split < splits
        part = ((first + split).to(tl.int64) * kv_heads + head) * max_rows + row
        part_m = tl.load(part_ml + part * 2, mask=ok, other=-INFINITY)
        part_l = tl.load(part_ml + part * 2 + 1, mask=ok, other=0.0)
        part_row = tl.load(part_o + part[:, None] * DV + e[None, :], mask=ok[:, None] & (e < DV)[None, :], other=0.0)
        part_row = part_row.to(SUM)
        top = tl.maximum(m, tl.max(part_m, 0))
        base = tl.where(top == -INFINITY, 0.0, top)
        weight = tl.exp2((part_m - base) * LOG2_E) * part_l
        shrink = tl.exp2((m - base) * LOG2_E)
        o = o * shrink + tl.sum(part_row * weight[:, None], 0)
        l = l * shrink + tl.sum(weight, 0)
        m = top
    i, q_head = row // GROUP, head * GROUP + row % GROUP
    if SINKS:
        sink = tl.load(sinks + q_head).to(SUM)
    else:
        sink = m
    f = normaliser(m, l, sink, SINKS)
    o_row = seq.to(tl.int64) * out_stride_b + (q_first + i).to(tl.int64) * out_stride_s
    o_row += q_head.to(tl.int64) * out_stride_h
    tl.store(out + o_row + e * out_stride_d, tl.where(f == 0.0, 0.0, o * f).to(out.dtype.element_ty), mask=e < DV)
    if tl.program_id(2) == 0:
        at = seq.to(tl.int64) * lse_stride_b + q_head.to(tl.int64) * lse_stride_h
        at += (q_first + i).to(tl.int64) * lse_stride_s
        if LSE:
            tl.store(lse + at, m + tl.log2(l) * LN_2)
        if STATE:
            tl.store(state_m + at, m)
            tl.store(state_l + at, l)


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
