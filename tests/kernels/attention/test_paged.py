"""Attention over pages: in the interpreter and on a GPU against the reference, and what the kernels compile to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_kernels import attention as kernels
from kvcal_kernels.attention.checks import check_paged
from kvcal_kernels.attention.plan import Launch, rounded_blocks
from kvcal_kernels.layout import Basis, Form, Grid, TransformForm
from tests.kernels.attention.test_transform import MIXES
from tests.support.cases import paged_cases
from tests.support.cases.paged_cases import Case, kernels_of, made, others, transform
from tests.support.compiled import compiled, loops, resources, skip_unless_pinned
from tests.support.interpreted import interpreted, needs_triton


@needs_triton
def test_interpreted_kernel_of_the_transform_agrees_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.paged_cases", "transform") == [str(len(transform()))]


@needs_triton
def test_interpreted_kernel_of_grids_and_integers_agrees_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.paged_cases", "others") == [str(len(others()))]


def test_what_is_wrong_is_seen() -> None:
    from kvcal_kernels.attention import reference

    given = made(transform()[0])
    out = reference.attend_pages(*given.arguments())
    assert paged_cases.off(given, out) is None
    assert "off by" in str(paged_cases.off(given, 1.01 * out))


def test_numbers_of_blocks_are_rounded_up_to_few() -> None:
    rounded = [rounded_blocks(blocks) for blocks in range(5000)]
    assert all(blocks <= up <= max(1, blocks * 9 / 8 + 1) for blocks, up in enumerate(rounded))
    assert len(set(rounded)) < 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(3, 4, 64)}, "queries of torch.float32: must be float16 or bfloat16"),
        ({"q": torch.zeros(3, 64, 4).half().transpose(1, 2)}, "heads of a token one behind the other"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths: (2,) torch.int32 on cpu; must be (3,)"),
        ({"starts": torch.zeros(4, dtype=torch.int64)}, "starts: (4,) torch.int64 on cpu; must be (4,) torch.int32"),
    ],
)
def test_other_arguments_are_refused(change: dict[str, Tensor], says: str) -> None:
    arguments = vars(made(transform()[0])) | change
    names = ("q", "pages", "form", "table", "lengths", "starts")
    with pytest.raises(ValueError, match=re.escape(says)):
        check_paged(*(arguments[name] for name in names))


def built(pairs: Any, queries: int = 1, warps: int = 4, registers: int = 168, capability: int = 90) -> Any:
    from kvcal_kernels.attention.triton.transform.launch import settings
    from kvcal_kernels.attention.triton.transform.paged import paged_kernel

    forms = TransformForm("key", 128, pairs), TransformForm("value", 128, pairs)
    launch = Launch(warps=warps, registers=registers, slots=2)
    constants = settings(*forms, 8, 4, queries, launch) | {"ASM": True, "LONG": False}
    names = [name for name in paged_kernel.arg_names if name not in constants]
    types = {name: "fp32" if name == "factor" else "i32" for name in names if not name.startswith("p_")}
    counts, floats = ("p_table", "p_lengths", "p_starts", "p_count"), ("p_partial", "p_stat", "p_factor")
    for name in (name for name in names if name.startswith("p_")):
        kind = "*i32" if name in counts else "*fp32" if name in floats else "*u8" if name == "p_pages" else "*fp16"
        types[name] = kind
    aligned = [name for name in names if name.startswith("p_") and name not in (*counts[:3], "p_q")]
    options = {"num_warps": warps, "num_stages": 3, "maxnreg": registers}
    return compiled(paged_kernel, types, constants, aligned, capability, **options)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("bits", [3.0, 4.0])
def test_transform_is_compiled_for_an_rtx_4090(bits: float, tmp_path: Path) -> None:
    skip_unless_pinned()
    kernel = built(MIXES[bits], capability=89)
    registers, spilled = resources(kernel, tmp_path)
    assert registers <= 168 and spilled <= 64 and kernel.metadata.shared <= 99 * 1024


@needs_triton
@pytest.mark.parametrize(
    ("bits", "most"),
    [(2.0, 2), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((2.5, 2.2), (3.0, 2.4), (4.0, 1.75)))],
)
def test_compiled_kernel_keeps_to_its_budget(bits: float, most: float, tmp_path: Path) -> None:
    """Instructions for each number of keys and values of a warp's loop; spilled bytes are those of its beginning and end."""
    from kvcal_kernels.attention.triton.transform.blocks import turns_of

    skip_unless_pinned()
    kernel = built(MIXES[bits])
    registers, spilled = resources(kernel, tmp_path)
    loop = max((sum(one.values()) for one in loops(kernel, tmp_path) if one["HMMA"] > 16), default=0) / turns_of(2)
    assert registers <= 168 and spilled <= 64 and 0 < loop / 256 < most, (registers, spilled, loop / 256)


def there(x: Any) -> Any:
    """The same on a GPU; a basis keeps what it holds, its tensors moved."""
    if isinstance(x, Tensor):
        return (
            x.cuda() if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x).cuda()
        )
    if isinstance(x, Basis):
        points = {bits: p.cuda() for bits, p in x.points.items()}
        return Basis(x.decoder.cuda(), x.mean.cuda(), points, x.gain)
    return x.to("cuda") if isinstance(x, Grid) else x


FORMATS: dict[str, Any] = {  # keys and values, warps, registers, rows, the most instructions for each number
    "HIGGS 2": (Form("key", 128, 2, vector=2), Form("value", 128, 2, vector=2), 4, 128, 4, 1.8),
    "TurboQuant 4/3": (Form("key", 128, 4, vector=1), Form("value", 128, 3, vector=1), 4, 128, 4, 2.6),
    "uniform 4/4": (Form("key", 128, 4, 32), Form("value", 128, 4, 32, False, False), 1, 168, 4, 2.3),
}


def built_of(keys: Any, values: Any, warps: int, registers: int, rows: int) -> Any:
    from kvcal_kernels.attention.triton.paged import paged_kernel
    from kvcal_kernels.attention.triton.paged_launch import constants_of

    constants = constants_of(keys, values, 8, rows, 1, warps, False, 1) | {"ASM": True, "LONG": False}
    names = [name for name in paged_kernel.arg_names if name not in constants]
    floats, halves = ("p_partial", "p_stat"), ("p_q", "p_out", "p_kt", "p_vt")
    counts = ("p_table", "p_lengths", "p_starts", "p_count")
    types = {name: "fp32" if name in ("factor", "k_unit", "v_unit") else "i32" for name in names}
    for name in (name for name in names if name.startswith("p_")):
        kind = "*i32" if name in counts else "*fp32" if name in floats else "*fp16" if name in halves else "*u8"
        types[name] = "*i8" if name.endswith("_sign") else kind
    aligned = [name for name in names if name.startswith("p_") and name not in (*counts[:3], "p_q")]
    return compiled(paged_kernel, types, constants, aligned, num_warps=warps, num_stages=3, maxnreg=registers)


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "HIGGS" in name else pytest.mark.slow) for name in FORMATS]
)
def test_compiled_kernel_of_other_formats_keeps_to_its_budget(name: str, tmp_path: Path) -> None:
    skip_unless_pinned()
    *of, most = FORMATS[name]
    kernel = built_of(*of)
    registers, spilled = resources(kernel, tmp_path)
    body = [sum(one.values()) / 256 for one in loops(kernel, tmp_path) if one["HMMA"] > 16]
    assert registers <= of[3] and spilled <= 64 and 0 < min(body) < most, (registers, spilled, body)


@pytest.mark.gpu
@pytest.mark.parametrize("case", transform() + others(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    given = made(case)
    given = type(given)(*map(there, given.arguments()))
    out = kernels_of(case).attend_pages(*given.arguments(), max(case.queries))
    assert paged_cases.off(given, out) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", [transform()[0], others()[0]], ids=str)
def test_a_graph_follows_lengths_and_tables(case: Case) -> None:
    """Captured with short rows, replayed with long ones in other pages; twice, so that counters are back at zero."""
    given = made(case)
    given = type(given)(*map(there, given.arguments()))
    lengths, table = given.lengths.clone(), given.table.clone()
    given.lengths.fill_(1)
    given.table[:] = 0
    workspace, out = kernels.fast().Workspace(torch.device("cuda")), torch.empty_like(given.q)

    def run() -> None:
        kernels_of(case).attend_pages(*given.arguments(), max(case.queries), workspace=workspace, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    given.lengths.copy_(lengths)
    given.table.copy_(table)
    for _ in range(2):
        graph.replay()
        assert paged_cases.off(given, out) is None
