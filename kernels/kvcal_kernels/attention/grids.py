"""The order in which codes of a grid lie in a block, and the table that the kernel reads them by.

A grid gives d = `vector` neighbouring channels one code of bits * d bits; n = 2^(bits * d) points. Whatever d is, a register
of a tensor core's operand holds two numbers, a pair: 2 * bits bits of code. Units of 32 bits hold the same place of several
pieces:

2 bits: 8 pieces, a byte two pairs; a look-up by the byte gives both (4 numbers). Byte j of row r < 8 is of rows r and r + 8 of
piece j, of row r + 8 those of piece j + 4; only of keys with d = 4 it is of pieces 2 j and 2 j + 1.
4 bits: 4 pieces, a byte a pair. Bytes of 2 and 4 bits are rotated to the left by 7 in their unit: byte 0 lies where the kernel
wants it, as a multiple of 128.
3 bits: 16 pieces in 3 units, five pairs of 6 bits in each from bit 7 on, around the end of the unit; the sixteenth pair is
bits 5 and 6 of the three.

A pair is: with d = 1 two numbers, neighbours along the contracted dimension; with d = 2 a code, two channels; with d = 4 half
a code; the other half is in the same byte.

Pieces: 16 x 8 pairs. Of keys and of values with d = 1 as of integers. Of values with d > 1 a piece is 16 pairs of channels of
8 tokens: [half block][8 tokens][32 channels], and token and channel parity are contracted together (see triton.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hadamard import largest_power_of_two
from ..lattice import nearest

GRIDS = ((2, 4), (2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (4, 1))  # bits, vector
ENTRIES = {2: (256, 4), 3: (64, 2), 4: (256, 2)}  # of the table: how many, numbers of each
ALIGNED = 7  # bit at which a code is a multiple of 128, the bytes that an entry takes in shared memory


@dataclass(frozen=True)
class Grid:
    """points (n, d) float32: numbers are points times norm. sign (H, D) int8, +1 or -1: a head's numbers are multiplied by it,
    then rotated by Hadamard transforms of `rotation_width(D)` neighbours. table, unit: what `table_of` makes of points, on
    their device; share one Grid's table between keys and values of the same grid, and the kernel keeps it once.
    """

    points: Tensor
    sign: Tensor
    table: Tensor
    unit: float

    @property
    def vector(self) -> int:
        return self.points.shape[1]

    def to(self, device: torch.device | str) -> Grid:
        return Grid(self.points.to(device), self.sign.to(device), self.table.to(device), self.unit)


def rotation_width(dim: int) -> int:
    """Per head, the largest power of two that divides it."""
    return largest_power_of_two(dim)


def grid_of(points: Tensor, sign: Tensor, bits: int, twin: Grid | None = None) -> Grid:
    """points (n, d), sign (H, D). twin: another Grid that has the same table, if it does: the tensor is shared then."""
    table, unit = table_of(points, bits)
    if twin is not None and twin.table.shape == table.shape and torch.equal(twin.table, table):
        table = twin.table
    return Grid(points.float(), sign.to(torch.int8), table, unit)


def table_of(points: Tensor, bits: int) -> tuple[Tensor, float]:
    """Numbers by a byte (2 and 4 bits) or 6 bits (3 bits) of code: float16 (256, 4), (64, 2), (256, 2). Times the unit beside
    it they are the points. ValueError where points (n, d) are not 2^(bits * d).
    """
    n, d = points.shape
    if (bits, d) not in GRIDS or n != 1 << bits * d:
        raise ValueError(
            f"grid of {n} points of {d} numbers at {bits} bits: allowed are bits, d = {GRIDS}, 2^(bits d) points"
        )
    times = _times(points.cpu().double())
    entries, numbers = ENTRIES[bits]
    index = torch.arange(entries, device=points.device)
    parts = [points[index >> part * bits * d & n - 1] for part in range(numbers // d)]
    return (torch.cat(parts, 1).double() * times).half().contiguous(), 1 / times


def _times(points: Tensor) -> float:
    """Factor in [1, 2) with which float16 rounds the points best. A point's rounding is the same in every token, so that it
    does not average out: what counts is its mean over Gaussian numbers. Over 32000 tokens of one weight 64 points of
    2 numbers as they are are off by 4.8e-3 of the output, times this factor by 2.4e-4.
    """
    steps = 1 + torch.arange(1024, dtype=torch.float64)[:, None, None] / 1024
    error = (points * steps).half().double() / steps - points
    if not error[0].any():
        return 1.0
    numbers = torch.randn(1 << 16, points.shape[1], generator=torch.Generator().manual_seed(0))
    count = torch.bincount(nearest(numbers, points.float()).long(), minlength=len(points))
    weight = (count / len(numbers))[:, None].double()
    cost = (error * weight).sum(1).square().sum(-1) + (error.square() * weight).sum((1, 2)) / (1 << 16)
    return float(steps[int(cost.argmin()), 0, 0])


def pairs(codes: Tensor, bits: int, vector: int, along_tokens: bool) -> Tensor:
    """Codes (..., T, D / d) -> pair codes: (..., T / 2, D) of d = 1 along tokens, else (..., T, D / 2)."""
    if vector == 2:
        return codes
    if vector == 4:
        return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    low, high = (codes[..., ::2, :], codes[..., 1::2, :]) if along_tokens else (codes[..., ::2], codes[..., 1::2])
    made: Tensor = low | high << bits
    return made


def unpairs(found: Tensor, bits: int, vector: int, along_tokens: bool) -> Tensor:
    """The other way round."""
    if vector == 2:
        return found
    if vector == 1:
        parts = [found & (1 << bits) - 1, found >> bits]
        return torch.stack(parts, -2).flatten(-3, -2) if along_tokens else torch.stack(parts, -1).flatten(-2)
    made: Tensor = found[..., ::2] | found[..., 1::2] << 4
    return made


@functools.cache
def order(role: str, dim: int, bits: int, vector: int, device: torch.device | str = "cpu") -> Tensor:
    """Which pair of a block of 32 tokens, counted as `pairs` lays them out, lies at which place of `units`: int64
    (pieces, 16, 8), 16 * dim where none does.
    """
    index = torch.arange(16 * dim, device=device)
    if role == "value" and vector == 1:  # (2 halves, 8 pairs of tokens, D)
        index = index.view(2, 8, -1, 16).permute(0, 2, 3, 1)
    elif role == "value" and vector == 4:  # (4 times 8 tokens, slices, 8 codes, 2)
        index = index.view(4, 8, -1, 8, 2).permute(0, 2, 4, 3, 1)
    elif role == "value":  # (4 times 8 tokens, D / 2)
        index = index.view(4, 8, -1, 16).permute(0, 2, 3, 1)
    elif vector == 4:  # (2 halves, 16 tokens, D / 2)
        return index.view(2, 16, -1, 8, 2).permute(0, 2, 4, 1, 3).reshape(-1, 16, 8)
    else:
        index = index.view(2, 16, -1, 8).permute(0, 2, 1, 3)
    index = index.reshape(-1, 16, 8)
    if bits != 2:
        return index
    index = torch.nn.functional.pad(index, (0, 0, 0, 0, 0, -len(index) % 8), value=16 * dim)
    by_row = index.view(-1, 2, 4, 2, 8, 8)  # (tile, half of its pieces, piece, half of the rows, row, pair)
    return by_row.permute(0, 2, 3, 1, 4, 5).reshape(-1, 16, 8)


def tiles(pieces: int, bits: int) -> int:
    """Tiles of 16 x 8 units for so many pieces."""
    if bits == 3:
        return pieces // 16 * 3 + min(-(-(pieces % 16) // 5), 3)
    return -(-pieces * bits // 16)


def units(found: Tensor, bits: int) -> Tensor:
    """Pair codes (..., pieces, 16, 8) -> int16 words (..., tiles, 16, 16)."""
    pieces = found.shape[-3]
    width, count = 2 * bits, 32 // (2 * bits)
    together = 16 if bits == 3 else count
    wide = torch.nn.functional.pad(found.int(), (0, 0, 0, 0, 0, -pieces % together)).unflatten(-3, (-1, together))
    own = wide
    if bits == 3:  # fifteen pieces in three units, and the sixteenth in what these leave
        own = wide[..., :15, :, :].unflatten(-3, (3, count)).flatten(-5, -4)
    made = (own << _steps(count, width, found.device)).sum(-3, dtype=torch.int32)
    if bits == 3:
        made = made | (wide[..., 15:, :, :] >> _steps(3, 2, found.device) & 3).flatten(-4, -3) << 30
    turned = made << ALIGNED | made >> 32 - ALIGNED & (1 << ALIGNED) - 1
    kept: Tensor = turned[..., : tiles(pieces, bits), :, :].contiguous()
    return kept.view(torch.int16)


def ununits(words: Tensor, pieces: int, bits: int) -> Tensor:
    """int16 words (..., tiles, 16, 16) -> pair codes int32 (..., pieces, 16, 8)."""
    width, count = 2 * bits, 32 // (2 * bits)
    turned = words.contiguous().view(torch.int32)
    made = turned << 32 - ALIGNED | turned >> ALIGNED & (1 << 32 - ALIGNED) - 1
    if bits == 3:
        made = torch.nn.functional.pad(made, (0, 0, 0, 0, 0, -made.shape[-3] % 3))
    own = made[..., None, :, :] >> _steps(count, width, words.device) & (1 << width) - 1
    if bits == 3:
        rest = (made >> 30 & 3).unflatten(-3, (-1, 3)) << _steps(3, 2, words.device)
        own = torch.cat([own.unflatten(-4, (-1, 3)).flatten(-4, -3), rest.sum(-3, True, dtype=torch.int32)], -3)
    codes: Tensor = own.flatten(-4, -3)[..., :pieces, :, :]
    return codes


def _steps(count: int, width: int, device: torch.device) -> Tensor:
    """By how many bits the pieces of a unit are shifted: int32 (count, 1, 1)."""
    steps = torch.arange(0, count * width, width, dtype=torch.int32, device=device)
    return steps[:, None, None]
