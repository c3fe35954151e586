"""What a run-time statistic is, and one of sums, from which a crop can take tokens out again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from ...codecs import Shape
from ...errors import KVCalError
from .prefixes import Prefixes

Wants: TypeAlias = Literal["q", "q_pre", "k"]
TAIL = 32  # newest columns of the last call that a crop can take back: more than speculative decoding rejects at a time


class Statistic(ABC):
    """A run-time statistic of the rows of one layer. State tensors are (B, H, ...), created on first use."""

    name: ClassVar[str]
    wants: ClassVar[Wants]

    def __init__(self, shape: Shape, argument: str = "") -> None:
        self.shape = shape
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        """The statistic of each block packed in this call, (B, H, F or 1, ...) float32; None if none is packed.

        x: queries or keys (B, heads, Q, D) of this call.
        """

    def current(self) -> Tensor | None:
        """The statistic that decoding needs, (B, H, 1, ...); None where only encoding needs one."""
        return None

    def select(self, rows: Tensor) -> None:
        self.state = {name: t[rows.to(t.device)] for name, t in self.state.items()}

    def move(self, device: torch.device | str) -> None:
        self.state = {name: t.to(device, non_blocking=True) for name, t in self.state.items()}

    def grouped(self, q: Tensor) -> Tensor:
        """Queries (B, heads, Q, D) by kv head: (B, kv heads, group, Q, D)."""
        if q.shape[1] % self.shape.heads:
            raise KVCalError(f"{q.shape[1]} query heads do not divide among {self.shape.heads} kv heads")
        return torch.unflatten(q, 1, (self.shape.heads, -1))


class Summed(Statistic):
    """A statistic of sums, from which the newest tokens can be taken out again."""

    def remember(self, x: Tensor, at: Prefixes) -> None:
        """Remember the end of what `observe` has just added, so that a crop can take it back."""
        self.state["tail"] = at.mask(x)[:, :, -TAIL:].clone()

    @property
    def tail(self) -> int:
        """How many of the newest columns a crop can take back."""
        return int(self.state["tail"].shape[2]) if "tail" in self.state else 0

    def crop(self, count: int) -> None:
        """Take back the newest `count` columns, as far as they are in the tail; what is older stays in the sums."""
        if number := min(count, self.tail):
            self._forget(self.state["tail"][:, :, -number:])
            self.state["tail"] = self.state["tail"][:, :, :-number].clone()

    @abstractmethod
    def _forget(self, x: Tensor) -> None:
        """Undo what `observe` added for x (B, heads, columns, D), pads zero."""
