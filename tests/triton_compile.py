"""Compile Triton kernels ahead of time, without a GPU, and read what the machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
    sass: str  # the machine code

    @property
    def fits(self) -> bool:
        """Whether a block can be launched and keeps everything in registers."""
        return self.stack == 0 and self.local_accesses == 0 and self.blocks_per_sm > 0

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM holds at a time, by threads, registers and shared memory; 0 if it holds none."""
        threads, blocks, shared, shared_of_block = _LIMITS[self.capability]
        if self.shared > shared_of_block:
            return 0
        registers = -(-self.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT * self.num_warps
        return min(
            threads // (_WARP * self.num_warps),
            blocks,
            _REGISTERS // registers,
            shared // (self.shared + _RESERVED_SHARED),
        )

    def count(self, instruction: str) -> int:
        """Number of instructions in the machine code that begin with ``instruction``, such as ``"LDG.E.128"``."""
        return len(re.findall(rf"^\s*(?:/\*\w+\*/)?\s*(?:@!?\w+ )?{re.escape(instruction)}\b", self.sass, re.MULTILINE))

    def __str__(self) -> str:
        return (
            f"sm_{self.capability}: {self.registers} registers, {self.stack} bytes of stack, "
            f"{self.local_accesses} LDL/STL, {self.shared / 1024:.1f} KiB shared, {self.num_warps} warps, "
            f"{self.blocks_per_sm} blocks an SM"
        )


class _AbsentGpu:
    """In the place of a driver: kernels are specialised and compiled for its GPU, but can't be launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, _WARP)

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _absent_gpu(capability: int) -> Iterator[None]:
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_AbsentGpu(capability))
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
        usage, sass = _read_cubin(compiled.asm["cubin"])
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
        print(f"{self.kernel.__name__}: {resources}")
        assert resources.fits, resources
        return resources


def _read_cubin(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, as cuobjdump prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([_CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    return usage, sass
