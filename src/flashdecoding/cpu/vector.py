"""SIMD code as LLVM IR: what the micro-kernels are built from.

Numba's own loops over raw addresses do not vectorise, and its arrays cannot hold bfloat16. This module emits the few
vector operations that decode attention needs, for the register width of the machine. A *pair* is two registers of
scores that hold one chunk of a row. Within a chunk, bfloat16 rows are kept even elements first, since that is how
they come out of 32-bit words with one shift and one mask; queries and outputs go through the same :meth:`decode`
and :meth:`encode`, so the order never shows outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashdecoding.cpu.shape import KernelShape

Value = Any  # an LLVM value; llvmlite ships no types

address = types.int64

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
FLOATS = {"float16": F16, "bfloat16": I16, "float32": F32, "float64": F64}

MANTISSA_BITS = {F32: 23, F64: 52}
EXPONENT_BIAS = {F32: 127, F64: 1023}
EXP2_DEGREE = {F32: 7, F64: 13}  # Taylor remainder on [-1/2, 1/2] below half a unit in the last place


class Emitter:
    """Emits vector instructions for one shape class at the builder's position."""

    def __init__(self, builder: Any, shape: KernelShape) -> None:
        self.b = builder
        self.shape = shape
        self.lanes = shape.lanes
        self.score = ir.VectorType(FLOATS[shape.scores], self.lanes)
        self.sum = ir.VectorType(FLOATS[shape.sums], self.lanes)

    # Memory. Addresses are 64-bit integers; offsets are bytes.

    def pointer(self, address: Value, ty: Any, offset: int = 0) -> Value:
        return self.b.inttoptr(self.add(address, offset), ty.as_pointer())

    def add(self, address: Value, offset: int) -> Value:
        return self.b.add(address, ir.Constant(I64, offset)) if offset else address

    def load(self, address: Value, ty: Any, offset: int = 0) -> Value:
        element = ty.element if isinstance(ty, ir.VectorType) else ty
        return self.b.load(self.pointer(address, ty, offset), align=_bytes(element))

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        self.b.store(value, self.pointer(address, value.type, offset), align=_bytes(element))

    def prefetch(self, address: Value, begin: int, end: int) -> None:
        """Bring bytes [begin, end) of a row into L2, a 64-byte line at a time."""
        ty = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, ty, "llvm.prefetch.p0")
        read, second_level, data = (ir.Constant(I32, x) for x in (0, 2, 1))
        for line in range(begin, end, 64):
            self.b.call(function, [self.pointer(address, I8, line), read, second_level, data])

    def lines(self, width: int) -> int:
        """Cache lines of a row of ``width`` elements."""
        return -(-width * self.shape.element_bytes // 64)

    def ask(self, table: Value, count: Value, width: int, first: Value, lines: int) -> None:
        """Prefetch ``lines`` lines of ``count`` rows laid end to end, from ``first`` on; past the end, the last row."""
        last = self.add(count, -1)
        for k in range(lines):
            line = self.add(first, k)
            row, within = (f(line, ir.Constant(I64, self.lines(width))) for f in (self.b.udiv, self.b.urem))
            row = self.b.select(self.b.icmp_signed("<", row, last), row, last)
            at = self.load(self.scaled(table, row, 8), I64)
            self.prefetch(self.scaled(at, within, 64), 0, 64)

    # Values

    def constant(self, ty: Any, value: float) -> Value:
        return ir.Constant(ty, [value] * ty.count) if isinstance(ty, ir.VectorType) else ir.Constant(ty, value)

    def shuffle(self, x: Value, y: Value, indices: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(I32, len(indices)), [ir.Constant(I32, i) for i in indices])
        return self.b.shuffle_vector(x, y, mask)

    def splat(self, scalar: Value, lanes: int | None = None) -> Value:
        ty = ir.VectorType(scalar.type, lanes or self.lanes)
        v = self.b.insert_element(ir.Constant(ty, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.shuffle(v, v, [0] * ty.count)

    def convert(self, v: Value, ty: Any) -> Value:
        """Between scores and sums: widen, round, or nothing."""
        if v.type == ty:
            return v
        wider = _bytes(getattr(ty, "element", ty)) > _bytes(getattr(v.type, "element", v.type))
        return self.b.fpext(v, ty) if wider else self.b.fptrunc(v, ty)

    def call(self, name: str, arguments: Sequence[Value]) -> Value:
        """An LLVM floating-point intrinsic that maps values of one type to that type."""
        ty = arguments[0].type
        suffix = f"v{ty.count}f{8 * _bytes(ty.element)}" if isinstance(ty, ir.VectorType) else f"f{8 * _bytes(ty)}"
        function_type = ir.FunctionType(ty, [ty] * len(arguments))
        function = cgutils.get_or_insert_function(self.b.module, function_type, f"llvm.{name}.{suffix}")
        return self.b.call(function, arguments)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.call("fmuladd", [x, y, z])

    def maximum(self, x: Value, y: Value) -> Value:
        """The larger; x where y is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", y, x), y, x)

    def fold(self, vectors: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
        """Reduce each of 2^k vectors to one lane: a vector of 2^k results, or a scalar for a single one."""
        vs, segment = list(vectors), self.lanes
        while segment > 1:
            half = segment // 2
            second = vs[1::2] or vs
            merged = []
            for x, y in zip(vs[::2], second, strict=True):
                lanes = range(0, x.type.count * (1 if x is y else 2), segment)
                low = [start + i for start in lanes for i in range(half)]
                merged.append(combine(self.shuffle(x, y, low), self.shuffle(x, y, [i + half for i in low])))
            vs, segment = merged, half
        while len(vs) > 1:  # more vectors than lanes
            vs = [self.shuffle(x, y, range(2 * x.type.count)) for x, y in zip(vs[::2], vs[1::2], strict=True)]
        return vs[0] if vs[0].type.count > 1 else self.b.extract_element(vs[0], ir.Constant(I32, 0))

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """A square of ``lanes`` vectors: blocks off the diagonal change places, at halving sizes."""
        square, half = list(rows), self.lanes // 2
        while half:
            for i in (i for i in range(self.lanes) if not i & half):
                x, y = square[i], square[i + half]
                low = [lane if not lane & half else lane - half + self.lanes for lane in range(self.lanes)]
                high = [lane + half if not lane & half else lane + self.lanes for lane in range(self.lanes)]
                square[i], square[i + half] = self.shuffle(x, y, low), self.shuffle(x, y, high)
            half //= 2
        return square

    def exp2(self, x: Value) -> Value:
        """2**x for x <= 1000 or so, elementwise; exactly 0 below the normal range, NaN for NaN.

        Adding 1.5 * 2**mantissa_bits rounds x to an integer in the low bits; a Taylor polynomial serves the rest.
        """
        ty = x.type
        element = getattr(ty, "element", ty)
        bits, bias = MANTISSA_BITS[element], EXPONENT_BIAS[element]
        whole = I32 if element is F32 else I64
        integer = ir.VectorType(whole, ty.count) if isinstance(ty, ir.VectorType) else whole
        magic = self.constant(ty, 1.5 * 2.0**bits)
        shifted = self.b.fadd(x, magic)
        rest = self.b.fsub(x, self.b.fsub(shifted, magic))
        degree = EXP2_DEGREE[element]
        coefficients = [_rounded(math.log(2) ** k / math.factorial(k), element) for k in range(degree + 1)]
        p = self.constant(ty, coefficients[degree])
        for c in reversed(coefficients[:degree]):
            p = self.fma(p, rest, self.constant(ty, c))
        exponent = self.b.add(self.b.bitcast(shifted, integer), self.constant(integer, bias))
        power = self.b.bitcast(self.b.shl(exponent, self.constant(integer, bits)), ty)
        tiny = self.b.fcmp_ordered("<", x, self.constant(ty, float(1 - bias)))
        return self.b.select(tiny, self.constant(ty, 0.0), self.b.fmul(p, power))

    # Rows of q, k, v and out in their own dtype, a chunk at a time. ``valid`` is how many of a chunk's elements exist.

    def each_chunk(
        self, width: int, body: Callable[[Value, int, list[Value]], Sequence[Value]], carried: Sequence[Value] = ()
    ) -> list[Value]:
        """``body(index, valid, carried)`` for each chunk of a row of ``width`` elements: a loop, then a short last one.

        Loops keep the code of a head size of 576 as small, and as quick to compile, as that of 64.
        """
        chunk = self.shape.chunk
        full, rest = divmod(width, chunk)
        values = list(carried)
        if full:
            values = self.loop(ir.Constant(I64, full), lambda i, vs: body(i, chunk, vs), values)
        return list(body(ir.Constant(I64, full), rest, values)) if rest else values

    def scaled(self, base: Value, index: Value, step: int) -> Value:
        """base + index * step"""
        return self.b.add(base, self.b.mul(index, ir.Constant(I64, step)))

    def decode(self, chunk: Value, valid: int) -> tuple[Value, Value]:
        """The chunk at an address as two score vectors, zero past the last valid element."""
        shape, element = self.shape, FLOATS[self.shape.dtype]
        if valid < shape.chunk:
            short = self.load(chunk, ir.VectorType(element, valid))
            zeros = ir.Constant(short.type, [0 if element is I16 else 0.0] * valid)
            row = self.shuffle(short, zeros, [min(i, valid) for i in range(shape.chunk)])
            if shape.dtype == "bfloat16":
                return self._split_words(self.b.bitcast(row, ir.VectorType(I32, self.lanes)))
            halves = (self.shuffle(row, row, range(k, k + self.lanes)) for k in (0, self.lanes))
        elif shape.dtype == "bfloat16":
            return self._split_words(self.load(chunk, ir.VectorType(I32, self.lanes)))
        else:
            half = ir.VectorType(element, self.lanes)
            halves = (self.load(chunk, half, k * self.lanes * shape.element_bytes) for k in (0, 1))
        low, high = (self.convert(v, self.score) for v in halves)
        return low, high

    def _split_words(self, words: Value) -> tuple[Value, Value]:
        """Even and odd bfloat16 of 32-bit words, as float32."""
        even = self.b.shl(words, self.constant(words.type, 16))
        odd = self.b.and_(words, self.constant(words.type, 0xFFFF0000))
        return self.b.bitcast(even, self.score), self.b.bitcast(odd, self.score)

    def encode(self, chunk: Value, valid: int, pair: tuple[Value, Value]) -> None:
        """The inverse of :meth:`decode`: round to nearest even and store the valid elements."""
        shape, element = self.shape, FLOATS[self.shape.dtype]
        if shape.dtype == "bfloat16":
            words = [self._round_bfloat16(self.convert(v, self.score)) for v in pair]
            high = self.b.and_(words[1], self.constant(words[1].type, 0xFFFF0000))
            word = self.b.or_(self.b.lshr(words[0], self.constant(words[0].type, 16)), high)
            row = self.b.bitcast(word, ir.VectorType(I16, shape.chunk))
        else:
            low, high = (self.convert(v, ir.VectorType(element, self.lanes)) for v in pair)
            row = self.shuffle(low, high, range(shape.chunk))
        self._store_valid(row, chunk, valid)

    def encode_state(self, chunk: Value, valid: int, pair: tuple[Value, Value]) -> None:
        """The same in the order of the row and in the type of scores: an o that leaves as a state."""
        low, high = (self.convert(v, self.score) for v in pair)
        if self.shape.dtype == "bfloat16":
            order = [i // 2 + (i % 2) * self.lanes for i in range(self.shape.chunk)]
        else:
            order = list(range(self.shape.chunk))
        self._store_valid(self.shuffle(low, high, order), chunk, valid)

    def _store_valid(self, row: Value, address: Value, valid: int) -> None:
        self.store(row if valid == row.type.count else self.shuffle(row, row, range(valid)), address)

    def _round_bfloat16(self, v: Value) -> Value:
        """float32 bits whose upper half is the nearest bfloat16 (ties to even); NaN stays NaN."""
        integer = ir.VectorType(I32, self.lanes)
        bits = self.b.bitcast(v, integer)
        tie = self.b.and_(self.b.lshr(bits, self.constant(integer, 16)), self.constant(integer, 1))
        rounded = self.b.add(bits, self.b.add(tie, self.constant(integer, 0x7FFF)))
        nan = self.b.fcmp_unordered("uno", v, v)
        return self.b.select(nan, self.constant(integer, 0x7FC00000), rounded)

    def loop(
        self, count: Value, body: Callable[[Value, list[Value]], Sequence[Value]], carried: Sequence[Value] = ()
    ) -> list[Value]:
        """:func:`counted_loop` at the builder's position."""
        return counted_loop(self.b, count, body, carried)


def vector_intrinsic(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """An intrinsic's signature and code; ``arguments[0]`` is the shape, ``emit`` gets the run-time values."""
    shape = arguments[0].shape
    live = [i for i, ty in enumerate(arguments) if i and not isinstance(ty, types.Literal)]

    def code(context, builder, signature, values):
        returned = emit(Emitter(builder, shape), *(values[i] for i in live))
        return context.get_dummy_value() if result is types.void else returned

    return result(*arguments), code


def counted_loop(
    b: Any, count: Value, body: Callable[[Value, list[Value]], Sequence[Value]], carried: Sequence[Value] = ()
) -> list[Value]:
    """``for i in range(count)`` with loop-carried values; returns them as they leave."""
    before, head = b.basic_block, b.append_basic_block("loop")
    inside, after = b.append_basic_block("body"), b.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(ir.Constant(I64, 0), before)
    values = []
    for v in carried:
        phi = b.phi(v.type)
        phi.add_incoming(v, before)
        values.append(phi)
    b.cbranch(b.icmp_signed("<", i, count), inside, after)
    b.position_at_end(inside)
    updated = body(i, values)
    i.add_incoming(b.add(i, ir.Constant(I64, 1)), b.basic_block)
    for phi, v in zip(values, updated, strict=True):
        phi.add_incoming(v, b.basic_block)
    b.branch(head)
    b.position_at_end(after)
    return values


def _bytes(element: Any) -> int:
    """Size of a scalar LLVM type."""
    if isinstance(element, ir.IntType):
        return max(1, int(element.width) // 8)
    return {F16: 2, F32: 4, F64: 8}[element]


def _rounded(value: float, element: Any) -> float:
    """``value`` as the type holds it: LLVM's textual float constants must be exact."""
    import numpy as np

    return float(np.float32(value)) if element is F32 else value
