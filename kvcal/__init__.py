"""Calibrate compression of the key-value cache and measure what it costs.

    kvcal.plan("llama-3.1-8b", gpu="rtx-4090")          # what fits, without weights
    cache = kvcal.cache(model, "kivi-4")                # or a bundle, its file, auto-4
    model.generate(**inputs, past_key_values=cache)
    bundle = kvcal.fit(model, tokenizer, "text.txt", method="aqua-kv")
    rows = kvcal.evaluate(model, tokenizer, "text.txt", ["kivi-4", bundle])

`import kvcal` imports neither torch nor a command; each function imports what it needs.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import evaluate
from .report.version import __version__

__all__ = ["__version__", "cache", "check_codec", "evaluate", "fit", "plan", "register"]


def __getattr__(name: str) -> Any:
    """The functions of kvcal.commands.api, imported when first asked for. AttributeError for any other name."""
    if name in __all__:
        return getattr(importlib.import_module("kvcal.commands.api"), name)
    raise AttributeError(f"module 'kvcal' has no attribute {name!r}; it has {', '.join(__all__)}")


# `kvcal.evaluate(...)`: the package of this name calls the function
evaluate.make_callable(lambda: importlib.import_module("kvcal.commands.api").evaluate)


def __dir__() -> list[str]:
    return sorted(__all__)
