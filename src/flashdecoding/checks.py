"""Every refusal a user can meet, in one voice, and the checked form of a call.

A decode loop repeats the same shapes, strides and options in every layer and step. What depends on these alone, a
:class:`Signature`, is checked once and remembered; what depends on values (lengths) is checked in every call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from flashdecoding.plan import SplitPlan

Lengths = int | Sequence[int] | torch.Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Refusal:
    """Collects reasons, then raises one error with all of them."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.reasons: list[str] = []

    def unless(self, condition: bool, reason: str) -> bool:
        """Note ``reason`` if ``condition`` fails; returns the condition."""
        if not condition:
            self.reasons.append(reason)
        return condition

    def raise_if_any(self, given: str = "", error: type[Exception] = ValueError) -> None:
        """Raise ``error`` with every reason noted, and with what was ``given``."""
        if self.reasons:
            one = len(self.reasons) == 1
            listed = f" {self.reasons[0]}" if one else "".join(f"\n  - {reason}" for reason in self.reasons)
            count = "" if one else f" {len(self.reasons)} reasons:"
            raise error(f"{self.caller}:{count}{listed}" + (f"\n  given: {given}" if given else ""))


class Facts(NamedTuple):
    """What a signature keeps of a tensor; ``shape`` is None where the user gave something else."""

    shape: Any
    stride: Any
    dtype: Any
    device: Any
    kind: str = "Tensor"

    @classmethod
    def of(cls, value: Any) -> Facts:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return cls(value.shape, value.stride(), value.dtype, value.device)
        return cls(None, None, None, None, type(value).__name__)

    @classmethod
    def of_given(cls, value: Any) -> Facts | None:
        return None if value is None else cls.of(value)

    def __str__(self) -> str:
        return self.kind if self.shape is None else f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Signature(NamedTuple):
    """All that a call's checks and launch depend on, but for values in tensors and lengths."""

    caller: str
    q: Facts
    k: Facts
    v: Facts
    page_table: Facts | None
    cu_q_lens: Facts | None
    max_q_len: int | None
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    sinks: Facts | None
    alibi_slopes: Facts | None
    mask: Facts | None
    has_lengths: bool
    has_q_start: bool
    kv_block: int | None
    kv_stride: int | None

    def __str__(self) -> str:
        return f"q {self.q}, k {self.k}, v {self.v}"


@dataclass(frozen=True, eq=False)
class Checked:
    """A signature found right, in the terms of the kernels. Compared by identity: one signature has one."""

    signature: Signature
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    q_len: int  # queries a sequence; the most, if ragged
    ragged: bool
    capacity: int  # keys that a sequence's cache can hold
    page_size: int  # 0: contiguous
    pages: int
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    mask_is_tree: bool
    kv_block: int | None
    kv_stride: int | None
    problem: tuple[Any, ...]  # equal to the DecodeProblem of a plan that fits


class Call(NamedTuple):
    """A checked call. Per-sequence numbers are host lists of length ``batch``."""

    checked: Checked
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    mask: torch.Tensor | None
    seqlens: list[int]
    kv_begin: list[int] | None
    q_offsets: list[int] | None  # ragged: cu_q_lens
    q_start: list[int] | None  # position of each sequence's first query; None: the last q_len positions of its keys
    kv_start: list[int] | None  # position of key 0; None: 0

    @property
    def positioned(self) -> bool:
        """Whether keys are a piece of the sequence, so that a window does not shrink the work beforehand."""
        return self.q_start is not None or self.kv_start is not None


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
    of, given = Facts.of, Facts.of_given
    signature = Signature(
        caller, of(q), of(k), of(v), given(page_table), given(cu_q_lens), max_q_len, scale, causal, window, softcap,
        given(sinks), given(alibi_slopes), given(mask),
        seqlens is not None or plan is not None, q_start is not None, kv_block, kv_stride,
    )  # fmt: skip
    try:
        checked = check_signature(signature)
    except TypeError:  # something unhashable among the numbers, which the checks refuse
        checked = check_signature.__wrapped__(signature)
    batch, capacity = checked.batch, checked.capacity
    offsets = None if cu_q_lens is None else _check_offsets(signature, cu_q_lens.tolist())
    lengths = _check_lengths(signature, checked, seqlens, plan)
    call = Call(
        checked, q, k, v, page_table, sinks, alibi_slopes, mask, lengths,
        None if kv_begin is None else host_lengths(kv_begin, batch, capacity, caller, "kv_begin"),
        offsets,
        None if q_start is None else host_lengths(q_start, batch, None, caller, "q_start"),
        None if type(kv_start) is int and kv_start == 0 else host_lengths(kv_start, batch, None, caller, "kv_start"),
    )  # fmt: skip
    if plan is not None and (plan.problem != checked.problem or call.positioned):
        check_plan(caller, plan, q, k, v, cu_q_lens, max_q_len, None if call.positioned else window)
    return call


@functools.lru_cache(maxsize=4096)
def check_signature(signature: Signature) -> Checked:
    """The checks that need no values. Raises ValueError, or NotImplementedError for what has no backend."""
    refusal, s = Refusal(signature.caller), signature
    _check_tensors(refusal, s)
    refusal.raise_if_any(str(s))
    if any(t.device.type != "cpu" for t in (s.q, s.k, s.v)):
        devices = ", ".join(str(t.device) for t in (s.q, s.k, s.v))
        raise NotImplementedError(f"{s.caller}: q, k, v are on {devices}; only the CPU has a backend")
    _check_shapes(refusal, s)
    _check_numbers(refusal, s)
    _check_tables(refusal, s)
    refusal.raise_if_any(str(s))

    batch = s.q.shape[0] if s.cu_q_lens is None else s.cu_q_lens.shape[0] - 1
    q_len = s.q.shape[2] if s.max_q_len is None else s.max_q_len
    page_size = 0 if s.page_table is None else s.k.shape[2]
    capacity = s.k.shape[2] if s.page_table is None else s.page_table.shape[1] * page_size
    if s.page_table is None:
        refusal.unless(s.k.shape[0] == batch, f"k must have q's batch of {batch}, got {s.k.shape[0]}")
    else:
        rows = s.page_table.shape[0]
        refusal.unless(rows == batch, f"page_table must have a row for each of {batch} sequences, got {rows}")
        refusal.unless(s.has_lengths, "seqlens must be given with page_table")
    q_heads = s.q.shape[1]
    _check_mask(refusal, s.mask, batch, q_heads, q_len, capacity)
    _check_per_head(refusal, "sinks", s.sinks, [(q_heads,)])
    _check_per_head(refusal, "alibi_slopes", s.alibi_slopes, [(q_heads,), (batch, q_heads)])
    refusal.raise_if_any(str(s))
    return Checked(
        signature=s, batch=batch, q_heads=q_heads, kv_heads=s.k.shape[1], head_dim=s.q.shape[3],
        head_dim_v=s.v.shape[3], dtype=s.q.dtype, q_len=q_len, ragged=s.cu_q_lens is not None,
        capacity=capacity, page_size=page_size, pages=0 if s.page_table is None else s.k.shape[0],
        scale=1.0 / math.sqrt(s.q.shape[3]) if s.scale is None else float(s.scale), causal=s.causal, window=s.window,
        softcap=None if s.softcap is None else float(s.softcap),
        mask_is_tree=s.mask is not None and len(s.mask.shape) == 3,
        kv_block=s.kv_block, kv_stride=s.kv_stride,
        problem=(batch, q_heads, s.k.shape[1], s.q.shape[3], s.v.shape[3], s.q.dtype, q_len, s.window),
    )  # fmt: skip


def host_lengths(lengths: Lengths, batch: int, most: int | None, caller: str, name: str = "seqlens") -> list[int]:
    """Lengths as a list of ints: ``batch`` of them (a single number stands for all), each in [0, most]."""
    refusal = Refusal(caller)
    if isinstance(lengths, torch.Tensor):
        refusal.unless(lengths.dtype in _INTEGER_DTYPES, f"{name} must be an integer tensor, got {lengths.dtype}")
        refusal.unless(lengths.dim() <= 1, f"{name} must have shape ({batch},), got {tuple(lengths.shape)}")
        refusal.unless(lengths.device.type == "cpu", f"{name} must be on the CPU, got {lengths.device}")
        refusal.raise_if_any()
        numbers: list[Any] = lengths.tolist() if lengths.dim() else [lengths.item()] * batch
    else:
        numbers = list(lengths) if isinstance(lengths, Iterable) else [lengths] * batch
    if len(numbers) != batch:
        refusal.unless(False, f"{name} must hold {batch} numbers, one a sequence, got {len(numbers)}")
    if not all(_in_range(n, most) for n in numbers):
        bad = [(b, n) for b, n in enumerate(numbers) if not _in_range(n, most)]
        shown = ", ".join(f"{name}[{b}] = {n!r}" for b, n in bad[:8]) + (", ..." if len(bad) > 8 else "")
        limit = ">= 0" if most is None else f"in [0, {most}]"
        refusal.unless(False, f"{name} must be whole numbers {limit}, got {shown}")
    refusal.raise_if_any()
    return numbers


def refuse_quantised(caller: str, k_scale: Any, v_scale: Any, k_zero: Any, v_zero: Any) -> None:
    """No backend reads quantised caches yet."""
    named = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero}
    given = ", ".join(name for name, value in named.items() if value is not None)
    if given:
        raise NotImplementedError(
            f"{caller}: {given}: quantised caches have no backend yet; k and v must have q's dtype"
        )


def refuse_grad(caller: str, tensors: Iterable[Any]) -> None:
    """Forward only: raises where autograd would expect a gradient."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise ValueError(f"{caller}: computes no gradients, but an input requires grad; call it under torch.no_grad()")


def refuse_without_backend(caller: str, device: torch.device) -> None:
    """Raises NotImplementedError for a device that no backend serves."""
    if device.type != "cpu":
        raise NotImplementedError(f"{caller}: no backend for {device.type!r} tensors; the CPU has one")


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


def _in_range(n: object, most: int | None) -> bool:
    if type(n) is not int and (not isinstance(n, (int, np.integer)) or isinstance(n, bool)):
        return False
    n = int(n)
    return n >= 0 and (most is None or n <= most)


def _is_finite(x: object) -> bool:
    return isinstance(x, (int, float, np.number)) and not isinstance(x, bool) and math.isfinite(x)


def _is_positive(x: object) -> bool:
    return _in_range(x, None) and x != 0


def _check_tensors(refusal: Refusal, s: Signature) -> None:
    for name, t in (("q", s.q), ("k", s.k), ("v", s.v)):
        if refusal.unless(t.shape is not None, f"{name} must be a strided torch.Tensor, got {t.kind}"):
            axes = "(batch, heads, sequence, head_dim)"
            refusal.unless(len(t.shape) == 4, f"{name} must have 4 axes {axes}, got shape {tuple(t.shape)}")


def _check_shapes(refusal: Refusal, s: Signature) -> None:
    q, k, v = s.q, s.k, s.v
    if refusal.unless(q.dtype in FLOAT_DTYPES, f"q must be float16, bfloat16, float32 or float64, got {q.dtype}"):
        refusal.unless(k.dtype == q.dtype, f"k must have q's dtype {q.dtype}, got {k.dtype}")
        refusal.unless(v.dtype == q.dtype, f"v must have q's dtype {q.dtype}, got {v.dtype}")
    agree = k.shape[:3] == v.shape[:3]
    refusal.unless(agree, f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    refusal.unless(q.shape[3] == k.shape[3], f"q and k must have one head_dim, got {q.shape[3]} and {k.shape[3]}")
    refusal.unless(min(q.shape[3], v.shape[3]) >= 1, f"head_dim must be >= 1, got {q.shape[3]} and {v.shape[3]}")
    heads = k.shape[1] >= 1 and q.shape[1] >= 1 and q.shape[1] % k.shape[1] == 0
    refusal.unless(heads, f"q's heads must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}")


def _check_numbers(refusal: Refusal, s: Signature) -> None:
    refusal.unless(isinstance(s.causal, bool), f"causal must be True or False, got {s.causal!r}")
    refusal.unless(s.scale is None or _is_finite(s.scale), f"scale must be a finite number, got {s.scale!r}")
    capped = s.softcap is None or (_is_finite(s.softcap) and s.softcap > 0)
    refusal.unless(capped, f"softcap must be a positive number or None, got {s.softcap!r}")
    refusal.unless(s.window is None or _is_positive(s.window), f"window must be an int >= 1 or None, got {s.window!r}")
    together = (s.kv_block is None) == (s.kv_stride is None)
    given = f"got {s.kv_block!r} and {s.kv_stride!r}"
    refusal.unless(together, f"kv_block and kv_stride go together, {given}")
    if s.kv_block is not None and s.kv_stride is not None:
        whole = _is_positive(s.kv_block) and _is_positive(s.kv_stride)
        if refusal.unless(whole, f"kv_block and kv_stride must be ints >= 1, {given}"):
            refusal.unless(s.kv_stride >= s.kv_block, f"kv_stride must be at least kv_block, {given}")
        refusal.unless(s.has_q_start, "q_start must be given with kv_block")


def _check_tables(refusal: Refusal, s: Signature) -> None:
    """The page table and the offsets of ragged queries: int32 tensors of the right rank on q's device."""
    for name, facts, axes in (
        ("page_table", s.page_table, "(batch, max_pages)"),
        ("cu_q_lens", s.cu_q_lens, "(batch + 1,)"),
    ):
        if facts is None:
            continue
        if not refusal.unless(facts.shape is not None, f"{name} must be an int32 tensor, got {facts.kind}"):
            continue
        rank = axes.count(",") if facts is s.cu_q_lens else 2
        refusal.unless(facts.dtype == torch.int32, f"{name} must be int32, got {facts.dtype}")
        refusal.unless(len(facts.shape) == rank, f"{name} must have shape {axes}, got {tuple(facts.shape)}")
        refusal.unless(facts.device == s.q.device, f"{name} must be on q's device, got {facts.device}")
    if s.page_table is not None:
        refusal.unless(s.k.shape[2] >= 1, f"pages must hold 1 token or more, got k of shape {tuple(s.k.shape)}")
    together = (s.cu_q_lens is None) == (s.max_q_len is None)
    refusal.unless(together, f"cu_q_lens and max_q_len go together, got max_q_len={s.max_q_len!r}")
    if s.max_q_len is not None:
        refusal.unless(_in_range(s.max_q_len, None), f"max_q_len must be an int >= 0, got {s.max_q_len!r}")
    if s.cu_q_lens is not None:
        refusal.unless(
            s.q.shape[0] == 1, f"with cu_q_lens, q is packed (1, heads, tokens, head_dim); got batch {s.q.shape[0]}"
        )
        if s.cu_q_lens.shape is not None:
            refusal.unless(0 not in s.cu_q_lens.shape, "cu_q_lens must hold at least the 0 that it begins with")


def _check_mask(refusal: Refusal, mask: Facts | None, batch: int, q_heads: int, q_len: int, capacity: int) -> None:
    if mask is None or not refusal.unless(mask.shape is not None, f"mask must be a bool tensor, got {mask.kind}"):
        return
    refusal.unless(mask.dtype == torch.bool, f"mask must be bool (True = visible), got {mask.dtype}")
    refusal.unless(mask.device.type == "cpu", f"mask must be on q's device, got {mask.device}")
    shape = tuple(mask.shape)
    heads = (1, q_heads)
    tree = len(shape) == 3 and shape[0] in (1, batch) and shape[1:] == (q_len, q_len)
    dense = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in heads and shape[2:] == (q_len, capacity)
    refusal.unless(
        tree or dense,
        f"mask must have shape ({batch} or 1, {q_heads} or 1, {q_len}, {capacity}) or, as a draft tree, "
        f"({batch} or 1, {q_len}, {q_len}); got {shape}",
    )


def _check_per_head(refusal: Refusal, name: str, facts: Facts | None, shapes: list[tuple[int, ...]]) -> None:
    if facts is None or not refusal.unless(facts.shape is not None, f"{name} must be a tensor, got {facts.kind}"):
        return
    wanted = " or ".join(map(str, shapes))
    refusal.unless(tuple(facts.shape) in shapes, f"{name} must have shape {wanted}, got {tuple(facts.shape)}")
    refusal.unless(facts.dtype in FLOAT_DTYPES, f"{name} must be a floating-point tensor, got {facts.dtype}")
    refusal.unless(facts.device.type == "cpu", f"{name} must be on q's device, got {facts.device}")


def _check_offsets(s: Signature, offsets: list[int]) -> list[int]:
    """Offsets of packed queries; tokens of q past the last offset belong to no sequence."""
    refusal, tokens = Refusal(s.caller), s.q.shape[2]
    lens = [end - begin for begin, end in itertools.pairwise(offsets)]
    inside = offsets[0] == 0 and offsets[-1] <= tokens
    refusal.unless(
        inside, f"cu_q_lens must run from 0 to at most q's {tokens} tokens, got {offsets[0]} to {offsets[-1]}"
    )
    refusal.unless(min(lens, default=0) >= 0, f"cu_q_lens must not decrease, got {offsets}")
    longest = max(lens, default=0)
    assert s.max_q_len is not None
    refusal.unless(longest <= s.max_q_len, f"max_q_len is {s.max_q_len}, but a sequence has {longest} queries")
    refusal.raise_if_any(str(s))
    return offsets


def _check_lengths(s: Signature, checked: Checked, seqlens: Lengths | None, plan: SplitPlan | None) -> list[int]:
    batch, capacity = checked.batch, checked.capacity
    if plan is not None and plan.problem.batch == batch:
        planned = plan.lengths
        if max(planned, default=0) > capacity:
            host_lengths(planned, batch, capacity, s.caller, "plan.seqlens")
        if seqlens is None or seqlens is plan.seqlens:
            return planned
        given = host_lengths(seqlens, batch, capacity, s.caller)
        refusal = Refusal(s.caller)
        refusal.unless(given == planned, f"seqlens {given} differ from the plan's {planned}; call plan.update(seqlens)")
        refusal.raise_if_any()
        return given
    return [capacity] * batch if seqlens is None else host_lengths(seqlens, batch, capacity, s.caller)


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
