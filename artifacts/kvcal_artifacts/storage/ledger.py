"""Which token of which row lies where: the bookkeeping that all layers of a cache share.

A column is a position of the attention mask; a row's real tokens are its columns that are not padding. In order, a
row's real tokens are its sink, its packed blocks, its recent window. Rows of a padded batch differ in all three, so
dense tensors have unused slots at their end; no slot of a pad is ever stored.

Slots that a layer sees: past = [sink S | packed N * b | window W], fresh = [sink S | window W | new Q].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import KVCalError
from ..scheme import Windows
from .plan import CropPlan, Past, Plan, width


@dataclass
class Ledger:
    """Host-side counts per row (int64, CPU): real tokens, sink, packed blocks, window."""

    windows: Windows
    batch: int = 0
    columns: int = 0
    valid: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool, device="cpu"))
    sink: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    blocks: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    window: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    positions: Tensor | None = None  # int32 (B, columns) on the device, only for keys stored before RoPE
    starts: Tensor | None = None  # int64 (B,), CPU: positions of rows' first tokens, as far as `follow` was told
    gapless: bool = True  # whether positions of all tokens follow those before them, as far as `follow` was told
    alike: Tensor | None = None  # `window`, where all rows are known to hold the same, and no pads

    @property
    def lengths(self) -> Tensor:
        """The real tokens of each row, (B,)."""
        return self.sink + self.blocks * self.windows.block + self.window

    @property
    def padded(self) -> bool:
        return bool((self.lengths < self.columns).any())

    def begin(self, batch: int, query: int, new_valid: Tensor | None) -> Plan:
        """Advance by `query` columns. new_valid: (B, query) bool on the CPU, None if all are real."""
        check_batch(self.columns, self.batch, batch)
        if not self.columns:
            self.batch = batch
            self.valid = torch.zeros(batch, 0, dtype=torch.bool, device="cpu")
            self.starts, self.gapless = None, True
            self.sink, self.blocks, self.window = (torch.zeros(batch, dtype=torch.long, device="cpu") for _ in range(3))
        packed, alike = self.blocks, self.alike is self.window
        lengths = torch.full_like(packed, self.columns) if alike else self.lengths
        alike = alike or self._is_alike(lengths)
        uniform = alike and (new_valid is None or bool(new_valid.all()))
        if new_valid is None:
            new_valid = torch.ones(batch, query, dtype=torch.bool, device="cpu")
        if uniform:
            plan = self._uniform(query, lengths)
        else:
            plan = replace(self._ragged(query, new_valid), lengths=lengths, packed=packed, valid=new_valid)
        self.valid = torch.cat([self.valid, new_valid], 1)
        self.columns += query
        return plan

    def follow(self, plan: Plan, new: Tensor) -> None:
        """Note whether positions (B, query) of the columns that `plan` brought follow those of their row's tokens."""
        assert plan.lengths is not None
        valid = torch.ones(new.shape, dtype=torch.bool, device="cpu") if plan.valid is None else plan.valid
        # what each says of the position of the row's first token
        start = new.to("cpu").long() - (plan.lengths[:, None] + valid.long().cumsum(1) - 1)
        first = start.gather(1, valid.int().argmax(1, keepdim=True))[:, 0]
        first = first if self.starts is None else torch.where(plan.lengths > 0, self.starts, first)
        if self.starts is None or not torch.equal(first, self.starts):  # the same tensor as long as it says the same
            self.starts = first
        self.gapless = self.gapless and bool((start == self.starts[:, None])[valid].all())

    def follows(self, new: Tensor) -> bool:
        """Whether positions (B or 1, query) of new tokens, all real, follow those of every row."""
        return self.starts is not None and torch.equal(
            new.to("cpu").long().expand(self.batch, -1), self._next(new.shape[1])
        )

    def _next(self, query: int) -> Tensor:
        """Positions of so many tokens that follow those of each row: (B, query) int64, CPU."""
        assert self.starts is not None
        return (self.starts + self.lengths)[:, None] + torch.arange(query, device="cpu")

    def proceed(self, query: int) -> None:
        """Advance by columns of steps that the device did: all are real, at the positions that follow."""
        new = None if self.positions is None else self._next(query)
        self.begin(self.batch, query, None)
        if self.positions is not None and new is not None:
            self.positions = torch.cat([self.positions, new.to(self.positions)], 1)

    def _after(self, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sink, flushed blocks and window of each row after `added` (B,) real tokens."""
        sink = (self.sink + added).clamp_max_(self.windows.sink)
        waiting = self.window + added - (sink - self.sink)
        flush = ((waiting - self.windows.recent) // self.windows.block).clamp_min_(0)
        return sink, flush, waiting - flush * self.windows.block

    def _is_alike(self, lengths: Tensor) -> bool:
        """Whether no row has pads, and all hold the same.

        Rows of one length need not: where a call's tokens were pads in some rows and packed a block in others, and a
        crop has removed these columns, the block stays packed.
        """
        return not bool((lengths < self.columns).any()) and bool((self.blocks == self.blocks[:1]).all())

    def _uniform(self, query: int, lengths: Tensor) -> Plan:
        """Advance rows that are alike: in whole numbers, as every decode step does it."""
        windows, packed = self.windows, self.blocks
        old_sink, blocks, window = int(self.sink[0]), int(packed[0]), int(self.window[0])
        sink = min(old_sink + query, windows.sink)
        waiting = window + query - (sink - old_sink)
        flush = max(0, (waiting - windows.recent) // windows.block)
        window, blocks = waiting - flush * windows.block, blocks + flush
        if sink != old_sink:
            self.sink = torch.full_like(self.sink, sink)
        if flush:
            self.blocks = torch.full_like(packed, blocks)
        self.window = self.alike = torch.full_like(self.window, window)
        return Plan(self.columns, query, sink, window, flush, blocks, lengths=lengths, packed=packed)

    def _ragged(self, query: int, new_valid: Tensor) -> Plan:
        past = Past(self.valid, self.sink, self.blocks, self.windows.block)
        slots_sink, slots_window = width(self.sink), width(self.window)
        sink, flush, window = self._after(new_valid.sum(1))
        order = torch.argsort(~new_valid, dim=1, stable=True)  # real new columns first
        taken = sink - self.sink
        wide = int(flush.max()) * self.windows.block

        def fresh(rank: Tensor, old: Tensor, first_old: int, shift: Tensor) -> Tensor:
            """The slot of the rank-th token among [old ones | new ones from `shift` on]."""
            new = (rank - old[:, None] + shift[:, None]).clamp(0, query - 1)
            picked = slots_sink + slots_window + order.gather(1, new)
            return torch.where(rank < old[:, None], first_old + rank, picked)

        ranks = torch.arange(max(width(sink), width(window) + wide, 1), device="cpu")[None].expand(self.batch, -1)
        sink_index = fresh(ranks[:, : width(sink)], self.sink, 0, torch.zeros_like(taken))
        rest = fresh(ranks[:, : width(window) + wide], self.window, slots_sink, taken)
        flush_index = rest[:, :wide]
        later = (ranks[:, : width(window)] + flush[:, None] * self.windows.block).clamp_max(max(rest.shape[1] - 1, 0))
        picks = torch.arange(int(flush.max()), device="cpu")[None].expand(self.batch, -1)
        really = picks < flush[:, None]
        rows = torch.arange(self.batch, device="cpu")[:, None].expand_as(picks)[really]
        slots = (self.blocks[:, None] + picks)[really]
        before = self.columns
        self.sink, self.blocks, self.window = sink, self.blocks + flush, window
        plan = Plan(before, query, width(sink), width(window), int(flush.max()), width(self.blocks))
        return replace(
            plan,
            before=past,
            sink_index=sink_index,
            window_index=rest.gather(1, later),
            flush_index=flush_index,
            idle=~really.repeat_interleave(self.windows.block, 1),
            rows=rows,
            slots=slots,
            picks=picks[really],
        )

    def crop(self, count: int) -> CropPlan:
        """Plan the removal of the newest `count` columns; nothing changes until commit_crop()."""
        block = self.windows.block
        remaining = self.valid[:, : self.columns - count].sum(1)
        sink = torch.minimum(self.sink, remaining)
        blocks = torch.minimum(self.blocks, (remaining - sink) // block)
        window = remaining - sink - blocks * block
        deep = blocks < self.blocks
        returned = torch.where(deep, window, 0)  # tokens of a cut block: all of the old window is removed
        index = None
        if bool(deep.any()):
            first = torch.where(deep, blocks * block, width(self.blocks) * block)
            index = torch.arange(width(window), device="cpu")[None] + first[:, None]
            index = index.clamp_max(width(self.blocks) * block + max(width(self.window), 1) - 1)
        return CropPlan(width(sink), width(blocks), width(window), bool(deep.any()), int(returned.sum()), index)

    def commit_crop(self, count: int) -> None:
        block = self.windows.block
        self.columns -= count
        self.valid = self.valid[:, : self.columns].clone()
        remaining = self.valid.sum(1)
        self.sink = torch.minimum(self.sink, remaining)
        self.blocks = torch.minimum(self.blocks, (remaining - self.sink) // block)
        self.window = remaining - self.sink - self.blocks * block
        if self.positions is not None:
            self.positions = self.positions[:, : self.columns].clone()

    def real(self, start: int, stop: int) -> int:
        """How many real tokens all rows have in these columns."""
        return int(self.valid[:, start:stop].sum())

    @property
    def occupied(self) -> Tensor:
        """Which slots of [sink | window] hold a token: (B, S + W) bool."""
        return torch.cat([torch.arange(width(n), device="cpu") < n[:, None] for n in (self.sink, self.window)], 1)

    @property
    def untouched(self) -> Tensor:
        """Which rows have only exact tokens: (B,) bool."""
        return self.blocks == 0

    @property
    def early(self) -> int:
        """How many blocks are packed although, after a crop, the row has fewer tokens than when they became due."""
        due = (self.valid.sum(1) - self.windows.sink - self.windows.recent) // self.windows.block
        return int((self.blocks - due.clamp_min(0)).clamp_min(0).sum())

    def select(self, rows: Tensor) -> None:
        """Continue with these batch rows in this order; repeats are allowed."""
        host = host_rows(rows)
        self.batch = len(host)
        self.valid, self.sink = self.valid[host], self.sink[host]
        self.blocks, self.window = self.blocks[host], self.window[host]
        if self.positions is not None:
            self.positions = self.positions[host.to(self.positions.device)]
        if self.starts is not None:
            self.starts = self.starts[host]

    @property
    def widths(self) -> tuple[int, int, int]:
        """The sink tokens, blocks and window tokens that the fullest row needs."""
        return width(self.sink), width(self.blocks), width(self.window)

    def clear(self) -> None:
        self.__init__(self.windows)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        tensors = [self.valid, self.sink, self.blocks, self.window]
        if self.positions is not None:
            tensors.append(self.positions)
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_batch(columns: int, rows: int, batch: int) -> None:
    """Raises KVCalError where a cache that is not empty is called with another number of rows."""
    if columns and batch != rows:
        raise KVCalError(
            f"cache holds {rows} rows, the model was called with {batch}; "
            "use batch_repeat_interleave or batch_select_indices, or reset() first"
        )


def host_rows(rows: Tensor) -> Tensor:
    """Row numbers on the CPU, from row numbers or a mask of rows."""
    host = rows.to("cpu")
    return host.nonzero().flatten() if host.dtype == torch.bool else host
