"""The bundle: one safetensors file with everything a cache needs to know about a model (docs/format.md).

One metadata key, `kvcal`, holds canonical JSON {"header": ..., "sha256": hash of the canonical header}; the header lists
every tensor with dtype, shape and hash. Same content, same bytes. Readers check everything and import nothing by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from . import checked
from .canonical import canonical, dtype_name, sha256_text, tensor_bytes
from .checked import Choice, Free, Hash, Listed, Named, Number, OrNull, Table, Text, Whole, shown
from .codecs import Codec, Role, Shape, build, state_of
from .errors import CorruptBundle, IncompatibleBundle, KVCalError
from .files import write_atomically
from .fingerprint import Fingerprint
from .scheme import FRAMES, LayerCodecs, Scheme
from .windows import HeavyHitters, Windows

FORMAT = "kvcal"
VERSIONS = (1, 2)  # 2: the scheme selects tokens, which a reader of version 1 would overlook
SUFFIX = ".kvcal.safetensors"
HEADER_LIMIT = 4_000_000  # bytes; the largest of 8 layers that kvcal wrote has 38,000
HEADER_PARTS = (
    100_000  # brackets and braces in them, each of which takes far more memory than its byte; that one has 700
)
ROLES: tuple[Role, ...] = ("key", "value")
COUNTED_BY_CODES = frozenset({"kvtuner"})  # methods whose papers count bits without scales: "KVTuner-C3.25"


# What the header holds. A codec's config and tensors are the codec's to check.
_TOKENS = Whole(0, checked.TOKENS)
_CODEC = Table(
    {
        "codec": Text(),
        "config": checked.SETTINGS,
        "shape": Listed(Whole(1, checked.HEAD_DIM), 2, 2),
        "tensors": Named(Text()),
    }
)
_LAYER, _SKIPPED = Table({"key": _CODEC, "value": _CODEC}), Table({"skipped": Text(2000)})
_MODEL = Table(
    {
        "architecture": Text(),
        "layers": Whole(1, checked.LAYERS),
        "kv_heads": Whole(1, checked.HEADS),
        "head_dim": Whole(1, checked.HEAD_DIM),
        "rope": Free(),
        "config_sha256": Hash(empty=True),  # of the one layer that an unfinished run keeps
        "revision": OrNull(Text()),
        "probe": Listed(Number(-1e30, 1e30), 0, 64),
    }
)


class _Layer:
    """A layer's codecs, or why there are none."""

    def check(self, value: Any, what: str) -> None:
        (_SKIPPED if type(value) is dict and "skipped" in value else _LAYER).check(value, what)


_HEADER = Table(
    {
        "format": Choice((FORMAT,)),
        "version": Whole(min(VERSIONS), max(VERSIONS)),
        "model": _MODEL,
        "scheme": Table(
            {
                "windows": Table({"sink": _TOKENS, "recent": _TOKENS, "block": Whole(1, checked.BLOCK)}),
                "frame": Choice(FRAMES),
                "selection": Table({"keep": Number(0, 1, above=True), "heavy": Number(0, 1)}),
                "layers": Listed(_Layer(), 1, checked.LAYERS),
            },
            optional=frozenset({"selection"}),
        ),
        "provenance": Free(),
        "metrics": Free(),
        "tensors": Named(
            Table(
                {
                    "dtype": Choice(tuple(checked.DTYPES)),
                    "shape": Listed(Whole(1, 1 << 40), 1, 4),
                    "sha256": Hash(),
                }
            )
        ),
    }
)


@dataclass
class Bundle:
    """A scheme with what it was made for and how. `scheme` tensors are shared by all caches made from one bundle."""

    fingerprint: Fingerprint
    scheme: Scheme
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        method = self.provenance.get("method")
        if isinstance(method, str) and method in COUNTED_BY_CODES:
            self.scheme = replace(self.scheme, codes_alone=True)

    @property
    def name(self) -> str:
        """File name without suffix, else the method's name."""
        if self.path is not None:
            return self.path.name.removesuffix(SUFFIX).removesuffix(".safetensors")
        return str(self.provenance.get("method", "scheme"))

    def to_bytes(self) -> bytes:
        tensors: dict[str, Tensor] = {}
        by_hash: dict[str, str] = {}
        # one object that many layers share (codebooks of 100 MB) is hashed once; held, so that no other gets its id
        by_object: dict[int, tuple[str, Tensor]] = {}
        listed: dict[str, dict[str, Any]] = {}

        def keep(name: str, tensor: Tensor) -> str:
            """Store once; the name under which equal content already lies otherwise."""
            if id(tensor) not in by_object:
                by_object[id(tensor)] = keep_content(name, tensor), tensor
            return by_object[id(tensor)][0]

        def keep_content(name: str, tensor: Tensor) -> str:
            entry = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            entry["sha256"] = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
            if (earlier := by_hash.get(canonical(entry))) is not None:
                return earlier
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise KVCalError(f"tensor {name} holds a NaN or infinity; nothing was written")
            by_hash[canonical(entry)], listed[name] = name, entry
            tensors[name] = tensor.detach().cpu().contiguous().clone()
            return name

        layers: list[dict[str, Any]] = []
        for index, pair in enumerate(self.scheme.layers):
            if pair is None:
                layers.append({"skipped": self.scheme.skipped[index]})
                continue
            entry: dict[str, Any] = {}
            for role, codec in (("key", pair.key), ("value", pair.value)):
                refs = {n: keep(f"layers.{index}.{role}.{n}", t) for n, t in sorted(codec.tensors().items())}
                entry[role] = state_of(codec) | {"tensors": refs, "shape": [codec.shape.heads, codec.shape.dim]}
            layers.append(entry)
        header = {
            "format": FORMAT,
            "version": VERSIONS[0] if self.scheme.selection is None else VERSIONS[1],
            "model": asdict(self.fingerprint),
            "scheme": self.scheme.config() | {"layers": layers},
            "provenance": self.provenance,
            "metrics": self.metrics,
            "tensors": listed,
        }
        text = canonical(header)
        try:
            _HEADER.check(stated := json.loads(text), "header")
            _described(stated, tensors)
        except KVCalError as error:
            raise KVCalError(f"{error}; nothing was written") from error
        return save(tensors, metadata={FORMAT: canonical({"header": header, "sha256": sha256_text(text)})})

    def write(self, path: Path) -> str:
        """Write to a temporary name beside `path`, then rename; returns the file's sha256."""
        data = self.to_bytes()
        write_atomically(path, data)
        self.path = path
        return hashlib.sha256(data).hexdigest()

    def check(self, model: nn.Module, revision: str | None = None, probe: tuple[float, ...] | None = None) -> None:
        """Refuse another model, naming both values. probe: as Fingerprint.of takes it; empty: weights are not compared."""
        if differences := self.fingerprint.differences(Fingerprint.of(model, revision, probe)):
            raise IncompatibleBundle(f"{self.name} was made for another model: {'; '.join(differences)}")


def load_bundle(path: str | os.PathLike[str], *, whole: bool = True) -> Bundle:
    """Read and check a bundle file. whole=False: one layer of an unfinished one.

    Raises CorruptBundle (damaged, tampered) or IncompatibleBundle (unknown format or version), naming what was seen and
    what is allowed.
    """
    path = Path(path)
    if not path.is_file():
        raise CorruptBundle(f"{path}: {'a folder, not a bundle' if path.is_dir() else 'no such bundle'} file")
    bundle = parse(path, _whole_file(path), whole=whole)
    bundle.path = path
    return bundle


def _whole_file(path: Path) -> bytes:
    """A file's bytes. What its first bytes do not explain is not read: it may take no place on a disk, and all of memory."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            start += file.read(_header_size(path, start, size))
            ends = [
                end for entry in _safetensors_header(path, start, size).values() if (end := _end(entry)) is not None
            ]
            explained = len(start) + max(ends, default=0)
            if size > explained:
                raise CorruptBundle(f"{path}: {size} bytes, its header explains {explained}")
            return start + file.read()
    except OSError as error:
        raise CorruptBundle(f"{path}: cannot be read: {error.strerror or error}") from error


def _end(entry: Any) -> int | None:
    """Where a tensor ends, counted from the end of the header; None where the entry does not say."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    last = offsets[-1] if isinstance(offsets, list) and offsets else None
    return last if isinstance(last, int) else None


def parse(path: Path, data: bytes, *, whole: bool = True) -> Bundle:
    """A bundle from a file's bytes, checked as `load_bundle` does; path: for messages."""
    header = read_header(path, data)
    bundle = _parse(path, data, header)
    if whole:
        try:
            bundle.scheme.check_chain()
        except KVCalError as error:
            raise CorruptBundle(f"{path}: {error}") from error
        if not any(bundle.scheme.layers):
            raise CorruptBundle(f"{path}: compresses no layer")
    return bundle


def read_header(path: Path, data: bytes) -> dict[str, Any]:
    """The kvcal header of a file's bytes, its hash checked."""
    outer = _safetensors_header(path, data, len(data))
    metadata = outer.get("__metadata__")
    if not isinstance(metadata, dict) or FORMAT not in metadata:
        raise IncompatibleBundle(f"{path}: a safetensors file, but not a kvcal bundle (no '{FORMAT}' metadata)")
    text = metadata[FORMAT]
    try:
        envelope = json.loads(text)
        header, stated = dict(envelope["header"]), envelope["sha256"]
        inner = canonical(header)
        actual = sha256_text(inner)
        plain = f'{{"header":{inner},"sha256":"{actual}"}}'
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptBundle(f"{path}: kvcal header is not readable ({error})") from error
    if actual != stated:
        raise CorruptBundle(f"{path}: header hash is {actual[:16]}…, file states {str(stated)[:16]}…: it was changed")
    if text != plain:  # 1E-05 for 1e-05: the same value, and yet a changed file
        raise CorruptBundle(f"{path}: header of {len(text)} characters is not the canonical one of {len(plain)}")
    version = header.get("version")
    if header.get("format") != FORMAT or type(version) is not int or version not in VERSIONS:
        raise IncompatibleBundle(
            f"{path}: format {shown(header.get('format'))} version {shown(version)}; this version reads "
            f"{FORMAT!r} versions {' and '.join(map(str, VERSIONS))}: update kvcal or write the bundle again"
        )
    return header


def _header_size(path: Path, start: bytes, whole: int) -> int:
    """Bytes of safetensors' header. start: the file's first bytes; whole: how many it has."""
    if len(start) < 8:
        raise CorruptBundle(f"{path}: {len(start)} bytes, too short for a bundle")
    size = int.from_bytes(start[:8], "little")
    if 8 + size > whole:
        raise CorruptBundle(f"{path}: header of {size} bytes in a file of {whole}: truncated or not safetensors")
    if size > HEADER_LIMIT:
        raise CorruptBundle(f"{path}: header of {size} bytes: a bundle's has at most {HEADER_LIMIT}")
    return size


def _safetensors_header(path: Path, data: bytes, whole: int) -> dict[str, Any]:
    """data: the file's bytes, or at least its header; whole: how many the file has."""
    size = _header_size(path, data, whole)
    if (parts := data.count(b"[", 8, 8 + size) + data.count(b"{", 8, 8 + size)) > HEADER_PARTS:
        raise CorruptBundle(f"{path}: header of {parts} lists and objects: a bundle's has at most {HEADER_PARTS}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CorruptBundle(f"{path}: name {twice!r} occurs twice in the header")
        return dict(pairs)

    try:
        header = json.loads(data[8 : 8 + size], object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptBundle(f"{path}: header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CorruptBundle(f"{path}: header is not a JSON object")
    return header


def _checked_tensors(path: Path, data: bytes, header: dict[str, Any]) -> dict[str, Tensor]:
    try:
        tensors = load(data)
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise CorruptBundle(f"{path}: {error}; the file is truncated or damaged") from error
    listed = header["tensors"]
    if missing := sorted(set(listed) - set(tensors)):
        raise CorruptBundle(f"{path}: tensor {missing[0]!r} is listed but missing")
    if surplus := sorted(set(tensors) - set(listed)):
        raise CorruptBundle(f"{path}: tensor {surplus[0]!r} is not listed in the header")
    for name, tensor in tensors.items():
        entry = listed[name]
        actual = (dtype_name(tensor.dtype), list(tensor.shape))
        if actual != (entry["dtype"], entry["shape"]):
            raise CorruptBundle(f"{path}: tensor {name!r} is {actual}, header says {(entry['dtype'], entry['shape'])}")
        digest = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        if digest != entry["sha256"]:
            raise CorruptBundle(f"{path}: tensor {name!r} has hash {digest[:16]}…, header says {entry['sha256'][:16]}…")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CorruptBundle(f"{path}: tensor {name!r} holds a NaN or infinity")
    return tensors


def _parse(path: Path, data: bytes, header: dict[str, Any]) -> Bundle:
    try:
        _HEADER.check(header, "header")
        return _described(header, _checked_tensors(path, data, header))
    except CorruptBundle:
        raise
    except KVCalError as error:
        raise CorruptBundle(f"{path}: {error}") from error
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
    ) as error:  # of another program
        raise CorruptBundle(f"{path}: header does not describe a bundle ({type(error).__name__}: {error})") from error


def _described(header: dict[str, Any], tensors: dict[str, Tensor]) -> Bundle:
    """Raises KVCalError; header: as _HEADER checks it."""
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
            _check_shape(index, role, entry[role]["shape"], fingerprint)
        layers.append(LayerCodecs(*(_codec(index, entry, role, windows.block, tensors, used) for role in ROLES)))
    if surplus := sorted(set(tensors) - used):
        raise KVCalError(f"tensor {surplus[0]!r} belongs to no layer")
    if len(layers) != fingerprint.layers:
        raise KVCalError(f"codecs for {len(layers)} layers, made for a model of {fingerprint.layers}")
    scheme = Scheme(windows, header["scheme"]["frame"], tuple(layers), skipped, _selection(header))
    return Bundle(fingerprint, scheme, dict(header["provenance"]), dict(header["metrics"]))


def _fingerprint(model: dict[str, Any]) -> Fingerprint:
    return Fingerprint(**{**model, "probe": tuple(model["probe"])})


def _check_shape(index: int, role: Role, shape: list[int], model: Fingerprint) -> None:
    if shape != [model.kv_heads, model.head_dim]:
        raise KVCalError(
            f"layer {index}, {role}: {shape[0]} kv heads of {shape[1]}, made for a model of {model.kv_heads} of "
            f"{model.head_dim}"
        )


def _selection(header: dict[str, Any]) -> HeavyHitters | None:
    selection = header["scheme"].get("selection")
    if (selection is not None) != (header["version"] == VERSIONS[1]):
        stated = "without" if selection is None else "with"
        raise KVCalError(f"version {header['version']} {stated} token selection; version 2 is the one with it")
    return None if selection is None else HeavyHitters(**selection)


def _codec(
    index: int, entry: dict[str, Any], role: Role, block: int, tensors: dict[str, Tensor], used: set[str]
) -> Codec:
    state = entry[role]
    heads, dim = state["shape"]
    if absent := [name for name in state["tensors"].values() if name not in tensors]:
        raise KVCalError(f"layer {index}, {role}: tensor {absent[0]!r} is not in the file")
    parts = {local: tensors[name] for local, name in state["tensors"].items()}
    used.update(state["tensors"].values())
    try:
        codec = build(Shape(heads, dim, block), role, state, parts)
    except KVCalError as error:
        raise KVCalError(f"layer {index}, {role}: {error}") from error
    if surplus := sorted(set(parts) - set(codec.tensors())):
        raise KVCalError(f"layer {index}, {role}: codec {codec.name!r} has no tensor {surplus[0]!r}")
    return codec
