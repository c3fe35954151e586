"""`kvcal fit-norms` and `kvcal fold`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Column, Device, Dtype, Heavy, Json, Keep, Model, Random, Revision, Text
from kvcal.cli.output import note, print_json, print_table

COLUMNS = {
    "layer": "layer", "key_outlier_ratio": "largest / median channel", "factor_min": "least factor",
    "factor_max": "largest factor", "key_relative_error": "key error", "value_relative_error": "value error",
    "logit_error": "logit error", "logit_error_plain": "without factors", "value_symmetric_share": "symmetric groups",
}  # fmt: skip


def fit_norms(
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[int, typer.Option(min=2, help="Windows in all.")] = 16,
    holdout: Annotated[int | None, typer.Option(min=1, help="How many of them are held out (default: 1 in 8).")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a window; default: the model's preset.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Which windows are drawn.")] = 0,
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
    factors: Annotated[
        str, typer.Option(help="channel: the paper's; pair: shared by a RoPE pair, which can be folded; none.")
    ] = "channel",
    exponent: Annotated[float, typer.Option(help="Factor = (largest magnitude of the channel) to this power.")] = 0.5,
    powers_of_two: Annotated[
        bool,
        typer.Option("--powers-of-two", help="Round factors to powers of two: folding is then exact in any dtype."),
    ] = False,
    sink: Annotated[int, typer.Option(min=0, help="First tokens kept in the model's dtype.")] = 32,
    recent: Annotated[int, typer.Option(min=0, help="Newest tokens kept, at least.")] = 96,
    block: Annotated[int, typer.Option(min=1, help="Tokens packed at a time.")] = 32,
    keep: Keep = None,
    heavy: Heavy = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Windows at a time.")] = None,
    spill: Annotated[str, typer.Option(help="Where hidden states lie: device, cpu or disk.")] = "device",
    spill_dir: Annotated[Path | None, typer.Option(help="Folder for --spill disk.")] = None,
    layerwise: Annotated[
        bool, typer.Option("--layerwise", help="One layer's weights on the device at a time.")
    ] = False,
    random_weights: Random = False,
    resume: Annotated[bool, typer.Option(help="Go on from an interrupted run of the same settings.")] = True,
    json: Json = False,
) -> None:
    """Calibrate InnerQ: measure key channels on text, report outliers, write a bundle with a factor a channel."""
    from kvcal.commands.fit_norms import run_fit_norms

    given: dict[str, Any] = dict(locals())
    result = run_fit_norms(given, note)
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

    given: dict[str, Any] = dict(locals())
    found = run_fold(given, note)
    if json:
        print_json(found)
    else:
        print_table(["what", "value"], found.items())
