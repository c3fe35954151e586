"""`kvcal export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Batch, Column, Device, Dtype, Json, Model, Revision, Text, WindowSeed
from kvcal.cli.output import note, print_json, print_table


def export(
    to: Annotated[str, typer.Option("--to", help="The server's cache: fp8 (e4m3) or int8.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new model's folder.")],
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Calibration windows (default: 16).")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a window (default: 2048).")] = None,
    seed: WindowSeed = 0,
    per_head: Annotated[bool, typer.Option("--per-head", help="A scale for each kv head, not for the layer.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Batch = None,
    json: Json = False,
) -> None:
    """Write a new checkpoint with calibrated k_scale and v_scale of 8-bit caches, as compressed-tensors names them.

    Servers that load this convention (vLLM) then store keys and values in 8 bits without code of ours.
    """
    options: dict[str, Any] = dict(locals()) | {"random_weights": False}
    from kvcal.commands.export import run_export

    result = run_export(options, note)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], [[name, str(value)] for name, value in result.items()])
