"""The driver of `kvcal train-codebooks`: collect vectors in one pass over the layers (sampled_vectors.py), train stage
after stage, write a bundle.

Vectors are stored layer by layer, and codebooks stage by stage, so that a killed run goes on. Once vectors of all
layers are on disk the model is not run again. The stages that are there turn them into residuals, and training
continues. A collection that was cut off begins anew, as each layer needs the hidden states of the one before. The file
comes out the same.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_kernels.residual_vq.nearest import compile_for

from ..capture.ranks import ErrorAgainError, RankEndedError
from ..capture.scan import LayerTaps
from ..methods.codebooks import StageReport, train_stage
from ..methods.training_vectors import TrainingVectors, VectorShards, subtract
from ..methods.vqkv import VQKV, band_split, peak_memory, quantisers, reconstruction_errors, searches
from ..report.progress import progress
from ..report.timing import PhaseTimer
from .job import FitJob, FitResult, Scan
from .needs import few_vectors
from .outlier_guard import say_forecasts
from .sampled_vectors import WORKING, Collection, Sample, Say, Vectors
from .stage_checkpoint import FollowersStages, StageCheckpoint

if TYPE_CHECKING:
    from ..text.token_windows import Windows

DISK_PART = 0.5  # of the free disk that stored vectors may take: the bundle and other jobs need some, too


@dataclass
class TrainResult(FitResult):
    """What a training of codebooks came to. stages: a row a stage (StageReport, quantiser). peak_bytes: of the device's
    memory, of the process on a CPU.
    """

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
        ranks = scan.options.ranks
        ranks.check_same(self.record)
        self.work = (
            StageCheckpoint(job.output, self.record, scan.options.resume)
            if ranks.rank == 0
            else FollowersStages(job.output, self.record)
        )
        self.layers, self.saved, self.keeping = len(scan.compressed), 0, ranks.rank == 0
        length, train = scan.ids.shape[1], len(scan.text.train)
        self.collected = Collection(self.method, train, self.shape.heads, self.layers, length, ranks)
        self._take_saved()
        self.saved_probe = self.collected.probe if self.collected.parts else None
        if self.saved_probe is not None:
            scan.say(f"resuming with the vectors of all {self.layers} layers from {self.work.folder}")
        if done := self.work.count():
            scan.say(f"resuming after {done} stages from {self.work.folder}")

    def _take_saved(self) -> None:
        """Take the vectors that an earlier run stored, those of all layers or none."""
        ranks = self.scan.options.ranks
        if not ranks.agree(self.work.has_samples(self.layers)):
            return
        for layer in range(self.layers):
            [sample] = ranks.agree([self.work.sample(layer, self.scan.device)])
            if sample is None:
                self.collected.parts.clear()
                return
            self.collected.take(sample)

    def open(self, stack: ExitStack) -> None:
        """While layers are read, a thread compiles the kernels of the training: that takes a GPU ten seconds. What is
        not compiled at the end is left to the training.
        """
        if self.scan.device.type != "cuda":
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="kernels")
        stack.callback(pool.shutdown, cancel_futures=True)
        for dim, size in sorted(searches(self.method, self.shape.dim), key=lambda one: -one[0]):
            for dtype in (WORKING["cuda"], torch.float32):  # of training vectors, and of held-out ones
                pool.submit(compile_for, dim, size, dtype, self.scan.device)

    def layer(self, taps: LayerTaps) -> None:
        if self.saved_probe is not None:
            return
        sample = self.collected.sample(taps)
        self.collected.take(sample)
        if self.keeping:
            with self.scan.timer("keep"):
                self._keep(taps.place, sample)

    def _keep(self, layer: int, sample: Sample) -> None:
        """A layer's sample on disk, if the disk has room for all of them; one warning where it has not."""
        folder, size = self.work.folder, sample.nbytes * self.layers
        try:
            free = shutil.disk_usage(folder.parent).free
            if not layer and size > free * DISK_PART:
                raise KVCalError(f"{size / 1e6:,.0f} MB of vectors are more than half of the {free / 1e6:,.0f} MB free")
            self.work.keep_sample(layer, sample)
            if layer + 1 == self.layers:
                self.work.settle()
        except (OSError, KVCalError) as error:
            self.keeping = False
            self.work.drop_samples()
            self.scan.say(f"note: vectors are not kept, a killed run collects them again: {error}")
            return
        self.saved += sample.nbytes
        if layer + 1 == self.layers:
            self.scan.say(
                f"vectors of all {self.layers} layers, {self.saved / 1e6:,.1f} MB, wait in {folder} until training is "
                "done"
            )

    def complete(self) -> None:
        """Codebooks are trained in `finish`, so that bundles before it are written first."""

    def finish(self, fingerprint: Fingerprint) -> TrainResult:
        run, codecs = self._trained()
        layers = self.scan.placed(codecs)
        scheme = Scheme(self.method.windows, self.method.frame, layers, self.scan.skipped, self.job.selection)
        bundle = Bundle(fingerprint, scheme, self.record, run.metrics(scheme), self.job.output)
        with self.scan.timer("guard"):
            say_forecasts(self.scan, {bundle.name: scheme})
        with self.scan.timer("write"):
            try:
                digest = bundle.write(self.job.output)
            except KVCalError as error:
                raise self._with_place(error) from error
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

    def share(self) -> None:
        self._trained()

    def _trained(self) -> tuple[Run, list[LayerCodecs]]:
        """The training, which is over, and the codecs of the compressed layers."""
        try:
            with self.scan.timer("method"):
                vectors = self.collected.vectors(self.scan.say)
                run = Run(self.method, vectors, self.work, self.scan.timer, self.scan.say, self.scan.compressed)
                return run, run.layers(self.shape)
        except KVCalError as error:
            raise self._with_place(error) from error
        except BaseException:  # an interrupt, too
            self._settle()
            raise

    def _settle(self) -> None:
        with suppress(OSError, KVCalError):
            self.work.settle()

    def _with_place(self, error: KVCalError) -> KVCalError:
        """The error, which also says what stays on disk."""
        self._settle()
        goes_on = type(error) is KVCalError or isinstance(error, RankEndedError)
        if not goes_on or isinstance(error, ErrorAgainError) or not self.work.count():
            return error
        where = f"{error} (stages wait in {self.work.folder}: start again to go on, or delete it)"
        return type(error)(where)


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
        """Train on vectors of these layers. numbers: of the layers whose vectors these are; None: 0, 1, 2, ..."""
        self.numbers = range(len(vectors.scales)) if numbers is None else numbers
        self.method, self.vectors, self.work, self.timer, self.say = method, vectors, work, timer, say
        self.rows: list[dict[str, Json]] = []
        self.splits: list[dict[str, Json]] = []
        self.resumed, self.keeping = 0, True
        self.residuals = {
            "key": torch.zeros_like(vectors.holdout_keys),
            "value": torch.zeros_like(vectors.holdout_values),
        }

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
        holdout = self._slice(self.vectors.holdout_of, layers)
        keys, values = self._vectors("key", layers), self._vectors("value", layers)
        suffix = "" if self.method.shared else f"-layer-{layers.start:04d}"
        label = f"{self.method.training.seed}{suffix}"
        with self.timer("split"):
            bands = self._bands(keys, self.vectors.holdout_keys[holdout], label, layers)
        books: dict[str, Tensor] = {}
        for name, (stages, size) in quantisers(self.method).items():
            role, whole = ("value", values) if name == "value" else ("key", keys)
            dims = list(range(values.dim)) if role == "value" else bands[name == "high"]
            x = whole if len(dims) == whole.dim else whole.columns(dims)  # all of them: the vectors are consumed
            columns = torch.tensor(dims, device=x.device)
            rest = getattr(self.vectors, f"holdout_{role}s")[holdout][:, columns]
            books[name] = self._quantiser(f"{name}{suffix}", f"{label}:{name}", x, rest, stages, size)
            self.residuals[role][holdout.start : holdout.stop, columns] = rest
        return bands, books

    def _slice(self, parts: list[slice], layers: range) -> slice:
        return slice(parts[layers.start].start, parts[layers.stop - 1].stop)

    def _vectors(self, role: str, layers: range) -> TrainingVectors:
        """Training vectors of neighbouring layers, not copied."""
        local: Tensor = getattr(self.vectors, f"{role}s")[self._slice(self.vectors.train_of, layers)]
        total = sum(self.vectors.totals[layer] for layer in layers)
        return TrainingVectors(local, VectorShards(total, self.vectors.ranks))

    def _bands(self, keys: TrainingVectors, holdout: Tensor, label: str, layers: range) -> list[list[int]]:
        dim = keys.dim
        high = self.method.high_dims(dim)
        if not high:
            return band_split(
                torch.zeros(dim, dtype=torch.float32, device="cpu"),
                torch.zeros(dim, dtype=torch.float32, device="cpu"),
                0,
                0,
                self.method.split,
            )
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

    def _quantiser(self, job: str, label: str, x: TrainingVectors, holdout: Tensor, stages: int, size: int) -> Tensor:
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
        self, job: str, label: str, x: TrainingVectors, holdout: Tensor, energy: float, stage: int, size: int
    ) -> tuple[Tensor, StageReport]:
        ranks = self.vectors.ranks
        [saved] = ranks.agree([self.work.load(job, stage, (size, x.dim))])
        if saved is not None:
            book, report = saved[0].to(x.device), saved[1]
            x.subtract(book)
            subtract(holdout, book, ranks)
            self.resumed += 1
            return book, report
        started = time.monotonic()
        book, report = train_stage(x, holdout, energy, stage, size, f"{label}:{stage}", self.method.training)
        subtract(holdout, book, ranks)
        report.used = x.subtract(book)
        report.seconds = round(time.monotonic() - started, 2)
        self._keep(job, book, report)
        self.say(
            f"{job} stage {stage + 1}: held-out error {report.error:.4f} after {report.iterations} iterations, "
            f"{report.used} of {size} codewords used, {report.seconds:.1f} s"
        )
        return book, report

    def _keep(self, job: str, book: Tensor, report: StageReport) -> None:
        """A stage on disk, if the disk has room; one warning where it has not."""
        if not self.keeping:
            return
        try:
            self.work.keep(job, book, report)
        except (OSError, KVCalError) as error:
            self.keeping = False
            self.say(f"note: stages are not kept from here on, a killed run trains them again: {error}")

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
            "train_vectors": sum(self.vectors.totals),
            "holdout_vectors": len(self.vectors.holdout_keys),
            "bands": self.splits,
            "stages": [{name: value for name, value in row.items() if name != "seconds"} for row in self.rows],
        }

    def _relative_error(self, role: str) -> float:
        """Held-out |x - decoded|^2 / |x|^2 in the units of keys and values, whatever they were divided by."""
        original, rest = getattr(self.vectors, f"holdout_{role}s"), self.residuals[role]
        table = [scales[role] for scales in self.vectors.scales]
        if table[0] is not None:
            units = torch.stack([t for t in table if t is not None]).to(original.device).float()
            units = units[self.vectors.holdout_layer, self.vectors.holdout_head]
            original, rest = original * units, rest * units
        return round(float(rest.double().square().sum() / original.double().square().sum().clamp_min(1e-300)), 6)
