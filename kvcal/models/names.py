"""What `--model` names: a short name, a hub id or a local folder. Needs neither torch nor a network."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcal_artifacts.errors import ModelUnavailable, UsageError
from kvcal_artifacts.files import existing_path, kind_of

from ..report.suggest import nearest
from .catalogue import ALIASES, BY_HUB_ID, CATALOGUE, TINY, ModelEntry

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `name` is what the user gave, the short name where there is one."""

    kind: Literal["embedded", "hub", "folder"]
    name: str
    hub_id: str | None = None
    folder: Path | None = None  # also of the embedded model
    revision: str | None = None  # as asked for; the one loaded is LoadedModel.revision
    entry: ModelEntry | None = None

    @property
    def label(self) -> str:
        """The name for messages: the short name and, where it differs, what it stands for."""
        return f"{self.name} ({self.hub_id})" if self.hub_id and self.hub_id != self.name else self.name

    @property
    def public(self) -> str:
        """The name for files that others read: `name`, but of a folder its last part, for a path may tell who the user
        is.
        """
        return self.stem if self.kind == "folder" else self.name

    @property
    def stem(self) -> str:
        """The name for file names: `llama-3.2-3b`, or the last part of a hub id or of a path."""
        if self.folder is not None and self.kind == "folder":
            return self.folder.resolve().name
        return self.name.rpartition("/")[2].lower()


def resolve(name: str, revision: str | None = None) -> ModelSource:
    """A short name, an existing folder, or a hub id `org/name`, in this order."""
    key = name.strip().lower()
    entry = CATALOGUE.get(ALIASES.get(key, key))
    if entry is not None:
        return _named(entry, revision)
    path = existing_path(name)
    if path is not None and path.is_dir():
        return _folder(name, path, revision)
    if path is not None:
        raise ModelUnavailable(f"model {name!r} is a file: give the folder that holds its config.json")
    if _looks_like_path(name):
        raise ModelUnavailable(f"model {name!r}: no such folder")
    if HUB_ID.fullmatch(name):
        return ModelSource("hub", name, hub_id=name, revision=revision, entry=BY_HUB_ID.get(name))
    raise ModelUnavailable(_unknown(name))


def _named(entry: ModelEntry, revision: str | None) -> ModelSource:
    if entry.hub_id is None:
        _no_revision(entry.name, revision)
        return ModelSource("embedded", entry.name, folder=TINY, entry=entry)
    return ModelSource("hub", entry.name, hub_id=entry.hub_id, revision=revision, entry=entry)


def _folder(name: str, path: Path, revision: str | None) -> ModelSource:
    _no_revision(name, revision)
    if not (path / "config.json").exists():
        raise ModelUnavailable(f"folder {name} holds no config.json: it is not a model")
    for entry in path.iterdir():  # Transformers looks for many names, and would wait for a pipe
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise ModelUnavailable(f"folder {name} holds {entry.name}, {kind_of(entry.stat().st_mode)}: remove it")
    if not (path / "config.json").is_file():
        raise ModelUnavailable(f"folder {name} holds config.json, a folder: remove it")
    return ModelSource("folder", name, folder=path)


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise UsageError(f"--revision {revision}: only models on the hub have revisions, {name} is local")


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def _unknown(name: str) -> str:
    near = nearest(name, [*CATALOGUE, *ALIASES])
    hint = f"did you mean {', '.join(near)}? Else" if near else "`kvcal models` lists the short names;"
    return f"unknown model {name!r}: {hint} a hub id reads org/name, a folder must hold a config.json"
