"""`flashdecoding bench`: choose rows and peers, run the benchmark, print and write its report."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flashdecoding.commands.inputs import BadInput
from flashdecoding.testing.bench import GRID, Settings
from flashdecoding.testing.bench import run as run_benchmark
from flashdecoding.testing.bench_tables import markdown, print_report, to_json
from flashdecoding.testing.peers import PEERS, Contender
from flashdecoding.testing.rows import Row
from flashdecoding.testing.timing import memory_bytes, usable_cores


def run(
    console: Console,
    *,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    peers: str,
    threads: int | None,
    rounds: int,
    memory_mib: int,
    json_path: Path | None,
    markdown_path: Path | None,
) -> int:
    """Run, print, write; 0 if every result is right and no call takes too much memory, else 1."""
    rows = choose_rows(shapes, dtypes)
    contenders = choose_peers(peers)
    if threads is not None and threads > usable_cores():
        raise BadInput(f"--threads must be at most the {usable_cores()} cores of this process, got {threads}")
    paths = {path: content for path, content in ((json_path, to_json), (markdown_path, markdown)) if path is not None}
    for path in paths:
        if not path.absolute().parent.is_dir():
            raise BadInput(f"cannot write {path}: its folder does not exist")
        if path.is_dir():
            raise BadInput(f"cannot write {path}: it is a folder")
    settings = Settings(threads=threads, rounds=rounds, pool_bytes=memory_mib << 20)
    try:
        with console.status("Starting") as status:
            report = run_benchmark(rows, contenders, settings, progress=status.update)
    except AssertionError as error:
        console.print(f"A result is wrong, nothing more is timed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    print_report(report, console)
    for path, content in paths.items():
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
            raise BadInput(f"two copies of the cache of {row.shape} {row.dtype} take more than half of the memory")
    return rows or [row for row in GRID if not dtypes or row.dtype in dtypes]


def choose_peers(names: str) -> list[Contender]:
    """``all``, ``none``, or names of peers with commas."""
    if names in ("all", "none"):
        return list(PEERS.values()) if names == "all" else []
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise BadInput(f"peers are {', '.join(PEERS)}, or all or none; got {', '.join(map(repr, unknown))}")
    return [PEERS[name] for name in PEERS if name in wanted]
