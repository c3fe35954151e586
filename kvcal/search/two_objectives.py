"""Two-objective search by Optuna's TPE whose points are always the same.

They do not depend on who asked, on how often the search was killed, or on random state. Point number i is a pure
function of (seed, i, the points before it): a fresh sampler each time, given the finished points. An Optuna storage
only records who works on what, so one worker gives the same points whether or not it was killed in between. Several
workers share a study. Each point is claimed by the order of trial numbers, which the storage makes unique.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..report.progress import progress
from .study_storage import Storage, directions_of, is_dead, opened_study, run_again, this_worker

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import RDBStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Space = Mapping[str, tuple[float, float]]  # name -> lowest, highest; searched on a logarithmic scale
Evaluate = Callable[[dict[str, float]], tuple[float, float]]  # parameters -> quality, cost
DIGITS = 6  # of parameters and objectives: last bits of a sum do not decide where the search goes
POLL = 0.5  # seconds between looks at the storage while others finish


@dataclass(frozen=True)
class Point:
    """One finished trial. quality: lower or higher is better, as the search's direction says; cost: lower is."""

    parameters: dict[str, float]
    quality: float
    cost: float


@dataclass(frozen=True)
class SearchResult:
    """Points in the order of their trials. in_order: each was chosen knowing all before it, so that the same search
    gives the same points; not so where workers ran side by side.
    """

    points: list[Point]
    in_order: bool


def suggest(points: list[Point], space: Space, seed: int, number: int, maximise: bool) -> dict[str, float]:
    """Parameters of point `number`, given those before it: multi-objective TPE (random for the first ten)."""
    import numpy as np
    import optuna

    scales = {name: optuna.distributions.FloatDistribution(low, high, log=True) for name, (low, high) in space.items()}
    sampler_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    study = optuna.create_study(
        directions=directions_of(maximise), sampler=optuna.samplers.TPESampler(seed=sampler_seed)
    )
    for point in points:
        study.add_trial(
            optuna.create_trial(params=point.parameters, distributions=dict(scales), values=[point.quality, point.cost])
        )
    parameters = study.ask(dict(scales)).params
    return {name: min(max(rounded(parameters[name]), low), high) for name, (low, high) in space.items()}


def rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


def front_of(points: list[Point], maximise: bool) -> list[int]:
    """Numbers of the points that no other one beats in one objective without losing in the other; cheapest first."""
    sign, front, best = -1.0 if maximise else 1.0, [], float("inf")
    for number in sorted(range(len(points)), key=lambda i: (points[i].cost, sign * points[i].quality, i)):
        if sign * points[number].quality < best:
            best = sign * points[number].quality
            front.append(number)
    return front


def search(
    evaluate: Evaluate,
    space: Space,
    *,
    trials: int,
    seed: int,
    maximise: bool,
    storage: Storage,
    say: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Search until `trials` points are complete, by this worker and others; exactly so many, whoever dies."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with opened_study(storage, maximise) as (study, engine):
            work = _Worker(study, engine, storage, evaluate, space, trials, seed, maximise)
            if done := len(work.complete()):
                say(f"resuming: {done} of {trials} trials are in the storage")
            with progress("Searching", total=trials) as advance:
                work.run(advance)
            return work.result()
    finally:
        optuna.logging.set_verbosity(before)


class _Surplus(Exception):
    """Not an error: a trial that began while others completed the number."""


class _Worker:
    """One process at work on a study."""

    def __init__(
        self,
        study: Study,
        engine: RDBStorage,
        storage: Storage,
        evaluate: Evaluate,
        space: Space,
        trials: int,
        seed: int,
        maximise: bool,
    ) -> None:
        """Work on a study. engine: the study's storage object."""
        self.study, self.engine, self.storage = study, engine, storage
        self.evaluate, self.space = evaluate, space
        self.trials, self.seed, self.maximise = trials, seed, maximise
        self.nameless: dict[int, float] = {}  # running trials whose worker did not record its name: since when
        self.study.sampler = _sampler(self)

    def complete(self) -> list[FrozenTrial]:
        return self._in_state("COMPLETE")

    def _in_state(self, *names: str) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        states = tuple(TrialState[name] for name in names)
        return sorted(self.study.get_trials(deepcopy=False, states=states), key=lambda trial: trial.number)

    def run(self, advance: Callable[..., None]) -> None:
        reported = 0
        while True:
            self._bury()
            done = len(self.complete())
            advance(min(done, self.trials) - reported)
            reported = min(done, self.trials)
            if done >= self.trials:
                return
            if done + len(self._in_state("RUNNING")) < self.trials:
                self._one()
            else:
                time.sleep(POLL)

    def _one(self) -> None:
        """Run one trial. If another worker took it for dead meanwhile, its result no longer counts."""
        from optuna.trial import TrialState

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the heartbeat is somebody else's care: ours
            trial = self.study.ask()
        try:
            with self._alive(trial._trial_id):
                values = self._objective(trial)
        except BaseException as error:
            self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            if isinstance(error, _Surplus):
                return
            raise
        self.study.tell(trial, values, skip_if_finished=True)

    @contextmanager
    def _alive(self, trial_id: int) -> Iterator[None]:
        """A sign of life now and then, from a thread; nobody asks a search that has its storage for itself."""
        if self.storage.url is None:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self.storage.heartbeat):
                self.engine.record_heartbeat(trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _objective(self, trial: Trial) -> tuple[float, float]:
        if self.place(trial.number) >= self.trials:
            raise _Surplus
        if "worker" not in trial.user_attrs:  # out of the queue: Optuna does not ask the sampler
            self.sign(trial)
        parameters = {name: trial.suggest_float(name, low, high, log=True) for name, (low, high) in self.space.items()}
        quality, cost = self.evaluate(parameters)
        return rounded(quality), rounded(cost)

    def place(self, number: int) -> int:
        """Trials before this one that are complete or may become so."""
        return sum(t.number < number for t in self._in_state("COMPLETE", "RUNNING", "WAITING"))

    def sign(self, trial: Trial | FrozenTrial) -> None:
        """A name, and a first sign of life: without one Optuna takes nobody for dead."""
        if self.storage.url is not None:
            self.engine.set_trial_user_attr(trial._trial_id, "worker", this_worker())
            self.engine.record_heartbeat(trial._trial_id)

    def suggested(self, trial: FrozenTrial) -> dict[str, float]:
        """Parameters of a new trial, which remembers how many points it knew."""
        done = self.complete()
        self.engine.set_trial_user_attr(trial._trial_id, "known", len(done))
        return suggest(_points(done), self.space, self.seed, self.place(trial.number), self.maximise)

    def _bury(self) -> None:
        """Give the trials of dead workers to others: without a heartbeat, or, on this machine, without a process."""
        from optuna.storages import fail_stale_trials

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "experimental"
            fail_stale_trials(self.study)
        for trial in self._in_state("RUNNING"):
            if self.storage.url is None or self._is_dead(trial):
                self._fail(trial)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        if "worker" in trial.user_attrs:
            return is_dead(str(trial.user_attrs["worker"]))
        since = self.nameless.setdefault(trial.number, time.monotonic())
        return time.monotonic() - since > self.storage.grace

    def _fail(self, trial: FrozenTrial) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        try:
            changed = self.engine.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:  # another worker was faster
            return
        if changed:
            run_again(self.study, trial)

    def result(self) -> SearchResult:
        done = self.complete()[: self.trials]
        earlier = [trial.user_attrs.get("known") for trial in done]
        return SearchResult(_points(done), earlier == list(range(len(done))))


def _points(trials: list[FrozenTrial]) -> list[Point]:
    return [Point(dict(trial.params), *trial.values) for trial in trials]


def _sampler(worker: _Worker) -> BaseSampler:
    """An Optuna sampler that asks `worker` for all parameters at once."""
    import optuna

    scales: dict[str, BaseDistribution] = {
        name: optuna.distributions.FloatDistribution(low, high, log=True) for name, (low, high) in worker.space.items()
    }

    class Sampler(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
            worker.sign(trial)
            return {} if "fixed_params" in trial.system_attrs else scales

        def sample_relative(
            self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
        ) -> dict[str, float]:
            return worker.suggested(trial) if search_space else {}

        def sample_independent(
            self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
        ) -> float:
            raise AssertionError(f"{param_name} is not in the search space")

    return Sampler()
