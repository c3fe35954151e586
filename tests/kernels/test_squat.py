"""Error-compensated rounding: the reference against the codec, the Triton kernel against the reference in the
interpreter and on a GPU, and what it compiles to without one. Also run by itself: TRITON_INTERPRET=1 python -m
tests.kernels.test_squat
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Context, Shape, Squat, Uniform
from kvcal_kernels.layout import Form
from kvcal_kernels.quantise import Counts, Rule, Windows, advance, reference
from kvcal_kernels.squat import Digits, Moves, corrected, due, moves
from tests.support.compiled import TARGETS, compiled, resources, skip_unless_pinned, whole
from tests.support.interpreted import interpreted, needs_triton

Case = tuple[int, int, int, int, int]
CASES: list[Case] = [  # head_dim, channels, block, group, bits
    (128, 64, 32, 32, 2),
    (96, 64, 32, 32, 3),
    (64, 16, 64, 32, 2),
    (256, 64, 32, 32, 4),
    (64, 32, 128, 128, 2),
]


def made(case: Case, dtype: torch.dtype = torch.float16) -> tuple[Squat, Moves, Tensor]:
    """A codec of 2 kv heads with a subspace that moves much, what the kernel takes in its place, and keys (2, 2, 3
    blocks, D).
    """
    dim, channels, block, group, bits = case
    g = torch.Generator().manual_seed(dim)
    inner = Uniform(Shape(2, dim, block), "key", bits, group, "token")
    codec = Squat(inner, 5, 0.1, channels, "calibrated", calibrated=torch.randn(2, 5, dim, generator=g) * 3)
    x = torch.randn(2, 2, 3 * block, dim, generator=g) * 2 + 1
    x[0, :, :block], x[1, 0] = 0, x[1, 0] * 1e-6
    basis = next(codec._bases(Context(), 3))[1]
    return codec, moves(codec._responses(basis), channels), x.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_are_those_of_the_codec(case: Case) -> None:
    codec, own, x = made(case)
    dim, _, block, group, bits = case
    found = corrected(x, own, bits, group, block)
    assert torch.equal(found, codec.corrected(x, Context()))
    assert (found - x.float()).abs().max() > 0.1
    if group == 32:
        packed, _ = reference.quantise(found, Rule(Form("key", dim, bits, group, False, False), "asymmetric"))
        wanted = codec.as_blocks(codec.encode(x)) if not isinstance(codec.fused(), str) else None
        assert wanted is None or torch.equal(packed.words, wanted.words)


def test_digits_are_those_of_the_weights() -> None:
    for own in (made(case)[1] for case in CASES[:3]):
        for weight, digits in zip(own.weights, own.digits, strict=True):
            assert digits.abs().max() <= 512
            assert torch.equal(sum(digits[i].double() * 256**i for i in range(3)), weight)


def differs(module: Any, case: Case, own: Moves, x: Tensor) -> bool:
    _, _, block, group, bits = case
    on_cpu = Moves(own.channels, [t.cpu() for t in own.weights], [t.cpu() for t in own.units])
    return not torch.equal(
        module.corrected(x, own, bits, group, block).cpu(), corrected(x.cpu(), on_cpu, bits, group, block)
    )


WINDOWS = {"a ring": (4, 32), "new tokens": (0, 0)}  # sink, recent


def a_step(case: Case, how: str, queries: int) -> tuple[Any, Moves, Tensor]:
    """What `due` takes of three rows, of which some pack a block, and these blocks' keys (3, 2, block, D)."""
    dim, channels, block, group, bits = case
    sink, recent = WINDOWS[how]
    windows, g = Windows(sink, recent, block), torch.Generator().manual_seed(dim + queries)
    own, counts = made(case)[1], Counts(3, windows)
    own = Moves(channels, [w.repeat(3, 1, 1, 1) for w in own.weights], [u.repeat(3, 1) for u in own.units])
    if (
        how == "a ring"
    ):  # one row is short of a block by as many tokens as come, or fewer, one by more, one has not even its sink
        before = [sink + recent + 3 * block - 1, sink + recent + block - queries - 1, 3]
    else:
        before = [2 * block - 1, block - queries, 1]
    keys = torch.randn(3, 2, max(before) + queries, dim, generator=g).half() * 2 + 1
    advance(counts, torch.tensor(before, dtype=torch.int32))
    room = windows.ring_capacity(queries)
    ring = torch.full((3, 2, room, dim), 777.0).half()
    held = counts.sink + 32 * counts.blocks
    for row, tokens in enumerate(before):
        at = torch.arange(int(held[row]), tokens)
        ring[row, :, (at - int(counts.sink[row])) % room] = keys[row, :, at]
    advance(counts, torch.tensor([queries] * 3, dtype=torch.int32))
    new = torch.stack([keys[row, :, tokens : tokens + queries] for row, tokens in enumerate(before)])
    wanted = torch.zeros(3, 2, block, dim)
    for row in range(3):
        if counts.blocks[row] > counts.blocks_before[row]:
            first = int(counts.sink[row]) + 32 * int(counts.blocks_before[row])
            here = Moves(channels, [w[:1] for w in own.weights], [u[:1] for u in own.units])
            wanted[row] = corrected(keys[row : row + 1, :, first : first + block], here, bits, group, block)[0]
    return (ring, counts, new), own, wanted


STEPS = [(case, how, queries) for case in CASES[:4] for how in WINDOWS for queries in (1, 16)]


def apart(module: Any, case: Case, how: str, queries: int, device: str = "cpu") -> tuple[bool, int]:
    """Whether blocks that are due differ, and how many there are; rows without one must be left alone by kernels."""
    (ring, counts, new), own, wanted = a_step(case, how, queries)
    flush = (counts.blocks > counts.blocks_before).tolist()
    there = Counts(3, counts.windows, device)
    there.data.copy_(counts.data)
    held = Digits.of(Moves(own.channels, [w.to(device) for w in own.weights], [u.to(device) for u in own.units]))
    out = torch.full(wanted.shape, -5.0, device=device)
    found = module.due(ring.to(device), there, new.to(device), held, case[4], case[3], out)
    assert found is out
    if module is not reference_module():
        assert all(bool((out[row] == -5).all()) for row in range(3) if not flush[row])
    return any(not torch.equal(out[row].cpu(), wanted[row]) for row in range(3) if flush[row]), sum(flush)


def reference_module() -> Any:
    from kvcal_kernels.squat import reference

    return reference


@pytest.mark.parametrize(("case", "how", "queries"), STEPS, ids=str)
def test_a_step_corrects_the_block_that_is_due(case: Case, how: str, queries: int) -> None:
    assert apart(reference_module(), case, how, queries) == (False, 1 if how == "a ring" else 2)


def test_weights_in_place_are_those_they_were_made_of() -> None:
    own, other = made(CASES[0])[1], made(CASES[3])[1]
    held = Digits.of(own)
    where = [x.data_ptr() for x in held.tensors]
    assert all(torch.equal(w, x) for w, x in zip(held.weights, own.weights, strict=True))
    assert not held.renew(other)  # of another shape
    changed = Moves(own.channels, [w.flip(2) for w in own.weights], [u * 2 for u in own.units])
    assert held.renew(changed) and where == [x.data_ptr() for x in held.tensors]
    assert all(torch.equal(w, x) for w, x in zip(held.weights, changed.weights, strict=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ring, counts, new: (ring, counts, new.repeat(1, 1, 33, 1)), "33 new tokens, blocks of 32"),
        (lambda ring, counts, new: (ring.float(), counts, new), "ring .* torch.float32: must be .* torch.float16"),
        (lambda ring, counts, new: (ring[:2], counts, new), r"ring \(2, .*must be \(3, 2, tokens, 128\)"),
        (lambda ring, counts, new: (ring, Counts(2, counts.windows), new), "counts of 2 rows, keys of 3"),
    ],
)
def test_steps_that_make_no_sense(change: Any, says: str) -> None:
    given, own, _ = a_step(CASES[0], "a ring", 1)
    with pytest.raises(ValueError, match=says):
        due(*change(*given), own, 2, 32)


def main() -> None:
    from kvcal_kernels.squat import triton

    print([apart(triton, *STEPS[i])[0] for i in (0, 1, 3, 5, 6, 9)])
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for number, case in enumerate(CASES[:3]):
        _, own, x = made(case, dtypes[number])
        if number == 1:  # a row's own weights
            own = Moves(own.channels, [w.repeat(2, 1, 1, 1) for w in own.weights], [u.repeat(2, 1) for u in own.units])
        print(differs(triton, case, own, x.transpose(1, 2).contiguous().transpose(1, 2)))


@needs_triton
def test_interpreted_kernel_agrees_with_the_reference() -> None:
    lines = interpreted("-m", "tests.kernels.test_squat")
    assert lines == [f"{[False] * 6}", *["False"] * 3]


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, own, block: (x[:, :, :40], own, block), "40 tokens: must be whole blocks of 32"),
        (lambda x, own, block: (x.double(), own, block), "torch.float64"),
        (lambda x, own, block: (x.repeat(2, 1, 1, 1), Moves(64, [own.weights[0][:, :1]], own.units), block), "step 0"),
        (
            lambda x, own, block: (x, Moves(48, [own.weights[0][:, :, :48]], own.units), block),
            "48 channels at a time of 128",
        ),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change: Any, says: str) -> None:
    from kvcal_kernels.squat import triton

    _, own, x = made(CASES[0])
    x, own, block = change(x, own, 32)
    with pytest.raises(ValueError, match=says):
        triton.corrected(x, own, 2, 32, block)


TYPES = {
    "p_x": "*fp16",
    "p_new": "*fp16",
    "p_ring": "*fp16",
    "p_counts": "*i32",
    "p_out": "*fp32",
    "p_weight": "*fp16",
    "p_unit": "*fp64",
}


# Registers, instructions of a thread for each number of the block: a program has no loop.
BUDGET = {
    ("correct_kernel", 90): (176, 67), ("correct_kernel", 80): (232, 67), ("correct_kernel", 87): (176, 68),
    ("due_kernel", 90): (176, 71), ("due_kernel", 80): (232, 70), ("due_kernel", 87): (174, 71),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", ["correct_kernel", "due_kernel"])
@pytest.mark.parametrize("case", CASES[:1], ids=str)
@pytest.mark.parametrize("capability", TARGETS)
def test_compiled_kernel_keeps_to_its_budget(case: Case, capability: int, name: str, tmp_path: Path) -> None:
    from kvcal_kernels.squat import triton

    skip_unless_pinned()
    dim, channels, block, group, bits = case
    kernel, constants = getattr(triton, name), triton.settings(0, channels, 8, dim, bits, group, block)
    names = [name for name in kernel.arg_names if name not in constants]
    aligned = [name for name in names if name.startswith("p_") or name.endswith("stride")]
    types = {name: TYPES.get(name, "i32") for name in names}
    options: dict[str, Any] = {"num_warps": triton.warps(block), "num_stages": 1, "enable_fp_fusion": False}
    own = compiled(kernel, types, constants, aligned, capability, **options)
    taken, spilled = resources(own, tmp_path)
    registers, ceiling = BUDGET[name, capability]
    assert (taken <= registers, spilled) == (True, 0), taken
    assert whole(own, tmp_path) / (block * dim / 128) <= ceiling


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "how", "queries"), STEPS, ids=str)
def test_steps_on_a_gpu(case: Case, how: str, queries: int) -> None:
    from kvcal_kernels.squat import triton

    assert not apart(triton, case, how, queries, "cuda")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case: Case) -> None:
    from kvcal_kernels.squat import triton

    _, own, x = made(case)
    there = Moves(own.channels, [t.cuda() for t in own.weights], [t.cuda() for t in own.units])
    assert not differs(triton, case, there, x.cuda())


@pytest.mark.gpu
def test_heads_far_apart_on_a_gpu() -> None:
    """As of 32 kv heads and half a million tokens: the last ones begin beyond 2^31 numbers."""
    from kvcal_kernels.squat import triton

    dim, channels, block, group, bits = CASES[0]
    _, own, x = made(CASES[0])
    x, apart = x[:1].repeat(1, 2, 1, 1).cuda(), 2**30 + dim
    wide = Moves(
        channels, *([t.repeat(1, 2, *[1] * (t.ndim - 2)).cuda() for t in ts] for ts in (own.weights, own.units))
    )
    far = torch.empty(4 * apart, dtype=x.dtype, device="cuda").as_strided(x.shape, (4 * apart, apart, dim, 1)).copy_(x)
    found = triton.corrected(far, wide, bits, group, block)
    assert torch.equal(found, triton.corrected(x, wide, bits, group, block)) and bool(found.any())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
