"""FlashInfer as a contender: its batch decode wrapper on tensor cores, its batch prefill wrapper for several queries.

A cache in one piece is given as pages of up to 16 keys in order, which is only another view of it. Plans are made
beforehand, and not made again between the capture of a graph and its replays, so no buffers are reserved for that.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdecoding.testing.comparison import NotTakingPart
from flashdecoding.testing.gpu_inputs import Inputs
from flashdecoding.testing.gpu_rows import GpuRow

WORKSPACE_BYTES = 256 << 20
BACKEND = "fa2"  # the one that splits sequences
TYPES = (torch.bfloat16, torch.float16)


def prepare(inputs: Inputs) -> tuple[list[Callable[[], Any]], Callable[[Tensor], Tensor]]:
    """Calls by copy of the cache, and the view of a result that is (B, Hq, Sq, D)."""
    flashinfer, row = _flashinfer(), inputs.row
    if row.dtype not in TYPES:
        raise NotTakingPart("it takes 16-bit queries")
    size = math.gcd(row.capacity, 16) if row.page_size is None else row.page_size
    tables = _page_tables(inputs, size)
    heads = (row.q_heads, row.kv_heads, row.head_dim)
    reach = -1 if row.window is None else row.window - 1
    types = {"q_data_type": row.dtype, "kv_data_type": row.dtype}
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)
    more: tuple[Any, ...] = ()
    if row.q_len == 1 and inputs.sinks is None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*tables, *heads, size, window_left=reach, **types)
    else:
        if inputs.sinks is None:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=BACKEND)
        else:
            wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
                workspace, "NHD", backend=BACKEND, head_dim_qk=row.head_dim, head_dim_vo=row.head_dim,
                window_left=reach, **types,
            )  # fmt: skip
            more = (inputs.sinks.float(), row.head_dim**-0.5)
        offsets = row.q_len * torch.arange(row.batch + 1, dtype=torch.int32)
        wrapper.plan(offsets, *tables, *heads, size, causal=True, window_left=reach, **types)
    q = inputs.q.transpose(1, 2).flatten(0, 1)
    run = partial(wrapper.run, out=torch.full_like(q, torch.nan))
    caches = [(_as_pages(k, size), _as_pages(v, size)) for k, v in inputs.copies]
    calls: list[Callable[[], Any]] = [partial(run, q, pages, *more) for pages in caches]
    return calls, lambda out: out.view(row.batch, row.q_len, *out.shape[1:]).transpose(1, 2)


def build(rows: Sequence[GpuRow]) -> None:
    """Compile for all head sizes and windows at once; FlashInfer finds the libraries when it plans."""
    _flashinfer()
    kinds = {(row.dtype, row.head_dim, row.window is not None) for row in rows if row.dtype in TYPES and not row.sinks}
    try:
        generate = importlib.import_module("flashinfer.jit").gen_batch_prefill_module
        modules = [
            generate(BACKEND, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, windowed, False, False)
            for dtype, head_dim, windowed in kinds
        ]
    except (AttributeError, TypeError):  # another version: it compiles one after the other, when it plans
        return
    with ThreadPoolExecutor(max(1, len(modules))) as pool:
        list(pool.map(lambda module: module.build(False), modules))


def _flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise NotTakingPart(f"flashinfer is not installed ({error})") from error


def _page_tables(inputs: Inputs, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of each sequence's pages (B + 1), the pages one after the other, and the keys of each last page (B)."""
    row = inputs.row
    counts = [-(-n // size) for n in row.seqlens]
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    last = torch.tensor([(n - 1) % size + 1 for n in row.seqlens], dtype=torch.int32)
    if inputs.page_table is None:
        return offsets, torch.arange(sum(counts), dtype=torch.int32, device=inputs.q.device), last
    table = zip(inputs.page_table, counts, strict=True)
    return offsets, torch.cat([pages[:count] for pages, count in table]), last


def _as_pages(cache: Tensor, size: int) -> Tensor:
    """(pages, page_size, Hkv, D), without a copy."""
    stored = cache.transpose(1, 2)
    return stored.view(-1, size, *stored.shape[2:])
