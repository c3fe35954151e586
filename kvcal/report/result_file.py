"""Reading a file of results for `kvcal report`: anybody may have written it, so that everything in it is checked.

What is wrong is said in plain words, with the row that it is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import read_text

from .page import Speed
from .records import KINDS, is_number, kind_of

OF_ONE_MODEL = ("model", "revision")
COMPARED = (*OF_ONE_MODEL, "text", "windows", "length", "step", "dtype")  # figures of one page have the same
FACTS = (*COMPARED, "random_weights")
NUMBERS = ("perplexity", "kl_se", "kl_median", "kl_p99", "kl_max", "same_top", "smaller")
PAIRED = ("score", "full", "difference", "n")
LARGEST = 1e100  # of numbers: an axis over larger ones, or over their reciprocals, overflows
INTERVAL = ("low", "high")  # null of one question

Fields = dict[str, Any]  # a table of JSON, by name


def read_result(path: Path) -> Fields:
    """rows, layers, speeds and facts of a result file. Raises UsageError where it cannot be read, KVCalError for a file
    of something else, with what it is not.
    """
    try:
        return _result(_parsed(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}; give a result or a bundle") from error
    except (ValueError, RecursionError) as error:
        why = "it has too many lists and tables within each other" if isinstance(error, RecursionError) else error
        raise KVCalError(
            f"{path}: is no result of `kvcal eval --json`, `kvcal compare` or `kvcal bench --json` ({why}); give such "
            f"a file, or a bundle (*{SUFFIX})"
        ) from error


def _parsed(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON, as of line {error.lineno}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is no text") from error


def _result(content: object) -> Fields:
    record = _table(content, "it")
    listed = _list(_field(record, "rows", "it"), "its rows")
    settings, layers = _table(record.get("settings", record), "settings"), _table(record.get("layers", {}), "layers")
    if not listed:
        raise ValueError("its list of rows is empty")
    rows: list[Fields] = []
    speeds: list[Speed] = []
    for place, one in enumerate(listed, 1):
        row = _table(one, f"row {place}")
        with _within(f"row {place}"):
            if "operation" not in row:
                rows.append(_row(row))
            elif _field(row, "microseconds") is not None:
                speeds.append(_speed(row))
    stated = FACTS if rows else ()  # speeds are of any model
    facts = {name: settings[name] for name in stated if isinstance(settings.get(name), (str, int, bool))}
    return {"rows": rows, "layers": layers, "facts": facts, "speeds": speeds}


def _table(value: object, what: str) -> Fields:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be {KINDS[dict]}, is {kind_of(value)}")
    return value


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be {KINDS[list]}, is {kind_of(value)}")
    return value


def _field(row: Fields, name: str, what: str = "it") -> Any:
    if name not in row:
        raise ValueError(f"{what} has no {name}")
    return row[name]


@contextmanager
def _within(what: str) -> Iterator[None]:
    """Name the place of what is wrong within the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _speed(row: Fields) -> Speed:
    """A row of `kvcal bench`. Raises ValueError for one with something else in it."""
    if (projected := _field(row, "projected")) not in (True, False):
        raise ValueError(f"projected: {_shown(projected)} where true or false belongs")
    return Speed(
        operation=_name_in(row, "operation"),
        scheme=_name_in(row, "scheme"),
        model=_name_in(row, "model"),
        device=_name_in(row, "device"),
        batch=int(_number_in(row, "batch")),
        length=int(_number_in(row, "length")),
        microseconds=_number_in(row, "microseconds"),
        share=_number_or_null(row, "fraction_of_copy"),
        faster=_number_or_null(row, "ratio_to_fp16"),
        projected=bool(projected),
    )


def _row(row: Fields) -> Fields:
    """A row with what a page shows. Raises ValueError for one with something else in it."""
    checked: Fields = {
        "name": _name_in(row, "name"),
        "kl": _number_in(row, "kl"),
        "bits_per_value": _number_or_null(row, "bits_per_value"),
    }
    for name in NUMBERS:
        checked[name] = None if row.get(name) is None else _number_in(row, name)
    checked["sha256"] = None if row.get("sha256") is None else _name_in(row, "sha256")
    for name in ("cache_bytes", "window_bytes", "resident_bytes", "bytes_at_16_bit"):
        checked[name] = _number_in(row, name) if name in row else 0
    with _within("positions"):
        checked["positions"] = [
            {"kl_se": _number_or_null(bucket, "kl_se")}
            | {name: _number_in(bucket, name) for name in ("first", "last", "kl")}
            for one in _list(row.get("positions", []), "it")
            for bucket in [_table(one, "each")]
        ]
    tasks, cells = _table(row.get("tasks", {}), "tasks"), _table(row.get("needles", {}), "needles")
    checked["tasks"] = {name: _paired(name, one) for name, one in tasks.items()}
    checked["needles"] = {_cell(name): _number_in(cells, name) for name in cells}
    return checked


def _paired(task: str, value: object) -> dict[str, float | None]:
    with _within(f"task {task!s:.40}"):
        one = _table(value, "it")
        ends = {part: _number_or_null(one, part) for part in INTERVAL}
        if None in ends.values() and ends["low"] is not ends["high"]:
            raise ValueError("an interval with one end")
        packed = None if one.get("packed") is None else _number_in(one, "packed")
        return {part: _number_in(one, part) for part in PAIRED} | ends | {"packed": packed}


def _number_or_null(row: Fields, name: str) -> float | None:
    return None if _field(row, name) is None else _number_in(row, name)


def _number_in(row: Fields, name: str) -> float:
    value = _field(row, name)
    if not is_number(value):
        raise ValueError(f"{name:.40}: {_shown(value)} where a number belongs")
    if value and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise ValueError(
            f"{name:.40}: {value!r:.40} is of no size that a chart can show, 0 or from {1 / LARGEST:g} to {LARGEST:g}"
        )
    return float(value) if isinstance(value, float) else int(value)


def _name_in(row: Fields, name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {_shown(value)} where text belongs")
    return value


def _shown(value: object) -> str:
    """A wrong value; of null, true and lists what it is."""
    return f"{value!r:.40}" if isinstance(value, (int, float, str)) and not isinstance(value, bool) else kind_of(value)


def _cell(name: str) -> str:
    """A name needle@LENGTH/DEPTH. Raises ValueError for another."""
    length, _, depth = name.removeprefix("needle@").partition("/")
    with suppress(ValueError):
        if name.startswith("needle@") and length.isdecimal() and 0 <= float(depth) <= 1:
            return name
    raise ValueError(f"needles: {name!r:.40} where needle@LENGTH/DEPTH belongs")
