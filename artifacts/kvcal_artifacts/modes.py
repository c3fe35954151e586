"""torch's modes, entered only where they would change something.

Entering and leaving one costs host time (docs/benchmarks/reasons.md), a few times a layer in every decode step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_UNCHANGED = nullcontext()


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which operations on such devices compute in the dtypes of their inputs."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _UNCHANGED


def without_grad(call: Callable[P, R]) -> Callable[P, R]:
    """The function inside torch.no_grad()."""

    @functools.wraps(call)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with torch.no_grad():
            return call(*args, **kwargs)

    return inner
