"""Compile the GPU kernels for GPUs that are not here: `test_kernels.py` checks the result, `make kernels` prints it.

No signature is written down. A call goes through the launcher on CPU tensors, of which a compiler sees dtypes and
alignment alone. Triton's own JIT specialises on what the launcher passes, for the target that a stand-in driver names,
and compiles it; the launch itself is left out.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from inspect import signature
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from variants import SHARD, VARIANTS, Variant

from flashdecoding.checks import Call, check_call
from flashdecoding.lengths import DeviceSpans
from flashdecoding.testing import arrange


class Target(NamedTuple):
    """A kind of GPU: in Triton's terms, by what torch says of it, the shared memory that one block may have,
    and that of a multiprocessor."""

    backend: str
    arch: int | str
    warp_size: int
    major: int
    multiprocessors: int
    shared: int
    room: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 8, 108, 163 << 10, 164 << 10),
    "sm_90": Target("cuda", 90, 32, 9, 132, 227 << 10, 228 << 10),
    "sm_100": Target("cuda", 100, 32, 10, 148, 227 << 10, 228 << 10),
    "gfx942": Target("hip", "gfx942", 64, 9, 304, 64 << 10, 64 << 10),
}
NOTHING = {
    name: None
    for name, parameter in signature(check_call).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
}


class Kernel(NamedTuple):
    """What a compiled kernel takes of a GPU. Registers, stack and spills are those of a thread."""

    name: str
    shared: int  # bytes of a block
    registers: int
    stack: int  # bytes of local memory
    spills: int | None  # instructions that load or store local memory, if counted; on AMD, registers that are spilled
    hash: str
    warps: tuple[str, ...]  # by rows and columns, how those of a program share out its matrix products; NVIDIA's only


class StandInDriver:
    """Triton's driver for GPUs that are not here; each target is a device, for which Triton keeps kernels apart."""

    device = ""

    def switch(self, device: str) -> None:
        """Be ``device`` from now on, for torch too; the launcher forgets what it remembers of another."""
        self.device, target = device, TARGETS[device]
        torch.version.hip = None if target.backend == "cuda" else "6.0"
        for name, module in list(sys.modules.items()):
            if name.startswith("flashdecoding.gpu."):
                for function in vars(module).values():
                    getattr(function, "cache_clear", lambda: None)()

    def properties(self, device: Any) -> SimpleNamespace:
        """What `torch.cuda.get_device_properties` would return."""
        target = TARGETS[self.device]
        numbers = {"multi_processor_count": target.multiprocessors, "shared_memory_per_multiprocessor": target.room}
        return SimpleNamespace(name=self.device, major=target.major, **numbers)

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGETS[self.device][:3])


driver = StandInDriver()
launched: list[Any] = []  # compiled kernels of the call in progress


def become_compiler(cache: str) -> None:
    """Let this process compile what it is to launch. An empty ``cache`` means that all is compiled anew."""
    os.environ["TRITON_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    from triton.runtime.driver import driver as triton_driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launched.append(kernel)
        return kernel

    triton_driver.set_active(driver)
    JITFunction.run = compile_only
    torch.cuda.get_device_properties = driver.properties  # type: ignore[assignment]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment,return-value]


@contextmanager
def compilers() -> Iterator[Executor]:
    """Processes for :func:`kernels_of`, one for each core."""
    cores, spawn = len(os.sched_getaffinity(0)), get_context("spawn")
    with TemporaryDirectory() as cache, ProcessPoolExecutor(cores, spawn, become_compiler, (cache,)) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


def kernels_of(variant: Variant, target: str, count_spills: bool = False) -> list[Kernel]:
    """The kernels that one call launches, compiled for ``target``. To count spills, they are disassembled."""
    driver.switch(target)
    launched.clear()
    try:
        _call(variant)
        return [_usage(kernel, count_spills) for kernel in launched]
    except Exception as error:  # Triton's own kinds cannot be sent to another process
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def finished(future: Future[list[Kernel]], variant: Variant, target: str) -> list[Kernel]:
    """The result of :func:`kernels_of`, computed again where the crash of another call took the compilers along."""
    try:
        return future.result()
    except BrokenProcessPool:
        with compilers() as pool:
            return pool.submit(kernels_of, variant, target).result()


def _call(variant: Variant) -> None:
    from flashdecoding.gpu import launch

    problem = arrange(variant.case.build(), variant.layout)
    options: dict[str, Any] = {**NOTHING, "causal": True, **problem.options}
    if variant.feature == "state":
        launch.partial_state(_on_gpu(check_call("partial", problem.q, problem.k, problem.v, **options, **SHARD)), None)
    else:
        out = torch.empty((*problem.q.shape[:3], problem.v.shape[3]), dtype=problem.q.dtype)
        launch.decode(_on_gpu(check_call("decode", problem.q, problem.k, problem.v, **options)), None, out, variant.lse)


def _on_gpu(call: Call) -> Call:
    """The call as the backend would get it, but that its tensors are on the CPU."""
    spans = [None if numbers is None else torch.tensor(numbers, dtype=torch.int32) for numbers in call.spans]
    return call._replace(spans=DeviceSpans(*spans))


def _usage(kernel: Any, count_spills: bool) -> Kernel:
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        registers, stack, spilled = (_number(rf"\.{name}:\s*(\d+)", kernel.asm["amdgcn"]) for name in names)
        return Kernel(kernel.name, shared, registers, stack, spilled, kernel.hash, ())
    report = _cuobjdump(kernel, "-res-usage")
    stack = _number(r"STACK:(\d+)", report) + _number(r"LOCAL:(\d+)", report)
    spills = 0 if stack == 0 else None
    if stack and count_spills:
        spills = len(re.findall(r"\b(?:STL|LDL)\b", _cuobjdump(kernel, "-sass")))
    warps = tuple(re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+, \d+)\]", kernel.asm["ttgir"]))
    return Kernel(kernel.name, shared, _number(r"REG:(\d+)", report), stack, spills, kernel.hash, warps)


def _cuobjdump(kernel: Any, what: str) -> str:
    from triton import knobs

    cubin = next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    return subprocess.run([knobs.nvidia.cuobjdump.path, what, cubin], capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in\n{text}"
    return int(found[1])


def main(words: Sequence[str]) -> int:
    """Print a table of variants and targets in which all of ``words`` occur. 1 if any would not run."""
    row = f"{{:{max(len(str(v)) for v in VARIANTS)}}} {{:7}} {{:13}} {{:>7}} {{:>9}} {{:>6}} {{:>6}}"
    print(row.format("variant", "target", "kernel", "shared", "registers", "stack", "spills"))
    seen: set[str] = set()
    failures = 0
    with compilers() as pool:
        wanted = [(v, t) for v in VARIANTS for t in TARGETS if all(word in f"{v} {t}" for word in words)]
        futures = [(v, t, pool.submit(kernels_of, v, t, True)) for v, t in wanted]
        for variant, target, future in futures:
            try:
                kernels = finished(future, variant, target)
            except RuntimeError as error:
                print(f"{variant} {target}: {error}", flush=True)
                failures += 1
                continue
            for kernel in kernels:
                if kernel.hash in seen:  # many calls have the same plan, and some the same merge
                    continue
                seen.add(kernel.hash)
                fits = kernel.shared <= TARGETS[target].shared
                line = row.format(str(variant), target, *kernel[:5])
                print(line if fits else f"{line}  does not fit", flush=True)
                failures += not fits
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
