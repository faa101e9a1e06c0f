"""The benchmark of one NVIDIA GPU: decode attention against what it can read, with other implementations beside it.

A row's limit is the time in which its visible K and V are read once at the read ceiling. `docs/benchmarking.md` says
how everything is measured.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashdecoding.testing.compare import assert_same_bits
from flashdecoding.testing.comparison import Comparison, NotTakingPart, check_against_ours, failure, is_ours
from flashdecoding.testing.gpu_inputs import Inputs, build, calls_in_graph, copies_needed, references
from flashdecoding.testing.gpu_peers import OURS, VARIANTS, GpuContender, Prepared
from flashdecoding.testing.gpu_rows import HOST_ROW, GpuRow
from flashdecoding.testing.gpu_timing import (
    Gpu,
    Graph,
    ReadCeiling,
    describe_gpu,
    host_seconds,
    measure_ceiling,
    replay_in_turns,
)
from flashdecoding.testing.timing import Timing


@dataclass(frozen=True)
class GpuSettings:
    """How often, and how many bytes are read between two uses of one copy of a cache."""

    spacing_bytes: int
    rounds: int = 7


@dataclass
class GpuMeasurement(Comparison):
    row: GpuRow
    copies: int
    calls: int

    @property
    def own_failures(self) -> dict[str, str]:
        """Why variants of our own call are left out."""
        return {name: reason for name, reason in self.missing.items() if is_ours(name)}


@dataclass
class GpuReport:
    """A whole run, or as much of it as is done."""

    gpu: Gpu
    settings: GpuSettings
    contenders: list[GpuContender]
    ceiling: ReadCeiling
    ceiling_afterwards: ReadCeiling | None = None
    measurements: list[GpuMeasurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # by row: why nothing is timed there
    host: dict[str, Timing] = field(default_factory=dict)
    host_missing: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether all of our own results were right."""
        own = [name for name in self.host_missing if is_ours(name)]
        return not (self.failures or own or any(m.own_failures for m in self.measurements))


def run(
    rows: Sequence[GpuRow],
    peers: Sequence[GpuContender],
    settings: GpuSettings,
    device: torch.device,
    *,
    progress: Callable[[str], None] = lambda _: None,
    after: Callable[[GpuReport, str], None] = lambda *_: None,
) -> GpuReport:
    """Measure ``rows``, then what a call costs the host.

    ``progress`` is told what comes next; ``after`` gets the report and the name of the row, or part, that was done. A
    row in which our own result is wrong, or our call raises, is not timed, and the run goes on.
    """
    with torch.no_grad():
        progress("read ceiling")
        ceiling = measure_ceiling(device, settings.rounds)
        report = GpuReport(describe_gpu(device), settings, [OURS, *VARIANTS, *peers], ceiling)
        after(report, "read ceiling")
        progress("peers compile")
        report.contenders = [_built(contender, [*rows, HOST_ROW]) for contender in report.contenders]
        for number, row in enumerate(rows, 1):
            progress(f"{number} of {len(rows)}: {row.name}")
            try:
                report.measurements.append(measure(row, report.contenders, ceiling, settings, device))
            except Exception as error:
                report.failures[row.name] = failure(error)
            _free(device)
            after(report, row.name)
        progress("host cost of a call, and the read ceiling again")
        _measure_host(report, device)
        _free(device)
        report.ceiling_afterwards = measure_ceiling(device, settings.rounds)
        after(report, "host cost")
    return report


def measure(
    row: GpuRow, contenders: Sequence[GpuContender], ceiling: ReadCeiling, settings: GpuSettings, device: torch.device
) -> GpuMeasurement:
    """One row: check everybody's result, capture graphs, let them take turns, and check what the replays left."""
    copies = copies_needed(row.nbytes, settings.spacing_bytes)
    calls = calls_in_graph(row.nbytes, copies)
    inputs = build(row, copies, device)
    prepared, missing = checked(inputs, contenders)
    graphs: dict[str, Graph] = {}
    for contender in contenders:
        if contender.name in prepared:
            try:
                with contender.context():
                    graphs[contender.name] = Graph(prepared[contender.name].calls, calls)
            except Exception as error:
                _leave_out(contender, error, missing)
    timings = replay_in_turns(graphs, rounds=settings.rounds, calls=calls)
    for contender in contenders:
        if contender.name in graphs:
            try:
                _check_replayed(contender, graphs[contender.name], prepared[contender.name])
            except Exception as error:
                del timings[contender.name]
                _leave_out(contender, error, missing)
    limit = row.nbytes / ceiling.bandwidth
    return GpuMeasurement(row.name, limit, timings, missing, row, copies, calls)


def checked(inputs: Inputs, contenders: Sequence[GpuContender]) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Calls of each contender whose result is right; the reason for each other one. Ours comes first, and must be."""
    right = references(inputs)
    ours: Tensor | None = None
    prepared: dict[str, Prepared] = {}
    missing: dict[str, str] = {}
    for contender in contenders:
        try:
            with contender.context():
                ready = contender.prepare(inputs)
                out = ready.heads_first(ready.calls[0]()).clone()
            if is_ours(contender.name):
                for reference in right:
                    reference.check(out)
            if ours is None:
                ours = out
            check_against_ours(out, ours)
        except Exception as error:
            _leave_out(contender, error, missing)
        else:
            prepared[contender.name] = ready
    return prepared, missing


def _check_replayed(contender: GpuContender, graph: Graph, prepared: Prepared) -> None:
    """A replay writes what the last of its calls gives without a graph: ours to the bit."""
    graph.result.fill_(torch.nan)
    graph.replay()
    replayed = graph.result.clone()
    with contender.context():
        alone = prepared.calls[-1]()
    if is_ours(contender.name):
        assert_same_bits(replayed, alone, f"{contender.name}, replayed")
    check_against_ours(replayed, alone)


def _leave_out(contender: GpuContender, error: Exception, missing: dict[str, str]) -> None:
    """Without our own call there is nothing to compare: its errors end the row."""
    if contender.name == OURS.name:
        raise error
    missing[contender.name] = failure(error)


def _built(contender: GpuContender, rows: Sequence[GpuRow]) -> GpuContender:
    """The contender with its code compiled; if that fails, one that says so in every row without another try."""
    if contender.build is None:
        return contender
    try:
        contender.build(rows)
    except Exception as error:
        reason = failure(error)

        def refuse(_: Inputs) -> Prepared:
            raise NotTakingPart(reason)

        return replace(contender, prepare=refuse)
    return contender


def _measure_host(report: GpuReport, device: torch.device) -> None:
    try:
        copies = copies_needed(HOST_ROW.nbytes, report.settings.spacing_bytes)
        prepared, report.host_missing = checked(build(HOST_ROW, copies, device), report.contenders)
    except Exception as error:
        report.failures["host cost"] = failure(error)
        return
    for contender in report.contenders:
        if contender.name in prepared:
            with contender.context():
                report.host[contender.name] = host_seconds(prepared[contender.name].calls, device)


def _free(device: torch.device) -> None:
    """Give back what a row has left: graphs and compiled calls hold memory in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
