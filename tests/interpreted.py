"""Run the GPU kernels on the CPU, in Triton's interpreter, against float64. `tests/test_gpu.py` starts this program.

The interpreter takes the place of the compiler for a whole process, so the kernels run in one of their own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import bisect
import itertools
import math
import random
from inspect import signature
from typing import Any

import numpy as np
import torch

from flashdecoding import merge_states
from flashdecoding.checks import Call, check_call
from flashdecoding.gpu import launch, shapes
from flashdecoding.gpu.planning import GAP
from flashdecoding.gpu.plans import DevicePlan, plan_on_device
from flashdecoding.lengths import DeviceSpans, longest_on_gpu
from flashdecoding.plan import DecodeProblem, cut_batch
from flashdecoding.testing import Case, Problem, arrange, assert_within_bound, expect

FP32, FP16 = torch.float32, torch.float16
CASES = (
    (Case(FP32, 64, 64, 8, 2, (130, 65, 7)), "contiguous"),
    (Case(FP32, 80, 33, 6, 3, (130, 0, 300), q_len=5), "strided"),
    (Case(FP16, 64, 64, 8, 2, (130, 65, 7), kv_begin=True), "paged-16"),
    (Case(FP16, 96, 9, 3, 1, (200, 3), q_len=(7, 1), window=40), "paged-53"),
    (Case(FP32, 64, 64, 4, 2, (130, 65), q_len=2, mask="full"), "sequence-first"),
    (Case(FP32, 64, 64, 5, 1, (64, 200, 3), q_len=4, mask="trees", sinks=True), "paged-1"),
    (Case(FP16, 64, 64, 4, 2, (130, 65), softcap=5.0, sinks=True), "contiguous"),
    (Case(FP32, 64, 64, 8, 1, (300, 64, 0, 7), q_len=8, alibi="batch"), "paged-16"),
    (Case(FP32, 96, 64, 4, 1, (70, 33), latent=True), "contiguous"),
    (Case(FP16, 64, 64, 4, 1, (300, 130), q_len=9, window=70), "paged-16"),
)
NOTHING = {
    name: None
    for name, parameter in signature(check_call).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
}


CPU = torch.device("cpu")


def as_tensor(numbers: Any) -> Any:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int32)


def main() -> None:
    shapes._device = lambda device: ("interpreter", 4, 228 << 10, False, 64)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment,return-value]
    torch.cuda.is_available = lambda: False
    with np.errstate(divide="ignore", invalid="ignore"):  # what a GPU does without a word
        for case, layout in CASES:
            check_case(case, layout)
        for invariant in (False, True):
            check_case(Case(FP32, 64, 64, 8, 2, (130, 65, 0, 700)), "paged-16", invariant)
        check_shards()
        check_extremes()
        check_offsets_from_nowhere()
        check_v_wider_than_k()
        check_lost_pages()
    choose = random.Random(5)
    for number in range(60):
        check_plan(choose, invariant=number % 2 == 1)


def gpu_call(problem: Problem, caller: str = "decode_attention") -> Call:
    """A call as one on a GPU would be."""
    options: dict[str, Any] = {**NOTHING, "causal": True, **problem.options}
    call = check_call(caller, problem.q, problem.k, problem.v, **options)
    return call._replace(spans=DeviceSpans(*map(as_tensor, call.spans)))


def check_case(case: Case, layout: str, invariant: bool | None = None) -> None:
    """With a plan if ``invariant`` says of which kind."""
    problem = arrange(case.build(), layout)
    call = gpu_call(problem)
    out = torch.full((*problem.q.shape[:3], problem.v.shape[3]), math.nan, dtype=problem.q.dtype)
    plan = None
    if invariant is not None:
        plan = plan_on_device(DecodeProblem(*call.checked.problem), CPU, list(case.seqlens), None, invariant)
    lse = launch.decode(call, plan, out, True)
    assert_within_bound(out, lse, expect(problem), f"{case.id} {layout}")
    print(f"{case.id} {layout}: within the bound", flush=True)


def check_shards() -> None:
    """Two ranks have every other block of 16 keys; their states merge to the whole."""
    case = Case(FP32, 64, 64, 4, 2, (160, 160), q_len=3, spare=0, window=100)
    problem = case.build()
    states = []
    for rank in range(2):
        keys = [key for key in range(160) if key // 16 % 2 == rank]
        places = {"q_start": 157, "kv_start": 16 * rank, "kv_block": 16, "kv_stride": 32, "seqlens": 80}
        shard = Problem(problem.q, problem.k[:, :, keys], problem.v[:, :, keys], {**problem.options, **places})
        states.append(launch.partial_state(gpu_call(shard, "partial_attention"), None))
    merged = merge_states(states)
    assert_within_bound(merged.finalize(FP32), merged.lse, expect(problem), "shards")
    print("shards: within the bound")


def check_extremes() -> None:
    """Small weights that are all of the result; what is not finite in V, where a split or a sink leaves no weight."""
    problem = Case(FP16, 64, 64, 2, 1, (600,), spare=0).build()
    far = Problem(
        torch.zeros_like(problem.q), torch.zeros_like(problem.k), torch.full_like(problem.v, 6e4), {"scale": 1.0}
    )
    far.q[..., 0], far.k[0, 0, 1, 0], far.k[0, 0, 2:, 0], far.v[0, 0, 0] = 1.0, -20.0, -60.0, 0.0
    lost = Problem(torch.ones_like(problem.q), torch.zeros_like(problem.k), torch.ones_like(problem.v), {})
    lost.k[0, 0, :256, 0], lost.v[0, 0, :256, 5] = -math.inf, math.nan
    sunk = problem.with_options(sinks=torch.tensor([1000.0, math.inf]))
    sunk.v[0, 0, 3, 5] = math.inf
    for name, extreme in (("far", far), ("lost", lost), ("sunk", sunk)):
        out = torch.zeros_like(extreme.q)
        lse = launch.decode(gpu_call(extreme), None, out, True)
        assert_within_bound(out, lse, expect(extreme), name)
    print("extremes: within the bound")


def check_offsets_from_nowhere() -> None:
    """Offsets of packed queries that make no sense: nothing outside of out is written, and the call ends."""
    call = gpu_call(arrange(Case(FP32, 64, 64, 4, 2, (70, 33, 9), q_len=(2, 1, 3)).build(), "contiguous"))
    for offsets in ((0, 2**31 - 1, -5, 4), (-(2**31), 6, 5, 2**31 - 1), (7, 7, 7, 9)):
        room = torch.full((3, *call.q.shape), 7.0)
        lse = launch.decode(call._replace(spans=call.spans._replace(q_offsets=as_tensor(offsets))), None, room[1], True)
        assert bool((room[0] == 7).all() and (room[2] == 7).all()) and lse is not None and not lse.isnan().any()
    print("offsets from nowhere do no harm")


def check_v_wider_than_k() -> None:
    """v begins where k does and goes on: not latent attention, whatever the pointers say."""
    base = torch.randn(2, 2, 40, 16).to(FP16)
    problem = Problem(torch.randn(2, 4, 1, 8).to(FP16), base[..., :8], base, {"seqlens": [40, 17]})
    out = torch.full((2, 4, 1, 16), math.nan, dtype=FP16)
    assert_within_bound(out, launch.decode(gpu_call(problem), None, out, True), expect(problem), "v wider than k")
    print("v wider than k: within the bound")


def check_lost_pages() -> None:
    """A page that does not exist makes NaN of the rows that see its key, and of no other."""
    problem = arrange(Case(FP16, 64, 64, 2, 1, (64,), q_len=3, window=3).build(), "paged-1")
    for key, lost in ((60, [True, True, False]), (62, [False, True, True]), (58, [False] * 3)):
        table = problem.options["page_table"].clone()
        table[0, key] = -1
        out = torch.zeros_like(problem.q)
        call = gpu_call(problem)._replace(page_table=table)
        lse = launch.decode(call, None, out, True)
        assert lse is not None and lse[0, 0].isnan().tolist() == lost == out[0, 0, :, 0].isnan().tolist(), key
    print("lost pages reach their rows")


def check_plan(choose: random.Random, invariant: bool) -> None:
    """Cut random lengths, some of which a host would have refused, and compare with the rule in plain numbers."""
    batch = choose.choice([1, 2, 7, 40])
    longest = min(choose.choice([100, 5000, 2**31]), longest_on_gpu(batch))
    given = [choose.choice([0, 1, -3, choose.randrange(longest + 9), choose.randrange(900)]) for _ in range(batch)]
    given = [min(length, 2**31 - 1) for length in (given if choose.random() < 0.6 else given[:1] * batch)]
    kv_heads, window = choose.choice([1, 2, 8]), choose.choice([None, None, 1, 300, 2**31 - 1])
    problem = DecodeProblem(batch, kv_heads, kv_heads, 64, 64, FP16, choose.choice([1, 5]), window)
    plan = plan_on_device(problem, CPU, as_tensor(given), longest, invariant)
    lengths = [min(max(length, 0), longest) for length in given]
    assert plan.seqlens.tolist() == lengths
    splits, workers = share_out(lengths, problem, plan.cut.shape)
    assert [plan.splits_of(b) for b in range(batch)] == splits, (given, problem, splits)
    assert plan.cut.workers[:, 0].tolist() == workers
    check_workers(plan)
    check_items(plan, splits)
    print(f"{lengths[:4]}: as the rule says")


def share_out(
    lengths: list[int], problem: DecodeProblem, shape: shapes.Shape
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Each sequence's splits, and each worker's first item, as `planning.py` says, in the plainest way."""
    tile = shape.block_n
    reach = None if problem.window is None else problem.q_len + problem.window - 1
    firsts = [0 if reach is None else max(0, n - reach) for n in lengths]
    tiles = [-(-(n - first) // tile) for n, first in zip(lengths, firsts, strict=True)]
    gap = 0 if len(set(tiles)) == 1 else GAP.value
    begins = [0, *itertools.accumulate(n + gap if n else 0 for n in tiles)]
    share = max(-(-begins[-1] // shape.workers), 1 if shape.invariant else shape.least_tiles)
    if not shape.invariant and gap == 0:
        share = evenly(share, max(tiles[0], 1))
    if shape.invariant:
        keys = cut_batch(
            tuple(lengths), (problem.q_len,) * len(lengths), problem.window, problem.kv_heads, shape.model
        )[1]
        cuts = [list(range(0, n, size // tile)) for n, size in zip(tiles, keys, strict=True)]
    else:
        borders = [share * worker for worker in range(shape.workers)]
        cuts = [
            ([0] if n else []) + [border - begin for border in borders if begin < border < begin + n]
            for begin, n in zip(begins, tiles, strict=False)
        ]
    splits = [
        [(first + a * tile, min(first + b * tile, length)) for a, b in itertools.pairwise([*cut, n])]
        for length, first, n, cut in zip(lengths, firsts, tiles, cuts, strict=True)
    ]
    items = [begin + a for begin, cut in zip(begins, cuts, strict=False) for a in cut]
    return splits, [bisect.bisect_left(items, share * worker) for worker in range(shape.workers + 1)]


def evenly(share: int, length: int) -> int:
    """The least stretch from ``share`` on, up to an eighth longer, that divides a sequence's length, rounded up, into
    as many splits as ``share`` has room for, or is a multiple of it; else ``share``.
    """
    most = share + share // 8
    if length >= share:
        return next((n for n in range(share, most + 1) if n * (length // share) >= length), share)
    return next((n for n in range(share, most + 1) if n % length == 0), share)


def check_items(plan: DevicePlan, splits: list[list[tuple[int, int]]]) -> None:
    """Each split is one item, and splits that are merged have parts of their own, in order."""
    offsets, parts, lengths = plan.split_offsets.tolist(), plan.cut.table[4].tolist(), plan.seqlens.tolist()
    wanted: list[list[int]] = []
    next_part = 0
    for b, cut in enumerate(splits):
        assert offsets[b] == len(wanted) and (len(cut) < 2 or parts[b] == next_part)
        wanted += [[b, *split, lengths[b], len(cut), next_part + n] for n, split in enumerate(cut)]
        next_part += len(cut) if len(cut) > 1 else 0
    assert plan.num_splits == len(wanted) <= len(plan.cut.items) and next_part <= plan.cut.shape.most_parts
    assert plan.cut.items[: len(wanted), :6].tolist() == wanted


def check_workers(plan: DevicePlan) -> None:
    """A worker's record: its first item, and a copy of that."""
    for record, following in itertools.pairwise(plan.cut.workers.tolist()):
        assert record[0] == following[0] or record[1:7] == plan.cut.items[record[0], :6].tolist()


if __name__ == "__main__":
    main()
