"""A layer whose kv heads are spread over processes by Transformers' tensor-parallel plan (`tp_plan="auto"`).

Each process then projects and attends to its part of the heads, and holds nothing of the others. What needs all heads
gathers them; every process must do so in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .protocols import Decoder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections whose outputs hold the keys
GATHERED = ("colwise_gather_output", "colwise_rep")  # styles that give every process all heads


@dataclass(frozen=True)
class HeadShard:
    """The kv heads that this process has: part `rank` of `count` equal ones. group: of torch.distributed."""

    rank: int
    count: int
    group: ProcessGroup

    def gather(self, x: Tensor) -> Tensor:
        """The heads of all processes, (B, H, ...), from those of this one, (B, H / count, ...)."""
        with torch.no_grad():
            return torch.cat(self._all(x), 1)

    def local(self, x: Tensor) -> Tensor:
        """The heads of this process, (B, H / count, ...), of x (B, H, ...), as a view."""
        heads = x.shape[1] // self.count
        return x[:, self.heads(heads)]

    def heads(self, each: int) -> slice:
        """Which heads this process has, where each has so many."""
        return slice(self.rank * each, (self.rank + 1) * each)

    def add(self, x: Tensor) -> Tensor:
        """The sum of x over all processes, added in their order: the same bits on each."""
        first, *others = self._all(x)
        for other in others:
            first = first + other
        return first

    def _all(self, x: Tensor) -> list[Tensor]:
        from torch.distributed import all_gather  # not at the top: torch may be built without

        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.count)]
        all_gather(parts, x.contiguous(), group=self.group)
        return parts


def head_shard(decoder: Decoder, attention: nn.Module, kv_heads: int) -> HeadShard | None:
    """Which of a layer's kv heads this process has; None where it has all, as of most models.

    Raises UnsupportedModel where heads cannot be divided equally, or keys lie in one matrix with queries and values.
    """
    styles = {name.rpartition(".")[2]: style for name, style in (getattr(decoder, "tp_plan", None) or {}).items()}
    for name in KEYS:
        mesh = getattr(getattr(getattr(attention, name, None), "weight", None), "device_mesh", None)  # of a DTensor
        style = styles.get(name, "unknown")
        if mesh is None or mesh.size() == 1 or style in GATHERED:
            continue
        kind, heads, count = decoder.config.model_type, decoder.config.num_attention_heads, mesh.size()
        if (name, style) != ("k_proj", "colwise"):
            raise UnsupportedModel(f"{kind}: its tp_plan spreads {name} as {style}, kvcal knows k_proj as colwise")
        if kv_heads % count or heads % count:
            raise UnsupportedModel(
                f"{kind}: {kv_heads} kv heads and {heads} query heads cannot be divided among {count} processes "
                "(tp_plan); start a number of processes that divides both"
            )
        return HeadShard(mesh.get_local_rank(), count, mesh.get_group())
    return None


def whole_weight(module: nn.Module) -> Tensor | None:
    """All of a module's weight, wherever it lies: every process must ask for one that is spread over several.

    Of a model with parts on a disk (device_map), accelerate's hook has what the module itself lacks.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    stored = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    if weight.is_meta and stored is not None:
        weight = stored["weight"]
    full = getattr(weight, "full_tensor", None)  # of a DTensor
    gathered: Tensor = weight if full is None else full()
    return gathered.detach()
