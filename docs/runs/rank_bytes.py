"""The bundle of every method on `tiny` by 1 to 4 ranks, next to that of the same command in one process.

    python docs/runs/rank_bytes.py [RANKS ...]        # in a checkout, on a CPU

A line for each method: the bundle's SHA-256, and the numbers of ranks that wrote the same bytes. Ranks are forked, with
the environment that torchrun gives them, which saves each of them the seconds of importing torch. Exit code 1 where
bytes differ or a command fails.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.models_fixture import SUFFIX, kvcal
from tests.support.ranks import in_ranks

TEXT = ["--model", "tiny", "--windows", "8", "--length", "256", "--holdout", "2", "--recent", "32", "--batch", "2"]
BOOKS = ["--block", "32", "--stages", "2,2,2", "--sizes", "64,64,64", "--max-iterations", "5"]
SEARCH = ["--objective", "kl", "--codecs", "higgs-2,higgs-4", "--max-bits", "4"]
COMMANDS = {
    "aqua-kv": ["fit-predictors", *TEXT],
    "aqua-kv, mlp": ["fit-predictors", *TEXT, "--predictor", "mlp", "--mlp-epochs", "1"],
    "aqua-kv, transform": ["fit-predictors", *TEXT, "--residual", "transform-2.5"],
    "aqua-kv, vq": ["fit-predictors", *TEXT, "--residual", "vq-2-k256"],
    "aqua-kv, mixkvq keys": ["fit-predictors", *TEXT, "--keys", "mixkvq-3"],
    "vqkv": ["train-codebooks", *TEXT, *BOOKS, "--vectors", "3000"],
    "vqkv, 140,000 vectors": ["train-codebooks", *TEXT, "--windows", "48", *BOOKS, "--vectors", "140000"],
    "vqkv by layer": ["train-codebooks", *TEXT, *BOOKS, "--vectors", "3000", "--per-layer"],
    "vqkv, closed-form": ["train-codebooks", *TEXT, *BOOKS, "--vectors", "3000", "--trainer", "closed-form"],
    "vqkv, adam": ["train-codebooks", *TEXT, *BOOKS, "--vectors", "3000", "--trainer", "adam"],
    "innerq": ["fit-norms", *TEXT],
    "squat": ["measure-subspaces", *TEXT],
    "mixkvq": ["tune-thresholds", *TEXT, "--block", "32", "--trials", "3"],
    "kvtuner": ["tune-bits", *TEXT, "--block", "32", "--max-bits", "5"],
    "tuned by KL": ["tune-bits", *TEXT, *SEARCH],
    "tuned by KL, predicted": ["tune-bits", *TEXT, *SEARCH, "--predict"],
    "tuned by KL, head groups": ["tune-bits", *TEXT, *SEARCH, "--head-groups", "2"],
}


def main(counts: list[int]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for method, command in COMMANDS.items():
            expected = _sum(command, folder, 1)
            same = [count for count in counts if _by_ranks(command, folder, count) == expected]
            failed += expected is None or same != counts
            print(f"{method}: {expected}, the same by {same} ranks of {counts}", flush=True)
    return int(failed > 0)


def _sum(command: list[str], folder: Path, count: int) -> str | None:
    """SHA-256 of what the command writes; None where it fails."""
    output = folder / f"{count}{SUFFIX}"
    output.unlink(missing_ok=True)
    done = kvcal(*command, "--output", output)
    print(done.err, file=sys.stderr)
    return hashlib.sha256(output.read_bytes()).hexdigest() if done.code == 0 and output.exists() else None


def _by_ranks(command: list[str], folder: Path, count: int) -> str | None:
    output = folder / f"ranks{SUFFIX}"
    output.unlink(missing_ok=True)
    ends = in_ranks(count, lambda: kvcal(*command, "--output", output).code, folder, timeout=300)
    if any(code for code, _ in ends):
        print(ends, file=sys.stderr)
        return None
    return hashlib.sha256(output.read_bytes()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main([int(one) for one in sys.argv[1:]] or [1, 2, 3, 4]))
