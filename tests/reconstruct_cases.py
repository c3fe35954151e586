"""Cases of the reconstruction kernel, run by its tests in a process of their own: `python -m reconstruct_cases`, in Triton's
interpreter. Prints what is wrong, then how many there were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interpreted import run_cases
from kvcal_artifacts.codecs import Predicted, Shape
from kvcal_artifacts.codecs.base import Codec, Context
from kvcal_artifacts.codecs.higgs import GRIDS, Higgs
from kvcal_artifacts.codecs.predictors import Linear, Predictor, QuantisedLinear
from kvcal_artifacts.codecs.reconstruct import Reconstruction, coded
from kvcal_kernels.reconstruct import Turn, reference
from kvcal_kernels.reconstruct import triton as kernel

PREPARE = kernel.prepare


@dataclass(frozen=True)
class Case:
    """rotary: channels that RoPE turns, 0: none. spare: blocks of room behind what is written. tokens, channels: of a
    program."""

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
    inner = Higgs(shape, case.role, *case.grid, case.rotation, case.norm, seed=5).for_decoding()
    return Predicted(inner, predictor(case), case.inputs) if case.inputs else inner


def rope(case: Case, tokens: int) -> Turn | None:
    if not case.rotary:
        return None
    speed = 1e4 ** -(torch.arange(case.rotary // 2) / (case.rotary / 2))
    angle = (torch.arange(tokens)[None, :, None] + torch.arange(case.batch)[:, None, None]) * speed
    angle = torch.cat([angle, angle], -1)
    return Turn(angle.cos(), angle.sin())


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
    turn, own = rope(case, tokens), Reconstruction(codec, case.dtype, case.rotary)
    assert own.path == "reference"
    own.why = None  # the interpreter stands for a GPU
    room = (case.batch, case.heads, tokens + case.spare * case.block, case.dim)
    out, turned = (torch.full(room, torch.nan, dtype=case.dtype) for _ in range(2))
    made = own(packed, context, turn, out, turned if turn else None)
    found = [("out", made[0])] + ([("turned", made[1])] if turn else [])
    inner = codec.inner if isinstance(codec, Predicted) else codec
    weights = codec.predictor.working() if isinstance(codec, Predicted) else {}
    arguments = (
        coded(inner, packed), list(parts.values()), weights.get("weight"), weights.get("bias"), turn,
    )  # fmt: skip
    exact = reference.reconstruct(*arguments, torch.float64)
    plain = reference.reconstruct(*arguments, case.dtype)
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


def main(cases: list[Case]) -> None:
    for case in cases:
        for said in wrong(case):
            print(f"{case}: {said}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small, exhaustive=exhaustive)
