"""`kvcal fit-norms` and `kvcal fold`."""

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
    Spill,
    SpillDir,
    Text,
    WindowLength,
    WindowSeed,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table

COLUMNS = {
    "layer": "layer", "key_outlier_ratio": "largest / median channel", "factor_min": "least factor",
    "factor_max": "largest factor", "key_relative_error": "key error", "value_relative_error": "value error",
    "logit_error": "logit error", "logit_error_plain": "without factors", "value_symmetric_share": "symmetric groups",
}  # fmt: skip


def fit_norms(
    context: typer.Context,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[int, typer.Option(min=2, help="Windows in all.")] = 16,
    holdout: Holdout = None,
    length: WindowLength = None,
    seed: WindowSeed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-innerq-<variant>.kvcal.safetensors here.")
    ] = None,
    variant: Annotated[
        str, typer.Option(help="base, hybrid or small: values of 3 bits, 2 bits hybrid, 2 bits.")
    ] = "base",
    keys: Annotated[
        str | None, typer.Option(help="Another codec for keys, e.g. inner-{2,3,4}-{symmetric,asymmetric,hybrid}[-max].")
    ] = None,
    values: Annotated[str | None, typer.Option(help="Another codec for values.")] = None,
    per_layer: PerLayer = None,
    factors: Annotated[
        str | None,
        typer.Option(
            help="channel: the paper's; pair: shared by a RoPE pair, which can be folded; none. Default: channel, none for "
            "keys of a codec that has no use for them (kivi-2, squat-2, …)."
        ),
    ] = None,
    exponent: Annotated[float, typer.Option(help="Factor = (largest magnitude of the channel) to this power.")] = 0.5,
    powers_of_two: Annotated[
        bool,
        typer.Option("--powers-of-two", help="Round factors to powers of two: folding is then exact in any dtype."),
    ] = False,
    search: Annotated[
        str,
        typer.Option(
            help="What a searched scale of keys minimises: queries: squared errors weighted by each channel's queries; plain: "
            "unweighted ones, which GPU kernels pack."
        ),
    ] = "queries",
    sink: Sink = 32,
    recent: Recent = 96,
    block: Block = 32,
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
    """Calibrate InnerQ: measure key channels on text, report outliers, write a bundle with a factor a channel."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.fit_norms import run_fit_norms

    result = run_fit_norms(options, note, said_of(context))
    if json:
        print_json(result)
        return
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "layers"])
    shown = [name for name in COLUMNS if any(name in row for row in result["layers"])]
    print_table([COLUMNS[name] for name in shown], [[row.get(name) for name in shown] for row in result["layers"]])


def fold(
    bundle: Annotated[Path, typer.Option("--bundle", "-b", help="A bundle with key factors that RoPE pairs share.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new model's folder.")],
    model: Model = "tiny",
    revision: Revision = None,
    bundle_output: Annotated[
        Path | None, typer.Option(help="Also write the bundle that the folded model needs: the same without factors.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the new weights: float32, bfloat16, float16; auto: the model's.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Write a new checkpoint with a bundle's key factors folded in: W_K divided by them, W_Q multiplied."""
    from kvcal.commands.fold import run_fold

    options: dict[str, Any] = dict(locals())
    result = run_fold(options, note)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], result.items())
