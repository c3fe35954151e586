"""The page of `kvcal report`: one HTML file with everything in it, which asks the network for nothing.

What it shows comes from files that anybody may have written: every name is escaped, every number is checked before it
comes here (kvcal.report.result_file).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bundle_section import BundleFigures, bundle_section
from .colours import Shades, shades
from .html import figure, heat, heat_by_log, listed, section, table, wide
from .plots import needle_table
from .quantities import percent, size
from .svg import Chart, Interval, Series, intervals, legend, text

LENGTHS = [1024 * 2**power for power in range(8)]  # tokens, of memory against length

STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1c2126; --soft: #57606a; --line: #d3d9df; --panel: #f5f7f9;
  --link: #0b62b8; }
@media (prefers-color-scheme: dark) { :root { --back: #14181c; --ink: #e4e8ec; --soft: #a3adb8; --line: #3a424b;
  --panel: #1d2329; --link: #6cb2ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
p, li { color: var(--soft); overflow-wrap: anywhere; } a { color: var(--link); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--panel); }
svg { width: 100%; min-width: 34rem; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.axis { stroke: var(--soft); fill: none; } .grid { stroke: var(--line); fill: none; stroke-width: .6; }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .dot { fill: var(--c); } .key { background: var(--c); }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .85rem; }
.legend li { color: var(--ink); } .key { display: inline-block; width: .9rem; height: .9rem; border-radius: 50%;
  margin-right: .4rem; vertical-align: -.1rem; }
.series { --c: var(--light); } .dashed { border-radius: 0; }
@media (prefers-color-scheme: dark) { .series { --c: var(--dark); } }
td.words { text-align: left; white-space: normal; min-width: 14rem; }
td.heat { color: #000; text-align: center; border: 1px solid var(--back); }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
"""


@dataclass(frozen=True)
class Heads:
    """Errors |x - decoded|^2 / |x|^2 of one row: by layer and kv head, keys and values; None of layers left alone."""

    name: str
    key: Sequence[Sequence[float] | None]
    value: Sequence[Sequence[float] | None]


@dataclass(frozen=True)
class Speed:
    """One time of `kvcal bench`. share: the time in which the device copies as many bytes as the operation must move,
    over the operation's. faster: FP16's time over it. projected: computed for the device, not measured on it.
    """

    operation: str
    scheme: str
    model: str
    device: str
    batch: int
    length: int
    microseconds: float
    share: float | None
    faster: float | None
    projected: bool


@dataclass(frozen=True)
class Report:
    """What a page of an evaluation shows. title: what was measured. facts: names and values below it. rows: those
    of `kvcal eval --json`, full precision first. front: names of rows that no other beats. heads: errors by layer and
    head. memory: by row, tokens and bytes. speeds: in the order of their files. bundles: what each bundle's file holds.
    """

    title: str
    facts: Mapping[str, object]
    rows: Sequence[Mapping[str, Any]] = ()
    front: frozenset[str] = frozenset()
    heads: Sequence[Heads] = ()
    memory: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    speeds: Sequence[Speed] = ()
    bundles: Sequence[BundleFigures] = ()

    @property
    def shades(self) -> dict[str, Shades]:
        """The colour of each row, the same in every chart."""
        return shades(str(row["name"]) for row in self.rows)

    @property
    def compressed(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["name"] != "full"]


def page(report: Report) -> str:
    """The whole HTML document."""
    sections = [
        _figures(report),
        _quality(report),
        _positions(report),
        *map(bundle_section, report.bundles),
        _heads(report),
        _needles(report),
        _tasks(report),
        _memory(report),
        _speeds(report),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{text(report.title)}</h1>\n{listed(report.facts)}\n{body}\n</main>\n</body>\n</html>\n"
    )


def _figures(report: Report) -> str:
    if not report.rows:
        return ""
    columns = ["name", "bits per value", "KL", "±", "median", "99 %", "max", "same top", "× smaller", "perplexity"]
    rows = [
        [
            text(row["name"]),
            figure(row["bits_per_value"], "{:.3f}"),
            figure(row["kl"], "{:.5f}"),
            figure(row.get("kl_se"), "{:.5f}"),
            *(figure(row.get(name), "{:.5f}") for name in ("kl_median", "kl_p99", "kl_max")),
            figure(row.get("same_top"), "{:.2%}"),
            figure(row.get("smaller"), "{:.2f}"),
            figure(row.get("perplexity"), "{:.4f}"),
        ]
        for row in report.rows
    ]
    words = (
        "KL is the divergence of next-token distributions from those of full precision, in nats per token, with its "
        "standard error over windows. Which rows are apart follows from their paired differences, which "
        "<code>kvcal compare --wide</code> prints."
    )
    return section("Figures", words, table("Figures", columns, rows))


def _quality(report: Report) -> str:
    rows = [row for row in report.compressed if row["bits_per_value"] is not None and row["kl"] > 0]
    if not rows:
        return ""
    colours = report.shades
    points = [
        Series(row["name"], [(row["bits_per_value"], row["kl"], row.get("kl_se"))], False, colours[row["name"]])
        for row in rows
    ]
    best = sorted((row["bits_per_value"], row["kl"], None) for row in rows if row["name"] in report.front)
    labels = ("stored bits per value", "KL, nats per token")
    chart = Chart.of("KL against stored bits", labels, [Series("front", best), *points], (False, True))
    words = "Lower and further left is better. The line joins rows that no other row beats."
    return section("Quality against bits", words, wide("chart of quality against bits", chart), legend(points))


def _positions(report: Report) -> str:
    rows = [row for row in report.compressed if row.get("positions")]
    if not rows:
        return ""
    colours = report.shades
    series = [
        Series(
            row["name"],
            [((one["first"] + one["last"]) / 2 + 1, one["kl"], one["kl_se"]) for one in row["positions"]],
            True,
            colours[row["name"]],
        )
        for row in rows
    ]
    chart = Chart.of("KL by position", ("position in the window, tokens", "KL, nats per token"), series, (True, True))
    words = "Mean KL of buckets of positions, each at its middle. Tokens that see no packed block have none."
    return section("KL by position", words, wide("chart of KL by position", chart), legend(series))


def _heads(report: Report) -> str:
    parts = []
    for one in report.heads:
        for role, rows in (("keys", one.key), ("values", one.value)):
            errors = [x for row in rows if row for x in row if x > 0]
            if not errors:
                continue
            cell, heads = heat_by_log(errors), max(len(row) for row in rows if row)
            cells = [
                [str(layer), *([cell(x) for x in row] if row else ["–"] * heads)] for layer, row in enumerate(rows)
            ]
            label = f"{one.name}: {role}"
            columns = ["layer", *(f"head {head}" for head in range(heads))]
            parts.append(f"<div><h3>{text(label)}</h3>{table(label, columns, cells)}</div>")
    if not parts:
        return ""
    words = (
        "Squared error over squared size of packed tokens, by layer and kv head. A bundle's own are of the text that "
        "was held out when it was fitted."
    )
    return section("Error by layer and head", words, '<div class="panels">', *parts, "</div>")


def _needles(report: Report) -> str:
    rows = [row for row in report.rows if row.get("needles")]
    parts = []
    for row in rows:
        lengths, depths, shares_by_depth = needle_table(row["needles"])
        columns = ["depth", *(f"{length:,}" for length in lengths)]
        cells = [
            [f"{depth:.0%}", *(heat(1 - share, f"{share:.0%}") for share in shares)]
            for depth, shares in zip(depths, shares_by_depth, strict=True)
        ]
        label = f"needles, {row['name']}"
        parts.append(f"<div><h3>{text(row['name'])}</h3>{table(label, columns, cells)}</div>")
    if not parts:
        return ""
    words = "Share of needles found, by depth in the context (down) and its length in tokens (across)."
    return section("Needle map", words, '<div class="panels">', *parts, "</div>")


def _tasks(report: Report) -> str:
    pairs = [(row["name"], name, one) for row in report.compressed for name, one in row.get("tasks", {}).items()]
    pairs.sort(key=lambda pair: _by_length(pair[1]))  # the rows of a task beside each other, as they come
    if not pairs:
        return ""
    colours = report.shades
    series = {row: Series(row, [], False, colours[row]) for row, _, _ in pairs}
    bars = [Interval(task, series[row], one["low"], one["difference"], one["high"]) for row, task, one in pairs]
    columns = ["task", "name", "score", "full precision", "difference", "from", "to", "questions", "packed"]
    cells = [
        [
            text(task),
            text(row),
            *(figure(one[name], "{:.4f}") for name in ("score", "full", "difference", "low", "high")),
            str(one["n"]),
            "–" if (share := one.get("packed")) is None else percent(share),
        ]
        for row, task, one in pairs
    ]
    words = "Difference to full precision on the same questions, with its interval of 95 %."
    chart = intervals("Task scores less full precision", "difference of the score", bars)
    parts = (wide("chart of task scores", chart), legend(list(series.values())), table("Tasks", columns, cells))
    return section("Tasks", words, *parts)


def _by_length(task: str) -> tuple[str, int]:
    """A task's name and its length, of names such as needle@4096."""
    name, _, length = task.partition("@")
    return (name, int(length)) if length.isdecimal() else (task, 0)


def _memory(report: Report) -> str:
    if not report.memory:
        return ""
    colours = report.shades
    series = [
        Series(name, [(length, nbytes, None) for length, nbytes in points], True, colours[name])
        for name, points in report.memory.items()
    ]
    chart = Chart.of("Memory against length", ("tokens", "size of one sequence"), series, (True, True), size)
    longest = LENGTHS[-1]
    sizes = ", ".join(f"{text(name)} {size(points[-1][1])}" for name, points in report.memory.items())
    words = (
        "Packed blocks, windows and constants. Projected from the measured window at each row's stored bits per "
        f"value. At {longest:,} tokens: {sizes}."
    )
    return section("Memory against length", words, wide("chart of memory", chart), legend(series))


def _speeds(report: Report) -> str:
    if not report.speeds:
        return ""
    columns = ["operation", "scheme", "model", "rows", "tokens", "µs", "share of the limit", "× FP16", "device"]
    cells = [
        [
            text(one.operation),
            text(one.scheme),
            text(one.model),
            f"{one.batch:,}",
            f"{one.length:,}",
            f"{one.microseconds:,.1f}",
            heat(None if one.share is None else 1 - one.share, figure(one.share, "{:.0%}")),
            figure(one.faster, "{:.2f}"),
            text(f"{one.device}, projected" if one.projected else one.device),
        ]
        for one in report.speeds
    ]
    words = (
        "Medians of <code>kvcal bench</code>. The limit is memory: the time in which the device copies as many bytes as the "
        "operation must move. × FP16: how many times as fast as the best FP16 attention of the same run."
    )
    return section("Speed", words, table("Speed", columns, cells))
