"""What a KVCalCache stores, and every operation on it: packed bytes, crop, batch, copies, hooks, errors.

Most tests use `Fed`, whose layers hand over given keys and values: then every comparison is bit for bit.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache

from kvcal.methods.data_free import PRESETS, Preset
from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache, former_names
from kvcal_artifacts.codecs import Context, MixKVQ, Shape
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_kernels.layout import Form
from tests.support import schemes
from tests.support.architectures import TINY, build
from tests.support.schemes import BLOCK, DIM, HEADS, LAYERS, RECENT, SINK, Fed, Rows, feed, left_mask, same, token_ids

pytestmark = pytest.mark.transformers

FED = Fed()
SCHEMES: dict[str, Callable[[str], Scheme]] = {
    **{name: partial(schemes.scheme, FED, name) for name in ("exact-32", "uniform-2", "uniform-3-channel")},
    **{name: partial(schemes.scheme, FED, name) for name in ("higgs-2", "higgs-2-wide", "higgs-2-d4-wide")},
    "innerq-hybrid": partial(schemes.scheme, FED, "innerq-hybrid"),
    "squat": schemes.squat,
    "aqua-kv": partial(schemes.chained, "linear"),
    "aqua-kv-mlp": partial(schemes.chained, "mlp"),
    "mixkvq": schemes.mixkvq,
    "mixkvq-recent": partial(schemes.mixkvq, importance="recent"),
}
LOSSY = [name for name in SCHEMES if name != "exact-32"]
FRAMES = ("post_rope", "pre_rope")
every_frame = pytest.mark.parametrize("frame", FRAMES)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    schemes.close_all()


@cache
def scheme_of(name: str, frame: str = "post_rope") -> Scheme:
    return SCHEMES[name](frame)


def fed_cache(name: str = "exact-32", frame: str = "post_rope", **options: Any) -> KVCalCache:
    return schemes.opened(scheme_of(name, frame), FED, **options)


def fed_cache_of(lengths: list[int], name: str = "exact-32", frame: str = "post_rope", **options: Any) -> KVCalCache:
    made = fed_cache(name, frame, **options)
    feed(made, Rows(lengths))
    return made


# Packed bytes depend on a row's real tokens and on nothing else.


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Rows, Tensor, list[int]]:
    """Up to three rows of up to 56 tokens, where their pads are (left, or anywhere), and where forwards are cut."""
    lengths = draw(st.lists(st.integers(1, 56), min_size=1, max_size=3))
    width = max(lengths) + draw(st.integers(0, 12))
    valid = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = width - length
        columns = range(start, width) if draw(st.booleans()) else draw(st.permutations(range(width)))[:length]
        valid[row, list(columns)] = True
    singly = st.integers(0, width).map(lambda first: list(range(first, first + 24)))  # three blocks of them
    cuts = draw(st.one_of(st.just([]), st.lists(st.integers(1, width)), singly))
    return Rows(lengths, seed=draw(st.integers(0, 5))), valid, cuts


def alone(name: str, frame: str, rows: Rows, row: int) -> KVCalCache:
    """A row without padding or companions, in one piece."""
    with fed_cache(name, frame) as made:
        feed(made, rows.one(row))
    return made


def check_rows_equal_alone(name: str, frame: str, batch: KVCalCache, rows: Rows) -> None:
    for row, length in enumerate(rows.lengths):
        assert int(batch.ledger.blocks[row]) == max(0, (length - SINK - RECENT) // BLOCK)
        single = alone(name, frame, rows, row)
        assert same(schemes.packed_row(batch, row), schemes.packed_row(single, 0))
        assert same(schemes.window_row(batch, row), schemes.window_row(single, 0))


@every_frame
@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=9)
@given(layout=layouts())
def test_packed_bytes_depend_on_the_tokens_only(name: str, frame: str, layout: tuple[Rows, Tensor, list[int]]) -> None:
    rows, valid, cuts = layout
    with fed_cache(name, frame) as batch:
        feed(batch, rows, valid, cuts)
        check_rows_equal_alone(name, frame, batch, rows)


@every_frame
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(
    "cuts", [(), range(30, 70), pytest.param((30, 31, 64), marks=pytest.mark.slow)], ids=["whole", "ones", "pieces"]
)
def test_pads_are_never_encoded(name: str, frame: str, cuts: Any) -> None:
    """Pads that hold NaN: encoding one would raise or show. Rows begin at columns 0, 37 and 66."""
    rows, valid = Rows([70, 33, 4]), left_mask([70, 33, 4]).bool()
    with fed_cache(name, frame) as batch:
        feed(batch, rows, valid, cuts, pad=float("nan"))
        check_rows_equal_alone(name, frame, batch, rows)


@pytest.mark.parametrize("name", LOSSY)
def test_padding_between_turns_is_never_encoded(name: str) -> None:
    rows = Rows([60, 55, 20])
    first, second = left_mask([30, 40, 18]).bool(), left_mask([30, 15, 2]).bool()
    with fed_cache(name) as batch:
        feed(batch, rows, first)
        feed(batch, rows, torch.cat([first, second], 1), cuts=(50,))
        check_rows_equal_alone(name, "post_rope", batch, rows)


@pytest.mark.parametrize("name", LOSSY)
def test_many_rows_pack_like_one(name: str) -> None:
    """Matrix products of many rows may end in other bits than those of one."""
    lengths = [100] * 9 + [37]
    with fed_cache(name) as batch:
        rows = Rows(lengths, seed=40)
        feed(batch, rows)
        check_rows_equal_alone(name, "post_rope", batch, rows)


def test_wide_predictors_pack_the_same_in_pieces() -> None:
    """At 512 channels the shape of a matrix product does show in its last bits, and a codec of 16 bits shows them."""
    heads, dim = 8, 64
    fed, found = Fed(heads=heads, dim=dim), schemes.chained(codec="exact-16", shape=Shape(heads, dim, 32))
    rows = Rows([700, 700], heads=heads, dim=dim)
    whole, pieces, single = (schemes.opened(found, fed) for _ in range(3))
    feed(whole, rows)
    feed(pieces, rows, cuts=(100, 500, 520))
    feed(single, rows.one(0))
    assert whole.ledger.blocks.tolist() == [21, 21]
    for row in (0, 1):
        assert same(schemes.packed_row(whole, row), schemes.packed_row(pieces, row))
    assert same(schemes.packed_row(whole, 0), schemes.packed_row(single, 0))


STORED_FOR_THE_KERNEL = [
    "inner-2-hybrid",
    "higgs-2",
    "turboquant-4",
    "mixkvq-16-16",
    "higgs-2-bytes",
    "turboquant-4-bytes",
]


@pytest.mark.parametrize("name", STORED_FOR_THE_KERNEL)
@pytest.mark.parametrize("cuts", [(), range(84, 150), (90, 91, 123)], ids=["whole", "ones", "pieces"])
def test_blocks_in_the_kernels_layout_depend_on_the_tokens_only(name: str, cuts: Any) -> None:
    """Rows that have packed most, one block and none (left-padded: they begin at columns 0, 90 and 130); then in another
    order, and cropped into what is packed.
    """
    fed, shape, rows = Fed(heads=2, dim=64), Shape(2, 64, 32), Rows([150, 60, 20], heads=2, dim=64)
    make = CODEC_MAKERS.get(name, CODEC_MAKERS["kivi-2"])
    key = MixKVQ(shape, "key", full=16, four=16) if name == "mixkvq-16-16" else make(shape, "key")
    pair = LayerCodecs(key, make(shape, "value"))
    assert all(isinstance(codec.fused(), Form) for codec in (pair.key, pair.value))
    found = Scheme(Windows(SINK, RECENT, 32), "post_rope", (pair,) * LAYERS)
    batch = schemes.opened(found, fed)
    feed(batch, rows, cuts=cuts, pad=float("nan"))
    assert batch.ledger.blocks.tolist() == [4, 1, 0]
    alone = []
    for row, length in enumerate(rows.lengths):
        single = schemes.opened(found, fed)
        feed(single, rows.one(row), torch.ones(1, length, dtype=torch.bool))
        alone.append(schemes.packed_row(single, 0))
        assert same(schemes.packed_row(batch, row), alone[row])
    batch.reorder_cache(torch.tensor([2, 0, 1]))
    batch.crop(-40)
    assert batch.ledger.blocks.tolist() == [0, 3, 0]
    assert same(schemes.packed_row(batch, 1), [t[:, :3] for t in alone[0]])


@pytest.mark.parametrize("inner", ["exact-32", "exact-16", "uniform-2", "higgs-2"])
def test_decoding_does_not_touch_what_is_packed(inner: str) -> None:
    made, rows = schemes.opened(schemes.chained(codec=inner), FED), Rows([80])
    feed(made, rows, left_mask([80]).bool()[:, :60])
    before = [t.clone() for t in schemes.packed_row(made, 0)]
    feed(made, rows)
    assert same(before, [t[:, :5] for t in schemes.packed_row(made, 0)])


class OneByOne(nn.Module):
    """A linear layer applied to one token at a time, so that its last bits do not depend on the shape of the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        flat = [self.inner(token) for token in x.flatten(0, -2).split(1)]
        return torch.cat(flat).unflatten(0, x.shape[:-1])


def first_layer_one_by_one(name: str) -> Any:
    model = TINY[name]()
    attention = model.model.layers[0].self_attn
    for part in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        if hasattr(attention, part):
            setattr(attention, part, OneByOne(getattr(attention, part)))
    return model


@torch.no_grad()
def run_model(model: Any, made: KVCalCache, ids: Tensor, mask: Tensor, step: int) -> KVCalCache:
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for start in range(0, ids.shape[1], step):
        part = slice(start, start + step)
        model(
            ids[:, part],
            attention_mask=mask[:, : part.stop],
            position_ids=positions[:, part],
            past_key_values=made,
        )
    return made


@every_frame
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("codec", ["higgs-2", "mixkvq"])
def test_first_layer_of_real_models(codec: str, name: str, frame: str) -> None:
    """Through the models' own masks, positions and RoPE; layer 0's inputs are the tokens themselves."""
    model, lengths = first_layer_one_by_one(name), [52, 41, 7]
    mask = left_mask(lengths)
    mask[0, 30:33] = 0  # a gap, as between two turns
    ids = token_ids(*mask.shape) * mask
    found = schemes.scheme(model, codec, frame) if codec != "mixkvq" else schemes.mixkvq_of(model, frame)
    batch = run_model(model, schemes.opened(found, model), ids, mask, step=5)
    for row, real in enumerate(mask.bool()):
        single_ids = ids[row : row + 1, real]
        single = schemes.opened(found, model)
        run_model(model, single, single_ids, torch.ones_like(single_ids), step=len(real))
        for part in (schemes.packed_row, schemes.window_row):
            assert same(first_layer(batch, part, row), first_layer(single, part, 0))
    assert batch.ledger.blocks.tolist() == [3, 2, 0]


def first_layer(made: KVCalCache, part: Callable[[KVCalCache, int], list[Tensor]], row: int) -> list[Tensor]:
    found = part(made, row)
    return found[: len(found) // len(made.layers)]


# The exact cache under any sequence of operations is a list of columns.


class Columns:
    """The obvious cache: every column's keys and values, kept."""

    def __init__(self, seed: int) -> None:
        self.rows, self.seed = 0, seed
        self.forget()

    def forget(self) -> None:
        self.keys = torch.zeros(LAYERS, self.rows, HEADS, 0, DIM)
        self.values, self.valid = self.keys, torch.zeros(self.rows, 0, dtype=torch.bool)

    def start(self, rows: int) -> None:
        self.rows = rows
        self.forget()

    def append(self, count: int, pads: list[bool]) -> None:
        new = torch.tensor([pads[i % len(pads)] for i in range(self.rows * count)]).view(self.rows, count)
        self.seed += 2
        shape = (LAYERS, self.rows, HEADS, count, DIM)
        self.keys = torch.cat([self.keys, schemes.numbers(*shape, seed=self.seed)], 3)
        self.values = torch.cat([self.values, schemes.numbers(*shape, seed=self.seed + 1)], 3)
        self.valid = torch.cat([self.valid, ~new], 1)

    def crop(self, count: int) -> None:
        kept = max(0, self.valid.shape[1] - count)
        self.keys, self.values = self.keys[:, :, :, :kept], self.values[:, :, :, :kept]
        self.valid = self.valid[:, :kept]

    def select(self, rows: Tensor) -> None:
        self.keys, self.values, self.valid = self.keys[:, rows], self.values[:, rows], self.valid[rows]
        self.rows = len(self.valid)

    @property
    def positions(self) -> Tensor:
        return (self.valid.long().cumsum(1) - 1).clamp_min(0)

    def check(self, seen: list[tuple[Tensor, Tensor]]) -> None:
        """What attention saw, at every real token."""
        cos, sin = FED.rotary_emb(self.keys, position_ids=self.positions)
        real = self.valid[:, None, :, None]
        for layer, (keys, values) in enumerate(seen):
            wanted = schemes.apply_rotary_pos_emb(self.keys[layer], self.keys[layer], cos, sin)[1]
            assert torch.equal(keys.where(real, 0), wanted.where(real, 0))
            assert torch.equal(values.where(real, 0), self.values[layer].where(real, 0))


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 50), st.lists(st.booleans(), min_size=1, max_size=7)),
    st.tuples(st.just("append"), st.integers(1, 40), st.just([False])),
    st.tuples(st.just("crop"), st.integers(0, 60)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("reset"), st.integers(1, 3)),
    st.tuples(st.just("copy")),
)


def operate(made: KVCalCache, model: Columns, name: str, *details: Any) -> KVCalCache:
    if name == "append":
        model.append(*details)
        start = made.ledger.columns
        model.check(
            FED(
                model.keys[:, :, :, start:],
                model.values[:, :, :, start:],
                attention_mask=model.valid.long(),
                past_key_values=made,
                position_ids=model.positions[:, start:],
            )
        )
    elif name == "crop":
        model.crop(*details)
        made.crop(-details[0])
    elif name in ("select", "reorder"):
        rows = torch.tensor(details[0]) % model.rows
        model.select(rows)
        made.batch_select_indices(rows) if name == "select" else made.reorder_cache(rows)
    elif name == "repeat" and model.rows < 8:
        model.select(torch.arange(model.rows).repeat_interleave(details[0]))
        made.batch_repeat_interleave(details[0])
    elif name == "reset":
        model.start(details[0])
        made.reset()
    elif name == "copy":
        schemes.close_all()
        made = copy.deepcopy(made)
        schemes.OPEN.append(made)
    return made


@every_frame
@pytest.mark.parametrize("windows", [(SINK, RECENT, BLOCK), (0, 0, 1), (0, 3, 16), (7, 0, 5)], ids=str)
@settings(max_examples=75)
@given(first=st.integers(1, 3), operations=st.lists(OPERATIONS, min_size=2, max_size=12), seed=st.integers(0, 9))
def test_exact_cache_is_a_list_of_columns(
    windows: tuple[int, int, int], frame: str, first: int, operations: list[Any], seed: int
) -> None:
    model = Columns(1000 * seed)
    model.start(first)
    made = schemes.opened(schemes.scheme(FED, "exact-32", frame, Windows(*windows)), FED)
    for operation in [("append", 40, [True, False, False, False]), *operations, ("append", 1, [False])]:
        made = operate(made, model, *operation)
        assert made.get_seq_length() == made.ledger.columns == model.valid.shape[1]
        check_storage(made)
    schemes.close_all()


def check_storage(made: KVCalCache) -> None:
    """Counts add up, no tensor is wider than its fullest row, and nothing else is kept alive."""
    ledger = made.ledger
    total = ledger.sink + ledger.blocks * ledger.windows.block + ledger.window
    assert torch.equal(total, ledger.valid.sum(1))
    for layer in made.compressed_layers:
        assert {t.shape[2] for t in layer.sink} <= {widest(ledger.sink)}
        assert {t.shape[2] for t in layer.window} <= {widest(ledger.window)}
        assert {t.shape[2] for packed in layer.packed for t in packed.values()} <= {widest(ledger.blocks)}
    for part in ("packed", "window"):
        tensors = [t for layer in made.compressed_layers for t in layer.stored(part)]
        assert made.nbytes(part) == sum(t.numel() * t.element_size() for t in tensors)
    assert made.nbytes("bookkeeping") == storage_bytes(schemes.ledger_tensors(made))


def widest(counts: Tensor) -> int:
    return int(counts.max()) if counts.numel() else 0


def storage_bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# Crop.


def decode_all(made: KVCalCache) -> list[tuple[Tensor, Tensor]]:
    """Each layer's packed keys and values decoded, outside of the cache."""
    done: list[tuple[Tensor, Tensor]] = []
    for index, pair in enumerate(made.scheme.layers):
        assert pair is not None
        own = made.layers[index].statistics
        context = Context(index, stats={name: now for name, s in own.items() if (now := s.current()) is not None})
        if index:
            context.k1, context.v1 = done[-1]
        packed_keys, packed_values = made.layers[index].packed
        context.k0 = pair.key.decode(packed_keys, context)
        done.append((context.k0, pair.value.decode(packed_values, context)))
    return done


def expected_window(made: KVCalCache, row: int, kept: int) -> tuple[int, list[Tensor], int]:
    """After a crop to `kept` real tokens: blocks, the row's windows, and how many of its tokens were decoded."""
    ledger = made.ledger
    behind = max(0, kept - SINK)
    blocks = min(int(ledger.blocks[row]), behind // BLOCK)
    window = behind - blocks * BLOCK
    decoded = decode_all(made) if blocks < ledger.blocks[row] else None
    kept_tokens = slice(blocks * BLOCK, behind) if decoded else slice(0, window)
    found = []
    for index, layer in enumerate(made.compressed_layers):
        found += [t[row, :, : min(kept, SINK)] for t in layer.sink]
        found += [t[row, :, kept_tokens] for t in (decoded[index] if decoded else layer.window)]
    return blocks, found, window if decoded else 0


@every_frame
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("count", [1, 16, 21, 30, 45, 57, 59])
def test_crop(name: str, frame: str, count: int) -> None:
    """Inside the window, to block edges, into the sink; of rows of different lengths, some of which end before."""
    made = fed_cache_of([60, 41, 29, 6], name, frame)
    before = [schemes.packed_row(made, row) for row in range(4)]
    kept = [max(0, length - count) for length in (60, 41, 29, 6)]
    wanted = [expected_window(made, row, length) for row, length in enumerate(kept)]
    made.crop(-count)
    assert made.get_seq_length() == max(0, 60 - count)
    assert made.ledger.blocks.tolist() == [blocks for blocks, _, _ in wanted]
    assert made.describe()["returned_by_crop"] == sum(returned for _, _, returned in wanted)
    for row, (blocks, windows, _) in enumerate(wanted):
        assert same(schemes.packed_row(made, row), [t[:, :blocks] for t in before[row]])
        assert same(schemes.window_row(made, row), windows)
    check_storage(made)


def test_crop_returns_tokens_that_were_lossy() -> None:
    made = fed_cache_of([60], "uniform-2")
    original = Rows([60]).values[0][0, :, 4 + 32 : 4 + 32 + 3]
    made.crop(-21)  # 39 kept: 4 sinks, 4 blocks, 3 tokens of the fifth
    returned = made.layers[0].window[1][0]
    assert returned.shape == original.shape
    assert not torch.equal(returned, original)
    torch.testing.assert_close(returned, original, atol=2.0, rtol=0)
    assert made.describe()["returned_by_crop"] == 3


@every_frame
@pytest.mark.parametrize("lengths", [[60], [60, 37, 8]], ids=["one", "ragged"])
@pytest.mark.parametrize("count", [1, 7, 15])
def test_crop_inside_the_window_leaves_no_trace(lengths: list[int], count: int, frame: str) -> None:
    """The cache that took tokens back goes on like one that never saw them."""
    valid, rows, other = left_mask(lengths).bool(), Rows(lengths), Rows(lengths)
    for mine, changed in zip(rows.keys + rows.values, other.keys + other.values, strict=True):
        changed[:, :, :] = mine
    for length, keys, values in zip(lengths, other.keys, other.values, strict=True):
        keys[:, :, max(0, length - count) :] += 1
        values[:, :, max(0, length - count) :] -= 1
    cropped, fresh = fed_cache(frame=frame), fed_cache(frame=frame)
    feed(cropped, rows, valid)
    cropped.crop(-count)
    feed(fresh, other, valid[:, :-count])
    assert cropped.record.returned_tokens == 0
    seen, wanted = feed(cropped, other, valid, cuts=(55,)), feed(fresh, other, valid, cuts=(55,))
    real = valid[:, None, :, None]
    for pair, true in zip(seen, wanted, strict=True):
        assert same([t.where(real, 0) for t in pair], [t.where(real, 0) for t in true])


@pytest.mark.parametrize("name", ["higgs-2", "aqua-kv"])
@pytest.mark.parametrize("lengths", [[60], [60, 37, 8]], ids=["one", "ragged"])
def test_strict_crop_changes_nothing(name: str, lengths: list[int]) -> None:
    made = fed_cache_of(lengths, name, "pre_rope", strict=True)
    made.crop(-3)
    before = schemes.snapshot(made)
    with pytest.raises(KVCalError, match=r"crop of 40 tokens reaches into packed blocks .*strict"):
        made.crop(-40)
    assert same(before, schemes.snapshot(made))
    feed(made, Rows(lengths))


@pytest.mark.parametrize("name", SCHEMES)
def test_crop_of_everything_starts_anew(name: str) -> None:
    """With as many rows as before, and with more."""
    made = fed_cache_of([60, 33], name, "pre_rope")
    for lengths in ([50, 31], [50, 31, 9]):
        made.crop(-1000)
        assert made.get_seq_length() == 0
        assert made.nbytes("packed") == made.nbytes("window") == 0
        feed(made, Rows(lengths))
        fresh = fed_cache_of(lengths, name, "pre_rope")
        assert same(schemes.tensors_of(made), schemes.tensors_of(fresh))


def test_crop_arguments() -> None:
    made = fed_cache_of([40, 33])
    before = schemes.snapshot(made)
    made.crop(0)
    assert same(before, schemes.snapshot(made))
    with pytest.raises(ValueError, match=r"crop\(5\): pass a negative number"):
        made.crop(5)
    assert same(before, schemes.snapshot(made))
    with pytest.raises(ValueError, match=r"to be left with 5 tokens: crop\(5 - get_seq_length\(\)\)"):
        made.crop(5)
    made.crop(35 - made.get_seq_length())
    assert made.get_seq_length() == 35
    fed_cache().crop(-3)


def test_crop_counts_in_tensors() -> None:
    """Transformers 5.17 hands assisted decoding's count over as a tensor."""
    made = fed_cache_of([40])
    made.crop(-torch.tensor(5))
    assert type(made.ledger.columns) is type(made.get_seq_length()) is int
    feed(made, Rows([40]), cuts=(37,))
    assert same(schemes.tensors_of(made), schemes.tensors_of(fed_cache_of([40])))


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_deep_crop_with_fitted_predictors(name: str) -> None:
    model = schemes.tiny(name)
    made = schemes.opened(schemes.aqua(name), model)
    ids = token_ids(2, 60)
    run_model(model, made, ids, torch.ones_like(ids), step=60)
    wanted = [expected_window(made, row, 25) for row in (0, 1)]
    made.crop(-35)
    for row, (blocks, windows, _) in enumerate(wanted):
        assert int(made.ledger.blocks[row]) == blocks == 2
        assert same(schemes.window_row(made, row), windows)
    assert made.record.returned_tokens == 10
    with torch.no_grad():
        logits = model(ids[:, 25:], past_key_values=made).logits
        wanted_logits = model(ids).logits[:, 25:]
    assert 0 < float((logits - wanted_logits).abs().mean()) < float(wanted_logits.abs().mean())


# Rows: select, repeat, reorder.

ROW_CHANGES: dict[str, Callable[[Any], None]] = {
    "select": lambda c: c.batch_select_indices(torch.tensor([3, 0])),
    "select short rows": lambda c: c.batch_select_indices(torch.tensor([2, 3])),
    "select the shortest": lambda c: c.batch_select_indices(torch.tensor([3])),
    "select by mask": lambda c: c.batch_select_indices(torch.tensor([False, True, True, False])),
    "select again and again": lambda c: c.batch_select_indices(torch.tensor([1, 1, 3, 0, 2])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "reorder": lambda c: c.reorder_cache(torch.tensor([2, 2, 0, 1])),
}


@every_frame
@pytest.mark.parametrize("change", ROW_CHANGES)
def test_rows_change_as_in_dynamic_cache(change: str, frame: str) -> None:
    model, mask = schemes.tiny("qwen3"), left_mask([52, 33, 14, 3])
    ids = token_ids(*mask.shape) * mask
    made, plain = schemes.make(model, frame=frame), DynamicCache(config=model.config)
    logits = []
    for used in (made, plain):
        run_model(model, used, ids, mask, step=52)
        ROW_CHANGES[change](used)
        kept = selected(mask, change)
        more = torch.cat([kept, kept.new_ones(len(kept), 12)], 1)
        positions = (more.cumsum(1) - 1).clamp_min(0)
        new = token_ids(len(kept), 12, seed=1)
        out = []
        for i in range(12):
            column = 52 + i
            with torch.no_grad():
                step = model(
                    new[:, i : i + 1],
                    attention_mask=more[:, : column + 1],
                    position_ids=positions[:, column : column + 1],
                    past_key_values=used,
                )
            out.append(step.logits)
        logits.append(torch.cat(out, 1))
    assert torch.equal(*logits)
    check_storage(made)


def selected(mask: Tensor, change: str) -> Tensor:
    """The mask's rows after that change."""

    class Rows:
        def batch_select_indices(self, rows: Tensor) -> None:
            self.left = mask[rows]

        def batch_repeat_interleave(self, repeats: int) -> None:
            self.left = mask.repeat_interleave(repeats, 0)

        reorder_cache = batch_select_indices

    rows: Any = Rows()
    ROW_CHANGES[change](rows)
    return rows.left


@pytest.mark.parametrize("name", ["higgs-2", "aqua-kv"])
def test_selected_rows_are_what_they_would_be_alone(name: str) -> None:
    rows, made = Rows([70, 45, 30]), fed_cache_of([70, 45, 30], name)
    made.batch_select_indices(torch.tensor([2, 1]))
    for kept, row in enumerate((2, 1)):
        single = alone(name, "post_rope", rows, row)
        assert same(schemes.packed_row(made, kept), schemes.packed_row(single, 0))
        assert same(schemes.window_row(made, kept), schemes.window_row(single, 0))
    check_storage(made)


@pytest.mark.parametrize("rows", [1, 3])
def test_another_batch_size_is_refused(rows: int) -> None:
    made = fed_cache_of([40, 33])
    before = schemes.snapshot(made)
    with pytest.raises(KVCalError, match=f"cache holds 2 rows, the model was called with {rows}.*reset"):
        FED(*Rows([41] * rows).columns(torch.ones(rows, 1, dtype=torch.bool)), past_key_values=made,
            position_ids=torch.full((rows, 1), 40))  # fmt: skip
    assert same(before, schemes.snapshot(made))


# Reset, copy, offload.


@every_frame
@pytest.mark.parametrize("name", SCHEMES)
def test_reset_and_used_again_is_fresh(name: str, frame: str) -> None:
    made = fed_cache_of([60, 33], name, frame)
    made.crop(-30)
    made.reset()
    assert made.get_seq_length() == made.nbytes() == made.record.returned_tokens == 0
    feed(made, Rows([50, 31, 9]))
    assert same(schemes.snapshot(made), schemes.snapshot(fed_cache_of([50, 31, 9], name, frame)))


def test_another_prompt_on_a_full_cache_says_what_to_do() -> None:
    """generate() takes what the cache holds off the prompt: of a much shorter one nothing is left."""
    model = schemes.tiny("llama")
    with schemes.make(model) as made:
        model.generate(token_ids(1, 60), past_key_values=made, max_new_tokens=2, do_sample=False)
        with pytest.raises(KVCalError, match=r"no new token; .* cache\.reset\(\)"):
            model.generate(token_ids(1, 20), past_key_values=made, max_new_tokens=2, do_sample=False)
        made.reset()
        model.generate(token_ids(1, 20), past_key_values=made, max_new_tokens=2, do_sample=False)


@pytest.mark.filterwarnings("error")
def test_members_keep_the_names_that_they_had() -> None:
    made = fed_cache()
    for owner, names in ((made, former_names.OF_CACHES), (made.compressed_layers[0], former_names.OF_LAYERS)):
        for former, now in names.items():
            assert getattr(owner, former) == attrgetter(now)(owner), former
    assert made.own_layers == made.layers and made.workspace(torch.device("cpu")) is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
def test_a_cache_is_copied_deeply_or_not_at_all(way: Callable[[Any], Any]) -> None:
    made = fed_cache()
    before = schemes.snapshot(made)
    with pytest.raises(KVCalError, match=r"save the bundle and run the prompt again, or take copy\.deepcopy\(cache\)"):
        way(made)
    assert same(before, schemes.snapshot(made)) and same(before, schemes.snapshot(copy.deepcopy(made)))


@pytest.mark.parametrize("name", ["higgs-2", "aqua-kv"])
def test_a_copy_is_independent(name: str) -> None:
    made = fed_cache_of([60, 33], name, "pre_rope")
    before, twin = schemes.snapshot(made), copy.deepcopy(made)
    assert same(before, schemes.snapshot(twin))
    shared = {t.untyped_storage().data_ptr() for t in schemes.tensors_of(made)} & {
        t.untyped_storage().data_ptr() for t in schemes.tensors_of(twin)
    }
    assert shared <= {0}
    feed(twin, Rows([75, 48]), cuts=(61, 70))
    twin.crop(-60)
    assert same(before, schemes.snapshot(made))
    twin = copy.deepcopy(made)
    twin.reset()
    seen = feed(made, Rows([75, 48]))
    feed(twin, Rows([60, 33]))
    assert all(same(a, b) for a, b in zip(seen, feed(twin, Rows([75, 48])), strict=True))


def test_a_copy_serves_generate() -> None:
    """One prompt, several continuations."""
    model, ids = schemes.tiny("llama"), token_ids(1, 50)
    made = schemes.make(model, "higgs-3")
    run_model(model, made, ids[:, :-1], torch.ones(1, 49, dtype=torch.long), step=49)
    options = {"max_new_tokens": 12, "do_sample": False}
    first = model.generate(ids, past_key_values=copy.deepcopy(made), **options)
    assert made.get_seq_length() == 49
    assert torch.equal(first, model.generate(ids, past_key_values=copy.deepcopy(made), **options))
    assert torch.equal(first, model.generate(ids, past_key_values=made, **options))


@every_frame
@pytest.mark.parametrize("name", ["exact-32", "aqua-kv"])
def test_offload(name: str, frame: str) -> None:
    rows = Rows([60, 33])
    made, plain = fed_cache(name, frame, offload=True), fed_cache(name, frame)
    for used in (made, plain):
        feed(used, rows, cuts=(40, 41))
        used.crop(-30)
        used.batch_repeat_interleave(2)
    assert same(schemes.snapshot(made), schemes.snapshot(plain))
    assert {t.device.type for t in schemes.tensors_of(made)} == {"cpu"}
    made.layers[0].prefetch()


# Hooks and other people's forwards.


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"kernels": "torch", "max_length": 96}], ids=str)
def test_storage_is_free_with_the_last_reference(options: dict[str, Any]) -> None:
    """A server's next cache needs the memory now, not after a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = TINY["llama"]()
        kept = KVCalCache(schemes.scheme(model, "uniform-2"), model, **options)
        model.generate(token_ids(2, 60), past_key_values=kept, max_new_tokens=4, do_sample=False)
        storage = [weakref.ref(t) for layer in kept.compressed_layers for t in layer.window + layer.stored("packed")]
        del kept
        assert storage and not any(one() is not None for one in storage)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", TINY)
@every_frame
def test_no_hook_remains(name: str, frame: str) -> None:
    gc.collect()
    model = schemes.tiny(name)
    before = schemes.hook_count(model)
    with schemes.make(model, frame=frame) as made:
        assert schemes.hook_count(model) > before
        model.generate(token_ids(1, 30), past_key_values=made, max_new_tokens=2, do_sample=False)
    assert schemes.hook_count(model) == before
    made.close()
    dropped = KVCalCache(schemes.scheme(model, frame=frame), model)
    model.generate(token_ids(1, 30), past_key_values=dropped, max_new_tokens=2, do_sample=False)
    assert schemes.hook_count(model) > before
    del dropped
    gc.collect()
    assert schemes.hook_count(model) == before


def test_hooks_go_when_a_block_ends_in_an_error() -> None:
    model = schemes.tiny("llama")
    before = schemes.hook_count(model)
    with pytest.raises(RuntimeError, match="mine"), schemes.make(model):
        raise RuntimeError("mine")
    assert schemes.hook_count(model) == before


def test_a_cache_may_be_collected_during_anothers_forward() -> None:
    """Python collects garbage when it likes; torch looks up a pre-hook's kind after it has listed the hooks."""
    model = TINY["llama"]()
    early = model.model.register_forward_pre_hook(lambda module, args: [gc.collect(), None][1])
    dropped = KVCalCache(schemes.scheme(model), model)
    with schemes.make(model) as made:
        del dropped
        run_model(model, made, token_ids(1, 40), torch.ones(1, 40, dtype=torch.long), step=20)
    early.remove()
    assert schemes.hook_count(model) == 0


def test_a_closed_cache_says_so() -> None:
    model, ids = schemes.tiny("llama"), token_ids(1, 40)
    with schemes.make(model) as made:
        run_model(model, made, ids, torch.ones_like(ids), step=40)
    with pytest.raises(KVCalError, match="layer 0: this cache was closed; make one with load_cache"):
        model(ids[:, :1], past_key_values=made)


@every_frame
def test_a_cache_on_another_model_says_so(frame: str) -> None:
    made = schemes.make(schemes.tiny("llama"), frame=frame)
    with pytest.raises(KVCalError, match="belongs to another model"):
        TINY["llama"]()(token_ids(1, 40), past_key_values=made)
    with pytest.raises(KVCalError, match="belongs to another model"):
        schemes.tiny("qwen2").generate(token_ids(1, 40), past_key_values=made, max_new_tokens=2)


def test_schemes_of_other_models_are_refused() -> None:
    model = schemes.tiny("smollm3")  # four layers
    with pytest.raises(KVCalError, match="scheme of 3 layers, model of 4"):
        KVCalCache(schemes.scheme(schemes.tiny("llama")), model)
    wide = build("Llama", num_key_value_heads=4)
    with pytest.raises(KVCalError, match="keys have 4 heads of 16, the bundle was made for 2 of 16"):
        wide(token_ids(1, 40), past_key_values=KVCalCache(schemes.scheme(schemes.tiny("llama")), wide))


@every_frame
def test_two_caches_on_one_model(frame: str) -> None:
    """Forwards in turn, of different batch sizes, with a forward without any cache in between."""
    model = schemes.tiny("smollm3")
    inputs = [(token_ids(1, 60, seed=1), left_mask([60])), (token_ids(3, 44, seed=2), left_mask([44, 30, 5]))]
    wanted = [stepwise(model, schemes.make(model, "higgs-2", frame), *each) for each in inputs]
    both = [stepwise(model, schemes.make(model, "higgs-2", frame), *each) for each in inputs]
    lists: list[list[Tensor]] = [[], []]
    running = [0, 1]
    while running:
        for which in list(running):
            step = next(both[which], None)
            running.remove(which) if step is None else lists[which].append(step)
        with torch.no_grad():
            model(token_ids(2, 3))
    assert all(same(got, alone) for got, alone in zip(lists, wanted, strict=True))


def stepwise(model: Any, made: KVCalCache, ids: Tensor, mask: Tensor) -> Iterator[Tensor]:
    """Logits, forward by forward."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for start, stop in schemes.pieces(0, ids.shape[1], [30, *range(31, 60)]):
        part = slice(start, stop)
        with torch.no_grad():
            out = model(
                ids[:, part] * mask[:, part],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, part],
                past_key_values=made,
            )
        yield out.logits.where(mask[:, part, None].bool(), 0)


def test_two_caches_in_two_threads() -> None:
    model = schemes.tiny("llama")
    prompts = [token_ids(1, 45, seed=1), token_ids(2, 38, seed=2)]
    options = {"max_new_tokens": 25, "do_sample": False}
    wanted = [model.generate(ids, past_key_values=schemes.make(model, "higgs-3"), **options) for ids in prompts]
    got: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(2):
            made = schemes.make(model, "higgs-3")
            got[which].append(model.generate(prompts[which], past_key_values=made, **options))

    threads = [threading.Thread(target=work, args=(which,)) for which in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(got[which], [wanted[which]] * 2) for which in got)


class Broken(Exception):
    pass


def break_off(model: Any, where: str, ids: Tensor, **inputs: Any) -> None:
    """A forward in the middle of which that part of the decoder fails."""

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise Broken

    part = model.get_submodule(where) if where == "lm_head" else model.model.get_submodule(where)
    part.forward = breaks
    with torch.no_grad(), pytest.raises(Broken):
        model(ids, **inputs)
    del part.forward


@every_frame
@pytest.mark.parametrize("filled", [0, 45])
@pytest.mark.parametrize(
    "where", ["layers.0.self_attn.k_proj", "layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "norm", "lm_head"]
)
def test_after_a_forward_that_broke_off(where: str, filled: int, frame: str) -> None:
    model, ids = schemes.tiny("llama"), token_ids(2, 60)
    made = schemes.make(model, "higgs-2", frame)
    if filled:
        run_model(model, made, ids[:, :filled], torch.ones(2, filled, dtype=torch.long), step=filled)

    break_off(model, where, ids[:, filled:50], attention_mask=torch.ones_like(ids[:, :50]), past_key_values=made)
    complete = where in (
        "layers.0.self_attn.k_proj",
        "layers.2.mlp",
        "norm",
        "lm_head",
    )  # no layer saw the tokens, or all
    assert complete == (made.get_seq_length() == made.layers[-1].get_seq_length())
    if where != "layers.0.self_attn.k_proj":  # else nothing has changed
        for mask in (None, torch.ones_like(ids[:, :51])):
            with pytest.raises(KVCalError, match="an earlier forward broke off; call reset"):
                model(ids[:, 50:51], attention_mask=mask, past_key_values=made)
    made.reset()
    heals(model, made, ids, frame)


def heals(model: Any, made: KVCalCache, ids: Tensor, frame: str) -> None:
    fresh = schemes.make(model, "higgs-2", frame)
    for used in (made, fresh):
        run_model(model, used, ids, torch.ones_like(ids), step=20)
    assert same(schemes.snapshot(made), schemes.snapshot(fresh))


@pytest.mark.parametrize("where", ["layers.1.mlp", "lm_head"])
@pytest.mark.parametrize("change", ["crop", "select", "repeat"])
def test_a_broken_cache_stays_broken(change: str, where: str) -> None:
    """Operations between the broken forward and the next say so, and do not hide it; a copy is as broken."""
    model, ids = schemes.tiny("llama"), token_ids(2, 60)
    made = schemes.make(model, "higgs-2")
    run_model(model, made, ids[:, :45], torch.ones(2, 45, dtype=torch.long), step=45)

    break_off(model, where, ids[:, 45:], past_key_values=made)
    change_rows = {
        "crop": lambda: made.crop(-15),
        "select": lambda: made.batch_select_indices(torch.tensor([1, 0])),
        "repeat": lambda: made.batch_repeat_interleave(1),
    }
    with pytest.raises(KVCalError, match="broke off; call reset"):
        change_rows[change]()
    with copy.deepcopy(made) as twin:
        for broken in (made, twin):
            with pytest.raises(KVCalError, match="broke off; call reset"):
                model(ids[:, 45:], past_key_values=broken)


# Bytes.


@pytest.mark.parametrize("name", [*CODEC_MAKERS, "aqua-kv", "aqua-kv-mlp"])
def test_bits_per_value_are_those_of_the_formula(name: str) -> None:
    found = SCHEMES[name]("post_rope") if name in SCHEMES else schemes.scheme(FED, name)
    with KVCalCache(found, FED) as made:
        feed(made, Rows([100, 100]), cuts=(60, 61, 62))
        assert made.packed_values() == 2 * 10 * BLOCK * LAYERS * 2 * HEADS * DIM
        if not found.ragged:  # whose formula is what calibration expects
            assert made.bits_per_value() == pytest.approx(found.bits_per_value(), rel=0.01)
        assert made.nbytes("packed") * 8 / made.packed_values() == made.bits_per_value()
        check_storage(made)


BITS = {  # by hand, for 2 heads of 32 channels in blocks of 8 tokens
    "exact-16": 16,
    "exact-32": 32,
    "uniform-4": 4 + 32 / 32,
    "uniform-2-channel": 2 + 32 / 8,
    "higgs-2": 2 + 16 / 32,  # a norm a head
    "higgs-3": 3 + 16 / 32,
    "higgs-4-wide": 4 + 16 / 64,
    "higgs-2-d4": 2 + 16 / 32,
}


@pytest.mark.parametrize("name", BITS)
def test_bits_per_value_by_hand(name: str) -> None:
    with KVCalCache(schemes.scheme(FED, name), FED) as made:
        assert made.bits_per_value() != made.bits_per_value()  # nan: nothing is packed yet
        feed(made, Rows([90]))
        assert made.bits_per_value() == pytest.approx(BITS[name], rel=0.01)


def test_windows_do_not_keep_the_prefill_alive() -> None:
    made = fed_cache_of([3000], "higgs-2")
    tokens = SINK + RECENT + (3000 - SINK - RECENT) % BLOCK
    assert made.nbytes("window") == LAYERS * 2 * HEADS * DIM * tokens * 4
    assert storage_bytes([t for layer in made.compressed_layers for t in layer.stored("window")]) == made.nbytes(
        "window"
    )


def test_nbytes_counts_layers_left_alone() -> None:
    model = mixed_model()
    made = schemes.make(model, "higgs-2")
    ids = token_ids(1, 60)
    run_model(model, made, ids, torch.ones_like(ids), step=60)
    plain = [t for layer in made.layers[1:] for t in (layer.keys, layer.values)]
    own = made.compressed_layers[0].stored("window")
    assert made.nbytes("window") == storage_bytes(plain + own)
    assert made.nbytes() == sum(made.nbytes(part) for part in ("packed", "window", "bookkeeping"))
    with pytest.raises(KVCalError, match="allowed are packed, window, bookkeeping"):
        made.nbytes("codes")


def test_the_canary_that_compression_happens() -> None:
    """A two-bit cache is small, and not the same; the exact one is the same."""
    model, ids = schemes.tiny("llama"), token_ids(1, 300)
    mask, logits = torch.ones_like(ids), {}
    for name in ("higgs-2", "exact-32"):
        made = schemes.make(model, name)
        run_model(model, made, ids[:, :-1], mask[:, :-1], step=299)
        with torch.no_grad():
            logits[name] = model(ids[:, -1:], past_key_values=made).logits
        full = 2 * 3 * 2 * 16 * 300  # bytes of keys and values in fp16
        assert (made.nbytes("packed") < 2 * full / 4) == (name == "higgs-2")
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=plain)
        wanted = model(ids[:, -1:], past_key_values=plain).logits
    assert torch.equal(logits["exact-32"], wanted)
    assert float((logits["higgs-2"] - wanted).abs().max()) > 1e-3


def test_describe() -> None:
    made = fed_cache_of([60, 33], "aqua-kv")
    told = made.describe()
    assert told["tokens"] == 60
    assert told["packed_blocks"] == [5, 1]
    assert told["mask"] == "2-D or none"
    assert [row["state"] for row in told["layers"]] == ["applied"] * LAYERS
    assert "linear(k1) + higgs" in told["layers"][1]["key"]
    assert told["nbytes"]["packed"] == made.nbytes("packed") > 0
    assert json.loads(json.dumps(told)) == told
    assert repr(made) == "KVCalCache(60 tokens, 3 of 3 layers compressed)"


# Refusals.


@cache
def mixed_model(full: int = 0) -> Any:
    """Three layers, one of which sees everything; the others the last 16 tokens."""
    types = ["full_attention" if index == full else "sliding_attention" for index in range(3)]
    return build("Qwen2", use_sliding_window=True, sliding_window=16, layer_types=types)


CONFIGS: dict[str, tuple[Callable[[], Any], dict[int, str]]] = {
    "mistral": (
        lambda: transformers.MistralConfig(num_hidden_layers=2),
        dict.fromkeys((0, 1), "sliding-attention layer (window 4096) keeps its own short cache"),
    ),
    "qwen2 mixed": (
        lambda: mixed_model().config,
        dict.fromkeys((1, 2), "sliding-attention layer (window 16) keeps its own short cache"),
    ),
    "qwen2 with an unused window": (
        lambda: transformers.Qwen2Config(num_hidden_layers=2, sliding_window=16, use_sliding_window=False),
        {},
    ),
    "shared": (
        lambda: transformers.Gemma3nTextConfig(num_hidden_layers=5, num_kv_shared_layers=1),
        {4: "shares the keys and values of an earlier layer"}
        | dict.fromkeys(range(4), "sliding-attention layer (window 512) keeps its own short cache"),
    ),
    "mla": (
        lambda: transformers.DeepseekV3Config(num_hidden_layers=2),
        dict.fromkeys((0, 1), "multi-head latent attention caches a latent, not keys and values"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_that_cannot_be_compressed(name: str) -> None:
    config, reasons = CONFIGS[name]
    assert hf.unsupported_layers(config()) == reasons


def test_a_model_without_a_supported_layer() -> None:
    with pytest.raises(
        UsageError, match=r"mistral: no layer can be compressed: sliding-attention layer \(window 4096\)"
    ):
        Preset("higgs-2", "higgs-2").scheme(build("Mistral"))


@every_frame
@pytest.mark.parametrize("full", [0, 1, 2])
@pytest.mark.parametrize("name", ["exact-32", "higgs-2"])
def test_mixed_layers(name: str, full: int, frame: str) -> None:
    """Sliding layers stay Transformers' own; with the exact codec nothing changes; describe() says why."""
    model, mask = mixed_model(full), left_mask([50, 33, 5])
    ids = token_ids(*mask.shape) * mask
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "output_logits": True}
    with schemes.make(model, name, frame) as made:
        got = model.generate(ids, past_key_values=made, return_dict_in_generate=True, **options)
        assert made.ledger.blocks.tolist() == [6, 4, 0]
        layers = made.describe()["layers"]
    plain = DynamicCache(config=model.config)
    wanted = model.generate(ids, past_key_values=plain, return_dict_in_generate=True, **options)
    assert same(got.logits, wanted.logits) == (name == "exact-32")
    assert [row["state"] for row in layers] == ["applied" if index == full else "skipped" for index in range(3)]
    assert {row.get("why") for row in layers} == {None, CONFIGS["qwen2 mixed"][1][1]}


@pytest.mark.parametrize("full", [0, 1, 2])
@pytest.mark.parametrize("broken", [0, 1])
def test_mixed_layers_after_a_forward_that_broke_off(full: int, broken: int) -> None:
    model, ids = mixed_model(full), token_ids(1, 60)
    made = schemes.make(model)
    run_model(model, made, ids[:, :45], torch.ones(1, 45, dtype=torch.long), step=45)
    break_off(model, f"layers.{broken}.mlp", ids[:, 45:46], past_key_values=made)
    with pytest.raises(KVCalError, match="broke off; call reset"):
        model(ids[:, 46:47], past_key_values=made)


def test_mixed_layers_that_cannot_be_cropped() -> None:
    """A full sliding window has forgotten what a crop would need: nothing changes, not even the layers that could."""
    model, ids = mixed_model(), token_ids(1, 45)
    made = schemes.make(model)
    run_model(model, made, ids, torch.ones_like(ids), step=45)
    before = schemes.snapshot(made)
    with pytest.raises(RuntimeError, match="does not track past states"):
        made.crop(-3)
    assert same(before, schemes.snapshot(made))


def test_mixed_layers_under_prompt_lookup() -> None:
    model, ids = mixed_model(), token_ids(1, 24).repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 20, "do_sample": False}
    got = model.generate(ids, past_key_values=schemes.make(model), **options)
    plain = DynamicCache(config=model.config)
    assert torch.equal(got, model.generate(ids, past_key_values=plain, **options))


def test_presets_say_what_they_skip() -> None:
    found = PRESETS["higgs-2"].scheme(mixed_model())
    assert [pair is None for pair in found.layers] == [False, True, True]
    assert found.skipped == CONFIGS["qwen2 mixed"][1]


@every_frame
def test_a_mask_of_the_new_tokens_only(frame: str) -> None:
    model, ids = schemes.tiny("llama"), token_ids(1, 50)
    made = schemes.make(model, "higgs-2", frame)
    run_model(model, made, ids[:, :40], torch.ones(1, 40, dtype=torch.long), step=40)
    before = schemes.snapshot(made)
    with pytest.raises(KVCalError, match=r"attention_mask has 10 columns, needs 50 .*mask of the whole sequence"):
        model(ids[:, 40:], attention_mask=torch.ones(1, 10, dtype=torch.long), past_key_values=made)
    assert same(before, schemes.snapshot(made))
    with torch.no_grad():
        model(ids[:, 40:], past_key_values=made)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SCHEMES)
def test_not_a_number(name: str, bad: float, role: str) -> None:
    rows = Rows([60, 50])
    (rows.keys if role == "key" else rows.values)[1][2, 1, 10, 3] = bad  # layer 2, head 1
    made = fed_cache(name)
    with pytest.raises(NonFiniteError, match=f"layer 2, {role} head 1: a NaN or infinity reached the cache"):
        feed(made, rows)
    with pytest.raises(KVCalError, match="broke off; call reset"):
        feed(made, Rows([61, 51]), left_mask([61, 51]).bool())
    made.reset()
    feed(made, Rows([60, 50]))


@pytest.mark.parametrize("next_use", ["forward", "describe", "crop", "copy"])
def test_what_cannot_be_packed_is_said_even_if_the_forward_breaks_off(next_use: str) -> None:
    """By the next use, and until reset() no other is possible."""
    model, ids = schemes.tiny("llama"), token_ids(1, 60)
    made = schemes.make(model, "uniform-2")
    bad = model.model.embed_tokens(ids).detach().clone()
    bad[0, 7] = torch.nan

    def fail(*given: Any) -> None:
        raise MemoryError("mine")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="mine"):
        model(inputs_embeds=bad, past_key_values=made)
    hook.remove()
    use: dict[str, Any] = {
        "forward": lambda: model(ids[:, :1], past_key_values=made),
        "describe": made.describe,
        "crop": lambda: made.crop(-1),
        "copy": lambda: copy.deepcopy(made),
    }
    with pytest.raises(NonFiniteError, match="layer 0, key head 0: a NaN or infinity reached the cache"):
        use[next_use]()
    for _ in range(2):
        with pytest.raises(KVCalError, match=r"broke off; call reset.* It ended with: layer 0, key head 0"):
            model(ids[:, :1], past_key_values=made)
    made.reset()
    model(ids, past_key_values=made)
    assert made.ledger.blocks.tolist() == [5]


def test_scales_beyond_float16_are_refused_at_the_end_of_the_forward() -> None:
    model, ids = copy.deepcopy(schemes.tiny("llama")), token_ids(1, 60)
    made = schemes.make(model, "uniform-2")
    weight = model.model.layers[2].self_attn.v_proj.weight
    quiet = weight.data.clone()
    weight.data *= 1e7
    with pytest.raises(NonFiniteError, match=r"^layer 2: .*(scale|minimum) of .*e\+.* does not fit") as raised:
        model(ids, past_key_values=made)
    assert raised.value.layer == 2
    weight.data.copy_(quiet)
    with pytest.raises(KVCalError, match="broke off; call reset"):
        model(ids, past_key_values=made)


def test_a_mask_of_four_dimensions() -> None:
    """Then nobody says what is padding: every token counts as real, as in DynamicCache, and describe() says so."""
    model, ids = schemes.tiny("llama"), token_ids(2, 40)
    whole = torch.ones(41, 41, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    whole[1, :, :, :11] = False
    made, logits = schemes.make(model), []
    for used in (made, DynamicCache(config=model.config)):
        with torch.no_grad():
            model(ids, attention_mask=whole[:, :, :40, :40], past_key_values=used)
            logits.append(model(ids[:, :1], attention_mask=whole[:, :, 40:], past_key_values=used).logits)
    assert torch.equal(*logits)
    assert made.ledger.blocks.tolist() == [2, 2]
    assert "every token counts as real" in made.describe()["mask"]


@every_frame
def test_gradient_mode(frame: str) -> None:
    """Results are those of no_grad, and the cache holds no graph."""
    model, ids = schemes.tiny("llama"), token_ids(1, 50)
    made, quiet = (schemes.make(model, "higgs-2", frame) for _ in range(2))
    logits = []
    for start, stop in schemes.pieces(0, 50, (40, 41)):
        logits.append(model(ids[:, start:stop], past_key_values=made).logits)
    with torch.no_grad():
        for grown, (start, stop) in zip(logits, schemes.pieces(0, 50, (40, 41)), strict=True):
            assert torch.equal(grown, model(ids[:, start:stop], past_key_values=quiet).logits)
    logits[-1].sum().backward()
    model.zero_grad()
    assert not any(t.requires_grad for t in schemes.tensors_of(made))


@every_frame
@pytest.mark.parametrize("name", LOSSY)
def test_autocast_changes_no_packed_byte(name: str, frame: str) -> None:
    rows = Rows([70, 33])
    plain = fed_cache_of([70, 33], name, frame)
    with fed_cache(name, frame) as cast, torch.autocast("cpu", dtype=torch.bfloat16):
        feed(cast, rows, None, [40])
    for row in range(2):
        assert same(schemes.packed_row(plain, row), schemes.packed_row(cast, row))
