"""Inputs of decode attention over the transform codec, and what it must give; run by its tests in a process of their own:
`python -m tests.support.cases.transform_cases small`, in Triton's interpreter or compiled (tests/emulator). Prints what is
wrong, then how many there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.transform import Transform
from kvcal_kernels.attention import reference
from kvcal_kernels.attention.plan import Launch
from kvcal_kernels.layout import BLOCK, TransformBlocks
from tests.support.interpreted import run_cases

Pairs = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """keys, values: pairs of 4, 3, 2 and 1 bits a coordinate. peaked: queries so large that few tokens count. shifted: queries
    and exact tokens begin at an odd number of their memory.
    """

    keys: Pairs = (3, 5, 9, 6)
    values: Pairs = (2, 11, 4, 9)
    dim: int = 64
    heads: int = 2
    ratio: int = 2
    queries: int = 1
    blocks: tuple[int, ...] = (9, 0, 4)
    sink: tuple[int, ...] = (4, 2, 4)
    recent: tuple[int, ...] = (35, 17, 20)
    dtype: torch.dtype = torch.float16
    ring: bool = False
    gain: str = "debiased"
    peaked: bool = False
    shifted: bool = False
    warps: int = 0  # of a program; 0: as the device has it
    slots: int = 0  # of a warp's ring, where `warps` is not 0
    splits: int = 0  # programs of a row, likewise


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def codec_of(role: Any, pairs: Pairs, dim: int, heads: int = 2, gain: str = "mse") -> Transform:
    """A basis whose directions differ 100 to 1 in size, and a mean."""
    bits = [b for b, count in zip((4, 3, 2, 1), pairs, strict=True) for _ in range(2 * count)]
    sizes = torch.logspace(0.5, -1.5, dim, dtype=torch.float32, device="cpu")
    basis = torch.linalg.qr(normal(heads, dim, dim, seed=len(role)))[0] * sizes[None, :, None]
    mean = normal(heads, dim, seed=9) / 2
    return Transform(Shape(heads, dim, BLOCK), role, bits + [0] * (dim - len(bits)), basis, mean, gain)


def placed(x: Tensor, case: Case) -> Tensor:
    """The same numbers where the case has them in memory."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) if case.shifted else x


def made(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `reference.attend`."""
    rows, capacity = len(case.blocks), max(*case.blocks, 1) + 1
    sides: list[TransformBlocks] = []
    for role, pairs in (("key", case.keys), ("value", case.values)):
        codec = codec_of(role, pairs, case.dim, case.heads, case.gain)
        x = normal(rows, case.heads, capacity * BLOCK, case.dim, seed=seed + len(role))
        sides.append(codec.as_blocks(codec.encode(x)))

    def exact(capacity: int, counts: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        size = (rows, case.heads, capacity, case.dim)
        k, v = (placed(normal(*size, seed=seed + i).to(case.dtype), case) for i in (0, 1))
        return k, v, torch.tensor(counts, dtype=torch.int32)

    sink = exact(max(case.sink), case.sink, seed + 20)
    recent = exact(-(-max(case.recent) // BLOCK) * BLOCK, case.recent, seed + 30)
    q = normal(rows, case.heads * case.ratio, case.queries, case.dim, seed=seed + 40) * (30 if case.peaked else 1)
    return (
        placed(q.to(case.dtype), case),
        *sides,
        torch.tensor(case.blocks, dtype=torch.int32),
        sink,
        recent,
        case.dim**-0.5,
    )


def small() -> list[Case]:
    """Every tier alone and beside others, runs of pairs that are not whole, all numbers of columns, rings; two slots, whose
    turns are written out, with none, one and both of them behind.
    """
    bf = torch.bfloat16
    return [
        Case(),
        Case((10, 13, 21, 11), (5, 20, 13, 6), 128, ratio=4, blocks=(5, 0), sink=(4, 2), recent=(33, 17), warps=8),
        Case((32, 0, 0, 0), (1, 1, 1, 1), ratio=1, dtype=bf, ring=True, blocks=(6,), sink=(4,), recent=(40,)),
        Case((0, 0, 7, 3), (0, 30, 0, 0), ratio=4, queries=3, blocks=(4, 1), sink=(4, 0), recent=(33, 7), ring=True),
        Case((0, 0, 0, 32), (0, 0, 0, 1), ratio=2, queries=16, blocks=(2,), sink=(0,), recent=(31,), gain="mse"),
        Case(blocks=(3, 1, 0), shifted=True),
        Case(blocks=(25, 3, 12), sink=(4, 0, 1), warps=4, slots=2, splits=1),
        Case(
            (8, 14, 20, 14),
            (8, 14, 21, 13),
            128,
            heads=1,
            ratio=4,
            blocks=(17,),
            sink=(4,),
            recent=(33,),
            warps=2,
            slots=2,
            splits=2,
        ),
        Case((1, 0, 0, 0), (0, 0, 32, 0), ratio=16, blocks=(1,), sink=(3,), recent=(1,), heads=1, peaked=True),
    ]


def wrong(case: Case, seed: int = 0) -> str | None:
    """Errors against float32: at most twice those of the same attention with inputs and output of its dtype, and 2^-11 of
    what queries and probabilities are rounded to.
    """
    from kvcal_kernels.attention import transform

    arguments = made(case, seed)
    launch = Launch(case.warps, registers=168, slots=case.slots, splits=case.splits) if case.warps else None
    out = transform().attend(*arguments, launch, ring=case.ring)
    attend: Any = reference.attend
    exact = attend(arguments[0].float(), *arguments[1:], ring=case.ring)
    plain = attend(*arguments, ring=case.ring)
    off, same = (float((x.float() - exact).norm() / exact.norm()) for x in (out, plain))
    return None if off <= 2 * same + 2.0**-11 else f"off by {off:.2e}, same dtype by {same:.2e}"


def main(cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        if why := wrong(case, number):
            print(f"{case}: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small)
