"""`kvcal eval` and `kvcal generate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.cli.output import line, note, print_json, print_open, print_rows, print_table, prose, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import GenerateOptions
from kvcal.evaluate.spread import few_windows
from kvcal.pipeline.options import EvalOptions
from kvcal.report.quantities import percent, questions, size, written

if TYPE_CHECKING:
    from kvcal.commands.results import EvaluationRow, TaskScores
    from kvcal.pipeline.gates import Check


@command(EvalOptions, spread=True)
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
    failed, unwritten = result["failed"], [*result["unwritten"], *report(result["gates"], o.junit, o.summary)]
    if o.json:
        print_json(result | as_lines(failed, unwritten))
    else:
        print_evaluation(result["rows"], o.wide)
        if unequal := unequal_windows(result["rows"]):
            wrapped(unequal, wide=o.wide)
        if few := few_windows(result["windows"]):
            wrapped(few, wide=o.wide)
        print_tasks(result["rows"], o.wide)
        print_gates(result["gates"], o.wide)
        if o.needle_plot is not None and not result["unwritten"]:
            print_open(o.needle_plot)
    raise_first(failed, unwritten)
    raise_if_failed(result["gates"], unwritten)


def as_lines(failed: Mapping[str, Exception], unwritten: Sequence[Exception]) -> dict[str, object]:
    """Errors of rows and of files, as `--json` has them."""
    return {"failed": {name: str(error) for name, error in failed.items()}, "unwritten": [*map(str, unwritten)]}


def check_reports(junit: Path | None, summary: Path | None) -> None:
    """Refuse now, not after an hour, what cannot be written."""
    from kvcal.report.outputs import check_output

    for option, path in (("--junit", junit), ("--summary", summary)):
        if path is not None:
            check_output(path, option)


def print_gates(checks: list[Check], wide: bool = False) -> None:
    """A line a gate; nothing without gates."""
    if checks:
        rows = [["passed" if check.passed else "FAILED", check.line] for check in checks]
        line()
        print_table(["gate", "what"], rows, wide=wide)


COLUMNS = (
    "name", "windows", "block", "kl", "kl_se", "kl_median", "kl_p99", "kl_max", "same_top", "bits_per_value", "bytes",
    "smaller", "perplexity",
)  # fmt: skip
ONLY_WIDE = ("windows", "block", "kl_median", "kl_p99", "kl_max")
FULL = "fp16"  # what full precision, `full` in --json, is called in tables: its cache is counted at 16 bits per value


def print_evaluation(rows: list[EvaluationRow], wide: bool = False) -> None:
    """Rows of an evaluation as a table; sizes are of one window's end, exact tokens at 16 bits a number."""
    shown = [
        row | {"name": _name(row), "windows": windows_of(row), "bytes": round(row["bytes_at_16_bit"] / row["smaller"])}
        for row in rows
    ]
    print_rows(COLUMNS, shown, only_wide=ONLY_WIDE, wide=wide)
    compressed = [row for row in rows if row["positions"]]
    if compressed:
        names = [f"{bucket['first']}–{bucket['last']}" for bucket in compressed[0]["positions"]]
        line()
        print_table(
            ["KL by position", *names],
            [[row["name"], *(kl(bucket["kl"], wide) for bucket in row["positions"])] for row in compressed],
            wide=wide,
        )


def windows_of(row: EvaluationRow) -> str | None:
    """Exact tokens of a row, first and last ones; full precision, and a result file of before, has none."""
    return f"{row['sink']} + {row['recent']}" if "sink" in row else None


def unequal_windows(rows: list[EvaluationRow]) -> str | None:
    """A line that says which rows keep how many exact tokens; None where all keep as many."""
    by_windows: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        if (windows := windows_of(row)) is not None:
            by_windows.setdefault((windows, row["block"]), []).append(row["name"])
    if len(by_windows) < 2:
        return None
    blocks_differ = len({block for _, block in by_windows}) > 1
    parts = (
        f"{windows}{f', block {block},' if blocks_differ else ''} of {', '.join(names)}"
        for (windows, block), names in by_windows.items()
    )
    why = " Tokens stay exact until their block is full: of larger blocks more do."
    return (
        f"exact tokens (first + last) differ: {'; '.join(parts)}.{why if blocks_differ else ''} Equal ones: "
        f"kvcal preset NAME --sink N --recent N{' --block N' if blocks_differ else ''} -o FILE, then --bundle FILE"
    )


def _name(row: EvaluationRow) -> str:
    return FULL if row["name"] == "full" else str(row["name"])


def kl(value: float, wide: bool) -> str | None:
    return written("kl", value, whole=wide)


def print_tasks(rows: list[EvaluationRow], wide: bool = False) -> None:
    """A line a task and row: scores, their difference with its interval, McNemar's p-value; nothing without tasks."""
    lines = [(row["name"], name, paired) for row in rows for name, paired in row.get("tasks", {}).items()]
    if lines:
        columns = ["task", "name", "score", FULL, "difference", "95 % from", "to", "McNemar p", "questions", "packed"]
        line()
        print_table(columns, [[name, row, *_task_cells(paired)] for row, name, paired in lines], keys=2, wide=wide)
        if blind := {name: paired["n"] for _, name, paired in lines if not paired["full"]}:
            of = ", ".join(f"{questions(n)} of {name}" for name, n in blind.items())
            wrapped(f"full precision answered none of {of}: the comparison says nothing", wide=wide)
        if exact := dict.fromkeys(f"{name} by {row}" for row, name, paired in lines if paired.get("packed") == 0):
            wrapped(
                f"nothing was packed while answering {', '.join(exact)}: the score is full precision's; give longer "
                "contexts or a scheme with smaller windows",
                wide=wide,
            )
        _print_equal({f"{name} by {row}": paired for row, name, paired in lines}, wide)


def _print_equal(tasks: Mapping[str, TaskScores], wide: bool) -> None:
    """What no different answer proves, of the tasks that full precision can do."""
    equal = {label: paired for label, paired in tasks.items() if paired["full"] and not paired["differing"]}
    if bounds := [-paired["low"] for paired in equal.values() if paired["low"] is not None]:
        wrapped(f"no answer differs; the true loss may still be up to {percent(max(bounds))} (95 %)", wide=wide)
    if unknown := [label for label, paired in equal.items() if paired["low"] is None]:
        wrapped(f"no answer of {', '.join(unknown)} differs: without an interval that is no proof", wide=wide)


def _task_cells(paired: TaskScores) -> list[str]:
    p_value = paired["mcnemar"]
    values = (paired["score"], paired["full"], paired["difference"], paired["low"], paired["high"])
    figures = ["–" if value is None else f"{value:.4f}" for value in values]
    packed = paired.get("packed")  # files of before have none
    share = "–" if packed is None else percent(packed)
    return [*figures, "–" if p_value is None else f"{p_value:.3f}", f"{paired['n']:,}", share]


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
            "nothing packed yet"
            if math.isnan(bits)
            else f"{size(stored['packed'])} packed at {written('bits_per_value', bits)} bits/value"
        )
        window = size(stored["window"])
        note(f"{result['new_tokens']} tokens in {result['seconds']} s; cache: {packed}, {window} in windows")
