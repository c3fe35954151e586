"""The outlier guard, on a trained model that is given outlier channels without changing what it computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvcal import corpus
from kvcal.capture import WholeModel
from kvcal.evaluate.outliers import outlier_twin, write_outlier_twin
from kvcal.evaluate.perplexity import evaluate
from kvcal.fit import fit
from kvcal.forecast import Forecast, LayerChange, channel_ratio, expected_kl, forecasts
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.backbones import backbone
from kvcal.methods.plain import Preset, preset
from kvcal.models import load_model, resolve
from kvcal.outliers import GRADES, _factors, advice, grade, warnings
from kvcal.workbench import cache_makers
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.scheme import Scheme
from models_fixture import SUFFIX, kvcal


class LoadCounter(WholeModel):
    """loads: how often each layer was."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.loads: Counter[int] = Counter()

    def load_layer(self, index: int) -> nn.Module:
        self.loads[index] += 1
        return super().load_layer(index)


FRAGILE = {name: preset(name) for name in ("higgs-2", "higgs-3", "uniform-2", "uniform-4")}
STURDY = {
    "per channel": Preset("uniform-2-channel", "uniform-2"), "uniform-8": preset("uniform-8"),
    "squat-2-g128": Preset("squat-2-g128", "kivi-2-g128", block=128),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def windows(tiny: Any) -> torch.Tensor:
    return corpus.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=2, length=512).ids


@pytest.fixture(scope="module")
def twin(tiny: Any) -> Any:
    return outlier_twin(tiny.model)


def test_the_twin_computes_the_same(tiny: Any, twin: Any, windows: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(twin(windows[:1]).logits, tiny.model(windows[:1]).logits, atol=2e-3, rtol=0)


def test_the_guard_is_silent_on_a_plain_model(tiny: Any, windows: torch.Tensor) -> None:
    assert warnings(tiny.model, windows[:1], {n: p.scheme(tiny.model) for n, p in (FRAGILE | STURDY).items()}) == []


def test_the_guard_names_what_breaks_and_what_is_better(twin: Any, windows: torch.Tensor) -> None:
    said = warnings(twin, windows[:1], {name: p.scheme(twin) for name, p in (FRAGILE | STURDY).items()})
    named = [line.split()[1] for line in said]
    assert {"higgs-2", "higgs-3", "uniform-2"} <= set(named) <= set(FRAGILE)
    for name, line in zip(named, said, strict=True):
        assert f"{name}-balanced keys at the same bits (learned from text: `kvcal fit-predictors`): about " in line
        assert "nats a token; layer " in line and " times the median; uniform-2-channel keys: about " in line


@pytest.mark.slow
def test_forecasts_are_in_the_order_of_kl(tiny: Any, twin: Any, windows: torch.Tensor) -> None:
    """Of both models together, ranks of forecast and measured KL agree, and so do their sizes but for a factor."""
    pairs = []
    for model in (tiny.model, twin):
        presets = dict(FRAGILE | STURDY)
        found = forecasts(model, windows[:1], {name: p.scheme(model) for name, p in presets.items()})
        rows = evaluate(model, windows[:1], cache_makers(model, presets))
        pairs += [(found[row.name].kl, row.kl) for row in rows if row.name in found]
    ranks = [torch.tensor(side).argsort().argsort().double() for side in zip(*pairs, strict=True)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.85


def test_balanced_factors_are_named_only_where_they_are_better(
    twin: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With factors that even nothing out they are no better than the codec itself; of keys that take none none are named."""
    scheme = FRAGILE["higgs-2"].scheme(twin)
    kl = forecasts(twin, windows[:1], {"": scheme})[""].kl

    def advised(scheme: Scheme) -> str:
        return advice(twin, windows[:1], {"": (scheme, kl)})[""]

    assert "higgs-2-balanced keys at the same bits" in advised(scheme)
    assert "balanced" not in advised(Preset("exact-16", "exact-16").scheme(twin))
    monkeypatch.setattr("kvcal.methods.learned.channel_factor", lambda largest: torch.ones_like(largest).half())
    assert "balanced" not in advised(scheme)
    monkeypatch.setattr("kvcal.outliers.ALTERNATIVES", ())
    assert advised(scheme).startswith("no codec tried is clearly better")


def test_schemes_together_are_told_what_each_is_told_alone(twin: Any, windows: torch.Tensor) -> None:
    """And the layers of the model are loaded three times, however many schemes are warned of."""
    schemes = {name: preset(name).scheme(twin) for name in ("higgs-2", "uniform-8", "uniform-2")}
    alone = [line for name, scheme in schemes.items() for line in warnings(twin, windows[:1], {name: scheme})]
    source = LoadCounter(twin)
    assert warnings(source, windows[:1], schemes, torch.device("cpu")) == alone
    assert len(alone) == 2 and source.loads == dict.fromkeys(range(8), 3)


def test_grades() -> None:
    assert [grade(kl) for kl in (0.05, 0.0999)] == [None, None]
    assert [grade(least) for least, _ in GRADES] == [word for _, word in GRADES]
    assert "breaks" in str(grade(3.0)) and "breaks" not in str(grade(0.3))


def test_every_layer_is_looked_at(twin: Any, windows: torch.Tensor) -> None:
    """Every layer is looked at, and exact codecs change nothing, on a model with outliers too."""
    found = forecasts(twin, windows[:1], {"": preset("exact").scheme(twin)})[""]
    assert [layer.layer for layer in found.layers] == list(range(8))
    assert found.kl < 1e-5 and all(layer.change < 1e-9 and layer.ratio > 8 for layer in found.layers)


@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2", "innerq-small", "higgs-2"])
def test_a_change_is_what_a_cache_does(
    tiny: Any, windows: torch.Tensor, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first layer, whose input is exact: the newest token's attention output behind a real cache of the same tokens."""
    monkeypatch.setattr("kvcal.forecast.LAST", 1)
    model, scheme, seen = tiny.model, preset(name).scheme(tiny.model), []
    length = scheme.windows.sink + scheme.windows.recent + 4 * scheme.windows.block
    ids = windows[:1, : length + 1]
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *given: seen.append(given[2][0][:, -1:]))
    try:
        with torch.no_grad(), KVCalCache(scheme, model) as cache:
            model(ids[:, :-1], past_key_values=cache)
            model(ids[:, -1:], past_key_values=cache)
            model(ids)
    finally:
        handle.remove()
    _, made, exact = seen
    wanted = float((made - exact).square().sum() / exact.square().sum())
    [first, *_] = forecasts(model, ids, {"": scheme})[""].layers
    assert first.change == pytest.approx(wanted, rel=1e-3)


def test_ratio_by_hand() -> None:
    assert channel_ratio(torch.tensor([[[[1.0, 2.0, 30.0]]]])) == pytest.approx(15)


def test_expected_kl_grows_with_the_change() -> None:
    kls = [Forecast((LayerChange(0, change, change, 1.0),)).kl for change in (0.0, 0.01, 0.1, 1.0)]
    assert kls[0] == 0 and kls == sorted(kls) and kls[3] == pytest.approx(expected_kl(1.0))


@pytest.mark.slow
def test_balanced_keys_have_the_plain_models_loss(tiny: Any, twin: Any, tmp_path: Path) -> None:
    """The advice taken: 2 bits in a rotation behind factors that were learned from other text."""
    calibration = corpus.token_windows(tiny.tokenizer, "embedded:calibration", windows=6, holdout=2, length=256)
    ids = corpus.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=2, length=512).ids
    loss, said = {}, []
    for name, model in (("plain", tiny.model), ("twin", twin)):
        method = AquaKV(backbone="higgs-2-balanced", first_layer="", rope="post_rope", key_inputs=(), value_inputs=())
        bundle = fit(method, WholeModel(model), calibration, tmp_path / name, model_record={}, revision=None,
                     device=torch.device("cpu"), say=said.append).bundle  # fmt: skip
        rows = evaluate(model, ids, cache_makers(model, {"balanced": bundle}))
        loss[name] = next(row.kl for row in rows if row.name == "balanced")
    assert said == [] and loss["twin"] < 1.5 * loss["plain"]


def test_a_fit_says_so_too(tiny: Any, twin: Any, tmp_path: Path) -> None:
    text = corpus.token_windows(tiny.tokenizer, "embedded:calibration", windows=6, holdout=2, length=256)
    said: dict[str, list[str]] = {}
    for name, model, codec in (
        ("plain", tiny.model, "higgs-2"),
        ("twin", twin, "higgs-2"),
        ("sturdy", twin, "uniform-2-channel"),
    ):
        method = AquaKV(backbone=codec, first_layer="uniform-8", rope="post_rope", key_inputs=(), value_inputs=())
        fit(method, WholeModel(model), text, tmp_path / name, model_record={}, revision=None,
            device=torch.device("cpu"), say=said.setdefault(name, []).append)  # fmt: skip
    assert said["plain"] == said["sturdy"] == []
    [line] = said["twin"]
    assert line.startswith("warning: twin ") and " here: expected KL about " in line and "higgs-2-balanced keys" in line


def test_nothing_is_served_unwarned(tmp_path: Path) -> None:
    """What writes or runs a scheme that no calibration has looked at says so; what holds, and --no-check, are silent."""
    twin, bundle = tmp_path / "twin", tmp_path / f"x{SUFFIX}"
    write_outlier_twin(resolve("tiny"), twin)

    def told(*arguments: object) -> str:
        done = kvcal(*arguments, "--model", twin)
        assert done.code == 0, done.err
        return next((line for line in done.err.splitlines() if line.startswith("warning: ")), "")

    prompt = ["--prompt", "it was", "--tokens", 1]
    assert told("preset", "uniform-8", "-o", bundle) == ""
    assert told("preset", "higgs-2", "-o", bundle, "--no-check") == ""
    assert told("preset", "higgs-2", "-o", bundle).startswith("warning: higgs-2 ")
    assert told("generate", "--bundle", bundle, *prompt).startswith("warning: x ")
    assert "higgs-2-balanced keys" in told("generate", "--preset", "higgs-2", *prompt)
    assert told("generate", "--preset", "exact", *prompt) == ""


@pytest.mark.parametrize(
    "name", ["turboquant-4", "turboquant-4-bytes", "higgs-2-bytes", "higgs-2-bytes-debiased", "uniform-4"]
)
def test_the_codec_behind_balanced_factors_is_the_one_that_breaks(name: str) -> None:
    """Grids in bytes have the settings of the papers': beside values in bytes these would be looked up."""
    found = _factors(backbone(name)(Shape(2, 64, 32), "key"))
    assert found is not None and found.codec == name
