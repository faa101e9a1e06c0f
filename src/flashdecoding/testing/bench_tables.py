"""A benchmark report as tables for the terminal and for Markdown, and as JSON."""

import json
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashdecoding.testing.bench import ONE_KEY, OWN_MEMORY_LIMIT, Measurement, Report
from flashdecoding.testing.peers import OURS, OURS_WITH_PLAN, Contender
from flashdecoding.testing.timing import Timing


def print_report(report: Report, console: Console) -> None:
    """Both tables and the notes."""
    header, *body = _cells(report)
    table = Table(title="Decode attention", caption=_ceilings(report), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number < 2)
    for cells in body:
        table.add_row(*cells)
    if body:
        console.print(table)
    if report.fixed:
        fixed = Table(title=f"Fixed cost: a call with one key ({ONE_KEY.shape} {ONE_KEY.dtype})", box=SIMPLE_HEAD)
        for name in ("", "median, us", "least, us"):
            fixed.add_column(name, justify="right" if name else "left")
        for cells in _fixed_cells(report):
            fixed.add_row(*cells)
        console.print(fixed)
    for note in _notes(report):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The same as Markdown, ending in a newline."""
    parts = []
    header, *body = _cells(report)
    if body:
        parts.append(_markdown_table(header, body, left=2))
        parts.append(_ceilings(report))
    if report.fixed:
        title = f"Fixed cost, {ONE_KEY.shape} {ONE_KEY.dtype}"
        parts.append(_markdown_table([title, "median, us", "least, us"], _fixed_cells(report), left=1))
    parts += _notes(report)
    return "\n\n".join(parts) + "\n"


def to_json(report: Report) -> str:
    """Everything measured, in seconds and bytes."""
    measurements = []
    for m in report.measurements:
        timings = {name: {**asdict(t), "share_of_limit": m.share_of_limit(name)} for name, t in m.timings.items()}
        measurements.append(
            {
                "shape": m.row.shape,
                **asdict(m.row),
                "nbytes": m.row.nbytes,
                "flops": m.row.flops,
                "copies": m.copies,
                "ceilings": asdict(m.ceilings),
                "limit_seconds": m.limit_seconds,
                "limited_by": "reading" if m.reading_is_the_limit else "arithmetic",
                "timings": timings,
                "missing": m.missing,
                "best_peer": m.best_peer,
                "best_peer_over_ours": m.ahead,
                "peak_bytes": m.peak_bytes,
                "partial_state_bytes": m.row.partial_bytes,
                "own_bytes": m.own_bytes,
            }
        )
    whole = {
        "machine": asdict(report.machine),
        "settings": asdict(report.settings),
        "measurements": measurements,
        "fixed_cost": {
            "shape": ONE_KEY.shape,
            "dtype": ONE_KEY.dtype,
            "timings": {name: asdict(timing) for name, timing in report.fixed.items()},
            "missing": report.fixed_missing,
        },
    }
    return json.dumps(whole, indent=2) + "\n"


def _explained(report: Report) -> list[str]:
    return [f"{c.label}: {c.about}." for c in _columns(report) if c.about]


def _columns(report: Report) -> list[Contender]:
    """Contenders with a timing in some row."""
    return [c for c in report.contenders if any(c.name in m.timings for m in report.measurements)]


def _cells(report: Report) -> list[list[str]]:
    columns = _columns(report)
    peers = len(columns) > 1
    cells = [["shape", "type", "limit", *(c.label for c in columns), *(["best peer / ours"] if peers else [])]]
    for m in report.measurements:
        ahead = [] if not peers else ["-" if m.ahead is None else f"{m.ahead:.2f}"]
        limit = f"{_digits(1e3 * m.limit_seconds)} {'read' if m.reading_is_the_limit else 'FMA'}"
        cells.append([m.row.shape, m.row.dtype, limit, *(_cell(m, c.name) for c in columns), *ahead])
    return cells


def _cell(m: Measurement, name: str) -> str:
    if name not in m.timings:
        return "-"
    return f"{_digits(1e3 * m.timings[name].median)} ({100 * m.share_of_limit(name):.0f})"


def _fixed_cells(report: Report) -> list[list[str]]:
    labels = {c.name: c.label for c in (*report.contenders, OURS_WITH_PLAN)}

    def cells(name: str, timing: Timing) -> list[str]:
        return [labels[name], f"{1e6 * timing.median:.1f}", f"{1e6 * timing.minimum:.1f}"]

    return [cells(name, timing) for name, timing in report.fixed.items()]


def _ceilings(report: Report) -> str:
    bandwidths = [m.ceilings.bandwidth / 1e9 for m in report.measurements]
    peaks = [m.ceilings.flops / 1e9 for m in report.measurements]
    if not bandwidths:
        return ""
    return (
        "Milliseconds a call, in brackets % of the limit: the larger of reading K and V at the read ceiling "
        f"({_range(bandwidths)} GB/s) and computing at the FMA peak ({_range(peaks)} GFLOP/s), both measured between "
        "the row's own calls. Shape: batch x q heads / kv heads x head dim x keys."
    )


def _notes(report: Report) -> list[str]:
    notes = [f"Machine: {report.machine}.", *_explained(report)]
    reasons: dict[str, list[str]] = {}
    for m in report.measurements:
        for name, reason in m.missing.items():
            if "wrong" in reason or "failed" in reason:
                reasons.setdefault(f"{name}: {reason}", []).append(f"{m.row.shape} {m.row.dtype}")
    for contender in report.contenders:
        if contender not in _columns(report) and report.measurements:
            reason = report.measurements[0].missing.get(contender.name, "")
            notes.append(f"{contender.label} is not measured: {reason}.")
    notes += [f"Not timed at {', '.join(rows)}: {reason}." for reason, rows in reasons.items()]
    if report.measurements:
        most = max(report.measurements, key=lambda m: m.own_bytes)
        notes.append(
            f"Memory of a {OURS.label} call beyond inputs, output and partial states: at most "
            f"{most.own_bytes / 1e3:.0f} KB (at {most.row.shape} {most.row.dtype}); partial states: at most "
            f"{max(m.row.partial_bytes for m in report.measurements) / 1e3:.0f} KB."
        )
    for m in report.too_much_memory:
        limit = OWN_MEMORY_LIMIT / 1e3
        notes.append(
            f"TOO MUCH MEMORY at {m.row.shape} {m.row.dtype}: {m.own_bytes / 1e3:.0f} KB, allowed {limit:.0f} KB."
        )
    return notes


def _markdown_table(header: list[str], body: list[list[str]], left: int) -> str:
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))


def _digits(x: float) -> str:
    """Three significant digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}" if x >= 1 else f"{x:.3f}"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"
