"""docs/benchmarks/results.py and tasks.py: rows are measured once and written one by one, tables and verdicts follow."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.pages import ROOT

RECIPE = """
[[table]]
name = "2.25 bits"
row = [
  {label = "two", target = 2.25, keys = "uniform-2", values = "uniform-1"},
  {label = "wide", target = 2.25, preset = "uniform-4"},
  {label = "wrong", target = 2.25, keys = "uniform-2", values = "uniform-2", options = {block = 0}},
]
[[table]]
name = "More"
row = [
  {label = "four", preset = "uniform-4", options = {sink = 4, block = 64}},
  {label = "later", preset = "uniform-4", options = {sink = 8}},
]
[[claim]]
text = "four over the best"
better = "four"
worse = {tables = ["2.25 bits"], without = []}
[[claim]]
text = "by scores"
better = "More.four"
worse = "two"
by = "logit_error"
[[claim]]
text = "later over two"
better = "later"
worse = "two"
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "docs" / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_rows_go_on_and_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A second run measures what the first did not; a row that is refused is said, and tried again."""
    from kvcal.commands import calibration
    from kvcal.models import loading

    results = script("results")
    for module, name in ((loading, "load_model"), (calibration, "calibration_windows")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back behind the test
    (tmp_path / "recipe.toml").write_text(RECIPE)
    sizes = ["--windows", "2", "--length", "224", "--output", str(tmp_path), "--recipe", str(tmp_path / "recipe.toml")]

    def measure(*options: str) -> tuple[object, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["results.py", "measure", *sizes, *options])
        with pytest.raises(SystemExit) as ended:
            results.main()
        return ended.value.code, json.loads((tmp_path / "tiny.json").read_text())

    code, first = measure("--rows", "two|wrong")
    assert (code, len(first["rows"])) == (1, 2)
    assert capsys.readouterr().out.count("block") == 1
    code, second = measure("--rows", "two|wide|wrong|four")
    key = next(iter(first["rows"]))
    assert (code, len(second["rows"]), second["rows"][key]) == (1, 4, first["rows"][key])
    assert {"kl_se", "kl_median", "kl_p99", "same_top", "logit_error", "command"} <= second["rows"][key].keys()
    assert "tiny.json: was measured with {'length': 224}" in str(measure("--length", "192")[0])
    results.STATE.clear()
    text = results.tables(results.read_recipe(tmp_path / "recipe.toml"), [second])
    # a row without figures is no row of a table
    assert "\nMore bits than the table's: wide (4.50).\n" in text
    assert "\nRefused: wrong (" in text and "| wrong |" not in text
    claims = [line.split(" | ") for line in text.splitlines() if line.startswith("| four over the best |")]
    assert [len(one) for one in claims] == [2, 7]  # the verdict, then its figures
    assert claims[1][3].endswith(" (two)")
    # stored bits are not memory: what stays resident stands beside them; blocks that are not of 32 tokens are told
    assert "| method | stored bits | × smaller | resident | KL |" in text
    assert "\nBlocks of 64 tokens: four.\n" in text
    assert "block 64" in claims[1][2] and "block 32" in claims[1][3]
    # what is said of the page's own rows is not said of another recipe's; rows say what they are of
    assert "8cfb961a" not in text and "\nRecorded in the file of 3 rows: measured on 20" in text and ", torch 2" in text
    # a row that no file has yet
    assert "\nNot measured: later.\n" in text
    assert "| later over two | not measured |" in text
    # what measured a row is of the row: settings are compared with those of recorded files
    made = second["rows"][key]["measured_with"]
    assert made.keys() == {"date", "commit", "kvcal", "torch", "transformers", "triton"}
    assert "measured_with" not in second["settings"] and "commit" not in second["settings"]
    # logit errors of each window of the row, paired: the claim has a spread
    assert len(second["rows"][key]["logit_error_windows"]) == 2
    [claim] = [line.split(" | ") for line in text.splitlines() if "logit error" in line]
    assert " ± " in claim[5] and float(claim[6].strip(" |")) >= 0
    # a row whose full precision is another was measured on other weights or tokens, which no setting tells
    second["rows"][key]["full_perplexity"] *= 2
    with pytest.raises(SystemExit, match=r"^tiny: full precision has perplexity .* its weights or tokens were others"):
        results.tables(results.read_recipe(tmp_path / "recipe.toml"), [second])


def test_every_row_and_claim_of_the_recipe_can_be_read() -> None:
    """Options exist in the commands, and claims name rows that are there."""
    import kvcal.cli.app
    from kvcal.cli.signature import options_class

    results = script("results")
    recipe = results.read_recipe()
    names = dict(results.labelled(recipe))
    labels = [row["label"] for row in names.values()]
    for row in names.values():
        if "command" in (what := row["what"]):
            known = {one.name for one in fields(options_class(kvcal.cli.app.COMMANDS[what["command"]]))}
            assert what["options"].keys() <= known
        assert_parsed(results.command_of(row["what"]))
    for claim in recipe["claim"]:
        for side in ("better", "worse"):
            name = claim[side]
            assert not isinstance(name, str) or name in names or labels.count(name) == 1


def test_the_recorded_commands_can_be_typed() -> None:
    for path in sorted((ROOT / "docs" / "benchmarks" / "results").glob("*.json")):
        rows = json.loads(path.read_text())["rows"]
        commands = [row["command"] for row in rows.values() if "refused" not in row]
        assert sum("--predict" in command.split() for command in commands) == 2
        for command in commands:
            assert_parsed(command)


def assert_parsed(command: str) -> None:
    """A command's own parser takes it, with a model and a text."""
    import typer

    import kvcal.cli.app
    from kvcal.cli.signature import options_class

    program, name, *words = shlex.split(command, comments=True)
    assert program == "kvcal"
    known = {one.name for one in fields(options_class(kvcal.cli.app.COMMANDS[name]))}
    common = {"model": "tiny", "text": "embedded:calibration", "output": "row"}
    words += [word for option, value in common.items() if option in known for word in (f"--{option}", value)]
    parser = typer.main.get_command(kvcal.cli.app.app).commands[name]  # type: ignore[attr-defined]
    assert parser.make_context(name, words).params.keys() >= common.keys() & known, command


def test_blocks_are_those_that_rows_pack() -> None:
    """The block that a page says of a row is that of its scheme."""
    sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))
    import result_tables as tables

    from kvcal.commands.fit_norms import innerq_method
    from kvcal.pipeline.options import FitNormsOptions, TuneBitsOptions

    assert tables.block_of({"preset": "kivi-2", "options": {}}) == 32
    assert tables.block_of({"keys": "kivi-2-g128", "values": "kivi-2-g128", "options": {"block": 128}}) == 128
    assert tables.block_of({"command": "fit-norms", "options": {}}) == innerq_method(FitNormsOptions()).block
    assert tables.block_of({"command": "tune-bits", "options": {}}) == TuneBitsOptions().block == 128
    assert tables.block_of({"command": "train-codebooks", "options": {"recent": 1024}}) == 1024


def test_a_task_of_one_question_has_no_interval_in_the_table(tmp_path: Path) -> None:
    pair = {"score": 0.0, "full": 1.0, "difference": -1.0, "low": -1.0, "high": -0.5, "n": 2, "packed": 0.5}
    tasks = {"two": pair, "one": pair | {"low": None, "high": None, "n": 1}}
    (tmp_path / "a.json").write_text(
        json.dumps({"model": "m", "rows": [{"name": "kivi-2", "bits_per_value": 2.0, "tasks": tasks}]})
    )
    lines = script("tasks").table([script("tasks").collected(tmp_path, "")]).splitlines()
    assert "| one | – | 1 | 1.000 | 0.000 | -1.000 |" in lines
    assert "| two | – | 2 | 1.000 | 0.000 | -1.000 (-1.000 to -0.500) |" in lines


def test_shares_of_batches_that_were_counted_at_their_end_are_left_out(tmp_path: Path) -> None:
    tasks = script("tasks")
    pair = {"score": 0.0, "full": 1.0, "difference": -1.0, "low": -1.0, "high": -0.5, "n": 2, "packed": 0.9}
    row = {"name": "kivi-2", "bits_per_value": 2.0, "tasks": {"needle@4096": pair, "humaneval": pair | {"packed": 0.5}}}
    (tmp_path / "a.json").write_text(json.dumps({"model": "m", "rows": [row]}))
    by_row = tasks.collected(tmp_path, "")
    before = {key: value for key, value in by_row.items() if key != "packed_by_row"}
    assert "\nAt least 50% of a context" in tasks.table([by_row])
    assert "\nExcept for HumanEval and GSM8K, at least 90% of a context" in tasks.table([before])


def test_data_are_asked_for_only_by_the_tasks_that_need_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one line, with the file and where it comes from; needles and RULER need none."""
    tasks, files = script("tasks"), tmp_path / "task-files"
    monkeypatch.setattr(tasks, "PACKAGES", {})  # no test without lm-eval is refused
    tasks.write_tasks(tmp_path / "eval", files, ["needle-smollm2-4k", "ruler-qwen-4k-ruler_vt"])
    assert not list(files.iterdir())
    for name, origin in (("humaneval", "github.com/openai/human-eval"), ("gsm8k", "github.com/openai/grade-school")):
        with pytest.raises(SystemExit) as ended:
            tasks.write_tasks(tmp_path / "eval", files, [name])
        line = str(ended.value.code)
        assert line.startswith(f"tasks.py: {name} needs {tmp_path / 'eval' / tasks.DATA[name][0]}, which is not there")
        assert origin in line and "\n" not in line
    problems = tmp_path / "eval" / "humaneval" / "HumanEval.jsonl"
    problems.parent.mkdir(parents=True)
    problems.write_text("{}")
    tasks.write_tasks(tmp_path / "eval", files, ["humaneval"])
    assert [path.name for path in files.iterdir()] == ["humaneval.jsonl"]


def test_older_intervals_of_scores_of_0_or_1_become_those_of_today() -> None:
    """From what a file of before Tango's interval has: both means, McNemar's p-value and the bootstrap's ends."""
    import numpy as np

    from kvcal.evaluate.paired import Paired, bootstrap

    tasks, draw = script("tasks"), np.random.default_rng(0)
    for count, full, worse, better in (
        *((20, 20, 0, 0), (20, 20, 1, 0), (10, 7, 1, 1), (10, 3, 2, 3), (10, 0, 0, 0), (10, 7, 7, 1)),
        *((164, 69, 3, 1), (200, 26, 12, 7)),
    ):
        pairs = [(0, 1)] * worse + [(1, 1)] * (full - worse) + [(1, 0)] * better
        pairs = draw.permutation(pairs + [(0, 0)] * (count - len(pairs)))
        today = Paired.of(*pairs.T.tolist())
        low, high = bootstrap((pairs[:, 0] - pairs[:, 1]).astype("f8"))
        older = {"score": today.score, "full": today.full, "mcnemar": today.mcnemar, "n": count}
        assert tasks.interval(older | {"low": low, "high": high}) == (today.low, today.high)
        assert tasks.interval(older | {"low": -0.5, "high": 0.5, "differing": 1}) == (-0.5, 0.5)
    shares = {"score": 0.5, "full": 0.6, "mcnemar": None, "n": 10}
    assert tasks.interval(shares | {"low": -0.2, "high": 0.0}) == (-0.2, 0.0)
    assert tasks.interval(shares | {"low": 0.0, "high": 0.0}) == (None, None)  # no width is no certainty
    many = {"score": 0.5, "full": 0.5, "mcnemar": 1.0, "n": 10}
    assert tasks.interval(many | {"low": -0.9, "high": 0.9}) == (-0.9, 0.9)  # no counts have this bootstrap


def test_the_page_of_tasks_is_what_the_answers_say() -> None:
    folder = ROOT / "docs" / "benchmarks"
    files = [
        json.loads((folder / f"tasks-{commit}.json").read_text()) for commit in ("299628b5", "3bb539e3", "6928256b")
    ]
    between = (folder / "tasks.md").read_text().partition("<!-- tasks.py -->")[2].partition("<!-- end -->")[0]
    assert between.strip() == script("tasks").table(files).strip()


def test_the_page_of_results_is_what_the_rows_say() -> None:
    results, folder = script("results"), ROOT / "docs" / "benchmarks"
    files = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    assert len(files) >= 2
    assert (folder / "results.md").read_text() == results.tables(results.read_recipe(), files)
