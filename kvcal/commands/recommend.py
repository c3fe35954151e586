"""`kvcal recommend`: a ladder of schemes, measured on one model, and the bundle of the one that is chosen."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import SUFFIX, Bundle, Fingerprint, load_bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import CorruptBundle, KVCalError, UsageError
from kvcal_artifacts.scheme import Scheme

from ..calibrate.checkpoint import BatchCheckpoint, CommandCheckpoint, command_checkpoint, short
from ..calibrate.driver import fit_together
from ..calibrate.forecast import forecasts, least_tokens
from ..calibrate.job import FitJob, FitOptions
from ..calibrate.outlier_guard import window_of
from ..capture import ranks
from ..capture.ranks import Ranks
from ..capture.scan import WholeModel
from ..capture.spread import spread
from ..evaluate.attention_error import ErrorRow, attention_errors
from ..evaluate.key_outliers import HeadOutlier, key_outliers
from ..evaluate.perplexity import CacheMaker, Row, evaluate
from ..methods.aqua_kv import AquaKV
from ..methods.base import settings_of
from ..methods.data_free import COMPOSED, PRESETS
from ..models import configuration
from ..models.devices import pick_device
from ..models.loading import LoadedModel
from ..models.names import ModelSource, resolve
from ..pipeline.options import CalibrationOptions
from ..report.escape import shell
from ..report.quantities import duration
from ..report.timing import command_start
from ..report.version import __version__
from ..search.limit import Limit
from ..search.recommendation import LADDER, Figures, Rung, choose, reason, reference, to_fit, to_measure
from ..text.token_windows import Windows
from .common import (
    Say,
    calibration_windows,
    check_column,
    check_context,
    decided_by,
    output_for,
    say_coverage,
    text_for,
    tokenizer_for,
)
from .guard import say_unlikely
from .options import RecommendOptions
from .workbench import model_record, open_model, spread_of

if TYPE_CHECKING:
    from ..models.structure import CausalLM
    from .results import Recommendation, RecommendedRow

NUMBERS = {"cuda": (36, 4, 1024), "cpu": (10, 2, 512)}  # windows in all, held-out ones, tokens per window
ERROR_WINDOWS = 2  # held-out windows that attention errors and outliers are measured on
FORECASTS = 5  # schemes in a pass
STEP = 32  # tokens per forward pass, as `kvcal eval` has by default
LEAST_SECONDS_SHOWN = 5.0


def calibration_options(o: RecommendOptions, source: ModelSource) -> CalibrationOptions:
    """The options as functions of several commands take them, with NUMBERS as defaults."""
    count, holdout, length = NUMBERS.get(pick_device(o.device).type, NUMBERS["cpu"])
    if o.windows is not None:
        count, holdout = o.windows, max(1, o.windows // 8)
    return CalibrationOptions(
        model=o.model,
        revision=o.revision,
        text=o.text,
        column=o.column,
        windows=count,
        holdout=o.holdout or holdout,
        length=o.length or min(length, configuration.presets(source)["aqua-kv"]["length"]),
        seed=o.seed,
        output=o.output,
        dtype=o.dtype,
        device=o.device,
        resume=o.resume,
    )


@dataclass
class Run:
    """One recommendation on its way. schemes: by name of the ladder, as they become available. rungs: those that fit
    the model. work: what a killed run leaves. ranks: the processes that share the schemes. started: on the clock of
    `time.monotonic`.
    """

    loaded: LoadedModel
    text: Windows
    work: CommandCheckpoint
    rungs: dict[str, Rung]
    schemes: dict[str, Scheme]
    say: Say
    ranks: Ranks
    started: float

    def step(self, number: int, what: str) -> None:
        """Say that one of the five steps begins, and how long those before it took."""
        seconds = time.monotonic() - self.started
        after = f", after {duration(seconds)}" if seconds >= LEAST_SECONDS_SHOWN else ""
        self.say(f"step {number} of 5{after}: {what}")

    @property
    def model(self) -> CausalLM:
        return self.loaded.model

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    def makers(self, names: Sequence[str]) -> dict[str, CacheMaker]:
        """Makers of caches of these schemes."""
        return {
            name: lambda scheme=self.schemes[name]: KVCalCache(scheme, self.model, remember=True)  # type: ignore[misc]
            for name in names
        }


def run_recommend(o: RecommendOptions, say: Say) -> Recommendation:
    """Measure the ladder, write the bundle of the scheme that is chosen, and say why.

    Nothing but the finished bundle is written to the output; what a killed run measured and fitted lies next to it, and
    the same command goes on from there. Raises UsageError where no scheme is small enough, GateFailed where none is
    good enough.
    """
    started, limit = command_start(), Limit(o.max_bits, o.max_kl)
    source = resolve(o.model, o.revision)
    calibration = calibration_options(o, source)
    output = output_for(calibration, source, "recommended")
    origin = text_for(calibration, source, "calibration")
    check_column(o.column, origin)
    say(f"text: {origin}")
    tokenizer = tokenizer_for(calibration, source, origin)
    text = calibration_windows(calibration, source, tokenizer, origin, say)
    check_context(source, text.length, say)
    loaded = open_model(o.model, o.revision, dtype=o.dtype, device=o.device, spread=spread_of(o))
    say_coverage(loaded.model, say)
    rungs, schemes, omitted = _fitting(loaded.model, text.length)
    say_unlikely(loaded, text.holdout, say)
    record = decided_by(calibration, loaded.model.dtype, loaded.device, text.ids_sha256)
    record |= {"ladder": {name: repr(rung.method) for name, rung in rungs.items()}}
    work = command_checkpoint("recommend", record, output=output, resume=o.resume, say=say)
    with (
        work.until_out("the same command, or one with another limit, goes on from it"),
        tempfile.TemporaryDirectory() as spare,
    ):
        run = Run(loaded, text, work, rungs, schemes, say, ranks.current(), started)
        run.step(1, "key outliers")
        outliers = _outliers(run)
        run.step(2, f"forecasts of {len(schemes)} schemes without text")
        rows = _forecast(run, list(schemes))
        fitted = to_fit(rungs.values(), rows, limit)
        run.step(3, f"fitting {', '.join(rung.name for rung in fitted) or 'nothing'}")
        bundles = _fitted(run, fitted, o.seed, Path(spare))
        rows += _forecast(run, list(bundles))
        chosen, second, rows = _measured(run, rows, limit)
        naive = reference(rows, chosen)
        names = [row.name for row in (chosen, second, naive) if row is not None]
        run.step(5, "attention errors")
        measured_names = list(dict.fromkeys(names))
        measured_errors = spread(run.ranks, measured_names, lambda name: _errors(run, name))
        errors = dict(zip(measured_names, measured_errors, strict=True))
        ranks.leave_to_first()
        sha256 = _write(run, chosen, bundles, output)
    options = _text_options(calibration, origin)
    return {
        "bundle": str(output),
        "sha256": sha256,
        "bytes": output.stat().st_size,
        "model": source.public,
        "chosen": chosen.name,
        "runner_up": None if second is None else second.name,
        "instead_of": None if naive is None else naive.name,
        "reason": reason(chosen, second, limit, sum(row.kl is not None for row in rows)),
        "max_bits": limit.bits,
        "max_kl": limit.kl,
        "rows": [_row(row, run, o.model, options) for row in sorted(rows, key=lambda row: (row.bits, row.name))],
        "left_out": omitted,
        "outliers": outliers,
        "attention_errors": errors,
        "text": text.source,
        "train_windows": len(text.train),
        "holdout_windows": len(text.holdout),
        "length": text.length,
        "device": str(loaded.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "next": shell(["kvcal", "eval", str(output), "-m", o.model]),
        "seconds": round(time.monotonic() - started, 1),
    }


def _fitting(model: CausalLM, length: int) -> tuple[dict[str, Rung], dict[str, Scheme], dict[str, str]]:
    """The rungs that fit the model and windows of so many tokens, the schemes of those that need no text, and why the
    others are left out.
    """
    hf.check_supported(model)
    sites = hf.attention_sites(model)
    rungs: dict[str, Rung] = {}
    schemes: dict[str, Scheme] = {}
    omitted: dict[str, str] = {}
    for rung in LADDER:
        try:
            if isinstance(rung.method, AquaKV):
                hf.check_frame(sites, rung.method.frame)
            else:
                scheme = rung.method.scheme(model)
                if (need := least_tokens(scheme)) > length:
                    raise UsageError(f"packs its first block in windows of {need} tokens; these have {length}")
                schemes[rung.name] = scheme
            rungs[rung.name] = rung
        except KVCalError as error:
            omitted[rung.name] = str(error)
    if not rungs:
        raise UsageError(f"no scheme of the ladder fits: {next(iter(omitted.values()))}")
    return rungs, schemes, omitted


def _outliers(run: Run) -> list[HeadOutlier]:
    """Key outliers of held-out windows, by layer and kv head."""
    if (saved := _stored(run, "rows-outliers")) is not None:
        return list(saved)
    rows = [row.as_dict() for row in key_outliers(run.model, run.text.holdout[:ERROR_WINDOWS], run.device)]
    run.work.keep("rows-outliers", rows)
    return rows


def _stored(run: Run, name: str) -> Any:
    """What a killed run stored under this name, on every rank; None where there is nothing."""
    return run.ranks.agree([run.work.read(name)])[0]


def _fitted(run: Run, rungs: Sequence[Rung], seed: int, spare: Path) -> dict[str, Path]:
    """Bundles of these schemes by name, in one scan; those that a killed run finished are taken as they are.

    spare: where they go if nothing can be written next to the output.
    """
    paths: dict[str, Path] = {}
    todo: list[Rung] = []
    for rung in rungs:
        file = f"fit-{short(repr(rung.method))}{SUFFIX}"
        paths[rung.name] = run.work.file(file) or spare / file
        if not run.ranks.agree(_whole(paths[rung.name])):
            todo.append(rung)
    count = run.ranks.count
    shares = [todo[rank::count] for rank in range(count) if todo[rank::count]]
    for share, bundles in zip(shares, spread(run.ranks, shares, lambda one: _fit(run, one, paths, seed)), strict=True):
        for rung, bundle in zip(share, bundles, strict=True):
            if run.ranks.rank == 0 and share is not shares[0]:  # fitted by another rank
                bundle.write(paths[rung.name])
            run.schemes[rung.name] = bundle.scheme
    stored = [name for name in paths if name not in run.schemes and run.ranks.rank == 0]
    run.schemes.update(run.ranks.agree({name: load_bundle(paths[name]).scheme for name in stored}))
    return paths


def _fit(run: Run, rungs: Sequence[Rung], paths: Mapping[str, Path], seed: int) -> list[Bundle]:
    """Bundles of these schemes, in one scan, written to their paths."""
    jobs = []
    for rung in rungs:
        assert isinstance(rung.method, AquaKV)
        jobs.append(FitJob(rung.method, paths[rung.name], seed))
    fit_together(
        jobs,
        WholeModel(run.model),
        run.text,
        model_record=model_record(run.loaded.source, run.loaded.revision, False),
        revision=run.loaded.revision,
        device=run.device,
        options=FitOptions(warn=False),
        say=run.say,
    )
    return [load_bundle(job.output) for job in jobs]


def _whole(path: Path) -> bool:
    """Whether a killed run finished this bundle."""
    try:
        load_bundle(path)
    except CorruptBundle:
        return False
    return True


def _forecast(run: Run, names: Sequence[str]) -> list[Figures]:
    """Forecast KL of these schemes on held-out windows, some in a pass; each pass is stored for a run that goes on."""
    schemes = {name: run.schemes[name] for name in names}
    ids = window_of(run.text.holdout, schemes.values())
    groups = [list(names[start : start + FORECASTS]) for start in range(0, len(names), FORECASTS)]
    files = [f"rows-{short(', '.join(group))}" for group in groups]
    stored = [_stored(run, file) for file in files]
    todo = [place for place, saved in enumerate(stored) if saved is None]

    def forecast(place: int) -> dict[str, float]:
        group = {name: schemes[name] for name in groups[place]}
        return {name: one.kl for name, one in forecasts(run.model, ids, group, run.device).items()}

    for place, forecast_kls in zip(todo, spread(run.ranks, todo, forecast), strict=True):
        run.work.keep(files[place], forecast_kls)
        stored[place] = forecast_kls
    kls: dict[str, float] = {name: kl for saved in stored for name, kl in saved.items()}
    return [
        Figures(
            name,
            scheme.bits_per_value(),
            kls[name],
            learned=run.rungs[name].learned,
            naive=run.rungs[name].naive,
            kernel=_by_kernel(scheme),
        )
        for name, scheme in schemes.items()
    ]


def _measured(run: Run, rows: list[Figures], limit: Limit) -> tuple[Figures, Figures | None, list[Figures]]:
    """Measure KL through the cache as far as the choice needs, and of the naive scheme to compare with."""
    while batch := to_measure(rows, limit):
        rows = _with_kl(run, rows, batch)
    chosen, second = choose(rows, limit)
    naive = reference(rows, chosen)
    if naive is not None and naive.kl is None:
        rows = _with_kl(run, rows, [naive])
    return chosen, second, rows


def _with_kl(run: Run, rows: list[Figures], batch: Sequence[Figures]) -> list[Figures]:
    names = [row.name for row in batch]
    run.step(4, f"KL through the cache of {', '.join(names)}")
    count = run.ranks.count
    shares = [names[rank::count] for rank in range(count) if names[rank::count]]  # one share, where there is one rank

    def measured(share: list[str]) -> list[Row]:
        label = ", ".join(share)
        saved = BatchCheckpoint(run.work, f"windows-{short(label)}", label, len(run.text.holdout), run.say)
        return evaluate(run.model, run.text.holdout, run.makers(share), step=STEP, saved=saved)[1:]

    by_name = {row.name: row for rows_of_share in spread(run.ranks, shares, measured) for row in rows_of_share}
    return [
        row
        if row.name not in by_name
        else replace(
            row, kl=by_name[row.name].kl, se=by_name[row.name].kl_se, bits=by_name[row.name].bits_per_value or row.bits
        )
        for row in rows
    ]


def _errors(run: Run, name: str) -> list[ErrorRow] | None:
    """Attention error by layer and kv head on held-out windows."""
    [(_, make)] = run.makers([name]).items()
    errors = attention_errors(run.model, run.text.holdout[:ERROR_WINDOWS], make, step=STEP)
    return None if errors is None else errors.rows()


def _write(run: Run, chosen: Figures, bundles: Mapping[str, Path], output: Path) -> str:
    """The chosen bundle at its place, whole or not at all; returns its hash. Its bytes are those of the command that
    makes it alone.
    """
    if chosen.name in bundles:
        bundle = load_bundle(bundles[chosen.name])
        return Bundle(bundle.fingerprint, bundle.scheme, bundle.provenance, bundle.metrics).write(output)
    method = run.rungs[chosen.name].method
    record = {
        "tool": f"kvcal {__version__}",
        "method": chosen.name if chosen.name in PRESETS else COMPOSED,
        "settings": settings_of(method),
        "model": model_record(run.loaded.source, run.loaded.revision, False),
    }
    fingerprint = Fingerprint.of(run.model, run.loaded.revision)
    return Bundle(fingerprint, run.schemes[chosen.name], record).write(output)


def _text_options(calibration: CalibrationOptions, origin: str) -> str:
    """Options of `kvcal fit-predictors` for the same windows."""
    column = "" if calibration.column is None else f" --column {shell([calibration.column])}"
    seed = "" if not calibration.seed else f" --seed {calibration.seed}"
    numbers = f" --windows {calibration.windows} --holdout {calibration.holdout} --length {calibration.length}"
    return f" --text {shell([origin])}{column}{numbers}{seed}"


def _by_kernel(scheme: Scheme) -> bool:
    """Whether attention of all compressed layers reads packed blocks by a kernel."""
    pairs = [pair for pair in scheme.layers if pair is not None]
    return not scheme.chained and all(pair.key.fused() and pair.value.fused() for pair in pairs)


def _row(row: Figures, run: Run, model: str, text: str) -> RecommendedRow:
    rung, scheme = run.rungs[row.name], run.schemes[row.name]
    return {
        "scheme": row.name,
        "bits_per_value": row.bits,
        "times_smaller": 16 / row.bits,
        "forecast_kl": row.forecast,
        "kl": row.kl,
        "kl_se": row.se,
        "learned": row.learned,
        "naive": row.naive,
        "kernel": row.kernel,
        "resident_bytes": scheme.resident_bytes(),
        "command": rung.command(shell([model]), text),
    }
