"""Local files in, documents out: plain text, JSON, CSV and Parquet, unpacked and read row by row in bounded memory.

`datasets` reads the hub, not local files: it holds a JSON array or a long line whole, unpacks a Parquet page of any
size, and guesses column types from the first rows.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvcal_artifacts.errors import TextError
from kvcal_artifacts.files import kind_of as what_is

from ..models.hub import one_line
from ..report.extras import require
from .parquet_pages import check_pages
from .rows import SHOWN_NAME, Picker, columns, cut, groups_of, is_chat, is_value, listed

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Document = Iterable[str]  # in parts of any size, so that a large file is never held whole
Part = TypeVar("Part")
Row = tuple[str, object]  # where it stands, for messages; the row

PLAIN = (".txt", ".text", ".raw", ".tokens", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log", ".srt")
SOURCE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".cs", ".java", ".kt", ".scala", ".swift"),
    *(".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".hs", ".ml", ".f90"),
    *(".sh", ".sql"),
)
ROWS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".xz", ".bz2", ".zst")
ALLOWED = (
    f"plain text ({', '.join(PLAIN[:5])}, source code, or no suffix), {', '.join(ROWS)}, and all but .parquet also as "
    f"{', '.join(PACKED[:-1])} and {PACKED[-1]}"
)
# A folder is read by the first of these that it holds: bundles name folders, so what was read of one stays the same.
FIRST = (".txt", ".raw", ".jsonl", ".parquet", ".txt.xz", ".raw.xz", ".jsonl.xz")
SECOND = (*ROWS, *(kind + pack for kind in (".txt", ".raw", *ROWS[:-1]) for pack in PACKED))
TIERS = (FIRST, SECOND, (*PLAIN, *SOURCE))

CHUNK = 1 << 20  # bytes read at a time
ROW = 1 << 25  # characters (Parquet: bytes) of one row, line or JSON value: 32 MiB, seven Bibles
VALUES = 1 << 20  # values in one row of JSON: an empty list takes 64 bytes of memory and two of the file
RATIO, UNPACKED = 200, 1 << 24  # a packed file may grow this many times, or to so many bytes; text packs 3 to 50 times
XZ_MEMORY = 1 << 28  # bytes that an .xz file's dictionary may ask for; `xz -9` asks for 64 MiB


def kind_of(path: Path) -> str:
    """`text` or one of ROWS. Raises TextError for a name that is none of ALLOWED."""
    name = path.name.lower()
    pack = next((pack for pack in PACKED if name.endswith(pack)), "")
    suffix = Path(name.removesuffix(pack)).suffix
    if suffix == ".parquet" and pack:
        raise TextError(f"{path}: Parquet is packed inside and cannot be read from {pack}; unpack it first")
    if suffix in ROWS:
        return suffix
    if suffix in ("", *PLAIN, *SOURCE):
        return "text"
    raise TextError(f"{path}: {suffix}{pack} files are not read as text; allowed are {ALLOWED}; convert or rename it")


def looks_like_file(name: str) -> bool:
    """Whether a name that no file has was meant as one, and not as a data set."""
    return name.lower().endswith((*ROWS, *PACKED, *PLAIN))


def check_file(path: Path) -> None:
    """Raises TextError, without opening it, for what is no regular file: a pipe would be waited for, a device may have
    no end.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise TextError(f"{path}: {what_is(mode)}, not a file; write its text to a file and give that")


def folder_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of a folder's first tier that has any, and those left out, both in order; hidden ones are in neither. Pipes
    and devices are left out.
    """
    inside = (
        (path, path.relative_to(folder).parts) for path in folder.rglob("*") if path.exists() and not path.is_dir()
    )
    files = sorted(path for path, parts in inside if not any(part.startswith(".") for part in parts))
    for tier in TIERS:
        if taken := [path for path in files if path.name.lower().endswith(tier) and path.is_file()]:
            return taken, [path for path in files if path not in set(taken)]
    return [], files


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


# Bytes and lines


class Stream(Protocol):
    """Unpacked bytes."""

    def read(self, size: int, /) -> bytes: ...


def _opened(path: Path) -> AbstractContextManager[Stream]:
    """A stream of the unpacked bytes; a context manager with read()."""
    check_file(path)
    pack = path.suffix.lower()
    if pack == ".zst":
        require("pyarrow", str(path), "give the text unpacked")
        import pyarrow

        unpacked: AbstractContextManager[Stream] = pyarrow.input_stream(str(path), compression="zstd")
        return unpacked
    if pack == ".xz":
        return io.BufferedReader(_Xz(path))
    if pack == ".gz":
        return gzip.open(path)
    return bz2.open(path) if pack == ".bz2" else open(path, "rb")


class _Xz(io.RawIOBase):
    """What lzma.open reads, with a limit to the memory that the file may ask for."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115  closed with this
        self._decoder, self._ended = self._new(), False

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self._ended:
            fresh = self._decoder.eof
            raw = self._decoder.unused_data if fresh else b""
            if not raw and (fresh or self._decoder.needs_input):
                raw = self._file.read(CHUNK)
                self._ended = fresh and not raw
                if not raw and not fresh:
                    raise EOFError("the file ends before its last block does")
            if self._ended:
                break
            if fresh:
                self._decoder = self._new()
            try:
                got = self._decoder.decompress(raw, len(view))
            except lzma.LZMAError as error:
                if fresh and "emory" not in str(error):  # padding, or bytes behind the end, as lzma.open leaves them
                    self._ended = True
                    break
                raise
            if got:
                view[: len(got)] = got
                return len(got)
        return 0


def decoded(path: Path) -> Iterator[str]:
    """The text of a file, strictly UTF-8, every line end made \\n, a byte order mark dropped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    lines = io.IncrementalNewlineDecoder(decoder, translate=True)
    packed = path.suffix.lower() in PACKED
    done = 0
    with _opened(path) as stream:
        most = max(UNPACKED, RATIO * path.stat().st_size) if packed else None
        while True:
            raw = stream.read(CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                text = lines.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                at = done - pending + error.start
                raise TextError(f"{path}: byte {at:,} is not UTF-8; convert the file to UTF-8") from error
            if (at := raw.find(b"\0")) >= 0:
                raise TextError(f"{path}: byte {done + at:,} is 0: no plain text; convert the file to UTF-8 text")
            yield text
            done += len(raw)
            if not raw:
                return
            if most is not None and done > most:
                raise TextError(
                    f"{path}: unpacks to more than {done:,} bytes, {RATIO} times its size; text does not: unpack it "
                    "first",
                )


def _lines(path: Path) -> Iterator[str]:
    """Yield lines without their ends."""
    waiting: list[str] = []
    size = number = 0
    for text in decoded(path):
        *whole, last = text.split("\n")
        if whole:
            yield "".join([*waiting, whole[0]])
            yield from whole[1:]
            number += len(whole)
            waiting, size = [], 0
        waiting.append(last)
        size += len(last)
        if size > ROW:
            raise TextError(f"{path} line {number + 1}: {_too_long()}")
    yield "".join(waiting)


def _too_long(unit: str = "characters") -> str:
    return f"one row of more than {ROW:,} {unit}; cut it into several, or give plain text"


# JSON


def _jsonl(path: Path, picker: Picker) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        _check_values(line, where)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TextError(f"{where}: not JSON ({one_line(error)})") from error
        yield where, row


def _check_values(text: str, where: str) -> None:
    """Raises TextError for a row whose values take far more memory than its characters."""
    if len(text) > CHUNK and sum(map(text.count, ",[{")) > VALUES:
        raise TextError(f"{where}: one row of more than {VALUES:,} JSON values; cut it into several")


def _json(path: Path, picker: Picker) -> Iterator[Row]:
    """Rows of an array, values one after another (one a line, say), or an object that holds rows."""
    values = _Values(decoded(path), path)
    if values.peek() == "[":
        rows = values.of_array()
    else:
        rows = values.to_end()
        first = next(rows, None)
        if first is None:
            return
        if isinstance(first, dict) and not values.peek() and not picker.takes(first):
            rows = iter(_rows_of(path, first, picker))
        else:
            rows = _chained(first, rows)
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


def _chained(first: object, rest: Iterator[object]) -> Iterator[object]:
    yield first
    yield from rest


def _rows_of(path: Path, whole: dict[str, object], picker: Picker) -> list[object]:
    """The rows that one object holds, which is none itself.

    Columns by name, {"text": [...]} or pandas' {"text": {"0": ...}}; pandas' {"columns": [...], "data": [[...]]}; rows
    by number, {"0": {...}}; one array of rows, {"version": 1, "data": [...]}; else the object itself.
    """
    if (rows := _by_column(path, whole, picker)) is not None:
        return rows
    names, data = whole.get("columns"), whole.get("data")
    if isinstance(names, list) and isinstance(data, list) and all(isinstance(row, list) for row in data):
        if any(len(row) != len(names) for row in data):
            raise TextError(f"{path}: rows of its data are not as long as its columns, {len(names)}; write it again")
        return [dict(zip(map(str, names), row, strict=True)) for row in data]
    rows = list(whole.values())
    if rows and all(isinstance(row, dict) and (picker.column or groups_of(row, None)) for row in rows):
        return rows
    arrays = [value for value in whole.values() if isinstance(value, list) and _are_rows(value, picker)]
    if len(arrays) > 1:
        raise TextError(
            f"{path}: {len(arrays)} fields of {listed(list(whole))} are arrays; give a file of one array of rows"
        )
    return arrays[0] if arrays else [whole]


def _by_column(path: Path, whole: dict[str, object], picker: Picker) -> list[object] | None:
    """Rows of an object of columns; None where its columns of text are no lists of text."""
    lists = {
        name: list(value.values()) if isinstance(value, dict) else value
        for name, value in whole.items()
        if isinstance(value, dict | list)
    }
    chosen = columns(lists, picker.column)
    if not chosen or not all(is_value(value) for name in chosen for value in lists[name]):
        return None
    lengths = {len(lists[name]) for name in chosen}
    if len(lengths) > 1:
        raise TextError(f"{path}: columns {listed(chosen)} are not of one length; write the file again")
    return [dict(zip(chosen, row, strict=True)) for row in zip(*(lists[name] for name in chosen), strict=True)]


def _are_rows(value: list[object], picker: Picker) -> bool:
    """Whether it is a list of rows: of objects, and where no column is asked for also of text and chats."""
    alone = picker.column is None
    return bool(value) and all(
        row is None or isinstance(row, dict) or (alone and (isinstance(row, str) or is_chat(row))) for row in value
    )


class _Values:
    """JSON values of a text that comes in parts. What waits doubles as long as a value is not whole: linear time in
    all.
    """

    BLANK = re.compile(r"[ \t\n\r]*")

    def __init__(self, parts: Iterator[str], path: Path) -> None:
        self._parts, self._path = parts, path
        self._text, self._at, self._rows = "", 0, 0
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            blank = self.BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def of_array(self) -> Iterator[object]:
        self._at += 1
        if self.peek() == "]":
            self._at += 1
        else:
            end = ","
            while end == ",":
                yield self._value()
                end = self.peek()
                if end not in ("]", ","):
                    raise TextError(f"{self._where()}: not JSON (a comma or ] is expected behind it)")
                self._at += 1
        if self.peek():
            raise TextError(f"{self._path}: text behind the end of its array; give one array, or one object a line")

    def to_end(self) -> Iterator[object]:
        while self.peek():
            yield self._value()

    def _where(self) -> str:
        return f"{self._path} row {self._rows}"

    def _value(self) -> object:
        self._rows += 1
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError as error:
                raise TextError(f"{self._where()}: not JSON that can be read ({one_line(error)})") from error
            except ValueError as error:
                if self._more():
                    continue
                raise TextError(f"{self._where()}: not JSON ({one_line(error)})") from error
            if end == len(self._text) and self._more():  # a number might go on
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Twice as much, at least; False at the end of the file."""
        rest = self._text[self._at :]
        if len(rest) > ROW:
            raise TextError(f"{self._where()}: {_too_long()}")
        got, size = [rest], 0
        for part in self._parts:
            got.append(part)
            size += len(part)
            if size >= len(rest):
                break
        self._text, self._at = "".join(got), 0
        if rest:  # most of the text is of one value
            _check_values(self._text, self._where())
        return size > 0


# Tables


SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}
HEADED = "name one with --column; where the first line is no header, put one with the columns' names above it"


def _other_separator(path: Path, line: str, separator: str, column: str | None, alone: bool) -> TextError | None:
    """What to say where a first line that names no text column has names between other separators; None where not.

    alone: whether the line is one field, or none, by the file's own separator.
    """
    for other, what in SEPARATORS.items():
        with suppress(csv.Error):
            names = [name.strip() for name in next(csv.reader([line[:CHUNK]], delimiter=other), [])]
            names_text = bool(columns(names, column)) or (alone and all(map(_is_name, names)))
            if other == separator or len(names) < 2 or not names_text:
                continue
            suffix = {",": ".csv", "\t": ".tsv"}.get(other)
            instead = f"rename it to {suffix}" if suffix else f"write it with {SEPARATORS[separator]}"
            return TextError(
                f"{path}: its first line has {what} between columns ({listed(names)}), and {kind_of(path)} is read "
                "with "
                f"{SEPARATORS[separator]}; {instead}"
            )
    return None


def _is_name(text: str) -> bool:
    return len(text) <= SHOWN_NAME and re.search(r"[.!?]( |$)", text) is None


def _table(path: Path, picker: Picker) -> Iterator[Row]:
    """Rows under a header; a field in quotes may hold separators and line ends, and quotes twice."""
    taken, first = 0, ""
    separator = "\t" if kind_of(path) == ".tsv" else ","

    def lines() -> Iterator[str]:
        nonlocal taken, first
        for line in _lines(path):
            first = first or line
            taken += len(line)
            if taken > ROW:
                raise TextError(f"{path} line {reader.line_num}: {_too_long()} (is a quotation mark left open?)")
            yield line + "\n"

    reader = csv.reader(lines(), delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        limit = csv.field_size_limit(2 * ROW)  # of the process; it stays ours during a row
        try:
            row = next(reader, None)
        except csv.Error as error:
            if not header and (why := _other_separator(path, first, separator, picker.column, True)) is not None:
                raise why from error
            raise TextError(f"{path} line {reader.line_num}: not CSV ({one_line(error)})") from error
        finally:
            csv.field_size_limit(limit)
        taken = 0
        if row is None:
            return
        if not row:
            continue
        where = f"{path} line {reader.line_num}"
        if not header:
            header = [name.strip() for name in row]
            alone = len(header) == 1
            if not columns(header, picker.column) and (
                why := _other_separator(path, first, separator, picker.column, alone)
            ):
                raise why
            picker.choose(header, HEADED)
            if twice := next((name for name, count in Counter(header).items() if count > 1 and name), None):
                raise TextError(f"{path}: two columns are called {cut(twice)!r}; rename one")
        elif len(row) != len(header):
            raise TextError(
                f"{where}: {len(row)} fields under a header of {len(header)}; put text with commas in quotes"
            )
        else:
            yield where, dict(zip(header, row, strict=True))


def _parquet(path: Path, picker: Picker) -> Iterator[Row]:
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
                    raise TextError(f"{where}: {_too_long('bytes')}")
                yield where, batch.to_pylist()[0]
    except pyarrow.ArrowException as error:
        raise TextError(f"{path}: not a parquet file ({one_line(error)})") from error


READERS = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
