"""Plots as PNG. matplotlib is imported only when a plot is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import UsageError


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


def plot_bench(rows: list[dict[str, Any]], path: Path) -> None:
    """Times of `kvcal bench` against cached tokens, a panel an operation, a line a scheme and batch; projected ones dashed.

    Of FP16's backends only the best is drawn. Nothing is drawn for rows without a time.
    """
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["microseconds"] is not None]
    timed = [row for row in timed if row["operation"] != "decode-attention" or row["ratio_to_fp16"] in (None, 1)]
    if not timed:
        raise UsageError(f"--plot {path}: no row has a time to draw")
    names = list(dict.fromkeys(row["operation"] for row in timed))
    figure = Figure(figsize=(4.6 * min(3, len(names)), 3.4 * -(-len(names) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(names) // 3), min(3, len(names)), squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        lines: dict[tuple[str, int, bool], list[tuple[int, float]]] = {}
        for row in timed:
            if row["operation"] == name:
                key = (row["scheme"], row["batch"], row["projected"])
                lines.setdefault(key, []).append((row["length"], row["microseconds"]))
        for (scheme, batch, projected), points in lines.items():
            label = f"{scheme}, batch {batch}" + (", projected" if projected else "")
            x, y = zip(*sorted(points), strict=True)
            axis.plot(x, y, "--" if projected else "-", marker="o", markersize=3, label=label)
        axis.set(title=name, xlabel="cached tokens", ylabel="µs", xscale="log", yscale="log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=5, frameon=False)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=130, metadata={"Software": None})
