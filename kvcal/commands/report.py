"""`kvcal report`: results and bundles become one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcal_artifacts.bundle import SUFFIX, Bundle
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import write_atomically

from ..bundles.paths import bundle_at
from ..evaluate.errors import HeadErrors, stored_head_errors
from ..report.bundle_section import BundleFigures
from ..report.outputs import check_output
from ..report.page import LENGTHS, Heads, Report, Speed, page
from ..report.records import check_depth
from ..report.result_file import COMPARED, OF_ONE_MODEL, read_result
from ..report.version import __version__
from ..search.comparison import front
from .common import Say
from .options import ReportOptions
from .report_bundles import figures_of, model_name

ONE_TEXT = "give files of one model and text"


def run_report(o: ReportOptions, say: Say) -> dict[str, object]:
    """Write --output from files of `kvcal eval --json`, `kvcal compare --json` or `--output`, `kvcal bench --json`, and
    bundles.
    """
    check_output(o.output)
    if o.output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {o.output}: must end in .html")
    fitted: list[Heads] = []
    bundles: list[Bundle] = []
    shown: list[BundleFigures] = []
    joined = Joined()
    for path in o.inputs:
        if path.name.endswith(SUFFIX):
            bundles.append(bundle := _bundle(path, joined.facts))
            errors = _stored_errors(bundle, say)
            fitted += [] if errors is None else [Heads(f"{bundle.name}, when fitted", errors.key, errors.value)]
            shown.append(figures_of(bundle, path, errors))
        else:
            joined.add(path, read_result(path), say)
    facts, speeds, heads = joined.facts, joined.speeds, [*joined.heads.values(), *fitted]
    ordered = sorted(joined.rows.values(), key=lambda row: (row["name"] != "full", row["bits_per_value"] or 0.0))
    compressed = [row for row in ordered if row["name"] != "full"]
    model = facts.get("model") or next(filter(None, map(model_name, bundles)), None)
    title = "KV-cache compression" if model is None else f"KV-cache compression of {model}"
    report = Report(
        title,
        facts | {"made by": f"kvcal {__version__}"},
        ordered,
        frozenset(front(compressed)),
        heads,
        {row["name"]: points for row in ordered if (points := memory(row, facts)) is not None},
        speeds,
        shown,
    )
    text = page(report)
    write_atomically(o.output, text.encode(), "--output")
    sizes = {"rows": len(ordered), "speeds": len(speeds), "bundles": len(bundles), "bytes": len(text.encode())}
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


def _bundle(path: Path, facts: dict[str, object]) -> Bundle:
    """A bundle. facts: of the files before it, or the model of the first bundle. Raises UsageError where it was made
    for another model.
    """
    bundle = bundle_at(path)
    check_depth(bundle)
    revision, other = bundle.fingerprint.revision, facts.get("revision")
    if revision is not None and isinstance(other, str) and revision != other and _kind(revision) == _kind(other):
        raise UsageError(
            f"{path}: was made for revision {revision:.20}, the files before it are of {other:.20}; {ONE_TEXT}"
        )
    if revision is not None:
        facts.setdefault("revision", revision)
    return bundle


def _stored_errors(bundle: Bundle, say: Say) -> HeadErrors | None:
    """Errors by head that a bundle records; a line where it records none."""
    errors = stored_head_errors(bundle.metrics)
    if errors is None:
        say(f"note: {bundle.name} records no errors by head; `kvcal inspect --model` measures them")
    return errors


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
