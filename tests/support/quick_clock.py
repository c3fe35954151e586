"""Clocks of `kvcal bench` for tests: what a device does at best is measured on small buffers."""

from __future__ import annotations

import pytest

from kvcal.bench import timing


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer that empties a server's cache has a gigabyte: a second for each few times that are taken."""
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(timing.MATMUL_SIZE, "cpu", 512)
    monkeypatch.setattr(timing, "last_cache", lambda device: 1 << 16)
