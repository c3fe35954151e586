"""Whether a change of source changes stored bytes: bundles of every preset and codec on `tiny`, and the blocks that
they pack.

    python tests/support/golden.py make FOLDER      # in the checkout whose code makes them; what is there stays
    python tests/support/golden.py compare BEFORE AFTER

FOLDER/NAME.kvcal.safetensors is the bundle; hashes.json has, for each, the hash of the file and of every packed tensor
after 160 tokens of fixed random ids in one call and 40 in three more, and of the last logits. Nothing but the command
line and `load_bundle`, `load_cache` is used, so that old and new code can make the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SUFFIX = ".kvcal.safetensors"
CALLS = (160, 32, 1, 7)
FIT = ["--windows", "6", "--length", "196", "--sink", "4", "--recent", "32", "--block", "32"]
FITTED = {  # one bundle for each command that fits
    "aqua-kv": ["fit-predictors", *FIT],
    "aqua-kv-vq": ["fit-predictors", *FIT, "--residual", "vq-2-k16"],
    "norms": ["fit-norms", *FIT],
    "subspaces": ["measure-subspaces", *FIT, "--holdout", "2"],
    "bits": ["tune-bits", *FIT, "--holdout", "2", "--max-bits", "5"],
    "codebooks": ["train-codebooks", *FIT, "--stages", "2,2,2", "--sizes", "16,16,16", "--vectors", "600",
                  "--max-iterations", "5"],
    "thresholds": ["tune-thresholds", *FIT, "--holdout", "2", "--trials", "2"],
}  # fmt: skip


def names(kind: str) -> list[str]:
    listed = subprocess.run([sys.executable, "-m", "kvcal", "names", kind, "--json"], capture_output=True, check=True)
    return [row["name"] for row in json.loads(listed.stdout)["names"] if not re.search("BITS|CODEC|FULL", row["name"])]


def commands() -> dict[str, list[str]]:
    short = ["--no-check", "--recent", "32"]
    made = {f"preset-{name}": ["preset", name, *short] for name in names("preset")}
    made |= {f"codec-{name}": ["preset", "--keys", name, "--values", name, *short] for name in names("codec")}
    return made | FITTED


def make(folder: Path) -> None:
    import torch
    from typer.testing import CliRunner

    from kvcal.cli.app import app

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    hashes: dict[str, Any] = {}
    for name, command in commands().items():
        file = folder / f"{name}{SUFFIX}"
        if not file.exists():
            result = CliRunner().invoke(app, ["-q", *command, "--model", "tiny", "--output", str(file)])
            if result.exit_code:
                hashes[name] = {"refused": result.exit_code}
                continue
        hashes[name] = {"file": hashlib.sha256(file.read_bytes()).hexdigest()} | packed(file)
    (folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")
    print(f"{len(hashes)} bundles, {sum('refused' in row for row in hashes.values())} refused")


def packed(file: Path) -> dict[str, str]:
    """Hashes of each layer's packed tensors, by name, and of the last call's logits."""
    import torch

    from kvcal_artifacts import load_bundle, load_cache

    model = tiny()
    cache = load_cache(load_bundle(file), model)
    ids = torch.randint(0, 4096, (1, sum(CALLS)), generator=torch.Generator().manual_seed(0))
    found: dict[str, str] = {}
    with torch.no_grad():
        for part in ids.split(CALLS, 1):
            logits = model(part, past_key_values=cache).logits
    for index, layer in enumerate(cache.layers):
        for role, tensors in zip(("keys", "values"), getattr(layer, "packed", ({}, {})), strict=True):
            for name, tensor in sorted(tensors.items()):
                dense = getattr(tensor, "items", tensor)
                data = dense.contiguous().view(torch.uint8) if isinstance(dense, torch.Tensor) else None
                if data is not None:
                    found[f"{index} {role} {name}"] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    cache.close()
    return found | {"logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest()}


def tiny() -> Any:
    """The embedded model, by whichever module of this code base or of an older one loads it."""
    import importlib

    for module in ("kvcal.models.loading", "kvcal.models"):
        try:
            loading = importlib.import_module(module)
            names_module = importlib.import_module(
                "kvcal.models.names" if module.endswith("loading") else "kvcal.models"
            )
            return loading.load_model(names_module.resolve("tiny"), dtype="float32", device="cpu").model
        except (ImportError, AttributeError):
            continue
    raise SystemExit("no module loads tiny")


def compare(before: Path, after: Path) -> int:
    old, new = (json.loads((folder / "hashes.json").read_text()) for folder in (before, after))
    differ = [name for name in old if new.get(name) != old[name]]
    for name in differ:
        keys = [key for key in old[name] if new.get(name, {}).get(key) != old[name][key]]
        print(f"{name}: {', '.join(keys[:6])}")
    print(f"{len(old)} before, {len(new)} after: {len(differ)} differ")
    return int(bool(differ) or old.keys() != new.keys())


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
