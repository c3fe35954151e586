"""Choice of channels: the reference against the codec, the Triton kernel against the reference in the interpreter and
on a GPU. Also run by itself: TRITON_INTERPRET=1 python -m tests.kernels.test_mixkvq
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Context, MixKVQ, Shape
from kvcal_kernels.mixkvq import Tiers, select
from tests.support.compiled import TARGETS, compiled, loops, resources, skip_unless_pinned, whole
from tests.support.interpreted import interpreted, needs_triton

CASES: list[tuple[Tiers, str, int]] = [  # tiers, importance of a "block", a "row" or "none", head_dim
    (Tiers(), "row", 64),
    (Tiers(0.7, 1.6, 4), "block", 128),
    (Tiers(0.5, 0.9, 8, median=False), "none", 64),
    (Tiers(full=8, four=16), "block", 64),
    (Tiers(0.0, 0.0), "row", 32),
]


def made(case: tuple[Tiers, str, int], dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor | None]:
    """Keys (2, 4, 96, D) and importance; equal channels, channels and a whole block of nothing among them."""
    _, kind, dim = case
    g = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 4, 96, dim, generator=g) * torch.rand(dim, generator=g) * 2
    x[..., 5], x[..., 9], x[..., 20:24] = x[..., 3], x[..., 3], 1.5
    x[1, :, 32:64] = 0.25
    own = torch.rand(2, 4, 3 if kind == "block" else 1, dim, generator=g)
    own[..., 5], own[..., 9], own[..., 11] = own[..., 3], own[..., 3], 0
    return x.to(dtype), None if kind == "none" else own


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choices_are_those_of_the_codec(case: Any) -> None:
    how, kind, dim = case
    x, importance = made(case)
    own: dict[str, Any] = {"importance": "none" if kind == "none" else "query"}
    own |= {"full": how.full, "four": how.four, "normalise": "median" if how.median else "none"}
    codec = MixKVQ(Shape(4, dim, 32), "key", how.low, how.high, round_up=how.round_up, **own)
    context = Context(stats={} if importance is None else {"query_abs": importance})
    wanted = codec.tiers(codec.salience(x, context))
    assert all(torch.equal(a.long(), b) for a, b in zip(select(x, importance, how, 32), wanted, strict=True))
    if how.round_up == 4:
        assert len(wanted[1].unique()) > 1


def differing(module: Any, case: Any, x: Tensor, importance: Tensor | None) -> list[int]:
    found = module.select(x, importance, case[0], 32)
    wanted = select(x.cpu(), None if importance is None else importance.cpu(), case[0], 32)
    return [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a.cpu(), b)]


def main() -> None:
    from kvcal_kernels.mixkvq import triton

    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for number, case in enumerate(CASES):
        x, importance = made(case, dtypes[number % 3])
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        if number:  # the row with a block of nothing
            x, importance = x[1:, :, 32:], None if importance is None else importance[1:, :, -2:]
        print(differing(triton, case, x, importance))


ODD = """
import torch
from tests.kernels import test_mixkvq as t
from kvcal_kernels.mixkvq import triton
for case in (t.CASES[0], t.CASES[1], t.CASES[3]):
    x, importance = t.made(case, torch.bfloat16)
    x[0, 1, 0, 7], x[0, 1, 1, 7], importance[0, 1, :, 7] = 3e38, -3e38, 0  # infinity times nothing
    x[1, 2, 40, 11:30] = torch.nan
    made = torch.empty
    torch.empty = lambda *size, dtype=None, **rest: made(*size, dtype=dtype, **rest).fill_(200)  # beyond any channel
    perm, first, second = triton.select(x, importance, case[0], 32)
    torch.empty = made
    print(bool((perm.long().sort(-1).values == torch.arange(x.shape[3])).all()), bool((first <= second).all()))
"""


@needs_triton
def test_interpreted_kernel_agrees_with_the_reference() -> None:
    lines = interpreted("-m", "tests.kernels.test_mixkvq")
    assert lines == ["[]"] * len(CASES)


@needs_triton
def test_channels_of_what_is_refused_are_channels_all_the_same() -> None:
    """Refusals are told at the forward's end: until then keys are gathered by them."""
    assert interpreted("-c", ODD) == ["True True"] * 3


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, own: (x[:, :3], own), "must be powers of two"),
        (lambda x, own: (x[:, :, :40], own), "40 tokens: must be whole blocks of 32"),
        (lambda x, own: (x.double(), own), "torch.float64"),
        (lambda x, own: (x, own.half()), "importance .* torch.float16"),
        (lambda x, own: (x, own[:1]), "importance"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change: Any, says: str) -> None:
    from kvcal_kernels.mixkvq import triton

    with pytest.raises(ValueError, match=says):
        triton.select(*change(*made(CASES[0])), Tiers(), 32)


TYPES = {
    "p_x": "*fp16", "p_importance": "*fp32", "p_salience": "*fp32", "p_perm": "*u8", "p_first": "*i32", "p_second": "*i32",
    "low": "fp32", "high": "fp32",
}  # fmt: skip


# Registers, instructions of a thread: of the loop over tokens (eight channels each), of that over heads, of all once (a
# sort).
BUDGET = {90: (100, 295, 910, 4040), 80: (84, 295, 895, 3870), 87: (84, 295, 895, 3890)}


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
def test_compiled_kernel_keeps_to_its_budget(capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.mixkvq import triton

    skip_unless_pinned()

    constants = {"HEADS": 8, "DIM": 128, "BLOCK": 32, "ROUND": 8, "FULL": 0, "FOUR": 0}
    constants |= {"FIXED": False, "MEDIAN": True, "WEIGHED": True}
    names = [name for name in triton.select_kernel.arg_names if name not in constants]
    aligned = [name for name in names if name.startswith("p_") or name.endswith("stride")]
    types = {name: TYPES.get(name, "i32") for name in names}
    own = compiled(
        triton.select_kernel, types, constants, aligned, capability, num_warps=4, num_stages=1, enable_fp_fusion=False
    )
    taken, spilled = resources(own, tmp_path)
    registers, *ceilings = BUDGET[capability]
    assert (taken <= registers, spilled) == (True, 0), taken
    found = [*(loop.total() for loop in loops(own, tmp_path)), whole(own, tmp_path)]
    assert all(one <= ceiling for one, ceiling in zip(found, ceilings, strict=True)), found


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case: Any) -> None:
    from kvcal_kernels.mixkvq import triton

    x, importance = made(case)
    assert differing(triton, case, x.cuda(), None if importance is None else importance.cuda()) == []


@pytest.mark.gpu
def test_the_codec_finds_on_a_gpu_what_it_finds_on_a_cpu() -> None:
    """And so what the kernel finds: a channel that one of them has above a threshold moves all tiers behind it."""
    codec = MixKVQ(Shape(8, 128, 32), "key", importance="none")
    x = torch.randn(4, 8, 256 * 32, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codec.salience(x.cuda()).cpu(), codec.salience(x))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
