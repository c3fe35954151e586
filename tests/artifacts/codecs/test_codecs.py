"""The contract every codec keeps: walks CODECS.

The checks are those of `kvcal check-codec` (kvcal/evaluate/codec_contract), here with bounds of each codec's own theory.
A codec is tried in the configurations listed for it below, one without any as it is made from shape and role alone, by
itself and inside `predicted`. BOUNDS and STORED_BITS hold it to what its own theory promises; without an entry an error
of half its stored bits is allowed, and its bits are those that it declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcal.evaluate.codec_contract import Make, Subject, checks, numbers
from kvcal.evaluate.codec_contract.numbers import TINIEST, coded, half_of_bits, slack_of
from kvcal.evaluate.codec_contract.subject import INPUTS, linear_predictor, nbytes, normal, statistics
from kvcal_artifacts.cache.statistics.subspace import subspace
from kvcal_artifacts.codecs import (
    CODECS,
    PREDICTORS,
    ByHead,
    Codec,
    Context,
    Exact,
    Float8,
    Higgs,
    MixKVQ,
    Packed,
    Predicted,
    Predictor,
    ResidualVQ,
    Role,
    Scaled,
    Shape,
    Squat,
    Transform,
    Uniform,
    build,
    ragged,
)
from kvcal_artifacts.codecs.exact import DTYPES
from kvcal_artifacts.codecs.float8 import FORMATS
from kvcal_artifacts.codecs.higgs_grids import gaussian_grid
from kvcal_artifacts.codecs.predictors import MLP, Bias, QuantisedLinear, ReducedRank
from kvcal_artifacts.codecs.refusals import check_finite, to_half
from kvcal_artifacts.codecs.transform import GRID_OF, MSE, ONE_BIT
from kvcal_artifacts.codecs.uniform import MODES
from kvcal_artifacts.errors import KVCalError, NonFiniteError
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_kernels.packing import unpack

ROLES: tuple[Role, ...] = ("key", "value")
SHAPES = [Shape(2, 16, 8), Shape(1, 64, 32), Shape(3, 96, 32), Shape(2, 80, 16)]
GRID_ERROR = {  # MSE a coordinate, N(0, 1)
    (2, 16): 0.1074, (2, 64): 0.0297, (2, 256): 0.0078, (4, 256): 0.0965,
    (1, 4): 0.1175, (1, 8): 0.0345, (1, 16): 0.0095,
}  # fmt: skip
HALF = 2.0**-11  # relative rounding of float16


def predictor(kind: str, inputs: int, outputs: int) -> Predictor:
    """Random weights that keep the variance."""

    def weight(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, seed=rows + columns).mul(rows**-0.5).half()

    bias, wide = normal(outputs).half(), 2 * outputs
    if kind == "bias":
        return Bias({"bias": bias})
    if kind == "linear":
        return linear_predictor(inputs, outputs)
    if kind == "reduced-rank":
        return ReducedRank({"down": weight(inputs, 8), "up": weight(8, outputs), "bias": bias})
    if kind == "linear-4bit":
        codes = torch.randint(0, 16, (inputs, outputs), generator=torch.Generator().manual_seed(0), device="cpu")
        scale = torch.full((outputs,), 0.2 * inputs**-0.5, dtype=torch.float32, device="cpu")
        return QuantisedLinear.from_codes(codes, scale, -8 * scale, bias)
    names = {"in_weight": weight(inputs, wide), "in_bias": normal(wide).half()}
    names |= {"out_weight": weight(wide, outputs), "out_bias": bias}
    if kind == "mlp+norm":
        names |= {
            "norm_weight": torch.ones(inputs, dtype=torch.float16, device="cpu"),
            "norm_bias": normal(inputs).half(),
        }
    return MLP(names)


def uniform(bits: int, group: int = 16, axis: str = "channel", mode: str = "asymmetric", search: bool = False) -> Make:
    return lambda shape, role: Uniform(shape, role, bits, group, axis, mode, search)  # type: ignore[arg-type]


def weighted(bits: int, mode: str = "symmetric") -> Make:
    """A search whose errors count from 1/8 to 8 by channel."""

    def make(shape: Shape, role: Role) -> Codec:
        weight = torch.exp2(normal(shape.heads, shape.dim, seed=9).clamp(-3, 3)).half()
        return Uniform(shape, role, bits, 16, "channel", mode, True, weight)  # type: ignore[arg-type]

    return make


def higgs(**settings: Any) -> Make:
    return lambda shape, role: Higgs(shape, role, **settings)


def exact(dtype: str) -> Make:
    return lambda shape, role: Exact(shape, role, dtype)


def float8(format: str, scale: float = 1.0) -> Make:
    return lambda shape, role: Float8(shape, role, format, scale)


def scaled(inner: Make) -> Make:
    """Factors from 1/4 to 4."""

    def make(shape: Shape, role: Role) -> Codec:
        return Scaled(inner(shape, role), torch.exp2(normal(shape.heads, shape.dim, seed=7).clamp(-2, 2)).half())

    return make


def scaled_by_row(inner: Make) -> Make:
    """Keys by factors of the row's own first tokens."""
    return lambda shape, role: Scaled(inner(shape, role), None, "prefill")


def residual_vq(*stages_and_bits: tuple[int, int], scaled: bool = False) -> Make:
    """Random codebooks, finer from stage to stage, with zero among the codewords; bands take turns at the dimensions."""

    def make(shape: Shape, role: Role) -> Codec:
        bands = [list(range(i, shape.dim, len(stages_and_bits))) for i in range(len(stages_and_bits))]
        books = []
        for i, (stages, bits) in enumerate(stages_and_bits):
            finer = 0.7 ** torch.arange(stages, dtype=torch.float32, device="cpu")
            book = normal(stages, 1 << bits, len(bands[i]), seed=i) * finer[:, None, None]
            book[:, 0] = 0
            books.append(book.half())
        scale = (normal(shape.heads, shape.dim, seed=5) / 4).exp().half() if scaled else None
        return ResidualVQ(shape, role, bands, books, scale)

    return make


def transform(shares: tuple[float, ...], gain: str = "mse") -> Make:
    """A random basis whose directions fall off; shares: of the directions with 4, 3, 2, 1 bits, none of the rest."""

    def make(shape: Shape, role: Role) -> Codec:
        pairs = shape.dim // 2
        counts = [round(share * pairs) for share in shares]
        bits = [b for b, n in zip((4, 3, 2, 1), counts, strict=True) for _ in range(2 * n)][: shape.dim]
        basis = torch.linalg.qr(normal(shape.heads, shape.dim, shape.dim, seed=4)).Q
        size = 0.97 ** torch.arange(shape.dim, device="cpu").float()
        mean = torch.zeros_like(basis[:, 0])  # others in test_transform.py: here zero comes back as zero
        return Transform(shape, role, bits + [0] * (shape.dim - len(bits)), basis * size[:, None], mean, gain)

    return make


def mixkvq(**settings: Any) -> Make:
    return lambda shape, role: MixKVQ(shape, role, **{"group": 8, "tau_low": 0.9, "tau_high": 1.3, **settings})


def predicted(inner: Make, kind: str = "linear", inputs: tuple[str, ...] | None = None) -> Make:
    def make(shape: Shape, role: Role) -> Codec:
        names, width = inputs or INPUTS[role], shape.heads * shape.dim
        return Predicted(inner(shape, role), predictor(kind, len(names) * width, width), names)

    return make


def squat(inner: Make, calibrated: bool = False, **settings: Any) -> Make:
    """A strength that moves channels by as much as a step."""

    def make(shape: Shape, role: Role) -> Codec:
        queries = normal(shape.heads, 2, shape.dim, seed=8).double() * 9
        own = subspace(queries.mT @ queries, 2).float() if calibrated else None
        return Squat(inner(shape, role), **{"rank": 3, "channels": shape.dim // 2} | settings, calibrated=own)

    return make


def prefill_keys(shape: Shape, role: Role) -> Codec:
    """Keys by factors of the row's own first tokens, plain values."""
    plain = uniform(3, 8, "token", "symmetric")
    return scaled_by_row(uniform(3, mode="symmetric"))(shape, role) if role == "key" else plain(shape, role)


def by_head(first: Make, others: Make) -> Make:
    """Head 0 in one codec, all others in another."""

    def make(shape: Shape, role: Role) -> Codec:
        one, rest = replace(shape, heads=1), replace(shape, heads=shape.heads - 1)
        return ByHead([first(one, role), others(rest, role)][: shape.heads])

    return make


CONFIGURATIONS: dict[str, dict[str, Make]] = {
    "exact": {dtype: exact(dtype) for dtype in DTYPES},
    "uniform": {
        **{f"{bits}": uniform(bits) for bits in range(1, 9)},
        **{f"{bits}-token": uniform(bits, 8, "token") for bits in (2, 3, 4)},
        **{f"{bits}-symmetric": uniform(bits, mode="symmetric") for bits in (1, 2, 3, 4, 8)},
        **{f"{bits}-token-symmetric": uniform(bits, 4, "token", "symmetric") for bits in (1, 3)},
        **{f"{bits}-hybrid": uniform(bits, mode="hybrid") for bits in (1, 2, 3)},
        "2-token-hybrid": uniform(2, 8, "token", "hybrid"),
        **{f"2-{mode}-search": uniform(2, mode=mode, search=True) for mode in MODES},
        **{f"3-{mode}-weighted": weighted(3, mode) for mode in MODES},
        "1-hybrid-search": uniform(1, 8, "token", "hybrid", True),
        "3-token-symmetric-search": uniform(3, 8, "token", "symmetric", True),
        "1-of-group-1": uniform(1, 1),
    },
    "higgs": {
        **{f"d{d}n{n}": higgs(d=d, n=n) for d, n in GRID_ERROR},
        "wide": higgs(rotation="token", seed=3),
        "norm-head": higgs(norm="head", n=64),
        "wide-norm-head": higgs(rotation="token", norm="head"),
        "token-axis": higgs(axis="token"),
        "token-axis-d4": higgs(axis="token", d=4, n=256),
        **{f"turboquant-{bits}": higgs(d=1, n=2**bits, norm="head") for bits in (2, 3, 4)},
    },
    "float8": {**{name: float8(name) for name in FORMATS}, "scale-8": float8("e4m3fn", 8.0)},
    "scaled": {
        "uniform-3-symmetric": scaled(uniform(3, mode="symmetric")),
        "uniform-2-token-hybrid": scaled(uniform(2, 8, "token", "hybrid")),
        "higgs": scaled(higgs()),
        "prefill": scaled_by_row(uniform(3, mode="symmetric")),
        "weighted": scaled(weighted(3)),
    },
    "squat": {
        "2": squat(uniform(2, 8, "token")),
        "4-length-pre": squat(uniform(4, 8, "token"), normalise="length", queries="pre_rope", channels=5),
        "2-both": squat(uniform(2, 8, "token"), True, subspace="both", channels=8),
    },
    "residual-vq": {
        "8-bit": residual_vq((3, 8)),
        "two-bands": residual_vq((3, 4), (2, 7)),
        "12-bit-scaled": residual_vq((2, 12), scaled=True),
        "1-bit": residual_vq((5, 1), (1, 3)),
    },
    "predicted": {
        "residual-vq": predicted(residual_vq((3, 5), (1, 9), scaled=True)),
        **{f"exact-{dtype}": predicted(exact(dtype)) for dtype in ("float32", "float16")},
        "uniform-2": predicted(uniform(2)),
        "uniform-3-token-symmetric": predicted(uniform(3, 8, "token", "symmetric")),
        "higgs": predicted(higgs()),
        "higgs-wide": predicted(higgs(rotation="token")),
        **{f"{k}-higgs": predicted(higgs(), k) for k in ("bias", "reduced-rank", "mlp", "mlp+norm", "linear-4bit")},
        "float8": predicted(float8("e5m2")),
        "scaled-uniform": predicted(scaled(uniform(3))),
        "squat-2": predicted(squat(uniform(2, 8, "token"))),
        "transform": predicted(transform((0.25, 0.0, 0.5, 0.25))),
        "two-layers-higgs": predicted(higgs(), inputs=("k1", "v1", "k2", "v2")),
        "mixkvq": predicted(mixkvq()),
        "by-head": predicted(by_head(higgs(), uniform(2))),
    },
    "mixkvq": {
        "usual": mixkvq(dtype="bfloat16"),
        "error-only": mixkvq(importance="none", dtype="float32", round_up=1),
        "recent-raw": mixkvq(importance="recent", normalise="none", tau_low=1.0, tau_high=2.0, round_up=16),
        "all-exact": mixkvq(tau_low=0.0, tau_high=0.0),
        "all-two-bits": mixkvq(tau_low=1e9, tau_high=1e9),
        "fixed": mixkvq(full=8, four=0, group=4),
    },
    "transform": {
        "plain": Transform,
        "tiers": transform((0.25, 0.25, 0.25, 0.25)),
        "some-not-stored": transform((0.0, 0.25, 0.5, 0.0), "debiased"),
        "signs": transform((0.0, 0.0, 0.0, 1.0)),
    },
    "by-head": {"higgs-others": by_head(higgs(), prefill_keys)},
}


UNLISTED = "defaults"
for _name, _codec in CODECS.items():
    if _name not in CONFIGURATIONS:
        CONFIGURATIONS[_name] = {UNLISTED: _codec}  # type: ignore[dict-item]  # whatever else it takes has defaults
        CONFIGURATIONS["predicted"][f"{_name}-{UNLISTED}"] = predicted(_codec)  # type: ignore[arg-type]


def roles_of(name: str, label: str) -> tuple[Role, ...]:
    return ("key",) if "mixkvq" in (name, label) or label == "prefill" else ROLES


def takes(make: Make, shape: Shape, role: Role) -> bool:
    """Whether the codec can be made for them: one may be for keys alone, or for some sizes."""
    try:
        make(shape, role)
    except KVCalError:
        return False
    return True


def cases(shapes: list[Shape]) -> list[Any]:
    """Where there are several, keys and values take turns at the shapes, and the other half is slow."""
    return [
        pytest.param(
            Subject(make, s, role),
            id=f"{name}-{label}-{role}-{s.heads}x{s.dim}x{s.block}",
            marks=pytest.mark.slow if len(shapes) > 1 and (turn + (role == "value")) % 2 else (),
        )
        for name, made in CONFIGURATIONS.items()
        for label, make in made.items()
        for role in roles_of(name, label)
        for turn, s in enumerate(shapes)
        if not (label.endswith(UNLISTED) or "by-head" in (name, label)) or takes(make, s, role)
    ]


every_case = pytest.mark.parametrize("case", cases(SHAPES))
every_configuration = pytest.mark.parametrize("case", cases([Shape(2, 64, 16)]))


# What the theory of each codec promises of `made` against x; slack: absolute float32 noise of adding a prediction.


def check_exact(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    assert isinstance(codec, Exact)
    relative = {"float32": 0.0, "float16": HALF, "bfloat16": 2.0**-8}[codec.dtype]
    assert bool(((made - x).abs() <= relative * x.abs() + slack + (TINIEST if relative else 0)).all())


def check_uniform(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    assert isinstance(codec, Uniform)
    x, made = grouped(codec, x), grouped(codec, made)
    error, scale = (made - x).abs(), codec.groups(packed)[1].float()[..., None]
    low, high, largest = x.amin(-1, True), x.amax(-1, True), x.abs().amax(-1, True)
    slack_here = slack + 2.0**-20 * largest  # float32 arithmetic of encoder and decoder
    if codec.mode == "hybrid" or codec.search:
        check_chosen(codec, x, made)
        return
    if codec.mode == "asymmetric":
        top = 2**codec.bits - 1
        step_and_floor = (scale * top - (high - low)).abs() <= HALF * (high - low) + top * 2 * TINIEST + slack_here
        assert bool(step_and_floor.all()), "scale is not (max - min) / (2^b - 1)"
        allowed = 0.5 * scale + HALF * (low.abs() + high - low) + (top + 1) * TINIEST
    elif codec.bits == 1:
        assert bool(((scale - x.abs().mean(-1, True)).abs() <= HALF * scale + 2 * TINIEST + slack_here).all())
        allowed, error = torch.zeros_like(error), (made.abs() - scale).abs()
        assert bool((made * x >= -slack_here * scale).all()), "a sign was lost"
    else:
        half = 2 ** (codec.bits - 1)
        assert bool(((scale * half - largest).abs() <= HALF * largest + half * 2 * TINIEST + slack_here).all())
        # codes end at half - 1: what lies above is clipped there
        allowed = torch.maximum(0.5 * scale, x - (half - 1) * scale) + HALF * largest + half * TINIEST
    assert bool((error <= allowed + slack_here).all()), f"excess {float((error - allowed - slack_here).max())}"


def check_chosen(codec: Uniform, x: Tensor, made: Tensor) -> None:
    """x, made (..., group): in no group worse than what could have been chosen, the plain scale of each allowed mode;
    by the weights of channels where there are some.
    """
    flat, shape = x.reshape(1, 1, -1, codec.group), Shape(1, codec.group, 1)
    counts = torch.ones_like(x)
    if codec.weight is not None:
        counts = counts * codec.weight.float().unflatten(-1, (-1, codec.group))[:, None, None]
    root = counts.double().sqrt().reshape(-1, codec.group)
    error = ((made - x).double().reshape(root.shape) * root).norm(dim=-1)
    noise = 2.0**-20 * (x.double().reshape(root.shape) * root).norm(dim=-1)
    for mode in ("asymmetric", "symmetric") if codec.mode == "hybrid" else (codec.mode,):
        plain = Uniform(shape, "key", codec.bits, codec.group, mode=mode)  # type: ignore[arg-type]
        other = ((plain.decode(plain.encode(flat)) - flat).double().reshape(root.shape) * root).norm(dim=-1)
        assert bool((error <= other + noise).all()), f"worse than {mode} by {float((error - other - noise).max())}"


def grouped(codec: Uniform, x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, H, N, tokens or channels, groups, group)."""
    blocks = x.reshape(*x.shape[:2], -1, codec.shape.block, x.shape[-1])
    blocks = blocks.transpose(-1, -2) if codec.axis == "token" else blocks
    return blocks.reshape(*blocks.shape[:-1], -1, codec.group)


def check_higgs(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """Relative MSE is the grid's on Gaussian input, a little less where few coordinates share a norm."""
    assert isinstance(codec, Higgs)
    if codec.d == 1 and factor > 1.2:  # a lone outlier rotates to numbers of one size: a scalar grid has no point there
        factor *= 1.6
    error = float((made - x).double().square().mean() / x.double().square().mean())
    assert error <= factor * GRID_ERROR[codec.d, codec.n]


def check_float8(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """Half a step: 2^-4 of the number (e4m3fn) or 2^-3, below the smallest normal one of that; the largest beyond."""
    assert isinstance(codec, Float8)
    largest, relative, tiny = {"e4m3fn": (448.0, 2.0**-4, 2.0**-10), "e5m2": (57344.0, 2.0**-3, 2.0**-17)}[codec.format]
    near = x.clamp(-largest * codec.scale, largest * codec.scale)
    allowed = (relative * near.abs()).clamp_min(tiny * codec.scale) + slack + 2.0**-22 * near.abs()
    assert bool(((made - near).abs() <= allowed).all())


def check_scaled(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """What is inside, on x / f."""
    assert isinstance(codec, Scaled)
    f = statistics(codec, 1, 1)["key_scale"][0] if codec.factor is None else codec.factor.float()[:, None]
    inside = slack / float(f.min()) + (2.0**-20 * float((x / f).abs().max()) if slack else 0.0)
    wider = 1.15 * factor  # x / f is not Gaussian within a rotation of 16
    bound(codec.inner, x / f, packed, made / f, inside, wider)


def check_mixkvq(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """Channel by channel: as exact as the dtype, or half a step of the tier that the packed tensors name."""
    assert isinstance(codec, MixKVQ)
    inside, begin = {"raw": Exact(codec.shape, "key", codec.dtype)}, 0
    perm = packed["perm"].long()
    counts = [items(packed[name]) for name in ("raw", "four_codes", "two_codes")]
    assert bool((sum(counts) == codec.shape.dim).all())
    assert torch.equal(perm.sort(-1).values, torch.arange(codec.shape.dim).expand_as(perm))
    for tier, count in enumerate(counts):
        rank = torch.arange(codec.shape.dim)
        chosen = torch.zeros_like(perm).scatter(-1, perm, ((rank >= begin) & (rank < begin + count[..., None])).long())
        begin = begin + count[..., None]
        mask = chosen[..., None].bool().expand(*perm.shape, codec.shape.block)
        rows, got = channels(codec.shape, x)[mask], channels(codec.shape, made)[mask]
        groups, got = rows.view(-1, codec.group), got.view(-1, codec.group)
        if tier == 0:
            check_exact(inside["raw"], groups, {}, got, slack, factor)
            continue
        top, low, high = (15, 3)[tier - 1], groups.amin(-1, True), groups.amax(-1, True)
        scale = ((high - low) / top).half().float()
        here = slack + 2.0**-20 * groups.abs().amax(-1, True)
        allowed = 0.5 * scale * (1 + HALF) + HALF * (low.abs() + high - low) + (top + 1) * TINIEST + here
        assert bool(((got - groups).abs() <= allowed).all())


def channels(shape: Shape, x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, H, N, D, b)."""
    return x.unflatten(2, (-1, shape.block)).transpose(-1, -2)


def items(stored: Any) -> Tensor:
    """Rows of each block: int64 (B, H, N)."""
    if isinstance(stored, ragged.Ragged):
        return stored.counts.long()
    return torch.full(stored.shape[:3], stored.shape[3])


def check_squat(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """The codec inside, on keys that a direct solve corrected: the definition in float64, from what was really decoded."""
    assert isinstance(codec, Squat)
    bases = [t.double() for t in statistics(codec, len(x), x.shape[2] // codec.shape.block).values()]
    if codec.subspace != "prompt":
        assert codec.calibrated is not None
        bases.append(codec.calibrated.double()[:, None])
    m = torch.eye(codec.shape.dim, dtype=torch.float64) + codec.strength * sum(t.mT @ t for t in bases)
    keys, decoded = (codec.shape.blocks(t).double() for t in (x, made))
    for start in range(0, codec.shape.dim - codec.channels, codec.channels):
        here, rest = slice(start, start + codec.channels), slice(start + codec.channels, None)
        change = torch.linalg.solve(m[..., rest, rest], m[..., rest, here])
        keys[..., rest] -= (decoded - keys)[..., here] @ change.mT
    slack += 2.0**-18 * float(x.abs().max())
    bound(codec.inner, keys.flatten(2, 3).float(), packed, made, slack, factor)


def check_residual_vq(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """Greedy: each stage's codeword is the nearest to what is left, and the codewords add up to what is decoded."""
    assert isinstance(codec, ResidualVQ)
    scale = torch.ones(codec.shape.heads, codec.shape.dim) if codec.scale is None else codec.scale
    scale = scale.double()[None, :, None]
    rest, total = x.double() / scale, torch.zeros_like(x, dtype=torch.float64)
    for i, (band, book) in enumerate(zip(codec.bands, codec.codebooks, strict=True)):
        codes = unpack(packed[f"codes.{i}"], codec.code_bits[i], codec.shape.block)
        for stage, words in enumerate(book.double()):
            code = codes[..., stage, :].flatten(2).long()
            left = rest[..., band].flatten(0, 2)
            least = torch.cdist(left, words, compute_mode="donot_use_mm_for_euclid_dist").amin(-1).view(code.shape)
            rest[..., band] -= words[code]
            total[..., band] += words[code]
            assert bool((rest[..., band].norm(dim=-1) <= least * (1 + 1e-6) + 50 * slack + 1e-12).all())
    assert torch.allclose(made.double(), total * scale, rtol=1e-5, atol=1e-6 * float(total.abs().max()) + slack)


def check_transform(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """Each pair of coordinates is the point of its grid that is nearest, at the token's RMS; the rest is the mean."""
    assert isinstance(codec, Transform)
    encoder = torch.linalg.inv(codec.decoder.double())
    mean, shape = codec.mean.double()[:, None], codec.shape
    y = (x.double() - mean) @ encoder
    coded = y[..., : codec.coded]
    norm = packed["norm"].double()[:, 0].flatten(1)  # (B, T)
    rms = coded.square().mean((1, 3)).sqrt()
    loose = 1e-4 * float(y.abs().max()) + 100 * slack
    assert bool(((norm - rms).abs() <= HALF * rms + loose + TINIEST).all())
    found = torch.zeros_like(y)
    size = norm[:, None, :, None]
    for bits, at in codec.tiers.items():
        points = codec._points(codec._unpack(packed[f"codes{bits}"], bits), bits).double().flatten(2, 3)
        gain = 1.0 if codec.gain == "mse" else (1 - MSE[bits]) ** (-0.5 if codec.role == "key" else -1)
        grid = torch.tensor([[-ONE_BIT], [ONE_BIT]]) if bits == 1 else gaussian_grid(*GRID_OF[bits])
        d = grid.shape[1]
        unit = (y[..., at] / size.clamp_min(2.0**-24)).reshape(-1, d)
        best = torch.cdist(unit, grid.double(), compute_mode="donot_use_mm_for_euclid_dist").amin(-1)
        left = ((points / gain).reshape(-1, d) - unit).norm(dim=-1)
        assert bool((left <= best + 1e-3 * unit.norm(dim=-1) + loose / float(size.clamp_min(1e-6).min())).all())
        found[..., at] = points * size
    expected = found @ codec.decoder.double() + mean
    assert torch.allclose(made.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + slack)
    assert made.shape[1] == shape.heads


def check_by_head(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    """Each part on its heads; one with statistics, which are of all heads, by its bits."""
    assert isinstance(codec, ByHead)
    start = 0
    for number, part in enumerate(codec.parts):
        heads = slice(start, start := start + part.shape.heads)
        own = {n.removeprefix(f"{number}."): t for n, t in packed.items() if n.startswith(f"{number}.")}
        by = check_unlisted if part.stats else bound
        by(part, x[:, heads], own, made[:, heads], slack, factor)


Bound = Callable[[Codec, Tensor, Packed, Tensor, float, float], None]
BOUNDS: dict[str, Bound] = {
    "exact": check_exact,
    "float8": check_float8,
    "uniform": check_uniform,
    "higgs": check_higgs,
}
BOUNDS["scaled"] = check_scaled
BOUNDS["transform"] = check_transform
BOUNDS["mixkvq"] = check_mixkvq
BOUNDS["squat"] = check_squat
BOUNDS["residual-vq"] = check_residual_vq
BOUNDS["by-head"] = check_by_head
BOUNDS["predicted"] = lambda codec, *rest: bound(codec.inner, *rest)


def bound(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    BOUNDS.get(codec.name, check_unlisted)(codec, x, packed, made, slack, factor)


def check_unlisted(codec: Codec, x: Tensor, packed: Packed, made: Tensor, slack: float, factor: float) -> None:
    half_of_bits(codec, x, made, slack, factor)


def check(codec: Codec, x: Tensor, packed: Packed, made: Tensor, factor: float = 1.03) -> None:
    """factor: how far above the grid's error on the Gaussian HIGGS may be."""
    assert bool(torch.isfinite(made).all())
    bound(codec, x, packed, made, slack_of(codec, x), factor)


def higgs_bits(codec: Higgs) -> float:
    width = codec.shape.dim if codec.norm == "head" else codec.shape.heads * codec.shape.dim
    return math.log2(codec.n) / codec.d + 16 / (codec.shape.block if codec.axis == "token" else width)


STORED_BITS: dict[str, Callable[[Any], float]] = {
    "exact": lambda codec: 32 if codec.dtype == "float32" else 16,
    "uniform": lambda codec: codec.bits + (16 if codec.mode == "symmetric" else 32) / codec.group,
    "float8": lambda codec: 8,
    "higgs": higgs_bits,
    "scaled": lambda codec: stored_bits(codec.inner),
    "squat": lambda codec: stored_bits(codec.inner),
    "residual-vq": lambda codec: (
        sum(book.shape[0] * math.log2(book.shape[1]) for book in codec.codebooks) / codec.shape.dim
    ),
    "predicted": lambda codec: stored_bits(codec.inner),
    "transform": lambda codec: sum(codec.bits) / codec.shape.dim + 16 / (codec.shape.heads * codec.shape.dim),
    "mixkvq": lambda codec: mixkvq_bits(codec, *codec.channels()),
    "by-head": lambda codec: sum(stored_bits(p) * p.shape.heads for p in codec.parts) / codec.shape.heads,
}


def stored_bits(codec: Codec) -> float:
    """By the formulas above; a codec without one is taken by its word, which its packed tensors are held to."""
    return STORED_BITS.get(codec.name, type(codec).bits_per_value)(codec)


def mixkvq_bits(codec: MixKVQ, full: float, four: float, two: float) -> float:
    """Per channel 16 (32), 4 and 2 bits with float16 scale and minimum, a byte in the permutation; five counts a head."""
    dim, block, raw = codec.shape.dim, codec.shape.block, {"float32": 32}.get(codec.dtype, 16)
    counts = 5 * 8 if codec.ragged else 0
    return (full * raw + (4 * four + 2 * two) + (four + two) * 32 / codec.group + (dim * 8 + counts) / block) / dim


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_under_contract(name: str) -> None:
    """By itself and inside `predicted`, for some shape and role."""
    own = [case.values[0] for case in cases(SHAPES) if case.id.startswith(f"{name}-")]
    assert own, f"codec {name!r} fits none of {SHAPES}: give its settings other defaults, or list it in CONFIGURATIONS"
    assert {type(case.codec()) for case in own} == {CODECS[name]}
    inner = [case.values[0].codec().inner for case in cases(SHAPES) if case.id.startswith("predicted-")]
    assert name == "predicted" or CODECS[name] in map(type, inner)


def test_an_unlisted_codec_is_held_to_something() -> None:
    """The bound without an entry: one that good codecs meet on the Gaussian and one that drops a head does not."""
    shape, x = Shape(2, 64, 16), normal(2, 2, 64, 64)
    for made in (uniform(1, mode="symmetric"), uniform(2), uniform(8), higgs(), exact("bfloat16"), float8("e4m3fn")):
        codec = made(shape, "key")
        check_unlisted(codec, x, {}, codec.decode(codec.encode(x)), 0.0, 1.0)
    broken = x.clone()
    broken[:, 1] = 0
    with pytest.raises(AssertionError):
        check_unlisted(uniform(4)(shape, "key"), x, {}, broken, 0.0, 1.0)


def test_every_predictor_is_under_contract() -> None:
    made = [make(SHAPES[0], roles_of("predicted", label)[-1]) for label, make in CONFIGURATIONS["predicted"].items()]
    tried = {codec.predictor.name for codec in made if isinstance(codec, Predicted)}
    assert tried == set(PREDICTORS)


@every_case
def test_round_trip(case: Subject) -> None:
    numbers.round_trip(case, check, 1.03)


@every_case
def test_stored_as_declared(case: Subject) -> None:
    checks.stored_bits(case)
    codec, blocks = case.codec(), 3
    inner = codec.inner if isinstance(codec, Predicted) else codec
    parts = {part.shape.heads for part in inner.parts} if isinstance(inner, ByHead) else set()
    assert {spec[0] for spec, _ in codec.tensor_specs().values()} <= {1, case.shape.heads} | parts
    if codec.ragged:
        assert isinstance(inner, MixKVQ)
        packed = codec.encode(case.noise(2, blocks), case.context(2, blocks * case.shape.block))
        shares = [items(packed[name]).double().mean().item() for name in ("raw", "four_codes", "two_codes")]
        stored = nbytes(packed) * 8 / (case.shape.values * 2 * blocks)
        assert stored == pytest.approx(mixkvq_bits(inner, *shares))
        assert codec.bits_per_value() == pytest.approx(stored_bits(codec), rel=0.01)
        return
    assert codec.bits_per_value() == pytest.approx(stored_bits(codec))


@every_case
def test_bytes_depend_on_the_block_alone(case: Subject) -> None:
    checks.chunking(case)


@every_case
def test_cropped_blocks_decode_as_before(case: Subject) -> None:
    checks.truncation(case)


@pytest.mark.parametrize("shape", [Shape(2, 32, 1), Shape(8, 128, 32)], ids=["C64-block1", "C1024-block32"])
def test_bytes_of_a_layer_coded_against_a_predicted_one(shape: Shape) -> None:
    """What cache and calibration do: the reconstruction of a predicted layer feeds the predictor of the next.

    Its bits may not depend on the other blocks and rows either, or the next layer's bytes do. Residuals are kept
    exactly here, so that one last bit shows.
    """
    lower, upper = predicted(higgs())(shape, "key"), predicted(exact("float32"))(shape, "key")
    blocks, b = (128 if shape.block == 1 else 3), shape.block
    first, x, y = (normal(3, shape.heads, blocks * b, shape.dim, seed=i) for i in range(3))

    def coded(rows: slice, tokens: slice) -> Packed:
        below = Context(1, k1=first[rows, :, tokens])
        made = lower.encode_decode(x[rows, :, tokens], below)[1]
        return upper.encode(y[rows, :, tokens], Context(2, k1=made))

    whole = coded(slice(0, 3), slice(0, blocks * b))["raw"]
    alone = [coded(slice(0, 1), slice(i * b, i * b + b))["raw"] for i in range(blocks)]
    assert torch.equal(torch.cat(alone, 2), whole[:1]), "block by block"
    assert torch.equal(coded(slice(1, 2), slice(0, blocks * b))["raw"], whole[1:2]), "one row alone"


@every_configuration
def test_the_same_again(case: Subject) -> None:
    checks.deterministic(case)


@every_case
def test_state_builds_the_same_codec(case: Subject) -> None:
    checks.state(case)


@every_configuration
def test_a_bundle_holds_the_codec(case: Subject) -> None:
    checks.registered(case)
    checks.in_bundle(case)


@every_configuration
def test_constants_move_to_a_device(case: Subject) -> None:
    checks.devices(case)


@every_case
@pytest.mark.parametrize("value", [0.7, -300.0])
def test_constant(case: Subject, value: float) -> None:
    numbers.constant(case, value, check)


@every_configuration
def test_zero_and_tiny(case: Subject) -> None:
    numbers.tiny(case)


@every_configuration
@pytest.mark.parametrize("outlier", [50.0, 3000.0])
def test_one_outlier(case: Subject, outlier: float) -> None:
    numbers.outlier(case, outlier, check)


@every_configuration
def test_large_values_fit(case: Subject) -> None:
    numbers.large(case, check)


@every_configuration
@pytest.mark.parametrize("size", [1e5, 1e30, 3e38])
def test_too_large_is_refused_or_right(case: Subject, size: float) -> None:
    numbers.too_large(case, size, check)


@every_configuration
def test_narrow_input(case: Subject) -> None:
    checks.dtypes(case)


@every_configuration
def test_no_blocks(case: Subject) -> None:
    checks.no_blocks(case)


@every_configuration
def test_input_of_another_shape(case: Subject) -> None:
    checks.other_shapes(case)


@pytest.mark.parametrize("make", [uniform(3, 5), uniform(1, 5), higgs(n=64), higgs()])
@pytest.mark.parametrize("role", ROLES)
def test_sizes_that_do_not_fill_words(make: Make, role: Role) -> None:
    case = Subject(make, Shape(1, 10, 3), role)
    codec, context = case.codec(), case.context(2, 0)
    x, packed, made = coded(codec, case.noise(2, 300), context)
    check(codec, x, packed, made)
    assert sum(t.numel() * t.element_size() for t in packed.values()) == codec.block_bytes() * 600
    assert stored_bits(codec) < codec.bits_per_value() < stored_bits(codec) + 3


# Finite or not


def test_non_finite_input_names_layer_and_head() -> None:
    x = torch.zeros(2, 4, 8, 16)
    check_finite(x, 3, "key")
    for bad in (math.nan, math.inf, -math.inf):
        x[1, 2, 7, 0] = bad
        with pytest.raises(NonFiniteError, match="layer 3, value head 2: a NaN or infinity") as raised:
            check_finite(x, 3, "value")
        assert "\n" not in str(raised.value)
        with pytest.raises(NonFiniteError, match="layer 0, key head 2"):
            check_finite(x.bfloat16(), 0, "key")


@pytest.mark.parametrize("value", [65520.0, -1e6, math.inf, math.nan])
def test_scales_that_float16_cannot_hold(value: float) -> None:
    assert to_half(torch.tensor([65504.0, -65504.0, 1.0]), "scale").tolist() == [65504.0, -65504.0, 1.0]
    with pytest.raises(NonFiniteError, match=r"scale of .* does not fit float16"):
        to_half(torch.tensor([1.0, value]), "scale")


# Parameters

S = Shape(2, 16, 8)
GRID, SIGN = Higgs(S, "key").tensors().values()
ONES = torch.ones(2, 16).half()


SETTINGS = {
    codec.name: codec.config()
    for codec in (
        Exact(S, "key"),
        Float8(S, "key"),
        Uniform(S, "key", 4, 16),
        Higgs(S, "key"),
        MixKVQ(S, "key", group=8),
    )
}


def read(codec: str, tensors: dict[str, Tensor] | None = None, **config: Any) -> Codec:
    """config: changes of the settings that a bundle has, all of which a reader wants."""
    known = SETTINGS.get(codec, {}) if isinstance(codec, str) else {}
    return build(S, "key", {"codec": codec, "config": known | config}, tensors or {})


def read_predicted(weights: dict[str, Tensor], kind: str = "linear", inputs: tuple[str, ...] = ("k1",)) -> Codec:
    tensors = {f"predictor.{name}": t for name, t in weights.items()}
    inner = {"codec": "uniform", "config": SETTINGS["uniform"]}
    return read("predicted", tensors, predictor={"kind": kind, "inputs": list(inputs)}, inner=inner)


LINEAR = {"weight": torch.zeros(32, 32).half(), "bias": torch.zeros(32).half()}
BOOKS = torch.zeros(2, 16, 16).half()
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "uniform 0 bits": (lambda: Uniform(S, "key", 0, 16), "0 bits: allowed are 1 to 8"),
    "uniform 9 bits": (lambda: Uniform(S, "key", 9, 16), "9 bits: allowed are 1 to 8"),
    "uniform half bits": (lambda: read("uniform", bits=2.5, group=16), "2.5"),
    "uniform group of text": (lambda: read("uniform", group="16"), "uniform"),
    "uniform fractional group": (lambda: read("uniform", group=16.0), "16.0"),
    "uniform group 7": (lambda: Uniform(S, "key", 4, 7), "groups of 7 along channel: must divide 16"),
    "uniform group 16 of 8": (lambda: Uniform(S, "key", 4, 16, "token"), "groups of 16 along token: must divide 8"),
    "uniform group 0": (lambda: Uniform(S, "key", 4, 0), "groups of 0"),
    "uniform group -8": (lambda: Uniform(S, "key", 4, -8), "groups of -8"),
    "uniform axis": (lambda: Uniform(S, "key", 4, 8, "head"), "axis 'head': allowed are 'channel' and 'token'"),  # type: ignore[arg-type]
    "uniform mode": (lambda: read("uniform", group=16, mode="signed"), "mode 'signed': allowed are 'asymmetric'"),
    "uniform search": (lambda: read("uniform", group=16, search=8), "search 8: must be true or false"),
    "float8 format": (lambda: read("float8", format="e3m4"), "format 'e3m4': allowed are 'e4m3fn', 'e5m2'"),
    "float8 scale": (lambda: Float8(S, "key", scale=0.0), "scale 0.0: must be a positive finite number"),
    "scaled source": (lambda: Scaled(Uniform(S, "key", 4, 16), ONES, "prompt"), "from 'prompt': allowed are 'calib"),
    "scaled shape": (lambda: Scaled(Uniform(S, "key", 4, 16), ONES[:1]), r"factor \(1, 16\).*needs \(2, 16\)"),
    "scaled zero": (lambda: Scaled(Uniform(S, "key", 4, 16), 0 * ONES), "factor of 0.0: must be positive"),
    "scaled prediction": (
        lambda: Scaled(predicted(uniform(4))(S, "key"), ONES),
        "around 'predicted': predictions are not scaled; put it inside",
    ),
    "exact dtype": (lambda: Exact(S, "key", "float64"), "float64.*float32"),
    "exact dtype read": (lambda: read("exact", dtype="int8"), "int8.*float32"),
    "higgs d": (lambda: Higgs(S, "key", d=8, n=256), "d=8 n=256: allowed are d=2 n=16"),
    "higgs n": (lambda: Higgs(S, "key", n=512), "d=2 n=512: allowed are d=2 n=16"),
    "higgs n read": (lambda: read("higgs", {"grid": torch.zeros(512, 2), "sign": SIGN}, n=512), "higgs"),
    "higgs rotation": (lambda: Higgs(S, "key", rotation="layer"), "rotation over 'layer'"),  # type: ignore[arg-type]
    "higgs norm": (lambda: Higgs(S, "key", norm="block"), "norm over 'block'"),  # type: ignore[arg-type]
    "higgs axis": (lambda: Higgs(S, "key", axis="head"), "axis 'head'"),  # type: ignore[arg-type]
    "higgs odd head": (lambda: Higgs(Shape(2, 7, 8), "key"), "d=2"),
    "higgs odd block": (lambda: Higgs(Shape(2, 16, 9), "key", axis="token"), "d=2"),
    "higgs grid missing": (lambda: read("higgs", {"sign": SIGN}), "grid"),
    "higgs grid misshapen": (lambda: read("higgs", {"grid": GRID[:8], "sign": SIGN}), "grid"),
    "higgs grid of another d": (lambda: read("higgs", {"grid": torch.zeros(16, 4), "sign": SIGN}), "grid"),
    "higgs sign misshapen": (lambda: read("higgs", {"grid": GRID, "sign": SIGN[:16]}), "sign"),
    "mixkvq values": (lambda: MixKVQ(S, "value", group=8), "mixkvq codec for values"),
    "mixkvq group": (lambda: MixKVQ(S, "key", group=5), "groups of 5 tokens: must divide the block of 8"),
    "mixkvq group of text": (lambda: read("mixkvq", group="8"), "group '8': must be a whole number"),
    "mixkvq round_up": (lambda: read("mixkvq", group=8, round_up=0), "round_up 0"),
    "mixkvq head": (lambda: MixKVQ(Shape(1, 272, 8), "key", group=8), "head_dim 272: .* at most 256"),
    "mixkvq dtype": (lambda: read("mixkvq", group=8, dtype="int8"), "dtype 'int8': allowed are 'float32'"),
    "mixkvq importance": (
        lambda: read("mixkvq", group=8, importance="keys"),
        "'keys': allowed are 'query', 'recent', 'none'",
    ),
    "mixkvq normalise": (lambda: read("mixkvq", group=8, normalise="mean"), "'mean': allowed are 'median', 'none'"),
    "mixkvq order": (lambda: read("mixkvq", group=8, tau_low=3, tau_high=2), r"3.0 and 2.0: .* in this order"),
    "mixkvq nan": (lambda: read("mixkvq", group=8, tau_high=math.nan), "tau_high nan: must be a number"),
    "mixkvq full alone": (lambda: read("mixkvq", group=8, full=8), "give both or none"),
    "mixkvq full 4": (lambda: read("mixkvq", group=8, full=4, four=0), "multiples of 8"),
    "mixkvq too many": (lambda: read("mixkvq", group=8, full=8, four=16), "at most 16"),
    "mixkvq expected": (lambda: read("mixkvq", group=8, expected=[9, 9]), "channels of 16"),
    "residual-vq bands overlap": (
        lambda: ResidualVQ(S, "key", [[0, 1], [1]], [BOOKS] * 2),
        "every dimension 0 to 15 once",
    ),
    "residual-vq band empty": (
        lambda: ResidualVQ(S, "key", [range(16), []], [BOOKS] * 2),
        "every dimension 0 to 15 once",
    ),
    "residual-vq band without codebooks": (
        lambda: ResidualVQ(S, "key", [range(8), range(8, 16)], [BOOKS]),
        "1 codebooks for 2",
    ),
    "residual-vq narrow codebooks": (
        lambda: ResidualVQ(S, "key", [range(16)], [BOOKS[..., :8]]),
        "needs .*, 16. float16",
    ),
    "residual-vq float32": (lambda: ResidualVQ(S, "key", [range(16)], [BOOKS.float()]), "float32, needs"),
    "residual-vq 12 codewords": (
        lambda: ResidualVQ(S, "key", [range(16)], [BOOKS[:, :12]]),
        "of 12 codewords.*powers of two",
    ),
    "residual-vq scale misshapen": (
        lambda: ResidualVQ(S, "key", [range(16)], [BOOKS], BOOKS[0, 0]),
        "scale.*needs .2, 16",
    ),
    "residual-vq scale zero": (lambda: ResidualVQ(S, "key", [range(16)], [BOOKS], BOOKS[0, :2]), "must be positive"),
    "residual-vq codebooks missing": (
        lambda: read("residual-vq", bands=[list(range(16))], stages=[2], sizes=[16]),
        "residual-vq.*codebooks",
    ),
    "residual-vq other sizes": (
        lambda: read("residual-vq", {"codebooks.0": BOOKS}, bands=[list(range(16))], stages=[3], sizes=[16]),
        "3, 16",
    ),
    "by-head of one part": (lambda: ByHead([Exact(S, "key")]), "of 1 parts: needs two or more"),
    "by-head of other blocks": (
        lambda: ByHead([Exact(S, "key"), Exact(replace(S, block=4), "key")]),
        "part 1 of 'exact': keys of 16 channels in blocks of 4 tokens, part 0 has keys of 16 in blocks of 8",
    ),
    "by-head of both roles": (lambda: ByHead([Exact(S, "key"), Exact(S, "value")]), "values of 16.*part 0 has keys"),
    "by-head of predicted": (lambda: ByHead([predicted(exact("float32"))(S, "key")] * 2), "put by-head inside"),
    "by-head of ragged": (lambda: ByHead([mixkvq()(S, "key")] * 2), "its blocks differ in size"),
    "by-head twice": (
        lambda: ByHead([scaled(by_head(exact("float16"), exact("float32")))(S, "key")] * 2),
        "heads are divided already",
    ),
    "inputs none": (lambda: Predicted(Exact(S, "key"), predictor("linear", 32, 32), ()), "allowed are k1"),
    "inputs unknown": (lambda: read_predicted(LINEAR, inputs=("q1",)), "q1.*allowed are 'k1'"),
    "inputs k0 for keys": (
        lambda: read_predicted(LINEAR | {"weight": torch.zeros(64, 32).half()}, inputs=("k1", "k0")),
        "k0 for values",
    ),
    "predictor unknown": (lambda: read_predicted(LINEAR, "cubic"), "'cubic': allowed are 'bias'"),
    "predictor incomplete": (lambda: read_predicted({"bias": LINEAR["bias"]}), "lacks weight"),
    "predictor too narrow": (lambda: read_predicted(LINEAR, inputs=("k1", "v1")), "linear"),
    "predictor of another width": (lambda: read_predicted(LINEAR | {"bias": torch.zeros(16).half()}), "linear"),
    "codec unknown": (lambda: read("gzip"), "'gzip': this version knows exact, "),
    "codec absent": (lambda: build(S, "key", {}, {}), "None"),
    "codec a list": (lambda: read(["higgs"]), "higgs"),  # type: ignore[arg-type]
    "config absent": (lambda: build(S, "key", {"codec": "uniform"}, {}), "uniform.*config"),
    "config of another version": (lambda: read("uniform", group=16, smoothing=1), "uniform.*smoothing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_parameters_are_refused_in_one_line(what: str) -> None:
    attempt, pattern = REFUSED[what]
    with pytest.raises(KVCalError, match=pattern) as raised:
        attempt()
    assert "\n" not in str(raised.value)


def test_predictor_input_that_is_not_there() -> None:
    codec = predicted(uniform(2))(S, "value")
    with pytest.raises(KVCalError, match="layer 5: predictor input k0 is missing"):
        codec.encode(torch.zeros(1, 2, 8, 16), Context(5, v1=torch.zeros(1, 2, 8, 16)))
    assert codec.needs == {"v1", "k0"}


# Each codec's own arithmetic


@pytest.mark.parametrize("role", ROLES)
def test_by_head_is_each_codec_on_its_heads(role: Role) -> None:
    """With the statistics of these heads, to the byte; under predictors, too."""
    first, others = squat(uniform(2, 8, "token")), higgs()
    whole = by_head(first, others)(Shape(3, 16, 8), role)
    assert isinstance(whole, ByHead)
    x, stats = normal(2, 3, 16, 16), statistics(whole, 2, 2)
    packed = whole.encode(x, Context(stats=stats))
    made = whole.decode(packed, Context(stats=stats))
    for number, (part, heads) in enumerate(zip(whole.parts, (slice(0, 1), slice(1, 3)), strict=True)):
        context = Context(stats={name: t[:, heads] for name, t in stats.items()})
        own = part.encode(x[:, heads], context)
        checks.require_same(
            {n.removeprefix(f"{number}."): t for n, t in packed.items() if n[0] == str(number)}, own, "by head"
        )
        assert torch.equal(made[:, heads], part.decode(own, context))
    assert whole.paper_bits() == pytest.approx(sum(p.paper_bits() * p.shape.heads for p in whole.parts) / 3)
    assert isinstance(whole.fused(), str) and whole.stats == whole.parts[0].stats


def test_uniform_by_hand() -> None:
    shape = Shape(1, 4, 2)
    x = torch.tensor([[0.0, 0.5, 1.5, 3.0], [-2.0, -1.0, 0.0, 1.0]])[None, None]
    asymmetric = Uniform(shape, "key", 2, 4)
    packed = asymmetric.encode(x)
    # steps of 1; halves round to even. Four codes of two bits fill one byte, first element lowest.
    assert packed["codes"].flatten().tolist() == [0 | 0 << 2 | 2 << 4 | 3 << 6, 0 | 1 << 2 | 2 << 4 | 3 << 6]
    assert (packed["scale"].flatten().tolist(), packed["min"].flatten().tolist()) == ([1.0, 1.0], [0.0, -2.0])
    assert asymmetric.decode(packed).flatten().tolist() == [0.0, 0.0, 2.0, 3.0, -2.0, -1.0, 0.0, 1.0]
    symmetric = Uniform(shape, "key", 2, 4, mode="symmetric")
    assert symmetric.decode(symmetric.encode(x)).flatten().tolist() == [0.0, 0.0, 1.5, 1.5, -2.0, -1.0, 0.0, 1.0]
    one_bit = Uniform(shape, "key", 1, 4, mode="symmetric")
    assert one_bit.decode(one_bit.encode(x)).flatten().tolist() == [1.25] * 4 + [-1.0, -1.0, 1.0, 1.0]


def test_values_are_packed_along_tokens_and_keys_along_channels() -> None:
    shape = Shape(1, 2, 4)
    x = torch.arange(8.0).view(1, 1, 4, 2)
    key, value = Uniform(shape, "key", 8, 1), Uniform(shape, "value", 8, 1)
    assert key.tensor_specs()["codes"][0] == (1, 4, 2)
    assert value.tensor_specs()["codes"][0] == (1, 2, 4)
    assert torch.equal(key.decode(key.encode(x)), value.decode(value.encode(x)))
    codecs = [Uniform(shape, role, 8, 2) for role in ROLES]
    rows = [codec.encode(x)["codes"][0, 0, 0] for codec in codecs]
    assert torch.equal(rows[0], rows[1].T)


# Relative MSE on Gaussian groups of 32: asymmetric, symmetric, hybrid; plain scales, then searched ones
GAUSSIAN_ERROR = {
    2: ((0.154, 0.153, 0.135), (0.0979, 0.1100, 0.0965)),
    3: ((0.0281, 0.0358, 0.0272), (0.0240, 0.0264, 0.0235)),
    4: ((0.00613, 0.00877, 0.00602), (0.00577, 0.00668, 0.00562)),
}
SIMULATION = {2: 0.429, 3: 0.051, 4: 0.0093}  # methods.md: symmetric ones of InnerQ's authors, which waste codes


@pytest.mark.parametrize("bits", GAUSSIAN_ERROR)
@pytest.mark.parametrize("search", [False, True], ids=["plain", "search"])
def test_uniform_error_on_gaussian_groups_of_32(bits: int, search: bool) -> None:
    x = normal(1, 1, 32 * 64, 128)
    found = {}
    for mode in MODES:
        codec = Uniform(Shape(1, 128, 32), "key", bits, 32, mode=mode, search=search)  # type: ignore[arg-type]
        packed = codec.encode(x)
        found[mode] = float((codec.decode(packed) - x).square().mean())
        print(f"{bits} bits, {mode}: {found[mode]:.4f}, {codec.symmetric_share(packed):.0%} of groups symmetric")
    assert list(found.values()) == pytest.approx(GAUSSIAN_ERROR[bits][search], rel=0.02)
    assert found["symmetric"] < SIMULATION[bits]
    assert bits > 2 or found["symmetric"] < (0.26 if search else 0.36) * SIMULATION[bits]


def test_hybrid_takes_the_mode_that_fits_the_group() -> None:
    """InnerQ section 4.1.2's example, one-sided groups, beside centred ones; minima are dense. As the sign bit says
    which, and where a kernel reads the blocks the zero point.
    """
    for dim in (32, 64):
        x = normal(1, 1, 64, dim)
        x[:, :, :32] = x[:, :, :32].clamp(-1, 1)
        x[:, :, :32, 5::32] = -2.0  # the symmetric codes -2 to 1 fit these groups
        x[:, :, 32:] = 3 + x[:, :, 32:].abs()
        codec = Uniform(Shape(1, dim, 32), "key", 2, 32, mode="hybrid")
        packed = codec.encode(x)
        assert ("words" in packed) == (dim == 64)
        _, scale, low = codec.groups(packed)
        assert low is not None and low.shape == scale.shape == (1, 1, 2, 32, dim // 32)
        assert codec.symmetric_share(packed) == 0.5
        assert codec.bits_per_value() == 3.0 == sum(t.nbytes for t in packed.values()) * 8 / x.numel()
        if dim == 32:
            assert torch.signbit(scale).flatten(2).unique(dim=-1).numel() == 2
            assert bool((low[0, 0, 0] == 0).all())
        else:
            assert bool((scale > 0).all()) and torch.equal(low[0, 0, 0], -2 * scale[0, 0, 0])
        assert bool((low[0, 0, 1] >= 3).all())


def test_bundles_that_say_symmetric() -> None:
    """The setting's first form, before there was a hybrid mode."""
    old = {"bits": 3, "group": 16, "axis": "channel"}
    for said, mode in ((True, "symmetric"), (False, "asymmetric")):
        state = {"codec": "uniform", "config": {**old, "symmetric": said}}
        assert build(S, "key", state, {}).config() == {**old, "mode": mode, "search": False}


@given(
    st.integers(1, 8),
    st.sampled_from(ROLES),
    st.lists(st.floats(-3e4, 3e4, width=32), min_size=16, max_size=16),
    st.floats(-3e4, 3e4, width=32),
)
def test_asymmetric_bound_holds_for_any_group(bits: int, role: Role, values: list[float], shift: float) -> None:
    codec = Uniform(Shape(1, 16, 1), role, bits, 16)
    x = torch.tensor(values).view(1, 1, 1, 16)
    for group in (x, x * 1e-6 + shift):
        packed = codec.encode(group)
        check(codec, group, packed, codec.decode(packed))


@given(st.lists(st.floats(-3e4, 3e4, width=32), min_size=16, max_size=16), st.integers(1, 8))
def test_symmetric_bound_holds_for_any_group(values: list[float], bits: int) -> None:
    codec = Uniform(Shape(1, 16, 1), "key", bits, 16, mode="symmetric")
    x = torch.tensor(values).view(1, 1, 1, 16)
    packed = codec.encode(x)
    check(codec, x, packed, codec.decode(packed))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"rotation": "token", "n": 64}, {"norm": "head", "d": 4, "n": 256}, {"norm": "head", "d": 1, "n": 16}],
)
def test_higgs_against_the_definition(settings: dict[str, Any], role: Role) -> None:
    """An explicit matrix, float64 and brute force; float16's rounding of a norm moves it by 5e-4, and a few codes with
    it.
    """
    shape = Shape(4, 32, 8)
    codec, x = Higgs(shape, role, **settings), normal(2, 4, 16, 32)
    width = codec.rotation_width
    assert width == (128 if codec.rotation == "token" else 32)
    block = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)])
    turn = torch.block_diag(*[block.double() / width**0.5] * (128 // width)) * codec.sign.double()[:, None]
    flat = x.double().transpose(1, 2).flatten(2) @ turn
    spans = flat.unflatten(-1, (4 if codec.norm == "head" else 1, -1))
    unit = spans.norm(dim=-1, keepdim=True) / spans.shape[-1] ** 0.5
    grid = codec.grid.double()
    tuples = (spans / unit).reshape(-1, codec.d)
    rounded = grid[torch.cdist(tuples, grid).argmin(-1)].view_as(spans) * unit
    expected = (rounded.flatten(2) @ turn.T).unflatten(-1, (4, 32)).transpose(1, 2)
    close = torch.isclose(codec.decode(codec.encode(x)).double(), expected, rtol=0, atol=5e-3).all(-1)
    assert float(close.double().mean()) > 0.85


def test_higgs_norm_per_head_keeps_an_outlier_to_its_head() -> None:
    x = normal(1, 8, 32, 128)
    x[:, 0, :, 7] += 50
    codec = Higgs(Shape(8, 128, 32), "key", norm="head")
    error = (codec.decode(codec.encode(x)) - x).square().mean((0, 2, 3)) / x.square().mean((0, 2, 3))
    assert float(error.max()) < 1.1 * GRID_ERROR[2, 16]


def test_higgs_codes_all_take_part() -> None:
    for d, n in GRID_ERROR:
        codec = Higgs(Shape(2, 64, 32), "key", d=d, n=n)
        packed = codec.encode(normal(4, 2, 640, 64))
        kept = packed["words" if "words" in packed else "codes"].view(torch.uint8)
        sizes = kept.flatten().long().bincount(minlength=256)
        assert int((sizes > 0).sum()) == 256  # every byte value occurs: no bit of it is idle


def test_resident_bytes_of_a_scheme() -> None:
    """The grid is one tensor for all; every seed has signs of its own."""
    shape = Shape(2, 64, 16)
    pairs = [LayerCodecs(Higgs(shape, "key", seed=2 * i), Higgs(shape, "value", seed=2 * i + 1)) for i in range(60)]
    scheme = Scheme(Windows(4, 32, shape.block), "post_rope", tuple(pairs))
    signs = {name: t for name, t in pairs[0].key.tensors().items() if name != "grid"}
    assert scheme.resident_bytes() == GRID.nbytes + 120 * sum(t.nbytes for t in signs.values())


def ocp_value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """An 8-bit float by the rules of the OCP specification; e4m3 has no infinity and one NaN a sign."""
    bias, top = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code & 127) >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == top and (exponent_bits == 5 or mantissa == 7):
        return math.nan
    if not exponent:
        return float(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
    return float(sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize(("format", "exponent_bits"), [("e4m3fn", 4), ("e5m2", 5)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_float8_against_the_specification(format: str, exponent_bits: int, scale: float) -> None:
    """Every code decodes to its value, every number goes to the nearest one, halves to even, what is larger saturates."""
    table = torch.tensor([ocp_value(code, exponent_bits, 7 - exponent_bits) for code in range(256)]).double()
    codec = Float8(Shape(1, 1, 1), "key", format, scale)
    finite = ~table.isnan()
    codes = torch.arange(256, dtype=torch.uint8)[finite].view(1, 1, -1, 1, 1)
    assert torch.equal(codec.decode({"codes": codes}).flatten().double(), table[finite] * scale)
    values = table[:128][finite[:128]]
    x = torch.cat(
        [normal(2000) * 3, normal(500) * float(values.max()), normal(500) * 0.01, torch.tensor([1e30, -1e30])]
    )
    x = torch.cat([x, ((values[1:] + values[:-1]) / 2).float()]) * scale
    made = codec.encode(x.view(1, 1, -1, 1))["codes"].flatten()
    distance = (x.double()[:, None] / scale - table[finite]).abs()
    best = distance.amin(1)
    assert torch.equal((x.double() / scale - table[made.long()]).abs(), best)
    tie = ((distance == best[:, None]).sum(1) > 1) & (x.abs() < 1e6)
    assert int(tie.sum()) >= len(values) - 1 and bool((made[tie] % 2 == 0).all())


def test_scaled_codes_the_quotient() -> None:
    """Scores of the codes with the query times f are those of the decoded keys: what a fused kernel computes."""
    factor = (normal(2, 16, seed=3).abs() + 0.1).half()
    codec = Scaled(Uniform(S, "key", 3, 16, mode="symmetric"), factor)
    x, query = normal(1, 2, 8, 16) * factor.float()[:, None], normal(1, 2, 1, 16, seed=4)
    packed = codec.encode(x)
    checks.require_same(packed, codec.inner.encode(x / factor.float()[:, None]), "scaled")
    keys = codec.inner.decode(packed)
    assert torch.allclose((query * factor.float()[:, None]) @ keys.mT, query @ codec.decode(packed).mT, atol=1e-4)
    plain = codec.inner.decode(codec.inner.encode(x))
    relative = [float(((made - x) / factor.float()[:, None]).norm()) for made in (codec.decode(packed), plain)]
    assert relative[0] < 0.6 * relative[1]


def test_predicted_stores_the_residual_and_adds_the_same_guess() -> None:
    codec = predicted(exact("float32"))(S, "value")
    assert isinstance(codec, Predicted)
    x, context = normal(2, 2, 16, 16), Subject(predicted(higgs()), S, "value").context(2, 16)
    weights = codec.predictor.working()
    assert context.v1 is not None and context.k0 is not None
    inputs = torch.cat([t.transpose(1, 2).flatten(2) for t in (context.v1, context.k0)], -1)  # heads within inputs
    guess = (inputs @ weights["weight"] + weights["bias"]).unflatten(-1, (2, 16)).transpose(1, 2)
    raw = codec.encode(x, context)["raw"].flatten(2, 3)
    assert torch.allclose(raw, x - guess, atol=1e-5)
    assert torch.allclose(codec.decode(codec.encode(x, context), context), x, atol=1e-5)


@every_configuration
def test_some_heads_alone(case: Subject) -> None:
    """What is stored of them is what the codec of all heads stores; one that refuses makes heads depend on others."""
    checks.heads_alone(case)
    codec, x = case.codec(), case.noise(2, 2)
    context, one = case.context(2, 2 * case.shape.block), slice(1, 2)
    if isinstance(reason := codec.of_heads(one), str):
        other = torch.cat([x[:, :1] * 3, x[:, 1:]], 1)
        whole, apart = (codec.encode_decode(each, context)[1][:, one] for each in (x, other))
        assert isinstance(codec, Predicted | MixKVQ) or not torch.equal(apart, whole), reason
