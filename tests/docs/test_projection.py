"""docs/scale/projection.py: one cell of its table by hand, and the page that shows what it prints."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcal.models.catalogue import CATALOGUE
from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def projection() -> Any:
    spec = importlib.util.spec_from_file_location("projection", ROOT / "docs" / "scale" / "projection.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["projection"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    del sys.modules["projection"]
    return module


def test_8b_on_two_gpus_by_hand(projection: Any) -> None:
    phases = {"forward": 100.0, "gram": 20.0, "encode": 40.0, "solve": 1.0, "load": 7.0, "exchange": 9.0}
    base, larger = (CATALOGUE[name].geometry for name in ("llama-3.2-3b", "llama-3.1-8b"))
    # all windows twice and the 224 training windows twice through the projections: 7,864,320 tokens
    small = 28 * 7_864_320 * 2 * 3072 * 5120 + 27 * 2_097_152 * (2 * (3072**2 + 3 * 3072 * 8192) + 4 * 3072 * 4096)
    large = 32 * 7_864_320 * 2 * 4096 * 6144 + 31 * 2_097_152 * (2 * (4096**2 + 3 * 4096 * 14336) + 4 * 4096 * 4096)
    shared = 100 * large / small + 20 * 31 / 27 + 40 * 32 / 28
    sums = 8 * (1025**2 + 1025 * 1024 + 1024 + 2049**2 + 2049 * 1024 + 1024)  # of a layer: 67 MB
    met = 32 * (2 + 2 + 2)  # each pass, two of which go over all windows, and two codecs
    weights = 2 * 8_030_261_248 / 2e9  # read for the fit, and again for the guard
    right = shared / 2 + 31 / 27 + 2 * weights + sums * 2 * 31 / 20e9 + met * 2e-3
    measured = projection.Measured(base, 28, phases)
    assert projection.seconds(larger, measured, 1, 2, projection.Assumed()) == pytest.approx(right, rel=1e-12)
    random = projection.seconds(larger, measured, 1, 2, projection.Assumed(), read=False)
    assert random == pytest.approx(right - 2 * weights, rel=1e-12)


def test_ranks_send_whole_halves(projection: Any) -> None:
    """Of 24 shards in the order of halves; the last halves are 2 + 1. Three ranks have 8 each: 6 + 2, 1 + 3 + 3 + 1,
    1 + 1 + 6.
    """
    assert [projection.sent(ranks) for ranks in (1, 2, 3, 4, 8, 24)] == [1, 2, 9, 4, 8, 24]


def test_24_ranks_of_32_have_windows(projection: Any) -> None:
    """112 batches of two training windows: 16 of their shards have five of them, the others four. The 16 batches behind
    them are a shard each, and go first to ranks with four.
    """
    assert [projection.busiest(count) * 256 for count in (1, 2, 8, 24)] == [256, 128, 32, 12]
    assert [projection.busiest(count, 224) * 224 for count in (1, 2, 8, 24)] == [224, 112, 28, 10]
    one = CATALOGUE["llama-3.1-70b"].geometry
    measured = projection.Measured(one, 80, {"forward": 240.0})
    assert projection.seconds(one, measured, 4, 8, projection.Assumed()) == projection.seconds(
        one, measured, 4, 6, projection.Assumed()
    )


def test_memory_of_70b_on_one_gpu_by_hand(projection: Any) -> None:
    found = projection.memory(CATALOGUE["llama-3.1-70b"].geometry, 4e9, 1, 1)
    layer, of_3b = (2 * hidden * (2 * hidden + 2048 + 3 * wide) for hidden, wide in ((8192, 28672), (3072, 8192)))
    spilled = layer + (4e9 - of_3b) * (8192 + 28672) / (3072 + 8192)
    states = 2 * 2_097_152 * (8192 + 2048)  # hidden states, and the keys and values of a layer
    assert (found.device, found.spilled_device, found.host) == pytest.approx((spilled + states, spilled, states))


def test_two_layers_of_70b_stand_for_80(projection: Any, tmp_path: Path) -> None:
    part = {"ok": True, "seconds": 50, "phases": {"forward": 30.0, "gram": 2.0, "encode": 4.0, "moments": 1.0}}
    (tmp_path / "two.json").write_text(json.dumps({"fit-1": part, "70b-1": part}))
    geometry = CATALOGUE["llama-3.1-70b"].geometry
    _, by_name = projection.read([tmp_path / "two.json"])
    passes = by_name["llama-3.1-70b"].passes
    work = projection.flops(geometry, 80, passes) / projection.flops(geometry, 2, passes)
    right = 30 * work + 2 * 79 + 4 * 40 + 1 * 40 + 2 * 2 * geometry.parameters / 2e9  # read twice
    assert passes == 3
    found = projection.seconds(geometry, by_name["llama-3.1-70b"], 1, 1, projection.Assumed())
    assert found == pytest.approx(right, rel=1e-12)
    (tmp_path / "failed.json").write_text(json.dumps({"fit-1": part | {"ok": False}}))
    with pytest.raises(SystemExit, match="fit-1 is missing, or failed"):
        projection.read([tmp_path / "failed.json"])


def test_the_page_shows_what_it_prints(projection: Any) -> None:
    """Or: python docs/scale/projection.py --write"""
    lines = projection.tables(projection.MEASURED, projection.Assumed())
    assert "\n".join(lines) in (ROOT / "docs" / "scale.md").read_text()
