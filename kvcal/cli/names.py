"""`kvcal names`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcal.cli.options import Json, said_of
from kvcal.cli.output import note, print_json, print_table


def names(
    context: typer.Context,
    kind: Annotated[
        str | None, typer.Argument(help="preset, codec, scheme, operation or device; default: all of them.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose geometry the bits are for; no weights are read.")
    ] = "llama-3.1-8b",
    json: Json = False,
) -> None:
    """List what options take by name: presets and codecs, with the bits a value that they store, and `kvcal bench`'s
    own.
    """
    from kvcal.commands.names import run_names

    rows = run_names(kind, model, said_of(context))
    if json:
        print_json({"model": model, "names": rows})
        return
    bits = [[None if row[role] is None else f"{row[role]:.3f}" for role in ("key_bits", "value_bits")] for row in rows]
    print_table(
        ["kind", "name", "key bits", "value bits", "about"],
        [[row["kind"], row["name"], *two, row["about"]] for row, two in zip(rows, bits, strict=True)],
    )
    if any(row["key_bits"] is not None for row in rows):
        note(f"bits a value of {model}'s geometry; of another: --model")
