"""The micro-kernels: a few queries against a few K or V rows, in registers.

Each is a Numba intrinsic. Arguments named for areas of memory are addresses (int64); ``shape`` and ``rows`` are
compile-time. Layouts: q (rows, padded_dim) and s (rows, TILE) of type ``scores``, p (rows, TILE) and o (rows,
padded_dim_v) of type ``sums``; a ``table`` holds the address of each K or V row of the tile, so contiguous, strided and
paged caches are one case.

Rows to come are asked for a line at a time between the multiplications: a core that has asked for all the lines it may
wait for does little else.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flashdecoding.cpu.shape import TILE
from flashdecoding.cpu.vector import I64, Emitter, Value, address, vector_intrinsic

KEYS = 4  # keys a block of scores; tiles are padded to a multiple with copies of their last row
SQUARE_STEP = 4  # dimensions a loop turn of square_dots
SQUARE_CHAIN = 16  # dimensions summed in one go

assert TILE % KEYS == 0


def _span(row_bytes: int, parts: int) -> int:
    """Whole lines of a row that each of ``parts`` turns asks for."""
    return -(-row_bytes // (64 * parts)) * 64


@intrinsic(prefer_literal=True)
def dots(typing_context, shape, rows, s, q, table, ahead):
    """s[r, j] = q[r] . k[j] for ``rows`` queries and KEYS keys; ``s`` and the tables point at the first key.

    Meanwhile the V rows whose addresses are in ``ahead``, one for each key, are brought towards the core.
    """
    n = rows.literal_value

    def emit(e: Emitter, s: Value, q: Value, table: Value, ahead: Value) -> None:
        shape = e.shape
        keys = [e.load(table, I64, 8 * j) for j in range(KEYS)]
        coming = [e.load(ahead, I64, 8 * j) for j in range(KEYS)]
        span = _span(shape.head_dim_v * shape.element_bytes, shape.padded_dim // shape.chunk)
        lines = [(v, offset) for v in coming for offset in range(0, span, 64)]

        def body(i: Value, valid: int, total: list[Value]) -> list[Value]:
            pairs = [e.decode(e.scaled(k, i, shape.chunk * shape.element_bytes), valid) for k in keys]
            queries, done = e.scaled(q, i, shape.chunk * shape.score_bytes), e.b.mul(i, ir.Constant(I64, span))
            total = list(total)
            for step in range(2 * n):
                half, r = divmod(step, n)
                for v, offset in lines[len(lines) * step // (2 * n) : len(lines) * (step + 1) // (2 * n)]:
                    e.prefetch(e.b.add(v, done), offset, offset + 64)
                query = e.load(queries, e.score, r * shape.q_row_bytes + half * e.lanes * shape.score_bytes)
                for j in range(KEYS):
                    total[r * KEYS + j] = e.fma(query, pairs[j][half], total[r * KEYS + j])
            return total

        total = e.each_chunk(shape.head_dim, body, [e.constant(e.score, 0.0)] * (n * KEYS))
        for r in range(n):
            e.store(e.fold(total[r * KEYS : (r + 1) * KEYS], e.b.fadd), s, r * shape.s_row_bytes)

    return vector_intrinsic(types.void, (shape, rows, address, address, address, address), emit)


@intrinsic(prefer_literal=True)
def transpose_rows(typing_context, shape, columns, q):
    """columns[d, r] = q[r, d] for ``lanes`` packed rows."""

    def emit(e: Emitter, columns: Value, q: Value) -> None:
        vector = e.lanes * e.shape.score_bytes

        def body(i: Value, carried: list[Value]) -> list[Value]:
            at, to = e.scaled(q, i, vector), e.scaled(columns, i, e.lanes * vector)
            square = e.transpose([e.load(at, e.score, r * e.shape.q_row_bytes) for r in range(e.lanes)])
            for d, column in enumerate(square):
                e.store(column, to, d * vector)
            return []

        e.loop(ir.Constant(I64, e.shape.padded_dim // e.lanes), body)

    return vector_intrinsic(types.void, (shape, address, address), emit)


@intrinsic(prefer_literal=True)
def square_dots(typing_context, shape, s, columns, wide, ahead):
    """s[j, r] = q[r] . k[j] for ``lanes`` queries, transposed as ``columns``, and as many widened keys.

    With a lane for each query nothing is summed across lanes: 16 queries run at twice the speed of :func:`dots`. Every
    SQUARE_CHAIN products are summed by themselves: each addition of a chain may round at the size of the largest.
    Meanwhile the V rows whose addresses are in ``ahead``, one for each key, are brought towards the core.
    """

    def emit(e: Emitter, s: Value, columns: Value, wide: Value, ahead: Value) -> None:
        shape = e.shape
        vector = e.lanes * shape.score_bytes
        chained = min(SQUARE_CHAIN, shape.chunk)
        steps = chained // SQUARE_STEP
        step_lines = -(-e.lanes * e.lines(shape.head_dim_v) // (shape.padded_dim // SQUARE_STEP))
        zero = [e.constant(e.score, 0.0)] * e.lanes

        def step(i: Value, sums: list[Value]) -> list[Value]:
            e.ask(
                ahead, ir.Constant(I64, e.lanes), shape.head_dim_v, e.b.mul(i, ir.Constant(I64, step_lines)), step_lines
            )
            column = e.scaled(columns, i, SQUARE_STEP * vector)
            element = e.scaled(wide, i, SQUARE_STEP * shape.score_bytes)
            sums = list(sums)
            for d in range(SQUARE_STEP):
                queries = e.load(column, e.score, d * vector)
                for j in range(e.lanes):
                    key = e.load(element, e.score.element, j * shape.q_row_bytes + d * shape.score_bytes)
                    sums[j] = e.fma(e.splat(key), queries, sums[j])
            return sums

        def chain(i: Value, total: list[Value]) -> list[Value]:
            first = e.b.mul(i, ir.Constant(I64, steps))
            sums = e.loop(ir.Constant(I64, steps), lambda j, sums: step(e.b.add(first, j), sums), zero)
            return [e.b.fadd(x, y) for x, y in zip(total, sums, strict=True)]

        total = e.loop(ir.Constant(I64, shape.padded_dim // chained), chain, zero)
        for j, scores in enumerate(total):
            e.store(scores, s, j * vector)

    return vector_intrinsic(types.void, (shape, address, address, address, address), emit)


@intrinsic(prefer_literal=True)
def weigh(typing_context, shape, rows, o, p, table, ahead, pace, count):
    """o[r] += sum over j < count of p[r, j] * v[j] for ``rows`` rows: the numerator of the output.

    A block of columns accumulates in registers while the keys stream by. Meanwhile the K rows whose addresses are in
    ``ahead`` are brought towards the core, ``pace`` / 256 of one for each key.
    """
    n = rows.literal_value

    def emit(e: Emitter, o: Value, p: Value, table: Value, ahead: Value, pace: Value, count: Value) -> None:
        shape = e.shape
        full, rest = divmod(shape.head_dim_v, shape.chunk)
        width = max(1, min(4, shape.value_rows // n))  # chunks a block
        blocks, left = divmod(full, width)
        last = [shape.chunk] * left + ([rest] if rest else [])
        span = _span(shape.head_dim * shape.element_bytes, blocks + bool(last))

        def block(b: Value, chunks: list[int]) -> None:
            columns = e.scaled(o, b, width * shape.chunk * shape.sum_bytes)
            lane_bytes = e.lanes * shape.sum_bytes
            places = [r * shape.o_row_bytes + c * lane_bytes for r in range(n) for c in range(2 * len(chunks))]
            read, asked = (
                e.b.mul(b, ir.Constant(I64, width * shape.chunk * shape.element_bytes)),
                e.b.mul(b, ir.Constant(I64, span)),
            )

            def body(j: Value, total: list[Value]) -> list[Value]:
                progress = e.b.mul(j, pace)
                coming = e.load(e.scaled(ahead, e.b.lshr(progress, ir.Constant(I64, 8)), 8), I64)
                fresh = e.b.icmp_unsigned("<", e.b.and_(progress, ir.Constant(I64, 255)), pace)
                e.prefetch(e.b.select(fresh, e.b.add(coming, asked), o), 0, span)
                v = e.b.add(e.load(e.scaled(table, j, 8), I64), read)
                chunk_bytes = shape.chunk * shape.element_bytes
                values = [x for c, valid in enumerate(chunks) for x in e.decode(e.add(v, c * chunk_bytes), valid)]
                values = [e.convert(x, e.sum) for x in values]
                weights, updated = e.scaled(p, j, shape.sum_bytes), []
                for r in range(n):
                    weight = e.splat(e.load(weights, e.sum.element, r * shape.p_row_bytes))
                    row_total = total[r * len(values) : (r + 1) * len(values)]
                    updated += [e.fma(weight, x, t) for x, t in zip(values, row_total, strict=True)]
                return updated

            total = e.loop(count, body, [e.load(columns, e.sum, place) for place in places])
            for place, t in zip(places, total, strict=True):
                e.store(t, columns, place)

        def full_block(b: Value, carried: list[Value]) -> list[Value]:
            block(b, [shape.chunk] * width)
            return []

        if blocks:
            e.loop(ir.Constant(I64, blocks), full_block)
        if last:
            block(ir.Constant(I64, blocks), last)

    arguments = (shape, rows, address, address, address, address, types.int64, types.int64)
    return vector_intrinsic(types.void, arguments, emit)
