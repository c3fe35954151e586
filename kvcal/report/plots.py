"""Plots as PNG. matplotlib is imported only when a plot is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import UsageError

from ..fit import check_output


def check_plot(path: Path) -> None:
    """Before any work: whether a plot can be drawn and written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: install kvcal again")
    if path.suffix != ".png":
        raise UsageError(f"--plot {path}: must end in .png")
    check_output(path, "--plot")


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


def plot_quality(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """KL against stored bits of rows as `kvcal compare` gives them, those on the front joined by a line."""
    from matplotlib.figure import Figure

    seen = [row for row in rows if row["bits_per_value"] is not None and row["kl"] > 0]
    front = [row for row in seen if row["front"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    axis.scatter([row["bits_per_value"] for row in seen], [row["kl"] for row in seen], s=18)
    axis.plot([row["bits_per_value"] for row in front], [row["kl"] for row in front], linewidth=1, label="Pareto front")
    for row in seen:
        axis.annotate(
            row["name"], (row["bits_per_value"], row["kl"]), xytext=(3, 3), textcoords="offset points", fontsize=7
        )
    axis.set(title=title, xlabel="stored bits a value", ylabel="KL to full precision (nats a token)", yscale="log")
    axis.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})  # same numbers, same bytes
