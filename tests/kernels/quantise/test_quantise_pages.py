"""New tokens stored in pages: in the interpreter and on a GPU as the reference stores them, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_kernels.layout import decode, read_pages
from kvcal_kernels.quantise import pages as family
from kvcal_kernels.quantise.pages.side import FROM, SHIFT, WIDTH, places
from tests.support.cases import store_cases
from tests.support.cases.store_cases import Case, made, rule_of, small
from tests.support.cases.transform_cases import codec_of
from tests.support.compiled import compiled, resources, skip_unless_pinned
from tests.support.interpreted import interpreted, needs_triton


@needs_triton
def test_interpreted_kernel_stores_the_bits_of_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.store_cases", "small") == [str(len(small()))]


@pytest.mark.parametrize("case", small(), ids=str)
def test_tokens_one_by_one_are_stored_as_together(case: Case) -> None:
    k, v, pages, form, slots, *rules = made(case)
    one, together = pages.clone(), pages.clone()
    family.store(k, v, together, form, slots, *rules)
    for i in torch.randperm(len(slots), generator=torch.Generator().manual_seed(0)).tolist():
        family.store(k[i : i + 1], v[i : i + 1], one, form, slots[i : i + 1], *rules)
    assert store_cases.off(case, form, together, one) is None


def test_stored_tokens_decode_to_what_the_codec_gives() -> None:
    case = small()[0]
    k, v, pages, form, slots, *rules = made(case)
    sides: tuple[Any, ...] = (("key", case.keys), ("value", case.values))
    codecs: Any = [codec_of(role, pairs, 64) for role, pairs in sides]
    family.store(k, v, pages, form, slots, *rules)
    blocks = read_pages(pages, form, torch.arange(len(pages))[None], *(codec.basis for codec in codecs))
    live = slots >= 0
    for x, stored, codec in zip((k, v), blocks, codecs, strict=True):
        whole = torch.nn.functional.pad(x.transpose(0, 1)[None], (0, 0, 0, -len(x) % 32))
        expected = codec.decode(codec.encode(whole))[0, :, : len(x)][:, live]
        close = (decode(stored)[0][:, slots[live]] - expected).abs() < 1e-4
        assert float(close.float().mean()) > 0.999


def test_what_is_wrong_is_seen() -> None:
    for case in (small()[0], small()[2]):
        pages, form = made(case)[2:4]
        changed = pages.clone()
        changed[..., : form.value_at // 2 : 20] ^= 4
        assert "bytes differ" in str(store_cases.off(case, form, pages, changed))
    form = made(small()[0])[3]
    changed = pages = form.empty(1, 2)
    changed = pages.clone()
    changed[..., form.keys.norm_at] = 2
    assert store_cases.off(small()[0], form, pages, changed) == "norms differ"


def test_parts_of_a_code_are_its_bits() -> None:
    """Where bits wrap around the end of a word a code has two parts."""
    form = rule_of("key", ("grid", 3, 2), small()[3]).form
    entries, parts = places(form)
    assert parts > 1
    codes = entries[: 32 * 32 * parts].view(32, 32, parts)
    assert torch.equal((codes >> WIDTH).sum(-1), torch.full((32, 32), 6, dtype=torch.int32))
    assert int((codes >> SHIFT & 31).add(codes >> WIDTH).max()) <= 32 and int((codes >> FROM & 15).max()) < 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda k, v, slots: (k[1:], v, slots), "keys (39, 2, 64)"),
        (lambda k, v, slots: (k, v, slots.int()), "slots (40,) torch.int32: must be (T,) torch.int64"),
        (lambda k, v, slots: (k, v.transpose(1, 2), slots), "values (40, 64, 2)"),
    ],
)
def test_other_arguments_are_refused(change: Any, says: str) -> None:
    k, v, pages, form, slots, *rules = made(small()[0])
    k, v, slots = change(k, v, slots)
    with pytest.raises(ValueError, match=re.escape(says)):
        family.store(k, v, pages, form, slots, *rules)


def test_rules_of_another_form_are_refused() -> None:
    k, v, pages, form, slots, *_ = made(small()[0])
    other = rule_of("key", (1, 0, 0, 0), small()[0]), rule_of("value", (1, 0, 0, 0), small()[0])
    with pytest.raises(ValueError, match=r"rules of .* for pages of"):
        family.store(k, v, pages, form, slots, *other)


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(89, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [0, 2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_kernel_compiles_without_spilling(number: int, capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.quantise.pages.triton import FIRST, coordinates_kernel, settings, store_kernel

    skip_unless_pinned()
    k, _, _, form, _, keys, values = made(small()[number])
    constants = {**settings(form, keys, values, k.shape[1], 1), "ASM": True}
    check_compiled(store_kernel, constants, capability, tmp_path)
    if constants["ROW"]:
        check_compiled(coordinates_kernel, {name: constants[name] for name in FIRST}, capability, tmp_path)


def check_compiled(kernel: Any, constants: dict[str, Any], capability: int, folder: Path) -> None:
    names = [name for name in kernel.arg_names if name not in constants]
    types = {
        name: "*fp32" if name.endswith("_table") else "*i32" if name.endswith("_places") else "i32" for name in names
    }
    pointers = {
        "p_k": "*bf16",
        "p_v": "*bf16",
        "p_pages": "*u8",
        "p_slots": "*i64",
        "p_y": "*fp32",
        "p_square": "*fp32",
    }
    types |= {name: kind for name, kind in pointers.items() if name in types}
    aligned = [name for name in names if name.startswith("p_") and name not in ("p_k", "p_v", "p_slots")]
    code = compiled(kernel, types, constants, aligned, capability, num_warps=4, enable_fp_fusion=False)
    registers, spilled = resources(code, folder)
    assert registers <= 255 and spilled <= 32, (registers, spilled)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("number", range(len(small())))
def test_on_a_gpu(number: int, tokens: int) -> None:
    from dataclasses import replace

    case = replace(small()[number], tokens=tokens)
    k, v, pages, form, slots, *rules = made(case)
    expected = pages.clone()
    family.store(k, v, expected, form, slots, *rules)

    def there(rule: Any) -> Any:
        if isinstance(rule, family.TransformRule):
            points = {bits: p.cuda() for bits, p in rule.points.items()}
            return family.TransformRule(rule.form, rule.encoder.cuda(), rule.mean.cuda(), points)
        return type(rule)(rule.form, rule.grid.to("cuda"), rule.gain) if hasattr(rule, "grid") else rule

    moved: list[Tensor] = [x.cuda() for x in (k, v, pages, slots)]
    family.fast().store(*moved[:3], form, moved[3], *map(there, rules))
    assert store_cases.off(case, form, expected, moved[2].cpu()) is None
