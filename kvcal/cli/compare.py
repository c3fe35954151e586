"""`kvcal compare`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.evaluate import bits, spread
from kvcal.cli.output import line, note, print_json, print_table
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import CompareOptions


@command(CompareOptions)
def compare(o: CompareOptions, typed: Typed) -> None:
    """Measure many schemes on the same text: presets, bundles, and every pair of key and value codecs.

    After a kill the same command goes on: rows, fitted layers and batches of windows (--batch) that were done are not
    done again.
    """
    from kvcal.commands.compare import run_compare
    from kvcal.commands.workbench import raise_first

    result = run_compare(o, note, typed)
    failed = result["failed"]
    if o.json:
        print_json(result | {"failed": {name: str(error) for name, error in failed.items()}})
    else:
        print_compared(result)
    raise_first(failed)


def print_compared(result: dict[str, Any]) -> None:
    """Rows of a comparison as a table, and the best of them."""
    line(f"full precision: perplexity {result['full_perplexity']:.4f}")
    columns = ["name", "bits/value", "paper's count", "KL", "±", "median", "99 %", "max", "same top"]
    columns += ["logit error", "output error", f"bytes at {result['at_length']}", "× smaller", "front", "perplexity"]
    print_table(columns, map(_cells, result["rows"]))
    if result["max_bits"] is not None:
        line(f"best at no more than {result['max_bits']} bits a value: {result['best'] or 'none'}")
        if result["ties"]:
            line(f"within the spread over windows of it: {', '.join(result['ties'])}")


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        bits(row["bits_per_value"]),
        f"{row['paper_bits']:.3f}",
        f"{row['kl']:.5f}",
        spread(row["kl_se"]),
        *(f"{row[name]:.5f}" for name in ("kl_median", "kl_p99", "kl_max")),
        f"{row['same_top']:.2%}",
        _error(row["logit_error"]),
        _error(row["output_error"]),
        f"{row['bytes_at_length']:,}",
        f"{row['smaller']:.2f}",
        "*" if row["front"] else "",
        f"{row['perplexity']:.4f}",
    ]


def _error(value: float | None) -> str:
    """Evicted tokens have none."""
    return "-" if value is None else f"{value:.4f}"
