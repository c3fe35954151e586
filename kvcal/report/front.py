"""A search as a picture: every trial, the Pareto front, the chosen point, the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .drawn import drawable, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pair = tuple[float, float]  # cost, quality


def front_png(
    points: Sequence[Pair], front: Sequence[int], chosen: int, limit: float, quality: str, cost: str
) -> bytes:
    """`front_figure` as a PNG. The same input gives the same bytes, which is why a card's plot has no date."""
    return png(front_figure(points, front, chosen, limit, quality, cost), 120)


def front_figure(
    points: Sequence[Pair],
    front: Sequence[int],
    chosen: int,
    limit: float,
    quality: str,
    cost: str,
    title: str | None = None,
) -> Figure:
    """A figure of a Pareto front. quality, cost: names of the axes. front: numbers of points, cheapest first. title:
    names model, machine, date.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter([x for x, _ in points], [y for _, y in points], s=18, color="#9aa5b1", label=f"{len(points)} trials")
    line = [points[number] for number in front]
    axes.step(
        [x for x, _ in line],
        [y for _, y in line],
        where="post",
        marker="o",
        markersize=5,
        color="#1f5fa8",
        label="Pareto front",
    )
    axes.scatter(
        points[chosen][0],
        points[chosen][1],
        s=110,
        facecolors="none",
        edgecolors="#c23b22",
        linewidths=2,
        label="chosen",
    )
    axes.axvline(limit, color="#c23b22", linestyle=":", linewidth=1, label=f"limit {limit:g}")
    axes.set(xlabel=drawable(cost), ylabel=drawable(quality))
    if min(y for _, y in points) > 0 and max(y for _, y in points) > 20 * min(y for _, y in points):
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    if title is not None:
        axes.set_title(drawable(title), fontsize=10)
    return figure
