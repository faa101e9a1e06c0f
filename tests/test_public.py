"""The public names, the one-way imports and the laziness that the design promises, read from the sources."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashdecoding

PACKAGE = Path(flashdecoding.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    {"refusal", "remember"},
    {"signature"},
    {"lengths"},
    {"checks", "plan"},  # checks names SplitPlan in annotations
    {"validate"},
    {"state"},
    {"oracle"},
    {"reference"},
    {"ops"},
    {"cpu", "gpu"},
    {"api"},
    {"integrations"},
    {"testing"},
    {"demo"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
"""Modules and packages of the layout, lowest first: a module imports from its own layer or a lower one."""

PARAMETERS = {
    "decode_attention": (
        "q k v seqlens page_table kv_begin cu_q_lens max_q_len scale causal window softcap sinks alibi_slopes mask "
        "k_scale v_scale k_zero v_zero plan out return_lse"
    ),
    "partial_attention": (
        "q k v seqlens page_table kv_begin cu_q_lens max_q_len scale causal window softcap alibi_slopes mask "
        "k_scale v_scale k_zero v_zero plan q_start kv_start kv_block kv_stride"
    ),
    "reference_attention": (
        "q k v seqlens page_table kv_begin cu_q_lens max_q_len scale causal window softcap sinks alibi_slopes mask "
        "k_scale v_scale k_zero v_zero plan out return_lse q_start kv_start kv_block kv_stride"
    ),
    "plan_decode": (
        "seqlens q_heads kv_heads head_dim head_dim_v dtype q_len window max_seqlen batch_invariant device"
    ),
}


def test_public_names() -> None:
    designed = {
        "AttentionState",
        "SplitPlan",
        "decode_attention",
        "merge_states",
        "partial_attention",
        "plan_decode",
        "reference_attention",
    }
    assert set(flashdecoding.__all__) == designed
    assert len(flashdecoding.__all__) <= 12
    assert designed <= set(dir(flashdecoding))
    for name in designed:
        assert inspect.getdoc(getattr(flashdecoding, name)), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="flash_attention"):
        _ = flashdecoding.flash_attention  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    signature = inspect.signature(getattr(flashdecoding, name))
    assert " ".join(signature.parameters) == PARAMETERS[name]
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert len(positional) == (1 if name == "plan_decode" else 3)


def _module(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module of a source file, wherever in it, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "flashdecoding":
                yield from ((f"flashdecoding.{alias.name}", node.lineno) for alias in node.names)


def _layer(module: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if module in names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = _module(path)
    if here == "__init__":
        allowed = {"typing", "importlib", *(f"flashdecoding.{m}" for m in ("api", "plan", "reference", "state"))}
        assert {name for name, _ in _imports(path)} <= allowed
        return
    for name, line in _imports(path):
        top, _, rest = name.partition(".")
        if top == "numba":
            assert here == "cpu", f"{path}:{line}: Numba is imported only inside cpu/"
        if top == "triton":
            assert here == "gpu", f"{path}:{line}: Triton is imported only inside gpu/"
        if top in ("typer", "rich"):
            assert here in ("cli", "commands", "demo", "testing"), f"{path}:{line}: {top} is for the command line"
        if top == "flashdecoding" and rest:
            there = rest.partition(".")[0]
            if there == "__version__":
                continue
            if there in flashdecoding.__all__:
                assert _layer(here) > _layer("api"), f"{path}:{line}: the public name {there} below api"
                continue
            assert {here, there} != {"cpu", "gpu"}, f"{path}:{line}: the backends do not know each other"
            assert _layer(there) <= _layer(here), f"{path}:{line}: {here} imports {there}, which lies above it"


def test_every_module_has_a_layer() -> None:
    modules = {_module(path) for path in SOURCES} - {"__init__"}
    assert modules <= set().union(*LAYERS)


def _loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after ``code``."""
    script = f"{code}\nimport sys\nprint(*sorted(sys.modules), sep='\\n')"
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=PACKAGE.parent)
    return set(done.stdout.split())


HEAVY = {"numba", "llvmlite", "triton", "typer", "rich", "transformers", "matplotlib"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _loaded_after("import flashdecoding")
    assert not loaded & (HEAVY | {"torch", "numpy"})


def test_comparing_results_loads_nothing_heavy() -> None:
    assert not _loaded_after("import flashdecoding.testing") & (HEAVY - {"triton"}), "torch may look for Triton itself"


def test_public_names_load_little_beyond_torch() -> None:
    torch_alone = _loaded_after("import torch, numpy")
    more = _loaded_after("import torch, numpy\nfrom flashdecoding import *") - torch_alone
    assert not more & HEAVY
    assert "flashdecoding.api" in more
    assert len(more) < 40, sorted(more)
