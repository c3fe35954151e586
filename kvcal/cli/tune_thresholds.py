"""`kvcal tune-thresholds`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import (
    Column,
    Device,
    Dtype,
    Json,
    Model,
    Random,
    Recent,
    Resume,
    Revision,
    Sink,
    Step,
    Text,
    WindowLength,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table

Storage = Annotated[
    str | None,
    typer.Option(help="An Optuna storage URL (sqlite:///FILE, postgresql://…) that several workers share."),
]


def tune_thresholds(
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
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the windows and of the search.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-mixkvq.kvcal.safetensors here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Default: <output>.front.png.")] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="What to lose little of: attention, perplexity, or task:NAME[,NAME] of lm-eval; auto: attention for the "
            "embedded model, task:gsm8k for others."
        ),
    ] = "auto",
    trials: Annotated[int, typer.Option(min=1, help="How many thresholds are tried.")] = 30,
    max_bits: Annotated[
        float, typer.Option(min=0, max=32, help="Stored bits a value, at most: the best point below is chosen.")
    ] = 3.7,
    tau_low: Annotated[
        str | None, typer.Option(help="Range of the lower threshold, or one number (default: 0.5,8).")
    ] = None,
    tau_high: Annotated[
        str | None, typer.Option(help="Range of the upper threshold, or one number (default: 1,32).")
    ] = None,
    raw_salience: Annotated[
        bool, typer.Option("--raw-salience", help="Thresholds of the salience itself, not over the layer's median.")
    ] = False,
    importance: Annotated[
        str, typer.Option(help="query: mean |q| so far; recent: since the last block; none: error-only selection.")
    ] = "query",
    full: Annotated[
        int | None,
        typer.Option(min=0, help="With --four: channels a head in the top tier, always; nothing is searched."),
    ] = None,
    four: Annotated[int | None, typer.Option(min=0, help="With --full: channels a head at 4 bits.")] = None,
    group: Annotated[int, typer.Option(min=1, help="Tokens of a key channel that share a scale.")] = 32,
    round_up: Annotated[int, typer.Option(min=1, help="Channels of a tier come in multiples of this.")] = 8,
    raw_dtype: Annotated[
        str,
        typer.Option(
            help="Of the top tier: float16, bfloat16, float32; auto: bfloat16 if the model is, else (or with --full) float16.",
        ),
    ] = "auto",
    value_bits: Annotated[int, typer.Option(min=1, max=8, help="Of values, in groups of 32 channels of a token.")] = 2,
    sink: Sink = 4,
    recent: Recent = 128,
    block: Annotated[int, typer.Option(min=1, help="Tokens packed at a time: the paper's R.")] = 128,
    step: Step = 32,
    tasks_path: Annotated[
        Path | None, typer.Option(help="Folder of lm-eval task files, for tasks that lm-eval does not know.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task, from the first.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="METRIC or METRIC,FILTER of the tasks; default: their first.")
    ] = None,
    storage: Storage = None,
    heartbeat: Annotated[
        int,
        typer.Option(
            min=1, help="With --storage: seconds between signs of life; after six missed ones a trial is redone."
        ),
    ] = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Windows, or questions, at a time.")] = None,
    spill: Annotated[str, typer.Option(help="Where q, k, v wait during the search: device or cpu.")] = "device",
    random_weights: Random = False,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Search MixKVQ's thresholds: quality against stored bits, the best under a limit; write bundle and plot."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.tune_thresholds import run_tune_thresholds

    result = run_tune_thresholds(options, note, said_of(context))
    if json:
        print_json(result)
        return
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "front"])
    if "front" in result:
        names = ("trial", "tau_low", "tau_high", "quality", "bits")
        rows = [[f"{row[name]:.6g}" for name in names] for row in result["front"]]
        print_table(["trial", "tau_low", "tau_high", "quality", "bits/value"], rows, title="Pareto front")
