"""Which weights a model has, in one word."""

from __future__ import annotations

from . import hub
from .configuration import config_path
from .files import WeightFiles, weight_files
from .names import ModelSource


def weights_revision(source: ModelSource, *, random_weights: bool, seed: int, files: WeightFiles | None = None) -> str:
    """Which weights these are: the hub's commit, a hash of the files, or `random:SEED`.

    The embedded model has `sha256:` of its packed file; a folder has what `file_hashes.content_revision` says. files:
    `weight_files` of the source, where they are known.
    """
    if random_weights:
        return f"random:{seed}"
    if source.kind == "hub":
        return hub.revision_of(config_path(source))
    from .file_hashes import content_revision, file_sha256

    files = files or weight_files(source)
    return f"sha256:{file_sha256(files.index)}" if source.kind == "embedded" else content_revision(files.shards)
