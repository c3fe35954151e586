"""`kvcal demo`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.evaluate import print_rows
from kvcal.cli.options import Typed, command
from kvcal.cli.output import line, note, print_json, prose
from kvcal.commands.options import DemoOptions


@command(DemoOptions)
def demo(o: DemoOptions, typed: Typed) -> None:
    """The whole way in a minute: calibrate the embedded model, write a bundle, load it elsewhere, generate, measure."""
    from kvcal.commands.demo import run_demo

    result: dict[str, Any] = run_demo(o.output, note)
    if o.json:
        print_json(result)
        return
    print_rows(result["rows"])
    for row in result["rows"][1:]:
        stored = row["cache_bytes"] + row["window_bytes"]
        line(
            f"{row['name']}: {stored:,} bytes stored for {result['length']} tokens, "
            f"{row['bytes_at_16_bit'] / stored:.1f} times less than 16 bit (windows here in {result['dtype']}); packed "
            "part "
            f"{16 / row['bits_per_value']:.1f} times less"
        )
    prose(f"\nText from the compressed cache, in a fresh process:\n{result['sample']}\n")
    line(f"bundle: {result['bundle']}")
