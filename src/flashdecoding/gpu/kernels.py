"""The two stages as Triton kernels.

`planning.py` has cut the batch into splits. Stage 1 (:func:`split_kernel`): a program is one (split, kv head, row
block). Its rows are queries x heads that share the kv head, at least 16 of them, as the matrix unit has it. Stage 2
(:func:`merge_kernel`): one program an output row merges the splits in order. A sequence with one split is finished by
stage 1.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashdecoding.gpu.planning import ITEM_FIELDS, SEQUENCE_FIELDS
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
    weigh,
)


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
        seen = inside[None, :]
        if MULTI or MASK:
            seen = sees & seen
        s = tl.where(seen, s, -INFINITY)
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
        o0 = weigh(o0, shrink, p, v0, seen, MULTI or MASK)
        if E1:
            e1 = E0 + tl.arange(0, E1)
            if LATENT:
                v_rows = rows
            v1 = tl.load(
                v_base + v_rows[:, None] + e1[None, :] * v_stride_d,
                mask=exists[:, None] & (e1 < DV)[None, :],
                other=0.0,
            )
            o1 = weigh(o1, shrink, p, v1, seen, MULTI or MASK)

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
