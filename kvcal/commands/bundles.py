"""`kvcal inspect`, `kvcal verify` and `kvcal diff`. What opens a model is imported only for --model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.codecs import state_of
from kvcal_artifacts.codecs.origins import origins_of
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import read_bytes, write_atomically

from ..bundles.diff import Differences, diff
from ..bundles.paths import bundle_at
from ..evaluate.errors import HeadErrors, head_errors_fault, measured_head_errors, stored_head_errors
from ..report.records import Table, check_depth
from .idle import refuse_idle, refuse_idle_seed
from .options import InspectOptions, VerifyOptions

if TYPE_CHECKING:
    from .common import Say

INSPECT_WINDOWS, INSPECT_LENGTH = 4, 1024  # enough for two digits: an error is a mean over thousands of tokens


def file_sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()


def run_inspect(o: InspectOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """A bundle's header in short, every hash checked; errors by layer and head, as stored or, with --model, measured.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    path = o.bundle
    if o.plot is not None:
        from ..report.plots import check_plot

        check_plot(o.plot)
    if o.model is None:
        refuse_idle(typed, MEASURES, "a measurement", "give --model, or leave it out")
    refuse_idle_seed(o, typed)
    bundle = bundle_at(path)
    check_depth(bundle)
    errors = head_errors(bundle, o, say)
    if o.plot is not None:
        _draw(bundle, errors, o, o.plot)
    return described(bundle, path, errors) | {"plot": None if o.plot is None else str(o.plot)}


def described(bundle: Bundle, path: Path, errors: dict[str, Any] | None) -> dict[str, Any]:
    """A bundle's header in short. path: of its file. errors: as `head_errors` gives them."""
    scheme = bundle.scheme
    rows = [
        {"layer": i, "key": pair.key.describe(), "value": pair.value.describe()}
        if pair
        else {"layer": i, "key": "skipped", "value": scheme.skipped[i]}
        for i, pair in enumerate(scheme.layers)
    ]
    return {
        "bundle": str(path),
        "sha256": file_sha256(path),
        "bytes": path.stat().st_size,
        "model": asdict(bundle.fingerprint),
        "windows": asdict(scheme.windows),
        "frame": scheme.frame,
        "selection": None if scheme.selection is None else asdict(scheme.selection),
        "bits_per_value": scheme.bits_per_value(),
        "bits_are": "expected" if scheme.ragged else "exact",
        "resident_bytes": scheme.resident_bytes(),
        "provenance": bundle.provenance,
        "metrics": bundle.metrics,
        "layers": rows,
        "packages": origins_of([state_of(codec) for pair in scheme.layers if pair for codec in (pair.key, pair.value)]),
        "head_errors": errors,
    }


def facts_of(inspected: Mapping[str, Any], wide: bool = False) -> dict[str, Any]:
    """Names and values to be shown of what `described` gives. wide: also settings that are empty or off."""
    model, record, metrics = inspected["model"], Table(inspected["provenance"]), Table(inspected["metrics"])
    text, settings = record.table("text"), record.table("settings")
    facts = {
        "bundle": inspected["bundle"],
        "sha256": inspected["sha256"],
        "bytes": inspected["bytes"],
        "made_by": record.display("tool"),
        "method": record.display("method"),
        "settings": settings.fault or _listed(settings, wide),
        "model": f"{model['architecture']}, {model['layers']} layers, {model['kv_heads']} x {model['head_dim']}",
        "weights": model["revision"],  # random:SEED where they are random
        "text": text.fault or text.display("source"),
        "windows": ", ".join(f"{name} {value}" for name, value in inspected["windows"].items()),
        "frame": inspected["frame"],
        "tokens": _selection(inspected["selection"]),
        "bits_per_value": inspected["bits_per_value"],
        "bits_are": "expected: blocks differ in size" if inspected["bits_are"] == "expected" else None,
        "resident_bytes": inspected["resident_bytes"],
        "codecs_of": _packages(inspected["packages"]),
        "held-out": {name: value for name, value in metrics.fields.items() if isinstance(value, float)},
    }
    if inspected["head_errors"] is None and (fault := head_errors_fault(inspected["metrics"])) is not None:
        facts["errors_by_head"] = fault
    return facts


def _selection(selection: dict[str, float] | None) -> str:
    return "every token" if selection is None else f"H2O, keep {selection['keep']:g}, heavy {selection['heavy']:g}"


def _packages(origins: Mapping[str, Mapping[str, str | None]]) -> str | None:
    """Codecs of other packages, as "acme-float8 (kvcal-acme 1)"; None where there are none."""
    each = (f"{name} ({origin['package']} {origin['version'] or 'not installed'})" for name, origin in origins.items())
    return ", ".join(each) or None


def _listed(fields: Any, wide: bool) -> str:
    """name=value, ... of a kvcal.report.records.Table, as options are given. wide: also what is empty or off."""
    shown = {name: value for name, value in fields.items() if wide or value not in ("", [], None, False)}
    return ", ".join(f"{name}={_option(value)}" for name, value in shown.items())


def _option(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


MEASURES = ("revision", "text", "column", "windows", "length", "random_weights", "seed", "dtype", "device")


def head_errors(bundle: Bundle, o: InspectOptions, say: Say) -> dict[str, Any] | None:
    """{"from", "tokens", "key", "value"}, a row per layer; None where the bundle has none and there is no model."""
    if o.model is not None:
        errors, origin = _measured(bundle, o, o.model, say)
        return {"from": f"measured on {origin}", **asdict(errors)}
    stored = stored_head_errors(bundle.metrics)
    return None if stored is None else {"from": "held-out windows of the fit", **asdict(stored), "tokens": None}


def _measured(bundle: Bundle, o: InspectOptions, model: str, say: Say) -> tuple[HeadErrors, str]:
    from ..models import names
    from .common import check_column, check_context, evaluation_text, text_for, tokenizer_for
    from .target_model import check_target_model
    from .workbench import open_model

    source = names.resolve(model, o.revision)
    origin = text_for(o, source, "evaluation")
    check_column(o.column, origin)
    say(f"text: {origin}")
    length = o.length or INSPECT_LENGTH
    check_context(source, length, say)
    options = replace(o, windows=o.windows or INSPECT_WINDOWS)
    text = evaluation_text(options, source, tokenizer_for(o, source, origin), origin, length, say)
    loaded = open_model(model, o.revision, dtype=o.dtype, device=o.device, random_weights=o.random_weights, seed=o.seed)
    check_target_model(bundle, loaded.model, loaded.revision)
    return measured_head_errors(loaded.model, bundle.scheme, text.ids), text.source


def _draw(bundle: Bundle, errors: dict[str, Any] | None, o: InspectOptions, path: Path) -> None:
    """Titled with the bundle, its model and the text; with machine and date where errors were measured now."""
    from ..report.drawn import as_file, machine_and_date
    from ..report.plots import head_errors_figure

    if errors is None:
        fault = head_errors_fault(bundle.metrics)
        what = "no errors by head" if fault is None else f"no errors by head that can be drawn ({fault})"
        raise UsageError(f"--plot: {bundle.name} stores {what}; give --model to measure them")
    origin = Table(bundle.provenance).table("model").display("name")
    title = ", ".join([bundle.name, *([origin] if origin else [])]) + f": {errors['from']}"
    if o.model is not None:
        from ..models.devices import pick_device
        from .common import machine

        title += f"; {machine_and_date(machine(pick_device(o.device)))}"
    picture = head_errors_figure(errors["key"], errors["value"], title)
    write_atomically(path, as_file(picture, path, 120), "--plot")


class BundleDifferences(Differences):
    """What `kvcal diff --json` prints. a, b: the two files."""

    a: str
    b: str


def run_diff(first: Path, second: Path) -> BundleDifferences:
    """What differs between two bundles; every hash of both is checked."""
    differences = diff(bundle_at(first), bundle_at(second), same_bytes=read_bytes(first) == read_bytes(second))
    return {"a": str(first), "b": str(second), **differences}


COMPARES = ("revision", "random_weights", "seed", "device")


class Verified(TypedDict):
    """What `kvcal verify --json` prints. checked: what was, in words."""

    bundle: str
    sha256: str
    ok: bool
    checked: list[str]


def run_verify(o: VerifyOptions, typed: Collection[str] = ()) -> Verified:
    """Format and hashes; with a model also that the bundle is for it.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    path, model = o.bundle, o.model
    if model is None:
        refuse_idle(typed, COMPARES, "a comparison with a model", "give --model, or leave it out")
    refuse_idle_seed(o, typed)
    bundle = bundle_at(path)
    checks = ["format", "header hash", "tensor hashes", "tensors finite", "codecs", "layer chain"]
    if model is not None:
        from .workbench import check_bundle

        check_bundle(bundle, model, o.revision, device=o.device, random_weights=o.random_weights, seed=o.seed)
        checks.append(f"model {model}")
    return {"bundle": str(path), "sha256": file_sha256(path), "ok": True, "checked": checks}
