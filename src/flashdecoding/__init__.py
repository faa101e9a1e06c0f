"""Exact attention for the decode phase of LLM inference.

The public names are loaded on first use, so ``import flashdecoding`` costs next to nothing and never imports Numba.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "SplitPlan",
    "decode_attention",
    "merge_states",
    "partial_attention",
    "plan_decode",
    "reference_attention",
]

if TYPE_CHECKING:
    from flashdecoding.api import decode_attention, partial_attention, plan_decode
    from flashdecoding.plan import SplitPlan
    from flashdecoding.reference import reference_attention
    from flashdecoding.state import AttentionState, merge_states
else:
    _HOME = {
        "AttentionState": "state",
        "SplitPlan": "plan",
        "decode_attention": "api",
        "merge_states": "state",
        "partial_attention": "api",
        "plan_decode": "api",
        "reference_attention": "reference",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
