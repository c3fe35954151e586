"""Whole-model measurement: filled caches, the comparison of a graph's steps with eager ones, searches, rows, the
script.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvcal.bench import caches, decoding, filled, generation, layer, schemes
from kvcal.bench.caches import FLUSH_AT, Kind, Start
from kvcal.bench.decoding import CHECKED, Ran, Stepper
from kvcal.bench.generation import Search
from kvcal.bench.rows import Row
from kvcal.models import configuration, names
from kvcal.models.geometry import Geometry
from kvcal.report import bench as bench_report
from kvcal_artifacts.cache.static.layer import StaticLayer
from kvcal_artifacts.scheme import HeavyHitters, Scheme, Windows
from tests.support.architectures import build
from tests.support.pages import ROOT

LENGTH = 230
SCRIPT = ROOT / "docs/benchmarks/generation.py"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "SECONDS", 0.0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(generation, "released", lambda device: None)  # collecting garbage takes half a second
    yield
    layer.fill.cache_clear()


@cache
def model() -> Any:
    """Of head_dim 128, which the fused kernel's reference reads at all bits."""
    return build("Llama", head_dim=128).requires_grad_(False)


@cache
def geometry() -> Geometry:
    return Geometry.from_config(model().config.to_dict())


def kind(name: str, kernels: str = "torch") -> Kind:
    return caches.scheme_kind(model(), geometry(), schemes.named(name, geometry()), False, kernels)


def plain(path: str) -> Kind:
    return next(one for one in caches.plain_kinds(model(), geometry()) if one.path.startswith(path))


def start(one: Kind, batch: int = 2, length: int = LENGTH) -> Start:
    assert one.maker is not None
    return one.maker(batch, length, 12)


def stored(own: Start) -> list[Tensor]:
    return [t for one in own.cache.compressed_layers for part in ("packed", "window") for t in one.stored(part)]


# What a measurement starts from.


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("length", [1, 158, 159, 160, 200, 254, 255, 256, 1000, 32768])
def test_a_block_is_due_in_an_early_step(block: int, length: int) -> None:
    own = Windows(32, 96, block)
    found = caches.start_of(own, length)
    assert length <= found < length + block
    flushes = caches.blocks_of(own, found + FLUSH_AT + 1) - caches.blocks_of(own, found + FLUSH_AT)
    assert flushes == 1 or (found == length and length + FLUSH_AT + 1 < 128 + block)


@pytest.mark.parametrize("name", ["inner-4", "kivi-2-g128", "innerq-hybrid"])
def test_rooms_are_filled_where_they_stay_and_again(name: str) -> None:
    """The same bytes as in a cache that grows; after steps and `again` the same bytes at the same addresses."""
    own, other = start(kind(name), length=300), start(kind(name, "off"), length=300)
    assert all(isinstance(one, StaticLayer) for one in own.cache.compressed_layers) and own.no_graph is None
    assert own.length == other.length and other.no_graph is not None
    for a, b in zip(own.cache.compressed_layers, other.cache.compressed_layers, strict=True):
        for role in (0, 1):
            assert torch.equal(a.window[role], b.window[role]) and torch.equal(a.sink[role], b.sink[role])
            assert all(torch.equal(a.packed[role][part], x) for part, x in b.packed[role].items())
    before, where = [t.clone() for t in stored(own)], [t.data_ptr() for t in stored(own)]
    stepper, grown = Stepper(model(), own, 2), Stepper(model(), other, 2)
    with torch.no_grad():
        for step in range(FLUSH_AT + 2):
            grown.token.copy_(stepper.token)
            wanted, found = grown.step(), stepper.step()
            assert float((found - wanted).norm() / wanted.norm()) < 1e-4
            own.cache.settle()
            assert own.cache.ledger.columns == own.length + step + 1
            assert (
                own.cache.ledger.blocks.tolist()
                == [caches.blocks_of(own.cache.scheme.windows, own.length + step + 1)] * 2
            )
    assert own.flush == FLUSH_AT
    stepper.back()
    assert [t.data_ptr() for t in stored(own)] == where
    packed = [t.data_ptr() for one in own.cache.compressed_layers for t in one.stored("packed")]
    for t, was in zip(stored(own), before, strict=True):
        if t.data_ptr() in packed:  # the slot behind the last block keeps what a step wrote there
            blocks = own.cache.ledger.widths[1]
            assert torch.equal(t[:, :, :blocks], was[:, :, :blocks])
    assert int(stepper.place) == own.length == int(own.cache.get_seq_length())
    for one in (own, other):
        one.close()


def test_a_full_cache_attends_to_what_it_holds() -> None:
    """As DynamicCache with one token less before the step, then as the last of the same length."""
    full, dynamic = start(plain("full")), start(plain("Dynamic"), length=LENGTH - 1)
    for a, b in zip(full.cache.layers, dynamic.cache.layers, strict=True):
        b.keys, b.values = a.keys[:, :, :-1].clone(), a.values[:, :, :-1].clone()
    place = torch.tensor([[LENGTH - 1]])
    ids = torch.tensor([[3], [5]])
    with torch.no_grad():
        for own in (full, full):  # no step changes the length
            found = model()(input_ids=ids, position_ids=place, past_key_values=own.cache).logits
        wanted = model()(input_ids=ids, position_ids=place, past_key_values=dynamic.cache).logits
    torch.testing.assert_close(found, wanted)
    assert full.cache.get_seq_length() == LENGTH and not full.cache.is_compileable


# A graph's steps against eager ones, with a closure in the place of the graph.


class Emulated:
    """Replays by calling the step; `spoil` comes before each."""

    def __init__(self, stepper: Stepper, spoil: Any = None) -> None:
        self.stepper, self.spoil, self.logits = stepper, spoil, torch.zeros(2, model().config.vocab_size)

    def __call__(self) -> None:
        if self.spoil:
            self.spoil(self.stepper)
        self.logits.copy_(self.stepper.step())


@torch.no_grad()
def compared(one: Kind, spoil: Any = None, off: float = 0.0, compiled: bool = False) -> tuple[str | None, float]:
    """off: units of eps that are put on the graph's logits."""
    own = start(one)
    stepper = Stepper(model(), own, 2)
    decoding._warm_up(stepper, False)
    eager = decoding._eager(stepper, CHECKED)
    replay = Emulated(stepper, spoil)
    try:
        eps = torch.finfo(torch.float32).eps
        return decoding._compare(
            stepper, eager, lambda: (replay(), replay.logits.mul_(1 + off * eps))[0], replay.logits, compiled
        )
    finally:
        own.close()


@pytest.mark.parametrize("path", ["full", "StaticCache"])
def test_plain_steps_are_compared_from_the_same_start(path: str) -> None:
    assert compared(plain(path)) == (None, 0.0)


def test_steps_of_a_scheme_are_compared_over_a_flush() -> None:
    assert compared(kind("inner-4")) == (None, 0.0)


def _later(stepper: Stepper) -> None:
    stepper.place.add_(1)


def _poisoned(stepper: Stepper) -> None:
    stepper.start.cache.compressed_layers[0].allocation.ring[0].fill_(torch.nan)


def _twice(stepper: Stepper) -> None:
    """A step too many where the window's part in attention is small: seen in the counts."""
    if int(stepper.place) == stepper.start.length + CHECKED - 1:
        kept = stepper.token.clone()
        stepper.step()
        stepper.token.copy_(kept)
        stepper.place.sub_(1)


def test_a_graph_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for spoil, said in ((_later, "logits of the graph are off"), (_poisoned, "off by nan")):
        assert said in str(compared(kind("inner-4"), spoil)[0])
    monkeypatch.setattr(decoding, "TOLERANCE", 1e9)
    assert "tokens or blocks" in str(compared(kind("inner-4"), _twice)[0])


@pytest.mark.parametrize(("off", "plainly", "compiled"), [(6, True, True), (12, False, True), (20, False, False)])
def test_a_compiled_forward_may_round_elsewhere(off: float, plainly: bool, compiled: bool) -> None:
    for of_compiled, passes in ((False, plainly), (True, compiled)):
        assert (compared(plain("full"), None, off, of_compiled)[0] is None) == passes


def test_witnesses() -> None:
    counts, block = [torch.tensor([5]), torch.tensor([1, 1])], torch.zeros(2, 64, dtype=torch.int16)
    one = [*counts, block]
    assert decoding.differ(one, [*counts, block.clone()]) is None
    assert "of the bytes of the newest packed block differ" in str(decoding.differ(one, [*counts, block + 1]))
    assert "blocks" in str(decoding.differ(one, [counts[0], counts[1] + 1, block]))


def test_packing_is_shared_out_over_its_period() -> None:
    own = Start(None, 10, flush=1, period=32)
    assert decoding.typical([10.0, 74.0, 12.0, 11.0], own) == (11.0 + 63 / 32, 74.0)
    assert decoding.typical([10.0, 8.0, 10.0], own) == (10.0, 8.0)
    assert decoding.typical([3.0, 1.0, 2.0], replace(own, flush=None)) == (2.0, None)


# Rows.


def rows(every: list[Kind]) -> list[Row]:
    return list(generation.generate_rows("m", model(), every, [(2, LENGTH)], "cpu", copy=1e9))


def test_weights_that_a_step_reads() -> None:
    """Of the table of inputs a row a token; of one that is the output's, too, all. Of experts no one knows."""
    own = build("Llama")
    every = sum(p.nbytes for p in own.parameters())
    table = own.get_input_embeddings().weight
    assert own.get_output_embeddings().weight.data_ptr() != table.data_ptr()
    assert caches.weight_bytes(own) == every - table.nbytes
    tied = build("Llama", tie_word_embeddings=True)
    assert caches.weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())
    own.config.num_local_experts = 4
    assert caches.weight_bytes(own) is None


def test_generation_rows() -> None:
    every = [*caches.plain_kinds(model(), geometry()), kind("inner-4"), kind("fp8")]
    found = generation.with_fp16_ratios(rows(every))
    assert [row.refused for row in found] == [None] * 5
    best = min((row for row in found if row.scheme == "fp32"), key=lambda row: row.microseconds or 0)
    for row in found:
        assert row.path.endswith("; eager") and row.more["tokens_per_second"] == pytest.approx(2e6 / row.microseconds)  # type: ignore[operator]
        assert row.fp16_backend == best.path
        assert row.ratio_to_fp16 == pytest.approx(best.microseconds / row.microseconds)  # type: ignore[operator]
    tokens = [row.more["tokens"] for row in found]
    full = model().dtype.itemsize * 2 * geometry().layers * geometry().kv_heads * geometry().head_dim
    weights = caches.weight_bytes(model())
    assert [row.bytes for row in found[:3]] == [weights + 2 * LENGTH * full] * 3
    for row, name in zip(found[3:], ("inner-4", "fp8"), strict=True):
        with filled.filled_cache(model(), geometry(), schemes.named(name, geometry()), 2, row.more["tokens"]) as cache:
            held = cache.nbytes("packed") + cache.nbytes("window")  # of storage that grows: no room
            assert row.bytes == weights + held + cache.scheme.resident_bytes() < weights + 2 * tokens[0] * full
    assert all(row.fraction_of_copy == row.bytes / 1e9 * 1e6 / row.microseconds for row in found)  # type: ignore[operator]
    why = [row.more["no_graph"] for row in found]
    assert why[:2] == [why[3]] * 2 == ["needs a CUDA GPU"] * 2 and why[2] == caches.GROWS
    assert "no fused kernel reads float8" in why[4]
    assert found[3].more["flush_microseconds"] and found[3].more["tokens"] >= LENGTH


def test_a_scheme_that_selects_tokens_is_refused_with_the_reason() -> None:
    one = schemes.named("kivi-2", geometry())
    plain = Scheme(one.windows, one.frame, (one.codecs,) * geometry().layers)
    chosen = replace(one, whole=plain.keeping(HeavyHitters()))
    every = [caches.scheme_kind(model(), geometry(), chosen, False, "auto")]
    assert [row.refused for row in rows(every)] == [caches.UNFILLED]
    [row] = generation.largest_batch_rows("tiny", model(), every, LENGTH, "cpu")
    assert row.refused == caches.UNFILLED


def fake(**own: Any) -> Ran:
    return replace(Ran(LENGTH, 1000.0, 500.0, None, 1 << 30), **own)


def test_rows_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake(apart=1e-3, graph_flush=600.0)
    monkeypatch.setattr(decoding, "run", lambda *given: ran)
    eager, graph = rows([kind("inner-4")])
    assert (eager.microseconds, graph.microseconds) == (1000, 500)
    assert (graph.path.split("; ")[-1], graph.more["flush_microseconds"]) == ("CUDA graph", 600)
    ran = fake(graph=None, no_graph="check failed: x", apart=1.0)
    eager, graph = rows([kind("inner-4")])
    assert graph.microseconds is None and graph.refused == "check failed: x" and eager.more["no_graph"] is None
    ran = fake(graph=None, no_graph="cannot be recorded: x")
    assert [row.refused for row in rows([kind("inner-4")])] == [None, "cannot be recorded: x"]


def test_rows_of_compiled_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own operation, so that ratios are to FP16 that was compiled, too; where there is no graph, with the
    reason.
    """
    faster = rows([plain("full")])
    steps: list[Ran | str] = [fake(apart=1e-3)] * 2

    def run(*given: Any, compiled: bool) -> Ran | str:
        assert compiled
        return steps.pop()

    monkeypatch.setattr(generation, "tried", run)
    on_gpu, every = SimpleNamespace(device=torch.device("cuda")), [plain("full"), kind("inner-4")]
    given = ("m", on_gpu, every, [(1, LENGTH)], "x", 1e9)
    full, ours = generation.with_fp16_ratios([*faster, *generation.compiled_rows(*given)])[-2:]
    assert {row.operation for row in (full, ours)} == {"generate-compiled"} and ours.ratio_to_fp16 == 1
    assert ours.path.endswith("; forward compiled, CUDA graph") and ours.fp16_backend == full.path
    assert (ours.microseconds, ours.more["logits_apart"]) == (500, 1e-3)
    steps += [fake(graph=None, no_graph="check failed: x", apart=1.0), "out of memory"]
    found = list(generation.compiled_rows(*given))
    assert [(row.refused, row.microseconds) for row in found] == [("out of memory", None), ("check failed: x", None)]
    given = ("tiny", model(), every, [(1, LENGTH)], "cpu", 1e9)
    assert {row.refused for row in generation.compiled_rows(*given)} == {generation.NEEDS_GPU}


def test_a_compiled_forward_is_of_its_own_attention() -> None:
    """Kept code would serve another backend's call, too; what compiling was told is forgotten behind it."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    before = inductor.fx_graph_cache, autograd.enable_autograd_cache
    with decoding.compiling():
        assert not inductor.fx_graph_cache and not autograd.enable_autograd_cache
    assert (inductor.fx_graph_cache, autograd.enable_autograd_cache) == before and any(before)
    assert all(hasattr(inductor, name) for name in decoding.INDUCTOR)


def test_what_cannot_be_had_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(plain("full"), backend=SDPBackend.CUDNN_ATTENTION)
    none = replace(plain("full"), maker=None, why_not="layer 1: sliding")

    def small(batch: int, length: int, steps: int) -> Start:
        raise torch.OutOfMemoryError("out of memory")

    found = rows([odd, none, replace(plain("full"), maker=small), plain("full")])
    assert [row.microseconds is None for row in found] == [True, True, True, False]
    assert "does not run here" in str(found[0].refused)
    assert [row.refused for row in found[1:3]] == ["layer 1: sliding", "out of memory"]

    def broken(batch: int, length: int, steps: int) -> Start:
        raise RuntimeError("a mistake")

    found = rows([replace(plain("full"), maker=broken), plain("full")])
    assert [(row.refused, row.microseconds is None) for row in found] == [("a mistake", True), (None, False)]


def test_a_mistake_is_no_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any, kind: Kind, batch: int, length: int, steps: int) -> Ran:
        if batch == 8 and kind.path == "a":
            raise ValueError("a mistake\nmore")
        if batch > 8:
            raise torch.OutOfMemoryError("out of memory")
        return fake(bytes=100 * batch, graph=100.0 * batch, apart=0.0)

    monkeypatch.setattr(decoding, "run", run)
    monkeypatch.setattr(decoding, "capacity", lambda device: 900)
    every = [replace(plain("full"), path=path) for path in ("a", "b")]
    first, *others = generation.largest_batch_rows("m", model(), every, 99, "x")
    assert (first.refused, first.microseconds, "largest_batch" in first.more) == ("ValueError: a mistake", None, False)
    assert {row.more["largest_batch"] for row in others} == {8}


def test_a_mistake_is_no_longest_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any, kind: Kind, batch: int, length: int, steps: int) -> Ran:
        if kind.path == "a":
            raise ValueError("a mistake\nmore")
        if length > 2000:
            raise torch.OutOfMemoryError("out of memory")
        return fake()

    monkeypatch.setattr(decoding, "run", run)
    every = [replace(plain("full"), path=path) for path in ("a", "b")]
    found = generation.longest_rows("m", model(), every, 1, 40, "x")
    assert [(row.refused, row.more["longest_length"]) for row in found] == [("ValueError: a mistake", 0), (None, 1792)]
    assert "a mistake" in str(bench_report._longest([row.as_dict() for row in found], wide=False).rows[0])


def test_another_attention_is_put_back() -> None:
    with caches.attention(model(), replace(plain("Dynamic"), implementation="eager")):
        assert model().config._attn_implementation == "eager"
    assert model().config._attn_implementation == "sdpa"


def test_memory_that_ran_out_further_down_is_seen() -> None:
    error = RuntimeError("capture was invalidated")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert decoding.ran_out(error)
    assert decoding.ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not decoding.ran_out(RuntimeError("shape mismatch"))


# How far a memory goes.

FIXED, WASTE = 1000, 7  # bytes


def devices_memory(monkeypatch: pytest.MonkeyPatch, each: dict[str, int], total: int) -> list[tuple[str, int]]:
    """A device on which a row takes `each` bytes by path; what was tried on it."""
    asked: list[tuple[str, int]] = []

    def run(model: Any, kind: Kind, batch: int, length: int, steps: int) -> Ran:
        asked.append((kind.path, batch))
        used = FIXED + batch * each[kind.path] + (WASTE if batch % 2 else 0)
        if used > total:
            raise torch.OutOfMemoryError("out of memory")
        return fake(bytes=used, graph=100.0 * batch, apart=0.0)

    monkeypatch.setattr(decoding, "run", run)
    monkeypatch.setattr(decoding, "capacity", lambda device: total)
    return asked


@pytest.mark.parametrize("total", [1000, 1500, 31_000, 31_099, 160_003])
def test_the_largest_batch_is_found_in_few_trials(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    full, static, ours = plain("full"), plain("StaticCache"), kind("inner-4")
    asked = devices_memory(monkeypatch, {full.path: 1000, static.path: 1000, ours.path: 190}, total)
    found = list(generation.largest_batch_rows("m", model(), [full, static, ours], 99, "x"))
    for one, size in ((full, 1000), (static, 1000), (ours, 190)):
        fitting = [n for n in range(1, 900) if FIXED + n * size + WASTE * (n % 2) <= total]
        own = [row for row in found if row.path.startswith(one.path)]
        if not fitting:
            assert [row.refused for row in own] == ["out of memory"]
            continue
        assert own[0].batch == own[0].more["largest_batch"] in (max(fitting), max(fitting) - 1)
        assert own[0].more["one_more_fails"]
        assert len([1 for path, _ in asked if path == one.path]) <= 6
    assert (static.path, 1) not in asked or total < 2000  # its rows are as large as those of the full cache


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (5, 5), (8, 8), (17, 17), (64, 64), (150, 100), (None, 100)])
def test_what_counts_no_further_is_never_asked_to(most: int | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds 100 rows; beyond `most` the library would write where it must not."""
    asked: list[int] = []

    def run(model: Any, kind: Kind, batch: int, length: int, steps: int) -> Ran:
        asked.append(batch)
        if batch > 100:
            raise torch.OutOfMemoryError("out of memory")
        return fake(bytes=100 * batch)

    monkeypatch.setattr(decoding, "run", run)
    monkeypatch.setattr(decoding, "capacity", lambda device: 10099)
    own = replace(plain("full"), most_tokens=most and most * 99 + 98, beyond="it counts by 32 bits")
    found, *_ = generation.largest_batch_rows("m", model(), [own], 99, "x")
    assert (found.batch, found.more["largest_batch"], found.more["one_more_fails"]) == (rows, rows, True)
    assert most is None or max(asked) <= most
    limit = f"{rows + 1} rows of 99 tokens, at most {own.most_tokens} tokens in all: it counts by 32 bits"
    assert found.more["limited_by"] == (limit if rows == most else None)
    if most is not None:
        (refused,) = generation.generate_rows("m", model(), [own], [(most + 1, 99)], "x")
        called = generation.called_rows("m", model(), [own], [(most + 1, 99)], "x")
        assert refused.refused == f"{most + 1}" + limit[len(str(rows + 1)) :] == next(iter(called)).refused


def test_a_search_ends_after_its_trials() -> None:
    asked: list[int] = []
    search = Search(lambda n: asked.append(n) is None, trials=5)
    assert search.run(10) == max(asked) and len(asked) == 5 and not search.proven


def row(scheme: str, batch: int, taken: float | None, path: str = "p", operation: str = "generate") -> Row:
    more = {"tokens_per_second": batch * 1e6 / taken} if taken else {}
    return Row(operation, scheme, "m", batch, 99, taken, None, None, None, None, False, "x", path, more=more)


def test_ratios_are_to_the_best_fp16_whatever_its_mode() -> None:
    found = generation.with_fp16_ratios(
        [
            row("a", 1, 50.0), row("fp16", 1, 200.0, "slow"), row("fp16", 1, 100.0, "fast"), row("fp16", 1, None, "none"),
            row("fp16", 8, 1.0, "other batch"), row("a", 16, 400.0, operation="largest-batch"),
            row("fp16", 4, 200.0, "best", "largest-batch"), row("fp16", 5, 500.0, "more rows", "largest-batch"),
        ]
    )  # fmt: skip
    assert (found[0].ratio_to_fp16, found[0].fp16_backend) == (2, "fast")
    assert (found[1].ratio_to_fp16, found[2].ratio_to_fp16, found[3].ratio_to_fp16) == (0.5, 1, None)
    largest = found[5]
    assert (largest.fp16_backend, largest.ratio_to_fp16) == ("best", None)
    assert largest.more["throughput_to_fp16"] == pytest.approx((16 / 400) / (4 / 200))
    assert largest.more["batch_to_fp16"] == 16 / 5
    assert generation.with_fp16_ratios([row("a", 1, 5.0)])[0].ratio_to_fp16 is None


# With optimum-quanto, and the script.


def test_quantized_cache() -> None:
    pytest.importorskip("optimum.quanto")
    found = rows(caches.quanto_kinds(model(), geometry()))
    assert [(row.scheme, row.refused) for row in found] == [
        ("transformers-quanto-2", None),
        ("transformers-quanto-4", None),
    ]
    assert all("128 steps" in row.more["note"] for row in found)


def test_quantos_cuda_code_is_asked_for_as_many_numbers_as_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "installed", lambda module: True)
    llama = configuration.geometry(names.resolve("llama-3.1-8b"))
    for one in caches.quanto_kinds(SimpleNamespace(device=torch.device("cuda")), llama):
        assert one.most_rows(32768) == 64 and one.refusal(64, 32768) is None
        assert "32-bit integers" in str(one.refusal(65, 32768))
    assert all(one.most_tokens is None for one in caches.quanto_kinds(model(), geometry()))


def script() -> Any:
    spec = importlib.util.spec_from_file_location("generation_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_script_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--dtype", "float32", "--model", "tiny", "--length", "170", "--long", "180"]
    script().main([*options, "--schemes", "inner-4", "--out", str(tmp_path)])
    made = json.loads((tmp_path / "generation.json").read_text())
    found, copy = made["rows"], made["copy_bandwidth"]
    assert {row["scheme"] for row in found} >= {"fp32", "inner-4"} and all(row["length"] == 180 for row in found)
    for row in found:  # of QuantizedCache bytes are not known
        wanted = row["bytes"] and row["bytes"] / copy * 1e6 / row["microseconds"]
        assert row["fraction_of_copy"] == wanted and (wanted or "quanto" in row["scheme"])
    said = capsys.readouterr().out
    assert "a CPU has no memory of its own to fill" in said and "no graph: needs a CUDA GPU" in said
    script().main([*options, "--schemes", "inner-4", "--seconds", "-1", "--out", str(tmp_path / "none")])
    assert "-1 s are over" in capsys.readouterr().out and not [*(tmp_path / "none").iterdir()]


def test_the_script_compiles_what_has_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--dtype", "float32", "--model", "tiny", "--long", "180", "--only", "steps"]
    script().main([*options, "--schemes", "inner-4,kivi-2-g128", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "generation.json").read_text())["rows"]
    assert [(row["scheme"], row["operation"]) for row in found] == [
        (name, "generate-compiled") for name in ("fp32", "inner-4", "kivi-2-g128")
    ]
    assert all(row["refused"] == generation.NEEDS_GPU for row in found)


def test_what_takes_the_place_of_quantos_code() -> None:
    packed = torch.tensor([0b11100100, 0b00011011], dtype=torch.uint8)
    assert script().unpacked(packed, 2).tolist() == [0, 3, 1, 2, 2, 1, 3, 0]
    assert script().unpacked(packed, 4).tolist() == [4, 11, 14, 1]


def test_the_script_begins_with_what_matters_most() -> None:
    fast, slow, ours = plain("full"), plain("Dynamic"), [kind("inner-4"), kind("kivi-2-g128")]
    jobs = script().order([plain("StaticCache"), slow, *ours, fast])
    assert [(job, one.name) for job, one in jobs[:3]] == [("largest", "inner-4"), ("largest", "fp32"), ("long", "fp32")]
    assert len(jobs) == len({(job, one.path, one.name) for job, one in jobs}) == 11
    assert [(job, one.path) for job, one in jobs[-5:-1]] == [
        (job, path) for path in ("DynamicCache", "StaticCache") for job in ("largest", "long")
    ]
    assert jobs[-1] == ("compiled", ours[0])


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inner-4", "innerq-small", "kivi-2-g128"])
def test_graphs_on_a_gpu(name: str) -> None:
    served = build("Llama", head_dim=128).requires_grad_(False).to("cuda", torch.bfloat16)
    own = Geometry.from_config(served.config.to_dict())
    every = caches.kinds(served, own, [schemes.named(name, own)])
    found = list(generation.generate_rows("m", served, every, [(2, 400)], "gpu"))
    assert [(row.path, row.refused) for row in found if row.refused and "backend" not in row.refused] == []
    graphs = [row for row in found if row.path.endswith("CUDA graph")]
    assert {row.scheme for row in graphs} == {"fp16", name}
    assert all(row.microseconds and row.more["logits_apart"] is not None for row in graphs)
    ours = graphs[-1]
    assert ours.more["flush_microseconds"]


@pytest.mark.gpu
def test_a_compiled_forward_on_a_gpu() -> None:
    served = build("Llama", head_dim=128).requires_grad_(False).to("cuda", torch.bfloat16)
    own = Geometry.from_config(served.config.to_dict())
    every = caches.kinds(served, own, [schemes.named("kivi-2-g128", own)])
    flash, ours = next(one for one in every if one.path.endswith("flash")), every[-1]
    dynamic = next(one for one in every if one.path == "DynamicCache")
    found = list(generation.compiled_rows("m", served, [flash, ours, dynamic], [(1, 400)], "gpu"))
    assert [row.refused for row in found] == [None, None, caches.GROWS]
    assert all(row.microseconds and row.more["logits_apart"] is not None for row in found[:2])
    assert found[1].more["flush_microseconds"] and not hasattr(served, "_compiled_call")


@pytest.mark.gpu
def test_the_largest_batch_on_a_gpu() -> None:
    """On 2.8 GB of its memory, which torch is told."""
    served = build("Llama", head_dim=128).requires_grad_(False).to("cuda", torch.bfloat16)
    own = Geometry.from_config(served.config.to_dict())
    share = 2.8e9 / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        every = [
            one for one in caches.kinds(served, own, [schemes.named("inner-4", own)]) if one.path != "DynamicCache"
        ]
        found = list(generation.largest_batch_rows("m", served, every, 65536, "gpu"))
        found = generation.with_fp16_ratios(found)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    ours = [row for row in found if row.scheme == "inner-4"]
    assert len(ours) == 2 and all(row.more["one_more_fails"] and row.more["batch_to_fp16"] > 2 for row in ours)
