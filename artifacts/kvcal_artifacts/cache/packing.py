"""Blocks that leave the window become packed ones: by the codecs, or by a kernel for keys and values in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvcal_kernels.quantise import AnyRule

from ..codecs import Context
from ..codecs.base import Packed, check_finite, collecting
from ..errors import NonFiniteError
from ..paths import fused

if TYPE_CHECKING:
    from .layer import KVCalLayer


def encode_by(
    layer: KVCalLayer, rules: tuple[AnyRule, AnyRule] | str, leaving: list[Tensor], stats: dict[str, Tensor]
) -> list[Packed]:
    """As `encode`, of a layer that is neither predicted nor predicts, in one launch where there are rules; in two where
    keys are corrected first.
    """
    if isinstance(rules, str):
        return encode(layer, leaving, stats)
    context, block = Context(layer.index, stats=stats), layer.cache.scheme.windows.block
    keys, values = (x.to(layer.dtype) for x in leaving)
    with collecting(layer.cache.record.refusals, layer.index):
        keys, factor = layer.codecs.key.before_rounding(keys, context), layer.codecs.key.key_factor(context)
    blocks, flags = fused.quantise_by(rules, [keys, values], factor)
    layer.cache.record.refusals.note(
        layer.index, ~flags.any(), lambda: NonFiniteError(fused.refused_by(flags, layer.index))
    )
    packed = [codec.from_blocks(x, leaving[0].shape[2] // block) for codec, x in zip(layer.pair, blocks, strict=True)]
    layer.cache.forward.chain.leave("new", layer.index, None, None)
    if layer.cache.watch is not None:
        layer.cache.watch.packed(layer.index, leaving, list(layer.decode(packed, Context(layer.index))))
    return packed


def encode(layer: KVCalLayer, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
    """Keys and values (B, H, F * b, D) -> their packed blocks; reconstructions are left for the layers above.

    What cannot be packed is told when all layers are done, by `Record.check_packed`.
    """
    with collecting(layer.cache.record.refusals, layer.index):
        return _encode_both(layer, leaving, stats)


def _encode_both(layer: KVCalLayer, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
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
    if layer.cache.watch is not None:
        layer.cache.watch.packed(layer.index, leaving, list(layer.decode(blocks, replace(context))))
    return blocks
