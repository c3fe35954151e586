"""A drawn figure as the bytes of its file: what is to be a file is whole before any of it is written."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.shown import shown

if TYPE_CHECKING:  # matplotlib is imported only where a plot is asked for
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WITHOUT: dict[str, dict[str, None]] = {  # what a format would record of the moment and of matplotlib
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def drawable(text: object) -> str:
    """Text as matplotlib draws it: no formula between dollars, no control characters."""
    return shown(text).replace("$", r"\$")


def png(figure: Figure, dpi: int) -> bytes:
    """A PNG of `dpi` dots per inch, without matplotlib's version in it: the same numbers give the same bytes."""
    return as_file(figure, Path("x.png"), dpi)


def as_file(figure: Figure, path: Path, dpi: int = 150) -> bytes:
    """The figure in the format of the path's suffix, one of SUFFIXES; the same numbers give the same bytes.

    dpi: dots per inch, of a PNG alone. Text of an SVG stays text, in the reader's font.
    """
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kvcal", "svg.fonttype": "none"}):
        figure.savefig(stream, format=path.suffix[1:], dpi=dpi, metadata=WITHOUT[path.suffix])
    return stream.getvalue()


def machine_and_date(machine: str) -> str:
    """The end of a title: the machine and today's date, in UTC."""
    return f"{machine}, {datetime.now(UTC):%Y-%m-%d}"
