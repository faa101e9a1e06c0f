"""Memory for partial states and scratch, kept from call to call.

A call follows gigabytes of cache reads, so whatever it touches first is a miss: fresh pages most of all.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

KEPT_BYTES = max(8 << 20, (os.cpu_count() or 1) << 18)  # a larger workspace is freed after its call
MOST_KEPT = 8
_ALIGNMENT = 64

_idle: list[Workspace] = []  # its pop and append are atomic


class Workspace(NamedTuple):
    memory: torch.Tensor
    base: int  # address, aligned to a cache line
    size: int


def borrow(size: int) -> Workspace:
    """``size`` bytes or more that no other call uses, whatever they hold."""
    try:
        workspace = _idle.pop()
    except IndexError:
        return _allocate(size)
    return workspace if workspace.size >= size else _allocate(size)


def give_back(workspace: Workspace) -> None:
    if workspace.size <= KEPT_BYTES and len(_idle) < MOST_KEPT:
        _idle.append(workspace)


def release() -> None:
    """Free what is kept."""
    _idle.clear()


def _allocate(size: int) -> Workspace:
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    return Workspace(memory, -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT, size)
