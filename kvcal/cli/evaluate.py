"""`kvcal eval` and `kvcal generate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvcal.cli.output import note, print_json, print_table, prose
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import GenerateOptions
from kvcal.pipeline.options import EvalOptions


@command(EvalOptions)
def evaluate(o: EvalOptions, typed: Typed) -> None:
    """Perplexity and KL through the cache, in small steps: full precision, presets and bundles side by side.

    With gates (--max-…) every bundle and preset is held to them, and to a canary: other packed blocks must give other
    logits. Exit code 3 if one fails; the line names the layer to blame and its figure. After a kill the same command
    goes on behind the last batch of windows (--batch) that was done.
    """
    from kvcal.commands.evaluation import run_eval
    from kvcal.commands.workbench import raise_first
    from kvcal.pipeline.gates import raise_if_failed, report

    check_reports(o.junit, o.summary)
    result = run_eval(o, note, typed=typed)
    failed = result["failed"]
    report(result["gates"], o.junit, o.summary)
    if o.json:
        print_json(result | {"failed": {name: str(error) for name, error in failed.items()}})
    else:
        print_rows(result["rows"])
        print_tasks(result["rows"])
        print_gates(result["gates"])
    raise_first(failed)
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


@command(GenerateOptions)
def generate(o: GenerateOptions, typed: Typed) -> None:
    """Generate text from a compressed cache. With --chat only the answer is printed."""
    from kvcal.commands.evaluation import run_generate

    result = run_generate(o, note, typed)
    if o.json:
        print_json(result)
    else:
        prose(result["text"])
        stored, bits = result["nbytes"], result["bits_per_value"]
        packed = (
            "nothing packed yet" if math.isnan(bits) else f"{stored['packed']} bytes packed at {bits:.3f} bits a value"
        )
        note(f"{result['new_tokens']} tokens in {result['seconds']} s; cache: {packed}, {stored['window']} in windows")
