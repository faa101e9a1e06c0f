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


def in_range(n: object, most: int | None) -> bool:
    if type(n) is not int and (not isinstance(n, (int, np.integer)) or isinstance(n, bool)):
        return False
    n = int(n)
    return n >= 0 and (most is None or n <= most)


def is_finite(x: object) -> bool:
    return isinstance(x, (int, float, np.number)) and not isinstance(x, bool) and math.isfinite(x)


def is_positive(x: object) -> bool:
    return in_range(x, None) and x != 0
