"""`kvcal preset`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Device, Heavy, Json, Keep, Model, Random, Revision, Seed
from kvcal.cli.output import note, print_json, print_table


def preset(
    name: Annotated[str, typer.Argument(help="A method without data, e.g. kivi-2; an unknown name lists them all.")],
    model: Model = "tiny",
    revision: Revision = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-<name>.kvcal.safetensors here.")
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
        typer.Option(help="Run the model on 512 tokens, layer by layer, and warn if its key channels will break this."),
    ] = True,
    device: Device = "auto",
    random_weights: Random = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Write a bundle for a method that needs no data: KIVI, SQuat, MixKVQ, InnerQ, TurboQuant, HIGGS, uniform, FP8."""
    from kvcal.commands.preset import run_preset

    given: dict[str, Any] = dict(locals())
    found = run_preset(given, note)
    if json:
        print_json(found)
    else:
        print_table(["what", "value"], found.items())
