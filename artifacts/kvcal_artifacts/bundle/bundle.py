"""A bundle in memory, and the bytes that it is written as."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from ..codecs import Codec, state_of
from ..codecs.origins import origins_of
from ..errors import IncompatibleBundle, KVCalError
from ..files import write_atomically
from ..scheme import LayerCodecs, Scheme
from .canonical import canonical, dtype_name, is_finite, sha256_text, tensor_bytes
from .content import described
from .fingerprint import Fingerprint
from .header import FORMAT, HEADER, ROLES, SUFFIX, CodecEntry, TensorEntry, version_with

READERS = min(8, os.cpu_count() or 1)  # threads that read a bundle's tensors
NAMED = 3  # differences to another model that its refusal spells out
COUNTED_BY_CODES = frozenset({"kvtuner"})  # methods whose papers count bits without scales: "KVTuner-C3.25"


@dataclass
class Bundle:
    """A scheme, the model it is for, and how it was fitted. All caches of a bundle share the tensors of `scheme`."""

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
        """The bytes of the file. Raises KVCalError where a reader would refuse them."""
        stored = _Stored()
        stored.read_at_once(
            codec for pair in self.scheme.layers if pair is not None for codec in (pair.key, pair.value)
        )
        layers = [
            {"skipped": self.scheme.skipped[index]} if pair is None else stored.entries(index, pair)
            for index, pair in enumerate(self.scheme.layers)
        ]
        header: dict[str, object] = {
            "format": FORMAT,
            "version": version_with(self.scheme.selection is not None),
            "model": self.fingerprint.entry(),
            "scheme": self.scheme.config() | {"layers": layers},
            "provenance": self.provenance,
            "metrics": self.metrics,
            "tensors": stored.listed,
        }
        if origins := origins_of(layers):
            header["codecs"] = origins
        text = canonical(header)
        try:
            described(HEADER.read(json.loads(text), "header"), stored.tensors)
        except KVCalError as error:
            raise KVCalError(f"{error}; nothing was written") from error
        return save(stored.tensors, metadata={FORMAT: canonical({"header": header, "sha256": sha256_text(text)})})

    def write(self, path: Path) -> str:
        """Write to a temporary name in the same folder, then rename; returns the file's sha256."""
        data = self.to_bytes()
        with ThreadPoolExecutor(1) as thread:  # half a gigabyte of codebooks takes as long to hash as to write
            digest = thread.submit(lambda: hashlib.sha256(data).hexdigest())
            write_atomically(path, data)
        self.path = path
        return digest.result()

    def check(self, model: nn.Module, revision: str | None = None, probe: tuple[float, ...] | None = None) -> None:
        """Refuse another model, naming both values of the first differences.

        probe: as Fingerprint.of takes it; empty: weights are not compared.
        """
        if differences := self.fingerprint.differences(Fingerprint.of(model, revision, probe)):
            more = len(differences) - NAMED
            named = [*differences[:NAMED], *([f"and {more} more"] if more > 0 else [])]
            raise IncompatibleBundle(f"{self.name} was made for another model: {'; '.join(named)}")


class _Stored:
    """The tensors of a file, equal ones once, and what its header says of each."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.listed: dict[str, TensorEntry] = {}
        self._by_content: dict[str, str] = {}
        self._storages: set[int] = set()  # addresses of those that the tensors have
        # one object that many layers share (codebooks of 100 MB) is hashed once; held, so that no other gets its id
        self._by_object: dict[int, tuple[str, Tensor]] = {}
        self._read: dict[int, tuple[str, bool, Tensor]] = {}  # by the object: its hash, whether it is finite

    def read_at_once(self, codecs: Iterable[Codec]) -> None:
        """Read the tensors of all codecs by several threads, before `entries` asks for one after another."""
        tensors = {id(tensor): tensor for codec in codecs for tensor in codec.tensors().values()}
        with ThreadPoolExecutor(READERS) as threads:
            read = threads.map(_hash_and_finite, tensors.values())
            self._read = {key: (*one, tensors[key]) for key, one in zip(tensors, read, strict=True)}

    def entries(self, index: int, pair: LayerCodecs) -> dict[str, CodecEntry]:
        """What the header says of a layer's codecs, whose tensors are stored."""
        entries: dict[str, CodecEntry] = {}
        for role, codec in zip(ROLES, (pair.key, pair.value), strict=True):
            names = {n: self._name(f"layers.{index}.{role}.{n}", t) for n, t in sorted(codec.tensors().items())}
            shape = [codec.shape.heads, codec.shape.dim]
            entries[role] = {**state_of(codec), "tensors": names, "shape": shape}
        return entries

    def _name(self, name: str, tensor: Tensor) -> str:
        """The name under which the tensor is stored: `name`, or that of an equal one stored before."""
        if id(tensor) not in self._by_object:
            self._by_object[id(tensor)] = self._name_of_content(name, tensor), tensor
        return self._by_object[id(tensor)][0]

    def _name_of_content(self, name: str, tensor: Tensor) -> str:
        digest, finite = self._read[id(tensor)][:2] if id(tensor) in self._read else _hash_and_finite(tensor)
        entry: TensorEntry = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}
        if (earlier := self._by_content.get(canonical(entry))) is not None:
            return earlier
        if not finite:
            raise KVCalError(f"tensor {name} holds a NaN or infinity; nothing was written")
        self._by_content[canonical(entry)], self.listed[name] = name, entry
        stored = tensor.detach().cpu().contiguous()
        whole = stored.untyped_storage()  # safetensors takes no two tensors of one
        if whole.nbytes() != stored.nbytes or whole.data_ptr() in self._storages:
            stored = stored.clone()
        self._storages.add(stored.untyped_storage().data_ptr())
        self.tensors[name] = stored
        return name


def _hash_and_finite(tensor: Tensor) -> tuple[str, bool]:
    """SHA-256 of its bytes, and whether it holds neither NaN nor infinity."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest(), is_finite(tensor)
