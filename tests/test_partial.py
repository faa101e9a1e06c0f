"""partial_attention: pieces of a sequence, each with its place, merge to the whole."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from backends import decode, on_every_backend, skip_unless_supported
from torch import Tensor

from flashdecoding import AttentionState, merge_states, partial_attention, plan_decode
from flashdecoding.testing import Case, Problem, arrange, assert_within_bound, expect

FP32 = (torch.float32, 64, 64)
BF16 = (torch.bfloat16, 128, 128)
FP16 = (torch.float16, 80, 80)

WHOLES = (
    Case(*FP32, 8, 2, (300, 300), q_len=5, spare=0),
    Case(*FP32, 8, 1, (300, 300), q_len=5, spare=0, window=37, sinks=True),
    Case(*BF16, 12, 4, (257, 257), spare=0, alibi="batch", softcap=3.0),
    Case(*BF16, 4, 4, (257, 257), q_len=8, spare=0, mask="trees"),
    Case(*FP16, 3, 1, (130, 130), q_len=17, spare=0, causal=False, window=9),
    Case(*FP32, 6, 2, (130, 130), q_len=2, spare=0, alibi="heads", window=100, sinks=True),
    Case(torch.bfloat16, 576, 512, 16, 1, (130, 130), q_len=2, spare=0, latent=True),
    Case(torch.float64, 33, 33, 6, 2, (130, 130), q_len=3, spare=0, alibi="heads"),
)

each_whole = pytest.mark.parametrize("case", WHOLES, ids=lambda case: case.id)


def _partial(problem: Problem, keys: slice, **places: Any) -> AttentionState:
    options = {name: x for name, x in problem.options.items() if name not in ("sinks", "seqlens")}
    k = problem.k[:, :, keys]
    v = k[..., : problem.v.shape[-1]] if problem.latent else problem.v[:, :, keys]
    return partial_attention(problem.q, k, v, **options, **places)


def _check(state: AttentionState, problem: Problem, case: Case) -> None:
    """The state finalised, and its lse, against the whole."""
    out = state.finalize(case.dtype, sinks=problem.options.get("sinks"))
    assert state.o.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_within_bound(out, state.lse, expect(case.build()))


@on_every_backend
@each_whole
def test_one_piece_is_the_whole(case: Case, backend: str) -> None:
    skip_unless_supported(case, backend)
    problem = case.build(backend)
    state = _partial(problem, slice(None))
    _check(state, problem, case)
    sinkless = problem.with_options(sinks=None)
    out, lse = decode(sinkless)
    torch.testing.assert_close(state.finalize(case.dtype), out)
    torch.testing.assert_close(state.lse, lse)


@on_every_backend
@pytest.mark.parametrize("cuts", [(1,), (64,), (65, 66), (0, 100, 129)], ids=str)
@each_whole
def test_consecutive_pieces_merge_to_the_whole(case: Case, cuts: tuple[int, ...], backend: str) -> None:
    skip_unless_supported(case, backend)
    problem = case.build(backend)
    length = case.seqlens[0]
    edges = [0, *cuts, length]
    q_start = length - max(case.q_lens)
    states = [_partial(problem, slice(begin, end), kv_start=begin, q_start=q_start) for begin, end in pairwise(edges)]
    _check(merge_states(states), problem, case)
    _check(merge_states(states[::-1]), problem, case)


@on_every_backend
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("block", [1, 16, 50])
@each_whole
def test_interleaved_shards_merge_to_the_whole(case: Case, block: int, ranks: int, backend: str) -> None:
    """Rank r holds blocks r, r + ranks, ... of the sequence, as ranks of a context-parallel group do."""
    skip_unless_supported(case, backend)
    problem = case.build(backend)
    length = case.seqlens[0]
    owner = torch.arange(length) // block % ranks
    states = []
    for rank in range(ranks):
        mine = (owner == rank).nonzero().squeeze(1).to(backend)
        k = problem.k[:, :, mine]
        v = k[..., : problem.v.shape[-1]] if problem.latent else problem.v[:, :, mine]
        piece = problem.with_caches(k, v)
        places = {"kv_start": rank * block, "kv_block": block, "kv_stride": ranks * block}
        states.append(_partial(piece, slice(None), q_start=length - max(case.q_lens), **places))
    _check(merge_states(states), problem, case)


def _lens(problem: Problem, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=problem.q.device)


@on_every_backend
@pytest.mark.parametrize("layout", ["contiguous", "paged-16"])
def test_shared_prefix_and_ragged_suffixes(layout: str, backend: str) -> None:
    """Places differ between sequences: each suffix has its own length, the prefix is one cache for all of them."""
    case = Case(*FP32, 8, 2, (170, 129, 140), q_len=5, window=90, sinks=True, alibi="batch")
    problem = case.build()
    prefix_k, prefix_v = problem.k[:1, :, :128], problem.v[:1, :, :128]
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, :128], v[:, :, :128] = prefix_k, prefix_v
    wanted = expect(problem.with_caches(k, v))
    problem = problem.with_caches(k, v).to(backend)
    q_start = _lens(problem, 165, 124, 135)
    common = {name: problem.options[name] for name in ("alibi_slopes", "window")}
    shared = (problem.k[:1, :, :128].expand(3, -1, -1, -1), problem.v[:1, :, :128].expand(3, -1, -1, -1))
    prefix = partial_attention(problem.q, *shared, q_start=q_start, **common)
    tail_lens = {"seqlens": _lens(problem, 42, 1, 12)}
    tail = arrange(Problem(problem.q, problem.k[:, :, 128:], problem.v[:, :, 128:], tail_lens), layout)
    suffix = partial_attention(
        tail.q, tail.k, tail.v, kv_start=_lens(problem, 128, 128, 128), q_start=q_start, **tail.options, **common
    )
    state = merge_states([prefix, suffix])
    out = state.finalize(torch.float32, sinks=problem.options["sinks"])
    assert_within_bound(out, state.lse, wanted)


@on_every_backend
def test_piece_that_no_row_sees_is_the_empty_state(backend: str) -> None:
    problem = Case(*BF16, 8, 2, (70, 70), q_len=2, spare=0).build(backend)
    poisoned = problem.with_caches(torch.full_like(problem.k, torch.nan), torch.full_like(problem.v, torch.nan))
    for places in ({"kv_start": 500, "q_start": 100}, {"kv_start": 0, "q_start": 100, "window": 20}):
        state = _partial(poisoned, slice(None), **places)
        assert (state.m == -torch.inf).all() and (state.l == 0).all() and (state.o == 0).all()
        whole = _partial(problem, slice(None))
        merged = whole.merge(state)
        assert torch.equal(merged.finalize(), whole.finalize()) and torch.equal(merged.lse, whole.lse)


@on_every_backend
def test_positions_past_2_to_31(backend: str) -> None:
    """Only differences of positions matter; a sequence may be longer than 32 bits count."""
    case = Case(*FP32, 8, 2, (130, 130), q_len=5, spare=0, window=60, alibi="heads")
    problem = case.build(backend)
    start = 2**31 + 5
    _check(_partial(problem, slice(None), kv_start=start), problem, case)
    states = [
        _partial(problem, slice(0, 77), kv_start=start, q_start=start + 125),
        _partial(problem, slice(77, None), kv_start=start + 77, q_start=start + 125),
    ]
    _check(merge_states(states), problem, case)


@on_every_backend
def test_pieces_with_a_plan(backend: str) -> None:
    """A plan without a window serves pieces at any position."""
    case = Case(*BF16, 8, 2, (3000, 700), spare=0)
    problem = case.build(backend)
    lens = problem.options["seqlens"]
    first = partial_attention(problem.q, problem.k[:, :, :512], problem.v[:, :, :512], q_start=lens - 1)
    plan = plan_decode(lens - 512, q_heads=8, kv_heads=2, head_dim=128, dtype=case.dtype, device=backend)
    tail = problem.k[:, :, 512:], problem.v[:, :, 512:]
    rest = partial_attention(problem.q, *tail, plan=plan, kv_start=512, q_start=lens - 1)
    _check(first.merge(rest), problem, case)
