"""The contract every codec keeps inside a cache: walks CODECS, in the configurations of test_codecs.

One configuration a codec, and every one that reads run-time statistics. On `Fed`, which hands over given keys and
values, so that each comparison is bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import CODECS, Codec, Predicted, Role, Shape, Uniform
from kvcal_artifacts.errors import NonFiniteError
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from tests.artifacts.codecs.test_codecs import CONFIGURATIONS, roles_of, takes
from tests.support import schemes
from tests.support.schemes import BLOCK, FED_SHAPE, LAYERS, RECENT, SINK, WINDOWS, Fed, Rows, feed, left_mask, same

FED = Fed()
LENGTHS = [68, 45, 20, 3]
BLOCKS = [max(0, (length - SINK - RECENT) // BLOCK) for length in LENGTHS]


def tried() -> Iterator[tuple[str, str]]:
    for name in CODECS:
        for number, (label, make) in enumerate(CONFIGURATIONS[name].items()):
            role = roles_of(name, label)[0]
            if not number or (takes(make, FED_SHAPE, role) and make(FED_SHAPE, role).stats):
                yield name, label


every_codec = pytest.mark.parametrize("which", list(tried()), ids="-".join)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    schemes.close_all()


def made(name: str, label: str, role: Role, shape: Shape = FED_SHAPE) -> Codec:
    """For a role that the codec is not for: KIVI's."""
    make = CONFIGURATIONS[name][label]
    if role not in roles_of(name, label) or not takes(make, shape, role):
        return Uniform(shape, role, 2, BLOCK, "token" if role == "key" else "channel")
    return make(shape, role)


@cache
def scheme(which: tuple[str, str]) -> Scheme:
    """The same in all layers; what is predicted has the codec inside in the first, which nothing predicts."""
    key, value = made(*which, "key"), made(*which, "value")
    first = LayerCodecs(*(codec.inner if isinstance(codec, Predicted) else codec for codec in (key, value)))
    return Scheme(WINDOWS, "post_rope", (first, *[LayerCodecs(key, value)] * (LAYERS - 1)))


def filled(which: tuple[str, str], rows: Rows, cuts: object = ()) -> KVCalCache:
    found = schemes.opened(scheme(which), FED)
    feed(found, rows, cuts=cuts)  # type: ignore[arg-type]
    return found


@cache
def alone(which: tuple[str, str], row: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Packed tensors and windows of that row of LENGTHS by itself, fed whole."""
    single = filled(which, Rows(LENGTHS).one(row))
    return schemes.packed_row(single, 0), schemes.window_row(single, 0)


def check_rows(found: KVCalCache, which: tuple[str, str], rows: list[int]) -> None:
    """found holds these rows of LENGTHS, in this order, as they are by themselves."""
    assert found.ledger.blocks.tolist() == [BLOCKS[row] for row in rows]
    for here, row in enumerate(rows):
        packed, windows = alone(which, row)
        assert same(schemes.packed_row(found, here), packed)
        assert same(schemes.window_row(found, here), windows)


@every_codec
@pytest.mark.parametrize("cuts", [(), range(34, 58), (9, 40, 41, 66)], ids=["whole", "ones", "pieces"])
def test_append_in_any_pieces_gives_the_same_bytes(which: tuple[str, str], cuts: object) -> None:
    check_rows(filled(which, Rows(LENGTHS), cuts), which, [0, 1, 2, 3])


@every_codec
def test_stored_bytes_are_those_declared(which: tuple[str, str]) -> None:
    found = filled(which, Rows(LENGTHS).one(0))
    declared = BLOCKS[0] * sum(codec.block_bytes() for pair in found.scheme.layers for codec in (pair.key, pair.value))  # type: ignore[union-attr]
    assert found.nbytes("packed") > 0
    if not found.scheme.ragged:  # whose declared size is what calibration expects
        assert found.nbytes("packed") == declared
        assert found.bits_per_value() == pytest.approx(found.scheme.bits_per_value())


@every_codec
def test_rows_are_reordered_selected_and_repeated(which: tuple[str, str]) -> None:
    """And what comes behind is coded as if they had always lain so."""
    rows, short = Rows(LENGTHS), left_mask(LENGTHS).bool()[:, :-6]
    orders = {"beams": [2, 2, 0, 1], "some": [3, 0], "twice": [0, 0, 1, 1, 2, 2, 3, 3]}
    for how, order in orders.items():
        found, index = schemes.opened(scheme(which), FED), torch.tensor(order)
        feed(found, rows, short)
        if how == "beams":
            found.reorder_cache(index)
        elif how == "some":
            found.batch_select_indices(index)
        else:
            found.batch_repeat_interleave(2)
        moved = Rows([LENGTHS[row] for row in order])
        moved.keys, moved.values = ([part[row] for row in order] for part in (rows.keys, rows.values))
        feed(found, moved, left_mask(LENGTHS).bool()[index])
        check_rows(found, which, order)


@every_codec
def test_crop_keeps_whole_blocks(which: tuple[str, str]) -> None:
    found = filled(which, Rows(LENGTHS))
    before = [schemes.packed_row(found, row) for row in range(4)]
    found.crop(-37)  # 31, 8, 0 and 0 real tokens stay
    assert found.ledger.blocks.tolist() == [3, 0, 0, 0]
    assert found.ledger.window.tolist() == [3, 4, 0, 0]
    for row, blocks in enumerate([3, 0, 0, 0]):
        assert same(schemes.packed_row(found, row), [t[:, :blocks] for t in before[row]])
    feed(found, Rows(LENGTHS))
    assert found.ledger.blocks.tolist() == BLOCKS


@every_codec
def test_state_through_a_bundle(which: tuple[str, str], tmp_path: Path) -> None:
    """Written, read and run: same bytes in the cache, same keys and values for attention."""
    own = scheme(which)
    path = tmp_path / "x.kvcal.safetensors"
    Bundle(Fingerprint.of(FED, None), own, {}, {}).write(path)
    read = load_bundle(path)
    assert read.to_bytes() == path.read_bytes()
    rows, found = Rows(LENGTHS), []
    for each in (own, read.scheme):
        with KVCalCache(each, FED) as filling:
            seen = feed(filling, rows, cuts=(50,))
            found.append([*schemes.packed_row(filling, 0), *(t for pair in seen for t in pair)])
    assert same(*found)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_is_refused_in_one_line(which: tuple[str, str], bad: float) -> None:
    rows = Rows([40])
    rows.values[0][1, 1, SINK + 3, 5] = bad
    with pytest.raises(NonFiniteError, match="layer 1, value head 1: a NaN or infinity") as raised:
        filled(which, rows)
    assert "\n" not in str(raised.value)


def test_every_codec_is_tried_for_what_it_is() -> None:
    assert {name for name, _ in tried()} == set(CODECS)
    for which in tried():
        assert CODECS[which[0]] in {type(made(*which, role)) for role in roles_of(*which)}


def replaced(rows: Rows, kept: list[int]) -> Rows:
    """Other tokens behind the first `kept` of each row."""
    other = Rows(rows.lengths, seed=50)
    for row, count in enumerate(kept):
        other.keys[row][:, :, :count] = rows.keys[row][:, :, :count]
        other.values[row][:, :, :count] = rows.values[row][:, :, :count]
    return other


@every_codec
@pytest.mark.parametrize(
    ("lengths", "step"),
    [([67], 3), ([26], 5), ([67, 43, 20], 4), ([67, 43, 20], 67)],
    ids=["one", "no-block", "ragged", "prompt"],
)
def test_a_crop_is_as_if_the_tokens_had_never_come(which: tuple[str, str], lengths: list[int], step: int) -> None:
    """Speculative decoding: the last calls' tokens are taken back and others come; run-time statistics follow."""
    rows, count = Rows(lengths), 3
    found, valid = schemes.opened(scheme(which), FED), left_mask(lengths).bool()
    feed(found, rows, valid, cuts=(max(lengths) - step,))
    found.crop(-count)
    assert found.describe()["unforgotten_by_statistics"] == {"tokens": 0, "blocks": 0}
    other = replaced(rows, [length - count for length in lengths])
    feed(found, other, valid)
    wanted = schemes.opened(scheme(which), FED)
    feed(wanted, other, valid)
    longer = Rows([length + 24 for length in lengths], seed=70)
    for mine, part in zip(longer.keys + longer.values, other.keys + other.values, strict=True):
        mine[:, :, : part.shape[2]] = part
    more = torch.cat([valid, torch.ones(len(lengths), 24, dtype=torch.bool)], 1)
    for each in (found, wanted):
        feed(each, longer, more)
    for row in range(len(lengths)):
        assert same(schemes.packed_row(found, row), schemes.packed_row(wanted, row))
        assert same(schemes.window_row(found, row), schemes.window_row(wanted, row))


@every_codec
def test_a_crop_that_statistics_cannot_follow_is_told(which: tuple[str, str]) -> None:
    """A block that became due with a token that is taken back; and tokens of calls before the last."""
    if not any(pair.stats for pair in scheme(which).layers):  # type: ignore[union-attr]
        found = filled(which, Rows([60]))
        found.crop(-40)
        assert found.describe()["unforgotten_by_statistics"] == {"tokens": 0, "blocks": 0}
        return
    found = filled(which, Rows([60]))  # blocks are due at 28, 36, 44, 52, 60
    found.crop(-1)
    assert found.describe()["unforgotten_by_statistics"] == {"tokens": 0, "blocks": 1}
    queries = any(not name.startswith("key_scale") for pair in found.scheme.layers for name in pair.stats)  # type: ignore[union-attr]
    found = filled(which, Rows([67]), cuts=(64,))
    found.crop(-5)
    assert found.describe()["unforgotten_by_statistics"] == {"tokens": 2 if queries else 0, "blocks": 0}
    found.reset()
    assert found.describe()["unforgotten_by_statistics"] == {"tokens": 0, "blocks": 0}


@every_codec
@pytest.mark.parametrize("lengths", [[68, 68], LENGTHS], ids=["equal", "padded"])
def test_remembering_changes_neither_bytes_nor_what_attention_sees(which: tuple[str, str], lengths: list[int]) -> None:
    """What was decoded before is not decoded again, yet a crop into blocks or other rows must not leave anything stale."""
    plain, kept = (schemes.opened(scheme(which), FED, remember=remember) for remember in (False, True))

    def both_get(lengths: list[int], valid: torch.Tensor) -> None:
        seen = [feed(one, Rows(lengths), valid, range(36, 80, 5)) for one in (plain, kept)]
        real = valid[:, None].expand(-1, FED_SHAPE.heads, -1)
        for left, right in zip(*seen, strict=True):
            for a, b in zip(left, right, strict=True):
                torch.testing.assert_close(a[real], b[real])
        assert same(schemes.tensors_of(plain), schemes.tensors_of(kept))

    valid = left_mask(lengths).bool()
    both_get(lengths, valid)
    for one in (plain, kept):
        one.crop(-12)
    both_get(lengths, valid)
    for one in (plain, kept):
        one.reorder_cache(torch.arange(len(lengths)).flip(0))
    both_get([n + 6 for n in lengths[::-1]], torch.cat([valid.flip(0), valid.new_ones(len(lengths), 6)], 1))
    assert kept.nbytes("decoded") and not plain.nbytes("decoded")
    assert kept.nbytes("packed") == plain.nbytes("packed")
