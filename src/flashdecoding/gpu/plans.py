"""Plans on a GPU: made once for every layer of a step, or by a call for itself."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton

from flashdecoding import validate
from flashdecoding.gpu.arguments import Cut, Reach
from flashdecoding.gpu.direct import Addresses, Direct, Launch, addresses_of
from flashdecoding.gpu.planning import OFFSETS, RECORD, SEQLENS, TABLE_ROWS, plan_kernel
from flashdecoding.gpu.shapes import Shape, launch_shape
from flashdecoding.lengths import DeviceSpans, Lengths, device_lengths, longest_on_gpu, read_lengths
from flashdecoding.plan import DecodeProblem, SplitPlan
from flashdecoding.refusal import Refusal
from flashdecoding.signature import Checked

MOST_ADMITTED = 64  # kinds of call that a plan remembers

_plan = Direct({"spans": slice(0, 3), "cut": slice(3, 6)})


class DeviceCut(NamedTuple):
    """A batch's splits as `planning.py` lays them out, and the shape of the launches for them."""

    memory: torch.Tensor
    workers: torch.Tensor  # (workers + 1, RECORD)
    table: torch.Tensor  # (TABLE_ROWS, batch + 1), with space for whole records
    items: torch.Tensor  # (most_items, RECORD)
    addresses: Addresses  # of workers, table and items
    kind: Hashable  # of these
    shape: Shape

    @classmethod
    def of(cls, batch: int, shape: Shape, memory: torch.Tensor) -> DeviceCut:
        """The views of a cut's memory."""
        records = memory.view(-1, RECORD.value)
        columns = triton.cdiv(batch + 1, RECORD.value)
        sizes = [shape.workers + 1, TABLE_ROWS * columns, shape.most_items]
        workers, table, items = torch.split(records, sizes)
        return cls(memory, workers, table.view(TABLE_ROWS, -1), items, *addresses_of((workers, table, items)), shape)

    @classmethod
    def empty(cls, batch: int, shape: Shape, device: torch.device) -> DeviceCut:
        """Memory for a cut, which :func:`cut_on_device` writes."""
        records = shape.workers + 1 + TABLE_ROWS * triton.cdiv(batch + 1, RECORD.value) + shape.most_items
        return cls.of(batch, shape, torch.empty(records * RECORD.value, dtype=torch.int32, device=device))

    def argument(self) -> Cut:
        return Cut(self.workers, self.table, self.items, self.table.stride(0))


_HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to ``device``."""
    return _HERE if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def cut_on_device(cut: DeviceCut, problem: DecodeProblem, spans: DeviceSpans, longest: int, tokens: int) -> None:
    """Launch the plan of a batch: lengths count as at most ``longest``, packed queries as at most ``tokens``."""
    shape, lengths = cut.shape, Reach(spans.seqlens, spans.kv_begin, spans.q_offsets)

    def numbers() -> dict[str, Any]:
        lanes = min(1024, max(16, triton.next_power_of_2(problem.batch)))
        return {
            "batch": problem.batch, "capacity": longest, "q_len": problem.q_len, "tokens": tokens,
            "window": problem.window, "workers": shape.workers, "least_tiles": shape.least_tiles,
            "most_splits": shape.most_splits, "TILE": shape.block_n, "LANES": lanes,
            "WORKERS": min(512, triton.next_power_of_2(shape.workers + 1)), "INVARIANT": shape.invariant,
            "num_warps": 4, **shape.launching(),
        }  # fmt: skip

    with on(cut.memory.device):
        addresses, kind = addresses_of(lengths)
        key = (problem, shape, longest, tokens, kind, cut.kind, *[None if x is None else x.dtype for x in lengths])
        records = {"spans": lengths, "cut": cut.argument()}
        launch = lambda: [Launch(plan_kernel, (1, 1), records, numbers())]  # noqa: E731
        _plan.launch(key, addresses + cut.addresses, cut.memory.device, launch)


class DevicePlan(SplitPlan):
    """A plan on a GPU. Copies and pickles have arrays of their own, and wait for the GPU to read the lengths."""

    def __init__(self, problem: DecodeProblem, cut: DeviceCut, max_seqlen: int) -> None:
        self.problem = problem
        self.device = cut.shape.model
        self.max_seqlen = max_seqlen
        self.batch_invariant = cut.shape.invariant
        self.where = cut.memory.device
        self._lengths: tuple[int, ...] | None = None
        self._longest_known = 0
        self._admitted: set[Checked] = set()
        self._made_from: dict[int, tuple[torch.Tensor, int]] = {}  # tensors that tell of changes, by id; versions
        self.cut = cut
        self.seqlens = cut.table[SEQLENS.value, : problem.batch]
        self.split_offsets = cut.table[OFFSETS.value, : problem.batch + 1]

    def update(self, seqlens: Lengths) -> None:
        batch, refusal = self.problem.batch, Refusal("SplitPlan.update")
        on_device = isinstance(seqlens, torch.Tensor) and seqlens.device == self.where
        lengths = None if on_device else read_lengths(refusal, seqlens, batch, self.max_seqlen, "seqlens")
        if on_device and validate.WANTED and not torch.cuda.is_current_stream_capturing():
            read_lengths(refusal, seqlens.cpu(), batch, self.max_seqlen, "seqlens")  # type: ignore[union-attr]
        placed = device_lengths(
            refusal, seqlens if lengths is None else lengths, batch, self.max_seqlen, self.where, "seqlens"
        )
        refusal.raise_if_any()
        if batch:
            cut_on_device(self.cut, self.problem, DeviceSpans(placed, None, None, None, None), self.max_seqlen, 0)
        self._lengths = lengths
        self._longest_known = max(lengths or (), default=0)
        sources = [self.seqlens]
        if isinstance(seqlens, torch.Tensor) and on_device and not seqlens.is_inference():
            sources.append(seqlens)
        self._made_from = {id(x): (x, _version(x)) for x in sources}

    @property
    def lengths(self) -> tuple[int, ...] | None:
        return self._lengths

    def admits(self, checked: Checked) -> bool:
        return checked in self._admitted and self._longest_known <= checked.capacity

    def admit(self, checked: Checked) -> None:
        if len(self._admitted) >= MOST_ADMITTED:
            self._admitted.clear()
        self._admitted.add(checked)

    def is_made_from(self, seqlens: object) -> bool:
        known = self._made_from.get(id(seqlens))
        return known is not None and known[1] == _version(known[0])

    @property
    def num_splits(self) -> int:
        return int(self.split_offsets[-1])

    def splits_of(self, sequence: int) -> list[tuple[int, int]]:
        offsets = self.split_offsets.tolist()
        first, past = offsets[:-1][sequence], offsets[1:][sequence]
        return [(begin, end) for begin, end in self.cut.items[first:past, 1:3].tolist()]

    def operator_arguments(self) -> dict[str, Any]:
        numbers = {"plan_max_seqlen": self.max_seqlen, "plan_invariant": self.batch_invariant}
        return {"plan_memory": self.cut.memory, **numbers}

    def __reduce__(self) -> tuple[object, ...]:
        return plan_on_device, (self.problem, self.where, self.seqlens.cpu(), self.max_seqlen, self.batch_invariant)


def _version(x: torch.Tensor) -> int:
    """Counts the changes of a tensor in place, where torch does."""
    return 0 if x.is_inference() else x._version


def plan_on_device(
    problem: DecodeProblem, device: torch.device, seqlens: Lengths, max_seqlen: int | None, batch_invariant: bool
) -> DevicePlan:
    """A plan in memory of its own, cut for ``seqlens``."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    longest = longest_on_gpu(problem.batch)
    if max_seqlen is not None:
        longest = min(longest, max_seqlen)
    shape = launch_shape(problem, longest, batch_invariant, device)
    plan = DevicePlan(problem, DeviceCut.empty(problem.batch, shape, device), longest)
    plan.cut.memory.zero_()
    plan.update(seqlens)
    return plan


def resume(problem: DecodeProblem, memory: torch.Tensor, max_seqlen: int, batch_invariant: bool) -> DevicePlan:
    """The plan whose memory this is."""
    shape = launch_shape(problem, max_seqlen, batch_invariant, memory.device)
    return DevicePlan(problem, DeviceCut.of(problem.batch, shape, memory), max_seqlen)
