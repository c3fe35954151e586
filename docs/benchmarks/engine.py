"""A decoding loop of our own over kvcal's pages, in place of an engine's: capacity, tokens per second, time to first token.

PYTHONPATH=.:kernels:artifacts:serving python docs/benchmarks/engine.py [--out DIR] [--length 4096] [--batches 1,8,32,...]
PYTHONPATH=.:kernels:artifacts:serving python docs/benchmarks/engine.py --dry-run      (on a CPU, tiny, by the references)

This is not vLLM: no scheduler, no sampling but the likeliest token, no server. A decoder of Llama-3.1-8B's geometry with
random weights in FP16 (RMSNorm, RoPE, gated MLP, embedding and head) takes one step at a fixed length again and again:
each row's new token is stored in its last place and attends to all `length` tokens, random ones. On a GPU a step is one
CUDA graph. Where a step cannot be captured, the row says so and why.

FP16 is torch's scaled_dot_product_attention over contiguous tensors, the query heads of a kv head as rows of one
product. FP8 stores e4m3 and converts a layer to FP16 before that product, because torch has no attention over FP8: its
capacity is an engine's, its speed is not. The others are kvcal's pages as its plug-in for vLLM
stores and reads them (kvcal_vllm.gpu), its work on the host before each step included; a format whose kernels do not
agree with the reference in paged_attention.py is not timed.

Capacity: tokens that fit beside the weights in 0.9 of the GPU's memory. Saturation: the best of `batches` that fit at
this length. Time to first token: a cold prompt of `length` tokens, alone, that attends to its own exact keys and values
and stores them, eagerly.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import paged_attention as paged
import torch
from torch import Tensor
from torch.nn import functional

from kvcal_artifacts.codecs import Role, Shape, Transform
from kvcal_artifacts.files import write_atomically
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import BLOCK
from kvcal_vllm import presets
from kvcal_vllm.attention import Step as HostStep
from kvcal_vllm.attention import attend
from kvcal_vllm.gpu.layer import Scratch, layer_on
from kvcal_vllm.gpu.step import step_of
from kvcal_vllm.paging import PagedLayer

PACKED = {4: ("transform 4.0", "HIGGS 4"), 3: ("transform 3.0",), 2: ("transform 2.0", "HIGGS 2")}  # by bits
FORMATS = ("FP16", "FP8", *(name for names in PACKED.values() for name in names))
SHARE = 0.9  # of the GPU's memory for weights and cache
ROLES: tuple[Role, Role] = ("key", "value")
TEMPLATE = 64  # random pages that all others are copies of


@dataclass(frozen=True)
class Geometry:
    """A decoder's sizes. ratio: query heads of a kv head."""

    layers: int
    heads: int
    ratio: int
    dim: int
    hidden: int
    inner: int
    vocabulary: int


LLAMA = Geometry(32, 8, 4, 128, 4096, 14336, 128256)
TINY = Geometry(2, 2, 2, 128, 256, 512, 300)


class Cache(Protocol):
    """Keys and values of all layers at a fixed length. rows: of the batch."""

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the newest token of each row, or all tokens of the only row: k, v (T, H, D)."""

    def step(self) -> None:
        """What the host does before each step."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention (B, Hq, D) of each row's newest token, q (B, Hq, D), over all tokens."""


class Contiguous:
    """FP16, or FP8 that is converted before use."""

    def __init__(self, g: Geometry, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (g.layers, 2, batch, g.heads, length, g.dim)
        self._stored = torch.empty(shape, dtype=dtype, device=device)
        for layer in self._stored:
            layer.copy_(torch.randn(layer.shape, dtype=torch.float16, device=device))
        self._g, self._batch = g, batch

    @staticmethod
    def token_bytes(g: Geometry, dtype: torch.dtype) -> int:
        return 2 * g.layers * g.heads * g.dim * dtype.itemsize

    def step(self) -> None:
        pass

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        for part, x in zip(self._stored[layer], (k, v), strict=True):
            if len(k) == self._batch:
                part[:, :, -1] = x.to(part.dtype)
            else:
                part[0] = x.transpose(0, 1).to(part.dtype)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        k, v = (part.to(q.dtype) for part in self._stored[layer])
        rows = q.unflatten(1, (self._g.heads, self._g.ratio))
        return functional.scaled_dot_product_attention(rows, k, v).flatten(1, 2)


def codecs_of(name: str, g: Geometry) -> LayerCodecs:
    """The codecs of a format: a preset's, or coordinates of a random basis."""
    shape = Shape(g.heads, g.dim, BLOCK)
    scheme, _, bits = name.partition(" ")
    if scheme == "HIGGS":
        return presets.codecs(f"higgs-{bits}", shape)
    counts = [(b, 2 * pairs) for b, pairs in zip((4, 3, 2, 1), paged.MIXES[float(bits)], strict=True)]
    each = [b for b, count in counts for _ in range(count)]
    basis = torch.linalg.qr(torch.randn(g.heads, g.dim, g.dim))[0]
    key, value = (Transform(shape, role, each + [0] * (g.dim - len(each)), basis) for role in ROLES)
    return LayerCodecs(key, value)


class Packed:
    """kvcal's pages, in random order, as the plug-in for vLLM stores and reads them: `step` is what vLLM's metadata becomes,
    then come its calls for a layer. On a CPU they are those of the plug-in there.
    """

    def __init__(self, g: Geometry, batch: int, length: int, name: str, device: torch.device) -> None:
        self._paged, self._scale, self._on_gpu = PagedLayer(codecs_of(name, g), 2), g.dim**-0.5, device.type == "cuda"
        self._layer, self._scratch = (layer_on(self._paged, device), Scratch(device)) if self._on_gpu else (None, None)
        count = -(-length // BLOCK)
        template = torch.zeros(TEMPLATE, g.heads, BLOCK, self._paged.token_bytes, dtype=torch.uint8, device=device)
        self._pages = [template]
        k, v = (torch.randn(TEMPLATE * BLOCK, g.heads, g.dim, device=device).half() for _ in ROLES)
        self._store(0, torch.arange(TEMPLATE * BLOCK, device=device), k, v)
        self._pages = [
            template[torch.randint(TEMPLATE, (batch * count,), device=device)].contiguous() for _ in range(g.layers)
        ]
        self._table = torch.randperm(batch * count, device=device).view(batch, count).int()
        self._lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._host = list(range(batch + 1)), [length] * batch
        places = torch.arange(length, device=device)
        slots = self._table[:, places // BLOCK].long() * BLOCK + places % BLOCK
        self._last, self._all = slots[:, -1].contiguous(), slots[0].contiguous()
        self.step()

    @staticmethod
    def token_bytes(g: Geometry, name: str) -> int:
        return g.layers * g.heads * PagedLayer(codecs_of(name, g), 2).token_bytes

    def step(self) -> None:
        """What the plug-in does on the host before each step."""
        starts, lengths = self._host
        self._step = step_of(self._table, self._lengths, self._starts, starts, lengths, len(lengths), 1, max(lengths))

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._store(layer, self._last if len(k) == len(self._last) else self._all, k, v)

    def _store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        (self._layer or self._paged).store(self._pages[layer], slots, k, v)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        if self._layer is None or self._scratch is None:
            starts, lengths = self._host
            step = HostStep(tuple(starts), tuple(lengths), self._table.long())
            return attend(self._paged, self._pages[layer], step, q, self._scale).to(q.dtype)
        out = torch.empty_like(q)
        self._layer.decode(self._pages[layer], self._step, q, self._scale, self._scratch, out)
        return out


class Decoder:
    """Llama's layers with random weights, whose outputs mean nothing."""

    def __init__(self, g: Geometry, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.float16, device=device).normal_(std=columns**-0.5)

        self.g, self.device = g, device
        wide = (g.heads * g.ratio + 2 * g.heads) * g.dim
        self.layers = [
            (weight(wide, g.hidden), weight(g.hidden, g.heads * g.ratio * g.dim), weight(2 * g.inner, g.hidden),
             weight(g.hidden, g.inner), *(torch.ones(g.hidden, dtype=torch.float16, device=device) for _ in (0, 1)))
            for _ in range(g.layers)
        ]  # fmt: skip
        self.embedding, self.head = weight(g.vocabulary, g.hidden), weight(g.vocabulary, g.hidden)
        self._frequencies = 5e5 ** (-torch.arange(0, g.dim, 2, device=device) / g.dim)

    @property
    def bytes(self) -> int:
        own = [x for layer in self.layers for x in layer] + [self.embedding, self.head]
        return sum(x.numel() * x.element_size() for x in own)

    def __call__(self, ids: Tensor, positions: Tensor, cache: Cache, prompt: bool = False) -> Tensor:
        """The likeliest next tokens (B,) of ids (B,), one new token a row; of ids (T,) of one prompt: of its last."""
        g, x = self.g, functional.embedding(ids, self.embedding)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos().half(), angles.sin().half()
        for index, (qkv, out, up, down, first, second) in enumerate(self.layers):
            parts = functional.linear(functional.rms_norm(x, (g.hidden,), first), qkv)
            q, k, v = parts.unflatten(1, (-1, g.dim)).split([g.heads * g.ratio, g.heads, g.heads], 1)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            cache.put(index, k, v)
            seen = self._own(q, k, v) if prompt else cache.attend(index, q)
            x = x + functional.linear(seen.flatten(1), out)
            gate, wide = functional.linear(functional.rms_norm(x, (g.hidden,), second), up).chunk(2, 1)
            x = x + functional.linear(functional.silu(gate) * wide, down)
        if prompt:
            x = x[-1:]
        return functional.linear(x, self.head).argmax(1)

    def _own(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of a prompt to itself."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def cache_of(name: str, g: Geometry, batch: int, length: int, device: torch.device) -> Cache:
    if name in ("FP16", "FP8"):
        return Contiguous(g, batch, length, torch.float16 if name == "FP16" else torch.float8_e4m3fn, device)
    return Packed(g, batch, length, name, device)


def token_bytes(name: str, g: Geometry) -> int:
    """Bytes of one token in all layers."""
    if name in ("FP16", "FP8"):
        return Contiguous.token_bytes(g, torch.float16 if name == "FP16" else torch.float8_e4m3fn)
    return Packed.token_bytes(g, name)


def captured(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], str]:
    """The step as a CUDA graph, or as it is and why."""
    if device.type != "cuda":
        return step, "no: CPU"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return step, f"no: {str(error).splitlines()[0]}"
    return graph.replay, "yes"


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of `repeats` calls, each waited for."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


@torch.inference_mode()
def cell_of(name: str, decoder: Decoder, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of one batch, and for one row the time to the first token."""
    g, device, length = decoder.g, decoder.device, options.length
    cache = cache_of(name, g, batch, length, device)
    ids = torch.randint(g.vocabulary, (batch,), device=device)
    positions = torch.full((batch,), length - 1, device=device)
    step, graph = captured(lambda: decoder(ids, positions, cache), device)
    cell: dict[str, Any] = {"batch": batch, "graph": graph}

    def whole() -> None:
        cache.step()
        step()

    cell["tokens_per_s"] = round(batch / seconds(whole, device, options.repeats), 1)
    if batch == 1:
        prompt, places = torch.randint(g.vocabulary, (length,), device=device), torch.arange(length, device=device)
        cell["first_token_s"] = round(seconds(lambda: decoder(prompt, places, cache, True), device, options.repeats), 4)
    return cell


def measure(name: str, decoder: Decoder, options: argparse.Namespace, capacity: int) -> dict[str, Any]:
    """One format: capacity, and a cell for each batch that fits."""
    cells = []
    for batch in options.batches:
        if batch * options.length > capacity:
            continue
        try:
            cells.append(cell_of(name, decoder, batch, options))
        except torch.OutOfMemoryError as error:  # what a step needs beside its cache did not fit
            cells.append({"batch": batch, "tokens_per_s": 0.0, "error": str(error).splitlines()[0]})
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "format": name,
        "token_bytes": token_bytes(name, decoder.g),
        "capacity_tokens": capacity,
        "length": options.length,
        "cells": cells,
        "saturation_tokens_per_s": max((cell["tokens_per_s"] for cell in cells), default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for engine.json")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each row, a multiple of 32")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")],
                        default="1,8,32,64,128,192,256,384", help="with commas between")  # fmt: skip
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS), help="with commas")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: shows that all of it runs")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if unknown := [name for name in options.formats if name not in FORMATS]:
        parser.error(f"no format {unknown[0]!r}: there are {', '.join(FORMATS)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU, and torch finds none here; --dry-run runs anywhere")
    g, device = (TINY, torch.device("cpu")) if options.dry_run else (LLAMA, torch.device("cuda"))
    if options.dry_run:
        options.length, options.batches, options.repeats = 64, [1, 2], 1
    if options.length % BLOCK or options.length < BLOCK:
        parser.error(f"--length {options.length}: must be a multiple of {BLOCK}")
    paged.HEADS, paged.RATIO, paged.DIM, paged.DEVICE = g.heads, g.ratio, g.dim, device
    failed = []
    if not options.dry_run:
        names = [name for name in options.formats if name in paged.FORMATS]
        errors = paged.errors_of(names, ["1", "store"], f"1x{options.length}", [])
        failed = [n for n, of in errors.items() if not all(e is not None and paged.within(e) for e in of.values())]
        print("errors against float32:", errors, flush=True)
    decoder = Decoder(g, device)
    memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else 1 << 30
    result = {
        "what": "a loop of our own, not vLLM; random weights", "dry_run": options.dry_run,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "weights_bytes": decoder.bytes, "not_timed": failed,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name in options.formats:
        if name in failed:
            continue
        capacity = int((SHARE * memory - decoder.bytes) // token_bytes(name, g))
        rows.append(measure(name, decoder, options, capacity))
        print(json.dumps(rows[-1]), flush=True)
        write_atomically(Path(options.out, "engine.json"), json.dumps(result | {"rows": rows}, indent=1).encode())


if __name__ == "__main__":
    main()
