"""The driver of `kvcal train-codebooks`: collect vectors in one pass over the layers, train stage after stage, write a
bundle.

Vectors are kept layer by layer, and codebooks stage by stage, so that a killed run goes on: once vectors of all layers
are on disk the model is not run again; they are turned into residuals by the stages that are there, and training
continues. A collection that was cut off begins anew, as each layer needs the hidden states of the one before. The file
comes out the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.bundle.canonical import canonical, tensor_bytes
from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import check_regular, write_atomically
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from ..capture.scan import Capture, LayerTaps
from ..methods.codebooks import StageReport, subtract, train_stage
from ..methods.hashing import spread
from ..methods.vqkv import VQKV, band_split, peak_memory, quantisers, reconstruction_errors, two_scales
from ..report.progress import progress, tracked
from ..report.timing import PhaseTimer
from .checkpoint import LayerCheckpoint
from .job import FitJob, FitResult, Scan
from .needs import few_vectors
from .outlier_guard import say_forecasts

if TYPE_CHECKING:
    from ..text.sources import Windows

# Held-out vectors: a 32nd of the training ones within these bounds.
HELD_PART, HELD_LEAST, HELD_MOST = 32, 4096, 1 << 17
DISK_PART = 0.5  # of the free disk that kept vectors may take: the bundle and other jobs need some, too
Say = Callable[[str], None]
Made = TypeVar("Made")


@dataclass
class Vectors:
    """Sampled vectors of all layers, layer after layer. keys, values (n, D) in the working dtype, bfloat16 on a GPU and
    float32 elsewhere; held_* (m, D) float32; all divided by their layer's scales. layer_of, head_of: of each held-out
    vector.
    """

    keys: Tensor
    values: Tensor
    held_keys: Tensor
    held_values: Tensor
    held_layer: Tensor
    held_head: Tensor
    train_of: list[slice]
    held_of: list[slice]
    rotary: int
    scales: list[dict[str, Tensor | None]] = field(default_factory=list)
    probe: tuple[float, ...] = ()


@dataclass
class TrainResult(FitResult):
    """stages: a row a stage (StageReport, quantiser). peak_bytes: of the device's memory, of the process on a CPU."""

    stages: list[dict[str, Json]] = field(default_factory=list)
    resumed_stages: int = 0
    peak_bytes: int = 0


class TrainPart:
    """VQKV on its way through a scan: vectors are collected layer by layer, and stages trained after the last."""

    def __init__(self, job: FitJob, scan: Scan) -> None:
        assert isinstance(job.method, VQKV)
        self.job, self.scan, self.method = job, scan, job.method
        self.shape = hf.layer_shape(scan.config, self.method.windows.block)
        self.method.high_dims(self.shape.dim)
        vectors = _check_enough(self.method, scan.text, len(scan.compressed), self.shape.heads)
        for line in few_vectors(self.method, vectors):
            scan.say(line)
        self.record = scan.record(job)
        self.work = StageCheckpoint(job.output, self.record, scan.options.resume)
        self.layers = len(scan.compressed)
        self.collected = Collection(self.method, len(scan.text.train), self.shape.heads, self.layers)
        self.collected.parts = self.work.samples(self.layers, scan.device)
        self.saved_probe = self.collected.probe if self.collected.parts else None
        self.keeping = True
        if self.saved_probe is not None:
            scan.say(f"resuming with the vectors of all {self.layers} layers from {self.work.folder}")
        if done := self.work.count():
            scan.say(f"resuming after {done} stages from {self.work.folder}")

    def open(self, stack: ExitStack) -> None:
        """Nothing is held that must be closed."""

    def layer(self, taps: LayerTaps) -> None:
        if self.saved_probe is not None:
            return
        self.collected.add(taps)
        if self.keeping:
            self._keep(taps.place)

    def _keep(self, layer: int) -> None:
        """The newest sample on disk, if the disk has room for all of them; said once where it has not."""
        sample, folder = self.collected.parts[-1], self.work.folder
        size = sample.nbytes * self.layers
        try:
            free = shutil.disk_usage(folder.parent).free
            if not layer and size > free * DISK_PART:
                raise KVCalError(f"{size / 1e6:,.0f} MB of vectors are more than half of the {free / 1e6:,.0f} MB free")
            self.work.keep_sample(layer, sample)
        except (OSError, KVCalError) as error:
            self.keeping = False
            self.work.drop_samples()
            self.scan.say(f"note: vectors are not kept, a killed run collects them again: {error}")
            return
        if layer + 1 == self.layers:
            saved = sum(part.nbytes for part in self.collected.parts)
            self.scan.say(
                f"vectors of all {self.layers} layers, {saved / 1e6:,.1f} MB, wait in {folder} until training is done"
            )

    def complete(self) -> None:
        """Codebooks are trained in `finish`, so that bundles before it are written first."""

    def finish(self, fingerprint: Fingerprint) -> TrainResult:
        vectors, compressed = self.collected.vectors(self.scan.say), self.scan.compressed
        run = Run(self.method, vectors, self.work, self.scan.timer, self.scan.say, compressed)
        layers = self.scan.placed(run.layers(self.shape))
        scheme = Scheme(self.method.windows, self.method.frame, layers, self.scan.skipped, self.job.selection)
        bundle = Bundle(fingerprint, scheme, self.record, run.metrics(scheme), self.job.output)
        say_forecasts(self.scan, {bundle.name: scheme})
        digest = bundle.write(self.job.output)
        self.work.remove()
        return TrainResult(
            bundle,
            self.job.output,
            digest,
            self.scan.timer.split(),
            resumed_layers=0 if self.saved_probe is None else self.layers,
            stages=run.rows,
            resumed_stages=run.resumed,
            peak_bytes=peak_memory(self.scan.device),
        )


# Vectors.


def collect(method: VQKV, capture: Capture, train: int, heads: int, say: Say = lambda line: None) -> Vectors:
    """A Collection of all layers of a capture that serves nothing else."""
    collection = Collection(method, train, heads, len(capture))
    for taps in tracked(capture, "Reading layers", len(capture)):
        collection.add(taps)
    return collection.vectors(say)


class Collection:
    """A seeded sample of method.vectors keys and as many values from the first `train` windows, fewer if there are
    fewer, and a held-out one from the others; the sink's tokens are never taken.
    """

    def __init__(self, method: VQKV, train: int, heads: int, layers: int) -> None:
        self.method, self.train, self.heads, self.layers = method, train, heads, layers
        self.parts: list[Sample] = []
        self.holdout = max(HELD_LEAST, min(HELD_MOST, method.vectors // HELD_PART))

    @property
    def rotary(self) -> int:
        """The rotary dimensions of the first layer with RoPE; 0 without one."""
        return next((part.rotary for part in self.parts if part.rotary), 0)

    @property
    def probe(self) -> tuple[float, ...]:
        """The fingerprint's, of what was collected."""
        return tuple(number for part in self.parts for number in part.probe)

    def add(self, taps: LayerTaps) -> None:
        before = self.rotary
        sample = LayerSample(self.method, taps, self.train, self.heads, self.layers, self.holdout).gather()
        self.parts.append(sample)
        if sample.rotary and not before:
            none = torch.zeros(taps.site.head_dim)
            # Refuses what does not fit its pairs.
            band_split(none, none, self.method.high, sample.rotary, self.method.split)
        sample.probe = taps.probe

    def vectors(self, say: Say) -> Vectors:
        """What was sampled; the parts are given back."""
        rotary, probe = self.rotary, self.probe
        parts, self.parts = self.parts, []
        vectors = Vectors(
            keys=torch.cat([p.keys for p in parts]),
            values=torch.cat([p.values for p in parts]),
            held_keys=torch.cat([p.held_keys for p in parts]),
            held_values=torch.cat([p.held_values for p in parts]),
            held_layer=torch.cat([torch.full_like(p.held_head, layer) for layer, p in enumerate(parts)]),
            held_head=torch.cat([p.held_head for p in parts]),
            train_of=list(_runs([len(p.keys) for p in parts])),
            held_of=list(_runs([len(p.held_keys) for p in parts])),
            rotary=rotary,
            scales=[p.scales for p in parts],
            probe=probe,
        )
        if len(vectors.keys) < self.method.vectors:
            say(f"note: {len(vectors.keys)} vectors, all that these windows have, not {self.method.vectors}")
        return vectors


def _runs(counts: list[int]) -> Iterator[slice]:
    at = 0
    for count in counts:
        yield slice(at, at + count)
        at += count


def _check_enough(method: VQKV, text: Windows, layers: int, heads: int) -> int:
    """Return how many vectors a codebook is trained on; called before the model runs. Raises UsageError for fewer than
    codewords.
    """
    tokens = int(text.train.shape[1]) - method.sink
    if tokens < 1:
        raise UsageError(
            f"windows of {text.train.shape[1]} tokens are all sink ({method.sink}): give a larger --length"
        )
    per_layer = len(text.train) * heads * tokens  # of a layer
    least = min(method.vectors, per_layer * layers) if method.shared else min(method.vectors // layers, per_layer)
    if least < max(method.sizes):
        raise UsageError(
            f"{least} vectors{'' if method.shared else ' a layer'} for codebooks of {max(method.sizes)} codewords: "
            "give more --windows or --vectors, or smaller --sizes"
        )
    if not len(text.holdout):
        raise UsageError("no held-out vectors: give --holdout at least 1")
    return least


@dataclass
class Picked:
    """keys, values (n, D) and the head of each (n,), on the device."""

    keys: Tensor
    values: Tensor
    head: Tensor


@dataclass
class Sample:
    """One layer's part of Vectors, with their dtypes. scales (H, D) or None, on the CPU; rotary: dimensions that RoPE
    turns, 0 without it; probe: of the layer's key weights, empty where the fingerprint does not look at it.
    """

    keys: Tensor
    values: Tensor
    held_keys: Tensor
    held_values: Tensor
    held_head: Tensor
    scales: dict[str, Tensor | None]
    rotary: int = 0
    probe: tuple[float, ...] = ()

    VECTORS = ("keys", "values", "held_keys", "held_values", "held_head")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The sample's tensors by name, scales as scales.ROLE."""
        scales = {f"scales.{role}": scale for role, scale in self.scales.items() if scale is not None}
        return {name: getattr(self, name) for name in self.VECTORS} | scales

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class LayerSample:
    """One layer's sample, in one pass over the windows."""

    def __init__(self, method: VQKV, taps: LayerTaps, train: int, heads: int, layers: int, holdout: int) -> None:
        self.method, self.taps, self.windows, self.heads = method, taps, train, heads
        self.tokens = taps.length - method.sink
        self.places = {
            "train": self._places("train", 0, train, _share(method.vectors, layers, taps.place)),
            "held": self._places("held", train, taps.windows, _share(holdout, layers, taps.place)),
        }

    def gather(self) -> Sample:
        """Run the layer once; what was picked, divided by its scales."""
        taken: dict[str, list[Picked]] = {"train": [], "held": []}
        squares: dict[str, Tensor] = {}
        cuda = False
        for batch in self.taps.batches(self.method.taps, self.method.frame, advance=True):
            assert batch.k is not None and batch.v is not None
            for name, places in self.places.items():
                taken[name].append(self._pick(batch.k, batch.v, places, batch.rows))
            cuda = batch.k.is_cuda
            fitted = max(0, self.windows - batch.rows.start)
            for tap, x in (("k", batch.k), ("v", batch.v), ("q", batch.q)):
                if x is not None and fitted:
                    square = self._squares(x[:fitted])
                    squares[tap] = squares[tap] + square if tap in squares else square
        mean = {name: total / (self.windows * self.tokens) for name, total in squares.items()}
        self.scales = two_scales(self.method, mean["k"], mean["v"], mean.get("q"))
        fitted = self._scaled(taken["train"], torch.bfloat16 if cuda else torch.float32)
        holdout = self._scaled(taken["held"], torch.float32)
        scales = {name: None if s is None else s.cpu() for name, s in self.scales.items()}
        rotary = 0 if self.taps.rope is None else self.taps.rope[0].shape[-1]
        return Sample(fitted.keys, fitted.values, holdout.keys, holdout.values, holdout.head, scales, rotary)

    def _places(self, name: str, first: int, stop: int, count: int) -> Tensor:
        """Sorted numbers of (window, head, token) among all, windows counted from the first of the text."""
        whole = (stop - first) * self.heads * self.tokens
        label = f"{self.method.training.seed}:{name}:{self.taps.index}"
        return spread(whole, min(count, whole), label).sort().values + first * self.heads * self.tokens

    def _pick(self, keys: Tensor, values: Tensor, places: Tensor, rows: slice) -> Picked:
        unit = self.heads * self.tokens
        low, high = torch.searchsorted(places, torch.tensor([rows.start * unit, rows.stop * unit]))
        here = (places[low:high] - rows.start * unit).to(keys.device)
        window, head, token = here // unit, here // self.tokens % self.heads, here % self.tokens + self.method.sink
        return Picked(keys[window, head, token], values[window, head, token], head)

    def _squares(self, x: Tensor) -> Tensor:
        """Sum of squares over windows and coded tokens, the mean over query heads that share a kv head: float64 (H,
        D).
        """
        grouped = x[:, :, self.method.sink :].unflatten(1, (self.heads, -1))
        total: Tensor = grouped.float().square().sum(3).double().sum(0).mean(1)
        return total

    def _scaled(self, parts: list[Picked], dtype: torch.dtype) -> Picked:
        head = torch.cat([p.head for p in parts])
        scaled = {}
        for role, pieces in (("key", [p.keys for p in parts]), ("value", [p.values for p in parts])):
            x, scale = torch.cat(pieces).float(), self.scales[role]
            scaled[role] = (x if scale is None else x / scale.to(x.device).float()[head]).to(dtype)
        return Picked(scaled["key"], scaled["value"], head)


def _share(total: int, parts: int, index: int) -> int:
    """How many of `total` fall to one of so many parts: they differ by at most one."""
    return total // parts + (index < total % parts)


# Training.


class StageCheckpoint(LayerCheckpoint):
    """Beside the output: one file a layer's vectors and one a trained stage, with its report; each with a hash."""

    VERSION = 2  # of a report: 1 had no errors by iteration

    def __init__(self, output: Path, record: Mapping[str, Json], resume: bool) -> None:
        super().__init__(output, {**record, "stage_report": self.VERSION}, resume)

    def count(self) -> int:
        return sum(1 for _ in self.folder.glob("*-*.safetensors"))

    def load(self, job: str, stage: int) -> tuple[Tensor, StageReport] | None:
        """A stage as it was kept; a damaged one is removed, and trained again."""
        return self._read(
            self._stage(job, stage), lambda tensors, record: (tensors["codewords"], StageReport(**record["report"]))
        )

    def keep(self, job: str, book: Tensor, report: StageReport) -> None:
        self._write(self._stage(job, report.stage), {"codewords": book}, {"report": vars(report)})

    def samples(self, layers: int, device: torch.device) -> list[Sample]:
        """Vectors of all layers as they were kept; none if one is missing or damaged: they come from one run."""
        if not all(self._sample(layer).exists() for layer in range(layers)):
            return []

        def made(tensors: dict[str, Tensor], record: dict[str, Any]) -> Sample:
            vectors = {name: tensors[name].to(device) for name in Sample.VECTORS}
            scales = {role: tensors.get(f"scales.{role}") for role in record["roles"]}
            return Sample(**vectors, scales=scales, rotary=record["rotary"], probe=tuple(record["probe"]))

        samples: list[Sample] = []
        for layer in range(layers):
            if (sample := self._read(self._sample(layer), made)) is None:
                return []
            samples.append(sample)
        return samples

    def keep_sample(self, layer: int, sample: Sample) -> None:
        record: dict[str, Json] = {"roles": list(sample.scales), "rotary": sample.rotary, "probe": sample.probe}
        self._write(self._sample(layer), sample.tensors, record)

    def drop_samples(self) -> None:
        for path in self.folder.glob(self._sample(0).name.replace("0", "[0-9]")):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: dict[str, Tensor], record: Mapping[str, Json]) -> None:
        on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        signed = {**record, "sha256": _digest(on_host)}
        write_atomically(self.place(path.name), save(on_host, metadata={"stage": canonical(signed)}))

    def _read(self, path: Path, make: Callable[[dict[str, Tensor], dict[str, Any]], Made]) -> Made | None:
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


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


class Run:
    """Training of all quantisers over collected vectors, which it consumes."""

    def __init__(
        self,
        method: VQKV,
        vectors: Vectors,
        work: StageCheckpoint,
        timer: PhaseTimer,
        say: Say,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """numbers: of the layers whose vectors these are; None: 0, 1, 2, ..."""
        self.numbers = range(len(vectors.scales)) if numbers is None else numbers
        self.method, self.vectors, self.work, self.timer, self.say = method, vectors, work, timer, say
        self.rows: list[dict[str, Json]] = []
        self.splits: list[dict[str, Json]] = []
        self.resumed = 0
        self.left = {"key": torch.zeros_like(vectors.held_keys), "value": torch.zeros_like(vectors.held_values)}

    def layers(self, shape: Shape) -> list[LayerCodecs]:
        """Codecs of every layer that there are vectors of."""
        count = len(self.vectors.scales)
        groups = [range(count)] if self.method.shared else [range(i, i + 1) for i in range(count)]
        stages = sum(number for number, _ in quantisers(self.method).values())
        codecs: list[LayerCodecs] = []
        with progress("Training stages", total=stages * len(groups)) as self.advance:
            for group in groups:
                bands, books = self._group(group)
                codecs += [self.method.layer_codecs(shape, bands, books, self.vectors.scales[i]) for i in group]
        return codecs

    def _group(self, layers: range) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Bands and codebooks of some neighbouring layers that share them."""
        train, holdout = self._slice(self.vectors.train_of, layers), self._slice(self.vectors.held_of, layers)
        suffix = "" if self.method.shared else f"-layer-{layers.start:04d}"
        label = f"{self.method.training.seed}{suffix}"
        with self.timer("split"):
            bands = self._bands(self.vectors.keys[train], self.vectors.held_keys[holdout], label, layers)
        books: dict[str, Tensor] = {}
        for name, (stages, size) in quantisers(self.method).items():
            role = "value" if name == "value" else "key"
            dims = list(range(self.vectors.values.shape[1])) if role == "value" else bands[name == "high"]
            x, rest = self._part(role, train, dims), self._part(f"held_{role}", holdout, dims).clone()
            books[name] = self._quantiser(f"{name}{suffix}", f"{label}:{name}", x, rest, stages, size)
            self.left[role][holdout.start : holdout.stop, torch.tensor(dims, device=rest.device)] = rest
        return bands, books

    def _slice(self, parts: list[slice], layers: range) -> slice:
        return slice(parts[layers.start].start, parts[layers.stop - 1].stop)

    def _part(self, role: str, rows: slice, dims: list[int]) -> Tensor:
        """Some dimensions of some vectors (n, len(dims)); all of them: no copy, and the vectors are consumed."""
        x: Tensor = getattr(self.vectors, f"{role}s")[rows]
        return x if len(dims) == x.shape[1] else x[:, torch.tensor(dims, device=x.device)]

    def _bands(self, keys: Tensor, holdout: Tensor, label: str, layers: range) -> list[list[int]]:
        dim = keys.shape[1]
        high = self.method.high_dims(dim)
        if not high:
            return band_split(torch.zeros(dim), torch.zeros(dim), 0, 0, self.method.split)
        error, energy = (t.cpu() for t in reconstruction_errors(keys, holdout, label, self.method.training))
        bands = band_split(error, energy, high, self.vectors.rotary, self.method.split)
        share = [round(float(e / a), 6) if a else 0.0 for e, a in zip(error, energy, strict=True)]
        self.splits.append(
            {
                "layers": [self.numbers[layers.start], self.numbers[layers.stop - 1]],
                "high": bands[1],
                "relative_errors": share,
            }
        )
        self.say(f"bands: {len(bands[0])} low, {high} high dimensions, the worst reconstructed: {bands[1]}")
        return bands

    def _quantiser(self, job: str, label: str, x: Tensor, holdout: Tensor, stages: int, size: int) -> Tensor:
        """Codebooks (S, k, d) float16 on the CPU; x and held become what they leave."""
        energy = float(holdout.double().square().sum())
        books = []
        for stage in range(stages):
            with self.timer("train"):
                book, report = self._stage(job, label, x, holdout, energy, stage, size)
            books.append(book.cpu())
            self.rows.append({"quantiser": job, **vars(report)})
            self.advance()
        return torch.stack(books)

    def _stage(
        self, job: str, label: str, x: Tensor, holdout: Tensor, energy: float, stage: int, size: int
    ) -> tuple[Tensor, StageReport]:
        if (saved := self.work.load(job, stage)) is not None:
            book, report = saved[0].to(x.device), saved[1]
            subtract(x, book)
            subtract(holdout, book)
            self.resumed += 1
            return book, report
        started = time.monotonic()
        book, report = train_stage(x, holdout, energy, stage, size, f"{label}:{stage}", self.method.training)
        subtract(holdout, book)
        report.used = subtract(x, book)
        report.seconds = round(time.monotonic() - started, 2)
        self.work.keep(job, book, report)
        self.say(
            f"{job} stage {stage + 1}: held-out error {report.error:.4f} after {report.iterations} iterations, "
            f"{report.used} of {size} codewords used, {report.seconds:.1f} s"
        )
        return book, report

    def metrics(self, scheme: Scheme) -> dict[str, Json]:
        """What the bundle says of itself: no times, nothing that differs from run to run."""
        dim = self.vectors.keys.shape[1]
        return {
            "key_relative_error": self._relative_error("key"),
            "value_relative_error": self._relative_error("value"),
            "bits_per_value": scheme.bits_per_value(),
            "paper_bits_per_value": round(scheme.paper_bits(), 6),
            "paper_compression": round(self.method.paper_compression(dim), 6),
            "codebook_bytes": scheme.resident_bytes(),
            "train_vectors": len(self.vectors.keys),
            "holdout_vectors": len(self.vectors.held_keys),
            "bands": self.splits,
            "stages": [{name: value for name, value in row.items() if name != "seconds"} for row in self.rows],
        }

    def _relative_error(self, role: str) -> float:
        """Held-out |x - decoded|^2 / |x|^2 in the units of keys and values, whatever they were divided by."""
        original, rest = getattr(self.vectors, f"held_{role}s"), self.left[role]
        table = [scales[role] for scales in self.vectors.scales]
        if table[0] is not None:
            units = torch.stack([t for t in table if t is not None]).to(original.device).float()
            units = units[self.vectors.held_layer, self.vectors.held_head]
            original, rest = original * units, rest * units
        return round(float(rest.double().square().sum() / original.double().square().sum().clamp_min(1e-300)), 6)
