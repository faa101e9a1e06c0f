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
MATRIX_ROWS = 5  # query rows from which a 16-row product on the matrix unit beats the vector units
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

    # A thread's scratch: offsets of its areas, each a multiple of 64 bytes.

    @property
    def scratch_columns(self) -> int:
        """After the packed queries (MAX_ROWS, padded_dim): the same as (MAX_ROWS / lanes, padded_dim, lanes)."""
        return MAX_ROWS * self.q_row_bytes

    @property
    def scratch_wide(self) -> int:
        """K rows widened to scores, (lanes, padded_dim)."""
        return self.scratch_columns + MAX_ROWS * self.q_row_bytes

    @property
    def scratch_s(self) -> int:
        """Scores (MAX_ROWS, TILE)."""
        return self.scratch_wide + self.lanes * self.q_row_bytes

    @property
    def scratch_p(self) -> int:
        """Weights (MAX_ROWS, TILE) of type ``sums``: in the place of the scores, where both have one type."""
        return self.scratch_s + (MAX_ROWS * self.s_row_bytes if self.sums != self.scores else 0)

    @property
    def scratch_k(self) -> int:
        """Addresses of the tile's K rows (with room for padding), of the next tile's, of its V rows; key indices."""
        return self.scratch_p + MAX_ROWS * self.p_row_bytes

    @property
    def scratch_next(self) -> int:
        """Addresses of the next tile's K rows."""
        return self.scratch_k + 8 * (TILE + 8)

    @property
    def scratch_v(self) -> int:
        return self.scratch_next + 8 * (TILE + 8)

    @property
    def scratch_keys(self) -> int:
        return self.scratch_v + 8 * (TILE + 8)

    @property
    def scratch_low(self) -> int:
        """First visible key of each row, then one past the last."""
        return self.scratch_keys + 8 * (TILE + 8)

    @property
    def scratch_high(self) -> int:
        return self.scratch_low + 8 * MAX_ROWS

    @property
    def scratch_offset(self) -> int:
        """For ALiBi, float64: positions of the tile's keys relative to its first, then each row's anchor distance."""
        return self.scratch_high + 8 * MAX_ROWS

    @property
    def scratch_anchor(self) -> int:
        return self.scratch_offset + 8 * TILE

    @property
    def scratch_seen(self) -> int:
        """Visibility bytes (MAX_ROWS, TILE) of a tile that rows see differently."""
        return self.scratch_anchor + 8 * MAX_ROWS

    @property
    def padding(self) -> int:
        """Keys that scores are padded to."""
        return 32 if self.matrix else self.lanes

    @property
    def scratch_m(self) -> int:
        """A unit's m, l, and what its last tile shrinks them by, each (MAX_ROWS,) of float64."""
        return self.scratch_seen + MAX_ROWS * TILE

    @property
    def scratch_l(self) -> int:
        return self.scratch_m + 8 * MAX_ROWS

    @property
    def scratch_shrink(self) -> int:
        return self.scratch_l + 8 * MAX_ROWS

    @property
    def scratch_squares(self) -> int:
        """Scores by keys (MAX_ROWS / lanes, TILE, lanes), where a lane stands for each row."""
        return self.scratch_shrink + 8 * MAX_ROWS

    @property
    def scratch_tiles(self) -> int:
        """For the matrix unit: two configurations of its registers and four right operands."""
        return self.scratch_squares + MAX_ROWS * self.s_row_bytes

    @property
    def scratch_weights(self) -> int:
        """Weights as bfloat16 (MAX_ROWS, TILE), then rows of o."""
        return self.scratch_tiles + (128 + 4096 if self.matrix else 0)

    @property
    def scratch_rows_o(self) -> int:
        return self.scratch_weights + (MAX_ROWS * TILE * 2 if self.matrix else 0)

    @property
    def scratch_o(self) -> int:
        """One merged row of o."""
        return self.scratch_rows_o + (MAX_ROWS * self.o_row_bytes if self.matrix else 0)

    @property
    def scratch_gather(self) -> int:
        """One q or output row, then the tile's K and V rows, where the elements of a row are not adjacent."""
        return self.scratch_o + self.o_row_bytes

    @property
    def gather_row_bytes(self) -> int:
        return -(-8 * max(self.head_dim, self.head_dim_v) // 64) * 64

    def scratch_bytes(self, gathers: bool) -> int:
        """Scratch a thread; ``gathers`` if K or V rows must be gathered."""
        return self.scratch_gather + (1 + 2 * TILE if gathers else 1) * self.gather_row_bytes


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
    fits = dtype == "bfloat16" and head_dim % 32 == 0 and head_dim_v % 32 == 0
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
