"""How long `kvcal eval` takes, before and after a change, in one run.

    python docs/benchmarks/evaluation.py --before COMMIT [--repeats 3] [-- OPTIONS OF kvcal eval]

COMMIT is checked out beside the working tree for the time of the run. Both run the same command in turns, a process each
time, and the fastest counts. `bar`: seconds between the first and the last step of the progress bar "Evaluating", in
which full precision and all rows run over the text. `all`: seconds of the command without imports (those of other models
than Llama's are in it): model and text loaded, guard, bar, canary. Default command: two presets on one window of 1024
tokens of `tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["-p", "kivi-2", "-p", "higgs-2", "--windows", "1", "--length", "1024"]
DRIVER = """\
import json, sys, time
import transformers.models.auto.modeling_auto, transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama  # of `tiny` and of SmolLM2
from kvcal.cli import app
from kvcal.commands import evaluation
seconds = {"bar": 0.0}
inner = evaluation.evaluate
def timed(*args, **kwargs):
    started = time.perf_counter()
    try:
        return inner(*args, **kwargs)
    finally:
        seconds["bar"] += time.perf_counter() - started
evaluation.evaluate = timed
sys.argv = ["kvcal", "-q", "eval", "--no-resume", "--json", *sys.argv[1:]]
started = time.perf_counter()
try:
    app.main()
except SystemExit as done:
    if done.code:
        raise
seconds["all"] = time.perf_counter() - started
print(json.dumps(seconds), file=sys.stderr)
"""


def timed(tree: Path, options: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one run of the program in `tree`, and the KL of each row."""
    path = os.pathsep.join(str(tree / part) for part in (".", "kernels", "artifacts"))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tree,  # `python -c` looks there first
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    kl = {row["name"]: row["kl"] for row in json.loads(done.stdout)["rows"]}
    return json.loads(done.stderr.splitlines()[-1]), kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="a commit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("options", nargs="*", help="of kvcal eval, behind --")
    asked = parser.parse_args()
    options = asked.options or COMMAND
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", str(before), asked.before], cwd=ROOT, check=True)
        try:
            trees = {"before": before, "after": ROOT}
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            kl = {}
            for _ in range(asked.repeats):
                for name, tree in trees.items():
                    seconds, kl[name] = timed(tree, options)
                    runs[name].append(seconds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)
    print(f"kvcal eval {' '.join(options)}\n\n| | bar, s | all, s | all / bar | KL |\n|---|---|---|---|---|")
    for name, some in runs.items():
        best = min(some, key=lambda seconds: seconds["all"])
        rows = ", ".join(f"{row} {value:.6f}" for row, value in kl[name].items() if row != "full")
        print(f"| {name} | {best['bar']:.2f} | {best['all']:.2f} | {best['all'] / best['bar']:.2f} | {rows} |")


if __name__ == "__main__":
    main()
