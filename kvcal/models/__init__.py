"""What `--model` means: names, files, and weights on a device.

The names that scripts use are here, too: `from kvcal.models import load_model, resolve`. They are imported when they
are first asked for, because a command's help needs this package without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loading import LoadedModel as LoadedModel
    from .loading import load_model as load_model
    from .names import ModelSource as ModelSource
    from .names import resolve as resolve
    from .tokenizers import load_tokenizer as load_tokenizer

_WHERE = {
    "LoadedModel": "loading",
    "ModelSource": "names",
    "load_model": "loading",
    "load_tokenizer": "tokenizers",
    "resolve": "names",
}
__all__ = ["LoadedModel", "ModelSource", "load_model", "load_tokenizer", "resolve"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
