"""Kernels are tried ahead by threads: each once, those of a cache that asks meanwhile too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from kvcal.methods.data_free import preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts.cache import ahead
from kvcal_artifacts.paths import choose
from kvcal_artifacts.paths.preflight import verdicts


@cache
def tiny() -> torch.nn.Module:
    return load_model(resolve("tiny"), dtype="float32", device="cpu").model


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_cpu_has_nothing_to_try() -> None:
    model = tiny()
    assert ahead._trials(model, preset("kivi-2").scheme(model)) == []


def test_each_kind_of_layer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one geometry and codec take one kernel; schemes come in their order."""
    model = tiny()
    schemes = [preset(name).scheme(model) for name in ("kivi-2", "higgs-2")]
    tried: list[tuple[str, int, bool]] = []

    def layer_paths(kernels: str, scheme: Any, index: int, pair: Any, *rest: Any, static: bool) -> None:
        tried.append((pair.key.encoding(), index, static))

    monkeypatch.setattr(choose, "layer_paths", layer_paths)
    monkeypatch.setattr(ahead, "GPU", "cpu")
    with ahead.kernels_tried_ahead(model, schemes):
        wait_for(lambda: len(tried) == 2)
    assert sorted(index for _, index, _ in tried) == [0, 0]
    assert len({encoding for encoding, _, _ in tried}) == 2
    assert not any(static for _, _, static in tried)


def test_what_has_not_begun_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun, go_on = tiny(), [], threading.Event()

    def slow(*arguments: Any, **options: Any) -> None:
        begun.append(1)
        go_on.wait(20)

    monkeypatch.setattr(choose, "layer_paths", slow)
    monkeypatch.setattr(ahead, "GPU", "cpu")
    names = ("kivi-2", "kivi-4", "higgs-2", "higgs-3", "higgs-4")
    with ahead.kernels_tried_ahead(model, [preset(name).scheme(model) for name in names]):
        wait_for(lambda: len(begun) == ahead.AT_ONCE)
        go_on.set()
    assert len(begun) <= len(names)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kernels")]


def test_an_error_is_left_to_the_cache_that_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(choose, "layer_paths", fails)
    monkeypatch.setattr(ahead, "GPU", "cpu")
    with ahead.kernels_tried_ahead(model, [preset("kivi-2").scheme(model)]):
        pass


def test_two_verdicts_are_found_side_by_side_and_each_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The second thread that asks for a kernel waits for the first; another kernel's trial runs meanwhile."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "unsupported", lambda device: None)
    monkeypatch.setattr(verdicts, "key_of", lambda parts, dtype, device: parts[0])
    monkeypatch.setattr(verdicts, "_cuda_fault", lambda device: None)
    both, calls = threading.Barrier(2, timeout=20), []

    def trial() -> None:
        both.wait()
        calls.append(1)

    def ask(name: str) -> None:
        assert verdicts._verdict([name], torch.float32, torch.device("cpu"), trial) is None

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "other", "one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 2
