"""Draw the pictures of README.md and of the documentation site from recorded rows; every file is written whole.

    python docs/figures.py            # writes docs/assets/*.svg and *.png
    python docs/figures.py --check    # exit code 1 where the numbers behind a picture are not those of figures.json

Memory and speed: lines are projected by the arithmetic of `kvcal plan`, points are measured (docs/benchmarks). KL
against bits: rows of docs/benchmarks/results, which docs/benchmarks/results.md shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "ablations"))

import verdicts  # noqa: E402

from kvcal.bench.devices import DEVICES  # noqa: E402
from kvcal.commands.plan import PlanOptions, run_plan  # noqa: E402
from kvcal.report.colours import colour  # noqa: E402
from kvcal.report.drawn import as_file  # noqa: E402
from kvcal.report.plots import plot_quality  # noqa: E402
from kvcal_artifacts.files import write_atomically  # noqa: E402

ASSETS = DOCS / "assets"
NUMBERS = ASSETS / "figures.json"
RUN = DOCS / "benchmarks" / "generation-2708de7.json"
MODEL, CARD = "llama-3.1-8b", "h200"
LIMIT_GB = DEVICES["rtx-4090"].usable * 2**30 / 1e9  # what a card sold with 24 GB leaves to programs
CONTEXTS = [4096, *(16384 * n for n in range(1, 9))]
SCHEMES = ("fp16", "kivi-4", "inner-4", "innerq-small", "kivi-2-g128")
QUALITY = {  # model -> its picture, and its rows in docs/benchmarks/results
    "SmolLM2-135M": "smollm2-135m",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b",
}
MEASURED = "2026-11"
SHOWN = {  # label of results.toml -> name in the picture
    "2 bits.HIGGS": "HIGGS 2",
    "3 bits.HIGGS": "HIGGS 3",
    "4 bits.HIGGS": "HIGGS 4",
    "2 bits.AQUA-KV, published HIGGS": "AQUA-KV on HIGGS",
    "2.25 bits.AQUA-KV": "AQUA-KV, default",
    "4 bits.AQUA-KV": "AQUA-KV 4",
    "2 bits.bits by KL under predictors, 2.0 bits or fewer": "bits by KL 1.9",
    "2.25 bits.bits by KL under predictors": "bits by KL 2.2",
    "2 bits.AQUA-KV x transform": "AQUA-KV x transform",
    "3 bits.AQUA-KV x transform": "AQUA-KV x transform 3",
    "4 bits.AQUA-KV x transform": "AQUA-KV x transform 4",
    "2 bits.transform": "transform alone",
    "2 bits.VQKV": "VQKV 2",
    "3 bits.VQKV": "VQKV 3",
    "4 bits.VQKV": "VQKV 4",
    "KIVI 2": "KIVI 2",
    "KIVI 2, sink 32, recent 96": "KIVI 2 with sinks",
    "KIVI K4 V2": "KIVI K4 V2",
    "KIVI 4": "KIVI 4",
    "SQuat-pre 2": "SQuat-pre 2",
    "InnerQ K3 V2 symmetric": "InnerQ K3 V2",
    "3 bits.MixKVQ": "MixKVQ 3",
    "4 bits.MixKVQ": "MixKVQ 4",
    "3 bits.KVTuner-like": "KVTuner 3",
    "4 bits.KVTuner-like": "KVTuner 4",
    "TurboQuant 4/3": "TurboQuant 4/3",
    "Quanto-like 4": "Quanto-like 4",
}


def main() -> None:
    numbers = {"memory_and_speed": memory_and_speed(), "quality": {name: quality(name) for name in QUALITY}}
    if "--check" in sys.argv[1:]:
        sys.exit(f"{NUMBERS}: run docs/figures.py" if json.loads(NUMBERS.read_text("utf-8")) != numbers else 0)
    write_atomically(NUMBERS, (json.dumps(numbers, indent=1) + "\n").encode(), str(NUMBERS))
    draw_memory_and_speed(numbers["memory_and_speed"])
    for name, rows in numbers["quality"].items():
        for suffix in (".svg", ".png"):
            plot_quality(rows, title(name), ASSETS / f"kl-{QUALITY[name]}{suffix}")


def memory_and_speed() -> dict[str, Any]:
    """scheme -> stored bits; projected [context, GB in use, tokens per second]; measured the same, of one row."""
    found: dict[str, Any] = {}
    for context in CONTEXTS:
        options = PlanOptions(model=MODEL, gpu=CARD, context=str(context), preset=list(SCHEMES[1:]))
        for row in run_plan(options, lambda line: None)["rows"]:
            entry = found.setdefault(row["scheme"], {"bits": row["bits"], "projected": [], "measured": []})
            entry["projected"].append(
                [context, round(row["decode_peak_bytes"] / 1e9, 2), round(row["tokens_per_second"], 1)]
            )
    for scheme, entry in found.items():
        rows = [row for row in json.loads(RUN.read_text("utf-8"))["rows"] if counts(row, scheme)]
        if not rows:  # projected alone
            continue
        best = max(rows, key=lambda row: row["tokens_per_second"])
        entry["measured"].append(
            [best["length"], round(best["peak_bytes"] / 1e9, 2), round(best["tokens_per_second"], 1)]
        )
    return found


def counts(row: dict[str, Any], scheme: str) -> bool:
    return row["operation"] == "generate" and row["scheme"] == scheme and row["path"].endswith("CUDA graph")


def quality(model: str) -> list[dict[str, Any]]:
    """Rows as `plot_quality` takes them, by stored bits; those on the front of bits and KL of all recorded rows are
    marked.
    """
    rows = verdicts.rows_by_label(verdicts.results_recipe(), results(model))
    every = [row for row in rows.values() if row.get("bits_per_value") is not None and "refused" not in row]
    points = {
        label: {
            "name": name,
            "bits_per_value": round(rows[label]["bits_per_value"], 3),
            "kl": round(rows[label]["kl"], 5),
            "kl_se": round(rows[label]["kl_se"], 5),
        }
        for label, name in SHOWN.items()
    }
    return sorted(
        (point | {"front": best(rows[label], every)} for label, point in points.items()),
        key=lambda point: point["bits_per_value"],
    )


def results(model: str) -> dict[str, Any]:
    """The settings and rows of a model in docs/benchmarks/results."""
    found: dict[str, Any] = json.loads(verdicts.RESULTS[model].read_text("utf-8"))
    return found


def title(model: str) -> str:
    o = results(model)["settings"]
    return f"{model}, WikiText-2, {o['windows']} windows of {o['length']:,} tokens; H100 (bits by KL 2.2: H200), {MEASURED}"


def best(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether none of the rows has less KL at no more bits."""
    return not any(other["kl"] < row["kl"] and other["bits_per_value"] <= row["bits_per_value"] for other in rows)


def draw_memory_and_speed(schemes: dict[str, Any]) -> None:
    """Two panels over the context of one row: GB in use, with a line for a card of 24 GB, and tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    for scheme, entry in schemes.items():
        label = "FP16" if scheme == "fp16" else f"{scheme} ({entry['bits']:g} bits)"
        look = {"color": SHADES[scheme], "linewidth": 1.8}
        for axis, column in ((memory, 1), (speed, 2)):
            axis.plot(
                *zip(*[(row[0] / 1024, row[column]) for row in entry["projected"]], strict=True), **look, label=label
            )
            for row in entry["measured"]:
                axis.plot(row[0] / 1024, row[column], "o", color=look["color"], markersize=6, clip_on=False, zorder=4)
    memory.axhline(LIMIT_GB, color="#c23b22", linestyle="--", linewidth=1)
    memory.text(4, LIMIT_GB + 0.4, f"RTX 4090: {LIMIT_GB:.1f} GB", color="#c23b22", fontsize=9)
    memory.plot([], [], "o", color="#555555", label="measured on an H200")
    memory.plot([], [], "-", color="#555555", label="projected by kvcal plan")
    memory.set(ylabel="GB in use, weights included", ylim=(14, 38))
    speed.set(ylabel="tokens per second", ylim=(0, 160))
    for axis in (memory, speed):
        axis.set(xlabel="context, thousands of tokens (1,024)", xlim=(0, 132), xticks=range(0, 129, 16))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False, fontsize=8.5, loc="upper left")
    figure.suptitle(
        "Llama-3.1-8B's shape, bfloat16, one row; one H200, random weights and data, 2026-11-24", fontsize=10
    )
    for suffix in (".svg", ".png"):
        path = ASSETS / f"memory-and-speed{suffix}"
        write_atomically(path, as_file(figure, path), str(path))


SHADES = {
    "fp16": colour("fp16"),
    "kivi-4": "#cc79a7",
    "inner-4": "#0072b2",
    "innerq-small": "#009e73",
    "kivi-2-g128": "#d55e00",
}


if __name__ == "__main__":
    main()
