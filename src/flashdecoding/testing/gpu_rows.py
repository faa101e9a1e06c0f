"""Rows of the GPU's benchmark: sequences in one piece and equally long, or in pages, with drafts or a window."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashdecoding.testing.rows import DTYPES, Row


@dataclass(frozen=True)
class GpuRow:
    """One decode step. ``seqlens`` are the keys of each sequence, those of its ``q_len`` queries included.

    With ``page_size`` the cache is paged; without, all sequences have the same length.
    """

    label: str
    seqlens: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype_name: str = "bf16"
    q_len: int = 1
    page_size: int | None = None
    window: int | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        return self.label if self.dtype_name == "bf16" else f"{self.label} {self.dtype_name}"

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each sequence."""
        assert self.page_size is not None
        return tuple(-(-n // self.page_size) for n in self.seqlens)

    @property
    def capacity(self) -> int:
        """Keys that the cache can hold of a sequence."""
        return max(self.seqlens) if self.page_size is None else max(self.pages) * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that some query sees."""
        reach = math.inf if self.window is None else self.window + self.q_len - 1
        return self._bytes(sum(min(n, reach) for n in self.seqlens))

    @property
    def own_pages(self) -> tuple[int, ...]:
        """Pages of each sequence that have memory of their own.

        With a window those are the last ones, with room for kernels that begin to read well before it. Earlier
        entries of the page table name the same pages again, so that a long context needs little memory.
        """
        if self.window is None:
            return self.pages
        assert self.page_size is not None
        most = -(-(self.window + self.q_len + 1024) // self.page_size)
        return tuple(min(n, most) for n in self.pages)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole cache."""
        if self.page_size is None:
            return self._bytes(self.batch * self.capacity)
        return self._bytes(sum(self.own_pages) * self.page_size)

    def _bytes(self, keys: float) -> int:
        return int(2 * keys * self.kv_heads * self.head_dim * self.dtype.itemsize)


def plain(shape: str, dtype: str = "bf16") -> GpuRow:
    """Equally long sequences, each in one piece, one query each. ``ValueError`` as of :meth:`Row.parse`."""
    row = Row.parse(shape, dtype)
    return GpuRow(row.shape, (row.kv_len,) * row.batch, row.q_heads, row.kv_heads, row.head_dim, dtype)


def paged(shape: str, *, page_size: int = 16, q_len: int = 1, window: int | None = None, sinks: bool = False) -> GpuRow:
    """The same in pages."""
    drafts = [f"{q_len} queries"] if q_len > 1 else []
    reach = [] if window is None else [f"window {window}"]
    row = plain(shape)
    label = ", ".join([row.label, *drafts, f"page {page_size}", *reach, *(["sinks"] if sinks else [])])
    return replace(row, label=label, page_size=page_size, q_len=q_len, window=window, sinks=sinks)


def ragged(label: str, seqlens: Sequence[int], heads: tuple[int, int] = (32, 8)) -> GpuRow:
    """Sequences of these lengths in pages of 16, head size 128."""
    return GpuRow(f"{label}, {heads[0]}/{heads[1]}x128", tuple(seqlens), *heads, 128, page_size=16)


def lognormal(count: int, median: int, most: int, seed: int) -> list[int]:
    """Lengths as of chats: the logarithm is normal, with a standard deviation of 1.1; clipped to 1 to ``most``."""
    numbers = random.Random(seed)
    return [max(1, min(most, round(numbers.lognormvariate(math.log(median), 1.1)))) for _ in range(count)]


def uniform(count: int, most: int, seed: int) -> list[int]:
    """Lengths from 1 to ``most``, all equally likely."""
    numbers = random.Random(seed)
    return [numbers.randint(1, most) for _ in range(count)]


SETS: dict[str, tuple[GpuRow, ...]] = {
    "grid": tuple(
        plain(shape)
        for shape in (
            "1x32/8x128x1K",
            "1x32/8x128x8K",
            "1x32/8x128x64K",
            "1x32/8x128x512K",
            "1x64/8x128x128K",
            "1x8/1x128x128K",
            "1x32/32x128x32K",
            "8x32/8x128x4K",
            "32x32/8x128x8K",
            "128x32/8x128x2K",
            "16x64/8x64x8K",
            "4x16/8x256x16K",
        )
    ),
    "ragged": (
        ragged("one 128K + 31 of 1K", [128 << 10] + 31 * [1 << 10]),
        ragged("64 lognormal, median 4K, most 64K", lognormal(64, 4 << 10, 64 << 10, seed=0)),
        ragged("256 uniform in 1 to 4096", uniform(256, 4096, seed=0)),
        ragged("7777, 20001 and 333", [7777, 20001, 333], heads=(64, 8)),
    ),
    "drafts": tuple(
        paged(shape, q_len=q_len)
        for shape in ("1x32/8x128x8K", "8x32/8x128x4K", "32x32/8x128x8K", "8x64/8x128x8K")
        for q_len in (4, 8)
    ),
    "pages": tuple(paged("32x32/8x128x8K", page_size=size) for size in (1, 16, 64, 256)),
    "window": (paged("8x64/8x64x128K", window=128, sinks=True),),
}
"""Rows by the name of their set."""

DEFAULT_SETS = ("grid", "ragged")

HOST_ROW = plain("1x32/8x128x1K")
"""What a call costs the host is measured here: the GPU is done long before the host is."""


def in_dtype(row: GpuRow, dtype: str) -> GpuRow:
    return replace(row, dtype_name=dtype)
