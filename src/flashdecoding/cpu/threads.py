"""Run a compiled worker on several threads.

Workers take their share from atomic counters, so any number of them, in any order, does all the work. Where torch was
built on an OpenMP runtime with GNU entry points (Linux), the workers run in torch's own thread pool: a second pool
would fight torch's spinning threads for the cores between two layers. Elsewhere, and in a forked child (OpenMP pools
do not survive a fork), they run on Python threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

Worker = Callable[[bytes], None]  # a ctypes function of one pointer; ctypes lets go of the interpreter lock

_forked = False


def _after_fork() -> None:
    global _forked  # noqa: PLW0603
    _forked = True
    python_threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def openmp() -> Callable[[Worker, bytes, int, int], None] | None:
    """``GOMP_parallel(worker, argument, threads, flags)`` of the OpenMP runtime that torch itself uses, or None."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@functools.cache
def python_threads() -> ThreadPoolExecutor:
    """One pool for all calls; its threads begin as work comes."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="flashdecoding")


def _wait(helpers: list[Future[None]]) -> None:
    """Wait until all are done, also through interrupts; the first is raised afterwards."""
    interrupt: BaseException | None = None
    while not all(helper.done() for helper in helpers):
        try:
            wait(helpers)
        except BaseException as error:
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt
    for helper in helpers:
        helper.result()


def run_parallel(worker: Worker, argument: bytes, threads: int) -> None:
    """Call ``worker(argument)`` on up to ``threads`` threads, the calling one among them; return when all are done."""
    if threads <= 1:
        worker(argument)
        return
    start = None if _forked else openmp()
    if start is not None:
        start(worker, argument, threads, 0)
        return
    helpers: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            helpers.append(python_threads().submit(worker, argument))
        worker(argument)
    finally:  # whatever interrupts this thread: the helpers use memory that lives as long as this call
        for helper in helpers:
            helper.cancel()  # one that has not begun has nothing left to do
        _wait([helper for helper in helpers if not helper.cancelled()])
