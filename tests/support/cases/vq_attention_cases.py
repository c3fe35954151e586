"""Cases of decode attention over vector codes, run by its tests in a process of their own: `python -m
tests.support.cases.vq_attention_cases`, in Triton's interpreter. Prints what is wrong, then how many there were.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.codecs import ResidualVQ, Shape
from kvcal_kernels.residual_vq.attention import Coded, reference
from tests.support.interpreted import run_cases


@dataclass(frozen=True)
class Case:
    """keys, values: (stages, codewords) of each band; high: channels of the keys' second band, every other one."""

    keys: tuple[tuple[int, int], ...] = ((3, 64), (3, 16))
    values: tuple[tuple[int, int], ...] = ((3, 64),)
    blocks: tuple[int, ...] = (3, 1)
    heads: int = 2
    ratio: int = 4
    queries: int = 1
    dim: int = 64
    high: int = 24
    block: int = 32
    spare: int = 1
    scaled: bool = True
    dtype: torch.dtype = torch.float16
    launch: tuple[int, int, int, int, int] = (64, 32, 16, 2, 1 << 15)


@dataclass(frozen=True)
class Made:
    case: Case
    q: Tensor
    keys: Coded
    values: Coded
    blocks: Tensor

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.keys, self.values, self.blocks, self.case.dim**-0.5


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def codec_of(case: Case, role: Any) -> ResidualVQ:
    sizes, every = (case.keys if role == "key" else case.values), list(range(case.dim))
    second = every[1 : 2 * case.high : 2] if len(sizes) == 2 else []
    bands = [[dim for dim in every if dim not in second], second][: len(sizes)]
    books = [
        (normal(stages, size, len(band), seed=i) * 2.0 ** -torch.arange(stages).view(-1, 1, 1)).half()
        for i, ((stages, size), band) in enumerate(zip(sizes, bands, strict=True))
    ]
    scale = (normal(case.heads, case.dim, seed=7).abs() + 0.5).half() if case.scaled else None
    return ResidualVQ(Shape(case.heads, case.dim, case.block), role, bands, books, scale)


def made(case: Case, seed: int = 0) -> Made:
    room = max(case.blocks) + case.spare
    shape = (len(case.blocks), case.heads, room * case.block, case.dim)
    sides = []
    for i, role in enumerate(("key", "value")):
        codec = codec_of(case, role)
        sides.append(codec.as_codes(codec.encode(normal(*shape, seed=seed + 20 + i))))
    q = normal(len(case.blocks), case.heads * case.ratio, case.queries, case.dim, seed=seed + 30)
    return Made(case, (2 * q).to(case.dtype), *sides, torch.tensor(case.blocks, dtype=torch.int32))


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def wrong(given: Made, out: Tensor, log: Tensor) -> list[str]:
    """Errors against float64, row by row: at most twice those of the same attention in its dtype, four times for a
    query head by itself and for the logarithm (1e-5 more), which are few numbers; a row without blocks is zero.
    """
    exact, exact_log = reference.attend(given.q.double(), *given.arguments()[1:])
    plain, plain_log = reference.attend(*given.arguments())
    said = []
    for row, blocks in enumerate(given.case.blocks):
        if not blocks:
            if bool(out[row].any()) or not bool((log[row] < -1e29).all()):
                said.append(f"row {row} has no blocks, but {float(out[row].abs().max())}, {float(log[row].max())}")
            continue
        heads = [(f", query head {head}", head, 4) for head in range(given.q.shape[1])]
        for what, part, times in [*heads, ("", slice(None), 2)]:
            error, same = (off(x[row, part], exact[row, part]) for x in (out, plain))
            if not error <= times * same:
                said.append(f"row {row}{what}: off by {error:.2e}, same dtype by {same:.2e}")
        apart, same = (float((x[row].double() - exact_log[row]).abs().max()) for x in (log, plain_log))
        if not apart < 4 * same + 1e-5:
            said.append(f"row {row}: logarithm off by {apart:.2e}, same dtype by {same:.2e}")
    return said


def small() -> list[Case]:
    bf = torch.bfloat16
    return [
        Case(),
        Case(((3, 64),), ((4, 32),), (2,), ratio=1, queries=2, dim=96, high=0, scaled=False, dtype=bf),
        Case(launch=(64, 32, 16, 1, 0), dtype=bf, spare=0),
        Case(
            ((1, 512), (2, 128)), ((1, 512),), (1, 0), heads=1, ratio=3, queries=3, dim=128, high=48, block=128, spare=0
        ),
        Case(((3, 32), (2, 8)), ((3, 2), (2, 4)), (6,), block=8, ratio=2, high=16, dtype=bf, scaled=False),
        Case(((2, 8),), ((1, 16),), (1,), heads=1, ratio=16, queries=3, dim=16, high=0, block=16),
    ]


def exhaustive() -> list[Case]:
    dtypes = itertools.cycle([torch.float16, torch.bfloat16])
    rows = [
        Case(blocks=(2,), ratio=ratio, queries=queries, dtype=next(dtypes), heads=3)
        for ratio in range(1, 17)
        for queries in (1, 2, 4, 16)
        if ratio * queries <= 64
    ]
    bits = [
        Case(
            ((2, 1 << bits),),
            ((2, 1 << bits),),
            (2, 1),
            block=block,
            high=0,
            dtype=next(dtypes),
            launch=(32, 16, 16, 1, 1 << 9),
        )
        for bits in range(1, 17)
        for block in ((8, 32, 36) if bits < 12 else (32,))
    ]
    return small() + rows + bits


def main(cases: list[Case]) -> None:
    from kvcal_kernels.residual_vq.attention import triton

    space = triton.Workspace(torch.device("cpu"))
    for number, case in enumerate(cases):
        given = made(case, number)
        first = triton.attend(*given.arguments(), space, triton.Launch(*case.launch))
        if number < 2 and not torch.equal(first[0], triton.attend(*given.arguments(), space)[0]):
            print(f"{case}: other bits the second time")
        for said in wrong(given, *first):
            print(f"{case}: {said}")
        for side in (given.keys, given.values):
            exact = reference.decode(side).double()
            if off(triton.decode(side, case.dtype), exact) > 1.01 * off(exact.to(case.dtype), exact):
                print(f"{case}: decoded wrongly")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small, exhaustive=exhaustive)
