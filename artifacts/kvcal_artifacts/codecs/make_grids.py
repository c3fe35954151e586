"""Makes grids.safetensors: vector grids for the standard Gaussian by k-means on seeded samples.

    python -m kvcal_artifacts.codecs.make_grids OUT.safetensors

Lloyd's algorithm, k-means++-like start, dead points re-seeded at the sample with the largest error, best of several starts;
the MSE a coordinate is printed on fresh samples. Takes some minutes on a CPU, seconds on a GPU.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES = ((2, 16), (2, 64), (2, 256), (4, 256))


def samples(count: int, d: int, seed: int, device: str) -> Tensor:
    x = torch.randn(count, d, generator=torch.Generator().manual_seed(seed))
    return x.to(device)


def assign(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest index and squared distance, in slices."""
    index, error = [], []
    for part in x.split(1 << 16):
        distance = torch.cdist(part, grid).square()
        low, i = distance.min(-1)
        index.append(i)
        error.append(low)
    return torch.cat(index), torch.cat(error)


def lloyd(x: Tensor, n: int, seed: int, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    grid = x[torch.randperm(len(x), generator=generator)[:n].to(x.device)].clone()
    for _ in range(steps):
        index, error = assign(x, grid)
        count = torch.bincount(index, minlength=n)
        total = torch.zeros_like(grid).index_add_(0, index, x)
        grid = total / count.clamp_min(1)[:, None]
        dead = (count == 0).nonzero().flatten()
        if len(dead):
            grid[dead] = x[error.topk(len(dead)).indices]
    return grid


def make(d: int, n: int, device: str) -> Tensor:
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grids = {}
    for d, n in SIZES:
        grids[f"d{d}n{n}"] = make(d, n, device)
        fresh = samples(1 << 20, d, 99, device)
        print(f"d{d}n{n}: MSE a coordinate {assign(fresh, grids[f'd{d}n{n}'].to(device))[1].mean().item() / d:.5f}")
    save_file(grids, sys.argv[1])


if __name__ == "__main__":
    main()
