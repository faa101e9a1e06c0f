"""What the contract tests share: the backends they run on, and one call that returns both results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashdecoding import decode_attention
from flashdecoding.testing import Case, Problem

_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

on_every_backend = pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=_cuda)])


def decode(problem: Problem, **more: Any) -> tuple[Tensor, Tensor]:
    """Output and lse of ``problem``, with ``more`` options."""
    return decode_attention(problem.q, problem.k, problem.v, **problem.options, **more, return_lse=True)


def skip_unless_supported(case: Case, backend: str) -> None:
    """float64 is a CPU dtype; that the GPU refuses it has its own test."""
    if backend == "cuda" and case.dtype == torch.float64:
        pytest.skip("float64 is a CPU dtype")
