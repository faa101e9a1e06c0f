"""A kernel's compile-time facts as a Numba type, so that one source serves every shape class.

A :class:`KernelShape` reaches the kernels as a constant whose *type* carries the numbers: Numba compiles one version
for each distinct shape, and :func:`fact` reads a number from the type as a literal that LLVM folds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model, typeof_impl

TILE = 64  # keys a tile: the scores of 32 rows are 8 KB, and stay in L1 with the K and V rows in flight
MATRIX_KEYS = 32  # keys that the matrix unit takes at a time: two tile registers of K, one of weights
MATRIX_PARTS = {"bfloat16": 1, "float16": 2}  # bfloat16 numbers whose sum an element is, exactly
MATRIX_ROWS = {1: 5, 2: 8}  # query rows from which 16-row products of so many parts beat the vector units
MAX_ROWS = 32  # query rows (queries x heads that share one kv head) of a work item; more rows make more items

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class KernelShape(NamedTuple):
    """One shape class: what the kernels are compiled for.

    ``scores`` is the type of q.k and of its exponentials, ``sums`` that of l and of the numerator of o. float32 input
    is summed in float64: its output keeps 24 bits, which a float32 sum over thousands of keys does not.
    """

    dtype: str  # of q, k and v
    head_dim: int
    head_dim_v: int
    vector_bytes: int  # of a SIMD register
    matrix: bool  # products of tiles on the matrix unit, from MATRIX_ROWS rows on
    source: str  # digest of this package's sources: a cached kernel never outlives an edit

    @property
    def scores(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def sums(self) -> str:
        return "float64" if self.dtype in ("float32", "float64") else "float32"

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def score_bytes(self) -> int:
        return ELEMENT_BYTES[self.scores]

    @property
    def sum_bytes(self) -> int:
        return ELEMENT_BYTES[self.sums]

    @property
    def lanes(self) -> int:
        """Scores in one SIMD register."""
        return self.vector_bytes // self.score_bytes

    @property
    def chunk(self) -> int:
        """Elements of a row decoded together: two registers of scores."""
        return 2 * self.lanes

    @property
    def padded_dim(self) -> int:
        return -(-self.head_dim // self.chunk) * self.chunk

    @property
    def padded_dim_v(self) -> int:
        return -(-self.head_dim_v // self.chunk) * self.chunk

    @property
    def q_row_bytes(self) -> int:
        return self.padded_dim * self.score_bytes

    @property
    def s_row_bytes(self) -> int:
        return TILE * self.score_bytes

    @property
    def p_row_bytes(self) -> int:
        return TILE * self.sum_bytes

    @property
    def o_row_bytes(self) -> int:
        return self.padded_dim_v * self.sum_bytes

    @property
    def value_rows(self) -> int:
        """Rows whose numerators fit into half the registers together, two registers of scores wide."""
        accumulators = 16 if self.vector_bytes == 64 else 8
        return accumulators * self.vector_bytes // (self.chunk * self.sum_bytes)

    @property
    def parts(self) -> int:
        """Products on the matrix unit are products of so many bfloat16 parts of either side."""
        return MATRIX_PARTS[self.dtype] if self.matrix else 1

    @property
    def matrix_rows(self) -> int:
        return MATRIX_ROWS[self.parts]

    @property
    def weights_bytes(self) -> int:
        """One part of all rows' weights for the matrix unit: bfloat16 (MAX_ROWS, TILE)."""
        return MAX_ROWS * TILE * 2

    @property
    def padding(self) -> int:
        """Keys that scores are padded to."""
        return MATRIX_KEYS if self.matrix else self.lanes

    @property
    def gather_row_bytes(self) -> int:
        return -(-8 * max(self.head_dim, self.head_dim_v) // 64) * 64

    @property
    def areas(self) -> dict[str, int]:
        """A thread's scratch: its areas in order and the bytes of each, multiples of 64."""
        rows, addresses, numbers = MAX_ROWS, 8 * (TILE + 8), 8 * MAX_ROWS
        matrix = 1 if self.matrix else 0
        return {
            "queries": rows * self.q_row_bytes,  # packed, (rows, padded_dim)
            "columns": rows
            * self.q_row_bytes,  # transposed, (rows / lanes, padded_dim, lanes); or the matrix unit's pairs
            "wide": self.lanes * self.q_row_bytes * self.parts,  # K rows as scores; or 32 of them for the matrix unit
            "s": rows * self.s_row_bytes
            if self.sums != self.scores
            else 0,  # scores (rows, TILE): else in weights' place
            "p": rows * self.p_row_bytes,  # weights (rows, TILE) of type ``sums``
            "k": addresses,  # of the tile's K rows, with room for padding
            "next": addresses,  # of the next tile's
            "v": addresses,
            "row_v": addresses,  # of those that one row sees, where a V row that others see is not finite
            "keys": addresses,  # indices of the tile's keys
            "low": numbers,  # first visible key of each row
            "high": numbers,  # one past the last
            "offset": 8 * TILE,  # float64, for ALiBi: positions of the tile's keys relative to its first
            "anchor": numbers,  # float64, for ALiBi: a distance for each row
            "seen": rows * TILE,  # bytes: which row sees which key, where rows differ
            "m": numbers,  # float64, with l the unit's state
            "l": numbers,
            "shrink": numbers,  # float64: what the last tile shrinks a row of o by
            "squares": rows * self.s_row_bytes,  # scores by keys, (rows / lanes, TILE, lanes)
            "configuration": matrix * 128,  # of the matrix unit: what was, and ours
            "operands": matrix * 4096 * self.parts,  # right operands made of V; or scores of small parts
            "weights": matrix * self.weights_bytes * self.parts,
            "rows_o": matrix * rows * self.o_row_bytes,
            "alone": matrix * rows // 2 * self.o_row_bytes,  # a row that is multiplied by itself, as one of 16
            "zeros": self.o_row_bytes,  # in place of a V row that does not exist or is not seen
            "o": self.o_row_bytes,  # one merged row
            "gather": self.gather_row_bytes,  # a q or output row whose elements lie apart; then K and V rows
        }

    def offset(self, area: str) -> int:
        """Bytes from the start of a thread's scratch to an area."""
        names = list(self.areas)
        return sum(list(self.areas.values())[: names.index(area)])

    def scratch_bytes(self, gathers: bool) -> int:
        """Scratch a thread; ``gathers`` if the tile's K or V rows must be gathered."""
        return sum(self.areas.values()) + (2 * TILE * self.gather_row_bytes if gathers else 0)


@functools.cache
def source_digest() -> str:
    """Hash of this package's sources. Numba's disk cache watches only the file of the function it caches."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def target_features() -> frozenset[str]:
    """CPU features that Numba generates code for, such as ``avx512f``."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))


@functools.cache
def tiles_permitted() -> bool:
    """Ask Linux to let this process use tile registers; they are off until then."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(_ARCH_PRCTL, ctypes.c_long(_REQUEST_PERMISSION), ctypes.c_long(_TILE_DATA)) == 0)


@functools.cache
def kernel_shape(dtype: str, head_dim: int, head_dim_v: int) -> KernelShape:
    """The shape class of a call on this machine."""
    features = target_features()
    wide = "avx512f" in features
    fits = dtype in MATRIX_PARTS and head_dim % 32 == 0 and head_dim_v % 32 == 0
    matrix = fits and wide and {"amx-tile", "amx-bf16"} <= features and tiles_permitted()
    return KernelShape(dtype, head_dim, head_dim_v, 64 if wide else 32, matrix, source_digest())


class ShapeType(types.Dummy):
    """Numba type of a :class:`KernelShape`; equal exactly for equal shapes."""

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape
        super().__init__(name=f"KernelShape{tuple(shape)}")


class ShapeConstant:
    """The value handed to kernels; only its type matters."""

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape


register_model(ShapeType)(models.OpaqueModel)


@typeof_impl.register(ShapeConstant)
def _typeof_shape(value: ShapeConstant, context: Any) -> ShapeType:
    return ShapeType(value.shape)


@lower_constant(ShapeType)
def _lower_shape(context: Any, builder: Any, ty: ShapeType, value: Any) -> Any:
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)
def fact(typing_context, shape, name):  # type: ignore[no-untyped-def]
    """A number of the shape, as a constant: ``fact(shape, "head_dim")``."""
    value = int(getattr(shape.shape, name.literal_value))

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return ir.Constant(ir.IntType(64), value)

    return types.int64(shape, name), emit


@intrinsic(prefer_literal=True)
def place(typing_context, shape, scratch, area):  # type: ignore[no-untyped-def]
    """Address of an area of the scratch at ``scratch``: ``place(shape, scratch, "columns")``."""
    offset = shape.shape.offset(area.literal_value)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.add(arguments[1], ir.Constant(ir.IntType(64), offset))

    return types.int64(shape, types.int64, area), emit
