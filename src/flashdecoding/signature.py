"""What a call is before any value is looked at, shapes, strides, dtypes and options, and the checks of that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashdecoding.refusal import Refusal, in_range, is_finite, is_positive

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


class Facts(NamedTuple):
    """What a signature keeps of a tensor; ``shape`` is None where the user gave something else."""

    shape: Any
    stride: Any
    dtype: Any
    device: Any
    kind: str = "Tensor"

    @classmethod
    def of(cls, value: Any) -> Facts:
        if not isinstance(value, torch.Tensor):
            return cls(None, None, None, None, type(value).__name__)
        if value.layout != torch.strided or value.is_nested:
            kind = "nested layout" if value.is_nested else f"layout {value.layout}"
            return cls(None, None, None, None, f"{type(value).__name__} of {kind}")
        if value.is_neg():  # a view that stands for its negative, such as complex.conj().imag
            return cls(None, None, None, None, f"{type(value).__name__} with its sign bit pending (see resolve_neg)")
        return cls(value.shape, value.stride(), value.dtype, value.device)

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
    sinks: Facts | None
    alibi_slopes: Facts | None
    mask: Facts | None
    max_q_len: int | None
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    kv_block: int | None
    kv_stride: int | None
    has_lengths: bool
    has_q_start: bool

    def __str__(self) -> str:
        return f"q {self.q}, k {self.k}, v {self.v}"


@dataclass(frozen=True, eq=False)
class Checked:
    """A signature found right, in the terms of the kernels. Compared by identity: `checks.py` remembers it."""

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


def check_signature(signature: Signature) -> Checked:
    """The checks that need no values. Raises ValueError, or NotImplementedError for what has no backend."""
    refusal, s = Refusal(signature.caller), signature
    _check_tensors(refusal, s)
    refusal.raise_if_any(str(s))
    device = s.q.device
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{s.caller}: no backend for {device.type!r} tensors; the CPU and CUDA GPUs have one")
    if device.type == "cuda" and s.q.dtype == torch.float64:
        raise NotImplementedError(f"{s.caller}: q is float64 on {device}; only the CPU computes in float64")
    quantised = [f"{name} is {t.dtype}" for name, t in (("k", s.k), ("v", s.v)) if t.dtype in QUANTISED_DTYPES]
    if quantised:
        raise NotImplementedError(f"{s.caller}: {', '.join(quantised)}: quantised caches have no backend yet")
    _check_shapes(refusal, s)
    _check_numbers(refusal, s)
    _check_tables(refusal, s)
    refusal.raise_if_any(str(s))

    batch = s.q.shape[0] if s.cu_q_lens is None else s.cu_q_lens.shape[0] - 1
    q_len = s.q.shape[2] if s.max_q_len is None else int(s.max_q_len)
    page_size = 0 if s.page_table is None else s.k.shape[2]
    capacity = s.k.shape[2] if s.page_table is None else s.page_table.shape[1] * page_size
    if s.page_table is None:
        refusal.unless(s.k.shape[0] == batch, f"k must have q's batch of {batch}, got {s.k.shape[0]}")
    else:
        rows = s.page_table.shape[0]
        refusal.unless(rows == batch, f"page_table must have a row for each of {batch} sequences, got {rows}")
        refusal.unless(s.has_lengths, "seqlens must be given with page_table")
    q_heads = s.q.shape[1]
    _check_mask(refusal, s.mask, device, batch, q_heads, q_len, capacity)
    _check_per_head(refusal, "sinks", s.sinks, device, [(q_heads,)])
    _check_per_head(refusal, "alibi_slopes", s.alibi_slopes, device, [(q_heads,), (batch, q_heads)])
    refusal.raise_if_any(str(s))
    return Checked(
        signature=s, batch=batch, q_heads=q_heads, kv_heads=s.k.shape[1], head_dim=s.q.shape[3],
        head_dim_v=s.v.shape[3], dtype=s.q.dtype, q_len=q_len, ragged=s.cu_q_lens is not None,
        capacity=capacity, page_size=page_size, pages=0 if s.page_table is None else s.k.shape[0],
        scale=1.0 / math.sqrt(s.q.shape[3]) if s.scale is None else float(s.scale), causal=s.causal,
        window=None if s.window is None else int(s.window),
        softcap=None if s.softcap is None else float(s.softcap),
        mask_is_tree=s.mask is not None and len(s.mask.shape) == 3,
        kv_block=None if s.kv_block is None else int(s.kv_block),
        kv_stride=None if s.kv_stride is None else int(s.kv_stride),
        problem=(batch, q_heads, s.k.shape[1], s.q.shape[3], s.v.shape[3], s.q.dtype, q_len, s.window),
    )  # fmt: skip


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
    for name, t in (("k", k), ("v", v)):
        refusal.unless(t.device == q.device, f"{name} must be on q's device {q.device}, got {t.device}")
    agree = k.shape[:3] == v.shape[:3]
    refusal.unless(agree, f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    refusal.unless(q.shape[3] == k.shape[3], f"q and k must have one head_dim, got {q.shape[3]} and {k.shape[3]}")
    refusal.unless(min(q.shape[3], v.shape[3]) >= 1, f"head_dim must be >= 1, got {q.shape[3]} and {v.shape[3]}")
    heads = k.shape[1] >= 1 and q.shape[1] >= 1 and q.shape[1] % k.shape[1] == 0
    refusal.unless(heads, f"q's heads must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}")


def _check_numbers(refusal: Refusal, s: Signature) -> None:
    refusal.unless(isinstance(s.causal, bool), f"causal must be True or False, got {s.causal!r}")
    if refusal.unless(s.scale is None or is_finite(s.scale), f"scale must be a finite number, got {s.scale!r}"):
        most = torch.finfo(torch.float64 if s.q.dtype == torch.float64 else torch.float32).max / 2
        fits = s.scale is None or abs(s.scale) <= most
        refusal.unless(fits, f"scale must be at most {most:.2g} in size for {s.q.dtype}, got {s.scale!r}")
    capped = s.softcap is None or (is_finite(s.softcap) and s.softcap > 0)
    refusal.unless(capped, f"softcap must be a positive number or None, got {s.softcap!r}")
    refusal.unless(s.window is None or is_positive(s.window), f"window must be an int >= 1 or None, got {s.window!r}")
    together = (s.kv_block is None) == (s.kv_stride is None)
    given = f"got {s.kv_block!r} and {s.kv_stride!r}"
    refusal.unless(together, f"kv_block and kv_stride go together, {given}")
    if s.kv_block is not None and s.kv_stride is not None:
        whole = is_positive(s.kv_block) and is_positive(s.kv_stride)
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
        refusal.unless(in_range(s.max_q_len, None), f"max_q_len must be an int >= 0, got {s.max_q_len!r}")
    if s.cu_q_lens is not None:
        refusal.unless(
            s.q.shape[0] == 1, f"with cu_q_lens, q is packed (1, heads, tokens, head_dim); got batch {s.q.shape[0]}"
        )
        if s.cu_q_lens.shape is not None:
            refusal.unless(0 not in s.cu_q_lens.shape, "cu_q_lens must hold at least the 0 that it begins with")


def _check_mask(
    refusal: Refusal, mask: Facts | None, device: Any, batch: int, q_heads: int, q_len: int, capacity: int
) -> None:
    if mask is None or not refusal.unless(mask.shape is not None, f"mask must be a bool tensor, got {mask.kind}"):
        return
    refusal.unless(mask.dtype == torch.bool, f"mask must be bool (True = visible), got {mask.dtype}")
    refusal.unless(mask.device == device, f"mask must be on q's device {device}, got {mask.device}")
    shape = tuple(mask.shape)
    heads = (1, q_heads)
    tree = len(shape) == 3 and shape[0] in (1, batch) and shape[1:] == (q_len, q_len)
    dense = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in heads and shape[2:] == (q_len, capacity)
    refusal.unless(
        tree or dense,
        f"mask must have shape ({batch} or 1, {q_heads} or 1, {q_len}, {capacity}) or, as a draft tree, "
        f"({batch} or 1, {q_len}, {q_len}); got {shape}",
    )


def _check_per_head(
    refusal: Refusal, name: str, facts: Facts | None, device: Any, shapes: list[tuple[int, ...]]
) -> None:
    if facts is None or not refusal.unless(facts.shape is not None, f"{name} must be a tensor, got {facts.kind}"):
        return
    wanted = " or ".join(map(str, shapes))
    refusal.unless(tuple(facts.shape) in shapes, f"{name} must have shape {wanted}, got {tuple(facts.shape)}")
    refusal.unless(facts.dtype in FLOAT_DTYPES, f"{name} must be a floating-point tensor, got {facts.dtype}")
    refusal.unless(facts.device == device, f"{name} must be on q's device {device}, got {facts.device}")
