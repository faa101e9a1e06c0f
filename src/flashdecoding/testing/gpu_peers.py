"""Who takes part in the GPU's benchmark: this library, and what else computes decode attention for PyTorch tensors.

A contender turns the inputs of a row into calls, one for each copy of the cache, with all of its preparation done, or
raises `NotTakingPart` with the reason. A call is what its users would write once their step is prepared.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashdecoding import decode_attention, plan_decode
from flashdecoding.testing import flashinfer_peer
from flashdecoding.testing.comparison import OUR_NAME, NotTakingPart
from flashdecoding.testing.gpu_inputs import Inputs
from flashdecoding.testing.gpu_rows import GpuRow

FA3_FILE = "_vllm_fa3_C.abi3.so"


def _as_it_is(out: Tensor) -> Tensor:
    return out


class Prepared(NamedTuple):
    """Calls by copy of the cache, and the view of a result that is (B, Hq, Sq, D)."""

    calls: Sequence[Callable[[], Any]]
    heads_first: Callable[[Tensor], Tensor] = _as_it_is


@dataclass(frozen=True)
class GpuContender:
    """``context`` is entered around all calls; ``build`` may compile for many rows at once, before any is measured."""

    name: str
    label: str
    prepare: Callable[[Inputs], Prepared]
    about: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    build: Callable[[Sequence[GpuRow]], None] | None = None


def _planned(inputs: Inputs, *, batch_invariant: bool) -> Prepared:
    row, q, options = inputs.row, inputs.q, inputs.options
    plan = plan_decode(
        inputs.seqlens, q_heads=row.q_heads, kv_heads=row.kv_heads, head_dim=row.head_dim, dtype=q.dtype,
        q_len=row.q_len, window=row.window, max_seqlen=row.capacity, batch_invariant=batch_invariant, device=q.device,
    )  # fmt: skip
    out = torch.full_like(q, torch.nan)
    return Prepared([partial(decode_attention, q, k, v, plan=plan, out=out, **options) for k, v in inputs.copies])


def _unplanned(inputs: Inputs) -> Prepared:
    q, options = inputs.q, inputs.options
    return Prepared([partial(decode_attention, q, k, v, seqlens=inputs.seqlens, **options) for k, v in inputs.copies])


def _require_plain(inputs: Inputs) -> None:
    if inputs.page_table is not None or inputs.row.q_len != 1:
        raise NotTakingPart("it reads caches in one piece, for one query a sequence")


def _sdpa(inputs: Inputs) -> Prepared:
    _require_plain(inputs)
    grouped = inputs.row.q_heads != inputs.row.kv_heads
    attention = partial(scaled_dot_product_attention, enable_gqa=grouped)
    return Prepared([partial(attention, inputs.q, k, v) for k, v in inputs.copies])


def _flex(inputs: Inputs) -> Prepared:
    _require_plain(inputs)
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # each shape is compiled for itself
    grouped = inputs.row.q_heads != inputs.row.kv_heads
    attention = partial(torch.compile(flex_attention, dynamic=False), enable_gqa=grouped)
    return Prepared([partial(attention, inputs.q, k, v) for k, v in inputs.copies])


@cache
def _fa3_operators() -> Any:
    """The operators of the library that vLLM ships, from the folder that the environment variable PEERS names."""
    folder = os.environ.get("PEERS")
    if not folder:
        raise NotTakingPart(f"the environment variable PEERS names no folder with {FA3_FILE}")
    try:
        torch.ops.load_library(str(Path(folder) / FA3_FILE))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise NotTakingPart(f"{FA3_FILE} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    return torch.ops._vllm_fa3_C


def _fa3(inputs: Inputs, *, as_vllm: bool) -> Prepared:
    """Its operator takes arguments by position; they are put in order by the names in its own schema.

    vLLM makes the scheduler's metadata once a step, and asks for a causal mask even where one query sees all keys:
    with pages and a head size of 128, that chooses another tile.
    """
    operators, row = _fa3_operators(), inputs.row
    forward = operators.fwd.default
    q = inputs.q.transpose(1, 2)
    longest = row.capacity if row.page_size is None else max(row.seqlens)
    reach = (-1, -1) if row.window is None else (row.window - 1, 0)
    causal = as_vllm or row.q_len > 1
    arguments = {
        "out": torch.full_like(q, torch.nan),
        "seqused_k": inputs.seqlens,
        "max_seqlen_k": longest,
        "page_table": inputs.page_table,
        "softmax_scale": row.head_dim**-0.5,
        "is_causal": causal,
        "window_size_left": reach[0],
        "window_size_right": reach[1],
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,  # it chooses
        "sm_margin": 0,
        "s_aux": inputs.sinks,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    if as_vllm:
        heads = (row.q_heads, row.kv_heads, row.head_dim, row.head_dim)
        arguments["scheduler_metadata"] = operators.get_scheduler_metadata.default(
            row.batch, row.q_len, longest, *heads, q.dtype, inputs.seqlens, None, None, None, None, None,
            row.page_size, 0, causal, *reach, False, 0, None, 0,
        )  # fmt: skip
    names = [argument.name for argument in forward._schema.arguments]
    assert names[:3] == ["q", "k", "v"]
    rest = [arguments.get(name) for name in names[3:]]

    def call(k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = forward(q, k, v, *rest)[0]
        return out

    caches = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in inputs.copies]
    return Prepared([partial(call, k, v) for k, v in caches], lambda out: out.transpose(1, 2))


def _flashinfer(inputs: Inputs) -> Prepared:
    calls, view = flashinfer_peer.prepare(inputs)
    return Prepared(calls, view)


OURS = GpuContender(OUR_NAME, "flashdecoding", partial(_planned, batch_invariant=False), "a plan made once a step")
VARIANTS = (
    GpuContender(f"{OUR_NAME}-unplanned", "no plan", _unplanned, "flashdecoding, every call plans on the GPU"),
    GpuContender(
        f"{OUR_NAME}-invariant",
        "batch-invariant",
        partial(_planned, batch_invariant=True),
        "flashdecoding with plan_decode(batch_invariant=True)",
    ),
)
GPU_PEERS: dict[str, GpuContender] = {
    peer.name: peer
    for peer in (
        GpuContender(
            "sdpa-fa2",
            "SDPA FA2",
            _sdpa,
            "torch's scaled_dot_product_attention, FlashAttention backend only",
            partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
        ),
        GpuContender(
            "sdpa-cudnn", "SDPA cuDNN", _sdpa, "the same, cuDNN only", partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
        ),
        GpuContender("flex", "Flex", _flex, "torch's flex_attention through torch.compile, for this very shape"),
        GpuContender("fa3", "FA3", partial(_fa3, as_vllm=False), "FlashAttention-3, as vLLM ships it"),
        GpuContender(
            "fa3-vllm", "FA3, vLLM", partial(_fa3, as_vllm=True), "the same as vLLM calls it, planned once a step"
        ),
        GpuContender(
            "flashinfer",
            "FlashInfer",
            _flashinfer,
            "FlashInfer's batch decode on tensor cores (drafts: its batch prefill), planned once a step",
            build=flashinfer_peer.build,
        ),
    )
}
