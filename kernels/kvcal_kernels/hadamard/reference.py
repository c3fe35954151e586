"""Sign-Hadamard rotation, a sum and a square root whose bits do not depend on batch, chunk or device.

The first two are made of element-wise additions in a fixed order: a token's packed bytes may not depend on which other
tokens were encoded in the same call, which a matrix product or a library reduction does not promise.

A Hadamard transform mixes a power of two of numbers. Where a norm spans `width * factor` numbers with an odd factor (3
kv heads of 64 channels: 64 * 3), transforms of `width` numbers alone leave parts of the span with variances of their
own, and one norm fits none of them. So the odd factor is mixed, too (`Mix`):

- "hadamard": by a Hadamard matrix of Paley (1933), of order 4 * factor or the next power of two that there is one for,
  with a Sylvester matrix over the rest. All entries of the rotation have one magnitude: numbers of any variances,
  uncorrelated, become numbers of one variance.
- "cosine", "interleaved": by a cosine transform of `factor` numbers behind Hadamard transforms of `width`, as bundles
  from before have it, and where there is no such matrix. Its rows do not weigh all Hadamard blocks alike. Interleaved
  blocks take their numbers from all parts of the span in turn.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Mix = Literal["none", "cosine", "interleaved", "hadamard"]
LARGEST_ORDER = 512  # of a Hadamard matrix that is added up row by row: as many additions for each number
Sizes: TypeAlias = tuple[int, int, int, int, int]
# Neighbours that a Sylvester matrix mixes: a grid's point stands for up to so many, which stay uncorrelated.
MIXED_NEIGHBOURS = 4


def largest_power_of_two(n: int) -> int:
    """Return the largest power of two that divides n: 96 -> 32."""
    return n & -n


def signs(width: int, seed: int) -> Tensor:
    """Return int8 (width,) of +1 and -1, the same on every machine: a separate CPU generator draws them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (width,), generator=generator, device="cpu") * 2 - 1).to(torch.int8)


def hadamard(x: Tensor, width: int) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of every `width` consecutive elements of the last dimension
    (float32).

    width is a power of two that divides x.shape[-1]. The transform is its own inverse. Sylvester order.
    """
    step, scratch = 1, torch.empty_like(x, memory_format=torch.contiguous_format)
    x = (x * width**-0.5).contiguous()
    while step < width:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        out_low, out_high = scratch.unflatten(-1, (-1, 2, step)).unbind(-2)
        torch.add(low, high, out=out_low)
        torch.sub(low, high, out=out_high)
        x, scratch = scratch, x
        step *= 2
    return x


def rotate(x: Tensor, sign: Tensor, width: int, factor: int = 1, mix: Mix = "hadamard") -> Tensor:
    """Rotate every `width * factor` consecutive elements of the last dimension at random: sign flips, then an
    orthonormal transform. x (..., n) float32, sign (n,) -> (..., n).

    width: a power of two; width * factor divides n. mix: how an odd factor above 1 is mixed. "hadamard": with p =
    `paley_order(width, factor)` / factor and c = min(4, width / p), element b * width + (h * p + t) * c + l is element
    (b * p + t, h * c + l) of a matrix X; it becomes P X S, P the Paley matrix and S Sylvester's, both orthonormal.
    "interleaved": Hadamard block j takes elements b * width + r with (r * factor + b) // width = j instead of b = j.
    ValueError where mix is "none" or there is no Paley matrix.
    """
    if factor == 1:
        return hadamard(x * sign, width)
    if mix == "hadamard":
        size, matrix = _paley_parts(x, width, factor)
        rotated = _added(hadamard(_by_row(x * sign, size), size[2] * size[4]), matrix)
        return _in_order(rotated, size)
    _check_cosine(mix, factor)
    blocks = (x * sign).unflatten(-1, (-1, factor, width))
    if mix == "interleaved":
        blocks = blocks.transpose(-1, -2).flatten(-2).unflatten(-1, (factor, width))
    return _across(hadamard(blocks, width), cosines(factor)).flatten(-3)


def unrotate(x: Tensor, sign: Tensor, width: int, factor: int = 1, mix: Mix = "hadamard") -> Tensor:
    """Invert `rotate`."""
    if factor == 1:
        return hadamard(x, width) * sign
    if mix == "hadamard":
        size, matrix = _paley_parts(x, width, factor)
        parts = _by_row(x, size)
        return _in_order(hadamard(_added(parts, matrix.T), size[2] * size[4]), size) * sign
    _check_cosine(mix, factor)
    columns = tuple(zip(*cosines(factor), strict=True))
    blocks = hadamard(_across(x.unflatten(-1, (-1, factor, width)), columns), width)
    if mix == "interleaved":
        blocks = blocks.flatten(-2).unflatten(-1, (width, factor)).transpose(-1, -2)
    return blocks.flatten(-3) * sign


def _check_cosine(mix: Mix, factor: int) -> None:
    if mix not in ("cosine", "interleaved"):
        raise ValueError(f"an odd factor of {factor} mixed by {mix!r}: allowed are 'hadamard', 'cosine', 'interleaved'")


def _by_row(x: Tensor, size: Sizes) -> Tensor:
    """Return x (..., n) as (..., spans, b * t, h * l)."""
    rows: Tensor = x.unflatten(-1, size).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return rows


def _in_order(rows: Tensor, size: Sizes) -> Tensor:
    """Invert `_by_row`."""
    x: Tensor = rows.unflatten(-1, (size[2], size[4])).unflatten(-3, (size[1], size[3]))
    return x.transpose(-3, -2).flatten(-5)


def _paley_parts(x: Tensor, width: int, factor: int) -> tuple[Sizes, Tensor]:
    """Return the sizes (spans, b, h, t, l) of rotate's elements, and the Paley matrix, not yet orthonormal."""
    order = paley_order(width, factor)
    if not order:
        raise ValueError(f"no Hadamard matrix of Paley for {width} x {factor} numbers: mix them by 'cosine'")
    together = order // factor
    low = min(MIXED_NEIGHBOURS, width // together)
    return (-1, factor, width // (together * low), together, low), paley(order, x.device).to(x.dtype)


@cache
def paley_order(width: int, factor: int) -> int:
    """Return the order of the smallest Hadamard matrix that Paley builds of a prime and that mixes an odd factor with a
    power of two that divides width: 12 for 3 and 4 or more. 0: there is none up to `LARGEST_ORDER`.
    """
    order = factor
    while order <= min(factor * width, LARGEST_ORDER):
        if _prime_of(order):
            return order
        order *= 2
    return 0


def _prime_of(order: int) -> int:
    """Return the prime that Paley makes a Hadamard matrix of this order of: 3 modulo 4 and order - 1, or 1 modulo 4 and
    order / 2 - 1; else 0.
    """
    for prime, rest in ((order - 1, 3), (order // 2 - 1, 1)):
        if order % 4 == 0 and prime % 4 == rest and all(prime % i for i in range(2, math.isqrt(prime) + 1)):
            return prime
    return 0


@cache
def paley(order: int, device: torch.device) -> Tensor:
    """Return Paley's Hadamard matrix of +1 and -1, float32 (order, order), built once per device. order: one that
    `paley_order` returns.
    """
    prime = _prime_of(order)
    places = torch.arange(prime, device="cpu")
    residues = torch.full((prime,), -1.0, dtype=torch.float32, device="cpu").index_fill_(
        0, places * places % prime, 1.0
    )
    residues[0] = 0
    conference = torch.ones(prime + 1, prime + 1, dtype=torch.float32, device="cpu")
    conference[1:, 1:] = residues[(places - places[:, None]) % prime]
    conference[0, 0] = 0
    unit = torch.eye(prime + 1, dtype=torch.float32, device="cpu")
    if prime % 4 == 3:
        conference[1:, 0] = -1
        matrix = conference + unit
    else:
        matrix = torch.kron(conference, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32, device="cpu"))
        matrix += torch.kron(unit, torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float32, device="cpu"))
    return matrix.to(device)


def _added(parts: Tensor, matrix: Tensor) -> Tensor:
    """Return the matrix (n, n) of +1 and -1, divided by the root of n, times parts (..., n, v): terms added one after
    another.
    """
    parts = parts * matrix.shape[0] ** -0.5
    total = parts[..., :1, :] * matrix[:, :1]
    for i in range(1, matrix.shape[0]):
        total = torch.addcmul(total, parts[..., i : i + 1, :], matrix[:, i : i + 1])  # a product that is exact
    return total


@cache
def cosines(count: int) -> tuple[tuple[float, ...], ...]:
    """Return the rows of the orthonormal cosine transform (DCT-II) of `count` numbers, float64."""
    rows = [[math.cos(math.pi * (2 * i + 1) * j / (2 * count)) for i in range(count)] for j in range(count)]
    return tuple(tuple(x * math.sqrt((2 if j else 1) / count) for x in row) for j, row in enumerate(rows))


def _across(blocks: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Return blocks (..., m, width) times matrix (m, m) over the next to last dimension, products added one after
    another.
    """
    mixed = torch.empty_like(blocks)
    parts = blocks.unbind(-2)
    for row, out in zip(matrix, mixed.unbind(-2), strict=True):
        total = parts[0] * row[0]
        for part, weight in zip(parts[1:], row[1:], strict=True):
            total = total + part * weight
        out.copy_(total)
    return mixed


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum over the last dimension by repeated halving: (..., n) -> (...)."""
    last: Tensor | None = None  # of an odd number: it stays behind the others' sums
    while x.shape[-1] > 1 or last is not None:
        count = x.shape[-1] + (last is not None)
        half = count // 2
        if count % 2:
            if last is None:
                last = x[..., -1:]
            x = x[..., :half] + x[..., half : 2 * half]
            continue
        behind = x[..., half:]
        if last is not None:
            behind, last = last if half == 1 else torch.cat([behind, last], -1), None
        x = x[..., :half] + behind
    return x[..., 0]


def root(x: Tensor) -> Tensor:
    """Return the square root of float32 x, correctly rounded as CUDA's and Triton's are. torch's on a CPU with MKL is
    one unit in the last place off in 17 of 100 numbers (torch 2.13, AVX-512), which moves a stored norm now and then.
    """
    return x.double().sqrt().float()
