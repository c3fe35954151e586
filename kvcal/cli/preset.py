"""`kvcal preset`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Device, Heavy, Json, Keep, Model, PerLayer, Random, Revision, Seed, said_of
from kvcal.cli.output import note, print_json, print_table


def preset(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A method without data, as kivi-2 (see `kvcal names preset`).")
    ] = None,
    model: Model = "tiny",
    revision: Revision = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-<name>.kvcal.safetensors here.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(help="Codec of keys, in the preset's place or without one: uniform-4, higgs-2, kivi-2, …"),
    ] = None,
    values: Annotated[str | None, typer.Option(help="Codec of values, likewise.")] = None,
    per_layer: PerLayer = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with codecs, windows and frame instead of a name and options.")
    ] = None,
    sink: Annotated[int | None, typer.Option(min=0, help="First tokens kept; default: the preset's.")] = None,
    recent: Annotated[int | None, typer.Option(min=0, help="Newest tokens kept; default: the preset's.")] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens packed at a time; default: the preset's.")] = None,
    frame: Annotated[str | None, typer.Option(help="pre_rope or post_rope; default: the preset's.")] = None,
    keep: Keep = None,
    heavy: Heavy = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Read no weights: the bundle then fits any of this config.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            help="Run the model on two windows of 512 tokens, layer by layer; warn if the KL forecast is high."
        ),
    ] = True,
    device: Device = "auto",
    random_weights: Random = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Write a bundle for a method that needs no data: KIVI, SQuat, MixKVQ, InnerQ, TurboQuant, HIGGS, uniform, FP8, or
    any of their codecs together.
    """
    options: dict[str, Any] = {option: value for option, value in locals().items() if option != "context"}
    from kvcal.commands.preset import run_preset
    from kvcal.pipeline.scheme_file import with_recipe

    result = run_preset(with_recipe(options, said_of(context), plain=True), note, said_of(context))
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], result.items())
