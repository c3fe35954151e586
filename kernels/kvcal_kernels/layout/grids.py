"""The order in which codes of a grid lie in a block, and the table that the kernel reads them by.

A grid gives d = `vector` neighbouring channels one code of bits * d bits; n = 2^(bits * d) points. Whatever d is, a
register of a tensor core's operand holds two numbers, a pair: 2 * bits bits of code. Units of 32 bits hold the same
place of several pieces:

2 bits: 8 pieces, a byte two pairs; a look-up by the byte gives both (4 numbers). Byte j of row r < 8 is of rows r and r
+ 8 of piece j, of row r + 8 those of piece j + 4; only of keys with d = 4 it is of pieces 2 j and 2 j + 1. Of the last
4 of 12 pieces (head_dim 96) there are the first 8 rows, except for such keys. 4 bits: 4 pieces, a byte a pair. Bytes of
2 and 4 bits are rotated to the left by 7 in their unit: byte 0 lies where the kernel wants it, as a multiple of 128. 3
bits: 16 pieces in 3 units, five pairs of 6 bits in each from bit 7 on, around the end of the unit; the sixteenth pair
is bits 5 and 6 of the three. 8 pieces (head_dim 64) are one unit and half of one: five pairs from bit 7 on, and the
second unit, 16 rows of 4, has in its lower half from bit 7 on the sixth, the seventh and the higher 4 bits of the
eighth of column c, in its higher half those of column c + 4; the eighth's lower 2 bits are bits 5 and 6 of the first
unit.

A pair is: with d = 1 two numbers, neighbours along the contracted dimension; with d = 2 a code, two channels; with d =
4 half a code; the other half is in the same byte.

Pieces: 16 x 8 pairs. Of keys and of values with d = 1 as of integers. Of values with d > 1 a piece is 16 pairs of
channels of 8 tokens: [half block][8 tokens][32 channels], and token and channel parity are contracted together (see
triton.py).

Grids in bytes (`IN_BYTES`): points are integers of 8 bits times one step, for products of bytes
(attention/triton/int8), and codes lie in another order. A set is what the first operand of a product holds, 16 rows of
32 codes, four codes in a word of 16 bits; rows are tokens of a key, neighbouring codes of a value's token. In a tile of
16 x 16 words, word 8 i + 2 q + s of a row is of set s of two: codes of lane q of four, in its register i of the row,
the first in the lowest 4 bits (`byte_order`). Codes of 4 bits fill them. Of 3 bits six sets lie in three tiles, in the
lower 3 bits of each four; the highest bits are two sets more, bit j of their codes in tile j. Four sets (head_dim 64)
lie in a tile and half of one: two in the lower 3 bits; the highest bit of each four is bit 2 of a code of the other
two, whose lower bits are in 16 rows of 8 words: word 2 q + s has in the lower 2 bits of each four those of register 0,
in the higher 2 those of register 1. Of 2 bits a tile holds two sets in the lower and two in the higher 2 bits of each
four.
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
IN_BYTES = ((2, 2), (2, 1), (3, 1), (4, 1))  # bits, vector: at most 16 points, of which `prmt` selects bytes
LARGEST = 126  # of a grid in bytes: of 16 points one more than that must be a signed byte, too (`byte_table`)
ALIGNED = 7  # bit at which a code is a multiple of 128, the bytes that an entry takes in shared memory


@dataclass(frozen=True)
class Grid:
    """The points of a grid and the signs of its rotation. points (n, d) float32: numbers are points times norm. sign
    (H, D) int8, +1 or -1: a head's numbers are multiplied by it, then rotated by Hadamard transforms of
    `rotation_width(D)` neighbours. table, unit: what `table_of` makes of points, on their device; share one Grid's
    table between keys and values of the same grid, and the kernel keeps it once. A grid in bytes has those of
    `byte_table`: int32, and the step.
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
    """Return the channels that a head's rotation mixes: the largest power of two that divides `dim`."""
    return largest_power_of_two(dim)


def grid_of(points: Tensor, sign: Tensor, bits: int, twin: Grid | None = None, in_bytes: bool = False) -> Grid:
    """Return the grid of points (n, d) with signs (H, D). twin: another Grid; where it has the same table, the tensor
    is shared. in_bytes: for blocks in bytes.
    """
    table, unit = byte_table(points, bits) if in_bytes else table_of(points, bits)
    if (
        twin is not None
        and twin.table.dtype == table.dtype
        and twin.table.shape == table.shape
        and torch.equal(twin.table, table)
    ):
        table = twin.table
    return Grid(points.float(), sign.to(torch.int8), table, unit)


def table_of(points: Tensor, bits: int) -> tuple[Tensor, float]:
    """Return numbers by a byte (2 and 4 bits) or 6 bits (3 bits) of code: float16 (256, 4), (64, 2), (256, 2), and the
    unit by which they must be multiplied to be the points. ValueError where points (n, d) are not 2^(bits * d).
    """
    n, d = points.shape
    if (bits, d) not in GRIDS or n != 1 << bits * d:
        raise ValueError(
            f"grid of {n} points of {d} numbers at {bits} bits: allowed are bits, d = {GRIDS}, 2^(bits d) points"
        )
    step = _step(points)
    times = rounding_factor(points.cpu().double()) if step is None else 1 / step
    entries, numbers = ENTRIES[bits]
    index = torch.arange(entries, device=points.device)
    parts = [points[index >> part * bits * d & n - 1] for part in range(numbers // d)]
    return (torch.cat(parts, 1).double() * times).half().contiguous(), 1 / times


def _step(points: Tensor) -> float | None:
    """Return the step of which points (n, d) float32 are multiples, the largest LARGEST times it; None where they are
    not.
    """
    exact = points.cpu().float()
    step = float(exact.abs().max() / LARGEST)
    whole = (exact.double() / max(step, 1e-30)).round()
    return step if step > 0 and torch.equal((whole * step).float(), exact) else None


def are_bytes(points: Tensor, bits: int) -> bool:
    """Return whether points (n, d) float32 of so many bits a number are of a grid in bytes."""
    return (bits, points.shape[1]) in IN_BYTES and _step(points) is not None


def byte_table(points: Tensor, bits: int) -> tuple[Tensor, float]:
    """Return the table by which `prmt` selects points (n, d): int32 (4 d,), for each number of a point its entries'
    bytes in four registers, those of codes below 8 first; and the step that they are multiples of. ValueError where
    they are not, or not 2^(bits * d).

    With 16 points both halves are selected from and the results are added: a code of the other half gives there the
    sign of the entry with the same lower bits, 0 or -1, by which the entry that counts is stored larger.
    """
    n, d = points.shape
    if (bits, d) not in IN_BYTES or n != 1 << bits * d:
        raise ValueError(
            f"grid of {n} points of {d} numbers at {bits} bits: in bytes are allowed bits, d = {IN_BYTES}, 2^(bits d) "
            "points",
        )
    step = _step(points)
    if step is None:
        raise ValueError(
            f"points up to {float(points.abs().max()):g}: are not multiples of {LARGEST}ths of their largest"
        )
    whole = torch.zeros(16, d, dtype=torch.int32, device="cpu")
    whole[:n] = (points.cpu().double() / step).round().int()
    low, high = whole[:8], whole[8:]
    if n == 16:
        # a high entry is negative, once stored, wherever it is so by itself: where it is -1, too, next to a low one
        # that is not
        falls = (high < -1) | (high == -1) & (low >= 0)
        low = low + falls.int()
        high = high + (low < 0).int()
    table = torch.cat([low, high]).T.flatten().to(torch.int8)
    return table.view(torch.int32).to(points.device), step


def in_bytes(points: Tensor) -> Tensor:
    """Return points (n, d) float32 of a grid for Gaussian numbers, rounded to multiples of a step. Of the steps that
    put the largest at LARGEST, it is the one by which points move least, weighed by how many numbers each stands for.
    """
    exact = points.cpu().double()
    numbers = torch.randn(
        1 << 16, points.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    weight = torch.bincount(nearest(numbers, points.float().cpu()).long(), minlength=len(points)).double()
    steps = float(exact.abs().max()) * torch.linspace(0.96, 1.04, 801, dtype=torch.float64, device="cpu") / LARGEST
    steps = (steps.float().view(torch.int32) & -256).view(torch.float32)  # of 16 bits: multiples are exact in float32
    steps = steps.double()[:, None, None]
    whole = (exact / steps).round()
    cost = ((whole * steps - exact).square() * weight[:, None]).sum((1, 2))
    cost[whole.abs().amax((1, 2)) != LARGEST] = torch.inf
    best = int(cost.argmin())
    return (whole[best] * steps[best]).float().to(points.device)


def rounding_factor(points: Tensor) -> float:
    """Return the factor in [1, 2) with which float16 rounds the points best. A point's rounding is the same in every
    token, so that it does not average out: what counts is its mean over Gaussian numbers. Over 32000 tokens of one
    weight 64 points of 2 numbers as they are are off by 4.8e-3 of the output, times this factor by 2.4e-4.
    """
    steps = 1 + torch.arange(1024, dtype=torch.float64, device="cpu")[:, None, None] / 1024
    error = (points * steps).half().double() / steps - points
    if not error[0].any():
        return 1.0
    numbers = torch.randn(
        1 << 16, points.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    count = torch.bincount(nearest(numbers, points.float()).long(), minlength=len(points))
    weight = (count.float() / len(numbers))[:, None].double()
    cost = (error * weight).sum(1).square().sum(-1) + (error.square() * weight).sum((1, 2)) / (1 << 16)
    return float(steps[int(cost.argmin()), 0, 0])


def pairs(codes: Tensor, bits: int, vector: int, along_tokens: bool) -> Tensor:
    """Return pair codes of codes (..., T, D / d): (..., T / 2, D) for d = 1 along tokens, else (..., T, D / 2)."""
    if vector == 2:
        return codes
    if vector == 4:
        return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    low, high = (codes[..., ::2, :], codes[..., 1::2, :]) if along_tokens else (codes[..., ::2], codes[..., 1::2])
    joined: Tensor = low | high << bits
    return joined


def unpairs(joined: Tensor, bits: int, vector: int, along_tokens: bool) -> Tensor:
    """Invert `pairs`."""
    if vector == 2:
        return joined
    if vector == 1:
        parts = [joined & (1 << bits) - 1, joined >> bits]
        return torch.stack(parts, -2).flatten(-3, -2) if along_tokens else torch.stack(parts, -1).flatten(-2)
    codes: Tensor = joined[..., ::2] | joined[..., 1::2] << 4
    return codes


@functools.cache
def order(role: str, dim: int, bits: int, vector: int, device: torch.device | str = "cpu") -> Tensor:
    """Return which pair of a block of 32 tokens, counted as `pairs` lays them out, lies at which place of `units`:
    int64 (pieces, 16, 8), 16 * dim where none does.
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


@functools.cache
def byte_order(role: str, dim: int, vector: int, device: torch.device | str = "cpu") -> Tensor:
    """Return which code of a block of 32 tokens, (32, D / d) flattened, lies where in a grid in bytes: int64 (sets, 16
    rows, 2 registers, 4 lanes, 4 codes). Tokens of values lie in registers as probabilities do, channels of keys as
    queries do.
    """
    sets = torch.arange(dim // 16 // vector, device=device)[:, None, None, None, None]
    row, register, lane, code = (
        torch.arange(count, device=device).view([-1 if i == axis else 1 for i in range(5)])
        for axis, count in ((1, 16), (2, 2), (3, 4), (4, 4))
    )
    across = dim // vector
    if role == "value":
        return (16 * (code % 2) + 8 * register + 2 * lane + code // 2) * across + sets * 16 + row
    half, group = sets // (across // 32), sets % (across // 32)
    if vector == 1:  # even, then odd channels of 64 neighbours
        place = group // 2 * 64 + 16 * code + 2 * (2 * lane + register) + group % 2
    else:
        place = group * 32 + 8 * code + 2 * lane + register
    return (16 * half + row) * across + place


def byte_tiles(sets: int, bits: int) -> int:
    """Return the tiles of 16 x 16 words for so many sets of codes of so many bits."""
    if bits == 3:
        return sets // 8 * 3 + min(-(-(sets % 8) // 2), 3)
    return -(-sets * bits // 8)


def byte_halved(sets: int, bits: int) -> bool:
    """Return whether the last of `byte_tiles` is half of one."""
    return bits == 3 and sets == 4


def byte_words(codes: Tensor, bits: int) -> Tensor:
    """Return int16 words (..., n), tile after tile, of codes of `bits` bits (..., sets, 16, 2, 4, 4)."""
    sets = codes.shape[-5]
    if byte_halved(sets, bits):
        two, other = codes.int().unflatten(-5, (2, 2)).unbind(-6)
        low = other[..., 0, :, :] & 3 | (other[..., 1, :, :] & 3) << 2
        pair = (two | other >> 2 << 3).flatten(-3, -2), low
        return _short(torch.cat([_fours(x).movedim(-3, -1).flatten(-3) for x in pair], -1))
    wide = torch.nn.functional.pad(codes.int(), [0] * 9 + [-sets % (8 if bits == 3 else 8 // bits)])
    if bits == 2:
        both = wide.unflatten(-5, (-1, 2, 2))  # tile, its lower or higher bits, set of two
        fours = both.select(-6, 0) | both.select(-6, 1) << 2
    elif bits == 3:
        both = wide.unflatten(-5, (-1, 4, 2))
        last = both[..., 3:, :, :, :, :, :] >> _steps(3, 1, codes.device)[..., None, None, None] & 1
        fours = (both[..., :3, :, :, :, :, :] | last << 3).flatten(-7, -6)
    else:
        fours = wide.unflatten(-5, (-1, 2))
    words = _fours(fours).movedim(-4, -1).flatten(-3)  # (..., tiles, 16 rows, register, lane, set)
    return _short(words[..., : byte_tiles(sets, bits), :, :].flatten(-3))


def _fours(codes: Tensor) -> Tensor:
    """Return words (...) of (..., 4) codes of 4 bits."""
    shifts = torch.arange(0, 16, 4, device=codes.device, dtype=torch.int32)
    return (codes << shifts).sum(-1, dtype=torch.int32)


def _short(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def byte_codes(words: Tensor, sets: int, bits: int) -> Tensor:
    """Return codes int32 (..., sets, 16, 2, 4, 4) of int16 words (..., n)."""
    wide = words.int() & 0xFFFF
    if byte_halved(sets, bits):
        return _codes_of_four_sets(wide)
    wide = wide.unflatten(-1, (-1, 16, 16))
    if bits == 3:
        wide = torch.nn.functional.pad(wide, (0, 0, 0, 0, 0, -wide.shape[-3] % 3))
    apart = wide.unflatten(-1, (2, 4, 2)).movedim(-1, -4)  # (..., tiles, 2, 16, 2, 4)
    shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)
    fours = apart[..., None] >> shifts & 15
    if bits == 2:
        codes = torch.stack([fours & 3, fours >> 2], -6).flatten(-7, -5)
    elif bits == 3:
        each = fours.unflatten(-6, (-1, 3))
        last = (each >> 3 << _steps(3, 1, words.device)[..., None, None, None]).sum(-6, True, dtype=torch.int32)
        codes = torch.cat([each & 7, last], -6).flatten(-7, -5)
    else:
        codes = fours.flatten(-6, -5)
    return codes[..., :sets, :, :, :, :]


def _codes_of_four_sets(wide: Tensor) -> Tensor:
    """Return `byte_codes` of words int32 where `byte_halved`."""
    shifts = torch.arange(0, 16, 4, device=wide.device, dtype=torch.int32)
    whole = wide[..., :256].unflatten(-1, (16, 2, 4, 2)).movedim(-1, -4)[..., None] >> shifts & 15
    half = wide[..., 256:].unflatten(-1, (16, 4, 2)).movedim(-1, -3)[..., None] >> shifts & 15  # (..., 2, 16, 4, 4)
    low = torch.stack([half & 3, half >> 2], -3)
    return torch.cat([whole & 7, low | whole >> 3 << 2], -5)


def halved(pieces: int, bits: int) -> bool:
    """Return whether the last of `tiles` is half of one."""
    return bits == 3 and pieces == 8


def tiles(pieces: int, bits: int) -> int:
    """Return the tiles of 16 x 8 units for so many pieces."""
    if bits == 3:
        return pieces // 16 * 3 + min(-(-(pieces % 16) // 5), 3)
    return -(-pieces * bits // 16)


def units(codes: Tensor, bits: int) -> Tensor:
    """Return int16 words (..., n), tile after tile, of pair codes (..., pieces, 16, 8)."""
    pieces = codes.shape[-3]
    if halved(pieces, bits):
        first, sixth, seventh, eighth = codes.int().split((5, 1, 1, 1), -3)
        whole = (first << _steps(5, 6, codes.device)).sum(-3, dtype=torch.int32) | (eighth[..., 0, :, :] & 3) << 30
        widest = (sixth | seventh << 6 | eighth >> 2 << 12)[..., 0, :, :]
        half = widest[..., :4] | widest[..., 4:] << 16
        return _rotated_words(torch.cat([whole.flatten(-2), half.flatten(-2)], -1)).view(torch.int16)
    width, count = 2 * bits, 32 // (2 * bits)
    together = 16 if bits == 3 else count
    wide = torch.nn.functional.pad(codes.int(), (0, 0, 0, 0, 0, -pieces % together)).unflatten(-3, (-1, together))
    widest = wide
    if bits == 3:  # fifteen pieces in three units, and the sixteenth in what these leave
        widest = wide[..., :15, :, :].unflatten(-3, (3, count)).flatten(-5, -4)
    packed = (widest << _steps(count, width, codes.device)).sum(-3, dtype=torch.int32)
    if bits == 3:
        packed = packed | (wide[..., 15:, :, :] >> _steps(3, 2, codes.device) & 3).flatten(-4, -3) << 30
    words: Tensor = _rotated_words(packed)[..., : tiles(pieces, bits), :, :].flatten(-3).contiguous()
    return words.view(torch.int16)


def _rotated_words(units: Tensor) -> Tensor:
    """Rotate the bits of units to the left by ALIGNED."""
    return units << ALIGNED | units >> 32 - ALIGNED & (1 << ALIGNED) - 1


def ununits(words: Tensor, pieces: int, bits: int) -> Tensor:
    """Return pair codes int32 (..., pieces, 16, 8) of int16 words (..., n)."""
    width, count = 2 * bits, 32 // (2 * bits)
    rotated = words.contiguous().view(torch.int32)
    aligned = rotated << 32 - ALIGNED | rotated >> ALIGNED & (1 << 32 - ALIGNED) - 1
    if halved(pieces, bits):
        whole, half = aligned[..., :128].unflatten(-1, (16, 8)), aligned[..., 128:].unflatten(-1, (16, 4))
        both = torch.cat([half, half >> 16], -1)
        first = whole[..., None, :, :] >> _steps(5, 6, words.device) & 63
        last = torch.stack([both & 63, both >> 6 & 63, whole >> 30 & 3 | (both >> 12 & 15) << 2], -3)
        return torch.cat([first, last], -3)
    aligned = aligned.unflatten(-1, (-1, 16, 8))
    if bits == 3:
        aligned = torch.nn.functional.pad(aligned, (0, 0, 0, 0, 0, -aligned.shape[-3] % 3))
    fields = aligned[..., None, :, :] >> _steps(count, width, words.device) & (1 << width) - 1
    if bits == 3:
        rest = (aligned >> 30 & 3).unflatten(-3, (-1, 3)) << _steps(3, 2, words.device)
        fields = torch.cat([fields.unflatten(-4, (-1, 3)).flatten(-4, -3), rest.sum(-3, True, dtype=torch.int32)], -3)
    codes: Tensor = fields.flatten(-4, -3)[..., :pieces, :, :]
    return codes


def _steps(count: int, width: int, device: torch.device) -> Tensor:
    """Return by how many bits the pieces of a unit are shifted: int32 (count, 1, 1)."""
    steps = torch.arange(0, count * width, width, dtype=torch.int32, device=device)
    return steps[:, None, None]
