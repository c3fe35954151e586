"""The token stream of a text: documents joined by blank lines, cut into pieces at line ends, each tokenised once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import TextError

from ..models.hub import one_line
from .documents import open_documents
from .files import Document
from .rows import Message, Picker, Render
from .sources import TextSource

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


PIECE = 1 << 18  # characters tokenised as one: small enough that a batch of them runs in parallel
BATCH = 16  # pieces a call

Progress = Callable[[int, int], None]  # tokens so far, tokens needed


class TokenReader:
    """A text's tokens, read as far as needed; remembers the hash of what it read."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: TextSource, piece: int, progress: Progress | None
    ) -> None:
        self.tokenizer = tokenizer
        self.bos = _bos(tokenizer)
        self.count = 0
        self.blank = True  # nothing read so far but blanks
        self._progress = progress
        self._chunks: list[Tensor] = []
        self._digest = hashlib.sha256()
        self.picker = Picker(source.column, chat_renderer(tokenizer))
        documents, self.label = open_documents(source, self.picker)
        self._pieces = pieces(documents, piece)

    def read(self, slots: int | None) -> None:
        """Tokenise until `slots` tokens are there, or to the end."""
        batch: list[str] = []
        size = 0
        for piece in self._pieces:
            batch.append(piece)
            size += len(piece)
            # no tokenizer in use makes more than a token of two characters of prose: stop about there
            if len(batch) == BATCH or (slots is not None and size >= 2 * (slots - self.count)):
                self._encode(batch, slots)
                batch, size = [], 0
            if slots is not None and self.count >= slots:
                return
        if batch:
            self._encode(batch, slots)

    def _encode(self, batch: list[str], slots: int | None) -> None:
        import torch

        for piece in batch:
            self._digest.update(_encoded(piece, self.label))
            self.blank = self.blank and not piece.strip()
        encoded = self.tokenizer(
            batch,
            add_special_tokens=False,
            return_token_type_ids=False,
            return_attention_mask=False,
            verbose=False,
        )
        for ids in encoded["input_ids"]:
            self._chunks.append(torch.tensor(ids, dtype=torch.int32, device="cpu"))
            self.count += len(ids)
        if self._progress is not None:
            self._progress(self.count if slots is None else min(self.count, slots), slots or self.count)

    def slots(self, body: int) -> Tensor:
        """All tokens read as (slots, body), the rest cut off."""
        import torch

        stream = torch.cat(self._chunks) if self._chunks else torch.empty(0, dtype=torch.int32, device="cpu")
        count = len(stream) // body
        return stream[: count * body].view(count, body)

    def with_bos(self, slots: Tensor) -> Tensor:
        import torch

        bos = torch.tensor(self.bos, dtype=torch.int64, device="cpu").expand(len(slots), len(self.bos))
        return torch.cat([bos, slots.long()], dim=1)

    def text_hash(self) -> str:
        return self._digest.hexdigest()


def _encoded(piece: str, label: str) -> bytes:
    try:
        return piece.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair, which is no character
        around = one_line(ascii(piece[max(0, error.start - 20) : error.end + 20]))
        raise TextError(f"text {label} holds half of a surrogate pair near {around}: repair it") from error


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """[BOS] where the tokenizer puts it before a text by default, else nothing."""
    with_special = tokenizer("a", verbose=False)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    starts = len(with_special) > len(plain) and with_special[0] == tokenizer.bos_token_id
    return with_special[:1] if starts else []


def pieces(documents: Iterable[Document], size: int) -> Iterator[str]:
    """Documents joined by blank lines, in pieces of at most `size` characters, cut where tokenizers cut."""
    buffer: list[str] = []
    size_now = 0
    for part in _joined(documents):
        buffer.append(part)
        size_now += len(part)
        if size_now > size:
            text, start = "".join(buffer), 0
            while size_now > size:
                cut = _cut(text, start, size)
                yield text[start:cut]
                start, size_now = cut, len(text) - cut
            buffer = [text[start:]]
    if size_now:
        yield "".join(buffer)


def _joined(documents: Iterable[Document]) -> Iterator[str]:
    for index, document in enumerate(documents):
        if index:
            yield "\n\n"
        yield from document


LINE_START = re.compile(r"(?<=\n)(?=\S)")
WORD_START = re.compile(r"(?<=\S)(?= \S)")  # the blank belongs to the word behind it


def _cut(text: str, start: int, size: int) -> int:
    """The last line start in the second half of the `size` characters from `start`; else a word's; else their end."""
    for pattern in (LINE_START, WORD_START):
        # two characters more, for the look-ahead of a start at `size` itself
        starts = [match.start() for match in pattern.finditer(text, start + max(1, size // 2), start + size + 2)]
        if usable := [place for place in starts if place <= start + size]:
            return usable[-1]
    return start + size


def chat_renderer(tokenizer: PreTrainedTokenizerBase) -> Render | None:
    """What turns a chat's messages into text as the model was trained on it; None without a chat template.

    A BOS that the template begins with is left out where windows get one anyway.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    bos = tokenizer.bos_token if _bos(tokenizer) else None
    template: Callable[..., object] = tokenizer.apply_chat_template  # which names strings alone as parts of messages

    def render(messages: list[Message]) -> str:
        text = template(messages, tokenize=False)
        assert isinstance(text, str)
        return text.removeprefix(bos) if bos else text

    return render
