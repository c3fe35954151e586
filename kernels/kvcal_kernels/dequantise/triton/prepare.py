"""Constants that a layer's launches share: its rotation as a matrix, weights and biases in the kernel's order of
channels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import triton as shared
from ...hadamard import hadamard, unrotate
from ..reference import Coded
from .points import fields

MOST_INPUTS = 4
CHANNELS = 128  # of a program


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched. tokens: of a program; depth: rows of weights per step; stages: loads in flight."""

    tokens: int
    depth: int = 64
    warps: int = 8
    stages: int = 3


@functools.cache
def launch_for(device: torch.device) -> Launch:
    """Return the launch for a device. On Hopper a program has 256 tokens: 85 operations for a byte that comes through
    L2 (128 tokens: 64), and 176 KiB of shared memory.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return Launch(256) if hopper else Launch(128, 32)


@dataclass(frozen=True)
class Codes:
    """The compile-time constants of stored codes. heads, dim; vector: channels of a grid point; bits: of a code; count:
    codes of a packed run. key: runs go along channels. block: tokens. bytes: of a run. width: channels that a rotation
    mixes; norms: of a token. wordwise: codes are read a word at a time. dense: the rotation mixes an odd factor, too.
    factors: channels are multiplied by factors.
    """

    heads: int
    dim: int
    vector: int
    bits: int
    count: int
    key: bool
    block: int
    bytes: int
    width: int
    norms: int
    wordwise: bool
    dense: bool
    factors: bool


@dataclass(frozen=True)
class Prepared:
    """Constants of a layer's keys or values as the kernel reads them. grid: int32 words of two float16, or float16.
    matrix: (tiles, channels, channels) float16, the rotation and the signs; with an odd factor (tiles of columns, tiles
    of codes, channels, channels). factors: (C,) float32, in the order of columns. rotary_dim: channels of a head
    that RoPE rotates. launches: of the kernel, by what they are made for.
    """

    grid: Tensor
    matrix: Tensor
    weight: Tensor | None
    bias: Tensor | None
    rotary_dim: int
    factors: Tensor | None = None
    launches: shared.Prepared[shared.Ready] = field(default_factory=shared.Prepared, compare=False, repr=False)

    @property
    def channels(self) -> int:
        return int(self.matrix.shape[-1])


def refuses(
    dim: int, d: int, width: int, norms: int, inputs: int, rotary_dim: int, channels: int = CHANNELS
) -> str | None:
    """Return why there is no kernel for this shape; None if there is one. width: channels that the rotation mixes."""
    if inputs > MOST_INPUTS:
        return f"{inputs} predictor inputs: {MOST_INPUTS} at most"
    if inputs and dim % 16:
        return f"head_dim {dim}: a predictor's kernel needs a multiple of 16"
    if dim % (2 * d) or d not in (1, 2, 4):
        return f"head_dim {dim}, grid of {d} dimensions: needs 1, 2 or 4 that divide half of it"
    if norms > 1 and width > dim:
        return "a norm a head under a rotation over the token"
    if rotary_dim % 2 or rotary_dim > dim or (rotary_dim and channels % dim):
        return f"RoPE of {rotary_dim} of {dim} channels: needs an even number, and heads that divide {channels}"
    return None


def columns_of(heads: int, dim: int, rotary_dim: int) -> Tensor:
    """Return the channel of each column of the product, int64 (C,): pairs of RoPE are neighbours."""
    every = torch.arange(heads * dim, device="cpu")
    if not rotary_dim:
        return every
    half = every // 2 % (dim // 2)
    low = torch.where(half < rotary_dim // 2, half, rotary_dim // 2 + half)
    apart = torch.where(half < rotary_dim // 2, rotary_dim // 2, (dim - rotary_dim) // 2)
    return every // dim * dim + low + every % 2 * apart


def prepare(
    coded: Coded,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rotary_dim: int = 0,
    dtype: torch.dtype = torch.float16,
    channels: int = CHANNELS,
) -> Prepared:
    """Return the constants of a layer's keys or values for inputs and outputs of `dtype`, to be made once. weight
    (inputs * C, C), bias (C,) of any float dtype.
    """
    inputs = 0 if weight is None else weight.shape[0] // weight.shape[1]
    heads, dim, d = coded.heads, coded.dim, coded.grid.shape[1]
    if why := refuses(dim, d, coded.width * coded.factor, coded.norm.shape[1], inputs, rotary_dim, channels):
        raise ValueError(f"dequantise: {why}")
    device = coded.grid.device
    order = columns_of(heads, dim, rotary_dim).to(device)
    grid = coded.grid.half().contiguous()
    matrix = (_matrix if coded.factor == 1 else _dense_matrix)(coded, order, channels)
    if weight is not None:
        weight = (weight[:, order] if rotary_dim else weight).to(dtype).contiguous()
        width = weight.shape[1]
        bias = torch.zeros(width, device=device, dtype=torch.float32) if bias is None else bias[order].float()
        bias = bias.contiguous()
    words = grid if d == 1 else grid.view(torch.int32)
    factors = None if coded.factors is None else coded.factors[order].float().contiguous()
    return Prepared(words, matrix, weight, None if weight is None else bias, rotary_dim, factors)


def _wordwise(coded: Coded, channels: int) -> bool:
    """Return whether programs can take codes a word at a time."""
    per = fields(coded.bits, coded.packed_count)
    if not per or not coded.key:
        return bool(per)
    words = coded.packed_count // per
    return channels % coded.dim == 0 and words & (words - 1) == 0


def places(coded: Coded, channels: int) -> Tensor:
    """Return the channel of each of the columns of `points_of` within its program's, int64 (channels,)."""
    every = torch.arange(channels, device="cpu")
    if not (coded.key and _wordwise(coded, channels)):
        return every
    d, per = coded.grid.shape[1], fields(coded.bits, coded.packed_count)
    words = coded.packed_count // per
    word, field, axis = every // (per * d), every // d % per, every % d
    channel_of: Tensor = word // words * coded.dim + (field * words + word % words) * d + axis
    return channel_of


def _matrix(coded: Coded, order: Tensor, channels: int) -> Tensor:
    """Return the matrix by which points of `channels` channels are multiplied, for each tile of columns: +1, -1 and 0,
    so exact.
    """
    device, count = coded.grid.device, coded.sign.numel()
    tiles, width = -(-count // channels), min(coded.width, channels)
    matrix = torch.zeros(tiles, channels, channels, dtype=torch.float16, device=device)
    rows = (hadamard(torch.eye(channels, device=device, dtype=torch.float32), width) * width**0.5).round()[
        places(coded, channels).to(device)
    ]
    for tile in range(tiles):
        columns = order[tile * channels : (tile + 1) * channels]
        matrix[tile, :, : len(columns)] = rows[:, columns - tile * channels] * coded.sign[columns].to(device)
    return matrix


def _dense_matrix(coded: Coded, order: Tensor, channels: int) -> Tensor:
    """Return the matrix by which all codes of a token are multiplied for each tile of columns, where an odd factor is
    mixed over the tiles: +1 and -1, so exact, or of a cosine transform, rounded to float16.
    """
    device, count = coded.grid.device, coded.sign.numel()
    rows = unrotate(
        torch.eye(count, dtype=torch.float64, device="cpu"), coded.sign.cpu(), coded.width, coded.factor, coded.mix
    )
    tiles, at = -(-count // channels), places(coded, channels)
    matrix = torch.zeros(tiles * channels, tiles * channels, dtype=torch.float16, device="cpu")
    matrix[:count, :count] = (rows * _norm_width(coded) ** 0.5)[:, order.cpu()]
    wide = matrix.reshape(tiles, channels, tiles, channels).permute(2, 0, 1, 3)
    return wide[:, :, at].contiguous().to(device)


def _norm_width(coded: Coded) -> int:
    """Return by whose root the kernel divides the matrix's products: the channels of which entries of one magnitude
    mix.
    """
    return coded.width * coded.factor if coded.mix == "hadamard" else coded.width


def depth_of(coded: Coded, launch: Launch) -> int:
    """Return the rows of the weights that a program takes a step: a power of two that divides head_dim."""
    return min(launch.depth, coded.dim & -coded.dim)


def settings(coded: Coded, prepared: Prepared, inputs: int, rows: int, launch: Launch) -> dict[str, object]:
    """Return the compile-time constants of dequantise_kernel except for ASM. None follows from the number of tokens,
    except that BM divides it.
    """
    channels, whole = prepared.channels, coded.heads * coded.dim % prepared.channels == 0
    codes = Codes(
        coded.heads,
        coded.dim,
        coded.grid.shape[1],
        coded.bits,
        coded.packed_count,
        coded.key,
        coded.block,
        coded.codes.shape[-1],
        _norm_width(coded),
        coded.norm.shape[1],
        _wordwise(coded, channels),
        coded.factor > 1,
        coded.factors is not None,
    )
    return {
        "CODES": codes,
        "INPUTS": inputs,
        "R": prepared.rotary_dim,
        "FULL": rows % launch.tokens == 0 and whole,
        "BM": launch.tokens,
        "BN": channels,
        "BK": depth_of(coded, launch),
        "STAGES": launch.stages,
    }
