"""The transform codec's kernels: what blocks decode to, attention and packing in the interpreter and on a GPU, and what the
attention kernel compiles to without one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_kernels import transform
from kvcal_kernels.attention.checks import check_layouts
from kvcal_kernels.layout import TransformForm, decode
from kvcal_kernels.layout.transform import check_transform
from tests.support.cases.transform_cases import Case, codec_of, made, normal, small, wrong
from tests.support.compiled import compiled, loops, resources, skip_unless_pinned
from tests.support.interpreted import interpreted, needs_triton

FORMS = [((10, 13, 21, 11), 128), ((0, 7, 0, 25), 64), ((32, 0, 0, 0), 64), ((1, 0, 3, 1), 128)]


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(("pairs", "dim"), FORMS)
def test_blocks_hold_what_the_codec_decodes(role: Any, pairs: Any, dim: int) -> None:
    codec = codec_of(role, pairs, dim, gain="debiased")
    packed = codec.encode(normal(2, 2, 96, dim, seed=1))
    blocks = codec.as_blocks(packed)
    check_transform("blocks", blocks, 2, 2, 3)
    assert torch.allclose(decode(blocks), codec.decode(packed), atol=1e-5)
    bits = codec.bits_per_value() - 16 / (2 * dim)
    assert blocks.form.stored_bits == pytest.approx(bits)


@pytest.mark.parametrize(
    ("dim", "pairs", "says"),
    [
        (96, (1, 0, 0, 0), "transform at head_dim 96: head_dim may be (64, 128)"),
        (64, (0, 0, 0, 0), "must be 1 to 32 in all"),
        (64, (33, 0, 0, 0), "must be 1 to 32 in all"),
    ],
)
def test_forms_are_refused_in_one_line(dim: int, pairs: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        TransformForm("key", dim, pairs)


def test_codecs_that_no_kernel_reads_say_why() -> None:
    from kvcal_artifacts.codecs import Shape
    from kvcal_artifacts.codecs.transform import Transform

    assert Transform(Shape(2, 64, 64), "key").fused() == "transform in blocks of 64: the kernel reads blocks of 32"
    assert Transform(Shape(2, 96, 32), "key").fused() == "transform at head_dim 96: the kernel takes (64, 128)"


def test_blocks_of_another_form_are_refused() -> None:
    codec = codec_of("key", (3, 5, 9, 6), 64)
    blocks = codec.as_blocks(codec.encode(normal(1, 2, 32, 64, seed=1)))
    with pytest.raises(ValueError, match=r"keys, norm: \(1, 1, 1, 32\) .* must be \(1, 1, 2, 32\)"):
        check_transform("keys", blocks, 1, 2, 2)


def test_the_reference_packs_what_the_codec_does() -> None:
    codec = codec_of("key", (10, 13, 21, 11), 128)
    x = normal(2, 2, 64, 128, seed=3)
    packed = codec.encode(x)
    blocks = codec.shape.blocks(x) - codec.mean.float()[:, None, None]
    form = codec.fused()
    assert isinstance(form, TransformForm)
    y = codec._product(blocks, codec.encoder)
    codes = transform.encode(y, packed["norm"][:, 0], form, codec._grids)
    assert all(map(torch.equal, codes, (packed[f"codes{bits}"] for bits in codec.tiers)))


def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcal_kernels import attention
    from kvcal_kernels.attention import reference

    class Half:
        @staticmethod
        def attend(*arguments: Any, ring: bool) -> Tensor:
            attend: Any = reference.attend
            scaled: Tensor = 1.01 * attend(*arguments[:-1], ring=ring)
            return scaled

    monkeypatch.setattr(attention, "transform", lambda: Half)
    assert "off by 1.0" in str(wrong(small()[0]))


# The kernels in Triton's interpreter.


@needs_triton
def test_interpreted_kernel_agrees_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.transform_cases", "small") == [str(len(small()))]


PACKED = """
import torch
from tests.support.cases.transform_cases import codec_of, normal
for role, pairs, dim in (("key", (10, 13, 21, 11), 128), ("value", (0, 7, 0, 25), 64), ("key", (32, 0, 0, 0), 64)):
    codec = codec_of(role, pairs, dim)
    x = 3 * normal(2, 2, 64, dim, seed=4)
    x[0, :, 3] = 0
    expected, actual = codec.encode(x), codec.by_kernel().encode(x)
    print(codec.by_kernel().encodes_by_kernel, all(torch.equal(actual[name], t) for name, t in expected.items()))
"""


@needs_triton
def test_interpreted_kernel_packs_the_bytes_of_the_codec() -> None:
    assert interpreted("-c", PACKED) == ["True True"] * 3


# What it is compiled to, without a GPU.

MIXES = {2.0: (8, 14, 20, 14), 2.5: (16, 18, 16, 10), 3.0: (26, 21, 11, 3), 4.0: (64, 0, 0, 0)}  # pairs of 4 to 1 bits


@needs_triton
@pytest.mark.parametrize(("bits", "registers"), [(2.0, 168), (2.5, 168), (3.0, 255), (4.0, 168)])
def test_programs_have_the_registers_that_their_number_leaves(bits: float, registers: int) -> None:
    from kvcal_kernels.attention.triton.transform.launch import tried

    launch = tried(TransformForm("key", 128, MIXES[bits]), TransformForm("value", 128, MIXES[bits]))
    assert (launch.warps, launch.registers, launch.slots) == (4, registers, 2)


@needs_triton
@pytest.mark.parametrize(
    ("batch", "programs", "carried"),
    [(32, 3, True), (32, 2, True), (8, 3, False), (8, 2, True), (1, 3, False), (1, 2, False)],
)
def test_exact_tokens_have_programs_of_their_own_where_all_run_at_once(
    batch: int, programs: int, carried: bool
) -> None:
    """Rows of 32,768 tokens on 132 multiprocessors: what was timed faster (docs/runs/gpu-tests.md)."""
    from kvcal_kernels.attention.plan import ALONE, Launch
    from kvcal_kernels.attention.triton.transform.launch import CARRIED, planned

    def plan(tail_cost: int | None) -> Any:
        launch = Launch(warps=4, registers=168, slots=2, tail_cost=tail_cost)
        return planned(8 * batch, 1019, (32, 128), launch, 132 * programs)

    made = plan(None)
    assert (made.tail_cost != ALONE) == carried and made.tail > 0
    assert made == plan(CARRIED if carried else ALONE)
    assert (8 * batch * plan(ALONE).splits > 132 * programs) == carried


@needs_triton
def test_plans_without_exact_tokens_are_as_they_were() -> None:
    from kvcal_kernels.attention.plan import Launch, plan
    from kvcal_kernels.attention.triton.transform.launch import planned

    launch = Launch(warps=4, registers=168, slots=2)
    assert planned(256, 1024, (0, 0), launch, 396) == plan(256, 1024, (0, 0), 4, 396, True, launch)


def built(pairs: Any, warps: int = 4, registers: int = 168) -> Any:
    from kvcal_kernels.attention.plan import Launch
    from kvcal_kernels.attention.triton.transform.kernel import transform_kernel
    from kvcal_kernels.attention.triton.transform.launch import settings

    constants = settings(
        TransformForm("key", 128, pairs), TransformForm("value", 128, pairs), 8, 4, 1, Launch(warps, slots=2)
    )
    names = [name for name in transform_kernel.arg_names if name not in (*constants, "ASM", "RING", "LONG")]
    types = {name: "fp32" if name == "factor" else "i32" for name in names if not name.startswith("p_")}
    for name in (name for name in names if name.startswith("p_")):
        counts, floats = ("p_blocks", "p_sink", "p_recent", "p_count"), ("p_partial", "p_stat", "p_factor")
        codes = name[:3] in ("p_k", "p_v") and name[3].isdigit()
        types[name] = "*i32" if name in counts else "*fp32" if name in floats else "*u8" if codes else "*fp16"
    constants |= {"ASM": True, "RING": False, "LONG": False}
    aligned = [name for name in names if name.startswith("p_") and name not in ("p_blocks", "p_sink", "p_recent")]
    return compiled(transform_kernel, types, constants, aligned, num_warps=warps, num_stages=3, maxnreg=registers)


@needs_triton
@pytest.mark.parametrize(
    ("bits", "most"),
    [(2.0, 2), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((2.5, 2.2), (3.0, 2.4), (4.0, 1.75)))],
)
def test_compiled_kernel_keeps_to_its_budget(bits: float, most: float, tmp_path: Path) -> None:
    """Instructions for each number of keys and values of a warp's loop; spilled bytes are those of its beginning and end."""
    from kvcal_kernels.attention.triton.transform.blocks import turns_of

    skip_unless_pinned()
    own = built(MIXES[bits])
    check_layouts(own.asm["ttgir"])
    registers, spilled = resources(own, tmp_path)
    loop = max((sum(one.values()) for one in loops(own, tmp_path) if one["HMMA"] > 16), default=0) / turns_of(2)
    assert registers <= 168 and spilled <= 64 and 0 < loop / 256 < most, (registers, spilled, loop / 256)


@pytest.mark.gpu
@pytest.mark.parametrize("case", small(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    from kvcal_kernels.attention import reference
    from kvcal_kernels.attention import transform as triton_of

    def there(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(there, x))
        if isinstance(x, Tensor):
            return x.cuda()
        return x

    q, _, _, *rest = there(made(case))
    sides: list[Any] = []
    for role, pairs in (("key", case.keys), ("value", case.values)):
        codec = codec_of(role, pairs, case.dim, case.heads, case.gain).to(torch.device("cuda"))
        x = normal(len(case.blocks), case.heads, (max(*case.blocks, 1) + 1) * 32, case.dim, seed=len(role)).cuda()
        expected, actual = codec.encode(x), codec.by_kernel().encode(x)
        assert all(torch.equal(actual[name], t) for name, t in expected.items())
        sides.append(codec.as_blocks(actual))
    out = triton_of().attend(q, *sides, *rest, ring=case.ring)
    attend: Any = reference.attend
    exact, plain = (attend(x, *sides, *rest, ring=case.ring) for x in (q.float(), q))
    off, same = (float((x.float() - exact).norm() / exact.norm()) for x in (out, plain))
    assert off <= 2 * same + 2.0**-11
