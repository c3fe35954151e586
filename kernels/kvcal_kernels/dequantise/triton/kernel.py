"""`dequantise` of reference.py for NVIDIA GPUs: one kernel for keys or values of a layer.

A program makes BM tokens of BN channels. Its accumulator begins as Q^-1(codes): grid points, read by code, times a
matrix of +1 and -1 on tensor cores (the rotation of BN channels with the signs in it), times the norm, plus the bias;
then come the predictor's products. So rotating costs BN / Cin of the predictor's work, nothing is written in between,
and the predictor's weights stay those of the bundle. A rotation of more than BN channels is a sum of width / BN blocks'
points with signs of the small Hadamard matrix, then the same product: it needs every block's codes once a program,
which is less than a pass over the tokens to rotate them. Rotating the weights offline instead (the sum then happens in
the rotated basis) saves the small product, but keys must come back before RoPE, which takes it again or, over the whole
token, another pass.

For RoPE the columns of weights, bias and matrix are laid so that the channels of a pair are neighbours: both are then
in one thread's registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...attention.triton.numbers import cast, multiply_add
from ...triton import half
from .points import fields, points_of


@triton.jit
def _parity(x):
    x = x ^ (x >> 8)
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    return (x ^ (x >> 1)) & 1


@triton.jit
def _multiply(p_x, p_weight, o_row, b_live, columns, b_inside, acc, s_head, first, steps,
              H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, FULL: tl.constexpr,
              STAGES: tl.constexpr, ASM: tl.constexpr):
    """Return acc plus one input's part of the prediction; `first`: its first row of the weights."""
    k = tl.arange(0, BK)
    for step in tl.range(0, steps, num_stages=STAGES):  # known at compile time, all would be unrolled
        head, start = step * BK // D, tl.multiple_of(step * BK % D, 16)
        p_a = p_x + head * s_head + (o_row[:, None] + (start + k)[None, :])
        p_b = p_weight + (first + step * BK + k)[:, None] * C + columns[None, :]
        if FULL:
            a, b = tl.load(p_a), tl.load(p_b)
        else:
            a = tl.load(p_a, mask=b_live[:, None], other=0.0)
            b = tl.load(p_b, mask=b_inside[None, :], other=0.0)
        acc = multiply_add(a, b, acc, ASM)
    return acc


@triton.jit
def _store_rotated(
    p_out, p_rotated, p_table, acc, o_out, o_rotation, b_live, i_n, s_head,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):
    """Store BM rows as they are, and rotated by RoPE."""
    TYPE: tl.constexpr = p_out.dtype.element_ty
    low, high = tl.split(tl.reshape(acc, [BM, BN // 2, 2]))
    low, high = cast(low, TYPE, ASM), cast(high, TYPE, ASM)  # half the registers, and what a model would rotate
    pair = i_n * (BN // 2) + tl.arange(0, BN // 2)
    i = pair % (D // 2)
    rotates = i < R // 2
    channel = tl.where(rotates, i, R // 2 + i)
    apart = tl.where(rotates, R // 2, (D - R) // 2)
    b_all = b_live[:, None] & (pair < H * D // 2)[None, :]
    o_low = o_out[:, None] + ((pair // (D // 2)).to(tl.int64) * s_head + channel)[None, :]
    o_high = o_low + apart[None, :]
    tl.store(p_out + o_low, low, mask=b_all)
    tl.store(p_out + o_high, high, mask=b_all)
    o_rotation = o_rotation[:, None] + i[None, :]
    b_both = tl.load(p_table + o_rotation, mask=b_live[:, None] & rotates[None, :], other=0x3C00)  # cosine 1, sine 0
    b_cos, b_sin = half(b_both, 0).to(tl.float32), half(b_both, 1).to(tl.float32)
    low, high = low.to(tl.float32), high.to(tl.float32)
    tl.store(p_rotated + o_low, cast(low * b_cos - high * b_sin, TYPE, ASM), mask=b_all)
    tl.store(p_rotated + o_high, cast(high * b_cos + low * b_sin, TYPE, ASM), mask=b_all)


@triton.jit
def _places_of(i_m, rows, tokens, s_code_row, CODES: tl.constexpr, BM: tl.constexpr):
    """Return for a tile of tokens each row's batch row and token; then where its codes begin, their number within a
    run, and whether there are any, word by word where values are read so.
    """
    PER: tl.constexpr = fields(CODES.bits, CODES.count)
    RUNS: tl.constexpr = CODES.dim // CODES.vector * CODES.bytes  # bytes of a block of values
    b_row = i_m * BM + tl.arange(0, BM)
    b_live = b_row < rows
    b_batch = (b_row // tokens).to(tl.int64)
    if CODES.wordwise and not CODES.key:  # rows in the order of words and their fields
        WORDS: tl.constexpr = CODES.block // PER
        b_token = b_row % tokens
        b_word = b_token // PER
        b_token = b_word // WORDS * CODES.block + b_token % PER * WORDS + b_word % WORDS
        o_word = i_m * (BM // PER) + tl.arange(0, BM // PER)
        b_some = o_word * PER < rows
        b_word = o_word % (tokens // PER)
        b_place = b_word % WORDS
        o_code = (o_word // (tokens // PER)).to(tl.int64) * s_code_row + b_word // WORDS * RUNS
    else:
        b_token = b_row % tokens
        b_some = b_live
        b_place = b_token % CODES.block
        if CODES.key:
            o_code = b_batch * s_code_row + b_token * CODES.bytes
        else:
            o_code = b_batch * s_code_row + b_token // CODES.block * RUNS
    return b_live, b_batch, b_token, tl.where(b_some, o_code, 0), b_place, b_some


@triton.jit
def _decoded(
    p_codes, p_grid, p_matrix, o_code, b_place, b_some, s_code_head, i_n, CODES: tl.constexpr, INPUTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):
    """Return Q^-1(codes) without the norm: [BM, BN] float32."""
    TILES: tl.constexpr = triton.cdiv(CODES.heads * CODES.dim, BN)
    MIX: tl.constexpr = CODES.width // BN if CODES.width > BN else 1
    base, i_mix = 0 if CODES.dense else i_n // MIX * MIX, i_n % MIX
    points = points_of(p_codes, p_grid, o_code, b_place, b_some, base * BN, s_code_head, CODES, BM, BN)
    # without a predictor, whose rounding hides it, the sum of 8 points is not rounded to float16, which would cost more
    # than rounding the output (docs/benchmarks/dequantise.md)
    WHOLE: tl.constexpr = MIX > 1 and INPUTS == 0 and not CODES.dense
    if WHOLE:
        points = points.to(tl.float32)
    for other in tl.range(1, 1 if CODES.dense else MIX):
        more = points_of(p_codes, p_grid, o_code, b_place, b_some, (base + other) * BN, s_code_head, CODES, BM, BN)
        points += more.to(points.dtype) * (1 - 2 * _parity(i_mix & other)).to(points.dtype)
    o_matrix = (i_n * BN + tl.arange(0, BN))[:, None] * BN + tl.arange(0, BN)[None, :]
    if CODES.dense:
        o_matrix = o_matrix + i_n * (BN * BN * (TILES - 1))
    matrix = tl.load(p_matrix + o_matrix)
    acc = multiply_add(points.to(tl.float16), matrix, tl.zeros([BM, BN], tl.float32), ASM)
    if CODES.dense:
        for other in tl.range(1, TILES, num_stages=1):  # matrices in flight would not leave the predictor its memory
            points = points_of(p_codes, p_grid, o_code, b_place, b_some, other * BN, s_code_head, CODES, BM, BN)
            matrix = tl.load(p_matrix + o_matrix + other * (BN * BN))
            acc = multiply_add(points.to(tl.float16), matrix, acc, ASM)
    if WHOLE:
        acc = multiply_add((points - points.to(tl.float16).to(tl.float32)).to(tl.float16), matrix, acc, ASM)
    return acc


@triton.jit(do_not_specialize=["rows", "tokens", "steps"])
def dequantise_kernel(
    p_out, p_rotated, p_codes, p_norm, p_grid, p_matrix, p_factor, p_bias, p_weight, p_x0, p_x1, p_x2, p_x3, p_table,
    rows, tokens, steps, s_code_row, s_code_head, s_norm_row, s_norm_head, s_x_row, s_x_head, s_out_row, s_out_head,
    s_rotation, CODES: tl.constexpr, INPUTS: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):
    """Dequantise with a grid (tiles of channels * tiles of tokens,). s_..._row: of a batch row. R: channels that RoPE
    rotates, 0: no RoPE. FULL: BM divides the tokens of all rows, BN divides C. Where CODES.dense, p_matrix is (tiles,
    tiles, BN, BN).
    """
    H: tl.constexpr = CODES.heads
    D: tl.constexpr = CODES.dim
    C: tl.constexpr = H * D
    TILES: tl.constexpr = triton.cdiv(C, BN)
    i_n, i_m = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    b_live, b_batch, b_token, o_code, b_place, b_some = _places_of(i_m, rows, tokens, s_code_row, CODES, BM)
    columns = i_n * BN + tl.arange(0, BN)
    b_inside = columns < C
    s_x_head = tl.cast(s_x_head, tl.int64)
    acc = _decoded(
        p_codes, p_grid, p_matrix, o_code, b_place, b_some, s_code_head, i_n, CODES, INPUTS, BM, BN, ASM
    )
    o_norm = b_batch * s_norm_row + b_token
    if CODES.norms == 1:
        acc = acc * (tl.load(p_norm + o_norm, mask=b_live, other=0.0).to(tl.float32) * CODES.width**-0.5)[:, None]
    else:
        o_norm = o_norm[:, None] + ((columns // D).to(tl.int64) * s_norm_head)[None, :]
        b_norm = tl.load(p_norm + o_norm, mask=b_live[:, None] & b_inside[None, :], other=0.0)
        acc = acc * (b_norm.to(tl.float32) * CODES.width**-0.5)
    if CODES.factors:
        acc = acc * tl.load(p_factor + columns, mask=b_inside, other=0.0)[None, :]

    # the predictor
    if INPUTS > 0:
        acc += tl.load(p_bias + columns, mask=b_inside, other=0.0)[None, :]
        o_x = tl.multiple_of(tl.where(b_live, b_batch * s_x_row + b_token * D, 0), 16)
        inputs = (p_x0, p_x1, p_x2, p_x3)
        for i in tl.static_range(INPUTS):
            acc = _multiply(
                inputs[i], p_weight, o_x, b_live, columns, b_inside, acc, s_x_head, i * C, steps, H, D, C, BK, FULL,
                STAGES, ASM,
            )

    TYPE: tl.constexpr = p_out.dtype.element_ty
    o_out = b_batch * s_out_row + b_token * D
    if R == 0:
        o_out = o_out[:, None] + ((columns // D).to(tl.int64) * s_out_head + columns % D)[None, :]
        tl.store(p_out + o_out, cast(acc, TYPE, ASM), mask=b_live[:, None] & b_inside[None, :])
    else:  # columns 2 i and 2 i + 1 are a pair
        o_rotation = b_batch * s_rotation + b_token * (R // 2)
        _store_rotated(p_out, p_rotated, p_table, acc, o_out, o_rotation, b_live, i_n, s_out_head, H, D, R, BM, BN, ASM)
