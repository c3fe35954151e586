"""New tokens for pages, and what must be stored; run by tests in a process of their own: `python -m
tests.support.cases.store_cases small`, in Triton's interpreter or compiled (tests/emulator). Prints what is wrong, then how
many cases there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.codecs.higgs_grids import gaussian_grid
from kvcal_kernels.hadamard import signs
from kvcal_kernels.layout import BLOCK, Form, PageForm, grid_of
from kvcal_kernels.quantise import GridRule, Rule
from kvcal_kernels.quantise import pages as family
from kvcal_kernels.quantise.pages import StoreRule, TransformRule
from tests.support.cases.transform_cases import Pairs, codec_of, normal
from tests.support.interpreted import run_cases

Kind = Pairs | tuple[str, int, int]  # transform: pairs; else "grid", bits, numbers a code, or a mode, bits, group


@dataclass(frozen=True)
class Case:
    """tokens: of one launch. left_out: every so many tokens one is stored nowhere."""

    keys: Kind
    values: Kind
    dim: int = 64
    heads: int = 2
    tokens: int = 40
    left_out: int = 7
    dtype: torch.dtype = torch.float32
    search: bool = False


def rule_of(role: Any, kind: Kind, case: Case) -> StoreRule:
    if len(kind) == 4:
        codec = codec_of(role, kind, case.dim, case.heads)
        form = codec.fused()
        assert not isinstance(form, str)
        return TransformRule(form, codec.encoder, codec.mean, {b: codec._grids[b] for b in codec.tiers if b > 1})
    form = form_of(role, kind, case.dim)
    what, bits, number = kind
    if form.vector:
        grid = grid_of(
            gaussian_grid(number, 1 << bits * number), signs(case.heads * case.dim, 1).view(case.heads, -1), bits
        )
        return GridRule(form, grid, 1.1)
    return Rule(form, what, case.search)  # type: ignore[arg-type]


def form_of(role: Any, kind: Any, dim: int) -> Form:
    """The form of "grid", bits, numbers a code; or of a mode, bits, group of channels."""
    what, bits, number = kind
    if what == "grid":
        return Form(role, dim, bits, vector=number)
    return Form(role, dim, bits, number, role == "key", what == "symmetric")


def made(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `store`: slots of scattered pages, several tokens of a page side by side, others far apart."""
    rules = rule_of("key", case.keys, case), rule_of("value", case.values, case)
    form = PageForm(rules[0].form, rules[1].form)
    count = case.tokens // BLOCK + 3
    g = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (count, case.heads, form.head_bytes), dtype=torch.uint8, generator=g)
    first = torch.randperm(count * BLOCK - case.tokens, generator=g)[0]
    slots = torch.randperm(count, generator=g).repeat_interleave(BLOCK) * BLOCK + torch.arange(count * BLOCK) % BLOCK
    slots = slots[first : first + case.tokens].clone()
    slots[3 :: case.left_out] = -1
    size = case.tokens, 2 * case.heads * case.dim
    k, v = (
        normal(*size, seed=seed + i).to(case.dtype)[:, : size[1] // 2].unflatten(1, (case.heads, -1)) for i in (1, 2)
    )
    return k, v, pages, form, slots, *rules


def small() -> list[Case]:
    """Every way to code, several heads a program and one, codes in two parts."""
    bf = torch.bfloat16
    return [
        Case((3, 5, 9, 6), (2, 11, 4, 9), dtype=torch.float16),
        Case((10, 13, 21, 11), (0, 40, 0, 5), 128, tokens=3),
        Case(("grid", 4, 1), ("grid", 3, 1), 128, dtype=bf),
        Case(("grid", 2, 2), ("grid", 3, 2)),
        Case(("grid", 2, 4), ("grid", 2, 4), heads=1, tokens=17),
        Case(("symmetric", 3, 32), ("asymmetric", 2, 32), dtype=bf),
        Case(("hybrid", 4, 16), ("asymmetric", 3, 64), search=True, tokens=5),
    ]


def wrong(case: Case, seed: int = 0) -> str | None:
    k, v, pages, form, slots, *rules = made(case, seed)
    actual, expected = pages.clone(), pages.clone()
    family.fast().store(k, v, actual, form, slots, *rules)
    family.store(k, v, expected, form, slots, *rules)
    return off(case, form, expected, actual)


def off(case: Case, form: PageForm, expected: Tensor, actual: Tensor) -> str | None:
    """What is wrong with pages: any bit; of the transform codec more than one in 500 bytes, and norms by more than a unit
    in the last place, as its coordinates are of another matrix product.
    """
    different = actual != expected
    if len(case.keys) != 4:
        return f"{int(different.sum())} bytes differ" if different.any() else None
    share = float(different.float().mean())
    for stored, norms in zip(_norms(actual, form), _norms(expected, form), strict=True):
        if int((stored.int() - norms.int()).abs().max()) > 1:
            return "norms differ"
    return f"{share:.1e} of bytes differ" if share > 2e-3 else None


def _norms(pages: Tensor, form: PageForm) -> list[Tensor]:
    keys, values = pages[..., : form.value_at], pages[..., form.value_at :]
    sides: Any = ((keys, form.keys), (values, form.values))
    return [x[..., f.norm_at : f.block_bytes].contiguous().view(torch.int16) for x, f in sides]


def main(cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        if why := wrong(case, number):
            print(f"{case}: {why}")
    from kvcal_kernels.quantise.pages.triton import launch

    launch.AT_ONCE = 16  # so that tokens are stored in several parts
    if why := wrong(cases[0], len(cases)):
        print(f"{cases[0]}, in parts: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, small=small)
