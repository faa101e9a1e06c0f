"""Numbers by sequence: lengths, offsets and positions, from whichever side the user has them on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from flashdecoding.refusal import LARGEST, Refusal, in_range
from flashdecoding.signature import Checked, Facts, Signature

Lengths = int | Sequence[int] | torch.Tensor

_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


GAP_TILES = 4  # tiles that a plan on a GPU counts for beginning a sequence (`gpu/planning.py`)


def longest_on_gpu(batch: int) -> int:
    """Keys of a sequence on a GPU: key numbers are int32, and so is the number of all sequences' tiles, of 16 keys or
    more, with the gaps between them."""
    return min(2**31 - 2**16, ((2**31 - 1) // max(1, batch) - GAP_TILES) * 16)


class Spans(NamedTuple):
    """Where each sequence's queries and keys are: tuples of ``batch`` numbers. Layers of a step share them."""

    seqlens: tuple[int, ...]
    kv_begin: tuple[int, ...] | None
    q_offsets: tuple[int, ...] | None  # ragged: cu_q_lens
    q_start: tuple[int, ...] | None  # position of the first query; None: the queries are the last positions of the keys
    kv_start: tuple[int, ...] | None  # position of key 0; None: 0


class DeviceSpans(NamedTuple):
    """The same as integer tensors on q's device, never read by the host; what the host gave is checked and copied."""

    seqlens: torch.Tensor | None  # None: the whole cache
    kv_begin: torch.Tensor | None
    q_offsets: torch.Tensor | None
    q_start: torch.Tensor | None
    kv_start: torch.Tensor | None


NOTHING_BUT_A_PLAN = DeviceSpans(None, None, None, None, None)


def host_lengths(lengths: Lengths, batch: int, most: int | None, caller: str, name: str = "seqlens") -> tuple[int, ...]:
    """Lengths as ints: ``batch`` of them (a single number stands for all), each in [0, most]."""
    refusal = Refusal(caller)
    numbers = read_lengths(refusal, lengths, batch, most, name)
    refusal.raise_if_any()
    return numbers


def read_lengths(refusal: Refusal, lengths: Lengths, batch: int, most: int | None, name: str) -> tuple[int, ...]:
    """The same, reasons noted in ``refusal``."""
    if isinstance(lengths, torch.Tensor):
        if lengths.layout != torch.strided or lengths.is_nested:
            refusal.unless(False, f"{name} must be a strided tensor, got {Facts.of(lengths).kind}")
            return ()
        whole = refusal.unless(
            lengths.dtype in _INTEGER_DTYPES, f"{name} must be an integer tensor, got {lengths.dtype}"
        )
        flat = refusal.unless(lengths.dim() <= 1, f"{name} must have shape ({batch},), got {tuple(lengths.shape)}")
        here = refusal.unless(lengths.device.type == "cpu", f"{name} must be on the CPU, got {lengths.device}")
        if not (whole and flat and here):
            return ()
        try:
            numbers: list[Any] = lengths.tolist() if lengths.dim() else [lengths.item()] * batch
        except RuntimeError as error:  # a tensor inside a transform, or one without elements in memory
            refusal.unless(False, f"{name} must be a tensor whose values can be read: {str(error).splitlines()[0]}")
            return ()
    else:
        listed = isinstance(lengths, Iterable) and not isinstance(lengths, (str, bytes, set, frozenset, dict))
        if isinstance(lengths, np.ndarray):
            numbers = np.atleast_1d(lengths).tolist() if lengths.ndim else [lengths.item()] * batch
        else:
            numbers = list(lengths) if listed else [lengths] * batch  # type: ignore[arg-type]
    if len(numbers) != batch:
        refusal.unless(False, f"{name} must hold {batch} numbers, one a sequence, got {len(numbers)}")
    if not all(in_range(n, most) for n in numbers):
        bad = [(b, n) for b, n in enumerate(numbers) if not in_range(n, most)]
        shown = ", ".join(f"{name}[{b}] = {n!r}" for b, n in bad[:8]) + (", ..." if len(bad) > 8 else "")
        limit = f"in [0, {LARGEST if most is None else most}]"
        refusal.unless(False, f"{name} must be whole numbers {limit}, got {shown}")
        return ()
    return tuple(numbers) if all(type(n) is int for n in numbers) else tuple(int(n) for n in numbers)


def device_lengths(
    refusal: Refusal, lengths: Lengths | None, batch: int, most: int | None, device: torch.device, name: str
) -> torch.Tensor | None:
    """Lengths from either side as (batch,) integers on a GPU. Kernels clamp what only the device knows."""
    if lengths is None:
        return None
    if isinstance(lengths, torch.Tensor) and lengths.device == device:
        facts = Facts.of(lengths)
        if refusal.unless(facts.shape is not None, f"{name} must be a strided tensor, got {facts.kind}"):
            whole = lengths.dtype in (torch.int32, torch.int64)
            refusal.unless(whole, f"{name} must be int32 or int64, got {lengths.dtype}")
            shape = tuple(lengths.shape)
            refusal.unless(shape in ((), (batch,)), f"{name} must have shape ({batch},), got {shape}")
            if refusal.reasons:
                return None
            return lengths if shape and lengths.is_contiguous() else lengths.expand(batch).contiguous()
        return None
    numbers = read_lengths(refusal, lengths, batch, most, name)
    if refusal.reasons:
        return None
    if len(set(numbers)) <= 1:
        return torch.full((batch,), max(numbers, default=0), dtype=torch.int64, device=device)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        refusal.unless(False, f"{name} must be on {device} while a graph is captured, got {list(numbers)} on the host")
        return None
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def device_spans(
    refusal: Refusal, checked: Checked, seqlens: Lengths | None, kv_begin: Lengths | None,
    cu_q_lens: torch.Tensor | None, q_start: Lengths | None, kv_start: Lengths,
) -> DeviceSpans:  # fmt: skip
    """What the kernels are told of each sequence, without a look at it."""
    from_zero = type(kv_start) is int and kv_start == 0
    if seqlens is kv_begin is cu_q_lens is q_start is None and from_zero and checked.signature.has_lengths:
        return NOTHING_BUT_A_PLAN
    device, most = checked.signature.q.device, min(checked.capacity, longest_on_gpu(checked.batch))
    if not checked.signature.has_lengths:
        whole = f"a GPU takes at most {most} keys a sequence in a batch of {checked.batch}"
        refusal.unless(checked.capacity <= most, f"{whole}, got {checked.capacity}; give seqlens")

    def place(name: str, lengths: Lengths | None, most: int | None) -> torch.Tensor | None:
        return device_lengths(refusal, lengths, checked.batch, most, device, name)

    return DeviceSpans(
        place("seqlens", seqlens, most), place("kv_begin", kv_begin, checked.capacity),
        None if cu_q_lens is None else cu_q_lens.contiguous(), place("q_start", q_start, None),
        None if from_zero else place("kv_start", kv_start, None),
    )  # fmt: skip


def read_offsets(refusal: Refusal, s: Signature, offsets: list[int]) -> tuple[int, ...]:
    """Offsets of packed queries; tokens of q past the last offset belong to no sequence."""
    tokens = s.q.shape[2]
    lens = [end - begin for begin, end in itertools.pairwise(offsets)]
    inside, span = offsets[0] == 0 and offsets[-1] <= tokens, f"{offsets[0]} to {offsets[-1]}"
    refusal.unless(inside, f"cu_q_lens must run from 0 to at most q's {tokens} tokens, got {span}")
    refusal.unless(min(lens, default=0) >= 0, f"cu_q_lens must not decrease, got {offsets}")
    longest = max(lens, default=0)
    assert s.max_q_len is not None
    refusal.unless(longest <= s.max_q_len, f"max_q_len is {s.max_q_len}, but a sequence has {longest} queries")
    return tuple(offsets)
