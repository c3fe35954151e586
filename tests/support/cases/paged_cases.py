"""Inputs of decode attention over pages, and what it must give; run by its tests in a process of their own:
`python -m tests.support.cases.paged_cases transform|others|small`, in Triton's interpreter or compiled (tests/emulator).
Prints what is wrong, then how many there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal_kernels import attention
from kvcal_kernels.attention import reference
from kvcal_kernels.attention.plan import Launch
from kvcal_kernels.layout import BLOCK, Constants, PageForm, move_blocks
from tests.support.cases.attention_cases import random_blocks
from tests.support.cases.store_cases import Kind, form_of
from tests.support.cases.transform_cases import codec_of, normal
from tests.support.interpreted import run_cases

SPARE = 3  # pages that no row has


@dataclass(frozen=True)
class Case:
    """lengths, queries: tokens of each row, and how many of them are queries. shared: pages that all rows begin with. keys,
    values: pairs of 4, 3, 2 and 1 bits a coordinate, or as store_cases has them. splits: programs of a row; 0: as planned.
    """

    keys: Kind = (3, 5, 9, 6)
    values: Kind = (2, 11, 4, 9)
    dim: int = 64
    heads: int = 2
    ratio: int = 2
    lengths: tuple[int, ...] = (300, 31, 160)
    queries: tuple[int, ...] = (1, 1, 1)
    shared: int = 0
    dtype: torch.dtype = torch.float16
    warps: int = 4
    splits: int = 0
    strided: bool = False  # queries, pages and heads have others between them


@dataclass
class Made:
    """Arguments of `reference.attend_pages`."""

    q: Tensor
    pages: Tensor
    form: PageForm
    table: Tensor
    lengths: Tensor
    starts: Tensor
    scaling: float
    keys: Constants
    values: Constants

    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


def table_of(lengths: tuple[int, ...], shared: int, seed: int) -> tuple[Tensor, int]:
    """Pages in random order, -1 behind a row's last one, and how many pages there are."""
    counts = [-(-length // BLOCK) for length in lengths]
    total = shared + sum(max(count - shared, 0) for count in counts) + SPARE
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max(*counts, 1)), -1, dtype=torch.int32)
    first, rest = order[:shared], iter(order[shared:])
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([*first, *(next(rest) for _ in range(count - shared))][:count])
    return table, total


def blocks_of(case: Case, count: int, seed: int) -> tuple[Any, ...]:
    """Keys and values of `count` rows of one block, and what decodes them."""
    sides: list[Any] = []
    for role, kind in (("key", case.keys), ("value", case.values)):
        if len(kind) == 4:
            codec = codec_of(role, kind, case.dim, case.heads, "debiased")
            x = normal(count, case.heads, BLOCK, case.dim, seed=seed + len(role))
            sides.append(codec.as_blocks(codec.encode(x)))
        else:
            g = torch.Generator().manual_seed(seed + len(role))
            sides.append(random_blocks(form_of(role, kind, case.dim), count, case.heads, 1, (1,) * count, g))
    if len(case.keys) == 4:
        return *sides, sides[0].basis, sides[1].basis
    return *sides, sides[0].grid, sides[1].grid


def made(case: Case, seed: int = 0) -> Made:
    table, total = table_of(case.lengths, case.shared, seed)
    keys, values, *constants = blocks_of(case, total, seed)
    form = PageForm(keys.form, values.form)
    apart = 16 if case.strided else 0
    pages = torch.full((total, case.heads, form.head_bytes + apart), 255, dtype=torch.uint8)[..., : form.head_bytes]
    move_blocks(pages, form, keys, values, torch.arange(total)[:, None])
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
    width = case.heads * case.ratio * case.dim
    q = normal(sum(case.queries), width + (width + 1 if case.strided else 0), seed=seed + 40).to(case.dtype)
    q = q[:, :width].unflatten(1, (-1, case.dim))
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return Made(q, pages, form, table, lengths, starts, case.dim**-0.5, *constants)


def transform() -> list[Case]:
    """Every tier alone and beside others, 1 to 16 queries, ragged ones, shared pages, all numbers of columns and splits."""
    bf = torch.bfloat16
    return [
        Case(),
        Case((10, 13, 21, 11), (5, 20, 13, 6), 128, ratio=4, lengths=(161, 0, 97), queries=(1, 0, 1), warps=8),
        Case(
            (32, 0, 0, 0), (1, 1, 1, 1), ratio=1, dtype=bf, lengths=(190, 255), queries=(2, 2), shared=3, strided=True
        ),
        Case((0, 0, 7, 3), (0, 30, 0, 0), ratio=4, lengths=(120, 33, 2), queries=(3, 1, 2), splits=3),
        Case((0, 0, 0, 32), (0, 0, 0, 1), ratio=2, lengths=(70, 16), queries=(16, 16), splits=1),
        Case((1, 0, 0, 0), (0, 0, 32, 0), ratio=8, lengths=(64, 65, 66), queries=(5, 0, 7), heads=1, shared=1),
    ]


def others() -> list[Case]:
    """Grids and integers: values in pairs of channels and not, one warp and several, 1 to 16 queries, ragged ones."""
    turbo, integers = (("grid", 4, 1), ("grid", 3, 1)), (("symmetric", 4, 32), ("asymmetric", 2, 32))
    return [
        Case(("grid", 2, 2), ("grid", 2, 2), ratio=4, lengths=(300, 31, 97)),
        Case(*turbo, 128, ratio=4, lengths=(161, 0, 40), queries=(1, 0, 2), strided=True),
        Case(("grid", 3, 2), ("grid", 4, 2), lengths=(120, 33, 2), queries=(3, 1, 2), splits=3, dtype=torch.bfloat16),
        Case(("grid", 2, 4), ("grid", 2, 1), ratio=1, lengths=(70, 66), queries=(16, 5), shared=1),
        Case(*integers, ratio=4, lengths=(100, 64, 1), warps=1, splits=2),
        Case(("asymmetric", 3, 64), ("asymmetric", 3, 16), ratio=2, lengths=(90, 31), queries=(4, 16), warps=2),
    ]


def small() -> list[Case]:
    """All cases."""
    return transform() + others()


def wrong(case: Case, seed: int = 0) -> str | None:
    """Errors against float32: at most twice those of the same attention with inputs and output of its dtype, and 2^-11 of
    what queries and probabilities are rounded to.
    """
    given = made(case, seed)
    launch = Launch(warps=case.warps, registers=128, splits=case.splits)
    out = kernels_of(case).attend_pages(*given.arguments(), max(case.queries), launch=launch)
    return off(given, out)


def kernels_of(case: Case) -> Any:
    """The module that has the case's kernel."""
    return attention.transform() if len(case.keys) == 4 else attention.fast()


def off(given: Made, out: Tensor) -> str | None:
    """What is wrong with an output."""
    q, *rest = given.arguments()
    exact, plain = reference.attend_pages(q.float(), *rest), reference.attend_pages(q, *rest)
    error, same = (float((x.float() - exact).norm() / exact.norm()) for x in (out, plain))
    return None if error <= 2 * same + 2.0**-11 else f"off by {error:.2e}, same dtype by {same:.2e}"


def main(cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        if why := wrong(case, number):
            print(f"{case}: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, transform=transform, others=others, small=small)
