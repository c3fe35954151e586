"""Pages: which bits are a token's, and that tokens and blocks come out of pages as they went in."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_kernels.attention import reference
from kvcal_kernels.layout import (
    Form,
    PageForm,
    TransformForm,
    check_pages,
    decode,
    move_blocks,
    move_tokens,
    read_pages,
    token_places,
)
from kvcal_kernels.layout.form import BITS, BYTE_DIMS, DIMS
from kvcal_kernels.layout.grids import GRIDS, IN_BYTES
from kvcal_kernels.layout.pages import block_bytes, bytes_of, from_bytes
from tests.support.cases.transform_cases import codec_of, normal

ROLES: tuple[Any, ...] = ("key", "value")
FORMS: list[Any] = [
    *(Form(role, dim, bits, vector=vector) for role, dim, (bits, vector) in product(ROLES, DIMS, GRIDS)),
    *(
        Form(role, dim, bits, vector=vector, in_bytes=True)
        for role, dim, (bits, vector) in product(ROLES, BYTE_DIMS, IN_BYTES)
    ),
    *(Form("key", dim, bits, 32, True, zero) for dim, bits, zero in product(DIMS, BITS, (True, False))),
    *(Form("value", dim, bits, 32, False, False) for dim, bits in product(DIMS, BITS)),
    *(TransformForm(role, 64, pairs) for role in ROLES for pairs in ((3, 5, 9, 6), (0, 0, 0, 1))),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_bit_is_of_one_token(form: Any) -> None:
    places = token_places(form)
    assert len(places) == 32 and len(places.unique()) == places.numel()
    assert int(places.min()) >= 0 and int(places.max()) < 8 * block_bytes(form)


def pages_of(keys: tuple[int, ...] = (3, 5, 9, 6), values: tuple[int, ...] = (0, 0, 20, 3), seed: int = 0) -> Any:
    """A page form, blocks of one row of 3 heads with 3 blocks, and their bases."""
    blocks = []
    for role, pairs in (("key", keys), ("value", values)):
        codec = codec_of(role, pairs, 64, 3)  # type: ignore[arg-type]
        blocks.append(codec.as_blocks(codec.encode(normal(1, 3, 96, 64, seed=seed + len(role)))))
    return PageForm(blocks[0].form, blocks[1].form), *blocks, blocks[0].basis, blocks[1].basis


def integers(seed: int = 0) -> Any:
    """The same of keys in symmetric groups of channels and values in outer ones."""
    from tests.support.cases.attention_cases import random_blocks

    g = torch.Generator().manual_seed(seed)
    forms = Form("key", 64, 3, 32), Form("value", 64, 2, 32, False, False)
    return PageForm(*forms), *(random_blocks(form, 1, 3, 3, (3,), g) for form in forms), None, None


def grids(seed: int = 0) -> Any:
    from tests.support.cases.attention_cases import random_blocks

    g = torch.Generator().manual_seed(seed)
    forms = Form("key", 64, 4, vector=1), Form("value", 64, 3, vector=2)
    keys, values = (random_blocks(form, 1, 3, 3, (3,), g) for form in forms)
    return PageForm(*forms), keys, values, keys.grid, values.grid


KINDS = [pages_of, integers, grids]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_back_from_pages_in_any_order(kind: Any) -> None:
    form, keys, values, *constants = kind()
    pages = form.empty(7, 3)
    table = torch.tensor([[5, 0, 3]], dtype=torch.int32)
    move_blocks(pages, form, keys, values, table)
    for stored, blocks in zip(read_pages(pages, form, table, *constants), (keys, values), strict=True):
        assert torch.equal(bytes_of(stored), bytes_of(blocks))
        assert torch.equal(decode(stored), decode(blocks))
    assert not pages[[1, 2, 4, 6]].any()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_by_one_fill_pages_as_blocks_do(kind: Any) -> None:
    """In any order, several of a page at once, in pages full of other bits, over tokens that were there before."""
    form, keys, values, *_ = kind()
    table = torch.tensor([[2, 0, 4]])
    whole = form.empty(5, 3)
    move_blocks(whole, form, keys, values, table)
    pages = torch.randint(0, 256, whole.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    # bits that are of no token
    mine = {at: token_places(f).flatten() + 8 * at for at, f in ((0, form.keys), (form.value_at, form.values))}
    used = torch.zeros(8 * form.head_bytes, dtype=torch.bool)
    used[torch.cat([*mine.values()])] = True
    mask = (used.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)
    slots = (table.repeat_interleave(32, 1) * 32 + torch.arange(96) % 32).flatten()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2))
    first = pages.clone()
    for part in order.split([1, 40, 55]):
        some = torch.full_like(slots, -1)
        some[part] = slots[part]
        move_tokens(pages, form, keys, values, some)
    assert torch.equal(pages[[2, 0, 4]] & mask, whole[[2, 0, 4]] & mask)
    assert torch.equal(pages[[1, 3]], first[[1, 3]])


def test_a_token_leaves_the_others_of_its_block_alone() -> None:
    form, keys, values, *constants = pages_of()
    pages, table = form.empty(1, 3), torch.tensor([[0]])
    one = [from_bytes(bytes_of(b)[:, :, :1], b.form, b.basis) for b in (keys, values)]
    move_blocks(pages, form, one[0], one[1], table)
    before = [decode(b) for b in read_pages(pages, form, table, *constants)]
    slots = torch.full((96,), -1)
    slots[95] = 7
    move_tokens(pages, form, keys, values, slots)
    for new, old, blocks in zip(read_pages(pages, form, table, *constants), before, (keys, values), strict=True):
        changed = decode(new)
        assert torch.equal(changed[:, :, 7], decode(blocks)[:, :, 95])
        others = [token for token in range(32) if token != 7]
        assert torch.equal(changed[:, :, others], old[:, :, others])


@pytest.mark.parametrize(
    ("keys", "values", "says"),
    [
        (Form("key", 64, 2, 32, False, False), Form("value", 64, 2, 32, False, False), "its groups are of tokens"),
        (Form("key", 64, 4), Form("value", 64, 4), "its groups are of tokens"),
        (Form("key", 64, 4, vector=1), Form("value", 64, 4, vector=1, norm_heads=2), "its norms span 2 heads"),
        (Form("key", 64, 2, 32, False, False, full=16), Form("value", 64, 2, 32, False, False), "its channels are"),
        (TransformForm("key", 64, (8, 0, 0, 0)), Form("value", 64, 4, vector=1), "both or neither must be of the"),
        (Form("key", 64, 4), Form("key", 64, 4), "must be keys and values of one head_dim"),
    ],
)
def test_formats_that_do_not_fit_pages_say_why(keys: Any, values: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        PageForm(keys, values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[..., :-1], "must be (P, H, "),
        (lambda x: x.view(torch.int8), "torch.int8: must be (P, H, "),
        (lambda x: torch.nn.functional.pad(x, (0, 8))[..., :-8], "others multiples of 16"),
        (lambda x: torch.nn.functional.pad(x, (8, 8))[..., 8:-8], "must begin at a multiple of 16"),
    ],
)
def test_other_tensors_are_no_pages(change: Any, says: str) -> None:
    form = pages_of()[0]
    pages: Tensor = change(form.empty(2, 3))
    with pytest.raises(ValueError, match=re.escape(says)):
        check_pages(pages, form)


def test_a_page_counts_whole_bytes_of_a_token() -> None:
    form = PageForm(TransformForm("key", 128, (8, 14, 20, 14)), TransformForm("value", 128, (8, 14, 20, 14)))
    assert (form.head_bytes, form.token_bytes) == (2 * (256 + 336 + 320 + 112 + 64), 68)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_pages_is_that_over_blocks(kind: Any) -> None:
    """Queries of 1, 0 and 5 tokens, rows that share a page, lengths that end within a page."""
    form, keys, values, *constants = kind()
    pages, table = form.empty(6, 3), torch.tensor([[5, 0, 3], [5, 1, 2], [5, 0, -9]], dtype=torch.int32)
    move_blocks(pages, form, keys, values, table[:1])
    move_blocks(pages, form, keys, values, torch.tensor([[5, 1, 2]]))
    lengths, starts = torch.tensor([70, 96, 33], dtype=torch.int32), torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    q = normal(6, 6, 64, seed=5)
    out = reference.attend_pages(q, pages, form, table, lengths, starts, 0.125, *constants)
    k, v = (decode(b)[0].repeat_interleave(2, 0) for b in (keys, values))
    for query, length in enumerate([70, 29, 30, 31, 32, 33]):
        weights = torch.einsum("hd,htd->ht", q[query], k[:, :length] * 0.125).softmax(-1)
        expected = torch.einsum("ht,htd->hd", weights, v[:, :length])
        assert torch.allclose(out[query], expected, atol=1e-5)


def test_attention_over_pages_is_that_over_windows_and_blocks() -> None:
    form, keys, values, *constants = pages_of()
    pages, table = form.empty(4, 3), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    move_blocks(pages, form, keys, values, table)
    q = normal(1, 6, 1, 64, seed=5)
    none = torch.zeros(1, 3, 1, 64), torch.zeros(1, 3, 1, 64), torch.zeros(1, dtype=torch.int32)
    blocks = torch.tensor([2], dtype=torch.int32)
    expected = reference.attend(q, keys, values, blocks, none, none, 0.125)
    lengths, starts = 32 * blocks, torch.tensor([0, 1], dtype=torch.int32)
    out = reference.attend_pages(q[:, :, 0], pages, form, table, lengths, starts, 0.125, *constants)
    assert torch.allclose(out, expected[:, :, 0], atol=1e-5)
