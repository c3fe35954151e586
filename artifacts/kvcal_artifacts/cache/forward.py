"""What the layers of a cache share during one call of the model: each tensor that the host made is copied once a device."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..storage.ledger import Plan
from ..windows import Windows
from .statistics import Prefixes


class Call:
    """One forward: its plan, made by the ledger on the CPU, and what layers read of it on the devices where they are."""

    def __init__(self, plan: Plan, windows: Windows) -> None:
        self.plan, self._windows = plan, windows
        self._plans: dict[torch.device, Plan] = {}
        self._prefixes: dict[torch.device, Prefixes] = {}
        self._places: dict[torch.device, Tensor] = {}
        self._counts: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> Plan:
        """The plan with its index tensors there."""
        if device not in self._plans:
            self._plans[device] = self.plan.to(device)
        return self._plans[device]

    def prefixes(self, device: torch.device) -> Prefixes:
        """For the run-time statistics of layers there."""
        if device not in self._prefixes:
            self._prefixes[device] = Prefixes(self.plan, self._windows, device)
        return self._prefixes[device]

    @cached_property
    def rolls(self) -> bool:
        """Whether all rows' sinks are full, so that windows alone take the new tokens."""
        assert self.plan.seen is not None
        return bool((self.plan.seen >= self._windows.sink).all())

    @cached_property
    def opened(self) -> bool:
        """Whether all rows had packed blocks before the call."""
        assert self.plan.packed is not None
        return bool((self.plan.packed > 0).all())

    def places(self, device: torch.device, recent: Tensor) -> Tensor:
        """(B, Q) int64: which of each row's recent tokens, of which `recent` (B,) are there with the new ones, are these."""
        if device not in self._places:
            query = self.plan.query
            self._places[device] = (recent.long() - query)[:, None] + torch.arange(query, device=device)
        return self._places[device]

    def counts(self, device: torch.device, each: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Sink tokens, packed blocks, recent tokens with the new ones, of each row before the call: (B,) int32. each: kernel
        blocks in one of the scheme.
        """
        if (device, each) not in self._counts:
            plan = self.plan
            assert plan.seen is not None and plan.packed is not None
            sink = plan.seen.clamp_max(self._windows.sink)
            recent = plan.seen - sink - plan.packed * self._windows.block + plan.query
            sinks, blocks, recents = torch.stack([sink, plan.packed * each, recent]).int().to(device).unbind()
            self._counts[device, each] = sinks, blocks, recents
        return self._counts[device, each]
