"""Debiased HIGGS: values right on average, keys of the right length; the published form is short in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcal_artifacts.codecs import Higgs, Shape
from kvcal_artifacts.codecs.higgs_grids import GRID_MSE

SHAPE = Shape(2, 64, 32)


def coded(role: str, gain: str, d: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 2, 4096, 64, generator=torch.Generator().manual_seed(7))
    # a norm of 128 numbers: of fewer, what the norm itself says of them shows in the third digit
    codec = Higgs(SHAPE, role, d=d, n=n, gain=gain, norm="token")  # type: ignore[arg-type]
    return x, codec.decode(codec.encode(x))


def slope(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of the regression of y on x: what an average over many tokens comes back as."""
    return float((x * y).sum() / (x * x).sum())


@pytest.mark.parametrize(("d", "n"), GRID_MSE)
def test_published_values_come_back_short_debiased_ones_do_not(d: int, n: int) -> None:
    assert slope(*coded("value", "mse", d, n)) == pytest.approx(1 - GRID_MSE[d, n], abs=0.004)
    assert slope(*coded("value", "debiased", d, n)) == pytest.approx(1, abs=0.004)


@pytest.mark.parametrize(("d", "n"), GRID_MSE)
def test_debiased_keys_keep_their_length(d: int, n: int) -> None:
    x, short = coded("key", "mse", d, n)
    _, right = coded("key", "debiased", d, n)
    assert float(short.norm() / x.norm()) == pytest.approx((1 - GRID_MSE[d, n]) ** 0.5, abs=0.004)
    assert float(right.norm() / x.norm()) == pytest.approx(1, abs=0.004)


def test_codes_do_not_depend_on_the_gain() -> None:
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(8))
    codecs: list[Any] = [Higgs(SHAPE, "value", gain=gain) for gain in ("mse", "debiased")]  # type: ignore[arg-type]
    plain, debiased = (codec.codes(codec.encode(x)) for codec in codecs)
    assert (plain == debiased).float().mean() > 0.99  # the stored norm rounds elsewhere, which moves a few
