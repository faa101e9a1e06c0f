"""The micro-kernels: a few rows of queries against a few rows of K or V, in registers.

Each is a Numba intrinsic. Arguments named for areas of memory are addresses (int64); ``shape`` and ``rows`` are
compile-time.
Layouts: q (rows, padded_dim) and s (rows, TILE) of type ``scores``, o (rows, padded_dim_v) of type ``sums``; ``table``
holds the address of each K or V row of the tile, so contiguous, strided and paged caches are one case.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flashdecoding.cpu.shape import TILE, KernelShape
from flashdecoding.cpu.vector import FLOATS, I64, Emitter, Value, counted_loop

SQUARE_DEPTH = 64  # products summed in one chain by square_dots
SQUARE_STEP = 4  # dimensions a loop turn

ADDRESSES = 8  # row addresses written at a time
KEYS = 4  # keys a block of scores; tiles are padded to a multiple with copies of their last row

address = types.int64
NUMBERS = {"float32": types.float32, "float64": types.float64}
SCALARS = {"uint8": types.uint8, "int32": types.int32, "int64": types.int64, **NUMBERS}


def _micro(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """An intrinsic's signature and code; ``arguments[0]`` is the shape, ``emit`` gets the run-time values."""
    shape = arguments[0].shape
    live = [i for i, ty in enumerate(arguments) if i and not isinstance(ty, types.Literal)]

    def code(context, builder, signature, values):
        returned = emit(Emitter(builder, shape), *(values[i] for i in live))
        return context.get_dummy_value() if result is types.void else returned

    return result(*arguments), code


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
def prefetch_rows(typing_context, shape, table, count):
    """Bring the first ``count`` K rows of a table towards the core."""

    def emit(e: Emitter, table: Value, count: Value) -> None:
        def body(j: Value, carried: list[Value]) -> list[Value]:
            row = e.load(e.b.add(table, e.b.shl(j, ir.Constant(I64, 3))), I64)
            e.prefetch(row, 0, e.shape.head_dim * e.shape.element_bytes)
            return []

        e.loop(count, body)

    return _micro(types.void, (shape, address, types.int64), emit)


@intrinsic(prefer_literal=True)
def pack_row(typing_context, shape, packed, row, factor):
    """packed[:] = row * factor, rounded once: a query row (own dtype, adjacent elements) as padded scores."""

    def emit(e: Emitter, packed: Value, row: Value, factor: Value) -> None:
        wide = ir.VectorType(FLOATS["float64"], e.lanes)
        f = e.splat(factor)
        for start in range(0, e.shape.head_dim, e.shape.chunk):
            for half, v in enumerate(e.decode_row(row, start, e.shape.head_dim)):
                scaled = e.convert(e.b.fmul(e.convert(v, wide), f), e.score)
                e.store(scaled, packed, (start + half * e.lanes) * e.shape.score_bytes)

    return _micro(types.void, (shape, address, address, types.float64), emit)


@intrinsic(prefer_literal=True)
def widen_row(typing_context, shape, packed, row):
    """packed[:] = row: a K row as padded scores."""

    def emit(e: Emitter, packed: Value, row: Value) -> None:
        for start in range(0, e.shape.head_dim, e.shape.chunk):
            for half, v in enumerate(e.decode_row(row, start, e.shape.head_dim)):
                e.store(v, packed, (start + half * e.lanes) * e.shape.score_bytes)

    return _micro(types.void, (shape, address, address), emit)


@intrinsic(prefer_literal=True)
def dots(typing_context, shape, rows, s, q, table, ahead):
    """s[r, j] = q[r] . k[j] for ``rows`` queries and KEYS keys; ``s`` and the tables point at the first key.

    Meanwhile the V rows whose addresses are in ``ahead``, one for each key, are brought towards the core, a line at a
    time: a core that has asked for all the lines it may wait for does little else.
    """
    n = rows.literal_value

    def emit(e: Emitter, s: Value, q: Value, table: Value, ahead: Value) -> None:
        shape = e.shape
        keys = [e.load(table, I64, 8 * j) for j in range(KEYS)]
        coming = [e.load(ahead, I64, 8 * j) for j in range(KEYS)]
        v_bytes = shape.head_dim_v * shape.element_bytes
        lines = [(v, offset) for v in coming for offset in range(0, v_bytes, 64)]
        steps = 2 * n * (shape.padded_dim // shape.chunk)
        zero = e.constant(e.score, 0.0)
        total = [[zero] * KEYS for _ in range(n)]
        step = 0
        for start in range(0, shape.head_dim, shape.chunk):
            pairs = [e.decode_row(k, start, shape.head_dim) for k in keys]
            for half in (0, 1):
                for r in range(n):
                    for v, offset in lines[len(lines) * step // steps : len(lines) * (step + 1) // steps]:
                        e.prefetch(v, offset, offset + 64)
                    step += 1
                    query = e.load(q, e.score, r * shape.q_row_bytes + (start + half * e.lanes) * shape.score_bytes)
                    for j in range(KEYS):
                        total[r][j] = e.fma(query, pairs[j][half], total[r][j])
        for r in range(n):
            e.store(e.fold(total[r], e.b.fadd), s, r * shape.s_row_bytes)

    return _micro(types.void, (shape, rows, address, address, address, address), emit)


@intrinsic(prefer_literal=True)
def transpose_rows(typing_context, shape, columns, q):
    """columns[d, r] = q[r, d] for ``lanes`` packed rows."""

    def emit(e: Emitter, columns: Value, q: Value) -> None:
        vector = e.lanes * e.shape.score_bytes
        for d in range(0, e.shape.padded_dim, e.lanes):
            offset = d * e.shape.score_bytes
            square = [e.load(q, e.score, r * e.shape.q_row_bytes + offset) for r in range(e.lanes)]
            for i, column in enumerate(e.transpose(square)):
                e.store(column, columns, (d + i) * vector)

    return _micro(types.void, (shape, address, address), emit)


@intrinsic(prefer_literal=True)
def square_dots(typing_context, shape, s, columns, wide, ahead):
    """s[r, j] = q[r] . k[j] for ``lanes`` queries, transposed as ``columns``, and as many widened keys.

    With a lane for each query nothing is summed across lanes: 16 queries run at twice the speed of :func:`dots`. Sums
    of SQUARE_DEPTH products are added up, since one long chain of additions would lose a bit for each doubling.
    Meanwhile the V rows whose addresses are in ``ahead``, one for each key, are brought towards the core.
    """

    def emit(e: Emitter, s: Value, columns: Value, wide: Value, ahead: Value) -> None:
        shape = e.shape
        vector = e.lanes * shape.score_bytes
        blocks = [(d, min(SQUARE_DEPTH, shape.padded_dim - d)) for d in range(0, shape.padded_dim, SQUARE_DEPTH)]
        row_lines = -(-shape.head_dim_v * shape.element_bytes // 64)
        step_lines = -(-e.lanes * row_lines // (shape.padded_dim // SQUARE_STEP))
        total = None
        for first, depth in blocks:
            block_columns, block_wide = e.add(columns, first * vector), e.add(wide, first * shape.score_bytes)

            def body(
                step: Value,
                sums: list[Value],
                first: int = first,
                columns: Value = block_columns,
                wide: Value = block_wide,
            ) -> list[Value]:
                line = e.b.add(
                    e.b.mul(step, ir.Constant(I64, step_lines)), ir.Constant(I64, first // SQUARE_STEP * step_lines)
                )
                for i in range(step_lines):
                    _prefetch_line(e, ahead, e.add(line, i), row_lines)
                column = e.b.add(columns, e.b.mul(step, ir.Constant(I64, SQUARE_STEP * vector)))
                element = e.b.add(wide, e.b.mul(step, ir.Constant(I64, SQUARE_STEP * shape.score_bytes)))
                sums = list(sums)
                for d in range(SQUARE_STEP):
                    queries = e.load(column, e.score, d * vector)
                    for j in range(e.lanes):
                        key = e.load(element, e.score.element, j * shape.q_row_bytes + d * shape.score_bytes)
                        sums[j] = e.fma(e.splat(key), queries, sums[j])
                return sums

            start = [e.constant(e.score, 0.0)] * e.lanes
            sums = e.loop(ir.Constant(I64, depth // SQUARE_STEP), body, start)
            total = sums if total is None else [e.b.fadd(x, y) for x, y in zip(total, sums, strict=True)]
        assert total is not None
        for r, scores in enumerate(e.transpose(total)):
            e.store(scores, s, r * shape.s_row_bytes)

    return _micro(types.void, (shape, address, address, address, address), emit)


def _prefetch_line(e: Emitter, table: Value, line: Value, row_lines: int) -> None:
    """The ``line``-th 64 bytes of ``lanes`` rows laid end to end; past them, again the last row."""
    row, within = e.b.udiv(line, ir.Constant(I64, row_lines)), e.b.urem(line, ir.Constant(I64, row_lines))
    last = ir.Constant(I64, e.lanes - 1)
    row = e.b.select(e.b.icmp_unsigned("<", row, last), row, last)
    at = e.load(e.b.add(table, e.b.shl(row, ir.Constant(I64, 3))), I64)
    e.prefetch(e.b.add(at, e.b.shl(within, ir.Constant(I64, 6))), 0, 64)


def _column_blocks(shape: KernelShape, rows: int) -> list[tuple[int, int]]:
    """(first column, chunks) of the blocks of o that accumulate in registers while the keys stream by."""
    chunks, most = shape.padded_dim_v // shape.chunk, max(1, min(4, shape.value_rows // rows))
    return [(c, min(most, chunks - c)) for c in range(0, chunks, most)]


@intrinsic(prefer_literal=True)
def weigh(typing_context, shape, rows, o, s, table, ahead, pace, count):
    """o[r] += sum over j < count of s[r, j] * v[j] for ``rows`` rows: the numerator of the output.

    Meanwhile the K rows whose addresses are in ``ahead`` are brought towards the core, ``pace`` / 256 of one for each
    key.
    """
    n = rows.literal_value

    def emit(e: Emitter, o: Value, s: Value, table: Value, ahead: Value, pace: Value, count: Value) -> None:
        shape = e.shape
        lane_bytes, k_bytes = e.lanes * shape.sum_bytes, shape.head_dim * shape.element_bytes
        blocks = _column_blocks(shape, n)
        lines = [-(-k_bytes * i // len(blocks)) // 64 * 64 for i in range(len(blocks))] + [k_bytes]
        for block, (first, chunks) in enumerate(blocks):
            vectors = 2 * chunks
            places = [r * shape.o_row_bytes + (2 * first + c) * lane_bytes for r in range(n) for c in range(vectors)]

            def body(
                j: Value, total: list[Value], block: int = block, first: int = first, chunks: int = chunks
            ) -> list[Value]:
                row = e.b.shl(j, ir.Constant(I64, 3))
                progress = e.b.mul(j, pace)
                coming = e.b.shl(e.b.lshr(progress, ir.Constant(I64, 8)), ir.Constant(I64, 3))
                fresh = e.b.icmp_unsigned("<", e.b.and_(progress, ir.Constant(I64, 255)), pace)
                at = e.b.select(fresh, e.load(e.b.add(ahead, coming), I64), o)
                e.prefetch(at, lines[block], lines[block + 1])
                v = e.load(e.b.add(table, row), I64)
                starts = [(first + c) * shape.chunk for c in range(chunks)]
                columns = [e.convert(x, e.sum) for start in starts for x in e.decode_row(v, start, shape.head_dim_v)]
                weights = e.b.add(s, e.b.mul(j, ir.Constant(I64, shape.score_bytes)))
                updated = []
                for r in range(n):
                    p = e.splat(e.convert(e.load(weights, e.score.element, r * shape.s_row_bytes), e.sum.element))
                    row_total = total[r * 2 * chunks : (r + 1) * 2 * chunks]
                    updated += [e.fma(p, x, t) for x, t in zip(columns, row_total, strict=True)]
                return updated

            total = e.loop(count, body, [e.load(o, e.sum, place) for place in places])
            for place, t in zip(places, total, strict=True):
                e.store(t, o, place)

    return _micro(types.void, (shape, rows, address, address, address, address, types.int64, types.int64), emit)


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

    return _micro(types.float64, (shape, address, types.int64), emit)


@intrinsic(prefer_literal=True)
def row_exponentials(typing_context, shape, s, count, base):
    """s[0:count] = 2**(s - base); returns their sum, as a float64 that holds a ``sums`` value."""

    def emit(e: Emitter, s: Value, count: Value, base: Value) -> Value:
        m = e.splat(e.convert(base, e.score.element))

        def body(at: Value, vs: list[Value]) -> list[Value]:
            p = e.exp2(e.b.fsub(e.load(at, e.score), m))
            e.store(p, at)
            return [e.b.fadd(vs[0], e.convert(p, e.sum))]

        (total,) = _each_vector(e, s, count, body, [e.constant(e.sum, 0.0)])
        return e.convert(e.fold([total], e.b.fadd), FLOATS["float64"])

    return _micro(types.float64, (shape, address, types.int64, types.float64), emit)


@intrinsic(prefer_literal=True)
def row_softcap(typing_context, shape, s, count, inverse_cap, cap):
    """s[0:count] = cap * tanh(s * inverse_cap), in float64, since 1 - 2 / (exp(2x) + 1) loses small x."""

    def emit(e: Emitter, s: Value, count: Value, inverse_cap: Value, cap: Value) -> None:
        wide = ir.VectorType(FLOATS["float64"], e.lanes)
        flat, one, two = 20.0, e.constant(wide, 1.0), e.constant(wide, 2.0)  # tanh(20) rounds to 1

        def body(at: Value, vs: list[Value]) -> list[Value]:
            x = e.b.fmul(e.convert(e.load(at, e.score), wide), e.splat(inverse_cap))
            for order, limit in ((">", flat), ("<", -flat)):
                edge = e.constant(wide, limit)
                x = e.b.select(e.b.fcmp_ordered(order, x, edge), edge, x)
            power = e.exp2(e.b.fmul(x, e.constant(wide, 2.0 / math.log(2))))
            tanh = e.b.fsub(one, e.b.fdiv(two, e.b.fadd(power, one)))
            e.store(e.convert(e.b.fmul(tanh, e.splat(cap)), e.score), at)
            return []

        _each_vector(e, s, count, body, [])

    return _micro(types.void, (shape, address, types.int64, types.float64, types.float64), emit)


@intrinsic(prefer_literal=True)
def row_alibi(typing_context, shape, s, count, offsets, query, slope):
    """s[0:count] -= slope * |query - offsets|; positions as scores, relative to the tile's first key."""

    def emit(e: Emitter, s: Value, count: Value, offsets: Value, query: Value, slope: Value) -> None:
        position = e.splat(e.convert(query, e.score.element))
        factor = e.splat(e.convert(e.b.fneg(slope), e.score.element))

        def body(at: Value, vs: list[Value]) -> list[Value]:
            offset = e.load(e.b.add(offsets, e.b.sub(at, s)), e.score)
            distance = e.call("fabs", [e.b.fsub(position, offset)])
            e.store(e.fma(factor, distance, e.load(at, e.score)), at)
            return []

        _each_vector(e, s, count, body, [])

    return _micro(types.void, (shape, address, types.int64, address, types.float64, types.float64), emit)


def _each_column(e: Emitter, body: Callable[[int], None]) -> None:
    for column in range(0, e.shape.padded_dim_v, e.lanes):
        body(column * e.shape.sum_bytes)


@intrinsic(prefer_literal=True)
def scale_row(typing_context, shape, o, factor):
    """o *= factor"""

    def emit(e: Emitter, o: Value, factor: Value) -> None:
        f = e.splat(e.convert(factor, e.sum.element))
        _each_column(e, lambda at: e.store(e.b.fmul(e.load(o, e.sum, at), f), o, at))

    return _micro(types.void, (shape, address, types.float64), emit)


@intrinsic(prefer_literal=True)
def add_row(typing_context, shape, o, other, factor):
    """o += factor * other"""

    def emit(e: Emitter, o: Value, other: Value, factor: Value) -> None:
        f = e.splat(e.convert(factor, e.sum.element))
        _each_column(e, lambda at: e.store(e.fma(f, e.load(other, e.sum, at), e.load(o, e.sum, at)), o, at))

    return _micro(types.void, (shape, address, address, types.float64), emit)


@intrinsic(prefer_literal=True)
def zero_row(typing_context, shape, o):
    """o = 0"""

    def emit(e: Emitter, o: Value) -> None:
        _each_column(e, lambda at: e.store(e.constant(e.sum, 0.0), o, at))

    return _micro(types.void, (shape, address), emit)


@intrinsic(prefer_literal=True)
def non_finite_row(typing_context, shape, v):
    """0.0 if every element of the V row is finite, else NaN."""

    def emit(e: Emitter, v: Value) -> Value:
        total = zero = e.constant(e.score, 0.0)
        for start in range(0, e.shape.head_dim_v, e.shape.chunk):
            for x in e.decode_row(v, start, e.shape.head_dim_v):
                total = e.b.fadd(total, e.b.fmul(x, zero))
        return e.convert(e.fold([total], e.b.fadd), FLOATS["float64"])

    return _micro(types.float64, (shape, address), emit)


@intrinsic(prefer_literal=True)
def write_row(typing_context, shape, is_state, out, o, factor):
    """out = o * factor, in the dtype of q, or of a state (in element order, type ``scores``) if ``is_state``."""
    state = is_state.literal_value

    def emit(e: Emitter, out: Value, o: Value, factor: Value) -> None:
        f = e.splat(e.convert(factor, e.sum.element))
        encode = e.encode_state_row if state else e.encode_row
        for start in range(0, e.shape.head_dim_v, e.shape.chunk):
            low, high = (e.b.fmul(e.load(o, e.sum, (start + k * e.lanes) * e.shape.sum_bytes), f) for k in (0, 1))
            encode(out, start, e.shape.head_dim_v, (low, high))

    return _micro(types.void, (shape, is_state, address, address, types.float64), emit)


assert TILE % KEYS == 0
