"""The conformance suite where vLLM is stood in for: what it compares with, and when it refuses to compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcal_artifacts.errors import UsageError
from kvcal_vllm import testing
from tests.support.cases.vllm_registry import STOCK, Registry

OTHERS = "foreign.backend.Corrupt"


@pytest.fixture
def overrides(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is registered. A package registers two backends when plug-ins are loaded, once in a process."""
    registry, loaded = Registry(), list[str]()
    registry.install(monkeypatch)

    def load() -> None:
        if not loaded:
            loaded.append("foreign")
            registry.overrides.update(CPU_ATTN=OTHERS, CUSTOM=OTHERS)

    plugins = ModuleType("vllm.plugins")
    plugins.load_general_plugins = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)

    def engine(model: str, **options: Any) -> Any:
        load()
        return running(registry.CPU_ATTN.get_path())

    monkeypatch.setattr(testing, "engine", engine)
    monkeypatch.setattr(testing.Suite, "prompts", [[1, 2]])
    monkeypatch.setattr(testing, "_text_logprobs", lambda llm, ids: [0.0])
    monkeypatch.setattr(testing, "answers", lambda llm, prompts, count=1: [[3]] * len(prompts))
    return registry.overrides


def running(path: str) -> Any:
    """An engine whose layers have an implementation of that name, and one layer that has none."""
    module, name = path.rsplit(".", 1)
    layers = {"0": SimpleNamespace(impl=type(name, (), {"__module__": module})()), "1": SimpleNamespace()}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(num_gpu_blocks=1, block_size=1),
    )
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), path=path)


def test_stock_vllm_is_vllms_own_where_a_package_replaced_it(
    overrides: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrupt backend would otherwise be compared with itself."""
    engines: list[str] = []
    monkeypatch.setattr(testing, "capacity", lambda llm: engines.append(llm.path) or 1)
    suite = testing.Suite("model", {"attention_config": {"backend": "CUSTOM"}}, "float32")
    assert suite.stock.capacity == 1
    assert engines == [STOCK]
    assert overrides == {"CPU_ATTN": OTHERS, "CUSTOM": OTHERS}  # again, for the backend's engines
    assert suite.alone.capacity == 1
    assert engines == [STOCK, OTHERS]


@pytest.mark.parametrize(
    ("path", "measure", "reason"),
    [
        (OTHERS, lambda suite: suite.stock, "stock vLLM: its attention is foreign.backend.Corrupt, which is not"),
        (STOCK, lambda suite: suite.alone, r"options \{\} select no backend: the engine's attention is vLLM's own"),
    ],
)
def test_what_compares_a_backend_with_itself_is_refused(
    path: str,
    measure: Callable[[testing.Suite], object],
    reason: str,
    overrides: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing, "engine", lambda model, **options: running(path))
    with pytest.raises(UsageError, match=reason):
        measure(testing.Suite("model", {}, "float32"))


def test_what_starts_no_engine_is_one_line(
    overrides: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of kvcal's refusals and of any other error, without a traceback; checks that follow would fail alike."""
    monkeypatch.setattr(sys, "argv", ["testing", "--model", "model", "--dtype", "float32"])
    for error in (UsageError("kvcal: device tpu: this"), RuntimeError("Engine core failed.\nSee root cause above.")):

        def engine(model: str, error: Exception = error, **options: Any) -> Any:
            raise error

        monkeypatch.setattr(testing, "engine", engine)
        with pytest.raises(SystemExit) as ended:
            testing.main()
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        first = str(error).splitlines()[0]
        assert line == f"capacity: not checked, nor what follows: {type(error).__name__}: {first}"


@pytest.mark.parametrize(("options", "reason"), [('["x"]', "must be an object, such as"), ("{", "no JSON: Expecting")])
def test_options_that_are_no_object(
    options: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["testing", "--model", "model", "--options", options])
    with pytest.raises(SystemExit) as ended:
        testing.main()
    assert ended.value.code == 2
    assert f"argument --options: {reason}" in capsys.readouterr().err
