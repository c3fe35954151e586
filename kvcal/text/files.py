"""A local file's documents: plain text is one, of .json, .csv and .parquet every row is one, read in bounded memory.

`datasets` reads the hub, not local files. It holds a JSON array or a long line whole, unpacks a Parquet page of any
size, and guesses column types from the first rows.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line
from .csv_rows import csv_rows
from .file_kinds import ROWS, kind_of
from .json_rows import json_rows, jsonl_rows
from .parquet_rows import parquet_rows
from .rows import Picker
from .unpacked import Part, decoded

Document = Iterable[str]  # in parts of any size, so that a large file is never held whole


def read_file(path: Path, column: str | None = None, picker: Picker | None = None) -> Iterator[Document]:
    """One file's documents: plain text is one, of other files every row is one.

    picker: takes the text out of rows and counts them. Raises TextError, in one line, for whatever cannot be read.
    """
    kind = kind_of(path)
    if kind == "text":
        if column is not None:
            raise TextError(f"{path}: --column {column}: only {', '.join(ROWS)} files have columns; leave --column out")
        yield _guarded(path, decoded(path))
        return
    picker = picker or Picker(column)
    picker.begin(str(path))
    for where, row in _guarded(path, READERS[kind](path, picker)):
        if (text := picker.text(row, where)) is not None:
            yield [text]
    picker.end()


def _guarded(path: Path, parts: Iterator[Part]) -> Iterator[Part]:
    try:
        yield from parts
    except (lzma.LZMAError, zlib.error, EOFError) as error:
        raise TextError(f"{path}: damaged or cut short ({one_line(error)})") from error
    except OSError as error:
        if error.strerror is None:  # what gzip, bz2 and Arrow raise of bytes that they cannot unpack
            raise TextError(f"{path}: damaged or cut short ({one_line(error)})") from error
        raise TextError(f"{path}: cannot be read ({error.strerror})") from error


READERS = {
    ".json": json_rows,
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}
