"""Sign-Hadamard rotation, a sum and a square root whose bits do not depend on batch, chunk or device.

The first two are made of element-wise additions in a fixed order: a token's packed bytes may not depend on which other
tokens were encoded in the same call, which a matrix product or a library reduction does not promise.

A Hadamard transform mixes a power of two of numbers. Where a norm spans `width * factor` numbers with an odd factor (3
kv heads of 64 channels: 64 * 3), transforms of `width` numbers alone leave parts of the span with variances of their
own, and one norm fits none of them. So an orthonormal cosine transform of `factor` numbers follows, across the Hadamard
blocks. Its rows do not weigh all blocks alike; where `interleaved`, each Hadamard block takes its numbers from all
parts of the span alternately, which evens out heads of unequal size before it.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def largest_power_of_two(n: int) -> int:
    """Return the largest power of two that divides n: 96 -> 32."""
    return n & -n


def signs(width: int, seed: int) -> Tensor:
    """Return int8 (width,) of +1 and -1, the same on every machine: they come from a CPU generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (width,), generator=generator) * 2 - 1).to(torch.int8)


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


def rotate(x: Tensor, sign: Tensor, width: int, factor: int = 1, interleaved: bool = False) -> Tensor:
    """Rotate every `width * factor` consecutive elements of the last dimension at random: sign flips, Hadamard
    transforms of `width`, a cosine transform of `factor` across them. x (..., n) float32, sign (n,) -> (..., n).

    width: a power of two; width * factor divides n. interleaved: Hadamard block j takes elements b * width + r with (r
    * factor + b) // width = j instead of b = j.
    """
    if factor == 1:
        return hadamard(x * sign, width)
    blocks = (x * sign).unflatten(-1, (-1, factor, width))
    if interleaved:
        blocks = blocks.transpose(-1, -2).flatten(-2).unflatten(-1, (factor, width))
    return _across(hadamard(blocks, width), cosines(factor)).flatten(-3)


def unrotate(x: Tensor, sign: Tensor, width: int, factor: int = 1, interleaved: bool = False) -> Tensor:
    """Invert `rotate`."""
    if factor == 1:
        return hadamard(x, width) * sign
    columns = tuple(zip(*cosines(factor), strict=True))
    blocks = hadamard(_across(x.unflatten(-1, (-1, factor, width)), columns), width)
    if interleaved:
        blocks = blocks.flatten(-2).unflatten(-1, (width, factor)).transpose(-1, -2)
    return blocks.flatten(-3) * sign


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
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else folded
    return x[..., 0]


def root(x: Tensor) -> Tensor:
    """Return the square root of float32 x, correctly rounded as CUDA's and Triton's are. torch's on a CPU with MKL is
    one unit in the last place off in 17 of 100 numbers (torch 2.13, AVX-512), which moves a stored norm now and then.
    """
    return x.double().sqrt().float()
