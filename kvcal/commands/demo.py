"""`kvcal demo`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from kvcal_artifacts.errors import KVCalError

from ..pipeline.options import FitPredictorsOptions
from ..report.outputs import check_output
from .common import Say
from .fit_predictors import run_fit_predictors
from .results import Demo, DemoRow

DEMO_FIT = FitPredictorsOptions(windows=48, holdout=6, length=1024)  # of 72: the whole demo within 90 s on 2 cores
DEMO_PRESETS = ["kivi-4", "higgs-3", "kivi-sink-2"]
DEMO_ROWS, DEMO_LENGTH, DEMO_STEPS = 4, 2048, 25  # four texts at a time, 100 next tokens in all
DEMO_SEED = 2  # of the sample: its text neither loops nor ends in the middle of a list of names
DEMO_PROMPT = (
    "The emperor had resolved to march against the city before the end of the summer. His soldiers, who had been "
    "assembled on the banks of the river"
)
NEXT = "kvcal plan --model llama-3.1-8b --gpu rtx-4090 --context 32k"


def run_demo(output: Path, say: Say) -> Demo:
    """Fit, compare and generate on the embedded model; generate runs in a separate process."""
    started = time.monotonic()
    check_output(output)
    say("1/3 calibrating AQUA-KV on the embedded model and text")
    fitted = run_fit_predictors(replace(DEMO_FIT, output=output), say)
    say(f"2/3 the same {DEMO_ROWS} texts of {DEMO_LENGTH:,} tokens through five caches")
    rows = compared(output)
    say("3/3 loading the bundle in a fresh process and generating")
    generated = _generated(output)
    return {
        "model": "tiny",
        "rows_of_text": DEMO_ROWS,
        "length": DEMO_LENGTH,
        "rows": rows,
        "bundle": str(output.resolve()),
        "sha256": fitted["sha256"],
        "sample": str(generated["text"]),
        "generated": generated,
        "next": NEXT,
        "seconds": round(time.monotonic() - started, 1),
    }


def compared(bundle: Path) -> list[DemoRow]:
    """Rows of `kvcal.evaluate.agreement`, full precision first and the bundle last."""
    from ..evaluate.agreement import agreement
    from ..models.loading import load_model
    from ..models.names import resolve
    from ..text.token_windows import evaluation_windows
    from .workbench import cache_makers, rows_named

    loaded = load_model(resolve("tiny"), dtype="float32", device="cpu")
    assert loaded.tokenizer is not None  # the embedded model has one
    text = evaluation_windows(loaded.tokenizer, "embedded:evaluation", windows=DEMO_ROWS, length=DEMO_LENGTH)
    methods = rows_named(DEMO_PRESETS, [bundle])
    makers = cache_makers(loaded.model, methods, loaded.revision)
    return [
        {
            "name": row.name,
            "nbytes": row.nbytes,
            "bits_per_value": row.bits_per_value,
            "kl": row.kl,
            "same": row.same,
            "of": row.of,
        }
        for row in agreement(loaded.model, text.ids, makers, DEMO_STEPS)
    ]


def _generated(bundle: Path) -> dict[str, object]:
    """What `kvcal generate --sample` prints as JSON in a separate process."""
    options = [
        "--bundle",
        str(bundle),
        "--prompt",
        DEMO_PROMPT,
        "--sample",
        "--seed",
        str(DEMO_SEED),
        "--tokens",
        "200",
        "--json",
    ]
    command = [sys.executable, "-m", "kvcal.cli", "generate", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its stderr is ours
    if done.returncode:
        raise KVCalError(
            f"generating in a fresh process failed with exit code {done.returncode}; its own line is above"
        )
    generated: dict[str, object] = json.loads(done.stdout)
    return generated
