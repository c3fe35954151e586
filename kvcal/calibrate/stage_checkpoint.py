"""The checkpoint of `kvcal train-codebooks`: sampled vectors layer by layer, trained codebooks stage by stage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.files import check_regular, drop_cached, write_atomically

from ..capture.spill import to_host
from ..methods.codebooks import StageReport
from .checkpoint import LayerCheckpoint, partial_folder
from .sampled_vectors import Sample

Restored = TypeVar("Restored")

# As files name them, in the order in which they lie there: larger ones first, so that each begins at a multiple of it.
DTYPES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Record(TypedDict):
    """What a file says apart from its tensors; strangers may have written it. report: of a stage, the fields of a
    StageReport. roles, rotary, probe: of a layer's vectors. sha256: of all tensors.
    """

    sha256: str
    report: dict[str, Any]
    roles: list[str]
    rotary: int
    probe: list[float]


class StageCheckpoint(LayerCheckpoint):
    """A checkpoint next to the output: one file for each layer's vectors and one for each trained stage, with its
    report; each with a hash.
    """

    VERSION = 2  # of a report: 1 had no errors by iteration

    def __init__(self, output: Path, record: Mapping[str, Json], resume: bool) -> None:
        super().__init__(output, {**record, "stage_report": self.VERSION}, resume)

    def count(self) -> int:
        return sum(1 for _ in self.folder.glob("*-*.safetensors"))

    def load(self, job: str, stage: int, shape: tuple[int, int]) -> tuple[Tensor, StageReport] | None:
        """A stage from the checkpoint, codewords float16 of this shape; a damaged one is removed, and trained again."""

        def stage_of(tensors: dict[str, Tensor], record: Record) -> tuple[Tensor, StageReport]:
            book = tensors["codewords"]
            if (tuple(book.shape), book.dtype) != (shape, torch.float16):
                raise ValueError("of another quantiser")
            return book, StageReport(**record["report"])

        return self._read(self._stage(job, stage), stage_of)

    def keep(self, job: str, book: Tensor, report: StageReport) -> None:
        """Keep a trained stage: it is hashed and written while the next one is trained, and must not be changed. Raises
        as `settle` where the one before it could not be written.
        """
        record: dict[str, Json] = {"report": dict(vars(report))}
        self._write_meanwhile(self._stage(job, report.stage), {"codewords": book}, record)

    def has_samples(self, layers: int) -> bool:
        """Whether vectors of all layers are in the checkpoint; they may be damaged."""
        return all(self._sample(layer).exists() for layer in range(layers))

    def sample(self, layer: int, device: torch.device) -> Sample | None:
        """A layer's vectors from the checkpoint; None where they are missing or damaged: others are of no use then, as
        all come from one run.
        """

        def sample_of(tensors: dict[str, Tensor], record: Record) -> Sample:
            vectors = {name: tensors[name].to(device) for name in Sample.VECTORS}
            scales = {role: tensors.get(f"scales.{role}") for role in record["roles"]}
            return Sample(**vectors, scales=scales, rotary=record["rotary"], probe=tuple(record["probe"]))

        return self._read(self._sample(layer), sample_of)

    def keep_sample(self, layer: int, sample: Sample) -> None:
        """Keep a layer's vectors: they are copied from the device, hashed and written while the next layer runs, those
        of two layers at most in memory. They must not be changed until `settle`. Raises as `settle` where those of this
        layer, or of the one before, could not be written.
        """
        record: dict[str, Json] = {"roles": list(sample.scales), "rotary": sample.rotary, "probe": sample.probe}
        self._write_meanwhile(self._sample(layer), sample.tensors, record)

    def drop_samples(self) -> None:
        with suppress(OSError, KVCalError):
            self.settle()
        for path in self.folder.glob(self._sample(0).name.replace("0", "[0-9]")):
            path.unlink(missing_ok=True)

    def _write_meanwhile(self, path: Path, tensors: dict[str, Tensor], record: Mapping[str, Json]) -> None:
        self.settle()  # before more memory is taken
        place, copies = self.place(path.name), {name: to_host(x) for name, x in tensors.items()}
        self.write_meanwhile(lambda: _save(place, {name: copy() for name, copy in copies.items()}, record))

    def _read(self, path: Path, make: Callable[[dict[str, Tensor], Record], Restored]) -> Restored | None:
        """What `make` makes of the file; None where there is none, or a damaged one, which is removed."""
        try:
            check_regular(path, path.stat().st_mode)  # a pipe would be waited for
            with safe_open(path, framework="pt") as file:
                names, record = file.keys(), json.loads(file.metadata()["stage"])
                tensors = {name: file.get_tensor(name) for name in names}
            if _digest(tensors) != record["sha256"]:
                raise ValueError("damaged")
            return make(tensors, record)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            path.unlink(missing_ok=True)
            return None

    def _stage(self, job: str, stage: int) -> Path:
        return self.folder / f"{job}-{stage:03d}.safetensors"

    def _sample(self, layer: int) -> Path:
        return self.folder / f"vectors.{layer:04d}.safetensors"


class FollowersStages(StageCheckpoint):
    """The checkpoint of a rank that keeps nothing, because rank 0 does; what is there it hears from that one."""

    def __init__(self, output: Path, record: Mapping[str, Json]) -> None:
        self.folder, self.key = partial_folder(output), sha256_text(canonical(record))

    def count(self) -> int:
        return 0

    def has_samples(self, layers: int) -> bool:
        return False

    def keep_sample(self, layer: int, sample: Sample) -> None: ...

    def drop_samples(self) -> None: ...

    def remove(self) -> None: ...

    def _write_meanwhile(self, path: Path, tensors: dict[str, Tensor], record: Mapping[str, Json]) -> None: ...

    def _read(self, path: Path, make: Callable[[dict[str, Tensor], Record], Restored]) -> Restored | None:
        return None


def _save(path: Path, tensors: dict[str, Tensor], record: Mapping[str, Json]) -> None:
    signed = {**record, "sha256": _digest(tensors)}
    write_atomically(path, [*_parts(tensors, {"stage": canonical(signed)})])
    drop_cached(path)


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file, tensors not copied. safetensors' own `save` would keep other threads from
    running while it copies, which takes a layer's vectors a tenth of a second.
    """
    ordered = sorted(tensors.items(), key=lambda item: ([*DTYPES].index(item[1].dtype), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield _memory(tensor)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(_memory(tensor))
    return digest.hexdigest()


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
