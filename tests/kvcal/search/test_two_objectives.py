"""Why workers are buried by kvcal.search.two_objectives and not by Optuna alone (docs/decisions.md).

Two promises: a search ends with exactly the number of points that was asked for, and no trial of a dead worker is lost.
The same cases, run by our search, are in tests/kvcal/methods/test_mixkvq.py.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is of the extra `tune`")

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

from kvcal.search import two_objectives
from kvcal.search.study_storage import Storage
from kvcal.search.two_objectives import search

DIRECTIONS = ["minimize", "minimize"]
SPACE = {"a": (1.0, 2.0)}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    optuna.logging.set_verbosity(before)


def study_at(file: Path) -> Any:
    """A study whose storage has Optuna's heartbeat and retry."""
    storage = RDBStorage(
        f"sqlite:///{file}",
        heartbeat_interval=1,
        grace_period=1,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
    )
    return optuna.create_study(storage=storage, study_name="study", directions=DIRECTIONS, load_if_exists=True)


def test_optunas_heartbeat_takes_nobody_for_dead_who_sent_no_sign_of_life(tmp_path: Path) -> None:
    """`optimize` asks for a trial and only then begins to send signs of life. A worker killed in between has none: its
    trial runs for ever, and whoever waits for it too.
    """
    study = study_at(tmp_path / "s.db")
    unsigned, signed = study.ask(), study.ask()
    study._storage.record_heartbeat(signed._trial_id)
    with sqlite3.connect(tmp_path / "s.db") as connection:  # both were killed long ago
        connection.execute("update trial_heartbeats set heartbeat = '2000-01-01 00:00:00'")
        connection.execute("update trials set datetime_start = '2000-01-01 00:00:00'")
    fail_stale_trials(study)
    states = [trial.state for trial in study.get_trials()]
    assert states[unsigned.number] is TrialState.RUNNING
    assert states[signed.number] is TrialState.FAIL
    assert states[2:] == [TrialState.WAITING]  # Optuna retries the one that it missed


def test_two_workers_of_optuna_make_more_trials_than_asked_for(tmp_path: Path) -> None:
    """MaxTrialsCallback counts complete trials: the second worker begins one while the last of the first still runs."""
    others: list[Any] = []

    def objective(trial: Any) -> tuple[float, float]:
        a = trial.suggest_float("a", *SPACE["a"])
        if trial.number == 2 and not others:  # the last of three: another worker looks for work
            others.append(study_at(tmp_path / "s.db"))
            others[0].optimize(objective, callbacks=[MaxTrialsCallback(3, states=(TrialState.COMPLETE,))])
        return a, 1 / a

    study = study_at(tmp_path / "s.db")
    study.optimize(objective, callbacks=[MaxTrialsCallback(3, states=(TrialState.COMPLETE,))])
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 4


def test_our_workers_make_exactly_as_many_in_the_same_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker looks for work while the last of three trials runs, and waits."""
    storage = Storage("study", tmp_path / "unused", f"sqlite:///{tmp_path}/s.db")
    looked, calls, workers = threading.Event(), list[float](), list[threading.Thread]()

    def waiting(seconds: float) -> None:
        looked.set()
        time.sleep(seconds)

    monkeypatch.setattr(two_objectives, "time", SimpleNamespace(sleep=waiting, monotonic=time.monotonic))

    def ours(parameters: dict[str, float]) -> tuple[float, float]:
        calls.append(parameters["a"])
        if len(calls) == 3:
            workers.append(threading.Thread(target=another))
            workers[0].start()
            assert looked.wait(60)
        if len(calls) > 3:
            looked.set()  # it did not wait: let the test end, and fail
        return parameters["a"], 1 / parameters["a"]

    def another() -> None:
        search(ours, SPACE, trials=3, seed=0, maximise=False, storage=storage)

    found = search(ours, SPACE, trials=3, seed=0, maximise=False, storage=storage)
    workers[0].join()
    assert len(calls) == 3 and [point.parameters["a"] for point in found.points] == calls
    complete = optuna.load_study(study_name="study", storage=storage.url).get_trials(states=(TrialState.COMPLETE,))
    assert len(complete) == 3
