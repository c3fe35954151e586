"""Generated programs reach nothing, and only one that comes to its end passes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcal.evaluate import sandbox
from kvcal.evaluate.harness import TaskOptions
from kvcal.evaluate.programs import problems
from kvcal_artifacts.errors import KVCalError, TextUnavailable, UsageError


def able() -> bool:
    try:
        sandbox.check()
    except UsageError:
        return False
    return True


shut_in = pytest.mark.skipif(not able(), reason="this machine lets no user make namespaces")

PROGRAMS = {
    "assert 1 + 1 == 2": True,
    "assert 1 + 1 == 3": False,
    "syntax error": False,
    "import sys; sys.exit(0)": False,
    "import os; os._exit(0)": False,
    "raise SystemExit": False,
    "import collections, math, typing, re": True,
    "x = bytearray(3 << 30)": False,
    "import os; assert os.getuid() != 0": True,
    "import socket; assert [name for _, name in socket.if_nameindex()] == ['lo']": True,
    "import socket; socket.create_connection(('127.0.0.1', 22), 1)": False,
    "import os; assert len(os.listdir('/tmp')) == 0": True,
    "open('/tmp/x', 'w').write('a')": True,
    "open('/usr/x', 'w')": False,
    "import subprocess; subprocess.run(['mount', '-o', 'remount,rw', '/usr'], check=True)": False,
}


@shut_in
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_passes(program: str) -> None:
    assert sandbox.passes(program) == PROGRAMS[program]


@shut_in
def test_files_of_ours_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    assert not sandbox.passes(f"open({str(secret)!r})")
    assert not sandbox.passes(f"open({str(Path.cwd() / 'pyproject.toml')!r})")


@shut_in
def test_an_endless_program_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    assert not sandbox.passes("while True: pass")


def test_a_machine_without_namespaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.check.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: None)
    with pytest.raises(UsageError, match="could not be shut in"):
        sandbox.check()
    sandbox.check.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match="needs `unshare`"):
        sandbox.check()
    sandbox.check.cache_clear()


def test_problems_of_a_local_file(tmp_path: Path) -> None:
    row = {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f", "task_id": "x"}
    file = tmp_path / "humaneval.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    found = problems(TaskOptions(tasks_path=tmp_path, limit=1))
    assert found == [{name: row[name] for name in ("prompt", "test", "entry_point")}]


def test_problems_of_the_file_as_it_is_distributed(tmp_path: Path) -> None:
    row = {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(row) + "\n")
    assert problems(TaskOptions(tasks_path=tmp_path)) == [row]


def test_a_folder_without_problems_is_named_where_the_hub_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    spec = importlib.util.find_spec("json")  # of any module that is there
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=away, __spec__=spec))
    places = re.escape(f"there is no {tmp_path / 'humaneval.jsonl'} or {tmp_path / 'HumanEval.jsonl'}, and openai/")
    with pytest.raises(TextUnavailable, match=places):
        problems(TaskOptions(tasks_path=tmp_path))
    with pytest.raises(TextUnavailable, match="no --tasks-path holds humaneval"):
        problems(TaskOptions())


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"prompt": "x"}', '{"prompt": 1, "test": "", "entry_point": ""}'])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "humaneval.jsonl").write_text(content)
    with pytest.raises(KVCalError, match=r"--task humaneval: .*humaneval.jsonl"):
        problems(TaskOptions(tasks_path=tmp_path))


def test_programs_run_only_where_allowed() -> None:
    from kvcal.evaluate.programs import humaneval

    model: Any = None
    with pytest.raises(UsageError, match="give --allow-code"):
        humaneval(model, None, None, TaskOptions())


def test_the_hubs_problems_without_datasets_are_a_line_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UsageError, match=r"--task humaneval needs datasets.*pip install 'kvcal\[data\]', or put humaneval"
    ):
        problems(TaskOptions())


MOUNTED_BELOW = """\
from kvcal.evaluate import sandbox
assert sandbox.passes("import os; assert os.listdir('/usr/share') == ['there']")
assert not sandbox.passes("open('/usr/share/x', 'w')")
assert not sandbox.passes("import subprocess; subprocess.run(['mount', '-o', 'remount,rw', '/usr/share'], check=True)")
"""


@shut_in
def test_where_something_is_mounted_below_a_folder() -> None:
    """As in containers, which show drivers and files of the host so. It may be neither left out nor written to."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    prepare = 'mount -t tmpfs tmpfs /usr/share && touch /usr/share/there && exec "$@"'
    done = subprocess.run(
        [*words, prepare, "sh", sys.executable, "-c", MOUNTED_BELOW], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
