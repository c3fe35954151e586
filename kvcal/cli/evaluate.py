"""`kvcal eval` and `kvcal generate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import (
    Bundles,
    Column,
    Device,
    Dtype,
    Heavy,
    Json,
    Keep,
    Model,
    Presets,
    Random,
    Revision,
    Seed,
    Step,
    Subspace,
    Text,
)
from kvcal.cli.output import note, print_json, print_table


def evaluate(
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a window.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="At most so many windows, from the start.")] = None,
    step: Step = 32,
    bundle: Bundles = None,
    preset: Presets = None,
    keep: Keep = None,
    heavy: Heavy = None,
    subspace: Subspace = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows at a time.")] = None,
    random_weights: Random = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Perplexity and KL through the cache, in small steps: full precision, presets and bundles side by side."""
    from kvcal.commands.evaluation import run_eval

    options: dict[str, Any] = dict(locals())
    found = run_eval(options, note)
    if json:
        print_json(found)
    else:
        print_rows(found["rows"])


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Rows of an evaluation as a table; sizes per window."""

    def cells(row: dict[str, Any]) -> list[str]:
        bits = "-" if row["bits_per_value"] is None else f"{row['bits_per_value']:.3f}"
        sizes = [f"{row[name]:,}" for name in ("cache_bytes", "window_bytes", "resident_bytes")]
        return [row["name"], f"{row['perplexity']:.4f}", f"{row['kl']:.5f}", bits, *sizes, f"{row['tokens']:,}"]

    print_table(
        ["name", "perplexity", "KL", "bits/value", "packed bytes", "window bytes", "resident bytes", "tokens"],
        [cells(row) for row in rows],
    )


def generate(
    prompt: Annotated[str, typer.Option("--prompt", help="Text to go on from.")],
    model: Model = "tiny",
    revision: Revision = None,
    bundle: Annotated[Path | None, typer.Option("--bundle", "-b", help="A bundle file.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", "-p", help="Or a method without data.")] = None,
    keep: Keep = None,
    heavy: Heavy = None,
    subspace: Subspace = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 100,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    random_weights: Random = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For --sample and --random-weights.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Generate text from a compressed cache."""
    from kvcal.commands.evaluation import run_generate

    options: dict[str, Any] = dict(locals())
    found = run_generate(options, note)
    if json:
        print_json(found)
    else:
        print(found["text"])
        held, bits = found["nbytes"], found["bits_per_value"]
        packed = (
            "nothing packed yet" if math.isnan(bits) else f"{held['packed']} bytes packed at {bits:.3f} bits a value"
        )
        note(f"{found['new_tokens']} tokens in {found['seconds']} s; cache: {packed}, {held['window']} in windows")
