"""`kvcal recommend`: what it chooses, writes and prints, and what a killed run leaves."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from kvcal.evaluate.key_outliers import key_outliers
from kvcal.evaluate.outliers import outlier_twin
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts.bundle import load_bundle
from tests.support.models_fixture import SUFFIX, killed_at, kvcal, write_model, write_text

SHORT = ["--windows", "5", "--holdout", "2", "--length", "300"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("recommend")
    write_model(base / "model", 2)
    write_text(base / "words.txt")
    return base


def given(base: Path, *more: object) -> list[object]:
    return ["recommend", "--model", base / "model", "--text", base / "words.txt", *SHORT, *more]


def test_the_smallest_kl_of_so_many_bits(base: Path, tmp_path: Path) -> None:
    output = tmp_path / f"chosen{SUFFIX}"
    done = kvcal(*given(base, "--max-bits", "3.6", "--output", output, "--json"))
    assert done.code == 0, done.err
    result = done.json
    rows = {row["scheme"]: row for row in result["rows"]}
    chosen, second, naive = (rows[result[name]] for name in ("chosen", "runner_up", "instead_of"))
    assert chosen["bits_per_value"] <= 3.6 and chosen["kl"] <= second["kl"]
    assert naive["naive"] and naive["bits_per_value"] >= chosen["bits_per_value"] and naive["kl"] > chosen["kl"]
    assert load_bundle(output).scheme.bits_per_value() == pytest.approx(chosen["bits_per_value"])
    assert {row["layer"] for row in result["outliers"]} == {0, 1}
    errors = result["attention_errors"][result["chosen"]]
    assert [len(row["output_head_errors"]) for row in errors] == [2, 2] and errors[0]["output_error"] > 0
    assert list(tmp_path.iterdir()) == [output]

    again = tmp_path / f"again{SUFFIX}"  # the command it names makes the same bundle
    words = shlex.split(chosen["command"])[1:]
    done = kvcal(*words, "--output", again, *(() if words[0] == "fit-predictors" else ("--no-check",)))
    assert done.code == 0, done.err
    assert load_bundle(again).scheme.config() == load_bundle(output).scheme.config()
    assert words[0] != "fit-predictors" or again.read_bytes() == output.read_bytes()


def test_a_killed_run_leaves_no_bundle_and_goes_on(base: Path, tmp_path: Path) -> None:
    output, other = tmp_path / f"a{SUFFIX}", tmp_path / f"b{SUFFIX}"
    arguments = given(base, "--max-bits", "2.6", "--output")
    killed_at("*/windows-*.json", *arguments, output, folder=tmp_path)
    assert not output.exists()
    done = kvcal(*arguments, output, "--json")
    assert done.code == 0 and "Fitting" not in done.err and "resuming after" in done.err
    assert kvcal(*arguments, other).code == 0
    assert output.read_bytes() == other.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {output.name, other.name}


def test_the_table_fits_80_columns(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvcal(*given(base, "--max-kl", "0.5"))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [
        line for line in lines if len(line) > 80 and not line.startswith(("the same bundle: ", "left out: ", "next: "))
    ] == []
    assert (tmp_path / f"model-recommended{SUFFIX}").is_file()
    assert [line for line in lines if line.startswith("measured in ") and line.endswith(" s on cpu")]
    alone = "one window was held out: its KL has no spread; give --holdout 2 or more"
    assert alone not in lines
    assert alone in kvcal(*given(base, "--max-kl", "0.5", "--holdout", "1")).out.splitlines()
    steps = re.findall(r"^(step \d of 5)(?:, after [^:]+)?: ", done.err, re.MULTILINE)
    assert list(dict.fromkeys(steps)) == [f"step {number} of 5" for number in range(1, 6)]
    assert lines[-1] == f"next: kvcal eval model-recommended{SUFFIX} -m {base / 'model'}"


def test_a_limit_that_nothing_meets_writes_nothing(base: Path, tmp_path: Path) -> None:
    output = tmp_path / f"none{SUFFIX}"
    done = kvcal(*given(base, "--max-kl", "1e-12", "--output", output))
    line = done.err.splitlines()[-1]
    assert done.code == 3 and "no scheme of the ladder is within it; the best, uniform-8" in line
    assert done.out == "" and not output.exists()
    done = kvcal(*given(base, "--max-bits", "1", "--output", output))
    assert done.code == 2 and "give --max-bits" in done.err.splitlines()[-1]
    assert not output.exists()


def test_key_outliers_are_where_they_were_put() -> None:
    model = load_model(resolve("tiny"), dtype="float32", device="cpu").model
    ids = torch.randint(0, 200, (1, 64), generator=torch.Generator().manual_seed(0))
    device = torch.device("cpu")
    plain, twin = key_outliers(model, ids, device), key_outliers(outlier_twin(model), ids, device)
    assert [(row.layer, row.head) for row in plain] == [(row.layer, row.head) for row in twin]
    assert len(plain) == model.config.num_hidden_layers * model.config.num_key_value_heads
    assert all(after.ratio > 2 * before.ratio for before, after in zip(plain, twin, strict=True))
