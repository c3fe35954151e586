"""Results on stdout: JSON for programs, tables for people. Notes on stderr.

All that the command line prints goes through here or through kvcal.cli.failure, where control characters are escaped:
names, settings and texts come from files of strangers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

from kvcal.cli.failure import NO_STDOUT
from kvcal_artifacts.shown import COMMANDS, message, shown

ANY_WIDTH = 10_000  # rich would fold cells to the terminal's width; whole cells can be read, copied and cut


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


def print_json(value: Any) -> None:
    """One JSON document. A number that JSON does not have (NaN, infinity) is null. All control characters are escaped,
    as JSON can, so that the value read from it is the same. Raises KVCalError, as `on_stdout`.
    """
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    with on_stdout():
        print(COMMANDS.sub(lambda sign: sign[0] if sign[0] == "\n" else json.dumps(sign[0])[1:-1], text))


def line(text: object = "") -> None:
    """One line on stdout."""
    print(shown(text))


def print_next(*words: object) -> None:
    """A last line: the command to run next, as typed in a shell."""
    from kvcal.report.escape import shell

    line(f"next: {shell([str(word) for word in ('kvcal', *words)])}")


def prose(text: str) -> None:
    """Text of several lines on stdout: line ends and tabs stay."""
    print(shown(text, keep="\n\t"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Numbers are aligned to the right; None is an empty cell. Format numbers before they come here.

    Raises KVCalError, as `on_stdout`.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [["" if cell is None else shown(cell) for cell in row] for row in rows]
    table = Table(
        title=title and shown(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) for row in cells if row[index])
        table.add_column(shown(column), justify="right" if numeric else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    with on_stdout():
        Console(width=ANY_WIDTH, markup=False, highlight=False, emoji=False).print(table)


def note(text: str) -> None:
    """One line for the reader that is not the result."""
    print(message(text), file=sys.stderr)


def _plain(value: Any) -> Any:
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
    return re.fullmatch(r"[-+]?(\d[\d,]*\.?\d*(e[-+]?\d+)?|inf|nan) ?[%×x]?([KMGT]?i?B?)?", cell) is not None
