"""Which tokens attention sees, and the centre that the transform codec takes of them, against float64 references."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal.methods import attention
from kvcal.methods.attention import squared_weights
from kvcal.methods.statistics import Moments
from kvcal.methods.transform import CalibratedTransform, fit_transform
from kvcal_artifacts import hf
from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.scheme import Frame, Windows
from tests.kvcal.methods.test_calibrated import coded, shown, usual
from tests.support import schemes
from tests.support.architectures import TINY

WINDOWS = Windows(4, 16, 8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(weights: Tensor, windows: Windows, positions: list[int], heads: int) -> Tensor:
    """Squares of attention weights (B, query heads, T, T) of packed tokens, summed query by query: (B, H, T)."""
    rows, wide, length, _ = weights.shape
    squares = torch.zeros(rows, heads, length, dtype=torch.float64)
    for t in positions:
        packed = max(0, (t - windows.sink - windows.recent) // windows.block) * windows.block
        seen = slice(windows.sink, windows.sink + packed)
        for head in range(wide):
            squares[:, head // (wide // heads), seen] += weights[:, head, t, seen].double() ** 2
    return squares


@pytest.mark.parametrize(("length", "at_once"), [(61, 1 << 24), (61, 7 * 61 * 12), (92, 1)])
def test_squared_weights_are_those_of_a_softmax(length: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kv heads of two query heads each, whatever part of the queries is in memory at a time."""
    monkeypatch.setattr(attention, "SCORES", at_once)
    q, k = 2 * normal(2, 6, length, 16), normal(2, 3, length, 16, seed=1)
    scores = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT
    exact = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)
    expected = reference(exact, WINDOWS, list(range(28, length)), 3)
    torch.testing.assert_close(squared_weights(q, k, WINDOWS, 0.3), expected, rtol=1e-5, atol=1e-9)
    assert bool((expected[:, :, 4:28] > 0).all())


def test_of_long_windows_queries_are_sampled() -> None:
    length, count = 28 + 320, 64
    flat = squared_weights(torch.zeros(1, 2, length, 16), normal(1, 1, length, 16), WINDOWS, 1.0)[0, 0]
    positions = [round(28 + i * (length - 1 - 28) / (count - 1)) for i in range(count)]
    expected = sum(2 / (t + 1) ** 2 for t in positions)
    assert float(flat[4]) == pytest.approx(expected, rel=1e-5) and not flat[:4].any()


def test_windows_that_pack_nothing_have_no_weights() -> None:
    assert not squared_weights(normal(1, 2, 28, 16), normal(1, 2, 28, 16), WINDOWS, 1.0).any()


def test_the_centre_is_a_weighted_mean_and_the_spread_is_about_it() -> None:
    x, weights = normal(6, 3, 40, 16).double() + 2, normal(6, 3, 40, seed=1).double().square()
    weights[:, 2] = 0
    seen = Moments(Shape(3, 16, 8), torch.device("cpu"))
    for rows in (slice(0, 4), slice(4, 6)):
        part = Moments(Shape(3, 16, 8), torch.device("cpu"))
        part.add(x[rows])
        part.attend(x[rows], weights[rows])
        seen.merge(part)
    centre = torch.stack([(weights[:, h, :, None] * x[:, h]).sum((0, 1)) / weights[:, h].sum() for h in range(2)])
    centre = torch.cat([centre, x[:, 2:].mean((0, 2))])  # no weight given to that head: of all tokens alike
    torch.testing.assert_close(seen.centre(), centre)
    apart = (x - centre[:, None]).movedim(1, 0).flatten(1, 2)
    torch.testing.assert_close(seen.spread(centre), apart.mT @ apart / apart.shape[1])


@pytest.mark.parametrize("bits", [2, 3.9])
def test_tokens_that_attention_sees_most_have_small_errors(bits: float) -> None:
    """One value in 64 is nearly 0 and gets nearly all attention; the rest lie about a mean of 4 deviations. About the
    mean of all, the error of those was as large as that of the rest.
    """
    values = normal(1, 2, 4096, 16) + 4 * normal(2, 1, 16, seed=1)
    sinks = torch.arange(4096) % 64 == 0
    values[:, :, sinks] *= 0.02
    weights = torch.where(sinks, 0.5, 1e-4).double().expand(1, 2, -1)
    seen = Moments(Shape(2, 16, 8), torch.device("cpu"))
    seen.add(values)
    seen.attend(values, weights)

    def error(codec: Transform) -> float:
        squares = (codec.decode(codec.encode(values)) - values).double().square().sum(-1)
        return float((weights * squares).sum())

    spread, mean = seen.covariance()
    plain = fit_transform(Shape(2, 16, 8), "value", spread, seen.metric(), mean, bits, "mse")
    assert error(CalibratedTransform(bits).fit(Shape(2, 16, 8), "value", seen)) < 0.2 * error(plain)


def projected(model: Any, ids: Tensor, name: str) -> list[Tensor]:
    """Outputs of a projection of each layer, (B, heads, T, D)."""
    outputs: list[Tensor] = []
    sites = hf.attention_sites(model)
    hooks = [
        getattr(site.module, name).register_forward_hook(
            lambda _, __, out, dim=site.head_dim: outputs.append(out.unflatten(-1, (-1, dim)).transpose(1, 2))
        )
        for site in sites
    ]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


@pytest.mark.parametrize("frame", ["pre_rope", "post_rope"])
def test_a_fit_centres_keys_and_values_where_the_models_attention_is(frame: Frame) -> None:
    """Against the attention weights that the model itself gives out."""
    model = TINY["llama"]()
    model.set_attn_implementation("eager")
    fitted = schemes.aqua("llama", backbone="transform-2", first_layer="", key_inputs=(), value_inputs=(), rope=frame)
    ids = schemes.token_ids(6, 68, seed=1)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
        keys, values = (projected(model, ids, name) for name in ("k_proj", "v_proj"))
    rope = hf.rope_tables(model, torch.arange(68)[None], torch.float32)
    for layer, site in enumerate(hf.attention_sites(model)):
        pair = fitted.layers[layer]
        assert pair is not None
        if frame == "post_rope":
            keys[layer] = site.rotate(keys[layer], *rope)
        for codec, x in ((pair.key, keys[layer]), (pair.value, values[layer])):
            assert isinstance(codec, Transform)
            weight = reference(weights[layer], schemes.WINDOWS, list(range(28, 68)), x.shape[1])
            centre = (weight[..., None] * x).sum((0, 2)) / weight.sum((0, 2))[:, None]
            torch.testing.assert_close(codec.mean.double(), centre, rtol=2e-3, atol=1e-4)
            assert not torch.allclose(centre.float(), x[:, :, 4:].mean((0, 2)), atol=1e-3)


def test_without_queries_the_centre_is_of_all_tokens_alike() -> None:
    k, q = usual()
    data = shown(k, q)
    data.taps.site = SimpleNamespace(odd="its keys are normed twice")  # type: ignore[assignment]
    seen = data.moments(attended=True)
    assert not seen.attention.any()
    torch.testing.assert_close(seen.centre().float(), coded(k).mean((0, 2)), rtol=1e-4, atol=1e-5)
