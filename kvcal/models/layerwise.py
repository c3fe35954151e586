"""A model one layer at a time: a 70B model passes through a device that holds a few gigabytes.

The model is built on the meta device. `load_outer` puts in what stands around the layers (embedding, rotary,
final norm, head), `load_layer(i)` one decoder layer; both change `model` in place, and `free_*` give the
memory back. What is loaded is equal, bit for bit, to the same part of an ordinary load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from kvcal_artifacts.errors import ModelUnavailable, UsageError
from kvcal_artifacts.hf import decoder_of

from . import configuration, devices, files, hub, loading
from .revision import weights_revision
from .structure import empty_model, head_of, tied
from .weights import FileWeights, Weights, fill, release, tie

if TYPE_CHECKING:
    import torch

    from .names import ModelSource
    from .structure import CausalLM


NORMS = ("norm", "final_layernorm")  # what architectures call the last one


@dataclass(frozen=True)
class Outer:
    """What stands around the decoder layers."""

    embed_tokens: nn.Module
    norm: nn.Module
    rotary_emb: nn.Module
    lm_head: nn.Module


class LayerwiseWeights:
    """`model` is complete in structure; only the parts loaded at the moment hold numbers."""

    def __init__(
        self,
        source: ModelSource,
        model: CausalLM,
        weights: Weights,
        *,
        device: torch.device,
        revision: str,
        random_weights: bool,
    ) -> None:
        self.source = source
        self.model = model
        self.config = model.config
        self.device = device
        self.revision = revision
        self.random_weights = random_weights
        self._weights = weights
        self._dtype: torch.dtype = next(model.parameters()).dtype
        base = decoder_of(model)
        assert isinstance(base, nn.Module)
        self._base = base
        names = {module: name for name, module in model.named_modules()}
        self._prefix = f"{names[self._base]}."
        self._head = f"{names[head_of(model)]}."
        norms = [getattr(self._base, name) for name in NORMS if hasattr(self._base, name)]
        if not hasattr(self._base, "embed_tokens") or not norms:
            raise ModelUnavailable(
                f"{source.label}: {type(model).__name__} is not built of embed_tokens, layers, a final norm and "
                "rotary_emb; load the whole model"
            )
        self._norm: nn.Module = norms[0]

    def __len__(self) -> int:
        return len(self._base.layers)

    def load_layer(self, index: int) -> nn.Module:
        """Decoder layer `index` with its weights, on the device."""
        layer = self._layer(index)
        with loading.out_of_memory(self.source, self._dtype):
            fill(layer, f"{self._prefix}layers.{index}.", self._weights, self.device, self.model)
        return layer

    def free_layer(self, index: int) -> None:
        release(self._layer(index))

    def load_outer(self) -> Outer:
        """Embedding, final norm, rotary and head, on the device. A tied head is the embedding."""
        head = head_of(self.model)
        with loading.out_of_memory(self.source, self._dtype):
            for name, child in self._outer_children():
                fill(child, f"{self._prefix}{name}.", self._weights, self.device, self.model)
            if not tied(self.model):
                fill(head, self._head, self._weights, self.device, self.model)
        tie(self.model)
        return Outer(self._base.get_submodule("embed_tokens"), self._norm, self._base.rotary_emb, head)

    def free_outer(self) -> None:
        for _, child in self._outer_children():
            release(child)
        release(head_of(self.model))
        tie(self.model)

    def check_shapes(self) -> None:
        """Raises ModelUnavailable for the first tensor of a folder's files that has not the shape that config.json asks
        for. Reads headers, no weights; a hub model's files are not fetched for it, and quantised tensors have shapes of
        their own.
        """
        quantised = getattr(self.config, "quantization_config", None) is not None
        if self.source.kind == "folder" and isinstance(self._weights, FileWeights) and not quantised:
            self._weights.check()

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These parameters of the model by name, on the device, one at a time; nothing is kept."""
        for name in names:
            yield name, self._weights.get(name, self.model.get_parameter(name), self.device)

    def _layer(self, index: int) -> nn.Module:
        if not 0 <= index < len(self):
            raise UsageError(f"layer {index}: {self.source.label} has layers 0 to {len(self) - 1}")
        layer: nn.Module = self._base.layers[index]
        return layer

    def _outer_children(self) -> list[tuple[str, nn.Module]]:
        return [(name, child) for name, child in self._base.named_children() if name != "layers"]


def open_layerwise(
    source: ModelSource,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
) -> LayerwiseWeights:
    """Open a model for loading in parts. A hub model's shard is downloaded when a layer first needs it."""
    target, kind = devices.to_device(device), devices.to_dtype(dtype)
    config = configuration.geometry_config(source) if random_weights else configuration.load_config(source)
    model = empty_model(config, kind)
    local = files.weight_files(source) if source.kind != "hub" and not random_weights else None
    weights = loading.random_source(config, seed) if random_weights else _stored(source, model, local)
    revision = weights_revision(source, random_weights=random_weights, seed=seed, files=local)
    return LayerwiseWeights(source, model, weights, device=target, revision=revision, random_weights=random_weights)


def _stored(source: ModelSource, model: CausalLM, local: files.WeightFiles | None) -> Weights:
    """A model's weights. local: its files, but of a hub model, whose shards are fetched when a layer needs them."""
    index = files.weights_index(source) if local is None else local.index
    if source.kind == "embedded":
        from .embedded import EmbeddedWeights

        return EmbeddedWeights(index)
    return FileWeights(source.label, index, partial(_locate, source, index), model)


def _locate(source: ModelSource, index: Path, shard: str) -> Path:
    path = index.parent / shard
    if source.kind == "hub" and not path.is_file():
        assert source.hub_id is not None
        return hub.fetch(source.hub_id, shard, index.parent.name)
    return path
