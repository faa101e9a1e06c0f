"""A benchmark report as tables for the terminal and for Markdown, and as JSON."""

import json
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashdecoding.testing.bench import ONE_KEY, OWN_MEMORY_LIMIT, Report
from flashdecoding.testing.peers import OURS, OURS_WITH_PLAN
from flashdecoding.testing.tables import ahead, cell, columns, digits, markdown_table, span, who_is_who
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
        parts.append(markdown_table(header, body, left=2))
        parts.append(_ceilings(report))
    if report.fixed:
        title = f"Fixed cost, {ONE_KEY.shape} {ONE_KEY.dtype}"
        parts.append(markdown_table([title, "median, us", "least, us"], _fixed_cells(report), left=1))
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


def _cells(report: Report) -> list[list[str]]:
    shown = columns(report.contenders, report.measurements)
    peers = len(shown) > 1
    cells = [["shape", "type", "limit", *(c.label for c in shown), *(["best peer / ours"] if peers else [])]]
    for m in report.measurements:
        limit = f"{digits(1e3 * m.limit_seconds)} {'read' if m.reading_is_the_limit else 'FMA'}"
        times = [cell(m, c.name, 1e3) for c in shown]
        cells.append([m.row.shape, m.row.dtype, limit, *times, *([ahead(m)] if peers else [])])
    return cells


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
        f"({span(bandwidths)} GB/s) and computing at the FMA peak ({span(peaks)} GFLOP/s), both measured between "
        "the row's own calls. Shape: batch x q heads / kv heads x head dim x keys."
    )


def _notes(report: Report) -> list[str]:
    notes = [f"Machine: {report.machine}.", *who_is_who(report.contenders, report.measurements)]
    if report.measurements:
        most = max(report.measurements, key=lambda m: m.own_bytes)
        notes.append(
            f"Memory of a {OURS.label} call beyond inputs, output and partial states: at most "
            f"{most.own_bytes / 1e3:.0f} KB (at {most.row_name}); partial states: at most "
            f"{max(m.row.partial_bytes for m in report.measurements) / 1e3:.0f} KB."
        )
    for m in report.too_much_memory:
        limit = OWN_MEMORY_LIMIT / 1e3
        notes.append(f"TOO MUCH MEMORY at {m.row_name}: {m.own_bytes / 1e3:.0f} KB, allowed {limit:.0f} KB.")
    return notes
