"""Launching a compiled kernel directly, once Triton's front end has compiled it for a kind of call.

The front end looks at each of a hundred arguments in every launch, which takes longer than all else that a call does on
the host. What it looks for follows from what a call is (its ``key``), from which pointers are given, and from which of
them are multiples of 16: later launches of the same kind hand numbers to the kernel that the first one compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs

from flashdecoding.remember import remember

MOST_KNOWN = 4096  # kinds of launch
OPTIONS = frozenset(("num_warps", "launch_pdl", "enable_fp_fusion"))  # Triton's own

Addresses = tuple[int | None, ...]


def addresses_of(tensors: Sequence[torch.Tensor | None]) -> tuple[Addresses, Hashable]:
    """Where tensors lie, and of which kind that is: what of it a kernel is compiled for. Tensors that are not given are
    no part of the kind.
    """
    addresses = tuple([None if x is None else x.data_ptr() for x in tensors])
    bits = 0
    for at in addresses:
        if at:
            bits |= at
    return addresses, None if bits % 16 == 0 else tuple([at is not None and at % 16 == 0 for at in addresses])


class Launch(NamedTuple):
    """What the first launch of a kind hands over, and later ones know. Records begin with their pointers."""

    kernel: Any
    grid: tuple[int, int]
    records: Mapping[str, Any]  # arguments with pointers, by name; None is not given
    others: Mapping[str, Any]  # all other arguments, and Triton's options


class _Ready(NamedTuple):
    """A launch of which only addresses are open."""

    compiled: Any
    grid: tuple[int, int]
    arguments: list[Any]  # by position; records are filled in
    records: list[tuple[int, slice, tuple[Any, ...]]]  # place, pointers among a call's, what follows them


class Direct:
    """Kernels that are launched one after the other. ``roles`` says where among a call's addresses those of a record
    are, by the argument's name.
    """

    def __init__(self, roles: Mapping[str, slice]) -> None:
        self._roles = roles
        self._known: dict[Hashable, list[_Ready]] = {}

    def launch(
        self, key: Hashable, addresses: Addresses, device: torch.device, first: Callable[[], list[Launch]]
    ) -> None:
        """Launch on the current stream of ``device``, which is the current one. ``first()`` is asked the first time;
        all that it says follows from ``key``, but for the addresses.
        """
        known = self._known.get(key)
        if known is None:
            known = [ready for ready in map(self._first, first()) if ready is not None]
            if known:
                remember(self._known, key, known, MOST_KNOWN)
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        told = _has_calls(knobs.runtime.launch_enter_hook) or _has_calls(knobs.runtime.launch_exit_hook)
        for compiled, (x, y), template, records in known:
            arguments = template.copy()
            for place, pointers, rest in records:
                arguments[place] = addresses[pointers] + rest
            if told:  # a profiler wants to know more
                compiled[x, y, 1](*arguments, stream=stream)
            else:
                compiled.run(x, y, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    def _first(self, launch: Launch) -> _Ready | None:
        """Launch by way of the front end; what it compiled. None from Triton's interpreter."""
        kernel, grid, given, others = launch
        names = kernel.arg_names
        assert set(names) == {*given, *others} - OPTIONS, "arguments are missing, or not the kernel's"
        compiled = kernel[grid](**given, **others)
        if compiled is None:
            return None
        arguments, records = [others.get(name) for name in names], []  # which hold none of the call's tensors
        for name, record in given.items():
            if record is not None:
                place, pointers = names.index(name), self._roles[name]
                count = pointers.stop - pointers.start
                if all(pointer is None for pointer in record[:count]):
                    arguments[place] = record
                else:
                    records.append((place, pointers, tuple(record[count:])))
        return _Ready(compiled, grid, arguments, records)


def _has_calls(hook: Any) -> bool:
    """Whether a hook of Triton's does anything: None, a function, or a chain of functions."""
    return bool(getattr(hook, "calls", hook))
