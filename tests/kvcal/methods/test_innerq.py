"""InnerQ: factors that are what they say, folding that changes no score, and outlier channels that tell schemes apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvcal.bundles import provenance
from kvcal.calibrate.driver import fit
from kvcal.capture.scan import Capture, WholeModel
from kvcal.evaluate.outliers import outlier_twin, write_outlier_twin
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods.data_free import preset
from kvcal.methods.factors import by_queries, channel_factor, outlier_ratios, query_weight, share_pairs
from kvcal.methods.innerq import InnerQ
from kvcal.methods.registry import codec_maker
from kvcal.models import folding
from kvcal.models.folding import fold_in_place, write_folded
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text.token_windows import evaluation_windows
from kvcal_artifacts import hf, load_bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Higgs, Predicted, Scaled, Shape, Uniform, build
from kvcal_artifacts.codecs.predictors import Bias
from kvcal_artifacts.codecs.uniform import SCALES
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.paths import packing_rules
from kvcal_artifacts.presets import INNERQ_VALUES
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from tests.support.architectures import TINY
from tests.support.models_fixture import SUFFIX, Done, kvcal, write_model, write_text, write_tokenizer
from tests.support.schemes import ALL, close_all, numbers, opened, packed_row, token_ids

SINK, RECENT, BLOCK = 4, 16, 8
SETTINGS: dict[str, Any] = {"sink": SINK, "recent": RECENT, "block": BLOCK}
SMALL = ["--windows", "6", "--length", "68", "--sink", SINK, "--recent", RECENT, "--block", BLOCK]
FOLDABLE = ["llama", "qwen2", "phi3", "phi3-partial", "smollm3", "granite", "llama-yarn"]


@pytest.fixture(autouse=True)
def closed() -> Any:
    yield
    close_all()


def fitted(model: Any, folder: Path, ids: Tensor, **settings: Any) -> Any:
    """A bundle from token windows, the last one held out."""
    text: Any = SimpleNamespace(
        train=ids[:-1],
        holdout=ids[-1:],
        source="test",
        sha256="0" * 64,
        ids_sha256="0" * 64,
        tokens_read=0,
        bos=False,
        column=None,
    )
    method = InnerQ(**settings)
    output = folder / f"x{SUFFIX}"
    device = torch.device("cpu")
    result = fit(method, WholeModel(model), text, output, model_record={}, revision=None, device=device)
    return result.bundle


def cached_keys(model: Any, ids: Tensor) -> list[Tensor]:
    """Keys of each layer as Transformers' own cache holds them: after RoPE."""
    with torch.no_grad():
        return [layer.keys for layer in model(ids, use_cache=True).past_key_values.layers]


# Factors


@pytest.mark.parametrize("name", ["llama", "phi3-partial", "qwen3"])
@pytest.mark.parametrize("factors", ["channel", "pair"])
def test_factors_are_those_of_section_4_3(name: str, factors: str, tmp_path: Path) -> None:
    model, ids = ALL[name](), token_ids(5, 44)
    bundle = fitted(model, tmp_path, ids, factors=factors, **SETTINGS)
    for index, (pair, keys) in enumerate(zip(bundle.scheme.layers, cached_keys(model, ids[:-1]), strict=True)):
        expected = keys[:, :, SINK:].abs().amax((0, 2))  # five whole blocks follow the sink
        if factors == "pair":
            half = 4 if name == "phi3-partial" else 8  # rotate_half: channel c turns with c + half
            for c in range(half):
                expected[:, [c, c + half]] = expected[:, [c, c + half]].amax(1, keepdim=True)
        assert isinstance(pair.key, Scaled)
        assert torch.allclose(pair.key.factor.float(), expected.sqrt(), rtol=1e-3)
        raw = keys[:, :, SINK:].abs().amax((0, 2))
        ratio = float((raw / raw.median(-1, keepdim=True).values).max())
        assert bundle.metrics["layers"][index]["key_outlier_ratio"] == pytest.approx(ratio, rel=1e-3)


def test_factors_of_channels_without_keys() -> None:
    """A dead channel counts a ten-thousandth of the median, a dead head as 1; nothing divides by zero."""
    largest = torch.tensor([[4.0, 0.0, 4.0, 4.0, 1e-9], [0.0, 0.0, 0.0, 0.0, 0.0]])
    least = pytest.approx(0.02, rel=1e-3)
    assert channel_factor(largest).tolist() == [[2.0, least, 2.0, 2.0, least], [1.0] * 5]
    assert channel_factor(largest, 1.0)[0, 0] == 4.0
    assert float(channel_factor(torch.full((1, 4), 1e-30)).min()) > 0
    assert outlier_ratios(largest)[1].tolist() == [1.0] * 5
    assert share_pairs(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 1, 0])).tolist() == [3.0, 2.0, 3.0]


def test_powers_of_two(tmp_path: Path) -> None:
    bundle = fitted(TINY["llama"](), tmp_path, token_ids(4, 44), powers_of_two=True, **SETTINGS)
    exponents = torch.cat([pair.key.factor.float().log2() for pair in bundle.scheme.layers])
    assert torch.equal(exponents, exponents.round()) and len(exponents.unique()) > 1


def test_effective_bits_of_table_3() -> None:
    shape = Shape(8, 128, 32)
    found = {}
    for variant in INNERQ_VALUES:
        make = codec_maker(f"innerq-{variant}")
        found[variant] = LayerCodecs(make(shape, "key"), make(shape, "value")).bits_per_value()
    assert found == {"base": 3.5, "hybrid": 3.25, "small": 3.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factors": "row"}, "factors 'row': allowed are channel, pair, none"),
        ({"exponent": 0.0}, "exponent 0.0: must be above 0"),
        ({"key": "inner-9"}, "codec 'inner-9' is not known"),
        ({"sink": -1}, "window sink = -1"),
        (
            {"key": "kivi-2"},
            "factors 'channel': kivi-2 codes each key channel by itself, where a factor changes nothing; take",
        ),
        ({"key": "mixkvq-96-0", "factors": "pair"}, "factors 'pair': mixkvq-96-0 codes each key channel by itself"),
        ({"key": "innerq-base"}, "factors of each row's own already; take innerq-base-plain for keys, or factors none"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(KVCalError, match=message):
        InnerQ(**settings)


# The command


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("innerq")
    write_model(folder / "model")
    write_text(folder / "words.txt")
    return folder


def run(base: Path, output: Path, *options: Any) -> Done:
    given = ["--model", base / "model", "--text", base / "words.txt", *SMALL, "--output", output]
    return kvcal("fit-norms", *given, *options, "--json")


def test_hidden_states_may_lie_on_disk(base: Path, tmp_path: Path) -> None:
    spilled = run(base, tmp_path / f"x{SUFFIX}", "--spill", "disk", "--spill-dir", tmp_path)
    assert spilled.json["sha256"] == run(base, tmp_path / f"y{SUFFIX}").json["sha256"]
    assert "--spill tape" in run(base, tmp_path / f"z{SUFFIX}", "--spill", "tape").complaint


@pytest.mark.parametrize(("variant", "bits"), [("base", 3.5), ("hybrid", 4.25), ("small", 3.5)])
def test_fit_norms(base: Path, tmp_path: Path, variant: str, bits: float) -> None:
    """Head_dim 16 and blocks of 8: groups of 16 and 8, so scales cost 1 and 2 bits."""
    done = run(base, tmp_path / f"x{SUFFIX}", "--variant", variant)
    assert done.code == 0, done.err
    assert done.json["bits_per_value"] == (4 + {"base": 5, "hybrid": 6, "small": 4}[variant]) / 2
    assert len(done.json["layers"]) == 4
    for row in done.json["layers"]:
        assert row["key_outlier_ratio"] >= 1 and 0 < row["factor_min"] <= row["factor_max"]
        assert 0 < row["logit_error"] < 1 and 0 < row["logit_error_plain"] < 1
        assert ("value_symmetric_share" in row) == (variant == "hybrid")
    again = run(base, tmp_path / f"y{SUFFIX}", "--variant", variant)
    assert again.json["sha256"] == done.json["sha256"]
    bundle = load_bundle(tmp_path / f"x{SUFFIX}")
    assert bundle.provenance["method"] == "innerq" and bundle.scheme.frame == "post_rope"
    options = ["--model", base / "model", "--text", base / "words.txt", "--length", 64, "--windows", 1, "--json"]
    evaluated = kvcal("eval", *options, "--bundle", tmp_path / f"x{SUFFIX}")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["rows"][1]["bits_per_value"] == done.json["bits_per_value"]


def test_an_unfinished_fit_goes_on(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(base, tmp_path / f"x{SUFFIX}").json["sha256"]
    real, calls = InnerQ.fit_layer, []

    def third_fails(self: InnerQ, layer: int, *rest: Any) -> Any:
        calls.append(layer)
        if layer == 2:
            raise KVCalError("stopped for the test")
        return real(self, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(InnerQ, "fit_layer", third_fails)
        assert run(base, tmp_path / f"y{SUFFIX}").code == 1
    again = run(base, tmp_path / f"y{SUFFIX}")
    assert (again.json["sha256"], again.json["resumed_layers"]) == (whole, 2)


def test_factors_are_given_to_codecs_that_have_a_use_for_them(base: Path, tmp_path: Path) -> None:
    """Asked for, they are refused for others; not asked for, keys go without, and so do exceptions."""
    output = tmp_path / f"x{SUFFIX}"
    refused = run(base, output, "--factors", "channel", "--keys", "kivi-2")
    assert refused.code == 2 and "kivi-2 codes each key channel by itself" in refused.complaint and not output.exists()
    for options, scaled in ((["--keys", "kivi-2"], []), (["--per-layer", "0:keys=exact-16"], [1, 2, 3])):
        row = run(base, output, *options).json
        found = load_bundle(output)
        assert [i for i, pair in enumerate(found.scheme.layers) if isinstance(pair.key, Scaled)] == scaled
        assert [one["layer"] for one in row["layers"] if "factor_min" in one] == scaled
        assert row["layers"][0]["logit_error"] == row["layers"][0]["logit_error_plain"]


# The search for scales, weighted by queries


def chosen_by_hand(group: np.ndarray, weight: np.ndarray, bits: int) -> float:
    """The lowest weighted squared error of a group in float64, over `uniform.SCALES` and both signs."""
    half, plain = 2 ** (bits - 1), np.abs(group).max() / 2 ** (bits - 1)
    errors = []
    for factor in (sign * factor for factor in SCALES for sign in (1, -1)):
        scale = float(np.float16(plain * abs(factor))) * (1 if factor > 0 else -1)
        off = np.clip(np.rint(group / scale), -half, half - 1) * scale - group
        errors.append(float((weight * off * off).sum()))
    return min(errors)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_weighted_search_finds_the_lowest_weighted_error(bits: int) -> None:
    shape, x = Shape(2, 64, 32), numbers(1, 2, 32, 64, seed=3)
    weight = (numbers(2, 64, seed=4) * 3).exp().clamp(1e-3, 1e3).half()
    plain = codec_maker(f"inner-{bits}-symmetric")(shape, "key")
    assert isinstance(plain, Uniform)
    own = plain.weighted(weight)
    counts = weight.double()[:, None]
    made = {name: codec.encode_decode(x)[1] for name, codec in (("plain", plain), ("weighted", own))}
    groups = x.double().unflatten(-1, (2, 32)).flatten(0, 1).numpy()
    weights = counts.unflatten(-1, (2, 32)).expand(-1, 32, -1, -1).numpy()
    best = [chosen_by_hand(groups[place], weights[place], bits) for place in np.ndindex(2, 32, 2)]
    errors = {name: (y.double() - x.double()).square() for name, y in made.items()}
    found = (errors["weighted"][0] * counts).unflatten(-1, (2, 32)).sum(-1).flatten()
    assert torch.allclose(found, torch.tensor(best, dtype=torch.float64), rtol=1e-4)
    assert float((errors["plain"] * counts).sum()) > 1.05 * float(found.sum())
    assert float(errors["plain"].sum()) < float(errors["weighted"].sum())


def test_weights_are_the_encoders_alone() -> None:
    """Equal ones change no byte; blocks are decoded, and attended to, without them; kernels do not pack by them."""
    shape, x = Shape(2, 64, 32), numbers(1, 2, 64, 64)
    plain = codec_maker("inner-3-symmetric")(shape, "key")
    assert isinstance(plain, Uniform)
    same, other = plain.weighted(torch.full((2, 64), 0.25).half()), plain.weighted(numbers(2, 64).exp().half())
    packed = {name: codec.encode(x) for name, codec in (("plain", plain), ("same", same), ("other", other))}
    assert all(torch.equal(packed["same"][name], t) for name, t in packed["plain"].items())
    assert any(not torch.equal(packed["other"][name], t) for name, t in packed["plain"].items())
    assert torch.equal(other.decode(packed["other"]), plain.decode(packed["other"]))
    assert other.fused() == plain.fused() and other.block_bytes() == plain.block_bytes()
    assert not isinstance(packing_rules.rule_of(plain), str)
    assert packing_rules.rule_of(Scaled(other, None, "prefill")) == (
        "a search for scales weighted by queries is torch's (fit-norms --search plain is packed by the kernel)"
    )
    moved = other.to(torch.device("meta"))
    assert moved.weight is not None and moved.weight.device.type == "meta" and other.weight is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"axis": "token"}, "weights of channels with axis 'token', search True: need axis 'channel' and a search"),
        ({"search": False}, "weights of channels with axis 'channel', search False: need axis"),
        ({"weight": torch.ones(2, 32).half()}, r"weight \(2, 32\) float16: needs \(2, 64\) float16"),
        ({"weight": torch.ones(2, 64)}, r"weight \(2, 64\) float32: needs \(2, 64\) float16"),
        ({"weight": torch.zeros(2, 64).half()}, "weight of 0: must be positive everywhere"),
        ({"weight": torch.full((2, 64), torch.inf).half()}, "weight: holds a NaN or infinity"),
        ({"weight": torch.full((2, 64), torch.nan).half()}, "weight: holds a NaN or infinity"),
    ],
)
def test_weights_that_make_no_sense(change: dict[str, Any], says: str) -> None:
    config = {"bits": 3, "group": 32, "axis": "channel", "mode": "symmetric", "search": True}
    tensors = {"weight": change.pop("weight", torch.ones(2, 64).half())}
    with pytest.raises(KVCalError, match=says) as raised:
        build(Shape(2, 64, 32), "key", {"codec": "uniform", "config": config | change}, tensors)
    assert "\n" not in str(raised.value)


def test_weights_are_mean_squares_of_queries(base: Path, tmp_path: Path) -> None:
    """Over the head's mean, of all query heads of a kv head, on the training windows; in the bundle and back."""
    model, ids = ALL["llama"](), token_ids(5, 44)
    bundle = fitted(model, tmp_path, ids, **SETTINGS)
    for pair, (q, k) in zip(bundle.scheme.layers, queries_and_keys(model, ids[:-1]), strict=True):
        squares = q.unflatten(1, (k.shape[1], -1)).square().mean((0, 2, 3))
        expected = squares / squares.mean(-1, keepdim=True)
        assert torch.allclose(pair.key.inner.weight.double(), expected, rtol=2e-3)
    least = query_weight(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
    assert least.tolist() == [[2.0, pytest.approx(1e-4, rel=1e-2)], [1.0, 1.0]]
    written = load_bundle(bundle.path)
    again = [pair.key.inner.weight for pair in written.scheme.layers]
    assert all(
        torch.equal(weight, pair.key.inner.weight) for weight, pair in zip(again, bundle.scheme.layers, strict=True)
    )
    plain = fitted(model, tmp_path, ids, search="plain", **SETTINGS)
    assert all(pair.key.inner.weight is None for pair in plain.scheme.layers)
    output = tmp_path / f"y{SUFFIX}"
    assert "--search best: allowed are queries, plain" in run(base, output, "--search", "best").complaint
    assert run(base, output, "--search", "plain").code == 0
    made = load_bundle(output)
    assert provenance.recorded(made).options["search"] == "plain"
    del made.provenance["settings"]["search"]  # as bundles of before
    assert provenance.recorded(made).options["search"] == "plain"


def test_a_cache_packs_by_weights(tmp_path: Path) -> None:
    """As the codec encodes by itself, whatever the path of attention, and with storage of a fixed size."""
    model, ids = ALL["llama"](head_dim=64), token_ids(1, 200)
    bundle = fitted(model, tmp_path, token_ids(4, 136), sink=4, recent=32, block=32)
    keys = cached_keys(model, ids)
    for options in ({"kernels": "off"}, {"kernels": "torch"}, {"kernels": "torch", "max_length": 256}):
        cache = opened(bundle.scheme, model, **options)
        with torch.no_grad():
            for part in ids.split(40, 1):
                model(part, past_key_values=cache)
        codec = bundle.scheme.layers[0].key
        count = (200 - 4 - 32) // 32
        wanted = codec.encode(keys[0][:, :, 4 : 4 + 32 * count])
        found = packed_row(cache, 0)
        assert any(torch.equal(x.flatten(), wanted["words"][0].flatten()) for x in found)


def test_scores_of_outlier_keys_err_less() -> None:
    """Queries that look away from the large channels, as those of real models do: 2 of 32 channels are 20 times as
    large.
    """
    size = torch.ones(32)
    size[[3, 17]] = 20.0
    keys, queries = numbers(1, 2, 256, 32) * size, numbers(1, 2, 256, 32, seed=1) / size
    factor = channel_factor(keys.abs().amax((0, 2)))
    plain = codec_maker("inner-3-symmetric")(Shape(2, 32, 32), "key")
    errors = {}
    for name, inner in (("plain", plain), ("queries", by_queries(plain, queries.square().mean((0, 2))))):
        off = queries @ (Scaled(inner, factor).encode_decode(keys)[1] - keys).mT
        errors[name] = float((off - off.mean(-1, keepdim=True)).square().sum())
    assert errors["queries"] < 0.9 * errors["plain"]
    assert by_queries(codec_maker("kivi-2")(Shape(2, 32, 32), "key"), torch.ones(2, 32)).tensors() == {}


def test_unknown_variant(base: Path, tmp_path: Path) -> None:
    done = run(base, tmp_path / f"x{SUFFIX}", "--variant", "large")
    assert done.code == 2
    assert "--variant large: allowed are base, hybrid, small" in done.complaint
    done = run(base, tmp_path / f"x{SUFFIX}", "--factors", "none", "--exponent", 0.5)
    assert "--exponent applies only to factors, and there is none" in done.complaint


# Folding


def saved(name: str, folder: Path, **overrides: Any) -> tuple[Any, Path]:
    """A tiny model and its folder."""
    model = ALL[name](vocab_size=258, **overrides)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model, folder


def shared_factors(model: Any) -> dict[int, Tensor]:
    """Random factors from 1/8 to 8 that RoPE pairs share; layers without RoPE have one for each channel."""
    width, found = hf.rotary_width(model), {}
    for site in hf.attention_sites(model):
        partners = hf.rope_partners(site, width)
        free = numbers(site.kv_heads, site.head_dim, seed=site.index).clamp(-3, 3)
        found[site.index] = torch.exp2(free.maximum(free[:, partners])).half()
    return found


def queries_and_keys(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What attention multiplies, of each layer."""
    found = []
    with Capture(model, ids, device="cpu") as capture:
        for taps in capture:
            batch = next(iter(taps.batches({"q", "k"}, "post_rope")))
            assert batch.q is not None and batch.k is not None
            found.append((batch.q.double(), batch.k.double()))
    return found


@pytest.mark.parametrize("name", FOLDABLE)
def test_a_folded_checkpoint_scores_as_the_factor_on_the_query(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "model", tie_word_embeddings=name == "llama")
    factors, ids = shared_factors(model), token_ids(2, 40)
    changed = write_folded(resolve(str(folder)), factors, tmp_path / "folded")
    assert len(changed) == len(factors) * {"phi3": 1, "phi3-partial": 1, "qwen2": 4}.get(name, 2)
    folded = load_model(resolve(str(tmp_path / "folded")), dtype="float32", device="cpu").model
    for index, ((q, k), (q_new, k_new)) in enumerate(
        zip(queries_and_keys(model, ids), queries_and_keys(folded, ids), strict=True)
    ):
        f = factors[index].double()[:, None]
        groups = q.shape[1] // k.shape[1]
        query_f = f.repeat_interleave(groups, 0)
        assert torch.allclose(q_new, q * query_f, atol=2e-4 * float((q * query_f).abs().max()))
        assert torch.allclose(k_new, k / f, atol=2e-4 * float((k / f).abs().max()))
        # the factor on the query and its inverse in the keys, as the codec has it
        outside = (q * query_f) @ (k / f).repeat_interleave(groups, 1).mT
        inside = q_new @ k_new.repeat_interleave(groups, 1).mT
        assert torch.allclose(inside, outside, atol=1e-4 * float(outside.abs().max()))
    with torch.no_grad():
        assert float((model(ids).logits - folded(ids).logits).abs().max()) < 1e-4
    in_place = ALL[name](vocab_size=258, tie_word_embeddings=name == "llama")
    fold_in_place(in_place, factors)
    with torch.no_grad():
        assert torch.equal(in_place(ids).logits, folded(ids).logits)


def test_fold_and_the_bundle_that_needs_no_factor(base: Path, tmp_path: Path) -> None:
    """With powers of two folding is exact: the folded model's cache holds the same bytes as the factor outside gives."""
    fitted_to = tmp_path / f"factors{SUFFIX}"
    assert run(base, fitted_to, "--factors", "pair", "--powers-of-two", "--variant", "hybrid").code == 0
    folder, bundle = tmp_path / "folded", tmp_path / f"plain{SUFFIX}"
    options = [
        "--model",
        base / "model",
        "--bundle",
        fitted_to,
        "--output",
        folder,
        "--bundle-output",
        bundle,
        "--json",
    ]
    done = kvcal("fold", *options)
    assert done.code == 0, done.err
    assert (done.json["layers"], done.json["changed_tensors"]) == (4, 8)
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } <= names
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert kvcal("verify", bundle, "--model", folder).code == 0
    assert kvcal("verify", bundle, "--model", base / "model").code == 4
    assert kvcal("verify", fitted_to, "--model", folder).code == 4
    plain, scaled = load_bundle(bundle), load_bundle(fitted_to)
    held = [tensor for pair in plain.scheme.layers for tensor in (pair.key.tensors() | pair.value.tensors()).items()]
    assert {name for name, _ in held} == {"weight"}  # of the search for scales; nothing is left of the factors
    ids, contents = token_ids(2, 60), []
    for place, scheme in ((base / "model", scaled.scheme), (folder, plain.scheme)):
        model = load_model(resolve(str(place)), dtype="float32", device="cpu").model
        cache = opened(scheme, model)
        with torch.no_grad():
            first = model(ids[:, :40], past_key_values=cache).logits
            contents.append((first, model(ids[:, 40:], past_key_values=cache).logits, packed_row(cache, 1)))
    assert torch.equal(contents[0][0], contents[1][0])
    assert torch.allclose(contents[0][1], contents[1][1], atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(contents[0][2], contents[1][2], strict=True))


def test_the_dtype_of_a_folded_checkpoint(tmp_path: Path) -> None:
    model = ALL["llama"](vocab_size=258).bfloat16()
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    source, factors = resolve(str(tmp_path / "model")), shared_factors(model)
    write_folded(source, factors, tmp_path / "same")
    write_folded(source, factors, tmp_path / "wide", dtype="float32")
    kinds = {name: load_file(tmp_path / name / "model.safetensors") for name in ("same", "wide")}
    assert {t.dtype for t in kinds["same"].values()} == {torch.bfloat16}
    assert {t.dtype for t in kinds["wide"].values()} == {torch.float32}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert all(torch.equal(kinds["wide"][n].bfloat16(), t) for n, t in kinds["same"].items())


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = saved("llama", tmp_path / "model")
    monkeypatch.setattr(folding, "SHARD_BYTES", 100_000)
    write_folded(resolve(str(folder)), shared_factors(model), tmp_path / "folded")
    assert len(list((tmp_path / "folded").glob("model-*-of-*.safetensors"))) > 2
    again = load_model(resolve(str(tmp_path / "folded")), dtype="float32", device="cpu").model
    ids = token_ids(1, 20)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, again(ids).logits, atol=1e-4)


@pytest.mark.parametrize("there", [True, False], ids=["an empty folder", "nothing yet"])
def test_a_link_stays_one_and_the_model_lies_where_it_leads(there: bool, tmp_path: Path) -> None:
    model, folder = saved("llama", tmp_path / "model")
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/folded")
    if there:
        (tmp_path / "far" / "folded").mkdir()
    write_folded(resolve(str(folder)), shared_factors(model), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in (tmp_path / "far" / "folded").iterdir()} >= {"config.json", "model.safetensors"}
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["folded"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="loop is a link that leads to itself"):
        write_folded(resolve(str(folder)), shared_factors(model), tmp_path / "loop")


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_a_norm_behind_the_projection_is_refused(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "model")
    with pytest.raises(UsageError, match="layer 0: k_norm stands behind the projection"):
        write_folded(resolve(str(folder)), shared_factors(model), tmp_path / "folded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_what_cannot_be_folded(base: Path, tmp_path: Path) -> None:
    unshared, plain = tmp_path / f"a{SUFFIX}", tmp_path / f"b{SUFFIX}"
    assert run(base, unshared).code == run(base, plain, "--factors", "none").code == 0
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()

    def refused(bundle: Path, *options: Any, code: int = 2) -> str:
        given = ["--output", tmp_path / "new"] if "--output" not in options else []
        done = kvcal("fold", "--model", base / "model", "--bundle", bundle, *given, *options)
        assert done.code == code, done.err
        return done.complaint

    assert "layer 0, kv head 0: channels 1 and 9 rotate together under RoPE and have factors" in refused(unshared)
    assert "no key factors to fold" in refused(plain)
    assert "is there already" in refused(unshared, "--output", tmp_path / "there")
    assert "put it beside" in refused(unshared, "--bundle-output", tmp_path / "new" / "x")
    assert "made for another model" in refused(unshared, "--model", "tiny", code=4)
    assert "nope is not a folder" in refused(unshared, "--output", tmp_path / "nope" / "new", code=1)
    assert not (tmp_path / "new").exists()


def test_factors_of_residuals_are_not_folded() -> None:
    shape = Shape(2, 16, 8)
    scaled = Scaled(Higgs(shape, "key"), torch.ones(2, 16).half())
    key = Predicted(scaled, Bias({"bias": torch.zeros(32).half()}), ("k1",))
    scheme = Scheme(Windows(4, 16, 8), "post_rope", (LayerCodecs(key, Higgs(shape, "value")),))
    with pytest.raises(UsageError, match="layer 0: its factors scale what a predictor leaves"):
        folding.key_factors(scheme)


FULL = (
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
)


@pytest.mark.parametrize("error", FULL, ids=lambda one: type(one).__name__)
def test_a_fold_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model, folder = saved("llama", tmp_path / "model")

    def full(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(folding, "save_file", full)
    with pytest.raises(KVCalError, match=r"folded: cannot be written: No space left on device; nothing is there"):
        write_folded(resolve(str(folder)), shared_factors(model), tmp_path / "folded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


# Outlier channels


def test_the_twin_is_the_same_function(tmp_path: Path) -> None:
    """s is a power of two, so nothing rounds."""
    model, ids = TINY["qwen2"](), token_ids(2, 40)
    twin = outlier_twin(model, share=0.2)
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, model(ids).logits)
    for before, after in zip(cached_keys(model, ids), cached_keys(twin, ids), strict=True):
        grown = (after / before).flatten(0, -2).median(0).values
        ratio = after.abs().amax((0, 2)) / before.abs().amax((0, 2))
        assert (ratio.round() == 16).sum(-1).tolist() == [4, 4]  # two of eight pairs in each kv head
        assert grown.shape == (16,)
    _, folder = saved("llama", tmp_path / "model")
    write_outlier_twin(resolve(str(folder)), tmp_path / "twin")
    loaded = [
        load_model(resolve(str(place)), dtype="float32", device="cpu").model for place in (folder, tmp_path / "twin")
    ]
    with torch.no_grad():
        assert torch.equal(loaded[0](ids).logits, loaded[1](ids).logits)


@pytest.mark.slow
def test_outliers_tell_schemes_apart(tmp_path: Path) -> None:
    """On the embedded model and its twin: factors and per-channel keys hold, rotated and per-token 2-bit keys break."""
    loaded = load_model(resolve("tiny"), dtype="float32", device="cpu")
    ids = evaluation_windows(loaded.tokenizer, "embedded:evaluation", length=196, windows=3, column=None).ids
    window: dict[str, Any] = {"sink": 4, "recent": 32, "block": 32}
    kl: dict[str, list[float]] = {}
    for model in (loaded.model, outlier_twin(loaded.model)):
        schemes = {"factors": fitted(model, tmp_path, ids[1:], **window).scheme}
        schemes["exponent 1"] = fitted(model, tmp_path, ids[1:], exponent=1.0, search="plain", **window).scheme
        for name in ("innerq-base", "innerq-base-plain", "kivi-2", "turboquant-2", "uniform-2"):
            schemes[name] = replace(preset(name), **window).scheme(model)
        makers = {name: lambda s=s, m=model: KVCalCache(s, m) for name, s in schemes.items()}  # type: ignore[misc]
        for row in evaluate(model, ids[:1], makers)[1:]:
            kl.setdefault(row.name, []).append(row.kl)
    print({name: [round(value, 5) for value in pair] for name, pair in kl.items()})
    change = {name: twin / own for name, (own, twin) in kl.items()}
    assert change["kivi-2"] == pytest.approx(1, rel=1e-3)  # groups of one channel, and a power of two: the same codes
    assert change["exponent 1"] == pytest.approx(1, rel=1e-3)
    assert max(change["factors"], change["innerq-base"]) < 4 < 8 < change["innerq-base-plain"]
    assert min(change["turboquant-2"], change["uniform-2"]) > 8
