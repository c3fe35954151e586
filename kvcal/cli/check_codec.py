"""`kvcal check-codec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvcal.cli.output import line, on_stdout, print_json, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import CheckCodecOptions

if TYPE_CHECKING:
    from kvcal.commands.check_codec import CheckedCodec


@command(CheckCodecOptions)
def check_codec(o: CheckCodecOptions, typed: Typed) -> None:
    """Hold a codec to the contract that kvcal's codecs keep: round trip, chunks, crops, stored bits, state, bundle,
    devices. For codecs of packages of yours.

    Prints a line per check; exit code 1 if one fails.
    """
    from kvcal.commands.check_codec import run_check_codec

    result = run_check_codec(o.name)
    if o.json:
        print_json(result)
    else:
        with on_stdout():
            _print(result, o.wide)
    if not result["passed"]:
        raise typer.Exit(1)


def _print(result: CheckedCodec, wide: bool) -> None:
    """A line per check, with how often it was tried or what failed. wide: also what it holds a codec to."""
    rows = result["checks"]
    name_width = max(len(row.check) for row in rows)
    for row in rows:
        before = f"{'good' if row.passed else 'FAILED':<6}  {row.check:<{name_width}}  "
        text = row.failure or f"{row.tried} times"
        wrapped(f"{text}. {row.holds}" if wide else text, indent=" " * len(before), before=before, wide=wide)
    bad = sum(not row.passed for row in rows)
    line(f"{result['codec']}: {f'{bad} of {len(rows)} checks failed' if bad else 'keeps the contract'}")
