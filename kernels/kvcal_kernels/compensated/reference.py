"""SQuat's rounding (Wang et al. 2025, Lemma 2 and 3): channels of a key are rounded some at a time, and those behind
take back what rounding did, in the directions that queries look at. Numbers are those of the codec `squat`
(kvcal_artifacts/codecs/squat.py), bit for bit as it gives them on a CPU: products are sums of integers that float64
holds exactly.

What comes out is rounded to nearest by `quantise`, which gives the packed blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """What the error of `channels` channels moves those behind them by, step by step: weight float64 (B or 1, H,
    channels, D - stop), integers of at most 2^23 or so, and the unit of each head float64 (B or 1, H).
    """

    channels: int
    weights: list[Tensor]
    units: list[Tensor]

    @functools.cached_property
    def digits(self) -> list[Tensor]:
        """Weights as three float16 digits (3, B or 1, H, channels, D - stop), w = d0 + 2^8 d1 + 2^16 d2; made once."""
        found = []
        for weight in self.weights:
            rest, parts = weight.to(torch.int32), []
            for _ in range(2):
                parts.append((rest + 128 & 255) - 128)
                rest = rest - parts[-1] >> 8
            found.append(torch.stack([*parts, rest]).half())
        return found


def moves(responses: list[Tensor], channels: int) -> Moves:
    """responses: M_br M_rr^-1 of each step (B or 1, H, channels, D - stop) float64, as codecs.squat.responses makes them."""
    found = [_integers(response, _bits(channels)) for response in responses]
    return Moves(channels, [weight for weight, _ in found], [unit.flatten(1) for _, unit in found])


def corrected(x: Tensor, own: Moves, bits: int, group: int, block: int) -> Tensor:
    """x (B, H, T, D), T whole blocks of `block` tokens -> keys as they are rounded in the end, float32. bits, group: of
    the rounding, asymmetric, groups of tokens of one channel.
    """
    keys: Tensor = torch.unflatten(x.float(), 2, (-1, block)).clone()
    for i, (weight, unit) in enumerate(zip(own.weights, own.units, strict=True)):
        here = slice(i * own.channels, (i + 1) * own.channels)
        whole, size = _integers(_error(keys[..., here], bits, group), _bits(own.channels))
        product = torch.unflatten(whole.flatten(2, 3) @ weight, 2, whole.shape[2:4])
        rest = keys[..., here.stop :]
        rest.copy_((rest.double() - product * (size * unit[:, :, None, None, None])).float())
    return keys.flatten(2, 3)


def refusal(dim: int, channels: int, group: int, block: int) -> str | None:
    """Why the Triton kernel does not correct keys of these channels at a time, groups and blocks of tokens."""
    if not 16 <= block <= 128 or block & (block - 1) or group & (group - 1) or block % group:
        return f"blocks of {block} tokens, groups of {group}: must be powers of two, blocks of 16 to 128, whole groups"
    for behind in range(dim - channels, 0, -channels):
        if channels & (channels - 1) or min(channels, behind & -behind) < 16:
            return f"{channels} channels at a time of {dim}: must be a power of two, and what is left a multiple of 16"
    return None


def _bits(channels: int) -> int:
    """Of each factor: the sum of `channels` products stays below 2^53."""
    return (53 - (channels - 1).bit_length()) // 2


def _error(part: Tensor, bits: int, group: int) -> Tensor:
    """What rounding adds to keys (B, H, N, b, g): as quantise.reference's plain asymmetric scale."""
    x, top = part.transpose(-1, -2).unflatten(-1, (-1, group)), torch.full((), 2.0**bits - 1, device=part.device)
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / top).clamp(2.0**-24, 65504.0).half().float()
    base = low.half().float()
    codes = torch.minimum(((x - base) / scale).round().clamp_min(0), top)
    error: Tensor = torch.flatten(codes * scale + base - x, -2)
    return error.transpose(-1, -2)


def _integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x as float64 integers of at most 2^bits and their power-of-two unit, one for the last two dimensions."""
    largest = x.abs().flatten(-2).amax(-1)[..., None, None].double()
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.to(torch.int32) - bits)
    return (x.double() / unit).round_(), unit
