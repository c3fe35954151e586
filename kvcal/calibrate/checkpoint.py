"""What a long command stores while it runs, so that a killed one goes on: a folder for each set of settings.

Next to the output, where there is one: `.OUTPUT.partial`. Else partial/COMMAND-KEY in the folder of preflight.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from kvcal_artifacts.bundle import Bundle, Fingerprint, load_bundle
from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.files import is_temporary, kind_of, read_text, write_atomically
from kvcal_artifacts.paths.preflight import verdicts
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_artifacts.shown import message

from ..capture.ranks import RankEndedError, current
from ..methods.base import Method
from ..report.outputs import check_output

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

SETTINGS = "settings.json"
DAYS = 30  # after which nobody is expected to go on with a killed run that has no output
REMOVERS = 8  # threads that remove files: the system takes 60 ms a gigabyte
DIGITS = 20  # of a hash in a file's name
KEY = re.compile(r"[0-9a-f]{64}")
OF_A_COMMAND = re.compile(rf"[a-z]+(-[a-z]+)*-[0-9a-f]{{{DIGITS}}}")  # names that `in_cache` gives
# Names of what runs keep, for a folder whose settings are damaged or were not written yet.
NAMES = re.compile(
    r"settings\.json|layer-\d{4}\.safetensors|vectors\.\d{4}\.safetensors|[\w.-]+-\d{3}\.safetensors|"
    r"(row|rows|windows)-[\w.-]+\.json|\.?fit-[0-9a-f]+\.(kvcal\.)?safetensors(\.partial)?"
)


def partial_folder(output: Path) -> Path:
    return output.parent / f".{output.name}.partial"


def in_cache(command: str, key: str) -> Path:
    return verdicts.folder() / "partial" / f"{command}-{short(key)}"


def short(key: str) -> str:
    """A text that is any length, for a file's name."""
    return sha256_text(key)[:DIGITS]


def check_ours(folder: Path, names: re.Pattern[str] = NAMES) -> None:
    """Raise KVCalError where `folder` has something that is no checkpoint: it would be written into, and removed.

    A run's folder has our settings in it, or nothing but files of these names and temporary ones.
    """
    try:
        mode = os.lstat(folder).st_mode
        entries = sorted(entry.name for entry in os.scandir(folder)) if stat.S_ISDIR(mode) else []
    except FileNotFoundError:
        return
    except OSError as error:
        raise KVCalError(f"{folder}: cannot be read ({error.strerror or error}); move it away") from error
    if not stat.S_ISDIR(mode):
        kind = "a link" if stat.S_ISLNK(mode) else kind_of(mode)
        raise KVCalError(f"{folder} is {kind}, where kvcal keeps a folder for a killed run: move it away")
    if stored_key(folder) is not None:
        return
    if foreign := [name for name in entries if not (names.fullmatch(name) or is_temporary(name))]:
        raise KVCalError(
            f"{folder} holds {foreign[0]}, which kvcal did not make, and would be removed: move the folder away, or "
            "give "
            "another --output"
        )


def check_partial(output: Path) -> None:
    """Raise KVCalError, before any work, where what lies in the place of an output's folder for a killed run is not
    ours.
    """
    check_ours(partial_folder(output))


def stored_key(folder: Path) -> str | None:
    """The key of the settings that a run wrote there; None where there are none, or damaged ones.

    Raises KVCalError where the settings are a pipe or a device, say.
    """
    key = _stored(folder).get("key")
    return key if isinstance(key, str) and KEY.fullmatch(key) else None


def _stored(folder: Path) -> dict[str, object]:
    """What a run wrote of its settings; empty where it wrote none, or where they are damaged."""
    place = folder / SETTINGS
    try:
        stored = json.loads(read_text(place))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise KVCalError(f"{place}: cannot be read ({error.strerror or error}): move it away") from error
    except (ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _difference(before: object, now: object, name: str = "") -> str | None:
    """The first setting of two that differs, with both values, as `cpu.threads was 2, is 1`; None where none does."""
    if isinstance(before, dict) and isinstance(now, dict):
        differences = (
            _difference(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
            for key in dict.fromkeys((*now, *before))
        )
        return next(filter(None, differences), None)
    return None if before == now else f"{name} was {before!s:.60}, is {now!s:.60}"


class CheckpointFolder:
    """Files in `folder` for the settings `record` (as JSON); those of a run with another record are removed.

    resume: False removes those of the same record, too. Raises KVCalError where the folder is not one of ours.
    """

    def __init__(self, folder: Path, record: object, resume: bool) -> None:
        self.folder, text = folder, canonical(record)
        self.key = sha256_text(text)
        self._settings = {"key": self.key, "record": json.loads(text)}
        check_ours(self.folder)
        if self.folder.exists() and (not resume or stored_key(self.folder) != self.key):
            why = "is of other settings" if resume else "is not wanted"
            before = _stored(self.folder).get("record")
            if resume and before is not None and (named := _difference(before, self._settings["record"])):
                why += f" ({named})"
            print(message(f"kvcal: {self.folder} {why}; starting anew"), file=sys.stderr)
            shutil.rmtree(self.folder)

    def place(self, name: str) -> Path:
        """Return the path of a file of that name, and create its folder. Raises KVCalError or OSError where
        there can be none.
        """
        self.folder.mkdir(exist_ok=True)
        if not (self.folder / SETTINGS).exists():
            write_atomically(self.folder / SETTINGS, json.dumps(self._settings).encode())
        return self.folder / name

    def remove(self) -> None:
        with ThreadPoolExecutor(REMOVERS) as threads:  # gigabytes of vectors
            list(threads.map(_unlink, self.folder.glob("*")))
        shutil.rmtree(self.folder, ignore_errors=True)


def _unlink(path: Path) -> None:
    """Remove a file, if that can be."""
    with suppress(OSError):
        path.unlink()


class CommandCheckpoint(CheckpointFolder):
    """JSON values by name, with a hash each, of a command that writes figures and no bundle.

    A folder that cannot be written costs the resumption, not the run: one warning says so.
    """

    def __init__(
        self, command: str, record: object, *, output: Path | None, resume: bool, say: Callable[[str], None]
    ) -> None:
        key = [command, record]
        folder = in_cache(command, canonical(key)) if output is None else partial_folder(output)
        if output is None:
            _forget(folder.parent)
        super().__init__(folder, key, resume)
        self._say, self._able, self.written = say, True, set[str]()  # written: names of this run's values

    def read(self, name: str) -> Any:
        """The value of that name; None where there is none, or a damaged one."""
        try:
            saved = json.loads(read_text(self.folder / f"{name}.json"))
            return saved["value"] if saved["sha256"] == _hash(saved["value"]) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def named(self, start: str) -> Iterator[Any]:
        """All values whose names start so."""
        values = (self.read(path.stem) for path in sorted(self.folder.glob(f"{start}*.json")))
        return (value for value in values if value is not None)

    def keep(self, name: str, value: object) -> None:
        if (path := self.file(f"{name}.json")) is None:
            return
        self.written.add(name)
        saved = {"value": value, "sha256": _hash(value)}
        self._tried(lambda: write_atomically(path, json.dumps(saved).encode()))

    def file(self, name: str) -> Path | None:
        """Like `place`, but None where nothing can be stored."""
        return self._tried(lambda: self.place(name))

    def place(self, name: str) -> Path:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return super().place(name)

    def drop(self, *names: str) -> None:
        """Files and folders that are no longer needed; and all, if no other is left but what was cut off while
        written.
        """
        for name in names:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not self._holds_work():
            self.remove()

    def _holds_work(self) -> bool:
        """Whether anything is stored but the settings and what was cut off while written."""
        return any(path.name != SETTINGS and path.suffix != ".tmp" for path in self.folder.glob("*"))

    @contextmanager
    def until_done(self) -> Iterator[None]:
        """Keep what is stored within the block only for a run that is killed: it is removed at the end, and after an
        error that would come again.
        """
        try:
            yield
        except RankEndedError:
            raise
        except KVCalError:
            self.remove()
            raise
        self.remove()

    @contextmanager
    def until_out(self, then: str = "the same command writes it without measuring") -> Iterator[None]:
        """Remove the checkpoint when the block has written the result, and when a reader of it closed early (`| head`).
        Any other failure leaves it for the same command, and says so; a checkpoint that stores nothing is removed.
        then: what that command does.
        """
        try:
            yield
        except (BrokenPipeError, SystemExit):  # the second is what rich makes of the first
            self.remove()
            raise
        except BaseException:
            if not self._holds_work():
                self.remove()
            elif self._able:
                self._say(f"note: what was measured is kept in {self.folder}; {then}")
            else:
                self._say(
                    f"note: a part of what was measured is kept in {self.folder}; the same command goes on from it"
                )
            raise
        self.remove()

    def _tried(self, write: Callable[[], Path | None]) -> Path | None:
        if not self._able:
            return None
        try:
            return write()
        except (OSError, KVCalError) as error:
            self._able = False
            self._say(f"note: nothing is kept for a run that goes on from a killed one: {error}")
            return None


class FollowersCommandCheckpoint(CommandCheckpoint):
    """The checkpoint of a rank that stores nothing, because rank 0 does, and sends it what is stored."""

    def __init__(self, command: str, record: object, *, output: Path | None, say: Callable[[str], None]) -> None:
        key = canonical([command, record])
        self.folder, self.key = in_cache(command, key) if output is None else partial_folder(output), sha256_text(key)
        self._say, self._able, self.written = say, False, set()

    def read(self, name: str) -> Any:
        return None

    def named(self, start: str) -> Iterator[Any]:
        return iter(())

    def file(self, name: str) -> Path | None:
        return None

    def drop(self, *names: str) -> None: ...

    def remove(self) -> None: ...


def command_checkpoint(
    command: str, record: Mapping[str, Json], *, output: Path | None, resume: bool, say: Callable[[str], None]
) -> CommandCheckpoint:
    """The checkpoint of a command of figures; of the ranks that share it rank 0 keeps one, and the others nothing.

    Raises UsageError where a rank has another record than rank 0.
    """
    ranks = current()
    ranks.check_same({name: json.loads(canonical(value)) for name, value in record.items()})
    if ranks.rank:
        return FollowersCommandCheckpoint(command, record, output=output, say=say)
    return CommandCheckpoint(command, record, output=output, resume=resume, say=say)


def _hash(value: object) -> str:
    """Figures may be NaN, which `canonical` refuses."""
    return sha256_text(json.dumps(value, sort_keys=True))


def _forget(folder: Path) -> None:
    """Remove what nobody went on with, and nothing that no run made."""
    for old in folder.glob("*"):
        with suppress(OSError, KVCalError):  # another process may be at it
            if OF_A_COMMAND.fullmatch(old.name) and old.lstat().st_mtime < time.time() - DAYS * 86400:
                check_ours(old)
                shutil.rmtree(old)


class EvaluationState(TypedDict):
    """How far an evaluation came, as JSON has it. windows: how many are done; sums: over their tokens, by row; watched:
    what was observed in the caches of rows.
    """

    windows: int
    sums: dict[str, dict[str, Any]]
    watched: NotRequired[dict[str, Mapping[str, Any]]]


class BatchCheckpoint:
    """A kvcal.evaluate.perplexity.Batches in `work` under `name`, which says where it goes on. label: what is measured;
    windows: of the text. resumed: how many of them were there.
    """

    def __init__(
        self, work: CommandCheckpoint, name: str, label: str, windows: int, say: Callable[[str], None]
    ) -> None:
        self._work, self._name, self._label, self._windows, self._say = work, name, label, windows, say
        self.resumed = 0

    def load(self) -> EvaluationState | None:
        """The state as `keep` last stored it; None: there is none."""
        saved: EvaluationState | None = self._work.read(self._name)
        if saved is not None and self._name not in self._work.written:
            self.resumed = saved["windows"]
            self._say(
                f"{self._label}: resuming after {self.resumed} of {self._windows} windows from {self._work.folder}"
            )
        return saved

    def keep(self, state: EvaluationState) -> None:
        self._work.keep(self._name, state)


class LayerCheckpoint(CheckpointFolder):
    """A hidden folder next to the output: one small bundle per fitted layer, for one set of settings.

    A layer is written while the next one is fitted: a run that is killed loses that file, and the layer at hand.
    """

    _writing: Future[None] | None = None  # the file that is being written

    def __init__(self, output: Path, record: Mapping[str, Json], resume: bool) -> None:
        check_output(output)
        super().__init__(partial_folder(output), record, resume)

    def layers(self, compressed: Sequence[int]) -> dict[int, Bundle]:
        """Fitted layers of these, up to the first that is missing or damaged."""
        bundles: dict[int, Bundle] = {}
        for index in compressed:
            path = self._path(index)
            if not path.exists():
                break
            try:
                bundles[index] = load_bundle(path, whole=False)
            except KVCalError:
                path.unlink()
                break
        return bundles

    def save(self, index: int, method: Method, pair: LayerCodecs, metrics: dict[str, float]) -> None:
        """Keep a fitted layer: it is hashed and written meanwhile. Raises as `settle` where the one before it could
        not be written.
        """
        lone = Scheme(method.windows, method.frame, (pair,))
        nothing = Fingerprint("layer", 1, pair.key.shape.heads, pair.key.shape.dim, {}, "")
        bundle = Bundle(nothing, lone, {"layer": index}, metrics)
        self.write_meanwhile(lambda: bundle.write(self.place(self._path(index).name)))

    def write_meanwhile(self, write: Callable[[], object]) -> None:
        """Let a thread write one file, when the one before it is on disk. Raises as `settle` does of that one."""
        self.settle()
        writing: Future[None] = Future()
        try:
            Thread(target=_settled, args=(writing, write)).start()
        except RuntimeError:  # no thread can be started
            _settled(writing, write)
        self._writing = writing

    def settle(self) -> None:
        """Wait until everything kept is on disk. Raises OSError or KVCalError where it could not be written."""
        waiting, self._writing = self._writing, None
        if waiting is not None:
            waiting.result()

    def remove(self) -> None:
        with suppress(OSError, KVCalError):
            self.settle()
        super().remove()

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:04d}.safetensors"


def _settled(future: Future[None], work: Callable[[], object]) -> None:
    """Let the future end as the work does."""
    try:
        work()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


class FollowersCheckpoint(LayerCheckpoint):
    """The checkpoint of a rank that keeps nothing, because rank 0 does; what it has done it hears from that one."""

    def __init__(self, output: Path, record: Mapping[str, Json]) -> None:
        self.folder, self.key = partial_folder(output), sha256_text(canonical(record))

    def layers(self, compressed: Sequence[int]) -> dict[int, Bundle]:
        return {}

    def save(self, index: int, method: Method, pair: LayerCodecs, metrics: dict[str, float]) -> None: ...

    def remove(self) -> None: ...
