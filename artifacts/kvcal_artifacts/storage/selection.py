"""The choice of a row's tokens (H2O): what one forward does where tokens are evicted, and which of a row stay.

In a layer's storage a row has slots [packed N * b | exact E]; eviction.py says what lies there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .plan import Plan

FULL = 0.75  # a block stays while so many of its tokens do; with fewer they are packed again, with others


@dataclass(frozen=True)
class EvictingPlan(Plan):
    """What one forward does: it attends to the tokens that stayed so far, and stores the new ones exact.

    past: slots in use, not columns. first: nothing came before, so that the model's mask is right. alive (B, past)
    bool says which slots hold a token. flushed (B,) says how many blocks' worth of tokens leave the recent window after
    this call; where any do, tokens are chosen. lengths, packed and flush count as if every token stayed: run-time
    statistics go by them.
    """

    first: bool = True
    alive: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool, device="cpu"))
    flushed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))

    def to(self, device: torch.device) -> EvictingPlan:
        """The plan with alive and flushed on `device`; the rest stays on the CPU, for run-time statistics."""
        return replace(self, device=device, alive=self.alive.to(device), flushed=self.flushed.to(device))


@dataclass(frozen=True)
class Moves:
    """What a choice of tokens does to every layer. Slots are those of [packed N * b | exact E]; packed: N * b.

    pack (B, F * b): slots of what is packed; idle (B, F * b): which are unused, in rows that pack fewer. order (B, N'):
    see block_store.arrange. exact (B, E'): slots of what stays exact or becomes it; unused (B, E'): which are not
    needed. decodes: whether any of these is a packed one.
    """

    pack: Tensor
    idle: Tensor
    order: Tensor
    exact: Tensor
    unused: Tensor
    packed: int
    decodes: bool

    def to(self, device: torch.device) -> Moves:
        """The same moves with their tensors on `device`."""
        parts = (self.pack, self.idle, self.order, self.exact, self.unused)
        pack, idle, order, exact, unused = (part.to(device) for part in parts)
        return replace(self, pack=pack, idle=idle, order=order, exact=exact, unused=unused)


@dataclass
class Row:
    """One row while its tokens are chosen: columns and attention (P,) of its slots, its blocks, its exact slots."""

    block: int
    tokens: Tensor
    mass: Tensor
    blocks: int
    recents: int  # the last of its blocks, which hold recent tokens
    exact: Tensor  # slots that hold tokens, oldest first
    # its blocks afterwards: old ones by number, -1 - f is the f-th of `pack`, which has the slots of each new one
    order: list[int] = field(default_factory=list)
    pack: list[Tensor] = field(default_factory=list)

    def choose(self, sink: int, window: int, flushed: int, total: int, heavy: int) -> None:
        """Choose which tokens stay, and which of these are packed.

        sink, window: exact tokens in each; flushed: blocks' worth that leave the window; total: tokens that stay, heavy
        of them as heavy hitters.
        """
        sinks, staged, waiting = self.exact.tensor_split([sink, len(self.exact) - window])
        leaving, stay = waiting.tensor_split([flushed * self.block])
        heavy = max(heavy, sink)
        target = max(0, total - heavy - len(stay)) // self.block  # blocks of recent tokens within the budget
        new = min(flushed, target)
        old = min(self.recents, target - new)
        passing, recent = leaving.tensor_split([len(leaving) - new * self.block])
        # a window larger than the recent half is not paid for by the heavy half
        budget = max(total - len(stay) - (new + old) * self.block, heavy) - sink
        aged, loose = self._slots(self.blocks - old), torch.cat([staged, passing])
        self._evict(torch.cat([aged.flatten(), loose]), max(0, budget))
        loose = self._dissolve(aged, loose)
        full = len(loose) // self.block * self.block
        self._add(loose[:full])
        self.order += range(self.blocks - old, self.blocks)
        self._add(recent)
        self.recents = old + new
        self.exact = torch.cat([sinks, loose[full:], stay])

    def _slots(self, blocks: int) -> Tensor:
        """The slots of the first blocks: (blocks, block)."""
        return torch.arange(blocks * self.block, device="cpu").view(blocks, self.block)

    def _oldest_first(self, slots: Tensor) -> Tensor:
        """The slots among these that hold tokens, by the age of their tokens."""
        used = slots[self.tokens[slots] >= 0]
        return used[self.tokens[used].argsort()]

    def _evict(self, slots: Tensor, budget: int) -> None:
        """Evict the tokens in these slots except the `budget` with the most attention; of equals the older stays."""
        used = self._oldest_first(slots)
        heaviest = self.mass[used].argsort(descending=True, stable=True)
        self.tokens[used[heaviest[budget:]]] = -1

    def _dissolve(self, aged: Tensor, loose: Tensor) -> Tensor:
        """Dissolve blocks that are no longer full enough. Returns the slots of all loose tokens, `loose` among them."""
        stays = (self.tokens[aged] >= 0).sum(1) >= FULL * self.block
        self.order = stays.nonzero().flatten().tolist()
        return self._oldest_first(torch.cat([aged[~stays].flatten(), loose]))

    def _add(self, slots: Tensor) -> None:
        """Append new blocks of these slots."""
        for part in slots.view(-1, self.block):
            self.pack.append(part)
            self.order.append(-len(self.pack))

    def origin(self) -> Tensor:
        """The old slot of each slot of the row's blocks."""
        slots = self._slots(self.blocks)
        return torch.cat([slots[n] if n >= 0 else self.pack[-1 - n] for n in self.order] or [self.exact[:0]])
