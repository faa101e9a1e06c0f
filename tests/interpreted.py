"""Run the GPU kernels on the CPU, in Triton's interpreter, against float64. `tests/test_gpu.py` starts this program.

The interpreter takes the place of the compiler for a whole process, so the kernels run in one of their own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import math
from inspect import signature
from typing import Any

import numpy as np
import torch

from flashdecoding.checks import DeviceSpans, check_call
from flashdecoding.gpu import launch
from flashdecoding.testing import Case, arrange, assert_within_bound, expect

FP32, FP16 = torch.float32, torch.float16
CASES = (
    (Case(FP32, 64, 64, 8, 2, (130, 65, 7)), "contiguous"),
    (Case(FP32, 80, 33, 6, 3, (130, 0, 300), q_len=5), "strided"),
    (Case(FP16, 64, 64, 8, 2, (130, 65, 7), kv_begin=True), "paged-16"),
    (Case(FP16, 96, 9, 3, 1, (200, 3), q_len=(7, 1), window=40), "paged-53"),
    (Case(FP32, 64, 64, 4, 2, (130, 65), q_len=2, mask="full"), "sequence-first"),
    (Case(FP32, 64, 64, 5, 1, (64, 200, 3), q_len=4, mask="trees", sinks=True), "paged-1"),
    (Case(FP16, 64, 64, 4, 2, (130, 65), softcap=5.0, sinks=True), "contiguous"),
    (Case(FP32, 64, 64, 8, 1, (300, 64, 0, 7), q_len=8, alibi="batch"), "paged-16"),
    (Case(FP32, 96, 64, 4, 1, (70, 33), latent=True), "contiguous"),
)
NOTHING = {
    name: None
    for name, parameter in signature(check_call).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
}


def as_tensor(numbers: Any) -> Any:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int32)


def main() -> None:
    launch._multiprocessors = lambda index: 4  # type: ignore[assignment]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment,return-value]
    for case, layout in CASES:
        problem = arrange(case.build(), layout)
        options: dict[str, Any] = {**NOTHING, "causal": True, **problem.options}
        call = check_call("decode_attention", problem.q, problem.k, problem.v, **options)
        call = call._replace(spans=DeviceSpans(*map(as_tensor, call.spans)))
        out = torch.full((*problem.q.shape[:3], problem.v.shape[3]), math.nan, dtype=problem.q.dtype)
        with np.errstate(divide="ignore", invalid="ignore"):  # what a GPU does without a word
            lse = launch.decode(call, out, True)
        assert_within_bound(out, lse, expect(problem), f"{case.id} {layout}")
        print(f"{case.id} {layout}: within the bound", flush=True)


if __name__ == "__main__":
    main()
