"""Queries over the transform codec: a kv head's meet the decoder's rows once, each warp those of some steps. A lane
loads what it has of second operands itself, and warps meet once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numbers import LOW, zeros
from ..queries import powers
from ..softmax import declare_parities, second_of, second_operand
from ..tiles import lane_zeros
from .codes import declare_lanes
from .decoder import matrix_tile, points_of, power, store_points
from .warps import declare_table, get, put, row_factors

LEAST = tl.constexpr(51 << 23)  # the least exponent of a query's peak, in a float32's place


@triton.constexpr_function
def two_numbers(word, kind):
    """Return assembly that makes floats u, v of a word's two numbers of 16 bits."""
    if kind == "bf16":
        return f"shl.b32 w, {word}, 16; mov.b32 u, w; and.b32 w, {word}, 0xFFFF0000; mov.b32 v, w;"
    return f"mov.b32 {{h, k}}, {word}; cvt.f32.f16 u, h; cvt.f32.f16 v, k;"


@triton.constexpr_function
def _addresses(even, odd, mean):
    """Return assembly for where column g's query and the mean begin for a lane (g, t), a and c, and whether there is
    such a query, p. even, odd: where those of columns 2 t and 2 t + 1 begin.
    """
    text = ["mov.u32 i, %laneid; and.b32 j, i, 3; shr.u32 i, i, 2; and.b32 w, i, 1; setp.eq.u32 p, w, 0;"]
    text += ["shr.u32 i, i, 1;"]  # lanes whose t is g // 2
    for into, of in (("a", even), ("c", odd)):
        text += [f"mov.b64 {{lo, hi}}, {of}; shfl.sync.idx.b32 lo, lo, i, 31, 0xffffffff;"]
        text += [f"shfl.sync.idx.b32 hi, hi, i, 31, 0xffffffff; mov.b64 {into}, {{lo, hi}};"]
    text += ["selp.b64 a, a, c, p; setp.ne.u64 p, a, 0; mul.wide.u32 c, j, 4; add.u64 a, a, c;"]
    return [*text, f"add.u64 c, {mean}, c;"]


@triton.constexpr_function
def _words(slices, kind):
    """Return assembly for all of a query's numbers that a lane has of second operands, before `second_of`, scaled by a
    power of two; and for columns 2 t and 2 t + 1 the power's inverse and the product with the mean. Operands behind
    outputs: where a column's query begins (0: it has none), and the mean.
    """
    many = 2 * slices
    text = ["{ .reg .pred p; .reg .b16 h, k; .reg .b32 w, i, j, lo, hi, m; .reg .b64 a, c; .reg .f32 u, v, s, x, y;"]
    text += [".reg .f32 peak, sum, up, down;", *_addresses(f"${many + 8}", f"${many + 9}", f"${many + 12}")]
    text += ["mov.f32 peak, 0f00000000; mov.f32 sum, 0f00000000;"]
    for n in range(many):
        text += [f"mov.b32 ${n}, 0; @p ld.global.b32 ${n}, [a + {16 * n}];"]
    for n in range(many):
        text += [f"ld.global.nc.b32 m, [c + {16 * n}]; mov.b32 {{h, k}}, m; cvt.f32.f16 x, h; cvt.f32.f16 y, k;"]
        text += [f"{two_numbers(f'${n}', kind)} fma.rn.f32 sum, u, x, sum; fma.rn.f32 sum, v, y, sum;"]
        text += ["abs.f32 u, u; abs.f32 v, v; max.f32 peak, peak, u; max.f32 peak, peak, v;"]
    for step in (1, 2):
        text += [f"shfl.sync.bfly.b32 s, peak, {step}, 31, 0xffffffff; max.f32 peak, peak, s;"]
        text += [f"shfl.sync.bfly.b32 s, sum, {step}, 31, 0xffffffff; add.f32 sum, sum, s;"]
    text += [f"mov.b32 w, peak; and.b32 w, w, 0x7F800000; max.u32 w, w, {LEAST.value}; mov.b32 up, w;"]
    text += [f"sub.u32 w, {254 << 23}, w; mov.b32 down, w; mul.f32 down, down, 0f41800000; mul.f32 up, up, 0f3D800000;"]
    for n in range(many):
        text += [f"{two_numbers(f'${n}', kind)} mul.f32 u, u, down; mul.f32 v, v, down; cvt.rn.f16x2.f32 ${n}, v, u;"]
    text += ["shl.b32 j, j, 3;"]
    for n in range(4):  # of column g, that is of lane 4 g
        to = many + n // 2 * 4 + n % 2
        text += [f"add.u32 i, j, {4 * (n % 2)}; shfl.sync.idx.b32 ${to}, {('up', 'sum')[n // 2]}, i, 31, 0xffffffff;"]
        text += [f"mov.f32 ${to + 2}, ${to};"]
    return " ".join([*text, "} // kvcal_matrix"])


@triton.constexpr_function
def _words_constraints(slices):
    return ",".join(["=&r"] * (2 * slices) + ["=&f"] * 8 + ["l"] * 8)


@triton.constexpr_function
def _words_types(slices):
    return (tl.float16,) * slices + (tl.float32, tl.float32)


@triton.constexpr_function
def _kind(dtype):
    return "bf16" if dtype == tl.bfloat16 else "fp16"


@triton.jit
def _scaled(p_q, p_mean, o_q, b_row, KEYS: tl.constexpr, SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
            ASM: tl.constexpr):
    """Return queries as second operands of 16 channels, times a power of two; one over it, and products with the mean,
    [NW, N].
    """
    channels = ()
    if ASM:
        nothing = lane_zeros(NW, N).to(tl.int64)
        at = tl.where(b_row, (p_q + o_q).to(tl.int64), 0)[None, None, :] + nothing
        words = tl.inline_asm_elementwise(
            _words(SLICES, _kind(p_q.dtype.element_ty)), _words_constraints(SLICES),
            [at, p_mean.to(tl.int64) + nothing], dtype=_words_types(SLICES), is_pure=False, pack=4,
        )
        for i in tl.static_range(SLICES):
            channels = channels + (second_of(words[i], NW, N),)
        b_up, b_mean = tl.max(words[SLICES], 1), tl.max(words[SLICES + 1], 1)
    else:
        r = tl.arange(0, 16)
        b_down, b_up = powers(p_q, o_q, b_row, KEYS, SLICES, 16.0, LEAST, False, N)
        b_mean = tl.zeros([N], tl.float32)
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0).to(tl.float32)
            b_mean += tl.sum(b_q * tl.load(p_mean + i * 16 + r).to(tl.float32)[:, None], 0)
            channels = channels + (tl.broadcast_to((b_q * b_down[None, :]).to(tl.float16)[None], [NW, 16, N]),)
        b_up, b_mean = tl.broadcast_to(b_up[None], [NW, N]), tl.broadcast_to(b_mean[None], [NW, N])
    return channels, b_up, b_mean


@triton.jit
def query_of(
    p_q, p_matrix, p_factor, p_mean, o_q, b_row, KEYS: tl.constexpr, SLICES: tl.constexpr, NW: tl.constexpr,
    N: tl.constexpr, ASM: tl.constexpr,
):
    """Return queries in coordinates, a float16 [NW, 16, N] for each product, as second operands; by what a row is
    larger, and its product with the mean, [NW, N].
    """
    STEPS: tl.constexpr = KEYS.steps
    warp = tl.arange(0, NW)
    tiles = ()
    if ASM:  # all on their way before the query is waited for
        for i in tl.static_range(0, STEPS, NW):
            for j in tl.static_range(SLICES):
                tiles = tiles + (matrix_tile(p_matrix, tl.minimum(i + warp, STEPS - 1) * SLICES + j, NW, True),)
    channels, b_up, b_mean = _scaled(p_q, p_mean, o_q, b_row, KEYS, SLICES, NW, N, ASM)
    shares, b_peak = (), tl.zeros([NW, 16, N], tl.float32)
    for i in tl.static_range(0, STEPS, NW if ASM else 1):  # a step for each warp; behind the last one it is repeated
        step = tl.minimum(i + (warp if ASM else warp * 0), STEPS - 1)
        b_c = tl.zeros([NW, 16, N], tl.float32)
        for j in tl.static_range(SLICES):
            if ASM:
                b_c = tl.dot(tiles[i // NW * SLICES + j], channels[j], b_c)
            else:
                b_c = tl.dot(matrix_tile(p_matrix, step * SLICES + j, NW, False), channels[j], b_c)
        b_c = b_c * row_factors(p_factor, step, NW, N, ASM)
        if ASM:
            put(b_c, i + warp, NW, N)
        else:
            shares = shares + (b_c,)
    if ASM:
        tl.debug_barrier()
        for i in tl.static_range(STEPS):
            shares = shares + (get(warp * 0 + i, NW, N),)
        tl.debug_barrier()  # they have been read before the table is written
    for i in tl.static_range(STEPS):
        b_peak = tl.maximum(b_peak, tl.abs(shares[i]))
    b_less, b_more = power(tl.max(b_peak, 1), 16.0)
    q = ()
    for i in tl.static_range(STEPS):
        q = q + (second_operand((shares[i] * b_less[:, None, :]).to(tl.float16), NW, N, ASM),)
    return q, b_more * b_up, b_mean


@triton.jit
def begin(
    p_q, p_key_basis, p_factor, p_mean, p_points, o_q, b_row, to, zero, i_kv, factor, KEYS: tl.constexpr,
    VALUES: tl.constexpr, SLICES: tl.constexpr, ENTRIES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return what a program begins its packed blocks with: queries, by what scores are multiplied, queries' products
    with the mean, maxima, sums and outputs. Points are in the table, and lanes know their places. to: where a warp's
    slots begin, [32 NW].
    """
    STEPS: tl.constexpr = KEYS.steps
    VALUE_STEPS: tl.constexpr = VALUES.steps
    pairs, base = (), 0
    if ASM:
        pairs = points_of(p_points, ENTRIES)
        base = declare_table(zero, ENTRIES, KEYS, VALUES, NW, N)
    q, b_up, b_mean = query_of(
        p_q, p_key_basis + i_kv * (STEPS * SLICES * 256), p_factor, p_mean + i_kv * (SLICES * 16), o_q, b_row, KEYS,
        SLICES, NW, N, ASM,
    )
    if ASM:
        declare_parities()
        declare_lanes(to)
        store_points(base, pairs, ENTRIES)
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    return q, b_up * factor, b_mean, b_m, tl.zeros([NW, 16, N], tl.float32), zeros(VALUE_STEPS, NW, N)
