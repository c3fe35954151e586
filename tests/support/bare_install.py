"""What kvcal must do where nothing but its own requirements is installed: run by `nox -s install_check` on the wheel.

    python bare_install.py

Exits with 1, and a line, where something does not hold. Imports nothing of the tests, and works in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

EXTRAS = {"datasets": "data", "pyarrow": "data", "optuna": "tune", "matplotlib": "plot", "lm_eval": "tasks"}
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
)


def problems() -> Iterator[str]:
    """A line for each thing that does not hold."""
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield f"{module} is installed: a bare install must not bring it, it belongs to the extra {extra}"
    for words in WORKS:
        done = kvcal(*words)
        if done.returncode:
            yield f"kvcal {' '.join(words)[:60]}: exit code {done.returncode}: {done.stderr[-500:]}"
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"a bundle does not load and generate: {done.stderr[-500:]}"
    Path("rows.parquet").write_bytes(b"PAR1")
    for words, extra in REFUSED:
        done = kvcal(*words)
        said = f"which is not installed: pip install 'kvcal[{extra}]'"
        if done.returncode != 2 or said not in done.stderr.splitlines()[-1]:
            yield f"kvcal {' '.join(words)}: exit code {done.returncode}, must be 2 and say {said!r}: {done.stderr[-500:]}"


def kvcal(*words: str) -> subprocess.CompletedProcess[str]:
    """The command line, in a process of its own."""
    command = [sys.executable, "-m", "kvcal", "--quiet", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    """Print the problems; 1 if there are any."""
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
