"""Files on disk: only regular ones are read, so that no pipe is waited for, and temporary ones are known to be ours.

A temporary file or folder lies beside what it will replace, under a name that no one else uses, and is locked while it is
written. A lock ends with its process. So a later write of the same path removes what a killed one left, and nothing else.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CAN_LOCK = find_spec("fcntl") is not None  # not on Windows
if CAN_LOCK:
    import fcntl

KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link that leads to itself",
}  # fmt: skip
LONGEST = 180  # bytes of a name that still leave room for what a temporary file's name adds
TRIES = 100
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def kind_of(mode: int) -> str:
    """What a file of this st_mode is, for messages: "a pipe", "a folder", or "a file"."""
    return KINDS.get(stat.S_IFMT(mode), "a file")


def check_regular(path: str | os.PathLike[str], mode: int) -> None:
    """Raise OSError where st_mode is not a regular file's; its strerror says what there is instead."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{kind_of(mode)}, not a file", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading a regular file, links followed. Raises OSError for anything else, without waiting for it."""
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
    """A descriptor of a file for `lock`, made where there is none. Raises OSError where something else lies there."""
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
    """Whether this descriptor has the lock now; None where files cannot be locked."""
    if not CAN_LOCK:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@cache
def _host() -> str:
    """Of this machine: what another one writes into a shared folder is left alone."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _stem(place: Path) -> str:
    """How names of temporary files for `place` begin."""
    name = (
        place.name if len(os.fsencode(place.name)) <= LONGEST else hashlib.sha256(os.fsencode(place.name)).hexdigest()
    )
    return f".{name}.{_host()}."


def is_temporary(name: str) -> bool:
    """Whether a file's name is one that `temporary_file` gives, on whatever machine, or that versions before gave."""
    return name.startswith(".") and name.endswith(".tmp")


def temporary_file(place: Path) -> tuple[int, Path]:
    """(descriptor, path) of a new, empty, locked file beside `place`, to be renamed to it.

    It has the permissions that new files get: the kernel applies the umask. Close the descriptor after the rename. What killed
    writers of the same place left is removed first. Raises OSError.
    """
    _sweep(place)
    for _ in range(TRIES):
        path = _new(place)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666)
        if _is_kept(handle, path):
            return handle, path
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A new, empty, locked folder beside `place`, to be renamed to it; what is left of it afterwards is removed.

    As `temporary_file`. Raises OSError.
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
            if _is_kept(handle, path):
                return path, handle
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))


def _new(place: Path) -> Path:
    return place.parent / f"{_stem(place)}{secrets.token_hex(4)}.tmp"


def _is_kept(handle: int, path: Path) -> bool:
    """Lock it; False, and closed, where another process took it for a leftover between its making and its lock."""
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
    """Remove what killed writers of `place` left: files and folders of our names that nobody has locked."""
    if not CAN_LOCK:
        return
    ours = re.compile(re.escape(_stem(place)) + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError), os.scandir(place.parent) as entries:
        left = [entry.path for entry in entries if ours.fullmatch(entry.name)]
        for path in left:
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
    handle, path = temporary_file(folder / "mode")
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.unlink(path)
        os.close(handle)


def is_read_only(path: Path, status: os.stat_result) -> bool:
    """Whether an existing file is protected from writing: by its mode, for root too, or as the system says for this user."""
    options: dict[str, Any] = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    return not status.st_mode & 0o222 or not os.access(path, os.W_OK, **options)
