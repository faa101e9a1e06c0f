"""``FLASHDECODING_VALIDATE=1``: values that are made harmless where they lie are read back and refused instead.

Each call and each update of a plan then waits for the GPU. What is being captured in a graph cannot, and is not
validated; nor are pages where positions are given, or a mask may hide them. Calls on the CPU are always checked.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import torch

from flashdecoding.lengths import DeviceSpans, read_lengths, read_offsets
from flashdecoding.refusal import Refusal

if TYPE_CHECKING:
    from flashdecoding.checks import Call
    from flashdecoding.plan import SplitPlan

WANTED = os.environ.get("FLASHDECODING_VALIDATE", "").strip().lower() not in ("", "0", "false", "no", "off")


def validate(call: Call, plan: SplitPlan | None) -> None:
    """Raise ValueError for lengths and offsets out of range, and for pages in use that do not exist."""
    c, spans = call.checked, call.spans
    if not isinstance(spans, DeviceSpans) or torch.cuda.is_current_stream_capturing():
        return
    refusal = Refusal(c.signature.caller)

    def read(name: str, lengths: torch.Tensor | None, most: int | None) -> tuple[int, ...] | None:
        return None if lengths is None else read_lengths(refusal, lengths.cpu(), c.batch, most, name)

    seqlens = read("seqlens", spans.seqlens if plan is None else plan.seqlens, c.capacity) or (c.capacity,) * c.batch
    begins = read("kv_begin", spans.kv_begin, c.capacity) or (0,) * c.batch
    read("q_start", spans.q_start, None)
    read("kv_start", spans.kv_start, None)
    queries = [c.q_len] * c.batch
    if spans.q_offsets is not None:
        offsets = spans.q_offsets.tolist()
        read_offsets(refusal, c.signature, offsets)
        queries = [end - begin for begin, end in itertools.pairwise(offsets)]
    refusal.raise_if_any(str(c.signature))
    if call.page_table is not None and call.mask is None and not call.positioned:
        _check_pages(refusal, call, call.page_table, seqlens, begins, queries)
        refusal.raise_if_any(str(c.signature))


def _check_pages(
    refusal: Refusal, call: Call, table: torch.Tensor, seqlens: tuple[int, ...], begins: tuple[int, ...],
    queries: list[int],
) -> None:  # fmt: skip
    """Entries for keys that a query sees."""
    c = call.checked
    bad = []
    for b, row in enumerate(table.tolist()):
        if queries[b] == 0:
            continue
        first = begins[b] if c.window is None else max(begins[b], seqlens[b] - (queries[b] + c.window - 1))
        used = range(first // c.page_size, -(-seqlens[b] // c.page_size)) if first < seqlens[b] else ()
        bad += [(b, j, row[j]) for j in used if not 0 <= row[j] < c.pages]
    shown = ", ".join(f"page_table[{b}, {j}] = {page}" for b, j, page in bad[:8]) + (", ..." if len(bad) > 8 else "")
    refusal.unless(not bad, f"pages in use must be in [0, {c.pages - 1}], got {shown}")
