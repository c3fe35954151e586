"""Scores and values over the transform codec, its points and its decoder.

The query of a kv head meets the decoder's rows once: q' = B q, so that a score is norm * (points . q') + q . mean. The
last term is the same for all packed tokens: it is added to the maximum at the end. Outputs are added up in coordinates
and multiplied by the decoder when a program ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import lane_zeros
from .codes import key_numbers, value_numbers


@triton.jit
def points_of(p_table, ENTRIES: tl.constexpr):
    """Load ENTRIES pairs of float16, as `store_points` has them: 512 copies of them in turn, 16 bytes each."""
    p_pairs = p_table.to(tl.pointer_type(tl.int32))
    pairs = ()
    for first in tl.static_range(0, ENTRIES * 8, 512):
        i = tl.minimum(first + tl.arange(0, 512), ENTRIES * 8 - 1)
        pairs = pairs + (tl.load(p_pairs + (i >> 3)),)
    return pairs


@triton.jit
def store_points(base, pairs, ENTRIES: tl.constexpr):
    """Store ENTRIES pairs in the table that begins at `base`, each once for every bank, where all threads see them."""
    for first in tl.static_range(0, ENTRIES * 8, 512):
        i = tl.minimum(first + tl.arange(0, 512), ENTRIES * 8 - 1)
        tl.inline_asm_elementwise(
            "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;", "=r,r,r", [base + i * 16, pairs[first // 512]],
            dtype=tl.int32, is_pure=False, pack=1,
        )
    tl.debug_barrier()


@triton.jit
def matrix_tile(p_matrix, index, NW: tl.constexpr, ASM: tl.constexpr):
    """Load tiles `index` [NW] of 16 x 16 float16, one for each warp, that lie as a lane has them of a first operand,
    `launch.tiles_of`: [NW, 16, 16].
    """
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    lane = row % 8 * 4 + column % 8 // 2
    index = index[:, None, None]
    if ASM:
        at = (p_matrix + index * 256).to(tl.int64) + (lane + lane_zeros(NW)).to(tl.int64) * 16
        part = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; // kvcal_matrix", "=r,=r,=r,=r,l,l,l,l,l,l,l,l", [at],
            dtype=tl.float16, is_pure=False, pack=8,
        )
    else:
        at = lane * 8 + row // 8 * 2 + column // 8 * 4 + column % 2 + tl.zeros([NW, 16, 16], tl.int32)
        part = tl.load(p_matrix + index * 256 + at)
    return part


@triton.jit
def power(x, PEAK: tl.constexpr):
    """Return the power of two that brings a peak x >= 0 into [PEAK, 2 PEAK), and one over it."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 51 << 23)
    return (
        ((254 << 23) - exponent).to(tl.float32, bitcast=True) * PEAK,
        exponent.to(tl.float32, bitcast=True) * (1 / PEAK),
    )


@triton.jit
def scores_of(
    pointers, o_block, b_live, o_slot, q, p_table, KEYS: tl.constexpr, TABLES: tl.constexpr,
    PAGED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return scores of both halves of NW blocks, tokens in the order of `codes.key_numbers`; they lack keys' norms."""
    STEPS: tl.constexpr = KEYS.steps
    b_0 = tl.zeros([NW, 16, N], tl.float32)
    b_1 = b_0
    for i in tl.static_range(STEPS):
        first, second = key_numbers(pointers, o_block, b_live, o_slot, p_table, i, KEYS, TABLES, PAGED, NW, ASM)
        b_0 = tl.dot(first, q[i], b_0)
        b_1 = tl.dot(second, q[i], b_1)
    return b_0, b_1


@triton.jit
def add_values(
    pointers, o_block, b_live, o_slot, probabilities, acc, p_table, VALUES: tl.constexpr, BYTE: tl.constexpr,
    TABLES: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):
    """Return acc plus probabilities, four operands of 8 tokens, times values in coordinates."""
    STEPS: tl.constexpr = VALUES.steps
    outputs = ()
    for i in tl.static_range(STEPS):
        parts = value_numbers(pointers, o_block, b_live, o_slot, p_table, i, BYTE, VALUES, TABLES, PAGED, NW, ASM)
        b_acc = acc[i]
        for j in tl.static_range(4):
            b_acc = tl.dot(parts[j], probabilities[j], b_acc)
        outputs = outputs + (b_acc,)
    return outputs
