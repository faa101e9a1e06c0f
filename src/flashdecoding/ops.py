"""The same calls as torch operators, for ``torch.compile``, ``torch.export`` and anything else that traces.

``torch.ops.flashdecoding.decode_attention`` returns (out, lse), ``decode_attention_out`` writes ``out`` and returns
lse, ``partial_attention`` returns (m, l, o). Per-sequence numbers are tensors here. A plan for the CPU is its lengths,
from which its cut follows; one for a GPU is its memory. Eager calls do not come through here: the dispatcher would cost
them as much as all their checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashdecoding.state import state_dtype

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? seqlens, Tensor? page_table, Tensor? kv_begin, Tensor? cu_q_lens, "
    "SymInt? max_q_len, float? scale, bool causal, SymInt? window, float? softcap, {sinks}"
    "Tensor? alibi_slopes, Tensor? mask"
)
_NAMES = (
    "seqlens", "page_table", "kv_begin", "cu_q_lens", "max_q_len", "scale", "causal", "window", "softcap", "sinks",
    "alibi_slopes", "mask",
)  # fmt: skip
_PARTIAL_NAMES = (*(name for name in _NAMES if name != "sinks"), "q_start", "kv_start", "kv_block", "kv_stride")

_PLAN_NAMES = ("plan_memory", "plan_max_seqlen", "plan_invariant")

_library = torch.library.Library("flashdecoding", "DEF")  # type: ignore[no-untyped-call]
_SINKS, _PIECE = "Tensor? sinks, ", "Tensor? q_start, Tensor? kv_start, SymInt? kv_block, SymInt? kv_stride"
_PLAN = "Tensor? plan_memory=None, SymInt? plan_max_seqlen=None, bool plan_invariant=False"
for _schema in (
    f"decode_attention({_CALL.format(sinks=_SINKS)}, {_PLAN}) -> (Tensor, Tensor)",
    f"decode_attention_out({_CALL.format(sinks=_SINKS)}, Tensor(a!) out, {_PLAN}) -> Tensor",
    f"partial_attention({_CALL.format(sinks='')}, {_PIECE}, {_PLAN}) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


def empty_output(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """(batch, heads, q_len, head_dim_v) whose axes lie in memory in the order of q's."""
    if head_dim_v == q.shape[3]:
        return torch.empty_like(q)
    shape = (*q.shape[:3], head_dim_v)
    stride = q.stride()
    order = sorted(range(4), key=lambda axis: (-stride[axis], axis))
    packed = q.new_empty([shape[axis] for axis in order])
    return packed.permute([order.index(axis) for axis in range(4)])


def _fake_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def _fake_decode_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def _fake_partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    dtype, rows = state_dtype(q.dtype), q.shape[:3]
    m, l = q.new_empty((*rows, 1), dtype=dtype), q.new_empty((*rows, 1), dtype=dtype)
    return m, l, q.new_empty((*rows, v.shape[3]), dtype=dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a subclass that the dispatcher took for a plain tensor, as one: it would be sent here again."""
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def bind(decode: Callable[..., Any], partial: Callable[..., Any], resume_plan: Callable[..., Any]) -> None:
    """Give the operators their eager implementations, :func:`decode_attention` and :func:`partial_attention`.

    ``resume_plan(q, k, v, options, memory, max_seqlen, batch_invariant)`` makes a plan of what stands for it.
    """

    def options_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, ...], call: Any) -> Any:
        options = dict(zip((*names, *_PLAN_NAMES), call, strict=False))  # a default is not among the arguments
        plan = [options.pop(name, None) for name in _PLAN_NAMES]
        if plan[0] is not None:
            options["plan"] = resume_plan(q, k, v, options, *plan)
        return options

    def run_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = decode(*map(_plain, (q, k, v)), **options_of(q, k, v, _NAMES, call), return_lse=True)
        return out, lse

    def run_decode_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> torch.Tensor:
        options = options_of(q, k, v, (*_NAMES, "out"), call)
        lse: torch.Tensor = decode(*map(_plain, (q, k, v)), **options, return_lse=True)[1]
        return lse

    def run_partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> tuple[torch.Tensor, ...]:
        options = options_of(q, k, v, _PARTIAL_NAMES, call)
        options["kv_start"] = 0 if options["kv_start"] is None else options["kv_start"]
        state = partial(*map(_plain, (q, k, v)), **options)
        return state.m, state.l, state.o

    for name, run, fake in (
        ("decode_attention", run_decode, _fake_decode),
        ("decode_attention_out", run_decode_out, _fake_decode_out),
        ("partial_attention", run_partial, _fake_partial),
    ):
        for key in ("CPU", "CUDA"):
            _library.impl(name, run, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"flashdecoding::{name}", fake, lib=_library)


def traced(q: Any, k: Any, v: Any) -> bool:
    """Whether a call is being recorded, or has tensors that only the dispatcher understands."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    plain = torch.Tensor
    if type(q) is plain and type(k) is plain and type(v) is plain:
        return False
    return any(isinstance(t, plain) and type(t) not in (plain, torch.nn.Parameter) for t in (q, k, v))


def _numbers(caller: str, name: str, value: Any, batch: int) -> torch.Tensor | None:
    """Host lengths as a tensor that can be traced."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    numbers = [value] * batch if isinstance(value, int) else list(value)
    if not all(isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"{caller}: {name} must be ints, got {value!r}")
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _planned(caller: str, options: dict[str, Any]) -> dict[str, Any]:
    """Takes the plan out of the options; the arguments that stand for it beside them."""
    plan = options.pop("plan")
    if plan is None:
        return {}
    if options["seqlens"] is not None and options["seqlens"] is not plan.seqlens:
        raise ValueError(f"{caller}: a traced call cannot compare seqlens with the plan's: give one of them")
    planned: dict[str, Any] = plan.operator_arguments()
    options["seqlens"] = planned.pop("seqlens", None)
    return planned


def traced_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by way of the operators."""
    batch = q.shape[0] if options["cu_q_lens"] is None else options["cu_q_lens"].shape[0] - 1
    planned = _planned("decode_attention", options)
    for name in ("seqlens", "kv_begin"):
        options[name] = _numbers("decode_attention", name, options[name], batch)
    call = [options[name] for name in _NAMES]
    if out is None:
        fresh: tuple[torch.Tensor, torch.Tensor] = torch.ops.flashdecoding.decode_attention(q, k, v, *call, **planned)
        return fresh
    lse: torch.Tensor = torch.ops.flashdecoding.decode_attention_out(q, k, v, *call, out, **planned)
    return out, lse


def traced_partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, l, o) by way of the operator."""
    batch = q.shape[0] if options["cu_q_lens"] is None else options["cu_q_lens"].shape[0] - 1
    planned = _planned("partial_attention", options)
    if type(options["kv_start"]) is int and options["kv_start"] == 0:  # not a piece further on
        options["kv_start"] = None
    for name in ("seqlens", "kv_begin", "q_start", "kv_start"):
        options[name] = _numbers("partial_attention", name, options[name], batch)
    call = [options[name] for name in _PARTIAL_NAMES]
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.flashdecoding.partial_attention(
        q, k, v, *call, **planned
    )
    return state
