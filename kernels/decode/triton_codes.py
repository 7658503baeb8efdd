# mypy: disable-error-code="no-untyped-def,assignment"
"""
Codes of 8 and 4 bits as operands of a matrix product, in about one instruction a code.

Codes are loaded as units of 16 bits, two codes of 8 bits or four of 4, since that is what can be transposed on the way
from shared memory to a matrix product. Part ``t`` of a tile of units is what bits ``t * bits`` to ``(t + 1) * bits``
hold: a matrix of half or a quarter of the channels. Products are made part by part.

An integer that is set into the lowest bits of a power of two, where these are worth 1, is added to it. What is added to
the codes in this way is an offset that the caller takes from the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Input: 2 units; output for each part: its 2 codes as 16-bit floats. Tests run these on all units.
KEY_CODES_8 = tl.constexpr(
    """{
    prmt.b32 $0, $2, 0x64646464, 0x4240;
    prmt.b32 $1, $2, 0x64646464, 0x4341;
    }"""
)
KEY_CODES_4 = tl.constexpr(
    """{
    .reg .b32 high;
    shr.u32 high, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x54005400, 0xea;
    lop3.b32 $2, high, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, high, 0x00f000f0, 0x54005400, 0xea;
    }"""
)
# bfloat16 has room for 7 of 8 bits: these give 128 + code without its highest bit, which decides how much is taken
VALUE_CODES_8 = tl.constexpr(
    """{
    .reg .b32 high, less, one;
    mov.b32 one, 0x3f803f80;
    shr.u32 high, $2, 8;
    lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 less, $2, 0x00800080, 0xc300c300, 0xae;
    fma.rn.bf16x2 $0, $0, one, less;
    lop3.b32 $1, high, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 less, high, 0x00800080, 0xc300c300, 0xae;
    fma.rn.bf16x2 $1, $1, one, less;
    }"""
)
VALUE_CODES_4 = tl.constexpr(
    """{
    .reg .b32 shifted;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.u32 shifted, $4, 4;
    lop3.b32 $1, shifted, 0x000f000f, 0x43004300, 0xea;
    shr.u32 shifted, $4, 8;
    lop3.b32 $2, shifted, 0x000f000f, 0x43004300, 0xea;
    shr.u32 shifted, $4, 12;
    lop3.b32 $3, shifted, 0x000f000f, 0x43004300, 0xea;
    }"""
)


@triton.jit
def channels(units, part: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Channel of each unit's part, as ``quantization.pack_codes`` places them."""
    if BITS == 8:
        return 2 * units + part
    else:
        return 2 * units + part // 2 + part % 2 * (D // 2)


@triton.jit
def center(BITS: tl.constexpr):
    """
    Code in the middle of all, to which scaled queries and weights are applied.

    They are rounded to 16 bits: the nearer to 0 what they multiply, the smaller the error. The rest,
    ``minimum + center * scale``, is multiplied in float32.
    """
    return 128.0 if BITS == 8 else 8.0


@triton.jit
def key_offset(part: tl.constexpr, BITS: tl.constexpr):
    """What :func:`key_codes` adds to the codes of a part."""
    return 64.0 if BITS == 4 and part % 2 == 1 else 1024.0


@triton.jit
def value_offset(BITS: tl.constexpr):
    """What :func:`value_codes` adds to the codes."""
    return 128.0 if BITS == 4 else -128.0


@triton.jit
def _wide_codes(units, part: tl.constexpr, BITS: tl.constexpr):
    return ((units.to(tl.uint16, bitcast=True) >> (part * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def key_codes(units, BITS: tl.constexpr, UPCAST: tl.constexpr):
    """Codes of each part plus :func:`key_offset`, in float16; the interpreter has no assembly: there in float32."""
    if UPCAST:
        parts = ()
        for part in tl.static_range(16 // BITS):
            parts = parts + (_wide_codes(units, part, BITS) + key_offset(part, BITS),)
        return parts
    elif BITS == 8:
        return tl.inline_asm_elementwise(
            KEY_CODES_8, "=&r,=&r,r", [units], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            KEY_CODES_4,
            "=&r,=&r,=&r,=&r,r",
            [units],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def value_codes(units, BITS: tl.constexpr, UPCAST: tl.constexpr):
    """Codes of each part plus :func:`value_offset`, in bfloat16, whose range no scaled weight leaves."""
    if UPCAST:
        parts = ()
        for part in tl.static_range(16 // BITS):
            parts = parts + (_wide_codes(units, part, BITS) + value_offset(BITS),)
        return parts
    elif BITS == 8:
        return tl.inline_asm_elementwise(
            VALUE_CODES_8, "=&r,=&r,r", [units], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            VALUE_CODES_4,
            "=&r,=&r,=&r,=&r,r",
            [units],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def halves(words):
    """The two float16 numbers that each 32-bit word holds, as float32."""
    words = words.to(tl.uint32, bitcast=True)
    low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)
