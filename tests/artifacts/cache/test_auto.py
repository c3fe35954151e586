"""Presets that choose codecs for the model at hand, on a trained model and on its twin with outlier channels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kvcal.calibrate.forecast import forecasts
from kvcal.evaluate.outliers import outlier_twin
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts import hf, load_cache
from kvcal_artifacts.cache.auto import EXCESS, auto_scheme, channel_excess
from kvcal_artifacts.codecs import Higgs, Uniform
from kvcal_artifacts.errors import NonFiniteError, UnsupportedModel
from kvcal_artifacts.presets import AUTO_BITS
from kvcal_artifacts.scheme import Scheme
from tests.support.architectures import HYBRID, TINY, initialise


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return load_model(resolve("tiny"), dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def twin(tiny: nn.Module) -> nn.Module:
    return outlier_twin(tiny, scale=64.0)


def keys_of(scheme: Scheme) -> list[type]:
    return [type(pair.key) for pair in scheme.layers if pair is not None]


@pytest.mark.parametrize("name", AUTO_BITS)
def test_outliers_decide_how_keys_are_stored(name: str, tiny: nn.Module, twin: nn.Module) -> None:
    plain, said = auto_scheme(name, tiny)
    assert set(keys_of(plain)) == {Higgs}
    assert said["chosen"] == f"{AUTO_BITS[name]}-bit HIGGS" and max(row["excess"] for row in said["layers"]) < EXCESS
    apart, said = auto_scheme(name, twin)
    assert set(keys_of(apart)) == {Uniform}
    assert f"keys of all layers as {AUTO_BITS[name]}-bit integers by channel" in said["chosen"]
    assert all(isinstance(pair.value, Higgs) for pair in apart.layers if pair is not None)
    assert AUTO_BITS[name] < plain.bits_per_value() < apart.bits_per_value() <= AUTO_BITS[name] + 1


def test_one_layer_with_outliers_is_stored_otherwise_alone(tiny: nn.Module, twin: nn.Module) -> None:
    mixed = copy.deepcopy(tiny)
    mixed.get_submodule("model").layers[2] = copy.deepcopy(twin.get_submodule("model").layers[2])  # type: ignore[operator,index,union-attr]
    scheme, said = auto_scheme("auto-3", mixed)
    assert [index for index, kind in enumerate(keys_of(scheme)) if kind is Uniform] == [2]
    assert said["why"].startswith("layer 2 has the most unequal key channels: mean over median square ")
    assert "keys of 1 of 8 layers" in said["chosen"]


def test_the_choice_is_better_than_higgs_on_a_model_with_outliers(twin: nn.Module) -> None:
    tokenizer = load_model(resolve("tiny"), dtype="float32", device="cpu").tokenizer
    ids = token_windows.evaluation_windows(tokenizer, "embedded:evaluation", windows=1, length=400).ids
    from kvcal.methods.data_free import preset

    schemes = {"auto": auto_scheme("auto-3", twin)[0], "higgs": preset("higgs-3").scheme(twin)}
    kl = {name: one.kl for name, one in forecasts(twin, ids, schemes).items()}
    assert kl["auto"] < kl["higgs"] / 5


def test_the_same_model_gives_the_same_scheme(twin: nn.Module) -> None:
    first, second = (auto_scheme("auto-4", copy.deepcopy(twin)) for _ in range(2))
    assert first[1] == second[1]
    assert [p and (p.key.config(), p.value.config()) for p in first[0].layers] == [
        p and (p.key.config(), p.value.config()) for p in second[0].layers
    ]


def test_a_model_in_training_is_probed_without_dropout_and_left_in_training() -> None:
    model = TINY["llama"](attention_dropout=0.5)
    initialise(model, 0)
    still = auto_scheme("auto-4", model.eval())[1]
    assert auto_scheme("auto-4", model.train())[1] == still
    assert model.training


def test_load_cache_generates_and_says_what_was_chosen(tiny: nn.Module) -> None:
    ids = torch.arange(200)[None]
    with torch.no_grad(), load_cache("auto-4", tiny) as cache:
        tiny(input_ids=ids, past_key_values=cache)
        described = cache.describe()
        assert described["auto"]["preset"] == "auto-4" and "HIGGS" in described["auto"]["chosen"]
        assert described["unpacked"] is None and cache.nbytes("packed") > 0


def test_a_bundle_has_no_choice_and_a_short_prompt_says_so(tiny: nn.Module) -> None:
    with torch.no_grad(), load_cache("auto-2", tiny, keep=0.5) as cache:
        assert cache.describe()["unpacked"] is None  # holds nothing
        tiny(input_ids=torch.arange(20)[None], past_key_values=cache)
        described = cache.describe()
    assert described["selection"] is not None
    assert described["unpacked"].startswith(
        "nothing is packed yet: the cache holds 20 tokens, and the first block is packed at 164 ("
    )


def test_the_first_block_is_packed_where_it_is_said(tiny: nn.Module) -> None:
    for tokens, packed in ((163, False), (164, True)):
        with torch.no_grad(), load_cache("auto-4", tiny) as cache:
            tiny(input_ids=torch.arange(tokens)[None], past_key_values=cache)
            assert (cache.describe()["unpacked"] is None) is packed
            assert (cache.nbytes("packed") > 0) is packed


def test_sliding_layers_are_left_alone() -> None:
    model = HYBRID["gemma3"]()
    initialise(model, 0)
    scheme, said = auto_scheme("auto-4", model.eval())
    skipped = hf.unsupported_layers(hf.config_of(model))
    assert skipped and set(scheme.skipped) == set(skipped)
    assert {row["layer"] for row in said["layers"]} == set(scheme.compressed)


def test_keys_that_are_not_finite_and_models_that_cannot_be_are_refused(tiny: nn.Module) -> None:
    broken = copy.deepcopy(tiny)
    with torch.no_grad():
        next(p for name, p in broken.named_parameters() if "layers.1.self_attn.k_proj" in name).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="auto-4: layer 1: keys of the probe are not finite"):
        load_cache("auto-4", broken)
    with pytest.raises(UnsupportedModel):
        load_cache("auto-4", nn.Linear(2, 2))


def test_excess_is_mean_over_median_square() -> None:
    keys = torch.ones(1, 2, 5, 8)
    keys[:, 1, :, 3] = 10
    assert channel_excess(keys) == pytest.approx((7 + 100) / 8)
