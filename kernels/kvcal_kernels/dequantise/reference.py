"""Keys or values of one layer from what is stored: HIGGS codes, and the prediction of a linear predictor (AQUA-KV,
Algorithm 3).

out = f * Q^-1(codes) + inputs W + bias; Q^-1(codes) = sign * Hadamard(norm * grid[codes]) / sqrt(width)

Letters: B rows, H kv heads, N blocks of b tokens, T = N b, D head_dim, C = H D; a grid of n points in d dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..hadamard import Mix, unrotate
from ..lattice import lookup
from ..packing import unpack


@dataclass(frozen=True)
class Coded:
    """HIGGS blocks as codecs/higgs.py stores them. codes: uint8, keys (B, H, N, b, bytes), packed along channels,
    values (B, H, N, D / d, bytes), packed along tokens. norm: (B, 1 or H, N, b) float16. grid (n, d) float, sign (C,)
    of +1 and -1. width: of the rotation, a power of two that divides C. bits: of a code. dim: D. factor, mix: of
    hadamard.rotate. factors: (C,) float, f of the channels, or None: all 1.
    """

    codes: Tensor
    norm: Tensor
    grid: Tensor
    sign: Tensor
    width: int
    bits: int
    dim: int
    key: bool
    factor: int = 1
    mix: Mix = "none"
    factors: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    @property
    def block(self) -> int:
        return self.norm.shape[3]

    @property
    def tokens(self) -> int:
        return self.norm.shape[2] * self.block

    @property
    def packed_count(self) -> int:
        """Codes that are packed together."""
        return self.dim // self.grid.shape[1] if self.key else self.block


@dataclass(frozen=True)
class Rotation:
    """RoPE by halves, as Llama has it: channels i and i + r/2 of a head are a pair, the last D - r are left alone. cos,
    sin: (B or 1, T, r) of the packed tokens.
    """

    cos: Tensor
    sin: Tensor

    @cached_property
    def table(self) -> Tensor:
        """int32 (B or 1, T, r/2): cosine in the lower half, sine in the upper, float16; made once for all layers."""
        pair = torch.stack([t[..., : t.shape[-1] // 2] for t in (self.cos, self.sin)], -1)
        return pair.half().contiguous().view(torch.int32)[..., 0]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x (B, H, T, D) in its dtype."""
        r = self.cos.shape[-1]
        cos, sin = (t[:, None, :, : r // 2].to(x.dtype) for t in (self.cos, self.sin))
        low, high, rest = x.split([r // 2, r // 2, x.shape[-1] - r], -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def place(
    whole: Sequence[Tensor],
    sink: Sequence[Tensor],
    window: Sequence[Tensor],
    new: Sequence[Tensor],
    behind: int,
    rotation: Rotation | None = None,
) -> None:
    """Put the exact tokens of [keys, values] around the packed ones: whole (B, H, capacity, D) gets `sink` (B, H, S, D)
    first, `window` (B, H, W, D) and `new` (B, H, Q, D) from slot `behind` on. rotation: RoPE of the keys of sink and
    window, S + W tokens in this order, computed as models do: in the dtype of keys, cosines and sines together. New
    keys are already rotated.
    """
    for role, (out, first, ring, fresh) in enumerate(zip(whole, sink, window, new, strict=True)):
        exact, start = torch.cat([first, ring], 2), first.shape[2]
        if rotation is not None and role == 0:
            exact = _rotated(exact, rotation).to(out.dtype)
        out[:, :, :start] = exact[:, :, :start]
        rest = torch.cat([exact[:, :, start:], fresh], 2)
        out[:, :, behind : behind + rest.shape[2]] = rest


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    r = rotation.cos.shape[-1]
    low, high, rest = x.split([r // 2, r // 2, x.shape[-1] - r], -1)
    pairs = torch.cat([low, high], -1) * rotation.cos[:, None] + torch.cat([-high, low], -1) * rotation.sin[:, None]
    return torch.cat([pairs, rest.to(pairs.dtype)], -1)


def decode(coded: Coded, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return f * Q^-1(codes), (B, H, T, D), computed in `dtype`."""
    codes = unpack(coded.codes, coded.bits, coded.packed_count)
    codes = codes if coded.key else codes.transpose(-1, -2)
    points = lookup(codes.movedim(1, 3).flatten(3), coded.grid).to(dtype)  # (B, N, b, C)
    norm = coded.norm.movedim(1, 3).to(dtype)
    scaled = (points.unflatten(-1, (norm.shape[-1], -1)) * norm[..., None]).flatten(-2)
    vectors = unrotate(scaled, coded.sign, coded.width, coded.factor, coded.mix)
    if coded.factors is not None:
        vectors = vectors * coded.factors.to(dtype)
    return torch.unflatten(vectors, -1, (coded.heads, -1)).movedim(3, 1).flatten(2, 3)


def dequantise(
    coded: Coded,
    inputs: Sequence[Tensor] = (),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rotation: Rotation | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Return out (B, H, T, D), and out rotated where `rotation` is given; both computed in `dtype`.

    inputs: dequantised tensors (B, H, T, D) that feed the predictor, concatenated in this order; weight (len(inputs) C,
    C), bias (C,).
    """
    out = decode(coded, torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)
    if weight is not None:
        x = torch.cat([x.to(dtype).transpose(1, 2).flatten(2) for x in inputs], -1)
        guess = x @ weight.to(dtype)
        if bias is not None:
            guess = guess + bias.to(dtype)
        out = out + torch.unflatten(guess, -1, (coded.heads, -1)).transpose(1, 2)
    return out, None if rotation is None else rotation(out)
