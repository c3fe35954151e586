"""Error of grids whose points are bytes times one step (`points="bytes"` of HIGGS and TurboQuant) beside the exact
ones.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/byte_grids.py    # 10 s on one CPU core

Mean squared error a number of standard Gaussian numbers, the same for both grids: that of scalar grids by integrals of
the normal distribution, of d = 2 by 2^24 numbers, of which the difference is good to about 0.002 %. Then of codecs,
norm and rotation with them, of 8 heads of 128 Gaussian channels, 4 in 32 of them 8 times as large.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Higgs, Shape
from kvcal_artifacts.codecs.higgs import Points
from kvcal_artifacts.codecs.higgs_grids import byte_grid, gaussian_grid
from kvcal_kernels.lattice import nearest

HEADS, DIM, TOKENS = 8, 128, 4096
GRIDS = {"TurboQuant 2": (1, 4), "TurboQuant 3": (1, 8), "TurboQuant 4": (1, 16), "HIGGS 2": (2, 16)}


def scalar_error(points: Tensor) -> float:
    """Of points (n, 1), in order: each cell's second moment about its point."""
    p = points[:, 0].double()
    end = torch.tensor([math.inf], dtype=torch.float64)
    edges = torch.cat([-end, (p[1:] + p[:-1]) / 2, end])
    density = torch.exp(-0.5 * edges.square()) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(edges).diff()
    moved = torch.nan_to_num(edges * density, nan=0.0)
    first, second = density[:-1] - density[1:], share + moved[:-1] - moved[1:]
    return float((second - 2 * p * first + p.square() * share).sum())


def sampled_error(points: Tensor, count: int = 1 << 23) -> float:
    g, total = torch.Generator().manual_seed(1), 0.0
    for _ in range(count >> 20):
        x = torch.randn(1 << 20, points.shape[1], generator=g)
        total += float((x - points[nearest(x, points).long()]).double().square().sum())
    return total / (count >> 20 << 20) / points.shape[1]


def codec_error(x: Tensor, d: int, n: int, points: Points) -> float:
    codec = Higgs(Shape(HEADS, DIM, 64), "key", d, n, norm="head" if d == 1 else "token", points=points)
    return float((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum())


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    x[..., 5::32] *= 8.0
    for name, (d, n) in GRIDS.items():
        error = scalar_error if d == 1 else sampled_error
        exact, rounded = error(gaussian_grid(d, n)), error(byte_grid(d, n))
        own = [codec_error(x, d, n, points) for points in ("exact", "bytes")]  # type: ignore[arg-type]
        change = [f"{100 * (after / before - 1):+.3f} %" for before, after in ((exact, rounded), own)]
        made = f"exact {exact:.6f}, bytes {rounded:.6f} ({change[0]}); codec {own[0]:.6f}, {own[1]:.6f} ({change[1]})"
        print(f"{name}: {made}")


if __name__ == "__main__":
    main()
