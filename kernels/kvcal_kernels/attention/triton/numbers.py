"""Numbers, constants and casts that every module of the attention kernel shares."""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import form
from ...triton import constexpr_function, half

TOKENS = tl.constexpr(32)  # a block
TILE = tl.constexpr(256)  # words of a tile: 16 x 16
LOW = tl.constexpr(-1e30)  # below every score; not infinity, whose differences are NaN
field_number, side_by_side = constexpr_function(form.field_number), constexpr_function(form.together)
half_tile_shift = constexpr_function(form.half_tile_shift)


@triton.constexpr_function
def word_type(width):
    """Return the integer type of so many float16."""
    return {4: tl.int64, 2: tl.int32, 1: tl.int16}[width]


@triton.jit
def four_floats(x, ASM: tl.constexpr):
    """Return the four float16 of an int64 as float32."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b, c, d;
            mov.b64 {a, b, c, d}, $4;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,l", [x], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )
    return (
        half(x, 0).to(tl.float32), half(x, 1).to(tl.float32), half(x, 2).to(tl.float32), half(x, 3).to(tl.float32)
    )


@triton.jit
def two_floats(x, ASM: tl.constexpr):
    """Return the two float16 of an int32 as float32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,r", [x], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )
    return half(x, 0).to(tl.float32), half(x, 1).to(tl.float32)


@triton.jit
def transposed(x, NW: tl.constexpr, N: tl.constexpr):
    """Return the transpose of the first N rows of [NW, ROWS, 16]: [NW, 16, N]. No number moves to another lane: a
    product's second operand lies in the lanes in this way.
    """
    if N == 8:
        x, _ = tl.split(tl.permute(tl.reshape(x, [NW, 2, 8, 16]), [0, 2, 3, 1]))
    return tl.permute(x, [0, 2, 1])


@triton.jit
def padded_rows(x, NW: tl.constexpr, N: tl.constexpr):
    """Return [NW, 16, 16], every row alike, as at least N rows."""
    if N == 32:
        x = tl.reshape(tl.broadcast_to(x[:, None, :, :], [NW, 2, 16, 16]), [NW, 32, 16])
    return x


@triton.jit
def cast(x, TYPE: tl.constexpr, ASM: tl.constexpr):
    """Round float32 to TYPE, to nearest, ties to even. The interpreter truncates bfloat16, so it is given what is
    exact.
    """
    if TYPE == tl.bfloat16 and not ASM:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def multiply_add(a, b, c, ASM: tl.constexpr):
    """Return c + a b: the interpreter's products of bfloat16 are wrong."""
    if ASM:
        return tl.dot(a, b, c)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")


@triton.jit
def zeros(COUNT: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Return a tuple of COUNT tensors [NW, 16, N] float32 of zeros."""
    acc = ()
    for _ in tl.static_range(COUNT):
        acc = acc + (tl.zeros([NW, 16, N], tl.float32),)
    return acc
