"""Softmax with a lane for each row: a square of ``lanes`` query rows, its scores kept by keys (TILE, lanes).

So it comes from `square_dots` and from the matrix unit, and so maxima, exponentials and sums need nothing across lanes.
Arguments named for areas of memory are addresses (int64); m and l are float64, a number for each row.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flashdecoding.cpu.shape import MATRIX_KEYS
from flashdecoding.cpu.vector import F64, I64, Emitter, Value, address, vector_intrinsic

CHAINS = 4  # maxima in flight


@intrinsic(prefer_literal=True)
def move_maxima(typing_context, shape, s, count, padded, factor, m, l, shrink):
    """The first half of a softmax step: m and l move to the new maxima; rows of o are to ``shrink`` likewise.

    Scores from ``count`` to ``padded`` become -inf. Returns whether a row moved; ``shrink`` is written only then.
    """

    def emit(
        e: Emitter, s: Value, count: Value, padded: Value, factor: Value, m: Value, l: Value, shrink: Value
    ) -> Value:
        wide, vector = ir.VectorType(F64, e.lanes), e.shape.vector_bytes
        lowest = e.constant(e.score, -math.inf)

        def pad(j: Value, carried: list[Value]) -> list[Value]:
            e.store(lowest, e.scaled(s, e.b.add(count, j), vector))
            return []

        def turn(i: Value, tops: list[Value]) -> list[Value]:
            at = e.scaled(s, i, vector * CHAINS)
            return [e.maximum(top, e.load(at, e.score, vector * j)) for j, top in enumerate(tops)]

        e.loop(e.b.sub(padded, count), pad)
        tops = e.loop(e.b.udiv(padded, ir.Constant(I64, CHAINS)), turn, [lowest] * CHAINS)
        while len(tops) > 1:
            tops = [e.maximum(x, y) for x, y in zip(tops[::2], tops[1::2], strict=True)]
        old, new = e.load(m, wide), e.convert(tops[0], wide)
        moved = e.b.fcmp_ordered(">", new, old)
        bits = ir.IntType(e.lanes)
        some = e.b.icmp_unsigned("!=", e.b.bitcast(moved, bits), ir.Constant(bits, 0))
        with e.b.if_then(some, likely=False):
            power = e.exp2(e.b.fmul(e.b.fsub(old, new), e.splat(factor)))
            power = e.b.select(moved, power, e.constant(wide, 1.0))
            e.store(e.b.select(moved, new, old), m)
            e.store(e.b.fmul(e.load(l, wide), power), l)
            e.store(power, shrink)
        return e.b.zext(some, I64)

    arguments = (shape, address, types.int64, types.int64, types.float64, address, address, address)
    return vector_intrinsic(types.int64, arguments, emit)


@intrinsic(prefer_literal=True)
def exponentials(typing_context, shape, s, padded, factor, m, l, coming, ahead):
    """The second half: s[j, r] = 2**((s[j, r] - m[r]) * factor); l grows by them.

    Meanwhile, for every MATRIX_KEYS, ``coming`` V rows of the same place in ``ahead`` are brought towards the core.
    """
    asked = coming.literal_value

    def emit(e: Emitter, s: Value, padded: Value, factor: Value, m: Value, l: Value, ahead: Value) -> None:
        wide, vector = ir.VectorType(F64, e.lanes), e.shape.vector_bytes
        scale, base = e.splat(e.convert(factor, e.score.element)), e.convert(e.load(m, wide), e.score)
        base = e.b.select(e.b.fcmp_ordered(">", base, e.constant(e.score, -math.inf)), base, e.constant(e.score, 0.0))
        lines = -(-asked * e.lines(e.shape.head_dim_v) // (MATRIX_KEYS // 2))

        def pair(i: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(s, i, 2 * vector)
            p = [e.exp2(e.b.fmul(e.b.fsub(e.load(at, e.score, vector * k), base), scale)) for k in (0, 1)]
            if asked:
                half, turn = (f(i, ir.Constant(I64, MATRIX_KEYS // 2)) for f in (e.b.udiv, e.b.urem))
                rows, first = e.scaled(ahead, half, 8 * MATRIX_KEYS), e.b.mul(turn, ir.Constant(I64, lines))
                e.ask(rows, ir.Constant(I64, asked), e.shape.head_dim_v, first, lines)
            for k, x in enumerate(p):
                e.store(x, at, vector * k)
            return [e.b.fadd(total, e.convert(x, e.sum)) for total, x in zip(sums, p, strict=True)]

        zero = e.constant(e.sum, 0.0)
        even, odd = e.loop(e.b.udiv(padded, ir.Constant(I64, 2)), pair, [zero, zero])
        e.store(e.b.fadd(e.load(l, wide), e.convert(e.b.fadd(even, odd), wide)), l)

    arguments = (shape, address, types.int64, types.float64, address, address, coming, address)
    return vector_intrinsic(types.void, arguments, emit)


@intrinsic(prefer_literal=True)
def by_rows(typing_context, shape, kind, rows, square, padded):
    """rows[r, j] = square[j, r], as ``kind``: "scores", or "sums" for weights."""
    weights = kind.literal_value == "sums"

    def emit(e: Emitter, rows: Value, square: Value, padded: Value) -> None:
        shape, vector = e.shape, e.shape.vector_bytes
        size, row_bytes = (shape.sum_bytes, shape.p_row_bytes) if weights else (shape.score_bytes, shape.s_row_bytes)

        def block(i: Value, carried: list[Value]) -> list[Value]:
            source, to = e.scaled(square, i, e.lanes * vector), e.scaled(rows, i, e.lanes * size)
            for r, row in enumerate(e.transpose([e.load(source, e.score, vector * j) for j in range(e.lanes)])):
                e.store(e.convert(row, e.sum) if weights else row, to, r * row_bytes)
            return []

        e.loop(e.b.udiv(padded, ir.Constant(I64, e.lanes)), block)

    return vector_intrinsic(types.void, (shape, kind, address, address, types.int64), emit)
