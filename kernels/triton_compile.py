"""Compile a Triton kernel ahead of time, without a GPU, and read what the machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_WARP = 32
_REGISTERS = 65536  # of an SM
_REGISTER_UNIT = 256  # registers are handed out to a warp in units of this size
_RESERVED_SHARED = 1024  # shared memory that the system takes of each block
# Capability: (threads of an SM, blocks of an SM, shared memory of an SM, shared memory of one block), in bytes
_LIMITS = {
    80: (2048, 32, 164 << 10, 163 << 10),
    86: (1536, 16, 100 << 10, 99 << 10),
    89: (1536, 24, 100 << 10, 99 << 10),
    90: (2048, 32, 228 << 10, 227 << 10),
}
CAPABILITIES = tuple(_LIMITS)
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Resources:
    """
    What one compiled kernel needs.

    Parameters
    ----------
    capability : int
        Compute capability it was compiled for: 80, 86, 89 or 90.
    num_warps : int
        Warps of a block.
    registers : int
        32-bit registers of a thread.
    stack : int
        Bytes of stack of a thread: above 0, registers were spilled or an array is indexed at run time.
    local_accesses : int
        Loads from and stores to local memory (LDL, STL) in the machine code.
    shared : int
        Bytes of shared memory of a block.
    sass : str
        The machine code.
    """

    capability: int
    num_warps: int
    registers: int
    stack: int
    local_accesses: int
    shared: int
    sass: str

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


def compile_kernel(
    kernel: Any, arguments: Mapping[str, Any], *, capability: int, num_warps: int, num_stages: int
) -> Resources:
    """
    Compile ``kernel`` as a launch with these arguments would.

    Parameters
    ----------
    kernel : triton.JITFunction
        The kernel, imported in a process without ``TRITON_INTERPRET``.
    arguments : Mapping[str, Any]
        Every parameter by its name. What a launch takes (a tensor on any device, an int, a float, a bool, None) is
        specialised by the launcher's rules: unless excluded by ``do_not_specialize``, a tensor's address and an int are
        known to be divisible by 16 where they are, and an int of 1 is a constant. A string names a type instead:
        ``"*bf16"``, ``"i32"``; with ``":16"`` after it, divisible by 16.
    capability : int
        80, 86, 89 or 90.
    num_warps, num_stages : int
        Options of the launch.

    Raises
    ------
    ValueError
        If an argument is missing or too many, or the capability is unknown.
    """
    if capability not in _LIMITS:
        raise ValueError(f"capability must be one of {', '.join(map(str, _LIMITS))}, got {capability}")
    names = [parameter.name for parameter in kernel.params]
    if set(names) != set(arguments):
        raise ValueError(f"{kernel.__name__} takes {', '.join(names)}; got {', '.join(arguments)}")
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind, divisible = ("constexpr", False) if parameter.is_constexpr else _kind(value, parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, _WARP),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    usage, sass = _read_cubin(compiled.asm["cubin"])
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump names no registers: {usage}")
    return Resources(
        capability=capability,
        num_warps=num_warps,
        registers=int(match[1]),
        stack=int(match[2]),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=compiled.metadata.shared,
        sass=sass,
    )


def _kind(value: Any, parameter: Any) -> tuple[str, bool]:
    """Type of an argument, and whether it is known to be divisible by 16."""
    if isinstance(value, str):
        kind, _, divisor = value.partition(":")
        return kind, divisor == "16"
    if value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return _POINTERS[value.dtype], aligned and not parameter.do_not_specialize
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, float):
        return "fp32", False
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    if parameter.do_not_specialize:
        return kind, False
    return ("constexpr", False) if value == 1 else (kind, value % 16 == 0)


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
