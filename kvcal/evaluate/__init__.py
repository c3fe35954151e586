"""What compression costs in quality, measured through the cache.

`kvcal.evaluate(...)` is this package called, which kvcal/__init__.py leads to kvcal.commands.api.evaluate: this package
imports nothing above it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType


class _Callable(ModuleType):
    # A package that can be called, as its name is that of a function, too: with the function's signature and docstring.

    _load: Callable[[], Callable[..., object]]

    def __call__(self, *args: object, **options: object) -> object:
        return self._load()(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._load().__doc__


def make_callable(load: Callable[[], Callable[..., object]]) -> None:
    """Let a call of this package be one of the function that `load` gives, which is called when that is needed."""
    package = sys.modules[__name__]
    package.__class__ = _Callable
    vars(package)["_load"] = load
