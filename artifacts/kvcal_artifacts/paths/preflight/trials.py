"""Kernels on small random data against their references: None where they agree, or by how much they do not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvcal_kernels import attention, dequantise, layout
from kvcal_kernels.attention import reference
from kvcal_kernels.dequantise import Rotation
from kvcal_kernels.device import interpreted
from kvcal_kernels.layout import BLOCK, Form, TransformBlocks, TransformForm

from ...codecs import Codec, Context
from ...codecs.base import CONTEXT_TENSORS
from ...codecs.dequantise import Dequantiser

BLOCKS = (9, 0, 4)  # packed blocks of the rows that are tried: several programs, none, one iteration of a program
SINK, RECENT = (4, 2, 4), (131, 17, 40)
CALLS = ((1, False), (1, True), (3, True), (16, False))  # new tokens, and whether recent ones lie in a ring
OF_TIERS = ((1, False), (3, False))  # each compiles for 80 s; tiers come in caches without a ring
# Threads in which kernels are compiled.
COMPILERS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
ROWS = (512, 832)  # tokens that the kernel that dequantises is tried on: whole tiles of it, and not

R = TypeVar("R")


def in_threads(calls: Sequence[Callable[[], R]], device: torch.device) -> list[R]:
    """What the calls return, each of which may compile a kernel: on a GPU in threads, on the current stream. Triton
    compiles outside of Python for nine tenths of the time.
    """
    if device.type != "cuda" or len(calls) < 2 or interpreted():  # which changes Triton's functions as a kernel runs
        return [call() for call in calls]
    stream, modes = torch.cuda.current_stream(device), (torch.is_inference_mode_enabled(), torch.is_grad_enabled())

    def called(call: Callable[[], R]) -> R:
        with torch.cuda.stream(stream), torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):
            return call()

    with ThreadPoolExecutor(min(len(calls), COMPILERS)) as threads:
        return list(threads.map(called, calls))


@dataclass(frozen=True)
class _Tokens:
    """Random exact tokens of the rows that are tried, drawn in the order in which they are asked for."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def random(self, heads: int, tokens: int) -> Tensor:
        size = (len(BLOCKS), heads, tokens, self.dim)
        return torch.randn(size, generator=self.generator, device=self.device, dtype=torch.float32).to(self.dtype)

    def counts(self, numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def sink(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._exact(max(SINK), SINK)

    def recent(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._exact(-(-max(RECENT) // BLOCK) * BLOCK, RECENT)

    def _exact(self, tokens: int, counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        return self.random(self.heads, tokens), self.random(self.heads, tokens), self.counts(counts)


def trial(
    keys: Form, values: Form, heads: int, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0
) -> str | None:
    """Try the attention kernel on random rows of different lengths: None, or how far it is from the float32 reference.

    Allowed is four times the rounding of the dtype: of the output, of probabilities and of queries (2 were measured).
    """
    generator = torch.Generator(device).manual_seed(0)
    each = max(keys.scale_blocks, values.scale_blocks)
    key_blocks = _blocks(keys, heads, each, None, device, generator)
    pair = key_blocks, _blocks(values, heads, each, key_blocks.grid, device, generator)
    tokens = _Tokens(heads, keys.dim, dtype, device, generator)
    blocks, sink, recent = tokens.counts(BLOCKS), tokens.sink(), tokens.recent()
    rope = _rope(rotary, sink[0].shape[2], key_blocks.words.shape[2], recent[0].shape[2], device) if rotary else None
    calls, expected, names = [], [], []
    for queries, ring in OF_TIERS if keys.tiered else CALLS:
        q, scaling = tokens.random(heads * ratio, queries), keys.dim**-0.5
        packed_q = (
            None
            if rotary
            else (q.float() * torch.linspace(0.5, 2, keys.dim, device=device, dtype=torch.float32)).to(dtype)
        )
        arguments = *pair, blocks, sink, recent, scaling
        right = reference.attend(q.float(), *arguments, None if packed_q is None else packed_q.float(), ring, rope)
        for launch in attention.fast().launches(keys, values, ratio * queries, rotary > 0):
            attend = partial(attention.fast().attend, q, *arguments, launch)
            calls.append(partial(attend, packed_q=packed_q, ring=ring, rope=rope))
            expected.append(right)
            names.append(f"{queries} new tokens{' behind a ring' if ring else ''}, warps a program {launch.warps}")
    return _first_apart(in_threads(calls, device), expected, names, dtype)


def _first_apart(
    actual: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str], dtype: torch.dtype
) -> str | None:
    every = zip(actual, expected, names, strict=True)
    return next((why for one, right, name in every if (why := apart(one, right, dtype, name))), None)


def transform_trial(
    keys: TransformForm, values: TransformForm, heads: int, ratio: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Try the transform codec's attention kernel as `trial` tries the others: None, or how far it is off."""
    generator = torch.Generator(device).manual_seed(0)
    points = {
        b: torch.randn(1 << 2 * b, 2, generator=generator, device=device, dtype=torch.float32).half().float()
        for b in (4, 3, 2)
    }
    points[1] = torch.tensor([[-0.75], [0.75]], dtype=torch.float32, device=device)
    pair = (
        _coordinates(keys, heads, points, device, generator),
        _coordinates(values, heads, points, device, generator),
    )
    tokens = _Tokens(heads, keys.dim, dtype, device, generator)
    blocks, sink, recent = tokens.counts(BLOCKS), tokens.sink(), tokens.recent()
    calls, expected, names = [], [], []
    for queries, ring in CALLS:
        q, arguments = tokens.random(heads * ratio, queries), (*pair, blocks, sink, recent, keys.dim**-0.5)
        calls.append(partial(attention.transform().attend, q, *arguments, ring=ring))
        expected.append(reference.attend(q.float(), *arguments, ring=ring))
        names.append(f"{queries} new tokens{' behind a ring' if ring else ''}")
    return _first_apart(in_threads(calls, device), expected, names, dtype)


def _coordinates(
    form: TransformForm, heads: int, points: dict[int, Tensor], device: torch.device, generator: torch.Generator
) -> TransformBlocks:
    """Random blocks of a random basis, numbers of variance about 1."""

    def bytes_of(*size: int) -> Tensor:
        return torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    rows = len(BLOCKS), heads, max(BLOCKS)
    codes = tuple(
        bytes_of(*rows, *((2 * count, 4) if bits == 1 else (count, layout.transform.PAIR_BYTES[bits])))
        for bits, count in form.tiers
    )
    decoder = (normal(heads, form.dim, form.dim) * form.dim**-0.5).half()
    basis = layout.Basis(decoder, (normal(heads, form.dim) / 2).half(), points, dict.fromkeys(points, 1.25))
    norm = torch.rand(len(BLOCKS), 1, max(BLOCKS), BLOCK, generator=generator, device=device, dtype=torch.float32) + 0.5
    return TransformBlocks(form, codes, norm.half(), basis)


def _rope(rotary: int, sink: int, blocks: int, recent: int, device: torch.device) -> layout.Rope:
    """RoPE of rows that begin at different positions."""
    speed = 1e4 ** -(torch.arange(0, rotary, 2, dtype=torch.float32, device=device) / rotary)
    start = torch.arange(len(BLOCKS), device=device) * 1000
    first = layout.rope.first_positions(start, sink, blocks, recent)[..., None] * speed
    close = torch.arange(BLOCK, device=device)[:, None] * speed
    return layout.Rope(torch.stack([first.cos(), first.sin()], -2), layout.rope.near(close.cos(), close.sin()))


def apart(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> str | None:
    """How far two results are apart, in words, if that is more than the rounding of the dtype explains."""
    off = float((actual.double() - expected.double()).norm() / expected.double().norm())
    allowed = 4 * torch.finfo(dtype).eps
    return None if off <= allowed else f"{what}: off by {off:.2g} of the reference, allowed {allowed:.2g}"


def _blocks(
    form: Form, heads: int, each: int, twin: layout.Grid | None, device: torch.device, generator: torch.Generator
) -> layout.Blocks:
    """Random blocks, a multiple of `each`, of numbers of variance about 1.

    twin: the grid of keys, which values share if they can.
    """
    tokens = -(-max(BLOCKS) // each) * each * BLOCK

    def codes(high: int, count: int) -> Tensor:
        size = (len(BLOCKS), heads, tokens, count)
        return torch.randint(0, high, size, generator=generator, device=device)

    def noise(*size: int) -> Tensor:
        return torch.rand(len(BLOCKS), *size, generator=generator, device=device, dtype=torch.float32)

    if form.vector:
        grid = _grid(form, heads, twin, device, generator)
        norm = (noise(heads // form.norm_heads, tokens, 1) + 0.5).half()
        return layout.pack(codes(len(grid.points), form.dim // form.vector), norm, None, form, grid)
    along = (tokens // form.group, form.dim - form.full) if form.along_tokens else (tokens, form.dim // form.group)
    scale, zero = (noise(heads, *along) + 0.5) * 3.4 / (1 << form.bits), noise(heads, *along).half() - 2.2
    if not form.tiered:
        return layout.pack(codes(1 << form.bits, form.dim), scale.half(), None if form.symmetric else zero, form)
    scale[..., : form.four] /= 4
    exact = (noise(heads, tokens, form.full) * 3.4 - 1.7).half()
    order = noise(heads, tokens // form.group, form.dim).argsort(-1)
    lower = codes(16, form.four), codes(4, form.dim - form.full - form.four)
    return layout.pack_tiers(exact, *lower, scale.half(), zero, order, form)


def _grid(
    form: Form, heads: int, twin: layout.Grid | None, device: torch.device, generator: torch.Generator
) -> layout.Grid:
    """Random signs, and points of float16 in no order: codes here are not those of Gaussian numbers.

    Points of a grid in bytes are multiples of a step.
    """
    size = (1 << form.bits * form.vector, form.vector)
    drawn = torch.randn(size, generator=generator, device=device, dtype=torch.float32).half().float()
    if form.in_bytes:
        most = layout.grids.LARGEST
        drawn = (drawn / drawn.abs().max() * most).round() / 64
    sign = torch.randint(0, 2, (heads, form.dim), generator=generator, device=device) * 2 - 1
    points = drawn if twin is None or twin.points.shape != size else twin.points
    return layout.grid_of(points, sign, form.bits, twin, form.in_bytes)


def dequantise_trial(
    codec: Codec, dtype: torch.dtype, rotary: int, device: torch.device, by: str = "auto", sizes: tuple[int, ...] = ROWS
) -> str | None:
    """Try the kernel on random blocks and inputs against the codec in float32, as often as the kernel is compiled."""
    generator, shape, codec = torch.Generator(device).manual_seed(0), codec.shape, codec.to(device)
    kernel = Dequantiser(codec, dtype, rotary, by)
    for rows in sizes:
        size = (2, shape.heads, max(1, rows // (2 * shape.block)) * shape.block, shape.dim)
        x, *inputs = (
            torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype) for _ in range(6)
        )
        k1, v1, k2, v2, k0 = (
            tensor if name in codec.needs else None for name, tensor in zip(CONTEXT_TENSORS, inputs, strict=True)
        )
        context = Context(1, k1, v1, k2, v2, k0)
        packed = codec.encode(x, context)
        angle = (
            torch.rand(2, size[2], rotary // 2, generator=generator, device=device, dtype=torch.float32).repeat(1, 1, 2)
            * 6.28
        )
        rotation = Rotation(angle.cos(), angle.sin()) if rotary else None
        (actual, rotated), exact = kernel(packed, context, rotation), codec.decode(packed, context)
        why = apart(actual, exact, dtype, f"{rows} tokens")
        if rotation is not None and rotated is not None:
            why = why or apart(rotated, rotation(exact), dtype, f"{rows} tokens after RoPE")
        if why:
            return why
        if why := _misplaced(x, rotation, kernel):
            return why
    return None


def _misplaced(x: Tensor, rotation: Rotation | None, kernel: Dequantiser) -> str | None:
    """Try the kernel that writes exact tokens around packed ones, x (B, H, T, D) and RoPE of them, bit by bit."""
    parts = [[x[:, :, a:b], -x[:, :, a:b]] for a, b in ((0, 4), (4, 45), (45, 47))]
    first = rotation and Rotation(rotation.cos[:, :45], rotation.sin[:, :45])
    wholes = [[x.new_zeros(*x.shape[:2], 64, x.shape[3]) for _ in (0, 1)] for _ in (0, 1)]
    placing = dequantise if kernel.path == "reference" else dequantise.fast()
    for by, whole in zip((dequantise, placing), wholes, strict=True):
        by.place(whole, *parts, 8, first)
    same = all(torch.equal(a, b) for a, b in zip(*wholes, strict=True))
    return None if same else "exact tokens around the packed ones differ"
