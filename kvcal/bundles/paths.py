"""Bundle files as commands receive them."""

from __future__ import annotations

from pathlib import Path

from kvcal_artifacts.bundle import Bundle, load_bundle

from .missing import refuse_name as refuse_name


def bundle_at(path: Path, *, presets: bool = False) -> Bundle:
    """`load_bundle`. presets: whether the command has --preset. Raises as it does; where there is no such file and the
    path is a name of something else, the CorruptBundle says what to type or run instead.
    """
    refuse_name(path, presets=presets)
    return load_bundle(path)
