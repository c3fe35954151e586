"""Settings of a config that decide what keys and values are: each tells models apart, and old bundles still load."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcal.methods.data_free import Preset
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.bundle import FORMAT, Bundle, Fingerprint
from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.bundle.fingerprint import FINGERPRINT_FIELDS
from kvcal_artifacts.bundle.settings import ALIASES, FIELDS, LENGTHS, VERSION, Settings
from kvcal_artifacts.errors import CorruptBundle, IncompatibleBundle
from tests.support.architectures import HYBRID, MIXTURES, SLICED, SLIDES, TINY, VARIANTS, build, rope

# Every decoder of Transformers 5.23 in which kvcal compresses a layer; some have no such layer by default.
SUPPORTED = [
    "afmoe", "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "diffllama",
    "doge", "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "fuyu",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "lfm2", "llama", "mellum", "minimax_m2",
    "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
]  # fmt: skip

NO_MATTER = {
    **dict.fromkeys(
        (
            "attention_dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "resid_pdrop", "residual_dropout",
            "input_jitter_noise", "router_aux_loss_coef", "output_router_logits",
        ),
        "training alone",
    ),
    **dict.fromkeys(("initializer_range", "lambda_std_dev"), "fresh weights alone"),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id"),
        "which tokens, not what they become",
    ),
    **dict.fromkeys(("use_cache", "pretraining_tp"), "how it is run"),
    **dict.fromkeys(
        (
            "_sliding_window_pattern", "sliding_window_pattern", "global_attn_every_n_layers", "max_window_layers",
            "use_sliding_window", "prefix_dense_sliding_window_pattern", "full_attn_idxs",
        ),
        "becomes layer_types",
    ),
    "no_rope_layer_interval": "becomes no_rope_layers",
    **dict.fromkeys(("rope_theta", "rope_scaling"), "becomes rope_parameters"),
    **dict.fromkeys(("mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"), "layers that are not loaded"),
    **dict.fromkeys(("vision_config", "audio_config"), "not the decoder"),
    **dict.fromkeys(("image_token_id", "image_token_index"), "not the decoder"),
    "lm_head_bias": "a weight of the head",
    **dict.fromkeys(("conv_bias", "conv_L_cache"), "layers that kvcal refuses"),
}  # fmt: skip
HASHED = (*FINGERPRINT_FIELDS, "head_dim", "rope_parameters")
STATED = (*FIELDS[VERSION], *(name for names in ALIASES.values() for name in names))


def decoder_config(name: str) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[name]().get_text_config(decoder=True)
    return config


def fingerprint(config: Any) -> Fingerprint:
    return Fingerprint.of_config(config, None, ())


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, list):
        return [*value[:-1], other(value[-1])] if value else [1]
    return 7 if value is None else f"{value}x"


# Every field of every architecture.


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_field_is_decided_and_tells_models_apart(name: str) -> None:
    base = set(PreTrainedConfig().to_dict())
    if name not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    config = decoder_config(name)
    fields = [field for field in config.to_dict() if field not in base and field not in NO_MATTER]
    undecided = set(fields) - set(HASHED) - set(STATED)
    assert not undecided, "a field of FIELDS of a new version, or of NO_MATTER with the reason"
    before = fingerprint(config)
    for field in sorted(set(fields) - set(LENGTHS) - {"num_hidden_layers", "rope_parameters"}):
        changed = copy.deepcopy(config)
        now = getattr(config, field)
        vars(changed)[field] = other(now)
        told = before.differences(fingerprint(changed)) if now is not None or field in STATED else ["was null"]
        assert told, field


@pytest.mark.parametrize("field", STATED)
def test_a_setting_tells_two_configs_apart_and_is_named(field: str) -> None:
    values: tuple[Any, Any] = ([1, 2, 3], [1, 5, 3]) if field == "mlp_only_layers" else (2, 3)
    kind = {"rope_parameters": rope("dynamic", factor=2.0)} if field in LENGTHS else {}
    one, two = (transformers.LlamaConfig(num_hidden_layers=3, **kind) for _ in range(2))
    if field == "layer_types":
        values = SLIDES[:3], ["sliding_attention", "sliding_attention", "sliding_attention"]
    vars(one)[field], vars(two)[field] = values
    named = next((name for name, names in ALIASES.items() if field in names), field)
    [told] = fingerprint(one).differences(fingerprint(two))
    assert told.startswith(named) and "bundle" in told and "model" in told
    if isinstance(values[0], list):
        assert told.startswith(f"{named}[1]: ")


# Of models, as they are made: families, and options that become other fields.


def model(family: str, **options: Any) -> Any:
    return build(family, **options)


HYBRIDS = {"num_hidden_layers": 5, "sliding_window": 16}
SLIDING = HYBRIDS | {"use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MIXED = {"num_local_experts": 4}
SOFT = {"head_dim": 16, "attn_implementation": "eager"}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "layer_types": (
        "Gemma3", HYBRIDS | {"layer_types": SLIDES}, HYBRIDS | {"layer_types": SLIDES[::-1]}, "layer_types[0]",
    ),
    "all layers": (
        "Cohere2", HYBRIDS | {"layer_types": SLIDES}, HYBRIDS | {"layer_types": ["full_attention"] * 5}, "layer_types",
    ),
    "max_window_layers": ("Qwen2", SLIDING, SLIDING | {"max_window_layers": 2}, "layer_types[1]"),
    "use_sliding_window": ("Qwen2", SLIDING, SLIDING | {"use_sliding_window": False}, "layer_types"),
    "sliding_window": ("Qwen2", SLIDING, SLIDING | {"sliding_window": 8}, "config_sha256"),
    "softcap": ("Gemma2", SOFT, SOFT | {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    "no softcap": ("Gemma2", SOFT, SOFT | {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
    "scalar": ("Gemma2", SOFT, SOFT | {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
    "experts a token": ("Qwen3Moe", EXPERTS, EXPERTS | {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    "experts": ("Mixtral", {"num_local_experts": 4}, {"num_local_experts": 6}, "num_experts"),
    "norm of probabilities": ("Qwen3Moe", EXPERTS, EXPERTS | {"norm_topk_prob": True}, "norm_topk_prob"),
    "jitter": ("Mixtral", MIXED, MIXED | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    "LayerNorm": ("Phi", {}, {"layer_norm_eps": 1e-2}, "layer_norm_eps"),
    "RMSNorm": ("Llama", {}, {"rms_norm_eps": 1e-3}, "config_sha256"),
    "parallel": ("StableLm", {}, {"use_parallel_residual": True}, "use_parallel_residual"),
    "biases": ("StableLm", {}, {"use_qkv_bias": True}, "use_qkv_bias"),
    "attention_bias": ("Llama", {}, {"attention_bias": True}, "config_sha256"),
    "norms of queries and keys": ("Phi", {}, {"qk_layernorm": True, "num_key_value_heads": 4}, "qk_layernorm"),
    "multiplier": ("Granite", {}, {"attention_multiplier": 0.5}, "config_sha256"),
    "clip": ("Olmo", {}, {"clip_qkv": 8.0}, "clip_qkv"),
    "theta": ("Llama", {}, {"rope_parameters": rope("default", rope_theta=5e5)}, "rope"),
    "scaling": ("Llama", *({"rope_parameters": rope("linear", factor=f)} for f in (2.0, 4.0)), "rope"),
    "partial": ("Phi", *({"rope_parameters": rope("default", partial_rotary_factor=f)} for f in (0.5, 0.25)), "rope"),
    "dynamic": ("Llama", *({"max_position_embeddings": n, "rope_parameters": rope("dynamic", factor=2.0)} for n in (64, 128)),
                "max_position_embeddings"),
    "head_dim": ("Qwen3", {"head_dim": 16}, {"head_dim": 32}, "head_dim"),
    "RoPE's layers": ("SmolLM3", *({"num_hidden_layers": 4, "no_rope_layer_interval": n} for n in (2, 4)), "config_sha256"),
}  # fmt: skip


@pytest.mark.transformers
@pytest.mark.parametrize("name", PAIRS)
def test_models_that_differ_in_one_option_are_told_apart(name: str) -> None:
    family, options, others, told = PAIRS[name]
    with torch.device("meta"):
        first, second = (
            Fingerprint.of(getattr(transformers, f"{family}ForCausalLM")(config_of(family, one)), probe=())
            for one in (options, others)
        )
    differences = first.differences(second)
    assert any(line.startswith(told) for line in differences), differences


def config_of(family: str, options: dict[str, Any]) -> Any:
    from tests.support.architectures import GEOMETRY

    named = {"Gemma3": "Gemma3Text"}.get(family, family)
    return getattr(transformers, f"{named}Config")(**{**GEOMETRY, **options})


# Equal on Transformers 5.17 and 5.23, so that a bundle moves between them. The others state none.
LAYERS = {"layer_types": SLIDES}
GOLDEN: dict[str, dict[str, Any]] = {
    "phi3-longrope": {"max_position_embeddings": 512, "original_max_position_embeddings": 64},
    "llama-dynamic": {"max_position_embeddings": 64},
    "phi": {"layer_norm_eps": 1e-05},
    "phi-norms": {"layer_norm_eps": 1e-05, "qk_layernorm": True},
    "stablelm": {"layer_norm_eps": 1e-05},
    "stablelm-norms": {"layer_norm_eps": 1e-05, "qk_layernorm": True},
    "persimmon": {"layer_norm_eps": 1e-05, "qk_layernorm": True},
    "nemotron": {"norm_eps": 1e-05},
    "gemma3": LAYERS | {"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": LAYERS | {
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "qwen2-slides": LAYERS,
    "cohere2": LAYERS | {"layer_norm_eps": 1e-05, "logit_scale": 0.0625},
    "gpt-oss": LAYERS | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2-moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "qkv_bias": True, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.transformers
@pytest.mark.parametrize("name", sorted({*TINY, *VARIANTS, *SLICED, *HYBRID, *MIXTURES}))
def test_settings_do_not_depend_on_the_version_of_transformers(name: str) -> None:
    config = {**TINY, **VARIANTS, **SLICED, **HYBRID, **MIXTURES}[name]().config
    assert Settings.of(config).fields == GOLDEN.get(name, {})


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], "x" * 301, "", float("inf"), 1e31, [1] * 1025], ids=repr)
def test_what_no_header_holds_is_hashed(value: Any) -> None:
    config = transformers.LlamaConfig()
    vars(config)["clip_qkv"] = value
    stated = Settings.of(config).fields["clip_qkv"]
    assert isinstance(stated, str) and len(stated) == 64


# Bundles.


@pytest.fixture
def bundle() -> Bundle:
    plain = HYBRID["gemma3"]()
    return Bundle(Fingerprint.of(plain), Preset("higgs-2", "higgs-2", "post_rope").scheme(plain), {"method": "higgs-2"})


def header_of(data: bytes) -> dict[str, Any]:
    end = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8:end])["__metadata__"][FORMAT])["header"]
    return header


def with_settings(bundle: Bundle, path: Path, settings: Any) -> Path:
    """The bundle's file with other settings; None: as it was written before there were any."""
    from safetensors.torch import load, save

    data = bundle.to_bytes()
    header = header_of(data)
    del header["model"]["settings"]
    if settings is not None:
        header["model"]["settings"] = settings
    text = canonical({"header": header, "sha256": sha256_text(canonical(header))})
    path.write_bytes(save(load(data), metadata={FORMAT: text}))
    return path


def test_a_bundle_for_other_layers_is_refused_naming_the_first(bundle: Bundle, tmp_path: Path) -> None:
    other_layers = HYBRID["gemma3"](layer_types=["full_attention"] * 5)
    again = load_bundle(bundle_path(bundle, tmp_path))
    assert again.fingerprint == bundle.fingerprint and again.to_bytes() == bundle.to_bytes()
    with pytest.raises(
        IncompatibleBundle, match=r"made for another model: layer_types: bundle \['sliding_attention', .*unset"
    ):
        load_cache(again, other_layers)
    turned = HYBRID["gemma3"](layer_types=SLIDES[::-1])
    with pytest.raises(
        IncompatibleBundle, match=r"layer_types\[0\]: bundle 'sliding_attention', model 'full_attention'"
    ):
        load_cache(again, turned)
    with load_cache(again, HYBRID["gemma3"]()):
        pass


def bundle_path(bundle: Bundle, folder: Path) -> Path:
    bundle.write(folder / "x.kvcal.safetensors")
    return folder / "x.kvcal.safetensors"


def test_a_bundle_of_before_loads_as_it_did(bundle: Bundle, tmp_path: Path) -> None:
    path = with_settings(bundle, tmp_path / "old.kvcal.safetensors", None)
    old = load_bundle(path)
    assert old.fingerprint.settings is None and old.to_bytes() == path.read_bytes()
    with load_cache(old, HYBRID["gemma3"]()):
        pass
    new = HYBRID["gemma3"](query_pre_attn_scalar=16)
    old.check(new)  # what it does not state, it is not compared in
    with pytest.raises(IncompatibleBundle, match="query_pre_attn_scalar: bundle 256, model 16"):
        bundle.check(new)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"version": 2, "fields": {}}, "settings, version 2: must be a whole number of at least 1, at most 1"),
        ({"version": True, "fields": {}}, "settings, version True"),
        ({"fields": {}}, "settings lacks version"),
        ([], "settings .*: must be an object"),
        ({"version": 1, "fields": []}, "settings, fields .*: must be an object"),
        ({"version": 1, "fields": {"clip": 1}}, "settings, fields has 'clip': allowed are layer_types, "),
        ({"version": 1, "fields": {"clip_qkv": None}}, "clip_qkv None: must be a number"),
        ({"version": 1, "fields": {"clip_qkv": {}}}, "clip_qkv {}: must be a number"),
        ({"version": 1, "fields": {"clip_qkv": 10**400}}, "1000.*: integers must have at most 64 bits"),
        ({"version": 1, "fields": {"layer_types": [[]]}}, r"layer_types\[0\] \[\]: must be a number"),
        ({"version": 1, "fields": {"layer_types": ["x"] * 1025}}, "must be a list of 0 to 1024 entries"),
        ({"version": 1, "fields": {"layer_types": "x" * 301}}, "must be a string of 1 to 300 characters"),
    ],
)
def test_settings_of_a_file_are_checked(settings: Any, says: str, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(CorruptBundle, match=says) as refused:
        load_bundle(with_settings(bundle, tmp_path / "x.kvcal.safetensors", settings))
    assert len(str(refused.value)) < 3000
