"""`kvcal fit-predictors`."""

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
    Holdout,
    Json,
    Keep,
    Layerwise,
    Model,
    PerLayer,
    Random,
    Recent,
    Resume,
    Revision,
    Sink,
    SpillDir,
    Text,
    WindowLength,
    WindowSeed,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table


def fit_predictors(
    context: typer.Context,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[int | None, typer.Option(min=2, help="Windows in all; default: the model's preset.")] = None,
    holdout: Holdout = None,
    length: WindowLength = None,
    seed: WindowSeed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-aqua-kv.kvcal.safetensors here.")
    ] = None,
    backbone: Annotated[
        str,
        typer.Option(
            "--backbone",
            "--residual",
            help="Codec of the residuals: higgs-{2,3,4,2-d4}[-wide|-channel][-debiased], uniform-{1..8}[-channel], "
            "exact-{16,32,bf16}, kivi-{2,3,4,8}, turboquant-{2,3,4}, innerq-{base,hybrid,small}, "
            "squat-{2,3,4}, mixkvq; learned from the residuals: transform-BITS, vq-BITS, mixkvq-BITS, "
            "squat-{2,3,4}-calibrated, CODEC-scaled, CODEC-balanced; all: `kvcal names codec`.",
        ),
    ] = "higgs-2-wide-debiased-balanced",
    first_layer: Annotated[
        str, typer.Option(help="Codec of the first compressed layer; exact-16 keeps it.")
    ] = "higgs-4-wide-debiased-balanced",
    keys: Annotated[str, typer.Option(help="Codec of key residuals, where not that of --backbone.")] = "",
    values: Annotated[str, typer.Option(help="Codec of value residuals, likewise.")] = "",
    per_layer: PerLayer = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with codecs, windows, frame and predictor instead of options.")
    ] = None,
    predictor: Annotated[
        str, typer.Option(help="linear, reduced-rank, mlp, mlp-no-norm, linear-4bit or bias.")
    ] = "linear",
    rank: Annotated[int, typer.Option(min=0, help="Of reduced-rank; 0: a quarter of the kv width.")] = 0,
    key_inputs: Annotated[
        str, typer.Option(help="What predicts keys, of k1,v1 (layer below) and k2,v2; `none`: no predictor.")
    ] = "k1",
    value_inputs: Annotated[
        str, typer.Option(help="What predicts values; also k0, this layer's keys; `none`: no predictor.")
    ] = "v1,k0",
    frame: Annotated[str, typer.Option(help="pre_rope or post_rope.")] = "pre_rope",
    ridge: Annotated[float, typer.Option(help="Times the mean of the Gram diagonal.")] = 1e-3,
    quantiser_agnostic: Annotated[
        bool, typer.Option("--quantiser-agnostic", help="Fit on exact keys and values.")
    ] = False,
    sink: Sink = 4,
    recent: Recent = 128,
    block: Block = 32,
    mlp_epochs: Annotated[int, typer.Option(min=1, help="Passes of MLP training.")] = 4,
    keep: Keep = None,
    heavy: Heavy = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Batch = None,
    spill: Annotated[
        str, typer.Option(help="Where hidden states and reconstructions lie: device, cpu or disk.")
    ] = "device",
    spill_dir: SpillDir = None,
    layerwise: Layerwise = False,
    random_weights: Random = False,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Calibrate AQUA-KV: fit each layer's predictors on text and write a bundle."""
    merged: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.fit_predictors import run_fit_predictors
    from kvcal.pipeline.scheme_file import read_recipe, with_recipe

    typed = said_of(context)
    options = with_recipe(merged, typed)
    result = run_fit_predictors(options, note, typed if recipe is None else typed | read_recipe(recipe).said)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "layers"])
