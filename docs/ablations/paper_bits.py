"""The column "paper's count" of the ablations, computed again from what a row is: nothing is measured.

    python docs/ablations/paper_bits.py [FILE.json ...]      # without files: all beside this program that have the column

It changes `paper_bits` in each file, says what it changed, and writes the tables (FILE.md) of recipes again. A second
call changes nothing. How papers count is the codecs' own matter (`Codec.paper_bits`); here is what a row's settings say
of them:

- without data: from the codecs; with predictors, subspaces or factors: as stored, if the backbones count so too; vq:
  kept;
- VQKV: the stages; KVTuner-like: stored bits less scales and zero points;
- MixKVQ: the channels of each tier. Where thresholds choose them, the row has those of its calibration text alone, and
  says so in `paper_bits_from`; rows that an evaluation has counted since stay as they are. Thresholds without
  calibration: null.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import run
import torch

import kvcal.cli.app  # noqa: F401, whose commands defaults_of asks
from kvcal.cli.defaults import defaults_of
from kvcal.methods.data_free import PRESETS, Preset
from kvcal.methods.mixkvq import MixKVQ
from kvcal.methods.registry import codec_maker
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.residual_vq import PAPER_CODE_BITS
from kvcal_artifacts.presets import divisor
from kvcal_artifacts.scheme import LayerCodecs

HERE = Path(__file__).parent
HEADS = {  # kv heads, head_dim
    "kvref-28m": (2, 64), "kvref-28m-twin": (2, 64), "tiny": (2, 64), "smollm2-135m": (3, 64),
    "qwen2.5-coder-0.5b": (2, 64),
    "gemma-3-270m": (1, 256),
}  # fmt: skip
OTHER_COUNT = ("turboquant", "mixkvq")  # backbones whose papers do not count what is stored
BUNDLES: dict[
    str, dict[str, Any]
] = {  # of combination-*.json, by the end of their names: docs/lab/methods.md has the commands
    "-aqua-kv": {"command": "fit-predictors", "options": {}},
    "-aqua-transform": {"command": "fit-predictors", "options": {"keys": "transform-2.5", "values": "transform-2"}},
    "-vqkv": {"command": "train-codebooks", "options": {"stages": "9,18,13"}},
    "-kvtuner": {"command": "tune-bits", "options": {"group": 128}},
}


def count(what: dict[str, Any], row: dict[str, Any], heads: tuple[int, int]) -> tuple[float | None, str | None]:
    """A row's bits per value as its paper counts, None where the row does not say; and where that comes from, if not from
    its settings. what: as run.py's keys have it.
    """
    told, options = row.get("told", {}), what["options"]
    stored = told.get("expected_bits_per_value", told.get("bits_per_value", row["bits_per_value"]))
    match what.get("command", "preset"):
        case "preset":
            return without_data(what, row, heads), None
        case "train-codebooks":
            if "paper_bits_per_value" in told:
                return told["paper_bits_per_value"], None
            return PAPER_CODE_BITS * sum(map(int, options["stages"].split(","))) / (2 * heads[1]), None
        case "tune-bits":
            group = options.get("group", defaults_of("tune-bits")["group"])
            return round(stored - (32 / group + 32 / divisor(group, heads[1])) / 2, 6), None
        case "tune-thresholds":
            return tiers(what, row, stored, heads)
        case "fit-predictors" | "fit-norms" | "measure-subspaces":
            names = [options[name] for name in ("backbone", "keys", "values", "first_layer") if options.get(name)]
            if any(name.startswith("vq-") for name in names):
                return row["paper_bits"], None  # 16 bits a code: counted by the evaluation
            return (None if any(name.startswith(OTHER_COUNT) for name in names) else stored), None
    raise SystemExit(f"row of {what['command']}: no rule for how its paper counts")


def without_data(what: dict[str, Any], row: dict[str, Any], heads: tuple[int, int]) -> float | None:
    chosen = PRESETS[what["preset"]] if "preset" in what else Preset(what["keys"], what["values"])
    if isinstance(chosen, MixKVQ):
        told_stored = row["paper_bits"] == pair_of(chosen, heads).bits_per_value()
        return None if told_stored else row["paper_bits"]  # what an evaluation alone knows
    shape = Shape(*heads, what["options"].get("block", chosen.block))
    pair = LayerCodecs(codec_maker(chosen.key)(shape, "key"), codec_maker(chosen.value)(shape, "value"))
    if "keep" not in what and abs(pair.bits_per_value() - row["bits_per_value"]) > 1e-6:
        raise SystemExit(f"{what}: {pair.bits_per_value()} bits by its codecs, {row['bits_per_value']} in the row")
    return pair.paper_bits()


def tiers(
    what: dict[str, Any], row: dict[str, Any], stored: float, heads: tuple[int, int]
) -> tuple[float | None, str | None]:
    """Eq. 17 of the channels that the row's command told."""
    fixed = "full" in what["options"]
    if not fixed and "paper_bits_from" not in row and abs(row["paper_bits"] - stored) > 0.01:
        return row["paper_bits"], None  # counted by the evaluation: not what is stored
    channels = row["told"]["full_channels"], row["told"]["four_bit_channels"]
    return round(pair_of(MixKVQ(), heads, channels).paper_bits(), 6), None if fixed else "calibration"


def pair_of(method: MixKVQ, heads: tuple[int, int], channels: tuple[float, float] | None = None) -> LayerCodecs:
    shape = Shape(*heads, method.block)
    return LayerCodecs(method.key_codec(shape, torch.float32, channels), method.value_codec(shape))


def what_of(key: str | None, row: dict[str, Any]) -> dict[str, Any]:
    """What a row is: run.py's key, or, in a file of `kvcal compare`, what its name says."""
    if key is not None:
        made: dict[str, Any] = json.loads(key)
        return made
    for end, what in BUNDLES.items():
        if row["name"].endswith(end):
            return what
    keys, _, values = row["name"].partition(" + ")
    block = {"block": 128} if "g128" in row["name"] else {}
    return {"keys": keys, "values": values or keys, "options": block}


def recount(found: dict[str, Any]) -> list[str]:
    """Changes the rows' paper_bits; says which."""
    said, rows = [], found["rows"]
    pairs = rows.items() if isinstance(rows, dict) else [(None, row) for row in rows]
    for key, row in pairs:
        if "paper_bits" not in row:
            continue
        bits, source = count(what_of(key, row), row, HEADS[model_of(found, row)])
        if bits is not None and row["paper_bits"] is not None and abs(bits - row["paper_bits"]) < 1e-6:
            bits = row["paper_bits"]
        if bits != row["paper_bits"]:
            said.append(f"{key or row['name']}: {row['paper_bits']} -> {bits}")
        row["paper_bits"] = bits
        if source is not None:
            row["paper_bits_from"] = source
    return said


def model_of(found: dict[str, Any], row: dict[str, Any]) -> str:
    name = Path(str(found["settings"]["model"])).name
    if name not in HEADS:
        raise SystemExit(f"model {name!r}: its kv heads and head_dim are not known here; known are {', '.join(HEADS)}")
    return name


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.json")):
        found = json.loads(path.read_text())
        if said := recount(found):
            run.write(path, found)
        for line in said:
            print(f"{path.name}: {line}")
        recipe, table = HERE / f"{path.stem.split('-kvref')[0]}.toml", path.with_suffix(".md")
        if recipe.exists() and table.exists():
            table.write_text(run.markdown(tomllib.loads(recipe.read_text()), found))


if __name__ == "__main__":
    main()
