"""Proof that an evaluation reads what was packed.

An evaluation whose cache stores exact copies aside, or never reads a block, gives good figures that mean nothing.
Three facts together exclude that. In the evaluation's calls, attention receives what the packed blocks decode to
(Audit). What they decode to hangs on the bytes of keys and of values, block by block. And what each layer gives hangs
on its blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache, KVCalLayer, copying
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.errors import GateFailed
from kvcal_artifacts.storage import block_store
from kvcal_kernels.device import on

from ..models.spread import input_device
from .layers import ROLES, Figure
from .perplexity import CacheMaker

if TYPE_CHECKING:
    from ..models.structure import CausalLM

Pair = tuple[Tensor, Tensor]  # keys and values (B, H, T, D)
# |received - decoded|^2 over |decoded|^2. The same computation twice, block by block and all at once, differs by a
# rounding of float32. Rounded to 16 bits after it, one number in thousands differs by a whole step: so no number may
# differ by more, and all together by no more than SAME_IN_16_BITS and STEPS steps of the largest number. These matter
# where one channel has nearly all of a head's squares (SmolLM2's keys): a step of one of 32 tokens is 2e-6 of them.
# No 8-bit codec comes near.
SAME, SAME_IN_16_BITS, STEPS = 1e-9, 1e-7, 4


@dataclass(frozen=True)
class Canary:
    """What an exchange of packed blocks changed in a model's layers. layers: whose blocks were exchanged. blocks: that
    each held. unread: layers whose exchange left what the layer gives as it was.

    deaf: layer, role and block whose other bytes decoded to the same. bypassed: layer and role of which attention
    received something else than what the blocks decode to. uncounted: layers that packed blocks in the evaluation
    itself, and never read one there, or whose reading was never compared.
    """

    layers: int
    blocks: int
    unread: tuple[int, ...] = ()
    deaf: tuple[tuple[int, str, int], ...] = ()
    bypassed: tuple[tuple[int, str], ...] = ()
    uncounted: tuple[int, ...] = ()

    @property
    def alive(self) -> bool:
        return self.blocks > 0 and self.layer is None

    @property
    def layer(self) -> int | None:
        """The first to blame."""
        named = [*(pair[0] for pair in self.bypassed), *self.unread, *(one[0] for one in self.deaf), *self.uncounted]
        return named[0] if named else None

    def counted(self, rows: Iterable[Mapping[str, Figure]], audit: Audit) -> Canary:
        """The canary with what the evaluation's caches packed and read; rows: of LayerErrors."""
        silent = [
            layer
            for row in rows
            if isinstance(layer := row["layer"], int)
            and row["key_relative_error"] is not None
            and not (row["blocks_read"] and layer in audit.compared)
        ]
        bypassed = dict.fromkeys([*self.bypassed, *audit.bypassed])
        return replace(self, bypassed=tuple(bypassed), uncounted=tuple(silent))

    def __str__(self) -> str:
        if not self.blocks:
            return "no block was packed before the last step: nothing compressed was measured; take longer windows"
        if self.bypassed:
            layer, role = self.bypassed[0]
            return f"layer {layer}: attention received other {role}s than the packed blocks decode to"
        if self.unread:
            layers = ", ".join(map(str, self.unread))
            return f"layer {layers}: other packed blocks gave the same output, so what is packed was not read"
        if self.deaf:
            layer, role, block = self.deaf[0]
            return f"layer {layer}: block {block} of {role}s decodes to the same whatever its bytes are"
        if self.uncounted:
            return f"layer {', '.join(map(str, self.uncounted))}: packed blocks were never read in the evaluation"
        return f"other packed blocks gave another output of each of {self.layers} layers"

    def check(self, name: str) -> None:
        """Raise GateFailed where packed blocks were not read."""
        if not self.alive:
            raise GateFailed(f"{name}: canary: {self}")


class AuditState(TypedDict):
    """What an Audit saw so far, as JSON has it: layers that were compared; layer and role where the two differed."""

    compared: list[int]
    bypassed: list[list[int | str]]


@dataclass
class Audit:
    """Compares what caches' layers hand to attention with what their packed blocks decode to just before, key and
    value.

    last: columns after the call that is always compared. Before it a layer is compared whenever it holds twice the
    blocks of the last time, so that a long evaluation decodes little more. compared: layers; bypassed: where the two
    differed.
    """

    last: int
    compared: set[int] = field(default_factory=set)
    bypassed: dict[tuple[int, str], None] = field(default_factory=dict)

    def state(self) -> AuditState:
        """What was counted so far, as JSON has it; `restore` reads it."""
        return {"compared": sorted(self.compared), "bypassed": [list(pair) for pair in self.bypassed]}

    def restore(self, state: AuditState) -> None:
        self.compared = set(state["compared"])
        self.bypassed = dict.fromkeys((int(layer), str(role)) for layer, role in state["bypassed"])

    def merge(self, other: Audit) -> None:
        """Add what another one saw."""
        self.compared |= other.compared
        self.bypassed |= other.bypassed

    def attach(self, cache: KVCalCache, also: Callable[[KVCalLayer], None] = lambda layer: None) -> KVCalCache:
        """Watch this cache, which must not be copied afterwards. also: is called before each call that is compared."""
        for layer in cache.compressed_layers:
            layer.update = self._audited(cache, layer, also)  # type: ignore[method-assign]
        return cache

    def _audited(
        self, cache: KVCalCache, layer: KVCalLayer, also: Callable[[KVCalLayer], None]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        honest, done = layer.update, 0

        def update(keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            nonlocal done
            plan, blocks = cache.plan_for(layer, keys), _blocks(layer)
            due = blocks >= max(1, 2 * done) or layer.columns + keys.shape[2] >= self.last
            if not blocks or not due or plan.ragged:  # rows of padding lie in another order
                return honest(keys, values, *args, **kwargs)
            done = blocks
            also(layer)
            start, expected = layer.sink[0].shape[2], decoded(cache, layer, layer.packed)
            out = honest(keys, values, *args, **kwargs)
            self._compare(cache, layer, start, expected, out)
            return out

        return update

    def _compare(self, cache: KVCalCache, layer: KVCalLayer, start: int, expected: Pair, out: Pair) -> None:
        self.compared.add(layer.index)
        for role, states, received in zip(ROLES, expected, out, strict=True):
            attended, slots = layer.site.local(states).to(received.dtype), slice(start, start + states.shape[2])
            rotated = None
            if role == "key" and cache.scheme.frame == "pre_rope" and layer.site.rope:
                table = cache.rope(slots, attended)
                rotated = _rotated_sizes(layer.site, attended, table)
                attended = layer.site.rotate(attended, *table)
            if not _same(attended, received[:, :, slots], rotated):
                self.bypassed[layer.index, role] = None


def decoded(cache: KVCalCache, layer: KVCalLayer, packed: list[Packed]) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, T, D) float32 of these blocks as the layer would decode them in the current call."""
    device = layer.window[0].device
    with torch.no_grad(), torch.autocast(device.type, enabled=False), on(device):
        return layer.decode(packed, cache.old_context(layer.index))


def _rotated_sizes(site: hf.AttentionSite, x: Tensor, table: Pair) -> Tensor:
    """The most that each number of rotated x (B, H, T, D) can be: float32. Its RoPE pair is rounded first, so that a
    step of the larger one reaches the smaller.
    """
    size, cos, sin = x.float().abs(), table[0].float().abs(), table[1].float().abs()
    return torch.maximum(site.rotate(size, cos, sin).abs(), site.rotate(size, cos, -sin).abs())


def _same(expected: Tensor, received: Tensor, rotated: Tensor | None = None) -> bool:
    """Whether two tensors (B, H, T, D) are one but for rounding, in each row's every head. rotated: of keys that were
    rounded before RoPE, too, what _rotated_sizes gives.
    """
    if expected.shape != received.shape:
        return False
    wide, other = expected.float(), received.float()
    difference, squares = (wide - other).abs(), _squares(wide)
    if received.dtype is torch.float32:
        return bool((_squares(difference) <= SAME * squares).all())
    size = torch.maximum(wide.abs(), other.abs())
    step = torch.finfo(received.dtype).eps * (size if rotated is None else size + rotated)  # or half of it
    few = STEPS * step.double().square().amax((2, 3))
    beyond = (difference - step).clamp_min(0)
    return bool(
        (_squares(beyond) <= SAME * squares).all() and (_squares(difference) <= SAME_IN_16_BITS * squares + few).all()
    )


def _squares(x: Tensor) -> Tensor:
    """Sum of squares (B, H) float64 of x (B, H, T, D), each head for itself."""
    return x.square().sum((2, 3), dtype=torch.float64)


BLOCK_TOKENS = 96  # tokens in packed blocks of a canary's windows, and two blocks at least


@torch.no_grad()
def canary(model: CausalLM, ids: Tensor, maker: CacheMaker, *, step: int = 32) -> Canary:
    """Run the starts of two windows of ids (N, T), as long as packs a few blocks, up to their last `step` tokens.

    These then run in the first window, with other bytes decoded, too, for the first, middle and last block of each
    layer's keys and of its values. They also run with each layer called twice, the first time with all its packed
    blocks from the other window. Those bytes are as valid as the row's, whatever the codec. step: the evaluation's.
    """
    device = input_device(model)
    with maker() as cache, maker() as twin:
        length = _length(cache, ids.shape[1], step)
        last = max(1, min(step, length - 1))
        window_ids = ids[:1, :length].to(device)
        other = ids[1:2, :length].to(device) if len(ids) > 1 else ids[:1].to(device).roll(ids.shape[1] // 2, 1)
        for filled, window in ((cache, window_ids), (twin, other[:, :length])):
            model(input_ids=window[:, :-last], past_key_values=filled, use_cache=True, logits_to_keep=1)
        layers = [layer.index for layer in cache.compressed_layers]
        blocks = min((_blocks(layer) for layer in cache.compressed_layers), default=0)
        if not blocks:
            return Canary(len(layers), 0)
        tokens = window_ids[:, -last:]
        audit, deaf = Audit(length), dict[tuple[int, str, int], None]()
        with copy.deepcopy(cache) as probed:
            audit.attach(
                probed, lambda layer: deaf.update(dict.fromkeys(_deaf(probed, layer, twin.layers[layer.index])))
            )
            if cache.scheme.selection is None:
                with _doubled(model, probed, twin) as unread:
                    _logits(model, probed, tokens)
            else:
                unread = _unread_by_logits(model, cache, twin, _logits(model, probed, tokens), tokens)
    return Canary(len(layers), blocks, tuple(unread), tuple(deaf), tuple(audit.bypassed))


def _length(cache: KVCalCache, most: int, step: int) -> int:
    """Tokens of a window, at most `most`, of which a few blocks are packed before its last `step` tokens; all where the
    scheme evicts tokens.
    """
    windows, selection = cache.scheme.windows, cache.scheme.selection
    if selection is not None:
        return most
    return min(most, windows.sink + windows.recent + max(2 * windows.block, BLOCK_TOKENS) + step)


@contextmanager
def _doubled(model: CausalLM, cache: KVCalCache, twin: KVCalCache) -> Iterator[list[int]]:
    """Run each decoder layer twice in a call with `cache` within the block: with its packed blocks taken from `twin`,
    and as it is. Yields the layers whose output the exchange did not change.

    What a layer gives goes to all above it, so that a layer whose output hangs on its blocks has a say in the logits.
    """
    decoder_layers = hf.decoder_of(model).layers
    unread: list[int] = []
    before = {layer.index: vars(decoder_layers[layer.index]).get("forward") for layer in cache.compressed_layers}
    for layer in cache.compressed_layers:
        module = decoder_layers[layer.index]
        module.forward = _twice(module.forward, cache, layer, twin.layers[layer.index], unread)
    try:
        yield unread
    finally:
        for index, forward in before.items():
            del decoder_layers[index].forward
            if forward is not None:
                decoder_layers[index].forward = forward


Hidden = Tensor | tuple[Tensor, ...]  # what a decoder layer gives: hidden states, by some versions with more behind


def _twice(
    forward: Callable[..., Hidden], cache: KVCalCache, layer: KVCalLayer, other: KVCalLayer, unread: list[int]
) -> Callable[..., Hidden]:
    def run(*args: object, **kwargs: object) -> Hidden:
        with _restored(cache, layer):
            layer.packed = _others(layer, other)
            exchanged = _hidden(forward(*args, **kwargs))
        output = forward(*args, **kwargs)
        if torch.equal(exchanged, _hidden(output)):
            unread.append(layer.index)
        return output

    return run


def _hidden(output: Hidden) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _restored(cache: KVCalCache, layer: KVCalLayer) -> Iterator[None]:
    """Whatever a call does to one layer, and to what it leaves for those above, is undone; no audit watches it."""
    audited = vars(layer).pop("update")
    with copying.undone(cache, layer):
        yield
    layer.update = audited  # type: ignore[method-assign]


def _unread_by_logits(model: CausalLM, cache: KVCalCache, twin: KVCalCache, right: Tensor, tokens: Tensor) -> list[int]:
    """The layers whose exchange does not change the logits `right`, each in a separate call: what a layer evicts
    hangs on the whole call.
    """
    unread = []
    for layer in cache.compressed_layers:
        with copy.deepcopy(cache) as changed:
            changed.layers[layer.index].packed = _others(layer, twin.layers[layer.index])
            if torch.equal(right, _logits(model, changed, tokens)):
                unread.append(layer.index)
    return unread


def _logits(model: CausalLM, cache: KVCalCache, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits


def _deaf(cache: KVCalCache, layer: KVCalLayer, other: KVCalLayer) -> list[tuple[int, str, int]]:
    """The layer's blocks, of the first, middle and last, that decode alike with other bytes; keys and values each
    alone.
    """
    count, size = _blocks(layer), cache.scheme.windows.block
    right, deaf = decoded(cache, layer, layer.packed), []
    for role, name in enumerate(ROLES):
        for block in sorted({0, count // 2, count - 1}):
            changed = list(layer.packed)
            exchanged = _with_other(layer.packed[role], other.packed[role], block)
            if exchanged is None:
                continue
            changed[role] = exchanged
            slots = slice(block * size, (block + 1) * size)
            if torch.equal(right[role][:, :, slots], decoded(cache, layer, changed)[role][:, :, slots]):
                deaf.append((layer.index, name, block))
    return deaf


def _with_other(blocks: Packed, other: Packed, block: int) -> Packed | None:
    """One block from another cache, or, where that has none or the same bytes, of its own. None: all blocks are
    alike.
    """
    count, there = (int(next(iter(packed.values())).shape[2]) for packed in (blocks, other))
    sources = [count + min(block, there - 1)] * (there > 0) + [i for i in range(count) if i != block]
    for source in sources:
        order = torch.arange(count, device="cpu")
        order[block] = source
        mixed = {
            name: block_store.arrange(tensors, other[name], order[None].to(tensors.device))
            for name, tensors in blocks.items()
        }
        if not _equal(mixed, blocks):
            return mixed
    return None


def _equal(a: Packed, b: Packed) -> bool:
    return all(
        torch.equal(x, y)
        for name, tensors in a.items()
        for x, y in zip(block_store.tensors_of(tensors), block_store.tensors_of(b[name]), strict=True)
    )


def _blocks(layer: KVCalLayer) -> int:
    return int(next(iter(layer.packed[0].values())).shape[2]) if layer.is_initialized else 0


def _others(layer: KVCalLayer, other: KVCalLayer) -> list[Packed]:
    """Return as many blocks as `layer` holds, of the other window; where that has fewer (token selection), its own in
    reverse.
    """
    count = _blocks(layer)
    if _blocks(other) >= count:
        return [
            {name: block_store.first_blocks(tensors, count) for name, tensors in packed.items()}
            for packed in other.packed
        ]
    order = torch.arange(count, device="cpu").flip(0)[None]
    return [
        {name: block_store.arrange(tensors, None, order.to(tensors.device)) for name, tensors in packed.items()}
        for packed in layer.packed
    ]
