"""The two products of attention, over rows of packed storage that are read in place in whatever format they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import (
    EMIT_LOAD,
    FLOAT,
    FLOAT32,
    FLOATS,
    HALF_BYTES,
    HIGH_HALVES,
    ITEMSIZE,
    LANES,
    LOW_HALVES,
    emit_load,
    emit_multiply_add,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_sums_of_four,
    operation,
)

MAX_ROWS = 4  # query rows that share what is loaded
_VECTOR = 4 * LANES
_ADDRESS = ir.IntType(types.intp.bitwidth)


class _Writer:
    """Writes address arithmetic, loops and vector variables."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, base: Any, *terms: tuple[Any, Any]) -> Any:
        """``base`` plus a sum of products of values and constants."""
        for a, b in terms:
            base = self.builder.add(base, self.builder.mul(self._value(a), self._value(b)))
        return base

    def _value(self, number: Any) -> Any:
        return ir.Constant(_ADDRESS, number) if isinstance(number, int) else number

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        with cgutils.for_range(self.builder, count, intp=_ADDRESS) as loop:
            yield loop.index

    def variable(self, start: Any = None) -> Any:
        """A vector variable, 0 unless told otherwise."""
        slot = cgutils.alloca_once(self.builder, FLOATS)
        self.builder.store(ir.Constant(FLOATS, [0.0] * LANES) if start is None else start, slot)
        return slot

    def add_product(self, slot: Any, a: Any, b: Any) -> None:
        self.builder.store(emit_multiply_add(self.builder, a, b, self.builder.load(slot)), slot)

    def load(self, address: Any, kind: int = FLOAT32) -> Any:
        return EMIT_LOAD[kind](self.builder, address)

    def number(self, address: Any, kind: ir.Type = FLOAT) -> Any:
        return emit_load(self.builder, address, kind, 4)


def _case_number(builder: ir.IRBuilder | None, parts: tuple[Any, ...]) -> Any:
    """One number for several small ones, of constants or in the code being written."""
    number = parts[0]
    for part in parts[1:]:
        if builder is None:
            number = number * 8 + part
        else:
            number = builder.add(builder.mul(number, ir.Constant(_ADDRESS, 8)), part)
    return number


def _dispatch(builder: ir.IRBuilder, given: tuple[Any, ...], cases: Iterable[tuple[int, ...]], emit: Callable) -> None:
    """Jump to the code that ``emit(*case)`` writes for the case that is given; nothing happens for others."""
    end = builder.append_basic_block("end")
    switch = builder.switch(_case_number(builder, given), end)
    for case in cases:
        block = builder.append_basic_block("case")
        switch.add_case(ir.Constant(_ADDRESS, _case_number(None, case)), block)
        builder.position_at_end(block)
        emit(*case)
        builder.branch(end)
    builder.position_at_end(end)


def _elements(builder: ir.IRBuilder, array: Any) -> list[Any]:
    return [builder.load(builder.gep(array, [ir.Constant(_ADDRESS, index)])) for index in range(4)]


def _emit_products(builder: ir.IRBuilder, kind: int, rows: int, *arguments: Any) -> None:
    keys, key_step, ahead, queries, query_step, vectors, out, out_step = arguments
    write = _Writer(builder)
    halves = [LOW_HALVES, HIGH_HALVES] if kind == HALF_BYTES else [kind]
    quarters = [cgutils.alloca_once(builder, FLOATS, size=4) for _ in range(rows)]
    loops = builder.udiv(vectors, ir.Constant(_ADDRESS, len(halves)))
    with write.loop(ir.Constant(_ADDRESS, 4)) as quad:
        first_key = write.at(keys, (builder.mul(quad, ir.Constant(_ADDRESS, 4)), key_step))
        sums = [[write.variable() for _ in range(4)] for _ in range(rows)]
        with write.loop(loops) as index:
            for half, half_kind in enumerate(halves):
                position = builder.add(index, builder.mul(loops, ir.Constant(_ADDRESS, half)))
                query = [write.load(write.at(queries, (row, query_step), (position, _VECTOR))) for row in range(rows)]
                for item in range(4):
                    address = write.at(first_key, (item, key_step), (index, LANES * ITEMSIZE[kind]))
                    key = write.load(address, half_kind)
                    if half == 0:
                        emit_prefetch(builder, write.at(address, (ahead, 1)))
                    for row in range(rows):
                        write.add_product(sums[row][item], query[row], key)
        for row in range(rows):
            total = emit_sums_of_four(builder, [builder.load(slot) for slot in sums[row]], 1)
            builder.store(total, builder.gep(quarters[row], [quad]))
    for row in range(rows):
        emit_store(
            builder, write.at(out, (row, out_step)), emit_sums_of_four(builder, _elements(builder, quarters[row]), 4)
        )


@intrinsic
def products(  # type: ignore[no-untyped-def]
    context, kind, rows, keys, key_step, ahead, queries, query_step, vectors, out, out_step
):
    """
    Products of up to :data:`MAX_ROWS` queries with 16 keys.

    Keys are rows of ``vectors`` x 16 channels in format ``kind``, ``key_step`` bytes apart; those ``ahead`` bytes
    further are asked for from memory. Queries are float32. Writes 16 float32 for each query at ``out``, ``out_step``
    bytes apart. 4-bit keys need an even number of vectors.
    """

    def emit(builder: ir.IRBuilder, kind: Any, rows: Any, *arguments: Any) -> None:
        cases = product(range(HALF_BYTES + 1), range(1, MAX_ROWS + 1))
        _dispatch(builder, (kind, rows), cases, lambda *case: _emit_products(builder, *case, *arguments))

    return operation(types.void, (types.intp,) * 10, emit)


def _emit_add_values(builder: ir.IRBuilder, kind: int, rows: int, width: int, *arguments: Any) -> None:
    values, value_step, ahead, count, weights, weight_step, out, out_step, factors, offsets, high_half = arguments
    write = _Writer(builder)
    # In 4 bits each byte holds two channels, half a row apart, which may be of two groups with weights of their own
    parts = [(kind, weights, out, offsets)]
    if kind == HALF_BYTES:
        words = (write.number(write.at(high_half, (index, 8)), _ADDRESS) for index in range(3))
        parts = [(LOW_HALVES, weights, out, offsets), (HIGH_HALVES, *words)]
    sums: dict[tuple[int, int, int], Any] = {}
    addresses = {}
    for part, (_, _, part_out, part_offsets) in enumerate(parts):
        for row in range(rows):
            factor = emit_splat(builder, write.number(write.at(factors, (row, 4))))
            offset = emit_splat(builder, write.number(write.at(part_offsets, (row, 4))))
            for index in range(width):
                place = part, row, index
                addresses[place] = write.at(part_out, (row, out_step), (index, _VECTOR))
                start = emit_multiply_add(builder, write.load(addresses[place]), factor, offset)
                sums[place] = write.variable(start)
    with write.loop(count) as item:
        base = write.at(values, (item, value_step))
        stored = [write.at(base, (index, LANES * ITEMSIZE[kind])) for index in range(width)]
        for address in stored[:: max(1, 4 // ITEMSIZE[kind])]:
            emit_prefetch(builder, write.at(address, (ahead, 1)))
        for part, (part_kind, part_weights, _, _) in enumerate(parts):
            value = [write.load(address, part_kind) for address in stored]
            for row in range(rows):
                weight = emit_splat(builder, write.number(write.at(part_weights, (row, weight_step), (item, 4))))
                for index in range(width):
                    write.add_product(sums[part, row, index], weight, value[index])
    for place, address in addresses.items():
        emit_store(builder, address, builder.load(sums[place]))


@intrinsic
def add_values(  # type: ignore[no-untyped-def]
    context,
    kind,
    rows,
    width,
    values,
    value_step,
    ahead,
    count,
    weights,
    weight_step,
    out,
    out_step,
    factors,
    offsets,
    high_half,
):
    """
    ``out = out * factor + offset + weights @ values`` for up to :data:`MAX_ROWS` rows and ``width`` x 16 numbers.

    Values are ``count`` rows in format ``kind``, ``value_step`` bytes apart, those ``ahead`` bytes further are asked
    for from memory; weights, factors and offsets are float32. ``width`` is 4, 2 or 1. In 4 bits it counts bytes and is
    at most 2, and the high halves have their own weights, out and offsets: three int64 addresses at ``high_half``.
    """

    def emit(builder: ir.IRBuilder, kind: Any, rows: Any, width: Any, *arguments: Any) -> None:
        every = product(range(HALF_BYTES + 1), range(1, MAX_ROWS + 1), (4, 2, 1))
        cases = (case for case in every if case[0] != HALF_BYTES or case[2] <= 2)
        _dispatch(builder, (kind, rows, width), cases, lambda *case: _emit_add_values(builder, *case, *arguments))

    return operation(types.void, (types.intp,) * 14, emit)
