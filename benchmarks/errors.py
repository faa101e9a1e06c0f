"""Errors against float64, beside torch's SDPA: the table of docs/numerics.md.

python benchmarks/errors.py > errors.md
"""

from __future__ import annotations

import platform
from datetime import date
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashdecoding
from flashdecoding.testing.cases import Problem
from flashdecoding.testing.compare import Expected, expect

SEEDS = 3


class Shape(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_len: int


SHAPES = (Shape(1, 32, 8, 128, 1024), Shape(1, 32, 8, 128, 8192), Shape(4, 16, 1, 64, 4096), Shape(1, 8, 8, 256, 2048))
INPUTS = {
    "normal": lambda q, k, v: (q, k, v),
    "scores of +-100": lambda q, k, v: (q * 30, k, v),
    "equal scores, V > 0": lambda q, k, v: (q * 0, k, v.abs()),
}


def rms(out: Tensor, wanted: Tensor) -> float:
    """RMS of the error over the RMS of the result."""
    return float((out.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def worst(out: Tensor, lse: Tensor, expected: Expected) -> float:
    """The largest error as a share of its bound, output and lse."""
    shares = (
        (out.double() - expected.out).abs() / expected.out_bound,
        (lse.double() - expected.lse).abs() / expected.lse_bound,
    )
    return max(float(share.max()) for share in shares)


def main() -> None:
    torch.set_grad_enabled(False)
    versions = f"torch {torch.__version__}, flashdecoding {flashdecoding.__version__}"
    print(f"{versions}, {platform.machine()}, {date.today()}\n")
    print("| dtype | shape | inputs | RMS error | SDPA's RMS error | ours / SDPA's | worst error / bound |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in SHAPES:
            for name, change in INPUTS.items():
                print(_row(dtype, shape, name, change), flush=True)


def _row(dtype: torch.dtype, shape: Shape, name: str, change) -> str:  # type: ignore[no-untyped-def]
    ours, theirs, shares = [], [], []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        cache = (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim)
        q = torch.randn(shape.batch, shape.q_heads, 1, shape.head_dim, generator=generator)
        k, v = torch.randn(cache, generator=generator), torch.randn(cache, generator=generator)
        q, k, v = (x.to(dtype) for x in change(q, k, v))
        expected = expect(Problem(q, k, v, {}))
        out, lse = flashdecoding.decode_attention(q, k, v, return_lse=True)
        sdpa = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        ours.append(rms(out, expected.out))
        theirs.append(rms(sdpa, expected.out))
        shares.append(worst(out, lse, expected))
    mean, peer = sum(ours) / SEEDS, sum(theirs) / SEEDS
    label = f"{shape.batch} x {shape.q_heads}/{shape.kv_heads} x {shape.head_dim} x {shape.kv_len}"
    cells = (str(dtype).removeprefix("torch."), label, name, f"{mean:.1e}", f"{peer:.1e}", f"{mean / peer:.2f}")
    return "| " + " | ".join((*cells, f"{max(shares):.2f}")) + " |"


if __name__ == "__main__":
    main()
