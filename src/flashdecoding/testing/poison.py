"""Poison: NaN and Inf where a result must not look.

Contract line 2: slots past a sequence's length, pages that no table lists and keys that no query row sees never
influence a result, even if they hold NaN or Inf. So tests write them there.
"""

import torch
from torch import Tensor

from flashdecoding.testing.cases import Problem

POISONS = (float("nan"), float("inf"), float("-inf"))


def visible_keys(problem: Problem) -> Tensor:
    """Which key each query row sees: bool (B, Hq, max q_len, capacity), for unpaged problems; padding rows see none.

    Written apart from the reference, so that a mistake in one of the two shows as poison in the other.
    """
    options, device = problem.options, problem.q.device
    seen: Tensor
    batch, capacity = problem.k.shape[0], problem.k.shape[2]
    q_heads = problem.q.shape[1]
    seqlens = options.get("seqlens")
    lens = torch.full((batch,), capacity, device=device) if seqlens is None else torch.as_tensor(seqlens, device=device)
    lens = lens.expand(batch).long()
    if "cu_q_lens" in options:
        q_lens, rows = options["cu_q_lens"].diff().long(), int(options["max_q_len"])
    else:
        rows = problem.q.shape[2]
        q_lens = torch.full((batch,), rows, device=device)
    row = torch.arange(rows, device=device)  # (rows,)
    key = torch.arange(capacity, device=device)  # (capacity,)
    first = (lens - q_lens)[:, None, None]  # (B, 1, 1) position of the first query
    position = first + row[None, :, None]  # (B, rows, 1)
    seen = (key < lens[:, None, None]) & (row[None, :, None] < q_lens[:, None, None])
    if options.get("kv_begin") is not None:
        seen = seen & (key >= options["kv_begin"][:, None, None])
    if options.get("causal", True):
        seen = seen & (key <= position)
    if options.get("window") is not None:
        seen = seen & (key > position - options["window"])
    seen = seen[:, None].expand(batch, q_heads, rows, capacity)
    mask: Tensor | None = options.get("mask")
    if mask is not None and mask.ndim == 4:
        seen = seen & mask
    elif mask is not None:
        column = key - first  # (B, 1, capacity) column of the draft tree, outside [0, rows) in the context
        in_tree = (column >= 0) & (column < rows)
        index = column.clamp(0, max(rows - 1, 0)).expand(batch, rows, capacity)
        seen = seen & (~in_tree | mask.expand(batch, rows, rows).gather(2, index))[:, None]
    return seen


def seen_slots(problem: Problem) -> Tensor:
    """Slots of an unpaged cache that some query row sees: bool (B, Hkv, capacity)."""
    visible = visible_keys(problem)
    batch, q_heads, rows, capacity = visible.shape
    kv_heads = problem.k.shape[1]
    return visible.reshape(batch, kv_heads, q_heads // kv_heads * rows, capacity).any(2)


def poison_(x: Tensor, where: Tensor | None = None, shift: int = 0) -> Tensor:
    """Write NaN, +Inf and -Inf in turn, starting with the ``shift``-th, into ``x`` (or its rows ``where``), in place.

    ``where`` is bool and has x's leading dimensions; a row is what is left of x's shape.
    """
    count = x.numel() if where is None else int(where.sum()) * x[..., :1, :].shape[-1]
    values = torch.tensor(POISONS, dtype=x.dtype, device=x.device).roll(-shift).repeat(count // 3 + 1)[:count]
    if where is None:
        x.copy_(values.view(x.shape))
    else:
        x[where] = values.view(-1, x.shape[-1])
    return x


def poison_unseen(problem: Problem, shift: int = 0) -> Problem:
    """A copy of an unpaged problem whose unseen slots hold poison; ``v`` stays a view of ``k`` where it was one."""
    unseen = ~seen_slots(problem)
    k = poison_(problem.k.clone(), unseen, shift)
    return problem.with_caches(k, None if problem.latent else poison_(problem.v.clone(), unseen, shift + 1))


def poisoned_out(problem: Problem) -> Tensor:
    """An ``out`` buffer of the right shape (B, Hq, Sq, Dv) that holds NaN."""
    return problem.q.new_full((*problem.q.shape[:-1], problem.v.shape[-1]), float("nan"))
