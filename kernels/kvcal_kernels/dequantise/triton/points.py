"""Grid points of a tile of tokens and channels, read by their codes."""

from __future__ import annotations

import triton
import triton.language as tl

from ...packing.triton import code_at
from ...triton import half


@triton.jit
def _joined(t, COUNT: tl.constexpr):
    """Join COUNT tensors (1, 2, 4 or 8) side by side in last dimensions of 2 each, in order: no thread gives anything
    away.
    """
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
    """Return the width of a code's first plane, for codes up to 8 bits."""
    return 8 if bits == 8 else 4 if bits >= 4 else 2 if bits >= 2 else 1


@triton.constexpr_function
def fields(bits, count):
    """Return the codes that one word of a first plane holds; 0: runs of `count` codes are not all words of 16 bits."""
    if bits == 8:
        return 1
    lowest = bits & -bits
    width = 4 if bits >= 4 else 2 if bits >= 2 else 1
    return 0 if count % (16 // lowest) else 16 // width


@triton.jit
def _lower(
    codes, p_word, b_word, b_live, PER: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr
):
    """Append to codes the fields of a plane below, WIDTH bits wide."""
    u = tl.load(p_word + b_word % WORDS, mask=b_live, other=0).to(tl.int32) & 0xFFFF
    u = u >> (b_word // WORDS * WIDTH)
    more = ()
    for j in tl.static_range(PER):
        more = more + ((codes[j] << WIDTH) | ((u >> (j * FIRST)) & ((1 << WIDTH) - 1)),)
    return more


@triton.jit
def _fields(p, b_word, b_live, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Load all codes of the words b_word of the runs at p: `fields` tensors int32, number j of place j * words +
    b_word.
    """
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
    """Load grid points by code: d tensors float16."""
    points = ()
    if d == 1:
        points = points + (tl.load(p_grid + b_code),)
    else:
        for i in tl.static_range(d // 2):  # two dimensions lie in a word
            b_pair = tl.load(p_grid + b_code * (d // 2) + i)
            points = points + (half(b_pair, 0), half(b_pair, 1))
    return points


@triton.jit
def points_of(
    p_codes, p_grid, o_code, b_place, b_live, first, s_head, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Load grid points [BM, BN] float16 of BN channels from `first` on, channels in the order of `places`. o_code:
    where codes of a token (keys) or a block (values) begin, b_place, b_live: which code of a run it is, whether it
    exists; for values word by word, for each word instead.
    """
    d: tl.constexpr = CODES.vector
    PER: tl.constexpr = fields(CODES.bits, CODES.count)
    channel = first + tl.arange(0, BN // d) * d
    inside = (channel < CODES.heads * CODES.dim)[None, :]
    o_head = (channel // CODES.dim).to(tl.int64) * s_head
    within = channel % CODES.dim // d
    if CODES.wordwise and CODES.key:
        WORDS: tl.constexpr = CODES.count // PER
        word = tl.arange(0, BN // CODES.dim * WORDS)
        head = first // CODES.dim + word // WORDS
        p = p_codes + (o_code[:, None] + (head.to(tl.int64) * s_head)[None, :])
        b_word = tl.broadcast_to((word % WORDS)[None, :], [BM, BN // CODES.dim * WORDS])
        codes = _fields(p, b_word, b_live[:, None] & (head < CODES.heads)[None, :], CODES.bits, CODES.count)
        points = ()
        for j in tl.static_range(PER):
            points = points + _gather(p_grid, codes[j], d)
        tile = tl.reshape(_joined(points, PER * d), [BM, BN])
    elif CODES.wordwise:
        ROWS: tl.constexpr = BM // PER
        p = p_codes + (o_code[:, None] + (o_head + within * CODES.bytes)[None, :])
        b_word = tl.broadcast_to(b_place[:, None], [ROWS, BN // d])
        codes = _fields(p, b_word, b_live[:, None] & inside, CODES.bits, CODES.count)
        rows = ()
        for j in tl.static_range(PER):
            rows = rows + (tl.reshape(_joined(_gather(p_grid, codes[j], d), d), [ROWS, BN]),)
        joined = tl.reshape(_joined(rows, PER), [ROWS, BN, PER])
        tile = tl.reshape(tl.permute(joined, (0, 2, 1)), [BM, BN])
    else:
        if CODES.key:
            p = p_codes + (o_code[:, None] + o_head[None, :])
            b_at = tl.broadcast_to(within[None, :], [BM, BN // d])
        else:
            p = p_codes + (o_code[:, None] + (o_head + within * CODES.bytes)[None, :])
            b_at = tl.broadcast_to(b_place[:, None], [BM, BN // d])
        b_code = code_at(p, b_at, b_live[:, None] & inside, CODES.bits, CODES.count)
        tile = tl.reshape(_joined(_gather(p_grid, b_code, d), d), [BM, BN])
    return tile
