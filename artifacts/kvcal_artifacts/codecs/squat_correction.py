"""The algebra of SQuat's corrections: what a key's channels take back of the rounding of those before them.

Bits of a block depend on the block and its subspace alone. M_rr^-1 M_rb comes from element-wise float64 operations in
one order. Its product with the error is a sum of integers that float64 holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcal_kernels import squat
from kvcal_kernels.hadamard import tree_sum
from kvcal_kernels.squat import Moves


@dataclass(frozen=True)
class Solved:
    """The corrections of a basis.

    responses: of its steps of so many channels. moves: the same as the kernel takes them.
    """

    basis: Tensor
    responses: list[Tensor]
    channels: int

    @cached_property
    def moves(self) -> Moves:
        return squat.moves(self.responses, self.channels)

    def is_of(self, basis: Tensor) -> bool:
        """Whether the basis is the one solved, bit for bit."""
        solved = self.basis
        return solved.device == basis.device and solved.shape == basis.shape and torch.equal(solved, basis)


def responses(basis: Tensor, steps: list[slice]) -> list[Tensor]:
    """The matrices M_br M_rr^-1 of M = I + basis'basis for each step: b its channels, r those behind them.

    basis (..., R, D) float64 -> for each step (..., g, D - stop) float64. M_rr^-1 basis_r' is basis_r' K^-1 with K = I
    + basis_r basis_r' (R, R), so K^-1 is all that is needed. Channels enter it from the last one on, one at a time
    (Sherman and Morrison), and every step takes it in the state then reached.
    """
    rank, behind, products = basis.shape[-2], basis.shape[-1], []
    inverse = torch.eye(rank, dtype=basis.dtype, device=basis.device).expand(*basis.shape[:-1], rank)
    for here in reversed(steps):
        for channel in reversed(range(here.stop, behind)):
            column = basis[..., channel]
            moved = tree_sum(inverse * column[..., None, :])
            size = 1 + tree_sum(column * moved)
            inverse = inverse - moved[..., :, None] * moved[..., None, :] / size[..., None, None]
        behind = here.stop
        solved = _product(inverse, basis[..., here])
        products.append(_product(solved.transpose(-1, -2), basis[..., behind:]))
    return products[::-1]


def _product(first: Tensor, second: Tensor) -> Tensor:
    """The product first @ second, element by element in one order, for few columns of `first`."""
    total = first[..., :, :1] * second[..., :1, :]
    for i in range(1, second.shape[-2]):
        total = total + first[..., :, i, None] * second[..., i, None, :]
    return total


def exact_product(error: Tensor, response: Tensor) -> Tensor:
    """The product of error (B, H, N, b, g) float32 and response (B or 1, H, g, r) float64: (B, H, N, b, r) float64.

    Both are rounded to integers of at most (53 - log2 g) / 2 bits, errors block by block, so that float64 adds the
    products exactly in any order and shape. For g = 64 that is 23 bits: at most g * 2^-23 times the largest of both
    (7.6e-6).
    """
    bits = (53 - (error.shape[-1] - 1).bit_length()) // 2
    whole, unit = squat.integers(error, bits)
    weight, step = squat.integers(response, bits)
    product = whole.flatten(2, 3) @ weight
    exact: Tensor = torch.unflatten(product, 2, error.shape[2:4])
    return exact * (unit * step[:, :, None])
