"""The shape of a decoder, read from its config.json: layers, heads, widths. Nothing here imports torch.

C is the kv width: kv heads times head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json


Settings: TypeAlias = "Mapping[str, Json]"  # fields of a config.json


@dataclass(frozen=True)
class Geometry:
    """The shape of a decoder: what planning, bit counts and benchmarks need to know of a model."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    sliding_window: int | None
    attention_bias: bool
    mlp_bias: bool
    sliding_layers: int = 0  # that keep caches of their own: the tokens of `sliding_window`, if it is one

    @classmethod
    def from_config(cls, config: Settings) -> Geometry:
        """Read the fields of a config.json (or `config.to_dict()`), defaults as Transformers sets them.

        Raises KeyError for a field that is missing and TypeError for one of another type.
        """
        heads = _whole(config, "num_attention_heads")
        sliding = _whole_or_none(config, "sliding_window")
        if config.get("model_type") in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window"):
            sliding = None  # these carry a width that is only used when the switch is on
        layers, hidden = _whole(config, "num_hidden_layers"), _whole(config, "hidden_size")
        kinds = config.get("layer_types") or ["sliding_attention" if sliding else "full_attention"] * layers
        if not isinstance(kinds, Sequence):
            raise TypeError("list of layer_types")
        return cls(
            model_type=str(config["model_type"]),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_whole_or_none(config, "num_key_value_heads") or heads,
            head_dim=_whole_or_none(config, "head_dim") or hidden // heads,
            intermediate=_widest(config, "intermediate_size"),
            vocab=_whole(config, "vocab_size"),
            context=_whole(config, "max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
            sliding_window=sliding,
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            sliding_layers=sum(kind != "full_attention" for kind in kinds),
        )

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, bits: float = 16) -> float:
        """Bytes of keys and values of one token over all layers, at `bits` a value."""
        return 2 * self.layers * self.kv_width * bits / 8

    @property
    def parameters(self) -> int:
        """Exact for the architectures of the catalogue, an estimate for others."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = 4 if self.model_type.startswith("gemma3") else 2
        return embeddings + self.hidden + self.layers * (self._attention() + self._mlp() + norms * self.hidden)

    def _attention(self) -> int:
        query = self.heads * self.head_dim
        total = self.hidden * (2 * query + 2 * self.kv_width)
        if self.attention_bias:
            total += query + 2 * self.kv_width + self.hidden
        elif self.model_type == "qwen2":  # bias on q, k and v, none on o
            total += query + 2 * self.kv_width
        if self.model_type == "qwen3" or self.model_type.startswith("gemma3"):  # q_norm and k_norm over one head
            total += 2 * self.head_dim
        if self.model_type == "olmo2":  # q_norm and k_norm over all heads
            total += query + self.kv_width
        return total

    def _mlp(self) -> int:
        bias = 2 * self.intermediate + self.hidden if self.mlp_bias else 0
        return 3 * self.hidden * self.intermediate + bias


def _whole(config: Settings, name: str) -> int:
    value = config[name]
    if not isinstance(value, int):
        raise TypeError(f"whole number for {name}")
    return value


def _whole_or_none(config: Settings, name: str) -> int | None:
    return None if config.get(name) is None else _whole(config, name)


def _widest(config: Settings, name: str) -> int:
    """A width that some architectures state for each layer: the largest."""
    value = config[name]
    if not isinstance(value, list):
        return _whole(config, name)
    return max(_whole({name: one}, name) for one in value)
