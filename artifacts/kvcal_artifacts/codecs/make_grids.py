"""Makes grids.safetensors: grids for the standard Gaussian, vectors by k-means on seeded samples, scalars by Lloyd-Max.

    python -m kvcal_artifacts.codecs.make_grids OUT.safetensors

Lloyd's algorithm, k-means++-like start, dead points re-seeded at the sample with the largest error, best of several
starts; the MSE per coordinate is printed on fresh samples. This takes some minutes on a CPU, seconds on a GPU. Scalar
grids (d = 1) need no samples: the conditions of Lloyd and Max (Max 1960) are solved with the normal distribution
itself, in float64.
"""

from __future__ import annotations

import math
import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES = ((2, 16), (2, 64), (2, 256), (4, 256), (1, 4), (1, 8), (1, 16))


def samples(count: int, d: int, seed: int, device: str) -> Tensor:
    """Normal numbers (count, d) float32, the same on every device."""
    x = torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    return x.to(device)


def assign(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest point's index and squared distance, computed in slices."""
    index, error = [], []
    for part in x.split(1 << 16):
        distance = torch.cdist(part, grid).square()
        low, i = distance.min(-1)
        index.append(i)
        error.append(low)
    return torch.cat(index), torch.cat(error)


def lloyd(x: Tensor, n: int, seed: int, steps: int) -> Tensor:
    """A grid (n, d) by Lloyd's algorithm on x (count, d), from n of its rows; a point that no row is nearest to
    moves.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = x[torch.randperm(len(x), generator=generator, device="cpu")[:n].to(x.device)].clone()
    for _ in range(steps):
        index, error = assign(x, grid)
        count = torch.bincount(index, minlength=n)
        total = torch.zeros_like(grid).index_add_(0, index, x)
        grid = total / count.clamp_min(1)[:, None]
        dead = (count == 0).nonzero().flatten()
        if len(dead):
            grid[dead] = x[error.topk(len(dead)).indices]
    return grid


def lloyd_max(n: int, steps: int = 10_000) -> Tensor:
    """float32 (n, 1): each point the mean of the normal between the midpoints to its neighbours."""
    grid = torch.linspace(-2, 2, n, dtype=torch.float64, device="cpu")
    end = torch.tensor([math.inf], dtype=torch.float64, device="cpu")
    for _ in range(steps):
        edges = torch.cat([-end, (grid[1:] + grid[:-1]) / 2, end])
        density = torch.exp(-0.5 * edges.square()) / math.sqrt(2 * math.pi)
        grid = (density[:-1] - density[1:]) / torch.special.ndtr(edges).diff()
        grid = (grid - grid.flip(0)) / 2  # symmetric by theory: rounding must not break it
    return grid.float()[:, None]


def make(d: int, n: int, device: str) -> Tensor:
    """The grid (n, d) float32 of a normal distribution: the best of three starts, refined on more numbers, sorted."""
    if d == 1:
        return lloyd_max(n)
    large = n >= 256
    rough = samples(1 << 18, d, 1, device)
    fine = samples(1 << (21 if large else 20), d, 2, device)
    starts = [lloyd(rough, n, seed, 60) for seed in range(3)]
    best = min(starts, key=lambda g: assign(rough, g)[1].mean().item())
    index = None
    grid = best
    for _ in range(60 if large else 40):
        index, _ = assign(fine, grid)
        count = torch.bincount(index, minlength=n).clamp_min(1)
        grid = torch.zeros_like(grid).index_add_(0, index, fine) / count[:, None]
    order = sorted(range(n), key=lambda i: grid[i].tolist())
    return grid[order].float().cpu().contiguous()


def main() -> None:
    """Write the grids of all SIZES to the file that is named on the command line, and print their errors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grids = {}
    for d, n in SIZES:
        grids[f"d{d}n{n}"] = make(d, n, device)
        fresh = samples(1 << 20, d, 99, device)
        print(f"d{d}n{n}: MSE a coordinate {assign(fresh, grids[f'd{d}n{n}'].to(device))[1].mean().item() / d:.5f}")
    save_file(grids, sys.argv[1])


if __name__ == "__main__":
    main()
