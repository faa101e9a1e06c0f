"""Which rows a tile has: sequences, positions, visible keys, and the addresses of cache rows."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from numba import njit

from flashdecoding.cpu.arguments import Sequence, argument, sequence_field
from flashdecoding.cpu.matrix import pair_columns
from flashdecoding.cpu.products import transpose_rows
from flashdecoding.cpu.rows import fill_rows, load, store, widen_row
from flashdecoding.cpu.shape import TILE, fact, place

kernel = njit(nogil=True, error_model="numpy", boundscheck=False)
# For functions with one caller, or one line: each level of calls is optimised once more, which doubles compile time.
inlined = njit(inline="always", nogil=True, error_model="numpy", boundscheck=False)

ROW_BYTES = 8 * len(Sequence._fields)
UNIT_BASE = Sequence._fields.index("unit_base")
ROW_BASE = Sequence._fields.index("row_base")


@kernel
def find_sequence(args, column, value):
    """Address of the last sequence whose ``column`` is <= value (cumulative counts)."""
    low, high = 0, argument(args, "batch")
    base = argument(args, "sequences")
    while high - low > 1:
        middle = (low + high) >> 1
        if load("int64", base + middle * ROW_BYTES, column) <= value:
            low = middle
        else:
            high = middle
    return base + low * ROW_BYTES


@inlined
def sequence_index(args, seq):
    return (seq - argument(args, "sequences")) // ROW_BYTES


@kernel
def keys_up_to(args, seq, position):
    """Number of local keys at positions <= position."""
    past = position - sequence_field(seq, "kv_start")
    if past < 0:
        return 0
    block, stride = argument(args, "kv_block"), argument(args, "kv_stride")
    return past // stride * block + min(past % stride + 1, block)


@kernel
def key_position(args, seq, key):
    block = argument(args, "kv_block")
    return sequence_field(seq, "kv_start") + key // block * argument(args, "kv_stride") + key % block


@kernel
def copy_row(element_bytes, target, target_stride, source, source_stride, count):
    """Copy ``count`` elements between rows of any stride."""
    for i in range(count):
        to, at = target + i * target_stride, source + i * source_stride
        for byte in range(element_bytes):
            store("uint8", to, byte, load("uint8", at, byte))


@kernel
def by_tiles(shape, rows):
    """Whether a block of rows is multiplied on the matrix unit."""
    return fact(shape, "matrix") != 0 and rows >= fact(shape, "matrix_rows")


@kernel
def padded_count(shape, count):
    padding = fact(shape, "padding")
    return (count + padding - 1) // padding * padding


@kernel
def rows_by_square(shape, rows):
    """Rows of a block in squares of ``lanes``: full ones, and a last one if enough of it is in use to pay."""
    lanes = fact(shape, "lanes")
    if fact(shape, "matrix"):
        return (rows + lanes - 1) // lanes * lanes if by_tiles(shape, rows) else 0
    return (rows + lanes // 4) // lanes * lanes


@kernel
def pack_queries(shape, args, seq, head, first_row, rows, scratch):
    """Queries of a row block as scores, and each row's interval of visible keys.

    Row r of a kv head is query r // group_size of its head r % group_size. Returns the union of the intervals.
    """
    group, causal, window = argument(args, "group_size"), argument(args, "causal"), argument(args, "window")
    element, gathered = fact(shape, "element_bytes"), place(shape, scratch, "gather")
    lowest, highest = 1 << 62, 0
    for r in range(rows):
        i, g = divmod(first_row + r, group)
        row = argument(args, "q") + sequence_field(seq, "q_base") + i * argument(args, "q_stride_s")
        row += (head * group + g) * argument(args, "q_stride_h")
        if argument(args, "q_stride_d") != element:
            copy_row(element, gathered, element, row, argument(args, "q_stride_d"), fact(shape, "head_dim"))
            row = gathered
        widen_row(shape, scratch + r * fact(shape, "q_row_bytes"), row, argument(args, "q_sign"))
        position = sequence_field(seq, "q_start") + i
        low, high = sequence_field(seq, "kv_begin"), sequence_field(seq, "kv_end")
        if causal:
            high = min(high, keys_up_to(args, seq, position))
        if window:
            low = max(low, keys_up_to(args, seq, position - window))
        store("int64", place(shape, scratch, "low"), r, low)
        store("int64", place(shape, scratch, "high"), r, high)
        if low < high:
            lowest, highest = min(lowest, low), max(highest, high)
    for r in range(0, rows_by_square(shape, rows), fact(shape, "lanes")):
        offset = r * fact(shape, "q_row_bytes")
        columns = place(shape, scratch, "columns") + offset
        transpose_rows(shape, columns, scratch + offset)
        if fact(shape, "matrix"):
            pair_columns(shape, columns)
    return lowest, highest


@kernel
def fill_addresses(args, seq, base, stride_b, stride_s, first, count, table):
    """table[j] = address of the cache row of key first + j: the only place that knows about pages."""
    if argument(args, "page_table"):
        page_size = argument(args, "page_size")
        entry = argument(args, "page_table") + sequence_index(args, seq) * argument(args, "page_table_stride_b")
        page, slot = divmod(first, page_size)
        j = 0
        while j < count:
            number = load("int32", entry + page * argument(args, "page_table_stride_p"), 0)
            row = base + number * stride_b + slot * stride_s
            run = min(page_size - slot, count - j)
            fill_rows(table + 8 * j, row, stride_s, run)
            j, page, slot = j + run, page + 1, 0
    else:
        fill_rows(table, base + sequence_index(args, seq) * stride_b + first * stride_s, stride_s, count)


@inlined
def fill_k(args, seq, head, first, count, table):
    base = argument(args, "k") + head * argument(args, "k_stride_h")
    fill_addresses(args, seq, base, argument(args, "k_stride_b"), argument(args, "k_stride_s"), first, count, table)


@inlined
def fill_v(args, seq, head, first, count, table):
    base = argument(args, "v") + head * argument(args, "v_stride_h")
    fill_addresses(args, seq, base, argument(args, "v_stride_b"), argument(args, "v_stride_s"), first, count, table)


@inlined
def masked_in(args, seq, head, i, key):
    """The boolean mask's word on one key for query i of a q head."""
    column = key
    if argument(args, "mask_is_tree"):
        column = key_position(args, seq, key) - sequence_field(seq, "q_start")
        if column < 0 or column >= sequence_field(seq, "q_len"):
            return True
    row = argument(args, "mask") + sequence_index(args, seq) * argument(args, "mask_stride_b")
    row += head * argument(args, "mask_stride_h") + i * argument(args, "mask_stride_q")
    return load("uint8", row + column * argument(args, "mask_stride_k"), 0) != 0


@kernel
def visible_keys(shape, args, seq, head, first_row, rows, first, count, k, scratch):
    """Keep the keys of a tile that some row sees; note who sees what. Returns (keys kept, rows differ)."""
    group = argument(args, "group_size")
    keys, seen = place(shape, scratch, "keys"), place(shape, scratch, "seen")
    v = place(shape, scratch, "v")
    kept, differ = 0, False
    for j in range(count):
        key, viewers = first + j, 0
        for r in range(rows):
            sees = load("int64", place(shape, scratch, "low"), r) <= key
            sees = sees and key < load("int64", place(shape, scratch, "high"), r)
            if sees and argument(args, "mask"):
                i, g = divmod(first_row + r, group)
                sees = masked_in(args, seq, head * group + g, i, key)
            store("uint8", seen + r * TILE, kept, 1 if sees else 0)
            viewers += 1 if sees else 0
        if viewers:
            store("int64", keys, kept, key)
            store("int64", k, kept, load("int64", k, j))
            store("int64", v, kept, load("int64", v, j))
            kept += 1
            differ = differ or viewers < rows
    return kept, differ


@inlined
def rows_agree(shape, rows, first, count, scratch):
    """Whether every row sees every key of the tile, as far as intervals go."""
    for r in range(rows):
        if load("int64", place(shape, scratch, "low"), r) > first:
            return False
        if load("int64", place(shape, scratch, "high"), r) < first + count:
            return False
    return True


@kernel
def gather_rows(shape, table, stride_d, width, area, count):
    """Replace rows whose elements lie apart by copies in which they are adjacent."""
    element = fact(shape, "element_bytes")
    for j in range(count):
        copy = area + j * fact(shape, "gather_row_bytes")
        copy_row(element, copy, element, load("int64", table, j), stride_d, width)
        store("int64", table, j, copy)
