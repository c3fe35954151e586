"""The command that wrote a bundle, read back from its provenance: its name, its options, and the line to type.

Everything that decides a bundle's bytes is in its provenance; where a text or a model lies on this machine is not. No
path is taken from a record (record_checks.py); hub models and data sets by their names are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from kvcal_artifacts.bundle import SUFFIX, Bundle
from kvcal_artifacts.errors import KVCalError, UsageError

from ..methods.data_free import COMPOSED, PRESETS
from ..pipeline.options import HOW, MAYBE_PATHS, NOT_IN_RECIPE, PATHS
from ..pipeline.spec import DefaultsOf, OptionsOf
from ..pipeline.spec import Options as CommandOptions
from ..report.escape import shell
from .record_checks import (
    Fields,
    check_hash,
    check_model,
    check_name,
    check_option,
    check_task,
    check_text,
    string_of,
    table_of,
    tasks_of,
    whole_of,
)
from .recorded_settings import FITS

TOKENS = 1 << 28  # of all windows: 1,024 windows of 8,192 tokens are 2**23
DEEPEST = 16  # bundles made of bundles
NOT_RECORDED = {
    *NOT_IN_RECIPE,
    *PATHS,
    *MAYBE_PATHS,
    *HOW,
    "bundle_output",
}  # places and ways to run: none of a record's affair


class Input(TypedDict):
    """A bundle that a command reads: its name, its file's hash, and the command that wrote it."""

    name: str
    sha256: str
    recorded: Recorded


@dataclass(frozen=True)
class Recorded:
    """A command of kvcal. options: by name, without those at their defaults' meaning; inputs: bundles that it reads
    (combine, fold), to be written first. text, other_text, model: labels as recorded.
    """

    command: str
    options: dict[str, Any]
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


def recorded(bundle: Bundle) -> Recorded:
    """The command that wrote a bundle. Raises KVCalError where its provenance does not say."""
    return _recorded(bundle.provenance, bundle.name)


def _recorded(provenance: Fields, name: str, depth: int = 0) -> Recorded:
    try:
        if depth > DEEPEST:
            raise ValueError(f"bundles within bundles, more than {DEEPEST} deep")
        command = _command_of(provenance, depth)
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
        check_model(command.model)
    for one in command.inputs:
        check_name("bundle", one["name"])
        check_hash(one["sha256"])
    for label in (command.text, command.other_text):
        check_text(label)
    for name, value in command.options.items():
        check_option(name, value)
    if command.command == "fold":
        check_name("folder", command.options["output"])
    windows, length = (command.options.get(name) for name in ("windows", "length"))
    if isinstance(windows, int) and isinstance(length, int) and windows * length > TOKENS:
        raise ValueError(f"{windows} windows of {length} tokens are more than {TOKENS} tokens")
    for task in tasks_of(command.options):
        check_task(task)


def _command_of(provenance: Fields, depth: int) -> Recorded:
    if "folded_from" in provenance:
        return _fold(provenance, depth)
    if provenance["method"] == "combine":
        return _combine(provenance, depth)
    return _fit(provenance) if "text" in provenance else _preset(provenance)


def _fit(p: Fields) -> Recorded:
    command, options_of = FITS[string_of(p, "method")]
    text, model = table_of(p, "text"), table_of(p, "model")
    options = options_of(table_of(p, "settings"), p) | {
        "windows": whole_of(text, "train_windows") + whole_of(text, "holdout_windows"),
        "holdout": whole_of(text, "holdout_windows"),
        "length": whole_of(text, "length"),
        "seed": p["seed"],
        "batch": p["batch"],
        "dtype": p["dtype"],
        "device": "cpu" if p["device"] == "cpu" else "cuda",
    }
    if "column" in text:
        options["column"] = text["column"]
    options |= _selection(p)
    other = table_of(p, "other_text").get("source") if "other_text" in p else None
    return Recorded(
        command,
        options | _weights(model),
        text=_text(text["source"]),
        other_text=_text(other),
        model=model,
        cpu=dict(table_of(p, "cpu")) if "cpu" in p else {},
    )


def _text(label: object) -> str | None:
    """What --text takes. Random token ids are no text."""
    if label is None:
        return None
    if not isinstance(label, str):
        raise TypeError("source")
    return None if label.startswith("random-tokens:") else label


def _weights(model: Fields) -> dict[str, object]:
    if model["random_weights"]:
        return {"random_weights": True}
    return {"revision": model["revision"]} if model["kind"] == "hub" and model["revision"] else {}


def _selection(p: Fields) -> dict[str, object]:
    if p.get("selection") is None:
        return {}
    selection = table_of(p, "selection")
    return {"keep": selection["keep"], "heavy": selection["heavy"]}


def _preset(p: Fields) -> Recorded:
    settings, model, method = table_of(p, "settings"), table_of(p, "model"), string_of(p, "method")
    options: dict[str, object] = {name: settings[name] for name in ("sink", "recent", "block")}
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
        options["seed"] = int(string_of(model, "revision").removeprefix("random:"))
    return Recorded("preset", options, () if method == COMPOSED else (method,), model=model)


def _combine(p: Fields, depth: int) -> Recorded:
    parts = [table_of(p, name) for name in ("keys", "values")]
    return Recorded(
        "combine",
        {},
        tuple(f"{part['bundle']}{SUFFIX}" for part in parts),
        inputs=tuple(_input(part["bundle"], part["sha256"], table_of(part, "provenance"), depth) for part in parts),
    )


def _fold(p: Fields, depth: int) -> Recorded:
    before = table_of(p, "folded_from")
    model = table_of(before, "model")
    unfolded = {name: value for name, value in p.items() if name != "folded_from"} | {"model": model}
    unfolded["tool"] = before.get("tool", p["tool"])
    output = table_of(p, "model")["name"]
    options: dict[str, object] = {"output": output, "dtype": before.get("dtype", "auto"), **_weights(model)}
    source = _input(before.get("bundle", "unfolded"), before["bundle_sha256"], unfolded, depth)
    return Recorded("fold", options, model=model, inputs=(source,))


def _input(name: object, sha256: object, provenance: Fields, depth: int) -> Input:
    inner = _recorded(provenance, str(name), depth + 1)
    if not isinstance(name, str):
        raise ValueError(f"bundle {name!r} is no name")
    if not isinstance(sha256, str):
        raise ValueError(f"sha256 {sha256!r} is none")
    return {"name": name, "sha256": sha256, "recorded": inner}
