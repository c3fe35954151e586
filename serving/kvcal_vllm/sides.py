"""The keys or the values of one layer as bytes of a page: three ways to lay out what a codec stores.

Letters: P blocks, H kv heads, D head_dim, b = 32 tokens of a block, S bytes of a block in one head.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Packed
from kvcal_artifacts.errors import UsageError
from kvcal_kernels.layout import BLOCK, AnyForm, Form, TransformBlocks, decode, token_places
from kvcal_kernels.layout.pages import block_bytes, bytes_of, from_bytes, unfit
from kvcal_kernels.packing import pack

ALIGNED = 16  # a head's keys and values begin at multiples of so many bytes


class Side(Protocol):
    """How blocks of one codec lie in a page. bytes: S. masks: which bits of a block belong to each token, uint8 (b, S);
    None where a number depends on its whole block, which is then stored when its last token has come.
    """

    bytes: int
    masks: Tensor | None

    def pack(self, x: Tensor) -> Tensor:
        """Blocks (P, H, b, D) as uint8 (P, H, S). Raises NonFiniteError where float16 cannot hold a norm or scale."""

    def unpack(self, raw: Tensor) -> Tensor:
        """What uint8 (P, H, S) decodes to: (P, H, b, D) float32."""


class FormSide:
    """Blocks as the attention kernels read them (kvcal_kernels.layout.pages), filled token by token."""

    masks: Tensor | None

    def __init__(self, codec: Codec, form: AnyForm) -> None:
        shape = codec.shape
        self.codec, self.form, self.bytes = codec, form, block_bytes(form)
        blocks = codec.as_blocks(
            codec.encode(torch.zeros(1, shape.heads, BLOCK, shape.dim, dtype=torch.float32, device="cpu"))
        )
        self.constants = blocks.basis if isinstance(blocks, TransformBlocks) else blocks.grid
        places = token_places(form)
        masks = torch.zeros(BLOCK, self.bytes, dtype=torch.int32, device="cpu")
        self.masks = masks.scatter_add_(1, places // 8, (1 << places % 8).int()).to(torch.uint8)  # bits lie apart

    def pack(self, x: Tensor) -> Tensor:
        return bytes_of(self.codec.as_blocks(self.codec.encode(x)))[:, :, 0]

    def unpack(self, raw: Tensor) -> Tensor:
        decoded, factor = decode(from_bytes(raw[:, :, None], self.form, self.constants)), self.codec.key_factor()
        return decoded if factor is None else decoded * factor


class BlockSide:
    """The packed tensors of whole blocks, one after the other in the codec's order. A tensor that all heads share is
    copied to each. The page of an unfinished block holds nothing.
    """

    masks: Tensor | None = None

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._parts = [
            (name, shape, dtype, math.prod(shape[1:]) * dtype.itemsize)
            for name, (shape, dtype) in codec.tensor_specs().items()
        ]
        self.bytes = -(-sum(size for *_, size in self._parts) // ALIGNED) * ALIGNED

    def pack(self, x: Tensor) -> Tensor:
        packed, raw = self.codec.encode(x), x.new_zeros(*x.shape[:2], self.bytes, dtype=torch.uint8)
        at = 0
        for name, _, _, size in self._parts:
            part = packed[name].contiguous().flatten(2).view(torch.uint8)
            raw[:, :, at : at + size] = part  # of every head, or of all
            at += size
        return raw

    def unpack(self, raw: Tensor) -> Tensor:
        packed: Packed = {}
        at = 0
        for name, shape, dtype, size in self._parts:
            part = raw[:, : shape[0], at : at + size].contiguous().view(dtype)
            packed[name] = part.view(len(raw), shape[0], 1, *shape[1:])
            at += size
        return self.codec.decode(packed)


class CodesSide(BlockSide):
    """Residual codes (VQKV), packed along a block's tokens: every token has separate bits."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        one, parts = torch.eye(BLOCK, dtype=torch.int32, device="cpu"), []
        for book in codec.codebooks:
            bits = (book.shape[1] - 1).bit_length()
            parts.append(pack(one * ((1 << bits) - 1), bits).repeat(1, book.shape[0]))
        masks = torch.cat(parts, 1)
        self.masks = torch.nn.functional.pad(masks, (0, self.bytes - masks.shape[1]))


def side_of(codec: Codec) -> Side:
    """The layout for a codec. Raises UsageError, which says why, where pages cannot hold what it stores."""
    if codec.shape.block != BLOCK:
        raise UsageError(f"blocks of {codec.shape.block} tokens: a page holds {BLOCK}")
    form = codec.fused()
    if isinstance(form, Form) and form.norm_heads > 1:
        raise UsageError(str(unfit(form)))
    if codec.codebooks:
        return CodesSide(codec)
    return BlockSide(codec) if isinstance(form, str) or unfit(form) else FormSide(codec, form)
