"""What the kernel makes of a plan: a line for each one that it shares out otherwise than `plan` says, then their
number.

TRITON_INTERPRET=1 python -m tests.support.cases.program_cases
"""

from __future__ import annotations

import random
from typing import Any

import torch

SLOTS = [1, 7, 132, 264, 396, 528, 1056, 1584, 2112]
WARPS = [1, 4]


def planned(
    groups: int, blocks: int, windows: tuple[int, int], warps: int, slots: int, carried: bool, **own: Any
) -> Any:
    from kvcal_kernels.attention.plan import plan
    from kvcal_kernels.attention.triton import Launch

    return plan(groups, blocks, windows, warps, slots, carried, Launch(warps=warps, **own))


def spans(blocks: int, numbers: tuple[int, int, int, int], warps: int) -> list[tuple[int, int]]:
    """First block and the one behind the last of each part that has packed tokens, by what a plan's docstring says."""
    splits, early, less, extra = numbers
    turns = -(-(blocks + extra) // splits)
    each, found, start = -(-turns // warps) * warps, [], 0
    for part in range(splits):
        own = each if part < early else max(each - less, 0)
        stop = min(start + own, blocks)
        found.append((start, stop))
        start = stop
    return found


def cases() -> list[tuple[int, int, tuple[int, int, int, int], int]]:
    """blocks of a row, blocks there is room for, numbers of a plan, warps: rows as full as their room and emptier ones."""
    from kvcal_kernels.attention.plan import ALONE

    chosen, found = random.Random(0), []
    for _ in range(400):
        warps, room = chosen.choice(WARPS), chosen.choice([0, 1, 5, 31, 128, 1020, 4092, 32768, (1 << 20) + 77])
        windows, parts = (chosen.randrange(100), chosen.randrange(1, 400)), chosen.choice([0, 0, 0, 1, 2, 6, 11, 100])
        made = planned(
            chosen.choice([1, 8, 64, 256, 1000]), room, windows, warps, chosen.choice(SLOTS), chosen.random() < 0.8,
            splits=parts, tail_cost=chosen.choice([None, None, 0, 1, 3, 40, ALONE]),
        )  # fmt: skip
        found.append((chosen.choice([room, room, chosen.randint(0, room)]), room, made.numbers(), warps))
    return found


def main() -> None:
    from kvcal_kernels.attention.plan import SHORT, SPARE

    wrong = 0
    for blocks, room, numbers, warps in cases():
        out = torch.zeros(256, 2, dtype=torch.int32)
        spans_kernel[(1,)](out, blocks, *numbers, 256, warps, room + SPARE > SHORT)
        found, due = [tuple(own) for own in out.tolist()], spans(blocks, numbers, warps)
        inside = all(0 <= start <= stop <= blocks for start, stop in found)
        # a span of no block may lie anywhere there
        there, due = ([own for own in these if own[0] < own[1]] for these in (found, due))
        if not inside or there != due or sum(stop - start for start, stop in there) != blocks:
            wrong += 1
            print("wrong", blocks, numbers, warps, there[:5], due[:5])
    print(wrong)


if __name__ == "__main__":
    import triton
    import triton.language as tl

    from kvcal_kernels.attention.triton.merge import blocks_of_split

    @triton.jit
    def spans_kernel(
        p_out, blocks, splits, early, less, extra, COUNT: tl.constexpr, NW: tl.constexpr, LONG: tl.constexpr
    ):
        part = tl.arange(0, COUNT)
        start, stop = blocks_of_split(part, blocks, splits, early, less, extra, NW, LONG)
        tl.store(p_out + part * 2, start)
        tl.store(p_out + part * 2 + 1, stop)

    main()
