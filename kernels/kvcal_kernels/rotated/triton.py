"""`encode` of reference.py for NVIDIA GPUs: rotation, norm and nearest point in one launch; a program takes a few whole
tokens.

Nothing is fused but what the reference's addcmul fuses (enable_fp_fusion=False): scores are half |g|^2 - x_0 g_0, then
one fused operation for each further number, and the first of the lowest is taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hadamard import largest_power_of_two
from ..triton import interpreted
from . import reference
from .reference import Rotated

NONFINITE, SCALE = tl.constexpr(reference.NONFINITE), tl.constexpr(reference.SCALE)
HALF_MAX, LEAST = tl.constexpr(reference.HALF_MAX), tl.constexpr(reference.LEAST)
NUMBERS = 4096  # of a program


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    y = tl.permute(tl.reshape(x, [ROWS, N // (2 * STEP), 2, STEP]), (0, 1, 3, 2))
    low, high = tl.split(y)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), [ROWS, N])


@triton.jit
def _tree(x, ROWS: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr):
    """tree_sum of [ROWS, N], N = 2^LOG -> [ROWS]."""
    for i in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, [ROWS, 2, N >> (i + 1)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def _nearest(parts, p_points, p_half, n, D: tl.constexpr, ASM: tl.constexpr):
    """The first nearest point to tuples given as D tensors of one shape."""
    best = tl.zeros_like(parts[0]) + float("inf")
    code = tl.zeros_like(parts[0]).to(tl.int32)
    for i in range(n):
        score = tl.load(p_half + i) - parts[0] * tl.load(p_points + i * D)
        for axis in tl.static_range(1, D):
            g = tl.load(p_points + i * D + axis)
            if ASM:
                score = tl.fma(-parts[axis], g, score)
            else:  # the interpreter's is not fused: in float64 the product is exact
                score = (score.to(tl.float64) - parts[axis].to(tl.float64) * g.to(tl.float64)).to(tl.float32)
        better = score < best
        best = tl.where(better, score, best)
        code = tl.where(better, i, code)
    return code


@triton.jit(do_not_specialize=["tokens", "n"])
def encode_kernel(
    p_x, p_sign, p_points, p_half, p_codes, p_norm, p_flags, tokens, n, batch_stride, head_stride, token_stride,
    scale, gain,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, NORMS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    LOG_WIDTH: tl.constexpr, LOG_NORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / ROWS, batch). scale: WIDTH^-0.5."""
    N: tl.constexpr = HEADS * DIM
    i_batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    at = tl.arange(0, N)
    o_x = i_batch * batch_stride + (at // DIM).to(tl.int64) * head_stride + at % DIM
    x = tl.load(
        p_x + o_x[None, :] + token.to(tl.int64)[:, None] * token_stride, mask=live[:, None], other=0.0
    ).to(tl.float32)  # fmt: skip
    nothing = x * 0.0
    x = x * tl.load(p_sign + at).to(tl.float32)[None, :] * scale
    for i in tl.static_range(LOG_WIDTH):
        x = _butterfly(x, ROWS, N, 1 << i)
    groups = tl.reshape(x, [ROWS * NORMS, N // NORMS])
    norm = _tree(groups * groups, ROWS * NORMS, N // NORMS, LOG_NORM) * (1.0 / (N // NORMS))
    norm = (tl.sqrt_rn(norm) if ASM else tl.sqrt(norm)) * gain
    stored = norm.to(tl.float16)
    size = tl.maximum(stored.to(tl.float32), LEAST)
    unit = (tl.div_rn(tl.full([ROWS * NORMS], 1.0, tl.float32), size) if ASM else 1.0 / size) * gain
    scaled = tl.reshape(groups * unit[:, None], [ROWS, N])
    if D == 1:
        parts = (scaled,)
    else:
        low, high = tl.split(tl.reshape(scaled, [ROWS, N // 2, 2]))
        if D == 2:
            parts = (low, high)
        else:
            x0, x2 = tl.split(tl.reshape(low, [ROWS, N // 4, 2]))
            x1, x3 = tl.split(tl.reshape(high, [ROWS, N // 4, 2]))
            parts = (x0, x1, x2, x3)
    code = _nearest(parts, p_points, p_half, n, D, ASM)
    o = tl.arange(0, N // D)
    head, column = o // (DIM // D), o % (DIM // D)
    o_codes = ((i_batch * HEADS + head) * tokens)[None, :] + token[:, None]
    tl.store(p_codes + o_codes * (DIM // D) + column[None, :], code.to(tl.uint8), mask=live[:, None])
    group = tl.arange(0, ROWS * NORMS)
    row = tl.program_id(0) * ROWS + group // NORMS
    tl.store(p_norm + (i_batch * NORMS + group % NORMS) * tokens + row, stored, mask=row < tokens)
    bad = tl.min(tl.min(tl.reshape((nothing == 0).to(tl.int32), [ROWS, HEADS, DIM]), 2), 0)
    big = tl.max(tl.reshape(tl.where((norm <= HALF_MAX) | (row >= tokens), 0, SCALE), [ROWS, NORMS]), 0)
    flags = tl.where(bad == 0, NONFINITE, 0) | big
    if tl.max(flags, 0) != 0:
        tl.atomic_or(p_flags + tl.arange(0, HEADS), flags)


def encode(x: Tensor, how: Rotated, flags: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.encode, for any strides but that of channels, which is 1; kv heads and head_dim powers of two. Given
    flags are added to.
    """
    batch, heads, tokens, dim = x.shape
    n, d = how.points.shape
    if heads & (heads - 1) or dim & (dim - 1) or not 16 <= dim <= 256:
        raise ValueError(f"{heads} kv heads of {dim}: must be powers of two, head_dim 16 to 256")
    if x.stride(3) != 1 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"input of {x.dtype}, strides {x.stride()}: float16, bfloat16 or float32 with contiguous channels"
        )
    if how.sign.shape != (heads * dim,) or how.norms not in (1, heads) or d not in (1, 2, 4) or n > 256:
        raise ValueError(
            f"signs {tuple(how.sign.shape)}, {how.norms} norms, {n} points of {d}: must be ({heads * dim},), 1 or {heads}, "
            "at most 256 points of 1, 2 or 4"
        )
    codes = torch.empty(batch, heads, tokens, dim // d, dtype=torch.uint8, device=x.device)
    norm = torch.empty(batch, how.norms, tokens, dtype=torch.float16, device=x.device)
    if flags is None:
        flags = torch.zeros(heads, dtype=torch.int32, device=x.device)
    fixed = settings(how, heads, dim)
    encode_kernel[(-(-tokens // fixed["ROWS"]), batch)](
        x, how.sign, how.points, how.half, codes, norm, flags, tokens, n, *x.stride()[:3],
        fixed["WIDTH"] ** -0.5, how.gain, **fixed, ASM=not interpreted(),
        num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, norm, flags


def settings(how: Rotated, heads: int, dim: int) -> dict[str, int]:
    """Compile-time constants of encode_kernel."""
    width = largest_power_of_two(dim)
    made = {"HEADS": heads, "DIM": dim, "WIDTH": width, "NORMS": how.norms, "D": how.points.shape[1]}
    made |= {"ROWS": max(1, NUMBERS // (heads * dim)), "LOG_WIDTH": width.bit_length() - 1}
    return made | {"LOG_NORM": (heads * dim // how.norms).bit_length() - 1}
