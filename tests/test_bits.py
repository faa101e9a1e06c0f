"""Contract lines 5 and 6: same inputs, same bits; batch-mates, slots and capacity leave a sequence's bits alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import decode, on_every_backend
from torch import Tensor

from flashdecoding import plan_decode
from flashdecoding.testing import (
    RAGGED,
    SINGLE_FEATURES,
    SIZES,
    Case,
    Problem,
    arrange,
    assert_same_bits,
    assert_within_bound,
    expect,
)

FP32 = (torch.float32, 64, 64)
BF16 = (torch.bfloat16, 128, 128)
FP16 = (torch.float16, 80, 80)
LATENT = (torch.bfloat16, 576, 512)

LONG = (
    Case(*FP32, 8, 2, (2049, 0, 63, 1500), q_len=2),
    Case(*BF16, 28, 4, (3001, 129), q_len=5, window=1000, sinks=True),
    Case(*FP16, 16, 2, (1025, 4000)),
    Case(torch.float16, 64, 64, 16, 2, (1500, 129)),
    Case(*LATENT, 16, 1, (1100, 65), latent=True),
)
"""Several splits a sequence, so that both stages have something to get wrong."""


def _same(actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], label: str = "") -> None:
    assert_same_bits(actual[0], wanted[0], f"{label} out")
    assert_same_bits(actual[1], wanted[1], f"{label} lse")


def _ids(case: Case) -> str:
    return case.id


@on_every_backend
@pytest.mark.parametrize("layout", ["contiguous", "paged-16"])
@pytest.mark.parametrize("case", LONG, ids=_ids)
def test_every_run_gives_the_same_bits(case: Case, layout: str, backend: str) -> None:
    problem = arrange(case.build(backend), layout)
    wanted = decode(problem)
    assert_within_bound(*wanted, expect(case.build()))
    for _ in range(4):
        _same(decode(problem), wanted)


@pytest.mark.parametrize("case", LONG + SIZES[::5] + RAGGED[::4], ids=_ids)
def test_thread_count_changes_no_bit(case: Case) -> None:
    problem = case.build()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = decode(problem)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            _same(decode(problem), wanted, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@on_every_backend
@pytest.mark.parametrize("case", LONG, ids=_ids)
def test_page_order_changes_no_bit(case: Case, backend: str) -> None:
    problem = case.build(backend)
    wanted = decode(arrange(problem, "paged-16"))
    for seed in (1, 2):
        _same(decode(arrange(problem, "paged-16", seed=seed)), wanted)
        _same(decode(arrange(problem, "paged-1", seed=seed)), wanted)


@on_every_backend
@pytest.mark.parametrize("layout", ["contiguous", "paged-16"])
def test_how_lengths_are_given_changes_no_bit(layout: str, backend: str) -> None:
    problem = arrange(replace(LONG[0], seqlens=(1025, 1025)).build(backend), layout)
    lens = problem.options["seqlens"]
    wanted = decode(problem)
    given: list[Any] = [[1025, 1025], (1025, 1025), 1025, lens.long(), lens.cpu(), lens.repeat_interleave(2)[::2]]
    for seqlens in given:
        _same(decode(problem.with_options(seqlens=seqlens)), wanted, repr(seqlens))


@on_every_backend
def test_no_lengths_mean_the_whole_cache(backend: str) -> None:
    case = replace(LONG[0], seqlens=(700, 700), spare=0)
    problem = case.build(backend)
    _same(decode(problem.with_options(seqlens=None)), decode(problem))
    assert_within_bound(*decode(problem.with_options(seqlens=None)), expect(case.build()))


@on_every_backend
@pytest.mark.parametrize("case", LONG, ids=_ids)
def test_capacity_changes_no_bit(case: Case, backend: str) -> None:
    """A length decides, not what the cache could hold: a view of the filled part gives the same bits."""
    problem = case.build(backend)
    wanted = decode(problem)
    longest = max(case.seqlens)
    tight = problem.with_caches(problem.k[:, :, :longest], None if case.latent else problem.v[:, :, :longest])
    _same(decode(tight), wanted)
    k = torch.nn.functional.pad(problem.k, (0, 0, 0, 5000), value=torch.nan)
    v = None if case.latent else torch.nn.functional.pad(problem.v, (0, 0, 0, 5000), value=torch.nan)
    _same(decode(problem.with_caches(k, v)), wanted)


def _invariant(problem: Problem, max_seqlen: int | None = None) -> Problem:
    seqlens = problem.options["seqlens"]
    plan = plan_decode(
        seqlens,
        q_heads=problem.q.shape[1],
        kv_heads=problem.k.shape[1],
        head_dim=problem.q.shape[3],
        head_dim_v=problem.v.shape[3],
        dtype=problem.q.dtype,
        q_len=problem.q.shape[2],
        window=problem.options.get("window"),
        max_seqlen=max_seqlen,
        batch_invariant=True,
    )
    return problem.with_options(plan=plan)


@on_every_backend
@pytest.mark.parametrize("case", (*LONG, *SINGLE_FEATURES[::4]), ids=_ids)
def test_batch_invariant_bits(case: Case, backend: str) -> None:
    """Alone, with other batch-mates, in another slot, with another capacity: a sequence's bits stay."""
    problem = case.build(backend)
    out, lse = decode(_invariant(problem))
    batch = len(case.seqlens)
    for b in range(batch):
        wanted = out[b : b + 1], lse[b : b + 1]
        _same(decode(_invariant(problem.sequence(b))), wanted, f"sequence {b} alone")
        _same(decode(_invariant(problem.sequence(b), max_seqlen=9999)), wanted, f"sequence {b} with a later maximum")
    order = torch.arange(batch).roll(1).repeat(3)  # other slots, more mates
    mixed = {
        name: x[order] if isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == batch else x
        for name, x in problem.options.items()
    }
    mixed |= {name: problem.options[name][order] for name in ("seqlens", "kv_begin") if name in mixed}
    k = problem.k[order]
    v = k[..., : problem.v.shape[-1]] if case.latent else problem.v[order]
    moved_out, moved_lse = decode(_invariant(Problem(problem.q[order], k, v, mixed)))
    _same((moved_out, moved_lse), (out[order], lse[order]), "moved")


@on_every_backend
def test_batch_invariant_among_long_mates(backend: str) -> None:
    """The mates' lengths and number swing from nothing to much more than the sequence's own."""
    case = Case(*FP32, 8, 2, (777,), spare=0)
    alone = case.build(backend)
    wanted = decode(_invariant(alone))
    for mates in ((0,), (1, 1, 1), (5000,), (3000, 12, 2999, 64, 1)):
        others = replace(case, seqlens=mates, spare=max(5000, 777) - max(mates)).build(backend)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 5000 - 777)) for x in (alone.k, alone.v))
        parts = [torch.cat([a, b]) for a, b in ((others.q, alone.q), (others.k, k), (others.v, v))]
        lens = torch.tensor([*mates, 777], dtype=torch.int32, device=backend)
        out, lse = decode(_invariant(Problem(*parts, {"seqlens": lens})))
        _same((out[-1:], lse[-1:]), wanted, f"mates {mates}")
