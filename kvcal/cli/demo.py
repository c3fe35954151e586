"""`kvcal demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.evaluate import print_rows
from kvcal.cli.options import Json
from kvcal.cli.output import line, note, print_json, prose


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the bundle goes.")] = Path(
        "tiny-aqua-kv.kvcal.safetensors"
    ),
    json: Json = False,
) -> None:
    """The whole way in a minute: calibrate the embedded model, write a bundle, load it elsewhere, generate, measure."""
    from kvcal.cli.defaults import defaults_of
    from kvcal.commands.demo import run_demo

    found: dict[str, Any] = run_demo(output, defaults_of("fit-predictors"), defaults_of("eval"), note)
    if json:
        print_json(found)
        return
    print_rows(found["rows"])
    for row in found["rows"][1:]:
        held = row["cache_bytes"] + row["window_bytes"]
        line(
            f"{row['name']}: {held:,} bytes stored for {found['length']} tokens, {row['bytes_at_16_bit'] / held:.1f} times "
            f"less than 16 bit (windows here in {found['dtype']}); packed part {16 / row['bits_per_value']:.1f} times less"
        )
    prose(f"\nText from the compressed cache, in a fresh process:\n{found['sample']}\n")
    line(f"bundle: {found['bundle']}")
