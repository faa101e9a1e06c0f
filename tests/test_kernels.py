"""The GPU kernels, compiled for GPUs that are not here: they compile, and fit the shared memory and the registers."""

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import combinations

import pytest
from compiled import TARGETS, Kernel, compilers, finished, kernels_of
from variants import FACTORS, IMPOSSIBLE, LATENT, VARIANTS, Variant, pairs, pairwise

triton = pytest.importorskip("triton", minversion="3.6", reason="Triton 3.6 or newer is not installed")

Compiled = dict[tuple[Variant, str], Future[list[Kernel]]]

FEW = VARIANTS[:40]
CALLS = dict.fromkeys(
    [
        # The most shared memory, where there is least of it; the longest to compile, so the first.
        *((variant, "sm_80") for variant in FEW if variant.dtype == "fp32" and variant.dims == LATENT),
        *((variant, variant.target) for variant in FEW),
        *((variant, "gfx942") for variant in FEW[::8]),
    ]
)

MEASURED_WITH = "3.7."  # Triton, whose ptxas decides what stays in registers
STACK = {
    "strided": 320,  # a load for each element, with an address of its own
    "fp32": 488,  # sums in float64
    "latent": 320,  # rows of 512 sums
    "fp32 latent": 3072,
    "gfx942": 908,  # 256 registers for as many lanes of a program as elsewhere
}
"""Bytes of local memory a thread that wide rows, float64 and strided columns take; all others take none."""

TOO_MUCH_STACK = {
    "fp16-d128-strided-q1-g16-alibi-batch-lse-sm_80": 432,
}
"""Known defects, in bytes of local memory a thread."""


SHARED_ROWS = {
    "bf16-d256-paged-53-q5-g71-alibi-batch-sm_80",
    "fp16-d256-strided-ragged-g1-plain-lse-sm_100",
    "fp16-d128-paged-1-ragged-g71-state-sm_100",
}
SHARES_ROWS = pytest.mark.xfail(
    raises=AssertionError, strict=True, reason="known defect: warps share rows of P V; that is slower, not wrong"
)


def _name(call: tuple[Variant, str]) -> str:
    return "-".join(map(str, call))


def _calls(defects: dict[str, int]) -> list[object]:
    """The calls as parameters; those with a defect are expected to fail."""
    parameters = []
    for call in CALLS:
        name = _name(call)
        reason = f"known defect: {defects.get(name)} bytes of registers spill to memory; that is slower, not wrong"
        marks = [pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason)] if name in defects else []
        parameters.append(pytest.param(call, id=name, marks=marks))
    return parameters


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """The kernels of each call that a selected test asks for, under way since the first of them."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    calls = dict.fromkeys(item.callspec.params["call"] for item in here)
    with compilers() as pool:
        yield {call: pool.submit(kernels_of, *call) for call in calls}


@pytest.mark.parametrize("call", _calls({}))
def test_kernels_compile_and_fit_a_block(call: tuple[Variant, str], compiled: Compiled) -> None:
    kernels = finished(compiled[call], *call)
    assert [kernel.name for kernel in kernels] == ["plan_kernel", "split_kernel", "merge_kernel"]
    for kernel in kernels:
        assert kernel.shared <= TARGETS[call[1]].shared, kernel


@pytest.mark.skipif(
    not triton.__version__.startswith(MEASURED_WITH),
    reason=f"what stays in registers is up to Triton's ptxas; the numbers are those of Triton {MEASURED_WITH}x",
)
@pytest.mark.parametrize("call", _calls(TOO_MUCH_STACK))
def test_kernels_keep_to_registers(call: tuple[Variant, str], compiled: Compiled) -> None:
    for kernel in finished(compiled[call], *call):
        assert kernel.registers > 0
        assert kernel.stack <= (_most_stack(*call) if kernel.name == "split_kernel" else 0), kernel


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=_name(call), marks=[SHARES_ROWS] if _name(call) in SHARED_ROWS else [])
        for call in CALLS
        if call[0].dtype != "fp32" and call[1] != "gfx942"
    ],
)
def test_warps_of_16_bit_products_share_out_columns(call: tuple[Variant, str], compiled: Compiled) -> None:
    """Not the few rows, which leave most warps nothing to do but what others do too; 64 are enough for four."""
    (split,) = (kernel for kernel in finished(compiled[call], *call) if kernel.name == "split_kernel")
    assert split.warps and all(warps.startswith("1, ") or warps == "4, 1" for warps in split.warps)


def _most_stack(variant: Variant, target: str) -> int:
    if target in STACK:
        return STACK[target]
    if variant.dims == LATENT:
        return STACK["fp32 latent" if variant.dtype == "fp32" else "latent"]
    if variant.dtype == "fp32":
        return STACK["fp32"]
    return STACK["strided"] if variant.layout == "strided" else 0


def test_every_pair_that_is_possible_meets_in_a_variant() -> None:
    every = {(a, x, b, y) for a, b in combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    possible = every - IMPOSSIBLE
    assert set().union(*map(pairs, VARIANTS)) == possible
    missing = possible.difference(*map(pairs, FEW))
    assert len(missing) <= 0.06 * len(possible), sorted(map(str, missing))


def test_pairwise_of_what_can_be_checked_by_hand() -> None:
    chosen = pairwise({"a": "xy", "b": "xy", "c": "xy"}, {("a", "y", "b", "y")})
    factors = {"a": (), "b": (), "c": ()}
    assert chosen[0] == ("x", "x", "x")
    met = set().union(*(pairs(values, factors) for values in chosen))
    assert len(met) == 11 and ("a", "y", "b", "y") not in met
    assert len(chosen) <= 6
