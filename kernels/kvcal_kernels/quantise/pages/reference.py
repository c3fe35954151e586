"""New tokens coded and stored in pages, in plain PyTorch: what the kernel is held to.

Each token is coded by itself, so that its bytes depend neither on the tokens that come with it nor on where a prompt is
cut into chunks. Letters: T tokens, H kv heads, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...hadamard import root, tree_sum
from ...higgs import Rotated
from ...layout import BLOCK, AnyBlocks, Basis, PageForm, TransformBlocks, TransformForm, check_pages, move_tokens
from ...transform.reference import encode
from ..reference import GridRule, Rule, quantise

HALF_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class TransformRule:
    """How numbers become coordinates of the transform codec. encoder (H, D, coded) float32: columns of coded
    coordinates; mean (H, D) float16; points: by bits float32 (n, 2). ValueError where shapes do not fit.
    """

    form: TransformForm
    encoder: Tensor
    mean: Tensor
    points: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        heads, shape = len(self.encoder), tuple(self.encoder.shape)
        if shape[1:] != (self.form.dim, self.form.coded) or self.mean.shape != (heads, self.form.dim):
            raise ValueError(
                f"encoder {shape}, mean {tuple(self.mean.shape)} for {self.form}: must be "
                f"(H, {self.form.dim}, {self.form.coded}) and (H, {self.form.dim})"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> TransformRule:
        """Return the rule itself: copies of a cache read the same constants."""
        return self

    @functools.cached_property
    def hows(self) -> dict[int, Rotated]:
        """The searches for the nearest point, by bits."""
        return {bits: Rotated(self.points[bits], self.encoder.new_zeros(1)) for bits, _ in self.form.tiers if bits > 1}

    @functools.cached_property
    def columns(self) -> Tensor:
        """The encoder with zeros behind its columns, (H, D, a multiple of 16): rows begin where 64 bytes do."""
        return torch.nn.functional.pad(self.encoder, (0, -self.form.coded % 16))

    @functools.cached_property
    def table(self) -> Tensor:
        """The numbers that the kernel reads, float32: `columns`, mean, `Rotated.table` of 4, 3 and 2 bits. It is made
        once, as a CUDA graph must find it where it was.
        """
        parts = [self.columns.flatten(), self.mean.float().flatten()]
        return torch.cat([*parts, *(self.hows[bits].table for bits in (4, 3, 2) if bits in self.hows)]).contiguous()


StoreRule: TypeAlias = Rule | GridRule | TransformRule


def store(
    k: Tensor, v: Tensor, pages: Tensor, form: PageForm, slots: Tensor, keys: StoreRule, values: StoreRule
) -> None:
    """Pack tokens k, v (T, H, D), keys after RoPE, and store them in slots of pages (P, H, form.head_bytes).

    slots (T,) int64: 32 * page + place in the page, each slot once; negative where a token is stored nowhere. Bits of
    other tokens stay as they are. keys, values: how numbers become codes of the page form's formats. ValueError where
    they are of another form. Numbers that are not finite are stored as they come.
    """
    check_store(k, v, pages, form, slots, keys, values)
    move_tokens(pages, form, _blocks(k, keys), _blocks(v, values), slots)


def check_store(
    k: Tensor, v: Tensor, pages: Tensor, form: PageForm, slots: Tensor, keys: StoreRule, values: StoreRule
) -> None:
    """Raise ValueError unless `store` can take these arguments."""
    check_pages(pages, form)
    if (keys.form, values.form) != (form.keys, form.values):
        raise ValueError(f"rules of {keys.form} and {values.form} for pages of {form.keys} and {form.values}")
    shape = (len(slots), pages.shape[1], form.keys.dim)
    for name, x in (("keys", k), ("values", v)):
        if x.shape != shape or x.stride()[1:] != (shape[2], 1):
            raise ValueError(
                f"{name} {tuple(x.shape)}, strides {x.stride()}: must be {shape}, heads of a token one behind the other"
            )
    if slots.dtype != torch.int64 or slots.ndim != 1 or not slots.is_contiguous():
        raise ValueError(f"slots {tuple(slots.shape)} {slots.dtype}: must be (T,) torch.int64, contiguous")
    for name, x in (("values", v), ("pages", pages), ("slots", slots)):
        if x.device != k.device:
            raise ValueError(f"{name} on {x.device}, keys on {k.device}: must be on one device")


def _blocks(x: Tensor, rule: StoreRule) -> AnyBlocks:
    """Return tokens (T, H, D) as packed blocks of one row, zeros behind the last."""
    whole = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, -len(x) % BLOCK))[None]
    if not isinstance(rule, TransformRule):
        return quantise(whole.contiguous(), rule)[0]
    form = rule.form
    blocks = whole.float().unflatten(2, (-1, BLOCK)) - rule.mean.float()[:, None, None]
    y = blocks @ rule.encoder[:, None]
    norm = root(tree_sum((y * y).movedim(1, 3).flatten(3)) / (y.shape[1] * form.coded)).clamp_max(HALF_MAX).half()
    codes = encode(y, norm, form, rule.points)
    basis = Basis(rule.encoder, rule.mean, dict(rule.points), {})  # never decoded by
    return TransformBlocks(form, codes, norm[:, None], basis)
