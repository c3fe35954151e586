"""`kvcal combine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.cli.options import Json
from kvcal.cli.output import print_json, print_table


def combine(
    keys: Annotated[Path, typer.Argument(help="The bundle whose key codecs are taken.")],
    values: Annotated[Path, typer.Argument(help="The bundle whose value codecs are taken.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the new bundle goes.")],
    json: Json = False,
) -> None:
    """Make a bundle of one bundle's keys and another's values; refused with the reason where that cannot work."""
    from kvcal.commands.combine import run_combine

    result = run_combine(keys, values, output)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], result.items())
