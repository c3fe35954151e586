"""Vector codes of a step's tokens: the Triton kernels against the reference, the reference against the codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal_artifacts.paths.preflight import codebook_trials
from kvcal_kernels.quantise import Windows
from kvcal_kernels.residual_vq import append as vq_append
from kvcal_kernels.residual_vq.attention import Band, decode
from tests.support.cases.vq_append_cases import Case, appended, codec_of, small, wrong
from tests.support.compiled import compiled, resources
from tests.support.interpreted import interpreted, needs_triton


@pytest.mark.parametrize("case", small()[:4], ids=str)
def test_codes_are_the_codecs_own(case: Case) -> None:
    """Of the tokens that left the window, in their order; and all that is not due stays as it was."""
    held, whole = (
        appended(vq_append, case),
        appended(vq_append, replace(case, windows=Windows(0, 512, case.windows.block))),
    )
    assert not held.flags.any() and int(held.counts.blocks.max()) > 0
    each = case.windows.block // 32
    for row, (sink, blocks) in enumerate(zip(held.counts.sink.tolist(), held.counts.blocks.tolist(), strict=True)):
        for role, name in enumerate(("key", "value")):
            codec = codec_of(case, name)
            tokens = whole.ring[role][row : row + 1, :, sink : sink + 32 * blocks]
            wanted = codec.encode(tokens)
            for number, band in enumerate(held.coded[role].bands):
                assert torch.equal(band.codes[row : row + 1, :, : blocks // each], wanted[f"codes.{number}"])
                assert bool((band.codes[row, :, blocks // each :] == 0xAB).all())


def test_what_cannot_be_stored_is_flagged() -> None:
    assert appended(vq_append, Case(), spoil=(0, 1, 0, 7)).flags.tolist() == [0, 1]
    assert appended(vq_append, Case(room=1, prompt=(100, 66))).flags.tolist() == [8 | 8 << 8] * 2


@needs_triton
def test_the_triton_kernels_in_the_interpreter() -> None:
    lines = interpreted("-m", "tests.support.cases.vq_append_cases")
    assert [line.rsplit(": ", 1)[1] for line in lines[: len(small())]] == ["None"] * len(small()), lines
    assert lines[-3] == "[[0, 1], [0, 1]]" and "bytes differ" in lines[-2]
    assert lines[-1].startswith("None, ") and "error" in lines[-1], lines


@needs_triton
@pytest.mark.parametrize(
    ("d", "k", "stages", "capability"),
    [(80, 256, 20, 90), (48, 65536, 3, 90), (128, 4096, 3, 90), (256, 32, 2, 90), (80, 4096, 3, 80)],
)
def test_compiles_without_spilling(d: int, k: int, stages: int, capability: int, tmp_path: Path) -> None:
    """With up to 255 registers, one program a multiprocessor: it runs once in as many steps as a block has tokens."""
    from kvcal_kernels.residual_vq.append import triton as fused

    types = dict.fromkeys(("p_dims", "p_codes", "p_counts", "p_flags"), "*i32")
    types |= dict.fromkeys(("p_half", "p_rest"), "*fp32") | dict.fromkeys(("p_ring", "p_scale", "p_book"), "*fp16")
    aligned = list(types)
    types |= dict.fromkeys(("batch", "capacity", "ring_capacity"), "i32")
    books = torch.empty(stages, k, d, dtype=torch.float16, device="meta")
    own = fused.settings(Band(torch.empty(0), books, torch.empty(d)), 1024, capability >= 90)
    options = {name: own.pop(name) for name in ("num_warps", "num_stages")}
    own |= {"H": 8, "D": max(d, 128), "SCALED": True, "SHIFT": 0, "ASM": True}
    made = compiled(fused.encode_kernel, types, own, aligned, capability, **options)
    assert resources(made, tmp_path)[1] == 0
    assert made.metadata.shared <= (227 if capability == 90 else 99) * 1024


@needs_triton
@pytest.mark.parametrize("capability", [80, 87, 90])
def test_windows_and_codes_compile_without_spilling(capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.residual_vq.append import triton as fused

    sizes: dict[Any, dict[str, Any]] = {
        fused.windows_kernel: {"H": 8, "D": 128, "BD": 128, "num_warps": 1},
        fused.pack_kernel: {"H": 8, "BLOCK": 1024, "S": 20, "BITS": 8, "BYTES": 1024, "num_warps": 4},
    }
    for kernel, own in sizes.items():
        warps = own.pop("num_warps")
        names = [name for name in kernel.arg_names if name not in own]
        pointers = {"p_counts": "*i32", "p_codes": "*i32", "p_packed": "*u8"}
        types = {name: pointers.get(name, "*fp16") if name.startswith("p_") else "i32" for name in names}
        aligned = [name for name in names if name.startswith("p_")]
        made = compiled(kernel, types, own, aligned, capability, num_warps=warps)
        assert resources(made, tmp_path)[1] == 0, kernel


def test_what_the_kernels_rely_on_is_checked() -> None:
    pytest.importorskip("triton")
    held, case = appended(vq_append, Case()), Case()
    k = torch.zeros(2, case.heads, 1, case.dim, dtype=case.dtype)

    def refused(what: str, **changed: object) -> None:
        given = {"keys": held.coded[0], "values": held.coded[1], "sink": held.sink, "ring": held.ring}
        given |= {"counts": held.counts, "flags": held.flags, "k": k, "v": k} | changed
        with pytest.raises(ValueError, match=what):
            vq_append.fast().append(**given)

    refused("33 new tokens: at most a block, 32", k=k.expand(-1, -1, 33, -1), v=k.expand(-1, -1, 33, -1))
    refused("ring of keys .*: must be", ring=(held.ring[0][:, :, :32], held.ring[1]))
    refused("values .* torch.float32", v=k.float())
    refused("flags", flags=held.flags.long())
    wide = replace(held.coded[0], block=64)
    refused("keys of blocks of 64 x 64: must be 32 x 64", keys=wide)
    assert decode(held.coded[0]).shape == (2, 2, 4 * 32, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*small(), Case(heads=8, dim=128, widths=(80, 48), size=4096, windows=Windows(4, 64, 1024), prompt=(1090, 20))],
    ids=str,
)  # fmt: skip
def test_on_a_gpu(case: Case) -> None:
    """Where two codewords are as good as equally near, and in the stages behind, codes may be others."""
    why = wrong(vq_append.fast(), case, "cuda")
    assert why is None or (case.size == 4096 and float(why.rsplit(": ", 1)[1].split()[0]) < 2e-3), why


@pytest.mark.gpu
def test_the_preflight_passes_on_a_gpu() -> None:
    case = Case(heads=8, dim=128, widths=(80, 48), size=4096, windows=Windows(4, 64, 1024))
    found = codebook_trials.codebook_append_trial(
        codec_of(case, "key"), codec_of(case, "value"), torch.float16, torch.device("cuda")
    )
    assert found is None
