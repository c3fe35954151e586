"""`kvcal names`, and what an unknown name is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcal.commands import early
from kvcal.commands.names import KINDS, run_names
from kvcal.methods.calibrated import calibration_of
from kvcal.methods.data_free import PRESETS, preset
from kvcal.methods.registry import CALIBRATED, codec_maker
from kvcal.pipeline.options import PresetOptions
from kvcal.report.suggest import allowed, nearest
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import ModelUnavailable, UsageError
from tests.support.models_fixture import kvcal


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict[str, Any]]:
    found = run_names(None, "llama-3.1-8b")
    assert {row["kind"] for row in found} == set(KINDS)
    assert len({(row["kind"], row["name"]) for row in found}) == len(found)
    return {(row["kind"], row["name"]): row for row in found}


def test_all_that_options_take_is_there(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    by_kind = {kind: {name for k, name in rows if k == kind} for kind in KINDS}
    assert by_kind["preset"] == set(PRESETS)
    assert by_kind["codec"] == {*CODEC_MAKERS, *CALIBRATED, "mixkvq-FULL-FOUR", "NxCODEC+NxCODEC"}
    for name in by_kind["preset"]:
        preset(name)
    for row in rows.values():
        if row["about"].startswith("learned"):
            assert calibration_of(row["about"].split()[-1]) is not None
    codec_maker("mixkvq-8-16")
    assert rows["codec", "NxCODEC+NxCODEC"]["about"].endswith(", as 1xhiggs-4+2xhiggs-2")
    made = codec_maker("1xhiggs-4+2xhiggs-2")
    assert made(Shape(3, 64, 32), "key").describe().startswith("by-head(1 x higgs(d=2, n=256, ")
    with pytest.raises(UsageError, match="'1xhiggs-4\\+2xhiggs-2' is for 3 kv heads, the model's layers have 2"):
        made(Shape(2, 64, 32), "key")
    with pytest.raises(UsageError, match="'1xhiggs-4\\+2xhiggs-2-scaled': higgs-2-scaled is learned from text"):
        codec_maker("1xhiggs-4+2xhiggs-2-scaled")


def test_names_of_the_bench_are_taken_by_it() -> None:
    """All at once, on a tiny shape and one row, are refused only for what this machine is."""
    from kvcal.bench.devices import device
    from kvcal.bench.target import target
    from kvcal.commands.bench_options import resolve_operations

    here, away = target("cpu"), target("jetson-orin-nano")
    for row in run_names("operation", "tiny"):
        assert resolve_operations([row["name"]], here)
    assert resolve_operations(["innerq-table-4"], away)
    about = {row["name"]: row["about"] for row in run_names("device", "tiny")}
    assert about.pop("jetson").startswith("measured on a Jetson, else projected: the Orin Nano, and Table 4")
    assert all(said == "measured here" or device(name).name == name for name, said in about.items())


def test_operations_say_what_they_are() -> None:
    """Each in words of its own, or by what it stands for."""
    about = {row["name"]: row["about"] for row in run_names("operation", "tiny")}
    assert len(set(about.values())) == len(about) and min(map(len, about.values())) > 10
    assert about["append"] == "a decode step's share of packing and storing a block"
    assert about["generation"] == "generate, generate-call, largest-batch, longest-generation"
    assert about["innerq-table-4"].endswith("(InnerQ Table 4); always projected")


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("kivi-2", (3.0, 3.0)),  # 2 + 32/32: float16 scale and zero a group of 32
        ("uniform-4", (4.5, 4.5)),  # 4 + 32/64
        ("turboquant-4-3", (4.125, 3.125)),  # a float16 norm a head of 128
        ("innerq-small", (3.5, 2.5)),  # symmetric: one float16 scale a group of 32
        ("higgs-2", (2.125, 2.125)),  # a float16 norm a head of 128
        ("fp8", (8.0, 8.0)),
    ],
)
def test_bits_are_those_of_the_tables(
    rows: dict[tuple[str, str], dict[str, Any]], name: str, bits: tuple[float, float]
) -> None:
    row = rows["preset", name]
    assert (row["key_bits"], row["value_bits"]) == bits


def test_bits_are_of_the_model_asked_for() -> None:
    [tiny] = [row for row in run_names("preset", "tiny") if row["name"] == "turboquant-4-3"]
    assert (tiny["key_bits"], tiny["value_bits"]) == (4.25, 3.25)  # heads of 64


def test_whose_geometry_the_bits_are_for_is_said() -> None:
    assert kvcal("names", "preset", "--json").json["model"] == "llama-3.1-8b"
    assert "of tiny's geometry" in kvcal("names", "codec", "--model", "tiny").err
    assert kvcal("names", "device").err.startswith("devices: measured on")  # and no bits
    assert "geometry" not in kvcal("names", "device").err


def test_presets_of_python_alone_are_listed_and_say_where_they_work(tmp_path: Path) -> None:
    assert "auto-4, auto-3, auto-2 (kvcal.cache, load_cache)" in kvcal("names", "preset").err
    assert "auto-4" not in kvcal("names", "codec").err
    done = kvcal("preset", "auto-3", "--output", tmp_path / "a.kvcal.safetensors")
    assert done.code == 2 and "in Python alone: kvcal.cache(model, 'auto-3')" in done.complaint


def test_presets_of_installed_packages_are_left_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="preset 'of-a-package' is not known"):
        early.refuse(PresetOptions(name="of-a-package"))
    monkeypatch.setattr(early, "entry_points", lambda group: [group])
    early.refuse(PresetOptions(name="of-a-package"))


def test_near_names() -> None:
    known = [f"kivi-{bits}" for bits in range(2, 9)] + ["fp8", "higgs-2-wide", "higgs-3-wide", "exact-16"]
    assert nearest("KIVI2", known)[0] == "kivi-2"
    assert nearest("higgs", known) == ["higgs-3-wide", "higgs-2-wide"]  # far, but of that family
    assert nearest("", known) == nearest("zzz", known) == nearest("-2", known) == []
    assert allowed("zzz", known, "kvcal names") == "`kvcal names` lists all"
    assert allowed("higgs-2wide", known, "x").startswith("did you mean higgs-2-wide")
    assert allowed("zzz", known[:3], "x") == "allowed are kivi-2, kivi-3, kivi-4"


@pytest.mark.parametrize(
    "arguments",
    [
        ["preset", "kivi2"],
        ["preset", "--keys", "inner-9", "--values", "kivi-2"],
        ["preset", "zzz"],
        ["bench", "--device", "jetson-orin"],
        ["bench", "--operation", "quantize"],
        ["bench", "--preset", "innerq"],
        ["names", "codecs"],
    ],
)
def test_an_unknown_name_takes_one_short_line(arguments: list[str]) -> None:
    done = kvcal(*arguments)
    assert done.code == 2
    [line] = done.err.splitlines()
    assert len(line) < 160 and ("`kvcal names" in line or "allowed are preset, codec" in line)


def test_an_unknown_kind_and_model() -> None:
    with pytest.raises(UsageError, match="kind 'x' is not known; allowed are preset, codec, scheme, operation, device"):
        run_names("x", "tiny")
    with pytest.raises(ModelUnavailable, match="unknown model 'zzz'"):
        run_names("preset", "zzz")
