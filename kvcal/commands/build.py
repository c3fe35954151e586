"""`kvcal build`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import lock
from kvcal_artifacts.scheme import Windows
from kvcal_artifacts.shown import message

from ..calibrate import provenance
from ..calibrate.driver import fit_together
from ..calibrate.job import FitJob, FitOptions
from ..calibrate.provenance import cpu_record
from ..capture.spill import Where
from ..methods.base import Method, coded_tokens
from ..methods.mixkvq import MixKVQ
from ..methods.vqkv import VQKV
from ..models import configuration
from ..models.devices import pick_device
from ..models.names import ModelSource, resolve
from ..pipeline.build import (
    BuildRecipe,
    Entry,
    Lock,
    Planned,
    code_identity,
    model_identity,
    planned,
    settings_identity,
    text_identity,
)
from ..pipeline.gates import Check, recalled, worth_keeping
from ..pipeline.options import (
    BuiltOptions,
    CalibrationOptions,
    EvalOptions,
    FitNormsOptions,
    FitPredictorsOptions,
    MeasureSubspacesOptions,
    PresetOptions,
    Selection,
    TrainCodebooksOptions,
    TuneBitsOptions,
    TuneThresholdsOptions,
    WeightsOptions,
)
from ..report.outputs import check_output
from ..report.progress import Items
from .calibration import SPILLS, is_layerwise, spill_dir
from .combine import run_combine
from .common import (
    RANDOM_TOKENS,
    Say,
    calibration_windows,
    check_column,
    check_context,
    given_selection,
    other_text,
    other_windows,
    refuse_idle,
    text_for,
    tokenizer_for,
    window_numbers,
)
from .evaluation import run_eval
from .fit_norms import innerq_method
from .fit_predictors import aqua_method
from .measure_subspaces import squat_method
from .measure_subspaces import with_windows as with_squat_windows
from .preset import run_preset, wanted_preset
from .train_codebooks import vqkv_method
from .tune_bits import kvtuner_method
from .tune_thresholds import mixkvq_method, run_tune_thresholds, search_settings, with_windows
from .tune_thresholds import objective_name as mixkvq_objective
from .tune_thresholds import searches as mixkvq_searches
from .workbench import Opened, check_selection, open_for_fit, raise_first

REPORTS = ("junit", "summary")  # options that say where gates are reported
FOLLOW = 0.2  # seconds between a worker's looks at whether its parent is still there

Written = Callable[[str, str, int], None]  # name, sha256 and bytes of a bundle that is on disk


KINDS = ("aqua-kv", "innerq", "kvtuner", "squat", "vqkv", "mixkvq")  # methods that `fit_together` takes


def method_of(o: CalibrationOptions, source: ModelSource) -> Method | VQKV:
    """The method that a command's options describe; of MixKVQ with fixed thresholds: a search goes another way."""
    match o:
        case FitPredictorsOptions():
            return aqua_method(o)
        case FitNormsOptions():
            return innerq_method(o)
        case TuneBitsOptions():
            return kvtuner_method(o)
        case MeasureSubspacesOptions():
            return squat_method(o, source)
        case TrainCodebooksOptions():
            return vqkv_method(o, configuration.geometry(source))
        case TuneThresholdsOptions():
            return _mixkvq(o)
    raise TypeError(type(o).__name__)


def _mixkvq(o: TuneThresholdsOptions) -> MixKVQ:
    from ..search.thresholds import with_thresholds

    settings, method = search_settings(o), mixkvq_method(o)
    return method if method.full is not None else with_thresholds(method, settings.only)


def counted(o: CalibrationOptions) -> CalibrationOptions:
    """The options with a method's own numbers of windows, where none are given."""
    if isinstance(o, MeasureSubspacesOptions):
        return with_squat_windows(o)
    if isinstance(o, TuneBitsOptions):
        return with_windows(o)
    return with_windows(o) if isinstance(o, TuneThresholdsOptions) else o


RECORDS = ("aqua-kv", "innerq", "squat")  # methods whose bundles say how much keys and values of each layer err


def searches(entry: Entry) -> bool:
    """Whether thresholds are to be found first: such a bundle has runs of its own."""
    return isinstance(entry.options, TuneThresholdsOptions) and mixkvq_searches(entry.options)


def check_entry(recipe: BuildRecipe, entry: Entry) -> None:
    """Settings that no run would accept, said before any run."""
    try:
        if entry.gates.max_layer_drift is not None and entry.method not in RECORDS:
            raise UsageError(
                f"gate max_layer_drift: bundles of {entry.method} record no errors of all keys and values to compare "
                "with; "
                "give gates = {max_layer_drift = false}"
            )
        if isinstance(o := entry.options, Selection):
            check_selection(resolve(o.model, o.revision), given_selection(o), random_weights=o.random_weights)
        if isinstance(o := entry.options, PresetOptions):
            wanted_preset(o)
        elif o is not None:
            source = resolve(o.model, o.revision)
            method = method_of(o, source)
            *_, length = window_numbers(counted(o), source)
            if isinstance(windows := getattr(method, "windows", None), Windows):
                coded_tokens(length, windows.sink, windows.block)
            if o.spill not in SPILLS:
                raise UsageError(f"spill {o.spill}: allowed are {', '.join(SPILLS)}")
            if isinstance(o, TuneThresholdsOptions) and mixkvq_searches(o):
                mixkvq_objective(o, source)
    except KVCalError as error:
        raise type(error)(f"recipe {recipe.path}: {entry.name}: {error}") from error


# What is to be done.


class Planner:
    """Inputs of every bundle; each model and text is hashed once."""

    def __init__(self, recipe: BuildRecipe, lock: Lock) -> None:
        self.recipe, self.lock, self.code = recipe, lock, code_identity()
        self._seen: dict[str, dict[str, Any]] = {}

    def plan(self) -> list[Planned]:
        plans: dict[str, Planned] = {}
        for entry in self.recipe.entries:
            check_entry(self.recipe, entry)
        for entry in sorted(self.recipe.entries, key=lambda entry: bool(entry.parts)):  # combinations last
            inputs = self._combined(entry, plans) if entry.parts else self._inputs(entry)
            plans[entry.name] = planned(entry, self.recipe.output, inputs, self.lock)
        return list(plans.values())

    def _inputs(self, entry: Entry) -> dict[str, Any]:
        o = entry.built
        inputs: dict[str, Any] = {
            "method": entry.method,
            "model": self._once(["model", *_model_key(o)], lambda: model_identity(o)),
            "settings": settings_identity(o),
            "code": self.code,
        }
        if isinstance(o, CalibrationOptions):
            inputs["device"] = device_name(o)
            if inputs["device"] == "cpu":
                inputs["cpu"] = cpu_record()  # as provenance: reproduce compares with it
            source = resolve(o.model, o.revision)
            origin = text_for(o, source, "calibration")
            check_column(o.column, origin, other := other_text(o))
            inputs["text"] = self._text(entry, o, origin, "text")
            if other is not None:
                inputs["other_text"] = self._text(entry, o, other, "other_text")
        return inputs

    def _combined(self, entry: Entry, plans: Mapping[str, Planned]) -> dict[str, Any]:
        """The key of what its parts are made of: parts that come out the same need no new combination."""
        keys, values = (plans[part] for part in entry.parts)
        return {"method": "combine", "keys": keys.key, "values": values.key, "code": self.code}

    def _text(self, entry: Entry, o: CalibrationOptions, origin: str, name: str) -> dict[str, Any]:
        if origin == RANDOM_TOKENS:
            return {"source": origin}
        earlier = self.lock.bundles.get(entry.name, {}).get("inputs", {}).get(name)
        return self._once(["text", origin, o.column], lambda: text_identity(origin, o.column, earlier))

    def _once(self, key: list[Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        label = json.dumps(key, default=str)
        if label not in self._seen:
            self._seen[label] = make()
        return self._seen[label]

    def gate_key(self, entry: Entry, sha256: str) -> str:
        """The key of everything that decides what the gates of a bundle say."""
        o = self.recipe.evaluation[entry.model]
        origin = text_for(o, resolve(o.model, o.revision), "evaluation")
        text = (
            {}
            if origin == RANDOM_TOKENS
            else self._once(["text", origin, o.column], lambda: text_identity(origin, o.column))
        )
        model = self._once(["model", *_model_key(o)], lambda: model_identity(o))
        settings = {name: o.by_name()[name] for name in ("length", "windows", "step", "batch", "dtype", "seed")}
        inputs = [sha256, asdict(entry.gates), text, model, settings, device_name(o), self.code]
        return sha256_text(canonical(inputs))


def _model_key(o: WeightsOptions) -> list[str | int | None]:
    return [o.model, o.revision, o.random_weights, o.seed if o.random_weights else 0]


def device_name(o: BuiltOptions | EvalOptions) -> str:
    """The device's name as provenance states it."""
    return provenance.device_name(pick_device(o.device))


@dataclass(frozen=True)
class Work:
    """What one process does at a time: one bundle, or several in one pass over their model."""

    plans: tuple[Planned, ...]
    shared: bool

    @property
    def label(self) -> str:
        names = ", ".join(plan.entry.name for plan in self.plans)
        return f"{names} (one pass over the model)" if len(self.plans) > 1 else names


def works(plans: Iterable[Planned], share: bool) -> list[Work]:
    """Bundles of one model, text and set of windows together, in the recipe's order; combinations last."""
    groups: dict[str, list[Planned]] = {}
    for plan in plans:
        alone = not share or plan.entry.method not in KINDS or searches(plan.entry)
        groups.setdefault(plan.entry.name if alone else _scan_key(calibration_of(plan)), []).append(plan)
    return [
        Work(tuple(group), group[0].entry.method in KINDS and not searches(group[0].entry)) for group in groups.values()
    ]


def calibration_of(plan: Planned) -> CalibrationOptions:
    """The options of a bundle that is fitted on a text."""
    assert isinstance(plan.entry.options, CalibrationOptions)
    return plan.entry.options


def _scan_key(o: CalibrationOptions) -> str:
    source = resolve(o.model, o.revision)
    same = [o.model, o.revision, o.random_weights, o.seed, o.dtype, o.device, o.batch, o.text, o.column]
    how = [is_layerwise(o), o.spill, spill_dir(o), other_text(o)]
    return json.dumps(["scan", *same, *how, *window_numbers(counted(o), source)], default=str)


# Doing it.


def run_work(work: Work, say: Say, written: Written) -> None:
    """Build its bundles; `written` is called as soon as each is on disk."""
    if work.shared:
        _scan_shared(work, say, written)
        return
    [plan] = work.plans
    if plan.entry.parts:
        keys, values = (plan.path.with_name(f"{part}{SUFFIX}") for part in plan.entry.parts)
        result = run_combine(keys, values, plan.path)
    elif isinstance(o := plan.entry.options, PresetOptions):
        result = run_preset(replace(o, output=plan.path), say)
    else:
        assert isinstance(o, TuneThresholdsOptions)
        result = run_tune_thresholds(replace(o, output=plan.path), say)
    written(plan.entry.name, result["sha256"], result["bytes"])


def _scan_shared(work: Work, say: Say, written: Written) -> None:
    """Where the settings of one are refused on the way, each has a pass of its own, so that the others are built."""
    if len(work.plans) == 1:
        _scan(work, say, written)
        return
    try:
        _scan(work, say, written)
        return
    except UsageError as error:
        say(f"note: one pass for {len(work.plans)} bundles failed ({error}); each has its own now")
    refused: list[KVCalError] = []
    for plan in work.plans:
        alone = Work((plan,), True)
        try:
            with _named(alone):
                _scan(alone, say, written)
        except UsageError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _scan(work: Work, say: Say, written: Written) -> None:
    o = counted(calibration_of(work.plans[0]))
    source = resolve(o.model, o.revision)
    origin = text_for(o, source, "calibration")
    tokenizer = tokenizer_for(o, source, origin, other_text(o))
    text = calibration_windows(o, source, tokenizer, origin, say)
    check_context(source, text.length, say)
    other = other_windows(o, tokenizer, origin, len(text.train), text.length, say)
    opened = _opened(o.model, o.revision, o.dtype, o.device, is_layerwise(o), o.random_weights, o.seed)
    jobs = [
        FitJob(
            method_of(one := calibration_of(plan), source),
            plan.path,
            o.seed,
            selection=given_selection(one) if isinstance(one, Selection) else None,
        )
        for plan in work.plans
    ]
    names = {plan.path: plan.entry.name for plan in work.plans}
    fit_together(
        jobs,
        opened.source,
        text,
        model_record=opened.record,
        revision=opened.revision,
        device=opened.device,
        say=say,
        other=other,
        options=FitOptions(o.batch, cast(Where, o.spill), spill_dir(o)),
        written=lambda job, result: written(names[job.output], result.sha256, job.output.stat().st_size),
    )


@lru_cache(maxsize=1)
def _opened(
    name: str, revision: str | None, dtype: str, device: str, layerwise: bool, random_weights: bool, seed: int
) -> Opened:
    """The model that was used last stays for the next work."""
    return open_for_fit(
        name, revision, dtype=dtype, device=device, layerwise=layerwise, random_weights=random_weights, seed=seed
    )


def _worker_start(parent: int, threads: int) -> None:
    """Take as many threads as the parent has (they decide last bits on a CPU); lines instead of bars; ends with the
    parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C goes to all: one line is enough, the parent's
    torch.set_num_threads(threads)
    os.environ["TERM"] = "dumb"

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(FOLLOW)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _worker_run(work: Work) -> list[tuple[str, str, int]]:
    done: list[tuple[str, str, int]] = []
    run_work(work, lambda line: print(message(line), file=sys.stderr), lambda *written: done.append(written))
    return done


def run_all(todo: Sequence[Work], jobs: int, say: Say, written: Written) -> None:
    """All works, combinations when everything else is there. Raises the first error, as soon as the running ones are
    done.
    """
    first = [work for work in todo if not work.plans[0].entry.parts]
    if jobs == 1 or len(first) < 2:
        items = Items(say, len(todo))
        for work in todo:
            items.begin(work.label)
            with _named(work):
                run_work(work, say, written)
        return
    _run_in_processes(first, min(jobs, len(first)), say, written)
    run_all([work for work in todo if work.plans[0].entry.parts], 1, say, written)


def _run_in_processes(todo: Sequence[Work], jobs: int, say: Say, written: Written) -> None:
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _worker_start, (os.getpid(), torch.get_num_threads())
    )
    running: dict[Future[list[tuple[str, str, int]]], Work] = {}
    others = multiprocessing.active_children()
    try:
        for number, work in enumerate(todo, 1):
            say(f"{number}/{len(todo)} {work.label}")
            running[pool.submit(_worker_run, work)] = work
        _collect(running, written)
    except BaseException as error:
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()  # an interrupted build does not wait for its workers: they have checkpoints
        if isinstance(error, BrokenProcessPool):
            raise KVCalError("a worker process ended early, perhaps for lack of memory; take fewer --jobs") from error
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: dict[Future[list[tuple[str, str, int]]], Work], written: Written) -> None:
    """Until all are done; after an error nothing new is begun, and what runs may still end well."""
    first: KVCalError | None = None
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            work = running.pop(future)
            if future.cancelled():
                continue
            try:
                with _named(work):
                    for done in future.result():
                        written(*done)
            except KVCalError as error:
                first = first or error
                for other in running:
                    other.cancel()
    if first is not None:
        raise first


@contextmanager
def _named(work: Work) -> Iterator[None]:
    try:
        yield
    except KVCalError as error:
        names = [plan.entry.name for plan in work.plans]
        if any(str(error).startswith(f"{name}: ") for name in names):
            raise
        raise type(error)(f"{', '.join(names)}: {error}") from error


@contextmanager
def only_build(folder: Path) -> Iterator[None]:
    """Refuse a second build into the same folder while the first runs."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if lock(handle, wait=False) is False:
            raise KVCalError(f"{folder}: another `kvcal build` is at work there; wait for it")
        yield
    finally:
        os.close(handle)


def check_taken(dry_run: bool, gates: bool, typed: Collection[str]) -> None:
    """UsageError for the first option given (`typed`) that such a build has no use for."""
    if dry_run:
        idle = ("jobs", *(("gates",) if gates else ()), *REPORTS)  # --no-gates says what happens anyway
        refuse_idle(typed, idle, "bundles that are built", "with --dry-run nothing is; leave out it or that")
    if not gates:
        refuse_idle(typed, REPORTS, "gates that are held", "leave out it or --no-gates")


def run_build(
    recipe: BuildRecipe,
    say: Say,
    *,
    dry_run: bool = False,
    jobs: int = 1,
    share: bool = True,
    gates: bool = True,
    typed: Collection[str] = (),
) -> dict[str, Any]:
    """Build what changed and hold it to its gates; rows of bundles, and checks. dry_run: only say what would be done.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    check_taken(dry_run, gates, typed)
    lock = Lock.read(recipe.lock)
    planner = Planner(recipe, lock)
    plans = planner.plan()
    todo = works([plan for plan in plans if plan.why is not None], share)
    if dry_run:
        return _told(recipe, plans, todo, [], "build")
    _make_folder(recipe.output)
    check_output(recipe.lock, "output in the recipe")
    for plan in plans:
        if plan.why is not None:
            check_output(plan.path, "output in the recipe")
    with only_build(recipe.output):
        by_name = {plan.entry.name: plan for plan in plans}

        def written(name: str, sha256: str, size: int) -> None:
            plan = by_name[name]
            row = {"file": plan.entry.file, "sha256": sha256, "bytes": size, "key": plan.key, "inputs": plan.inputs}
            lock.bundles[name] = row
            lock.write()

        for gone in lock.keep_only(list(by_name)):
            say(f"note: {gone} is no longer in the recipe; its file, if any, stays")
        run_all(todo, jobs, say, written)
        _opened.cache_clear()  # gates load the model for themselves
        checks = held_to_gates(recipe, planner, lock, say) if gates else []
        lock.write()
    return _told(recipe, plans, todo, checks, "built") | {"lock": str(recipe.lock)}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVCalError(f"{folder}: cannot be made ({error.strerror}); give another output in the recipe") from error
    check_output(folder / "x")


def _told(
    recipe: BuildRecipe, plans: Sequence[Planned], todo: Sequence[Work], checks: list[Check], done: str
) -> dict[str, Any]:
    order = [entry.name for entry in recipe.entries]
    number = {plan.entry.name: index for index, work in enumerate(todo, 1) for plan in work.plans}
    rows = [
        {
            "name": plan.entry.name,
            "method": plan.entry.method,
            "file": str(plan.path),
            "action": "up to date" if plan.why is None else done,
            "why": plan.why,
            "pass": number.get(plan.entry.name),
        }
        for plan in sorted(plans, key=lambda plan: order.index(plan.entry.name))
    ]
    return {
        "recipe": str(recipe.path),
        "bundles": rows,
        "gates": checks,
        "passed": all(check.passed for check in checks),
    }


# Gates.


def held_to_gates(recipe: BuildRecipe, planner: Planner, lock: Lock, say: Say) -> list[Check]:
    """Checks of every bundle with gates, from the lock file where nothing changed; raises when the others are done."""
    checks_of: dict[str, list[Check]] = {}
    missing: dict[str, list[Entry]] = {}
    keys: dict[str, str] = {}
    failed: dict[str, KVCalError] = {}
    for entry in recipe.entries:
        if not entry.gates:
            lock.gates.pop(entry.name, None)
            continue
        keys[entry.name] = planner.gate_key(entry, lock.bundles[entry.name]["sha256"])
        row = lock.gates.get(entry.name, {})
        earlier = recalled(entry.name, entry.gates, row["checks"]) if row.get("key") == keys[entry.name] else None
        if earlier is None:
            missing.setdefault(entry.model, []).append(entry)
        else:
            checks_of[entry.name] = earlier
    for model, entries in missing.items():
        say(f"gates of {', '.join(entry.name for entry in entries)}")
        paths = [recipe.output / entry.file for entry in entries]
        options = replace(recipe.evaluation[model], bundles=paths)
        result = run_eval(options, say, {entry.name: entry.gates for entry in entries})
        failed |= result["failed"]
        for entry in entries:
            checks_of[entry.name] = [check for check in result["gates"] if check.name == entry.name]
            lock.gates.pop(entry.name, None)
            if entry.name not in failed and worth_keeping(checks_of[entry.name]):
                records = [check.as_dict() for check in checks_of[entry.name]]
                lock.gates[entry.name] = {"key": keys[entry.name], "checks": records}
        lock.write()
    raise_first(failed)
    return [check for entry in recipe.entries if entry.gates for check in checks_of[entry.name]]
