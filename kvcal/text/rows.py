"""The text of a row: which column holds it, chats through the tokenizer's template, rows without any.

Of the columns the one asked for is taken, else `text` or `content`, else a pair joined by a line end (question and
answer, prompt and completion, instruction and output), else a chat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line

COLUMNS = ("text", "content")
PAIRS = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"))
CHATS = ("messages", "conversations", "conversation")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
SHOWN, SHOWN_NAME, SHOWN_ALL = 20, 30, 200  # columns that a message names, characters of one, and of all of them
PLAIN_NAME = re.compile(r"[\w.-]+")
WITHOUT = 1 << 18  # rows without text, one after another, at most

Message = dict[str, object]  # role, content and what else the template may read
Render = Callable[[list[Message]], str]


def columns(names: Sequence[str], column: str | None) -> list[str]:
    """The columns that hold the text: the one asked for, or the first default that is there; empty without any."""
    if column is not None:
        return [column] if column in names else []
    for group in (*((name,) for name in COLUMNS), *PAIRS, *((name,) for name in CHATS)):
        if set(group) <= set(names):
            return list(group)
    return []


def listed(names: Sequence[str]) -> str:
    """Columns for a message, cut short: without a header a whole document stands where a name should."""
    shown: list[str] = []
    for name in names:
        if len(shown) == SHOWN or sum(map(len, shown)) > SHOWN_ALL:
            return ", ".join([*shown, "..."])
        shown.append(quoted(name))
    return ", ".join(shown)


def quoted(name: str) -> str:
    """One column's name, cut short; in quotes, with control characters escaped, where it is more than a word."""
    short = cut(name)
    return short if PLAIN_NAME.fullmatch(short.rstrip("…")) else repr(short)


def cut(name: str) -> str:
    """Cut a name to at most SHOWN_NAME characters."""
    return name if len(name) <= SHOWN_NAME else name[: SHOWN_NAME - 1] + "…"


@dataclass
class Picker:
    """Takes text out of rows, and counts them.

    column: as asked for. render: a chat's text; None: no chat can be read. rows: seen so far; null, empty: of them,
    those without text. An empty one leaves its blank line between two documents, a null one nothing.
    """

    column: str | None = None
    render: Render | None = None
    rows: int = 0
    null: int = 0
    empty: int = 0
    _of: str = ""
    _last: int = 0  # row that had text
    _chosen: list[str] | None = None

    def begin(self, of: str) -> None:
        """Another file, or data set, of this name."""
        self._of, self._chosen = of, None

    def choose(self, names: Sequence[str], instead: str = "name one with --column") -> list[str]:
        """The columns to read of these. Raises TextError where none holds text; instead: what to do then."""
        chosen = columns(names, self.column)
        if not chosen:
            choices = (
                f"no column {self.column!r}"
                if self.column
                else "no text or content, no question and answer, no messages"
            )
            raise TextError(f"{self._of}: {choices}; its columns are {listed(names)}: {instead}")
        self._chosen = chosen
        return chosen

    def takes(self, row: Mapping[str, object]) -> bool:
        """Whether an object is a row, and not what holds an array of them."""
        chosen = columns(list(row), self.column)
        return bool(chosen) and all(_is_value(row[name]) for name in chosen)

    def text(self, row: object, where: str) -> str | None:
        """A row's text; None for one that has none. Raises TextError."""
        self.rows += 1
        try:
            text = self._text(row, where)
        except TypeError as error:
            raise TextError(f"{where}: {error}") from None
        if text is None:
            self.null += 1
        elif not text or text.isspace():
            self.empty += 1
        else:
            self._last = self.rows
        if self.rows - self._last > WITHOUT:
            raise TextError(f"{where}: the last {WITHOUT:,} rows are empty or null; give a file of text")
        return text

    def _text(self, row: object, where: str) -> str | None:
        if row is None or row == {}:
            return None
        if isinstance(row, str) and self.column is None:
            return row
        if not isinstance(row, Mapping):
            raise TextError(f"{where}: a JSON object is expected, found {type(row).__name__}")
        chosen = self._chosen if self._chosen is not None else self.choose(list(row))
        values = [_value(row, name) for name in chosen]
        if any(value is None for value in values):
            return None
        chats = [value for value in values if isinstance(value, list)]
        if len(chats) == len(values):
            return self._chat([message for chat in chats for message in chat], where)
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            raise TypeError(f"columns {' and '.join(chosen)} are text and a chat; both must be one or the other")
        return "\n".join(texts)

    def _chat(self, turns: list[Mapping[str, object]], where: str) -> str:
        messages = [_message(one) for one in turns]
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            return ""
        if self.render is None:
            raise TextError(
                f"{where}: a chat, and the tokenizer has no chat template to read it by; give a model whose tokenizer "
                "has "
                "one (an instruct model), or name a column of plain text with --column"
            )
        try:
            return self.render(messages)
        except Exception as error:  # a template raises what it likes
            raise TextError(f"{where}: the tokenizer's chat template refuses this chat ({one_line(error)})") from error


def _is_value(value: object) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, list) and all(_is_message(one) for one in value))
    )


def _is_message(one: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(one, Mapping) and ("role" in one or "from" in one)


def _value(row: Mapping[str, object], name: str) -> str | list[Mapping[str, object]] | None:
    """Text, a chat, or None where the row has null. Raises TypeError for anything else."""
    if name not in row:
        raise TypeError(f"column {name!r} is missing, not text")
    value = row[name]
    if name in CHATS and isinstance(value, str) and value.strip():  # a chat in a table is JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise TypeError(f"column {name!r} is no list of messages") from None
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(_is_message(one) for one in value):
        return value
    kind = "a list of other things than messages with a role" if isinstance(value, list) else type(value).__name__
    raise TypeError(f"column {name!r} is {kind}, not text")


def _message(fields: Mapping[str, object]) -> Message:
    """{"role", "content"} of a message, or of ShareGPT's {"from", "value"}; what else it has stays, without nulls."""
    role = fields.get("role") or fields.get("from")
    if not isinstance(role, str):
        raise TypeError(f"a message's role is {type(role).__name__}, not text")
    more = {k: v for k, v in fields.items() if k not in ("role", "from", "content", "value") and v is not None}
    content = _content(fields["content"] if fields.get("content") is not None else fields.get("value"))
    return {"role": ROLES.get(role.lower(), role), "content": content, **more}


def _content(content: object) -> str:
    """Text, or a list of parts that are text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise TypeError(f"a message has a part of type {one_line(str(kind))}; only text can be read")
    return "".join(text for text in texts if isinstance(text, str))
