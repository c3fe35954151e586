"""What warps exchange over the transform codec, in the table of points before and after it is one; operands and factors
that a lane loads as products have them. All of it is assembly: without it numbers of other warps are at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..softmax import second_of
from ..tiles import lane_zeros

TILE_BYTES = tl.constexpr(512)  # of 16 rows and eight columns: four float32 a lane


@triton.constexpr_function
def table_bytes(entries, keys, values, warps, columns):
    """Return the bytes of the table: at least what warps exchange."""
    tiles = max(-(-keys.steps // warps), values.steps + 1) * warps
    return max(entries * 128, tiles * TILE_BYTES.value * columns // 8)


@triton.constexpr_function
def _table(size):
    """Return assembly that declares the table, and where a lane's replica of it, and its part of a tile, begin. It has
    no braces, so that the names hold for the whole kernel.
    """
    text = f".shared .align 128 .b8 kvcal_table[{size}]; mov.u32 $0, kvcal_table; .reg .b32 kvcal_bank, kvcal_tile;"
    text += " mov.u32 kvcal_bank, %laneid; mad.lo.u32 kvcal_tile, kvcal_bank, 16, $0;"
    return text + " mad.lo.u32 kvcal_bank, kvcal_bank, 4, $0;"


@triton.jit
def declare_table(zero, ENTRIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, NW: tl.constexpr,
                  N: tl.constexpr):
    """Declare the table of points, and return where it begins."""
    SIZE: tl.constexpr = table_bytes(ENTRIES, KEYS, VALUES, NW, N)
    return tl.inline_asm_elementwise(_table(SIZE), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _put():
    text = f"{{ .reg .b32 a; mad.lo.u32 a, $8, {TILE_BYTES.value}, kvcal_tile;"
    text += " st.shared.v4.f32 [a], {$4, $5, $6, $7};"
    return text + " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; } // kvcal_table"


@triton.constexpr_function
def _get():
    text = f"{{ .reg .b32 a; mad.lo.u32 a, $4, {TILE_BYTES.value}, kvcal_tile;"
    return text + " ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; } // kvcal_table"


@triton.jit
def put(x, tile, NW: tl.constexpr, N: tl.constexpr):
    """Store each warp's numbers [NW, 16, N] float32 as a tile, whose number is [NW]."""
    at = lane_zeros(NW, N) + (tile[:, None, None] * (N // 8) + tl.arange(0, N)[None, None, :] // 8)
    tl.inline_asm_elementwise(_put(), "=r,=r,=r,=r,f,f,f,f,r,r,r,r", [x, at], dtype=tl.int32, is_pure=False, pack=4)


@triton.jit
def get(tile, NW: tl.constexpr, N: tl.constexpr):
    """Load tiles [NW] that `put` has stored, behind a barrier."""
    at = lane_zeros(NW, N) + (tile[:, None, None] * (N // 8) + tl.arange(0, N)[None, None, :] // 8)
    return tl.inline_asm_elementwise(
        _get(), "=f,=f,=f,=f,r,r,r,r", [at], dtype=tl.float32, is_pure=False, pack=4
    )


@triton.constexpr_function
def _row_factors():
    return "ld.global.nc.f32 $0, [$4]; mov.f32 $1, $0; ld.global.nc.f32 $2, [$4+32]; mov.f32 $3, $2; // kvcal_matrix"


@triton.jit
def row_factors(p_factor, step, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Load 16 float32 for the rows of steps [NW]: [NW, 16, N], or [NW, 16, 1]."""
    row = tl.arange(0, 16)[None, :, None]
    if ASM:
        at = (p_factor + step[:, None, None] * 16 + row % 8).to(tl.int64) + lane_zeros(NW, N).to(tl.int64)
        factor = tl.inline_asm_elementwise(
            _row_factors(), "=&f,=&f,=&f,=&f,l,l,l,l", [at], dtype=tl.float32, is_pure=False, pack=4
        )
    else:
        factor = tl.load(p_factor + step[:, None, None] * 16 + row)
    return factor


@triton.constexpr_function
def _channel_pairs():
    text = "{ .reg .b16 h, k; .reg .b32 m; ld.global.nc.b32 m, [$4]; mov.b32 {h, k}, m; cvt.f32.f16 $0, h;"
    text += " cvt.f32.f16 $1, k; ld.global.nc.b32 m, [$4+32]; mov.b32 {h, k}, m; cvt.f32.f16 $2, h; cvt.f32.f16 $3, k;"
    return text + " } // kvcal_matrix"


@triton.jit
def channel_pairs(p, I: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Load float16 of channels of outputs' tile I, row by row the even and the odd one of a pair (`value_channels`):
    [NW, 16, N] float32, or [1, 16, N].
    """
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, N)[None, None, :]
    if ASM:
        at = (p + I * 32 + row % 8 * 2).to(tl.int64) + lane_zeros(NW, N).to(tl.int64)
        pairs = tl.inline_asm_elementwise(
            _channel_pairs(), "=&f,=&f,=&f,=&f,l,l,l,l", [at], dtype=tl.float32, is_pure=False, pack=4
        )
    else:
        pairs = tl.load(p + I * 32 + row * 2 + column % 2).to(tl.float32)
    return pairs


@triton.jit
def exchanged_operand(x, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Return float16 [NW, 16, N] as a second operand, neighbouring columns, which are of even and odd coordinates,
    exchanged.
    """
    if ASM:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $2, 0, 0x1032; movmatrix.sync.aligned.m8n8.trans.b16 $0, t;"
            " prmt.b32 t, $3, 0, 0x1032; movmatrix.sync.aligned.m8n8.trans.b16 $1, t; }",
            "=&r,=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )
        x = second_of(x, NW, N)
    else:
        even, odd = tl.split(tl.reshape(x, [NW, 16, N // 2, 2]))
        x = tl.reshape(tl.join(odd, even), [NW, 16, N])
    return x
