"""Pieces of the tables of both benchmarks."""

from collections.abc import Sequence
from typing import Protocol

from flashdecoding.testing.comparison import Comparison, is_fault


class Column(Protocol):
    """What a table needs of a contender."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def about(self) -> str: ...


def columns(contenders: Sequence[Column], rows: Sequence[Comparison]) -> list[Column]:
    """Contenders with a timing in some row."""
    return [c for c in contenders if any(c.name in m.timings for m in rows)]


def cell(m: Comparison, name: str, per_second: float) -> str:
    """Time and, in brackets, % of the limit."""
    if name not in m.timings:
        return "-"
    return f"{digits(per_second * m.timings[name].median)} ({100 * m.share_of_limit(name):.0f})"


def ahead(m: Comparison) -> str:
    return "-" if m.ahead is None else f"{m.ahead:.2f}"


def who_is_who(contenders: Sequence[Column], rows: Sequence[Comparison]) -> list[str]:
    """A line for each column that needs one, and for each contender that is nowhere or failed somewhere."""
    shown = columns(contenders, rows)
    notes = [f"{c.label}: {c.about}." for c in shown if c.about]
    reasons: dict[str, list[str]] = {}
    for m in rows:
        for name, reason in m.missing.items():
            if is_fault(reason):
                reasons.setdefault(f"{name}: {reason}", []).append(m.row_name)
    for contender in contenders:
        if contender not in shown and rows:
            reason = rows[0].missing.get(contender.name, "")
            notes.append(f"{contender.label} is not measured: {reason}.")
    return notes + [f"Not timed at {', '.join(names)}: {reason}." for reason, names in reasons.items()]


def markdown_table(header: list[str], body: list[list[str]], left: int) -> str:
    """The first ``left`` columns aligned to the left."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))


def digits(x: float) -> str:
    """Three significant digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}" if x >= 1 else f"{x:.3f}"


def span(values: list[float]) -> str:
    """Least to largest."""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"
