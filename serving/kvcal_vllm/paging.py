"""One layer's keys and values go into pages token by token, and come out of them block by block, in torch.

Letters: P blocks named by the call, H kv heads, T tokens, D head_dim, b = 32 tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import BLOCK, AnyForm, PageForm, TransformBlocks, decode, read_pages, token_places
from kvcal_kernels.layout.pages import block_bytes, bytes_of


class PagedSide:
    """The keys or the values of one layer: a codec, and where its blocks lie among a head's bytes."""

    def __init__(self, codec: Codec, form: AnyForm, at: int) -> None:
        shape = codec.shape
        self.codec, self.bytes = codec, slice(at, at + block_bytes(form))
        blocks = codec.as_blocks(codec.encode(torch.zeros(1, shape.heads, BLOCK, shape.dim)))
        self.constants = blocks.basis if isinstance(blocks, TransformBlocks) else blocks.grid
        places = token_places(form)
        masks = torch.zeros(BLOCK, block_bytes(form), dtype=torch.int32)
        self._masks = masks.scatter_add_(1, places // 8, (1 << places % 8).int())  # bits of each token, which are apart

    def write(self, heads: Tensor, x: Tensor, fresh: Tensor) -> None:
        """Pack the fresh tokens of x (P, H, b, D) into heads (P, H, S) uint8; all other bits stay.

        fresh: bool (P, b). Raises NonFiniteError where float16 cannot hold a norm or scale.
        """
        new = bytes_of(self.codec.as_blocks(self.codec.encode(x)))[:, :, 0]
        mask = (fresh.int() @ self._masks).to(torch.uint8)[:, None]
        old = heads[:, :, self.bytes]
        old.copy_((old & ~mask) | (new & mask))


class PagedLayer:
    """The codecs of one layer over pages (B, H, b, C) of vLLM: C bytes for each of the 32 tokens in each head.

    multiple: what C must be a multiple of, the bytes of the dtype as which vLLM views its pages. Raises UsageError,
    which says why, where pages cannot hold what a codec stores.
    """

    def __init__(self, codecs: LayerCodecs, multiple: int = 1) -> None:
        key, value = (_form(codec) for codec in (codecs.key, codecs.value))
        try:
            self.form = PageForm(key, value)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.token_bytes = -(-self.form.token_bytes // multiple) * multiple  # C
        self.key = PagedSide(codecs.key, key, 0)
        self.value = PagedSide(codecs.value, value, self.form.value_at)

    @property
    def bits(self) -> float:
        """Bits of a page for each number that it stands for, copies of norms and padding included."""
        return 8 * self.token_bytes / (2 * self.form.keys.dim)

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
        every = self._heads(pages)
        heads = every[written]
        for side, tokens in ((self.key, key), (self.value, value)):
            x = torch.zeros(len(written), tokens.shape[1], BLOCK, tokens.shape[2])
            x[number, :, place] = tokens.float()
            side.write(heads, x, fresh)
        every[written] = heads

    def load(self, pages: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (P, H, b, D) float32 of the pages of these numbers, int64 (P,)."""
        blocks = read_pages(self._heads(pages), self.form, numbers[:, None], self.key.constants, self.value.constants)
        key, value = (decode(one) for one in blocks)
        return key, value

    def _heads(self, pages: Tensor) -> Tensor:
        """Pages (B, H, b, C) as (B, H, S) uint8, in the same memory, without what `multiple` adds."""
        raw = pages.view(torch.uint8)
        return raw.view(*raw.shape[:2], -1)[:, :, : self.form.head_bytes]


def _form(codec: Codec) -> AnyForm:
    form = codec.fused()
    if codec.shape.block != BLOCK:
        raise UsageError(f"blocks of {codec.shape.block} tokens: a page holds {BLOCK}")
    if isinstance(form, str):
        raise UsageError(form)
    return form
