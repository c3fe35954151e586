"""`kvcal compare`."""

from __future__ import annotations

from kvcal.cli.options import Typed, command
from kvcal.cli.output import line, note, print_json, print_table
from kvcal.commands.options import CompareOptions


@command(CompareOptions)
def compare(o: CompareOptions, typed: Typed) -> None:
    """Measure many schemes on the same text: presets, bundles, and every pair of key and value codecs.

    After a kill the same command goes on: rows, fitted layers and batches of windows (--batch) that were done are not
    done again.
    """
    from kvcal.commands.compare import run_compare

    result = run_compare(o, note, typed)
    if o.json:
        print_json(result)
        return
    line(f"full precision: perplexity {result['full_perplexity']:.4f}")
    print_table(
        [
            "name",
            "bits/value",
            "paper's count",
            "perplexity",
            "KL",
            "logit error",
            "output error",
            f"bytes at {result['at_length']}",
            "front",
        ],
        [
            [
                row["name"],
                "-" if row["bits_per_value"] is None else f"{row['bits_per_value']:.3f}",
                f"{row['paper_bits']:.3f}",
                f"{row['perplexity']:.4f}",
                f"{row['kl']:.5f}",
                _error(row["logit_error"]),
                _error(row["output_error"]),
                f"{row['bytes_at_length']:,}",
                "*" if row["front"] else "",
            ]
            for row in result["rows"]
        ],
    )
    if result["max_bits"] is not None:
        line(f"best at no more than {result['max_bits']} bits a value: {result['best'] or 'none'}")


def _error(value: float | None) -> str:
    """Evicted tokens have none."""
    return "-" if value is None else f"{value:.4f}"
