"""Queries, scores, values and outputs over the transform codec.

The query of a kv head meets the decoder's rows once: q' = B q, so that a score is norm * (points . q') + q . mean. The
last term is the same for all packed tokens: it is added to the maximum at the end. Outputs are added up in coordinates
and multiplied by the decoder when a program ends, with the mean as often as probabilities add up to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rotation import value_channels
from ..softmax import by_parity, second_operand
from ..tiles import lane_zeros
from .codes import key_numbers, token_norms, value_numbers


@triton.jit
def load_points(p_table, zero, ENTRIES: tl.constexpr):
    """Store ENTRIES pairs of float16 in shared memory, each once for every bank, where all threads see them."""
    base = tl.inline_asm_elementwise(
        _reserve(ENTRIES * 128), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    p_pairs = p_table.to(tl.pointer_type(tl.int32))
    for first in range(0, ENTRIES * 32, 512):
        i = first + tl.arange(0, 512)
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [base + i * 4, tl.load(p_pairs + (i >> 5))],
            dtype=tl.int32, is_pure=False, pack=1,
        )
    tl.debug_barrier()


@triton.constexpr_function
def _reserve(size):
    """Return assembly that declares the table. It has no braces, so that the name holds for the whole kernel."""
    return f".shared .align 128 .b8 kvcal_table[{max(size, 128)}]; mov.u32 $0, kvcal_table;"  # signs alone need none


@triton.jit
def matrix_tile(p_matrix, index, NW: tl.constexpr, ASM: tl.constexpr):
    """Load tile `index` of 16 x 16 float16 that lie as a lane has them of a first operand, `launch.tiles_of`: [NW, 16,
    16].
    """
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    lane = row % 8 * 4 + column % 8 // 2
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
def _power(x, PEAK: tl.constexpr):
    """Return the power of two that brings a peak x >= 0 into [PEAK, 2 PEAK), and one over it."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 51 << 23)
    return (
        ((254 << 23) - exponent).to(tl.float32, bitcast=True) * PEAK,
        exponent.to(tl.float32, bitcast=True) * (1 / PEAK),
    )


@triton.jit
def query_of(
    p_q, p_matrix, p_factor, p_mean, o_q, b_row, b_down, b_up, KEYS: tl.constexpr, SLICES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return queries in coordinates, a float16 [NW, 16, N] for each product; by what a row is larger [NW, N]; and its
    product with the mean [NW, N]. b_down, b_up [N]: of `powers`.
    """
    STEPS: tl.constexpr = KEYS.steps
    r = tl.arange(0, 16)
    channels, b_mean = (), tl.zeros([N], tl.float32)
    for i in tl.static_range(SLICES):
        b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0).to(tl.float32)
        b_mean += tl.sum(b_q * tl.load(p_mean + i * 16 + r).to(tl.float32)[:, None], 0)
        b_q = (b_q * b_down[None, :]).to(tl.float16)
        channels = channels + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
    wide, b_peak = (), tl.zeros([NW, N], tl.float32)
    for i in tl.static_range(STEPS):
        b_c = tl.zeros([NW, 16, N], tl.float32)
        for j in tl.static_range(SLICES):
            b_c = tl.dot(matrix_tile(p_matrix, i * SLICES + j, NW, ASM), channels[j], b_c)
        b_c = b_c * tl.load(p_factor + i * 16 + r)[None, :, None]
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_c), 1))
        wide = wide + (b_c,)
    b_less, b_more = _power(b_peak, 16.0)
    q = ()
    for i in tl.static_range(STEPS):
        q = q + ((wide[i] * b_less[:, None, :]).to(tl.float16),)
    return q, b_more * b_up[None, :], tl.broadcast_to(b_mean[None, :], [NW, N])


@triton.jit
def scores_of(
    pointers, p_norm, o_block, o_norm, b_live, ring, q, p_table, KEYS: tl.constexpr, TABLES: tl.constexpr,
    PAGED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return scores of both halves of NW blocks, tokens in the order of `codes.key_numbers`."""
    STEPS: tl.constexpr = KEYS.steps
    b_0 = tl.zeros([NW, 16, N], tl.float32)
    b_1 = b_0
    for i in tl.static_range(STEPS):
        first, second = key_numbers(pointers, o_block, b_live, ring, p_table, i, KEYS, TABLES, PAGED, NW, ASM)
        b_0 = tl.dot(first, q[i], b_0)
        b_1 = tl.dot(second, q[i], b_1)
    b_0 = b_0 * token_norms(p_norm, o_norm, b_live, ring, KEYS.norm_at, 0, NW, N, ASM)
    b_1 = b_1 * token_norms(p_norm, o_norm, b_live, ring, KEYS.norm_at, 1, NW, N, ASM)
    return b_0, b_1


@triton.jit
def add_values(
    pointers, p_norm, o_block, o_norm, b_live, ring, b_0, b_1, acc, p_table, VALUES: tl.constexpr, BYTE: tl.constexpr,
    TABLES: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return acc plus probabilities b_0, b_1 (float32, tokens in the order of keys) times values in coordinates."""
    STEPS: tl.constexpr = VALUES.steps
    NORMS: tl.constexpr = BYTE + VALUES.norm_at
    b_0 = (b_0 * token_norms(p_norm, o_norm, b_live, ring, NORMS, 0, NW, N, ASM)).to(tl.float16)
    b_1 = (b_1 * token_norms(p_norm, o_norm, b_live, ring, NORMS, 1, NW, N, ASM)).to(tl.float16)
    probabilities = by_parity(b_0, ASM, NW, N) + by_parity(b_1, ASM, NW, N)
    outputs = ()
    for i in tl.static_range(STEPS):
        parts = value_numbers(pointers, o_block, b_live, ring, p_table, i, BYTE, VALUES, TABLES, PAGED, NW, ASM)
        b_acc = acc[i]
        for j in tl.static_range(4):
            b_acc = tl.dot(parts[j], probabilities[j], b_acc)
        outputs = outputs + (b_acc,)
    return outputs


@triton.jit
def _other_parity(x, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Return columns of even and odd coordinates, which are neighbours, exchanged; x float16 [NW, 16, N]."""
    if ASM:  # a lane has both: Triton's own way ends in another layout
        x = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1032;", "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        even, odd = tl.split(tl.reshape(x, [NW, 16, N // 2, 2]))
        x = tl.reshape(tl.join(odd, even), [NW, 16, N])
    return x


@triton.jit
def output_of(
    acc, b_m, b_l, b_mean, factor, p_matrix, p_factor, p_mean, VALUES: tl.constexpr, WIDE: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return outputs by channels, as `value_channels` lays pairs out, maxima and sums of each warp [NW, N]. Outputs in
    coordinates are two float16, what is rounded and the rest of it.
    """
    STEPS: tl.constexpr = VALUES.steps
    r, column = tl.arange(0, 16), tl.arange(0, N)
    b_m = tl.max(b_m, 1) + b_mean * factor
    b_l = tl.sum(b_l, 1)
    b_peak = tl.zeros([NW, N], tl.float32)
    scaled = ()
    for i in tl.static_range(STEPS):
        b_a = acc[i] * tl.load(p_factor + i * 16 + r)[None, :, None]
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_a), 1))
        scaled = scaled + (b_a,)
    # a query row's two columns exchange places: both are scaled alike
    b_peak = tl.broadcast_to(tl.max(tl.reshape(b_peak, [NW, N // 2, 2]), 2)[:, :, None], [NW, N // 2, 2])
    b_peak = tl.reshape(b_peak, [NW, N])
    b_less, b_more = _power(b_peak, 64.0)
    parts = ()
    for i in tl.static_range(STEPS):
        b_a = scaled[i] * b_less[:, None, :]
        b_high = b_a.to(tl.float16)
        b_low = (b_a - b_high.to(tl.float32)).to(tl.float16)
        parts = parts + (
            second_operand(b_high, NW, N, ASM), second_operand(b_low, NW, N, ASM),
            second_operand(_other_parity(b_high, NW, N, ASM), NW, N, ASM),
            second_operand(_other_parity(b_low, NW, N, ASM), NW, N, ASM),
        )
    odd = (column % 2 == 1)[None, None, :]
    out = ()
    for i in tl.static_range(WIDE):
        b_even = tl.zeros([NW, 16, N], tl.float32)
        b_odd = b_even
        for j in tl.static_range(STEPS):
            for k in tl.static_range(4):  # whether of odd coordinates, and whether to odd channels
                m = matrix_tile(p_matrix, (i * STEPS + j) * 4 + k, NW, ASM)
                if k % 2 == 0:
                    b_even = tl.dot(m, parts[j * 4 + k], tl.dot(m, parts[j * 4 + k + 1], b_even))
                else:
                    b_odd = tl.dot(m, parts[j * 4 + 3 - k], tl.dot(m, parts[j * 4 + 4 - k], b_odd))
        channel = value_channels(i, r[:, None], column[None, :] % 2, 1, False)
        mean = tl.load(p_mean + channel).to(tl.float32)
        out = out + (tl.where(odd, b_odd, b_even) * b_more[:, None, :] + mean[None] * b_l[:, None, :],)
    return out, b_m, b_l
