"""What vLLM hands over on a GPU, by kvcal's kernels: in Triton's interpreter beside the backend of a CPU, and on a GPU."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.errors import KVCalError
from kvcal_kernels.layout import Form
from kvcal_vllm import presets
from kvcal_vllm.gpu import layer as gpu_layer
from kvcal_vllm.gpu.layer import GPULayer
from kvcal_vllm.gpu.step import Prefill, step_of
from kvcal_vllm.paging import PagedLayer
from tests.support.cases import chunk_cases
from tests.support.cases.served_cases import Batch, Case, References, few, layer_of, small
from tests.support.compiled import compiled
from tests.support.interpreted import interpreted, needs_triton


@needs_triton
@pytest.mark.parametrize("cases", [few, pytest.param(small, marks=pytest.mark.slow)])
def test_interpreted_kernels_agree_with_the_backend_of_a_cpu(cases: Callable[[], list[Case]]) -> None:
    assert interpreted("-m", "tests.support.cases.served_cases", cases.__name__) == [str(len(cases()))]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> References:
    """The plug-in's own code with references for kernels."""
    references = References()
    references.replace_kernels(monkeypatch)
    return references


@pytest.mark.parametrize("case", small(), ids=str)
def test_batches_agree_with_the_backend_of_a_cpu(case: Case, kernels: References) -> None:
    batch = Batch(case, 3)
    batch.share()
    assert [why for counts in case.steps if (why := batch.step(counts))] == []


def test_a_decode_step_takes_two_launches(kernels: References) -> None:
    batch = Batch(Case("higgs-2", ((1, 3, 16),)), 0)
    assert batch.step((1, 3, 16)) is None
    assert kernels.launches == ["store", "attend"]


def test_what_is_wrong_is_seen(kernels: References) -> None:
    batch = Batch(Case("higgs-2", ((20, 3),)), 0)
    batch.kernels.decode = lambda *_: None  # type: ignore[method-assign]
    batch.kernels.prefill = lambda *_: None  # type: ignore[method-assign]
    assert batch.step((20, 3)) == "off by 1.00e+00"
    batch.kernels.store = lambda *_: None  # type: ignore[method-assign]
    assert "bytes are stored differently" in str(batch.step((20, 3)))


def step(counts: list[int], lengths: list[int], most: int, padding: int = 0) -> Any:
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    table, device_lengths, device_starts = torch.zeros(3, 1), torch.zeros(3), torch.zeros(4)
    return step_of(table, device_lengths, device_starts, starts, lengths, sum(counts) + padding, most, max(lengths))


def test_rows_take_their_path() -> None:
    mixed = step([1, 5, 40], [70, 5, 100], 16)
    assert (mixed.decodes, mixed.decode_tokens, mixed.queries, mixed.blocks) == (2, 6, 8, 4)
    assert mixed.prefills == (Prefill(2, 6, 46, 100),)
    default = step([1, 5, 1], [70, 5, 9], 1)  # whatever follows a chunk is one
    assert (default.decodes, default.decode_tokens, default.queries) == (1, 1, 1)
    assert default.prefills == (Prefill(1, 1, 6, 5), Prefill(2, 6, 7, 9))
    padded = step([1, 1, 0], [3, 4, 0], 1, padding=1)  # as of a CUDA graph
    assert (padded.decodes, padded.decode_tokens, padded.prefills) == (3, 3, ())
    prompts = step([40, 0, 3], [40, 0, 3], 1)
    assert (prompts.decodes, prompts.decode_tokens, prompts.prefills[1:]) == (0, 0, (Prefill(2, 40, 43, 3),))


def test_memory_of_graphs_stays_where_it_was(kernels: References) -> None:
    """What a larger step needs takes its place beside it; a captured step that was not reserved is refused."""
    batch = Batch(Case("higgs-2", ((1,),)), 0)
    scratch, query = batch.scratch, batch.tokens(1, 4)
    first = torch.zeros(10)
    scratch.graphs.partial = first
    with scratch.reserving():
        assert scratch.eager is scratch.graphs
        scratch.eager.partial = torch.zeros(20)
    assert scratch.eager is not scratch.graphs and any(x is first for x in scratch._replaced)

    def grow(*arguments: Any, workspace: Any, out: torch.Tensor) -> None:
        workspace.partial = torch.zeros(30)

    kernels.attend_pages = grow  # type: ignore[method-assign]
    captured = step_of(batch.table, torch.ones(1).int(), torch.tensor([0, 1]).int(), [0, 1], [1], 1, 1)
    batch.kernels.reserve(captured, query, batch.pages, scratch)
    object.__setattr__(captured, "captured", True)
    with pytest.raises(KVCalError, match="a step of 1 requests is captured that was not reserved"):
        batch.kernels.decode(batch.pages, captured, query, 1.0, scratch, torch.empty_like(query))


def test_layers_of_one_grid_share_its_table() -> None:
    layer = GPULayer(layer_of("higgs-2"), torch.device("cpu"))
    keys, values = layer._constants
    assert keys.table is values.table  # type: ignore[union-attr]


WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "unique", "is_nonzero", "to"}
DECODING: dict[str, set[str]] = {  # by file: functions that a decode step runs, and those that a CUDA graph holds
    "layer.py": {"store", "decode", "_raw", "_addresses", "_kernels"},
    "backend.py": {"do_kv_cache_update", "forward", "kernels", "_device"},
}


def waiting(source: str, functions: set[str]) -> list[str]:
    """Calls that wait for the device, or may: methods of WAITS, and int(), float() or bool() of anything."""
    tree, found, names = ast.parse(source), [], set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name not in functions:
            continue
        names.add(function.name)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in WAITS or name in ("int", "float", "bool"):
                    found.append(f"{function.name}: {name}")
    assert names == functions, functions - names
    return found


@pytest.mark.parametrize("file", DECODING)
def test_a_decode_step_does_not_wait_for_the_device(file: str) -> None:
    assert waiting((Path(gpu_layer.__file__).parent / file).read_text("utf-8"), DECODING[file]) == []


def test_waits_are_seen() -> None:
    source = "def f(x):\n    return int(x.max()) + x.item()\ndef g(x):\n    return x.cpu()"
    assert waiting(source, {"f"}) == ["f: int", "f: item"]


class _NoReads(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Refuses what reads a tensor's numbers on the host."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "a number was read on the host"
        return function(*arguments, **(more or {}))


def test_a_decode_step_reads_no_number_on_the_host(kernels: References, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Case("higgs-2", ((1, 2),)), 0)
    at = batch.device_step((1, 2), 3)
    query, key, out = batch.tokens(3, 4), batch.tokens(3, 2), torch.empty(3, 4, 64).half()
    slots = torch.tensor([0, 40, 41])

    def nothing(*arguments: Any, **more: Any) -> None:
        pass

    monkeypatch.setattr(kernels, "store", nothing)
    monkeypatch.setattr(kernels, "attend_pages", nothing)
    seen: list[Callable[[], None]] = [
        lambda: batch.kernels.store(batch.pages, slots, key, key),
        lambda: batch.kernels.decode(batch.pages, at, query, 0.1, batch.scratch, out),
    ]
    with _NoReads():
        for one in seen:
            one()
        with pytest.raises(AssertionError, match="read on the host"):
            out.max().item()


def types_of(kernel: Any, constants: dict[str, Any], **kinds: str) -> tuple[dict[str, str], list[str]]:
    """Types of a kernel's arguments in bfloat16, and which are aligned. kinds: of arguments by name."""
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: kinds.get(name, "*bf16" if name.startswith("p_") else "i32") for name in names}
    unaligned = kernel.do_not_specialize_on_alignment
    return types, [name for name in names if name.startswith("p_") and name not in unaligned]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("name", ["higgs-2", "higgs-4", "turboquant-4-3", "uniform-4", "uniform-8"])
def test_kernels_compile_as_the_backend_calls_them(name: str, capability: int, queries: int) -> None:
    """In bfloat16, of a process that has 2 of a model's kv heads."""
    from kvcal_kernels.attention.plan import usual
    from kvcal_kernels.attention.triton.paged import paged_kernel
    from kvcal_kernels.attention.triton.paged_launch import constants_of
    from kvcal_kernels.quantise.pages.triton import settings, store_kernel

    layer = GPULayer(PagedLayer(presets.codecs(name, Shape(2, 128, 32)), multiple=2), torch.device("cpu"))
    keys, values = layer.form.keys, layer.form.values
    assert isinstance(keys, Form) and isinstance(values, Form)
    launch = usual(keys, values, 4 * queries)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    options |= {"maxnreg": launch.registers} if launch.registers else {}
    attend = {**constants_of(keys, values, 2, 4, queries, launch.warps, True, 1), "ASM": True, "LONG": False}
    integers = dict.fromkeys(("p_table", "p_lengths", "p_starts", "p_count"), "*i32")
    floats = dict.fromkeys(("p_partial", "p_stat"), "*fp32") | dict.fromkeys(("factor", "k_unit", "v_unit"), "fp32")
    tables = dict.fromkeys(("p_kt", "p_vt"), "*fp16") | dict.fromkeys(("p_k_sign", "p_v_sign"), "*i8")
    types, aligned = types_of(paged_kernel, attend, p_pages="*u8", **integers, **floats, **tables)
    assert compiled(paged_kernel, types, attend, aligned, capability, **options).asm["cubin"]
    store = {**settings(layer.form, *layer._rules, 2, 1), "ASM": True}
    tables = dict.fromkeys(("p_k_table", "p_v_table", "p_y", "p_square"), "*fp32")
    tables |= dict.fromkeys(("p_k_places", "p_v_places"), "*i32")
    types, aligned = types_of(store_kernel, store, p_pages="*u8", p_slots="*i64", **tables)
    assert compiled(store_kernel, types, store, aligned, capability, num_warps=4, enable_fp_fusion=False).asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", small(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    batch = Batch(case, 5, torch.device("cuda"))
    batch.share()
    assert [why for counts in case.steps if (why := batch.step(counts))] == []


@needs_triton
def test_interpreted_answers_do_not_depend_on_chunks() -> None:
    assert interpreted("-m", "tests.support.cases.chunk_cases", "few") == [str(len(chunk_cases.few()))]


@pytest.mark.parametrize("case", [one for one in chunk_cases.few() if one.name != "transform"], ids=str)
def test_answers_do_not_depend_on_chunks(case: chunk_cases.Case, kernels: References) -> None:
    assert chunk_cases.wrong(case) == []


def test_answers_that_depend_on_chunks_are_seen(kernels: References, monkeypatch: pytest.MonkeyPatch) -> None:
    case, prefill = chunk_cases.few()[0], GPULayer.prefill

    def exact(own: GPULayer, pages: Any, table: Any, part: Any, query: Any, _: None, *more: Any) -> None:
        tokens = query[:, ::2], query[:, ::2]  # as if the chunk's own tokens came exact
        prefill(own, pages, table, part, query, tokens, *more)

    monkeypatch.setattr(GPULayer, "prefill", exact)
    assert "off by" in str(chunk_cases.wrong(case))
    store = GPULayer.store
    monkeypatch.setattr(
        GPULayer, "store", lambda own, pages, slots, *x: len(slots) > 1 and store(own, pages, slots, *x)
    )
    assert "other bytes are stored" in str(chunk_cases.wrong(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", chunk_cases.few() + chunk_cases.large(), ids=str)
def test_answers_on_a_gpu_do_not_depend_on_chunks(case: chunk_cases.Case) -> None:
    assert chunk_cases.wrong(case, 0, torch.device("cuda")) == []
