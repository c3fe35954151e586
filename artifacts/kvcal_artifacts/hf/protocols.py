"""What kvcal reads of Transformers' objects: configs and decoders, whose classes differ by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard

from torch import Tensor, nn

Mask: TypeAlias = Tensor | Mapping[str, Tensor | None] | None  # as a decoder gets it; by the kind of layer, or None


class ModelConfig(Protocol):
    """The config of a decoder. What only some architectures have is read by getattr."""

    @property
    def model_type(self) -> str: ...  # a class variable of some, which a protocol's own variable would not allow

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    _attn_implementation: str | None


class Configured(Protocol):
    """An attention module, as its attention function gets it."""

    config: ModelConfig


class Decoder(Protocol):
    """The module whose forward takes attention_mask and past_key_values."""

    config: ModelConfig
    layers: nn.ModuleList
    rotary_emb: nn.Module


def is_decoder(module: nn.Module) -> TypeGuard[Decoder]:
    """Whether a module has a decoder's parts."""
    return all(hasattr(module, name) for name in ("config", "layers", "rotary_emb"))


def attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module: nn.Module types all of them as tensors or modules."""
    return getattr(module, name)
