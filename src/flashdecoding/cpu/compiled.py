"""Kernels as C functions: compiled once for a shape class, then from Numba's disk cache."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

from numba import cfunc, types

from flashdecoding.cpu import kernels
from flashdecoding.cpu.shape import KernelShape, ShapeConstant, target_features
from flashdecoding.cpu.threads import Worker

NOTICE_AFTER = 0.7  # seconds: a load from the disk cache takes less, a compilation more


@functools.cache
def workers(shape: KernelShape) -> tuple[Worker, Worker]:
    """Stage 1 and stage 2 for a shape class: functions of a pointer to a record of `arguments.py`.

    Raises:
        NotImplementedError: float16 on an x86 CPU without F16C (all since 2013 have it).
    """
    x86 = "sse2" in target_features()
    if shape.dtype == "float16" and x86 and "f16c" not in target_features():
        raise NotImplementedError("float16 on this CPU: it has no F16C instructions; convert to float32 or bfloat16")
    constant = ShapeConstant(shape)

    def splits(arguments: int) -> None:
        kernels.run_splits(constant, arguments)

    def merge(arguments: int) -> None:
        kernels.run_merge(constant, arguments)

    notice = threading.Timer(NOTICE_AFTER, _say_compiling, [shape])
    notice.daemon = True
    notice.start()
    try:
        return _compile(splits), _compile(merge)
    finally:
        notice.cancel()


def _compile(function: Any) -> Worker:
    def compiler(cache: bool) -> Any:
        return cfunc(types.void(types.int64), cache=cache, error_model="numpy")

    try:
        compiled = compiler(cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        compiled = compiler(cache=False)(function)  # no folder that Numba may write its cache to
    worker = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(compiled.address)
    worker.code = compiled  # type: ignore[attr-defined]  # owns the machine code
    return worker


def _say_compiling(shape: KernelShape) -> None:
    if sys.stderr.isatty():
        dims = f"head_dim {shape.head_dim}" + (f"/{shape.head_dim_v}" if shape.head_dim_v != shape.head_dim else "")
        print(f"flashdecoding: compiling CPU kernels for {shape.dtype}, {dims} (once, then cached)", file=sys.stderr)
