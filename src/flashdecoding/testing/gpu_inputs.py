"""Tensors of a GPU row, in so many copies that no call finds its keys in a cache, and the right result for them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdecoding.testing.cases import Problem
from flashdecoding.testing.compare import Expected, assert_within_bound, expect
from flashdecoding.testing.gpu_rows import GpuRow

LEAST_CALLS = 8
GRAPH_BYTES = 500_000_000
MOST_COPIES = 512

# How far our output may be from float64, as a share of the norm. The error bound grows with P |V|, of which a long
# context's output is a small part: where it would not miss a lost split, this does.
_MOST_ERROR = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-4}


@dataclass(frozen=True)
class Inputs:
    """What contenders are given.

    ``q`` is (B, Hq, Sq, D), a view of (B, Sq, Hq, D). ``copies`` are caches (k, v) that differ in their values only:
    (B, Hkv, N, D), or pages (pages, Hkv, page_size, D) for ``page_table``; views of tensors stored sequence-first.
    """

    row: GpuRow
    q: Tensor
    copies: list[tuple[Tensor, Tensor]]
    seqlens: Tensor  # (B,) int32
    page_table: Tensor | None  # (B, max_pages) int32, in no order; 0 past a sequence's pages
    sinks: Tensor | None  # (Hq,), in q's dtype

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `decode_attention` that the row has, lengths apart."""
        given = {"page_table": self.page_table, "window": self.row.window, "sinks": self.sinks}
        return {name: value for name, value in given.items() if value is not None}


def copies_needed(nbytes: int, spacing_bytes: int) -> int:
    """Copies for which ``spacing_bytes`` are read between two uses of one, if a call reads ``nbytes``."""
    return min(MOST_COPIES, max(2, 1 - (-spacing_bytes // nbytes)))


def calls_in_graph(nbytes: int, copies: int) -> int:
    """A whole number of rotations, of LEAST_CALLS and GRAPH_BYTES at least: launching the graph is a small part."""
    least = max(LEAST_CALLS, min(MOST_COPIES, -(-GRAPH_BYTES // nbytes)))
    return -(-least // copies) * copies


def build(row: GpuRow, copies: int, device: torch.device) -> Inputs:
    """Normally distributed values, the same in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=row.dtype, device=device)

    q = normal(row.batch, row.q_len, row.q_heads, row.head_dim).transpose(1, 2)
    places = (row.batch, row.capacity) if row.page_size is None else (sum(row.own_pages), row.page_size)
    shape = (*places, row.kv_heads, row.head_dim)
    caches = [(normal(*shape).transpose(1, 2), normal(*shape).transpose(1, 2)) for _ in range(copies)]
    seqlens = torch.tensor(row.seqlens, dtype=torch.int32, device=device)
    table = None if row.page_size is None else _page_table(row).to(device)
    return Inputs(row, q, caches, seqlens, table, normal(row.q_heads) if row.sinks else None)


def _page_table(row: GpuRow) -> Tensor:
    shuffled = torch.randperm(sum(row.own_pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    table = torch.zeros(row.batch, max(row.pages), dtype=torch.int32)
    for entries, pages, own in zip(table, row.pages, torch.split(shuffled, list(row.own_pages)), strict=True):
        entries[:pages] = own[torch.arange(pages) % len(own)]
    return table


@dataclass(frozen=True)
class Reference:
    """What float64 says of one sequence's heads [0, group), for the first copy of the cache."""

    sequence: int
    group: int
    expected: Expected
    label: str

    def check(self, out: Tensor) -> None:
        """Raise ``AssertionError`` unless ``out`` (B, Hq, Sq, D) is near enough, element by element and as a whole."""
        part = out[self.sequence : self.sequence + 1, : self.group]
        label = f"{self.label}, sequence {self.sequence}"
        assert_within_bound(part, None, self.expected, label)
        wanted = self.expected.out
        error, most = ((part.double() - wanted).norm() / wanted.norm()).item(), _MOST_ERROR[out.dtype]
        if not error <= most:
            raise AssertionError(f"{label} out: {error:.2g} of its norm away from float64, allowed are {most:g}")


def references(inputs: Inputs) -> list[Reference]:
    """For the first kv head of the last sequence, and of the longest; computed where the inputs are."""
    row = inputs.row
    longest = max(range(row.batch), key=row.seqlens.__getitem__)
    return [_reference(inputs, sequence) for sequence in dict.fromkeys((row.batch - 1, longest))]


def _reference(inputs: Inputs, sequence: int) -> Reference:
    row = inputs.row
    group = row.q_heads // row.kv_heads
    k, v = (_keys_of(inputs, cache, sequence) for cache in inputs.copies[0])
    options: dict[str, Any] = {"seqlens": [row.seqlens[sequence]], "window": row.window}
    if inputs.sinks is not None:
        options["sinks"] = inputs.sinks[:group]
    problem = Problem(inputs.q[sequence : sequence + 1, :group], k, v, options)
    return Reference(sequence, group, expect(problem), row.name)


def _keys_of(inputs: Inputs, cache: Tensor, sequence: int) -> Tensor:
    """(1, 1, keys, D): one sequence's keys of the first kv head, in order."""
    row = inputs.row
    if inputs.page_table is None:
        return cache[sequence : sequence + 1, :1]
    pages = inputs.page_table[sequence, : row.pages[sequence]].long()
    return cache[pages, 0].reshape(1, 1, -1, row.head_dim)[:, :, : row.seqlens[sequence]]
