"""Who takes part in the benchmark: this library and what else computes decode attention on a CPU with PyTorch tensors.

A contender turns the inputs of a row into a function of (k, v) that returns the output (B, Hq, 1, D), with all of its
preparation done, or raises `NotTakingPart` with the reason.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashdecoding.api import decode_attention, plan_decode
from flashdecoding.testing.comparison import OUR_NAME, NotTakingPart

Attention = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """``prepare(q, k)`` gets q (B, Hq, 1, D) and one cache (B, Hkv, N, D), and returns the function to be timed."""

    name: str
    label: str
    prepare: Callable[[Tensor, Tensor], Attention]
    about: str = ""


def _ours(q: Tensor, _: Tensor) -> Attention:
    return lambda k, v: decode_attention(q, k, v)  # type: ignore[return-value]


def _ours_with_plan(q: Tensor, k: Tensor) -> Attention:
    plan = plan_decode(
        [k.shape[2]] * q.shape[0], q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], dtype=q.dtype
    )
    return lambda k, v: decode_attention(q, k, v, plan=plan)  # type: ignore[return-value]


def _sdpa(q: Tensor, k: Tensor) -> Attention:
    grouped = q.shape[1] != k.shape[1]
    return lambda k, v: scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def _sdpa_packed(q: Tensor, k: Tensor) -> Attention:
    """The q heads that share a kv head become the query rows of one head: no mask is needed for one query token."""
    batch, q_heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if q_heads == kv_heads:
        raise NotTakingPart("with one q head for each kv head it is the plain SDPA call")
    rows = q.reshape(batch, kv_heads, q_heads // kv_heads, head_dim)
    return lambda k, v: scaled_dot_product_attention(rows, k, v).view(batch, q_heads, 1, head_dim)


def _flex(q: Tensor, k: Tensor) -> Attention:
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++")):
        raise NotTakingPart("no C++ compiler found")
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # each shape is compiled for itself
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = q.shape[1] != k.shape[1]
    return lambda k, v: compiled(q, k, v, enable_gqa=grouped)


def _llama_cpp(q: Tensor, k: Tensor) -> Attention:
    from flashdecoding.testing import ggml

    try:
        return ggml.FlashAttention(ggml.load(), q, k, torch.get_num_threads())
    except ImportError as error:
        raise NotTakingPart(str(error)) from error


OURS = Contender(OUR_NAME, "flashdecoding", _ours)
OURS_WITH_PLAN = Contender(f"{OUR_NAME}-plan", "flashdecoding, given a plan", _ours_with_plan)
PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (
        Contender("sdpa", "SDPA", _sdpa, "torch's scaled_dot_product_attention, with enable_gqa for grouped heads"),
        Contender(
            "sdpa-packed",
            "SDPA packed",
            _sdpa_packed,
            "a group's q heads as query rows of one head; at group 1 just SDPA",
        ),
        Contender("flex", "Flex", _flex, "torch's flex_attention through torch.compile, for this very shape"),
        Contender("llama.cpp", "llama.cpp", _llama_cpp, "ggml_flash_attn_ext of llama-cpp-python on the CPU"),
    )
}
