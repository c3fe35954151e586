"""Tiles of packed words as operands of tensor cores, from shared memory or, without assembly, from global memory.

A tile is 16 x 16 words of 16 bits. `ldmatrix` gives each lane of a warp what it has of a product's first operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import TILE


@triton.jit
def blocks_at(i_head, b_block, capacity, EACH: tl.constexpr, PAGE: tl.constexpr):
    """Return where words or float16 of blocks [NW] begin, EACH of a block: [NW, 1]. PAGE: of `Side.page`; where it is
    not 0, b_block are pages and i_head is where a head begins in one.
    """
    if PAGE > 0:
        at = i_head + b_block.to(tl.int64)[:, None] * PAGE
    else:
        at = (i_head * capacity + b_block)[:, None] * EACH
    return at


@triton.jit
def word_offsets(b_at):
    """Return where the 16 x 16 words of a tile lie, [NW, 16, 16]; b_at [NW, 1] int64. Rows follow one another in
    memory, which Triton does not see: without the hint a warp loads four rows of each of four blocks, and their places
    share banks.
    """
    r = tl.arange(0, 16)
    return tl.max_contiguous(b_at[:, :, None] + (r[None, :, None] * 16 + r[None, None, :]), [1, 2, 16])


@triton.constexpr_function
def _matrix(byte):
    """Return assembly that loads a tile."""
    return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{byte}];"


@triton.constexpr_function
def ends_with_half(words):
    """Return whether a block's words end with half a tile."""
    return words % 256 > 0


@triton.constexpr_function
def _half_matrix(byte, further):
    """Return assembly that loads what `_matrix` gives of a tile of which there is half, as far as its fields count."""
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0, $1}}, [$4+{byte}];"
    return f"{load} shr.u32 $2, $0, {further}; shr.u32 $3, $1, {further};"


@triton.constexpr_function
def _upper_matrix(byte):
    """Return assembly that loads what `_matrix` gives of a tile's first 8 rows, and zeros for the others."""
    return f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0, $2}}, [$4+{byte}]; mov.b32 $1, 0; mov.b32 $3, 0;"


@triton.constexpr_function
def _half_units(byte):
    """Return assembly that loads what `_matrix` gives of a tile of units of which there is half: the lower half of each
    register is its own.
    """
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0, $1}}, [$4+{byte}];"
    return f"{load} prmt.b32 $2, $0, $0, 0x1032; prmt.b32 $3, $1, $1, 0x1032;"


@triton.jit
def lane_zeros(NW: tl.constexpr, N: tl.constexpr = 16, ROWS: tl.constexpr = 16):
    """Return zeros int32 [NW, ROWS, N] in the layout of a product, in which a lane has of a tile what it has of a first
    operand.
    """
    return tl.dot(tl.zeros([NW, ROWS, 16], tl.float16), tl.zeros([NW, 16, N], tl.float16)).to(tl.int32)


@triton.jit
def interleaved_row(row):
    """Return rows 0, 4, 1, 5, 2, 6, 3, 7 of each eight. Scores in this order are, once transposed, what `by_parity`
    needs.
    """
    return row & 8 | row >> 1 & 3 | (row & 1) << 2


@triton.jit
def tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load tile U of NW blocks, [NW, 16, 16] int16: words that begin at byte BYTE of a slot of the ring, `ring` [NW, 1]
    int32, with MIXED in the row order of `interleaved_row`; or in memory at b_at [NW, 1] int64.
    """
    r = tl.arange(0, 16)
    if ASM:
        lane = r[None, :, None] % 8 * 4 + r[None, None, :] % 8 // 2 + lane_zeros(NW)
        row = interleaved_row(lane & 15) if MIXED else lane & 15
        at = ring[:, :, None] + (row * 32 + ((lane >> 4) ^ (row >> 2 & 1)) * 16)
        w = tl.inline_asm_elementwise(
            _matrix(BYTE + U * 512), "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at], dtype=tl.int16, is_pure=False, pack=8
        )
    else:
        w = tl.load(p_words + word_offsets(b_at) + U * TILE, mask=b_live[:, :, None], other=0)
    return w


@triton.jit
def half_row_addresses(ring, MIXED: tl.constexpr, NW: tl.constexpr):
    """Return where a lane's row of half a tile lies in a slot of the ring: `_copies` swaps halves of 32 bytes, two rows
    here.
    """
    r = tl.arange(0, 16)
    lane = r[None, :, None] % 8 * 4 + r[None, None, :] % 8 // 2 + lane_zeros(NW)
    row = interleaved_row(lane & 15) if MIXED else lane & 15
    return ring[:, :, None] + (row ^ row >> 3) * 16


@triton.jit
def half_tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, FURTHER: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load a `tile` of which there is half: columns from 8 on lie FURTHER bits beyond the others. Bits of no field may
    be anything.
    """
    if ASM:
        w = tl.inline_asm_elementwise(
            _half_matrix(BYTE + U * 512, FURTHER), "=&r,=&r,=r,=r,r,r,r,r,r,r,r,r",
            [half_row_addresses(ring, False, NW)], dtype=tl.int16, is_pure=False, pack=8,
        )
    else:
        r = tl.arange(0, 16)
        # two loads: a shift that depends on the column keeps Triton from the layout that a product wants
        p = p_words + b_at[:, :, None] + (U * TILE + r[None, :, None] * 8 + r[None, None, :] % 8)
        first = r[None, None, :] < 8
        w = tl.load(p, mask=b_live[:, :, None] & first, other=0)
        w = w | tl.load(p, mask=b_live[:, :, None] & ~first, other=0) >> FURTHER
    return w


@triton.jit
def half_unit_tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load a `tile` of units of which there is half a tile: what is a unit's own is its lower half, not rotated."""
    if ASM:
        w = tl.inline_asm_elementwise(
            _half_units(BYTE + U * 512), "=&r,=&r,=r,=r,r,r,r,r,r,r,r,r", [half_row_addresses(ring, MIXED, NW)],
            dtype=tl.int16, is_pure=False, pack=8,
        )
    else:
        r = tl.arange(0, 16)
        column = r % 8 ^ r // 8
        p = p_words + b_at[:, :, None] + (U * TILE + r[None, :, None] * 8 + column[None, None, :])
        w = tl.load(p, mask=b_live[:, :, None], other=0)
    return w


@triton.jit
def upper_tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load a `tile` of which there are the first 8 rows."""
    r = tl.arange(0, 16)
    if ASM:
        lane = r[None, :, None] % 8 * 4 + r[None, None, :] % 8 // 2 + lane_zeros(NW)
        row = interleaved_row(lane & 7) if MIXED else lane & 7
        at = ring[:, :, None] + (row * 32 + ((lane >> 3 & 1) ^ (row >> 2)) * 16)
        w = tl.inline_asm_elementwise(
            _upper_matrix(BYTE + U * 512), "=&r,=r,=&r,=r,r,r,r,r,r,r,r,r", [at], dtype=tl.int16, is_pure=False, pack=8
        )
    else:
        upper = b_live[:, :, None] & (r < 8)[None, :, None]
        w = tl.load(p_words + word_offsets(b_at) + U * TILE, mask=upper, other=0)
    return w
