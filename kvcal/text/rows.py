"""The text of a row: which columns hold it, chats through the tokenizer's template, rows without any.

The column asked for is taken, else the first group of `GROUPS` in which the row has text. A group is `text` or
`content`, several columns joined by line ends (question and answer, instruction and output), or a chat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line

CHATS = ("messages", "conversations", "conversation")
SYSTEM = ("system", "system_prompt")
OPTIONAL = (*SYSTEM, "context", "input")  # read where a row has text there
# Columns in the order in which they are read. Bundles name texts, so what was read of one stays the same: new groups
# come last.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("content",),
    (*SYSTEM, "context", "question", "answer"),
    (*SYSTEM, "prompt", "completion"),
    (*SYSTEM, "instruction", "input", "output"),
    *((*SYSTEM, name) for name in CHATS),
    (*SYSTEM, "prompt", "chosen"),
    (*SYSTEM, "chosen"),
    (*SYSTEM, "instruction", "context", "response"),
    (*SYSTEM, "question", "response"),
    (*SYSTEM, "prompt", "response"),
)
NAMED = (
    "text or content, no messages, conversations or chosen, no question and answer, prompt and completion, or "
    "instruction and output or response"
)
ONE = "name one with --column"
ALONE = (
    "one message of a chat; a row is a whole chat: a list of its messages, or an object with messages; or name a "
    "column with --column"
)
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
CHAT_ROLES = {"user", "assistant", "system", "developer", "tool", "function"}
SHOWN, SHOWN_NAME, SHOWN_ALL = 20, 30, 200  # columns that a message names, characters of one, and of all of them
PLAIN_NAME = re.compile(r"[\w.-]+")
WITHOUT = 1 << 18  # rows without text, one after another, at most
LACKING = 1000  # rows at the start of a file without a column of text, at most

Row = tuple[str, object]  # where it stands, for messages; the row
Chat: TypeAlias = list[Mapping[str, object]]
Value: TypeAlias = str | Chat | None
Message = dict[str, object]  # role, content and what else the template may read
Render = Callable[[list[Message]], str]


def groups_of(names: Collection[str], column: str | None) -> list[list[str]]:
    """The groups of columns that these hold, the first of them first, without optional ones that are not there: the
    column asked for, or the defaults.
    """
    if column is not None:
        return [[column]] if column in names else []
    return [
        [name for name in group if name in names]
        for group in GROUPS
        if all(name in names for name in group if name not in OPTIONAL)
    ]


def columns(names: Collection[str], column: str | None) -> list[str]:
    """The columns that may hold text, each once; empty without any."""
    return list(dict.fromkeys(name for group in groups_of(names, column) for name in group))


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

    column: as asked for. render: a chat's text; None: no chat can be read. rows: seen so far; null, empty, lacking: of
    them, those without text, the last without a column for it. An empty one leaves its blank line between two
    documents, the others nothing.
    """

    column: str | None = None
    render: Render | None = None
    rows: int = 0
    null: int = 0
    empty: int = 0
    lacking: int = 0
    _of: str = ""
    _last: int = 0  # row that had text
    _begun: int = 0  # rows before this file or data set
    _holds: bool = False  # it has had a row with a column of text
    _names: dict[str, None] = field(default_factory=dict)  # columns of its rows that had none

    def begin(self, of: str) -> None:
        """Another file, or data set, of this name."""
        self._of, self._begun, self._holds, self._names = of, self.rows, False, {}

    def end(self) -> None:
        """The end of a file or data set. Raises TextError where no row had a column of text."""
        if self._names and not self._holds:
            raise self._refused(list(self._names))

    def choose(self, names: Sequence[str], instead: str = ONE) -> list[str]:
        """The columns of a table that are to be read. Raises TextError where none holds text; instead: what to do
        then.
        """
        chosen = columns(names, self.column)
        if not chosen:
            raise self._refused(names, instead)
        return chosen

    def _refused(self, names: Sequence[str], instead: str = ONE) -> TextError:
        missing = f"no column {self.column!r}" if self.column else f"no {NAMED}"
        return TextError(f"{self._of}: {missing}; its columns are {listed(names)}: {instead}")

    def takes(self, row: Mapping[str, object]) -> bool:
        """Whether an object is a row, and not what holds an array of them."""
        return any(all(is_value(row[name]) for name in group) for group in groups_of(row, self.column))

    def text(self, row: object, where: str) -> str | None:
        """A row's text; None for one that has none. Raises TextError."""
        self.rows += 1
        try:
            text = self._text(row, where)
        except TypeError as error:
            raise TextError(f"{where}: {error}") from None
        if text is None:
            if self._lacks(row):
                self.lacking += 1
            else:
                self.null += 1
        elif not text or text.isspace():
            self.empty += 1
        else:
            self._last = self.rows
        if self.rows - self._last > WITHOUT:
            raise TextError(f"{where}: the last {WITHOUT:,} rows are empty or null; give a file of text")
        if not self._holds and len(self._names) and self.rows - self._begun >= LACKING:
            raise self._refused(list(self._names))
        return text

    def _lacks(self, row: object) -> bool:
        """Whether a row without text has no column for it."""
        return isinstance(row, Mapping) and bool(row) and not groups_of(row, self.column)

    def _text(self, row: object, where: str) -> str | None:
        if row is None or row == {}:
            return None
        if self.column is None and (isinstance(row, str) or is_chat(row)):
            self._holds = True
            return row if isinstance(row, str) else self._chat(row, where)
        if not isinstance(row, Mapping):
            raise TextError(f"{where}: a JSON object is expected, found {type(row).__name__}")
        groups = groups_of(row, self.column)
        if self.column is None and groups in ([], [["content"]]) and _role([row]) in CHAT_ROLES:
            raise TypeError(ALONE)
        if not groups:
            self._names |= dict.fromkeys(list(row)[: SHOWN + 1]) if len(self._names) <= SHOWN else {}
            return None
        self._holds = True
        nothing: str | None = None
        for group in groups:
            text = self._of_group({name: _value(row[name], name) for name in group}, row, where)
            if text is not None and text.strip():
                return text
            nothing = text if nothing is None else nothing
        return nothing

    def _of_group(self, values: dict[str, Value], row: Mapping[str, object], where: str) -> str | None:
        """The text of one group of columns; None where a column that it needs is null."""
        values = {name: value for name, value in values.items() if name not in OPTIONAL or _has_text(value)}
        if any(value is None for value in values.values()):
            return None
        chats = {name: value for name, value in values.items() if isinstance(value, list)}
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        if not chats:
            return "\n".join(texts.values())
        if apart := [name for name in texts if name not in SYSTEM and (name, *chats) != ("prompt", "chosen")]:
            raise TypeError(
                f"columns {' and '.join([*apart, *chats])} are text and a chat; both must be one or the other"
            )
        return self._chat(_whole_chat(texts, chats), where)

    def _chat(self, turns: list[Mapping[str, object]], where: str) -> str:
        messages = [_message(one) for one in turns]
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            return ""
        if self.render is None:
            raise TextError(
                f"{where}: a chat, and the tokenizer has no chat template to read it by; give a model whose tokenizer "
                "has one (an instruct model), or name a column of plain text with --column"
            )
        try:
            return self.render(messages)
        except Exception as error:  # a template raises what it likes
            raise TextError(f"{where}: the tokenizer's chat template refuses this chat ({one_line(error)})") from error


def _whole_chat(texts: dict[str, str], chats: dict[str, Chat]) -> Chat:
    """The messages of a row's columns, one after another. A chosen answer may begin with its prompt; a system prompt
    goes before a chat that has none.
    """
    first, *others = chats.values()
    prompt = texts.get("prompt")
    if prompt is not None and _role(first) == "assistant":
        first = [{"role": "user", "content": prompt}, *first]
    for chat in others:
        first = chat if chat[: len(first)] == first else [*first, *chat]
    system = next((texts[name] for name in SYSTEM if name in texts), None)
    return first if system is None or _role(first) == "system" else [{"role": "system", "content": system}, *first]


def _role(turns: Chat) -> str:
    """The role of a chat's first message, as templates name it; empty without any."""
    role = str((turns[0].get("role") or turns[0].get("from")) if turns else "").lower()
    return ROLES.get(role, role)


def _has_text(value: Value) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def is_value(value: object) -> bool:
    """Whether a column may hold it: null, text or a chat."""
    return value is None or isinstance(value, str) or value == [] or is_chat(value)


def is_chat(value: object) -> TypeGuard[Chat]:
    """Whether it is a list of messages."""
    return isinstance(value, list) and bool(value) and all(_is_message(one) for one in value)


def _is_message(one: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(one, Mapping) and ("role" in one or "from" in one)


def _value(value: object, name: str) -> Value:
    """Text, a chat, or None where the row has null. Raises TypeError for anything else."""
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
