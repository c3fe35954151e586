"""Tiny random models of every supported architecture: 3 or 4 layers, hidden 64, 4 heads, 2 kv heads, dim 16.

`TINY[name]()` and `VARIANTS[name]()` build the same weights each time, in fp32 and eval mode, with SDPA;
keyword arguments override the configuration (`TINY["llama"](num_hidden_layers=2)`). Greedy decoding neither
ties nor ends early: logits spread over several units and there is no end-of-text token. Token 0 is the pad.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Gemma2PreTrainedModel, PreTrainedModel

VOCAB = 256
MAX_POSITIONS = 512

GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}


SLIDES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]


def build(family: str, **overrides: Any) -> PreTrainedModel:
    """A seeded model of a family named as Transformers names its classes: "Llama", "Phi3", "Olmo2"."""
    named = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{named}Config")(**{**GEOMETRY, **overrides})
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    initialise(model, seed=zlib.crc32(family.encode()))
    return model.eval()


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Gaussian matrices that keep the variance, norms near 1, biases around 0.5: nothing is degenerate."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed_tokens" in name:
            parameter.copy_(noise)
        elif parameter.ndim == 2:
            gain = 2.0 if "lm_head" in name else 1.0
            parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(1 + 0.2 * noise)


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


TINY: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": partial(build, "Llama"),
    "mistral": partial(build, "Mistral", sliding_window=None),
    "qwen2": partial(build, "Qwen2"),  # bias on q, k and v
    "qwen3": partial(build, "Qwen3", head_dim=16),  # q_norm and k_norm per head
    "phi3": partial(build, "Phi3"),  # q, k and v in one projection
    # layers 1 and 3 without RoPE
    "smollm3": partial(build, "SmolLM3", num_hidden_layers=4, no_rope_layer_interval=2),
    "granite": partial(
        build,
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=0.5,
    ),
    "olmo2": partial(build, "Olmo2"),  # norms after the blocks, k_norm over all heads, RoPE in fp32
}

VARIANTS: dict[str, Callable[..., PreTrainedModel]] = {
    "phi3-partial": partial(build, "Phi3", rope_parameters=rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": partial(  # past 64 positions the frequencies change, and attention_scaling is not 1
        build,
        "Phi3",
        original_max_position_embeddings=64,
        rope_parameters=rope(
            "longrope",
            factor=8.0,
            partial_rotary_factor=0.5,
            original_max_position_embeddings=64,
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.5, 2.0, 3.0, 4.0],
        ),
    ),
    "llama-yarn": partial(  # attention_scaling 1.139
        build, "Llama", rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "llama-llama3": partial(
        build,
        "Llama",
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-dynamic": partial(  # past 64 positions the base grows with the longest position seen
        build, "Llama", max_position_embeddings=64, rope_parameters=rope("dynamic", factor=2.0)
    ),
}

# Whose modules slice the channels that RoPE turns off each head themselves, or normalise keys behind the head's view.
SLICED: dict[str, Callable[..., PreTrainedModel]] = {
    "phi": partial(build, "Phi", rope_parameters=rope("default", partial_rotary_factor=0.5)),
    "phi-norms": partial(
        build,
        "Phi",
        num_key_value_heads=4,
        qk_layernorm=True,
        rope_parameters=rope("default", partial_rotary_factor=0.5),
    ),
    "stablelm": partial(build, "StableLm", rope_parameters=rope("default", partial_rotary_factor=0.25)),
    "stablelm-norms": partial(
        build, "StableLm", qk_layernorm=True, rope_parameters=rope("default", partial_rotary_factor=0.25)
    ),
    "persimmon": partial(
        build, "Persimmon", num_key_value_heads=4, rope_parameters=rope("default", partial_rotary_factor=0.5)
    ),
    "glm": partial(build, "Glm", head_dim=16, rope_parameters=rope("default", partial_rotary_factor=0.5)),
    "nemotron": partial(build, "Nemotron", head_dim=16, rope_parameters=rope("default", partial_rotary_factor=0.5)),
}

# Of whose five layers three attend to everything; the others keep Transformers' own cache of 16 tokens.
HYBRID: dict[str, Callable[..., PreTrainedModel]] = {
    "gemma3": partial(build, "Gemma3", num_hidden_layers=5, head_dim=16, sliding_window=16, layer_types=SLIDES),
    "gemma2": partial(
        build, "Gemma2", num_hidden_layers=5, head_dim=16, sliding_window=16, layer_types=SLIDES,
        attn_implementation="sdpa" if Gemma2PreTrainedModel._supports_sdpa else "eager",
    ),
    "qwen2-slides": partial(
        build, "Qwen2", num_hidden_layers=5, use_sliding_window=True, sliding_window=16, layer_types=SLIDES
    ),
    "cohere2": partial(build, "Cohere2", num_hidden_layers=5, sliding_window=16, layer_types=SLIDES),
    "gpt-oss": partial(
        build, "GptOss", num_hidden_layers=5, head_dim=16, sliding_window=16, layer_types=SLIDES, num_local_experts=4,
        num_experts_per_tok=2, attn_implementation="eager",
    ),
}  # fmt: skip

MIXTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3-moe": partial(
        build, "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": partial(build, "Mixtral", sliding_window=None, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": partial(build, "Olmoe", num_experts=4, num_experts_per_tok=2),
    "qwen2-moe": partial(
        build, "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "gpt-oss": HYBRID["gpt-oss"],
}  # fmt: skip
