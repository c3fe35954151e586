"""A norm spans no more than its rotation mixes: HIGGS and TurboQuant on kv heads of unequal size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcal.methods.registry import BACKBONES, backbone
from kvcal_artifacts.codecs import Higgs, Role, Shape, Transform, build, state_of
from kvcal_artifacts.codecs.higgs_grids import GRID_MSE, gaussian_grid
from kvcal_kernels.hadamard import cosines, largest_power_of_two, rotate, signs, unrotate

ROTATED = [name for name in BACKBONES if name.startswith(("higgs", "turboquant")) and "channel" not in name]
SHAPES = [(1, 64), (2, 64), (3, 64), (5, 64), (7, 64), (12, 64), (2, 96), (3, 96), (4, 80), (3, 32), (9, 16)]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosine_matrix(count: int) -> Tensor:
    """The DCT-II of unit vectors by torch's FFT of their even extension, orthonormal: float64 (count, count)."""
    units = torch.eye(count, dtype=torch.float64)
    spectrum = torch.fft.fft(torch.cat([units, units.flip(1)], 1), dim=1)[:, :count]
    phase = torch.exp(-1j * math.pi * torch.arange(count, dtype=torch.float64) / (2 * count))
    rows = (spectrum * phase).real.T / 2 * math.sqrt(2 / count)
    rows[0] /= math.sqrt(2)
    return rows.contiguous()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9, 15])
def test_cosines_are_those_of_the_fft(count: int) -> None:
    assert torch.allclose(torch.tensor(cosines(count), dtype=torch.float64), cosine_matrix(count), atol=1e-12)


def rotation_matrix(width: int, factor: int, interleaved: bool, sign: Tensor) -> Tensor:
    """y = x M, from the definition: float64 (width * factor, width * factor)."""
    count = width * factor
    signed = [[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    hadamards = torch.block_diag(*[torch.tensor(signed, dtype=torch.float64) / width**0.5] * factor)
    order = torch.arange(count).view(factor, width).T.flatten() if interleaved else torch.arange(count)
    across = torch.kron(cosine_matrix(factor), torch.eye(width, dtype=torch.float64))
    return torch.diag(sign.double())[:, order] @ hadamards @ across.T


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "factor"), [(64, 1), (64, 3), (32, 3), (16, 5), (128, 7), (1, 3)])
def test_rotation_is_that_of_its_matrix(width: int, factor: int, interleaved: bool) -> None:
    count = width * factor
    sign, x = signs(2 * count, 5), normal(3, 2 * count)
    y = rotate(x, sign, width, factor, interleaved)
    parts = [
        x.double()[:, at : at + count]
        @ rotation_matrix(width, factor, interleaved and factor > 1, sign[at : at + count])
        for at in (0, count)
    ]
    assert torch.allclose(y.double(), torch.cat(parts, 1), atol=2e-5)
    assert torch.allclose(unrotate(y, sign, width, factor, interleaved), x, atol=2e-5)


def test_rotation_of_a_power_of_two_is_the_same_with_and_without_mixing() -> None:
    shape, x = Shape(4, 64, 32), normal(1, 4, 32, 64)
    for span in ("head", "token"):
        mixed, plain = (Higgs(shape, "key", rotation=span, mixed=mixed) for mixed in (True, False))  # type: ignore[arg-type]
        assert state_of(mixed) == state_of(plain)
        assert all(torch.equal(a, b) for a, b in zip(mixed.encode(x).values(), plain.encode(x).values(), strict=True))


def error(codec: Any, x: Tensor) -> float:
    """Squared error of what the codec gives back, relative to x: the mean over heads and tokens together."""
    made = codec.decode(codec.encode(x)).double()
    return float((x.double() - made).square().sum() / x.double().square().sum())


@settings(max_examples=60)
@given(
    st.sampled_from(ROTATED),
    st.sampled_from(SHAPES),
    st.sampled_from(["key", "value"]),
    st.lists(st.floats(0.1, 10), min_size=12, max_size=12),
    st.integers(0, 1000),
)
def test_heads_of_unequal_size_cost_no_more_than_equal_ones(
    name: str, shape: tuple[int, int], role: Role, sizes: list[float], seed: int
) -> None:
    """A grid's MSE is that of a unit Gaussian, and so is a token's, whatever the sizes of its heads."""
    codec = backbone(name)(Shape(*shape, 32), role)
    assert isinstance(codec, Higgs)
    x = normal(1, shape[0], 128, shape[1], seed=seed) * torch.tensor(sizes[: shape[0]])[:, None, None]
    bias = codec._gain - 1  # what a larger stored norm adds
    assert error(codec, x) <= 1.08 * (GRID_MSE[codec.d, codec.n] + bias * bias)


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (5, 64), (6, 64), (2, 96)])
def test_codec_is_a_float64_reference(heads: int, dim: int) -> None:
    """Rotation by its matrix, norm, nearest point and back, all in float64: the same codes but for ties."""
    shape, sizes = Shape(heads, dim, 32), torch.arange(1.0, heads + 1)
    codec, x = Higgs(shape, "key", rotation="token"), normal(1, heads, 64, dim) * sizes[:, None, None]
    width = largest_power_of_two(heads * dim)
    matrix = rotation_matrix(width, heads * dim // width, True, codec.sign)
    y = x.double()[0].transpose(0, 1).flatten(1) @ matrix
    norm = y.square().mean(1, keepdim=True).sqrt()
    points = gaussian_grid(2, 16).double()
    chosen = torch.cdist((y / norm).reshape(-1, 2), points).argmin(1)
    back = ((points[chosen].view(64, -1) * norm) @ matrix.T).view(64, heads, dim).transpose(0, 1)
    made = codec.decode(codec.encode(x))[0].double()
    wrong = (made - back).norm(dim=(0, 2)) / back.norm(dim=(0, 2))
    assert float(wrong.median()) < 1e-3 and float((wrong < 1e-3).float().mean()) > 0.9


def test_one_norm_over_heads_that_no_rotation_mixes_is_what_was_wrong() -> None:
    """The older settings, which bundles may have, read as they were written."""
    x = normal(1, 3, 512, 64) * torch.tensor([1.0, 1.0, 5.0])[:, None, None]
    older = {"d": 2, "n": 16, "rotation": "token", "norm": "token", "seed": 0, "axis": "channel", "gain": "mse"}
    now = Higgs(Shape(3, 64, 32), "key", rotation="token")
    read = build(now.shape, "key", {"codec": "higgs", "config": older}, now.tensors())
    assert isinstance(read, Higgs) and not read.mixed and state_of(read)["config"] == older
    assert error(read, x) > 0.2 and error(now, x) < 0.108
    again = build(now.shape, "key", state_of(now), now.tensors())
    assert isinstance(again, Higgs) and again.mixed and torch.equal(again.encode(x)["codes"], now.encode(x)["codes"])
    apart = Higgs(Shape(3, 64, 32), "key", rotation="head", norm="token")
    assert error(apart, x) > 0.2 and error(Higgs(Shape(3, 64, 32), "key"), x) < 0.108


def test_transform_has_coordinates_of_unit_variance_before_its_norm() -> None:
    """The other codec with one norm over heads: its basis, fitted, holds their sizes."""
    sizes = torch.tensor([1.0, 1.0, 5.0])[:, None, None]
    x = normal(1, 3, 512, 64) * sizes
    decoder = torch.eye(64).expand(3, -1, -1) * sizes
    assert error(Transform(Shape(3, 64, 32), "key", decoder=decoder), x) < 0.108
