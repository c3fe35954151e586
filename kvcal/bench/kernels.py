"""Operations on one layer: decode attention, storing, reading, nearest codeword. By the codecs' reference path where
no kernel is named.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcal_artifacts.codecs import Codec
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.codecs.dequantise import Dequantiser
from kvcal_artifacts.storage import block_store
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_kernels import residual_vq

from . import quantising
from .layer import Case, fill, nbytes, rope
from .operation import Prepared, misappended, misattended, misencoded, misread, one_block, packed_blocks
from .peers import unseen

CODEWORDS = 4096  # of `nearest` where the scheme has no codebooks
CHECKED = 512  # vectors that its check looks at in each of start, middle, end and all over
NEAREST_TOLERANCE = 1e-3  # of the distance: chosen against best
# of the result, that reconstruction may be off (4.03 measured): inputs, weights and sums of grid points are rounded too
ROUNDINGS = 6


def decode_then_attend(case: Case) -> Prepared:
    """Everything decoded to the model's dtype, then torch's attention: what the cache does without fused kernels."""
    filled, queries, mask = fill(case), case.queries(), None
    if case.new > 1:
        mask = ~unseen(case.new, case.new, case.length, case.device).repeat(case.group, 1)

    def attend(queries: Tensor) -> Tensor:
        keys, values = filled.materialised()
        rows = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask).reshape(queries.shape)

    return Prepared(
        lambda: attend(queries),
        filled.packed_bytes + filled.book_bytes + filled.window_bytes,
        lambda: misattended(attend, queries, filled),
        "reference: decode, then SDPA",
        more={"window_bytes": filled.window_bytes, "packed_bytes": filled.packed_bytes},
    )


def quantise(case: Case) -> Prepared:
    """All packed tokens from keys and values to packed blocks in one call: a prefill's."""
    rules = quantising.block_rules(case)
    if not isinstance(rules, str):
        return quantising.by_kernel(case, rules)
    filled = fill(case)
    by, path = quantising.encoders(case, filled.codecs)
    size = sum(nbytes(x) for x in filled.raw) + filled.packed_bytes + filled.book_bytes
    return Prepared(lambda: filled.encoded(filled.raw, by), size, lambda: misencoded(filled, by), path)


def append(case: Case) -> Prepared:
    """One block of every row quantised and put behind the others, over the calls that fill a block: a decode step's
    share.
    """
    rules = quantising.rules(case)
    if not isinstance(rules, str):
        return quantising.append_by_kernel(case, rules)
    if quantising.appends_vectors(case):
        return quantising.append_vectors(case)
    filled, block = fill(case), case.scheme.windows.block
    new = fill(one_block(case))
    ledger = Ledger(case.scheme.windows)
    ledger.begin(case.batch, case.length, None)
    plan = ledger.begin(case.batch, block, None)

    pack, by, path = quantising.packer(one_block(case))

    def run() -> list[Packed]:
        packed = pack()
        return [
            {name: block_store.append(old[name], one[name], plan) for name in one}
            for old, one in zip(filled.packed, packed, strict=True)
        ]

    def check() -> str | None:
        fault = misappended(filled, new, run(), by)
        return fault or misread(filled, filled.decoded()) or misencoded(new, by)

    calls = block // case.new
    size = (sum(nbytes(x) for x in new.raw) + new.packed_bytes + new.book_bytes) / calls
    path = "reference: quantise" if path == "reference" else path
    return Prepared(
        run,
        round(size),
        check,
        f"{path}, then copy the store",
        per=calls,
        more={"calls": f"one in {calls} steps"},
    )


def dequantise(case: Case) -> Prepared:
    """Packed blocks to keys and values in the model's dtype, stored before RoPE also rotated by it; under AQUA-KV with
    the predictor products of the layer. The kernel for HIGGS and linear predictors on a GPU, the codecs elsewhere.
    """
    filled, pre_rope = fill(case), case.scheme.frame == "pre_rope"
    tokens, dim = packed_blocks(case) * case.scheme.windows.block, case.geometry.head_dim
    keys, values = (
        Dequantiser(codec, case.dtype, rotary) for codec, rotary in zip(filled.pair, (dim * pre_rope, 0), strict=True)
    )
    rotate = rope(tokens, dim, case.device) if pre_rope else None
    below = {name: getattr(filled.decoding, name) for name in filled.codecs.needs - {"k0"}}
    fused = "triton" in (keys.path, values.path)
    context = replace(filled.decoding, **{name: x.to(case.dtype) if fused else x for name, x in below.items()})

    def run() -> tuple[Tensor, Tensor, Tensor | None]:
        dequantised, after = keys(filled.packed[0], context, rotate)
        return dequantised, values(filled.packed[1], replace(context, k0=dequantised))[0], after

    def check() -> str | None:
        outputs, exact = run(), filled.decoded()
        expected = [*exact, rotate(exact[0])] if rotate else [*exact]
        for name, x, exactly in zip(("keys", "values", "keys after RoPE"), outputs, expected, strict=False):
            assert x is not None
            error, rounding = (float((y.float() - exactly).norm()) for y in (x, exactly.to(case.dtype)))
            limit = ROUNDINGS * rounding + 1e-5 * float(exactly.norm())
            if not error <= limit:
                return f"check failed: {name} off by {error:.2g}, {limit:.2g} allowed"
        return misread(filled, outputs)

    written = 2 * case.batch * tokens * filled.codecs.key.shape.heads * dim * case.dtype.itemsize
    size = filled.packed_bytes + filled.book_bytes + written + len(below) * written // 2 + pre_rope * written // 2
    flops = sum(predictor_flops(codec, written / 2 / case.dtype.itemsize) for codec in filled.pair)
    path = keys.path if keys.path == values.path else f"keys {keys.path}, values {values.path}"
    return Prepared(run, size, check, path, flops=flops)


def predictor_flops(codec: Codec, numbers: float) -> float:
    """2 * tokens * parameters of the matrices; numbers: keys or values to be predicted."""
    return 2.0 * numbers / (codec.shape.heads * codec.shape.dim) * codec.predictor_size


def nearest(case: Case) -> Prepared:
    """The nearest codeword of each of batch * length vectors: a stage of encoding, or of training."""
    book = _codebook(case)
    k, d = book.shape
    n = case.batch * case.length
    generator = torch.Generator(case.device).manual_seed(case.seed)
    vectors = torch.randn(n, d, generator=generator, device=case.device, dtype=torch.float32)

    def run() -> Tensor:
        codes: Tensor = residual_vq.nearest.nearest(vectors, book)
        return codes

    def check() -> str | None:
        return misnamed(run(), vectors, book)

    size = nbytes(vectors) + nbytes(book) + 4 * n
    path = residual_vq.nearest.backend(vectors, book)
    return Prepared(run, size, check, path, flops=2.0 * n * k * d, more={"codewords": k, "dimension": d, "vectors": n})


def misnamed(codes: Tensor, vectors: Tensor, book: Tensor) -> str | None:
    """None if codes (n,) of one call name codewords of `book` that are nearest; distances in every part of the call."""
    n, k = len(vectors), len(book)
    if codes.shape != (n,):
        return f"check failed: codes of shape {tuple(codes.shape)} for {n} vectors"
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= k:  # before anything is looked up by them: on a GPU that ends the process's CUDA
        return f"check failed: codes from {low} to {high}, there are {k} codewords"
    at = looked_at(n).to(vectors.device)
    some, exact = vectors[at], book.float()
    least = torch.cdist(some, exact, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    farther = (some - exact[codes[at].long()]).norm(dim=1) / least.clamp_min(1e-12) - 1
    wrong = (~(farther <= NEAREST_TOLERANCE)).nonzero().flatten()
    if not len(wrong):
        return None
    worst, first = float(farther.max()), int(at[wrong[0]])
    return (
        f"check failed: {len(wrong)} of {len(at)} vectors looked at, the first of them vector {first} of {n}, got a "
        "codeword "
        f"up to {worst:.2g} farther than the nearest"
    )


def looked_at(n: int) -> Tensor:
    """Which of n vectors are checked, as sorted indices, int64 on the CPU.

    They are CHECKED from the start, as many about the middle, as many up to the end, and as many all over. Those up to
    the end hold all of the last tile, which is a partial one where n is no multiple of it.
    """
    edge = min(CHECKED, n)
    middle = (n - edge) // 2
    over = torch.linspace(0, n - 1, edge, dtype=torch.float64, device="cpu").long()
    parts = (
        torch.arange(edge, device="cpu"),
        torch.arange(middle, middle + edge, device="cpu"),
        torch.arange(n - edge, n, device="cpu"),
        over,
    )
    every: Tensor = torch.cat(parts).unique()
    return every


def needs_codebooks(case: Case) -> str | None:
    pair = (case.scheme.codecs.key, case.scheme.codecs.value)
    return None if any(codec.codebooks for codec in pair) else "this scheme has no codebooks"


def _codebook(case: Case) -> Tensor:
    """(k, d) float16: the first stage of the scheme's widest band, or random codewords of head_dim."""
    for codec in (case.scheme.codecs.value, case.scheme.codecs.key):
        if codec.codebooks:
            return max(codec.codebooks, key=lambda book: book.shape[2])[0].to(case.device)
    generator = torch.Generator(case.device).manual_seed(case.seed + 1)
    return torch.randn(
        CODEWORDS, case.geometry.head_dim, generator=generator, device=case.device, dtype=torch.float32
    ).half()
