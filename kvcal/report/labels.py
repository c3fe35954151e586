"""Labels of points that do not lie on each other: the nearest place around its point that is still free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .drawn import drawable

if TYPE_CHECKING:  # matplotlib is imported only where a plot is asked for
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels
STEPS = tuple(
    (distance * math.cos(angle), distance * math.sin(angle))
    for distance in (7, 14, 22, 32, 44, 58, 74)
    for angle in (0.5, -0.5, 2.6, -2.6, 1.57, -1.57, 0.0, 3.14)
)  # points (1/72 inch) from a point to its label's nearest edge
FAR = 20.0  # from where on a line leads from label to point
AROUND = 7.0  # points that another label keeps from a point, so that it is not read as its name
LABEL_GAP = 1.0  # and from another label
BAR = 2.0  # and from the middle of an error bar
APART = 8.0  # between dots of one x that would lie on each other, or whose bars would
SAME_X = 3.0  # less between dots is one x
DOT = 5.0  # a dot's diameter


def side_by_side(axis: Axes, points: Sequence[Point], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Where each point stands on the x axis, so that none hides another. Points of one x whose spans of y (low, high)
    meet stand APART from each other, in the order of `points`; all others where they are. In data units of `axis`,
    whose limits and layout are fixed by it.
    """
    unit = _settled(axis)
    at = [axis.transData.transform(point) for point in points]
    ends = [
        sorted(axis.transData.transform((x, end))[1] for end in span)
        for (x, _), span in zip(points, spans, strict=True)
    ]
    clusters: list[list[int]] = []
    for place in range(len(points)):
        near = [one for one in clusters if any(_meet(at[place][0], ends[place], at[n][0], ends[n], unit) for n in one)]
        clusters = [one for one in clusters if one not in near] + [[*itertools.chain(*near), place]]
    places = [x for x, _ in points]
    to_data = axis.transData.inverted()
    for cluster in clusters:
        for n, place in enumerate(sorted(cluster)) if len(cluster) > 1 else ():
            x, y = at[place]
            places[place] = float(to_data.transform((x + (n - (len(cluster) - 1) / 2) * APART * unit, y))[0])
    return places


def _meet(x: float, span: Sequence[float], other_x: float, other: Sequence[float], unit: float) -> bool:
    """Whether two spans of pixels at these x lie on each other, dots at their ends included."""
    return abs(x - other_x) < SAME_X * unit and span[0] - other[1] < DOT * unit > other[0] - span[1]


def _settled(axis: Axes) -> float:
    """Fix limits and layout of the axes' figure: a layout after this would move axes below their labels. Returns pixels
    a typographic point.
    """
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())
    return figure.dpi / 72


def label_points(
    axis: Axes,
    points: Sequence[Point],
    texts: Sequence[str],
    size: float = 8,
    bars: Sequence[tuple[float, float]] = (),
) -> None:
    """Write each text next to its point, in data units of `axis`; limits and layout of the figure are fixed by it.

    A label takes the first of STEPS at which it lies within the axes, on no label before it, on no bar and AROUND from
    the other points. Where none is free, it takes the one with the least overlap. bars: low and high end of each
    point's bar.
    """
    unit = _settled(axis)
    inside = axis.get_window_extent()
    at = [axis.transData.transform(point) for point in points]
    dots: list[Box] = [_grown((x, y, x, y), AROUND * unit) for x, y in at]
    labels: list[Box] = []
    upright: list[Box] = []
    for (x, _), bar in zip(points, bars, strict=False):
        (x0, low), (x1, high) = (axis.transData.transform((x, end)) for end in bar)
        upright.append(_grown((x0, low, x1, high), BAR * unit))
    for place in sorted(range(len(at)), key=lambda place: (at[place][0], -at[place][1])):  # the upper one first
        (x, y), point, text = at[place], points[place], texts[place]
        dot = _grown((x, y, x, y), 3 * unit)
        note = axis.annotate(drawable(text), point, xytext=(0, 0), textcoords="offset points", fontsize=size)
        extent = note.get_window_extent()
        boxes = [_box(x, y, step, extent.width, extent.height, unit) for step in STEPS]
        others = [*dots[:place], dot, *dots[place + 1 :], *upright, *labels]
        best = min(range(len(STEPS)), key=lambda n: (_overlap(boxes[n], others, inside), n))
        step = STEPS[best]
        note.set_horizontalalignment("left" if step[0] > 1 else "right" if step[0] < -1 else "center")
        note.set_verticalalignment("bottom" if step[1] > 1 else "top" if step[1] < -1 else "center")
        note.set_position(step)
        if math.hypot(*step) > FAR:
            axis.annotate(
                "", point, xytext=step, textcoords="offset points",
                arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "#9aa5b1", "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip
        labels.append(_grown(boxes[best], LABEL_GAP * unit))


def _grown(box: Box, by: float) -> Box:
    return box[0] - by, box[1] - by, box[2] + by, box[3] + by


def _box(x: float, y: float, step: tuple[float, float], width: float, height: float, unit: float) -> Box:
    x0 = x + step[0] * unit - (0 if step[0] > 1 else width if step[0] < -1 else width / 2)
    y0 = y + step[1] * unit - (0 if step[1] > 1 else height if step[1] < -1 else height / 2)
    return x0, y0, x0 + width, y0 + height


def _overlap(box: Box, others: Sequence[Box], inside: Bbox) -> float:
    """Pixels that the box shares with others, and those outside of the axes, ten times."""
    shared = sum(_common(box, place) for place in others)
    whole = (box[2] - box[0]) * (box[3] - box[1])
    return shared + 10 * (whole - _common(box, (inside.x0, inside.y0, inside.x1, inside.y1)))


def _common(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
