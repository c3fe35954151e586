"""Bit packing of b-bit codes, 1 to 16 bits, without waste: the layout that the fused kernels read.

A b-bit code is cut into planes of 8, 4, 2 and 1 bits (3 = 2 + 1, 6 = 4 + 2), most significant plane first; above 8 bits
the first plane is the upper byte and the rest follows as before (12 = 8 + 4, 16 = 8 + 8). A plane of w bits is stored
in words of 16 bits; field j of word i holds element j * W + i of the packed dimension, W being the number of words
("split" order: unpacking field j yields W consecutive elements, so no permute is needed). Words are little-endian
bytes. Where 16-bit words would leave padding, 8-bit words are used.
"""

from __future__ import annotations

import torch
from torch import Tensor


def planes(bits: int) -> list[int]:
    """Return the widths of the planes of a code, most significant first: 6 -> [4, 2], 11 -> [8, 2, 1]."""
    if not 1 <= bits <= 16:
        raise ValueError(f"codes of {bits} bits: 1 to 16 can be packed")
    rest = bits - 8 if bits > 8 else bits
    return [8] * (bits > 8) + [width for width in (8, 4, 2, 1) if rest & width]


def word_bits(count: int, width: int) -> int:
    """Return 16 where `count` fields fill 16-bit words exactly, else 8 (a `width` of 8 is a byte)."""
    return 16 if width < 8 and count % (16 // width) == 0 else 8


def plane_bytes(count: int, width: int) -> int:
    """Return the bytes that a plane of `count` fields takes."""
    size = word_bits(count, width)
    return -(-count // (size // width)) * (size // 8)


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `count` codes of `bits` bits take."""
    return sum(plane_bytes(count, width) for width in planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n), integers in [0, 2**bits) -> uint8 (..., packed_bytes(n, bits))."""
    shift, parts = bits, []
    for width in planes(bits):
        shift -= width
        parts.append(_pack_plane((codes.to(torch.int32) >> shift) & ((1 << width) - 1), width))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack uint8 (..., packed_bytes(count, bits)) -> codes (..., count), uint8 up to 8 bits, int32 above."""
    shift, start = bits, 0
    kind = torch.uint8 if bits <= 8 else torch.int32
    codes = None
    for width in planes(bits):
        shift -= width
        size = plane_bytes(count, width)
        part = _unpack_plane(packed[..., start : start + size], width, count).to(kind) << shift
        codes = part if codes is None else codes | part
        start += size
    assert codes is not None
    return codes


def _pack_plane(fields: Tensor, width: int) -> Tensor:
    count = fields.shape[-1]
    size = word_bits(count, width)
    per_word = size // width
    words = -(-count // per_word)
    if words * per_word != count:
        fields = torch.nn.functional.pad(fields, (0, words * per_word - count))
    total = fields[..., :words]
    for j in range(1, per_word):
        total = total | (fields[..., j * words : (j + 1) * words] << (j * width))
    if size == 8:
        return total.to(torch.uint8)
    low, high = total & 255, total >> 8
    return torch.stack([low, high], -1).flatten(-2).to(torch.uint8)


def _unpack_plane(packed: Tensor, width: int, count: int) -> Tensor:
    size, mask = word_bits(count, width), (1 << width) - 1
    if size == 8:
        parts = [(packed >> (j * width)) & mask for j in range(8 // width)]
    else:  # a byte holds whole fields: the low byte the first half of a word's fields, the high byte the rest
        halves = packed.unflatten(-1, (-1, 2)).unbind(-1)
        parts = [(half >> (j * width)) & mask for half in halves for j in range(8 // width)]
    return (torch.cat(parts, -1) if len(parts) > 1 else parts[0])[..., :count]
