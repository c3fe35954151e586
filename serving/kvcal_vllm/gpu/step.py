"""Which tokens of a step are whose, on a GPU, and which rows take which path. Nothing here reads the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from kvcal_kernels.layout import BLOCK


@dataclass(frozen=True)
class Prefill:
    """A chunk that torch attends to. row: of the block table. first, stop: its tokens in the step. length: tokens of
    the request, the chunk's included.
    """

    row: int
    first: int
    stop: int
    length: int


@dataclass(frozen=True)
class Step:
    """A step of R rows, decode rows first. table int32 (R, n): pages of each row. lengths int32 (R,): tokens of each
    row, the step's included. starts int32 (R + 1,): where each row's tokens begin. All three are vLLM's, on the device.

    decodes, decode_tokens: rows of the decode kernel, and their tokens with padding. queries: the most that such a row
    has. blocks: the most that it is expected to have; 0: as many as a row of the table has. captured: whether a CUDA
    graph of the step is being recorded.
    """

    table: Tensor
    lengths: Tensor
    starts: Tensor
    decodes: int
    decode_tokens: int
    queries: int
    blocks: int = 0
    prefills: tuple[Prefill, ...] = ()
    captured: bool = False


def step_of(
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    host_starts: Sequence[int],
    host_lengths: Sequence[int],
    tokens: int,
    most: int,
    longest: int = 0,
) -> Step:
    """The step of a batch. host_starts, host_lengths: `starts`, and upper bounds of `lengths` that are exact for rows
    of several tokens, as the host knows them. tokens: of the step with padding. most: queries of a row up to which the
    decode kernel takes it. longest: tokens of the longest row at most; 0: unknown.

    Rows up to the first with more than `most` tokens are decode rows; all behind it are prefills, where they have
    tokens.
    """
    counts = [stop - first for first, stop in pairwise(host_starts)]
    decodes = next((row for row, count in enumerate(counts) if count > most), len(counts))
    prefills = tuple(
        Prefill(row, host_starts[row], host_starts[row + 1], host_lengths[row])
        for row in range(decodes, len(counts))
        if counts[row]
    )
    decode_tokens = host_starts[decodes] if decodes < len(counts) else tokens
    queries = 1 << (max(1, *counts[:decodes], 1) - 1).bit_length()  # few kernels are compiled
    return Step(
        table, lengths, starts, decodes, decode_tokens if decodes else 0, queries, -(-longest // BLOCK), prefills
    )
