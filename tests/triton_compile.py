"""Compile Triton kernels ahead of time, without a GPU, and read what the machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_RUN = triton.JITFunction.run
_WARP = 32
_REGISTERS = 65536  # of an SM
_REGISTER_UNIT = 256  # registers are handed out to a warp in units of this size
_RESERVED_SHARED = 1024  # shared memory that the system takes of each block
# Capability: (threads of an SM, blocks of an SM, shared memory of an SM, shared memory of one block), in bytes
_LIMITS = {
    80: (2048, 32, 164 << 10, 163 << 10),
    86: (1536, 16, 100 << 10, 99 << 10),
    90: (2048, 32, 228 << 10, 227 << 10),
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

    capability: int
    num_warps: int
    registers: int  # of 32 bits, of a thread
    stack: int  # bytes of a thread: above 0, registers were spilled or an array is indexed at run time
    local_accesses: int  # loads from and stores to local memory (LDL, STL) in the machine code
    shared: int  # bytes of shared memory of a block
    sass: str = field(repr=False)  # the machine code

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM holds at a time, by threads, registers and shared memory; 0 if it holds none."""
        threads, blocks, shared, shared_of_block = _LIMITS[self.capability]
        if self.shared > shared_of_block:
            return 0
        by_threads, by_shared = threads // (_WARP * self.num_warps), shared // (self.shared + _RESERVED_SHARED)
        registers = -(-self.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT * self.num_warps
        return min(by_threads, blocks, _REGISTERS // registers, by_shared)

    def count(self, instruction: str) -> int:
        """Number of instructions in the machine code that begin with ``instruction``, such as ``"LDG.E.128"``."""
        return len(re.findall(rf"^\s*(?:/\*\w+\*/)?\s*(?:@!?\w+ )?{re.escape(instruction)}\b", self.sass, re.MULTILINE))


@contextmanager
def _absent_gpu(capability: int) -> Iterator[None]:
    """In the place of a driver: kernels are specialised and compiled for its GPU, but can't be launched."""
    before = triton.runtime.driver._active
    absent = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, _WARP),
        get_current_device=lambda: capability,  # kernels are kept by device
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(absent)
    try:
        yield
    finally:
        triton.runtime.driver.set_active(before)


@dataclass(frozen=True)
class Launch:
    """A kernel, imported in a process without ``TRITON_INTERPRET``, and what it was launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    guarded: bool  # whether its device was made the current one

    def __getitem__(self, name: str) -> Any:
        """An argument by its name."""
        return (dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | self.keywords)[name]

    @property
    def specialization(self) -> Any:
        """What is compiled anew when it changes: types, constants, and what is known of divisibility."""
        with _absent_gpu(90):
            *_, binder = self.kernel.device_caches[90]
            return binder(*self.arguments, **self.keywords)[1:]

    def compile(self, capability: int) -> Resources:
        """Compile as the launch would on a GPU of this capability, where it must fit."""
        with _absent_gpu(capability):
            compiled = _RUN(self.kernel, *self.arguments, grid=None, warmup=True, **self.keywords)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage, sass = (
                subprocess.run([_CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
                for flag in ("-res-usage", "-sass")
            )
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        resources = Resources(
            capability=capability,
            num_warps=compiled.metadata.num_warps,
            registers=registers,
            stack=stack,
            local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
            shared=compiled.metadata.shared,
            sass=sass,
        )
        print(self.kernel.__name__, resources, "blocks of an SM:", resources.blocks_per_sm)
        assert resources.stack == resources.local_accesses == 0 < resources.blocks_per_sm, resources
        return resources
