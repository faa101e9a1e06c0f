"""The two stages of flash-decoding on a CPU.

Stage 1 (:func:`run_splits`): a unit is one (sequence, row block, split, kv head). Its rows are all queries of the heads
that share the kv head, so K and V are read once for the group. Tiles of TILE keys go through scores, one online
softmax step (2.4.1) and the weighted sum; the numerator stays unnormalised until stage 2.
Stage 2 (:func:`run_merge`): for each output row the splits are merged in order (2.4.2), sinks join, out and lse are
written.

Units and rows are handed out by atomic counters: threads decide who computes an item, never what it is.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

from flashdecoding.cpu.arguments import argument, sequence_field
from flashdecoding.cpu.matrix import (
    SIDE,
    begin_tiles,
    end_tiles,
    evenly_spaced,
    round_row,
    round_square,
    tile_scores,
    weigh_tiles,
)
from flashdecoding.cpu.products import KEYS, dots, square_dots, weigh
from flashdecoding.cpu.rows import (
    add_row,
    fetch_add,
    load,
    non_finite_row,
    prefetch_k,
    prefetch_v,
    row_alibi,
    row_exponentials,
    row_maximum,
    row_softcap,
    scale_row,
    store,
    widen_row,
    write_row,
    zero_row,
)
from flashdecoding.cpu.shape import MATRIX_ROWS, MAX_ROWS, TILE, fact
from flashdecoding.cpu.squares import by_rows, exponentials, move_maxima
from flashdecoding.cpu.tiles import (
    ROW_BASE,
    UNIT_BASE,
    copy_row,
    fill_k,
    fill_v,
    find_sequence,
    gather_rows,
    inlined,
    kernel,
    key_position,
    pack_queries,
    rows_agree,
    rows_by_square,
    sequence_index,
    visible_keys,
)

LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)


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
        origin = key_position(args, seq, load("int64", scratch + fact(shape, "scratch_keys"), 0))
        query = float(sequence_field(seq, "q_start") + row // argument(args, "group_size") - origin)
        anchor = load("float64", scratch + fact(shape, "scratch_anchor"), r)
        offsets, slope = scratch + fact(shape, "scratch_offset"), row_slope(args, seq, head, row)
        row_alibi(shape, s, count, argument(args, "factor"), offsets, query, anchor, slope)
    if differ:
        for j in range(count):
            if not load("uint8", scratch + fact(shape, "scratch_seen") + r * TILE, j):
                store_score(shape, s, j, -math.inf)
    for j in range(count, padded_count(shape, count)):
        store_score(shape, s, j, -math.inf)


@kernel
def by_tiles(shape, rows):
    """Whether a block of rows is multiplied on the matrix unit."""
    return fact(shape, "matrix") != 0 and rows >= MATRIX_ROWS


@kernel
def padded_count(shape, count):
    padding = fact(shape, "padding")
    return (count + padding - 1) // padding * padding


@inlined
def fill_anchors(shape, args, seq, first_row, rows, first, stop, scratch):
    """Distance of each row from the last key of the split that it may see."""
    for r in range(rows):
        last = max(first, min(stop, load("int64", scratch + fact(shape, "scratch_high"), r)) - 1)
        position = sequence_field(seq, "q_start") + (first_row + r) // argument(args, "group_size")
        distance = abs(float(position - key_position(args, seq, last)))
        store("float64", scratch + fact(shape, "scratch_anchor"), r, distance)


@inlined
def finish_maxima(shape, args, seq, head, first_row, rows, scratch, ml):
    """m and l of the rows of a unit leave: m in log2 units, with the part of an ALiBi bias that all its keys share."""
    factor = score_factor(args)
    for r in range(rows):
        m = load("float64", scratch + fact(shape, "scratch_m"), r)
        if m > -math.inf:
            m *= factor
            if argument(args, "alibi"):
                anchor = load("float64", scratch + fact(shape, "scratch_anchor"), r)
                m -= row_slope(args, seq, head, first_row + r) * anchor
        store("float64", ml, 2 * r, m)
        store("float64", ml, 2 * r + 1, load("float64", scratch + fact(shape, "scratch_l"), r))


@kernel
def store_score(shape, s, j, value):
    if fact(shape, "score_bytes") == 8:
        store("float64", s, j, value)
    else:
        store("float32", s, j, value)


@inlined
def fill_offsets(shape, args, seq, count, scratch):
    """Positions of the tile's keys relative to the first, for ALiBi."""
    keys = scratch + fact(shape, "scratch_keys")
    origin = key_position(args, seq, load("int64", keys, 0))
    for j in range(count):
        offset = float(key_position(args, seq, load("int64", keys, j)) - origin)
        store("float64", scratch + fact(shape, "scratch_offset"), j, offset)


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
    v, lanes, padded = scratch + fact(shape, "scratch_v"), fact(shape, "lanes"), padded_count(shape, count)
    for r in range(0, square_rows, lanes):
        s = scratch + fact(shape, "scratch_squares") + r * fact(shape, "s_row_bytes")
        m, l = scratch + fact(shape, "scratch_m") + 8 * r, scratch + fact(shape, "scratch_l") + 8 * r
        shrink = scratch + fact(shape, "scratch_shrink")
        if move_maxima(shape, s, count, padded, factor, m, l, shrink + 8 * r):
            for row in range(r, min(r + lanes, rows)):
                by = load("float64", shrink, row)
                if by != 1.0:
                    scale_row(shape, o + row * fact(shape, "o_row_bytes"), by)
        if not fact(shape, "matrix"):
            exponentials(shape, s, padded, factor, m, l, 0, v)
            by_rows(shape, "sums", scratch + fact(shape, "scratch_p") + r * fact(shape, "p_row_bytes"), s, padded)
            continue
        if square_rows > SIDE:  # the half of the V rows that the scores did not ask for
            exponentials(shape, s, padded, factor, m, l, 8, v + 8 * (SIDE + r // 2))
        else:
            exponentials(shape, s, padded, factor, m, l, 16, v + 8 * SIDE)
        round_square(shape, scratch + fact(shape, "scratch_weights") + r * TILE * 2, s, count)


@kernel
def softmax_rows(shape, args, seq, head, first_row, begin, rows, count, scratch, differ, o):
    """The same for rows [begin, rows), one by one."""
    padded, factor = padded_count(shape, count), score_factor(args)
    for r in range(begin, rows):
        s, at = scratch + fact(shape, "scratch_s") + r * fact(shape, "s_row_bytes"), scratch + 8 * r
        p = scratch + fact(shape, "scratch_p") + r * fact(shape, "p_row_bytes")
        adjust_scores(shape, args, seq, head, first_row + r, s, count, scratch, differ, r)
        m, l = at + fact(shape, "scratch_m"), at + fact(shape, "scratch_l")
        softmax_step(shape, p, s, padded, factor, m, l, o + r * fact(shape, "o_row_bytes"))
        if by_tiles(shape, rows):
            round_row(shape, scratch + fact(shape, "scratch_weights") + r * TILE * 2, p, count)


@kernel
def squares_to_rows(shape, square_rows, count, scratch):
    """Scores by keys become scores by rows, for what is done row by row."""
    padded = padded_count(shape, count)
    for r in range(0, square_rows, fact(shape, "lanes")):
        offset = r * fact(shape, "s_row_bytes")
        square = scratch + fact(shape, "scratch_squares") + offset
        by_rows(shape, "scores", scratch + fact(shape, "scratch_s") + offset, square, padded)
    if fact(shape, "matrix"):
        for j in range(0, padded, 2 * SIDE):
            prefetch_v(shape, scratch + fact(shape, "scratch_v") + 8 * (j + SIDE), SIDE)


@kernel
def left_operand(shape, table, copy):
    """Base address and step of 16 K rows; rows that do not step evenly are copied first."""
    first = load("int64", table, 0)
    if evenly_spaced(table):
        return first, load("int64", table, 1) - first
    row_bytes = fact(shape, "head_dim") * fact(shape, "element_bytes")
    for j in range(SIDE):
        row = load("int64", table, j)
        for word in range(row_bytes // 8):
            store("int64", copy + j * row_bytes, word, load("int64", row, word))
    return copy, row_bytes


@kernel
def score_tiles(shape, square_rows, padded, k, scratch):
    """scores by keys = q . k on the matrix unit."""
    v, s = scratch + fact(shape, "scratch_v"), scratch + fact(shape, "scratch_squares")
    columns = scratch + fact(shape, "scratch_columns")
    copies, half_bytes = scratch + fact(shape, "scratch_wide"), SIDE * fact(shape, "head_dim") * 2
    for j in range(0, padded, 2 * SIDE):
        first, first_step = left_operand(shape, k + 8 * j, copies)
        second, second_step = left_operand(shape, k + 8 * (j + SIDE), copies + half_bytes)
        for r in range(0, square_rows, SIDE):
            to = s + r * fact(shape, "s_row_bytes") + j * 64
            queries = columns + r * fact(shape, "q_row_bytes")
            if square_rows > SIDE:
                tile_scores(shape, to, queries, first, first_step, second, second_step, 8, v + 8 * (j + r // 2))
            else:
                tile_scores(shape, to, queries, first, first_step, second, second_step, 16, v + 8 * j)


@kernel
def score_keys(shape, rows, count, k, scratch):
    """scores = q . k for a tile, by keys for rows in squares, while its V rows are on their way."""
    v, s = scratch + fact(shape, "scratch_v"), scratch + fact(shape, "scratch_s")
    lanes, q_bytes, s_bytes = fact(shape, "lanes"), fact(shape, "q_row_bytes"), fact(shape, "s_row_bytes")
    wide, columns = scratch + fact(shape, "scratch_wide"), scratch + fact(shape, "scratch_columns")
    squares = scratch + fact(shape, "scratch_squares")
    padded, square_rows = padded_count(shape, count), rows_by_square(shape, rows)
    for j in range(count, padded):
        store("int64", k, j, load("int64", k, count - 1))
        store("int64", v, j, load("int64", v, count - 1))
    if fact(shape, "matrix") and square_rows:
        score_tiles(shape, square_rows, padded, k, scratch)
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
    v, p = scratch + fact(shape, "scratch_v"), scratch + fact(shape, "scratch_p")
    if by_tiles(shape, rows):
        rounded, area = scratch + fact(shape, "scratch_weights"), scratch + fact(shape, "scratch_tiles") + 128
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
        total += non_finite_row(shape, load("int64", scratch + fact(shape, "scratch_v"), j))
    return total != 0.0  # NaN


@inlined
def weigh_seen_values(shape, rows, count, scratch, o):
    """The same, one visible (row, key) at a time: 0 * NaN of an invisible key must not reach a row."""
    for r in range(rows):
        p = scratch + fact(shape, "scratch_p") + r * fact(shape, "p_row_bytes")
        for j in range(count):
            if load("uint8", scratch + fact(shape, "scratch_seen") + r * TILE, j):
                v = scratch + fact(shape, "scratch_v") + 8 * j
                weigh(shape, 1, o + r * fact(shape, "o_row_bytes"), p + j * fact(shape, "sum_bytes"), v, v, 0, 1)


@inlined
def attend_tile(shape, args, seq, head, first_row, rows, first, count, k, ahead, scratch, o):
    """One tile of keys [first, first + count) for all rows of a block."""
    keys, differ = scratch + fact(shape, "scratch_keys"), False
    fill_v(args, seq, head, first, count, scratch + fact(shape, "scratch_v"))
    if argument(args, "mask") or not rows_agree(shape, rows, first, count, scratch):
        count, differ = visible_keys(shape, args, seq, head, first_row, rows, first, count, k, scratch)
        if count == 0:
            return
    elif argument(args, "alibi"):
        for j in range(count):
            store("int64", keys, j, first + j)
    element, gathered = fact(shape, "element_bytes"), scratch + fact(shape, "scratch_gather")
    if argument(args, "k_stride_d") != element:
        area = gathered + fact(shape, "gather_row_bytes")
        gather_rows(shape, k, argument(args, "k_stride_d"), fact(shape, "head_dim"), area, count)
    if argument(args, "v_stride_d") != element:
        area = gathered + fact(shape, "gather_row_bytes") * (1 + TILE)
        v = scratch + fact(shape, "scratch_v")
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


@kernel
def locate_unit(args, unit):
    """Sequence, kv head, row block and split of a unit."""
    work, head = divmod(unit, argument(args, "kv_heads"))
    seq = find_sequence(args, UNIT_BASE, work)
    block, split = divmod(work - sequence_field(seq, "unit_base"), sequence_field(seq, "splits"))
    return seq, head, block, split


@inlined
def claim_unit(args):
    return fetch_add(argument(args, "counters") + 8, 1)


@kernel
def fill_first_k(args, unit, table):
    """Addresses of the K rows with which a unit most likely begins; returns how many."""
    if unit >= argument(args, "units"):
        return 0
    seq, head, _, split = locate_unit(args, unit)
    first = sequence_field(seq, "first") + split * sequence_field(seq, "split_keys")
    count = min(TILE, sequence_field(seq, "split_keys"), sequence_field(seq, "kv_end") - first)
    fill_k(args, seq, head, first, count, table)
    return max(count, 0)


@inlined
def split_unit(shape, args, unit, asked, scratch):
    """Stage 1 for one unit: the partial state of a row block over one split.

    ``asked`` K rows of it are on their way. Returns the next unit and the same of that: it is claimed when the last
    tile begins, so that memory is never idle.
    """
    seq, head, block, split = locate_unit(args, unit)
    all_rows = argument(args, "group_size") * sequence_field(seq, "q_len")
    first_row = block * MAX_ROWS
    rows = min(MAX_ROWS, all_rows - first_row)
    part = sequence_field(seq, "part_base") + (split * argument(args, "kv_heads") + head) * all_rows + first_row
    part_o = argument(args, "part_o") + part * fact(shape, "o_row_bytes")
    tiles = by_tiles(shape, rows)
    o = scratch + fact(shape, "scratch_rows_o") if tiles else part_o  # tiles have 16 rows, units any number
    for r in range(MAX_ROWS):
        store("float64", scratch + fact(shape, "scratch_m"), r, -math.inf if r < rows else math.inf)
        store("float64", scratch + fact(shape, "scratch_l"), r, 0.0)
    for r in range(rows):
        zero_row(shape, o + r * fact(shape, "o_row_bytes"))
    lowest, highest = pack_queries(shape, args, seq, head, first_row, rows, scratch)
    first = sequence_field(seq, "first") + split * sequence_field(seq, "split_keys")
    stop = min(highest, first + sequence_field(seq, "split_keys"))
    first = max(lowest, first)
    k, ahead = scratch + fact(shape, "scratch_k"), scratch + fact(shape, "scratch_next")
    coming = min(TILE, stop - first)
    fill_k(args, seq, head, first, coming, ahead)
    prefetch_k(shape, ahead + 8 * asked, coming - asked)
    unit, asked = -1, 0
    if argument(args, "alibi"):
        fill_anchors(shape, args, seq, first_row, rows, first, stop, scratch)
    while first < stop:
        k, ahead, count = ahead, k, coming
        coming = min(TILE, stop - first - count)
        if coming > 0:
            filled = coming
            fill_k(args, seq, head, first + count, coming, ahead)
        else:
            unit = claim_unit(args)
            filled = fill_first_k(args, unit, ahead)
            asked = min(filled, count)
        for j in range(filled, count):
            store("int64", ahead, j, load("int64", k, 0))
        attend_tile(shape, args, seq, head, first_row, rows, first, count, k, ahead, scratch, o)
        first += count
    finish_maxima(shape, args, seq, head, first_row, rows, scratch, argument(args, "part_ml") + part * 16)
    if tiles:
        for r in range(rows):
            zero_row(shape, part_o + r * fact(shape, "o_row_bytes"))
            add_row(shape, part_o + r * fact(shape, "o_row_bytes"), o + r * fact(shape, "o_row_bytes"), 1.0)
    if unit < 0:
        unit = claim_unit(args)
    return unit, asked


@inlined
def run_splits(shape, args):
    """Stage 1 on one thread: units until none is left."""
    scratch = argument(args, "scratch") + fetch_add(argument(args, "counters"), 1) * argument(args, "scratch_stride")
    registers = scratch + fact(shape, "scratch_tiles")
    if fact(shape, "matrix"):
        begin_tiles(shape, registers, registers + 64)
    unit, asked = claim_unit(args), 0
    while unit < argument(args, "units"):
        unit, asked = split_unit(shape, args, unit, asked, scratch)
    if fact(shape, "matrix"):
        end_tiles(shape, registers)


@inlined
def merge_splits(shape, args, seq, head, row, o):
    """Merge one row's splits in order (2.4.2): o becomes the numerator. Returns m (log2) and l."""
    all_rows = argument(args, "group_size") * sequence_field(seq, "q_len")
    splits, kv_heads = sequence_field(seq, "splits"), argument(args, "kv_heads")
    part = sequence_field(seq, "part_base") + head * all_rows + row
    part_o, part_ml = argument(args, "part_o"), argument(args, "part_ml")
    m, l = -math.inf, 0.0
    for split in range(splits):
        m = max(m, load("float64", part_ml + (part + split * kv_heads * all_rows) * 16, 0))
    base = m if m > -math.inf else 0.0
    zero_row(shape, o)
    for split in range(splits):
        index = part + split * kv_heads * all_rows
        weight = 2.0 ** (load("float64", part_ml + index * 16, 0) - base)
        l += weight * load("float64", part_ml + index * 16, 1)
        add_row(shape, o, part_o + index * fact(shape, "o_row_bytes"), weight)
    return m, l


@inlined
def normaliser(args, q_head, m, l):
    """1 over the denominator of o, in which a sink joins; 0 for an empty row."""
    if l == 0.0:
        return 0.0
    if not argument(args, "sinks"):
        return 1.0 / l
    sink = load("float64", argument(args, "sinks"), q_head) * LOG2_E
    if sink == math.inf:
        return 0.0
    top = max(m, sink)
    weight = 2.0 ** (m - top)
    return weight / (l * weight + 2.0 ** (sink - top))


@inlined
def write_output(shape, args, seq, i, q_head, o, factor, scratch):
    out = argument(args, "out") + sequence_field(seq, "out_base")
    out += q_head * argument(args, "out_stride_h") + i * argument(args, "out_stride_s")
    if argument(args, "state_m"):
        write_row(shape, True, out, o, factor)
        return
    element = fact(shape, "element_bytes")
    if argument(args, "out_stride_d") == element:
        write_row(shape, False, out, o, factor)
    else:
        row = scratch + fact(shape, "scratch_gather")
        write_row(shape, False, row, o, factor)
        copy_row(element, out, argument(args, "out_stride_d"), row, element, fact(shape, "head_dim_v"))


@inlined
def merge_row(shape, args, number, scratch):
    """Stage 2 for one output row."""
    seq = find_sequence(args, ROW_BASE, number)
    group = argument(args, "group_size")
    head, row = divmod(number - sequence_field(seq, "row_base"), group * sequence_field(seq, "q_len"))
    i, g = divmod(row, group)
    q_head = head * group + g
    o = scratch + fact(shape, "scratch_o")
    m, l = merge_splits(shape, args, seq, head, row, o)
    write_output(shape, args, seq, i, q_head, o, normaliser(args, q_head, m, l), scratch)
    at = sequence_field(seq, "lse_base") + q_head * argument(args, "lse_stride_h") + i * argument(args, "lse_stride_s")
    if argument(args, "lse"):
        store_score(shape, argument(args, "lse") + at, 0, m * LN_2 + math.log(l))
    if argument(args, "state_m"):
        store_score(shape, argument(args, "state_m") + at, 0, m * LN_2)
        store_score(shape, argument(args, "state_l") + at, 0, l)


@inlined
def run_merge(shape, args):
    """Stage 2 on one thread: rows until none is left."""
    counters = argument(args, "counters")
    scratch = argument(args, "scratch") + fetch_add(counters + 16, 1) * argument(args, "scratch_stride")
    rows = argument(args, "rows")
    number = fetch_add(counters + 24, 1)
    while number < rows:
        merge_row(shape, args, number, scratch)
        number = fetch_add(counters + 24, 1)
