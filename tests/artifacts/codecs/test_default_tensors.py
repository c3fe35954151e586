"""Codecs and presets are the same bytes whatever torch makes tensors on, and of, by default."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal.evaluate.codec_contract import Subject
from kvcal.evaluate.codec_contract.subject import tensors_by_name
from kvcal.methods.data_free import PRESETS
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.codecs import CODECS, Shape, build, higgs, state_of
from kvcal_artifacts.errors import KVCalError
from kvcal_kernels.hadamard import paley, paley_order, reference, rotate, unrotate
from kvcal_kernels.layout import grids
from tests.artifacts.codecs.test_codecs import cases
from tests.support.architectures import TINY, initialise
from tests.support.cases.default_cases import DEFAULTS, caches, making, require_same

CASES: dict[str, Subject] = {case.id: case.values[0] for case in cases([Shape(2, 64, 16)])[::2]}  # keys, mostly


def everything(subject: Subject) -> dict[str, Tensor]:
    """What a codec keeps, packs and unpacks, made anew and read from its state."""
    codec, block = subject.codec(), subject.shape.block
    context = subject.context(1, 2 * block)
    packed, decoded = codec.encode_decode(subject.noise(1, 2), context)
    state, tensors = state_of(codec), codec.tensors()
    again = build(subject.shape, subject.role, state, tensors)
    return {
        "decoded": decoded,
        "unpacked": again.decode(packed, context),
        **{f"packed {name}": tensor for name, tensor in tensors_by_name(packed).items()},
        **{f"state {name}": tensor for name, tensor in again.tensors().items()},
    }


@cache
def usual() -> dict[str, dict[str, Tensor]]:
    return {name: everything(subject) for name, subject in CASES.items()}


@DEFAULTS
def test_codecs_are_the_same_bytes(default: str) -> None:
    expected = usual()
    assert {type(subject.codec()) for subject in CASES.values()} == set(CODECS.values())
    with making(default):
        actual = {name: everything(subject) for name, subject in CASES.items()}
    for name in CASES:
        require_same(actual[name], expected[name], f"{name}, by default {default}")


@cache
def model() -> Any:
    tiny = TINY["llama"](num_hidden_layers=1, num_key_value_heads=2, head_dim=64)
    initialise(tiny, 1)
    return tiny


@cache
def bundles() -> dict[str, bytes]:
    return {name: Bundle(Fingerprint.of(model()), one.scheme(model()), {}).to_bytes() for name, one in PRESETS.items()}


@DEFAULTS
def test_presets_are_the_same_bundles(default: str) -> None:
    expected = bundles()
    with making(default):
        assert bundles.__wrapped__() == expected


@DEFAULTS
@pytest.mark.parametrize(("width", "factor", "mix"), [(64, 1, "none"), (32, 3, "hadamard"), (16, 5, "cosine")])
def test_rotations_are_the_same_bytes(width: int, factor: int, mix: Any, default: str) -> None:
    x = torch.randn(2, width * factor, generator=torch.Generator().manual_seed(0))

    def rotated() -> dict[str, Tensor]:
        sign = reference.signs(width * factor, 7)
        there = rotate(x, sign, width, factor, mix)
        matrices = {f"paley {n}": paley(paley_order(64, n), x.device) for n in (3, 5, 7)}
        return {"sign": sign, "there": there, "back": unrotate(there, sign, width, factor, mix), **matrices}

    expected = rotated()
    with making(default):
        require_same(rotated(), expected, f"by default {default}")


@DEFAULTS
def test_searches_find_the_same_points(default: str) -> None:
    """Tables that kernels read: points rounded to a step, and the factor with which float16 rounds them best."""

    def tables() -> dict[str, Tensor]:
        points = higgs.gaussian_grid(2, 16)
        table, factor = grids.table_of(points, 2)
        numbers = [factor, grids.rounding_factor(points.double())]
        exact = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return {"table": table, "numbers": exact, "bytes": grids.in_bytes(points)}

    expected = tables()
    with making(default):
        require_same(tables(), expected, f"by default {default}")


def test_a_tensor_without_a_device_or_dtype_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: signs as they were made once, and points of the default dtype."""
    subject = next(one for name, one in CASES.items() if name.startswith("higgs-"))
    expected = everything(subject)

    def signs(width: int, seed: int) -> Tensor:
        return (torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1).to(torch.int8)

    with monkeypatch.context() as patch, making("meta"):
        patch.setattr(higgs, "signs", signs)
        with pytest.raises((RuntimeError, NotImplementedError)):
            require_same(everything(subject), expected, "signs")
    points = higgs.gaussian_grid

    def rounded(*sizes: int) -> Tensor:
        return torch.tensor(points(*sizes).tolist(), device="cpu")

    with monkeypatch.context() as patch, making("bfloat16"):
        patch.setattr(higgs, "gaussian_grid", rounded)
        with pytest.raises(KVCalError, match="bfloat16: needs"):
            require_same(everything(subject), expected, "points")


def test_constants_are_made_anew() -> None:
    """Nothing that was made before hides what is made under another default."""
    paley(12, torch.device("cpu"))
    assert paley in caches()
    with making("meta"):
        assert paley.cache_info().currsize == 0
        assert torch.zeros(1).device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"
