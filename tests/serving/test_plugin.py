"""What the plug-in names to vLLM, where vLLM is stood in for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvcal_vllm import plugin
from tests.support.vllm_registry import Registry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    made.install(monkeypatch)
    return made


def on(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.platforms")
    module.current_platform = SimpleNamespace(is_cpu=lambda: platform == "cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cpu", {"CUSTOM": plugin.ON_CPU, "CPU_ATTN": plugin.ON_CPU}), ("cuda", {"CUSTOM": plugin.ON_GPU})],
)
def test_backends_of_a_platform(
    platform: str, expected: dict[str, str], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(platform, monkeypatch)
    for _ in range(2):
        plugin.register()
        assert registry.overrides == expected


@pytest.mark.parametrize(("platform", "name"), [("cpu", "CPU_ATTN"), ("cpu", "CUSTOM"), ("cuda", "CUSTOM")])
def test_another_packages_backend_is_left_alone(
    platform: str,
    name: str,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(platform, monkeypatch)
    lines = list[str]()
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *values: lines.append(text % values))
    registry.overrides[name] = "theirs.Backend"
    plugin.register()
    assert registry.overrides == {name: "theirs.Backend"}
    [line] = lines
    assert f"attention backend {name} is theirs.Backend, of another package, and is left as it is" in line
    assert "VLLM_PLUGINS=kvcal" in line


def test_what_serves_cpus_says_nothing_of_gpus(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    on("cuda", monkeypatch)
    registry.overrides["CPU_ATTN"] = "theirs.Backend"
    plugin.register()
    assert registry.overrides == {"CPU_ATTN": "theirs.Backend", "CUSTOM": plugin.ON_GPU}
