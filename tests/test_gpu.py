"""What a machine without a GPU can say of the GPU kernels: they are right in Triton's interpreter, and they compile.

On a GPU the whole contract suite runs (`tests/backends.py`).
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

triton = pytest.importorskip("triton", minversion="3.6", reason="Triton 3.6 or newer is not installed")

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
FLAGS = dict.fromkeys(("WINDOW", "BLOCKED", "MULTI", "CAPPED", "ALIBI", "SINKS", "LSE", "STATE", "LATENT"), False)
TILE = {"BM": 16, "BN": 64, "STAGES": 3, "LEVELS": 6, "SHIFT": 0}
PLAIN = {**FLAGS, **TILE, "CAUSAL": True, "MASK": 0, "PAGE": 0, "GROUP": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"element": "bf16", "dims": (128, 128)},
    "paged-ragged": {"element": "bf16", "dims": (128, 128), "PAGE": 16, "MULTI": True, "BM": 32, "LSE": True},
    "fp16-mask": {"element": "fp16", "dims": (80, 80), "MASK": 1, "MULTI": True, "SHIFT": 10, "SINKS": True},
    "tree-window": {"element": "bf16", "dims": (64, 64), "MASK": 2, "MULTI": True, "WINDOW": True, "CAPPED": True},
    "latent": {"element": "bf16", "dims": (576, 512), "LATENT": True, "BN": 32, "STAGES": 2, "LEVELS": 5, "PAGE": 64},
    "fp32-alibi-state": {
        "element": "fp32", "dims": (96, 33), "ALIBI": True, "STATE": True, "BLOCKED": True, "MULTI": True, "BN": 16,
        "LEVELS": 4, "STAGES": 2,
    },
}  # fmt: skip


def test_interpreted_kernels_keep_the_bound() -> None:
    program = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("within the bound") == 10
    assert done.stdout.count("as the rule says") == 60
    assert "offsets from nowhere do no harm" in done.stdout


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_split_kernel_compiles(variant: str, target: str) -> None:
    """Without a GPU: to machine code, within the shared memory of each."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language import float32, float64

    from flashdecoding.gpu.kernels import split_kernel
    from flashdecoding.gpu.launch import _columns

    options = dict(VARIANTS[variant])
    element, (dim, dim_v) = options.pop("element"), options.pop("dims")
    (d0, d1), (e0, e1) = _columns(dim), _columns(dim_v)
    wide = element == "fp32"
    constants = {
        **PLAIN, **options, "D": dim, "DV": dim_v, "D0": d0, "D1": d1, "E0": e0, "E1": e1,
        "SUM": float64 if wide else float32,
    }  # fmt: skip
    pointers = dict.fromkeys(("q", "k", "v", "out"), f"*{element}")
    pointers |= dict.fromkeys(("lse", "state_m", "state_l", "part_o", "slopes", "sinks"), "*fp32")
    pointers |= {"part_ml": "*fp64" if wide else "*fp32", "items": "*i32", "sequences": "*i64", "pages": "*i32"}
    pointers |= {"mask": "*u8"}
    numbers = dict.fromkeys(("unit", "q_sign", "score_scale", "cap"), "fp32")
    signature = {
        name: "constexpr" if name in constants else pointers.get(name) or numbers.get(name) or "i32"
        for name in split_kernel.arg_names
    }
    source = ASTSource(split_kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": 4, "num_stages": 3})
    assert compiled.metadata.shared <= SHARED_BYTES[target]
    assert len(compiled.asm["cubin"]) > 0


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
