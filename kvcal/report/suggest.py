"""What to answer to a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.presets import AUTO_BITS

FEW = 8  # so many names are read at a glance; of more the nearest are named, and the command that lists them
SUGGESTIONS = 3


def allowed(name: str, names: Collection[str], listed: str) -> str:
    """The second half of an error's line: all names if they are few, else the nearest and where all are.

    listed: the command that prints them, as `kvcal names codec`.
    """
    if len(names) <= FEW:
        return f"allowed are {', '.join(names)}"
    every = f"`{listed}` lists all"
    return f"did you mean {_either(near)}? {every}" if (near := nearest(name, names)) else every


def refuse_auto(name: str) -> None:
    """UsageError for a preset that needs the model's keys, which no command has when it reads its options."""
    if name in AUTO_BITS:
        raise UsageError(
            f"preset {name!r} looks at the model's keys as a cache is made, in Python alone: kvcal.cache(model, "
            f"{name!r}); on the command line kvcal recommend measures what fits a model"
        )


def nearest(name: str, among: Collection[str], most: int = SUGGESTIONS) -> list[str]:
    """The nearest names, most alike first, at most so many; where none is alike, of those that begin with the same
    word, or that contain the name.
    """
    lowered, names = name.lower(), list(among)
    if near := difflib.get_close_matches(lowered, names, most, 0.7):
        return near
    word = _word(lowered)
    if near := difflib.get_close_matches(lowered, [one for one in names if word and _word(one) == word], most, 0.0):
        return near
    return [one for one in names if len(lowered) > 2 and lowered in one.lower()][:most]


def _word(name: str) -> str:
    letters = re.match(r"[a-z]+", name)
    return letters[0] if letters else ""


def _either(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
