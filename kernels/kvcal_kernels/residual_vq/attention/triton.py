"""`attend` and `decode` of reference.py for NVIDIA GPUs. No key and no value is ever decoded: attention needs only the
product of a query with each codeword, and how much probability falls on each.

1. tables: query times every codeword of every stage;
2. scores: a token's is a sum of look-ups, one a stage, of R numbers side by side;
3. the softmax's sum;
4. probabilities are added up by code, as integers in units of 2^-30, so the order of adding does not show and the same
   input gives the same bits;
5. one product of those sums with the codebooks.

A token and kv head reads S tables' entries of 2 R bytes where decoding reads S codewords of 2 d: at R = 4, 80 + 48
dimensions, 8 bytes instead of 128 for each code. The price does not depend on the length: tables of S k R numbers a row
and kv head are written and read. Tables are int16 in units of a stage and a query: compared with float16, five bits
more for the largest scores, which count most. Letters: reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.triton.numbers import cast
from ...device import on
from ...packing.triton import code_at
from ...triton import interpreted, rounded_product
from .reference import Band, Coded

LOW = tl.constexpr(-1e30)  # below every score
UNIT = tl.constexpr(2.0**30)  # of a probability that is stored as an integer: all of a row's are 2^30
MOST_ROWS = 64
LOG2E = 1.4426950408889634


@triton.jit
def tables_kernel(
    p_q, p_scale, p_dims, p_book, p_reach, p_table, p_unit, groups, count, factor,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, d: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr,
    BD: tl.constexpr, RP: tl.constexpr, G: tl.constexpr, BC: tl.constexpr, ITERATIONS: tl.constexpr, ASM: tl.constexpr,
):
    """Make tables with a grid (tiles of codewords, groups of G kv heads). Table (B H, S k, RP) int16: scores to base
    two, in units of what |query| times the stage's longest codeword makes 32767; unit (B H, RP): of a codeword of
    length 1.
    """
    n = tl.arange(0, G * RP)
    i_head = tl.program_id(1) * G + n // RP
    b_live = (i_head < groups) & (n % RP < R)
    j = tl.arange(0, BD)
    o_dim = tl.load(p_dims + j, mask=j < d, other=0)
    b_all = (j < d)[:, None] & b_live[None, :]
    b_q = tl.load(p_q + ((i_head * R + n % RP) * D)[None, :] + o_dim[:, None], mask=b_all, other=0.0).to(tl.float32)
    if SCALED:
        b_q *= tl.load(p_scale + (i_head % H * D)[None, :] + o_dim[:, None], mask=b_all, other=0.0).to(tl.float32)
    # each row times a power of two that brings its largest element into [1, 2), as the sum of two float16
    exponent = tl.maximum(tl.max(tl.abs(b_q), 0).to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)
    b_q *= ((254 << 23) - exponent).to(tl.float32, bitcast=True)[None, :]
    # what rounding adds to a product stays below the length
    b_length = tl.sqrt(tl.sum(rounded_product(b_q, b_q, ASM), 0)) * 1.001 + 1e-30
    b_unit = b_length * exponent.to(tl.float32, bitcast=True) * (factor / 32767.0)
    tl.store(p_unit + i_head * RP + n % RP, b_unit, mask=(i_head < groups) & (tl.program_id(0) == 0))
    b_q *= (32767.0 / b_length)[None, :]  # in float16's range; behind the product it would go through shared memory
    b_upper = b_q.to(tl.float16)
    b_lower = (b_q - b_upper.to(tl.float32)).to(tl.float16)
    b_group = tl.program_id(1) * G + tl.arange(0, G)
    r = tl.arange(0, RP)
    for iteration in range(ITERATIONS):
        code = (tl.program_id(0) * ITERATIONS + iteration) * BC + tl.arange(0, BC)
        inside = (code < count)[:, None] & (j < d)[None, :]
        b_book = tl.load(p_book + code[:, None] * d + j[None, :], mask=inside, other=0.0)
        b_inverse = 1.0 / tl.load(p_reach + code // K, mask=code < count, other=1.0)
        b_dot = tl.dot(b_book, b_lower, tl.dot(b_book, b_upper)) * b_inverse[:, None]
        b_dot = b_dot + tl.where(b_dot < 0, -0.5, 0.5)
        b_dot = tl.permute(tl.reshape(b_dot, [BC, G, RP]), (1, 0, 2))
        o_table = (b_group.to(tl.int64)[:, None] * count + code[None, :])[:, :, None] * RP + r[None, None, :]
        b_there = (b_group < groups)[:, None, None] & (code < count)[None, :, None]
        b_dot = b_dot.to(tl.int16)
        tl.store(p_table + o_table, tl.broadcast_to(b_dot, [G, BC, RP]), mask=tl.broadcast_to(b_there, [G, BC, RP]))


@triton.jit
def _looked_up(
    p_codes, p_table, p_unit, p_reach, i_head, b_block, b_place, b_live, b_sum, capacity,
    S: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
    RP: tl.constexpr, UNROLL: tl.constexpr, SHARED: tl.constexpr,
):
    """Return b_sum [BT, RP] plus a band's entries of its codes. SHARED: a stage's table goes through shared memory,
    where 32 lanes read 32 places in a few cycles; it must have no more than four rows.
    """
    p = p_codes + (i_head * capacity + b_block) * (S * BYTES)
    r = tl.arange(0, RP)
    p_head = p_table + i_head * (S * K * RP)
    b_unit = tl.load(p_unit + i_head * RP + r)
    if SHARED:  # the next stage's loads are under way while this one's table is read
        p_word = p_head.to(tl.pointer_type(_word(RP))) + tl.arange(0, K)
        b_stage = tl.load(p_word)
        b_code = code_at(p, b_place, b_live, BITS, BLOCK)
        for s in tl.range(0, S):
            after = tl.minimum(s + 1, S - 1)
            b_next = tl.load(p_word + after * K)
            b_code_next = code_at(p + after * BYTES, b_place, b_live, BITS, BLOCK)
            b_word = tl.gather(b_stage, b_code, 0)
            b_entry = (b_word[:, None] >> (16 * r)[None, :].to(_word(RP))).to(tl.int16)
            b_sum += _number(b_entry) * (b_unit * tl.load(p_reach + s))[None, :]
            b_stage = b_next
            b_code = b_code_next
    else:
        for s in tl.range(0, S, loop_unroll_factor=UNROLL):
            b_code = code_at(p + s * BYTES, b_place, b_live, BITS, BLOCK)
            o_entry = (s * K + b_code)[:, None] * RP + r[None, :]
            b_entry = tl.load(p_head + o_entry, mask=b_live[:, None], other=0)
            b_sum += _number(b_entry) * (b_unit * tl.load(p_reach + s))[None, :]
    return b_sum


@triton.jit
def _number(x):
    """Return int16 as float32, as the last bits of one, which is four times as fast as converting."""
    bits = ((x.to(tl.int32) & 0xFFFF) ^ 0x8000) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8421376.0  # 2^23 + 2^15


@triton.constexpr_function
def _word(rows):
    return tl.int64 if rows == 4 else tl.int32 if rows == 2 else tl.int16


@triton.jit(do_not_specialize=["capacity", "tiles"])
def scores_kernel(
    p_codes0, p_table0, p_unit0, p_reach0, p_codes1, p_table1, p_unit1, p_reach1, p_blocks, p_scores, p_stat, capacity,
    tiles, H: tl.constexpr, BLOCK: tl.constexpr, S0: tl.constexpr, K0: tl.constexpr, BITS0: tl.constexpr,
    BYTES0: tl.constexpr, SHARED0: tl.constexpr, S1: tl.constexpr, K1: tl.constexpr, BITS1: tl.constexpr,
    BYTES1: tl.constexpr, SHARED1: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, UNROLL: tl.constexpr,
):
    """Make scores with a grid (tiles of BT tokens, B H): scores (B H, tokens, RP), their maximum and sum of each tile
    (B H, tiles, 2, RP).
    """
    i_head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    tokens = tl.load(p_blocks + i_head // H) * BLOCK
    if tl.program_id(0) * BT >= tokens:  # unused capacity
        both = tl.arange(0, 2 * RP)
        b_none = tl.where(both < RP, LOW, 0.0)
        tl.store(p_stat + (i_head * tiles + tl.program_id(0)) * (2 * RP) + both, b_none)
        return
    b_live = token < tokens
    b_block, b_place = token // BLOCK, token % BLOCK
    b_sum = tl.zeros([BT, RP], tl.float32)
    b_sum = _looked_up(
        p_codes0, p_table0, p_unit0, p_reach0, i_head, b_block, b_place, b_live, b_sum, capacity,
        S0, K0, BITS0, BYTES0, BLOCK, RP, UNROLL, SHARED0,
    )
    if S1 > 0:
        b_sum = _looked_up(
            p_codes1, p_table1, p_unit1, p_reach1, i_head, b_block, b_place, b_live, b_sum, capacity,
            S1, K1, BITS1, BYTES1, BLOCK, RP, UNROLL, SHARED1,
        )
    r = tl.arange(0, RP)
    tl.store(p_scores + (i_head * capacity * BLOCK + token)[:, None] * RP + r[None, :], b_sum, mask=b_live[:, None])
    b_sum = tl.where(b_live[:, None], b_sum, LOW)
    b_most = tl.max(b_sum, 0)
    b_total = tl.sum(tl.where(b_live[:, None], tl.exp2(b_sum - b_most[None, :]), 0.0), 0)
    o_stat = (i_head * tiles + tl.program_id(0)) * (2 * RP) + r
    tl.store(p_stat + o_stat, b_most)
    tl.store(p_stat + o_stat + RP, b_total)


@triton.jit(do_not_specialize=["tiles"])
def total_kernel(p_stat, p_total, p_log, tiles, R: tl.constexpr, RP: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sum the softmax with a grid (B H,): the sum's logarithm to base two (B H, RP) and natural (B H, R)."""
    i_head = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, RP)
    b_most = tl.full([RP], LOW, tl.float32)
    b_total = tl.zeros([RP], tl.float32)
    for first in range(0, tiles, AT_ONCE):
        tile = first + tl.arange(0, AT_ONCE)
        there = (tile < tiles)[:, None]
        o_stat = (i_head * tiles + tile)[:, None] * (2 * RP) + r[None, :]
        most = tl.load(p_stat + o_stat, mask=there, other=LOW)
        total = tl.load(p_stat + o_stat + RP, mask=there, other=0.0)
        b_new = tl.maximum(b_most, tl.max(most, 0))
        b_total = b_total * tl.exp2(b_most - b_new) + tl.sum(total * tl.exp2(most - b_new[None, :]), 0)
        b_most = b_new
    some = b_total > 0
    b_log = b_most + tl.log2(tl.where(some, b_total, 1.0))
    tl.store(p_total + i_head * RP + r, tl.where(some, b_log, LOW))
    tl.store(p_log + i_head * R + r, tl.where(some, b_log * 0.6931471805599453, LOW), mask=r < R)


@triton.jit(do_not_specialize=["capacity"])
def scatter_kernel(
    p_codes, p_blocks, p_scores, p_total, p_weights, capacity,
    H: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, UNROLL: tl.constexpr,
):
    """Add probabilities by code with a grid (tiles of BT tokens, B H): weights (B H, S k, RP) int32 plus the
    probabilities of each code's tokens. Neighbouring lanes take the rows of one token, so that a warp's additions meet
    in a quarter of the sectors (RP = 4).
    """
    i_head = tl.program_id(1).to(tl.int64)
    f = tl.arange(0, BT * RP)
    token, r = tl.program_id(0) * BT + f // RP, f % RP
    tokens = tl.load(p_blocks + i_head // H) * BLOCK
    if tl.program_id(0) * BT >= tokens:
        return
    b_live = (token < tokens) & (r < R)
    b_score = tl.load(p_scores + (i_head * capacity * BLOCK + token) * RP + r, mask=b_live, other=LOW)
    b_p = tl.exp2(b_score - tl.load(p_total + i_head * RP + r))
    b_add = (b_p * UNIT + 0.5).to(tl.int32)
    b_live = b_live & (b_add > 0)
    p = p_codes + (i_head * capacity + token // BLOCK) * (S * BYTES)
    place = token % BLOCK
    p_head = p_weights + i_head * (S * K * RP)
    for s in tl.range(0, S, loop_unroll_factor=UNROLL):
        b_code = code_at(p + s * BYTES, place, b_live, BITS, BLOCK)
        tl.atomic_add(p_head + ((s * K + b_code) * RP + r), b_add, mask=b_live, sem="relaxed")


@triton.jit(do_not_specialize=["groups", "count", "steps"])
def product_kernel(
    p_weights, p_book, p_partial, groups, count, steps,
    d: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    """Multiply with a grid (splits, groups of G kv heads): partial sums (splits, B H, RP, d) of weights times
    codewords, over 2^-15. Weights are left at zero for the next call.
    """
    b_group = tl.program_id(1) * G + tl.arange(0, G)
    j, r = tl.arange(0, BD), tl.arange(0, RP)
    acc = tl.zeros([BD, G * RP], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        code = (tl.program_id(0) * steps + step) * BK + tl.arange(0, BK)
        o_weight = (b_group.to(tl.int64)[:, None] * count + code[None, :])[:, :, None] * RP + r[None, None, :]
        b_there = ((b_group < groups)[:, None] & (code < count)[None, :])[:, :, None]
        b_there = tl.broadcast_to(b_there, [G, BK, RP])
        b_weight = tl.load(p_weights + o_weight, mask=b_there, other=0)
        tl.store(p_weights + o_weight, tl.zeros([G, BK, RP], tl.int32), mask=b_there & (b_weight != 0))
        b_weight = tl.reshape(tl.permute(b_weight, (1, 0, 2)), [BK, G * RP])
        b_half = (b_weight.to(tl.float32) * 2.0**-15).to(tl.float16)
        inside = (code < count)[:, None] & (j < d)[None, :]
        b_book = tl.load(p_book + code[:, None] * d + j[None, :], mask=inside, other=0.0)
        acc = tl.dot(tl.trans(b_book), b_half, acc)
    n = tl.arange(0, G * RP)
    i_head = tl.program_id(1) * G + n // RP
    o_partial = ((tl.program_id(0).to(tl.int64) * groups + i_head) * RP + n % RP) * d
    tl.store(p_partial + o_partial[None, :] + j[:, None], acc, mask=(j < d)[:, None] & (i_head < groups)[None, :])


@triton.jit(do_not_specialize=["groups", "splits"])
def finish_kernel(
    p_partial, p_scale, p_dims, p_out, groups, splits,
    H: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, d: tl.constexpr, SCALED: tl.constexpr,
    BD: tl.constexpr, ASM: tl.constexpr,
):
    """Add up splits in their order with a grid (B H * R,), and store the sums where the band's channels lie."""
    i_head, i_row = tl.program_id(0).to(tl.int64) // R, tl.program_id(0) % R
    j = tl.arange(0, BD)
    b_sum = tl.zeros([BD], tl.float32)
    for split in range(splits):
        b_sum += tl.load(p_partial + ((split * groups + i_head) * RP + i_row) * d + j, mask=j < d, other=0.0)
    o_dim = tl.load(p_dims + j, mask=j < d, other=0)
    b_sum = b_sum * 2.0**-15
    if SCALED:
        b_sum *= tl.load(p_scale + i_head % H * D + o_dim, mask=j < d, other=0.0).to(tl.float32)
    tl.store(p_out + (i_head * R + i_row) * D + o_dim, cast(b_sum, p_out.dtype.element_ty, ASM), mask=j < d)


@triton.jit(do_not_specialize=["capacity"])
def decode_kernel(
    p_codes, p_book, p_scale, p_dims, p_out, capacity,
    H: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    D: tl.constexpr, d: tl.constexpr, SCALED: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Decode with a grid (tiles of BT tokens, B H): a band's channels of out (B, H, tokens, D)."""
    i_head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    b_live = token < capacity * BLOCK
    p = p_codes + (i_head * capacity + token // BLOCK) * (S * BYTES)
    place = token % BLOCK
    j = tl.arange(0, BD)
    inside = b_live[:, None] & (j < d)[None, :]
    b_sum = tl.zeros([BT, BD], tl.float32)
    for s in tl.range(0, S, loop_unroll_factor=UNROLL):
        b_code = code_at(p + s * BYTES, place, b_live, BITS, BLOCK)
        b_sum += tl.load(p_book + (s * K + b_code)[:, None] * d + j[None, :], mask=inside, other=0.0).to(tl.float32)
    o_dim = tl.load(p_dims + j, mask=j < d, other=0)
    if SCALED:
        b_sum *= tl.load(p_scale + i_head % H * D + o_dim, mask=j < d, other=0.0).to(tl.float32)[None, :]
    o_out = (i_head * capacity * BLOCK + token)[:, None] * D + o_dim[None, :]
    tl.store(p_out + o_out, cast(b_sum, p_out.dtype.element_ty, ASM), mask=inside)


@dataclass(frozen=True)
class Launch:
    """Options of a launch. tokens: of a program that looks up through shared memory; few: of one that looks up in L2;
    scattered: of one that adds up by code. unroll: stages in flight of the last two. shared: bytes of a stage's table
    that go through shared memory.
    """

    tokens: int = 2048
    few: int = 256
    scattered: int = 128
    unroll: int = 4
    shared: int = 1 << 15


class Workspace:
    """Memory of one call, reused by the next: tables, scores, and weights, which every call leaves at zero. keeps:
    outgrown tensors are not freed, as graphs recorded with them read and write them.
    """

    def __init__(self, device: torch.device, keeps: bool = False) -> None:
        self.device, self._keeps = device, keeps
        self._tensors: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return `size` numbers; zeros for weights. RuntimeError where a graph that is recorded asks for more than
        there is: zeros would be written by its replays only.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < size:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                have = 0 if tensor is None else tensor.numel()
                raise RuntimeError(
                    f"vector codes: a CUDA graph needs a workspace of {size} numbers for {name}, only {have} are "
                    "reserved: run one step of this shape before recording"
                )
            if tensor is not None and self._keeps:
                self._outgrown.append(tensor)
            with torch.inference_mode(False):
                tensor = self._tensors[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._tensors.values(), *self._outgrown))


def refuses(keys: Coded, values: Coded, rows: int) -> str | None:
    """Return why there is no kernel for these codes and so many query rows a kv head; None if there is one."""
    if rows > MOST_ROWS:
        return f"{rows} query rows a kv head: {MOST_ROWS} at most"
    if len(keys.bands) > 2:
        return f"{len(keys.bands)} bands of keys: two at most"
    narrow = [len(band.dims) for band in (*keys.bands, *values.bands) if len(band.dims) < 16]
    return f"a band of {narrow[0]} dimensions: 16 at least" if narrow else None


def attend(
    q: Tensor,
    keys: Coded,
    values: Coded,
    blocks: Tensor,
    scaling: float,
    workspace: Workspace | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `reference.attend` does, for q float16 or bfloat16 and contiguous codes: out of q's dtype, the logarithm
    float32.
    """
    batch, query_heads, queries = q.shape[:3]
    heads, capacity = keys.bands[0].codes.shape[1:3]
    rows = query_heads // heads * queries
    _check(q, keys, values, blocks)
    space, launch = workspace or Workspace(q.device), launch or Launch()
    groups, wide = batch * heads, triton.next_power_of_2(rows)
    out = torch.zeros_like(q) if not capacity else torch.empty_like(q)
    log = torch.full((batch, query_heads, queries), -1e30, dtype=torch.float32, device=q.device)
    if not capacity:
        return out, log
    with on(q.device):
        tables = [_table(q, keys, band, groups, rows, wide, scaling, space, i) for i, band in enumerate(keys.bands)]
        shared = [wide <= 4 and band.books.shape[1] * wide * 2 <= launch.shared for band in keys.bands]
        tile, warps = (
            (launch.tokens, max(1, launch.tokens // 128)) if all(shared) else (max(16, launch.few * 4 // wide), 4)
        )
        tiles = triton.cdiv(capacity * keys.block, tile)
        scores = space.take("scores", groups * capacity * keys.block * wide, torch.float32)
        stat = space.take("stat", groups * tiles * 2 * wide, torch.float32)
        total = space.take("total", groups * wide, torch.float32)
        first, second = keys.bands[0], keys.bands[-1]
        fixed = {f"{name}0": value for name, value in band_settings(first).items()}
        fixed |= {f"{name}1": value for name, value in band_settings(second).items()}
        fixed |= {"S1": 0} if len(keys.bands) == 1 else {}
        fixed |= {"SHARED0": all(shared), "SHARED1": all(shared)}
        scores_kernel[(tiles, groups)](
            first.codes, *tables[0], first.reach, second.codes, *tables[-1], second.reach, blocks, scores, stat,
            capacity, tiles, H=heads, BLOCK=keys.block, **fixed, RP=wide, BT=tile, UNROLL=launch.unroll,
            num_warps=warps,
        )
        total_kernel[(groups,)](stat, total, log, tiles, R=rows, RP=wide, AT_ONCE=64, num_warps=4)
        for number, band in enumerate(values.bands):
            _weighted(out, values, band, blocks, scores, total, (groups, rows, wide), launch, space, number)
    return out, log


def band_settings(band: Band) -> dict[str, int]:
    """Return the compile-time constants of a band."""
    return {"S": band.books.shape[0], "K": band.books.shape[1], "BITS": band.bits, "BYTES": band.codes.shape[-1]}


def _columns(wide: int) -> int:
    """Return the kv heads that share a read of the codebooks: 32 columns of the products, or all rows of one."""
    return max(1, 32 // wide)


def _table(
    q: Tensor, keys: Coded, band: Band, groups: int, rows: int, wide: int, scaling: float, space: Workspace, number: int
) -> tuple[Tensor, Tensor]:
    """Make the band's table and its rows' units."""
    stages, size, width = band.books.shape
    table = space.take(f"table {number}", groups * stages * size * wide, torch.int16)
    unit = space.take(f"unit {number}", groups * wide, torch.float32)
    together, tile = _columns(wide), 64
    iterations = 4 if stages * size >= 1 << 15 else 1
    grid = (triton.cdiv(stages * size, tile * iterations), triton.cdiv(groups, together))
    tables_kernel[grid](
        q, q if keys.scale is None else keys.scale, band.dims, band.books, band.reach, table, unit, groups,
        stages * size, scaling * LOG2E, H=keys.bands[0].codes.shape[1], R=rows, D=keys.dim, d=width, K=size,
        SCALED=keys.scale is not None, BD=max(16, triton.next_power_of_2(width)), RP=wide, G=together, BC=tile,
        ITERATIONS=iterations, ASM=not interpreted(), num_warps=4,
    )
    return table, unit


def _weighted(
    out: Tensor,
    values: Coded,
    band: Band,
    blocks: Tensor,
    scores: Tensor,
    total: Tensor,
    sizes: tuple[int, int, int],
    launch: Launch,
    space: Workspace,
    number: int,
) -> None:
    """Store the band's channels of out."""
    groups, rows, wide = sizes
    heads, capacity = band.codes.shape[1:3]
    stages, size, width = band.books.shape
    weights = space.take(f"weights {number}", groups * stages * size * wide, torch.int32)
    tile = max(16, launch.scattered * 4 // wide)
    scatter_kernel[(triton.cdiv(capacity * values.block, tile), groups)](
        band.codes, blocks, scores, total, weights, capacity,
        H=heads, BLOCK=values.block, **band_settings(band), R=rows, RP=wide, BT=tile, UNROLL=launch.unroll,
        num_warps=4,
    )
    together, depth = _columns(wide), 64
    columns, steps = triton.cdiv(groups, together), triton.cdiv(stages * size, depth)
    splits = max(1, min(steps, 512 // columns))
    each = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, each)
    partial = space.take("partial", splits * groups * wide * width, torch.float32)
    channels = max(16, triton.next_power_of_2(width))
    product_kernel[(splits, columns)](
        weights, band.books, partial, groups, stages * size, each,
        d=width, BD=channels, RP=wide, G=together, BK=depth, STAGES=2, num_warps=4,
    )
    finish_kernel[(groups * rows,)](
        partial, out if values.scale is None else values.scale, band.dims, out, groups, splits,
        H=heads, R=rows, RP=wide, D=values.dim, d=width, SCALED=values.scale is not None, BD=channels,
        ASM=not interpreted(), num_warps=1,
    )


def decode(coded: Coded, dtype: torch.dtype = torch.float16, out: Tensor | None = None) -> Tensor:
    """Do what `reference.decode` does, in one pass, rounded to float16 or bfloat16; into `out` (B, H, N * b, D) where
    given.
    """
    batch, heads, capacity = coded.bands[0].codes.shape[:3]
    decoded = torch.empty(batch, heads, coded.tokens, coded.dim, dtype=dtype, device=coded.bands[0].codes.device)
    out = decoded if out is None else out
    with on(out.device):
        for band in coded.bands:
            width = band.books.shape[2]
            channels = max(16, triton.next_power_of_2(width))
            tile = 4096 // channels
            decode_kernel[(triton.cdiv(coded.tokens, tile), batch * heads)](
                band.codes, band.books, out if coded.scale is None else coded.scale, band.dims, out, capacity,
                H=heads, BLOCK=coded.block, **band_settings(band), D=coded.dim, d=width, SCALED=coded.scale is not None,
                BD=channels, BT=tile, UNROLL=4, ASM=not interpreted(), num_warps=4,
            )
    return out


def _check(q: Tensor, keys: Coded, values: Coded, blocks: Tensor) -> None:
    """Check shapes, dtypes and strides: the kernels get pointers."""
    batch, heads, capacity = keys.bands[0].codes.shape[:3]
    rows = q.shape[1] // heads * q.shape[2]
    if why := refuses(keys, values, rows):
        raise ValueError(f"attention over vector codes: {why}")
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.is_contiguous():
        raise ValueError(f"queries of {q.dtype}, strides {q.stride()}: must be contiguous float16 or bfloat16")
    if q.shape[0] != batch or q.shape[1] % heads or q.shape[3] != keys.dim or values.dim != keys.dim:
        raise ValueError(f"queries {tuple(q.shape)}: must be ({batch}, a multiple of {heads}, Q, {keys.dim})")
    if blocks.dtype != torch.int32 or blocks.shape != (batch,):
        raise ValueError(f"blocks: {tuple(blocks.shape)} {blocks.dtype}; must be ({batch},) torch.int32")
    for name, coded in (("keys", keys), ("values", values)):
        for band in coded.bands:
            shape = (batch, heads, capacity, band.books.shape[0])
            if band.codes.shape[:4] != shape or not band.codes.is_contiguous() or coded.block != keys.block:
                layout = (
                    f"codes {tuple(band.codes.shape)}, strides {band.codes.stride()}, blocks of {coded.block} tokens"
                )
                raise ValueError(f"{name}: {layout}; must be {(*shape, 'bytes')}, contiguous, of {keys.block} tokens")
            if band.books.dtype != torch.float16 or not band.books.is_contiguous():
                raise ValueError(f"{name}: codebooks of {band.books.dtype}; must be contiguous float16")
