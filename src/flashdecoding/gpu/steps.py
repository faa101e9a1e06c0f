"""Steps that the kernels share: which keys a row may see, a tile's rows of the cache, online softmax, sinks."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def keys_up_to(position, kv_start, kv_block, kv_stride, BLOCKED: tl.constexpr):
    """Number of local keys at positions <= ``position``."""
    past = position - kv_start
    if BLOCKED:
        whole = past // kv_stride * kv_block + tl.minimum(past % kv_stride + 1, kv_block)
        count = tl.where(past < 0, 0, whole)
    else:
        count = tl.maximum(past + 1, 0)
    return count


@triton.jit
def key_position(key, kv_start, kv_block, kv_stride, BLOCKED: tl.constexpr):
    if BLOCKED:
        position = kv_start + key // kv_block * kv_stride + key % kv_block
    else:
        position = kv_start + key
    return position


@triton.jit
def cache_rows(pages, key, inside, page_count, stride_b, stride_s, pages_stride, PAGE: tl.constexpr):
    """Offsets of keys' rows in the cache, and which of them may be loaded: the only place that knows about pages."""
    if PAGE:
        page = tl.load(pages + (key // PAGE).to(tl.int64) * pages_stride, mask=inside, other=0)
        exists = (page >= 0) & (page < page_count)
        rows = page.to(tl.int64) * stride_b + (key % PAGE).to(tl.int64) * stride_s
    else:
        exists = inside
        rows = key.to(tl.int64) * stride_s
    return rows, exists & inside


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
def softmax_step(s, m, l, factor, shift):
    """Online softmax (2.4.1): weights of a tile, the new m and l, and what the numerator shrinks by.

    Weights are 2**((s - m) * factor + shift). l (rows, keys of a tile) adds them up by their place in the tile.
    """
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == -INFINITY, 0.0, top)
    p = tl.exp2((s - base[:, None]) * factor + shift)
    shrink = tl.exp2((m - base) * factor)
    return p, top, l * shrink[:, None] + p, shrink


@triton.jit
def weigh(o, shrink, p, v, seen, DIFFER: tl.constexpr):
    """o * shrink + p . v; where rows DIFFER in what is ``seen``, a V that is not finite reaches those that see it."""
    o *= shrink[:, None]
    if DIFFER:
        bad = v.to(tl.float32) * 0.0 != 0.0
        v = tl.where(bad, 0.0, v).to(p.dtype)
        if tl.max(tl.max(bad.to(tl.int32), 1), 0) != 0:
            count = tl.dot(seen.to(tl.float16), bad.to(tl.float16))
            o = tl.where(count > 0, float("nan"), o)
    if o.dtype == tl.float32:
        o = tl.dot(p, v, o, input_precision="ieee")
    else:
        o += tl.dot(p, v, input_precision="ieee").to(o.dtype)
    return o


@triton.jit
def ordered_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum of each row of x (ROWS, COLUMNS = 2**LEVELS) by neighbours.

    The order of `tl.sum` follows the layout that the compiler chose, which strides may change; this one does not.
    """
    for level in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(x, [ROWS, COLUMNS >> (level + 1), 2]))
        x = first + second
    return tl.reshape(x, [ROWS])


@triton.jit
def normaliser(m, l, sink, SINKS: tl.constexpr):
    """What the numerator is multiplied with; m and sink are natural logarithms. 0 for an empty row."""
    if SINKS:
        top = tl.maximum(m, sink)
        weight = tl.exp2((m - top) * LOG2_E)
        factor = weight / (l * weight + tl.exp2((sink - top) * LOG2_E))
        factor = tl.where(sink == INFINITY, 0.0, factor)
    else:
        factor = 1.0 / l
    return tl.where(l == 0.0, 0.0, factor)
