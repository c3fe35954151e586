"""Queries, scores, values and outputs over the transform codec.

The query of a kv head meets the decoder's rows once, each warp those of some steps: q' = B q, so that a score is norm *
(points . q') + q . mean. The last term is the same for all packed tokens: it is added to the maximum at the end.
Outputs are added up in coordinates and multiplied by the decoder when a program ends, with the mean as often as
probabilities add up to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..merge import over_warps
from ..numbers import zeros
from ..rotation import value_channels
from ..tiles import lane_zeros
from .codes import key_numbers, value_numbers


@triton.jit
def load_points(p_table, zero, ENTRIES: tl.constexpr):
    """Store ENTRIES pairs of float16 in shared memory, each once for every bank, where all threads see them: 16 bytes a
    thread at a time, all of a thread's pairs loaded before the first is stored.
    """
    base = tl.inline_asm_elementwise(
        _reserve(ENTRIES * 128), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    p_pairs = p_table.to(tl.pointer_type(tl.int32))
    pairs = ()
    for first in tl.static_range(0, ENTRIES * 8, 512):
        i = tl.minimum(first + tl.arange(0, 512), ENTRIES * 8 - 1)
        pairs = pairs + (tl.load(p_pairs + (i >> 3)),)
    for first in tl.static_range(0, ENTRIES * 8, 512):
        i = tl.minimum(first + tl.arange(0, 512), ENTRIES * 8 - 1)
        tl.inline_asm_elementwise(
            "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;", "=r,r,r", [base + i * 16, pairs[first // 512]],
            dtype=tl.int32, is_pure=False, pack=1,
        )
    tl.debug_barrier()


@triton.constexpr_function
def _reserve(size):
    """Return assembly that declares the table, and where a lane's replica of it begins. It has no braces, so that the
    names hold for the whole kernel.
    """
    table = f".shared .align 128 .b8 kvcal_table[{max(size, 128)}]; mov.u32 $0, kvcal_table;"  # signs alone need none
    return f"{table} .reg .b32 kvcal_bank; mov.u32 kvcal_bank, %laneid; mad.lo.u32 kvcal_bank, kvcal_bank, 4, $0;"


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
def _power(x, PEAK: tl.constexpr):
    """Return the power of two that brings a peak x >= 0 into [PEAK, 2 PEAK), and one over it."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 51 << 23)
    return (
        ((254 << 23) - exponent).to(tl.float32, bitcast=True) * PEAK,
        exponent.to(tl.float32, bitcast=True) * (1 / PEAK),
    )


@triton.jit
def _of_all_warps(x, NW: tl.constexpr, N: tl.constexpr):
    """Return the sum of a tensor [NW, 16, N] over warps, for each of them."""
    total = tl.reshape(over_warps(x[:, :, :, None, None], NW), [16, N])
    return tl.broadcast_to(total[None], [NW, 16, N])


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
    shares, b_peak = (), tl.zeros([NW, N], tl.float32)
    for i in tl.static_range(0, STEPS, NW):  # a step for each warp; behind the last one some have it once more
        step = tl.minimum(i + tl.arange(0, NW), STEPS - 1)
        b_c = tl.zeros([NW, 16, N], tl.float32)
        for j in tl.static_range(SLICES):
            b_c = tl.dot(matrix_tile(p_matrix, step * SLICES + j, NW, ASM), channels[j], b_c)
        b_c = b_c * tl.load(p_factor + step[:, None] * 16 + r[None, :])[:, :, None]
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_c), 1))
        shares = shares + (b_c,)
    b_peak = tl.broadcast_to(tl.max(b_peak, 0)[None, :], [NW, N])
    b_less, b_more = _power(b_peak, 16.0)
    q = ()
    for i in tl.static_range(STEPS):
        b_c = tl.where((tl.arange(0, NW) == i % NW)[:, None, None], shares[i // NW] * b_less[:, None, :], 0.0)
        q = q + (_of_all_warps(b_c, NW, N).to(tl.float16),)
    return q, b_more * b_up[None, :], tl.broadcast_to(b_mean[None, :], [NW, N])


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


@triton.jit
def _other_parity(x, NW: tl.constexpr, N: tl.constexpr):
    """Return columns of even and odd coordinates, which are neighbours, exchanged; x [NW, 16, N]."""
    even, odd = tl.split(tl.reshape(x, [NW, 16, N // 2, 2]))
    return tl.reshape(tl.join(odd, even), [NW, 16, N])


@triton.jit
def output_of(
    acc, b_m, b_l, b_mean, factor, p_matrix, p_factor, p_mean, VALUES: tl.constexpr, WIDE: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return outputs by channels, as `value_channels` lays pairs out, maxima and sums of each warp [NW, N]: their sum
    over warps is the program's, with one maximum. A warp rotates back the coordinates of one step, or of every NW-th,
    which it has of all warps; they are two float16, what is rounded and the rest of it.
    """
    STEPS: tl.constexpr = VALUES.steps
    ROUNDS: tl.constexpr = (STEPS + NW - 1) // NW
    r, column, warp = tl.arange(0, 16), tl.arange(0, N), tl.arange(0, NW)
    b_m = tl.max(b_m, 1)
    b_top = tl.broadcast_to(tl.max(b_m, 0)[None, :], [NW, N])
    fade = tl.exp2(b_m - b_top)
    b_l = tl.sum(b_l, 1) * fade
    b_m = b_top + b_mean * factor
    shares = zeros(ROUNDS, NW, N)
    for i in tl.static_range(STEPS):
        b_a = acc[i] * tl.load(p_factor + i * 16 + r)[None, :, None]
        b_a = _of_all_warps(b_a * fade[:, None, :], NW, N)
        next_shares = ()
        for k in tl.static_range(ROUNDS):
            next_shares = next_shares + (tl.where((warp + k * NW == i)[:, None, None], b_a, shares[k]),)
        shares = next_shares
    b_peak = tl.zeros([NW, N], tl.float32)
    for k in tl.static_range(ROUNDS):
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(shares[k]), 1))
    # a query row's two columns exchange places: both are scaled alike
    b_peak = tl.broadcast_to(tl.max(tl.reshape(b_peak, [NW, N // 2, 2]), 2)[:, :, None], [NW, N // 2, 2])
    b_peak = tl.reshape(b_peak, [NW, N])
    b_less, b_more = _power(b_peak, 64.0)
    parts = ()
    for k in tl.static_range(ROUNDS):
        b_a = shares[k] * b_less[:, None, :]
        b_high = b_a.to(tl.float16)
        b_low = (b_a - b_high.to(tl.float32)).to(tl.float16)
        parts = parts + (b_high, b_low, _other_parity(b_high, NW, N), _other_parity(b_low, NW, N))
    odd = (column % 2 == 1)[None, None, :]
    out = ()
    for i in tl.static_range(WIDE):
        b_even = tl.zeros([NW, 16, N], tl.float32)
        b_odd = b_even
        for j in tl.static_range(ROUNDS):
            step = tl.minimum(j * NW + warp, STEPS - 1)
            for k in tl.static_range(4):  # whether of odd coordinates, and whether to odd channels
                m = matrix_tile(p_matrix, (i * STEPS + step) * 4 + k, NW, ASM)
                if k % 2 == 0:
                    b_even = tl.dot(m, parts[j * 4 + k], tl.dot(m, parts[j * 4 + k + 1], b_even))
                else:
                    b_odd = tl.dot(m, parts[j * 4 + 3 - k], tl.dot(m, parts[j * 4 + 4 - k], b_odd))
        channel = value_channels(i, r[:, None], column[None, :] % 2, 1, False)
        mean = tl.load(p_mean + channel).to(tl.float32)
        out = out + (tl.where(odd, b_odd, b_even) * b_more[:, None, :] + mean[None] * b_l[:, None, :],)
    return out, b_m, b_l
