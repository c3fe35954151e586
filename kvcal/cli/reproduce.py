"""`kvcal reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.bundle import File, print_differences
from kvcal.cli.failure import DIFFERENT
from kvcal.cli.options import Json
from kvcal.cli.output import line, note, print_json


def reproduce(
    bundle: File,
    text: Annotated[
        list[str] | None, typer.Option(help="Where a local text lies now; found by its recorded name; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Where the local model folder lies now.")] = None,
    input: Annotated[
        list[Path] | None,
        typer.Option(
            help="A bundle that `combine` or `fold` read, found by its hash; without it, it is made again too."
        ),
    ] = None,
    tasks_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder of task files, where the recorded objective is a task that lm-eval does not come with."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Another device than recorded.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the new bundle there; an interrupted run then goes on.")
    ] = None,
    json: Json = False,
) -> None:
    """Run the command that made a bundle again and compare bytes; exit code 7, and what differs first, if they do.

    No path is taken from the bundle: give --text, --model and --tasks-path where it was made from local files.
    """
    options: dict[str, Any] = dict(locals())
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.reproduce import run_reproduce

    result = run_reproduce(options, defaults_of, options_of, note)
    if json:
        print_json(result)
    else:
        _told(result)
    if not result["same"]:
        raise typer.Exit(DIFFERENT)


def _told(result: dict[str, Any]) -> None:
    from kvcal.bundles.diff import phrase

    if result["same"]:
        line(f"{result['bundle']}: the same bytes again (sha256 {result['sha256']})")
        return
    first = result["first_tensor"]
    line(
        f"{result['bundle']}: "
        + (f"the first tensor that differs is {phrase(first)}" if first else "every tensor is the same")
    )
    for name, rows in (("inputs are not those recorded", result["inputs"]), ("made elsewhere", result["environment"])):
        if rows:
            line(f"{name}: {'; '.join(phrase(row) for row in rows)}")
    line("a: the bundle, b: made again")
    print_differences(result)
