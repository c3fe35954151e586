"""What the plug-in names to vLLM, where vLLM is stood in for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcal_artifacts.errors import UsageError
from kvcal_vllm import plugin
from tests.support.cases.vllm_registry import Registry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    made.install(monkeypatch)
    return made


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plug-in's warnings and errors."""
    lines = list[str]()
    for level in ("warning", "error"):
        monkeypatch.setattr(plugin.logger, level, lambda text, *values: lines.append(text % values))
    return lines


def on(platform: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's platform, which notes the configs that it is asked about."""
    module, updated = ModuleType("vllm.platforms"), list[Any]()
    made = SimpleNamespace(is_cpu=lambda: platform == "cpu", check_and_update_config=updated.append, updated=updated)
    module.current_platform = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    return made


def config(backend: str | None, model: object = "model", block_size: int | None = None, **additional: object) -> Any:
    """Of an engine. backend: what --attention-backend selects. block_size: --block-size."""
    selected = None if backend is None else SimpleNamespace(name=backend)
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=selected),
        additional_config=additional,
        model_config=model,
        cache_config=SimpleNamespace(block_size=block_size or 16, user_specified_block_size=block_size is not None),
    )


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
    log: list[str],
) -> None:
    on(platform, monkeypatch)
    registry.overrides[name] = "theirs.Backend"
    plugin.register()
    assert registry.overrides == {name: "theirs.Backend"}
    [line] = log
    assert f"attention backend {name} is theirs.Backend, of another package, and is left as it is" in line
    assert "VLLM_PLUGINS=kvcal" in line


def test_what_serves_cpus_says_nothing_of_gpus(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    on("cuda", monkeypatch)
    registry.overrides["CPU_ATTN"] = "theirs.Backend"
    plugin.register()
    assert registry.overrides == {"CPU_ATTN": "theirs.Backend", "CUSTOM": plugin.ON_GPU}


WITHOUT = "x.kvcal.safetensors is to be served, without its attention backend: add --attention-backend CUSTOM"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", [None, "FLASH_ATTN"])
@pytest.mark.parametrize("by", ["additional config", "environment"])
def test_a_bundle_without_the_backend_ends_the_engine(
    platform: str, backend: str | None, by: str, registry: Registry, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """On a GPU nothing of kvcal's would be called, and the cache would be FP16 in silence."""
    made = on(platform, monkeypatch)
    for _ in range(2):  # one line all the same
        plugin.register()
    source = {"kvcal": "x.kvcal.safetensors"}
    if by == "environment":
        monkeypatch.setenv("KVCAL_BUNDLE", source.pop("kvcal"))
    with pytest.raises(UsageError, match=WITHOUT):
        made.check_and_update_config(config(backend, **source))
    assert log == [f"kvcal: {WITHOUT}"]
    made.check_and_update_config(config(backend, None, **source))  # vLLM makes configs of no model, too
    monkeypatch.delenv("KVCAL_BUNDLE", raising=False)
    made.check_and_update_config(config("CUSTOM", kvcal="x.kvcal.safetensors"))
    made.check_and_update_config(config(backend))
    assert len(made.updated) == 4  # all go to vLLM's platform, once


def test_the_backend_without_a_bundle_ends_the_engine(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    made = on("cuda", monkeypatch)
    plugin.register()
    with pytest.raises(UsageError, match="--attention-backend CUSTOM without a bundle: give --additional-config"):
        made.check_and_update_config(config("CUSTOM"))


def test_a_bundle_is_not_given_to_another_packages_backend(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """Whichever package registers first."""
    made = on("cuda", monkeypatch)
    plugin.register()
    registry.overrides["CUSTOM"] = "theirs.Backend"
    with pytest.raises(UsageError, match=r"^higgs-4 would not be served: attention .* CUSTOM is theirs\.Backend, of"):
        made.check_and_update_config(config("CUSTOM", kvcal="higgs-4"))
    assert len(log) == 1
    made.check_and_update_config(config("CUSTOM"))  # theirs, and nobody asked for kvcal


def test_blocks_that_pages_do_not_divide_end_the_engine(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """vLLM's own line does not say which sizes would do. Its default is no user's."""
    made = on("cuda", monkeypatch)
    plugin.register()
    with pytest.raises(UsageError, match="--block-size 16: a page holds 32 tokens: give a multiple of 32"):
        made.check_and_update_config(config("CUSTOM", block_size=16, kvcal="higgs-4"))
    assert log == ["kvcal: --block-size 16: a page holds 32 tokens: give a multiple of 32, or leave it out"]
    made.check_and_update_config(config("CUSTOM", block_size=64, kvcal="higgs-4"))
    made.check_and_update_config(config("CUSTOM", kvcal="higgs-4"))
    made.check_and_update_config(config(None, block_size=16))
