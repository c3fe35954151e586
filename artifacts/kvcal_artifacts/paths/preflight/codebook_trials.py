"""The kernels over vector codes, on small random data against their references in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_kernels import quantise, residual_vq
from kvcal_kernels.layout import BLOCK

from ...codecs import Codec
from .trials import BLOCKS, apart

VECTOR_CALLS = (1, 3)  # new tokens


def codebook_trial(keys: Codec, values: Codec, ratio: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Try the kernels that attend on random codes of rows of different lengths against the reference in float32."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = torch.tensor(BLOCKS, dtype=torch.int32, device=device)
    sides = []
    for codec in (keys.to(device), values.to(device)):
        packed = codec.empty(len(BLOCKS), device)
        for name, none in packed.items():
            size = (*none.shape[:2], max(BLOCKS), *none.shape[3:])
            packed[name] = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        sides.append(codec.as_codes(packed))
    k, v = sides
    shape, has_blocks = keys.shape, blocks > 0
    for queries in VECTOR_CALLS:
        q = torch.randn(
            len(BLOCKS),
            shape.heads * ratio,
            queries,
            shape.dim,
            generator=generator,
            device=device,
            dtype=torch.float32,
        )
        asked = (q / float(residual_vq.attention.decode(k).std())).to(dtype)
        actual, log = residual_vq.attention.fast().attend(asked, k, v, blocks, shape.dim**-0.5)
        expected, sums = residual_vq.attention.attend(asked.float(), k, v, blocks, shape.dim**-0.5)
        if (
            bool(actual[~has_blocks].any())
            or not float((log - sums)[has_blocks].abs().max()) < 8 * torch.finfo(dtype).eps
        ):
            return f"{queries} new tokens: sums differ, or a row without blocks is not nothing"
        if why := apart(actual, expected, dtype, f"{queries} new tokens"):
            return why
    return None


def codebook_append_trial(
    keys: Codec, values: Codec, dtype: torch.dtype, device: torch.device, recent: int = 40
) -> str | None:
    """Try the kernels that append on steps around a block that is due in one row of three.

    The other rows must not change, and the block must be as near to its tokens as the codec's own codes, up to a
    thousandth.
    """
    generator, shape = torch.Generator(device).manual_seed(0), keys.shape
    windows = quantise.Windows(4, recent, shape.block)
    counts = quantise.Counts(3, windows, device)
    full = windows.recent + windows.block
    counts.data[4] = 4
    counts.data[6] = torch.tensor([full - 2, full - 9, 0], dtype=torch.int32, device="cpu")

    def random(tokens: int) -> tuple[Tensor, Tensor]:
        size = (3, shape.heads, tokens, shape.dim)
        pair = [torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype) for _ in (0, 1)]
        return pair[0], pair[1]

    sink, ring, sides = random(windows.sink), random(windows.ring_capacity(16)), []
    for codec in (keys.to(device), values.to(device)):
        packed = {n: t.new_zeros(*t.shape[:2], 2, *t.shape[3:]) for n, t in codec.empty(3, device).items()}
        sides.append((codec, packed, codec.as_codes(packed)))
    flags = torch.zeros(shape.heads, dtype=torch.int32, device=device)
    for _ in range(2):
        quantise.fast().advance(counts, torch.full((3,), 1, dtype=torch.int32, device=device))
        residual_vq.append.fast().append(sides[0][2], sides[1][2], sink, ring, counts, flags, *random(1))
    if counts.data[7].tolist() != [shape.block // BLOCK, 0, 0] or bool(flags.any()):
        return "counts or flags differ"
    for (codec, packed, _), exact in zip(sides, ring, strict=True):
        if any(bool(t[1:].any() or t[:, :, 1:].any()) for t in packed.values()):
            return f"packed {codec.role}s: a row without a block due was written to"
        x = exact[:1, :, : shape.block].float()
        appended, expected = ({n: t[:1, :, :1] for n, t in packed.items()}, codec.encode(x))
        off, least = (float((codec.decode(one) - x).square().sum()) for one in (appended, expected))
        if not off <= least * (1 + 1e-3):
            return f"packed {codec.role}s: error {off / least:.4g} times that of the codec's own"
    return None
