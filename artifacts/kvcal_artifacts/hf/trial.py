"""What an attention module does with its queries and keys: where they are before RoPE, and its RoPE; by a trial.

The module's forward runs on the CPU with stand-ins for its matrices, so that no weight is read. It works on the
meta device, and costs about a millisecond. What it passes to its cache is compared, bit for bit, with what we would
make of the same keys.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .protocols import ModelConfig, attribute

BATCH, TOKENS = 1, 5  # a number of tokens that no model has as its heads
KEY_SOURCES = ("k_norm", "k_layernorm", "key_layernorm", "key_norm", "k_proj")
QUERY_SOURCES = ("q_norm", "q_layernorm", "query_layernorm", "query_norm", "q_proj")
Apply: TypeAlias = Callable[..., Any]  # apply_rotary_pos_emb, of one tensor or two: its result differs, too


def _whole(apply: Apply, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = apply(x, x, cos, sin)[1]
    return out


def _slice(apply: Apply, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    front = x[..., :width]
    return torch.cat((apply(front, front, cos, sin)[1], x[..., width:]), -1)


def _alone(apply: Apply, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = apply(x, cos, sin)
    return out


# How a module calls its file's apply_rotary_pos_emb: on whole heads, on the channels that it slices off, on one tensor.
ROTATIONS: dict[str, Callable[[Apply, Tensor, Tensor, Tensor], Tensor]] = {
    "whole": _whole,
    "slice": _slice,
    "alone": _alone,
}


def rotate(module: nn.Module, how: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, T, D) by RoPE as the module does. how: a name of ROTATIONS. cos, sin: (B or 1, T, rotary dim)."""
    return ROTATIONS[how](sys.modules[type(module).__module__].apply_rotary_pos_emb, x, cos, sin)


@dataclass(frozen=True)
class Source:
    """A child of the module whose output holds keys or queries.

    part: of its last dimension. heads_first: (B, H, T, D).
    """

    name: str
    part: slice | None = None
    heads_first: bool = False

    def read(self, output: Tensor, head_dim: int) -> Tensor:
        """Keys or queries (B, H, T, D) from the output (B, T, C), (B, T, H, D) or (B, H, T, D)."""
        if self.heads_first:
            return output
        if self.part is not None:
            output = output[..., self.part]
        return output.reshape(*output.shape[:2], -1, head_dim).transpose(1, 2)


@dataclass(frozen=True)
class Trial:
    """What a module does, by a trial.

    kv_heads, head_dim, value_dim: of the keys and values that the cache gets. how: a name of ROTATIONS; None: a layer
    without RoPE. odd: why keys or queries before RoPE cannot be had, None where they can.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    key: Source
    query: Source
    how: str | None
    odd: str | None = None


class _Ended(Exception):
    """Not an error: attention was reached, and nothing more is needed."""


class _StandIn(nn.Module):
    """Stands for a matrix: it gives the same numbers whatever it is called with."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.out_features = width
        self.weight = nn.Parameter(torch.empty(width, 0, dtype=torch.float32, device="cpu"), requires_grad=False)
        self.output = torch.randn(BATCH, TOKENS, width, generator=generator, dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.output.clone()


class _Recorder:
    """Stands for the cache and for the attention function, and records their arguments."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.value_dim = 0
        self.queries: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.keys, self.value_dim = keys, int(values.shape[-1])
        return keys, values

    def attention(self, module: nn.Module, query: Tensor, *args: object, **kwargs: object) -> None:
        self.queries = query
        raise _Ended


class _Config:
    """The module's config except for the name of its attention function."""

    def __init__(self, config: ModelConfig, recorder: _Recorder, name: str) -> None:
        self.kvcal_config, self.kvcal_recorder, self._attn_implementation = config, recorder, name

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["kvcal_config"], name)


def attention(module: nn.Module, query: Tensor, *args: object, **kwargs: object) -> None:
    """The attention function of modules on trial."""
    recorder: _Recorder = attribute(module, "config").kvcal_recorder
    recorder.attention(module, query)


_TRIALS: weakref.WeakKeyDictionary[nn.Module, Trial | str] = weakref.WeakKeyDictionary()


def trial_of(module: nn.Module, config: ModelConfig, width: int | None, name: str) -> Trial | str:
    """What the module does, or in words why no trial can tell. Remembered as long as the module lives.

    config: of the decoder. width: channels of cos and sin, None where the rotary module does not give these. name:
    under which `attention` is registered.
    """
    if module not in _TRIALS:
        _TRIALS[module] = _tried(module, config, width, name)
    return _TRIALS[module]


def _tried(module: nn.Module, config: ModelConfig, width: int | None, name: str) -> Trial | str:
    if width is None:
        return "its rotary module does not give cos and sin"
    runs = []
    for seed in (1, 2):
        run = _run(module, config, width, seed, name)
        if isinstance(run, str):
            return run
        runs.append(run)
    first = runs[0].keys
    heads, dim = int(first.shape[1]), int(first.shape[3])
    key, how, key_odd = _explained(module, runs, "keys", _sources(module, KEY_SOURCES, config, dim, heads), dim)
    query, _, query_odd = _explained(module, runs, "queries", _sources(module, QUERY_SOURCES, config, dim, heads), dim)
    if key is None or query is None:
        return "no k_norm, k_proj or qkv_proj to read keys from"
    return Trial(heads, dim, runs[0].value_dim, key, query, how, key_odd or query_odd)


@dataclass(frozen=True)
class _Run:
    """One forward: what its cache and its attention got. outputs: those of the module's children."""

    cos: Tensor
    sin: Tensor
    outputs: dict[str, Tensor]
    keys: Tensor
    value_dim: int
    queries: Tensor | None


def _run(module: nn.Module, config: ModelConfig, width: int, seed: int, name: str) -> _Run | str:
    recorder, outputs = _Recorder(), dict[str, Tensor]()
    twin = _twin(module, recorder, outputs, name)
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(1, TOKENS, width, generator=generator, dtype=torch.float32, device="cpu") * 6
    cos, sin = angles.cos(), angles.sin()
    hidden = torch.randn(
        BATCH,
        TOKENS,
        int(config.hidden_size),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )
    positions = torch.arange(TOKENS, device="cpu")[None]
    arguments = {
        "position_embeddings": (cos, sin),
        "past_key_values": recorder,
        "attention_mask": None,
        "position_ids": positions,
        "cache_position": positions,
    }
    failed = ""
    with torch.no_grad(), torch.device("cpu"):
        try:
            twin(hidden, **arguments)
        except _Ended:
            pass
        except Exception as error:  # of a module that is called otherwise: it is not understood
            failed = f" ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    keys = recorder.keys
    if keys is None or keys.ndim != 4 or keys.shape[0] != BATCH or keys.shape[2] != TOKENS:
        shape = "no keys" if keys is None else f"keys {tuple(keys.shape)}"
        return f"{type(module).__name__} hands its cache {shape} where (batch, heads, tokens, head_dim) is due{failed}"
    return _Run(cos, sin, outputs, keys, recorder.value_dim, recorder.queries)


def _twin(module: nn.Module, recorder: _Recorder, outputs: dict[str, Tensor], name: str) -> nn.Module:
    """The module without hooks, its matrices replaced and all the rest on the CPU in float32."""
    twin = copy.copy(module)
    vars(twin).update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict(), training=False)
    for hooks in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
        vars(twin)[hooks] = OrderedDict()
    vars(twin)["_modules"], vars(twin)["_compiled_call_impl"] = {}, None
    vars(twin).pop("forward", None)  # what a library has put around it
    for number, (child, inner) in enumerate(module._modules.items()):
        twin._modules[child] = stand_in = _child(inner, number)
        if stand_in is not None:
            stand_in.register_forward_hook(_note(child, outputs))
    if hasattr(module, "config"):
        config = attribute(module, "config")
        vars(twin)["config"] = _Config(getattr(config, "kvcal_plain", config), recorder, name)
    return twin


def _note(name: str, outputs: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if isinstance(output, Tensor):
            outputs[name] = output.clone()

    return hook


def _child(module: nn.Module | None, seed: int) -> nn.Module | None:
    if module is None:
        return None
    width = getattr(module, "out_features", None)
    if isinstance(width, int):
        return _StandIn(width, seed)
    shells: dict[int, object] = {}  # deepcopy's memo: every tensor gets one of the same shape on the CPU
    for one in (*module.parameters(), *module.buffers()):
        plain = torch.ones(one.shape, dtype=torch.float32 if one.is_floating_point() else one.dtype, device="cpu")
        shells[id(one)] = nn.Parameter(plain, requires_grad=False) if isinstance(one, nn.Parameter) else plain
    for inner in module.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            shells[id(hooks)] = OrderedDict()
    twin = copy.deepcopy(module, shells)
    for inner in twin.modules():
        vars(inner).pop("forward", None)  # what a library has put around it, with the tensors of before
    return twin


def _sources(
    module: nn.Module, names: tuple[str, ...], config: ModelConfig, dim: int, kv_heads: int
) -> Iterator[Source]:
    """The children whose output may hold keys or queries, the nearest to attention first."""
    for name in names:
        if getattr(module, name, None) is not None:
            yield Source(name)
            yield Source(name, heads_first=True)
    if getattr(module, "qkv_proj", None) is not None:
        wide = int(config.num_attention_heads) * dim
        rows = slice(wide, wide + kv_heads * dim) if names is KEY_SOURCES else slice(0, wide)
        yield Source("qkv_proj", rows)


def _explained(
    module: nn.Module, runs: list[_Run], what: str, sources: Iterator[Source], dim: int
) -> tuple[Source | None, str | None, str | None]:
    """The source that becomes what attention gets, and how it does; or the source nearest to it, and why none does."""
    nearest: Source | None = None
    for source in sources:
        if source.name not in runs[0].outputs:
            continue
        nearest = nearest or source
        before = [_read(source, run.outputs[source.name], dim) for run in runs]
        if before[0] is None or before[1] is None or not torch.equal(before[0], before[1]):  # RoPE came first
            continue
        targets = [getattr(run, what) for run in runs]
        if targets[0] is None:  # attention without a named function: nothing contradicts it
            return source, "whole", None
        if all(torch.equal(x, y) for x, y in zip(before, targets, strict=True) if x is not None):
            return source, None, None
        for how in ROTATIONS:
            if all(_same(module, how, x, run, y) for x, run, y in zip(before, runs, targets, strict=True)):
                return source, how, None
    return nearest, None, f"{type(module).__name__} makes its {what} in a way of its own behind its projections"


def _read(source: Source, output: Tensor, dim: int) -> Tensor | None:
    if source.heads_first and (output.ndim != 4 or output.shape[2] != TOKENS or output.shape[3] != dim):
        return None
    if not source.heads_first and (output.ndim not in (3, 4) or output.shape[1] != TOKENS):
        return None
    try:
        return source.read(output, dim)
    except RuntimeError:
        return None


def _same(module: nn.Module, how: str, before: Tensor | None, run: _Run, target: Tensor) -> bool:
    try:
        return before is not None and torch.equal(rotate(module, how, before, run.cos, run.sin), target)
    except Exception:  # another signature: not how this module calls it
        return False
