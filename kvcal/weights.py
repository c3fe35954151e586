"""Tensors into modules: from safetensors files or from a seed, onto any device, without a second copy.

A model is built on the meta device first; parameters are then put in by name. Both sources below answer the
same two questions, so the whole model and one layer at a time are loaded by the same code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvcal_artifacts.errors import KVCalError, ModelUnavailable
from kvcal_artifacts.files import open_regular, read_text

from .hub import INDEX, one_line

FULL_HASH_BYTES = 1 << 30
SAMPLE_BYTES = 4096
GOLDEN = -1640531527  # 2^32 / golden ratio, as int32


class Weights(Protocol):
    """Where parameters come from."""

    def get(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        """The parameter of that name with the shape and dtype of `like` (a meta tensor), on `device`."""


class FileWeights:
    """Parameters in safetensors files. `locate` gives a shard's path, downloading it if need be."""

    def __init__(self, label: str, index: Path, locate: Callable[[str], Path]) -> None:
        self.label = label
        self.locate = locate
        self.shard_of = shard_map(label, index)
        self._open: dict[tuple[str, str], Any] = {}

    def get(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        if name not in self.shard_of:
            raise ModelUnavailable(f"{self.label}: its weights lack {name}, which its config.json asks for")
        tensor: Tensor = self._reader(self.shard_of[name], device).get_tensor(name)
        if tensor.shape != like.shape:
            raise ModelUnavailable(
                f"{self.label}: {name} has shape {tuple(tensor.shape)}, its config.json asks for {tuple(like.shape)}"
            )
        return tensor.to(like.dtype)

    def _reader(self, shard: str, device: torch.device) -> Any:
        key = (shard, str(device))
        if key not in self._open:
            self._open[key] = open_shard(self.label, self.locate(shard), str(device))
        return self._open[key]


class RandomWeights:
    """Seeded parameters: matrices uniform with the config's standard deviation, norms one, biases zero.

    Every value is an integer hash of seed, parameter name and position, so that one layer alone, the whole
    model, any device and any torch version give the same bits, and no random generator is touched.
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


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The causal LM of that config on the meta device: no memory, no random numbers drawn."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailable(f"model type {config.model_type!r}: {one_line(error)}") from error
    return model.eval().requires_grad_(False)


def fill(module: nn.Module, prefix: str, weights: Weights, device: torch.device) -> None:
    """Put real parameters in place of a module's meta ones; tied ones once, under their first name.

    prefix: the module's name in the model, "" or ending in a dot.
    """
    for name, meta in list(module.named_parameters()):
        owner, leaf = _owner(module, name)
        tensor = weights.get(prefix + name, meta, device)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    place_rotary(module, device)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise KVCalError(f"{prefix}{name}: kvcal cannot make this buffer; load the whole model")


def place_rotary(module: nn.Module, device: torch.device) -> None:
    """Rebuild rotary modules: their frequencies come from the config, no checkpoint holds them."""
    for child in [child for child in module.modules() if "inv_freq" in child._buffers]:
        maker: Any = type(child)
        for key, buffer in maker(config=child.config).to(device).named_buffers():
            child.register_buffer(key, buffer, persistent=False)


def tie(model: Any) -> None:
    """Share the embedding with the head where the config says so."""
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


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


def open_shard(label: str, path: Path, device: str) -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except FileNotFoundError:
        raise ModelUnavailable(f"{label}: {path.name} is missing, though its index names it") from None
    except (SafetensorError, OSError) as error:
        raise ModelUnavailable(f"{label}: {path.name} cannot be read ({one_line(error)})") from error


def content_revision(files: Iterable[Path]) -> str:
    """A revision for a folder: `sha256:…` over every byte up to 1 GiB, `sampled-sha256:…` beyond.

    Sampled means: of each file its name, size and header, and of each tensor the first 4096 bytes. Any
    training step changes that; a change of single values deep inside a tensor can escape it, and the prefix
    says so.
    """
    paths = sorted(files, key=lambda path: path.name)
    whole = sum(path.stat().st_size for path in paths) <= FULL_HASH_BYTES
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for piece in _whole(path) if whole else _samples(path):
            digest.update(piece)
    return f"{'sha256' if whole else 'sampled-sha256'}:{digest.hexdigest()}"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _whole(path):
        digest.update(piece)
    return digest.hexdigest()


def _whole(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb") as stream:
        while piece := stream.read(1 << 22):
            yield piece


def _samples(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb") as stream:
        size = stream.read(8)
        header = stream.read(int.from_bytes(size, "little"))
        yield size + header
        base = 8 + len(header)
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            stream.seek(base + begin)
            yield stream.read(min(SAMPLE_BYTES, end - begin))
