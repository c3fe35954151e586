"""`append` of reference.py for NVIDIA GPUs. The grid follows from shapes alone, programs read on the device whether a
block is due and return at once where none is: one launch for the windows, two for each band.

A code depends on nothing but its vector. So a program takes as many vectors of a band as a step of the search in
residual_vq/nearest/triton.py and runs all stages, with that search's numbers: the residuals of the vectors lie in a
workspace in between, a program's own part. Codes of a block are packed by a second launch, as bytes hold codes of
tokens that lie far apart.

Once in `block` steps a row has a block due; 26 GFLOP a layer and row for 1024 tokens of 8 heads, 3 stages of 4096
codewords.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import launch_key
from ...packing.triton import store_codes
from ...quantise.reference import NO_SLOT as NO_SLOT_
from ...quantise.reference import NONFINITE as NONFINITE_
from ...quantise.reference import VALUES, Counts
from ...triton import Prepared, Ready, interpreted
from ..attention import Band, Coded
from ..attention.triton import Workspace
from ..nearest.triton import FAR, WIDEST, launch_for, load_rows, propose_settings
from .reference import LARGEST as LARGEST_
from .reference import Pair

NONFINITE, NO_SLOT, LARGEST = tl.constexpr(NONFINITE_), tl.constexpr(NO_SLOT_), tl.constexpr(LARGEST_)
AT_ONCE = 16  # dimensions of vectors and codewords that lie in registers next to each other


@triton.jit
def _moved(
    p_new, p_sink, p_ring, i_head, o_row, new, token, before, taken, sink_before, window, sink_capacity, ring_capacity,
    token_stride, D: tl.constexpr, BD: tl.constexpr,
):
    """Move real token number `token` of a call to its place in sink or ring."""
    cols = tl.arange(0, BD)
    inside = (cols < D) & (token >= 0) & (token < new)
    b_x = tl.load(p_new + o_row + token * token_stride + cols, mask=inside, other=0.0)
    into = token < taken
    o_sink = (i_head * sink_capacity + sink_before + token) * D + cols
    tl.store(p_sink + o_sink, b_x, mask=inside & into)
    slot = (before * 32 + window + token - taken) % ring_capacity
    tl.store(p_ring + (i_head * ring_capacity + slot) * D + cols, b_x, mask=inside & (token >= taken))


@triton.jit(do_not_specialize=["batch", "queries", "sink_capacity", "ring_capacity"])
def windows_kernel(
    p_k, p_v, p_sink_k, p_sink_v, p_ring_k, p_ring_v, p_counts, batch, queries, sink_capacity, ring_capacity,
    k_batch, k_head, k_token, v_batch, v_head, v_token, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):
    """Store a new token's key and value with a grid (queries, H, batch)."""
    i_kv, i_row = tl.program_id(1), tl.program_id(2)
    i_head = (i_row * H + i_kv).to(tl.int64)
    p_row = p_counts + i_row
    sink_before, window, before = tl.load(p_row), tl.load(p_row + batch), tl.load(p_row + 2 * batch)
    new, sink = tl.load(p_row + 3 * batch), tl.load(p_row + 4 * batch)
    first = queries - new  # pads are before a row's real tokens
    token = tl.program_id(0) - first
    o_k = i_row.to(tl.int64) * k_batch + i_kv.to(tl.int64) * k_head + first.to(tl.int64) * k_token
    o_v = i_row.to(tl.int64) * v_batch + i_kv.to(tl.int64) * v_head + first.to(tl.int64) * v_token
    _moved(
        p_k, p_sink_k, p_ring_k, i_head, o_k, new, token, before, sink - sink_before, sink_before, window,
        sink_capacity, ring_capacity, k_token, D, BD,
    )
    _moved(
        p_v, p_sink_v, p_ring_v, i_head, o_v, new, token, before, sink - sink_before, sink_before, window,
        sink_capacity, ring_capacity, v_token, D, BD,
    )


@triton.jit
def _scaled(p_rest, o_rest, live, scale, start, d, WIDTH: tl.constexpr):
    """Load a chunk of the residuals of vectors, times a power of two each, as float16."""
    cols = start + tl.arange(0, WIDTH)
    inside = live[:, None] & (cols < d)[None, :]
    b_x = tl.load(p_rest + o_rest[:, None] + cols[None, :], mask=inside, other=0.0)
    return (b_x * scale[:, None]).to(tl.float16)


@triton.jit
def _residual(p_rest, o_rest, p_book, code, live, cols, d):
    """Return some columns of vectors less those of codewords."""
    inside = live[:, None] & (cols < d)[None, :]
    b_c = tl.load(p_book + code[:, None] * d + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.load(p_rest + o_rest[:, None] + cols[None, :], mask=inside, other=0.0) - b_c


@triton.jit
def _nearest_of(
    p_rest, o_rest, p_book, b_best, live, K: tl.constexpr, d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BEST: tl.constexpr, FOLD: tl.constexpr, INDEX: tl.constexpr, CANDIDATES: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Return the nearest codeword of each of BM vectors, int32, in float32 and of equals the first, among CANDIDATES of
    the columns' best, whose numbers lie in the low bits of b_best [BM, BEST].
    """
    places, cols = tl.arange(0, BEST), tl.arange(0, AT_ONCE)
    b_code = tl.full([BM], 0, tl.int32)
    b_least = tl.full([BM], 3.4e38, tl.float32)
    for _ in tl.static_range(CANDIDATES):
        low, column = tl.min(b_best, 1, return_indices=True)
        b_best = tl.where(places[None, :] == column[:, None], FAR, b_best)
        at = low.to(tl.int32, bitcast=True) & INDEX
        code = at // FOLD * BN + at % FOLD * BEST + column
        there = live & (code < K)  # a column that never saw a codeword names none
        distance = tl.zeros([BM], tl.float32)
        for start in tl.static_range(0, d, AT_ONCE):
            off = _residual(p_rest, o_rest, p_book, code, there, start + cols, d)
            distance += tl.sum(off * off, 1)
        nearer = (distance < b_least) | ((distance == b_least) & (code < b_code))
        nearer = nearer & (code < K)
        b_code = tl.where(nearer, code, b_code)
        b_least = tl.where(nearer, distance, b_least)
    return b_code


@triton.jit(do_not_specialize=["batch", "capacity", "ring_capacity"])
def encode_kernel(
    p_ring, p_scale, p_dims, p_book, p_half, p_rest, p_codes, p_counts, p_flags, batch, capacity, ring_capacity,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr,
    SHIFT: tl.constexpr, AT_ONCE: tl.constexpr, ASM: tl.constexpr, d: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, TILES: tl.constexpr, INDEX: tl.constexpr,
    EVEN: tl.constexpr, CANDIDATES: tl.constexpr,
):
    """Encode with a grid (tiles of BM tokens, H, batch): a band's codes (B, H, S, BLOCK) int32 of the oldest block in
    the ring, where due. rest (B, H, BLOCK, d) float32: the residuals of the stages. The search is that of
    propose_kernel and settle_kernel in residual_vq/nearest/triton.py.
    """
    i_kv, i_row = tl.program_id(1), tl.program_id(2)
    before = tl.load(p_counts + 2 * batch + i_row)
    if tl.load(p_counts + 7 * batch + i_row) == before:
        return
    i_head = (i_row * H + i_kv).to(tl.int64)
    if before // (BLOCK // 32) >= capacity:
        tl.atomic_or(p_flags + i_kv, NO_SLOT << SHIFT)
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    live, cols = token < BLOCK, tl.arange(0, AT_ONCE)
    p_ring += i_head * ring_capacity * D
    p_rest += i_head * (BLOCK * d)
    o_ring, o_rest = (before * 32 + token) % ring_capacity * D, token * d
    for start in tl.static_range(0, d, AT_ONCE):
        inside = live[:, None] & (start + cols < d)[None, :]
        dims = tl.load(p_dims + start + cols, mask=start + cols < d, other=0)
        b_x = tl.load(p_ring + o_ring[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            by = tl.load(p_scale + i_kv * D + dims, mask=start + cols < d, other=1.0).to(tl.float32)
            by = tl.broadcast_to(by[None, :], [BM, AT_ONCE])
            b_x = tl.div_rn(b_x, by) if ASM else b_x / by
        fits = tl.abs(b_x) <= LARGEST  # not where it is NaN
        if tl.max(tl.max((~fits).to(tl.int32), 1), 0) > 0:
            tl.atomic_or(p_flags + i_kv, NONFINITE << SHIFT)
        tl.store(p_rest + o_rest[:, None] + (start + cols)[None, :], tl.where(fits, b_x, 0.0), mask=inside)
    BEST: tl.constexpr = BN // FOLD
    columns = tl.arange(0, BN)
    part = columns // BEST
    for s in range(S):
        tl.debug_barrier()  # residuals that other threads stored
        p_stage = p_book + s * (K * d)
        b_peak = tl.zeros([BM], tl.float32)
        for start in tl.static_range(0, d, AT_ONCE):
            inside = live[:, None] & (start + cols < d)[None, :]
            b_x = tl.load(p_rest + o_rest[:, None] + (start + cols)[None, :], mask=inside, other=0.0)
            b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_x), 1))
        exponent = tl.maximum(b_peak.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)
        scale, unit = ((254 << 23) - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)
        x0 = _scaled(p_rest, o_rest, live, scale, 0, d, D0)
        if D1 > 0:
            x1 = _scaled(p_rest, o_rest, live, scale, D0, d, D1)
        if D2 > 0:
            x2 = _scaled(p_rest, o_rest, live, scale, D0 + D1, d, D2)
        if D3 > 0:
            x3 = _scaled(p_rest, o_rest, live, scale, D0 + D1 + D2, d, D3)
        b_best = tl.full([BM, BEST], FAR, tl.float32)
        for tile in range(TILES):
            codes = tile * BN + columns
            in_book = codes < (K if not EVEN else 0x7FFFFFFF)
            b_score = tl.dot(x0, tl.trans(load_rows(p_stage, codes, in_book, 0, d, D0)))
            if D1 > 0:
                b_score = tl.dot(x1, tl.trans(load_rows(p_stage, codes, in_book, D0, d, D1)), b_score)
            if D2 > 0:
                b_score = tl.dot(x2, tl.trans(load_rows(p_stage, codes, in_book, D0 + D1, d, D2)), b_score)
            if D3 > 0:
                b_score = tl.dot(x3, tl.trans(load_rows(p_stage, codes, in_book, D0 + D1 + D2, d, D3)), b_score)
            half = tl.load(p_half + s * K + codes, mask=in_book, other=FAR)
            score = half[None, :] - b_score * unit[:, None]
            marked = (score.to(tl.int32, bitcast=True) & (-1 - INDEX)) | (tile * FOLD + part)[None, :]
            marked = marked.to(tl.float32, bitcast=True)
            if FOLD > 1:
                marked = tl.min(tl.reshape(marked, [BM, FOLD, BEST]), 1)
            b_best = tl.minimum(b_best, marked)
        b_code = _nearest_of(
            p_rest, o_rest, p_stage, b_best, live, K, d, BM, BN, BEST, FOLD, INDEX, CANDIDATES, AT_ONCE
        )
        tl.store(p_codes + (i_head * S + s) * BLOCK + token, b_code, mask=live)
        tl.debug_barrier()  # others have read the residual
        for start in tl.static_range(0, d, AT_ONCE):
            inside = live[:, None] & (start + cols < d)[None, :]
            off = _residual(p_rest, o_rest, p_stage, b_code, live, start + cols, d)
            tl.store(p_rest + o_rest[:, None] + (start + cols)[None, :], off, mask=inside)


@triton.jit(do_not_specialize=["batch", "capacity"])
def pack_kernel(
    p_codes, p_packed, p_counts, batch, capacity,
    H: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
):
    """Pack with a grid (S, H, batch): codes (B, H, S, BLOCK) go to the slot (B, H, N, S, BYTES) of the block that is
    due.
    """
    i_stage, i_row = tl.program_id(0), tl.program_id(2)
    before = tl.load(p_counts + 2 * batch + i_row)
    slot = before // (BLOCK // 32)
    if (tl.load(p_counts + 7 * batch + i_row) == before) | (slot >= capacity):
        return
    i_head = (i_row * H + tl.program_id(1)).to(tl.int64)
    store_codes(
        p_packed + ((i_head * capacity + slot) * S + i_stage) * BYTES, p_codes + (i_head * S + i_stage) * BLOCK, BITS,
        BLOCK,
    )


def append(
    keys: Coded,
    values: Coded,
    sink: Pair,
    ring: Pair,
    counts: Counts,
    flags: Tensor,
    k: Tensor,
    v: Tensor,
    workspace: Workspace | None = None,
) -> None:
    """Do what `reference.append` does; codes are as near as residual_vq/nearest/triton.py says. A `workspace` of its
    own is needed where launches overlap, and under a CUDA graph.
    """
    _check(keys, values, sink, ring, counts, flags, k, v)
    batch, heads, queries, dim = k.shape
    space = workspace or Workspace(k.device)
    tensors = k, v, *sink, *ring, counts.data
    name = tuple(map(launch_key, tensors))
    if name not in _PREPARED:
        numbers = batch, queries, sink[0].shape[2], ring[0].shape[2], *k.stride()[:3], *v.stride()[:3]
        options = {"H": heads, "D": dim, "BD": triton.next_power_of_2(dim), "num_warps": 1}
        _PREPARED[name] = [(Ready(windows_kernel, (queries, heads, batch), options), numbers)]
    [(ready, numbers)] = _PREPARED[name]
    ready(tensors, *numbers)
    for coded, recent, shift in ((keys, ring[0], 0), (values, ring[1], VALUES)):
        for band in coded.bands:
            _encode(coded, band, recent, counts, flags, shift, space)


_PREPARED: Prepared[list[tuple[Ready, tuple[int, ...]]]] = Prepared()  # launches of windows; of a band's two kernels


def settings(band: Band, block: int, hopper: bool) -> dict[str, int]:
    """Return the compile-time constants of encode_kernel that follow from a band, and its launch."""
    stages, size, width = band.books.shape
    launch = launch_for(width, hopper)
    rows = min(launch.rows, max(16, triton.next_power_of_2(block)))
    constants = propose_settings(width, size, launch) | {"BM": rows, "S": stages, "K": size}
    warps = launch.warps * (2 if hopper else 1)  # with the scores of 128 vectors four warps had no registers left
    return constants | {"BLOCK": block, "AT_ONCE": AT_ONCE, "num_warps": warps, "num_stages": launch.stages}


def _scratch(coded: Coded, band: Band, space: Workspace) -> tuple[Tensor, Tensor]:
    """Return memory for the residuals of a block's vectors, float32, and for their codes, int32."""
    (batch, heads), (stages, _, width) = band.codes.shape[:2], band.books.shape
    tokens = batch * heads * coded.block
    return space.take("rest", tokens * width, torch.float32), space.take("codes", tokens * stages, torch.int32)


def reserve(keys: Coded, values: Coded, space: Workspace) -> None:
    """Reserve the memory of any `append` to these codes."""
    for coded in (keys, values):
        for band in coded.bands:
            _scratch(coded, band, space)


def _encode(
    coded: Coded, band: Band, ring: Tensor, counts: Counts, flags: Tensor, shift: int, space: Workspace
) -> None:
    rest, codes = _scratch(coded, band, space)
    scaled = coded.scale is not None
    tensors = (
        ring, coded.scale if coded.scale is not None else ring, band.dims, band.books, band.halves, rest, codes,
        counts.data, flags,
    )
    name = (shift, scaled, coded.block, band.bits, launch_key(band.codes), *map(launch_key, tensors))
    if name not in _PREPARED:
        batch, heads, capacity, stages, size = band.codes.shape
        constants = settings(
            band, coded.block, not ring.is_cuda or torch.cuda.get_device_capability(ring.device)[0] >= 9
        )
        constants |= {"H": heads, "D": ring.shape[3], "SCALED": scaled, "SHIFT": shift, "ASM": not interpreted()}
        packs = {"H": heads, "BLOCK": coded.block, "S": stages, "BITS": band.bits, "BYTES": size, "num_warps": 4}
        encode = Ready(encode_kernel, (triton.cdiv(coded.block, constants["BM"]), heads, batch), constants)
        pack = Ready(pack_kernel, (stages, heads, batch), packs)
        _PREPARED[name] = [(encode, (batch, capacity, ring.shape[2])), (pack, (batch, capacity))]
    (encode, numbers), (pack, pack_numbers) = _PREPARED[name]
    encode(tensors, *numbers)
    pack((codes, band.codes, counts.data), *pack_numbers)


def _check(
    keys: Coded, values: Coded, sink: Pair, ring: Pair, counts: Counts, flags: Tensor, k: Tensor, v: Tensor
) -> None:
    """Check shapes, dtypes and strides: the kernels get pointers."""
    batch, heads, queries, dim = k.shape
    windows = counts.windows
    if queries > windows.block:
        raise ValueError(f"{queries} new tokens: at most a block, {windows.block}")
    for name, x, first, recent, coded in (
        ("keys", k, *_first(sink, ring, 0), keys),
        ("values", v, *_first(sink, ring, 1), values),
    ):
        least = windows.recent + windows.block - 1 + queries
        for what, one, tokens in (("sink", first, windows.sink), ("ring", recent, least)):
            if one.shape != (batch, heads, one.shape[2], dim) or one.shape[2] < tokens or not one.is_contiguous():
                shape = f"{what} of {name} {tuple(one.shape)}, strides {one.stride()}"
                raise ValueError(f"{shape}: must be ({batch}, {heads}, at least {tokens}, {dim}), contiguous")
        if x.shape != k.shape or {x.dtype, first.dtype, recent.dtype} != {k.dtype} or x.stride(3) != 1:
            shape = f"{name} {tuple(x.shape)} {x.dtype}, strides {x.stride()}"
            raise ValueError(f"{shape}: must be {tuple(k.shape)} {k.dtype} as keys, sink and ring, channels contiguous")
        if coded.block != windows.block or coded.dim != dim:
            raise ValueError(f"{name} of blocks of {coded.block} x {coded.dim}: must be {windows.block} x {dim}")
        _check_bands(name, coded, batch, heads)
    if counts.data.shape[1] != batch or flags.shape != (heads,) or flags.dtype != torch.int32:
        raise ValueError(
            f"counts of {counts.data.shape[1]} rows, flags {tuple(flags.shape)}: {batch} and int32 ({heads},)"
        )


def _check_bands(name: str, coded: Coded, batch: int, heads: int) -> None:
    for band in coded.bands:
        if band.codes.shape[:2] != (batch, heads) or not band.codes.is_contiguous():
            raise ValueError(
                f"{name}, codes {tuple(band.codes.shape)}: must be ({batch}, {heads}, ...), contiguous"
            )
        if band.books.dtype != torch.float16 or not band.books.is_contiguous() or band.books.shape[2] > WIDEST:
            shape = f"codebooks {tuple(band.books.shape)} {band.books.dtype}"
            raise ValueError(f"{name}, {shape}: must be contiguous float16, at most {WIDEST} dimensions")


def _first(sink: Pair, ring: Pair, role: int) -> Pair:
    return sink[role], ring[role]
