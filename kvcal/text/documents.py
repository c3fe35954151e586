"""The documents of a source: its files in the order in which they are read, or a data set's rows; what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line
from .file_kinds import ALLOWED_IN_FOLDER, check_file, folder_files, kind_of
from .files import Document, read_file
from .hub_datasets import check_datasets, stream
from .rows import Picker
from .sources import TextSource, resolve_text


def open_documents(source: TextSource, picker: Picker) -> tuple[Iterator[Document], str]:
    """The documents of a source, lazily, and its label (with the commit, for a data set)."""
    if source.dataset is not None:
        return stream(source, picker)
    files = source_files(source)
    return (document for path in files for document in read_file(path, source.column, picker)), source.label


def source_files(source: TextSource) -> list[Path]:
    """The files of a local text, in the order in which they are read. Raises TextError where nothing can be."""
    assert source.path is not None
    if source.kind != "folder":
        check_file(source.path)
        kind_of(source.path)
        return [source.path]
    files, others = folder_files(source.path)
    if not files:
        among = f" among {len(others)} files ({_first(others)})" if others else ""
        raise TextError(f"folder {source.path} holds no text{among}: looked for {ALLOWED_IN_FOLDER}")
    return files


def check_local(text: str) -> None:
    """Raises TextError for a text that is neither there nor a data set's name, and for a file of a kind that is not
    read. Raises UsageError for a data set where the package that reads it is missing.
    """
    source = resolve_text(text)
    if source.dataset is None:
        source_files(source)
    else:
        check_datasets(source)


def omitted_note(source: TextSource) -> str | None:
    """What a folder holds that is not read, in a line; None where there is nothing to say."""
    if source.kind != "folder" or source.path is None:
        return None
    files, others = folder_files(source.path)
    if not files or not others:
        return None
    count = f"{len(others):,} files" if len(others) > 1 else "1 file"
    return (
        f"note: {source.label}: {count} left out ({_first(others)}), {len(files):,} read ({_first(files)}); a text "
        "that is "
        "left out can be given by its name, or in a folder of its own"
    )


def _first(paths: list[Path], most: int = 3) -> str:
    return ", ".join([one_line(path.name) for path in paths[:most]] + (["..."] if len(paths) > most else []))
