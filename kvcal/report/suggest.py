"""What to say to a name that is none of the known ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

FEW = 8  # so many names are read at a glance; of more the nearest are said, and the command that lists them
SAID = 3


def allowed(name: str, known: Collection[str], listed: str) -> str:
    """The second half of an error's line: all names if they are few, else the nearest and where all are.

    listed: the command that prints them, as `kvcal names codec`.
    """
    if len(known) <= FEW:
        return f"allowed are {', '.join(known)}"
    every = f"`{listed}` lists all"
    return f"did you mean {_either(near)}? {every}" if (near := nearest(name, known)) else every


def nearest(name: str, known: Collection[str], most: int = SAID) -> list[str]:
    """At most so many, the most alike first; where none is alike, of those that begin with the same word."""
    wanted, names = name.lower(), list(known)
    if near := difflib.get_close_matches(wanted, names, most, 0.7):
        return near
    word = _word(wanted)
    return difflib.get_close_matches(wanted, [one for one in names if word and _word(one) == word], most, 0.0)


def _word(name: str) -> str:
    found = re.match(r"[a-z]+", name)
    return found[0] if found else ""


def _either(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
