"""One layer's keys and values go into pages as their tokens come, and come out of them block by block, in torch.

A number that depends on a whole block (a scale of 32 tokens) is stored when the block's last token has come. Until then
the block's exact keys and values wait in a tail (see `tails`).

Letters: P blocks named by the call, H kv heads, T tokens, D head_dim, b = 32 tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import BLOCK, PageForm

from .sides import FormSide, Side, side_of
from .tails import LayerTails


class PagedLayer:
    """The codecs of one layer over pages (B, H, b, C) of vLLM: C bytes for each of the 32 tokens in each head.

    tailed: whether unfinished blocks wait in tails. multiple: what C must be a multiple of, the bytes of the dtype as
    which vLLM views its pages. Raises UsageError, which says why, where pages cannot hold what a codec stores.
    """

    def __init__(self, codecs: LayerCodecs, multiple: int = 1) -> None:
        self.key, self.value = side_of(codecs.key), side_of(codecs.value)
        if isinstance(self.key, FormSide) and isinstance(self.value, FormSide):
            try:
                PageForm(self.key.form, self.value.form)  # what kernels read
            except ValueError as error:
                raise UsageError(str(error)) from error
        self.shape = codecs.key.shape
        self.tailed = self.key.masks is None or self.value.masks is None
        token_bytes = -(-(self.key.bytes + self.value.bytes) // BLOCK)
        self.token_bytes = -(-token_bytes // multiple) * multiple  # C

    @property
    def bits(self) -> float:
        """Bits of a page for each number that it stands for, copies of norms and padding included."""
        return 8 * self.token_bytes / (2 * self.shape.dim)

    def store(self, pages: Tensor, slots: Tensor, key: Tensor, value: Tensor, tails: LayerTails | None = None) -> None:
        """Pack tokens into pages (B, H, b, C) of one byte. slots: int64 (T,), page * 32 + place; key, value: (T, H, D).

        A slot below 0 is padding, whose token is not stored. tails: of this layer, needed where it is `tailed`. Raises
        NonFiniteError as `Side.pack`.
        """
        stored = slots >= 0
        slots, key, value = slots[stored], key[stored], value[stored]
        written, number = torch.unique(slots // BLOCK, return_inverse=True)
        if not len(written):
            return
        fresh = torch.zeros(len(written), BLOCK, dtype=torch.bool, device="cpu")
        fresh[number, slots % BLOCK] = True
        blocks = [
            torch.zeros(len(written), *x.shape[1:2], BLOCK, x.shape[2], dtype=x.dtype, device="cpu")
            for x in (key, value)
        ]
        for block, tokens in zip(blocks, (key, value), strict=True):
            block[number, :, slots % BLOCK] = tokens
        if self.tailed:
            assert tails is not None
            tails.join(written, fresh, blocks)
            done = fresh[:, -1]  # their last token has come
            written, fresh, blocks = written[done], fresh[done], [x[done] for x in blocks]
        raw = self._raw(pages)
        heads = raw[written]
        for side, part, x in zip((self.key, self.value), self._cut(heads), blocks, strict=True):
            _write(side, part, x.float(), fresh, whole=self.tailed)
        raw[written] = heads

    def load(self, pages: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (P, H, b, D) float32 of the pages of these numbers, int64 (P,)."""
        key, value = self._cut(self._raw(pages)[numbers])
        return self.key.unpack(key), self.value.unpack(value)

    def _raw(self, pages: Tensor) -> Tensor:
        """Pages (B, H, b, C) as (B, H, bytes) uint8, in the same memory."""
        raw = pages.view(torch.uint8)
        return raw.view(*raw.shape[:2], -1)

    def _cut(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes (P, H, S) of keys and of values, in the same memory, without what fills the page."""
        end = self.key.bytes + self.value.bytes
        return heads[..., : self.key.bytes], heads[..., self.key.bytes : end]


def _write(side: Side, old: Tensor, x: Tensor, fresh: Tensor, whole: bool) -> None:
    """Pack the fresh tokens, bool (P, b), of x (P, H, b, D) into old (P, H, S) uint8; all other bits stay. whole: all
    of the block is written.
    """
    if not len(x):
        return
    new = side.pack(x)
    if whole:
        old.copy_(new)
        return
    assert side.masks is not None
    mask = (fresh.int() @ side.masks.int()).to(torch.uint8)[:, None]  # bits of tokens lie apart: sums are unions
    old.copy_((old & ~mask) | (new & mask))
