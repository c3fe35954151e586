"""A bundle's file that is not there, and a preset's or method's name in its place. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from kvcal_artifacts.errors import CorruptBundle
from kvcal_artifacts.files import no_bundle_at

from ..pipeline.names import COMMANDS, SUFFIX, names_of


def refuse_missing(path: Path, *, presets: bool = False) -> None:
    """Raise CorruptBundle where no file has this path. presets: whether the command has --preset.

    A name of something else is recognised: the message says what to type or run instead.
    """
    refuse_name(path, presets=presets)
    if not path.is_file():
        raise CorruptBundle(f"{path}: {no_bundle_at(path)}")


def refuse_name(path: Path, *, presets: bool = False) -> None:
    """Raise CorruptBundle for the name of a preset, a method or a codec, where no file has it."""
    if not path.exists() and (instead := _meant(str(path).strip().lower(), presets)) is not None:
        raise CorruptBundle(f"{path}: no such bundle file; {instead}")


def _meant(name: str, presets: bool) -> str | None:
    """What to do with the name of a preset, a method or a codec; None for any other."""
    if name in names_of("preset"):
        return (
            f"it is a preset: give --preset {name}"
            if presets
            else f"it is a preset: {_written(f'kvcal preset {name}')}"
        )
    if name in COMMANDS.values():
        return f"it is a command: {_written(f'kvcal {name}')}"
    if name in COMMANDS:
        return f"it is a method: {_written(f'kvcal {COMMANDS[name]}')}"
    if name in names_of("codec"):
        return f"it is a codec: {_written(f'kvcal preset --keys {name} --values {name}')}"
    return None


def _written(command: str) -> str:
    return f"`{command}` writes a bundle, NAME{SUFFIX}; give that file"
