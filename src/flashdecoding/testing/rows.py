"""Decode steps of equally long sequences as shapes: what the rows of both benchmarks are made of."""

import re
from dataclasses import dataclass

import torch

from flashdecoding import plan_decode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Row:
    """One decode step: ``batch`` sequences of ``kv_len`` keys, one query each."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_len: int
    dtype: str

    @classmethod
    def parse(cls, shape: str, dtype: str) -> "Row":
        """From ``1x32/8x128x8K``: batch x q heads / kv heads x head dim x keys. ``ValueError`` for anything else."""
        match = re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)x(\d+)(K?)", shape.strip(), re.IGNORECASE)
        if match is None:
            raise ValueError(f"a shape is BATCHxQ_HEADS/KV_HEADSxHEAD_DIMxKEYS, such as 1x32/8x128x8K, got {shape!r}")
        batch, q_heads, kv_heads, head_dim, keys = map(int, match.groups()[:5])
        if min(batch, q_heads, kv_heads, head_dim, keys) < 1 or q_heads % kv_heads:
            raise ValueError(f"shape {shape!r}: numbers must be positive, q heads a multiple of kv heads")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        return cls(batch, q_heads, kv_heads, head_dim, keys << 10 if match[6] else keys, dtype)

    @property
    def shape(self) -> str:
        """As :meth:`parse` takes it."""
        keys = f"{self.kv_len >> 10}K" if self.kv_len and self.kv_len % 1024 == 0 else str(self.kv_len)
        return f"{self.batch}x{self.q_heads}/{self.kv_heads}x{self.head_dim}x{keys}"

    @property
    def name(self) -> str:
        return f"{self.shape} {self.dtype}"

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.kv_heads * self.kv_len * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Operations of Q K^T and P V; a multiply-add is two."""
        return 4 * self.batch * self.q_heads * self.kv_len * self.head_dim

    @property
    def partial_bytes(self) -> int:
        """The partial states of all splits on the CPU: m and l in float64, o in the type it is summed in."""
        plan = plan_decode(
            [self.kv_len] * self.batch,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=DTYPES[self.dtype],
        )
        sums = 8 if self.dtype in ("fp32", "fp64") else 4
        return plan.num_splits * self.q_heads * (self.head_dim * sums + 2 * 8)
