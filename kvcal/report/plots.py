"""Plots as PNG. matplotlib is imported only when a plot is asked for."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import UsageError

Rows = Sequence[Sequence[float] | None]
LEAST_SHOWN = 1e-7  # an exact codec's error of 0 has no logarithm


def check_plot(path: Path) -> None:
    """Before any work: whether a plot can be drawn and written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: install kvcal again")
    if path.suffix != ".png":
        raise UsageError(f"--plot {path}: must end in .png")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: {path.parent} is not a folder")


def plot_deviation(table: dict[str, Any], sources: dict[str, str], title: str, path: Path) -> None:
    """Deviation of queries against the rank of the subspace (SQuat Figures 2 and 6): mean, first, middle and last layer.

    table: as deviation_table gives it; sources: source -> its name in the legend.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    layers = table["layers"]
    panels = {"all layers, mean": table["mean"]}
    for index in sorted({0, len(layers) // 2, len(layers) - 1}):
        panels[f"layer {index}"] = layers[index]
    figure = Figure(figsize=(3.4 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for source, values in curves.items():
            axis.plot(table["ranks"], values, marker="o", markersize=3, label=sources[source])
        axis.set(title=name, xlabel="rank of the subspace", ylim=(0, 1))
    axes[0].set_ylabel("deviation of queries")
    figure.legend(*axes[0].get_legend_handles_labels(), title="subspace of", loc="outside right center")
    figure.suptitle(title)
    figure.savefig(path, dpi=150, metadata={"Software": None})  # same numbers, same bytes


def head_errors_png(key: Rows, value: Rows, title: str) -> bytes:
    """Relative squared error by layer (down) and kv head (across), keys beside values; layers without a row are grey.

    The same numbers give the same bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    heads = max(len(row) for row in (*key, *value) if row)
    tables = {
        name: [[math.nan] * heads if row is None else [max(x, LEAST_SHOWN) for x in row] for row in rows]
        for name, rows in (("keys", key), ("values", value))
    }
    shown = [x for rows in tables.values() for row in rows for x in row if not math.isnan(x)]
    norm = LogNorm(min(shown), max(max(shown), min(shown) * 1.01))
    figure = Figure(figsize=(2.4 + 0.7 * max(heads, 4), 1.6 + 0.26 * max(len(key), 6)), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, rows) in zip(axes, tables.items(), strict=True):
        axis.set_facecolor("#d0d4d9")
        picture = axis.imshow(rows, norm=norm, aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set(title=name, xlabel="kv head", xticks=range(heads))
    axes[0].set(ylabel="layer", yticks=range(0, len(key), max(1, len(key) // 16)))
    figure.colorbar(picture, ax=axes, label="|x − decoded|² / |x|²")
    figure.suptitle(title)
    made = io.BytesIO()
    FigureCanvasAgg(figure).print_png(made, metadata={"Software": None})
    return made.getvalue()
