"""`kvcal report`: results and bundles become one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import read_text, write_atomically

from ..bundles.paths import bundle_at
from ..evaluate.errors import stored_head_errors
from ..report.outputs import check_output
from ..report.page import LENGTHS, Heads, Report, Speed, page
from ..report.records import KINDS, is_number, kind_of
from ..report.version import __version__
from ..search.comparison import front
from .common import Say
from .options import ReportOptions

OF_ONE_MODEL = ("model", "revision")
COMPARED = (*OF_ONE_MODEL, "text", "windows", "length", "step", "dtype")  # figures of one page have the same
ONE_TEXT = "give files of one model and text"
FACTS = (*COMPARED, "random_weights")
NUMBERS = ("perplexity", "kl_se", "kl_median", "kl_p99", "kl_max", "same_top", "smaller")
PAIRED = ("score", "full", "difference", "n")
LARGEST = 1e100  # of numbers: an axis over larger ones, or over their reciprocals, overflows
INTERVAL = ("low", "high")  # null of one question


def run_report(o: ReportOptions, say: Say) -> dict[str, object]:
    """Write --output from files of `kvcal eval --json`, `kvcal compare --json` or `--output`, `kvcal bench --json`, and
    bundles.
    """
    check_output(o.output)
    if o.output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {o.output}: must end in .html")
    fitted: list[Heads] = []
    joined = Joined()
    for path in o.inputs:
        if path.name.endswith(SUFFIX):
            fitted += _of_bundle(path, joined.facts, say)
        else:
            joined.add(path, read_result(path), say)
    facts, speeds, heads = joined.facts, joined.speeds, [*joined.heads.values(), *fitted]
    ordered = sorted(joined.rows.values(), key=lambda row: (row["name"] != "full", row["bits_per_value"] or 0.0))
    compressed = [row for row in ordered if row["name"] != "full"]
    title = f"KV-cache compression of {facts['model']}" if "model" in facts else "KV-cache compression"
    report = Report(
        title,
        facts | {"made by": f"kvcal {__version__}"},
        ordered,
        frozenset(front(compressed)),
        heads,
        {row["name"]: points for row in ordered if (points := memory(row, facts)) is not None},
        speeds,
    )
    text = page(report)
    write_atomically(o.output, text.encode(), "--output")
    bundles = sum(path.name.endswith(SUFFIX) for path in o.inputs)
    sizes = {"rows": len(ordered), "speeds": len(speeds), "bundles": bundles, "bytes": len(text.encode())}
    return {"output": o.output, **sizes}


class Joined:
    """Results of several files of one model. A row's figures are those of the first file that has it; its tasks and
    needles are of all files.
    """

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.heads: dict[str, Heads] = {}
        self.speeds: list[Speed] = []

    def add(self, path: Path, result: Mapping[str, Any], say: Say) -> None:
        """Add what `read_result` found in a file. Of one measured on other text only tasks are taken, and said to be.

        Raises UsageError where its figures do not compare with those of the files before it.
        """
        self.speeds += result["speeds"]
        facts = result["facts"]
        other = [
            name for name in COMPARED if name in self.facts and facts.get(name, self.facts[name]) != self.facts[name]
        ]
        tasks_only = bool(other) and other[0] not in OF_ONE_MODEL and any(row["tasks"] for row in result["rows"])
        if other and not tasks_only:
            raise UsageError(f"{path}: {self._difference(other[0], facts)}: their figures do not compare; {ONE_TEXT}")
        for row in result["rows"]:
            self._add_row(path, row, new=not tasks_only)
        if tasks_only:
            say(f"note: {path}: {self._difference(other[0], facts)}: only its tasks are shown")
            return
        self.facts |= facts
        self.heads = {one.name: one for one in _of_layers(result["layers"])} | self.heads

    def _difference(self, name: str, facts: Mapping[str, object]) -> str:
        return f"{name} is {facts[name]!r}, of the files before it {self.facts[name]!r}"

    def _add_row(self, path: Path, row: dict[str, Any], *, new: bool) -> None:
        """A row's tasks to the row of its name; the row itself where there is none and `new`."""
        name = row["name"]
        if name not in self.rows:
            if not new and row["tasks"]:
                raise UsageError(f"{path}: has tasks of {name}, of which no file before it has a row; {ONE_TEXT}")
            if new:
                self.rows[name] = row
            return
        before = self.rows[name]
        for what in ("sha256", "bits_per_value"):
            if None not in (row[what], before[what]) and row[what] != before[what]:
                raise UsageError(
                    f"{path}: {name} has {what} {row[what]!s:.20}, in the files before it {before[what]!s:.20}: they "
                    "are two schemes; give one of the files, or name the bundles otherwise"
                )
        for part in ("tasks", "needles"):
            for task, score in row[part].items():
                if before[part].setdefault(task, score) != score:
                    raise UsageError(
                        f"{path}: {name} has another result of {task} than the files before it; give one of them"
                    )


def read_result(path: Path) -> dict[str, Any]:
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


def _result(content: object) -> dict[str, Any]:
    record = _table(content, "it")
    listed = _list(_field(record, "rows", "it"), "its rows")
    settings, layers = _table(record.get("settings", record), "settings"), _table(record.get("layers", {}), "layers")
    if not listed:
        raise ValueError("its list of rows is empty")
    rows: list[dict[str, Any]] = []
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


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be {KINDS[dict]}, is {kind_of(value)}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be {KINDS[list]}, is {kind_of(value)}")
    return value


def _field(row: Mapping[str, Any], name: str, what: str = "it") -> Any:
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


def _speed(row: Mapping[str, Any]) -> Speed:
    """A row of `kvcal bench`. Raises ValueError for one with something else in it."""
    if (projected := _field(row, "projected")) not in (True, False):
        raise ValueError(f"projected: {_seen(projected)} where true or false belongs")
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


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what a page shows. Raises ValueError for one with something else in it."""
    checked: dict[str, Any] = {
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


def _number_or_null(row: Mapping[str, Any], name: str) -> float | None:
    return None if _field(row, name) is None else _number_in(row, name)


def _number_in(row: Mapping[str, Any], name: str) -> float:
    value = _field(row, name)
    if not is_number(value):
        raise ValueError(f"{name:.40}: {_seen(value)} where a number belongs")
    if value and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise ValueError(
            f"{name:.40}: {value!r:.40} is of no size that a chart can show, 0 or from {1 / LARGEST:g} to {LARGEST:g}"
        )
    return float(value) if isinstance(value, float) else int(value)


def _name_in(row: Mapping[str, Any], name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {_seen(value)} where text belongs")
    return value


def _seen(value: object) -> str:
    """A wrong value; of null, true and lists what it is."""
    return f"{value!r:.40}" if isinstance(value, (int, float, str)) and not isinstance(value, bool) else kind_of(value)


def _cell(name: str) -> str:
    """A name needle@LENGTH/DEPTH. Raises ValueError for another."""
    length, _, depth = name.removeprefix("needle@").partition("/")
    with suppress(ValueError):
        if name.startswith("needle@") and length.isdecimal() and 0 <= float(depth) <= 1:
            return name
    raise ValueError(f"needles: {name!r:.40} where needle@LENGTH/DEPTH belongs")


def _of_bundle(path: Path, facts: dict[str, object], say: Say) -> list[Heads]:
    """Errors that a bundle records. facts: of the files before it, or the model of the first bundle. Raises UsageError
    where it was made for another model.
    """
    bundle = bundle_at(path)
    revision, other = bundle.fingerprint.revision, facts.get("revision")
    if revision is not None and isinstance(other, str) and revision != other and _kind(revision) == _kind(other):
        raise UsageError(
            f"{path}: was made for revision {revision:.20}, the files before it are of {other:.20}; {ONE_TEXT}"
        )
    if revision is not None:
        facts.setdefault("revision", revision)
    errors = stored_head_errors(bundle.metrics)
    if errors is None:
        say(f"note: {bundle.name} records no errors by head; `kvcal inspect --model` measures them")
        return []
    return [Heads(f"{bundle.name}, when fitted", errors.key, errors.value)]


def _kind(revision: str) -> str:
    """Whether a revision is a commit or a hash of weights, and of which kind: two kinds do not compare."""
    return revision.rpartition(":")[0]


def _of_layers(layers: Mapping[str, Any]) -> list[Heads]:
    """Errors by head from an evaluation. Raises KVCalError where they are something else."""
    tables = []
    for name, rows in layers.items():
        metrics = {"layers": rows}
        errors = stored_head_errors(metrics)
        if errors is not None:
            tables.append(Heads(name, errors.key, errors.value))
    return tables


def memory(row: Mapping[str, Any], facts: Mapping[str, object]) -> Sequence[tuple[int, float]] | None:
    """Bytes of one sequence at LENGTHS: those measured, and more or fewer tokens at the row's stored bits per value.
    None where the row does not say enough.
    """
    window, bits = facts.get("length"), row["bits_per_value"]
    if not isinstance(window, int) or window < 1 or bits is None or not row["bytes_at_16_bit"]:
        return None
    token = row["bytes_at_16_bit"] / 2 / window * bits / 8
    measured = row["cache_bytes"] + row["window_bytes"] + row["resident_bytes"]
    return [(length, max(measured + (length - window) * token, token)) for length in LENGTHS]
