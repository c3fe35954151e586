"""Attention over exact tokens, which are not packed: the sink and the most recent ones."""

from __future__ import annotations

import triton
import triton.language as tl

from .before_rope import near_offset
from .numbers import LOW, cast, multiply_add
from .rotation import value_channels
from .softmax import by_parity


@triton.jit
def slot_of(token, first, capacity, RING: tl.constexpr):
    """Return the slot of a token; with RING, token 0 is in slot `first` and others follow, wrapping at the capacity."""
    if RING:
        token = tl.where(first + token >= capacity, first + token - capacity, first + token)
    return token


@triton.jit
def _exact_rotated(
    p_k, o_token, live, place, p_first, p_near, PAIR: tl.constexpr, PAIRS: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load piece PAIR of keys and its partner [NW, 16, 16] and rotate them in float32; the result has the dtype in
    which they are stored.
    """
    r = tl.arange(0, 16)
    channel = (PAIR * 16 + r)[None, None, :]
    place = place[:, :, None]
    low = tl.load(p_k + o_token[:, :, None] + channel, mask=live[:, :, None], other=0.0).to(tl.float32)
    high = tl.load(p_k + o_token[:, :, None] + channel + PAIRS * 16, mask=live[:, :, None], other=0.0).to(tl.float32)
    p_run = p_first + place // 32 * (PAIRS * 32) + PAIR * 32 + r[None, None, :] // 2 * 4 + r[None, None, :] % 2
    p_within = p_near + near_offset(place % 32, channel, PAIRS)
    cos0, sin0 = (tl.load(p_run, mask=live[:, :, None], other=0.0).to(tl.float32),
                  tl.load(p_run + 2, mask=live[:, :, None], other=0.0).to(tl.float32))
    cos1, sin1 = tl.load(p_within).to(tl.float32), tl.load(p_within + 256).to(tl.float32)
    cos, sin = cos0 * cos1 - sin0 * sin1, sin0 * cos1 + cos0 * sin1
    kind: tl.constexpr = p_k.dtype.element_ty
    return cast(low * cos - high * sin, kind, ASM), cast(high * cos + low * sin, kind, ASM)


@triton.jit
def _window_tokens(
    p_k, p_v, p_q, o_q, b_row, i_head, capacity, first, limit, begin, end, factor, b_m, b_l, acc,
    SLICES: tl.constexpr, PAIRED: tl.constexpr, FOUR: tl.constexpr, STAGES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, RING: tl.constexpr,
    p_first, p_near, run, gap, shift, PAIRS: tl.constexpr,
):
    """Attend to exact tokens `begin` to `end`. Token 0 is in slot 0, with RING in slot `first`, and others follow,
    wrapping at the capacity. limit (N,): the first token that a row does not see. Where PAIRS says that keys are
    rotated: run is that of the tokens behind the first `gap` ones, which are `shift` places further from there.
    """
    D: tl.constexpr = SLICES * 16
    r = tl.arange(0, 16)
    b_token = tl.arange(0, NW)[:, None] * 16 + r[None, :]
    for start in tl.range(begin, end, NW * 16, num_stages=STAGES):
        token = start + b_token
        live = token < end
        o_token = (i_head * capacity + slot_of(token, first, capacity, RING)) * D
        b_s = tl.zeros([NW, 16, N], tl.float32)
        for i in tl.static_range(PAIRS):
            place = (run * 32 + token + tl.where(token < gap, shift, -gap)).to(tl.int64)
            pair = _exact_rotated(p_k, o_token, live, place, p_first, p_near, i, PAIRS, NW, ASM)
            for j in tl.static_range(2):
                channel = (i + j * PAIRS) * 16 + r
                b_q = tl.load(p_q + o_q[None, None, :] + channel[None, :, None], mask=b_row[None, None, :], other=0.0)
                b_s = multiply_add(pair[j], tl.broadcast_to(b_q, [NW, 16, N]), b_s, ASM)
        for i in tl.static_range(2 * PAIRS, SLICES):
            b_k = tl.load(p_k + o_token[:, :, None] + (i * 16 + r)[None, None, :], mask=live[:, :, None], other=0.0)
            b_q = tl.load(p_q + o_q[None, None, :] + (i * 16 + r)[None, :, None], mask=b_row[None, None, :], other=0.0)
            b_q = tl.broadcast_to(b_q, [NW, 16, N])
            b_s = multiply_add(b_k, b_q, b_s, ASM)
        b_s = tl.where(token[:, :, None] < tl.minimum(limit, end)[None, None, :], b_s * factor, LOW)
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        fade = tl.exp2(b_m - b_new)
        b_p = cast(tl.exp2(b_s - b_new[:, None, :]), p_v.dtype.element_ty, ASM)
        b_l = b_l * fade + tl.sum(b_p.to(tl.float32), 1)
        b_m = b_new
        outputs = ()
        if PAIRED:
            halves = by_parity(b_p, False, NW, N)
            k = tl.arange(0, 16)[None, None, :]
            for i in tl.static_range(SLICES // 2):
                b_o = acc[i] * fade[:, None, :]
                channel = value_channels(i, r[None, :, None], k % 2, True, FOUR)
                for j in tl.static_range(2):
                    token = start + tl.arange(0, NW)[:, None, None] * 16 + j * 8 + k // 2
                    o_v = (i_head * capacity + slot_of(token, first, capacity, RING)) * D + channel
                    b_v = tl.load(p_v + o_v, mask=token + channel * 0 < end, other=0.0)
                    b_o = multiply_add(b_v, halves[j], b_o, ASM)
                outputs = outputs + (b_o,)
        else:
            for i in tl.static_range(SLICES):
                b_v = tl.load(p_v + o_token[:, :, None] + (i * 16 + r)[None, None, :], mask=live[:, :, None], other=0.0)
                outputs = outputs + (multiply_add(tl.trans(b_v, 0, 2, 1), b_p, acc[i] * fade[:, None, :], ASM),)
        acc = outputs
    return b_m, b_l, acc


@triton.jit
def exact_tokens(
    p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_q, o_q, b_row, n, i_head, i_batch, begin, tail_tokens, sink_splits,
    sink, recent, blocks, sink_capacity, recent_capacity, factor, b_m, b_l, out, p_first, p_near, run, runs,
    VALUES: tl.constexpr, SLICES: tl.constexpr, PAIRED: tl.constexpr, STAGES: tl.constexpr, RATIO: tl.constexpr,
    QUERIES: tl.constexpr, PAIRS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
    RING: tl.constexpr,
):
    """Attend to a program's `tail_tokens` of the sink, in the first `sink_splits` programs, or of the recent tokens.
    begin: the first of them. n [N]: the query rows. PAIRED 2: outputs are of int8, slices of one parity each; columns
    of the other parity hold numbers that are never read.
    """
    behind = QUERIES - 1 - n // RATIO
    exact = out
    if PAIRED == 2:
        exact = ()
        for i in tl.static_range(SLICES):
            exact = exact + (out[i // 2],)
    if begin < sink_splits * tail_tokens:
        b_m, b_l, exact = _window_tokens(
            p_sink_k, p_sink_v, p_q, o_q, b_row, i_head, sink_capacity, 0, sink + tl.minimum(recent - behind, 0),
            begin, tl.minimum(begin + tail_tokens, sink), factor, b_m, b_l, exact,
            SLICES, PAIRED == 1, VALUES.quads, STAGES, NW, N, ASM, False, p_first, p_near, i_batch * runs, 0, 0, PAIRS,
        )
    else:
        begin -= sink_splits * tail_tokens
        b_m, b_l, exact = _window_tokens(
            p_recent_k, p_recent_v, p_q, o_q, b_row, i_head, recent_capacity, blocks * 32 % recent_capacity,
            recent - behind, begin, tl.minimum(begin + tail_tokens, recent), factor, b_m, b_l, exact,
            SLICES, PAIRED == 1, VALUES.quads, STAGES, NW, N, ASM, RING,
            p_first, p_near, run + blocks, tl.where(blocks > 0, 0, sink_capacity - sink),
            sink - tl.cdiv(sink_capacity, 32) * 32, PAIRS,
        )
    out = exact
    if PAIRED == 2:
        column = tl.arange(0, N)
        out = ()
        for i in tl.static_range(SLICES // 2):
            out = out + (tl.where((column % 2 == 1)[None, None, :], exact[2 * i + 1], exact[2 * i]),)
    return b_m, b_l, out
