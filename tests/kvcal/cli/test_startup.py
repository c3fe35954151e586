"""What a command imports before it has something to do with it; docs/benchmarks/startup.py prints the time it takes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvcal.pipeline import names
from kvcal_artifacts.bundle import SUFFIX
from tests.support.models_fixture import kvcal
from tests.support.pages import ROOT

OURS = ("kvcal.methods", "kvcal.commands.workbench")  # with what they bring a third of a second
HEAVY = ("torch", "transformers", "triton", "huggingface_hub", "matplotlib", "datasets", "optuna", "numpy", *OURS)
HELP = {"--help": 0, "eval --help": 0, "fit": 0, "fit aqua-kv -h": 0, "names": 0, "names codec": 0, "models": 0}
MISTAKES = {  # command line -> exit code
    "evl": 2,
    "eval --modle tiny": 2,
    "eval --windows none": 2,
    "eval --windows 0": 2,
    "eval -m lama-3.2-3b": 5,
    "eval -p kivi2": 2,
    "eval -p kivi-2 --dtype int4": 2,
    "eval -p kivi-2 --device abacus": 2,
    "eval -p kivi-2 --keep 2": 2,
    "eval -p kivi-2 --text ''": 2,
    "eval -p kivi-2 --text no/such.txt": 1,
    "eval kivi-2": 4,
    "eval missing.kvcal.safetensors": 4,
    "inspect missing.kvcal.safetensors": 4,
    "generate --prompt a": 2,
    "generate --prompt '' -p kivi-2": 2,
    "preset zzz": 2,
    "preset auto-4": 2,
    "recommend --max-bits 3 --max-kl 0.1": 2,
    "recommend --max-bits nan": 2,
    "fit innerq --variant sideways": 2,
    "fit-predictors --frame sideways": 2,
    "fit-predictors --output no/x": 1,
    "train-codebooks --trainer gzip": 2,
    "compare --frame sideways": 2,
    "plan --dtype int8 --gpu l4": 2,
    "names kinds": 2,
}
READ = ["verify BUNDLE", "inspect BUNDLE", "diff BUNDLE BUNDLE"]  # first: what one imports, those behind it have
WITH_TORCH = [*READ, "doctor", "card BUNDLE", "bench --device jetson-orin-nano", "names preset -m tiny"]
PROGRAM = """\
import gc, json, sys
from kvcal.cli import app
ends = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["kvcal", *words]
    try:
        app.main()
    except SystemExit as end:
        loaded = [name for name in HEAVY if name in sys.modules]
        ends.append([end.code, loaded, gc.isenabled() and gc.get_freeze_count() > 0])
print(json.dumps(ends), file=sys.stderr)
"""


def ends(lines: list[str], folder: Path) -> dict[str, tuple[int, list[str], bool]]:
    """Exit code of each command line, which heavy modules were loaded by then, and whether imported objects are frozen
    and garbage is collected again; one process for all.
    """
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "artifacts"))
    words = json.dumps([shlex.split(line) for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY}\n{PROGRAM}", words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        check=True,
    )
    return {
        line: (code, loaded, frozen)
        for line, (code, loaded, frozen) in zip(lines, json.loads(done.stderr.splitlines()[-1]), strict=True)
    }


def test_help_lists_and_mistakes_import_no_torch(tmp_path: Path) -> None:
    expected = HELP | MISTAKES
    assert ends([*expected], tmp_path) == {line: (code, [], False) for line, code in expected.items()}


def test_what_opens_no_model_imports_no_transformers(tmp_path: Path) -> None:
    bundle = f"kivi{SUFFIX}"
    assert kvcal("preset", "kivi-2", "--config-only", "--output", tmp_path / bundle).code == 0
    lines = [line.replace("BUNDLE", bundle) for line in WITH_TORCH]
    for line, (code, loaded, frozen) in ends(lines, tmp_path).items():
        assert code == 0, line
        assert not {"transformers", "matplotlib", "datasets", "optuna", "triton"} & set(loaded), f"{line}: {loaded}"
        assert frozen, f"{line}: torch was imported with the garbage collector on, or that is off now"
        if line.split()[0] in {read.split()[0] for read in READ}:
            assert set(loaded) == {"torch", "numpy"}, f"{line}: {loaded}"


def test_names_in_the_file_are_those_that_the_codecs_count() -> None:
    """`python -m kvcal.commands.names` writes the file."""
    from kvcal.commands.names_counted import counted
    from kvcal.models.configuration import geometry
    from kvcal.models.names import resolve

    assert names.stored() == counted(geometry(resolve(names.MODEL)))
    assert names.SUFFIX == SUFFIX


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvcal eval -m llama-3.1-8", ["llama-3.1-8b", "llama-3.1-8b-instruct"]),
        ("kvcal eval -p kivi-s", ["kivi-sink-2"]),
        ("kvcal fit aqua-kv --backbone higgs-2-d", ["higgs-2-d4"]),
        ("kvcal fit aqua-kv --frame p", ["pre_rope", "post_rope"]),
        ("kvcal plan --gpu rtx-4", ["rtx-4090"]),
        ("kvcal bench --device jetson-x", ["jetson-xavier-nx"]),
        ("kvcal eval --device c", ["cpu", "cuda"]),
        ("kvcal fit in", ["innerq"]),
        ("kvcal compare --keys higgs-2-d", ["higgs-2-d4"]),
        ("kvcal compare --values uniform-4,higgs-2-d", ["uniform-4,higgs-2-d4"]),
        ("kvcal names pre", ["preset"]),
        ("kvcal plan --serve v", ["vllm"]),
        ("kvcal plan --dtype f", ["float16", "float32"]),
        ("kvcal bench --dtype b", ["bfloat16"]),
    ],
)
def test_the_shell_completes_names(words: str, offered: list[str]) -> None:
    environment = {**os.environ, "_KVCAL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment |= {"COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "kvcal"], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert set(offered) <= set(done.stdout.split()), done
    assert all(name.startswith(words.split()[-1]) for name in done.stdout.split())
