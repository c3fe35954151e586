"""What every spread command writes by 1 to 4 ranks, next to what it writes in one process without ranks.

    python docs/runs/rank_bytes.py [--ranks 1 2 3 4] [--only NAME ...]            # in a checkout, on a CPU
    python docs/runs/rank_bytes.py --model FOLDER --text FILE [--windows 6 --length 512]
    python docs/runs/rank_bytes.py --kills 10 [--seed 0] [--first 1]

A row of a Markdown table for each command: the SHA-256 of its bundle, or of its JSON without times, and the numbers of
ranks that wrote the same. With --model it is AQUA-KV of that model instead. With --kills it is a line for each kill -9
of a random rank at a random moment, of KILLED in turn: how the ranks ended, and whether the same command with another
number of ranks went on to the bytes of one process (kill_ranks.sh does so by torchrun itself, which takes longer).
Ranks are forked, with the environment that torchrun gives them, which saves each of them the seconds of importing
torch. Exit code 1 where bytes differ or a command fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.models_fixture import SUFFIX, kvcal
from tests.support.ranks import in_ranks

TEXT = ["--model", "tiny", "--windows", "8", "--length", "256", "--holdout", "2", "--recent", "32", "--batch", "2"]
BOOKS = ["train-codebooks", *TEXT, "--block", "32", "--stages", "2,2,2", "--sizes", "64,64,64", "--max-iterations", "5"]
AQUA, FEW = ["fit-predictors", *TEXT], [*BOOKS, "--vectors", "3000"]
SEARCH = ["tune-bits", *TEXT, "--objective", "kl", "--codecs", "higgs-2,higgs-4", "--max-bits", "4"]
THRESHOLDS = ["tune-thresholds", *TEXT, "--batch", "1", "--block", "32", "--trials", "3"]
BUNDLES = {
    "aqua-kv": AQUA,
    "aqua-kv, layerwise": [*AQUA, "--layerwise"],
    "aqua-kv, spill cpu": [*AQUA, "--spill", "cpu"],
    "aqua-kv, layerwise, spill disk": [*AQUA, "--layerwise", "--spill", "disk"],
    "aqua-kv, after RoPE": [*AQUA, "--frame", "post_rope"],
    "aqua-kv, exact keys and values": [*AQUA, "--quantiser-agnostic"],
    "aqua-kv, reduced-rank": [*AQUA, "--predictor", "reduced-rank"],
    "aqua-kv, linear-4bit": [*AQUA, "--predictor", "linear-4bit"],
    "aqua-kv, bias": [*AQUA, "--predictor", "bias"],
    "aqua-kv, mlp": [*AQUA, "--predictor", "mlp", "--mlp-epochs", "1"],
    "aqua-kv, mlp-no-norm, layerwise": [*AQUA, "--predictor", "mlp-no-norm", "--mlp-epochs", "1", "--layerwise"],
    "aqua-kv, transform": [*AQUA, "--residual", "transform-2.5"],
    "aqua-kv, vq": [*AQUA, "--residual", "vq-2-k256"],
    "aqua-kv, mixkvq keys": [*AQUA, "--keys", "mixkvq-3"],
    "aqua-kv, squat keys": [*AQUA, "--keys", "squat-2-calibrated"],
    "vqkv": FEW,
    "vqkv, layerwise, spill disk": [*FEW, "--layerwise", "--spill", "disk"],
    "vqkv, 140,000 vectors": [*BOOKS, "--windows", "48", "--vectors", "140000"],
    "vqkv by layer": [*FEW, "--per-layer"],
    "vqkv, closed-form": [*FEW, "--trainer", "closed-form"],
    "vqkv, adam": [*FEW, "--trainer", "adam"],
    "innerq": ["fit-norms", *TEXT],
    "innerq, layerwise, spill cpu": ["fit-norms", *TEXT, "--layerwise", "--spill", "cpu"],
    "squat": ["measure-subspaces", *TEXT],
    "squat, layerwise, spill disk": ["measure-subspaces", *TEXT, "--layerwise", "--spill", "disk"],
    "mixkvq, attention": [*THRESHOLDS, "--objective", "attention"],
    "mixkvq, perplexity": [*THRESHOLDS, "--objective", "perplexity"],
    "kvtuner": ["tune-bits", *TEXT, "--block", "32", "--max-bits", "5"],
    "kvtuner, layerwise, spill cpu": [
        "tune-bits", *TEXT, "--block", "32", "--max-bits", "5", "--layerwise", "--spill", "cpu",
    ],
    "tuned by KL": SEARCH,
    "tuned by KL, predicted": [*SEARCH, "--predict"],
    "tuned by KL, head groups": [*SEARCH, "--head-groups", "2"],
}  # fmt: skip
ROWS = ["--model", "tiny", "--windows", "6", "--length", "256"]
FIGURES = {
    "eval": ["eval", *ROWS, "--preset", "kivi-2", "--preset", "innerq-base", "--batch", "1", "--max-kl", "9"],
    "compare": [
        "compare", *ROWS, "--preset", "kivi-2", "--keys", "higgs-2", "--values", "higgs-2", "--predict",
        "--fit-windows", "4", "--fit-length", "256",
    ],
}  # fmt: skip
RECOMMEND = ["recommend", "--model", "tiny", "--windows", "6", "--holdout", "2", "--length", "256", "--max-bits", "3"]
COMMANDS = BUNDLES | FIGURES | {"recommend": RECOMMEND}
KILLED = (
    "aqua-kv", "vqkv", "aqua-kv, mlp", "tuned by KL", "mixkvq, attention", "squat", "innerq", "kvtuner",
    "aqua-kv, layerwise, spill disk", "aqua-kv, transform",
)  # fmt: skip
TIMES = {"seconds", "bundle", "output", "phases", "next"}  # keys of --json: times, and where files lie


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    options.add_argument("--only", nargs="*", choices=COMMANDS)
    options.add_argument("--model", type=Path)
    options.add_argument("--text", type=Path)
    options.add_argument("--windows", default="6")
    options.add_argument("--length", default="512")
    options.add_argument("--kills", type=int)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=1)
    chosen = options.parse_args()
    if chosen.kills:
        same = [_kill(number, chosen.seed) for number in range(chosen.first, chosen.first + chosen.kills)]
        return int(not all(same))
    commands: dict[str, list[str]] = {name: COMMANDS[name] for name in chosen.only or COMMANDS}
    if chosen.model:
        local = ["--model", str(chosen.model), "--text", str(chosen.text), "--windows", chosen.windows]
        local += ["--length", chosen.length, "--holdout", "1", "--batch", "1"]
        commands = {f"aqua-kv, {chosen.model.name}": ["fit-predictors", *local]}
    failed = 0
    print("| command | SHA-256 | ranks that wrote the same | s |\n|---|---|---|---|", flush=True)
    for method, command in commands.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            expected = _sum(command, Path(name))
            same = [count for count in chosen.ranks if expected and _by_ranks(command, Path(name), count) == expected]
        failed += expected is None or same != chosen.ranks
        shown = f"`{expected[:16]}`" if expected else "failed"
        numbers = ", ".join(map(str, same)) or "none"
        numbers += "" if same == chosen.ranks else f" **of {', '.join(map(str, chosen.ranks))}**"
        print(f"| {method} | {shown} | {numbers} | {time.monotonic() - began:.0f} |", flush=True)
    return int(failed > 0)


def _sum(command: list[str], folder: Path) -> str | None:
    """SHA-256 of what the command writes, or prints where that is all; None where it fails."""
    output = folder / f"written{SUFFIX}"
    output.unlink(missing_ok=True)
    bundle = command[0] not in FIGURES
    done = kvcal(*command, *(["--output", output] if bundle else []), "--no-resume", "--json")
    print(done.err, file=sys.stderr)
    if done.code or not done.out:
        return None
    printed = json.dumps(_without_times(json.loads(done.out)), sort_keys=True).encode()
    if command[0] == "recommend":  # both its bundle and what it printed
        return hashlib.sha256(output.read_bytes() + printed).hexdigest()
    return hashlib.sha256(output.read_bytes() if bundle else printed).hexdigest()


def _kill(number: int, seed: int) -> bool:
    """One kill, the run after it, and a line about both; False where bytes differ."""
    chooser = random.Random(f"{seed}/{number}")
    name = KILLED[(number - 1) % len(KILLED)]
    count, again = chooser.randint(2, 4), chooser.randint(1, 4)
    victim, share = chooser.randrange(count), chooser.random()
    with tempfile.TemporaryDirectory() as folder:
        alone, output = (Path(folder) / f"{one}{SUFFIX}" for one in ("alone", "killed"))
        began = time.monotonic()
        assert kvcal(*COMMANDS[name], "--output", alone).code == 0
        moment = share * (time.monotonic() - began)

        def rank(killed: bool) -> int:
            if killed and os.environ["RANK"] == str(victim):
                timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
            done = kvcal(*COMMANDS[name], "--output", output)
            print(done.err)
            return done.code

        ends = in_ranks(count, lambda: rank(True), Path(folder), timeout=120)
        kept = len([*Path(folder).glob(f".{output.name}.partial/*.safetensors")])
        lines = re.findall("^kvcal: .*", "\n".join(text for _, text in ends), re.MULTILINE)
        after = in_ranks(again, lambda: rank(False), Path(folder), timeout=120)
        resumed = [line for _, text in after for line in re.findall("resuming.*? from", text)]
        same = output.exists() and output.read_bytes() == alone.read_bytes()
    print(
        f"{number}. {name}: rank {victim} of {count} after {moment:.2f} s ({share:.0%} of one process's time): codes "
        f"{[code for code, _ in ends]}, {kept} files of a checkpoint, {'; '.join(lines) or 'no line'}; {again} ranks "
        f"again: codes {[code for code, _ in after]}, {'; '.join(resumed) or 'not resumed'}, "
        f"{'the same bytes' if same else 'OTHER BYTES'}",
        flush=True,
    )
    return same and all(code == 0 for code, _ in after)


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(part) for key, part in value.items() if key not in TIMES}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


def _by_ranks(command: list[str], folder: Path, count: int) -> str | None:
    """The same by so many ranks, of which rank 0 alone prints."""
    found = folder / "found.txt"
    found.unlink(missing_ok=True)

    def rank() -> int:
        if (one := _sum(command, folder)) is not None:
            found.write_text(one)
        return 0

    ends = in_ranks(count, rank, folder, timeout=600)
    if any(code for code, _ in ends) or not found.exists():
        print(ends, file=sys.stderr)
        return None
    return found.read_text()


if __name__ == "__main__":
    raise SystemExit(main())
