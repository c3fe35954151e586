"""Keys and values of points of a grid, which are looked up in a table in shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout.grids import ALIGNED
from .rotation import across_factor, across_rows, butterflies, parity_step, rotated_queries, sign_at, value_channels
from .scales import token_norms
from .softmax import by_parity, second_operand
from .tiles import blocks_at, ends_with_half, half_unit_tile, tile, upper_tile

# Look-ups of grids. A table lies in shared memory once for every bank: an entry of 4 bytes 32 times, one of 8 bytes 16
# times, 128 = 2^STEP bytes altogether, so that lanes of a warp never meet in a bank. With STEP 6, where two tables of
# 256 entries must fit, they meet in pairs.


@triton.constexpr_function
def _look_up(bits, step, first, pack=2):
    """Return assembly of a look-up: the units of `pack` words (times three at 3 bits) are operands, pairs of numbers
    are results, piece by piece. layout/grids.py says where codes lie. first: byte of kvcal_table at which the table
    begins. The table is known by name: an address as an operand keeps Triton from loading words in the layout that a
    product wants.
    """
    pieces, units, codes = {2: (8, pack // 2, 4), 3: (16, 3, 5), 4: (4, 1, 4)}[bits]
    outputs = pieces * pack // 2
    size, width, mask = (8 if bits == 2 else 4), (6 if bits == 3 else 8), (63 if bits == 3 else 255) << step
    text = ["{ .reg .b32 lane, at, turned, table;", "mov.u32 table, kvcal_table;"]
    text += [f"and.b32 lane, kvcal_place, {(1 << step) // size - 1};", f"shl.b32 lane, lane, {size.bit_length() - 1};"]

    def load(unit, code):
        targets = _targets(bits, pack, unit, code)
        into = f".b32 ${targets[0]}" if len(targets) == 1 else f".v2.b32 {{${targets[0]}, ${targets[1]}}}"
        return ["add.u32 at, at, table;", f"ld.shared{into}, [at + {first}];"]

    for unit in range(units):
        for code in range(codes):
            rotation, source = code * width + ALIGNED - step, f"${outputs + unit}"
            if rotation:
                text += [f"shf.r.wrap.b32 turned, {source}, {source}, {rotation};"]
                source = "turned"
            text += [f"lop3.b32 at, {source}, {mask}, lane, 0xEA;", *load(unit, code)]
    if bits == 3:
        text += ["mov.b32 at, lane;"]
        for unit in range(3):
            up = step + 2 * unit - 5
            text += [f"shl.b32 turned, ${outputs + unit}, {up};", f"lop3.b32 at, turned, {3 << up + 5}, at, 0xEA;"]
        text += load(3, 0)
    return " ".join([*text, "}"])


@triton.constexpr_function
def _look_up_eight(step, first):
    """Return assembly of a look-up of 3 bits, for the 8 pieces of a unit and half of one: two words of each are the
    operands.
    """
    text = ["{ .reg .b32 lane, at, turned, table;", "mov.u32 table, kvcal_table;"]
    text += [f"and.b32 lane, kvcal_place, {(1 << step) // 4 - 1};", "shl.b32 lane, lane, 2;"]
    for piece in range(7):
        source, rotation = f"${8 + piece // 5}", piece % 5 * 6 + ALIGNED - step
        if rotation:
            text += [f"shf.r.wrap.b32 turned, {source}, {source}, {rotation};"]
            source = "turned"
        text += [f"lop3.b32 at, {source}, {63 << step}, lane, 0xEA;"]
        text += ["add.u32 at, at, table;", f"ld.shared.b32 ${piece}, [at + {first}];"]
    text += [f"shl.b32 turned, $8, {step - 5};", f"lop3.b32 at, turned, {3 << step}, lane, 0xEA;"]
    text += [f"shr.u32 turned, $9, {17 - step};", f"lop3.b32 at, turned, {15 << step + 2}, at, 0xEA;"]
    return " ".join([*text, "add.u32 at, at, table;", f"ld.shared.b32 $7, [at + {first}];", "}"])


@triton.constexpr_function
def _targets(bits, pack, unit, code):
    """Return the result registers of a code's pairs."""
    if bits != 2:
        return [unit * {3: 5, 4: 4}[bits] + code]
    if pack == 2:  # of two pieces
        return [2 * code, 2 * code + 1]
    return [8 * unit + 2 * code, 8 * unit + 2 * code + 1]  # units of rows r, r + 8


@triton.constexpr_function
def _reserve(size):
    """Return assembly that declares the table. It has no braces, so that the name holds for the whole kernel."""
    table = f".shared .align 128 .b8 kvcal_table[{size}]; mov.u32 $0, kvcal_table; "
    return table + ".reg .b32 kvcal_place; mov.u32 kvcal_place, %laneid;"


@triton.jit
def _table(p_table, base, ENTRIES: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr):
    """Store ENTRIES of PAIRS pairs of float16 in shared memory at `base`, as often as 2^STEP bytes an entry hold them.
    """
    p_pairs = p_table.to(tl.pointer_type(tl.int32))
    for first in range(0, ENTRIES << (STEP - 2), 1024):
        i = first + tl.arange(0, 1024)
        pair = tl.load(p_pairs + (i >> (STEP - 2)) * PAIRS + i % PAIRS)
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, 0;",
            "=r,r,r",
            [base + i * 4, pair],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_tables(
    p_kt, p_vt, zero, KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr, STEP: tl.constexpr
):
    """Load the tables of keys and of values into shared memory, where all threads see them afterwards. zero: 0."""
    VALUE_ENTRIES: tl.constexpr = 0 if SAME else VALUES.entries
    base = tl.inline_asm_elementwise(
        _reserve((KEYS.entries + VALUE_ENTRIES) << STEP), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    _table(p_kt, base, KEYS.entries, KEYS.pairs, STEP)
    _table(p_vt, base + (KEYS.entries << STEP), VALUE_ENTRIES, VALUES.pairs, STEP)
    tl.debug_barrier()


@triton.jit
def _units(w, NW: tl.constexpr):
    """Return the units [NW, 16, 8] of words [NW, 16, 16], twice one behind the other as int64."""
    low, high = tl.split(tl.reshape(w.to(tl.int64) & 0xFFFF, [NW, 16, 8, 2]))
    unit = low | (high << 16)
    return unit | (unit << 32)


@triton.jit
def _entry(p_table, index, PAIR: tl.constexpr, PAIRS: tl.constexpr, NW: tl.constexpr):
    """Load pair PAIR of the table's entries at `index`."""
    p = p_table + index * (2 * PAIRS) + 2 * PAIR
    return tl.reshape(tl.join(tl.load(p), tl.load(p + 1)), [NW, 16, 16])


@triton.jit
def look2(w, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Return the points of a tile of 2-bit codes. p_table: read without assembly. FIRST: byte of the table in shared
    memory; both as in the functions below.

    A byte is of rows r and r + 8, registers side by side, as a load of 8 bytes writes them. So this counts on the order
    of a thread's numbers of a piece, that of a product's result (`check_layouts`): (r, k), (r, k + 1), (r + 8, k), (r +
    8, k + 1).
    """
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(2, STEP, FIRST, 4),
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,"
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=4,
        )
    else:
        top, bottom = tl.split(tl.permute(tl.reshape(_units(w, NW), [NW, 2, 8, 8]), [0, 2, 3, 1]))
        parts = ()
        for code in tl.static_range(8):
            index = ((top if code < 4 else bottom) >> (7 + 8 * (code % 4))) & 255
            p = p_table + index * 4
            upper = tl.join(tl.load(p), tl.load(p + 1))  # [NW, 8, 8, 2]
            lower = tl.join(tl.load(p + 2), tl.load(p + 3))
            both = tl.permute(tl.join(upper, lower), [0, 4, 1, 2, 3])
            parts = parts + (tl.reshape(both, [NW, 16, 16]),)
    return parts


@triton.jit
def look2_four(w, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Return the points of a tile of keys of which a code stands for four channels: a byte is of two pieces."""
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(2, STEP, FIRST), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    else:
        unit = _units(w, NW)
        parts = ()
        for code in tl.static_range(4):
            index = (unit >> (7 + 8 * code)) & 255
            parts = parts + (_entry(p_table, index, 0, 2, NW), _entry(p_table, index, 1, 2, NW))
    return parts


@triton.jit
def look4(w, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Return the points of a tile of 4-bit codes."""
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(4, STEP, FIRST), "=&r,=&r,=&r,=&r,r", [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )
    else:
        unit = _units(w, NW)
        parts = ()
        for code in tl.static_range(4):
            parts = parts + (_entry(p_table, (unit >> (7 + 8 * code)) & 255, 0, 1, NW),)
    return parts


@triton.jit
def look3(w, u, v, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Return the points of three tiles of 3-bit codes."""
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(3, STEP, FIRST),
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [w, u, v],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    else:
        units = (_units(w, NW), _units(u, NW), _units(v, NW))
        parts = ()
        for code in tl.static_range(15):
            parts = parts + (_entry(p_table, (units[code // 5] >> (7 + 6 * (code % 5))) & 63, 0, 1, NW),)
        last = (units[0] >> 5) & 3 | ((units[1] >> 5) & 3) << 2 | ((units[2] >> 5) & 3) << 4
        parts = parts + (_entry(p_table, last, 0, 1, NW),)
    return parts


@triton.jit
def look3_half(w, u, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Return eight pieces of a tile and of half a tile, as `half_unit_tile` gives it."""
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up_eight(STEP, FIRST), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w, u],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    else:
        whole, half_ = _units(w, NW), _units(u, NW)
        parts = ()
        for code in tl.static_range(5):
            parts = parts + (_entry(p_table, (whole >> (7 + 6 * code)) & 63, 0, 1, NW),)
        for code in tl.static_range(2):
            parts = parts + (_entry(p_table, (half_ >> (7 + 6 * code)) & 63, 0, 1, NW),)
        parts = parts + (_entry(p_table, (whole >> 5) & 3 | ((half_ >> 19) & 15) << 2, 0, 1, NW),)
    return parts


@triton.jit
def _points(
    p_words, b_at, b_live, ring, SIDE: tl.constexpr, BYTE: tl.constexpr, p_table, STEP: tl.constexpr,
    FOUR: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):
    """Return the points that a grid's codes stand for, in the order of `codes_of`. HALVED: the last tile is half of
    one. FOUR: keys of which a code stands for four channels. MIXED: rows are in the order of `interleaved_row`.
    """
    HALVED: tl.constexpr = ends_with_half(SIDE.words)
    TILES: tl.constexpr = SIDE.tiles
    parts = ()
    if SIDE.bits == 3:
        for u in tl.static_range(0, TILES, 3):
            w0 = tile(p_words, b_at, b_live, ring, BYTE, u, MIXED, NW, ASM)
            if HALVED and u + 2 == TILES:
                half_ = half_unit_tile(p_words, b_at, b_live, ring, BYTE, u + 1, MIXED, NW, ASM)
                parts = parts + look3_half(w0, half_, p_table, STEP, SIDE.first, NW, ASM)
            else:
                w1 = tile(p_words, b_at, b_live, ring, BYTE, u + 1, MIXED, NW, ASM)
                w2 = tile(p_words, b_at, b_live, ring, BYTE, u + 2, MIXED, NW, ASM)
                parts = parts + look3(w0, w1, w2, p_table, STEP, SIDE.first, NW, ASM)
    else:
        for u in tl.static_range(TILES):
            if HALVED and u == TILES - 1:
                w = upper_tile(p_words, b_at, b_live, ring, BYTE, u, MIXED, NW, ASM)
            else:
                w = tile(p_words, b_at, b_live, ring, BYTE, u, MIXED, NW, ASM)
            if SIDE.bits == 4:
                parts = parts + look4(w, p_table, STEP, SIDE.first, NW, ASM)
            elif FOUR:
                parts = parts + look2_four(w, p_table, STEP, SIDE.first, NW, ASM)
            else:
                parts = parts + look2(w, p_table, STEP, SIDE.first, NW, ASM)
    return parts


@triton.jit
def scores_of(
    p_k, p_ks, i_head, b_block, b_live, ring, q, capacity, p_table, i_norm, KEYS: tl.constexpr, SLICES: tl.constexpr,
    STEP: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return scores of both halves of NW blocks whose keys are points of a grid, with a norm for each token. MIXED:
    tokens in the order of `interleaved_row`.
    """
    live = b_live[:, None]
    at = blocks_at(i_head, b_block, capacity, KEYS.words, KEYS.page)
    parts = _points(p_k, at, live, ring, KEYS, 0, p_table, STEP, KEYS.quads, MIXED, NW, ASM)
    scores = ()
    for h in tl.static_range(2):
        b_dot = tl.dot(parts[h * KEYS.pieces], q[0])
        for i in tl.static_range(1, SLICES):
            b_dot = tl.dot(parts[h * KEYS.pieces + i], q[i], b_dot)
        at_norm = blocks_at(i_norm, b_block, capacity, 32, KEYS.page) + h * 16
        scores = scores + (b_dot * token_norms(p_ks, at_norm, live, ring, KEYS.words * 2 + h * 32, MIXED, NW, N, ASM),)
    return scores


@triton.jit
def add_values(
    p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, acc, capacity, p_table, i_norm, VALUES: tl.constexpr,
    BYTE: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr, PAIRED: tl.constexpr, MIXED: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return acc plus probabilities times values that are points of a grid. b_0 and b_1 are float32, with MIXED in the
    order of `interleaved_row`.
    """
    live = b_live[:, None]
    at = blocks_at(i_head, b_block, capacity, VALUES.words, VALUES.page)
    parts = _points(p_v, at, live, ring, VALUES, BYTE, p_table, STEP, False, False, NW, ASM)
    at_norm = blocks_at(i_norm, b_block, capacity, 32, VALUES.page)
    b_0 = (b_0 * token_norms(p_vs, at_norm, live, ring, BYTE + VALUES.words * 2, MIXED, NW, N, ASM)).to(tl.float16)
    b_1 = (b_1 * token_norms(p_vs, at_norm + 16, live, ring, BYTE + VALUES.words * 2 + 32, MIXED, NW, N, ASM)).to(
        tl.float16
    )
    if PAIRED:
        probabilities = by_parity(b_0, MIXED, NW, N) + by_parity(b_1, MIXED, NW, N)
    else:
        probabilities = (second_operand(b_0, NW, N, ASM), second_operand(b_1, NW, N, ASM))
    WIDE: tl.constexpr = SLICES // 2 if PAIRED else SLICES
    outputs = ()
    for i in tl.static_range(WIDE):
        b_acc = acc[i]
        for j in tl.static_range(4 if PAIRED else 2):
            b_acc = tl.dot(parts[j * WIDE + i], probabilities[j], b_acc)
        outputs = outputs + (b_acc,)
    return outputs


@triton.jit
def query_of(
    p_q, p_sign, o_q, b_row, b_down, i_kv, KEYS: tl.constexpr, SLICES: tl.constexpr, WIDTH: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr,
):
    """Return rotated queries for `scores_of`: SLICES of [NW, 16, N] float16."""
    plain = rotated_queries(
        p_q, p_sign, o_q, b_row, b_down, i_kv, SLICES, SLICES * 16, WIDTH, KEYS.factor, KEYS.paley, KEYS.quads, NW, N
    )
    q = ()
    for i in tl.static_range(SLICES):
        q = q + (plain[i].to(tl.float16),)
    return q


@triton.jit
def output_of(
    out, p_sign, i_kv, unit, VALUES: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr,
    LAID: tl.constexpr, D: tl.constexpr, EACH: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):
    """Return outputs of rotated values, rotated back, with their signs and times `unit`. LAID: how channels lie in
    them, of `value_channels`.
    """
    PLACE: tl.constexpr = 2 if LAID == 0 else 0 if VALUES.quads else 1  # the bit of a row that counts four channels
    SPAN: tl.constexpr = WIDTH // (16 * EACH)
    b_o = across_rows(out, WIDE, SPAN, VALUES.factor, VALUES.paley, PLACE, True, NW)
    rotated = ()
    for i in tl.static_range(WIDE):
        rotated = rotated + (parity_step(b_o[i], NW, N) if PAIRED else b_o[i],)
    rotated = across_factor(rotated, WIDE, SPAN, 1 if VALUES.paley else VALUES.factor, True)
    rotated = butterflies(rotated, WIDE, SPAN)
    r, column = tl.arange(0, 16), tl.arange(0, N)
    out = ()
    for i in tl.static_range(WIDE):
        channel = value_channels(i, r[:, None], column[None, :] % EACH, LAID, VALUES.quads)
        sign = sign_at(p_sign, i_kv * D + channel) * (unit * WIDTH**-0.5)
        out = out + (rotated[i] * sign[None],)
    return out
