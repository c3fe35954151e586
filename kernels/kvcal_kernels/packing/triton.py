"""Single codes out of packed runs, for kernels that read them anywhere: reference.py has the order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _word(count, width):
    """Return reference.word_bits, which compiled code cannot call."""
    return 16 if width < 8 and count % (16 // width) == 0 else 8


@triton.constexpr_function
def _words(count, width):
    """Return the words of a plane."""
    size = 16 if width < 8 and count % (16 // width) == 0 else 8
    return -(-count // (size // width))


@triton.constexpr_function
def _start(bits, count, width):
    """Return the bytes of the planes before that of `width` (of a code's last eight bits)."""
    start, rest = (count, bits - 8) if bits > 8 else (0, bits)
    for before in (8, 4, 2):
        if before > width and rest & before:
            size = 16 if before < 8 and count % (16 // before) == 0 else 8
            start += -(-count // (size // before)) * (size // 8)
    return start


@triton.jit
def _field(p, b_place, b_live, START: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    WORDS: tl.constexpr = _words(COUNT, WIDTH)
    bit = b_place // WORDS * WIDTH
    if _word(COUNT, WIDTH) == 16:
        byte = b_place % WORDS * 2 + bit // 8
        bit = bit % 8
    else:
        byte = b_place % WORDS
    b_byte = tl.load(p + (START + byte), mask=b_live, other=0).to(tl.int32)
    return (b_byte >> bit) & ((1 << WIDTH) - 1)


@triton.jit
def code_at(p, b_place, b_live, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Load codes at b_place (int32) of runs of COUNT codes of BITS bits that start at the bytes p, which broadcast:
    int32.
    """
    REST: tl.constexpr = BITS - 8 if BITS > 8 else BITS
    b_code = b_place * 0
    if BITS > 8:
        b_code += _field(p, b_place, b_live, 0, 8, COUNT) << REST
    if REST & 8:
        b_code += _field(p, b_place, b_live, _start(BITS, COUNT, 8), 8, COUNT)
    if REST & 4:
        b_code += _field(p, b_place, b_live, _start(BITS, COUNT, 4), 4, COUNT) << (REST & 3)
    if REST & 2:
        b_code += _field(p, b_place, b_live, _start(BITS, COUNT, 2), 2, COUNT) << (REST & 1)
    if REST & 1:
        b_code += _field(p, b_place, b_live, _start(BITS, COUNT, 1), 1, COUNT)
    return b_code


@triton.constexpr_function
def _power(n):
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _store_plane(p_out, p_codes, START: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, COUNT: tl.constexpr):
    WORDS: tl.constexpr = _words(COUNT, WIDTH)
    SIZE: tl.constexpr = _word(COUNT, WIDTH) // 8  # bytes of a word
    b_byte = tl.arange(0, _power(WORDS * SIZE))
    inside = b_byte < WORDS * SIZE
    b_out = b_byte * 0
    for j in tl.static_range(8 // WIDTH):
        place = (b_byte % SIZE * (8 // WIDTH) + j) * WORDS + b_byte // SIZE
        b_code = tl.load(p_codes + place, mask=inside & (place < COUNT), other=0)
        b_out |= ((b_code >> DOWN) & ((1 << WIDTH) - 1)) << (j * WIDTH)
    tl.store(p_out + START + b_byte, b_out.to(tl.uint8), mask=inside)


@triton.jit
def store_codes(p_out, p_codes, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Store COUNT codes int32 of BITS bits as packed bytes, by one program: what `code_at` reads."""
    REST: tl.constexpr = BITS - 8 if BITS > 8 else BITS
    if BITS > 8:
        _store_plane(p_out, p_codes, 0, 8, REST, COUNT)
    if REST & 8:
        _store_plane(p_out, p_codes, _start(BITS, COUNT, 8), 8, 0, COUNT)
    if REST & 4:
        _store_plane(p_out, p_codes, _start(BITS, COUNT, 4), 4, REST & 3, COUNT)
    if REST & 2:
        _store_plane(p_out, p_codes, _start(BITS, COUNT, 2), 2, REST & 1, COUNT)
    if REST & 1:
        _store_plane(p_out, p_codes, _start(BITS, COUNT, 1), 1, 0, COUNT)
