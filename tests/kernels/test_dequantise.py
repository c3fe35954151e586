"""Dequantiser: the reference against the codec, the Triton kernel against the reference in the interpreter and on a
GPU, the codec's hook, and what the kernel compiles to without a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal_artifacts.codecs import Predicted, Shape, Uniform
from kvcal_artifacts.codecs.base import Context
from kvcal_artifacts.codecs.dequantise import Dequantiser, coded, refuses
from kvcal_artifacts.codecs.higgs import Higgs
from kvcal_artifacts.codecs.predictors import MLP, Linear
from kvcal_artifacts.errors import KVCalError
from kvcal_kernels.dequantise import Coded, Rotation, decode, reference
from kvcal_kernels.packing import packed_bytes
from tests.support.cases.dequantise_cases import (
    Case,
    Placed,
    codec_of,
    exhaustive,
    misplaced,
    normal,
    placed,
    rope,
    small,
)
from tests.support.compiled import TARGETS, compiled, loops, resources, skip_unless_pinned
from tests.support.interpreted import interpreted, needs_triton

SHAPE = Shape(2, 64, 32)


def linear(inputs: int = 1) -> Linear:
    return Linear({"weight": torch.zeros(128 * inputs, 128).half(), "bias": torch.zeros(128).half()})


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(("grid", "rotation", "norm"), [((2, 16), "token", "token"), ((1, 8), "head", "head")])
def test_the_reference_decodes_what_the_codec_does(role: Any, grid: Any, rotation: Any, norm: Any) -> None:
    codec = Higgs(SHAPE, role, *grid, rotation, norm, seed=3).for_decoding()
    packed = codec.encode(normal(2, 2, 96, 64, seed=0))
    assert torch.allclose(decode(coded(codec, packed)), codec.decode(packed), atol=1e-5)


def test_rope_turns_pairs_of_halves_and_leaves_the_rest() -> None:
    quarter = Rotation(torch.zeros(1, 1, 4), torch.ones(1, 1, 4))
    x = torch.arange(1.0, 7.0).view(1, 1, 1, 6)
    assert quarter(x).flatten().tolist() == [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]


def test_the_hook_on_a_cpu_is_the_codec() -> None:
    case = Case(rotary=32)
    codec, tokens = codec_of(case), case.blocks * case.block
    context = Context(k1=normal(2, 2, tokens, 64, seed=1))
    packed = codec.encode(normal(2, 2, tokens, 64, seed=2), context)
    turn, own = rope(case, tokens), Dequantiser(codec, torch.bfloat16, 32)
    assert turn is not None
    assert (own.path, own.why) == ("reference", "cpu: no CUDA GPU")
    room = torch.full((2, 2, tokens + 5, 64), torch.nan, dtype=torch.bfloat16)
    out, turned = own(packed, context, turn, room)
    exact = codec.decode(packed, context)
    assert out is room
    assert torch.equal(out[:, :, :tokens], exact.bfloat16())
    assert turned is not None
    assert torch.equal(turned, turn(exact).bfloat16())
    with pytest.raises(KVCalError, match="RoPE of 32 channels: cos and sin must be given"):
        own(packed, context)


@needs_triton
@pytest.mark.parametrize(
    ("codec", "dtype", "rotary", "says"),
    [
        (Uniform(SHAPE, "key", 2, 32, "channel"), torch.float16, 0, "uniform.*; the kernel reads HIGGS"),
        (Higgs(SHAPE, "key", axis="token"), torch.float16, 0, "the kernel reads HIGGS along channels"),
        (Higgs(SHAPE, "key"), torch.float16, 0, "as the attention kernel reads it"),
        (Higgs(SHAPE, "key").for_decoding(), torch.float32, 0, "torch.float32; the kernel writes float16 and bfloat16"),
        (Higgs(SHAPE, "key", rotation="token", norm="head"), torch.float16, 0, "a norm a head under a rotation over"),
        (
            Higgs(Shape(2, 96, 32), "key").for_decoding(),
            torch.float16,
            96,
            "RoPE of 96 of 96 channels: .* heads that divide 128",
        ),
        (Higgs(Shape(2, 40, 32), "value"), torch.float16, 0, None),
        (Predicted(Higgs(SHAPE, "value"), linear(), ("v1",)), torch.float16, 0, None),
    ],
)
def test_what_the_kernel_takes(codec: Any, dtype: torch.dtype, rotary: int, says: str | None) -> None:
    said = refuses(codec, dtype, rotary)
    assert said is None if says is None else bool(re.search(says, str(said)))


@needs_triton
def test_other_predictors_are_refused() -> None:
    weights = {"in_weight": (128, 256), "in_bias": (256,), "out_weight": (256, 128), "out_bias": (128,)}
    mlp = MLP({name: torch.zeros(size).half() for name, size in weights.items()})
    assert "a mlp predictor" in str(refuses(Predicted(Higgs(SHAPE, "key"), mlp, ("k1",)), torch.float16))
    five = Predicted(Higgs(SHAPE, "value"), linear(5), ("k1", "v1", "k2", "v2", "k0"))
    assert refuses(five, torch.float16) == "5 predictor inputs: 4 at most"


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": []}, "dequantise of 0 inputs .*: prepared for 1"),
        ({"inputs": [torch.zeros(2, 2, 64, 64)]}, "input: .* torch.float32.*; must be"),
        ({"inputs": [torch.zeros(2, 2, 64, 64).half().mT]}, "input: .* strides"),
        ({"inputs": [torch.zeros(2, 2, 32, 64).half()]}, r"input: \(2, 2, 32, 64\)"),
        ({"out": torch.zeros(2, 2, 64, 64)}, "into torch.float32"),
        ({"rotation": rope(Case(rotary=64), 64)}, "prepared for RoPE of 0 channels"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.dequantise import triton as kernel

    codec = Higgs(SHAPE, "key").for_decoding()
    blocks = coded(codec, codec.encode(normal(2, 2, 64, 64, seed=0)))
    given: dict[str, Any] = {"inputs": [torch.zeros(2, 2, 64, 64).half()]}
    prepared = kernel.prepare(blocks, torch.zeros(128, 128), channels=64)
    with pytest.raises(ValueError, match=says):
        kernel.dequantise(blocks, prepared, **(given | change))


# The kernel in Triton's interpreter.


@needs_triton
def test_interpreted_kernel_agrees_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.dequantise_cases", "small") == [str(len(small()))]


@needs_triton
def test_interpreted_kernel_places_exact_tokens_as_the_reference_does() -> None:
    assert interpreted("-m", "tests.support.cases.dequantise_cases", "placed") == [str(len(placed()))]


@needs_triton
def test_what_does_not_fit_is_not_placed() -> None:
    from kvcal_kernels.dequantise import triton as kernel

    whole, part = [torch.zeros(1, 2, 10, 64).half()] * 2, [torch.zeros(1, 2, 4, 64).half()] * 2
    with pytest.raises(ValueError, match=r"place: 12 tokens up to slot 12 of \(1, 2, 10, 64\)"):
        kernel.place(whole, part, part, part, 4)
    turn = Rotation(torch.ones(1, 7, 64), torch.ones(1, 7, 64))
    with pytest.raises(ValueError, match="RoPE of 7 tokens for 4 and 4"):
        kernel.place(whole, part, part, [x[:, :, :1] for x in part], 4, turn)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interpreted_kernel_agrees_with_the_reference_everywhere() -> None:
    assert interpreted("-m", "tests.support.cases.dequantise_cases", "exhaustive") == [str(len(list(exhaustive())))]


# Compiled without a GPU, at Llama-3.1-8B's geometry.

STRIDES = ["s_code_row", "s_code_head", "s_norm_row", "s_norm_head", "s_x_row", "s_x_head", "s_out_row", "s_out_head"]


def arguments(kind: str) -> tuple[dict[str, str], list[str]]:
    """Types of the kernel's arguments, and which of them are aligned."""
    from kvcal_kernels.dequantise import triton as kernel

    types = dict.fromkeys(["p_out", "p_rotated", "p_weight", "p_x0", "p_x1", "p_x2", "p_x3"], f"*{kind}")
    types |= {"p_codes": "*u8", "p_norm": "*fp16", "p_grid": "*i32", "p_matrix": "*fp16"}
    types |= {"p_factor": "*fp32", "p_bias": "*fp32"}
    types |= {"p_table": "*i32"} | dict.fromkeys(["rows", "tokens", "steps", *STRIDES, "s_rotation"], "i32")
    types = {name: types[name] for name in kernel.dequantise_kernel.arg_names if name in types}
    return types, [name for name in types if name[:2] in ("p_", "s_")]


def built(key: bool, rotation: int, inputs: int, rotary: int, kind: str, capability: int) -> Any:
    from kvcal_kernels.dequantise import triton as kernel

    codes = torch.empty(1, 8, 1, 32 if key else 64, packed_bytes(64 if key else 32, 4), dtype=torch.uint8)
    blocks = Coded(codes, torch.empty(1, 1, 1, 32), torch.empty(16, 2), torch.ones(1024), rotation, 4, 128, key)
    nothing = torch.empty(0)
    prepared = kernel.Prepared(nothing, torch.empty(8, 128, 128), nothing, nothing, rotary)
    launch = kernel.Launch(128) if not inputs else kernel.launch_for(torch.device("cpu"))
    if inputs and capability >= 90:
        launch = kernel.Launch(256)
    constants = {**kernel.settings(blocks, prepared, inputs, 256, launch), "ASM": True}
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    types, aligned = arguments(kind)
    return compiled(kernel.dequantise_kernel, types, constants, aligned, capability, **options)


@needs_triton
@pytest.mark.parametrize("inputs", [0, 3])
def test_a_rotation_of_an_odd_factor_fits_into_shared_memory(inputs: int) -> None:
    """Values of 3 heads of 96 channels in a grid of 4 dimensions, as programs of Hopper take them: at most 227 KB."""
    from kvcal_kernels.dequantise import triton as kernel

    codes = torch.empty(1, 3, 1, 24, packed_bytes(32, 8), dtype=torch.uint8)
    blocks = Coded(
        codes, torch.empty(1, 3, 1, 32), torch.empty(256, 4), torch.ones(288), 32, 8, 96, False, 3, "hadamard"
    )
    nothing = torch.empty(0)
    prepared = kernel.Prepared(nothing, torch.empty(3, 3, 128, 128), nothing, nothing, 0)
    launch = kernel.Launch(256 if inputs else 128)
    constants = {**kernel.settings(blocks, prepared, inputs, 256, launch), "ASM": True}
    assert constants["CODES"].dense
    types, aligned = arguments("fp16")
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made = compiled(kernel.dequantise_kernel, types, constants, aligned, 90, **options)
    assert made.metadata.shared <= 227 * 1024


# Bytes of stack: keys with RoPE in 256-token programs keep 16 bytes of a thread there, once a program. Then registers,
# 255 being all there are, and instructions of a warp in the loop over rotations' slices (0: none) and in a step of
# products (0: none).
BUDGET = [
    (True, 1024, 1, 128, "fp16", 90, 16, 255, 440, 140), (True, 1024, 1, 128, "bf16", 80, 0, 140, 225, 107),
    *(pytest.param(False, width, 2, 0, kind, capability, 0, *ceilings, marks=pytest.mark.slow)
      for width, kind, capability, *ceilings in (
        (1024, "bf16", 90, 250, 545, 140), (128, "fp16", 90, 252, 0, 140),
        (1024, "fp16", 80, 167, 275, 107), (1024, "fp16", 87, 174, 275, 107),
    )),
    pytest.param(True, 1024, 0, 0, "fp16", 90, 0, 180, 325, 0, marks=pytest.mark.slow),
    pytest.param(False, 1024, 0, 0, "fp16", 90, 0, 206, 372, 0, marks=pytest.mark.slow),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    ("key", "rotation", "inputs", "rotary", "kind", "capability", "stack", "most", "slice_of", "step"), BUDGET
)
def test_compiled_kernel_keeps_to_its_budget(
    key: bool,
    rotation: int,
    inputs: int,
    rotary: int,
    kind: str,
    capability: int,
    stack: int,
    most: int,
    slice_of: int,
    step: int,
    tmp_path: Path,
) -> None:
    """A step of 256 x 128 x 64 is 1024 cycles of Hopper's tensor cores; two warps a scheduler of 140 instructions fit
    in. Before Hopper a step is of 128 x 128 x 32.
    """
    made = built(key, rotation, inputs, rotary, kind, capability)
    registers, spilled = resources(made, tmp_path)
    assert spilled <= stack
    assert made.metadata.shared <= {90: 227, 80: 163, 87: 163}[capability] * 1024
    found = loops(made, tmp_path)
    products = [loop for loop in found if loop["HGMMA"] == 8 or loop["HMMA"] == 32]
    if capability == 90:
        assert len(products) == inputs
        assert all(loop.total() <= 140 for loop in products)
    skip_unless_pinned()
    assert registers <= most
    others = [loop.total() for loop in found if loop not in products]
    assert len(products) == inputs
    assert all(loop.total() <= step for loop in products)
    assert len(others) == bool(slice_of) and all(count <= slice_of for count in others), others


@needs_triton
@pytest.mark.parametrize("tables", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", TARGETS)
def test_compiled_placing_rounds_every_product(tables: str, capability: int, tmp_path: Path) -> None:
    """As torch does: with fused operations 16 of 100 numbers of bfloat16 were others (H200)."""
    from kvcal_kernels.dequantise import triton as kernel

    constants = {"H": 8, "D": 128, "DP": 128, "R": 128, "BT": kernel.PLACED, "ASM": True}
    names = [name for name in kernel.place_kernel.arg_names if name not in constants]
    types = {name: "*bf16" if name.startswith("p_") else "i32" for name in names}
    types |= dict.fromkeys(["p_cos", "p_sin"], f"*{tables}")
    aligned = [name for name in names if name[:2] in ("p_", "s_")]
    made = compiled(kernel.place_kernel, types, constants, aligned, capability, num_warps=4, enable_fp_fusion=False)
    assert resources(made, tmp_path)[1] == 0
    # before sm_90 bfloat16 has no other: a product is one with -0 as summand, a sum one with 1 as factor, rounded once
    known = dict(re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", made.asm["ptx"]))
    for x, y, z in re.findall(r"\bfma\.\S+\s+%\w+, (%\w+), (%\w+), (%\w+);", made.asm["ptx"]):
        assert capability < 90 and tables == "bf16"
        ones, nothing = str(0x3F803F80), str(0x80008000 - (1 << 32))
        assert ones in (known.get(x), known.get(y)) or known.get(z) == nothing


@pytest.mark.gpu
@pytest.mark.parametrize("case", small(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    codec, tokens = codec_of(case).to(torch.device("cuda")), case.blocks * case.block
    shape = (case.batch, case.heads, tokens, case.dim)
    context = Context(**{name: normal(*shape, seed=i).cuda() for i, name in enumerate(case.inputs)})  # type: ignore[arg-type]
    packed = codec.encode(normal(*shape, seed=9).cuda(), context)
    turn = rope(case, tokens)
    own = Dequantiser(codec, case.dtype, case.rotary)
    assert own.path == "triton", own.why
    out, turned = own(packed, context, None if turn is None else Rotation(turn.cos.cuda(), turn.sin.cuda()))
    inner = codec.inner if isinstance(codec, Predicted) else codec
    weights = codec.predictor.working() if isinstance(codec, Predicted) else {}
    inputs = [getattr(context, name).to(case.dtype).cpu() for name in case.inputs]
    blocks = coded(inner.to(torch.device("cpu")), {name: t.cpu() for name, t in packed.items()})  # type: ignore[arg-type]
    linear = [weights[name].cpu() if name in weights else None for name in ("weight", "bias")]
    exact = reference.dequantise(blocks, inputs, *linear, turn, torch.float64)
    plain = reference.dequantise(blocks, inputs, *linear, turn, case.dtype)
    for made, e, p in zip((out, turned), exact, plain, strict=True):
        if made is not None and e is not None and p is not None:
            error, same = (float((x.cpu().double() - e).norm()) for x in (made, p))
            assert error <= 2 * same


@pytest.mark.gpu
@pytest.mark.parametrize("case", placed(), ids=str)
def test_exact_tokens_are_placed_on_a_gpu(case: Placed) -> None:
    assert misplaced(case, "cuda") == []
