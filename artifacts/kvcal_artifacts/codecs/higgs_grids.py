"""The grids of HIGGS: points for standard Gaussian numbers, and their tables for the fused kernel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvcal_kernels.hadamard import signs
from kvcal_kernels.layout import grids

from ..errors import KVCalError
from .constants import once

GRID_LARGEST, GRID_SIZE = 16.0, (0.25, 4.0)  # of points for N(0, 1): the largest coordinate, the root mean square
GRIDS = {(2, 16): 4, (2, 64): 6, (2, 256): 8, (4, 256): 8, (1, 4): 2, (1, 8): 3, (1, 16): 4}  # (d, n): bits of one code
GRID_MSE = {  # make_grids.py prints them; those of scalars are in Max 1960
    (2, 16): 0.10754,
    (2, 64): 0.02960,
    (2, 256): 0.00778,
    (4, 256): 0.09663,
    (1, 4): 0.11748,
    (1, 8): 0.03455,
    (1, 16): 0.00950,
}


@cache
def gaussian_grid(d: int, n: int) -> Tensor:
    """Our grid for N(0, I), float32 (n, d), from codecs/make_grids.py."""
    check_grid(d, n)
    return load_file(Path(__file__).with_name("grids.safetensors"))[f"d{d}n{n}"]


@cache
def byte_grid(d: int, n: int) -> Tensor:
    """The grid of `gaussian_grid` with points that are bytes times one step.

    Raises KVCalError for more than 16 points.
    """
    points = gaussian_grid(d, n)
    if (GRIDS[d, n] // d, d) not in grids.IN_BYTES:
        allowed = ", ".join(f"d={d} n={1 << bits * d}" for bits, d in grids.IN_BYTES)
        raise KVCalError(f"higgs grid d={d} n={n} with points of bytes: allowed are {allowed}")
    return grids.in_bytes(points)


def check_grid(d: int, n: int) -> None:
    """Raises KVCalError where there is no such grid."""
    if (d, n) not in GRIDS:
        raise KVCalError(f"higgs grid d={d} n={n}: allowed are {', '.join(f'd={a} n={b}' for a, b in GRIDS)}")


def check_values(grid: Tensor, sign: Tensor, seed: int) -> None:
    """Raises KVCalError for a grid that is none of ours, and for signs that are not those of the seed."""
    low, high = GRID_SIZE
    size, distinct = once(grid, "points", lambda: (float(grid.square().mean().sqrt()), len(grid.unique(dim=0))))
    if not low <= size <= high:
        raise KVCalError(
            f"higgs codec, grid: points of size {size:.3g} for unit variance, allowed are {low:g} to {high:g}"
        )
    if distinct != len(grid):
        raise KVCalError(f"higgs codec, grid: {distinct} points differ, needs {len(grid)}")
    if not once(grid, "ours", lambda: _is_ours(grid)):
        raise KVCalError(
            f"higgs codec, grid: is not the one for d={grid.shape[1]}, n={len(grid)}, nor that in multiples of a step"
        )
    if not once(sign, seed, lambda: torch.equal(sign.cpu(), signs(len(sign), seed))):
        raise KVCalError(f"higgs codec, sign: is not +1 and -1 as seed {seed} gives them")


def _is_ours(grid: Tensor) -> bool:
    """Whether it is a grid of `gaussian_grid`, to the bit, or one of multiples of a step, no point a step away from it:
    which step is best was searched for with random numbers, and may be another one elsewhere.
    """
    n, d = grid.shape
    points, here = gaussian_grid(d, n), grid.cpu()
    if torch.equal(here, points):
        return True
    step = float(points.abs().max()) / grids.LARGEST
    bits = GRIDS[d, n] // d
    return (bits, d) in grids.IN_BYTES and grids.are_bytes(here, bits) and bool((here - points).abs().max() < step)


@cache
def grid_table(points: tuple[float, ...], d: int, bits: int, in_bytes: bool) -> tuple[Tensor, float]:
    """A grid's table for the fused kernel and its unit: one tensor for all codecs with these points."""
    grid = torch.tensor(points, dtype=torch.float32, device="cpu").view(-1, d)
    return grids.byte_table(grid, bits) if in_bytes else grids.table_of(grid, bits)
