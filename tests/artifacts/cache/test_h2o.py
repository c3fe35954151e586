"""Token selection: which tokens stay, where they lie, what attention sees of them.

The reference is `Literal`: Transformers' own eager attention weights and DynamicCache, which holds everything; evicted
tokens are hidden by a 4-D mask, and the rule is written out over plain lists.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache as once
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from kvcal.methods.data_free import Preset
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.cache import EvictingLayer, KVCalCache, reading
from kvcal_artifacts.codecs import Context, Exact, MixKVQ, Packed
from kvcal_artifacts.codecs.base import EMPTY
from kvcal_artifacts.errors import CorruptBundle, KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from kvcal_artifacts.storage import block_store
from kvcal_artifacts.storage.attention_mass import attention_mass
from kvcal_artifacts.storage.eviction import EvictingLedger
from kvcal_artifacts.storage.selection import Moves, Row
from tests.artifacts.cache.test_statistics import listed, pooled, ragged
from tests.support import schemes
from tests.support.architectures import TINY
from tests.support.models_fixture import SUFFIX, kvcal, write_model, write_text
from tests.support.schemes import BLOCK, RECENT, SINK, left_mask, token_ids

pytestmark = pytest.mark.transformers

FRAMES = ("post_rope", "pre_rope")
every_frame = pytest.mark.parametrize("frame", FRAMES)
SOME = HeavyHitters(0.5, 0.5)
FEW = HeavyHitters(0.3, 0.5)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    schemes.close_all()


@once
def eager(name: str = "llama") -> Any:
    return TINY[name](attn_implementation="eager")


def made(
    selection: HeavyHitters | None,
    name: str = "llama",
    codec: str = "exact-32",
    frame: str = "post_rope",
    **options: Any,
) -> KVCalCache:
    model = options.pop("model", None) or schemes.tiny(name)
    return schemes.opened(schemes.scheme(model, codec, frame).keeping(selection), model, **options)


@torch.no_grad()
def run(
    cache: KVCalCache, ids: Tensor, cuts: Any = (), mask: Tensor | None = None, start: int | None = None
) -> list[Tensor]:
    """Logits of each piece of what the cache does not hold yet."""
    logits = []
    for first, last in schemes.pieces(cache.get_seq_length() if start is None else start, ids.shape[1], cuts):
        given: dict[str, Any] = {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, first:last]
            given = {"attention_mask": mask[:, :last], "position_ids": positions}
        logits.append(cache.model(ids[:, first:last], past_key_values=cache, **given).logits)
    return logits


def kept(cache: KVCalCache, row: int = 0) -> list[int]:
    """Columns of a row's tokens."""
    tokens = cache.ledger.tokens[row]
    return sorted(tokens[tokens >= 0].tolist())


class Literal:
    """H2O, slowly: one row, every key and value kept by Transformers, evicted tokens masked."""

    def __init__(self, name: str, selection: HeavyHitters, windows: Windows = schemes.WINDOWS) -> None:
        self.model, self.selection, self.windows = eager(name), selection, windows
        self.cache = DynamicCache(config=self.model.config)
        self.kept: list[int] = []
        self.mass: dict[int, float] = {}
        self.seen = self.left = self.blocks = 0  # left: tokens that have left the window, sink included

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        new = list(range(self.seen, self.seen + ids.shape[1]))
        mask = torch.full((1, 1, len(new), self.seen + len(new)), torch.finfo(torch.float32).min)
        for i, column in enumerate(new):
            mask[0, 0, i, [*self.kept, *new[: i + 1]]] = 0
            self.mass[column] = 0.0
        out = self.model(ids, attention_mask=mask, past_key_values=self.cache, output_attentions=True)
        looked_at = sum(a.double().sum((0, 1, 2)) for a in out.attentions)
        for column in self.mass:
            self.mass[column] += float(looked_at[column])
        self.kept += new
        self.seen += len(new)
        self.choose()
        return out.logits

    def choose(self) -> None:
        w = self.windows
        waiting = self.seen - max(self.left, min(w.sink, self.seen))
        if waiting < w.recent + w.block:
            return
        leave = (waiting - w.recent) // w.block
        self.left = max(self.left, w.sink) + leave * w.block
        total = int(self.selection.keep * self.seen + 1e-9)
        heavy = max(int(self.selection.heavy * total + 1e-9), w.sink)
        room_for = max(0, (total - heavy - (self.seen - self.left)) // w.block)
        self.blocks = min(room_for, self.blocks + leave)
        newest = [c for c in self.kept if c >= self.left - self.blocks * w.block]
        sinks = [c for c in self.kept if c < w.sink]
        older = [c for c in self.kept if c not in newest and c not in sinks]
        count = max(0, max(total - len(newest), heavy) - len(sinks))
        heaviest = sorted(older, key=lambda c: (-self.mass[c], c))[:count]
        self.kept = sorted([*sinks, *heaviest, *newest])


# Which tokens stay.


@every_frame
@pytest.mark.parametrize(
    "selection", [SOME, HeavyHitters(0.7, 0.3), HeavyHitters(0.2, 1.0), HeavyHitters(0.4, 0.0)], ids=str
)
def test_tokens_and_logits_are_those_of_h2o_written_out(frame: str, selection: HeavyHitters) -> None:
    """A prompt in one piece, then greedy decoding; the exact codec, so that logits agree too."""
    literal, cache, ids = Literal("llama", selection), made(selection, frame=frame), token_ids(1, 120, seed=3)
    for step in range(40):
        wanted, (found,) = literal.feed(ids), run(cache, ids, start=0)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        assert kept(cache) == literal.kept, step
        ids = found[:, -1:].argmax(-1)
    assert len(kept(cache)) < 0.9 * 160


@pytest.mark.parametrize("name", ["qwen3", "phi3", "smollm3", "granite", "olmo2"])
def test_architectures(name: str) -> None:
    """Norms on queries, fused projections, layers without RoPE, another scaling."""
    literal, cache, ids = Literal(name, SOME), made(SOME, name, frame="pre_rope"), token_ids(1, 130, seed=4)
    for start, stop in schemes.pieces(0, 130, (90, 121, 122, 123)):
        wanted, (found,) = literal.feed(ids[:, start:stop]), run(cache, ids[:, start:stop], start=0)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        assert kept(cache) == literal.kept


@pytest.mark.parametrize("name", TINY)
def test_mass_is_the_models_own_attention_summed(name: str) -> None:
    """In pieces, before anything is evicted: summed over layers, heads and queries."""
    model, ids = eager(name), token_ids(1, 30)
    cache = schemes.opened(schemes.scheme(model, windows=Windows(4, 64, 8)).keeping(SOME), model)
    run(cache, ids, cuts=(11, 12))
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    wanted = sum(a.double().sum((1, 2)) for a in attentions)
    torch.testing.assert_close(cache.ledger.mass, wanted, atol=1e-4, rtol=1e-5)


def test_mass_does_not_depend_on_how_many_queries_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = schemes.numbers(2, 4, 20, 8), schemes.numbers(2, 2, 33, 8, seed=1)
    alive, valid = torch.rand(2, 13) < 0.7, left_mask([20, 12]).bool()
    whole = attention_mass(q, k, alive, valid, 0.3)
    monkeypatch.setattr("kvcal_artifacts.storage.attention_mass.SCORES", 700)
    torch.testing.assert_close(attention_mass(q, k, alive, valid, 0.3), whole, atol=1e-6, rtol=1e-6)
    assert bool((whole[:, :13][~alive] == 0).all())
    torch.testing.assert_close(whole.sum(1), 4.0 * valid.sum(1).double(), atol=1e-4, rtol=0)


@every_frame
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_everything_kept_is_no_selection(name: str, frame: str) -> None:
    ids, mask = token_ids(2, 120), left_mask([120, 75])
    plain, cache = made(None, name, frame=frame), made(HeavyHitters(1.0), name, frame=frame)
    for a, b in zip(run(plain, ids, (60, 61, 90, 91), mask), run(cache, ids, (60, 61, 90, 91), mask), strict=True):
        torch.testing.assert_close(b[0], a[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(b[1], a[1], atol=2e-5, rtol=1e-4)
    assert [len(kept(cache, row)) for row in (0, 1)] == [120, 75]
    assert cache.nbytes("packed") == plain.nbytes("packed")


def test_generate_with_everything_kept_is_transformers_own() -> None:
    model, ids = schemes.tiny("llama"), token_ids(2, 60)
    for options in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        prompt = ids[:1] if "prompt_lookup_num_tokens" in options else ids
        wanted = model.generate(prompt, max_new_tokens=30, do_sample=False, **options)
        cache = made(HeavyHitters(1.0))
        assert torch.equal(
            model.generate(prompt, past_key_values=cache, max_new_tokens=30, do_sample=False, **options), wanted
        )
        assert int(cache.ledger.blocks.max()) >= 5


@every_frame
@pytest.mark.parametrize("codec", ["exact-32", "higgs-2"])
def test_padded_rows_are_as_they_would_be_alone(codec: str, frame: str) -> None:
    lengths, cuts = [130, 101, 30, 3], (100, 101, 110)
    mask = left_mask(lengths)
    ids = token_ids(*mask.shape) * mask
    batch = made(SOME, codec=codec, frame=frame)
    together = run(batch, ids, cuts, mask)
    for row, length in enumerate(lengths):
        pad = 130 - length
        single = made(SOME, codec=codec, frame=frame)
        alone = run(single, ids[row : row + 1, pad:], [cut - pad for cut in cuts])
        assert [column - pad for column in kept(batch, row)] == kept(single)
        torch.testing.assert_close(together[-1][row, -1], alone[-1][0, -1], atol=1e-4, rtol=1e-4)
    assert batch.describe()["selection"]["rows"]["evicted"][3] == 0
    check_storage(batch)


def test_padding_between_turns() -> None:
    """Pads in the middle of a row take no part and no room."""
    mask = torch.ones(2, 130, dtype=torch.long)
    mask[1, 60:70] = 0
    ids = token_ids(2, 130)
    batch, single = made(FEW), made(FEW)
    run(batch, ids, (60, 80), mask)
    real = mask[1].nonzero().flatten()
    run(single, ids[1:, real], (60, 70))
    assert [int((real < column).sum()) for column in kept(batch, 1)] == kept(single)
    check_storage(batch)


class Labels:
    """A layer's storage that holds columns instead of keys: does what it is told, and is compared with the ledger."""

    def __init__(self, ledger: EvictingLedger) -> None:
        self.ledger = ledger
        self.exact = torch.zeros(ledger.batch, 0, dtype=torch.int32)
        self.blocks = torch.zeros(ledger.batch, 1, 0, 4, dtype=torch.int32)

    def carry_out(self, moves: Moves) -> None:
        slots = torch.cat([self.blocks.flatten(1), self.exact], 1)
        leaving = slots.gather(1, moves.pack).masked_fill(moves.idle, -1)
        if not moves.decodes:
            assert bool((torch.where(moves.idle, moves.packed, moves.pack) >= moves.packed).all())
        self.exact = slots.gather(1, moves.exact).masked_fill(moves.unused, -1)
        new = leaving.view(len(leaving), 1, -1, 4)
        self.blocks = block_store.arrange(self.blocks + 1, new + 1, moves.order) - 1

    def check(self) -> None:
        slots, tokens = torch.cat([self.blocks.flatten(1), self.exact], 1), self.ledger.tokens
        assert slots.shape == tokens.shape
        assert torch.equal(slots.where(tokens >= 0, -1), tokens)


@settings(max_examples=60)
@given(st.data())
def test_storage_follows_the_choice(data: st.DataObject) -> None:
    """With attention that changes its mind: blocks get holes, dissolve, are packed again; rows come, go and take back."""
    selection = HeavyHitters(data.draw(st.sampled_from([0.2, 0.5, 0.9])), data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    windows = Windows(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6)), 4)
    ledger, rows = EvictingLedger(windows, selection), data.draw(st.integers(1, 3))
    generator, labels = torch.Generator().manual_seed(data.draw(st.integers(0, 99))), None
    for _ in range(data.draw(st.integers(1, 12))):
        query = data.draw(st.integers(1, 30))
        valid = torch.rand(rows, query, generator=generator) < data.draw(st.sampled_from([0.6, 1.0]))
        plan = ledger.begin(rows, query, valid)
        labels = labels or Labels(ledger)
        labels.exact = torch.cat([labels.exact, ledger.tokens[:, plan.past :]], 1)
        labels.check()
        ledger.mass = torch.rand(ledger.mass.shape, dtype=torch.float64, generator=generator)
        before, recent = [set(row[row >= 0].tolist()) for row in ledger.tokens], ledger.window
        if plan.flush:
            labels.carry_out(ledger.choose(plan))
        labels.check()
        for row, (held, tokens) in enumerate(zip(before, ledger.tokens, strict=True)):
            now, seen = set(tokens[tokens >= 0].tolist()), int(ledger.lengths[row])
            total, heavy = selection.budget(seen)
            window, sink = int(ledger.window[row]), min(windows.sink, seen)
            wanted = max(total, max(heavy, sink) + window) if plan.flushed[row] else len(held)
            assert now <= held
            assert len(now) == min(len(held), wanted)
            assert sorted(held)[:sink] == sorted(now)[:sink]
            assert sorted(held)[len(held) - window :] == sorted(now)[len(now) - window :]
        assert bool((ledger.window <= recent).all())
        if data.draw(st.booleans()):
            picked = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3)))
            rows = len(picked)
            ledger.select(picked)
            _, blocks, exact = ledger.widths
            labels.exact, labels.blocks = labels.exact[picked, :exact], labels.blocks[picked, :, :blocks]
            labels.check()
        if data.draw(st.booleans()) and int(ledger.columns - 1 - ledger.newest_gone.max()) > 0:
            count = data.draw(st.integers(0, int(ledger.columns - 1 - ledger.newest_gone.max())))
            if count < ledger.columns:
                labels.exact = labels.exact[:, : ledger.crop(count).window]
                ledger.commit_crop(count)
                labels.check()


# What attention sees.


def seen_by_attention(cache: KVCalCache, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all layers in the next call."""
    found: list[tuple[Tensor, Tensor]] = []
    with monkeypatch.context() as patch:
        ours = reading.materialise

        def watched(layer: EvictingLayer, *arguments: Any) -> tuple[Tensor, Tensor]:
            found.append(ours(layer, *arguments))
            return found[-1]

        patch.setattr(reading, "materialise", watched)
        run(cache, ids, start=0)
    return found


@every_frame
@pytest.mark.parametrize("name", ["llama", "smollm3", "phi3"])
def test_kept_keys_are_the_original_tokens_rotated(name: str, frame: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, cache = schemes.tiny(name), token_ids(1, 120), made(FEW, name, frame=frame)
    run(cache, ids)
    tokens = cache.ledger.tokens[0].clone()
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=full)
    slots, columns = (tokens >= 0).nonzero().flatten(), tokens[tokens >= 0].long()
    assert 0 < len(columns) < 60
    for (keys, values), layer in zip(seen_by_attention(cache, ids[:, :1], monkeypatch), full.layers, strict=True):
        torch.testing.assert_close(keys[:, :, slots], layer.keys[:, :, columns], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(values[:, :, slots], layer.values[:, :, columns], atol=1e-6, rtol=1e-5)


@every_frame
def test_layers_of_aqua_kv_hold_the_same_tokens(frame: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconstructions are closest to the very token that the ledger says, in every layer, also after blocks were
    decoded and packed again.
    """
    model, ids = schemes.tiny("llama"), token_ids(2, 200, seed=5)
    cache = schemes.opened(schemes.aqua("llama", rope=frame).keeping(SOME), model)
    run(cache, ids, range(120, 200, 8))
    assert cache.describe()["selection"]["rows"]["heavy"][0] >= 40
    tokens = cache.ledger.tokens.clone()
    found = seen_by_attention(cache, ids[:, :1], monkeypatch)
    for index, (keys, _) in enumerate(found):
        for row in (0, 1):
            held = tokens[row] >= 0
            exact = exact_keys(model, ids, index)[row].transpose(0, 1).flatten(1)
            own = keys[row, :, : tokens.shape[1]][:, held].transpose(0, 1).flatten(1)
            nearest = torch.cdist(own, exact).argmin(1)
            assert (nearest == tokens[row][held]).float().mean() > 0.95


@once
def _keys(model: Any, ids: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor(ids), past_key_values=full)
    return [layer.keys for layer in full.layers]


def exact_keys(model: Any, ids: Tensor, layer: int) -> Tensor:
    return _keys(model, tuple(map(tuple, ids.tolist())))[layer]


def poison(cache: KVCalCache, number: float) -> int:
    """Write into every slot that holds no token; how many there were."""
    width = cache.ledger.widths[1] * BLOCK
    empty = cache.ledger.tokens < 0
    for layer in cache.compressed_layers:
        for role in (0, 1):
            layer.window[role].masked_fill_(empty[:, None, width:, None], number)
            raw = layer.packed[role]["raw"]
            raw.masked_fill_(empty[:, None, :width].unflatten(2, (-1, BLOCK))[..., None], number)
    return int(empty.sum())


def has_holes(cache: KVCalCache) -> bool:
    """Whether a block holds evicted tokens beside kept ones."""
    ledger = cache.ledger
    own = [ledger.tokens[row, : int(count) * BLOCK] for row, count in enumerate(ledger.blocks)]
    return any(bool((tokens < 0).any()) for tokens in own)


@pytest.mark.parametrize("model", ["sdpa", "eager"])
def test_empty_slots_are_never_looked_at(model: str) -> None:
    """Of shorter rows, and of evicted tokens inside blocks."""
    mask = left_mask([190, 120, 40])
    ids, own = token_ids(*mask.shape) * mask, eager() if model == "eager" else schemes.tiny("llama")
    caches = [made(SOME, model=own) for _ in range(2)]
    for cache in caches:
        run(cache, ids, range(100, 190, 8), mask)
    assert has_holes(caches[0])
    assert poison(caches[1], 1e4) > 50
    more, wider = token_ids(3, 195), left_mask([195, 125, 45])
    first, second = (run(cache, more, (192,), wider)[-1] for cache in caches)
    assert torch.equal(first, second)


def test_eager_and_sdpa_agree() -> None:
    ids, mask = token_ids(2, 120), left_mask([120, 70])
    caches = [made(SOME), made(SOME, model=eager())]
    for a, b in zip(*(run(cache, ids, (90, 91, 100), mask) for cache in caches), strict=True):
        torch.testing.assert_close(a[0], b[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a[1, -20:], b[1, -20:], atol=1e-4, rtol=1e-4)


def test_a_mask_may_take_tokens_back() -> None:
    """As with Transformers' caches: columns hidden by a later mask are not looked at then."""
    model, ids, cache = schemes.tiny("llama"), token_ids(1, 61), made(HeavyHitters(1.0))
    run(cache, ids[:, :60])
    mask = torch.ones(1, 61, dtype=torch.long)
    mask[0, 10:30] = 0
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :60], past_key_values=full)
        wanted = model(ids[:, 60:], past_key_values=full, attention_mask=mask).logits
        found = model(ids[:, 60:], past_key_values=cache, attention_mask=mask).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


# Operations.


def check_storage(cache: KVCalCache) -> None:
    """Tensors are as wide as the fullest row needs, and bookkeeping agrees with what it says."""
    ledger = cache.ledger
    _, blocks, exact = ledger.widths
    for layer in cache.compressed_layers:
        assert {t.shape[2] for t in layer.stored("packed")} <= {blocks}
        assert {t.shape[2] for t in layer.window} == {exact}
    for part in ("packed", "window"):
        tensors = [t for layer in cache.compressed_layers for t in layer.stored(part)]
        assert cache.nbytes(part) == sum(t.numel() * t.element_size() for t in tensors)
    rows = cache.describe()["selection"]["rows"]
    for row in range(ledger.batch):
        found = {name: counts[row] for name, counts in rows.items()}
        assert len(set(kept(cache, row))) == found["kept"] == found["sink"] + found["heavy"] + found["recent"]
        assert found["seen"] == found["kept"] + found["evicted"]
        assert found["kept"] == found["packed"] + found["exact"]
    assert ledger.mass.shape == ledger.tokens.shape


def test_memory_shrinks_and_stays_in_its_bounds() -> None:
    ids, plain, cache = token_ids(1, 400), made(None), made(HeavyHitters(0.2))
    run(plain, ids, range(0, 400, 25))
    for stop in range(25, 401, 25):
        run(cache, ids[:, :stop])
        count, window = len(kept(cache)), int(cache.ledger.window[0])
        heavy = HeavyHitters(0.2).budget(stop)[1]
        since = window - RECENT if window < RECENT + BLOCK else 0  # tokens since the last choice
        assert count <= max(0.2 * stop + since, max(heavy, SINK) + window)
        blocks = cache.ledger.widths[1]
        assert blocks * BLOCK * 0.75 <= count
    check_storage(cache)
    assert cache.nbytes() < 0.25 * plain.nbytes()
    assert cache.packed_values() == cache.describe()["selection"]["rows"]["packed"][0] * 3 * 2 * 2 * 16
    assert cache.bits_per_value() == cache.nbytes("packed") * 8 / cache.packed_values()


@every_frame
@pytest.mark.parametrize("count", [1, 5, 16])
def test_crop_inside_the_window(count: int, frame: str) -> None:
    literal, cache, ids = Literal("llama", SOME), made(SOME, frame=frame), token_ids(1, 120)
    literal.feed(ids)
    run(cache, ids)
    cache.crop(-count)
    literal.cache.crop(-count)
    literal.seen -= count
    literal.kept = [c for c in literal.kept if c < literal.seen]
    literal.mass = {c: m for c, m in literal.mass.items() if c < literal.seen}
    assert (cache.get_seq_length(), kept(cache)) == (120 - count, literal.kept)
    check_storage(cache)
    other = token_ids(1, 150, seed=9)
    for start, stop in schemes.pieces(120 - count, 150, (121, 140)):
        (found,), wanted = run(cache, other[:, start:stop], start=0), literal.feed(other[:, start:stop])
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        assert kept(cache) == literal.kept


def test_crop_of_padded_rows_and_before_anything_was_evicted() -> None:
    mask = left_mask([26, 12, 2])
    ids = token_ids(*mask.shape) * mask
    cache = made(SOME)
    run(cache, ids, (), mask)
    cache.crop(-14)
    assert [kept(cache, row) for row in range(3)] == [list(range(12)), [], []]
    assert cache.ledger.window.tolist() == [8, 0, 0]
    check_storage(cache)
    again, wanted = run(cache, ids, (), mask)[0], run(made(SOME), ids, (), mask)[0]
    torch.testing.assert_close(again[0], wanted[0, 12:], atol=1e-4, rtol=1e-4)


def test_crop_past_an_eviction_changes_nothing() -> None:
    cache, twin, ids = made(FEW, frame="pre_rope"), made(FEW, frame="pre_rope"), token_ids(2, 122)
    for one in (cache, twin):
        run(one, ids[:, :120])
    with pytest.raises(
        KVCalError, match=r"crop of 30 tokens reaches past the exact window \(20 tokens\).*evicted tokens cannot"
    ):
        cache.crop(-30)
    assert cache.get_seq_length() == 120
    for mine, other in zip(all_tensors(cache), all_tensors(twin), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(run(cache, ids)[0], run(twin, ids)[0])
    cache.crop(-1000)  # everything: a new start, with other rows
    assert cache.nbytes("packed") == cache.nbytes("window") == 0
    run(cache, token_ids(3, 50))
    assert cache.ledger.batch == 3


def all_tensors(cache: KVCalCache) -> list[Tensor]:
    ledger = cache.ledger
    own = [t for layer in cache.compressed_layers for part in ("packed", "window") for t in layer.stored(part)]
    own += [
        ledger.tokens,
        ledger.mass,
        ledger.lengths,
        ledger.window,
        ledger.passed,
        ledger.blocks,
        ledger.recents,
        ledger.newest_gone,
    ]
    return own if ledger.positions is None else [*own, ledger.positions]


@every_frame
@pytest.mark.parametrize("rows", [[1, 0, 1, 2], [1], [2, 2]], ids=str)
def test_rows_selected_go_on_like_rows_fed_so(rows: list[int], frame: str) -> None:
    mask, later = left_mask([130, 100, 20]), left_mask([160, 130, 50])
    ids = token_ids(*later.shape) * later
    cache, fresh = made(SOME, codec="higgs-2", frame=frame), made(SOME, codec="higgs-2", frame=frame)
    run(cache, ids[:, :130], (100,), mask)
    cache.reorder_cache(torch.tensor(rows)) if len(rows) == 4 else cache.batch_select_indices(torch.tensor(rows))
    check_storage(cache)
    run(fresh, ids[rows, :130], (100,), mask[rows])
    more = later[:, :130] * 0 + mask
    whole = torch.cat([more, torch.ones(3, 30, dtype=torch.long)], 1)[rows]
    for a, b in zip(run(cache, ids[rows], (131, 150), whole), run(fresh, ids[rows], (131, 150), whole), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert [kept(cache, i) for i in range(len(rows))] == [kept(fresh, i) for i in range(len(rows))]


def test_copies_offload_and_reset() -> None:
    ids = token_ids(2, 140)
    cache, away = (
        made(SOME, codec="higgs-2", frame="pre_rope"),
        made(SOME, codec="higgs-2", frame="pre_rope", offload=True),
    )
    first = run(cache, ids[:, :110], (90,))
    assert all(torch.equal(a, b) for a, b in zip(first, run(away, ids[:, :110], (90,)), strict=True))
    twin = copy.deepcopy(cache)
    schemes.OPEN.append(twin)
    wanted = run(cache, ids, (115,))
    for other in (twin, away):
        assert all(torch.equal(a, b) for a, b in zip(run(other, ids, (115,)), wanted, strict=True))
    cache.reset()
    assert cache.nbytes("packed") == cache.nbytes("window") == 0
    assert all(torch.equal(a, b) for a, b in zip(run(cache, ids[:, :110], (90,)), first, strict=True))


class Watching(Exact):
    """Shows which run-time statistics it is given."""

    seen: ClassVar[list[dict[str, Tensor]]] = []

    @property
    def stats(self) -> frozenset[str]:
        return frozenset({"query_abs", "query_abs:recent", "key_scale"})

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        Watching.seen.append(dict(context.stats))
        return super().encode(x, context)


def test_run_time_statistics_are_those_of_the_newest_block_due() -> None:
    """The same numbers as without selection, whatever is packed."""
    model, ids = schemes.tiny("llama"), token_ids(2, 120)
    plain = schemes.scheme(model)
    pairs = tuple(LayerCodecs(Watching(p.key.shape, "key"), p.value) for p in plain.layers if p is not None)
    found = []
    for selection in (None, SOME):
        Watching.seen = []
        run(schemes.opened(Scheme(plain.windows, "post_rope", pairs, selection=selection), model), ids, (119,))
        found.append(Watching.seen[0])
    for name, every in found[0].items():
        assert torch.equal(found[1][name], every[:, :, -1:])


@pytest.mark.parametrize(("first", "unforgotten"), [(17, 0), (111, 0), (113, 1)])
def test_a_crop_takes_tokens_out_of_run_time_statistics(first: int, unforgotten: int) -> None:
    """Before and after tokens were selected; a block's worth of tokens that left the window with a removed one is told."""
    model, ids = schemes.tiny("llama"), token_ids(2, first + 3)
    plain = schemes.scheme(model)
    pairs = tuple(LayerCodecs(Watching(p.key.shape, "key"), p.value) for p in plain.layers if p is not None)
    scheme = Scheme(plain.windows, "post_rope", pairs, selection=SOME)
    cropped, never = (schemes.opened(scheme, model) for _ in range(2))
    run(cropped, ids, (first,))
    run(never, ids[:, :first])
    cropped.crop(-3)
    assert cropped.describe()["unforgotten_by_statistics"] == {"tokens": 0, "blocks": 2 * unforgotten}
    for mine, theirs in zip(cropped.compressed_layers, never.compressed_layers, strict=True):
        for name, own in mine.statistics.items():
            for part, state in own.state.items():
                if part not in ("tail", "before") or (part == "before" and not unforgotten):
                    assert torch.equal(state, theirs.statistics[name].state[part]), (name, part)


COMPOSED: dict[str, Any] = {
    **{name: (name, name) for name in ("uniform-2", "kivi-2", "turboquant-4", "higgs-2-wide", "innerq-hybrid", "fp8")},
    "mixkvq": ("exact-32", "kivi-2"),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composes_with_every_kind_of_codec(name: str) -> None:
    """Per token, per channel, scalar and vector grids, factors of the row, blocks of different sizes; ragged rows; the
    same tokens in all of it. What attention gets is near the exact codec's, so nothing is mixed up.
    """
    model, mask = schemes.tiny("llama"), left_mask([150, 120])
    ids = token_ids(*mask.shape) * mask
    scheme = Preset(*COMPOSED[name], sink=SINK, recent=RECENT, block=BLOCK).scheme(model)
    if name == "mixkvq":
        pairs = [LayerCodecs(MixKVQ(p.key.shape, "key", group=BLOCK), p.value) for p in scheme.layers if p is not None]
        scheme = Scheme(scheme.windows, "post_rope", tuple(pairs))
    cache, exact = schemes.opened(scheme.keeping(SOME), model), made(SOME)
    found, wanted = (run(one, ids, (100, *range(110, 150, 9)), mask) for one in (cache, exact))
    error = torch.stack([f[:, -1] - w[:, -1] for f, w in zip(found, wanted, strict=True)])
    assert float(error.std()) < 0.6 * float(torch.stack([w[:, -1] for w in wanted]).std())
    rows = cache.describe()["selection"]["rows"]
    assert rows["kept"] == exact.describe()["selection"]["rows"]["kept"]
    assert cache.ledger.widths == exact.ledger.widths
    copied = copy.deepcopy(cache)
    schemes.OPEN.append(copied)
    for one in (cache, copied):
        one.batch_select_indices(torch.tensor([1, 0, 1]))
    more = torch.cat([ids, token_ids(2, 20, seed=8)], 1)[[1, 0, 1]]
    whole = torch.cat([mask[[1, 0, 1]], torch.ones(3, 20, dtype=torch.long)], 1)
    first, second = (run(one, more, (160,), whole)[-1] for one in (cache, copied))
    assert torch.equal(first, second)
    torch.testing.assert_close(first[0], first[2], atol=1e-4, rtol=1e-4)


def test_half_precision() -> None:
    """Caches hold what they are given; scores are float32."""
    model, ids = TINY["llama"]().bfloat16(), token_ids(2, 120)
    for frame in FRAMES:
        cache = schemes.opened(schemes.scheme(model, "higgs-2", frame).keeping(FEW), model)
        logits = run(cache, ids, range(60, 120, 7))
        assert {t.dtype for layer in cache.compressed_layers for t in layer.window} == {torch.bfloat16}
        assert bool(torch.isfinite(logits[-1]).all())
        check_storage(cache)


# What is refused.


def test_other_masks_and_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, ids = schemes.tiny("llama"), made(SOME), token_ids(1, 8)
    with pytest.raises(KVCalError, match="attention_mask has 4 dimensions: with token selection it must be"):
        model(ids, past_key_values=cache, attention_mask=torch.zeros(1, 1, 8, 8))
    assert cache.get_seq_length() == cache.ledger.columns == 0
    run(cache, ids)
    monkeypatch.setattr(model.config, "_attn_implementation", "flex_attention")
    with pytest.raises(
        KVCalError, match=r"layer 0 \(LlamaAttention\): token selection needs attn_implementation sdpa or eager"
    ):
        made(SOME)
    monkeypatch.undo()
    monkeypatch.setattr(model.model.layers[1].self_attn, "softcap", 30.0, raising=False)
    with pytest.raises(KVCalError, match=r"layer 1 .*attention weights: its attention has softcap"):
        made(SOME)


def test_a_forward_that_broke_off_while_evicting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids = made(SOME), token_ids(1, 121)
    failing = cache.compressed_layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(failing, "carry_out", lambda moves: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(cache, ids[:, :120])
    with pytest.raises(KVCalError, match="broke off while it evicted tokens: call reset"):
        run(cache, ids)
    cache.reset()
    assert torch.equal(run(cache, ids)[0], run(made(SOME), ids)[0])


def test_attention_that_is_not_finite() -> None:
    cache = made(SOME)
    model = cache.model
    hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: torch.full((1, 120, 64), torch.nan))
    try:
        with pytest.raises(NonFiniteError, match="attention weights hold a NaN"):
            run(cache, token_ids(1, 120))
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "settings", [{"keep": 0}, {"keep": 1.5}, {"keep": True}, {"heavy": -0.1}, {"keep": float("nan")}], ids=str
)
def test_bad_shares(settings: dict[str, Any]) -> None:
    with pytest.raises(KVCalError, match=r"selection (keep|heavy) = .* must be a number"):
        HeavyHitters(**settings)


def test_budgets_are_whole_tokens() -> None:
    assert HeavyHitters(0.29, 0.5).budget(100) == (29, 14)
    assert HeavyHitters(1.0, 0.5).budget(7) == (7, 3)
    assert HeavyHitters(0.2, 0.0).budget(1000) == (200, 0)


def test_equals_are_decided_by_age() -> None:
    row = Row(2, torch.arange(8, dtype=torch.int32), torch.ones(8, dtype=torch.float64), 0, 0, torch.arange(8))
    row.choose(sink=1, window=7, flushed=2, total=4, heavy=2)
    assert [t.tolist() for t in row.pack] == []
    assert row.exact.tolist() == [0, 1, 5, 6, 7]


# Storage and bundles.


@settings(max_examples=40)
@given(st.data())
def test_blocks_are_arranged_as_lists(data: st.DataObject) -> None:
    rows, fresh = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    old = data.draw(ragged(rows, blocks=data.draw(st.integers(0, 3))))
    new = data.draw(ragged(rows, blocks=fresh)) if fresh else None
    both = [[a + b for a, b in zip(p, q, strict=True)] for p, q in zip(old, new, strict=True)] if new else old
    count, slots = len(both[0][0]), data.draw(st.integers(0, 4))
    number = st.integers(-1, count - 1)
    order = [data.draw(st.lists(number, min_size=slots, max_size=slots)) for _ in range(rows)]
    index = torch.tensor(order, dtype=torch.long).view(rows, slots)
    found = block_store.arrange(pooled(old), pooled(new) if new else None, index)
    wanted = [[[head[n] if n >= 0 else [] for n in own] for head in row] for row, own in zip(both, order, strict=True)]
    assert listed(found) == wanted
    dense, more = schemes.numbers(rows, 2, len(old[0][0]), 3), schemes.numbers(rows, 2, fresh, 3, seed=1)
    whole = torch.cat([dense, more], 2)
    moved = block_store.arrange(dense, more if new else None, index)
    assert isinstance(moved, Tensor)
    for row, own in enumerate(order):
        for slot, n in enumerate(own):
            assert torch.equal(moved[row, :, slot], whole[row, :, n] if n >= 0 else torch.zeros(2, 3))


def test_a_bundle_carries_the_selection(tmp_path: Path) -> None:
    model, ids = schemes.tiny("llama"), token_ids(1, 110)
    plain = schemes.scheme(model, "higgs-2")
    path = tmp_path / f"few{SUFFIX}"
    Bundle(Fingerprint.of(model), plain.keeping(FEW)).write(path)
    assert load_bundle(path).scheme.selection == FEW
    header = json.loads(
        json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]["kvcal"]
    )
    assert header["header"]["version"] == 2
    assert header["header"]["scheme"]["selection"] == {"keep": 0.3, "heavy": 0.5}
    assert b'"version":1' in Bundle(Fingerprint.of(model), plain).to_bytes().replace(b"\\", b"")
    for options in ({}, {"keep": 0.3}, {"keep": 1.0}):
        with load_cache(path, model, **options) as cache:
            run(cache, ids)
            assert (len(kept(cache)) == 110) == (options.get("keep") == 1.0)
    assert kvcal("inspect", path, "--json").json["selection"] == {"keep": 0.3, "heavy": 0.5}
    assert "H2O, keep 0.3, heavy 0.5" in kvcal("inspect", path).out
    with pytest.raises(UsageError, match=r"heavy=0.3 is a share of the tokens that keep=... keeps"):
        load_cache(path, model, heavy=0.3)


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_that_does_not_fit_is_refused(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = schemes.tiny("llama"), tmp_path / f"odd{SUFFIX}"
    monkeypatch.setattr("kvcal_artifacts.bundle.header.VERSIONS", (3 - version, version) if version == 2 else (2, 1))
    scheme = schemes.scheme(model, "higgs-2")
    monkeypatch.setattr("kvcal_artifacts.bundle.header.VERSIONS", (2, 1))
    Bundle(Fingerprint.of(model), scheme.keeping(FEW) if version == 1 else scheme).write(path)
    monkeypatch.undo()
    with pytest.raises(CorruptBundle, match=f"version {version} with"):
        load_bundle(path)


def test_the_command_line(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 2)
    write_text(tmp_path / "words.txt")
    named = ["--model", tmp_path / "model", "--text", tmp_path / "words.txt"]
    shape = ["--length", 400, "--windows", 2, "--preset", "higgs-2", "--json"]
    plain, few = (kvcal("eval", *named, *shape, *more).json for more in ([], ["--keep", 0.2]))
    assert [row["name"] for row in few["rows"]] == ["full", "higgs-2+h2o-0.2"]
    assert (few["keep"], few["heavy"], plain["keep"]) == (0.2, 0.5, None)
    assert few["rows"][1]["cache_bytes"] < 0.4 * plain["rows"][1]["cache_bytes"]
    assert few["rows"][1]["kl"] > plain["rows"][1]["kl"]
    prompt = [
        "generate",
        "--model",
        tmp_path / "model",
        "--prompt",
        "the house on the hill " * 10,
        "--preset",
        "higgs-2",
    ]
    found = kvcal(*prompt, "--keep", 0.3, "--heavy", 0.7, "--tokens", 3, "--json").json
    assert found["selection"]["rows"]["evicted"][0] > 0
    assert (found["selection"]["keep"], found["selection"]["heavy"]) == (0.3, 0.7)
    bundle, other = tmp_path / f"few{SUFFIX}", tmp_path / f"all{SUFFIX}"
    for path, share in ((bundle, ["--keep", 0.2]), (other, [])):
        assert kvcal("preset", "higgs-2", *named[:2], "--output", path, *share).code == 0
    assert load_bundle(bundle).scheme.selection == HeavyHitters(0.2)
    compared = kvcal("compare", *named, *shape[:4], "--bundle", bundle, "--bundle", other, "--json").json["rows"]
    assert {row["name"]: row["cache_bytes"] for row in compared}["few"] == few["rows"][1]["cache_bytes"]
    again = kvcal("compare", *named, *shape[:4], "--bundle", other, "--keep", 0.2, "--json").json
    assert again["rows"][0]["kl"] == few["rows"][1]["kl"]
    assert again["selection"] == {"keep": 0.2, "heavy": 0.5}
    both = kvcal("combine", bundle, other, "--output", tmp_path / f"both{SUFFIX}")
    assert both.code == 2
    assert "few keeps 0.2 of the tokens (0.5 heavy), all every token" in both.complaint
    assert kvcal("combine", bundle, bundle, "--output", tmp_path / f"both{SUFFIX}").code == 0
    assert load_bundle(tmp_path / f"both{SUFFIX}").scheme.selection == HeavyHitters(0.2)
    for options, why in (
        (["--heavy", 0.5], "give --keep too"),
        (["--keep", 2], "--keep 2: a share"),
        (["--keep", 0], "above 0"),
    ):
        done = kvcal(*prompt, *options)
        assert done.code == 2
        assert why in done.complaint
