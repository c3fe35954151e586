"""`kvcal inspect`, `kvcal verify` and `kvcal diff`."""

from __future__ import annotations

from typing import Any

import typer

from kvcal.cli.failure import DIFFERENT
from kvcal.cli.output import line, note, print_json, print_table
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import DiffOptions, InspectOptions, VerifyOptions


def _selection(selection: dict[str, float] | None) -> str:
    return "every token" if selection is None else f"H2O, keep {selection['keep']:g}, heavy {selection['heavy']:g}"


@command(InspectOptions)
def inspect(o: InspectOptions, typed: Typed) -> None:
    """Show what a bundle holds: model, method, settings, metrics, codecs of each layer, errors by layer and head."""
    from kvcal.commands.bundles import run_inspect

    result = run_inspect(o, note, typed)
    if o.json:
        print_json(result)
        return
    _facts(result)
    print_table(["layer", "keys", "values"], [row.values() for row in result["layers"]])
    if result["head_errors"] is not None:
        _errors(result["head_errors"])


def _errors(errors: dict[str, Any]) -> None:
    """A row a layer: |x - decoded|^2 / |x|^2 of each kv head, keys and then values."""
    heads = max(len(row) for row in (*errors["key"], *errors["value"]) if row)
    columns = ["layer", *(f"{role} {head}" for role in ("keys", "values") for head in range(heads))]

    def cells(layer: int) -> list[str | None]:
        rows = [errors[role][layer] or [None] * heads for role in ("key", "value")]
        return [None if x is None else f"{x:.5f}" for row in rows for x in row]

    line()
    line(f"relative squared error by kv head, {errors['from']}:")
    print_table(columns, [[layer, *cells(layer)] for layer in range(len(errors["key"]))])


def _facts(inspected: dict[str, Any]) -> None:
    from kvcal.evaluate.errors import head_errors_fault
    from kvcal.report.records import Table

    model, record, metrics = inspected["model"], Table(inspected["provenance"]), Table(inspected["metrics"])
    text, settings = record.table("text"), record.table("settings")
    facts = {
        "bundle": inspected["bundle"],
        "sha256": inspected["sha256"],
        "bytes": inspected["bytes"],
        "made by": record.said("tool"),
        "method": record.said("method"),
        "settings": settings.fault or _listed(settings),
        "model": f"{model['architecture']}, {model['layers']} layers, {model['kv_heads']} x {model['head_dim']}",
        "weights": model["revision"],  # random:SEED where they are random
        "text": text.fault or text.said("source"),
        "windows": ", ".join(f"{name} {value}" for name, value in inspected["windows"].items()),
        "frame": inspected["frame"],
        "token selection": _selection(inspected["selection"]),
        "bits a value": f"{inspected['bits_per_value']:.4f}"
        + (" (expected: blocks differ in size)" if inspected["bits_are"] == "expected" else ""),
        "resident bytes": inspected["resident_bytes"],
        "held-out": _listed(Table({name: value for name, value in metrics.fields.items() if isinstance(value, float)})),
    }
    if inspected["head_errors"] is None and (fault := head_errors_fault(inspected["metrics"])) is not None:
        facts["errors by head"] = fault
    print_table(["what", "value"], facts.items())


def _listed(fields: Any) -> str:
    """name=value, ... of a kvcal.report.records.Table; floats to five digits."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


@command(VerifyOptions)
def verify(o: VerifyOptions, typed: Typed) -> None:
    """Check a bundle: format and every hash; with --model also that it was made for that model. Exit code 4 if not."""
    from kvcal.commands.bundles import run_verify

    result = run_verify(o, typed)
    if o.json:
        print_json(result)
    else:
        line(f"{result['bundle']}: good ({', '.join(result['checked'])})")


SHOWN = 8  # differences of a section; --json has all


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
        print_differences(differences)
    if not differences["same"]:
        raise typer.Exit(DIFFERENT)


def print_differences(differences: dict[str, Any]) -> None:
    """Sections in order; in each what differs first."""
    from kvcal.bundles.diff import SECTIONS, phrase

    if differences["same"]:
        line("the same bytes")
        return
    for section in SECTIONS:
        rows = differences[section]
        if not rows:
            continue
        line(f"{section}: {len(rows)} {'difference' if len(rows) == 1 else 'differences'}")
        for row in rows[:SHOWN]:
            line(f"  {phrase(row)}")
        if len(rows) > SHOWN:
            line(f"  … and {len(rows) - SHOWN} more (--json has all)")
    if not any(differences[section] for section in SECTIONS):
        line("the files differ only in how they are laid out: every value is the same")
