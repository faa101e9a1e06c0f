"""`flashdecoding bench`: choose device, rows and peers, run the benchmark, print and write its report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from flashdecoding.commands.inputs import BadInput, T, chosen, writable
from flashdecoding.testing.bench import GRID, Report, Settings
from flashdecoding.testing.bench import run as run_benchmark
from flashdecoding.testing.bench_tables import markdown, print_report, to_json
from flashdecoding.testing.peers import PEERS, Contender
from flashdecoding.testing.rows import Row
from flashdecoding.testing.timing import memory_bytes, usable_cores


def run(
    console: Console,
    *,
    device: str | None,
    sets: str | None,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    peers: str,
    threads: int | None,
    rounds: int,
    memory_mib: int | None,
    json_path: Path | None,
    markdown_path: Path | None,
) -> int:
    """Run, print, write; 0 if every result is right and no call takes too much memory, else 1."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    paths = [None if path is None else writable(path) for path in (json_path, markdown_path)]
    if device == "cpu":
        if sets is not None:
            raise BadInput("--set is for --device cuda")
        rows, contenders = choose_rows(shapes, dtypes), choose_peers(PEERS, peers)
        if threads is not None and threads > usable_cores():
            raise BadInput(f"--threads must be at most the {usable_cores()} cores of this process, got {threads}")
        settings = Settings(threads=threads, rounds=rounds, pool_bytes=(memory_mib or 1024) << 20)
        writers = {path: to for path, to in zip(paths, (to_json, markdown), strict=True) if path is not None}
        return _run_on_cpu(console, rows, contenders, settings, writers)
    if threads is not None or memory_mib is not None:
        raise BadInput("--threads and --memory are for --device cpu")
    from flashdecoding.commands import gpu_bench
    from flashdecoding.testing import gpu_tables
    from flashdecoding.testing.gpu_peers import GPU_PEERS

    gpu_rows, gpu_peers = gpu_bench.choose_rows(sets, shapes, dtypes), choose_peers(GPU_PEERS, peers)
    if not torch.cuda.is_available():
        raise BadInput("--device cuda: torch finds no CUDA GPU here")
    contents = (gpu_tables.to_json, gpu_tables.markdown)
    gpu_writers = {path: to for path, to in zip(paths, contents, strict=True) if path is not None}
    return gpu_bench.run(console, gpu_rows, gpu_peers, rounds, gpu_writers)


def _run_on_cpu(
    console: Console,
    rows: Sequence[Row],
    contenders: Sequence[Contender],
    settings: Settings,
    writers: Mapping[Path, Callable[[Report], str]],
) -> int:
    try:
        with console.status("Starting") as status:
            report = run_benchmark(rows, contenders, settings, progress=status.update)
    except AssertionError as error:
        console.print(f"A result is wrong, nothing more is timed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    print_report(report, console)
    for path, content in writers.items():
        try:
            path.write_text(content(report), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}") from error
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
    return 1 if report.too_much_memory else 0


def choose_rows(shapes: Sequence[str], dtypes: Sequence[str]) -> list[Row]:
    """The grid, or ``shapes`` in bf16 unless ``dtypes`` says otherwise; ``dtypes`` restricts the grid."""
    try:
        rows = [Row.parse(shape, dtype) for shape in shapes for dtype in dtypes or ("bf16",)]
    except ValueError as error:
        raise BadInput(str(error)) from error
    for row in rows:
        if 2 * row.nbytes > memory_bytes() // 2:
            raise BadInput(f"two copies of the cache of {row.name} take more than half of the memory")
    return rows or [row for row in GRID if not dtypes or row.dtype in dtypes]


def choose_peers(available: Mapping[str, T], names: str) -> list[T]:
    """``all``, ``none``, or names of peers with commas."""
    if names in ("all", "none"):
        return list(available.values()) if names == "all" else []
    return chosen(available, names, "peers", "all or none")
