"""`kvcal reproduce`: run a bundle's recorded command again and compare. Of the commands one is imported, the recorded.

`kvcal card` checks a record by the same functions.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcal_artifacts.bundle import SUFFIX, load_bundle
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import read_bytes

from ..bundles.diff import diff
from ..bundles.paths import bundle_at, refuse_name
from ..bundles.provenance import Recorded, checked_options, recorded
from ..bundles.record_checks import LOCAL, check_threads, tasks_of
from ..models import configuration, names
from ..models.catalogue import CATALOGUE
from ..pipeline.options import (
    FitNormsOptions,
    FitPredictorsOptions,
    MeasureSubspacesOptions,
    PresetOptions,
    TrainCodebooksOptions,
    TuneBitsOptions,
    TuneThresholdsOptions,
)
from ..pipeline.spec import DefaultsOf, OptionsOf
from ..pipeline.spec import Options as CommandOptions
from ..report.outputs import check_output
from ..text.sources import EMBEDDED
from .bundles import file_sha256
from .options import FoldOptions, ReproduceOptions

if TYPE_CHECKING:
    from .common import Say

RUNS = (  # commands that `run_again` knows
    "fit-predictors",
    "fit-norms",
    "fold",
    "measure-subspaces",
    "preset",
    "train-codebooks",
    "tune-bits",
    "tune-thresholds",
)
OF_MODEL = ("measure-subspaces", "train-codebooks")  # the model's geometry decides on their options as well
INPUTS = ("text.", "other_text.", "model.", "keys.sha256", "values.sha256", "folded_from.bundle_sha256")
ENVIRONMENT = ("tool", "versions.", "device", "cpu.")


def run_reproduce(o: ReproduceOptions, defaults_of: DefaultsOf, options_of: OptionsOf, say: Say) -> dict[str, Any]:
    """The command and what differs: {"command", "same", "inputs", "environment", ...} with the sections of
    kvcal.bundles.diff.

    Nothing in the bundle says what is read: a local text, model or folder of tasks is taken from the caller's options
    alone. Raises KVCalError where the provenance names what its command has no option for, or no such value: it is a
    file's content.
    """
    path = o.bundle
    original = bundle_at(path)
    was = recorded(original)
    check_command(was, defaults_of, options_of)
    line = was.line(defaults_of(was.command))
    if o.output is not None:
        check_output(o.output)
        if o.output.resolve() == path.resolve():
            raise UsageError(f"--output {o.output} is the bundle itself: give another name")
    for text in o.text or []:
        if not Path(text).expanduser().exists():
            raise UsageError(f"--text {text}: no such file or folder")
    check_inputs(was, o.input or [])
    check_tasks(was, o.tasks_path)
    with tempfile.TemporaryDirectory(prefix="kvcal-reproduce-") as folder:
        places = Places(Path(folder), o.model, list(o.text or []), list(o.input or []), o.device, o.tasks_path)
        remade, rerun = o.output or Path(folder) / path.name, Rerun(places, defaults_of, options_of, say)
        with places.with_typed_paths():
            rerun.check_places(was)
            say(f"again: {line}")
            rerun.make(was, remade)
        differences = diff(original, load_bundle(remade), same_bytes=read_bytes(path) == read_bytes(remade))
        digests = {"sha256": file_sha256(path), "again_sha256": file_sha256(remade)}
    settings = differences["settings"]
    return {
        "bundle": str(path),
        "command": line,
        **digests,
        "same": differences["same"],
        "tensors_same": not (differences["tensors"] or differences["codecs"] or differences["scheme"]),
        "inputs": differences["model"] + [row for row in settings if row["what"].startswith(INPUTS)],
        "environment": [row for row in settings if row["what"].startswith(ENVIRONMENT)],
        **{name: value for name, value in differences.items() if name != "same"},
    }


def check_command(was: Recorded, defaults_of: DefaultsOf, options_of: OptionsOf) -> None:
    """KVCalError where a recorded command, or one of a bundle that it reads, is none that its user could have run.

    Comes before any of the command is printed or run: what a stranger recorded would stand there as advice of ours.
    """
    for one in was.inputs:
        check_command(one["recorded"], defaults_of, options_of)
    options = checked_options(was, defaults_of, options_of)
    check_threads(was.cpu.get("threads"))
    with _taken(was):
        check_alone(options)


def run_again(o: CommandOptions, say: Say) -> None:
    """Run the command whose options these are."""
    match o:
        case FitPredictorsOptions():
            from .fit_predictors import run_fit_predictors

            run_fit_predictors(o, say)
        case FitNormsOptions():
            from .fit_norms import run_fit_norms

            run_fit_norms(o, say)
        case FoldOptions():
            from .fold import run_fold

            run_fold(o, say)
        case MeasureSubspacesOptions():
            from .measure_subspaces import run_measure_subspaces

            run_measure_subspaces(o, say)
        case PresetOptions():
            from .preset import run_preset

            run_preset(o, say)
        case TrainCodebooksOptions():
            from .train_codebooks import run_train_codebooks

            run_train_codebooks(o, say)
        case TuneBitsOptions():
            from .tune_bits import run_tune_bits

            run_tune_bits(o, say)
        case TuneThresholdsOptions():
            from .tune_thresholds import run_tune_thresholds

            run_tune_thresholds(o, say)
        case _:
            raise TypeError(type(o).__name__)


def check_alone(o: CommandOptions | None) -> None:
    """Check what a command reads from its options first, where the model decides nothing. Raises UsageError."""
    match o:
        case FitPredictorsOptions():
            from .fit_predictors import aqua_method

            aqua_method(o)
        case FitNormsOptions():
            from .fit_norms import innerq_method

            innerq_method(o)
        case PresetOptions():
            from .preset import preset_of

            preset_of(o)
        case TuneBitsOptions():
            from .tune_bits import kvtuner_method

            kvtuner_method(o)
        case TuneThresholdsOptions():
            from .tune_thresholds import mixkvq_method, search_settings

            search_settings(o)
            mixkvq_method(o)


def check_with_model(o: CommandOptions | None, model: str) -> None:
    """What a command of OF_MODEL makes of its options and the model's geometry; raises UsageError."""
    match o:
        case MeasureSubspacesOptions():
            from .measure_subspaces import squat_method

            squat_method(o, names.resolve(model, o.revision))
        case TrainCodebooksOptions():
            from .train_codebooks import vqkv_method

            vqkv_method(o, configuration.geometry(names.resolve(model, o.revision)))


@contextmanager
def _taken(was: Recorded) -> Iterator[None]:
    """Report a UsageError within as one of the record's values."""
    try:
        yield
    except UsageError as error:
        raise KVCalError(f"provenance is not what `kvcal {was.command}` takes: {error}") from error


def check_inputs(was: Recorded, paths: Sequence[Path]) -> None:
    """Raise UsageError where bundles are read and none of those on the command line is one of them.

    All would be built again without notice.
    """
    for path in paths:
        refuse_name(path)
    needed = list(_inputs(was))
    if paths and needed and not {file_sha256(path) for path in paths} & {one["sha256"] for one in needed}:
        names = ", ".join(f"{one['name']} (sha256 {one['sha256'][:16]}…)" for one in needed)
        raise UsageError(f"--input {paths[0]}: the bundle was made from {names}; give one of them, or leave it out")


def check_tasks(was: Recorded, folder: Path | None) -> None:
    """Raise UsageError for a folder of tasks that is none, or that nothing would read."""
    if folder is None:
        return
    if not folder.is_dir():
        raise UsageError(f"--tasks-path {folder}: no such folder")
    if not tasks_of(was.options):
        raise UsageError("--tasks-path applies only to a recorded objective of tasks, and there is none: leave it out")


def _inputs(was: Recorded) -> Iterator[Mapping[str, Any]]:
    for one in was.inputs:
        yield one
        yield from _inputs(one["recorded"])


@dataclass
class Places:
    """Where things lie now, as the caller says. texts, inputs: paths as given. tasks: a folder of files for lm-eval.

    folder: for links under the names of the record.
    """

    folder: Path
    model: str | None
    texts: list[str]
    inputs: list[Path]
    device: str | None
    tasks: Path | None = None
    typed: dict[str, str] = field(default_factory=dict)  # place of a link -> what it leads to, as given

    def model_of(self, was: Recorded) -> str:
        """What --model takes; a local folder under its recorded name."""
        name, kind = was.model["name"], was.model["kind"]
        if kind != "folder":
            if self.model is not None:
                raise UsageError(
                    f"--model {self.model}: the bundle was made from {name}, which has one place; leave it out"
                )
            if name not in CATALOGUE:
                _refuse_local("model", name)
            return str(name)
        if self.model is None:
            raise UsageError(
                f"made from a model folder called {name} (weights {was.model['revision']}): say where it is with "
                "--model",
            )
        return str(self._linked(Path(self.model).expanduser(), name))

    def text_of(self, label: str | None) -> str | None:
        """What --text takes; a local file or folder by its recorded name, or the only one on the command line."""
        if label is None or label in EMBEDDED:
            return label
        if not label.startswith(LOCAL):
            _refuse_local("text", label)
            return label
        name = label.partition(":")[2]
        named = [text for text in self.texts if Path(text).expanduser().resolve().name == name]
        paths = named or (self.texts if len(self.texts) == 1 else [])
        if not paths:
            raise UsageError(f"made from {label}: say where that text is with --text (its hash is checked)")
        return str(self._linked(Path(paths[0]).expanduser(), name))

    def input_of(self, sha256: str) -> Path | None:
        return next((path for path in self.inputs if file_sha256(path) == sha256), None)

    @contextmanager
    def with_typed_paths(self) -> Iterator[None]:
        """Errors from within name a text or model as the caller does, not the link to it."""
        try:
            yield
        except KVCalError as error:
            line = str(error)
            for place, path in self.typed.items():
                line = line.replace(place, path)
            error.args = (line, *error.args[1:])
            raise

    def _linked(self, path: Path, name: str) -> Path:
        """A link called `name`; of a folder a real folder with links in it, because names of folders are resolved."""
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        place = Path(tempfile.mkdtemp(dir=self.folder)) / name
        self.typed[str(place)] = str(path)
        if path.is_file():
            place.symlink_to(path.resolve())
            return place
        shutil.copytree(path.resolve(), place, copy_function=lambda a, b: os.symlink(Path(a).resolve(), b))
        return place


def _refuse_local(what: str, name: str) -> None:
    """UsageError where a recorded name of the hub's would be taken for a file or folder that lies here."""
    if Path(name).exists():
        raise UsageError(
            f"made from the hub's {what} {name}, and {Path(name).resolve()} lies here, which would be taken for it: "
            "run this in another folder"
        )


@dataclass
class Rerun:
    """Runs recorded commands, and first those that wrote what they read."""

    places: Places
    defaults_of: DefaultsOf
    options_of: OptionsOf
    say: Say

    def check_places(self, was: Recorded) -> None:
        """Check, before anything is printed or run, that what will be read has a place.

        Raises UsageError where a text or model that will be read has no place yet. Raises KVCalError for recorded
        values that the model's geometry rules out.
        """
        for one in was.inputs:
            if self.places.input_of(one["sha256"]) is None:
                self.check_places(one["recorded"])
        if was.command == "combine":
            return
        model = self.places.model_of(was)
        self._texts(was, self.defaults_of(was.command))
        if was.command in OF_MODEL:
            options = checked_options(was, self.defaults_of, self.options_of)
            with _taken(was):
                check_with_model(options, model)

    def make(self, was: Recorded, output: Path) -> None:
        checked = checked_options(was, self.defaults_of, self.options_of)
        inputs = [self._input(one) for one in was.inputs]
        with _threads(was.cpu.get("threads"), self.say):
            if checked is None:
                from .combine import run_combine

                run_combine(inputs[0], inputs[1], output)
                return
            changes: dict[str, Any] = {"model": self.places.model_of(was)}
            if was.command == "fold":
                place = Path(tempfile.mkdtemp(dir=self.places.folder)) / was.options["output"]
                changes |= {"bundle": inputs[0], "output": place, "bundle_output": output}
            else:
                changes |= {"output": output} | self._texts(was, checked.by_name())
            if self.places.device is not None and "device" in checked.by_name():
                changes["device"] = self.places.device
            if tasks_of(checked.by_name()):
                changes["tasks_path"] = self.places.tasks
            run_again(replace(checked, **changes), self._say)

    def _texts(self, was: Recorded, options: Collection[str]) -> dict[str, str]:
        """The texts of a record where they lie now. options: names of those that the command has."""
        texts = {"text": self.places.text_of(was.text), "other_text": self.places.text_of(was.other_text)}
        return {name: place for name, place in texts.items() if place is not None and name in ("text", *options)}

    def _say(self, line: str) -> None:
        if not line.startswith("text: "):  # it would name a link of ours
            self.say(line)

    def _input(self, one: Any) -> Path:
        """A bundle that the command read: as given, else made again; under the name that it had."""
        place = Path(tempfile.mkdtemp(dir=self.places.folder)) / f"{one['name']}{SUFFIX}"
        if (path := self.places.input_of(one["sha256"])) is not None:
            shutil.copyfile(path, place)
            return place
        self.say(f"first {one['name']}: {one['recorded'].line(self.defaults_of(one['recorded'].command))}")
        self.make(one["recorded"], place)
        if (digest := file_sha256(place)) != one["sha256"]:
            self.say(
                f"note: {one['name']} came out with sha256 {digest[:16]}…, recorded is {one['sha256'][:16]}…; "
                "with the file itself: --input FILE"
            )
        return place


@contextmanager
def _threads(count: int | None, say: Say) -> Iterator[None]:
    """Take as many threads as the recorded run, of those that this machine has cores for: how sums are split decides
    their last bits.
    """
    before = torch.get_num_threads()
    check_threads(count)
    if count is not None:
        cores = os.cpu_count() or 1
        if count > cores:
            say(f"note: recorded with {count} threads, run with {cores}, this machine's cores: last bits may differ")
        torch.set_num_threads(min(count, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)
