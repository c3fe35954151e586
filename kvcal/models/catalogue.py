"""The models kvcal knows by a short name, without their weights, and the papers' settings for each. Nothing here
imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvcal_artifacts.errors import ModelUnavailable

from .architectures import (
    gemma3_270m,
    granite33,
    llama2,
    llama3,
    mistral_v03,
    olmo2,
    phi3_mini,
    qwen2,
    qwen3,
    smollm2_135m,
    smollm3,
)
from .geometry import Geometry, Settings

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

TINY = Path(__file__).parents[1] / "demo" / "tiny"


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
        """method -> settings: the papers', as far as this geometry admits them."""
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


def _distill(size: str, config: dict[str, Json]) -> ModelEntry:
    """DeepSeek-R1 distilled into a Llama or a Qwen of that size."""
    family, _, count = size.partition("-")
    hub_id = f"deepseek-ai/DeepSeek-R1-Distill-{family.capitalize()}-{count.upper()}"
    return ModelEntry(f"r1-distill-{size}", hub_id, config, aliases=(f"deepseek-r1-distill-{size}",))


def _tiny() -> ModelEntry:
    # The whole embedded text is 313 kB, its context 2048: fewer and shorter windows than the paper's.
    override = {"windows": 72, "length": 1024, "holdout": 8}
    return ModelEntry("tiny", None, {}, overrides={"aqua-kv": override})


_L32_1B = llama3(2048, 16, 32, 64, 8192, factor=32.0, tied=True)
_L32_3B = llama3(3072, 28, 24, 128, 8192, factor=32.0, tied=True)
_L31_8B = llama3(4096, 32, 32, 128, 14336, factor=8.0, tied=False)
_L31_70B = llama3(8192, 80, 64, 128, 28672, factor=8.0, tied=False)
_L31_405B = llama3(16384, 126, 128, 128, 53248, factor=8.0, tied=False)

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
    ModelEntry("llama-3.1-405b", "meta-llama/Llama-3.1-405B", _L31_405B),
    ModelEntry("llama-3.1-405b-instruct", "meta-llama/Llama-3.1-405B-Instruct", _L31_405B),
    ModelEntry("llama-2-7b", "meta-llama/Llama-2-7b-hf", llama2(4096, 32, 32, 11008)),
    ModelEntry("llama-2-13b", "meta-llama/Llama-2-13b-hf", llama2(5120, 40, 40, 13824)),
    ModelEntry(
        "qwen2.5-0.5b",
        "Qwen/Qwen2.5-0.5B",
        qwen2(896, 24, 14, 2, 4864, vocab=151936, tied=True, context=32768),
    ),
    ModelEntry("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", qwen2(1536, 28, 12, 2, 8960, vocab=151936, tied=True)),
    ModelEntry(
        "qwen2.5-3b",
        "Qwen/Qwen2.5-3B",
        qwen2(2048, 36, 16, 2, 11008, vocab=151936, tied=True, context=32768),
    ),
    ModelEntry("qwen2.5-7b", "Qwen/Qwen2.5-7B", qwen2(3584, 28, 28, 4, 18944)),
    ModelEntry("qwen2.5-14b", "Qwen/Qwen2.5-14B", qwen2(5120, 48, 40, 8, 13824, eps=1e-5)),
    ModelEntry("qwen2.5-32b", "Qwen/Qwen2.5-32B", qwen2(5120, 64, 40, 8, 27648, eps=1e-5)),
    ModelEntry("qwen2.5-72b", "Qwen/Qwen2.5-72B", qwen2(8192, 80, 64, 8, 29568, eps=1e-5)),
    ModelEntry("qwen3-0.6b", "Qwen/Qwen3-0.6B", qwen3(1024, 28, 16, 3072, tied=True)),
    ModelEntry("qwen3-1.7b", "Qwen/Qwen3-1.7B", qwen3(2048, 28, 16, 6144, tied=True)),
    ModelEntry("qwen3-4b", "Qwen/Qwen3-4B", qwen3(2560, 36, 32, 9728, tied=True)),
    ModelEntry("qwen3-8b", "Qwen/Qwen3-8B", qwen3(4096, 36, 32, 12288, tied=False)),
    ModelEntry("qwen3-14b", "Qwen/Qwen3-14B", qwen3(5120, 40, 40, 17408, tied=False)),
    ModelEntry("qwen3-32b", "Qwen/Qwen3-32B", qwen3(5120, 64, 64, 25600, tied=False)),
    ModelEntry("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", mistral_v03()),
    ModelEntry("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", mistral_v03()),
    ModelEntry("phi-3-mini-4k", "microsoft/Phi-3-mini-4k-instruct", phi3_mini()),
    ModelEntry("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", smollm2_135m(bos=0, eos=0)),
    ModelEntry("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", smollm2_135m(bos=1, eos=2)),
    ModelEntry("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", smollm3()),
    ModelEntry("gemma-3-270m", "google/gemma-3-270m", gemma3_270m(eos=1)),
    ModelEntry("gemma-3-270m-it", "google/gemma-3-270m-it", gemma3_270m(eos=[1, 106])),
    ModelEntry("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", granite33(2048, 8192, 1 / 64, 8.0)),
    ModelEntry("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", granite33(4096, 12800, 1 / 128, 16.0)),
    ModelEntry("olmo-2-1b", "allenai/OLMo-2-0425-1B", olmo2(2048, 16, 16, 8192)),
    ModelEntry("olmo-2-7b", "allenai/OLMo-2-1124-7B", olmo2(4096, 32, 32, 11008)),
    _distill("llama-8b", _L31_8B),
    _distill("llama-70b", _L31_70B),
    # The two small Qwen distills start from Qwen2.5-Math: RoPE theta 10,000, and the embedding is not tied.
    _distill("qwen-1.5b", qwen2(1536, 28, 12, 2, 8960, vocab=151936, theta=10000.0)),
    _distill("qwen-7b", qwen2(3584, 28, 28, 4, 18944, theta=10000.0)),
    _distill("qwen-14b", qwen2(5120, 48, 40, 8, 13824, eps=1e-5)),
    _distill("qwen-32b", qwen2(5120, 64, 40, 8, 27648, eps=1e-5)),
)

CATALOGUE: dict[str, ModelEntry] = {entry.name: entry for entry in _ENTRIES}
ALIASES: dict[str, str] = {alias: entry.name for entry in _ENTRIES for alias in entry.aliases}
BY_HUB_ID: dict[str, ModelEntry] = {entry.hub_id: entry for entry in _ENTRIES if entry.hub_id}


class ModelRow(TypedDict):
    """A row of `kvcal models`. context, sliding_window: tokens; kv_bytes_per_token: at 16 bits, all layers."""

    name: str
    hub_id: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_width: int
    context: int
    sliding_window: int | None
    kv_bytes_per_token: int
    parameters: int


def models_table() -> list[ModelRow]:
    """The rows of `kvcal models`, in catalogue order."""
    return [_row(entry) for entry in CATALOGUE.values()]


def _row(entry: ModelEntry) -> ModelRow:
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
