"""Steps that the kernels share: which keys a row may see, rows of the cache, online softmax, sinks."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def clamped(ptr, b, ok, most):
    """Number b of an integer tensor, in [0, most]: what the host did not see is made harmless."""
    return tl.minimum(tl.maximum(tl.load(ptr + b, mask=ok, other=0).to(tl.int64), 0), most).to(tl.int32)


@triton.jit
def queries_of(q_offsets_ptr, b, ok, tokens, q_len):
    """First query of sequence b among packed ones (else 0), and how many queries it has."""
    if q_offsets_ptr is None:
        first = b * 0
        count = first + q_len
    else:
        first = clamped(q_offsets_ptr, b, ok, tokens)
        past = clamped(q_offsets_ptr, b + 1, ok, tokens)
        count = tl.minimum(tl.maximum(past - first, 0), q_len)
    return first, count


@triton.jit
def position_of(ptr, b, default):
    """A position that the call may give for sequence b."""
    if ptr is None:
        place = tl.zeros([], tl.int64) + default
    else:
        place = tl.load(ptr + b).to(tl.int64)
    return place


@triton.jit
def keys_up_to(position, kv_start, blocks):
    """Number of local keys at positions <= ``position``."""
    past = position - kv_start
    if blocks is None:
        count = tl.maximum(past + 1, 0)
    else:
        whole = past // blocks.stride * blocks.size + tl.minimum(past % blocks.stride + 1, blocks.size)
        count = tl.where(past < 0, 0, whole)
    return count


@triton.jit
def key_position(key, kv_start, blocks):
    if blocks is None:
        position = kv_start + key
    else:
        position = kv_start + (key // blocks.size).to(tl.int64) * blocks.stride + key % blocks.size
    return position


@triton.jit
def masked(mask, rows, key, column, q_len, sees, TREE: tl.constexpr):
    """``sees`` where the mask allows it: dense by local key, a draft tree by place among the queries."""
    if TREE:
        drafted = (column >= 0) & (column < q_len)
        at = mask.ptr + rows[:, None] + column.to(tl.int64)[None, :] * mask.stride_k
        word = tl.load(at, mask=sees & drafted[None, :], other=1)
    else:
        at = mask.ptr + rows[:, None] + key.to(tl.int64)[None, :] * mask.stride_k
        word = tl.load(at, mask=sees, other=0)
    return sees & (word != 0)


@triton.jit
def locate(pages, page_row, key, inside, PAGE_SIZE: tl.constexpr):
    """Page and slot of keys, and which of them may be loaded: no page that does not exist is."""
    if pages is None:
        page = key
        slot = key
        exists = inside
    else:
        page = tl.load(page_row + (key // PAGE_SIZE).to(tl.int64) * pages.stride_p, mask=inside, other=0)
        slot = key % PAGE_SIZE
        exists = inside & (page >= 0) & (page < pages.pages)
    return page, slot, exists


@triton.jit
def cache_rows(cache, pages, page, slot, WIDE: tl.constexpr):
    """Offsets of keys' rows in a cache, in 64 bits if WIDE: with :func:`locate`, all that knows about pages."""
    if WIDE:
        rows = slot.to(tl.int64) * cache.stride_s
    else:
        rows = slot * cache.stride_s
    if pages is not None:
        rows += page.to(tl.int64) * cache.stride_b
    return rows


@triton.jit
def load_block(base, rows, ok, stride_d, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of COLUMNS columns from column FIRST of rows; 0 where a row is not ``ok`` or has no such column."""
    column = FIRST + tl.arange(0, COLUMNS)
    inside = ok[:, None]
    if FIRST + COLUMNS > WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(base + rows[:, None] + column.to(rows.dtype)[None, :] * stride_d, mask=inside, other=0.0)


@triton.jit
def store_block(base, rows, ok, x, stride_d, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The counterpart of :func:`load_block`."""
    column = FIRST + tl.arange(0, COLUMNS)
    inside = ok[:, None]
    if FIRST + COLUMNS > WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    at = base + rows[:, None] + column.to(rows.dtype)[None, :] * stride_d
    tl.store(at, x.to(base.dtype.element_ty), mask=inside)


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
def softmax_step(s, m, l, lost, factor, shift):
    """Online softmax (2.4.1): weights of a tile, the new m, l and ``lost``, and what the numerator shrinks by.

    Weights are 2**((s - m) * factor + shift). l (rows, keys of a tile) adds them up by their place in the tile; in
    float32 ``lost`` has what its roundings left out, because those of thousands of equal weights have one sign.
    """
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == -INFINITY, 0.0, top)
    p = tl.exp2((s - base[:, None]) * factor + shift)
    shrink = tl.exp2((m - base) * factor)
    kept = l * shrink[:, None]
    l = kept + p
    if tl.float32 == l.dtype:
        lost = lost * shrink[:, None] + (p - (l - kept))
    return p, top, l, lost, shrink


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
def normaliser(m, l, sink_rows):
    """What the numerator is multiplied with; m and sinks are natural logarithms. 0 for an empty row."""
    if sink_rows is None:
        factor = 1.0 / l
    else:
        top = tl.maximum(m, sink_rows)
        weight = tl.exp2((m - top) * LOG2_E)
        factor = weight / (l * weight + tl.exp2((sink_rows - top) * LOG2_E))
        factor = tl.where((sink_rows == INFINITY) & (l == l), 0.0, factor)
    return tl.where(l == 0.0, 0.0, factor)


@triton.jit
def normalised(o, factor):
    """The numerator times its factor. Where that is 0 so is this, but NaN if a V that is not finite left its mark."""
    return tl.where(factor == 0.0, tl.where(o * 0.0 == 0.0, 0.0, float("nan")), o * factor)


@triton.jit
def store_results(results, rows, ok, m, l):
    """lse, or m and l of a state, whichever the call wants."""
    if results.lse_ptr is not None:
        tl.store(results.lse_ptr + rows, m + tl.log2(l) * LN_2, mask=ok)
    if results.m_ptr is not None:
        tl.store(results.m_ptr + rows, m, mask=ok)
        tl.store(results.l_ptr + rows, l, mask=ok)
