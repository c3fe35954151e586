"""A drawn figure as the bytes of a PNG: what is to be a file is whole before any of it is written."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib is imported only where a plot is asked for
    from matplotlib.figure import Figure


def png(figure: Figure, dpi: int) -> bytes:
    """`dpi` dots an inch, without matplotlib's version in it: the same numbers give the same bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()
