"""`kvcal inspect`, `kvcal verify` and `kvcal diff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from kvcal.cli.failure import DIFFERENT
from kvcal.cli.output import folded, line, note, print_facts, print_json, print_open, print_table, wrapped
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
    _facts(result, o.wide)
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


def _facts(inspected: dict[str, Any], wide: bool) -> None:
    from kvcal.evaluate.errors import head_errors_fault
    from kvcal.report.records import Table

    model, record, metrics = inspected["model"], Table(inspected["provenance"]), Table(inspected["metrics"])
    text, settings = record.table("text"), record.table("settings")
    facts = {
        "bundle": inspected["bundle"],
        "sha256": inspected["sha256"],
        "bytes": inspected["bytes"],
        "made_by": record.display("tool"),
        "method": record.display("method"),
        "settings": settings.fault or _listed(settings, wide),
        "model": f"{model['architecture']}, {model['layers']} layers, {model['kv_heads']} x {model['head_dim']}",
        "weights": model["revision"],  # random:SEED where they are random
        "text": text.fault or text.display("source"),
        "windows": ", ".join(f"{name} {value}" for name, value in inspected["windows"].items()),
        "frame": inspected["frame"],
        "tokens": _selection(inspected["selection"]),
        "bits_per_value": inspected["bits_per_value"],
        "bits_are": "expected: blocks differ in size" if inspected["bits_are"] == "expected" else None,
        "resident_bytes": inspected["resident_bytes"],
        "codecs_of": _packages(inspected["packages"]),
        "held-out": {name: value for name, value in metrics.fields.items() if isinstance(value, float)},
    }
    if inspected["head_errors"] is None and (fault := head_errors_fault(inspected["metrics"])) is not None:
        facts["errors_by_head"] = fault
    print_facts(facts, wide=wide)


def _packages(origins: Mapping[str, Mapping[str, str | None]]) -> str | None:
    """Codecs of other packages, as "acme-float8 (kvcal-acme 1)"; None where there are none."""
    each = (f"{name} ({origin['package']} {origin['version'] or 'not installed'})" for name, origin in origins.items())
    return ", ".join(each) or None


def _listed(fields: Any, wide: bool) -> str:
    """name=value, ... of a kvcal.report.records.Table, as options are given. wide: also what is empty or off."""
    shown = {name: value for name, value in fields.items() if wide or value not in ("", [], None, False)}
    return ", ".join(f"{name}={_option(value)}" for name, value in shown.items())


def _option(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


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
