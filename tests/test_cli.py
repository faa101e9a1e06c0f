"""The command line: help, good runs and exit codes, bad input as one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from flashdecoding import __version__, demo
from flashdecoding.api import plan_decode
from flashdecoding.cli import app
from flashdecoding.commands import bench, check, gpu_bench, plan_view
from flashdecoding.commands.plan_view import share_out, units_of

COMMANDS = ("demo", "check", "explain", "plan", "bench")

BAD_INPUT = {
    "unknown-command": ("frobnicate",),
    "unknown-option": ("explain", "--nothing"),
    "scores-word": ("explain", "--scores", "1,two"),
    "scores-empty": ("explain", "--scores", ""),
    "scores-nan": ("explain", "--scores", "1,nan"),
    "scores-inf": ("explain", "--scores", "1,inf"),
    "scores-many": ("explain", "--scores", ",".join(["1"] * 65)),
    "values-alone": ("explain", "--values", "1,2"),
    "values-count": ("explain", "--scores", "1,2,3", "--values", "1,2"),
    "values-ragged": ("explain", "--scores", "1,2", "--values", "1,2;3"),
    "values-infinite": ("explain", "--scores", "1,2", "--values", "1,-inf"),
    "tile-zero": ("explain", "--scores", "1,2", "--tile", "0"),
    "tile-sum": ("explain", "--scores", "1,2,3", "--tile", "2,2"),
    "plan-nothing": ("plan",),
    "plan-word": ("plan", "long"),
    "plan-negative": ("plan", "--", "-5"),
    "plan-huge": ("plan", "99999999999"),
    "plan-batch": ("plan", "4097x1"),
    "plan-heads": ("plan", "100", "--heads", "5/2"),
    "plan-heads-word": ("plan", "100", "--heads", "many"),
    "plan-units": ("plan", "4096x64K", "--heads", "4096"),
    "plan-workers": ("plan", "100", "--workers", "0"),
    "plan-window": ("plan", "100", "--window", "0"),
    "plan-dtype": ("plan", "100", "--dtype", "int8"),
    "plan-not-png": ("plan", "100", "--png", "drawing.jpg"),
    "plan-no-folder": ("plan", "100", "--png", "no-such-folder/drawing.png"),
    "check-dtype": ("check", "--dtype", "int8"),
    "bench-shape": ("bench", "--shape", "1x8x128"),
    "bench-heads": ("bench", "--shape", "1x8/3x64x1K"),
    "bench-memory": ("bench", "--shape", "1x8/8x128x9999999K"),
    "bench-peers": ("bench", "--peers", "sdpa,nobody"),
    "bench-rounds": ("bench", "--rounds", "0"),
    "bench-threads": ("bench", "--device", "cpu", "--threads", "100000"),
    "bench-device": ("bench", "--device", "tpu"),
    "bench-set-on-cpu": ("bench", "--device", "cpu", "--set", "grid"),
    "bench-unknown-set": ("bench", "--device", "cuda", "--set", "grid,nothing"),
    "bench-no-set": ("bench", "--device", "cuda", "--set", "none"),
    "bench-set-and-shape": ("bench", "--device", "cuda", "--set", "grid", "--shape", "1x8/8x64x1K"),
    "bench-shape-on-gpu": ("bench", "--device", "cuda", "--shape", "1x8/8x64"),
    "bench-cpu-peer-on-gpu": ("bench", "--device", "cuda", "--peers", "llama.cpp"),
    "bench-threads-on-gpu": ("bench", "--device", "cuda", "--threads", "1"),
    "bench-memory-on-gpu": ("bench", "--device", "cuda", "--memory", "8"),
    "bench-no-folder": ("bench", "--json", "no-such-folder/bench.json"),
    "bench-folder": ("bench", "--json", "."),
    "demo-contexts": ("demo", "--contexts", "many"),
    "demo-document": ("demo", "--document", "no-such-file.txt"),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"flashdecoding {command}" in result.stdout


def test_without_arguments_it_lists_the_commands() -> None:
    result = run()
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"flashdecoding {__version__}\n")


@pytest.mark.parametrize("arguments", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line, end = result.stderr.split("\n", 1)
    assert end == ""
    assert line.startswith("flashdecoding")
    assert "--help" in line


def test_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flashdecoding", "--version"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, f"flashdecoding {__version__}\n")


def test_help_loads_neither_torch_nor_numba() -> None:
    script = (
        "import sys; from flashdecoding.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_explain_shows_the_derivations_numbers() -> None:
    result = run("explain")
    assert result.exit_code == 0
    for number in ("1.3679", "1.5910", "[0.231, 0.629, 0.140]"):  # 2.3.2
        assert number in result.stdout
    for number in ("0.1650", "1.9560", "2.9510", "[0.304, 0.302, 0.300, 0.298]", "[0.269, 0.403, 0.233, 0.366]"):
        assert number in result.stdout  # 2.4.1
    for number in ("0.13534", "0.00674"):  # 2.4.2
        assert number in result.stdout


def test_explain_takes_scores_values_and_tiles() -> None:
    result = run("explain", "--scores", "-1,-inf,0,2", "--values", "1,0; 5,5; 0,1; 1,1", "--tile", "1,3")
    assert result.exit_code == 0
    weights = torch.tensor([-1.0, -torch.inf, 0.0, 2.0], dtype=torch.float64).softmax(0)
    o = weights @ torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert f"o_final = [{o[0]:.3f}, {o[1]:.3f}]" in result.stdout
    assert "Tile 1: key 1" in result.stdout
    assert "Tile 2: keys 2 to 4" in result.stdout


def test_explain_survives_hidden_keys_only() -> None:
    result = run("explain", "--scores", "-inf,-inf,-inf", "--tile", "2")
    assert result.exit_code == 0
    assert "o_final = [0.000, 0.000, 0.000]" in result.stdout
    assert "nan" not in result.stdout


def test_plan_counts_splits_and_units() -> None:
    result = run("plan", "1000,20000,333", "--heads", "32/8", "--workers", "3")
    plan = plan_decode([1000, 20000, 333], q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert result.exit_code == 0
    assert f"{plan.num_splits} splits, {8 * plan.num_splits} units of work for 3 workers" in result.stdout


@pytest.mark.parametrize("lengths", ["0", "1", "64x4096", "2x8K, 100", "40x5,3"])
def test_plan_draws(lengths: str) -> None:
    result = run("plan", lengths, "--window", "300", "--q-len", "2", "--workers", "20")
    assert result.exit_code == 0, result.output


def test_plan_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "plan.png"
    result = run("plan", "1000,20000,333", "--png", str(png))
    assert result.exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG\r\n")


def test_units_cover_every_key_once_for_each_head_and_row_block() -> None:
    plan = plan_decode([1500, 0, 70], q_heads=80, kv_heads=2, head_dim=64, dtype=torch.float32)
    units = units_of(plan)
    blocks = -(-40 // plan_view.MAX_ROWS)
    assert [sum(u.keys for u in units if u.sequence == b) for b in range(3)] == [3000 * blocks, 0, 140 * blocks]
    shares = share_out(units, 4)
    assert sorted(map(id, units)) == sorted(id(unit) for share in shares for unit in share)


def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SIZES", tuple(case for case in check.SIZES if case.dtype == torch.float64))
    monkeypatch.setattr(check, "RAGGED", ())
    monkeypatch.setattr(check, "SINGLE_FEATURES", ())


def test_check_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    _few_cases(monkeypatch)
    result = run("check", "--dtype", "fp64")
    assert result.exit_code == 0, result.output
    assert "ok" in result.stdout
    assert "within the bound" in result.stdout


@pytest.mark.parametrize("kind", ["error", "exception"])
def test_check_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _few_cases(monkeypatch)
    right = check.decode_attention

    def wrong(*args: object, **kwargs: object) -> object:
        if kind == "exception":
            raise RuntimeError("broken")
        out, lse = right(*args, **kwargs)  # type: ignore[arg-type]
        return out * (1 + 1e-12), lse

    monkeypatch.setattr(check, "decode_attention", wrong)
    result = run("check", "--dtype", "fp64")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout


def test_bench_prints_and_writes(tmp_path: Path) -> None:
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown")}
    result = run(
        "bench", "--device", "cpu", "--shape", "1x4/2x64x64", "--dtype", "fp32", "--peers", "sdpa", "--rounds", "1",
        "--memory", "8", "--json", str(files["json"]), "--markdown", str(files["markdown"]),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1x4/2x64x64" in result.stdout
    assert '"shape": "1x4/2x64x64"' in files["json"].read_text(encoding="utf-8")
    assert "| 1x4/2x64x64 | fp32 |" in files["markdown"].read_text(encoding="utf-8")


def test_bench_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("out: 3 of 4 values miss the bound")

    monkeypatch.setattr(bench, "run_benchmark", fail)
    result = run("bench", "--device", "cpu")
    assert result.exit_code == 1
    assert "miss the bound" in result.stdout


def test_bench_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("bench", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stdout == ""
    wanted = "flashdecoding bench: --device cuda: torch finds no CUDA GPU here (see flashdecoding bench --help)\n"
    assert result.stderr == wanted


@pytest.mark.parametrize(("gpu", "chosen"), [(True, "cuda"), (False, "cpu")])
def test_bench_takes_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch, gpu: bool, chosen: str) -> None:
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(gpu_bench, "run", lambda *_: taken.append("cuda") or 0)
    monkeypatch.setattr(bench, "_run_on_cpu", lambda *_: taken.append("cpu") or 0)
    assert run("bench", "--peers", "none").exit_code == 0
    assert taken == [chosen]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_demo_passes_options_and_exit_code_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words", encoding="utf-8")
    given: dict[str, object] = {}

    def fake(**options: object) -> int:
        given.update(options)
        return code

    monkeypatch.setattr(demo, "run", fake)
    result = run("demo", "--contexts", "100,200", "--new-tokens", "3", "--document", str(text))
    assert result.exit_code == code
    assert given == {"contexts": [100, 200], "new_tokens": 3, "document": text}


def test_demo_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> int:
        raise ValueError("demo: contexts\nare too long")

    monkeypatch.setattr(demo, "run", refuse)
    result = run("demo")
    assert result.exit_code == 2
    assert result.stderr == "flashdecoding demo: contexts are too long (see flashdecoding demo --help)\n"
