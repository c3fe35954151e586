"""Fused decode attention over what codecs store in its order, as an operation.

It is the kernel that a cache of the scheme runs: of kvcal_kernels.attention or, for vector codes, of
kvcal_kernels.residual_vq.attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KernelsUnavailable
from kvcal_artifacts.paths import codebook, dequantised
from kvcal_artifacts.paths.choose import DTYPES_TAKEN, absence, format_refusal, ratio_refusal
from kvcal_artifacts.paths.fused import Exact, queries_for
from kvcal_artifacts.paths.preflight.verdicts import interpreted, unsupported
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import Rope
from kvcal_kernels.layout import rope as turning

from ..models.geometry import Geometry
from .layer import Case, Filled, angles, fill
from .operation import Prepared, misattended, needs_blocks, needs_window, packed_blocks
from .peers import DTYPE_NAMES, SIXTEEN, Attend
from .schemes import Benched


def refuses_fused(case: Case) -> str | None:
    """Why the kernel does not run for this case; None if it does. Of a scheme that no GPU's reads, that."""
    if why := unreadable(case.scheme, case.scheme.codecs, case.group):
        return why
    if not interpreted() and (why := unsupported(case.device)):
        return why if case.device.type == "cuda" else "needs a CUDA GPU"
    if case.scheme.codecs.has_codes and case.new > (most := codebook.most_queries(case.group)):
        return f"vector codes are attended to by up to {most} new tokens a call at {case.group} query heads a kv head"
    return needs_window(case)


def refuses_anywhere(case: Case) -> str | None:
    """Why the kernel does not run for this case on any device; None if there is one on which it may."""
    return unreadable(case.scheme, case.scheme.codecs, case.group) or needs_blocks(case)


def unreadable(one: Benched, pair: LayerCodecs, ratio: int) -> str | None:
    """Why a cache of the scheme decodes blocks of these codecs wherever it is, of a model whose attention is the usual
    one: the answer of fused.refusal.
    """
    return format_refusal(one.scheme, pair, _rotary(one)) or ratio_refusal(ratio)


def _rotary(one: Benched) -> int:
    """Channels that RoPE rotates: all."""
    return one.codecs.key.shape.dim if one.frame == "pre_rope" else 0


def rope_of(case: Case, sink: int, blocks: int, recent: int) -> Rope:
    """RoPE of rows that begin at position 0, with capacity for so many tokens and blocks."""
    first = turning.first_positions(torch.zeros(1, device=case.device, dtype=torch.float32), sink, blocks, recent)
    near, far = (angles(x, case.geometry.head_dim) for x in (torch.arange(turning.RUN, device=case.device), first))
    return Rope(torch.stack([far.cos(), far.sin()], -2), turning.near(near.cos(), near.sin()))


def require_fused(schemes: Sequence[Benched], geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
    """Raises KernelsUnavailable naming the first scheme with a layer that no kernel attends to or reconstructs on this
    device: where a cache of it with require_kernels does.
    """
    ratio = geometry.heads // geometry.kv_heads
    for one in schemes:
        for pair in one.scheme.layers:
            if pair is not None and (why := _absent(one, pair, ratio, dtype, device)):
                raise KernelsUnavailable(f"--require-kernels, scheme {one.name}: {why}; use another scheme or device")


def _absent(one: Benched, pair: LayerCodecs, ratio: int, dtype: torch.dtype, device: torch.device) -> str | None:
    why = unreadable(one, pair, ratio) or absence("auto", pair, ratio, dtype, device, _rotary(one))
    decoded = one.scheme.selection is None and not dequantised.refusal("auto", pair, dtype, device) if why else False
    return None if decoded else why


def fused_attention(case: Case) -> Prepared:
    """Scores, softmax and sums straight from packed codes, sink and recent tokens next to them. KernelsUnavailable for
    a dtype that the kernel does not take.
    """
    if case.dtype not in SIXTEEN:
        raise KernelsUnavailable(f"{DTYPES_TAKEN}, not {DTYPE_NAMES[case.dtype]}; give --dtype float16")
    filled, queries = fill(case), case.queries()
    sink, recent = ((k.contiguous(), v.contiguous(), _rows(case, k.shape[2])) for k, v in (filled.sink, filled.window))
    over = _over_vectors if case.scheme.codecs.has_codes else _over_blocks
    attend, path, more = over(case, filled, sink, recent)
    return Prepared(
        lambda: attend(queries),
        filled.packed_bytes + filled.book_bytes + filled.window_bytes,
        lambda: misattended(attend, queries, filled),
        path,
        more={"codec_bytes": filled.packed_bytes, "window_bytes": filled.window_bytes, **more},
    )


Run = tuple[Attend, str, dict[str, Json]]  # what runs, which code it is, what only such rows have


def _rows(case: Case, count: int) -> Tensor:
    return torch.full((case.batch,), count, dtype=torch.int32, device=case.device)


def _over_blocks(case: Case, filled: Filled, sink: Exact, recent: Exact) -> Run:
    """All tokens in one launch, and the one that merges."""
    from kvcal_kernels.attention import triton as kernel  # not installed everywhere

    keys, values = (codec.as_blocks(packed) for codec, packed in zip(filled.pair, filled.packed, strict=True))
    blocks, space = _rows(case, keys.words.shape[2]), kernel.Workspace(case.device)
    scaling, factor = case.geometry.head_dim**-0.5, filled.codecs.key.key_factor(filled.decoding)
    rotations = None
    if case.scheme.frame == "pre_rope":
        rotations = rope_of(case, sink[0].shape[2], keys.words.shape[2], recent[0].shape[2])

    def attend(queries: Tensor) -> Tensor:
        packed_q = queries_for(queries, factor)
        return kernel.attend(
            queries, keys, values, blocks, sink, recent, scaling, None, space, packed_q, rope=rotations
        )

    return attend, "triton: fused", {}


def _over_vectors(case: Case, filled: Filled, sink: Exact, recent: Exact) -> Run:
    """Packed tokens by the kernels, exact ones by torch, as a cache attends. more: with large codebooks from how many
    tokens on a cache does so.
    """
    coded = codebook.coded(filled.codecs, filled.packed)
    count = packed_blocks(case)
    blocks, space = _rows(case, count), codebook.workspace("triton", case.device, False)
    scaling, least = case.geometry.head_dim**-0.5, codebook.least_tokens(filled.codecs)
    more: dict[str, Json] = {"codebook_bytes": filled.book_bytes}
    if count * case.scheme.windows.block <= least:
        more["note"] = f"a cache decodes up to {least} packed tokens of a row: with such codebooks that is faster"

    def attend(queries: Tensor) -> Tensor:
        return codebook.attention("triton", queries, coded, blocks, sink, recent, scaling, space)

    return attend, "triton: fused, exact tokens by torch", more
