"""Launching a compiled kernel directly, once Triton's front end has compiled it for a kind of call.

The front end looks at each of a hundred arguments in every launch, which takes longer than all else that a call does on
the host. What it looks for follows from what a call is (``key``), from which pointers are given, and from which of them
are multiples of 16: later launches of the same kind hand numbers to the kernel that the first one compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashdecoding.remember import remember

MOST_KNOWN = 4096  # kinds of launch
OPTIONS = frozenset(("num_warps", "launch_pdl", "enable_fp_fusion"))  # Triton's own


class Pointers:
    """The tensors of one call, for all of its kernels: what they take of each is its address."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.addresses = [None if x is None else x.data_ptr() for x in tensors]
        self.kinds = tuple([at if at is None else at % 16 == 0 for at in self.addresses])


class _Record(NamedTuple):
    """An argument with pointers: its place among the kernel's, theirs among the call's, and the rest of it."""

    place: int
    pointers: range
    rest: tuple[Any, ...]


class _Known(NamedTuple):
    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]  # by position; those with pointers are filled in
    records: list[_Record]


class Direct:
    """One kernel. ``roles`` says where among a call's pointers those of an argument are, by the argument's name: they
    are the first fields of a record.
    """

    def __init__(self, kernel: Any, roles: Mapping[str, range]) -> None:
        self._kernel = kernel
        self._roles = roles
        self._known: dict[Hashable, _Known] = {}

    def launch(
        self,
        key: Hashable,
        grid: tuple[int, int],
        pointers: Pointers,
        given: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
    ) -> None:
        """Launch on the current device and stream.

        ``given()`` is asked in the first launch of a kind: the arguments with pointers, records or None, and all others
        and Triton's options, which follow from ``key``.
        """
        kind = (key, grid, pointers.kinds)
        known = self._known.get(kind)
        if known is None:
            self._first(kind, grid, *given())
            return
        addresses, arguments = pointers.addresses, known.arguments.copy()
        for place, taken, rest in known.records:
            arguments[place] = (*addresses[taken.start : taken.stop], *rest)
        known.compiled[known.grid](*arguments, stream=_stream())

    def _first(
        self, kind: Hashable, grid: tuple[int, int], records: Mapping[str, Any], others: Mapping[str, Any]
    ) -> None:
        """Launch by way of the front end, and remember what it compiled."""
        names = self._kernel.arg_names
        assert set(names) == {*records, *others} - OPTIONS, "arguments that are missing, or not the kernel's"
        compiled = self._kernel[grid](**records, **others)
        if compiled is None:  # Triton's interpreter
            return
        taken = [
            _Record(names.index(name), self._roles[name], tuple(record[len(self._roles[name]) :]))
            for name, record in records.items()
            if record is not None
        ]
        known = _Known(compiled, (*grid, 1), [others.get(name) for name in names], taken)
        remember(self._known, kind, known, MOST_KNOWN)


def _stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
