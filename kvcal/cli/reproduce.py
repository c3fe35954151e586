"""`kvcal reproduce`."""

from __future__ import annotations

from typing import Any

import typer

from kvcal.cli.bundle import print_differences
from kvcal.cli.failure import DIFFERENT
from kvcal.cli.output import line, note, print_json, print_next, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import ReproduceOptions


@command(ReproduceOptions)
def reproduce(o: ReproduceOptions, typed: Typed) -> None:
    """Run the command that made a bundle again and compare bytes; exit code 7, and what differs first, if they do.

    No path is taken from the bundle: give --text, --model and --tasks-path where it was made from local files.
    """
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.reproduce import run_reproduce

    result = run_reproduce(o, defaults_of, options_of, note)
    if o.json:
        print_json(result)
    else:
        _print_result(result, o.wide)
        if o.output is not None:
            print_next(*("verify", o.output) if result["same"] else ("diff", o.bundle, o.output))
    if not result["same"]:
        raise typer.Exit(DIFFERENT)


def _print_result(result: dict[str, Any], wide: bool) -> None:
    from kvcal.bundles.diff import phrase

    if result["same"]:
        line(f"{result['bundle']}: the same bytes again")
        line(f"sha256 {result['sha256']}")
        return
    first = result["first_tensor"]
    tensors = f"the first tensor that differs is {phrase(first)}" if first else "every tensor is the same"
    line(f"{result['bundle']}: other bytes")
    wrapped(tensors, wide=wide)
    for name, rows in (("inputs are not those recorded", result["inputs"]), ("made elsewhere", result["environment"])):
        if rows:
            wrapped(f"{name}: {'; '.join(phrase(row) for row in rows)}", wide=wide)
    line("a: the bundle, b: made again")
    print_differences(result, wide)
