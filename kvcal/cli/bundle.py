"""`kvcal inspect` and `kvcal verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Device, Json, Random, Revision, Seed
from kvcal.cli.output import print_json, print_table

File = Annotated[Path, typer.Argument(help="A bundle, NAME.kvcal.safetensors.")]


def _selection(found: dict[str, float] | None) -> str:
    return "every token" if found is None else f"H2O, keep {found['keep']:g}, heavy {found['heavy']:g}"


def inspect(bundle: File, json: Json = False) -> None:
    """Show what a bundle holds: model, method, settings, metrics, codecs of each layer."""
    from kvcal.commands.bundles import run_inspect

    found = run_inspect(bundle)
    if json:
        print_json(found)
        return
    model, text = found["model"], found["provenance"].get("text", {})
    facts = {
        "bundle": found["bundle"],
        "sha256": found["sha256"],
        "bytes": found["bytes"],
        "made by": found["provenance"].get("tool"),
        "method": found["provenance"].get("method"),
        "settings": _listed(found["provenance"].get("settings", {})),
        "model": f"{model['architecture']}, {model['layers']} layers, {model['kv_heads']} x {model['head_dim']}",
        "weights": model["revision"],  # random:SEED where they are random
        "text": text.get("source"),
        "windows": ", ".join(f"{name} {value}" for name, value in found["windows"].items()),
        "frame": found["frame"],
        "token selection": _selection(found["selection"]),
        "bits a value": f"{found['bits_per_value']:.4f}"
        + (" (expected: blocks differ in size)" if found["bits_are"] == "expected" else ""),
        "resident bytes": found["resident_bytes"],
        "held-out": _listed({name: value for name, value in found["metrics"].items() if isinstance(value, float)}),
    }
    print_table(["what", "value"], facts.items())
    print_table(["layer", "keys", "values"], [row.values() for row in found["layers"]])


def _listed(fields: dict[str, Any]) -> str:
    """name=value, ...; floats to five digits."""
    shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in fields.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def verify(
    bundle: File,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Also: was it made for this model?")] = None,
    revision: Revision = None,
    random_weights: Random = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Check a bundle: format and every hash; with --model also that it was made for that model. Exit code 4 if not."""
    from kvcal.commands.bundles import run_verify

    found = run_verify(bundle, model, revision, device, random_weights, seed)
    if json:
        print_json(found)
    else:
        print(f"{found['bundle']}: good ({', '.join(found['checked'])})")
