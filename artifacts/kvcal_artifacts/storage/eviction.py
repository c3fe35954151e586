"""Heavy hitters (H2O, Zhang et al. 2023): which tokens of a row are kept, where they lie, how much attention each has had.

One token set a row for all heads and layers. Tokens are named by their column of the attention mask. In a layer's storage a
row has slots [packed N * b | exact E]. The exact ones are, oldest first, its sink, heavy tokens that wait for a whole block
(staged), and its recent window. A block holds heavy tokens from anywhere or, the last ones of a row, consecutive recent ones.

Tokens are chosen when a block of them leaves the recent window, after a whole forward, because only then have all layers
added their attention. Of the n real tokens seen, `HeavyHitters.budget(n)` says how many are kept and how many of those as
heavy hitters. The newest stay: the window, and before it as many whole blocks as the recent half has room for. Of all older
tokens still there, those with the most attention stay. The rest is evicted for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import KVCalError, NonFiniteError
from ..windows import HeavyHitters, Windows
from .ledger import CropPlan, Plan, check_batch, host_rows

SCORES = 1 << 24  # attention weights held at a time: 64 MB
FULL = 0.75  # a block stays while so many of its tokens are kept; with fewer they are packed again, with others


def allowed(alive: Tensor, valid: Tensor | None, start: int, stop: int) -> Tensor:
    """(B, stop - start, P + stop) bool: which slots the call's columns start to stop may look at.

    alive (B, P): slots that hold a token; valid (B, Q): columns that are not padding, None for all. Every column sees itself,
    pads too, so that no softmax is over nothing.
    """
    column = torch.arange(stop, device=alive.device)
    row = column[start:, None]
    new = (column <= row)[None].expand(len(alive), -1, -1)
    if valid is not None:
        new = new & (valid[:, None, :stop] | (column == row))
    return torch.cat([alive[:, None].expand(-1, stop - start, -1), new], 2)


def attention_mass(q: Tensor, k: Tensor, alive: Tensor, valid: Tensor | None, scaling: float) -> Tensor:
    """Attention that each slot gets from the call's queries, summed over heads and queries: (B, P + Q) float64.

    q (B, heads, Q, D) after RoPE; k (B, kv heads, P + Q, D) as attention takes them; alive, valid: see `allowed`. Softmax in
    float32, of so many queries at a time that at most SCORES weights are held (or those of one query).
    """
    batch, heads, query, _ = q.shape
    past = alive.shape[1]
    mass = torch.zeros(batch, past + query, dtype=torch.float64, device=q.device)
    queries, keys = q.float().unflatten(1, (k.shape[1], -1)), k.float().transpose(2, 3)
    step = max(1, SCORES // (batch * heads * (past + query)))
    for start in range(0, query, step):
        stop = min(start + step, query)
        part = queries[:, :, :, start:stop]
        scores = (part.flatten(2, 3) @ keys[..., : past + stop]).unflatten(2, part.shape[2:4]) * scaling
        hidden = ~allowed(alive, valid, start, stop)[:, None, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).sum((1, 2))  # (B, queries, slots)
        if valid is not None:
            weights = weights.masked_fill(~valid[:, start:stop, None], 0)
        mass[:, : past + stop] += weights.sum(1, dtype=torch.float64)
    return mass


@dataclass(frozen=True)
class EvictingPlan(Plan):
    """What one forward does: attend to the tokens kept so far, hold the new ones exact.

    past: slots held, not columns. first: nothing came before, so that the model's own mask is right. alive (B, past) bool
    says which slots hold a token, flushed (B,) how many blocks' worth of tokens leave the recent window after this call;
    where any do, tokens are chosen. lengths, packed and flush count as if all tokens were kept: run-time statistics go by
    them.
    """

    first: bool = True
    alive: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    flushed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def to(self, device: torch.device) -> EvictingPlan:
        """alive and flushed there; the rest stays on the CPU, where run-time statistics want it."""
        return replace(self, device=device, alive=self.alive.to(device), flushed=self.flushed.to(device))


@dataclass(frozen=True)
class Moves:
    """What a choice of tokens does to every layer. Slots are those of [packed N * b | exact E]; packed: N * b.

    pack (B, F * b): slots of what is packed, idle (B, F * b): of rows that pack fewer. order (B, N'): see store.arrange.
    exact (B, E'): slots of what stays exact or becomes it, unused (B, E'). decodes: whether any of these is a packed one.
    """

    pack: Tensor
    idle: Tensor
    order: Tensor
    exact: Tensor
    unused: Tensor
    packed: int
    decodes: bool

    def to(self, device: torch.device) -> Moves:
        moved: dict[str, Any] = {name: t.to(device) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **moved)


@dataclass
class Row:
    """One row while its tokens are chosen: columns and attention (P,) of its slots, its blocks, its exact slots."""

    block: int
    tokens: Tensor
    mass: Tensor
    blocks: int
    recents: int  # the last of its blocks, which hold recent tokens
    exact: Tensor  # slots that hold tokens, oldest first
    # its blocks afterwards: old ones by number, -1 - f the f-th of `pack`, which has the slots of each new one
    order: list[int] = field(default_factory=list)
    pack: list[Tensor] = field(default_factory=list)

    def choose(self, sink: int, window: int, flushed: int, total: int, heavy: int) -> None:
        """sink, window: exact tokens of either; flushed: blocks' worth that leave the window; total, heavy: tokens to keep."""
        sinks, staged, waiting = self.exact.tensor_split([sink, len(self.exact) - window])
        leaving, stay = waiting.tensor_split([flushed * self.block])
        heavy = max(heavy, sink)
        target = max(0, total - heavy - len(stay)) // self.block  # blocks of recent tokens that there is room for
        new = min(flushed, target)
        old = min(self.recents, target - new)
        passing, recent = leaving.tensor_split([len(leaving) - new * self.block])
        # a window larger than the recent half is not paid for by the heavy half
        room = max(total - len(stay) - (new + old) * self.block, heavy) - sink
        aged, loose = self._slots(self.blocks - old), torch.cat([staged, passing])
        self._evict(torch.cat([aged.flatten(), loose]), max(0, room))
        loose = self._dissolve(aged, loose)
        full = len(loose) // self.block * self.block
        self._add(loose[:full])
        self.order += range(self.blocks - old, self.blocks)
        self._add(recent)
        self.recents = old + new
        self.exact = torch.cat([sinks, loose[full:], stay])

    def _slots(self, blocks: int) -> Tensor:
        """(blocks, block) of its first blocks."""
        return torch.arange(blocks * self.block).view(blocks, self.block)

    def _oldest_first(self, slots: Tensor) -> Tensor:
        """Those of the slots that hold tokens."""
        there = slots[self.tokens[slots] >= 0]
        return there[self.tokens[there].argsort()]

    def _evict(self, slots: Tensor, room: int) -> None:
        """Of the tokens in these slots all but the `room` with the most attention; of equals the older stays."""
        there = self._oldest_first(slots)
        heaviest = self.mass[there].argsort(descending=True, stable=True)
        self.tokens[there[heaviest[room:]]] = -1

    def _dissolve(self, aged: Tensor, loose: Tensor) -> Tensor:
        """Leave blocks that are full enough as they are -> slots of all other tokens, `loose` among them."""
        stays = (self.tokens[aged] >= 0).sum(1) >= FULL * self.block
        self.order = stays.nonzero().flatten().tolist()
        return self._oldest_first(torch.cat([aged[~stays].flatten(), loose]))

    def _add(self, slots: Tensor) -> None:
        """New blocks, behind those there are."""
        for part in slots.view(-1, self.block):
            self.pack.append(part)
            self.order.append(-len(self.pack))

    def origin(self) -> Tensor:
        """The old slot of each slot of its blocks."""
        slots = self._slots(self.blocks)
        return torch.cat([slots[n] if n >= 0 else self.pack[-1 - n] for n in self.order] or [self.exact[:0]])


def _counts() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass
class EvictingLedger:
    """Takes the place of ledger.Ledger where a scheme selects tokens.

    columns: of the attention mask, all there ever were. tokens (B, P) int32: the column in each slot, -1 if it holds none;
    mass (B, P) float64, on the device. Per row, int64 (B,): real tokens seen; tokens in the recent window; blocks' worth of
    tokens that left it; packed blocks; how many of these hold recent tokens; the newest column that left (-1: none).
    """

    windows: Windows
    selection: HeavyHitters
    batch: int = 0
    columns: int = 0
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32))
    mass: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
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
        new = torch.arange(self.columns, self.columns + query).expand(batch, -1)
        if new_valid is not None and bool(new_valid.all()):
            new_valid = None
        if new_valid is not None:
            new = new.masked_fill(~new_valid, -1)
        before, alive = self.lengths, self.tokens >= 0
        self._count(before + (new >= 0).sum(1))
        flushed = ((self.window - self.windows.recent) // self.windows.block).clamp_min(0)
        plan = EvictingPlan(
            alive.shape[1], query, 0, 0, int(flushed.max()), self.widths[1], lengths=before, packed=self.passed,
            valid=new_valid, first=self.columns == 0, alive=alive, flushed=flushed,
        )  # fmt: skip
        self.tokens = torch.cat([self.tokens, new.to(torch.int32)], 1)
        self.mass = torch.cat([self.mass, self.mass.new_zeros(batch, query)], 1)
        self.columns += query
        return plan

    def hide(self, plan: EvictingPlan, shown: Tensor) -> EvictingPlan:
        """Not to be looked at: tokens of columns that the mask of this call takes back; shown (B, columns before it) bool."""
        if not plan.past or bool(shown.all()):
            return plan
        columns = self.tokens[:, : plan.past].clamp_min(0).long()
        return replace(plan, alive=plan.alive & shown.gather(1, columns))

    def _start(self, batch: int) -> None:
        self.clear()
        self.batch = batch
        self.tokens, self.mass = self.tokens.new_zeros(batch, 0), self.mass.new_zeros(batch, 0)
        self.lengths = self.window = self.passed = self.blocks = self.recents = torch.zeros(batch, dtype=torch.long)
        self.newest_gone = torch.full((batch,), -1)

    def _count(self, lengths: Tensor) -> None:
        """Real tokens came or went at the end: all of them in the window, once the sink is full."""
        behind, before = ((n - self.windows.sink).clamp_min(0) for n in (lengths, self.lengths))
        self.lengths, self.window = lengths, self.window + behind - before

    def add(self, mass: Tensor) -> None:
        """One layer's attention of the current call, (B, P) float64."""
        self.mass = self.mass.to(mass.device) + mass

    def choose(self, plan: EvictingPlan) -> Moves:
        """Choose anew in every row that tokens leave the window of; other rows keep what they have."""
        mass, start = self.mass.to("cpu"), self.widths[1] * self.windows.block
        if not bool(torch.isfinite(mass).all()):
            raise NonFiniteError("attention weights hold a NaN or infinity: tokens cannot be selected by them")
        for name in (
            "window",
            "blocks",
            "recents",
            "newest_gone",
        ):  # written row by row below: never into a tensor shared
            setattr(self, name, getattr(self, name).clone())
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
        """How layers come from the old slots to the new ones; tokens, mass and positions go along."""
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
        """origin (B, P'): the old slot of each new one, -1 for none."""
        if not self.tokens.shape[1]:
            return
        taken = origin.clamp_min(0)
        self.tokens = self.tokens.gather(1, taken).masked_fill(origin < 0, -1)
        self.mass = self.mass.gather(1, taken.to(self.mass.device))
        if self.positions is not None:
            self.positions = self.positions.gather(1, taken.to(self.positions.device))

    def crop(self, count: int) -> CropPlan:
        """Plan the removal of the newest `count` columns; nothing changes until commit_crop(). Raises KVCalError where that
        needs tokens that have left the window: evicted ones cannot come back.
        """
        limit = self.columns - count
        if limit and bool((self.newest_gone >= limit).any()):
            raise KVCalError(
                f"crop of {count} tokens reaches past the exact window ({int(self.window.min())} tokens) into those that "
                f"token selection (keep {self.selection.keep:g}) evicted or packed, and evicted tokens cannot come back: "
                "use a larger recent window, or reset()"
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
        """Tokens kept of these columns, of all rows."""
        return int(((self.tokens >= start) & (self.tokens < stop)).sum())

    @property
    def occupied(self) -> Tensor:
        """(B, E) bool: which exact slots hold a token."""
        return self.tokens[:, self.widths[1] * self.windows.block :] >= 0

    @property
    def untouched(self) -> Tensor:
        """(B,) bool: rows of which no token has left the recent window."""
        return self.passed == 0

    @property
    def early(self) -> int:
        """Blocks' worth of tokens that left the window although, after a crop, the row has fewer than when they did."""
        due = (self.lengths - self.windows.sink - self.windows.recent) // self.windows.block
        return int((self.passed - due.clamp_min(0)).clamp_min(0).sum())

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows in this order (repeats allowed)."""
        host, before = host_rows(rows), self.widths[1]
        self.batch = len(host)
        for name in ("tokens", "lengths", "window", "passed", "blocks", "recents", "newest_gone"):
            setattr(self, name, getattr(self, name)[host])
        self.mass = self.mass[host.to(self.mass.device)]
        if self.positions is not None:
            self.positions = self.positions[host.to(self.positions.device)]
        self._trim(before)

    def _trim(self, before: int) -> None:
        """Drop slots that no row uses, at the end of the `before` blocks and of the exact part."""
        block, exact = self.windows.block, self._exact_width(self.tokens >= 0, before)
        slots = torch.cat([torch.arange(self.widths[1] * block), torch.arange(exact) + before * block])
        self._move(slots.expand(self.batch, -1))

    def _exact_width(self, occupied: Tensor, blocks: int) -> int:
        """Exact slots up to the last one that holds a token in any row; occupied (B, P) bool."""
        used = occupied[:, blocks * self.windows.block :].any(0).nonzero()
        return int(used.max()) + 1 if len(used) else 0

    @property
    def widths(self) -> tuple[int, int, int]:
        """Slots of the sink (it lies with the other exact tokens), blocks that the fullest row needs, exact slots."""
        blocks = int(self.blocks.max()) if self.batch else 0
        return 0, blocks, self.tokens.shape[1] - blocks * self.windows.block

    @property
    def packed_tokens(self) -> int:
        """Tokens kept in packed blocks, of all rows."""
        return int((self.tokens[:, : self.widths[1] * self.windows.block] >= 0).sum())

    def describe(self) -> dict[str, Any]:
        """By row: real tokens seen, kept, evicted; kept ones by where they lie."""
        start = self.widths[1] * self.windows.block
        alive, packed = (self.tokens >= 0).sum(1), (self.tokens[:, :start] >= 0).sum(1)
        sink = self.lengths.clamp_max(self.windows.sink)
        recent = self.recents * self.windows.block
        counts = {
            "seen": self.lengths, "kept": alive, "evicted": self.lengths - alive, "sink": sink,
            "heavy": alive - sink - recent - self.window, "recent": recent + self.window, "packed": packed,
            "exact": alive - packed,
        }  # fmt: skip
        return vars(self.selection) | {"rows": {name: count.tolist() for name, count in counts.items()}}

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
    """Blocks as store.arrange counts them: the new ones behind the `old` ones."""
    return torch.tensor([n if n >= 0 else old - 1 - n for n in order], dtype=torch.long)


def _padded(rows: list[Tensor]) -> Tensor:
    """(B, longest), -1 behind the shorter ones."""
    return pad_sequence(rows, batch_first=True, padding_value=-1)
