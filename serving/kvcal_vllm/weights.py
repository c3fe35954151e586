"""Some key weights of a model in a folder, as fingerprints have them, without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from kvcal_artifacts.bundle import probed_layers

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PROBED = 8  # weights of a layer, as hf.key_probe takes them


def key_probes(folder: Path, layers: int) -> tuple[float, ...]:
    """The probe of a fingerprint: the first 8 weights of the last key channel, of the first and the last layer.

    Empty where the folder has no such weights as plain numbers in safetensors: fused or quantised ones, a model on the
    hub.
    """
    probes: list[float] = []
    for index in probed_layers(layers):
        row = _last_key_row(folder, f"layers.{index}.self_attn.k_proj.weight")
        if not row:
            return ()
        probes += row
    return tuple(probes)


def _last_key_row(folder: Path, end: str) -> list[float]:
    for path in _files(folder, end):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it has no __iter__
                if name == end or name.endswith(f".{end}"):
                    weight = file.get_slice(name)
                    if len(weight.get_shape()) != 2 or weight.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                        return []
                    return [float(f"{one:.6g}") for one in weight[-1:, :PROBED].float().flatten().tolist()]
    return []


def _files(folder: Path, end: str) -> list[Path]:
    """The files that may hold a tensor whose name ends so."""
    if (folder / INDEX).is_file():
        table = json.loads((folder / INDEX).read_text("utf-8")).get("weight_map", {})
        return sorted({folder / file for name, file in table.items() if name.endswith(end)})
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []
