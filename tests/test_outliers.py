"""The outlier guard, on a trained model that is given outlier channels without changing what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal import corpus
from kvcal.capture import WholeModel
from kvcal.evaluate.outliers import outlier_twin, write_outlier_twin
from kvcal.evaluate.perplexity import evaluate
from kvcal.fit import fit
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.plain import Preset, preset
from kvcal.models import load_model, resolve
from kvcal.outliers import channel_error, channel_ratio, key_channels, warnings
from kvcal.workbench import cache_makers
from models_fixture import SUFFIX, kvcal

FRAGILE = {"higgs-2": preset("higgs-2"), "uniform-2": preset("uniform-2")}
STURDY = {"per channel": Preset("uniform-2-channel", "uniform-2"), "uniform-8": preset("uniform-8")}


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
    assert all("in 8 of 8 layers" in line and line.endswith("uniform-2-channel keys hold") for line in said), said


def test_what_it_says_comes_true(tiny: Any, twin: Any, windows: torch.Tensor) -> None:
    """KL to full precision, on the model and on its twin."""
    presets = FRAGILE | STURDY
    plain, odd = (
        {row.name: row.kl for row in evaluate(model, windows, cache_makers(model, dict(presets)))}
        for model in (tiny.model, twin)
    )
    for name in FRAGILE:
        assert odd[name] > 5 * plain[name]
    for name in STURDY:
        assert odd[name] < 1.5 * plain[name] + 1e-4


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
    assert said["twin"][0].endswith("; uniform-2-channel keys hold")


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
    assert told("generate", "--preset", "higgs-2", *prompt).endswith("; uniform-2-channel keys hold")
    assert told("generate", "--preset", "exact", *prompt) == ""
