"""Text in, token windows out: embedded text, local files, or a data set of the Hugging Face hub.

A source is one stream of documents joined by blank lines. It is cut into pieces at line ends, each piece is
tokenised once, and the token stream is cut into slots of one window each, none overlapping another.
Calibration takes its held-out windows from the last slots and its training windows from the others, both by
seeded choice. T is the window's length; a window starts with BOS where the tokenizer adds one, and T - 1
tokens of text follow.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import KVCalError, TextError, TextUnavailable, UsageError

from ..models import hub
from ..models.hub import one_line
from ..report.extras import require
from .files import ALLOWED, Document, check_file, folder_files, kind_of, looks_like_file, read_file
from .rows import Message, Picker, Render

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..models.names import ModelSource

TEXT = Path(__file__).parents[1] / "demo" / "text"
EMBEDDED = {f"embedded:{path.stem}": path for path in (TEXT / "calibration.txt", TEXT / "evaluation.txt")}
DEFAULTS = {
    "calibration": "HuggingFaceFW/fineweb-edu:sample-10BT:train",
    "evaluation": "Salesforce/wikitext:wikitext-2-raw-v1:test",
}
SPLITS = ("train", "test", "validation", "dev")
DATASET = re.compile(r"[\w.-]+/[\w.-]+(:[\w.+-]*){0,2}(@[0-9a-f]{40})?")

PIECE = 1 << 18  # characters tokenised as one: small enough that a batch of them runs in parallel
BATCH = 16  # pieces a call
# Evaluation takes the text from its start, and a piece's last token may differ from that of the whole text:
# up to this size (WikiText-2's test set has 1.3 M characters) there is one piece and no seam.
WHOLE = 1 << 21
POOL = 2  # slots read for each window wanted, so that the seed has a choice

Progress = Callable[[int, int], None]  # tokens so far, tokens wanted
Say = Callable[[str], None]


@dataclass(frozen=True)
class Windows:
    """Calibration windows. `sha256` is of the text read (UTF-8), `ids_sha256` of the two tensors."""

    train: Tensor  # (N, T) int64
    holdout: Tensor  # (M, T) int64
    source: str
    sha256: str
    ids_sha256: str
    tokens_read: int
    bos: bool
    column: str | None = None  # as asked for

    @property
    def length(self) -> int:
        return self.train.shape[1]


@dataclass(frozen=True)
class EvaluationWindows:
    """Consecutive windows from the start of a text, for perplexity."""

    ids: Tensor  # (N, T) int64
    source: str
    sha256: str
    ids_sha256: str
    tokens_read: int
    bos: bool


@dataclass(frozen=True)
class TextSource:
    """A text by name. `label` goes into bundles: it holds no path of this machine, only names."""

    kind: str  # embedded | file | folder | dataset
    label: str
    path: Path | None = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    column: str | None = None
    commit: str | None = None  # of a data set; None: its main branch's present one


def default_text(source: ModelSource, purpose: str) -> str:
    """The text used when the user names none; purpose: calibration or evaluation. The caller prints it."""
    if purpose not in DEFAULTS:
        raise UsageError(f"text for {purpose!r}: allowed are {', '.join(DEFAULTS)}")
    return f"embedded:{purpose}" if source.kind == "embedded" else DEFAULTS[purpose]


def resolve_text(text: str, *, column: str | None = None) -> TextSource:
    """`embedded:calibration`, an existing file or folder, or `org/name[:config][:split][@commit]`, in this order."""
    if text == "-":
        raise TextError("text '-': standard input is not read; write the text to a file and give that")
    if text in EMBEDDED:
        return TextSource("embedded", text, path=EMBEDDED[text])
    path = _existing(text)
    if path is not None and path.is_dir():
        return TextSource("folder", f"folder:{path.resolve().name}", path=path, column=column)
    if path is not None:
        return TextSource("file", f"file:{path.name}", path=path, column=column)
    if DATASET.fullmatch(text) and not looks_like_file(text):
        return _dataset(text, column)
    if text.startswith("embedded:"):
        raise TextError(f"text {text!r}: embedded are {', '.join(EMBEDDED)}")
    raise TextError(f"text {text!r}: no such file or folder; a data set on the hub reads org/name[:config][:split]")


def _existing(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, a home that does not exist, a NUL byte
        return None


def _dataset(text: str, column: str | None) -> TextSource:
    """`org/name:x` is a split if x is the name of a usual one, else a config."""
    text, _, commit = text.partition("@")
    name, *parts = text.split(":")
    if len(parts) == 1 and parts[0] in SPLITS:
        parts = ["", parts[0]]
    config, split = (*parts, "", "")[:2]
    label = ":".join([name, config or "default", split or "train"])
    return TextSource("dataset", label, None, name, config or None, split or "train", column, commit or None)


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    text: str | TextSource,
    *,
    windows: int,
    length: int,
    holdout: int = 0,
    seed: int = 0,
    column: str | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
) -> Windows:
    """`windows` windows of `length` tokens; `holdout` of them are held out, from a part of their own.

    Reads at most POOL slots for each window (a large text from its start) and chooses among them by `seed`.
    say: told which files of a folder and which rows have been left out.
    """
    _check_counts(windows, length, holdout)
    source = resolve_text(text, column=column) if isinstance(text, str) else text
    reader = _Reader(tokenizer, source, PIECE, progress)
    body = length - len(reader.bos)
    reader.read(POOL * windows * body)
    _tell(source, reader, say)
    slots = reader.slots(body)
    if len(slots) < windows or reader.blank:
        raise TextError(_too_little(source, reader, windows, length, body))
    train, heldout = _choose(len(slots), windows - holdout, holdout, seed)
    train, heldout = reader.with_bos(slots[train]), reader.with_bos(slots[heldout])
    return Windows(
        train,
        heldout,
        reader.label,
        reader.text_hash(),
        ids_hash(train, heldout),
        reader.count,
        bool(reader.bos),
        source.column,
    )


def evaluation_windows(
    tokenizer: PreTrainedTokenizerBase,
    text: str | TextSource,
    *,
    windows: int | None,
    length: int,
    column: str | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
) -> EvaluationWindows:
    """Cut at most `windows` consecutive windows from the start (None: all there are); a short rest is cut off.

    say: told which files of a folder and which rows have been left out.
    """
    _check_counts(1 if windows is None else windows, length, 0)
    source = resolve_text(text, column=column) if isinstance(text, str) else text
    # 16 characters a token: the seam lies behind the last window, which thus does not depend on their number
    piece = WHOLE if windows is None else min(WHOLE, max(PIECE, 16 * windows * length))
    reader = _Reader(tokenizer, source, piece, progress)
    body = length - len(reader.bos)
    reader.read(None if windows is None else windows * body)
    _tell(source, reader, say)
    slots = reader.slots(body)[:windows]
    if len(slots) == 0 or reader.blank:
        raise TextError(_too_little(source, reader, 1, length, body))
    ids = reader.with_bos(slots)
    return EvaluationWindows(ids, reader.label, reader.text_hash(), ids_hash(ids), reader.count, bool(reader.bos))


def random_windows(vocab: int, *, windows: int, length: int, holdout: int = 0, seed: int = 0) -> Windows:
    """Windows of uniformly random tokens, for random weights and benchmarks; the source says so."""
    import torch

    _check_counts(windows, length, holdout)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (windows, length), generator=generator)
    train, heldout = ids[: windows - holdout], ids[windows - holdout :]
    label = f"random-tokens:{seed}"
    digest = hashlib.sha256(f"{label}:{vocab}".encode()).hexdigest()
    return Windows(train, heldout, label, digest, ids_hash(train, heldout), windows * length, bos=False)


def random_evaluation(vocab: int, *, windows: int, length: int, seed: int = 0) -> EvaluationWindows:
    """Evaluation windows of random tokens."""
    drawn = random_windows(vocab, windows=windows, length=length, seed=seed)
    ids = drawn.train
    return EvaluationWindows(ids, drawn.source, drawn.sha256, ids_hash(ids), ids.numel(), bos=False)


def ids_hash(*tensors: Tensor) -> str:
    """SHA-256 of token ids as little-endian int64, shapes included."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _check_counts(windows: int, length: int, holdout: int) -> None:
    if windows < 1 or length < 2:
        raise UsageError(f"{windows} windows of {length} tokens: at least 1 window of 2 tokens is needed")
    if not 0 <= holdout < windows:
        raise UsageError(f"{holdout} of {windows} windows held out: at least one must be left to train on")


def _choose(slots: int, train: int, holdout: int, seed: int) -> tuple[Tensor, Tensor]:
    """Seeded indices: held-out ones from the last slots, in proportion, training ones from those before."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tail = max(holdout, slots * holdout // (train + holdout))
    tail = min(tail, slots - train)
    chosen = torch.randperm(slots - tail, generator=generator)[:train]
    heldout = slots - tail + torch.randperm(tail, generator=generator)[:holdout]
    return chosen, heldout


def _tell(source: TextSource, reader: _Reader, say: Say | None) -> None:
    """What was left out, a line each."""
    if say is None:
        return
    if (line := left_out(source)) is not None:
        say(line)
    picker = reader.picker
    if picker.null or picker.empty or picker.lacking:
        counts = f"{picker.empty:,} are empty and {picker.null:,} null"
        if picker.lacking:
            counts = f"{picker.empty:,} are empty, {picker.null:,} null and {picker.lacking:,} without a column of text"
        say(f"note: {reader.label}: of {picker.rows:,} rows read {counts}; skipped")


def _too_little(source: TextSource, reader: _Reader, windows: int, length: int, body: int) -> str:
    if reader.blank:
        rows = f": its {reader.picker.rows:,} rows are empty or null" if reader.picker.rows else ""
        return f"text {source.label} is empty{rows}"
    need = f"{windows:,} windows of {length:,} need" if windows > 1 else f"one window of {length:,} needs"
    return (
        f"text {source.label} holds {reader.count:,} tokens, {need} {windows * body:,}: "
        "ask for fewer or shorter windows, or give more text"
    )


class _Reader:
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
            self._chunks.append(torch.tensor(ids, dtype=torch.int32))
            self.count += len(ids)
        if self._progress is not None:
            self._progress(self.count if slots is None else min(self.count, slots), slots or self.count)

    def slots(self, body: int) -> Tensor:
        """All tokens read as (slots, body), the rest cut off."""
        import torch

        stream = torch.cat(self._chunks) if self._chunks else torch.empty(0, dtype=torch.int32)
        count = len(stream) // body
        return stream[: count * body].view(count, body)

    def with_bos(self, slots: Tensor) -> Tensor:
        import torch

        bos = torch.tensor(self.bos, dtype=torch.int64).expand(len(slots), len(self.bos))
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
    """[BOS] where the tokenizer puts it before a text of its own accord, else nothing."""
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


def open_documents(source: TextSource, picker: Picker) -> tuple[Iterator[Document], str]:
    """The documents of a source, lazily, and its label (with the commit, for a data set)."""
    if source.dataset is not None:
        return _stream(source, picker)
    files = source_files(source)
    return (document for path in files for document in read_file(path, source.column, picker)), source.label


def source_files(source: TextSource) -> list[Path]:
    """The files of a local text, in the order in which they are read. Raises TextError where nothing can be."""
    assert source.path is not None
    if source.kind != "folder":
        check_file(source.path)
        kind_of(source.path)
        return [source.path]
    files, others = folder_files(source.path)
    if not files:
        among = f" among {len(others)} files ({_first(others)})" if others else ""
        raise TextError(f"folder {source.path} holds no text{among}: looked for {ALLOWED}")
    return files


def check_local(text: str) -> None:
    """Raises TextError for a text that is neither there nor a data set's name, and for a file of a kind that is not
    read; UsageError for a data set where the package that reads it is missing.
    """
    source = resolve_text(text)
    if source.dataset is None:
        source_files(source)
    else:
        _check_datasets(source)


def _check_datasets(source: TextSource) -> None:
    require("datasets", f"data set {source.label}", "give --text a local file")


def left_out(source: TextSource) -> str | None:
    """What a folder holds that is not read, in a line; None where there is nothing to say."""
    if source.kind != "folder" or source.path is None:
        return None
    files, others = folder_files(source.path)
    if not files or not others:
        return None
    count = f"{len(others):,} files" if len(others) > 1 else "1 file"
    return (
        f"note: {source.label}: {count} left out ({_first(others)}), {len(files):,} read ({_first(files)}); a text "
        "that is "
        "left out can be given by its name, or in a folder of its own"
    )


def _first(paths: list[Path], most: int = 3) -> str:
    return ", ".join([one_line(path.name) for path in paths[:most]] + (["..."] if len(paths) > most else []))


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


def _stream(source: TextSource, picker: Picker) -> tuple[Iterator[Document], str]:
    """A data set of the hub, streamed at the commit asked for or the main branch's present one; the label names it."""
    _check_datasets(source)
    sha = dataset_commit(source)
    try:
        with hub.quiet():
            rows = _rows(source, sha)
    except KVCalError:
        raise
    except Exception as error:
        raise _unavailable(source, error) from error
    return _dataset_texts(source, rows, picker), f"{source.label}@{sha}"


def dataset_commit(source: TextSource) -> str | None:
    """The commit asked for, else the present one of the main branch."""
    name = source.dataset
    assert name is not None
    if not hub.reachable():
        raise TextUnavailable(
            f"data set {source.label}: no local file or folder has this name and {hub.why_unreachable()}; "
            "connect, or give a local text"
        )
    try:
        with hub.quiet():
            sha: str | None = source.commit or hub.dataset_info(name).sha
    except Exception as error:
        raise _unavailable(source, error) from error
    return sha


def _rows(source: TextSource, sha: str | None) -> Iterable[object]:
    import datasets

    rows: Iterable[object] = datasets.load_dataset(
        source.dataset, source.config, split=source.split, streaming=True, revision=sha
    )
    return rows


def _dataset_texts(source: TextSource, rows: Iterable[object], picker: Picker) -> Iterator[Document]:
    number = 0
    picker.begin(f"data set {source.label}")
    try:
        for number, row in enumerate(rows, 1):
            if (text := picker.text(row, f"data set {source.label} row {number}")) is not None:
                yield [text]
        picker.end()
    except KVCalError:
        raise
    except Exception as error:  # whatever the connection or a reader throws in the middle of a stream
        raise TextUnavailable(
            f"data set {source.label}: broke off after row {number:,} ({one_line(error)}); try again"
        ) from error


def _unavailable(source: TextSource, error: Exception) -> TextUnavailable:
    from huggingface_hub import errors

    site = f"https://huggingface.co/datasets/{source.dataset}"
    label = f"data set {source.label}"
    if isinstance(error, errors.GatedRepoError):
        return TextUnavailable(f"{label} is gated: accept its terms at {site} and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return TextUnavailable(
            f"{label} is not on the hub, or it is private: check the name (no local file has it either)"
        )
    if "scripts are no longer supported" in str(error):
        return TextUnavailable(f"{label} is a loading script, which no longer works: use a parquet one")
    return TextUnavailable(f"{label}: {one_line(error)}; see {site} for its configs and splits")
