"""RoPE of keys that are stored before it, as the fused kernel and its reference apply it.

RoPE by halves rotates channels i and i + R/2 of the first R by an angle that grows by the same for each position. So
tokens whose positions follow one another, a run of 32, differ by a factor that is the same for every run:

    rotation(p + j) = rotation(p) near(j),  near(j) = rotation(j) / rotation(0)

as complex numbers. Stored are rotation(p) of each run's first position, and near(0) to near(31) once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

RUN = 32  # tokens: a block, or as many of a window
PIECE = 16


@dataclass(frozen=True)
class Rope:
    """The rotations of all runs. first: cosine and sine (B or 1, runs, 2, R/2) float32 of each run's first position,
    with what the model scales them by. Runs of the sink's capacity come first, then those of all blocks that there is
    capacity for, then those of recent tokens, which follow a row's last block: token j of a row's window is in run
    ceil(sink capacity / 32) + its blocks + j // 32. Rows with blocks have full sinks; where there are none, recent
    tokens follow those of the sink. near: (32, 2, R/2) float32.

    ValueError where R / 2 is no multiple of 16: pieces of codes then hold both channels of a pair.
    """

    first: Tensor
    near: Tensor

    def __post_init__(self) -> None:
        half = self.near.shape[-1]
        if why := refusal(2 * half):
            raise ValueError(why)
        if self.near.shape != (RUN, 2, half) or self.first.ndim != 4 or self.first.shape[2:] != (2, half):
            raise ValueError(
                f"rotations {tuple(self.first.shape)} of runs, {tuple(self.near.shape)} within: must be (B or 1, "
                "runs, 2, h) "
                f"and ({RUN}, 2, h)"
            )

    @cached_property
    def launch_key(self) -> tuple[object, ...]:
        """All that a kernel takes for granted of it; see layout.launch_key."""
        return self.first.shape, self.near.shape, self.first.device

    @property
    def pairs(self) -> int:
        """Pieces of 16 channels, each of which is rotated with one other."""
        return self.near.shape[-1] // PIECE

    @cached_property
    def first_words(self) -> Tensor:
        """(B or 1, runs, R) float16: for each 16 channels [8][cosine, cosine, sine, sine]."""
        return _words(self.first)

    @cached_property
    def near_words(self) -> Tensor:
        """`near` as float16 in the order in which a lane holds 16 x 16 numbers of a product's first operand: [half
        block][pair][cosine, sine][lane][row / 8][column % 4], lane 4 (row % 8) + column / 4.
        """
        parts = self.near.unflatten(0, (2, 2, 8)).unflatten(-1, (-1, 4, 4))  # half, row / 8, row % 8, 2, pair, column
        words: Tensor = parts.permute(0, 4, 3, 2, 5, 1, 6).half().contiguous()
        return words

    def renew(self, first: Tensor) -> None:
        """Replace the first positions in place, where a recorded graph reads them. Everything that the graph reads
        exists afterwards.
        """
        self.first.copy_(first)
        self.first_words.copy_(_words(first))
        self.near_words  # noqa: B018

    def to(self, device: torch.device | str) -> Rope:
        return Rope(self.first.to(device), self.near.to(device))

    def tables(self, place: Tensor) -> Tensor:
        """Return cosines and sines of tokens, token j of run i being at place 32 i + j: place (B or 1, T) -> (B or 1,
        T, 2, R/2).
        """
        rows = torch.arange(len(self.first), device=place.device)[:, None]
        c0, s0 = self.first[rows, (place // RUN).clamp(0, self.first.shape[1] - 1)].unbind(-2)
        c1, s1 = self.near[place % RUN].unbind(-2)
        return torch.stack([c0 * c1 - s0 * s1, s0 * c1 + c0 * s1], -2)

    def rotate(self, x: Tensor, place: Tensor) -> Tensor:
        """Rotate x (B, H, T, D) float32 at places (B or 1, T), in float32."""
        half = self.near.shape[-1]
        cos, sin = self.tables(place)[:, None].unbind(-2)
        low, high, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _words(first: Tensor) -> Tensor:
    parts = first.unflatten(-1, (-1, 8, 2)).permute(0, 1, 3, 4, 2, 5)
    words: Tensor = parts.flatten(2).half().contiguous()
    return words


def refusal(rotary: int) -> str | None:
    """Return why the kernel does not rotate so many channels of a head; None if it does."""
    if rotary % (2 * PIECE):
        return f"RoPE of {rotary} channels: the fused kernel rotates multiples of {2 * PIECE}"
    return None


def near(cos: Tensor, sin: Tensor) -> Tensor:
    """Return Rope.near of cos, sin (32, R/2) float32 of positions 0 to 31. Position 0 says what the model scales them
    by.
    """
    size = cos[0].square() + sin[0].square()
    parts = (cos * cos[0] + sin * sin[0]) / size, (sin * cos[0] - cos * sin[0]) / size
    return torch.stack(parts, 1)


def runs(sink: int, blocks: int, recent: int) -> int:
    """Return the runs of a row with capacity for so many sink tokens, blocks and recent tokens."""
    return -(-sink // RUN) + blocks + -(-recent // RUN)


def recent_places(sink: Tensor, sink_capacity: int, blocks: Tensor, capacity: int) -> Tensor:
    """Return the places of recent tokens, (B, capacity). sink: tokens that rows have in the sink; blocks: their packed
    blocks; both (B,).
    """
    behind, start = torch.arange(capacity, device=blocks.device), -(-sink_capacity // RUN) * RUN
    rank = sink.long()[:, None] + behind
    first = torch.where(rank < sink_capacity, rank, start + rank - sink_capacity)
    return torch.where(blocks[:, None] > 0, start + RUN * blocks.long()[:, None] + behind, first)


def first_positions(start: Tensor, sink: int, blocks: int, recent: int) -> Tensor:
    """Return the first position of each run, (B, runs). start (B,): positions of rows' first tokens, which others
    follow.
    """
    starts = (
        torch.arange(0, sink, RUN, device="cpu"),
        sink + RUN * torch.arange(blocks + -(-recent // RUN), device="cpu"),
    )
    return start[:, None] + torch.cat(starts).to(start.device)
