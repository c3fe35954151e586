"""From how many cached tokens AQUA-KV is the smallest: its predictors' bytes over the bytes a token that it saves.

    python docs/benchmarks/smallest.py ./smollm2-135m llama-3.1-8b

Sizes are those of `kvcal plan`, of geometry alone: no weights are read. Predictors are resident once for all rows, so
tokens are those of all rows together. Windows, which are exact in either scheme, are left out.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from kvcal.commands.options import PlanOptions
from kvcal.commands.plan import run_plan

SCHEME, OTHERS = "aqua-kv", ("kivi-4", "innerq-small", "higgs-2")
CONTEXT = 2048


def main() -> None:
    print("| model | tokens that it was made for | smaller than | from tokens |\n|---|---|---|---|")
    for model in sys.argv[1:]:
        options = PlanOptions(model=model, gpu="h200", context=str(CONTEXT), preset=[SCHEME, *OTHERS])
        result = run_plan(options, lambda line: None)
        rows = {row["scheme"]: row for row in result["rows"]}
        for other in OTHERS:
            print(
                f"| {Path(model).name} | {result['model']['context']:,} | `{other}` | "
                f"{crossing(rows[SCHEME], rows[other], result['model']['kv_bytes_per_token'])} |"
            )


def crossing(scheme: dict[str, Any], other: dict[str, Any], bytes_per_token: int) -> str:
    """The first number of tokens at which predictors and codes are no more than the other's codes."""
    saved = (other["bits"] - scheme["bits"]) / 16 * bytes_per_token
    return f"{math.ceil(scheme['bytes']['constants'] / saved):,}" if saved > 0 else "never"


if __name__ == "__main__":
    main()
