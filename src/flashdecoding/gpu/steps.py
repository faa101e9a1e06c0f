"""Steps that the kernels share: integers by sequence, rows of the cache, sums, sinks."""

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
def cache_rows(cache, pages, page, slot, WIDE: tl.constexpr):
    """Offsets of keys' rows in a cache: with `visible.locate`, all that knows about pages. WIDE: those within a
    sequence or page (2), or only those of pages (1), may not be int32.
    """
    if WIDE == 2:
        rows = slot.to(tl.int64) * cache.stride_s
    else:
        rows = slot * cache.stride_s
    if pages is not None:
        if WIDE:
            page = page.to(tl.int64)
        rows += page * cache.stride_b
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
def fold(x, LEVELS: tl.constexpr, LARGEST: tl.constexpr):
    """Sums of neighbours in the rows of x, then of the columns half a row apart, until LEVELS are done.

    The order of a longer `tl.sum` follows the layout that the compiler chose, which strides may change; that of two
    numbers does not matter. In the layout of a matrix product one thread has the columns that are summed first.
    """
    for level in tl.static_range(LEVELS):
        if level == 0:
            pairs = tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2])
            x = tl.max(pairs, 2) if LARGEST else tl.sum(pairs, 2)
        else:
            pairs = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
            x = tl.max(pairs, 1) if LARGEST else tl.sum(pairs, 1)
    return x


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
