"""Rows of a Parquet file, and how large its pages are unpacked, from their headers, before a reader unpacks one whole.

A page's header is a Thrift struct in the compact protocol: field 1 the page's type, 2 its size unpacked, 3 its size in
the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line
from ..report.extras import require
from .file_kinds import check_file
from .rows import Picker, Row
from .unpacked import CHUNK, ROW, too_long

PAGE = 1 << 27  # bytes unpacked, at most; writers aim at 1 MiB, and make 100 MiB of 1024 rows of 100 kB
HEADER = 1 << 16  # bytes of a header, at most
INTEGER = 0x15  # the field behind the last one, an integer


class Chunk(Protocol):
    """A column of a row group, as pyarrow's metadata has it. Offsets and sizes are in bytes."""

    path_in_schema: str
    dictionary_page_offset: int | None
    data_page_offset: int
    total_compressed_size: int


class RowGroup(Protocol):
    num_columns: int

    def column(self, index: int, /) -> Chunk: ...


class Metadata(Protocol):
    """What is read of pyarrow.parquet.FileMetaData."""

    num_row_groups: int

    def row_group(self, index: int, /) -> RowGroup: ...


def parquet_rows(path: Path, picker: Picker) -> Iterator[Row]:
    """The rows of a file and where each stands. Raises TextError for what is none, and for a row longer than ROW."""
    require("pyarrow", str(path), "give the text in another form, as .jsonl")
    import pyarrow
    import pyarrow.parquet

    check_file(path)
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=CHUNK) as file:
            names = picker.choose(file.schema_arrow.names)
            check_pages(path, file.metadata, names)
            # One row at a time: a dictionary makes many large rows of few bytes
            for number, batch in enumerate(file.iter_batches(batch_size=1, columns=names), 1):
                where = f"{path} row {number}"
                if batch.nbytes > ROW:
                    raise TextError(f"{where}: {too_long('bytes')}")
                yield where, batch.to_pylist()[0]
    except pyarrow.ArrowException as error:
        raise TextError(f"{path}: not a parquet file ({one_line(error)})") from error


def check_pages(path: Path, metadata: Metadata, names: Collection[str]) -> None:
    """Raises TextError for a page of the columns `names` that is larger than PAGE, or whose header cannot be read.

    metadata: the file's, as pyarrow reads it.
    """
    with open(path, "rb") as file:
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for chunk in map(row_group.column, range(row_group.num_columns)):
                if any(chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in names):
                    for size in _pages(path, file, chunk):
                        if size > PAGE:
                            raise TextError(
                                f"{path}: a page of column {chunk.path_in_schema} unpacks to {size:,} bytes, allowed "
                                "are "
                                f"{PAGE:,}; write the file again with smaller rows or pages"
                            )


def _pages(path: Path, file: BinaryIO, chunk: Chunk) -> Iterator[int]:
    """Unpacked sizes of a column chunk's pages."""
    at = min(offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset)
    end = at + chunk.total_compressed_size
    while at < end:
        file.seek(at)
        head = file.read(HEADER)
        try:
            _, place = _field(head, 0)
            size, place = _field(head, place)
            stored, place = _field(head, place)
            at += _behind(head, 0, 12) + stored
        except (IndexError, ValueError) as error:
            raise TextError(f"{path}: a page of column {chunk.path_in_schema} has a damaged header") from error
        yield size


def _field(head: bytes, at: int) -> tuple[int, int]:
    if head[at] != INTEGER:
        raise ValueError("another field")
    number, at = _varint(head, at + 1)
    if number % 2:  # zigzag: a negative size
        raise ValueError("a negative size")
    return number // 2, at


def _varint(head: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (head[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if head[at - 1] < 128:
            return number, at


def _behind(head: bytes, at: int, kind: int) -> int:
    """The place behind a value of this Thrift type that starts at `at`. Raises IndexError, ValueError."""
    if kind in (1, 2):  # a bool is in its type
        return at
    if kind in (3, 7):
        return at + (1 if kind == 3 else 8)
    if kind in (4, 5, 6):
        return _varint(head, at)[1]
    if kind == 8:
        length, at = _varint(head, at)
        return at + length
    if kind != 12:
        raise ValueError(f"type {kind}")
    while head[at]:
        field, at = head[at], at + 1
        at = _behind(head, at if field >> 4 else _varint(head, at)[1], field & 15)
    return at + 1
