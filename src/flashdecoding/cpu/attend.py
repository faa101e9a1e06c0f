"""One tile for a block of rows: scores, the softmax step, the weighted sum of V."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

from flashdecoding.cpu.arguments import argument
from flashdecoding.cpu.matrix import SIDE, evenly_spaced, part_rows, tile_scores, weigh_tiles
from flashdecoding.cpu.products import KEYS, dots, square_dots, weigh
from flashdecoding.cpu.rows import add_row, load, non_finite_row, store, widen_row, zero_row
from flashdecoding.cpu.shape import MATRIX_KEYS, TILE, fact, place
from flashdecoding.cpu.softmax import fill_offsets, score_factor, softmax_rows, softmax_squares, squares_to_rows
from flashdecoding.cpu.tiles import (
    by_tiles,
    fill_v,
    gather_rows,
    inlined,
    kernel,
    padded_count,
    rows_agree,
    rows_by_square,
    visible_keys,
)


@kernel
def left_operand(shape, table, copy):
    """Base address and step of 16 K rows; rows that do not step evenly, or are several parts, are copied first."""
    first, row_bytes = load("int64", table, 0), fact(shape, "head_dim") * fact(shape, "element_bytes")
    if fact(shape, "parts") > 1:
        part_rows(shape, copy, table)
        return copy, row_bytes
    if evenly_spaced(shape, table):
        return first, load("int64", table, 1) - first
    for j in range(SIDE):
        row = load("int64", table, j)
        for word in range(row_bytes // 8):
            store("int64", copy + j * row_bytes, word, load("int64", row, word))
    return copy, row_bytes


@kernel
def score_tiles(shape, square_rows, padded, k, scratch):
    """scores by keys = q . k on the matrix unit; whether some may be NaN for no reason."""
    v, s = place(shape, scratch, "v"), place(shape, scratch, "squares")
    columns, spare = place(shape, scratch, "columns"), place(shape, scratch, "operands")
    copies = place(shape, scratch, "wide")
    half_bytes, broken = SIDE * fact(shape, "head_dim") * 2 * fact(shape, "parts"), 0
    for j in range(0, padded, MATRIX_KEYS):
        first, first_step = left_operand(shape, k + 8 * j, copies)
        second, second_step = left_operand(shape, k + 8 * (j + SIDE), copies + half_bytes)
        for r in range(0, square_rows, SIDE):
            to = s + r * fact(shape, "s_row_bytes") + j * 64
            queries = columns + r * fact(shape, "q_row_bytes")
            if square_rows > SIDE:
                coming = v + 8 * (j + r // 2)
                broken |= tile_scores(shape, to, queries, first, first_step, second, second_step, spare, 8, coming)
            else:
                coming = v + 8 * j
                broken |= tile_scores(shape, to, queries, first, first_step, second, second_step, spare, 16, coming)
    return broken


@kernel
def mend_scores(shape, rows, count, k, scratch):
    """Scores by keys again where they are NaN, on the vector units: parts of an infinity make NaN of any score."""
    s, squares, lanes = place(shape, scratch, "s"), place(shape, scratch, "squares"), fact(shape, "lanes")
    for r in range(rows):
        for j in range(0, padded_count(shape, count), KEYS):
            queries = scratch + r * fact(shape, "q_row_bytes")
            dots(shape, 1, s + j * fact(shape, "score_bytes"), queries, k + 8 * j, k + 8 * j)
        square = squares + r // lanes * lanes * fact(shape, "s_row_bytes")
        for j in range(count):
            if math.isnan(load("float32", square + j * fact(shape, "vector_bytes"), r % lanes)):
                value = load("float32", s, j)
                store("float32", square + j * fact(shape, "vector_bytes"), r % lanes, value)


@kernel
def score_keys(shape, rows, count, k, scratch):
    """scores = q . k for a tile, by keys for rows in squares, while its V rows are on their way."""
    v, s = place(shape, scratch, "v"), place(shape, scratch, "s")
    lanes, q_bytes, s_bytes = fact(shape, "lanes"), fact(shape, "q_row_bytes"), fact(shape, "s_row_bytes")
    wide, columns = place(shape, scratch, "wide"), place(shape, scratch, "columns")
    squares = place(shape, scratch, "squares")
    padded, square_rows = padded_count(shape, count), rows_by_square(shape, rows)
    for j in range(count, padded):
        store("int64", k, j, load("int64", k, count - 1))
        store("int64", v, j, place(shape, scratch, "zeros"))
    if fact(shape, "matrix") and square_rows:
        if score_tiles(shape, square_rows, padded, k, scratch):
            mend_scores(shape, rows, count, k, scratch)
        return
    for block in range(0, padded, lanes):
        if square_rows:
            for j in range(lanes):
                widen_row(shape, wide + j * q_bytes, load("int64", k, block + j), 1.0)
            for r in range(0, square_rows, lanes):
                to = squares + r * s_bytes + block * fact(shape, "vector_bytes")
                square_dots(shape, to, columns + r * q_bytes, wide, v + 8 * block)
        for j in range(block, block + lanes, KEYS):
            if square_rows == rows:
                break
            to = s + j * fact(shape, "score_bytes")
            r = square_rows
            while r + 4 <= rows:
                dots(shape, 4, to + r * s_bytes, scratch + r * q_bytes, k + 8 * j, v + 8 * j)
                r += 4
            if r + 2 <= rows:
                dots(shape, 2, to + r * s_bytes, scratch + r * q_bytes, k + 8 * j, v + 8 * j)
                r += 2
            if r < rows:
                dots(shape, 1, to + r * s_bytes, scratch + r * q_bytes, k + 8 * j, v + 8 * j)


@kernel
def weigh_values(shape, rows, count, ahead, scratch, o):
    """o += weights . v for a tile, while K rows of the next tile are on their way."""
    v, p = place(shape, scratch, "v"), place(shape, scratch, "p")
    if by_tiles(shape, rows):
        rounded, area = place(shape, scratch, "weights"), place(shape, scratch, "operands")
        if rows > SIDE:
            weigh_tiles(shape, 2, o, rounded, v, ahead, area, count)
        else:
            weigh_tiles(shape, 1, o, rounded, v, ahead, area, count)
        return
    p_bytes, o_bytes, most = fact(shape, "p_row_bytes"), fact(shape, "o_row_bytes"), fact(shape, "value_rows")
    blocks, r = (rows + most - 1) // most, 0
    pace = (256 + blocks - 1) // blocks
    while r < rows:
        coming = ahead + 8 * (min(r // most, blocks - 1) * count // blocks)
        if most >= 8 and r + 8 <= rows:
            weigh(shape, 8, o + r * o_bytes, p + r * p_bytes, v, coming, pace, count)
            r += 8
        elif most >= 4 and r + 4 <= rows:
            weigh(shape, 4, o + r * o_bytes, p + r * p_bytes, v, coming, pace, count)
            r += 4
        elif r + 2 <= rows:
            weigh(shape, 2, o + r * o_bytes, p + r * p_bytes, v, coming, pace, count)
            r += 2
        else:
            weigh(shape, 1, o + r * o_bytes, p + r * p_bytes, v, coming, pace, count)
            r += 1


@inlined
def any_non_finite(shape, count, scratch):
    total = 0.0
    for j in range(count):
        total += non_finite_row(shape, load("int64", place(shape, scratch, "v"), j))
    return total != 0.0  # NaN


@kernel
def weigh_seen_values(shape, rows, count, scratch, o):
    """The same row by row, with zeros in place of the V rows that a row does not see: 0 * NaN must not reach it.

    The unit that multiplies is the block's own, so the rows' bits are what they are without the NaN.
    """
    v, seen, zeros = place(shape, scratch, "v"), place(shape, scratch, "seen"), place(shape, scratch, "zeros")
    o_bytes, p_bytes = fact(shape, "o_row_bytes"), fact(shape, "p_row_bytes")
    for r in range(rows):
        table = place(shape, scratch, "row_v")
        for j in range(padded_count(shape, count)):
            sees = j < count and load("uint8", seen + r * TILE, j)
            store("int64", table, j, load("int64", v, j) if sees else zeros)
        if by_tiles(shape, rows):  # as the first of 16 rows; what stands in the others is dropped
            alone, area = place(shape, scratch, "alone"), place(shape, scratch, "operands")
            rounded = place(shape, scratch, "weights") + r * TILE * 2
            for row in range(SIDE):
                zero_row(shape, alone + row * o_bytes)
            add_row(shape, alone, o + r * o_bytes, 1.0)
            weigh_tiles(shape, 1, alone, rounded, table, table, area, count)
            zero_row(shape, o + r * o_bytes)
            add_row(shape, o + r * o_bytes, alone, 1.0)
        else:
            weigh(shape, 1, o + r * o_bytes, place(shape, scratch, "p") + r * p_bytes, table, table, 0, count)


@inlined
def attend_tile(shape, args, seq, head, first_row, rows, first, count, k, ahead, scratch, o):
    """One tile of keys [first, first + count) for all rows of a block."""
    keys, differ = place(shape, scratch, "keys"), False
    fill_v(args, seq, head, first, count, place(shape, scratch, "v"))
    if argument(args, "mask") or not rows_agree(shape, rows, first, count, scratch):
        count, differ = visible_keys(shape, args, seq, head, first_row, rows, first, count, k, scratch)
        if count == 0:
            return
    elif argument(args, "alibi"):
        for j in range(count):
            store("int64", keys, j, first + j)
    element, gathered = fact(shape, "element_bytes"), place(shape, scratch, "gather")
    if argument(args, "k_stride_d") != element:
        area = gathered + fact(shape, "gather_row_bytes")
        gather_rows(shape, k, argument(args, "k_stride_d"), fact(shape, "head_dim"), area, count)
    if argument(args, "v_stride_d") != element:
        area = gathered + fact(shape, "gather_row_bytes") * (1 + TILE)
        v = place(shape, scratch, "v")
        gather_rows(shape, v, argument(args, "v_stride_d"), fact(shape, "head_dim_v"), area, count)
    score_keys(shape, rows, count, k, scratch)
    if argument(args, "alibi"):
        fill_offsets(shape, args, seq, count, scratch)
    square_rows = rows_by_square(shape, rows)
    if square_rows and (differ or argument(args, "alibi") or argument(args, "inverse_softcap") != 0.0):
        squares_to_rows(shape, square_rows, count, scratch)
        square_rows = 0
    softmax_squares(shape, rows, square_rows, count, score_factor(args), scratch, o)
    softmax_rows(shape, args, seq, head, first_row, square_rows, rows, count, scratch, differ, o)
    if differ and any_non_finite(shape, count, scratch):
        weigh_seen_values(shape, rows, count, scratch, o)
    else:
        weigh_values(shape, rows, count, ahead, scratch, o)
