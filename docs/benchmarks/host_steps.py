"""Eager decode steps of two checkouts in short turns: how much longer the host takes in the new one.

    python docs/benchmarks/host_steps.py OLD NEW [--starts 6] [--rounds 8] [--steps 5] [--out DIR]
    python docs/benchmarks/host_steps.py OLD NEW --no-launches --starts 12     # on a CPU: the host's share alone

Each checkout has a process of its own, whose caches are filled as docs/benchmarks/eager.py of that checkout fills them.
The two take turns of --steps steps, and who is first changes from round to round, so that a host that is slower for a
second is slower for both. A round's figure is the ratio of the least step of each.

One process is faster than another of the same commit by up to 15 %, for as long as it lives: where its memory lies, and
on which core it runs. So both processes are started anew --starts times. ratio: mean of the starts, each the median of
its rounds, with the standard error over starts. slower: above 1 by more than the 97.5 % quantile of Student's t of
these.

--no-launches: kernels are chosen, and their arguments made, but no kernel runs. That takes Triton's interpreter and a
small model on a CPU; what is attended is noise then, which steps take no notice of.
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
ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 72  # steps of each kind before any counts: two blocks are packed, and kernels compiled for their shapes


# In a checkout's process.


def serve(options: argparse.Namespace) -> None:
    """Answer each line `KIND STEPS` with the milliseconds of so many steps, as JSON."""
    sys.path.insert(0, "docs/benchmarks")
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    import eager

    if options.no_launches:
        torch.set_num_threads(1)
        stop_launches()
    names = eager.models if hasattr(eager, "models") else eager.names
    loader = eager.models if hasattr(eager, "models") else eager.loading
    geometries = eager.models if hasattr(eager, "models") else eager.configuration
    source = names.resolve(options.model)
    model = loader.load_model(source, dtype="bfloat16", device=options.device, random_weights=True).model
    geometry = geometries.geometry(source)
    room = WARM_UP + 2 * (options.rounds + 2) * options.steps
    kernels = {"kernels": "triton"} if options.no_launches else {}
    with torch.no_grad(), contextlib.ExitStack() as stack:
        loops = {}
        for kind in kinds(options):
            scheme, static = kind.split(":")
            codecs = eager.schemes.named(scheme, geometry)
            length = eager.caches.start_of(codecs.windows, options.length)
            held = length + room if static == "max_length" else None
            filled = eager.filled_cache(model, geometry, codecs, 1, length, max_length=held, **kernels)
            loops[kind] = eager.Loop(model, stack.enter_context(filled), length, length + room)
            eager.timed(loops[kind], WARM_UP)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            kind, steps = line.split()
            print(json.dumps(eager.timed(loops[kind], int(steps))), file=answers, flush=True)


def stop_launches() -> None:
    """Leave out kernels, and the comparison of counts that a static cache's kernels would have advanced."""
    import triton.runtime.interpreter as theirs

    import kvcal_kernels.triton as ours

    ours.Ready.__call__ = lambda self, tensors, *numbers: None
    theirs.GridExecutor.__call__ = lambda self, *arguments, **options: None
    try:
        from kvcal_artifacts.cache.static import device_steps as static
    except ImportError:  # the name before folders changed
        from kvcal_artifacts import fixed as static
    static.compare = lambda *arguments: None


def kinds(options: argparse.Namespace) -> list[str]:
    return [f"{scheme}:{how}" for scheme in options.schemes.split(",") for how in ("grows", "max_length")]


# The two processes' turns.


def started(tree: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    paths = [".", "kernels", "artifacts", *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, str(Path(__file__).resolve()), tree, tree, "--serve"]
    for name in ("model", "schemes", "length", "device", "rounds", "steps"):
        words += [f"--{name}", str(getattr(options, name))]
    interpreted = {"TRITON_INTERPRET": "1"} if options.no_launches else {}
    return subprocess.Popen(
        [*words, *(["--no-launches"] if options.no_launches else [])],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | interpreted,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def turn(process: subprocess.Popen[str], kind: str, steps: int) -> list[float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{kind} {steps}\n")
    process.stdin.flush()
    return [float(one) for one in json.loads(process.stdout.readline())]


def in_turns(old: Callable[[], list[float]], new: Callable[[], list[float]], rounds: int) -> dict[str, float]:
    """One kind's rounds of one start."""
    least: dict[str, list[float]] = {"old": [], "new": []}
    for number in range(rounds):
        sides = [("old", old), ("new", new)]
        for side, steps in sides if number % 2 == 0 else reversed(sides):
            least[side].append(min(steps()))
    ratios = [new_ms / old_ms for old_ms, new_ms in zip(least["old"], least["new"], strict=True)]
    return {"ratio": statistics.median(ratios)} | {f"{side}_ms": statistics.median(ms) for side, ms in least.items()}


def compared(kind: str, starts: list[dict[str, float]]) -> dict[str, Any]:
    """One kind's figures of two or more starts."""
    from kvcal.evaluate.spread import quantile, standard_error  # here: a checkout's process has its own kvcal

    logarithms = [math.log(start["ratio"]) for start in starts]
    mean, error = statistics.fmean(logarithms), standard_error(logarithms)
    return {
        "kind": kind,
        "ratio": math.exp(mean),
        "error": error,
        "slower": mean > quantile(len(starts)) * error,
        "starts": [start["ratio"] for start in starts],
        "old_ms": statistics.median(start["old_ms"] for start in starts),
        "new_ms": statistics.median(start["new_ms"] for start in starts),
    }


def one_start(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each kind's rounds by two new processes."""
    processes = [started(tree, options) for tree in (options.old, options.new)]
    for process in processes:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            sys.exit("a checkout's process ended before its first step; see above")
    found = {}
    for kind in kinds(options):
        old, new = (partial(turn, process, kind, options.steps) for process in processes)
        found[kind] = in_turns(old, new, options.rounds)
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="a checkout")
    parser.add_argument("new", nargs="?", help="another one")
    parser.add_argument("--model", help="whose geometry; weights are random. Default: llama-3.2-1b, or tiny on a CPU")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--length", type=int, default=2048, help="tokens in the caches")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--starts", type=int, default=6, help="how often both processes are started")
    parser.add_argument("--rounds", type=int, default=8, help="of a start")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--no-launches", action="store_true", help="on a CPU: kernels are chosen, and none runs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="for host_steps.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = "cpu" if options.no_launches else options.device
    options.model = options.model or ("tiny" if options.device == "cpu" else "llama-3.2-1b")
    if options.serve:
        serve(options)
        return
    sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "artifacts")]
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU, and torch finds none here (--no-launches measures the host alone)")
    if options.new is None:
        parser.error("OLD and NEW: give two checkouts")
    if options.starts < 2:
        parser.error(f"--starts {options.starts}: must be 2 or more, as one start has no spread")
    every: list[dict[str, dict[str, float]]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for _ in range(options.starts):
        every.append(one_start(options))
        if len(every) < 2:
            continue
        rows = [compared(kind, [start[kind] for start in every]) for kind in kinds(options)]
        names = ("old", "new", "model", "device", "rounds", "steps", "no_launches")
        settings = {name: getattr(options, name) for name in names}
        (options.out / "host_steps.json").write_text(json.dumps(settings | {"rows": rows}, indent=1))
    for row in rows:
        print(
            f"{row['kind']}: new over old {row['ratio']:.3f} ± {row['error']:.3f} of {len(every)} starts, "
            f"{row['old_ms']:.2f} and {row['new_ms']:.2f} ms" + (", slower" if row["slower"] else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
