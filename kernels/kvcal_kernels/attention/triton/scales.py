"""Scales, zero points and norms from shared or global memory, in the layouts in which products take them."""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton import half
from .numbers import four_floats, padded_rows, side_by_side, transposed, two_floats, word_type
from .tiles import interleaved_row, lane_zeros


@triton.jit
def loaded_pairs(p, b_at, b_live, NW: tl.constexpr):
    """Load scales and zero points of 16 neighbours along the contracted dimension, [NW, 16] float16 each, stored as
    [8][scale, scale, zero, zero]: as a register of an operand holds them.
    """
    x = tl.load((p + b_at).to(tl.pointer_type(tl.int64)) + tl.arange(0, 8)[None, :], mask=b_live, other=0)
    low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
    scale = tl.reshape(tl.join(low.to(tl.int16), (low >> 16).to(tl.int16)), [NW, 16])
    zero = tl.reshape(tl.join(high.to(tl.int16), (high >> 16).to(tl.int16)), [NW, 16])
    return scale.to(tl.float16, bitcast=True), zero.to(tl.float16, bitcast=True)


@triton.constexpr_function
def _shared(bits, byte):
    """Return assembly that loads so many bits from shared memory, and its constraints."""
    return f"ld.shared.b{bits} $0, [$1+{byte}];", {64: "=l,r", 32: "=r,r", 16: "=h,r"}[bits]


@triton.constexpr_function
def _pair(byte):
    """Return assembly that loads scales and zero points of a lane's columns 2c, 2c + 1, 2c + 8, 2c + 9, for both of its
    rows.
    """
    return f"""{{ .reg .b32 a, b, c, d;
    ld.shared.v2.b32 {{a, b}}, [$8+{byte}]; ld.shared.v2.b32 {{c, d}}, [$8+{byte + 32}];
    mov.b32 $0, a; mov.b32 $1, a; mov.b32 $2, c; mov.b32 $3, c;
    mov.b32 $4, b; mov.b32 $5, b; mov.b32 $6, d; mov.b32 $7, d; }}"""


@triton.jit
def _from_shared(at, BITS: tl.constexpr, BYTE: tl.constexpr):
    """Load integers of so many bits at shared addresses `at` + BYTE."""
    TEXT: tl.constexpr = _shared(BITS, BYTE)
    if BITS == 64:
        x = tl.inline_asm_elementwise(TEXT[0], TEXT[1], [at], dtype=tl.int64, is_pure=False, pack=1)
    elif BITS == 32:
        x = tl.inline_asm_elementwise(TEXT[0], TEXT[1], [at], dtype=tl.int32, is_pure=False, pack=1)
    else:
        x = tl.inline_asm_elementwise(TEXT[0], TEXT[1], [at], dtype=tl.int16, is_pure=False, pack=1)
    return x


@triton.jit
def scale_columns(p, b_at, b_live, ring, BYTE: tl.constexpr, COUNT: tl.constexpr, ASM: tl.constexpr):
    """Load COUNT columns of float16 as float32 [NW, 16], stored [COUNT / w][16][w], w = side_by_side(COUNT), from byte
    BYTE of a slot of the ring on; or in memory at b_at [NW, 1] int64.
    """
    WIDTH: tl.constexpr = side_by_side(COUNT)
    r = tl.arange(0, 16)[None, :]
    columns = ()
    for i in tl.static_range(COUNT // WIDTH):
        if ASM:
            x = _from_shared(ring + r * (2 * WIDTH), 16 * WIDTH, BYTE + i * 32 * WIDTH)
        else:
            at = (p + b_at + i * 16 * WIDTH).to(tl.pointer_type(word_type(WIDTH))) + r
            x = tl.load(at, mask=b_live, other=0)
        if WIDTH == 4:
            columns = columns + four_floats(x, ASM)
        elif WIDTH == 2:
            columns = columns + two_floats(x, ASM)
        else:
            columns = columns + (x.to(tl.float16, bitcast=True).to(tl.float32),)
    return columns


@triton.jit
def scale_pairs(p, b_at, b_live, ring, BYTE: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Load scales and zero points of 16 neighbours along the contracted dimension, [NW, 16, 16] float16 each, every row
    alike, stored as [8][scale, scale, zero, zero].
    """
    r = tl.arange(0, 16)[None, None, :]
    if ASM:
        at = ring[:, :, None] + (r % 8 // 2 * 8 + lane_zeros(NW))
        scale, zero = tl.inline_asm_elementwise(
            _pair(BYTE), "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at],
            dtype=(tl.float16, tl.float16), is_pure=False, pack=8,
        )
    else:
        at = p + b_at[:, :, None] + (r // 2 * 4 + r % 2 + tl.zeros([NW, 16, 16], tl.int32))
        scale = tl.load(at, mask=b_live[:, :, None], other=0.0)
        zero = tl.load(at + 2, mask=b_live[:, :, None], other=0.0)
    return scale, zero


@triton.jit
def row_scales(p, b_at, b_live, ring, BYTE: tl.constexpr, ASM: tl.constexpr):
    """Load the scales of `scale_pairs` by rows: [NW, 16, 1] float16."""
    r = tl.arange(0, 16)[None, :]
    if ASM:
        scale = _from_shared(ring + (r // 2 * 8 + r % 2 * 2), 16, BYTE).to(tl.float16, bitcast=True)
    else:
        scale = tl.load(p + b_at + (r // 2 * 4 + r % 2), mask=b_live, other=0.0)
    return scale[:, :, None]


@triton.jit
def token_scales(
    p_scale, live, COUNT: tl.constexpr, SIDE: tl.constexpr
):
    """Load scales and zero points of a half block's tokens, group after group, [NW, 16, 1] float16 each; symmetric
    forms have scales instead of zero points. They are stored as `scale_columns` has them.
    """
    WIDTH: tl.constexpr = side_by_side(COUNT * SIDE.columns)
    kind: tl.constexpr = tl.int64 if WIDTH == 4 else tl.int32 if WIDTH == 2 else tl.int16
    r = tl.arange(0, 16)[None, :]
    column = ()
    for i in tl.static_range(COUNT * SIDE.columns // WIDTH):
        x = tl.load((p_scale + i * 16 * WIDTH).to(tl.pointer_type(kind)) + r, mask=live, other=0)
        for j in tl.static_range(WIDTH):
            column = column + (half(x, j)[:, :, None],)
    scale, zero = (), ()
    for g in tl.static_range(COUNT):
        scale = scale + (column[g * SIDE.columns],)
        zero = zero + (column[g * SIDE.columns + SIDE.mode],)
    return scale, zero


@triton.jit
def scaled_queries(q, scale, NW: tl.constexpr, N: tl.constexpr):
    """Return queries by rows [NW, 16 or 32, 16] times scales of channels, as a second operand [NW, 16, N]."""
    return transposed(q * padded_rows(scale, NW, N), NW, N)


@triton.constexpr_function
def _rows_of_halves(byte):
    """Return assembly for a lane's two rows of a product's result, from addresses of each number."""
    return f"""{{ .reg .b16 a, b;
    ld.shared.b16 a, [$4+{byte}]; ld.shared.b16 b, [$6+{byte}];
    cvt.f32.f16 $0, a; mov.b32 $1, $0; cvt.f32.f16 $2, b; mov.b32 $3, $2; }}"""


@triton.jit
def token_norms(
    p, b_at, b_live, ring, BYTE: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr
):
    """Load norms of 16 tokens, [NW, 16, N] float32 in the layout of a product, every column alike, from byte BYTE of a
    slot of the ring on; or [NW, 16, 1] in memory at b_at [NW, 1].
    """
    r = tl.arange(0, 16)[None, :]
    if ASM:
        row = (interleaved_row(r) if MIXED else r)[:, :, None]
        at = ring[:, :, None] + (row * 2 + lane_zeros(NW, N))
        norm = tl.inline_asm_elementwise(
            _rows_of_halves(BYTE), "=&f,=&f,=&f,=&f,r,r,r,r", [at], dtype=tl.float32, is_pure=False, pack=4
        )
    else:
        norm = tl.load(p + b_at + r, mask=b_live, other=0.0).to(tl.float32)[:, :, None]
    return norm
