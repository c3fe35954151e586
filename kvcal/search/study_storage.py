"""Where the study of a search lies, a file or a database that workers share, and which of its workers are alive."""

from __future__ import annotations

import os
import re
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.files import lock, open_lock

from ..calibrate.checkpoint import check_ours

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial

Direction = Literal["minimize", "maximize"]
FILE = "study.db"
NAMES = re.compile(r"lock|study\.db(-journal|-wal|-shm)?")  # all that a search keeps in its folder
GRACE = 6  # heartbeats missed by a worker that is taken for dead


@dataclass(frozen=True)
class Storage:
    """Where the study lies. url: any that Optuna's RDBStorage takes, shared with other workers; else a file in
    `folder`, for this process alone. heartbeat: seconds between a worker's signs of life; after GRACE without one its
    trial is run again.
    """

    name: str
    folder: Path
    url: str | None = None
    heartbeat: int = 5

    @property
    def grace(self) -> int:
        """Seconds without a sign of life after which a worker is taken for dead."""
        return GRACE * self.heartbeat


@contextmanager
def opened_study(storage: Storage, maximise: bool) -> Iterator[tuple[Study, RDBStorage]]:
    """The study, and its storage object."""
    if storage.url is not None:
        yield _study(storage.url, storage, maximise)
        return
    storage.folder.mkdir(exist_ok=True)
    check_ours(storage.folder, NAMES)
    try:
        handle = open_lock(storage.folder / "lock")
    except OSError as error:
        raise KVCalError(f"{storage.folder / 'lock'}: cannot be used ({error.strerror}); move it away") from error
    try:
        if lock(handle, wait=False) is False:
            raise KVCalError(
                f"{storage.folder}: another process is at this search; wait for it, or let both share a --storage"
            )
        yield _study(f"sqlite:///{FILE}", storage, maximise)
    finally:
        os.close(handle)


def _connection(path: Path) -> type[sqlite3.Connection]:
    """SQLite on this file, whatever characters its path has: no URL has to hold it."""

    class Connection(sqlite3.Connection):
        def __init__(self, database: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(str(path), *args, **kwargs)
            # Does not wait for the disk: a killed process loses nothing, and after a power cut a search begins anew.
            self.execute("pragma synchronous = off")

    return Connection


def _study(url: str, storage: Storage, maximise: bool) -> tuple[Study, RDBStorage]:
    """Create or join; two workers that create the tables at once disturb each other, so try again."""
    import optuna

    for attempt in range(5):
        try:
            engine = _rdb(url, storage)
            directions = directions_of(maximise)
            study = optuna.create_study(
                storage=engine, study_name=storage.name, directions=directions, load_if_exists=True
            )
            return study, engine
        except Exception as error:
            collided = any(word in str(error).lower() for word in ("exists", "unique", "duplicate", "locked"))
            if attempt == 4 or not collided:
                reason = str(error).splitlines()[0]
                raise KVCalError(
                    f"--storage {_public(url)}: cannot be used ({type(error).__name__}: {reason})"
                ) from error
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def _rdb(url: str, storage: Storage) -> RDBStorage:
    from optuna.storages import RDBStorage

    options: dict[str, object] = {"timeout": 60} if url.startswith("sqlite") else {}
    if storage.url is None:
        options["factory"] = _connection(storage.folder / FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "experimental"
        return RDBStorage(
            url,
            engine_kwargs={"connect_args": options},
            heartbeat_interval=storage.heartbeat,
            grace_period=storage.grace,
            heartbeat_stale_trial_callback=run_again,
        )


def _public(url: str) -> str:
    """The URL without user and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if rest else url


def this_worker() -> str:
    """Machine, boot and process-id namespace, and a process of it: which nobody else is or will be."""
    return f"{_machine()} {os.getpid()} {_born(os.getpid())}"


def is_dead(worker: str) -> bool:
    """Whether that worker was of this machine and has ended; False where nobody can know."""
    machine, _, rest = worker.partition(" ")
    process, _, born = rest.partition(" ")
    if not machine or machine != _machine() or not process.isdigit():
        return False
    return _born(int(process)) != born


def _machine() -> str:
    """Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(process: int) -> str:
    """When a process started, in ticks since boot; empty for one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def directions_of(maximise: bool) -> list[Direction]:
    """The directions of quality and of cost, as Optuna names them."""
    return ["maximize" if maximise else "minimize", "minimize"]


def run_again(study: Study, trial: FrozenTrial) -> None:
    """Put a dead worker's parameters in the queue; a trial that had none yet is simply missing, and is drawn anew."""
    if trial.params:
        study.enqueue_trial(trial.params, user_attrs={"known": trial.user_attrs.get("known"), "again": trial.number})
