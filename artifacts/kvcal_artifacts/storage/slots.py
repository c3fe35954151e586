"""Slots of tokens, chosen and cut: functions on tensors (B, H, T, D)."""

from __future__ import annotations

import torch
from torch import Tensor


def over_heads(index: Tensor, like: Tensor) -> Tensor:
    """An index (B, T) expanded for gather and scatter along the tokens of `like` (B, H, S, D)."""
    return index[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def take_slots(x: Tensor, index: Tensor) -> Tensor:
    """The slots index (B, T) of x (B, H, S, D): (B, H, T, D)."""
    return x.gather(2, over_heads(index, x))


def fill_slots(x: Tensor, idle: Tensor) -> Tensor:
    """The slots of x (B, H, T, D), with zeros where idle (B, T) says that one holds nothing."""
    return x.masked_fill(idle[:, None, :, None], 0)


def first_slots(x: Tensor, width: int) -> Tensor:
    """The first `width` slots."""
    return x if x.shape[2] == width else compact_copy(x[:, :, :width])


def compact_copy(x: Tensor) -> Tensor:
    """A copy with storage of just its size: a slice would keep the whole prefill alive and make nbytes() lie."""
    return x.clone(memory_format=torch.contiguous_format)
