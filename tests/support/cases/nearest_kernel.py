"""The nearest point as kernels look for it, alone: for the interpreter and the emulator, python -m
tests.support.cases.nearest_kernel
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcal_artifacts.codecs.higgs_grids import GRIDS, gaussian_grid
from kvcal_kernels.higgs import Rotated
from kvcal_kernels.higgs.triton import nearest_points, searched
from kvcal_kernels.lattice import nearest
from kvcal_kernels.triton import interpreted

N = 64


@triton.jit
def nearest_kernel(
    p_x, p_table, p_codes, D: tl.constexpr, POINTS: tl.constexpr, SIDE: tl.constexpr, FEW: tl.constexpr,
    MOST: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x = tl.load(p_x + row * WIDE + tl.arange(0, WIDE)[None, :])
    code = nearest_points(x, p_table, ROWS, WIDE, POINTS, D, SIDE, FEW, MOST, ASM)
    tl.store(p_codes + row * (WIDE // D) + tl.arange(0, WIDE // D)[None, :], code)


def hard(points: Tensor) -> Tensor:
    """Vectors (M, d) between two near points, within some units of the last place; on edges of cells; far out, along
    every direction; larger than any norm allows; of nothing; and random ones.
    """
    n, d = points.shape
    g = torch.Generator().manual_seed(n)
    other = points[torch.cdist(points, points).topk(min(n, 6), largest=False).indices].flatten(0, 1)  # (6 n, d)
    own = points.repeat_interleave(min(n, 6), 0)
    apart, along = own - other, torch.randn(len(own), d, generator=g)
    along -= apart * (along * apart).sum(-1, True) / (apart * apart).sum(-1, True).clamp_min(1e-30)
    between = (own + other) / 2 + along
    step = 2.0 ** (between.abs().clamp_min(2.0**-9).log2().floor() - 23)
    near = [between + step * i for i in range(-2, 3)]
    edges = torch.randint(-70, 71, (2000, d), generator=g) / 16
    away = torch.randn(2000, d, generator=g)
    scaled = [torch.randn(4000, d, generator=g) * size for size in (1.0, 2.5, 1e-6, 1e-38)]
    far = [away * size for size in (8.0, 100.0, 1e10, 3e23)]
    parts = [points, *near, edges, edges * (1 + 2.0**-23), edges * (1 - 2.0**-23), *far, *scaled, torch.zeros(8, d)]
    return torch.cat(parts)


def differing(points: Tensor) -> int:
    """Of hard vectors, those for which the kernel finds another point than the codec; of NaNs, anything but point 0."""
    x, d = hard(points), points.shape[1]
    in_rows = 512 if interpreted() else 32  # of a program: the interpreter takes as long for many as for few
    x = torch.cat([x, x.new_full((-len(x) % (in_rows * N // d), d), torch.nan)])
    rows, how = x.view(-1, N), Rotated(points, torch.ones(1, dtype=torch.int8))
    codes = torch.full((len(rows), N // d), -1, dtype=torch.int32)
    sizes = searched(how) | {"WIDE": N, "ROWS": in_rows, "ASM": not interpreted()}
    nearest_kernel[(len(rows) // in_rows,)](rows, how.table, codes, D=d, **sizes, num_warps=4, enable_fp_fusion=False)
    return int((codes.flatten() != nearest(x, points)).sum())


def main() -> None:
    torch.set_num_threads(1)
    grids = [gaussian_grid(d, n) for d, n in GRIDS]
    grids += [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((16, 2), (64, 2), (8, 1))]
    print(*(differing(points) for points in grids))


if __name__ == "__main__":
    main()
