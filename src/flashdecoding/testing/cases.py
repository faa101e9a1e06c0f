"""Decode problems as data: a :class:`Case` is sizes and features, :meth:`Case.build` makes its tensors.

Sizes are odd on purpose. The grid keeps the number of (dtype, head_dim, head_dim_v) classes small, because kernels are
compiled per class, and spreads lengths, group sizes and features across them.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Problem:
    """Tensors of one call: ``decode_attention(q, k, v, **options)``.

    ``q`` is (B, Hq, Sq, D), or (1, Hq, T, D) with ``cu_q_lens`` in the options; ``k`` and ``v`` are (B, Hkv, S, D) and
    (B, Hkv, S, Dv), or (pages, Hkv, page_size, D) and (..., Dv) with ``page_table`` in the options.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Mapping[str, Any]

    def with_options(self, **changes: Any) -> "Problem":
        """The same tensors with some options set, or left out where the value is None."""
        merged = {**self.options, **changes}
        return replace(self, options={name: value for name, value in merged.items() if value is not None})

    def sequence(self, index: int) -> "Problem":
        """Sequence ``index`` of a batch that is neither ragged nor paged, as a batch of one (views, no copies)."""
        batch, rows = self.k.shape[0], slice(index, index + 1)
        options = dict(self.options)
        per_sequence = ["seqlens", "kv_begin"]
        per_sequence += ["mask"] if options.get("mask", self.q).shape[0] == batch else []
        per_sequence += ["alibi_slopes"] if options.get("alibi_slopes", self.q).ndim == 2 else []
        for name in set(per_sequence) & set(options):
            options[name] = options[name][rows]
        return Problem(self.q[rows], self.k[rows], self.v[rows], options)

    @property
    def latent(self) -> bool:
        """Whether ``v`` is a view of k's first columns."""
        k, v = self.k, self.v
        return k.numel() > 0 and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()

    def with_caches(self, k: Tensor, v: Tensor | None) -> "Problem":
        """Other caches of the same head sizes; ``v`` None: k's first columns."""
        return replace(self, k=k, v=k[..., : self.v.shape[-1]] if v is None else v)

    def to(self, device: str) -> "Problem":
        """A copy on ``device``, or the problem itself where it is there already."""
        if self.q.device.type == torch.device(device).type:
            return self
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        caches = self.with_caches(self.k.to(device), None if self.latent else self.v.to(device))
        return replace(caches, q=self.q.to(device), options=moved)


@dataclass(frozen=True)
class Case:
    """Sizes and features of one decode problem.

    ``q_len`` is an int, or one int per sequence for ragged queries. ``spare`` slots lie beyond the longest sequence.
    ``spread`` is the standard deviation of q, so of the scores about. ``mask`` names what a dense mask varies over
    ("keys", "heads", "batch", "full") or a draft tree ("tree", "trees": one per sequence). ``latent`` makes v a view of
    k's first head_dim_v columns.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    q_heads: int
    kv_heads: int
    seqlens: tuple[int, ...]
    q_len: int | tuple[int, ...] = 1
    spare: int = 3
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: Literal["", "heads", "batch"] = ""
    mask: Literal["", "keys", "heads", "batch", "full", "tree", "trees"] = ""
    kv_begin: bool = False
    latent: bool = False
    spread: float = 1.0
    name: str = ""

    @property
    def id(self) -> str:
        """Readable name: class, heads, lengths and what differs from the plain call."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}v{self.head_dim_v}"
        parts = [_SHORT[self.dtype], f"d{dims}", f"h{self.q_heads}:{self.kv_heads}"]
        parts.append("n" + ".".join(map(str, self.seqlens)))
        if self.q_len != 1:
            q_lens = (self.q_len,) if isinstance(self.q_len, int) else self.q_len
            parts.append("q" + ".".join(map(str, q_lens)))
        for field in fields(self)[8:]:
            value = getattr(self, field.name)
            if value != field.default and field.name != "name":
                parts.append(field.name if value is True else f"{field.name}={value}")
        return "-".join(([self.name] if self.name else []) + parts)

    @property
    def capacity(self) -> int:
        return max(self.seqlens, default=0) + self.spare

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Number of queries of each sequence."""
        return (self.q_len,) * len(self.seqlens) if isinstance(self.q_len, int) else self.q_len

    def build(self, device: str = "cpu") -> Problem:
        """Contiguous tensors without poison; the same values on every call and every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        batch, kv = len(self.seqlens), (self.kv_heads, self.capacity)
        q_batch, rows = (batch, self.q_len) if isinstance(self.q_len, int) else (1, sum(self.q_len))
        q = (self.spread * normal(q_batch, self.q_heads, rows, self.head_dim)).to(self.dtype)
        k = normal(batch, *kv, self.head_dim).to(self.dtype)
        v = k[..., : self.head_dim_v] if self.latent else normal(batch, *kv, self.head_dim_v).to(self.dtype)
        return Problem(q, k, v, dict(self._options(generator))).to(device)

    def _options(self, generator: torch.Generator) -> Iterator[tuple[str, Any]]:
        batch, lens = len(self.seqlens), torch.tensor(self.seqlens, dtype=torch.int32)
        yield "seqlens", lens
        if not isinstance(self.q_len, int):
            yield "cu_q_lens", torch.tensor((0, *self.q_len)).cumsum(0).to(torch.int32)
            yield "max_q_len", max(self.q_len)
        if not self.causal:
            yield "causal", False
        if self.window is not None:
            yield "window", self.window
        if self.softcap is not None:
            yield "softcap", self.softcap
        if self.sinks:
            sinks = torch.randn(self.q_heads, generator=generator)
            sinks[::3] = -torch.inf  # -inf means none
            sinks[1::3] += 4.0
            yield "sinks", sinks
        if self.alibi:
            shape = (self.q_heads,) if self.alibi == "heads" else (batch, self.q_heads)
            yield "alibi_slopes", 0.3 * torch.rand(shape, generator=generator)
        if self.mask:
            yield "mask", self._mask(generator)
        if self.kv_begin:
            begin = (torch.rand(batch, generator=generator) * (lens + 1)).to(torch.int32)
            begin[:1] = 0
            yield "kv_begin", begin

    def _mask(self, generator: torch.Generator) -> Tensor:
        batch, q_len = len(self.seqlens), max(self.q_lens, default=0)
        if self.mask in ("tree", "trees"):
            shape: tuple[int, ...] = (batch if self.mask == "trees" else 1, q_len, q_len)
            return (torch.rand(shape, generator=generator) < 0.5) | torch.eye(q_len, dtype=torch.bool)
        over_batch = batch if self.mask in ("batch", "full") else 1
        over_heads = self.q_heads if self.mask in ("heads", "full") else 1
        shape = (over_batch, over_heads, q_len, self.capacity)
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 70:200] = False  # whole tiles without a visible key
        return mask


def _case(kind: tuple[torch.dtype, int, int], heads: tuple[int, int], seqlens: tuple[int, ...], **more: Any) -> Case:
    return Case(*kind, *heads, seqlens, **more)


FP32_64 = (torch.float32, 64, 64)
FP32_128 = (torch.float32, 128, 128)
FP32_ODD = (torch.float32, 7, 5)
FP64_33 = (torch.float64, 33, 33)
BF16_64 = (torch.bfloat16, 64, 64)
BF16_128 = (torch.bfloat16, 128, 128)
BF16_ODD = (torch.bfloat16, 5, 9)
BF16_192 = (torch.bfloat16, 192, 128)
BF16_LATENT = (torch.bfloat16, 576, 512)
FP16_64 = (torch.float16, 64, 64)
FP16_80 = (torch.float16, 80, 80)
FP16_256 = (torch.float16, 256, 256)

SIZES: tuple[Case, ...] = (
    _case(BF16_128, (32, 8), (1, 65, 129)),
    _case(BF16_128, (8, 8), (0, 64, 63, 2)),
    _case(BF16_128, (28, 4), (513, 128), q_len=2),
    _case(BF16_128, (32, 1), (1025, 127), spare=900),
    _case(BF16_64, (71, 1), (130, 7, 0)),
    _case(BF16_64, (12, 4), (127, 128, 129), q_len=8),
    _case(BF16_64, (5, 1), (1, 2, 3, 4), spare=0),
    _case(BF16_ODD, (3, 3), (65, 0, 1)),
    _case(BF16_ODD, (10, 2), (129, 513), q_len=5),
    _case(BF16_192, (16, 4), (64, 1025)),
    _case(BF16_192, (12, 2), (63, 3), q_len=17),
    _case(BF16_LATENT, (16, 1), (65, 1, 300), latent=True),
    _case(BF16_LATENT, (8, 1), (129, 64), latent=True, q_len=2),
    _case(BF16_LATENT, (4, 2), (70, 5)),
    _case(FP16_64, (64, 4), (513, 1)),
    _case(FP16_64, (7, 7), (128, 127, 0, 2), q_len=64),
    _case(FP16_80, (16, 2), (129, 1025, 64)),
    _case(FP16_80, (3, 1), (63, 65), q_len=5),
    _case(FP16_80, (6, 1), (128, 2, 257)),
    _case(FP16_256, (32, 16), (65, 513)),
    _case(FP16_256, (4, 4), (1, 129), q_len=8),
    _case(FP32_64, (8, 1), (2049, 0, 63)),
    _case(FP32_64, (8, 2), (127, 1, 513), q_len=17),
    _case(FP32_64, (2, 2), (129,), q_len=64),
    _case(FP32_128, (16, 2), (1025, 64, 65, 1, 128)),
    _case(FP32_ODD, (15, 5), (2, 129, 513), q_len=2),
    _case(FP32_ODD, (4, 1), (63, 64)),
    _case(FP64_33, (12, 3), (1, 65, 1025)),
    _case(FP64_33, (5, 1), (128, 0), q_len=5),
)
"""Every class, group sizes 1 to 71, lengths around tile ends; causal, no other feature."""

RAGGED: tuple[Case, ...] = (
    _case(FP32_64, (8, 2), (129, 64, 513), q_len=(1, 5, 17)),
    _case(BF16_128, (32, 8), (65, 0, 1, 130), q_len=(2, 1, 0, 8)),
    _case(FP16_80, (3, 1), (7, 300, 2), q_len=(7, 1, 5), window=40),
    _case(BF16_LATENT, (16, 1), (128, 65), q_len=(3, 1), latent=True),
    _case(FP64_33, (5, 1), (129, 66), q_len=(5, 8), softcap=2.0, sinks=True, alibi="batch"),
    _case(BF16_64, (12, 4), (128, 63, 40), q_len=(1, 4, 8), mask="trees"),
    _case(FP32_64, (6, 2), (257, 63), q_len=(4, 2), mask="full"),
    _case(FP16_80, (6, 1), (128, 190), q_len=(9, 4), kv_begin=True, causal=False),
)
"""Packed queries, ``cu_q_lens``; some sequences without a query, some with more queries than keys."""

FEATURES: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "window": {"window": 37},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": "heads"},
    "alibi-batch": {"alibi": "batch"},
    "mask-keys": {"mask": "keys"},
    "mask-heads": {"mask": "heads"},
    "mask-batch": {"mask": "batch"},
    "mask-full": {"mask": "full"},
    "tree": {"mask": "tree"},
    "trees": {"mask": "trees"},
    "begin": {"kv_begin": True},
    "window-1": {"window": 1},
}
"""Each feature alone, as changes to a plain case."""

_FEATURE_BASES = (
    _case(BF16_128, (32, 8), (129, 1, 300), q_len=5),
    _case(FP32_64, (8, 1), (300, 64, 0, 7), q_len=8),
    _case(FP16_80, (3, 1), (65, 257)),
    _case(BF16_LATENT, (16, 1), (130, 2), q_len=2, latent=True),
    _case(FP64_33, (6, 2), (66, 513), q_len=3),
)
_PAIRED = ("full", "window", "softcap", "sinks", "alibi-batch", "mask-full", "trees", "begin")
_PAIR_BASES = (
    _case(FP32_64, (8, 2), (129, 66, 513), q_len=5),
    _case(BF16_128, (28, 4), (257, 9), q_len=4),
    _case(BF16_64, (5, 1), (64, 200, 3), q_len=1),
)


def _feature_cases() -> Iterator[Case]:
    for number, (name, change) in enumerate(FEATURES.items()):
        for base in (_FEATURE_BASES[number % 5], _FEATURE_BASES[(number + 1) % 5]):
            yield replace(base, name=name, **change)


def _pair_cases() -> Iterator[Case]:
    for number, (one, two) in enumerate(combinations(_PAIRED, 2)):
        if {one, two} != {"mask-full", "trees"}:  # both are the mask argument
            yield replace(_PAIR_BASES[number % 3], name=f"{one}+{two}", **FEATURES[one], **FEATURES[two])
    everything = {key: value for name in _PAIRED if name != "trees" for key, value in FEATURES[name].items()}
    for base in _PAIR_BASES:
        yield replace(base, name="all", **everything, spread=2.0)


SINGLE_FEATURES: tuple[Case, ...] = tuple(_feature_cases())
FEATURE_PAIRS: tuple[Case, ...] = tuple(_pair_cases())
GRID: tuple[Case, ...] = SIZES + RAGGED + SINGLE_FEATURES + FEATURE_PAIRS
