"""One voice for refusals: collect every reason, then raise once."""

from __future__ import annotations

import math

import numpy as np


class Refusal:
    """Collects reasons, then raises one error with all of them."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.reasons: list[str] = []

    def unless(self, condition: bool, reason: str) -> bool:
        """Note ``reason`` if ``condition`` fails; returns the condition."""
        if not condition:
            self.reasons.append(reason)
        return condition

    def raise_if_any(self, given: str = "", error: type[Exception] = ValueError) -> None:
        """Raise ``error`` with every reason noted, and with what was ``given``."""
        if self.reasons:
            one = len(self.reasons) == 1
            listed = f" {self.reasons[0]}" if one else "".join(f"\n  - {reason}" for reason in self.reasons)
            count = "" if one else f" {len(self.reasons)} reasons:"
            raise error(f"{self.caller}:{count}{listed}" + (f"\n  given: {given}" if given else ""))


LARGEST = 2**62  # of positions and lengths: their sums stay within 64 bits


def in_range(n: object, most: int | None) -> bool:
    """Whether n is a whole number in [0, most]."""
    if type(n) is not int and (not isinstance(n, (int, np.integer)) or isinstance(n, bool)):
        return False
    return 0 <= int(n) <= (LARGEST if most is None else most)


def is_finite(x: object) -> bool:
    """Whether x is a real number that a float can hold."""
    if not isinstance(x, (int, float, np.integer, np.floating)) or isinstance(x, bool):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:
        return False


def is_positive(x: object) -> bool:
    return in_range(x, None) and x != 0
