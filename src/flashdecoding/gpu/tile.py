"""One tile of keys: scores, the softmax step, the weighted sum."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashdecoding.gpu.steps import INFINITY, LOG2_E, cache_rows, fold, load_block
from flashdecoding.gpu.visible import key_position, locate, seen_by


@triton.jit
def attend_tile(
    start, end, common, past, m, l, lost, o0, o1, q0, q1, rows, cache, pages, mask, slopes, position, kv_start,
    slope, anchor, scores, cap, blocks, D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BLOCK_N: tl.constexpr, FOLDS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr, TWINS: tl.constexpr, DIFFER: tl.constexpr, TREE: tl.constexpr, LATENT: tl.constexpr,
    CARE: tl.constexpr, SHIFT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Keys from ``start`` on, before ``end``, added to m, l, what l lost, and o. All rows see keys [common, past). With
    CARE a V that is not finite reaches the rows that see it, and no others.
    """
    k, v, k_base, v_base, page_row = cache
    key = start + tl.arange(0, BLOCK_N)
    inside = key < end
    seen = tl.broadcast_to(inside[None, :], [q0.shape[0], BLOCK_N])
    if CARE:
        seen = seen_by(rows, key, mask, blocks, TREE) & seen
        inside = inside & (tl.max(seen.to(tl.int32), 0) != 0)
    page, slot, exists = locate(pages, page_row, key, inside, PAGE_SIZE)
    k_rows = cache_rows(k, pages, page, slot, WIDE)
    k0 = load_block(k_base, k_rows, exists, k.stride_d, 0, D, D0)
    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1:
        k1 = load_block(k_base, k_rows, exists, k.stride_d, D0, D, D1)
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
    s = s.to(SUM)
    if cap is not None:
        s = soft_cap(s * scores.scale, cap)
    if slopes is not None:
        if cap is None:
            s = s * scores.scale
        distance = tl.abs(position[:, None] - key_position(key, kv_start, blocks)[None, :])
        s -= slope[:, None] * (distance - anchor[:, None]).to(SUM)
    if CARE:
        s = tl.where(seen, s, -INFINITY)
    elif (start < common) | (start + BLOCK_N > past):
        if DIFFER:
            seen = seen_by(rows, key, mask, blocks, TREE) & seen
        s = tl.where(seen, s, -INFINITY)
    p, m, l, lost, shrink = softmax_step(s, m, l, lost, scores.unit * LOG2_E, SHIFT, FOLDS)
    v_rows = k_rows if TWINS else cache_rows(v, pages, page, slot, WIDE)
    v0 = k0
    if tl.float32 == SUM and not LATENT:
        v0 = load_block(v_base, v_rows, exists, v.stride_d, 0, DV, E0)
    o0 = weigh(o0, shrink, p, v0, seen, exists, v_base, v_rows, v.stride_d, 0, DV, E0, CARE)
    if E1:
        v1 = o1
        if tl.float32 == SUM:
            v1 = load_block(v_base, v_rows, exists, v.stride_d, E0, DV, E1)
        o1 = weigh(o1, shrink, p, v1, seen, exists, v_base, v_rows, v.stride_d, E0, DV, E1, CARE)
    return m, l, lost, o0, o1


@triton.jit
def weigh(
    o, shrink, p, v, seen, exists, v_base, v_rows, stride_d, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, CARE: tl.constexpr,
):  # fmt: skip
    """o * shrink + p . v. Float32 goes key by key: products and sums in float64, since rounding each is too much. That
    keeps a V that is not finite to the rows that see it, as CARE does.
    """
    o *= shrink[:, None]
    if tl.float64 == o.dtype:
        o = by_key(o, p, seen, exists, v_base, v_rows, stride_d, FIRST, WIDTH, COLUMNS)
    else:
        if CARE:
            bad = v.to(tl.float32) * 0.0 != 0.0
            if has_bad(v.to(tl.float32)):
                o = by_key(o, None, seen, exists, v_base, v_rows, stride_d, FIRST, WIDTH, COLUMNS)
                v = tl.where(bad, 0.0, v)
        o = tl.dot(p.to(v.dtype), v, o)
    return o


@triton.jit
def has_bad(x):
    """Whether a number in x is not finite."""
    return tl.max(tl.max((x * 0.0 != 0.0).to(tl.int32), 1), 0) != 0


@triton.jit
def by_key(
    o, p, seen, exists, v_base, v_rows, stride_d, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """p . v + o in o's precision, if there is p; a V that is not finite reaches the rows that see it, and no others."""
    lane = tl.arange(0, v_rows.shape[0])
    column = FIRST + tl.arange(0, COLUMNS)
    for number in tl.range(v_rows.shape[0], loop_unroll_factor=1 if p is None else 4):
        here = lane == number
        sees = tl.max((seen & here[None, :]).to(tl.int32), 1) != 0
        at = v_base + tl.sum(tl.where(here, v_rows, 0), 0) + column.to(tl.int64) * stride_d
        exist = tl.max((exists & here).to(tl.int32), 0) != 0
        value = tl.load(at, mask=(column < WIDTH) & exist, other=0.0).to(o.dtype)
        bad = value * 0.0 != 0.0
        if p is not None:
            weight = tl.sum(tl.where(here[None, :], p, 0.0), 1)
            o += weight[:, None] * tl.where(bad, 0.0, value)[None, :]
        o = tl.where(sees[:, None] & bad[None, :], float("nan"), o)
    return o


@triton.jit
def soft_cap(s, cap):
    """cap * tanh(s / cap): a series where the difference of exponentials would lose digits."""
    x = s / cap
    size = tl.minimum(tl.abs(x), 20.0)
    y = x * x
    series = -0.008863235529902197
    series = series * y + 0.021869488536155203
    series = series * y - 0.05396825396825397
    series = series * y + 0.13333333333333333
    series = series * y - 0.3333333333333333
    series = series * y + 1.0
    large = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2_E)) + 1.0)
    tanh = tl.where(size < 0.35, x * series, tl.where(x < 0, -large, large))
    return tl.where(x == x, cap * tanh, x)


@triton.jit
def softmax_step(s, m, l, lost, factor, SHIFT: tl.constexpr, LEVELS: tl.constexpr):
    """Online softmax (2.4.1): weights of a tile, the new m, l and ``lost``, and what the numerator shrinks by.

    Weights are 2**((s - m) * factor + SHIFT). l (rows, places) adds up the weights of a tile, folded; in float32
    ``lost`` has what its roundings left out, because those of thousands of equal weights have one sign. (Folding such
    weights rounds nothing.)
    """
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == -INFINITY, 0.0, top)
    shrink = tl.exp2((m - base) * factor)
    # Not as one product and sum: what rounding base * factor leaves of a score of 1e30 is far too much.
    exponent = (s - base[:, None]) * factor
    if SHIFT:
        exponent += SHIFT
    p = tl.exp2(exponent)
    # The factors by way of the weights' layout, so that l keeps to that: the largest of equal numbers costs nothing.
    factors = fold(tl.broadcast_to(shrink[:, None], p.shape), LEVELS, True)
    kept, added = l * factors, fold(p, LEVELS, False)
    l = kept + added
    if tl.float32 == l.dtype:
        lost = lost * factors + (added - (l - kept))
    return p, top, l, lost, shrink
