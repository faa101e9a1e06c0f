"""Measuring on the CPU: what the machine is, what it can read and compute, and contenders taking turns on the clock.

Nothing here knows about attention. A ceiling is what the fastest of several plain PyTorch operations reaches:

    read bandwidth   bytes / median seconds of the fastest of READERS over memory far larger than the caches
    FMA peak         2 n^3 / median seconds of a float32 matrix product of n x n
"""

import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from flashdecoding import __version__

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "amax": torch.amax,
    "int64 sum": lambda x: x.view(torch.int64).sum(),
    "dot of halves": lambda x: torch.dot(*x.chunk(2)),
}
"""Operations that read a float32 vector once and write next to nothing; the fastest one is the read ceiling."""

READ_BYTES = 512 << 20
MATMUL_SIZE = 1536


@dataclass(frozen=True)
class Machine:
    """What a table of times has to name: processor, caches, threads, versions, date (UTC)."""

    cpu: str
    cores: int
    threads: int
    instructions: str
    last_level_cache_mib: float | None
    memory_gib: float
    system: str
    python: str
    torch: str
    numba: str
    flashdecoding: str
    date: str

    def __str__(self) -> str:
        cache = "" if self.last_level_cache_mib is None else f", {self.last_level_cache_mib:.0f} MiB last-level cache"
        return (
            f"{self.cpu}, {self.cores} cores ({self.instructions}{cache}, {self.memory_gib:.0f} GiB memory), "
            f"{self.threads} threads; {self.system}; Python {self.python}, torch {self.torch}, numba {self.numba}, "
            f"flashdecoding {self.flashdecoding}; {self.date}"
        )


@dataclass(frozen=True)
class Timing:
    """Seconds a call, of the calls that counted."""

    median: float
    minimum: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        return cls(statistics.median(seconds), min(seconds), len(seconds))


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second read and float operations a second (a fused multiply-add is two), and who read fastest."""

    bandwidth: float
    flops: float
    reader: str

    def seconds(self, nbytes: int, flops: int) -> tuple[float, bool]:
        """The least time for reading ``nbytes`` and computing ``flops``; whether reading is what takes it."""
        reading, computing = nbytes / self.bandwidth, flops / self.flops
        return max(reading, computing), reading >= computing


class CeilingProbes:
    """Calls that measure the ceilings, to be timed beside others; memory is allocated and written once."""

    def __init__(self, read_bytes: int = READ_BYTES, matmul_size: int = MATMUL_SIZE) -> None:
        self._data = torch.empty(read_bytes // 16 * 4, dtype=torch.float32)
        fill_random(self._data)
        self._a, self._b = torch.randn(2, matmul_size, matmul_size)
        self._product = torch.empty_like(self._a)

    def calls(self) -> dict[str, Callable[[], object]]:
        readers: dict[str, Callable[[], object]] = {
            f"read: {name}": lambda read=read: read(self._data)  # type: ignore[misc]
            for name, read in READERS.items()
        }
        return {**readers, "matmul": lambda: torch.mm(self._a, self._b, out=self._product)}

    def ceilings(self, timings: Mapping[str, Timing]) -> Ceilings:
        """From the timings of :meth:`calls`."""
        fastest = min(READERS, key=lambda name: timings[f"read: {name}"].median)
        bandwidth = self._data.nbytes / timings[f"read: {fastest}"].median
        return Ceilings(bandwidth, 2 * self._a.shape[0] ** 3 / timings["matmul"].median, fastest)


def take_turns(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, block_seconds: float, most_calls: int = 50
) -> dict[str, Timing]:
    """Time ``calls`` in ``rounds`` rounds, one after the other in each, so that drift of the machine hits all alike.

    A call's turn is one call that does not count (the caches and threads are as another contender left them) and as
    many that do as fit ``block_seconds``, at most ``most_calls``. A call for which ``block_seconds`` is too short takes
    its turn in the first, middle and last round only, and there every call counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    estimate = {name: min(_seconds(call), _seconds(call)) for name, call in calls.items()}
    for number in range(rounds):
        for name, call in calls.items():
            if estimate[name] > block_seconds:
                if number in (0, rounds // 2, rounds - 1):
                    seconds[name].append(_seconds(call))
                continue
            call()
            count = min(most_calls, max(1, int(block_seconds / max(estimate[name], 1e-9))))
            seconds[name] += [_seconds(call) for _ in range(count)]
    return {name: Timing.of(times) for name, times in seconds.items()}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fill_random(x: Tensor) -> None:
    """Write normally distributed values over ``x``, in place: 4 Mi different ones, repeated.

    Memory that was never written is one shared page of zeros, which reads at the speed of a cache.
    """
    flat = x.view(-1)
    values = torch.randn(min(flat.numel(), 1 << 22)).to(x.dtype)
    for piece in torch.split(flat, max(values.numel(), 1)):
        piece.copy_(values[: piece.numel()])


def peak_bytes(call: Callable[[], object], release: Callable[[], None] = lambda: None) -> int:
    """The most memory that PyTorch's CPU allocator held during ``call`` beyond what it held before.

    ``release`` frees what earlier calls have left for later ones.
    """
    call()
    release()
    with _quiet_stderr(), torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profiler:
        result = call()
    del result
    held = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drop what native code writes to stderr: the profiler announces its start and end there."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


@contextmanager
def threads_and_precision(threads: int | None) -> Iterator[None]:
    """Run with ``threads`` threads (None: as set) and float32 products in full precision; restored afterwards."""
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads or before)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)


def describe_machine() -> Machine:
    """This machine, with the number of threads that PyTorch uses now."""
    return Machine(
        cpu=_cpu_model(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        last_level_cache_mib=_last_level_cache_mib(),
        memory_gib=memory_bytes() / 2**30,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        numba=version("numba"),
        flashdecoding=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _last_level_cache_mib() -> float | None:
    """Size of core 0's largest cache, where the system tells."""
    units = {"K": 2**-10, "M": 1.0, "G": 2.0**10}
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [file.read_text(encoding="utf-8").strip() for file in files]
    return max((float(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units), default=None)
