"""What a bundle depends on, stated by content: its model, text, settings and the code; and what of it changed since."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.bundle.canonical import canonical, sha256_text

from ..models import hub
from ..models.file_hashes import file_sha256
from ..models.names import resolve
from ..models.revision import weights_revision
from ..report.version import __version__
from ..text import documents, hub_datasets, sources
from .options import FROM_MODEL, HOW, NOT_IN_RECIPE, BuiltOptions, TuneThresholdsOptions
from .shared_options import WeightsOptions

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

IN_IDENTITY = ("text", "other_text", "recipe", "device", "tasks_path", "random_weights")  # stated by content instead


def model_identity(o: WeightsOptions) -> dict[str, Json]:
    """The weights' revision and, of a folder, a hash of its other files: config and tokenizer decide bytes too."""
    source = resolve(o.model, o.revision)
    identity: dict[str, Json] = {
        "name": source.stem,
        "revision": weights_revision(source, random_weights=o.random_weights, seed=o.seed),
    }
    if source.folder is not None:
        names = [*hub.TOKENIZER_FILES, "config.json"]
        files = [source.folder / name for name in dict.fromkeys(names) if (source.folder / name).is_file()]
        identity["files"] = files_sha256(files)
    return identity


def files_sha256(files: Iterable[Path]) -> str:
    """The SHA-256 over the names and hashes of files."""
    listed = [[path.name, file_sha256(path)] for path in files]
    return sha256_text(canonical(listed))


def text_identity(origin: str, column: str | None, earlier: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """Where a text comes from and its content's hash; of a hub data set its commit, or, offline, the `earlier` one."""
    source = sources.resolve_text(origin, column=column)
    if source.dataset is not None:
        if not hub.reachable() and earlier is not None and earlier.get("source") == source.label:
            return dict(earlier)
        return {"source": source.label, "commit": hub_datasets.dataset_commit(source)}
    assert source.path is not None
    return {"source": source.label, "sha256": files_sha256(documents.source_files(source))}


def code_identity() -> dict[str, str]:
    """Versions, and a hash of the sources that can decide a byte: not of the command line, nor of reports."""
    import torch
    import transformers

    return {
        "kvcal": __version__,
        "source": _source_hash(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


@cache
def _source_hash() -> str:
    """The hash of the sources when a process first asks: it runs what it imported, not what comes later."""
    import kvcal_artifacts
    import kvcal_kernels

    digest = hashlib.sha256()
    roots = {"kvcal": Path(__file__).parents[1]}
    roots |= {package.__name__: Path(str(package.__file__)).parent for package in (kvcal_artifacts, kvcal_kernels)}
    for package, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(("cli/", "report/", "demo/")):
                digest.update(f"{package}/{name}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def settings_identity(o: BuiltOptions) -> dict[str, Json]:
    """Every option that may decide a byte and is not stated by content elsewhere."""
    excluded = {*FROM_MODEL, *NOT_IN_RECIPE, *HOW, *IN_IDENTITY}
    settings: dict[str, object] = {name: value for name, value in o.by_name().items() if name not in excluded}
    if isinstance(o, TuneThresholdsOptions) and o.tasks_path is not None:
        settings["tasks"] = files_sha256(sorted(path for path in o.tasks_path.rglob("*") if path.is_file()))
    return dict(json.loads(json.dumps(settings, default=list)))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Why inputs that differ differ, in a few words."""
    lines = [
        f"the {name.replace('_', ' ')} changed" for name in ("model", "text", "other_text") if _changed(old, new, name)
    ]
    settings = (_inputs(old, "settings"), _inputs(new, "settings"))
    lines += [
        f"{name}: {settings[0].get(name)} -> {settings[1].get(name)}"
        for name in sorted({*settings[0], *settings[1]})
        if settings[0].get(name) != settings[1].get(name)
    ]
    code = (_inputs(old, "code"), _inputs(new, "code"))
    versions = [name for name in code[1] if name != "source" and code[0].get(name) != code[1][name]]
    lines += [f"{name} {code[0].get(name)} -> {code[1][name]}" for name in versions]
    if not versions and code[0] != code[1]:
        lines.append("kvcal's code changed")
    if _changed(old, new, "device"):
        lines.append(f"device {old.get('device')} -> {new.get('device')}")
    cpu = (_inputs(old, "cpu"), _inputs(new, "cpu"))
    lines += [
        f"the CPU's {name}: {cpu[0].get(name)} -> {cpu[1].get(name)}"
        for name in sorted({*cpu[0], *cpu[1]})
        if cpu[0].get(name) != cpu[1].get(name)
    ]
    lines += [f"the {name} part changed" for name in ("keys", "values") if _changed(old, new, name)]
    return "; ".join(lines) or "what it is made of changed"


def _inputs(fields: Mapping[str, object], name: str) -> dict[str, object]:
    """Inputs that are a table themselves; an empty one where there is none."""
    inputs = fields.get(name)
    return inputs if isinstance(inputs, dict) else {}


def _changed(old: Mapping[str, object], new: Mapping[str, object], name: str) -> bool:
    return bool(old.get(name) != new.get(name))
