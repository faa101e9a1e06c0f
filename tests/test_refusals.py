"""Contract line 8: what the host can know is refused before anything runs, by every reason and value at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import on_every_backend
from torch import Tensor

from flashdecoding import decode_attention, partial_attention, plan_decode

ONES: Callable[..., Tensor] = torch.ones
"""Stands for tensors whose values do not matter."""


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _good() -> dict[str, Any]:
    """A call that is accepted: batch 2, 8 query heads, 2 kv heads, q_len 3, capacity 20, D 64."""
    return {"q": ONES(2, 8, 3, 64), "k": ONES(2, 2, 20, 64), "v": ONES(2, 2, 20, 64), "seqlens": _ints(20, 9)}


def _paged(page_size: int = 4, pages: int = 6, table: Tensor | None = None) -> dict[str, Any]:
    cache = ONES(pages, 2, page_size, 64)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32) if table is None else table
    return {"k": cache, "v": cache, "page_table": table, "seqlens": _ints(12, 9)}


def _ragged(*bounds: int, max_q_len: int | None = 3, tokens: int = 4) -> dict[str, Any]:
    return {"q": ONES(1, 8, tokens, 64), "cu_q_lens": _ints(*bounds), "max_q_len": max_q_len}


def _plan(**changes: Any) -> dict[str, Any]:
    good = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "q_len": 3}
    return {"plan": plan_decode(changes.pop("lengths", [20, 9]), **{**good, **changes})}


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q-dimensions": ({"q": ONES(8, 3, 64)}, ("q", "8, 3, 64")),
    "q-type": ({"q": [1.0]}, ("q", "list")),
    "q-integer": ({"q": ONES(2, 8, 3, 64, dtype=torch.int32)}, ("q", "int32")),
    "q-sparse": ({"q": ONES(2, 8, 3, 64).to_sparse()}, ("q", "sparse")),
    "q-k-head-dim": ({"q": ONES(2, 8, 3, 48)}, ("head_dim", "48", "64")),
    "head-dim-0": ({name: ONES(2, 2, 20, 0) for name in "qkv"}, ("head_dim", "0")),
    "heads-not-a-multiple": ({"q": ONES(2, 9, 3, 64)}, ("heads", "9", "2")),
    "no-kv-heads": ({"k": ONES(2, 0, 20, 64), "v": ONES(2, 0, 20, 64)}, ("heads", "8", "0")),
    "k-batch": ({"k": ONES(3, 2, 20, 64), "v": ONES(3, 2, 20, 64)}, ("batch", "3", "2")),
    "k-batch-1": ({"k": ONES(1, 2, 20, 64), "v": ONES(1, 2, 20, 64)}, ("batch", "1", "2")),
    "k-dimensions": ({"k": ONES(2, 20, 64)}, ("k", "2, 20, 64")),
    "k-dtype": ({"k": ONES(2, 2, 20, 64, dtype=torch.bfloat16)}, ("k", "bfloat16", "float32")),
    "v-dtype": ({"v": ONES(2, 2, 20, 64, dtype=torch.float16)}, ("v", "float16", "float32")),
    "v-length": ({"v": ONES(2, 2, 19, 64)}, ("2, 2, 20, 64", "2, 2, 19, 64")),
    "v-heads": ({"v": ONES(2, 4, 20, 64)}, ("2, 2, 20, 64", "2, 4, 20, 64")),
    "seqlens-past-capacity": ({"seqlens": _ints(20, 21)}, ("seqlens", "21", "20")),
    "seqlens-negative": ({"seqlens": _ints(-1, 9)}, ("seqlens", "-1")),
    "seqlens-list-past-capacity": ({"seqlens": [5, 2000]}, ("seqlens", "2000", "20")),
    "seqlens-int-past-capacity": ({"seqlens": 21}, ("seqlens", "21", "20")),
    "seqlens-count": ({"seqlens": _ints(1, 2, 3)}, ("seqlens", "2", "3")),
    "seqlens-shape": ({"seqlens": ONES(2, 1, dtype=torch.int32)}, ("seqlens", "2, 1")),
    "seqlens-float": ({"seqlens": torch.tensor([1.0, 2.0])}, ("seqlens", "float32")),
    "seqlens-fraction": ({"seqlens": [1, 2.5]}, ("seqlens", "2.5")),
    "seqlens-bool": ({"seqlens": [True, 3]}, ("seqlens", "True")),
    "seqlens-missing": ({**_paged(), "seqlens": None}, ("seqlens", "page_table")),
    "page-table-dtype": (_paged(table=torch.zeros(2, 3)), ("page_table", "float32")),
    "page-table-batch": (_paged(table=torch.zeros(3, 3, dtype=torch.int32)), ("page_table", "3", "2")),
    "page-table-dimensions": (_paged(table=torch.zeros(6, dtype=torch.int32)), ("page_table", "(6,)")),
    "page-id-past-the-end": (_paged(pages=5), ("page", "5")),
    "page-id-minus-1": (_paged(table=torch.tensor([[0, 1, 2], [3, -1, 5]], dtype=torch.int32)), ("page", "-1")),
    "page-table-too-short": ({**_paged(), "seqlens": _ints(12, 13)}, ("seqlens", "13", "12")),
    "kv-begin-count": ({"kv_begin": _ints(1, 2, 3)}, ("kv_begin", "3", "2")),
    "kv-begin-negative": ({"kv_begin": _ints(0, -3)}, ("kv_begin", "-3")),
    "kv-begin-float": ({"kv_begin": torch.tensor([0.0, 1.0])}, ("kv_begin", "float32")),
    "cu-q-lens-without-maximum": (_ragged(0, 3, 4, max_q_len=None), ("cu_q_lens", "max_q_len")),
    "maximum-without-cu-q-lens": ({"max_q_len": 3}, ("max_q_len", "cu_q_lens", "3")),
    "cu-q-lens-start": (_ragged(1, 3, 4), ("cu_q_lens", "1")),
    "cu-q-lens-end": (_ragged(0, 3, 5), ("cu_q_lens", "5", "4")),
    "cu-q-lens-decreasing": (_ragged(0, 5, 4), ("cu_q_lens", "[0, 5, 4]")),
    "cu-q-lens-past-maximum": (_ragged(0, 4, 4), ("max_q_len", "3", "4")),
    "cu-q-lens-batch": ({**_ragged(0, 3, 4), "q": ONES(2, 8, 4, 64)}, ("cu_q_lens", "2")),
    "cu-q-lens-dtype": ({**_ragged(0, 3, 4), "cu_q_lens": torch.tensor([0.0, 3, 4])}, ("cu_q_lens", "float32")),
    "cu-q-lens-sequences": (_ragged(0, 3, 3, 4), ("3", "2")),
    "scale-huge": ({"scale": 3e38}, ("scale", "3e+38")),
    "scale-nan": ({"scale": float("nan")}, ("scale", "nan")),
    "scale-text": ({"scale": "0.5"}, ("scale", "0.5")),
    "causal-text": ({"causal": "yes"}, ("causal", "yes")),
    "window-0": ({"window": 0}, ("window", "0")),
    "window-negative": ({"window": -1}, ("window", "-1")),
    "window-pair": ({"window": (127, 0)}, ("window", "(127, 0)")),
    "window-fraction": ({"window": 2.5}, ("window", "2.5")),
    "softcap-0": ({"softcap": 0.0}, ("softcap", "0.0")),
    "softcap-negative": ({"softcap": -30.0}, ("softcap", "-30.0")),
    "softcap-nan": ({"softcap": float("nan")}, ("softcap", "nan")),
    "alibi-heads": ({"alibi_slopes": ONES(2)}, ("alibi_slopes", "(2,)", "(8,)")),
    "alibi-batch": ({"alibi_slopes": ONES(3, 8)}, ("alibi_slopes", "3, 8", "2, 8")),
    "alibi-dtype": ({"alibi_slopes": ONES(8, dtype=torch.int64)}, ("alibi_slopes", "int64")),
    "mask-capacity": ({"mask": ONES(1, 1, 3, 19, dtype=torch.bool)}, ("mask", "1, 1, 3, 19", "20")),
    "mask-rows": ({"mask": ONES(2, 8, 1, 20, dtype=torch.bool)}, ("mask", "2, 8, 1, 20", "3")),
    "mask-kv-heads": ({"mask": ONES(1, 2, 3, 20, dtype=torch.bool)}, ("mask", "1, 2, 3, 20", "8")),
    "mask-batch": ({"mask": ONES(4, 1, 3, 20, dtype=torch.bool)}, ("mask", "4, 1, 3, 20", "2")),
    "mask-additive": ({"mask": ONES(1, 1, 3, 20)}, ("mask", "float32", "bool")),
    "mask-2d": ({"mask": ONES(3, 20, dtype=torch.bool)}, ("mask", "3, 20")),
    "tree-shape": ({"mask": ONES(1, 3, 4, dtype=torch.bool)}, ("mask", "1, 3, 4")),
    "plan-batch": (_plan(lengths=[20, 9, 1]), ("plan", "batch", "3", "2")),
    "plan-heads": (_plan(q_heads=16), ("plan", "q_heads", "16", "8")),
    "plan-kv-heads": (_plan(kv_heads=1), ("plan", "kv_heads", "1", "2")),
    "plan-head-dim": (_plan(head_dim=128), ("plan", "head_dim", "128", "64")),
    "plan-head-dim-v": (_plan(head_dim_v=32), ("plan", "head_dim_v", "32", "64")),
    "plan-dtype": (_plan(dtype=torch.bfloat16), ("plan", "dtype", "bfloat16", "float32")),
    "plan-q-len": (_plan(q_len=1), ("plan", "q_len", "1", "3")),
    "plan-window": (_plan(window=7), ("plan", "window", "7", "None")),
    "plan-lengths": (_plan(lengths=[20, 8]), ("plan", "[20, 9]", "[20, 8]")),
    "plan-past-capacity": ({**_plan(lengths=[20, 21]), "seqlens": None}, ("seqlens", "21", "20")),
    "grad": ({"q": ONES(2, 8, 3, 64, requires_grad=True)}, ("torch.no_grad()",)),
    "grad-of-the-cache": ({"v": ONES(2, 2, 20, 64, requires_grad=True)}, ("torch.no_grad()",)),
}

ONLY_DECODE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sinks-shape": ({"sinks": ONES(2)}, ("sinks", "(2,)", "(8,)")),
    "sinks-batch": ({"sinks": ONES(2, 8)}, ("sinks", "2, 8")),
    "sinks-dtype": ({"sinks": ONES(8, dtype=torch.int32)}, ("sinks", "int32")),
    "sinks-grad": ({"sinks": ONES(8, requires_grad=True)}, ("torch.no_grad()",)),
    "out-shape": ({"out": ONES(2, 3, 8, 64)}, ("out", "2, 3, 8, 64", "2, 8, 3, 64")),
    "out-dtype": ({"out": ONES(2, 8, 3, 64, dtype=torch.float64)}, ("out", "float64", "float32")),
    "out-expanded": ({"out": ONES(2, 8, 1, 64).expand(2, 8, 3, 64)}, ("out", "(512, 64, 0, 1)")),
    "out-type": ({"out": [0.0]}, ("out", "list")),
}

ONLY_PARTIAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "block-without-stride": ({"kv_block": 16, "q_start": 5}, ("kv_block", "kv_stride", "16")),
    "stride-without-block": ({"kv_stride": 16, "q_start": 5}, ("kv_block", "kv_stride", "16")),
    "block-0": ({"kv_block": 0, "kv_stride": 4, "q_start": 5}, ("kv_block", "0")),
    "blocks-overlap": ({"kv_block": 8, "kv_stride": 4, "q_start": 5}, ("kv_stride", "4", "8")),
    "block-without-q-start": ({"kv_block": 4, "kv_stride": 8}, ("q_start", "kv_block")),
    "q-start-count": ({"q_start": [1, 2, 3]}, ("q_start", "3", "2")),
    "kv-start-count": ({"kv_start": _ints(1, 2, 3)}, ("kv_start", "3", "2")),
    "kv-start-fraction": ({"kv_start": 1.5}, ("kv_start", "1.5")),
}


def _assert_refused(function: Callable[..., object], changes: dict[str, Any], wanted: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        function(**{**_good(), **changes})
    missing = [text for text in wanted if text not in str(raised.value)]
    assert not missing, f"{missing} not named in: {raised.value}"


@pytest.mark.parametrize("name", [*REFUSED, *ONLY_DECODE])
def test_decode_attention_refuses(name: str) -> None:
    _assert_refused(decode_attention, *{**REFUSED, **ONLY_DECODE}[name])


@pytest.mark.parametrize("name", [*REFUSED, *ONLY_PARTIAL])
def test_partial_attention_refuses(name: str) -> None:
    _assert_refused(partial_attention, *{**REFUSED, **ONLY_PARTIAL}[name])


def test_what_is_refused_differs_from_what_works_by_one_thing() -> None:
    """The calls that the refusals are cut from are accepted."""
    accepted = ({}, _paged(), _ragged(0, 3, 4), _plan(), {**_plan(), "seqlens": None})
    for changes in accepted:
        assert decode_attention(**{**_good(), **changes}).isfinite().all()
        assert partial_attention(**{**_good(), **changes}).o.isfinite().all()


def test_every_reason_is_named_at_once() -> None:
    changes = {"k": ONES(2, 3, 20, 48), "v": ONES(2, 3, 19, 64, dtype=torch.float16), "window": -5, "softcap": -1.0}
    wanted = ("heads", "8 and 3", "head_dim", "64 and 48", "float16", "2, 3, 19, 64", "window", "-5", "softcap", "-1.0")
    _assert_refused(decode_attention, changes, wanted)
    changes = {"mask": ONES(1, 1, 3, 19, dtype=torch.bool), "sinks": ONES(7), "alibi_slopes": ONES(9)}
    _assert_refused(decode_attention, changes, ("mask", "1, 1, 3, 19", "sinks", "(7,)", "alibi_slopes", "(9,)"))
    _assert_refused(decode_attention, {"seqlens": [21, -1], "kv_begin": [-2, 99]}, ("21", "-1", "-2", "99"))
    planned = _plan(q_heads=16, q_len=1, dtype=torch.bfloat16)
    _assert_refused(decode_attention, planned, ("q_heads", "16", "q_len", "1", "dtype", "bfloat16"))


def test_refusals_show_the_given_shapes() -> None:
    shapes = ("2, 8, 3, 64", "2, 2, 20, 64", "float32")
    _assert_refused(decode_attention, {"window": 0}, shapes)
    _assert_refused(partial_attention, {"mask": ONES(1, 1, 3, 19, dtype=torch.bool)}, shapes)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "k_zero", "v_zero"])
@pytest.mark.parametrize("function", [decode_attention, partial_attention])
def test_quantised_arguments_are_not_ignored(function: Callable[..., object], name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        function(**_good(), **{name: 0.25})
    with pytest.raises(NotImplementedError, match=name):
        function(**_good(), **{name: ONES(2)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_quantised_caches_are_refused_by_name(dtype: torch.dtype) -> None:
    good = _good()
    with pytest.raises(NotImplementedError, match=f"k is {dtype}.*quantised"):
        decode_attention(good["q"], good["k"].to(dtype), good["v"])


def test_a_device_without_backend_is_refused() -> None:
    on_meta = {name: x.to("meta") for name, x in _good().items()}
    with pytest.raises(NotImplementedError, match="meta"):
        decode_attention(**on_meta)


@on_every_backend
def test_tensors_on_two_devices_are_refused(backend: str) -> None:
    elsewhere = "meta"
    good = {name: x.to(backend) for name, x in _good().items()}
    for name in ("k", "v", "mask", "sinks", "alibi_slopes"):
        given = {**good, "mask": ONES(1, 1, 3, 20, dtype=torch.bool), "sinks": ONES(8), "alibi_slopes": ONES(8)}
        given = {key: x.to(backend) for key, x in given.items()}
        with pytest.raises((ValueError, NotImplementedError), match=f"(?s){name}.*meta"):
            decode_attention(**{**given, name: given[name].to(elsewhere)})


@on_every_backend
def test_grad_mode_off_or_no_gradient_asked_is_fine(backend: str) -> None:
    good = {name: x.to(backend) for name, x in _good().items()}
    wanted = decode_attention(**good)
    good["q"].requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = decode_attention(**good)
        assert torch.equal(out, wanted) and not out.requires_grad


def test_a_refused_call_writes_nothing() -> None:
    out = torch.full((2, 8, 3, 64), 7.0)
    with pytest.raises(ValueError, match="21"):
        decode_attention(**{**_good(), "seqlens": [20, 21]}, out=out)
    with pytest.raises(ValueError, match="-1"):
        table = torch.tensor([[0, 1, 2], [3, -1, 5]], dtype=torch.int32)
        decode_attention(**{**_good(), **_paged(table=table)}, out=out)
    assert (out == 7.0).all()
    packed, ragged = torch.full((1, 8, 9, 64), 7.0), {"cu_q_lens": _ints(0, 3, 5), "max_q_len": 3}
    with pytest.raises(ValueError, match="-1"):  # tokens 5 to 8 belong to no sequence
        decode_attention(**{**_good(), **_paged(table=table), **ragged, "q": ONES(1, 8, 9, 64)}, out=packed)
    assert (packed == 7.0).all()
