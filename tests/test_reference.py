"""The seed's derivation: every worked example to its printed digits, and the theorem of 2.6 as a property."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdecoding.reference import (
    attention_scores,
    change_of_scale,
    direct_attention,
    flash_decode,
    merge_pair,
    merge_tiles,
    online_softmax,
    online_softmax_states,
    safe_softmax,
    tile_by_subtiles,
    tile_direct,
    tile_incremental,
    tile_incremental_states,
)
from flashdecoding.state import AttentionState

INF = math.inf
EPS = 2.0**-52


def printed(values: Tensor | float, digits: int) -> list[str]:
    """The values as the seed prints them."""
    flat = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    return [f"{value:.{digits}f}" for value in flat]


class TestOnlineSoftmaxExample:
    """2.3.2, the example x = [1.0, 2.0, 0.5]."""

    x = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

    def test_states(self) -> None:
        m, d = online_softmax_states(self.x)
        assert m.tolist() == [1.0, 2.0, 2.0]
        assert printed(d, 3) == ["1.000", "1.368", "1.591"]

    def test_terms(self) -> None:
        assert printed(torch.exp(torch.tensor([-1.0, 0.0, -1.5])), 3) == ["0.368", "1.000", "0.223"]

    @pytest.mark.parametrize("softmax", [online_softmax, safe_softmax], ids=["online", "safe"])
    def test_result(self, softmax: Callable[[Tensor], Tensor]) -> None:
        assert printed(softmax(self.x), 3) == ["0.231", "0.629", "0.140"]

    def test_direct_check(self) -> None:
        exps = self.x.exp()
        assert printed(exps, 3) == ["2.718", "7.389", "1.649"]
        assert printed(exps.sum(), 3) == ["11.756"]
        assert printed(exps / exps.sum(), 3) == ["0.231", "0.629", "0.140"]


def test_change_of_scale_example() -> None:
    """2.4.2, step 2: m_1 = 5, m_2 = 8, a score of 3."""
    s, m_local, m_other = (torch.tensor(x, dtype=torch.float64) for x in (3.0, 5.0, 8.0))
    m_global = torch.maximum(m_local, m_other)
    local = torch.exp(s - m_local)
    assert m_global.item() == 8.0
    assert printed(local, 3) == ["0.135"]
    assert printed(torch.exp(m_local - m_global), 4) == ["0.0498"]
    assert printed(torch.exp(s - m_global), 5) == ["0.00674"]
    assert printed(change_of_scale(local, m_local, m_global), 5) == ["0.00674"]


class TestThreeKeyTile:
    """2.4.1, the example with D = 4 and three keys."""

    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).view(1, 1, 1, 4)
    k = torch.tensor([[0.5, 0.1, 0.3, 0.2], [0.2, 0.6, 0.1, 0.4], [0.3, 0.2, 0.7, 0.1]], dtype=torch.float64)[
        None, None
    ]
    v = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.2], [0.2, 0.6, 0.1, 0.5]], dtype=torch.float64)[
        None, None
    ]
    s = attention_scores(q, k)

    def test_scores(self) -> None:
        assert self.s.shape == (1, 1, 1, 3)
        assert printed(self.s, 4) == ["0.1200", "0.1650", "0.1600"]

    @pytest.mark.parametrize(
        ("j", "m", "l", "o"),
        [
            (1, "0.1200", "1.0000", ["0.100", "0.200", "0.300", "0.400"]),
            (2, "0.1650", "1.9560", ["0.304", "0.302", "0.300", "0.298"]),
            (3, "0.1650", "2.9510", ["0.269", "0.403", "0.233", "0.366"]),
        ],
        ids=["j=1", "j=2", "j=3"],
    )
    def test_step_table(self, j: int, m: str, l: str, o: list[str]) -> None:
        state = tile_incremental_states(self.s, self.v)[j - 1]
        assert state.m.shape == state.l.shape == (1, 1, 1, 1) and state.o.shape == (1, 1, 1, 4)
        assert (printed(state.m, 4), printed(state.l, 4), printed(state.o, 3)) == ([m], [l], o)

    def test_direct_way(self) -> None:
        assert printed(torch.exp(self.s - self.s.amax()), 3) == ["0.956", "1.000", "0.995"]
        tile = tile_direct(self.s, self.v)
        assert (printed(tile.m, 4), printed(tile.l, 4)) == (["0.1650"], ["2.9510"])
        assert printed(tile.o, 3) == ["0.269", "0.403", "0.233", "0.366"]

    def test_both_ways_agree(self) -> None:
        direct = tile_direct(self.s, self.v)
        ways = [tile_incremental(self.s, self.v), *(tile_by_subtiles(self.s, self.v, n) for n in (1, 2, 3, 7))]
        for way in ways:
            assert (way.o - direct.o).abs().max() < 1e-15
            assert way.m.item() == direct.m.item() and abs(way.l.item() - direct.l.item()) < 1e-15

    def test_local_outputs_do_not_simply_add_up(self) -> None:
        """The seed's warning after the example: only the merge of 2.4.2 gives the attention over all keys."""
        tiles = [tile_direct(self.s[..., :2], self.v[..., :2, :]), tile_direct(self.s[..., 2:], self.v[..., 2:, :])]
        whole = direct_attention(self.q, self.k, self.v)
        assert (tiles[0].o + tiles[1].o - whole).abs().max() > 0.1
        assert (merge_tiles(tiles).o - whole).abs().max() < 1e-15


def test_an_element_step_is_the_merge_with_one_key() -> None:
    generator = torch.Generator().manual_seed(5)
    s = torch.randn(2, 3, 2, 9, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 3, 9, 4, generator=generator, dtype=torch.float64)
    steps = tile_incremental_states(s, v)
    for j in range(1, 9):
        key = AttentionState(
            s[..., j : j + 1], torch.ones(2, 3, 2, 1).double(), v[..., j : j + 1, :].expand(2, 3, 2, 4)
        )
        merged = merge_pair(steps[j - 1], key)
        assert torch.equal(merged.m, steps[j].m) and torch.equal(merged.l, steps[j].l)
        torch.testing.assert_close(merged.o, steps[j].o, rtol=0, atol=8 * EPS)


scores = st.one_of(st.floats(-1e4, 1e4), st.floats(-5, 5), st.sampled_from([-INF, -5e4, 0.0, 1e4]))


@settings(max_examples=150, deadline=None)
@given(x=st.lists(scores, max_size=20).map(lambda x: torch.tensor(x, dtype=torch.float64)))
def test_online_softmax_equals_safe_softmax(x: Tensor) -> None:
    weights = safe_softmax(x)
    torch.testing.assert_close(online_softmax(x), weights, rtol=1e-12, atol=1e-300)
    total = 1.0 if (x > -INF).any() else 0.0
    assert float(weights.sum()) == pytest.approx(total, abs=1e-14)
    m, d = online_softmax_states(x)
    for j in range(1, len(x) + 1):
        assert m[j - 1] == x[:j].max()
        exact = sum(math.exp(value - m[j - 1]) for value in x[:j].tolist() if value > -INF)
        assert d[j - 1].item() == pytest.approx(exact, rel=1e-12)


def problem(seed: int, n: int, magnitude: float, tied: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q (2, 3, 2, 5), k (2, 3, n, 5), v (2, 3, n, 4), with scores up to about `magnitude`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64) for shape in ((2, 5), (n, 5), (n, 4))
    )
    return q, (k.sign() if tied else k) * magnitude, v


def assert_equals_direct(state: AttentionState, q: Tensor, k: Tensor, v: Tensor) -> None:
    """To float64 rounding: a few roundings of sum_d |q_d k_jd| in the scores, and a few more for each merge."""
    n = k.shape[-2]
    magnitude = float(attention_scores(q.abs(), k.abs()).max()) if n else 0.0
    bound = EPS * (8 * magnitude + 4 * n + 16)
    weights = safe_softmax(attention_scores(q, k))
    error = (state.o - direct_attention(q, k, v)).abs()
    assert (error <= bound * (weights @ v.abs())).all(), f"largest error {float(error.max())}"
    lse = torch.logsumexp(attention_scores(q, k), -1) if n else torch.full(q.shape[:3], -INF).double()
    torch.testing.assert_close(state.lse, lse, rtol=4 * EPS, atol=bound)


problems = st.builds(
    problem,
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 40),
    magnitude=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    tied=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(qkv=problems, rng=st.randoms(use_true_random=False))
def test_theorem_any_cut_any_order_any_tree(qkv: tuple[Tensor, Tensor, Tensor], rng: random.Random) -> None:
    """2.6, and more: the tiles need not be equal, adjacent in the merge, or merged all at once; some hold no key."""
    q, k, v = qkv
    n = k.shape[-2]
    cuts = sorted(rng.randint(0, n) for _ in range(rng.randint(0, 8)))
    forest = []
    for begin, end in zip([0, *cuts], [*cuts, n], strict=True):
        s, v_tile = attention_scores(q, k[..., begin:end, :]), v[..., begin:end, :]
        way = rng.choice([tile_direct, tile_incremental, lambda s, v: tile_by_subtiles(s, v, 3)])
        forest.append(way(s, v_tile))
    while len(forest) > 1:
        rng.shuffle(forest)
        size = rng.randint(2, len(forest))
        merged = merge_pair(forest[0], forest[1]) if size == 2 else merge_tiles(forest[:size])
        forest = [merged, *forest[size:]]
    assert_equals_direct(forest[0], q, k, v)


@settings(max_examples=150, deadline=None)
@given(qkv=problems, tile_size=st.integers(1, 45), sub_tile=st.one_of(st.none(), st.integers(1, 9)))
def test_two_stages_equal_direct_attention(
    qkv: tuple[Tensor, Tensor, Tensor], tile_size: int, sub_tile: int | None
) -> None:
    assert_equals_direct(flash_decode(*qkv, tile_size, sub_tile=sub_tile), *qkv)


@pytest.mark.parametrize(
    ("n", "tile_size", "lengths"),
    [(0, 4, []), (1, 4, [1]), (4, 4, [4]), (5, 4, [4, 1]), (11, 3, [3, 3, 3, 2]), (3, 100, [3])],
    ids=str,
)
def test_tiles_are_cut_as_in_2a(n: int, tile_size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """ceil(n / tile_size) tiles, all full but the last, in order, each with its own part of v."""
    seen: list[Tensor] = []

    def spy(s: Tensor, v: Tensor) -> AttentionState:
        seen.append(v)
        return tile_direct(s, v)

    monkeypatch.setattr("flashdecoding.reference.tile_incremental", spy)
    q, k, v = problem(0, n, 1.0, False)
    flash_decode(q, k, v, tile_size)
    assert [tile.shape[-2] for tile in seen] == lengths == [len(r) for r in torch.arange(n).split(tile_size) if n]
    assert torch.equal(torch.cat([v[..., :0, :], *seen], -2), v)


def test_scale_replaces_the_root_of_the_head_dim() -> None:
    q, k, v = problem(1, 7, 1.0, False)
    assert torch.equal(attention_scores(q, k, scale=0.25), q @ k.mT * 0.25)
    torch.testing.assert_close(
        flash_decode(q, k, v, 3, scale=0.25).o, direct_attention(q, k, v, scale=0.25), rtol=1e-14, atol=1e-14
    )
    assert not torch.allclose(direct_attention(q, k, v, scale=0.25), direct_attention(q, k, v))


WAYS = {
    "direct": tile_direct,
    "incremental": tile_incremental,
    "by sub-tiles": lambda s, v: tile_by_subtiles(s, v, 2),
}


@pytest.mark.parametrize("tile", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("n", [0, 5], ids=["no keys", "only weightless keys"])
def test_empty_tiles_are_the_empty_state(tile: Callable[[Tensor, Tensor], AttentionState], n: int) -> None:
    s, v = torch.full((1, 2, 3, n), -INF), torch.ones(1, 2, n, 4)
    state = tile(s, v)
    assert (state.m == -INF).all() and (state.l == 0).all() and (state.o == 0).all()
    assert state.o.shape == (1, 2, 3, 4)


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_tiles_without_keys(size: int) -> None:
    q, k, v = problem(2, 4, 1.0, False)
    with pytest.raises(ValueError, match=f"at least one key, got a tile size of {size}"):
        flash_decode(q, k, v, size)
    with pytest.raises(ValueError, match=f"at least one key, got a tile size of {size}"):
        flash_decode(q, k, v, 2, sub_tile=size)
