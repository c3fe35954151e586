"""KVTuner-like bits: the allocation is the best there is, and the command's bundle is what it says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal.methods.kvtuner import KVTuner, Pair, allocate
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.errors import UsageError
from tests.support import schemes
from tests.support.models_fixture import SMALL, SUFFIX, kvcal, write_model, write_text

PAIRS = KVTuner(choices=(2, 4)).pairs


def test_pairs_come_cheapest_first() -> None:
    assert PAIRS == [(2, 2), (4, 2), (2, 4), (4, 4)]
    assert len(KVTuner().pairs) == 9


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(0, 40))
def test_no_allocation_is_better(table: list[list[int]], budget: int) -> None:
    errors = [dict(zip(PAIRS, map(float, row), strict=True)) for row in table]

    def total(chosen: Any) -> float:
        return sum(row[pair] for row, pair in zip(errors, chosen, strict=True))

    allowed = [c for c in itertools.product(PAIRS, repeat=len(errors)) if sum(map(sum, c)) <= budget]
    if not allowed:
        with pytest.raises(UsageError, match="cannot share"):
            allocate(errors, budget)
        return
    found: list[Pair] = allocate(errors, budget)
    assert sum(map(sum, found)) <= budget
    least = min(map(total, allowed))
    assert total(found) == least
    assert sum(map(sum, found)) == min(sum(map(sum, c)) for c in allowed if total(c) == least)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("bits")
    model, text = write_model(base / "small"), write_text(base / "words.txt")
    return ["--model", str(model), "--text", str(text), *SMALL, "--group", "8"]


def tuned(options: list[str], output: Path, *more: object) -> dict[str, Any]:
    done = kvcal("tune-bits", *options, "--output", output, "--json", *more)
    assert done.code == 0, done.err
    return dict(done.json)


def test_bits_are_spent_up_to_the_limit(options: list[str], tmp_path: Path) -> None:
    """Groups of 8 numbers: 4 bits of scale and minimum with each value."""
    errors = []
    for limit, bits in ((6, 6.0), (7.3, 7.25), (9, 9.0), (12, 12.0)):
        found = tuned(options, tmp_path / f"{bits}{SUFFIX}", "--max-bits", limit)
        assert found["bits_per_value"] == bits
        errors.append(found["output_error"])
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == 4


def test_a_cache_runs_the_bundle(options: list[str], tmp_path: Path) -> None:
    found = tuned(options, tmp_path / f"x{SUFFIX}", "--max-bits", 6.7)
    bundle = load_bundle(found["bundle"])
    rows = [(layer["key_bits"], layer["value_bits"]) for layer in found["layers"]]
    kept = [pair for pair in bundle.scheme.layers if pair is not None]
    assert [(p.key.config()["bits"], p.value.config()["bits"]) for p in kept] == rows
    assert len(set(rows)) > 1
    model = load_model(resolve(options[1]), dtype="float32", device="cpu").model
    with load_cache(bundle, model) as cache, torch.no_grad():
        model(input_ids=schemes.token_ids(1, 200), past_key_values=cache)
        assert cache.bits_per_value() == pytest.approx(found["bits_per_value"])
    assert tuned(options, tmp_path / f"x{SUFFIX}", "--max-bits", 6.7)["sha256"] == found["sha256"]


def test_an_interrupted_run_chooses_the_same(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are chosen when all layers are measured; what was measured before is in the checkpoint."""
    usual, whole = tuned(options, tmp_path / f"x{SUFFIX}", "--max-bits", 6.7), KVTuner.fit_layer

    def some(self: KVTuner, layer: int, *args: Any) -> Any:
        if layer == 2:
            raise KeyboardInterrupt
        return whole(self, layer, *args)

    monkeypatch.setattr(KVTuner, "fit_layer", some)
    assert kvcal("tune-bits", *options, "--output", tmp_path / f"y{SUFFIX}", "--max-bits", 6.7).code == 130
    monkeypatch.undo()
    again = tuned(options, tmp_path / f"y{SUFFIX}", "--max-bits", 6.7)
    assert (again["resumed_layers"], again["sha256"]) == (2, usual["sha256"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-bits", "5"], "--max-bits 5: 2-bit keys and values with their scales take 6; raise it"),
        (["--bits", "2,x"], "--bits 2,x: needs whole numbers"),
        (["--bits", "2,9"], "bits (2, 9): allowed are 1 to 8"),
        (["--group", "3"], "--group 3: must divide the block of 8"),
        (["--max-bits", "nan"], "Invalid value for '--max-bits'"),
    ],
)
def test_what_cannot_be_done_is_one_line(more: list[str], said: str, options: list[str], tmp_path: Path) -> None:
    done = kvcal("tune-bits", *options, *more, "--output", tmp_path / f"x{SUFFIX}")
    assert (done.code, said in done.err.splitlines()[-1]) == (2, True), done.err
    assert list(tmp_path.iterdir()) == []  # no layer was measured in vain
