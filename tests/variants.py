"""Calls that the GPU kernels are compiled for: few of them, in which every pair of properties meets."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch

from flashdecoding.testing import Case
from flashdecoding.testing.cases import FEATURES as SINGLE

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LATENT = (576, 512)
HEADS = {1: (4, 4), 4: (8, 2), 16: (16, 1), 71: (71, 1)}  # by group size
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: SINGLE[name] for name in ("window", "softcap", "sinks", "alibi-batch", "mask-full", "trees")},
    "window+sinks": {**SINGLE["window"], **SINGLE["sinks"]},
    "state": {},
}
SHARD: dict[str, Any] = {"q_start": 200, "kv_start": 16, "kv_block": 16, "kv_stride": 32}  # what a state is computed of


class Variant(NamedTuple):
    """A value of each of FACTORS."""

    dtype: str
    dims: tuple[int, int]
    layout: str
    q_len: int | tuple[int, ...]
    group: int
    feature: str
    lse: bool
    target: str  # where it is compiled for one target only

    def __str__(self) -> str:
        dim, dim_v = self.dims
        size = f"d{dim}" if dim == dim_v else f"d{dim}v{dim_v}"
        queries = f"q{self.q_len}" if isinstance(self.q_len, int) else "ragged"
        lse = ["lse"] if self.lse else []
        return "-".join([self.dtype, size, self.layout, queries, f"g{self.group}", self.feature, *lse])

    @property
    def case(self) -> Case:
        sizes = (DTYPES[self.dtype], *self.dims, *HEADS[self.group], (130, 65, 7))
        return Case(*sizes, q_len=self.q_len, latent=self.dims == LATENT, **FEATURES[self.feature])


Pair = tuple[str, Any, str, Any]

FACTORS: dict[str, Sequence[Any]] = {
    "dtype": tuple(DTYPES),
    "dims": ((64, 64), (128, 128), (80, 80), (96, 33), (256, 256), (192, 128), LATENT),
    "layout": ("contiguous", "strided", "paged-16", "paged-1", "paged-53"),
    "q_len": (1, 5, (5, 1, 2)),
    "group": tuple(HEADS),
    "feature": tuple(FEATURES),
    "lse": (False, True),
    "target": ("sm_80", "sm_90", "sm_100"),
}
IMPOSSIBLE: set[Pair] = {("feature", "state", "lse", True)}  # a state holds m and l instead


def pairs(values: Sequence[Any], factors: Mapping[str, Sequence[Any]] = FACTORS) -> set[Pair]:
    """The pairs of a combination of values, each value after the name of its factor."""
    return {(*one, *other) for one, other in combinations(zip(factors, values, strict=True), 2)}


def pairwise(factors: Mapping[str, Sequence[Any]], impossible: set[Pair]) -> list[tuple[Any, ...]]:
    """Combinations of values in which every possible pair occurs.

    The next one is always one that adds most new pairs; of these, one whose values were chosen least.
    """
    names, sizes = list(factors), [len(values) for values in factors.values()]
    every = np.array(list(product(*map(range, sizes))))
    missing = {(a, b): np.ones((sizes[a], sizes[b]), bool) for a, b in combinations(range(len(sizes)), 2)}
    for one, value, other, other_value in impossible:
        a, b = names.index(one), names.index(other)
        i, j = factors[one].index(value), factors[other].index(other_value)
        missing[a, b][i, j] = False
        every = every[(every[:, a] != i) | (every[:, b] != j)]
    chosen, used = [], [np.zeros(size) for size in sizes]
    while any(table.any() for table in missing.values()):
        gain = sum(table[every[:, a], every[:, b]] for (a, b), table in missing.items())
        frequency = sum(counts[every[:, a]] for a, counts in enumerate(used))
        best = every[np.argmax(gain - 1e-4 * frequency)]
        for (a, b), table in missing.items():
            table[best[a], best[b]] = False
        for counts, i in zip(used, best, strict=True):
            counts[i] += 1
        chosen.append(tuple(values[i] for values, i in zip(factors.values(), best, strict=True)))
    return chosen


VARIANTS = [Variant(*values) for values in pairwise(FACTORS, IMPOSSIBLE)]
