"""Commands that measure, by several processes: the figures and files of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.models_fixture import SUFFIX, kvcal, write_model, write_text
from tests.support.ranks import in_ranks

COUNT = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ranks")
    write_model(base / "model", 2)
    write_text(base / "words.txt")
    return base


def lines(base: Path, folder: Path) -> list[list[object]]:
    given = ["--model", base / "model", "--text", base / "words.txt"]
    windows = ["--windows", "3", "--length", "200", "--batch", "1"]
    ladder = ["--windows", "3", "--holdout", "1", "--length", "230"]
    fits = ["--calibration", base / "words.txt", "--fit-windows", "2", "--fit-length", "100"]
    pairs = ["--keys", "uniform-2", "--values", "uniform-2", "--sink", "4", "--recent", "16", "--block", "16"]
    return [
        ["eval", *given, *windows, "--preset", "kivi-2", "--preset", "uniform-3", "--max-kl", "9", "--no-resume"],
        [
            "compare",
            *given,
            *windows,
            *pairs,
            *fits,
            "--preset",
            "kivi-2",
            "--predict",
            "--output",
            folder / "rows.json",
        ],
        ["recommend", *given, *ladder, "--max-bits", "2.6", "--output", folder / f"chosen{SUFFIX}"],
    ]


def results(base: Path, folder: Path) -> list[tuple[int, Any]]:
    """The exit code of each command, and its JSON without times; None where it printed nothing."""
    folder.mkdir(exist_ok=True)
    done = [kvcal(*line, "--json") for line in lines(base, folder)]
    return [(one.code, _timeless(json.loads(one.out)) if one.out else None) for one in done]


def _timeless(value: Any) -> Any:
    value.pop("seconds", None)
    value.pop("bundle", None)
    return json.loads(json.dumps(value).replace("/alone/", "/shared/"))


def test_figures_and_files_are_those_of_one_process(base: Path, tmp_path: Path) -> None:
    alone = results(base, tmp_path / "alone")
    assert [code for code, _ in alone] == [0, 0, 0]
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def share() -> int:
        (tmp_path / f"found-{os.environ['RANK']}.json").write_text(json.dumps(results(base, tmp_path / "shared")))
        return 0

    ends = in_ranks(COUNT, share, tmp_path, port=agent.port)
    assert [code for code, _ in ends] == [0] * COUNT, ends
    first, *others = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(COUNT)]
    for ours, theirs in zip(alone, first, strict=True):
        assert list(ours) == theirs
    assert others == [[[0, None]] * 3] * (COUNT - 1)
    for name in (f"chosen{SUFFIX}", "rows.json"):
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert len(list((tmp_path / "shared").iterdir())) == 2
