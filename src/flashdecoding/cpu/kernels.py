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
from flashdecoding.cpu.attend import attend_tile
from flashdecoding.cpu.matrix import begin_tiles, end_tiles
from flashdecoding.cpu.rows import add_row, fetch_add, load, prefetch_k, store, write_row, zero_row
from flashdecoding.cpu.shape import MAX_ROWS, TILE, fact, place
from flashdecoding.cpu.softmax import fill_anchors, finish_maxima, store_score
from flashdecoding.cpu.tiles import (
    ROW_BASE,
    UNIT_BASE,
    by_tiles,
    copy_row,
    fill_k,
    find_sequence,
    inlined,
    kernel,
    pack_queries,
)

LN_2 = math.log(2.0)


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
    o = place(shape, scratch, "rows_o") if tiles else part_o  # tiles have 16 rows, units any number
    for r in range(MAX_ROWS):
        store("float64", place(shape, scratch, "m"), r, -math.inf if r < rows else math.inf)
        store("float64", place(shape, scratch, "l"), r, 0.0)
    for r in range(rows):
        zero_row(shape, o + r * fact(shape, "o_row_bytes"))
    lowest, highest = pack_queries(shape, args, seq, head, first_row, rows, scratch)
    first = sequence_field(seq, "first") + split * sequence_field(seq, "split_keys")
    stop = min(highest, first + sequence_field(seq, "split_keys"))
    first = max(lowest, first)
    k, ahead = place(shape, scratch, "k"), place(shape, scratch, "next")
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
    registers = place(shape, scratch, "configuration")
    zero_row(shape, place(shape, scratch, "zeros"))
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
    """1 over the denominator of o, in which a sink joins; 0 for an empty row. m and sinks are natural logarithms."""
    if l == 0.0:
        return 0.0
    if not argument(args, "sinks"):
        return 1.0 / l
    sink = load("float64", argument(args, "sinks"), q_head)
    if sink == math.inf:
        return 0.0
    top = max(m, sink)
    weight = math.exp(m - top)
    return weight / (l * weight + math.exp(sink - top))


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
        row = place(shape, scratch, "gather")
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
    o = place(shape, scratch, "o")
    m, l = merge_splits(shape, args, seq, head, row, o)
    m *= LN_2
    write_output(shape, args, seq, i, q_head, o, normaliser(args, q_head, m, l), scratch)
    at = sequence_field(seq, "lse_base") + q_head * argument(args, "lse_stride_h") + i * argument(args, "lse_stride_s")
    if argument(args, "lse"):
        store_score(shape, argument(args, "lse") + at, 0, m + math.log(l))
    if argument(args, "state_m"):
        store_score(shape, argument(args, "state_m") + at, 0, m)
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
