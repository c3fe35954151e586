"""Blocks that leave the window are packed: by the codecs, or by a kernel for keys and values in one launch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..codecs import Context
from ..codecs.base import Packed
from ..codecs.refusals import check_finite, collecting
from ..errors import NonFiniteError
from ..paths import packing_rules
from ..paths.packing_rules import Rules
from .protocols import LayerProtocol


def encode_by(layer: LayerProtocol, rules: Rules, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
    """Encode a layer that is neither predicted nor predicts, in one launch where there are rules.

    It is two launches where keys are corrected first.
    """
    if isinstance(rules, str):
        return encode(layer, leaving, stats)
    context, block = Context(layer.index, stats=stats), layer.cache.scheme.windows.block
    keys, values = (x.to(layer.dtype) for x in leaving)
    with collecting(layer.cache.record.refusals, layer.index):
        keys, factor = layer.codecs.key.before_rounding(keys, context), layer.codecs.key.key_factor(context)
    blocks, flags = packing_rules.quantise_by(rules, [keys, values], factor)
    layer.cache.record.refusals.note(
        layer.index, ~flags.any(), lambda: NonFiniteError(packing_rules.refused_by(flags, layer.index))
    )
    packed = [codec.from_blocks(x, leaving[0].shape[2] // block) for codec, x in zip(layer.pair, blocks, strict=True)]
    layer.cache.forward.chain.leave("new", layer.index, None, None)
    _tell_watch(layer, leaving, packed, Context(layer.index))
    return packed


def _tell_watch(layer: LayerProtocol, leaving: list[Tensor], packed: list[Packed], context: Context) -> None:
    cache = layer.cache
    if cache.watch is not None:
        decoded = layer.decode(packed, context)
        cache.watch.packed(layer.index, *([cache.of_all_heads(x) for x in pair] for pair in (leaving, decoded)))


def encode(layer: LayerProtocol, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
    """Packed blocks of keys and values (B, H, F * b, D); what they decode to is left for the layers above.

    What cannot be packed is raised when all layers are done, by `Record.check_packed`.
    """
    with collecting(layer.cache.record.refusals, layer.index):
        return _encode_both(layer, leaving, stats)


def _encode_both(layer: LayerProtocol, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
    context, chained = layer.cache.forward.chain.context("new", layer.index, layer.device), layer.cache.scheme.chained
    context.stats = stats
    blocks: list[Packed] = [{}, {}]
    decoded: list[Tensor | None] = [None, None]
    for role, (codec, x) in enumerate(zip(layer.pair, leaving, strict=True)):
        x = check_finite(x, layer.index, codec.role)
        if chained:
            blocks[role], decoded[role] = codec.encode_decode(x, context)
        else:
            blocks[role] = codec.encode(x, context)
        if role == 0:
            context.k0 = decoded[0]
    layer.cache.forward.chain.leave("new", layer.index, *decoded)
    _tell_watch(layer, leaving, blocks, replace(context))
    return blocks
