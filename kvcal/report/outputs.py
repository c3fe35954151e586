"""Where a command writes: refused before the work, not after it."""

from __future__ import annotations

import tempfile
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
