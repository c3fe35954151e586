"""What a check looks at: one codec at one shape in one role, and the inputs that it is tried with.

Letters: B rows, H kv heads, T tokens, D head_dim, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Context, Packed, Predicted, Role, Shape
from kvcal_artifacts.codecs.base import CONTEXT_TENSORS
from kvcal_artifacts.codecs.predictors import Linear
from kvcal_artifacts.storage import block_store
from kvcal_artifacts.storage.plan import Plan

Make = Callable[[Shape, Role], Codec]
INPUTS: dict[Role, tuple[str, ...]] = {"key": ("k1",), "value": ("v1", "k0")}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers of this shape, float32, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def linear_predictor(inputs: int, outputs: int) -> Linear:
    """A linear predictor with random weights that keep the variance."""
    weight = normal(inputs, outputs, seed=inputs + outputs).mul(inputs**-0.5).half()
    return Linear({"weight": weight, "bias": normal(outputs).half()})


def under_predictor(inner: Make) -> Make:
    """The same codec around the residual of a linear predictor, as AQUA-KV uses it."""

    def make(shape: Shape, role: Role) -> Codec:
        names, width = INPUTS[role], shape.heads * shape.dim
        return Predicted(inner(shape, role), linear_predictor(len(names) * width, width), names)

    return make


def statistics(codec: Codec, batch: int, blocks: int) -> dict[str, Tensor]:
    """The run-time statistics that the codec reads, other ones for each block: (B, H, N, ...) float32 by name."""
    by_name, shape = {}, codec.shape
    for name in codec.stats:
        kind, _, argument = name.partition(":")
        if kind == "query_abs":
            seed = 21 if argument else 20
            by_name[name] = normal(batch, shape.heads, max(8, blocks), shape.dim, seed=seed)[:, :, :blocks].abs()
        elif kind == "key_scale":  # one for all blocks of a row; rows alike, as they change places here
            by_name[name] = (normal(1, shape.heads, 1, shape.dim, seed=22) / 2).exp().expand(batch, -1, -1, -1)
        else:
            rank = int(argument.split(":")[0])
            by_name[name] = normal(batch, shape.heads, blocks, rank, shape.dim, seed=20) * 9
    return by_name


@dataclass(frozen=True)
class Subject:
    """A codec at a shape, in a role. make: makes it anew, the same one each time."""

    make: Make
    shape: Shape
    role: Role

    def __str__(self) -> str:
        return f"{self.role}s of {self.shape.heads} x {self.shape.dim} in blocks of {self.shape.block}"

    def codec(self) -> Codec:
        return self.make(self.shape, self.role)

    def context(self, batch: int, tokens: int) -> Context:
        """Layers below and statistics for so many rows and tokens, all that a codec may read."""
        sizes = batch, self.shape.heads, tokens, self.shape.dim
        k0 = {"k0": normal(*sizes, seed=15)} if self.role == "value" else {}
        below = {name: normal(*sizes, seed=10 + i) for i, name in enumerate(("k1", "v1", "k2", "v2"))}
        return Context(1, **below, **k0, stats=statistics(self.codec(), batch, tokens // self.shape.block))

    def noise(self, batch: int, blocks: int, seed: int = 1) -> Tensor:
        """Normal numbers (B, H, N * block, D) float32."""
        return normal(batch, self.shape.heads, blocks * self.shape.block, self.shape.dim, seed=seed)


def of_blocks(context: Context, block: int, start: int, stop: int) -> Context:
    """The context of blocks start to stop. block: tokens in each."""
    cut = context.part(start * block, stop * block)
    one = {name: t for name, t in context.stats.items() if t.shape[2] == 1}  # the same for all blocks
    return replace(cut, stats={name: t[:, :, start:stop] for name, t in context.stats.items()} | one)


def changed(context: Context, change: Callable[[Tensor], Tensor]) -> Context:
    """The context with every tensor of layers below, and every statistic, changed."""
    layers = {name: getattr(context, name) for name in CONTEXT_TENSORS}
    below = {name: change(t) for name, t in layers.items() if t is not None}
    return replace(with_below(context, below), stats={name: change(t) for name, t in context.stats.items()})


def with_below(context: Context, tensors: dict[str, Tensor]) -> Context:
    """The context with these tensors of layers below, by their names."""
    fields: dict[str, Any] = dict(tensors)
    return replace(context, **fields)


def tensors_by_name(packed: Packed) -> dict[str, Tensor]:
    """Every tensor of packed blocks, those of pools under two names."""
    parts = {name: block_store.tensors_of(stored) for name, stored in packed.items()}
    return {f"{name}.{i}": t for name, tensors in parts.items() for i, t in enumerate(tensors)}


def nbytes(packed: Packed) -> int:
    """Bytes of all tensors of packed blocks."""
    return sum(t.numel() * t.element_size() for t in tensors_by_name(packed).values())


def joined(parts: list[Packed]) -> Packed:
    """Blocks one behind the other, as a cache appends them."""
    whole = parts[0]
    for more in parts[1:]:
        grown = {}
        for name, stored in whole.items():
            plan = Plan(0, 1, 0, 0, more[name].shape[2], stored.shape[2] + more[name].shape[2])
            grown[name] = block_store.append(stored, more[name], plan)
        whole = grown
    return whole


def rows_from(packed: Packed, first: int) -> Packed:
    """Batch rows from `first` on."""
    return {
        name: block_store.select(stored, torch.arange(first, stored.shape[0], device="cpu"))
        for name, stored in packed.items()
    }


def moved(packed: Packed, device: torch.device) -> Packed:
    """The same blocks on another device."""
    return {name: block_store.move(stored, device) for name, stored in packed.items()}


def first_blocks(packed: Packed, count: int) -> Packed:
    """The first `count` blocks of each row, as a cache crops them."""
    return {name: block_store.first_blocks(stored, count) for name, stored in packed.items()}
