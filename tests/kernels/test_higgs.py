"""Rotation, norm and nearest point: the reference against the codec, the Triton kernel against the reference in the
interpreter and on a GPU, and what it compiles to without one. Also run by itself: TRITON_INTERPRET=1 python -m
tests.kernels.test_higgs
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Higgs, Shape
from kvcal_artifacts.codecs.higgs_grids import gaussian_grid
from kvcal_kernels.higgs import Rotated, encode, reference
from kvcal_kernels.layout import Form
from tests.support.compiled import TARGETS, compiled, loops, resources, skip_unless_pinned, whole
from tests.support.interpreted import interpreted, needs_triton

CASES: list[tuple[int, int, str, str, int]] = [  # d, n, norm, gain, head_dim
    (2, 16, "token", "mse", 64),
    (2, 64, "head", "debiased", 128),
    (2, 256, "token", "debiased", 64),
    (4, 256, "token", "mse", 64),
    (1, 4, "head", "mse", 256),
    (1, 8, "token", "debiased", 64),
    (1, 16, "head", "mse", 64),
]
WIDE: list[Any] = [
    (2, 16, "token", "mse", 64, "token"),
    (1, 8, "head", "debiased", 128, "token"),
]  # over the token's heads


def made(case: Any, dtype: torch.dtype = torch.float16) -> tuple[Higgs, Rotated, Tensor]:
    """A codec of 2 kv heads, what the kernel takes in its place, and numbers (2, 2, 64, D), some tokens of nothing or
    almost.
    """
    d, n, norm, gain, dim, *own = case
    rotation = own[0] if own else "head"
    codec: Any = Higgs(Shape(2, dim, 32), "key", d, n, rotation, norm, n, gain=gain)
    x = torch.randn(2, 2, 64, dim, generator=torch.Generator().manual_seed(n)) * 3
    x[..., ::9] *= 20
    x[0, :, 3], x[1, :, 7], x[1, :, 8] = 0, 1e-7, 2.5
    return (
        codec,
        Rotated(codec.grid, codec.sign, 1 if norm == "token" else 2, codec._gain, codec.rotation_width),
        x.to(dtype),
    )


@pytest.mark.parametrize("case", CASES + WIDE, ids=str)
def test_numbers_are_those_of_the_codec(case: Any) -> None:
    codec, how, x = made(case)
    decoded = torch.empty(x.shape)
    codes, norm, flags = encode(x, how, decoded)
    packed = codec.encode(x)
    wanted = codec.codes(packed)
    assert torch.equal(codes, wanted.unflatten(-1, (2, -1)).movedim(3, 1).flatten(2, 3))
    assert torch.equal(norm, packed["norm"].flatten(2))
    assert torch.equal(decoded, codec.for_decoding().decode(codec.for_decoding().encode(x)))
    assert not flags.any()


@pytest.mark.parametrize(("number", "says"), [(torch.nan, reference.NONFINITE), (3e7, reference.SCALE)])
def test_what_the_codec_refuses_is_flagged(number: float, says: int) -> None:
    _, how, x = made(CASES[4], torch.float32)
    x[1, 1, 5, 6] = number
    flags = encode(x, how)[2]
    assert flags[0] == 0
    assert flags[1] & says


def differing(module: Any, how: Rotated, x: Tensor) -> list[str]:
    """Also of what is decoded, bit by bit."""
    own = Rotated(how.points.cpu(), how.sign.cpu(), how.norms, how.gain, how.width)
    decoded, there = torch.empty(x.shape, device=x.device), torch.empty(x.shape)
    found = (*module.encode(x, how, out=decoded), decoded, *module.encode(x, how))
    wanted = (*encode(x.cpu(), own, there), there, *encode(x.cpu(), own))
    names = ("codes", "norm", "flags", "decoded", "codes alone", "norm alone", "flags alone")
    return [name for name, a, b in zip(names, found, wanted, strict=True) if not torch.equal(a.cpu(), b)]


def misplaced(module: Any, case: Any, device: str = "cpu") -> list[str]:
    """Roles of whose blocks the kernel packs other words than the codec."""
    found = []
    few = case[:2] in ((2, 16), (1, 4), (1, 8), (1, 16))
    for dim, role, points in itertools.product((64, max(128, case[4])), ("key", "value"), ("exact", "bytes")):
        if points == "bytes" and not few:
            continue
        settings: Any = {"norm": case[2], "points": points}
        codec: Any = Higgs(Shape(2, dim, 32), role, *case[:2], **settings)
        x = torch.randn(2, 2, 96, codec.shape.dim, generator=torch.Generator().manual_seed(1))
        packed, form = codec.encode(x), codec.fused()
        assert form.in_bytes == (points == "bytes")
        by_head = codec.codes(packed).unflatten(-1, (2, -1)).movedim(3, 1).flatten(2, 3).contiguous()
        words = module.pack(by_head.to(torch.uint8).to(device), form)
        found += [] if torch.equal(words.cpu(), codec.as_blocks(packed).words) else [f"{role}, {points}, {dim}"]
    return found


def main() -> None:
    from kvcal_kernels.higgs import triton

    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for number, case in enumerate(CASES[:2] + CASES[3:6] + WIDE):
        _, how, x = made(case, dtypes[number % 3])
        print(*differing(triton, how, x[:1, :, 1:20] if number else x.transpose(1, 2).contiguous().transpose(1, 2)))
    for case in CASES:
        print(*misplaced(triton, case))
    x[1, 1, 5, 6] = torch.inf
    print(triton.encode(x, how)[2].tolist())


@needs_triton
def test_interpreted_kernel_agrees_with_the_reference() -> None:
    lines = interpreted("-m", "tests.kernels.test_higgs")
    flags = [int(flag) & reference.NONFINITE for flag in lines[-1].strip("[]").split(",")]
    assert lines[:-1] == [""] * (5 + len(WIDE) + len(CASES))
    assert flags == [0, reference.NONFINITE]


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, how: (x[:, :, :, :48], how), "must be powers of two"),
        (lambda x, how: (x.double(), how), "torch.float64"),
        (lambda x, how: (x.mT.contiguous().mT, how), "contiguous channels"),
        (lambda x, how: (x, Rotated(how.points, how.sign[:3])), r"signs \(3,\)"),
        (lambda x, how: (x, Rotated(how.points, how.sign, 5)), "5 norms"),
        (lambda x, how: (x, Rotated(how.points, how.sign, width=256)), "rotation of 256 of 128 channels"),
        (lambda x, how: (x, how, None, x), "decoded into"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change: Any, says: str) -> None:
    from kvcal_kernels.higgs import triton

    _, how, x = made(CASES[0])
    with pytest.raises(ValueError, match=says):
        triton.encode(*change(x, how))


TYPES = {
    "p_x": "*fp16", "p_sign": "*i8", "p_table": "*fp32", "p_codes": "*u8", "p_norm": "*fp16",
    "p_flags": "*i32", "p_decoded": "*fp32", "scale": "fp32", "gain": "fp32",
}  # fmt: skip


def built(how: Rotated, decode: bool = False, capability: int = 90) -> Any:
    """At 8 heads of 128."""
    from kvcal_kernels.higgs import triton

    constants = triton.settings(how, 8, 128) | {"ASM": True, "DECODE": decode}
    names = [name for name in triton.encode_kernel.arg_names if name not in constants]
    aligned = [name for name in names if name.startswith("p_") or name.endswith("stride")]
    types = {name: TYPES.get(name, "i32") for name in names}
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    return compiled(triton.encode_kernel, types, constants, aligned, capability, **options)


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(("d", "ceiling"), [(2, 3.6), (4, 2.5)])
def test_compiled_kernel_keeps_to_its_budget(d: int, ceiling: float, capability: int, tmp_path: Path) -> None:
    """Instructions a number and point of the loop over points where there is no raster; 8 heads of 128. Rotation and
    norm take about 50 a number besides.
    """
    from kvcal_kernels.higgs import triton

    skip_unless_pinned()
    own = built(Rotated(torch.zeros(16, d), torch.zeros(1024, dtype=torch.int8)), capability=capability)
    taken, spilled = resources(own, tmp_path)
    assert (taken <= 168, spilled) == (True, 0), taken
    found = [loop.total() / (triton.NUMBERS / 128) for loop in loops(own, tmp_path)]
    assert len(found) == 1
    assert found[0] <= ceiling


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(("d", "n"), [(2, 256), (2, 16), (1, 8)])
def test_compiled_kernel_of_a_raster_keeps_to_its_budget(d: int, n: int, capability: int, tmp_path: Path) -> None:
    """A loop over candidates of cells that have many, 4096 numbers of 128 threads; none where no cell has."""
    how = Rotated(gaussian_grid(d, n), torch.zeros(1024, dtype=torch.int8))
    own = built(how, capability=capability)
    taken, spilled = resources(own, tmp_path)
    assert (taken <= 168, spilled) == (True, 0), taken
    found = [loop.total() for loop in loops(own, tmp_path)]
    assert found == [] if n < 256 else (len(found) == 1 and found[0] <= 290), found


# Registers, instructions of a thread: of the loop over points, of all once.
TOKEN = {
    (1, 90): (246, 242, 3110), (2, 90): (172, 109, 2780), (4, 90): (132, 83, 2685),
    (1, 80): (250, 242, 3080), (2, 80): (172, 109, 2780), (4, 80): (132, 83, 2665),
    (1, 87): (250, 242, 3095), (2, 87): (172, 109, 2770), (4, 87): (156, 83, 2645),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("d", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", TARGETS)
def test_compiled_kernel_that_rotates_a_token_and_decodes_keeps_to_its_budget(
    d: int, capability: int, tmp_path: Path
) -> None:
    how = Rotated(torch.zeros(16, d), torch.zeros(1024, dtype=torch.int8), width=1024)
    own, (registers, *ceilings) = built(how, True, capability), TOKEN[d, capability]
    taken, spilled = resources(own, tmp_path)
    assert spilled == 0
    skip_unless_pinned()
    assert taken <= registers, taken
    found = [*(loop.total() for loop in loops(own, tmp_path)), whole(own, tmp_path)]
    assert all(one <= ceiling for one, ceiling in zip(found, ceilings, strict=True)), found


# Registers, then instructions of a thread for each number, of which it packs 32, for sm_90, sm_80 and sm_87.
PACKING = {
    (1, 3, False, "key"): (42, 13.6, 13.5, 14.1), (1, 3, False, "value"): (36, 8.0, 7.8, 8.5),
    (2, 2, False, "key"): (32, 5.7, 5.5, 6.1), (2, 2, False, "value"): (33, 4.5, 4.4, 5.0),
    (4, 2, False, "key"): (34, 5.1, 4.9, 5.5), (4, 2, False, "value"): (36, 5.0, 4.9, 5.5),
    (1, 3, True, "key"): (75, 12.1, 11.8, 12.6), (1, 3, True, "value"): (118, 21.5, 23.0, 24.1),
    (1, 4, True, "key"): (41, 5.3, 5.2, 5.9), (1, 4, True, "value"): (34, 7.3, 7.2, 7.8),
    (2, 2, True, "key"): (23, 3.2, 3.0, 3.7), (2, 2, True, "value"): (34, 5.0, 4.8, 5.5),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(
    ("d", "bits", "in_bytes"), [(1, 3, False), (2, 2, False), (4, 2, False), (1, 3, True), (1, 4, True), (2, 2, True)]
)
def test_compiled_packing_keeps_to_its_budget(
    role: Any, d: int, bits: int, in_bytes: bool, capability: int, tmp_path: Path
) -> None:
    from kvcal_kernels.higgs import triton

    form = Form(role, 128, bits, vector=d, in_bytes=in_bytes)
    constants = {"DIM": 128, "BITS": bits, "D": d, "WORDS": form.words, "VALUE": role == "value", "IN_BYTES": in_bytes}
    types = {"p_codes": "*u8", "p_words": "*i32", "blocks": "i32"}
    own = compiled(triton.pack_kernel, types, constants, ["p_codes", "p_words"], capability, num_warps=4)
    taken, spilled = resources(own, tmp_path)
    registers, *ceilings = PACKING[d, bits, in_bytes, role]
    assert (taken <= 128, spilled) == (True, 0), taken
    skip_unless_pinned()
    assert taken <= registers, taken
    assert whole(own, tmp_path) / 32 <= ceilings[(90, 80, 87).index(capability)]


@needs_triton
@pytest.mark.parametrize(
    ("codes", "says"),
    [
        (torch.zeros(1, 2, 32, 64), "torch.float32"),
        (torch.zeros(1, 2, 40, 64, dtype=torch.uint8), "whole blocks of 32"),
        (torch.zeros(1, 2, 32, 32, dtype=torch.uint8), r"codes \(1, 2, 32, 32\)"),
        (torch.zeros(1, 64, 32, 2, dtype=torch.uint8).transpose(1, 3), "contiguous"),
    ],
)
def test_codes_that_the_kernel_would_misread_are_refused(codes: Tensor, says: str) -> None:
    from kvcal_kernels.higgs import triton

    with pytest.raises(ValueError, match=says):
        triton.pack(codes, Form("key", 128, 2, vector=2))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + WIDE, ids=str)
def test_on_a_gpu(case: Any) -> None:
    from kvcal_kernels.higgs import triton

    assert misplaced(triton, case, "cuda") == []
    _, how, x = made(case)
    own = Rotated(how.points.cuda(), how.sign.cuda(), how.norms, how.gain, how.width)
    assert differing(triton, own, x.cuda()) == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
