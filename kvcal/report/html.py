"""Pieces of the page of `kvcal report`: tables, cells and sections. What strangers wrote is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from .quantities import quantity, written
from .svg import text


def listed(facts: Mapping[str, object]) -> str:
    """Names and values, each on a line; those without a value are left out."""
    lines = ((quantity(name).name, written(name, value, whole=True)) for name, value in facts.items())
    return "<ul>" + "".join(f"<li>{text(name)}: {text(value)}</li>" for name, value in lines if value) + "</ul>"


def wide(label: str, chart: object) -> str:
    """A chart that is scrolled on narrow screens, so that its words stay large enough to be read."""
    return f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0">{chart}</div>'


def section(title: str, words: str, *parts: str) -> str:
    """A section with a heading. words and parts are HTML already."""
    return f"<section>\n<h2>{text(title)}</h2>\n<p>{words}</p>\n" + "\n".join(parts) + "\n</section>"


def table(label: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    body = "\n".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0"><table>\n<thead><tr>{head}</tr>'
        f"</thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def figure(value: float | None, form: str = "{:.4g}") -> str:
    """A figure as a cell's text; a dash where there is none."""
    return "–" if value is None else form.format(value)


def heat(share: float | None, shown: str) -> str:
    """A cell from green (0) to red (1), always light enough for black text."""
    if share is None:
        return "<td>–</td>"
    hue = round(120 * (1 - min(max(share, 0.0), 1.0)))
    return f'<td class="heat" style="background:hsl({hue} 60% 72%)">{shown}</td>'


def heat_by_log(figures: Iterable[float]) -> Callable[[float], str]:
    """What makes a cell of a figure, its colour by the logarithm between the least and the largest positive one of
    `figures`; what is not positive is the best.
    """
    positive = [one for one in figures if one > 0] or [1.0]
    low, high = math.log(min(positive)), math.log(max(positive))

    def cell(one: float) -> str:
        share = 0.0 if one <= 0 or high == low else (math.log(one) - low) / (high - low)
        return heat(share, f"{one:.2g}")

    return cell
