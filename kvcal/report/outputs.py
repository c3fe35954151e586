"""Where a command writes: refused before the work where that can be, and without the loss of figures after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.files import file_behind


def check_output(output: Path, option: str = "--output") -> None:
    """Raise now, not after an hour, if no file can be written there: no folder, pipe or device is replaced by one."""
    folder = file_behind(output, option).parent
    if not folder.is_dir():
        raise KVCalError(f"{folder} is not a folder; create it or give another {option}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except FileNotFoundError as error:  # the folder is there: a file system of the kernel's own
        raise KVCalError(f"{folder}: no file can be made in this folder; give another {option}") from error
    except OSError as error:
        raise KVCalError(f"{folder}: cannot be written to ({error.strerror}); give another {option}") from error


@contextmanager
def figures_first(unwritten: list[KVCalError]) -> Iterator[None]:
    """Write a file within the block; where that fails the error goes to `unwritten`, so that the figures can be printed
    before it is raised.
    """
    try:
        yield
    except KVCalError as error:
        unwritten.append(error)


def raise_unwritten(unwritten: Sequence[KVCalError]) -> None:
    """Raise one error for all files that could not be written."""
    if unwritten:
        raise KVCalError("; and ".join(map(str, unwritten)))
