"""Bundle files as commands are given them: a preset's or a method's name in a path's place is answered as what it
is.
"""

from __future__ import annotations

from pathlib import Path

from kvcal_artifacts.bundle import SUFFIX, Bundle, load_bundle
from kvcal_artifacts.errors import CorruptBundle

from ..methods.data_free import PRESETS
from ..methods.registry import BACKBONES
from ..pipeline.build import COMMANDS


def given_bundle(path: Path, *, presets: bool = False) -> Bundle:
    """`load_bundle`. presets: whether the command has --preset. Raises as it does; where there is no such file and the
    path is a known name, the CorruptBundle says what to give or run instead.
    """
    refuse_name(path, presets=presets)
    return load_bundle(path)


def refuse_name(path: Path, *, presets: bool = False) -> None:
    """Check as `given_bundle` does, without reading the file."""
    if not path.exists() and (instead := _meant(str(path).strip().lower(), presets)) is not None:
        raise CorruptBundle(f"{path}: no such bundle file; {instead}")


def _meant(name: str, presets: bool) -> str | None:
    """What to do with the name of a preset, a method or a codec; None for any other."""
    if name in PRESETS:
        return (
            f"it is a preset: give --preset {name}"
            if presets
            else f"it is a preset: {_written(f'kvcal preset {name}')}"
        )
    if name in COMMANDS.values():
        return f"it is a command: {_written(f'kvcal {name}')}"
    if name in COMMANDS:
        return f"it is a method: {_written(f'kvcal {COMMANDS[name]}')}"
    if name in BACKBONES:
        return f"it is a codec: {_written(f'kvcal preset --keys {name} --values {name}')}"
    return None


def _written(command: str) -> str:
    return f"`{command}` writes a bundle, NAME{SUFFIX}; give that file"
