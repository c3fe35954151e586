"""Packed blocks as a cache holds them: dense tensors (B, H or 1, N, ...), or items of different sizes in one pool.

Everything a cache does to its blocks (append, select rows, cut, move) is written here once for both kinds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs.ragged import Ragged
from .plan import Plan

Stored = Tensor | Ragged


def append(old: Stored, new: Stored, plan: Plan) -> Stored:
    """Append blocks (B, H, F, ...) to the blocks (B, H, N, ...), row by row where rows differ."""
    if isinstance(old, Ragged):
        assert isinstance(new, Ragged)
        return _append_ragged(old, new, plan)
    assert isinstance(new, Tensor)
    if plan.rows is None:
        return torch.cat([old, new], 2)
    assert plan.slots is not None and plan.picks is not None
    grown = new.new_zeros(*old.shape[:2], plan.blocks, *old.shape[3:])
    grown[:, :, : old.shape[2]] = old
    grown[plan.rows, :, plan.slots] = new[plan.rows, :, plan.picks]
    return grown


def arrange(old: Stored, new: Stored | None, order: Tensor) -> Stored:
    """Any blocks in any order.

    order: int64 (B, N') counts through the blocks of `old`, then those of `new`; -1 is a slot that holds none.
    """
    if isinstance(old, Ragged):
        parts = [part for part in (old, new) if isinstance(part, Ragged)]
        both = Ragged(torch.cat([p.data for p in parts]), torch.cat([p.counts.flatten() for p in parts])[None, None])
        numbers = torch.cat([_numbers(p) + (i and old.counts.numel()) for i, p in enumerate(parts)], 2)
        index = order[:, None].expand(-1, numbers.shape[1], -1)
        indices = numbers.gather(2, index.clamp_min(0)) if numbers.shape[2] else torch.zeros_like(index)
        return both.take(indices.masked_fill(index < 0, -1))
    assert new is None or isinstance(new, Tensor)
    whole = old if new is None else torch.cat([old, new], 2)
    if not whole.shape[2]:
        return whole
    rows = torch.arange(len(order), device=order.device)[:, None]
    taken = whole[rows, :, order.clamp_min(0)].transpose(1, 2)
    empty = (order < 0).view(len(order), 1, -1, *[1] * (whole.ndim - 3))
    return taken.masked_fill(empty, 0).contiguous()


def _append_ragged(old: Ragged, new: Ragged, plan: Plan) -> Ragged:
    if plan.rows is None:
        return _joined(old, new)
    both = Ragged(torch.cat([old.data, new.data]), torch.cat([old.counts.flatten(), new.counts.flatten()])[None, None])
    first, second = _numbers(old), _numbers(new) + old.counts.numel()
    assert plan.slots is not None and plan.picks is not None
    order = first.new_full((*first.shape[:2], plan.blocks), -1)
    order[:, :, : first.shape[2]] = first
    order[plan.rows, :, plan.slots] = second[plan.rows, :, plan.picks]
    return both.take(order)


def _joined(old: Ragged, new: Ragged) -> Ragged:
    """The items of each row and head, old ones first; the host knows how many rows they have, and waits for nothing."""
    data, counts = torch.cat([old.data, new.data]), torch.cat([old.counts, new.counts], 2)
    begins = torch.cat([old.offsets(), new.offsets() + len(old.data)], 2).flatten()
    lengths = counts.flatten().long()
    index = torch.arange(len(data), device=data.device)
    shift = begins - (lengths.cumsum(0) - lengths)
    index += torch.repeat_interleave(shift, lengths, output_size=len(data))
    return Ragged(data.index_select(0, index), counts)


def _numbers(items: Ragged) -> Tensor:
    return torch.arange(items.counts.numel(), device=items.device).view(items.counts.shape)


def select(stored: Stored, rows: Tensor) -> Stored:
    """The blocks of these batch rows, in this order. rows: int64 or bool."""
    rows = rows.to(stored.device)
    return stored.take(_numbers(stored)[rows]) if isinstance(stored, Ragged) else stored[rows]


def first_blocks(stored: Stored, count: int) -> Stored:
    """The first `count` blocks of each row, in new storage."""
    if stored.shape[2] == count:
        return stored
    if isinstance(stored, Ragged):
        return stored.take(_numbers(stored)[:, :, :count])
    return stored[:, :, :count].clone(memory_format=torch.contiguous_format)


def from_block(stored: Stored, start: int) -> Stored:
    """The blocks of each row from `start` on."""
    return stored.take(_numbers(stored)[:, :, start:]) if isinstance(stored, Ragged) else stored[:, :, start:]


def as_rows(layers: list[Stored], start: int) -> Stored:
    """The blocks from `start` on of layers of one kind, each (B, H, N, ...), as rows of one: (layers * B, H, ...)."""
    ragged = [one for one in layers if isinstance(one, Ragged)]
    if ragged:
        whole = Ragged(torch.cat([one.data for one in ragged]), torch.cat([one.counts for one in ragged]))
        return from_block(whole, start) if start else whole
    return torch.cat([one[:, :, start:] for one in layers if isinstance(one, Tensor)])


def move(stored: Stored, device: torch.device | str) -> Stored:
    """Blocks on another device; the host does not wait for the copy."""
    if isinstance(stored, Ragged):
        return Ragged(stored.data.to(device, non_blocking=True), stored.counts.to(device, non_blocking=True))
    return stored.to(device, non_blocking=True)


def tensors_of(stored: Stored) -> list[Tensor]:
    """The tensors that blocks are stored in."""
    return [stored.data, stored.counts] if isinstance(stored, Ragged) else [stored]
