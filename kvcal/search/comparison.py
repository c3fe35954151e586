"""Many schemes on the same work: which are worth their bits, and which combination is best under a limit."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import read_text, write_atomically
from kvcal_artifacts.scheme import Scheme

from ..calibrate.checkpoint import CommandCheckpoint, short
from ..capture.ranks import ALONE, Ranks

Row = TypeVar("Row", bound=Mapping[str, object])


def figure(row: Mapping[str, object], name: str) -> float:
    """A figure of a row. Raises KVCalError where it is no number: rows come from files, too."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise KVCalError(f"row {row.get('name')}: {name} must be a number, is {value!r:.60}; measure the row again")
    return value


def _stored_bits(row: Mapping[str, object]) -> float | None:
    """Stored bits per value; None where nothing was packed."""
    return None if row["bits_per_value"] is None else figure(row, "bits_per_value")


def front(
    rows: Iterable[Mapping[str, object]],
    quality: str = "kl",
    cost: Literal["bits_per_value", "size"] = "bits_per_value",
) -> set[str]:
    """Names of the rows that no other row beats: none costs less and has no more error, or costs as much and has less.

    cost: stored bits per value, or the size of one sequence, exact tokens at 16 bits and resident bytes included. A row
    that packed nothing is on no front.
    """
    places = [
        (str(row["name"]), _cost(row, cost), figure(row, quality)) for row in rows if _stored_bits(row) is not None
    ]
    return {
        name
        for name, cost_of, error in places
        if not any(
            other_cost <= cost_of and other_error <= error and (other_cost, other_error) != (cost_of, error)
            for _, other_cost, other_error in places
        )
    }


def _cost(row: Mapping[str, object], cost: str) -> float:
    return figure(row, "bytes_at_length_16_bit" if cost == "size" else cost)


def best(rows: Iterable[Row], max_bits: float, quality: str = "kl") -> Row | None:
    """The row of least error at `max_bits` stored bits per value or fewer."""
    fitting = [row for row in rows if within(row, max_bits)]
    return min(fitting, key=lambda row: (figure(row, quality), figure(row, "bits_per_value")), default=None)


def within(row: Mapping[str, object], max_bits: float) -> bool:
    """Whether a row stores at most `max_bits` bits per value; not where it packed nothing."""
    bits = _stored_bits(row)
    return bits is not None and bits <= max_bits


def token_bytes(scheme: Scheme, row: Mapping[str, object], itemsize: int) -> float:
    """Bytes that one token more takes at the row's stored bits per value.

    itemsize: of the model's dtype, in which layers are that the scheme leaves alone.
    """
    bits = _stored_bits(row)
    bits = 8.0 * itemsize if bits is None else bits
    share = 1.0 if scheme.selection is None else scheme.selection.keep
    pairs = [pair for pair in scheme.layers if pair is not None]
    numbers = sum(pair.key.shape.heads * pair.key.shape.dim * 2 for pair in pairs)
    return numbers * bits / 8 * share + numbers / max(1, len(pairs)) * len(scheme.skipped) * itemsize


def bytes_at(row: Mapping[str, object], length: int, *, at_16_bit: bool = False) -> int:
    """Bytes of one sequence of `length` tokens. They follow from what a row measured at the end of its windows (packed
    blocks, exact tokens, statistics, predictors, codebooks) and from what one token more takes.

    at_16_bit: exact tokens and layers at 16 bits per value, whatever the model's dtype is. Raises KVCalError where the
    row, of a file, lacks a figure.
    """
    kind = "_16_bit" if at_16_bit else ""
    more = (length - figure(row, "window_tokens")) * figure(row, f"token_bytes{kind}")
    return max(0, round(figure(row, f"window_end_bytes{kind}") + more))


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """A header and a line a row; None is an empty cell. Figures by position, and what measured a row, are in the JSON
    alone.
    """
    text = io.StringIO()
    columns = [name for name in rows[0] if name not in ("key", "positions", "measured_with")]
    table = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def read_results(path: Path, command: str) -> dict[str, Any]:
    """A result file of that command: `settings` and `rows`, each row a dict with its `key`. Both are empty where there
    is no file yet, or one without a byte.

    Raises KVCalError for any other file: results would overwrite it.
    """
    try:
        text = read_text(path) if path.exists() else ""
        results: dict[str, Any] = json.loads(text) if text else {"command": command, "settings": {}, "rows": []}
        ours = isinstance(results["settings"], dict) and isinstance(results["rows"], list)
        ours = ours and all(isinstance(row["key"], str) for row in results["rows"])
        ours = ours and results.get("command", command) == command  # files of before have no name of a command
    except OSError as error:
        raise KVCalError(f"--output {path}: cannot be read: {error.strerror or error}; give another name") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise KVCalError(
            f"--output {path} is there already and is no result file of `kvcal {command}`; give another name or remove "
            "it",
        )
    return results


@dataclass
class Ledger:
    """Rows measured so far, so that an interrupted comparison goes on: in a file of the user's, which stays; where
    there is none, in `work`, until they are done.

    settings: everything that all rows depend on (model, text, windows, dtype, device). resume: False measures all rows
    anew. ranks: the processes that share the rows; rank 0 alone reads and stores them. Raises KVCalError as
    `read_results`, and UsageError where the file's rows are of other settings: they would be lost.
    """

    command: str
    path: Path | None
    settings: Mapping[str, object]
    work: CommandCheckpoint
    resume: bool = True
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.rows = self.ranks.agree(self._stored() if self.ranks.rank == 0 else {})
        self.resumed = set(self.rows)

    def _stored(self) -> dict[str, dict[str, Any]]:
        if self.path is None:
            return {row["key"]: row for row in self.work.named("row-")}
        before = read_results(self.path, self.command)
        if self.resume and before["rows"]:
            _refuse_others(self.path, before, self.settings)
        return {row["key"]: row for row in before["rows"]} if self.resume else {}

    @property
    def where(self) -> Path:
        return self.work.folder if self.path is None else self.path

    def add(self, key: str, row: Mapping[str, object]) -> None:
        """Add a row and store it. key: what the row's figures depend on besides the settings."""
        self.rows[key] = {**row, "key": key}
        if self.ranks.rank:
            return
        if self.path is None:
            self.work.keep(_file(key), self.rows[key])
            return
        results = {"command": self.command, "settings": self.settings, "rows": list(self.rows.values())}
        write_atomically(self.path, (json.dumps(results, indent=1) + "\n").encode())

    def done(self, keys: Iterable[str]) -> None:
        """These rows are on their way to the reader; those of other runs stay in `work`."""
        self.work.drop(*(f"{_file(key)}.json" for key in keys))


def _refuse_others(path: Path, before: Mapping[str, Any], settings: Mapping[str, object]) -> None:
    """UsageError, with the first setting that differs, where a file's rows are of other settings than these."""
    there = before["settings"]
    for name in dict.fromkeys((*settings, *there)):
        if there.get(name) != settings.get(name):
            raise UsageError(
                f"--output {path}: its {len(before['rows'])} rows are of {name} {there.get(name)!s:.60}, not "
                f"{settings.get(name)!s:.60}; give another name, or --no-resume to measure anew in their place"
            )


def _file(key: str) -> str:
    return f"row-{short(key)}"
