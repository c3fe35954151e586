"""The outlier guard, on a trained model that is given outlier channels without changing what it computes."""

from __future__ import annotations

import copy
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from kvcal.calibrate import forecast
from kvcal.calibrate.driver import fit, fit_together
from kvcal.calibrate.forecast import channel_ratio, forecasts, least_tokens, prompt_of
from kvcal.calibrate.job import FitJob
from kvcal.calibrate.outlier_guard import (
    ALTERNATIVES,
    GRADES,
    Advice,
    _balanced,
    _factors,
    advice,
    grade,
    warnings,
    window_of,
)
from kvcal.capture.scan import WholeModel
from kvcal.commands.workbench import cache_makers
from kvcal.evaluate.canary import decoded
from kvcal.evaluate.outliers import outlier_twin, write_outlier_twin
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.codebooks import Training
from kvcal.methods.data_free import Preset, preset
from kvcal.methods.innerq import InnerQ
from kvcal.methods.registry import codec_maker
from kvcal.methods.vqkv import VQKV
from kvcal.models.layerwise import open_layerwise
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Predicted, Shape, Uniform
from kvcal_artifacts.errors import KVCalError, NonFiniteError
from kvcal_artifacts.hf import AttentionSite
from kvcal_artifacts.presets import INNERQ_VALUES
from kvcal_artifacts.scheme import Scheme
from tests.support.models_fixture import SUFFIX, kvcal


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
    return token_windows.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=2, length=512).ids


@pytest.fixture(scope="module")
def twin(tiny: Any) -> Any:
    return outlier_twin(tiny.model)


@pytest.fixture
def few_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first alone, on one window: to try all takes most of the time of a test that is about something else."""
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.ALTERNATIVES", ALTERNATIVES[:1])
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.WINDOWS", 1)


def test_the_twin_computes_the_same(tiny: Any, twin: Any, windows: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(twin(windows[:1]).logits, tiny.model(windows[:1]).logits, atol=2e-3, rtol=0)


def test_the_guard_is_silent_on_a_plain_model(tiny: Any, windows: torch.Tensor) -> None:
    assert (
        warnings(
            tiny.model, windows[:1], {n: p.scheme(tiny.model) for n, p in (FRAGILE | STURDY).items()}, text="the text"
        )
        == []
    )


def test_the_guard_names_what_breaks_and_what_is_better(twin: Any, windows: torch.Tensor) -> None:
    said = warnings(
        twin, windows[:1], {name: p.scheme(twin) for name, p in (FRAGILE | STURDY).items()}, text="the text"
    )
    named = [line.split()[1] for line in said]
    assert {"higgs-2", "uniform-2"} <= set(named) <= set(FRAGILE)
    for name, line in zip(named, said, strict=True):
        command = f"`kvcal fit-predictors --keys {name}-balanced --values {name} --first-layer '' "
        assert f"{name}-balanced keys at the same bits (learned from text: {command}" in line
        assert " times the median (layer " in line and "; uniform-2-channel keys: about " in line
        assert " nats per token, of tokens behind 224 packed ones in 1 window of 512 tokens of the text (`kvcal" in line


def test_channels_are_named_only_where_they_are_the_cause(
    tiny: Any, twin: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin's are large whatever is stored; but where keys are coded by channel, or values are what is coarse,
    treating channels apart is no help.
    """
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.GRADES", ((0.01, "is worth a word"),))
    apart = tuple(one for one in ALTERNATIVES if one.keys.endswith("-channel") and not one.values)
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.ALTERNATIVES", apart)  # no other has a say in this
    given = {
        "keys": (Preset("higgs-2", "uniform-8"), twin), "values": (Preset("uniform-8", "uniform-1"), twin),
        "by channel": (Preset("uniform-1-channel", "uniform-8"), twin),
        "plain": (Preset("uniform-1", "uniform-8"), tiny.model),
    }  # fmt: skip
    said = {
        name: line
        for name, (made, model) in given.items()
        for line in warnings(model, windows[:1], {name: made.scheme(model)}, text="the text")
    }
    assert said.keys() == given.keys()
    assert [name for name, line in said.items() if "times the median" in line] == ["keys"]


ADVISED = {
    "uniform-2": {}, "higgs-2": {"rope": "pre_rope"}, "turboquant-2": {"sink": 3, "recent": 64},
    "uniform-3": {"value": "kivi-2", "block": 64, "per_layer": ("0:keys=uniform-2", "5-6:values=higgs-4")},
}  # fmt: skip


@pytest.mark.parametrize("name", ADVISED)
@pytest.mark.usefixtures("few_alternatives")
def test_the_command_in_the_advice_makes_that_bundle(
    tiny: Any, windows: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All but the factors, which are of other text."""
    scheme = replace(Preset(name, name), **ADVISED[name]).scheme(tiny.model)
    [tried] = [one for one in _balanced(tiny.model, windows[:1], {"": scheme}, None).values() if one is not None]
    assert tried.command[0] == tried.command[-1] == "`"
    words, output = shlex.split(tried.command[1:-1]), tmp_path / f"x{SUFFIX}"
    done = kvcal(*words[1:], "--model", "tiny", "--windows", 4, "--length", 128, "-o", output)
    assert done.code == 0, done.err
    made = load_bundle(output).scheme
    assert (made.windows, made.frame, made.bits_per_value()) == (
        scheme.windows,
        scheme.frame,
        tried.scheme.bits_per_value(),
    )
    for own, wanted in zip(made.layers, tried.scheme.layers, strict=True):
        assert own is not None and wanted is not None
        for codec, other in ((own.key.inner, wanted.key.inner), (own.value, wanted.value)):
            assert (type(codec), codec.config()) == (type(other), other.config())
        assert own.key.config() == wanted.key.config()


def test_a_fitted_schemes_advice_says_what_to_change(tiny: Any, windows: torch.Tensor, fitted: Any) -> None:
    """Its values keep their predictors, which no call without those of keys makes; what is balanced already gets none."""

    def tried(scheme: Scheme) -> list[str]:
        found = _balanced(tiny.model, windows[:1], {"": scheme}, None).values()
        return [one.command for one in found if one is not None]

    def unbalanced(key: Any) -> Any:
        made = codec_maker("higgs-3" if key.name == "scaled" else "higgs-2")(key.shape, "key")
        return made if key.name == "scaled" else Predicted(made, key.predictor, key.inputs)

    scheme = replace(
        fitted.scheme, layers=tuple(replace(pair, key=unbalanced(pair.key)) for pair in fitted.scheme.layers)
    )
    assert tried(scheme) == [
        "`kvcal fit-predictors --keys higgs-2-balanced --key-inputs none` with the scheme's other options"
    ]
    assert tried(fitted.scheme) == []


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


@pytest.mark.usefixtures("few_alternatives")
def test_balanced_factors_are_named_only_where_they_are_better(
    twin: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With factors that even nothing out they are no better than the codec itself; of keys that take none none are
    named.
    """
    scheme = FRAGILE["higgs-2"].scheme(twin)
    kl = forecasts(twin, windows[:1], {"": scheme})[""].kl

    def advised(scheme: Scheme) -> str:
        return advice(twin, windows[:1], {"": (scheme, kl)})[""].text

    assert "higgs-2-balanced keys at the same bits" in advised(scheme)
    assert "balanced" not in advised(Preset("exact-16", "exact-16").scheme(twin))
    monkeypatch.setattr("kvcal.methods.calibrated.channel_factor", lambda largest: torch.ones_like(largest).half())
    assert "balanced" not in advised(scheme)
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.ALTERNATIVES", ())
    monkeypatch.setattr("kvcal.calibrate.outlier_guard._preset", lambda model, length: None)
    assert advised(scheme).startswith("no codec tried is clearly better")


@pytest.mark.usefixtures("few_alternatives")
def test_a_preset_without_text_is_named_where_it_is_good(twin: Any, windows: torch.Tensor) -> None:
    """With its forecast, once for all schemes; not where it is what is warned of, nor where it packs no block."""
    scheme, kivi = (preset(name).scheme(twin) for name in ("higgs-2", "kivi-4"))
    cost = forecasts(twin, windows[:1], {"": kivi})[""].kl
    given = {"higgs-2": (scheme, 1.5), "much better already": (scheme, 1.5 * cost), "kivi-4": (kivi, cost)}
    advised = advice(twin, windows[:1], given)
    assert f"preset kivi-4: about {cost:.2g}" in advised.pop("higgs-2").text
    assert all("preset kivi-4" not in one.text for one in advised.values())
    assert "preset kivi-4" not in advice(twin, windows[:1, :80], {"": (scheme, 1.5)})[""].text


@pytest.mark.usefixtures("few_alternatives")
def test_schemes_together_are_told_what_each_is_told_alone(twin: Any, windows: torch.Tensor) -> None:
    """And the layers of the model are loaded three times, however many schemes are warned of."""
    schemes = {name: preset(name).scheme(twin) for name in ("higgs-2", "uniform-8", "uniform-2")}
    alone = [
        line
        for name, scheme in schemes.items()
        for line in warnings(twin, windows[:1], {name: scheme}, text="the text")
    ]
    source = LoadCounter(twin)
    assert warnings(source, windows[:1], schemes, torch.device("cpu"), text="the text") == alone
    assert len(alone) == 2 and source.loads == dict.fromkeys(range(8), 3)


def test_a_fit_that_is_worse_than_its_preset_is_named(tiny: Any, windows: torch.Tensor) -> None:
    """Here by codecs of fewer bits than the preset's, or of as many."""
    unfitted = InnerQ().unfitted()
    assert unfitted is not None
    given = {"coarse": preset("uniform-2").scheme(tiny.model), "fine": preset("uniform-8").scheme(tiny.model)}
    bare = dict.fromkeys(given, unfitted)
    [line] = warnings(tiny.model, windows[:1], given, text="the text", unfitted=bare)
    kls = forecasts(tiny.model, windows[:1, :512], given | {"bare": unfitted.preset.scheme(tiny.model)})
    assert line == (
        f"warning: fitting made coarse worse: forecast KL {kls['coarse'].kl:.2g} nats per token, and "
        f"{kls['bare'].kl:.2g} of the preset innerq-base, which needs no text; take the preset, or fit with "
        "--search plain"
    )
    assert not warnings(tiny.model, windows[:1], {"bare": unfitted.preset.scheme(tiny.model)}, text="the text",
                        unfitted={"bare": unfitted})  # fmt: skip


def test_innerq_without_its_fit_is_the_preset_of_its_codecs(tiny: Any) -> None:
    for name in ("base", "hybrid", "small"):
        bare = InnerQ(value=INNERQ_VALUES[name], recent=64, search="plain").unfitted()
        assert bare is not None and (bare.name, bare.options) == (f"innerq-{name}", "")
        made, right = bare.preset.scheme(tiny.model), replace(preset(f"innerq-{name}"), recent=64).scheme(tiny.model)
        assert made.config() == right.config() and made.bits_per_value() == right.bits_per_value()
    assert InnerQ(key="inner-4-symmetric").unfitted() is None and InnerQ(per_layer=("0=exact-16",)).unfitted() is None


def test_what_gives_no_number_breaks_the_model(
    tiny: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KL of NaN is not one of 0."""
    honest = Uniform.decode
    monkeypatch.setattr(Uniform, "decode", lambda self, *given: honest(self, *given) * float("inf"))
    [line] = warnings(tiny.model, windows[:1], {"odd": preset("uniform-8").scheme(tiny.model)}, text="the text")
    assert line.startswith("warning: odd breaks the model here: ") and " KL about inf nats " in line
    assert line.endswith("no codec tried is clearly better: keep keys and values in 16 bits")


@pytest.mark.parametrize(
    ("name", "said"),
    [("self_attn.v_proj", "value head 0"), ("self_attn.k_proj", "key head 0"), ("mlp.down_proj", "its output")],
)
def test_a_model_with_a_nan_is_not_forecast(tiny: Any, windows: torch.Tensor, name: str, said: str) -> None:
    """In whichever layer: the layer is named, and given back."""
    model, freed = copy.deepcopy(tiny.model), []
    layer = len(model.model.layers) - 1
    with torch.no_grad():
        model.model.layers[layer].get_submodule(name).weight[0, 0] = float("nan")
    source = WholeModel(model)
    source.free_layer = freed.append  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=f"layer {layer}, {said}: NaN or infinity in window 0"):
        forecasts(source, windows[:1], {"": preset("higgs-2").scheme(model)}, torch.device("cpu"))
    assert freed == list(range(layer + 1))


def test_grades() -> None:
    assert [grade(kl) for kl in (0.05, 0.0999)] == [None, None]
    assert [grade(least) for least, _ in GRADES] == [word for _, word in GRADES]
    assert "breaks" in str(grade(3.0)) and "breaks" not in str(grade(0.3))


class Packing(DynamicCache):
    """Gives attention what a scheme without statistics gives back of packed tokens, inside of the model's own forward."""

    def __init__(self, scheme: Any, packed: slice) -> None:
        super().__init__()
        self.scheme, self.packed = scheme, packed

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        pair = self.scheme.layers[layer]
        for codec, x in ((pair.key, keys), (pair.value, values)):
            x[:, :, self.packed] = codec.decode(codec.encode(x[:, :, self.packed].clone()))
        return super().update(keys, values, layer, *args, **kwargs)


@pytest.mark.parametrize("name", ["exact", "kivi-2", "innerq-small-plain", "higgs-2", "uniform-2", "turboquant-3"])
def test_a_forecast_is_the_kl_of_a_forward_with_packed_tokens(tiny: Any, windows: torch.Tensor, name: str) -> None:
    windows = windows[:, :320]
    model, prompt, scheme = tiny.model, prompt_of(windows.shape[1]), preset(name).scheme(tiny.model)
    found = forecasts(model, windows, {"": scheme})[""]
    blocks = (prompt - scheme.windows.sink - scheme.windows.recent) // 32
    packed = slice(scheme.windows.sink, scheme.windows.sink + 32 * blocks)
    with torch.no_grad():
        made = model(windows, past_key_values=Packing(scheme, packed)).logits[:, prompt:].log_softmax(-1)
        exact = model(windows).logits[:, prompt:].log_softmax(-1)
    kl = torch.nn.functional.kl_div(made, exact, reduction="none", log_target=True).sum(-1).mean()
    assert found.packed == 32 * blocks > 0
    assert found.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6) and (found.kl > 1e-4) == (name != "exact")


@pytest.mark.parametrize("name", ["squat-pre-2", "mixkvq", "innerq-small", "aqua"])
def test_what_the_first_layer_packs_is_what_a_cache_packs(
    tiny: Any, windows: torch.Tensor, fitted: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, frames and predictors are those of a cache that was given the text in one call."""
    model, prompt, ids = tiny.model, prompt_of(windows.shape[1]), windows[:1]
    scheme = fitted.scheme if name == "aqua" else preset(name).scheme(model)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    own = forecast._Run._pack

    def pack(run: Any, layer: Any, called: Any) -> Any:
        decoded = own(run, layer, called)
        seen.append((run._below["k1"], run._below["v1"]))
        return decoded

    monkeypatch.setattr(forecast._Run, "_pack", pack)
    forecasts(model, ids, {"": scheme})
    with torch.no_grad(), KVCalCache(scheme, model) as cache:
        model(ids[:, :prompt], past_key_values=cache)
        layer = cache.compressed_layers[0]
        held = decoded(cache, layer, layer.packed)
    for made, wanted in zip(seen[0], held, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def fitted(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = token_windows.token_windows(tiny.tokenizer, "embedded:calibration", windows=6, holdout=2, length=256)
    return fit(AquaKV(), WholeModel(tiny.model), text, tmp_path_factory.mktemp("aqua") / "x", model_record={},
               revision=None, device=torch.device("cpu"), say=lambda line: None).bundle  # fmt: skip


def test_a_model_in_parts_has_the_same_forecast(tiny: Any, windows: torch.Tensor) -> None:
    parts = open_layerwise(resolve("tiny"), dtype="float32", device="cpu")
    schemes = {"": preset("higgs-2").scheme(tiny.model)}
    found = [forecasts(source, windows[:1], schemes, torch.device("cpu"))[""] for source in (parts, tiny.model)]
    assert found[0].kl == pytest.approx(found[1].kl, rel=1e-5) and found[0].packed == found[1].packed
    assert all(p.is_meta for p in parts.model.parameters())


def test_short_windows_are_joined(tiny: Any, windows: torch.Tensor) -> None:
    """Consecutive ones give the very windows of the text, BOS only at the start."""
    wide = Preset("uniform-2", "uniform-2", recent=512).scheme(tiny.model)

    def read(count: int, length: int) -> torch.Tensor:
        return token_windows.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=count, length=length).ids

    scheme = preset("uniform-2").scheme(tiny.model)
    assert torch.equal(window_of(read(9, 128), [scheme]), windows)
    assert torch.equal(window_of(read(4, 512), [scheme, wide]), read(2, least_tokens(wide)))
    assert torch.equal(
        window_of(read(4, 512), [scheme, wide], 600), windows
    )  # in a context that the other needs more than
    assert torch.equal(window_of(read(2, 128), [scheme]), read(1, 255))
    assert window_of(read(1, 64), [scheme]).shape == (1, 64)
    random = torch.arange(4 * 200).view(4, 200)  # no BOS
    assert torch.equal(window_of(random, [scheme]), torch.arange(512)[None])


@pytest.mark.usefixtures("few_alternatives")
def test_no_scheme_is_passed_over_in_silence(twin: Any, windows: torch.Tensor) -> None:
    """A text or a context too short for one is said of it alone."""
    schemes = {
        "one": preset("uniform-2").scheme(twin),
        "two": Preset("uniform-2", "uniform-2", recent=512).scheme(twin),
    }
    need, other = (least_tokens(scheme) for scheme in schemes.values())
    said = warnings(twin, windows[:1, : need - 1], schemes, text="the text")
    assert [line[:40] for line in said] == [f"note: {name}: no KL is forecast, as it packs "[:40] for name in schemes]
    assert (
        f"windows of {need:,} tokens, and the text has {need - 1:,} (1 x {need - 1:,}); give more --windows" in said[0]
    )
    both = warnings(twin, windows[:1], schemes, text="the text")
    assert (
        both[0].startswith("note: two: ") and f" of {other:,} tokens" in both[0] and both[1].startswith("warning: one ")
    )
    assert both[1:] == warnings(twin, windows[:1], {"one": schemes["one"]}, text="the text")


@pytest.mark.usefixtures("few_alternatives")
def test_a_fit_on_short_windows_says_so_too(tiny: Any, twin: Any, tmp_path: Path) -> None:
    """Windows of which a cache packs nothing, as none is older than `recent`: they are joined, or it is said."""
    lines: dict[int, list[str]] = {}
    for count in (9, 2):
        text = token_windows.token_windows(tiny.tokenizer, "embedded:calibration", windows=count, holdout=1, length=64)
        method = AquaKV(backbone="higgs-2", first_layer="", rope="post_rope", key_inputs=(), value_inputs=())
        fit(method, WholeModel(twin), text, tmp_path / f"x{count}", model_record={}, revision=None,
            device=torch.device("cpu"), say=lines.setdefault(count, []).append)  # fmt: skip
    [joined], [short] = ([line for line in said if " KL " in line] for said in lines.values())
    assert joined.startswith("warning: x9 ") and "of tokens behind 224 packed ones" in joined
    assert short.startswith("note: x2: no KL is forecast") and "and the text has 128 (2 x 64)" in short


def test_codebooks_of_a_scan_are_forecast(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kvcal build` makes them, beside others."""
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.GRADES", ((0.0, "is said of all"),))
    monkeypatch.setattr(
        "kvcal.calibrate.outlier_guard.advice", lambda model, ids, schemes, device: dict.fromkeys(schemes, Advice(""))
    )
    text = token_windows.token_windows(tiny.tokenizer, "embedded:calibration", windows=3, holdout=1, length=256)
    training = Training(tolerance=0.5)
    vqkv = VQKV(stages=(1, 1, 1), sizes=(16, 16, 16), high=0, vectors=2000, recent=32, block=32, training=training)
    said: list[str] = []
    jobs = [FitJob(vqkv, tmp_path / f"books{SUFFIX}")]
    fit_together(jobs, WholeModel(tiny.model), text, model_record={}, revision=None, device=torch.device("cpu"),
                 say=said.append)  # fmt: skip
    assert [line.split()[1] for line in said if "is said of all" in line] == ["books"]


@pytest.mark.parametrize("frame", ["pre_rope", "post_rope"])
def test_keys_before_rope_that_do_not_become_the_models_are_refused(
    tiny: Any, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch, frame: Any
) -> None:
    """Before a bundle is written that no cache would take; keys stored after RoPE are none of these."""
    captured = AttentionSite.keys_from
    monkeypatch.setattr(AttentionSite, "keys_from", lambda self, output: captured(self, output) * (1 + 2**-20))
    scheme = Preset("uniform-8", "uniform-8", frame).scheme(tiny.model)
    if frame == "post_rope":
        assert warnings(tiny.model, windows[:1, :256], {"": scheme}, text="the text") == []
    else:
        with pytest.raises(KVCalError, match="layer 0: keys captured before RoPE do not give the model's keys"):
            warnings(tiny.model, windows[:1, :256], {"": scheme}, text="the text")


def test_windows_too_short_to_pack_have_no_forecast(tiny: Any, windows: torch.Tensor) -> None:
    scheme = preset("uniform-2").scheme(tiny.model)
    least = least_tokens(scheme)
    assert forecasts(tiny.model, windows[:1, :least], {"": scheme})[""].packed == scheme.windows.block
    short = forecasts(tiny.model, windows[:1, : least - 1], {"": scheme})[""]
    assert (short.packed, short.kl) == (0, 0)
    assert window_of(windows, [scheme]).shape == (2, 512)


def test_ratio_by_hand() -> None:
    assert channel_ratio(torch.tensor([[[[1.0, 2.0, 30.0]]]])) == pytest.approx(15)


@pytest.mark.usefixtures("few_alternatives")
def test_a_fit_says_so_too(tiny: Any, twin: Any, tmp_path: Path) -> None:
    text = token_windows.token_windows(tiny.tokenizer, "embedded:calibration", windows=6, holdout=2, length=256)
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
    assert " packed ones in 1 window of 511 tokens of the held-out calibration text (" in line
    assert line.startswith("warning: twin ") and " here: KL about " in line and "higgs-2-balanced keys" in line


@pytest.mark.usefixtures("few_alternatives")
def test_a_fit_is_judged_with_what_it_measured(
    tiny: Any, twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InnerQ's factors, and the scales that queries weigh, are in the scheme whose KL a fit forecasts: the bundle's. The
    same codecs without them are forecast to be worse on that text.
    """
    judged: list[tuple[torch.Tensor, dict[str, forecast.Forecast]]] = []

    def recorded(model: Any, ids: torch.Tensor, schemes: Any, device: Any = None) -> dict[str, forecast.Forecast]:
        judged.append((ids, forecasts(model, ids, schemes, device)))
        return judged[-1][1]

    monkeypatch.setattr("kvcal.calibrate.outlier_guard.forecasts", recorded)
    text = token_windows.token_windows(tiny.tokenizer, "embedded:calibration", windows=6, holdout=2, length=256)
    method = InnerQ(key="inner-2-symmetric", value="inner-4-symmetric", sink=4, recent=128)
    result = fit(method, WholeModel(twin), text, tmp_path / "fitted", model_record={}, revision=None,
                 device=torch.device("cpu"))  # fmt: skip
    ids, of_the_fit = judged[0]
    plain = Preset(method.key, method.value, sink=4, recent=128).scheme(twin)
    assert torch.equal(ids, window_of(text.holdout, [plain]))
    written = forecasts(twin, ids, {"bundle": load_bundle(result.path).scheme, "plain": plain})
    assert of_the_fit["fitted"].kl == written["bundle"].kl < written["plain"].kl / 3


@pytest.mark.usefixtures("few_alternatives")
def test_nothing_is_served_unwarned(tmp_path: Path) -> None:
    """What writes or runs a scheme that no calibration has looked at says so; what holds, and --no-check, are silent."""
    twin, bundle = tmp_path / "twin", tmp_path / f"x{SUFFIX}"
    write_outlier_twin(resolve("tiny"), twin)

    def told(*arguments: object) -> str:
        done = kvcal(*arguments, "--model", twin)
        assert done.code == 0, done.err
        return next((line for line in done.err.splitlines() if line.startswith("warning: ")), "")

    def forged() -> None:
        """Metrics such as a fit writes, of a file that had none."""
        made = load_bundle(bundle)
        layers = [{"key_channel_error": 0.0, "key_relative_error": 0.0}] * len(made.scheme.layers)
        replace(made, metrics={"layers": layers}).write(bundle)

    prompt = ["--prompt", "it was", "--tokens", 1]
    assert told("preset", "uniform-8", "-o", bundle) == ""
    assert told("preset", "higgs-2", "-o", bundle, "--no-check") == ""
    assert told("preset", "higgs-2", "-o", bundle).startswith("warning: higgs-2 ")
    assert told("generate", "--bundle", bundle, *prompt).startswith("warning: x ")
    forged()
    short = ["--text", "embedded:evaluation", "--windows", 3, "--length", 200]
    assert told("generate", "--bundle", bundle, *prompt).startswith("warning: x ")
    assert told("eval", bundle, *short).startswith("warning: x ")
    assert told("compare", "--bundle", bundle, *short).startswith("warning: x ")
    assert "higgs-2-balanced keys" in told("generate", "--preset", "higgs-2", *prompt)
    assert told("generate", "--preset", "exact", *prompt) == ""


@pytest.mark.parametrize(
    "name", ["turboquant-4", "turboquant-4-bytes", "higgs-2-bytes", "higgs-2-bytes-debiased", "uniform-4"]
)
def test_the_codec_behind_balanced_factors_is_the_one_that_breaks(name: str) -> None:
    """Grids in bytes have the settings of the papers': beside values in bytes these would be looked up."""
    found = _factors(codec_maker(name)(Shape(2, 64, 32), "key"))
    assert found is not None and found.codec == name
