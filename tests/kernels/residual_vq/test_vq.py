"""Nearest codeword: the reference against float64, the Triton kernels against the reference, residual codes against
vector-quantize-pytorch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcal_kernels.hadamard import tree_sum
from kvcal_kernels.residual_vq.nearest import backend, nearest, reference, residual_codes, residual_sum, sums
from tests.support.compiled import TARGETS, compiled, loops, resources, skip_unless_pinned, whole
from tests.support.interpreted import interpreted, needs_triton


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def brute(x: Tensor, book: Tensor) -> Tensor:
    """Every distance in float64, subtraction by subtraction."""
    return (x.double()[:, None] - book.double()).square().sum(-1).argmin(-1)


@pytest.mark.parametrize(
    ("n", "d", "k"), [(300, 8, 256), (40, 48, 1024), (1, 1, 2), (7, 128, 16), (0, 4, 4), (9, 33, 5)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_nearest_is_the_nearest(n: int, d: int, k: int, kind: torch.dtype) -> None:
    x, book = normal(n, d).to(kind), normal(k, d, seed=1).half()
    codes = nearest(x, book)
    assert (codes.dtype, codes.shape) == (torch.int32, (n,))
    assert torch.equal(codes.long(), brute(x, book))


def test_a_tie_goes_to_the_lowest_index() -> None:
    book = normal(64, 6).half()
    book[40:] = book[10:34]
    assert bool((nearest(normal(500, 6, seed=1), book) < 40).all())
    assert nearest(torch.zeros(3, 6), torch.ones(8, 6).half()).tolist() == [0, 0, 0]
    either_side = torch.tensor([[1.0], [-1.0]])
    assert nearest(torch.tensor([[0.0], [0.25], [-0.25]]), either_side.half()).tolist() == [0, 0, 1]


@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 3e3]), st.integers(1, 40))
def test_a_code_depends_on_its_vector_alone(seed: int, size: float, cut: int) -> None:
    """Also where codewords lie so close together that float32 cannot tell them apart."""
    x = normal(41, 24, seed=seed) * size
    book = (normal(1, 24, seed=seed + 1) * size + normal(200, 24, seed=seed + 2) * size * 2e-3).half()
    whole = nearest(x, book)
    assert torch.equal(whole.long(), brute(x, book))
    assert torch.equal(torch.cat([nearest(x[:cut], book), nearest(x[cut:], book)]), whole)
    assert torch.equal(nearest(x.T.contiguous().T, book), whole)


def one_apart(book: Tensor) -> Tensor:
    """Codewords around the first that differ by a float16's last place in some dimensions."""
    step = torch.randint(0, 2, book.shape, generator=torch.Generator().manual_seed(3)).short()
    return (book[:1].expand_as(book).contiguous().view(torch.int16) + step).view(torch.float16)


def column(book: Tensor, value: float, rows: slice = slice(None)) -> Tensor:
    book = book.clone()
    book[rows, 0] = value
    return book


CLOSE: dict[str, Callable[[Tensor], Tensor]] = {
    "all 0": torch.zeros_like,
    "zeros of either sign": lambda book: book.sign() * 0,
    "all equal": lambda book: book[:1].expand_as(book).contiguous(),
    "two of them": lambda book: book[torch.arange(len(book)) % 2],
    "some twice": lambda book: book[torch.arange(len(book)) // 2],
    "one place apart": one_apart,
    "one far away": lambda book: column(book, 6e4, slice(3, 4)),
    "a large channel": lambda book: column(book, 3e4),
    "small beside a large channel": lambda book: column((book.float() * 1e-7).half(), 6e4),
    "signs": torch.sign,
}
PRECISIONS = ("highest", "high", "medium")


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Sets how torch may take products of float32, as users do; put back afterwards."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("setting", PRECISIONS)
@pytest.mark.parametrize("name", CLOSE)
@pytest.mark.parametrize(("n", "d", "k"), [(150, 33, 512), (40, 7, 16), (3, 16, 16384)])
def test_close_codewords_are_told_apart_by_their_distance_in_float64(
    n: int, d: int, k: int, name: str, setting: str, precision: Callable[[str], None]
) -> None:
    """The sum runs by halves, so that the distances, ties included, are the same numbers."""
    x, book = normal(n, d), CLOSE[name](normal(k, d, seed=1).half())
    x[::5], x[1::7, ::2] = 0, 0
    precision(setting)
    wanted = [tree_sum((row.double() - book.double()).square()).argmin() for row in x]
    assert torch.equal(reference.nearest(x, book).long(), torch.stack(wanted))


@pytest.mark.parametrize("setting", PRECISIONS)
@pytest.mark.parametrize("name", CLOSE)
def test_no_codebook_makes_encoding_slow(
    name: str, setting: str, precision: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work, not time: distances taken pair by pair, 20 times as slow as those in tiles, stay below one in sixteen."""
    work = {"pairs": 0, "tiles": 0}

    def watched(terms: Tensor) -> Tensor:
        work["pairs" if terms.ndim == 2 else "tiles"] += terms[..., 0].numel()
        return tree_sum(terms)

    monkeypatch.setattr(reference, "tree_sum", watched)
    precision(setting)
    x, book = normal(300, 32), CLOSE[name](normal(1024, 32, seed=1).half())
    reference.nearest(x, book)
    pairs = len(x) * len(book)
    assert work["pairs"] <= pairs / reference.CROWDED and work["tiles"] <= pairs, work
    if name != "small beside a large channel":  # what float64 cannot tell apart in a product, either
        assert work["pairs"] <= 2 * reference.FEW * len(x) and work["tiles"] == 0, work


NEWER = """
import torch
from kvcal_kernels.residual_vq.nearest import reference
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
x, book = torch.randn(50, 24), torch.randn(64, 24).half()
near = (x.double()[:, None] - book.double()).square().sum(-1).argmin(-1)
print(reference._is_full(x.device), torch.equal(reference.nearest(x, book).long(), near))
"""


def test_torchs_newer_setting_is_read_too() -> None:
    """torch.get_float32_matmul_precision raises an error once it is set, and nothing puts that back: a process apart."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch before 2.9 has one setting for all devices")
    done = subprocess.run([sys.executable, "-c", NEWER], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_the_distance_matrix_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    plain = torch.addmm

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        held.append(plain(*args, **kwargs).numel())
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", watched)
    nearest(normal(3000, 4), normal(1024, 4).half())
    assert max(held) == reference.SLAB
    assert sum(held) == 3000 * 1024


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_sums_by_code(kind: torch.dtype) -> None:
    x, codes = normal(500, 12).to(kind), torch.randint(0, 30, (500,), generator=torch.Generator().manual_seed(1))
    codes[codes == 7] = 8
    count, total = sums(x, codes.int(), 32)
    assert (count.dtype, total.dtype) == (torch.int64, torch.float32)
    assert torch.equal(count, codes.bincount(minlength=32))
    wanted = torch.zeros(32, 12, dtype=torch.float64).index_add_(0, codes, x.double())
    assert torch.allclose(total.double(), wanted, atol=1e-5)
    assert total[[7, 30, 31]].abs().max() == 0


def test_residual_codes_by_hand() -> None:
    book = torch.tensor([[[0.0], [4.0], [8.0]], [[-1.0], [0.0], [1.0]]]).half()
    codes = residual_codes(torch.tensor([[5.2], [-0.4], [7.9]]), book)
    assert codes.tolist() == [[1, 0, 2], [2, 1, 1]]
    assert residual_sum(codes, book).flatten().tolist() == [5.0, 0.0, 8.0]
    assert residual_sum(codes.to(torch.uint8), book).flatten().tolist() == [5.0, 0.0, 8.0]


def test_equals_residual_simvq_of_vector_quantize_pytorch() -> None:
    """VQKV's quantiser as another package has it, given its weights: frozen Gaussian codebooks behind learned
    projections.
    """
    other = pytest.importorskip(
        "vector_quantize_pytorch", reason="pip install -c constraints.txt vector-quantize-pytorch"
    )
    torch.manual_seed(0)
    theirs = other.ResidualSimVQ(dim=32, num_quantizers=6, codebook_size=128).eval()
    x = normal(1, 400, 32)
    with torch.no_grad():
        made, indices, _ = theirs(x)
        books = torch.stack([stage.frozen_codebook @ stage.code_transform.weight.T for stage in theirs.layers])
    codes = residual_codes(x[0], books)
    assert torch.equal(codes.T.long(), indices[0])
    assert torch.allclose(residual_sum(codes, books), made[0], atol=1e-5)


def test_which_implementation_runs() -> None:
    assert backend(normal(1, 4), normal(2, 4).half()) == "reference"
    assert backend(torch.empty(1, 4, device="meta"), torch.empty(2, 4, device="meta").half()) == "reference"


# Triton. No GPU is needed: the compiler runs here, and its interpreter computes.


@needs_triton
@pytest.mark.parametrize(
    ("d", "k", "capability", "most", "ceiling"),
    [
        *[(48, 65536, 90, 232, 580), (128, 65536, 90, 232, 580), (256, 32, 90, 168, 0)],
        *[(128, 65536, 80, 168, 510), (80, 4096, 87, 168, 440)],
    ],
)
def test_compiled_kernel_keeps_to_its_budget(
    d: int, k: int, capability: int, most: int, ceiling: int, tmp_path: Path
) -> None:
    """232 registers: two programs of four warps on a Hopper multiprocessor; 168: three before it. ceiling: instructions
    of a warp in a step of 128 vectors by 128 codewords, before Hopper of 64 by 128; 0: a step has no loop.
    """
    from kvcal_kernels.residual_vq.nearest import triton as fused

    types = {"p_x": "*fp16", "p_unit": "*fp32", "p_book": "*fp16", "p_half": "*fp32", "p_candidates": "*i32"}
    types |= {"n": "i32", "k": "i32"}
    launch = fused.launch_for(d, capability >= 90)
    made = compiled(
        fused.propose_kernel, types, fused.propose_settings(d, k, launch), [*[*types][:5], "k"], capability,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    registers, spilled = resources(made, tmp_path)
    assert spilled == 0
    if capability == 90:
        assert registers <= most
        assert "wgmma.mma_async" in made.asm["ptx"]
        assert made.metadata.shared <= 227 * 1024 // (2 if d <= 128 else 1)
    steps = [loop.total() for loop in loops(made, tmp_path) if loop["HGMMA" if capability >= 90 else "HMMA"]]
    if capability < 90:
        skip_unless_pinned()
    assert registers <= most
    assert len(steps) == bool(ceiling) and all(step <= ceiling for step in steps), steps


@needs_triton
def test_parts_of_all_lengths_take_one_compiled_kernel() -> None:
    """Training asks for parts of many lengths: Triton would compile each kernel twice for them."""
    from kvcal_kernels.residual_vq.nearest import triton as fused

    for kernel in (fused.scale_kernel, fused.propose_kernel, fused.settle_kernel):
        assert [p.name for p in kernel.params if p.do_not_specialize] == ["n"]


# Of each small kernel: registers, instructions of a thread in all (scale, settle: once; 32 vectors of 80) or of a turn
# (sums: 32 vectors).
SMALL = {
    90: ((50, 277), (82, 965), (42, 214)), 80: ((38, 280), (82, 950), (50, 208)), 87: ((49, 290), (82, 985), (42, 216)),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
def test_compiled_small_kernels_keep_to_their_budgets(capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.residual_vq.nearest import triton as fused

    found = []
    types = {"p_x": "*bf16", "p_half": "*fp16", "p_unit": "*fp32", "n": "i32"}
    constants = {"d": 80, "BM": 32, "BD": 128}
    made = compiled(fused.scale_kernel, types, constants, ["p_x", "p_half", "p_unit"], capability)
    found.append((*resources(made, tmp_path), whole(made, tmp_path)))
    types = {"p_x": "*bf16", "p_book": "*fp16", "p_candidates": "*i32", "p_codes": "*i32", "n": "i32", "k": "i32"}
    constants |= {"CANDIDATES": fused.CANDIDATES}
    made = compiled(fused.settle_kernel, types, constants, ["p_x", "p_book"], capability)
    found.append((*resources(made, tmp_path), whole(made, tmp_path)))
    types = {"p_x": "*bf16", "p_order": "*i64", "p_offsets": "*i64", "p_sums": "*fp32"}
    made = compiled(fused.sums_kernel, types, {"d": 80, "BR": 32, "BD": 128}, ["p_x"], capability)
    (turn,) = loops(made, tmp_path)
    found.append((*resources(made, tmp_path), turn.total()))
    assert all(spilled == 0 for _, spilled, _ in found), found
    skip_unless_pinned()
    for (taken, _, count), (registers, ceiling) in zip(found, SMALL[capability], strict=True):
        assert taken <= registers and count <= ceiling, found


INTERPRETED = """
import torch
from kvcal_kernels.residual_vq.nearest import reference, triton
def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
for n, d, k in [(150, 80, 512), (5, 48, 64), (40, 128, 16), (40, 7, 2), (64, 112, 65), (33, 200, 256), (0, 16, 16)]:
    x, book = normal(n, d, seed=n) * normal(n, 1, seed=1).mul(4).exp(), (normal(k, d, seed=k) * 3).half()
    book[k // 2], book[-1] = 0, book[0]
    x[:1] = 0
    for kind in (torch.float32, torch.bfloat16):
        part = x.to(kind)
        codes = reference.nearest(part, book)
        print(torch.equal(triton.nearest(part, book, triton.Launch(32, 64, 4)), codes))
        print(torch.equal(triton.nearest(part, book), codes))
        if triton.triton.__version__ >= "3.7":  # 3.6's interpreter cannot run a loop between loaded bounds
            (count, total), (fused_count, fused_total) = reference.sums(part, codes, k), triton.sums(part, codes, k)
            print(torch.equal(count, fused_count) and torch.allclose(total, fused_total, rtol=1e-4, atol=1e-5))
"""


@needs_triton
def test_interpreted_kernels_agree_with_the_reference() -> None:
    """Codewords that tie or nearly do apart, which random ones are not."""
    assert set(interpreted("-c", INTERPRETED)) == {"True"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "k"), [(48, 65536), (80, 65536), (128, 65536), (128, 4096), (64, 256), (96, 16), (256, 1024)]
)
def test_on_a_gpu(d: int, k: int) -> None:
    n = 20_000
    book = normal(k, d, seed=1).half().cuda()
    for kind in (torch.float32, torch.bfloat16):
        x = (normal(n, d) * normal(n, 1, seed=2).exp()).to(kind).cuda()
        assert backend(x, book) == "triton"
        codes = nearest(x, book)
        exact = reference.nearest(x, book)
        off = codes != exact
        assert float(off.double().mean()) < 1e-3
        left, least = ((x.double() - book[c.long()].double()).square().sum(-1) for c in (codes, exact))
        assert bool((left <= least * (1 + 2e-3)).all())
        assert torch.equal(torch.cat([nearest(x[:777], book), nearest(x[777:], book)]), codes)
        count, total = sums(x, codes, k)
        wanted_count, wanted = reference.sums(x.cpu(), codes.cpu(), k)
        assert torch.equal(count.cpu(), wanted_count)
        assert torch.allclose(total.cpu(), wanted, rtol=1e-4, atol=1e-3)
        assert torch.equal(sums(x, codes, k)[1], total)
