"""KL percentiles, agreement, positions and spread; calls that are as long as a scheme allows."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from kvcal.evaluate import perplexity
from kvcal.evaluate.calls import calls, longest_call, segments
from kvcal.evaluate.divergence import Reference, Spread, Tokens, buckets
from kvcal.evaluate.perplexity import FullRuns, evaluate
from kvcal.methods.data_free import Preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.scheme import HeavyHitters, Scheme

LENGTH = 420


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def ids(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=generator)


def scheme(model: Any, block: int = 32) -> Scheme:
    return Preset("uniform-2", "uniform-2", sink=4, recent=64, block=block).scheme(model)


@torch.no_grad()
def by_hand(model: Any, ids: torch.Tensor, step: int, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """KL and agreement of every token, in calls of `step` tokens of both caches."""
    kls, same = [], []
    with KVCalCache(scheme, model) as cache:
        full = DynamicCache(config=model.config)
        for start in range(0, ids.shape[1], step):
            chunk = ids[:, start : start + step]
            right, other = (
                functional.log_softmax(model(input_ids=chunk, past_key_values=past).logits, -1)
                for past in (full, cache)
            )
            kls.append(functional.kl_div(other, right, reduction="none", log_target=True).sum(-1))
            same.append(other.argmax(-1) == right.argmax(-1))
    return torch.cat(kls, 1)[:, :-1], torch.cat(same, 1)[:, :-1]


@pytest.mark.parametrize("block", [32, 128])
def test_rows_are_those_of_steps_side_by_side(model: Any, ids: torch.Tensor, block: int) -> None:
    chosen = scheme(model, block)
    _, row = evaluate(model, ids, {"x": lambda: KVCalCache(chosen, model, remember=True)}, step=32)
    kl, same = by_hand(model, ids, 32, chosen)
    assert row.kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert row.kl_windows == pytest.approx(kl.mean(1).tolist(), rel=1e-4)
    assert math.exp(statistics.fmean(row.nll_windows)) == pytest.approx(row.perplexity, rel=1e-9)
    assert row.kl_median == pytest.approx(float(kl.quantile(0.5)), rel=1e-3, abs=1e-6)  # rounding, of exact tokens
    assert row.kl_p99 == pytest.approx(float(kl.flatten().quantile(0.99)), rel=1e-3)
    assert row.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    assert row.same_top == pytest.approx(float(same.float().mean()), abs=2 / same.numel())
    first = 4 + 64 + block
    assert row.kl_behind == pytest.approx(float(kl[:, first:].mean()), rel=1e-4)
    assert [(one["first"], one["last"]) for one in row.positions] == [(0, 127), (128, 255), (256, LENGTH - 2)]
    for one in row.positions:
        part = kl[:, one["first"] : one["last"] + 1]
        assert one["kl"] == pytest.approx(float(part.mean()), rel=1e-3, abs=1e-7)


def test_full_precision_is_counted_in_16_bits(model: Any, ids: torch.Tensor) -> None:
    chosen = scheme(model)
    full, row = evaluate(model, ids, {"x": lambda: KVCalCache(chosen, model)}, step=32)
    assert (full.bits_per_value, full.smaller, full.kl, full.same_top, full.positions) == (16, 1, 0, 1, [])
    assert full.cache_bytes == full.bytes_at_16_bit
    with KVCalCache(chosen, model) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        size = cache.nbytes("packed") + cache.nbytes("window") // 2 + cache.nbytes("bookkeeping")
    assert row.smaller == pytest.approx(2 * full.cache_bytes / size)


def seen(scheme: Scheme, calls: list[tuple[int, int]]) -> list[int]:
    """Packed blocks that each token sees."""
    w = scheme.windows
    blocks = [(max(0, first - w.sink - w.recent) // w.block, last - first) for first, last in calls]
    return [count for count, tokens in blocks for _ in range(tokens)]


@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize("step", [17, 32, 100])
def test_longer_calls_show_every_token_the_same(model: Any, block: int, step: int) -> None:
    chosen = scheme(model, block)
    plain = [(start, min(start + step, LENGTH)) for start in range(0, LENGTH, step)]
    merged = calls(chosen, 0, LENGTH, step)
    assert seen(chosen, merged) == seen(chosen, plain)
    assert len(merged) < len(plain) or step == 100
    stretches = segments(LENGTH, longest_call(step, 1, 1000, "cpu"))
    parts = [call for start, stop in stretches for call in calls(chosen, start, stop, step)]
    assert seen(chosen, parts) == seen(chosen, plain)


def test_calls_stay_where_they_decide_something(model: Any) -> None:
    chosen = scheme(model, 128)
    assert len(calls(chosen, 0, 64, 16)) == 4  # a step that a kernel serves
    assert len(calls(chosen.keeping(HeavyHitters(0.5, 0.5)), 0, 64, 32)) == 2
    assert len(calls(chosen, 0, 64, 32)) == 1


def test_long_calls_hold_few_logits() -> None:
    assert longest_call(32, 1, 50_000, "cpu") == 512
    assert longest_call(32, 8, 150_000, "cpu") == 96
    assert longest_call(32, 128, 150_000, "cuda") == 32
    assert list(segments(100, 48)) == [(0, 48), (48, 96), (96, 100)]


def test_tokens_survive_as_text() -> None:
    kl, same = torch.rand(3, 13), torch.rand(3, 13) > 0.5
    found = Tokens.unpack([Tokens.pack(kl[:1], same[:1]), Tokens.pack(kl[1:], same[1:])], 13)
    assert torch.equal(torch.from_numpy(found[0].copy()), kl)
    assert torch.equal(torch.from_numpy(found[1]), same)


def test_percentiles_and_buckets_by_hand() -> None:
    kl = torch.arange(300.0)[None].expand(2, -1).clone()
    kl[1] += 2
    same = torch.zeros(2, 300, dtype=torch.bool)
    same[:, :150] = True
    found = Spread.of([Tokens.pack(kl, same)], 300, 200)
    assert (found.kl_max, found.same_top, found.kl_behind) == (301, 0.5, 250.5)
    assert found.kl_median == pytest.approx(150.5)
    first, second, third = found.positions
    assert (first["kl"], first["kl_se"], first["same_top"]) == (64.5, 1, 1)
    assert (second["first"], third["last"], third["same_top"]) == (128, 299, 0)
    assert Spread.of([Tokens.pack(kl, same)], 300, 300).kl_behind is None
    assert buckets(kl[:1].numpy(), same[:1].numpy())[0]["kl_se"] is None


def test_kl_by_hand() -> None:
    reference = Reference.of(torch.tensor([[[0.25, 0.75]]]).log())
    other = torch.tensor([[[0.5, 0.5]]]).log()
    expected = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
    assert float(reference.divergence(other)) == pytest.approx(float(expected))
    assert bool(reference.part(0, 1).agrees(torch.tensor([[[-1.0, -0.5]]])))


def test_full_precision_runs_once_for_several_evaluations(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are the same; an evaluation that was broken off within a batch leaves nothing half read."""
    ran: list[bool] = []
    inner = perplexity._log_probabilities

    def counted(model: Any, chunk: Any, cache: Any, count: int) -> torch.Tensor:
        ran.append(not isinstance(cache, KVCalCache))
        return inner(model, chunk, cache, count)

    monkeypatch.setattr(perplexity, "_log_probabilities", counted)
    chosen, kept = scheme(model), FullRuns()
    makers = {"x": lambda: KVCalCache(chosen, model, remember=True)}
    rows = evaluate(model, ids[:, :200], makers, batch=1)
    kept.log_probabilities[0, 0] = torch.zeros(1)  # of a batch that did not end
    assert evaluate(model, ids[:, :200], makers, batch=1, full=kept) == rows
    assert len(kept.numbers) == 2
    ran.clear()
    assert evaluate(model, ids[:, :200], makers, batch=1, full=kept) == rows
    assert ran and not any(ran)
    of_a_batch = 4 * 199 * model.config.vocab_size
    few = FullRuns(most=2 * of_a_batch - 1)  # the second batch runs again
    assert evaluate(model, ids[:, :200], makers, batch=1, full=few) == rows
    ran.clear()
    assert evaluate(model, ids[:, :200], makers, batch=1, full=few) == rows
    assert ran.count(True) == 1 and sum(x.nbytes for x in few.log_probabilities.values()) == of_a_batch
