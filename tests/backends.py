"""What the contract tests share: the backends they run on, and one call that returns both results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashdecoding import decode_attention
from flashdecoding.testing import Case, Problem

BACKENDS = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
"""Device types that the package has a backend for, as far as this machine has them."""

on_every_backend = pytest.mark.parametrize("backend", BACKENDS)


def decode(problem: Problem, **more: Any) -> tuple[Tensor, Tensor]:
    """Output and lse of ``problem``, with ``more`` options."""
    return decode_attention(problem.q, problem.k, problem.v, **problem.options, **more, return_lse=True)


def skip_unless_supported(case: Case, backend: str) -> None:
    """float64 is a CPU dtype; that the GPU refuses it has its own test."""
    if backend == "cuda" and case.dtype == torch.float64:
        pytest.skip("float64 is a CPU dtype")
