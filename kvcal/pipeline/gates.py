"""Quality gates: limits, what was measured, which layer is to blame; as lines, JUnit XML and Markdown."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import GateFailed, KVCalError, UsageError
from kvcal_artifacts.files import read_bytes, write_atomically
from kvcal_artifacts.scheme import Scheme
from kvcal_artifacts.shown import message

from ..evaluate.layers import ROLES, check_errors, recorded_rows, worst_layer
from ..report.escape import markdown as escaped
from ..report.outputs import figures_first, raise_unwritten
from ..report.records import mistyped

if TYPE_CHECKING:
    from ..evaluate.canary import Canary

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class Limits:
    """Limits that bundles are checked against. None: no such gate. max_ppl_increase: a share of the full-precision
    perplexity (0.01 is 1 %). max_kl: nats. max_bits: stored bits per value. max_cache_bytes: packed blocks and windows
    at one window's end. max_layer_drift: how many times what the bundle recorded the relative error of a layer, or of a
    kv head where it recorded those, may be.
    """

    max_ppl_increase: float | None = None
    max_kl: float | None = None
    max_bits: float | None = None
    max_cache_bytes: float | None = None
    max_layer_drift: float | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of(cls, options: Mapping[str, object], prefix: str = "--") -> Limits:
        """Read limits from options or a recipe's table; numbers, or text as "1%". prefix: how messages name an
        option.
        """
        limits: dict[str, float | None] = {}
        for name in cls.names():
            value = options.get(name)
            label = f"--{name.replace('_', '-')}" if prefix == "--" else f"{prefix}{name}"
            limits[name] = None if value is None or value is False else _number(label, value)
        return cls(**limits)

    def __bool__(self) -> bool:
        return any(value is not None for value in asdict(self).values())


def _number(label: str, value: object) -> float:
    text = str(value).strip()
    percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf or (percent and not label.endswith("increase")):
        allowed = "a share, as 1% or 0.01" if label.endswith("increase") else "a number of at least 0"
        raise UsageError(f"{label} {value}: needs {allowed}")
    return number


@dataclass(frozen=True)
class Check:
    """One gate of one bundle. figure: what was measured, None where nothing was. detail: the layer to blame and its
    figure, or what the canary saw.
    """

    name: str
    gate: str
    passed: bool
    figure: float | None = field(default=None, metadata={"key": "seen"})  # as JSON and lock files call it
    limit: float | None = None
    layer: int | None = None
    detail: str = ""

    @classmethod
    def of(cls, record: object) -> Check:
        """Read a check from what `as_dict` made of one. Raises ValueError where it is something else."""
        number, whole = (int, float, type(None)), (int, type(None))
        kinds: dict[str, type | tuple[type, ...]] = {
            "name": str,
            "gate": str,
            "passed": bool,
            "seen": number,
            "limit": number,
            "layer": whole,
            "detail": str,
        }
        if not isinstance(record, dict) or set(record) != set(kinds):
            raise ValueError("a check with other fields")
        if wrong := [name for name, kind in kinds.items() if not isinstance(record[name], kind)]:
            raise ValueError(f"a check whose {wrong[0]} is {record[wrong[0]]!r}")
        figures = {name: value for name, value in record.items() if name != "seen"}
        return cls(**figures, figure=record["seen"])

    def as_dict(self) -> dict[str, str | bool | int | float | None]:
        """The check as JSON has it."""
        return {field.metadata.get("key", field.name): getattr(self, field.name) for field in fields(self)}

    @property
    def line(self) -> str:
        verdict = "" if self.limit is None else f" {_shown(self.figure)}, at most {_shown(self.limit)}"
        return f"{self.name}: {self.gate}{verdict}" + (f" ({self.detail})" if self.detail else "")


def _shown(value: float | None) -> str:
    if value is None:
        return "nothing packed"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def check_recorded(limits: Limits, name: str, bundle: Bundle | None) -> None:
    """Raise UsageError before anything is measured if a layer's error has nothing to be compared with."""
    if limits.max_layer_drift is None:
        return
    rows = bundle.metrics.get("layers", []) if bundle is not None else []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(
            f"{name}: gate max-layer-drift: layers of its metrics are {mistyped(rows, list)} of tables; build it again"
        )
    unknown = [role for role in ROLES if not any(f"{role}_relative_error" in row for row in rows)]
    if bundle is None or unknown:
        of = "layers" if len(unknown) != 1 else f"layers' {unknown[0]}s"
        raise UsageError(
            f"{name}: gate max-layer-drift: it records no relative error of its {of} to compare with; leave this gate "
            "out",
        )
    pairs = {index: pair.key.shape.heads for index, pair in enumerate(bundle.scheme.layers) if pair is not None}
    try:
        check_errors(rows, pairs)
    except ValueError as error:
        raise UsageError(
            f"{name}: gate max-layer-drift: {error} in its metrics: there is nothing to compare with; build it again"
        ) from error


def _figure(row: Mapping[str, object], name: str) -> float:
    figure = _figure_or_none(row, name)
    assert figure is not None
    return figure


def _figure_or_none(row: Mapping[str, object], name: str) -> float | None:
    figure = row[name]
    assert figure is None or isinstance(figure, (int, float))
    return figure


def check_row(
    row: Mapping[str, object],
    full: Mapping[str, object],
    limits: Limits,
    layers: Sequence[Mapping[str, object]],
    alive: Canary,
    bundle: Bundle | None,
    scheme: Scheme,
) -> list[Check]:
    """The canary, then every gate that has a limit. row, full: of an evaluation; layers: LayerErrors.rows()."""
    name, blame = str(row["name"]), worst_layer(layers, None if bundle is None else recorded_rows(bundle.metrics))
    checks = [Check(name, "canary", alive.alive, layer=alive.layer, detail=str(alive))]
    figures: dict[str, float | None] = {
        "max_ppl_increase": _figure(row, "perplexity") / _figure(full, "perplexity") - 1,
        "max_kl": _figure_or_none(row, "kl"),
        "max_bits": _figure_or_none(row, "bits_per_value"),  # None where nothing was packed
        "max_cache_bytes": _figure(row, "cache_bytes") + _figure(row, "window_bytes"),
        "max_layer_drift": None if blame is None else blame.drift,
    }
    for gate, limit in asdict(limits).items():
        if limit is None:
            continue
        value = figures[gate]
        layer, detail = None if blame is None else blame.layer, "" if blame is None else str(blame)
        if gate in ("max_bits", "max_cache_bytes"):
            layer, detail = _largest(scheme)
        checks.append(Check(name, gate.replace("_", "-"), _holds(value, limit), value, limit, layer, detail))
    return checks


def broken_off(name: str, layer: int | None, why: str) -> Check:
    """A check instead of all gates of a bundle that could not be measured, as its numbers overflow."""
    return Check(name, "evaluation", False, layer=layer, detail=why)


def _holds(figure: float | None, limit: float) -> bool:
    return figure is not None and figure <= limit


def recalled(name: str, limits: Limits, records: Iterable[object]) -> list[Check] | None:
    """Checks of an earlier run, judged anew by their figures; None where they are not those of these limits. A canary
    has no figure, so that only one that sang is believed, and no other is kept (see `worth_keeping`).
    """
    checks = [Check.of(record) for record in records]
    limit_of = {gate.replace("_", "-"): limit for gate, limit in asdict(limits).items() if limit is not None}
    if [check.gate for check in checks] != ["canary", *limit_of] or any(check.name != name for check in checks):
        return None
    first, *rest = checks
    judged = [replace(c, limit=limit_of[c.gate], passed=_holds(c.figure, limit_of[c.gate])) for c in rest]
    return [first, *judged] if first.passed else None


def worth_keeping(checks: Iterable[Check]) -> bool:
    """Whether figures alone decide: a failed canary, or an evaluation that broke off, is looked at again every time."""
    return all(check.passed or check.limit is not None for check in checks)


def _largest(scheme: Scheme) -> tuple[int, str]:
    bits = {index: pair.bits_per_value() for index, pair in enumerate(scheme.layers) if pair is not None}
    layer = max(bits, key=lambda index: bits[index])
    return layer, f"layer {layer} stores the most: {bits[layer]:.4g} bits/value"


def failed(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if not check.passed]


def raise_if_failed(checks: Sequence[Check], unwritten: Sequence[KVCalError] = ()) -> None:
    """GateFailed with the first failure's line, how many more there are, and the files that could not be written
    (`unwritten`). Where no gate failed, KVCalError for these.
    """
    bad = failed(checks)
    if bad:  # what the gates say matters more
        rest = f"; and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise GateFailed("; and ".join([f"gate failed: {bad[0].line}{rest}", *map(str, unwritten)]))
    raise_unwritten(unwritten)


def report(checks: Sequence[Check], junit: Path | None, summary: Path | None) -> list[KVCalError]:
    """JUnit XML and Markdown, where asked for, of no gates too; where there are some the Markdown also behind what
    $GITHUB_STEP_SUMMARY names holds already. The errors of those that could not be written.
    """
    unwritten: list[KVCalError] = []
    text = markdown(checks)
    if junit is not None:
        with figures_first(unwritten):
            write_atomically(junit, junit_xml(checks), "--junit")
    if summary is not None:
        with figures_first(unwritten):
            write_atomically(summary, text.encode(), "--summary")
    if checks and (step := os.environ.get(SUMMARY_VARIABLE)):
        try:
            _append(Path(step), text + "\n")
        except OSError as error:
            unwritten.append(KVCalError(f"${SUMMARY_VARIABLE} {step}: cannot be written ({error.strerror})"))
    return unwritten


def _append(path: Path, text: str) -> None:
    """Append text on a new line, whatever stands before it."""
    content = read_bytes(path) if path.exists() else b""
    with path.open("ab") as file:
        file.write((b"" if content.endswith(b"\n") or not content else b"\n") + text.encode())


NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


def _xml(text: str) -> str:
    return NO_XML.sub("\N{REPLACEMENT CHARACTER}", message(text))


def _cell(text: str) -> str:
    """A cell of a Markdown table."""
    return escaped(_xml(" ".join(text.split())))


def junit_xml(checks: Sequence[Check]) -> bytes:
    """A test suite a bundle, a test case a gate; no times, so that the same result is the same file."""
    names = list(dict.fromkeys(check.name for check in checks))
    counts = {"tests": str(len(checks)), "failures": str(len(failed(checks))), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": "kvcal gates", **counts})
    for name in names:
        of_bundle = [check for check in checks if check.name == name]
        numbers = {"tests": str(len(of_bundle)), "failures": str(len(failed(of_bundle))), "errors": "0", "skipped": "0"}
        suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(name), **numbers})
        for check in of_bundle:
            case = ElementTree.SubElement(suite, "testcase", {"classname": _xml(name), "name": _xml(check.gate)})
            if not check.passed:
                failure = ElementTree.SubElement(case, "failure", {"type": "GateFailed", "message": _xml(check.line)})
                failure.text = _xml(check.detail)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def markdown(checks: Sequence[Check]) -> str:
    if not checks:
        return "### kvcal: there are no gates\n"
    bad = len(failed(checks))
    head = f"### kvcal: {bad} of {len(checks)} gates failed" if bad else f"### kvcal: all {len(checks)} gates passed"
    lines = [head, "", "| bundle | gate | seen | limit | | |", "|---|---|---|---|---|---|"]
    for check in checks:
        limit = "" if check.limit is None else _shown(check.limit)
        figure = "" if check.limit is None else _shown(check.figure)
        verdict = "passed" if check.passed else "**failed**"
        lines.append(
            f"| {_cell(check.name)} | {_cell(check.gate)} | {figure} | {limit} | {verdict} | {_cell(check.detail)} |"
        )
    return "\n".join(lines) + "\n"
