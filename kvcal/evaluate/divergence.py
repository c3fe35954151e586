"""How far next-token distributions are from the full-precision ones, token by token: percentiles, agreement,
position.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .spread import standard_error

FIRST_BUCKET = 128  # tokens of the first bucket of positions; each further bucket ends at twice the position


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of the full-precision model, and its likeliest tokens. log_probabilities: (B, T, vocabulary)
    float32; top: (B, T) int64.
    """

    log_probabilities: Tensor
    top: Tensor

    @classmethod
    def of(cls, log_probabilities: Tensor) -> Reference:
        return cls(log_probabilities, log_probabilities.argmax(-1))

    def part(self, start: int, stop: int) -> Reference:
        """The tokens from `start` to `stop`."""
        return Reference(self.log_probabilities[:, start:stop], self.top[:, start:stop])

    def divergence(self, log_probabilities: Tensor) -> Tensor:
        """Forward KL in nats of each token, (B, T) float64, from this distribution to another."""
        right = self.log_probabilities
        return (right.exp() * (right - log_probabilities)).sum(-1).double()

    def agrees(self, log_probabilities: Tensor) -> Tensor:
        """(B, T) bool: whether both have the same likeliest token."""
        return log_probabilities.argmax(-1) == self.top


class Tokens:
    """Figures of every token of an evaluation, packed as text so that JSON can carry them."""

    @staticmethod
    def pack(kl: Tensor, same: Tensor) -> list[str]:
        """Two texts, which `unpack` reads, of a batch's kl (B, T) float and same (B, T) bool."""
        parts = kl.float().cpu().numpy().astype("<f4").tobytes(), np.packbits(same.cpu().numpy()).tobytes()
        return [base64.b64encode(part).decode() for part in parts]

    @staticmethod
    def unpack(packed: Sequence[Sequence[str]], length: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """KL (N, length) float32 and agreement (N, length) bool of all batches."""
        kls, agreements = [], []
        for kl, same in packed:
            one = np.frombuffer(base64.b64decode(kl), "<f4").reshape(-1, length)
            bits = np.unpackbits(np.frombuffer(base64.b64decode(same), np.uint8), count=one.size)
            kls.append(one)
            agreements.append(bits.reshape(one.shape).astype(bool))
        return np.concatenate(kls), np.concatenate(agreements)


class Bucket(TypedDict):
    """Figures of the tokens at positions `first` to `last`. kl: their mean, in nats; kl_se: its standard error over
    windows, None of one window. same_top: share of tokens whose likeliest next token is that of full precision.
    """

    first: int
    last: int
    kl: float
    kl_se: float | None
    same_top: float


@dataclass(frozen=True)
class Spread:
    """The spread of the KL over the tokens of an evaluation. kl_median, kl_p99, kl_max: of the KL of single tokens, in
    nats. same_top: share of tokens whose likeliest next token is that of full precision. kl_behind: mean KL of tokens
    that see packed blocks, None where none does. positions: by bucket of positions, see `buckets`.
    """

    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    kl_behind: float | None
    positions: list[Bucket]

    @classmethod
    def of(cls, packed: Sequence[Sequence[str]], length: int, first_packed: int | None) -> Spread:
        """The spread over batches of tokens. packed: what `Tokens.pack` gave for each batch. length: tokens of a window
        that have a next one. first_packed: the first position that sees a packed block.
        """
        kl, same = Tokens.unpack(packed, length)
        behind = (
            None if first_packed is None or first_packed >= length else float(kl[:, first_packed:].mean(dtype="f8"))
        )
        median, p99 = (float(x) for x in np.quantile(kl, [0.5, 0.99]))
        return cls(median, p99, float(kl.max()), float(same.mean()), behind, buckets(kl, same))


EXACT = Spread(0.0, 0.0, 0.0, 1.0, None, [])


def buckets(kl: npt.NDArray[np.float32], same: npt.NDArray[np.bool_]) -> list[Bucket]:
    """KL and agreement (N, T) by position: 0 to 127, 128 to 255, 256 to 511 and so on."""
    rows: list[Bucket] = []
    start, end = 0, FIRST_BUCKET
    while start < kl.shape[1]:
        stop = min(end, kl.shape[1])
        by_window = kl[:, start:stop].mean(1, dtype="f8").tolist()
        rows.append(
            {
                "first": start,
                "last": stop - 1,
                "kl": statistics.fmean(by_window),
                "kl_se": standard_error(by_window) if len(by_window) > 1 else None,
                "same_top": float(same[:, start:stop].mean()),
            }
        )
        start, end = end, end * 2
    return rows
