"""Memory that rows of one layer need: a shape that is too large is a row that says so, before anything is allocated.

On a CPU the system would end the process, and no row would be left. What is taken there is the most that 14 schemes
needed, 40 to 119 bytes per key and its value together. They ran one row of 2k and 8k tokens and four of 2k, of
Llama-3.1-8B. On a GPU running out is an error that becomes a row, so only what certainly lies there at the same time
counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..models.memory import free_bytes
from .timing import COPY_BYTES, Clock

if TYPE_CHECKING:  # these import this module
    from .layer import Case

HOST = 100  # bytes a key: float32 and wider copies that encoding, decoding and checks make
HOST_BELOW = 10  # more, for each side of another layer that predictors read
HOST_PEER = (
    24,
    12,
)  # of FP16: a key, and a key and query head of it (torch's math repeats keys for those): 66 to 72 seen
VECTOR = 3 * 4  # bytes a number of vectors whose nearest codewords are looked for, with what compares them
EXACT = 8  # a number in float64


def whole(case: Case) -> int:
    """Bytes for all tokens: random keys and values and what they are packed to, with what a check decodes."""
    numbers = _keys(case)
    if case.device.type == "cuda":  # input and float32 numbers that were decoded, of keys and values
        return int(2 * numbers * (case.dtype.itemsize + 4 + case.scheme.stored_bits / 8))
    below = len(case.scheme.codecs.needs - {"k0"})
    return numbers * (HOST + below * HOST_BELOW) + 2 * COPY_BYTES["cpu"]


def peers(case: Case, dtype: torch.dtype) -> int:
    """Bytes for FP16's keys and values, with float64 ones of a row for the check."""
    numbers = _keys(case)
    if case.device.type == "cuda":
        return 2 * numbers * dtype.itemsize + 2 * numbers // case.batch * EXACT
    key, head = HOST_PEER
    return numbers * (key + head * case.group) + 2 * COPY_BYTES["cpu"]


def vectors(case: Case) -> int:
    """Bytes for batch * length vectors of head_dim."""
    return case.batch * case.length * case.geometry.head_dim * VECTOR


def feed_forward(case: Case) -> int:
    """Bytes for three matrices and the same in float64."""
    return 3 * case.geometry.hidden * case.geometry.intermediate * (case.dtype.itemsize + EXACT)


@dataclass(frozen=True)
class FreeMemory:
    """The memory that an operation may take on the clock's device. free: bytes, None where the system does not say it.
    buffer: bytes of those that the clock will take, too.
    """

    device: torch.device
    free: int | None
    buffer: int = 0

    @classmethod
    def of(cls, clock: Clock) -> FreeMemory:
        """Ask the device how much memory is free now."""
        return cls(clock.device, free_bytes(clock.device), clock.buffer_to_come())

    def lacks(self, size: int) -> str | None:
        """Why so many bytes are too many; None if they are not, or nobody knows."""
        size += self.buffer
        if self.free is None or size <= self.free:
            return None
        return (
            f"needs {size / 2**30:.1f} GiB, {self.free / 2**30:.1f} GiB are free on {self.device}; take a smaller "
            "--batch or "
            "--length"
        )


def _keys(case: Case) -> int:
    """Numbers of all keys, or of all values."""
    return case.batch * case.geometry.kv_heads * case.length * case.geometry.head_dim
