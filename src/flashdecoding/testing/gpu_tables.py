"""A GPU benchmark report as lines while it runs, as Markdown, and as JSON."""

import json
from dataclasses import asdict

from flashdecoding.testing.comparison import is_fault, is_ours
from flashdecoding.testing.gpu_bench import GpuMeasurement, GpuReport
from flashdecoding.testing.gpu_rows import HOST_ROW
from flashdecoding.testing.gpu_timing import ReadCeiling
from flashdecoding.testing.tables import ahead, cell, columns, digits, markdown_table, who_is_who


def line(report: GpuReport, done: str) -> str:
    """What there is to say of the row, or part, that was done last."""
    if done in report.failures:
        return f"{done}: NOT MEASURED: {report.failures[done]}"
    for m in report.measurements[-1:]:
        if m.row_name == done:
            return _row_line(m)
    if report.host and done == "host cost":
        costs = ", ".join(f"{name} {1e6 * timing.median:.1f}" for name, timing in report.host.items())
        return f"host cost of an eager call at {HOST_ROW.name}, us: {costs}"
    return f"{report.gpu}\n{_ceiling(report.ceiling)}"


def markdown(report: GpuReport) -> str:
    """The tables and notes, ending in a newline."""
    parts = []
    if report.measurements:
        header, *body = _cells(report)
        parts.append(markdown_table(header, body, left=1))
        parts.append(
            "Microseconds a call on the GPU, replayed in CUDA graphs with cold caches, in brackets % of the limit: the "
            "keys and values that some query sees, read once at the read ceiling. Rows: sequences x q heads / kv heads "
            "x head dim x keys, bf16 unless they say otherwise."
        )
    if report.host:
        labels = {c.name: c.label for c in report.contenders}
        costs = [[labels[name], f"{1e6 * timing.median:.1f}"] for name, timing in report.host.items()]
        parts.append(markdown_table([f"Host cost of an eager call, {HOST_ROW.name}", "us"], costs, left=1))
    parts.append(f"Machine: {report.gpu}.")
    parts.append(_ceiling(report.ceiling, report.ceiling_afterwards))
    parts += who_is_who(report.contenders, report.measurements)
    parts += [f"NOT MEASURED: {name}: {reason}." for name, reason in report.failures.items()]
    return "\n\n".join(parts) + "\n"


def to_json(report: GpuReport) -> str:
    """Everything measured, in seconds and bytes."""
    whole = {
        "gpu": asdict(report.gpu),
        "settings": asdict(report.settings),
        "ceiling": asdict(report.ceiling),
        "ceiling_afterwards": None if report.ceiling_afterwards is None else asdict(report.ceiling_afterwards),
        "measurements": [_measurement(m) for m in report.measurements],
        "failures": report.failures,
        "host_cost": {
            "row": HOST_ROW.name,
            "timings": {name: asdict(timing) for name, timing in report.host.items()},
            "missing": report.host_missing,
        },
    }
    return json.dumps(whole, indent=2) + "\n"


def _measurement(m: GpuMeasurement) -> dict[str, object]:
    timings = {name: {**asdict(t), "share_of_limit": m.share_of_limit(name)} for name, t in m.timings.items()}
    row = {name: value for name, value in asdict(m.row).items() if name != "label"}
    return {
        "row": m.row_name,
        **row,
        "nbytes": m.row.nbytes,
        "copies": m.copies,
        "calls": m.calls,
        "limit_seconds": m.limit_seconds,
        "timings": timings,
        "missing": m.missing,
        "best_peer": m.best_peer,
        "best_peer_over_ours": m.ahead,
    }


def _row_line(m: GpuMeasurement) -> str:
    times = ", ".join(f"{name} {cell(m, name, 1e6)}" for name in m.timings)
    versus = "" if m.best_peer is None else f"; best peer / ours {ahead(m)} ({m.best_peer})"
    errors = [f"\n  {name}: {reason}" for name, reason in m.missing.items() if is_fault(reason)]
    return f"{m.row_name}: limit {digits(1e6 * m.limit_seconds)} us; {times}{versus}{''.join(errors)}"


def _cells(report: GpuReport) -> list[list[str]]:
    shown = columns(report.contenders, report.measurements)
    peers = any(not is_ours(c.name) for c in shown)
    last = ["best peer / ours"] if peers else []
    cells = [["row", "bytes", "limit", *(c.label for c in shown), *last]]
    for m in report.measurements:
        limit = digits(1e6 * m.limit_seconds)
        times = [cell(m, c.name, 1e6) for c in shown]
        cells.append([m.row_name, _bytes(m.row.nbytes), limit, *times, *([ahead(m)] if peers else [])])
    return cells


def _bytes(nbytes: int) -> str:
    return f"{digits(nbytes / 1e9)} GB" if nbytes >= 1e9 else f"{digits(nbytes / 1e6)} MB"


def _ceiling(ceiling: ReadCeiling, afterwards: ReadCeiling | None = None) -> str:
    """``torch.sum`` beside the fastest reader, and how much they changed until the end of the run."""
    again = "" if afterwards is None else f", {afterwards.bandwidth / 1e12:.3f} after the last row"
    others = f"; torch.sum {ceiling.readers['torch.sum'] / 1e12:.3f}" if "torch.sum" in ceiling.readers else ""
    return (
        f"Read ceiling {ceiling.bandwidth / 1e12:.3f} TB/s{again} (fastest reader: {ceiling.reader}{others}); "
        f"an empty kernel in a graph takes {1e6 * ceiling.empty_kernel_seconds:.2f} us."
    )
