"""`kvcal combine`: keys of one bundle, values of another, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcal_artifacts import load_bundle
from models_fixture import SUFFIX, Done, kvcal, write_model, write_text

LENGTH = ["--windows", 5, "--length", 96]
WINDOWS = ["--sink", 4, "--recent", 16, "--block", 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("combine")
    write_model(base / "model")
    write_model(base / "other", seed=2)
    write_text(base / "words.txt")
    return base


def fitted(base: Path, name: str, *options: Any, model: str = "model", windows: list[Any] = WINDOWS) -> Path:
    path = base / f"{name}{SUFFIX}"
    text = ["--text", base / "words.txt", *LENGTH]
    done = kvcal("fit-predictors", "--model", base / model, *text, *windows, *options, "--output", path)
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def usual(base: Path) -> Path:
    return fitted(base, "usual")


@pytest.fixture(scope="module")
def own_values(base: Path) -> Path:
    """Values predicted from the values below only."""
    return fitted(base, "own", "--backbone", "uniform-4", "--first-layer", "", "--value-inputs", "v1")


def refused(done: Done, code: int, *parts: str) -> None:
    assert done.code == code
    assert all(part in done.complaint for part in parts), done.complaint


def test_keys_of_one_values_of_the_other(base: Path, usual: Path, own_values: Path) -> None:
    path = base / f"both{SUFFIX}"
    done = kvcal("combine", usual, own_values, "--output", path, "--json")
    assert done.code == 0, done.err
    first, second, both = (load_bundle(p).scheme for p in (usual, own_values, path))
    for a, b, c in zip(first.layers, second.layers, both.layers, strict=True):
        assert a and b and c
        assert (c.key.describe(), c.value.describe()) == (a.key.describe(), b.value.describe())
    assert kvcal("verify", path, "--model", base / "model").code == 0
    rows = kvcal("eval", "--model", base / "model", "--text", base / "words.txt", "--length", 120, "--windows", 1,
                 "--bundle", path, "--json").json["rows"]  # fmt: skip
    assert rows[1]["bits_per_value"] == pytest.approx(done.json["bits_per_value"], rel=0.01)
    assert rows[1]["kl"] > 0
    again = base / f"again{SUFFIX}"
    assert kvcal("combine", usual, own_values, "--output", again).code == 0
    assert again.read_bytes() == path.read_bytes()


def test_what_cannot_be_combined(base: Path, usual: Path, own_values: Path) -> None:
    output = base / f"never{SUFFIX}"
    say = ["values of usual are predicted from keys as usual itself stores them", "layer 1", "k0"]
    refused(kvcal("combine", own_values, usual, "--output", output), 2, *say)
    crossed = fitted(base, "crossed", "--key-inputs", "k1,v1")
    refused(
        kvcal("combine", crossed, own_values, "--output", output), 2, "keys of crossed are predicted from values", "v1"
    )
    wide = fitted(base, "wide", windows=["--sink", 4, "--recent", 16, "--block", 16])
    refused(kvcal("combine", wide, own_values, "--output", output), 2, "block 16", "block 8", "--block")
    other = fitted(base, "elsewhere", model="other")
    refused(kvcal("combine", other, own_values, "--output", output), 4, "different models", "revision")
    refused(kvcal("combine", usual, base / "none", "--output", output), 4, "no such bundle")
    refused(kvcal("combine", usual, own_values, "--output", base), 1, "is a folder")
    assert not output.exists()
