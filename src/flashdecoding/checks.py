"""Every refusal a user can meet, and the checked form of a call.

A decode loop repeats the same shapes, strides and options in every layer and step. What depends on these alone is
checked once (`signature.py`); what depends on values, lengths above all, is checked here in every call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from flashdecoding.lengths import (
    NOTHING_BUT_A_PLAN,
    DeviceSpans,
    Lengths,
    Spans,
    device_spans,
    read_lengths,
    read_offsets,
)
from flashdecoding.plan import SplitPlan
from flashdecoding.refusal import Refusal
from flashdecoding.remember import remember
from flashdecoding.signature import Checked, Facts, Signature, check_signature

_MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], Checked] = {}


class Call(NamedTuple):
    """A checked call."""

    checked: Checked
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    mask: torch.Tensor | None
    spans: Spans | DeviceSpans

    @property
    def positioned(self) -> bool:
        """Whether keys are a piece of the sequence, so that a window does not shrink the work beforehand."""
        return self.spans.q_start is not None or self.spans.kv_start is not None


def check_call(
    caller: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seqlens: Lengths | None,
    page_table: torch.Tensor | None,
    kv_begin: Lengths | None,
    cu_q_lens: torch.Tensor | None,
    max_q_len: int | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    mask: torch.Tensor | None,
    plan: SplitPlan | None,
    q_start: Lengths | None = None,
    kv_start: Lengths = 0,
    kv_block: int | None = None,
    kv_stride: int | None = None,
) -> Call:
    """Check everything the host can know. Raises one ValueError that names every reason."""
    if plan is not None and not isinstance(plan, SplitPlan):
        raise ValueError(f"{caller}: plan must be a SplitPlan (from plan_decode), got {type(plan).__name__}")
    options = (max_q_len, scale, causal, window, softcap, kv_block, kv_stride)
    tensors = (q, k, v, page_table, cu_q_lens, sinks, alibi_slopes, mask)
    has_lengths = seqlens is not None or plan is not None
    checked = _recall(caller, tensors, options, has_lengths, q_start is not None)
    if (
        plan is not None and kv_begin is cu_q_lens is q_start is None and type(kv_start) is int and kv_start == 0
        and plan.admits(checked) and (seqlens is None or plan.is_made_from(seqlens))
    ):  # fmt: skip
        return Call(checked, q, k, v, page_table, sinks, alibi_slopes, mask, NOTHING_BUT_A_PLAN)
    refusal = Refusal(caller)
    spans: Spans | DeviceSpans
    if checked.signature.q.device.type == "cuda":
        if plan is not None:
            _check_planned_lengths(refusal, checked, seqlens, plan)
            seqlens = None
        spans = device_spans(refusal, checked, seqlens, kv_begin, cu_q_lens, q_start, kv_start)
    else:
        spans = _host_spans(refusal, checked, seqlens, kv_begin, cu_q_lens, q_start, kv_start, plan)
    if refusal.reasons:
        refusal.raise_if_any(str(checked.signature))
    call = Call(checked, q, k, v, page_table, sinks, alibi_slopes, mask, spans)
    if plan is not None and (plan.problem != checked.problem or call.positioned or plan.where != q.device):
        check_plan(caller, plan, q, k, v, cu_q_lens, max_q_len, None if call.positioned else window)
    if plan is not None and not call.positioned:
        plan.admit(checked)
    return call


def _host_spans(
    refusal: Refusal, checked: Checked, seqlens: Lengths | None, kv_begin: Lengths | None,
    cu_q_lens: torch.Tensor | None, q_start: Lengths | None, kv_start: Lengths, plan: SplitPlan | None,
) -> Spans:  # fmt: skip
    def read(name: str, lengths: Lengths | None, most: int | None) -> tuple[int, ...] | None:
        return None if lengths is None else read_lengths(refusal, lengths, checked.batch, most, name)

    return Spans(
        _read_seqlens(refusal, checked, seqlens, plan), read("kv_begin", kv_begin, checked.capacity),
        None if cu_q_lens is None else read_offsets(refusal, checked.signature, cu_q_lens.tolist()),
        read("q_start", q_start, None),
        None if type(kv_start) is int and kv_start == 0 else read("kv_start", kv_start, None),
    )  # fmt: skip


def _recall(
    caller: str, tensors: tuple[Any, ...], options: tuple[Any, ...], has_lengths: bool, has_q_start: bool
) -> Checked:
    """What :func:`check_signature` says of a call, remembered. Tensors and options are in the order of `Signature`."""
    try:
        key: tuple[Any, ...] = (caller, *map(_facts, tensors[:3]), has_lengths, has_q_start)
        if any(given is not None for given in tensors[3:]):
            key += tuple([t if t is None else _facts(t) for t in tensors[3:]])
        max_q_len, scale, causal, window, softcap, kv_block, kv_stride = options
        if not (max_q_len is scale is window is softcap is kv_block is kv_stride is None and causal is True):
            # With their types: 1, 1.0 and True are equal, but not all of them are right.
            key += (*options, *map(type, options))
        checked = _known.get(key)
        if checked is not None:
            return checked
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or a kind without strides; an unhashable number
        key = ()
    facts = (*map(Facts.of, tensors[:3]), *map(Facts.of_given, tensors[3:]))
    checked = check_signature(Signature._make((caller, *facts, *options, has_lengths, has_q_start)))
    if key:
        return remember(_known, key, checked, _MOST_KNOWN)
    return checked


def _facts(t: torch.Tensor) -> tuple[Any, ...]:
    """All that a signature looks at, as it comes."""
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg()


def refuse_quantised(caller: str, k_scale: Any, v_scale: Any, k_zero: Any, v_zero: Any) -> None:
    """No backend reads quantised caches yet."""
    if k_scale is None and v_scale is None and k_zero is None and v_zero is None:
        return
    named = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero}
    given = ", ".join(name for name, value in named.items() if value is not None)
    raise NotImplementedError(f"{caller}: {given}: quantised caches have no backend yet; k and v must have q's dtype")


def refuse_grad(caller: str, **inputs: Any) -> None:
    """Forward only: raises where autograd would expect a gradient or a tangent."""
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in inputs.values()):
        asking = [name for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad]
        if asking:
            reason = "requires grad, and no gradients are computed; use torch.no_grad()"
            raise ValueError(f"{caller}: {', '.join(asking)}: {reason}")
    if forward_ad._current_level >= 0:  # else no tensor has a tangent, and asking is not for every call
        dual = [name for name, t in inputs.items() if _has_tangent(t)]
        if dual:
            reason = "has a forward-mode tangent, and no derivatives are computed; unpack_dual gives the primal"
            raise ValueError(f"{caller}: {', '.join(dual)}: {reason}")


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def check_out(call: Call, out: torch.Tensor) -> None:
    """``out`` must be writable storage of the result's shape."""
    shape = (*call.q.shape[:3], call.checked.head_dim_v)
    facts = Facts.of(out)
    refusal = Refusal(call.checked.signature.caller)
    if refusal.unless(facts.shape is not None, f"out must be a strided tensor, got {facts.kind}"):
        refusal.unless(tuple(out.shape) == shape, f"out must have shape {shape}, got {tuple(out.shape)}")
        refusal.unless(out.dtype == call.q.dtype, f"out must have q's dtype {call.q.dtype}, got {out.dtype}")
        refusal.unless(out.device == call.q.device, f"out must be on q's device {call.q.device}, got {out.device}")
        refusal.unless(not _overlaps(facts), f"out's elements must not share memory, got strides {tuple(out.stride())}")
    refusal.raise_if_any()
    refuse_grad(call.checked.signature.caller, out=out)


def _overlaps(facts: Facts) -> bool:
    """Whether two elements may lie at one place: an axis that steps over less than the smaller axes cover."""
    if 0 in facts.shape:
        return False
    reach = 0
    for size, stride in sorted(zip(facts.shape, facts.stride, strict=True), key=lambda axis: axis[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _read_seqlens(
    refusal: Refusal, checked: Checked, seqlens: Lengths | None, plan: SplitPlan | None
) -> tuple[int, ...]:
    batch, capacity = checked.batch, checked.capacity
    if plan is not None and plan.lengths is not None and plan.problem.batch == batch:
        _check_planned_lengths(refusal, checked, seqlens, plan)
        return plan.lengths
    return (capacity,) * batch if seqlens is None else read_lengths(refusal, seqlens, batch, capacity, "seqlens")


def _check_planned_lengths(refusal: Refusal, checked: Checked, seqlens: Lengths | None, plan: SplitPlan) -> None:
    """The plan's lengths must fit the cache, and be those given, as far as the host knows either."""
    batch, capacity, planned = checked.batch, checked.capacity, plan.lengths
    if plan.problem.batch != batch:  # which check_plan will say
        return
    if planned is not None and max(planned, default=0) > capacity:
        read_lengths(refusal, planned, batch, capacity, "plan.seqlens")
    if seqlens is None or plan.is_made_from(seqlens):
        return
    if planned is None or (isinstance(seqlens, torch.Tensor) and seqlens.device.type != "cpu"):
        reason = "others on a GPU cannot be compared with its lengths without waiting for it"
        unchanged = "unchanged since (which an inference tensor cannot tell)"
        allowed = f"plan.seqlens or the tensor it was made from, {unchanged}"
        refusal.unless(False, f"with plan, seqlens may be {allowed}: {reason}; call plan.update(seqlens)")
        return
    given = read_lengths(refusal, seqlens, batch, capacity, "seqlens")
    differ = f"seqlens {list(given)} differ from the plan's {list(planned)}"
    refusal.unless(given == planned, f"{differ}; call plan.update(seqlens)")


def check_plan(
    caller: str, plan: SplitPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q_lens: torch.Tensor | None,
    max_q_len: int | None, window: int | None,
) -> None:  # fmt: skip
    """A call that does not fit its plan is refused. ``window`` is None for pieces: their plan must not cut one off."""
    p = plan.problem
    pairs = (
        ("batch", p.batch, q.shape[0] if cu_q_lens is None else cu_q_lens.shape[0] - 1),
        ("q_heads", p.q_heads, q.shape[1]), ("kv_heads", p.kv_heads, k.shape[1]), ("head_dim", p.head_dim, q.shape[3]),
        ("head_dim_v", p.head_dim_v, v.shape[3]), ("dtype", p.dtype, q.dtype),
        ("q_len", p.q_len, q.shape[2] if max_q_len is None else max_q_len), ("window", p.window, window),
        ("device", plan.where, q.device),
    )  # fmt: skip
    refusal = Refusal(caller)
    for name, planned, given in pairs:
        if planned != given:
            refusal.unless(False, f"the plan was made for {name}={planned}, the call has {given}")
    refusal.raise_if_any()
