"""What the user asked for: a bundle or a preset, and the mode, from vLLM's additional config or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcal_artifacts.checked import shown
from kvcal_artifacts.errors import UsageError

BUNDLE, DETERMINISTIC = "KVCAL_BUNDLE", "KVCAL_DETERMINISTIC"
ENTRIES = ("kvcal", "kvcal_deterministic")
HOW = 'give --additional-config \'{"kvcal": "x.kvcal.safetensors"}\' or KVCAL_BUNDLE'


@dataclass(frozen=True)
class Settings:
    """What to serve with. source: a bundle's path, or a preset's name.

    deterministic: whether every token attends to packed keys and values only, its own chunk's too, so that the answer
    does not depend on how a prompt is cut or what is cached of it. Else the tokens of one step attend to each other's
    exact keys and values.
    """

    source: str
    deterministic: bool = False


def settings(additional: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Settings | None:
    """Read the settings; None where nobody asked for kvcal. The additional config goes before the environment.

    Raises UsageError for entries that mean nothing.
    """
    environment = os.environ if environment is None else environment
    ours = {name: value for name, value in additional.items() if name.startswith("kvcal")}
    if unknown := sorted(set(ours) - set(ENTRIES)):
        raise UsageError(f"additional config, {shown(unknown[0])}: kvcal's entries are {', '.join(ENTRIES)}")
    source = ours.get("kvcal", environment.get(BUNDLE) or None)
    if source is None and "kvcal" not in ours:
        if ours:
            raise UsageError(f"kvcal_deterministic without a bundle: {HOW}")
        return None
    if not isinstance(source, str) or not source:
        raise UsageError(f"additional config, kvcal = {shown(source)}: must be a bundle's path or a preset's name")
    return Settings(source, _deterministic(ours, environment))


def settings_of(config: Any) -> Settings | None:
    """`settings` of vLLM's config of an engine, a `VllmConfig`."""
    additional = config.additional_config
    return settings(additional if isinstance(additional, dict) else {})


def active(config: Any) -> Settings | None:
    """What the user asked for, of a `VllmConfig`; None where the engine runs vLLM's backend.

    Raises UsageError where only one of the backend and the bundle was asked for.
    """
    backend, asked = config.attention_config.backend, settings_of(config)
    custom = backend is not None and backend.name == "CUSTOM"
    if custom and asked is None:
        raise UsageError(f"--attention-backend CUSTOM without a bundle: {HOW}")
    if asked is not None and not custom:
        raise UsageError(
            f"{asked.source} is to be served, without its attention backend: add --attention-backend CUSTOM"
        )
    return asked


def _deterministic(ours: Mapping[str, object], environment: Mapping[str, str]) -> bool:
    stated = ours.get("kvcal_deterministic")
    if stated is None:
        text = environment.get(DETERMINISTIC, "")
        if text not in ("", "0", "1"):
            raise UsageError(f"{DETERMINISTIC}={shown(text)}: must be 0 or 1")
        return text == "1"
    if not isinstance(stated, bool):
        raise UsageError(f"additional config, kvcal_deterministic = {shown(stated)}: must be true or false")
    return stated
