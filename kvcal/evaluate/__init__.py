"""What compression costs in quality, measured through the cache.

`kvcal.evaluate(...)` is this package called: `kvcal.commands.api.evaluate`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class _Callable(ModuleType):
    """A package that can be called, as its name is that of a function, too."""

    def __call__(self, *args: object, **options: object) -> object:
        return importlib.import_module("kvcal.commands.api").evaluate(*args, **options)


sys.modules[__name__].__class__ = _Callable
