"""How long `kvcal compare` takes for many presets, before and after a change, in one run.

    python docs/benchmarks/comparing.py --tree before=FOLDER --tree after=. --model ./smollm2-135m --text wiki.txt \
        --device cuda --state DIR [--rounds 2] [--presets 4] [--output compared.json]

A tree is a checkout, as `git worktree add` makes it. Each runs the same command in a process of its own, with caches of
its own in --state. All trees run at once where there is a GPU for each (--first-gpu: the first of them), otherwise in
turns. In the first round kernels are compiled; the last one counts. Seconds are the whole command's, with Python's
start and imports. The rows of both trees must be the same: their largest relative difference of KL is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PRESETS = (
    "higgs-2", "kivi-2", "uniform-4", "squat-2", "higgs-3", "higgs-4", "uniform-2", "kivi-4", "kivi-sink-2", "turboquant-2",
    "turboquant-3", "turboquant-4-3", "innerq-base", "innerq-hybrid", "innerq-small", "squat-pre-2", "fp8",
)  # fmt: skip


class Running:
    """`kvcal compare` of a tree, begun when this is made."""

    def __init__(self, name: str, tree: Path, options: list[str], state: Path, gpu: int | None) -> None:
        self._place = state / name
        self._place.mkdir(parents=True, exist_ok=True)
        caches = {"KVCAL_CACHE_DIR": "kvcal", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache"}
        environment = os.environ | {variable: str(self._place / folder) for variable, folder in caches.items()}
        environment["PYTHONPATH"] = os.pathsep.join(str(tree / part) for part in (".", "kernels", "artifacts"))
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        self._began = time.monotonic()
        with (self._place / "out").open("w") as out, (self._place / "err").open("w") as err:
            words = [sys.executable, "-m", "kvcal", "-q", "compare", *options, "--no-resume", "--json"]
            self._process = subprocess.Popen(words, cwd=tree, env=environment, stdout=out, stderr=err)

    def result(self) -> tuple[float, dict[str, float]]:
        """Seconds, and KL by row."""
        code = self._process.wait()
        seconds = time.monotonic() - self._began
        if code:
            raise SystemExit((self._place / "err").read_text()[-2000:])
        rows = json.loads((self._place / "out").read_text())["rows"]
        return seconds, {row["name"]: row["kl"] for row in rows if row.get("kl") is not None}

    def stop(self) -> None:
        self._process.kill()


def one_round(
    trees: dict[str, Path], options: list[str], state: Path, first_gpu: int | None
) -> dict[str, tuple[float, dict[str, float]]]:
    """Each tree's seconds and KLs. first_gpu: of the first tree, where all run at once; None: in turns."""
    if first_gpu is None:
        return {name: Running(name, tree, options, state, None).result() for name, tree in trees.items()}
    with contextlib.ExitStack() as stack:
        running = {}
        for place, (name, tree) in enumerate(trees.items()):
            running[name] = Running(name, tree, options, state, first_gpu + place)
            stack.callback(running[name].stop)
        # in threads of their own, or the wait for a slower one would count for a faster one
        with ThreadPoolExecutor(len(running)) as threads:
            waited = {name: threads.submit(each.result) for name, each in running.items()}
            return {name: each.result() for name, each in waited.items()}


def apart(kls: list[dict[str, float]]) -> float:
    """The largest difference of a row's KL between the trees, as a share of the larger one."""
    first = kls[0]
    if any(set(other) != set(first) for other in kls):
        raise SystemExit(f"comparing.py: trees have other rows: {[sorted(each) for each in kls]}")
    pairs = [(value, other[row]) for other in kls for row, value in first.items() if other[row] != value]
    return max((abs(one - other) / max(abs(one), abs(other)) for one, other in pairs), default=0.0)


def command(asked: argparse.Namespace) -> list[str]:
    """Options of `kvcal compare`."""
    options = ["-m", str(Path(asked.model).resolve()) if Path(asked.model).exists() else asked.model]
    options += ["--text", str(Path(asked.text).resolve()) if Path(asked.text).exists() else asked.text]
    options += ["--windows", str(asked.windows), "--length", str(asked.length), "--device", asked.device]
    return options + [word for preset in PRESETS[: asked.presets] for word in ("-p", preset)]


def read_trees(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, Path]:
    trees: dict[str, Path] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            parser.error(f"--tree {each}: must be NAME=FOLDER, as in before=../before")
        if name in trees:
            parser.error(f"--tree {each}: {name} is {trees[name]} already: give each tree a name of its own")
        if not Path(folder, "kvcal").is_dir():
            parser.error(
                f"--tree {each}: no folder {Path(folder, 'kvcal')}: give a checkout, as git worktree add makes it"
            )
        trees[name] = Path(folder).resolve()
    return trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", required=True, help="NAME=FOLDER; may be repeated")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", default="embedded:evaluation")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--presets", type=int, default=len(PRESETS), help="the first so many")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first-gpu", type=int, help="all at once, a GPU each, from this one")
    parser.add_argument("--state", type=Path, required=True, help="a folder for caches and output")
    parser.add_argument("--output", type=Path, help="JSON of all rounds")
    asked = parser.parse_args()
    trees = read_trees(parser, asked.tree)
    if not 1 <= asked.presets <= len(PRESETS):
        parser.error(f"--presets {asked.presets}: must be from 1 to {len(PRESETS)}, which is all")
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: must be 1 or more; the last one counts")
    options = command(asked)
    rounds: list[dict[str, Any]] = []
    for _ in range(asked.rounds):
        found = one_round(trees, options, asked.state.resolve(), asked.first_gpu)
        rounds.append({name: {"seconds": round(seconds, 1), "kl": kl} for name, (seconds, kl) in found.items()})
        print(json.dumps({name: each["seconds"] for name, each in rounds[-1].items()}), flush=True)
        if asked.output is not None:
            asked.output.write_text(json.dumps({"command": options, "rounds": rounds}, indent=1) + "\n")
    last = rounds[-1]
    print(f"\nkvcal compare {' '.join(options)}\n\n| | s | s a row |\n|---|---|---|")
    for name, each in last.items():
        print(f"| {name} | {each['seconds']:.1f} | {each['seconds'] / asked.presets:.1f} |")
    print(f"\nKL of {asked.presets} rows: at most {apart([each['kl'] for each in last.values()]):.1e} apart")


if __name__ == "__main__":
    main()
