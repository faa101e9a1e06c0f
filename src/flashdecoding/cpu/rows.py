"""Vector operations on single rows of q, k, v, scores and o, and on the scalars around them.

Each is a Numba intrinsic. Arguments named for areas of memory are addresses (int64); ``shape`` is compile-time.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flashdecoding.cpu.vector import FLOATS, I64, Emitter, Value, address, counted_loop, vector_intrinsic

ADDRESSES = 8  # row addresses written at a time
EXPM1_DEGREE = 15  # of the series of exp(y) - 1 up to 1/2: the rest is below a unit in the last place of float64
SCALARS = {
    "uint8": types.uint8,
    "int32": types.int32,
    "int64": types.int64,
    "float32": types.float32,
    "float64": types.float64,
}


@intrinsic(prefer_literal=True)
def load(typing_context, kind, base, index):
    """Element ``index`` of the array of ``kind`` (a literal such as "int64") at ``base``."""
    ty = SCALARS[kind.literal_value]

    def code(context, builder, signature, values):
        at = builder.inttoptr(values[1], context.get_data_type(ty).as_pointer())
        return builder.load(builder.gep(at, [values[2]], source_etype=context.get_data_type(ty)))

    return ty(kind, address, types.int64), code


@intrinsic(prefer_literal=True)
def store(typing_context, kind, base, index, value):
    """Write element ``index`` of the array of ``kind`` at ``base``."""
    ty = SCALARS[kind.literal_value]

    def code(context, builder, signature, values):
        at = builder.inttoptr(values[1], context.get_data_type(ty).as_pointer())
        builder.store(values[3], builder.gep(at, [values[2]], source_etype=context.get_data_type(ty)))
        return context.get_dummy_value()

    return types.void(kind, address, types.int64, ty), code


@intrinsic(prefer_literal=True)
def fetch_add(typing_context, base, amount):
    """Add to the int64 at ``base`` atomically; returns what it held."""

    def code(context, builder, signature, values):
        return builder.atomic_rmw("add", builder.inttoptr(values[0], I64.as_pointer()), values[1], "monotonic")

    return types.int64(address, types.int64), code


@intrinsic(prefer_literal=True)
def fill_rows(typing_context, table, first, step, count):
    """table[j] = first + j * step for j < count, and up to ADDRESSES - 1 entries past that."""

    def code(context, b, signature, values):
        table, first, step, count = values
        ty = ir.VectorType(I64, ADDRESSES)
        places = ir.Constant(ty, list(range(ADDRESSES)))

        def splat(x):
            v = b.insert_element(ir.Constant(ty, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
            return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(ir.IntType(32), ADDRESSES), [0] * ADDRESSES))

        rows = b.add(splat(first), b.mul(splat(step), places))
        stride = splat(b.mul(step, ir.Constant(I64, ADDRESSES)))

        def body(i, carried):
            at = b.add(table, b.mul(i, ir.Constant(I64, 8 * ADDRESSES)))
            b.store(carried[0], b.inttoptr(at, ty.as_pointer()), align=8)
            return [b.add(carried[0], stride)]

        blocks = b.sdiv(b.add(count, ir.Constant(I64, ADDRESSES - 1)), ir.Constant(I64, ADDRESSES))
        counted_loop(b, blocks, body, [rows])
        return context.get_dummy_value()

    return types.void(address, address, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def prefetch_k(typing_context, shape, table, count):
    """Bring the first ``count`` K rows of a table towards the core."""
    return _prefetch_rows(shape, shape.shape.head_dim)


@intrinsic(prefer_literal=True)
def prefetch_v(typing_context, shape, table, count):
    return _prefetch_rows(shape, shape.shape.head_dim_v)


def _prefetch_rows(shape: Any, width: int) -> Any:
    def emit(e: Emitter, table: Value, count: Value) -> None:
        def body(j: Value, carried: list[Value]) -> list[Value]:
            e.prefetch(e.load(e.scaled(table, j, 8), I64), 0, width * e.shape.element_bytes)
            return []

        e.loop(count, body)

    return vector_intrinsic(types.void, (shape, address, types.int64), emit)


@intrinsic(prefer_literal=True)
def widen_row(typing_context, shape, packed, row, sign):
    """packed[:] = sign * row (1, 0 or -1): a row of q or k (own dtype, adjacent elements) as padded scores."""

    def emit(e: Emitter, packed: Value, row: Value, sign: Value) -> None:
        factor = e.splat(e.convert(sign, e.score.element))

        def body(i: Value, valid: int, carried: list[Value]) -> list[Value]:
            to = e.scaled(packed, i, e.shape.chunk * e.shape.score_bytes)
            for half, v in enumerate(e.decode(e.scaled(row, i, e.shape.chunk * e.shape.element_bytes), valid)):
                e.store(e.b.fmul(v, factor), to, half * e.lanes * e.shape.score_bytes)
            return []

        e.each_chunk(e.shape.head_dim, body)

    return vector_intrinsic(types.void, (shape, address, address, types.float64), emit)


def _each_vector(e: Emitter, base: Value, count: Value, body: Callable[..., list[Value]], carried: list[Value]) -> Any:
    """Over the vectors of scores that hold s[0:count]; the last may reach past ``count``."""
    vectors = e.b.sdiv(e.b.add(count, ir.Constant(I64, e.lanes - 1)), ir.Constant(I64, e.lanes))
    step = ir.Constant(I64, e.lanes * e.shape.score_bytes)
    return e.loop(vectors, lambda i, vs: body(e.b.add(base, e.b.mul(i, step)), vs), carried)


@intrinsic(prefer_literal=True)
def row_maximum(typing_context, shape, s, count):
    """max of s[0:count], ignoring NaN; entries up to the next full register must be -inf."""

    def emit(e: Emitter, s: Value, count: Value) -> Value:
        start = e.constant(e.score, -math.inf)
        (top,) = _each_vector(e, s, count, lambda at, vs: [e.maximum(vs[0], e.load(at, e.score))], [start])
        return e.convert(e.fold([top], e.maximum), FLOATS["float64"])

    return vector_intrinsic(types.float64, (shape, address, types.int64), emit)


@intrinsic(prefer_literal=True)
def row_exponentials(typing_context, shape, p, s, count, base, factor):
    """p[0:count] = 2**((s - base) * factor), of type ``sums``; returns their sum. ``p`` may be ``s``.

    Scaling the difference, and not the scores, keeps the error of the scale away from large scores.
    """

    def emit(e: Emitter, p: Value, s: Value, count: Value, base: Value, factor: Value) -> Value:
        ratio = ir.Constant(I64, e.shape.sum_bytes // e.shape.score_bytes)
        m, scale = (e.splat(e.convert(x, e.score.element)) for x in (base, factor))

        def body(at: Value, vs: list[Value]) -> list[Value]:
            weights = e.convert(e.exp2(e.b.fmul(e.b.fsub(e.load(at, e.score), m), scale)), e.sum)
            e.store(weights, e.b.add(p, e.b.mul(e.b.sub(at, s), ratio)))
            return [e.b.fadd(vs[0], weights)]

        (total,) = _each_vector(e, s, count, body, [e.constant(e.sum, 0.0)])
        return e.convert(e.fold([total], e.b.fadd), FLOATS["float64"])

    return vector_intrinsic(types.float64, (shape, address, address, types.int64, types.float64, types.float64), emit)


@intrinsic(prefer_literal=True)
def row_softcap(typing_context, shape, s, count, inverse_cap, cap):
    """s[0:count] = cap * tanh(s * inverse_cap) * log2(e), in float64.

    tanh(x) = t / (t + 2) with t = exp(2x) - 1, which for 2x <= 1/2 is summed as a series: the difference would lose a
    small x.
    """

    def emit(e: Emitter, s: Value, count: Value, inverse_cap: Value, cap: Value) -> None:
        wide = ir.VectorType(FLOATS["float64"], e.lanes)
        one, two, log2_e = (e.constant(wide, x) for x in (1.0, 2.0, 1.0 / math.log(2)))
        small, flat = e.constant(wide, 0.5), e.constant(wide, 40.0)  # tanh(20) rounds to 1

        def body(at: Value, vs: list[Value]) -> list[Value]:
            x = e.b.fmul(e.convert(e.load(at, e.score), wide), e.splat(inverse_cap))
            y = e.b.fmul(e.call("fabs", [x]), two)
            y = e.b.select(e.b.fcmp_ordered(">", y, flat), flat, y)
            series = e.constant(wide, 1.0 / math.factorial(EXPM1_DEGREE))
            for k in range(EXPM1_DEGREE - 1, 0, -1):
                series = e.fma(series, y, e.constant(wide, 1.0 / math.factorial(k)))
            large = e.b.fsub(e.exp2(e.b.fmul(y, log2_e)), one)
            t = e.b.select(e.b.fcmp_ordered("<", y, small), e.b.fmul(series, y), large)
            tanh = e.call("copysign", [e.b.fdiv(t, e.b.fadd(t, two)), x])
            capped = e.b.fmul(e.b.fmul(tanh, e.splat(cap)), log2_e)
            e.store(e.convert(capped, e.score), at)
            return []

        _each_vector(e, s, count, body, [])

    return vector_intrinsic(types.void, (shape, address, types.int64, types.float64, types.float64), emit)


@intrinsic(prefer_literal=True)
def row_alibi(typing_context, shape, s, count, factor, offsets, query, anchor, slope):
    """s[0:count] = s * factor - slope * (|query - offset| - anchor), in float64, rounded once.

    ``offsets`` (float64) and ``query`` are positions relative to the tile's first key. ``anchor`` is a distance that is
    taken off every key of a split alike, so that what is left is small where weights are not.
    """

    def emit(
        e: Emitter, s: Value, count: Value, factor: Value, offsets: Value, query: Value, anchor: Value, slope: Value
    ) -> None:
        wide = ir.VectorType(FLOATS["float64"], e.lanes)
        scale, position, start, step = (e.splat(x) for x in (factor, query, anchor, e.b.fneg(slope)))
        ratio = ir.Constant(I64, 8 // e.shape.score_bytes)

        def body(at: Value, vs: list[Value]) -> list[Value]:
            offset = e.load(e.b.add(offsets, e.b.mul(e.b.sub(at, s), ratio)), wide)
            distance = e.b.fsub(e.call("fabs", [e.b.fsub(position, offset)]), start)
            score = e.b.fmul(e.convert(e.load(at, e.score), wide), scale)
            e.store(e.convert(e.fma(step, distance, score), e.score), at)
            return []

        _each_vector(e, s, count, body, [])

    scalars = (types.float64, address, types.float64, types.float64, types.float64)
    return vector_intrinsic(types.void, (shape, address, types.int64, *scalars), emit)


def _each_column(e: Emitter, body: Callable[[Value], None]) -> None:
    """``body(offset)`` for the vectors of a row of o."""

    def turn(i: Value, carried: list[Value]) -> list[Value]:
        body(e.b.mul(i, ir.Constant(I64, e.lanes * e.shape.sum_bytes)))
        return []

    e.loop(ir.Constant(I64, e.shape.padded_dim_v // e.lanes), turn)


@intrinsic(prefer_literal=True)
def scale_row(typing_context, shape, o, factor):
    """o *= factor"""

    def emit(e: Emitter, o: Value, factor: Value) -> None:
        f = e.splat(e.convert(factor, e.sum.element))

        def body(offset: Value) -> None:
            at = e.b.add(o, offset)
            e.store(e.b.fmul(e.load(at, e.sum), f), at)

        _each_column(e, body)

    return vector_intrinsic(types.void, (shape, address, types.float64), emit)


@intrinsic(prefer_literal=True)
def add_row(typing_context, shape, o, other, factor):
    """o += factor * other"""

    def emit(e: Emitter, o: Value, other: Value, factor: Value) -> None:
        f = e.splat(e.convert(factor, e.sum.element))

        def body(offset: Value) -> None:
            at = e.b.add(o, offset)
            e.store(e.fma(f, e.load(e.b.add(other, offset), e.sum), e.load(at, e.sum)), at)

        _each_column(e, body)

    return vector_intrinsic(types.void, (shape, address, address, types.float64), emit)


@intrinsic(prefer_literal=True)
def zero_row(typing_context, shape, o):
    """o = 0"""

    def emit(e: Emitter, o: Value) -> None:
        _each_column(e, lambda offset: e.store(e.constant(e.sum, 0.0), e.b.add(o, offset)))

    return vector_intrinsic(types.void, (shape, address), emit)


@intrinsic(prefer_literal=True)
def non_finite_row(typing_context, shape, v):
    """0.0 if every element of the V row is finite, else NaN."""

    def emit(e: Emitter, v: Value) -> Value:
        zero = e.constant(e.score, 0.0)

        def body(i: Value, valid: int, carried: list[Value]) -> list[Value]:
            (total,) = carried
            for x in e.decode(e.scaled(v, i, e.shape.chunk * e.shape.element_bytes), valid):
                total = e.b.fadd(total, e.b.fmul(x, zero))
            return [total]

        return e.convert(e.fold(e.each_chunk(e.shape.head_dim_v, body, [zero]), e.b.fadd), FLOATS["float64"])

    return vector_intrinsic(types.float64, (shape, address), emit)


@intrinsic(prefer_literal=True)
def write_row(typing_context, shape, is_state, out, o, factor):
    """out = o * factor, in the dtype of q, or of a state (in element order, type ``scores``) if ``is_state``."""
    state = is_state.literal_value

    def emit(e: Emitter, out: Value, o: Value, factor: Value) -> None:
        f = e.splat(e.convert(factor, e.sum.element))
        encode, size = (e.encode_state, e.shape.score_bytes) if state else (e.encode, e.shape.element_bytes)

        def body(i: Value, valid: int, carried: list[Value]) -> list[Value]:
            at = e.scaled(o, i, e.shape.chunk * e.shape.sum_bytes)
            low, high = (e.b.fmul(e.load(at, e.sum, k * e.lanes * e.shape.sum_bytes), f) for k in (0, 1))
            encode(e.scaled(out, i, e.shape.chunk * size), valid, (low, high))
            return []

        e.each_chunk(e.shape.head_dim_v, body)

    return vector_intrinsic(types.void, (shape, is_state, address, address, types.float64), emit)
