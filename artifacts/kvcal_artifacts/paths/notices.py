"""Warnings of kernels that do not run, each once a process."""

from __future__ import annotations

import warnings

from .preflight import verdicts

_WARNED: set[str] = set()


def warn(
    line: str,
    instead: str = "packed blocks are decoded for the model's own attention instead",
    verdict: str | None = None,
) -> None:
    """Warn once per process: a model has many layers, and a program many caches.

    verdict: of preflight, whose file may hold it.
    """
    if line not in _WARNED:
        _WARNED.add(line)
        warnings.warn(f"{line}; {instead}{verdicts.remembered(verdict) if verdict else ''}", stacklevel=2)
