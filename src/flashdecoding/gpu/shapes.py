"""Sizes of tiles and launches, from what a plan was made for: integers only."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from flashdecoding.plan import DecodeProblem, DeviceModel

WAVES = 2  # programs of stage 1 for each multiprocessor


@dataclass(frozen=True, eq=False)
class Shape:
    """One problem's tiles and workers, and the most that any lengths make of splits and parts. Compared by identity:
    :func:`launch_shape` remembers it.
    """

    model: DeviceModel
    invariant: bool  # a sequence's own length decides its cut
    block_m: int  # query rows (queries x heads that share one kv head) of a tile; more rows make more programs
    row_blocks: int
    block_n: int  # keys of a tile
    stages: int
    warps: int  # of a program
    warps_if_differ: int  # where its rows see different keys
    d: tuple[int, int]  # head_dim as two blocks of columns
    e: tuple[int, int]  # head_dim_v likewise
    workers: int  # that share out a batch's tiles, for each kv head and row block
    least_tiles: int  # of a worker; of a split, if invariant
    most_splits: int  # of a sequence, if invariant
    most_items: int
    most_parts: int  # states that stage 2 merges
    dependent_launch: bool  # stage 2 is placed while stage 1 runs (programmatic dependent launch)


@functools.lru_cache(maxsize=4096)
def launch_shape(problem: DecodeProblem, longest: int, batch_invariant: bool, device: torch.device) -> Shape:
    """For sequences of at most ``longest`` keys, which bounds the launch but moves no cut."""
    rows = problem.q_len * (problem.q_heads // problem.kv_heads)
    d, e = _columns(problem.head_dim), _columns(problem.head_dim_v)
    block_m, block_n, stages, warps, warps_if_differ = _tile(problem, rows, d, e)
    row_blocks = max(1, triton.cdiv(rows, block_m))
    name, multiprocessors, dependent = _device(device)
    model = DeviceModel(name, tile=block_n, least_split=1024, most_units=512)
    workers = max(1, WAVES * multiprocessors // (problem.kv_heads * row_blocks))
    most_splits = max(1, model.most_units // (problem.kv_heads * row_blocks))
    if batch_invariant:
        least_tiles = model.least_split // block_n
        splits = min(most_splits, triton.cdiv(longest, model.least_split))
        most_items = problem.batch * splits
        most_parts = most_items if splits > 1 else 0
    else:
        least_tiles = 1
        tiles = triton.cdiv(longest, block_n)
        most_items = min(problem.batch * tiles, problem.batch + workers - 1)
        most_parts = min(most_items, 2 * (workers - 1))  # each border of two workers makes two at most
    return Shape(
        model, batch_invariant, block_m, row_blocks, block_n, stages, warps, warps_if_differ, d, e, workers,
        least_tiles, most_splits, most_items, most_parts, dependent and most_items > 0,
    )  # fmt: skip


def _tile(problem: DecodeProblem, rows: int, d: tuple[int, int], e: tuple[int, int]) -> tuple[int, int, int, int, int]:
    """Rows and keys of a tile, stages of the pipeline, warps, and warps where rows see different keys. What decides is
    registers: two programs should find space on a multiprocessor.
    """
    wide, in_two = max(problem.head_dim, problem.head_dim_v), d[1] > 0 or e[1] > 0
    least = max(16, triton.next_power_of_2(rows))
    if problem.dtype == torch.float32:  # sums are float64
        block_m = min(32 if wide <= 64 else 16, least)
        return block_m, 16, 2, 8 if block_m > 16 or wide > 64 else 4, 8
    block_m = min(32 if e[0] >= 64 and wide <= 128 and not in_two else 16, least)
    if block_m > 16:
        return block_m, 32, 4, 4, 4
    return block_m, 32 if wide > 128 or in_two else 64, 3 if wide <= 256 else 2, 4, 8 if wide > 128 else 4


def _columns(width: int) -> tuple[int, int]:
    """A row as two blocks of columns, powers of two of at least 32; the second may be none. With 16 columns, products
    would have as many columns as rows, and Triton shares out their rows among the warps: all would do the same.
    """
    first = 1 << (width.bit_length() - 1)
    if first < 32:
        return 32, 0
    rest = width - first
    return first, max(32, triton.next_power_of_2(rest)) if rest else 0


@functools.cache
def _device(device: torch.device) -> tuple[str, int, bool]:
    """Name of a GPU, its multiprocessors, and whether it has programmatic dependent launch."""
    properties = torch.cuda.get_device_properties(device)
    dependent = torch.version.hip is None and properties.major >= 9
    return str(properties.name), int(properties.multi_processor_count), dependent
