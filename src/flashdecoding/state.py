"""Partial attention states and their exact merge: the algebra that everything else in the package rests on.

A state summarises the attention of a set of queries over *some* of their keys (algorithm, 2.4.0). With scores s_j of
the keys that a query sees,

    m = max_j s_j          l = sum_j exp(s_j - m)          o = sum_j exp(s_j - m) V_j / l

and the states of any partition of the keys merge to the state of all of them (algorithm, 2.4.2 and 2.6):

    m = max_b m_b          l = sum_b exp(m_b - m) l_b      o = sum_b exp(m_b - m) l_b o_b / l

The empty set of keys has the state m = -inf, l = 0, o = 0, the identity of the merge. `merge_states` is the only place
where PyTorch code states these three formulas; tiles, splits, prefixes, draft tokens and ranks are merged by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionState", "merge_states"]

_STATE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Attention over part of the keys: `m` and `l` (B, Hq, Sq, 1), `o` (B, Hq, Sq, Dv), all float32 or all float64.

    `m` is the largest scaled score seen, `l` the sum of exp(score - m), `o` the *normalised* output over the keys seen
    (algorithm, 2.4.0). An empty row holds m = -inf, l = 0, o = 0. Nothing in this class is changed in place.

    Raises `ValueError` for shapes, dtypes or devices that do not belong together; values are not inspected.

    >>> one = AttentionState.from_lse(torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]]))
    >>> two = AttentionState.from_lse(torch.tensor([[[[3.0]]]]), torch.tensor([[[0.0]]]))
    >>> one.merge(two).finalize().item()
    2.0
    """

    m: Tensor
    l: Tensor
    o: Tensor

    def __post_init__(self) -> None:
        reasons = []
        if self.o.ndim != 4:
            reasons.append(f"o must be (batch, q_heads, q_len, head_dim_v), got {tuple(self.o.shape)}")
        expected = (*self.o.shape[:-1], 1)
        for name, tensor in (("m", self.m), ("l", self.l)):
            if tuple(tensor.shape) != expected:
                reasons.append(f"{name} must be {expected} beside o {tuple(self.o.shape)}, got {tuple(tensor.shape)}")
        dtypes = (self.m.dtype, self.l.dtype, self.o.dtype)
        if self.o.dtype not in _STATE_DTYPES or len(set(dtypes)) > 1:
            reasons.append(f"m, l and o must be all float32 or all float64, got {dtypes}")
        if len({self.m.device, self.l.device, self.o.device}) > 1:
            reasons.append(f"m, l and o must be on one device, got {self.m.device}, {self.l.device}, {self.o.device}")
        if reasons:
            raise ValueError("not an attention state: " + "; ".join(reasons))

    @classmethod
    def empty(
        cls,
        batch: int,
        q_heads: int,
        q_len: int,
        head_dim_v: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> AttentionState:
        """The state of no keys at all, m = -inf, l = 0, o = 0: the identity of `merge`."""
        m = torch.full((batch, q_heads, q_len, 1), -torch.inf, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), m.new_zeros(batch, q_heads, q_len, head_dim_v))

    @classmethod
    def from_lse(cls, o: Tensor, lse: Tensor) -> AttentionState:
        """The state of another library's pair: `o` (B, Hq, Sq, Dv), `lse` (B, Hq, Sq), natural log, any float dtypes.

        A row with lse = -inf is empty, and whatever `o` holds there is replaced by 0. The state is float64 when either
        input is, otherwise float32. `o` must be normalised over the keys that `lse` counts.
        """
        if not (o.is_floating_point() and lse.is_floating_point()):
            raise ValueError(f"o and lse must be floating point, got {o.dtype} and {lse.dtype}")
        if tuple(lse.shape) != tuple(o.shape[:-1]):
            raise ValueError(f"lse must be (batch, q_heads, q_len) of o {tuple(o.shape)}, got {tuple(lse.shape)}")
        dtype = torch.float64 if torch.float64 in (o.dtype, lse.dtype) else torch.float32
        m = lse.to(dtype).unsqueeze(-1)  # (B, Hq, Sq, 1)
        empty = m == -torch.inf
        return cls(m, torch.where(empty, 0.0, torch.ones_like(m)), torch.where(empty, 0.0, o.to(dtype)))

    @property
    def lse(self) -> Tensor:
        """log sum_j exp(s_j), natural log, (B, Hq, Sq): m + log(l), and -inf for an empty row."""
        return (self.m + self.l.log()).squeeze(-1)

    def merge(self, other: AttentionState) -> AttentionState:
        """The state over both sets of keys, which must not overlap (algorithm, 2.4.2, for two tiles)."""
        return merge_states((self, other))

    def finalize(self, dtype: torch.dtype | None = None, sinks: Tensor | None = None) -> Tensor:
        """The attention output (B, Hq, Sq, Dv), in `dtype` (default: the state's).

        `sinks` (Hq,) are logits that join the denominator only, so each acts as one more key with value 0. They are
        added here and nowhere else: finalise once, after the last merge. -inf is no sink. An empty row stays 0 with any
        sinks.
        """
        out = self.o
        if sinks is not None:
            heads = self.o.shape[1]
            if tuple(sinks.shape) != (heads,):
                raise ValueError(f"sinks must be (q_heads,) = ({heads},), got {tuple(sinks.shape)}")
            m = sinks.to(self.m).view(1, heads, 1, 1).expand_as(self.m)
            sink = AttentionState(m, torch.ones_like(m), torch.zeros_like(self.o))
            merged = torch.where(m == torch.inf, 0 * self.o, self.merge(sink).o)  # an infinite sink takes all weight
            out = torch.where(self.l == 0, self.o, merged)
        return out if dtype is None else out.to(dtype)


def merge_states(states: Iterable[AttentionState]) -> AttentionState:
    """The state over all keys of `states`, whose key sets must not overlap (algorithm, 2.4.2; 2.5, (3a) to (3c)).

    All states share one shape, dtype and device; `ValueError` says which do not, or that there are none. Sums run in
    the order given, so equal inputs give equal bits; any other order or tree agrees to rounding. Merging with empty
    states changes no value.

    Two cases need care. Rows that are empty in every state have m = -inf, and -inf - (-inf) is NaN: there 0 stands in
    for the reference maximum and 1 for the denominator. And l_b o_b can pass the largest float where o does not: each
    weight is divided by l before it meets o. A row with a NaN or +inf score comes out NaN.
    """
    states = tuple(states)
    _refuse_unlike(states)
    m = states[0].m
    for state in states[1:]:
        m = torch.maximum(m, state.m)
    reference = torch.where(m == -torch.inf, 0.0, m)

    weights = [torch.exp(state.m - reference) * state.l for state in states]
    l = weights[0]
    for weight in weights[1:]:
        l = l + weight

    denominator = torch.where(l == 0, 1.0, l)
    o = (weights[0] / denominator) * states[0].o
    for weight, state in zip(weights[1:], states[1:], strict=True):
        o = o + (weight / denominator) * state.o
    return AttentionState(m, l, o)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and lse for queries of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _refuse_unlike(states: tuple[AttentionState, ...]) -> None:
    if not states:
        raise ValueError("merge_states needs at least one state; AttentionState.empty is the state of no keys")
    kinds = [(tuple(state.o.shape), state.o.dtype, state.o.device) for state in states]
    if len(set(kinds)) > 1:
        listed = "; ".join(f"state {i}: o {shape}, {dtype}, {device}" for i, (shape, dtype, device) in enumerate(kinds))
        raise ValueError(f"states to merge must share shape, dtype and device: {listed}")
