"""What can be measured: an operation is an entry here, and nothing else has to know of it.

An entry builds, for a case, the closure to time, the bytes that it must move, and a check against a reference; no figure is
printed where the check fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcal_artifacts import store
from kvcal_artifacts.codecs import Codec, MixKVQ, Predicted, ResidualVQ, Uniform
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.ledger import Ledger
from kvcal_kernels import vq

from . import paper
from .layer import Case, Filled, fill, nbytes
from .peers import wrong

Peer = Literal["attention"]
CODEWORDS = 4096  # of `nearest` where the scheme has no codebooks
CHECKED = 2048  # vectors and tokens that a check looks at
NEAREST_TOLERANCE = 1e-3  # of the distance: chosen against best


@dataclass(frozen=True)
class Prepared:
    """run: what is timed. bytes: what it must move, read and, where it stores something, written. check: None if the result
    is right, else what is wrong with it. path: which code it is. per: calls that one call of `run` stands for, so that the
    figure is the time of one decode step, say. flops: of matrix products in it.
    """

    run: Callable[[], object]
    bytes: int
    check: Callable[[], str | None]
    path: str
    per: float = 1.0
    flops: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """refuses: why there is no such operation for a case, or None. peer: what FP16 does in its place, for the ratio. alone: it
    depends on the model's shape only, so it is measured once for all schemes, and beyond that for those it does not refuse.
    """

    name: str
    what: str
    build: Callable[[Case], Prepared]
    refuses: Callable[[Case], str | None] = lambda case: None
    peer: Peer | None = None
    by_default: bool = True
    alone: bool = False


def packed_blocks(case: Case) -> int:
    own = case.scheme.windows
    return max(0, case.length - own.sink - own.recent) // own.block


def needs_blocks(case: Case) -> str | None:
    own = case.scheme.windows
    if packed_blocks(case):
        return None
    return f"nothing is packed: needs more than {own.sink + own.recent + own.block - 1} tokens"


# Decode attention.


def decode_then_attend(case: Case) -> Prepared:
    """Everything decoded to the model's dtype, then torch's attention: what the cache does without fused kernels."""
    filled, queries = fill(case), case.queries()

    def run() -> Tensor:
        keys, values = filled.materialised()
        rows = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        return scaled_dot_product_attention(rows, keys, values).view_as(queries)

    return Prepared(
        run, filled.packed_bytes + filled.window_bytes, lambda: wrong(run(), queries, *filled.materialised()),
        "reference: decode, then SDPA", more={"window_bytes": filled.window_bytes, "packed_bytes": filled.packed_bytes},
    )  # fmt: skip


# Storing.


def quantise(case: Case) -> Prepared:
    """All packed tokens from keys and values to packed blocks in one call: a prefill's."""
    filled = fill(case)
    size = sum(nbytes(x) for x in filled.raw) + filled.packed_bytes
    return Prepared(lambda: filled.encoded(filled.raw), size, lambda: _misencoded(filled), "reference")


def quantise_step(case: Case) -> Prepared:
    """One block of every row, over the tokens of a block: what a decode step spends on quantising (InnerQ Table 5)."""
    filled = fill(_of_one_block(case))
    size = sum(nbytes(x) for x in filled.raw) + filled.packed_bytes
    return _per_step(case, filled, lambda: filled.encoded(filled.raw), size, slice(0, 2))


def quantise_step_of(role: int) -> Callable[[Case], Prepared]:
    """Its keys (0) or its values (1) alone."""

    def build(case: Case) -> Prepared:
        filled = fill(_of_one_block(case))
        context = filled.encoding
        if "k0" in filled.pair[role].needs:
            context = replace(context, k0=filled.decoded()[0])
        codec, raw = filled.pair[role], filled.raw[role]
        size = nbytes(raw) + _bytes_of(filled.packed[role])
        return _per_step(case, filled, lambda: codec.encode(raw, context), size, slice(role, role + 1))

    return build


def _bytes_of(packed: Packed) -> int:
    return sum(nbytes(stored) for stored in packed.values())


def _per_step(case: Case, filled: Filled, run: Callable[[], object], size: int, roles: slice) -> Prepared:
    block = case.scheme.windows.block
    more: dict[str, Any] = {"calls": f"one in {block} steps"}
    if case.scheme.name in paper.TABLE_5 and case.batch == 1:
        more["paper_microseconds"] = round(sum(paper.TABLE_5[case.scheme.name][roles]), 1)
        more["paper_device"] = "Jetson Xavier NX"
    return Prepared(run, round(size / block), lambda: _misencoded(filled), "reference", per=block, more=more)


def append(case: Case) -> Prepared:
    """One block of every row quantised and put behind the others, over the tokens of a block: a decode step's share."""
    filled, block = fill(case), case.scheme.windows.block
    new = fill(_of_one_block(case))
    ledger = Ledger(case.scheme.windows)
    ledger.begin(case.batch, case.length, None)
    plan = ledger.begin(case.batch, block, None)

    def run() -> list[Packed]:
        packed = new.encoded(new.raw)
        return [
            {name: store.append(old[name], one[name], plan) for name in one}
            for old, one in zip(filled.packed, packed, strict=True)
        ]

    def check() -> str | None:
        grown = run()
        counts = {int(t.shape[2]) for one in grown for t in one.values()}
        if counts != {packed_blocks(case) + 1}:
            return f"check failed: {sorted(counts)} blocks after appending to {packed_blocks(case)}"
        return _misencoded(new)

    size = (sum(nbytes(x) for x in new.raw) + new.packed_bytes) / block
    return Prepared(
        run,
        round(size),
        check,
        "reference: quantise, then copy the store",
        per=block,
        more={"calls": f"one in {block} steps"},
    )


def _of_one_block(case: Case) -> Case:
    own = case.scheme.windows
    return Case(
        case.scheme, case.geometry, case.batch, own.sink + own.block + own.recent, case.device, case.dtype, case.seed
    )


def _misencoded(filled: Filled) -> str | None:
    """Packed bytes are those that the formula gives, they decode to something like the input, and do so block by block."""
    again = filled.encoded(filled.raw)
    for role, (codec, one) in enumerate(zip(filled.pair, again, strict=True)):
        blocks = filled.case.batch * int(next(iter(one.values())).shape[2])
        size = sum(nbytes(t) for t in one.values())
        if not codec.ragged and size != blocks * codec.block_bytes():
            return f"check failed: {size} bytes for {blocks} blocks of {codec.block_bytes()}"
        differing = [name for name in one if not _same(one[name], filled.packed[role][name])]
        if differing:
            return f"check failed: {differing[0]} differs from what rows alone were packed to"
    for role, made in enumerate(filled.decoded()):
        raw = filled.raw[role].float()
        error = float((made - raw).square().sum() / raw.square().sum())
        if not error < 1:
            return f"check failed: decoding misses {('keys', 'values')[role]} by {error:.2g} of their squares"
    return None


def _same(one: store.Stored, other: store.Stored) -> bool:
    return all(torch.equal(a, b) for a, b in zip(store.tensors_of(one), store.tensors_of(other), strict=True))


# Reading without attention.


def reconstruct(case: Case) -> Prepared:
    """Packed blocks to keys and values in the model's dtype; under AQUA-KV with the predictor products of the layer."""
    filled = fill(case)

    def run() -> list[Tensor]:
        return [x.to(case.dtype) for x in filled.decoded()]

    def check() -> str | None:
        for role, made in enumerate(run()):
            raw = filled.raw[role].float()
            error = float((made.float() - raw).square().sum() / raw.square().sum())
            if not error < 1:
                return f"check failed: misses {('keys', 'values')[role]} by {error:.2g} of their squares"
        return None

    written = 2 * case.batch * packed_blocks(case) * filled.codecs.key.shape.values * case.dtype.itemsize
    below = len(filled.codecs.needs - {"k0"}) * written // 2
    flops = sum(_predictor_flops(codec, written / 2 / case.dtype.itemsize) for codec in filled.pair)
    return Prepared(run, filled.packed_bytes + written + below, check, "reference", flops=flops)


def _predictor_flops(codec: Codec, numbers: float) -> float:
    """2 * tokens * parameters of the matrices; numbers: keys or values to be predicted."""
    if not isinstance(codec, Predicted):
        return 0.0
    parameters = sum(w.numel() for w in codec.predictor.weights.values() if w.ndim == 2)
    return 2.0 * numbers / (codec.shape.heads * codec.shape.dim) * parameters


def nearest(case: Case) -> Prepared:
    """The nearest codeword of each of batch * length vectors: a stage of encoding, or of training."""
    book = _codebook(case)
    k, d = book.shape
    n = case.batch * case.length
    generator = torch.Generator(case.device).manual_seed(case.seed)
    vectors = torch.randn(n, d, generator=generator, device=case.device)

    def check() -> str | None:
        some = vectors[:CHECKED]
        codes = vq.nearest(some, book)
        least = torch.cdist(some, book.float(), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
        chosen = (some - book.float()[codes]).norm(dim=1)
        worst = float((chosen / least.clamp_min(1e-12)).max()) - 1
        return None if worst <= NEAREST_TOLERANCE else f"check failed: a codeword {worst:.2g} farther than the nearest"

    size = nbytes(vectors) + nbytes(book) + 4 * n
    path = vq.backend(vectors, book)
    return Prepared(
        lambda: vq.nearest(vectors, book), size, check, path, flops=2.0 * n * k * d,
        more={"codewords": k, "dimension": d, "vectors": n},
    )  # fmt: skip


def needs_codebooks(case: Case) -> str | None:
    own = (case.scheme.codecs.key, case.scheme.codecs.value)
    return None if any(isinstance(codec, ResidualVQ) for codec in own) else "this scheme has no codebooks"


def _codebook(case: Case) -> Tensor:
    """(k, d) float16: the first stage of the scheme's widest band, or random codewords of head_dim."""
    for codec in (case.scheme.codecs.value, case.scheme.codecs.key):
        if isinstance(codec, ResidualVQ):
            return max(codec.codebooks, key=lambda book: book.shape[2])[0].to(case.device)
    generator = torch.Generator(case.device).manual_seed(case.seed + 1)
    return torch.randn(CODEWORDS, case.geometry.head_dim, generator=generator, device=case.device).half()


# The papers' own tables.


def hybrid_share(percent: int) -> Callable[[Case], Prepared]:
    """InnerQ Table 6: decode the hybrid values and multiply them with one row of weights, so many groups being symmetric."""

    def build(case: Case) -> Prepared:
        filled = fill(case)
        values = filled.codecs.value
        packed = dict(filled.packed[1])
        generator = torch.Generator(case.device).manual_seed(case.seed)
        scale = packed["scale"].abs()
        shifted = torch.rand(scale.shape, generator=generator, device=case.device) * 100 >= percent
        packed["scale"] = torch.where(shifted, -scale, scale)
        tokens = packed_blocks(case) * case.scheme.windows.block
        weights = torch.rand(
            case.batch, case.geometry.kv_heads, case.group, tokens, generator=generator, device=case.device
        ).to(case.dtype)

        def run() -> Tensor:
            return weights @ values.decode(packed).to(case.dtype)

        def check() -> str | None:
            found, exact = run().double(), weights.double() @ values.decode(packed).double()
            off = float((found - exact).abs().max() / exact.abs().max())
            allowed = 8 * float(torch.finfo(case.dtype).eps)
            return None if off <= allowed else f"check failed: off by {off:.2g}, allowed {allowed:.2g}"

        share = 100 * float((~torch.signbit(packed["scale"])).double().mean())
        more: dict[str, Any] = {"symmetric_percent": round(share, 2)}
        if case.length in paper.TABLE_6[percent] and case.batch == 1:
            more |= {"paper_microseconds": paper.TABLE_6[percent][case.length], "paper_device": "Jetson Xavier NX"}
        size = sum(nbytes(t) for t in packed.values())
        return Prepared(run, size, check, "reference: decode, then multiply", more=more)

    return build


def needs_hybrid(case: Case) -> str | None:
    values = case.scheme.codecs.value
    hybrid = isinstance(values, Uniform) and values.mode == "hybrid"
    return needs_blocks(case) if hybrid else "the values of this scheme are not hybrid (InnerQ Hybrid's are)"


def channel_selection(case: Case) -> Prepared:
    """MixKVQ: salience and tiers of one block of every row, over the tokens of a block (Table 7)."""
    filled = fill(_of_one_block(case))
    codec, block = filled.codecs.key, case.scheme.windows.block
    assert isinstance(codec, MixKVQ)
    keys = filled.raw[0]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return codec.tiers(codec.salience(keys, filled.encoding))

    def check() -> str | None:
        perm, first, second = run()
        whole = bool((perm.sort(-1).values == torch.arange(perm.shape[-1], device=perm.device)).all())
        return (
            None if whole and bool((first <= second).all()) else "check failed: channels are not a permutation in tiers"
        )

    return Prepared(
        run, round(nbytes(keys) / block), check, "reference", per=block, more={"calls": f"one in {block} steps"}
    )


def mlp(case: Case) -> Prepared:
    """The gated feed-forward part of one layer at one token a row, random weights: beside attention in MixKVQ's Table 7."""
    hidden, wide = case.geometry.hidden, case.geometry.intermediate
    generator = torch.Generator(case.device).manual_seed(case.seed)

    def weight(rows: int, columns: int) -> Tensor:
        wide: Tensor = torch.randn(rows, columns, generator=generator, device=case.device) / columns**0.5
        return wide.to(case.dtype)

    gate, up, down = weight(wide, hidden), weight(wide, hidden), weight(hidden, wide)
    x = torch.randn(case.batch, hidden, generator=generator, device=case.device).to(case.dtype)

    def forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(x @ gate.T)
        out = out * (x @ up.T)
        return out @ down.T

    def check() -> str | None:
        exact = forward(*(t.double() for t in (x[:1], gate, up, down)))
        off = float((forward(x[:1], gate, up, down).double() - exact).abs().max() / exact.abs().max())
        allowed = 16 * float(torch.finfo(case.dtype).eps)
        return None if off <= allowed else f"check failed: off by {off:.2g}, allowed {allowed:.2g}"

    size = sum(nbytes(t) for t in (gate, up, down))
    return Prepared(
        lambda: forward(x, gate, up, down), size, check, "torch", flops=2.0 * case.batch * 3 * hidden * wide
    )


def no_scheme(case: Case) -> str | None:
    return "it is the same for all schemes"


def needs_tiers(case: Case) -> str | None:
    return None if isinstance(case.scheme.codecs.key, MixKVQ) else "only MixKVQ selects channels"


_ALL = (
    Operation(
        "decode-then-attend", "one decode step's attention: decode all, then attend", decode_then_attend, needs_blocks,
        "attention",
    ),
    Operation("quantise", "prefill: keys and values to packed blocks", quantise, needs_blocks),
    Operation("append", "a decode step's share of packing and storing a block", append, needs_blocks),
    Operation("nearest", "nearest codeword of batch * length vectors", nearest, needs_codebooks, alone=True),
    Operation("reconstruct", "packed blocks to keys and values", reconstruct, needs_blocks),
    Operation("quantise-step", "a decode step's share of quantising (InnerQ Table 5)", quantise_step, by_default=False),
    Operation("quantise-step-keys", "of its keys", quantise_step_of(0), by_default=False),
    Operation("quantise-step-values", "of its values", quantise_step_of(1), by_default=False),
    *(
        Operation(
            f"hybrid-{percent}", f"product with hybrid values, {percent} % of groups symmetric (InnerQ Table 6)",
            hybrid_share(percent), needs_hybrid, by_default=False,
        )
        for percent in paper.TABLE_6
    ),
    Operation(
        "channel-selection", "a decode step's share of choosing tiers (MixKVQ Table 7)", channel_selection, needs_tiers,
        by_default=False,
    ),
    Operation("mlp", "a layer's feed-forward part (MixKVQ Table 7)", mlp, no_scheme, by_default=False, alone=True),
)  # fmt: skip

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _ALL}

# Names that stand for the operations of a paper's table.
TABLES: dict[str, tuple[str, ...]] = {
    "innerq-table-5": ("quantise-step-keys", "quantise-step-values", "quantise-step"),
    "innerq-table-6": tuple(f"hybrid-{percent}" for percent in paper.TABLE_6),
    "mixkvq-table-7": ("channel-selection", "decode-then-attend", "mlp"),
}
