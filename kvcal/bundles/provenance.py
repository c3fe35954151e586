"""From a bundle's provenance back to the command that made it: its name, its options, and the line to type.

Everything that decides a bundle's bytes is in its provenance; where a text or a model lies on this machine is not. A
bundle may come from a stranger: what it records is checked here as strictly as what a user types, and no path is taken
from it. Hub models and data sets by their names are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from kvcal_artifacts.bundle import SUFFIX, Bundle
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Frame

from ..methods.data_free import COMPOSED, PRESETS
from ..methods.squat import TASKS, paper_settings
from ..models.catalogue import CATALOGUE
from ..pipeline.build import HOW, MAYBE_PATHS, NOT_GIVEN, PATHS, DefaultsOf, OptionsOf
from ..pipeline.spec import Options as CommandOptions
from ..report.escape import shell
from ..report.records import is_number, kind_of
from ..text.sources import EMBEDDED

Options = dict[str, Any]  # of a command, by name
Fields = Mapping[str, object]  # of a record, not checked yet
LOCAL = ("file:", "folder:")  # texts whose place is not recorded, only name and hash
REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*"  # no part of it begins with a dot, so that it leads nowhere else
HUB_MODEL = re.compile(REPOSITORY, re.ASCII)
HUB_TEXT = re.compile(rf"{REPOSITORY}(:[\w.+-]*){{0,2}}(@[0-9a-f]{{40}})?", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
TASK = re.compile(r"[A-Za-z0-9_][\w.+-]*", re.ASCII)
FILES = (".yaml", ".yml", ".json", ".py")  # what no task's name ends in
LARGEST = 1 << 20  # of a recorded whole number: the papers' largest are near 10,000
LARGE = {"seed": 2**63 - 1, "vectors": 1 << 30}  # where more has a meaning
TOKENS = 1 << 28  # of all windows: 1,024 windows of 8,192 tokens are 2**23
DEEPEST = 16  # bundles made of bundles
MOST_THREADS = 1024  # a million end the process with a segmentation fault
NOT_RECORDED = {
    *NOT_GIVEN,
    *PATHS,
    *MAYBE_PATHS,
    *HOW,
    "bundle_output",
}  # places and ways to run: none of a record's affair


class Input(TypedDict):
    """A bundle that a command reads: its name, its file's hash, and the command that made it."""

    name: str
    sha256: str
    recorded: Recorded


@dataclass(frozen=True)
class Recorded:
    """A command of kvcal. options: by name, without those at their defaults' meaning; inputs: bundles that it reads
    (combine, fold), made first. text, other_text, model: labels as recorded.
    """

    command: str
    options: Options
    positional: tuple[str, ...] = ()
    text: str | None = None
    other_text: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)  # name, kind, revision and random_weights, as checked
    inputs: tuple[Input, ...] = ()
    cpu: Mapping[str, Any] = field(default_factory=dict)

    def line(self, defaults: Mapping[str, object], output: str | None = None) -> str:
        """The command as typed in a shell; options at their defaults are left out, local files stand under the recorded
        name.
        """
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


def _words(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]


def checked_options(was: Recorded, defaults_of: DefaultsOf, options_of: OptionsOf) -> CommandOptions | None:
    """All options of the command, the recorded ones as the command line would take them; None for `kvcal combine`,
    which has none. Raises KVCalError.
    """
    if was.command == "combine":
        return None
    options = dict(was.options)
    needed: dict[str, object] = {"name": was.positional[0]} if was.command == "preset" and was.positional else {}
    if was.command == "fold":
        needed = {"bundle": "bundle", "output": options.pop("output")}  # places, which `kvcal reproduce` fills in
    allowed = set(defaults_of(was.command)) - NOT_RECORDED
    if unknown := sorted(set(options) - allowed):
        raise KVCalError(f"provenance has {unknown[0]}, which `kvcal {was.command}` does not take from a record")
    defaults = defaults_of(was.command)
    empty = {name: value for name, value in options.items() if value in (None, []) and defaults[name] in (None, [])}
    typed = needed | {name: value for name, value in options.items() if name not in empty}
    try:
        read = options_of(was.command, typed)
    except UsageError as error:
        raise KVCalError(f"provenance is not what `kvcal {was.command}` takes: {error}") from error
    for name, value in typed.items():  # "6" or [6] would be read as 6
        if name not in needed and not _as_typed(value, getattr(read, name)):
            raise KVCalError(f"provenance says {name} is {value!r}, which is not what `kvcal {was.command}` takes")
    return replace(read, **empty)


def _as_typed(recorded: object, read: object) -> bool:
    """Whether the command line reads back what the record holds, of the same type; a whole number may be a float."""
    if isinstance(recorded, list):
        return isinstance(read, (list, tuple)) and list(read) == recorded
    same = type(recorded) is type(read) or (type(recorded) is int and type(read) is float)
    return bool(same and recorded == read)


def check_threads(count: object) -> None:
    """KVCalError for a recorded number of threads that is none."""
    if count is not None and (type(count) is not int or not 1 <= count <= MOST_THREADS):
        raise KVCalError(f"provenance says {count!r} threads: needs a whole number from 1 to {MOST_THREADS}")


def recorded(bundle: Bundle) -> Recorded:
    """The command that made a bundle. Raises KVCalError where its provenance does not say."""
    return _recorded(bundle.provenance, bundle.name)


def _recorded(provenance: Fields, name: str, depth: int = 0) -> Recorded:
    try:
        if depth > DEEPEST:
            raise ValueError(f"bundles within bundles, more than {DEEPEST} deep")
        command = _made(provenance, depth)
        _check(command)
        return command
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise KVCalError(
            f"{name}: its provenance does not say how it was made ({_why(error)}); a version of kvcal "
            "that records it is needed, or the command itself"
        ) from error


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing or not known"
    return str(error) if isinstance(error, ValueError) else "a value is of another type than kvcal records"


def _check(command: Recorded) -> None:
    """Raise ValueError for what no user could type, and for names that lead somewhere."""
    for name in command.positional if command.command == "preset" else ():
        if name not in PRESETS:
            raise ValueError(f"method {name!r} is not known")
    if command.model:
        _check_model(command.model)
    for one in command.inputs:
        _check_name("bundle", one["name"])
        _check_hash(one["sha256"])
    for label in (command.text, command.other_text):
        _check_text(label)
    for name, value in command.options.items():
        _check_option(name, value)
    if command.command == "fold":
        _check_name("folder", command.options["output"])
    windows, length = (command.options.get(name) for name in ("windows", "length"))
    if isinstance(windows, int) and isinstance(length, int) and windows * length > TOKENS:
        raise ValueError(f"{windows} windows of {length} tokens are more than {TOKENS} tokens")
    for task in tasks_of(command.options):
        check_task(task)


def _check_name(what: str, name: object) -> None:
    """Names become names of files: one with a folder in it would be written there."""
    if not isinstance(name, str) or not name.strip() or name in (".", "..") or {"/", "\0"} & set(name):
        raise ValueError(f"{what} {name!r} is no name")


def _check_hash(sha256: object) -> None:
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 {sha256!r} is none")


def _check_model(model: Fields) -> None:
    name, kind, revision = model["name"], model["kind"], model["revision"]
    if type(model["random_weights"]) is not bool:
        raise ValueError(f"random_weights of the model is {kind_of(model['random_weights'])}, not true or false")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"revision of the model is {kind_of(revision)}, not text")
    if kind == "folder":
        _check_name("model", name)
    elif not isinstance(name, str) or kind not in ("hub", "embedded"):
        raise ValueError(f"model {name!r} of kind {kind!r}: kinds are hub, embedded and folder")
    elif name in CATALOGUE:
        if (CATALOGUE[name].hub_id is None) != (kind == "embedded"):
            raise ValueError(f"model {name!r} is not of kind {kind!r}")
    elif kind == "embedded" or not HUB_MODEL.fullmatch(name):
        raise ValueError(f"model {name!r} is no short name and no hub id: a path is taken from --model alone")
    if kind == "hub" and revision and not model["random_weights"] and not REVISION.fullmatch(revision):
        raise ValueError(f"revision {revision!r} is none of a hub model")


def _check_text(label: str | None) -> None:
    if label is None or label in EMBEDDED:
        return
    if label.startswith(LOCAL):
        _check_name("text", label.partition(":")[2])
    elif not HUB_TEXT.fullmatch(label):
        raise ValueError(f"text {label!r} is neither embedded nor a data set's name: a path is taken from --text alone")


def _check_option(name: str, value: object) -> None:
    """One value, or a list of some, of a size that a command can take."""
    for one in value if isinstance(value, list) else [value]:
        if one is not None and not isinstance(one, (str, bool)) and not is_number(one):
            raise ValueError(f"{name} is {kind_of(one)}, expected text or a number")
        if type(one) is int and abs(one) > (most := LARGE.get(name, LARGEST)):
            raise ValueError(f"{name} is {one}, at most {most} is taken from a record")


def tasks_of(options: Fields) -> list[str]:
    """Names that an --objective of tasks has."""
    objective = options.get("objective")
    if not isinstance(objective, str) or not objective.startswith("task:"):
        return []
    return [task.strip() for task in objective.removeprefix("task:").split(",") if task.strip()]


@dataclass(frozen=True)
class MadeFor:
    """The model that a bundle was made for, as its provenance names it: a name of the hub or of the catalogue, or, of a
    local folder, its name without its place. seed: of random weights.
    """

    name: str
    local: bool
    revision: str | None
    seed: int | None


def made_for(bundle: Bundle) -> MadeFor | None:
    """What a bundle's provenance says of its model; None where it says nothing that can be read."""
    try:
        provenance: Fields = bundle.provenance
        while provenance.get("method") == "combine":
            provenance = _table(_table(provenance, "keys"), "provenance")
        model = _table(provenance, "model")
        _check_model(model)
        name, revision = _string(model, "name"), model["revision"]
        seed = re.fullmatch(r"random:(\d{1,18})", str(revision)) if model["random_weights"] else None
        commit = isinstance(revision, str) and model["kind"] == "hub" and not model["random_weights"]
        return MadeFor(
            name, model["kind"] == "folder", str(revision) if commit else None, int(seed[1]) if seed else None
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def check_task(task: str) -> None:
    """Raise ValueError for what may be a path: lm-eval would load it, and code beside it."""
    if not TASK.fullmatch(task) or task.lower().endswith(FILES):
        raise ValueError(f"task {task!r} is no task's name: files of tasks are taken from --tasks-path alone")


def _made(provenance: Fields, depth: int) -> Recorded:
    if "folded_from" in provenance:
        return _fold(provenance, depth)
    if provenance["method"] == "combine":
        return _combine(provenance, depth)
    return _fit(provenance) if "text" in provenance else _preset(provenance)


# A record may hold any JSON: a TypeError is what `_recorded` says of a value of another type.


def _table(fields: Fields, name: str) -> Fields:
    value = fields[name]
    if not isinstance(value, Mapping):
        raise TypeError(name)
    return value


def _string(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value


def _list(fields: Fields, name: str) -> Sequence[object]:
    value = fields[name]
    if not isinstance(value, (list, tuple)):
        raise TypeError(name)
    return value


def _fit(p: Fields) -> Recorded:
    command, options_of = FITS[_string(p, "method")]
    text, model = _table(p, "text"), _table(p, "model")
    options = options_of(_table(p, "settings"), p) | {
        "windows": _whole(text, "train_windows") + _whole(text, "holdout_windows"),
        "holdout": _whole(text, "holdout_windows"),
        "length": _whole(text, "length"),
        "seed": p["seed"],
        "batch": p["batch"],
        "dtype": p["dtype"],
        "device": "cpu" if p["device"] == "cpu" else "cuda",
    }
    if "column" in text:
        options["column"] = text["column"]
    options |= _selection(p)
    other = _table(p, "other_text").get("source") if "other_text" in p else None
    return Recorded(
        command,
        options | _weights(model),
        text=_text(text["source"]),
        other_text=_text(other),
        model=model,
        cpu=dict(_table(p, "cpu")) if "cpu" in p else {},
    )


def _whole(fields: Fields, name: str) -> int:
    value = fields[name]
    if type(value) is not int:
        raise ValueError(f"{name} is {kind_of(value)}, expected a whole number")
    return value


def _text(label: object) -> str | None:
    """What --text takes. Random token ids are no text."""
    if label is None:
        return None
    if not isinstance(label, str):
        raise TypeError("source")
    return None if label.startswith("random-tokens:") else label


def _weights(model: Fields) -> Options:
    if model["random_weights"]:
        return {"random_weights": True}
    return {"revision": model["revision"]} if model["kind"] == "hub" and model["revision"] else {}


def _selection(p: Fields) -> Options:
    if p.get("selection") is None:
        return {}
    selection = _table(p, "selection")
    return {"keep": selection["keep"], "heavy": selection["heavy"]}


def _preset(p: Fields) -> Recorded:
    settings, model, method = _table(p, "settings"), _table(p, "model"), _string(p, "method")
    options: Options = {name: settings[name] for name in ("sink", "recent", "block")}
    if "rope" in settings:
        options["frame"] = settings["rope"]
        preset = PRESETS.get(method)
        for option, name in (("keys", "key"), ("values", "value")):
            if settings[name] != getattr(preset, name, None):
                options[option] = settings[name]
        options["per_layer"] = settings.get("per_layer", [])
    options |= _selection(p) | _weights(model)
    if model["revision"] is None:
        options["config_only"] = True
    elif model["random_weights"]:
        options["seed"] = int(_string(model, "revision").removeprefix("random:"))
    return Recorded("preset", options, () if method == COMPOSED else (method,), model=model)


def _combine(p: Fields, depth: int) -> Recorded:
    parts = [_table(p, name) for name in ("keys", "values")]
    return Recorded(
        "combine",
        {},
        tuple(f"{part['bundle']}{SUFFIX}" for part in parts),
        inputs=tuple(_input(part["bundle"], part["sha256"], _table(part, "provenance"), depth) for part in parts),
    )


def _fold(p: Fields, depth: int) -> Recorded:
    before = _table(p, "folded_from")
    model = _table(before, "model")
    unfolded = {name: value for name, value in p.items() if name != "folded_from"} | {"model": model}
    unfolded["tool"] = before.get("tool", p["tool"])
    output = _table(p, "model")["name"]
    options: Options = {"output": output, "dtype": before.get("dtype", "auto"), **_weights(model)}
    source = _input(before.get("bundle", "unfolded"), before["bundle_sha256"], unfolded, depth)
    return Recorded("fold", options, model=model, inputs=(source,))


def _input(name: object, sha256: object, provenance: Fields, depth: int) -> Input:
    inner = _recorded(provenance, str(name), depth + 1)
    if not isinstance(name, str):
        raise ValueError(f"bundle {name!r} is no name")
    if not isinstance(sha256, str):
        raise ValueError(f"sha256 {sha256!r} is none")
    return {"name": name, "sha256": sha256, "recorded": inner}


# Settings of each method -> options of its command. A field that is no option has the command's own value.


def _renamed(settings: Fields, names: Mapping[str, str], drop: tuple[str, ...] = ()) -> Options:
    return {names.get(name, name): value for name, value in settings.items() if name not in drop}


def _joined(values: Iterable[object]) -> str:
    return ",".join(map(str, values)) or "none"


def _aqua_kv(s: Fields, p: Fields) -> Options:
    inputs = {name: _joined(_list(s, name)) for name in ("key_inputs", "value_inputs")}
    return _renamed(s, {"rope": "frame"}) | inputs


def _innerq(s: Fields, p: Fields) -> Options:
    return {"search": "plain"} | _renamed(s, {"key": "keys", "value": "values"})  # bundles of before the option


def _squat(s: Fields, p: Fields) -> Options:
    options = _renamed(s, {"rope": "frame", "prompt": "prompt_tokens"}, ("search_ranks", "search_strengths"))
    if s["search_ranks"]:  # a search names no point; --settings says where it starts from
        rank, strength = options.pop("rank"), options.pop("strength")
        options |= {"search": True, "settings": _task(_table(p, "model")["name"], s["rope"], rank, strength)}
    return options


def _task(model: object, frame: object, rank: object, strength: object) -> str:
    space: Frame = "pre_rope" if frame == "pre_rope" else "post_rope"
    for task in TASKS:
        try:
            if paper_settings(task, str(model), space)[:2] == (rank, strength):
                return task
        except KVCalError:  # the paper has it for other models
            continue
    return TASKS[0]


def _vqkv(s: Fields, p: Fields) -> Options:
    names = {"high": "high_dims", "split": "split_by", "rope": "frame"}
    options = _renamed(s, names, ("training", "shared", "stages", "sizes"))
    training = {"least": "min_iterations", "most": "max_iterations", "batch": "batch_vectors"}
    return (
        options
        | {"stages": _joined(_list(s, "stages")), "sizes": _joined(_list(s, "sizes")), "per_layer": not s["shared"]}
        | _renamed(_table(s, "training"), training, ("seed",))
    )


def _mixkvq(s: Fields, p: Fields) -> Options:
    drop = ("tau_low", "tau_high", "normalise", "value_group")
    options = _renamed(s, {"raw": "raw_dtype"}, drop) | {"raw_salience": s["normalise"] == "none"}
    if p.get("search") is None:
        fixed = s["full"] is not None
        return options if fixed else options | {name: str(s[name]) for name in ("tau_low", "tau_high")}
    search = _table(p, "search")
    goal, space = _table(search, "objective"), _table(search, "space")
    options |= {name: _joined(_list(space, name)) for name in ("tau_low", "tau_high")}
    options |= {"trials": search["trials"], "max_bits": search["max_bits"], "objective": goal["name"]}
    if goal["name"] == "task":
        tasks = ",".join(map(str, _list(goal, "tasks")))
        options |= {"objective": f"task:{tasks}", "limit": goal["limit"], "metric": goal["metric"]}
    return options | ({"step": goal["step"]} if "step" in goal else {})


def _kvtuner(s: Fields, p: Fields) -> Options:
    return _renamed(s, {"choices": "bits"}) | {"bits": _joined(_list(s, "choices"))}


FITS: dict[str, tuple[str, Callable[[Fields, Fields], Options]]] = {
    "aqua-kv": ("fit-predictors", _aqua_kv),
    "innerq": ("fit-norms", _innerq),
    "squat": ("measure-subspaces", _squat),
    "vqkv": ("train-codebooks", _vqkv),
    "mixkvq": ("tune-thresholds", _mixkvq),
    "kvtuner": ("tune-bits", _kvtuner),
}
