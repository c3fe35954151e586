"""Text of strangers put into Markdown, shell and Python so that it stays text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from urllib.parse import quote

from kvcal_artifacts.shown import shown

ENTITIES = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "\\": "&#92;",
    "$": "&#36;",
}  # the last two begin formulas on the hub
# Emphasis, code, links and tables; `_` does nothing inside a word.
MARKS = re.compile(r"[`*\[\]~|]|(?<![^\W_])_|_(?![^\W_])")
LINKS = re.compile(r":(?=//)|(?<=www)\.|(?<=[\w.+-])@(?=[\w-]+\.)", re.IGNORECASE)  # what becomes one without brackets


class Markdown(str):
    """Markdown that is meant as such."""

    __slots__ = ()


def markdown(text: object) -> Markdown:
    """Text as Markdown that shows exactly it, in one line. What is `Markdown` already does not change."""
    if isinstance(text, Markdown):
        return text
    plain = "".join(ENTITIES.get(one, one) for one in shown(text))
    return Markdown(LINKS.sub(lambda sign: f"\\{sign[0]}", MARKS.sub(lambda sign: f"\\{sign[0]}", plain)))


def code(text: object) -> Markdown:
    """Text in a code span that no backtick of it ends; also in a table."""
    line = shown(text)
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return Markdown(f"{ticks}{space}{line}{space}{ticks}".replace("|", "\\|"))


def block(language: str, lines: Iterable[str]) -> str:
    """Lines as a fenced block that no backtick of them ends. language: "bash", say."""
    inside = "\n".join(lines)
    ticks = "`" * max(3, _longest_run(inside) + 1)
    return f"{ticks}{language}\n{inside}\n{ticks}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def link(name: str) -> str:
    """A file's name as the address of a link next to it."""
    return quote(name.encode("utf-8", "surrogateescape"), safe="+,=@-._~")


def shell(words: Iterable[str]) -> str:
    """Words as typed in bash, in one line. Control characters are written as escapes, which bash reads."""
    return " ".join(shlex.quote(word) if shown(word) == word else _ansi_c(word) for word in words)


def _ansi_c(word: str) -> str:
    return "$'" + "".join(map(_ansi_c_character, word)) + "'"


def _ansi_c_character(one: str) -> str:
    number = ord(one)
    if one in "\\'":
        return f"\\{one}"
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file's name that is no UTF-8
        return f"\\x{number - 0xDC00:02x}"
    if shown(one) == one:
        return one
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def python(text: str) -> str:
    """Text as a Python literal, in one line."""
    simple = '"' not in text and "\\" not in text and text.isprintable()
    return f'"{text}"' if simple else repr(text)
