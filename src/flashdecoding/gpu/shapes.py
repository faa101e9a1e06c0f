"""Sizes of tiles and launches, from what a plan was made for: integers only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from flashdecoding.gpu.arguments import Parts
from flashdecoding.plan import DecodeProblem, DeviceModel

WAVES = 2  # programs of stage 1 for each multiprocessor
MOST_AHEAD = 3  # tiles that a program of stage 1 has asked for ahead of the one it works on
MOST_AHEAD_IN_PAGES = 2  # with 3, pages of 16 and ragged batches took 1 to 5 % longer on an H200
OWN_SHARED = 10 << 10  # bytes of shared memory that it takes beside the tiles


class Scratch(NamedTuple):
    """Memory for the states that stage 2 merges: (m, l) of each, as they are summed, then o, which is float32."""

    size: int  # in numbers of ``dtype``
    o: int  # where o begins
    dtype: torch.dtype

    @classmethod
    def of(cls, states: int, problem: DecodeProblem) -> Scratch:
        dtype = torch.float64 if problem.dtype == torch.float32 else torch.float32
        o = 2 * states + 2 * states % 4  # a multiple of 16 bytes, as Triton likes addresses
        return cls(o + triton.cdiv(states * problem.head_dim_v * 4, dtype.itemsize), o, dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def addresses(self, memory: torch.Tensor) -> tuple[int, int]:
        at = memory.data_ptr()
        return at + self.o * self.dtype.itemsize, at

    def parts(self, memory: torch.Tensor) -> Parts:
        return Parts(memory[self.o :].view(torch.float32), memory)


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
    folds: int  # how often the weights of a tile are folded before they are added up
    ahead: int  # tiles that are asked for ahead, at most
    warps: int  # of a program
    warps_if_differ: int  # where its rows see different keys
    d: tuple[int, int]  # head_dim as two blocks of columns
    e: tuple[int, int]  # head_dim_v likewise
    workers: int  # that share out a batch's tiles, for each kv head and row block
    least_tiles: int  # of a worker; of a split, if invariant
    most_splits: int  # of a sequence, if invariant
    most_items: int
    most_parts: int  # states of splits, for a kv head, that stage 2 merges
    scratch: Scratch
    merged_splits: int  # states and columns of a tile of stage 2, and warps of its programs
    merged_columns: int
    merge_warps: int
    dependent_launch: bool  # a kernel is placed before the one ahead of it has ended (programmatic dependent launch)
    most_tiles: int  # that find space on a multiprocessor

    def launching(self, ahead: int | None = None) -> dict[str, Any]:
        """What kernels and Triton are told of `dependent_launch`; of stage 1, by the tiles that it asks for ahead.

        Programs that come early go where they find space. Where those that still run leave space for more of stage 1
        than should share a multiprocessor, it comes late instead. Stage 2 reads the plan before it waits: that is right
        only because stage 1 lies between, whose programs wait for the plan before they let stage 2 come. If no sequence
        can have a split, nothing lies between, and all come late.
        """
        crowded = ahead is not None and ahead * (WAVES + 1) < self.most_tiles
        early = self.dependent_launch and self.most_items > 0 and not crowded
        return {"PDL": self.dependent_launch, **({"launch_pdl": True} if early else {})}


@functools.lru_cache(maxsize=4096)
def launch_shape(problem: DecodeProblem, longest: int, batch_invariant: bool, device: torch.device) -> Shape:
    """For sequences of at most ``longest`` keys, which bounds the launch but moves no cut."""
    rows = problem.q_len * (problem.q_heads // problem.kv_heads)
    d, e = _columns(problem.head_dim), _columns(problem.head_dim_v)
    name, multiprocessors, shared, dependent, most_rows = _device(device)
    block_m, block_n, warps, warps_if_differ = _tile(problem, rows, d, e, most_rows)
    row_blocks = max(1, triton.cdiv(rows, block_m))
    # (Latent attention loads K alone, but a plan does not know of that.)
    tile_bytes = block_n * (sum(d) + sum(e)) * problem.dtype.itemsize
    # Rows in two blocks would not keep to registers; with more than 16 query rows, 3 tiles are no faster, or too large.
    most_ahead = 2 if d[1] or e[1] or block_m > 16 else MOST_AHEAD
    ahead = min(most_ahead, max(1, (shared // WAVES - OWN_SHARED) // tile_bytes))
    # Until a thread has one number of a row, or two: a matrix product has 4 threads for each 8 columns of a warp.
    places = 4 * (warps if block_m < 64 else max(1, warps * 16 // block_m))
    folds = 0 if problem.dtype == torch.float32 else max(0, (block_n // places).bit_length() - 1)
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
    usual_splits = most_splits if batch_invariant else 2 * workers // max(1, problem.batch)
    return Shape(
        model, batch_invariant, block_m, row_blocks, block_n, folds, ahead, warps, warps_if_differ, d, e, workers,
        least_tiles, most_splits, most_items, most_parts, Scratch.of(most_parts * problem.kv_heads * rows, problem),
        *_merge_tile(problem, usual_splits), dependent,
        triton.cdiv(shared, tile_bytes),
    )  # fmt: skip


def _merge_tile(problem: DecodeProblem, splits: int) -> tuple[int, int, int]:
    """States and columns of a tile of stage 2, and warps, for sequences that usually have up to ``splits``. A warp has
    2048 numbers of a tile, with float64 sums 512; more where 16 warps are not enough for that.
    """
    states = min(512, max(16, triton.next_power_of_2(splits)))
    columns = min(max(32, 2048 // states), max(16, triton.next_power_of_2(problem.head_dim_v)))
    each = 512 if problem.dtype == torch.float32 else 2048
    return states, columns, min(16, max(1, states * columns // each))


def _tile(
    problem: DecodeProblem, rows: int, d: tuple[int, int], e: tuple[int, int], most_rows: int
) -> tuple[int, int, int, int]:  # fmt: skip
    """Rows and keys of a tile, warps, and warps where rows see different keys. What decides is
    registers: two programs should find space on a multiprocessor.
    """
    wide, in_two = max(problem.head_dim, problem.head_dim_v), d[1] > 0 or e[1] > 0
    least = max(16, triton.next_power_of_2(rows))
    if problem.dtype == torch.float32:  # sums are float64
        block_m = min(32 if wide <= 64 else 16, least)
        return block_m, 16, 8 if block_m > 16 or wide > 64 else 4, 8
    block_m = min(most_rows if e[0] >= 64 and wide <= 128 and not in_two else 16, least)
    if block_m > 16:
        return block_m, 64 if most_rows > 32 else 32, 4, 4
    block_n = 32 if wide > 128 or in_two else 64 if wide > 64 else 128
    return block_m, block_n, 4, 8 if wide > 128 else 4


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
def _device(device: torch.device) -> tuple[str, int, int, bool, int]:
    """Name of a GPU, its multiprocessors, bytes that programs of one can share, whether it has programmatic dependent
    launch, and the most query rows of a tile: 64 are what Hopper's matrix instruction takes; Triton 3.7 cannot compile
    them for Blackwell.
    """
    properties = torch.cuda.get_device_properties(device)
    dependent = torch.version.hip is None and properties.major >= 9
    shared = int(properties.shared_memory_per_multiprocessor)
    most_rows = 64 if torch.version.hip is None and properties.major == 9 else 32
    return str(properties.name), int(properties.multi_processor_count), shared, dependent, most_rows
