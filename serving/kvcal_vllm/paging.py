"""One layer's keys and values go into pages token by token, and come out of them block by block, in torch.

Letters: P blocks named by the call, H kv heads, T tokens, D head_dim, b = 32 tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import BLOCK, Form, TransformForm
from kvcal_kernels.layout.pages import PageForm, block_bytes, token_masks, views


class PagedSide:
    """The keys or the values of one layer: a codec, and where its blocks lie among a head's bytes."""

    def __init__(self, codec: Codec, at: int) -> None:
        form = codec.fused()
        assert not isinstance(form, str)  # `PagedLayer` refused it
        self.codec, self.form, self.at, self.size = codec, form, at, block_bytes(form)
        self._masks = token_masks(form).int()

    def write(self, heads: Tensor, x: Tensor, fresh: Tensor) -> None:
        """Pack the fresh tokens of x (P, H, b, D) into heads (P, H, S) uint8; all other bits stay.

        fresh: bool (P, b). Raises NonFiniteError where float16 cannot hold a norm or scale.
        """
        packed = self.codec.encode(x)
        new = torch.zeros(*heads.shape[:2], self.size, dtype=torch.uint8)
        for name, part in views(new, self.form).items():
            part.copy_(packed[name][:, :, 0])  # of one norm for all heads each head gets a copy
        mask = (fresh.int() @ self._masks).to(torch.uint8)[:, None]
        old = heads[:, :, self.at : self.at + self.size]
        old.copy_((old & ~mask) | (new & mask))

    def read(self, heads: Tensor) -> Tensor:
        """The numbers (P, H, b, D) float32 of heads (P, H, S) uint8."""
        block = heads[:, :, self.at : self.at + self.size].contiguous()
        specs = self.codec.tensor_specs()
        packed = {
            name: part[:, : specs[name][0][0]][:, :, None].contiguous()
            for name, part in views(block, self.form).items()
        }
        return self.codec.decode(packed)


class PagedLayer:
    """The codecs of one layer over pages (B, H, b, C) of vLLM: C bytes for each of the 32 tokens in each head.

    Raises UsageError, which says why, where pages cannot hold what a codec stores.
    """

    def __init__(self, codecs: LayerCodecs) -> None:
        key, value = (_form(codec) for codec in (codecs.key, codecs.value))
        try:
            self.form = PageForm(key, value)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.key, self.value = PagedSide(codecs.key, 0), PagedSide(codecs.value, self.form.value_at)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one head, keys and values: C."""
        return self.form.head_bytes // BLOCK

    def store(self, pages: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Pack tokens into pages (B, H, b, C) of one byte. slots: int64 (T,), page * 32 + place; key, value: (T, H, D).

        A slot below 0 is padding, whose token is not stored. Raises NonFiniteError as `PagedSide.write`.
        """
        stored = slots >= 0
        slots, key, value = slots[stored], key[stored], value[stored]
        written, number = torch.unique(slots // BLOCK, return_inverse=True)
        if not len(written):
            return
        place = slots % BLOCK
        fresh = torch.zeros(len(written), BLOCK, dtype=torch.bool)
        fresh[number, place] = True
        every = _heads(pages)
        heads = every[written]
        for side, tokens in ((self.key, key), (self.value, value)):
            x = torch.zeros(len(written), tokens.shape[1], BLOCK, tokens.shape[2])
            x[number, :, place] = tokens.float()
            side.write(heads, x, fresh)
        every[written] = heads

    def load(self, pages: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (P, H, b, D) float32 of the pages of these numbers, int64 (P,)."""
        heads = _heads(pages)[numbers]
        return self.key.read(heads), self.value.read(heads)


def _heads(pages: Tensor) -> Tensor:
    """Pages (B, H, b, C) as (B, H, S) uint8, in the same memory."""
    raw = pages.view(torch.uint8)
    return raw.view(*raw.shape[:2], -1)


def _form(codec: Codec) -> Form | TransformForm:
    form = codec.fused()
    if codec.shape.block != BLOCK:
        raise UsageError(f"blocks of {codec.shape.block} tokens: a page holds {BLOCK}")
    if isinstance(form, str):
        raise UsageError(form)
    return form
