"""A command's options at their defaults, for commands that call others."""

from __future__ import annotations

import inspect
from typing import Any


def defaults_of(command: str) -> dict[str, Any]:
    """Option name -> default, as `kvcal COMMAND` alone would have them."""
    from kvcal.cli.app import COMMANDS

    parameters = inspect.signature(COMMANDS[command]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
