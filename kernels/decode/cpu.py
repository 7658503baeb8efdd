"""
Decoding from ragged keys on any CPU: compiled by numba on the user's machine, no compiler needed there.

Work is cut into items of nearly equal size, whatever the lengths of the heads. Threads take the next item until none is
left, and whoever finishes the last one merges: which thread did what changes no bit of the result.
"""

from __future__ import annotations

from ctypes import sizeof
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch

from ..simd.formats import BFLOAT16, BYTES, FLOAT16, FLOAT32, HALF_BYTES, row_bytes
from ..simd.threads import run_on_threads
from ..storage.quantization import PackedKeys, PackedValues, QuantizedKeys, QuantizedValues
from ..storage.segments import Segments
from .cpu_items import decode_worker
from .cpu_job import BLOCK, ROW_BLOCK, Dense, Job, Packed, Scratch, scratch_sizes

_TAIL_STRETCH_LENGTH = 1024
_ITEMS_PER_THREAD = 3
_MIN_STRETCH_LENGTH = 256
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class _Cuts:
    """
    Stretches of the segments, nearly equal in length.

    Table [n, 3] of segment, first pair and pairs, and the index of each segment's first stretch; with their addresses,
    which cost microseconds to ask for.
    """

    def __init__(self, segments: Segments, pieces: int) -> None:
        size = max(_MIN_STRETCH_LENGTH, -(-segments.total // pieces))
        size = -(-size // BLOCK) * BLOCK
        table, offsets = [], [0]
        for segment, length in enumerate(segments.lengths.tolist()):
            table += [(segment, first, min(size, length - first)) for first in range(0, length, size)]
            offsets.append(len(table))
        self._table, self._offsets = np.array(table, np.int64), np.array(offsets, np.int64)
        self.count = len(table)
        self.addresses = (segments.cu_seqlens.data_ptr(), self._table.ctypes.data, self._offsets.ctypes.data)


def _stored(packed: PackedKeys | PackedValues) -> torch.Tensor:
    """The rows that are read: numbers or codes."""
    if isinstance(packed, torch.Tensor):
        return packed if packed.stride(1) == 1 else packed.contiguous()
    return packed.codes


def _packed(packed: PackedKeys | PackedValues, stored: torch.Tensor) -> Packed:
    address, step = stored.data_ptr(), stored.stride(0) * stored.itemsize
    if isinstance(packed, torch.Tensor):
        return Packed(address, step, _KINDS[packed.dtype])
    kind = BYTES if packed.bits == 8 else HALF_BYTES
    return Packed(address, step, kind, packed.scale.data_ptr(), packed.minimum.data_ptr())


def _tail(part: torch.Tensor) -> Dense:
    row, head, token, _ = (step * part.itemsize for step in part.stride())
    return Dense(part.data_ptr(), row, head, 0, token)


@lru_cache(maxsize=64)
def _scratch(key_row: int, value_row: int, groups: int) -> tuple[Scratch, int]:
    """Where the arrays lie in a thread's working memory, and its size."""
    *places, size = accumulate(scratch_sizes(key_row, value_row, groups).values(), initial=sizeof(Scratch))
    return Scratch(*places), size


def decode_attention(
    query: torch.Tensor,
    packed_key: PackedKeys,
    packed_value: PackedValues,
    segments: Segments,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
    tail_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    All cores; float32, bfloat16, float16 and quantised storage, any number of queries, the tail taken along.

    See :func:`kvzip_press.kernels.api.decode_attention`. The working memory depends on the number of queries and
    threads, not on the length of the context.
    """
    batch_size, num_heads, q_len, key_dim = query.shape
    value_dim, num_segments = packed_value.shape[1], len(segments)
    rows = batch_size * num_heads // num_segments * q_len
    row_blocks = -(-rows // ROW_BLOCK)
    threads = torch.get_num_threads()
    pieces = -(-threads * _ITEMS_PER_THREAD // row_blocks)
    cuts = segments.derived(("cpu", pieces), lambda: _Cuts(segments, pieces))
    query, keys, values = query.contiguous(), _stored(packed_key), _stored(packed_value)

    job = Job(segments=num_segments, num_kv_heads=num_segments // batch_size, rows=rows, q_len=q_len)
    job.key_dim, job.value_dim, job.value_groups = key_dim, value_dim, 1
    job.key_row, job.value_row = row_bytes(key_dim), row_bytes(value_dim)
    job.scale, job.softcap = softmax_scale, softcap or 0.0
    job.bounds, job.cuts, job.cut_offsets = cuts.addresses
    job.query = Packed(query.data_ptr(), key_dim * query.itemsize, _KINDS[query.dtype])
    job.key, job.value = _packed(packed_key, keys), _packed(packed_value, values)
    if isinstance(packed_key, QuantizedKeys):
        job.key_blocks = packed_key.block_offsets.data_ptr()
    if isinstance(packed_value, QuantizedValues):
        job.value_groups = packed_value.scale.shape[1]
    if tail is not None and tail[0].shape[2] > 0:
        tail_key, tail_value = (part if part.stride(3) == 1 else part.contiguous() for part in tail)
        length = job.tail_length = tail_key.shape[2]
        job.tail_kind = _KINDS[tail_key.dtype]
        job.tail_key, job.tail_value = _tail(tail_key), _tail(tail_value)
        job.tail_stretch_length = _TAIL_STRETCH_LENGTH if row_blocks < threads else length
        job.tail_stretches = -(-length // job.tail_stretch_length)
        if tail_mask is not None:
            visible = tail_mask.expand(batch_size, num_heads, q_len, length)
            job.mask = Dense(visible.data_ptr(), *visible.stride())
    job.context_stretches = cuts.count
    job.stretches = cuts.count + num_segments * job.tail_stretches
    empty = partial(torch.empty, dtype=torch.float32, device=query.device)
    out, lse = empty(batch_size, num_heads, q_len, value_dim), empty(batch_size, num_heads, q_len)
    if job.stretches == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    job.counters.items = job.stretches * row_blocks
    threads = min(threads, job.counters.items)
    part_bytes = job.stretches * rows * job.value_row
    job.places, job.scratch_size = _scratch(job.key_row, job.value_row, job.value_groups)
    memory = empty((part_bytes + threads * job.scratch_size) // 4)
    job.parts, job.scratch = memory.data_ptr(), memory.data_ptr() + part_bytes
    job.out, job.lse = out.data_ptr(), lse.data_ptr()
    run_on_threads(decode_worker, job, threads)
    return out, lse
