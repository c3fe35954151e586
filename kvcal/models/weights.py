"""Tensors into modules: from safetensors files or from a seed, onto any device, without a second copy.

A model is built on the meta device first; parameters are then put in by name. Both sources below answer the
same two questions, so the whole model and one layer at a time are loaded by the same code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvcal_artifacts.errors import KVCalError, ModelUnavailable
from kvcal_artifacts.files import read_text

from .conversion import Origin, Origins, check_shape
from .hub import INDEX, one_line
from .structure import head_of, tied

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .structure import CausalLM


GOLDEN = -1640531527  # 2^32 / golden ratio, as int32


class Weights(Protocol):
    """A source of parameters."""

    def get(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        """The parameter of that name with the shape and dtype of `like` (a meta tensor), on `device`."""


class FileWeights:
    """Parameters in safetensors files. `locate` gives a shard's path, downloading it if need be.

    model: whose parameters these are, on the meta device: names and shapes in the files may be older (see conversion).
    Raises ModelUnavailable where the files lack one, or hold layers that the model does not have.
    """

    def __init__(self, label: str, index: Path, locate: Callable[[str], Path], model: PreTrainedModel) -> None:
        self.label = label
        self.locate = locate
        self.shard_of = shard_map(label, index)
        self._model, self._origins = model, Origins(model, self.shard_of)
        self._origins.check_names(label)
        self._ready: dict[str, Tensor] = {}  # computed together with what was asked for
        self._open: dict[tuple[str, str], safe_open] = {}

    def get(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        if name not in self._origins:
            raise ModelUnavailable(f"{self.label}: its weights lack {name}, which its config.json asks for")
        origin = self._origins[name]
        tensor = self._ready.pop(name) if name in self._ready else self._read_origin(name, origin, like, device)
        check_shape(self.label, name, tensor, like, origin, _Shapes(self, origin.names))
        return tensor.to(like.dtype)

    def _read_origin(self, name: str, origin: Origin, like: Tensor, device: torch.device) -> Tensor:
        from .memory import is_oom

        def read(part: str) -> Tensor:
            tensor: Tensor = self._reader(self.shard_of[part], device).get_tensor(part)
            return (
                tensor if origin.converter is None else tensor.to(like.dtype)
            )  # as Transformers: cast, then converted

        try:
            tensors = origin.make(read, self._model)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if is_oom(error):
                raise
            shapes = _Shapes(self, origin.names)
            raise ModelUnavailable(Origins.misfit(self.label, origin, shapes, one_line(error))) from error
        self._ready |= {other: tensor for other, tensor in tensors.items() if other != name}
        if name not in tensors:
            raise ModelUnavailable(f"{self.label}: its weights lack {name}, which its config.json asks for")
        return tensors[name]

    def check(self) -> None:
        """Raises ModelUnavailable as check_shapes."""
        self._origins.check(self.label, _Shapes(self, list(self.shard_of)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the files."""
        return tuple(self._reader(self.shard_of[name], torch.device("cpu")).get_slice(name).get_shape())

    def _reader(self, shard: str, device: torch.device) -> safe_open:
        key = (shard, str(device))
        if key not in self._open:
            self._open[key] = open_shard(self.label, self.locate(shard), str(device))
        return self._open[key]


class _Shapes(Mapping[str, tuple[str, tuple[int, ...]]]):
    """File and shape of tensors, read when they are asked for: only an error needs them."""

    def __init__(self, weights: FileWeights, names: list[str]) -> None:
        self._weights, self._names = weights, names

    def __getitem__(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._weights.shard_of[name], self._weights.shape(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_shapes(label: str, index: Path, model: PreTrainedModel) -> None:
    """Raises ModelUnavailable, naming file and tensor, where tensors do not have the shapes that the model's config
    asks for.

    model: on the meta device. Reads the headers of all shards, which must be there, and no weights.
    """
    weights = FileWeights(label, index, index.parent.joinpath, model)
    weights.check()


class RandomWeights:
    """Seeded parameters: matrices uniform with the config's standard deviation, norms one, biases zero.

    Every value is an integer hash of seed, parameter name and position, and no random generator is touched. So one
    layer alone, the whole model, any device and any torch version give the same bits.
    """

    def __init__(self, seed: int, std: float) -> None:
        self.seed = seed
        self.std = std

    def get(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        out = torch.empty(like.shape, dtype=like.dtype, device=device)
        if name.endswith(".bias"):
            return out.zero_()
        if out.ndim < 2:
            return out.fill_(1.0)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        keys = [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4)]
        fill_hashed(out.view(-1), keys, self.std * math.sqrt(3))
        return out


def fill_hashed(out: Tensor, keys: list[int], bound: float) -> None:
    """Fill a flat tensor with values uniform in ±bound, in chunks that bound the temporary memory.

    The finaliser of MurmurHash3 over the position. The second key enters between its rounds: with one key at
    the start alone two tensors would be shifted copies of one sequence of 2^32 values.
    """
    step = min(out.numel(), 1 << (26 if out.is_cuda else 15))  # on a CPU what its cache holds: 8x faster
    ramp = torch.arange(step, dtype=torch.int32, device=out.device).mul_(GOLDEN)
    for start in range(0, out.numel(), step):
        part = out[start : start + step]
        x = ramp[: part.numel()] + _int32(start * GOLDEN + keys[0])
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(-2048144789).add_(keys[1])
        x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(-1028477387)
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
        part.copy_(x.to(torch.float32).mul_(bound / 2**31))


def _int32(value: int) -> int:
    """The value modulo 2^32 as a signed integer: int32 arithmetic wraps, Python's does not."""
    return (value + 2**31) % 2**32 - 2**31


class LoadingReport(TypedDict, total=False):
    """Names of parameters that Transformers did not find in the files, and of tensors that it did not use."""

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]


def causal_lm(model: nn.Module) -> CausalLM:
    """The model, known as one of Transformers' that generates text. Raises ModelUnavailable for any other."""
    if not _generates(model):
        raise ModelUnavailable(f"{type(model).__name__} does not generate text; load a causal language model")
    return model


def _generates(model: nn.Module) -> TypeGuard[CausalLM]:
    from transformers import GenerationMixin, PreTrainedModel

    return isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)


def fill(
    module: nn.Module, prefix: str, weights: Weights, device: torch.device, model: nn.Module | None = None
) -> None:
    """Replace a module's meta parameters by real ones; tied ones once, under their first name.

    prefix: the module's name in the model, "" or ending in a dot. model: that it is part of, None: it is the model.
    """
    place_buffers(module, device, module if model is None else model)
    for name, meta in list(module.named_parameters()):
        owner, leaf = _owner(module, name)
        tensor = weights.get(prefix + name, meta, device)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    for name, buffer in list(module.named_buffers()):
        owner, leaf = _owner(module, name)
        if buffer.is_meta and leaf not in owner._non_persistent_buffers_set:
            owner._buffers[leaf] = weights.get(prefix + name, buffer, device)
        elif buffer.is_meta:
            raise KVCalError(f"{prefix}{name}: kvcal cannot make this buffer; load the whole model")


def place_rotary(module: nn.Module, device: torch.device) -> None:
    """Rebuild rotary modules: their frequencies come from the config, no checkpoint holds them."""
    for child in [child for child in module.modules() if any(name.endswith("inv_freq") for name in child._buffers)]:
        with torch.device("cpu"):  # whose sines and cosines are those of every machine; the class names no device
            fresh = type(child)(config=child.config).to(device)
        for key, buffer in fresh.named_buffers():
            child.register_buffer(key, buffer, persistent=False)


def place_buffers(module: nn.Module, device: torch.device, model: nn.Module) -> None:
    """Rebuild what no checkpoint holds: rotary modules, and other buffers that the model's class sets when it is
    made.
    """
    place_rotary(module, device)
    for child in module.modules():
        waiting = {name: one for name, one in child._buffers.items() if one is not None and one.is_meta}
        waiting = {name: one for name, one in waiting.items() if name in child._non_persistent_buffers_set}
        if not waiting or (start := getattr(_class_of(child, model), "_init_weights", None)) is None:
            continue
        for name, one in waiting.items():
            child._buffers[name] = torch.full_like(one, UNSET if one.is_floating_point() else 0, device=device)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            start(child)
        for name, one in waiting.items():
            buffer = child._buffers[name]
            if one.is_floating_point() and buffer is not None and bool(buffer.isnan().any()):
                child._buffers[name] = one


def _class_of(child: nn.Module, model: nn.Module) -> nn.Module:
    """The innermost of Transformers' models around a module: a text tower's class knows what that of both does not."""
    around = [
        one for one in model.modules() if hasattr(one, "_init_weights") and any(m is child for m in one.modules())
    ]
    return around[-1] if around else model


UNSET = float("nan")


def tie(model: CausalLM) -> None:
    """Share the embedding with the head where the config says so."""
    if tied(model):
        head_of(model).weight = model.get_input_embeddings().weight


def release(module: nn.Module) -> None:
    """Give a module's memory back: its parameters and buffers become meta tensors again."""
    module.to("meta")


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def shard_map(label: str, index: Path) -> dict[str, str]:
    """tensor name -> shard file name, from an index or from the header of a single file."""
    if index.name != INDEX:
        return dict.fromkeys(open_shard(label, index, "cpu").keys(), index.name)
    try:
        mapping = json.loads(read_text(index))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{label}: {index.name} is damaged ({one_line(error)})") from error
    return {str(name): str(shard) for name, shard in mapping.items()}


def open_shard(label: str, path: Path, device: str) -> safe_open:
    try:
        return safe_open(path, framework="pt", device=device)
    except FileNotFoundError:
        raise ModelUnavailable(f"{label}: {path.name} is missing, though its index names it") from None
    except (SafetensorError, OSError) as error:
        raise ModelUnavailable(f"{label}: {path.name} cannot be read ({one_line(error)})") from error
