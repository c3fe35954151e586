"""Two GPUs: a model's layers on both (device_map), its heads on both (tp_plan), its windows on both (torchrun)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models_fixture import ROOT, SUFFIX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HALVES = {
    "model.embed_tokens": 0,
    "model.rotary_emb": 0,
    **{f"model.layers.{index}": index // 4 for index in range(8)},
    "model.norm": 1,
    "lm_head": 1,
}
FIT = ["fit-predictors", "--windows", "12", "--length", "256", "--batch", "2", "--json"]
# A command takes seconds, and more than a minute where a dozen others import, compile and share both GPUs beside it.
SECONDS, RANK_SECONDS = 200, 240  # after which it has failed, and says where each process stands
WAYS = {
    "one": [],
    "layers on both": ["--device-map", json.dumps(HALVES)],
    "balanced": ["--device-map", "balanced"],
    "heads on both": ["--tp-plan", "auto"],
    "windows on both": [],
}


def ran(way: str, *words: object) -> Any:
    """A command on tiny, a process of its own or two: its JSON."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = [sys.executable, *(launch if way in ("heads on both", "windows on both") else []), "-m", "kvcal"]
    environment = {**os.environ, "KVCAL_RANK_TIMEOUT": str(RANK_SECONDS), "KVCAL_DEBUG": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"  # a process that is aborted prints what each of its threads does
    process = subprocess.Popen(
        [*started, *map(str, words), *WAYS[way]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        for pid in ranks or [str(process.pid)]:
            os.kill(int(pid), signal.SIGABRT)
        time.sleep(5)
        process.terminate()  # torchrun ends its processes, which have sessions of their own
        out, err = process.communicate()
        raise AssertionError(f"{way}: not done after {SECONDS} s: {err[:9000]} ... {err[-3000:]}") from None
    assert process.returncode == 0, err[-3000:]
    return json.loads(out)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("one") / f"one{SUFFIX}"
    ran("one", *FIT, "--output", path)
    return path


@pytest.mark.parametrize("way", ["layers on both", "balanced", "windows on both"])
def test_a_bundle_has_the_bytes_of_one_gpu(bundle: Path, tmp_path: Path, way: str) -> None:
    ran(way, *FIT, "--output", tmp_path / f"two{SUFFIX}")
    one, two = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (bundle, tmp_path / f"two{SUFFIX}"))
    assert one == two  # of bytes pytest would print the difference, which takes minutes


def test_a_bundle_of_heads_on_both_has_the_errors_of_one_gpu(tmp_path: Path) -> None:
    """Sums of products over both differ in their last bits, and so does what is rounded."""
    found, wanted = (ran(way, *FIT, "--output", tmp_path / f"{way}{SUFFIX}") for way in ("heads on both", "one"))
    names = [name for name, figure in wanted.items() if name.endswith(("_error", "_variance")) and figure]
    assert names
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=0.05), name


GENERATE = ["generate", "--prompt", "The sea was calm, and the ship", "--tokens", "200", "--dtype", "float32", "--json"]


@pytest.mark.parametrize("scheme", ["aqua", "kivi-4", "higgs-2"])
@pytest.mark.parametrize("way", ["layers on both", "heads on both"])
def test_tokens_are_those_of_one_gpu(bundle: Path, way: str, scheme: str) -> None:
    """Also beyond the first packed block."""
    words = ["--bundle", bundle] if scheme == "aqua" else ["--preset", scheme]
    found, wanted = (ran(one, *GENERATE, *words) for one in (way, "one"))
    assert found["text"] == wanted["text"] and wanted["unpacked"] is None


@pytest.mark.parametrize("way", ["layers on both", "heads on both"])
def test_an_evaluation_has_the_figures_of_one_gpu(bundle: Path, way: str) -> None:
    words = ["eval", bundle, "--preset", "kivi-4", "--windows", "2", "--length", "512", "--dtype", "float32", "--json"]
    for one, other in zip(ran(way, *words)["rows"], ran("one", *words)["rows"], strict=True):
        for name in ("kl", "bits_per_value", "smaller", "perplexity"):
            assert one[name] == pytest.approx(other[name], rel=1e-2, abs=1e-6), (one["name"], name)
