"""`reconstruct` of reference.py for NVIDIA GPUs: one kernel for keys or values of a layer.

A program makes BM tokens of BN channels. Its accumulator begins as Q^-1(codes): grid points, read by code, times a matrix
of +1 and -1 on tensor cores (the rotation of BN channels with the signs in it), times the norm, plus the bias; then come
the predictor's products. So rotating costs BN / Cin of the predictor's work (6 to 12 % at C = 1024, BN = 128), nothing is
written in between, and the predictor's weights stay those of the bundle. A rotation of more than BN channels is a sum of
width / BN blocks' points with signs of the small Hadamard matrix, then the same product: it needs every block's codes once
a program, which is less than a pass over the tokens to rotate them. Rotating the weights offline instead (the sum then
happens in the rotated basis) saves the small product, but keys must come back before RoPE, which takes it again or, over
the whole token, another pass.

For RoPE the columns of weights, bias and matrix are laid so that the channels of a pair are neighbours: both are then in
one thread's registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import triton as shared
from ..attention.triton.numbers import cast
from ..hadamard import hadamard, unrotate
from ..packing.triton import code_at
from ..triton import Ready, half, interpreted
from .reference import Coded, Turn

MOST_INPUTS = 4


@triton.jit
def _dot(a, b, acc, ASM: tl.constexpr):
    if ASM:
        return tl.dot(a, b, acc)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")  # bfloat16 is wrong there


@triton.jit
def _joined(t, COUNT: tl.constexpr):
    """COUNT tensors (1, 2, 4 or 8) side by side in last dimensions of 2 each, in order: no thread gives anything away."""
    joined = t[0]
    if COUNT == 2:
        joined = tl.join(t[0], t[1])
    elif COUNT == 4:
        joined = tl.join(tl.join(t[0], t[2]), tl.join(t[1], t[3]))
    elif COUNT == 8:
        joined = tl.join(
            tl.join(tl.join(t[0], t[4]), tl.join(t[2], t[6])), tl.join(tl.join(t[1], t[5]), tl.join(t[3], t[7]))
        )
    return joined


@triton.constexpr_function
def _first(bits):
    """Width of a code's first plane, of codes up to 8 bits."""
    return 8 if bits == 8 else 4 if bits >= 4 else 2 if bits >= 2 else 1


@triton.constexpr_function
def fields(bits, count):
    """Codes that one word of a first plane holds; 0: runs of `count` codes are not all words of 16 bits."""
    if bits == 8:
        return 1
    lowest = bits & -bits
    width = 4 if bits >= 4 else 2 if bits >= 2 else 1
    return 0 if count % (16 // lowest) else 16 // width


@triton.jit
def _lower(
    codes, p_word, b_word, b_live, PER: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr
):
    """codes with the fields of a plane below, WIDTH bits wide, behind them."""
    u = tl.load(p_word + b_word % WORDS, mask=b_live, other=0).to(tl.int32) & 0xFFFF
    u = u >> (b_word // WORDS * WIDTH)
    more = ()
    for j in tl.static_range(PER):
        more = more + ((codes[j] << WIDTH) | ((u >> (j * FIRST)) & ((1 << WIDTH) - 1)),)
    return more


@triton.jit
def _fields(p, b_word, b_live, BITS: tl.constexpr, COUNT: tl.constexpr):
    """All codes of the words b_word of the runs at p: `fields` tensors int32, number j of place j * words + b_word."""
    FIRST: tl.constexpr = _first(BITS)
    PER: tl.constexpr = fields(BITS, COUNT)
    WORDS: tl.constexpr = COUNT // PER
    codes = ()
    if BITS == 8:
        codes = codes + (tl.load(p + b_word, mask=b_live, other=0).to(tl.int32),)
    else:
        p_word = p.to(tl.pointer_type(tl.int16))
        w = tl.load(p_word + b_word, mask=b_live, other=0).to(tl.int32)
        for j in tl.static_range(PER):
            codes = codes + ((w >> (j * FIRST)) & ((1 << FIRST) - 1),)
        if BITS & (FIRST // 2):
            codes = _lower(codes, p_word + WORDS, b_word, b_live, PER, FIRST, FIRST // 2, WORDS // 2)
        if BITS & (FIRST // 4):
            AT: tl.constexpr = WORDS + (WORDS // 2 if BITS & (FIRST // 2) else 0)
            codes = _lower(codes, p_word + AT, b_word, b_live, PER, FIRST, FIRST // 4, WORDS // 4)
    return codes


@triton.jit
def _gather(p_grid, b_code, d: tl.constexpr):
    """Grid points by code: d tensors float16."""
    points = ()
    if d == 1:
        points = points + (tl.load(p_grid + b_code),)
    else:
        for i in tl.static_range(d // 2):  # two dimensions lie in a word
            b_pair = tl.load(p_grid + b_code * (d // 2) + i)
            points = points + (half(b_pair, 0), half(b_pair, 1))
    return points


@triton.jit
def _points(
    p_codes, p_grid, o_code, b_place, b_live, first, s_head,
    H: tl.constexpr, D: tl.constexpr, d: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, KEY: tl.constexpr,
    BYTES: tl.constexpr, WORDWISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """Grid points [BM, BN] float16 of BN channels from `first` on, channels in the order of `places`. o_code: where codes
    of a token (keys) or a block (values) begin, b_place, b_live: which code of a run it is, whether it exists; for values
    word by word, for each word instead.
    """
    PER: tl.constexpr = fields(BITS, COUNT)
    channel = first + tl.arange(0, BN // d) * d
    inside = (channel < H * D)[None, :]
    o_head = (channel // D).to(tl.int64) * s_head
    within = channel % D // d
    if WORDWISE and KEY:
        WORDS: tl.constexpr = COUNT // PER
        word = tl.arange(0, BN // D * WORDS)
        head = first // D + word // WORDS
        p = p_codes + (o_code[:, None] + (head.to(tl.int64) * s_head)[None, :])
        b_word = tl.broadcast_to((word % WORDS)[None, :], [BM, BN // D * WORDS])
        codes = _fields(p, b_word, b_live[:, None] & (head < H)[None, :], BITS, COUNT)
        points = ()
        for j in tl.static_range(PER):
            points = points + _gather(p_grid, codes[j], d)
        tile = tl.reshape(_joined(points, PER * d), [BM, BN])
    elif WORDWISE:
        ROWS: tl.constexpr = BM // PER
        p = p_codes + (o_code[:, None] + (o_head + within * BYTES)[None, :])
        b_word = tl.broadcast_to(b_place[:, None], [ROWS, BN // d])
        codes = _fields(p, b_word, b_live[:, None] & inside, BITS, COUNT)
        rows = ()
        for j in tl.static_range(PER):
            rows = rows + (tl.reshape(_joined(_gather(p_grid, codes[j], d), d), [ROWS, BN]),)
        joined = tl.reshape(_joined(rows, PER), [ROWS, BN, PER])
        tile = tl.reshape(tl.permute(joined, (0, 2, 1)), [BM, BN])
    else:
        if KEY:
            p = p_codes + (o_code[:, None] + o_head[None, :])
            b_at = tl.broadcast_to(within[None, :], [BM, BN // d])
        else:
            p = p_codes + (o_code[:, None] + (o_head + within * BYTES)[None, :])
            b_at = tl.broadcast_to(b_place[:, None], [BM, BN // d])
        b_code = code_at(p, b_at, b_live[:, None] & inside, BITS, COUNT)
        tile = tl.reshape(_joined(_gather(p_grid, b_code, d), d), [BM, BN])
    return tile


@triton.jit
def _parity(x):
    x = x ^ (x >> 8)
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    return (x ^ (x >> 1)) & 1


@triton.jit
def _multiply(p_x, p_weight, o_row, b_live, columns, b_known, acc, s_head, first, steps,
              H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, FULL: tl.constexpr,
              STAGES: tl.constexpr, ASM: tl.constexpr):
    """acc plus one input's share of the predictor; `first`: its first row of the weights."""
    k = tl.arange(0, BK)
    for step in tl.range(0, steps, num_stages=STAGES):  # known at compile time, all would be unrolled
        head, start = step * BK // D, tl.multiple_of(step * BK % D, 16)
        p_a = p_x + head * s_head + (o_row[:, None] + (start + k)[None, :])
        p_b = p_weight + (first + step * BK + k)[:, None] * C + columns[None, :]
        if FULL:
            a, b = tl.load(p_a), tl.load(p_b)
        else:
            a = tl.load(p_a, mask=b_live[:, None], other=0.0)
            b = tl.load(p_b, mask=b_known[None, :], other=0.0)
        acc = _dot(a, b, acc, ASM)
    return acc


@triton.jit
def _turn(
    p_out, p_turned, p_table, acc, o_out, o_turn, b_live, i_n, s_head,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):
    """BM rows stored as they are and turned by RoPE."""
    TYPE: tl.constexpr = p_out.dtype.element_ty
    low, high = tl.split(tl.reshape(acc, [BM, BN // 2, 2]))
    low, high = cast(low, TYPE, ASM), cast(high, TYPE, ASM)  # half the registers, and what the model itself would turn
    pair = i_n * (BN // 2) + tl.arange(0, BN // 2)
    i = pair % (D // 2)
    turns = i < R // 2
    channel = tl.where(turns, i, R // 2 + i)
    apart = tl.where(turns, R // 2, (D - R) // 2)
    b_all = b_live[:, None] & (pair < H * D // 2)[None, :]
    o_low = o_out[:, None] + ((pair // (D // 2)).to(tl.int64) * s_head + channel)[None, :]
    o_high = o_low + apart[None, :]
    tl.store(p_out + o_low, low, mask=b_all)
    tl.store(p_out + o_high, high, mask=b_all)
    o_turn = o_turn[:, None] + i[None, :]
    b_both = tl.load(p_table + o_turn, mask=b_live[:, None] & turns[None, :], other=0x3C00)  # cosine 1, sine 0
    b_cos, b_sin = half(b_both, 0).to(tl.float32), half(b_both, 1).to(tl.float32)
    low, high = low.to(tl.float32), high.to(tl.float32)
    tl.store(p_turned + o_low, cast(low * b_cos - high * b_sin, TYPE, ASM), mask=b_all)
    tl.store(p_turned + o_high, cast(high * b_cos + low * b_sin, TYPE, ASM), mask=b_all)


@triton.jit(do_not_specialize=["rows", "tokens", "steps"])
def reconstruct_kernel(
    p_out, p_turned, p_codes, p_norm, p_grid, p_matrix, p_factor, p_bias, p_weight, p_x0, p_x1, p_x2, p_x3, p_table,
    rows, tokens, steps, s_code_row, s_code_head, s_norm_row, s_norm_head, s_x_row, s_x_head, s_out_row, s_out_head, s_turn,
    H: tl.constexpr, D: tl.constexpr, d: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, KEY: tl.constexpr,
    BLOCK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, NORMS: tl.constexpr, INPUTS: tl.constexpr,
    WORDWISE: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, DENSE: tl.constexpr, FACTORS: tl.constexpr, ASM: tl.constexpr,
):
    """Grid (tiles of channels * tiles of tokens,). s_..._row: of a batch row. R: channels that RoPE turns, 0: no RoPE.
    DENSE: the rotation ends with a cosine transform, and p_matrix has all of it: (tiles, tiles, BN, BN).
    FULL: BM divides the tokens of all rows, BN divides C.
    """
    C: tl.constexpr = H * D
    TILES: tl.constexpr = triton.cdiv(C, BN)
    PER: tl.constexpr = fields(BITS, COUNT)
    i_n, i_m = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    b_row = i_m * BM + tl.arange(0, BM)
    b_live = b_row < rows
    b_batch = (b_row // tokens).to(tl.int64)
    if WORDWISE and not KEY:  # rows in the order of words and their fields
        WORDS: tl.constexpr = BLOCK // PER
        b_token = b_row % tokens
        b_word = b_token // PER
        b_token = b_word // WORDS * BLOCK + b_token % PER * WORDS + b_word % WORDS
        o_word = i_m * (BM // PER) + tl.arange(0, BM // PER)
        b_some = o_word * PER < rows
        b_word = o_word % (tokens // PER)
        b_place = b_word % WORDS
        o_code = (o_word // (tokens // PER)).to(tl.int64) * s_code_row + b_word // WORDS * (D // d * BYTES)
    else:
        b_token = b_row % tokens
        b_some = b_live
        b_place = b_token % BLOCK
        if KEY:
            o_code = b_batch * s_code_row + b_token * BYTES
        else:
            o_code = b_batch * s_code_row + b_token // BLOCK * (D // d * BYTES)
    o_code = tl.where(b_some, o_code, 0)
    columns = i_n * BN + tl.arange(0, BN)
    b_known = columns < C
    s_x_head = tl.cast(s_x_head, tl.int64)

    # Q^-1(codes)
    MIX: tl.constexpr = WIDTH // BN if WIDTH > BN else 1
    base, i_mix = 0 if DENSE else i_n // MIX * MIX, i_n % MIX
    points = _points(
        p_codes, p_grid, o_code, b_place, b_some, base * BN, s_code_head,
        H, D, d, BITS, COUNT, KEY, BYTES, WORDWISE, BM, BN,
    )
    # without a predictor, whose rounding hides it, the sum of 8 points is kept whole: in float16 it was 5.4e-4 off, 2.1e-4 is
    # what rounding the output costs (H200)
    WHOLE: tl.constexpr = MIX > 1 and INPUTS == 0 and not DENSE
    if WHOLE:
        points = points.to(tl.float32)
    for other in tl.range(1, 1 if DENSE else MIX):
        more = _points(
            p_codes, p_grid, o_code, b_place, b_some, (base + other) * BN, s_code_head,
            H, D, d, BITS, COUNT, KEY, BYTES, WORDWISE, BM, BN,
        )
        points += more.to(points.dtype) * (1 - 2 * _parity(i_mix & other)).to(points.dtype)
    o_matrix = (i_n * BN + tl.arange(0, BN))[:, None] * BN + tl.arange(0, BN)[None, :]
    if DENSE:
        o_matrix = o_matrix + i_n * (BN * BN * (TILES - 1))
    matrix = tl.load(p_matrix + o_matrix)
    acc = _dot(points.to(tl.float16), matrix, tl.zeros([BM, BN], tl.float32), ASM)
    if DENSE:
        for other in tl.range(1, TILES, num_stages=1):  # matrices in flight would not leave the predictor its memory
            points = _points(
                p_codes, p_grid, o_code, b_place, b_some, other * BN, s_code_head,
                H, D, d, BITS, COUNT, KEY, BYTES, WORDWISE, BM, BN,
            )
            matrix = tl.load(p_matrix + o_matrix + other * (BN * BN))
            acc = _dot(points.to(tl.float16), matrix, acc, ASM)
    if WHOLE:
        acc = _dot((points - points.to(tl.float16).to(tl.float32)).to(tl.float16), matrix, acc, ASM)
    o_norm = b_batch * s_norm_row + b_token
    if NORMS == 1:
        acc = acc * (tl.load(p_norm + o_norm, mask=b_live, other=0.0).to(tl.float32) * WIDTH**-0.5)[:, None]
    else:
        o_norm = o_norm[:, None] + ((columns // D).to(tl.int64) * s_norm_head)[None, :]
        b_norm = tl.load(p_norm + o_norm, mask=b_live[:, None] & b_known[None, :], other=0.0)
        acc = acc * (b_norm.to(tl.float32) * WIDTH**-0.5)

    if FACTORS:
        acc = acc * tl.load(p_factor + columns, mask=b_known, other=0.0)[None, :]

    # the predictor
    if INPUTS > 0:
        acc += tl.load(p_bias + columns, mask=b_known, other=0.0)[None, :]
        o_x = tl.multiple_of(tl.where(b_live, b_batch * s_x_row + b_token * D, 0), 16)
        acc = _multiply(
            p_x0, p_weight, o_x, b_live, columns, b_known, acc, s_x_head, 0, steps, H, D, C, BK, FULL, STAGES, ASM
        )
    if INPUTS > 1:
        acc = _multiply(
            p_x1, p_weight, o_x, b_live, columns, b_known, acc, s_x_head, C, steps, H, D, C, BK, FULL, STAGES, ASM
        )
    if INPUTS > 2:
        acc = _multiply(
            p_x2, p_weight, o_x, b_live, columns, b_known, acc, s_x_head, 2 * C, steps, H, D, C, BK, FULL, STAGES, ASM
        )
    if INPUTS > 3:
        acc = _multiply(
            p_x3, p_weight, o_x, b_live, columns, b_known, acc, s_x_head, 3 * C, steps, H, D, C, BK, FULL, STAGES, ASM
        )

    TYPE: tl.constexpr = p_out.dtype.element_ty
    o_out = b_batch * s_out_row + b_token * D
    if R == 0:
        o_out = o_out[:, None] + ((columns // D).to(tl.int64) * s_out_head + columns % D)[None, :]
        tl.store(p_out + o_out, cast(acc, TYPE, ASM), mask=b_live[:, None] & b_known[None, :])
    else:  # columns 2 i and 2 i + 1 are a pair
        o_turn = b_batch * s_turn + b_token * (R // 2)
        _turn(p_out, p_turned, p_table, acc, o_out, o_turn, b_live, i_n, s_out_head, H, D, R, BM, BN, ASM)


CHANNELS = 128  # of a program


@dataclass(frozen=True)
class Launch:
    """tokens: of a program. depth: rows of the weights a step. stages: of loads in flight."""

    tokens: int
    depth: int = 64
    warps: int = 8
    stages: int = 3


@functools.cache
def launch_for(device: torch.device) -> Launch:
    """On Hopper 256 tokens: 85 operations for a byte that comes through L2 (128 tokens: 64), 176 KiB of shared memory."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return Launch(256) if hopper else Launch(128, 32)


@dataclass(frozen=True)
class Prepared:
    """Constants of a layer's keys or values as the kernel reads them. grid: int32 words of two float16, or float16.
    matrix: (tiles, channels, channels) float16, the rotation and the signs; of one with a cosine transform (tiles of
    columns, tiles of codes, channels, channels). factors: (C,) float32, in the order of columns. turned: channels of a
    head that RoPE turns. launches: of the kernel, by what they are made for.
    """

    grid: Tensor
    matrix: Tensor
    weight: Tensor | None
    bias: Tensor | None
    turned: int
    factors: Tensor | None = None
    launches: shared.Prepared = field(default_factory=shared.Prepared, compare=False, repr=False)

    @property
    def channels(self) -> int:
        return int(self.matrix.shape[-1])


def refuses(dim: int, d: int, width: int, norms: int, inputs: int, turned: int, channels: int = CHANNELS) -> str | None:
    """Why there is no kernel for this shape; None if there is one. width: channels that the rotation mixes."""
    if inputs > MOST_INPUTS:
        return f"{inputs} predictor inputs: {MOST_INPUTS} at most"
    if inputs and dim % 16:
        return f"head_dim {dim}: a predictor's kernel needs a multiple of 16"
    if dim % (2 * d) or d not in (1, 2, 4):
        return f"head_dim {dim}, grid of {d} dimensions: needs 1, 2 or 4 that divide half of it"
    if norms > 1 and width > dim:
        return "a norm a head under a rotation over the token"
    if turned % 2 or turned > dim or (turned and channels % dim):
        return f"RoPE of {turned} of {dim} channels: needs an even number, and heads that divide {channels}"
    return None


def columns_of(heads: int, dim: int, turned: int) -> Tensor:
    """Channel of each column of the product, int64 (C,): pairs of RoPE are neighbours."""
    every = torch.arange(heads * dim)
    if not turned:
        return every
    half = every // 2 % (dim // 2)
    low = torch.where(half < turned // 2, half, turned // 2 + half)
    apart = torch.where(half < turned // 2, turned // 2, (dim - turned) // 2)
    return every // dim * dim + low + every % 2 * apart


def prepare(
    coded: Coded,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    turned: int = 0,
    dtype: torch.dtype = torch.float16,
    channels: int = CHANNELS,
) -> Prepared:
    """For inputs and outputs of `dtype`; weight (inputs * C, C), bias (C,) of any float dtype. Once a layer and side."""
    inputs = 0 if weight is None else weight.shape[0] // weight.shape[1]
    heads, dim, d = coded.heads, coded.dim, coded.grid.shape[1]
    if why := refuses(dim, d, coded.width * coded.factor, coded.norm.shape[1], inputs, turned, channels):
        raise ValueError(f"reconstruct: {why}")
    device = coded.grid.device
    order = columns_of(heads, dim, turned).to(device)
    grid = coded.grid.half().contiguous()
    matrix = (_matrix if coded.factor == 1 else _dense_matrix)(coded, order, channels)
    if weight is not None:
        weight = (weight[:, order] if turned else weight).to(dtype).contiguous()
        bias = (torch.zeros(weight.shape[1], device=device) if bias is None else bias[order].float()).contiguous()
    words = grid if d == 1 else grid.view(torch.int32)
    factors = None if coded.factors is None else coded.factors[order].float().contiguous()
    return Prepared(words, matrix, weight, None if weight is None else bias, turned, factors)


def _wordwise(coded: Coded, channels: int) -> bool:
    """Whether programs can take codes a word at a time."""
    per = fields(coded.bits, coded.packed_count)
    if not per or not coded.key:
        return bool(per)
    words = coded.packed_count // per
    return channels % coded.dim == 0 and words & (words - 1) == 0


def places(coded: Coded, channels: int) -> Tensor:
    """Channel of each of the columns of `_points` within its program's, int64 (channels,)."""
    every = torch.arange(channels)
    if not (coded.key and _wordwise(coded, channels)):
        return every
    d, per = coded.grid.shape[1], fields(coded.bits, coded.packed_count)
    words = coded.packed_count // per
    word, field, axis = every // (per * d), every // d % per, every % d
    channel_of: Tensor = word // words * coded.dim + (field * words + word % words) * d + axis
    return channel_of


def _matrix(coded: Coded, order: Tensor, channels: int) -> Tensor:
    """What points of `channels` channels are multiplied by, for each tile of columns: +1, -1 and 0, so exact."""
    device, count = coded.grid.device, coded.sign.numel()
    tiles, width = -(-count // channels), min(coded.width, channels)
    matrix = torch.zeros(tiles, channels, channels, dtype=torch.float16, device=device)
    rows = (hadamard(torch.eye(channels, device=device), width) * width**0.5).round()[
        places(coded, channels).to(device)
    ]
    for tile in range(tiles):
        columns = order[tile * channels : (tile + 1) * channels]
        matrix[tile, :, : len(columns)] = rows[:, columns - tile * channels] * coded.sign[columns].to(device)
    return matrix


def _dense_matrix(coded: Coded, order: Tensor, channels: int) -> Tensor:
    """As `_matrix` of all codes of a token for each tile of columns, where a cosine transform mixes the tiles. Rounded to
    float16.
    """
    device, count = coded.grid.device, coded.sign.numel()
    rows = unrotate(
        torch.eye(count, dtype=torch.float64), coded.sign.cpu(), coded.width, coded.factor, coded.interleaved
    )
    tiles, at = -(-count // channels), places(coded, channels)
    matrix = torch.zeros(tiles * channels, tiles * channels, dtype=torch.float16)
    matrix[:count, :count] = (rows * coded.width**0.5)[:, order.cpu()]
    wide = matrix.reshape(tiles, channels, tiles, channels).permute(2, 0, 1, 3)
    return wide[:, :, at].contiguous().to(device)


def reconstruct(
    coded: Coded,
    prepared: Prepared,
    inputs: Sequence[Tensor] = (),
    turn: Turn | None = None,
    out: Tensor | None = None,
    turned: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As reference.reconstruct, rounded to float16 or bfloat16: of `out` if given, else `dtype`.

    inputs, out, turned (B, H, T or more, D): one dtype, and tokens and channels of a head contiguous; inputs alike in
    strides. `out` and `turned` are written up to T and may be views of larger buffers, but not of an input.
    """
    batch, heads, tokens, dim = coded.codes.shape[0], coded.heads, coded.tokens, coded.dim
    shape = (batch, heads, tokens, dim)
    out = torch.empty(shape, dtype=dtype, device=coded.codes.device) if out is None else out
    if turn is not None and turned is None:
        turned = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    _check(coded, prepared, inputs, turn, out, turned, shape)
    if launch is None:  # without products 128 hide more of the loads
        launch = launch_for(out.device) if inputs else Launch(128)
    d, rows = coded.grid.shape[1], batch * tokens
    if rows + launch.tokens >= 1 << 31:
        raise ValueError(f"reconstruct: {batch} rows of {tokens} tokens; 2^31 tokens at most, in one call")
    if not rows:
        return out, turned
    x = [*inputs, *([inputs[0]] if inputs else [out]) * (MOST_INPUTS - len(inputs))]
    table = prepared.grid if turn is None else turn.table
    strides = (
        *coded.codes.stride()[:2], *coded.norm.stride()[:2], *x[0].stride()[:2], *out.stride()[:2],
        table.stride(0) if len(table) > 1 else 0,
    )
    kind = launch, rows, strides, out.dtype
    if (ready := prepared.launches.get(kind)) is None:
        grid = (prepared.matrix.shape[0] * -(-rows // launch.tokens),)
        fixed: dict[str, Any] = {
            "d": d,
            "ASM": not interpreted(),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }
        fixed |= settings(coded, prepared, len(inputs), rows, launch)
        ready = prepared.launches[kind] = Ready(reconstruct_kernel, grid, fixed)
    tensors = (
        out, out if turned is None else turned, coded.codes, coded.norm, prepared.grid, prepared.matrix,
        prepared.matrix if prepared.factors is None else prepared.factors,
        prepared.matrix if prepared.bias is None else prepared.bias,
        prepared.matrix if prepared.weight is None else prepared.weight, *x, table,
    )
    ready(tensors, rows, tokens, heads * dim // ready.options["BK"], *strides)
    return out, turned


def settings(coded: Coded, prepared: Prepared, inputs: int, rows: int, launch: Launch) -> dict[str, int | bool]:
    """Compile-time constants of reconstruct_kernel but d and ASM; none follows from the number of tokens, except that BM
    divides it.
    """
    channels, whole = prepared.channels, coded.heads * coded.dim % prepared.channels == 0
    depth = min(launch.depth, coded.dim & -coded.dim)
    return {
        "H": coded.heads, "D": coded.dim, "BITS": coded.bits, "COUNT": coded.packed_count, "KEY": coded.key,
        "BLOCK": coded.block, "BYTES": coded.codes.shape[-1], "WIDTH": coded.width, "NORMS": coded.norm.shape[1],
        "INPUTS": inputs, "WORDWISE": _wordwise(coded, channels), "R": prepared.turned,
        "FULL": rows % launch.tokens == 0 and whole,
        "BM": launch.tokens, "BN": channels, "BK": depth, "STAGES": launch.stages,
        "DENSE": coded.factor > 1, "FACTORS": coded.factors is not None,
    }


def _check(
    coded: Coded,
    prepared: Prepared,
    inputs: Sequence[Tensor],
    turn: Turn | None,
    out: Tensor,
    turned: Tensor | None,
    shape: tuple[int, int, int, int],
) -> None:
    """What the kernel relies on and cannot see."""
    if out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"reconstruct into {out.dtype}: must be float16 or bfloat16")
    features = 0 if prepared.weight is None else prepared.weight.shape[0] // prepared.weight.shape[1]
    if len(inputs) != features or (prepared.weight is not None and prepared.weight.dtype != out.dtype):
        raise ValueError(f"reconstruct of {len(inputs)} inputs in {out.dtype}: prepared for {features} in another way")
    if (turn is not None) != bool(prepared.turned) or (turn is not None and turn.cos.shape[-1] != prepared.turned):
        raise ValueError(f"reconstruct: prepared for RoPE of {prepared.turned} channels, got {turn and turn.cos.shape}")
    for name, each in [("out", out), ("turned", turned), *(("input", x) for x in inputs)]:
        if each is not None and not _fits(each, shape, out.dtype):
            layout = f"{tuple(each.shape)} {each.dtype}, strides {each.stride()}"
            raise ValueError(f"reconstruct, {name}: {layout}; must be {shape} {out.dtype}, heads contiguous")
    strides = inputs[0].stride() if inputs else ()
    if any(x.stride() != strides for x in inputs[1:]) or (turned is not None and turned.stride() != out.stride()):
        raise ValueError("reconstruct: inputs, and out and turned, must have the same strides")
    rows = coded.codes.stride()[2:], coded.norm.stride()[2:]
    inner = coded.codes.shape[-1]
    if rows != ((coded.codes.shape[3] * inner, inner, 1), (coded.block, 1)):
        raise ValueError(f"reconstruct: blocks of strides {rows}; blocks of a head must be contiguous")


def _fits(x: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
    batch, heads, tokens, dim = x.shape
    same = (batch, heads, dim) == (shape[0], shape[1], shape[3]) and x.dtype == dtype
    return same and tokens >= shape[2] and x.stride()[2:] == (dim, 1)


# Exact tokens around the packed ones.


@triton.jit
def _exact(p_sink, p_window, p_new, token, channel, live, sink, window, s_token, D: tl.constexpr):
    """[tokens, channels] of a head's exact tokens: sink, then window, then new ones."""
    token, channel = token[:, None], channel[None, :]
    is_sink, is_new = token < sink, token >= sink + window
    x = tl.load(p_sink + token * D + channel, mask=live & is_sink, other=0.0)
    token_row = tl.load(
        p_window + (token - sink) * D + channel, mask=live & (token >= sink) & (token < sink + window), other=0.0
    )
    new = tl.load(p_new + (token - sink - window) * s_token + channel, mask=live & is_new, other=0.0)
    return tl.where(is_sink, x, tl.where(is_new, new, token_row))


@triton.jit(do_not_specialize=["sink", "window", "new", "behind"])
def place_kernel(
    p_key, p_value, p_sink_key, p_sink_value, p_window_key, p_window_value, p_new_key, p_new_value, p_cos, p_sin,
    sink, window, new, behind, s_row, s_head, s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token,
    s_turn, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, ASM: tl.constexpr,
):
    """Grid (tiles of tokens, rows * heads, keys and values). s_row, s_head: of p_key and p_value. DP: a power of two >= D."""
    i_head = tl.program_id(1).to(tl.int64)
    row, head = i_head // H, i_head % H
    token, channel = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, DP)
    live = (token < sink + window + new)[:, None] & (channel < D)[None, :]
    slot = tl.where(token < sink, token, token - sink + behind)
    o_out = row * s_row + head * s_head + slot[:, None] * D + channel[None, :]
    o_sink, o_window = i_head * sink * D, i_head * window * D
    if tl.program_id(2) == 1:
        p_new = p_new_value + row * s_value_row + head * s_value_head
        x = _exact(
            p_sink_value + o_sink,
            p_window_value + o_window,
            p_new,
            token,
            channel,
            live,
            sink,
            window,
            s_value_token,
            D,
        )
        tl.store(p_value + o_out, x, mask=live)
    else:
        p_new = p_new_key + row * s_key_row + head * s_key_head
        x = _exact(
            p_sink_key + o_sink, p_window_key + o_window, p_new, token, channel, live, sink, window, s_key_token, D
        )
        if R > 0:
            TYPE: tl.constexpr = p_key.dtype.element_ty
            first = channel < R // 2
            pair = tl.where(first, channel + R // 2, tl.where(channel < R, channel - R // 2, channel))
            y = _exact(
                p_sink_key + o_sink, p_window_key + o_window, p_new, token, pair, live, sink, window, s_key_token, D
            )
            turns = live & (token < sink + window)[:, None] & (channel < R)[None, :]
            o_turn = row * s_turn + token[:, None] * R + channel[None, :]
            cos = tl.load(p_cos + o_turn, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(p_sin + o_turn, mask=turns, other=0.0).to(tl.float32)
            a, b = x.to(tl.float32) * cos, y.to(tl.float32) * tl.where(first[None, :], -sin, sin)
            if p_cos.dtype.element_ty == TYPE:  # a model that computes in this dtype rounds both products
                a, b = cast(a, TYPE, ASM).to(tl.float32), cast(b, TYPE, ASM).to(tl.float32)
            x = tl.where(turns, cast(a + b, TYPE, ASM), x)
        tl.store(p_key + o_out, x, mask=live)


PLACED = 32  # tokens of a program


def place(
    whole: Sequence[Tensor],
    sink: Sequence[Tensor],
    window: Sequence[Tensor],
    new: Sequence[Tensor],
    behind: int,
    turn: Turn | None = None,
) -> None:
    """As reference.place, in one launch and bit by bit. All but turn of one dtype, float16 or bfloat16; whole: strides alike,
    tokens and channels of a head contiguous; new: channels contiguous.
    """
    keys, values = whole
    batch, heads, room, dim = keys.shape
    counts = [parts[0].shape[2] for parts in (sink, window, new)]
    total = sum(counts)
    alike = keys.shape == values.shape and keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1)
    ends = behind + total - counts[0]
    if not alike or ends > room or any(x.stride(3) != 1 for x in new):
        raise ValueError(
            f"place: {total} tokens up to slot {ends} of {tuple(keys.shape)} {keys.dtype}, strides {keys.stride()}"
        )
    for x, count in zip((*sink, *window, *new), (n for n in counts for _ in range(2)), strict=True):
        if x.shape != (batch, heads, count, dim) or x.dtype != keys.dtype or x.device != keys.device:
            shape = f"{tuple(x.shape)} {x.dtype} on {x.device}"
            raise ValueError(f"place: {shape}; must be {(batch, heads, count, dim)} {keys.dtype} on {keys.device}")
    if turn is not None and turn.cos.shape[1] != counts[0] + counts[1]:
        raise ValueError(f"place: RoPE of {turn.cos.shape[1]} tokens for {counts[0]} and {counts[1]}")
    if not total or not batch:
        return
    cos, sin = (keys, keys) if turn is None else (turn.cos.contiguous(), turn.sin.contiguous())
    turned = 0 if turn is None else turn.cos.shape[-1]
    grid = -(-total // PLACED), batch * heads, 2
    strides = (
        *keys.stride()[:2], *new[0].stride()[:3], *new[1].stride()[:3],
        cos.stride(0) if turn is not None and len(cos) > 1 else 0,
    )
    kind = grid, strides, heads, dim, turned, keys.dtype, cos.dtype, keys.device
    if (ready := _PLACES.get(kind)) is None:
        fixed = {"H": heads, "D": dim, "DP": triton.next_power_of_2(dim), "R": turned, "BT": PLACED}
        # with fused operations LLVM makes one product and the sum one of bfloat16
        fixed |= {"ASM": not interpreted(), "enable_fp_fusion": False}
        ready = _PLACES[kind] = Ready(place_kernel, grid, fixed)
    ready((keys, values, *(x.contiguous() for x in (*sink, *window)), *new, cos, sin), *counts, behind, *strides)


_PLACES = shared.Prepared()
