"""
Vectors of 16 float32 as values in numba code, and raw memory.

LLVM cuts them to what the processor has (one AVX-512 register, two of AVX2, four of NEON): one source serves all, no
compiler is needed on the user's machine, and nothing depends on what an optimiser recognises. Addresses are plain
integers, in bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16


def _half_in_hardware() -> bool:
    """Whether float16 can be left to LLVM, which otherwise calls a function that is not there."""
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None:
        return "+f16c" in (config.CPU_FEATURES or "")
    x86 = binding.get_process_triple().startswith(("x86", "i686"))
    features: dict[str, bool] = binding.get_host_cpu_features()
    return features.get("f16c", False) or not x86


FLOAT = ir.FloatType()
_INT = ir.IntType(32)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(_INT, LANES)


class VectorType(types.Type):
    """numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


VECTOR = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, FLOATS)


compiled = njit(nogil=True, boundscheck=False)


def operation(result: types.Type, arguments: tuple[types.Type, ...], emit: Callable) -> tuple[Any, Callable]:
    """Signature and code of an intrinsic whose code ``emit(builder, *values)`` writes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        emitted = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else emitted

    return result(*arguments), codegen


def _vector_constant(kind: ir.VectorType, number: float) -> ir.Constant:
    return ir.Constant(kind, [number] * LANES)


def _pointer(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def emit_load(builder: ir.IRBuilder, address: Any, kind: ir.Type, align: int) -> Any:
    """Write the code that loads a ``kind``."""
    loaded = builder.load(_pointer(builder, address, kind))
    loaded.align = align
    return loaded


def emit_store(builder: ir.IRBuilder, address: Any, vector: Any) -> None:
    """Write the code that stores a vector."""
    builder.store(vector, _pointer(builder, address, FLOATS)).align = 4


def emit_splat(builder: ir.IRBuilder, number: Any) -> Any:
    """Write the code that sets all lanes to a number."""
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, ir.Constant(FLOATS, ir.Undefined), _vector_constant(INTS, 0))


def emit_multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """Write the code of ``a * b + c``, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), (a, b, c))


@intrinsic
def store(context, address, vector):  # type: ignore[no-untyped-def]
    """Store 16 float32."""
    return operation(types.void, (types.intp, VECTOR), emit_store)


def _zero_extended(builder: ir.IRBuilder, address: Any, bits: int) -> Any:
    return builder.zext(emit_load(builder, address, ir.VectorType(ir.IntType(bits), LANES), bits // 8), INTS)


def _emit_bfloat16(builder: ir.IRBuilder, address: Any) -> Any:
    words = _zero_extended(builder, address, 16)
    return builder.bitcast(builder.shl(words, _vector_constant(INTS, 16)), FLOATS)


def _emit_float16(builder: ir.IRBuilder, address: Any) -> Any:
    if _half_in_hardware():
        return builder.fpext(emit_load(builder, address, ir.VectorType(ir.HalfType(), LANES), 2), FLOATS)
    words = _zero_extended(builder, address, 16)
    sign = builder.shl(builder.and_(words, _vector_constant(INTS, 0x8000)), _vector_constant(INTS, 16))
    rest = builder.shl(builder.and_(words, _vector_constant(INTS, 0x7FFF)), _vector_constant(INTS, 13))
    # The exponent's bias is 15 there and 127 here; the product also makes normal numbers of subnormal ones
    size = builder.fmul(builder.bitcast(rest, FLOATS), _vector_constant(FLOATS, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(size, INTS), sign), FLOATS)


def _emit_bytes(builder: ir.IRBuilder, address: Any) -> Any:
    return builder.sitofp(_zero_extended(builder, address, 8), FLOATS)


def _emit_low_halves(builder: ir.IRBuilder, address: Any) -> Any:
    codes = builder.and_(_zero_extended(builder, address, 8), _vector_constant(INTS, 15))
    return builder.sitofp(codes, FLOATS)


def _emit_high_halves(builder: ir.IRBuilder, address: Any) -> Any:
    codes = builder.lshr(_zero_extended(builder, address, 8), _vector_constant(INTS, 4))
    return builder.sitofp(codes, FLOATS)


# How numbers are stored; in 4 bits, the low halves of a row's bytes are its first channels
FLOAT32, BFLOAT16, FLOAT16, BYTES, HALF_BYTES = range(5)
LOW_HALVES, HIGH_HALVES = HALF_BYTES, HALF_BYTES + 1
ITEMSIZE = (4, 2, 2, 1, 1, 1)
EMIT_LOAD = (
    lambda builder, address: emit_load(builder, address, FLOATS, 4),
    _emit_bfloat16,
    _emit_float16,
    _emit_bytes,
    _emit_low_halves,
    _emit_high_halves,
)


def _loader(kind: int) -> Callable:
    @intrinsic
    def load_as(context, address):  # type: ignore[no-untyped-def]
        return operation(VECTOR, (types.intp,), EMIT_LOAD[kind])

    return load_as


load, load_bfloat16, load_float16, load_bytes, load_low_halves, load_high_halves = map(_loader, range(6))


def _emit_mask(builder: ir.IRBuilder, count: Any) -> Any:
    first = builder.insert_element(ir.Constant(INTS, ir.Undefined), builder.trunc(count, _INT), ir.Constant(_INT, 0))
    counts = builder.shuffle_vector(first, ir.Constant(INTS, ir.Undefined), _vector_constant(INTS, 0))
    return builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), counts)


@intrinsic
def load_first(context, address, count, others):  # type: ignore[no-untyped-def]
    """Load ``count`` float32, at most 16; the other lanes are those of ``others`` and their memory is not touched."""

    def emit(builder: ir.IRBuilder, address: Any, count: Any, others: Any) -> Any:
        pointer, mask = _pointer(builder, address, FLOATS), _emit_mask(builder, count)
        kind = ir.FunctionType(FLOATS, [pointer.type, _INT, mask.type, FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
        return builder.call(function, [pointer, ir.Constant(_INT, 4), mask, others])

    return operation(VECTOR, (types.intp, types.intp, VECTOR), emit)


@intrinsic
def store_first(context, address, count, vector):  # type: ignore[no-untyped-def]
    """Store the first ``count`` lanes, at most 16."""

    def emit(builder: ir.IRBuilder, address: Any, count: Any, vector: Any) -> None:
        pointer, mask = _pointer(builder, address, FLOATS), _emit_mask(builder, count)
        kind = ir.FunctionType(ir.VoidType(), [FLOATS, pointer.type, _INT, mask.type])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
        builder.call(function, [vector, pointer, ir.Constant(_INT, 4), mask])

    return operation(types.void, (types.intp, types.intp, VECTOR), emit)


@intrinsic
def splat(context, number):  # type: ignore[no-untyped-def]
    """Set all lanes to ``number``."""
    return operation(VECTOR, (types.float32,), emit_splat)


@intrinsic
def multiply_add(context, a, b, c):  # type: ignore[no-untyped-def]
    """``a * b + c``, rounded once."""
    return operation(VECTOR, (VECTOR, VECTOR, VECTOR), emit_multiply_add)


@intrinsic
def maximum(context, a, b):  # type: ignore[no-untyped-def]
    """Larger of each pair of lanes; ``b`` where one is NaN."""

    def emit(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return operation(VECTOR, (VECTOR, VECTOR), emit)


def _emit_maximum_or_nan(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    larger = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, larger)


@intrinsic
def maximum_or_nan(context, a, b):  # type: ignore[no-untyped-def]
    """Larger of each pair of lanes; NaN where one is NaN."""
    return operation(VECTOR, (VECTOR, VECTOR), _emit_maximum_or_nan)


@intrinsic
def zero_below(context, test, bound, vector):  # type: ignore[no-untyped-def]
    """0 where ``test < bound``, otherwise ``vector``."""

    def emit(builder: ir.IRBuilder, test: Any, bound: Any, vector: Any) -> Any:
        return builder.select(builder.fcmp_unordered(">=", test, bound), vector, _vector_constant(FLOATS, 0.0))

    return operation(VECTOR, (VECTOR, VECTOR, VECTOR), emit)


@intrinsic
def times_power_of_two(context, vector, shifted):  # type: ignore[no-untyped-def]
    """``vector * 2 ** n``, where ``shifted`` is the integer n plus :data:`INTEGER_SHIFT`."""

    def emit(builder: ir.IRBuilder, vector: Any, shifted: Any) -> Any:
        exponent = builder.shl(builder.bitcast(shifted, INTS), _vector_constant(INTS, 23))
        return builder.bitcast(builder.add(builder.bitcast(vector, INTS), exponent), FLOATS)

    return operation(VECTOR, (VECTOR, VECTOR), emit)


@intrinsic
def lanes_sum(context, vector):  # type: ignore[no-untyped-def]
    """Sum over the lanes, in a fixed order."""

    def emit(builder: ir.IRBuilder, vector: Any) -> Any:
        return _fold(builder, vector, builder.fadd)

    return operation(types.float32, (VECTOR,), emit)


@intrinsic
def lanes_maximum(context, vector):  # type: ignore[no-untyped-def]
    """Maximum over the lanes; NaN if one is NaN."""

    def emit(builder: ir.IRBuilder, vector: Any) -> Any:
        return _fold(builder, vector, lambda a, b: _emit_maximum_or_nan(builder, a, b))

    return operation(types.float32, (VECTOR,), emit)


def _fold(builder: ir.IRBuilder, vector: Any, combine: Callable) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(_INT, width), list(range(first, first + width))),
            )
            for first in (0, width)
        )
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_INT, 0))


def emit_sums_of_four(builder: ir.IRBuilder, vectors: Any, width: int) -> Any:
    """
    Transpose and add: in each run of ``4 * width`` lanes, part ``i`` is the sum of the run's four parts of vector i.

    Two steps, each adding the even and the odd parts of two vectors side by side.
    """
    parts = [list(range(first, first + width)) for first in range(0, LANES, width)]
    even: list[int] = []
    odd: list[int] = []
    for run in range(0, len(parts), 4):
        for offset in (0, LANES):
            even += [offset + lane for part in (parts[run], parts[run + 2]) for lane in part]
            odd += [offset + lane for part in (parts[run + 1], parts[run + 3]) for lane in part]

    def step(x: Any, y: Any) -> Any:
        first, second = (builder.shuffle_vector(x, y, ir.Constant(INTS, lanes)) for lanes in (even, odd))
        return builder.fadd(first, second)

    a, b, c, d = vectors
    return step(step(a, b), step(c, d))


@intrinsic
def fetch_add(context, address, number):  # type: ignore[no-untyped-def]
    """Add to the int64 at ``address``, as one step for all threads, and return what it was."""

    def emit(builder: ir.IRBuilder, address: Any, number: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, address, ir.IntType(64)), number, "acq_rel")

    return operation(types.int64, (types.intp, types.int64), emit)


def emit_prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Write the code that asks for a cache line which will be read soon; the address need not be ours."""
    pointer = _pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # A read, to be kept in the second cache, of data
    builder.call(function, [pointer, *(ir.Constant(_INT, number) for number in (0, 2, 1))])


@intrinsic
def even_lanes(context, a, b):  # type: ignore[no-untyped-def]
    """Every second number of two vectors in a row, from the first on."""
    lanes = ir.Constant(INTS, list(range(0, 2 * LANES, 2)))
    return operation(VECTOR, (VECTOR, VECTOR), lambda builder, a, b: builder.shuffle_vector(a, b, lanes))


@intrinsic
def odd_lanes(context, a, b):  # type: ignore[no-untyped-def]
    """Every second number of two vectors in a row, from the second on."""
    lanes = ir.Constant(INTS, list(range(1, 2 * LANES, 2)))
    return operation(VECTOR, (VECTOR, VECTOR), lambda builder, a, b: builder.shuffle_vector(a, b, lanes))


@intrinsic
def load_int(context, address):  # type: ignore[no-untyped-def]
    """Load an int64."""
    return operation(
        types.int64, (types.intp,), lambda builder, address: emit_load(builder, address, ir.IntType(64), 8)
    )


@intrinsic
def store_int(context, address, number):  # type: ignore[no-untyped-def]
    """Store an int64."""

    def emit(builder: ir.IRBuilder, address: Any, number: Any) -> None:
        builder.store(number, _pointer(builder, address, ir.IntType(64))).align = 4

    return operation(types.void, (types.intp, types.int64), emit)


@intrinsic
def load_byte(context, address):  # type: ignore[no-untyped-def]
    """Load an unsigned byte."""
    return operation(types.uint8, (types.intp,), lambda builder, address: emit_load(builder, address, ir.IntType(8), 1))


@intrinsic
def store_byte(context, address, byte):  # type: ignore[no-untyped-def]
    """Store an unsigned byte."""

    def emit(builder: ir.IRBuilder, address: Any, byte: Any) -> None:
        builder.store(byte, _pointer(builder, address, ir.IntType(8)))

    return operation(types.void, (types.intp, types.uint8), emit)


@intrinsic
def load_float(context, address):  # type: ignore[no-untyped-def]
    """Load a float32."""
    return operation(types.float32, (types.intp,), lambda builder, address: emit_load(builder, address, FLOAT, 4))


@intrinsic
def store_float(context, address, number):  # type: ignore[no-untyped-def]
    """Store a float32."""

    def emit(builder: ir.IRBuilder, address: Any, number: Any) -> None:
        builder.store(number, _pointer(builder, address, FLOAT)).align = 4

    return operation(types.void, (types.intp, types.float32), emit)


def _arithmetic(name: str) -> Callable:
    @intrinsic
    def arithmetic(context, a, b):  # type: ignore[no-untyped-def]
        return operation(VECTOR, (VECTOR, VECTOR), lambda builder, a, b: getattr(builder, name)(a, b))

    def overloaded(a, b):  # type: ignore[no-untyped-def]
        if isinstance(a, VectorType) and isinstance(b, VectorType):
            return lambda a, b: arithmetic(a, b)
        return None

    return overloaded


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    overload(_symbol)(_arithmetic(_name))


@compiled
def word(job, index):  # type: ignore[no-untyped-def]
    """Word ``index`` of a job."""
    return load_int(job + 8 * index)


@compiled
def float_word(job, index):  # type: ignore[no-untyped-def]
    """The float32 in word ``index`` of a job."""
    return load_float(job + 8 * index)


# Added to a float32 below 2 ** 22 in size, leaves its nearest integer in the lowest bits of the sum
INTEGER_SHIFT = 1.5 * 2.0**23
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first short enough that its product with an exponent is exact
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SMALLEST_EXPONENT = -87.0


@compiled
def exponential(x):  # type: ignore[no-untyped-def]
    """``exp(x)`` for x <= 88, to about 2 units in the last place; 0 below -87, NaN for NaN."""
    bound = splat(np.float32(_SMALLEST_EXPONENT))
    clamped = maximum(bound, x)
    shifted = multiply_add(clamped, splat(np.float32(_LOG2_E)), splat(np.float32(INTEGER_SHIFT)))
    n = shifted - splat(np.float32(INTEGER_SHIFT))
    r = multiply_add(n, splat(np.float32(-_LN2_HIGH)), clamped)
    r = multiply_add(n, splat(np.float32(-_LN2_LOW)), r)
    series = splat(np.float32(1.0 / 720.0))
    series = multiply_add(series, r, splat(np.float32(1.0 / 120.0)))
    series = multiply_add(series, r, splat(np.float32(1.0 / 24.0)))
    series = multiply_add(series, r, splat(np.float32(1.0 / 6.0)))
    series = multiply_add(series, r, splat(np.float32(0.5)))
    series = multiply_add(series, r, splat(np.float32(1.0)))
    series = multiply_add(series, r, splat(np.float32(1.0)))
    return zero_below(x, bound, times_power_of_two(series, shifted))


@compiled
def capped(logits, softcap):  # type: ignore[no-untyped-def]
    """``softcap * tanh(logits / softcap)``."""
    zero = splat(np.float32(0.0))
    one = splat(np.float32(1.0))
    double = logits * splat(np.float32(2.0) / softcap)
    decay = exponential(zero - maximum(double, zero - double))
    size = (one - decay) / (one + decay) * splat(softcap)
    return zero_below(double, zero, size) - zero_below(zero - double, zero, size)
