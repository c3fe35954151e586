"""How far a memory goes, from bytes alone: weights, cache and constants.

Activations, logits and what an allocator wastes are not in it: a bound, always marked projected. Where no kernel
attends to a scheme's blocks, one layer's keys and values as they are decoded are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models.catalogue import Geometry
from . import paper
from .devices import Device
from .fused import unreadable
from .peers import SIXTEEN
from .rows import Row
from .schemes import Benched


@dataclass(frozen=True)
class Footprint:
    """Bytes of one scheme. fixed: whatever the tokens; exact: tokens of a row that stay in the model's dtype, at
    `token` bytes each over all layers; every further one takes `packed`. settings: as rows have them. decoded: bytes of
    each token while the layer that attends is decoded, 0 where a kernel reads it as it is.
    """

    name: str
    stored_bits: float
    fixed: float
    exact: int
    token: float
    packed: float
    settings: Mapping[str, Any]
    decoded: float = 0.0

    def held(self, length: int) -> float:
        """Bytes of a row of so many tokens that the cache holds."""
        return min(length, self.exact) * self.token + max(0, length - self.exact) * self.packed

    def row(self, length: int) -> float:
        """Bytes of a row of so many tokens in a step."""
        return self.held(length) + length * self.decoded

    def longest(self, memory: float, batch: int) -> int:
        """Tokens that each of `batch` rows can have in so many bytes."""
        free = (memory - self.fixed) / batch
        token, packed = self.token + self.decoded, self.packed + self.decoded
        beyond = free - self.exact * token
        return max(0, int(free / token if beyond < 0 else self.exact + beyond / packed))

    def largest_batch(self, memory: float, length: int) -> int:
        return max(0, int((memory - self.fixed) // self.row(length)))


def footprints(
    geometry: Geometry, schemes: Sequence[Benched], dtype: torch.dtype, device: Device | None = None
) -> list[Footprint]:
    """The model's own dtype first, then each scheme with a window as full as it gets. device: None for one with
    kernels.
    """
    decodes_all = dtype not in SIXTEEN or (device is not None and device.why_no_triton is not None)
    width = dtype.itemsize
    weights, token = geometry.parameters * width, geometry.kv_bytes_per_token(8 * width)
    kind = {"dtype": str(dtype).removeprefix("torch.")}
    all_footprints = [Footprint("fp32" if width == 4 else "fp16", 8.0 * width, weights, 0, token, token, kind)]
    for one in schemes:
        exact = one.windows.sink + one.windows.recent + one.windows.block - 1
        fixed = weights + constants(one, geometry.layers)
        packed = geometry.kv_bytes_per_token(one.stored_bits)
        decodes = decodes_all or unreadable(one, one.codecs, geometry.heads // geometry.kv_heads) is not None
        decoded = 2.0 * geometry.kv_width * width * decodes
        all_footprints.append(
            Footprint(one.name, one.stored_bits, fixed, exact, token, packed, kind | one.settings, decoded)
        )
    return all_footprints


def constants(one: Benched, layers: int) -> int:
    """Bytes of codebooks and grids, which all layers share, and of predictors, which they do not."""
    total = 0
    for codec in (one.codecs.key, one.codecs.value):
        for name, tensor in codec.tensors().items():
            total += tensor.numel() * tensor.element_size() * (layers if name.startswith("predictor.") else 1)
    return total


def projected_longest(model: str, every: Sequence[Footprint], batch: int, gib: float, device: str) -> list[Row]:
    """VQKV Table 3: the most tokens a row can have."""
    rows, width = [], int(every[0].stored_bits) // 8
    for one in every:
        length = one.longest(gib * 2**30, batch)
        more = {"longest_length": length, **vqkv_beside(model, one.name, gib, width)}
        rows.append(_row("longest-generation", model, one, batch, length, gib, device, **more))
    return rows


def projected_batch(model: str, every: Sequence[Footprint], length: int, gib: float, device: str) -> list[Row]:
    """The most rows of so many tokens each."""
    batches = [(one, one.largest_batch(gib * 2**30, length)) for one in every]
    return [_row("largest-batch", model, one, n, length, gib, device, largest_batch=n) for one, n in batches]


def _row(
    operation: str, model: str, one: Footprint, batch: int, length: int, gib: float, device: str, **more: Any
) -> Row:
    layer = ", one decoded layer" if one.decoded else ""
    why = None if gib * 2**30 > one.fixed else f"weights and constants alone take {one.fixed / 2**30:.1f} GiB"
    return Row(
        operation=operation,
        scheme=one.name,
        model=model,
        batch=batch,
        length=length,
        microseconds=None,
        stored_bits=one.stored_bits,
        fraction_of_copy=None,
        ratio_to_fp16=None,
        fp16_backend=None,
        projected=True,
        device=device,
        path=f"projected: weights, cache{layer} and constants, nothing else",
        refused=why,
        **one.settings,
        more={"memory_gib": gib, "fixed_bytes": round(one.fixed), **more},
    )


PAPER_GIB = 40


def vqkv_beside(model: str, name: str, gib: float, width: int) -> dict[str, Any]:
    """The paper's figure, where the run is like the paper's: Llama-3.1-8B in float32 on 40 GB. width: bytes of a
    weight.
    """
    if (model, gib, width) != ("llama-3.1-8b", PAPER_GIB, 4):
        return {}
    kind = "vqkv" if name.startswith("vqkv") else "full" if name == "fp32" else None
    return {} if kind is None else {"paper_longest": paper.VQKV_LONGEST[kind]}
