"""The same cache in every layout that a call may pass: contiguous, views with other strides, pages.

What lies between and around the valid slots is poisoned; the result must not change by a bit.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashdecoding.testing.cases import Problem
from flashdecoding.testing.poison import poison_, poison_unseen

LAYOUTS = ("contiguous", "sequence-first", "strided", "paged-1", "paged-16", "paged-53")

_GARBAGE = (-1, 2**31 - 1, -(2**31), -7)


def arrange(problem: Problem, layout: str, *, seed: int = 0) -> Problem:
    """The unpaged ``problem`` in another layout, with poison in every slot that no row sees.

    - ``contiguous``: as built.
    - ``sequence-first``: caches (B, S, Hkv, D) and queries (B, Sq, Hq, D), passed as transposed views.
    - ``strided``: views cut out of larger tensors, sequence outermost, every second element along D.
    - ``paged-N``: N slots per page, pages shuffled by ``seed``, some in no table; entries past a length are garbage.
    """
    problem = poison_unseen(problem, shift=seed)
    if layout == "contiguous":
        return problem
    if layout == "sequence-first":
        return _copy_into(problem, _sequence_first)
    if layout == "strided":
        return _copy_into(problem, _every_second)
    if layout.startswith("paged-"):
        return _paged(problem, int(layout.removeprefix("paged-")), seed)
    raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def _sequence_first(batch: int, heads: int, length: int, dim: int, like: Tensor) -> Tensor:
    return poison_(like.new_empty(batch, length, heads, dim)).transpose(1, 2)


def _every_second(batch: int, heads: int, length: int, dim: int, like: Tensor) -> Tensor:
    holder = poison_(like.new_empty(length, batch + 1, heads + 2, 2 * dim + 3))
    return holder[:, 1:, 1:-1, 1 : 2 * dim + 1 : 2].permute(1, 2, 0, 3)


def _copy_into(problem: Problem, view: Callable[[int, int, int, int, Tensor], Tensor]) -> Problem:
    def moved(x: Tensor) -> Tensor:
        batch, heads, length, dim = x.shape
        return view(batch, heads, length, dim, x).copy_(x)

    caches = problem.with_caches(moved(problem.k), None if problem.latent else moved(problem.v))
    return replace(caches, q=moved(problem.q))


def _paged(problem: Problem, page_size: int, seed: int) -> Problem:
    batch, _, capacity, _ = problem.k.shape
    generator = torch.Generator().manual_seed(seed)
    lens = torch.as_tensor(problem.options["seqlens"]).tolist()
    max_pages = math.ceil(capacity / page_size)
    shuffled = torch.randperm(batch * max_pages + 3, generator=generator).tolist()
    table = torch.tensor(_GARBAGE).repeat(batch * max_pages)[: batch * max_pages].view(batch, max_pages).int()
    k = poison_(problem.k.new_empty(len(shuffled), problem.k.shape[1], page_size, problem.k.shape[3]))
    v = poison_(problem.v.new_empty(len(shuffled), problem.v.shape[1], page_size, problem.v.shape[3]))
    for b, length in enumerate(lens):
        for number in range(math.ceil(length / page_size)):
            page = shuffled.pop()
            table[b, number] = page
            slots = slice(number * page_size, min((number + 1) * page_size, capacity))
            k[page, :, : slots.stop - slots.start] = problem.k[b, :, slots]
            v[page, :, : slots.stop - slots.start] = problem.v[b, :, slots]
    changes: dict[str, Tensor] = {"page_table": table.to(problem.q.device)}
    mask = problem.options.get("mask")
    if mask is not None and mask.ndim == 4:  # its last dimension is the capacity of the pages
        changes["mask"] = torch.nn.functional.pad(mask, (0, max_pages * page_size - capacity), value=True)
    return problem.with_caches(k, None if problem.latent else v).with_options(**changes)
