"""From a bundle's provenance back to the command that made it: its name, its options, and the line to type.

Everything that decides a bundle's bytes is in its provenance; where a text or a model lies on this machine is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from kvcal_artifacts.bundle import SUFFIX, Bundle
from kvcal_artifacts.errors import KVCalError

from .methods.plain import COMPOSED, PRESETS
from .methods.squat import TASKS, paper_settings
from .report.escape import shell

Options = dict[str, Any]
LOCAL = ("file:", "folder:")  # texts whose place is not recorded, only name and hash


@dataclass(frozen=True)
class Recorded:
    """A command of kvcal. options: by name, without those at their defaults' meaning; inputs: bundles that it reads (combine,
    fold), as {"name", "sha256", "recorded"}, made first. text, other_text, model: labels as recorded.
    """

    command: str
    options: Options
    positional: tuple[str, ...] = ()
    text: str | None = None
    other_text: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Mapping[str, Any], ...] = ()
    cpu: Mapping[str, Any] = field(default_factory=dict)

    def line(self, defaults: Options, output: str | None = None) -> str:
        """As typed in a shell; options at their defaults are left out, local files stand under the recorded name."""
        words = ["kvcal", self.command, *self.positional]
        shown = dict(self.options)
        if self.model:
            shown = {"model": self.model["name"], **shown}
        for name, label in (("text", self.text), ("other_text", self.other_text)):
            if label is not None:
                shown[name] = label.removeprefix("file:").removeprefix("folder:")
        if self.command == "fold":
            shown["bundle"] = f"{self.inputs[0]['name']}{SUFFIX}"
        if output is not None:
            shown["bundle_output" if self.command == "fold" else "output"] = output
        for name, value in shown.items():
            if value != defaults.get(name):
                words += _words(name, value)
        return shell(words)


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]


def recorded(bundle: Bundle) -> Recorded:
    """The command that made a bundle. Raises KVCalError where its provenance does not say."""
    return _recorded(bundle.provenance, bundle.name)


def _recorded(provenance: Mapping[str, Any], name: str) -> Recorded:
    try:
        found = _made(provenance)
        folded = found.options["output"] if found.command == "fold" else None
        for label in (found.model.get("name"), folded, *(one["name"] for one in found.inputs)):
            _check_name(label)
        for label in (found.text, found.other_text):
            _check_name(None if label is None or not label.startswith(LOCAL) else label.partition(":")[2])
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KVCalError(
            f"{name}: its provenance does not say how it was made ({type(error).__name__}: {error}); a version of kvcal "
            "that records it is needed, or the command itself"
        ) from error


def _made(provenance: Mapping[str, Any]) -> Recorded:
    if "folded_from" in provenance:
        return _fold(provenance)
    if provenance["method"] == "combine":
        return _combine(provenance)
    return _fit(provenance) if "text" in provenance else _preset(provenance)


def _check_name(name: Any) -> None:
    """Names become names of files; one with `..` or a root in it would be written there. A hub id has one slash."""
    if name is None:
        return
    parts = PurePosixPath(name).parts
    if not parts or len(parts) > 2 or "\0" in name or {"..", "/"} & set(parts):
        raise ValueError(f"{name!r} is no name")


def _fit(p: Mapping[str, Any]) -> Recorded:
    command, options_of = FITS[p["method"]]
    text = p["text"]
    options = options_of(p["settings"], p) | {
        "windows": text["train_windows"] + text["holdout_windows"],
        "holdout": text["holdout_windows"],
        "length": text["length"],
        "seed": p["seed"],
        "batch": p["batch"],
        "dtype": p["dtype"],
        "device": "cpu" if p["device"] == "cpu" else "cuda",
    }
    if "column" in text:
        options["column"] = text["column"]
    options |= _selection(p)
    other = p.get("other_text", {}).get("source")
    return Recorded(
        command, options | _weights(p["model"]), text=_text(text["source"]), other_text=_text(other),
        model=p["model"], cpu=dict(p.get("cpu", {})),
    )  # fmt: skip


def _text(label: str | None) -> str | None:
    """What --text takes. Random token ids are no text."""
    return None if label is None or label.startswith("random-tokens:") else label


def _weights(model: Mapping[str, Any]) -> Options:
    if model["random_weights"]:
        return {"random_weights": True}
    return {"revision": model["revision"]} if model["kind"] == "hub" and model["revision"] else {}


def _selection(p: Mapping[str, Any]) -> Options:
    own = p.get("selection")
    return {} if own is None else {"keep": own["keep"], "heavy": own["heavy"]}


def _preset(p: Mapping[str, Any]) -> Recorded:
    settings, model = p["settings"], p["model"]
    options: Options = {name: settings[name] for name in ("sink", "recent", "block")}
    if "rope" in settings:
        options["frame"] = settings["rope"]
        own = PRESETS.get(p["method"])
        for option, name in (("keys", "key"), ("values", "value")):
            if settings[name] != getattr(own, name, None):
                options[option] = settings[name]
        options["per_layer"] = settings.get("per_layer", [])
    options |= _selection(p) | _weights(model)
    if model["revision"] is None:
        options["config_only"] = True
    elif model["random_weights"]:
        options["seed"] = int(model["revision"].removeprefix("random:"))
    return Recorded("preset", options, () if p["method"] == COMPOSED else (p["method"],), model=model)


def _combine(p: Mapping[str, Any]) -> Recorded:
    return Recorded(
        "combine", {}, tuple(f"{p[part]['bundle']}{SUFFIX}" for part in ("keys", "values")),
        inputs=tuple(_input(p[part]["bundle"], p[part]["sha256"], p[part]["provenance"]) for part in ("keys", "values")),
    )  # fmt: skip


def _fold(p: Mapping[str, Any]) -> Recorded:
    before = p["folded_from"]
    own = {name: value for name, value in p.items() if name != "folded_from"} | {"model": before["model"]}
    own["tool"] = before.get("tool", p["tool"])
    options: Options = {"output": p["model"]["name"], "dtype": before.get("dtype", "auto"), **_weights(before["model"])}
    made = _input(before.get("bundle", "unfolded"), before["bundle_sha256"], own)
    return Recorded("fold", options, model=before["model"], inputs=(made,))


def _input(name: str, sha256: str, provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": name, "sha256": sha256, "recorded": _recorded(provenance, name)}


# Settings of each method -> options of its command. A field that is no option has the command's own value.


def _renamed(settings: Mapping[str, Any], names: Mapping[str, str], drop: tuple[str, ...] = ()) -> Options:
    return {names.get(name, name): value for name, value in settings.items() if name not in drop}


def _joined(values: list[Any]) -> str:
    return ",".join(map(str, values)) or "none"


def _aqua_kv(s: Mapping[str, Any], p: Mapping[str, Any]) -> Options:
    inputs = {name: _joined(s[name]) for name in ("key_inputs", "value_inputs")}
    return _renamed(s, {"rope": "frame"}) | inputs


def _innerq(s: Mapping[str, Any], p: Mapping[str, Any]) -> Options:
    return _renamed(s, {"key": "keys", "value": "values"})


def _squat(s: Mapping[str, Any], p: Mapping[str, Any]) -> Options:
    options = _renamed(s, {"rope": "frame", "prompt": "prompt_tokens"}, ("search_ranks", "search_strengths"))
    if s["search_ranks"]:  # a search names no point; --settings says where it starts from
        rank, strength = options.pop("rank"), options.pop("strength")
        options |= {"search": True, "settings": _task(p["model"]["name"], s["rope"], rank, strength)}
    return options


def _task(model: str, frame: Any, rank: int, strength: float) -> str:
    for task in TASKS:
        try:
            if paper_settings(task, model, frame)[:2] == (rank, strength):
                return task
        except KVCalError:  # the paper has it for other models
            continue
    return TASKS[0]


def _vqkv(s: Mapping[str, Any], p: Mapping[str, Any]) -> Options:
    names = {"high": "high_dims", "split": "split_by", "rope": "frame"}
    options = _renamed(s, names, ("training", "shared", "stages", "sizes"))
    training = {"least": "min_iterations", "most": "max_iterations", "batch": "batch_vectors"}
    return (
        options
        | {"stages": _joined(s["stages"]), "sizes": _joined(s["sizes"]), "per_layer": not s["shared"]}
        | _renamed(s["training"], training, ("seed",))
    )


def _mixkvq(s: Mapping[str, Any], p: Mapping[str, Any]) -> Options:
    drop = ("tau_low", "tau_high", "normalise", "value_group")
    options = _renamed(s, {"raw": "raw_dtype"}, drop) | {"raw_salience": s["normalise"] == "none"}
    search = p.get("search")
    if search is None:
        fixed = s["full"] is not None
        return options if fixed else options | {name: str(s[name]) for name in ("tau_low", "tau_high")}
    goal = search["objective"]
    options |= {name: _joined(search["space"][name]) for name in ("tau_low", "tau_high")}
    options |= {"trials": search["trials"], "max_bits": search["max_bits"], "objective": goal["name"]}
    if goal["name"] == "task":
        options |= {"objective": "task:" + ",".join(goal["tasks"]), "limit": goal["limit"], "metric": goal["metric"]}
    return options | ({"step": goal["step"]} if "step" in goal else {})


def _kvtuner(s: Mapping[str, Any], p: Mapping[str, Any]) -> Options:
    return _renamed(s, {"choices": "bits"}) | {"bits": _joined(s["choices"])}


FITS: dict[str, tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Options]]] = {
    "aqua-kv": ("fit-predictors", _aqua_kv),
    "innerq": ("fit-norms", _innerq),
    "squat": ("measure-subspaces", _squat),
    "vqkv": ("train-codebooks", _vqkv),
    "mixkvq": ("tune-thresholds", _mixkvq),
    "kvtuner": ("tune-bits", _kvtuner),
}
