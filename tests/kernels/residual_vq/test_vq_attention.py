"""Decode attention over residual vector codes: the reference against the codec and torch, the Triton kernels against
the reference in the interpreter and on a GPU, and what they compile to without one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcal_kernels.residual_vq.attention import Band, Coded, decode, merge, reference
from tests.support.cases.vq_attention_cases import Case, Made, codec_of, exhaustive, made, normal, small, wrong
from tests.support.compiled import compiled, loops, resources
from tests.support.interpreted import interpreted, needs_triton


def test_the_reference_decodes_what_the_codec_does() -> None:
    case = Case()
    codec, x = codec_of(case, "key"), normal(2, 2, 128, 64, seed=20)
    assert torch.equal(decode(made(case).keys), codec.decode(codec.encode(x)))


def test_the_reference_is_attention_to_the_blocks_that_a_row_has() -> None:
    own = made(Case())
    q, keys, values, blocks, scaling = own.arguments()
    out, log = reference.attend(q.float(), keys, values, blocks, scaling)
    for row, count in enumerate(own.case.blocks):
        k, v = (decode(side)[row, :, : count * 32].repeat_interleave(4, 0) for side in (keys, values))
        assert torch.allclose(out[row], scaled_dot_product_attention(q[row].float(), k, v, scale=scaling), atol=1e-5)
        assert torch.allclose(log[row], (q[row].float() @ k.mT * scaling).logsumexp(-1), atol=1e-5)


def test_parts_merge_into_the_whole() -> None:
    q, k, v = (normal(2, 3, 40, 16, seed=i) for i in range(3))

    def part(tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, :, tokens].mT / 4
        return scores.softmax(-1) @ v[:, :, tokens], scores.logsumexp(-1)

    nothing = torch.zeros_like(q), torch.full((2, 3, 40), -1e30)
    out, log = merge([nothing, part(slice(0, 7)), part(slice(7, 40))])
    assert torch.allclose(out, part(slice(0, 40))[0], atol=1e-6)
    assert torch.allclose(log, part(slice(0, 40))[1], atol=1e-6)


def test_what_is_wrong_is_seen() -> None:
    own = made(Case(blocks=(3, 0)))
    out, log = reference.attend(*own.arguments())
    assert wrong(own, out, log) == []
    assert "query head 2" in wrong(own, torch.cat([out[:, :2], out[:, 2:3] * 1.004, out[:, 3:]], 1), log)[0]
    assert "query head 0: off by nan" in wrong(own, out * torch.nan, log)[0]
    assert "logarithm off by" in wrong(own, out, log + 1e-2)[0]
    assert "row 1 has no blocks" in wrong(own, out + 1e-6, log)[-1]


# The kernels in Triton's interpreter.


@needs_triton
def test_interpreted_kernels_agree_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.vq_attention_cases", "small") == [str(len(small()))]


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interpreted_kernels_agree_with_the_reference_everywhere() -> None:
    assert interpreted("-m", "tests.support.cases.vq_attention_cases", "exhaustive") == [str(len(exhaustive()))]


def bands_of(side: Coded, **changes: Any) -> Coded:
    return replace(side, bands=tuple(replace(band, **changes) for band in side.bands))


def narrow(own: Made) -> Coded:
    book = torch.zeros(1, 4, 8).half()
    return Coded((*own.values.bands, Band(own.values.bands[0].codes, book, torch.arange(8))), 32)


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": lambda o: o.q.float()}, "queries of torch.float32"),
        ({"q": lambda o: o.q.mT.contiguous().mT}, "queries of .*strides"),
        ({"q": lambda o: o.q[:1]}, r"queries \(1, 8, 2, 64\): must be \(2, a multiple of 2, Q, 64\)"),
        ({"q": lambda o: o.q.repeat(1, 1, 9, 1)}, "72 query rows a kv head: 64 at most"),
        ({"keys": lambda o: replace(o.keys, bands=o.keys.bands * 2)}, "4 bands of keys: two at most"),
        ({"values": narrow}, "a band of 8 dimensions: 16 at least"),
        ({"values": lambda o: bands_of(o.values, codes=o.values.bands[0].codes[:, :, 1:])}, "values: codes .*must be"),
        ({"values": lambda o: replace(o.values, block=16)}, "values: .* of 32 tokens"),
        ({"values": lambda o: bands_of(o.values, books=o.values.bands[0].books.float())}, "codebooks of torch.float32"),
        ({"blocks": lambda o: o.blocks.long()}, "blocks: .* torch.int64"),
    ],
)
def test_what_the_kernels_would_misread_is_refused(change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.residual_vq.attention import triton

    own = made(Case(queries=2))
    with pytest.raises(ValueError, match=says):
        triton.attend(*replace(own, **{name: make(own) for name, make in change.items()}).arguments())


# Compiled without a GPU: Llama-3.1-8B's heads, 4096 codewords. (kernel, constants, registers, instructions a look-up)

HEADS: dict[str, Any] = {"H": 8, "RP": 4}
LOW_BAND = {"S0": 27, "K0": 4096, "BITS0": 12, "BYTES0": 192, "SHARED0": True}
LOW_BAND |= {"S1": 19, "K1": 4096, "BITS1": 12, "BYTES1": 192, "SHARED1": True}
VALUES = {"S": 13, "K": 4096, "BITS": 12, "BYTES": 192}
KERNELS: dict[str, tuple[dict[str, Any], int]] = {
    "tables_kernel": (
        {"H": 8, "R": 4, "D": 128, "d": 80, "K": 4096, "SCALED": True, "BD": 128, "RP": 4, "G": 8, "BC": 64,
         "ITERATIONS": 4, "ASM": True},
        128,
    ),
    "scores_kernel": ({**HEADS, **LOW_BAND, "BLOCK": 128, "BT": 2048, "UNROLL": 4}, 128),
    "total_kernel": ({"R": 4, "RP": 4, "AT_ONCE": 64}, 64),
    "scatter_kernel": ({**HEADS, **VALUES, "BLOCK": 128, "R": 4, "BT": 128, "UNROLL": 4}, 64),
    "product_kernel": ({"d": 128, "BD": 128, "RP": 4, "G": 8, "BK": 64, "STAGES": 2}, 200),
    "finish_kernel": ({"H": 8, "R": 4, "RP": 4, "D": 128, "d": 128, "SCALED": True, "BD": 128, "ASM": True}, 64),
    "decode_kernel": (
        {"H": 8, **VALUES, "BLOCK": 128, "D": 128, "d": 128, "SCALED": True, "BD": 128, "BT": 32, "UNROLL": 4, "ASM": True},
        128,
    ),
}  # fmt: skip
KINDS = {
    **dict.fromkeys(["p_q", "p_out"], "*bf16"), **dict.fromkeys(["p_scale", "p_book"], "*fp16"),
    **dict.fromkeys(["p_table", "p_table0", "p_table1"], "*i16"),
    **dict.fromkeys(["p_codes", "p_codes0", "p_codes1"], "*u8"), **dict.fromkeys(["p_dims", "p_blocks"], "*i32"),
    "p_weights": "*i32", "factor": "fp32",
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(87, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_kernels_keep_to_their_budgets(name: str, capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.residual_vq.attention import triton

    kernel, (constants, most) = getattr(triton, name), KERNELS[name]
    types = {
        each: KINDS.get(each, "*fp32" if each.startswith("p_") else "i32")
        for each in kernel.arg_names
        if each not in constants
    }
    aligned = [each for each in types if each.startswith("p_")]
    warps = {"finish_kernel": 1, "scores_kernel": 16}.get(name, 4)
    built = compiled(kernel, types, constants, aligned, capability, num_warps=warps)
    registers, spilled = resources(built, tmp_path)
    assert spilled == 0
    assert registers <= most
    if name == "scores_kernel":  # a stage of four tokens a thread; 16 warps
        assert max(loop.total() for loop in loops(built, tmp_path)) <= 55 * 4
    if name == "scatter_kernel":  # four stages of four numbers a thread
        assert max(loop.total() for loop in loops(built, tmp_path)) <= 24 * 16


@pytest.mark.gpu
@pytest.mark.parametrize("case", small(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    from kvcal_kernels.residual_vq.attention import triton

    own, device = made(case), torch.device("cuda")

    def moved(side: Coded) -> Coded:
        bands = tuple(Band(*(t.to(device) for t in (band.codes, band.books, band.dims))) for band in side.bands)
        return Coded(bands, side.block, None if side.scale is None else side.scale.to(device))

    arguments = own.q.cuda(), moved(own.keys), moved(own.values), own.blocks.cuda(), case.dim**-0.5
    space = triton.Workspace(device)
    first, again = (triton.attend(*arguments, space) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert wrong(own, first[0].cpu(), first[1].cpu()) == []
    for side, there in ((own.keys, arguments[1]), (own.values, arguments[2])):
        assert torch.equal(triton.decode(there, case.dtype).cpu(), decode(side).to(case.dtype))
