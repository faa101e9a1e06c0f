"""The algebra of partial states: identity, commutativity, associativity, empties, sinks, what is refused."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdecoding.state import AttentionState, merge_states

INF = math.inf
# Maxima of ordinary scores, of huge and of very negative ones, of ties, and of rows without keys.
MAXIMA = [-INF, -5e4, -1e4, -87.5, -1.0, 0.0, 0.0, 0.3, 1.0, 88.5, 1e4, 1.0001e4]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SHAPE = (2, 3, 2, 5)  # batch, q_heads, q_len, head_dim_v


def row(m: float, l: float, *o: float, dtype: torch.dtype = torch.float64) -> AttentionState:
    """The state of one query row."""
    m_, l_, o_ = (torch.tensor(x, dtype=dtype).view(1, 1, 1, -1) for x in ([m], [l], list(o)))
    return AttentionState(m_, l_, o_)


@st.composite
def states(draw: st.DrawFn, count: int, dtype: torch.dtype) -> list[AttentionState]:
    """`count` states of one shape, every row with its own maximum, some rows empty."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    made = []
    for _ in range(count):
        choice = torch.randint(len(MAXIMA), (*SHAPE[:3], 1), generator=generator)
        m = torch.tensor(MAXIMA, dtype=dtype)[choice]
        l = 1 + 1e3 * torch.rand(m.shape, generator=generator, dtype=dtype)
        o = torch.randn(SHAPE, generator=generator, dtype=dtype)
        made.append(AttentionState(m, torch.where(m == -INF, 0.0, l), torch.where(m == -INF, 0.0, o)))
    return made


def assert_same(a: AttentionState, b: AttentionState) -> None:
    for field in dataclasses.fields(AttentionState):
        x, y = getattr(a, field.name), getattr(b, field.name)
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda text, f=field: f"{f.name}: {text}")


def assert_equal_to_rounding(a: AttentionState, b: AttentionState, terms: list[AttentionState]) -> None:
    """m is exact. A weight that matters has |m_b - m| < 100, so its exponential is off by 100 roundings at most."""
    error = 256 * torch.finfo(a.o.dtype).eps
    assert torch.equal(a.m, b.m)
    torch.testing.assert_close(a.l, b.l, rtol=error, atol=0)
    largest = max(float(term.o.abs().max()) for term in terms)
    torch.testing.assert_close(a.o, b.o, rtol=0, atol=error * largest)


dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


@dtypes
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_empty_is_the_identity(dtype: torch.dtype, data: st.DataObject) -> None:
    (a,) = data.draw(states(1, dtype))
    empty = AttentionState.empty(*SHAPE, dtype=dtype)
    assert_same(a.merge(empty), a)
    assert_same(empty.merge(a), a)
    assert_same(merge_states([empty, a, empty]), a)
    assert_same(merge_states([a]), a)


@dtypes
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_merge_commutes_to_the_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    a, b = data.draw(states(2, dtype))
    assert_same(a.merge(b), b.merge(a))


@dtypes
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_merge_associates(dtype: torch.dtype, data: st.DataObject) -> None:
    a, b, c = terms = data.draw(states(3, dtype))
    assert_equal_to_rounding(a.merge(b).merge(c), a.merge(b.merge(c)), terms)
    assert_equal_to_rounding(merge_states(terms), a.merge(b.merge(c)), terms)


@dtypes
@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(1, 9), rng=st.randoms(use_true_random=False))
def test_any_order_and_tree_agree(dtype: torch.dtype, data: st.DataObject, count: int, rng: random.Random) -> None:
    terms = data.draw(states(count, dtype))
    forest = list(terms)
    while len(forest) > 1:
        rng.shuffle(forest)
        size = rng.randint(2, len(forest))
        forest = [merge_states(forest[:size]), *forest[size:]]
    assert_equal_to_rounding(forest[0], merge_states(terms), terms)


def test_merge_is_the_weighted_mean_of_the_seed() -> None:
    # 2.4.2 by hand: m = log 4, weights exp(0 - log 4) * 2 = 1/2 and exp(0) * 3 = 3.
    merged = row(0.0, 2.0, 7.0, 0.0).merge(row(math.log(4), 3.0, 0.0, 14.0))
    assert merged.m.item() == math.log(4)
    assert merged.l.item() == pytest.approx(3.5, rel=1e-15)
    assert merged.o.flatten().tolist() == pytest.approx([1.0, 12.0], rel=1e-15)
    assert merged.lse.item() == pytest.approx(math.log(2 + 12), rel=1e-15)


@dtypes
def test_empties_merge_to_an_empty(dtype: torch.dtype) -> None:
    empty = AttentionState.empty(*SHAPE, dtype=dtype)
    merged = merge_states([empty, empty, empty])
    assert_same(merged, empty)
    assert_same(AttentionState.from_lse(empty.o, empty.lse), empty)
    assert (merged.lse == -INF).all()
    assert (merged.finalize() == 0).all()


@pytest.mark.parametrize(
    "shape", [(0, 3, 1, 4), (2, 3, 0, 4), (2, 3, 1, 0)], ids=["batch 0", "q_len 0", "head_dim_v 0"]
)
def test_shapes_without_elements(shape: tuple[int, int, int, int]) -> None:
    empty = AttentionState.empty(*shape)
    assert empty.merge(empty).finalize(torch.float16, sinks=torch.zeros(3)).shape == shape
    assert empty.lse.shape == shape[:3]


@pytest.mark.parametrize("offset", [-5e4, -1e30, 1e30], ids=str)
def test_only_differences_of_scores_matter(offset: float) -> None:
    a, b = (row(offset, 1.0, value, dtype=torch.float32) for value in (1.0, 3.0))
    assert a.merge(b).o.item() == 2.0


def test_numerators_past_the_largest_float_do_not_overflow() -> None:
    a, b = (row(0.0, 1e5, value, dtype=torch.float32) for value in (3e38, 1e38))
    assert a.merge(b).o.item() == pytest.approx(2e38, rel=1e-6)


@pytest.mark.parametrize(
    "bad", [row(math.nan, 1.0, 2.0), row(INF, 1.0, 2.0), row(0.0, math.nan, 2.0)], ids=["m nan", "m inf", "l nan"]
)
def test_a_bad_score_spoils_its_row_whatever_it_meets(bad: AttentionState) -> None:
    empty = AttentionState.empty(1, 1, 1, 1, dtype=torch.float64)
    for merged in (bad.merge(row(3.0, 1.0, 4.0)), row(3.0, 1.0, 4.0).merge(bad), bad.merge(empty).merge(bad)):
        assert merged.o.isnan().all()
        assert merged.lse.isnan().all()


@pytest.mark.parametrize(
    "weightless", [row(-1e6, 1.0, math.nan, 1.0), row(-INF, 0.0, math.nan, 0.0)], ids=["far", "none"]
)
def test_a_value_that_is_not_finite_keeps_its_component(weightless: AttentionState) -> None:
    merged = weightless.merge(row(0.0, 1.0, 5.0, 7.0))
    assert merged.o.isnan().flatten().tolist() == [True, False]
    assert merged.o[..., 1].item() == 7.0
    assert merged.lse.item() == 0.0


def test_from_lse_takes_any_float_and_ignores_what_empty_rows_hold() -> None:
    o = torch.tensor([[[[1.5], [math.nan]]]], dtype=torch.bfloat16)
    state = AttentionState.from_lse(o, torch.tensor([[[2.0, -INF]]]))
    assert state.o.dtype == torch.float32
    assert state.o.flatten().tolist() == [1.5, 0.0]
    assert state.lse.flatten().tolist() == [2.0, -INF]
    assert state.l.flatten().tolist() == [1.0, 0.0]
    assert AttentionState.from_lse(o, torch.zeros(1, 1, 2, dtype=torch.float64)).o.dtype == torch.float64


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_from_lse_of_a_state_is_that_state(data: st.DataObject) -> None:
    a, b = data.draw(states(2, torch.float64))
    again = AttentionState.from_lse(a.o, a.lse)
    torch.testing.assert_close(again.lse, a.lse, rtol=0, atol=0)
    torch.testing.assert_close(again.merge(b).o, a.merge(b).o, rtol=0, atol=1e-10)  # lse rounds at 1e4 * 2^-53


SINK_CASES = {"none": -INF, "tiny": -50.0, "equal": 0.0, "large": 9.0, "far above": 1e4, "far below": -1e4}


@pytest.mark.parametrize("sink", SINK_CASES.values(), ids=SINK_CASES.keys())
@pytest.mark.parametrize("m", [-3.0, 0.0, 1e4, -INF], ids=str)
def test_a_sink_is_one_more_key_with_value_zero(m: float, sink: float) -> None:
    l, o = (0.0, 0.0) if m == -INF else (2.5, 3.0)
    state = row(m, l, o)
    exponent = sink - state.lse.item() if m > -INF and sink > -INF else -INF
    expected = 0.0 if exponent > 700 else o / (1 + math.exp(exponent))
    assert state.finalize(sinks=torch.tensor([sink])).item() == pytest.approx(expected, rel=1e-11)


def test_sinks_go_by_head_and_the_state_stays_as_it_was() -> None:
    m = torch.zeros(2, 2, 3, 1)
    state = AttentionState(m, torch.ones_like(m), torch.ones(2, 2, 3, 4))
    out = state.finalize(torch.bfloat16, sinks=torch.tensor([0.0, -INF], dtype=torch.float16))
    assert out.dtype == torch.bfloat16
    assert (out[:, 0] == 0.5).all() and (out[:, 1] == 1.0).all()
    assert (state.o == 1).all() and (state.lse == 0).all()


@pytest.mark.parametrize("sink", [INF, math.nan], ids=str)
def test_empty_rows_stay_zero_even_with_sinks_that_are_not_finite(sink: float) -> None:
    out = merge_states([AttentionState.empty(1, 1, 2, 3)]).finalize(sinks=torch.tensor([sink]))
    assert (out == 0).all()


def m_l_o(dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3, **shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    names = {"m": (2, 3, 1, 1), "l": (2, 3, 1, 1), "o": (2, 3, 1, 4)} | shapes
    return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in zip(names.values(), dtypes, strict=True))


REFUSALS = {
    "m without its last 1": (m_l_o(m=(2, 3, 1)), r"m must be \(2, 3, 1, 1\).*got \(2, 3, 1\)"),
    "l of other heads": (m_l_o(l=(2, 4, 1, 1)), r"l must be .*got \(2, 4, 1, 1\)"),
    "o of 3 dimensions": (m_l_o(o=(2, 3, 4)), r"o must be \(batch, q_heads, q_len, head_dim_v\), got \(2, 3, 4\)"),
    "two wrong at once": (m_l_o(m=(1,), l=(5,)), r"m must be .*; l must be"),
    "half precision": (m_l_o((torch.float16,) * 3), "all float32 or all float64.*float16"),
    "mixed precision": (m_l_o((torch.float32, torch.float32, torch.float64)), "all float32 or all float64"),
}


@pytest.mark.parametrize(("tensors", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refuses_what_is_no_state(tensors: tuple[Tensor, Tensor, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionState(*tensors)


def test_refuses_to_merge_unlike_states() -> None:
    with pytest.raises(ValueError, match=r"state 0: o \(1, 1, 1, 1\), torch.float64.*state 1: o \(1, 1, 1, 2\)"):
        row(0.0, 1.0, 2.0).merge(row(0.0, 1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=r"float64.*float32"):
        row(0.0, 1.0, 2.0).merge(row(0.0, 1.0, 2.0, dtype=torch.float32))
    with pytest.raises(ValueError, match="at least one state"):
        merge_states([])


def test_refuses_unfit_pairs_and_sinks() -> None:
    with pytest.raises(ValueError, match=r"lse must be .*\(1, 1, 1, 2\), got \(1, 1, 1, 1\)"):
        AttentionState.from_lse(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"floating point.*int32"):
        AttentionState.from_lse(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"sinks must be .*\(1,\), got \(2,\)"):
        row(0.0, 1.0, 2.0).finalize(sinks=torch.zeros(2))


def test_a_state_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        row(0.0, 1.0, 2.0).m = torch.zeros(1)  # type: ignore[misc]
