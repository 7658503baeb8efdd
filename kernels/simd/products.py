"""The two products of attention, over rows of packed storage that are read in place in whatever format they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce, wraps
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .formats import FLOAT32, HALF_BYTES, HIGH_HALVES, ITEMSIZE, LOW_HALVES, Rows, emit_load_as
from .vectors import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    constant,
    emit_load,
    emit_multiply_add,
    emit_pointer,
    emit_splat,
    emit_store,
    function_of,
)

MAX_ROWS = 4  # query rows that share what is loaded
_VECTOR = 4 * LANES
_ADDRESS = ir.IntType(types.intp.bitwidth)


class Part(NamedTuple):
    """What a block of values is weighted with and added to: weights, sums, and an offset for each row of sums."""

    weights: Rows
    sums: Rows
    offsets: int


_ROWS = types.NamedUniTuple(types.intp, 2, Rows)
_PART = types.NamedTuple((_ROWS, _ROWS, types.intp), Part)


def _emit_prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Write the code that asks for a cache line which will be read soon; the address need not be ours."""
    pointer = emit_pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # A read, to be kept in the second cache, of data
    builder.call(function, [pointer, *(ir.Constant(INT, number) for number in (0, 2, 1))])


def _emit_sums_of_four(builder: ir.IRBuilder, vectors: Any, width: int) -> Any:
    """
    Transpose and add: in each run of ``4 * width`` lanes, part ``i`` is the sum of the run's four parts of vector i.

    Two steps, each adding the even and the odd parts of two vectors side by side.
    """
    lanes = np.arange(2 * LANES).reshape(2, -1, 2, 2, width).swapaxes(0, 1)  # [run, vector, pair, even or odd, lane]
    even, odd = (lanes[:, :, :, which].ravel().tolist() for which in (0, 1))

    def step(x: Any, y: Any) -> Any:
        first, second = (builder.shuffle_vector(x, y, ir.Constant(INTS, lanes)) for lanes in (even, odd))
        return builder.fadd(first, second)

    a, b, c, d = vectors
    return step(step(a, b), step(c, d))


class _Writer:
    """Writes address arithmetic, loops and vector variables."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, base: Any, *terms: tuple[Any, Any]) -> Any:
        """``base`` plus a sum of products of values and constants."""
        for a, b in terms:
            base = self.builder.add(base, self.builder.mul(self._value(a), self._value(b)))
        return base

    def row(self, rows: Any, index: Any) -> Any:
        """Address of a row of :class:`Rows`."""
        address, step = cgutils.unpack_tuple(self.builder, rows, 2)
        return self.at(address, (index, step))

    def _value(self, number: Any) -> Any:
        return ir.Constant(_ADDRESS, number) if isinstance(number, int) else number

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        with cgutils.for_range(self.builder, count, intp=_ADDRESS) as loop:
            yield loop.index

    def variable(self, start: Any = None) -> Any:
        """A vector variable, 0 unless told otherwise."""
        slot = cgutils.alloca_once(self.builder, FLOATS)
        self.builder.store(constant(FLOATS, 0.0) if start is None else start, slot)
        return slot

    def add_product(self, slot: Any, a: Any, b: Any) -> None:
        self.builder.store(emit_multiply_add(self.builder, a, b, self.builder.load(slot)), slot)

    def load(self, address: Any, kind: int = FLOAT32) -> Any:
        return emit_load_as(self.builder, kind, address)

    def number(self, address: Any) -> Any:
        return emit_load(self.builder, address, FLOAT, 4)


def _for_cases(cases: Iterable[tuple[int, ...]]) -> Callable:
    """Let ``emit`` write its code for each case of its first arguments, and a jump to the case that is given."""
    known = list(cases)

    def decorate(emit: Callable) -> Callable:
        @wraps(emit)
        def emit_cases(builder: ir.IRBuilder, *arguments: Any) -> None:
            end = builder.append_basic_block("end")
            given, others = arguments[: len(known[0])], arguments[len(known[0]) :]
            number = ir.Constant(_ADDRESS, 0)
            for part in given:
                number = builder.add(builder.mul(number, ir.Constant(_ADDRESS, 8)), part)
            switch = builder.switch(number, end)
            for case in known:
                block = builder.append_basic_block("case")
                switch.add_case(ir.Constant(_ADDRESS, reduce(lambda number, part: 8 * number + part, case)), block)
                builder.position_at_end(block)
                emit(builder, *case, *others)
                builder.branch(end)
            builder.position_at_end(end)

        return emit_cases

    return decorate


@_for_cases(product(range(HALF_BYTES + 1), range(1, MAX_ROWS + 1)))
def _emit_products(builder, kind, rows, keys, ahead, queries, vectors, out):  # type: ignore[no-untyped-def]
    """
    Products of up to :data:`MAX_ROWS` queries with 16 keys.

    Keys are :class:`Rows` of ``vectors`` x 16 channels in format ``kind``; those ``ahead`` bytes further are asked for
    from memory. Queries are float32. Writes 16 float32 for each query into a row of ``out``. 4-bit keys need an even
    number of vectors.
    """
    write = _Writer(builder)
    halves = [LOW_HALVES, HIGH_HALVES] if kind == HALF_BYTES else [kind]
    quarters = [cgutils.alloca_once(builder, FLOATS, size=4) for _ in range(rows)]
    loops = builder.udiv(vectors, ir.Constant(_ADDRESS, len(halves)))
    with write.loop(ir.Constant(_ADDRESS, 4)) as quad:
        first_key = builder.mul(quad, ir.Constant(_ADDRESS, 4))
        sums = [[write.variable() for _ in range(4)] for _ in range(rows)]
        with write.loop(loops) as index:
            for half, half_kind in enumerate(halves):
                position = builder.add(index, builder.mul(loops, ir.Constant(_ADDRESS, half)))
                query = [write.load(write.at(write.row(queries, row), (position, _VECTOR))) for row in range(rows)]
                for item in range(4):
                    row_address = write.row(keys, builder.add(first_key, ir.Constant(_ADDRESS, item)))
                    address = write.at(row_address, (index, LANES * ITEMSIZE[kind]))
                    key = write.load(address, half_kind)
                    if half == 0:
                        _emit_prefetch(builder, write.at(address, (ahead, 1)))
                    for row in range(rows):
                        write.add_product(sums[row][item], query[row], key)
        for row in range(rows):
            total = _emit_sums_of_four(builder, [builder.load(slot) for slot in sums[row]], 1)
            builder.store(total, builder.gep(quarters[row], [quad]))
    for row in range(rows):
        elements = [builder.gep(quarters[row], [ir.Constant(_ADDRESS, index)]) for index in range(4)]
        total = _emit_sums_of_four(builder, [builder.load(element) for element in elements], 4)
        emit_store(builder, write.row(out, row), total)


@_for_cases(
    case for case in product(range(HALF_BYTES + 1), range(1, MAX_ROWS + 1), (4, 2, 1)) if case[::2] != (HALF_BYTES, 4)
)
def _emit_add_values(builder, kind, rows, width, values, ahead, count, factors, low, high):  # type: ignore
    """
    ``sums = sums * factor + offset + weights @ values`` for up to :data:`MAX_ROWS` rows and ``width`` x 16 numbers.

    Values are ``count`` :class:`Rows` in format ``kind``, those ``ahead`` bytes further are asked for from memory;
    weights, sums, factors and offsets are float32. ``width`` is 4, 2 or 1. In 4 bits it counts bytes and is at most 2;
    their low halves are of the :class:`Part` ``low``, the others of ``high``, which other formats ignore.
    """
    write = _Writer(builder)
    # In 4 bits each byte holds two channels, half a row apart, which may be of two groups with weights of their own
    kinds = [LOW_HALVES, HIGH_HALVES] if kind == HALF_BYTES else [kind]
    parts = [cgutils.unpack_tuple(builder, part, 3) for part in (low, high)[: len(kinds)]]
    sums: dict[tuple[int, int, int], Any] = {}
    addresses = {}
    for part, (_, part_sums, offsets) in enumerate(parts):
        for row in range(rows):
            factor = emit_splat(builder, write.number(write.at(factors, (row, 4))))
            offset = emit_splat(builder, write.number(write.at(offsets, (row, 4))))
            for index in range(width):
                place = part, row, index
                addresses[place] = write.at(write.row(part_sums, row), (index, _VECTOR))
                start = emit_multiply_add(builder, write.load(addresses[place]), factor, offset)
                sums[place] = write.variable(start)
    with write.loop(count) as item:
        base = write.row(values, item)
        stored = [write.at(base, (index, LANES * ITEMSIZE[kind])) for index in range(width)]
        for address in stored[:: max(1, 4 // ITEMSIZE[kind])]:
            _emit_prefetch(builder, write.at(address, (ahead, 1)))
        for part, (weights, _, _) in enumerate(parts):
            value = [write.load(address, kinds[part]) for address in stored]
            for row in range(rows):
                weight = emit_splat(builder, write.number(write.at(write.row(weights, row), (item, 4))))
                for index in range(width):
                    write.add_product(sums[part, row, index], weight, value[index])
    for place, address in addresses.items():
        emit_store(builder, address, builder.load(sums[place]))


_N = types.intp
products = function_of(types.void, (_N, _N, _ROWS, _N, _ROWS, _N, _ROWS), _emit_products)
add_values = function_of(types.void, (_N, _N, _N, _ROWS, _N, _N, _N, _PART, _PART), _emit_add_values)
