"""`nearest` and `sums` of reference.py for NVIDIA GPUs: distance and arg-min in one kernel, nothing of (n, k) written.

Accuracy. Codewords are float16 and enter the tensor cores as they are; a vector is scaled by a power of two of its own
and rounded to float16 (2^-12 of its largest element); products are exact, sums float32. In this first pass every column
of the tile (FOLD columns together) keeps the best codeword it has seen, score and tile number in one 32-bit word: the
number replaces the score's last log2(FOLD k / BN) mantissa bits (10 of 23 at k = 65536). The best CANDIDATES columns
are then compared by their true distance in float32. So a code differs from the reference's only where two codewords are
equally near to about 2^-12 of the score, or share a column and agree to 13 bits. A vector's code does not depend on the
other vectors.

Speed. A step of 128 x 128 x 128 is 1024 cycles of a Hopper tensor core and 570 instructions a warp, three of them for
each score (scaled, marked, compared). Two programs fit on a multiprocessor, so that one compares while the other
multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import on
from .reference import by_code

WIDEST = 256  # dimensions: a tile of vectors stays in shared memory
CANDIDATES = 4
AT_ONCE = 1 << 20  # vectors a launch: as float16 they take 2 d MiB
FAR = tl.constexpr(1e38)  # a score above all others; its bits are of a finite number whatever tile they are given


def chunks(d: int) -> tuple[int, int, int, int]:
    """Return d, rounded up to a multiple of 16, as powers of two, which block shapes must be: 80 -> (64, 16, 0, 0)."""
    rest = -(-d // 16) * 16
    widths = [width for width in (256, 128, 64, 32, 16) if rest & width]
    return tuple(widths + [0] * (4 - len(widths)))  # type: ignore[return-value]


@triton.jit(do_not_specialize=["n"])  # parts of all lengths take one kernel
def scale_kernel(p_x, p_half, p_unit, n, d: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Store vectors times a power of two each, which brings the largest element into [1, 2), as float16; and one over
    that power.
    """
    i_rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BD)
    inside = (i_rows < n)[:, None] & (cols < d)[None, :]
    o_x = i_rows[:, None] * d + cols[None, :]
    b_x = tl.load(p_x + o_x, mask=inside, other=0.0).to(tl.float32)
    # the exponent; 2^-100 at least, so that both powers exist
    exponent = tl.maximum(tl.max(tl.abs(b_x), 1).to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)
    scale = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    tl.store(p_half + o_x, (b_x * scale[:, None]).to(tl.float16), mask=inside)
    tl.store(p_unit + i_rows, exponent.to(tl.float32, bitcast=True), mask=i_rows < n)


@triton.jit
def load_rows(p, rows, live, start, d, WIDTH: tl.constexpr):
    """Load a chunk of the columns of vectors or codewords, of those that are `live`."""
    cols = start + tl.arange(0, WIDTH)
    inside = live[:, None] & (cols < d)[None, :]
    return tl.load(p + rows[:, None] * d + cols[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["n"])  # parts of all lengths take one kernel
def propose_kernel(
    p_x, p_unit, p_book, p_half, p_candidates, n, k, d: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, TILES: tl.constexpr, INDEX: tl.constexpr,
    EVEN: tl.constexpr, CANDIDATES: tl.constexpr,
):
    """Store the CANDIDATES best codes of BM vectors, best first, vectors as scale_kernel leaves them. D0 to D3: chunks
    of d. TILES of BN codewords; columns j, j + BN / FOLD, … share one best codeword. INDEX: ones where a score's bits
    hold tile and part; EVEN: BN divides k.
    """
    i_rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live = i_rows < n
    x0 = load_rows(p_x, i_rows, live, 0, d, D0)
    if D1 > 0:
        x1 = load_rows(p_x, i_rows, live, D0, d, D1)
    if D2 > 0:
        x2 = load_rows(p_x, i_rows, live, D0 + D1, d, D2)
    if D3 > 0:
        x3 = load_rows(p_x, i_rows, live, D0 + D1 + D2, d, D3)
    unit = tl.load(p_unit + i_rows, mask=live, other=0.0)
    BEST: tl.constexpr = BN // FOLD
    b_best = tl.full([BM, BEST], FAR, tl.float32)
    columns, places = tl.arange(0, BN), tl.arange(0, BEST)
    part = columns // BEST
    for tile in range(TILES):
        codes = tile * BN + columns
        inside = codes < (k if not EVEN else 0x7FFFFFFF)
        b_score = tl.dot(x0, tl.trans(load_rows(p_book, codes, inside, 0, d, D0)))
        if D1 > 0:
            b_score = tl.dot(x1, tl.trans(load_rows(p_book, codes, inside, D0, d, D1)), b_score)
        if D2 > 0:
            b_score = tl.dot(x2, tl.trans(load_rows(p_book, codes, inside, D0 + D1, d, D2)), b_score)
        if D3 > 0:
            b_score = tl.dot(x3, tl.trans(load_rows(p_book, codes, inside, D0 + D1 + D2, d, D3)), b_score)
        half = tl.load(p_half + codes, mask=inside, other=FAR)
        score = half[None, :] - b_score * unit[:, None]  # |x - c|^2 / 2 up to |x|^2 / 2
        marked = (score.to(tl.int32, bitcast=True) & (-1 - INDEX)) | (tile * FOLD + part)[None, :]
        marked = marked.to(tl.float32, bitcast=True)
        if FOLD > 1:
            marked = tl.min(tl.reshape(marked, [BM, FOLD, BEST]), 1)
        b_best = tl.minimum(b_best, marked)
    for i in tl.static_range(CANDIDATES):
        low, column = tl.min(b_best, 1, return_indices=True)
        b_best = tl.where(places[None, :] == column[:, None], FAR, b_best)
        at = low.to(tl.int32, bitcast=True) & INDEX
        code = at // FOLD * BN + at % FOLD * BEST + column
        tl.store(p_candidates + i_rows * CANDIDATES + i, code, mask=live)


@triton.jit(do_not_specialize=["n"])  # parts of all lengths take one kernel
def settle_kernel(
    p_x, p_book, p_candidates, p_codes, n, k,
    d: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, CANDIDATES: tl.constexpr,
):
    """Store for each vector the candidate with the smallest |x - c|^2 in float32, the lowest code on a tie."""
    i_rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live, cols = i_rows < n, tl.arange(0, BD)
    inside = live[:, None] & (cols < d)[None, :]
    b_x = tl.load(p_x + i_rows[:, None] * d + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    b_code = tl.full([BM], 0, tl.int32)
    b_least = tl.full([BM], 3.4e38, tl.float32)
    for i in tl.static_range(CANDIDATES):
        code = tl.load(p_candidates + i_rows * CANDIDATES + i, mask=live, other=0)
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
    """Sum the vectors of one code in one program, in their order, BR at a time."""
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


@dataclass(frozen=True)
class Launch:
    """Options of a launch. rows, columns: vectors and codewords of a step. fold: columns that share one best codeword.
    """

    rows: int = 128
    columns: int = 128
    fold: int = 2
    warps: int = 4
    stages: int = 2


def launch_for(d: int, hopper: bool = True) -> Launch:
    """Return a launch that does not spill registers: 128 vectors of more than 128 dimensions would."""
    if d > 128:
        return Launch(64, 64, 1, 4, 3)
    return Launch() if hopper else Launch(64, 128, 4, 4, 2)


def propose_settings(d: int, k: int, launch: Launch) -> dict[str, int]:
    """Return the compile-time constants of propose_kernel."""
    tiles = -(-k // launch.columns)
    return {
        "d": d,
        **{f"D{i}": width for i, width in enumerate(chunks(d))},
        "BM": launch.rows,
        "BN": launch.columns,
        "FOLD": launch.fold,
        "TILES": tiles,
        "INDEX": (1 << (tiles * launch.fold - 1).bit_length()) - 1,
        "EVEN": k % launch.columns == 0,
        "CANDIDATES": CANDIDATES,
    }


def nearest(x: Tensor, codebook: Tensor, launch: Launch | None = None) -> Tensor:
    """Do what `reference.nearest` does, up to the accuracy stated above; codebook float16, d at most 256."""
    if codebook.dtype != torch.float16 or x.shape[1] > WIDEST:
        raise ValueError(f"codebook {codebook.dtype} of dimension {x.shape[1]}: needs float16, at most {WIDEST}")
    k, d = codebook.shape
    launch = launch or launch_for(d, not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] >= 9)
    x, book = x.contiguous(), codebook.contiguous()
    half = 0.5 * book.float().square().sum(-1)
    out = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[0], AT_ONCE):
        part, codes = x[start : start + AT_ONCE], out[start : start + AT_ONCE]
        _nearest(part, book, half, codes, propose_settings(d, k, launch), launch)
    return out


def _nearest(
    x: Tensor, book: Tensor, half: Tensor, codes: Tensor, settings: dict[str, int], launch: Launch
) -> None:
    (n, d), k = x.shape, book.shape[0]
    wide = triton.next_power_of_2(d)
    scaled = torch.empty(n, d, dtype=torch.float16, device=x.device)
    unit = torch.empty(n, dtype=torch.float32, device=x.device)
    candidates = torch.empty(n, CANDIDATES, dtype=torch.int32, device=x.device)
    settle = {"d": d, "BM": 32, "BD": wide, "CANDIDATES": CANDIDATES}
    with on(x.device):
        scale_kernel[(triton.cdiv(n, 32),)](x, scaled, unit, n, d=d, BM=32, BD=wide, num_warps=4)
        propose_kernel[(triton.cdiv(n, launch.rows),)](
            scaled, unit, book, half, candidates, n, k, **settings, num_warps=launch.warps, num_stages=launch.stages
        )
        settle_kernel[(triton.cdiv(n, 32),)](x, book, candidates, codes, n, k, **settle, num_warps=4)


def sums(x: Tensor, codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what `reference.sums` does; the same bits on every run."""
    order, offsets = by_code(codes, k)
    added = torch.empty(k, x.shape[1], dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(x.shape[1])
    with on(x.device):
        sums_kernel[(k,)](x.contiguous(), order, offsets, added, d=x.shape[1], BR=32, BD=wide, num_warps=4)
    return offsets.diff(), added
