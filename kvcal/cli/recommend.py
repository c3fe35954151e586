"""`kvcal recommend`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvcal.cli.output import command_line, line, note, on_stdout, print_json, print_rows, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import RecommendOptions
from kvcal.report.quantities import duration, significant

if TYPE_CHECKING:
    from kvcal.commands.results import Recommendation, RecommendedRow
    from kvcal.evaluate.attention_error import ErrorRow
    from kvcal.evaluate.key_outliers import HeadOutlier


@command(RecommendOptions, spread=True)
def recommend(o: RecommendOptions, typed: Typed) -> None:
    """Measure a ladder of schemes on a model, choose one and write its bundle.

    Measured are key outliers, KL on held-out text and attention errors; docs/guides/recommend.md says how it is chosen.
    """
    from kvcal.commands.recommend import run_recommend

    result = run_recommend(o, note)
    if o.json:
        print_json(result)
        return
    print_rows(
        ["scheme", "bits_per_value", "times_smaller", "kl", "forecast_kl", "learned", "kernel"],
        _rows(result),
        names={"learned": "fitted"},
        wide=o.wide,
    )
    with on_stdout():
        for words in _foot(result):
            wrapped(words, wide=o.wide)
        command_line(shlex.split(_chosen(result)["command"]), before="the same bundle: ", wide=o.wide)
        line(f"next: {result['next']}")


def _chosen(result: Recommendation) -> RecommendedRow:
    return next(row for row in result["rows"] if row["scheme"] == result["chosen"])


def _rows(result: Recommendation) -> Iterator[Mapping[str, object]]:
    """Full precision, and the ladder with the first two marked."""
    yield {"scheme": "fp16", "bits_per_value": 16.0, "times_smaller": 1.0, "kl": 0.0}
    marks = {result["runner_up"]: "2nd ", result["chosen"]: "1st "}
    for row in result["rows"]:
        yield row | {"scheme": marks.get(row["scheme"], "") + row["scheme"]}


def _foot(result: Recommendation) -> Iterator[str]:
    """What was chosen and why, what it was measured on, where it is."""
    rows: dict[str | None, RecommendedRow] = {row["scheme"]: row for row in result["rows"]}
    chosen, second, naive = (rows.get(result[name]) for name in ("chosen", "runner_up", "instead_of"))
    assert chosen is not None
    yield ""
    most_bits, most_kl = f"{result['max_bits'] or 0:g} bits/value or less", f"KL {result['max_kl'] or 0:g} or less"
    limit = most_kl if result["max_bits"] is None else most_bits
    best = "fewest bits" if result["max_bits"] is None else "smallest KL"
    yield f"chosen: {chosen['scheme']}, {best} of {limit} among those measured"
    for name, row in (("it has", chosen), ("runner-up", second), ("instead of", naive)):
        if row is not None and row["kl"] is not None and (row is not chosen or name == "it has"):
            error = "" if row["kl_se"] is None else f" ± {row['kl_se']:.1g}"
            scheme = "" if row is chosen else f"{row['scheme']}, "
            bits = significant(row["bits_per_value"])
            yield f"{name}: {scheme}KL {significant(row['kl'])}{error} at {bits} bits/value"
    if result["holdout_windows"] < 2:
        yield "one window was held out: its KL has no spread; give --holdout 2 or more"
    yield from _outliers(result["outliers"])
    yield from _worst(result["attention_errors"][result["chosen"]])
    for scheme, why in result["left_out"].items():
        yield f"left out: {scheme}: {why}"
    yield f"measured in {duration(result['seconds'])} on {result['device']}"
    yield f"written: {result['bundle']}"


def _outliers(rows: list[HeadOutlier]) -> Iterator[str]:
    worst = max(rows, key=lambda row: row["ratio"])
    many = sum(row["ratio"] >= 10 for row in rows)
    yield f"key outliers: {many} of {len(rows)} heads have a channel 10 times the median or more;"
    yield f"  the largest: {worst['ratio']:.0f} times, layer {worst['layer']}, head {worst['head']}"


def _worst(rows: list[ErrorRow] | None) -> Iterator[str]:
    """The head whose attention outputs err most."""
    heads = [(error, row["layer"], head) for row in rows or [] for head, error in enumerate(row["output_head_errors"])]
    if heads:
        error, layer, head = max(heads)
        yield f"attention error: {error:.1%} at most, layer {layer}, head {head}"
