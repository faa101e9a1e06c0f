"""`flashdecoding bench --device cuda`: choose rows, run the benchmark, print and write each row when it is measured."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from flashdecoding.commands.inputs import BadInput, chosen
from flashdecoding.testing.gpu_bench import GpuReport, GpuSettings
from flashdecoding.testing.gpu_bench import run as run_benchmark
from flashdecoding.testing.gpu_inputs import copies_needed
from flashdecoding.testing.gpu_peers import GpuContender
from flashdecoding.testing.gpu_rows import DEFAULT_SETS, SETS, GpuRow, in_dtype, plain
from flashdecoding.testing.gpu_tables import line, markdown
from flashdecoding.testing.gpu_timing import l2_bytes

LEAST_SPACING = 200_000_000
"""Bytes read between two uses of one copy of a cache, or three times the L2 if that is more."""

Writers = Mapping[Path, Callable[[GpuReport], str]]


def run(console: Console, rows: Sequence[GpuRow], peers: Sequence[GpuContender], rounds: int, writers: Writers) -> int:
    """Run, print, write; 0 if every result of ours is right, else 1."""
    device = torch.device("cuda", torch.cuda.current_device())
    settings = GpuSettings(max(LEAST_SPACING, 3 * l2_bytes(device)), rounds)
    memory = torch.cuda.get_device_properties(device).total_memory
    for row in rows:
        if copies_needed(row.nbytes, settings.spacing_bytes) * row.stored_bytes > memory // 2:
            raise BadInput(f"the copies of the cache of {row.name} take more than half of the GPU's memory")

    def after(report: GpuReport, done: str) -> None:
        console.print(line(report, done), markup=False, highlight=False, soft_wrap=True)
        write(writers, report)

    with console.status("Starting") as status:
        report = run_benchmark(rows, peers, settings, device, progress=status.update, after=after)
    console.print("\n" + markdown(report), markup=False, highlight=False, soft_wrap=True)
    return 0 if report.good else 1


def choose_rows(sets: str | None, shapes: Sequence[str], dtypes: Sequence[str]) -> list[GpuRow]:
    """``all``, or names of sets with commas; or ``shapes`` in one piece. In bf16, or each of ``dtypes``."""
    if sets is not None and shapes:
        raise BadInput("--set and --shape are two ways to choose rows; give one of them")
    try:
        rows = [plain(shape) for shape in shapes]
    except ValueError as error:
        raise BadInput(str(error)) from error
    names = ",".join(DEFAULT_SETS) if sets is None else sets
    if not shapes:
        sets_of_rows = list(SETS.values()) if names == "all" else chosen(SETS, names, "sets", "all")
        rows = [row for one in sets_of_rows for row in one]
    return [in_dtype(row, dtype) for dtype in dtypes or ("bf16",) for row in rows]


def write(writers: Writers, report: GpuReport) -> None:
    """Replace each file at once, so that a run that is cut short leaves whole files."""
    for path, content in writers.items():
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.write_text(content(report), encoding="utf-8")
            os.replace(unfinished, path)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}") from error
