"""Scales of 8-bit caches that other servers have: the largest key and value of calibration text in each layer.

A server stores round(x / k_scale) in 8 bits, keys after RoPE. The convention is that of compressed-tensors, which vLLM
and others load: parameters `k_scale` and `v_scale` of each attention module, `kv_cache_scheme` in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcal_artifacts import hf
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import UsageError

from ..capture.scan import Capture, WholeModel
from ..report.progress import tracked

LARGEST = {"fp8": 448.0, "int8": 127.0}  # e4m3; symmetric integers


@dataclass(frozen=True)
class ScaleSettings:
    """to: fp8 (e4m3) or int8. per_head: a scale for each kv head instead of one for the layer."""

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


@torch.no_grad()
def kv_scales(model: nn.Module, ids: Tensor, settings: ScaleSettings, batch: int | None = None) -> dict[str, Tensor]:
    """`k_scale` and `v_scale` of every attention module by its name, over token windows ids (N, T) int64.

    Raises UsageError for a model with layers that keep a cache of their own: no scale is measured for these.
    """
    if skipped := hf.unsupported_layers(hf.config_of(model)):
        first = min(skipped)
        raise UsageError(
            f"export: layer {first} has no scale: {skipped[first]}; give a model whose layers all have one"
        )
    names = {module: name for name, module in model.named_modules()}
    device, scales = next(model.parameters()).device, dict[str, Tensor]()
    with Capture(WholeModel(model), ids, device=device, batch=batch) as capture:
        for taps in tracked(capture, "Measuring scales, layers", len(capture)):
            largest: dict[str, Tensor] = {}
            for part in taps.batches(frozenset({"k", "v"}), "post_rope", advance=True):
                for role, states in (("k", part.k), ("v", part.v)):
                    assert states is not None
                    now = states.float().abs().amax((0, 2, 3))
                    largest[role] = torch.maximum(largest.get(role, now), now)
            name = names[taps.site.module]
            scales |= {f"{name}.{role}_scale": settings.scale(size) for role, size in largest.items()}
    return scales


def span(scales: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Least and largest scale of keys and of values."""
    parts = {role: [s for name, s in scales.items() if name.endswith(f"{role}_scale")] for role in ("k", "v")}
    return {
        role: (min(float(s.min()) for s in some), max(float(s.max()) for s in some)) for role, some in parts.items()
    }
