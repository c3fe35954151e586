"""Charts as inline SVG: lines, points with error bars, intervals. Colours are those of
colours.py, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from kvcal_artifacts.shown import shown

from .colours import OTHER, Shades

WIDTH, HEIGHT = 720, 340
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 84, 16, 14, 46
PLAIN = Shades(OTHER, "#a3adb8")
TICKS = 6
ROW, LONGEST = 20, 32  # height of an interval; letters left of it


def text(value: object) -> str:
    """Text of strangers as HTML text, in one line."""
    return escape(shown(value))


@dataclass(frozen=True)
class Axis:
    """An axis from the least to the largest number, on the pixels from `start` to `end`; logarithmic if asked for.

    form: how a number on it is written.
    """

    label: str
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    form: Callable[[float], str] = lambda value: number(value)

    @classmethod
    def over(
        cls,
        label: str,
        numbers: Iterable[float],
        start: float,
        end: float,
        log: bool = False,
        form: Callable[[float], str] | None = None,
    ) -> Axis:
        """An axis that all numbers fit on, with a margin. A logarithmic one leaves out what is not positive."""
        usable = [x for x in numbers if math.isfinite(x) and (x > 0 or not log)] or [1.0]
        low, high = min(usable), max(usable)
        if log:
            low, high = low / 1.3, high * 1.3
        else:
            margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.1
            low, high = low - margin, high + margin
        return cls(label, low, high, start, end, log, form or number)

    def __call__(self, number: float) -> float:
        """Pixels; what lies outside is put on the edge."""
        low, high, x = self.low, self.high, min(max(number, self.low), self.high)
        share = math.log(x / low) / math.log(high / low) if self.log else (x - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1)]
            fine = powers if last - first > 2 else [power * step for power in powers for step in (1, 2, 5)]
            if len(inside := [tick for tick in fine if self.low <= tick <= self.high]) > 1:
                return inside  # else too narrow for these, as around one point
        raw = (self.high - self.low) / TICKS
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw)
        first = math.ceil(self.low / step)
        return [float(f"{step * i:.12g}") for i in range(first, math.floor(self.high / step) + 1)]


@dataclass(frozen=True)
class Series:
    """Points (x, y, standard error of y or None) of one name; joined: by a line."""

    name: str
    points: Sequence[tuple[float, float, float | None]]
    joined: bool = True
    shades: Shades = PLAIN


@dataclass
class Chart:
    """A chart with both axes. title: what it shows, read out by screen readers."""

    title: str
    x: Axis
    y: Axis
    parts: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        title: str,
        labels: tuple[str, str],
        series: Sequence[Series],
        log: tuple[bool, bool],
        form: Callable[[float], str] | None = None,
    ) -> Chart:
        """A chart of these series. labels, log: of x and y. form: how numbers on the y axis are written."""
        xs = [x for one in series for x, _, _ in one.points]
        ys = [y for one in series for _, y, _ in one.points]
        x = Axis.over(labels[0], xs, MARGIN_LEFT, WIDTH - MARGIN_RIGHT, log[0])
        y = Axis.over(labels[1], ys, HEIGHT - MARGIN_BOTTOM, MARGIN_TOP, log[1], form)
        chart = cls(title, x, y)
        for one in series:
            chart.draw(one)
        return chart

    def draw(self, series: Series) -> None:
        """Points that the axes have a place for: a logarithm takes positive numbers alone."""
        dash = ' stroke-dasharray="5 3"' if series.shades.dashed else ""
        self.parts.append(f'<g class="series" style="{style(series.shades)}">')
        usable = [
            point for point in series.points if (point[0] > 0 or not self.x.log) and (point[1] > 0 or not self.y.log)
        ]
        if series.joined and len(usable) > 1:
            line = " ".join(f"{self.x(x)},{self.y(y)}" for x, y, _ in usable)
            self.parts.append(f'<polyline class="line"{dash} points="{line}"/>')
        for x, y, error in usable:
            label = f"{series.name}: {self.x.label} {self.x.form(x)}, {self.y.label} {self.y.form(y)}"
            if error is not None:
                label += f" ± {error:.2g}"
                ends = [self.y(max(y - error, self.y.low)), self.y(y + error)]
                self.parts.append(
                    f'<line class="line" x1="{self.x(x)}" x2="{self.x(x)}" y1="{ends[0]}" y2="{ends[1]}"/>'
                )
            self.parts.append(
                f'<circle class="dot" cx="{self.x(x)}" cy="{self.y(y)}" r="4"><title>{text(label)}</title></circle>'
            )
        self.parts.append("</g>")

    def __str__(self) -> str:
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(self.title)}">'
        return "\n".join([head, *self._axes(), *self.parts, "</svg>"])

    def _axes(self) -> list[str]:
        rows = [f'<path class="axis" d="M{MARGIN_LEFT} {MARGIN_TOP}V{HEIGHT - MARGIN_BOTTOM}H{WIDTH - MARGIN_RIGHT}"/>']
        for tick in self.x.ticks:
            place = self.x(tick)
            rows.append(f'<path class="grid" d="M{place} {MARGIN_TOP}V{HEIGHT - MARGIN_BOTTOM}"/>')
            rows.append(
                f'<text x="{place}" y="{HEIGHT - MARGIN_BOTTOM + 18}" text-anchor="middle">{self.x.form(tick)}</text>'
            )
        for tick in self.y.ticks:
            place = self.y(tick)
            rows.append(f'<path class="grid" d="M{MARGIN_LEFT} {place}H{WIDTH - MARGIN_RIGHT}"/>')
            rows.append(f'<text x="{MARGIN_LEFT - 8}" y="{place + 4}" text-anchor="end">{self.y.form(tick)}</text>')
        middle = (MARGIN_TOP + HEIGHT - MARGIN_BOTTOM) / 2
        center = (MARGIN_LEFT + WIDTH - MARGIN_RIGHT) / 2
        rows.append(f'<text x="{center}" y="{HEIGHT - 8}" text-anchor="middle">{text(self.x.label)}</text>')
        rows.append(
            f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{text(self.y.label)}</text>'
        )
        return rows


def _short(name: str) -> str:
    """A name that fits left of a chart: its beginning and its end."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[-(LONGEST // 2) :]}"


def number(value: float) -> str:
    """A number of about four digits: 0.001, 2.5, 4,096, 1,500,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"


def style(shades: Shades) -> str:
    """Colours of an element of class `series`, of which the page's style takes one."""
    return f"--light:{shades.light};--dark:{shades.dark}"


def legend(series: Sequence[Series]) -> str:
    """Names with their colours."""
    items = "".join(
        f'<li><span class="key series{" dashed" if one.shades.dashed else ""}" style="{style(one.shades)}"></span>'
        f"{text(one.name)}</li>"
        for one in series
    )
    return f'<ul class="legend">{items}</ul>'


@dataclass(frozen=True)
class Interval:
    """A dot at `middle` with a line from low to high, where there are ends, in a series' colours. of: what it is of."""

    of: str
    series: Series
    low: float | None
    middle: float
    high: float | None


def intervals(title: str, label: str, rows: Sequence[Interval]) -> str:
    """Intervals one below the other, with a line at 0. What they are of stands left of the first of its kind."""
    height = MARGIN_TOP + MARGIN_BOTTOM + ROW * len(rows)
    start = 250
    numbers = [value for row in rows for value in (row.low, row.middle, row.high) if value is not None]
    x = Axis.over(label, [0.0, *numbers], start, WIDTH - MARGIN_RIGHT)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(title)}">']
    for tick in x.ticks:
        parts.append(f'<path class="grid" d="M{x(tick)} {MARGIN_TOP}V{height - MARGIN_BOTTOM}"/>')
        parts.append(
            f'<text x="{x(tick)}" y="{height - MARGIN_BOTTOM + 18}" text-anchor="middle">{number(tick)}</text>'
        )
    parts.append(f'<path class="axis" d="M{x(0)} {MARGIN_TOP}V{height - MARGIN_BOTTOM}"/>')
    for place, row in enumerate(rows):
        y = MARGIN_TOP + ROW * place + ROW // 2
        tip = f"{row.of}, {row.series.name}: {row.middle:+.4f}"
        if not place or rows[place - 1].of != row.of:
            parts.append(f'<text x="{start - 10}" y="{y + 4}" text-anchor="end">{text(_short(row.of))}</text>')
        parts.append(f'<g class="series" style="{style(row.series.shades)}">')
        if row.low is not None and row.high is not None:
            tip += f", from {row.low:+.4f} to {row.high:+.4f}"
            dashes = ' stroke-dasharray="5 4"' if row.series.shades.dashed else ""
            parts.append(f'<path class="line"{dashes} d="M{x(row.low)} {y}H{x(row.high)}"/>')
        parts.append(f'<circle class="dot" cx="{x(row.middle)}" cy="{y}" r="4"><title>{text(tip)}</title></circle></g>')
    parts.append(f'<text x="{(start + WIDTH) / 2}" y="{height - 8}" text-anchor="middle">{text(label)}</text></svg>')
    return "\n".join(parts)
