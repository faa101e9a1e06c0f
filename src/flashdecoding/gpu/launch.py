"""One call on the GPU: its plan, unless one is given, then the two stages, on the current stream, without a sync."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from flashdecoding.gpu.arguments import (
    Mask,
    Parts,
    Places,
    Results,
    Scores,
    Sinks,
    Slopes,
    View,
    blocks_of,
    pages_of,
)
from flashdecoding.gpu.direct import Direct, Pointers
from flashdecoding.gpu.merge import merge_kernel
from flashdecoding.gpu.plans import DeviceCut, DevicePlan, cut_on_device, on
from flashdecoding.gpu.shapes import Shape, launch_shape
from flashdecoding.gpu.split import split_kernel
from flashdecoding.lengths import DeviceSpans, longest_on_gpu
from flashdecoding.plan import DecodeProblem
from flashdecoding.state import AttentionState

if TYPE_CHECKING:
    from flashdecoding.checks import Call
    from flashdecoding.plan import SplitPlan
    from flashdecoding.signature import Checked


# Where an argument's pointers are in `Given.pointers`.
SHARED = {
    "out": range(0, 1), "results": range(1, 4), "parts": range(4, 6), "cut": range(6, 9), "places": range(9, 13),
    "sinks": range(13, 14),
}  # fmt: skip
OWN = {name: range(at, at + 1) for at, name in enumerate(("q", "k", "v", "pages", "mask", "slopes"), 14)}

_split, _merge = Direct(split_kernel, {**OWN, **SHARED}), Direct(merge_kernel, SHARED)


class Given(NamedTuple):
    """The tensors of a call in the form that kernels take; a packed call's have no batch to step over."""

    call: Call
    cut: DeviceCut
    out: torch.Tensor
    lse: torch.Tensor | None
    state: tuple[torch.Tensor, torch.Tensor] | None
    parts: Parts
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def pointers(self) -> Pointers:
        call, cut = self.call, self.cut
        m, l = self.state or (None, None)
        _, kv_begin, q_offsets, q_start, kv_start = cast(DeviceSpans, call.spans)
        return Pointers((
            self.out, self.lse, m, l, *self.parts, cut.workers, cut.table, cut.items, kv_begin, q_offsets, q_start,
            kv_start, self.sinks, call.q, call.k, call.v, call.page_table, self.mask, self.slopes,
        ))  # fmt: skip

    def shared(self) -> dict[str, Any]:
        """Arguments of both stages with pointers."""
        packed = self.call.checked.ragged
        return {
            "out": View.of(self.out, packed), "results": Results.of(self.lse, self.state, packed), "parts": self.parts,
            "cut": self.cut.argument(), "places": Places.of(cast(DeviceSpans, self.call.spans)),
            "sinks": None if self.sinks is None else Sinks(self.sinks),
        }  # fmt: skip

    def split(self) -> dict[str, Any]:
        """Those of stage 1."""
        call = self.call
        return {
            "q": View.of(call.q, call.checked.ragged), "k": View.of(call.k), "v": View.of(call.v),
            "pages": pages_of(call), "mask": Mask.of(self.mask), "slopes": Slopes.of(self.slopes), **self.shared(),
        }  # fmt: skip


def decode(call: Call, plan: SplitPlan | None, out: torch.Tensor, want_lse: bool) -> torch.Tensor | None:
    """Write attention into ``out``; returns lse (batch, q_heads, q_len), float32, if wanted."""
    lse = call.q.new_empty(out.shape[:3], dtype=torch.float32) if want_lse else None
    _run(call, plan, out, lse, None)
    return lse


def partial_state(call: Call, plan: SplitPlan | None) -> AttentionState:
    """The state (m, l, o) of a call."""
    rows = call.q.shape[:3]
    m, l = (call.q.new_empty((*rows, 1), dtype=torch.float32) for _ in range(2))
    o = call.q.new_empty((*rows, call.checked.head_dim_v), dtype=torch.float32)
    _run(call, plan, o, None, (m, l))
    return AttentionState(m, l, o)


def _run(
    call: Call, plan: SplitPlan | None, out: torch.Tensor, lse: torch.Tensor | None,
    state: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:  # fmt: skip
    c = call.checked
    rows = c.q_len * (c.q_heads // c.kv_heads)
    if c.ragged or rows == 0 or c.batch == 0:  # tokens of no sequence
        out.zero_()
        for x, nothing in ((lse, -math.inf), *zip(state or (), (-math.inf, 0.0), strict=False)):
            if x is not None:
                x.fill_(nothing)
    if rows == 0 or c.batch == 0:
        return
    with on(call.q.device):
        cut = _cut(call) if plan is None else cast(DevicePlan, plan).cut
        parts = cut.shape.most_parts * c.kv_heads * rows
        sums = torch.float64 if c.dtype == torch.float32 else torch.float32
        mask = None if call.mask is None else call.mask.view(torch.uint8)
        slopes, sinks = (None if x is None else x.contiguous() for x in (call.alibi_slopes, call.sinks))
        o = call.q.new_empty((parts, c.head_dim_v), dtype=torch.float32)
        ml = call.q.new_empty((parts, 2), dtype=sums)
        _launch(Given(call, cut, out, lse, state, Parts(o, ml), mask, slopes, sinks))


def _cut(call: Call) -> DeviceCut:
    """The splits of this call alone."""
    c, spans, q = call.checked, cast(DeviceSpans, call.spans), call.q
    # A window cuts nothing off a piece of the sequence beforehand: only the kernel knows positions.
    problem = DecodeProblem(*c.problem)._replace(window=None if call.positioned else c.window)
    longest = min(c.capacity, longest_on_gpu(c.batch))
    cut = DeviceCut.empty(c.batch, launch_shape(problem, longest, False, q.device), q.device)
    cut_on_device(cut, problem, spans, longest, q.shape[2])
    return cut


def _launch(given: Given) -> None:
    """Stage 1 and stage 2."""
    call, shape = given.call, given.cut.shape
    c, latent, pointers = call.checked, _latent(call, shape), given.pointers
    places = cast(DeviceSpans, call.spans)[1:]
    key = (c, shape, given.out.stride(), latent, *[None if x is None else x.dtype for x in places])
    if shape.most_items:
        grid = shape.workers * c.kv_heads, shape.row_blocks
        _split.launch(key, grid, pointers, lambda: (given.split(), _split_numbers(call, shape, latent)))
    grid = c.batch * c.q_heads * c.q_len, triton.cdiv(c.head_dim_v, shape.merged_columns)
    _merge.launch(key, grid, pointers, lambda: (given.shared(), _merge_numbers(call, shape)))


def _common_numbers(c: Checked) -> dict[str, Any]:
    return {
        "KV_HEADS": c.kv_heads, "GROUP": c.q_heads // c.kv_heads, "q_len": c.q_len, "DV": c.head_dim_v,
        "tokens": c.signature.q.shape[2],
        # Rounding a product and a sum at once is left to each variant's compilation: other strides, other bits.
        "enable_fp_fusion": False,
    }  # fmt: skip


def _split_numbers(call: Call, shape: Shape, latent: bool) -> dict[str, Any]:
    """Arguments and options of stage 1 that have no pointer."""
    c = call.checked
    differ = c.q_len > 1 or call.mask is not None
    return {
        **_common_numbers(c), **shape.launching(stage_1=True), "blocks": blocks_of(call),
        "scores": _scores(c, call.alibi_slopes is not None), "cap": _cap(c), "window": c.window,
        "capacity": min(c.capacity, longest_on_gpu(c.batch)), "D": c.head_dim, "D0": shape.d[0], "D1": shape.d[1],
        "E0": shape.e[0], "E1": shape.e[1], "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n,
        "LEVELS": shape.block_n.bit_length() - 1, "PAGE_SIZE": c.page_size,
        "WIDE": _wide(call.k) or _wide(call.v), "CAUSAL": c.causal and (c.q_len > 1 or call.positioned),
        "DIFFER": differ, "TREE": c.mask_is_tree, "LATENT": latent, "SHIFT": 15 if c.dtype == torch.float16 else 0,
        # Pages are loaded ahead of keys: one stage more for each.
        "STAGES": shape.stages if call.page_table is None else 2 * shape.stages - 1,
        "SUM": tl.float64 if c.dtype == torch.float32 else tl.float32, "num_warps": _warps(call, shape, differ),
    }  # fmt: skip


def _merge_numbers(call: Call, shape: Shape) -> dict[str, Any]:
    """Arguments and options of stage 2 that have no pointer."""
    tile = {"BLOCK_E": shape.merged_columns, "BLOCK_S": shape.merged_splits, "num_warps": shape.merge_warps}
    return {**_common_numbers(call.checked), **shape.launching(), **tile}


def _warps(call: Call, shape: Shape, differ: bool) -> int:
    """A dense mask has every tile in the loop that takes more registers."""
    dense = call.mask is not None and not call.checked.mask_is_tree
    return 8 if dense else shape.warps_if_differ if differ else shape.warps


def _scores(c: Checked, alibi: bool) -> Scores:
    """A scale below the normal range counts as 0."""
    if abs(c.scale) < torch.finfo(torch.float32).smallest_normal:
        return Scores(1.0, 0.0, 1.0)
    size = abs(c.scale)
    return Scores(1.0 if alibi or _cap(c) is not None else size, math.copysign(1.0, c.scale), size)


def _cap(c: Checked) -> float | None:
    """A soft cap past float32 caps nothing; one below its normal range leaves scores of that size."""
    info = torch.finfo(torch.float32)
    return None if c.softcap is None or c.softcap > info.max else max(c.softcap, info.smallest_normal)


def _wide(cache: torch.Tensor) -> bool:
    """Whether an offset among the tokens of one sequence or page may pass 2**31."""
    tokens, columns = cache.shape[2:]
    return tokens * abs(cache.stride(2)) + columns * abs(cache.stride(3)) >= 2**31


def _latent(call: Call, shape: Shape) -> bool:
    """Whether v is the first columns of k, so that one load serves both."""
    k, v = call.k, call.v
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and v.shape[3] <= k.shape[3]
    return same and shape.e == (shape.d[0], 0)
