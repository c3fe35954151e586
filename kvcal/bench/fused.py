"""Fused decode attention of kvcal_kernels.attention over what codecs store in its order, as an operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal_artifacts import reconstructed
from kvcal_artifacts.errors import KernelsUnavailable
from kvcal_artifacts.fused import DTYPES_TAKEN, absence, queries_for, turn_refusal
from kvcal_artifacts.preflight import interpreted
from kvcal_kernels.attention import Rope
from kvcal_kernels.attention import rope as turning

from ..catalogue import Geometry
from .layer import Case, angles, fill
from .operation import Prepared, misattended, needs_blocks
from .peers import DTYPE_NAMES, SIXTEEN
from .schemes import Benched


def refuses_fused(case: Case) -> str | None:
    """Why the kernel does not run for this case; None if it does."""
    if case.device.type != "cuda" and not interpreted():
        return "needs a CUDA GPU"
    return refuses_anywhere(case)


def refuses_anywhere(case: Case) -> str | None:
    """Why the kernel does not run for this case on any device; None if there is one on which it may."""
    return _unreadable(case.scheme) or needs_blocks(case)


def _unreadable(one: Benched) -> str | None:
    for codec in (one.codecs.key, one.codecs.value):
        if isinstance(why := codec.fused(), str):
            return f"{codec.role}s: {why}"
    return turn_refusal(one.codecs, _rotary(one)) if one.frame == "pre_rope" else None


def _rotary(one: Benched) -> int:
    """Channels that RoPE turns: all."""
    return one.codecs.key.shape.dim if one.frame == "pre_rope" else 0


def turns(case: Case, sink: int, blocks: int, recent: int) -> Rope:
    """Of rows that begin at position 0, with room for so many tokens and blocks."""
    first = turning.first_positions(torch.zeros(1, device=case.device), sink, blocks, recent)
    near, far = (angles(x, case.geometry.head_dim) for x in (torch.arange(turning.RUN, device=case.device), first))
    return Rope(torch.stack([far.cos(), far.sin()], -2), turning.near(near.cos(), near.sin()))


def require_fused(schemes: Sequence[Benched], geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
    """Raises KernelsUnavailable naming the first scheme that no kernel attends to or reconstructs on this device."""
    for one in schemes:
        ratio = geometry.heads // geometry.kv_heads
        why = _unreadable(one) or absence("auto", one.codecs, ratio, dtype, device, _rotary(one))
        if why and reconstructed.refusal("auto", one.codecs, dtype, device):
            raise KernelsUnavailable(f"--require-kernels, scheme {one.name}: {why}; use another scheme or device")


def fused_attention(case: Case) -> Prepared:
    """Scores, softmax and sums straight from packed codes; sink and recent tokens in the same launch. KernelsUnavailable for
    a dtype that the kernel does not take.
    """
    if case.dtype not in SIXTEEN:
        raise KernelsUnavailable(f"{DTYPES_TAKEN}, not {DTYPE_NAMES[case.dtype]}; give --dtype float16")
    from kvcal_kernels.attention import triton as kernel  # not installed everywhere

    filled, queries = fill(case), case.queries()
    keys, values = (codec.as_blocks(packed) for codec, packed in zip(filled.pair, filled.packed, strict=True))

    def rows(count: int) -> Tensor:
        return torch.full((case.batch,), count, dtype=torch.int32, device=case.device)

    sink, recent = ((k.contiguous(), v.contiguous(), rows(k.shape[2])) for k, v in (filled.sink, filled.window))
    blocks, space = rows(keys.words.shape[2]), kernel.Workspace(case.device)
    scaling, factor = case.geometry.head_dim**-0.5, filled.codecs.key.key_factor(filled.decoding)
    own = None
    if case.scheme.frame == "pre_rope":
        own = turns(case, sink[0].shape[2], keys.words.shape[2], recent[0].shape[2])

    def run() -> Tensor:
        packed_q = queries_for(queries, factor)
        return kernel.attend(queries, keys, values, blocks, sink, recent, scaling, None, space, packed_q, rope=own)

    return Prepared(
        run, filled.packed_bytes + filled.window_bytes, lambda: misattended(run(), queries, filled), "triton: fused",
        more={"codec_bytes": filled.packed_bytes, "window_bytes": filled.window_bytes},
    )  # fmt: skip
