"""`kvcal tune-bits --objective kl`: the knapsack is exact, sensitivities are those of one codec alone, the best is taken."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal.calibrate import forecast
from kvcal.calibrate.forecast import forecasts
from kvcal.commands import tune_kl
from kvcal.methods.data_free import Preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.search.knapsack import Option, solve
from kvcal.search.sensitivity import Assignment, DataFreeSchemes, check_budget, choose, sensitivities
from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import SUFFIX, kvcal

CODECS = ["uniform-2", "uniform-8"]
BASE = Preset("uniform-2", "uniform-2", sink=4, recent=32, block=32)


class Kept:
    """Sensitivities of a run, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.reads: list[str] = []

    def read(self, name: str) -> Any:
        self.reads += [name] if name in self.values else []
        return self.values.get(name)

    def keep(self, name: str, value: Any) -> None:
        self.values[name] = value


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def ids(model: Any) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))


OPTIONS = st.lists(
    st.lists(
        st.builds(Option, st.just("x"), st.integers(1, 12).map(lambda size: 4 * size), st.floats(0, 10)),
        min_size=1, max_size=4,
    ), min_size=1, max_size=5,
)  # fmt: skip


@given(OPTIONS, st.integers(0, 200))
def test_no_choice_is_better(places: list[list[Option]], budget: int) -> None:
    allowed = [one for one in itertools.product(*places) if sum(o.size for o in one) <= budget]
    if not allowed:
        with pytest.raises(UsageError, match="--max-bits: the smallest codecs"):
            solve(places, budget)
        return
    found = solve(places, budget)
    assert all(option in options for option, options in zip(found, places, strict=True))
    assert sum(option.size for option in found) <= budget
    least = min(sum(o.cost for o in one) for one in allowed)
    assert sum(option.cost for option in found) == pytest.approx(least)


def test_assignments_are_options_of_the_command_line() -> None:
    names = ["a", "a", "b", "b", "a", "c"]
    chosen: Any = {(layer, "key"): name for layer, name in enumerate(names)} | {(i, "value"): "a" for i in range(6)}
    found = Assignment.of(chosen)
    assert found == Assignment("a", "a", ("2-3:keys=b", "5:keys=c"))
    assert Assignment.of({(0, "key"): "b", (2, "key"): "a", (3, "key"): "a", (0, "value"): "c"}).per_layer == (
        "0:keys=b",
    )


def test_a_sensitivity_is_the_kl_of_one_codec_alone(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers below, which are exact, are not run again for it; the figures are those of running them all."""
    kept = Kept()
    found = sensitivities(model, ids, CODECS, DataFreeSchemes(model, BASE), kept)
    layers = model.config.num_hidden_layers
    assert set(found) == {(layer, role) for layer in range(layers) for role in ("key", "value")}
    coarse, fine = found[3, "key"]
    assert (coarse.name, fine.name) == tuple(CODECS)
    assert coarse.size < fine.size and coarse.cost > fine.cost >= 0
    monkeypatch.setattr(forecast._Run, "is_exact", lambda self, index: False)
    scheme = Preset("exact-32", "exact-32", sink=4, recent=32, per_layer=("3:keys=uniform-2",)).scheme(model)
    assert forecasts(model, ids, {"x": scheme})["x"].kl == pytest.approx(coarse.cost, rel=1e-3)
    assert sensitivities(model, ids, CODECS, DataFreeSchemes(model, BASE), kept) == found
    assert len(kept.reads) == 2 * layers  # nothing is measured twice
    with pytest.raises(UsageError, match="--length 60: packs nothing"):
        sensitivities(model, ids[:, :60], CODECS, DataFreeSchemes(model, BASE), Kept())


def test_the_best_measured_is_taken(model: Any, ids: torch.Tensor) -> None:
    """Every candidate fits the budget; a table of sensitivities that misleads costs nothing beyond the uniform ones."""
    found = sensitivities(model, ids, CODECS, DataFreeSchemes(model, BASE), Kept())
    for options in (found, {place: [Option(o.name, o.size, 0.0) for o in these] for place, these in found.items()}):
        chosen = choose(model, ids, options, DataFreeSchemes(model, BASE), 6.0)
        assert "tuned" in chosen.rows and len(chosen.rows) >= 2
        assert chosen.rows[chosen.name].kl == min(row.kl for row in chosen.rows.values())
        assert chosen.assignment.preset(BASE).scheme(model).bits_per_value() <= 6.0
        assert all(row.bits_per_value is not None and row.bits_per_value <= 6.0 for row in chosen.rows.values())


@pytest.mark.parametrize("codecs", [["higgs-2", "uniform-4"], ["turboquant-4", "uniform-3"], ["uniform-2", "fp8"]])
def test_the_least_bits_that_an_error_names_fit(model: Any, codecs: list[str]) -> None:
    schemes = DataFreeSchemes(model, BASE)
    with pytest.raises(UsageError, match=r"--max-bits 1: .* give at least") as caught:
        check_budget(codecs, schemes, 1)
    least = float(str(caught.value).partition("give at least ")[2].partition(",")[0])
    check_budget(codecs, schemes, least)
    with pytest.raises(UsageError, match="give at least"):
        check_budget(codecs, schemes, least - 0.001)


def test_the_command_writes_what_it_chose(tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    sizes = [
        "--windows",
        2,
        "--holdout",
        1,
        "--length",
        128,
        "--recent",
        32,
        "--block",
        32,
        "--output",
        output,
        "--json",
    ]
    done = kvcal("tune-bits", "--objective", "kl", "--codecs", ",".join(CODECS), "--max-bits", 6, *sizes)
    assert done.code == 0, done.err
    bundle = load_bundle(output)
    assert bundle.scheme.bits_per_value() == pytest.approx(done.json["bits_per_value"], abs=1e-3)
    assert done.json["bits_per_value"] <= 6
    assert done.json["holdout_kl"] <= done.json["best_uniform_kl"]
    assert 0 < done.json["best_uniform_bits"] <= 6
    preset = Preset(
        done.json["keys"], done.json["values"], sink=4, recent=32, block=32, per_layer=tuple(done.json["per_layer"])
    )
    model = load_model(resolve("tiny"), dtype="float32", device="cpu").model
    for one, other in zip(bundle.scheme.layers, preset.scheme(model).layers, strict=True):
        assert one is not None and other is not None
        assert [one.key.config(), one.value.config()] == [other.key.config(), other.value.config()]
    assert len(bundle.metrics["sensitivity"]) == 2 * len(bundle.scheme.layers)


def test_codecs_under_predictors_are_searched_too(tmp_path: Path) -> None:
    """One is learned from what the predictors leave; the bundle is what `fit-predictors` fits with these codecs."""
    output = tmp_path / f"x{SUFFIX}"
    sizes = ["--windows", 3, "--holdout", 1, "--length", 96, "--sink", 0, "--recent", 8, "--block", 32]
    codecs = ["--codecs", "transform-2,uniform-4", "--predict", "--max-bits", 3]
    done = kvcal("tune-bits", "--objective", "kl", *codecs, *sizes, "--output", output, "--json")
    assert done.code == 0, done.err
    bundle = load_bundle(output)
    assert bundle.scheme.bits_per_value() == pytest.approx(done.json["bits_per_value"], abs=1e-3)
    assert done.json["bits_per_value"] <= 3
    assert done.json["holdout_kl"] <= done.json["best_uniform_kl"]
    assert bundle.provenance["method"] == "aqua-kv"
    costs = done.json["sensitivity"]
    assert len(costs) == 2 * len(bundle.scheme.layers)
    assert all(0 <= cost < 1e6 for row in costs.values() for cost in row.values())  # 4 bits may round to none
    assert all(row["transform-2"] > 0 for row in costs.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--objective", "perplexity"], "--objective perplexity: allowed are attention, kl"),
        (["--codecs", "higgs-2,higgs-3"], "--codecs applies only to --objective kl"),
        (["--predict"], "--predict applies only to --objective kl"),
        (["--objective", "kl", "--codecs", "higgs-2,transform-2"], "--residual transform-2"),
        (["--objective", "kl", "--bits", "2,4"], "--bits applies only to --objective attention"),
        (["--objective", "kl", "--codecs", "higgs-2"], "--codecs higgs-2: needs two or more"),
        (["--objective", "kl", "--codecs", "higgs-2,nope"], "nope"),
        (
            ["--objective", "kl", "--codecs", "higgs-2,uniform-4", "--max-bits", 1],
            "--max-bits 1: the smallest of --codecs higgs-2,uniform-4 take 2.25 stored bits per value; give at least 2.25",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: list[Any], said: str) -> None:
    small = ["--windows", 2, "--holdout", 1, "--length", 128, "--recent", 32, "--block", 32]
    done = kvcal("tune-bits", *options, *small, "--output", tmp_path / f"x{SUFFIX}")
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "options", [["--codecs", "higgs-2,higgs-3"], ["--predict", "--codecs", "transform-2,transform-3"]]
)
def test_windows_that_pack_nothing_are_refused_before_any_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[Any]
) -> None:
    monkeypatch.setattr(tune_kl, "_fit", lambda *args: pytest.fail("fits were begun"))
    small = ["--windows", 2, "--holdout", 1, "--length", 96, "--recent", 64, "--block", 32, "--max-bits", 3]
    done = kvcal("tune-bits", "--objective", "kl", *options, *small, "--output", tmp_path / f"x{SUFFIX}")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("kvcal: --length 96: packs nothing to measure; give ")
