"""How a batch is cut into splits: integers only, no device, no kernel.

A sequence's visible keys [first, seqlen) are cut into splits of ``split_keys`` keys. Stage 1 computes one partial
state for each (split, kv head), stage 2 merges them. The rule looks at valid lengths, never at capacity or threads.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flashdecoding.lengths import Lengths, host_lengths
from flashdecoding.refusal import Refusal, in_range, is_positive
from flashdecoding.signature import FLOAT_DTYPES, Checked

LONGEST = 2**31 - 1  # the plan's arrays are int32
Int32Array = npt.NDArray[np.int32]


class DeviceModel(NamedTuple):
    """What the split rule needs to know of a device."""

    name: str
    tile: int  # keys a tile
    least_split: int  # keys below which a further split costs more than it brings
    most_units: int  # splits x kv heads (on a GPU x row blocks) of a sequence that balance every machine of a kind

    def split_keys(self, visible: int, kv_heads: int) -> int:
        """Keys a split of a sequence with ``visible`` keys. Its own length decides, so its bits depend on no other."""
        most_splits = max(1, self.most_units // kv_heads)
        share = -(-visible // most_splits)
        return min(max(self.least_split, -(-share // self.tile) * self.tile), LONGEST)


# 512 keys of bf16 at D 128 are 256 KB of cache, 15 us of one core; 1024 units serve 64 cores 16 times over.
CPU_MODEL = DeviceModel("cpu", tile=64, least_split=512, most_units=1024)


class DecodeProblem(NamedTuple):
    """What a plan was made for, and what a call must match."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    q_len: int
    window: int | None


class Cut(NamedTuple):
    """A batch's splits as host numbers; see :class:`SplitPlan` for each."""

    first: tuple[int, ...]
    split_keys: tuple[int, ...]
    split_offsets: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def cut_batch(
    lengths: tuple[int, ...], q_lens: tuple[int, ...], window: int | None, kv_heads: int, device: DeviceModel
) -> Cut:
    """Cut every sequence's keys in reach of its last ``q_len`` positions; the whole rule."""
    firsts, split_keys, offsets = [], [], [0]
    for length, q_len in zip(lengths, q_lens, strict=True):
        first = 0 if window is None else max(0, length - (q_len + window - 1))
        keys = device.split_keys(length - first, kv_heads)
        firsts.append(first)
        split_keys.append(keys)
        offsets.append(offsets[-1] - (first - length) // keys)
    return Cut(tuple(firsts), tuple(split_keys), tuple(offsets))


class SplitPlan(ABC):
    """The cut of one batch, made once a step and used in every layer.

    Attributes:
        problem: what it was made for.
        device: device model whose rule made it.
        seqlens: (batch,) int32 tensor, valid keys of each sequence, new tokens included.
        split_offsets: (batch + 1,) int32; splits of sequence b are split_offsets[b] to split_offsets[b + 1].
        max_seqlen: longest length that :meth:`update` takes.
        batch_invariant: a sequence's splits do not depend on the rest of the batch (on the CPU they never do).
        where: torch device of the arrays and of the calls.

    The arrays are not to be written; :meth:`update` rewrites them in place. A plan for a GPU keeps them there:
    :attr:`num_splits` and :meth:`splits_of` wait for it, calls and :meth:`update` do not.
    """

    problem: DecodeProblem
    device: DeviceModel
    max_seqlen: int
    batch_invariant: bool
    where: torch.device
    seqlens: torch.Tensor
    split_offsets: Int32Array | torch.Tensor

    @abstractmethod
    def update(self, seqlens: Lengths) -> None:
        """Rewrite the plan in place for other lengths of the same problem.

        Raises:
            ValueError: another batch size, a negative length, or one past ``max_seqlen``; the plan stays as it was.
                Lengths that are on a GPU are not looked at: there they count as the nearest that is allowed.
        """

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...] | None:
        """The lengths as numbers; None if they came as a tensor on a GPU."""

    @abstractmethod
    def is_made_from(self, seqlens: object) -> bool:
        """Whether these are the plan's lengths, as can be told without a look at them."""

    @abstractmethod
    def admits(self, checked: Checked) -> bool:
        """Whether such a call is known to fit, if nothing else is given by sequence: :meth:`admit` said so."""

    @abstractmethod
    def admit(self, checked: Checked) -> None:
        """Such a call was found to fit."""

    @property
    @abstractmethod
    def num_splits(self) -> int:
        """Splits of the whole batch."""

    @abstractmethod
    def splits_of(self, sequence: int) -> list[tuple[int, int]]:
        """[begin, end) key ranges of one sequence's splits, in order."""

    @abstractmethod
    def operator_arguments(self) -> dict[str, Any]:
        """What stands for the plan among the arguments of an operator: tensors and numbers."""

    def __repr__(self) -> str:
        lengths = self.lengths
        shown = f"on {self.where}" if lengths is None else ", ".join(map(str, lengths[:8]))
        if lengths is not None:
            shown = f"[{shown}{', ...' if len(lengths) > 8 else ''}]"
        splits = f", splits={self.num_splits}" if self.where.type == "cpu" else ""  # a GPU would have to be waited for
        return f"SplitPlan({self.problem}, device={self.device.name!r}, seqlens={shown}{splits})"


class HostPlan(SplitPlan):
    """A plan for the CPU.

    Attributes (which cannot be written):
        first: (batch,) int32, key at which split 0 begins (after 0 only with a window).
        split_keys: (batch,) int32, keys a split; the last may be short.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        device: DeviceModel,
        *,
        max_seqlen: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.problem = problem
        self.device = device
        self.max_seqlen = LONGEST if max_seqlen is None else max_seqlen
        self.batch_invariant = batch_invariant
        table = np.zeros((4, problem.batch + 1), np.int32)
        self._table = table
        self.where = torch.device("cpu")
        nothing = Cut((0,) * problem.batch, (device.least_split,) * problem.batch, (0,) * (problem.batch + 1))
        self._state = (0,) * problem.batch, nothing
        self.seqlens = torch.from_numpy(table[0, : problem.batch])
        self.first = _read_only(table[1, : problem.batch])
        self.split_keys = _read_only(table[2, : problem.batch])
        self.split_offsets = _read_only(table[3])

    def admits(self, checked: Checked) -> bool:
        return False  # the host reads the lengths in every call

    def admit(self, checked: Checked) -> None:
        pass

    def update(self, seqlens: Lengths) -> None:
        self.rewrite(host_lengths(seqlens, self.problem.batch, self.max_seqlen, "SplitPlan.update"))

    def rewrite(self, lengths: tuple[int, ...]) -> None:
        """:meth:`update` for lengths that are checked already."""
        batch, cut = self.problem.batch, self.cut_for(lengths)
        self._state = lengths, cut  # at once: calls in other threads see the old lengths and cut, or the new
        self._table[0, :batch], self._table[1, :batch] = lengths, cut.first
        self._table[2, :batch], self._table[3] = cut.split_keys, cut.split_offsets

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._state[0]

    def cut_for(self, lengths: tuple[int, ...]) -> Cut:
        """The cut of lengths that a call has read from the plan, whatever an update has done since."""
        planned, cut = self._state
        if planned is lengths:
            return cut
        p = self.problem
        return cut_batch(lengths, (p.q_len,) * p.batch, p.window, p.kv_heads, self.device)

    def is_made_from(self, seqlens: object) -> bool:
        return False  # comparing them costs little

    @property
    def num_splits(self) -> int:
        return int(self.split_offsets[-1])

    def splits_of(self, sequence: int) -> list[tuple[int, int]]:
        end, first, keys = map(int, self._table[:3, : self.problem.batch][:, sequence])
        return [(begin, min(begin + keys, end)) for begin in range(first, end, keys)]

    def operator_arguments(self) -> dict[str, Any]:
        return {"seqlens": self.seqlens}  # the cut follows from them

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles have arrays of their own."""
        return _rebuild, (self.problem, self.device, self.max_seqlen, self.batch_invariant, self.lengths)


def decode_problem(
    seqlens: Lengths, q_heads: int, kv_heads: int, head_dim: int, head_dim_v: int | None, dtype: torch.dtype,
    q_len: int, window: int | None, max_seqlen: int | None, batch_invariant: bool,
) -> DecodeProblem:  # fmt: skip
    """What :func:`plan_decode` is asked for, checked but for the lengths themselves."""
    refusal = Refusal("plan_decode")
    dim_v = head_dim if head_dim_v is None else head_dim_v
    counts = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": dim_v}
    for name, value in counts.items():
        refusal.unless(is_positive(value), f"{name} must be a positive int, got {value!r}")
    refusal.unless(in_range(q_len, None), f"q_len must be an int >= 0, got {q_len!r}")
    refusal.unless(window is None or is_positive(window), f"window must be an int >= 1 or None, got {window!r}")
    longest = max_seqlen is None or in_range(max_seqlen, LONGEST)
    refusal.unless(longest, f"max_seqlen must be an int in [0, {LONGEST}] or None, got {max_seqlen!r}")
    invariant = isinstance(batch_invariant, bool)
    refusal.unless(invariant, f"batch_invariant must be True or False, got {batch_invariant!r}")
    single = isinstance(seqlens, int) or (isinstance(seqlens, torch.Tensor) and seqlens.dim() == 0)
    listed = single or hasattr(seqlens, "__len__")
    refusal.unless(listed, f"seqlens must be a list, a tensor or an int, got {type(seqlens).__name__}")
    refusal.unless(dtype in FLOAT_DTYPES, f"dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
    refusal.raise_if_any()
    refusal.unless(q_heads % kv_heads == 0, f"q_heads must be a multiple of kv_heads, got {q_heads} and {kv_heads}")
    refusal.raise_if_any()
    batch = 1 if single else len(seqlens)  # type: ignore[arg-type]
    reach = None if window is None else int(window)
    return DecodeProblem(batch, int(q_heads), int(kv_heads), int(head_dim), int(dim_v), dtype, int(q_len), reach)


def _rebuild(
    problem: DecodeProblem, device: DeviceModel, max_seqlen: int, batch_invariant: bool, lengths: tuple[int, ...]
) -> SplitPlan:
    plan = HostPlan(problem, device, max_seqlen=max_seqlen, batch_invariant=batch_invariant)
    plan.rewrite(lengths)
    return plan


def _read_only(array: Int32Array) -> Int32Array:
    view = array.view()
    view.flags.writeable = False
    return view
