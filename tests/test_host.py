"""Contract lines 9 and 10: compiled graphs, several threads at once, fork, and what a call allocates."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from backends import decode, on_every_backend
from torch import Tensor

from flashdecoding import decode_attention, partial_attention, plan_decode
from flashdecoding.cpu import workspace
from flashdecoding.testing import Case, Problem, arrange, assert_same_bits, assert_within_bound, expect

FP32 = (torch.float32, 64, 64)
BF16 = (torch.bfloat16, 128, 128)

# Line 9: torch.compile


def _layer(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention amid ordinary operators, as a model's graph has it."""
    out, lse = decode_attention(q * 0.5, k, v, seqlens=lens, sinks=sinks, window=600, return_lse=True)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + 1.0, lse


def _paged_layer(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Tensor:
    return decode_attention(q, k, v, seqlens=lens, page_table=table) * 2.0


def _out_layer(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, out: Tensor) -> Tensor:
    decode_attention(q, k, v, seqlens=lens, out=out)
    return out + 1.0


def _partial_layer(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    one = partial_attention(q, k[:, :, :64], v[:, :, :64], q_start=lens - q.shape[2])
    two = partial_attention(q, k[:, :, 64:], v[:, :, 64:], seqlens=lens - 64, kv_start=64)
    return one.merge(two).finalize(q.dtype)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@on_every_backend
@pytest.mark.parametrize("q_len", [1, 5])
def test_compiled_call_gives_the_eager_bits(q_len: int, backend: str) -> None:
    problem = Case(*FP32, 8, 2, (700, 129), q_len=q_len, sinks=True).build(backend)
    arguments = (problem.q, problem.k, problem.v, problem.options["seqlens"], problem.options["sinks"])
    out, lse = _compiled(_layer)(*arguments)
    wanted_out, wanted_lse = _layer(*arguments)
    assert_same_bits(out, wanted_out)
    assert_same_bits(lse, wanted_lse)


@on_every_backend
def test_compiled_call_reads_the_lengths_of_the_step(backend: str) -> None:
    """One graph, other lengths and pages: nothing of the first step is baked in."""
    case = Case(*FP32, 8, 2, (700, 129))
    compiled = _compiled(_paged_layer)
    for lengths in ((700, 129), (1, 2), (0, 702)):
        problem = case.build(backend)
        lens = torch.tensor(lengths, dtype=torch.int32, device=backend)
        paged = arrange(problem.with_options(seqlens=lens), "paged-16", seed=lengths[0])
        arguments = (paged.q, paged.k, paged.v, lens, paged.options["page_table"])
        assert_same_bits(compiled(*arguments), _paged_layer(*arguments), str(lengths))


@on_every_backend
def test_compiled_call_writes_out(backend: str) -> None:
    problem = Case(*FP32, 8, 2, (700, 129)).build(backend)
    arguments = (problem.q, problem.k, problem.v, problem.options["seqlens"])
    out, wanted = torch.full_like(problem.q, torch.nan), torch.full_like(problem.q, torch.nan)
    result = _compiled(_out_layer)(*arguments, out)
    assert_same_bits(result, _out_layer(*arguments, wanted))
    assert_same_bits(out, wanted)


@on_every_backend
def test_compiled_pieces_merge(backend: str) -> None:
    problem = Case(*FP32, 8, 2, (300, 300), q_len=3, spare=0).build(backend)
    arguments = (problem.q, problem.k, problem.v, problem.options["seqlens"])
    assert_same_bits(_compiled(_partial_layer)(*arguments), _partial_layer(*arguments))


@on_every_backend
def test_compiled_call_with_a_plan(backend: str) -> None:
    """The plan's lengths count, and after an update its new ones."""
    problem = Case(*FP32, 8, 2, (700, 129)).build(backend)
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
    plan = plan_decode([5, 6], max_seqlen=702, device=backend, **sizes)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode_attention(q, k, v, plan=plan) * 2.0

    compiled = _compiled(layer)
    for lengths in ([5, 6], [700, 0], [1, 702]):
        plan.update(lengths)
        wanted = 2.0 * decode_attention(problem.q, problem.k, problem.v, seqlens=lengths)
        assert_same_bits(compiled(problem.q, problem.k, problem.v), wanted, str(lengths))


@on_every_backend
def test_compiled_call_keeps_the_stride_order_of_q(backend: str) -> None:
    problem = arrange(Case(*FP32, 8, 2, (700, 129), q_len=5).build(backend), "sequence-first")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode_attention(q, k, v, causal=False, seqlens=3).transpose(1, 2).view(2, 5, 512)

    arguments = (problem.q, problem.k, problem.v)
    assert_same_bits(_compiled(layer)(*arguments), layer(*arguments))


@on_every_backend
def test_operators_pass_opcheck(backend: str) -> None:
    """Schemas, fakes and aliasing, as torch checks them."""
    problem = Case(*FP32, 8, 2, (70, 7), q_len=2).build(backend)
    tensors, lens = (problem.q, problem.k, problem.v), problem.options["seqlens"]
    numbers = (None, None, None, None, None, True, 9, 5.0)  # page_table to softcap
    ops = torch.ops.flashdecoding
    call = (*tensors, lens, *numbers, torch.ones(8, device=backend), torch.ones(8, device=backend), None)
    torch.library.opcheck(ops.decode_attention.default, call)
    torch.library.opcheck(ops.decode_attention_out.default, (*call, torch.empty_like(problem.q)))
    piece = (*tensors, lens, *numbers, torch.ones(8, device=backend), None, lens, lens - 2, None, None)
    torch.library.opcheck(ops.partial_attention.default, piece)


# Line 10: threads and fork


@on_every_backend
def test_several_threads_at_once(backend: str) -> None:
    """Calls of other shapes and classes at the same time; every thread gets its serial bits every time."""
    cases = [
        Case(*FP32, 8, 2, (2049, 0, 63), q_len=2),
        Case(*BF16, 28, 4, (3001, 129), q_len=5, window=1000, sinks=True),
        Case(*BF16, 32, 8, (700,) * 4),
        Case(*FP32, 64, 1, (1025, 64, 65)),
    ]
    problems = [arrange(case.build(backend), "paged-16") for case in cases]
    wanted = [decode(problem) for problem in problems]
    errors: list[str] = []
    start = threading.Barrier(len(problems))

    def work(problem: Problem, out: Tensor, lse: Tensor) -> None:
        try:
            start.wait(timeout=60)
            for _ in range(25):
                actual_out, actual_lse = decode(problem)
                assert_same_bits(actual_out, out)
                assert_same_bits(actual_lse, lse)
        except Exception as error:
            errors.append(repr(error))

    arguments = zip(problems, wanted, strict=True)
    threads = [threading.Thread(target=work, args=(problem, *pair), daemon=True) for problem, pair in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    assert not errors


FIRST_CALLS = """
import threading, torch
from flashdecoding import decode_attention
q, k = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 900, 64)
results, start = [None] * 4, threading.Barrier(4)
def work(i):
    start.wait()
    results[i] = decode_attention(q, k, k)
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert all(torch.equal(results[0], r) for r in results)
print("equal")
"""

FORK = """
import os, sys, torch
from flashdecoding import decode_attention
torch.set_num_threads(2)
q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 5000, 64), torch.randn(2, 2, 5000, 64)
out = decode_attention(q, k, v)
def child():
    same = torch.equal(decode_attention(q, k, v), out)
    deeper = os.fork()
    if deeper == 0:
        os._exit(0 if torch.equal(decode_attention(q, k, v), out) else 1)
    return 0 if same and os.waitpid(deeper, 0)[1] == 0 else 1
pid = os.fork()
if pid == 0:
    os._exit(child())
assert os.waitpid(pid, 0)[1] == 0, "the child of a fork differs"
assert torch.equal(decode_attention(q, k, v), out), "the parent differs after a fork"
print("equal")
"""


def _run(code: str, **environment: str) -> str:
    """What ``code`` prints in a fresh interpreter; it, and what it forked, ends with the time limit."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail("the interpreter hangs")
    assert process.returncode == 0, errors
    return output.strip()


def test_first_calls_of_several_threads() -> None:
    """The kernels are compiled on the first call; four threads make it together."""
    assert _run(FIRST_CALLS) == "equal"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork() -> None:
    """A child, and its child, compute on their own threads; a hang runs into the time limit."""
    assert _run(FORK) == "equal"


# What a call allocates

PEAK = """
import torch
from flashdecoding import decode_attention
from flashdecoding.cpu import workspace
torch.set_num_threads(2)
def resident(line):
    with open("/proc/self/status") as status:
        return next(int(row.split()[1]) for row in status if row.startswith(line)) * 1024
q = torch.randn(2, 8, 1, {dim}).to(torch.{dtype})
k, v = (torch.full((2, 4, 16384, {dim}), 0.5, dtype=q.dtype) for _ in range(2))
pages = [x.view(2, 4, 1024, 16, {dim}).transpose(1, 2).reshape(2048, 4, 16, {dim}) for x in (k, v)]
table, lens = torch.arange(2048, dtype=torch.int32).view(2, 1024), torch.tensor([16384, 16000], dtype=torch.int32)
out = torch.empty_like(q)
for cache, options in (((k, v), {{}}), (pages, {{"page_table": table}})):
    for _ in range(2):
        decode_attention(q, *cache, out=out, seqlens=lens, **options)
    workspace.release()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak of resident memory starts afresh
    before = resident("VmRSS")
    decode_attention(q, *cache, out=out, seqlens=lens, **options)
    print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak needs Linux's /proc")
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 64), ("bfloat16", 128)])
def test_a_call_allocates_little(dtype: str, dim: int) -> None:
    """No copy, conversion or gather of the cache: 67 MB of it, contiguous or in pages, are read in little memory."""
    # Small freed blocks would be reused unseen; above 64 KB every allocation is mapped anew, and counted.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    contiguous, paged = map(int, _run(PEAK.format(dtype=dtype, dim=dim), **environment).split())
    partial_states = 2 * 8 * 64 * (dim + 4) * 4  # at most 64 splits a sequence
    assert contiguous < 1e6 + partial_states
    assert paged < 1e6 + partial_states


def test_workspace_is_reused_and_never_shared() -> None:
    workspace.release()
    first, second = workspace.borrow(1000), workspace.borrow(1000)
    assert abs(first.base - second.base) >= 1000
    assert first.base % 64 == 0
    workspace.give_back(first)
    assert workspace.borrow(900) is first
    workspace.give_back(first)
    larger = workspace.borrow(1001)
    assert larger.size >= 1001
    workspace.give_back(workspace.borrow(workspace.KEPT_BYTES + 1))  # too large to keep
    assert workspace.borrow(1).size == 1


@on_every_backend
def test_a_step_of_many_layers(backend: str) -> None:
    """Calls back to back reuse memory without mixing: the first result is what it was."""
    case = Case(*BF16, 8, 2, (600, 5))
    problem = case.build(backend)
    results = [decode(problem) for _ in range(20)]
    for out, lse in results:
        assert_within_bound(out, lse, expect(case.build()))
