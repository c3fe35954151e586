"""The outlier guard, on a trained model that is given outlier channels without changing what it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal import corpus
from kvcal.capture import Capture, WholeModel
from kvcal.evaluate.outliers import outlier_twin, write_outlier_twin
from kvcal.evaluate.perplexity import evaluate
from kvcal.fit import fit
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.backbones import backbone
from kvcal.methods.base import BROKEN
from kvcal.methods.plain import Preset, preset
from kvcal.models import load_model, resolve
from kvcal.outliers import _factors, advice, channel_error, channel_ratio, key_channels, score_error, warnings
from kvcal.workbench import cache_makers
from kvcal_artifacts.codecs import Context, Exact, Shape
from kvcal_artifacts.codecs.base import EMPTY, Packed
from models_fixture import SUFFIX, kvcal

FRAGILE = {name: preset(name) for name in ("higgs-2", "higgs-3", "uniform-2", "uniform-4")}
STURDY = {
    "per channel": Preset("uniform-2-channel", "uniform-2"), "uniform-8": preset("uniform-8"),
    "squat-2-g128": Preset("squat-2-g128", "kivi-2-g128", block=128),
}  # fmt: skip
DEARER = {
    "higgs-4": preset("higgs-4"),
    "turboquant-4-3": preset("turboquant-4-3"),
}  # worse on the twin, but not broken
HOLD = "; uniform-2-channel keys hold, and {}-balanced at the same bits (learned from text: `kvcal fit-predictors`)"


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


def test_the_guard_names_what_breaks_and_what_holds(twin: Any, windows: torch.Tensor) -> None:
    said = warnings(twin, windows[:1], {name: p.scheme(twin) for name, p in (FRAGILE | STURDY).items()})
    assert [line.split()[1] for line in said] == list(FRAGILE)
    for name, line in zip(FRAGILE, said, strict=True):
        assert "in 8 of 8 layers" in line and line.endswith(HOLD.format(name)), line


@pytest.mark.parametrize("name", [pytest.param("higgs-2", marks=pytest.mark.slow), "uniform-4"])
def test_balanced_factors_are_named_only_where_they_hold(
    twin: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With factors that even nothing out they break like the codec itself; of keys that take no factors none are named."""
    scheme = FRAGILE[name].scheme(twin)
    assert advice(twin, windows[:1], scheme) == HOLD.format(name)[2:]
    assert advice(twin, windows[:1], Preset("exact-16", "exact-16").scheme(twin)) == "uniform-2-channel keys hold"
    monkeypatch.setattr("kvcal.methods.learned.channel_factor", lambda largest: torch.ones_like(largest).half())
    assert advice(twin, windows[:1], scheme) == "uniform-2-channel keys hold"
    monkeypatch.setattr("kvcal.outliers.ALTERNATIVES", ("uniform-4",))
    assert advice(twin, windows[:1], scheme) == "no codec tried holds: keep keys in 16 bits"


def test_balanced_factors_alone(twin: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with different codecs each that breaks is named, and no other."""
    monkeypatch.setattr("kvcal.outliers.ALTERNATIVES", ())
    scheme = Preset("higgs-2", "higgs-2", per_layer=("0=uniform-2", "1=kivi-2")).scheme(twin)
    assert advice(twin, windows[:1], scheme) == (
        "uniform-2-balanced and higgs-2-balanced keys hold at the same bits (learned from text: `kvcal fit-predictors`)"
    )


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


@pytest.mark.slow
def test_what_it_says_comes_true(tiny: Any, twin: Any, windows: torch.Tensor) -> None:
    """KL to full precision, on the model and on its twin."""
    presets = FRAGILE | STURDY | DEARER
    plain, odd = (
        {row.name: row.kl for row in evaluate(model, windows[:1], cache_makers(model, dict(presets)))}
        for model in (tiny.model, twin)
    )
    for name in FRAGILE:
        assert odd[name] > 5 * plain[name]
    for name in STURDY:
        assert odd[name] < 1.5 * plain[name] + 1e-4
    for name in DEARER:
        assert odd[name] < plain["uniform-2"]
    assert warnings(twin, windows[:1], {name: p.scheme(twin) for name, p in DEARER.items()}) == []


class Astray(Exact):
    """Keys that err, by as much as one channel varies, along a direction for each kv head: off (H, D), of unit length."""

    off: torch.Tensor

    def decode(self, packed: Packed, context: Context = EMPTY) -> torch.Tensor:
        x = super().decode(packed, context)
        sign = torch.tensor([1.0, -1.0]).repeat(x.shape[2] // 2)[:, None]
        return x + 3 * x.std((0, 2), keepdim=True).amax(-1, keepdim=True) * sign * self.off[:, None]


@pytest.mark.parametrize("seen", [False, True])
def test_an_error_where_no_query_looks_is_none(twin: Any, windows: torch.Tensor, seen: bool) -> None:
    """What SQuat does on purpose: per channel it is the same error, and scores know it or not."""
    queries: dict[int, torch.Tensor] = {}
    with torch.no_grad(), Capture(twin, windows[:1], device=torch.device("cpu")) as capture:
        for taps in capture:
            q = next(iter(taps.batches({"q"}, "post_rope"))).q
            assert q is not None
            queries[taps.index] = q.double().unflatten(1, (taps.site.kv_heads, -1)).flatten(2, 3)[0]
    scheme = preset("exact").scheme(twin)
    layers = []
    for index, pair in enumerate(scheme.layers):
        assert pair is not None
        moment = queries[index].mT @ queries[index]
        codec = Astray(pair.key.shape, "key", "float32")
        codec.off = torch.linalg.eigh(moment).eigenvectors[:, :, -1 if seen else 0].float()
        layers.append(type(pair)(codec, pair.value))
    found = key_channels(twin, windows[:1], {"": replace(scheme, layers=tuple(layers))})[""]
    blamed = [layer.layer for layer in found if layer.error > BROKEN]
    assert blamed
    assert [layer.layer for layer in found if layer.broken] == (blamed if seen else [])


def test_scores_by_hand() -> None:
    keys = torch.tensor([[[[1.0, 5.0], [3.0, 7.0]]]])  # less their mean: -1 and 1, twice
    queries = torch.tensor([[[[2.0, 0.0]], [[0.0, 1.0]]]])  # two heads that share it: scores -2 and 2, -1 and 1
    # Less its mean: 0.5 and -0.5 in the first channel, 1 and -1 in scores.
    off = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
    assert score_error(queries, keys, keys + off) == pytest.approx(2 / (8 + 2))
    assert score_error(queries, keys, keys + 100) == 0  # a softmax does not see what all tokens have
    assert score_error(queries, keys * 0, keys * 0) == 0


@pytest.mark.parametrize("frame", ["pre_rope", "post_rope"])
def test_scores_are_those_of_the_model(twin: Any, windows: torch.Tensor, frame: str) -> None:
    """Of exact queries and keys after RoPE, head by head, by the frame's way of storing keys."""
    scheme = Preset("uniform-2-channel", "exact-32", frame).scheme(twin)
    found = key_channels(twin, windows[:1], {"": scheme})[""]
    with torch.no_grad(), Capture(twin, windows[:1], device=torch.device("cpu")) as capture:
        for taps, pair in zip(capture, scheme.layers, strict=True):
            assert pair is not None
            stored, seen = (next(iter(taps.batches({"q", "k"}, name))) for name in (scheme.frame, "post_rope"))
            coded = slice(4, 4 + 32 * 15)
            keys = stored.k[:, :, coded]
            made = stored.k.clone()
            made[:, :, coded] = pair.key.decode(pair.key.encode(keys))
            if frame == "pre_rope":
                made = taps.site.rotate(made, *taps.rope)
            q = seen.q.double().unflatten(1, (taps.site.kv_heads, -1))
            scores = [q @ x[:, :, None, coded].double().mT for x in (seen.k, made)]
            exact, other = (x - x.mean(-1, keepdim=True) for x in scores)
            error = (exact - other).square().sum((0, 2, 3, 4)) / exact.square().sum((0, 2, 3, 4))
            assert found[taps.index].score == pytest.approx(float(error.max()), rel=1e-3)


def test_errors_by_hand() -> None:
    keys = torch.tensor([[[[1.0, 10.0], [3.0, 30.0]]]])  # variances 1 and 100
    decoded = keys + torch.tensor([1.0, 1.0])
    assert channel_error(keys, decoded) == pytest.approx((1 / 1 + 1 / 100) / 2)
    assert channel_ratio(torch.tensor([[[[1.0, 2.0, 30.0]]]])) == pytest.approx(15)
    assert channel_error(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)) == 0


def test_every_layer_is_looked_at(tiny: Any, windows: torch.Tensor) -> None:
    found = key_channels(tiny.model, windows[:1], {"exact": preset("exact").scheme(tiny.model)})["exact"]
    assert [layer.layer for layer in found] == list(range(8))
    assert all(layer.error == 0 and layer.ratio > 1 for layer in found)


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
    assert len(said["twin"]) == 1 and said["twin"][0].startswith("warning: in 7 of 8 layers key channels are up to ")
    assert said["twin"][0].endswith(HOLD.format("higgs-2"))


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
    assert told("preset", "higgs-2", "-o", bundle).startswith("warning: higgs-2 will break on this model: in 8 of 8")
    assert told("generate", "--bundle", bundle, *prompt).startswith("warning: x will break")
    assert told("generate", "--preset", "higgs-2", *prompt).endswith(HOLD.format("higgs-2"))
    assert told("generate", "--preset", "exact", *prompt) == ""


@pytest.mark.parametrize(
    "name", ["turboquant-4", "turboquant-4-bytes", "higgs-2-bytes", "higgs-2-bytes-debiased", "uniform-4"]
)
def test_the_codec_behind_balanced_factors_is_the_one_that_breaks(name: str) -> None:
    """Grids in bytes have the settings of the papers': beside values in bytes these would be looked up."""
    found = _factors(backbone(name)(Shape(2, 64, 32), "key"))
    assert found is not None and found.codec == name
