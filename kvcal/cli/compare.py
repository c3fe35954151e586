"""`kvcal compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.evaluate import bits, spread
from kvcal.cli.options import (
    Batch,
    Bundles,
    Column,
    Heavy,
    Json,
    Keep,
    Machine,
    Model,
    PerLayer,
    Presets,
    Random,
    RequireKernels,
    Resume,
    Revision,
    Step,
    Text,
    grouped,
    options_by_name,
    said_of,
)
from kvcal.cli.output import line, note, print_json, print_table


@grouped
def compare(
    context: typer.Context,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a window.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="At most so many windows, from the start.")] = None,
    step: Step = 32,
    preset: Presets = None,
    bundle: Bundles = None,
    keys: Annotated[
        str | None, typer.Option(help="Key codecs, as higgs-2,uniform-2-channel: with each of --values.")
    ] = None,
    values: Annotated[str | None, typer.Option(help="Value codecs.")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Each pair also under AQUA-KV's predictors.")] = False,
    first_layer: Annotated[
        str, typer.Option(help="Of --predict: codec of the first compressed layer.")
    ] = "higgs-4-wide-debiased",
    key_inputs: Annotated[str, typer.Option(help="Of --predict, as of fit-predictors.")] = "k1",
    value_inputs: Annotated[str, typer.Option(help="Of --predict, likewise.")] = "v1,k0",
    per_layer: PerLayer = None,
    recipe: Annotated[
        list[Path] | None,
        typer.Option(help="A recipe of fit-predictors or preset, fitted if need be; may be repeated."),
    ] = None,
    frame: Annotated[str, typer.Option(help="Of the pairs: pre_rope or post_rope.")] = "post_rope",
    sink: Annotated[int, typer.Option(min=0, help="Of the pairs: first tokens kept.")] = 4,
    recent: Annotated[int, typer.Option(min=0, help="Of the pairs: newest tokens kept.")] = 128,
    block: Annotated[int, typer.Option(min=1, help="Of the pairs: tokens packed at a time.")] = 32,
    keep: Keep = None,
    heavy: Heavy = None,
    require_kernels: RequireKernels = False,
    max_bits: Annotated[
        float | None, typer.Option(min=0, max=32, help="Name the best row of at most so many bits.")
    ] = None,
    calibration: Annotated[str | None, typer.Option(help="Text for what is fitted. Default: the model's own.")] = None,
    fit_windows: Annotated[int | None, typer.Option(min=2, help="Calibration windows for what is fitted.")] = None,
    fit_length: Annotated[int | None, typer.Option(min=2, help="Tokens of one.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file of all rows; a second call goes on from it.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="The rows as CSV.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG: KL against stored bits, the Pareto front drawn.")] = None,
    attention_windows: Annotated[
        int, typer.Option(min=1, help="Attention errors are of the first so many windows.")
    ] = 4,
    at_length: Annotated[
        int | None, typer.Option(min=1, help="Bytes of one sequence of so many tokens; default: --length.")
    ] = None,
    batch: Batch = None,
    random_weights: Random = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of --random-weights, and of the windows of what is fitted.")
    ] = 0,
    machine: Machine = Machine(),  # noqa: B008, frozen
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Measure many schemes on the same text: presets, bundles, and every pair of key and value codecs.

    After a kill the same command goes on: rows, fitted layers and batches of windows (--batch) that were done are not
    done again.
    """
    options = options_by_name(locals())
    from kvcal.cli.defaults import defaults_of
    from kvcal.commands.compare import run_compare

    result = run_compare(options, defaults_of("fit-predictors"), note, said_of(context))
    if json:
        print_json(result)
        return
    line(f"full precision: perplexity {result['full_perplexity']:.4f}")
    columns = ["name", "bits/value", "paper's count", "KL", "±", "median", "99 %", "max", "same top"]
    columns += ["logit error", "output error", f"bytes at {result['at_length']}", "× smaller", "front", "perplexity"]
    print_table(columns, map(_cells, result["rows"]))
    if result["max_bits"] is not None:
        line(f"best at no more than {result['max_bits']} bits a value: {result['best'] or 'none'}")
        if result["ties"]:
            line(f"within the spread over windows of it: {', '.join(result['ties'])}")


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        bits(row["bits_per_value"]),
        f"{row['paper_bits']:.3f}",
        f"{row['kl']:.5f}",
        spread(row["kl_se"]),
        *(f"{row[name]:.5f}" for name in ("kl_median", "kl_p99", "kl_max")),
        f"{row['same_top']:.2%}",
        _error(row["logit_error"]),
        _error(row["output_error"]),
        f"{row['bytes_at_length']:,}",
        f"{row['smaller']:.2f}",
        "*" if row["front"] else "",
        f"{row['perplexity']:.4f}",
    ]


def _error(value: float | None) -> str:
    """Evicted tokens have none."""
    return "-" if value is None else f"{value:.4f}"
