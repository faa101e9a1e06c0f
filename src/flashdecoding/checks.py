"""Every refusal a user can meet, and the checked form of a call.

A decode loop repeats the same shapes, strides and options in every layer and step. What depends on these alone is
checked once (`signature.py`); what depends on values, lengths above all, is checked here in every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from flashdecoding.refusal import LARGEST, Refusal, in_range
from flashdecoding.signature import Checked, Facts, Signature, check_signature

if TYPE_CHECKING:
    from flashdecoding.plan import SplitPlan

Lengths = int | Sequence[int] | torch.Tensor

_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

_MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], Checked] = {}


class Spans(NamedTuple):
    """Where each sequence's queries and keys are: tuples of ``batch`` numbers. Layers of a step share them."""

    seqlens: tuple[int, ...]
    kv_begin: tuple[int, ...] | None
    q_offsets: tuple[int, ...] | None  # ragged: cu_q_lens
    q_start: tuple[int, ...] | None  # position of the first query; None: the queries are the last positions of the keys
    kv_start: tuple[int, ...] | None  # position of key 0; None: 0


class DeviceSpans(NamedTuple):
    """The same as integer tensors on q's device, never read by the host; what the host gave is checked and copied."""

    seqlens: torch.Tensor | None  # None: the whole cache
    kv_begin: torch.Tensor | None
    q_offsets: torch.Tensor | None
    q_start: torch.Tensor | None
    kv_start: torch.Tensor | None


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
    if plan is not None and not hasattr(plan, "problem"):
        raise ValueError(f"{caller}: plan must be a SplitPlan (from plan_decode), got {type(plan).__name__}")
    options = (max_q_len, scale, causal, window, softcap, kv_block, kv_stride)
    tensors = (q, k, v, page_table, cu_q_lens, sinks, alibi_slopes, mask)
    has_lengths = seqlens is not None or plan is not None
    checked = _recall(caller, tensors, options, has_lengths, q_start is not None)
    batch, capacity = checked.batch, checked.capacity
    refusal = Refusal(caller)
    spans: Spans | DeviceSpans
    if checked.signature.q.device.type == "cuda":
        if plan is not None:
            raise NotImplementedError(f"{caller}: plan: calls on {q.device} plan on the device; plans are for the CPU")
        spans = _device_spans(refusal, checked, seqlens, kv_begin, cu_q_lens, q_start, kv_start)
        refusal.raise_if_any(str(checked.signature))
        return Call(checked, q, k, v, page_table, sinks, alibi_slopes, mask, spans)

    def read(name: str, lengths: Lengths | None, most: int | None) -> tuple[int, ...] | None:
        return None if lengths is None else read_lengths(refusal, lengths, batch, most, name)

    spans = Spans(
        _read_seqlens(refusal, checked, seqlens, plan), read("kv_begin", kv_begin, capacity),
        None if cu_q_lens is None else _read_offsets(refusal, checked.signature, cu_q_lens.tolist()),
        read("q_start", q_start, None),
        None if type(kv_start) is int and kv_start == 0 else read("kv_start", kv_start, None),
    )  # fmt: skip
    if refusal.reasons:
        refusal.raise_if_any(str(checked.signature))
    call = Call(checked, q, k, v, page_table, sinks, alibi_slopes, mask, spans)
    if plan is not None and (plan.problem != checked.problem or call.positioned):
        check_plan(caller, plan, q, k, v, cu_q_lens, max_q_len, None if call.positioned else window)
    return call


def _recall(
    caller: str, tensors: tuple[Any, ...], options: tuple[Any, ...], has_lengths: bool, has_q_start: bool
) -> Checked:
    """What :func:`check_signature` says of a call, remembered. Tensors and options are in the order of `Signature`."""
    try:
        known = [t if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in tensors]
        # With their types: 1, 1.0 and True are equal, but not all of them are right.
        key = (caller, *known, *options, *map(type, options), has_lengths, has_q_start)
        checked = _known.get(key)
        if checked is not None:
            return checked
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or a kind without strides; an unhashable number
        key = ()
    facts = (*map(Facts.of, tensors[:3]), *map(Facts.of_given, tensors[3:]))
    checked = check_signature(Signature._make((caller, *facts, *options, has_lengths, has_q_start)))
    if key:
        if len(_known) >= _MOST_KNOWN:
            oldest, *_ = list(_known)  # a list, since other threads add meanwhile
            _known.pop(oldest, None)
        return _known.setdefault(key, checked)
    return checked


def host_lengths(lengths: Lengths, batch: int, most: int | None, caller: str, name: str = "seqlens") -> tuple[int, ...]:
    """Lengths as ints: ``batch`` of them (a single number stands for all), each in [0, most]."""
    refusal = Refusal(caller)
    numbers = read_lengths(refusal, lengths, batch, most, name)
    refusal.raise_if_any()
    return numbers


def read_lengths(refusal: Refusal, lengths: Lengths, batch: int, most: int | None, name: str) -> tuple[int, ...]:
    """The same, reasons noted in ``refusal``."""
    if isinstance(lengths, torch.Tensor):
        if lengths.layout != torch.strided or lengths.is_nested:
            refusal.unless(False, f"{name} must be a strided tensor, got {Facts.of(lengths).kind}")
            return ()
        whole = refusal.unless(
            lengths.dtype in _INTEGER_DTYPES, f"{name} must be an integer tensor, got {lengths.dtype}"
        )
        flat = refusal.unless(lengths.dim() <= 1, f"{name} must have shape ({batch},), got {tuple(lengths.shape)}")
        here = refusal.unless(lengths.device.type == "cpu", f"{name} must be on the CPU, got {lengths.device}")
        if not (whole and flat and here):
            return ()
        try:
            numbers: list[Any] = lengths.tolist() if lengths.dim() else [lengths.item()] * batch
        except RuntimeError as error:  # a tensor inside a transform, or one without elements in memory
            refusal.unless(False, f"{name} must be a tensor whose values can be read: {str(error).splitlines()[0]}")
            return ()
    else:
        listed = isinstance(lengths, Iterable) and not isinstance(lengths, (str, bytes, set, frozenset, dict))
        if isinstance(lengths, np.ndarray):
            numbers = np.atleast_1d(lengths).tolist() if lengths.ndim else [lengths.item()] * batch
        else:
            numbers = list(lengths) if listed else [lengths] * batch  # type: ignore[arg-type]
    if len(numbers) != batch:
        refusal.unless(False, f"{name} must hold {batch} numbers, one a sequence, got {len(numbers)}")
    if not all(in_range(n, most) for n in numbers):
        bad = [(b, n) for b, n in enumerate(numbers) if not in_range(n, most)]
        shown = ", ".join(f"{name}[{b}] = {n!r}" for b, n in bad[:8]) + (", ..." if len(bad) > 8 else "")
        limit = f"in [0, {LARGEST if most is None else most}]"
        refusal.unless(False, f"{name} must be whole numbers {limit}, got {shown}")
        return ()
    return tuple(numbers) if all(type(n) is int for n in numbers) else tuple(int(n) for n in numbers)


def _device_spans(
    refusal: Refusal, checked: Checked, seqlens: Lengths | None, kv_begin: Lengths | None,
    cu_q_lens: torch.Tensor | None, q_start: Lengths | None, kv_start: Lengths,
) -> DeviceSpans:  # fmt: skip
    """Lengths from either side as tensors on the device. What only the device knows is clamped by the kernels."""
    batch, device = checked.batch, checked.signature.q.device

    def place(name: str, lengths: Lengths | None, most: int | None) -> torch.Tensor | None:
        if lengths is None:
            return None
        if isinstance(lengths, torch.Tensor) and lengths.device == device:
            facts = Facts.of(lengths)
            if refusal.unless(facts.shape is not None, f"{name} must be a strided tensor, got {facts.kind}"):
                whole = lengths.dtype in (torch.int32, torch.int64)
                refusal.unless(whole, f"{name} must be int32 or int64, got {lengths.dtype}")
                shape = tuple(lengths.shape)
                refusal.unless(shape in ((), (batch,)), f"{name} must have shape ({batch},), got {shape}")
                return None if refusal.reasons else lengths.expand(batch).contiguous()
            return None
        numbers = read_lengths(refusal, lengths, batch, most, name)
        return None if refusal.reasons else torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)

    from_zero = type(kv_start) is int and kv_start == 0
    return DeviceSpans(
        place("seqlens", seqlens, checked.capacity), place("kv_begin", kv_begin, checked.capacity),
        None if cu_q_lens is None else cu_q_lens.contiguous(), place("q_start", q_start, None),
        None if from_zero else place("kv_start", kv_start, None),
    )  # fmt: skip


def refuse_quantised(caller: str, k_scale: Any, v_scale: Any, k_zero: Any, v_zero: Any) -> None:
    """No backend reads quantised caches yet."""
    if k_scale is None and v_scale is None and k_zero is None and v_zero is None:
        return
    named = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero}
    given = ", ".join(name for name, value in named.items() if value is not None)
    raise NotImplementedError(f"{caller}: {given}: quantised caches have no backend yet; k and v must have q's dtype")


def refuse_grad(caller: str, **inputs: Any) -> None:
    """Forward only: raises where autograd would expect a gradient or a tangent."""
    if torch.is_grad_enabled():
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


def _read_offsets(refusal: Refusal, s: Signature, offsets: list[int]) -> tuple[int, ...]:
    """Offsets of packed queries; tokens of q past the last offset belong to no sequence."""
    tokens = s.q.shape[2]
    lens = [end - begin for begin, end in itertools.pairwise(offsets)]
    inside, span = offsets[0] == 0 and offsets[-1] <= tokens, f"{offsets[0]} to {offsets[-1]}"
    refusal.unless(inside, f"cu_q_lens must run from 0 to at most q's {tokens} tokens, got {span}")
    refusal.unless(min(lens, default=0) >= 0, f"cu_q_lens must not decrease, got {offsets}")
    longest = max(lens, default=0)
    assert s.max_q_len is not None
    refusal.unless(longest <= s.max_q_len, f"max_q_len is {s.max_q_len}, but a sequence has {longest} queries")
    return tuple(offsets)


def _read_seqlens(
    refusal: Refusal, checked: Checked, seqlens: Lengths | None, plan: SplitPlan | None
) -> tuple[int, ...]:
    batch, capacity = checked.batch, checked.capacity
    if plan is not None and plan.problem.batch == batch:
        planned = plan.lengths
        if max(planned, default=0) > capacity:
            read_lengths(refusal, planned, batch, capacity, "plan.seqlens")
        if seqlens is not None:
            given = read_lengths(refusal, seqlens, batch, capacity, "seqlens")
            same = given == planned
            differ = f"seqlens {list(given)} differ from the plan's {list(planned)}"
            refusal.unless(same, f"{differ}; call plan.update(seqlens)")
        return planned
    return (capacity,) * batch if seqlens is None else read_lengths(refusal, seqlens, batch, capacity, "seqlens")


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
    )  # fmt: skip
    refusal = Refusal(caller)
    for name, planned, given in pairs:
        if planned != given:
            refusal.unless(False, f"the plan was made for {name}={planned}, the call has {given}")
    refusal.raise_if_any()
