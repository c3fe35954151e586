"""Scales of 8-bit caches that other servers have: the largest key and value of calibration text in each layer.

A server stores round(x / k_scale) in 8 bits, keys after RoPE. The convention is that of compressed-tensors, which vLLM
and others load: parameters `k_scale` and `v_scale` of each attention module, `kv_cache_scheme` in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from kvcal_artifacts import hf
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import UsageError

from ..capture.checks import check_finite
from ..capture.scan import default_batch
from ..report.progress import progress

if TYPE_CHECKING:
    from ..models.structure import CausalLM

LARGEST = {"fp8": 448.0, "int8": 127.0}  # e4m3; symmetric integers


@dataclass(frozen=True)
class ScaleSettings:
    """How scales of an 8-bit cache are measured. to: fp8 (e4m3) or int8. per_head: a scale for each kv head instead of
    one for the layer.
    """

    to: str = "fp8"
    per_head: bool = False

    def __post_init__(self) -> None:
        if self.to not in LARGEST:
            raise UsageError(f"--to {self.to}: allowed are {', '.join(LARGEST)}")

    @property
    def strategy(self) -> str:
        """What a scale is of, in compressed-tensors' words."""
        return "attn_head" if self.per_head else "tensor"

    @property
    def config(self) -> dict[str, Json]:
        """`quantization_config` of config.json."""
        scheme: dict[str, Json] = {
            "num_bits": 8,
            "type": "float" if self.to == "fp8" else "int",
            "symmetric": True,
            "strategy": self.strategy,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": scheme,
        }

    def scale(self, largest: Tensor) -> Tensor:
        """largest (H,) of each kv head -> float32 (1,), or (H, 1, 1) by head; zeros alone have a scale of 1."""
        chosen = largest[:, None, None] if self.per_head else largest.max()[None]
        return torch.where(chosen > 0, chosen / LARGEST[self.to], torch.ones_like(chosen)).float().cpu()


class _Largest(DynamicCache):
    """The model's cache, which also records the largest magnitude of each kv head that passes through it.

    largest: (H,) float32 by layer and role, "k" (after RoPE) or "v"; shared by the caches of several batches.
    """

    def __init__(self, config: PreTrainedConfig, largest: dict[tuple[int, str], Tensor], rows: slice) -> None:
        super().__init__(config=config)
        self._largest, self._rows = largest, rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for role, word, states in (("k", "key", key_states), ("v", "value", value_states)):
            check_finite(states, f"layer {layer_idx}, {word} head", self._rows)
            now, place = states.float().abs().amax((0, 2, 3)), (layer_idx, role)
            self._largest[place] = torch.maximum(self._largest.get(place, now), now)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def check_exportable(config: PreTrainedConfig) -> None:
    """Raises UsageError for a model with a layer that caches no keys and values of its own: it has no scale.

    config: of a model or of its text part. Layers of sliding windows have scales like the others.
    """
    text = hf.text_config(config)
    shared = text.num_hidden_layers - int(getattr(text, "num_kv_shared_layers", 0) or 0)
    for layer, reason in hf.unsupported_layers(text).items():
        if layer >= shared or hf.layer_kind(text, layer) not in ("full_attention", "sliding_attention"):
            raise UsageError(f"export: layer {layer} has no scale: {reason}; give a model whose layers all have one")


@torch.no_grad()
def kv_scales(model: CausalLM, ids: Tensor, settings: ScaleSettings, batch: int | None = None) -> dict[str, Tensor]:
    """`k_scale` and `v_scale` of every attention module by its name, over token windows ids (N, T) int64.

    Raises UsageError as `check_exportable`, NonFiniteError for keys or values with a NaN or infinity.
    """
    check_exportable(model.config)
    device, decoder = hf.input_device(model), hf.decoder_of(model)
    sites = [hf.attention_site(decoder, layer) for layer in range(len(decoder.layers))]
    size, largest = batch or default_batch(ids.shape[1], device), dict[tuple[int, str], Tensor]()
    with progress("Measuring scales", total=ids.numel()) as advance:
        for start in range(0, len(ids), size):
            part = ids[start : start + size].to(device)
            cache = _Largest(model.config, largest, slice(start, start + len(part)))
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            advance(part.numel())
    names = {module: name for name, module in model.named_modules()}
    return {f"{names[sites[at].module]}.{role}_scale": settings.scale(most) for (at, role), most in largest.items()}


def span(scales: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Least and largest scale of keys and of values."""
    parts = {role: [s for name, s in scales.items() if name.endswith(f"{role}_scale")] for role in ("k", "v")}
    return {
        role: (min(float(s.min()) for s in some), max(float(s.max()) for s in some)) for role, some in parts.items()
    }
