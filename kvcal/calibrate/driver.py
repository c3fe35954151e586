"""The one calibration driver: a scan over layers with a checkpoint after each, so that a killed run goes on.

One scan may serve several bundles (`fit_together`), each with its checkpoint.

Layers below the interruption are replayed (their codecs are on disk; hidden states and reconstructions are computed
again), which gives the same bytes as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import SUFFIX, Bundle, Fingerprint
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, coverage
from kvcal_kernels.device import on

from ..capture.checks import check_model
from ..capture.ranks import ErrorAgainError, RankEndedError, ShareDoneError
from ..capture.scan import Capture, LayerSource, LayerTaps, default_batch
from ..capture.shards import Shards, ShardStore
from ..capture.spill import SpillStore
from ..methods.base import Carry, Finishing, HasUnfitted, Method, coded_tokens
from ..methods.vqkv import VQKV
from ..report.progress import progress
from ..report.timing import PhaseTimer
from .checkpoint import FollowersCheckpoint, LayerCheckpoint
from .codebooks import TrainResult
from .job import FitJob, FitOptions, FitResult, Part, Scan
from .needs import predictions_worse_than_none, too_little
from .outlier_guard import say_forecasts
from .sampled_vectors import Say

if TYPE_CHECKING:
    from ..text.token_windows import Windows


def fit(
    method: Method | VQKV,
    source: LayerSource,
    text: Windows,
    output: Path,
    *,
    model_record: Mapping[str, Json],
    revision: str | None,
    device: torch.device,
    seed: int = 0,
    options: FitOptions | None = None,
    searched: Mapping[str, Mapping[str, Json]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    other: Windows | None = None,
    selection: HeavyHitters | None = None,
) -> FitResult:
    """Calibrate every layer and write the bundle; the same arguments give the same bytes.

    searched, selection: `FitJob` explains them. other: windows of another text, for methods that compare; they come
    behind the held-out ones. Raises KVCalError for models or windows that cannot be calibrated, before any work.
    """
    job = FitJob(method, output, seed, searched, selection)
    return fit_together(
        [job],
        source,
        text,
        model_record=model_record,
        revision=revision,
        device=device,
        options=options,
        say=say,
        other=other,
    )[0]


def fit_together(
    jobs: Sequence[FitJob],
    source: LayerSource,
    text: Windows,
    *,
    model_record: Mapping[str, Json],
    revision: str | None,
    device: torch.device,
    options: FitOptions | None = None,
    say: Callable[[str], None] = lambda line: None,
    other: Windows | None = None,
    written: Callable[[FitJob, FitResult], None] = lambda job, result: None,
) -> list[FitResult]:
    """Several bundles from one scan over the layers, each with its own checkpoint and the bytes that `fit` gives it
    alone.

    Each layer is loaded once and run once as a whole; every method passes over the layer's q, k and v by itself,
    which end before attention. written: called as soon as a bundle is on disk. Raises as `fit`, and ShareDoneError at
    the end on all ranks but rank 0.
    """
    options = options or FitOptions()
    ids = torch.cat((text.train, text.holdout, *(() if other is None else (other.train,))))
    check_model(source.model, hf.decoder_of(source.model))
    timer = options.timer or PhaseTimer(device)
    scan = Scan(source, text, other, ids, model_record, revision, device, options, timer, say)
    sites = [hf.attention_site(hf.decoder_of(source.model), index) for index in scan.compressed]
    for job in jobs:
        hf.check_frame(sites, job.method.frame)
        for site in sites if job.selection is not None else []:
            hf.check_selectable(site)
    if scan.skipped:
        say(coverage(scan.config.num_hidden_layers, scan.skipped))
    parts = [_part(job, scan) for job in jobs]
    probes = [part.saved_probe for part in parts if part.saved_probe is not None]
    probe = probes[0] if len(probes) == len(parts) else _scanned(parts, scan)
    ranks = scan.options.ranks
    if ranks.hold_one_model:  # which all of them must run
        _warn(jobs, parts, scan)
    if ranks.rank:
        for part in parts:
            part.share()
        raise ShareDoneError
    fingerprint = Fingerprint.of(source.model, revision, probe)
    if not ranks.hold_one_model:
        _warn(jobs, parts, scan)
    results = []
    for job, part in zip(jobs, parts, strict=True):
        results.append(part.finish(fingerprint))
        written(job, results[-1])
    return results


def _scanned(parts: Sequence[Part], scan: Scan) -> tuple[float, ...]:
    """Show every part every layer; returns the fingerprint's probe."""
    options, layered = scan.options, [part.work for part in parts if isinstance(part, LayerPart)]
    others = [part.work for part in parts if not isinstance(part, LayerPart)]
    probe: tuple[float, ...] = ()
    with _failing(layered, others), ExitStack() as stack:
        capture = stack.enter_context(
            Capture(
                scan.source,
                scan.ids,
                device=scan.device,
                batch=options.batch,
                hidden=options.spill,
                spill_dir=options.spill_dir,
                timer=scan.timer,
                ranks=options.ranks.of_windows,
                train=len(scan.text.train),
            )
        )
        for part in parts:
            part.open(stack)
        with progress("Fitting layers", total=len(capture)) as advance:
            for taps in capture:
                probe += taps.probe
                with on(taps.device), scan.timer("method"):  # the first: which kernels are launched on
                    for part in parts[:-1]:
                        with taps.shared() as shared:
                            part.layer(shared)
                    parts[-1].layer(taps)  # runs the whole layer in its last pass
                advance()
    return probe


def _warn(jobs: Sequence[FitJob], parts: Sequence[Part], scan: Scan) -> None:
    """Complete every part, and say what the fitted schemes are forecast to cost, where that is much: one pass for
    all.
    """
    names = [job.output.name.removesuffix(SUFFIX) for job in jobs]
    if len(set(names)) < len(names):  # outputs of one name in several folders
        names = [str(job.output) for job in jobs]
    with scan.timer("method"):
        completed = {name: part.complete() for name, part in zip(names, parts, strict=True)}
    schemes = {name: scheme for name, scheme in completed.items() if scheme is not None}
    if not schemes or not scan.options.warn:
        return
    methods = {name: job.method for name, job in zip(names, jobs, strict=True) if name in schemes}
    bare = {name: method.unfitted() for name, method in methods.items() if isinstance(method, HasUnfitted)}
    with _failing([part.work for part in parts if isinstance(part, LayerPart)]), scan.timer("guard"):
        say_forecasts(scan, schemes, {name: one for name, one in bare.items() if one is not None})


def _part(job: FitJob, scan: Scan) -> Part:
    if isinstance(job.method, VQKV):  # its codebooks are shared by layers: trained after the scan
        if scan.options.ranks.hold_one_model:
            raise UsageError("codebooks of VQKV are not trained on heads of several processes (tp_plan)")
        from .codebooks import TrainPart

        return TrainPart(job, scan)
    return LayerPart(job, scan)


class LayerPart:
    """A method that is done with a layer before it sees the next."""

    saved_probe: tuple[float, ...] | None = None  # hidden states and reconstructions are not stored

    def __init__(self, job: FitJob, scan: Scan) -> None:
        assert not isinstance(job.method, VQKV)
        self.job, self.scan, self.method = job, scan, job.method
        self.shape = hf.layer_shape(scan.config, self.method.windows.block)
        windows = self.method.windows
        self.tokens = coded_tokens(scan.ids.shape[1], windows.sink, windows.block)
        self.record = scan.record(job)
        ranks = scan.options.ranks
        ranks.check_same(self.record)
        self.work: LayerCheckpoint = (
            LayerCheckpoint(job.output, self.record, scan.options.resume)
            if ranks.rank == 0
            else FollowersCheckpoint(job.output, self.record)
        )
        self.done = ranks.agree(self.work.layers(scan.compressed))
        self.fitted: list[LayerCodecs] = []
        self.metrics: list[dict[str, float]] = []
        group = scan.config.num_attention_heads // self.shape.heads
        coded = self.tokens.stop - self.tokens.start
        for line in too_little(self.method, self.shape, group, len(scan.text.train), coded):
            scan.say(line)
        if self.done:
            layers = scan.config.num_hidden_layers
            scan.say(f"resuming after layer {max(self.done)} of {layers} from {self.work.folder}")

    def open(self, stack: ExitStack) -> None:
        scan, text = self.scan, self.scan.text
        layers = scan.config.num_hidden_layers
        self.carry = Carry(
            len(text.train),
            self.tokens,
            self.shape,
            scan.timer,
            layers,
            holdout=len(text.holdout),
            skipped=scan.skipped,
        )
        batch = scan.options.batch or default_batch(scan.ids.shape[1], scan.device)
        shards = Shards(len(scan.ids), batch, scan.options.ranks.of_windows, self.carry.train)
        width = (self.tokens.stop - self.tokens.start, self.shape.heads * self.shape.dim)
        stores: dict[str, SpillStore] = {}
        for name, buffer in self.method.buffers().items():
            if buffer not in stores:
                stores[buffer] = stack.enter_context(
                    ShardStore(
                        shards,
                        width,
                        scan.dtype,
                        device=scan.device,
                        where=scan.options.spill,
                        spill_dir=scan.options.spill_dir,
                        label="reconstructions",
                    )
                )
            self.carry.stores[name] = stores[buffer]

    def layer(self, taps: LayerTaps) -> None:
        for store in self.carry.stores.values():
            store.move(taps.device)
        pair, measured = _one_layer(self.method, taps, self.carry, self.done, self.work)
        self.fitted.append(pair)
        self.metrics.append(measured)

    def complete(self) -> Scheme:
        if isinstance(self.method, Finishing):
            self.fitted, self.metrics = self.method.finish(self.fitted, self.metrics)
        layers, skipped = self.scan.placed(self.fitted), self.scan.skipped
        self.scheme = Scheme(self.method.windows, self.method.frame, layers, skipped, self.job.selection)
        return self.scheme

    def share(self) -> None:
        """Nothing: every layer is fitted."""

    def finish(self, fingerprint: Fingerprint) -> FitResult:
        scheme = self.scheme
        rows = dict(zip(self.scan.compressed, self.metrics, strict=True))
        metrics = [rows.get(index, {}) for index in range(len(scheme.layers))]
        for line in predictions_worse_than_none(metrics):
            self.scan.say(line)
        holdout = len(self.scan.text.holdout)
        summary = {"layers": metrics, "holdout_windows": holdout, "bits_per_value": scheme.bits_per_value()}
        searched = self.job.searched or {}
        summary |= {"search": searched["metrics"]} if "metrics" in searched else {}
        bundle = Bundle(fingerprint, scheme, self.record, summary | averages(metrics))
        with _failing([self.work]), self.scan.timer("write"):
            digest = bundle.write(self.job.output)
            self.work.remove()
        return FitResult(bundle, self.job.output, digest, self.scan.timer.split(), len(self.done), metrics)


def _one_layer(
    method: Method, taps: LayerTaps, carry: Carry, done: dict[int, Bundle], work: LayerCheckpoint
) -> tuple[LayerCodecs, dict[str, float]]:
    if (saved := done.get(taps.index)) is not None:
        pair = saved.scheme.layers[0]
        assert pair is not None
        method.replay_layer(taps.index, taps, carry, pair)
        return pair, saved.metrics
    result = method.fit_layer(taps.index, taps, carry)
    with carry.timer("keep"):
        work.save(taps.index, method, result.codecs, result.metrics)
    return result.codecs, result.metrics


def averages(metrics: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Means over the layers that have the figure; lists, a number a head, have none."""
    figures: dict[str, list[float]] = {}
    for row in metrics:
        for name, value in row.items():
            if isinstance(value, (int, float)):
                figures.setdefault(name, []).append(value)
    return {name: round(sum(values) / len(values), 6) for name, values in figures.items()}


@contextmanager
def _failing(works: Sequence[LayerCheckpoint], others: Sequence[LayerCheckpoint] = ()) -> Iterator[None]:
    """Make an error within say what stays on disk; after one that would come again, nothing does.

    others: have no fitted layers to speak of.
    """
    try:
        yield
    except (NonFiniteError, ErrorAgainError):
        for work in (*works, *others):
            work.remove()
        raise
    except KVCalError as error:
        _settle(works)
        waiting = [str(work.folder) for work in works if work.folder.exists()]
        if (type(error) is KVCalError or isinstance(error, RankEndedError)) and waiting:
            raise type(error)(
                f"{error} (fitted layers wait in {', '.join(waiting)}: start again to go on, or delete it)"
            ) from error
        raise
    except BaseException:  # an interrupt
        _settle(works)
        raise


def _settle(works: Sequence[LayerCheckpoint]) -> None:
    """Wait for what is still being written, in a run that ends with an error of its own."""
    for work in works:
        with suppress(OSError, KVCalError):
            work.settle()


def train(
    method: VQKV,
    source: LayerSource,
    text: Windows,
    output: Path,
    *,
    model_record: Mapping[str, Json],
    revision: str | None,
    device: torch.device,
    seed: int = 0,
    options: FitOptions | None = None,
    say: Say = lambda line: None,
    selection: HeavyHitters | None = None,
) -> TrainResult:
    """Codebooks of all layers into a bundle; the same arguments give the same bytes. selection: `FitJob` explains it.

    Raises KVCalError for models, windows or settings that cannot be trained, before any work.
    """
    [result] = fit_together(
        [FitJob(method, output, seed, selection=selection)],
        source,
        text,
        model_record=model_record,
        revision=revision,
        device=device,
        options=options,
        say=say,
    )
    assert isinstance(result, TrainResult)
    return result
