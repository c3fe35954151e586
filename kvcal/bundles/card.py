"""A bundle's model card: what it is, how good, and the commands that make it again. The same input gives the same
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from kvcal_artifacts.bundle import SUFFIX, Bundle
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.shown import message, shown

from ..evaluate.errors import HeadErrors, stored_head_errors
from ..methods.data_free import PRESETS
from ..models.names import HUB_ID
from ..pipeline.spec import DefaultsOf
from ..report.escape import Markdown, block, code, link, markdown, python, shell
from ..report.front import front_png
from ..report.plots import head_errors_png
from ..report.records import Table, check_depth, is_number, kind_of
from .provenance import Recorded, recorded

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

LICENCES = {"tiny": "apache-2.0"}  # of models that come with kvcal; others name theirs on their pages
METHODS = {
    "aqua-kv": "AQUA-KV: each layer's keys and values predicted from the layer below, the residual quantised",
    "vqkv": "VQKV: residual codebooks for keys and values",
    "mixkvq": "MixKVQ: key channels in tiers of 16, 4 and 2 bits, by what queries look at",
    "squat": "SQuat: keys rounded where queries do not look",
    "innerq": "InnerQ: a factor a key channel, groups along the inner dimension",
    "kvtuner": "bits per layer for the least attention error (KVTuner-like)",
    "combine": "the keys of one bundle and the values of another",
    "composed": "codecs that need no data, chosen one by one",
}


@dataclass(frozen=True)
class Card:
    """A bundle's card, as files. text: README.md with its front matter. plots: file name -> PNG."""

    text: str
    plots: dict[str, bytes] = field(default_factory=dict)


def make_card(
    bundle: Bundle,
    sha256: str,
    *,
    repo: str | None = None,
    evaluation: Mapping[str, object] | None = None,
    licence: str | None = None,
    defaults_of: DefaultsOf = lambda command: {},
    check: Callable[[Recorded], None] = lambda was: None,
) -> Card:
    """A bundle's card for the hub. sha256: of the bundle's file. evaluation: what `kvcal eval --json` printed.
    defaults_of: a command's options at their defaults. check: raises KVCalError for a recorded command that must not be
    printed. What bundle and evaluation hold is escaped for where it stands.
    """
    check_depth(bundle)
    broken = None if evaluation is None else _broken(bundle, evaluation)
    row = None if evaluation is None or broken else _figures_of(bundle, sha256, evaluation)
    plots = _plots(bundle)
    parts = [
        f"# {markdown(bundle.name)}",
        _intro(bundle),
        _use(bundle, repo),
        _facts(bundle, sha256),
        *([] if evaluation is None else [broken or _evaluation(bundle, evaluation)]),
        _held_out(bundle, plots),
        _again(bundle, defaults_of, check),
    ]
    front = _front(bundle, None if broken else evaluation, row, licence)
    return Card("---\n" + front + "\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n", plots)


SHA256 = re.compile("[0-9a-f]{64}")
TYPED = re.compile(r"[\w.+@:/ -]+")  # names that a model may have; any other stands as MODEL in commands
EVALUATION_SETTINGS = ("windows", "length", "step", "dtype", "text")  # what an evaluation says of itself
FIGURES = ("perplexity", "kl", "bits_per_value", "cache_bytes")


def _broken(bundle: Bundle, evaluation: Mapping[str, object]) -> str | None:
    """What is said of a bundle whose evaluation broke off, which `kvcal eval` counts as a failed gate; None for
    others.
    """
    gates = evaluation.get("gates")
    for check in gates if isinstance(gates, list) else []:
        if isinstance(check, dict) and (check.get("name"), check.get("gate")) == (bundle.name, "evaluation"):
            why = message(" ".join(str(check.get("detail")).split()))
            return f"## Quality\n\nThe evaluation broke off: {markdown(why)}."
    return None


def _figures_of(bundle: Bundle, sha256: str, evaluation: Mapping[str, object]) -> Mapping[str, object]:
    """The bundle's figures. Raises UsageError where the file holds none, or those of another file of this name."""
    rows = _rows(evaluation)
    missing = [name for name in EVALUATION_SETTINGS if name not in evaluation]
    missing += [f"{name} of {row['name']}" for row in rows for name in FIGURES if name not in row]
    names = [str(row["name"]) for row in rows]
    if bundle.name not in names:
        raise UsageError(f"--eval: its rows are {', '.join(names) or 'none'}; none is {bundle.name}")
    if missing:
        raise UsageError(f"--eval: not what `kvcal eval --json` prints (no {missing[0]})")
    _check_types(evaluation, rows)
    evaluated = rows[names.index(bundle.name)]
    if evaluated.get("sha256") != sha256:
        shown = f"sha256 {str(evaluated['sha256'])[:16]}…" if "sha256" in evaluated else "no sha256 (an older kvcal's)"
        raise UsageError(
            f"--eval: its {bundle.name} has {shown}, this file {sha256[:16]}…: figures of another file; run `kvcal "
            "eval` again",
        )
    return evaluated


def _rows(evaluation: Mapping[str, object]) -> list[dict[str, object]]:
    """The rows of an evaluation, each with a name. Raises UsageError where there are none."""
    entries = evaluation.get("rows")
    rows = [row for row in entries if isinstance(row, dict) and "name" in row] if isinstance(entries, list) else None
    if rows is None or not isinstance(entries, list) or len(rows) < len(entries):
        raise UsageError("--eval: not what `kvcal eval --json` prints (no rows with names)")
    return rows


EVALUATED: dict[str, type] = {"windows": int, "length": int, "step": int, "dtype": str, "text": str}


def _check_types(evaluation: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> None:
    """UsageError for a value of another type than `kvcal eval --json` prints."""
    for name, kind in EVALUATED.items():
        if type(evaluation[name]) is not kind:
            raise UsageError(f"--eval: {name} is {kind_of(evaluation[name])}, not what `kvcal eval --json` prints")
    for row in rows:
        for name in FIGURES:
            if type(row[name]) not in (int, float, type(None)):
                raise UsageError(
                    f"--eval: {name} of {row['name']} is {kind_of(row[name])}, not what `kvcal eval --json` prints"
                )


def _front(
    bundle: Bundle, evaluation: Mapping[str, object] | None, row: Mapping[str, object] | None, licence: str | None
) -> str:
    from huggingface_hub import ModelCardData

    record = Table(bundle.provenance)
    method, base = _method(bundle), _base_model(bundle)
    data = ModelCardData(
        library_name="kvcal",
        base_model=base,
        base_model_relation="quantized" if base else None,
        license=shown(licence) if licence else LICENCES.get(str(record.table("model").value("name", str))),
        datasets=_datasets(bundle) or None,
        metrics=["perplexity", "kl_divergence"]
        if row
        else ["relative_squared_error"]
        if stored_head_errors(bundle.metrics)
        else None,
        pipeline_tag="text-generation",
        tags=sorted({"kv-cache", "kv-cache-compression", "quantization", "kvcal", shown(method)}),
        **(_results(bundle, evaluation, row) if evaluation is not None and row is not None else {}),
    )
    return str(data.to_yaml())


class Results(TypedDict, total=False):
    """Fields of a ModelCardData that state figures."""

    model_name: str
    eval_results: list[EvalResult]


def _results(bundle: Bundle, evaluation: Mapping[str, object], row: Mapping[str, object]) -> Results:
    from huggingface_hub import EvalResult

    text = shown(evaluation.get("text", "text"))
    figures = {"perplexity": row["perplexity"], "kl_divergence": row["kl"], "bits_per_value": row["bits_per_value"]}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=_id(text.split(":")[0]) or "text",  # of a local file the name of its loader in `datasets`
            dataset_name=text,
            metric_type=kind,
            metric_value=value,
            metric_name=kind,
        )
        for kind, value in figures.items()
        if is_number(value)
    ]
    return {"model_name": shown(bundle.name), "eval_results": results}


def _id(label: object) -> str | None:
    """The hub refuses a card (HTTP 400) whose base_model or datasets are no ids; what is local stands in the text
    only.
    """
    return label if isinstance(label, str) and HUB_ID.fullmatch(label) else None


def _base_model(bundle: Bundle) -> str | None:
    """The base model, of a folded model the one before folding; none for random weights."""
    record = Table(bundle.provenance)
    if record.table("model").fields.get("random_weights"):
        return None
    places = record.table("model"), record.table("folded_from").table("model")
    return next((hub_id for place in places if (hub_id := _id(place.value("hub_id", str))) is not None), None)


def _datasets(bundle: Bundle) -> list[str]:
    """Ids of data sets on the hub."""
    record = Table(bundle.provenance)
    texts = [record.table(name) for name in ("text", "other_text")]
    texts += [record.table(part).table("provenance").table("text") for part in ("keys", "values")]
    hub_ids = [_id((text.value("source", str) or "").split(":")[0]) for text in texts]
    return list(dict.fromkeys(one for one in hub_ids if one is not None))


def _method(bundle: Bundle) -> str:
    """The method as recorded; where it is no text, what it was recorded as."""
    return str(Table(bundle.provenance).display("method") or "scheme")


def _model_name(bundle: Bundle, otherwise: str) -> str:
    """The hub id, else the name."""
    model = Table(bundle.provenance).table("model")
    return model.fault or model.display("hub_id") or model.display("name") or otherwise


def _typed_model(bundle: Bundle) -> str:
    """What --model takes."""
    name = _model_name(bundle, "MODEL")
    return name if TYPED.fullmatch(name) and Table(bundle.provenance).table("model").fault is None else "MODEL"


def _intro(bundle: Bundle) -> str:
    name = markdown(_model_name(bundle, "its model"))
    return (
        f"Constants for storing the key-value cache of **{name}** at {bundle.scheme.bits_per_value():.3f} bits a "
        "value, "
        f"for kvcal. Method: {_described(bundle)}. It holds no weights and no text."
    )


def _described(bundle: Bundle) -> str:
    """The recorded method in words; unknown where none is recorded, or one that this version does not know."""
    method = Table(bundle.provenance).display("method")
    if method in METHODS:
        return METHODS[method]
    if method in PRESETS:
        return f"the preset {markdown(method)}, which needs no data"
    if method is None:
        return "unknown (none is recorded)"
    return f"unknown (recorded is {markdown(method)}, which this version of kvcal does not know)"


def _use(bundle: Bundle, repo: str | None) -> str:
    file = f"{bundle.name}{SUFFIX}"
    fetch = [] if repo is None else [shell(["kvcal", "pull", repo])]
    verify = ["kvcal", "verify", file, "--model", _typed_model(bundle), *_random_weights(bundle)]
    lines = (
        "from kvcal_artifacts import load_bundle, load_cache",
        "",
        f"bundle = load_bundle({python(file)})  # checks every hash",
        "with load_cache(bundle, model) as cache:  # refuses another model",
        "    model.generate(**inputs, past_key_values=cache)",
    )
    return f"## Use\n\n{block('bash', [*fetch, shell(verify)])}\n\n{block('python', lines)}"


def _random_weights(bundle: Bundle) -> list[str]:
    """Options that name the weights of a bundle that was fitted on random ones."""
    model = Table(bundle.provenance).table("model")
    if not model.fields.get("random_weights"):
        return []
    return ["--random-weights", "--seed", str(model.display("revision")).removeprefix("random:")]


def _facts(bundle: Bundle, sha256: str) -> str:
    record, scheme, model = Table(bundle.provenance), bundle.scheme, bundle.fingerprint
    text, settings, versions = (record.table(name) for name in ("text", "settings", "versions"))
    train = counted(text.display("train_windows", int), "window")
    counts = f"{train} of {text.display('length', int)} tokens, {text.display('holdout_windows', int)} held out"
    windows = scheme.windows
    rows = {
        "method": record.display("method"),
        "settings": settings.fault or ", ".join(f"{name} {value}" for name, value in settings.fields.items()),
        "bits/value": f"{scheme.bits_per_value():.4f}"
        + (" (expected: blocks differ in size)" if scheme.ragged else ""),
        "windows": f"sink {windows.sink}, recent {windows.recent}, block {windows.block}; keys {scheme.frame}",
        "token selection": None if scheme.selection is None else f"H2O, keep {scheme.selection.keep:g}",
        "resident bytes": f"{scheme.resident_bytes():,}",
        "made for": f"{model.architecture}, {model.layers} layers, {model.kv_heads} × {model.head_dim}, "
        f"{model.revision}",
        "calibrated on": text.fault or (f"{text.display('source')}: {counts}" if text else None),
        "text sha256": text.display("sha256"),
        "other text": record.table("other_text").fault or record.table("other_text").display("source"),
        "layers left alone": "; ".join(f"{i}: {why}" for i, why in scheme.skipped.items()) or None,
        "made by": ", ".join([str(record.display("tool")), *(f"{k} {v}" for k, v in versions.fields.items())]),
        "sha256": sha256,
    }
    cells = [[name, code(value) if SHA256.fullmatch(str(value)) else value] for name, value in rows.items() if value]
    return "## What it is\n\n" + table(["", ""], cells)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else markdown(" ".join(str(value).split()) if not isinstance(value, Markdown) else value)


def _evaluation(bundle: Bundle, evaluation: Mapping[str, object]) -> str:
    def cells(row: Mapping[str, object]) -> list[object]:
        formats = dict(zip(FIGURES, (".4f", ".5f", ".3f", ","), strict=True))
        return [row["name"], *(_figure(row[name], style) for name, style in formats.items())]

    setup = (
        f"{counted(evaluation['windows'], 'window')} of {evaluation['length']} tokens of "
        f"{markdown(evaluation['text'])} "
        f"in steps of {evaluation['step']}, {markdown(evaluation['dtype'])}; each step sees the compressed past. KL is "
        "to "
        "full precision."
    )
    options = {
        "model": _typed_model(bundle),  # not evaluation["model"], which may be a path
        "text": _place(str(evaluation["text"])),
        **{name: evaluation[name] for name in ("windows", "length", "step", "dtype")},
    }
    if str(evaluation["text"]).startswith("random-tokens:"):  # what --random-weights takes where there is no tokenizer
        del options["text"]
    line = shell(
        [
            "kvcal",
            "eval",
            f"{bundle.name}{SUFFIX}",
            *(w for n, v in options.items() for w in (f"--{n}", str(v))),
            *_random_weights(bundle),
        ]
    )
    figures = table(["", "perplexity", "KL", "bits/value", "packed bytes a window"], map(cells, _rows(evaluation)))
    return f"## Quality\n\n{setup}\n\n{figures}\n\n{block('bash', [line])}"


def _figure(value: object, style: str) -> str | None:
    """A figure as text; None where full precision packs nothing. `kvcal eval --json` writes null for NaN too, but only
    where a figure must be.
    """
    return format(value, style) if is_number(value) else "not finite" if style in (".4f", ".5f") else None


def counted(count: object, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _place(label: str) -> str:
    """A text's label as --text takes it, were it in the current folder."""
    return label.removeprefix("file:").removeprefix("folder:")


def _held_out(bundle: Bundle, plots: Mapping[str, bytes]) -> str:
    """Errors by layer and head, as the fit measured them, and pictures."""
    errors = stored_head_errors(bundle.metrics)
    parts = [f"![{what}]({link(name)})" for name in plots if (what := _caption(name))]
    if errors is not None:
        parts.insert(0, "Relative squared error of keys and values, by layer and kv head:\n\n" + _errors(errors))
    return "## Held-out windows\n\n" + "\n\n".join(parts) if parts else ""


def _caption(name: str) -> str:
    return "error by layer and head" if name.endswith(".errors.png") else "every trial of the search"


def _errors(errors: HeadErrors) -> str:
    heads = max(len(row) for row in (*errors.key, *errors.value) if row)
    head = ["layer", *(f"{role} {h}" for role in ("keys", "values") for h in range(heads))]

    def cells(row: list[float] | None) -> list[str | None]:
        return [None] * heads if row is None else [f"{x:.5f}" for x in row]

    pairs = zip(errors.key, errors.value, strict=True)
    return table(head, [[layer, *cells(key), *cells(value)] for layer, (key, value) in enumerate(pairs)])


def _plots(bundle: Bundle) -> dict[str, bytes]:
    images: dict[str, bytes] = {}
    if (errors := stored_head_errors(bundle.metrics)) is not None:
        images[f"{bundle.name}.errors.png"] = head_errors_png(errors.key, errors.value, bundle.name)
    if (picture := _search_plot(bundle)) is not None:
        images[f"{bundle.name}.front.png"] = picture
    return images


def _search_plot(bundle: Bundle) -> bytes | None:
    """None where there was no search, or what is recorded of one is no search."""
    search = Table(bundle.metrics).table("search")
    limit = Table(bundle.provenance).table("search").value("max_bits", float)
    trials = [Table(row) for row in search.value("trials", list) or []]
    pairs = [(row.value("bits", float), row.value("quality", float)) for row in trials]
    front, chosen = search.value("front", list), search.value("chosen", int)
    points = [(bits, quality) for bits, quality in pairs if bits is not None and quality is not None]
    numbers = [*(front or []), chosen]
    placed = all(type(number) is int and 0 <= number < len(points) for number in numbers)
    if limit is None or not points or len(points) != len(pairs) or not front or chosen is None or not placed:
        return None
    return front_png(points, front, chosen, limit, str(search.display("quality")), "stored bits per value")


def _again(bundle: Bundle, defaults_of: DefaultsOf, check: Callable[[Recorded], None]) -> str:
    try:
        was = recorded(bundle)
        check(was)
    except KVCalError:
        return "Its provenance does not say which command made it."
    local = [
        label for label in (was.text, was.other_text) if label is not None and label.startswith(("file:", "folder:"))
    ]
    places = [word for label in local for word in ("--text", _place(label))]
    if was.model.get("kind") == "folder":
        places += ["--model", str(was.model["name"])]
    rerun = shell(["kvcal", "reproduce", f"{bundle.name}{SUFFIX}", *places])
    name = f"{bundle.name}{SUFFIX}"
    command = was.line(defaults_of(was.command), name)
    return "## Make it again\n\n" + block(
        "bash", [f"{command}    # what made it", f"{rerun}    # the same again, and compare"]
    )
