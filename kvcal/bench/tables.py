"""Operations of the papers' tables: InnerQ 5 and 6, MixKVQ 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import MixKVQ, Uniform
from kvcal_artifacts.codecs.base import Packed
from kvcal_kernels.layout import Form, pack_scales, unpack_scales

from . import paper, quantising
from .layer import Case, fill, nbytes
from .operation import APART, Prepared, alike, bytes_of, misencoded, needs_blocks, one_block, packed_blocks

MIXKVQ = "MixKVQ Table 7"


def quantise_step(case: Case) -> Prepared:
    """One block of every row, over the tokens of a block: what a decode step spends on quantising (InnerQ Table 5)."""
    block = one_block(case)
    rules = quantising.block_rules(block)
    if not isinstance(rules, str):
        return _per_step(case, quantising.by_kernel(block, rules), slice(0, 2))
    filled = fill(block)
    by, path = quantising.encoders(block, filled.codecs)
    size = sum(nbytes(x) for x in filled.raw) + filled.packed_bytes + filled.book_bytes
    prepared = Prepared(lambda: filled.encoded(filled.raw, by), size, lambda: misencoded(filled, by), path)
    return _per_step(case, prepared, slice(0, 2))


def quantise_step_of(role: int) -> Callable[[Case], Prepared]:
    """Its keys (0) or its values (1) alone, by the codec: the kernel that quantises both does so in one launch."""

    def build(case: Case) -> Prepared:
        filled = fill(one_block(case))
        by, _ = quantising.encoders(filled.case, filled.codecs)
        context = filled.encoding
        if "k0" in filled.pair[role].needs:
            context = replace(context, k0=filled.decoded()[0])
        codec, raw = (by.key, by.value)[role], filled.raw[role]
        path = quantising.encodes(codec, case.device)
        size = nbytes(raw) + bytes_of(filled.packed[role]) + filled.book_bytes_of(role)
        prepared = Prepared(lambda: codec.encode(raw, context), size, lambda: misencoded(filled, by), path)
        return _per_step(case, prepared, slice(role, role + 1))

    return build


def _per_step(case: Case, prepared: Prepared, roles: slice) -> Prepared:
    """The time of a block as that of one step, with the paper's figure next to it. prepared: of a block. roles: of the
    paper's columns.
    """
    block = case.scheme.windows.block
    more: dict[str, Json] = {"calls": f"one in {block} steps", "paper_table": "InnerQ Table 5"}
    if case.scheme.name in paper.TABLE_5 and case.batch == 1:
        more["paper_microseconds"] = round(sum(paper.TABLE_5[case.scheme.name][roles]), 1)
        more["paper_device"] = "Jetson Xavier NX"
    return replace(prepared, bytes=round(prepared.bytes / block), per=block, more=more)


def hybrid_share(percent: int) -> Callable[[Case], Prepared]:
    """InnerQ Table 6: decode the hybrid values and multiply them with one row of weights, so many groups being
    symmetric.
    """

    def build(case: Case) -> Prepared:
        filled = fill(case)
        values = filled.codecs.value
        assert isinstance(values, Uniform)
        packed = dict(filled.packed[1])
        generator = torch.Generator(case.device).manual_seed(case.seed)
        packed["scale"] = _with_share(values, packed, percent, generator)
        tokens = packed_blocks(case) * case.scheme.windows.block
        weights = torch.rand(
            case.batch,
            case.geometry.kv_heads,
            case.group,
            tokens,
            generator=generator,
            device=case.device,
            dtype=torch.float32,
        ).to(case.dtype)

        def run() -> Tensor:
            return weights @ values.decode(packed).to(case.dtype)

        def check() -> str | None:
            output, exact = run().double(), weights.double() @ _hybrid_numbers(values, packed)
            off = float((output - exact).abs().max() / exact.abs().max())
            allowed = 8 * float(torch.finfo(case.dtype).eps)
            return None if off <= allowed else f"check failed: off by {off:.2g}, allowed {allowed:.2g}"

        share = 100 * values.symmetric_share(packed)
        more: dict[str, Json] = {"symmetric_percent": round(share, 2), "paper_table": "InnerQ Table 6"}
        if case.length in paper.TABLE_6[percent] and case.batch == 1:
            more |= {"paper_microseconds": paper.TABLE_6[percent][case.length], "paper_device": "Jetson Xavier NX"}
        size = sum(nbytes(t) for t in packed.values())
        return Prepared(run, size, check, "reference: decode, then multiply", more=more)

    return build


def _with_share(values: Uniform, packed: Packed, percent: int, generator: torch.Generator) -> Tensor:
    """Stored scales of which so many groups are symmetric, at random."""
    fused = isinstance(values.fused(), Form)
    scale = packed["scale"].abs()
    if fused:
        blocks = values.as_blocks(packed)
        scale = unpack_scales(blocks.scale, blocks.form)[0]
    shifted = torch.rand(scale.shape, generator=generator, device=scale.device, dtype=torch.float32) * 100 >= percent
    if not fused:
        return torch.where(shifted, -scale, scale)
    lowest = -(2.0 ** (values.bits - 1)) * scale
    return pack_scales(scale, torch.where(shifted, lowest / 2, lowest), blocks.form).view_as(packed["scale"])


def _hybrid_numbers(values: Uniform, packed: Packed) -> Tensor:
    """What packed values stand for, from codes, scales and zero points: (B, H, T, D) float64."""
    codes, scale, base = values.groups(packed)
    assert base is not None
    step, zero = (x.double().repeat_interleave(values.group, -1) for x in (scale, base))
    if values.axis == "token":
        step, zero = step.transpose(-1, -2), zero.transpose(-1, -2)
    if not isinstance(values.fused(), Form):  # a set sign of the scale: asymmetric
        zero = torch.where(torch.signbit(step), zero, zero - 2.0 ** (values.bits - 1) * step.abs())
    return (codes.double() * step.abs() + zero).flatten(2, 3)


def needs_hybrid(case: Case) -> str | None:
    values = case.scheme.codecs.value
    hybrid = isinstance(values, Uniform) and values.mode == "hybrid"
    return needs_blocks(case) if hybrid else "the values of this scheme are not hybrid (InnerQ Hybrid's are)"


def channel_selection(case: Case) -> Prepared:
    """MixKVQ: salience and tiers of one block of every row, over the tokens of a block (Table 7)."""
    filled = fill(one_block(case))
    by, _ = quantising.encoders(filled.case, filled.codecs)
    codec, plain, block = by.key, filled.codecs.key, case.scheme.windows.block
    assert isinstance(codec, MixKVQ) and isinstance(plain, MixKVQ)
    keys = filled.raw[0]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return codec.chosen(keys, filled.encoding)

    def check() -> str | None:
        perm, first, second = output = run()
        whole = bool((perm.sort(-1).values == torch.arange(perm.shape[-1], device=perm.device)).all())
        if not whole or not bool((first <= second).all()):
            return "check failed: channels are not a permutation in tiers"
        expected = plain.tiers(plain.salience(keys, filled.encoding))
        same = all(alike(a, b, APART) for a, b in zip(output, expected, strict=True))
        return None if same else "check failed: channels are in other tiers than torch finds"

    path = "triton: select" if codec.encodes_by_kernel else "reference"
    more = {"calls": f"one in {block} steps", "paper_table": MIXKVQ}
    return Prepared(run, round(nbytes(keys) / block), check, path, per=block, more=more)


def mlp(case: Case) -> Prepared:
    """The gated feed-forward part of one layer at one token a row, random weights: next to attention in MixKVQ's Table
    7.
    """
    hidden, wide = case.geometry.hidden, case.geometry.intermediate
    generator = torch.Generator(case.device).manual_seed(case.seed)

    def weight(rows: int, columns: int) -> Tensor:
        wide: Tensor = (
            torch.randn(rows, columns, generator=generator, device=case.device, dtype=torch.float32) / columns**0.5
        )
        return wide.to(case.dtype)

    gate, up, down = weight(wide, hidden), weight(wide, hidden), weight(hidden, wide)
    x = torch.randn(case.batch, hidden, generator=generator, device=case.device, dtype=torch.float32).to(case.dtype)

    def forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(x @ gate.T)
        out = out * (x @ up.T)
        return out @ down.T

    def check() -> str | None:
        """Check every row; x is small next to the weights."""
        exact = forward(*(t.double() for t in (x, gate, up, down)))
        off = float((forward(x, gate, up, down).double() - exact).abs().max() / exact.abs().max())
        allowed = 16 * float(torch.finfo(case.dtype).eps)
        return None if off <= allowed else f"check failed: off by {off:.2g}, allowed {allowed:.2g}"

    size = sum(nbytes(t) for t in (gate, up, down))
    return Prepared(
        lambda: forward(x, gate, up, down),
        size,
        check,
        "torch",
        flops=2.0 * case.batch * 3 * hidden * wide,
        bounded=case.device.type == "cuda" or case.dtype == torch.float32,  # a CPU may be faster in 16 bits
    )


def no_scheme(case: Case) -> str | None:
    return "it is the same for all schemes"


def needs_tiers(case: Case) -> str | None:
    return None if isinstance(case.scheme.codecs.key, MixKVQ) else "only MixKVQ selects channels"
