"""`kvcal recommend`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcal.cli.output import line, note, on_stdout, print_json, print_table
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import RecommendOptions


@command(RecommendOptions)
def recommend(o: RecommendOptions, typed: Typed) -> None:
    """Measure a ladder of schemes on a model, choose one and write its bundle.

    Measured are key outliers, KL on held-out text and attention errors; docs/guides/recommend.md says how it is chosen.
    """
    from kvcal.commands.recommend import run_recommend

    result = run_recommend(o, note)
    if o.json:
        print_json(result)
        return
    print_table(["scheme", "bits", "x smaller", "KL", "forecast", "fitted", "kernel"], _cells(result))
    with on_stdout():
        for words in _foot(result):
            line(words)


def _cells(result: dict[str, Any]) -> Iterator[list[Any]]:
    marks = {result["runner_up"]: "2nd ", result["chosen"]: "1st "}
    for row in result["rows"]:
        yield [
            marks.get(row["scheme"], "") + row["scheme"],
            f"{row['bits_per_value']:.2f}",
            f"{row['times_smaller']:.1f}",
            _number(row["kl"]),
            _number(row["forecast_kl"]),
            "yes" if row["learned"] else "no",
            "yes" if row["kernel"] else "no",
        ]


def _number(kl: float | None) -> str | None:
    return None if kl is None else f"{kl:.3g}"


def _foot(result: dict[str, Any]) -> Iterator[str]:
    """Lines of at most 80 columns, except for commands and paths."""
    rows = {row["scheme"]: row for row in result["rows"]}
    chosen, second, naive = (rows.get(result[name]) for name in ("chosen", "runner_up", "instead_of"))
    assert chosen is not None
    yield ""
    limit = f"KL {result['max_kl']:g} or less" if result["max_bits"] is None else f"{result['max_bits']:g} bits or less"
    best = "fewest bits" if result["max_bits"] is None else "smallest KL"
    yield f"chosen: {chosen['scheme']}, {best} of {limit} among those measured"
    for name, row in (("it has", chosen), ("runner-up", second), ("instead of", naive)):
        if row is not None and (row is not chosen or name == "it has"):
            error = "" if row["kl_se"] is None else f" ± {row['kl_se']:.1g}"
            scheme = "" if row is chosen else f"{row['scheme']}, "
            yield f"{name}: {scheme}KL {_number(row['kl'])}{error} at {row['bits_per_value']:.2f} bits"
    yield from _outliers(result["outliers"])
    yield from _worst(result["attention_errors"][result["chosen"]])
    for scheme, why in result["left_out"].items():
        yield f"left out: {scheme}: {why}"
    yield f"measured in {_duration(result['seconds'])} on {result['device']}"
    yield f"the same bundle: {chosen['command']}"
    yield f"written: {result['bundle']}"
    yield f"next: {result['next']}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _outliers(rows: list[dict[str, Any]]) -> Iterator[str]:
    worst = max(rows, key=lambda row: row["ratio"])
    many = sum(row["ratio"] >= 10 for row in rows)
    yield f"key outliers: {many} of {len(rows)} heads have a channel 10 times the median or more;"
    yield f"  the largest: {worst['ratio']:.0f} times, layer {worst['layer']}, head {worst['head']}"


def _worst(rows: list[dict[str, Any]] | None) -> Iterator[str]:
    """The head whose attention outputs err most."""
    heads = [(error, row["layer"], head) for row in rows or [] for head, error in enumerate(row["output_head_errors"])]
    if heads:
        error, layer, head = max(heads)
        yield f"attention error: {error:.1%} at most, layer {layer}, head {head}"
