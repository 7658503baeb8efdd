"""
Decoding from ragged keys on any CPU: compiled by numba on the user's machine, no compiler needed there.

Work is cut into items of nearly equal size, whatever the lengths of the heads. Threads take the next item until none is
left, and whoever finishes the last one merges: which thread did what changes no bit of the result.
"""

from __future__ import annotations

from ctypes import sizeof
from functools import lru_cache
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


# Records are filled where they lie: to make one and copy it costs more than its fields do. What they point to, which
# may be a copy, is returned to be kept alive
def _fill_packed(record: Packed, packed: PackedKeys | PackedValues) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        stored = packed if packed.stride(1) == 1 else packed.contiguous()
        record.kind = _KINDS[packed.dtype]
    else:
        stored = packed.codes
        record.kind = BYTES if packed.bits == 8 else HALF_BYTES
        record.scale, record.minimum = packed.scale.data_ptr(), packed.minimum.data_ptr()
    record.address, record.step = stored.data_ptr(), stored.stride(0) * stored.itemsize
    return stored


def _fill_tail(record: Dense, part: torch.Tensor) -> torch.Tensor:
    part = part if part.stride(3) == 1 else part.contiguous()
    itemsize, (row, head, token, _) = part.itemsize, part.stride()
    record.address, record.row, record.head = part.data_ptr(), row * itemsize, head * itemsize
    record.token = token * itemsize
    return part


@lru_cache(maxsize=64)
def _job_of(key_dim: int, value_dim: int, groups: int) -> Job:
    """What a job says of sizes alone; to be copied."""
    key_row, value_row = row_bytes(key_dim), row_bytes(value_dim)
    job = Job(key_dim=key_dim, value_dim=value_dim, value_groups=groups, key_row=key_row, value_row=value_row)
    *places, job.scratch_size = accumulate(scratch_sizes(key_row, value_row, groups).values(), initial=sizeof(Scratch))
    job.places = Scratch(*places)
    return job


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
    groups = packed_value.scale.shape[1] if isinstance(packed_value, QuantizedValues) else 1

    job = Job.from_buffer_copy(_job_of(key_dim, value_dim, groups))
    job.segments, job.num_kv_heads, job.rows, job.q_len = num_segments, num_segments // batch_size, rows, q_len
    job.scale, job.softcap = softmax_scale, softcap or 0.0
    job.bounds, job.cuts, job.cut_offsets = cuts.addresses
    query = query.contiguous()
    queries = job.query
    queries.address, queries.step, queries.kind = query.data_ptr(), key_dim * query.itemsize, _KINDS[query.dtype]
    alive = [_fill_packed(job.key, packed_key), _fill_packed(job.value, packed_value)]
    if isinstance(packed_key, QuantizedKeys):
        job.key_blocks = packed_key.block_offsets.data_ptr()
    stretches = job.context_stretches = cuts.count
    if tail is not None and tail[0].shape[2] > 0:
        alive += [_fill_tail(job.tail_key, tail[0]), _fill_tail(job.tail_value, tail[1])]
        length = job.tail_length = tail[0].shape[2]
        job.tail_kind = _KINDS[tail[0].dtype]
        stretch = job.tail_stretch_length = _TAIL_STRETCH_LENGTH if row_blocks < threads else length
        job.tail_stretches = -(-length // stretch)
        stretches += num_segments * job.tail_stretches
        if tail_mask is not None:
            visible = tail_mask.expand(batch_size, num_heads, q_len, length)
            mask = job.mask
            mask.address, (mask.row, mask.head, mask.query, mask.token) = visible.data_ptr(), visible.stride()
    job.stretches = stretches
    out = query.new_empty(batch_size, num_heads, q_len, value_dim, dtype=torch.float32)
    lse = out.new_empty(batch_size, num_heads, q_len)
    if stretches == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    items = job.counters.items = stretches * row_blocks
    threads = min(threads, items)
    part_bytes = stretches * rows * job.value_row
    memory = out.new_empty((part_bytes + threads * job.scratch_size) // 4)
    job.parts, job.out, job.lse = memory.data_ptr(), out.data_ptr(), lse.data_ptr()
    job.scratch = job.parts + part_bytes
    run_on_threads(decode_worker, job, threads)
    return out, lse
