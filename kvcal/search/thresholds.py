"""MixKVQ's thresholds (Appendix C of the paper): two objectives, a Pareto front, the best point under a bit limit; then
a fit.

What is searched: tau_low and tau_high, jointly. What is minimised: the stored bits of a value, with scales, minima and
indices, and a loss. The loss is the error of attention outputs, perplexity through the cache, or what is missing from a
task's score.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from kvcal_artifacts import hf
from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import write_atomically

from ..calibrate.checkpoint import check_ours
from ..calibrate.driver import fit
from ..calibrate.job import FitOptions, FitResult
from ..calibrate.provenance import provenance
from ..capture.checks import check_model
from ..capture.ranks import ALONE, Ranks
from ..capture.scan import Capture, WholeModel, untimed
from ..capture.shards import ShardSums
from ..evaluate.perplexity import evaluate
from ..methods.attention import QUERIES, OutputError, Probe, probe
from ..methods.mixkvq import MixKVQ, TierSizes
from ..report.drawn import as_file
from ..report.front import front_figure
from ..report.outputs import check_output
from ..report.progress import tracked
from ..text.token_windows import Windows as TextWindows
from .study_storage import NAMES, Storage
from .two_objectives import Point, SearchResult, Space, front_of, rounded, search

if TYPE_CHECKING:
    from ..models.structure import CausalLM

Record = dict[str, Json]
LOW, HIGH = (0.5, 8.0), (1.0, 32.0)  # times the layer's median salience


class Objective(Protocol):
    label: str  # in bundles and on the plot's axis
    maximise: bool

    @property
    def record(self) -> Record:
        """Its settings, for provenance."""

    def __call__(self, method: MixKVQ) -> tuple[float, float]:
        """Quality, and stored bits per value of the packed blocks (keys and values)."""


@dataclass(frozen=True)
class _Saved:
    """What trials read of a batch of windows, layer by layer: a probe, its decoded values, and its exact outputs."""

    rows: slice
    layers: list[tuple[Probe, Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Trial:
    """What a trial sums up: sizes of packed keys, and the error of each layer's attention outputs."""

    sizes: TierSizes
    errors: list[OutputError]

    def merge(self, other: _Trial) -> None:
        self.sizes.merge(other.sizes)
        for mine, theirs in zip(self.errors, other.errors, strict=True):
            mine.merge(theirs)


class AttentionError:
    """Mean over layers of the relative squared error of attention outputs, from the keys and values of these windows.

    The model runs once; q, k, v of all layers stay in memory, on the device or (where="cpu") the host. ranks: the
    processes that share the windows; each holds its share, and calls this with the same methods.
    """

    label, maximise = "error of attention outputs", False

    def __init__(
        self,
        method: MixKVQ,
        model: CausalLM,
        ids: Tensor,
        device: torch.device,
        batch: int | None = None,
        where: str = "device",
        ranks: Ranks = ALONE,
    ) -> None:
        self.record: Record = {"name": "attention", "queries": QUERIES}
        self.device, self.shape = device, hf.layer_shape(hf.config_of(model), method.block)
        self.dtype: torch.dtype = model.dtype
        stats, value = method.key_codec(self.shape, self.dtype).stats, method.value_codec(self.shape)
        rest = device if where == "device" else torch.device("cpu")
        with Capture(WholeModel(model), ids, device=device, batch=batch, ranks=ranks) as capture, torch.no_grad():
            self.shards, self.layers = capture.shards, len(capture)
            self.batches = [_Saved(rows) for rows in capture.chunks()]
            for taps in tracked(capture, "Reading layers", len(capture)):
                passed = taps.batches({"q", "k", "v"}, "post_rope", advance=True)
                for taken, saved in zip(passed, self.batches, strict=True):
                    layer_probe = probe(taken, taps.index, taps.site, self.shape, method.windows, stats)
                    saved.layers.append(
                        (layer_probe.to(rest), layer_probe.decoded(value).to(rest), layer_probe.outputs().to(rest))
                    )

    @torch.no_grad()
    def __call__(self, method: MixKVQ) -> tuple[float, float]:
        key, value = method.key_codec(self.shape, self.dtype), method.value_codec(self.shape)
        sums = ShardSums(lambda: _Trial(TierSizes(), [OutputError() for _ in range(self.layers)]))
        for saved in sums.over(iter(self.batches), self.shards, slice(0, self.shards.windows), untimed):
            for (layer_probe, values, exact), error in zip(saved.layers, sums.part.errors, strict=True):
                layer_probe, values, exact = layer_probe.to(self.device), values.to(self.device), exact.to(self.device)
                packed = key.encode(layer_probe.k[:, :, layer_probe.packed], layer_probe.context())
                sums.part.sizes.add(key, packed)
                error.add(exact, layer_probe.outputs(key.decode(packed, layer_probe.context()), values))
        errors = [error.value for error in sums.total.errors]
        return sum(errors) / len(errors), (sums.total.sizes.bits(self.shape) + value.bits_per_value()) / 2


@dataclass
class Perplexity:
    """Perplexity of the windows, teacher-forced through the cache in steps. ranks: the processes that share them."""

    model: CausalLM
    ids: Tensor
    step: int = 32
    batch: int | None = None
    ranks: Ranks = ALONE
    label = "perplexity through the cache"
    maximise = False

    @property
    def record(self) -> Record:
        return {"name": "perplexity", "step": self.step}

    def __call__(self, method: MixKVQ) -> tuple[float, float]:
        from kvcal_artifacts.cache import KVCalCache

        scheme = method.scheme(self.model)
        rows = evaluate(
            self.model,
            self.ids,
            {"own": lambda: KVCalCache(scheme, self.model, remember=True)},
            step=self.step,
            batch=self.batch,
            ranks=self.ranks,
        )
        if rows[1].bits_per_value is None:
            raise UsageError(f"windows of {self.ids.shape[1]} tokens: nothing would be packed; use a larger --length")
        return rows[1].perplexity, rows[1].bits_per_value


@dataclass(frozen=True)
class Settings:
    """Settings of the search. max_bits: stored bits per value, at most, of the point that is chosen."""

    trials: int = 30
    seed: int = 0
    max_bits: float = 3.7
    low: tuple[float, float] = LOW
    high: tuple[float, float] = HIGH

    def __post_init__(self) -> None:
        for name, (least, most) in (("--tau-low", self.low), ("--tau-high", self.high)):
            if not 0 < least <= most < float("inf"):
                raise UsageError(f"{name} {least:g},{most:g}: needs two positive numbers in order, or one")
        if self.trials < 1 or not self.max_bits > 0:
            raise UsageError(f"--trials {self.trials}, --max-bits {self.max_bits:g}: must be positive")

    @property
    def fixed(self) -> bool:
        """Whether there is nothing to search."""
        return self.low[0] == self.low[1] and self.high[0] == self.high[1]

    @property
    def only(self) -> dict[str, float]:
        return {"tau_low": self.low[0], "tau_high": self.high[0]}

    @property
    def space(self) -> Space:
        return {"tau_low": self.low, "tau_high": self.high}


def with_thresholds(method: MixKVQ, parameters: dict[str, float]) -> MixKVQ:
    """tau_low above tau_high means no 4-bit tier."""
    high = parameters["tau_high"]
    return replace(method, tau_low=min(parameters["tau_low"], high), tau_high=high)


@dataclass(frozen=True)
class Job:
    """What is tuned on which text, and where the results go."""

    model: CausalLM
    text: TextWindows
    output: Path
    plot: Path
    device: torch.device
    model_record: Record
    revision: str | None
    options: FitOptions = field(default_factory=FitOptions)
    say: Callable[[str], None] = lambda line: None
    title: str | None = None  # of the plot

    @property
    def folder(self) -> Path:
        """Where a search for this output alone is stored until it is done."""
        return self.output.parent / f".{self.output.name}.search"


@dataclass
class Tuned:
    """A tuned bundle and the search that led to it. points, front, chosen: None and empty where there was nothing to
    search.
    """

    result: FitResult
    method: MixKVQ
    points: SearchResult | None = None
    front: list[int] = field(default_factory=list)
    chosen: int | None = None


def tune(
    method: MixKVQ,
    job: Job,
    settings: Settings,
    objective: Callable[[], Objective],
    storage: str | None = None,
    heartbeat: int = 5,
) -> Tuned:
    """Search the thresholds, then measure the chosen ones layer by layer (kvcal.calibrate.driver) and write bundle and
    plot.

    objective: makes it, once it is needed. storage: an Optuna storage URL that workers share; None: a file next to the
    output, which this process alone uses, and removes. Raises UsageError, before any trial, if no point can lie under
    max_bits; KVCalError if none does.
    """
    check_output(job.output)
    check_model(job.model, hf.decoder_of(job.model))
    if method.full is not None or settings.fixed:
        chosen = method if method.full is not None else with_thresholds(method, settings.only)
        return Tuned(_measured(chosen, job, settings, None), chosen)
    shape = hf.layer_shape(hf.config_of(job.model), method.block)
    if (least := rounded(method.least_bits(shape, job.model.dtype))) > settings.max_bits:
        raise UsageError(
            f"--max-bits {settings.max_bits:g}: with all key channels at 2 bits and values of {method.value_bits} a "
            "value "
            f"takes {least:g} bits already; give --max-bits {least:g} or more, or fewer --value-bits"
        )
    check_output(job.plot, "--plot")
    if job.options.ranks.rank == 0:
        check_ours(job.folder, NAMES)
        if not job.options.resume:
            shutil.rmtree(job.folder, ignore_errors=True)
    points, goal = _search(method, job, settings, objective, storage, heartbeat)
    front = front_of(points.points, goal.maximise)
    number = choose(points.points, front, settings.max_bits)
    best = with_thresholds(method, points.points[number].parameters)
    asked: Record = {"trials": settings.trials, "max_bits": settings.max_bits, "order": ORDER[points.in_order]}
    record = _record(settings, goal.record) | asked
    metrics = _search_record(method, points, goal, front, number)
    result = _measured(best, job, settings, {"provenance": record, "metrics": metrics})
    pairs = [(point.cost, point.quality) for point in points.points]
    picture = front_figure(pairs, front, number, settings.max_bits, goal.label, "stored bits per value", job.title)
    write_atomically(job.plot, as_file(picture, job.plot, 120), "--plot")
    shutil.rmtree(job.folder, ignore_errors=True)
    return Tuned(result, best, points, front, number)


class _Step(NamedTuple):
    """What rank 0 sends to the others: a trial's parameters, or, when the search is over, its result."""

    parameters: dict[str, float]
    points: SearchResult | None = None


@dataclass(frozen=True)
class Goal:
    """What an objective says of itself."""

    label: str
    maximise: bool
    record: Record


def _search(
    method: MixKVQ,
    job: Job,
    settings: Settings,
    objective: Callable[[], Objective],
    storage: str | None,
    heartbeat: int,
) -> tuple[SearchResult, Goal]:
    """The objective, which may be large, ends here. Rank 0 searches; the others compute their shares of its trials."""
    ready, ranks = objective(), job.options.ranks
    goal = Goal(ready.label, ready.maximise, ready.record)
    name = _study_name(method, job, settings, goal.record)
    if ranks.rank:
        points: SearchResult | None = None
        while points is None:
            parameters, points = ranks.agree(_Step({}))
            if points is None:
                ready(with_thresholds(method, parameters))
        return points, goal

    def measured(parameters: dict[str, float]) -> tuple[float, float]:
        return ready(with_thresholds(method, ranks.agree(_Step(parameters)).parameters))

    result = search(
        measured,
        settings.space,
        trials=settings.trials,
        seed=settings.seed,
        maximise=goal.maximise,
        storage=Storage(name, job.folder, storage, heartbeat),
        say=job.say,
    )
    ranks.agree(_Step({}, result))
    return result, goal


ORDER = {
    True: "every trial knew all before it: the same command gives the same bytes",
    False: "workers ran side by side: the same command may give other bytes",
}


def choose(points: list[Point], front: list[int], max_bits: float) -> int:
    """The best of the front that stays under the limit."""
    under = [number for number in front if points[number].cost <= max_bits]
    if not under:
        least = min(point.cost for point in points)
        raise KVCalError(
            f"none of {len(points)} trials stays under --max-bits {max_bits:g}, the smallest takes {least:.3f}; raise "
            "it "
            "(the same command goes on from these trials)"
        )
    return under[-1]


def _measured(method: MixKVQ, job: Job, settings: Settings, searched: dict[str, Record] | None) -> FitResult:
    return fit(
        method,
        WholeModel(job.model),
        job.text,
        job.output,
        model_record=job.model_record,
        revision=job.revision,
        device=job.device,
        seed=settings.seed,
        options=job.options,
        searched=searched,
        say=job.say,
    )


def _record(settings: Settings, objective: Record) -> Record:
    """What decides where the search goes; max_bits and the number of trials do not."""
    import optuna

    return {
        "sampler": f"optuna {optuna.__version__} TPE",
        "objective": objective,
        "space": {name: list(span) for name, span in settings.space.items()},
        "seed": settings.seed,
    }


def _study_name(method: MixKVQ, job: Job, settings: Settings, objective: Record) -> str:
    """Workers that would do the same work share a study."""
    free, batch = replace(method, tau_low=0.0, tau_high=0.0), job.options.batch or 0
    key = provenance(free, job.text, job.model_record, job.device, job.model.dtype, batch, settings.seed)
    return f"kvcal-mixkvq-{sha256_text(canonical([key, _record(settings, objective)]))[:20]}"


def _search_record(method: MixKVQ, points: SearchResult, goal: Goal, front: list[int], chosen: int) -> Record:
    tried = [with_thresholds(method, point.parameters) for point in points.points]
    rows: list[Json] = [
        {"tau_low": row.tau_low, "tau_high": row.tau_high, "quality": point.quality, "bits": point.cost}
        for row, point in zip(tried, points.points, strict=True)
    ]
    what: Record = {"quality": goal.label, "higher_is_better": goal.maximise}
    return what | {"trials": rows, "front": front, "chosen": chosen}
