"""What compression costs in quality, measured through the cache.

`kvcal.evaluate(...)` is this package called, which kvcal/__init__.py leads to kvcal.commands.api.evaluate: this package
imports nothing above it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType


class _Callable(ModuleType):
    """A package that can be called, as its name is that of a function, too."""

    _function: Callable[..., object]

    def __call__(self, *args: object, **options: object) -> object:
        return self._function(*args, **options)


def make_callable(function: Callable[..., object]) -> None:
    """Let a call of this package be one of a function."""
    package = sys.modules[__name__]
    package.__class__ = _Callable
    vars(package)["_function"] = function
