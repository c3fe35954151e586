"""Eager decode steps of two checkouts in short turns: how much longer the host takes in the new one.

    python docs/benchmarks/host_steps.py OLD NEW [--rounds 40] [--steps 5] [--out DIR]

Each checkout has a process of its own, whose caches are filled as docs/benchmarks/eager.py of that checkout fills them.
The two take turns of --steps steps, and who is first changes from round to round, so that a host that is slower for a
second is slower for both. A round's figure is the ratio of the least step of each. ratio: its median over the rounds,
with the standard error of the mean of its logarithm; slower: above 1 by more than 2.02 of these (Student's t, 40 rounds).
`--device cpu --model tiny` tries the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

SCHEMES = "innerq-base,higgs-2"
LIMIT = 2.02
WARM_UP = 72  # steps of each kind before any counts: two blocks are packed, and kernels compiled for their shapes


# In a checkout's process.


def serve(options: argparse.Namespace) -> None:
    """Answer each line `KIND STEPS` with the milliseconds of so many steps, as JSON."""
    sys.path.insert(0, "docs/benchmarks")
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    import eager

    names = eager.models if hasattr(eager, "models") else eager.names
    loader = eager.models if hasattr(eager, "models") else eager.loading
    geometries = eager.models if hasattr(eager, "models") else eager.configuration
    source = names.resolve(options.model)
    model = loader.load_model(source, dtype="bfloat16", device=options.device, random_weights=True).model
    geometry = geometries.geometry(source)
    room = WARM_UP + 2 * (options.rounds + 2) * options.steps
    with torch.no_grad(), contextlib.ExitStack() as stack:
        loops = {}
        for kind in kinds(options):
            scheme, static = kind.split(":")
            codecs = eager.schemes.named(scheme, geometry)
            length = eager.caches.start_of(codecs.windows, options.length)
            held = length + room if static == "max_length" else None
            cache = stack.enter_context(eager.filled_cache(model, geometry, codecs, 1, length, max_length=held))
            loops[kind] = eager.Loop(model, cache, length, length + room)
            eager.timed(loops[kind], WARM_UP)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            kind, steps = line.split()
            print(json.dumps(eager.timed(loops[kind], int(steps))), file=answers, flush=True)


def kinds(options: argparse.Namespace) -> list[str]:
    return [f"{scheme}:{how}" for scheme in options.schemes.split(",") for how in ("grows", "max_length")]


# The two processes' turns.


def started(tree: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    paths = [".", "kernels", "artifacts", *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, str(Path(__file__).resolve()), tree, tree, "--serve"]
    for name in ("model", "schemes", "length", "device", "rounds", "steps"):
        words += [f"--{name}", str(getattr(options, name))]
    return subprocess.Popen(
        words,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def turn(process: subprocess.Popen[str], kind: str, steps: int) -> list[float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{kind} {steps}\n")
    process.stdin.flush()
    return [float(one) for one in json.loads(process.stdout.readline())]


def compared(kind: str, old: Callable[[], list[float]], new: Callable[[], list[float]], rounds: int) -> dict[str, Any]:
    """Ratios of one kind's rounds."""
    least: dict[str, list[float]] = {"old": [], "new": []}
    for number in range(rounds):
        sides = [("old", old), ("new", new)]
        for side, steps in sides if number % 2 == 0 else reversed(sides):
            least[side].append(min(steps()))
    logarithms = [math.log(new_ms / old_ms) for old_ms, new_ms in zip(least["old"], least["new"], strict=True)]
    error = statistics.stdev(logarithms) / math.sqrt(rounds)
    return {
        "kind": kind,
        "ratio": math.exp(statistics.median(logarithms)),
        "mean_ratio": math.exp(statistics.fmean(logarithms)),
        "error": error,
        "slower": statistics.fmean(logarithms) > LIMIT * error,
        "old_ms": statistics.median(least["old"]),
        "new_ms": statistics.median(least["new"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="a checkout")
    parser.add_argument("new", nargs="?", help="another one")
    parser.add_argument("--model", default="llama-3.2-1b", help="whose geometry; weights are random")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--length", type=int, default=2048, help="tokens in the caches")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="for host_steps.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU, and torch finds none here (--device cpu --model tiny tries the script)")
    if options.new is None:
        parser.error("OLD and NEW: give two checkouts")
    processes = [started(tree, options) for tree in (options.old, options.new)]
    for process in processes:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            sys.exit("a checkout's process ended before its first step; see above")
    rows = []
    for kind in kinds(options):
        old, new = (partial(turn, process, kind, options.steps) for process in processes)
        rows.append(row := compared(kind, old, new, options.rounds))
        print(
            f"{kind}: new over old {row['ratio']:.3f}, mean {row['mean_ratio']:.3f} ± {row['error']:.3f}, "
            f"{row['old_ms']:.2f} and {row['new_ms']:.2f} ms" + (", slower" if row["slower"] else ""),
            flush=True,
        )
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "host_steps.json").write_text(json.dumps({"rounds": options.rounds, "rows": rows}, indent=1))
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
