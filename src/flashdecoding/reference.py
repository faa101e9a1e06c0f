"""The derivation of `docs/algorithm.md` in float64, one function per formula, and the oracle that grows from it.

Read it from top to bottom: a softmax that cannot overflow (2.3.1); the same softmax one element at a time (2.3.2); one
tile of keys, directly and incrementally (2.4.1); the merge of tiles (2.4.2); both stages together (2.5); and the
attention that they must equal (2.6). `docs/algorithm.md` tells the same story with the formulas.

Everything is written to be compared with paper, not to be fast. `q` is (B, H, q_len, D), `k` (B, H, N, D), `v`
(B, H, N, Dv), scores (B, H, q_len, N), any float dtype, computed in float64. Nothing is changed in place. Of a tile's
three results m and l are (B, H, q_len, 1) and o is (B, H, q_len, Dv), already divided by l: an `AttentionState`.
The merge itself lives in `flashdecoding.state` and is used from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from flashdecoding.oracle import reference_attention, reference_bounds
from flashdecoding.state import AttentionState, merge_states

__all__ = [
    "attention_scores",
    "change_of_scale",
    "direct_attention",
    "flash_decode",
    "merge_pair",
    "merge_tiles",
    "online_softmax",
    "online_softmax_states",
    "reference_attention",
    "reference_bounds",
    "safe_softmax",
    "tile_by_subtiles",
    "tile_direct",
    "tile_incremental",
    "tile_incremental_states",
]


def safe_softmax(x: Tensor) -> Tensor:
    """exp(x_i - m) / sum_j exp(x_j - m) with m = max_j x_j, over the last dimension (algorithm, 2.3.1).

    No exponent is above 0, so nothing overflows. Where all of x is -inf, or x is empty, all weights are 0.
    """
    x = x.double()
    exps = torch.exp(x - _finite(_maximum(x)))
    return exps / _divisor(exps.sum(-1, keepdim=True))


def online_softmax_states(x: Tensor) -> tuple[Tensor, Tensor]:
    """All running maxima m_j and running sums d_j = sum_{i<=j} exp(x_i - m_j), each shaped like x (algorithm, 2.3.2).

    m_1 = x_1 and d_1 = 1, then for every further element

        m_j = max(m_{j-1}, x_j)
        d_j = d_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j)

    >>> m, d = online_softmax_states(torch.tensor([1.0, 2.0, 0.5]))
    >>> [round(value, 3) for value in d.tolist()]
    [1.0, 1.368, 1.591]
    """
    x = x.double()
    ms, ds = torch.empty_like(x), torch.empty_like(x)
    m, d = torch.full_like(x[..., :0].sum(-1), -torch.inf), torch.zeros_like(x[..., :0].sum(-1))
    for j in range(x.shape[-1]):
        m, previous = torch.maximum(m, x[..., j]), m
        d = d * torch.exp(previous - _finite(m)) + torch.exp(x[..., j] - _finite(m))
        ms[..., j], ds[..., j] = m, d
    return ms, ds


def online_softmax(x: Tensor) -> Tensor:
    """exp(x_i - m_N) / d_N over the last dimension, from the last state of the recurrence (algorithm, 2.3.2)."""
    x = x.double()
    if x.shape[-1] == 0:
        return x
    m, d = (states[..., -1:] for states in online_softmax_states(x))
    return torch.exp(x - _finite(m)) / _divisor(d)


def change_of_scale(local: Tensor, m_local: Tensor, m_global: Tensor) -> Tensor:
    """exp(s - m_global) from `local` = exp(s - m_local): times exp(m_local - m_global) (algorithm, 2.4.2, step 2)."""
    return local.double() * torch.exp(m_local.double() - m_global.double())


def attention_scores(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """q k^T / sqrt(D), (B, H, q_len, N); `scale` replaces 1 / sqrt(D) (algorithm, 2.2 and 2.5 (2b))."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return q.double() @ k.double().transpose(-1, -2) * scale


def tile_direct(s: Tensor, v: Tensor) -> AttentionState:
    """One tile with all its scores at hand: m = max_j s_j, l = sum_j exp(s_j - m), o = sum_j exp(s_j - m) V_j / l.

    Seed, 2.4.1, the direct way. `s` is (B, H, q_len, n), `v` (B, H, n, Dv); n may be 0, the empty state.
    """
    s, v = s.double(), v.double()
    m = _maximum(s)
    exps = torch.exp(s - _finite(m))
    l = exps.sum(-1, keepdim=True)
    return AttentionState(m, l, exps @ v / _divisor(l))


def tile_incremental_states(s: Tensor, v: Tensor) -> list[AttentionState]:
    """The states (m_j, l_j, o_j) after each of the n keys of a tile, o_j normalised at every step (algorithm, 2.4.1).

    m_1 = s_1, l_1 = 1, o_1 = V_1, then for every further key

        m_j = max(m_{j-1}, s_j)
        l_j = l_{j-1} exp(m_{j-1} - m_j) + exp(s_j - m_j)
        o_j = (l_{j-1} exp(m_{j-1} - m_j) o_{j-1} + exp(s_j - m_j) V_j) / l_j

    This is the recurrence as it is printed there. It equals merging with the state (s_j, 1, V_j) of a single key. `s`
    is (B, H, q_len, n), `v` (B, H, n, Dv); the list has n states.
    """
    s, v = s.double(), v.double()
    state = _no_keys(s, v)
    states = []
    for j in range(s.shape[-1]):
        s_j, v_j = s[..., j : j + 1], v[..., j : j + 1, :]  # (B, H, q_len, 1), (B, H, 1, Dv)
        m = torch.maximum(state.m, s_j)
        history = state.l * torch.exp(state.m - _finite(m))
        new = torch.exp(s_j - _finite(m))
        l = history + new
        state = AttentionState(m, l, (history * state.o + new * v_j) / _divisor(l))
        states.append(state)
    return states


def tile_incremental(s: Tensor, v: Tensor) -> AttentionState:
    """One tile, key by key: the last of `tile_incremental_states`, or empty for no keys (2.4.1, 2.5 (2c))."""
    return (tile_incremental_states(s, v) or [_no_keys(s, v)])[-1]


def tile_by_subtiles(s: Tensor, v: Tensor, sub_tile: int) -> AttentionState:
    """One tile, `sub_tile` keys at a time, as kernels load it: each sub-tile directly, then merged (algorithm, 2.4.1).

    `s` is (B, H, q_len, n), `v` (B, H, n, Dv). The last sub-tile may be shorter. `ValueError` if `sub_tile` < 1.
    """
    state = _no_keys(s, v)
    for begin, end in _cuts(s.shape[-1], sub_tile):
        state = merge_pair(state, tile_direct(s[..., begin:end], v[..., begin:end, :]))
    return state


def merge_pair(a: AttentionState, b: AttentionState) -> AttentionState:
    """(m, l, o) over the keys of two disjoint tiles: 2.4.2 for two tiles, and one step of any tree of merges."""
    return a.merge(b)


def merge_tiles(tiles: Iterable[AttentionState]) -> AttentionState:
    """(m_global, l_global, o_final) from the states of all tiles at once (algorithm, 2.4.2; 2.5, (3a) to (3c)).

        m_global = max_b m_b
        l_global = sum_b exp(m_b - m_global) l_b
        o_final = sum_b exp(m_b - m_global) l_b o_b / l_global

    That is `flashdecoding.state.merge_states`. `ValueError` if there are no tiles.
    """
    return merge_states(tiles)


def flash_decode(
    q: Tensor, k: Tensor, v: Tensor, tile_size: int, *, sub_tile: int | None = None, scale: float | None = None
) -> AttentionState:
    """The whole two-stage algorithm: ceil(N / tile_size) tiles, the last one as short as need be (algorithm, 2.5).

    Stage 1 takes each tile's keys and values (2a), its scores (2b) and its state (2c): key by key as in the
    derivation, or `sub_tile` keys at a time. Stage 2 merges the tiles (3a to 3c). Returns (m_global, l_global,
    o_final), for N = 0 the empty state. `ValueError` for tiles of less than one key.

    >>> q, k = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 3, 2)
    >>> flash_decode(q, k, torch.tensor([[[[1.0], [2.0], [6.0]]]]), tile_size=2).o.item()
    3.0
    """
    tiles = [_no_keys(q, v)]
    for begin, end in _cuts(k.shape[-2], tile_size):
        k_tile, v_tile = k[..., begin:end, :], v[..., begin:end, :]  # (2a)
        s = attention_scores(q, k_tile, scale=scale)  # (2b)
        tiles.append(tile_incremental(s, v_tile) if sub_tile is None else tile_by_subtiles(s, v_tile, sub_tile))  # (2c)
    return merge_tiles(tiles)


def direct_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) V over all keys at once, (B, H, q_len, Dv) (algorithm, 2.1, and o_direct of 2.6)."""
    return safe_softmax(attention_scores(q, k, scale=scale)) @ v.double()


def _no_keys(rows: Tensor, v: Tensor) -> AttentionState:
    """The empty state for rows (B, H, q_len, any) and values (B, H, any, Dv)."""
    batch, heads, q_len, _ = rows.shape
    return AttentionState.empty(batch, heads, q_len, v.shape[-1], dtype=torch.float64, device=v.device)


def _cuts(length: int, size: int) -> list[tuple[int, int]]:
    """[begin, end) of the ceil(length / size) pieces of `size` elements, the last one shorter if need be."""
    if size < 1:
        raise ValueError(f"a tile needs at least one key, got a tile size of {size}")
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _maximum(x: Tensor) -> Tensor:
    """Maximum over the last dimension, kept as 1; -inf over no elements."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -torch.inf)


def _finite(m: Tensor) -> Tensor:
    """m, with 0 in place of the -inf of an empty row: exp(-inf - 0) is the 0 that exp(-inf - -inf) should be."""
    return torch.where(m == -torch.inf, 0.0, m)


def _divisor(l: Tensor) -> Tensor:
    """l, with 1 in place of the 0 of an empty row."""
    return torch.where(l == 0, 1.0, l)
