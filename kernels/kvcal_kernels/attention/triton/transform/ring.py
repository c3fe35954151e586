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
def _page_copies(size):
    """Return assembly that copies a page's bytes. Operands: shared address, lane, the page's bytes from the first one
    on, and the lane's pointer.
    """
    text = ["{ .reg .b32 d; .reg .b64 a; .reg .pred q;"]
    text += ["add.s64 a, $3, $4;", "mad.lo.s32 d, $2, 16, $1;"]
    for first in range(0, size - 512 + 1, 512):
        text += [f"cp.async.cg.shared.global [d+{first}], [a+{first}], 16;"]
    first, rest = size // 512 * 512, size % 512
    if rest:
        text += [f"setp.lt.u32 q, $2, {rest // 16};", f"@q cp.async.cg.shared.global [d+{first}], [a+{first}], 16;"]
    return " ".join([*text, "cp.async.commit_group;", "mov.b32 $0, 0; }"])


@triton.constexpr_function
def _pieces(keys, values):
    """Return the pieces of a block, bytes and first byte in a slot: each tier of keys, their norms, values likewise."""
    pieces = [*keys.pieces, (64, keys.norm_at)]
    pieces += [(size, keys.slot + at) for size, at in values.pieces] + [(64, keys.slot + values.norm_at)]
    return tuple(pieces)


@triton.constexpr_function
def _whole(pieces):
    """Return what a warp copies of pieces with all of its lanes at a time: piece, its bytes, bytes of a lane, bytes in
    all, first byte in a slot.
    """
    copies = []
    for i in range(len(pieces)):
        size, at = pieces[i]
        taken = size // (32 * _width(size)) * 32 * _width(size)
        if taken:
            copies.append((i, size, _width(size), taken, at))
    return tuple(copies)


@triton.constexpr_function
def _rows(pieces):
    """Return what is left of pieces, in rows of 32 lanes: bytes of a lane, lanes, then for each piece in a row its
    first lane, the piece, its bytes, and bytes from a lane's place (lane * bytes) to that in the piece and in a slot.
    """
    rows = []
    for wide in (16, 8):
        chunks = []
        for i in range(len(pieces)):
            size, at = pieces[i]
            if _width(size) == wide:
                chunks += [(i, size, byte, at) for byte in range(size // (32 * wide) * 32 * wide, size, wide)]
        for first in range(0, len(chunks), 32):
            row = chunks[first : first + 32]
            parts = []
            for lane in range(len(row)):
                i, size, byte, at = row[lane]
                if lane == 0 or row[lane - 1][0] != i:
                    parts.append((lane, i, size, byte - lane * wide, at + byte - lane * wide))
            rows.append((wide, len(row), tuple(parts)))
    return tuple(rows)


@triton.constexpr_function
def _row_count(keys, values):
    return len(_rows(_pieces(keys, values)))


@triton.constexpr_function
def _row(keys, values, i, part):
    return _rows(_pieces(keys, values))[i][part]


@triton.constexpr_function
def _copies(pieces):
    """Return assembly that copies the pieces of a block, `_whole` and `_rows`, and its constraints. Operands: shared
    address, lane, block; for each whole piece the lane's pointer into the first block; for each row that pointer, bytes
    of a block, and where the lane's bytes go in a slot.
    """
    text, wholes, rows = ["{ .reg .b32 d; .reg .b64 a; .reg .pred q;"], _whole(pieces), _rows(pieces)
    for i in range(len(wholes)):
        _, size, wide, taken, at = wholes[i]
        text += [f"mad.wide.s32 a, $3, {size}, ${4 + i};", f"mad.lo.s32 d, $2, {wide}, $1;"]
        for first in range(0, taken, 32 * wide):
            text += [f"cp.async.{_how(wide)}.shared.global [d+{at + first}], [a+{first}], {wide};"]
    for i in range(len(rows)):
        wide, lanes, _ = rows[i]
        pointer = 4 + len(wholes) + 3 * i
        text += [f"mad.wide.s32 a, $3, ${pointer + 1}, ${pointer};", f"add.s32 d, $1, ${pointer + 2};"]
        text += [f"setp.lt.u32 q, $2, {lanes};"] if lanes < 32 else []
        guard = "@q " if lanes < 32 else ""
        text += [f"{guard}cp.async.{_how(wide)}.shared.global [d], [a], {wide};"]
    constraints = "=r,r,r,r" + ",l" * len(wholes) + ",l,r,r" * len(rows)
    return " ".join([*text, "cp.async.commit_group;", "mov.b32 $0, 0; }"]), constraints


@triton.constexpr_function
def _how(wide):
    return "cg" if wide == 16 else "ca"


@triton.jit
def _piece_addresses(pointers, p_norm, i_head, i_batch, capacity, SIDE: tl.constexpr):
    """Return where the pieces of a head's first block begin, int64."""
    COUNT: tl.constexpr = len(SIDE.pieces)
    addresses = ()
    for i in tl.static_range(COUNT):
        addresses = addresses + ((pointers[SIDE.places[i]] + i_head * capacity * SIDE.pieces[i][0]).to(tl.int64),)
    return addresses + ((p_norm + i_batch.to(tl.int64) * capacity * 32).to(tl.int64),)


@triton.jit
def _row_of(addresses, lane, KEYS: tl.constexpr, VALUES: tl.constexpr, I: tl.constexpr):
    """Return of row I each lane's pointer into the first block, bytes of a block, and place in a slot."""
    WIDE: tl.constexpr = _row(KEYS, VALUES, I, 0)
    PARTS: tl.constexpr = _row(KEYS, VALUES, I, 2)
    COUNT: tl.constexpr = len(PARTS)
    offset = lane * WIDE
    address = addresses[PARTS[0][1]] + PARTS[0][3] + tl.zeros_like(lane).to(tl.int64)
    stride, place = tl.full(lane.shape, PARTS[0][2], tl.int32), tl.full(lane.shape, PARTS[0][4], tl.int32)
    for i in tl.static_range(1, COUNT):
        here = lane >= PARTS[i][0]
        address = tl.where(here, addresses[PARTS[i][1]] + PARTS[i][3], address)
        stride, place = tl.where(here, PARTS[i][2], stride), tl.where(here, PARTS[i][4], place)
    return address + offset, stride, place + offset


@triton.jit
def origins_of(
    key_pointers, p_kn, value_pointers, p_vn, i_head, i_batch, capacity, lane, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PAGED: tl.constexpr,
):
    """Return from where, and to where in a slot, each lane copies of a head's first block: operands of `_copies`, [32
    NW] each. PAGED: i_head is where a head begins in a page, in bytes, and there is one pointer.
    """
    if PAGED:
        origins = ((key_pointers[0] + i_head).to(tl.int64) + lane * 16,)
    else:
        PIECES: tl.constexpr = _pieces(KEYS, VALUES)
        WHOLE: tl.constexpr = _whole(PIECES)
        COUNT: tl.constexpr = len(WHOLE)
        ROWS: tl.constexpr = _row_count(KEYS, VALUES)
        addresses = _piece_addresses(key_pointers, p_kn, i_head, i_batch, capacity, KEYS) + _piece_addresses(
            value_pointers, p_vn, i_head, i_batch, capacity, VALUES
        )
        origins = ()
        for i in tl.static_range(COUNT):
            origins = origins + (addresses[WHOLE[i][0]] + lane * WHOLE[i][2],)
        for i in tl.static_range(ROWS):
            origins = origins + _row_of(addresses, lane, KEYS, VALUES, i)
    return origins


@triton.jit
def fetch_blocks(
    origins, pages, page_stride, first, last, slot, lane, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PAGED: tl.constexpr, NW: tl.constexpr,
):
    """Begin to copy the blocks from `first` on, one for each warp, none behind `last`, to a slot of the ring. PAGED:
    the blocks are in `pages` [32 NW], whatever first and last are.
    """
    if PAGED:
        TEXT: tl.constexpr = _page_copies(KEYS.slot + VALUES.slot)
        tl.inline_asm_elementwise(
            TEXT, "=r,r,r,l,l", [slot, lane, pages.to(tl.int64) * page_stride, origins[0]], dtype=tl.int32,
            is_pure=False, pack=1,
        )
    else:
        COPIES: tl.constexpr = _copies(_pieces(KEYS, VALUES))
        block = tl.minimum(first + tl.arange(0, 32 * NW) // 32, last)
        tl.inline_asm_elementwise(
            COPIES[0], COPIES[1], (slot, lane, block) + origins, dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def open_ring(
    origins, p_pages, page_stride, lane, zero, start, last, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SLOTS: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr,
):
    """Return where a warp's slots begin, [32 NW]; all of them except for one begin to fill. PAGED: p_pages names a
    row's pages.
    """
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    base = tl.inline_asm_elementwise(
        ring_address(SLOT * SLOTS * NW, True), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    for ahead in tl.static_range(SLOTS - 1):
        first = start + ahead * NW
        pages = pages_of(p_pages, first, last + 1, NW) if PAGED else p_pages
        fetch_blocks(origins, pages, page_stride, first, last, to + ahead * SLOT, lane, KEYS, VALUES, PAGED, NW)
    return to
