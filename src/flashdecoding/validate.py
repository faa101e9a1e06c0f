"""``FLASHDECODING_VALIDATE=1``: values that are made harmless where they lie are read back and refused instead.

Each call then waits for the GPU. A call that is being captured in a graph cannot, and is not validated.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from flashdecoding.lengths import read_lengths, read_offsets
from flashdecoding.refusal import Refusal

if TYPE_CHECKING:
    from flashdecoding.checks import Call
    from flashdecoding.plan import SplitPlan

WANTED = os.environ.get("FLASHDECODING_VALIDATE", "0") not in ("", "0")


def validate(call: Call, plan: SplitPlan | None) -> None:
    """Raise ValueError for lengths and offsets out of range, and for pages in use that do not exist."""
    c, spans = call.checked, call.spans
    if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    refusal = Refusal(c.signature.caller)

    def read(name: str, lengths: torch.Tensor | tuple[int, ...] | None, most: int | None) -> tuple[int, ...] | None:
        if lengths is None:
            return None
        numbers = lengths.cpu() if isinstance(lengths, torch.Tensor) else lengths
        return read_lengths(refusal, numbers, c.batch, most, name)

    seqlens = read("seqlens", spans.seqlens if plan is None else plan.seqlens, c.capacity) or (c.capacity,) * c.batch
    begins = read("kv_begin", spans.kv_begin, c.capacity) or (0,) * c.batch
    read("q_start", spans.q_start, None)
    read("kv_start", spans.kv_start, None)
    if isinstance(spans.q_offsets, torch.Tensor):
        read_offsets(refusal, c.signature, spans.q_offsets.tolist())
    refusal.raise_if_any(str(c.signature))
    if call.page_table is not None:
        _check_pages(refusal, call, call.page_table, seqlens, begins)
        refusal.raise_if_any(str(c.signature))


def _check_pages(
    refusal: Refusal, call: Call, table: torch.Tensor, seqlens: tuple[int, ...], begins: tuple[int, ...]
) -> None:
    """Entries for keys that a query may see. A window shortens them only where positions are the usual ones."""
    c = call.checked
    bad = []
    for b, row in enumerate(table.tolist()):
        first = begins[b]
        if c.window is not None and not call.positioned:
            first = max(first, seqlens[b] - (c.q_len + c.window - 1))
        used = range(first // c.page_size, -(-seqlens[b] // c.page_size))
        bad += [(b, j, row[j]) for j in used if not 0 <= row[j] < c.pages]
    shown = ", ".join(f"page_table[{b}, {j}] = {page}" for b, j, page in bad[:8]) + (", ..." if len(bad) > 8 else "")
    refusal.unless(not bad, f"pages in use must be in [0, {c.pages - 1}], got {shown}")
