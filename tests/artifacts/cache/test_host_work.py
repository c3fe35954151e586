"""What a decode step costs the host: copies to the devices and waits for them, counted on devices that are not there."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.support import host_work
from tests.support.counted import printed


@cache
def counted() -> tuple[dict[tuple[Any, ...], dict[str, Any]], dict[str, bool]]:
    """By path, scheme, padded, layers and devices; and whether two devices packed what one does."""
    *cases, alike = (json.loads(line) for line in printed(host_work.main).splitlines())
    return {tuple(key): found for *key, found in cases}, alike


# Copies of a step that packs nothing: of rows alike, and of a padded batch, whose indices are one copy. The reference
# path orders old columns by another, attention by the kernel is told counts. Where blocks are packed behind others
# run-time statistics of keys take none; None: nothing is packed.
COPIES = {
    ("reference", "innerq-prefill"): (0, 2, 0),
    ("reference", "squat"): (0, 2, None),
    ("fused", "innerq-prefill"): (1, 2, 0),
    ("fixed", "innerq-prefill"): (0, 0, 0),
}


@pytest.mark.parametrize(("path", "name"), COPIES)
def test_copies_and_waits_do_not_grow_with_layers(path: str, name: str) -> None:
    alone, padded, statistics = COPIES[path, name]
    settles = int(path == "fixed")  # what a recorded graph may have done meanwhile
    for (*key, wide, _layers, devices), found in counted()[0].items():
        if key == [path, name]:
            assert any(found["packs"]) == (statistics is not None)
            for up, waits, packs in zip(found["up"], found["waits"], found["packs"], strict=True):
                more = statistics if packs else 0
                assert len(up) == devices * ((padded if wide else alone) + more), up
                assert waits == devices * (1 if packs else settles)


# Of a layer in a step that packs nothing, besides attention: windows with the new token behind them, which are the next
# step's windows; where rows differ it is put behind each row's others. In the first step the factor of packed keys,
# too.
LAUNCHES = {False: 2, True: 4}


@pytest.mark.parametrize("padded", LAUNCHES)
def test_a_layer_launches_no_more_than_its_windows_need(padded: bool) -> None:
    few, many = (counted()[0]["fused", "innerq-prefill", padded, layers, 1] for layers in (2, 4))
    found = [
        (more - less) / 2
        for less, more, packs in zip(few["launches"], many["launches"], many["packs"], strict=True)
        if not packs
    ]
    assert len(found) > 2 and set(found[1:]) == {LAUNCHES[padded]}


def test_where_old_columns_lie_is_the_reference_paths_question() -> None:
    for (path, _, wide, *_), found in counted()[0].items():
        columns = [shape for up in found["up"] for shape in up if len(shape) == 2 and shape[1] > 40]
        assert bool(columns) == (path == "reference" and wide)


def test_two_devices_pack_what_one_does() -> None:
    assert counted()[1] == {"reference": True, "fused": True, "fixed": True}
