"""What a launch hands to the kernels: one packed record, and one row of numbers for each sequence.

All fields are 8 bytes, read in the kernels by name at no cost. Addresses and strides are bytes; a 0 as an address means
"not given". A record is a :class:`Layout`, which depends on a call's signature alone, and then a :class:`Run`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import struct
from typing import Any, NamedTuple, get_type_hints

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


class Run(NamedTuple):
    """What belongs to one call."""

    counters: int  # int64 (4,), zeroed: threads that arrived and next unit in stage 1, threads and next row in stage 2
    scratch: int  # a thread's scratch follows the other's
    sequences: int  # (batch, len(Sequence._fields)) int64
    units: int  # work items of stage 1
    rows: int  # output rows, all sequences
    part_o: int  # numerators, (partial rows, padded_dim_v) of type ``sums``
    part_ml: int  # m (log2) and l of each, float64
    q: int
    k: int
    v: int
    page_table: int  # int32
    alibi: int  # float64 (batch, q_heads)
    sinks: int  # float64 (q_heads,)
    mask: int  # bytes
    out: int
    lse: int  # of type ``scores``
    state_m: int  # of type ``scores``, with lse's strides; given: ``out`` is a state's o
    state_l: int

    def pack(self) -> bytes:
        return _RUN.pack(*self)


class Layout(NamedTuple):
    """What a signature fixes."""

    scratch_stride: int
    batch: int
    kv_heads: int
    group_size: int
    q_sign: float  # the scale's: with it in q, a larger q.k is a larger score
    factor: float  # makes log2 units of q.k, or of what a soft cap made of it
    inverse_softcap: float  # times |scale|; 0: no soft cap
    softcap: float
    q_stride_h: int
    q_stride_s: int
    q_stride_d: int
    k_stride_b: int  # of a sequence, or of a page
    k_stride_h: int
    k_stride_s: int
    k_stride_d: int
    v_stride_b: int
    v_stride_h: int
    v_stride_s: int
    v_stride_d: int
    page_table_stride_b: int
    page_table_stride_p: int
    page_size: int
    kv_block: int  # local key j stands at kv_start + (j // kv_block) * kv_stride + j % kv_block
    kv_stride: int
    causal: int
    window: int  # 0: none
    mask_stride_b: int
    mask_stride_h: int
    mask_stride_q: int
    mask_stride_k: int
    mask_is_tree: int  # column = position - q_start, instead of the key's index
    out_stride_h: int
    out_stride_s: int
    out_stride_d: int
    lse_stride_h: int
    lse_stride_s: int

    def pack(self) -> bytes:
        return _LAYOUT.pack(*self)


class Sequence(NamedTuple):
    """One sequence of the batch."""

    q_base: int  # bytes from q to this sequence's first query; likewise out and lse
    out_base: int
    lse_base: int
    q_len: int
    q_start: int  # position of the first query
    kv_start: int  # position of key 0
    kv_begin: int  # first valid key
    kv_end: int  # one past the last
    first: int  # key at which split 0 begins
    split_keys: int
    splits: int
    unit_base: int  # (split, row block) pairs of the sequences before it
    row_base: int  # output rows before it
    part_base: int  # partial rows before it


def _packer(record: Any) -> struct.Struct:
    hints = get_type_hints(record)
    return struct.Struct("=" + "".join("d" if hints[name] is float else "q" for name in record._fields))


_RUN, _LAYOUT = _packer(Run), _packer(Layout)


def _reader(fields: tuple[str, ...], hints: dict[str, type]) -> Any:
    @intrinsic(prefer_literal=True)
    def read(typing_context, base, name):
        field = name.literal_value
        ty = types.float64 if hints[field] is float else types.int64
        offset = ir.Constant(ir.IntType(64), 8 * fields.index(field))

        def code(context, builder, signature, values):
            at = builder.inttoptr(builder.add(values[0], offset), context.get_data_type(ty).as_pointer())
            return builder.load(at)

        return ty(types.int64, name), code

    return read


argument = _reader(Layout._fields + Run._fields, {**get_type_hints(Run), **get_type_hints(Layout)})
sequence_field = _reader(Sequence._fields, get_type_hints(Sequence))
