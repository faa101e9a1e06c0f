"""Results kept for later calls, up to a number of them."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def remember(known: dict[Key, Value], key: Key, value: Value, most: int) -> Value:
    """Keep ``value``, and forget the oldest of ``most``. Returns what is kept, if another thread was faster."""
    if len(known) >= most:
        with suppress(RuntimeError, StopIteration):  # other threads add meanwhile: there is one more for a while
            known.pop(next(iter(known)), None)
    return known.setdefault(key, value)
