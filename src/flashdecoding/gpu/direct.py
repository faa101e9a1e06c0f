"""Launching a compiled kernel directly, once Triton's front end has compiled it for a kind of call.

The front end looks at each of a hundred arguments in every launch, which takes longer than all else that a call does on
the host. What it looks for is fixed by what a call is (``key``), by which pointers are given, and by which of them are
multiples of 16: later launches of the same kind hand numbers to the kernel that the first one compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from flashdecoding.gpu.arguments import POINTERS

MOST_KNOWN = 4096  # kinds of launch


class _Known(NamedTuple):
    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]  # by position; those with pointers are filled in
    places: tuple[int, ...]  # of those


class Direct:
    """One kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[Hashable, _Known] = {}

    def launch(
        self, key: Hashable, grid: tuple[int, ...], records: Mapping[str, Any], fixed: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Launch on the current device and stream.

        ``records`` are the arguments with pointers, by name: of the kinds in ``arguments.POINTERS``, or None.
        ``fixed()`` gives the others, which follow from ``key``, and Triton's options.
        """
        kinds: list[Hashable] = [key, grid]
        plain: list[Any] = []
        for record in records.values():
            if record is None:
                plain.append(None)
                kinds.append(None)
                continue
            pointers = POINTERS[type(record)]
            addresses = [None if x is None else x.data_ptr() for x in record[:pointers]]
            kinds += [None if at is None else at % 16 == 0 for at in addresses]
            plain.append((*addresses, *record[pointers:]))
        kind = tuple(kinds)
        known = self._known.get(kind)
        if known is None:
            self._first(kind, grid, records, fixed())
            return
        arguments = known.arguments.copy()
        for place, record in zip(known.places, plain, strict=True):
            arguments[place] = record
        known.compiled[known.grid](*arguments, stream=_stream())

    def _first(
        self, kind: Hashable, grid: tuple[int, ...], records: Mapping[str, Any], fixed: Mapping[str, Any]
    ) -> None:
        """Launch by way of the front end, and remember what it compiled."""
        compiled = self._kernel[grid](**records, **fixed)
        names = self._kernel.arg_names
        if compiled is None:  # Triton's interpreter
            return
        if len(self._known) >= MOST_KNOWN:
            oldest, *_ = list(self._known)  # a list, since other threads add meanwhile
            self._known.pop(oldest, None)
        arguments = [fixed.get(name) for name in names]
        x, y, z = (*grid, 1, 1)[:3]
        self._known[kind] = _Known(compiled, (x, y, z), arguments, tuple(names.index(name) for name in records))


def _stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
