"""Kernels that measure a GPU for the benchmark: what it can read, and what an empty kernel costs.

``read_kernel`` reads n int32 values once and writes one number for every ``chunk`` of them: their sum, modulo 2^32.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Reader(NamedTuple):
    """How a program reads: ``block`` values at a time with ``warps`` warps, ``chunk`` values in all."""

    block: int
    warps: int
    chunk: int

    def __str__(self) -> str:
        return f"{4 * self.block >> 10} KiB a step, {self.warps} warps, {4 * self.chunk >> 10} KiB a program"


# A thread has block / (32 warps) values in flight, in 16-byte loads: 64 to 256 bytes here.
STEPS = ((2048, 4), (4096, 4), (8192, 4), (8192, 8))
READERS = tuple(Reader(*step, chunk) for step in STEPS for chunk in (2**14, 2**17))


@triton.jit
def read_kernel(x_ptr, sums_ptr, chunk, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = x_ptr + program.to(tl.int64) * chunk + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, chunk, BLOCK):
        total += tl.load(x + at)
    tl.store(sums_ptr + program, tl.sum(total, 0))


@triton.jit
def empty_kernel(x_ptr):
    pass


def read(x: torch.Tensor, sums: torch.Tensor, reader: Reader) -> torch.Tensor:
    """Sums of the chunks of ``x``, int32, a multiple of ``reader.chunk``; written into the first of ``sums``."""
    programs = x.numel() // reader.chunk
    read_kernel[(programs,)](x, sums, reader.chunk, BLOCK=reader.block, num_warps=reader.warps)
    return sums[:programs]


def launch_nothing(x: torch.Tensor) -> None:
    empty_kernel[(1,)](x)
