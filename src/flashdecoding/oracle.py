"""Direct attention in float64 with every argument of `decode_attention`: the oracle of the kernels' tests.

Nothing here is tiled or merged. Per sequence, all keys within its length are gathered, whole rows of scores are formed,
and one softmax and one product with V follow (algorithm, 2.1, 2.3.1 and o_direct of 2.6), so that an error in the
tiled code cannot hide behind the same error here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["reference_attention", "reference_bounds"]

Lengths = int | Sequence[int] | Tensor


class _HasSeqlens(Protocol):
    @property
    def seqlens(self) -> Tensor: ...


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqlens: Lengths | None = None,
    page_table: Tensor | None = None,
    kv_begin: Lengths | None = None,
    cu_q_lens: Sequence[int] | Tensor | None = None,
    max_q_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_zero: Any = None,
    v_zero: Any = None,
    plan: _HasSeqlens | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    q_start: Lengths | None = None,
    kv_start: Lengths = 0,
    kv_block: int | None = None,
    kv_stride: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by its definition (algorithm, 2.1), in float64 on q's device, one whole softmax per row.

    Shapes and meanings are those of `decode_attention`; `q_start`, `kv_start`, `kv_block`, `kv_stride` are those of
    `partial_attention`: local key j stands at position kv_start + (j // kv_block) * kv_stride + j % kv_block (without
    kv_block: kv_start + j), query i at q_start + i, and q_start defaults to kv_start + seqlens - q_len. `q` is
    (B, Hq, Sq, D), or packed (1, Hq, T, D) with `cu_q_lens`; `k` is (B, Hkv, S, D), or (pages, Hkv, page_size, D) with
    `page_table`; `v` is like `k` with its own last dimension Dv. `plan` gives the lengths when `seqlens` is None, and
    nothing else.

    Returns the output (B, Hq, Sq, Dv), float64 whatever q's dtype; with `return_lse` also the log of the sum of
    exp(score) over the visible keys (B, Hq, Sq), natural, sinks not counted, -inf where there are none. Packed queries
    give (1, Hq, T, Dv) and (1, Hq, T). `out`, if given, is overwritten with the output in its own dtype and returned.

    Values that are not finite: a key never matters to a row that does not see it. A visible score of -inf weighs 0; a
    visible score of NaN or +inf makes the row and its lse NaN. A visible V that is not finite makes that component of
    the row NaN, whatever the key's weight.

    Raises `ValueError` for shapes, lengths and visible page ids that do not fit, `NotImplementedError` for quantised
    caches.

    >>> q, k = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 2, 2)
    >>> reference_attention(q, k, torch.tensor([[[[1.0], [3.0]]]])).item()
    2.0
    """
    problem = _Problem(
        q, k, v, seqlens, page_table, kv_begin, cu_q_lens, max_q_len, scale, causal, window, softcap, sinks,
        alibi_slopes, mask, k_scale, v_scale, k_zero, v_zero, plan, q_start, kv_start, kv_block, kv_stride,
    )  # fmt: skip
    result = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float64)
    for rows in problem.sequences():
        weights, rows_lse = rows.softmax()
        rows.place(rows.weigh(weights, rows.v), result)
        rows.place(rows_lse, lse)
    if out is not None:
        if out.shape != result.shape:
            raise ValueError(f"out must be {tuple(result.shape)}, got {tuple(out.shape)}")
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def reference_bounds(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What the contract's error bound is made of, both float64: `(weight_abs_v, score_bound)`.

    `weight_abs_v` has the shape of the output and is P|V|, with P the exact weights (sinks in their denominator).
    `score_bound` has the shape of the lse and is A = |scale| * max over visible j of sum_d |q_d k_jd|, over the sums
    that are finite; 0 where there are none. P|V| may be NaN or infinite where a visible value is. `kwargs` are those of
    `reference_attention`; `out` is not written, and `return_lse` does not matter.
    """
    problem = _Problem(q, k, v, **{name: kwargs[name] for name in kwargs.keys() - {"out", "return_lse"}})
    weight_abs_v = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64)
    score_bound = q.new_zeros(q.shape[:-1], dtype=torch.float64)
    for rows in problem.sequences():
        rows.place(rows.weigh(rows.softmax()[0], rows.v.abs()), weight_abs_v)
        rows.place(rows.score_bound(), score_bound)
    return weight_abs_v, score_bound


@dataclass
class _Problem:
    """One call, its lengths resolved to host integers, one per sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    seqlens: Lengths | None = None
    page_table: Tensor | None = None
    kv_begin: Lengths | None = None
    cu_q_lens: Sequence[int] | Tensor | None = None
    max_q_len: int | None = None
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None
    k_scale: Any = None
    v_scale: Any = None
    k_zero: Any = None
    v_zero: Any = None
    plan: _HasSeqlens | None = None
    q_start: Lengths | None = None
    kv_start: Lengths = 0
    kv_block: int | None = None
    kv_stride: int | None = None

    def __post_init__(self) -> None:
        quantised = [n for n in ("k_scale", "v_scale", "k_zero", "v_zero") if getattr(self, n) is not None]
        if quantised:
            raise NotImplementedError(f"reference_attention does not take quantised caches, got {', '.join(quantised)}")
        self._require(self.q.ndim == self.k.ndim == self.v.ndim == 4, "q, k and v must have 4 dimensions")
        cu_q_lens = [] if self.cu_q_lens is None else _host_ints("cu_q_lens", self.cu_q_lens)
        self.ragged = self.cu_q_lens is not None
        self.bounds = [*pairwise(cu_q_lens)] if self.ragged else [(0, self.q.shape[2])] * self.q.shape[0]
        self.batch = len(self.bounds)
        self.q_lens = [end - begin for begin, end in self.bounds]
        if self.ragged:
            limit = -1 if self.max_q_len is None else self.max_q_len
            fits = self.q.shape[0] == 1 and cu_q_lens[:1] == [0] and cu_q_lens[-1] <= self.q.shape[2]
            fits = fits and min(self.q_lens, default=0) >= 0 and max(self.q_lens, default=0) <= limit
            self._require(fits, f"cu_q_lens {cu_q_lens} and max_q_len {self.max_q_len} must fit a packed q")
        self.capacity = self.k.shape[2] * (1 if self.page_table is None else self.page_table.shape[-1])
        self._check_shapes()
        self._resolve_lengths()

    def _check_shapes(self) -> None:
        q, k, v, heads = self.q, self.k, self.v, self.q.shape[1]
        floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        self._require({q.dtype, k.dtype, v.dtype} <= floats, "q, k and v must be fp16, bf16, fp32 or fp64")
        self._require(k.shape[:3] == v.shape[:3], "k and v must agree in all but their last dimension")
        self._require(q.shape[3] == k.shape[3], "q and k must have one head_dim")
        self._require(k.shape[1] > 0 and heads % k.shape[1] == 0, "q_heads must be a multiple of kv_heads")
        if self.page_table is None:
            self._require(k.shape[0] == self.batch, f"k must hold {self.batch} sequences")
        else:
            self._require_shape("page_table", self.page_table, {(self.batch, self.page_table.shape[-1])})
        self._require(self.window is None or self.window >= 1, f"window must be >= 1, got {self.window}")
        self._require(self.softcap is None or self.softcap > 0, f"softcap must be > 0, got {self.softcap}")
        self._require_shape("sinks", self.sinks, {(heads,)})
        self._require_shape("alibi_slopes", self.alibi_slopes, {(heads,), (self.batch, heads)})
        n = self.max_q_len if self.ragged and self.max_q_len is not None else q.shape[2]
        dense = {(b, h, n, self.capacity) for b in (1, self.batch) for h in (1, heads)}
        self._require_shape("mask", self.mask, dense | {(b, n, n) for b in (1, self.batch)})
        self._require(self.mask is None or self.mask.dtype == torch.bool, "mask must be bool")

    def _resolve_lengths(self) -> None:
        seqlens = self.plan.seqlens if self.seqlens is None and self.plan is not None else self.seqlens
        self._require(seqlens is not None or self.page_table is None, "seqlens is required with page_table")
        self.kv_lens = _per_sequence("seqlens", self.capacity if seqlens is None else seqlens, self.batch)
        self.kv_begins = _per_sequence("kv_begin", 0 if self.kv_begin is None else self.kv_begin, self.batch)
        self.kv_starts = _per_sequence("kv_start", self.kv_start, self.batch)
        fits = all(0 <= n <= self.capacity for n in self.kv_lens) and min(self.kv_begins, default=0) >= 0
        self._require(fits, f"seqlens {self.kv_lens} and kv_begin {self.kv_begins} must fit 0..{self.capacity}")
        whole = self.kv_block is None and self.kv_stride is None
        fits = whole or (self.kv_block is not None and self.kv_block >= 1 and self.kv_stride is not None)
        self._require(fits, f"kv_block {self.kv_block} and kv_stride {self.kv_stride} go together, kv_block >= 1")
        self._require(whole or self.q_start is not None, "q_start is required with kv_block")
        starts = zip(self.kv_starts, self.kv_lens, self.q_lens, strict=True)
        default = [kv_start + kv_len - q_len for kv_start, kv_len, q_len in starts]
        self.q_starts = default if self.q_start is None else _per_sequence("q_start", self.q_start, self.batch)

    def _require(self, condition: bool, reason: str) -> None:
        if not condition:
            tensors = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in vars(self).items() if name in "qkv")
            raise ValueError(f"reference_attention: {reason}; {tensors}")

    def _require_shape(self, name: str, tensor: Tensor | None, allowed: set[tuple[int, ...]]) -> None:
        if tensor is not None:
            shape = tuple(tensor.shape)
            self._require(shape in allowed, f"{name} must be one of {sorted(allowed)}, got {shape}")

    def sequences(self) -> Iterator[_Rows]:
        """Every sequence that has queries, one at a time."""
        for b in range(self.batch):
            if self.q_lens[b]:
                yield self._rows(b)

    def _rows(self, b: int) -> _Rows:
        device = self.q.device
        local = torch.arange(self.kv_lens[b], device=device)  # (L,) cache index of each key within the length
        offset = local
        if self.kv_block is not None and self.kv_stride is not None:
            offset = local // self.kv_block * self.kv_stride + local % self.kv_block
        key_position = self.kv_starts[b] + offset
        query_position = self.q_starts[b] + torch.arange(self.q_lens[b], device=device)  # (Sq,)
        distance = query_position[:, None] - key_position  # (Sq, L), negative for keys after the query

        visible = (local >= self.kv_begins[b]).expand_as(distance)
        if self.causal:
            visible = visible & (distance >= 0)
        if self.window is not None:
            visible = visible & (distance < self.window)
        visible = visible[None]  # (1 or Hq, Sq, L) from here on
        if self.mask is not None:
            visible = visible & self._mask(b, key_position)
        bias = None
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes if self.alibi_slopes.ndim == 1 else self.alibi_slopes[b]
            bias = -slopes.to(device, torch.float64)[:, None, None] * distance.abs()

        seen = visible.any(0).any(0)  # (L,) a key that no row sees is selected out, whatever it holds
        k, v = self._gather(b, seen)
        index = (0 if self.ragged else b, slice(None), slice(*self.bounds[b]))
        scale = 1 / math.sqrt(self.q.shape[3]) if self.scale is None else self.scale
        q = self.q[index].double()
        k, v = (torch.where(seen[:, None], t.double(), 0.0) for t in (k, v))
        return _Rows(index, q, k, v, visible, scale, self.softcap, bias, self.sinks)

    def _mask(self, b: int, key_position: Tensor) -> Tensor:
        """What `mask` lets sequence b see: (1 or Hq, Sq, L)."""
        assert self.mask is not None
        mask = self.mask[b if self.mask.shape[0] > 1 else 0].to(key_position.device)
        q_len = self.q_lens[b]
        if mask.ndim == 3:
            return mask[:, :q_len, : self.kv_lens[b]]
        column = key_position - self.q_starts[b]  # draft tree: column c is the key at position q_start + c
        outside = (column < 0) | (column >= q_len)
        return (mask[:q_len, column.clamp(0, q_len - 1)] | outside)[None]

    def _gather(self, b: int, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (Hkv, L, D) and values (Hkv, L, Dv) within the length of sequence b; unseen ones may be anything."""
        kv_len = self.kv_lens[b]
        if self.page_table is None:
            return self.k[b, :, :kv_len], self.v[b, :, :kv_len]
        pages, _, page_size, _ = self.k.shape
        local = torch.arange(kv_len, device=seen.device)
        page = self.page_table[b].to(seen.device, torch.int64)[local // max(page_size, 1)]  # (L,)
        bad = seen & ((page < 0) | (page >= pages))
        if bad.any():
            ids = sorted({int(p) for p in page[bad].tolist()})
            raise ValueError(f"reference_attention: page_table[{b}] names pages {ids} outside [0, {pages})")
        index, slot = page[seen], local[seen] % max(page_size, 1)
        k, v = (t.new_zeros(t.shape[1], kv_len, t.shape[3]) for t in (self.k, self.v))
        k[:, seen], v[:, seen] = (t[index, :, slot].transpose(0, 1) for t in (self.k, self.v))
        return k, v


@dataclass(frozen=True)
class _Rows:
    """The queries of one sequence and the keys within its length, float64; keys that no row sees are zero."""

    index: tuple[int, slice, slice]  # of these rows in q and in the output
    q: Tensor  # (Hq, Sq, D)
    k: Tensor  # (Hkv, L, D)
    v: Tensor  # (Hkv, L, Dv)
    visible: Tensor  # (1 or Hq, Sq, L)
    scale: float
    softcap: float | None
    bias: Tensor | None  # (Hq, Sq, L)
    sinks: Tensor | None  # (Hq,)

    def place(self, rows: Tensor, whole: Tensor) -> None:
        """Write these rows where they belong in an output or lse of the whole call."""
        whole[self.index] = rows

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Weights (Hq, Sq, L), sinks in their denominator, and the lse (Hq, Sq) without sinks (algorithm, 2.3.1)."""
        scores = self.scale * _per_group(self.q, self.k.transpose(1, 2))
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias
        scores = torch.where(self.visible, scores, -torch.inf)
        m = _max(scores, -torch.inf)
        exps = torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))
        l = exps.sum(-1, keepdim=True)
        lse = (m + l.log()).squeeze(-1)
        denominator = l if self.sinks is None else l + torch.exp(self.sinks.to(m)[:, None, None] - m)
        return torch.where(l == 0, 0.0, exps / denominator), lse  # an empty row stays empty, whatever its sink

    def weigh(self, weights: Tensor, v: Tensor) -> Tensor:
        """Weights (Hq, Sq, L) times v (Hkv, L, Dv), NaN wherever a visible v is not finite: (Hq, Sq, Dv)."""
        finite = v.isfinite()
        if finite.all():
            return _per_group(weights, v)
        reached = _per_group(self.visible.expand_as(weights).double(), (~finite).double()) > 0
        return torch.where(reached, torch.nan, _per_group(weights, torch.where(finite, v, 0.0)))

    def score_bound(self) -> Tensor:
        """|scale| * max over visible j of sum_d |q_d k_jd|, (Hq, Sq), over finite sums; 0 where there are none."""
        products = abs(self.scale) * _per_group(self.q.abs(), self.k.abs().transpose(1, 2))
        return _max(torch.where(self.visible & products.isfinite(), products, 0.0), 0.0).squeeze(-1)


def _per_group(rows: Tensor, per_kv_head: Tensor) -> Tensor:
    """(Hq, Sq, n) times (Hkv, n, p), each group of query heads with its own key head: (Hq, Sq, p)."""
    heads, q_len, n = rows.shape
    kv_heads, _, p = per_kv_head.shape
    grouped = rows.reshape(kv_heads, heads // kv_heads * q_len, n)
    return (grouped @ per_kv_head).view(heads, q_len, p)


def _max(scores: Tensor, floor: float) -> Tensor:
    """Maximum over the last dimension, which stays as 1; `floor` where there is nothing; NaN wins."""
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:-1], 1), floor)
    return scores.amax(-1, keepdim=True)


def _host_ints(name: str, lengths: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(lengths, Tensor):
        return [int(n) for n in lengths]
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.ndim != 1:
        raise ValueError(f"{name} must be (n,) int32 or int64, got {tuple(lengths.shape)} {lengths.dtype}")
    return [int(n) for n in lengths.tolist()]


def _per_sequence(name: str, lengths: Lengths, batch: int) -> list[int]:
    values = [lengths] * batch if isinstance(lengths, int) else _host_ints(name, lengths)
    if len(values) != batch:
        raise ValueError(f"{name} must have one entry per sequence, {batch} in all, got {values}")
    return values
