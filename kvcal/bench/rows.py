"""Result rows: what scripts rely on, as JSON, CSV and compared with an earlier file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypedDict

from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import named, read_text


class WindowSettings(TypedDict):
    """The windows of a scheme, in tokens, as rows have them."""

    sink: int
    recent: int
    block: int


class Settings(TypedDict, total=False):
    """The settings of a whole model's cache, as rows have them. dtype: of the model; windows only of a scheme."""

    dtype: str
    sink: int
    recent: int
    block: int


@dataclass(frozen=True)
class Row:
    """One figure. microseconds: the median, None where `refused` says why there is none. stored_bits: bits per value as
    stored, windows excluded. fraction_of_copy: the time in which this device copies as many bytes as the operation must
    move, over the median. ratio_to_fp16: the best FP16 attention of the same run over the median, fp16_backend which
    one it was. projected: computed from a device profile, not measured. path: which code ran. dtype: of the model, or
    of an FP16 peer. sink, recent, block: the scheme's windows, None where there is no scheme. queries: new tokens of a
    call, None where an operation is not of calls. more: what only this operation has.
    """

    operation: str
    scheme: str
    model: str
    batch: int
    length: int
    microseconds: float | None
    stored_bits: float | None
    fraction_of_copy: float | None
    ratio_to_fp16: float | None
    fp16_backend: str | None
    projected: bool
    device: str
    path: str
    bytes: int | None = None
    repeats: int | None = None
    refused: str | None = None
    dtype: str | None = None
    sink: int | None = None
    recent: int | None = None
    block: int | None = None
    queries: int | None = None
    more: Mapping[str, Json] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Json]:
        columns = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "more"}
        return columns | dict(self.more)


KEY = {
    "operation": str,
    "scheme": str,
    "model": str,
    "batch": int,
    "length": int,
    "path": str,
    "device": str,
    "projected": bool,
}
# May be None, and are missing in older files.
SETTINGS = {"dtype": str, "sink": int, "recent": int, "block": int, "queries": int}
BEFORE = {"queries": 1}  # of rows that have it, where a file is older: there was no other
ENVIRONMENT = ("torch", "triton", "torch built for", "processor", "GPU")  # of the machine, next to the version of kvcal
KINDS = {str: "a text", int: "a whole number", bool: "true or false"}
LONGEST_NAME = 60
LONGEST = 1e18  # µs, 31,700 years
GIVE = "give what `kvcal bench --json` printed"


def to_csv(rows: Iterable[Mapping[str, Json]]) -> str:
    """One line a row; columns in the order in which rows bring them."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


@dataclass(frozen=True)
class Earlier:
    """An earlier file. by: the versions, commit and processors that wrote it, as far as it says."""

    rows: list[Mapping[str, Json]]
    by: Mapping[str, Json]


def environment_of(result: Mapping[str, Json]) -> dict[str, Json]:
    """Versions, commit and processors of a result. None: there is none; a name is missing where the result does not
    say.
    """
    machine = result.get("machine")
    environment = machine if isinstance(machine, Mapping) else {}
    version = {name: result[key] for name, key in (("kvcal", "version"), ("commit", "commit")) if key in result}
    return version | {name: environment[name] for name in ENVIRONMENT if name in environment}


def read_earlier(path: Path) -> Earlier:
    """Rows of a file that `kvcal bench --json` wrote; UsageError if it is not one, or a row of it is none of ours."""
    name = f"--compare {named(path)}"
    try:
        content: Json = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON; {GIVE}") from error
    table = content if isinstance(content, dict) else {}
    entries = table.get("rows")
    rows = [row for row in entries if isinstance(row, dict)] if isinstance(entries, list) else []
    if not isinstance(entries, list) or len(rows) < len(entries) or any(not set(KEY) <= set(row) for row in rows):
        raise UsageError(f"{name}: no rows of `kvcal bench --json` in it")
    for number, row in enumerate(rows):
        _check_row(f"{name}: row {number}", row)
    return Earlier([*rows], environment_of(table))


def _check_row(name: str, row: Mapping[str, Json]) -> None:
    """UsageError for a value by which rows are compared that `kvcal bench` never writes."""
    for key, kind in KEY.items():
        if type(row[key]) is not kind:
            raise UsageError(f"{name}: {key} is {_short(row[key])}, must be {KINDS[kind]}; {GIVE}")
    for key, kind in SETTINGS.items():
        if row.get(key) is not None and type(row[key]) is not kind:
            raise UsageError(f"{name}: {key} is {_short(row[key])}, must be {KINDS[kind]}, or null; {GIVE}")
    taken = row.get("microseconds")
    if taken is not None and not ((type(taken) is int or type(taken) is float) and 0 < taken <= LONGEST):
        raise UsageError(
            f"{name}: microseconds is {_short(taken)}, must be a number above 0 and up to {LONGEST:g}, or null; {GIVE}"
        )


def _short(value: Json) -> str:
    """The beginning of the value as JSON."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def compared(now: Iterable[Mapping[str, Json]], earlier: Iterable[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Rows of both, and how many times as fast they are now; None where one of them has no figure. They agree in all of
    KEY, and in all of SETTINGS that the earlier row has.
    """
    out: list[dict[str, Json]] = []
    for row, every in _pairs(now, earlier):
        old = next((old for old in reversed(every) if not _unlike(row, old)), None)
        if old is None:
            continue
        then, this = _microseconds(old), _microseconds(row)
        out.append(
            {
                **{name: row[name] for name in (*KEY, *SETTINGS) if name in row},
                "earlier": then,
                "now": this,
                "times_as_fast": then / this if then and this else None,
            }
        )
    return out


def _microseconds(row: Mapping[str, Json]) -> int | float | None:
    taken = row.get("microseconds")
    return taken if isinstance(taken, (int, float)) else None


def _pairs(
    now: Iterable[Mapping[str, Json]], earlier: Iterable[Mapping[str, Json]]
) -> Iterator[tuple[Mapping[str, Json], list[Mapping[str, Json]]]]:
    """Each row next to those of before that are alike in KEY, if there are any."""
    before: dict[tuple[Json, ...], list[Mapping[str, Json]]] = {}
    for row in earlier:
        before.setdefault(tuple(row[name] for name in KEY), []).append(row)
    for row in now:
        if every := before.get(tuple(row[name] for name in KEY)):
            yield row, every


def _unlike(row: Mapping[str, Json], old: Mapping[str, Json]) -> list[str]:
    """Which SETTINGS differ, of those that both rows have."""
    return [name for name in SETTINGS if _says(name, old) and name in row and row[name] != _then(name, row, old)]


def _says(name: str, old: Mapping[str, Json]) -> bool:
    return name in old or name in BEFORE


def _then(name: str, row: Mapping[str, Json], old: Mapping[str, Json]) -> Json:
    """A setting of an earlier row, next to one of now."""
    return old[name] if name in old else None if row[name] is None else BEFORE[name]


def remarks(now: Sequence[Mapping[str, Json]], by: Mapping[str, Json], earlier: Earlier) -> Iterator[str]:
    """What to know of a comparison, a line each. Rows that differ in a setting are not compared; the earlier file may
    lack settings; versions or devices may differ. by: as made_by says of now.
    """
    pairs = list(_pairs(now, earlier.rows))
    apart = [(row, every) for row, every in pairs if all(_unlike(row, old) for old in every)]
    if apart:
        apart_in = ", ".join(_both(name, *values) for name, values in _settings(apart).items())
        yield f"{len(apart)} rows are not compared, they differ in settings: {apart_in}; give the options of then"
    if len(apart) == len(pairs):
        return
    if missing := [name for name in SETTINGS if any(not _says(name, old) for _, every in pairs for old in every)]:
        names = ", ".join(missing)
        yield f"it does not say {names} of its rows, as older versions did not: compared as if these were alike"
    then = {name: earlier.by.get(name, "not said") for name in by}
    differing = [_both(name, _named(then[name]), _named(by[name])) for name in by if then[name] != by[name]]
    if differing:
        yield f"not made as these rows, times may differ for that: {', '.join(differing)}"


def _settings(pairs: Iterable[tuple[Mapping[str, Json], list[Mapping[str, Json]]]]) -> dict[str, list[str]]:
    """The values before and now of those SETTINGS that differ."""
    values: dict[str, list[tuple[str, str]]] = {}
    for row, every in pairs:
        for old in every:
            for name in _unlike(row, old):
                values.setdefault(name, []).append((_named(_then(name, row, old)), _named(row[name])))
    return {
        name: [" and ".join(dict.fromkeys(one[i] for one in both)) for i in (0, 1)] for name, both in values.items()
    }


def _both(name: str, then: str, now: str) -> str:
    return f"{name} {then} there, {now} here"


def _named(value: Json) -> str:
    return "none" if value is None else " ".join(str(value).split())[:LONGEST_NAME]
