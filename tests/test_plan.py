"""plan_decode: each valid key in exactly one split, no split empty, the cut decided by lengths alone."""

from typing import Any

import numpy as np
import pytest
import torch
from backends import decode
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdecoding import SplitPlan, plan_decode
from flashdecoding.testing import Case, Problem, assert_same_bits, assert_within_bound, expect

HEADS = st.sampled_from([(1, 1), (8, 8), (32, 8), (71, 1), (28, 4), (128, 128), (4096, 4096)])
DIMS = st.sampled_from([(64, 64), (128, 128), (576, 512), (7, 5), (256, 256)])
LENGTHS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 3000), st.integers(0, 2**31 - 1)), max_size=8)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
WINDOWS = st.one_of(st.none(), st.integers(1, 70), st.integers(1, 2**31 - 1))


def _plan(lengths: Any, heads: tuple[int, int] = (8, 2), dims: tuple[int, int] = (64, 64), **more: Any) -> SplitPlan:
    more = {"dtype": torch.float32, **more}
    return plan_decode(lengths, q_heads=heads[0], kv_heads=heads[1], head_dim=dims[0], head_dim_v=dims[1], **more)


def _assert_covers(plan: SplitPlan, lengths: list[int], q_len: int, window: int | None) -> None:
    assert plan.seqlens.tolist() == lengths
    total = 0
    for b, length in enumerate(lengths):
        splits = plan.splits_of(b)
        total += len(splits)
        reach = length if window is None else q_len + window - 1  # keys that some row of the sequence sees
        edge = max(0, length - reach)
        assert all(begin < end for begin, end in splits), f"an empty split among {splits}"
        assert [end for _, end in splits[:-1]] == [begin for begin, _ in splits[1:]], f"gap or overlap in {splits}"
        if edge < length:
            covers = splits and splits[0][0] <= edge and splits[-1][1] == length
            assert covers, f"{splits} do not cover [{edge}, {length})"
            assert splits[0][0] > edge - 1024, f"{splits} begin long before the window's first key {edge}"
        tiles = -(-(length - edge) // plan.device.tile)
        assert len(splits) <= max(tiles, 0), f"{len(splits)} splits of {tiles} tiles"
    assert plan.num_splits == total


@settings(max_examples=200, deadline=None)
@given(LENGTHS, HEADS, DIMS, DTYPES, st.integers(0, 64), WINDOWS, st.booleans())
def test_each_key_once_and_no_empty_split(
    lengths: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    q_len: int,
    window: int | None,
    invariant: bool,
) -> None:
    plan = _plan(lengths, heads, dims, dtype=dtype, q_len=q_len, window=window, batch_invariant=invariant)
    _assert_covers(plan, lengths, q_len, window)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, HEADS, WINDOWS, st.data())
def test_update_equals_a_fresh_plan(lengths: list[int], heads: tuple[int, int], window: int | None, data: Any) -> None:
    other = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(lengths), max_size=len(lengths)))
    plan = _plan(lengths, heads, window=window)
    plan.update(other)
    fresh = _plan(other, heads, window=window)
    _assert_covers(plan, other, 1, window)
    assert [plan.splits_of(b) for b in range(len(other))] == [fresh.splits_of(b) for b in range(len(other))]


@settings(max_examples=100, deadline=None)
@given(LENGTHS.filter(bool), HEADS, WINDOWS, st.data())
def test_batch_invariant_cut(lengths: list[int], heads: tuple[int, int], window: int | None, data: Any) -> None:
    plan = _plan(lengths, heads, window=window, batch_invariant=True)
    for b, length in enumerate(lengths):
        alone = _plan([length], heads, window=window, batch_invariant=True)
        assert plan.splits_of(b) == alone.splits_of(0)
    order = data.draw(st.permutations(range(len(lengths))))
    moved = _plan([lengths[b] for b in order], heads, window=window, batch_invariant=True)
    assert [moved.splits_of(slot) for slot in range(len(order))] == [plan.splits_of(b) for b in order]


def test_threads_and_maximum_do_not_move_the_cut() -> None:
    lengths = [5000, 1, 0, 70000]
    wanted = [_plan(lengths).splits_of(b) for b in range(4)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 7, 64):
            torch.set_num_threads(threads)
            assert [_plan(lengths).splits_of(b) for b in range(4)] == wanted
    finally:
        torch.set_num_threads(before)
    assert [_plan(lengths, max_seqlen=2**20).splits_of(b) for b in range(4)] == wanted


@pytest.mark.parametrize("seqlens", [[3, 70], (3, 70), torch.tensor([3, 70]), torch.tensor([3, 70], dtype=torch.int32)])
def test_lengths_may_be_given_in_any_form(seqlens: Any) -> None:
    assert _plan(seqlens).seqlens.tolist() == [3, 70]


def test_plan_keeps_its_own_lengths() -> None:
    given_lens = torch.tensor([3, 70], dtype=torch.int32)
    plan = _plan(given_lens)
    given_lens.fill_(9)
    assert plan.seqlens.tolist() == [3, 70]


def test_arrays_are_read_only() -> None:
    plan = _plan([3, 7000])
    for name in ("first", "split_keys", "split_offsets"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 1


def test_one_plan_serves_layers_and_steps() -> None:
    """A plan's lengths stand in for ``seqlens``, and ``update`` keeps the object: what a decode loop does."""
    case = Case(torch.float32, 64, 64, 8, 2, (600, 2, 0), spare=3000)
    problem = case.build()
    plan = _plan(case.seqlens)
    for lengths in [(600, 2, 0), (601, 3, 1), (1, 1, 1), (3600, 64, 65)]:
        plan.update(list(lengths))
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        stepped = Problem(problem.q, problem.k, problem.v, {"seqlens": seqlens})
        planned = Problem(problem.q, problem.k, problem.v, {"plan": plan})
        wanted = decode(stepped)
        assert_within_bound(*wanted, expect(stepped))
        for actual in (decode(planned), decode(stepped.with_options(plan=plan))):
            assert_same_bits(actual[0], wanted[0])
            assert_same_bits(actual[1], wanted[1])


PLAN_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "negative-length": ({"lengths": [3, -4]}, "-4"),
    "fractional-length": ({"lengths": [3.5]}, "3.5"),
    "lengths-dtype": ({"lengths": torch.tensor([1.0])}, "float32"),
    "lengths-shape": ({"lengths": torch.ones(2, 3, dtype=torch.int32)}, "(2, 3)"),
    "length-past-maximum": ({"lengths": [5000], "max_seqlen": 4096}, "5000"),
    "length-past-int32": ({"lengths": [2**31]}, str(2**31)),
    "heads": ({"heads": (10, 4)}, "10 and 4"),
    "no-heads": ({"heads": (8, 0)}, "0"),
    "head-dim": ({"dims": (0, 64)}, "0"),
    "q-len": ({"q_len": -2}, "-2"),
    "window": ({"window": 0}, "0"),
    "max-seqlen": ({"max_seqlen": -8}, "-8"),
    "max-seqlen-text": ({"max_seqlen": "x"}, "'x'"),
    "no-lengths": ({"lengths": None}, "NoneType"),
    "true-heads": ({"heads": (8, True)}, "True"),
    "true-window": ({"window": True}, "True"),
    "invariant-text": ({"batch_invariant": "no"}, "'no'"),
    "dtype": ({"dtype": torch.int64}, "int64"),
}


@pytest.mark.parametrize("name", PLAN_REFUSALS)
def test_plan_refuses(name: str) -> None:
    arguments, wanted = PLAN_REFUSALS[name]
    with pytest.raises(ValueError) as raised:
        _plan(**{"lengths": [3], **arguments})
    assert wanted in str(raised.value)


def test_plan_takes_numpy_numbers() -> None:
    plan = _plan([700], heads=(np.int64(8), np.int32(2)), q_len=np.int64(1), window=np.int64(300))
    assert plan.problem == _plan([700], heads=(8, 2), q_len=1, window=300).problem


def test_plan_refuses_a_device_without_backend() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        _plan([3], device="meta")


@pytest.mark.parametrize("lengths", [[1], [1, 2, 3], [-1, 2], [1, 99]], ids=str)
def test_refused_update_leaves_the_plan_alone(lengths: list[int]) -> None:
    plan = _plan([3, 70], max_seqlen=80)
    with pytest.raises(ValueError, match="update"):
        plan.update(lengths)
    _assert_covers(plan, [3, 70], 1, None)
