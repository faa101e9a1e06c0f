"""The benchmark: decode attention against what this machine can read and compute, with other implementations beside it.

A row is one shape and dtype. Its limit is the larger of two times: K and V read once at the read ceiling, and the
multiplications and additions at the FMA peak, both measured between the row's own calls.
`docs/benchmarking.md` says how.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashdecoding.cpu import workspace
from flashdecoding.testing.cases import Problem
from flashdecoding.testing.compare import assert_within_bound, expect
from flashdecoding.testing.comparison import Comparison, NotTakingPart, check_against_ours, failure
from flashdecoding.testing.peers import OURS, OURS_WITH_PLAN, Contender
from flashdecoding.testing.rows import DTYPES, Row
from flashdecoding.testing.timing import (
    READ_BYTES,
    CeilingProbes,
    Ceilings,
    Machine,
    Timing,
    describe_machine,
    fill_random,
    peak_bytes,
    take_turns,
    threads_and_precision,
)

OWN_MEMORY_LIMIT = 1 << 20
"""Bytes a call may allocate beyond its output and the partial states of its splits."""


def _rows(shape: str, *dtypes: str) -> tuple[Row, ...]:
    return tuple(Row.parse(shape, dtype) for dtype in dtypes)


GRID: tuple[Row, ...] = (
    *_rows("1x32/8x128x1K", "bf16"),
    *_rows("1x32/8x128x8K", "bf16", "fp16", "fp32"),
    *_rows("1x32/8x128x128K", "bf16"),
    *_rows("8x32/8x128x4K", "bf16"),
    *_rows("1x8/8x64x16K", "bf16", "fp32"),
    *_rows("1x8/8x128x16K", "bf16", "fp16", "fp32"),
    *_rows("1x64/4x128x16K", "bf16", "fp16", "fp32"),
    *_rows("1x32/1x128x16K", "bf16"),
)
"""Group sizes 4, 1, 16 and 32."""

ONE_KEY = Row.parse("1x32/8x128x1", "bf16")
"""Nothing to read and nothing to compute: what is left is the fixed cost of a call."""


@dataclass(frozen=True)
class Settings:
    """How long and with how much memory: K and V rotate through ``pool_bytes``, readers read half as much."""

    threads: int | None = None
    pool_bytes: int = 2 * READ_BYTES
    rounds: int = 7
    block_seconds: float = 0.06


@dataclass
class Measurement(Comparison):
    """One row, with the ceilings of the same minutes and the memory that a call of ours takes."""

    row: Row
    ceilings: Ceilings
    reading_is_the_limit: bool
    copies: int
    peak_bytes: int

    @property
    def own_bytes(self) -> int:
        """Bytes that a call allocates at once, beyond its output and partial states."""
        output = self.row.batch * self.row.q_heads * self.row.head_dim * DTYPES[self.row.dtype].itemsize
        return max(0, self.peak_bytes - output - self.row.partial_bytes)


@dataclass
class Report:
    """A whole run."""

    machine: Machine
    settings: Settings
    contenders: list[Contender]
    measurements: list[Measurement] = field(default_factory=list)
    fixed: dict[str, Timing] = field(default_factory=dict)  # seconds of a call with one key
    fixed_missing: dict[str, str] = field(default_factory=dict)

    @property
    def too_much_memory(self) -> list[Measurement]:
        return [m for m in self.measurements if m.own_bytes >= OWN_MEMORY_LIMIT]


class Caches:
    """K and V for the rows, in one piece of memory that is refilled when the dtype changes.

    Taking the copies of a row in turn, whoever asks, keeps every call from finding its keys in a cache.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._dtype: torch.dtype | None = None

    def copies(self, row: Row) -> list[tuple[Tensor, Tensor]]:
        """At least two pairs of (B, Hkv, N, D), together as large as the memory allows."""
        dtype = DTYPES[row.dtype]
        if self._memory.numel() < 2 * row.nbytes:
            self._memory, self._dtype = torch.empty(2 * row.nbytes, dtype=torch.uint8), None
        flat = self._memory[: self._memory.numel() // 64 * 64].view(dtype)
        if self._dtype != dtype:
            fill_random(flat)
            self._dtype = dtype
        size = row.nbytes // 2 // dtype.itemsize
        shape = (row.batch, row.kv_heads, row.kv_len, row.head_dim)
        most = min(flat.numel() // size // 2, 4096)
        caches = [flat[i * size : (i + 1) * size].view(shape) for i in range(2 * most)]
        return list(zip(caches[::2], caches[1::2], strict=True))


def run(
    rows: Sequence[Row],
    peers: Sequence[Contender],
    settings: Settings,
    *,
    fixed_cost: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure ``rows``, then the fixed cost of a call. ``AssertionError`` if our own result misses the error bound.

    ``progress`` is told what comes next. A peer that cannot do a row, or whose result is wrong, is not timed there.
    """
    with threads_and_precision(settings.threads), torch.inference_mode():
        report = Report(describe_machine(), settings, [OURS, *peers])
        caches, probes = Caches(settings.pool_bytes), CeilingProbes(settings.pool_bytes // 2)
        for number, row in enumerate(rows, 1):
            progress(f"{number} of {len(rows)}: {row.name}")
            report.measurements.append(measure(row, report.contenders, caches, probes, settings))
        if fixed_cost:
            progress("fixed cost of a call")
            calls, report.fixed_missing = _checked_calls(ONE_KEY, [OURS, OURS_WITH_PLAN, *peers], caches)
            report.fixed = take_turns(
                calls, rounds=settings.rounds, block_seconds=settings.block_seconds, most_calls=500
            )
    return report


def measure(
    row: Row, contenders: Iterable[Contender], caches: Caches, probes: CeilingProbes, settings: Settings
) -> Measurement:
    """One row: check everybody's result, then let contenders and ceiling probes take turns on the clock."""
    calls, missing = _checked_calls(row, contenders, caches)
    peak = peak_bytes(calls[OURS.name], workspace.release)
    timings = take_turns({**calls, **probes.calls()}, rounds=settings.rounds, block_seconds=settings.block_seconds)
    ceilings = probes.ceilings(timings)
    limit, reading = ceilings.seconds(row.nbytes, row.flops)
    return Measurement(
        row_name=row.name,
        row=row,
        ceilings=ceilings,
        limit_seconds=limit,
        reading_is_the_limit=reading,
        copies=len(caches.copies(row)),
        timings={name: timings[name] for name in calls},
        missing=missing,
        peak_bytes=peak,
    )


def _checked_calls(
    row: Row, contenders: Iterable[Contender], caches: Caches
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """A call for each contender whose result is right; the reason for each other one."""
    q = torch.randn(row.batch, row.q_heads, 1, row.head_dim).to(DTYPES[row.dtype])
    copies = caches.copies(row)
    k, v = copies[0]
    turn = _Turn(copies)
    ours = OURS.prepare(q, k)(k, v)
    _check_against_reference(row, q, k, v, ours)
    calls: dict[str, Callable[[], Tensor]] = {}
    missing: dict[str, str] = {}
    for contender in contenders:
        try:
            attention = contender.prepare(q, k)
            check_against_ours(attention(k, v), ours)
        except (NotTakingPart, NotImplementedError, RuntimeError) as error:  # the latter: PyTorch and its compiler
            if contender in (OURS, OURS_WITH_PLAN):
                raise
            missing[contender.name] = failure(error)
        else:
            calls[contender.name] = lambda attention=attention: attention(*turn.next())  # type: ignore[misc]
    return calls, missing


class _Turn:
    """The copies of a cache in turn, over all contenders: no one reads what another has just read."""

    def __init__(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._copies = copies
        self._next = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self._next = (self._next + 1) % len(self._copies)
        return self._copies[self._next]


def _check_against_reference(row: Row, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """The first kv head of the last sequence, within the error bound of float64 over all of its keys."""
    group, last = row.q_heads // row.kv_heads, slice(row.batch - 1, row.batch)
    options: dict[str, Any] = {"seqlens": torch.tensor([row.kv_len], dtype=torch.int32)}
    problem = Problem(q[last, :group], k[last, :1], v[last, :1], options)
    assert_within_bound(out[last, :group], None, expect(problem), f"{row.name}")
