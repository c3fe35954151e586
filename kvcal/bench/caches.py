"""Caches that whole models are measured with: FP16 in the ways Transformers and torch offer, QuantizedCache, and each
scheme.

They start with `length` random tokens a row, written where they stay, so that filling takes no memory that decoding
does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.cache.protocols import CacheOptions
from kvcal_artifacts.checked import Json
from kvcal_artifacts.scheme import Windows

from ..models.geometry import Geometry
from .filled import fill_cache, scheme_of, tokens
from .rows import Settings
from .schemes import Benched

if TYPE_CHECKING:
    from ..models.structure import CausalLM

FLUSH_AT = 1  # the step, from 0, in which a filled cache packs its next block: early, so that few steps cover it
GROWS = "its storage grows on the host"
UNFILLED = "which tokens are kept follows attention to them: no cache is filled with random ones"


def _nothing() -> None:
    return None


def _no_tensors() -> list[Tensor]:
    return []


@dataclass
class Start:
    """A cache that holds `length` tokens a row, ready for `steps` more.

    again: brings it back there, in the same storage if `no_graph` is None; goes_back: whether it does, or no step
    changes the length. flush: the step, from 0, in which blocks are packed, None if none is; period: steps from one to
    the next. witness: what two runs of the same steps must agree on besides logits. no_graph: why a CUDA graph cannot
    hold its step. bytes: of the cache, that a step must read; None where they are not counted.
    """

    cache: Cache
    length: int
    again: Callable[[], None] = _nothing
    goes_back: bool = False
    flush: int | None = None
    period: int = 1
    witness: Callable[[], list[Tensor]] = _no_tensors
    no_graph: str | None = GROWS
    bytes: int | None = None

    def close(self) -> None:
        if isinstance(self.cache, KVCalCache):
            self.cache.close()


Maker = Callable[[int, int, int], Start]  # (batch, length, steps)


# A step sees all tokens. Transformers makes a mask all the same while a graph is recorded: with one it repeats the keys
# and values of each kv head for its query heads, and the flash backend refuses.
UNMASKED = "kvcal_bench_sdpa_without_mask"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class Kind:
    """One kind of cache under one attention. maker is None where `why_not` says that it cannot be had here. plain:
    FP16. backend: of scaled_dot_product_attention, None for torch's choice. implementation: of Transformers, None for
    the model's own. bytes_like: a kind whose rows take the same memory. most_tokens: of all rows together, None if
    memory alone limits them; beyond: why no more. settings: as rows have them.
    """

    name: str
    maker: Maker | None
    stored_bits: float | None
    path: str
    why_not: str | None = None
    plain: bool = False
    backend: SDPBackend | None = None
    implementation: str | None = None
    bytes_like: str | None = None
    most_tokens: int | None = None
    beyond: str = ""
    more: Mapping[str, Json] = field(default_factory=dict, compare=False)
    settings: Settings = field(default_factory=Settings, compare=False)

    def most_rows(self, length: int) -> int | None:
        return None if self.most_tokens is None else self.most_tokens // length

    def refusal(self, batch: int, length: int) -> str | None:
        """Why so many rows of so many tokens cannot run, whatever the memory."""
        if self.most_tokens is None or batch * length <= self.most_tokens:
            return None
        return f"{batch} rows of {length} tokens, at most {self.most_tokens} tokens in all: {self.beyond}"


@contextmanager
def attention(model: PreTrainedModel, kind: Kind) -> Iterator[None]:
    """The model with this kind's attention."""
    implementation = model.config._attn_implementation
    with ExitStack() as stack:
        if kind.backend is not None:
            stack.enter_context(sdpa_kernel(kind.backend))
        if kind.implementation is not None:
            model.set_attn_implementation(kind.implementation)
            stack.callback(model.set_attn_implementation, implementation)
        yield


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # as configs call how many there are


def weight_bytes(model: CausalLM) -> int | None:
    """Bytes of the parameters that a decode step must read. The table of input embeddings does not count, as a step
    reads a row per token, unless the output has the same table. None with experts: which ones are read depends on the
    tokens.
    """
    config = hf.config_of(model)
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    sizes = {p.data_ptr(): p.nbytes for p in model.parameters()}
    table, out = model.get_input_embeddings().weight, model.get_output_embeddings()
    assert isinstance(table, Tensor)
    head = None if out is None else out.weight
    tied = isinstance(head, Tensor) and head.data_ptr() == table.data_ptr()
    return int(sum(sizes.values()) - (0 if tied else table.nbytes))


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of it
        return False


def kinds(
    model: PreTrainedModel,
    geometry: Geometry,
    schemes: Sequence[Benched],
    require_kernels: bool = False,
    kernels: str = "auto",
) -> list[Kind]:
    """FP16 in its ways, Transformers' QuantizedCache where optimum-quanto is installed, and each scheme.

    require_kernels, kernels: of KVCalCache.
    """
    all_kinds = [*plain_kinds(model, geometry), *quanto_kinds(model, geometry)]
    all_kinds += [scheme_kind(model, geometry, one, require_kernels, kernels) for one in schemes]
    dtype = str(model.dtype).removeprefix("torch.")

    def with_dtype(settings: Settings) -> Settings:
        return {"dtype": dtype, **settings}

    return [replace(kind, settings=with_dtype(kind.settings)) for kind in all_kinds]


def plain_kinds(model: PreTrainedModel, geometry: Geometry) -> list[Kind]:
    """FP16: `full cache` is the fastest that a step can be, its attention without a mask and without a copy."""
    name = "fp32" if model.dtype == torch.float32 else "fp16"
    backends: list[tuple[str, SDPBackend | None]] = [("full cache, sdpa", None)]
    if model.device.type == "cuda":
        flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
        backends = [("full cache, sdpa flash", flash), ("full cache, sdpa cuDNN", cudnn)]
    odd = next(iter(hf.unsupported_layers(hf.config_of(model)).items()), None)
    why_not = None if odd is None else f"layer {odd[0]}: {odd[1]}"
    full, static = (None if odd else partial(make, model, geometry) for make in (_full, _static))
    first, dynamic = backends[0][0], partial(_dynamic, model, geometry)
    kinds = [
        Kind(name, full, None, path, why_not, True, implementation, UNMASKED, None if path == first else first)
        for path, implementation in backends
    ]
    kinds.append(Kind(name, static, None, "StaticCache", why_not, plain=True, bytes_like=first))
    kinds.append(Kind(name, dynamic, None, "DynamicCache", plain=True))
    if installed("flash_attn"):
        path = "DynamicCache, flash_attention_2"
        kinds.append(Kind(name, dynamic, None, path, plain=True, implementation="flash_attention_2"))
    return kinds


# Its CUDA code places the numbers of a layer's keys, or values, by 32-bit integers (unpack.cu of 0.2.7): with more of
# them it wrote outside of its memory ("an illegal memory access", from 65 rows of 32768 tokens of Llama-3.1-8B on), and
# nothing ran in that process any more.
QUANTO_NUMBERS = 1 << 31
QUANTO_BEYOND = "optimum-quanto's CUDA code counts a layer's keys by 32-bit integers"


def quanto_kinds(model: PreTrainedModel, geometry: Geometry) -> list[Kind]:
    if not installed("optimum.quanto"):
        return []
    note = {"note": "packs all tokens again every 128 steps, which is not in the figure"}
    most = QUANTO_NUMBERS // (geometry.kv_heads * geometry.head_dim) if model.device.type == "cuda" else None
    return [
        Kind(
            f"transformers-quanto-{bits}",
            partial(_quanto, model, geometry, bits),
            None,
            "QuantizedCache",
            most_tokens=most,
            beyond=QUANTO_BEYOND,
            more=note,
        )
        for bits in (2, 4)
    ]


def scheme_kind(model: PreTrainedModel, geometry: Geometry, one: Benched, require_kernels: bool, kernels: str) -> Kind:
    options: CacheOptions = {"require_kernels": require_kernels, "kernels": kernels}
    with KVCalCache(scheme_of(model, one), model, **options) as empty:
        path: str = empty.describe()["path"]
    more: dict[str, Json] = {"made_up": one.placeholder} if one.placeholder else {}
    settings: Settings = {"sink": one.windows.sink, "recent": one.windows.recent, "block": one.windows.block}
    if one.scheme.selection is not None:
        return Kind(one.name, None, one.stored_bits, path, UNFILLED, more=more, settings=settings)
    maker = partial(_packed, model, geometry, one, options)
    return Kind(one.name, maker, one.stored_bits, path, more=more, settings=settings)


def blocks_of(windows: Windows, length: int) -> int:
    """Packed blocks of a row of so many tokens."""
    return max(0, (length - windows.sink - windows.recent) // windows.block)


def start_of(windows: Windows, length: int) -> int:
    """The least number of tokens from `length` on with which a block is due in step FLUSH_AT; `length` if it is too
    short for any.
    """
    if length + FLUSH_AT + 1 < windows.sink + windows.recent + windows.block:
        return length
    over = (length + FLUSH_AT + 1 - windows.sink - windows.recent) % windows.block
    return length + (-over) % windows.block


def _packed(
    model: PreTrainedModel, geometry: Geometry, one: Benched, options: CacheOptions, batch: int, length: int, steps: int
) -> Start:
    windows = one.windows
    start = start_of(windows, length)
    capacity = max(start + steps, windows.sink + windows.recent + windows.block)
    allocated: CacheOptions = {**options, "max_length": capacity}
    cache = KVCalCache(scheme_of(model, one), model, **allocated)

    def again() -> None:
        cache.reset()
        fill_cache(cache, geometry, one, batch, start)

    again()
    flush = FLUSH_AT if blocks_of(windows, start + FLUSH_AT + 1) > blocks_of(windows, start + FLUSH_AT) else None
    witness = partial(_witness, cache)
    why_not, nbytes = cache.why_not_compileable, packed_bytes(cache)
    return Start(cache, start, again, True, flush, windows.block, witness, why_not, nbytes)


def packed_bytes(cache: KVCalCache) -> int:
    """Bytes of what rows hold, spare capacity left out: packed blocks, windows, layers left to Transformers; and
    constants of the codecs.
    """
    ledger = cache.full_ledger
    blocks, exact = int(ledger.blocks.sum()), int((ledger.sink + ledger.window).sum())
    plain = [layer for layer, pair in zip(cache.layers, cache.scheme.layers, strict=True) if pair is None]
    total, model = cache.scheme.resident_bytes() + _kv_bytes(plain), cache.model
    assert isinstance(model, PreTrainedModel)
    for pair in filter(None, cache.scheme.layers):
        shape, width = pair.key.shape, 2 * model.dtype.itemsize
        total += blocks * (pair.key.block_bytes() + pair.value.block_bytes()) + exact * shape.heads * shape.dim * width
    return total


def _kv_bytes(layers: Iterable[object]) -> int:
    """Bytes of keys and values of those layers that have some."""
    with_keys = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
    return sum(x.nbytes for layer in with_keys for x in (layer.keys, layer.values) if x is not None)


def _witness(cache: KVCalCache) -> list[Tensor]:
    """Tokens and blocks of each row, and the newest packed block of the lowest layer, whose keys and values depend on
    the tokens alone.
    """
    cache.settle()
    parts = [torch.tensor([cache.ledger.columns], device="cpu"), cache.ledger.blocks.clone()]
    for packed in cache.compressed_layers[0].packed:
        parts += [x[:, :, -1].cpu() for x in packed.values() if isinstance(x, Tensor) and x.shape[2]]
    return parts


def _updated(cache: Cache, model: PreTrainedModel, geometry: Geometry, batch: int, length: int) -> Start:
    for layer in range(geometry.layers):
        keys, values = (tokens(model, geometry, batch, length, 2 * layer + role) for role in (0, 1))
        cache.update(keys, values, layer)
    return Start(cache, length)


def _dynamic(model: PreTrainedModel, geometry: Geometry, batch: int, length: int, steps: int) -> Start:
    start = _updated(DynamicCache(config=model.config), model, geometry, batch, length)
    return replace(start, bytes=_kv_bytes(start.cache.layers))


def _quanto(model: PreTrainedModel, geometry: Geometry, bits: int, batch: int, length: int, steps: int) -> Start:
    from transformers import QuantizedCache

    return _updated(QuantizedCache("quanto", model.config, nbits=bits), model, geometry, batch, length)


def _static(model: PreTrainedModel, geometry: Geometry, batch: int, length: int, steps: int) -> Start:
    """Attention of each step over the whole capacity, masked where no token is yet."""
    cache = StaticCache(config=model.config, max_cache_len=length + steps)
    empty, generator = tokens(model, geometry, batch, 0, 0), torch.Generator(model.device).manual_seed(0)
    layers = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    for layer in layers:
        layer.lazy_initialization(empty, empty)
        for storage in (layer.keys, layer.values):
            assert storage is not None
            storage.normal_(generator=generator)

    def again() -> None:
        for layer in layers:
            layer.cumulative_length.fill_(length)

    again()
    used = _kv_bytes(layers) * length // (length + steps)
    return Start(cache, length, again, True, no_graph=None, bytes=used)


class FullLayer(DynamicLayer):
    """Holds (B, H, length, D) and writes each new token over the last: what attention costs at that length, without the
    copy of DynamicCache and the mask of StaticCache. A bound for FP16, no cache to generate with.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.full = self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        for full, new in zip(self.full, (key_states, value_states), strict=True):
            full[:, :, -1:].copy_(new)
        return self.full

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.full[0].shape[2], 0


def _full(model: PreTrainedModel, geometry: Geometry, batch: int, length: int, steps: int) -> Start:
    cache = DynamicCache(config=model.config)
    cache.layers = [
        FullLayer(*(tokens(model, geometry, batch, length, 2 * layer + role) for role in (0, 1)))
        for layer in range(geometry.layers)
    ]
    return Start(cache, length, goes_back=True, no_graph=None, bytes=_kv_bytes(cache.layers))
