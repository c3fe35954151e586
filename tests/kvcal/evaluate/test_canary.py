"""When two computations of the same decoded blocks count as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcal.evaluate.canary import _rotated_sizes, _same
from kvcal.models.configuration import structure
from kvcal.models.names import resolve
from kvcal_artifacts import hf
from tests.support.models_fixture import kvcal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def states() -> torch.Tensor:
    return torch.randn(2, 3, 512, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounding_of_float32_is_the_same(dtype: torch.dtype) -> None:
    """Products of matrices of other shapes differ by it, and rounding to 16 bits may turn it into a whole step."""
    expected = states()
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    assert _same(expected.to(dtype), (expected + 1e-6 * noise).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_what_8_bits_leave_out_is_not_the_same(dtype: torch.dtype, share: float) -> None:
    """share: of the values' size that the codec stored, where predictors gave the rest."""
    exact, stored = states(), share * states()
    step = (stored.amax(-1, keepdim=True) - stored.amin(-1, keepdim=True)) / 255
    decoded = exact - stored + (stored / step).round() * step
    assert not _same(decoded.to(dtype), exact.to(dtype))


def concentrated() -> torch.Tensor:
    """Keys of one block, of which one channel has nearly all squares, as in some heads of SmolLM2."""
    keys = states()[:, :, :32]
    keys[..., 5] = 40 + keys[..., 5]
    return keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_of_one_large_number_is_the_same(dtype: torch.dtype) -> None:
    """Alone it has 2e-6 of the squares in bfloat16, twenty times what all roundings together may have."""
    expected = concentrated().to(dtype)
    received = expected.clone()
    received[0, 1, 7, 5] *= 1 + torch.finfo(dtype).eps
    assert not torch.equal(expected, received)
    assert _same(expected, received)
    received[0, 1, 8, 5] *= 1 + 4 * torch.finfo(dtype).eps
    assert not _same(expected, received)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [2, 3])
def test_what_8_bits_leave_out_of_one_large_channel_is_not_the_same(dtype: torch.dtype, axis: int) -> None:
    """axis: along which numbers share a scale, the tokens of a channel (2) or the channels of a token (3)."""
    exact = concentrated()
    step = (exact.amax(axis, keepdim=True) - exact.amin(axis, keepdim=True)) / 255
    assert not _same(((exact / step).round() * step).to(dtype), exact.to(dtype))


def rotated_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys after RoPE as Transformers' Llama turns them in their own dtype, and _rotated_sizes of them."""
    angles = torch.arange(keys.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    table = tuple(torch.cat([wave(angles)] * 2, -1)[None].to(keys.dtype) for wave in (torch.cos, torch.sin))
    site = hf.attention_site(hf.decoder_of(structure(resolve("tiny"))), 0)
    return site.rotate(keys, *table), _rotated_sizes(site, keys, (table[0], table[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_before_rope_is_the_same(dtype: torch.dtype) -> None:
    """Two large numbers of a pair may leave a small one, of which it is many steps: SmolLM2's layer 14 on an H200."""
    before = concentrated().to(dtype)
    before[..., 5 + 32] += 40
    other = before.clone()
    other[0, 1, 3, 5] *= 1 + torch.finfo(dtype).eps
    (expected, sizes), (received, _) = rotated_keys(before), rotated_keys(other)
    assert not _same(expected, received)  # as numbers that nothing rotates
    assert _same(expected, received, sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("keys", [states, concentrated])
def test_what_8_bits_leave_out_before_rope_is_not_the_same(
    dtype: torch.dtype, axis: int, keys: Callable[[], torch.Tensor]
) -> None:
    exact = keys()
    step = (exact.amax(axis, keepdim=True) - exact.amin(axis, keepdim=True)) / 255
    (expected, sizes), (received, _) = (rotated_keys(x.to(dtype)) for x in ((exact / step).round() * step, exact))
    assert not _same(expected, received, sizes)


def test_one_head_of_one_row_is_enough() -> None:
    received = states()
    received[1, 2] += 0.01
    assert not _same(states(), received)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_predicted_keys_and_values_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    """Its products of matrices differ with the number of tokens."""
    bundle = tmp_path / "aqua.kvcal.safetensors"
    fit = kvcal("fit-predictors", "--windows", 8, "--length", 512, "--output", bundle, "--device", "cuda")
    assert fit.code == 0, fit.err
    done = kvcal("eval", bundle, "--device", "cuda", "--dtype", dtype, "--windows", 4, "--length", 1024, "--batch", 4)
    assert done.code == 0, done.err
