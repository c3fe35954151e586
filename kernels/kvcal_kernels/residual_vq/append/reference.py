"""`append` of residual vector codes in plain PyTorch, in operations of fixed shape: every step searches for a block of
tokens, and stores the codes in rows where one is due. Letters: docs/interfaces.md; bands: residual_vq/attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import BLOCK
from ...packing import pack
from ...quantise.reference import NO_SLOT, NONFINITE, VALUES, Counts, keep
from ..attention import Coded

LARGEST = 65504.0  # of float16: no sum of a few codewords reaches what is far beyond
Pair = tuple[Tensor, Tensor]


def append(
    keys: Coded, values: Coded, sink: Pair, ring: Pair, counts: Counts, flags: Tensor, k: Tensor, v: Tensor
) -> None:
    """Carry out in one layer what quantise.advance counted, as quantise.append does: a call brings at most one block.
    Codes are those of nearest.residual_codes, except where two codewords are equally near in float64.

    keys, values: of N blocks, a multiple of 32 tokens each, in place. sink, ring: keys and values (B, H, capacity, D).
    flags (H,) int32. k, v (B, H, Q, D) of the ring's dtype, a row's real tokens last.
    """
    keep(sink, ring, counts, (k, v))
    for coded, recent, shift in ((keys, ring[0], 0), (values, ring[1], VALUES)):
        each = coded.block // BLOCK
        due, slot = counts.blocks > counts.blocks_before, counts.blocks_before.long() // each
        at = (slot[:, None] * coded.block + torch.arange(coded.block, device=recent.device)) % recent.shape[2]
        x = recent.gather(2, at[:, None, :, None].expand(-1, recent.shape[1], -1, recent.shape[3])).float()
        if coded.scale is not None:
            x = x / coded.scale.float()[:, None]
        fits = x.abs() <= LARGEST  # not where x is NaN
        last = coded.bands[0].codes.shape[2] - 1
        bad = (~fits).flatten(2).any(2) * NONFINITE + (slot > last)[:, None] * NO_SLOT
        flags.bitwise_or_(torch.where(due[:, None], bad, 0).int().amax(0) << shift)  # one bit or the other
        x, keeps = x.masked_fill(~fits, 0), (due & (slot <= last))[:, None, None, None, None]
        for band in coded.bands:
            packed = pack(_codes(x[..., band.dims], band.books).movedim(0, -2), band.bits)[:, :, None]
            index = slot.clamp_max(last)[:, None, None, None, None].expand_as(packed)
            band.codes.scatter_(2, index, torch.where(keeps, packed, band.codes.gather(2, index)))


def _codes(x: Tensor, books: Tensor) -> Tensor:
    """Return greedy residual codes of x (..., d) float32 -> int32 (S, ...), with no value read on the host."""
    codes = []
    for book in books.float():
        wide = book.double()
        code = (0.5 * wide.square().sum(-1) - x.double() @ wide.T).argmin(-1)
        codes.append(code.int())
        x = x - book[code]
    return torch.stack(codes)
