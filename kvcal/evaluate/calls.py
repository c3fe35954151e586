"""The calls of the model into which an evaluation cuts a window: as few as leave every token what it sees."""

from __future__ import annotations

from collections.abc import Iterator

from kvcal_artifacts.paths.fused import QUERIES
from kvcal_artifacts.scheme import Scheme

LONGEST = 512  # tokens a call, at most: logits of the whole vocabulary are held for each
LOGIT_BYTES = {"cuda": 1 << 31, "cpu": 1 << 29}  # of one call's float32 logits, about


def longest_call(step: int, rows: int, vocabulary: int, device: str) -> int:
    """Tokens of the longest call of so many rows: a multiple of `step`, and at least that."""
    fitting = LOGIT_BYTES.get(device, 1 << 29) // (4 * rows * vocabulary)
    return max(step, min(LONGEST, fitting) // step * step)


def segments(length: int, longest: int) -> Iterator[tuple[int, int]]:
    """First and last column (exclusive) of stretches of at most `longest` tokens."""
    for start in range(0, length, longest):
        yield start, min(start + longest, length)


def calls(scheme: Scheme, start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """First and last column (exclusive) of the calls that take the columns from `start` to `stop`, both multiples of
    `step` or the window's end.

    A call sees the blocks that were packed before it, and everything else exact. So calls of `step` tokens between
    which no block is packed can be one. Calls stay as they are where a scheme evicts tokens, which it chooses call by
    call, and where a step is short enough for a fused kernel to serve it.
    """
    starts = list(range(start, stop, step))
    if scheme.selection is None and step > QUERIES:
        packed = [packed_blocks(scheme, column) for column in starts]
        starts = [column for i, column in enumerate(starts) if i == 0 or packed[i] != packed[i - 1]]
    return list(zip(starts, [*starts[1:], stop], strict=True))


def packed_blocks(scheme: Scheme, columns: int) -> int:
    """Blocks that are packed once so many tokens of a row have come, those evicted instead included."""
    windows = scheme.windows
    return max(0, columns - windows.sink - windows.recent) // windows.block
