"""HIGGS and TurboQuant: rotate each kv head, divide by the norm, take the nearest point of a grid.

Or rotate a token's kv heads together. Numbers are those of the codec `higgs` (kvcal_artifacts/codecs/higgs.py) along
channels, bit for bit as it gives them on a CPU: butterflies in the order of `hadamard`, squares added as `tree_sum`
adds them, the first of equally near points.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hadamard import largest_power_of_two, root, rotate, tree_sum, unrotate
from ..lattice import lookup, nearest
from ..lattice.raster import Raster, raster_of

NONFINITE, SCALE = 1, 2  # flags of quantise.reference
HALF_MAX = 65504.0
LEAST = 1e-30  # a norm of nothing is taken for this


@dataclass(frozen=True)
class Rotated:
    """How numbers are rotated and coded. points (n, d) float32, n <= 256; sign (H * D,) int8. norms: 1 a token, or one
    a kv head, H. gain: the stored norm is that much larger than what numbers are divided by. width: of the rotation, a
    power of two; 0: as far as one divides head_dim.
    """

    points: Tensor
    sign: Tensor
    norms: int = 1
    gain: float = 1.0
    width: int = 0

    @functools.cached_property
    def raster(self) -> Raster | None:
        return raster_of(self.points)

    @functools.cached_property
    def table(self) -> Tensor:
        """The numbers by which kernels find the nearest point, float32: |g|^2 / 2 (n,) as lattice.nearest has it on a
        CPU, points (d, n); for a raster also its reach and the bits of its words. It is made once, as a CUDA graph must
        find it where it was.
        """
        points = self.points.cpu()
        parts = [0.5 * (points * points).sum(-1), points.T.flatten()]
        if self.raster:
            parts += [points.new_full((1,), self.raster.reach), self.raster.words.view(torch.float32).flatten()]
        return torch.cat(parts).to(self.points.device)

    def rotation(self, dim: int) -> int:
        return self.width or largest_power_of_two(dim)


def encode(x: Tensor, how: Rotated, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Encode x (B, H, T, D) float16, bfloat16 or float32 -> codes uint8 (B, H, T, D / d), norms float16 (B, how.norms,
    T), and flags int32 (H,), with one norm a token the same for all heads. out: (B, H, T, D) float32 takes what these
    decode to.
    """
    heads, dim = x.shape[1], x.shape[3]
    vectors = x.float().movedim(1, 2).flatten(2)
    groups = rotate(vectors, how.sign, how.rotation(dim)).unflatten(-1, (how.norms, -1))
    norm = root(tree_sum(groups * groups) / groups.shape[-1]) * how.gain
    stored = norm.half()
    scaled = groups * (stored.float().clamp_min(LEAST).reciprocal() * how.gain)[..., None]
    codes = nearest(scaled.reshape(-1, how.points.shape[1]), how.points).view(*vectors.shape[:2], heads, -1)
    if out is not None:
        points = lookup(codes.flatten(2), how.points).unflatten(-1, (how.norms, -1))
        decoded = unrotate((points * stored.float()[..., None]).flatten(-2), how.sign, how.rotation(dim))
        out.copy_(decoded.unflatten(-1, (heads, dim)).movedim(2, 1))
    big = (~(norm <= HALF_MAX)).flatten(0, 1).any(0).expand(heads)
    bad = (~torch.isfinite(x)).flatten(2).any(-1).any(0)
    return codes.movedim(2, 1), stored.movedim(2, 1).contiguous(), (bad.int() * NONFINITE) | (big.int() * SCALE)
