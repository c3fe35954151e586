"""A model's files on this machine: tokenizer, shards and their index, and which revision they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import ModelUnavailable

from . import hub
from .configuration import check_config, config_path
from .hub import INDEX, SAFETENSORS, one_line
from .names import ModelSource
from .quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKED = "packed.safetensors"
MOST_NAMES = 6  # of files that a message shows


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelUnavailable, for a config.json that cannot be used first."""
    check_config(source)
    return read_tokenizer(source)


def read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer of a model whose config.json has been checked. Raises ModelUnavailable."""
    from transformers import AutoTokenizer

    if source.kind == "hub":
        assert source.hub_id is not None
        sha = hub.revision_of(config_path(source))
        folder = hub.fetch_tokenizer(source.hub_id, sha)
    else:
        assert source.folder is not None
        folder = source.folder
    if not any((folder / name).is_file() for name in hub.TOKENIZER_FILES):
        raise ModelUnavailable(_no_tokenizer(source, folder))
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged JSON, unknown class, a missing optional package
        if not any((folder / name).is_file() for name in hub.VOCABULARIES):  # a template or settings alone
            raise ModelUnavailable(_no_tokenizer(source, folder)) from error
        raise ModelUnavailable(f"{source.label}: its tokenizer cannot be read ({one_line(error)})") from error


def _no_tokenizer(source: ModelSource, folder: Path) -> str:
    """What a folder without a vocabulary has, and what to do."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    return (
        f"{source.label}: no tokenizer in {folder}, which holds {shown or 'no file'}; "
        "needed is tokenizer.json or tokenizer.model: copy it from where the model is from, or write it with "
        "tokenizer.save_pretrained(...)"
    )


def local_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer where it lies on this machine for certain; with random weights no model needs one.

    The model's config.json must have been checked, as for `read_tokenizer`.
    """
    has = source.folder is not None and any((source.folder / name).is_file() for name in hub.TOKENIZER_FILES)
    return read_tokenizer(source) if has else None


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


def weights_revision(source: ModelSource, *, random_weights: bool, seed: int) -> str:
    """Which weights these are: the hub's commit, a hash of the files, or `random:SEED`.

    The embedded model has `sha256:` of its packed file; a folder has what `file_hashes.content_revision` says.
    """
    if random_weights:
        return f"random:{seed}"
    if source.kind == "hub":
        return hub.revision_of(config_path(source))
    from .file_hashes import content_revision, file_sha256

    if source.kind == "embedded":
        return f"sha256:{file_sha256(embedded_weights(source))}"
    folder = weights_folder(source)
    return content_revision(folder / shard for shard in set(shard_names(source, weights_index(source))))
