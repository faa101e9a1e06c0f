"""The grid: every case on every backend and cache layout, against float64, with poison around the valid slots."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from backends import decode, on_every_backend, skip_unless_supported

from flashdecoding.testing import (
    GRID,
    LAYOUTS,
    RAGGED,
    SIZES,
    Case,
    Expected,
    Problem,
    arrange,
    assert_same_bits,
    assert_within_bound,
    expect,
    poisoned_out,
)

each_case = pytest.mark.parametrize("case", GRID, ids=lambda case: case.id)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)

ZERO_QUERIES = tuple(replace(case, name="zero-q", spread=0.0) for case in GRID[::4])
WILD = tuple(replace(case, name="wild", spread=40.0) for case in GRID[1::4])


@lru_cache(maxsize=8)
def _expected(case: Case) -> Expected:
    return expect(case.build())


@on_every_backend
@each_case
@each_layout
def test_grid_within_bound(case: Case, layout: str, backend: str) -> None:
    skip_unless_supported(case, backend)
    problem = arrange(case.build(backend), layout)
    out, lse = decode(problem)
    assert out.dtype == case.dtype
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_within_bound(out, lse, _expected(case), layout)


@on_every_backend
@each_case
def test_layout_changes_no_bit(case: Case, backend: str) -> None:
    skip_unless_supported(case, backend)
    built = case.build(backend)
    clean_out, clean_lse = decode(built)
    for number, layout in enumerate(LAYOUTS):
        out, lse = decode(arrange(built, layout, seed=number + 1))
        assert_same_bits(out, clean_out, f"{layout} out")
        assert_same_bits(lse, clean_lse, f"{layout} lse")


@on_every_backend
@pytest.mark.parametrize("layout", ["sequence-first", "paged-16"])
@pytest.mark.parametrize("case", ZERO_QUERIES, ids=lambda case: case.id)
def test_zero_query_weighs_every_visible_key_alike(case: Case, layout: str, backend: str) -> None:
    """All scores are the bias alone, so a key left out, or counted twice, moves the lse by far more than its bound."""
    skip_unless_supported(case, backend)
    problem = arrange(case.build(backend), layout)
    assert_within_bound(*decode(problem), _expected(case), layout)


@on_every_backend
@pytest.mark.parametrize("case", WILD, ids=lambda case: case.id)
def test_large_scores(case: Case, backend: str) -> None:
    """Scores in the hundreds and thousands: one key takes nearly all of the weight, and maxima jump between tiles."""
    skip_unless_supported(case, backend)
    assert_within_bound(*decode(arrange(case.build(backend), "paged-53")), _expected(case))


@on_every_backend
@each_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_one_hot_keys_pick_their_value(dtype: torch.dtype, layout: str, backend: str) -> None:
    """Query row i is e_i, and key t_i alone is e_i: the output is V[t_i] to the last bit, the lse is the one score."""
    length, picks = 1100, [0, 1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 1098, 1099]
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(2, 2, length, 64, generator=generator).to(dtype)
    q = torch.eye(16, 64)[None, None].repeat(2, 4, 1, 1)
    k = torch.zeros(2, 2, length, 64)
    for row, key in enumerate(picks):
        k[0, :, key, row] = 128.0
        k[1, :, length - 1 - key, row] = 128.0
    lens = torch.tensor([length, length], dtype=torch.int32)
    options = {"seqlens": lens.to(backend), "scale": 1.0, "causal": False}
    problem = Problem(q.to(backend, dtype), k.to(backend, dtype), v.to(backend), options)
    out, lse = decode(arrange(problem, layout))
    index = torch.tensor([picks, [length - 1 - key for key in picks]], device=backend)
    wanted = problem.v.gather(2, index[:, None, :, None].expand(2, 2, 16, 64)).repeat_interleave(2, dim=1)
    assert_same_bits(out, wanted, layout)
    assert_same_bits(lse, torch.full_like(lse, 128.0), layout)


@on_every_backend
@each_layout
@pytest.mark.parametrize("case", SIZES[::3] + RAGGED[::3], ids=lambda case: case.id)
def test_out_is_written_whole_and_returned(case: Case, layout: str, backend: str) -> None:
    skip_unless_supported(case, backend)
    problem = arrange(case.build(backend), layout)
    wanted_out, wanted_lse = decode(problem)
    buffer = poisoned_out(problem)
    holder = poisoned_out(problem).repeat(1, 2, 1, 2)  # out may be a view with any strides
    view = holder[:, 1::2, :, 1::2]
    for given in (buffer, view):
        out, lse = decode(problem, out=given)
        assert out is given
        assert_same_bits(given, wanted_out)
        assert_same_bits(lse, wanted_lse)
    assert holder[:, ::2].isnan().all() and holder[..., ::2].isnan().all()


@on_every_backend
@pytest.mark.parametrize("q_len", [1, 5])
def test_out_keeps_the_stride_order_of_q(q_len: int, backend: str) -> None:
    case = Case(torch.float32, 64, 64, 8, 2, (70, 3), q_len=q_len)
    problem = case.build(backend)
    assert decode(problem)[0].is_contiguous()
    sequence_first = replace(problem, q=problem.q.transpose(1, 2).contiguous().transpose(1, 2))
    assert decode(sequence_first)[0].transpose(1, 2).is_contiguous()
    heads_first = replace(problem, q=problem.q.transpose(0, 1).contiguous().transpose(0, 1))
    assert decode(heads_first)[0].transpose(0, 1).is_contiguous()
