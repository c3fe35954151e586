"""CPU time of commands that read no weights: what the interpreter, imports and the command itself take.

    python docs/benchmarks/startup.py

Each command runs in a process of its own, `--runs` times after one that warms the files' cache and writes bytecode, as
an installed package has it (PYTHONDONTWRITEBYTECODE is not passed on: it costs 0.3 s). Printed is the least user and
system time, which is what a busy machine disturbs least. A bundle for `inspect`, `verify`, `diff` and `card`
is made first, by `kvcal preset --config-only`.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

BUNDLE = "kivi.kvcal.safetensors"
PROMISED = {  # seconds of CPU time: commands
    0.5: (
        "--help",
        "eval --help",
        "names",
        "names codec",
        "models",
        "evl",
        "eval --modle tiny",
        "eval --windows none",
        "preset kivi-2 --sink -1",
        "plan --dtype int8 --gpu l4",
        "generate --prompt a",
        "fit-predictors --frame sideways",
        "compare --frame sideways",
        "eval missing.kvcal.safetensors",
    ),
    1.5: (f"verify {BUNDLE}", f"inspect {BUNDLE}", f"diff {BUNDLE} {BUNDLE}", f"card {BUNDLE}"),
    2.5: ("doctor", "plan -m llama-3.1-8b --gpu rtx-4090", "bench --device jetson-orin-nano"),
}


def seconds(words: list[str], folder: Path) -> float:
    """User and system time of one run."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "kvcal", *words], cwd=folder, env=environment, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds(["preset", "kivi-2", "--config-only", "-o", BUNDLE], folder)
        print(f"{'command':50} {'promised':>8} {'taken':>7}")
        for promised, lines in PROMISED.items():
            for line in lines:
                seconds(shlex.split(line), folder)
                taken = min(seconds(shlex.split(line), folder) for _ in range(runs))
                print(f"{line:50} {promised:6.1f} s {taken:5.2f} s{'  over' if taken > promised else ''}", flush=True)


if __name__ == "__main__":
    main()
