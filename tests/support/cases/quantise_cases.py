"""Inputs of the quantise and append kernels, and what they must give; also run by themselves:

TRITON_INTERPRET=1 python -m tests.support.cases.quantise_cases small|exhaustive

prints a line for each case that is wrong, then their number.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Higgs, Shape, Uniform
from kvcal_artifacts.paths.packing_rules import rule_of
from kvcal_kernels.layout import Blocks, Form, decode
from kvcal_kernels.quantise import AnyRule, Counts, GridRule, Layer, Rule, Windows, blocks_for, reference
from tests.support.interpreted import run_cases

# bits, group, inner, mode
SETTINGS: dict[str, tuple[int, int, bool, reference.Mode]] = {
    **{f"symmetric {bits}": (bits, 32, True, "symmetric") for bits in (2, 3, 4, 8)},
    **{f"asymmetric {bits}": (bits, 32, True, "asymmetric") for bits in (2, 3, 4, 8)},
    **{f"hybrid {bits}": (bits, 32, True, "hybrid") for bits in (2, 3, 4, 8)},
    **{f"outer {bits}": (bits, 32, False, "asymmetric") for bits in (2, 3, 4, 8)},
}

# d, n, norm over, gain
GRIDS: dict[str, tuple[int, int, Any, Any]] = {
    "higgs 2": (2, 16, "token", "mse"),
    "higgs 2, heads": (2, 16, "head", "debiased"),
    "higgs 2 of 4": (4, 256, "token", "debiased"),
    "higgs 3": (2, 64, "token", "mse"),
    "higgs 4": (2, 256, "head", "mse"),
    "higgs 4, token": (2, 256, "token", "mse"),
    "turboquant 2": (1, 4, "head", "mse"),
    "turboquant 3": (1, 8, "head", "debiased"),
    "turboquant 4": (1, 16, "token", "mse"),
    "higgs 2 in bytes": (2, 16, "token", "debiased"),
    "turboquant 2 in bytes": (1, 4, "head", "mse"),
    "turboquant 3 in bytes": (1, 8, "head", "mse"),
    "turboquant 4 in bytes": (1, 16, "head", "mse"),
}


@dataclass(frozen=True)
class Case:
    """cuts: tokens of each call; one whole call of blocks where there are no windows. pads: of each row, at its left.
    group: in the place of the settings'.
    """

    key: str = "symmetric 4"
    value: str = "symmetric 4"
    dim: int = 64
    group: int | None = None
    heads: int = 2
    search: bool = False
    dtype: torch.dtype = torch.float16
    kind: str = "normal"
    factor: str | None = None  # of keys: "constant" or "rows"
    windows: Windows | None = None
    cuts: tuple[int, ...] = (96,)
    pads: tuple[int, ...] = (0, 0)
    warps: int = 2

    def __str__(self) -> str:
        other = [f"{f.name} {getattr(self, f.name)}" for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return ", ".join([f"{self.key} and {self.value}", *other])

    @property
    def gridded(self) -> bool:
        return self.key in GRIDS or self.value in GRIDS

    def rule(self, role: Any, device: str = "cpu") -> AnyRule:
        name = self.key if role == "key" else self.value
        if name in GRIDS:
            made = rule_of(higgs(name, role, self.heads, self.dim).to(torch.device(device)))
            assert isinstance(made, GridRule), made
            return made
        bits, group, inner, mode = SETTINGS[name]
        return Rule(Form(role, self.dim, bits, self.group or group, inner, mode == "symmetric"), mode, self.search)


@functools.cache
def higgs(name: str, role: Any, heads: int, dim: int) -> Higgs:
    d, n, norm, gain = GRIDS[name]
    return Higgs(
        Shape(heads, dim, 32), role, d, n, norm=norm, gain=gain, points="bytes" if "bytes" in name else "exact", seed=n
    )


def codec(case: Case, role: Any) -> Codec:
    name, rule, heads = case.key if role == "key" else case.value, case.rule(role), case.heads
    if not isinstance(rule, Rule):
        return higgs(name, role, heads, case.dim)
    form = rule.form
    axis: Any = "token" if form.along_tokens else "channel"
    shape = Shape(heads, form.dim, max(32, form.group) if form.along_tokens else 32)
    return Uniform(shape, form.role, form.bits, form.group, axis, rule.mode, rule.search)


def inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values (B, H, T, D) and the keys' factor."""
    g = torch.Generator().manual_seed(seed)
    size = (len(case.pads), case.heads, sum(case.cuts), case.dim)
    k, v = (torch.randn(size, generator=g) * 2 for _ in range(2))
    for x in (k, v):
        x += torch.randn(case.dim, generator=g)
        x[..., ::7] *= 5
        if case.kind == "odd":  # constants, zeros, subnormal and huge numbers, whole groups of them
            x[:, :, :32] = 0
            x[:, :, 32:64] = 3.25
            x[0, :, 64:80] *= 1e-6
            x[0, :, 80:96] *= 900
    factor = None
    if case.factor:
        factor = torch.rand(size[0] if case.factor == "rows" else 1, case.heads, 1, case.dim, generator=g) + 0.5
        factor = factor if case.factor == "rows" else factor[0].half()
    return k.to(case.dtype), v.to(case.dtype), factor


def same(a: Blocks, b: Blocks) -> bool:
    return torch.equal(a.words, b.words) and torch.equal(a.scale.view(torch.int16), b.scale.view(torch.int16))


def layer(case: Case, k: Tensor, room: int, queries: int) -> Layer:
    """Empty, and full of what is not a number where nothing is stored."""
    assert case.windows is not None
    batch, heads, _, dim = k.shape

    def exact(count: int) -> tuple[Tensor, Tensor]:
        made = [k.new_full((batch, heads, count, dim), torch.nan) for _ in range(2)]
        return made[0], made[1]

    flags = torch.zeros(heads, dtype=torch.int32, device=k.device)
    rules = [case.rule(role, str(k.device)) for role in ("key", "value")]
    stored = [blocks_for(rule, batch, heads, room, k.device) for rule in rules]
    return Layer(
        stored[0], stored[1], exact(max(case.windows.sink, 1)), exact(case.windows.ring_capacity(queries)), flags
    )


def calls(case: Case, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and real tokens (B,) of each call."""
    made, at = [], 0
    for count in case.cuts:
        new = torch.tensor([count - min(max(pad - at, 0), count) for pad in case.pads], dtype=torch.int32)
        made.append((k[:, :, at : at + count], v[:, :, at : at + count], new.to(k.device)))
        at += count
    return made


def appended(module: Any, case: Case, queries: int = 4, seed: int = 0, device: str = "cpu") -> tuple[Layer, Counts]:
    """A layer after the calls of a case. queries: that its ring has room for in one launch."""
    assert case.windows is not None
    k, v, factor = (None if x is None else x.to(device) for x in inputs(case, seed))
    assert k is not None and v is not None
    made, counts = layer(case, k, -(-sum(case.cuts) // 128) * 4, queries), Counts(len(k), case.windows, device)
    for keys, values, new in calls(case, k, v):
        module.advance(counts, new)
        module.append(made, counts, keys, values, case.rule("key", device), case.rule("value", device), factor)
    return made, counts


def wrong(module: Any, case: Case, seed: int = 0) -> str | None:
    """None if a module does what a case asks, bit for bit."""
    if case.windows is None:
        return _misquantised(module, case, seed)
    made, counts = appended(module, case, seed=seed)
    k, v, factor = inputs(case, seed)
    for row, pad in enumerate(case.pads):
        for role, x, stored in (("key", k, made.keys), ("value", v, made.values)):
            own = factor if role == "key" else None
            own = own[row, None] if own is not None and own.ndim == 4 else own
            if why := _misstored(case, counts, row, x[row][:, pad:], role, stored, made, own):
                return f"row {row}, {role}: {why}"
    return f"flags {made.flags.tolist()}" if made.flags.any() else None


def _misquantised(module: Any, case: Case, seed: int) -> str | None:
    k, v, factor = inputs(case, seed)
    rules = case.rule("key"), case.rule("value")
    own = None if case.gridded else module.Launch(case.warps)
    found = module.quantise(k, v, *rules, factor, launch=own)
    for x, rule, one, own in ((k, rules[0], found[0], factor), (v, rules[1], found[1], None)):
        wanted, flags = reference.quantise(x, rule, own)
        shift = reference.VALUES if rule.form.role == "value" else 0
        if (found[2] >> shift & 255).tolist() != flags.tolist():
            return f"{rule.form.role}: flags {found[2].tolist()}, not {flags.tolist()}"
        if not same(one, wanted):
            return f"{rule.form.role}: {int((one.words != wanted.words).sum())} words differ"
    return None


def _misstored(
    case: Case, counts: Counts, row: int, x: Tensor, role: str, stored: Blocks, made: Layer, factor: Tensor | None
) -> str | None:
    """x (H, T, D): real tokens of the row."""
    assert case.windows is not None
    own, at = case.windows, int(role == "value")
    sink = min(x.shape[1], own.sink)
    blocks = max(0, (x.shape[1] - sink - own.recent) // own.block) * own.block // 32
    window = x.shape[1] - sink - blocks * 32
    if (int(counts.sink[row]), int(counts.blocks[row]), int(counts.window[row])) != (sink, blocks, window):
        return f"counts {counts.data[:, row].tolist()}"
    ring = made.recent[at][row]
    slots = (torch.arange(window) + blocks * 32) % ring.shape[1]
    if not torch.equal(made.sink[at][row][:, :sink], x[:, :sink]):
        return "sink differs"
    if not torch.equal(ring[:, slots], x[:, sink + blocks * 32 :]):
        return "window differs"
    if blocks:
        wanted, _ = reference.quantise(x[None, :, sink : sink + blocks * 32], case.rule(role), factor)
        each = case.rule(role).form.scale_blocks
        found = Blocks(
            wanted.form, stored.words[row : row + 1, :, :blocks], stored.scale[row : row + 1, :, : blocks // each]
        )
        return None if same(found, wanted) else "packed blocks differ"
    return None


def misattended(attend: Any, case: Case, seed: int = 0) -> str | None:
    """None if attention over what a row stores, read from the ring, is that over the same tokens laid side by side."""
    assert case.windows is not None
    made, counts = appended(reference, case, seed=seed)
    for ring in made.recent:  # slots that nothing was put in: not to be read
        ring.nan_to_num_(nan=torch.inf)
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(len(case.pads), case.heads * 2, 2, case.dim, generator=g).to(case.dtype)
    sink, recent = (*made.sink, counts.sink), (*made.recent, counts.window)
    found = attend(q, made.keys, made.values, counts.blocks, sink, recent, case.dim**-0.5, ring=True)
    k, v, _ = inputs(case, seed)
    for row, pad in enumerate(case.pads):
        tokens = [x[row, :, pad:].clone() for x in (k, v)]
        first, stop = int(counts.sink[row]), int(counts.sink[row] + counts.blocks[row] * 32)
        for x, stored in zip(tokens, (made.keys, made.values), strict=True):
            x[:, first:stop] = decode(stored)[row, :, : stop - first].to(case.dtype)
        wide = [x[None].repeat_interleave(2, 1).float() for x in tokens]
        count = wide[0].shape[2]
        seen = torch.ones(2, count, dtype=torch.bool).tril(count - 2)
        wanted = torch.nn.functional.scaled_dot_product_attention(q[row : row + 1].float(), *wide, attn_mask=seen)
        off = float((found[row].float() - wanted[0]).norm() / wanted.norm())
        if not off < 2e-3:
            return f"attention of row {row} is off by {off:.2e}"
    return None


def misflagged(module: Any, case: Case) -> str | None:
    """None if what a module says of tokens that cannot be packed is what the reference says, steps later, too."""
    assert case.windows is not None
    k, v, _ = inputs(case)
    k[0, 1, 9, 3], v[1, 0, 8, 5] = torch.inf, 3e7
    told = []
    for own in (reference, module):
        made, counts = layer(case, k, 1, 4), Counts(len(k), case.windows)
        said = []
        for keys, values, new in calls(case, k, v):
            own.advance(counts, new)
            own.append(made, counts, keys, values, case.rule("key"), case.rule("value"))
            said.append((made.flags.tolist(), reference.check(made.flags, 0)))
        told.append(said)
    return None if told[0] == told[1] else f"flags {told[1]}, not {told[0]}"


FLAGGED = Case("higgs 2", "turboquant 2", windows=Windows(5, 33), cuts=(60, 4, 4, 4, 4, 4, 33), dtype=torch.float32)
ATTENDED = Case(windows=Windows(5, 33), cuts=(230,), pads=(0, 43, 150), heads=1)
GRID_ATTENDED = replace(ATTENDED, key="higgs 2", value="turboquant 2", heads=2)


def misobserved(
    module: Any, heads: int, dim: int, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> str | None:
    """Key factors of rows that pack a block before the others, or were fixed before, or hold a NaN, over steps of 3 and
    7 tokens: against those of all the row's keys that came by then, cut out by hand.
    """
    generator = torch.Generator().manual_seed(dim)
    keys = torch.randn(4, heads, 300, dim, generator=generator).to(dtype) * (torch.arange(300)[:, None] + 1)
    keys[3, 0, 1, 0], keys[:, :, :, 5] = torch.nan, 0.0
    keys, windows, starts = keys.to(device), Windows(4, 32, 32), torch.tensor([0, 41, 66, 0])
    until = windows.sink + windows.recent + windows.block
    counts, peak = Counts(4, windows, device), torch.zeros(4, heads, dim, device=device)
    fixed = torch.tensor([False, False, False, False], device=device)
    counts.data[4], counts.data[6] = starts.clamp_max(4).to(device), (starts - 4).clamp_min(0).to(device)
    fixed[2], held = True, starts.clone()
    for each in (3, 7) * 12:
        module.advance(counts, torch.full((4,), each, dtype=torch.int32, device=device))
        new = torch.stack([keys[row, :, at : at + each] for row, at in enumerate(held.tolist())])
        held += each
        own, wide = module.observe(peak, fixed, counts, new, 2)
        for row, (start, end) in enumerate(zip(starts.tolist(), held.tolist(), strict=True)):
            seen = keys[row, :, start : min(end, until)].float().abs()
            most = torch.zeros(heads, dim, device=device) if row == 2 or not seen.shape[1] else seen.amax(1)
            factor = most.double().sqrt().float().half().float()
            factor = torch.where(factor > 0, factor, 1.0)
            if not torch.equal(peak[row].nan_to_num(-1), most.nan_to_num(-1)) or not torch.equal(
                own[row, :, 0], factor
            ):
                return f"row {row}, {end} tokens: other factors"
            if not torch.equal(wide[row, :, 0], factor.repeat_interleave(2, 0)):
                return f"row {row}, {end} tokens: other factors of query heads"
            if bool(fixed[row]) != (row == 2 or end >= until):
                return f"row {row}, {end} tokens: fixed {bool(fixed[row])}"
    return None


OBSERVED = ((1, 64, torch.float16), (3, 96, torch.bfloat16), (8, 128, torch.float32))  # heads, dim, dtype


def small() -> list[Case]:
    """Every format, head_dim and dtype at least once, odd groups, ragged rows, calls of every kind."""
    bf, windows = torch.bfloat16, Windows(5, 33)
    return [
        Case(kind="odd", pads=(0,)),
        Case("symmetric 2", "symmetric 3", 96, heads=1, dtype=bf, warps=4),
        Case("asymmetric 3", "hybrid 2", 128, heads=1, pads=(0,)),
        Case("hybrid 4", "outer 4", heads=1, kind="odd", dtype=torch.float32, pads=(0,)),
        Case("outer 2", "outer 2", 128, 128, heads=1, cuts=(256,), pads=(0,), warps=1),
        Case("symmetric 8", "asymmetric 8", 256, 64, heads=1, cuts=(64,), pads=(0,)),
        Case("hybrid 2", "symmetric 2", heads=1, search=True, cuts=(32,), pads=(0,), warps=1),
        Case(heads=1, windows=windows, cuts=(105,), pads=(0, 71)),
        Case("symmetric 3", "hybrid 2", factor="rows", windows=windows, cuts=(64, 1, 4, 36), pads=(0, 63)),
        Case("outer 2", "outer 2", heads=1, windows=Windows(0, 0), cuts=(3,) * 10 + (1,) * 8, pads=(0,)),
        Case("outer 2", "outer 2", 64, 64, 1, windows=Windows(3, 8, 64), cuts=(100, 4, 40), pads=(0, 17), dtype=bf),
        Case("higgs 2", "turboquant 2", factor="rows", windows=windows, cuts=(64, 1, 4, 36), pads=(0, 63)),
        Case("turboquant 3", "turboquant 3", 128, heads=3, cuts=(32,), pads=(0,), kind="odd", dtype=torch.float32),
        Case("higgs 4", "higgs 3", 128, heads=1, cuts=(32,), pads=(0,), dtype=bf),
        Case("outer 3", "asymmetric 3", heads=1, cuts=(64,), pads=(0,), warps=1),
        Case("outer 2", "hybrid 2", 96, heads=1, cuts=(64,), pads=(0,), warps=1),
        Case("higgs 3", "turboquant 3 in bytes", windows=Windows(3, 8), cuts=(40, 1, 30), pads=(0, 5)),
        Case("turboquant 4", "higgs 2 of 4", 256, cuts=(32,), pads=(0,)),
        Case("turboquant 4 in bytes", "turboquant 3 in bytes", 128, cuts=(64,), pads=(0,), dtype=bf),
        Case("higgs 2 in bytes", "turboquant 2 in bytes", windows=Windows(3, 8), cuts=(40, 1, 30), pads=(0, 5)),
        Case("symmetric 3", "higgs 2, heads", windows=Windows(3, 8, 64), cuts=(100, 4, 40), pads=(0, 17), dtype=bf),
        Case("higgs 2", "higgs 2", heads=4, windows=Windows(0, 0), cuts=(3,) * 10 + (1,) * 6, pads=(0, 5)),
    ]


def exhaustive() -> list[Case]:
    """Every pair of formats over head_dims, dtypes, groups; windows and cuts."""
    dims, dtypes = itertools.cycle((64, 96, 128)), itertools.cycle((torch.float16, torch.bfloat16, torch.float32))
    kinds, warps, heads = itertools.cycle(("normal", "odd")), itertools.cycle((1, 2, 4)), itertools.cycle((1, 2, 4, 2))
    pairs = [
        Case(key, value, next(dims), dtype=next(dtypes), kind=next(kinds), warps=next(warps), heads=1)
        for key in SETTINGS
        for value in SETTINGS
    ]
    groups = [
        Case(name, name, dim, group, 1, cuts=(256,), pads=(0,), kind=next(kinds))
        for name in SETTINGS
        for dim in (128, 256)
        for group in (64, 128)
    ]
    searched = [Case(name, name, 64, None, 1, True, pads=(0,)) for name in SETTINGS]
    factors = [Case("symmetric 3", "hybrid 3", factor=factor, dtype=next(dtypes)) for factor in ("constant", "rows")]
    cuts = [(140,), (100, 1, 39), (10,) * 14, (4,) * 35, (1,) * 70, (33, 107)]
    windows = [
        Case("symmetric 3", "hybrid 2", heads=1, windows=own, cuts=cut, pads=(0, 7, 66))
        for own in (Windows(5, 33), Windows(0, 0), Windows(32, 64), Windows(1, 3, 96))
        for cut in cuts
    ]
    grids = [
        Case(name, name, dim, heads=next(heads), dtype=next(dtypes), kind=next(kinds), cuts=(64,), pads=(0,))
        for name in GRIDS
        for dim in (64, 128, 256)
    ]
    appended = [
        Case(key, value, heads=2, windows=own, cuts=cut, pads=(0, 7, 66), factor=factor)
        for (key, value), factor in zip(
            (("higgs 2", "higgs 2"), ("turboquant 4", "turboquant 2"), ("outer 4", "higgs 2, heads")),
            ("constant", "rows", None),
            strict=True,
        )
        for own in (Windows(5, 33), Windows(0, 0), Windows(1, 3, 96))
        for cut in cuts
    ]
    return small() + pairs + groups + searched + factors + windows + grids + appended


def main(cases: list[Case]) -> None:
    from kvcal_kernels.quantise import triton

    for number, case in enumerate(cases):
        if why := wrong(triton, case, number):
            print(f"{case}: {why}")
    from kvcal_kernels.attention import triton as attention

    for case in (FLAGGED, replace(FLAGGED, key="symmetric 4", value="higgs 2")):
        if why := misflagged(triton, case):
            print(f"{case}: {why}")
    for case in (ATTENDED, GRID_ATTENDED):
        if why := misattended(attention.attend, case):
            print(f"{case}: {why}")
    for heads, dim, dtype in OBSERVED:
        if why := misobserved(triton, heads, dim, dtype):
            print(f"factors of {heads} heads of {dim}, {dtype}: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small, exhaustive=exhaustive)
