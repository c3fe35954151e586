"""Caches for tests: small windows, any codec, a fitted AQUA-KV, and a decoder that is fed its keys and values."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcal.calibrate.driver import fit
from kvcal.capture.scan import WholeModel
from kvcal.methods import mixkvq as tiers
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.data_free import Preset
from kvcal.methods.registry import codec_maker
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import PREDICTORS, Codec, MixKVQ, Predicted, Shape, Squat, Uniform
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_artifacts.storage import block_store
from tests.support.architectures import TINY, VARIANTS

ALL = TINY | VARIANTS
SINK, RECENT, BLOCK = 4, 16, 8
WINDOWS = Windows(SINK, RECENT, BLOCK)
HEADS, DIM, LAYERS = 2, 32, 3  # of Fed; hf.AttentionSite.rotate finds apply_rotary_pos_emb in this module


@cache
def tiny(name: str) -> Any:
    return ALL[name]()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_ids(*shape: int, seed: int = 0) -> Tensor:
    """No pad among them."""
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed))


def left_mask(lengths: Sequence[int]) -> Tensor:
    """(rows, longest) int64: 1 where a token is real."""
    longest = max(lengths)
    return torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])


def scheme(model: nn.Module, codec: str = "exact-32", frame: Any = "post_rope", windows: Windows = WINDOWS) -> Scheme:
    preset = Preset(codec, codec, frame, windows.sink, windows.recent, windows.block)
    return preset.scheme(model)


OPEN: list[KVCalCache] = []


def opened(scheme: Scheme, model: nn.Module, **options: Any) -> KVCalCache:
    """A cache that close_all closes: its hooks would slow down the model's other tests until it is collected."""
    OPEN.append(KVCalCache(scheme, model, **options))
    return OPEN[-1]


def close_all() -> None:
    while OPEN:
        OPEN.pop().close()


def make(model: nn.Module, codec: str = "exact-32", frame: Any = "post_rope", **options: Any) -> KVCalCache:
    return opened(scheme(model, codec, frame), model, **options)


@cache
def aqua(name: str, **settings: Any) -> Scheme:
    """AQUA-KV fitted on a tiny model."""
    method = AquaKV(sink=SINK, recent=RECENT, block=BLOCK, **settings)
    train, holdout = token_ids(6, 68, seed=1), token_ids(2, 68, seed=2)
    text: Any = SimpleNamespace(
        train=train,
        holdout=holdout,
        source="random",
        sha256="0" * 64,
        ids_sha256="0" * 64,
        tokens_read=0,
        bos=False,
        column=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "x.kvcal.safetensors"
        result: Any = fit(
            method,
            WholeModel(tiny(name)),
            text,
            output,
            model_record={},
            revision=None,
            device=torch.device("cpu"),
        )
    return result.bundle.scheme


# A decoder that is fed.


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head_dim = dim
        self.q_proj, self.k_proj = nn.Identity(), nn.Identity()

    def forward(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: Any, **_: Any
    ) -> None:
        """As a cache is fed by a model's own attention: what sites are found by."""
        self.q_proj(hidden)
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        past_key_values.update(apply_rotary_pos_emb(key, key, *position_embeddings)[1], key, 0)


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn = Attention(dim)


class Fed(nn.Module):
    """Hands given keys and values to the cache: what a layer gets depends on neither batch shape nor layers below."""

    def __init__(self, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM) -> None:
        super().__init__()
        self.config = LlamaConfig(
            hidden_size=heads * dim, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads
        )
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.rotary_emb = LlamaRotaryEmbedding(self.config)

    def forward(
        self,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """keys (before RoPE), values: (layers, B, H, T, D) -> what each layer's attention would see.

        Queries, which some codecs ask for, are made of the keys: two heads for each kv head.
        """
        seen = []
        cos, sin = self.rotary_emb(keys, position_ids=position_ids)
        for index, layer in enumerate(self.layers):
            query = torch.stack([keys[index].flip(-1), 3 * keys[index].roll(5, -1)], 2).flatten(1, 2)
            layer.self_attn.q_proj(query.transpose(1, 2).flatten(2))
            flat = layer.self_attn.k_proj(keys[index].transpose(1, 2).flatten(2))
            key = flat.unflatten(-1, (-1, keys.shape[-1])).transpose(1, 2)
            key = apply_rotary_pos_emb(key, key, cos, sin)[1]
            seen.append(past_key_values.update(key, values[index], index))
        return seen


FED_SHAPE = Shape(HEADS, DIM, BLOCK)


def chained(
    predictor: str = "linear",
    frame: Any = "post_rope",
    codec: str = "higgs-2-wide",
    shape: Shape = FED_SHAPE,
) -> Scheme:
    """AQUA-KV for Fed with random predictors: keys from the keys below, values from values below and these keys."""
    windows = Windows(SINK, RECENT, shape.block)
    layers = [LayerCodecs(codec_maker("higgs-4-wide")(shape, "key"), codec_maker("higgs-4-wide")(shape, "value"))]
    for index in range(1, LAYERS):
        inner = codec_maker(codec)
        key = _predicted(inner(shape, "key"), predictor, ("k1",), seed=2 * index)
        layers.append(LayerCodecs(key, _predicted(inner(shape, "value"), predictor, ("v1", "k0"), seed=2 * index + 1)))
    return Scheme(windows, frame, tuple(layers))


def _predicted(inner: Codec, predictor: str, inputs: tuple[str, ...], seed: int) -> Codec:
    width = inner.shape.heads * inner.shape.dim
    wide = len(inputs) * width
    sizes = {
        "linear": {"weight": (wide, width), "bias": (width,)},
        "mlp": {
            "norm_weight": (wide,),
            "norm_bias": (wide,),
            "in_weight": (wide, 2 * width),
            "in_bias": (2 * width,),
            "out_weight": (2 * width, width),
            "out_bias": (width,),
        },
    }[predictor]
    weights = {
        name: (numbers(*size, seed=100 * seed + i) / wide**0.5).half() for i, (name, size) in enumerate(sizes.items())
    }
    return Predicted(inner, PREDICTORS[predictor](weights), inputs)


def mixkvq(frame: Any = "post_rope", importance: Any = "query") -> Scheme:
    """Keys in tiers of ragged size, values in 2 bits."""
    key = MixKVQ(FED_SHAPE, "key", 0.9, 1.4, group=4, importance=importance)
    pair = LayerCodecs(key, Uniform(FED_SHAPE, "value", 2, 32))
    return Scheme(WINDOWS, frame, (pair,) * LAYERS)


def squat(frame: Any = "post_rope") -> Scheme:
    """SQuat for Fed, so strong and in so many bits that the last bit of a query or of a product would show."""
    inner, value = (Uniform(FED_SHAPE, role, 8, BLOCK, axis) for role, axis in (("key", "token"), ("value", "channel")))  # type: ignore[arg-type]
    key = Squat(inner, strength=0.1, channels=8, subspace="both", calibrated=numbers(HEADS, 2, DIM))
    return Scheme(WINDOWS, frame, (LayerCodecs(key, value),) * LAYERS)


def mixkvq_of(model: nn.Module, frame: Any) -> Scheme:
    """The same for a real model."""
    made = tiers.MixKVQ(0.9, 1.4, group=4, value_group=8, sink=SINK, recent=RECENT, block=BLOCK).scheme(model)
    return Scheme(made.windows, frame, made.layers, made.skipped)


class Rows:
    """Real tokens of each row of a batch, and how they are fed to a cache on Fed."""

    def __init__(self, lengths: Sequence[int], seed: int = 0, heads: int = HEADS, dim: int = DIM) -> None:
        self.lengths = list(lengths)
        shape = (LAYERS, heads, max(self.lengths), dim)
        self.keys = [numbers(*shape, seed=seed + 2 * row) for row in range(len(lengths))]
        self.values = [numbers(*shape, seed=seed + 2 * row + 1) for row in range(len(lengths))]

    def columns(self, valid: Tensor, pad: float = 7.0) -> tuple[Tensor, Tensor]:
        """valid (B, columns) bool, at most lengths[row] true -> keys, values (layers, B, H, columns, D); pads hold
        `pad`.
        """
        layers, heads, _, dim = self.keys[0].shape
        shape = (layers, len(valid), heads, valid.shape[1], dim)
        keys, values = torch.full(shape, pad), torch.full(shape, pad)
        for row, real in enumerate(valid):
            count = int(real.sum())
            keys[:, row, :, real] = self.keys[row][:, :, :count]
            values[:, row, :, real] = self.values[row][:, :, :count]
        return keys, values

    def one(self, row: int) -> Rows:
        """That row alone."""
        alone = Rows([1])
        alone.lengths, alone.keys, alone.values = [self.lengths[row]], [self.keys[row]], [self.values[row]]
        return alone


def feed(
    cache: KVCalCache, rows: Rows, valid: Tensor | None = None, cuts: Iterable[int] = (), pad: float = 7.0
) -> list[tuple[Tensor, Tensor]]:
    """Feed what the cache does not hold yet of `valid` (default: left-padded rows), cut before these columns.

    Returns what the last piece's attention sees in each layer.
    """
    if valid is None:
        valid = left_mask(rows.lengths).bool()
    keys, values = rows.columns(valid, pad)
    positions = (valid.long().cumsum(1) - 1).clamp_min(0)
    seen: list[tuple[Tensor, Tensor]] = []
    for start, stop in pieces(cache.ledger.columns, valid.shape[1], cuts):
        seen = cache.model(
            keys[:, :, :, start:stop],
            values[:, :, :, start:stop],
            attention_mask=valid[:, :stop].long(),
            past_key_values=cache,
            position_ids=positions[:, start:stop],
        )
    return seen


def pieces(start: int, stop: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    edges = sorted({start, stop, *(c for c in cuts if start < c < stop)})
    yield from pairwise(edges)


# What a cache holds.


def packed_row(cache: KVCalCache, row: int) -> list[Tensor]:
    """The packed tensors of one row in all layers, only its own blocks."""
    blocks = int(cache.ledger.blocks[row])
    held = [t for layer in cache.compressed_layers for packed in layer.packed for t in packed.values()]
    return [part[row, :, :blocks] for t in held for part in _dense(t)]


def _dense(stored: block_store.Stored) -> list[Tensor]:
    """Pools as a tensor with room for every channel in each block, and their counts."""
    if isinstance(stored, Tensor):
        return [stored]
    wide = torch.zeros(*stored.shape, DIM, *stored.data.shape[1:], dtype=stored.data.dtype)
    wide[torch.arange(DIM) < stored.counts[..., None]] = stored.data
    return [wide, stored.counts]


def window_row(cache: KVCalCache, row: int) -> list[Tensor]:
    """Sink and recent window of one row in all layers, only its own tokens."""
    sink, window = int(cache.ledger.sink[row]), int(cache.ledger.window[row])
    parts = [part for layer in cache.compressed_layers for part in ((layer.sink, sink), (layer.window, window))]
    return [t[row, :, :count] for tensors, count in parts for t in tensors]


def tensors_of(cache: KVCalCache) -> list[Tensor]:
    """Every tensor of a cache's storage and bookkeeping."""
    own = [t for layer in cache.compressed_layers for part in ("packed", "window") for t in layer.stored(part)]
    plain = [layer for layer in cache.layers if layer not in cache.compressed_layers]
    own += [t for layer in plain for t in (layer.keys, layer.values) if t is not None]
    return own + ledger_tensors(cache)


def ledger_tensors(cache: KVCalCache) -> list[Tensor]:
    ledger = cache.ledger
    own = [ledger.valid, ledger.sink, ledger.blocks, ledger.window]
    own += [t for layer in cache.compressed_layers for t in layer.bookkeeping()]
    return own if ledger.positions is None else [*own, ledger.positions]


def snapshot(cache: KVCalCache) -> list[Any]:
    """Everything that decides what a cache does next, by value."""
    counts = [cache.ledger.columns, cache.ledger.batch, cache.record.returned_tokens]
    return [*counts, *(layer.get_seq_length() for layer in cache.layers), *(t.clone() for t in tensors_of(cache))]


def same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
