"""`kvcal eval` and `kvcal generate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import (
    Batch,
    Bundles,
    Column,
    Device,
    Dtype,
    Heavy,
    Json,
    Keep,
    Model,
    Presets,
    Random,
    RequireKernels,
    Resume,
    Revision,
    Seed,
    Step,
    Subspace,
    Text,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table, prose


def evaluate(
    context: typer.Context,
    bundles: Annotated[list[Path] | None, typer.Argument(help="Bundle files, as with --bundle.")] = None,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a window.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="At most so many windows, from the start.")] = None,
    step: Step = 32,
    bundle: Bundles = None,
    preset: Presets = None,
    keep: Keep = None,
    heavy: Heavy = None,
    require_kernels: RequireKernels = False,
    subspace: Subspace = None,
    batch: Batch = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks, each with its difference to full precision on the same questions: names of lm-eval's "
            "(gsm8k, niah_single_1), humaneval, needle, context-once, agreement; may be repeated, or given as a,b."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Of --task: questions, of needle and others contexts.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Of --task: tokens of synthetic contexts (RULER, needle and others), as 4k,8k.")
    ] = None,
    tasks_path: Annotated[
        Path | None, typer.Option(help="Of --task: a folder of task files; lm-eval runs the Python in it.")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Of --task humaneval: run generated programs, in a sandbox.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Of --task: lm-eval's prompts in the tokenizer's chat template.")
    ] = False,
    needle_plot: Annotated[
        Path | None, typer.Option(help="Of --task needle: a plot of what was found (.png, .svg, .pdf).")
    ] = None,
    max_score_drop: Annotated[
        float | None, typer.Option(min=0, help="Gate: any task's mean score below full precision's, at most.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="Gate: perplexity above full precision's by at most this share, as 1% or 0.01.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Gate: KL to full precision, nats a token.")] = None,
    max_bits: Annotated[float | None, typer.Option(help="Gate: stored bits a value of packed blocks.")] = None,
    max_cache_bytes: Annotated[
        float | None, typer.Option(help="Gate: bytes that packed blocks and windows take at one text window's end.")
    ] = None,
    max_layer_drift: Annotated[
        float | None,
        typer.Option(help="Gate: any layer's relative error of keys or values, in times what the bundle recorded."),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the gates as JUnit XML.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="Write the gates as Markdown; it is also appended to the file in $GITHUB_STEP_SUMMARY."),
    ] = None,
    random_weights: Random = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Perplexity and KL through the cache, in small steps: full precision, presets and bundles side by side.

    With gates (--max-…) every bundle and preset is held to them, and to a canary: other packed blocks must give other
    logits. Exit code 3 if one fails; the line names the layer to blame and its figure. After a kill the same command
    goes on behind the last batch of windows (--batch) that was done.
    """
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.evaluation import run_eval
    from kvcal.pipeline.gates import raise_if_failed, report

    check_reports(junit, summary)
    result = run_eval(options, note, typed=said_of(context))
    report(result["gates"], junit, summary)
    if json:
        print_json(result)
    else:
        print_rows(result["rows"])
        print_tasks(result["rows"])
        print_gates(result["gates"])
    raise_if_failed(result["gates"])


def check_reports(junit: Path | None, summary: Path | None) -> None:
    """Refuse now, not after an hour, what cannot be written."""
    from kvcal.report.outputs import check_output

    for option, path in (("--junit", junit), ("--summary", summary)):
        if path is not None:
            check_output(path, option)


def print_gates(checks: list[Any]) -> None:
    """A line a gate; nothing without gates."""
    if checks:
        rows = [["passed" if check.passed else "FAILED", check.line] for check in checks]
        print_table(["gate", "what"], rows)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Rows of an evaluation as a table; sizes are of one window's end."""
    columns = ["name", "KL", "±", "median", "99 %", "max", "same top", "bits/value", "bytes", "× smaller", "perplexity"]

    def cells(row: dict[str, Any]) -> list[str]:
        figures = [f"{row[name]:.5f}" for name in ("kl_median", "kl_p99", "kl_max")]
        size = f"{row['cache_bytes'] + row['window_bytes']:,}"
        return [
            row["name"],
            f"{row['kl']:.5f}",
            spread(row["kl_se"]),
            *figures,
            f"{row['same_top']:.2%}",
            bits(row["bits_per_value"]),
            size,
            f"{row['smaller']:.2f}",
            f"{row['perplexity']:.4f}",
        ]

    print_table(columns, [cells(row) for row in rows])
    compressed = [row for row in rows if row["positions"]]
    if compressed:
        names = [f"{bucket['first']}-{bucket['last']}" for bucket in compressed[0]["positions"]]
        print_table(
            ["KL by position", *names],
            [[row["name"], *(f"{bucket['kl']:.5f}" for bucket in row["positions"])] for row in compressed],
        )


def print_tasks(rows: list[dict[str, Any]]) -> None:
    """A line a task and row: scores, their difference with its interval, McNemar's p-value; nothing without tasks."""
    lines = [(row["name"], name, paired) for row in rows for name, paired in row.get("tasks", {}).items()]
    if lines:
        columns = ["task", "name", "score", "full", "difference", "95 % from", "to", "McNemar p", "questions"]
        print_table(columns, [[name, row, *_task_cells(paired)] for row, name, paired in lines])


def _task_cells(paired: dict[str, Any]) -> list[str]:
    p_value = paired["mcnemar"]
    figures = [f"{paired[name]:.4f}" for name in ("score", "full", "difference", "low", "high")]
    return [*figures, "-" if p_value is None else f"{p_value:.3f}", f"{paired['n']:,}"]


def spread(error: float | None) -> str:
    """A standard error over windows; one window has none."""
    return "-" if error is None else f"{error:.5f}"


def bits(value: float | None) -> str:
    """Stored bits a value; a cache that packed nothing has none."""
    return "-" if value is None else f"{value:.3f}"


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to go on from.")],
    model: Model = "tiny",
    revision: Revision = None,
    bundle: Annotated[Path | None, typer.Option("--bundle", "-b", help="A bundle file.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", "-p", help="Or a method without data.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt as a user's message, by the tokenizer's chat template.")
    ] = False,
    keep: Keep = None,
    heavy: Heavy = None,
    require_kernels: RequireKernels = False,
    subspace: Subspace = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 100,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    random_weights: Random = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For --sample and --random-weights.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Generate text from a compressed cache. With --chat only the answer is printed."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.evaluation import run_generate

    result = run_generate(options, note, said_of(context))
    if json:
        print_json(result)
    else:
        prose(result["text"])
        stored, bits = result["nbytes"], result["bits_per_value"]
        packed = (
            "nothing packed yet" if math.isnan(bits) else f"{stored['packed']} bytes packed at {bits:.3f} bits a value"
        )
        note(f"{result['new_tokens']} tokens in {result['seconds']} s; cache: {packed}, {stored['window']} in windows")
