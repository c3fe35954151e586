"""A model's config.json: its geometry, and whether kvcal supports such a model, before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import ModelUnavailable, UnsupportedModel
from kvcal_artifacts.files import read_text

from ..report.records import kind_of as json_kind
from . import hub
from .catalogue import ModelEntry, paper_presets
from .geometry import Geometry
from .hub import one_line
from .names import ModelSource
from .quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from kvcal_artifacts.checked import Json

    from .structure import CausalLM


def geometry(source: ModelSource, *, download: bool = True) -> Geometry:
    """Shapes alone. From the catalogue where the model is in it, else from its config.json."""
    if source.entry is not None:
        return source.entry.geometry
    if source.kind == "hub" and not download:
        raise ModelUnavailable(f"{source.label} is not in `kvcal models`: its geometry needs a download")
    fields = _text_config(load_config(source)).to_dict()
    for name, needed in COUNTS.items():
        check_count(source, name, fields.get(name), needed)
    try:
        return Geometry.from_config(fields)
    except (KeyError, TypeError) as error:
        raise ModelUnavailable(
            f"{source.label}: its config.json has no {one_line(error)}; kvcal needs a decoder-only model"
        ) from error


COUNTS = {  # of a config.json -> whether there is no default where it is null or missing, which from_config says itself
    "num_hidden_layers": True,
    "num_attention_heads": True,
    "num_key_value_heads": False,
    "head_dim": False,
}


def check_count(source: ModelSource, name: str, value: object, needed: bool) -> None:
    if value is None or (type(value) is int and value >= 1):
        return
    raise ModelUnavailable(
        f"{source.label}: {name} of its config.json is {one_line(repr(value))}, must be a whole number from 1"
        f"{'' if needed else ', or null'}; correct the file or give another --model"
    )


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def presets(source: ModelSource) -> dict[str, dict[str, int]]:
    """method -> the settings its paper used, as far as this model admits them."""
    return source.entry.presets if source.entry is not None else paper_presets(geometry(source))


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The Transformers config; `_commit_hash` is set for a hub model."""
    from transformers import AutoConfig

    folder = config_path(source).parent
    _object(source, folder / "config.json")
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a broken file, an unknown model type, a field out of range
        raise ModelUnavailable(
            f"{source.label}: its config.json cannot be used ({one_line(error)}); remote code is never run"
        ) from error
    config._commit_hash = hub.revision_of(folder / "config.json") if source.kind == "hub" else None
    fields = vars(_text_config(config))
    for name, needed in COUNTS.items():
        if fields.get(name) is not None:
            check_count(source, name, fields[name], needed)
    check_supported(source.label, config)
    return config


def _object(source: ModelSource, path: Path) -> dict[str, Json]:
    """The fields of a config.json. Raises ModelUnavailable where it holds no object: Transformers speaks of a missing
    field then.
    """
    try:
        content: Json = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{source.label}: its config.json cannot be used ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(
            f"{source.label}: its config.json cannot be used (it holds {json_kind(content)}, must hold a table of "
            "settings); "
            "put the model's own there"
        )
    return content


def check_config(source: ModelSource, *, random_weights: bool = False) -> None:
    """Raises ModelUnavailable or UnsupportedModel for a config that builds no model; reads config.json at most.

    Comes before tokenizer and text: Transformers reads config.json for a tokenizer, too, and would blame the tokenizer.
    """
    if random_weights:
        geometry_config(source)
    else:
        load_config(source)


def check_supported(label: str, config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel, before any weights are read, with the reason that every command gives."""
    key = config.to_json_string()
    if key not in _REASONS:
        _REASONS[key] = _unsupported(config)
    if (why := _REASONS[key]) is not None:
        raise UnsupportedModel(f"{label}: {config.model_type}: {why}")


_REASONS: dict[str, str | None] = {}  # by config


def _unsupported(config: PreTrainedConfig) -> str | None:
    import torch

    from kvcal_artifacts import hf

    from .structure import empty_model

    why = hf.unsupported_config(config)
    return hf.unsupported(empty_model(config, torch.float32)) if why is None else why


def structure(source: ModelSource, *, random_weights: bool = False) -> CausalLM:
    """The model without its weights, on the meta device: reads config.json at most. Raises as `check_config`."""
    import torch

    from .structure import empty_model

    return empty_model(geometry_config(source) if random_weights else load_config(source), torch.float32)


def config_path(source: ModelSource) -> Path:
    if source.kind == "hub":
        assert source.hub_id is not None
        return hub.fetch_config(source.hub_id, source.revision)
    assert source.folder is not None
    return source.folder / "config.json"


def catalogue_config(entry: ModelEntry) -> PreTrainedConfig:
    """The Transformers config of a catalogue entry, built without any file of the hub."""
    from transformers import AutoConfig

    fields = entry.config_fields()
    config: PreTrainedConfig = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    return config


def geometry_config(source: ModelSource) -> PreTrainedConfig:
    """The config for random weights: the catalogue's for a hub model in it, so nothing is downloaded."""
    if source.kind == "hub" and source.entry is not None:
        return catalogue_config(source.entry)
    return load_config(source)


def config_fields(source: ModelSource) -> dict[str, Json]:
    """The raw config.json of a source, as it lies there. Raises ModelUnavailable where it holds no object."""
    return _object(source, config_path(source))
