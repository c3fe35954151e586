"""Quantise-and-pack and append by the kernels of kvcal_kernels.quantise, where they run and know the format."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_artifacts.fused import rule_of
from kvcal_artifacts.preflight import interpreted
from kvcal_kernels.attention import BLOCK, Blocks
from kvcal_kernels.quantise import AnyRule, Counts, Layer, Windows, blocks_for, reference

from .layer import Case, Filled, fill, nbytes
from .operation import Prepared, misread, one_block


def rules(case: Case) -> tuple[AnyRule, AnyRule] | str:
    """Of keys and values; else why the reference path is measured."""
    if case.device.type != "cuda" and not interpreted():
        return "the kernel needs a CUDA GPU"
    made = []
    for codec in (case.scheme.codecs.key, case.scheme.codecs.value):
        rule = rule_of(codec.to(case.device))
        if isinstance(rule, str):
            return rule
        made.append(rule)
    return made[0], made[1]


def factor_of(filled: Filled) -> Tensor | None:
    """What keys are divided by."""
    factor = filled.codecs.key.key_factor(filled.encoding)
    return None if factor is None else factor.contiguous()


def by_kernel(case: Case, own: tuple[AnyRule, AnyRule]) -> Prepared:
    """A prefill's packed tokens in one launch."""
    from kvcal_kernels.quantise import triton as kernel  # not installed everywhere

    filled = fill(case)
    raw, factor = [x.contiguous() for x in filled.raw], factor_of(filled)

    def run() -> tuple[Blocks, Blocks, Tensor]:
        return kernel.quantise(raw[0], raw[1], *own, factor)

    def check() -> str | None:
        keys, values, flags = run()
        if said := reference.check(flags, 0):
            return f"check failed: {said}"
        for row in {0, case.batch - 1}:
            for x, rule, made, by in zip(raw, own, (keys, values), (factor, None), strict=True):
                by = by[row, None] if by is not None and by.ndim == 4 else by
                wanted, _ = reference.quantise(x[row, None], rule, by)
                for name, some in (("words", made.words), ("scale", made.scale)):
                    if not torch.equal(some[row, None], getattr(wanted, name)):
                        return f"check failed: {name} of {rule.form.role}s differ from the reference's"
        return misread(filled, filled.decoded())

    return Prepared(run, sum(nbytes(x) for x in raw) + filled.packed_bytes, check, "triton: quantise")


def append_by_kernel(case: Case, own: tuple[AnyRule, AnyRule]) -> Prepared:
    """The steps of a block, one launch each: all but the last only write a new token, the last packs a block of every row."""
    from kvcal_kernels.quantise import triton as kernel

    new, windows = fill(one_block(case)), _windows(case)
    block, factor = windows.block, factor_of(new)
    idle, due = (Counts(case.batch, windows, case.device) for _ in range(2))
    one = torch.ones(case.batch, dtype=torch.int32, device=case.device)
    for counts, waiting in ((idle, 0), (due, block - 1)):
        counts.data[4], counts.data[6] = windows.sink, windows.recent + waiting
        kernel.advance(counts, one)
    layer = _filled_layer(case, new, windows, own)
    k, v = (x[:, :, :1].contiguous() for x in new.window)

    def run() -> None:
        for _ in range(block - 1):
            kernel.append(layer, idle, k, v, *own, factor)
        kernel.append(layer, due, k, v, *own, factor)

    def check() -> str | None:
        run()
        if said := reference.check(layer.flags, 0):
            return f"check failed: {said}"
        for codec, packed, made in zip(new.pair, new.packed, (layer.keys, layer.values), strict=True):
            wanted = codec.as_blocks(packed)
            for name in ("words", "scale"):
                one, other = getattr(made, name), getattr(wanted, name)
                off = int((one != other).sum())  # CUDA divides by a constant in its own way
                if off > one.numel() // 1000:
                    return f"check failed: {off} of {one.numel()} {name} of {codec.role}s differ from the codec's"
        for what, ring, x in zip(("keys", "values"), layer.recent, (k, v), strict=True):
            for slot in (windows.recent, windows.recent + block - 1):  # of `idle` and `due`
                if not torch.equal(ring[:, :, slot], x[:, :, 0]):
                    return f"check failed: the window's token {slot} of {what} is not the one that came"
        return misread(new, new.decoded())

    size = sum(nbytes(x) for x in new.raw) + new.packed_bytes + 4 * block * (nbytes(k) + nbytes(v)) // 2
    return Prepared(
        run, round(size / block), check, "triton: append", per=block, more={"calls": f"one packs in {block} steps"}
    )


def _windows(case: Case) -> Windows:
    own = case.scheme.windows
    return Windows(own.sink, own.recent, own.block)


def _filled_layer(case: Case, new: Filled, windows: Windows, own: tuple[AnyRule, AnyRule]) -> Layer:
    """Room for one block; its tokens are the ring's oldest, with the others behind them."""
    shape = (case.batch, case.geometry.kv_heads)
    room = windows.room(1)
    rings, sinks, stored = [], [], []
    for raw, window, rule in zip(new.raw, new.window, own, strict=True):
        ring = torch.cat([raw, window], 2)
        rings.append(torch.nn.functional.pad(ring, (0, 0, 0, room - ring.shape[2])).contiguous())
        sinks.append(torch.zeros(*shape, max(windows.sink, 1), raw.shape[3], dtype=case.dtype, device=case.device))
        stored.append(blocks_for(rule, *shape, windows.block // BLOCK, case.device))
    flags = torch.zeros(shape[1], dtype=torch.int32, device=case.device)
    return Layer(stored[0], stored[1], (sinks[0], sinks[1]), (rings[0], rings[1]), flags)
