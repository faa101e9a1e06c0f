"""What a machine without a GPU can say of the GPU backend: its kernels are right in Triton's interpreter.

`test_kernels.py` compiles them. On a GPU the whole contract suite runs (`tests/backends.py`).
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdecoding import checks, decode_attention, lengths, plan_decode
from flashdecoding.refusal import Refusal
from flashdecoding.signature import Facts, Signature, check_signature

pytest.importorskip("triton", minversion="3.6", reason="Triton 3.6 or newer is not installed")


def test_interpreted_kernels_keep_the_bound() -> None:
    program = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("within the bound") == 15
    assert done.stdout.count("as the rule says") == 60
    assert "offsets from nowhere do no harm" in done.stdout and "lost pages reach their rows" in done.stdout


def _signature(dtype: torch.dtype, device: str = "cuda:0", **others: str) -> Signature:
    """A call with tensors on devices that this machine need not have."""

    def facts(name: str) -> Facts:
        return Facts((1, 4, 1, 64), (256, 64, 64, 1), dtype, torch.device(others.get(name, device)))

    nothing = dict.fromkeys(Signature._fields)
    given = {"caller": "decode_attention", "causal": True, "has_lengths": False, "has_q_start": False}
    return Signature(**{**nothing, **given, **{name: facts(name) for name in "qkv"}})


def test_what_the_gpu_backend_lacks_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="q is float64 on cuda:0; only the CPU"):
        check_signature(_signature(torch.float64))


def test_a_plan_for_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check_signature(_signature(torch.float32))
    monkeypatch.setattr(checks, "_recall", lambda *_: checked)
    q = torch.ones(1, 4, 1, 64)
    plan = plan_decode([1], q_heads=4, kv_heads=4, head_dim=64, dtype=torch.float32)
    plan.where = torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"the plan was made for device=cuda:1, the call has"):
        decode_attention(q, q, q, plan=plan)


def test_more_keys_than_a_gpu_takes_are_refused() -> None:
    facts = Facts((1, 4, 2**31, 64), (0, 0, 0, 1), torch.float16, torch.device("cuda:0"))
    signature = _signature(torch.float16)._replace(k=facts, v=facts)
    refusal = Refusal("decode_attention")
    lengths.device_spans(refusal, check_signature(signature), None, None, None, None, 0)
    wanted = "a GPU takes at most 2147418112 keys a sequence in a batch of 1, got 2147483648; give seqlens"
    assert refusal.reasons == [wanted]


def test_caches_on_another_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)k must be on q's device cuda:0, got cuda:1.*v must be .*, got cpu"):
        check_signature(_signature(torch.float32, k="cuda:1", v="cpu"))


def test_lengths_on_the_device_are_checked_as_far_as_the_host_sees() -> None:
    """Their kind and shape; the host's own numbers in full. The device of q is the CPU here, which is all the same."""
    checked, refusal = check_signature(_signature(torch.float32, "cpu")), Refusal("decode_attention")
    wrong = torch.ones(1), torch.ones(3, dtype=torch.int32)
    lengths.device_spans(refusal, checked, wrong[0], wrong[1], None, [-1], 0)
    text = "\n".join(refusal.reasons)
    assert "seqlens must be int32 or int64, got torch.float32" in text
    assert "kv_begin must have shape (1,), got (3,)" in text
    assert "q_start[0] = -1" in text
    right = torch.tensor(1)
    spans = lengths.device_spans(Refusal(""), checked, right, [0], None, 5, 0)
    assert [None if x is None else x.tolist() for x in spans] == [[1], [0], None, [5], None]


class _FrontEnd:
    """Stands for a Triton kernel: keeps what it is launched with, by name, and then by position."""

    arg_names = ("q", "numbers", "sinks", "out", "N")

    def __init__(self) -> None:
        self.by_name: list[tuple[Any, dict[str, Any]]] = []
        self.by_position: list[tuple[Any, tuple[Any, ...]]] = []

    function = packed_metadata = None

    def __getitem__(self, grid: Any) -> Any:
        def run(**named: Any) -> Any:
            self.by_name.append((grid, named))
            return self

        return run

    def run(self, x: int, y: int, z: int, stream: int, *launch: Any) -> None:
        """As a compiled kernel has it: function, metadata and hooks come before the kernel's own arguments."""
        self.by_position.append(((x, y, z), launch[5:]))


def test_a_kind_of_launch_goes_through_the_front_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones hand over the same arguments by position, with addresses for tensors."""
    from flashdecoding.gpu import direct
    from flashdecoding.gpu.arguments import Sinks, View

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernel = _FrontEnd()
    launcher = direct.Direct({"out": slice(0, 1), "q": slice(1, 2), "sinks": slice(2, 3)})
    memory = torch.zeros(64, dtype=torch.int32)

    def launch(key: str, q: torch.Tensor, sinks: torch.Tensor | None) -> None:
        records = {
            "q": View(q, 1, 2, 3, 4), "out": View(memory, 5, 6, 7, 8), "sinks": None if sinks is None else Sinks(sinks),
        }  # fmt: skip
        others = {"numbers": (1.5, 2), "N": 16, "num_warps": 4}
        addresses, kind = direct.addresses_of((memory, q, sinks))
        first = direct.Launch(kernel, (3, 2), records, others)
        launcher.launch((key, kind, sinks is None), addresses, memory.device, lambda: [first])

    at = memory.data_ptr()
    assert at % 16 == 0
    dropped = torch.zeros(64, dtype=torch.int32)
    launch("dropped", dropped, dropped)
    ready = next(iter(launcher._known.values()))[0]
    assert not any(isinstance(x, tuple) and any(isinstance(y, torch.Tensor) for y in x) for x in ready.arguments)
    kernel.by_name.clear()
    launch("a", memory, memory)  # one tensor as all three, which later launches must not take for a rule
    for _ in range(2):
        launch("a", memory[4:], memory[:])
    launch("a", memory[8:], memory[4:])  # other addresses, as aligned
    assert [grid for grid, _ in kernel.by_name] == [(3, 2)] and len(kernel.by_position) == 3
    assert kernel.by_position[0] == ((3, 2, 1), ((at + 16, 1, 2, 3, 4), (1.5, 2), (at,), (at, 5, 6, 7, 8), 16))
    assert kernel.by_position[2] == ((3, 2, 1), ((at + 32, 1, 2, 3, 4), (1.5, 2), (at + 16,), (at, 5, 6, 7, 8), 16))
    others = [("a", memory[1:], memory[:]), ("a", memory[4:], None), ("b", memory[4:], memory[:])]
    for number, other in enumerate(others, 2):  # another alignment, a pointer not given, another kind of call
        launch(*other)
        assert len(kernel.by_name) == number and len(kernel.by_position) == 3
