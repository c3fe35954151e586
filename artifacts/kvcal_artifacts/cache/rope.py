"""RoPE of keys that are stored before it, as kernels rotate them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcal_kernels.layout import BLOCK, Rope, rope

from .. import hf
from ..paths import choose
from ..storage.ledger import Ledger


class StoredRope:
    """The model's cosines and sines for the tokens that a cache stores.

    rotary: channels of a head that kernels rotate; 0 where keys are stored after RoPE, or no kernel is to run. ledger:
    of the cache, an argument of each call, as a copied cache has another.
    """

    def __init__(self, model: nn.Module, rotary: int) -> None:
        self._model, self.rotary = model, rotary
        self._runs: dict[torch.device, tuple[Tensor, int, Rope]] = {}  # of starts and sink tokens
        self._even: bool | None = None  # whether the model's RoPE rotates by one angle per position

    @property
    def moves(self) -> bool:
        """Whether kernels rotate keys by angles that may change as the sequence grows."""
        return self.rotary > 0 and hf.rope_moves(hf.config_of(self._model))

    def begin(self) -> None:
        """Forget what a longer sequence changes, at the beginning of a call."""
        if self.moves:
            self._runs = {}

    def why_uneven(self, ledger: Ledger) -> str | None:
        """Why no kernel rotates the keys that are stored before RoPE; None if one does, as far as is known."""
        if not ledger.gapless:
            return choose.GAPS
        return choose.UNEVEN if self._even is False else None

    def is_even(self, ledger: Ledger) -> bool:
        """Whether tokens of a run differ by `near` alone: measured once per cache on the model's cosines and sines."""
        if self._even is None:
            assert ledger.positions is not None
            first = torch.arange(0, 2 * BLOCK, device=ledger.positions.device)
            cos, sin = self._tables(first, ledger)
            run = Rope(torch.stack([cos[::BLOCK], sin[::BLOCK]], 1)[None], rope.near(cos[:BLOCK], sin[:BLOCK]))
            expected = torch.stack([cos, sin], 1)[None]
            self._even = bool(((run.tables(first[None]) - expected).abs() < 1e-4 * expected.abs().max()).all())
        return self.why_uneven(ledger) is None

    @torch.no_grad()
    def of_rows(self, ledger: Ledger, device: torch.device, sink: int, blocks: int, recent: int) -> Rope:
        """RoPE of rows of so many sink tokens, kernel blocks and recent tokens; built anew where these outgrow it."""
        starts = _starts(ledger)
        of, sinks, angles = self._runs.get(device, (None, -1, None))
        if (
            angles is None
            or of is not starts
            or sinks != sink
            or angles.first.shape[1] < rope.runs(sink, blocks, recent)
        ):
            same = starts[:1] if bool((starts == starts[0]).all()) else starts
            capacity = blocks if self.moves else blocks + blocks // 8 + 8
            first = rope.first_positions(same, sink, capacity, recent).to(device)
            if capacity == blocks:  # slots beyond hold no token, and would mean that the sequence is longer
                first = first.clamp_max(_newest(ledger))
            angles = self.of_runs(ledger, first)
            self._runs[device] = starts, sink, angles
        return angles

    def of_runs(self, ledger: Ledger, first: Tensor) -> Rope:
        """RoPE of runs at these first positions, (B or 1, runs)."""
        cos, sin = self._tables(torch.cat([torch.arange(BLOCK, device=first.device), first.flatten()]), ledger)
        far = torch.stack([cos[BLOCK:], sin[BLOCK:]], -2).unflatten(0, first.shape)
        return Rope(far, rope.near(cos[:BLOCK], sin[:BLOCK]))

    def _tables(self, positions: Tensor, ledger: Ledger) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines (T, R/2) float32 of positions (T,), for a sequence as long as it is now."""
        newest = torch.full_like(positions[:1], _newest(ledger))
        cos, sin = hf.rope_tables(self._model, torch.cat([positions, newest])[None], torch.float32)
        return cos[0, :-1, : self.rotary // 2], sin[0, :-1, : self.rotary // 2]


def _starts(ledger: Ledger) -> Tensor:
    """The positions of rows' first tokens, (B,)."""
    assert ledger.starts is not None
    return ledger.starts


def _newest(ledger: Ledger) -> int:
    """The largest position that a token has."""
    return int((_starts(ledger) + ledger.lengths).max()) - 1
