"""How kernels pack what a layer stores: rules for whole blocks and for the tokens of steps, or why torch packs."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.layout import Blocks
from kvcal_kernels.quantise import AnyRule

from ..codecs import Codec
from ..scheme import LayerCodecs
from .notices import warn
from .preflight import verdicts

Rules: TypeAlias = tuple[AnyRule, AnyRule] | str  # how a kernel writes keys and values, or why none does


class PackingRules(NamedTuple):
    """How a layer's tokens are packed. blocks: whole ones, those of prompts above all; steps: in static storage."""

    blocks: Rules = ""
    steps: Rules = ""

    def __deepcopy__(self, memo: dict[int, object]) -> PackingRules:
        return self  # holds nothing of a cache

    def describe(self, pair: LayerCodecs) -> str:
        """One line for describe(): what packs whole blocks, those of prompts above all."""
        codecs = (("keys", pair.key), ("values", pair.value))
        roles = [role for role, codec in codecs if codec.encodes_by_kernel]
        kernels = f"Triton kernels of the codecs of {' and '.join(roles)}" if roles else ""
        if len(roles) == 2:
            return kernels
        if isinstance(self.blocks, str):
            return f"{kernels}, else torch: {self.blocks}" if roles else f"torch: {self.blocks}"
        if not pair.key.corrected_channels:
            return "the Triton kernel"  # also where one codec encodes by its kernel
        return f"{kernels or 'corrections of keys by torch'}, else the Triton kernel"

    def appending(self, kernels: str, vector: bool) -> str:
        """One line for describe(): what appends the tokens of steps to storage that is allocated once.

        vector: whether they become vector codes.
        """
        if vector:
            triton = "the Triton kernels, which search codewords where a block is due"
            return triton if kernels != "torch" else "torch: kernels='torch'"
        return f"torch: {self.steps}" if isinstance(self.steps, str) else "the Triton kernel"


def packing_rules(
    kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device, unpacked: str | None, static: bool
) -> PackingRules:
    """The rules of a layer's codecs. unpacked: why no kernel may pack, or None. static: of its storage."""
    if unpacked is not None:
        return PackingRules(unpacked, unpacked)
    blocks = block_rules(kernels, pair, dtype, device)
    return PackingRules(blocks, rules(kernels, pair, dtype, device) if static else blocks)


def rule_of(codec: Codec) -> AnyRule | str:
    """How the kernel writes what the codec stores, or why it cannot."""
    return codec.rule()


def rules(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> Rules:
    """How the append kernel packs keys and values of steps, those of SQuat once they are corrected.

    It is the reason why torch packs them where no kernel can, or none passes its check.
    """
    both = _rules(kernels, pair.key.rounding, pair.value)
    if isinstance(both, str) or verdicts.interpreted():
        return both
    if why := verdicts.append_verdict(*both, dtype, device, pair.key.corrected_channels):
        warn(f"append kernel: {why}", "what decode steps pack is packed by torch instead, slowly", why)
        return f"the append kernel does not pass: {why}"
    return both


def block_rules(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> Rules:
    """How the quantise kernel packs whole blocks: a prompt's, or those that steps push out of a window that grows.

    Keys are packed as their codec's `before_rounding` leaves them. As for `rules`, it may be the reason why torch
    packs.
    """
    both = _rules(kernels, pair.key.rounding, pair.value)
    if isinstance(both, str) or verdicts.interpreted():
        return both
    dtypes = torch.float32 if pair.key.corrected_channels else dtype, dtype
    if why := verdicts.quantise_verdict(*both, dtypes, pair.key.divided, device):
        warn(f"quantise kernel: {why}", "blocks are packed by torch instead, slowly", why)
        return f"the quantise kernel does not pass: {why}"
    return both


def _rules(kernels: str, key: Codec, value: Codec) -> Rules:
    if kernels == "torch":
        return "kernels='torch'"
    roundings = [rule_of(codec) for codec in (key, value)]
    for rounding, role in zip(roundings, ("keys", "values"), strict=True):
        if isinstance(rounding, str):
            return f"{role}: {rounding}"
    rule, other = (rounding for rounding in roundings if not isinstance(rounding, str))
    return rule, other


def packing(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> LayerCodecs:
    """The codecs, encoding by kernels where these run and give torch's bytes. On a GPU that is tried once."""
    anywhere = kernels == "triton" and verdicts.interpreted()
    if kernels in ("off", "torch") or not (anywhere or verdicts.unsupported(device) is None):
        return pair
    codecs = []
    for codec in (pair.key, pair.value):
        encoder = codec.by_kernel()
        if encoder is not codec and not anywhere and (why := verdicts.encode_verdict(codec, dtype, device)):
            warn(f"encoding kernel: {why}", "blocks are packed by torch instead, slowly", why)
            encoder = codec
        codecs.append(encoder)
    return LayerCodecs(*codecs)


def quantise_by(
    rules: tuple[AnyRule, AnyRule], x: list[Tensor], factor: Tensor | None
) -> tuple[tuple[Blocks, Blocks], Tensor]:
    """Keys and values (B, H, T, D) of whole blocks, packed in one launch, and flags for quantise.check."""
    keys, values, flags = quantise.fast().quantise(*x, *rules, None if factor is None else factor.contiguous())
    return (keys, values), flags


def refused_by(flags: Tensor, layer: int) -> str:
    """The error that flags of quantise.check say."""
    return f"{quantise.check(flags, layer)}; only finite values can be compressed: check the model's dtype and weights"
