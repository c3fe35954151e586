"""The storage of a static layer: allocated once, and continued by steps of the device, without the host.

Recent tokens lie in a ring, as storage/static_storage.py says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.layout import Blocks, rope
from kvcal_kernels.quantise import Counts
from kvcal_kernels.squat import Digits

from ... import hf
from ...codecs import Packed
from ...errors import KVCalError
from ...paths import codebook, fused
from ...storage.host_storage import tensors_of
from ...storage.slots import over_heads, take_slots
from ...storage.static_storage import STORED, Allocation, Contents, StepRope, Steps, allocate, host_bool, most_blocks
from ..protocols import LayerProtocol
from ..statistics.key_scale import KeyScale
from ..statistics.subspace import QuerySubspace


class StaticStorage:
    """Storage of one layer, allocated once as `allocation`, in which steps leave tokens without the host.

    What the host sees of it, `sink`, `window` and `packed`, is looked up when it is asked for, which most steps do not.
    ready: the allocation holds what the layer holds. block: tokens of one. Methods with a parameter `layer` are called
    by it: what they need of its cache is there.
    """

    ready = False

    def __init__(self, block: int) -> None:
        self.allocation: Allocation | None = None
        self._block = block
        self._sink: list[Tensor] = []
        self._window: list[Tensor] = []
        self._packed: list[Packed] = []
        self._unseen: Contents | None = None  # the host has not looked since the allocation came to hold that
        self._views: list[Tensor] = []  # parts of the allocation that it got when it looked
        self._corrected_for: Tensor | None = None  # rows' subspaces that the allocation's moves are of

    @property
    def is_allocated(self) -> bool:
        """Whether there is storage for steps to come."""
        return self.allocation is not None

    @property
    def sink(self) -> list[Tensor]:
        self._look()
        return self._sink

    @sink.setter
    def sink(self, value: list[Tensor]) -> None:
        self._sink = value

    @property
    def window(self) -> list[Tensor]:
        self._look()
        return self._window

    @window.setter
    def window(self, value: list[Tensor]) -> None:
        self._window = value

    @property
    def packed(self) -> list[Packed]:
        self._look()
        return self._packed

    @packed.setter
    def packed(self, value: list[Packed]) -> None:
        self._packed = value

    def clear(self) -> None:
        """Drop all tokens; the allocation does not move: a graph knows its address."""
        self._unseen, self._views, self.ready = None, [], False

    def grow_on_host(self) -> None:
        """Take what the allocation holds to the host, and free it."""
        if self.allocation is not None:
            self._look()
            self.allocation, self._views, self.ready = None, [], False

    def _fill(self, part: Tensor, new: Tensor) -> None:
        """Write into the first slots of a part of the allocation, unless `new` is the host's view of them."""
        if new.shape[2] > part.shape[2]:
            raise KVCalError(f"{new.shape[2]} slots of a row do not fit into {part.shape[2]}; give a larger max_length")
        if not any(new is view for view in self._views):
            part[:, :, : new.shape[2]].copy_(new)

    def overlook(self, contents: Contents) -> None:
        """Note that the allocation has what `contents` says; the host's tensors are dropped."""
        self._unseen, self._views = contents, []
        self._sink, self._window, self._packed = [], [], []

    def _look(self) -> None:
        """Let the host's tensors be those parts of the allocation that are in use; the window, in order, is a copy."""
        if self._unseen is None:
            return
        (sink, blocks, _), allocation = self._unseen.widths, self.allocation
        assert allocation is not None
        slots, self._unseen = self._unseen.slots(self._block, allocation.ring[0]), None
        self._sink = [t[:, :, :sink] for t in allocation.sink]
        self._window = [take_slots(t, slots) for t in allocation.ring]
        self._packed = [{name: t[:, :, :blocks] for name, t in packed.items()} for packed in allocation.packed]
        self._views = self._sink + [t for packed in self._packed for t in packed.values()]

    def heed(self, layer: LayerProtocol) -> None:
        """Raise the errors of steps on the device, without a wait for those that still run."""
        if not self.ready or torch.compiler.is_compiling() or hf.capturing():
            return
        if bool(layer.cache.steps[layer.device].wrong):
            layer.cache.settle()

    def tensors(self, part: str) -> list[Tensor]:
        """The tensors of a part, packed or window, as they are allocated, used or not."""
        if self.allocation is None:
            return tensors_of(self, part)
        if part == "packed":
            return [t for packed in self.allocation.packed for t in packed.values()]
        return self.allocation.sink + self.allocation.ring

    def bookkeeping(self, layer: LayerProtocol) -> list[Tensor]:
        """What steps note and are corrected by; what the layers of a device share counts as their first one's."""
        memory = self.allocation
        if memory is None:
            return []
        steps = layer.cache.steps.get(layer.device)
        shared = [*steps.due.values()] if steps is not None and layer.index == steps.first else []
        return [memory.flags, *([] if memory.moves is None else memory.moves.tensors), *shared]

    def target(self, layer: LayerProtocol) -> quantise.Layer:
        """The tensors that the kernel appends to."""
        memory = self.allocation
        assert memory is not None
        if memory.target is None:
            sink, ring = (memory.sink[0], memory.sink[1]), (memory.ring[0], memory.ring[1])
            keys, values = layer.as_blocks(memory.packed)
            assert isinstance(keys, Blocks) and isinstance(values, Blocks)  # packed by a rule, so no coordinates
            memory.target = quantise.Layer(keys, values, sink, ring, memory.flags)
        return memory.target

    @torch.inference_mode(False)  # else what is allocated could be written to in inference mode alone
    @torch.no_grad()
    def publish(self, layer: LayerProtocol) -> None:
        """Write what the host has of the layer into the allocation."""
        cache = layer.cache
        if not layer.is_initialized or not cache.is_compileable:
            return
        like, ledger, contents = self.window[0], cache.full_ledger, cache.contents
        if cache.stored_rope.rotary and not bool(ledger.lengths.all()):
            layer.grow_on_host()  # no one knows where a row without a token will begin
            return
        if not self._fits(like) and (why := self._refusal(layer)):
            cache.grow(f"layer {layer.index}: {why}")
            return
        memory, steps = self._allocation_for(layer, like), _steps_for(layer, like)
        slots = contents.slots(cache.scheme.windows.block, memory.ring[0])
        for role in (0, 1):
            self._fill(memory.sink[role], self.sink[role])
            memory.ring[role].scatter_(2, over_heads(slots, like), self.window[role])
            for name, part in self.packed[role].items():
                self._fill(memory.packed[role][name], part)
        if layer.index == steps.first:
            stored = torch.stack([ledger.sink, ledger.window, ledger.blocks * fused.kernel_blocks(layer.codecs)])
            for name, count in zip(STORED, stored.to(like.device), strict=True):
                getattr(steps.counts, name).copy_(count)
            steps.length.fill_(layer.columns)
            steps.wrong.fill_(False)
            if steps.rope is not None:
                _begin_rope(layer, memory, steps.rope)
        memory.flags.zero_()
        layer.key_factor.forget()
        for scale in key_scales(layer).values():
            for name, value in scale.state.items():
                target = memory.statistics.get(name)
                if target is None or target.shape != value.shape:
                    target = memory.statistics[name] = value.clone(memory_format=torch.contiguous_format)
                scale.state[name] = target.copy_(value)
        if cache.opened and not layer.paths.reads_codes:
            layer.key_factor.of(layer)
        self._correct_by(layer, memory)
        self.ready = True
        self.overlook(contents)

    def _correct_by(self, layer: LayerProtocol, memory: Allocation) -> None:
        """Compute what corrects the blocks of the steps to come, for SQuat."""
        key, ledger, subspaces = layer.codecs.key, layer.cache.full_ledger, None
        if not key.corrected_channels:
            return
        for statistic in layer.statistics.values():
            assert isinstance(statistic, QuerySubspace)
            subspaces = statistic.standing(
                ledger.blocks, (ledger.lengths - layer.missed).clamp_min(0), layer.site.ratio
            )
        previous = self._corrected_for
        unchanged = subspaces is not None and previous is not None and torch.equal(subspaces, previous)
        if memory.moves is not None and unchanged:
            return
        moves = key.step_moves(subspaces)
        self._corrected_for = subspaces
        if memory.moves is None or not memory.moves.renew(moves):
            memory.moves = Digits.of(moves)
        if memory.due is None:
            keys = memory.sink[0]
            size = torch.Size((*keys.shape[:2], layer.cache.scheme.windows.block, keys.shape[3]))
            memory.due = layer.cache.steps[layer.device].due.setdefault(
                size, torch.zeros(size, device=keys.device, dtype=torch.float32)
            )

    def _fits(self, like: Tensor) -> bool:
        """Whether the allocation is of like's rows, dtype and device."""
        sink = None if self.allocation is None else self.allocation.sink[0]
        return sink is not None and (len(sink), sink.dtype, sink.device) == (len(like), like.dtype, like.device)

    def _refusal(self, layer: LayerProtocol) -> str | None:
        """Why no kernel appends vector codes on the layer's device."""
        if not layer.paths.reads_codes:
            return None
        return codebook.append_refusal(layer.cache.kernels, layer.codecs, layer.dtype, layer.device)

    def _allocation_for(self, layer: LayerProtocol, like: Tensor) -> Allocation:
        """The allocation; a new one for another number of rows, dtype or device."""
        if self.allocation is not None and self._fits(like):
            return self.allocation
        cache, windows = layer.cache, layer.cache.scheme.windows
        assert cache.max_length is not None
        ring = quantise.Windows(windows.sink, windows.recent, windows.block).ring_capacity(fused.QUERIES)
        self.allocation = memory = allocate(like, layer.pair, windows, cache.max_length, ring)
        layer.on_moved()
        _reserve(layer, memory, like)
        return memory


def key_scales(layer: LayerProtocol) -> dict[str, KeyScale]:
    """The statistics that steps continue; a subspace of queries does not change in them."""
    return {name: statistic for name, statistic in layer.statistics.items() if isinstance(statistic, KeyScale)}


def _reserve(layer: LayerProtocol, memory: Allocation, like: Tensor) -> None:
    """Allocate the memory of the kernels' launches over all that an allocation can hold. like: (B, H, tokens, D)."""
    cache, ratio = layer.cache, layer.site.ratio
    batch, heads, _, dim = like.shape
    if layer.paths.reads_codes:
        coded, q = codebook.coded(layer.codecs, memory.packed), like.new_zeros(batch, heads * ratio, 1, dim)
        codebook.reserve(cache.kernels, coded, q, cache.memory.workspace(layer.device, True))
        return
    keys, values = layer.codecs.key.fused(), layer.codecs.value.fused()
    assert not isinstance(keys, str) and not isinstance(values, str)
    blocks = next(iter(memory.packed[0].values())).shape[2] * fused.kernel_blocks(layer.codecs)
    space, windows = cache.memory.workspace(layer.device), (memory.sink[0].shape[2], memory.ring[0].shape[2])
    fused.reserve(cache.kernels, space, keys, values, batch, heads, ratio, blocks, windows, layer.rotary)


def _begin_rope(layer: LayerProtocol, memory: Allocation, step_rope: StepRope) -> None:
    """Let rows begin where the ledger says."""
    ledger = layer.cache.full_ledger
    starts = ledger.starts
    assert starts is not None
    step_rope.start.copy_(starts)
    step_rope.gap.zero_()
    if not layer.cache.stored_rope.rotary or (step_rope.of is not None and torch.equal(step_rope.of, starts)):
        return
    windows = layer.cache.scheme.windows
    blocks = most_blocks(windows, layer.cache.max_length or 0) * fused.kernel_blocks(layer.codecs)
    first = rope.first_positions(starts, windows.sink, blocks, memory.ring[0].shape[2])
    angles, step_rope.of = layer.cache.stored_rope.of_runs(ledger, first.to(step_rope.start.device)), starts.clone()
    if step_rope.angles is None:
        step_rope.angles = angles
    step_rope.angles.renew(angles.first)


def _steps_for(layer: LayerProtocol, like: Tensor) -> Steps:
    """What the cache's layers on this device share; allocated anew for another number of rows."""
    shared, windows = layer.cache.steps.get(like.device), layer.cache.scheme.windows
    if shared is None or shared.counts.data.shape[1] != len(like):
        counts = Counts(len(like), quantise.Windows(windows.sink, windows.recent, windows.block), like.device)
        length = torch.zeros((), dtype=torch.int64, device=like.device)
        step_rope = None
        if layer.cache.scheme.frame == "pre_rope":
            step_rope = StepRope(None, length.new_zeros(len(like)), length.new_zeros((), dtype=torch.bool))
        shared = Steps(counts, length, layer.index, layer.index, host_bool(like.device), step_rope)
        layer.cache.steps[like.device] = shared
    shared.first, shared.last = min(shared.first, layer.index), max(shared.last, layer.index)
    return shared
