"""`kvcal tune-bits`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import (
    Batch,
    Block,
    Column,
    Device,
    Dtype,
    Heavy,
    Json,
    Keep,
    Layerwise,
    Model,
    Random,
    Recent,
    Resume,
    Revision,
    Sink,
    Spill,
    SpillDir,
    Text,
    WindowLength,
    WindowSeed,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table


def tune_bits(
    context: typer.Context,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[int | None, typer.Option(min=2, help="Windows in all (default: 12).")] = None,
    holdout: Annotated[
        int | None, typer.Option(min=1, help="How many of them only measure the result (default: 4, or 1 in 8).")
    ] = None,
    length: WindowLength = None,
    seed: WindowSeed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-kvtuner.kvcal.safetensors here.")
    ] = None,
    max_bits: Annotated[
        float, typer.Option(min=0, max=32, help="Stored bits a value, scales included, at most on average.")
    ] = 3.7,
    objective: Annotated[
        str,
        typer.Option(help="What is made small: attention (KVTuner-like, integers), or kl (of the model, any codecs)."),
    ] = "attention",
    codecs: Annotated[
        str, typer.Option(help="Of --objective kl: what keys or values of a layer may be stored in.")
    ] = "higgs-2,higgs-3,higgs-4,uniform-2-channel,uniform-4",
    bits: Annotated[str, typer.Option(help="What keys and values of a layer may have.")] = "2,4,8",
    group: Annotated[
        int, typer.Option(min=1, help="Tokens of a key channel, channels of a value, that share a scale.")
    ] = 32,
    sink: Sink = 4,
    recent: Recent = 128,
    block: Block = 128,
    keep: Keep = None,
    heavy: Heavy = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Batch = None,
    spill: Spill = "device",
    spill_dir: SpillDir = None,
    layerwise: Layerwise = False,
    random_weights: Random = False,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Choose each layer's key and value codecs for the least error under a limit of stored bits.

    --objective attention chooses bits of integers (KVTuner-like baseline). --objective kl measures the KL of each codec
    in each layer, solves the assignment as a knapsack, and takes it if it beats every uniform one on held-out windows.
    """
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.tune_bits import run_tune_bits

    result = run_tune_bits(options, note, said_of(context))
    if json:
        print_json(result)
        return
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "layers"])
    if objective == "kl":
        return
    rows = [
        [row["layer"], int(row["key_bits"]), int(row["value_bits"]), row["output_error"]] for row in result["layers"]
    ]
    print_table(["layer", "key bits", "value bits", "output error"], rows)
