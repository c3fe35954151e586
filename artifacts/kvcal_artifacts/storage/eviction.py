"""Heavy hitters (H2O, Zhang et al. 2023): which tokens of a row stay, where they lie, how much attention each has had.

All heads and layers of a row have the same tokens. Tokens are named by their column of the attention mask. In a layer's
storage a row has slots [packed N * b | exact E]. The exact ones are, oldest first, its sink, heavy tokens that wait for
a whole block (staged), and its recent window. A block holds heavy tokens from anywhere or, the last ones of a row,
consecutive recent ones.

Tokens are chosen when a block of them leaves the recent window, after a whole forward, because only then have all
layers added their attention. Of n real tokens so far, `HeavyHitters.budget(n)` says how many stay, and how many of
those as heavy hitters. The newest stay: the window, and before it as many whole blocks as fit into the recent half. Of
all older tokens that are still stored, those with the most attention stay. The rest is evicted for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import KVCalError, NonFiniteError
from ..scheme import HeavyHitters, Windows
from .ledger import check_batch, host_rows
from .plan import CropPlan
from .selection import EvictingPlan, Moves, Row


def _counts() -> Tensor:
    return torch.zeros(0, dtype=torch.long, device="cpu")


class Selected(TypedDict):
    """The answer of EvictingLedger.describe."""

    keep: float
    heavy: float
    rows: dict[str, list[int]]


@dataclass
class EvictingLedger:
    """The bookkeeping of a cache whose scheme selects tokens; ledger.Ledger is that of others.

    columns: of the attention mask, all there ever were. tokens (B, P) int32: the column in each slot, -1 if it holds
    none; mass (B, P) float64, on the device. Per row, int64 (B,): real tokens so far, tokens in the recent window and
    blocks' worth of tokens that left it. Then packed blocks, how many of these hold recent tokens, and the newest
    column that left (-1: none).
    """

    windows: Windows
    selection: HeavyHitters
    batch: int = 0
    columns: int = 0
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32, device="cpu"))
    mass: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64, device="cpu"))
    lengths: Tensor = field(default_factory=_counts)
    window: Tensor = field(default_factory=_counts)
    passed: Tensor = field(default_factory=_counts)
    blocks: Tensor = field(default_factory=_counts)
    recents: Tensor = field(default_factory=_counts)
    newest_gone: Tensor = field(default_factory=_counts)
    positions: Tensor | None = None  # int32 (B, P) on the device, only for keys stored before RoPE

    def begin(self, batch: int, query: int, new_valid: Tensor | None) -> EvictingPlan:
        """Advance by `query` columns; new_valid (B, query) bool on the CPU, None if all are real."""
        check_batch(self.columns, self.batch, batch)
        if not self.columns:
            self._start(batch)
        new = torch.arange(self.columns, self.columns + query, device="cpu").expand(batch, -1)
        if new_valid is not None and bool(new_valid.all()):
            new_valid = None
        if new_valid is not None:
            new = new.masked_fill(~new_valid, -1)
        before, alive = self.lengths, self.tokens >= 0
        self._count(before + (new >= 0).sum(1))
        flushed = ((self.window - self.windows.recent) // self.windows.block).clamp_min(0)
        plan = EvictingPlan(
            alive.shape[1],
            query,
            sink=0,
            window=0,
            flush=int(flushed.max()),
            blocks=self.widths[1],
            lengths=before,
            packed=self.passed,
            valid=new_valid,
            first=self.columns == 0,
            alive=alive,
            flushed=flushed,
        )
        self.tokens = torch.cat([self.tokens, new.to(torch.int32)], 1)
        self.mass = torch.cat([self.mass, self.mass.new_zeros(batch, query)], 1)
        self.columns += query
        return plan

    def hide(self, plan: EvictingPlan, shown: Tensor) -> EvictingPlan:
        """The plan without tokens of columns that this call's mask hides. shown: (B, columns before it) bool."""
        if not plan.past or bool(shown.all()):
            return plan
        columns = self.tokens[:, : plan.past].clamp_min(0).long()
        return replace(plan, alive=plan.alive & shown.gather(1, columns))

    def _start(self, batch: int) -> None:
        self.clear()
        self.batch = batch
        self.tokens, self.mass = self.tokens.new_zeros(batch, 0), self.mass.new_zeros(batch, 0)
        self.lengths = self.window = self.passed = self.blocks = self.recents = torch.zeros(
            batch, dtype=torch.long, device="cpu"
        )
        self.newest_gone = torch.full((batch,), -1, device="cpu")

    def _count(self, lengths: Tensor) -> None:
        """Note that real tokens came or went at the end: all of them in the window, once the sink is full."""
        behind, before = ((n - self.windows.sink).clamp_min(0) for n in (lengths, self.lengths))
        self.lengths, self.window = lengths, self.window + behind - before

    def add(self, mass: Tensor) -> None:
        """Add one layer's attention of the current call, (B, P) float64."""
        self.mass = self.mass.to(mass.device) + mass

    def choose(self, plan: EvictingPlan) -> Moves:
        """Choose anew in every row whose window tokens leave; other rows do not change."""
        mass, start = self.mass.to("cpu"), self.widths[1] * self.windows.block
        if not bool(torch.isfinite(mass).all()):
            raise NonFiniteError("attention weights hold a NaN or infinity: tokens cannot be selected by them")
        # written row by row below: never into a tensor shared
        self.window, self.blocks, self.recents = self.window.clone(), self.blocks.clone(), self.recents.clone()
        self.newest_gone = self.newest_gone.clone()
        rows = [self._row(number, mass[number], start) for number in range(self.batch)]
        for number, flushed in enumerate(plan.flushed.tolist()):
            if flushed:
                self._choose(number, rows[number], flushed)
        self.passed = self.passed + plan.flushed
        return self._arrange(rows, start)

    def _row(self, number: int, mass: Tensor, start: int) -> Row:
        tokens, blocks = self.tokens[number], int(self.blocks[number])
        exact = (tokens[start:] >= 0).nonzero().flatten() + start
        recents = int(self.recents[number])
        return Row(self.windows.block, tokens, mass, blocks, recents, exact, list(range(blocks)))

    def _choose(self, number: int, row: Row, flushed: int) -> None:
        length, window, leave = int(self.lengths[number]), int(self.window[number]), flushed * self.windows.block
        self.newest_gone[number] = row.tokens[row.exact[len(row.exact) - window + leave - 1]]
        row.choose(min(self.windows.sink, length), window, flushed, *self.selection.budget(length))
        self.window[number] = window - leave
        self.blocks[number], self.recents[number] = len(row.order), row.recents

    def _arrange(self, rows: list[Row], start: int) -> Moves:
        """The moves of layers from the old slots to the new ones; tokens, mass and positions move here."""
        block = self.windows.block
        pack = _padded([torch.cat([row.exact[:0], *row.pack]) for row in rows])
        exact = _padded([row.exact for row in rows])
        order = _padded([_numbers(row.order, start // block) for row in rows])
        packed = _padded([row.origin() for row in rows])
        taken = torch.cat([pack, exact], 1)
        decodes = bool(((taken >= 0) & (taken < start)).any())
        self._move(torch.cat([packed, exact], 1))
        return Moves(pack.clamp_min(0), pack < 0, order, exact.clamp_min(0), exact < 0, start, decodes)

    def _move(self, origin: Tensor) -> None:
        """Move tokens, mass and positions. origin (B, P'): the old slot of each new one, -1 for none."""
        if not self.tokens.shape[1]:
            return
        taken = origin.clamp_min(0)
        self.tokens = self.tokens.gather(1, taken).masked_fill(origin < 0, -1)
        self.mass = self.mass.gather(1, taken.to(self.mass.device))
        if self.positions is not None:
            self.positions = self.positions.gather(1, taken.to(self.positions.device))

    def crop(self, count: int) -> CropPlan:
        """Plan the removal of the newest `count` columns; nothing changes until commit_crop().

        Raises KVCalError where that needs tokens behind the window: evicted ones cannot come back.
        """
        limit = self.columns - count
        if limit and bool((self.newest_gone >= limit).any()):
            raise KVCalError(
                f"crop of {count} tokens reaches past the exact window ({int(self.window.min())} tokens) into those "
                f"that token selection (keep {self.selection.keep:g}) evicted or packed, and evicted tokens cannot "
                "come back: use a larger recent window, or reset()"
            )
        blocks = self.widths[1]
        occupied = (self.tokens >= 0) & (self.tokens < limit)
        return CropPlan(0, blocks if limit else 0, self._exact_width(occupied, blocks), False, 0, None)

    def commit_crop(self, count: int) -> None:
        self.columns -= count
        if not self.columns:
            self.clear()
            return
        gone = self.tokens >= self.columns
        self._count(self.lengths - gone.sum(1))
        self.tokens = self.tokens.masked_fill(gone, -1)
        self._trim(self.widths[1])

    def real(self, start: int, stop: int) -> int:
        """How many tokens of these columns are stored, in all rows."""
        return int(((self.tokens >= start) & (self.tokens < stop)).sum())

    @property
    def occupied(self) -> Tensor:
        """Which exact slots hold a token: (B, E) bool."""
        return self.tokens[:, self.widths[1] * self.windows.block :] >= 0

    @property
    def untouched(self) -> Tensor:
        """Which rows have no token that left the recent window: (B,) bool."""
        return self.passed == 0

    @property
    def early(self) -> int:
        """How many blocks' worth of tokens left the window although, after a crop, the row has fewer than then."""
        due = (self.lengths - self.windows.sink - self.windows.recent) // self.windows.block
        return int((self.passed - due.clamp_min(0)).clamp_min(0).sum())

    def select(self, rows: Tensor) -> None:
        """Continue with these batch rows in this order; repeats are allowed."""
        host, before = host_rows(rows), self.widths[1]
        self.batch = len(host)
        self.tokens, self.lengths, self.window = self.tokens[host], self.lengths[host], self.window[host]
        self.passed, self.blocks, self.recents = self.passed[host], self.blocks[host], self.recents[host]
        self.newest_gone = self.newest_gone[host]
        self.mass = self.mass[host.to(self.mass.device)]
        if self.positions is not None:
            self.positions = self.positions[host.to(self.positions.device)]
        self._trim(before)

    def _trim(self, before: int) -> None:
        """Drop slots that no row uses, at the end of the `before` blocks and of the exact part."""
        block, exact = self.windows.block, self._exact_width(self.tokens >= 0, before)
        slots = torch.cat(
            [torch.arange(self.widths[1] * block, device="cpu"), torch.arange(exact, device="cpu") + before * block]
        )
        self._move(slots.expand(self.batch, -1))

    def _exact_width(self, occupied: Tensor, blocks: int) -> int:
        """The exact slots up to the last one that holds a token in any row. occupied: (B, P) bool."""
        used = occupied[:, blocks * self.windows.block :].any(0).nonzero()
        return int(used.max()) + 1 if len(used) else 0

    @property
    def widths(self) -> tuple[int, int, int]:
        """Slots of the sink (0: it lies with other exact tokens), blocks that the fullest row needs, exact slots."""
        blocks = int(self.blocks.max()) if self.batch else 0
        return 0, blocks, self.tokens.shape[1] - blocks * self.windows.block

    @property
    def packed_tokens(self) -> int:
        """How many tokens lie in packed blocks, in all rows."""
        return int((self.tokens[:, : self.widths[1] * self.windows.block] >= 0).sum())

    def describe(self) -> Selected:
        """The token selection, and by row how many tokens came, stay and went, and where those that stay lie."""
        start = self.widths[1] * self.windows.block
        alive, packed = (self.tokens >= 0).sum(1), (self.tokens[:, :start] >= 0).sum(1)
        sink = self.lengths.clamp_max(self.windows.sink)
        recent = self.recents * self.windows.block
        counts = {
            "seen": self.lengths,
            "kept": alive,
            "evicted": self.lengths - alive,
            "sink": sink,
            "heavy": alive - sink - recent - self.window,
            "recent": recent + self.window,
            "packed": packed,
            "exact": alive - packed,
        }
        rows = {name: count.tolist() for name, count in counts.items()}
        return {"keep": self.selection.keep, "heavy": self.selection.heavy, "rows": rows}

    def clear(self) -> None:
        self.__init__(self.windows, self.selection)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        tensors = [
            self.tokens,
            self.mass,
            self.lengths,
            self.window,
            self.passed,
            self.blocks,
            self.recents,
            self.newest_gone,
        ]
        if self.positions is not None:
            tensors.append(self.positions)
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _numbers(order: list[int], old: int) -> Tensor:
    """The numbers by which block_store.arrange counts blocks: the new ones behind the `old` ones."""
    return torch.tensor([n if n >= 0 else old - 1 - n for n in order], dtype=torch.long, device="cpu")


def _padded(rows: list[Tensor]) -> Tensor:
    """The rows as one tensor (B, longest), -1 behind the shorter ones."""
    return pad_sequence(rows, batch_first=True, padding_value=-1)
