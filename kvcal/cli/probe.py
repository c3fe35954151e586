"""`kvcal probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import (
    Batch,
    Column,
    Device,
    Dtype,
    Json,
    Layerwise,
    Model,
    Random,
    Resume,
    Revision,
    SpillDir,
    Text,
    WindowLength,
    WindowSeed,
)
from kvcal.cli.output import note, print_json, print_table


def probe(
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[
        int | None, typer.Option(min=2, help="Windows in all; default: the model's preset, tiny 32.")
    ] = None,
    holdout: Annotated[
        int | None, typer.Option(min=1, help="How many of them are held out and scored (default: 1 in 8; tiny 8).")
    ] = None,
    length: WindowLength = None,
    seed: WindowSeed = 0,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="TARGET=INPUTS instead of the paper's: v=v1,k0 predicts values from those of the layer below and this "
            "layer's keys, k=k0t1 keys from those of the token before; may be repeated."
        ),
    ] = None,
    frame: Annotated[str, typer.Option(help="Keys before RoPE, pre_rope, or after it, post_rope.")] = "pre_rope",
    ridge: Annotated[float, typer.Option(help="Times the mean of the Gram diagonal.")] = 1e-3,
    sink: Annotated[int, typer.Option(min=0, help="First tokens of a window, which are not predicted.")] = 4,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file of all layers; a second call goes on from it.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="All figures as CSV, a line a probe and layer.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Means and layers as .png, .svg or .pdf (Figures 2, 4 and 5).")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Batch = None,
    spill: Annotated[
        str, typer.Option(help="Where hidden states, keys and values lie: device, cpu or disk.")
    ] = "device",
    spill_dir: SpillDir = None,
    layerwise: Layerwise = False,
    random_weights: Random = False,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Measure how well keys and values are predicted by other layers, other tokens and each other (AQUA-KV section
    3.1).

    After a kill the same command goes on behind the last layer that was done.
    """
    from kvcal.commands.probe import run_probe

    options: dict[str, Any] = dict(locals())
    result = run_probe(options, note)
    if json:
        print_json(result)
        return
    rows = result["rows"]
    columns = ["target", "from", "mean", "same layers", *result["layer_numbers"]]
    shown = [
        [row["target"], " + ".join(row["inputs"]), *map(_cell, [row["mean"], row["mean_common"], *row["layers"]])]
        for row in rows
    ]
    print_table([str(column) for column in columns], shown, title="explained variance: means, and by layer")
    skipped = ("rows", "probes", "phases", "layer_numbers")
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name not in skipped])


def _cell(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
