"""The few grid points that can be nearest in a cell of a raster: their search against the one through all."""

from __future__ import annotations

import math

import pytest
import torch

from kvcal_artifacts.codecs.higgs_grids import GRIDS, gaussian_grid
from kvcal_kernels.lattice import nearest
from kvcal_kernels.lattice.raster import SPAN, Raster, raster_of
from tests.support.interpreted import emulated, interpreted, needs_triton

# (d, n): cells an axis, candidates of most cells, of any
MADE = {
    (2, 16): (32, 4, 4),
    (2, 64): (64, 3, 5),
    (2, 256): (64, 4, 7),
    (1, 4): (32, 2, 2),
    (1, 8): (32, 2, 2),
    (1, 16): (32, 2, 2),
}


def candidates(raster: Raster, x: torch.Tensor) -> torch.Tensor:
    """int64 (M, 4 or 8) of vectors (M, d)."""
    at = (x * (raster.side / (2 * SPAN))).round() + raster.side // 2
    at = at.clamp(0, raster.side - 1).long()
    cell = at[:, 0] if x.shape[1] == 1 else at[:, 0] * raster.side + at[:, 1]
    return raster.words[:, cell].contiguous().view(torch.uint8).unflatten(1, (-1, 4)).movedim(0, 1).flatten(1).long()


@pytest.mark.parametrize(("d", "n"), GRIDS)
def test_candidates_are_few(d: int, n: int) -> None:
    raster = raster_of(gaussian_grid(d, n))
    assert (raster and (raster.side, raster.few, raster.most)) == MADE.get((d, n))
    assert raster is None or raster.few == raster.most or raster.reach >= 3.5


@pytest.mark.parametrize(("d", "n"), MADE)
def test_the_nearest_is_among_them(d: int, n: int) -> None:
    """In reach of the second word, too; in float64, without ties."""
    grid, g = gaussian_grid(d, n), torch.Generator().manual_seed(d)
    raster = raster_of(grid)
    assert raster
    x = torch.cat([torch.randn(1 << 16, d, generator=g) * size for size in (1, 3, 100)])
    found = candidates(raster, x)
    assert (found.sort(1).values == found).all()
    exact = (0.5 * grid.double().square().sum(1) - x.double() @ grid.double().T).argmin(1)
    inner = x.abs().amin(1) < raster.reach
    assert (found[inner, : raster.few] == exact[inner, None]).any(1).all()
    assert (found[:, : raster.most] == exact[:, None]).any(1).all()


@pytest.mark.parametrize("points", [torch.zeros(16, 2), torch.randn(256, 2), torch.randn(16, 4)], ids=["0", "256", "4"])
def test_a_grid_with_many_candidates_somewhere_has_none(points: torch.Tensor) -> None:
    assert raster_of(points) is None


def test_equally_near_points_are_all_candidates() -> None:
    grid = torch.tensor([[1.0], [-1.0], [1.0]])
    raster = raster_of(grid)
    assert raster
    assert raster.reach == math.inf
    assert candidates(raster, torch.tensor([[0.0], [2.0]]))[:, :3].tolist() == [[0, 1, 2], [0, 2, 2]]
    assert nearest(torch.tensor([[0.0], [2.0], [-2.0]]), grid).tolist() == [0, 0, 1]


@needs_triton
def test_the_kernel_finds_the_codec_s_points() -> None:
    """Among them ties, and vectors within some units of the last place of one."""
    assert interpreted("-m", "tests.support.cases.nearest_kernel") == [" ".join(["0"] * 10)]


@needs_triton
def test_the_compiled_kernel_finds_the_codec_s_points() -> None:
    assert emulated("-m", "tests.support.cases.nearest_kernel") == [" ".join(["0"] * 10)]
