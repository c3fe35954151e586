"""A model that cannot predict the text itself: its perplexity is told, and what to check. Lines are told once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvcal.calibrate.outlier_guard import UNLIKELY
from kvcal.commands.common import each_line_once
from kvcal.commands.guard import full_precision_warnings
from tests.support.models_fixture import SUFFIX, kvcal

LINE = "warning: full precision itself has perplexity "


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that no model has seen: characters drawn at random."""
    draw = random.Random(0)
    words = ("".join(draw.choices("ZQXJKVWYqxzjkvwy#%&@0123456789", k=draw.randint(3, 9))) for _ in range(600))
    path = tmp_path_factory.mktemp("text") / "noise.txt"
    path.write_text(" ".join(words))
    return path


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_perplexity_of_full_precision_is_told_where_it_is_unlikely(command: str, noise: Path) -> None:
    few = ["--windows", 1, "--length", 128, "--preset", "fp8", "--no-resume"]
    wrong, right = kvcal(command, *few, "--text", noise), kvcal(command, *few)
    assert wrong.code == right.code == 0
    said = [line for line in wrong.err.splitlines() if line.startswith(LINE)]
    assert len(said) == 1
    assert float(said[0].removeprefix(LINE).split()[0].replace(",", "")) > UNLIKELY
    assert LINE not in right.err


def test_random_weights_have_no_line() -> None:
    assert full_precision_warnings(9391.0, random_weights=True) == []
    assert full_precision_warnings(UNLIKELY - 1, random_weights=False) == []
    [line] = full_precision_warnings(9391.0, random_weights=False)
    assert line.startswith(f"{LINE}9,391 on this text")


def test_a_fit_on_text_that_the_model_cannot_predict_has_the_line_too(noise: Path, tmp_path: Path) -> None:
    few = ["--windows", 2, "--length", 192, "--block", 32, "--no-resume", "--output", tmp_path / f"x{SUFFIX}"]
    lines = [kvcal("fit-norms", *few, *text).err.count(LINE) for text in (["--text", noise], [])]
    assert lines == [1, 0]


def test_what_is_chosen_by_kl_has_the_line_before_any_measurement(noise: Path, tmp_path: Path) -> None:
    small = ["--windows", 3, "--length", 384, "--output", tmp_path / f"x{SUFFIX}"]
    for command in (["tune-bits", "--objective", "kl", "--max-bits", 0.1], ["recommend", "--max-bits", 0.1]):
        done = kvcal(*command, *small, "--text", noise)  # limits that nothing meets end it early
        assert done.code != 0
        assert done.err.count(LINE) == 1, done.err


def test_a_line_that_was_said_is_not_said_again(tmp_path: Path) -> None:
    said: list[str] = []
    say = each_line_once(said.append)
    for line in ("a", "b", "a"):
        say(line)
    assert said == ["a", "b"]
    small = ["--predict", "--codecs", "transform-2,transform-3", "--max-bits", 3, "--windows", 3, "--holdout", 1]
    small += ["--length", 256, "--block", 32, "--no-resume", "--output", tmp_path / f"kl{SUFFIX}"]
    done = kvcal("tune-bits", "--objective", "kl", *small)  # fits both codecs, and each assignment that it verifies
    assert done.code == 0
    warnings = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert len(set(warnings)) == len(warnings) > 0
