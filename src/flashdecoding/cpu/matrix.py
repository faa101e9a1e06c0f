"""Products of tiles on the matrix unit of x86 CPUs that have one for bfloat16 (AMX).

One instruction multiplies 16 x 32 by 32 x 16 bfloat16 and adds float32. Its left operand is 16 rows of 64 bytes at any
stride: K rows as they lie in the cache, or weights rounded to bfloat16 (one unit u of the error bound). Its right
operand holds pairs of rows side by side: pairs of dimensions of the queries, made once a unit, or pairs of V rows, made
tile by tile with a shift and a mask, which keeps the columns of o in the order of `vector.py`. A bfloat16 below 2^-126
counts as 0.

A float16 number is the sum of two bfloat16, exactly, and its products are four; weights of two parts keep 16 bits.

Tile registers: 0, 1, 6 and 7 accumulate, 2 and 3 are left operands, 4 and 5 right ones. For a shape without the unit
every intrinsic here is empty, or 0.
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

    The two of a pair are a chunk's number i and number 16 + i, in the order of `vector.py`. The parts of a chunk follow
    each other.
    """

    def emit(e: Emitter, columns: Value) -> None:
        def body(i: Value, carried: list[Value]) -> list[Value]:
            chunk, pair = e.b.udiv(i, ir.Constant(I64, SIDE)), e.b.urem(i, ir.Constant(I64, SIDE))
            source = e.scaled(e.scaled(columns, chunk, 2 * TILE_BYTES), pair, 64)
            to = e.scaled(e.scaled(columns, chunk, e.shape.parts * TILE_BYTES), pair, 64)
            first, second = (e.load(source, e.score, k * TILE_BYTES) for k in (0, 1))
            for part, words in enumerate(_side_by_side(e, first, second)):
                e.store(words, to, part * TILE_BYTES)
            return []

        e.loop(ir.Constant(I64, e.shape.padded_dim // 2), body)

    return _tile_intrinsic(types.void, (shape, address), emit)


def _side_by_side(e: Emitter, low: Value, high: Value, last: Callable[..., Value] | None = None) -> list[Value]:
    """Two vectors of float32 as words of two bfloat16, a vector of words for each part of them.

    Every part is what the first 16 bits hold of the rest; the last may be rounded by ``last`` instead of cut.
    """
    words = ir.VectorType(I32, SIDE)
    upper = e.constant(words, 0xFFFF0000)
    pairs = []
    for part in range(e.shape.parts):
        final = part == e.shape.parts - 1
        bits = [last(e, x) if last and final else e.b.bitcast(x, words) for x in (low, high)]
        kept = e.b.and_(bits[1], upper)
        pairs.append(e.b.or_(e.b.lshr(bits[0], e.constant(words, 16)), kept))
        if not final:
            low = e.b.fsub(low, e.b.bitcast(e.b.and_(bits[0], upper), low.type))
            high = e.b.fsub(high, e.b.bitcast(kept, high.type))
    return pairs


@intrinsic(prefer_literal=True)
def part_rows(typing_context, shape, copies, table):
    """The 16 K rows of a table as left operands: (parts, 16, head_dim) bfloat16, paired as in `pair_columns`."""

    def emit(e: Emitter, copies: Value, table: Value) -> None:
        row_bytes = 2 * e.shape.head_dim

        def row(j: Value, carried: list[Value]) -> list[Value]:
            source, to = e.load(e.scaled(table, j, 8), I64), e.scaled(copies, j, row_bytes)
            for chunk in range(e.shape.head_dim // e.shape.chunk):
                pair = e.decode(e.add(source, chunk * e.shape.chunk * e.shape.element_bytes), e.shape.chunk)
                for part, words in enumerate(_side_by_side(e, *pair)):
                    e.store(words, to, part * SIDE * row_bytes + chunk * 64)
            return []

        e.loop(ir.Constant(I64, SIDE), row)

    return _tile_intrinsic(types.void, (shape, address, address), emit)


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
def tile_scores(typing_context, shape, s, queries, first, first_step, second, second_step, spare, coming, ahead):
    """s[j, r] = q[r] . k[j] for 16 queries (as paired columns) and 2 x 16 keys, each 16 a base address and a step.

    Meanwhile ``coming`` V rows of ``ahead`` are brought towards the core. Products with a small part are summed apart,
    in ``spare``, and added last. Returns whether a score is NaN that perhaps should not be: of infinities the parts are
    NaN; 0 where an element is one part.
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
        spare: Value,
        ahead: Value,
    ) -> Value:
        shape, parts = e.shape, e.shape.parts
        chunks = shape.head_dim // shape.chunk
        lines = -(-asked * e.lines(shape.head_dim_v) // (2 * chunks))
        totals = [(0, 1), (6, 7)][: 1 if parts == 1 else 2]
        for register in sum(totals, ()):
            _call(e, "tilezero", _register(register))

        def chunk(c: Value, carried: list[Value]) -> list[Value]:
            inside = e.b.shl(c, ir.Constant(I64, 6))
            for part in range(parts):
                _load_tile(e, 4 + part, e.add(e.scaled(queries, c, parts * TILE_BYTES), part * TILE_BYTES), 64)
            for part in range(parts):
                for half, base, step in ((0, first, first_step), (1, second, second_step)):
                    rows = e.add(e.b.add(base, inside), part * SIDE * 2 * shape.head_dim)
                    _load_tile(e, 2 + half, rows, step)
                    for other in range(parts):
                        _multiply(e, totals[part + other > 0][half], 2 + half, 4 + other)
                    if part == 0:
                        line = e.add(e.b.mul(c, ir.Constant(I64, 2 * lines)), half * lines)
                        e.ask(ahead, ir.Constant(I64, asked), shape.head_dim_v, line, lines)
            return []

        e.loop(ir.Constant(I64, chunks), chunk)
        for area, registers in zip((s, spare), totals, strict=False):
            for half, register in enumerate(registers):
                _store_tile(e, register, e.add(area, half * TILE_BYTES), 64)
        if parts == 1:
            return ir.Constant(I64, 0)

        def add(j: Value, broken: list[Value]) -> list[Value]:
            at = e.scaled(s, j, 64)
            total = e.b.fadd(e.load(at, e.score), e.load(e.scaled(spare, j, 64), e.score))
            e.store(total, at)
            return [e.b.or_(broken[0], e.b.bitcast(e.b.fcmp_unordered("uno", total, total), I16))]

        (broken,) = e.loop(ir.Constant(I64, 2 * SIDE), add, [ir.Constant(I16, 0)])
        return e.b.zext(broken, I64)

    scalars = [types.int64] * 7
    return _tile_intrinsic(types.int64, (shape, *scalars, coming, types.int64), emit)


@intrinsic(prefer_literal=True)
def round_square(typing_context, shape, weights, p, count):
    """weights[r, j] = p[j, r] for 16 rows, as bfloat16 parts."""

    def emit(e: Emitter, weights: Value, p: Value, count: Value) -> None:
        def half(h: Value, carried: list[Value]) -> list[Value]:
            source, to = e.scaled(p, h, 2 * TILE_BYTES), e.scaled(weights, h, 64)
            keys = [e.load(source, e.score, 64 * j) for j in range(2 * SIDE)]
            pairs = [_side_by_side(e, even, odd, _half_up) for even, odd in zip(keys[::2], keys[1::2], strict=True)]
            for part in range(e.shape.parts):
                for r, row in enumerate(e.transpose([pair[part] for pair in pairs])):
                    e.store(row, to, part * e.shape.weights_bytes + r * 2 * TILE)
            return []

        e.loop(_halves(e, count), half)

    return _tile_intrinsic(types.void, (shape, address, address, types.int64), emit)


@intrinsic(prefer_literal=True)
def round_row(typing_context, shape, weights, p, count):
    """weights[0:count] = p as bfloat16 parts, for one row."""

    def emit(e: Emitter, weights: Value, p: Value, count: Value) -> None:
        def turn(i: Value, carried: list[Value]) -> list[Value]:
            low, high = (e.load(e.scaled(p, i, 128), e.score, 64 * k) for k in (0, 1))
            even, odd = (e.shuffle(low, high, range(k, 2 * SIDE, 2)) for k in (0, 1))
            for part, words in enumerate(_side_by_side(e, even, odd, _half_up)):
                e.store(words, e.scaled(weights, i, 64), part * e.shape.weights_bytes)
            return []

        e.loop(_halves(e, count), turn)

    return _tile_intrinsic(types.void, (shape, address, address, types.int64), emit)


def _half_up(e: Emitter, p: Value) -> Value:
    """Bits of weights whose upper half is the nearest bfloat16, ties away from 0.

    A NaN whose payload overflows comes from float16; of those the first part, which is cut, stays NaN.
    """
    bits = e.b.bitcast(p, ir.VectorType(I32, SIDE))
    return e.b.add(bits, e.constant(bits.type, 0x8000))


def _halves(e: Emitter, count: Value) -> Value:
    """Steps of 32 keys that hold ``count``."""
    return e.b.lshr(e.add(count, MATRIX_KEYS - 1), ir.Constant(I64, 5))


@intrinsic(prefer_literal=True)
def weigh_tiles(typing_context, shape, blocks, o, p, table, ahead, area, count):
    """o += p . v for ``blocks`` x 16 rows: p as bfloat16 parts (rows, TILE).

    Up to the next 32 keys past ``count`` weights are 0 and V rows finite. Meanwhile the K rows in ``ahead``, one for
    each key, come towards the core.
    """
    n = blocks.literal_value

    def emit(e: Emitter, o: Value, p: Value, table: Value, ahead: Value, area: Value, count: Value) -> None:
        shape, parts = e.shape, e.shape.parts
        chunks = shape.head_dim_v // shape.chunk
        lines = -(-TILE * e.lines(shape.head_dim) // (2 * chunks))  # that a chunk asks for in pairs, then in products
        pair_lines, product_lines = -(-lines // (TILE // 2)), -(-lines // (2 * TILE // MATRIX_KEYS))
        halves = _halves(e, count)
        totals = {(block, parity): 2 * 3 * parity + block for block in range(n) for parity in (0, 1)}

        def operand(part: int, parity: int) -> Value:
            return e.add(area, (2 * part + parity) * (TILE // MATRIX_KEYS) * TILE_BYTES)

        def chunk(c: Value, carried: list[Value]) -> list[Value]:
            inside, asked = e.b.shl(c, ir.Constant(I64, 6)), e.b.mul(c, ir.Constant(I64, 2 * lines))

            def pair(i: Value, carried: list[Value]) -> list[Value]:
                line = e.b.add(asked, e.b.mul(i, ir.Constant(I64, pair_lines)))
                e.ask(ahead, count, shape.head_dim, line, pair_lines)
                rows = [e.load(e.scaled(table, i, 16), I64, 8 * k) for k in (0, 1)]
                values = [e.decode(e.b.add(row, inside), shape.chunk) for row in rows]
                for parity, (even, odd) in enumerate(zip(*values, strict=True)):
                    for part, words in enumerate(_side_by_side(e, even, odd)):
                        e.store(words, e.scaled(operand(part, parity), i, 64))
                return []

            e.loop(e.b.shl(halves, ir.Constant(I64, 4)), pair)
            columns = {
                (block, parity): e.add(e.scaled(o, c, 2 * 64), block * SIDE * shape.o_row_bytes + 64 * parity)
                for block, parity in totals
            }
            for place, register in totals.items():
                _load_tile(e, register, columns[place], shape.o_row_bytes)

            def half(h: Value, carried: list[Value]) -> list[Value]:
                line = e.add(e.b.add(asked, e.b.mul(h, ir.Constant(I64, 2 * product_lines))), lines)
                e.ask(ahead, count, shape.head_dim, line, 2 * product_lines)
                for part in range(parts):
                    for block in range(n):
                        weights = e.add(e.scaled(p, h, 64), block * SIDE * 2 * TILE + part * shape.weights_bytes)
                        _load_tile(e, 2 + block, weights, 2 * TILE)
                    for other in range(parts):
                        for parity in (0, 1):
                            _load_tile(e, 4 + parity, e.scaled(operand(other, parity), h, TILE_BYTES), 64)
                            for block in range(n):
                                _multiply(e, totals[block, parity], 2 + block, 4 + parity)
                return []

            e.loop(halves, half)
            for place, register in totals.items():
                _store_tile(e, register, columns[place], shape.o_row_bytes)
            return []

        e.loop(ir.Constant(I64, chunks), chunk)

    return _tile_intrinsic(types.void, (shape, blocks, *[types.int64] * 6), emit)
