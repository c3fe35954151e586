"""Where a layer's keys and queries appear before RoPE, and how the layer rotates them.

A cache gets keys after RoPE, without cosines, sines or positions. Keys before it are the output of `k_norm`, `k_proj`
or the middle of `qkv_proj`. Which one, and how RoPE is applied to it, `trial` finds out on the attention module itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvcal_kernels.dequantise import Rotation

from ..errors import UnsupportedModel
from . import trial
from .decoder import SUPPORTED, decoder_of, find_decoder, layer_shape, model_type_of, unsupported_layers, why_no_decoder
from .head_shards import HeadShard, head_shard, whole_weight
from .protocols import Decoder, ModelConfig, attribute, is_decoder
from .rope import rotary_channels

TRIED = "kvcal-trial"  # the attention function of modules on trial


@dataclass(frozen=True)
class AttentionSite:
    """One attention layer of a model: where its keys appear before RoPE, and their shape.

    rotation: how RoPE is applied, a name of trial.ROTATIONS. keys_first, queries_first: whether a source's output is
    (B, H, T, D). odd: why keys or queries before RoPE cannot be had; None where they can. kv_heads: of all `processes`
    that the layer is spread over. shard: which of them are here, None where all are; what modules give is of these.
    """

    index: int
    module: nn.Module
    key_source: nn.Module
    key_slice: slice | None  # part of key_source's last dimension that holds the keys (fused qkv)
    query_source: nn.Module
    query_slice: slice | None
    kv_heads: int
    head_dim: int
    rope: bool
    rotation: str = "whole"
    keys_first: bool = False
    queries_first: bool = False
    odd: str | None = None
    shard: HeadShard | None = None
    processes: int = 1

    @property
    def config(self) -> ModelConfig:
        """The config of the attention module."""
        config: ModelConfig = attribute(self.module, "config")
        return config

    @property
    def ratio(self) -> int:
        """Query heads per kv head."""
        return int(self.config.num_attention_heads) // (self.kv_heads * self.processes)

    def gather(self, x: Tensor) -> Tensor:
        """The heads of all processes, (B, H, ...), from those that are here; every process must ask."""
        return x if self.shard is None else self.shard.gather(x)

    def local(self, x: Tensor) -> Tensor:
        """The heads that are here of x (B, H, ...) of all."""
        return x if self.shard is None else self.shard.local(x)

    def of_local_heads(self) -> AttentionSite:
        """The same site as if the heads that are here were all."""
        if self.shard is None:
            return self
        count = self.shard.count
        return replace(self, kv_heads=self.kv_heads // count, shard=None, processes=count)

    @property
    def placed(self) -> tuple[torch.device, torch.dtype]:
        """The device and dtype of the layer's weights, which its keys will have if nothing changes before they come."""
        every, plain = list(self.module.parameters()), (torch.float16, torch.bfloat16, torch.float32)
        if plain_ones := [p for p in every if p.dtype in plain]:
            return plain_ones[0].device, plain_ones[0].dtype
        named = getattr(getattr(self.module, "config", None), "dtype", None)  # of quantised weights
        return every[0].device if every else torch.device("cpu"), named if named in plain else torch.float32

    def keys_from(self, output: Tensor) -> Tensor:
        """Keys (B, H, T, D) before RoPE from the source's output (B, T, C), (B, T, H, D) or (B, H, T, D)."""
        if self.keys_first:
            return output
        if self.key_slice is not None:
            output = output[..., self.key_slice]
        return output.reshape(*output.shape[:2], -1, self.head_dim).transpose(1, 2)

    def queries_from(self, output: Tensor) -> Tensor:
        """Queries (B, heads, T, D) before RoPE from the source's output."""
        if self.queries_first:
            return output
        if self.query_slice is not None:
            output = output[..., self.query_slice]
        return output.reshape(*output.shape[:2], -1, self.head_dim).transpose(1, 2)

    def rotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The keys after RoPE exactly as this model applies it (partial rotary, cos/sin dtype); unchanged without RoPE.

        keys (B, H, T, D) in the model's dtype; cos, sin (B or 1, T, rotary dim) as the model's rotary module gives.
        """
        return trial.rotate(self.module, self.rotation, keys, cos, sin) if self.rope else keys


def unsupported(model: nn.Module) -> str | None:
    """Why a model cannot be compressed, in one clause; None where it can.

    Its weights are not read: it may be on the meta device. A model that passes has a site for each layer, and RoPE is
    known for those that can be compressed.
    """
    decoder = find_decoder(model)
    if (why := why_no_decoder(model, decoder)) is not None:
        return why
    assert is_decoder(decoder)
    config, skipped = decoder.config, unsupported_layers(decoder.config)
    shape = layer_shape(config, 1)
    for index in range(config.num_hidden_layers):
        if index in skipped:
            continue
        layer = decoder.layers[index]
        if not isinstance(getattr(layer, "self_attn", None), nn.Module):
            return f"layer {index} ({type(layer).__name__}) has no self_attn; {SUPPORTED}"
        if extra := _further_inputs(layer):
            return (
                f"layer {index} ({type(layer).__name__}) takes {' and '.join(extra)} besides hidden states; kvcal "
                "calibrates layers that get hidden states, a mask and positions alone"
            )
        trial = _trial(decoder, index)
        if isinstance(trial, str):
            return f"layer {index}: {trial}; {SUPPORTED}"
        if (trial.kv_heads, trial.head_dim) != (shape.heads, shape.dim):
            return (
                f"layer {index} has keys of {trial.kv_heads} heads of {trial.head_dim}, its config says {shape.heads} "
                f"of {shape.dim}; kvcal needs layers of one shape"
            )
        if trial.value_dim != trial.head_dim:
            return (
                f"layer {index} has keys of {trial.head_dim} channels a head and values of {trial.value_dim}; kvcal "
                "needs one number for both"
            )
    return None


LAYER_INPUTS = (  # of a decoder layer that can be run by itself, on the output of the layer below
    "self",
    "hidden_states",
    "attention_mask",
    "position_embeddings",
    "position_ids",
    "cache_position",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_router_logits",
)


def _further_inputs(layer: nn.Module) -> list[str]:
    """What a layer's forward may be given that LAYER_INPUTS does not name: a tensor of its own, or of other layers."""
    parameters = inspect.signature(type(layer).forward).parameters.values()
    named = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [name for name in named if name not in LAYER_INPUTS]


def check_supported(model: nn.Module) -> None:
    """Raises UnsupportedModel, with the one reason that all commands give, for a model that cannot be compressed."""
    if (why := unsupported(model)) is not None:
        raise UnsupportedModel(f"{model_type_of(model)}: {why}")


def check_frame(sites: Iterable[AttentionSite], frame: str) -> None:
    """Raises UnsupportedModel where keys are to be stored before RoPE, and a layer's cannot be had there."""
    for site in sites:
        if frame == "pre_rope" and site.odd is not None:
            raise UnsupportedModel(
                f"{site.config.model_type}: layer {site.index}: {site.odd}, so that keys cannot be stored before "
                "RoPE; store them after it (`preset` and `probe` with --frame post_rope)"
            )


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """A site for each layer that can be compressed; layers that Transformers caches are skipped, untried.

    Raises UnsupportedModel, naming the layer, for one that is not understood.
    """
    decoder = decoder_of(model)
    skipped = unsupported_layers(decoder.config)
    return [attention_site(decoder, index) for index in range(decoder.config.num_hidden_layers) if index not in skipped]


def head_processes(model: nn.Module) -> int:
    """Count the processes among which tp_plan divides a model's heads."""
    shards = [site.shard for site in attention_sites(model)[:1]]
    return 1 if not shards or shards[0] is None else shards[0].count


def attention_site(decoder: Decoder, index: int) -> AttentionSite:
    """The site of one layer. Raises UnsupportedModel for one that is not understood."""
    config, layer = decoder.config, decoder.layers[index]
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise UnsupportedModel(
            f"{config.model_type}: layer {index} ({type(layer).__name__}) has no self_attn; {SUPPORTED}"
        )
    trial = _trial(decoder, index)
    if isinstance(trial, str):
        raise UnsupportedModel(f"{config.model_type}: layer {index}: {trial}; {SUPPORTED}")
    key, query = trial.key, trial.query
    return AttentionSite(
        index,
        attention,
        key_source=getattr(attention, key.name),
        key_slice=key.part,
        query_source=getattr(attention, query.name),
        query_slice=query.part,
        kv_heads=trial.kv_heads,
        head_dim=trial.head_dim,
        rope=trial.how is not None,
        rotation=trial.how or "whole",
        keys_first=key.heads_first,
        queries_first=query.heads_first,
        odd=trial.odd,
        shard=head_shard(decoder, attention, trial.kv_heads),
    )


def _trial(decoder: Decoder, index: int) -> trial.Trial | str:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # not at the top: bundles are read without

    ALL_ATTENTION_FUNCTIONS.register(TRIED, trial.attention)
    attention: nn.Module = attribute(decoder.layers[index], "self_attn")
    return trial.trial_of(attention, decoder.config, rotary_channels(decoder, index), TRIED)


def rope_partners(site: AttentionSite, width: int) -> Tensor:
    """The channel with which RoPE rotates each channel of a head, int64 (D,); itself where it is not rotated.

    width: the result of rotary_width. Unit vectors are rotated a quarter, which shows any pairing that an architecture
    has.
    """
    units = torch.eye(site.head_dim, dtype=torch.float32, device="cpu")[None, None]
    quarter = (
        torch.zeros(1, site.head_dim, width, dtype=torch.float32, device="cpu"),
        torch.ones(1, site.head_dim, width, dtype=torch.float32, device="cpu"),
    )
    return site.rotate(units, *quarter)[0, 0].abs().argmax(-1)


def output_projection(site: AttentionSite) -> Tensor | None:
    """The matrix that the layer multiplies its heads' outputs by, (hidden size, heads * D); None where it has none."""
    for name in ("o_proj", "dense", "out_proj"):
        projection = getattr(site.module, name, None)
        weight = None if projection is None else whole_weight(projection)
        if weight is not None and weight.ndim == 2 and weight.shape[1] % (site.kv_heads * site.head_dim) == 0:
            return weight
    return None


def key_probe(site: AttentionSite) -> tuple[float, ...]:
    """Eight of a layer's key weights, to tell models of one shape apart; empty where they are not plain numbers.

    Where weights are spread over processes, every one must ask.
    """
    weight = whole_weight(getattr(site.module, "k_proj", None) or site.key_source)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        return ()
    row = weight[-1 if site.key_slice is None else site.key_slice.start, :8]
    return tuple(float(f"{v:.6g}") for v in row.float().tolist())


def layer_probe(decoder: Decoder, index: int) -> tuple[float, ...]:
    """The key_probe of one layer by its number; empty for one that Transformers caches and that is not understood."""
    try:
        return key_probe(attention_site(decoder, index))
    except UnsupportedModel:
        if index in unsupported_layers(decoder.config):
            return ()
        raise


def by_halves(site: AttentionSite, width: int) -> bool:
    """Whether RoPE rotates channels i and i + width / 2 together, as Rotation does, by rotated unit vectors."""
    units = torch.eye(site.head_dim, dtype=torch.float32, device="cpu")[None, None]
    quarter = (
        torch.zeros(1, site.head_dim, width, dtype=torch.float32, device="cpu"),
        torch.ones(1, site.head_dim, width, dtype=torch.float32, device="cpu"),
    )
    return width % 2 == 0 and torch.equal(site.rotate(units, *quarter), Rotation(*quarter)(units))
