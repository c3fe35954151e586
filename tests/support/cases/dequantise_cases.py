"""Cases of the reconstruction kernel, run by its tests in a process of their own: `python -m
tests.support.cases.dequantise_cases`, in Triton's interpreter. Prints what is wrong, then how many there were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcal_artifacts.codecs import Predicted, Scaled, Shape
from kvcal_artifacts.codecs.base import Codec, Context
from kvcal_artifacts.codecs.dequantise import Dequantiser, coded
from kvcal_artifacts.codecs.higgs import Higgs
from kvcal_artifacts.codecs.higgs_grids import GRIDS
from kvcal_artifacts.codecs.predictors import Linear, Predictor, QuantisedLinear
from kvcal_kernels.dequantise import Rotation, reference
from kvcal_kernels.dequantise import triton as kernel
from tests.support.interpreted import run_cases

PREPARE = kernel.prepare


@dataclass(frozen=True)
class Case:
    """rotary: channels that RoPE turns, 0: none. spare: blocks of room behind what is written. tokens, channels: of a
    program. factors: codes are of channels divided by them."""

    role: Any = "key"
    batch: int = 2
    heads: int = 2
    dim: int = 64
    block: int = 32
    blocks: int = 2
    grid: tuple[int, int] = (2, 16)
    rotation: Any = "head"
    norm: Any = "token"
    inputs: tuple[str, ...] = ("k1",)
    rotary: int = 0
    dtype: torch.dtype = torch.float16
    spare: int = 0
    tokens: int = 64
    channels: int = 64
    four_bit: bool = False
    factors: bool = False
    mixed: Any = "hadamard"


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def predictor(case: Case) -> Predictor:
    width = case.heads * case.dim
    cin = width * len(case.inputs)
    bias = normal(width, seed=1).half()
    if case.four_bit:
        codes = torch.randint(0, 16, (cin, width), generator=torch.Generator().manual_seed(2))
        scale = (normal(width, seed=3).abs() + 0.5) / cin**0.5 / 4
        return QuantisedLinear.from_codes(codes, scale, -7.5 * scale, bias)
    return Linear({"weight": (normal(cin, width, seed=2) / cin**0.5).half(), "bias": bias})


def codec_of(case: Case) -> Codec:
    shape = Shape(case.heads, case.dim, case.block)
    inner: Codec = Higgs(shape, case.role, *case.grid, case.rotation, case.norm, 5, mixed=case.mixed).for_decoding()
    if case.factors:
        inner = Scaled(inner, (normal(case.heads, case.dim, seed=4).abs() + 0.2).half())
    return Predicted(inner, predictor(case), case.inputs) if case.inputs else inner


def rope(case: Case, tokens: int) -> Rotation | None:
    if not case.rotary:
        return None
    speed = 1e4 ** -(torch.arange(case.rotary // 2) / (case.rotary / 2))
    angle = (torch.arange(tokens)[None, :, None] + torch.arange(case.batch)[:, None, None]) * speed
    angle = torch.cat([angle, angle], -1)
    return Rotation(angle.cos(), angle.sin())


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def wrong(case: Case) -> list[str]:
    """By the codec's hook, as a cache calls it: errors against float64 at most twice those of torch in the same dtype."""
    kernel.launch_for = lambda device: kernel.Launch(case.tokens, 32, 4, 2)
    kernel.prepare = partial(PREPARE, channels=case.channels)
    tokens, codec = case.block * case.blocks, codec_of(case)
    shape = (case.batch, case.heads, tokens, case.dim)
    parts = {name: normal(*shape, seed=10 + i).to(case.dtype) for i, name in enumerate(case.inputs)}
    context = Context(**parts)  # type: ignore[arg-type]
    given = Context(**{name: x.float() for name, x in parts.items()})  # type: ignore[arg-type]
    packed = codec.encode(normal(*shape, seed=9), given)
    turn, own = rope(case, tokens), Dequantiser(codec, case.dtype, case.rotary)
    assert own.path == "reference"
    own.why = None  # the interpreter stands for a GPU
    room = (case.batch, case.heads, tokens + case.spare * case.block, case.dim)
    out, turned = (torch.full(room, torch.nan, dtype=case.dtype) for _ in range(2))
    made = own(packed, context, turn, out, turned if turn else None)
    found = [("out", made[0])] + ([("turned", made[1])] if turn else [])
    weights = codec.predictor.working() if isinstance(codec, Predicted) else {}
    arguments = (
        coded(codec, packed), list(parts.values()), weights.get("weight"), weights.get("bias"), turn,
    )  # fmt: skip
    exact = reference.dequantise(*arguments, torch.float64)
    plain = reference.dequantise(*arguments, case.dtype)
    said = []
    if off(exact[0], codec.decode(packed, given).double()) > 1e-5:
        said.append("reference: not what the codec decodes")
    for (name, whole), e, p in zip(found, exact, plain, strict=False):
        if whole.data_ptr() not in (out.data_ptr(), turned.data_ptr()):
            said.append(f"{name}: not in the tensor given")
        if not torch.isnan(whole[:, :, tokens:]).all():
            said.append(f"{name}: written beyond the tokens")
        for b, h in itertools.product(range(case.batch), range(case.heads)):
            error, same = (off(x[b, h, :tokens], e[b, h]) for x in (whole, p))
            if not error <= 2 * same:
                said.append(f"{name}, row {b}, head {h}: off by {error:.2e}, torch by {same:.2e}")
    return said


def small() -> list[Case]:
    """Every grid, dtype, rotation; both ways of reading codes; rows that no tile divides; room behind; partial RoPE."""
    bf = torch.bfloat16
    return [
        Case(rotary=64),
        Case(rotation="token", heads=3, rotary=64, factors=True),
        Case("value", rotation="token", heads=3, dim=32, inputs=("v1", "k0"), dtype=bf, factors=True),
        Case("value", norm="head", heads=2, dim=96, inputs=(), blocks=3, channels=128),
        Case("value", norm="head", heads=2, dim=96, inputs=(), blocks=1, channels=128, mixed="cosine"),
        Case(rotation="token", heads=3, rotary=64, blocks=1, mixed="cosine"),
        Case(rotation="token", heads=5, dim=32, inputs=(), tokens=32),
        Case(rotation="token", heads=4, rotary=32, dtype=bf, blocks=3, spare=2),
        Case("value", dim=128, rotation="token", inputs=("v1", "k0"), channels=128, blocks=1),
        Case("value", heads=3, dim=96, grid=(4, 256), norm="head", inputs=("v1", "k1", "k0"), blocks=1, batch=1),
        Case(heads=1, dim=96, inputs=(), rotary=96, blocks=1),
        Case(grid=(1, 8), norm="head", inputs=(), rotary=64, batch=1),
        Case("value", grid=(2, 64), block=128, blocks=1, inputs=(), dtype=bf),
        Case("value", grid=(1, 4), block=8, blocks=5, inputs=("k1", "v1", "k2", "v2"), batch=1),
        Case(grid=(2, 256), inputs=("k1", "v1"), four_bit=True, blocks=1, dtype=bf),
        Case("value", grid=(2, 64), block=4, blocks=3, inputs=(), batch=1),
        Case(heads=8, rotation="token", inputs=(), batch=1, blocks=1),
    ]


def exhaustive() -> Iterable[Case]:
    dtypes = itertools.cycle([torch.float16, torch.bfloat16])
    for role, grid, dim in itertools.product(("key", "value"), GRIDS, (64, 96, 128)):
        for rotation, norm in (("head", "token"), ("head", "head"), ("token", "token")):
            case = Case(role, dim=dim, grid=grid, rotation=rotation, norm=norm, dtype=next(dtypes), blocks=3, spare=1)
            yield replace(case, channels=128 if dim == 128 else 64, rotary=dim // 2 if role == "key" else 0)
    for block in (1, 2, 4, 8, 16, 64, 1024):
        grid = (2, 16) if block % 4 == 0 else (2, 256)
        yield Case("value", block=block, blocks=-(-70 // block), grid=grid, inputs=("v1", "k0"), tokens=32)
        yield Case(block=block, blocks=-(-70 // block), grid=grid, tokens=32, rotary=64)


@dataclass(frozen=True)
class Placed:
    """Exact tokens around packed ones. tables: dtype of cosines and sines; float32 where a model turns in float32."""

    batch: int = 2
    heads: int = 3
    dim: int = 64
    sink: int = 4
    window: int = 41
    new: int = 1
    rotary: int = 64
    dtype: torch.dtype = torch.bfloat16
    tables: torch.dtype = torch.bfloat16
    shared: bool = True  # one row of cosines for all


def misplaced(case: Placed, device: str = "cpu") -> list[str]:
    """Every bit of the kernel's against the reference's, which is the model's own RoPE; NaN between and behind."""
    size, behind = (case.batch, case.heads, 200, case.dim), case.sink + 64
    kinds = (case.sink, case.window, case.new)

    def tokens(count: int, seed: int) -> Tensor:  # as a projection leaves them: heads within tokens
        return normal(case.batch, count, case.heads, case.dim, seed=seed).to(case.dtype).transpose(1, 2)

    exact = [[tokens(count, 3 * role + i).to(device) for role in (0, 1)] for i, count in enumerate(kinds)]
    turn = None
    if case.rotary:
        turn = rope(Case(batch=1 if case.shared else case.batch, rotary=case.rotary), case.sink + case.window)
        assert turn is not None
        turn = Rotation(turn.cos.to(case.tables).to(device), turn.sin.to(case.tables).to(device))
    wholes = [[torch.full(size, torch.nan, dtype=case.dtype, device=device) for _ in (0, 1)] for _ in (0, 1)]
    for by, whole in zip((kernel, reference), wholes, strict=True):
        by.place(whole, *exact, behind, turn)
    said = []
    for name, found, wanted in zip(("keys", "values"), *wholes, strict=True):
        if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
            said.append(f"{name}: {int((found.view(torch.int16) != wanted.view(torch.int16)).sum())} numbers differ")
        count = int((~wanted.isnan()).sum()) // (case.batch * case.heads * case.dim)
        if count != sum(kinds):
            said.append(f"{name}: the reference wrote {count} tokens of {sum(kinds)}")
    if turn is not None and case.tables == case.dtype:
        own = torch.cat([wholes[0][0][:, :, : case.sink], wholes[0][0][:, :, behind : behind + case.window]], 2)
        before = torch.cat([exact[0][0], exact[1][0]], 2)
        r = case.rotary
        turned, _ = apply_rotary_pos_emb(before[..., :r], before[..., :r], turn.cos, turn.sin)
        if not torch.equal(own, torch.cat([turned, before[..., r:]], -1)):
            said.append("keys: not what Llama makes of them")
    return said


def placed() -> list[Placed]:
    """Dtypes, tables of float32, part of a head turned, none, no sink, several tokens, none new, odd head_dim."""
    half, full = torch.float16, torch.float32
    return [
        Placed(), Placed(dtype=half, tables=half, shared=False), Placed(tables=full, rotary=32),
        Placed(dtype=half, tables=full, dim=96, rotary=96, heads=1, batch=1), Placed(rotary=0, sink=0, new=16),
        Placed(dim=80, rotary=40, new=0, window=3), Placed(sink=40, window=0, dim=128, rotary=128, shared=False, new=3),
    ]  # fmt: skip


def main(cases: list[Case | Placed]) -> None:
    for case in cases:
        for said in misplaced(case) if isinstance(case, Placed) else wrong(case):
            print(f"{case}: {said}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small, exhaustive=exhaustive, placed=placed)
