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


def class_of(path: str, **methods: Any) -> type:
    module, name = path.rsplit(".", 1)
    return type(name, (), {"__module__": module} | methods)


def running(path: str, backend: type | None = None) -> Any:
    """An engine whose layers have an implementation of that name, and one layer that has none. backend: of these
    layers; None: one of vLLM's.
    """
    kind = backend or class_of(STOCK)
    layers = {"0": SimpleNamespace(impl=class_of(path)(), get_attn_backend=lambda: kind), "1": SimpleNamespace()}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(num_gpu_blocks=1, block_size=1),
    )
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), path=path)


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ({}, ["foreign.backend.Pages"]),  # another layout of pages, with vLLM's attention
        ({"stands_aside": classmethod(lambda kind: False)}, ["foreign.backend.Pages"]),
        ({"stands_aside": classmethod(lambda kind: True)}, []),  # as kvcal's, where no bundle is named
    ],
)
def test_a_backend_is_known_by_its_class_also_where_it_computes_as_vllm_does(
    methods: dict[str, Any], expected: list[str]
) -> None:
    llm = running(STOCK, class_of("foreign.backend.Pages", **methods))
    assert testing.foreign_attention(llm) == expected


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


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "give those of your backend, such as"),
        ({"attention_config": {"backend": "CUSTOM"}}, "on a CPU vLLM takes the backend that is registered as CPU_ATTN"),
    ],
)
def test_advice_is_not_the_command_just_given(
    options: dict[str, Any], advice: str, overrides: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "engine", lambda model, **options: running(STOCK))
    with pytest.raises(UsageError, match=f"compared with itself; {advice}"):
        testing.Suite("model", options, "float32").check_capacity()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ('{"dtype": "float16"}', "error: dtype float32 (--dtype), and float16 in the options: give one of them"),
        ('{"model": "other"}', "error: options name model other: the suite has its own (--model): leave it out there"),
    ],
)
def test_options_that_say_what_the_suite_says(
    options: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["testing", "--model", "model", "--dtype", "float32", "--options", options]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        testing.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"{reason}\n")


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
