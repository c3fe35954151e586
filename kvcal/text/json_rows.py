"""Rows of a JSON file: one value a line, an array, or an object that holds rows; in bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line
from .rows import Picker, Row, columns, groups_of, is_chat, is_value, listed
from .unpacked import CHUNK, ROW, decoded, lines_of, too_long

VALUES = 1 << 20  # values in one row of JSON: an empty list takes 64 bytes of memory and two of the file


def jsonl_rows(path: Path, picker: Picker) -> Iterator[Row]:
    for number, line in enumerate(lines_of(path), 1):
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


def json_rows(path: Path, picker: Picker) -> Iterator[Row]:
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
    if rows and all(isinstance(row, dict) and _has_groups(row, picker) for row in rows):
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


def _has_groups(row: dict[str, object], picker: Picker) -> bool:
    """Whether it is a row, if not one of the column asked for."""
    return bool(groups_of(row, picker.column) or groups_of(row, None))


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
            raise TextError(f"{self._where()}: {too_long()}")
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
