"""Results on stdout: JSON for programs, tables for people. Notes on stderr.

All that the command line prints goes through here or through kvcal.cli.failure, where control characters are escaped:
names, settings and texts come from files of strangers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Literal

from kvcal.cli.failure import NO_STDOUT
from kvcal_artifacts.shown import COMMANDS, message, shown

ANY_WIDTH = 10_000  # of --wide: whole cells can be read, copied and cut
USUAL_WIDTH, LEAST_WIDTH = 80, 40
GAP = 2  # between columns
NARROWEST_TEXT = 14  # columns of text are wrapped down to this many signs, before columns go into a table below


@contextmanager
def on_stdout() -> Iterator[None]:
    """What is printed within is there afterwards. Raises KVCalError, which names stdout, where it cannot be written; a
    reader that has left stays a BrokenPipeError.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from kvcal_artifacts.errors import KVCalError  # not for the help, which needs the command line alone

        raise KVCalError(NO_STDOUT.format(error.strerror)) from error


def print_json(value: object) -> None:
    """One JSON document. A number that JSON does not have (NaN, infinity) is null. All control characters are escaped,
    as JSON can, so that the value read from it is the same. Raises KVCalError, as `on_stdout`.
    """
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    with on_stdout():
        print(COMMANDS.sub(lambda sign: sign[0] if sign[0] == "\n" else json.dumps(sign[0])[1:-1], text))


def line(text: object = "") -> None:
    """One line on stdout."""
    print(shown(text))


def width() -> int:
    """Columns of the terminal; 80 where stdout is none. COLUMNS in the environment counts for both."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((USUAL_WIDTH, 24)).columns)


def wrapped(text: object, *, indent: str = "  ", before: str = "", wide: bool = False) -> None:
    """Words on stdout in lines that fit the terminal, all but the first after `indent`; words longer than a line, as
    paths, stay whole. before: what stands before the first, as wide as `indent`. wide: in one line.
    """
    most = ANY_WIDTH if wide else width()
    fitted = textwrap.wrap(
        shown(text), most, initial_indent=indent if before else "", subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    first, *rest = fitted or [indent]
    print(shown(before) + first.removeprefix(indent) if before else first)
    for one in rest:
        print(one)


def command_line(words: Sequence[object], *, wide: bool = False, before: str = "") -> None:
    """A command as typed in a shell, on as many lines as it takes, of which a shell makes one. before: what stands
    before it.
    """
    from kvcal.report.escape import shell

    typed = [shell([str(word)]) for word in words]
    lines, most = [before + typed[0]], ANY_WIDTH if wide else width()
    for word in typed[1:]:
        if len(lines[-1]) + 1 + len(word) + 2 > most:  # a space, and " \\" at the end
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    for one in lines:
        line(one)


def print_next(*words: object, program: str = "kvcal") -> None:
    """A last line: the command to run next, as typed in a shell."""
    from kvcal.report.escape import shell

    line(f"next: {shell([program, *map(str, words)])}")


def print_open(*paths: object) -> None:
    """A last line for files that people look at."""
    line(f"next: open {' and '.join(map(str, paths))}")


def prose(text: str) -> None:
    """Text of several lines on stdout: line ends and tabs stay."""
    print(shown(text, keep="\n\t"))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    keys: int = 1,
    wide: bool = False,
) -> None:
    """A table that fits the terminal. Numbers are aligned to the right; None is an empty cell. Format numbers before
    they come here.

    Where it is too wide, headings are broken at spaces, then cells of text; then columns go into further tables below,
    each of which begins with the first `keys` columns. wide: nothing is broken, whatever its width.

    Raises KVCalError, as `on_stdout`.
    """
    most = ANY_WIDTH if wide else width()
    cells = [["" if cell is None else shown(cell) for cell in row] for row in rows]
    laid_out = [_Column.of(shown(head), [row[i] for row in cells]) for i, head in enumerate(columns)]
    if _width(column.width for column in laid_out) > most:
        laid_out = [column.narrow() for column in laid_out]
    if title:
        wrapped(title, wide=wide)
    for number, table in enumerate(_tables(laid_out, keys, most)):
        if number:
            line()
        _print_columns(table, most)


def print_rows(
    columns: Sequence[str],
    rows: Iterable[Mapping[str, object]],
    *,
    only_wide: Collection[str] = (),
    names: Mapping[str, str] | None = None,
    title: str | None = None,
    keys: int = 1,
    wide: bool = False,
) -> None:
    """Print a table of rows whose keys are those of --json. Each quantity has the name and form that it has everywhere.

    only_wide: columns that --wide alone prints; it also prints those in which no row has a value. names: headings that
    differ in this table. keys: how many first columns each part of a table that is too wide begins with.
    """
    from kvcal.report.quantities import quantity, written

    listed = list(rows)
    taken = [
        column
        for column in columns
        if wide or (column not in only_wide and any(row.get(column) is not None for row in listed))
    ]
    heads = [(names or {}).get(column, quantity(column).name) for column in taken]
    cells = [[written(column, row.get(column), whole=wide) for column in taken] for row in listed]
    print_table(heads, cells, title=title, keys=keys, wide=wide)


def print_facts(facts: Mapping[str, object], *, names: Mapping[str, str] | None = None, wide: bool = False) -> None:
    """A line a fact by key of --json, with its name and form. DETAILS, and those without a value, are there with --wide
    alone. names: of facts whose key means another quantity here than elsewhere.

    Raises KVCalError, as `on_stdout`.
    """
    from kvcal.report.quantities import DETAILS, is_hash, quantity, written

    texts = {key: written(key, value, whole=wide) for key, value in facts.items()}
    taken = {key: text for key, text in texts.items() if wide or (text is not None and key not in DETAILS)}
    heads = {key: (names or {}).get(key, quantity(key).name) for key in taken}
    margin = max(map(len, heads.values()), default=0) + GAP
    with on_stdout():
        for key, text in taken.items():
            whole = str(facts[key])  # a hash that fits is shown whole: people copy it
            fits = is_hash(key) and margin + len(whole) <= width()
            fact = whole if fits else "-" if text is None else text
            wrapped(fact, before=f"{shown(heads[key]):{margin}}", indent=" " * margin, wide=wide)


@dataclass(frozen=True)
class _Column:
    """A heading, of one line or more, and the cells below it."""

    head: str
    cells: tuple[str, ...]
    numeric: bool

    @classmethod
    def of(cls, head: str, cells: Sequence[str]) -> _Column:
        return cls(head, tuple(cells), all(_is_number(cell) for cell in cells if cell))

    @property
    def widest_cell(self) -> int:
        return max(map(len, self.cells), default=0)

    @property
    def width(self) -> int:
        return max(self.widest_cell, *map(len, self.head.split("\n")))

    @property
    def least(self) -> int:
        """Signs that it takes with its text wrapped; numbers are not."""
        return self.width if self.numeric else min(self.width, NARROWEST_TEXT)

    def narrow(self) -> _Column:
        """The column with its heading on lines of its own words, where that is wider than the cells; a unit stays with
        what it is of.
        """
        if len(self.head) <= self.widest_cell:
            return self
        return replace(self, head=re.sub(r" (?![%(])|(?<=/)(?=\w{3})", "\n", self.head))


def _width(widths: Iterable[int]) -> int:
    """Signs of a line of a table whose columns are so wide; rich leaves one at its end."""
    return sum(one + GAP for one in widths) - 1


def _tables(columns: Sequence[_Column], keys: int, most: int) -> list[list[_Column]]:
    """Which columns stand in which table: the first `keys` in each, as many others as fit."""
    first = list(columns[:keys])
    tables = [first.copy()]
    for column in columns[keys:]:
        table = tables[-1]
        if len(table) > len(first) and _width(one.least for one in [*table, column]) > most:
            table = first.copy()
            tables.append(table)
        table.append(column)
    return tables


def _print_columns(columns: Sequence[_Column], most: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        table.add_column(column.head, justify=justify, no_wrap=column.numeric, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    with on_stdout():
        Console(width=most, markup=False, highlight=False, emoji=False).print(table)


def note(text: str) -> None:
    """One line for the reader that is not the result."""
    print(message(text), file=sys.stderr)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return _plain({field.metadata.get("key", field.name): getattr(value, field.name) for field in fields})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[-+]?(\d[\d,]*\.?\d*(e[-+]?\d+)?|inf|nan) ?[%×x]?([kKMGT]?i?B?)?|-", cell) is not None
