"""`flashdecoding plan`: how a batch of lengths is cut into splits, and how the units of work fall on workers."""

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashdecoding.commands.inputs import BadInput
from flashdecoding.cpu.shape import MAX_ROWS
from flashdecoding.plan import SplitPlan

_SHOWN_SEQUENCES = 16
_SHOWN_WORKERS = 16
_MOST_UNITS = 1_000_000
_MOST_DRAWN_UNITS = 20_000
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


@dataclass(frozen=True)
class Unit:
    """A share of stage 1: one kv head and up to MAX_ROWS of its query rows, over the keys [begin, end) of one split."""

    sequence: int
    begin: int
    end: int

    @property
    def keys(self) -> int:
        return self.end - self.begin


def units_of(plan: SplitPlan) -> list[Unit]:
    """All units of stage 1 in the order in which workers take them. ``BadInput`` for more than a drawing can show."""
    problem = plan.problem
    blocks = -(-(problem.q_heads // problem.kv_heads) * problem.q_len // MAX_ROWS)
    count = plan.num_splits * blocks * problem.kv_heads
    if count > _MOST_UNITS:
        raise BadInput(f"this batch makes {count} units of work; plan draws at most {_MOST_UNITS}")
    return [
        Unit(sequence, begin, end)
        for sequence in range(problem.batch)
        for _ in range(blocks)
        for begin, end in plan.splits_of(sequence)
        for _ in range(problem.kv_heads)
    ]


def share_out(units: list[Unit], workers: int) -> list[list[Unit]]:
    """The units of each worker, if a key costs the same everywhere: whoever is free first takes the next unit."""
    shares: list[list[Unit]] = [[] for _ in range(workers)]
    free = [(0, worker) for worker in range(workers)]
    for unit in units:
        busy_until, worker = heapq.heappop(free)
        shares[worker].append(unit)
        heapq.heappush(free, (busy_until + unit.keys, worker))
    return shares


def show(console: Console, plan: SplitPlan, workers: int) -> None:
    """Draw the splits of each sequence and the load of each worker in the terminal."""
    units = units_of(plan)
    shares = share_out(units, workers)
    problem = plan.problem
    console.print(
        f"{problem.batch} sequences, {problem.q_heads} q heads on {problem.kv_heads} kv heads: "
        f"{plan.num_splits} splits, {len(units)} units of work for {workers} workers",
        highlight=False,
    )
    width = max(20, min(console.width, 120) - 40)
    console.print(_sequences_table(plan, width))
    console.print(_workers_table(shares, width))
    busy = [sum(unit.keys for unit in share) for share in shares]
    if sum(busy):
        mean = sum(busy) / workers
        console.print(f"The busiest worker reads {max(busy) / mean:.2f} times the mean.", highlight=False)


def save_png(path: Path, plan: SplitPlan, workers: int) -> None:
    """The same drawing as a PNG file. ``BadInput`` without matplotlib, or where the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("a PNG needs matplotlib: pip install 'flashdecoding[plots]'") from None
    if path.suffix.lower() != ".png":
        raise BadInput(f"the drawing is a PNG file, so its name must end in .png, got {path}")
    units = units_of(plan)
    if len(units) > _MOST_DRAWN_UNITS:
        raise BadInput(f"a PNG can show at most {_MOST_DRAWN_UNITS} units of work, this plan has {len(units)}")
    shares = share_out(units, workers)
    rows = (min(plan.problem.batch, 40), min(workers, 40))
    figure = Figure(figsize=(10, 2.4 + 0.22 * sum(rows)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[2 + rows[0], 2 + rows[1]])
    _draw_sequences(above, plan)
    _draw_workers(below, shares)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def _sequences_table(plan: SplitPlan, width: int) -> Table:
    table = Table(title="Splits of each sequence", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("sequence", "keys", "splits"):
        table.add_column(name, justify="right")
    table.add_column("from the first key to the last", no_wrap=True)
    seqlens = plan.seqlens.tolist()
    longest = max([1, *seqlens])
    for sequence, length in enumerate(seqlens[:_SHOWN_SEQUENCES]):
        splits = plan.splits_of(sequence)
        bar = Text()
        hidden = splits[0][0] if splits else length
        bar.append("·" * (hidden * width // longest), style="dim")  # out of the window's reach
        for number, (begin, end) in enumerate(splits):
            cells = end * width // longest - begin * width // longest
            bar.append("█" * cells, style=_COLOURS[number % 2])
        if splits and len(bar) == 0:
            bar.append("▏", style=_COLOURS[0])
        table.add_row(str(sequence), str(length), str(len(splits)), bar)
    if len(seqlens) > _SHOWN_SEQUENCES:
        table.add_row("...", "", "", Text(f"and {len(seqlens) - _SHOWN_SEQUENCES} more", style="dim"))
    return table


def _workers_table(shares: list[list[Unit]], width: int) -> Table:
    table = Table(
        title="Units on workers (a colour for each sequence)",
        caption="If a key costs the same everywhere; in a run, whoever is free first takes the next unit.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("worker", "units", "keys"):
        table.add_column(name, justify="right")
    table.add_column("time", no_wrap=True)
    longest = max([1, *(sum(unit.keys for unit in share) for share in shares)])
    for worker, share in enumerate(shares[:_SHOWN_WORKERS]):
        bar, at = Text(), 0
        for unit in share:
            cells = (at + unit.keys) * width // longest - at * width // longest
            bar.append("█" * cells, style=_COLOURS[unit.sequence % len(_COLOURS)])
            at += unit.keys
        table.add_row(str(worker), str(len(share)), str(at), bar)
    if len(shares) > _SHOWN_WORKERS:
        table.add_row("...", "", "", Text(f"and {len(shares) - _SHOWN_WORKERS} more", style="dim"))
    return table


def _draw_sequences(axes: Any, plan: SplitPlan) -> None:
    for sequence, length in enumerate(plan.seqlens.tolist()):
        for number, (begin, end) in enumerate(plan.splits_of(sequence)):
            axes.barh(
                sequence, end - begin, left=begin, color=_tint(sequence, number), edgecolor="white", linewidth=0.5
            )
        axes.barh(sequence, length, fill=False, edgecolor="0.7", linewidth=0.5)
    axes.set(title=f"{plan.num_splits} splits", xlabel="key", ylabel="sequence")
    _count_down(axes)


def _draw_workers(axes: Any, shares: list[list[Unit]]) -> None:
    for worker, share in enumerate(shares):
        at = 0
        for unit in share:
            colour = _tint(unit.sequence, 0)
            axes.barh(worker, unit.keys, left=at, color=colour, edgecolor="white", linewidth=0.3)
            at += unit.keys
    units = sum(map(len, shares))
    axes.set(title=f"{units} units of work on {len(shares)} workers", xlabel="keys read, all heads", ylabel="worker")
    _count_down(axes)


def _count_down(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _tint(sequence: int, split: int) -> tuple[str, float]:
    """A colour for each sequence, every second split paler."""
    return f"C{sequence % 10}", 1.0 if split % 2 == 0 else 0.6
