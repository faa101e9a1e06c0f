"""What the kernels are given: tensors with their strides, as records that Triton takes apart.

Pointers come first; None leaves the code for it out of the kernel. Strides are in elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from flashdecoding.checks import Call
    from flashdecoding.lengths import DeviceSpans


class View(NamedTuple):
    """A tensor of (batch or page, head, token, column)."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int
    stride_d: int

    @classmethod
    def of(cls, x: torch.Tensor, packed: bool = False) -> View:
        """Packed sequences are one row of tokens: offsets tell them apart, so no step leads from one to the next."""
        strides = x.stride()
        return cls(x, 0 if packed else strides[0], *strides[1:])


class Results(NamedTuple):
    """What a row has beside its output: lse, or m and l of a state; all with the same strides."""

    lse_ptr: Any
    m_ptr: Any
    l_ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int

    @classmethod
    def of(
        cls, lse: torch.Tensor | None, state: tuple[torch.Tensor, torch.Tensor] | None, packed: bool = False
    ) -> Results:
        m, l = (None, None) if state is None else state
        shown = m if lse is None else lse
        strides = (0, 0, 0) if shown is None else shown.stride()[:3]
        return cls(lse, m, l, 0 if packed else strides[0], *strides[1:])


class Parts(NamedTuple):
    """States of splits that stage 2 merges, by (part, kv head, row): o float32; (m, l) as they are summed."""

    o_ptr: Any
    ml_ptr: Any


class Cut(NamedTuple):
    """The plan on the device (`planning.py`). ``pitch`` leads from one row of the table to the next."""

    workers_ptr: Any
    table_ptr: Any
    items_ptr: Any
    pitch: int


class Reach(NamedTuple):
    """What a plan is made from; integer tensors by sequence, each may be None."""

    seqlens_ptr: Any
    kv_begin_ptr: Any
    q_offsets_ptr: Any


class Places(NamedTuple):
    """Where a sequence's keys and queries begin; integer tensors by sequence, each may be None."""

    kv_begin_ptr: Any
    q_offsets_ptr: Any
    q_start_ptr: Any
    kv_start_ptr: Any

    @classmethod
    def of(cls, spans: DeviceSpans) -> Places:
        return cls(spans.kv_begin, spans.q_offsets, spans.q_start, spans.kv_start)


class Pages(NamedTuple):
    """The page table, and how many pages there are."""

    ptr: Any
    stride_b: int
    stride_p: int
    pages: int


class Mask(NamedTuple):
    """Bytes by batch, head, query and key; a stride of 0 for an axis that all share."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_q: int
    stride_k: int

    @classmethod
    def of(cls, mask: torch.Tensor | None) -> Mask | None:
        if mask is None:
            return None
        full = mask[:, None] if mask.dim() == 3 else mask
        shared = [0 if size == 1 else stride for size, stride in zip(full.shape[:2], full.stride()[:2], strict=True)]
        return cls(mask, *shared, *full.stride()[2:])


class Sinks(NamedTuple):
    """Attention sinks by q head."""

    ptr: Any


class Slopes(NamedTuple):
    """ALiBi slopes by (batch, q head)."""

    ptr: Any
    stride_b: int

    @classmethod
    def of(cls, slopes: torch.Tensor | None) -> Slopes | None:
        if slopes is None:
            return None
        return cls(slopes, slopes.stride(0) if slopes.dim() == 2 else 0)


class Blocks(NamedTuple):
    """Keys of a round-robin shard stand together in blocks: keys a block, and from one block to the next."""

    size: int
    stride: int


class Scores(NamedTuple):
    """Factors: ``unit`` makes natural units of what reaches the softmax step, ``sign`` goes to q, ``scale`` to scores
    before a soft cap or ALiBi."""

    unit: float
    sign: float
    scale: float


def pages_of(call: Call) -> Pages | None:
    table = call.page_table
    return None if table is None else Pages(table, table.stride(0), table.stride(1), call.checked.pages)


def blocks_of(call: Call) -> Blocks | None:
    c = call.checked
    return None if c.kv_block is None else Blocks(c.kv_block, c.kv_stride or 1)
