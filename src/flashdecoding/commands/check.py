"""`flashdecoding check`: this machine's results against float64, over a grid, as one table."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from flashdecoding.api import decode_attention
from flashdecoding.testing.cases import FEATURE_PAIRS, RAGGED, SINGLE_FEATURES, SIZES, Case
from flashdecoding.testing.compare import assert_within_bound, expect
from flashdecoding.testing.layouts import LAYOUTS, arrange

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DEFAULT_LAYOUTS = ("contiguous", "paged-16")


@dataclass
class _Line:
    """One row of the table: all cases of a dtype and head size."""

    dtype: str
    dims: str
    groups: set[int] = field(default_factory=set)
    calls: int = 0
    features: set[str] = field(default_factory=set)
    out_share: float = 0.0
    lse_share: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(console: Console, *, dtypes: Sequence[str], everything: bool) -> int:
    """Check the grid and print its table; 0 if every result is within the error bound, else 1.

    ``dtypes`` are keys of :data:`DTYPES`. ``everything`` adds pairs of features and all cache layouts.
    """
    cases = SIZES + RAGGED + SINGLE_FEATURES + (FEATURE_PAIRS if everything else ())
    cases = tuple(case for case in cases if case.dtype in {DTYPES[name] for name in dtypes})
    layouts = LAYOUTS if everything else DEFAULT_LAYOUTS
    started = time.perf_counter()
    lines: dict[tuple[str, str], _Line] = {}
    with Progress(console=console, transient=True) as progress:
        for case in progress.track(sorted(cases, key=_class), description="Checking"):
            line = lines.setdefault(_class(case), _Line(*_class(case)))
            _check(case, layouts, line)
    console.print(_table(list(lines.values())))
    failures = [failure for line in lines.values() for failure in line.failures]
    for failure in failures:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)
    calls = sum(line.calls for line in lines.values())
    verdict = f"{len(failures)} of {calls} calls are WRONG" if failures else f"All {calls} calls are within the bound"
    seconds = time.perf_counter() - started
    console.print(f"{verdict}; layouts {', '.join(layouts)}; {seconds:.0f} s", style="red" if failures else "green")
    return 1 if failures else 0


def _class(case: Case) -> tuple[str, str]:
    dtype = next(name for name, value in DTYPES.items() if value == case.dtype)
    dims = f"{case.head_dim}" if case.head_dim == case.head_dim_v else f"{case.head_dim}, v {case.head_dim_v}"
    return dtype, dims


def _check(case: Case, layouts: Sequence[str], line: _Line) -> None:
    built = case.build()
    expected = expect(built)
    line.groups.add(case.q_heads // case.kv_heads)
    line.features |= _features(case)
    for layout in layouts:
        problem = arrange(built, layout)
        label = f"{case.id} {layout}"
        line.calls += 1
        try:
            out, lse = decode_attention(problem.q, problem.k, problem.v, **problem.options, return_lse=True)
            assert_within_bound(out, lse, expected, label)
        except AssertionError as error:
            line.failures.append(str(error))
            continue
        except Exception as error:
            line.failures.append(f"{label}: {type(error).__name__}: {error}")
            continue
        line.out_share = max(line.out_share, _share(out, expected.out, expected.out_bound))
        line.lse_share = max(line.lse_share, _share(lse, expected.lse, expected.lse_bound))


def _features(case: Case) -> set[str]:
    present = {
        "drafts": isinstance(case.q_len, int) and case.q_len > 1,
        "ragged": not isinstance(case.q_len, int),
        "full": not case.causal,
        "window": case.window is not None,
        "softcap": case.softcap is not None,
        "sinks": case.sinks,
        "ALiBi": bool(case.alibi),
        "tree": case.mask in ("tree", "trees"),
        "mask": bool(case.mask) and case.mask not in ("tree", "trees"),
        "left padding": case.kv_begin,
        "latent": case.latent,
    }
    return {name for name, there in present.items() if there}


def _share(got: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """The largest error as a share of its bound, where both are finite and positive."""
    error = (got.double() - wanted).abs()
    known = error.isfinite() & (error > 0) & (bound > 0)
    return (error[known] / bound[known]).max().item() if known.any() else 0.0


def _table(lines: list[_Line]) -> Table:
    table = Table(
        title="decode_attention against float64",
        caption="out, lse: the largest error, as a share of the bound that dtype, values and scores allow.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("dtype", "head dim", "groups", "also with", "calls", "out", "lse", "result"):
        table.add_column(name, justify="right" if name in ("calls", "out", "lse") else "left")
    for line in lines:
        table.add_row(
            line.dtype,
            line.dims,
            ", ".join(map(str, sorted(line.groups))),
            ", ".join(sorted(line.features, key=str.lower)),
            str(line.calls),
            f"{line.out_share:.0%}",
            f"{line.lse_share:.0%}",
            f"[red]{len(line.failures)} wrong[/]" if line.failures else "[green]ok[/]",
        )
    return table
