"""`kvcal demo`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.output import line, note, print_json, print_table, prose
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import DemoOptions


@command(DemoOptions)
def demo(o: DemoOptions, typed: Typed) -> None:
    """The whole way in a minute: calibrate the embedded model, write a bundle, load it elsewhere, generate, compare."""
    from kvcal.commands.demo import run_demo

    result: dict[str, Any] = run_demo(o.output, note)
    if o.json:
        print_json(result)
        return
    full, *_, ours = result["rows"]
    print_table(
        ["cache", "bits/value", "MB", "x smaller", "KL", "same next token"],
        [_cells(row, full["nbytes"]) for row in result["rows"]],
        title=f"tiny, {result['rows_of_text']} texts of {result['length']:,} tokens",
    )
    prose(f"\nText from the compressed cache, in a fresh process:\n{result['sample']}\n")
    line(
        f"16-bit cache {full['nbytes'] / 1e6:.2f} MB -> {ours['nbytes'] / 1e6:.2f} MB, predictors included; "
        f"same next token in {ours['same']} of {ours['of']} steps"
    )
    line(f"bundle: {result['bundle']}")
    line(f"next: {result['next']}")


def _cells(row: dict[str, Any], full: int) -> list[str | None]:
    bits = f"{row['bits_per_value'] or 16:.3f}"
    smaller = f"{full / row['nbytes']:.1f}"
    return [row["name"], bits, f"{row['nbytes'] / 1e6:.2f}", smaller, f"{row['kl']:.5f}", f"{row['same']}/{row['of']}"]
