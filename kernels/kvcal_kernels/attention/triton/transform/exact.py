"""Attention over exact tokens as `..exact` has it, without a barrier: a lane loads what it has of a product's operands
itself, so that all numbers of a tile are on their way at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..exact import exact_tokens as in_any_layout
from ..exact import slot_of
from ..numbers import LOW
from ..softmax import by_parity, second_of
from ..tiles import lane_zeros


@triton.constexpr_function
def _query(pair):
    """Return assembly for a lane's channels 8 t to 8 t + 7 of 32, of which two slices are: as both have them."""
    return f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {64 * pair}]; // kvcal_matrix"


@triton.constexpr_function
def _keys(pair):
    """Return assembly for the same channels of a lane's two tokens, as two products' first operands."""
    low = f"ld.global.v4.b32 {{$0, $2, $4, $6}}, [$8 + {64 * pair}];"
    return f"{low} ld.global.v4.b32 {{$1, $3, $5, $7}}, [$16 + {64 * pair}]; // kvcal_matrix"


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
def _address(p, token, end, first, capacity, element, D: tl.constexpr, RING: tl.constexpr):
    """Return where number `element` of tokens lies, int64; those behind the last one stand for it."""
    slot = slot_of(tl.minimum(token, end - 1), first, capacity, RING)
    return p.to(tl.int64) + (slot * D + element).to(tl.int64) * 2


@triton.jit
def _tile(
    p_k, p_v, q_at, first, capacity, start, end, SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
    RING: tl.constexpr,
):
    """Return operands of NW times 16 tokens from `start` on: of keys and queries, slice by slice, of values for the
    first 8 tokens of a warp, then for the others.
    """
    D: tl.constexpr = SLICES * 16
    g, t = tl.arange(0, 16)[None, :, None] % 8, tl.arange(0, 16)[None, None, :] % 8 // 2
    token = start + tl.arange(0, NW)[:, None, None] * 16 + lane_zeros(NW)
    low = _address(p_k, token + g, end, first, capacity, t * 8, D, RING)
    high = _address(p_k, token + g + 8, end, first, capacity, t * 8, D, RING)
    keys, queries, values = (), (), ()
    for i in tl.static_range(SLICES // 2):
        pair = tl.inline_asm_elementwise(
            _keys(i), _operands(8, 16), [low, high], dtype=(tl.int16, tl.int16), is_pure=False, pack=8
        )
        keys = keys + (_as(pair[0], p_k), _as(pair[1], p_k))
        pair = tl.inline_asm_elementwise(
            _query(i), _operands(4, 4), [q_at], dtype=(tl.int16, tl.int16), is_pure=False, pack=4
        )
        queries = queries + (second_of(_as(pair[0], p_k), NW, N), second_of(_as(pair[1], p_k), NW, N))
    for j in tl.static_range(2):
        even = _address(p_v, token + 8 * j + 2 * t, end, first, capacity, g * 2, D, RING)
        odd = _address(p_v, token + 8 * j + 2 * t + 1, end, first, capacity, g * 2, D, RING)
        for i in tl.static_range(SLICES // 2):
            tile = tl.inline_asm_elementwise(
                _values(i), _operands(4, 16), [even, odd], dtype=tl.int16, is_pure=False, pack=8
            )
            values = values + (_as(tile, p_v),)
    return keys, queries, values


@triton.jit
def _window(
    p_k, p_v, q_at, first, capacity, limit, begin, end, factor, b_m, b_l, acc, SLICES: tl.constexpr, NW: tl.constexpr,
    N: tl.constexpr, RING: tl.constexpr,
):
    """Attend to tokens `begin` to `end` of one head. limit [N]: the first token that a row does not see."""
    PAIRS: tl.constexpr = SLICES // 2
    b_token = tl.arange(0, NW)[:, None] * 16 + tl.arange(0, 16)[None, :]
    for start in tl.range(begin, end, NW * 16, num_stages=1):
        keys, queries, values = _tile(p_k, p_v, q_at, first, capacity, start, end, SLICES, NW, N, RING)
        b_s = tl.zeros([NW, 16, N], tl.float32)
        for i in tl.static_range(SLICES):
            b_s = tl.dot(keys[i], queries[i], b_s)
        live = (start + b_token)[:, :, None] < tl.minimum(limit, end)[None, None, :]
        b_s = tl.where(live, b_s * factor, LOW)
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        fade = tl.exp2(b_m - b_new)
        b_p = tl.exp2(b_s - b_new[:, None, :]).to(p_v.dtype.element_ty)
        b_l = b_l * fade + tl.sum(b_p.to(tl.float32), 1)
        b_m = b_new
        parts = by_parity(b_p.to(tl.float16, bitcast=True), True, NW, N)
        outputs = ()
        for i in tl.static_range(PAIRS):
            b_o = tl.dot(values[i], _as(parts[0], p_v), acc[i] * fade[:, None, :])
            outputs = outputs + (tl.dot(values[PAIRS + i], _as(parts[1], p_v), b_o),)
        acc = outputs
    return b_m, b_l, acc


@triton.jit
def exact_tokens(
    p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_q, o_q, b_row, n, i_head, i_batch, begin, tail_tokens, sink_splits,
    sink, recent, blocks, sink_capacity, recent_capacity, factor, b_m, b_l, out, VALUES: tl.constexpr,
    SLICES: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
    ASM: tl.constexpr, RING: tl.constexpr,
):
    """Attend to a program's `tail_tokens` of the sink, in the first `sink_splits` programs, or of the recent tokens.
    begin: the first of them. n [N]: the query rows.
    """
    D: tl.constexpr = SLICES * 16
    if ASM:
        behind = QUERIES - 1 - n // RATIO
        # rows as `second_of` makes columns of them; those behind the last stand for it
        row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, N)[None, None, :]
        here = tl.minimum(tl.min(n, 0) + (column // 8 * 8 + row % 8) // 2 + lane_zeros(NW, N), RATIO * QUERIES - 1)
        o_here = (here % RATIO * QUERIES + here // RATIO) * D + column % 8 // 2 * 8
        q_at = (p_q + i_head * (RATIO * QUERIES * D)).to(tl.int64) + o_here.to(tl.int64) * 2
        if begin < sink_splits * tail_tokens:
            o_head = i_head * sink_capacity * D
            b_m, b_l, out = _window(
                p_sink_k + o_head, p_sink_v + o_head, q_at, 0, sink_capacity, sink + tl.minimum(recent - behind, 0),
                begin, tl.minimum(begin + tail_tokens, sink), factor, b_m, b_l, out, SLICES, NW, N, False,
            )
        else:
            begin -= sink_splits * tail_tokens
            o_head = i_head * recent_capacity * D
            b_m, b_l, out = _window(
                p_recent_k + o_head, p_recent_v + o_head, q_at, blocks * 32 % recent_capacity, recent_capacity,
                recent - behind, begin, tl.minimum(begin + tail_tokens, recent), factor, b_m, b_l, out, SLICES, NW, N,
                RING,
            )
    else:
        b_m, b_l, out = in_any_layout(
            p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_q, o_q, b_row, n, i_head, i_batch, begin, tail_tokens,
            sink_splits, sink, recent, blocks, sink_capacity, recent_capacity, factor, b_m, b_l, out, p_q, p_q, 0, 0,
            VALUES, SLICES, 1, 1, RATIO, QUERIES, 0, NW, N, False, RING,
        )
    return b_m, b_l, out
