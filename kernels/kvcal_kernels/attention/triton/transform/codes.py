"""Codes of coordinates to float16: assembly that looks them up in shared memory, and the same without assembly.

A look-up reads a pair of numbers of a token at once. Points of a tier lie in shared memory once for every bank, so that
lanes never meet in one. A product's first operand wants of a lane (g, t), g = lane // 4, t = lane % 4: of keys, of rows
g and g + 8, coordinates 2 t, 2 t + 1 and 8 more; of values, where rows are pairs and what is contracted is (token,
parity), rows g and g + 8 of tokens in slots t and t + 4. Row g of a half block of keys is its token 2 g, row g + 8 its
token 2 g + 1: then a lane has the same four tokens of each tier in the four bytes of a register
(layout/transform.py), and probabilities, transposed, come in slots t and t + 4 as tokens 4 t + e and 4 t + 2 + e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....layout.transform import PAIR_BYTES
from ..tiles import lane_zeros

REPLICA_BYTES = tl.constexpr(128)  # that an entry of the table takes
SIGNS, MINUS_ONE = 0x80008000, 0xBC00BC00


@triton.constexpr_function
def _lanes():
    """Return assembly that declares registers which look-ups know by name. $1: where a warp's slots begin."""
    parts = ("k32", "k24", "k24b", "k16", "k8", "v32", "v24", "v24b", "v16", "v8", "norm", "first")
    shifts = ("t", "g", "ks4", "ks6", "ks2", "up15", "up7", "vs4", "vs6", "vs2", "vs1")
    halves = tuple(f"{side}{name}" for side in "kv" for name in ("h", "f0", "f1", "f2", "f3"))
    names = ", ".join([f"kvcal_{name}" for name in (*parts, *shifts, *halves)])
    text = f".reg .pred kvcal_upper; .reg .b32 {names};"
    text += """ mov.u32 kvcal_t, %laneid; shl.b32 kvcal_k32, kvcal_t, 4; shr.u32 kvcal_v32, kvcal_t, 1;
    xor.b32 kvcal_v32, kvcal_v32, kvcal_t; and.b32 kvcal_v32, kvcal_v32, 4; shl.b32 kvcal_v32, kvcal_v32, 2;
    and.b32 kvcal_g, kvcal_t, 7; mad.lo.u32 kvcal_v32, kvcal_g, 32, kvcal_v32;
    shr.u32 kvcal_g, kvcal_t, 4; mad.lo.u32 kvcal_v32, kvcal_g, 256, kvcal_v32;
    setp.gt.u32 kvcal_upper, kvcal_t, 15; shr.u32 kvcal_g, kvcal_t, 2; and.b32 kvcal_t, kvcal_t, 3;
    and.b32 kvcal_ks4, kvcal_g, 3; and.b32 kvcal_ks6, kvcal_g, 1;
    shl.b32 kvcal_k16, kvcal_ks4, 2; shl.b32 kvcal_k24b, kvcal_ks6, 2; mad.lo.u32 kvcal_k24, kvcal_t, 24, kvcal_k16;
    mad.lo.u32 kvcal_k24b, kvcal_t, 24, kvcal_k24b; add.u32 kvcal_k24b, kvcal_k24b, 16;
    mad.lo.u32 kvcal_k16, kvcal_t, 16, kvcal_k16; shl.b32 kvcal_k8, kvcal_t, 3;
    shr.u32 kvcal_ks4, kvcal_g, 2; shl.b32 kvcal_ks4, kvcal_ks4, 2; add.s32 kvcal_ks6, kvcal_ks4, -2;
    and.b32 kvcal_ks6, kvcal_ks6, 31; and.b32 kvcal_ks2, kvcal_g, 6;
    sub.u32 kvcal_up7, 7, kvcal_g; mov.b32 kvcal_up15, 1; shl.b32 kvcal_up7, kvcal_up15, kvcal_up7;
    shl.b32 kvcal_up15, kvcal_up7, 8;
    and.b32 kvcal_v16, kvcal_t, 1; shl.b32 kvcal_v16, kvcal_v16, 3;
    mad.lo.u32 kvcal_v24, kvcal_g, 24, kvcal_v16; mul.lo.u32 kvcal_v24b, kvcal_g, 24;
    add.u32 kvcal_v24b, kvcal_v24b, 16; mad.lo.u32 kvcal_v16, kvcal_g, 16, kvcal_v16; shl.b32 kvcal_v8, kvcal_g, 3;
    and.b32 kvcal_vs4, kvcal_t, 2; shl.b32 kvcal_vs4, kvcal_vs4, 1; add.s32 kvcal_vs6, kvcal_vs4, -2;
    and.b32 kvcal_vs6, kvcal_vs6, 31; shl.b32 kvcal_vs2, kvcal_t, 1; sub.u32 kvcal_vs1, 6, kvcal_vs2;
    shl.b32 kvcal_norm, kvcal_g, 2; mov.b32 kvcal_first, 0; """
    for side in "kv":  # of codes of 4 bits: a byte's half, and by what a look-up multiplies it
        text += f"mov.b32 kvcal_{side}h, 0x0F0F0F0F; shl.b32 kvcal_{side}h, kvcal_{side}h, kvcal_{side}s4; "
        factor = f"kvcal_{side}f"
        text += f"mov.b32 {factor}0, {REPLICA_BYTES.value}; shr.u32 {factor}0, {factor}0, kvcal_{side}s4; "
        text += " ".join([f"shl.b32 {factor}{i}, {factor}0, {8 * i};" for i in (1, 2, 3)]) + " "
    return text + " ".join([f"add.u32 kvcal_{part}, kvcal_{part}, $1;" for part in parts]) + " mov.b32 $0, 0;"


@triton.jit
def declare_lanes(to):
    """Declare registers that look-ups know by name: where a lane's codes and norms lie in a warp's first slot, of a run
    of pairs, by bytes of a pair, and by how much they are shifted; for signs of keys powers of two that do so. to:
    where a warp's slots begin, [32 NW].
    """
    tl.inline_asm_elementwise(_lanes(), "=r,r", [to], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _readable(side, run, stride, width):
    """Return whether `width` pairs of `stride` bytes from a run's first one on are bytes of its block that are copied.
    A piece ends with bytes that are not, up to a multiple of 16.
    """
    first, stop, end = run[1] + stride * run[2], run[1] + stride * width, side.norm_at + 64
    for size, at in side.pieces:
        if size % 16 and first < at + size + 16 - size % 16 and stop > at + size:
            return False
    return run[2] == width or stop <= end


@triton.constexpr_function
def _address(into, lane_part, lane, stride, base, count, all_lanes):
    """Return assembly for a lane's address in the slot that begins at byte `base` of a warp's. all_lanes: of a short
    run lanes beyond the last pair read what is behind it (`_readable`): their numbers meet zeros. Else they take the
    last pair.
    """
    if all_lanes:
        return [f"add.u32 {into}, {base}, {lane_part};"]
    text = [f"min.u32 {into}, {lane}, {count - 1}; sub.u32 {into}, {into}, {lane};"]
    return [*text, f"mad.lo.u32 {into}, {into}, {stride}, {lane_part}; add.u32 {into}, {into}, {base};"]


@triton.constexpr_function
def _look_up(into, word, byte, first, factors=""):
    """Return assembly that looks up the code that is a byte of a word. first: entry at which the tier's points begin.
    factors: what registers are called by which bytes are multiplied where lanes differ in it, as codes lie in either
    half of a byte. A product of bytes is one instruction for shift, mask and sum, and does not run where shifts and
    masks do.
    """
    factor = f"{factors}{byte}" if factors else REPLICA_BYTES.value << 8 * byte
    at = f"dp4a.u32.u32 at, {word}, {factor}, kvcal_bank;"
    return f"{at} ld.shared.b32 {into}, [at + {first * REPLICA_BYTES.value}];"


@triton.constexpr_function
def _signs(into, word):
    """Return assembly that makes -1 and 1 of bits 15 and 31 of a word."""
    return f"lop3.b32 {into}, {word}, {SIGNS}, ones, 0x6A;"


@triton.constexpr_function
def _places_of(tables):
    return {4: tables[0], 3: tables[1], 2: tables[2]}


@triton.constexpr_function
def _key_run(run, targets, base, word, tables, all_lanes):
    """Return assembly that gives the four pairs of numbers of a lane from a run of 4 pairs: tokens 2 g, 2 g + 1, 16 + 2
    g, 17 + 2 g. word: of codes of 4 bits, loaded before (`_rows_of`).
    """
    bits, at, count = run
    first = _places_of(tables).get(bits, 0)
    even, odd, even16, odd16 = targets
    if bits == 4:
        return [_look_up(into, word, i, first) for i, into in enumerate((even, odd, even16, odd16))]
    if bits == 1:
        text = _address("a", "kvcal_k8", "kvcal_t", 8, base, count, all_lanes)
        text += [f"ld.shared.v2.b32 {{x, y}}, [a + {at}]; mov.b32 ones, {MINUS_ONE};"]
        text += ["prmt.b32 a, x, y, 0x5410; prmt.b32 x, x, y, 0x7632;"]
        for into, word, up in ((even, "a", 15), (even16, "a", 7), (odd, "x", 15), (odd16, "x", 7)):
            text += [f"mul.lo.u32 y, {word}, kvcal_up{up}; {_signs(into, 'y')}"]
        return text
    if bits == 2:
        text = _address("a", "kvcal_k16", "kvcal_t", 16, base, count, all_lanes)
        text += [f"ld.shared.b32 x, [a + {at}]; and.b32 x, x, kvcal_kh;"]
    else:
        text = _address("a", "kvcal_k24", "kvcal_t", 24, base, count, all_lanes)
        text += [f"ld.shared.b32 x, [a + {at}]; shf.r.wrap.b32 x, x, x, kvcal_ks6;"]
        text += _address("a", "kvcal_k24b", "kvcal_t", 24, base, count, all_lanes)
        text += [f"ld.shared.b32 y, [a + {at}]; shr.u32 y, y, kvcal_ks2; {_joined('x', 'y')}"]
    order = (even, even16, odd, odd16)
    factors = "kvcal_kf" if bits == 2 else ""
    return [*text, *(_look_up(into, "x", i, first, factors) for i, into in enumerate(order))]


@triton.constexpr_function
def _rows_of(side, runs, byte, base, lane_part, words, size, across):
    """Return assembly that loads words of runs of 4 bits, one behind the other, by rows of 16 bytes that do not meet in
    a bank. lane_part: bytes from the first pair to the row whose address a lane has, `size` bytes a run; behind the
    last pair the last row stands for others.
    """
    runs = [run for run in runs if run[0] == 4]
    if not runs:
        return []
    first, many = runs[0][1] + byte, len(words) // 2 * len(runs)
    row = f"add.u32 a, {lane_part}, {base};"
    if not _readable(side, runs[-1], 32, size // 32):
        end = 32 * runs[-1][2] + size * (len(runs) - 1)
        row += f" add.u32 x, kvcal_first, {base}; add.u32 x, x, {end - 16}; min.u32 a, a, x;"
    how = f"ldmatrix.sync.aligned.m8n8.x{many}{'.trans' if across else ''}.shared.b16"
    return [row, f"{how} {{{', '.join(words[:many])}}}, [a + {first}];"]


@triton.constexpr_function
def _joined(upper, lower):
    """Return assembly that joins upper bits 2 to 5 of each byte of a word with lower bits 0 and 1 of another."""
    return f"and.b32 {lower}, {lower}, 0x03030303; lop3.b32 {upper}, {upper}, 0x3C3C3C3C, {lower}, 0xEA;"


@triton.constexpr_function
def _zeros(targets):
    return [f"mov.b32 {target}, 0;" for target in targets]


@triton.constexpr_function
def key_step(side, step, tables):
    """Return assembly that loads a product's coordinates of both half blocks, and its constraints: 8 registers."""
    runs, words = side.runs[2 * step : 2 * step + 2], ("w0", "w1")
    text = ["{ .reg .b32 a, x, y, w0, w1, at, ones;"]
    text += _rows_of(side, runs, 0, "$8", "kvcal_k32", words, 128, True)
    for i in range(2):
        targets = tuple(f"${n + 2 * i}" for n in (0, 1, 4, 5))
        if i < len(runs):
            every = _readable(side, runs[i], PAIR_BYTES[runs[i][0]], 4)
            text += _key_run(runs[i], targets, "$8", words[i], tables, every)
        else:  # the last step may have one run
            text += _zeros(targets)
    return " ".join([*text, "}"]), ",".join(["=&r"] * 8 + ["r"] * 8)


@triton.constexpr_function
def _value_run(run, byte, row, base, words, tables, all_lanes):
    """Return assembly for a lane's 8 tokens of a run of 8 pairs, as rows `row` (0: g, 1: g + 8) of four tiles of 8
    tokens: half block h, e of tokens in turn. words: of 4 bits, of one half block and the other (`_rows_of`).
    """
    bits, at, count = run
    at, first = at + byte, _places_of(tables).get(bits, 0)
    tokens = [(h, e, late) for h in range(2) for e in range(2) for late in range(2)]
    targets = {(h, e, late): f"${4 * (2 * h + e) + row + 2 * late}" for h, e, late in tokens}
    if bits == 4:
        one, other = words
        text = [f"selp.b32 x, {other}, {one}, kvcal_upper; selp.b32 y, {one}, {other}, kvcal_upper;"]
        look = (_look_up(targets[h, e, late], "xy"[h], e + 2 * late, first) for h, e, late in tokens)
        return [*text, *look]
    if bits == 1:
        text = _address("a", "kvcal_v8", "kvcal_g", 8, base, count, all_lanes)
        text += [f"ld.shared.v2.b32 {{x, y}}, [a + {at}]; prmt.b32 a, x, y, 0x5410; prmt.b32 x, x, y, 0x7632;"]
        text += [f"shl.b32 a, a, kvcal_vs1; shl.b32 x, x, kvcal_vs1; mov.b32 ones, {MINUS_ONE};"]
        for h, e, late in tokens:
            text += [f"shl.b32 y, {'ax'[e]}, {9 - 8 * h - late}; {_signs(targets[h, e, late], 'y')}"]
        return text
    if bits == 2:
        text = _address("a", "kvcal_v16", "kvcal_g", 16, base, count, all_lanes)
        text += [f"ld.shared.v2.b32 {{x, y}}, [a + {at}]; and.b32 x, x, kvcal_vh; and.b32 y, y, kvcal_vh;"]
    else:
        text = _address("a", "kvcal_v24", "kvcal_g", 24, base, count, all_lanes)
        text += [f"ld.shared.v2.b32 {{x, y}}, [a + {at}];"]
        text += ["shf.r.wrap.b32 x, x, x, kvcal_vs6; shf.r.wrap.b32 y, y, y, kvcal_vs6;"]
        text += _address("a", "kvcal_v24b", "kvcal_g", 24, base, count, all_lanes)
        text += [f"ld.shared.v2.b32 {{a, z}}, [a + {at}]; shr.u32 a, a, kvcal_vs2; shr.u32 z, z, kvcal_vs2;"]
        text += [_joined("x", "a"), _joined("y", "z")]
    factors = "kvcal_vf" if bits == 2 else ""
    look = (_look_up(targets[h, e, late], "xy"[late], 2 * e + h, first, factors) for h, e, late in tokens)
    return [*text, *look]


@triton.constexpr_function
def value_step(side, byte, step, tables):
    """Return assembly that loads a tile of 16 pairs of values, as four operands of 8 tokens, and its constraints."""
    runs, words = side.runs[2 * step : 2 * step + 2], ("w0", "w1", "w2", "w3")
    text = ["{ .reg .b32 a, x, y, z, w0, w1, w2, w3, at, ones;"]
    text += _rows_of(side, runs, byte, "$16", "kvcal_v32", words, 256, False)
    for i in range(2):
        targets = tuple(f"${4 * tile + i + 2 * late}" for tile in range(4) for late in range(2))
        pair = words[2 * i : 2 * i + 2]
        if i < len(runs):
            every = _readable(side, runs[i], PAIR_BYTES[runs[i][0]], 8)
            text += _value_run(runs[i], byte, i, "$16", pair, tables, every)
        else:
            text += _zeros(targets)
    return " ".join([*text, "}"]), ",".join(["=&r"] * 16 + ["r"] * 8)


@triton.constexpr_function
def _run_of(side, step, i):
    return side.runs[min(2 * step + i, len(side.runs) - 1)]


@triton.constexpr_function
def _piece_of(side, bits):
    """Return where a tier is among the kernel's pointers, its bytes of a block and where it begins in one."""
    place = 4 - bits
    size, at = side.pieces[side.places.index(place)]
    return place, size, at


@triton.jit
def _numbers_of(pointers, o_block, b_live, pair, token, parity, p_table, RUN: tl.constexpr, SIDE: tl.constexpr,
                TABLES: tl.constexpr, PAGED: tl.constexpr):
    """Return numbers of coordinates 2 pair + parity of a run, as float16. o_block: with PAGED of a block's bytes behind
    the first pointer, else its number in the pointers' tensors.
    """
    BITS: tl.constexpr = RUN[0]
    PIECE: tl.constexpr = _piece_of(SIDE, BITS)
    pair = tl.minimum(pair, RUN[2] - 1)
    if PAGED:
        p = pointers[0] + o_block + RUN[1]
    else:
        p = pointers[PIECE[0]] + o_block * PIECE[1] + (RUN[1] - PIECE[2])
    if BITS == 4:
        code = tl.load(p + pair * 32 + token, mask=b_live, other=0).to(tl.int32)
    elif BITS == 1:
        byte = tl.load(p + pair * 8 + parity * 4 + token % 2 * 2 + token // 16, mask=b_live, other=0).to(tl.int32)
        code = byte >> token // 2 % 8 & 1
    else:
        PAIR: tl.constexpr = 16 if BITS == 2 else 24
        byte = tl.load(p + pair * PAIR + token % 8 * 2 + token // 16, mask=b_live, other=0).to(tl.int32)
        code = byte >> token // 8 % 2 * 4 & 15
        if BITS == 3:
            low = tl.load(p + pair * 24 + 16 + token % 4 * 2 + token // 16, mask=b_live, other=0).to(tl.int32)
            code = code << 2 | low >> token // 4 % 4 * 2 & 3
    if BITS == 1:
        number = (code * 2 - 1).to(tl.float16)
    else:
        number = tl.load(p_table + (_places_of(TABLES)[BITS] + code) * 2 + parity)
    return number


@triton.jit
def key_numbers(pointers, o_block, b_live, o_slot, p_table, STEP: tl.constexpr, SIDE: tl.constexpr,
                TABLES: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Return 16 coordinates of both half blocks of NW blocks as a product's first operands, [NW, 16, 16] each. o_slot:
    in the ring, from a warp's first slot on; without ASM blocks are read from memory, o_block [NW] and
    b_live [NW].
    """
    if ASM:
        TEXT: tl.constexpr = key_step(SIDE, STEP, TABLES)
        at = lane_zeros(NW) + o_slot
        halves = tl.inline_asm_elementwise(
            TEXT[0], TEXT[1], [at], dtype=(tl.float16, tl.float16), is_pure=False, pack=8
        )
    else:
        row, k = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
        token, slot = row % 8 * 2 + row // 8, k // 2
        o, live = o_block[:, None, None], b_live[:, None, None]
        halves = ()
        for h in tl.static_range(2):
            a = _numbers_of(pointers, o, live, slot % 4, token + 16 * h, k % 2, p_table, _run_of(SIDE, STEP, 0), SIDE,
                            TABLES, PAGED)
            b = _numbers_of(pointers, o, live, slot % 4, token + 16 * h, k % 2, p_table, _run_of(SIDE, STEP, 1), SIDE,
                            TABLES, PAGED)
            halves = halves + (tl.where(slot < 4, a, b),)
    return halves


@triton.jit
def value_numbers(pointers, o_block, b_live, o_slot, p_table, STEP: tl.constexpr, BYTE: tl.constexpr,
                  SIDE: tl.constexpr, TABLES: tl.constexpr, PAGED: tl.constexpr,
                  NW: tl.constexpr, ASM: tl.constexpr):
    """Return 16 pairs of NW blocks' values as first operands of 8 tokens each: four [NW, 16, 16]. BYTE: where values
    begin in a slot of the ring. The rest is as in `key_numbers`.
    """
    if ASM:
        TEXT: tl.constexpr = value_step(SIDE, BYTE, STEP, TABLES)
        at = lane_zeros(NW) + o_slot
        parts = tl.inline_asm_elementwise(
            TEXT[0], TEXT[1], [at], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=False, pack=8
        )
    else:
        row, k = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
        o, live = o_block[:, None, None], b_live[:, None, None]
        parts = ()
        for j in tl.static_range(4):
            token = 16 * (j // 2) + k // 2 * 2 + j % 2
            a = _numbers_of(
                pointers, o, live, row % 8, token, k % 2, p_table, _run_of(SIDE, STEP, 0), SIDE, TABLES, PAGED
            )
            b = _numbers_of(
                pointers, o, live, row % 8, token, k % 2, p_table, _run_of(SIDE, STEP, 1), SIDE, TABLES, PAGED
            )
            parts = parts + (tl.where(row < 8, a, b),)
    return parts


@triton.constexpr_function
def _norms(byte):
    """Return assembly for the norms of a lane's two rows, which are neighbours."""
    return f"""{{ .reg .b16 a, b; .reg .b32 kvcal_norms;
    add.u32 kvcal_norms, kvcal_norm, $4; ld.shared.b32 kvcal_norms, [kvcal_norms + {byte}];
    mov.b32 {{a, b}}, kvcal_norms;
    cvt.f32.f16 $0, a; mov.b32 $1, $0; cvt.f32.f16 $2, b; mov.b32 $3, $2; }}"""


@triton.jit
def token_norms(p_norm, o_norm, b_live, o_slot, BYTE: tl.constexpr, HALF: tl.constexpr, NW: tl.constexpr,
                N: tl.constexpr, ASM: tl.constexpr):
    """Return the norms of a half block's tokens in the order of keys' rows: [NW, 16, N] float32, every column alike; or
    [NW, 16, 1]. BYTE: of the norms in a slot of the ring; o_norm [NW]: of the block's norms in memory.
    """
    r = tl.arange(0, 16)[None, :]
    if ASM:
        at = lane_zeros(NW, N) + o_slot
        norm = tl.inline_asm_elementwise(
            _norms(BYTE + 32 * HALF), "=&f,=&f,=&f,=&f,r,r,r,r", [at], dtype=tl.float32, is_pure=False, pack=4
        )
    else:
        at = o_norm[:, None] + (16 * HALF + r % 8 * 2 + r // 8)
        norm = tl.load(p_norm + at, mask=b_live[:, None], other=0.0).to(tl.float32)[:, :, None]
    return norm
