"""The points of a grid that can be nearest in each cell of a raster: a search looks at these few instead of all.

Cells are squares (intervals, d = 1) of side 2 SPAN / side about multiples of it, those at the border without an end. A
point is left out of a cell where one other is nearer by more than rounding all over the cell, so that `nearest` finds
the first of the nearest, bit for bit, among those that are left. The difference of two scores less what rounding may
add is concave in x: it is least at a corner, or towards infinity.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

SPAN = 4.0  # numbers have a variance of 1
SIDES = (32, 64)  # a word of four codes a cell: 16 KB at most
MOST = 8  # candidates of a cell, two words
COMMON = 3.0  # beyond it, in both coordinates, are 7e-6 of Gaussian vectors
ROUNDING = 2.0**-20  # three roundings of 2^-24 in each of two scores, and more than twice that


@dataclass(frozen=True)
class Raster:
    """Candidates of each cell. words int32 (1 or 2, side^d): the codes of a cell's candidates, ascending, the last one
    repeated, a byte each from the lowest on. A cell has at most `most` of them, and at most `few` where a coordinate's
    magnitude is below `reach`.
    """

    side: int
    few: int
    most: int
    reach: float
    words: Tensor


def raster_of(points: Tensor) -> Raster | None:
    """Return the raster of a grid (n, d) float32, n <= 256; None where all points are to be looked at. Grids with the
    same points share one.
    """
    return _raster(tuple(points.flatten().tolist()), points.shape[1])


@functools.cache
def _raster(numbers: tuple[float, ...], d: int) -> Raster | None:
    points = torch.tensor(numbers, dtype=torch.float32, device="cpu").view(-1, d)
    if d > 2:
        return None
    rasters = [raster for side in SIDES if (raster := _of_side(points, side)) is not None]
    return min(rasters, key=lambda raster: (raster.few, raster.side), default=None)


def _of_side(points: Tensor, side: int) -> Raster | None:
    d = points.shape[1]
    allowed = _candidates(points, side)
    if allowed is None:
        return None
    count = allowed.sum(-1)
    most = int(count.max())
    if most > MOST:
        return None
    centres = (torch.arange(side, device="cpu") - side // 2).double()
    least = (centres.abs() - 0.5).clamp_min(0) * (2 * SPAN / side)  # magnitude in a cell
    inner = least if d == 1 else torch.minimum(least[:, None], least).flatten()
    few, reach = most, math.inf
    if most > 4:  # a word holds four
        few = int(count[inner < COMMON].max())
        reach = float(inner[count > few].min()) if few < most else math.inf
    if few > 4:
        return None
    order = allowed.int().argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(4 if most <= 4 else 8, device="cpu").minimum(count[:, None] - 1)
    codes = order.gather(1, place).to(torch.uint8).unflatten(1, (-1, 4)).transpose(0, 1).contiguous()
    return Raster(side, few, most, reach, codes.view(torch.int32)[..., 0])


def _candidates(points: Tensor, side: int) -> Tensor | None:
    """Return the candidates of each cell, bool (side^d, n); None where the point nearest to the middle of some cell
    leaves more than 4 MOST others.
    """
    g = points.double()
    n, d = g.shape
    half = 0.5 * (points * points).sum(-1).double()  # rounded, as `nearest` has it
    middle = (torch.arange(side, device="cpu") - side // 2).double()
    low, high = ((middle + off) * (2 * SPAN / side) for off in (-0.5, 0.5))
    low[0], high[-1] = -math.inf, math.inf
    edges = torch.stack([low, high], -1)  # (side, 2)
    cells = (
        edges[:, None]
        if d == 1
        else torch.stack([edges[:, None].expand(side, side, 2), edges[None].expand(side, side, 2)], 2).flatten(0, 1)
    )  # (side^d, d, 2)
    inside = cells.clamp(-SPAN, SPAN).mean(-1)
    first = (half - inside @ g.T).argmin(-1)  # (cells,)
    allowed = ~_further(half, g, torch.arange(n, device="cpu")[None], first[:, None], cells[:, None])
    remaining = int(allowed.sum(-1).max())
    if remaining > 4 * MOST:
        return None
    some = allowed.int().argsort(dim=-1, descending=True, stable=True)[
        :, :remaining
    ]  # a point left out twice stays out
    worse = _further(half, g, some[:, :, None], some[:, None, :], cells[:, None, None]).any(-1)
    return allowed.scatter(1, some, allowed.gather(1, some) & ~worse)


def _further(half: Tensor, g: Tensor, one: Tensor, other: Tensor, cells: Tensor) -> Tensor:
    """Return whether points `one` are further than `other` everywhere in `cells` (..., d, 2), by more than rounding."""
    least = half[one] - half[other] - ROUNDING * half.max()
    for axis in range(g.shape[1]):
        slope = -(g[one, axis] - g[other, axis])
        ends = []
        for end in (0, 1):
            x = cells[..., axis, end]
            outward = slope * x.sign() - ROUNDING * g.abs().max()
            ends.append(torch.where(x.isinf(), torch.where(outward >= 0, math.inf, -math.inf), outward * x.abs()))
        least = least + torch.minimum(*ends)
    return least > 0
