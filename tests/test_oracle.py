"""The oracle against the definition of visibility and scores, spelled out row by row and key by key in plain Python."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdecoding.reference import reference_attention, reference_bounds
from flashdecoding.state import AttentionState, merge_states

INF, NAN = math.inf, math.nan
HEADS, KV_HEADS, D, DV = 6, 2, 5, 3


def inputs(seed: int = 0, batch: int = 3, q_len: int = 3, kv_len: int = 11, dtype: torch.dtype = torch.float32) -> Any:
    """q (batch, 6, q_len, 5), k (batch, 2, kv_len, 5), v (batch, 2, kv_len, 3)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, q_len, D), (batch, KV_HEADS, kv_len, D), (batch, KV_HEADS, kv_len, DV)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def one_row(
    q: list[float],
    keys: list[list[float]],
    values: list[list[float]],
    bias: list[float],
    options: dict[str, Any],
    sink: float,
) -> tuple[list[float], float, list[float], float]:
    """Output, lse, P|V| and A of one row over the keys it sees, in Python floats."""
    scale = options.get("scale") or 1 / math.sqrt(D)
    cap = options.get("softcap")
    products = [[a * b for a, b in zip(q, key, strict=True)] for key in keys]
    scores = [scale * math.fsum(p) for p in products]
    scores = [(cap * math.tanh(s / cap) if cap else s) - b for s, b in zip(scores, bias, strict=True)]
    if not scores:
        return [0.0] * DV, -INF, [0.0] * DV, 0.0
    top = max(*scores, sink)
    exps = [math.exp(s - top) for s in scores]
    total = math.fsum([*exps, math.exp(sink - top)])
    out = [math.fsum(e * value[d] for e, value in zip(exps, values, strict=True)) / total for d in range(DV)]
    bound = [math.fsum(e * abs(value[d]) for e, value in zip(exps, values, strict=True)) / total for d in range(DV)]
    lse = max(scores) + math.log(math.fsum(math.exp(s - max(scores)) for s in scores))
    return out, lse, bound, abs(scale) * max(math.fsum(map(abs, p)) for p in products)


def by_the_definition(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Output, lse, P|V| and A for contiguous caches and unpacked queries: every loop and every rule spelled out."""
    batch, heads, q_len, _ = q.shape
    seqlens = options.get("seqlens") or [k.shape[2]] * batch
    kv_start = options.get("kv_start", 0)
    block, stride = options.get("kv_block") or k.shape[2], options.get("kv_stride") or 0
    rows = []
    for b in range(batch):
        q_start = options["q_start"] if "q_start" in options else kv_start + seqlens[b] - q_len
        for h in range(heads):
            for i in range(q_len):
                seen, bias = [], []
                for j in range(seqlens[b]):
                    position, query = kv_start + j // block * stride + j % block, q_start + i
                    sees = j >= options.get("kv_begin", [0] * batch)[b]
                    sees &= not options.get("causal", True) or position <= query
                    sees &= options.get("window") is None or position > query - options["window"]
                    mask = options.get("mask")
                    if mask is not None and mask.ndim == 4:
                        sees &= bool(mask[b % mask.shape[0], h % mask.shape[1], i, j])
                    elif mask is not None and q_start <= position < q_start + q_len:
                        sees &= bool(mask[b % mask.shape[0], i, position - q_start])
                    if sees:
                        slopes = options.get("alibi_slopes", torch.zeros(heads))
                        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
                        seen.append(j)
                        bias.append(float(slope) * abs(query - position))
                group = h // (heads // k.shape[1])
                sink = float(options["sinks"][h]) if "sinks" in options else -INF
                k_rows, v_rows = k[b, group, seen].tolist(), v[b, group, seen].tolist()
                rows.append(one_row(q[b, h, i].tolist(), k_rows, v_rows, bias, options, sink))
    shapes = (batch, heads, q_len, DV), (batch, heads, q_len), (batch, heads, q_len, DV), (batch, heads, q_len)
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    return tuple(torch.tensor(c, dtype=torch.float64).view(s) for c, s in zip(columns, shapes, strict=True))


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.6


SLOPES = torch.tensor([0.5, 0.25, 1.0, 0.0, 0.1, 0.7])
SINKS = torch.tensor([0.0, 1.0, -INF, -3.0, 5.0, 40.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"seqlens": [11, 4, 1]},
    "shorter than the queries": {"seqlens": [2, 1, 0]},
    "not causal": {"causal": False, "seqlens": [11, 4, 1]},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "left padding": {"kv_begin": [0, 3, 11], "seqlens": [11, 9, 10]},
    "window 1": {"window": 1},
    "window": {"window": 4, "seqlens": [11, 6, 3]},
    "window not causal": {"window": 4, "causal": False, "seqlens": [11, 6, 3]},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": SINKS, "seqlens": [11, 1, 0]},
    "huge sinks": {"sinks": 1e4 * SINKS.sign(), "seqlens": [11, 1, 0]},
    "alibi by head": {"alibi_slopes": SLOPES},
    "alibi by sequence": {"alibi_slopes": torch.stack([SLOPES, SLOPES * 2, -SLOPES]), "causal": False},
    "softcap before alibi": {"softcap": 0.7, "alibi_slopes": SLOPES},
    "mask": {"mask": random_mask(3, HEADS, 3, 11), "seqlens": [11, 7, 2]},
    "mask for all": {"mask": random_mask(1, 1, 3, 11), "causal": False},
    "mask of nothing": {"mask": torch.zeros(3, 1, 3, 11, dtype=torch.bool)},
    "draft tree": {"mask": random_mask(3, 3, 3), "seqlens": [11, 7, 3]},
    "draft tree for all, not causal": {"mask": random_mask(1, 3, 3), "causal": False},
    "draft tree longer than the cache": {"mask": random_mask(1, 3, 3), "seqlens": [11, 2, 1]},
    "prefix": {"q_start": 20, "alibi_slopes": SLOPES, "window": 14},
    "later piece": {"kv_start": 5, "q_start": 9, "seqlens": [11, 4, 0], "alibi_slopes": SLOPES},
    "shifted": {"kv_start": 100, "window": 5},
    "blocks": {"kv_block": 2, "kv_stride": 6, "kv_start": 2, "q_start": 22, "window": 13, "alibi_slopes": SLOPES},
    "draft tree over blocks": {"kv_block": 2, "kv_stride": 3, "q_start": 12, "mask": random_mask(3, 3, 3)},
    "many": {"seqlens": [10, 5, 2], "kv_begin": [1, 0, 1], "window": 5, "softcap": 2.0, "sinks": SINKS,
             "alibi_slopes": SLOPES, "mask": random_mask(1, HEADS, 3, 11)},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_against_the_definition(options: dict[str, Any]) -> None:
    q, k, v = inputs()
    out, lse, weight_abs_v, score_bound = by_the_definition(q, k, v, **options)
    got, got_lse = reference_attention(q, k, v, **options, return_lse=True)
    assert got.dtype == got_lse.dtype == torch.float64
    close = {"rtol": 1e-13, "atol": 1e-14}
    torch.testing.assert_close(got, out, **close)
    torch.testing.assert_close(got_lse, lse, **close)
    torch.testing.assert_close(reference_bounds(q, k, v, **options)[0], weight_abs_v, **close)
    torch.testing.assert_close(reference_bounds(q, k, v, **options)[1], score_bound, **close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_are_computed_in_float64(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    torch.testing.assert_close(reference_attention(q, k, v), by_the_definition(q, k, v)[0], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    "shape", [(0, 3, 11), (2, 0, 11), (2, 3, 0), (0, 0, 0)], ids=["batch 0", "q_len 0", "S 0", "all 0"]
)
@pytest.mark.parametrize(
    "options", [{}, {"sinks": SINKS, "window": 2, "alibi_slopes": SLOPES}], ids=["plain", "features"]
)
def test_sizes_of_zero(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    q, k, v = inputs(0, *shape)
    out, lse = reference_attention(q, k, v, **options, return_lse=True)
    assert out.shape == (*q.shape[:3], DV) and (out == 0).all()
    assert lse.shape == q.shape[:3] and (lse == -INF).all()
    assert all((bound == 0).all() for bound in reference_bounds(q, k, v, **options))


@pytest.mark.parametrize("as_given", [list, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lengths_in_every_form(as_given: Any) -> None:
    q, k, v = inputs()
    wanted = by_the_definition(q, k, v, seqlens=[5, 5, 5], kv_begin=[1, 1, 1])[0]
    torch.testing.assert_close(
        reference_attention(q, k, v, seqlens=as_given([5, 5, 5]), kv_begin=as_given([1, 1, 1])), wanted
    )
    torch.testing.assert_close(reference_attention(q, k, v, seqlens=5, kv_begin=1), wanted)
    plan = SimpleNamespace(seqlens=torch.tensor([5, 5, 5]))
    torch.testing.assert_close(reference_attention(q, k, v, plan=plan, kv_begin=1), wanted)


def paged(k: Tensor, seqlens: list[int], page_size: int) -> tuple[Tensor, Tensor]:
    """k in shuffled pages whose other slots are NaN, and a table whose other entries are no page."""
    batch, heads, _, dim = k.shape
    max_pages = -(-k.shape[2] // page_size) + 1
    order = torch.randperm(batch * max_pages, generator=torch.Generator().manual_seed(3)).view(batch, max_pages)
    pages = torch.full((batch * max_pages, heads, page_size, dim), NAN, dtype=k.dtype)
    table = torch.full((batch, max_pages), -1, dtype=torch.int32)
    table[:, ::2] = 2**31 - 1
    for b, length in enumerate(seqlens):
        for j in range(length):
            page = order[b, j // page_size]
            table[b, j // page_size] = page
            pages[page, :, j % page_size] = k[b, :, j]
    return pages, table


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "options", [{}, {"window": 3, "kv_begin": [2, 0, 0]}, {"mask": True}], ids=["plain", "window", "mask"]
)
def test_pages_give_what_contiguous_caches_give(page_size: int, options: dict[str, Any]) -> None:
    q, k, v = inputs()
    seqlens = [11, 4, 0]
    k_pages, table = paged(k, seqlens, page_size)
    v_pages, _ = paged(v, seqlens, page_size)
    contiguous, capacity = dict(options), table.shape[1] * page_size
    if "mask" in options:
        options = {"mask": random_mask(3, 1, 3, capacity)}
        contiguous = {"mask": options["mask"][..., :11] if capacity >= 11 else options["mask"]}
    wanted = reference_attention(q, k, v, seqlens=seqlens, **contiguous)
    got = reference_attention(q, k_pages, v_pages, seqlens=seqlens, page_table=table, **options)
    assert torch.equal(got, wanted)


def test_pages_that_no_row_sees_are_not_read_and_others_must_exist() -> None:
    q, k, v = inputs(batch=1, q_len=1)
    (k_pages, table), (v_pages, _) = paged(k, [11], 4), paged(v, [11], 4)
    table[0, 0] = -1  # keys 0 to 3
    wanted = reference_attention(q, k, v, window=7)
    assert torch.equal(reference_attention(q, k_pages, v_pages, seqlens=11, page_table=table, window=7), wanted)
    with pytest.raises(ValueError, match=r"page_table\[0\] names pages \[-1\] outside \[0, 4\)"):
        reference_attention(q, k_pages, v_pages, seqlens=11, page_table=table, window=8)


@pytest.mark.parametrize("extra", [0, 2], ids=["exact", "unused tokens at the end"])
def test_packed_queries_are_their_sequences_one_by_one(extra: int) -> None:
    bounds, seqlens = [0, 2, 2, 5], [11, 3, 2]
    _, k, v = inputs()
    q = torch.randn(1, HEADS, 5 + extra, D)
    dense, tree = random_mask(3, HEADS, 4, 11), random_mask(3, 4, 4)
    for mask in (None, dense, tree):
        out, lse = reference_attention(
            q, k, v, cu_q_lens=torch.tensor(bounds), max_q_len=4, seqlens=seqlens, mask=mask, return_lse=True
        )
        assert out.shape == (1, HEADS, 5 + extra, DV) and lse.shape == (1, HEADS, 5 + extra)
        assert (out[:, :, 5:] == 0).all() and (lse[:, :, 5:] == -INF).all()
        for b, (begin, end) in enumerate([(0, 2), (2, 2), (2, 5)]):
            n = end - begin
            own = None if mask is None else mask[b : b + 1, ..., :n, :] if mask is dense else mask[b : b + 1, :n, :n]
            one = slice(b, b + 1)
            wanted = reference_attention(
                q[:, :, begin:end], k[one], v[one], seqlens=seqlens[one], mask=own, return_lse=True
            )
            assert torch.equal(out[:, :, begin:end], wanted[0]) and torch.equal(lse[:, :, begin:end], wanted[1])
    assert reference_attention(q, k[:0], v[:0], cu_q_lens=[0], max_q_len=0).eq(0).all()


def test_out_is_overwritten_in_its_own_dtype_and_returned() -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    wanted = reference_attention(q, k, v, seqlens=[11, 3, 0])
    out = torch.full_like(wanted, NAN, dtype=torch.bfloat16)
    assert reference_attention(q, k, v, seqlens=[11, 3, 0], out=out) is out
    assert torch.equal(out, wanted.bfloat16())


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
def test_invisible_keys_do_not_matter_whatever_they_hold(poison: float) -> None:
    q, k, v = inputs()
    options = {"seqlens": [9, 5, 0], "kv_begin": [2, 0, 0]}
    wanted = reference_attention(q, k, v, **options, return_lse=True)
    for cache in (k, v):
        cache[0, :, :2], cache[0, :, 9:], cache[1, :, 5:], cache[2] = (poison,) * 4
    got = reference_attention(q, k, v, **options, return_lse=True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert all(bound.isfinite().all() for bound in reference_bounds(q, k, v, **options))


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
def test_a_visible_value_spoils_its_component_of_the_rows_that_see_it(poison: float) -> None:
    q, k, v = inputs()
    clean = reference_attention(q, k, v)
    v[1, 1, 9, 2] = poison  # causal: the last two of three queries see key 9; heads 3 to 5 use key head 1
    k[1, 1, 9] = -1e3 * q[1, 3, 2].sign()  # weight 0 to float64 for head 3, whatever else it does to the others
    out = reference_attention(q, k, v)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[1, 3:, 1:, 2] = True
    assert torch.equal(~out.isfinite(), spoilt)
    unaffected = [(0, slice(None)), (2, slice(None)), (1, slice(0, 3))]
    assert all(torch.equal(out[index], clean[index]) for index in unaffected)


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
def test_a_visible_nan_score_spoils_exactly_the_rows_that_see_it(poison: float) -> None:
    q, k, v = inputs()
    k[0, 0, 10, 0], q[0, :3, 2, 0] = poison, 1.0  # only the last query sees key 10
    out, lse = reference_attention(q, k, v, return_lse=True)
    spoilt = torch.zeros_like(lse, dtype=torch.bool)
    spoilt[0, :3, 2] = True
    assert torch.equal(lse.isnan(), spoilt)
    assert torch.equal(out.isnan().all(-1), spoilt) and torch.equal(out.isnan().any(-1), spoilt)


def test_visible_scores_of_minus_infinity_weigh_nothing() -> None:
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([[[[-INF], [0.0], [-INF]]]]), torch.tensor([[[[9.0], [2.0], [9.0]]]])
    out, lse = reference_attention(q, k, v, return_lse=True)
    assert (out.item(), lse.item()) == (2.0, 0.0)
    out, lse = reference_attention(q, k, v, seqlens=1, return_lse=True, sinks=torch.zeros(1))
    assert (out.item(), lse.item()) == (0.0, -INF)


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"alibi_slopes": SLOPES, "softcap": 3.0}], ids=["plain", "window", "alibi"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_a_sequence_merge_to_the_whole(ranks: int, options: dict[str, Any]) -> None:
    """Blocks of 2 keys dealt out to the ranks in turn, as context parallelism does; positions keep every rule right."""
    q, k, v = inputs(kv_len=12)
    shards = []
    for rank in range(ranks):
        own = [j for j in range(12) if j // 2 % ranks == rank]
        place = {"q_start": 9, "kv_start": 2 * rank, "kv_block": 2, "kv_stride": 2 * ranks}
        out, lse = reference_attention(q, k[:, :, own], v[:, :, own], **place, **options, return_lse=True)
        shards.append(AttentionState.from_lse(out, lse))
    out, lse = reference_attention(q, k, v, **options, return_lse=True)
    merged = merge_states(shards)
    torch.testing.assert_close(merged.o, out, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(merged.lse, lse, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(
        merged.finalize(sinks=SINKS), reference_attention(q, k, v, sinks=SINKS, **options), rtol=1e-13, atol=1e-14
    )


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "length past the cache": ({"seqlens": [11, 12, 0]}, r"seqlens \[11, 12, 0\].*must fit 0\.\.11"),
    "too few lengths": ({"seqlens": [11]}, r"seqlens must have one entry per sequence, 3 in all"),
    "float lengths": ({"seqlens": torch.ones(3)}, r"seqlens must be \(n,\) int32 or int64"),
    "negative kv_begin": ({"kv_begin": -1}, r"kv_begin \[-1, -1, -1\]"),
    "window 0": ({"window": 0}, "window must be >= 1, got 0"),
    "softcap 0": ({"softcap": 0.0}, r"softcap must be > 0, got 0\.0"),
    "sinks of other heads": ({"sinks": torch.zeros(2)}, r"sinks must be one of \[\(6,\)\], got \(2,\)"),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be one of"),
    "mask of other capacity": ({"mask": random_mask(1, 1, 3, 10)}, r"mask must be one of .*got \(1, 1, 3, 10\)"),
    "mask of numbers": ({"mask": torch.zeros(1, 1, 3, 11)}, "mask must be bool"),
    "pages without lengths": ({"page_table": torch.zeros(3, 1, dtype=torch.int32)}, "seqlens is required"),
    "blocks without a query position": ({"kv_block": 2, "kv_stride": 4}, "q_start is required with kv_block"),
    "blocks without a stride": ({"kv_block": 2, "q_start": 0}, "kv_block 2 and kv_stride None go together"),
    "packed without max_q_len": ({"cu_q_lens": [0, 3]}, "max_q_len None must fit a packed q"),
    "out": ({"out": torch.zeros(3, HEADS, 3, D)}, r"out must be \(3, 6, 3, 3\), got \(3, 6, 3, 5\)"),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refuses_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference_attention(*inputs(), **options)


def test_refuses_tensors_that_do_not_fit() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"q and k must have one head_dim; q \(3, 6, 3, 5\).*k \(3, 2, 11, 4\)"):
        reference_attention(q, k[..., :4], v)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        reference_attention(q[:, :5], k, v)
    with pytest.raises(ValueError, match="must be fp16, bf16, fp32 or fp64"):
        reference_attention(q, k.to(torch.int8), v)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "k_zero", "v_zero"])
def test_refuses_quantised_caches_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        reference_attention(*inputs(), **{name: 1.0})
    with pytest.raises(NotImplementedError, match=name):
        reference_bounds(*inputs(), **{name: 1.0})
