"""Names that options take, from a file: nothing here imports torch.

names.json holds what `kvcal names` lists, with bits at the geometry of MODEL. A test compares it with what the codecs
count; `python -m kvcal.commands.names` writes it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TypedDict

MODEL = "llama-3.1-8b"
FILE = Path(__file__).with_name("names.json")
SUFFIX = ".kvcal.safetensors"  # of a bundle, as kvcal_artifacts.bundle has it
COMMANDS = {  # method -> the command that makes its bundles
    "aqua-kv": "fit-predictors",
    "vqkv": "train-codebooks",
    "mixkvq": "tune-thresholds",
    "squat": "measure-subspaces",
    "innerq": "fit-norms",
    "kvtuner": "tune-bits",
    "preset": "preset",
    "combine": "combine",
}

# key_bits, value_bits: stored per value; None: it depends on the text, or does not fit the model.
NameRow = TypedDict(  # noqa: UP013, `about` is a key of JSON and no name here
    "NameRow", {"kind": str, "name": str, "key_bits": float | None, "value_bits": float | None, "about": str}
)


def stored() -> list[NameRow]:
    """What FILE holds: all names, with bits at the geometry of MODEL."""
    rows: list[NameRow] = json.loads(FILE.read_text("utf-8"))
    return rows


@cache
def names_of(*kinds: str) -> tuple[str, ...]:
    """All names of these kinds (preset, codec, scheme, operation, device), in the file's order."""
    return tuple(row["name"] for row in stored() if row["kind"] in kinds)
