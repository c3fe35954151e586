"""What a bundle's record may hold: no path, no name that leads somewhere, no number that no command takes.

A record may come from a stranger and is checked as strictly as what a user types. It may hold any JSON: a TypeError is
for a value of another type, a ValueError says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvcal_artifacts.errors import KVCalError

from ..models.catalogue import CATALOGUE
from ..report.records import is_number, kind_of
from ..text.sources import EMBEDDED

Fields = Mapping[str, object]  # of a record, not checked yet
LOCAL = ("file:", "folder:")  # texts whose place is not recorded, only name and hash
REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*"  # no part of it begins with a dot, so that it leads nowhere else
HUB_MODEL = re.compile(REPOSITORY, re.ASCII)
HUB_TEXT = re.compile(rf"{REPOSITORY}(:[\w.+-]*){{0,2}}(@[0-9a-f]{{40}})?", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
TASK = re.compile(r"[A-Za-z0-9_][\w.+-]*", re.ASCII)
FILES = (".yaml", ".yml", ".json", ".py")  # what no task's name ends in
LARGEST = 1 << 20  # of a recorded whole number: the papers' largest are near 10,000
LARGE = {"seed": 2**63 - 1, "vectors": 1 << 30}  # where more has a meaning
MOST_THREADS = 1024  # a million end the process with a segmentation fault


def check_threads(count: object) -> None:
    """KVCalError for a recorded number of threads that is none."""
    if count is not None and (type(count) is not int or not 1 <= count <= MOST_THREADS):
        raise KVCalError(f"provenance says {count!r} threads: needs a whole number from 1 to {MOST_THREADS}")


def check_name(what: str, name: object) -> None:
    """Names become names of files: one with a folder in it would be written there."""
    if not isinstance(name, str) or not name.strip() or name in (".", "..") or {"/", "\0"} & set(name):
        raise ValueError(f"{what} {name!r} is no name")


def check_hash(sha256: object) -> None:
    """Raise ValueError for what is no SHA-256 in lower-case hexadecimal digits."""
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 {sha256!r} is none")


def check_model(model: Fields) -> None:
    """Raise ValueError unless a recorded model has a kind, and a name of that kind that is no path."""
    name, kind, revision = model["name"], model["kind"], model["revision"]
    if type(model["random_weights"]) is not bool:
        raise ValueError(f"random_weights of the model is {kind_of(model['random_weights'])}, not true or false")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"revision of the model is {kind_of(revision)}, not text")
    if kind == "folder":
        check_name("model", name)
    elif not isinstance(name, str) or kind not in ("hub", "embedded"):
        raise ValueError(f"model {name!r} of kind {kind!r}: kinds are hub, embedded and folder")
    elif name in CATALOGUE:
        if (CATALOGUE[name].hub_id is None) != (kind == "embedded"):
            raise ValueError(f"model {name!r} is not of kind {kind!r}")
    elif kind == "embedded" or not HUB_MODEL.fullmatch(name):
        raise ValueError(f"model {name!r} is no short name and no hub id: a path is taken from --model alone")
    if kind == "hub" and revision and not model["random_weights"] and not REVISION.fullmatch(revision):
        raise ValueError(f"revision {revision!r} is none of a hub model")


def check_text(label: str | None) -> None:
    """Raise ValueError for a text that is neither embedded, a data set's name, nor a local text's bare name."""
    if label is None or label in EMBEDDED:
        return
    if label.startswith(LOCAL):
        check_name("text", label.partition(":")[2])
    elif not HUB_TEXT.fullmatch(label):
        raise ValueError(f"text {label!r} is neither embedded nor a data set's name: a path is taken from --text alone")


def check_option(name: str, value: object) -> None:
    """Raise ValueError unless it is one value, or a list of some, of a size that a command can take."""
    for one in value if isinstance(value, list) else [value]:
        if one is not None and not isinstance(one, (str, bool)) and not is_number(one):
            raise ValueError(f"{name} is {kind_of(one)}, expected text or a number")
        if type(one) is int and abs(one) > (most := LARGE.get(name, LARGEST)):
            raise ValueError(f"{name} is {one}, at most {most} is taken from a record")


def tasks_of(options: Fields) -> list[str]:
    """Names that an --objective of tasks has."""
    objective = options.get("objective")
    if not isinstance(objective, str) or not objective.startswith("task:"):
        return []
    return [task.strip() for task in objective.removeprefix("task:").split(",") if task.strip()]


def check_task(task: str) -> None:
    """Raise ValueError for what may be a path: lm-eval would load it, and code next to it."""
    if not TASK.fullmatch(task) or task.lower().endswith(FILES):
        raise ValueError(f"task {task!r} is no task's name: files of tasks are taken from --tasks-path alone")


def table_of(fields: Fields, name: str) -> Fields:
    """A field that is a table. Raises TypeError for one that is not."""
    value = fields[name]
    if not isinstance(value, Mapping):
        raise TypeError(name)
    return value


def string_of(fields: Fields, name: str) -> str:
    """A field that is text. Raises TypeError for one that is not."""
    value = fields[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value


def list_of(fields: Fields, name: str) -> Sequence[object]:
    """A field that is a list. Raises TypeError for one that is not."""
    value = fields[name]
    if not isinstance(value, (list, tuple)):
        raise TypeError(name)
    return value


def whole_of(fields: Fields, name: str) -> int:
    """A field that is a whole number. Raises ValueError for one that is not."""
    value = fields[name]
    if type(value) is not int:
        raise ValueError(f"{name} is {kind_of(value)}, expected a whole number")
    return value
