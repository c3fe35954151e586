"""What `--model` means: a short name, a hub id or a local folder; and how each is loaded.

    source = resolve("llama-3.2-3b")            # names only: no network, no torch
    config = load_config(source)                # downloads a config.json at most
    loaded = load_model(source, dtype="bfloat16", device="cuda")

`kvcal.models.layerwise` opens a model one layer at a time. Loading never touches the global random state.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcal_artifacts.errors import KVCalError, ModelUnavailable, OutOfMemory, UnsupportedModel, UsageError
from kvcal_artifacts.files import kind_of, read_text

from ..report.records import kind_of as json_kind
from ..report.suggest import nearest
from . import hub
from .catalogue import ALIASES, BY_HUB_ID, CATALOGUE, TINY, Geometry, ModelEntry, models_table, paper_presets
from .hub import INDEX, SAFETENSORS, one_line

if TYPE_CHECKING:
    import torch

    from .layerwise import LayerwiseWeights
    from .weights import Weights

__all__ = [
    "CATALOGUE", "Geometry", "LoadedModel", "ModelEntry", "ModelSource", "geometry", "load_config",
    "load_model", "load_tokenizer", "models_table", "open_layerwise", "presets", "resolve",
    "weights_revision",
]  # fmt: skip

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PACKED = "packed.safetensors"


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
        """For messages: the short name and, where it differs, what it stands for."""
        return f"{self.name} ({self.hub_id})" if self.hub_id and self.hub_id != self.name else self.name

    @property
    def public(self) -> str:
        """For files that others read: as `name`, but of a folder its last part, for a path may tell who the user is."""
        return self.stem if self.kind == "folder" else self.name

    @property
    def stem(self) -> str:
        """For file names: `llama-3.2-3b`, or the last part of a hub id or of a path."""
        if self.folder is not None and self.kind == "folder":
            return self.folder.resolve().name
        return self.name.rpartition("/")[2].lower()


@dataclass(frozen=True)
class LoadedModel:
    model: Any  # a transformers PreTrainedModel, in eval mode
    tokenizer: Any | None  # None for random weights of a hub model: nothing is downloaded then
    source: ModelSource
    revision: str
    random_weights: bool


def resolve(name: str, revision: str | None = None) -> ModelSource:
    """A short name, an existing folder, or a hub id `org/name`, in this order."""
    key = name.strip().lower()
    entry = CATALOGUE.get(ALIASES.get(key, key))
    if entry is not None:
        return _named(entry, revision)
    path = _existing(name)
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
    if not (path / "config.json").is_file():
        raise ModelUnavailable(f"folder {name} holds no config.json: it is not a model")
    for entry in path.iterdir():  # Transformers looks for many names, and would wait for a pipe
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise ModelUnavailable(f"folder {name} holds {entry.name}, {kind_of(entry.stat().st_mode)}: remove it")
    return ModelSource("folder", name, folder=path)


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise UsageError(f"--revision {revision}: only models on the hub have revisions, {name} is local")


def _existing(name: str) -> Path | None:
    """The path of that name, if there is one; an empty name would be the current folder and is none."""
    try:
        path = Path(name).expanduser()
        return path if name.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, a home that does not exist, a NUL byte
        return None


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def _unknown(name: str) -> str:
    near = nearest(name, [*CATALOGUE, *ALIASES])
    hint = f"did you mean {', '.join(near)}? Else" if near else "`kvcal models` lists the short names;"
    return f"unknown model {name!r}: {hint} a hub id reads org/name, a folder must hold a config.json"


def geometry(source: ModelSource, *, download: bool = True) -> Geometry:
    """Shapes alone. From the catalogue where the model is in it, else from its config.json."""
    if source.entry is not None:
        return source.entry.geometry
    if source.kind == "hub" and not download:
        raise ModelUnavailable(f"{source.label} is not in `kvcal models`: its geometry needs a download")
    fields = _text_config(load_config(source)).to_dict()
    for name, needed in COUNTS.items():
        _check_count(source, name, fields.get(name), needed)
    try:
        return Geometry.from_config(fields)
    except (KeyError, TypeError) as error:
        raise ModelUnavailable(
            f"{source.label}: its config.json has no {one_line(error)}; kvcal needs a decoder-only model"
        ) from error


COUNTS = {  # of a config.json -> whether there is no default where it is null or missing, which from_config says itself
    "num_hidden_layers": True, "num_attention_heads": True, "num_key_value_heads": False, "head_dim": False,
}  # fmt: skip


def _check_count(source: ModelSource, name: str, value: Any, needed: bool) -> None:
    if value is None or (type(value) is int and value >= 1):
        return
    raise ModelUnavailable(
        f"{source.label}: {name} of its config.json is {one_line(repr(value))}, must be a whole number from 1"
        f"{'' if needed else ', or null'}; correct the file or give another --model"
    )


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def presets(source: ModelSource) -> dict[str, dict[str, Any]]:
    """method -> the settings its paper used, as far as this model admits them."""
    return source.entry.presets if source.entry is not None else paper_presets(geometry(source))


def load_config(source: ModelSource) -> Any:
    """The Transformers config; `_commit_hash` is set for a hub model."""
    from transformers import AutoConfig

    folder = _config_path(source).parent
    _check_object(source, folder / "config.json")
    try:
        with hub.quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file, an unknown model type, a field out of range
        raise ModelUnavailable(
            f"{source.label}: its config.json cannot be used ({one_line(error)}); remote code is never run"
        ) from error
    config._commit_hash = hub.revision_of(folder / "config.json") if source.kind == "hub" else None
    own = vars(_text_config(config))
    for name, needed in COUNTS.items():
        if own.get(name) is not None:
            _check_count(source, name, own[name], needed)
    check_supported(source.label, config)
    return config


def _check_object(source: ModelSource, path: Path) -> None:
    """Raises ModelUnavailable where config.json is JSON, but no object: Transformers speaks of a missing field then."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{source.label}: its config.json cannot be used ({one_line(error)})") from error
    if not isinstance(found, dict):
        raise ModelUnavailable(
            f"{source.label}: its config.json cannot be used (it holds {json_kind(found)}, must hold a table of settings); "
            "put the model's own there"
        )


def check_config(source: ModelSource, *, random_weights: bool = False) -> None:
    """Raises ModelUnavailable or UnsupportedModel for a config that no model can be made of; reads config.json at most.

    Comes before tokenizer and text: Transformers reads config.json for a tokenizer, too, and would blame the tokenizer.
    """
    if random_weights:
        geometry_config(source)
    else:
        load_config(source)


def check_supported(label: str, config: Any) -> None:
    """Raises UnsupportedModel, before any weights are read, with the reason that every command gives."""
    key = config.to_json_string()
    if key not in _REASONS:
        _REASONS[key] = _unsupported(config)
    if (why := _REASONS[key]) is not None:
        raise UnsupportedModel(f"{label}: {config.model_type}: {why}")


_REASONS: dict[str, str | None] = {}  # by config


def _unsupported(config: Any) -> str | None:
    import torch

    from kvcal_artifacts import hf

    from .weights import empty_model

    why = hf.unsupported_config(config)
    return hf.unsupported(empty_model(config, torch.float32)) if why is None else why


def _config_path(source: ModelSource) -> Path:
    if source.kind == "hub":
        assert source.hub_id is not None
        return hub.fetch_config(source.hub_id, source.revision)
    assert source.folder is not None
    return source.folder / "config.json"


def catalogue_config(entry: ModelEntry) -> Any:
    """The Transformers config of a catalogue entry, built without any file of the hub."""
    from transformers import AutoConfig

    fields = entry.config_fields()
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def geometry_config(source: ModelSource) -> Any:
    """The config for random weights: the catalogue's for a hub model in it, so nothing is downloaded."""
    if source.kind == "hub" and source.entry is not None:
        return catalogue_config(source.entry)
    return load_config(source)


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer. Raises ModelUnavailable, for a config.json that cannot be used first."""
    from transformers import AutoTokenizer

    check_config(source)
    if source.kind == "hub":
        assert source.hub_id is not None
        sha = hub.revision_of(_config_path(source))
        folder = hub.fetch_tokenizer(source.hub_id, sha)
    else:
        assert source.folder is not None
        folder = source.folder
    if not any((folder / name).is_file() for name in hub.TOKENIZER_FILES):
        raise ModelUnavailable(f"{source.label}: neither tokenizer.json nor tokenizer.model in {folder}")
    try:
        with hub.quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged JSON, unknown class, a missing optional package
        raise ModelUnavailable(f"{source.label}: its tokenizer cannot be read ({one_line(error)})") from error


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """The whole model on one device, in eval mode, without gradients."""
    target, kind = to_device(device), to_dtype(dtype)
    with out_of_memory(source, kind):
        if random_weights:
            return _random(source, kind, target, seed)
        load = _embedded if source.kind == "embedded" else _pretrained
        model = load(source, kind, target)
    revision = weights_revision(source, random_weights=False, seed=seed)
    return LoadedModel(model, load_tokenizer(source), source, revision, random_weights=False)


def _random(source: ModelSource, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedModel:
    from . import weights
    from .memory import check_room

    config = geometry_config(source)
    model = weights.empty_model(config, dtype)
    check_room(source.label, sum(one.numel() * one.element_size() for one in model.parameters()), dtype, device)
    weights.fill(model, "", random_source(config, seed), device)
    weights.tie(model)
    revision = weights_revision(source, random_weights=True, seed=seed)
    return LoadedModel(model, local_tokenizer(source), source, revision, random_weights=True)


def random_source(config: Any, seed: int) -> Weights:
    from .weights import RandomWeights

    return RandomWeights(seed, getattr(config, "initializer_range", 0.02))


def local_tokenizer(source: ModelSource) -> Any | None:
    """The tokenizer where it lies on this machine for certain; with random weights no model needs one."""
    has = source.folder is not None and any((source.folder / name).is_file() for name in hub.TOKENIZER_FILES)
    return load_tokenizer(source) if has else None


def _embedded(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    from . import weights
    from .embedded import PackedWeights

    model = weights.empty_model(load_config(source), dtype)
    weights.fill(model, "", PackedWeights(packed_path(source)), device)
    weights.tie(model)
    return model


def packed_path(source: ModelSource) -> Path:
    assert source.folder is not None
    path = source.folder / PACKED
    if not path.is_file():
        raise ModelUnavailable(f"{source.name}: {path} is missing; install kvcal again")
    return path


def _pretrained(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    from . import weights

    config = load_config(source)
    folder = weights_folder(source)
    quantised = getattr(config, "quantization_config", None) is not None
    if not quantised:  # whose tensors have shapes of their own
        weights.check_shapes(source.label, folder / weights_index(source).name, weights.empty_model(config, dtype))
    options = {
        "dtype": dtype,
        "use_safetensors": True,
        "local_files_only": True,
        "trust_remote_code": False,  # None would ask on the terminal
        "output_loading_info": True,
    }
    model: Any
    report: dict[str, Any]
    try:
        with _silent_loading():
            loaded: Any = weights.model_class(config).from_pretrained(folder, config=config, **options)
        model, report = loaded
    except Exception as error:  # a damaged shard, shapes that do not fit, an unknown architecture
        if is_oom(error):
            raise
        raise ModelUnavailable(f"{source.label}: cannot be loaded ({one_line(error)})") from error
    _check_complete(source, report)
    return model.eval().requires_grad_(False).to(device)


def _check_complete(source: ModelSource, report: dict[str, Any]) -> None:
    """Transformers fills what is missing with random numbers and prints a table; here it is an error."""
    missing = sorted(map(str, report.get("missing_keys") or ()))
    if missing:
        raise ModelUnavailable(f"{source.label}: its weights lack {missing[0]} ({len(missing)} in all)")
    surplus = sorted(str(name) for name in report.get("unexpected_keys") or () if ".layers." in str(name))
    if surplus:
        raise ModelUnavailable(
            f"{source.label}: its weights hold {surplus[0]} ({len(surplus)} in all), "
            "which its config.json does not ask for"
        )


@contextmanager
def _silent_loading() -> Iterator[None]:
    """No weight-loading bar and no load report: what they would say is checked and raised instead."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with hub.quiet():
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


def weights_folder(source: ModelSource) -> Path:
    """A local folder with config.json and every shard, downloaded if need be."""
    index = weights_index(source)
    shards = sorted(set(_shards(source, index)))
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
        return hub.fetch_index(source.hub_id, hub.revision_of(_config_path(source)))
    assert source.folder is not None
    for name in (INDEX, SAFETENSORS):
        if (source.folder / name).is_file():
            return source.folder / name
    pickled = next(source.folder.glob("*.bin"), None)
    found = f"only {pickled.name}, which is pickled: convert it" if pickled else "no weights"
    raise ModelUnavailable(f"{source.label}: {found}; expected {SAFETENSORS} or {INDEX}")


def _shards(source: ModelSource, index: Path) -> list[str]:
    if index.name != INDEX:
        return [index.name]
    from .weights import shard_map

    return list(shard_map(source.label, index).values())


def weights_revision(source: ModelSource, *, random_weights: bool, seed: int) -> str:
    """Which weights these are: the hub's commit, a hash of the files, or `random:SEED`.

    The embedded model has `sha256:` of its packed file; a folder has what `weights.content_revision` says.
    """
    if random_weights:
        return f"random:{seed}"
    if source.kind == "hub":
        return hub.revision_of(_config_path(source))
    from .weights import content_revision, file_sha256

    if source.kind == "embedded":
        return f"sha256:{file_sha256(packed_path(source))}"
    folder = weights_folder(source)
    return content_revision(folder / shard for shard in set(_shards(source, weights_index(source))))


def open_layerwise(
    source: ModelSource,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
) -> LayerwiseWeights:
    """The same model one layer at a time; see kvcal.models.layerwise."""
    from . import layerwise

    return layerwise.open_layerwise(source, dtype=dtype, device=device, random_weights=random_weights, seed=seed)


def to_dtype(dtype: torch.dtype | str) -> torch.dtype:
    import torch

    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, torch.dtype) and dtype in allowed.values():
        return dtype
    if str(dtype) not in allowed:
        raise UsageError(f"dtype {dtype}: allowed are auto, {', '.join(allowed)}")
    return allowed[str(dtype)]


def to_device(device: torch.device | str) -> torch.device:
    import torch

    allowed, device = "allowed are cpu, cuda, cuda:N and auto", device or "''"
    try:
        target = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device {device}: torch knows no such device; {allowed}") from None
    if target.type == "meta":
        raise UsageError(f"device {device}: holds no numbers; {allowed}")
    try:
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {device}: not usable here ({one_line(error, 120)}); {allowed}") from error
    return target


@contextmanager
def out_of_memory(source: ModelSource, dtype: torch.dtype) -> Iterator[None]:
    """Turn an allocation that failed into one line that names the need."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_oom(error):
            raise
        need = _parameter_bytes(source, dtype)
        raise OutOfMemory(
            f"{source.label}: its weights need {need}, more than is free on the device; "
            "load one layer at a time, or in bfloat16"
        ) from error


def is_oom(error: BaseException) -> bool:
    import torch

    said = str(error).lower()
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "out of memory" in said or "can't allocate memory" in said


def _parameter_bytes(source: ModelSource, dtype: torch.dtype) -> str:
    try:
        return f"about {geometry(source).parameters * dtype.itemsize / 1e9:.1f} GB"
    except KVCalError:
        return "memory"


def config_fields(source: ModelSource) -> dict[str, Any]:
    """The raw config.json of a source, as it lies there."""
    fields: dict[str, Any] = json.loads(read_text(_config_path(source)))
    return fields
