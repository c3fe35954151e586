"""The geometry of a config.json as it lies there, without Transformers, whose import takes seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvcal_artifacts.errors import ModelUnavailable

from . import configuration
from .geometry import Geometry
from .names import ModelSource

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

# Architectures whose config.json is read as it lies: where it leaves a field out, what Geometry.from_config takes
# instead is Transformers' own default. Of others Transformers is asked.
HEAD_DIM = ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "smollm3")  # hidden size over heads
UNTIED = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")  # embeddings and head are not one matrix
PLAIN = {*HEAD_DIM, *UNTIED, "gemma3_text"}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # as configs call how many there are
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def geometry(source: ModelSource) -> Geometry:
    """A model's geometry, from the catalogue or from config.json, read by Transformers where the file alone does not
    say all of it. Raises ModelUnavailable and UnsupportedModel as configuration.load_config does.
    """
    if source.entry is not None:
        return source.entry.geometry
    fields = _fields(source)
    if not _says_all(fields):
        return configuration.geometry(source)
    for name, needed in configuration.COUNTS.items():
        configuration.check_count(source, name, fields.get(name), needed)
    try:
        return Geometry.from_config(fields)
    except TypeError:  # Transformers says what is wrong with the field
        return configuration.geometry(source)


def experts(source: ModelSource) -> bool:
    """Whether the model has experts, of which each token's path reads a few: its weights are not known by its shape."""
    if source.entry is not None:
        return False
    fields = _fields(source)
    return any(fields.get(name) for name in EXPERTS)


def _fields(source: ModelSource) -> dict[str, Json]:
    """config.json, of the model's text part."""
    fields = configuration.config_fields(source)
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def _says_all(fields: Mapping[str, Json]) -> bool:
    kind = fields.get("model_type")
    if kind not in PLAIN or any(type(fields.get(name)) is not int for name in NEEDED):
        return False
    if kind == "gemma3_text" and not fields.get("layer_types"):
        return False
    has_head_dim = kind in HEAD_DIM or type(fields.get("head_dim")) is int
    return has_head_dim and (kind in UNTIED or isinstance(fields.get("tie_word_embeddings"), bool))


def quantised(source: ModelSource) -> str | None:
    """How the checkpoint's weights are quantised, by its config.json, as awq; None where they are not."""
    if source.entry is not None:
        return None
    config = configuration.config_fields(source).get("quantization_config")
    if not isinstance(config, dict):
        return None
    method = config.get("quant_method")
    return method if isinstance(method, str) else "an unnamed method"


class Stored(NamedTuple):
    """A folder's weights, by the headers of its files. numbers: of all tensors; bytes: that they take there."""

    numbers: int
    bytes: int


def stored_weights(folder: Path, label: str) -> Stored | None:
    """The weights that Transformers reads: those of the index, or model.safetensors, or else every file but bundles,
    adapters and Mistral's second copy. None where there are none. Raises ModelUnavailable for other content.
    """
    numbers = size = 0
    files = _weight_files(folder, label)
    for path in files:
        try:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, path.stat().st_size)))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            numbers += sum(math.prod(entry["shape"]) for entry in tensors)
            size += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelUnavailable(f"{label}: {path.name} is no safetensors file: its header cannot be read") from error
    return Stored(numbers, size) if files else None


def _weight_files(folder: Path, label: str) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelUnavailable(
                f"{label}: {index.name} is no index of weights: its weight_map cannot be read"
            ) from error
        return sorted(folder / name for name in names)
    if single.is_file():
        return [single]
    others = ("consolidated", "adapter")
    return [
        path
        for path in sorted(folder.glob("*.safetensors"))
        if not path.name.startswith(others) and not path.name.endswith(".kvcal.safetensors")
    ]
