"""The ring: a warp copies codes and scales of its next blocks to shared memory by `cp.async`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..plan import ring_follows_triton

# The ring. A warp copies the codes and scales of its next blocks to shared memory and, alone in a program, waits for no
# other. Triton's own pipeline of loads took half of the instructions around the products: it branches around lanes
# that have nothing to copy, commits every load by itself and reads scales through three layouts
# (docs/benchmarks/decode_attention.md).


@triton.constexpr_function
def _width(size):
    """Return the bytes that a lane copies at a time of a piece of this size: what is left of it after whole warps of 16
    bytes, without a branch where it is 256 or 128 bytes.
    """
    return {256: 8, 128: 4}.get(size, 16)


@triton.constexpr_function
def _piece(size, to, source):
    """Return assembly by which a warp copies a piece of so many bytes from byte `source` on, to byte `to` of a slot."""
    wide, text = _width(size), []
    how = "cg" if wide == 16 else "ca"
    for first in range(0, size - 32 * wide + 1, 32 * wide):
        text += [f"cp.async.{how}.shared.global [d+{to + first}], [a+{source + first}], {wide};"]
    first, rest = size // (32 * wide) * 32 * wide, size % (32 * wide)
    if rest:
        text += [
            f"setp.lt.u32 q, $2, {rest // 16};",
            f"@q cp.async.cg.shared.global [d+{to + first}], [a+{source + first}], 16;",
        ]
    return text


@triton.constexpr_function
def _copies(pieces):
    """Return assembly that copies pieces (bytes, whether they are tiles of words) one behind the other. The halves of
    rows of words are swapped in every other four rows, so that `ldmatrix` meets every bank once. Operands: shared
    address, lane, the lane's place of words, then for each piece its block's number and the lane's pointer into the
    first block.
    """
    text, at = ["{ .reg .b32 d; .reg .b64 a; .reg .pred q;"], 0
    for i in range(len(pieces)):
        size, words = pieces[i]
        wide = _width(size)
        text += [f"mad.wide.s32 a, ${4 + 2 * i}, {size}, ${5 + 2 * i};"]
        text += ["add.s32 d, $1, $3;" if words else f"mad.lo.s32 d, $2, {wide}, $1;"]
        text += _piece(size, at, 0)
        at += size
    return " ".join([*text, "cp.async.commit_group;", "mov.b32 $0, 0; }"])


@triton.constexpr_function
def _constraints(sizes):
    return "=r,r,r,r" + ",r,l" * len(sizes)


_follows_triton = triton.constexpr_function(ring_follows_triton)


@triton.constexpr_function
def ring_address(size, beyond):
    """Return assembly for where the ring begins. beyond: behind the shared memory that Triton manages, see
    `launch.examine`; with several warps, or next to tables, it would not fit the 48 KB of shared memory that assembly
    may declare.
    """
    if beyond:
        text = f"{{ .reg .b32 t; mov.u32 t, %dynamic_smem_size; add.u32 t, t, -{size};"
        return f"{text} mov.u32 $0, global_smem; add.u32 $0, $0, t; }}"
    return f"{{ .shared .align 128 .b8 kvcal_ring[{size}]; mov.u32 $0, kvcal_ring; }}"


@triton.constexpr_function
def _arrived(pending):
    return f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.jit
def wait_for_blocks(PENDING: tl.constexpr, PRIVATE_BLOCKS: tl.constexpr, NW: tl.constexpr):
    """Wait until at most PENDING of a warp's fetches are on their way.

    PRIVATE_BLOCKS: each warp reads its own blocks only. Otherwise all wait for one another, as Triton may read scales
    of integers in a layout in which a warp has those of others' blocks.
    """
    tl.inline_asm_elementwise(_arrived(PENDING), "=r,r", [tl.arange(0, 32 * NW)], dtype=tl.int32, is_pure=False, pack=1)
    if not PRIVATE_BLOCKS:
        tl.debug_barrier()


@triton.jit
def _origins(
    p_k, p_ks, p_order, p_v, p_vs, i_head, i_scales, capacity, lane, KEYS: tl.constexpr, VALUES: tl.constexpr,
):
    """Return where each lane copies from in a head's first block: int64 [32 NW] for each piece that goes through the
    ring. i_scales: the heads of keys' and of values' scales, which may be of all heads.
    """
    origins = ()
    if KEYS.slot > 0:
        origins = origins + ((p_k + i_head * capacity * KEYS.words).to(tl.int64) + lane * 16,)
        origins = origins + (
            (p_ks + i_scales[0] * (capacity // KEYS.scale_blocks) * KEYS.scales).to(tl.int64)
            + lane * _width(KEYS.scales * 2),
        )
        origins = origins + (
            (p_order + i_head * (capacity // KEYS.scale_blocks) * KEYS.order).to(tl.int64) + lane * _width(KEYS.order),
        )
    if VALUES.slot > 0:
        origins = origins + ((p_v + i_head * capacity * VALUES.words).to(tl.int64) + lane * 16,)
        origins = origins + (
            (p_vs + i_scales[1] * (capacity // VALUES.scale_blocks) * VALUES.scales).to(tl.int64)
            + lane * _width(VALUES.scales * 2),
        )
    return origins


@triton.constexpr_function
def _pieces(keys, values):
    """Return (bytes, whether tiles of words) for each piece that goes through the ring."""
    of_keys = ((2 * keys.words, True), (2 * keys.scales, False), *(((keys.order, False),) if keys.order else ()))
    of_values = ((2 * values.words, True), (2 * values.scales, False))
    return (of_keys if keys.slot else ()) + (of_values if values.slot else ())


@triton.jit
def fetch_blocks(
    origins, first, last, slot, lane, swapped, KEYS: tl.constexpr, VALUES: tl.constexpr, NW: tl.constexpr,
):
    """Begin to copy the blocks from `first` on, one for each warp, none behind `last`, to a slot of the ring. slot,
    lane, swapped: int32 [32 NW].
    """
    PIECES: tl.constexpr = _pieces(KEYS, VALUES)
    block = tl.minimum(first + tl.arange(0, 32 * NW) // 32, last)
    inputs = (slot, lane, swapped)
    if KEYS.slot > 0:
        inputs = inputs + (block, origins[0], block // KEYS.scale_blocks, origins[1])
        if KEYS.order > 0:
            inputs = inputs + (block // KEYS.scale_blocks, origins[2])
    if VALUES.slot > 0:
        FIRST: tl.constexpr = 3 if KEYS.slot > 0 else 0
        inputs = inputs + (block, origins[FIRST], block // VALUES.scale_blocks, origins[FIRST + 1])
    tl.inline_asm_elementwise(_copies(PIECES), _constraints(PIECES), inputs, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def open_ring(
    p_k, p_ks, p_order, p_v, p_vs, i_head, i_scales, capacity, lane, zero, start, last, swapped, KEYS: tl.constexpr,
    VALUES: tl.constexpr, SLOTS: tl.constexpr, NW: tl.constexpr,
):
    """Return `_origins`, and where the ring lies; all of its slots except for one begin to fill."""
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    origins = _origins(
        p_k, p_ks, p_order, p_v, p_vs, i_head, i_scales, capacity, lane, KEYS, VALUES,
    )
    base = tl.inline_asm_elementwise(
        ring_address(SLOT * SLOTS * NW, _follows_triton(NW, KEYS.entries + VALUES.entries, SLOT * SLOTS)),
        "=r,r",
        [zero],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    for ahead in tl.static_range(SLOTS - 1):
        fetch_blocks(
            origins, start + ahead * NW, last, to + ahead * SLOT, lane, swapped, KEYS, VALUES, NW,
        )
    return origins, base


# Pages: a head's bytes of a page lie as in a slot of the ring, piece behind piece.


@triton.constexpr_function
def _page_copies(pieces):
    """Return `_copies` of pieces of one page. Operands: shared address, lane, the lane's place of words, and where the
    head's bytes begin.
    """
    text, at = ["{ .reg .b32 d; .reg .b64 a; .reg .pred q;"], 0
    for i in range(len(pieces)):
        size, words = pieces[i]
        wide = _width(size)
        text += [f"mad.wide.u32 a, $2, {wide}, $4;"]
        text += ["add.s32 d, $1, $3;" if words else f"mad.lo.s32 d, $2, {wide}, $1;"]
        text += _piece(size, at, at)
        at += size
    return " ".join([*text, "cp.async.commit_group;", "mov.b32 $0, 0; }"])


@triton.jit
def pages_of(p_pages, first, stop, NW: tl.constexpr):
    """Return the pages of the blocks from `first` on, one for each warp, page 0 from `stop` on: int32 [32 NW]."""
    block = first + tl.arange(0, 32 * NW) // 32
    return tl.load(p_pages + block, mask=block < stop, other=0)


@triton.jit
def fetch_pages(
    p_head, pages, page_stride, slot, lane, swapped, KEYS: tl.constexpr, VALUES: tl.constexpr, NW: tl.constexpr,
):
    """Begin to copy a head's bytes of `pages` [32 NW], one for each warp, to a slot of the ring. p_head: of page 0."""
    TEXT: tl.constexpr = _page_copies(_pieces(KEYS, VALUES))
    at = p_head.to(tl.int64) + pages.to(tl.int64) * page_stride
    tl.inline_asm_elementwise(
        TEXT, "=r,r,r,r,l", [slot, lane, swapped, at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def open_page_ring(
    p_head, p_pages, page_stride, lane, zero, start, stop, swapped, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SLOTS: tl.constexpr, NW: tl.constexpr,
):
    """Return where the ring lies; all of its slots except for one begin to fill. p_pages: a row's pages."""
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    base = tl.inline_asm_elementwise(
        ring_address(SLOT * SLOTS * NW, _follows_triton(NW, KEYS.entries + VALUES.entries, SLOT * SLOTS)),
        "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1,
    )
    to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    for ahead in tl.static_range(SLOTS - 1):
        pages = pages_of(p_pages, start + ahead * NW, stop, NW)
        fetch_pages(p_head, pages, page_stride, to + ahead * SLOT, lane, swapped, KEYS, VALUES, NW)
    return base
