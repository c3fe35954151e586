"""Checks of decoded numbers: how far they may be from what was encoded.

`bound` says it: what any codec must meet, or in the tests what the theory of each promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Context, Packed
from kvcal_artifacts.errors import KVCalError

from .subject import Subject

TINIEST = 2.0**-25  # half a step of float16's smallest numbers
Bound = Callable[[Codec, Tensor, Packed, Tensor, float], None]  # codec, input, packed, decoded, factor


class Broken(AssertionError):
    """A codec does not keep the contract; the text says in one line how."""


def require(fulfilled: bool, text: str) -> None:
    """Raises Broken with the text unless fulfilled."""
    if not fulfilled:
        raise Broken(text)


def prediction(codec: Codec, context: Context, like: Tensor) -> Tensor:
    """What a predictor adds, of the shape of `like`; zero for codecs without one."""
    predicted = codec.prediction(context)
    return torch.zeros_like(like) if predicted is None else predicted


def coded(codec: Codec, residual: Tensor, context: Context) -> tuple[Tensor, Packed, Tensor]:
    """Encode `residual` (B, H, T, D) on top of what the codec predicts.

    Returns the residual as it arrives, the packed tensors, and the residual as decoded.
    """
    base = prediction(codec, context, residual)
    x = base + residual
    packed = codec.encode(x, context)
    decoded = codec.decode(packed, context)
    require(decoded.shape == x.shape, f"decode gives {tuple(decoded.shape)} of {tuple(x.shape)} encoded")
    require(decoded.dtype == torch.float32, f"decode gives {decoded.dtype}, must be torch.float32")
    return x - base, packed, decoded - base


def slack_of(codec: Codec, x: Tensor) -> float:
    """Absolute float32 noise of adding a prediction."""
    return 2.0**-20 * float(x.abs().max()) + 1e-5 if codec.inputs else 0.0


def half_of_bits(codec: Codec, x: Tensor, decoded: Tensor, slack: float, factor: float) -> None:
    """Half of the stored bits do what the best bits could, 6 dB each, and at least it is better than storing zeros."""
    share = min(0.9, 4 * 2.0 ** -codec.bits_per_value())
    error, energy = (float(t.double().square().sum()) for t in (decoded - x, x))
    allowed = factor * share * energy + slack**2 * x.numel() + x.numel() * TINIEST**2
    relative = error / energy if energy else math.inf
    require(
        error <= allowed,
        f"relative squared error {relative:.3g}, allowed is {factor * share:.3g} at {codec.bits_per_value():.3g} bits "
        "per value",
    )


def any_codec(codec: Codec, x: Tensor, packed: Packed, decoded: Tensor, factor: float) -> None:
    """The bound that every codec meets: finite numbers, and an error that half of its stored bits would allow."""
    require(bool(torch.isfinite(decoded).all()), "decode gives NaN or infinity of finite numbers")
    half_of_bits(codec, x, decoded, slack_of(codec, x), factor)


def no_worse_than_zeros(codec: Codec, x: Tensor, packed: Packed, decoded: Tensor, factor: float) -> None:
    """The bound for numbers that a codec may clip: finite ones, no further from x than zeros are."""
    require(bool(torch.isfinite(decoded).all()), "decode gives NaN or infinity of finite numbers")
    error, energy = (float(t.double().square().sum()) for t in (decoded - x, x))
    slack = slack_of(codec, x)
    require(
        error <= energy * (1 + 1e-6) + slack**2 * x.numel(),
        f"numbers up to {float(x.abs().max()):.3g} come back further off than zeros would be",
    )


def round_trip(subject: Subject, bound: Bound = any_codec, factor: float = 1.25) -> None:
    """Normal numbers come back within what half of the stored bits allow."""
    codec = subject.codec()
    blocks = -(-10_000 // subject.shape.values)
    noise = subject.noise(2, min(blocks, 8) if codec.stats else blocks)
    x, packed, decoded = coded(codec, noise, subject.context(2, noise.shape[2]))
    bound(codec, x, packed, decoded, factor)


def constant(subject: Subject, value: float, bound: Bound = any_codec) -> None:
    """So do numbers that are all the same."""
    codec = subject.codec()
    residual = torch.full_like(subject.noise(1, 2), value)
    x, packed, decoded = coded(codec, residual, subject.context(1, 2 * subject.shape.block))
    bound(codec, x, packed, decoded, 2.0)  # one vector of few coordinates is not an average


def tiny(subject: Subject) -> None:
    """Zeros, and numbers below what float16 holds, come back no larger than they were, within its rounding."""
    codec, context = subject.codec(), subject.context(1, 2 * subject.shape.block)
    for size in (0.0, 1e-12, 1e-9):
        x, _, decoded = coded(codec, subject.noise(1, 2) * size, context)
        noise = 2.0**-20 if codec.inputs else 0.0
        off = (decoded - x).abs() - x.abs()
        require(bool((off <= 2 * TINIEST + noise).all()), f"numbers of size {size:g} are off by {float(off.max()):.3g}")


def outlier(subject: Subject, size: float, bound: Bound = any_codec) -> None:
    """One number of each head and block that is far larger than the others."""
    codec, residual = subject.codec(), subject.noise(1, 2)
    residual[:, :, 3, 5] = size
    residual[:, :, subject.shape.block + 1, 2] = -size
    x, packed, decoded = coded(codec, residual, subject.context(1, 2 * subject.shape.block))
    bound(codec, x, packed, decoded, 1.5)


def large(subject: Subject, bound: Bound = any_codec) -> None:
    """Numbers up to 10,000, which models' keys reach."""
    codec, noise = subject.codec(), subject.noise(1, 8)
    x, packed, decoded = coded(codec, 1e4 * noise.tanh(), subject.context(1, 8 * subject.shape.block))
    bound(codec, x, packed, decoded, 1.1)


def too_large(subject: Subject, size: float, bound: Bound = any_codec) -> None:
    """Numbers that float16 cannot hold are refused by a KVCalError or come back within the bound."""
    codec, context = subject.codec(), subject.context(1, 2 * subject.shape.block)
    x = subject.noise(1, 2).sign() * size
    try:
        packed = codec.encode(x, context)
    except KVCalError:
        return
    decoded = codec.decode(packed, context)
    require(
        bool(torch.isfinite(decoded).all()),
        f"numbers of {size:g} come back as infinity or NaN: refuse them, as kvcal_artifacts.codecs.refusals.to_half",
    )
    base = prediction(codec, context, x)
    bound(codec, x - base, packed, decoded - base, 1.03)


def hard_inputs(subject: Subject) -> None:
    """Constants, zeros, outliers and large numbers come back finite; what float16 cannot hold may be refused."""
    for value in (0.7, -300.0):
        constant(subject, value)
    tiny(subject)
    for size in (50.0, 3000.0):
        outlier(subject, size, no_worse_than_zeros)
    large(subject, no_worse_than_zeros)
    for size in (1e5, 1e30, 3e38):
        too_large(subject, size, no_worse_than_zeros)
