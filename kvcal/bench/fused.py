"""Fused decode attention of kvcal_kernels.attention over uniform integers, grids and tiers, as an operation.

Packed tensors of the codecs are put into the order that the kernel reads, which no timed part of the operation does.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Higgs, MixKVQ, Uniform
from kvcal_artifacts.codecs.base import Packed
from kvcal_kernels.attention import Blocks, Form, Grid, pack, pack_tiers
from kvcal_kernels.packing import unpack

from .layer import Case, fill, nbytes
from .operation import Prepared, needs_blocks
from .peers import wrong


def refuses_fused(case: Case) -> str | None:
    """Why the kernel does not run for this case; None if it does."""
    if case.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a CUDA GPU"
    try:
        for codec in (case.scheme.codecs.key, case.scheme.codecs.value):
            form_of(codec)
    except ValueError as error:
        return str(error)
    return needs_blocks(case)


def fused_attention(case: Case) -> Prepared:
    """Scores, softmax and sums straight from packed codes; sink and recent tokens in the same launch."""
    from kvcal_kernels.attention import triton as kernel  # not installed everywhere

    filled, queries = fill(case), case.queries()
    keys = blocks_of(filled.pair[0], filled.packed[0])
    values = blocks_of(filled.pair[1], filled.packed[1], keys.grid)

    def rows(count: int) -> Tensor:
        return torch.full((case.batch,), count, dtype=torch.int32, device=case.device)

    sink, recent = ((k.contiguous(), v.contiguous(), rows(k.shape[2])) for k, v in (filled.sink, filled.window))
    blocks, space = rows(keys.words.shape[2]), kernel.Workspace(case.device)
    scaling = case.geometry.head_dim**-0.5

    def run() -> Tensor:
        return kernel.attend(queries, keys, values, blocks, sink, recent, scaling, None, space)

    size = sum(nbytes(t) for made in (keys, values) for t in (made.words, made.scale)) + filled.window_bytes
    return Prepared(
        run, size, lambda: wrong(run(), queries, *filled.materialised()), "triton: fused",
        more={"codec_bytes": filled.packed_bytes, "window_bytes": filled.window_bytes},
    )  # fmt: skip


def form_of(codec: Codec) -> Form:
    """The kernel's description of this storage; ValueError if it has none."""
    if isinstance(codec, Higgs):
        return codec.form()
    if isinstance(codec, MixKVQ):
        return _tier_form(codec)
    if not isinstance(codec, Uniform):
        raise ValueError(f"the fused kernel reads uniform integers, grids and tiers, not {codec.name}")
    inner = (codec.axis == "channel") == (codec.role == "key")
    return Form(codec.role, codec.shape.dim, codec.bits, codec.group, inner, codec.mode == "symmetric")


def blocks_of(codec: Codec, packed: Packed, twin: Grid | None = None) -> Blocks:
    """A codec's packed tensors in the kernel's order. twin: the keys' grid, for values. Hybrid groups become asymmetric: a
    symmetric group's zero point is what its lowest code stands for.
    """
    if isinstance(codec, Higgs):
        return codec.blocks(packed, twin)
    if isinstance(codec, MixKVQ):
        return _tiers_of(codec, packed)
    assert isinstance(codec, Uniform)
    count = codec.shape.block if codec.role == "value" else codec.shape.dim
    codes = unpack(packed["codes"], codec.bits, count)
    codes = codes.transpose(-1, -2) if codec.role == "value" else codes
    scale, base = packed["scale"], packed.get("min")
    if codec.mode == "hybrid":
        assert base is not None
        lowest = -(2 ** (codec.bits - 1)) * scale.abs()
        scale, base = scale.abs(), torch.where(torch.signbit(scale), base, lowest)

    def by_token(x: Tensor) -> Tensor:
        return (x.transpose(-1, -2) if codec.axis == "token" else x).flatten(2, 3).contiguous()

    zero = None if base is None else by_token(base)
    return pack(codes.flatten(2, 3), by_token(scale), zero, form_of(codec))


def _tier_form(codec: MixKVQ) -> Form:
    full, four = codec.full, codec.four
    if full is None or four is None or full + four == 0 or codec.group != codec.shape.block:
        raise ValueError(
            f"mixkvq, full {full}, four {four}, groups of {codec.group} in blocks of {codec.shape.block}: the kernel reads "
            "blocks of one group and of one size, some channels of which are in the upper tiers"
        )
    return Form("key", codec.shape.dim, 2, codec.group, False, False, full=full, four=four)


def _tiers_of(codec: MixKVQ, packed: Packed) -> Blocks:
    """Exact channels in float16: those of bfloat16 models keep their values between 2^-14 and 65504."""

    def by_token(rows: Tensor) -> Tensor:
        return rows.transpose(-1, -2).flatten(2, 3)

    block = codec.shape.block
    four, two = (by_token(unpack(packed[f"{name}_codes"], bits, block)) for name, bits in (("four", 4), ("two", 2)))
    scale, zero = torch.cat([packed["four_scale"], packed["two_scale"]], 3)[..., 0, :].unbind(-1)
    return pack_tiers(by_token(packed["raw"]).half(), four, two, scale, zero, packed["perm"], _tier_form(codec))
