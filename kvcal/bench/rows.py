"""Result rows: what scripts rely on, as JSON, CSV and compared with an earlier file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvcal_artifacts.bundle import named
from kvcal_artifacts.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One figure. microseconds: the median, None where `refused` says why there is none. stored_bits: bits a value as stored,
    windows excluded. fraction_of_copy: the time in which this device copies as many bytes as the operation must move, over the
    median. ratio_to_fp16: the best FP16 attention of the same run over the median, fp16_backend which one it was.
    projected: computed from a device profile, not measured. path: which code ran. more: what only this operation has.
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
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "more"}
        return own | dict(self.more)


KEY = {
    "operation": str, "scheme": str, "model": str, "batch": int, "length": int, "path": str, "device": str,
    "projected": bool,
}  # fmt: skip
KINDS = {str: "a text", int: "a whole number", bool: "true or false"}
LONGEST = 1e18  # µs, 31,700 years
GIVE = "give what `kvcal bench --json` printed"


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line a row; columns in the order in which rows bring them."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    made = io.StringIO()
    writer = csv.DictWriter(made, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue()


def read_earlier(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that `kvcal bench --json` wrote; UsageError if it is not one, or a row of it is none of ours."""
    name = f"--compare {named(path)}"
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON; {GIVE}") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    good = isinstance(rows, list) and all(isinstance(row, dict) and set(KEY) <= set(row) for row in rows)
    if not good:
        raise UsageError(f"{name}: no rows of `kvcal bench --json` in it")
    for number, row in enumerate(rows or ()):
        _check_row(f"{name}: row {number}", row)
    return list(rows or ())


def _check_row(name: str, row: Mapping[str, Any]) -> None:
    """UsageError for a value by which rows are compared that `kvcal bench` never writes."""
    for key, kind in KEY.items():
        if type(row[key]) is not kind:
            raise UsageError(f"{name}: {key} is {_short(row[key])}, must be {KINDS[kind]}; {GIVE}")
    taken = row.get("microseconds")
    if taken is not None and (type(taken) not in (int, float) or not 0 <= taken <= LONGEST):
        raise UsageError(
            f"{name}: microseconds is {_short(taken)}, must be a number from 0 to {LONGEST:g}, or null; {GIVE}"
        )


def _short(value: Any) -> str:
    """As JSON, its beginning."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def compared(now: Iterable[Mapping[str, Any]], earlier: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both, and how many times as fast they are now; None where one of them has no figure."""
    before = {tuple(row[name] for name in KEY): row for row in earlier}
    out = []
    for row in now:
        old = before.get(tuple(row[name] for name in KEY))
        if old is None:
            continue
        then, this = old.get("microseconds"), row["microseconds"]
        out.append(
            {name: row[name] for name in KEY}
            | {"earlier": then, "now": this, "times_as_fast": then / this if then and this else None}
        )
    return out
