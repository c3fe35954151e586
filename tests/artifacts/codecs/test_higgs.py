"""A norm spans no more than its rotation mixes: HIGGS and TurboQuant on kv heads of unequal size."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcal.methods.registry import codec_maker
from kvcal_artifacts.codecs import Higgs, Role, Shape, Transform, build, state_of
from kvcal_artifacts.codecs.higgs import Span
from kvcal_artifacts.codecs.higgs_grids import GRID_MSE, gaussian_grid
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import KVCalError
from kvcal_kernels.hadamard import Mix, cosines, largest_power_of_two, paley, paley_order, rotate, signs, unrotate

ROTATED = [name for name in CODEC_MAKERS if name.startswith(("higgs", "turboquant")) and "channel" not in name]
SHAPES = [(1, 64), (2, 64), (3, 64), (5, 64), (7, 64), (12, 64), (2, 96), (3, 96), (4, 80), (3, 32), (9, 16), (20, 64),
          (24, 64), (40, 64), (16, 96), (23, 64), (26, 32)]  # fmt: skip
LARGE = [(12, 64), (16, 96), (20, 64), (24, 64), (40, 128), (6, 96), (28, 64), (36, 32), (12, 80), (3, 64)]


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


@pytest.mark.parametrize("factor", range(3, 64, 2))
def test_matrices_of_paley_are_hadamard_matrices(factor: int) -> None:
    """Entries of one magnitude, orthogonal rows; the smallest order that there is: 12, 20, 28, 36, 44, 104, 60, ..."""
    order = paley_order(64, factor)
    if factor in (43, 47, 59):  # 172, 376 and 472 are no orders of Paley's for a prime, 752 is too many additions
        assert order == 0
        return
    assert order % (4 * factor) == 0 and order & (order - 1)
    matrix = paley(order, torch.device("cpu"))
    assert torch.equal(matrix.abs(), torch.ones(order, order))
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


def rotation_matrix(width: int, factor: int, mix: Mix, sign: Tensor) -> Tensor:
    """y = x M, from the definition: float64 (width * factor, width * factor)."""
    count, interleaved = width * factor, mix == "interleaved"
    if mix == "hadamard" and factor > 1:
        whole = paley_order(width, factor)
        t, low = whole // factor, min(4, count // whole)
        place = torch.arange(count).view(factor, -1, t, low).transpose(1, 2).flatten()
        size = count // whole
        signed = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        both = torch.kron(paley(whole, sign.device).double().T.contiguous(), torch.tensor(signed, dtype=torch.float64))
        mixed = torch.empty_like(both)
        mixed[place[:, None], place] = both / count**0.5
        return sign.double()[:, None] * mixed
    signed = [[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    hadamards = torch.block_diag(*[torch.tensor(signed, dtype=torch.float64) / width**0.5] * factor)
    order = torch.arange(count).view(factor, width).T.flatten() if interleaved else torch.arange(count)
    across = torch.kron(cosine_matrix(factor), torch.eye(width, dtype=torch.float64))
    return torch.diag(sign.double())[:, order] @ hadamards @ across.T


@pytest.mark.parametrize("mix", ["cosine", "interleaved", "hadamard"])
@pytest.mark.parametrize(
    ("width", "factor"), [(64, 1), (64, 3), (32, 3), (16, 5), (128, 7), (4, 3), (8, 15), (8, 13), (64, 9)]
)
def test_rotation_is_that_of_its_matrix(width: int, factor: int, mix: Mix) -> None:
    count = width * factor
    sign, x = signs(2 * count, 5), normal(3, 2 * count)
    y = rotate(x, sign, width, factor, mix)
    parts = [
        x.double()[:, at : at + count]
        @ rotation_matrix(width, factor, mix if factor > 1 else "cosine", sign[at : at + count])
        for at in (0, count)
    ]
    assert torch.allclose(y.double(), torch.cat(parts, 1), atol=2e-5)
    assert torch.allclose(unrotate(y, sign, width, factor, mix), x, atol=2e-5)


@pytest.mark.parametrize(
    ("width", "factor"), [(64, 3), (32, 3), (256, 3), (512, 3), (64, 5), (16, 5), (128, 7), (64, 9), (8, 15), (64, 23)]
)
def test_every_entry_of_a_rotation_has_one_magnitude(width: int, factor: int) -> None:
    """So numbers of any variances become numbers of one: by a cosine transform they did only where these are alike."""
    count = width * factor
    matrix = rotate(torch.eye(count), signs(count, 2), width, factor) * count**0.5
    assert torch.allclose(matrix.abs(), torch.ones(count, count), atol=1e-4)
    assert torch.allclose(matrix @ matrix.T / count, torch.eye(count), atol=1e-4)


@pytest.mark.parametrize(("width", "factor"), [(2, 3), (1, 3), (64, 43), (4, 13)])
def test_an_odd_factor_without_a_matrix_is_refused(width: int, factor: int) -> None:
    x = normal(1, width * factor)
    for turn in (rotate, unrotate):
        with pytest.raises(ValueError, match=f"no Hadamard matrix of Paley for {width} x {factor} numbers"):
            turn(x, signs(width * factor, 1), width, factor)
        with pytest.raises(ValueError, match="mixed by 'none': allowed are 'hadamard', 'cosine', 'interleaved'"):
            turn(x, signs(width * factor, 1), width, factor, "none")


def test_rotation_of_a_power_of_two_is_the_same_with_and_without_mixing() -> None:
    shape, x = Shape(4, 64, 32), normal(1, 4, 32, 64)
    for span in ("head", "token"):
        mixed, plain = (Higgs(shape, "key", rotation=span, mixed=mixed) for mixed in ("hadamard", "none"))  # type: ignore[arg-type]
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
    st.lists(st.floats(0.1, 10), min_size=40, max_size=40),
    st.integers(0, 1000),
)
def test_heads_of_unequal_size_cost_no_more_than_equal_ones(
    name: str, shape: tuple[int, int], role: Role, sizes: list[float], seed: int
) -> None:
    """A grid's MSE is that of a unit Gaussian, and so is a token's, whatever the sizes of its heads."""
    codec = codec_maker(name)(Shape(*shape, 32), role)
    assert isinstance(codec, Higgs)
    x = normal(1, shape[0], 128, shape[1], seed=seed) * torch.tensor(sizes[: shape[0]])[:, None, None]
    bias = codec._gain - 1  # what a larger stored norm adds
    assert error(codec, x) <= 1.08 * (GRID_MSE[codec.d, codec.n] + bias * bias)


@pytest.mark.parametrize("name", ["higgs-2-wide", "higgs-4-wide", "higgs-2-d4-wide"])
@pytest.mark.parametrize("shape", LARGE)
def test_one_large_head_costs_no_more_than_a_norm_for_each_head(name: str, shape: tuple[int, int]) -> None:
    """One head k times as large as the others, wherever it is: the error of even heads and of a grid's own, within
    what 64 tokens of that head vary by.
    """
    heads, dim = shape
    codec = codec_maker(name)(Shape(heads, dim, 32), "key")
    assert isinstance(codec, Higgs) and codec.mixed in ("none", "hadamard")
    x = normal(1, heads, 64, dim, seed=3)
    expected = max(error(codec, x), GRID_MSE[codec.d, codec.n])
    for head, times in dict.fromkeys([(0, 2), (0, 5), *((head, 20) for head in (0, heads // 3, heads - 1))]):
        uneven = x.clone()
        uneven[:, head] *= times
        assert error(codec, uneven) < 1.05 * expected, (head, times)


@pytest.mark.parametrize("shape", [(43, 64), (59, 128), (86, 64)])
def test_heads_that_no_matrix_mixes_are_spread_by_a_cosine_transform(shape: tuple[int, int]) -> None:
    codec = Higgs(Shape(*shape, 32), "key", rotation="token")
    assert codec.mixed == "cosine" and codec.config()["mixed"] is True
    x = normal(1, shape[0], 64, shape[1], seed=3)
    for head in (0, 1, shape[0] // 2, shape[0] - 1):
        uneven = x.clone()
        uneven[:, head] *= 20
        assert error(codec, uneven) < 1.05 * error(codec, x), head


@pytest.mark.parametrize("mixed", ["hadamard", "cosine"])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (5, 64), (6, 64), (2, 96), (12, 16), (16, 24), (20, 16)])
def test_codec_is_a_float64_reference(heads: int, dim: int, mixed: Literal["cosine", "hadamard"]) -> None:
    """Rotation by its matrix, norm, nearest point and back, all in float64: the same codes but for ties."""
    shape, sizes = Shape(heads, dim, 32), torch.arange(1.0, heads + 1)
    codec, x = Higgs(shape, "key", rotation="token", mixed=mixed), normal(1, heads, 64, dim) * sizes[:, None, None]
    width = largest_power_of_two(heads * dim)
    matrix = rotation_matrix(width, heads * dim // width, codec.mix, codec.sign)
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
    assert isinstance(read, Higgs) and read.mixed == "none" and state_of(read)["config"] == older
    assert error(read, x) > 0.2 and error(now, x) < 0.108
    again = build(now.shape, "key", state_of(now), now.tensors())
    assert (
        isinstance(again, Higgs)
        and again.mixed == "hadamard"
        and torch.equal(again.encode(x)["codes"], now.encode(x)["codes"])
    )
    apart = Higgs(Shape(3, 64, 32), "key", rotation="head", norm="token")
    assert error(apart, x) > 0.2 and error(Higgs(Shape(3, 64, 32), "key"), x) < 0.108


@pytest.mark.parametrize(("heads", "dim", "rotation"), [(12, 64, "token"), (3, 64, "token"), (2, 96, "head")])
def test_bundles_of_a_cosine_transform_keep_their_meaning(heads: int, dim: int, rotation: Span) -> None:
    """`mixed` true, as it was written before: read, written again and decoded as it was."""
    shape, x = Shape(heads, dim, 32), normal(1, heads, 64, dim)
    older = {"d": 2, "n": 16, "rotation": rotation, "norm": rotation, "seed": 0, "axis": "channel", "gain": "mse"}
    older["mixed"] = True
    now = Higgs(shape, "key", rotation=rotation)
    assert now.config() == {**older, "mixed": "hadamard"}
    read = build(shape, "key", {"codec": "higgs", "config": dict(older)}, now.tensors())
    assert isinstance(read, Higgs) and read.config() == older
    packed = read.encode(x)
    assert not all(torch.equal(a, b) for a, b in zip(packed.values(), now.encode(x).values(), strict=True))
    made, width = read.decode(packed)[0].double(), largest_power_of_two(dim * (heads if rotation == "token" else 1))
    factor = (heads * dim if rotation == "token" else dim) // width
    points, norm = gaussian_grid(2, 16).double()[read.codes(packed).long()], packed["norm"].double()
    y = points.flatten(-2)[0].flatten(0, 1)
    matrix = rotation_matrix(
        width, factor, "interleaved" if rotation == "token" else "cosine", read.sign[: width * factor]
    )
    if rotation == "token":
        wanted = (y * norm[0].flatten()[:, None]) @ matrix.T
    else:
        signs_apart = read.sign.double().view(heads, dim)
        parts = y.view(64, heads, dim) * norm[0].flatten(1).T[..., None]
        wanted = (parts @ (matrix * read.sign[:dim, None].double()).T * signs_apart).flatten(1)
    assert torch.allclose(made.transpose(0, 1).flatten(1), wanted, atol=1e-5)


@pytest.mark.parametrize("mixed", [1, None, "cosine", "hadamard", True])
def test_what_mixes_nothing_is_refused(mixed: object) -> None:
    """Heads of 64 have no odd factor, 43 heads of 64 no Hadamard matrix."""
    for shape, why in (
        (Shape(2, 64, 32), "its rotation has no odd factor"),
        (Shape(43, 64, 32), "a Hadamard matrix mixes"),
    ):
        now = Higgs(shape, "key", rotation="token")
        if mixed is True and now.mixed == "cosine":
            continue
        says = why if mixed == "hadamard" or mixed is True else "must be true, false or 'hadamard'"
        with pytest.raises(KVCalError, match=says):
            build(shape, "key", {"codec": "higgs", "config": {**now.config(), "mixed": mixed}}, now.tensors())


def test_transform_has_coordinates_of_unit_variance_before_its_norm() -> None:
    """The other codec with one norm over heads: its basis, fitted, holds their sizes."""
    sizes = torch.tensor([1.0, 1.0, 5.0])[:, None, None]
    x = normal(1, 3, 512, 64) * sizes
    decoder = torch.eye(64).expand(3, -1, -1) * sizes
    assert error(Transform(Shape(3, 64, 32), "key", decoder=decoder), x) < 0.108
