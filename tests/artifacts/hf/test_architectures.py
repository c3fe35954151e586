"""Which models are supported: sites found by trial, layers that keep their own cache, experts, refusals with a reason."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from kvcal.calibrate.driver import fit
from kvcal.capture.scan import Capture
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.data_free import preset
from kvcal.methods.kvtuner import KVTuner
from kvcal.models import loading
from kvcal.models.conversion import Origins
from kvcal.models.layerwise import open_layerwise
from kvcal.models.names import resolve
from kvcal.models.structure import empty_model
from kvcal_artifacts import hf, load_bundle, load_cache
from kvcal_artifacts.bundle.fingerprint import Fingerprint
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Context
from kvcal_artifacts.errors import KVCalError, ModelUnavailable, UnsupportedModel
from tests.support.architectures import HYBRID, MIXTURES, SLICED, SLIDES, TINY, build
from tests.support.models_fixture import SMALL, kvcal, write_text, write_tokenizer
from tests.support.schemes import BLOCK, RECENT, SINK, left_mask, make, token_ids

pytestmark = pytest.mark.transformers

FULL = [index for index, kind in enumerate(SLIDES) if kind == "full_attention"]
MODELS = SLICED | HYBRID | MIXTURES


@cache
def made(name: str) -> Any:
    return MODELS[name]()


def padded(model: Any, cache: Any) -> list[Tensor]:
    """Logits of generation from left-padded prompts."""
    mask = left_mask([48, 33, 9, 2])
    out = model.generate(
        token_ids(*mask.shape, seed=1) * mask, attention_mask=mask, past_key_values=cache, do_sample=False,
        max_new_tokens=24, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return [out.sequences, *out.logits]


@torch.no_grad()
@pytest.mark.parametrize("frame", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("name", MODELS)
def test_an_exact_codec_changes_no_bit(name: str, frame: str) -> None:
    model = made(name)
    with make(model, frame=frame) as own:
        got = padded(model, own)
        assert own.ledger.blocks.tolist() == [6, 4, 1, 0]
        assert len(own.compressed_layers) == (3 if name in HYBRID else model.config.num_hidden_layers)
    assert all(torch.equal(a, b) for a, b in zip(got, padded(model, DynamicCache(config=model.config)), strict=True))


@pytest.mark.parametrize(("name", "rotation", "source"), [
    ("phi", "slice", "k_proj"), ("phi-norms", "slice", "k_layernorm"), ("stablelm-norms", "slice", "k_layernorm"),
    ("persimmon", "slice", "k_layernorm"), ("glm", "whole", "k_proj"), ("qwen3-moe", "whole", "k_norm"),
])  # fmt: skip
def test_sites_are_found_without_weights(name: str, rotation: str, source: str) -> None:
    model = empty_model(made(name).config, torch.float32)
    site = hf.attention_sites(model)[0]
    assert (site.rotation, site.odd, site.rope) == (rotation, None, True)
    assert site.key_source is getattr(site.module, source)


def test_full_attention_without_rope_is_seen() -> None:
    """Cohere2 rotates in its sliding layers alone."""
    decoder = hf.decoder_of(made("cohere2"))
    sites = [hf.attention_site(decoder, index) for index in range(len(SLIDES))]
    assert [site.rope for site in sites] == [kind == "sliding_attention" for kind in SLIDES]
    assert [site.index for site in hf.attention_sites(made("cohere2"))] == FULL


@torch.no_grad()
def test_a_norm_behind_rope_leaves_keys_after_it() -> None:
    model = build("HunYuanDenseV1", head_dim=16)
    with make(model, frame="post_rope") as own:
        got = padded(model, own)
    assert all(torch.equal(a, b) for a, b in zip(got, padded(model, DynamicCache(config=model.config)), strict=True))
    said = "hunyuan_v1_dense: layer 0: HunYuanDenseV1Attention makes its keys in a way of its own"
    with pytest.raises(UnsupportedModel, match=said):
        make(model, frame="pre_rope")
    with pytest.raises(UnsupportedModel, match=said):
        preset("squat-pre-2").scheme(model)
    with pytest.raises(UnsupportedModel, match=said):  # its queries are wanted after RoPE
        KVCalCache(preset("squat-2").scheme(model), model)
    with pytest.raises(UnsupportedModel, match=said + r".*`probe` with --frame post_rope"):
        [next(taps.batches({"k"})) for taps in Capture(model, token_ids(1, 20), device="cpu")]
    with pytest.raises(UnsupportedModel, match=said + r".*calibration cannot have its queries; take a preset"):
        [next(taps.batches({"q"}, "post_rope")) for taps in Capture(model, token_ids(1, 20), device="cpu")]


@pytest.mark.parametrize(("family", "options"), [("HunYuanDenseV1", {"head_dim": 16}), ("Olmo", {"clip_qkv": 1.0})])
def test_keys_made_behind_projections_are_captured_after_rope(family: str, options: Any) -> None:
    """Two windows: the trial's shape of one is not what the projection's output was read in."""
    model, ids = build(family, **options), token_ids(2, 20)
    plain = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=plain)
    with Capture(model, ids, device="cpu", batch=2) as capture:
        for taps in capture:
            batch = next(iter(taps.batches({"k", "v"}, "post_rope")))
            assert torch.equal(batch.k, plain.layers[taps.index].keys)


# Refused, by every command alike.

SMALLEST: dict[str, Any] = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[Any, str]] = {
    "gpt2": (lambda: transformers.GPT2Config(vocab_size=258, n_embd=64, n_layer=2, n_head=4), "has no `layers`"),
    "gpt_neox": (lambda: transformers.GPTNeoXConfig(**SMALLEST, intermediate_size=64), "layer 0 .* has no self_attn"),
    "bloom": (lambda: transformers.BloomConfig(vocab_size=258, hidden_size=64, n_layer=2, n_head=4), "no `layers`"),
    "falcon": (lambda: transformers.FalconConfig(**SMALLEST), "has no `layers`"),
    "opt": (lambda: transformers.OPTConfig(**SMALLEST, ffn_dim=64, word_embed_proj_dim=64), "has no `rotary_emb`"),
    "deepseek_v3": (lambda: transformers.DeepseekV3Config(**SMALLEST, n_routed_experts=4), "latent attention"),
    "mamba": (lambda: transformers.MambaConfig(vocab_size=258, hidden_size=64, num_hidden_layers=2), "recurrent model"),
    "qwen3_next": (
        lambda: transformers.Qwen3NextConfig(**SMALLEST | {"num_hidden_layers": 4}, num_experts=4),
        "linear-attention layers keep something else",
    ),
    "t5": (lambda: transformers.T5Config(vocab_size=258, d_model=64, num_layers=2, num_heads=4), "encoder-decoder"),
    "mistral": (
        lambda: transformers.MistralConfig(**SMALLEST, num_key_value_heads=2, intermediate_size=64),
        r"no layer can be compressed: sliding-attention layer \(window 4096\)",
    ),
    "qwen2_vl": (
        lambda: transformers.Qwen2VLConfig(
            text_config={**SMALLEST, "num_key_value_heads": 2, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        ),
        "positions in three dimensions",
    ),
    "gemma3n_text": (
        lambda: gemma3n(num_kv_shared_layers=2),
        r"layer 1 \(Gemma3nTextDecoderLayer\) takes per_layer_input and shared_kv_states besides hidden states",
    ),
    "granitemoehybrid": (
        lambda: transformers.GraniteMoeHybridConfig(
            **SMALLEST, num_local_experts=0, layer_types=["attention"] * 2, position_embedding_type="nope",
            shared_intermediate_size=64,
        ),
        "its GraniteMoeHybridModel has no `rotary_emb`",
    ),
    "llama4_text": (
        lambda: transformers.Llama4TextConfig(
            **SMALLEST | {"num_hidden_layers": 4}, num_key_value_heads=2, head_dim=16, num_local_experts=2,
            intermediate_size=64, intermediate_size_mlp=64,
        ),
        "layer 3: its rotary module does not give cos and sin",
    ),
}  # fmt: skip


def gemma3n(num_kv_shared_layers: int) -> Any:
    slides = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma3nTextConfig(
        **SMALLEST | {"num_hidden_layers": 4}, num_key_value_heads=2, head_dim=16, sliding_window=16,
        layer_types=slides, num_kv_shared_layers=num_kv_shared_layers, intermediate_size=[64] * 4, laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4, vocab_size_per_layer_input=258, hidden_size_per_layer_input=8,
    )  # fmt: skip


def test_layers_with_inputs_of_their_own_are_refused_without_shared_ones_too() -> None:
    model = empty_model(gemma3n(num_kv_shared_layers=0), torch.float32)
    assert "takes per_layer_input and shared_kv_states" in (hf.unsupported(model) or "")


def test_layers_that_keep_their_own_cache_are_not_tried() -> None:
    """The last two layers of this one have no keys that a trial could find; a fingerprint needs none of them."""
    model = empty_model(gemma3n(num_kv_shared_layers=2), torch.float32)
    assert [site.index for site in hf.attention_sites(model)] == [1]
    assert Fingerprint.of(model).probe == ()


@pytest.mark.parametrize("name", REFUSED)
def test_one_reason_from_every_command(name: str, tmp_path: Path) -> None:
    """The folder holds no weights: the reason comes before they are looked for."""
    config, reason = REFUSED[name]
    config().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    text = ["--text", write_text(tmp_path / "text.txt", 3000)]
    commands: list[list[Any]] = [
        ["preset", "kivi-2"], ["fit-predictors", *text, *SMALL], ["fit-predictors", *text, *SMALL, "--layerwise"],
        ["fit-norms", *text, *SMALL], ["measure-subspaces", *text], ["tune-bits", *text], ["train-codebooks", *text],
        ["tune-thresholds", *text, "--objective", "attention"], ["probe", *text], ["eval", *text, "--preset", "kivi-2"],
        ["compare", *text, "--preset", "kivi-2"], ["generate", "--prompt", "a", "--preset", "kivi-2"],
        ["eval", "--random-weights", "--preset", "kivi-2"],
    ]  # fmt: skip
    done = [kvcal(*command, "--model", tmp_path) for command in commands]
    assert {one.code for one in done} == {2}
    said = {one.err.splitlines()[-1] for one in done}
    assert len(said) == 1, said
    assert re.match(rf"kvcal: {tmp_path}: {name}: .*{reason}", said.pop())


def test_load_cache_gives_the_same_reason() -> None:
    model = transformers.AutoModelForCausalLM.from_config(REFUSED["gpt_neox"][0]())
    with pytest.raises(UnsupportedModel, match=r"gpt_neox: layer 0 \(GPTNeoXLayer\) has no self_attn"):
        load_cache("nothing-is-read", model)


# Layers that keep their own cache.


def text(length: int = 68) -> Any:
    names = {"source": "random", "sha256": "", "ids_sha256": "", "column": None}
    return SimpleNamespace(train=token_ids(5, length, seed=1), holdout=token_ids(2, length, seed=2), **names)


def fitted(method: Any, model: Any, path: Path, **options: Any) -> Any:
    from kvcal.capture.scan import WholeModel

    return fit(
        method, WholeModel(model), text(), path, model_record={}, revision=None, device=torch.device("cpu"), **options
    )


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRID)
def test_capture_runs_through_layers_that_it_does_not_hand_out(name: str) -> None:
    """Windows longer than the sliding one: keys are those of an ordinary forward, bit for bit."""
    model, ids = made(name), token_ids(2, 40, seed=3)
    plain = DynamicCache()  # whose layers all hold everything
    model(ids, past_key_values=plain)
    with Capture(model, ids, device="cpu", batch=2) as capture:
        assert (capture.layers, len(capture)) == (tuple(FULL), 3)
        for taps in capture:
            batch = next(iter(taps.batches({"k", "v"}, "post_rope")))
            assert torch.equal(batch.k, plain.layers[taps.index].keys)
            assert torch.equal(batch.v, plain.layers[taps.index].values)


@pytest.mark.parametrize("name", ["gemma3", "cohere2", "gpt-oss", "qwen2-slides"])
def test_predictors_read_the_nearest_compressed_layer_below(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    model = made(name)
    method = AquaKV(sink=SINK, recent=RECENT, block=BLOCK, key_inputs=("k1", "k2"))
    result = fitted(method, model, tmp_path / "a.kvcal.safetensors", say=said.append)
    assert "compresses 3 of 5 layers; 2 sliding-window layers keep their own cache" in said
    bundle = load_bundle(result.path)
    scheme = bundle.scheme
    assert [pair is not None for pair in scheme.layers] == [kind == "full_attention" for kind in SLIDES]
    first, second, third = (scheme.layers[index] for index in FULL)
    assert (first.key.name, second.key.inputs, third.key.inputs) == ("scaled", ("k1",), ("k1", "k2"))
    seen: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    class Watch:
        def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
            seen[layer] = exact, decoded

        def read(self, layer: int, blocks: int) -> None: ...

    with torch.no_grad(), load_cache(bundle, model) as own:
        own.watch = Watch()
        model(token_ids(1, 60, seed=5), past_key_values=own)
        assert own.describe()["coverage"] == "compresses 3 of 5 layers; 2 sliding-window layers keep their own cache"
    below = {index: seen[index][1] for index in FULL}
    for layer, inputs in ((3, {"k1": 1}), (4, {"k1": 3, "k2": 1})):
        codec = scheme.layers[layer].key
        context = Context(layer, **{name: below[index][0] for name, index in inputs.items()})
        wanted = codec.encode_decode(seen[layer][0][0], context)[1]
        assert torch.allclose(below[layer][0], wanted, atol=1e-5)
    assert result.bundle.metrics["layers"][0] == {}
    assert "key_relative_error" in result.bundle.metrics["layers"][1]


@torch.no_grad()
def test_reconstruction_of_layers_apart(tmp_path: Path) -> None:
    """Decoded by the kernel's reference in storage that layers share: neighbours in the chain must not share theirs."""
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = build(
        "Qwen3", num_hidden_layers=5, head_dim=16, use_sliding_window=True, sliding_window=16, layer_types=types
    )
    result = fitted(AquaKV(sink=SINK, recent=RECENT, block=BLOCK), model, tmp_path / "a.kvcal.safetensors")
    logits = {}
    for kernels in ("torch", "off"):
        with load_cache(result.path, model, kernels=kernels) as own:
            model(token_ids(1, 60, seed=6), past_key_values=own)
            logits[kernels] = model(token_ids(1, 1, seed=7), past_key_values=own).logits
            read = [layer.paths.dequantiser is not None for layer in own.compressed_layers]
        assert read == [kernels == "torch"] * 3
    torch.testing.assert_close(logits["torch"], logits["off"], atol=2e-3, rtol=2e-3)


def test_a_killed_fit_of_a_hybrid_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = made("gemma3"), AquaKV(sink=SINK, recent=RECENT, block=BLOCK)
    whole = fitted(method, model, tmp_path / "whole.kvcal.safetensors")
    stopped = method.__class__.fit_layer

    class Killed(Exception): ...

    def once(self: Any, layer: int, *rest: Any) -> Any:
        if layer == FULL[2]:
            raise Killed
        return stopped(self, layer, *rest)

    monkeypatch.setattr(AquaKV, "fit_layer", once)
    with pytest.raises(Killed):
        fitted(method, model, tmp_path / "cut.kvcal.safetensors")
    monkeypatch.undo()
    again = fitted(method, model, tmp_path / "cut.kvcal.safetensors")
    assert again.resumed_layers == 2
    assert again.sha256 == whole.sha256


def test_bits_are_shared_by_compressed_layers_alone(tmp_path: Path) -> None:
    method = KVTuner(max_bits=6, sink=SINK, recent=RECENT, block=32, group=16)
    result = fitted(method, made("gemma3"), tmp_path / "a.kvcal.safetensors")
    assert result.bundle.scheme.bits_per_value() <= 6
    assert [bool(row) for row in result.bundle.metrics["layers"]] == [kind == "full_attention" for kind in SLIDES]


def hybrid_folder(folder: Path, name: str = "gemma3") -> Path:
    family = {"gemma3": "Gemma3", "qwen2-slides": "Qwen2"}[name]
    model = HYBRID[name](vocab_size=258, bos_token_id=256, eos_token_id=257)
    assert type(model).__name__ == f"{family}ForCausalLM"
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_every_command_serves_a_hybrid(tmp_path: Path) -> None:
    folder = hybrid_folder(tmp_path / "model")
    source = ["--model", folder, "--text", write_text(tmp_path / "text.txt")]
    bundle, other = tmp_path / "a.kvcal.safetensors", tmp_path / "b.kvcal.safetensors"
    said = "compresses 3 of 5 layers; 2 sliding-window layers keep their own cache"
    windows = ["--windows", "4", "--length", "100", "--sink", "4", "--recent", "16"]
    commands: list[list[Any]] = [
        ["fit-predictors", *source, *SMALL, "--output", bundle],
        ["fit-predictors", *source, *SMALL, "--layerwise", "--output", other],
        ["fit-norms", *source, *windows, "--block", "32", "--output", tmp_path / "c.kvcal.safetensors"],
        ["measure-subspaces", *source, "--windows", "4", "--length", "100", "--output", tmp_path / "d.kvcal.safetensors"],
        ["tune-bits", *source, *windows, "--block", "32", "--group", "16", "--max-bits", "6",
         "--output", tmp_path / "e.kvcal.safetensors"],
        ["tune-thresholds", *source, *windows, "--block", "32", "--objective", "attention", "--trials", "2",
         "--max-bits", "12", "--output", tmp_path / "f.kvcal.safetensors"],
        ["train-codebooks", *source, *windows, "--block", "32", "--stages", "1,1,1", "--sizes", "16,16,16",
         "--high-dims", "4", "--vectors", "600", "--output", tmp_path / "g.kvcal.safetensors"],
        ["probe", *source, "--windows", "4", "--length", "68", "--csv", tmp_path / "probe.csv"],
        ["preset", "kivi-2", "--model", folder, "--output", tmp_path / "h.kvcal.safetensors"],
        ["eval", bundle, *source, "--windows", "2", "--length", "68"],
        ["compare", *source, "--preset", "uniform-4", "--windows", "2", "--length", "68"],
        ["generate", "--model", folder, "--bundle", bundle, "--prompt", "abc", "--tokens", "4"],
    ]  # fmt: skip
    for command in commands:
        done = kvcal(*command)
        assert done.code == 0, (command[0], done.err)
        assert said in done.err, command[0]
    for path in sorted(tmp_path.glob("*.kvcal.safetensors")):
        assert kvcal("verify", path, "--model", folder).code == 0
        assert kvcal("inspect", path).code == 0
        assert kvcal("card", path).code == 0
    assert bundle.read_bytes() == other.read_bytes()
    layers = {line.split(",")[2] for line in (tmp_path / "probe.csv").read_text().splitlines()[1:]}
    assert layers == {*map(str, FULL), "mean"}  # none has three layers below it, as all probes would need
    done = kvcal(
        "fit-predictors", *source, *SMALL, "--per-layer", "0=higgs-4", "--output", tmp_path / "i.kvcal.safetensors"
    )
    assert "--per-layer 0=higgs-4: layer 0 is not compressed: sliding-attention layer (window 16)" in done.err


def test_sinks_of_attention_are_a_stated_reason() -> None:
    model = HYBRID["gpt-oss"](head_dim=64)
    with KVCalCache(preset("kivi-2").scheme(model), model, kernels="torch") as own:
        rows = own.describe()["layers"]
    assert {row["path"] for row in rows if row["state"] == "applied"} == {"reference: its attention has sinks"}


@torch.no_grad()
@pytest.mark.parametrize("frame", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_text_towers(kind: str, frame: str, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    eyes = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    if kind == "gemma3":
        own: dict[str, Any] = {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": SLIDES}
        config: Any = transformers.Gemma3Config(
            text_config=sizes | own, vision_config=eyes | {"model_type": "siglip_vision_model"}, mm_tokens_per_image=4
        )
    else:
        config = transformers.LlavaConfig(
            text_config=sizes | {"model_type": "llama"},
            vision_config=eyes | {"model_type": "clip_vision_model", "projection_dim": 16},
        )
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    with make(model, frame=frame) as cache_:
        got = padded(model, cache_)
        assert cache_.ledger.blocks.tolist() == [6, 4, 1, 0]
    wanted = padded(model, DynamicCache(config=model.config))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert_layerwise(tmp_path, model)


# Mixtures of experts, and names that Transformers changes on load.


def test_a_text_tower_is_forecast_without_the_other(tmp_path: Path) -> None:
    """Idefics-3 moves embeddings of ids to where the pictures' tower is, which no command loads."""
    text = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    eyes = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = transformers.Idefics3Config(text_config=text, vision_config=eyes, scale_factor=1, image_token_id=5)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    done = kvcal("preset", "kivi-2", "--model", tmp_path / "model", "--output", tmp_path / "x.kvcal.safetensors")
    assert done.code == 0 and "KVCAL_DEBUG" not in done.err, done.err


def assert_layerwise(folder: Path, model: Any) -> None:
    """Whole and layer by layer, every parameter of the language model is the saved one."""
    source = resolve(str(folder))
    whole = dict(loading.load_model(source, dtype="float32", device="cpu").model.named_parameters())
    parts = open_layerwise(source, dtype="float32", device="cpu")
    parts.load_outer()
    for index in range(len(parts)):
        parts.load_layer(index)
    loaded = {name: one for name, one in parts.model.named_parameters() if not one.is_meta}
    decoder = {id(one) for one in hf.decoder_of(model).parameters()}
    names = [name for name, one in model.named_parameters() if id(one) in decoder]
    assert set(names) <= set(loaded)
    for name, one in model.named_parameters():
        assert torch.equal(whole[name], one), name
        assert name not in loaded or torch.equal(loaded[name], one), name


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_load_whole_and_layer_by_layer(name: str, tmp_path: Path) -> None:
    """save_pretrained writes the hub's names: one tensor an expert where the class has one for all."""
    model = made(name)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    if name != "gpt-oss":
        assert any(".experts.0." in key for key in load_file(tmp_path / "model.safetensors"))
        assert not any(".experts.0." in key for key in model.state_dict())
    assert_layerwise(tmp_path, model)


def test_commands_on_a_mixture(tmp_path: Path) -> None:
    model = MIXTURES["qwen3-moe"](vocab_size=258, bos_token_id=256, eos_token_id=257)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    source = ["--model", tmp_path / "model"]
    words = ["--text", write_text(tmp_path / "text.txt")]
    bundles = [tmp_path / f"{name}.kvcal.safetensors" for name in "abc"]
    for command in (
        ["fit-predictors", *source, *words, *SMALL, "--output", bundles[0]],
        ["fit-predictors", *source, *words, *SMALL, "--layerwise", "--output", bundles[1]],
        ["preset", "kivi-2", *source, "--output", bundles[2]],
        ["verify", bundles[0], *source],
        ["generate", *source, "--bundle", bundles[0], "--prompt", "abc", "--tokens", "4"],
    ):
        done = kvcal(*command)
        assert done.code == 0, done.err
    assert bundles[0].read_bytes() == bundles[1].read_bytes()


def test_one_tensor_that_makes_several_parameters() -> None:
    """What Transformers splits is found under each name."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    model = TINY["llama"]()
    names = [
        name.replace("q_proj", "qkv") for name in model.state_dict() if not any(p in name for p in ("k_proj", "v_proj"))
    ]
    converter = WeightConverter("self_attn.qkv.weight", [f"self_attn.{p}_proj.weight" for p in "qkv"], [Chunk(dim=0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_: [converter])
        found = Origins(model, names)
    origin = found["model.layers.1.self_attn.v_proj.weight"]
    assert origin is found["model.layers.1.self_attn.q_proj.weight"]
    fused = torch.arange(12.0)[:, None]
    parts = origin.make(lambda name: fused, model)
    assert torch.equal(parts["model.layers.1.self_attn.v_proj.weight"], fused[8:])


SHAPES = {
    "llama": ("model.layers.1.mlp.up_proj.weight", r"has shape \(96, 64\), its config.json asks for \(128, 64\)"),
    "mixtral": ("model.layers.1.block_sparse_moe.experts.2.w1.weight", r"has shape \(96, 64\), which does not fit"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    tensor, said = SHAPES[name]
    model = TINY[name]() if name in TINY else made(name)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[tensor] = tensors[tensor][:96].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = resolve(str(tmp_path))
    parts = open_layerwise(source, dtype="float32", device="cpu")
    for load in (lambda: loading.load_model(source, dtype="float32", device="cpu"), lambda: parts.load_layer(1)):
        with pytest.raises(ModelUnavailable, match=rf"model\.safetensors: {tensor} {said}"):
            load()


def test_a_missing_expert_is_said(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = resolve(str(tmp_path))
    for load in (
        lambda: loading.load_model(source, dtype="float32", device="cpu"),
        lambda: open_layerwise(source, dtype="float32", device="cpu").load_layer(1),
    ):
        with pytest.raises(ModelUnavailable, match=r"block_sparse_moe\.experts") as caught:
            load()
        assert len(str(caught.value).splitlines()) == 1


def test_config_of_another_width_names_the_tensor(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    source = resolve(str(tmp_path))
    said = r"model\.safetensors: model\.layers\.\d\.mlp\.\w+\.weight has shape .*, its config\.json asks for"
    with pytest.raises(ModelUnavailable, match=said):
        loading.load_model(source, dtype="float32", device="cpu")
    with pytest.raises(KVCalError, match=said):
        open_layerwise(source, dtype="float32", device="cpu").load_layer(0)
