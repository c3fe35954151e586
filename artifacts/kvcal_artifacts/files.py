"""Files on disk: only regular ones are read, so that no pipe blocks, and temporary ones have names of ours.

A temporary file or folder lies next to what it will replace, under a name that no one else uses, and is locked while it
is written. A lock ends with its process. So a later write of the same path removes what a killed one left, and nothing
else.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from .errors import KVCalError

Content = bytes | Sequence[bytes | memoryview]  # of a file: parts lie one behind the other
CAN_LOCK = sys.platform != "win32"  # there no file can be renamed while it is open, which temporary ones here are

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads to itself",
}
LONGEST = 180  # bytes of a name to which what a temporary file's name adds still fits
TRIES = 100
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def kind_of(mode: int) -> str:
    """What a file of this st_mode is, for messages: "a pipe", "a folder", or "a file"."""
    return KINDS.get(stat.S_IFMT(mode), "a file")


def no_bundle_at(path: Path) -> str:
    """What there is instead of a bundle, for messages: "no such bundle file", or "a pipe, not a bundle file"."""
    try:
        return f"{kind_of(os.stat(path).st_mode)}, not a bundle file"
    except OSError:
        return "no such bundle file"


def check_regular(path: str | os.PathLike[str], mode: int) -> None:
    """Raise OSError where st_mode is not a regular file's; its strerror says what there is instead."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{kind_of(mode)}, not a file", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading a regular file, links followed. Raises OSError for anything else, without waiting."""
    check_regular(path, os.stat(path).st_mode)  # a device is not even opened
    handle = os.open(path, os.O_RDONLY | NO_WAIT)
    try:
        check_regular(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The whole of a regular file. Raises OSError, as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """The whole of a regular file as UTF-8. Raises OSError, as `open_regular`, and UnicodeDecodeError."""
    with os.fdopen(open_regular(path), "r", encoding="utf-8") as file:
        return file.read()


def open_lock(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file for `lock`, created where there is none. Raises OSError for another kind of entry."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode):  # refused below
            check_regular(path, mode)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_WAIT | NO_LINK, 0o666)
    try:
        check_regular(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def lock(handle: int, *, wait: bool) -> bool | None:
    """Whether this descriptor has the lock now, until it is closed or its process ends.

    None where files cannot be locked. wait: for whoever has it.
    """
    from filelock import lock_descriptor

    try:
        return lock_descriptor(handle, blocking=wait)
    except OSError:  # a file system without locks
        return None


@cache
def _host() -> str:
    """A name of this machine: what another one writes into a shared folder is not touched."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _stem(place: Path) -> str:
    """The beginning of names of temporary files for `place`."""
    name = (
        place.name if len(os.fsencode(place.name)) <= LONGEST else hashlib.sha256(os.fsencode(place.name)).hexdigest()
    )
    return f".{name}.{_host()}."


def is_temporary(name: str) -> bool:
    """Whether a file's name is one that `temporary_file` gives, on whatever machine, or that versions before gave."""
    return name.startswith(".") and name.endswith(".tmp")


def temporary_file(place: Path) -> tuple[int, Path]:
    """The descriptor and path of a new, empty, locked file next to `place`, to be renamed to it.

    It has the permissions of the file that it will replace; where there is none, those that new files get: the kernel
    applies the umask. Close the descriptor after the rename. What killed writers of the same place left is removed
    first. Raises OSError.
    """
    _sweep(place)
    for _ in range(TRIES):
        path = _new(place)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666)
        if _is_locked(handle, path):
            _keep_mode(path, place)
            return handle, path
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))


def _keep_mode(path: Path, place: Path) -> None:
    """Give a new file the permissions of the regular file at `place`, if one is there."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(place).st_mode
        if stat.S_ISREG(mode):
            os.chmod(path, stat.S_IMODE(mode) & 0o777)


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A new, empty, locked folder next to `place`, to be renamed to it; what remains of it afterwards is removed.

    What killed writers of the same place left is removed first. Raises OSError.
    """
    _sweep(place)
    path, handle = _locked_folder(place)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _locked_folder(place: Path) -> tuple[Path, int | None]:
    for _ in range(TRIES):
        path = _new(place)
        os.mkdir(path)
        if not CAN_LOCK:
            return path, None
        with suppress(FileNotFoundError):  # swept away between the two calls
            handle = os.open(path, os.O_RDONLY | NO_LINK)
            if _is_locked(handle, path):
                return path, handle
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))


def _new(place: Path) -> Path:
    return place.parent / f"{_stem(place)}{secrets.token_hex(4)}.tmp"


def _is_locked(handle: int, path: Path) -> bool:
    """Lock a new file or folder; False, and closed, where another process took it for a leftover before the lock."""
    lock(handle, wait=True)
    if _is_at(handle, path):
        return True
    os.close(handle)
    return False


def _is_at(handle: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _sweep(place: Path) -> None:
    """Remove the remains of killed writers of `place`: files and folders with our names that nobody has locked."""
    if not CAN_LOCK:
        return
    ours = re.compile(re.escape(_stem(place)) + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError), os.scandir(place.parent) as entries:
        stale = [entry.path for entry in entries if ours.fullmatch(entry.name)]
        for path in stale:
            with suppress(OSError):
                _remove_dead(path)


def _remove_dead(path: str) -> None:
    mode = os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return
    handle = os.open(path, os.O_RDONLY | NO_WAIT | NO_LINK)
    try:
        if lock(handle, wait=False) and _is_at(handle, path):
            if stat.S_ISDIR(mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    finally:
        os.close(handle)


def new_file_mode(folder: Path) -> int:
    """The permissions that a new file gets in `folder`, as the kernel gives them. Raises OSError."""
    handle, path = temporary_file(folder / f"mode.{secrets.token_hex(4)}")  # a file of no name that is there
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.unlink(path)
        os.close(handle)


def is_read_only(path: Path, status: os.stat_result) -> bool:
    """Whether an existing file is protected from writing, by its mode, for root too, or for this user by the system."""
    by_effective_ids = os.access in os.supports_effective_ids
    return not status.st_mode & 0o222 or not os.access(path, os.W_OK, effective_ids=by_effective_ids)


STANDARD_STREAMS = {1: "standard output", 2: "standard error"}


def named(path: Path) -> str:
    """The path, for messages.

    An empty path is the current folder to pathlib: nobody would find the option that an empty variable left so in a
    message of `.` alone.
    """
    return "'' or ." if path == Path() else str(path)


def refuse_dash(path: Path, option: str = "") -> None:
    """Raise KVCalError for the name "-", which elsewhere means standard output, and here would be the name of a file.

    option: what the caller calls the path, put before it in the message.
    """
    if str(path) == "-":
        raise KVCalError(f"{option or 'output'} -: standard output cannot be named by a dash; give a file name")


def file_behind(path: Path, option: str = "") -> Path:
    """The file that `path` names, symlinks followed, there already or not: what a rename may replace.

    option: what the caller calls the path, put before it in messages. Raises KVCalError for what is there and is no
    regular file, which a rename would destroy, and for a file that is protected from writing. Also for the file that
    standard output or standard error goes to, whose text it would lose, and as `refuse_dash`.
    """
    refuse_dash(path, option)
    name = f"{option} {named(path)}".lstrip()
    behind = Path(os.path.realpath(path))
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            # /dev/stdout of a pipeline: its real path names nothing, but it can be looked at through the link
            status = _status(path) or os.lstat(behind)
            if not stat.S_ISREG(status.st_mode):
                raise KVCalError(f"{name} is {kind_of(status.st_mode)}: give a file name")
            if is_read_only(behind, status):
                mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
                raise KVCalError(f"{name} is read-only ({mode}): give another file name, or make it writable first")
            for number, stream in STANDARD_STREAMS.items():
                with suppress(OSError):  # closed
                    if os.path.samestat(os.fstat(number), status):
                        raise KVCalError(f"{name} is this command's {stream}: give another file name")
    except OSError as error:
        raise KVCalError(f"{name}: cannot be written: {error.strerror or error}") from error
    return behind


def _status(path: Path) -> os.stat_result | None:
    """The status of the file at a path, links followed; None where none can be reached."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def write_atomically(path: Path, data: Content, option: str = "--output") -> None:
    """Write all of `data` under `path`, or nothing, as `write_together` does."""
    write_together({path: data}, option)


def write_together(files: Mapping[Path, Content], option: str = "--output") -> None:
    """Write all files, in this order, or none of them.

    Temporary files in the same folders are synced, and renamed once all of them are whole, so that a full disk or an
    interrupt changes none. What a killed write left there is removed. A symlink stays one: the file it leads to is
    replaced. option: which names the paths, for messages. Raises KVCalError where one cannot be written, and as
    `file_behind`.
    """
    with ExitStack() as waiting:
        ready: list[tuple[Path, Path, Path]] = []
        for path, data in files.items():
            refuse_dash(path, option)
            place = file_behind(path)
            if not place.parent.is_dir():
                raise KVCalError(f"{place.parent} is not a folder; create it or give another {option}")
            with _explained(path):
                handle, temporary = temporary_file(place)
                waiting.callback(os.close, handle)  # the last: until then it is locked
                waiting.callback(temporary.unlink, missing_ok=True)
                _fill(handle, data)
            ready.append((path, temporary, place))
        for path, temporary, place in ready:
            with _explained(path):
                os.replace(temporary, place)


def _fill(handle: int, data: Content) -> None:
    """Write the data to the disk; the descriptor stays open."""
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def drop_cached(path: Path) -> None:
    """Let the system take back the memory in which it keeps a file that was written and may never be read: gigabytes of
    it are then also removed sooner. Does nothing where the system has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):
        handle = open_regular(path)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KVCalError(f"{path}: cannot be written: {error.strerror or error}; nothing was changed there") from error


def existing_path(name: str) -> Path | None:
    """The path of that name, if there is one; an empty name would be the current folder and is none."""
    try:
        path = Path(name).expanduser()
        return path if name.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, a home that does not exist, a NUL byte
        return None
