"""Further settings of a model's config that decide what its keys and values are, beyond those in `config_sha256`.

A bundle states them one by one, so that a difference is named. Their list has a version: fields are never removed from
a version, and a bundle of an older one is compared in that one's fields alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .. import hf
from ..checked import LAYERS, Json, shown
from .canonical import sha256_text

VERSION = 1  # of what `Settings.of` makes
FIELDS: Mapping[int, tuple[str, ...]] = {
    1: (
        # which tokens a layer attends to
        "layer_types",
        "attention_chunk_size",
        "keep_window_size",
        "num_kv_shared_layers",
        "use_bidirectional_attention",
        "index_block_size",
        "index_head_dim",
        "index_local_blocks",
        "index_n_heads",
        "index_topk_blocks",
        # queries, keys, values and scores
        "attn_logit_softcapping",
        "query_pre_attn_scalar",
        "qk_layernorm",
        "use_qk_norm",
        "clip_qkv",
        "attention_out_bias",
        "qkv_bias",
        "use_qkv_bias",
        "use_bias",
        "gating",
        "num_attention_heads_per_layer",
        # RoPE, beyond rope_parameters
        "layer_rope_theta",
        "rotary_dim",
        "max_position_embeddings",
        "original_max_position_embeddings",
        # norms and residuals
        "layer_norm_eps",
        "norm_eps",
        "norm_epsilon",
        "use_post_norm",
        "use_parallel_residual",
        "mup_enabled",
        # feed-forward layers
        "hidden_activation",
        "swiglu_alpha",
        "swiglu_limit",
        "dense_intermediate_size",
        "prefix_dense_intermediate_size",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        # which layers are mixtures of experts
        "is_moe",
        "mlp_layer_types",
        "mlp_only_layers",
        "decoder_sparse_step",
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
        # experts
        "num_experts",
        "moe_intermediate_size",
        "num_shared_experts",
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_expert_combination_strategy",
        # routing
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "moe_norm_min",
        "expert_selection_fn",
        "use_expert_bias",
        "routed_scaling_factor",
        "moe_routed_scaling_factor",
        "router_scaling_factor",
        "route_scale",
        "moe_router_logit_softcapping",
        "router_jitter_noise",
        "moe_apply_router_weight_on_input",
        "enable_moe_fp32_combine",
        # logits, which calibration may go by
        "final_logit_softcapping",
        "logit_scale",
    )
}
ALIASES = {  # other names of a field, which Transformers maps to one another, in some versions and for some models
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k"),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
}
EARLIER = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # what Transformers computed with before it had the field
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")


@dataclass(frozen=True)
class Settings:
    """Fields of a version's list by name, without those that mean the same as if the config had no such field."""

    version: int
    fields: Mapping[str, Json]

    @classmethod
    def of(cls, config: hf.ModelConfig) -> Settings:
        """The settings of a decoder's config."""
        values: dict[str, Json] = {name: _value(config, name) for name in FIELDS[VERSION]}
        kinds = [hf.layer_kind(config, index) for index in range(config.num_hidden_layers)]
        values["layer_types"] = kinds if set(kinds) != {"full_attention"} else None  # as of configs without the field
        if not any(map(_reads_lengths, _ropes(config))):
            values |= dict.fromkeys(LENGTHS)
        return cls(VERSION, {name: _stated(value) for name, value in values.items() if not _unset(name, value)})

    def differences(self, other: Settings, names: tuple[str, str] = ("bundle", "model")) -> Iterator[str]:
        """A phrase for each field that both versions know and in which the other differs. names: what the phrases call
        the two.
        """
        for name in FIELDS[min(self.version, other.version)]:
            mine, theirs = self.fields.get(name), other.fields.get(name)
            if mine != theirs:
                yield _difference(name, mine, theirs, names)


def plain(value: object) -> Json:
    """A config value as JSON gives it back."""
    result: Json = json.loads(json.dumps(value))
    return result


def _unset(name: str, value: Json) -> bool:
    """Whether a config without the field means the same: one of another version of Transformers may have none."""
    return value is None or value is False or value == EARLIER.get(name)


def _stated(value: Json) -> Json:
    """The value where a header may hold it: a number, a text, true, or a list of these; else its hash."""
    entries = value if isinstance(value, list) else [value]
    if len(entries) <= LAYERS and all(_plain_entry(entry) for entry in entries):
        return value
    return sha256_text(json.dumps(value, sort_keys=True))


def _plain_entry(value: Json) -> bool:
    if isinstance(value, str):
        return 1 <= len(value) <= 300
    return value is None or (isinstance(value, (bool, int, float)) and -1e30 <= value <= 1e30)


def _value(config: hf.ModelConfig, name: str) -> Json:
    """The field, by any of its names."""
    values = (getattr(config, alias, None) for alias in (name, *ALIASES.get(name, ())))
    return plain(next((value for value in values if value is not None), None))


def _ropes(config: hf.ModelConfig) -> list[Mapping[str, object]]:
    """The RoPE parameters of a config: one table, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [one for one in parameters.values() if isinstance(one, dict)] or [parameters]


def _reads_lengths(rope: Mapping[str, object]) -> bool:
    """Whether the angles depend on the lengths that the config states elsewhere."""
    kind = rope.get("rope_type", "default")
    return kind not in ("default", "linear", "llama3") and not (kind == "yarn" and rope.get("factor") is not None)


def _difference(name: str, mine: Json, theirs: Json, names: tuple[str, str]) -> str:
    """What differs between the settings of these two, in a line; of two lists of one length their first entries that
    do.
    """
    one, other = names
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        index = next(i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y)
        return f"{name}[{index}]: {one} {shown(mine[index])}, {other} {shown(theirs[index])}"
    first, second = ("unset" if value is None else shown(value) for value in (mine, theirs))
    return f"{name}: {one} {first}, {other} {second}"
