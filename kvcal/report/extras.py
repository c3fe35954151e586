"""Packages that come with an extra of kvcal, and the line that says which one is missing."""

from __future__ import annotations

import importlib.util

from kvcal_artifacts.errors import UsageError

EXTRAS = {
    "datasets": "data",
    "pyarrow": "data",
    "optuna": "tune",
    "matplotlib": "plot",
    "lm_eval": "tasks",
    "accelerate": "spread",
}


def require(module: str, what: str, instead: str = "") -> None:
    """Raise UsageError where a package of EXTRAS is not installed, with the command that installs it.

    what: what needs it. instead: what to do without it, if anything.
    """
    if importlib.util.find_spec(module) is None:
        other = f", or {instead}" if instead else ""
        name = module.replace("_", "-")
        raise UsageError(f"{what} needs {name}, which is not installed: pip install 'kvcal[{EXTRAS[module]}]'{other}")
