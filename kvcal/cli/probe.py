"""`kvcal probe`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.output import line, note, print_facts, print_json, print_open, print_table
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import ProbeOptions


@command(ProbeOptions)
def probe(o: ProbeOptions, typed: Typed) -> None:
    """Measure how well keys and values are predicted by other layers, other tokens and each other (AQUA-KV section
    3.1).

    After a kill the same command goes on behind the last layer that was done.
    """
    from kvcal.commands.probe import run_probe
    from kvcal.report.outputs import raise_unwritten

    result = run_probe(o, note)
    if o.json:
        print_json(result | {"unwritten": [*map(str, result["unwritten"])]})
    else:
        _print(o, result)
    raise_unwritten(result["unwritten"])


def _print(o: ProbeOptions, result: dict[str, Any]) -> None:
    """A table of the probes, and what they were measured on."""
    rows = result["rows"]
    columns = ["target", "from", "mean", "same layers", *result["layer_numbers"]]
    shown = [
        [row["target"], " + ".join(row["inputs"]), *map(_cell, [row["mean"], row["mean_common"], *row["layers"]])]
        for row in rows
    ]
    title = "explained variance: means, and by layer"
    print_table([str(column) for column in columns], shown, title=title, keys=2, wide=o.wide)
    skipped = ("rows", "probes", "phases", "layer_numbers", "unwritten")
    line()
    print_facts({name: value for name, value in result.items() if name not in skipped}, wide=o.wide)
    if (files := [path for path in (o.csv, o.plot) if path is not None]) and not result["unwritten"]:
        print_open(*files)


def _cell(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
