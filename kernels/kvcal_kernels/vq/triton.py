"""`nearest` and `sums` of reference.py for NVIDIA GPUs: distance and arg-min in one kernel, nothing of (n, k) written.

Accuracy. Codewords are float16 and enter the tensor cores as they are; a vector is scaled by a power of two of its own
and rounded to float16 (2^-12 of its largest element); products are exact, sums float32. In this first pass every column of
the tile keeps the best codeword it has seen, score and tile number in one 32-bit word: the number replaces the score's
last log2(k / BN) mantissa bits (10 of 23 at k = 65536). The best CANDIDATES columns are then compared by their true
distance in float32. So a code differs from the reference's only where two codewords are equally near to about 2^-12 of
the score, or lie in one column of the tile and agree to 13 bits. A vector's code does not depend on the other vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import by_code

WIDEST = 256  # dimensions: a tile of vectors stays in shared memory
CANDIDATES = 4
AT_ONCE = 1 << 22  # vectors a launch: their candidates take 64 MiB
FAR = tl.constexpr(1e38)  # a score above all others; its bits are of a finite number whatever tile they are given


def chunks(d: int) -> tuple[int, int, int, int]:
    """d, rounded up to a multiple of 16, as powers of two, which block shapes must be: 80 -> (64, 16, 0, 0)."""
    rest = -(-d // 16) * 16
    found = [width for width in (256, 128, 64, 32, 16) if rest & width]
    return tuple(found + [0] * (4 - len(found)))  # type: ignore[return-value]


@triton.jit
def _load(p, rows, live, start, d, WIDTH: tl.constexpr):
    cols = start + tl.arange(0, WIDTH)
    inside = live[:, None] & (cols < d)[None, :]
    return tl.load(p + rows[:, None] * d + cols[None, :], mask=inside, other=0.0)


@triton.jit
def _peak(p, rows, live, start, d, WIDTH: tl.constexpr):
    """Largest |x| of a chunk."""
    return tl.max(tl.abs(_load(p, rows, live, start, d, WIDTH).to(tl.float32)), 1)


@triton.jit
def _scaled(p, rows, live, start, d, scale, WIDTH: tl.constexpr):
    return (_load(p, rows, live, start, d, WIDTH).to(tl.float32) * scale[:, None]).to(tl.float16)


@triton.jit
def propose_kernel(
    p_x, p_book, p_half, p_found, n, k, d: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, INDEX: tl.constexpr, EVEN: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The CANDIDATES best codes of BM vectors, best first. D0 to D3: chunks of d. TILES of BN codewords; INDEX: ones
    where a score's bits hold the tile; EVEN: BN divides k.
    """
    i_rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live = i_rows < n
    peak = _peak(p_x, i_rows, live, 0, d, D0)
    if D1 > 0:
        peak = tl.maximum(peak, _peak(p_x, i_rows, live, D0, d, D1))
    if D2 > 0:
        peak = tl.maximum(peak, _peak(p_x, i_rows, live, D0 + D1, d, D2))
    if D3 > 0:
        peak = tl.maximum(peak, _peak(p_x, i_rows, live, D0 + D1 + D2, d, D3))
    # a power of two that brings the largest element into [1, 2), from its exponent; 2^-100 at least, so that both exist
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)
    unit = exponent.to(tl.float32, bitcast=True)
    scale = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    x0 = _scaled(p_x, i_rows, live, 0, d, scale, D0)
    if D1 > 0:
        x1 = _scaled(p_x, i_rows, live, D0, d, scale, D1)
    if D2 > 0:
        x2 = _scaled(p_x, i_rows, live, D0 + D1, d, scale, D2)
    if D3 > 0:
        x3 = _scaled(p_x, i_rows, live, D0 + D1 + D2, d, scale, D3)
    b_best = tl.full([BM, BN], FAR, tl.float32)
    columns = tl.arange(0, BN)
    for tile in range(TILES):
        codes = tile * BN + columns
        known = codes < (k if not EVEN else 0x7FFFFFFF)
        b_score = tl.dot(x0, tl.trans(_load(p_book, codes, known, 0, d, D0)))
        if D1 > 0:
            b_score = tl.dot(x1, tl.trans(_load(p_book, codes, known, D0, d, D1)), b_score)
        if D2 > 0:
            b_score = tl.dot(x2, tl.trans(_load(p_book, codes, known, D0 + D1, d, D2)), b_score)
        if D3 > 0:
            b_score = tl.dot(x3, tl.trans(_load(p_book, codes, known, D0 + D1 + D2, d, D3)), b_score)
        half = tl.load(p_half + codes, mask=known, other=FAR)
        score = half[None, :] - b_score * unit[:, None]  # |x - c|^2 / 2 up to |x|^2 / 2
        marked = (score.to(tl.int32, bitcast=True) & (-1 - INDEX)) | tile
        b_best = tl.minimum(b_best, marked.to(tl.float32, bitcast=True))
    for i in tl.static_range(CANDIDATES):
        low, column = tl.min(b_best, 1, return_indices=True)
        b_best = tl.where(columns[None, :] == column[:, None], FAR, b_best)
        tile = low.to(tl.int32, bitcast=True) & INDEX
        tl.store(p_found + i_rows * CANDIDATES + i, tile * BN + column, mask=live)


@triton.jit
def settle_kernel(
    p_x, p_book, p_found, p_codes, n, k,
    d: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Of each vector's candidates the one with the smallest |x - c|^2 in float32, the lowest code on a tie."""
    i_rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live, cols = i_rows < n, tl.arange(0, BD)
    inside = live[:, None] & (cols < d)[None, :]
    b_x = tl.load(p_x + i_rows[:, None] * d + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    b_code = tl.full([BM], 0, tl.int32)
    b_least = tl.full([BM], 3.4e38, tl.float32)
    for i in tl.static_range(CANDIDATES):
        code = tl.load(p_found + i_rows * CANDIDATES + i, mask=live, other=0)
        there = inside & (code < k)[:, None]  # a column that never saw a codeword names none
        b_c = tl.load(p_book + code[:, None] * d + cols[None, :], mask=there, other=0.0).to(tl.float32)
        distance = tl.sum((b_x - b_c) * (b_x - b_c), 1)
        nearer = (distance < b_least) | ((distance == b_least) & (code < b_code))
        nearer = nearer & (code < k)
        b_code = tl.where(nearer, code, b_code)
        b_least = tl.where(nearer, distance, b_least)
    tl.store(p_codes + i_rows, b_code, mask=live)


@triton.jit
def sums_kernel(p_x, p_order, p_offsets, p_sums, d: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """One program a code: its vectors in their order, BR at a time."""
    code = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(p_offsets + code), tl.load(p_offsets + code + 1)
    cols = tl.arange(0, BD)
    b_sum = tl.zeros([BD], tl.float32)
    for at in range(start, stop, BR):
        place = at + tl.arange(0, BR)
        rows = tl.load(p_order + place, mask=place < stop, other=0)
        inside = (place < stop)[:, None] & (cols < d)[None, :]
        b_sum += tl.sum(tl.load(p_x + rows[:, None] * d + cols[None, :], mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(p_sums + code * d + cols, b_sum, mask=cols < d)


def propose_settings(d: int, k: int) -> dict[str, int | bool]:
    """Compile-time constants of propose_kernel."""
    widths = chunks(d)
    rows, columns = (128 if d <= 128 else 64), 64  # 128 vectors of 256 dimensions would spill registers
    tiles = -(-k // columns)
    return {
        "d": d,
        **{f"D{i}": width for i, width in enumerate(widths)},
        "BM": rows,
        "BN": columns,
        "TILES": tiles,
        "INDEX": (1 << (tiles - 1).bit_length()) - 1,
        "EVEN": k % columns == 0,
        "CANDIDATES": CANDIDATES,
    }


LAUNCH = {"num_warps": 4, "num_stages": 3}


def nearest(x: Tensor, codebook: Tensor) -> Tensor:
    """As reference.nearest up to the accuracy stated above; codebook float16, d at most 256."""
    if codebook.dtype != torch.float16 or x.shape[1] > WIDEST:
        raise ValueError(f"codebook {codebook.dtype} of dimension {x.shape[1]}: needs float16, at most {WIDEST}")
    k, d = codebook.shape
    x, book = x.contiguous(), codebook.contiguous()
    half = 0.5 * book.float().square().sum(-1)
    out = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    settings, wide = propose_settings(d, k), triton.next_power_of_2(d)
    for start in range(0, x.shape[0], AT_ONCE):
        part, codes = x[start : start + AT_ONCE], out[start : start + AT_ONCE]
        n = part.shape[0]
        found = torch.empty(n, CANDIDATES, dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(n, settings["BM"]),)
        propose_kernel[grid](part, book, half, found, n, k, **settings, **LAUNCH)
        settle = {"d": d, "BM": 32, "BD": wide, "CANDIDATES": CANDIDATES}
        settle_kernel[(triton.cdiv(n, 32),)](part, book, found, codes, n, k, **settle, num_warps=4)
    return out


def sums(x: Tensor, codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As reference.sums; the same bits on every run."""
    order, offsets = by_code(codes, k)
    added = torch.empty(k, x.shape[1], dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(x.shape[1])
    sums_kernel[(k,)](x.contiguous(), order, offsets, added, d=x.shape[1], BR=32, BD=wide, num_warps=4)
    return offsets.diff(), added
