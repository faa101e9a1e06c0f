"""One call on the CPU: memory for partial states, the record for the kernels, the two stages on threads."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashdecoding.cpu.arguments import Layout, Run, Sequence
from flashdecoding.cpu.compiled import workers
from flashdecoding.cpu.shape import MAX_ROWS, kernel_shape
from flashdecoding.cpu.softmax import LOG2_E
from flashdecoding.cpu.threads import Worker, run_parallel
from flashdecoding.cpu.workspace import borrow, give_back
from flashdecoding.lengths import Spans
from flashdecoding.refusal import Refusal
from flashdecoding.state import AttentionState, state_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

    from flashdecoding.checks import Call
    from flashdecoding.plan import Cut
    from flashdecoding.signature import Checked, Facts

WHOLE = 1 << 62  # kv_block and kv_stride of keys that stand without gaps
THREAD_WORK = 1 << 19  # work (see Launch) of some 30 us on a core: with less, a second thread does not pay

_Counters = ctypes.c_int64 * 4
_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class Results(NamedTuple):
    """Where a call writes: ``out`` is the output in q's dtype, or a state's o when ``m`` and ``l`` are given."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    m: torch.Tensor | None = None
    l: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Launch:
    """What a signature and the strides of its output fix: compiled stages, sizes, the constant part of the record."""

    checked: Checked
    split_worker: Worker
    merge_worker: Worker
    layout: bytes
    scratch_stride: int
    part_o_bytes: int  # of one partial row; its m and l take 16 more
    part_sums: int
    key_work: int  # work of one key, over all heads and queries: bytes of cache, or a quarter of the multiply-adds
    q_step: int  # bytes from a sequence's queries to the next one's (ragged: from a query to the next)
    out_step: int
    lse_step: int


class SequenceTable(NamedTuple):
    """One :class:`Sequence` row for each sequence, and what the rows add up to."""

    rows: array.array[int]
    address: int
    units: int  # over all kv heads
    out_rows: int
    parts: int  # partial rows
    large: bool  # enough work for a second thread


def decode(call: Call, cut: Cut, out: torch.Tensor, want_lse: bool) -> torch.Tensor | None:
    """Write attention into ``out``; returns lse (batch, q_heads, q_len) if wanted."""
    lse = call.q.new_empty(out.shape[:3], dtype=state_dtype(call.checked.dtype)) if want_lse else None
    run(call, cut, Results(out, lse))
    return lse


def partial_state(call: Call, cut: Cut) -> AttentionState:
    """The state (m, l, o) of a call."""
    dtype, rows = state_dtype(call.checked.dtype), call.q.shape[:3]
    m, l = call.q.new_empty(rows, dtype=dtype), call.q.new_empty(rows, dtype=dtype)
    o = call.q.new_empty((*rows, call.checked.head_dim_v), dtype=dtype)
    run(call, cut, Results(o, None, m, l))
    return AttentionState(m.unsqueeze(-1), l.unsqueeze(-1), o)


def run(call: Call, cut: Cut, results: Results) -> None:
    """Both stages.

    Raises:
        ValueError: a page id outside [0, pages) among the pages that hold keys in reach.
    """
    spans = call.spans
    assert isinstance(spans, Spans)
    launch = prepare(call.checked, results.out.stride(), results.m is not None)
    table = _sequences(launch, spans, cut)
    if call.page_table is not None and table.out_rows:
        _check_pages(call, call.page_table, table.rows)
    if table.out_rows == 0:
        _clear_unused(spans.q_offsets, results)
        return
    threads = min(torch.get_num_threads(), table.units) if table.large and table.units else 1
    part_bytes = -(-table.parts * (launch.part_o_bytes + 16) // 64) * 64
    workspace = borrow(part_bytes + threads * launch.scratch_stride)
    base, counters = workspace.base, _Counters()
    heads = call.checked.q_heads
    alibi = None if call.alibi_slopes is None else _as_float64(call.alibi_slopes, (call.checked.batch, heads))
    sinks = None if call.sinks is None else _as_float64(call.sinks, (heads,))
    arguments = launch.layout + Run(
        ctypes.addressof(counters), base + part_bytes, table.address, table.units, table.out_rows,
        base, base + table.parts * launch.part_o_bytes,
        *_addresses(
            launch, q=call.q, k=call.k, v=call.v, page_table=call.page_table, alibi_slopes=alibi, sinks=sinks,
            mask=call.mask, out=results.out, lse=results.lse, m=results.m, l=results.l,
        ),
    ).pack()  # fmt: skip
    run_parallel(launch.split_worker, arguments, threads)
    merging = table.parts * launch.part_sums >= THREAD_WORK // 4
    run_parallel(launch.merge_worker, arguments, threads if merging else 1)
    _clear_unused(spans.q_offsets, results)  # last, since out may lie where an input does
    give_back(workspace)


@functools.lru_cache(maxsize=4096)
def prepare(checked: Checked, out_stride: tuple[int, ...], is_state: bool) -> Launch:
    """Compile and lay out what every call of one signature shares."""
    c, s = checked, checked.signature
    shape = kernel_shape(_DTYPE_NAMES[c.dtype], c.head_dim, c.head_dim_v)
    split_worker, merge_worker = workers(shape)
    element, score = shape.element_bytes, shape.score_bytes
    out_element = score if is_state else element
    q, k, v = (_strides(facts, element) for facts in (s.q, s.k, s.v))
    out = [stride * out_element for stride in out_stride]
    pages = (0, 0) if s.page_table is None else s.page_table.stride
    mask = (0, 0, 0, 0) if s.mask is None else _mask_strides(s.mask)
    tokens = s.q.shape[2]
    scale = c.scale if abs(c.scale) >= torch.finfo(state_dtype(c.dtype)).smallest_normal else 0.0
    scratch_stride = shape.scratch_bytes(gathers=k[3] != element or v[3] != element)
    layout = Layout(
        scratch_stride=scratch_stride, batch=c.batch, kv_heads=c.kv_heads, group_size=c.q_heads // c.kv_heads,
        q_sign=math.copysign(1.0, scale) if scale else 0.0,
        factor=1.0 if c.softcap or not scale else abs(scale) * LOG2_E,
        inverse_softcap=(abs(scale) or 1.0) / c.softcap if c.softcap else 0.0, softcap=c.softcap or 0.0,
        q_stride_h=q[1], q_stride_s=q[2], q_stride_d=q[3],
        k_stride_b=k[0], k_stride_h=k[1], k_stride_s=k[2], k_stride_d=k[3],
        v_stride_b=v[0], v_stride_h=v[1], v_stride_s=v[2], v_stride_d=v[3],
        page_table_stride_b=4 * pages[0], page_table_stride_p=4 * pages[1], page_size=c.page_size,
        kv_block=c.kv_block or WHOLE, kv_stride=c.kv_stride or WHOLE, causal=int(c.causal), window=c.window or 0,
        mask_stride_b=mask[0], mask_stride_h=mask[1], mask_stride_q=mask[2], mask_stride_k=mask[3],
        mask_is_tree=int(c.mask_is_tree), out_stride_h=out[1], out_stride_s=out[2],
        out_stride_d=out_element if c.head_dim_v == 1 else out[3],
        lse_stride_h=tokens * score, lse_stride_s=score,
    )  # fmt: skip
    along = 2 if c.ragged else 0
    rows = c.q_heads * max(1, c.q_len)
    return Launch(
        c, split_worker, merge_worker, layout.pack(), scratch_stride, shape.o_row_bytes, shape.padded_dim_v,
        key_work=(c.head_dim + c.head_dim_v) * max(rows // 4, c.kv_heads * element),
        q_step=q[along], out_step=out[along], lse_step=score if c.ragged else c.q_heads * tokens * score,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _sequences(launch: Launch, spans: Spans, cut: Cut) -> SequenceTable:
    """Layers of a step have the same lengths: the table is made once for all of them."""
    c, offsets, group = launch.checked, spans.q_offsets, launch.checked.q_heads // launch.checked.kv_heads
    table: array.array[int] = array.array("q")
    units = rows = parts = 0
    for b, seqlen in enumerate(spans.seqlens):
        at, q_len = (b, c.q_len) if offsets is None else (offsets[b], offsets[b + 1] - offsets[b])
        kv_start = 0 if spans.kv_start is None else spans.kv_start[b]
        splits = cut.split_offsets[b + 1] - cut.split_offsets[b]
        table.extend(
            Sequence(
                at * launch.q_step, at * launch.out_step, at * launch.lse_step, q_len,
                kv_start + seqlen - q_len if spans.q_start is None else spans.q_start[b], kv_start,
                0 if spans.kv_begin is None else spans.kv_begin[b], seqlen,
                cut.first[b], cut.split_keys[b], splits, units, rows, parts,
            )
        )  # fmt: skip
        units += splits * (-(-group * q_len // MAX_ROWS))
        rows += c.q_heads * q_len
        parts += splits * c.q_heads * q_len
    work = sum(spans.seqlens) * launch.key_work
    return SequenceTable(table, table.buffer_info()[0], units * c.kv_heads, rows, parts, work >= THREAD_WORK)


def _clear_unused(q_offsets: tuple[int, ...] | None, results: Results) -> None:
    """Packed query slots that belong to no sequence: empty rows."""
    if q_offsets is None:
        return
    used = q_offsets[-1]
    results.out[:, :, used:] = 0
    for tensor, empty in ((results.lse, -torch.inf), (results.m, -torch.inf), (results.l, 0.0)):
        if tensor is not None:
            tensor[:, :, used:] = empty


def _as_float64(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A copy: ``out`` may lie where the tensor does."""
    return tensor.to(torch.float64, copy=True).expand(shape).contiguous()


def _addresses(launch: Launch, **tensors: torch.Tensor | None) -> list[int]:
    """0 for None. A tensor of some other kind may have no memory to point to."""
    found = []
    for name, tensor in tensors.items():
        try:
            address = 0 if tensor is None else tensor.data_ptr()
        except RuntimeError:  # inside torch.vmap or another transform
            address = 0
        if address == 0 and tensor is not None and tensor.numel():
            kinds = "a fake tensor, freed storage, or a tensor inside a transform such as torch.vmap"
            caller = launch.checked.signature.caller
            raise ValueError(f"{caller}: {name} of shape {tuple(tensor.shape)} has no memory ({kinds})")
        found.append(address)
    return found


def _strides(facts: Facts, element: int) -> list[int]:
    """In bytes; the elements of a row of one are adjacent whatever its stride says."""
    strides = [stride * element for stride in facts.stride]
    return [*strides[:3], element if facts.shape[3] == 1 else strides[3]]


def _mask_strides(mask: Facts) -> tuple[int, int, int, int]:
    """(batch, head, query, key), 0 where the mask is broadcast; a draft tree has no head axis."""
    strides = [0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride, strict=True)]
    b, *heads, q, k = strides
    return b, heads[0] if heads else 0, q, k


def _keys_up_to(c: Checked, kv_start: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of local keys of each sequence at positions <= position, as `tiles.keys_up_to` counts them."""
    past, block, stride = position - kv_start, c.kv_block or WHOLE, c.kv_stride or WHOLE
    keys = past // stride * block + np.minimum(past % stride + 1, block)
    return np.where(past < 0, 0, keys)


def _check_pages(call: Call, page_table: torch.Tensor, table: array.array[int]) -> None:
    """Every page that holds a key in reach must exist; other entries are not looked at."""
    columns = np.frombuffer(table, np.int64).reshape(-1, len(Sequence._fields)).T
    field = dict(zip(Sequence._fields, columns, strict=True))
    c, size, pages = call.checked, call.checked.page_size, page_table.numpy()
    low_key, high_key, q_start = field["kv_begin"], field["kv_end"], field["q_start"]
    if c.window is not None:
        low_key = np.maximum(low_key, _keys_up_to(c, field["kv_start"], q_start - c.window))
    if c.causal:
        high_key = np.minimum(high_key, _keys_up_to(c, field["kv_start"], q_start + field["q_len"] - 1))
    begin, end = low_key // size, np.where(field["q_len"] > 0, -(-high_key // size), 0)
    low, high = int(begin.min()), int(end.max())  # tables are often much wider than any sequence
    slots, pages = np.arange(low, high), pages[:, low:high]
    listed = (slots >= begin[:, None]) & (slots < end[:, None])
    wrong = listed & ((pages < 0) | (pages >= call.checked.pages))
    if not wrong.any():
        return
    places = [(int(b), int(p) + low) for b, p in itertools.islice(np.argwhere(wrong), 8)]
    pages = page_table.numpy()
    shown = ", ".join(f"page_table[{b}, {p}] = {pages[b, p]}" for b, p in places)
    refusal = Refusal(call.checked.signature.caller)
    refusal.unless(False, f"page ids must be in [0, {call.checked.pages}), got {shown}")
    refusal.raise_if_any(str(call.checked.signature))
