"""The ring of blocks: a warp copies the codes and norms of its next blocks to shared memory, as `..ring` does; tiers
are pieces of their own, or a page's block lies in one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..ring import pages_of, ring_address


@triton.constexpr_function
def _width(size):
    """Return the bytes that a lane copies at a time."""
    return 16 if size % 16 == 0 else 8


@triton.constexpr_function
def _copies(pieces):
    """Return assembly that copies pieces (bytes, byte in a slot of the ring, whether blocks follow one another).
    Operands: shared address, lane, then for each piece its block's number, or bytes from the first block, and the
    lane's pointer.
    """
    text = ["{ .reg .b32 d; .reg .b64 a; .reg .pred q;"]
    for i in range(len(pieces)):
        size, at, strided = pieces[i]
        wide = _width(size)
        block, origin = f"${3 + 2 * i}", f"${4 + 2 * i}"
        move = f"mad.wide.s32 a, {block}, {size}, {origin};" if strided else f"add.s64 a, {block}, {origin};"
        text += [move, f"mad.lo.s32 d, $2, {wide}, $1;"]
        how = "cg" if wide == 16 else "ca"
        for first in range(0, size - 32 * wide + 1, 32 * wide):
            text += [f"cp.async.{how}.shared.global [d+{at + first}], [a+{first}], {wide};"]
        first, rest = size // (32 * wide) * 32 * wide, size % (32 * wide)
        if rest:
            text += [f"setp.lt.u32 q, $2, {rest // wide};"]
            text += [f"@q cp.async.{how}.shared.global [d+{at + first}], [a+{first}], {wide};"]
    return " ".join([*text, "cp.async.commit_group;", "mov.b32 $0, 0; }"])


@triton.constexpr_function
def _constraints(pieces):
    return "=r,r,r" + "".join(",r,l" if strided else ",l,l" for *_, strided in pieces)


@triton.constexpr_function
def _pieces(keys, values, paged):
    """Return the pieces of a block: each tier of keys, their norms, values likewise; of a page one."""
    if paged:
        return ((keys.slot + values.slot, 0, False),)
    pieces = [(*piece, True) for piece in keys.pieces] + [(64, keys.norm_at, True)]
    pieces += [(size, keys.slot + at, True) for size, at in values.pieces] + [(64, keys.slot + values.norm_at, True)]
    return tuple(pieces)


@triton.jit
def _side_origins(pointers, p_norm, i_head, i_batch, capacity, lane, SIDE: tl.constexpr):
    COUNT: tl.constexpr = len(SIDE.pieces)
    origins = ()
    for i in tl.static_range(COUNT):
        p = pointers[SIDE.places[i]] + i_head * capacity * SIDE.pieces[i][0]
        origins = origins + (p.to(tl.int64) + lane * _width(SIDE.pieces[i][0]),)
    return origins + ((p_norm + i_batch.to(tl.int64) * capacity * 32).to(tl.int64) + lane * 16,)


@triton.jit
def origins_of(
    key_pointers, p_kn, value_pointers, p_vn, i_head, i_batch, capacity, lane, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PAGED: tl.constexpr,
):
    """Return where each lane copies from in a head's first block, int64 [32 NW] for each piece. PAGED: i_head is where
    a head begins in a page, in bytes.
    """
    if PAGED:
        origins = ((key_pointers[0] + i_head).to(tl.int64) + lane * 16,)
    else:
        origins = _side_origins(key_pointers, p_kn, i_head, i_batch, capacity, lane, KEYS) + _side_origins(
            value_pointers, p_vn, i_head, i_batch, capacity, lane, VALUES
        )
    return origins


@triton.jit
def fetch_blocks(
    origins, pages, page_stride, first, last, slot, lane, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PAGED: tl.constexpr, NW: tl.constexpr,
):
    """Begin to copy the blocks from `first` on, one for each warp, none behind `last`, to a slot of the ring. PAGED:
    the blocks are in `pages` [32 NW], whatever first and last are.
    """
    PIECES: tl.constexpr = _pieces(KEYS, VALUES, PAGED)
    COUNT: tl.constexpr = len(PIECES)
    block = tl.minimum(first + tl.arange(0, 32 * NW) // 32, last)
    inputs = (slot, lane)
    if PAGED:
        inputs = inputs + (pages.to(tl.int64) * page_stride, origins[0])
    else:
        for i in tl.static_range(COUNT):
            inputs = inputs + (block, origins[i])
    tl.inline_asm_elementwise(_copies(PIECES), _constraints(PIECES), inputs, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def open_ring(
    origins, p_pages, page_stride, lane, zero, start, last, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SLOTS: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr,
):
    """Return where the ring lies; all of its slots except for one begin to fill. PAGED: p_pages names a row's pages."""
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    base = tl.inline_asm_elementwise(
        ring_address(SLOT * SLOTS * NW, True), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    for ahead in tl.static_range(SLOTS - 1):
        first = start + ahead * NW
        pages = pages_of(p_pages, first, last + 1, NW) if PAGED else p_pages
        fetch_blocks(origins, pages, page_stride, first, last, to + ahead * SLOT, lane, KEYS, VALUES, PAGED, NW)
    return base
