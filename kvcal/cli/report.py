"""`kvcal report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Json
from kvcal.cli.output import note, print_json, print_table


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Files of `kvcal eval --json`, `kvcal compare --json` or its --output, and bundles."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page, an .html file.")],
    json: Json = False,
) -> None:
    """Write one HTML page, which needs no network: figures, quality against bits, KL by position, errors by layer and
    head, needles, tasks, memory against length.
    """
    options: dict[str, Any] = dict(locals())
    from kvcal.commands.report import run_report

    result = run_report(options, note)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], [[name, str(value)] for name, value in result.items()])
