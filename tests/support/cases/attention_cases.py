"""Inputs of fused decode attention over every format and shape, and what it must give; also run by themselves:

TRITON_INTERPRET=1 python -m tests.support.cases.attention_cases small|exhaustive

prints a line for each case that is wrong, then their number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcal_kernels.attention import plan, reference
from kvcal_kernels.hadamard import Mix, signs
from kvcal_kernels.layout import (
    BLOCK,
    Blocks,
    Form,
    Grid,
    Rope,
    decode,
    grid_of,
    pack,
    pack_scales,
    pack_tiers,
    rope,
    unpack_scales,
)
from kvcal_kernels.layout.form import BITS, DIMS
from kvcal_kernels.layout.grids import GRIDS, IN_BYTES, LARGEST
from tests.support.interpreted import run_cases

MIXES: tuple[tuple[str, Mix], ...] = (("paley", "hadamard"), ("cosine", "cosine"))


class Setting(NamedTuple):
    """shared: the norm of a grid's token is that of all its heads."""

    bits: int
    group: int = 32
    inner: bool = True
    symmetric: bool = True
    vector: int = 0
    shared: bool = False
    full: int = 0
    four: int = 0
    in_bytes: bool = False
    mix: Mix = "none"

    def form(self, role: Any, dim: int, heads: int = 1, group: int | None = None) -> Form:
        norm_heads = heads if self.shared else 1
        return Form(
            role,
            dim,
            self.bits,
            group or self.group,
            self.inner,
            self.symmetric,
            self.vector,
            norm_heads,
            self.full,
            self.four,
            self.in_bytes,
            self.mix,
        )


Exact = tuple[Tensor, Tensor, Tensor]

SETTINGS: dict[str, Setting] = {
    **{f"symmetric {bits}": Setting(bits) for bits in BITS},
    **{f"asymmetric {bits}": Setting(bits, symmetric=False) for bits in BITS},
    **{f"outer {bits}": Setting(bits, inner=False, symmetric=False) for bits in BITS},
    **{f"grid {bits} of {vector}": Setting(bits, vector=vector, shared=vector > 1) for bits, vector in GRIDS},
}
BYTES = {  # grids in bytes, at head_dim 64, 128, 256
    f"bytes {bits} of {vector}": Setting(bits, vector=vector, shared=vector > 1, in_bytes=True)
    for bits, vector in IN_BYTES
}
MIXED = {  # rotations of three times 32 channels, at head_dim 96: by Paley's matrix of order 12 or a cosine transform
    f"{name} {bits} of {vector}": Setting(bits, vector=vector, mix=mix) for name, mix in MIXES for bits, vector in GRIDS
}
TIERS = {  # keys only
    "tiers 16 16": Setting(2, inner=False, symmetric=False, full=16, four=16),
    "tiers 0 16": Setting(2, inner=False, symmetric=False, four=16),
    "tiers 32 16": Setting(2, inner=False, symmetric=False, full=32, four=16),
}
SCHEMES = {  # keys, values: those that docs/benchmarks/decode_attention.py times
    "uniform 4/4": ("symmetric 4", "symmetric 4"),
    "InnerQ Base": ("symmetric 3", "symmetric 3"),
    "InnerQ Hybrid": ("symmetric 3", "asymmetric 2"),
    "InnerQ Small": ("symmetric 3", "symmetric 2"),
    "uniform 2/2": ("symmetric 2", "symmetric 2"),
    "KIVI": ("outer 2", "outer 2"),
    "TurboQuant 4/3": ("grid 4 of 1", "grid 3 of 1"),
    "HIGGS 2": ("grid 2 of 2", "grid 2 of 2"),
    "TurboQuant 4/3 in bytes": ("bytes 4 of 1", "bytes 3 of 1"),
    "HIGGS 2 in bytes": ("bytes 2 of 2", "bytes 2 of 2"),
    "HIGGS 3": ("grid 3 of 2", "grid 3 of 2"),
    "HIGGS 4": ("grid 4 of 2", "grid 4 of 2"),
    "MixKVQ": ("tiers 16 16", "outer 2"),
}
INTEGERS = [name for name in SETTINGS if not name.startswith("grid")]


@dataclass(frozen=True)
class Case:
    """blocks, sink, recent: how many of each a row has; there is room for `spare` more. group: in the place of the
    settings'. kind: of the query's numbers. launch: warps, turns of a program. rotary: channels that RoPE turns of keys
    stored before it; starts: positions of rows' first tokens.
    """

    key: str = "symmetric 4"
    value: str = "symmetric 4"
    dim: int = 128
    heads: int = 1
    ratio: int = 4
    queries: int = 1
    blocks: tuple[int, ...] = (5,)
    sink: tuple[int, ...] = (19,)
    recent: tuple[int, ...] = (41,)
    spare: int = 4
    group: int | None = None
    dtype: torch.dtype = torch.float16
    kind: str = "normal"
    launch: tuple[int, int] = (2, 1)
    rotary: int = 0
    starts: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        other = [f"{f.name} {getattr(self, f.name)}" for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return ", ".join([f"{self.key} and {self.value}", *other])

    def form(self, role: Any) -> Form:
        setting = (SETTINGS | BYTES | MIXED | TIERS)[self.key if role == "key" else self.value]
        return setting.form(role, self.dim, self.heads, self.group)


@dataclass(frozen=True)
class Made:
    case: Case
    q: Tensor
    keys: Blocks
    values: Blocks
    blocks: Tensor
    sink: Exact
    recent: Exact
    scaling: float
    rope: Rope | None = None

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.keys, self.values, self.blocks, self.sink, self.recent, self.scaling

    def named(self) -> dict[str, Any]:
        """The other arguments."""
        return {} if self.rope is None else {"rope": self.rope}

    def to(self, device: str) -> Made:
        def moved(x: Any) -> Any:
            if isinstance(x, Blocks):
                return Blocks(
                    x.form,
                    x.words.to(device),
                    x.scale.to(device),
                    x.grid and x.grid.to(device),
                    x.order if x.order is None else x.order.to(device),
                )
            return tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)

        turned = self.rope and self.rope.to(device)
        return Made(self.case, *(moved(x) for x in self.arguments()[:-1]), self.scaling, turned)


def made(case: Case, seed: int = 0) -> Made:
    """Random inputs; what no row may read is not a number."""
    g = torch.Generator().manual_seed(seed)
    batch = len(case.blocks)

    whole = max(case.form(role).scale_blocks for role in ("key", "value"))
    room = -(-(max(case.blocks) + case.spare) // whole) * whole

    def blocks(role: str) -> Blocks:
        return random_blocks(case.form(role), batch, case.heads, room, case.blocks, g)

    def exact(counts: tuple[int, ...]) -> Exact:
        room = max(counts) + case.spare
        parts = [torch.randn(batch, case.heads, room, case.dim, generator=g).to(case.dtype) for _ in range(2)]
        for row, count in enumerate(counts):
            for part in parts:
                part[row, :, count:] = torch.nan
        return parts[0], parts[1], torch.tensor(counts, dtype=torch.int32)

    q = torch.randn(batch, case.heads * case.ratio, case.queries, case.dim, generator=g)
    if case.kind == "wide":  # outliers in a few channels, query heads of very different sizes, one of them nothing
        q[..., ::17] *= 6  # more, and errors are those of the one token that wins
        q = q * 10.0 ** (torch.arange(q.shape[1]) % 5 - 4.0)[:, None, None]
        q[:, 0] = 0
    count = torch.tensor(case.blocks, dtype=torch.int32)
    sizes = exact(case.sink), exact(case.recent)
    keys, values = blocks("key"), blocks("value")
    if case.kind == "large":  # scales of 3400 to 10600
        keys.scale.mul_(2.0**13)
        q = q * 2.0**-13
    if case.kind == "loud":  # values whose scales times 2^8 pass float16, scores that grow from block to block
        values.scale.mul_(12000 / values.scale.float().nan_to_num().abs().amax())
        keys.scale[:, :, :4].mul_(0.05)
        keys.scale[:, :, 4:].mul_(1.6)
    if keys.grid and values.grid and case.key == case.value:
        values = replace(
            values, grid=grid_of(*(keys.grid.points, values.grid.sign, keys.form.bits, keys.grid), keys.form.in_bytes)
        )
    own = rope_of(case, sizes[0][0].shape[2], room, sizes[1][0].shape[2]) if case.rotary else None
    return Made(case, q.to(case.dtype), keys, values, count, *sizes, case.dim**-0.5, own)


SCALED = 1.25  # cosines and sines, as some kinds of RoPE do


def angles(case: Case, positions: Tensor) -> Tensor:
    """(..., R/2) float64."""
    return positions.double()[..., None] * 10000.0 ** (-torch.arange(case.rotary // 2) / (case.rotary // 2)).double()


def rope_of(case: Case, sink: int, blocks: int, recent: int) -> Rope:
    start = torch.tensor(case.starts)
    found = angles(case, rope.first_positions(start, sink, blocks, recent))
    close = angles(case, torch.arange(32))
    near = rope.near(*((SCALED * t).float() for t in (close.cos(), close.sin())))
    return Rope((SCALED * torch.stack([found.cos(), found.sin()], -2)).float(), near)


def turned(given: Made, row: int, k: Tensor, dtype: torch.dtype) -> Tensor:
    """A row's keys (H, T, D) in the order of its tokens, as Llama turns them, in `dtype`, cosines and sines too."""
    case = given.case
    start = case.starts[row if len(case.starts) > 1 else 0]
    positions = start + torch.arange(k.shape[1])
    sink = given.sink[0].shape[2]
    if given.case.blocks[row]:  # between a sink with room and blocks lies that room
        positions[int(given.sink[2][row]) :] += sink - int(given.sink[2][row])
    angle = angles(case, positions).repeat(1, 2).to(k.device)
    cos, sin = ((SCALED * t).to(dtype) for t in (angle.cos(), angle.sin()))
    own, rest = k.to(dtype).split([case.rotary, case.dim - case.rotary], -1)
    low, high = own.chunk(2, -1)
    return torch.cat([own * cos + torch.cat([-high, low], -1) * sin, rest], -1)


def random_blocks(form: Form, batch: int, heads: int, room: int, live: tuple[int, ...], g: torch.Generator) -> Blocks:
    """Numbers of variance about 1."""
    if form.tiered:
        packed = random_tiers(form, batch, heads, room, g)
    else:
        codes, scale, zero = random_codes(form, batch, heads, room, g)
        packed = pack(codes, scale, zero, form, random_grid(form, heads, g))
    for row, count in enumerate(live):
        packed.scale[row, :, -(-count // form.scale_blocks) :] = torch.nan
    return packed


def random_tiers(form: Form, batch: int, heads: int, room: int, g: torch.Generator) -> Blocks:
    tokens, two = room * BLOCK, form.dim - form.full - form.four
    full = torch.randn(batch, heads, tokens, form.full, generator=g).half()
    four, low = (
        torch.randint(0, 1 << bits, (batch, heads, tokens, count), dtype=torch.int32, generator=g)
        for bits, count in ((4, form.four), (2, two))
    )
    scale = torch.rand(batch, heads, tokens // form.group, form.four + two, generator=g) + 0.5
    scale *= torch.tensor([3.4 / 16] * form.four + [3.4 / 4] * two)
    zero = torch.randn(scale.shape, generator=g) * 0.3 - 1.7
    order = torch.rand(batch, heads, tokens // form.group, form.dim, generator=g).argsort(-1)
    return pack_tiers(full, four, low, scale.half(), zero.half(), order, form)


def random_grid(form: Form, heads: int, g: torch.Generator) -> Grid | None:
    """Points in no order: what is looked up at the wrong place shows. In float16, because codes here are not those of
    Gaussian numbers, for which a table's rounding is made small (`grids.multiply_add`).
    """
    if not form.vector:
        return None
    shape, sign = (1 << form.bits * form.vector, form.vector), signs(heads * form.dim, form.bits).view(heads, -1)
    points = torch.randn(shape, generator=g).half().float()
    if form.in_bytes:  # the largest, its opposite, and what 16 points count by one more: -1, 0
        points = torch.randint(-LARGEST, LARGEST + 1, shape, generator=g).float()
        points[0], points[1], points[-1], points[-2] = LARGEST, -1, -LARGEST, 0
        points *= 0.0171875
    return grid_of(points, sign, form.bits, in_bytes=form.in_bytes)


def random_codes(
    form: Form, batch: int, heads: int, room: int, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    tokens = room * BLOCK
    if form.vector:
        high, shape = 1 << form.bits * form.vector, (batch, heads, tokens, form.dim // form.vector)
        norm = torch.rand(batch, heads // form.norm_heads, tokens, 1, generator=g) + 0.5
        return torch.randint(0, high, shape, dtype=torch.int32, generator=g), norm.half(), None
    codes = torch.randint(0, 1 << form.bits, (batch, heads, tokens, form.dim), dtype=torch.int32, generator=g)
    along = (tokens // form.group, form.dim) if form.along_tokens else (tokens, form.dim // form.group)
    scale = ((torch.rand(batch, heads, *along, generator=g) + 0.5) * 3.4 / (1 << form.bits)).half()
    zero = None if form.symmetric else (torch.randn(scale.shape, generator=g) * 0.3 - 1.7).half()
    return codes, scale, zero


def by_torch(given: Made, dtype: torch.dtype) -> Tensor:
    """scaled_dot_product_attention in `dtype` over the decoded tokens of each row, laid side by side: (B, Hq, Q, D)."""
    keys, values = decode(given.keys), decode(given.values)
    rows = []
    for row, count in enumerate(given.blocks.tolist()):
        sink, recent = int(given.sink[2][row]), int(given.recent[2][row])
        k, v = (
            torch.cat([s[row, :, :sink].float(), x[row, :, : count * 32], r[row, :, :recent].float()], 1)
            for s, x, r in zip(given.sink[:2], (keys, values), given.recent[:2], strict=True)
        )
        queries, tokens = given.q.shape[2], k.shape[1]
        seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries).to(k.device)
        k = turned(given, row, k, dtype) if given.case.rotary else k
        k, v = (x.to(dtype).repeat_interleave(given.case.ratio, 0) for x in (k, v))
        q = given.q[row].to(dtype)
        rows.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=given.scaling))
    return torch.stack(rows)


def factored() -> tuple[tuple[Made, Tensor], Made]:
    """Keys divided by a power of two of their channel, and the queries for them; and the same case without factors."""
    plain = made(Case("outer 2", "outer 2"))
    factor = torch.exp2(torch.arange(plain.case.dim) % 5 - 2.0)
    scale, zero = unpack_scales(plain.keys.scale, plain.keys.form)
    assert zero is not None
    divided = pack_scales((scale / factor).half(), (zero / factor).half(), plain.keys.form)
    keys = Blocks(plain.keys.form, plain.keys.words, divided)
    return (replace(plain, keys=keys), (plain.q * factor).to(plain.q.dtype)), plain


def off(found: Tensor, exact: Tensor) -> float:
    """Relative error; not a number where `found` has one that is not."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def wrong(given: Made, found: Tensor) -> str | None:
    """None if the error against float32 is at most twice that of torch's attention in the query's dtype over the same
    decoded tokens, and no query head of a kv head stands out.
    """
    exact = reference.attend(*(given.q.float(), *given.arguments()[1:]), **given.named())
    plain = by_torch(given, given.case.dtype)
    for what, part in [("all", slice(None))] + [(f"query head {h}", slice(h, h + 1)) for h in range(exact.shape[1])]:
        error, same = (off(x[:, part], exact[:, part]) for x in (found, plain))
        allowed = (2 if what == "all" else 4) * same
        if not error <= allowed:
            return f"{what}: off by {error:.2e}, torch by {same:.2e}"
    return None


INFINITE = [
    Case(*SCHEMES[name], 64, blocks=(7,), sink=(32,), recent=(41,))
    for name in ("uniform 4/4", "KIVI", "HIGGS 2 in bytes")
]


def misplaced(attend: Any, case: Case, token: int, device: str = "cpu") -> str | None:
    """An infinite exact value is infinite in the outputs of its kv head's queries, and nothing else is, wherever its
    token lies: by torch's attention. attend(given) -> outputs.
    """
    given = made(case)
    given.recent[1][0, 0, token, 5] = torch.inf
    found, wanted = attend(given.to(device)).cpu().float(), by_torch(given, case.dtype).float()
    for name, of in (("infinite", torch.isinf), ("not numbers", torch.isnan)):
        if not torch.equal(of(found), of(wanted)):
            return f"token {token}: {int(of(found).sum())} outputs {name}, torch has {int(of(wanted).sum())}"
    return None


def small() -> list[Case]:
    """Every format, dtype, head_dim and number of query rows at least once; block edges, nothing packed, ragged rows."""
    bf = torch.bfloat16
    return [
        Case(),
        Case("symmetric 3", "symmetric 3", dtype=bf, blocks=(4,), launch=(4, 1)),
        Case("symmetric 3", "asymmetric 2", 64, ratio=1, blocks=(9,), launch=(2, 2)),
        Case("symmetric 3", "symmetric 2", 96, ratio=3, queries=3, blocks=(3,), kind="wide"),
        Case("symmetric 4", "symmetric 4", 96, ratio=2, blocks=(2,)),  # halves of keys take turns
        Case("symmetric 8", "asymmetric 8", 64, ratio=16, blocks=(1,), sink=(0,), recent=(1,)),
        Case("asymmetric 3", "outer 3", 64, heads=2, blocks=(2, 0, 7), sink=(5, 2, 0), recent=(33, 1, 6), dtype=bf),
        Case("outer 2", "outer 2", 96, ratio=2, queries=5, blocks=(3, 0), sink=(4, 3), recent=(16, 3)),
        Case("outer 2", "outer 2", group=128, blocks=(6,), spare=0, kind="wide"),
        Case("symmetric 3", "outer 2", group=128, blocks=(9,), dtype=bf),
        Case("symmetric 2", "symmetric 3", blocks=(7, 0, 2), sink=(4, 3, 1), recent=(16, 3, 2), launch=(1, 3)),
        Case(
            "outer 4",
            "asymmetric 2",
            group=128,
            blocks=(7, 0),
            sink=(4, 3),
            recent=(16, 3),
            spare=1,
            kind="wide",
            launch=(1, 3),
        ),
        Case("outer 2", "outer 2", group=128, blocks=(9,), dtype=bf, kind="large", launch=(1, 3)),
        Case("asymmetric 8", "symmetric 2", 256, ratio=2, queries=2, blocks=(3,)),
        Case("outer 4", "symmetric 8", 64, ratio=7, queries=5, blocks=(2,), recent=(17,)),  # 35 rows: two chunks
        Case("asymmetric 4", "outer 4", 64, ratio=2, queries=16, blocks=(1,), recent=(16,), launch=(1, 4)),
        Case("outer 2", "outer 2", 64, blocks=(2,), dtype=bf, kind="large"),
        Case(*SCHEMES["HIGGS 2"], 64, heads=2, blocks=(3, 0), sink=(5, 2), recent=(33, 1), dtype=bf),
        Case(*SCHEMES["HIGGS 3"], blocks=(3,), kind="wide"),
        Case(*SCHEMES["HIGGS 4"], 96, ratio=3, queries=3, blocks=(2,)),
        Case(*SCHEMES["TurboQuant 4/3"], blocks=(2,), launch=(4, 1)),
        Case("grid 3 of 2", "symmetric 3", 64, ratio=7, queries=5, blocks=(2,), recent=(17,)),
        Case("outer 2", "paley 3 of 2", 96, ratio=2, blocks=(2,), dtype=bf),
        Case("grid 2 of 4", "grid 2 of 4", 64, ratio=5, queries=5, blocks=(3,), launch=(2, 2)),
        Case("paley 2 of 1", "paley 2 of 1", 96, ratio=2, blocks=(1,), recent=(7,)),
        Case("paley 2 of 4", "paley 2 of 4", 96, ratio=2, blocks=(2,)),
        Case("cosine 2 of 4", "cosine 3 of 2", 96, ratio=2, blocks=(1,)),  # as bundles from before have them
        Case("cosine 3 of 1", "cosine 2 of 1", 96, ratio=2, blocks=(1,), dtype=bf),
        Case("grid 4 of 2", "grid 4 of 1", 64, ratio=16, blocks=(2,)),  # two tables of 256 entries
        Case("grid 2 of 2", "grid 2 of 2", 64, ratio=1, blocks=(8,), recent=(40,), dtype=bf, kind="loud"),
        Case("outer 2", "outer 2", 64, ratio=1, blocks=(8,), recent=(40,), dtype=bf, kind="loud"),
        Case(*SCHEMES["TurboQuant 4/3 in bytes"], blocks=(4,), launch=(1, 2), dtype=bf, kind="wide"),
        Case(*SCHEMES["HIGGS 2 in bytes"], 64, heads=2, blocks=(3, 0), sink=(5, 2), recent=(33, 1)),
        Case(
            "bytes 2 of 1", "bytes 4 of 1", 64, ratio=7, queries=2, blocks=(3,), recent=(17,), launch=(1, 1)
        ),  # 14 rows
        Case("bytes 3 of 1", "bytes 2 of 1", 256, ratio=2, blocks=(2,), launch=(4, 1), dtype=bf),
        Case("bytes 4 of 1", "bytes 2 of 2", 64, ratio=1, blocks=(8,), recent=(40,), kind="loud", launch=(1, 3)),
        Case("bytes 2 of 2", "outer 2", 64, group=64, blocks=(4,), launch=(1, 1)),
        Case("outer 4", "bytes 3 of 1", group=128, blocks=(6,), spare=0, launch=(1, 2)),
        Case("symmetric 3", "bytes 2 of 2", blocks=(3,), dtype=bf),
        Case("tiers 16 16", "outer 2", blocks=(3,), kind="wide"),
        Case("tiers 32 16", "grid 3 of 2", 96, ratio=3, heads=2, blocks=(2, 0), sink=(5, 2), recent=(9, 1), dtype=bf),
        Case("tiers 0 16", "outer 2", 64, queries=9, group=64, blocks=(6,), spare=0, recent=(17,)),
        Case("grid 3 of 2", "grid 3 of 1", 64, heads=2, ratio=2, blocks=(3, 0), sink=(5, 2), recent=(9, 1), dtype=bf),
        Case("bytes 3 of 1", "symmetric 3", 64, blocks=(4,), launch=(1, 2)),
        Case("asymmetric 2", "symmetric 2", 96, blocks=(4,), launch=(1, 2)),
        Case(
            "paley 2 of 2",
            "grid 2 of 1",
            96,
            heads=2,
            ratio=2,
            blocks=(3, 0),
            sink=(5, 2),
            recent=(9, 1),
            launch=(4, 1),
        ),
        *before_rope(),
    ]


def before_rope() -> list[Case]:
    """Keys before RoPE: every layout of scales, all of a head or part of it turned, rows at positions of their own."""
    bf = torch.bfloat16
    return [
        Case("outer 2", "outer 2", rotary=128, blocks=(5,), starts=(1000,)),
        Case("outer 2", "outer 2", rotary=64, group=128, blocks=(6,), spare=0, dtype=bf, kind="wide"),
        Case("symmetric 3", "asymmetric 2", 64, rotary=64, ratio=1, blocks=(9,), dtype=bf, launch=(2, 2)),
        Case("asymmetric 4", "symmetric 3", 96, rotary=96, ratio=3, queries=3, blocks=(3,), kind="wide"),
        Case("symmetric 8", "grid 2 of 2", 64, rotary=32, ratio=16, blocks=(1,), sink=(0,), recent=(1,)),
        Case("outer 4", "outer 4", 64, rotary=64, heads=2, blocks=(2, 0, 7), sink=(19, 2, 19), recent=(33, 1, 6),
             spare=0, starts=(0, 4000, 70), queries=1, dtype=bf),
        Case("outer 3", "symmetric 8", 64, rotary=64, ratio=7, queries=5, blocks=(2,), recent=(70,), sink=(40,)),
        Case("asymmetric 2", "outer 2", 64, rotary=64, ratio=2, queries=16, blocks=(4,), recent=(16,), launch=(4, 1)),
        Case("symmetric 2", "asymmetric 2", 64, rotary=32, ratio=2, blocks=(2,), launch=(1, 1)),  # words of both kinds
    ]  # fmt: skip


def whole_words(case: Case) -> Case:
    """Of grids in bytes head_dim is a multiple of 64."""
    return replace(case, dim=64) if case.dim == 96 and (case.key in BYTES or case.value in BYTES) else case


def exhaustive() -> list[Case]:
    """Every pair of formats; every GQA ratio with several query lengths; every number of blocks about the turns of a
    program, of window lengths about the 16 tokens of a warp; head_dim 256.
    """
    dims, dtypes = itertools.cycle(DIMS[:3]), itertools.cycle([torch.float16, torch.bfloat16])
    launches = itertools.cycle([(1, 1), (2, 2), (2, 1), (4, 1)])
    kinds = itertools.cycle(["normal", "wide", "normal", "normal", "wide"])

    def more(case: Case) -> Case:
        return replace(case, dim=next(dims), dtype=next(dtypes), launch=next(launches), kind=next(kinds))

    two: dict[str, Any] = {"blocks": (5, 2), "sink": (19, 0), "recent": (41, 16)}
    grids = [name for name in SETTINGS if name not in INTEGERS]
    mixed = [pair for name in grids for pair in (("symmetric 3", name), (name, "outer 2"))]
    among = [(key, value) for key in INTEGERS for value in INTEGERS] + [
        (key, value) for key in grids for value in grids
    ]
    pairs = [more(Case(key, value, **two)) for key, value in among + mixed]
    own = [(key, value) for key in BYTES for value in BYTES]
    own += [pair for name in BYTES for pair in (("symmetric 3", name), (name, "asymmetric 2"), (name, "symmetric 8"))]
    pairs += [whole_words(more(Case(key, value, **two))) for key, value in own]
    schemes = itertools.cycle(SCHEMES.values())
    rows = [
        whole_words(more(Case(*next(schemes), ratio=ratio, queries=queries, blocks=(3,), recent=(queries + 1,))))
        for ratio in range(1, 17)
        for queries in (1, 2, 5, 16)
    ]
    edges = [
        replace(more(Case(*SCHEMES[name], blocks=(count,))), launch=launch)
        for count in (0, 1, 3, 4, 5, 8, 9)
        for name, launch in zip(["InnerQ Base", "InnerQ Hybrid", "HIGGS 3"], [(1, 4), (2, 2), (4, 4)], strict=True)
    ]
    windows = [
        more(Case("symmetric 3", "asymmetric 2", queries=queries, blocks=(blocks,), sink=(sink,), recent=(recent,)))
        for sink in (0, 1, 16, 33)
        for recent, queries in ((1, 1), (15, 2), (16, 16), (17, 3), (64, 1))
        for blocks in (0, 3)
    ]
    two["blocks"] = (6, 3)
    long = [more(Case("outer 2", "outer 2", group=group, **two)) for group in (64, 128) for _ in range(4)]
    long = [replace(case, dim=128) for case in long]
    wide = [Case(key, value, 256, queries=queries) for key, value in SCHEMES.values() for queries in (1, 3)]
    every = pairs + rows + edges + windows + long + wide
    plain = small() + every
    whole = [case for case in every if case.key in INTEGERS and case.value not in BYTES]
    shares = itertools.cycle([(1, 1), (1, 2), (1, 1), (2, 3)])

    def before(case: Case) -> Case:
        """Rows are full sinks, as packed blocks follow nothing else."""
        most, least = next(shares)
        rotary = max(32, case.dim * most // least // 32 * 32)
        starts = tuple(1000 * row for row in range(len(case.blocks)))
        return replace(case, rotary=rotary, starts=starts)

    return plain + [before(case) for case in whole[::6]]


def carrying() -> list[Case]:
    """For programs that have packed and exact tokens: every scheme, and values that no scheme has, as caches launch
    them.
    """
    pairs = [
        *SCHEMES.values(),
        ("asymmetric 2", "asymmetric 4"),
        ("grid 3 of 1", "symmetric 3"),
        ("outer 3", "grid 2 of 2"),
    ]
    windows: dict[str, Any] = {"blocks": (11, 2, 0), "sink": (19, 3, 0), "recent": (41, 9, 1)}
    return [Case(*pair, group=128 if number % 2 else None, **windows, spare=1) for number, pair in enumerate(pairs)]


def apart(case: Case) -> bool:
    """Whether they never have."""
    return case.value == "bytes 2 of 2" or case.key in TIERS or case.rotary > 0


def carried(case: Case) -> Any:
    """The launch of `carrying`."""
    from kvcal_kernels.attention import triton

    usual = triton.usual(case.form("key"), case.form("value"), case.ratio * case.queries, case.rotary > 0)
    return replace(usual, splits=4, tail_cost=usual.warps)


def launches(case: Case) -> Any:
    """What caches launch: as usual, and where there are few blocks."""
    from kvcal_kernels.attention import triton

    return triton.launches(case.form("key"), case.form("value"), case.ratio * case.queries, case.rotary > 0)


def compare(cases: list[Case]) -> Any:
    """Prints a line for each case that is wrong. Returns the memory of the launches."""
    from kvcal_kernels.attention import triton

    space = triton.Workspace(torch.device("cpu"))
    space.take(64, 64, 8, 128, 1)
    for number, case in enumerate(cases):
        given = made(case, number)
        warps, length = case.launch
        # merged in one round, or by so many in two; exact tokens in programs of their own, or behind packed ones
        launch = triton.Launch(warps, 1, length, merge_width=number % 4, tail_cost=(None, 0, 1, 3)[number // 4 % 4])
        found = triton.attend(*given.arguments(), launch, space, **given.named())
        if space.counter.any():
            print(f"{case}: counters are left at {space.counter.tolist()}")
        if why := wrong(given, found):
            print(f"{case}: {why}")
    return space


def main(cases: list[Case]) -> None:
    from kvcal_kernels.attention import triton

    space = compare(cases)
    for case in INFINITE:
        for token in (0, 40):
            for fan in (0, 3):
                launch = triton.Launch(1, 1, 3, merge_width=fan)
                if why := misplaced(
                    lambda own, launch=launch: triton.attend(*own.arguments(), launch, space), case, token
                ):
                    print(f"{case}, an infinite value: {why}")
    for case in carrying():
        given = made(case, 1)
        triton.launch._PREPARED.clear()
        found = triton.attend(*given.arguments(), carried(case), space, **given.named())
        [(_, _, (_, _, _, splits, early, less, *_))] = triton.launch._PREPARED.values()
        if (less == plan.ALONE) != apart(case) or (not apart(case) and early >= splits):
            print(f"{case}: {splits} programs, {early} without exact tokens, {less} turns fewer")
        if why := wrong(given, found):
            print(f"{case}, exact tokens behind packed ones: {why}")
        for launch in launches(case)[1:]:
            if why := wrong(given, triton.attend(*given.arguments(), launch, space, **given.named())):
                print(f"{case}, {launch}: {why}")
    (given, packed_q), plain = factored()
    found = triton.attend(*given.arguments(), triton.Launch(2, 1, 1), space, packed_q)
    if why := wrong(plain, found):
        print(f"factors of keys: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small, exhaustive=exhaustive)
