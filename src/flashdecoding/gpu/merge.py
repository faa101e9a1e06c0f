"""Stage 2 (2.4.2): a program merges the states of an output row's splits, in order.

A sequence with one split is finished by stage 1; one with none, which has no keys in reach, is finished here.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdecoding.gpu.planning import OFFSETS, PARTS
from flashdecoding.gpu.steps import INFINITY, LOG2_E, normalised, normaliser, queries_of, store_results


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["q_len"])
def merge_kernel(
    out, results, parts, cut, places, sinks, tokens, q_len, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The states of a row's splits become BLOCK_E columns of the output. PDL: this may be placed while stage 1 runs,
    and what follows while this does. The plan is read before the wait: it was there before stage 1 let this be placed
    (`Shape.launching`).
    """
    if PDL:
        gdc_launch_dependents()
    max_rows = q_len * GROUP
    rows = KV_HEADS * max_rows
    seq, head = tl.program_id(0) // rows, tl.program_id(0) % rows // max_rows
    row = tl.program_id(0) % max_rows
    offsets = cut.table_ptr + OFFSETS * cut.pitch + seq
    splits = tl.load(offsets + 1) - tl.load(offsets)
    first = tl.load(cut.table_ptr + PARTS * cut.pitch + seq)
    q_first, queries = queries_of(places.q_offsets_ptr, seq, seq >= 0, tokens, q_len)
    if PDL and tl.program_id(0) + tl.program_id(1) == 0:
        gdc_wait()  # this grid must not end, and let what follows begin, before stage 1 has ended
    if splits == 1 or row >= queries * GROUP:
        return
    if PDL:
        gdc_wait()
    q_head = head * GROUP + row % GROUP
    token = (q_first + row // GROUP).to(tl.int64)
    o_row = seq.to(tl.int64) * out.stride_b + token * out.stride_s + q_head.to(tl.int64) * out.stride_h
    part = (first.to(tl.int64) * KV_HEADS + head) * max_rows + row
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    m, l, o = merge_parts(parts, part, rows, splits, e, DV, BLOCK_E, BLOCK_S)
    if sinks is None:
        f = normaliser(m, l, None)
    else:
        f = normaliser(m, l, tl.load(sinks.ptr + q_head).to(m.dtype))
    o = normalised(o, f).to(out.ptr.dtype.element_ty)
    tl.store(out.ptr + o_row + e.to(tl.int64) * out.stride_d, o, mask=e < DV)
    if tl.program_id(1) == 0:
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
