"""Fused decode attention of kvcal_kernels.attention over uniform integers, grids and tiers, as an operation.

Integers and grids lie as the kernel reads them. Packed tensors of tiers are put into its order, which no timed part does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, MixKVQ
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.errors import KernelsUnavailable
from kvcal_artifacts.fused import absence, queries_for
from kvcal_kernels.attention import Blocks, Form, pack_tiers
from kvcal_kernels.packing import unpack

from ..catalogue import Geometry
from .layer import Case, fill, nbytes
from .operation import Prepared, needs_blocks
from .peers import wrong
from .schemes import Benched


def refuses_fused(case: Case) -> str | None:
    """Why the kernel does not run for this case; None if it does."""
    if case.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a CUDA GPU"
    return _unreadable(case.scheme) or needs_blocks(case)


def _unreadable(one: Benched) -> str | None:
    for codec in (one.codecs.key, one.codecs.value):
        try:
            form_of(codec)
        except ValueError as error:
            return f"{codec.role}s: {error}"
    return "keys before RoPE: the fused kernel does not rotate" if one.frame == "pre_rope" else None


def require_fused(schemes: Sequence[Benched], geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
    """Raises KernelsUnavailable naming the first scheme that the kernel does not serve on this device."""
    for one in schemes:
        ratio = geometry.heads // geometry.kv_heads
        stored = all(isinstance(codec.fused(), Form) for codec in (one.codecs.key, one.codecs.value))
        why = _unreadable(one) or (absence("auto", one.codecs, ratio, dtype, device) if stored else None)
        if why:
            raise KernelsUnavailable(f"--require-kernels, scheme {one.name}: {why}; use another scheme or device")


def fused_attention(case: Case) -> Prepared:
    """Scores, softmax and sums straight from packed codes; sink and recent tokens in the same launch."""
    from kvcal_kernels.attention import triton as kernel  # not installed everywhere

    filled, queries = fill(case), case.queries()
    keys = blocks_of(filled.pair[0], filled.packed[0])
    values = blocks_of(filled.pair[1], filled.packed[1])

    def rows(count: int) -> Tensor:
        return torch.full((case.batch,), count, dtype=torch.int32, device=case.device)

    sink, recent = ((k.contiguous(), v.contiguous(), rows(k.shape[2])) for k, v in (filled.sink, filled.window))
    blocks, space = rows(keys.words.shape[2]), kernel.Workspace(case.device)
    scaling, factor = case.geometry.head_dim**-0.5, filled.codecs.key.key_factor(filled.decoding)

    def run() -> Tensor:
        packed_q = queries_for(queries, factor)
        return kernel.attend(queries, keys, values, blocks, sink, recent, scaling, None, space, packed_q)

    size = sum(nbytes(t) for made in (keys, values) for t in (made.words, made.scale)) + filled.window_bytes
    return Prepared(
        run, size, lambda: wrong(run(), queries, *filled.materialised()), "triton: fused",
        more={"codec_bytes": filled.packed_bytes, "window_bytes": filled.window_bytes},
    )  # fmt: skip


def form_of(codec: Codec) -> Form:
    """The kernel's description of this storage; ValueError if it has none."""
    if isinstance(codec, MixKVQ):
        return _tier_form(codec)
    if isinstance(form := codec.fused(), str):
        raise ValueError(form)
    return form


def blocks_of(codec: Codec, packed: Packed) -> Blocks:
    """A codec's packed tensors in the kernel's order."""
    return _tiers_of(codec, packed) if isinstance(codec, MixKVQ) else codec.as_blocks(packed)


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
