"""The softmax step of a tile (2.4.1), by rows or by squares, and what a score meets before it.

The state of a unit's rows is in scratch: m, the largest score in the units that scores are in, and l. o is not scaled.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

from flashdecoding.cpu.arguments import argument, sequence_field
from flashdecoding.cpu.matrix import SIDE, round_row, round_square
from flashdecoding.cpu.rows import (
    load,
    prefetch_v,
    row_alibi,
    row_exponentials,
    row_maximum,
    row_softcap,
    scale_row,
    store,
)
from flashdecoding.cpu.shape import MATRIX_KEYS, TILE, fact, place
from flashdecoding.cpu.squares import by_rows, exponentials, move_maxima
from flashdecoding.cpu.tiles import by_tiles, inlined, kernel, key_position, padded_count, sequence_index

LOG2_E = 1.0 / math.log(2.0)


@kernel
def row_slope(args, seq, head, row):
    """ALiBi slope of a row, in log2 units."""
    group = argument(args, "group_size")
    q_head = (sequence_index(args, seq) * argument(args, "kv_heads") + head) * group + row % group
    return load("float64", argument(args, "alibi"), q_head) * LOG2_E


@kernel
def score_factor(args):
    """What makes log2 units of the scores that reach the softmax step."""
    return 1.0 if argument(args, "alibi") else argument(args, "factor")


@kernel
def adjust_scores(shape, args, seq, head, row, s, count, scratch, differ, r):
    """Soft cap, ALiBi and visibility on one row of scores; either of the first two leaves log2 units."""
    if argument(args, "inverse_softcap") != 0.0:
        row_softcap(shape, s, count, argument(args, "inverse_softcap"), argument(args, "softcap"))
    if argument(args, "alibi"):
        origin = key_position(args, seq, load("int64", place(shape, scratch, "keys"), 0))
        query = float(sequence_field(seq, "q_start") + row // argument(args, "group_size") - origin)
        anchor = load("float64", place(shape, scratch, "anchor"), r)
        offsets, slope = place(shape, scratch, "offset"), row_slope(args, seq, head, row)
        row_alibi(shape, s, count, argument(args, "factor"), offsets, query, anchor, slope)
    if differ:
        for j in range(count):
            if not load("uint8", place(shape, scratch, "seen") + r * TILE, j):
                store_score(shape, s, j, -math.inf)
    for j in range(count, padded_count(shape, count)):
        store_score(shape, s, j, -math.inf)


@inlined
def fill_anchors(shape, args, seq, first_row, rows, first, stop, scratch):
    """Distance of each row from the last key of the split that it may see."""
    for r in range(rows):
        last = max(first, min(stop, load("int64", place(shape, scratch, "high"), r)) - 1)
        position = sequence_field(seq, "q_start") + (first_row + r) // argument(args, "group_size")
        distance = abs(float(position - key_position(args, seq, last)))
        store("float64", place(shape, scratch, "anchor"), r, distance)


@inlined
def finish_maxima(shape, args, seq, head, first_row, rows, scratch, ml):
    """m and l of the rows of a unit leave: m in log2 units, with the part of an ALiBi bias that all its keys share."""
    factor = score_factor(args)
    for r in range(rows):
        m = load("float64", place(shape, scratch, "m"), r)
        if m > -math.inf:
            m *= factor
            if argument(args, "alibi"):
                anchor = load("float64", place(shape, scratch, "anchor"), r)
                m -= row_slope(args, seq, head, first_row + r) * anchor
        store("float64", ml, 2 * r, m)
        store("float64", ml, 2 * r + 1, load("float64", place(shape, scratch, "l"), r))


@kernel
def store_score(shape, s, j, value):
    if fact(shape, "score_bytes") == 8:
        store("float64", s, j, value)
    else:
        store("float32", s, j, value)


@inlined
def fill_offsets(shape, args, seq, count, scratch):
    """Positions of the tile's keys relative to the first, for ALiBi."""
    keys = place(shape, scratch, "keys")
    origin = key_position(args, seq, load("int64", keys, 0))
    for j in range(count):
        offset = float(key_position(args, seq, load("int64", keys, j)) - origin)
        store("float64", place(shape, scratch, "offset"), j, offset)


@kernel
def softmax_step(shape, p, s, count, factor, m, l, o):
    """One step of online softmax (2.4.1) on a row: scores become weights; m, l and o move to the new maximum."""
    base, top = load("float64", m, 0), row_maximum(shape, s, count)
    if top > base:
        shrink = 2.0 ** ((base - top) * factor)
        scale_row(shape, o, shrink)
        store("float64", m, 0, top)
        store("float64", l, 0, load("float64", l, 0) * shrink)
        base = top
    if base == -math.inf:
        base = 0.0
    store("float64", l, 0, load("float64", l, 0) + row_exponentials(shape, p, s, count, base, factor))


@kernel
def softmax_squares(shape, rows, square_rows, count, factor, scratch, o):
    """The same for ``square_rows`` of a tile, a lane for each row; ``rows`` are in use."""
    v, lanes, padded = place(shape, scratch, "v"), fact(shape, "lanes"), padded_count(shape, count)
    for r in range(0, square_rows, lanes):
        s = place(shape, scratch, "squares") + r * fact(shape, "s_row_bytes")
        m, l = place(shape, scratch, "m") + 8 * r, place(shape, scratch, "l") + 8 * r
        shrink = place(shape, scratch, "shrink")
        if move_maxima(shape, s, count, padded, factor, m, l, shrink + 8 * r):
            for row in range(r, min(r + lanes, rows)):
                by = load("float64", shrink, row)
                if by != 1.0:
                    scale_row(shape, o + row * fact(shape, "o_row_bytes"), by)
        if not fact(shape, "matrix"):
            exponentials(shape, s, padded, factor, m, l, 0, v)
            by_rows(shape, "sums", place(shape, scratch, "p") + r * fact(shape, "p_row_bytes"), s, padded)
            continue
        if square_rows > SIDE:  # the half of the V rows that the scores did not ask for
            exponentials(shape, s, padded, factor, m, l, 8, v + 8 * (SIDE + r // 2))
        else:
            exponentials(shape, s, padded, factor, m, l, 16, v + 8 * SIDE)
        round_square(shape, place(shape, scratch, "weights") + r * TILE * 2, s, count)


@kernel
def softmax_rows(shape, args, seq, head, first_row, begin, rows, count, scratch, differ, o):
    """The same for rows [begin, rows), one by one."""
    padded, factor = padded_count(shape, count), score_factor(args)
    for r in range(begin, rows):
        s, at = place(shape, scratch, "s") + r * fact(shape, "s_row_bytes"), scratch + 8 * r
        p = place(shape, scratch, "p") + r * fact(shape, "p_row_bytes")
        adjust_scores(shape, args, seq, head, first_row + r, s, count, scratch, differ, r)
        m, l = place(shape, at, "m"), place(shape, at, "l")
        softmax_step(shape, p, s, padded, factor, m, l, o + r * fact(shape, "o_row_bytes"))
        if by_tiles(shape, rows):
            round_row(shape, place(shape, scratch, "weights") + r * TILE * 2, p, count)


@kernel
def squares_to_rows(shape, square_rows, count, scratch):
    """Scores by keys become scores by rows, for what is done row by row."""
    padded = padded_count(shape, count)
    for r in range(0, square_rows, fact(shape, "lanes")):
        offset = r * fact(shape, "s_row_bytes")
        square = place(shape, scratch, "squares") + offset
        by_rows(shape, "scores", place(shape, scratch, "s") + offset, square, padded)
    if fact(shape, "matrix"):
        for j in range(0, padded, MATRIX_KEYS):
            prefetch_v(shape, place(shape, scratch, "v") + 8 * (j + SIDE), SIDE)
