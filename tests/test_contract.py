"""Contract lines 1 to 4: rows without a key, poison, non-finite values that are visible, extreme numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import decode, on_every_backend, skip_unless_supported
from torch import Tensor

from flashdecoding.testing import (
    GRID,
    LAYOUTS,
    Case,
    Problem,
    arrange,
    assert_same_bits,
    assert_within_bound,
    expect,
    poison_unseen,
    visible_keys,
    worst_roundings,
)

FP32 = (torch.float32, 64, 64)
BF16 = (torch.bfloat16, 128, 128)
FP16 = (torch.float16, 80, 80)
FP16_64 = (torch.float16, 64, 64)
SINKS = {"sinks": torch.tensor([0.0, 3.0, -torch.inf, 50.0, -50.0, 1.0])}

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Line 1: rows without a key, calls without a row


EMPTY_ROWS: dict[str, tuple[Case, dict[str, Any]]] = {
    "all-lengths-0": (Case(*FP32, 6, 2, (0, 0, 0), q_len=2), {}),
    "capacity-0": (Case(*FP32, 6, 2, (0, 0), spare=0), {}),
    "begin-at-length": (Case(*BF16, 6, 2, (5, 130)), {"kv_begin": _int32(5, 130)}),
    "begin-past-length": (Case(*FP16, 6, 3, (5, 0), spare=200), {"kv_begin": _int32(6, 1)}),
    "mask-all-false": (Case(*BF16, 6, 1, (70, 200), q_len=2), {"mask": torch.zeros(1, 1, 2, 203, dtype=torch.bool)}),
    "begin-past-the-query": (
        Case(*FP32, 6, 2, (129, 64), q_len=1, window=1),
        {"mask": (torch.arange(132) < 60).view(1, 1, 1, 132)},
    ),
}


@on_every_backend
@each_layout
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_without_a_key_are_zero(name: str, sinks: bool, layout: str, backend: str) -> None:
    case, options = EMPTY_ROWS[name]
    problem = case.build().with_options(**options, **(SINKS if sinks else {}))
    problem = arrange(problem.to(backend), layout)
    out = torch.full((*problem.q.shape[:-1], problem.v.shape[-1]), torch.nan, dtype=problem.q.dtype, device=backend)
    _, lse = decode(problem, out=out)
    assert_same_bits(out, torch.zeros_like(out))
    assert_same_bits(lse, torch.full_like(lse, -torch.inf))


@on_every_backend
@each_layout
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_more_queries_than_keys(causal: bool, layout: str, backend: str) -> None:
    """Bottom-right: the first rows of a short sequence stand before its first key."""
    case = Case(*FP32, 8, 2, (3, 0, 1, 17), q_len=17, sinks=True, causal=causal)
    out, lse = decode(arrange(case.build(backend), layout))
    assert_within_bound(out, lse, expect(case.build()))
    assert (lse[0, :, :14] == -torch.inf).all() == causal
    assert bool((out[0, :, :14] == 0).all()) == causal


@on_every_backend
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_only_scores_of_minus_infinity_make_an_empty_row(sinks: bool, backend: str) -> None:
    problem = Case(*FP32, 6, 2, (70, 3), q_len=2, causal=False).build(backend)
    k = problem.k.clone()
    k[0, 0, :, 0] = -torch.inf
    k[1, 1, 1:, 0] = -torch.inf  # one key is left
    given = {"sinks": SINKS["sinks"].to(backend)} if sinks else {}
    problem = replace(problem, q=problem.q.abs(), k=k).with_options(**given)
    out, lse = decode(problem)
    assert_within_bound(out, lse, expect(problem))
    assert (lse[0, :3] == -torch.inf).all() and (out[0, :3] == 0).all()
    assert lse[1, 3:].isfinite().all()


NOTHING: dict[str, Case] = {
    "batch-0": Case(*BF16, 32, 8, (), spare=65),
    "batch-0-empty-cache": Case(*BF16, 32, 8, (), spare=0),
    "q-len-0": Case(*BF16, 32, 8, (64, 0), q_len=0),
    "q-len-0-empty-cache": Case(*FP32, 4, 4, (0,), q_len=0, spare=0),
    "ragged-no-query": Case(*FP32, 4, 2, (64, 3), q_len=(0, 0)),
}


@on_every_backend
@pytest.mark.parametrize("layout", ["contiguous", "sequence-first", "paged-16"])
@pytest.mark.parametrize("name", NOTHING)
def test_calls_without_a_row(name: str, layout: str, backend: str) -> None:
    problem = arrange(NOTHING[name].build(backend), layout)
    out, lse = decode(problem)
    assert tuple(out.shape) == (*problem.q.shape[:-1], problem.v.shape[-1]) and out.numel() == 0
    assert tuple(lse.shape) == tuple(problem.q.shape[:-1]) and lse.numel() == 0
    assert out.dtype == problem.q.dtype


@on_every_backend
def test_packed_slots_of_no_sequence_are_empty(backend: str) -> None:
    problem = Case(*FP32, 8, 2, (130, 7, 65), q_len=(5, 0, 2), sinks=True).build(backend)
    wanted_out, wanted_lse = decode(problem)
    longer = replace(problem, q=torch.nn.functional.pad(problem.q, (0, 0, 0, 3), value=torch.nan))
    out = torch.full_like(longer.q, torch.nan)
    _, lse = decode(longer, out=out)
    assert_same_bits(out[:, :, :7], wanted_out)
    assert_same_bits(lse[:, :, :7], wanted_lse)
    assert (out[:, :, 7:] == 0).all() and (lse[:, :, 7:] == -torch.inf).all()


@on_every_backend
def test_no_pages_at_all(backend: str) -> None:
    q = torch.ones(2, 4, 1, 64, device=backend)
    pages = torch.empty(0, 2, 16, 64, device=backend)
    for max_pages in (0, 3):
        table = torch.full((2, max_pages), -1, dtype=torch.int32, device=backend)
        options = {"page_table": table, "seqlens": _int32(0, 0).to(backend)}
        out, lse = decode(Problem(q, pages, pages, options))
        assert_same_bits(out, torch.zeros_like(q))
        assert (lse == -torch.inf).all()


# Line 2: what no row sees (the grid is poisoned throughout; here the bits are compared with a clean cache)


@on_every_backend
@pytest.mark.parametrize("case", GRID[::5], ids=lambda case: case.id)
def test_poison_changes_no_bit(case: Case, backend: str) -> None:
    skip_unless_supported(case, backend)
    clean = case.build(backend)
    wanted_out, wanted_lse = decode(clean)
    for shift in range(3):
        out, lse = decode(poison_unseen(clean, shift))
        assert_same_bits(out, wanted_out)
        assert_same_bits(lse, wanted_lse)


# Line 3: NaN and Inf that are visible reach the rows that see them, and no other row


REACH: dict[str, Case] = {
    "plain": Case(*FP32, 8, 2, (130, 65, 7)),
    "causal": Case(*FP32, 8, 2, (130, 65, 7), q_len=5),
    "causal-bf16": Case(*BF16, 8, 1, (130, 65, 7), q_len=8),
    "causal-fp16": Case(*FP16_64, 8, 1, (130, 65, 7), q_len=3),
    "full": Case(*FP16, 3, 1, (130, 65), q_len=5, causal=False),
    "window": Case(*FP32, 8, 2, (130, 65, 7), q_len=17, window=4),
    "mask": Case(*BF16, 4, 2, (130, 65), q_len=2, mask="full"),
    "tree": Case(*FP16, 6, 3, (130, 65), q_len=8, mask="trees"),
    "sinks": Case(*FP32, 8, 1, (130, 65), q_len=2, sinks=True),
    "softcap": Case(*FP32, 8, 1, (130, 65), q_len=2, softcap=5.0),
    "ragged": Case(*BF16, 4, 1, (130, 65, 64), q_len=(5, 1, 2)),
    "latent": Case(torch.bfloat16, 576, 512, 8, 1, (130, 65), q_len=2, latent=True),
    "fp64": Case(torch.float64, 33, 33, 5, 1, (130, 65), q_len=5),
}

ROWS_DIFFER = ("plain", "causal", "causal-bf16", "causal-fp16", "window", "mask", "tree", "ragged", "fp64")
"""Of these: where some row sees what another does not."""


def _spoil(x: Tensor, value: float, *places: tuple[int, ...]) -> Tensor:
    x = x.clone()
    for place in places:
        x[place] = value
    return x


def _spoiled(case: Case, where: str, value: float) -> Problem:
    """The case with ``value`` in late keys, seen by few rows, and in key 60, seen by all that look back so far."""
    problem = case.build()
    late = [(b, b % case.kv_heads, length - 1 - b % 2) for b, length in enumerate(case.seqlens)]
    if where == "q":
        return replace(problem, q=_spoil(problem.q, value, (0, 1, 0, 2), (0, 2, problem.q.shape[2] - 1, 0)))
    if where == "k":
        k = _spoil(problem.k, value, *[(*key, 3) for key in late], (0, 0, 60, 1))
        return problem.with_caches(k, None if case.latent else problem.v)
    problem = problem.with_caches(problem.k, _spoil(problem.v, value, *[(*key, 3) for key in late], (0, 0, 60, 1)))
    if where == "v-weightless":  # scores about 1000 lower than the others weigh 0, and their values still count
        k = _spoil(problem.k, -1000.0, *[(*key, 0) for key in late])
        return replace(problem, q=_spoil(problem.q, 4.0, (..., 0)), k=k)
    return problem


@on_every_backend
@pytest.mark.parametrize("layout", ["contiguous", "paged-16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        (name, where)
        for name in REACH
        for where in ("q", "k", "v", "v-weightless")
        if (name, where[0]) != ("latent", "v")
    ],
)
def test_non_finite_values_reach_the_rows_that_see_them(
    name: str, where: str, value: float, layout: str, backend: str
) -> None:
    case = REACH[name]
    skip_unless_supported(case, backend)
    problem = _spoiled(case, where, value)
    wanted = expect(problem)
    if where[0] == "v" or value != value:  # an infinite key may come out as a score of -inf
        assert not wanted.out.isfinite().all()
    out, lse = decode(arrange(problem.to(backend), layout))
    assert_within_bound(out, lse, wanted)


@on_every_backend
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("name", ROWS_DIFFER)
def test_non_finite_values_change_no_bit_of_other_rows(name: str, where: str, backend: str) -> None:
    case = REACH[name]
    skip_unless_supported(case, backend)
    clean, spoiled = case.build(), _spoiled(case, where, torch.nan)
    bad = ~getattr(spoiled, where).isfinite().all(-1)  # (B, Hkv, capacity)
    bad = bad.repeat_interleave(case.q_heads // case.kv_heads, 1)[:, :, None]
    sees = (visible_keys(clean) & bad).any(-1)  # (B, Hq, max q_len)
    if isinstance(case.q_len, tuple):  # packed
        sees = torch.cat([sees[b, :, :n] for b, n in enumerate(case.q_len)], 1)[None]
    assert sees.any() and not sees.all()
    wanted_out, wanted_lse = decode(clean.to(backend))
    out, lse = decode(spoiled.to(backend))
    assert_same_bits(out[~sees], wanted_out[~sees])
    assert_same_bits(lse[~sees], wanted_lse[~sees])
    assert not out[sees].isfinite().all()


# Line 4: numbers of any size are ordinary input (the bound itself is checked everywhere)


def _scaled(case: Case, q: float = 1.0, k: float = 1.0, v: float = 1.0, shift: float = 0.0) -> Problem:
    problem = case.build()
    q_, k_ = problem.q.clone() * q, problem.k * k
    if shift:  # every score moves by about shift
        q_[..., 0], k_[..., 0] = abs(shift) ** 0.5, shift / abs(shift) ** 0.5
    return replace(problem, q=q_, k=k_, v=problem.v * v).with_options(scale=1.0 if shift else None)


EXTREMES: dict[str, Callable[[], Problem]] = {
    "scores-1e4-fp32": lambda: _scaled(Case(*FP32, 8, 2, (129, 513)), q=1e4),
    "scores-1e4-bf16": lambda: _scaled(Case(*BF16, 8, 2, (129, 513), q_len=5), q=100.0, k=100.0),
    "scores-1e4-fp16": lambda: _scaled(Case(*FP16, 3, 1, (129, 513)), q=100.0, k=100.0),
    "scores-1e4-fp16-16-rows": lambda: _scaled(Case(*FP16_64, 16, 1, (129, 513)), q=100.0, k=100.0),
    "all-at-minus-1e30": lambda: _scaled(Case(*BF16, 8, 2, (129, 513)), shift=-1e30),
    "all-at-plus-1e30": lambda: _scaled(Case(*FP32, 8, 2, (129, 513)), shift=1e30),
    "all-at-plus-1e4-sinks": lambda: _scaled(Case(*FP32, 8, 2, (129, 513), sinks=True), shift=1e4),
    "all-at-minus-1e4-sinks": lambda: _scaled(Case(*BF16, 8, 2, (129, 513), sinks=True), shift=-1e4),
    "values-1e30": lambda: _scaled(Case(*BF16, 8, 2, (129, 513)), v=1e30),
    "values-1e-30": lambda: _scaled(Case(*FP32, 8, 2, (129, 513)), v=1e-30),
    "values-fp16-largest": lambda: _scaled(Case(*FP16, 3, 1, (129, 513)), v=10000.0),
    "values-fp16-largest-16-rows": lambda: _scaled(Case(*FP16_64, 16, 1, (129, 513)), v=10000.0),
    "values-fp16-subnormal": lambda: _scaled(Case(*FP16, 3, 1, (129, 513)), v=2.0**-20),
    "values-fp16-subnormal-16-rows": lambda: _scaled(Case(*FP16_64, 16, 1, (129, 513)), v=2.0**-20),
    "keys-fp16-subnormal": lambda: _scaled(Case(*FP16, 3, 1, (129, 513)), k=2.0**-20, q=1000.0),
    "keys-fp16-subnormal-16-rows": lambda: _scaled(Case(*FP16_64, 16, 1, (129, 513)), k=2.0**-20, q=1000.0),
    "softcap-far-out": lambda: _scaled(Case(*FP32, 8, 2, (129, 513), softcap=50.0), q=1e4),
    "scale-0": lambda: Case(*BF16, 8, 2, (129, 513)).build().with_options(scale=0.0),
    "scale-negative": lambda: Case(*BF16, 8, 2, (129, 513)).build().with_options(scale=-2.0),
    "slopes-steep": lambda: Case(*FP32, 8, 2, (129, 513)).build().with_options(alibi_slopes=torch.full((8,), 50.0)),
    "slopes-slightly-negative": lambda: (
        Case(*FP32, 8, 2, (129, 513)).build().with_options(alibi_slopes=torch.full((8,), -0.02))
    ),
}


@on_every_backend
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_numbers(name: str, backend: str) -> None:
    problem = EXTREMES[name]()
    # One product makes the whole score, and tensor cores cut where they add.
    dwarfed = backend == "cuda" and name.startswith("all-at")
    roundings = worst_roundings(problem.q.shape[3], problem.q.dtype) if dwarfed else 4
    wanted = expect(problem, roundings)
    assert wanted.lse.isfinite().all() and wanted.out.isfinite().all()
    assert_within_bound(*decode(arrange(problem.to(backend), "paged-53")), wanted)


@on_every_backend
@pytest.mark.parametrize("shift", [1e4, -1e4, 6e4, -6e4, 1e6], ids="{:g}".format)
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kernel_class", [FP32, BF16, FP16_64], ids=["fp32", "bf16", "fp16"])
def test_one_product_dwarfs_the_others(kernel_class: Any, q_len: int, shift: float, backend: str) -> None:
    """All scores near ``shift``, from one dimension: every other product is added at its size."""
    problem = _scaled(Case(*kernel_class, 8, 2, (129, 513), q_len=q_len), shift=shift)
    wanted = expect(problem, worst_roundings(kernel_class[1], kernel_class[0]))
    assert_within_bound(*decode(problem.to(backend)), wanted)


@on_every_backend
@pytest.mark.parametrize(("gap", "large"), [(15.0, 60000.0), (18.0, 60000.0), (20.0, 1000.0), (24.0, 60000.0)])
def test_float16_weights_far_below_the_largest(gap: float, large: float, backend: str) -> None:
    """Where the key with nearly all of the weight has V = 0, a weight of e**-gap is the whole result."""
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 40, 64), torch.full((1, 1, 40, 64), large)
    q[..., 0] = 8.0
    k[0, 0, 1, 0], k[0, 0, 2:, 0], v[0, 0, 0] = -gap, -60.0, 0.0
    problem = Problem(*(x.half().to(backend) for x in (q, k, v)), {"scale": 0.125})
    assert_within_bound(*decode(problem), expect(problem.to("cpu")))


@on_every_backend
@pytest.mark.parametrize("ahead", [0.1, 0.75, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_lse_of_many_equal_scores(dtype: torch.dtype, ahead: float, backend: str) -> None:
    """One key is ahead of all others, so their weights are equal and have roundings of one sign when they are added up.
    On a GPU so many kv heads that each has few splits."""
    heads, length = 1 if backend == "cpu" else 264, 131072
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, length, 16), torch.ones(1, 1, length, 16)
    q[..., 0], k[0, 0, 0, 0] = 4.0, ahead
    one = Problem(*(x.to(backend, dtype) for x in (q, k, v)), {})
    out, lse = decode(Problem(*(x.expand(-1, heads, -1, -1) for x in (one.q, one.k, one.v)), {}))
    assert_within_bound(out[:, :1], lse[:, :1], expect(one.to("cpu")))
    assert_same_bits(lse, lse[:, :1].expand_as(lse))


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_nan_in_v_comes_through_scores_of_minus_infinity(dtype: torch.dtype, backend: str) -> None:
    """Also through splits in which no key has a weight."""
    q, k, v = torch.ones(1, 1, 1, 64), torch.zeros(1, 1, 2048, 64), torch.ones(1, 1, 2048, 64)
    k[:, :, :1024, 0], v[:, :, :1024, 5] = -torch.inf, torch.nan
    out, lse = decode(Problem(*(x.to(backend, dtype) for x in (q, k, v)), {}))
    assert out[0, 0, 0].isnan().nonzero().flatten().tolist() == [5] and lse.isfinite().all()


@on_every_backend
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("length", [40, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_is_not_finite_in_v_comes_through_a_large_sink(
    dtype: torch.dtype, length: int, value: float, backend: str
) -> None:
    problem = Case(dtype, 64, 64, 3, 1, (length,)).build(backend)
    problem.v[0, 0, 3, 5] = value
    out, _ = decode(problem.with_options(sinks=torch.tensor([2000.0, 0.0, torch.inf], device=backend)))
    for head in range(3):
        assert (~out[0, head, 0].isfinite()).nonzero().flatten().tolist() == [5]


def test_float64_sinks_far_from_equal_scores() -> None:
    """A sink is subtracted as it was given: a factor log2(e) on it would round at its size."""
    problem = Case(torch.float64, 33, 33, 8, 2, (130, 500)).build()
    sinks = torch.linspace(-9.0, 90.0, 8, dtype=torch.float64)
    problem = problem.with_caches(problem.k[:, :, :1].expand_as(problem.k), problem.v).with_options(sinks=sinks)
    assert_within_bound(*decode(problem), expect(problem))


@on_every_backend
def test_fp32_ignores_the_global_matmul_switch(backend: str) -> None:
    problem = Case(*FP32, 16, 2, (513, 129), q_len=8).build(backend)
    out, lse = decode(problem)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        switched_out, switched_lse = decode(problem)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same_bits(switched_out, out)
    assert_same_bits(switched_lse, lse)
