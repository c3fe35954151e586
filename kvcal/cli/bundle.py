"""`kvcal inspect`, `kvcal verify` and `kvcal diff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from kvcal.cli.failure import DIFFERENT
from kvcal.cli.output import line, note, print_facts, print_json, print_open, print_table, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import DiffOptions, InspectOptions, VerifyOptions
from kvcal.report.quantities import folded


@command(InspectOptions)
def inspect(o: InspectOptions, typed: Typed) -> None:
    """Show what a bundle holds: model, method, settings, metrics, codecs of each layer, errors by layer and head."""
    from kvcal.commands.bundles import facts_of, run_inspect

    result = run_inspect(o, note, typed)
    if o.json:
        print_json(result)
        return
    print_facts(facts_of(result, o.wide), wide=o.wide)
    line()
    codecs = [list(row.values()) for row in result["layers"]]
    print_table(["layers", "keys", "values"], codecs if o.wide else folded(codecs), wide=o.wide)
    if result["head_errors"] is not None:
        _errors(result["head_errors"], o.wide)
    if o.plot is not None:
        print_open(o.plot)


def _errors(errors: dict[str, Any], wide: bool) -> None:
    """A row a layer: |x - decoded|^2 / |x|^2 of each kv head, keys and then values."""
    from kvcal.report.quantities import significant

    heads = max(len(row) for row in (*errors["key"], *errors["value"]) if row)
    columns = ["layer", *(f"{role} {head}" for role in ("keys", "values") for head in range(heads))]

    def cells(layer: int) -> list[str | None]:
        rows = [errors[role][layer] or [None] * heads for role in ("key", "value")]
        return [None if x is None else (f"{x:.5f}" if wide else significant(x)) for row in rows for x in row]

    line()
    wrapped(f"relative squared error by kv head, {errors['from']}:", wide=wide)
    print_table(columns, [[layer, *cells(layer)] for layer in range(len(errors["key"]))], wide=wide)


@command(VerifyOptions)
def verify(o: VerifyOptions, typed: Typed) -> None:
    """Check a bundle: format and every hash; with --model also that it was made for that model. Exit code 4 if not."""
    from kvcal.commands.bundles import run_verify

    result = run_verify(o, typed)
    if o.json:
        print_json(result)
    else:
        wrapped(f"{result['bundle']}: good ({', '.join(result['checked'])})", wide=o.wide)


SHOWN = 8  # differences of a section; --wide and --json have all


@command(DiffOptions)
def diff(o: DiffOptions, typed: Typed) -> None:
    """Show what differs between two bundles: model, settings, scheme, codecs, tensors, metrics. Exit code 7 if
    anything.
    """
    from kvcal.commands.bundles import run_diff

    differences = run_diff(o.a, o.b)
    if o.json:
        print_json(differences)
    else:
        print_differences(differences, o.wide)
    if not differences["same"]:
        raise typer.Exit(DIFFERENT)


def print_differences(differences: Mapping[str, Any], wide: bool = False) -> None:
    """Sections in order; in each what differs first. wide: all of it, values whole."""
    from kvcal.bundles.diff import SECTIONS, VALUE, phrase

    if differences["same"]:
        line("the same bytes")
        return
    for section in SECTIONS:
        rows = differences[section]
        if not rows:
            continue
        line(f"{section}: {len(rows)} {'difference' if len(rows) == 1 else 'differences'}")
        for row in rows if wide else rows[:SHOWN]:
            wrapped(f"  {phrase(row, None if wide else VALUE)}", indent="    ", wide=wide)
        if len(rows) > SHOWN and not wide:
            line(f"  … and {len(rows) - SHOWN} more (--wide has all)")
    if not any(differences[section] for section in SECTIONS):
        line("the files differ only in how they are laid out: every value is the same")
