"""`kvcal inspect` and `kvcal verify`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.errors import UsageError

from ..workbench import check_bundle


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_inspect(path: Path) -> dict[str, Any]:
    """A bundle's header in short, every hash checked."""
    bundle = load_bundle(path)
    scheme = bundle.scheme
    rows = [
        {"layer": i, "key": pair.key.describe(), "value": pair.value.describe()}
        if pair
        else {"layer": i, "key": "skipped", "value": scheme.skipped[i]}
        for i, pair in enumerate(scheme.layers)
    ]
    return {
        "bundle": str(path),
        "sha256": file_sha256(path),
        "bytes": path.stat().st_size,
        "model": asdict(bundle.fingerprint),
        "windows": asdict(scheme.windows),
        "frame": scheme.frame,
        "selection": None if scheme.selection is None else asdict(scheme.selection),
        "bits_per_value": scheme.bits_per_value(),
        "bits_are": "expected" if scheme.ragged else "exact",
        "resident_bytes": scheme.resident_bytes(),
        "provenance": bundle.provenance,
        "metrics": bundle.metrics,
        "layers": rows,
    }


def run_verify(
    path: Path, model: str | None, revision: str | None, device: str, random_weights: bool, seed: int
) -> dict[str, Any]:
    """Format and hashes; with a model also that the bundle was made for it."""
    if model is None and (revision is not None or random_weights):
        raise UsageError("--revision and --random-weights say which weights of --model are meant: give --model too")
    bundle = load_bundle(path)
    checks = ["format", "header hash", "tensor hashes", "tensors finite", "codecs", "layer chain"]
    if model is not None:
        check_bundle(bundle, model, revision, device=device, random_weights=random_weights, seed=seed)
        checks.append(f"model {model}")
    return {"bundle": str(path), "sha256": file_sha256(path), "ok": True, "checked": checks}
