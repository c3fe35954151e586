"""How far from random numbers each format's definition lets decoded ones be, without the codecs' encode and decode.

Uniform integers: the nearest of the levels that a group's range or peak gives, in float64. Grids: the mean squared
error of the grid on Gaussian numbers (codecs/make_grids.py). Codebooks, and grids in a fitted basis: encoded again by
brute force, as they may be far from random numbers, and then an error alone tells little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvcal_artifacts.codecs import (
    ByHead,
    Codec,
    Context,
    Exact,
    Float8,
    Higgs,
    MixKVQ,
    Predicted,
    ResidualVQ,
    Scaled,
    Squat,
    Transform,
    Uniform,
)
from kvcal_artifacts.codecs.exact import DTYPES
from kvcal_artifacts.codecs.float8 import FORMATS
from kvcal_artifacts.codecs.higgs_grids import GRID_MSE, gaussian_grid
from kvcal_artifacts.codecs.transform import GRID_OF, MSE, ONE_BIT
from kvcal_artifacts.errors import KVCalError

from .layer import Filled, some_rows

# A block has up to 1.14 times the error that a sample promises (measured: every scheme of schemes.scheme_names() at
# head_dim 32 and 128, blocks of 2048 random numbers or more, four seeds); decoding 5 % of each number misses by 0.9 of
# the squares, 3 times what 2 bits in groups of 128 promise.
MARGIN = 1.35
SAMPLE = 256  # tokens a row from which the mean is computed; at least a block
# Of the sum of squares: two encoders that take the nearest codeword part at near ties, of which a GPU's shorter
# products see others, and from there on differ number by number; not in how long their vectors are on average.
LENGTHS = 0.1
FLOOR = 2.0**-22  # of the squares: float32 sums and products


def misread(filled: Filled, role: int, decoded: Tensor) -> str | None:
    """What is wrong with keys (role 0) or values (1) as they were read, (B, H, N * b, D). None if every block of every
    row lies as near to the input as its format promises. What it promises is computed of SAMPLE tokens in some_rows, as
    are the nearest codewords that lengths are compared with.
    """
    codec, raw = filled.pair[role], filled.raw[role]
    if decoded.shape != raw.shape:
        return f"check failed: decoding gives {codec.role}s {tuple(decoded.shape)}, packed were {tuple(raw.shape)}"
    allowed = 0.0
    for row, tokens, context in _samples(filled, role):
        exact = raw[row, None, :, tokens].double()
        error, again = promised(codec, exact, context)
        allowed = max(allowed, float(error.sum() / exact.square().sum()))
        if again is not None:
            ratio = float(decoded[row, None, :, tokens].double().square().sum() / again.square().sum())
            if not abs(ratio - 1) <= LENGTHS:
                return (
                    f"check failed: squares of decoded {codec.role}s are {ratio:.2g} of those of the nearest codewords"
                )
    rounding = float(torch.finfo(decoded.dtype).eps) ** 2 / 12
    allowed = MARGIN * allowed + rounding + FLOOR
    worst = max(_error(codec, x, y) for x, y in zip(decoded, raw, strict=True))
    if worst <= allowed:
        return None
    return f"check failed: decoding misses {codec.role}s by {worst:.2g} of their squares, {allowed:.2g} allowed"


def _error(codec: Codec, decoded: Tensor, raw: Tensor) -> float:
    """The error of one row (H, N * b, D): squared error over squares of the worst block; infinite if any is NaN."""
    exact = raw.float()
    both = torch.stack([decoded.float() - exact, exact]).square()
    off, energy = both.unflatten(2, (-1, codec.shape.block)).sum((1, 3, 4))
    return float((off / energy).nan_to_num(nan=float("inf")).max())


def _samples(filled: Filled, role: int) -> Iterator[tuple[int, slice, Context]]:
    """The first and the last row, their first tokens."""
    codec, context = filled.pair[role], filled.encoding
    block = codec.shape.block
    tokens = slice(0, min(filled.raw[role].shape[2], max(1, SAMPLE // block) * block))
    if "k0" in codec.needs:
        context = replace(context, k0=filled.decoded()[0])
    for row in some_rows(filled.case.batch, filled.case.seed):
        of_row = context.rows(row, row + 1)
        yield row, tokens, replace(of_row.part(tokens.start, tokens.stop), stats=of_row.stats)


def promised(codec: Codec, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
    """x (1, H, T, D) float64 -> squared errors that the format should make of it, as x; and, where it is encoded again
    by brute force, what it becomes. KVCalError for a format that is not known here.
    """
    match codec:
        case Exact():
            return (x * torch.finfo(DTYPES[codec.dtype]).eps).square() / 12, None
        case Float8():
            return _of_floats(codec, x), None
        case Uniform():
            return _of_levels(x, codec.bits, codec.group, codec.axis, codec.mode), None
        case Higgs():
            return _of_grid(codec, x), None
        case Scaled():
            constant = None if codec.factor is None else codec.factor.double()[:, None]
            factor = codec.key_factor(context) if codec.role == "key" else constant
            assert factor is not None
            error, again = promised(codec.inner, x / factor.double(), context)
            return error * factor.double().square(), None if again is None else again * factor.double()
        case Squat():
            return promised(codec.inner, x, context)[0] * _taken_back(codec), None
        case MixKVQ():
            return _of_tiers(codec, x), None
        case ByHead():
            return torch.cat([promised(part, x[:, heads], cut)[0] for part, heads, cut in codec.cut(context)], 1), None
        case Predicted():
            guess = codec.predict(context, codec.predictor.working()).double()
            error, again = promised(codec.inner, x - guess, context)
            return error, None if again is None else again + guess
        case ResidualVQ():
            again = _of_codebooks(codec, x)
        case Transform():
            again = _of_basis(codec, x)
        case _:
            raise KVCalError(
                f"codec {codec.name!r}: what error it may have is not known; add it to bench/distortion.py"
            )
    return (again - x).square(), again


def _of_floats(codec: Float8, x: Tensor) -> Tensor:
    """A twelfth of the squared spacing, at most; all that lies beyond the largest one."""
    limits = torch.finfo(FORMATS[codec.format])
    scaled = x / codec.scale
    spacing = limits.eps * scaled.abs().clamp_min(limits.tiny)
    beyond = (scaled.abs() - limits.max).clamp_min(0)
    return (spacing.square() / 12 + beyond.square()) * codec.scale**2


def _of_levels(x: Tensor, bits: int, group: int, axis: str, mode: str) -> Tensor:
    """The better of the modes' levels, group by group; a search only lowers it."""
    groups = (x.transpose(-1, -2) if axis == "token" else x).unflatten(-1, (-1, group))
    errors = []
    if mode != "asymmetric":
        half = 2 ** (bits - 1)
        peak = groups.abs().mean(-1, keepdim=True) if bits == 1 else groups.abs().amax(-1, keepdim=True)
        centred = (groups.abs() - peak).square() if bits == 1 else _to_nearest(groups, peak / half, -peak, bits)
        errors.append(centred)
    if mode != "symmetric":
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        errors.append(_to_nearest(groups, (high - low) / (2**bits - 1), low, bits))
    best = torch.stack([one.sum(-1) for one in errors]).argmin(0)[..., None]
    error: Tensor = errors[0] if len(errors) == 1 else torch.where(best == 0, errors[0], errors[1])
    flat = error.flatten(-2)
    return flat.transpose(-1, -2) if axis == "token" else flat


def _to_nearest(x: Tensor, step: Tensor, lowest: Tensor, bits: int) -> Tensor:
    codes = ((x - lowest) / step.clamp_min(torch.finfo(x.dtype).tiny)).round().clamp(0, 2**bits - 1)
    return (lowest + codes * step - x).square()


def _of_grid(codec: Higgs, x: Tensor) -> Tensor:
    """The grid's mean squared error D, of what a rotation spreads over all channels. A point times a gain g misses by
    g^2 (1 - D) - 2 g (1 - D) + 1: nearest points are shorter than what they stand for, by D.
    """
    captured_energy = 1 - GRID_MSE[codec.d, codec.n]
    gain = _gain(codec, captured_energy)
    return (gain * gain * captured_energy - 2 * gain * captured_energy + 1) * x.square().mean(
        -1, keepdim=True
    ).expand_as(x)


def _gain(codec: Higgs | Transform, captured_energy: float) -> float:
    """The factor of nearest points. captured_energy: their part of the squares."""
    return 1.0 if codec.gain == "mse" else captured_energy ** (-0.5 if codec.role == "key" else -1.0)


def _taken_back(codec: Squat) -> float:
    """What corrections add to the error at most: they cancel rounding in a few directions, with the channels behind."""
    dim, step = codec.shape.dim, codec.channels
    directions = codec.rank + (0 if codec.calibrated is None else codec.calibrated.shape[1])
    return 1 + directions / dim * sum(step / (dim - end) for end in range(step, dim, step))


def _of_tiers(codec: MixKVQ, x: Tensor) -> Tensor:
    """Tiers by rank: as many channels of each. By thresholds: 2 bits for all, which is the most."""
    dim, (full, four) = codec.shape.dim, (codec.full or 0, codec.four or 0)
    two = _of_levels(x, 2, codec.group, "token", "asymmetric") * (dim - full - four) / dim
    return two + _of_levels(x, 4, codec.group, "token", "asymmetric") * four / dim


def _of_codebooks(codec: ResidualVQ, x: Tensor) -> Tensor:
    """The nearest codeword of each stage, by all distances."""
    scale = 1.0 if codec.scale is None else codec.scale.double()[:, None]
    scaled, again = x / scale, torch.zeros_like(x)
    for band, books in zip(codec.bands, codec.codebooks, strict=True):
        channels = list(band)
        rest: Tensor = scaled[..., channels].reshape(-1, len(channels))
        for book in books.double():
            rest = rest - book[_nearest(rest, book)]
        again[..., channels] = scaled[..., channels] - rest.view(*x.shape[:-1], -1)
    return again * scale


def _of_basis(codec: Transform, x: Tensor) -> Tensor:
    """Coordinates over the token's RMS, each tier to the nearest point of its grid; those of no bits are left out."""
    mean = codec.mean.double()[:, None]
    y = (x - mean) @ codec.encoder.double()
    norm = y.square().mean((1, 3), keepdim=True).sqrt()
    unit, coded = y / norm, torch.zeros_like(y)
    for bits, at in codec.tiers.items():
        points = x.new_tensor([[-ONE_BIT], [ONE_BIT]]) if bits == 1 else gaussian_grid(*GRID_OF[bits]).to(x)
        flat = unit[..., at].reshape(-1, points.shape[1])
        coded[..., at] = _gain(codec, 1 - MSE[bits]) * points[_nearest(flat, points)].view_as(unit[..., at])
    return coded * norm @ codec.decoder[:, : codec.coded].double() + mean


def _nearest(x: Tensor, points: Tensor) -> Tensor:
    return (points.square().sum(1) - 2 * x @ points.T).argmin(1)
