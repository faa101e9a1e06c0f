"""One call on the GPU: its plan, unless one is given, then the two stages, on the current stream, without a sync."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from flashdecoding.gpu.arguments import (
    Mask,
    Places,
    Results,
    Scores,
    Sinks,
    Slopes,
    View,
    blocks_of,
    pages_of,
)
from flashdecoding.gpu.direct import Direct, Launch, addresses_of
from flashdecoding.gpu.merge import merge_kernel
from flashdecoding.gpu.plans import DeviceCut, DevicePlan, cut_on_device, on
from flashdecoding.gpu.shapes import MOST_AHEAD_IN_PAGES, Shape, launch_shape
from flashdecoding.gpu.split import split_kernel
from flashdecoding.lengths import NOTHING_BUT_A_PLAN, DeviceSpans, longest_on_gpu
from flashdecoding.plan import DecodeProblem
from flashdecoding.state import AttentionState

if TYPE_CHECKING:
    from flashdecoding.checks import Call
    from flashdecoding.plan import SplitPlan
    from flashdecoding.signature import Checked


# Where an argument's pointers are among a call's addresses: those of `Given.tensors`, then of the cut and the parts.
SHARED = {
    "out": slice(0, 1), "results": slice(1, 4), "places": slice(4, 8), "sinks": slice(8, 9), "cut": slice(15, 18),
    "parts": slice(18, 20),
}  # fmt: skip
OWN = {name: slice(at, at + 1) for at, name in enumerate(("q", "k", "v", "pages", "mask", "slopes"), 9)}

_stages = Direct({**OWN, **SHARED})


class Given(NamedTuple):
    """The tensors of a call in the form that kernels take; a packed call's have no batch to step over."""

    call: Call
    cut: DeviceCut
    out: torch.Tensor
    lse: torch.Tensor | None
    state: tuple[torch.Tensor, torch.Tensor] | None
    scratch: torch.Tensor  # as `Shape.scratch` says
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        call = self.call
        m, l = self.state or (None, None)
        _, kv_begin, q_offsets, q_start, kv_start = cast(DeviceSpans, call.spans)
        return (
            self.out, self.lse, m, l, kv_begin, q_offsets, q_start, kv_start, self.sinks, call.q, call.k, call.v,
            call.page_table, self.mask, self.slopes,
        )  # fmt: skip

    def shared(self) -> dict[str, Any]:
        """Arguments of both stages with pointers."""
        packed = self.call.checked.ragged
        return {
            "out": View.of(self.out, packed), "results": Results.of(self.lse, self.state, packed),
            "parts": self.cut.shape.scratch.parts(self.scratch), "cut": self.cut.argument(),
            "places": Places.of(cast(DeviceSpans, self.call.spans)),
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
    nothing = c.q_len == 0 or c.batch == 0
    if c.ragged or nothing:  # tokens of no sequence
        out.zero_()
        for x, empty in ((lse, -math.inf), *zip(state or (), (-math.inf, 0.0), strict=False)):
            if x is not None:
                x.fill_(empty)
    if nothing:
        return
    with on(call.q.device):
        cut = _cut(call) if plan is None else cast(DevicePlan, plan).cut
        mask = None if call.mask is None else call.mask.view(torch.uint8)
        slopes = None if call.alibi_slopes is None else call.alibi_slopes.contiguous()
        sinks = None if call.sinks is None else call.sinks.contiguous()
        _launch(Given(call, cut, out, lse, state, cut.shape.scratch.empty(call.q.device), mask, slopes, sinks))


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
    call, cut, spans = given.call, given.cut, cast(DeviceSpans, given.call.spans)
    addresses, kind = addresses_of(given.tensors)
    # All that decides how the kernels are compiled. Strides of what was made for the call follow from its shape.
    key = (
        call.checked, cut.shape, kind, cut.kind, given.out.stride(), given.lse is None, given.state is None,
        call.k.data_ptr() == call.v.data_ptr(),
        None if spans is NOTHING_BUT_A_PLAN else tuple([None if x is None else x.dtype for x in spans]),
    )  # fmt: skip
    addresses += cut.addresses + cut.shape.scratch.addresses(given.scratch)
    _stages.launch(key, addresses, call.q.device, lambda: _launches(given))


def _launches(given: Given) -> list[Launch]:
    call, shape, c = given.call, given.cut.shape, given.call.checked
    workers = shape.workers * c.kv_heads, shape.row_blocks
    stage_1 = Launch(split_kernel, workers, given.split(), _split_numbers(call, shape))
    tiles = c.batch * c.q_heads * c.q_len, triton.cdiv(c.head_dim_v, shape.merged_columns)
    stage_2 = Launch(merge_kernel, tiles, given.shared(), _merge_numbers(call, shape))
    return [stage_1, stage_2] if shape.most_items else [stage_2]


def _common_numbers(c: Checked) -> dict[str, Any]:
    return {
        "KV_HEADS": c.kv_heads, "GROUP": c.q_heads // c.kv_heads, "q_len": c.q_len, "DV": c.head_dim_v,
        "tokens": c.signature.q.shape[2],
        # Rounding a product and a sum at once is left to each variant's compilation: other strides, other bits.
        "enable_fp_fusion": False,
    }  # fmt: skip


def _split_numbers(call: Call, shape: Shape) -> dict[str, Any]:
    """Arguments and options of stage 1 that have no pointer."""
    c = call.checked
    differ = c.q_len > 1 or call.mask is not None
    ahead = shape.ahead if call.page_table is None else min(shape.ahead, MOST_AHEAD_IN_PAGES)
    return {
        **_common_numbers(c), **shape.launching(ahead), "blocks": blocks_of(call),
        "scores": _scores(c, call.alibi_slopes is not None), "cap": _cap(c), "window": c.window,
        "capacity": min(c.capacity, longest_on_gpu(c.batch)), "D": c.head_dim, "D0": shape.d[0], "D1": shape.d[1],
        "E0": shape.e[0], "E1": shape.e[1], "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n,
        "FOLDS": shape.folds, "PLACES": shape.block_n.bit_length() - 1 - shape.folds, "PAGE_SIZE": c.page_size,
        "WIDE": max(_wide(call.k, call.page_table is not None), _wide(call.v, call.page_table is not None)),
        "TWINS": call.k.stride() == call.v.stride(), "CAUSAL": c.causal and (c.q_len > 1 or call.positioned),
        "DIFFER": differ, "TREE": c.mask_is_tree, "LATENT": _latent(call, shape),
        "SHIFT": 15 if c.dtype == torch.float16 else 0,
        # Pages are loaded ahead of keys: one stage more for each.
        "STAGES": ahead + 1 if call.page_table is None else 2 * ahead + 1,
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


def _wide(cache: torch.Tensor, paged: bool) -> int:
    """Which offsets may pass 2**31: those among the tokens of one sequence or page (2), or those of pages (1)."""
    pages, _, tokens, columns = cache.shape
    within = tokens * cache.stride(2) + columns * cache.stride(3)
    if within >= 2**31:
        return 2
    return int(paged and within + pages * cache.stride(0) >= 2**31)


def _latent(call: Call, shape: Shape) -> bool:
    """Whether v is the first columns of k, so that one load serves both."""
    k, v = call.k, call.v
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and v.shape[3] <= k.shape[3]
    return same and shape.e == (shape.d[0], 0)
