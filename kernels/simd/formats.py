"""How numbers are stored, and rows of them as float32 rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from .vectors import (
    FLOATS,
    INT,
    INTS,
    LANES,
    VECTOR,
    compiled,
    constant,
    emit_first,
    emit_load,
    emit_pointer,
    function_of,
    store,
)


def _half_in_hardware() -> bool:
    """Whether float16 can be left to LLVM, which otherwise calls a function that is not there."""
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None:
        return "+f16c" in (config.CPU_FEATURES or "")
    x86 = binding.get_process_triple().startswith(("x86", "i686"))
    features: dict[str, bool] = binding.get_host_cpu_features()
    return features.get("f16c", False) or not x86


def _emit_float16(builder: ir.IRBuilder, words: Any) -> Any:
    if _half_in_hardware():
        return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    words = builder.zext(words, INTS)
    sign = builder.shl(builder.and_(words, constant(INTS, 0x8000)), constant(INTS, 16))
    rest = builder.shl(builder.and_(words, constant(INTS, 0x7FFF)), constant(INTS, 13))
    # The exponent's bias is 15 there and 127 here; the product also makes normal numbers of subnormal ones
    size = builder.fmul(builder.bitcast(rest, FLOATS), constant(FLOATS, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(size, INTS), sign), FLOATS)


# In 4 bits, the low halves of a row's bytes are its first channels
FLOAT32, BFLOAT16, FLOAT16, BYTES, HALF_BYTES = range(5)
LOW_HALVES, HIGH_HALVES = HALF_BYTES, HALF_BYTES + 1
ITEMSIZE = (4, 2, 2, 1, 1, 1)
_EMIT_FLOATS = (
    lambda builder, words: builder.bitcast(words, FLOATS),
    lambda builder, words: builder.bitcast(builder.shl(builder.zext(words, INTS), constant(INTS, 16)), FLOATS),
    _emit_float16,
    lambda builder, codes: builder.sitofp(builder.zext(codes, INTS), FLOATS),
    lambda builder, codes: builder.sitofp(builder.and_(builder.zext(codes, INTS), constant(INTS, 15)), FLOATS),
    lambda builder, codes: builder.sitofp(builder.lshr(builder.zext(codes, INTS), constant(INTS, 4)), FLOATS),
)


def emit_load_as(builder: ir.IRBuilder, kind: int, address: Any, count: Any = None) -> Any:
    """Load 16 numbers of a format; given a count, so many, then zeros whose memory is not touched."""
    itemsize = ITEMSIZE[kind]
    stored = ir.VectorType(ir.IntType(8 * itemsize), LANES)
    if count is None:
        return _EMIT_FLOATS[kind](builder, emit_load(builder, address, stored, itemsize))
    pointer, mask = emit_pointer(builder, address, stored), emit_first(builder, count)
    function_type = ir.FunctionType(stored, [pointer.type, INT, mask.type, stored])
    name = f"llvm.masked.load.v{LANES}i{8 * itemsize}.p0"
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    loaded = builder.call(function, [pointer, ir.Constant(INT, itemsize), mask, constant(stored, 0)])
    return _EMIT_FLOATS[kind](builder, loaded)


def _reader(kind: int) -> Callable:
    """The function ``(address, left)`` that loads up to 16 numbers of a format, and zeros where no more are left."""
    load_all = function_of(VECTOR, (types.intp,), lambda builder, address: emit_load_as(builder, kind, address))
    load_first = function_of(
        VECTOR, (types.intp,) * 2, lambda builder, address, count: emit_load_as(builder, kind, address, count)
    )

    @compiled
    def read(address, left):  # type: ignore[no-untyped-def]
        return load_all(address) if left >= LANES else load_first(address, left)

    return read


class Rows(NamedTuple):
    """Rows in memory: where the first begins, and how many bytes later the next does."""

    address: int
    step: int


def row_bytes(channels: int) -> int:
    """Bytes of a float32 row whose end vectors may overrun."""
    return 4 * LANES * ((channels + LANES - 1) // LANES + 1)


def _widener(kind: int) -> Callable:
    """The function that writes :class:`Rows` of a format as float32 rows of :func:`row_bytes`; codes stay codes."""
    read_as, itemsize = _reader(kind), ITEMSIZE[kind]

    @compiled
    def widen(source, target, count, channels):  # type: ignore[no-untyped-def]
        for row in range(count):
            address, wide = source.address + row * source.step, target.address + row * target.step
            for channel in range(0, channels, LANES):
                store(wide + 4 * channel, read_as(address + itemsize * channel, channels - channel))

    return widen


read = _reader(FLOAT32)
_widen, _widen_bfloat16, widen_float16, _widen_bytes, _widen_low_halves, _widen_high_halves = map(_widener, range(6))


@compiled
def widen_rows(kind, source, target, count, channels):  # type: ignore[no-untyped-def]
    """Write ``count`` rows as float32, zeros up to the next whole vector; nothing behind the last channel is read."""
    if kind == FLOAT32:
        _widen(source, target, count, channels)
    elif kind == BFLOAT16:
        _widen_bfloat16(source, target, count, channels)
    elif kind == FLOAT16:
        widen_float16(source, target, count, channels)
    elif kind == BYTES:
        _widen_bytes(source, target, count, channels)
    else:
        half = channels // 2
        _widen_low_halves(source, target, count, half)
        # After the low halves, whose last vector reaches into the channels of the high ones
        _widen_high_halves(source, Rows(target.address + 4 * half, target.step), count, half)
