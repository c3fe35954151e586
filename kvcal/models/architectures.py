"""The config.json of each architecture in the catalogue, from the numbers in which its models differ.

The keyword arguments are those of the public config.json of each hub id, under the names that Transformers 5 gives
them (`rope_parameters` instead of `rope_theta` and `rope_scaling`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json


def _rope(theta: float, **scaling: str | float) -> dict[str, Json]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


def _decoder(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    **fields: Json,
) -> dict[str, Json]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        **fields,
    }


def llama3(
    hidden: int, layers: int, heads: int, head_dim: int, intermediate: int, factor: float, tied: bool
) -> dict[str, Json]:
    scaling: dict[str, str | float] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _decoder(
        "llama",
        hidden,
        layers,
        heads,
        8,
        intermediate,
        128256,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=_rope(500000.0, **scaling),
        bos_token_id=128000,
        eos_token_id=128001,
    )


def smollm2_135m(bos: int, eos: int) -> dict[str, Json]:
    """The smallest SmolLM2; the instruct model's BOS and EOS differ."""
    return _decoder(
        "llama",
        576,
        30,
        9,
        3,
        1536,
        49152,
        head_dim=64,
        initializer_range=1 / 24,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=_rope(100000.0),
        bos_token_id=bos,
        eos_token_id=eos,
    )


def llama2(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Json]:
    return _decoder(
        "llama",
        hidden,
        layers,
        heads,
        heads,
        intermediate,
        32000,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=_rope(10000.0),
        bos_token_id=1,
        eos_token_id=2,
    )


def mistral_v03() -> dict[str, Json]:
    return _decoder(
        "mistral",
        4096,
        32,
        32,
        8,
        14336,
        32768,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        sliding_window=None,  # v0.3 attends to everything; MistralConfig's default is 4096
        rope_parameters=_rope(1000000.0),
        bos_token_id=1,
        eos_token_id=2,
    )


def qwen2(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    vocab: int = 152064,
    tied: bool = False,
    context: int = 131072,
    eps: float = 1e-6,
    theta: float = 1e6,
) -> dict[str, Json]:
    return _decoder(
        "qwen2",
        hidden,
        layers,
        heads,
        kv_heads,
        intermediate,
        vocab,
        max_position_embeddings=context,
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        use_sliding_window=False,
        rope_parameters=_rope(theta),
        bos_token_id=151643,
        eos_token_id=151643,
    )


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict[str, Json]:
    return _decoder(
        "qwen3",
        hidden,
        layers,
        heads,
        8,
        intermediate,
        151936,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        use_sliding_window=False,
        rope_parameters=_rope(1000000.0),
        bos_token_id=151643,
        eos_token_id=151645,
    )


def phi3_mini() -> dict[str, Json]:
    return _decoder(
        "phi3",
        3072,
        32,
        32,
        32,
        8192,
        32064,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        sliding_window=2047,
        rope_parameters=_rope(10000.0),
        bos_token_id=1,
        eos_token_id=32000,
        pad_token_id=32000,
    )


def smollm3() -> dict[str, Json]:
    return _decoder(
        "smollm3",
        2048,
        36,
        16,
        4,
        11008,
        128256,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        no_rope_layer_interval=4,
        use_sliding_window=False,
        rope_parameters=_rope(5000000.0),
        bos_token_id=128000,
        eos_token_id=128012,
        pad_token_id=128004,
    )


def granite33(hidden: int, intermediate: int, attention: float, logits: float) -> dict[str, Json]:
    return _decoder(
        "granite",
        hidden,
        40,
        32,
        8,
        intermediate,
        49159,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_multiplier=attention,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=logits,
        rope_parameters=_rope(1e7),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def olmo2(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Json]:
    return _decoder(
        "olmo2",
        hidden,
        layers,
        heads,
        heads,
        intermediate,
        100352,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters=_rope(500000.0),
        eos_token_id=100257,
        pad_token_id=100277,
    )


def gemma3_270m(eos: int | list[Json]) -> dict[str, Json]:
    """Five layers of a window of 512 tokens, then one that attends to everything, three times."""
    layers: list[Json] = [*(["sliding_attention"] * 5), "full_attention"]
    rope: dict[str, Json] = {"full_attention": _rope(1000000.0), "sliding_attention": _rope(10000.0)}
    return _decoder(
        "gemma3_text",
        640,
        18,
        4,
        1,
        2048,
        262144,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        sliding_window=512,
        layer_types=layers * 3,
        rope_parameters=rope,
        bos_token_id=2,
        eos_token_id=eos,
        pad_token_id=0,
    )
