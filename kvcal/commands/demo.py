"""`kvcal demo`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import KVCalError

from ..pipeline.options import EvalOptions, FitPredictorsOptions
from ..report.outputs import check_output
from .common import Say
from .evaluation import run_eval
from .fit_predictors import run_fit_predictors

DEMO_FIT = FitPredictorsOptions(windows=48, holdout=6, length=1024)  # of 72: the whole demo within 90 s on 2 cores
DEMO_WINDOWS = 6
DEMO_PROMPT = (
    "The emperor had resolved to march against the city before the end of the summer. His soldiers, who had been "
    "assembled on the banks of the river"
)


def run_demo(output: Path, say: Say) -> dict[str, Any]:
    """fit, eval and generate on the embedded model; generate runs in a process of its own."""
    started = time.monotonic()
    check_output(output)
    say("1/3 calibrating AQUA-KV on the embedded model and text")
    fitted = run_fit_predictors(replace(DEMO_FIT, output=output), say)
    say("2/3 perplexity through the cache: full precision, HIGGS and AQUA-KV at 2 bits")
    options = EvalOptions(bundle=[output], preset=["higgs-2", "higgs-2-debiased"], windows=DEMO_WINDOWS)
    evaluation = run_eval(options, say)
    say("3/3 loading the bundle in a fresh process and generating")
    command = [
        sys.executable,
        "-m",
        "kvcal.cli",
        "generate",
        "--bundle",
        str(output),
        "--prompt",
        DEMO_PROMPT,
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its stderr is ours
    if done.returncode:
        raise KVCalError(
            f"generating in a fresh process failed with exit code {done.returncode}; its own line is above"
        )
    generated = json.loads(done.stdout)
    return evaluation | {
        "bundle": str(output.resolve()),
        "sha256": fitted["sha256"],
        "sample": generated["text"],
        "generated": generated,
        "seconds": round(time.monotonic() - started, 1),
    }
