"""vLLM's registry of attention backends, as far as the plug-in and its suite call it, where vLLM is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


class Member:
    """One of vLLM's names of attention backends."""

    def __init__(self, name: str, value: str | None, overrides: dict[str, str]) -> None:
        self.name, self.value, self._overrides = name, value, overrides

    def get_path(self) -> str:
        path = self._overrides.get(self.name, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use.")
        return path

    def is_overridden(self) -> bool:
        return self.name in self._overrides

    def clear_override(self) -> None:
        self._overrides.pop(self.name, None)


class Registry:
    """Stands for `AttentionBackendEnum`. overrides: what packages have registered, by the backend's name."""

    def __init__(self) -> None:
        self.overrides: dict[str, str] = {}
        self.CPU_ATTN = Member("CPU_ATTN", STOCK, self.overrides)
        self.CUSTOM = Member("CUSTOM", None, self.overrides)

    def __iter__(self) -> Iterator[Member]:
        return iter((self.CPU_ATTN, self.CUSTOM))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it where vLLM's would be imported from."""
        modules: dict[str, dict[str, object]] = {
            "vllm": {},
            "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": self, "register_backend": self._register},
            "vllm.v1.attention.selector": {"_cached_get_attn_backend": SimpleNamespace(cache_clear=lambda: None)},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def _register(self, member: Member, path: str) -> None:
        self.overrides[member.name] = path
