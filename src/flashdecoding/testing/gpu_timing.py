"""Measuring one NVIDIA GPU: what it is, what it can read, calls as CUDA graphs, and what a call costs the host.

Nothing here knows about attention. A time on the GPU is that of a graph's replay, by events of the stream, over the
calls in the graph. The read ceiling is what the fastest of several kernels reaches that read memory once:

    bandwidth   READ_BYTES / median seconds of the fastest of READERS and torch.sum
"""

import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashdecoding import __version__
from flashdecoding.testing.timing import Timing

READ_BYTES = 4 << 30
EMPTY_KERNELS = 200
REPLAYS = 3  # that count, in a turn

Call = Callable[[], Any]


@dataclass(frozen=True)
class Gpu:
    """What a table of times has to name: device, driver, versions, date (UTC)."""

    name: str
    multiprocessors: int
    l2_mib: float
    memory_gib: float
    driver: str
    cuda: str
    versions: dict[str, str]
    date: str

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.name} ({self.multiprocessors} multiprocessors, {self.l2_mib:.0f} MiB L2, {self.memory_gib:.0f} GiB "
            f"memory), driver {self.driver}, CUDA {self.cuda}; {versions}; {self.date}"
        )


@dataclass(frozen=True)
class ReadCeiling:
    """Bytes a second read: the fastest reader, and each; and the seconds of an empty kernel in a graph."""

    bandwidth: float
    reader: str
    readers: dict[str, float]
    empty_kernel_seconds: float


class Graph:
    """``number`` calls, taken in turn from ``calls``, as a CUDA graph; ``result`` is what its last call gives."""

    def __init__(self, calls: Sequence[Call], number: int) -> None:
        stream = _capture_stream()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # which a capture that fails does not always leave by itself
            for call in calls[:3]:  # what is compiled or allocated once happens here
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                for index in range(number):
                    self.result = calls[index % len(calls)]()

    def replay(self) -> None:
        self._graph.replay()


@cache
def _capture_stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def replay_in_turns(graphs: Mapping[str, Graph], *, rounds: int, calls: int) -> dict[str, Timing]:
    """Seconds of one of a graph's ``calls``. In each round every graph has a turn, so that drift hits all alike.

    A turn is one replay that does not count, behind which the host runs ahead, and REPLAYS that do.
    """
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            events = [_event() for _ in range(REPLAYS + 1)]
            graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            seconds[name] += [begin.elapsed_time(end) / 1e3 / calls for begin, end in pairwise(events)]
    return {name: Timing.of(times) for name, times in seconds.items()}


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_seconds(calls: Sequence[Call], device: torch.device, *, repeats: int = 500, rounds: int = 3) -> Timing:
    """Wall-clock seconds of a call without a graph, means over ``repeats`` calls with a sync after the last."""
    means = []
    for number in range(rounds + 1):  # the first does not count
        synchronize(device)
        begin = time.perf_counter()
        for index in range(repeats):
            calls[index % len(calls)]()
        synchronize(device)
        if number:
            means.append((time.perf_counter() - begin) / repeats)
    return Timing.of(means)


def measure_ceiling(device: torch.device, rounds: int) -> ReadCeiling:
    """Read READ_BYTES with every reader, check that they read them all, and take the fastest."""
    from flashdecoding.gpu import probes

    x = torch.randn(READ_BYTES // 4, device=device)
    words = x.view(torch.int32)
    most_programs = words.numel() // min(reader.chunk for reader in probes.READERS)
    sums = torch.empty(most_programs, dtype=torch.int32, device=device)
    total = _modulo_32_bits(words)
    graphs = {"torch.sum": Graph([partial(torch.sum, x)], 1)}
    for reader in probes.READERS:
        call = partial(probes.read, words, sums, reader)
        if _modulo_32_bits(call()) != total:
            raise AssertionError(f"the reader of {reader} does not read everything")
        graphs[str(reader)] = Graph([call], 1)
    timings = replay_in_turns(graphs, rounds=rounds, calls=1)
    readers = {name: x.nbytes / timing.median for name, timing in timings.items()}
    empty = Graph([partial(probes.launch_nothing, words)], EMPTY_KERNELS)
    nothing = replay_in_turns({"": empty}, rounds=rounds, calls=EMPTY_KERNELS)[""]
    fastest = max(readers, key=readers.__getitem__)
    return ReadCeiling(readers[fastest], fastest, readers, nothing.median)


def _modulo_32_bits(x: Tensor) -> int:
    return int(x.sum(dtype=torch.int64).item()) & 0xFFFFFFFF


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def l2_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def describe_gpu(device: torch.device) -> Gpu:
    """The device and the versions of what runs on it."""
    properties = torch.cuda.get_device_properties(device)
    others = {name: _version(name) for name in ("triton", "flashinfer-python")}
    return Gpu(
        name=properties.name,
        multiprocessors=properties.multi_processor_count,
        l2_mib=l2_bytes(device) / 2**20,
        memory_gib=properties.total_memory / 2**30,
        driver=_driver(),
        cuda=str(torch.version.cuda),
        versions={
            "Python": platform.python_version(),
            "torch": torch.__version__,
            **{name: number for name, number in others.items() if number is not None},
            "flashdecoding": __version__,
        },
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n", 1)[0].strip() or "unknown"
