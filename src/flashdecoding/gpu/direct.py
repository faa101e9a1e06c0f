"""Launching a compiled kernel directly, once Triton's front end has compiled it for a kind of call.

The front end looks at each of a hundred arguments in every launch, which takes longer than all else that a call does on
the host. What it looks for follows from what a call is (``key``), from which pointers are given, and from which of them
are multiples of 16: later launches of the same kind hand numbers to the kernel that the first one compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashdecoding.gpu.arguments import POINTERS

MOST_KNOWN = 4096  # kinds of launch


class Pointers:
    """The tensors of one call, for all of its kernels: what they take of each is its address."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tensors
        self.addresses = [None if x is None else x.data_ptr() for x in tensors]
        self.kinds = tuple([at if at is None else at % 16 == 0 for at in self.addresses])


class _Record(NamedTuple):
    """An argument with pointers: its place among the kernel's, theirs among the call's (None: not given), and the rest
    of it.
    """

    place: int
    pointers: tuple[int | None, ...]
    rest: tuple[Any, ...]


class _Known(NamedTuple):
    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]  # by position; those with pointers are filled in
    records: list[_Record]


class Direct:
    """One kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[Hashable, _Known] = {}

    def launch(
        self,
        key: Hashable,
        grid: tuple[int, int],
        pointers: Pointers,
        given: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
    ) -> None:
        """Launch on the current device and stream.

        ``given()`` is asked in the first launch of a kind: the arguments with pointers, records of the kinds in
        ``arguments.POINTERS`` or None, and all others and Triton's options, which follow from ``key``.
        """
        kind = (key, grid, pointers.kinds)
        known = self._known.get(kind)
        if known is None:
            self._first(kind, grid, pointers, *given())
            return
        addresses, arguments = pointers.addresses, known.arguments.copy()
        for place, taken, rest in known.records:
            arguments[place] = (*[None if at is None else addresses[at] for at in taken], *rest)
        known.compiled[known.grid](*arguments, stream=_stream())

    def _first(
        self, kind: Hashable, grid: tuple[int, int], pointers: Pointers, records: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch by way of the front end, and remember what it compiled."""
        compiled = self._kernel[grid](**records, **others)
        if compiled is None:  # Triton's interpreter
            return
        names, tensors = self._kernel.arg_names, list(map(id, pointers.tensors))
        taken = []
        for name, record in records.items():
            if record is not None:
                number = POINTERS[type(record)]
                places = tuple(None if x is None else tensors.index(id(x)) for x in record[:number])
                taken.append(_Record(names.index(name), places, tuple(record[number:])))
        if len(self._known) >= MOST_KNOWN:
            oldest, *_ = list(self._known)  # a list, since other threads add meanwhile
            self._known.pop(oldest, None)
        self._known[kind] = _Known(compiled, (*grid, 1), [others.get(name) for name in names], taken)


def _stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
