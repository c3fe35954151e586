"""`kvcal names`."""

from __future__ import annotations

import itertools

from kvcal.cli.output import line, note, print_json, print_rows
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import NamesOptions
from kvcal.pipeline.names import NameRow


@command(NamesOptions, light=True)
def names(o: NamesOptions, typed: Typed) -> None:
    """List what options take by name: presets and codecs, with the bits a value that they store, and `kvcal bench`'s
    own.
    """
    from kvcal.commands.names import run_names
    from kvcal_artifacts.presets import AUTO_BITS

    rows = run_names(o.kind, o.model, typed)
    if o.json:
        print_json({"model": o.model, "names": rows})
        return
    for number, (name, group) in enumerate(itertools.groupby(rows, key=lambda row: row["kind"])):
        if number:
            line()
        _print_kind(name, list(group), o.wide)
    kinds = {row["kind"] for row in rows}
    if "device" in kinds:
        note("devices: measured on the machine itself, projected elsewhere")
    if "scheme" in kinds:
        note("schemes: of `kvcal bench` alone")
    if any(row["key_bits"] is not None for row in rows):
        if "preset" in kinds:
            note(f"Python alone, chosen by the model's keys: {', '.join(AUTO_BITS)} (kvcal.cache, load_cache)")
        note(f"bits/value of {o.model}'s geometry; of another: --model")


def _print_kind(kind: str, rows: list[NameRow], wide: bool) -> None:
    """A table of the names of one kind; bits/value of keys and values where they have some."""
    counted = any(row["key_bits"] is not None for row in rows)
    bits = ["key_bits", "value_bits"] if counted else []
    print_rows(["name", *bits, "about"], rows, names={"name": kind}, wide=wide)
