"""One call of the model: what its hooks report, its plan, and what the layers share of both on their devices."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from kvcal_kernels.dequantise import Rotation

from .. import hf
from ..errors import KVCalError
from ..scheme import Scheme
from ..storage.attention_mass import allowed
from ..storage.plan import Plan
from ..storage.selection import EvictingPlan
from .chain import Chain
from .statistics.prefixes import Prefixes


class Forward:
    """One call of the model, from the hook before its decoder on.

    The cache replaces it at the next call, and whenever tokens leave otherwise than by a call; nothing in it is ever
    reset. mask: as the model got it, of all columns; custom_mask: it is not (batch, tokens). gives_weights: the
    call is asked for attention weights.
    """

    def __init__(
        self,
        scheme: Scheme,
        model: nn.Module,
        mask: Tensor | None = None,
        custom_mask: bool = False,
        gives_weights: bool = False,
    ) -> None:
        self._scheme, self._model, self._windows = scheme, model, scheme.windows
        self.mask, self.custom_mask, self.gives_weights = mask, custom_mask, gives_weights
        self.hides_old = False  # whether the mask hides columns that were real when they came
        self.on_device: bool | None = None  # whether it is a step that the device does by itself; None: not yet asked
        self.keys_before: dict[int, Tensor] = {}  # by layer: keys before RoPE
        self.queries_before: dict[int, Tensor] = {}  # by layer: queries before RoPE
        self.masks: dict[torch.device, Tensor | None] = {}  # of the tokens that remain where some are evicted
        self.chain = Chain(scheme)
        self.begun: Plan | None = None
        self._positions: Tensor | None = None
        self._rotation: tuple[Tensor, Tensor] | None = None  # of the call's columns, as the model computed them
        self._tables: tuple[Tensor, Tensor] | None = None  # cos and sin of all columns
        self._split_rotations: dict[torch.device, tuple[Rotation, Rotation] | None] = {}
        self._plans: dict[torch.device, Plan] = {}
        self._prefixes: dict[torch.device, Prefixes] = {}
        self._places: dict[torch.device, Tensor] = {}
        self._counts: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor]] = {}

    def rotate_by(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Note position ids int (B or 1, query) of the call's columns, and the model's cos and sin for them."""
        self._positions, self._rotation = positions, (cos, sin)

    @property
    def positions(self) -> Tensor:
        """The positions int (B or 1, query) of the call's columns."""
        if self._positions is None:
            raise KVCalError("the model's rotary module did not report positions; use a bundle with frame post_rope")
        return self._positions

    def rotation(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and sin that the model rotated the call's keys by, on the device of `like`."""
        assert self._rotation is not None
        cos, sin = (t.to(like.device) for t in self._rotation)
        return cos, sin

    def tables(self, positions: Tensor, columns: slice, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and sin of these columns of every row, in the dtype and on the device of `like`.

        positions: of all columns, whose cos and sin are computed once per call.
        """
        if self._tables is None:
            self._tables = hf.rope_tables(self._model, positions, like.dtype)
        cos, sin = (t[:, columns].to(like.device) for t in self._tables)
        return cos, sin

    def split_rotation(
        self, positions: Tensor, site: hf.AttentionSite, packed: slice, past: int, like: Tensor
    ) -> tuple[Rotation, Rotation] | None:
        """RoPE of the packed columns, and of the others of the first `past`, as the kernels that dequantise take it.

        Computed once per call and device; None where the model's RoPE is another.
        """
        device = like.device
        if device not in self._split_rotations:
            tables = self.tables(positions, slice(0, past), like)
            inner = Rotation(*(t[:, packed] for t in tables))
            outer = Rotation(*(torch.cat([t[:, : packed.start], t[:, packed.stop :]], 1) for t in tables))
            self._split_rotations[device] = (inner, outer) if hf.by_halves(site, inner.cos.shape[-1]) else None
        return self._split_rotations[device]

    def remaining_mask(self, site: hf.AttentionSite, plan: EvictingPlan, hidden: Tensor) -> Tensor | None:
        """The mask (B, 1, query, remaining + query) of the tokens that remain where some are evicted.

        Computed once per call and device; None where all of them are visible.
        """
        if hidden.device not in self.masks:
            hf.check_selectable(site)
            visible = allowed(plan.alive, self.prefixes(hidden.device).valid, 0, plan.query)
            self.masks[hidden.device] = None if bool(visible.all()) else hf.mask_for(site, visible, hidden.dtype)
        return self.masks[hidden.device]

    @property
    def plan(self) -> Plan:
        """The plan of the call, by the ledger on the CPU when its first layer came."""
        assert self.begun is not None
        return self.begun

    def on(self, device: torch.device) -> Plan:
        """The plan with its index tensors on a device."""
        if device not in self._plans:
            self._plans[device] = self.plan.to(device)
        return self._plans[device]

    def prefixes(self, device: torch.device) -> Prefixes:
        """The counts that run-time statistics of layers on a device go by."""
        if device not in self._prefixes:
            self._prefixes[device] = Prefixes(self.plan, self._windows, device)
        return self._prefixes[device]

    @cached_property
    def rolls(self) -> bool:
        """Whether all rows' sinks are full, so that windows alone take the new tokens."""
        assert self.plan.lengths is not None
        return bool((self.plan.lengths >= self._windows.sink).all())

    @cached_property
    def opened(self) -> bool:
        """Whether all rows had packed blocks before the call."""
        assert self.plan.packed is not None
        return bool((self.plan.packed > 0).all())

    def places(self, device: torch.device, recent: Tensor) -> Tensor:
        """The places of the new tokens among each row's recent ones, (B, Q) int64.

        recent: (B,) how many recent tokens a row has with the new ones.
        """
        if device not in self._places:
            query = self.plan.query
            self._places[device] = (recent.long() - query)[:, None] + torch.arange(query, device=device)
        return self._places[device]

    def counts(self, device: torch.device, each: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Sink tokens and packed blocks of each row before the call, and recent tokens with the new ones: (B,) int32.

        each: kernel blocks in one of the scheme.
        """
        if (device, each) not in self._counts:
            plan = self.plan
            assert plan.lengths is not None and plan.packed is not None
            sink = plan.lengths.clamp_max(self._windows.sink)
            recent = plan.lengths - sink - plan.packed * self._windows.block + plan.query
            sinks, blocks, recents = torch.stack([sink, plan.packed * each, recent]).int().to(device).unbind()
            self._counts[device, each] = sinks, blocks, recents
        return self._counts[device, each]
