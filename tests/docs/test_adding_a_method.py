"""docs/adding-a-method.md, word by word: its files and changes go into a copy of the sources, its commands are run
there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.models_fixture import ROOT

PAGE = (ROOT / "docs" / "adding-a-method.md").read_text("utf-8").partition("## In a checkout")[2]
PARTS = ("kvcal", "artifacts", "kernels", "tests", "docs", "pyproject.toml", "README.md")
STEPS = 6


def test_the_package_s_codec_of_scales_by_channel_keeps_the_contract() -> None:
    """In a process of its own: a registered name stays."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text("utf-8").partition("### A codec of scales by channel")[2]
    [code] = re.findall(r"```python\n(.*?)^```$", page.partition("### Check a codec")[0], re.M | re.S)
    code += """
register()
from kvcal_artifacts.codecs import Shape
failed = [outcome.check for outcome in kvcal.check_codec("per-channel-3") if not outcome.passed]
print(failed, *(PerChannel(Shape(2, 64, block), "key").bits_per_value() for block in (32, 128)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["[]", "3.5", "3.125"]


@dataclass(frozen=True)
class Part:
    """One fenced block: its language, and the file that the text before it names last."""

    step: int
    language: str
    file: str
    body: str


def parts() -> Iterator[Part]:
    step, file = 0, ""
    for found in re.finditer(r"^## (\d)\.|^```(\w+)\n(.*?)^```$|`([\w/.-]+\.(?:py|md))`[^`]*(?=\n)", PAGE, re.M | re.S):
        number, language, body, named = found.groups()
        step, file = int(number or step), named or file
        if language and language != "text":  # what a command printed
            yield Part(step, language, file, body)


def apply(part: Part, root: Path) -> None:
    """A file as it stands, or a change whose lines are found exactly once."""
    path = root / part.file
    if part.language == "python":
        assert not path.exists(), f"{part.file} is there already"
        path.write_text(part.body)
        return
    lines = part.body.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{part.file} has these lines {text.count(old)} times, not once:\n{old}"
    path.write_text(text.replace(old, new), "utf-8")


def run(line: str, root: Path) -> str:
    """A command of the page, by this interpreter and with the copy's sources."""
    words = shlex.split(line)
    program = {"pytest": ["-m", "pytest"], "kvcal": ["-m", "kvcal.cli"], "python": []}[words[0]]
    path = os.pathsep.join(str(root / part) for part in ("", "kernels", "artifacts"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *program, *words[1:]], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    root = tmp_path / "kvcal"
    root.mkdir()
    for name in PARTS:
        source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__", "ablations", "runs")
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=ignore)
        else:
            shutil.copy(source, root / name)
    return root


def passed(printed: str) -> int:
    return int(re.findall(r"(\d+) passed", printed)[0])


def test_listing_brings_codec_and_method_into_the_suites(copied: Path) -> None:
    """The page's files and changes, none of them to a test."""
    for part in parts():
        if part.language != "bash":
            assert not part.file.startswith("tests/")
            apply(part, copied)
    folders = "tests/artifacts/codecs/test_codecs_in_cache.py tests/kvcal/methods/test_methods.py"
    suites = f"{folders} tests/artifacts/bundle/test_format.py"
    chosen = "ternary and not windows and not twice or every_kind"
    assert passed(run(f'pytest -q {suites} -k "{chosen}"', copied)) > 15


@pytest.mark.slow
def test_the_page_works_word_by_word(copied: Path) -> None:
    """Its commands too, step by step."""
    printed: dict[int, list[str]] = {}
    for part in parts():
        if part.language == "bash":
            printed.setdefault(part.step, []).extend(run(line, copied) for line in part.body.splitlines())
        else:
            apply(part, copied)
    assert passed(printed[3][0]) > 100, "the codec's contract: alone and under a predictor, two roles"
    assert passed(printed[5][0]) > 10, "the method's contract"
    error, bits = map(float, printed[6][1].split())
    assert 0 < error < 0.5 and 2 < bits < 3
    assert "ternary" in printed[6][2] and "under-predictors" in printed[6][2]


def test_the_page_has_six_steps_and_code_in_each() -> None:
    assert {part.step for part in parts()} == set(range(1, STEPS + 1))
    assert [part.file for part in parts() if part.language == "python"] == [
        "artifacts/kvcal_artifacts/codecs/ternary.py",
        "kvcal/methods/ternary.py",
        "fit_ternary.py",
    ]
