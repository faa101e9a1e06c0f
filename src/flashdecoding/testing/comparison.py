"""What the benchmarks of both devices share: who is left out of a row and why, and a row's times against its limit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdecoding.testing.timing import Timing

OUR_NAME = "flashdecoding"
"""Name of the call that peers are compared with; its variants' names begin with it."""

# How far a peer's output may be from ours, as a share of the largest output: further off it is another computation.
_PEER_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 0.001}


class NotTakingPart(Exception):
    """A contender cannot do a row, or is not installed; the message says why."""


def check_against_ours(out: Tensor, ours: Tensor) -> None:
    """Raise :class:`NotTakingPart` unless a peer's output is ours but for rounding."""
    if out.shape != ours.shape:
        raise NotTakingPart(f"its result is wrong: shape {tuple(out.shape)}, not {tuple(ours.shape)}")
    tolerance = _PEER_TOLERANCE[ours.dtype]
    error = ((out.float() - ours.float()).abs().max() / ours.float().abs().max()).item()
    if not error <= tolerance:
        raise NotTakingPart(f"its result is wrong: {error:.2g} of the largest output away, allowed are {tolerance:g}")


def failure(error: Exception) -> str:
    """Why a contender that raised ``error`` is left out, in one line."""
    if isinstance(error, NotTakingPart):
        return str(error)
    return f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def is_fault(reason: str) -> bool:
    """Whether a contender is left out for what it did, and not because it is absent or made for other rows."""
    return "it failed" in reason or "its result is wrong" in reason


def is_ours(name: str) -> bool:
    return name.startswith(OUR_NAME)


@dataclass
class Comparison:
    """One row: timings by contender against the row's limit, and why a contender has no timing."""

    row_name: str
    limit_seconds: float
    timings: dict[str, Timing]
    missing: dict[str, str]

    @property
    def best_peer(self) -> str | None:
        peers = [name for name in self.timings if not is_ours(name)]
        return min(peers, key=lambda name: self.timings[name].median, default=None)

    @property
    def ahead(self) -> float | None:
        """Time of the best peer over ours."""
        best = self.best_peer
        return None if best is None else self.timings[best].median / self.timings[OUR_NAME].median

    def share_of_limit(self, name: str) -> float:
        return self.limit_seconds / self.timings[name].median
