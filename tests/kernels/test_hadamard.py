"""The sign-Hadamard rotation against Sylvester's matrix, and sums whose bits depend on nothing but their terms."""

from __future__ import annotations

import pytest
import torch

from kvcal_artifacts.codecs import Higgs, Shape
from kvcal_artifacts.codecs.higgs import Span
from kvcal_kernels.hadamard import hadamard, largest_power_of_two, rotate, signs, tree_sum, unrotate

WIDTHS = [1, 2, 4, 16, 64, 128, 1024]
# Pinned: bundles store the seed's signs, but a codec built anew must agree with one that was read
FIRST_SIGNS = [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1]


def sylvester(width: int) -> torch.Tensor:
    """H[i, j] = (-1) ** popcount(i & j) / sqrt(width), float64."""
    signed = [[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(signed, dtype=torch.float64).div(width**0.5)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", WIDTHS)
def test_is_the_sylvester_matrix(width: int) -> None:
    matrix = sylvester(width)
    assert torch.allclose(hadamard(torch.eye(width), width).double(), matrix, atol=1e-6)
    x = normal(3, 2 * width)
    expected = (x.double().view(3, 2, width) @ matrix).view(3, -1)
    assert torch.allclose(hadamard(x, width).double(), expected, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_orthonormal_and_its_own_inverse(width: int) -> None:
    x = normal(5, 3 * width)
    turned = hadamard(x, width)
    norms = [t.view(5, 3, width).norm(dim=-1) for t in (x, turned)]
    assert torch.allclose(norms[0], norms[1], rtol=1e-5)
    assert torch.allclose(hadamard(turned, width), x, atol=1e-5)


@pytest.mark.parametrize(("channels", "width"), [(64, 64), (96, 32), (80, 16), (288, 32), (7, 1)])
def test_unrotate_undoes_rotate(channels: int, width: int) -> None:
    assert largest_power_of_two(channels) == width
    x, sign = normal(4, channels), signs(channels, 3)
    assert torch.allclose(unrotate(rotate(x, sign, width), sign, width), x, atol=1e-5)


def test_signs_never_change() -> None:
    assert signs(16, 0).tolist() == FIRST_SIGNS
    assert signs(64, 0)[:16].tolist() == FIRST_SIGNS
    assert signs(64, 0).dtype == torch.int8
    assert not torch.equal(signs(64, 0), signs(64, 1))
    torch.manual_seed(5)  # the global generator is neither read nor moved
    before = torch.get_rng_state()
    assert signs(16, 0).tolist() == FIRST_SIGNS
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("rotation", "unsigned_error"), [("head", 0.68), ("token", 0.87)])
@pytest.mark.parametrize("value", [0.7, -3.0])
def test_constant_vector_costs_what_a_gaussian_does(rotation: Span, unsigned_error: float, value: float) -> None:
    """Without signs a constant turns into one spike, and the grid's outermost point misses it: 0.89 (1024 wide)."""
    shape = Shape(8, 128, 8)
    x = torch.full((1, 8, 8, 128), value)
    assert constant_error(Higgs(shape, "key", rotation=rotation), x) == pytest.approx(0.1075, rel=0.1)
    unsigned = Higgs(shape, "key", rotation=rotation, sign=torch.ones(1024))
    assert constant_error(unsigned, x) > unsigned_error


def constant_error(codec: Higgs, x: torch.Tensor) -> float:
    made = codec.decode(codec.encode(x))
    return float((made - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 31, 80, 96, 288, 1000, 1024])
def test_tree_sum_is_the_sum(count: int) -> None:
    x = normal(7, 2, count).square()
    assert torch.allclose(tree_sum(x).double(), x.double().sum(-1), rtol=1e-6)
    mixed = normal(7, 2, count)
    assert torch.allclose(tree_sum(mixed).double(), mixed.double().sum(-1), atol=1e-5)


@pytest.mark.parametrize("count", range(1, 40))
def test_tree_sum_adds_halves(count: int) -> None:
    """First half and second half are added; of an odd number the last stays behind their sums."""
    x = normal(5, count) * normal(5, count, seed=2).exp()
    numbers = list(x.unbind(-1))
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [a + b for a, b in zip(numbers[:half], numbers[half : 2 * half], strict=True)] + numbers[2 * half :]
    assert torch.equal(tree_sum(x), numbers[0])


@pytest.mark.parametrize("count", [16, 80, 96, 1024])
def test_bits_do_not_depend_on_what_else_is_in_the_call(count: int) -> None:
    x, sign = normal(37, count) * normal(37, 1, seed=2).exp(), signs(count, 0)
    width = largest_power_of_two(count)
    total, turned = tree_sum(x), rotate(x, sign, width)
    back = unrotate(turned, sign, width)
    for start, stop in ((0, 1), (1, 2), (3, 10), (10, 37), (36, 37)):
        part = x[start:stop]
        assert torch.equal(tree_sum(part), total[start:stop])
        assert torch.equal(rotate(part, sign, width), turned[start:stop])
        assert torch.equal(unrotate(turned[start:stop], sign, width), back[start:stop])
    strided = torch.cat([x, x], -1).unflatten(-1, (2, -1)).transpose(0, 1)[1]
    assert torch.equal(tree_sum(strided), total)
    assert torch.equal(rotate(strided, sign, width), turned)
