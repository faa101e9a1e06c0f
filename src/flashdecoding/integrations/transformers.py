"""Attention `"split_kv"` for Hugging Face transformers.

    from flashdecoding.integrations.transformers import register

    register()
    model.set_attn_implementation("split_kv")  # or from_pretrained(..., attn_implementation="split_kv")

transformers asks a registered mask function for one mask per forward pass and kind of layer, and hands it to the
registered attention function in every layer. The two functions here share this contract:

- `None` for one query: it sees every key. `None` for a long prompt: plain causal attention over the prompt, as SDPA
  means it.
- A boolean mask says everything: causality, window, padding and empty slots. Attention then adds nothing of its own.
- A mask made on the CPU also carries `_Bounds`, the range of slots that any query sees. Slots outside are never read,
  and a mask that is nothing but this range (left padding, the unused end of a static cache) is replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from flashdecoding.api import decode_attention

__all__ = ["NAME", "SHORT_Q_LEN", "register", "split_kv_attention", "split_kv_mask"]

NAME = "split_kv"
"""The attention's name. transformers takes any name with "flash" or "sdpa" in it for an implementation of its own."""

SHORT_Q_LEN = 32
"""Calls of up to this many queries per sequence count as decoding and run on this library; longer ones run on SDPA."""

_BOUNDS = "_flashdecoding_bounds"

_UNSUPPORTED = {
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "block_table": "the paged cache of continuous batching",
    "indices": "sparse attention by key indices",
    "block_indices": "sparse attention by block indices",
    "sinks": "sinks per token (sinks per head arrive as `s_aux`)",
}


@dataclass(frozen=True)
class _Bounds:
    """The slots that a mask's queries see between them: `kv_begin <= slot < seqlens`, each (B,) int32 on the CPU.

    `kv_begin` is None where it would be 0 throughout. `exact`: there is one query and it sees all of them. `version`
    is the mask's version counter, so a mask that a model edits in place afterwards is known to have outgrown its
    bounds.
    """

    kv_begin: Tensor | None
    seqlens: Tensor
    exact: bool
    version: int


def register() -> None:
    """Register attention `"split_kv"` and its mask function with transformers, for every model; again is harmless."""
    AttentionInterface.register(NAME, split_kv_attention)
    AttentionMaskInterface.register(NAME, split_kv_mask)


def split_kv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' calling convention.

    `query` is (B, Hq, Sq, D), `key` and `value` are (B, Hkv, S, D | Dv), the whole cache layer; `attention_mask` is
    None or a boolean mask (B or 1, Hq or 1, Sq, S), as `split_kv_mask` makes it. `s_aux` (Hq,) are sink logits.
    Nothing is mutated.

    At most `SHORT_Q_LEN` queries run on `decode_attention`. Longer prompts run on SDPA, or, where the scores are
    capped or have sinks, which SDPA lacks, on `decode_attention` in blocks of `SHORT_Q_LEN` queries.

    Returns `(out, None)`, `out` (B, Sq, Hq, Dv) in query's dtype; attention weights are never formed.

    Raises `ValueError` for dropout, for inputs that require grad while grad is enabled, and for 2 to `SHORT_Q_LEN`
    causal queries that come without a mask although the cache has more slots than queries; `NotImplementedError` for
    attention weights and for what changes the result in a way that this library does not compute. Whatever else does
    not fit (head counts, head dimensions, dtypes) `decode_attention` refuses.
    """
    _refuse(query, key, value, attention_mask, dropout, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q_len, kv_len = query.shape[2], key.shape[2]
    scores: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if q_len > SHORT_Q_LEN:
        if softcap is None and s_aux is None:
            out, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, is_causal=causal, **kwargs
            )
            return out, None
        return _prompt_in_blocks(query, key, value, attention_mask, causal, scores), None
    if attention_mask is not None:
        visible = _visible(attention_mask)
    elif causal and 1 < q_len < kv_len:
        raise ValueError(
            f"{NAME} attention: {q_len} causal queries over {kv_len} cache slots came without a mask, so nothing says "
            "which slots are filled. Let the model call the registered mask function, or pass a boolean mask "
            "(batch, 1, queries, slots)."
        )
    else:
        visible = {"causal": causal, "window": sliding_window if causal else None}
    attended = decode_attention(query, key, value, **visible, **scores)
    assert isinstance(attended, Tensor)
    return attended.transpose(1, 2).contiguous(), None


def split_kv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Mask function in transformers' calling convention: None, or a boolean mask (B, 1, q_length, kv_length), True =
    visible.

    Query i stands at position `q_offset + i`, slot j at `kv_offset + j`; `attention_mask` (B, positions) is False at
    padding.

    Short calls get None only for one query that sees every slot; that is settled on the host by the sizes or, for
    masks on the CPU, by looking at them. Two and more queries always get a mask: over the empty slots of a static cache
    SDPA's convention and that of decoding differ. Long prompts get what SDPA gets.
    """
    short = q_length <= SHORT_Q_LEN
    if short and _sees_everything(
        q_length, kv_length, q_offset, kv_offset, attention_mask, local_size, allow_is_causal_skip, kwargs.get("config")
    ):
        return None
    arguments = dict(
        kwargs,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and not short,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and not short,
        use_vmap=use_vmap,
        device=device,
    )
    if not short or torch.compiler.is_compiling():
        return sdpa_mask(**arguments)
    # A mask made under inference_mode has no version counter, and its bounds need one.
    with torch.inference_mode(False), torch.no_grad():
        mask = sdpa_mask(**arguments)
    return _with_bounds(mask) if mask is not None and mask.device.type == "cpu" else mask


def _sees_everything(
    q_len: int,
    kv_len: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    local_size: int | None,
    plain: bool,
    config: Any,
) -> bool:
    """Whether one query at the end of its cache sees all of it, told by host integers alone.

    `plain`: the mask is causal or local and nothing else. A local mask is a sliding window unless the config has
    chunks.
    """
    if q_len != 1 or padding is not None or not plain or isinstance(q_offset, Tensor):
        return False
    if q_offset + 1 != kv_offset + kv_len:
        return False
    if local_size is None:
        return True
    sliding = getattr(config, "sliding_window", None) == local_size
    return sliding and kv_len <= local_size and getattr(config, "attention_chunk_size", None) is None


def _with_bounds(mask: Tensor) -> Tensor | None:
    """Attach `_Bounds` to a CPU mask (B, 1, Sq, S) and return it; None if there is one query and it sees every slot."""
    batch, _, q_len, slots = mask.shape
    if mask.numel() == 0:
        return mask
    seen = mask[:, 0].any(dim=1).numpy()  # (B, S): by any query
    counts = seen.sum(axis=1, dtype=np.int32)
    begin = np.where(counts > 0, seen.argmax(axis=1), 0).astype(np.int32)
    end = np.where(counts > 0, slots - seen[:, ::-1].argmax(axis=1), 0).astype(np.int32)
    if q_len == 1 and int(counts.sum()) == batch * slots:
        return None
    exact = q_len == 1 and bool((end - begin == counts).all())
    kv_begin = torch.from_numpy(begin) if begin.any() else None
    setattr(mask, _BOUNDS, _Bounds(kv_begin, torch.from_numpy(end), exact, mask._version))
    return mask


def _visible(mask: Tensor) -> dict[str, Any]:
    """The arguments of `decode_attention` that say what `mask`, a boolean mask, says."""
    visible: dict[str, Any] = {"mask": mask, "causal": False, "window": None}
    if torch.compiler.is_compiling():  # lengths that change every step would be compiled in
        return visible
    bounds = getattr(mask, _BOUNDS, None)
    if bounds is not None and not mask.is_inference() and bounds.version == mask._version:
        visible.update(kv_begin=bounds.kv_begin, seqlens=bounds.seqlens)
        if bounds.exact:
            visible["mask"] = None
    return visible


def _prompt_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scores: dict[str, Any]
) -> Tensor:
    """A long prompt in blocks of `SHORT_Q_LEN` queries, each over the keys it can see; returns (B, Sq, Hq, Dv).

    Without a mask a causal prompt starts at slot 0, as in SDPA; slots after it are the empty ones of a static cache.
    """
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[-1]))
    for start in range(0, q_len, SHORT_Q_LEN):
        stop = min(start + SHORT_Q_LEN, q_len)
        rows = query[:, :, start:stop]
        if mask is None:
            seen = slice(0, stop) if causal else slice(None)
            block = decode_attention(rows, key[:, :, seen], value[:, :, seen], causal=causal, **scores)
        else:
            block = decode_attention(rows, key, value, mask=mask[:, :, start:stop], causal=False, **scores)
        assert isinstance(block, Tensor)
        out[:, start:stop] = block.transpose(1, 2)
    return out


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    reasons = []
    if dropout > 0:
        reasons.append(f"dropout={dropout}: this is inference only; call model.eval()")
    needs_grad = [n for n, x in (("query", query), ("key", key), ("value", value)) if x.requires_grad]
    if needs_grad and torch.is_grad_enabled():
        reasons.append(f"{', '.join(needs_grad)} require grad: forward only; run the model under torch.no_grad()")
    if reasons:
        raise ValueError(f"{NAME} attention: " + "; ".join(reasons))
    if kwargs.get("output_attentions"):
        reasons.append('output_attentions: weights are never formed; use attn_implementation="eager"')
    if mask is not None and mask.dtype != torch.bool and query.shape[2] <= SHORT_Q_LEN:
        reasons.append(f'attention_mask of {mask.dtype}: pass a boolean mask, or use attn_implementation="sdpa"')
    reasons += [f"{name}: {what}" for name, what in _UNSUPPORTED.items() if kwargs.get(name) is not None]
    if reasons:
        raise NotImplementedError(f"{NAME} attention lacks " + "; ".join(reasons))
