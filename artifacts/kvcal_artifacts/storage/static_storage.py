"""What is allocated for a static layer: rows' tokens and blocks, and counts that steps advance by themselves.

Recent tokens lie in a ring, as kvcal_kernels.quantise has them: token j of a row's window lies in slot
(32 * blocks + j) mod capacity.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from kvcal_kernels.layout import BLOCK, Rope
from kvcal_kernels.quantise import Counts
from kvcal_kernels.quantise import Layer as Target
from kvcal_kernels.squat import Digits

from ..codecs import Codec, Packed
from ..scheme.windows import Windows
from .ledger import Ledger

STORED = ("sink", "window", "blocks")  # of Counts.data: what rows hold after the last call


@dataclass
class StepRope:
    """What rotates keys that are stored before RoPE, in steps.

    angles: for the tokens of rows as long as they can be. start: positions of rows' first tokens, on the device (B,)
    int64; of: those of the ledger that the angles were made for. gap: 0-d bool, whether tokens of a step did not follow
    those before them.
    """

    angles: Rope | None
    start: Tensor
    gap: Tensor
    of: Tensor | None = None

    def note(self, counts: Counts, positions: Tensor) -> None:
        """Note whether positions int (B or 1, Q) of a call follow those before it; `counts` are those after it."""
        length = counts.sink_before + counts.window_before + counts.blocks_before * BLOCK
        follow = (self.start + length)[:, None] + torch.arange(positions.shape[1], device=length.device)
        self.gap.logical_or_((positions.to(follow.device) != follow).any())


@dataclass
class Steps:
    """What the layers of a cache on one device share.

    length: columns, 0-d int64. first, last: their indices; the first advances the counts of a call, the last its
    length. rope: where keys are stored before RoPE. due: by their size, storage for keys of the block that SQuat packs,
    one layer after the other. wrong: 0-d bool in the host's memory, whether the device has found something that `read`
    will refuse; written when the step has run, which no one waits for.
    """

    counts: Counts
    length: Tensor
    first: int
    last: int
    wrong: Tensor
    rope: StepRope | None = None
    due: dict[torch.Size, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> Steps:
        copies = {one.name: copy.deepcopy(getattr(self, one.name), memo) for one in fields(self)}
        return Steps(**copies | {"wrong": host_bool(self.length.device)})  # copies are not pinned


def host_bool(device: torch.device) -> Tensor:
    """A bool, 0-d, False, where the device can write to it without anyone waiting."""
    return torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda", device="cpu")


@dataclass
class Allocation:
    """The storage of B rows, whose tensors do not move.

    sink, ring: sink and recent tokens [keys, values] (B, H, tokens, D). packed: blocks (B, H, N, ...). flags: for
    quantise.check, (H,) int32. statistics: the state of KeyScale. moves: what corrects the keys of blocks that are due
    (SQuat); due: these keys (B, H, block, D) float32, shared by Steps. target: views of all that, as the kernel that
    appends takes them, once they were asked for.
    """

    sink: list[Tensor]
    ring: list[Tensor]
    packed: list[Packed]
    flags: Tensor
    statistics: dict[str, Tensor]
    moves: Digits | None = None
    due: Tensor | None = None
    target: Target | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Allocation:
        copies = {
            one.name: copy.deepcopy(getattr(self, one.name), memo) for one in fields(self) if one.name != "target"
        }
        return Allocation(**copies)  # views of the copies are taken anew


def allocate(like: Tensor, pair: tuple[Codec, Codec], windows: Windows, longest: int, ring: int) -> Allocation:
    """Storage without tokens, of like's rows, heads, channels, dtype and device.

    longest: tokens that a row can have. ring: slots of recent tokens.
    """
    batch, heads, _, dim = like.shape

    def exact(tokens: int) -> list[Tensor]:
        return [like.new_zeros(batch, heads, tokens, dim) for _ in (0, 1)]

    many = most_blocks(windows, longest)
    packed = [
        {n: t.new_zeros(*t.shape[:2], many, *t.shape[3:]) for n, t in codec.empty(batch, like.device).items()}
        for codec in pair
    ]
    flags = torch.zeros(heads, dtype=torch.int32, device=like.device)
    return Allocation(exact(windows.sink), exact(ring), packed, flags, {})


def most_blocks(windows: Windows, tokens: int) -> int:
    """How many blocks a row of so many tokens can have; at least one, so that tensors have a slot."""
    return max(1, (tokens - windows.sink - windows.recent) // windows.block)


class Contents:
    """What rows stored at the host's last look: widths of sink, blocks and window, and packed blocks of each, (B,)."""

    def __init__(self, ledger: Ledger) -> None:
        self.widths, self._window, self._blocks = ledger.widths, ledger.window, ledger.blocks
        self._slots: dict[tuple[torch.device, int], Tensor] = {}

    def of(self, ledger: Ledger) -> bool:
        """Whether these are still the contents of the ledger, which never changes a tensor in place."""
        return self._window is ledger.window and self._blocks is ledger.blocks

    def slots(self, block: int, ring: Tensor) -> Tensor:
        """The slots of each row's window in a ring (B, H, tokens, D): (B, window) int64."""
        key = ring.device, ring.shape[2]
        if key not in self._slots:
            self._slots[key] = ring_slots(self._blocks.to(ring.device), block, self.widths[2], ring)
        return self._slots[key]


def ring_slots(blocks: Tensor, block: int, count: int, ring: Tensor) -> Tensor:
    """The slots of the first `count` window tokens in the ring of each row: (B, count) int64.

    blocks: (B,), of the scheme, of `block` tokens.
    """
    first = blocks.long() * block
    return (first[:, None] + torch.arange(count, device=blocks.device)) % ring.shape[2]
