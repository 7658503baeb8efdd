"""
Vectors of 16 float32 as values in numba code, and raw memory.

LLVM cuts them to what the processor has (one AVX-512 register, two of AVX2, four of NEON): one source serves all, no
compiler is needed on the user's machine, and nothing depends on what an optimiser recognises. Addresses are plain
integers, in bytes. Functions named ``emit_*`` write LLVM code; :func:`function_of` makes of one what numba code calls.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16
FLOAT = ir.FloatType()
INT = ir.IntType(32)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)


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


def function_of(result: types.Type, arguments: tuple[types.Type, ...], emit: Callable) -> Callable:
    """The function, for numba code, of these types and of the code that ``emit(builder, *values)`` writes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        emitted = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else emitted

    def typed(context: Any, *given: Any) -> tuple[Any, Callable]:
        return result(*arguments), codegen

    typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
    return intrinsic(typed)


def constant(kind: ir.VectorType, number: float) -> ir.Constant:
    """A vector with one number in all lanes."""
    return ir.Constant(kind, [number] * kind.count)


def emit_pointer(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """An address as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def emit_load(builder: ir.IRBuilder, address: Any, kind: ir.Type, align: int) -> Any:
    """Load a ``kind``."""
    loaded = builder.load(emit_pointer(builder, address, kind))
    loaded.align = align
    return loaded


def emit_store(builder: ir.IRBuilder, address: Any, value: Any) -> None:
    """Store an int64, a float32 or a vector."""
    builder.store(value, emit_pointer(builder, address, value.type)).align = 4


def emit_splat(builder: ir.IRBuilder, number: Any, kind: ir.VectorType = FLOATS) -> Any:
    """Set all lanes to a number."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, nothing, constant(INTS, 0))


def emit_multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), (a, b, c))


def emit_first(builder: ir.IRBuilder, count: Any) -> Any:
    """The mask of the first ``count`` lanes."""
    counts = emit_splat(builder, builder.trunc(count, INT), INTS)
    return builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), counts)


def _emit_store_first(builder: ir.IRBuilder, address: Any, count: Any, vector: Any) -> None:
    pointer, mask = emit_pointer(builder, address, FLOATS), emit_first(builder, count)
    kind = ir.FunctionType(ir.VoidType(), [FLOATS, pointer.type, INT, mask.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(function, [vector, pointer, ir.Constant(INT, 4), mask])


def _emit_maximum(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_maximum_or_nan(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_unordered("uno", a, a), a, _emit_maximum(builder, a, b))


def _emit_times_power_of_two(builder: ir.IRBuilder, vector: Any, shifted: Any) -> Any:
    exponent = builder.shl(builder.bitcast(shifted, INTS), constant(INTS, 23))
    return builder.bitcast(builder.add(builder.bitcast(vector, INTS), exponent), FLOATS)


def _of_lanes(combine: Callable) -> Callable:
    """The function of a vector that combines its lanes, halves of them at a time: always in the same order."""

    def emit(builder: ir.IRBuilder, vector: Any) -> Any:
        width = LANES
        while width > 1:
            width //= 2
            nothing, kind = ir.Constant(vector.type, ir.Undefined), ir.VectorType(INT, width)
            halves = (ir.Constant(kind, list(range(first, first + width))) for first in (0, width))
            vector = combine(builder, *(builder.shuffle_vector(vector, nothing, lanes) for lanes in halves))
        return builder.extract_element(vector, ir.Constant(INT, 0))

    return function_of(types.float32, (VECTOR,), emit)


def _of_two(emit: Callable) -> Callable:
    return function_of(VECTOR, (VECTOR, VECTOR), emit)


def _every_second(first: int) -> Callable:
    lanes = ir.Constant(INTS, list(range(first, 2 * LANES, 2)))
    return _of_two(lambda builder, a, b: builder.shuffle_vector(a, b, lanes))


def _loader(kind: types.Type, stored: ir.Type, align: int) -> Callable:
    return function_of(kind, (types.intp,), lambda builder, address: emit_load(builder, address, stored, align))


load_int = _loader(types.int64, ir.IntType(64), 8)
load_byte = _loader(types.uint8, ir.IntType(8), 1)
load_float = _loader(types.float32, FLOAT, 4)
load = _loader(VECTOR, FLOATS, 4)
store_int = function_of(types.void, (types.intp, types.int64), emit_store)
store_float = function_of(types.void, (types.intp, types.float32), emit_store)
store = function_of(types.void, (types.intp, VECTOR), emit_store)
# (address, count, vector): the first ``count`` lanes, at most 16
store_first = function_of(types.void, (types.intp, types.intp, VECTOR), _emit_store_first)
# (count, vector, others): the first ``count`` lanes of ``vector``, then those of ``others``
first_lanes = function_of(
    VECTOR,
    (types.intp, VECTOR, VECTOR),
    lambda builder, count, vector, others: builder.select(emit_first(builder, count), vector, others),
)
splat = function_of(VECTOR, (types.float32,), lambda builder, number: emit_splat(builder, number))
multiply_add = function_of(VECTOR, (VECTOR, VECTOR, VECTOR), emit_multiply_add)
maximum = _of_two(_emit_maximum)  # of each pair of lanes; ``b`` where one is NaN
maximum_or_nan = _of_two(_emit_maximum_or_nan)  # of each pair of lanes; NaN where one is NaN
# (test, bound, vector): 0 where ``test < bound``, otherwise ``vector``
zero_below = function_of(
    VECTOR,
    (VECTOR, VECTOR, VECTOR),
    lambda builder, test, bound, vector: builder.select(
        builder.fcmp_unordered(">=", test, bound), vector, constant(FLOATS, 0.0)
    ),
)
times_power_of_two = _of_two(_emit_times_power_of_two)  # vector * 2 ** n, given n + INTEGER_SHIFT
even_lanes, odd_lanes = map(_every_second, range(2))  # of two vectors in a row
lanes_sum = _of_lanes(lambda builder, a, b: builder.fadd(a, b))
lanes_maximum = _of_lanes(_emit_maximum_or_nan)  # NaN if one is NaN
# (address, number): add to an int64, as one step for all threads, and return what it was
fetch_add = function_of(
    types.int64,
    (types.intp, types.int64),
    lambda builder, address, number: builder.atomic_rmw(
        "add", emit_pointer(builder, address, number.type), number, "acq_rel"
    ),
)


def _overload(symbol: Callable, name: str) -> None:
    """Let ``symbol`` between two vectors be the instruction ``name``."""
    combine = _of_two(lambda builder, a, b: getattr(builder, name)(a, b))

    @overload(symbol)
    def overloaded(a, b):  # type: ignore[no-untyped-def]
        if isinstance(a, VectorType) and isinstance(b, VectorType):
            return lambda a, b: combine(a, b)
        return None


_overload(operator.add, "fadd")
_overload(operator.sub, "fsub")
_overload(operator.mul, "fmul")
_overload(operator.truediv, "fdiv")

# Added to a float32 below 2 ** 22 in size, leaves its nearest integer in the lowest bits of the sum
INTEGER_SHIFT = 1.5 * 2.0**23
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first short enough that its product with an exponent is exact
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SMALLEST_EXPONENT = -87.0


@compiled
def exponential(x):  # type: ignore[no-untyped-def]
    """``exp(x)`` for x <= 88, to about 2 units in the last place; 0 below -87, NaN for NaN."""
    bound = splat(_SMALLEST_EXPONENT)
    clamped = maximum(bound, x)
    shifted = multiply_add(clamped, splat(_LOG2_E), splat(INTEGER_SHIFT))
    n = shifted - splat(INTEGER_SHIFT)
    r = multiply_add(n, splat(-_LN2_HIGH), clamped)
    r = multiply_add(n, splat(-_LN2_LOW), r)
    series = multiply_add(splat(1.0 / 720.0), r, splat(1.0 / 120.0))
    series = multiply_add(series, r, splat(1.0 / 24.0))
    series = multiply_add(series, r, splat(1.0 / 6.0))
    series = multiply_add(series, r, splat(0.5))
    series = multiply_add(series, r, splat(1.0))
    series = multiply_add(series, r, splat(1.0))
    return zero_below(x, bound, times_power_of_two(series, shifted))


@compiled
def capped(logits, softcap):  # type: ignore[no-untyped-def]
    """``softcap * tanh(logits / softcap)``."""
    zero, one = splat(0.0), splat(1.0)
    double = logits * splat(np.float32(2.0) / softcap)
    decay = exponential(zero - maximum(double, zero - double))
    size = (one - decay) / (one + decay) * splat(softcap)
    return zero_below(double, zero, size) - zero_below(zero - double, zero, size)
