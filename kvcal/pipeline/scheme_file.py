"""A compression scheme as a TOML file: codecs, windows, frame and predictor, instead of options.

frame = "pre_rope"
keys = "higgs-2-wide-debiased"        # or: codec = "..." for both
values = "uniform-2"

[layers]                              # exceptions; the last that names a layer holds
"0" = "higgs-4-wide-debiased"
"-1" = {values = "uniform-4"}

[windows]
sink = 4
recent = 128
block = 32

[predictor]                           # leave it out for none: `kvcal preset`, or codecs learned without predictors
kind = "linear"
keys = ["k1"]
values = ["v1", "k0"]
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import read_text

from .options import FitPredictorsOptions, PresetOptions

Recipes = TypeVar("Recipes", FitPredictorsOptions, PresetOptions)

TOP = {"frame": str, "codec": str, "keys": str, "values": str, "layers": dict, "windows": dict, "predictor": dict}
WINDOWS = {"sink": int, "recent": int, "block": int}
PREDICTOR = {
    "kind": str,
    "keys": list,
    "values": list,
    "rank": int,
    "ridge": float,
    "quantiser_agnostic": bool,
    "mlp_epochs": int,
}
OPTIONS = {"kind": "predictor", "keys": "key_inputs", "values": "value_inputs"}  # where an option's name differs
GOVERNED = (
    *("backbone", "first_layer", "keys", "values", "per_layer", "frame", *WINDOWS),
    *("predictor", "rank", "key_inputs", "value_inputs", "ridge", "quantiser_agnostic", "mlp_epochs"),
)


@dataclass(frozen=True)
class Recipe:
    """A read and checked file."""

    path: Path
    fields: dict[str, object]

    @property
    def predicts(self) -> bool:
        return "predictor" in self.fields

    @property
    def option_names(self) -> set[str]:
        """Names of the options that its [predictor] gives, be it at their default."""
        return {OPTIONS.get(name, name) for name in table_of(self.fields, "predictor")}

    def options(self) -> dict[str, Any]:
        """The options of `kvcal fit-predictors` that it stands for; others keep their defaults."""
        fields = self.fields
        options: dict[str, object] = {name: fields[name] for name in ("frame", "keys", "values") if name in fields}
        if "codec" in fields:
            options["backbone"] = fields["codec"]
        if not self.predicts:
            options |= {"key_inputs": "none", "value_inputs": "none"}
        options["per_layer"] = [
            text for layers, codec in table_of(fields, "layers").items() for text in _exception(layers, codec)
        ]
        if fields.get("keys") or fields.get("values") or "codec" in fields:
            options["first_layer"] = ""  # a recipe names all its codecs
        options |= table_of(fields, "windows")
        for name, value in table_of(fields, "predictor").items():
            options[OPTIONS.get(name, name)] = ",".join(value) or "none" if isinstance(value, list) else value
        return options

    def plain(self) -> dict[str, Any]:
        """The options of `kvcal preset` that it stands for, which needs no data. Raises UsageError if it predicts
        layers.
        """
        if self.predicts:
            raise UsageError(
                f"recipe {self.path}: has a [predictor], which is fitted to text: use `kvcal fit-predictors`"
            )
        options = self.options()
        codec = options.get("backbone")
        filled = {"keys": codec, "values": codec} | options
        return {name: filled[name] for name in ("keys", "values", "frame", "per_layer", *WINDOWS) if name in filled}


def table_of(fields: Mapping[str, object], name: str) -> dict[str, object]:
    """The table of that name, whose type `check_fields` has checked; an empty one where there is none."""
    table = fields.get(name, {})
    assert isinstance(table, dict)
    return table


def _exception(layers: str, codec: object) -> list[str]:
    """Exceptions for layers as --per-layer takes them. codec: a name, or a table of keys and values."""
    if not isinstance(codec, dict):
        return [f"{layers}={codec}"]
    return [f"{layers}:{role}={name}" for role, name in codec.items()]


def read_recipe(path: Path) -> Recipe:
    """Raises UsageError naming the file, what it holds and what is allowed."""
    fields = read_toml(path)
    check_fields(path, "", fields, TOP)
    check_fields(path, "windows.", table_of(fields, "windows"), WINDOWS)
    check_fields(path, "predictor.", table_of(fields, "predictor"), PREDICTOR)
    for layers, codec in table_of(fields, "layers").items():
        if not isinstance(codec, str):
            if not isinstance(codec, dict):
                raise UsageError(
                    f"recipe {path}: layers.{layers} is {codec!r}; a codec's name, or a table of keys and values"
                )
            check_fields(path, f"layers.{layers}.", codec, {"keys": str, "values": str})
    if "codec" not in fields and not ("keys" in fields and "values" in fields):
        raise UsageError(f"recipe {path}: names no codec; give codec, or keys and values")
    return Recipe(path, fields)


def read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"recipe {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {path}: not TOML ({error})") from error


def refuse_unknown(path: Path, where: str, names: Iterable[str], names_allowed: Collection[str]) -> None:
    """Raise UsageError for the first name that is not known, naming the nearest one that is."""
    for name in names:
        if name not in names_allowed:
            near = difflib.get_close_matches(name, names_allowed, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names_allowed)}"
            raise UsageError(f"recipe {path}: unknown key {where}{name}; {hint}")


def check_fields(path: Path, where: str, fields: Mapping[str, object], types: Mapping[str, type]) -> None:
    """Every name known, every value of its type; raises UsageError."""
    refuse_unknown(path, where, fields, types)
    for name, value in fields.items():
        kind = types[name]
        good = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not good or (kind in (int, float) and isinstance(value, bool)):
            raise UsageError(f"recipe {path}: {where}{name} is {value!r}; it must be {_kind(kind)}")


def _kind(kind: type) -> str:
    names = {
        str: "text",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a table",
        bool: "true or false",
    }
    return names[kind]


def with_recipe(o: Recipes, typed: Collection[str]) -> Recipes:
    """Options with those of `--recipe` in place. typed: names of those that somebody gave, be it at their default; one
    that the recipe governs may not be among them: UsageError.
    """
    if o.recipe is None:
        return o
    for name in GOVERNED:
        if name in typed:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} and --recipe both say what to store: put it into the recipe")
    if isinstance(o, PresetOptions) and o.name is not None:
        raise UsageError(f"{o.name} and --recipe {o.recipe} both say what to store: leave one out")
    recipe = read_recipe(o.recipe)
    return replace(o, **(recipe.plain() if isinstance(o, PresetOptions) else recipe.options()))
