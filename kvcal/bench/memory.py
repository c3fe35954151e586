"""How far a memory goes, by the arithmetic of planning/memory.py, as `kvcal plan` has it: prompts fed in chunks.

Always marked projected. Where no kernel attends to a scheme's blocks, one layer's keys and values as they are decoded
count too. No row is longer than the model's context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcal_artifacts.checked import Json

from ..models.geometry import Geometry
from . import paper
from .devices import Device
from .fused import unreadable
from .peers import SIXTEEN
from .planning import memory as planning
from .planning.memory import Load, Model
from .planning.memory import Windows as Exact
from .rows import Row, Settings
from .schemes import Benched

MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class Footprint:
    """Bytes of one scheme on a model. settings: as rows have them."""

    name: str
    stored_bits: float
    load: Load
    settings: Settings

    def used(self, batch: int, length: int) -> float:
        """Bytes that `batch` rows of so many tokens need: of a decode step, or of their prompts in chunks."""
        return self.load.peak(batch, length, planning.CHUNK)

    @property
    def fixed(self) -> float:
        """Bytes whatever the rows: weights, constants, the runtime and what the allocator rounds up."""
        return self.used(0, 1)

    def longest(self, memory: float, batch: int) -> int:
        """Tokens that each of `batch` rows can have in so many bytes, at most the model's context."""
        context = self.load.model.geometry.context
        return planning.largest(lambda length: self.used(batch, length) <= memory, context)

    def largest_batch(self, memory: float, length: int) -> int:
        return planning.largest(lambda batch: self.used(batch, length) <= memory, MOST_ROWS)


def footprints(
    geometry: Geometry, schemes: Sequence[Benched], dtype: torch.dtype, device: Device | None = None
) -> list[Footprint]:
    """The model's dtype first, then each scheme. device: None for one with kernels."""
    decodes_all = dtype not in SIXTEEN or (device is not None and device.why_no_triton is not None)
    width = dtype.itemsize
    model = Model(geometry, float(geometry.parameters * width), width)
    layers = geometry.layers - geometry.sliding_layers
    kind: Settings = {"dtype": str(dtype).removeprefix("torch.")}
    all_footprints = [Footprint("fp32" if width == 4 else "fp16", 8.0 * width, Load(model, Exact()), kind)]
    for one in schemes:
        windows = Exact(one.windows.sink, one.windows.recent, one.windows.block)
        blocks = layers * (one.codecs.key.block_bytes() + one.codecs.value.block_bytes())
        decodes = decodes_all or unreadable(one, one.codecs, geometry.heads // geometry.kv_heads) is not None
        load = Load(model, windows, blocks, constants(one, layers), decodes)
        all_footprints.append(Footprint(one.name, one.stored_bits, load, {**kind, **one.settings}))
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
        ends = {"note": "the model's own context"} if length == one.load.model.geometry.context else {}
        more: dict[str, Json] = {"longest_length": length, **ends, **vqkv_reference(model, one.name, gib, width)}
        rows.append(_row("longest-generation", model, one, batch, length, gib, device, **more))
    return rows


def projected_batch(model: str, every: Sequence[Footprint], length: int, gib: float, device: str) -> list[Row]:
    """The most rows of so many tokens each."""
    batches = [(one, one.largest_batch(gib * 2**30, length)) for one in every]
    return [_row("largest-batch", model, one, n, length, gib, device, largest_batch=n) for one, n in batches]


def too_large(model: str, geometry: Geometry, gib: float, width: int = 2) -> str | None:
    """What to say of a model whose weights do not fit so much memory; None where they do."""
    size = geometry.parameters * width / 2**30
    if size + planning.RUNTIME / 2**30 < gib:
        return None
    return f"{model} in {8 * width} bits does not fit its {gib:g} GiB: its weights alone take {size:.1f} GiB"


def too_much(every: Sequence[Footprint], gib: float, shapes: Sequence[tuple[int, int]]) -> list[str]:
    """What to say of each (batch, length) whose caches do not fit so much memory next to the model, under some schemes.
    Schemes whose weights, constants and runtime alone fill it are left out.
    """
    lines = []
    for batch, length in shapes:
        able = [one for one in every if one.fixed < gib * 2**30]
        beyond = [one for one in able if one.used(batch, length) > gib * 2**30]
        if beyond:
            which = "every scheme" if beyond == able else ", ".join(one.name for one in beyond)
            sizes = [one.used(batch, length) / 2**30 for one in beyond]
            needed = f"{min(sizes):,.1f} to {max(sizes):,.1f}" if len(sizes) > 1 else f"{sizes[0]:,.1f}"
            lines.append(f"the model with {batch} x {length:,} tokens does not fit {gib:g} GiB: {which}, {needed} GiB")
    return lines[:2] + ([f"nor do {len(lines) - 2} more of these batches and lengths"] if len(lines) > 2 else [])


def _row(
    operation: str, model: str, one: Footprint, batch: int, length: int, gib: float, device: str, **more: Json
) -> Row:
    layer = ", one decoded layer" if one.load.decodes else ""
    why = None if gib * 2**30 > one.fixed else f"weights, constants and runtime alone take {one.fixed / 2**30:.1f} GiB"
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
        path=f"projected: weights, cache{layer}, constants, activations, runtime",
        refused=why,
        **one.settings,
        more={"memory_gib": gib, "fixed_bytes": round(one.fixed), **more},
    )


PAPER_GIB = 40


def vqkv_reference(model: str, name: str, gib: float, width: int) -> dict[str, Json]:
    """The paper's figure, where the run is like the paper's: Llama-3.1-8B in float32 on 40 GB. width: bytes of a
    weight.
    """
    if (model, math.ceil(gib), width) != ("llama-3.1-8b", PAPER_GIB, 4):  # of 40 GiB CUDA reports 39.5
        return {}
    kind = "vqkv" if name.startswith("vqkv") else "full" if name == "fp32" else None
    return {} if kind is None else {"paper_longest": paper.VQKV_LONGEST[kind]}
