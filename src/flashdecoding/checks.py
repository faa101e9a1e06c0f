"""Every refusal a user can meet, in one voice, and the checked form of a call.

:func:`check_call` reads the arguments of an attention call once and either raises one error that names every reason,
or returns a :class:`Call`, in which lengths are host numbers and every optional argument has its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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

    def raise_if_any(self, context: str = "", error: type[Exception] = ValueError) -> None:
        if self.reasons:
            if len(self.reasons) == 1:
                text = f"{self.caller}: {self.reasons[0]}"
            else:
                text = f"{self.caller}: {len(self.reasons)} reasons:" + "".join(f"\n  - {r}" for r in self.reasons)
            raise error(text + (f"\n  given: {context}" if context else ""))


def refuse_without_backend(device: torch.device, caller: str) -> None:
    """Raises NotImplementedError for a device that no backend serves."""
    if device.type != "cpu":
        raise NotImplementedError(f"{caller}: no backend for {device.type!r} tensors; the CPU has one")


class Call(NamedTuple):
    """A checked attention call. Per-sequence numbers are host lists of length ``batch``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    q_len: int  # queries a sequence; the most, if ragged
    capacity: int  # keys that a sequence's cache can hold
    seqlens: list[int]
    page_table: torch.Tensor | None
    page_size: int
    kv_begin: list[int] | None
    q_offsets: list[int] | None  # ragged: cu_q_lens
    q_lens: list[int] | None  # ragged: their differences
    q_start: list[int] | None  # position of each sequence's first query; None: the last q_len positions of seqlens
    kv_start: list[int] | None  # position of key 0; None: 0
    kv_block: int | None
    kv_stride: int | None
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    mask: torch.Tensor | None
    mask_is_tree: bool


def check_call(  # noqa: PLR0913
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
    """Check everything the host can know; see :class:`Call`."""
    refusal = Refusal(caller)
    _check_tensors(refusal, q, k, v)
    refusal.raise_if_any(_shapes(q, k, v), NotImplementedError if _is_foreign(q, k, v) else ValueError)
    _check_shapes(refusal, q, k, v, page_table)
    _check_numbers(refusal, scale, causal, window, softcap, kv_block, kv_stride, q_start)
    refusal.raise_if_any(_shapes(q, k, v))

    q_heads, head_dim, head_dim_v = q.shape[1], q.shape[3], v.shape[3]
    kv_heads = k.shape[1]
    q_offsets, q_lens = _check_ragged(refusal, q, cu_q_lens, max_q_len)
    refusal.raise_if_any(_shapes(q, k, v))
    batch = q.shape[0] if q_offsets is None else len(q_offsets) - 1
    q_len = q.shape[2] if q_offsets is None else int(max_q_len or 0)
    if page_table is None:
        page_size, capacity = 0, k.shape[2]
        refusal.unless(k.shape[0] == batch, f"k must have q's batch of {batch}, got {k.shape[0]}")
    else:
        page_size, capacity = k.shape[2], page_table.shape[1] * k.shape[2]
        refusal.unless(page_table.shape[0] == batch, f"page_table must have {batch} rows, got {page_table.shape[0]}")
    mask_is_tree = _check_mask(refusal, mask, batch, q_heads, q_len, capacity)
    _check_per_head(refusal, "sinks", sinks, [(q_heads,)], q)
    _check_per_head(refusal, "alibi_slopes", alibi_slopes, [(q_heads,), (batch, q_heads)], q)
    refusal.raise_if_any(_shapes(q, k, v))

    lengths = _check_seqlens(refusal, caller, seqlens, plan, batch, capacity, page_table is not None)
    begin = None if kv_begin is None else host_lengths(kv_begin, batch, capacity, caller, "kv_begin")
    starts = None if q_start is None else host_lengths(q_start, batch, None, caller, "q_start")
    origins = None if _is_zero(kv_start) else host_lengths(kv_start, batch, None, caller, "kv_start")
    if plan is not None:
        positioned = starts is not None or origins is not None or kv_block is not None
        _check_plan(refusal, plan, batch, q_heads, kv_heads, head_dim, head_dim_v, q, q_len, window, positioned)
        refusal.raise_if_any(_shapes(q, k, v))
    return Call(
        q=q, k=k, v=v, batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
        q_len=q_len, capacity=capacity, seqlens=lengths, page_table=page_table, page_size=page_size, kv_begin=begin,
        q_offsets=q_offsets, q_lens=q_lens, q_start=starts, kv_start=origins, kv_block=kv_block, kv_stride=kv_stride,
        scale=1.0 / math.sqrt(head_dim) if scale is None else float(scale), causal=causal, window=window,
        softcap=None if softcap is None else float(softcap), sinks=sinks, alibi_slopes=alibi_slopes, mask=mask,
        mask_is_tree=mask_is_tree,
    )  # fmt: skip


def refuse_quantised(caller: str, **scales: object) -> None:
    """No backend reads quantised caches yet."""
    given = [name for name, value in scales.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"{caller}: {', '.join(given)}: quantised caches have no backend yet; k and v must have q's dtype"
        )


def refuse_grad(caller: str, *tensors: torch.Tensor | None) -> None:
    """Forward only: raises where autograd would expect a gradient."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{caller}: computes no gradients, but an input requires grad; call it under torch.no_grad()")


def check_out(caller: str, out: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """``out`` must be writable storage of the result's shape."""
    refusal = Refusal(caller)
    if refusal.unless(isinstance(out, torch.Tensor), f"out must be a tensor, got {type(out).__name__}"):
        refusal.unless(out.shape == shape, f"out must have shape {shape}, got {tuple(out.shape)}")
        refusal.unless(out.dtype == q.dtype, f"out must have q's dtype {q.dtype}, got {out.dtype}")
        refusal.unless(out.device == q.device, f"out must be on q's device {q.device}, got {out.device}")
        pairs = zip(out.shape, out.stride(), strict=True)
        folded = [(n, s) for n, s in pairs if n > 1 and s == 0]
        refusal.unless(not folded, f"out must not be an expanded view, got strides {out.stride()}")
    refusal.raise_if_any()


def host_lengths(
    lengths: Lengths, batch: int, most: int | None, caller: str, name: str = "seqlens"
) -> list[int]:
    """Lengths as a list of ints: ``batch`` of them (a single number stands for all), each in [0, most]."""
    refusal = Refusal(caller)
    if isinstance(lengths, torch.Tensor):
        refusal.unless(lengths.dtype in _INTEGER_DTYPES, f"{name} must be an integer tensor, got {lengths.dtype}")
        refusal.unless(lengths.dim() <= 1, f"{name} must have shape ({batch},), got {tuple(lengths.shape)}")
        refusal.raise_if_any()
        numbers: list[Any] = lengths.tolist() if lengths.dim() else [lengths.item()] * batch
    else:
        numbers = list(lengths) if isinstance(lengths, Iterable) else [lengths] * batch
    refusal.unless(
        len(numbers) == batch, f"{name} must hold {batch} numbers, one a sequence, got {len(numbers)}"
    )
    bad = [(b, n) for b, n in enumerate(numbers) if not _in_range(n, most)]
    if bad:
        shown = ", ".join(f"{name}[{b}] = {n!r}" for b, n in bad[:8]) + (", ..." if len(bad) > 8 else "")
        limit = ">= 0" if most is None else f"in [0, {most}]"
        refusal.unless(False, f"{name} must be whole numbers {limit}, got {shown}")
    refusal.raise_if_any()
    return numbers


def _in_range(n: object, most: int | None) -> bool:
    if type(n) is not int and not (isinstance(n, (int, np.integer)) and not isinstance(n, bool)):
        return False
    return n >= 0 and (most is None or n <= most)


def _is_zero(kv_start: Lengths) -> bool:
    return isinstance(kv_start, int) and kv_start == 0 and not isinstance(kv_start, bool)


def _shapes(q: Any, k: Any, v: Any) -> str:
    def show(x: Any) -> str:
        return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__

    return f"q {show(q)}, k {show(k)}, v {show(v)}"


def _is_foreign(*tensors: object) -> bool:
    return all(isinstance(t, torch.Tensor) for t in tensors) and any(t.device.type != "cpu" for t in tensors)  # type: ignore[attr-defined]


def _check_tensors(refusal: Refusal, q: object, k: object, v: object) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if refusal.unless(isinstance(t, torch.Tensor), f"{name} must be a torch.Tensor, got {type(t).__name__}"):
            assert isinstance(t, torch.Tensor)
            refusal.unless(t.device.type == "cpu", f"{name} is on {t.device}: only the CPU has a backend")
            refusal.unless(t.layout == torch.strided, f"{name} must be a strided tensor, got {t.layout}")
            refusal.unless(t.dim() == 4, f"{name} must have 4 dimensions (batch, heads, sequence, head_dim), got {t.dim()}")


def _check_shapes(refusal: Refusal, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: Any) -> None:
    if refusal.unless(q.dtype in FLOAT_DTYPES, f"q must be float16, bfloat16, float32 or float64, got {q.dtype}"):
        refusal.unless(k.dtype == q.dtype, f"k must have q's dtype {q.dtype}, got {k.dtype}")
        refusal.unless(v.dtype == q.dtype, f"v must have q's dtype {q.dtype}, got {v.dtype}")
    refusal.unless(k.shape[:3] == v.shape[:3], f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    refusal.unless(q.shape[3] == k.shape[3], f"q and k must have one head_dim, got {q.shape[3]} and {k.shape[3]}")
    refusal.unless(q.shape[3] >= 1 and v.shape[3] >= 1, f"head_dim must be >= 1, got {q.shape[3]} and {v.shape[3]}")
    heads = k.shape[1] >= 1 and q.shape[1] >= 1 and q.shape[1] % k.shape[1] == 0
    refusal.unless(heads, f"q's heads must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}")
    if page_table is not None:
        if refusal.unless(isinstance(page_table, torch.Tensor), f"page_table must be a tensor, got {type(page_table).__name__}"):
            refusal.unless(page_table.dtype == torch.int32, f"page_table must be int32, got {page_table.dtype}")
            refusal.unless(page_table.dim() == 2, f"page_table must have shape (batch, max_pages), got {tuple(page_table.shape)}")
            refusal.unless(page_table.device == q.device, f"page_table must be on q's device, got {page_table.device}")
        refusal.unless(k.shape[2] >= 1, f"pages must hold 1 token or more, got k of shape {tuple(k.shape)}")


def _check_numbers(
    refusal: Refusal, scale: Any, causal: Any, window: Any, softcap: Any, kv_block: Any, kv_stride: Any, q_start: Any
) -> None:
    refusal.unless(isinstance(causal, bool), f"causal must be True or False, got {causal!r}")
    refusal.unless(scale is None or _is_finite(scale), f"scale must be a finite number, got {scale!r}")
    refusal.unless(
        softcap is None or (_is_finite(softcap) and softcap > 0), f"softcap must be a positive number or None, got {softcap!r}"
    )
    refusal.unless(window is None or _at_least_one(window), f"window must be an int >= 1 or None, got {window!r}")
    refusal.unless(
        (kv_block is None) == (kv_stride is None), f"kv_block and kv_stride go together, got {kv_block!r} and {kv_stride!r}"
    )
    if kv_block is not None and kv_stride is not None:
        if refusal.unless(
            _at_least_one(kv_block) and _at_least_one(kv_stride),
            f"kv_block and kv_stride must be ints >= 1, got {kv_block!r} and {kv_stride!r}",
        ):
            refusal.unless(kv_stride >= kv_block, f"kv_stride must be at least kv_block, got {kv_stride} and {kv_block}")
        refusal.unless(q_start is not None, "q_start must be given with kv_block")


def _is_finite(x: object) -> bool:
    return isinstance(x, (int, float, np.number)) and not isinstance(x, bool) and math.isfinite(x)


def _at_least_one(x: object) -> bool:
    return _in_range(x, None) and x != 0


def _check_ragged(
    refusal: Refusal, q: torch.Tensor, cu_q_lens: Any, max_q_len: Any
) -> tuple[list[int] | None, list[int] | None]:
    refusal.unless(
        (cu_q_lens is None) == (max_q_len is None), f"cu_q_lens and max_q_len go together, got max_q_len={max_q_len!r}"
    )
    if cu_q_lens is None or not isinstance(cu_q_lens, torch.Tensor):
        refusal.unless(cu_q_lens is None, f"cu_q_lens must be an int32 tensor, got {type(cu_q_lens).__name__}")
        return None, None
    refusal.unless(max_q_len is None or _in_range(max_q_len, None), f"max_q_len must be an int >= 0, got {max_q_len!r}")
    refusal.unless(cu_q_lens.dtype == torch.int32, f"cu_q_lens must be int32, got {cu_q_lens.dtype}")
    refusal.unless(cu_q_lens.device == q.device, f"cu_q_lens must be on q's device, got {cu_q_lens.device}")
    refusal.unless(q.shape[0] == 1, f"with cu_q_lens, q is packed (1, heads, tokens, head_dim); got batch {q.shape[0]}")
    if not refusal.unless(
        cu_q_lens.dim() == 1 and len(cu_q_lens) >= 1, f"cu_q_lens must have shape (batch + 1,), got {tuple(cu_q_lens.shape)}"
    ):
        return None, None
    offsets = cu_q_lens.tolist()
    lens = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    refusal.unless(
        offsets[0] == 0 and offsets[-1] == q.shape[2],
        f"cu_q_lens must run from 0 to q's {q.shape[2]} tokens, got {offsets[0]} to {offsets[-1]}",
    )
    refusal.unless(min(lens, default=0) >= 0, f"cu_q_lens must not decrease, got {offsets}")
    if isinstance(max_q_len, int):
        refusal.unless(max(lens, default=0) <= max_q_len, f"max_q_len is {max_q_len}, but a sequence has {max(lens, default=0)} queries")
    return offsets, lens


def _check_mask(refusal: Refusal, mask: Any, batch: int, q_heads: int, q_len: int, capacity: int) -> bool:
    """Returns whether the mask is a draft tree (over the last q_len keys) rather than dense."""
    if mask is None:
        return False
    if not refusal.unless(isinstance(mask, torch.Tensor), f"mask must be a tensor, got {type(mask).__name__}"):
        return False
    refusal.unless(mask.dtype == torch.bool, f"mask must be bool (True = visible), got {mask.dtype}")
    refusal.unless(mask.device.type == "cpu", f"mask must be on q's device, got {mask.device}")
    shape = tuple(mask.shape)
    if len(shape) == 3:
        fits = shape[0] in (1, batch) and shape[1:] == (q_len, q_len)
    else:
        fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, q_heads) and shape[2:] == (q_len, capacity)
    refusal.unless(
        fits,
        f"mask must have shape ({batch} or 1, {q_heads} or 1, {q_len}, {capacity}) or, for a draft tree, "
        f"({batch} or 1, {q_len}, {q_len}); got {shape}",
    )
    return len(shape) == 3


def _check_per_head(refusal: Refusal, name: str, value: Any, shapes: list[tuple[int, ...]], q: torch.Tensor) -> None:
    if value is None:
        return
    if refusal.unless(isinstance(value, torch.Tensor), f"{name} must be a tensor, got {type(value).__name__}"):
        wanted = " or ".join(map(str, shapes))
        refusal.unless(tuple(value.shape) in shapes, f"{name} must have shape {wanted}, got {tuple(value.shape)}")
        refusal.unless(value.is_floating_point(), f"{name} must be floating point, got {value.dtype}")
        refusal.unless(value.device == q.device, f"{name} must be on q's device, got {value.device}")


def _check_seqlens(
    refusal: Refusal, caller: str, seqlens: Lengths | None, plan: SplitPlan | None, batch: int, capacity: int, paged: bool
) -> list[int]:
    if plan is not None and plan.problem.batch == batch:
        planned: list[int] = plan.seqlens.tolist()
        if seqlens is not None and seqlens is not plan.seqlens:
            given = host_lengths(seqlens, batch, capacity, caller)
            refusal.unless(given == planned, f"seqlens differ from the plan's: {given} and {planned}; call plan.update(seqlens)")
            refusal.raise_if_any()
        return host_lengths(planned, batch, capacity, caller, "plan.seqlens")
    if seqlens is not None:
        return host_lengths(seqlens, batch, capacity, caller)
    refusal.unless(not paged, "seqlens must be given with page_table")
    refusal.raise_if_any()
    return [capacity] * batch


def _check_plan(  # noqa: PLR0913
    refusal: Refusal, plan: SplitPlan, batch: int, q_heads: int, kv_heads: int, head_dim: int, head_dim_v: int,
    q: torch.Tensor, q_len: int, window: int | None, positioned: bool,
) -> None:  # fmt: skip
    """A call that does not fit its plan is refused. With positions, the plan must not have cut a window off."""
    p = plan.problem
    call = {
        "batch": (p.batch, batch), "q_heads": (p.q_heads, q_heads), "kv_heads": (p.kv_heads, kv_heads),
        "head_dim": (p.head_dim, head_dim), "head_dim_v": (p.head_dim_v, head_dim_v), "dtype": (p.dtype, q.dtype),
        "q_len": (p.q_len, q_len), "window": (p.window, None if positioned else window),
    }  # fmt: skip
    for name, (planned, given) in call.items():
        refusal.unless(planned == given, f"the plan was made for {name}={planned}, the call has {given}")
