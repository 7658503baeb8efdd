"""
What is known of a decode step on the CPU: its record, filled by the host and read by all threads, and what these keep.

Addresses and steps are in bytes. Arrays of working memory are float32 [rows, channels], their rows with room for one
vector more than they need.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from ..simd.formats import Rows
from ..simd.products import MAX_ROWS
from ..simd.threads import Counters, integers, record_at
from ..simd.vectors import LANES
from ..storage.quantization import KEY_BLOCK

BLOCK = KEY_BLOCK  # keys that are handled together; a key block's scales hold for one of them
ROW_BLOCK = 64  # query rows of a segment that are handled together
VECTOR = 4 * LANES
BLOCK_ROW = 4 * BLOCK


class Packed(ctypes.Structure):
    """Stored rows in one of the formats of :mod:`..simd.formats`; of quantised ones, float16 scales and minima."""

    __slots__ = ()
    _fields_ = integers("address step kind scale minimum")


class Dense(ctypes.Structure):
    """Keys or values of the tail, [batch row, KV head, token], or its mask, [batch row, head, query, token]."""

    __slots__ = ()
    _fields_ = integers("address row head query token")


def scratch_sizes(key_row: int, value_row: int, groups: int) -> dict[str, int]:
    """Bytes of a thread's float32 arrays; ``key_row`` and ``value_row`` are those of a row of channels."""
    return {
        "biases": 4 * ROW_BLOCK,  # [rows], products of queries with the minima of quantised keys
        "factors": VECTOR,  # [rows], of what was summed before a block
        "offsets": 2 * VECTOR,  # [2, rows], products of weights with the minima of quantised values, in two groups
        "logits": MAX_ROWS * BLOCK_ROW,  # [rows, keys], replaced by weights
        "folded_weights": 2 * MAX_ROWS * BLOCK_ROW,  # [2, rows, keys], weights times scales of values, in two groups
        "key_scale": key_row,
        "key_minimum": key_row,
        "value_scale": groups * BLOCK_ROW,
        "value_minimum": groups * BLOCK_ROW,
        "unsorted": groups * BLOCK_ROW,  # [values, groups], either of these two as stored
        "queries": ROW_BLOCK * key_row,
        "folded_queries": ROW_BLOCK * key_row,  # queries times the scales of quantised keys
        "keys": BLOCK * key_row,
        "values": BLOCK * value_row,
    }


class Scratch(ctypes.Structure):
    """Where these arrays lie in a thread's working memory; the thread begins it with a record of their addresses."""

    __slots__ = ()
    _fields_ = integers(" ".join(scratch_sizes(0, 0, 0)))


class Job(ctypes.Structure):
    """
    What all threads know of a decode step.

    Items are numbered over blocks of query rows, and within such over stretches of the context, then of the tail. Each
    leaves a part: for every query row its sum of weighted values, then in one vector more its peak and sum of weights.
    Parts [segment, stretch of it, row] lie in the order in which they are merged.
    """

    __slots__ = ()
    _fields_ = [
        ("counters", Counters),
        *integers("stretches context_stretches tail_stretches tail_stretch_length"),
        *integers("segments num_kv_heads rows q_len"),
        *integers("key_dim value_dim value_groups key_row value_row"),  # *_row: bytes of a float32 row
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),  # 0 for none
        *[(name, Packed) for name in ("query", "key", "value")],
        *integers("key_blocks bounds cuts cut_offsets"),
        *[(name, Dense) for name in ("tail_key", "tail_value", "mask")],
        *integers("tail_length tail_kind"),
        ("places", Scratch),
        *integers("scratch scratch_size parts out lse"),
    ]


PLACES, SCRATCH_SIZE = Job.places.offset, ctypes.sizeof(Scratch)
job_at, scratch_at = record_at(Job), record_at(Scratch)


class Item(NamedTuple):
    """A block of query rows of a segment, and the stretch of stored keys and values that they attend to."""

    segment: int
    first_row: int
    rows: int
    first: int  # key of the segment, or of its tail
    length: int
    in_tail: bool
    key: Rows  # from the segment's first on
    key_kind: int
    value: Rows
    value_kind: int
    parts: Rows


class Block(NamedTuple):
    """Up to BLOCK keys and values as the products read them: in place, or widened; and the queries they meet."""

    first: int
    length: int
    key: Rows
    key_kind: int
    value: Rows
    value_kind: int
    queries: Rows
