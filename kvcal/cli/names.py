"""`kvcal names`."""

from __future__ import annotations

from kvcal.cli.output import note, print_json, print_table
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import NamesOptions


@command(NamesOptions, light=True)
def names(o: NamesOptions, typed: Typed) -> None:
    """List what options take by name: presets and codecs, with the bits a value that they store, and `kvcal bench`'s
    own.
    """
    from kvcal.commands.names import run_names
    from kvcal_artifacts.auto_names import AUTO_BITS

    rows = run_names(o.kind, o.model, typed)
    if o.json:
        print_json({"model": o.model, "names": rows})
        return
    bits = [[None if row[role] is None else f"{row[role]:.3f}" for role in ("key_bits", "value_bits")] for row in rows]
    print_table(
        ["kind", "name", "key bits", "value bits", "about"],
        [[row["kind"], row["name"], *two, row["about"]] for row, two in zip(rows, bits, strict=True)],
    )
    if any(row["key_bits"] is not None for row in rows):
        if any(row["kind"] == "preset" for row in rows):
            note(f"Python alone, chosen by the model's keys: {', '.join(AUTO_BITS)} (kvcal.cache, load_cache)")
        note(f"bits a value of {o.model}'s geometry; of another: --model")
