"""A model's RoPE, as its rotary module computes it."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .decoder import decoder_of, layer_kind
from .protocols import Decoder, ModelConfig

_CHANNELS: weakref.WeakKeyDictionary[nn.Module, dict[str, int | None]] = weakref.WeakKeyDictionary()  # by rotary module


def rotary_channels(decoder: Decoder, index: int) -> int | None:
    """The last dimension of a layer's cos and sin; None where the rotary module gives something else.

    The model's module may be on the meta device and remembers lengths. So the dimension is taken from a new one, or
    from a copy where one cannot be made so.
    """
    rotary = decoder.rotary_emb
    kind, channels = layer_kind(decoder.config, index), _CHANNELS.setdefault(rotary, {})
    if kind not in channels:
        copies = (lambda: type(rotary)(config=decoder.config), lambda: copy.deepcopy(rotary))
        channels[kind] = next((width for make in copies if (width := _channels(make, kind)) is not None), None)
    return channels[kind]


def _channels(make: Callable[[], nn.Module], kind: str) -> int | None:
    try:
        with torch.device("cpu"):
            rotary = make()
            where = next(rotary.buffers(), torch.empty(0, dtype=torch.float32, device="cpu")).device
            first = torch.zeros(1, 1, dtype=torch.long, device=where)
            options = rotary_options(type(rotary), kind)
            cos, sin = rotary.forward(torch.zeros(1, device=where, dtype=torch.float32), position_ids=first, **options)
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError):
        return None
    return int(cos.shape[-1]) if isinstance(cos, Tensor) and cos.shape == sin.shape else None


def rotary_options(rotary: type[nn.Module], kind: str = "full_attention") -> dict[str, str]:
    """Arguments of a rotary module's forward after positions: models with two kinds of RoPE name the layers' kind."""
    return {"layer_type": kind} if "layer_type" in inspect.signature(rotary.forward).parameters else {}


def rope_parameters(config: ModelConfig) -> Mapping[str, object]:
    """The RoPE parameters of the full-attention layers."""
    parameters: Mapping[str, object] = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def rope_tables(model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cos and sin (B, T, rotary dim) that the model's rotary module computes now for int positions (B, T)."""
    like = torch.empty(0, dtype=dtype, device=positions.device)
    # forward(), as a call would tell the hooks about these positions
    rotary = decoder_of(model).rotary_emb
    cos, sin = rotary.forward(like, position_ids=positions, **rotary_options(type(rotary)))
    return cos, sin


def rope_moves(config: ModelConfig) -> bool:
    """Whether a token's cosines and sines may change as the sequence grows."""
    kind = str(rope_parameters(config).get("rope_type", "default"))
    return kind not in ("default", "linear", "llama3", "yarn")


def rotary_width(model: nn.Module) -> int:
    """How many channels of a head RoPE rotates: the last dimension of cos and sin.

    The rotary module must be in memory.
    """
    rotary = decoder_of(model).rotary_emb
    first = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
    return int(rope_tables(model, first, torch.float32)[0].shape[-1])


def caveats(config: ModelConfig) -> list[str]:
    """What Transformers does with this model that a cache cannot see, for describe() and a warning."""
    kind = str(rope_parameters(config).get("rope_type", ""))
    limit = getattr(config, "original_max_position_embeddings", None)
    if config.model_type == "phi3" and kind == "longrope" and limit:
        return [
            f"phi3 with LongRoPE: generate() drops any cache and starts an uncompressed one where a sequence passes "
            f"{limit} tokens; keep prompt and new tokens below or above that length"
        ]
    return []
