"""`encode` of reference.py for NVIDIA GPUs: rotation, norm and nearest point in one launch; a program takes a few whole
tokens. `pack` lays their codes out for attention. quantise packs grids by the same functions.

Nothing is fused except for what the reference's addcmul fuses (enable_fp_fusion=False): scores are half |g|^2 - x_0
g_0, then one fused operation for each further number, and the first of the lowest is taken. Where a raster has been
made for the grid (lattice/raster.py) only the few points that can be nearest in a vector's cell are looked at: gathered
one by one, as lanes have different cells.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import on
from ..lattice import raster
from ..layout import BLOCK, Form, grids
from ..triton import interpreted
from . import reference
from .reference import Rotated

NONFINITE, SCALE = tl.constexpr(reference.NONFINITE), tl.constexpr(reference.SCALE)
HALF_MAX, LEAST = tl.constexpr(reference.HALF_MAX), tl.constexpr(reference.LEAST)
ALIGNED, OVER = tl.constexpr(grids.ALIGNED), tl.constexpr(32 - grids.ALIGNED)
LOW = tl.constexpr((1 << grids.ALIGNED) - 1)
SPAN, WHOLE = tl.constexpr(raster.SPAN), tl.constexpr(2.0**23)
NO_RASTER = {"SIDE": 0, "FEW": 0, "MOST": 0}
NUMBERS = 4096  # of a program


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    y = tl.permute(tl.reshape(x, [ROWS, N // (2 * STEP), 2, STEP]), (0, 1, 3, 2))
    low, high = tl.split(y)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), [ROWS, N])


@triton.jit
def _tree(x, ROWS: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr):
    """Return tree_sum of [ROWS, N], N = 2^LOG -> [ROWS]. Halves that several warps may share are split, so that a
    thread has both: `tl.sum` across warps puts all numbers into two banks of shared memory (an append of HIGGS 2: 7
    times as many cycles).
    """
    for i in tl.static_range(LOG):
        if (N >> i) > 32:
            low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, N >> (i + 1)]), (0, 2, 1)))
            x = low + high
        else:
            x = tl.sum(tl.reshape(x, [ROWS, 2, N >> (i + 1)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def _nearer(parts, code, best, nearest, p_table, POINTS: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    """Return best and nearest, the lowest score so far and its code; those of point `code` where it scores lower."""
    score = tl.load(p_table + code) - parts[0] * tl.load(p_table + POINTS + code)
    for axis in tl.static_range(1, D):
        g = tl.load(p_table + (1 + axis) * POINTS + code)
        if ASM:
            score = tl.fma(-parts[axis], g, score)
        else:  # the interpreter's is not fused: in float64 the product is exact
            score = (score.to(tl.float64) - parts[axis].to(tl.float64) * g.to(tl.float64)).to(tl.float32)
    better = score < best
    return tl.where(better, score, best), tl.where(better, code, nearest)


@triton.jit
def _nearest_of_all(parts, p_table, POINTS: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    best = tl.zeros_like(parts[0]) + float("inf")
    nearest = tl.zeros_like(parts[0]).to(tl.int32)
    for i in range(POINTS):
        best, nearest = _nearer(parts, i, best, nearest, p_table, POINTS, D, ASM)
    return nearest


@triton.jit
def _cell(x, SIDE: tl.constexpr):
    """Return the cell of x along a raster's axis. The product is exact, the sum rounds to whole numbers and leaves them
    in the lowest bits.
    """
    PER: tl.constexpr = SIDE / (2 * SPAN)
    inside = tl.minimum(tl.maximum(x, -SPAN), SPAN - 1 / PER)
    return tl.fma(inside, PER, WHOLE + SIDE // 2).to(tl.int32, bitcast=True)


@triton.jit
def _place(parts, D: tl.constexpr, SIDE: tl.constexpr):
    """Return the number of a vector's cell."""
    cell = _cell(parts[0], SIDE)
    for axis in tl.static_range(1, D):
        cell = cell * SIDE + _cell(parts[axis], SIDE)
    return cell & SIDE**D - 1


@triton.constexpr_function
def _gathering(points, d):
    """Return assembly of `_nearer` for one vector: $0, $1 new, $4, $5 old best and nearest; $2 code, $3 table, then the
    vector.
    """
    text = "{ .reg .b64 p; .reg .f32 s, g, x; .reg .pred q; mad.wide.u32 p, $2, 4, $3; ld.global.nc.f32 s, [p];"
    for axis in range(d):
        text += f" ld.global.nc.f32 g, [p + {4 * (1 + axis) * points}];"
        if axis == 0:
            text += " mul.rn.f32 g, g, $6; sub.rn.f32 s, s, g;"
        else:
            text += f" neg.f32 x, ${6 + axis}; fma.rn.f32 s, x, g, s;"
    return text + " setp.lt.f32 q, s, $4; selp.f32 $0, s, $4, q; selp.b32 $1, $2, $5, q; }"


@triton.jit
def _nearer_there(parts, code, best, nearest, p_table, POINTS: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    """Apply `_nearer` to codes that differ. In assembly one vector follows another; Triton has the loads of all before
    the first is used, whose addresses alone would take two registers a vector.
    """
    if ASM:
        KINDS: tl.constexpr = "=f,=r,r,l,f,r,f" + (D - 1) * ",f"
        return tl.inline_asm_elementwise(
            _gathering(POINTS, D), KINDS, (code, p_table.to(tl.int64), best, nearest) + parts,
            dtype=(tl.float32, tl.uint32), is_pure=True, pack=1,
        )
    else:  # noqa: RET505 (both are compiled otherwise)
        return _nearer(parts, code, best, nearest, p_table, POINTS, D, ASM)


@triton.jit
def _nearest_of_cells(
    parts, p_table, POINTS: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the nearest of the candidates of a vector's cell (lattice/raster.py): a word has the first four, which are
    enough for most cells.
    """
    p_reach = p_table + POINTS * (1 + D)
    p_words = (p_reach + 1).to(tl.pointer_type(tl.uint32), bitcast=True)
    word = tl.load(p_words + _place(parts, D, SIDE))
    best, nearest = tl.zeros_like(parts[0]) + float("inf"), tl.zeros_like(word)  # a NaN is nearest to point 0
    for i in tl.static_range(FEW):
        best, nearest = _nearer_there(parts, word >> 8 * i & 255, best, nearest, p_table, POINTS, D, ASM)
    if MOST > FEW:
        inner = tl.abs(parts[0])
        for axis in tl.static_range(1, D):
            inner = tl.minimum(inner, tl.abs(parts[axis]))
        last = tl.where(tl.max(inner) >= tl.load(p_reach), MOST, FEW)
        for k in range(FEW, last):  # cells again: their numbers would take registers in the other programs
            place = k // 4 * SIDE**D + _place(parts, D, SIDE)
            code = tl.load(p_words + place) >> k % 4 * 8 & 255
            best, nearest = _nearer_there(parts, code, best, nearest, p_table, POINTS, D, ASM)
    return nearest.to(tl.int32)


@triton.jit
def rotate_rows(x, sign, scale, ROWS: tl.constexpr, N: tl.constexpr, LOG_WIDTH: tl.constexpr):
    """Return `rotate` of [ROWS, N] float32 by signs [N]; scale: width^-0.5."""
    x = x * sign.to(tl.float32)[None, :] * scale
    for i in tl.static_range(LOG_WIDTH):
        x = _butterfly(x, ROWS, N, 1 << i)
    return x


@triton.jit
def norms_of(x, gain, ROWS: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr, ASM: tl.constexpr):
    """Return the root mean squares of [ROWS, N], N = 2^LOG, times gain: [ROWS]."""
    norm = _tree(x * x, ROWS, N, LOG) * (1.0 / N)
    return (tl.sqrt_rn(norm) if ASM else tl.sqrt(norm)) * gain


@triton.jit
def units_of(stored, gain, ROWS: tl.constexpr, ASM: tl.constexpr):
    """Return the factors by which numbers are multiplied, from stored norms [ROWS] float16."""
    size = tl.maximum(stored.to(tl.float32), LEAST)
    return (tl.div_rn(tl.full([ROWS], 1.0, tl.float32), size) if ASM else 1.0 / size) * gain


@triton.jit
def nearest_points(
    x, p_table, ROWS: tl.constexpr, N: tl.constexpr, POINTS: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr,
    FEW: tl.constexpr, MOST: tl.constexpr, ASM: tl.constexpr,
):
    """Return codes int32 [ROWS, N / D] of [ROWS, N]: the first of the nearest points. p_table: Rotated.table; SIDE,
    FEW, MOST: of its raster, 0 without.
    """
    if D == 1:
        parts = (x,)
    else:
        low, high = tl.split(tl.reshape(x, [ROWS, N // 2, 2]))
        if D == 2:
            parts = (low, high)
        else:
            x0, x2 = tl.split(tl.reshape(low, [ROWS, N // 4, 2]))
            x1, x3 = tl.split(tl.reshape(high, [ROWS, N // 4, 2]))
            parts = (x0, x1, x2, x3)
    if SIDE:
        return _nearest_of_cells(parts, p_table, POINTS, D, SIDE, FEW, MOST, ASM)
    else:  # noqa: RET505 (both are compiled otherwise)
        return _nearest_of_all(parts, p_table, POINTS, D, ASM)


# Codes to words, in the order of layout/grids.py, of one block of one head.


@triton.jit
def _pairs(code, DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr):
    """Return grids.pairs of codes int32 [32, DIM / D]: 16 * DIM of them."""
    if D == 4:
        return tl.join(code & 15, code >> 4)
    elif D == 2:  # noqa: RET505 (all are compiled otherwise)
        return code
    elif VALUE:
        low, high = tl.split(tl.permute(tl.reshape(code, [16, 2, DIM]), (0, 2, 1)))
        return low | high << BITS
    else:
        low, high = tl.split(tl.reshape(code, [32, DIM // 2, 2]))
        return low | high << BITS


@triton.jit
def _pieces(code, DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr):
    """Return pairs in the order of grids.order: [DIM / 8, 16, 8]."""
    pair = _pairs(code, DIM, BITS, D, VALUE)
    if VALUE and D == 1:
        pieces = tl.permute(tl.reshape(pair, [2, 8, DIM // 16, 16]), (0, 2, 3, 1))
    elif VALUE and D == 4:
        pieces = tl.permute(tl.reshape(pair, [4, 8, DIM // 32, 8, 2]), (0, 2, 4, 3, 1))
    elif VALUE:
        pieces = tl.permute(tl.reshape(pair, [4, 8, DIM // 32, 16]), (0, 2, 3, 1))
    elif D == 4:
        pieces = tl.permute(tl.reshape(pair, [2, 16, DIM // 32, 8, 2]), (0, 2, 4, 1, 3))
    else:
        pieces = tl.permute(tl.reshape(pair, [2, 16, DIM // 16, 8]), (0, 2, 1, 3))
    if BITS == 2 and (VALUE or D != 4):
        pieces = tl.permute(tl.reshape(pieces, [DIM // 64, 2, 4, 2, 8, 8]), (0, 2, 3, 1, 4, 5))
    return tl.reshape(pieces, [DIM // 8, 16, 8])


@triton.jit
def _rotated_words(words):
    """Rotate the bits of words as grids.units does."""
    return words << ALIGNED | words >> OVER & LOW


@triton.jit
def _store_tiles(p_words, words, tile, live, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Store units [GROUPS, 16, 8] in tiles `tile` of every EACH; words as int32."""
    group = tl.arange(0, GROUPS)[:, None, None] * EACH + tile
    place = tl.arange(0, 16)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(p_words + group * 128 + place, words, mask=live)


@triton.jit
def _store_half(p_words, words, live):
    """Store half a tile behind the first: units [1, 16, 8] of which columns c and c + 4 have other bits of one."""
    low, high = tl.split(tl.permute(tl.reshape(words, [16, 2, 4]), (0, 2, 1)))
    place = 128 + tl.arange(0, 16)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(p_words + place, low | high, mask=live)


@triton.jit
def _sets(code, DIM: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr):
    """Return codes [32, DIM / D] in the order of grids.byte_order, a word's four first: [DIM / 16 / D, 4, 16, 8]."""
    if VALUE:
        apart = tl.reshape(code, [2, 2, 4, 2, DIM // D // 16, 16])
        sets = tl.permute(apart, [4, 3, 0, 5, 1, 2])
    elif D == 1:
        apart = tl.reshape(code, [2, 16, DIM // 64, 4, 4, 2, 2])
        sets = tl.permute(apart, [0, 2, 6, 3, 1, 5, 4])
    else:
        apart = tl.reshape(code, [2, 16, DIM // D // 32, 4, 4, 2])
        sets = tl.permute(apart, [0, 2, 3, 1, 5, 4])
    return tl.reshape(sets, [DIM // 16 // D, 4, 16, 8])


@triton.jit
def _together(x, GROUPS: tl.constexpr, COUNT: tl.constexpr, LOG: tl.constexpr):
    """Join the bits of [GROUPS, COUNT, 16, 8], COUNT = 2^LOG, in one: [GROUPS, 16, 8]. `tl.sum` would not do: with it
    warps wrote different numbers to one place where numbers of a sum lie in lanes apart (Triton 3.6 and 3.7.1, values
    of 4 bits).
    """
    for i in tl.static_range(LOG):
        low, high = tl.split(tl.permute(tl.reshape(x, [GROUPS, 2, COUNT >> (i + 1), 128]), (0, 2, 3, 1)))
        x = low | high
    return tl.reshape(x, [GROUPS, 16, 8])


@triton.jit
def _store_byte_words(
    p_words, code, live, DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr
):
    """Store `grids.byte_words` for a grid in bytes; see `store_words`."""
    CODE: tl.constexpr = BITS * D
    TOGETHER: tl.constexpr = min(8, DIM // 16 // D) if CODE == 3 else 8 // CODE  # sets of as many tiles as they fill
    GROUPS: tl.constexpr = DIM // 16 // D // TOGETHER
    COUNT: tl.constexpr = TOGETHER * 4
    LOG: tl.constexpr = COUNT.bit_length() - 1
    wide = tl.reshape(_sets(code, DIM, D, VALUE), [GROUPS, COUNT, 16, 8])
    k = tl.arange(0, COUNT)[None, :, None, None]
    if CODE == 3 and TOGETHER == 4:
        part = tl.where(k < 8, wide, wide >> 2 << 3)
        _store_tiles(p_words, _together(part << k % 8 * 4, GROUPS, COUNT, LOG), 0, live, GROUPS, 1)
        register = tl.arange(0, 8)[None, None, None, :] // 4
        part = tl.where(k < 8, 0, wide & 3)
        _store_half(p_words, _together(part << k % 8 * 4 + register * 2, GROUPS, COUNT, LOG), live)
    elif CODE == 3:
        UNITS: tl.constexpr = 3
        for u in tl.static_range(UNITS):
            part = tl.where(k // 8 == u, wide, 0)
            part = tl.where(k // 8 == 3, (wide >> u & 1) << 3, part)
            _store_tiles(p_words, _together(part << k % 8 * 4, GROUPS, COUNT, LOG), u, live, GROUPS, UNITS)
    else:
        _store_tiles(p_words, _together(wide << k % 8 * 4 + k // 8 * 2, GROUPS, COUNT, LOG), 0, live, GROUPS, 1)


@triton.jit
def store_words(
    p_words, code, live, DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr,
    IN_BYTES: tl.constexpr,
):
    """Store the words of layout.pack for codes int32 [32, DIM / D] of a block, where `live`. p_words: int32, of the
    block.
    """
    if IN_BYTES:
        _store_byte_words(p_words, code, live, DIM, BITS, D, VALUE)
    else:
        _store_units(p_words, code, live, DIM, BITS, D, VALUE)


@triton.jit
def _store_units(
    p_words, code, live, DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr
):
    """Store `grids.units` for a grid that is looked up; see `store_words`."""
    TOGETHER: tl.constexpr = 16 if BITS == 3 else 16 // BITS
    EACH: tl.constexpr = min(TOGETHER, DIM // 8)  # pieces of a unit; of 3 bits of three
    GROUPS: tl.constexpr = DIM // 8 // EACH
    wide = tl.reshape(_pieces(code, DIM, BITS, D, VALUE), [GROUPS, EACH, 16, 8])
    piece = tl.arange(0, EACH)[None, :, None, None]
    if BITS == 3 and EACH == 8:
        part = tl.where(piece < 5, wide << piece * 6, tl.where(piece == 7, (wide & 3) << 30, 0))
        _store_tiles(p_words, _rotated_words(tl.sum(part, 1)), 0, live, GROUPS, 1)
        part = tl.where(piece == 7, wide >> 2 << 12, tl.where(piece < 5, 0, wide << (piece - 5) * 6))
        column = tl.arange(0, 8)[None, None, None, :]
        _store_half(p_words, _rotated_words(tl.sum(part << column // 4 * 16, 1)), live)
    elif BITS == 3:
        UNITS: tl.constexpr = 3
        for u in tl.static_range(UNITS):
            part = tl.where(piece // 5 == u, wide << piece % 5 * 6, 0)
            part = tl.where(piece == 15, (wide >> 2 * u & 3) << 30, part)
            _store_tiles(p_words, _rotated_words(tl.sum(part, 1)), u, live, GROUPS, UNITS)
    else:
        _store_tiles(p_words, _rotated_words(tl.sum(wide << piece * (2 * BITS), 1)), 0, live, GROUPS, 1)


@triton.jit
def _decoded(
    code, stored, p_table, sign, scale,
    ROWS: tl.constexpr, N: tl.constexpr, NORMS: tl.constexpr, POINTS: tl.constexpr, D: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
):
    """Decode codes [ROWS, N / D] and norms [ROWS * NORMS] float16 as the codec does: [ROWS, N] float32."""
    p_point = p_table + POINTS + code
    x = tl.load(p_point)
    if D == 2:
        x = tl.join(x, tl.load(p_point + POINTS))
    elif D == 4:
        even = tl.join(x, tl.load(p_point + 2 * POINTS))
        x = tl.join(even, tl.join(tl.load(p_point + POINTS), tl.load(p_point + 3 * POINTS)))
    x = tl.reshape(x, [ROWS * NORMS, N // NORMS]) * stored.to(tl.float32)[:, None]
    x = tl.reshape(x, [ROWS, N]) * scale
    for i in tl.static_range(LOG_WIDTH):
        x = _butterfly(x, ROWS, N, 1 << i)
    return x * sign.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["tokens"])
def encode_kernel(
    p_x, p_sign, p_table, p_codes, p_norm, p_flags, p_decoded, tokens, batch_stride, head_stride, token_stride, scale,
    gain, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, NORMS: tl.constexpr, POINTS: tl.constexpr,
    D: tl.constexpr, SIDE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    LOG_WIDTH: tl.constexpr, LOG_NORM: tl.constexpr, DECODE: tl.constexpr, ASM: tl.constexpr,
):
    """Encode with a grid (tokens / ROWS, batch). scale: WIDTH^-0.5. DECODE: p_decoded takes what the codes decode to.
    """
    N: tl.constexpr = HEADS * DIM
    i_batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    at = tl.arange(0, N)
    o_x = i_batch * batch_stride + (at // DIM).to(tl.int64) * head_stride + at % DIM
    x = tl.load(
        p_x + o_x[None, :] + token.to(tl.int64)[:, None] * token_stride, mask=live[:, None], other=0.0
    ).to(tl.float32)
    nothing = x * 0.0
    sign = tl.load(p_sign + at)
    x = rotate_rows(x, sign, scale, ROWS, N, LOG_WIDTH)
    groups = tl.reshape(x, [ROWS * NORMS, N // NORMS])
    norm = norms_of(groups, gain, ROWS * NORMS, N // NORMS, LOG_NORM, ASM)
    stored = norm.to(tl.float16)
    unit = units_of(stored, gain, ROWS * NORMS, ASM)
    scaled = tl.reshape(groups * unit[:, None], [ROWS, N])
    code = nearest_points(scaled, p_table, ROWS, N, POINTS, D, SIDE, FEW, MOST, ASM)
    o = tl.arange(0, N // D)
    head, column = o // (DIM // D), o % (DIM // D)
    o_codes = ((i_batch * HEADS + head) * tokens)[None, :] + token[:, None]
    tl.store(p_codes + o_codes * (DIM // D) + column[None, :], code.to(tl.uint8), mask=live[:, None])
    if DECODE:
        decoded = _decoded(code, stored, p_table, sign, scale, ROWS, N, NORMS, POINTS, D, LOG_WIDTH)
        o_decoded = ((i_batch * HEADS + at // DIM) * tokens)[None, :] + token[:, None]
        tl.store(p_decoded + o_decoded * DIM + (at % DIM)[None, :], decoded, mask=live[:, None])
    group = tl.arange(0, ROWS * NORMS)
    row = tl.program_id(0) * ROWS + group // NORMS
    tl.store(p_norm + (i_batch * NORMS + group % NORMS) * tokens + row, stored, mask=row < tokens)
    bad = tl.min(tl.min(tl.reshape((nothing == 0).to(tl.int32), [ROWS, HEADS, DIM]), 2), 0)
    big = tl.max(tl.reshape(tl.where((norm <= HALF_MAX) | (row >= tokens), 0, SCALE), [ROWS, NORMS]), 0)
    flags = tl.where(bad == 0, NONFINITE, 0) | big
    if tl.max(flags, 0) != 0:
        tl.atomic_or(p_flags + tl.arange(0, HEADS), flags)


def encode(
    x: Tensor, how: Rotated, flags: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `reference.encode` does, for any strides except for that of channels, which is 1; kv heads and head_dim
    are powers of two. Given flags are added to. out: contiguous.
    """
    batch, heads, tokens, dim = x.shape
    n, d = how.points.shape
    if heads & (heads - 1) or dim & (dim - 1) or not 16 <= dim <= 256:
        raise ValueError(f"{heads} kv heads of {dim}: must be powers of two, head_dim 16 to 256")
    if x.stride(3) != 1 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"input of {x.dtype}, strides {x.stride()}: float16, bfloat16 or float32 with contiguous channels"
        )
    if how.sign.shape != (heads * dim,) or how.norms not in (1, heads) or d not in (1, 2, 4) or n > 256:
        raise ValueError(
            f"signs {tuple(how.sign.shape)}, {how.norms} norms, {n} points of {d}: must be ({heads * dim},), 1 or "
            f"{heads}, "
            "at most 256 points of 1, 2 or 4"
        )
    width = how.rotation(dim)
    if width & (width - 1) or width > heads * dim:
        raise ValueError(f"rotation of {width} of {heads * dim} channels: must be a power of two that divides them")
    if out is not None and (out.shape != x.shape or out.dtype != torch.float32 or not out.is_contiguous()):
        raise ValueError(f"decoded into {tuple(out.shape)} {out.dtype}: must be contiguous float32 {tuple(x.shape)}")
    codes = torch.empty(batch, heads, tokens, dim // d, dtype=torch.uint8, device=x.device)
    norm = torch.empty(batch, how.norms, tokens, dtype=torch.float16, device=x.device)
    if flags is None:
        flags = torch.zeros(heads, dtype=torch.int32, device=x.device)
    fixed = settings(how, heads, dim)
    with on(x.device):
        encode_kernel[(-(-tokens // fixed["ROWS"]), batch)](
            x, how.sign, how.table, codes, norm, flags, norm if out is None else out, tokens,
            *x.stride()[:3], fixed["WIDTH"] ** -0.5, how.gain, **fixed, DECODE=out is not None, ASM=not interpreted(),
            num_warps=4, num_stages=1, enable_fp_fusion=False,
        )
    return codes, norm, flags


@triton.jit(do_not_specialize=["blocks"])
def pack_kernel(
    p_codes, p_words, blocks,
    DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, VALUE: tl.constexpr,
    IN_BYTES: tl.constexpr,
):
    """Pack with a grid (blocks, rows * heads)."""
    block = tl.program_id(1).to(tl.int64) * blocks + tl.program_id(0)
    o = tl.arange(0, 32)[:, None] * (DIM // D) + tl.arange(0, DIM // D)[None, :]
    code = tl.load(p_codes + block * (32 * DIM // D) + o).to(tl.int32)
    store_words(p_words + block * (WORDS // 2), code, block >= 0, DIM, BITS, D, VALUE, IN_BYTES)


def pack(codes: Tensor, form: Form) -> Tensor:
    """Pack codes uint8 (B, H, T, D / d), T whole blocks, as `encode` gives them -> the words of layout.pack, int16 (B,
    H, N, form.words).
    """
    batch, heads, tokens, count = codes.shape
    if codes.dtype != torch.uint8 or not codes.is_contiguous() or tokens % BLOCK or count * form.vector != form.dim:
        raise ValueError(

            f"codes {tuple(codes.shape)} {codes.dtype}: must be contiguous uint8, whole blocks of {BLOCK} tokens of "
            f"{form}",
        )
    if form.dim & (form.dim - 1):
        raise ValueError(f"head_dim {form.dim}: must be a power of two")
    words = torch.empty(batch, heads, tokens // BLOCK, form.words, dtype=torch.int16, device=codes.device)
    with on(codes.device):
        pack_kernel[(words.shape[2], batch * heads)](
            codes, words.view(torch.int32), words.shape[2],
            DIM=form.dim, BITS=form.bits, D=form.vector, WORDS=form.words, VALUE=form.role == "value",
            IN_BYTES=form.in_bytes, num_warps=4,
        )
    return words


def settings(how: Rotated, heads: int, dim: int) -> dict[str, int]:
    """Return the compile-time constants of encode_kernel."""
    width = how.rotation(dim)
    constants = {"HEADS": heads, "DIM": dim, "WIDTH": width, "NORMS": how.norms, "D": how.points.shape[1]}
    constants |= {"ROWS": max(1, NUMBERS // (heads * dim)), "LOG_WIDTH": width.bit_length() - 1}
    constants |= searched(how)
    return constants | {"LOG_NORM": (heads * dim // how.norms).bit_length() - 1}


def searched(how: Rotated) -> dict[str, int]:
    """Return the compile-time constants of `nearest_points` that follow from the points."""
    raster = how.raster
    sizes = {"SIDE": raster.side, "FEW": raster.few, "MOST": raster.most} if raster else NO_RASTER
    return {"POINTS": how.points.shape[0], **sizes}
