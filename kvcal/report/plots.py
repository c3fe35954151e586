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

    Attention has the best FP16 of the run beside it; crosses are a paper's figures. Rows without a time are not drawn.
    """
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["microseconds"] is not None]
    plain = [row for row in timed if row["operation"] == "decode-attention" and row["ratio_to_fp16"] in (None, 1)]
    timed = [row for row in timed if row["operation"] != "decode-attention"]
    names = list(dict.fromkeys(row["operation"] for row in timed))
    if not names:
        raise UsageError(f"--plot {path}: no row has a time to draw")
    wide = min(3, len(names))
    tall = -(-len(names) // wide)
    figure = Figure(figsize=(4.6 * wide, 3.4 * tall), layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        own = [row for row in timed if row["operation"] == name]
        beside = plain if any(row["ratio_to_fp16"] for row in own) and not name.startswith("innerq-table-4") else []
        _bench_lines(axis, beside + own)
        axis.set(title=name, xlabel="cached tokens", ylabel="µs", xscale="log", yscale="log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=5, frameon=False)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _bench_lines(axis: Any, rows: list[dict[str, Any]]) -> None:
    lines: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["scheme"], row["batch"], row["projected"]), []).append(row)
    for (scheme, batch, projected), found in lines.items():
        points = sorted(found, key=lambda row: int(row["length"]))
        label = f"{scheme}, batch {batch}" + (", projected" if projected else "")
        x = [row["length"] for row in points]
        line = axis.plot(
            x, [row["microseconds"] for row in points], "--" if projected else "-", marker=".", label=label
        )
        paper = [(row["length"], row["paper_microseconds"]) for row in points if "paper_microseconds" in row]
        if paper:
            axis.plot(*zip(*paper, strict=True), "x", color=line[0].get_color(), markersize=4)
