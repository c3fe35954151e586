"""Parts of the attention kernel over the transform codec that were written to be timed beside the cache's kernel
(transform_attention.py): what a program does besides its loop over packed blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcal_kernels.attention.triton.exact import exact_tokens
from kvcal_kernels.attention.triton.merge import blocks_of_split, merge_splits, store_split
from kvcal_kernels.attention.triton.numbers import LOW, zeros
from kvcal_kernels.attention.triton.queries import powers, row_offset
from kvcal_kernels.attention.triton.ring import pages_of
from kvcal_kernels.attention.triton.softmax import by_parity, declare_parities, second_of, second_operand
from kvcal_kernels.attention.triton.tiles import lane_zeros
from kvcal_kernels.attention.triton.transform.blocks import packed_blocks
from kvcal_kernels.attention.triton.transform.codes import declare_lanes
from kvcal_kernels.attention.triton.transform.decoder import _power, matrix_tile, output_of, query_of
from kvcal_kernels.attention.triton.transform.ring import open_ring, origins_of

even_blocks = blocks_of_split  # which `staggered_blocks` may stand for


@triton.jit
def staggered_blocks(
    i_split, blocks, packed_splits, tail_start, tail_cost, tail_total, NW: tl.constexpr, LONG: tl.constexpr
):
    """`merge.blocks_of_split`, but of three splits of a group the first ends a third of a split later, or the second
    does, by halves of the groups. Where two rounds of programs run, a multiprocessor's three then end one by one, and
    while one begins or ends the others read.
    """
    start, stop = even_blocks(i_split, blocks, packed_splits, tail_start, tail_cost, tail_total, NW, LONG)
    groups = tl.num_programs(0) * tl.num_programs(1)
    late = tl.where(tl.program_id(0) + tl.program_id(1) * tl.num_programs(0) < groups // 2, 0, 1)
    third = blocks // 9 // (2 * NW) * (2 * NW)
    if packed_splits == 3:
        start = tl.minimum(start + tl.where(i_split == late + 1, third, 0), blocks)
        stop = tl.minimum(stop + tl.where(i_split == late, third, 0), blocks)
    return start, stop


@triton.constexpr_function
def _query(slice_pair):
    """Return assembly for a lane's channels 8 t to 8 t + 7 of 32 from `slice_pair` on, as two products have them."""
    return f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {64 * slice_pair}]; // kvcal_matrix"


@triton.constexpr_function
def _keys(slice_pair):
    """Return assembly for the same channels of a lane's two tokens, as two products' first operands."""
    at = 64 * slice_pair
    return f"ld.global.v4.b32 {{$0, $2, $4, $6}}, [$8 + {at}]; ld.global.v4.b32 {{$1, $3, $5, $7}}, [$16 + {at}]; // kvcal_matrix"


@triton.constexpr_function
def _values(tile):
    """Return assembly for the pairs of channels g and g + 8 of a tile of a lane's two tokens, as a first operand."""
    loads = [f"ld.global.b32 ${i}, [${4 + i // 2 * 8} + {64 * tile + i % 2 * 32}];" for i in range(4)]
    return " ".join([*loads, "// kvcal_matrix"])


@triton.constexpr_function
def _operands(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["l"] * inputs)


@triton.jit
def _as(x, p):
    """Return bits as numbers of the type to which p points."""
    return x.to(p.dtype.element_ty, bitcast=True)


@triton.jit
def _address(p, token, count, first, capacity, i_head, element, D: tl.constexpr, RING: tl.constexpr):
    """Return where number `element` of tokens lies, int64; those behind the last one stand for it."""
    token = tl.minimum(token, count - 1)
    if RING:
        token = tl.where(first + token >= capacity, first + token - capacity, first + token)
    return (p + i_head * capacity * D).to(tl.int64) + (token * D + element).to(tl.int64) * 2


@triton.jit
def _window(
    p_k,
    p_v,
    p_q,
    q_at,
    i_head,
    capacity,
    first,
    limit,
    begin,
    end,
    factor,
    b_m,
    b_l,
    acc,
    SLICES: tl.constexpr,
    NW: tl.constexpr,
    N: tl.constexpr,
    RING: tl.constexpr,
):
    """`exact._window_tokens` over values in pairs, without a barrier: each lane loads what it has of a product's
    operands, and all loads of a tile are on their way at once. q_at [NW, 16, N] int64: where the query's numbers lie.
    """
    D: tl.constexpr = SLICES * 16
    r, k = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    b_token = tl.arange(0, NW)[:, None] * 16 + tl.arange(0, 16)[None, :]
    warp, g, t = tl.arange(0, NW)[:, None, None] * 16 + lane_zeros(NW), r % 8, k % 8 // 2
    for start in tl.range(begin, end, NW * 16, num_stages=1):
        token = start + warp
        low = _address(p_k, token + g, end, first, capacity, i_head, t * 8, D, RING)
        high = _address(p_k, token + g + 8, end, first, capacity, i_head, t * 8, D, RING)
        keys, queries, values = (), (), ()
        for i in tl.static_range(SLICES // 2):
            pair = tl.inline_asm_elementwise(
                _keys(i), _operands(8, 16), [low, high], dtype=(tl.int16, tl.int16), is_pure=False, pack=8
            )
            keys = keys + (_as(pair[0], p_k), _as(pair[1], p_k))
            pair = tl.inline_asm_elementwise(
                _query(i), _operands(4, 4), [q_at], dtype=(tl.int16, tl.int16), is_pure=False, pack=4
            )
            queries = queries + (second_of(_as(pair[0], p_q), NW, N), second_of(_as(pair[1], p_q), NW, N))
        for j in tl.static_range(2):
            even = _address(p_v, token + 8 * j + 2 * t, end, first, capacity, i_head, g * 2, D, RING)
            odd = _address(p_v, token + 8 * j + 2 * t + 1, end, first, capacity, i_head, g * 2, D, RING)
            for i in tl.static_range(SLICES // 2):
                tile = tl.inline_asm_elementwise(
                    _values(i), _operands(4, 16), [even, odd], dtype=tl.int16, is_pure=False, pack=8
                )
                values = values + (_as(tile, p_v),)
        b_s = tl.zeros([NW, 16, N], tl.float32)
        for i in tl.static_range(SLICES):
            b_s = tl.dot(keys[i], queries[i], b_s)
        seen = (start + b_token)[:, :, None] < tl.minimum(limit, end)[None, None, :]
        b_s = tl.where(seen, b_s * factor, LOW)
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        fade = tl.exp2(b_m - b_new)
        b_p = tl.exp2(b_s - b_new[:, None, :]).to(p_v.dtype.element_ty)
        b_l = b_l * fade + tl.sum(b_p.to(tl.float32), 1)
        b_m = b_new
        parts = by_parity(b_p.to(tl.float16, bitcast=True), True, NW, N)
        halves = (_as(parts[0], p_v), _as(parts[1], p_v))
        outputs = ()
        for i in tl.static_range(SLICES // 2):
            b_o = acc[i] * fade[:, None, :]
            for j in tl.static_range(2):
                b_o = tl.dot(values[j * (SLICES // 2) + i], halves[j], b_o)
            outputs = outputs + (b_o,)
        acc = outputs
    return b_m, b_l, acc


@triton.jit
def direct_exact_tokens(
    p_sink_k,
    p_sink_v,
    p_recent_k,
    p_recent_v,
    p_q,
    o_q,
    b_row,
    n,
    i_head,
    i_batch,
    begin,
    tail_tokens,
    sink_splits,
    sink,
    recent,
    blocks,
    sink_capacity,
    recent_capacity,
    factor,
    b_m,
    b_l,
    out,
    p_first,
    p_near,
    run,
    runs,
    VALUES: tl.constexpr,
    SLICES: tl.constexpr,
    PAIRED: tl.constexpr,
    STAGES: tl.constexpr,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    PAIRS: tl.constexpr,
    NW: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
    RING: tl.constexpr,
):
    """`exact.exact_tokens` with `_window`."""
    if not ASM:
        b_m, b_l, out = exact_tokens(
            p_sink_k,
            p_sink_v,
            p_recent_k,
            p_recent_v,
            p_q,
            o_q,
            b_row,
            n,
            i_head,
            i_batch,
            begin,
            tail_tokens,
            sink_splits,
            sink,
            recent,
            blocks,
            sink_capacity,
            recent_capacity,
            factor,
            b_m,
            b_l,
            out,
            p_first,
            p_near,
            run,
            runs,
            VALUES,
            SLICES,
            PAIRED,
            STAGES,
            RATIO,
            QUERIES,
            PAIRS,
            NW,
            N,
            ASM,
            RING,
        )
    else:
        behind = QUERIES - 1 - n // RATIO
        # query rows in the order in which `second_of` makes columns of rows; those behind the last stand for it
        row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, N)[None, None, :]
        here = tl.min(n, 0) + (column // 8 * 8 + row % 8) // 2 + lane_zeros(NW, N)
        here = tl.minimum(here, RATIO * QUERIES - 1)
        o_here = (here % RATIO * QUERIES + here // RATIO) * (SLICES * 16) + column % 8 // 2 * 8
        q_at = (p_q + i_head * (RATIO * QUERIES * SLICES * 16)).to(tl.int64) + o_here.to(tl.int64) * 2
        if begin < sink_splits * tail_tokens:
            b_m, b_l, out = _window(
                p_sink_k,
                p_sink_v,
                p_q,
                q_at,
                i_head,
                sink_capacity,
                0,
                sink + tl.minimum(recent - behind, 0),
                begin,
                tl.minimum(begin + tail_tokens, sink),
                factor,
                b_m,
                b_l,
                out,
                SLICES,
                NW,
                N,
                False,
            )
        else:
            begin -= sink_splits * tail_tokens
            b_m, b_l, out = _window(
                p_recent_k,
                p_recent_v,
                p_q,
                q_at,
                i_head,
                recent_capacity,
                blocks * 32 % recent_capacity,
                recent - behind,
                begin,
                tl.minimum(begin + tail_tokens, recent),
                factor,
                b_m,
                b_l,
                out,
                SLICES,
                NW,
                N,
                RING,
            )
    return b_m, b_l, out


@triton.constexpr_function
def _two_numbers(word, kind):
    """Return assembly that makes floats u, v of a word's two numbers of 16 bits."""
    if kind == "bf16":
        return f"shl.b32 w, {word}, 16; mov.b32 u, w; and.b32 w, {word}, 0xFFFF0000; mov.b32 v, w;"
    return f"mov.b32 {{h, k}}, {word}; cvt.f32.f16 u, h; cvt.f32.f16 v, k;"


@triton.constexpr_function
def _query_words(slices, kind):
    """Return assembly for all of a query's numbers that a lane has of second operands, before `second_of`, scaled by a
    power of two; and for two columns 2 t and 2 t + 1 the power's inverse and the product with the mean. Operands
    behind outputs: where a column's query begins (0: it has none, four of them, two of which differ), and the mean.
    """
    many = 2 * slices
    at, mean = f"${many + 8}", f"${many + 12}"
    other = f"${many + 9}"
    text = ["{ .reg .pred p; .reg .b16 h, k; .reg .b32 w, i, j, lo, hi, m; .reg .b64 a, c; .reg .f32 u, v, s, x, y;"]
    text += [".reg .f32 peak, sum, up, down;"]
    # the address of column g lies in lanes whose t is g // 2
    text += ["mov.u32 i, %laneid; and.b32 j, i, 3; shr.u32 i, i, 2; and.b32 w, i, 1; setp.eq.u32 p, w, 0;"]
    text += ["shr.u32 i, i, 1;"]
    for into, of in (("a", at), ("c", other)):
        text += [f"mov.b64 {{lo, hi}}, {of}; shfl.sync.idx.b32 lo, lo, i, 31, 0xffffffff;"]
        text += [f"shfl.sync.idx.b32 hi, hi, i, 31, 0xffffffff; mov.b64 {into}, {{lo, hi}};"]
    text += ["selp.b64 a, a, c, p; setp.ne.u64 p, a, 0; mul.wide.u32 c, j, 4; add.u64 a, a, c;"]
    text += [f"add.u64 c, {mean}, c; mov.f32 peak, 0f00000000; mov.f32 sum, 0f00000000;"]
    for n in range(many):
        text += [f"mov.b32 ${n}, 0; @p ld.global.b32 ${n}, [a + {16 * n}];"]
    for n in range(many):
        text += [f"ld.global.nc.b32 m, [c + {16 * n}]; mov.b32 {{h, k}}, m; cvt.f32.f16 x, h; cvt.f32.f16 y, k;"]
        text += [f"{_two_numbers(f'${n}', kind)} fma.rn.f32 sum, u, x, sum; fma.rn.f32 sum, v, y, sum;"]
        text += ["abs.f32 u, u; abs.f32 v, v; max.f32 peak, peak, u; max.f32 peak, peak, v;"]
    for step in (1, 2):
        text += [f"shfl.sync.bfly.b32 s, peak, {step}, 31, 0xffffffff; max.f32 peak, peak, s;"]
        text += [f"shfl.sync.bfly.b32 s, sum, {step}, 31, 0xffffffff; add.f32 sum, sum, s;"]
    text += [f"mov.b32 w, peak; and.b32 w, w, 0x7F800000; max.u32 w, w, {51 << 23}; mov.b32 up, w;"]
    text += [f"sub.u32 w, {254 << 23}, w; mov.b32 down, w; mul.f32 down, down, 0f41800000; mul.f32 up, up, 0f3D800000;"]
    for n in range(many):
        text += [f"{_two_numbers(f'${n}', kind)} mul.f32 u, u, down; mul.f32 v, v, down;"]
        text += [f"cvt.rn.f16x2.f32 ${n}, v, u;"]
    text += ["shl.b32 j, j, 3;"]
    for n, what in enumerate(("up", "sum")):
        for column in range(2):
            to = many + 4 * n + column
            text += [f"add.u32 i, j, {4 * column}; shfl.sync.idx.b32 ${to}, {what}, i, 31, 0xffffffff;"]
            text += [f"mov.f32 ${to + 2}, ${to};"]
    return " ".join([*text, "} // kvcal_matrix"])


@triton.constexpr_function
def _query_constraints(slices):
    return ",".join(["=&r"] * (2 * slices) + ["=&f"] * 8 + ["l"] * 8)


@triton.constexpr_function
def _query_types(slices):
    return (tl.float16,) * slices + (tl.float32, tl.float32)


@triton.constexpr_function
def _kind(dtype):
    return "bf16" if dtype == tl.bfloat16 else "fp16"


@triton.constexpr_function
def _row_numbers():
    """Return assembly that loads float32 of rows g and g + 8, for both columns."""
    return "ld.global.nc.f32 $0, [$4]; mov.f32 $1, $0; ld.global.nc.f32 $2, [$4+32]; mov.f32 $3, $2; // kvcal_matrix"


@triton.constexpr_function
def _mean_numbers():
    """Return assembly that loads two float16 for row g, and two for row g + 8."""
    text = "{ .reg .b16 h, k; .reg .b32 m; ld.global.nc.b32 m, [$4]; mov.b32 {h, k}, m; cvt.f32.f16 $0, h;"
    text += " cvt.f32.f16 $1, k; ld.global.nc.b32 m, [$4+32]; mov.b32 {h, k}, m; cvt.f32.f16 $2, h; cvt.f32.f16 $3, k;"
    return text + " } // kvcal_matrix"


@triton.constexpr_function
def _table(size):
    """Return assembly that declares the table, which warps exchange numbers in before and after it is one."""
    text = f".shared .align 128 .b8 kvcal_table[{size}]; .reg .b32 kvcal_bank, kvcal_mine; mov.u32 $0, kvcal_table;"
    text += " mov.u32 kvcal_bank, %laneid; mad.lo.u32 kvcal_mine, kvcal_bank, 16, $0;"
    return text + " mad.lo.u32 kvcal_bank, kvcal_bank, 4, $0;"


@triton.jit
def _put(x, tile, column, N: tl.constexpr):
    """Store a tile's numbers where every warp sees them, [NW, 16, N] float32: tile is its number, of each warp."""
    tl.inline_asm_elementwise(
        "{ .reg .b32 a; mad.lo.u32 a, $8, 512, kvcal_mine; st.shared.v4.f32 [a], {$4, $5, $6, $7};"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; } // kvcal_matrix",
        "=r,=r,=r,=r,f,f,f,f,r,r,r,r",
        [x, tile * (N // 8) + column // 8],
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _get(tile, column, N: tl.constexpr):
    """Load what `_put` has stored."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a; mad.lo.u32 a, $4, 512, kvcal_mine; ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; } // kvcal_matrix",
        "=f,=f,=f,=f,r,r,r,r",
        [tile * (N // 8) + column // 8],
        dtype=tl.float32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _exchanged_operand(x, NW: tl.constexpr, N: tl.constexpr):
    """`second_operand` where neighbouring columns exchange places."""
    exchanged = tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $2, 0, 0x1032; movmatrix.sync.aligned.m8n8.trans.b16 $0, t;"
        " prmt.b32 t, $3, 0, 0x1032; movmatrix.sync.aligned.m8n8.trans.b16 $1, t; }",
        "=&r,=r,r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )
    return second_of(exchanged, NW, N)


@triton.jit
def _row_factors(p, NW: tl.constexpr, N: tl.constexpr):
    """Load 16 float32 of each warp's rows; p [NW, 1, 1]."""
    row = tl.arange(0, 16)[None, :, None] % 8
    at = (p + row).to(tl.int64) + lane_zeros(NW, N).to(tl.int64)
    return tl.inline_asm_elementwise(
        _row_numbers(), "=&f,=&f,=&f,=&f,l,l,l,l", [at], dtype=tl.float32, is_pure=False, pack=4
    )


@triton.jit
def quick_query(
    p_q,
    p_matrix,
    p_factor,
    p_mean,
    o_q,
    b_row,
    KEYS: tl.constexpr,
    SLICES: tl.constexpr,
    NW: tl.constexpr,
    N: tl.constexpr,
):
    """`decoder.query_of`, and `powers`: warps meet once."""
    STEPS: tl.constexpr = KEYS.steps
    ROUNDS: tl.constexpr = (STEPS + NW - 1) // NW
    r, warp = tl.arange(0, 16), tl.arange(0, NW)
    nothing = lane_zeros(NW, N)
    column = tl.arange(0, N)[None, None, :] + nothing
    tiles = ()
    for i in tl.static_range(ROUNDS):
        step = tl.minimum(i * NW + warp, STEPS - 1)
        for j in tl.static_range(SLICES):
            tiles = tiles + (matrix_tile(p_matrix, step * SLICES + j, NW, True),)
    at = tl.where(b_row, (p_q + o_q).to(tl.int64), 0)[None, None, :] + nothing.to(tl.int64)
    mean_at = p_mean.to(tl.int64) + nothing.to(tl.int64)
    words = tl.inline_asm_elementwise(
        _query_words(SLICES, _kind(p_q.dtype.element_ty)),
        _query_constraints(SLICES),
        [at, mean_at],
        dtype=_query_types(SLICES),
        is_pure=False,
        pack=4,
    )
    for i in tl.static_range(ROUNDS):
        step = tl.minimum(i * NW + warp, STEPS - 1)
        b_c = tl.zeros([NW, 16, N], tl.float32)
        for j in tl.static_range(SLICES):
            b_c = tl.dot(tiles[i * SLICES + j], second_of(words[j], NW, N), b_c)
        b_c = b_c * _row_factors(p_factor + step[:, None, None] * 16, NW, N)
        _put(b_c, (i * NW + warp)[:, None, None] + nothing, column, N)
    tl.debug_barrier()
    shares, b_peak = (), tl.zeros([NW, 16, N], tl.float32)
    for i in tl.static_range(STEPS):
        b_c = _get(nothing + i, column, N)
        b_peak = tl.maximum(b_peak, tl.abs(b_c))
        shares = shares + (b_c,)
    tl.debug_barrier()  # before the table is written
    b_less, b_more = _power(tl.max(b_peak, 1), 16.0)
    q = ()
    for i in tl.static_range(STEPS):
        q = q + (second_operand((shares[i] * b_less[:, None, :]).to(tl.float16), NW, N, True),)
    return q, b_more * tl.max(words[SLICES], 1), tl.max(words[SLICES + 1], 1)


@triton.jit
def quick_output(
    acc,
    b_m,
    b_l,
    b_mean,
    factor,
    p_matrix,
    p_factor,
    p_mean,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    NW: tl.constexpr,
    N: tl.constexpr,
):
    """`decoder.output_of`: warps meet twice."""
    STEPS: tl.constexpr = VALUES.steps
    ROUNDS: tl.constexpr = (STEPS + NW - 1) // NW
    r, warp = tl.arange(0, 16), tl.arange(0, NW)
    nothing = lane_zeros(NW, N)
    column = tl.arange(0, N)[None, None, :] + nothing
    here = warp[:, None, None] + nothing
    tiles = ()
    for i in tl.static_range(WIDE if ROUNDS == 1 else 0):
        for k in tl.static_range(4):
            tiles = tiles + (matrix_tile(p_matrix, (i * STEPS + tl.minimum(warp, STEPS - 1)) * 4 + k, NW, True),)
    tl.debug_barrier()  # the table has been read
    _put(b_m, here, column, N)
    for i in tl.static_range(STEPS):
        _put(acc[i], here + NW * (1 + i), column, N)
    tl.debug_barrier()
    tops = ()
    b_top = b_m
    for w in tl.static_range(NW):
        tops = tops + (_get(nothing + w, column, N),)
        b_top = tl.maximum(b_top, tops[w])
    b_l = tl.sum(b_l * tl.exp2(b_m - b_top), 1)
    fades = ()
    for w in tl.static_range(NW):
        fades = fades + (tl.exp2(tops[w] - b_top),)
    parts, b_peak = (), tl.zeros([NW, N], tl.float32)
    shares = ()
    for k in tl.static_range(ROUNDS):
        step = tl.minimum(k * NW + warp, STEPS - 1)
        b_a = tl.zeros([NW, 16, N], tl.float32)
        for w in tl.static_range(NW):
            b_a += _get((step * NW)[:, None, None] + (nothing + NW + w), column, N) * fades[w]
        b_a = b_a * _row_factors(p_factor + step[:, None, None] * 16, NW, N)
        b_a = tl.where((k * NW + warp < STEPS)[:, None, None], b_a, 0.0)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_a), 1))
        shares = shares + (b_a,)
    # a query row's two columns exchange places: both are scaled alike
    b_peak = tl.broadcast_to(tl.max(tl.reshape(b_peak, [NW, N // 2, 2]), 2)[:, :, None], [NW, N // 2, 2])
    b_less, b_more = _power(tl.reshape(b_peak, [NW, N]), 64.0)
    for k in tl.static_range(ROUNDS):
        b_a = shares[k] * b_less[:, None, :]
        b_high = b_a.to(tl.float16)
        b_low = (b_a - b_high.to(tl.float32)).to(tl.float16)
        parts = parts + (second_operand(b_high, NW, N, True), second_operand(b_low, NW, N, True))
        parts = parts + (_exchanged_operand(b_high, NW, N), _exchanged_operand(b_low, NW, N))
    odd = column % 2 == 1
    out = ()
    for i in tl.static_range(WIDE):
        b_even = tl.zeros([NW, 16, N], tl.float32)
        b_odd = b_even
        for j in tl.static_range(ROUNDS):
            step = tl.minimum(j * NW + warp, STEPS - 1)
            for k in tl.static_range(4):  # whether of odd coordinates, and whether to odd channels
                m = tiles[i * 4 + k] if ROUNDS == 1 else matrix_tile(p_matrix, (i * STEPS + step) * 4 + k, NW, True)
                if k % 2 == 0:
                    b_even = tl.dot(m, parts[j * 4 + k], tl.dot(m, parts[j * 4 + k + 1], b_even))
                else:
                    b_odd = tl.dot(m, parts[j * 4 + 3 - k], tl.dot(m, parts[j * 4 + 4 - k], b_odd))
        at = (p_mean + (i * 32 + r % 8 * 2)[None, :, None]).to(tl.int64) + nothing.to(tl.int64)
        mean = tl.inline_asm_elementwise(
            _mean_numbers(), "=&f,=&f,=&f,=&f,l,l,l,l", [at], dtype=tl.float32, is_pure=False, pack=4
        )
        out = out + (tl.where(odd, b_odd, b_even) * b_more[:, None, :] + mean * b_l[:, None, :],)
    return out, tl.max(b_top, 1) + b_mean * factor, b_l


@triton.constexpr_function
def _table_bytes(entries, keys, values, warps, columns):
    """Return the bytes of the table: at least what warps exchange."""
    tiles = max(-(-keys.steps // warps), values.steps + 1) * warps
    return max(entries * 128, tiles * 64 * columns)


@triton.jit
def _points(p_table, ENTRIES: tl.constexpr):
    """Load what `_store_points` stores, a tuple."""
    p_pairs = p_table.to(tl.pointer_type(tl.int32))
    pairs = ()
    for first in tl.static_range(0, ENTRIES * 8, 512):
        i = tl.minimum(first + tl.arange(0, 512), ENTRIES * 8 - 1)
        pairs = pairs + (tl.load(p_pairs + (i >> 3)),)
    return pairs


@triton.jit
def _store_points(base, pairs, ENTRIES: tl.constexpr):
    for first in tl.static_range(0, ENTRIES * 8, 512):
        i = tl.minimum(first + tl.arange(0, 512), ENTRIES * 8 - 1)
        tl.inline_asm_elementwise(
            "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;",
            "=r,r,r",
            [base + i * 16, pairs[first // 512]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        "capacity",
        "sink_capacity",
        "recent_capacity",
        "packed_splits",
        "tail_start",
        "tail_cost",
        "tail_total",
        "sink_splits",
        "splits",
        "tail_tokens",
        "merge_width",
        "merges",
    ],
    do_not_specialize_on_alignment=["p_blocks", "p_sink", "p_recent"],
)
def quick_kernel(
    p_q,
    p_out,
    p_k4,
    p_k3,
    p_k2,
    p_k1,
    p_kn,
    p_v4,
    p_v3,
    p_v2,
    p_v1,
    p_vn,
    p_sink_k,
    p_sink_v,
    p_recent_k,
    p_recent_v,
    p_blocks,
    p_sink,
    p_recent,
    p_partial,
    p_stat,
    p_count,
    p_table,
    p_key_basis,
    p_value_basis,
    p_factor,
    p_mean,
    capacity,
    sink_capacity,
    recent_capacity,
    packed_splits,
    tail_start,
    tail_cost,
    tail_total,
    sink_splits,
    splits,
    tail_tokens,
    merge_width,
    merges,
    factor,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TABLES: tl.constexpr,
    ENTRIES: tl.constexpr,
    SLOTS: tl.constexpr,
    NW: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
    RING: tl.constexpr,
    LONG: tl.constexpr,
):
    """Attend with a grid (batch, HEADS * CHUNKS, splits), as `attend_kernel` does. p_k4 to p_k1, p_v4 to p_v1: codes of
    tiers, p_kn, p_vn norms. p_key_basis, p_value_basis: decoders in tiles, of each head. p_factor: of coordinates of
    keys, then of values. p_mean: of keys, then of values (2, HEADS, D).
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32
    QUERY_ROWS: tl.constexpr = N // 2
    KEY_STEPS: tl.constexpr = KEYS.steps
    VALUE_STEPS: tl.constexpr = VALUES.steps
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    n = i_chunk * QUERY_ROWS + tl.arange(0, N) // 2
    b_row = n < RATIO * QUERIES
    o_q = row_offset(i_head, n, RATIO, QUERIES, D)
    sink, recent = tl.load(p_sink + i_batch), tl.load(p_recent + i_batch)
    blocks = tl.minimum(tl.load(p_blocks + i_batch), capacity)  # a graph may be replayed once too often
    start, stop = blocks_of_split(i_split, blocks, packed_splits, tail_start, tail_cost, tail_total, NW, LONG)
    key_pointers, value_pointers = (p_k4, p_k3, p_k2, p_k1), (p_v4, p_v3, p_v2, p_v1)
    lane, last = tl.arange(0, 32 * NW) % 32, tl.maximum(stop, 1) - 1

    # blocks are on their way while the query is rotated
    origins = ()
    to = tl.zeros([32 * NW], tl.int32)
    if ASM:
        origins = origins_of(
            key_pointers, p_kn, value_pointers, p_vn, i_head, i_batch, capacity, lane, KEYS, VALUES, False
        )
        to += open_ring(origins, p_blocks, 0, lane, i_split * 0, start, last, KEYS, VALUES, SLOTS, False, NW)
    i_group = i_head * CHUNKS + i_chunk
    p_rows = p_key_basis + i_kv * (KEY_STEPS * SLICES * 256)
    if ASM:
        pairs = _points(p_table, ENTRIES)
        base = tl.inline_asm_elementwise(
            _table(_table_bytes(ENTRIES, KEYS, VALUES, NW, N)),
            "=r,r",
            [i_split * 0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        q, b_up, b_mean = quick_query(p_q, p_rows, p_factor, p_mean + i_kv * D, o_q, b_row, KEYS, SLICES, NW, N)
        declare_parities()
        declare_lanes(to)
        _store_points(base, pairs, ENTRIES)
    else:
        b_down, b_up = powers(p_q, o_q, b_row, KEYS, SLICES, 16.0, 51 << 23, False, N)
        q, b_up, b_mean = query_of(
            p_q, p_rows, p_factor, p_mean + i_kv * D, o_q, b_row, b_down, b_up, KEYS, SLICES, NW, N, ASM
        )
    unit = b_up * factor
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    b_l = tl.zeros([NW, 16, N], tl.float32)
    acc = zeros(VALUE_STEPS, NW, N)
    b_m, b_l, acc = packed_blocks(
        key_pointers,
        p_kn,
        value_pointers,
        p_vn,
        p_blocks,
        0,
        p_table,
        i_head,
        i_batch,
        start,
        stop,
        stop,
        0,
        origins,
        to,
        to,
        lane,
        q,
        unit,
        b_m,
        b_l,
        acc,
        capacity,
        KEYS,
        VALUES,
        TABLES,
        SLOTS,
        False,
        NW,
        N,
        ASM,
    )
    p_decoder = p_value_basis + i_kv * (WIDE * VALUE_STEPS * 1024)
    if ASM:
        out, b_m, b_l = quick_output(
            acc,
            b_m,
            b_l,
            b_mean,
            factor,
            p_decoder,
            p_factor + KEY_STEPS * 16,
            p_mean + (HEADS + i_kv) * D,
            VALUES,
            WIDE,
            NW,
            N,
        )
    else:
        out, b_m, b_l = output_of(
            acc,
            b_m,
            b_l,
            b_mean,
            factor,
            p_decoder,
            p_factor + KEY_STEPS * 16,
            p_mean + (HEADS + i_kv) * D,
            VALUES,
            WIDE,
            NW,
            N,
            ASM,
        )
    if i_split >= tail_start:
        b_m, b_l, out = direct_exact_tokens(
            p_sink_k,
            p_sink_v,
            p_recent_k,
            p_recent_v,
            p_q,
            o_q,
            b_row,
            n,
            i_head,
            i_batch,
            (i_split - tail_start) * tail_tokens,
            tail_tokens,
            sink_splits,
            sink,
            recent,
            blocks,
            sink_capacity,
            recent_capacity,
            factor,
            b_m,
            b_l,
            out,
            p_blocks,
            p_blocks,
            0,
            0,
            VALUES,
            SLICES,
            1,
            1,
            RATIO,
            QUERIES,
            0,
            NW,
            N,
            ASM,
            RING,
        )
    store_split(
        p_partial,
        p_stat,
        out,
        b_m,
        b_l,
        i_group * splits + i_split,
        b_row,
        i_split >= tail_start,
        VALUES,
        WIDE,
        1,
        1,
        2,
        D,
        NW,
        N,
    )
    tl.debug_barrier()  # all of the program's stores come before its arrival
    merge_splits(
        p_out,
        p_partial,
        p_stat,
        p_count,
        i_head,
        i_group,
        i_chunk,
        i_split,
        splits,
        merge_width,
        merges,
        RATIO,
        QUERIES,
        D,
        AT_ONCE,
        ROWS,
        QUERY_ROWS,
        ASM,
    )


@triton.jit(
    do_not_specialize=[
        "q_stride",
        "page_stride",
        "head_stride",
        "table_stride",
        "capacity",
        "splits",
        "merge_width",
        "merges",
    ],
    do_not_specialize_on_alignment=["p_q", "p_table", "p_lengths", "p_starts"],
)
def quick_paged_kernel(
    p_q,
    p_out,
    p_pages,
    p_table,
    p_lengths,
    p_starts,
    p_partial,
    p_stat,
    p_count,
    p_points,
    p_key_basis,
    p_value_basis,
    p_factor,
    p_mean,
    q_stride,
    page_stride,
    head_stride,
    table_stride,
    capacity,
    splits,
    merge_width,
    merges,
    factor,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TABLES: tl.constexpr,
    ENTRIES: tl.constexpr,
    SLOTS: tl.constexpr,
    NW: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
    LONG: tl.constexpr,
):
    """Attend with a grid (batch, HEADS * CHUNKS, splits). p_pages: uint8; page_stride, head_stride: bytes of a page,
    and of a head in it. p_table: a row's pages, `capacity` of them. QUERIES: of a row at most. The rest is as in
    `transform_kernel`.
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32
    QUERY_ROWS: tl.constexpr = N // 2
    KEY_STEPS: tl.constexpr = KEYS.steps
    VALUE_STEPS: tl.constexpr = VALUES.steps
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    i_group = i_head * CHUNKS + i_chunk
    n = i_chunk * QUERY_ROWS + tl.arange(0, N) // 2
    query = tl.load(p_starts + i_batch)
    count = tl.load(p_starts + i_batch + 1) - query
    length = tl.minimum(tl.load(p_lengths + i_batch), capacity * 32)
    b_row = n < RATIO * tl.minimum(count, QUERIES)
    o_q = (query + n // RATIO).to(tl.int64) * q_stride + (i_kv * RATIO + n % RATIO) * D
    limit = tl.where(b_row, length - count + 1 + n // RATIO, 0)
    start, stop = blocks_of_split(i_split, tl.cdiv(length, 32), splits, splits, 0, 0, NW, LONG)
    o_head = i_kv.to(tl.int64) * head_stride
    p_row = p_table + i_batch.to(tl.int64) * table_stride
    p_values = p_pages + KEYS.slot
    p_kn = (p_pages + KEYS.norm_at).to(tl.pointer_type(tl.float16))
    p_vn = (p_values + VALUES.norm_at).to(tl.pointer_type(tl.float16))
    key_pointers, value_pointers = (p_pages,), (p_values,)
    lane, last = tl.arange(0, 32 * NW) % 32, stop - 1

    # blocks are on their way while the query is rotated
    origins = ()
    to = tl.zeros([32 * NW], tl.int32)
    pages = to
    if ASM:
        origins = origins_of(key_pointers, p_kn, value_pointers, p_vn, o_head, i_batch, 0, lane, KEYS, VALUES, True)
        to += open_ring(origins, p_row, page_stride, lane, i_split * 0, start, last, KEYS, VALUES, SLOTS, True, NW)
        pages = pages_of(p_row, start + (SLOTS - 1) * NW, stop, NW)
    p_rows = p_key_basis + i_kv * (KEY_STEPS * SLICES * 256)
    if ASM:
        pairs = _points(p_points, ENTRIES)
        base = tl.inline_asm_elementwise(
            _table(_table_bytes(ENTRIES, KEYS, VALUES, NW, N)),
            "=r,r",
            [i_split * 0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        q, b_up, b_mean = quick_query(p_q, p_rows, p_factor, p_mean + i_kv * D, o_q, b_row, KEYS, SLICES, NW, N)
        declare_parities()
        declare_lanes(to)
        _store_points(base, pairs, ENTRIES)
    else:
        b_down, b_up = powers(p_q, o_q, b_row, KEYS, SLICES, 16.0, 51 << 23, False, N)
        q, b_up, b_mean = query_of(
            p_q, p_rows, p_factor, p_mean + i_kv * D, o_q, b_row, b_down, b_up, KEYS, SLICES, NW, N, ASM
        )
    unit = b_up * factor
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    b_l = tl.zeros([NW, 16, N], tl.float32)
    acc = zeros(VALUE_STEPS, NW, N)
    whole = tl.maximum(length - count + 1, 0) // 32  # blocks all of whose tokens every query sees
    b_m, b_l, acc = packed_blocks(
        key_pointers,
        p_kn,
        value_pointers,
        p_vn,
        p_row,
        page_stride,
        p_points,
        o_head,
        i_batch,
        start,
        tl.minimum(stop, whole),
        stop,
        limit,
        origins,
        pages,
        to,
        lane,
        q,
        unit,
        b_m,
        b_l,
        acc,
        0,
        KEYS,
        VALUES,
        TABLES,
        SLOTS,
        True,
        NW,
        N,
        ASM,
    )
    p_decoder = p_value_basis + i_kv * (WIDE * VALUE_STEPS * 1024)
    if ASM:
        out, b_m, b_l = quick_output(
            acc,
            b_m,
            b_l,
            b_mean,
            factor,
            p_decoder,
            p_factor + KEY_STEPS * 16,
            p_mean + (HEADS + i_kv) * D,
            VALUES,
            WIDE,
            NW,
            N,
        )
    else:
        out, b_m, b_l = output_of(
            acc,
            b_m,
            b_l,
            b_mean,
            factor,
            p_decoder,
            p_factor + KEY_STEPS * 16,
            p_mean + (HEADS + i_kv) * D,
            VALUES,
            WIDE,
            NW,
            N,
            ASM,
        )
    store_split(p_partial, p_stat, out, b_m, b_l, i_group * splits + i_split, b_row, False, VALUES, WIDE, 1, 1, 2, D,
                NW, N)  # fmt: skip
    tl.debug_barrier()  # all of the program's stores come before its arrival
    merge_splits(
        p_out,
        p_partial,
        p_stat,
        p_count,
        i_head,
        i_group,
        i_chunk,
        i_split,
        splits,
        merge_width,
        merges,
        RATIO,
        QUERIES,
        D,
        AT_ONCE,
        ROWS,
        QUERY_ROWS,
        ASM,
        p_starts,
        HEADS,
    )
