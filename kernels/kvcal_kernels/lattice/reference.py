"""Nearest point of a small grid: distance and arg-min in one pass over slices, without the whole distance matrix."""

from __future__ import annotations

import torch
from torch import Tensor

SLICE = 1 << 18  # distances held at a time: 1 MiB of float32, which a core's cache holds
SLICE_CUDA = 1 << 28


def nearest(x: Tensor, grid: Tensor) -> Tensor:
    """Return the index of the grid point nearest to each vector; the lowest index on a tie.

    x (M, d) float32, grid (n, d) float32 with n <= 256 -> uint8 (M,). Element-wise arithmetic only, so that a vector's
    code does not depend on the others in the call.
    """
    if grid.shape[0] > 256:
        raise ValueError(f"grid of {grid.shape[0]} points: codes are one byte, 256 points at most")
    half = 0.5 * (grid * grid).sum(-1)
    limit = SLICE_CUDA if x.is_cuda else SLICE
    step = max(1, limit // grid.shape[0])
    out = torch.empty(x.shape[0], dtype=torch.uint8, device=x.device)
    for start in range(0, x.shape[0], step):
        part = x[start : start + step]
        score = half - part[:, :1] * grid[:, 0]  # |x - g|^2 / 2 up to |x|^2 / 2
        for axis in range(1, grid.shape[1]):
            score.addcmul_(part[:, axis : axis + 1], grid[:, axis], value=-1)
        # On a CPU min() takes the first of equal ones, too, in two thirds of argmin's time.
        code = score.argmin(-1) if x.is_cuda else score.min(-1).indices
        out[start : start + step] = code.to(torch.uint8)
    return out


def lookup(codes: Tensor, grid: Tensor) -> Tensor:
    """Return the grid vectors of codes uint8 (..., m), laid out (..., m * d) float32."""
    return grid[codes.int()].flatten(-2)
