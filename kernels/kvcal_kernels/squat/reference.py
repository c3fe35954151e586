"""SQuat's rounding (Wang et al. 2025, Lemma 2 and 3): channels of a key are rounded some at a time, and those behind
make up for the error of rounding, in the directions that queries look at. Numbers are those of the codec `squat`
(kvcal_artifacts/codecs/squat.py), bit for bit as it gives them on a CPU: products are sums of integers that float64
holds exactly.

The result is rounded to nearest by `quantise`, which gives the packed blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..quantise import Counts


@dataclass(frozen=True)
class Moves:
    """How the error of `channels` channels moves those behind them, step by step: weight float64 (B or 1, H, channels,
    D - stop), integers of at most 2^23 or so, and the unit of each head float64 (B or 1, H).
    """

    channels: int
    weights: list[Tensor]
    units: list[Tensor]

    @functools.cached_property
    def digits(self) -> list[Tensor]:
        """Weights as three float16 digits (3, B or 1, H, channels, D - stop), w = d0 + 2^8 d1 + 2^16 d2. They are made
        once.
        """
        digits = []
        for weight in self.weights:
            rest, parts = weight.to(torch.int32), []
            for _ in range(2):
                parts.append((rest + 128 & 255) - 128)
                rest = rest - parts[-1] >> 8
            digits.append(torch.stack([*parts, rest]).half())
        return digits


@dataclass(frozen=True)
class Digits:
    """`Moves` as the kernel reads them, in storage that stays where it is: steps of a CUDA graph know its address."""

    channels: int
    digits: list[Tensor]
    units: list[Tensor]

    @classmethod
    def of(cls, moves: Moves) -> Digits:
        """Return a copy of `moves` in new storage."""
        return cls(moves.channels, [x.clone() for x in moves.digits], [x.clone() for x in moves.units])

    def renew(self, moves: Moves) -> bool:
        """Copy `moves` into this storage. Return False, and do nothing, where they are of another shape or device."""
        new, before = [*moves.digits, *moves.units], self.tensors
        if [(x.shape, x.device) for x in new] != [(x.shape, x.device) for x in before]:
            return False
        for old, x in zip(before, new, strict=True):
            old.copy_(x)
        return True

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.digits, *self.units]

    @property
    def weights(self) -> list[Tensor]:
        """The weights of `Moves`, float64, put together from the digits."""
        return [x[0].double() + 256 * x[1].double() + 65536 * x[2].double() for x in self.digits]


def moves(responses: list[Tensor], channels: int) -> Moves:
    """Return the moves of responses: M_br M_rr^-1 of each step (B or 1, H, channels, D - stop) float64, as
    codecs.squat.responses makes them.
    """
    steps = [integers(response, factor_bits(channels)) for response in responses]
    return Moves(channels, [weight for weight, _ in steps], [unit.flatten(1) for _, unit in steps])


def corrected(x: Tensor, moves: Moves | Digits, bits: int, group: int, block: int) -> Tensor:
    """Return keys as they are rounded in the end, float32. x (B, H, T, D), T whole blocks of `block` tokens. bits,
    group: of the rounding, asymmetric, groups of tokens of one channel.
    """
    keys: Tensor = torch.unflatten(x.float(), 2, (-1, block)).clone()
    for i, (weight, unit) in enumerate(zip(moves.weights, moves.units, strict=True)):
        here = slice(i * moves.channels, (i + 1) * moves.channels)
        whole, size = integers(_error(keys[..., here], bits, group), factor_bits(moves.channels))
        product = torch.unflatten(whole.flatten(2, 3) @ weight, 2, whole.shape[2:4])
        rest = keys[..., here.stop :]
        rest.copy_((rest.double() - product * (size * unit[:, :, None, None, None])).float())
    return keys.flatten(2, 3)


def due(
    ring: Tensor, counts: Counts, new: Tensor, moves: Moves | Digits, bits: int, group: int, out: Tensor | None = None
) -> Tensor:
    """Return `corrected` of the one block of counts.windows.block tokens that a call of at most as many packs, before
    `append` puts its tokens away. Operations have fixed shapes, and no value is read on the host.

    ring (B, H, capacity, D): keys of the window, as of quantise.Layer.recent. new (B, H, Q, D), a row's real tokens
    last; counts: after the call. -> (B, H, block, D) float32, anything in rows of which no block is due; out: takes the
    result.
    """
    block, queries, capacity = counts.windows.block, new.shape[2], ring.shape[2]
    check_due(ring, counts, new)
    token, window = torch.arange(block, device=new.device)[None], counts.window_before[:, None].long()
    slots = (counts.blocks_before[:, None].long() * 32 + token) % capacity
    taken = (counts.sink - counts.sink_before)[:, None]
    fresh = (queries - counts.new[:, None] + taken + token - window).clamp(0, queries - 1)

    def take(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    keys = torch.where((token < window)[:, None, :, None], take(ring, slots), take(new, fresh))
    corrected_keys = corrected(keys, moves, bits, group, block)
    return corrected_keys if out is None else out.copy_(corrected_keys)


def check_due(ring: Tensor, counts: Counts, new: Tensor) -> None:
    """Raise ValueError unless a call packs at most one block of each row."""
    batch, heads, queries, dim = new.shape
    if queries > counts.windows.block:
        raise ValueError(f"{queries} new tokens, blocks of {counts.windows.block}: must be at most one block")
    if (ring.shape[0], ring.shape[1], ring.shape[3]) != (batch, heads, dim) or ring.dtype != new.dtype:
        shape = f"{tuple(ring.shape)} {ring.dtype}"
        raise ValueError(f"ring {shape}: must be ({batch}, {heads}, tokens, {dim}) {new.dtype}, as the new keys")
    if counts.data.shape[1] != batch:
        raise ValueError(f"counts of {counts.data.shape[1]} rows, keys of {batch}: must be the same")


def refusal(dim: int, channels: int, group: int, block: int) -> str | None:
    """Return why the Triton kernel does not correct keys of so many channels at a time, with these groups and blocks of
    tokens; None if it does.
    """
    if not 16 <= block <= 128 or block & (block - 1) or group & (group - 1) or block % group:
        return f"blocks of {block} tokens, groups of {group}: must be powers of two, blocks of 16 to 128, whole groups"
    for behind in range(dim - channels, 0, -channels):
        if channels & (channels - 1) or min(channels, behind & -behind) < 16:
            return f"{channels} channels at a time of {dim}: must be a power of two, and what is left a multiple of 16"
    return None


def factor_bits(channels: int) -> int:
    """Return the bits of each factor with which the sum of `channels` products stays below 2^53."""
    return (53 - (channels - 1).bit_length()) // 2


def _error(part: Tensor, bits: int, group: int) -> Tensor:
    """Return the error of rounding keys (B, H, N, b, g) with quantise.reference's plain asymmetric scale."""
    x, top = (
        part.transpose(-1, -2).unflatten(-1, (-1, group)),
        torch.full((), 2.0**bits - 1, dtype=torch.float32, device=part.device),
    )
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / top).clamp(2.0**-24, 65504.0).half().float()
    base = low.half().float()
    codes = torch.minimum(((x - base) / scale).round().clamp_min(0), top)
    error: Tensor = torch.flatten(codes * scale + base - x, -2)
    return error.transpose(-1, -2)


def integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return x as float64 integers of at most 2^bits and their power-of-two unit, one for the last two dimensions.

    The exponent is read from the number's bits: torch 2.11's frexp reads and writes wrong memory where x is on another
    GPU than the current one.
    """
    largest = x.abs().flatten(-2).amax(-1)[..., None, None] if x.numel() else x.new_zeros(*x.shape[:-2], 1, 1)
    exponent = torch.where(largest > 0, (largest.double().view(torch.int64) >> 52) - 1022, 0)
    unit = ((exponent - bits + 1023) << 52).view(torch.float64)
    return (x.double() / unit).round_(), unit
