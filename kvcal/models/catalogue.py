"""The models kvcal knows by a short name: their geometry without their weights. Nothing here imports torch.

The keyword arguments are those of the public config.json of each hub id, under the names that Transformers 5
gives them (`rope_parameters` instead of `rope_theta` and `rope_scaling`). C is the kv width: kv heads times
head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvcal_artifacts.errors import ModelUnavailable

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

TINY = Path(__file__).parents[1] / "demo" / "tiny"

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


@dataclass(frozen=True)
class ModelEntry:
    """One short name. `config` is empty for the embedded model, whose config.json lies in the package."""

    name: str
    hub_id: str | None
    config: Settings
    aliases: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # method -> settings unlike the paper's

    def config_fields(self) -> dict[str, Json]:
        """Everything `AutoConfig.for_model` needs, `model_type` included."""
        return dict(self.config) if self.config else _tiny_config()

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_config(self.config_fields())

    @property
    def presets(self) -> dict[str, dict[str, int]]:
        """method -> settings: the papers' own, as far as this geometry admits them."""
        base = paper_presets(self.geometry)
        return {method: {**settings, **self.overrides.get(method, {})} for method, settings in base.items()}


@cache
def _tiny_config() -> dict[str, Json]:
    try:
        fields: dict[str, Json] = json.loads((TINY / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"tiny: {TINY / 'config.json'} cannot be read; install kvcal again") from error
    return {k: v for k, v in fields.items() if k not in ("transformers_version", "dtype")}


def paper_presets(geometry: Geometry) -> dict[str, dict[str, int]]:
    """The papers' calibration settings, method by method.

    AQUA-KV: 256 sequences of 8192 tokens, 32 of them held out, seed 0. A model with a shorter context gets as
    many tokens in more windows. The HIGGS group is 1024 channels, or the largest power of two dividing C.
    """
    length = min(8192, geometry.context)
    more = 8192 // length
    group = min(1024, geometry.kv_width & -geometry.kv_width)
    return {
        "aqua-kv": {
            "windows": 256 * more,
            "length": length,
            "holdout": 32 * more,
            "seed": 0,
            "sink": 4,
            "recent": 128,
            "first_layer_bits": 4,
            "higgs_group": group,
        }
    }


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


def _llama3(
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


def _llama2(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Json]:
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


def _mistral_v03() -> dict[str, Json]:
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
        sliding_window=None,  # v0.3 attends to everything; MistralConfig's own default is 4096
        rope_parameters=_rope(1000000.0),
        bos_token_id=1,
        eos_token_id=2,
    )


def _qwen2(
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


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict[str, Json]:
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


def _phi3_mini() -> dict[str, Json]:
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


def _smollm3() -> dict[str, Json]:
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


def _granite33(hidden: int, intermediate: int, attention: float, logits: float) -> dict[str, Json]:
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


def _olmo2(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Json]:
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


def _distill(size: str, config: dict[str, Json]) -> ModelEntry:
    """DeepSeek-R1 distilled into a Llama or a Qwen of that size."""
    family, _, count = size.partition("-")
    hub_id = f"deepseek-ai/DeepSeek-R1-Distill-{family.capitalize()}-{count.upper()}"
    return ModelEntry(f"r1-distill-{size}", hub_id, config, aliases=(f"deepseek-r1-distill-{size}",))


def _tiny() -> ModelEntry:
    # The whole embedded text is 313 kB, its context 2048: fewer and shorter windows than the paper's.
    override = {"windows": 72, "length": 1024, "holdout": 8}
    return ModelEntry("tiny", None, {}, overrides={"aqua-kv": override})


_L32_1B = _llama3(2048, 16, 32, 64, 8192, factor=32.0, tied=True)
_L32_3B = _llama3(3072, 28, 24, 128, 8192, factor=32.0, tied=True)
_L31_8B = _llama3(4096, 32, 32, 128, 14336, factor=8.0, tied=False)
_L31_70B = _llama3(8192, 80, 64, 128, 28672, factor=8.0, tied=False)

_ENTRIES = (
    _tiny(),
    ModelEntry("llama-3.2-1b", "meta-llama/Llama-3.2-1B", _L32_1B),
    ModelEntry("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct", _L32_1B),
    ModelEntry("llama-3.2-3b", "meta-llama/Llama-3.2-3B", _L32_3B),
    ModelEntry("llama-3.2-3b-instruct", "meta-llama/Llama-3.2-3B-Instruct", _L32_3B),
    ModelEntry("llama-3.1-8b", "meta-llama/Llama-3.1-8B", _L31_8B),
    ModelEntry("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", _L31_8B),
    ModelEntry("llama-3.1-70b", "meta-llama/Llama-3.1-70B", _L31_70B),
    ModelEntry("llama-3.1-70b-instruct", "meta-llama/Llama-3.1-70B-Instruct", _L31_70B),
    ModelEntry("llama-2-7b", "meta-llama/Llama-2-7b-hf", _llama2(4096, 32, 32, 11008)),
    ModelEntry("llama-2-13b", "meta-llama/Llama-2-13b-hf", _llama2(5120, 40, 40, 13824)),
    ModelEntry(
        "qwen2.5-0.5b",
        "Qwen/Qwen2.5-0.5B",
        _qwen2(896, 24, 14, 2, 4864, vocab=151936, tied=True, context=32768),
    ),
    ModelEntry("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", _qwen2(1536, 28, 12, 2, 8960, vocab=151936, tied=True)),
    ModelEntry(
        "qwen2.5-3b",
        "Qwen/Qwen2.5-3B",
        _qwen2(2048, 36, 16, 2, 11008, vocab=151936, tied=True, context=32768),
    ),
    ModelEntry("qwen2.5-7b", "Qwen/Qwen2.5-7B", _qwen2(3584, 28, 28, 4, 18944)),
    ModelEntry("qwen2.5-14b", "Qwen/Qwen2.5-14B", _qwen2(5120, 48, 40, 8, 13824, eps=1e-5)),
    ModelEntry("qwen2.5-32b", "Qwen/Qwen2.5-32B", _qwen2(5120, 64, 40, 8, 27648, eps=1e-5)),
    ModelEntry("qwen2.5-72b", "Qwen/Qwen2.5-72B", _qwen2(8192, 80, 64, 8, 29568, eps=1e-5)),
    ModelEntry("qwen3-0.6b", "Qwen/Qwen3-0.6B", _qwen3(1024, 28, 16, 3072, tied=True)),
    ModelEntry("qwen3-1.7b", "Qwen/Qwen3-1.7B", _qwen3(2048, 28, 16, 6144, tied=True)),
    ModelEntry("qwen3-4b", "Qwen/Qwen3-4B", _qwen3(2560, 36, 32, 9728, tied=True)),
    ModelEntry("qwen3-8b", "Qwen/Qwen3-8B", _qwen3(4096, 36, 32, 12288, tied=False)),
    ModelEntry("qwen3-14b", "Qwen/Qwen3-14B", _qwen3(5120, 40, 40, 17408, tied=False)),
    ModelEntry("qwen3-32b", "Qwen/Qwen3-32B", _qwen3(5120, 64, 64, 25600, tied=False)),
    ModelEntry("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", _mistral_v03()),
    ModelEntry("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", _mistral_v03()),
    ModelEntry("phi-3-mini-4k", "microsoft/Phi-3-mini-4k-instruct", _phi3_mini()),
    ModelEntry("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", _smollm3()),
    ModelEntry("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", _granite33(2048, 8192, 1 / 64, 8.0)),
    ModelEntry("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", _granite33(4096, 12800, 1 / 128, 16.0)),
    ModelEntry("olmo-2-1b", "allenai/OLMo-2-0425-1B", _olmo2(2048, 16, 16, 8192)),
    ModelEntry("olmo-2-7b", "allenai/OLMo-2-1124-7B", _olmo2(4096, 32, 32, 11008)),
    _distill("llama-8b", _L31_8B),
    _distill("llama-70b", _L31_70B),
    # The two small Qwen distills start from Qwen2.5-Math: RoPE theta 10,000, and the embedding is not tied.
    _distill("qwen-1.5b", _qwen2(1536, 28, 12, 2, 8960, vocab=151936, theta=10000.0)),
    _distill("qwen-7b", _qwen2(3584, 28, 28, 4, 18944, theta=10000.0)),
    _distill("qwen-14b", _qwen2(5120, 48, 40, 8, 13824, eps=1e-5)),
    _distill("qwen-32b", _qwen2(5120, 64, 40, 8, 27648, eps=1e-5)),
)

CATALOGUE: dict[str, ModelEntry] = {entry.name: entry for entry in _ENTRIES}
ALIASES: dict[str, str] = {alias: entry.name for entry in _ENTRIES for alias in entry.aliases}
BY_HUB_ID: dict[str, ModelEntry] = {entry.hub_id: entry for entry in _ENTRIES if entry.hub_id}


def models_table() -> list[dict[str, str | int | None]]:
    """The rows of `kvcal models`, in catalogue order."""
    return [_row(entry) for entry in CATALOGUE.values()]


def _row(entry: ModelEntry) -> dict[str, str | int | None]:
    geometry = entry.geometry
    return {
        "name": entry.name,
        "hub_id": entry.hub_id or "(embedded)",
        "architecture": geometry.model_type,
        "layers": geometry.layers,
        "hidden": geometry.hidden,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "kv_width": geometry.kv_width,
        "context": geometry.context,
        "sliding_window": geometry.sliding_window,
        "kv_bytes_per_token": int(geometry.kv_bytes_per_token()),
        "parameters": geometry.parameters,
    }
