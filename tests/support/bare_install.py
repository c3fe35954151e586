"""What kvcal must do where nothing but its own requirements is installed: run by `nox -s install_check` on the wheel.

    python bare_install.py

Exits with 1, and a line, where something does not hold. Imports nothing of the tests, and works in a folder of its own.
Torch and Transformers are imported once; each command runs in a child forked from there.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

EXTRAS = {
    "datasets": "data", "pyarrow": "data", "optuna": "tune", "matplotlib": "plot", "lm_eval": "tasks",
    "accelerate": "spread",
}  # fmt: skip
LOADS = """
import torch, kvcal
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_bundle, load_cache
model = load_model(resolve("tiny"), dtype="float32", device="cpu").model
with load_cache(load_bundle("kivi.kvcal.safetensors"), model) as cache, torch.no_grad():
    out = model.generate(torch.arange(100)[None], past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert out.shape[1] == 108 and cache.nbytes("packed") > 0
with kvcal.cache(model, "auto-4") as cache:
    assert cache.describe()["auto"]["preset"] == "auto-4"
"""
WORKS = (
    ("preset", "kivi-4", "-o", "kivi.kvcal.safetensors"),
    ("verify", "kivi.kvcal.safetensors"),
    ("generate", "-b", "kivi.kvcal.safetensors", "--prompt", "The key-value cache " * 20, "--tokens", "8", "--json"),
    ("eval", "kivi.kvcal.safetensors", "--windows", "1", "--length", "128", "--text", "embedded:evaluation"),
    ("plan", "-m", "llama-3.1-8b", "--gpu", "rtx-4090"),
)
REFUSED = (  # a command, and the extra that its line names
    (("eval", "-p", "kivi-4", "--text", "Salesforce/wikitext:wikitext-2-raw-v1:test"), "data"),
    (("eval", "-p", "kivi-4", "--text", "rows.parquet"), "data"),
    (("compare", "-p", "kivi-4", "--plot", "front.png"), "plot"),
    (("tune-thresholds",), "tune"),
    (("tune-thresholds", "--objective", "task:arc_easy"), "tasks"),
    (("eval", "-p", "kivi-4", "--device-map", "auto"), "spread"),
)


def problems() -> Iterator[str]:
    """A line for each thing that does not hold."""
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield f"{module} is installed: a bare install must not bring it, it belongs to the extra {extra}"
    for words in WORKS:
        code, err = kvcal(*words)
        if code:
            yield f"kvcal {' '.join(words)[:60]}: exit code {code}: {err[-500:]}"
    code, err = forked(lambda: exec(LOADS, {}))
    if code:
        yield f"a bundle does not load and generate: {err[-500:]}"
    Path("rows.parquet").write_bytes(b"PAR1")
    for words, extra in REFUSED:
        code, err = kvcal(*words)
        said = f"which is not installed: pip install 'kvcal[{extra}]'"
        if code != 2 or said not in (err.splitlines() or [""])[-1]:
            yield f"kvcal {' '.join(words)}: exit code {code}, must be 2 and say {said!r}: {err[-500:]}"


def kvcal(*words: str) -> tuple[int, str]:
    """The command line's exit code and what it writes to stderr."""

    def run() -> None:
        from kvcal.cli.app import main

        sys.argv = ["kvcal", "--quiet", *words]
        main()

    return forked(run)


def forked(run: Callable[[], None]) -> tuple[int, str]:
    """Run it in a child: its exit code, 1 for an exception or a text that it ends with, and what it writes to stderr."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            err.seek(0)
            return code, err.read()
        code = 1
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def ready() -> None:
    """Import what children need, which costs each of them seconds."""
    gc.disable()
    for module in ("kvcal.cli.app", "kvcal.commands.evaluation", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def main() -> int:
    """Print the problems; 1 if there are any."""
    ready()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines = list(problems())
        for line in lines:
            print(line, file=sys.stderr)
        os.chdir(os.path.sep)
    print(f"bare install: {len(WORKS) + 1} things work, {len(REFUSED)} name their extra, {len(lines)} problems")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
