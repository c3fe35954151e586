"""Token windows of a text: the tokens that a method is calibrated on, and those held out or evaluated.

The token stream of a source (token_stream.py) is cut into slots of one window each, none overlapping another.
Calibration takes its held-out windows from the last slots and its training windows from the others, both by
seeded choice. T is the window's length; a window starts with BOS where the tokenizer adds one, and T - 1
tokens of text follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import TextError, UsageError

from .documents import omitted_note
from .sources import TextSource, resolve_text
from .token_stream import PIECE, Progress, TokenReader

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# Evaluation takes the text from its start, and a piece's last token may differ from that of the whole text:
# up to this size (WikiText-2's test set has 1.3 M characters) there is one piece and no seam.
WHOLE = 1 << 21
POOL = 2  # slots read per window, so that the seed has a choice

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
    """`windows` windows of `length` tokens; `holdout` of them are held out, from another part of the text.

    Reads at most POOL slots for each window (a large text from its start) and chooses among them by `seed`.
    say: called with which files of a folder and which rows are skipped.
    """
    _check_counts(windows, length, holdout)
    source = resolve_text(text, column=column) if isinstance(text, str) else text
    reader = TokenReader(tokenizer, source, PIECE, progress)
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

    say: called with which files of a folder and which rows are skipped, and where there are fewer windows.
    """
    _check_counts(1 if windows is None else windows, length, 0)
    source = resolve_text(text, column=column) if isinstance(text, str) else text
    # 16 characters a token: the seam lies behind the last window, which thus does not depend on their number
    piece = WHOLE if windows is None else min(WHOLE, max(PIECE, 16 * windows * length))
    reader = TokenReader(tokenizer, source, piece, progress)
    body = length - len(reader.bos)
    reader.read(None if windows is None else windows * body)
    _tell(source, reader, say)
    slots = reader.slots(body)[:windows]
    if len(slots) == 0 or reader.blank:
        raise TextError(_too_little(source, reader, 1, length, body))
    if say is not None and windows is not None and len(slots) < windows:
        counted = f"{len(slots):,} windows of {length:,} tokens"
        say(f"note: text {source.label} holds {counted}, not {windows:,}: all are taken")
    ids = reader.with_bos(slots)
    return EvaluationWindows(ids, reader.label, reader.text_hash(), ids_hash(ids), reader.count, bool(reader.bos))


def random_windows(vocab: int, *, windows: int, length: int, holdout: int = 0, seed: int = 0) -> Windows:
    """Windows of uniformly random tokens, for random weights and benchmarks; the source says so."""
    import torch

    _check_counts(windows, length, holdout)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (windows, length), generator=generator, device="cpu")
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
    chosen = torch.randperm(slots - tail, generator=generator, device="cpu")[:train]
    heldout = slots - tail + torch.randperm(tail, generator=generator, device="cpu")[:holdout]
    return chosen, heldout


def _tell(source: TextSource, reader: TokenReader, say: Say | None) -> None:
    """What was skipped, a line each."""
    if say is None:
        return
    if (line := omitted_note(source)) is not None:
        say(line)
    picker = reader.picker
    if picker.null or picker.empty or picker.lacking:
        counts = f"{picker.empty:,} are empty and {picker.null:,} null"
        if picker.lacking:
            counts = f"{picker.empty:,} are empty, {picker.null:,} null and {picker.lacking:,} without a column of text"
        say(f"note: {reader.label}: of {picker.rows:,} rows read {counts}; skipped")


def _too_little(source: TextSource, reader: TokenReader, windows: int, length: int, body: int) -> str:
    if reader.blank:
        rows = f": its {reader.picker.rows:,} rows are empty or null" if reader.picker.rows else ""
        return f"text {source.label} is empty{rows}"
    need = f"{windows:,} windows of {length:,} need" if windows > 1 else f"one window of {length:,} needs"
    return (
        f"text {source.label} holds {reader.count:,} tokens, {need} {windows * body:,}: "
        "ask for fewer or shorter windows, or give more text"
    )
