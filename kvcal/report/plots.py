"""Plots as PNG, SVG or PDF, drawn whole and then written whole. matplotlib is imported only when a plot is asked
for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import write_atomically

from .colours import colour
from .costs import BITS, Cost
from .drawn import SUFFIXES, as_file, drawable, png
from .extras import require
from .labels import label_points, side_by_side
from .outputs import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Sequence[float] | None]
Bar = tuple[float, float]  # low and high end of an error bar
LONG_TITLE = 30  # letters that fit above the narrowest figure
LEAST_SHOWN = 1e-7  # an exact codec's error of 0 has no logarithm


def check_plot(path: Path, option: str = "--plot") -> None:
    """Check before any work that a plot can be drawn and written there; raises UsageError. option: that names it."""
    require("matplotlib", option, "leave it out")
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{option} {path}: must end in {', '.join(SUFFIXES)}")
    check_output(path, option)


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
    write_atomically(path, as_file(figure, path), "--plot")


def plot_quality(rows: list[dict[str, Any]], title: str, path: Path, cost: Cost = BITS) -> None:
    """KL against stored bits, or another cost, of rows as `kvcal compare` gives them. Bars are two standard errors over
    windows, where there are several. Rows on the front are joined by a line. Rows of one cost that would lie on each
    other stand side by side.

    title: names model, text, windows, machine and date.
    """
    drawn = [row for row in rows if row["bits_per_value"] is not None and row["kl"] > 0]
    places, kls, bars = [cost.of(row) for row in drawn], [row["kl"] for row in drawn], [_bar(row) for row in drawn]
    axis = _quality_axis(drawn, places, bars, cost.label)
    axis.set_title(drawable(title), fontsize=9.5, wrap=True)
    apart = side_by_side(axis, list(zip(places, kls, strict=True)), bars)
    if apart != places:
        limits = axis.get_xlim(), axis.get_ylim()
        axis = _quality_axis(drawn, apart, bars, f"{cost.label} (rows of one place stand side by side)")
        axis.set_title(drawable(title), fontsize=9.5, wrap=True)
        axis.set(xlim=limits[0], ylim=limits[1])
    label_points(axis, list(zip(apart, kls, strict=True)), [row["name"] for row in drawn], bars=bars)
    figure = axis.get_figure(root=True)
    assert figure is not None
    write_atomically(path, as_file(figure, path), "--plot")


def _quality_axis(rows: list[dict[str, Any]], places: list[float], bars: list[Bar], label: str) -> Axes:
    """Axes of a separate figure with the front, bars and dots of rows at these places."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=100)
    axis = figure.subplots()
    axis.set(xlabel=label, ylabel="KL to full precision (nats per token)", yscale="log")
    front = [(x, row["kl"]) for x, row in zip(places, rows, strict=True) if row["front"]]
    if len(front) > 1:
        axis.plot(*zip(*sorted(front), strict=True), linewidth=1, color="#9aa5b1", label="Pareto front", zorder=2)
    has_bars = _draw_spread(axis, rows, places, bars)
    if len(front) > 1 or has_bars:
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    if rows:
        kls, colours = [row["kl"] for row in rows], [colour(row["name"]) for row in rows]
        axis.scatter(places, kls, s=26, c=colours, zorder=3)
        axis.margins(x=0.12, y=0.12)
    axis.grid(alpha=0.25)
    _plain_ticks(axis)
    return axis


def _bar(row: Mapping[str, Any]) -> Bar:
    """Ends of a bar of two standard errors of the row's KL; both its KL where it has no spread, being of one window."""
    kl, spread = row["kl"], 2 * (row.get("kl_se") or 0.0)
    return kl - min(spread, 0.95 * kl), kl + spread  # a logarithm has no zero


def _draw_spread(axis: Axes, rows: list[dict[str, Any]], places: list[float], bars: list[Bar]) -> bool:
    """Draw the bars; False where no row has any."""
    kl = [row["kl"] for row in rows]
    if all(low == high for low, high in bars):
        return False
    ends = [
        [x - low for x, (low, _) in zip(kl, bars, strict=True)],
        [high - x for x, (_, high) in zip(kl, bars, strict=True)],
    ]
    style: dict[str, Any] = {"fmt": "none", "ecolor": "#6b7783", "elinewidth": 1, "capsize": 2, "zorder": 1}
    axis.errorbar(places, kl, yerr=ends, label="± 2 standard errors; overlapping bars decide nothing", **style)
    return True


def _plain_ticks(axis: Axes) -> None:
    """Numbers on a logarithmic axis, as 0.02, in steps of 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 8 * low else MaxNLocator(6))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


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
    figure.suptitle(f"Explained variance of linear probes, held-out windows; {drawable(title)}", fontsize=11)
    write_atomically(path, as_file(figure, path), "--plot")


def _probe_panels(bars: Axes, lines: Axes, role: str, rows: list[dict[str, Any]]) -> None:
    common = all(row["mean_common"] is not None for row in rows)
    values = [row["mean_common"] if common else row["mean"] or 0.0 for row in rows]
    names = [" + ".join(_input_label(name) for name in row["inputs"]) for row in rows]
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


def _input_label(name: str) -> str:
    """An input of a probe as the paper writes it: k1 -> K L−1, v0 -> V, k0t2 -> K T−2."""
    role, below, before = name[0].upper(), name[1], name[3:]
    return role + (f" L−{below}" if below != "0" else "") + (f" T−{before}" if before else "")


def plot_bench(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Times of `kvcal bench` against cached tokens, a panel an operation, a line a scheme and batch; projected ones
    dashed.

    Attention has the best FP16 of the run next to it; crosses are a paper's figures. Rows without a time are not drawn.
    title: names model, machine and date.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    timed = [row for row in rows if row["microseconds"] is not None]
    plain = [row for row in timed if row["operation"] == "decode-attention" and row["ratio_to_fp16"] in (None, 1)]
    timed = [row for row in timed if row["operation"] != "decode-attention"]
    names = list(dict.fromkeys(row["operation"] for row in timed))
    if not names:
        raise UsageError(f"--plot {path}: no row has a time to draw")
    wide = min(3, len(names))
    tall = -(-len(names) // wide)
    figure = Figure(figsize=(6.4 * wide, 3.6 * tall), layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        of_operation = [row for row in timed if row["operation"] == name]
        reference = (
            plain if any(row["ratio_to_fp16"] for row in of_operation) and not name.startswith("innerq-table-4") else []
        )
        _bench_lines(axis, reference + of_operation)
        axis.set(title=drawable(name), xlabel="cached tokens", ylabel="µs", xscale="log", yscale="log")
        lengths = sorted({row["length"] for row in of_operation})
        axis.set_xticks(lengths[:: -(-len(lengths) // 8)], minor=False)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        _plain_ticks(axis)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=6.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    figure.suptitle(drawable(title), fontsize=9.5)
    write_atomically(path, as_file(figure, path), "--plot")


MARKERS = ["o", "s", "^", "D", "v", "P"]  # of batches, smallest first


def _bench_lines(axis: Axes, rows: list[dict[str, Any]]) -> None:
    lines: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["scheme"], row["batch"], row["projected"]), []).append(row)
    batches = sorted({batch for _, batch, _ in lines})
    markers = MARKERS * len(batches)
    for (scheme, batch, projected), line_points in lines.items():
        points = sorted(line_points, key=lambda row: int(row["length"]))
        label = f"{drawable(scheme)}, batch {batch}" + (", projected" if projected else "")
        x = [row["length"] for row in points]
        line = axis.plot(
            x,
            [row["microseconds"] for row in points],
            "--" if projected else "-",
            marker=markers[batches.index(batch)],
            label=label,
            color=colour(scheme),
            markersize=4,
        )
        paper = [(row["length"], row["paper_microseconds"]) for row in points if "paper_microseconds" in row]
        if paper:
            axis.plot(*zip(*paper, strict=True), "x", color=line[0].get_color(), markersize=4)
    if any("paper_microseconds" in row for row in rows):
        axis.plot([], [], "x", color="grey", markersize=4, label="the paper's figures")


def head_errors_png(key: Rows, value: Rows, title: str) -> bytes:
    """`head_errors_figure` as a PNG. The same numbers give the same bytes."""
    return png(head_errors_figure(key, value, title), 120)


def head_errors_figure(key: Rows, value: Rows, title: str) -> Figure:
    """Relative squared error by layer (down) and kv head (across), keys next to values; layers without a row are
    grey."""
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
    figure.suptitle(drawable(title), fontsize=9 if len(title) > LONG_TITLE else None, wrap=True)
    return figure


def needle_table(scores: Mapping[str, float]) -> tuple[list[int], list[float], list[list[float]]]:
    """Scores by needle@LENGTH/DEPTH -> lengths, depths, and a row of scores a depth; names of other tasks are left
    out.
    """
    places = {name: name.removeprefix("needle@").split("/") for name in scores if name.startswith("needle@")}
    by_place = {(int(length), float(depth)): scores[name] for name, (length, depth) in places.items()}
    lengths, depths = (sorted(set(axis)) for axis in zip(*by_place, strict=True))
    return lengths, depths, [[by_place[length, depth] for length in lengths] for depth in depths]


def plot_needle_maps(maps: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """A panel a row: share of needles found, by length of the context (across) and depth of the needle (down)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 2.4 * len(maps), 3.4), layout="constrained")
    axes = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for axis, (name, scores) in zip(axes, maps.items(), strict=True):
        lengths, depths, table = needle_table(scores)
        picture = axis.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", interpolation="nearest")
        for y, row in enumerate(table):
            for x, share in enumerate(row):
                axis.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7)
        axis.set(title=drawable(name), xlabel="context, tokens")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    axes[0].set_ylabel("depth of the needle")
    figure.colorbar(picture, ax=axes, label="found")
    figure.suptitle(drawable(title), fontsize=9.5, wrap=True)
    write_atomically(path, as_file(figure, path), "--needle-plot")
