"""Plots as PNG, drawn whole and then written whole. matplotlib is imported only when a plot is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import write_atomically
from kvcal_artifacts.shown import shown

from .extras import require
from .outputs import check_output
from .png import png

Rows = Sequence[Sequence[float] | None]
LEAST_SHOWN = 1e-7  # an exact codec's error of 0 has no logarithm


def drawable(text: object) -> str:
    """Text as matplotlib draws it: no formula between dollars, no control characters."""
    return shown(text).replace("$", r"\$")


def check_plot(path: Path) -> None:
    """Check before any work that a plot can be drawn and written there."""
    require("matplotlib", "--plot", "leave it out")
    if path.suffix != ".png":
        raise UsageError(f"--plot {path}: must end in .png")
    check_output(path, "--plot")


def plot_deviation(table: dict[str, Any], sources: dict[str, str], title: str, path: Path) -> None:
    """Deviation of queries against the rank of the subspace (SQuat Figures 2 and 6): mean, first, middle and last
    layer.

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
            axis.plot(table["ranks"], values, marker="o", markersize=3, label=drawable(sources[source]))
        axis.set(title=name, xlabel="rank of the subspace", ylim=(0, 1))
    axes[0].set_ylabel("deviation of queries")
    figure.legend(*axes[0].get_legend_handles_labels(), title="subspace of", loc="outside right center")
    figure.suptitle(drawable(title))
    write_atomically(path, png(figure, 150), "--plot")


def plot_quality(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """KL against stored bits of rows as `kvcal compare` gives them, those on the front joined by a line."""
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row["bits_per_value"] is not None and row["kl"] > 0]
    front = [row for row in drawn if row["front"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    axis.scatter([row["bits_per_value"] for row in drawn], [row["kl"] for row in drawn], s=18)
    axis.plot([row["bits_per_value"] for row in front], [row["kl"] for row in front], linewidth=1, label="Pareto front")
    for row in drawn:
        axis.annotate(
            drawable(row["name"]),
            (row["bits_per_value"], row["kl"]),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=7,
        )
    axis.set(
        title=drawable(title), xlabel="stored bits a value", ylabel="KL to full precision (nats a token)", yscale="log"
    )
    axis.legend()
    write_atomically(path, png(figure, 150), "--plot")


QUANTISERS = {1: 0.75, 2: 0.89}  # bits -> variance that they "usually explain", AQUA-KV section 3.1


def plot_probes(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Explained variance (AQUA-KV Figures 2, 4 and 5): above the means, for keys and for values; below, layer by layer.

    rows: as kvcal.evaluate.probe.table gives them.
    """
    from matplotlib.figure import Figure

    roles = [role for role in ("k", "v") if any(row["target"] == role for row in rows)]
    figure = Figure(figsize=(6.4 * len(roles), 8.6), layout="constrained")
    axes = figure.subplots(2, len(roles), squeeze=False)
    for (bars, lines), role in zip(axes.T, roles, strict=True):
        _probe_panels(bars, lines, role, [row for row in rows if row["target"] == role])
    figure.suptitle(f"{drawable(title)}: explained variance of linear probes, held-out windows")
    write_atomically(path, png(figure, 150), "--plot")


def _probe_panels(bars: Any, lines: Any, role: str, rows: list[dict[str, Any]]) -> None:
    common = all(row["mean_common"] is not None for row in rows)
    values = [row["mean_common"] if common else row["mean"] or 0.0 for row in rows]
    names = [" + ".join(_told(name) for name in row["inputs"]) for row in rows]
    bars.barh(range(len(rows)), values, color="#1f5fa8")
    for place, value in enumerate(values):
        bars.text(max(value, 0) + 0.01, place, f"{value:.2f}", va="center", fontsize=8)
    bars.set_yticks(range(len(rows)), names, fontsize=8)
    bars.set_ylim(len(rows) - 0.4, -1.4)  # the first on top
    least = max(-1.0, min(0.0, *values))
    what = {"k": "keys", "v": "values"}[role]
    bars.set(xlim=(least, 1.08), xlabel=f"{what} from …, mean of {'the same' if common else 'all their'} layers")
    for bits, explained in QUANTISERS.items():
        bars.axvline(explained, color="#9aa5b1", linestyle=":", linewidth=1)
        bars.text(explained, -0.9, f" {bits} bits" if bits > 1 else " 1 bit", fontsize=7, color="#6b7783")
    for name, row in zip(names, rows, strict=True):
        if len(row["inputs"]) == 1 or len(rows) <= 8:
            places = [n for n, score in enumerate(row["layers"]) if score is not None]
            lines.plot(places, [row["layers"][n] for n in places], marker="o", markersize=3, label=name)
    lines.set(xlabel="layer", ylabel=f"explained variance of {what}", ylim=(least, 1))
    lines.legend(fontsize=7, frameon=False)
    lines.grid(alpha=0.25)


def _told(name: str) -> str:
    """An input of a probe as the paper writes it: k1 -> K L−1, v0 -> V, k0t2 -> K T−2."""
    role, below, before = name[0].upper(), name[1], name[3:]
    return role + (f" L−{below}" if below != "0" else "") + (f" T−{before}" if before else "")


def plot_bench(rows: list[dict[str, Any]], path: Path) -> None:
    """Times of `kvcal bench` against cached tokens, a panel an operation, a line a scheme and batch; projected ones
    dashed.

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
        of_operation = [row for row in timed if row["operation"] == name]
        reference = (
            plain if any(row["ratio_to_fp16"] for row in of_operation) and not name.startswith("innerq-table-4") else []
        )
        _bench_lines(axis, reference + of_operation)
        axis.set(title=drawable(name), xlabel="cached tokens", ylabel="µs", xscale="log", yscale="log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=5, frameon=False)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    write_atomically(path, png(figure, 130), "--plot")


def _bench_lines(axis: Any, rows: list[dict[str, Any]]) -> None:
    lines: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["scheme"], row["batch"], row["projected"]), []).append(row)
    for (scheme, batch, projected), line_points in lines.items():
        points = sorted(line_points, key=lambda row: int(row["length"]))
        label = f"{drawable(scheme)}, batch {batch}" + (", projected" if projected else "")
        x = [row["length"] for row in points]
        line = axis.plot(
            x, [row["microseconds"] for row in points], "--" if projected else "-", marker=".", label=label
        )
        paper = [(row["length"], row["paper_microseconds"]) for row in points if "paper_microseconds" in row]
        if paper:
            axis.plot(*zip(*paper, strict=True), "x", color=line[0].get_color(), markersize=4)
    if any("paper_microseconds" in row for row in rows):
        axis.plot([], [], "x", color="grey", markersize=4, label="the paper's figures")


def head_errors_png(key: Rows, value: Rows, title: str) -> bytes:
    """Relative squared error by layer (down) and kv head (across), keys beside values; layers without a row are grey.

    The same numbers give the same bytes.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    heads = max(len(row) for row in (*key, *value) if row)
    tables = {
        name: [[math.nan] * heads if row is None else [max(x, LEAST_SHOWN) for x in row] for row in rows]
        for name, rows in (("keys", key), ("values", value))
    }
    shown = [x for rows in tables.values() for row in rows for x in row if not math.isnan(x)]
    norm = LogNorm(min(shown), max(max(shown), min(shown) * 1.01))
    figure = Figure(figsize=(2.4 + 0.7 * max(heads, 4), 1.6 + 0.26 * max(len(key), 6)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, rows) in zip(axes, tables.items(), strict=True):
        axis.set_facecolor("#d0d4d9")
        picture = axis.imshow(rows, norm=norm, aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set(title=name, xlabel="kv head", xticks=range(heads))
    axes[0].set(ylabel="layer", yticks=range(0, len(key), max(1, len(key) // 16)))
    figure.colorbar(picture, ax=axes, label="|x − decoded|² / |x|²")
    figure.suptitle(drawable(title))
    return png(figure, 120)
