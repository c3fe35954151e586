"""A build recipe: which bundles, of which models, by which methods and settings, and the gates they must pass. And the
lock file beside them: what each was made of, so that only what changed is made again. docs/pipeline.md has the schema.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import read_text, write_atomically

from .. import __version__
from ..models import hub
from ..models.files import weights_revision
from ..models.names import resolve
from ..models.weights import file_sha256
from ..text import sources
from .gates import Check, Limits
from .names import COMMANDS as COMMANDS
from .options import (
    BuiltOptions,
    EvalOptions,
    FitPredictorsOptions,
    PresetOptions,
    TuneThresholdsOptions,
    WeightsOptions,
)
from .scheme_file import GOVERNED, check_fields, read_toml, refuse_unknown, table_of, with_recipe
from .spec import Options

TOP = {"output": str, "defaults": dict, "models": dict, "bundles": dict, "gates": dict, "evaluation": dict}
OWN = ("method", "models", "matrix", "gates")  # keys of a bundle that are no options of its command
FROM_MODEL = ("model", "revision")
NOT_GIVEN = ("output", "json", "wide", "plot", "resume", "storage", "heartbeat", "name")  # the build's own affair
HOW = ("spill", "spill_dir", "layerwise")  # changes no byte
IN_IDENTITY = ("text", "other_text", "recipe", "device", "tasks_path", "random_weights")  # stated by content instead
PATHS = ("recipe", "tasks_path", "spill_dir")
MAYBE_PATHS = ("model", "text", "other_text")  # or a name: a path if there is one
EVALUATION = {"text": str, "column": str, "length": int, "windows": int, "step": int, "batch": int}
NAME = re.compile(r"[\w.+-]+")

Fields = Mapping[str, object]  # a table of a recipe, or a record of one: names and values
OptionsOf = Callable[[str, Fields], Options]  # kvcal.cli.defaults.options_of
DefaultsOf = Callable[[str], Mapping[str, object]]


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
        anything = {option for command in COMMANDS.values() for option in self._known(command)}
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

    def _known(self, command: str) -> list[str]:
        return [name for name in self.defaults_of(command) if name not in (*FROM_MODEL, *NOT_GIVEN)]

    def _entries(self, bundle: str) -> Iterator[Entry]:
        table, where = table_of(table_of(self.fields, "bundles"), bundle), f"bundles.{bundle}."
        method = self._method(bundle, table)
        names = ["keys", "values"] if method == "combine" else self._known(COMMANDS[method])
        named = ["preset"] if method == "preset" else []
        refuse_unknown(self.path, where, table, [*OWN, *named, *names])
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


# What a bundle is made of.


def model_identity(o: WeightsOptions) -> dict[str, object]:
    """The weights' revision and, of a folder, a hash of its other files: config and tokenizer decide bytes too."""
    source = resolve(o.model, o.revision)
    identity: dict[str, object] = {
        "name": source.stem,
        "revision": weights_revision(source, random_weights=o.random_weights, seed=o.seed),
    }
    if source.folder is not None:
        names = [*hub.TOKENIZER_FILES, "config.json"]
        files = [source.folder / name for name in dict.fromkeys(names) if (source.folder / name).is_file()]
        identity["files"] = files_sha256(files)
    return identity


def files_sha256(files: Iterable[Path]) -> str:
    """Over the names and hashes of files."""
    listed = [[path.name, file_sha256(path)] for path in files]
    return sha256_text(canonical(listed))


def text_identity(origin: str, column: str | None, earlier: Mapping[str, object] | None = None) -> dict[str, object]:
    """Where a text comes from and its content's hash; of a hub data set its commit, or, offline, the `earlier` one."""
    source = sources.resolve_text(origin, column=column)
    if source.dataset is not None:
        if not hub.reachable() and earlier is not None and earlier.get("source") == source.label:
            return dict(earlier)
        return {"source": source.label, "commit": sources.dataset_commit(source)}
    assert source.path is not None
    return {"source": source.label, "sha256": files_sha256(sources.source_files(source))}


def code_identity() -> dict[str, str]:
    """Versions, and a hash of the sources that can decide a byte: not of the command line, nor of reports."""
    import torch
    import transformers

    import kvcal
    import kvcal_artifacts
    import kvcal_kernels

    digest = hashlib.sha256()
    for package in (kvcal, kvcal_artifacts, kvcal_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(("cli/", "report/", "demo/")):
                digest.update(f"{package.__name__}/{name}\0{file_sha256(path)}\n".encode())
    return {
        "kvcal": __version__,
        "source": digest.hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def settings_identity(o: BuiltOptions) -> dict[str, object]:
    """Every option that may decide a byte and is not stated by content elsewhere."""
    left_out = {*FROM_MODEL, *NOT_GIVEN, *HOW, *IN_IDENTITY}
    settings: dict[str, object] = {name: value for name, value in o.by_name().items() if name not in left_out}
    if isinstance(o, TuneThresholdsOptions) and o.tasks_path is not None:
        settings["tasks"] = files_sha256(sorted(path for path in o.tasks_path.rglob("*") if path.is_file()))
    return dict(json.loads(json.dumps(settings, default=list)))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Why inputs that differ differ, in a few words."""
    lines = [
        f"the {name.replace('_', ' ')} changed" for name in ("model", "text", "other_text") if _changed(old, new, name)
    ]
    settings = (_inputs(old, "settings"), _inputs(new, "settings"))
    lines += [
        f"{name}: {settings[0].get(name)} -> {settings[1].get(name)}"
        for name in sorted({*settings[0], *settings[1]})
        if settings[0].get(name) != settings[1].get(name)
    ]
    code = (_inputs(old, "code"), _inputs(new, "code"))
    versions = [name for name in code[1] if name != "source" and code[0].get(name) != code[1][name]]
    lines += [f"{name} {code[0].get(name)} -> {code[1][name]}" for name in versions]
    if not versions and code[0] != code[1]:
        lines.append("kvcal's code changed")
    if _changed(old, new, "device"):
        lines.append(f"device {old.get('device')} -> {new.get('device')}")
    cpu = (_inputs(old, "cpu"), _inputs(new, "cpu"))
    lines += [
        f"the CPU's {name}: {cpu[0].get(name)} -> {cpu[1].get(name)}"
        for name in sorted({*cpu[0], *cpu[1]})
        if cpu[0].get(name) != cpu[1].get(name)
    ]
    lines += [f"the {name} part changed" for name in ("keys", "values") if _changed(old, new, name)]
    return "; ".join(lines) or "what it is made of changed"


def _inputs(fields: Mapping[str, object], name: str) -> dict[str, object]:
    """Inputs that are a table themselves; an empty one where there is none."""
    inputs = fields.get(name)
    return inputs if isinstance(inputs, dict) else {}


def _changed(old: Mapping[str, object], new: Mapping[str, object], name: str) -> bool:
    return bool(old.get(name) != new.get(name))


# The lock file.


@dataclass
class Lock:
    """bundles: name -> file, sha256, bytes, inputs, and key, a hash of the inputs. gates: name -> key, checks."""

    path: Path
    bundles: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)

    FORMAT = "kvcal build 1"

    @classmethod
    def read(cls, path: Path) -> Lock:
        try:
            content: object = json.loads(read_text(path))
            if not isinstance(content, dict):
                raise ValueError("no table")
            if content["format"] != cls.FORMAT:
                raise ValueError(f"format {content['format']!r}, not {cls.FORMAT!r}")
            _check_lock(content["bundles"], content["gates"])
            return cls(path, content["bundles"], content["gates"])
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise KVCalError(
                f"{path}: not a lock file of `kvcal build` ({why}); delete it to build all again"
            ) from error

    def write(self) -> None:
        content = {"format": self.FORMAT, "bundles": self.bundles, "gates": self.gates}
        text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        if not self.path.exists() or read_text(self.path) != text:
            write_atomically(self.path, text.encode())

    def keep_only(self, names: Collection[str]) -> list[str]:
        """Forget all others; returns their names."""
        gone = sorted({*self.bundles, *self.gates} - set(names))
        for name in gone:
            self.bundles.pop(name, None)
            self.gates.pop(name, None)
        return gone


ROW: dict[str, type] = {"file": str, "sha256": str, "bytes": int, "key": str, "inputs": dict}
GATED: dict[str, type] = {"key": str, "checks": list}
TABLES = ("model", "settings", "code", "text", "other_text", "cpu")  # inputs that are tables themselves


def _check_lock(bundles: object, gates: object) -> None:
    """Raise ValueError unless both hold what `Lock` says: people edit such files, and merges damage them."""
    built, gated = _rows("bundles", bundles, ROW), _rows("gates", gates, GATED)
    for name, row in built.items():
        inputs = table_of(row, "inputs")
        if wrong := [key for key in TABLES if not isinstance(inputs.get(key, {}), dict)]:
            raise ValueError(f"bundles.{name}.inputs.{wrong[0]} is no table")
    for name, row in gated.items():
        checks = row["checks"]
        for check in checks if isinstance(checks, list) else ():
            try:
                Check.of(check)
            except ValueError as error:
                raise ValueError(f"gates.{name}: {error}") from error


def _rows(part: str, rows: object, fields: Mapping[str, type]) -> dict[str, dict[str, object]]:
    """The tables of a part of the lock file, whose fields have these types. Raises ValueError."""
    if not isinstance(rows, dict):
        raise ValueError(f"{part} is no table")
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise ValueError(f"{part}.{name} is no table")
        if wrong := [key for key, kind in fields.items() if not isinstance(row.get(key), kind)]:
            raise ValueError(f"{part}.{name}.{wrong[0]} is {row.get(wrong[0])!r}")
    return rows


@dataclass(frozen=True)
class Planned:
    """why: it must be built; None: it is up to date."""

    entry: Entry
    path: Path
    inputs: dict[str, object]
    key: str
    why: str | None


def planned(entry: Entry, folder: Path, inputs: dict[str, object], lock: Lock) -> Planned:
    path, row = folder / entry.file, lock.bundles.get(entry.name)
    key = sha256_text(canonical(inputs))
    if row is None:
        why: str | None = "it is new" if not path.exists() else "the lock file does not know it"
    elif row["key"] != key:
        why = differences(row["inputs"], inputs)
    elif not path.is_file():
        why = "its file is missing"
    else:
        why = None if file_sha256(path) == row["sha256"] else "its file was changed"
    return Planned(entry, path, inputs, key, why)
