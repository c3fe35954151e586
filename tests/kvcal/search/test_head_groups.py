"""`kvcal tune-bits --objective kl --head-groups N`: groups are measured alone, and put together without a loss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal.calibrate.forecast import Forecast, forecasts
from kvcal.methods.data_free import Preset
from kvcal.search import sensitivity
from kvcal.search.head_groups import HeadGroup, by_side, divided, group_sensitivities, joined, name_of
from kvcal.search.knapsack import Option
from kvcal.search.sensitivity import TUNED, Assignment, DataFreeSchemes
from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.codecs import ByHead
from kvcal_artifacts.errors import UsageError
from tests.kvcal.search.test_sensitivity import Kept
from tests.support.models_fixture import SUFFIX, kvcal
from tests.support.schemes import tiny, token_ids

CODECS = ["uniform-2", "uniform-8"]
BASE = Preset("uniform-2", "uniform-2", sink=4, recent=8, block=8)


def test_heads_are_divided_as_evenly_as_they_can_be() -> None:
    assert divided(3, 1) == [(0, 2)]
    assert divided(3, 2) == [(0, 1), (2, 2)]
    assert divided(8, 3) == [(0, 2), (3, 5), (6, 7)]
    with pytest.raises(UsageError, match="--head-groups 3: the model's layers have 2 kv heads; give at most 2"):
        divided(2, 3)


NAMES = ["a", "b", "c"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(0, 50), min_size=3, max_size=3)), min_size=1, max_size=4
    ),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=3, max_size=3),
)
def test_no_assignment_of_groups_is_better(groups: list[tuple[int, list[int]]], rates: list[tuple[int, int]]) -> None:
    """Of every assignment there is one among the options that takes no more bytes and costs no more.

    A codec takes so many bytes a head, and some more however many neighbours share it.
    """
    heads = [count for count, _ in groups]
    options = [[Option(name, 0, cost) for name, cost in zip(NAMES, costs, strict=True)] for _, costs in groups]
    rate = dict(zip(NAMES, rates, strict=True))

    def size(codec: str, count: int) -> int:
        return rate[codec][0] * count + rate[codec][1]

    found = joined(options, heads, size)
    assert [option.name for option in found[:3]] == NAMES
    for chosen in itertools.product(range(3), repeat=len(groups)):
        cost = sum(options[group][codec].cost for group, codec in enumerate(chosen))
        runs = [
            (NAMES[codec], sum(heads[group] for group, _ in run))
            for codec, run in itertools.groupby(enumerate(chosen), key=lambda pair: pair[1])
        ]
        taken = sum(size(codec, count) for codec, count in runs)
        assert any(option.size <= taken and option.cost <= cost for option in found)
    for option in found[3:]:  # and each is what its name says
        parts = [part.split("x") for part in option.name.split("+")]
        assert sum(int(count) for count, _ in parts) == sum(heads)
        assert option.size == sum(size(codec, int(count)) for count, codec in parts)


def test_a_group_is_measured_with_all_else_exact() -> None:
    """What was measured before is not measured again; bytes are those of the codec by head."""
    model, kept = tiny("llama"), Kept()
    ids, schemes = token_ids(2, 40), DataFreeSchemes(model, BASE)
    groups = group_sensitivities(model, ids, CODECS, schemes, kept, 2)
    layers = model.config.num_hidden_layers
    assert len(groups) == 2 * 2 * layers == len(kept.values)
    one = HeadGroup(1, "key", 1, 1)
    preset = Preset("exact-32", "exact-32", sink=4, recent=8, block=8, per_layer=("1:keys=1xexact-32+1xuniform-2",))
    alone = forecasts(model, ids, {"x": preset.scheme(model)})["x"].kl
    assert groups[one][0].cost == pytest.approx(alone, rel=1e-3)
    assert group_sensitivities(model, ids, CODECS, schemes, kept, 2) == groups
    assert len(kept.reads) == len(groups)
    sides = by_side(groups, schemes)
    assert set(sides) == {(layer, role) for layer in range(layers) for role in ("key", "value")}
    for (layer, role), options in sides.items():
        for option in options:
            scheme = schemes.alone(layer, role, option.name)
            assert sensitivity._size(scheme, layer, role) == option.size
    with pytest.raises(UsageError, match="--length 20: packs nothing"):
        group_sensitivities(model, ids[:, :20], CODECS, schemes, kept, 2)


def test_names_of_parts() -> None:
    assert name_of([(2, "a"), (1, "b")]) == "2xa+1xb"
    assert name_of([(3, "a")]) == "a"


def test_the_command_records_the_codecs_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts are stood in for: head 1 of keys alone needs 8 bits, as it must be by the stand-in."""

    def stand_in(model: Any, ids: torch.Tensor, schemes: Any) -> dict[str, Forecast]:
        def kl(scheme: Any) -> float:
            parts = [
                (number, part.bits)
                for pair in scheme.layers
                for number, part in enumerate(pair.key.parts if isinstance(pair.key, ByHead) else ())
                if part.name == "uniform"
            ]
            return 1.0 if parts == [(1, 2)] else 1e-4

        return {name: Forecast(kl(scheme), 1, 1.0, 0) for name, scheme in schemes.items()}

    monkeypatch.setattr(sensitivity, "forecasts", stand_in)
    measured = sensitivity._measured
    monkeypatch.setattr(
        sensitivity, "_measured", lambda model, ids, makers, *rest: measured(model, ids, {TUNED: makers[TUNED]}, *rest)
    )
    output = tmp_path / f"x{SUFFIX}"
    sizes = ["--windows", 2, "--holdout", 1, "--length", 64, "--sink", 0, "--recent", 8, "--block", 32]
    done = kvcal(
        *("tune-bits", "--objective", "kl", "--codecs", ",".join(CODECS), "--max-bits", 4),
        *("--head-groups", 2, *sizes, "--output", output, "--json"),
    )
    assert done.code == 0, done.err
    assert (done.json["chosen"], done.json["keys"], done.json["head_groups"]) == ("tuned", "1xuniform-2+1xuniform-8", 2)
    bundle = load_bundle(output)
    pair = bundle.scheme.layers[0]
    assert pair is not None and isinstance(pair.key, ByHead)
    assert [part.config()["bits"] for part in pair.key.parts] == [2, 8]
    assert bundle.metrics["head_groups"] == 2 and "tuned" in bundle.metrics["candidates"]
    assert bundle.metrics["sensitivity"]["3:keys:heads 1"] == {"uniform-2": 1.0, "uniform-8": 1e-4}
    assert bundle.provenance["settings"]["key"] == "1xuniform-2+1xuniform-8"
    assert bundle.scheme.bits_per_value() <= 4
    assert Assignment(done.json["keys"], done.json["values"], tuple(done.json["per_layer"])).preset(BASE)
    shown = kvcal("inspect", output, "--wide")
    assert shown.code == 0 and "by-head(1 x uniform(bits=2" in shown.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--head-groups", 2], "--head-groups applies only to --objective kl"),
        (["--objective", "kl", "--predict", "--head-groups", 2], "predictors are fitted for codecs of all heads"),
        (["--objective", "kl", "--codecs", "uniform-2,1xuniform-2+1xuniform-4", "--head-groups", 2], "of all heads"),
        (["--objective", "kl", "--codecs", "uniform-2,0xuniform-2+1xuniform-4"], "part '0xuniform-2': reads NxCODEC"),
        (["--objective", "kl", "--codecs", "uniform-2,1xtransform-2+1xuniform-4"], "transform-2 is learned from text"),
        (["--objective", "kl", "--codecs", "uniform-2,1xuniform-2+1xnope"], "codec 'nope' is not known"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: list[Any], said: str) -> None:
    small = ["--windows", 2, "--holdout", 1, "--length", 64, "--recent", 8, "--block", 32]
    done = kvcal("tune-bits", *options, *small, "--output", tmp_path / f"x{SUFFIX}")
    assert (done.code, said in done.err) == (2, True), done.err
