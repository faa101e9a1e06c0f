"""Products of tiles on the matrix unit of x86 CPUs that have one for bfloat16 (AMX).

One instruction multiplies 16 x 32 by 32 x 16 bfloat16 and adds float32. Its left operand is 16 rows of 64 bytes at any
stride: K rows as they lie in the cache, or weights rounded to bfloat16 (one unit u of the error bound). Its right
operand holds pairs of rows side by side: pairs of dimensions of the queries, made once a unit, or pairs of V rows, made
tile by tile with a shift and a mask, which keeps the columns of o in the order of `vector.py`. A bfloat16 below 2^-126
counts as 0.

Tile registers: 0 and 1 accumulate, 2 and 3 are left operands, 4 is the right one. For a shape without the unit every
intrinsic here is empty, or 0.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from flashdecoding.cpu.shape import MATRIX_KEYS, TILE
from flashdecoding.cpu.vector import I8, I16, I32, I64, Emitter, Value, address, vector_intrinsic

SIDE = 16  # rows of a tile register, and its 32-bit columns
TILE_BYTES = SIDE * 64


def _tile_intrinsic(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    nothing = None if result is types.void else ir.Constant(I64, 0)
    return vector_intrinsic(result, arguments, lambda e, *values: emit(e, *values) if e.shape.matrix else nothing)


def _call(e: Emitter, name: str, *arguments: Value) -> None:
    ty = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    e.b.call(cgutils.get_or_insert_function(e.b.module, ty, f"llvm.x86.{name}"), arguments)


def _register(number: int) -> Value:
    return ir.Constant(I8, number)


def _load_tile(e: Emitter, register: int, base: Value, stride: Value | int) -> None:
    step = ir.Constant(I64, stride) if isinstance(stride, int) else stride
    _call(e, "tileloadd64", _register(register), e.pointer(base, I8), step)


def _store_tile(e: Emitter, register: int, base: Value, stride: int) -> None:
    _call(e, "tilestored64", _register(register), e.pointer(base, I8), ir.Constant(I64, stride))


def _multiply(e: Emitter, total: int, left: int, right: int) -> None:
    _call(e, "tdpbf16ps", _register(total), _register(left), _register(right))


@intrinsic(prefer_literal=True)
def begin_tiles(typing_context, shape, saved, area):
    """Configure every tile register as 16 rows of 64 bytes; what was configured before is kept in ``saved``."""

    def emit(e: Emitter, saved: Value, area: Value) -> None:
        _call(e, "sttilecfg", e.pointer(saved, I8))
        zero = ir.Constant(ir.VectorType(I64, 8), [0] * 8)
        e.store(zero, area)
        e.store(ir.Constant(I8, 1), area)  # palette
        for register in range(8):
            e.store(ir.Constant(ir.IntType(16), 64), area, 16 + 2 * register)
            e.store(ir.Constant(I8, SIDE), area, 48 + register)
        _call(e, "ldtilecfg", e.pointer(area, I8))

    return _tile_intrinsic(types.void, (shape, address, address), emit)


@intrinsic(prefer_literal=True)
def end_tiles(typing_context, shape, saved):
    """Give the tile registers back as they were configured: other libraries on this thread use them too."""
    return _tile_intrinsic(types.void, (shape, address), lambda e, saved: _call(e, "ldtilecfg", e.pointer(saved, I8)))


@intrinsic(prefer_literal=True)
def pair_columns(typing_context, shape, columns):
    """Transposed queries (padded_dim, 16) of float32 become right operands, in place: pairs of dimensions side by side.

    A chunk holds its even dimensions, then its odd ones; each is a bfloat16 in the upper half of a word.
    """

    def emit(e: Emitter, columns: Value) -> None:
        words = ir.VectorType(I32, SIDE)

        def body(i: Value, carried: list[Value]) -> list[Value]:
            chunk, pair = e.b.udiv(i, ir.Constant(I64, SIDE)), e.b.urem(i, ir.Constant(I64, SIDE))
            source = e.scaled(e.scaled(columns, chunk, 2 * TILE_BYTES), pair, 64)
            even, odd = e.load(source, words), e.load(source, words, TILE_BYTES)
            e.store(_side_by_side(e, e.b.lshr(even, e.constant(words, 16)), odd), e.scaled(columns, i, 64))
            return []

        e.loop(ir.Constant(I64, e.shape.padded_dim // 2), body)

    return _tile_intrinsic(types.void, (shape, address), emit)


def _side_by_side(e: Emitter, low: Value, high: Value) -> Value:
    """Words with the lower halves of ``low``, whose upper halves are 0, and the upper halves of ``high``."""
    return e.b.or_(low, e.b.and_(high, e.constant(high.type, 0xFFFF0000)))


@intrinsic(prefer_literal=True)
def evenly_spaced(typing_context, shape, table):
    """1 if the 16 addresses of a table step evenly, so that they are one left operand; else 0."""

    def emit(e: Emitter, table: Value) -> Value:
        rows = e.load(table, ir.VectorType(I64, SIDE))
        first, second = (e.b.extract_element(rows, ir.Constant(I32, i)) for i in (0, 1))
        places = ir.Constant(rows.type, list(range(SIDE)))
        even = e.b.add(e.splat(first, SIDE), e.b.mul(e.splat(e.b.sub(second, first), SIDE), places))
        differ = e.b.bitcast(e.b.icmp_signed("!=", rows, even), ir.IntType(SIDE))
        return e.b.zext(e.b.icmp_unsigned("==", differ, ir.Constant(differ.type, 0)), I64)

    return _tile_intrinsic(types.int64, (shape, address), emit)


@intrinsic(prefer_literal=True)
def tile_scores(typing_context, shape, s, queries, first, first_step, second, second_step, coming, ahead):
    """s[j, r] = q[r] . k[j] for 16 queries (as paired columns) and 2 x 16 keys, each 16 a base address and a step.

    Meanwhile ``coming`` V rows of ``ahead`` are brought towards the core.
    """
    asked = coming.literal_value

    def emit(
        e: Emitter,
        s: Value,
        queries: Value,
        first: Value,
        first_step: Value,
        second: Value,
        second_step: Value,
        ahead: Value,
    ) -> None:
        shape = e.shape
        chunks = shape.head_dim // shape.chunk
        lines = -(-asked * e.lines(shape.head_dim_v) // (2 * chunks))
        for register in (0, 1):
            _call(e, "tilezero", _register(register))

        def chunk(c: Value, carried: list[Value]) -> list[Value]:
            inside = e.b.shl(c, ir.Constant(I64, 6))
            _load_tile(e, 4, e.scaled(queries, c, TILE_BYTES), 64)
            for register, base, step in ((2, first, first_step), (3, second, second_step)):
                _load_tile(e, register, e.b.add(base, inside), step)
                _multiply(e, register - 2, register, 4)
                line = e.add(e.b.mul(c, ir.Constant(I64, 2 * lines)), (register - 2) * lines)
                e.ask(ahead, ir.Constant(I64, asked), shape.head_dim_v, line, lines)
            return []

        e.loop(ir.Constant(I64, chunks), chunk)
        for register in (0, 1):
            _store_tile(e, register, e.add(s, register * TILE_BYTES), 64)

    scalars = [types.int64] * 6
    return _tile_intrinsic(types.void, (shape, *scalars, coming, types.int64), emit)


@intrinsic(prefer_literal=True)
def round_square(typing_context, shape, weights, p, count):
    """weights[r, j] = p[j, r] for 16 rows, as bfloat16."""

    def emit(e: Emitter, weights: Value, p: Value, count: Value) -> None:
        words = ir.VectorType(I32, SIDE)

        def half(h: Value, carried: list[Value]) -> list[Value]:
            source, pairs = e.scaled(p, h, 2 * TILE_BYTES), []
            for i in range(SIDE):
                even, odd = (_half_up(e, e.load(source, e.score, 64 * (2 * i + k))) for k in (0, 1))
                pairs.append(_side_by_side(e, e.b.lshr(even, e.constant(words, 16)), odd))
            for r, row in enumerate(e.transpose(pairs)):
                e.store(row, e.scaled(weights, h, 64), r * 2 * TILE)
            return []

        e.loop(_halves(e, count), half)

    return _tile_intrinsic(types.void, (shape, address, address, types.int64), emit)


@intrinsic(prefer_literal=True)
def round_row(typing_context, shape, weights, p, count):
    """weights[0:count] = p as bfloat16, for one row."""

    def emit(e: Emitter, weights: Value, p: Value, count: Value) -> None:
        def turn(i: Value, carried: list[Value]) -> list[Value]:
            up = _half_up(e, e.load(e.scaled(p, i, 64), e.score))
            row = e.b.trunc(e.b.lshr(up, e.constant(up.type, 16)), ir.VectorType(I16, SIDE))
            e.store(row, e.scaled(weights, i, 32))
            return []

        e.loop(e.b.shl(_halves(e, count), ir.Constant(I64, 1)), turn)

    return _tile_intrinsic(types.void, (shape, address, address, types.int64), emit)


def _half_up(e: Emitter, p: Value) -> Value:
    """Bits of weights whose upper half is the nearest bfloat16, ties up.

    They are not negative; and a NaN that comes from 16-bit numbers has no payload that could overflow.
    """
    bits = e.b.bitcast(p, ir.VectorType(I32, SIDE))
    return e.b.add(bits, e.constant(bits.type, 0x8000))


def _halves(e: Emitter, count: Value) -> Value:
    """Steps of 32 keys that hold ``count``."""
    return e.b.lshr(e.add(count, MATRIX_KEYS - 1), ir.Constant(I64, 5))


@intrinsic(prefer_literal=True)
def weigh_tiles(typing_context, shape, blocks, o, p, table, ahead, area, count):
    """o += p . v for ``blocks`` x 16 rows: p bfloat16 (rows, TILE), zero up to the next 32 keys past ``count``.

    Meanwhile the K rows in ``ahead``, one for each key, come towards the core.
    """
    n = blocks.literal_value

    def emit(e: Emitter, o: Value, p: Value, table: Value, ahead: Value, area: Value, count: Value) -> None:
        shape = e.shape
        words = ir.VectorType(I32, SIDE)
        zero = e.constant(words, 0)
        chunks = shape.head_dim_v // shape.chunk
        lines = -(-TILE * e.lines(shape.head_dim) // (2 * chunks))  # that a chunk asks for in pairs, then in products
        pair_lines, product_lines = -(-lines // (TILE // 2)), -(-lines // (2 * TILE // MATRIX_KEYS))
        halves = _halves(e, count)
        pairs = e.b.shl(halves, ir.Constant(I64, 4))
        odd_area = 2 * TILE_BYTES

        def chunk(c: Value, carried: list[Value]) -> list[Value]:
            inside, asked = e.b.shl(c, ir.Constant(I64, 6)), e.b.mul(c, ir.Constant(I64, 2 * lines))

            def pair(i: Value, carried: list[Value]) -> list[Value]:
                rows = []
                line = e.b.add(asked, e.b.mul(i, ir.Constant(I64, pair_lines)))
                e.ask(ahead, count, shape.head_dim, line, pair_lines)
                for k in (0, 1):
                    j = e.add(e.b.shl(i, ir.Constant(I64, 1)), k)
                    row = e.load(e.b.add(e.load(e.scaled(table, j, 8), I64), inside), words)
                    rows.append(e.b.select(e.b.icmp_signed("<", j, count), row, zero))
                to = e.scaled(area, i, 64)
                low = e.b.and_(rows[0], e.constant(words, 0xFFFF))
                e.store(e.b.or_(low, e.b.shl(rows[1], e.constant(words, 16))), to)
                e.store(_side_by_side(e, e.b.lshr(rows[0], e.constant(words, 16)), rows[1]), to, odd_area)
                return []

            e.loop(pairs, pair)
            for parity in (0, 1):
                columns = e.add(e.scaled(o, c, 2 * 64), 64 * parity)
                for block in range(n):
                    _load_tile(e, block, e.add(columns, block * SIDE * shape.o_row_bytes), shape.o_row_bytes)

                def half(h: Value, carried: list[Value], parity: int = parity) -> list[Value]:
                    _load_tile(e, 4, e.add(e.scaled(area, h, TILE_BYTES), parity * odd_area), 64)
                    turn = e.add(h, parity * (TILE // MATRIX_KEYS))
                    line = e.add(e.b.add(asked, e.b.mul(turn, ir.Constant(I64, product_lines))), lines)
                    e.ask(ahead, count, shape.head_dim, line, product_lines)
                    for block in range(n):
                        weights = e.add(e.scaled(p, h, 64), block * SIDE * 2 * TILE)
                        _load_tile(e, 2 + block, weights, 2 * TILE)
                        _multiply(e, block, 2 + block, 4)
                    return []

                e.loop(halves, half)
                for block in range(n):
                    _store_tile(e, block, e.add(columns, block * SIDE * shape.o_row_bytes), shape.o_row_bytes)
            return []

        e.loop(ir.Constant(I64, chunks), chunk)

    return _tile_intrinsic(types.void, (shape, blocks, *[types.int64] * 6), emit)
