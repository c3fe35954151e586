"""What a static layer holds on the device: rows' tokens and blocks, and counts that steps move by themselves.

Recent tokens lie in a ring, as kvcal_kernels.quantise has them: token j of a row's window in slot (32 * blocks + j) mod room.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from kvcal_kernels.layout import BLOCK, Rope
from kvcal_kernels.quantise import Counts
from kvcal_kernels.squat import Digits

from ..codecs.base import Packed
from ..errors import KVCalError
from ..storage.ledger import Ledger
from ..windows import Windows
from .slots import take_slots

STORED = ("sink", "window", "blocks")  # of Counts.data: what rows hold after the last call


@dataclass
class Turns:
    """Of keys before RoPE: what turns the tokens of rows as long as they can be, and positions of rows' first tokens, on the
    device (B,) int64 and of the ledger. gap: 0-d bool, whether tokens of a step did not follow those before them.
    """

    rope: Rope | None
    start: Tensor
    gap: Tensor
    of: Tensor | None = None

    def note(self, counts: Counts, positions: Tensor) -> None:
        """positions int (B or 1, Q): of the call that `counts` has been moved by."""
        length = counts.sink_before + counts.window_before + counts.blocks_before * BLOCK
        follow = (self.start + length)[:, None] + torch.arange(positions.shape[1], device=length.device)
        self.gap.logical_or_((positions.to(follow.device) != follow).any())


@dataclass
class Steps:
    """What the layers of a cache on one device share. length: columns, 0-d int64. first, last: their indices; the first
    moves the counts of a call, the last its length. turns: where keys are stored before RoPE. due: by their size, room for
    keys of the block that SQuat packs, one layer after the other. wrong: 0-d bool in the host's memory, whether the device has
    found something that `read` will refuse; written when the step has run, which no one waits for.
    """

    counts: Counts
    length: Tensor
    first: int
    last: int
    wrong: Tensor
    turns: Turns | None = None
    due: dict[torch.Size, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        copies = {one.name: copy.deepcopy(getattr(self, one.name), memo) for one in fields(self)}
        return Steps(**copies | {"wrong": host_bool(self.length.device)})  # copies are not pinned


def host_bool(device: torch.device) -> Tensor:
    """0-d, False, where the device can write to it without anyone waiting."""
    return torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")


@dataclass
class Room:
    """Storage of B rows: sink and ring of recent tokens [keys, values] (B, H, tokens, D), packed blocks (B, H, N, ...).
    flags: of quantise.check, (H,) int32. statistics: of KeyScale, where they stay. moves: of SQuat, what corrects the keys of
    blocks that are due; due: these keys (B, H, block, D) float32, of Steps.
    """

    sink: list[Tensor]
    ring: list[Tensor]
    packed: list[Packed]
    flags: Tensor
    statistics: dict[str, Tensor]
    moves: Digits | None = None
    due: Tensor | None = None


def most_blocks(windows: Windows, tokens: int) -> int:
    """Blocks that so many tokens can have packed; at least one, that tensors have a slot."""
    return max(1, (tokens - windows.sink - windows.recent) // windows.block)


class Held:
    """What rows held when the host last knew: widths of sink, blocks and window, and packed blocks of each, (B,)."""

    def __init__(self, ledger: Ledger) -> None:
        self.widths, self._window, self._blocks = ledger.widths, ledger.window, ledger.blocks
        self._slots: dict[tuple[torch.device, int], Tensor] = {}

    def of(self, ledger: Ledger) -> bool:
        """Whether the ledger, which never changes a tensor in place, still says so."""
        return self._window is ledger.window and self._blocks is ledger.blocks

    def slots(self, block: int, ring: Tensor) -> Tensor:
        """(B, window) int64, of a ring (B, H, tokens, D): where the tokens of each row's window lie."""
        key = ring.device, ring.shape[2]
        if key not in self._slots:
            self._slots[key] = ring_slots(self._blocks.to(ring.device), block, self.widths[2], ring)
        return self._slots[key]


class StaticStorage:
    """Storage of one layer, allocated once as `room`, in which steps leave tokens without the host. What the host sees of it,
    `sink`, `window` and `packed`, is looked up when it is asked for, which most steps do not. block: tokens of one.
    """

    def __init__(self, block: int) -> None:
        self.room: Room | None = None
        self._block = block
        self._sink: list[Tensor] = []
        self._window: list[Tensor] = []
        self._packed: list[Packed] = []
        self._unseen: Held | None = None  # the host has not looked since the room came to hold that
        self._views: list[Tensor] = []  # what it got when it looked, parts of the room

    @property
    def sink(self) -> list[Tensor]:
        self._look()
        return self._sink

    @sink.setter
    def sink(self, value: list[Tensor]) -> None:
        self._sink = value

    @property
    def window(self) -> list[Tensor]:
        self._look()
        return self._window

    @window.setter
    def window(self, value: list[Tensor]) -> None:
        self._window = value

    @property
    def packed(self) -> list[Packed]:
        self._look()
        return self._packed

    @packed.setter
    def packed(self, value: list[Packed]) -> None:
        self._packed = value

    def clear(self) -> None:
        """No token is held; the room stays where it is: a graph knows its address."""
        self._unseen, self._views = None, []

    def leave(self) -> None:
        """The host takes what the room holds, which is given up."""
        self._look()
        self.room, self._views = None, []

    def fill(self, part: Tensor, new: Tensor) -> None:
        """Into the first slots of a part of the room; nothing to do where `new` is what the host saw of them."""
        if new.shape[2] > part.shape[2]:
            raise KVCalError(f"{new.shape[2]} slots of a row do not fit into {part.shape[2]}; give a larger max_length")
        if not any(new is view for view in self._views):
            part[:, :, : new.shape[2]].copy_(new)

    def overlook(self, contents: Held) -> None:
        """The room has what `contents` says; the host's own tensors are of no use any more."""
        self._unseen, self._views = contents, []
        self._sink, self._window, self._packed = [], [], []

    def _look(self) -> None:
        """The host's tensors become those parts of the room that are in use; the window, in order, a copy."""
        if self._unseen is None:
            return
        (sink, blocks, _), room = self._unseen.widths, self.room
        assert room is not None
        slots, self._unseen = self._unseen.slots(self._block, room.ring[0]), None
        self._sink = [t[:, :, :sink] for t in room.sink]
        self._window = [take_slots(t, slots) for t in room.ring]
        self._packed = [{name: t[:, :, :blocks] for name, t in packed.items()} for packed in room.packed]
        self._views = self._sink + [t for packed in self._packed for t in packed.values()]


def ring_slots(blocks: Tensor, block: int, count: int, ring: Tensor) -> Tensor:
    """Of the first `count` tokens in the ring of each row; blocks (B,) of the scheme, of `block` tokens. (B, count) int64."""
    first = blocks.long() * block
    return (first[:, None] + torch.arange(count, device=blocks.device)) % ring.shape[2]
