"""Rows of a .csv or .tsv file under its header."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line
from .file_kinds import kind_of
from .rows import SHOWN_NAME, Picker, Row, columns, cut, listed
from .unpacked import CHUNK, ROW, lines_of, too_long

SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}
HEADED = "name one with --column; where the first line is no header, put one with the columns' names above it"


def _other_separator(path: Path, line: str, separator: str, column: str | None, alone: bool) -> TextError | None:
    """What to say where a first line that names no text column has names between other separators; None where not.

    alone: whether the line is one field, or none, by the file's separator.
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


def csv_rows(path: Path, picker: Picker) -> Iterator[Row]:
    """Rows under a header; a field in quotes may hold separators and line ends, and quotes twice."""
    taken, first = 0, ""
    separator = "\t" if kind_of(path) == ".tsv" else ","

    def lines() -> Iterator[str]:
        nonlocal taken, first
        for line in lines_of(path):
            first = first or line
            taken += len(line)
            if taken > ROW:
                raise TextError(f"{path} line {reader.line_num}: {too_long()} (is a quotation mark left open?)")
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
