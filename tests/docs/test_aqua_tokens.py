"""docs/benchmarks/aqua_tokens.py: the order of its steps, what it makes of them, and a run of tiny shapes on a CPU."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import ROOT

FOLDER = ROOT / "docs" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import aqua_tokens

    return aqua_tokens


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_each_follows_each_other_equally_often(script: Any, count: int) -> None:
    turns = 2 * (2 * count if count % 2 else count)
    orders = list(script.squares(count, turns, seed=1))
    assert len(orders) == turns and all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    times = {turns // count}
    assert len(pairs) == count * (count - 1) and set(pairs.values()) == times
    for place in range(count):
        assert set(Counter(order[place] for order in orders).values()) == times
    assert orders == list(islice(script.squares(count, turns + 3, seed=1), turns))
    assert orders != list(script.squares(count, turns, seed=2)) or count == 2


def step(script: Any, cache: int, before: int | None, wall: float, packs: int = 0) -> list[Any]:
    given = {"turn": 0, "cache": cache, "before": before, "wall": wall, "segments": 2, "packs": packs}
    return [given.get(name, 1.0) for name in script.COLUMNS]


def test_summary_by_predecessor(script: Any) -> None:
    """The packing step is apart; a step behind another cache is counted there alone."""
    one = [step(script, 0, 0, 90.0), step(script, 0, 1, 40.0), step(script, 0, 1, 50.0), step(script, 0, 1, 370.0, 1)]
    found = script.summed({"caches": ["a", "b"], "steps": [*one, step(script, 1, 0, 7.0)]})
    assert found["a"]["median"] == 50 and found["a"]["packing"] == 370 and found["a"]["step"] == 50 + 320 / 32
    assert found["a"]["behind"] == {"a": {"steps": 1, "median": 90.0}, "b": {"steps": 2, "median": 45.0}}
    assert found["a"]["segments"] == 8 and found["a"]["steps"] == 3
    assert found["b"]["median"] == found["b"]["low"] == found["b"]["step"] == 7 and found["b"]["packing"] is None


def test_control_leaves_the_backend_to_torch_and_gives_it_back(script: Any) -> None:
    from kvcal_artifacts.hf import seam

    own = seam.has_flash
    with script.torchs_choice():
        assert seam.has_flash is not own and not seam.has_flash(torch.ones(1))
    assert seam.has_flash is own


def test_all_kernels_are_compiled_beside_the_model(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache of each scheme asks preflight for; else the first one would compile it, one kernel after the other."""
    from kvcal.models import configuration, names
    from kvcal_artifacts.paths.preflight import verdicts

    asked: set[str] = set()
    monkeypatch.setattr(verdicts, "unsupported", lambda device: None)
    monkeypatch.setattr(verdicts, "_verdict", lambda parts, *given: asked.add(parts[0]))
    geometry = configuration.geometry(names.resolve("llama-3.1-8b"))
    for name in script.MADE:
        asked.clear()
        script.compile_for(name, geometry, torch.bfloat16)
        own = {"decode_attention", "append", "quantise"} if name == script.FUSED else {"reconstruct"}
        assert asked == {"encode"} | own, name


@pytest.mark.slow
def test_it_runs(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--device cpu --model tiny --dtype float32 --shapes 1x256,1x192 --turns 4 --steps 1 --out"
    script.main([*given.split(), str(tmp_path)])
    found = json.loads((tmp_path / "aqua_tokens.json").read_text())
    assert [len(one["passes"]) for one in found["shapes"]] == [4, 2]
    for one in found["shapes"]:
        for ran in one["passes"].values():
            steps = ran["steps"]
            assert all(len(row) == len(found["columns"]) and row[3] >= row[4] > 0 for row in steps)
            assert Counter(row[1] for row in steps) == dict.fromkeys(
                range(len(ran["caches"])), len(steps) // len(ran["caches"])
            )
            assert [row[2] for row in steps[1:]] == [row[1] for row in steps[:-1]]
            assert sum(row[-1] for row in steps) == sum(name != "fp32" for name in ran["caches"])
    assert "AQUA-KV's tokens a second over those of" in capsys.readouterr().out
