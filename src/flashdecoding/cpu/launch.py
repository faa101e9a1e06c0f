"""One call on the CPU: memory for partial states, the record for the kernels, the two stages on threads."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashdecoding.checks import Refusal
from flashdecoding.cpu.arguments import Arguments, Sequence
from flashdecoding.cpu.compiled import workers
from flashdecoding.cpu.kernels import LOG2_E
from flashdecoding.cpu.shape import MAX_ROWS, KernelShape, kernel_shape
from flashdecoding.cpu.threads import run_parallel
from flashdecoding.state import AttentionState

if TYPE_CHECKING:
    import numpy.typing as npt

    from flashdecoding.checks import Call
    from flashdecoding.plan import SplitPlan

WHOLE = 1 << 62  # kv_block and kv_stride of keys that stand without gaps

# Work that pays for a second thread: its start takes some 5 us, in which a core multiplies and adds about this often.
THREAD_WORK = 1 << 18

_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class Results(NamedTuple):
    """Where a call writes: ``out`` is the output in q's dtype, or a state's o when ``m`` and ``l`` are given."""

    out: torch.Tensor
    lse: torch.Tensor | None
    m: torch.Tensor | None
    l: torch.Tensor | None  # noqa: E741


def decode(call: Call, plan: SplitPlan, out: torch.Tensor, want_lse: bool) -> torch.Tensor | None:
    """Write attention into ``out``; returns lse (laid out as out without its last axis) if wanted."""
    lse = None
    if want_lse:
        lse = torch.empty(out.shape[:3], dtype=_state_dtype(call))
    run(call, plan, Results(out, lse, None, None))
    return lse


def partial_state(call: Call, plan: SplitPlan) -> AttentionState:
    """The state (m, l, o) of a call."""
    dtype = _state_dtype(call)
    rows = (call.q.shape[0], call.q_heads, call.q.shape[2])
    m, l = torch.empty(rows, dtype=dtype), torch.empty(rows, dtype=dtype)  # noqa: E741
    o = torch.empty(*rows, call.head_dim_v, dtype=dtype)
    run(call, plan, Results(o, None, m, l))
    return AttentionState(m.unsqueeze(-1), l.unsqueeze(-1), o)


def _state_dtype(call: Call) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def run(call: Call, plan: SplitPlan, results: Results) -> None:
    """Both stages.

    Raises:
        ValueError: a page id outside [0, pages) among the pages that hold visible keys.
    """
    shape = kernel_shape(_DTYPE_NAMES[call.q.dtype], call.head_dim, call.head_dim_v)
    table, units, rows, parts = _sequences(call, plan, results)
    if rows == 0:
        return
    if call.page_table is not None:
        _check_pages(call, call.page_table, table)
    split_worker, merge_worker = workers(shape)
    threads = _threads(call, shape, units)
    stride = shape.scratch_bytes(_gathers(call))
    part_bytes = parts * (shape.o_row_bytes + 16)
    memory = torch.empty(part_bytes + threads * stride + 64, dtype=torch.uint8)
    base = -(-memory.data_ptr() // 64) * 64
    counters = (ctypes.c_int64 * 4)()
    alibi = sinks = None
    if call.alibi_slopes is not None:
        alibi = call.alibi_slopes.to(torch.float64).expand(call.batch, call.q_heads).contiguous()
    if call.sinks is not None:
        sinks = call.sinks.to(torch.float64).contiguous()
    arguments = _arguments(call, shape, results, table, alibi, sinks)._replace(
        counters=ctypes.addressof(counters), part_o=base, part_ml=base + parts * shape.o_row_bytes,
        scratch=base + part_bytes, scratch_stride=stride, units=units, rows=rows,
    ).pack()  # fmt: skip
    run_parallel(split_worker, arguments, min(threads, units))
    merging = parts * shape.padded_dim_v >= THREAD_WORK // 4
    run_parallel(merge_worker, arguments, min(threads, rows) if merging else 1)


def _sequences(call: Call, plan: SplitPlan, results: Results) -> tuple[npt.NDArray[np.int64], int, int, int]:
    """One :class:`Sequence` row for each sequence; units (over all kv heads), output rows and partial rows in all."""
    element, out_element = call.q.element_size(), results.out.element_size()
    lse_element = 8 if call.q.dtype == torch.float64 else 4
    q_stride, out_stride = call.q.stride(), results.out.stride()
    ragged = call.q_offsets is not None
    lse_step = call.q_heads * call.q.shape[2]
    group = call.q_heads // call.kv_heads
    first, split_keys, offsets = plan.first.tolist(), plan.split_keys.tolist(), plan.split_offsets.tolist()
    rows, unit_base, row_base, part_base = [], 0, 0, 0
    for b, seqlen in enumerate(call.seqlens):
        if ragged:
            assert call.q_offsets is not None and call.q_lens is not None
            at, axis, q_len = call.q_offsets[b], 2, call.q_lens[b]
        else:
            at, axis, q_len = b, 0, call.q_len
        kv_start = 0 if call.kv_start is None else call.kv_start[b]
        splits = offsets[b + 1] - offsets[b]
        rows.append(
            Sequence(
                q_base=at * q_stride[axis] * element,
                out_base=at * out_stride[axis] * out_element,
                lse_base=(at if ragged else at * lse_step) * lse_element,
                q_len=q_len,
                q_start=kv_start + seqlen - q_len if call.q_start is None else call.q_start[b],
                kv_start=kv_start,
                kv_begin=0 if call.kv_begin is None else call.kv_begin[b],
                kv_end=seqlen,
                first=first[b],
                split_keys=split_keys[b],
                splits=splits,
                unit_base=unit_base,
                row_base=row_base,
                part_base=part_base,
            )
        )
        unit_base += splits * -(-group * q_len // MAX_ROWS)
        row_base += call.q_heads * q_len
        part_base += splits * call.q_heads * q_len
    table = np.array(rows, np.int64).reshape(len(rows), len(Sequence._fields))
    return table, unit_base * call.kv_heads, row_base, part_base


def _arguments(  # noqa: PLR0913
    call: Call, shape: KernelShape, results: Results, table: npt.NDArray[np.int64],
    alibi: torch.Tensor | None, sinks: torch.Tensor | None,
) -> Arguments:  # fmt: skip
    """The record, but for what belongs to the run's memory."""
    element = call.q.element_size()
    q_stride, k_stride, v_stride = (
        [s * element for s in t.stride()] for t in (call.q, call.k, call.v)
    )
    out_stride = [s * results.out.element_size() for s in results.out.stride()]
    lse_element = 8 if call.q.dtype == torch.float64 else 4
    page_stride = (0, 0) if call.page_table is None else call.page_table.stride()
    mask_stride = (0, 0, 0, 0)
    if call.mask is not None:
        mask_stride = _mask_strides(call.mask)
    capped = call.softcap is not None
    return Arguments(
        counters=0, scratch=0, scratch_stride=0, units=0, rows=0, part_o=0, part_ml=0,
        sequences=table.ctypes.data, batch=call.batch,
        kv_heads=call.kv_heads, group_size=call.q_heads // call.kv_heads,
        factor=call.scale if capped else call.scale * LOG2_E,
        inverse_softcap=1.0 / call.softcap if call.softcap else 0.0,
        softcap=call.softcap * LOG2_E if call.softcap else 0.0,
        q=call.q.data_ptr(), q_stride_h=q_stride[1], q_stride_s=q_stride[2],
        q_stride_d=_row_stride(q_stride[3], call.head_dim, element),
        k=call.k.data_ptr(), k_stride_b=k_stride[0], k_stride_h=k_stride[1], k_stride_s=k_stride[2],
        k_stride_d=_row_stride(k_stride[3], call.head_dim, element),
        v=call.v.data_ptr(), v_stride_b=v_stride[0], v_stride_h=v_stride[1], v_stride_s=v_stride[2],
        v_stride_d=_row_stride(v_stride[3], call.head_dim_v, element),
        page_table=_address(call.page_table), page_table_stride_b=4 * page_stride[0],
        page_table_stride_p=4 * page_stride[1], page_size=call.page_size,
        kv_block=call.kv_block or WHOLE, kv_stride=call.kv_stride or WHOLE,
        causal=int(call.causal), window=call.window or 0, alibi=_address(alibi), sinks=_address(sinks),
        mask=_address(call.mask), mask_stride_b=mask_stride[0], mask_stride_h=mask_stride[1],
        mask_stride_q=mask_stride[2], mask_stride_k=mask_stride[3], mask_is_tree=int(call.mask_is_tree),
        out=results.out.data_ptr(), out_stride_h=out_stride[1], out_stride_s=out_stride[2],
        out_stride_d=_row_stride(out_stride[3], call.head_dim_v, results.out.element_size()),
        lse=_address(results.lse), lse_stride_h=call.q.shape[2] * lse_element, lse_stride_s=lse_element,
        state_m=_address(results.m), state_l=_address(results.l),
    )  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_stride(stride: int, count: int, element: int) -> int:
    """A row of one element is adjacent whatever its stride says."""
    return element if count == 1 else stride


def _mask_strides(mask: torch.Tensor) -> tuple[int, int, int, int]:
    """(batch, head, query, key) byte strides, 0 where the mask is broadcast."""
    stride = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
    return (stride[0], 0, stride[1], stride[2]) if len(stride) == 3 else (stride[0], stride[1], stride[2], stride[3])


def _gathers(call: Call) -> bool:
    return any(t.stride(3) != 1 and t.shape[3] > 1 for t in (call.k, call.v))


def _threads(call: Call, shape: KernelShape, units: int) -> int:
    """Threads worth starting: 1 for little work."""
    keys = sum(call.seqlens)
    rows = call.q_len * call.q_heads
    work = keys * (call.head_dim + call.head_dim_v) * max(rows // 4, call.kv_heads * shape.element_bytes)
    return 1 if work < THREAD_WORK else max(1, min(torch.get_num_threads(), units))


def _check_pages(call: Call, page_table: torch.Tensor, table: npt.NDArray[np.int64]) -> None:
    """Every page that holds a key in reach must exist; other entries are not looked at."""
    columns = Sequence._fields
    begin = np.maximum(table[:, columns.index("first")], table[:, columns.index("kv_begin")]) // call.page_size
    end = -(-table[:, columns.index("kv_end")] // call.page_size)
    slots = np.arange(page_table.shape[1])
    pages = page_table.numpy()
    listed = (slots >= begin[:, None]) & (slots < end[:, None])
    wrong = listed & ((pages < 0) | (pages >= call.k.shape[0]))
    if not wrong.any():
        return
    refusal = Refusal("page_table")
    places = [tuple(map(int, at)) for at in itertools.islice(np.argwhere(wrong), 8)]
    shown = ", ".join(f"page_table[{b}, {p}] = {pages[b, p]}" for b, p in places)
    refusal.unless(False, f"page ids must be in [0, {call.k.shape[0]}), got {shown}")
    refusal.raise_if_any()
