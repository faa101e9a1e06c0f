"""`flashdecoding explain`: the derivation on small numbers, with the functions of `flashdecoding.reference`."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashdecoding.commands.inputs import BadInput
from flashdecoding.reference import (
    attention_scores,
    change_of_scale,
    merge_tiles,
    online_softmax,
    online_softmax_states,
    safe_softmax,
    tile_direct,
    tile_incremental_states,
)
from flashdecoding.state import AttentionState

MOST_KEYS = 64
_SHOWN_COMPONENTS = 8

_SOFTMAX_EXAMPLE = (1.0, 2.0, 0.5)  # 2.3.2
_QUERY = (0.1, 0.2, 0.3, 0.4)  # 2.4.1
_KEYS = ((0.5, 0.1, 0.3, 0.2), (0.2, 0.6, 0.1, 0.4), (0.3, 0.2, 0.7, 0.1))
_VALUES = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.4, 0.3, 0.2), (0.2, 0.6, 0.1, 0.5))
_TILE_MAXIMA, _SCORE = (5.0, 8.0), 3.0  # 2.4.2


def run_examples(console: Console) -> None:
    """The derivation's own examples, in its order: 2.3.2, 2.4.1, 2.4.2."""
    show_online_softmax(console, torch.tensor(_SOFTMAX_EXAMPLE, dtype=torch.float64))
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in ((_QUERY,), _KEYS, _VALUES))
    s = attention_scores(q[None, None], k[None, None])[0, 0, 0]
    _heading(console, "2.4.1  One tile of three keys")
    _say(console, f"q = {_vector(q[0])}, d = 4, scores s_j = q · K_j / √4 = {_vector(s)}")
    tile = _show_tile(console, s, v, 0)
    _show_direct(console, tile, s, v)
    show_change_of_scale(console)
    _heading(console, "2.4.2  The same keys as two tiles, merged")
    show_tiles(console, s, v, [2, 1])


def run_numbers(console: Console, scores: Sequence[float], values: Sequence[Sequence[float]] | None,
                tiles: Sequence[int] | None) -> None:  # fmt: skip
    """The user's scores (and values, by default unit vectors), cut into ``tiles`` keys, merged and compared.

    One tile size is that of every tile; several must add up to the number of scores. ``BadInput`` if they do not, or
    the values do not fit the scores.
    """
    if len(scores) > MOST_KEYS:
        raise BadInput(f"explain shows at most {MOST_KEYS} scores, got {len(scores)}")
    if values is not None and len(values) != len(scores):
        raise BadInput(f"values must have one row for each of the {len(scores)} scores, got {len(values)}")
    sizes = _tile_sizes(len(scores), tiles)
    s = torch.tensor(scores, dtype=torch.float64)
    v = torch.eye(len(scores), dtype=torch.float64) if values is None else torch.tensor(values, dtype=torch.float64)
    if values is None:
        _say(console, "No values given: V_j is the j-th unit vector, so o lists the softmax weights of the keys.")
    show_online_softmax(console, s)
    _heading(console, f"2.4.1 and 2.4.2  {len(scores)} keys as {len(sizes)} tiles, merged")
    show_tiles(console, s, v, sizes)


def show_online_softmax(console: Console, x: Tensor) -> None:
    """The recurrence of 2.3.2 for x (N,), and the same softmax from 2.3.1."""
    _heading(console, f"2.3.2  Softmax of {_vector(x)}, one element at a time")
    ms, ds = online_softmax_states(x)
    table = _table("j", "x_j", "m_j = max(m_{j-1}, x_j)", "d_j = d_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j)")
    previous = (-math.inf, 0.0)
    for j, (x_j, m, d) in enumerate(zip(x.tolist(), ms.tolist(), ds.tolist(), strict=True), 1):
        table.add_row(f"{j}", _number(x_j), _number(m), _sum_step(previous, x_j, m, d))
        previous = (m, d)
    console.print(table)
    _say(console, f"softmax_i = exp(x_i - m_N) / d_N = {_vector(online_softmax(x))}")
    _agreement(console, "2.3.1, all elements at once", safe_softmax(x), online_softmax(x))


def show_change_of_scale(console: Console) -> None:
    """2.4.2, step 2: an exponential moves from its tile's maximum to the global one."""
    _heading(console, "2.4.2  Change of scale")
    m_tile, m_global = _TILE_MAXIMA[0], max(_TILE_MAXIMA)
    local = torch.tensor(math.exp(_SCORE - m_tile), dtype=torch.float64)
    moved = change_of_scale(local, torch.tensor(m_tile), torch.tensor(m_global)).item()
    _say(
        console,
        f"Tiles with m = {_TILE_MAXIMA[0]:g} and {_TILE_MAXIMA[1]:g}: m_global = {m_global:g}. "
        f"A score {_SCORE:g} of the first tile:\n  in its tile  exp({_SCORE:g} - {m_tile:g}) = {local.item():.5f}\n"
        f"  globally     exp({_SCORE:g} - {m_global:g}) = {math.exp(_SCORE - m_global):.5f}\n"
        f"  moved        {local.item():.5f} · exp({m_tile:g} - {m_global:g}) = {moved:.5f}",
    )


def show_tiles(console: Console, s: Tensor, v: Tensor, sizes: Sequence[int]) -> None:
    """Stage 1 and stage 2 for scores s (N,) and values v (N, Dv), and the direct result."""
    states = []
    ends = list(accumulate(sizes))
    for number, (end, size) in enumerate(zip(ends, sizes, strict=True), 1):
        begin = end - size
        _say(console, f"Tile {number}: keys {begin + 1} to {end}" if size > 1 else f"Tile {number}: key {end}")
        states.append(_show_tile(console, s[begin:end], v[begin:end], begin))
    merged = merge_tiles(states)
    m_global = merged.m.item()
    table = _table("tile", "m", "l", "exp(m - m_global)", "weight", "o")
    for number, state in enumerate(states, 1):
        m, l = state.m.item(), state.l.item()
        factor = math.exp(m - m_global) if m > -math.inf else 0.0
        weight = factor * l / merged.l.item() if merged.l.item() else 0.0
        table.add_row(f"{number}", _number(m), _number(l), _number(factor), _number(weight), _vector(state.o.flatten()))
    _say(
        console,
        "Merge: m_global = max m, l_global = Σ exp(m - m_global) l, weight = exp(m - m_global) l / l_global, "
        "o_final = Σ weight o",
    )
    console.print(table)
    o_final = _vector(merged.o.flatten())
    _say(console, f"m_global = {_number(m_global)}, l_global = {_number(merged.l.item())}, o_final = {o_final}")
    _show_direct(console, merged, s, v)


def _show_tile(console: Console, s: Tensor, v: Tensor, before: int) -> AttentionState:
    """The states after each key of a tile; returns the last. ``before`` keys stand in earlier tiles."""
    states = tile_incremental_states(*_shaped(s, v))
    table = _table("key", "s_j", "V_j", "m_j", "l_j", "o_j")
    for j, state in enumerate(states):
        m, l = _number(state.m.item()), _number(state.l.item())
        table.add_row(
            f"{before + j + 1}", _number(s[j].item()), _vector(v[j]), m, l, _vector(state.o.flatten())
        )  # fmt: skip
    console.print(table)
    return states[-1]


def _show_direct(console: Console, state: AttentionState, s: Tensor, v: Tensor) -> None:
    direct = tile_direct(*_shaped(s, v))
    _agreement(console, "all keys at once", direct.o.flatten(), state.o.flatten())


def _agreement(console: Console, how: str, wanted: Tensor, got: Tensor) -> None:
    _say(console, f"Check, {how}: {_vector(wanted)}, largest difference {(wanted - got).abs().max().item():.1e}")


def _sum_step(previous: tuple[float, float], x: float, m: float, d: float) -> str:
    """The recurrence of d with its numbers."""
    if previous[1] == 0.0 or x == -math.inf:
        return _number(d)
    m_before, d_before = previous
    return f"{_number(d_before)} · exp({m_before:g} - {m:g}) + exp({x:g} - {m:g}) = {_number(d)}"


def _tile_sizes(count: int, tiles: Sequence[int] | None) -> list[int]:
    if tiles is None:
        tiles = [max(1, -(-count // 2))]
    if len(tiles) == 1:
        return [min(tiles[0], count - begin) for begin in range(0, count, tiles[0])]
    if sum(tiles) != count:
        raise BadInput(f"tile sizes must add up to the {count} scores, got {'+'.join(map(str, tiles))} = {sum(tiles)}")
    return list(tiles)


def _shaped(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) and (N, Dv) as scores (1, 1, 1, N) and values (1, 1, N, Dv)."""
    return s.view(1, 1, 1, -1), v[None, None]


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold", markup=False, highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number == 0 else "left")
    return table


def _number(x: float) -> str:
    return f"{x:.4f}" if abs(x) < 1e5 else f"{x:.4g}"


def _vector(x: Tensor) -> str:
    shown = [f"{value:.3f}" if abs(value) < 1e5 else f"{value:.4g}" for value in x[:_SHOWN_COMPONENTS].tolist()]
    return f"[{', '.join([*shown, *(['...'] if len(x) > _SHOWN_COMPONENTS else [])])}]"
