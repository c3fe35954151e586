"""A bundle's model card: what it is, how good, and the commands that make it again. The same input gives the same bytes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcal_artifacts.bundle import SUFFIX, Bundle
from kvcal_artifacts.errors import KVCalError, UsageError

from .evaluate.errors import HeadErrors, stored_head_errors
from .models import HUB_ID
from .recorded import recorded
from .report.front import front_png
from .report.plots import head_errors_png

LICENCES = {"tiny": "apache-2.0"}  # of models that come with kvcal; others say so on their own pages
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
    """text: README.md with its front matter. plots: file name -> PNG."""

    text: str
    plots: dict[str, bytes] = field(default_factory=dict)


def make_card(
    bundle: Bundle,
    sha256: str,
    *,
    repo: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    licence: str | None = None,
    defaults_of: Callable[[str], dict[str, Any]] = lambda command: {},
) -> Card:
    """sha256: of the bundle's file. evaluation: what `kvcal eval --json` printed. defaults_of: a command's
    options at their defaults.
    """
    broken = None if evaluation is None else _broken(bundle, evaluation)
    row = None if evaluation is None or broken else _own_row(bundle, sha256, evaluation)
    plots = _plots(bundle)
    parts = [
        f"# {bundle.name}",
        _intro(bundle),
        _use(bundle, repo),
        _facts(bundle, sha256),
        *([] if evaluation is None else [broken or _evaluation(bundle, evaluation)]),
        _held_out(bundle, plots),
        _again(bundle, defaults_of),
    ]
    front = _front(bundle, None if broken else evaluation, row, licence)
    return Card("---\n" + front + "\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n", plots)


ABOUT = ("windows", "length", "step", "dtype", "text")  # what an evaluation says of itself
FIGURES = ("perplexity", "kl", "bits_per_value", "cache_bytes")


def _broken(bundle: Bundle, evaluation: Mapping[str, Any]) -> str | None:
    """What is said of a bundle whose evaluation broke off, which `kvcal eval` counts as a failed gate; None for others."""
    gates = evaluation.get("gates")
    for check in gates if isinstance(gates, list) else []:
        if isinstance(check, dict) and (check.get("name"), check.get("gate")) == (bundle.name, "evaluation"):
            return f"## Quality\n\nThe evaluation broke off: {' '.join(str(check.get('detail')).split())}."
    return None


def _own_row(bundle: Bundle, sha256: str, evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """The bundle's figures. Raises UsageError where the file holds none, or those of another file of this name."""
    rows = evaluation.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise UsageError("--eval: not what `kvcal eval --json` prints (no rows with names)")
    missing = [name for name in ABOUT if name not in evaluation]
    missing += [f"{name} of {row['name']}" for row in rows for name in FIGURES if name not in row]
    names = [str(row["name"]) for row in rows]
    if bundle.name not in names:
        raise UsageError(f"--eval: its rows are {', '.join(names) or 'none'}; none is {bundle.name}")
    if missing:
        raise UsageError(f"--eval: not what `kvcal eval --json` prints (no {missing[0]})")
    found: Mapping[str, Any] = rows[names.index(bundle.name)]
    if found.get("sha256") != sha256:
        seen = f"sha256 {str(found['sha256'])[:16]}…" if "sha256" in found else "no sha256 (an older kvcal's)"
        raise UsageError(
            f"--eval: its {bundle.name} has {seen}, this file {sha256[:16]}…: figures of another file; run `kvcal eval` again"
        )
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _front(
    bundle: Bundle, evaluation: Mapping[str, Any] | None, row: Mapping[str, Any] | None, licence: str | None
) -> str:
    from huggingface_hub import ModelCardData

    model, method = bundle.provenance.get("model", {}), str(bundle.provenance.get("method", "scheme"))
    base = _base_model(bundle)
    data = ModelCardData(
        library_name="kvcal",
        base_model=base,
        base_model_relation="quantized" if base else None,
        license=licence or LICENCES.get(str(model.get("name"))),
        datasets=_datasets(bundle) or None,
        metrics=["perplexity", "kl_divergence"]
        if row
        else ["relative_squared_error"]
        if stored_head_errors(bundle.metrics)
        else None,
        pipeline_tag="text-generation",
        tags=sorted({"kv-cache", "kv-cache-compression", "quantization", "kvcal", method}),
        **(_results(bundle, evaluation, row) if evaluation is not None and row is not None else {}),
    )
    return str(data.to_yaml())


def _results(bundle: Bundle, evaluation: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    from huggingface_hub import EvalResult

    text = str(evaluation.get("text", "text"))
    about: dict[str, Any] = {
        "task_type": "text-generation",
        "dataset_type": _id(text.split(":")[0]) or "text",  # of a local file the name of its loader in `datasets`
        "dataset_name": text,
    }
    figures = {"perplexity": row["perplexity"], "kl_divergence": row["kl"], "bits_per_value": row["bits_per_value"]}
    results = [
        EvalResult(metric_type=kind, metric_value=value, metric_name=kind, **about)
        for kind, value in figures.items()
        if _finite(value)
    ]
    return {"model_name": bundle.name, "eval_results": results}


def _id(label: Any) -> str | None:
    """The hub refuses a card (HTTP 400) whose base_model or datasets are no ids; what is local stands in the text only."""
    return label if isinstance(label, str) and HUB_ID.fullmatch(label) else None


def _base_model(bundle: Bundle) -> str | None:
    """Of a folded model the one before folding; none for random weights."""
    if bundle.provenance.get("model", {}).get("random_weights"):
        return None
    before = bundle.provenance.get("folded_from", {}).get("model", {})
    return _id(bundle.provenance.get("model", {}).get("hub_id")) or _id(before.get("hub_id"))


def _datasets(bundle: Bundle) -> list[str]:
    """Ids of data sets on the hub."""
    sources = [bundle.provenance.get(name, {}).get("source") for name in ("text", "other_text")]
    for part in ("keys", "values"):
        sources.append(bundle.provenance.get(part, {}).get("provenance", {}).get("text", {}).get("source"))
    found = [_id(str(source).split(":")[0]) for source in sources]
    return list(dict.fromkeys(one for one in found if one is not None))


def _intro(bundle: Bundle) -> str:
    method = str(bundle.provenance.get("method", "scheme"))
    model = bundle.provenance.get("model", {})
    name = model.get("hub_id") or model.get("name", "its model")
    what = METHODS.get(method, f"the preset {method}, which needs no data")
    return (
        f"Constants for storing the key-value cache of **{name}** at {bundle.scheme.bits_per_value():.3f} bits a value, "
        f"for kvcal. Method: {what}. It holds no weights and no text."
    )


def _use(bundle: Bundle, repo: str | None) -> str:
    model = bundle.provenance.get("model", {})
    place = model.get("hub_id") or model.get("name", "MODEL")
    fetch = f"kvcal pull {repo}\n" if repo else ""
    line = shlex.join(["kvcal", "verify", f"{bundle.name}{SUFFIX}", "--model", str(place), *_random_weights(bundle)])
    shell = f"```bash\n{fetch}{line}\n```"
    python = (
        "```python\nfrom kvcal_artifacts import load_bundle, load_cache\n\n"
        f'bundle = load_bundle("{bundle.name}{SUFFIX}")  # checks every hash\n'
        "with load_cache(bundle, model) as cache:  # refuses another model\n"
        "    model.generate(**inputs, past_key_values=cache)\n```"
    )
    return f"## Use\n\n{shell}\n\n{python}"


def _random_weights(bundle: Bundle) -> list[str]:
    """Options that name the weights of a bundle that was made with random ones."""
    model = bundle.provenance.get("model", {})
    if not model.get("random_weights"):
        return []
    return ["--random-weights", "--seed", str(model.get("revision")).removeprefix("random:")]


def _facts(bundle: Bundle, sha256: str) -> str:
    p, scheme = bundle.provenance, bundle.scheme
    text = p.get("text", {})
    model = bundle.fingerprint
    train = counted(text.get("train_windows"), "window")
    counts = f"{train} of {text.get('length')} tokens, {text.get('holdout_windows')} held out"
    windows = scheme.windows
    rows = {
        "method": p.get("method"),
        "settings": ", ".join(f"{name} {value}" for name, value in p.get("settings", {}).items()),
        "bits a value": f"{scheme.bits_per_value():.4f}"
        + (" (expected: blocks differ in size)" if scheme.ragged else ""),
        "windows": f"sink {windows.sink}, recent {windows.recent}, block {windows.block}; keys {scheme.frame}",
        "token selection": None if scheme.selection is None else f"H2O, keep {scheme.selection.keep:g}",
        "resident bytes": f"{scheme.resident_bytes():,}",
        "made for": f"{model.architecture}, {model.layers} layers, {model.kv_heads} × {model.head_dim}, {model.revision}",
        "calibrated on": f"{text['source']}: {counts}" if text else None,
        "text sha256": text.get("sha256"),
        "other text": p.get("other_text", {}).get("source"),
        "layers left alone": "; ".join(f"{i}: {why}" for i, why in scheme.skipped.items()) or None,
        "made by": ", ".join([str(p.get("tool")), *(f"{k} {v}" for k, v in p.get("versions", {}).items())]),
        "sha256": sha256,
    }
    return "## What it is\n\n" + table(["", ""], [[k, f"`{v}`" if "sha256" in k else v] for k, v in rows.items() if v])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _evaluation(bundle: Bundle, evaluation: Mapping[str, Any]) -> str:
    def cells(row: Mapping[str, Any]) -> list[str | None]:
        formats = dict(zip(FIGURES, (".4f", ".5f", ".3f", ","), strict=True))
        return [row["name"], *(_figure(row[name], style) for name, style in formats.items())]

    about = (
        f"{counted(evaluation['windows'], 'window')} of {evaluation['length']} tokens of {evaluation['text']} in steps of "
        f"{evaluation['step']}, {evaluation['dtype']}; each step sees the compressed past. KL is to full precision."
    )
    model = bundle.provenance.get("model", {})
    options = {
        "model": model.get("hub_id") or model.get("name"),  # not evaluation["model"], which may be a path
        "text": _place(str(evaluation["text"])),
        **{name: evaluation[name] for name in ("windows", "length", "step", "dtype")},
    }
    if evaluation["text"].startswith("random-tokens:"):  # what --random-weights takes where there is no tokenizer
        del options["text"]
    line = shlex.join(
        [
            "kvcal", "eval", f"{bundle.name}{SUFFIX}", *(w for n, v in options.items() for w in (f"--{n}", str(v))),
            *_random_weights(bundle),
        ]
    )  # fmt: skip
    figures = table(["", "perplexity", "KL", "bits a value", "packed bytes a window"], map(cells, evaluation["rows"]))
    return f"## Quality\n\n{about}\n\n{figures}\n\n```bash\n{line}\n```"


def _figure(value: Any, style: str) -> str | None:
    """None: full precision packs nothing. `kvcal eval --json` writes null for NaN too, but only where a figure must be."""
    return format(value, style) if _finite(value) else "not finite" if style in (".4f", ".5f") else None


def counted(count: Any, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _place(label: str) -> str:
    """A text's label as --text takes it, were it in the current folder."""
    return label.removeprefix("file:").removeprefix("folder:")


def _held_out(bundle: Bundle, plots: Mapping[str, bytes]) -> str:
    """Errors by layer and head, as the fit measured them, and pictures."""
    errors = stored_head_errors(bundle.metrics)
    parts = [f"![{what}]({name})" for name in plots if (what := _caption(name))]
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
    found: dict[str, bytes] = {}
    if (errors := stored_head_errors(bundle.metrics)) is not None:
        found[f"{bundle.name}.errors.png"] = head_errors_png(errors.key, errors.value, bundle.name)
    if (search := bundle.metrics.get("search")) is not None:
        pairs = [(row["bits"], row["quality"]) for row in search["trials"]]
        limit = bundle.provenance["search"]["max_bits"]
        picture = front_png(pairs, search["front"], search["chosen"], limit, search["quality"], "stored bits a value")
        found[f"{bundle.name}.front.png"] = picture
    return found


def _again(bundle: Bundle, defaults_of: Callable[[str], dict[str, Any]]) -> str:
    try:
        was = recorded(bundle)
    except KVCalError:
        return "Its provenance does not say which command made it."
    local = [
        label for label in (was.text, was.other_text) if label is not None and label.startswith(("file:", "folder:"))
    ]
    places = [word for label in local for word in ("--text", _place(label))]
    if was.model.get("kind") == "folder":
        places += ["--model", str(was.model["name"])]
    check = shlex.join(["kvcal", "reproduce", f"{bundle.name}{SUFFIX}", *places])
    name = f"{bundle.name}{SUFFIX}"
    return (
        "## Make it again\n\n"
        f"```bash\n{was.line(defaults_of(was.command), name)}    # what made it\n"
        f"{check}    # the same again, and compare\n```"
    )
