"""From how many cached tokens AQUA-KV is the smallest: its predictors' bytes over the bytes a token that it saves.

    python docs/benchmarks/smallest.py ./smollm2-135m llama-3.1-8b
    python docs/benchmarks/smallest.py --recorded docs/benchmarks/results/*.json

Sizes are those of `kvcal plan`, of geometry alone: no weights are read. `--recorded` takes measured rows instead, those of
the transform too: their resident bytes and stored bits. Resident bytes are there once for all rows, so tokens are those of
all rows together. Windows, which are exact in either scheme, are left out.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from kvcal.commands.options import PlanOptions
from kvcal.commands.plan import run_plan

SCHEME, OTHERS = "aqua-kv", ("kivi-4", "innerq-small", "higgs-2")
CONTEXT = 2048


RECORDED = (  # labels of results.toml that keep something resident
    "2.25 bits.AQUA-KV",
    "2 bits.transform",
    "2 bits.AQUA-KV x transform",
    "3 bits.AQUA-KV x transform",
    "3 bits.VQKV",
    "VQKV of 65536 at 3, 172 windows",
)
THAN = ("KIVI 4", "3 bits.InnerQ Small", "2.25 bits.AQUA-KV")


def main() -> None:
    if "--recorded" in sys.argv[1:]:
        recorded([Path(name) for name in sys.argv[1:] if name != "--recorded"])
        return
    print("| model | tokens that it was made for | smaller than | from tokens |\n|---|---|---|---|")
    for model in sys.argv[1:]:
        options = PlanOptions(model=model, gpu="h200", context=str(CONTEXT), preset=[SCHEME, *OTHERS])
        result = run_plan(options, lambda line: None)
        rows = {row["scheme"]: row for row in result["rows"]}
        resident = rows[SCHEME]["bytes"]["constants"]
        for other in OTHERS:
            bits = rows[other]["bits"] - rows[SCHEME]["bits"]
            print(
                f"| {Path(model).name} | {result['model']['context']:,} | `{other}` | "
                f"{crossing(resident, bits, result['model']['kv_bytes_per_token'])} |"
            )


def recorded(files: list[Path]) -> None:
    """Print the same of measured rows, which have the bytes of the cache at 16 bits and of what stays resident."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ablations"))
    import verdicts

    print("| model | scheme | stored bits | resident | " + " | ".join(f"than {one}" for one in THAN) + " |")
    print("|---" * (4 + len(THAN)) + "|")
    for path in files:
        file = json.loads(path.read_text())
        rows, length = verdicts.rows_by_label(verdicts.results_recipe(), file), file["settings"]["length"]
        for label in RECORDED:
            if (row := rows.get(label)) is None:
                continue
            per_token = row["bytes_at_16_bit"] / length
            cells = [crossing_of(row, rows[other], per_token) if other != label else "–" for other in THAN]
            print(
                f"| {path.stem} | {label} | {row['bits_per_value']:.2f} | {row['resident_bytes'] / 1e6:.3g} MB | "
                f"{' | '.join(cells)} |"
            )


def crossing_of(row: dict[str, Any], other: dict[str, Any], bytes_per_token: float) -> str:
    """The same for two measured rows, each with its resident bytes."""
    resident = row["resident_bytes"] - other["resident_bytes"]
    return crossing(resident, other["bits_per_value"] - row["bits_per_value"], bytes_per_token)


def crossing(resident: float, bits_saved: float, bytes_per_token: float) -> str:
    """The first number of tokens at which resident bytes and codes are no more than the other's. bytes_per_token: at 16
    bits.
    """
    saved = bits_saved / 16 * bytes_per_token
    return f"{max(0, math.ceil(resident / saved)):,}" if saved > 0 else "never"


if __name__ == "__main__":
    main()
