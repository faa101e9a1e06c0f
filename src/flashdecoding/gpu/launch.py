"""One call on the GPU: the plan, stage 1 and stage 2 as three launches, on the current stream, without a sync."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from flashdecoding.gpu.kernels import merge_kernel, split_kernel
from flashdecoding.gpu.planning import ITEM_FIELDS, SEQUENCE_FIELDS, plan_kernel
from flashdecoding.state import AttentionState

if TYPE_CHECKING:
    from flashdecoding.checks import Call
    from flashdecoding.signature import Checked

MOST_ROWS = 64  # query rows (queries x heads that share one kv head) of a program; more rows make more programs
WARPS = 4  # of a program
WAVES = 2  # programs of stage 1 for each multiprocessor, as far as there are tiles


@dataclass(frozen=True)
class Shape:
    """What a signature fixes: sizes of tiles and launches."""

    block_m: int  # rows of a tile
    row_blocks: int
    block_n: int  # keys of a tile
    stages: int
    d: tuple[int, int]  # head_dim as two blocks of columns
    e: tuple[int, int]  # head_dim_v likewise
    most_items: int  # (sequence, split) pairs


def decode(call: Call, out: torch.Tensor, want_lse: bool) -> torch.Tensor | None:
    """Write attention into ``out``; returns lse (batch, q_heads, q_len), float32, if wanted."""
    lse = call.q.new_empty(out.shape[:3], dtype=torch.float32) if want_lse else None
    _run(call, out, lse, None)
    return lse


def partial_state(call: Call) -> AttentionState:
    """The state (m, l, o) of a call."""
    rows = call.q.shape[:3]
    m, l = (call.q.new_empty((*rows, 1), dtype=torch.float32) for _ in range(2))
    o = call.q.new_empty((*rows, call.checked.head_dim_v), dtype=torch.float32)
    _run(call, o, None, (m, l))
    return AttentionState(m, l, o)


@functools.lru_cache(maxsize=4096)
def launch_shape(checked: Checked, multiprocessors: int) -> Shape:
    """Tiles and launches of a signature. Its splits, so its bits, depend on lengths and nothing else."""
    rows = checked.q_len * (checked.q_heads // checked.kv_heads)
    block_m = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_m)
    if checked.dtype == torch.float32:  # a tile's float32 products are summed one by one, tiles in float64
        block_n, stages = 16, 2
    else:
        block_n, stages = (64, 3) if checked.head_dim <= 128 else (32, 2)
    items = WAVES * multiprocessors // (checked.kv_heads * row_blocks)
    return Shape(
        block_m, row_blocks, block_n, stages, _columns(checked.head_dim), _columns(checked.head_dim_v),
        max(checked.batch, items),
    )  # fmt: skip


def _columns(width: int) -> tuple[int, int]:
    """A row as two blocks of columns, powers of two of at least 16; the second may be none."""
    first = 1 << (width.bit_length() - 1)
    if first < 16:
        return 16, 0
    rest = width - first
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


def _run(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, state: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    c, spans = call.checked, call.spans
    rows = c.q_len * (c.q_heads // c.kv_heads)
    if c.ragged or rows == 0 or c.batch == 0:  # tokens of no sequence
        out.zero_()
        for x, nothing in ((lse, -math.inf), *zip(state or (), (-math.inf, 0.0), strict=False)):
            if x is not None:
                x.fill_(nothing)
    if rows == 0 or c.batch == 0:
        return
    device = call.q.device
    with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        shape = launch_shape(c, _multiprocessors(device.index))
        items = torch.empty((shape.most_items, ITEM_FIELDS.value), dtype=torch.int32, device=device)
        sequences = torch.empty((c.batch, SEQUENCE_FIELDS.value), dtype=torch.int64, device=device)

        def given(tensor: Any) -> Any:  # a pointer for arguments that the kernel will not look at
            return items if tensor is None else tensor

        plan_kernel[(1,)](
            *map(given, spans), items, sequences, c.batch, c.capacity, c.q_len, c.window or 0, shape.most_items,
            TILE=shape.block_n, BB=min(1024, triton.next_power_of_2(c.batch)), BI=16,
            LENGTHS=spans.seqlens is not None, BEGINS=spans.kv_begin is not None, PACKED=c.ragged,
            STARTS=spans.q_start is not None, PIECES=spans.kv_start is not None, WINDOW=c.window is not None,
            num_warps=WARPS,
        )  # fmt: skip
        split = shape.most_items > c.batch
        parts = shape.most_items * c.kv_heads * rows if split else 0
        part_o = torch.empty((parts, c.head_dim_v), dtype=torch.float32, device=device)
        wide = c.dtype == torch.float32  # its sums, and with them m and l, are float64
        part_ml = torch.empty((parts, 2), dtype=torch.float64 if wide else torch.float32, device=device)
        results = (out, given(lse), *(state or (items, items)))
        at = lse if state is None else state[0]
        q_strides, strides = list(call.q.stride()), [*out.stride(), *((0, 0, 0) if at is None else at.stride()[:3])]
        if c.ragged:  # one row of queries; their offsets tell sequences apart
            q_strides[0] = strides[0] = strides[4] = 0
        flags = {"SINKS": call.sinks is not None, "LSE": lse is not None, "STATE": state is not None}
        group = c.q_heads // c.kv_heads
        mask = None if call.mask is None else call.mask.view(torch.uint8)
        slopes, sinks = (None if x is None else x.contiguous() for x in (call.alibi_slopes, call.sinks))
        tables = (*map(given, (call.page_table, mask, slopes, sinks)),)
        split_kernel[(shape.most_items * c.kv_heads, shape.row_blocks)](
            call.q, call.k, call.v, *results, part_o, part_ml, items, sequences, *tables,
            *q_strides, *call.k.stride(), *call.v.stride(), *strides, *_mask_strides(call.mask),
            *((0, 0) if call.page_table is None else call.page_table.stride()), _slopes_stride(slopes),
            c.kv_heads, rows, c.pages, *_scores(c, call.alibi_slopes is not None), c.softcap or 1.0, c.window or 0,
            c.kv_block or 1, c.kv_stride or 1,
            GROUP=group, D=c.head_dim, DV=c.head_dim_v, D0=shape.d[0], D1=shape.d[1], E0=shape.e[0], E1=shape.e[1],
            BM=shape.block_m, BN=shape.block_n, PAGE=c.page_size, CAUSAL=c.causal, WINDOW=c.window is not None,
            BLOCKED=c.kv_block is not None, MULTI=c.q_len > 1, MASK=_mask_kind(c, call.mask),
            CAPPED=c.softcap is not None, ALIBI=call.alibi_slopes is not None, LATENT=_latent(call, shape),
            SHIFT=10 if c.dtype == torch.float16 else 0, STAGES=shape.stages,
            LEVELS=shape.block_n.bit_length() - 1, SUM=tl.float64 if wide else tl.float32, **flags,
            num_warps=WARPS,
        )  # fmt: skip
        if split:
            block_e = min(triton.next_power_of_2(c.head_dim_v), 256)
            merge_kernel[(c.batch, c.kv_heads * rows, triton.cdiv(c.head_dim_v, block_e))](
                part_o, part_ml, *results, sequences, given(sinks), *strides, c.kv_heads, rows,
                GROUP=group, DV=c.head_dim_v, BE=block_e, BS=16, **flags, num_warps=WARPS,
            )  # fmt: skip


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _scores(c: Checked, alibi: bool) -> tuple[float, float, float]:
    """What makes natural units of the scores that reach the softmax step, the sign that goes to q, the scale's size.

    A scale below the normal range counts as 0.
    """
    if abs(c.scale) < torch.finfo(torch.float32).smallest_normal:
        return 1.0, 0.0, 1.0
    size = abs(c.scale)
    return 1.0 if alibi or c.softcap is not None else size, math.copysign(1.0, c.scale), size


def _latent(call: Call, shape: Shape) -> bool:
    """Whether v is the first columns of k, so that one load serves both."""
    k, v = call.k, call.v
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and shape.e == (shape.d[0], 0)


def _mask_kind(c: Checked, mask: torch.Tensor | None) -> int:
    return 0 if mask is None else 1 + c.mask_is_tree


def _mask_strides(mask: torch.Tensor | None) -> tuple[int, ...]:
    """By batch, head, query and key; 0 for an axis that all share."""
    if mask is None:
        return (0, 0, 0, 0)
    full = mask[:, None] if mask.dim() == 3 else mask
    shared = [0 if size == 1 else stride for size, stride in zip(full.shape[:2], full.stride()[:2], strict=True)]
    return (*shared, *full.stride()[2:])


def _slopes_stride(slopes: torch.Tensor | None) -> int:
    return slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
