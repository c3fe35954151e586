"""Where each row of a batch ends, whatever its neighbours do: what a task's answer of the row came from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """The last call of the model that a row needs. tokens: of the row, read by then. before: of these, those that had
    come before the call.
    """

    tokens: int
    before: int


def generated(prompts: Sequence[int], answers: Sequence[int]) -> list[Reading]:
    """Readings of rows that were generated, a prompt in one call, then token by token.

    prompts: tokens of each row's prompt, without padding. answers: of its answer, at least 1. Nothing reads the last.
    """
    return [
        Reading(prompt + answer - 1, prompt + answer - 2 if answer > 1 else 0)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def forced(lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Reading]:
    """Readings of rows of these lengths, filled up on the right, in calls from a first column to a last (exclusive)."""
    return [Reading(length, next(first for first, last in spans if first < length <= last)) for length in lengths]


def answer_lengths(tokens: Tensor, ends: Collection[int], stopped: Callable[[Tensor], Iterable[bool]]) -> list[int]:
    """The tokens of each row's answer, up to the first that ends it.

    tokens: generated ones (B, T), T at least 1. ends: tokens that end a text. stopped: of the tokens so far, whether
    each row has come to a stop string; it is asked after every token.
    """
    rows, whole = tokens.shape
    lengths = [0] * rows
    for count in range(1, whole + 1):
        last = tokens[:, count - 1].tolist()
        for row, (token, stop) in enumerate(zip(last, stopped(tokens[:, :count]), strict=True)):
            if not lengths[row] and (stop or token in ends):
                lengths[row] = count
        if all(lengths):
            break
    return [length or whole for length in lengths]


@dataclass(frozen=True)
class Requests:
    """The tokens of requests, to find in rows that were filled up on the right with token 0."""

    tokens: frozenset[tuple[int, ...]]

    def lengths(self, ids: Tensor) -> list[int]:
        """The tokens of each row (B, T) that are of a request; all T where the row is of none. Where one request is
        another with tokens 0 behind it, the longer one counts.
        """
        return [self._length(tuple(row)) for row in ids.tolist()]

    def _length(self, row: tuple[int, ...]) -> int:
        padding = next((i for i, token in enumerate(reversed(row)) if token), len(row))
        candidates = range(len(row), len(row) - padding - 1, -1)
        return next((length for length in candidates if row[:length] in self.tokens), len(row))
