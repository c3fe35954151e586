"""generate() itself on filled caches: what is timed of it, the comparison with bare steps, rows of the largest batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from kvcal.bench import caches, calling, generation, layer, schemes
from kvcal.bench.calling import Called
from kvcal.bench.decoding import CHECKED, Stepper
from kvcal.bench.rows import Row
from kvcal.models.geometry import Geometry
from tests.kvcal.bench.test_generation import LENGTH, geometry, kind, model, plain, script
from tests.support.architectures import build
from tests.support.models_fixture import kvcal


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(calling, "SECONDS", 0.0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(generation, "released", lambda device: None)  # collecting garbage takes half a second
    yield
    layer.fill.cache_clear()


def called(one: caches.Kind, compiled: CompileConfig | None = None) -> Called:
    found = calling.run(model(), one, 3, LENGTH, compiled)
    assert isinstance(found, Called), found
    return found


@pytest.mark.parametrize("name", ["full", "StaticCache", "DynamicCache", "inner-4", "fp8"])
def test_generate_goes_on_from_what_a_cache_holds(name: str) -> None:
    """Its logits are those of bare steps; of DynamicCache, which cannot go back, the counts alone are looked at."""
    ours = name in ("inner-4", "fp8")
    found = called(kind(name) if ours else plain(name))
    assert found.wrong is None and found.timed == CHECKED and found.taken > 0
    assert found.apart == (None if name == "DynamicCache" else 0.0)
    assert (found.flush is not None) == ours and found.length >= LENGTH


def test_quantized_cache_by_generate() -> None:
    pytest.importorskip("optimum.quanto")
    for one in caches.quanto_kinds(model(), geometry()):
        assert called(one).wrong is None


def test_the_first_token_is_in_no_figure_and_packing_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token a tenth of a second, the second one of the timed call, whose step packs, half a second; the first a day."""
    taken = iter([0.1] * calling.WARM_UP + [86400.0, 0.5] + [0.1] * (calling.TOKENS - 2))
    moments = itertools.accumulate(taken)
    monkeypatch.setattr(calling, "SECONDS", 60.0)
    monkeypatch.setattr(calling, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    one = kind("inner-4")
    found = called(one)
    period = schemes.named("inner-4", geometry()).windows.block
    assert found.timed == 16 and found.flush == pytest.approx(5e5)
    assert found.taken == pytest.approx(1e5 + 4e5 / period) and found.mean == pytest.approx(2e6 / 16)


def test_a_call_ends_after_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(plain("full")).timed == calling.LEAST - 1
    monkeypatch.setattr(calling, "SECONDS", 60.0)
    assert called(plain("full")).timed == calling.TOKENS - 1


def test_logits_of_another_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if generate() had gone on from other keys than the steps that it is compared with."""
    back = Stepper.back
    calls: list[None] = []

    def spoilt(stepper: Stepper) -> None:
        back(stepper)
        calls.append(None)
        if len(calls) == 2:
            stepper.place.add_(40)

    monkeypatch.setattr(Stepper, "back", spoilt)
    assert "logits of generate() are off by" in str(called(kind("inner-4")).wrong)


def test_tokens_that_a_cache_did_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = calling.generate

    def shortened(model: Any, cache: Any, *given: Any) -> torch.Tensor:
        out = generate(model, cache, *given)
        cache.layers[0].keys = cache.layers[0].keys[:, :, :-2]
        return out

    monkeypatch.setattr(calling, "generate", shortened)
    said = called(plain("DynamicCache")).wrong
    assert said == "check failed: generate() gave 5 tokens in 5 steps, and the cache grew by 3"


# Compiled.


@pytest.fixture
def compiled() -> CompileConfig:
    config = CompileConfig(backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


@pytest.mark.parametrize("name", ["StaticCache", "inner-4"])
def test_a_compiled_forward_is_called_and_dropped(name: str, compiled: CompileConfig) -> None:
    torch._dynamo.reset()
    found = called(kind(name) if name == "inner-4" else plain(name), compiled)
    assert found.wrong is None and found.apart is not None and found.apart < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not hasattr(model(), "_compiled_call")
    torch._dynamo.utils.counters.clear()
    assert called(plain("StaticCache")).wrong is None  # and not where nobody asks, though the cache could be
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_what_does_not_compile_says_so(compiled: CompileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    never = "generate() does not compile with this cache"
    for one in (plain("full"), plain("DynamicCache"), kind("fp8")):
        assert calling.run(model(), one, 1, LENGTH, compiled) == never
    assert calling.run(model(), kind("inner-4"), 1, LENGTH, CompileConfig()) == "generate() compiles on a GPU only"
    [row] = generation.largest_called_rows("m", model(), plain("full"), LENGTH, 2, "x", None, compiled)
    assert (row.refused, row.path) == (never, "full cache, sdpa; generate(), its forward compiled")
    monkeypatch.setattr(type(model()), "_valid_auto_compile_criteria", lambda *given: False)
    assert calling.run(model(), kind("inner-4"), 1, LENGTH, compiled) == "generate() did not compile its forward"


# Rows.


def test_rows_of_generate() -> None:
    every = [plain("full"), plain("DynamicCache"), kind("inner-4"), replace(plain("full"), maker=None, why_not="why")]
    found = generation.with_fp16_ratios(
        list(generation.called_rows("m", model(), every, [(2, LENGTH)], "cpu", copy=1e9))
    )
    assert {row.operation for row in found} == {"generate-call"} and all(
        row.path.endswith("; generate()") for row in found
    )
    assert [row.refused for row in found] == [None, None, None, "why"]
    best = min(found[:2], key=lambda row: row.microseconds or 0)
    for row in found[:3]:
        assert row.microseconds is not None and row.more["tokens_per_second"] == pytest.approx(2e6 / row.microseconds)
        assert (row.fp16_backend, row.repeats) == (best.path, CHECKED)
        assert row.ratio_to_fp16 == pytest.approx((best.microseconds or 0) / row.microseconds)
        assert row.bytes is not None and row.fraction_of_copy == row.bytes / 1e9 * 1e6 / row.microseconds
    assert found[2].more["flush_microseconds"] and found[2].more["logits_apart"] == 0.0


FOUND = Called(LENGTH, 1000.0, None, 1000.0, 16, 1 << 30, 0.0, None, None)


def fitting(monkeypatch: pytest.MonkeyPatch, most: int, found: Called = FOUND) -> None:
    def run(model: Any, kind: Any, batch: int, length: int, compiled: Any) -> Called:
        if batch > most:
            raise torch.OutOfMemoryError("out of memory")
        return found

    monkeypatch.setattr(calling, "run", run)


@pytest.mark.parametrize(("most", "batch"), [(152, 152), (151, 147), (146, 142), (142, 142), (141, None)])
def test_generate_takes_fewer_rows_where_it_must(monkeypatch: pytest.MonkeyPatch, most: int, batch: int | None) -> None:
    fitting(monkeypatch, most)
    [row] = generation.largest_called_rows("m", model(), kind("inner-4"), 99, 152, "x")
    assert (row.operation, row.more.get("largest_batch")) == ("largest-batch-call", 152 if batch else None)
    assert (row.batch, row.refused) == ((batch, None) if batch else (142, "out of memory"))
    fitting(monkeypatch, 0)
    [row] = generation.largest_called_rows("m", model(), kind("inner-4"), 99, 1, "x")
    assert (row.batch, row.refused) == (1, "out of memory")


def test_a_row_that_fails_its_check_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting(monkeypatch, 9, replace(FOUND, wrong="check failed: x"))
    [row] = generation.largest_called_rows("m", model(), kind("inner-4"), 99, 9, "x")
    assert (row.refused, row.microseconds, "tokens_per_second" in row.more) == ("check failed: x", None, False)

    def broken(*given: Any) -> Called:
        raise ValueError("a mistake\nmore")

    monkeypatch.setattr(calling, "run", broken)
    [row] = generation.largest_called_rows("m", model(), kind("inner-4"), 99, 9, "x")
    assert row.refused == "ValueError: a mistake"


def test_rows_of_largest_batches_are_beside_their_own_fp16() -> None:
    def row(operation: str, scheme: str, batch: int, taken: float) -> Row:
        more = {"tokens_per_second": batch * 1e6 / taken}
        return Row(operation, scheme, "m", batch, 99, taken, None, None, None, None, False, "x", operation, more=more)

    made = [
        row(operation, scheme, batch, taken)
        for operation, taken in (("largest-batch", 100.0), ("largest-batch-call", 200.0))
        for scheme, batch in (("fp16", 10), ("a", 50))
    ]
    made.append(replace(made[-1], microseconds=400.0, more={"tokens_per_second": 50 * 1e6 / 400.0}))
    found = generation.with_fp16_ratios(made)
    assert [one.fp16_backend for one in found[2:]] == ["largest-batch-call"] * 3
    assert [one.more["throughput_to_fp16"] for one in found[1::2]] == [5, 5] and found[4].more["batch_to_fp16"] == 5
    assert found[4].more["throughput_to_fp16"] == 2.5


def test_the_script_calls_generate_at_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = generation._row("m", kind("inner-4"), 3, LENGTH, "x", "largest-batch", 1.0, more={"largest_batch": 3})
    monkeypatch.setattr(generation, "largest_batch_rows", lambda *given: iter([step]))
    chosen, largest, own = SimpleNamespace(model="m", length=LENGTH, long=LENGTH), {}, script()
    found = list(own.rows_of("largest", kind("inner-4"), model(), chosen, {}, largest, "x", 1e9))
    assert [(row.operation, row.batch, row.refused) for row in found] == [
        ("largest-batch", 3, None),
        ("largest-batch-call", 3, None),
    ]
    assert "largest_batch" not in own.show(found[1]) and "tokens/s" in own.show(found[1])
    [row] = own.rows_of("compiled", kind("inner-4"), model(), chosen, {}, largest, "x", 1e9)
    assert (row.operation, row.refused) == ("largest-batch-call", "generate() compiles on a GPU only")
    with pytest.raises(RuntimeError, match="its largest batch is not known"):
        list(own.rows_of("compiled", plain("full"), model(), chosen, {}, largest, "x", 1e9))


def test_the_command_calls_generate() -> None:
    done = kvcal(
        "bench", "--device", "cpu", "-o", "generate-call", "-p", "kivi-2", "--length", "160", "--batch", "2", "--json"
    )
    assert done.code == 0, done.err
    rows = done.json["rows"]
    assert {row["operation"] for row in rows} == {"generate-call"} and {row["model"] for row in rows} == {"tiny"}
    assert {row["scheme"] for row in rows} >= {"fp32", "kivi-2"} and all(row["microseconds"] for row in rows)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inner-4", "innerq-small"])
def test_generate_on_a_gpu(name: str) -> None:
    served = build("Llama", head_dim=128).requires_grad_(False).to("cuda", torch.bfloat16)
    own = Geometry.from_config(served.config.to_dict())
    every = caches.kinds(served, own, [schemes.named(name, own)])
    found = list(generation.called_rows("m", served, every, [(2, 400)], "gpu"))
    assert [(row.path, row.refused) for row in found if row.refused and "backend" not in row.refused] == []
    ours = next(one for one in every if one.name == name)
    [row] = generation.largest_called_rows("m", served, ours, 400, 2, "gpu", None, CompileConfig())
    assert row.refused is None and row.more["logits_apart"] is not None
