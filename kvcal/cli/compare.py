"""`kvcal compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcal.cli.evaluate import FULL, as_lines, unequal_windows, windows_of
from kvcal.cli.output import (
    line,
    note,
    print_json,
    print_next,
    print_open,
    print_rows,
    print_table,
    wrapped,
)
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import CompareOptions
from kvcal.evaluate.spread import difference, few_windows, quantile

if TYPE_CHECKING:
    from kvcal.commands.results import EvaluationRow


@command(CompareOptions, spread=True)
def compare(o: CompareOptions, typed: Typed) -> None:
    """Measure many schemes on the same text: presets, bundles, and every pair of key and value codecs.

    After a kill the same command goes on: rows, fitted layers and batches of windows (--batch) that were done are not
    done again.
    """
    from kvcal.commands.compare import run_compare
    from kvcal.commands.workbench import raise_first
    from kvcal.report.outputs import raise_unwritten

    result = run_compare(o, note, typed)
    failed, unwritten = result["failed"], result["unwritten"]
    if o.json:
        print_json(result | as_lines(failed, unwritten))
    else:
        print_compared(result, o.wide)
        if (files := [path for path in (o.csv, o.plot) if path is not None]) and not unwritten:
            print_open(*files)
        if o.output is not None:
            print_next("report", o.output, "--output", o.output.with_suffix(".html"))
    raise_first(failed, unwritten)
    raise_unwritten(unwritten)


COLUMNS = (
    "name", "windows", "block", "bits_per_value", "paper_bits", "kl", "kl_se", "kl_median", "kl_p99", "kl_max",
    "same_top", "logit_error", "output_error", "bytes_at_length", "smaller", "perplexity",
)  # fmt: skip
ONLY_WIDE = ("windows", "block", "paper_bits", "kl_median", "kl_p99", "kl_max", "logit_error", "output_error")


def print_compared(result: Mapping[str, Any], wide: bool = False) -> None:
    """Rows of a comparison as a table, full precision first, and the best of them."""
    full = _full(result)
    rows = [
        row | _sizes(row, full) | {"name": f"{'*' if row['front'] else ' '} {row['name']}", "windows": windows_of(row)}
        for row in result["rows"]
    ]
    print_rows(COLUMNS, [full, *rows], only_wide=ONLY_WIDE, wide=wide)
    length = f"{result['at_length']:,} tokens, exact ones at 16 bits, predictors and codebooks included"
    cost = "size" if result["against"] == "size" else "bits/value"
    wrapped(f"*: on the Pareto front of KL and {cost}; size: one sequence of {length}", wide=wide)
    if unequal := unequal_windows(result["rows"]):
        wrapped(unequal, wide=wide)
    if result["max_bits"] is not None:
        wrapped(f"best at no more than {result['max_bits']:g} bits/value: {result['best'] or 'none'}", wide=wide)
        if result["ties"]:
            wrapped(f"within the spread over windows of it: {', '.join(result['ties'])}", wide=wide)
    if few := few_windows(result["windows"]):
        wrapped(few, wide=wide)
    if wide:
        _print_pairs(result["rows"])


def _print_pairs(rows: list[EvaluationRow]) -> None:
    """Which pairs of rows are apart: the difference in KL over its standard error, in brackets where it decides
    nothing. Nothing for one row, or one window.
    """
    if len(rows) < 2 or len(rows[0]["kl_windows"]) < 2:
        return
    names, windows = [row["name"] for row in rows], len(rows[0]["kl_windows"])
    line()
    print_table(
        ["KL less that of", *names],
        [[first["name"], *(_pair(first, second) for second in rows)] for first in rows],
        wide=True,
    )
    wrapped(
        f"difference over its standard error, paired over {windows} windows; in brackets up to "
        f"{quantile(windows):.3g}: not apart at 95 %",
        wide=True,
    )


def _pair(first: EvaluationRow, second: EvaluationRow) -> str:
    gap = difference(first, second)
    if gap is None or first is second:
        return "-"
    signed = f"{math.copysign(gap.ratio, gap.mean):+.3g}"
    return signed if gap.apart else f"({signed})"


def _sizes(row: EvaluationRow, full: EvaluationRow) -> dict[str, object]:
    """Size and ratio with exact tokens at 16 bits a number, as full precision's; a result file of before has no such
    size.
    """
    size = row.get("bytes_at_length_16_bit", row["bytes_at_length"])
    return {"bytes_at_length": size, "smaller": full["bytes_at_length"] / size if size else row["smaller"]}


def _full(result: Mapping[str, Any]) -> EvaluationRow:
    """The row of full precision, whose cache is counted at 16 bits per value."""
    first = result["rows"][0]
    return {
        "name": f"  {FULL}",
        "bits_per_value": 16.0,
        "paper_bits": 16.0,
        "kl": 0.0,
        "same_top": 1.0,
        "bytes_at_length": first["bytes_at_16_bit"] * result["at_length"] // result["length"],
        "smaller": 1.0,
        "perplexity": result["full_perplexity"],
    }
