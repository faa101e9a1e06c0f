"""The ways a CPU may multiply, all on one machine: 64-byte vectors, 32-byte vectors, the matrix unit.

A machine takes the best that it has; so the others, which it could run too, would be tested on no machine but theirs.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashdecoding import decode_attention
from flashdecoding.cpu import launch
from flashdecoding.cpu.shape import KernelShape, kernel_shape
from flashdecoding.testing import Case, assert_same_bits, assert_within_bound, expect, poison_unseen

BF16, FP16, FP16_64 = (torch.bfloat16, 64, 64), (torch.float16, 80, 80), (torch.float16, 64, 64)
FP32, FP64 = (torch.float32, 64, 64), (torch.float64, 33, 33)
UNITS = {"vectors-32": (32, False), "vectors-64": (64, False), "matrix": (64, True)}
CASES = [
    Case(*kind, heads, 1, (130, 65, 7), **more)
    for kind in (BF16, FP16, FP16_64, FP32, FP64)
    for heads, more in (
        (1, {}),
        (3, {"q_len": 2, "alibi": "heads"}),
        (4, {"kv_begin": True}),
        (5, {"softcap": 5.0}),
        (13, {}),
        (16, {"sinks": True}),
        (6, {"q_len": 5, "mask": "full"}),  # 30 rows that differ
        (8, {"q_len": 5}),  # 40 rows: two blocks
    )
]


@pytest.fixture
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls multiply on this unit."""
    vector_bytes, matrix = UNITS[request.param]
    best = kernel_shape("bfloat16", 64, 64)
    if vector_bytes > best.vector_bytes or matrix > best.matrix:
        pytest.skip(f"this CPU has no {request.param}")

    def chosen(dtype: str, head_dim: int, head_dim_v: int) -> KernelShape:
        shape = kernel_shape(dtype, head_dim, head_dim_v)
        return shape._replace(vector_bytes=vector_bytes, matrix=shape.matrix and matrix)

    monkeypatch.setattr(launch, "kernel_shape", chosen)
    launch.prepare.cache_clear()
    yield request.param
    launch.prepare.cache_clear()


@pytest.mark.parametrize(
    ("unit", "case"),
    [
        pytest.param(unit, case, id=f"{unit}-{case.id}")
        for unit, (_, matrix) in UNITS.items()
        for case in CASES
        if not matrix or (case.dtype, case.head_dim) in ((torch.bfloat16, 64), (torch.float16, 64))
    ],
    indirect=["unit"],
)
@pytest.mark.usefixtures("unit")
def test_every_unit_keeps_the_contract(case: Case) -> None:
    problem = case.build()
    out, lse = decode_attention(problem.q, problem.k, problem.v, **problem.options, return_lse=True)
    assert_within_bound(out, lse, expect(problem))
    poisoned = poison_unseen(problem)
    again, again_lse = decode_attention(poisoned.q, poisoned.k, poisoned.v, **poisoned.options, return_lse=True)
    assert_same_bits(again, out)
    assert_same_bits(again_lse, lse)


@pytest.mark.parametrize("kind", [BF16, FP16_64], ids=["bf16", "fp16"])
def test_units_round_differently(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the fixture does choose one: weights are rounded to bfloat16, or two of them, on the matrix unit alone."""
    if not kernel_shape("bfloat16", 64, 64).matrix:
        pytest.skip("this CPU has no matrix unit")
    problem = Case(*kind, 16, 1, (130,)).build()
    problem = replace(problem, q=problem.q * 2)
    outs = []
    for matrix in (False, True):
        monkeypatch.setattr(launch, "kernel_shape", lambda *facts, m=matrix: kernel_shape(*facts)._replace(matrix=m))
        launch.prepare.cache_clear()
        out, lse = decode_attention(problem.q, problem.k, problem.v, **problem.options, return_lse=True)
        outs.append(torch.cat([out.flatten().float(), lse.flatten()]))
    launch.prepare.cache_clear()
    assert not torch.equal(*outs)
