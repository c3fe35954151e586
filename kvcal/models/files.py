"""Files of a model's weights on this machine: shards and their index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcal_artifacts.errors import ModelUnavailable

from . import hub
from .configuration import config_path
from .hub import INDEX, SAFETENSORS
from .names import ModelSource

PACKED = "packed.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """A model's weights: the file that says which tensor lies where, and the shards, which it may be itself."""

    index: Path
    shards: frozenset[Path]


def weight_files(source: ModelSource) -> WeightFiles:
    """The files of a model's weights, downloaded if need be. Raises ModelUnavailable where one is missing."""
    if source.kind == "embedded":
        path = embedded_weights(source)
        return WeightFiles(path, frozenset({path}))
    folder, index = weights_folder(source), weights_index(source)
    return WeightFiles(folder / index.name, frozenset(folder / shard for shard in shard_names(source, index)))


def embedded_weights(source: ModelSource) -> Path:
    assert source.folder is not None
    path = source.folder / PACKED
    if not path.is_file():
        raise ModelUnavailable(f"{source.name}: {path} is missing; install kvcal again")
    return path


def weights_folder(source: ModelSource) -> Path:
    """A local folder with config.json and every shard, downloaded if need be."""
    index = weights_index(source)
    shards = sorted(set(shard_names(source, index)))
    if source.kind == "hub":
        assert source.hub_id is not None
        return hub.fetch_weights(source.hub_id, index.parent.name, shards)
    for shard in shards:
        if not (index.parent / shard).is_file():
            raise ModelUnavailable(f"{source.label}: {shard} is missing, though {INDEX} names it")
    return index.parent


def weights_index(source: ModelSource) -> Path:
    """model.safetensors.index.json, or model.safetensors where there is but one file."""
    if source.kind == "hub":
        assert source.hub_id is not None
        return hub.fetch_index(source.hub_id, hub.revision_of(config_path(source)))
    assert source.folder is not None
    for name in (INDEX, SAFETENSORS):
        if (source.folder / name).is_file():
            return source.folder / name
    pickled = next(source.folder.glob("*.bin"), None)
    what = f"only {pickled.name}, which is pickled: convert it" if pickled else "no weights"
    raise ModelUnavailable(f"{source.label}: {what}; expected {SAFETENSORS} or {INDEX}")


def shard_names(source: ModelSource, index: Path) -> list[str]:
    if index.name != INDEX:
        return [index.name]
    from .weights import shard_map

    return list(shard_map(source.label, index).values())
