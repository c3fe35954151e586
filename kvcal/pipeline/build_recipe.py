"""The recipe of `kvcal build`, read and checked: which bundles, of which models, by which methods and settings, and the
gates they must pass. docs/pipeline.md has the schema.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.errors import UsageError

from .gates import Limits
from .names import COMMANDS
from .options import (
    FROM_MODEL,
    MAYBE_PATHS,
    NOT_IN_RECIPE,
    PATHS,
    BuiltOptions,
    EvalOptions,
    FitPredictorsOptions,
    PresetOptions,
)
from .scheme_file import GOVERNED, check_fields, read_toml, refuse_unknown, table_of, with_recipe
from .spec import DefaultsOf, Options, OptionsOf

TOP = {"output": str, "defaults": dict, "models": dict, "bundles": dict, "gates": dict, "evaluation": dict}
BUNDLE_KEYS = ("method", "models", "matrix", "gates")  # keys of a bundle that are no options of its command
EVALUATION = {"text": str, "column": str, "length": int, "windows": int, "step": int, "batch": int}
NAME = re.compile(r"[\w.+-]+")

Fields = Mapping[str, object]  # a table of a recipe, or a record of one: names and values


@dataclass(frozen=True)
class Entry:
    """One bundle to be. options: all of its method's command, read; None of a combination. parts: of that, names of two
    entries.
    """

    name: str
    model: str
    method: str
    options: BuiltOptions | None
    gates: Limits
    parts: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}{SUFFIX}"

    @property
    def built(self) -> BuiltOptions:
        """The options, of an entry that is no combination."""
        assert self.options is not None
        return self.options


@dataclass(frozen=True)
class BuildRecipe:
    """A read and checked file. evaluation: options of `kvcal eval` for the gates, by model."""

    path: Path
    output: Path
    entries: tuple[Entry, ...]
    evaluation: dict[str, EvalOptions]

    @property
    def lock(self) -> Path:
        return self.output / f"{self.path.stem}.lock.json"


def read_build_recipe(path: Path, options_of: OptionsOf, defaults_of: DefaultsOf) -> BuildRecipe:
    """Raises UsageError naming the file, the key, what it holds and what is allowed."""
    return _Reader(path, options_of, defaults_of).read()


class _Reader:
    def __init__(self, path: Path, options_of: OptionsOf, defaults_of: DefaultsOf) -> None:
        self.path, self.options_of, self.defaults_of = path, options_of, defaults_of
        self.fields = read_toml(path)

    def read(self) -> BuildRecipe:
        fields = self.fields
        check_fields(self.path, "", fields, TOP)
        for name in ("models", "bundles"):
            self._tables(name)
            if not fields.get(name):
                raise self._wrong(f"has no [{name}.NAME]: nothing to build")
        check_fields(self.path, "evaluation.", table_of(fields, "evaluation"), EVALUATION)
        refuse_unknown(self.path, "gates.", table_of(fields, "gates"), Limits.names())
        anything = {option for command in COMMANDS.values() for option in self._option_names(command)}
        refuse_unknown(self.path, "defaults.", table_of(fields, "defaults"), sorted(anything))
        models = table_of(fields, "models")
        for name in models:
            refuse_unknown(self.path, f"models.{name}.", table_of(models, name), sorted(anything | set(FROM_MODEL)))
        unsorted = [entry for bundle in table_of(fields, "bundles") for entry in self._entries(bundle)]
        order = list(models)  # one model after the other: the one in memory serves all its bundles
        entries = tuple(sorted(unsorted, key=lambda entry: order.index(entry.model)))
        self._check_names(entries)
        self._check_parts(entries)
        evaluation = {model: self._evaluation(model) for model in models}
        return BuildRecipe(self.path, self._folder / str(fields.get("output", ".")), entries, evaluation)

    @property
    def _folder(self) -> Path:
        return self.path.parent

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"recipe {self.path}: {what}")

    def _tables(self, name: str) -> None:
        for key, table in table_of(self.fields, name).items():
            if not isinstance(table, dict):
                raise self._wrong(f"{name}.{key} is {table!r}; it must be a table")
            if not NAME.fullmatch(key):
                raise self._wrong(f"{name}.{key}: names become file names: letters, digits, . + - and _ only")

    def _option_names(self, command: str) -> list[str]:
        return [name for name in self.defaults_of(command) if name not in (*FROM_MODEL, *NOT_IN_RECIPE)]

    def _entries(self, bundle: str) -> Iterator[Entry]:
        table, where = table_of(table_of(self.fields, "bundles"), bundle), f"bundles.{bundle}."
        method = self._method(bundle, table)
        names = ["keys", "values"] if method == "combine" else self._option_names(COMMANDS[method])
        named = ["preset"] if method == "preset" else []
        refuse_unknown(self.path, where, table, [*BUNDLE_KEYS, *named, *names])
        check_fields(self.path, where, {"matrix": table.get("matrix", {})}, {"matrix": dict})
        matrix = table_of(table, "matrix")
        refuse_unknown(self.path, f"{where}matrix.", matrix, [*named, *names])
        choices: dict[str, list[object]] = {}
        for name, values in matrix.items():
            if not isinstance(values, list) or not values:
                raise self._wrong(f"{where}matrix.{name} is {values!r}; it must be a list of what {name} may be")
            choices[name] = values
        options = {name: value for name, value in table.items() if name in (*named, *names)}
        check_fields(self.path, where, {"gates": table.get("gates", {})}, {"gates": dict})
        gates = self._gates(where, table_of(table, "gates"))
        for model in self._models(where, table.get("models")):
            for combination in itertools.product(*choices.values()):
                variant = dict(zip(choices, combination, strict=True))
                name = "-".join([model, bundle, *(_slug(option, value) for option, value in variant.items())])
                yield self._entry(name, model, method, options | variant, gates, where)

    def _method(self, bundle: str, table: Fields) -> str:
        matrix = table.get("matrix")
        names = {*table, *(matrix if isinstance(matrix, dict) else ())}
        has_preset = "preset" in names
        method = table.get("method", "preset" if has_preset else None)
        if method is None:
            raise self._wrong(f"bundles.{bundle} names no method; give method ({', '.join(COMMANDS)}) or preset")
        if not isinstance(method, str) or method not in COMMANDS:
            near = difflib.get_close_matches(str(method), COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
            raise self._wrong(f"bundles.{bundle}.method {method!r} is not known; {hint}")
        composed = "recipe" in table or {"keys", "values"} <= names
        if method == "preset" and not has_preset and not composed:
            raise self._wrong(f'bundles.{bundle} names no preset; give preset = "NAME", or keys and values, or recipe')
        return method

    def _models(self, where: str, value: object) -> list[str]:
        models = table_of(self.fields, "models")
        if value is None:
            return list(models)
        if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
            raise self._wrong(f"{where}models is {value!r}; it must be a list of names of [models.NAME]")
        if unknown := [name for name in value if name not in models]:
            raise self._wrong(f"{where}models: no [models.{unknown[0]}]; there are {', '.join(models)}")
        return value

    def _gates(self, where: str, table: Fields) -> Limits:
        refuse_unknown(self.path, f"{where}gates.", table, Limits.names())
        try:
            return Limits.of({**table_of(self.fields, "gates"), **table}, "gates.")
        except UsageError as error:
            raise self._wrong(str(error)) from error

    def _entry(self, name: str, model: str, method: str, options: Fields, gates: Limits, where: str) -> Entry:
        if method == "combine":
            if missing := {"keys", "values"} - set(options):
                raise self._wrong(f"{where}{sorted(missing)[0]} is missing: the name of another bundle here")
            parts = tuple(f"{model}-{options[role]}" for role in ("keys", "values"))
            return Entry(name, model, method, None, gates, parts)
        if "recipe" in options and (both := [option for option in options if option in GOVERNED]):
            raise self._wrong(f"{where}{both[0]}: {options['recipe']} says it too; leave one out")
        merged = self._with_model(COMMANDS[method], model, options) | dict(options)
        if method == "preset":
            merged |= {"name": merged.pop("preset")} if "preset" in merged else {}
        read = self._options(COMMANDS[method], merged, where)
        assert isinstance(read, BuiltOptions)
        return Entry(name, model, method, read, gates)

    def _with_model(self, command: str, model: str, options: Fields) -> dict[str, object]:
        """What [defaults] and [models.MODEL] say that the command has an option for, and that no scheme recipe
        decides.
        """
        table: Fields = {"model": model, **table_of(table_of(self.fields, "models"), model)}
        names = {*self.defaults_of(command)} - {*(GOVERNED if "recipe" in options else ())}
        return {
            name: value for name, value in ({**table_of(self.fields, "defaults"), **table}).items() if name in names
        }

    def _options(self, command: str, options: Fields, where: str) -> Options:
        placed = {name: self._placed(name, value) for name, value in options.items()}
        whole = {name for name, value in self.defaults_of(command).items() if type(value) is int}
        if odd := [name for name, value in options.items() if name in whole and isinstance(value, float)]:
            raise self._wrong(f"{where.rstrip('.')}: {odd[0]} is {options[odd[0]]!r}; it must be a whole number")
        try:
            read = self.options_of(command, placed)
            if isinstance(read, FitPredictorsOptions):
                return with_recipe(read, options)
            return with_recipe(read, options) if isinstance(read, PresetOptions) else read
        except UsageError as error:
            raise self._wrong(f"{where.rstrip('.')}: {error}") from error

    def _placed(self, name: str, value: object) -> object:
        """Files are meant from the recipe's folder."""
        if not isinstance(value, str) or name not in (*PATHS, *MAYBE_PATHS):
            return value
        there = self._folder / Path(value).expanduser()
        return str(there) if name in PATHS or (value.strip() and there.exists()) else value

    def _evaluation(self, model: str) -> EvalOptions:
        names = self.defaults_of("eval")
        table: dict[str, object] = {"model": model, **table_of(table_of(self.fields, "models"), model)}
        basic = {
            name: table[name] for name in (*FROM_MODEL, "random_weights", "seed", "dtype", "device") if name in table
        }
        options = {name: value for name, value in table_of(self.fields, "evaluation").items() if name in names}
        read = self._options("eval", basic | options, "evaluation")
        assert isinstance(read, EvalOptions)
        return read

    def _check_names(self, entries: Collection[Entry]) -> None:
        names = [entry.name for entry in entries]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise self._wrong(f"two bundles would be called {twice}{SUFFIX}; rename one")

    def _check_parts(self, entries: Collection[Entry]) -> None:
        """A combination takes what is no combination, or one listed before it."""
        ready = {entry.name for entry in entries if not entry.parts}
        for entry in entries:
            for part in entry.parts:
                if part not in ready:
                    near = difflib.get_close_matches(part, ready, 1)
                    hint = (
                        f"did you mean {near[0].removeprefix(entry.model + '-')}?" if near else "give a bundle's name"
                    )
                    raise self._wrong(f"{entry.name}: no bundle {part} to combine, or it comes later; {hint}")
            ready.add(entry.name)


def _slug(option: str, value: object) -> str:
    """A variant's part of a name: higgs-2, recent64, no-search."""
    if isinstance(value, bool):
        return option if value else f"no-{option}"
    text = str(value) if isinstance(value, str) else f"{option}{value}"
    return re.sub(r"[^\w.+-]+", "_", text).strip("_") or option
