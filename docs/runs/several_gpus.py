"""What docs/scale.md says of two and of four GPUs, part after part, in as many calls as it takes:

    PYTHONPATH=.:kernels:artifacts python docs/runs/several_gpus.py --out DIR [--seconds 540] [--only PART ...]

A part that has ended is not run again: --state keeps its figures, and bundles until they were compared. A part that
takes longer than its limit is stopped, and has failed. What does not fit into --seconds waits for the next call, which
the last line says. Exit code 1 if a part failed, 3 if some wait. Models have random weights: times, memory and whether
bytes are equal are of use, errors are not.

    small-1 small-2     fit aqua-kv of Llama-3.2-1B geometry on one GPU and by two ranks (NCCL): the same bytes
    tests               layers, heads and windows on two GPUs: tests/**/test_two_gpus.py
    fit-1 fit-2 fit-4   fit aqua-kv of Llama-3.2-3B geometry, 256 windows of 8192 tokens
    books-1, -2, -4     train-codebooks of the paper's size for it
    70b-1, -2, -4       two layers of Llama-3.1-70B geometry: the second stands for 79 of 80

A part for more GPUs than the machine has is left out.

Transformers' sources are compiled first, as pip does it: without bytecode each process takes seconds longer to import
them, which no rank can share. --gpu 1 takes the second card for parts of one rank: two of them side by side, each with
a --state of its own. --beside STATE: where the part on one GPU is, to compare with, if it ran with another --state.
--dry: sizes for two CPU cores, ranks by gloo: the script itself is tried.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SUFFIX = ".kvcal.safetensors"
GEOMETRY_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0,
                        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
SMALL_70B = GEOMETRY_70B | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300,
}  # fmt: skip
TESTS = ("tests/artifacts/cache/test_two_gpus.py", "tests/kvcal/calibrate/test_two_gpus.py")


@dataclass(frozen=True)
class Part:
    """One command. ranks: processes of torchrun; 1: without it. limit: seconds after which it is stopped. twin: the
    part whose bundle must have the same bytes.
    """

    name: str
    ranks: int
    limit: float
    words: list[str] = field(default_factory=list)
    twin: str | None = None


def parts(folder: Path, dry: bool) -> list[Part]:
    random = ["--random-weights", "--no-resume", "--json"]
    sizes = ["--windows", "8", "--length", "256", "--batch", "1", "--device", "cpu"] if dry else []
    fit, books = ["fit-predictors", *random, *sizes], ["train-codebooks", *random, *sizes]
    small, large, paper = ["-m", "llama-3.2-1b"], ["-m", "llama-3.2-3b"], ["--preset", "3b"]
    some = ["--windows", "24", "--length", "4096"]
    if dry:
        small = large = ["-m", "tiny"]
        paper, some = ["--preset", "small", "--vectors", "2000"], []
    wide = [
        "-m",
        str(folder / "70b"),
        "--text",
        str(folder / "words.txt"),
        "--layerwise",
        *([] if dry else ["--windows", "256", "--length", "8192"]),
    ]
    return [
        Part("small-1", 1, 120, [*fit, *small, *some]),
        Part("small-2", 2, 120, [*fit, *small, *some], "small-1"),
        Part("tests", 1, 530),
        Part("fit-1", 1, 330, [*fit, *large]),
        Part("fit-2", 2, 200, [*fit, *large], "fit-1"),
        Part("fit-4", 4, 150, [*fit, *large], "fit-1"),
        Part("books-1", 1, 420, [*books, *large, *paper]),
        Part("books-2", 2, 330, [*books, *large, *paper], "books-1"),
        Part("books-4", 4, 200, [*books, *large, *paper], "books-1"),
        Part("70b-1", 1, 420, [*fit, *wide]),
        Part("70b-2", 2, 300, [*fit, *wide], "70b-1"),
        Part("70b-4", 4, 200, [*fit, *wide], "70b-1"),
    ]


def launched(part: Part, folder: Path, dry: bool) -> list[str]:
    if part.name == "tests":
        jobs = ["--jobs", "2" if dry else "12", "--seconds", str(part.limit - 20)]
        return [sys.executable, "docs/runs/gpu_tests.py", "--out", str(folder / "tests"), *jobs, *TESTS]
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(part.ranks)]
    output = ["--output", str(folder / f"{part.name}{SUFFIX}")]
    return [sys.executable, *(many if part.ranks > 1 else []), "-m", "kvcal", *part.words, *output]


def run(part: Part, folder: Path, limit: float, dry: bool, gpu: int) -> dict[str, Any]:
    """What a part came to; its output goes to PART.out and PART.err."""
    environment = dict(os.environ)
    if dry:  # as torchrun sets it
        environment["OMP_NUM_THREADS"] = "1"
    environment["TRITON_CACHE_DIR"] = str(folder / f"triton-{part.name}")  # what others compiled is not there
    if part.ranks == 1 and part.name != "tests":
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    began, said = time.time(), folder / f"{part.name}.out"
    with said.open("w") as out, (folder / f"{part.name}.err").open("w") as err:
        process = subprocess.Popen(
            launched(part, folder, dry), stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    found: dict[str, Any] = {"part": part.name, "code": code, "wall_s": round(time.time() - began, 1)}
    if part.name == "tests":
        # without GPUs all are skipped, which says that the files can be read
        found["line"] = (said.read_text().splitlines() or ["nothing"])[-1]
        found["ok"] = code == 0 or (dry and re.match(r"0 passed of \d+", found["line"]) is not None)
        return found
    found["ok"] = code == 0
    if code == 0:
        result = json.loads(said.read_text())
        kept = ("seconds", "phases", "sha256", "peak_device_bytes", "peak_bytes", "bytes", "train_windows", "length")
        found |= {name: result[name] for name in kept if name in result}
        found["sha256"] = hashlib.sha256((folder / f"{part.name}{SUFFIX}").read_bytes()).hexdigest()
    else:
        found["said"] = (folder / f"{part.name}.err").read_text()[-600:]
    return found


def compared(found: dict[str, Any], twin: dict[str, Any] | None) -> dict[str, Any]:
    """Also how it compares with the part on one GPU: `times_as_fast` is the ratio of `seconds`, which begin where
    Transformers is imported, and `times_as_fast_without_weights` that of the seconds without the phase "weights", in
    which random weights are made instead of a checkpoint read. `times_as_fast_by_wall` has the start of Python, of
    torch and of torchrun, too. seconds_outside_phases: what no phase has of `seconds`.
    """
    if "seconds" in found:
        found |= {"seconds_outside_phases": round(found["seconds"] - sum(found["phases"].values()), 1)}
    if twin is None or not (found["ok"] and twin["ok"]):
        return found
    same = found["sha256"] == twin["sha256"]
    if "seconds" in found and "seconds" in twin:
        rest, of_one = (part["seconds"] - part["phases"].get("weights", 0.0) for part in (found, twin))
        found |= {"times_as_fast": round(twin["seconds"] / found["seconds"], 3)}
        found |= {"times_as_fast_without_weights": round(of_one / rest, 3)}
        found |= {"times_as_fast_by_wall": round(twin["wall_s"] / found["wall_s"], 3)}
    return found | {"same_bytes": same, "ok": same}


def compile_sources(package: str) -> None:
    """Write the bytecode of an installed package, where it has none."""
    found = importlib.util.find_spec(package)
    for folder in [] if found is None else found.submodule_search_locations or []:
        compileall.compile_dir(folder, quiet=2, workers=0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options.add_argument("--state", type=Path, default=Path("/tmp/kvcal-several-gpus"))
    options.add_argument("--seconds", type=float, default=540.0)
    options.add_argument("--only", nargs="*")
    options.add_argument("--gpu", type=int, default=0, help="of parts with one rank")
    options.add_argument("--beside", type=Path, nargs="*", default=[], help="other --state folders, to compare with")
    options.add_argument("--dry", action="store_true")
    chosen = options.parse_args()
    began, folder, out = time.time(), chosen.state, chosen.out
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (folder / "70b").mkdir(exist_ok=True)
    (folder / "70b" / "config.json").write_text(json.dumps(SMALL_70B if chosen.dry else GEOMETRY_70B))
    if not chosen.dry:
        compile_sources("transformers")
    from tests.support.models_fixture import write_text, write_tokenizer

    write_tokenizer(folder / "70b")  # a token a byte
    write_text(folder / "words.txt", 20_000 if chosen.dry else 2_600_000)
    gpus = 4 if chosen.dry else torch.cuda.device_count()
    every = [part for part in parts(folder, chosen.dry) if not chosen.only or part.name in chosen.only]
    every, more = [part for part in every if part.ranks <= gpus], [part.name for part in every if part.ranks > gpus]
    store, waiting = folder / "results.json", []
    results: dict[str, dict[str, Any]] = json.loads(store.read_text()) if store.exists() else {}
    twins = dict(results)
    for state in chosen.beside:
        twins = json.loads((state / "results.json").read_text()) | twins
    for part in every:
        if results.get(part.name, {}).get("ok"):
            print(f"{part.name}: done before")
            continue
        if part.limit > began + chosen.seconds - time.time():
            waiting.append(part.name)
            continue
        found = compared(run(part, folder, part.limit, chosen.dry, chosen.gpu), twins.get(part.twin or ""))
        results[part.name] = twins[part.name] = found
        for place in (store, out / "several_gpus.json"):
            place.with_suffix(".tmp").write_text(json.dumps(results, indent=1) + "\n")
            place.with_suffix(".tmp").replace(place)
        print(json.dumps(found), flush=True)
        if "times_as_fast" in found:
            print(
                f"{part.twin} / {part.name}: {found['times_as_fast']} by all seconds, "
                f"{found['times_as_fast_without_weights']} by those without the phase weights, "
                f"{found['times_as_fast_by_wall']} by the clock",
                flush=True,
            )
    for kind in ("*.out", "*.err", "tests/gpu_tests.txt"):
        for file in folder.glob(kind):
            (out / file.name).write_text(file.read_text(errors="replace")[-200_000:])
    failed = [part.name for part in every if part.name in results and not results[part.name]["ok"]]
    left_out = f"; left out, {gpus} GPUs: {', '.join(more)}" if more else ""
    print(f"failed: {', '.join(failed) or 'none'}; waiting for the next call: {', '.join(waiting) or 'none'}{left_out}")
    sys.exit(1 if failed else 3 if waiting else 0)


if __name__ == "__main__":
    main()
