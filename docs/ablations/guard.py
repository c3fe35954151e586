"""Does the outlier guard's forecast have the order of KL? Forecast and measured KL of many schemes on several models.

    python docs/ablations/guard.py measure --model FOLDER --text wiki.txt --output NAME.json [--bundle X ...] [--jobs 8]
    python docs/ablations/guard.py report docs/ablations/guard/*.json > docs/ablations/guard.md

`measure` forecasts from two windows of embedded text (kvcal/calibrate/forecast.py) and measures KL through the cache on
other text; it goes on from a file that is there. `--forecast-only` makes the forecasts of a file's rows anew. `report`
prints the table, rank correlations, and how far off the forecast is.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

PRESETS = (
    "uniform-8", "uniform-4", "uniform-3", "uniform-2", "higgs-4", "higgs-3", "higgs-2", "higgs-2-debiased", "kivi-4",
    "kivi-2", "kivi-sink-2", "squat-2", "squat-pre-2", "innerq-base", "innerq-hybrid", "innerq-small", "turboquant-4",
    "turboquant-4-3", "turboquant-3", "turboquant-2", "fp8", "mixkvq",
)  # fmt: skip
LEAST = 1e-4  # KL below it is measured as noise of the arithmetic
STATE: dict[str, Any] = {}


def prepare(args: dict[str, Any]) -> None:
    import torch

    from kvcal.commands.workbench import open_model
    from kvcal.text import token_windows

    torch.set_num_threads(args["threads"])
    STATE.update(args=args, loaded=open_model(args["model"], None, dtype=args["dtype"], device=args["device"]))
    text = {"windows": args["windows"], "length": args["length"]}
    STATE["ids"] = token_windows.evaluation_windows(STATE["loaded"].tokenizer, args["text"], **text).ids
    STATE["guard"] = token_windows.evaluation_windows(
        STATE["loaded"].tokenizer, "embedded:evaluation", windows=args["guard_windows"], length=args["guard_length"]
    ).ids


def row(name: str) -> dict[str, Any]:
    """Forecast and measurement of one scheme."""
    from kvcal.calibrate.forecast import forecasts
    from kvcal.commands.workbench import cache_makers
    from kvcal.evaluate.perplexity import evaluate
    from kvcal.methods.data_free import PRESETS as KNOWN
    from kvcal_artifacts.bundle import load_bundle

    what = KNOWN.get(name) or load_bundle(name)
    model = STATE["loaded"].model
    scheme = what.scheme if hasattr(what, "provenance") else what.scheme(model)
    found = forecasts(model, STATE["guard"], {name: scheme})[name]
    own = {"name": Path(name).name.split(".")[0], "forecast": found.kl, "packed": found.packed, "ratio": found.ratio}
    if STATE["args"]["forecast_only"]:
        return own
    full, measured = evaluate(model, STATE["ids"], cache_makers(model, {name: what}), batch=STATE["args"]["batch"])
    return own | {
        "kl": measured.kl, "kl_se": measured.kl_se, "bits": measured.bits_per_value,
        "perplexity": measured.perplexity, "full_perplexity": full.perplexity,
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    own = {
        n: getattr(args, n)
        for n in ("model", "text", "windows", "length", "guard_windows", "guard_length", "dtype", "device")
    }
    found = json.loads(args.output.read_text()) if args.output.exists() else {"settings": own, "rows": []}
    if found["settings"] != own:
        raise SystemExit(f"{args.output}: measured with {found['settings']}; give another --output")
    rows = {one["name"]: one for one in found["rows"]}
    every = (*args.bundle, *(args.preset or PRESETS))
    names = [n for n in every if (Path(n).name.split(".")[0] in rows) == args.forecast_only]
    given = own | {name: getattr(args, name) for name in ("threads", "batch", "forecast_only")}
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), prepare, (given,))
    with pool:
        running = {pool.submit(row, name): name for name in names}
        for task in as_completed(running):
            made = task.result()
            rows[made["name"]] = rows.get(made["name"], {}) | made
            found["rows"] = list(rows.values())
            partial = args.output.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=1) + "\n")
            partial.replace(args.output)
            print(f"{made['name']}: forecast {made['forecast']:.5f}, KL {rows[made['name']]['kl']:.5f}", flush=True)


def ranks(numbers: list[float]) -> list[float]:
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    places = [0.0] * len(numbers)
    for place, index in enumerate(order):
        places[index] = float(place)
    return places


def spearman(a: list[float], b: list[float]) -> float:
    return statistics.correlation(ranks(a), ranks(b))


def report(paths: list[Path]) -> None:
    files = {Path(f["settings"]["model"]).name: f for f in (json.loads(path.read_text()) for path in paths)}
    rows = {m: [r for r in f["rows"] if r["kl"] > LEAST] for m, f in files.items()}
    print(
        "# Forecast and measured KL\n\n"
        "Made by `python docs/ablations/guard.py report docs/ablations/guard/*.json`. How a forecast is made: "
        "[outlier guard](../lab/methods.md#outlier-guard).\nKL is in nats per token: forecast of tokens behind packed "
        "ones, "
        "measured through the cache over all tokens of a window. se: standard error over windows, 0 for one window.\n"
    )
    for model, f in files.items():
        o, pair = f["settings"], ([r["forecast"] for r in rows[model]], [r["kl"] for r in rows[model]])
        print(
            f"- `{model}`: forecast from {o['guard_windows']} windows of {o['guard_length']} tokens of embedded text, "
            "KL of "
            f"{o['windows']} windows of {o['length']} tokens of `{Path(o['text']).name}` "
            f"({f.get('measured', 'commit not recorded')}); {len(rows[model])} schemes with a KL above {LEAST:g}: "
            f"**rank correlation {spearman(*pair):.3f}**."
        )
    every = [(r["forecast"], r["kl"], f"{r['name']} on {m}") for m, own in rows.items() for r in own]
    off = [abs(math.log(max(forecast, LEAST / 10) / kl)) for forecast, kl, _ in every]
    together = spearman([forecast for forecast, _, _ in every], [kl for _, kl, _ in every])
    print(
        f"\nAll {len(every)} together: **{together:.3f}**; the forecast is off by a factor of "
        f"{math.exp(statistics.median(off)):.2f} in the median, {math.exp(max(off)):.1f} at most "
        f"({every[off.index(max(off))][2]}).\n"
    )
    print("| scheme | " + " | ".join(f"{m}: forecast | measured ± se" for m in files) + " |")
    print("|---" * (1 + 2 * len(files)) + "|")
    for name in dict.fromkeys(r["name"] for f in files.values() for r in f["rows"]):
        cells = []
        for f in files.values():
            found = [r for r in f["rows"] if r["name"] == name]
            cells += [x for r in found for x in (f"{r['forecast']:.3g}", f"{r['kl']:.3g} ± {r['kl_se'] or 0:.1g}")]
            cells += ["–", "–"] * (not found)
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="what", required=True)
    one = which.add_parser("measure")
    one.add_argument("--model", required=True)
    one.add_argument("--text", required=True)
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--windows", type=int, default=4)
    one.add_argument("--length", type=int, default=1024)
    one.add_argument("--guard-windows", type=int, default=2)
    one.add_argument("--guard-length", type=int, default=512)
    one.add_argument("--preset", action="append", default=[])
    one.add_argument("--bundle", action="append", default=[])
    one.add_argument("--batch", type=int)
    one.add_argument("--dtype", default="float32")
    one.add_argument("--device", default="auto")
    one.add_argument("--jobs", type=int, default=1)
    one.add_argument("--threads", type=int, default=1)
    one.add_argument("--forecast-only", action="store_true")
    two = which.add_parser("report")
    two.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    measure(args) if args.what == "measure" else report(args.files)


if __name__ == "__main__":
    main()
