"""The micro-kernels: a few queries against a few K or V rows, in registers.

Each is a Numba intrinsic. Arguments named for areas of memory are addresses (int64); ``shape`` and ``rows`` are
compile-time. Layouts: q (rows, padded_dim) and s (rows, TILE) of type ``scores``, o (rows, padded_dim_v) of type
``sums``; a ``table`` holds the address of each K or V row of the tile, so contiguous, strided and paged caches are one
case.

Rows to come are asked for a line at a time between the multiplications: a core that has asked for all the lines it may
wait for does little else.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flashdecoding.cpu.shape import TILE, KernelShape
from flashdecoding.cpu.vector import I64, Emitter, Value, address, vector_intrinsic

KEYS = 4  # keys a block of scores; tiles are padded to a multiple with copies of their last row
SQUARE_DEPTH = 32  # products summed in one chain by square_dots
SQUARE_STEP = 4  # dimensions a loop turn

assert TILE % KEYS == 0


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

    return vector_intrinsic(types.void, (shape, rows, address, address, address, address), emit)


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

    return vector_intrinsic(types.void, (shape, address, address), emit)


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

    return vector_intrinsic(types.void, (shape, address, address, address, address), emit)


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

    return vector_intrinsic(
        types.void, (shape, rows, address, address, address, address, types.int64, types.int64), emit
    )
