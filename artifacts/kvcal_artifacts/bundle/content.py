"""A checked header and its tensors become the fingerprint of a model and a scheme."""

from __future__ import annotations

from torch import Tensor

from ..checked import shown
from ..codecs import Codec, Role, Shape, build
from ..codecs.origins import is_ours, names_in, require_codecs
from ..errors import KVCalError
from ..scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from .fingerprint import Fingerprint
from .header import ROLES, CodecEntry, Header, ModelEntry, version_with
from .settings import Settings


def described(header: Header, tensors: dict[str, Tensor]) -> tuple[Fingerprint, Scheme]:
    """What a header and the tensors of its file describe. Raises KVCalError where they do not fit together."""
    _check_origins(header)
    windows, fingerprint = Windows(**header["scheme"]["windows"]), _fingerprint(header["model"])
    layers: list[LayerCodecs | None] = []
    skipped: dict[int, str] = {}
    used: set[str] = set()
    for index, entry in enumerate(header["scheme"]["layers"]):
        if "skipped" in entry:
            layers.append(None)
            skipped[index] = entry["skipped"]
            continue
        for role in ROLES:
            _check_shape(f"layer {index}, {role}", entry[role]["shape"], fingerprint)
        key, value = (_codec(f"layer {index}, {role}", entry[role], role, windows.block, tensors) for role in ROLES)
        used.update(*(entry[role]["tensors"].values() for role in ROLES))
        layers.append(LayerCodecs(key, value))
    if surplus := sorted(set(tensors) - used):
        raise KVCalError(f"tensor {surplus[0]!r} belongs to no layer")
    if len(layers) != fingerprint.layers:
        raise KVCalError(f"codecs for {len(layers)} layers, made for a model of {fingerprint.layers}")
    return fingerprint, Scheme(windows, header["scheme"]["frame"], tuple(layers), skipped, _selection(header))


def _check_origins(header: Header) -> None:
    """Raises IncompatibleBundle for a codec of a package that is not here, KVCalError for an entry of no such codec."""
    if "codecs" not in header:
        return
    names = set(names_in(header["scheme"]["layers"]))
    if not header["codecs"]:
        raise KVCalError("header, codecs is empty: must be absent")
    for name in header["codecs"]:
        if name not in names or is_ours(name):
            raise KVCalError(f"header, codecs: {shown(name)} is no codec of another package in this bundle")
    require_codecs(header["codecs"])


def _fingerprint(model: ModelEntry) -> Fingerprint:
    return Fingerprint(
        architecture=model["architecture"],
        layers=model["layers"],
        kv_heads=model["kv_heads"],
        head_dim=model["head_dim"],
        rope=model["rope"],
        config_sha256=model["config_sha256"],
        revision=model["revision"],
        probe=tuple(model["probe"]),
        settings=Settings(**model["settings"]) if "settings" in model else None,
    )


def _check_shape(where: str, shape: list[int], model: Fingerprint) -> None:
    if shape != [model.kv_heads, model.head_dim]:
        raise KVCalError(
            f"{where}: {shape[0]} kv heads of {shape[1]}, made for a model of {model.kv_heads} of {model.head_dim}"
        )


def _selection(header: Header) -> HeavyHitters | None:
    selection = header["scheme"].get("selection")
    if (selection is not None) != (header["version"] == version_with(selection=True)):
        stated = "without" if selection is None else "with"
        raise KVCalError(f"version {header['version']} {stated} token selection; version 2 is the one with it")
    return None if selection is None else HeavyHitters(**selection)


def _codec(where: str, entry: CodecEntry, role: Role, block: int, tensors: dict[str, Tensor]) -> Codec:
    """The codec of an entry and the tensors of its file. where: the layer and role, for messages."""
    heads, dim = entry["shape"]
    if absent := [name for name in entry["tensors"].values() if name not in tensors]:
        raise KVCalError(f"{where}: tensor {absent[0]!r} is not in the file")
    parts = {local: tensors[name] for local, name in entry["tensors"].items()}
    try:
        codec = build(Shape(heads, dim, block), role, entry, parts)
    except KVCalError as error:
        raise KVCalError(f"{where}: {error}") from error
    if surplus := sorted(set(parts) - set(codec.tensors())):
        raise KVCalError(f"{where}: codec {codec.name!r} has no tensor {surplus[0]!r}")
    return codec
