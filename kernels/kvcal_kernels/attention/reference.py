"""Decode attention over packed blocks in plain PyTorch: what the kernels are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BLOCK, Blocks, Constants, PageForm, Rope, TransformBlocks, decode, read_pages
from ..layout.rope import recent_places


def attend(
    q: Tensor,
    keys: Blocks | TransformBlocks,
    values: Blocks | TransformBlocks,
    blocks: Tensor,
    sink: tuple[Tensor, Tensor, Tensor],
    recent: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    packed_q: Tensor | None = None,
    ring: bool = False,
    rope: Rope | None = None,
) -> Tensor:
    """Return the attention of the newest tokens over a row's sink, packed blocks and recent tokens: the first two
    wholly, the last up to the query itself. The newest tokens are the last of `recent`, or of sink and recent together
    where nothing is packed. packed_q: queries for the packed keys, where these are stored divided by a factor of their
    channel.

    q (B, Hq, Q, D), Hq a multiple of H, Q <= the recent tokens of each row with packed blocks. blocks (B,) int32: how
    many count. sink, recent: keys (B, H, capacity, D), values alike, and counts (B,) int32. -> (B, Hq, Q, D) of q's
    dtype; computed in float32. ring: token j of `recent` is in slot (32 * blocks + j) mod capacity, as quantise.append
    puts it. rope: the rotation of keys that are all stored before RoPE; queries are after it.
    """
    if ring:
        index = ring_slots(blocks, recent[0].shape[2])[:, None, :, None].expand_as(recent[0])
        recent = (recent[0].gather(2, index), recent[1].gather(2, index), recent[2])
    ratio, queries = q.shape[1] // keys.words.shape[1], q.shape[2]
    stored = [sink[0].float(), decode(keys), recent[0].float()]
    if rope is not None:
        stored = [rope.rotate(k, place) for k, place in zip(stored, _places(keys, blocks, sink, recent), strict=True)]
    pairs = zip((q, q if packed_q is None else packed_q, q), stored, strict=True)
    products = [
        queries_of_part.float() @ k.repeat_interleave(ratio, 1).transpose(-1, -2) for queries_of_part, k in pairs
    ]
    v = torch.cat([sink[1].float(), decode(values), recent[1].float()], 2).repeat_interleave(ratio, 1)
    behind = queries - 1 - torch.arange(queries, device=q.device)
    reach = recent[2][:, None] - behind
    visible = [
        _visible_slots(sink[0].shape[2], sink[2][:, None] + reach.clamp_max(0)),
        _visible_slots(keys.words.shape[2] * BLOCK, (blocks * BLOCK)[:, None].expand(-1, queries)),
        _visible_slots(recent[0].shape[2], reach),
    ]
    mask = torch.cat(visible, -1)[:, None]
    scores = (torch.cat(products, -1) * scaling).masked_fill(~mask, -torch.inf)
    read = mask.any(-2).squeeze(1)[:, None, :, None]  # unused capacity may hold anything
    return (scores.softmax(-1) @ v.masked_fill(~read, 0)).to(q.dtype)


def _places(
    keys: Blocks | TransformBlocks, blocks: Tensor, sink: tuple[Tensor, ...], recent: tuple[Tensor, ...]
) -> list[Tensor]:
    """Return where sink, packed and recent tokens are in a row's runs: (1 or B, T) each."""
    capacity, device = sink[0].shape[2], blocks.device
    packed = torch.arange(keys.words.shape[2] * BLOCK, device=device) + -(-capacity // BLOCK) * BLOCK
    runs = torch.arange(capacity, device=device)[None], packed[None]
    return [*runs, recent_places(sink[2], capacity, blocks, recent[0].shape[2])]


def ring_slots(blocks: Tensor, capacity: int) -> Tensor:
    """Return where token j of a row's recent window lies in a ring: blocks (B,), its packed ones -> (B, capacity)
    int64.
    """
    return (torch.arange(capacity, device=blocks.device) + blocks[:, None] * BLOCK) % capacity


def _visible_slots(capacity: int, limit: Tensor) -> Tensor:
    """Return which slots are below a limit: (B, Q) -> (B, Q, capacity) bool."""
    return torch.arange(capacity, device=limit.device) < limit[..., None]


def attend_pages(
    q: Tensor,
    pages: Tensor,
    form: PageForm,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scaling: float,
    keys: Constants = None,
    values: Constants = None,
) -> Tensor:
    """Return the attention of each row's newest tokens over all that its pages hold. The newest tokens are stored, too:
    each sees the tokens before it and itself, as pages decode to them.

    q (T, Hq, D), Hq a multiple of H: rows one behind the other, queries `starts[i]` to `starts[i + 1]` of row i; starts
    (B + 1,) int32. pages (P, H, form.head_bytes) uint8. table (B, n) int32: the pages of a row, in order; what lies
    behind its last page may be anything. lengths (B,) int32: tokens of a row. keys, values: what decodes them. ->
    (T, Hq, D) of q's dtype; computed in float32; zeros for queries that see no token.
    """
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        first, stop = int(starts[row]), int(starts[row + 1])
        if not length or first == stop:
            continue
        blocks = read_pages(pages, form, table[row : row + 1, : -(-length // BLOCK)], keys, values)
        k, v = (decode(b)[0, :, :length].repeat_interleave(q.shape[1] // pages.shape[1], 0) for b in blocks)
        behind = torch.arange(stop - first, 0, -1, device=q.device)[:, None]
        visible = torch.arange(length, device=q.device) <= length - behind
        scores = q[first:stop].float().transpose(0, 1) @ k.transpose(-1, -2) * scaling
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = scores.softmax(-1).nan_to_num()
        out[first:stop] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out
