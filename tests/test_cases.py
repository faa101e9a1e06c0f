"""Inputs on which other libraries were reported to fail, one test for each report, named by its id.

Sizes are cut where they can be without losing what made the input fail. Reports about far pages
(B27, B29, B30, B31) are in `test_strides.py`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import decode, on_every_backend

from flashdecoding import AttentionState, decode_attention, merge_states, partial_attention, plan_decode
from flashdecoding.testing import (
    LAYOUTS,
    Case,
    Problem,
    arrange,
    assert_same_bits,
    assert_within_bound,
    expect,
)

FP16_64 = (torch.float16, 64, 64)
BF16_64 = (torch.bfloat16, 64, 64)
FP32_64 = (torch.float32, 64, 64)
BF16_128 = (torch.bfloat16, 128, 128)
FP16_256 = (torch.float16, 256, 256)
LATENT = (torch.bfloat16, 576, 512)

# Cases that are right when they are within the bound, with NaN and Inf around the valid slots, in every layout.
GRID: dict[str, Case] = {
    "B06-one-head-nan-tail": Case(*FP16_64, 1, 1, (1, 3), spare=0),
    "B07-ragged-nan-tail": Case(*BF16_64, 8, 8, (32, 64, 96, 48), spare=32),
    "B09-latent-page-4-len-13": Case(*LATENT, 16, 1, (13,), spare=3, latent=True),
    "B10-nan-tail-37-of-300": Case(*FP32_64, 4, 4, (37, 300), spare=0),
    "B11-window-over-freed-pages": Case(*BF16_128, 8, 2, (1025, 700), window=64),
    "B15-length-0-row": Case(*FP16_64, 8, 2, (70, 0)),
    "B17-all-lengths-0": Case(*BF16_128, 16, 16, (0, 0, 0, 0), spare=0),
    "B19-len-127-to-130": Case(*BF16_128, 6, 1, (127, 128, 129, 130)),
    "B21-len-96-to-98": Case(*BF16_128, 8, 1, (96, 97, 98)),
    "B22-empty-request-before-another": Case(*BF16_128, 32, 32, (0, 17)),
    "B34-more-threads-than-keys": Case(*BF16_128, 32, 8, (1, 2, 3)),
    "B35-graph-padding-rows": Case(*LATENT, 16, 1, (64, 300, 5, 0), latent=True),
    "B47-drafts-window-1024": Case(*FP16_256, 32, 16, (1100,), q_len=8, window=1024),
    "B48-drafts-each-with-its-window": Case(*BF16_128, 8, 2, (200, 65), q_len=8, window=16),
    "B53-group-5": Case(*BF16_128, 20, 4, (300, 65)),
    "B53-group-7": Case(*BF16_128, 28, 4, (300, 65)),
    "B53-group-16": Case(*BF16_128, 64, 4, (300, 65)),
    "B54-head-dim-192": Case(torch.bfloat16, 192, 128, 12, 2, (129, 65)),
    "B54-head-dim-96-group-6": Case(torch.float16, 96, 96, 12, 2, (129, 65)),
    "B57-sinks-are-applied": Case(*BF16_128, 8, 2, (129, 65), sinks=True),
    "B58-bottom-right": Case(*FP32_64, 2, 2, (4,), q_len=2, spare=0),
    "B59-len-128-plus-i": Case(*FP16_64, 16, 16, tuple(128 + i for i in range(8))),
    "B59-q-len-100": Case(*FP16_64, 2, 1, (130, 100), q_len=100),
    "B65-mask-over-a-padded-batch": Case(*BF16_64, 8, 2, (70, 33), q_len=2, mask="batch"),
    "B66-full-with-drafts": Case(*BF16_128, 8, 2, (70, 33), q_len=4, causal=False, alibi="heads"),
}


@on_every_backend
@pytest.mark.parametrize("layout", (*LAYOUTS, "paged-4", "paged-128"))
@pytest.mark.parametrize("name", GRID)
def test_within_bound(name: str, layout: str, backend: str) -> None:
    case = GRID[name]
    out, lse = decode(arrange(case.build(backend), layout))
    assert out.isfinite().all()
    assert_within_bound(out, lse, expect(case.build()), name)


@on_every_backend
def test_b04_capacity_far_past_the_length(backend: str) -> None:
    problem = Case(*BF16_128, 8, 2, (4096,), spare=60000).build(backend)
    tight = problem.with_caches(problem.k[:, :, :4096], problem.v[:, :, :4096])
    for wanted, actual in zip(decode(tight), decode(problem), strict=True):
        assert_same_bits(actual, wanted)


@on_every_backend
def test_b10_masked_key_holds_nan(backend: str) -> None:
    problem = Case(*FP32_64, 2, 2, (4,), spare=0).build()
    problem = problem.with_options(mask=torch.tensor([True, True, True, False]).view(1, 1, 1, 4))
    wanted = expect(problem)
    for x in (problem.k, problem.v):
        spoiled = x.clone()
        spoiled[:, :, 3] = torch.nan
        k, v = (spoiled, problem.v) if x is problem.k else (problem.k, spoiled)
        assert_within_bound(*decode(problem.with_caches(k, v).to(backend)), wanted)


@on_every_backend
def test_b12_one_more_token_each_step(backend: str) -> None:
    """A paged cache that grows by a token a step gives, at each step, what a fresh contiguous one gives."""
    problem = Case(*BF16_128, 8, 2, (640, 640)).build(backend)
    paged = arrange(problem, "paged-16")
    for length in [*range(500, 532), *range(630, 641)]:
        lens = torch.tensor([length, length - 99], dtype=torch.int32, device=backend)
        wanted = decode(problem.with_options(seqlens=lens))
        actual = decode(paged.with_options(seqlens=lens))
        assert wanted[0].isfinite().all()
        assert_same_bits(actual[0], wanted[0], f"step {length}")
        assert_same_bits(actual[1], wanted[1], f"step {length}")


@on_every_backend
@pytest.mark.parametrize(("batch", "q_len", "length"), [(2, 0, 5), (0, 64, 64), (2, 0, 0)])
def test_b16_no_query(batch: int, q_len: int, length: int, backend: str) -> None:
    q = torch.ones(batch, 8, q_len, 64, dtype=torch.bfloat16, device=backend)
    k = torch.ones(batch, 8, length, 64, dtype=torch.bfloat16, device=backend)
    out, lse = decode(Problem(q, k, k, {}))
    assert out.shape == q.shape and lse.shape == q.shape[:3]


@on_every_backend
def test_b18_length_past_the_page_table(backend: str) -> None:
    problem = arrange(Case(*FP32_64, 8, 2, (256,), spare=0).build(backend), "paged-256")
    assert tuple(problem.options["page_table"].shape) == (1, 1)
    assert_within_bound(*decode(problem), expect(Case(*FP32_64, 8, 2, (256,), spare=0).build()))
    with pytest.raises(ValueError, match=r"257(?s:.*)256|256(?s:.*)257"):
        decode(problem.with_options(seqlens=[257]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_b23_merge_of_two_empty_states(dtype: torch.dtype) -> None:
    empty = AttentionState.empty(2, 8, 3, 64, dtype=dtype)
    given = AttentionState.from_lse(torch.zeros(2, 8, 3, 64), torch.full((2, 8, 3), -torch.inf))
    for state in (empty.merge(empty), merge_states([given, given, given])):
        assert (state.o == 0).all() and (state.lse == -torch.inf).all() and (state.finalize() == 0).all()


@on_every_backend
def test_b25_all_scores_far_below_zero(backend: str) -> None:
    """Softmax does not change when all scores shift by as much: here by exactly 65536, down and up."""
    problem = Case(*BF16_128, 8, 2, (300, 65), spare=0).build()
    q, k = torch.zeros_like(problem.q), torch.zeros_like(problem.k)
    q[..., 0], q[..., 1] = 1.0, 256.0
    k[..., 0] = torch.arange(300) % 7
    plain = replace(problem, q=q, k=k).with_options(scale=1.0)
    wanted = expect(plain)
    for shift in (-256.0, 256.0):
        k = k.clone()
        k[..., 1] = shift
        shifted = expect(plain.with_caches(k, problem.v))
        torch.testing.assert_close(shifted.out, wanted.out, rtol=1e-9, atol=1e-9)
        assert_within_bound(*decode(plain.with_caches(k, problem.v).to(backend)), shifted)


@on_every_backend
def test_b32_softcap_of_large_scores(backend: str) -> None:
    scores = [1000.0, 3000.0, 5000.0, 10000.0, -10000.0, 4400.0]
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 6, 64)
    k[0, 0, :, 0] = torch.tensor(scores)
    v = torch.randn(1, 1, 6, 64, generator=torch.Generator().manual_seed(1))
    problem = Problem(q, k, v, {"scale": 1.0, "softcap": 50.0})
    wanted = expect(problem)
    capped = torch.tensor([50.0, 50.0, 50.0, 50.0, -50.0, 50.0], dtype=torch.float64)
    torch.testing.assert_close(wanted.out[0, 0, 0], torch.softmax(capped, 0) @ v[0, 0].double())
    assert_within_bound(*decode(problem.to(backend)), wanted)
    for key, score in enumerate(capped.tolist()):  # each score by itself, as its lse
        lse = decode(problem.with_caches(k[:, :, key : key + 1], v[:, :, key : key + 1]).to(backend))[1]
        assert lse.item() == pytest.approx(score, abs=1e-4)


@on_every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b36_out_of_an_empty_sequence_held_nan(layout: str, backend: str) -> None:
    problem = arrange(Case(*FP16_64, 8, 2, (0, 70, 0)).build(backend), layout)
    out = torch.full_like(problem.q, torch.nan)
    lse = decode(problem, out=out)[1]
    assert (out[::2] == 0).all() and (lse[::2] == -torch.inf).all()
    assert out[1].isfinite().all()


@on_every_backend
def test_b39_k_and_v_have_strides_of_their_own(backend: str) -> None:
    case = Case(*BF16_128, 8, 2, (300, 65))
    problem = case.build(backend)
    thinned = torch.full((2, 2, 2 * case.capacity, 128), torch.nan, dtype=torch.bfloat16, device=backend)
    thinned[:, :, ::2] = problem.k
    wanted = decode(problem)
    swapped = torch.full_like(thinned, torch.inf)
    swapped[:, :, 1::2] = problem.v
    for k, v in (
        (thinned[:, :, ::2], problem.v),
        (problem.k, swapped[:, :, 1::2]),
        (problem.k.transpose(1, 2).contiguous().transpose(1, 2), problem.v),
        (problem.k, problem.v.transpose(0, 2).contiguous().transpose(0, 2)),
    ):
        actual = decode(problem.with_caches(k, v))
        assert_same_bits(actual[0], wanted[0])
        assert_same_bits(actual[1], wanted[1])


@pytest.mark.parametrize("case_id", ["B40", "B41"])
def test_scales_of_a_cache_are_never_dropped(case_id: str) -> None:
    """B40: strided scales; B41: k_scale .25 and v_scale .5 of an 8-bit cache."""
    q = torch.randn(1, 8, 1, 64)
    k = torch.ones(1, 2, 70, 64)
    strided = torch.ones(1, 2, 140)[..., ::2]
    scales: dict[str, Any] = {"k_scale": strided} if case_id == "B40" else {"k_scale": 0.25, "v_scale": 0.5}
    with pytest.raises(NotImplementedError, match="k_scale"):
        decode_attention(q, k, k, **scales)


@on_every_backend
def test_b42_lse_is_natural_and_merges_with_a_long_prefix(backend: str) -> None:
    problem = Case(*BF16_128, 8, 2, (4100,), spare=0, q_len=4).build(backend)
    ones = problem.with_options(scale=0.0)
    torch.testing.assert_close(decode(ones, causal=False)[1], torch.full((1, 8, 4), math.log(4100.0), device=backend))
    prefix = problem.with_caches(problem.k[:, :, :4096], problem.v[:, :, :4096])
    tail = problem.with_caches(problem.k[:, :, 4096:], problem.v[:, :, 4096:])
    pieces = [
        AttentionState.from_lse(*decode(prefix.with_options(seqlens=None, causal=False))),
        AttentionState.from_lse(*decode(tail.with_options(seqlens=None))),
    ]
    wanted = expect(Case(*BF16_128, 8, 2, (4100,), spare=0, q_len=4).build())
    merged = merge_states(pieces)
    assert (merged.lse.cpu() - wanted.lse).abs().max() < 5e-4
    assert (merged.finalize().cpu() - wanted.out).abs().max() < 5e-4


def _plan(problem: Problem, seqlens: Any = None, **more: Any) -> Any:
    sizes = {"q_heads": problem.q.shape[1], "kv_heads": problem.k.shape[1], "head_dim": problem.q.shape[3]}
    sizes |= {"head_dim_v": problem.v.shape[3], "q_len": problem.q.shape[2]}
    lens = problem.options["seqlens"] if seqlens is None else seqlens
    return plan_decode(lens, dtype=problem.q.dtype, device=problem.q.device, **sizes, **more)


@on_every_backend
def test_b43_host_maximum_changes_no_bit(backend: str) -> None:
    problem = Case(*BF16_128, 8, 2, (1500, 65, 700)).build(backend)
    wanted = decode(problem.with_options(plan=_plan(problem)))
    for max_seqlen in (1500, 1501, 4096, 131072):
        actual = decode(problem.with_options(plan=_plan(problem, max_seqlen=max_seqlen)))
        assert_same_bits(actual[0], wanted[0], f"max_seqlen {max_seqlen}")
        assert_same_bits(actual[1], wanted[1], f"max_seqlen {max_seqlen}")


@on_every_backend
def test_b45_plan_made_for_short_rows_then_updated(backend: str) -> None:
    """What a captured graph does: one plan object, later lengths, the longest in another slot."""
    problem = Case(*BF16_128, 8, 2, (3000, 3000, 3000, 3000)).build(backend)
    plan = _plan(problem, seqlens=[3000, 1, 1, 1], max_seqlen=3000)
    for lengths in ([3000, 1, 1, 1], [1, 3000, 2999, 0], [3000, 3000, 3000, 3000]):
        plan.update(lengths)
        stepped = problem.with_options(seqlens=torch.tensor(lengths, dtype=torch.int32, device=backend))
        out, lse = decode(problem.with_options(seqlens=None, plan=plan))
        assert_within_bound(out, lse, expect(stepped.to("cpu")), str(lengths))


REFUSED: dict[str, Callable[[], object]] = {
    "B50-mask-of-half-the-cache": lambda: decode_attention(
        torch.ones(1, 8, 10, 128), *[torch.ones(1, 4, 20, 128)] * 2, mask=torch.ones(1, 1, 10, 15, dtype=torch.bool)
    ),
    "B50-mask-without-batch-and-heads": lambda: decode_attention(
        torch.ones(1, 8, 10, 128), *[torch.ones(1, 4, 20, 128)] * 2, mask=torch.ones(10, 15, dtype=torch.bool)
    ),
    "B51-more-keys-than-the-pages-hold": lambda: decode_attention(
        torch.ones(1, 8, 1, 64),
        *[torch.ones(4, 4, 16, 64)] * 2,
        page_table=torch.tensor([[0, 1]], dtype=torch.int32),
        seqlens=[33],
    ),
    "B67-minus-1-within-the-length": lambda: decode_attention(
        torch.ones(1, 8, 1, 64),
        *[torch.ones(4, 4, 16, 64)] * 2,
        page_table=torch.tensor([[0, -1]], dtype=torch.int32),
        seqlens=[17],
    ),
}
OFFENDING = {"B50-mask-of-half-the-cache": "10, 15", "B50-mask-without-batch-and-heads": "10, 15"}
OFFENDING |= {"B51-more-keys-than-the-pages-hold": "33", "B67-minus-1-within-the-length": "-1"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(ValueError) as raised:
        REFUSED[name]()
    assert OFFENDING[name] in str(raised.value)


@on_every_backend
@pytest.mark.parametrize("window", [None, 600])
def test_b56_sink_counts_once_whatever_splits_are_empty(window: int | None, backend: str) -> None:
    """Splits before kv_begin, or before the window, hold no visible key; a sequence without keys has no sink either."""
    case = Case(*BF16_128, 8, 2, (4000, 3000, 700, 0), window=window, sinks=True)
    problem = case.build()
    begin = torch.tensor([3990, 1500, 700, 0], dtype=torch.int32)
    problem = problem.with_options(kv_begin=begin, sinks=torch.full((8,), 5.0))
    out, lse = decode(arrange(problem.to(backend), "paged-53"))
    assert_within_bound(out, lse, expect(problem))
    assert (out[2:] == 0).all() and (lse[2:] == -torch.inf).all()
    sinkless = decode(problem.with_options(sinks=None).to(backend))[1]
    assert_same_bits(lse, sinkless, "sinks are not counted in the lse")


@on_every_backend
def test_b63_row_alone_and_in_a_batch(backend: str) -> None:
    problem = Case(*BF16_128, 32, 8, (2500, 2500, 2500, 2500), spare=0).build(backend)
    out, lse = decode(problem.with_options(plan=_plan(problem, batch_invariant=True)))
    for b in range(4):
        row = problem.sequence(b)
        alone = decode(row.with_options(plan=_plan(row, batch_invariant=True)))
        assert_same_bits(alone[0], out[b : b + 1])
        assert_same_bits(alone[1], lse[b : b + 1])


@on_every_backend
def test_b65_padding_mask_equals_begin_and_length(backend: str) -> None:
    problem = Case(*BF16_64, 8, 2, (70, 70), spare=0).build(backend)
    begin = torch.tensor([0, 37], dtype=torch.int32, device=backend)
    mask = torch.arange(70, device=backend) >= begin[:, None]
    wanted = expect(problem.with_options(kv_begin=begin))
    masked = decode(problem.with_options(mask=mask[:, None, None]))
    assert_within_bound(*masked, wanted)
    assert_within_bound(*decode(problem.with_options(kv_begin=begin)), wanted)
    assert not torch.equal(masked[0], decode(problem)[0])


@on_every_backend
def test_b66_positions_of_drafts_are_explicit(backend: str) -> None:
    """Four new queries stand at four positions, with and without the causal mask, as ALiBi shows."""
    problem = Case(*BF16_128, 8, 2, (70,), q_len=4, spare=0, causal=False, alibi="heads").build(backend)
    options = {"alibi_slopes": problem.options["alibi_slopes"], "causal": False}
    together = partial_attention(problem.q, problem.k, problem.v, **options)
    wanted = expect(problem)
    assert_within_bound(together.o, together.lse, wanted)
    for i in range(4):
        one = partial_attention(problem.q[:, :, i : i + 1], problem.k, problem.v, q_start=66 + i, **options)
        rows = replace(wanted, **{name: bound[:, :, i : i + 1] for name, bound in vars(wanted).items()})
        assert_within_bound(one.o, one.lse, rows)
    assert not torch.equal(together.lse[:, :, 0], together.lse[:, :, 3])


@on_every_backend
def test_b67_page_table_padded_with_minus_1(backend: str) -> None:
    problem = Case(*FP32_64, 8, 2, (1, 40, 0, 64)).build(backend)
    wanted = decode(problem)
    paged = arrange(problem, "paged-16")
    for padding in (-1, 2**31 - 1):
        table = paged.options["page_table"].clone()
        used = torch.arange(table.shape[1], device=backend) * 16 < problem.options["seqlens"][:, None]
        table[~used] = padding
        actual = decode(paged.with_options(page_table=table))
        assert_same_bits(actual[0], wanted[0])
        assert_same_bits(actual[1], wanted[1])
