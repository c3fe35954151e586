"""AQUA-KV's Tables 1 and 5 on any model: fit every variant, run all of them through the cache on one text, print
verdicts.

    python docs/ablations/aqua_kv.py --model MODEL --calibration TEXT --text TEXT --length 4096 --output docs/ablations/NAME

Writes NAME.json (every figure, with settings; a second call goes on from it) and NAME.md.
Paper figures: Llama-3.2-3B, WikiText-2, 2 bits (Table 5).
"order agrees" means: every pair of rows that the paper separates by more than 0.005 in perplexity comes in that order
here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from kvcal.calibrate.driver import fit
from kvcal.calibrate.job import FitOptions
from kvcal.capture.scan import WholeModel
from kvcal.commands.workbench import open_model
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.data_free import Preset
from kvcal.text import token_windows
from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.scheme import Scheme


@dataclass(frozen=True)
class Entry:
    """One row: label, the paper's perplexity (None where it has none), settings of AquaKV or of a Preset."""

    label: str
    paper: float | None
    settings: dict[str, Any] = field(default_factory=dict)
    preset: bool = False


def plain(label: str, codec: str, paper: float | None = None) -> Entry:
    return Entry(label, paper, {"key": codec, "value": codec}, preset=True)


TWO = "higgs-2-wide-debiased"
CHANNEL = {"block": 128}
PAPERS = {"backbone": "higgs-2-wide", "first_layer": "higgs-4-wide"}


def ours(bits: int) -> dict[str, Any]:
    """AquaKV's default codec at so many bits; nothing to say at 2."""
    return {} if bits == 2 else {"backbone": f"higgs-{bits}-wide-debiased"}


DEBIASING = "What debiasing, rotation and inputs do at 2 bits"
ALIKE = (
    ("published HIGGS", "HIGGS as published, rotation over the token", "AQUA-KV, HIGGS as published"),
    ("debiased HIGGS", "HIGGS debiased, rotation over the token", "AQUA-KV, HIGGS debiased (default)"),
)

GROUPS: dict[str, list[Entry]] = {
    "Bits": [
        *(plain(f"Quanto-like {b}", f"uniform-{b}", {2: 21.56}.get(b)) for b in (2, 3, 4)),
        *(plain(f"HIGGS {b}", f"higgs-{b}-wide", {2: 7.47}.get(b)) for b in (2, 3, 4)),
        *(Entry(f"AQUA-KV (Quanto-like {b})", {2: 10.90}.get(b), {"backbone": f"uniform-{b}"}) for b in (2, 3, 4)),
        *(Entry(f"AQUA-KV (HIGGS {b})", {2: 7.03}.get(b), ours(b)) for b in (2, 3, 4)),
    ],
    DEBIASING: [
        plain("HIGGS as published, rotation over the token", "higgs-2-wide"),
        plain("HIGGS debiased, rotation over the token", TWO),
        plain("HIGGS as published, rotation per head (preset higgs-2)", "higgs-2"),
        plain("HIGGS debiased, rotation per head", "higgs-2-debiased"),
        Entry("AQUA-KV, HIGGS as published", None, PAPERS),
        Entry("AQUA-KV, HIGGS debiased (default)", None),
        Entry("AQUA-KV, also K from V of the layer below", None, {"key_inputs": ("k1", "v1")}),
    ],
    "Predictor architecture": [
        Entry("linear", 7.03),
        Entry("MLP without LayerNorm", 7.03, {"predictor": "mlp-no-norm"}),
        Entry("MLP", 7.03, {"predictor": "mlp"}),
        Entry("reduced rank C/4", 7.22, {"predictor": "reduced-rank"}),
        Entry("4-bit (GPTQ)", 7.03, {"predictor": "linear-4bit"}),
        Entry("only bias", 7.24, {"predictor": "bias"}),
    ],
    "First layer": [
        Entry("16 bit", 7.03, {"first_layer": "exact-bf16"}),
        Entry("4 bit", 7.03),
        Entry("3 bit", 7.03, {"first_layer": "higgs-3-wide-debiased"}),
        Entry("2 bit", 7.05, {"first_layer": TWO}),
        Entry("2 bit, d=4 grid", 7.01, {"first_layer": "higgs-2-d4-wide-debiased"}),
        Entry(
            "d=4 grid in all layers",
            None,
            {"first_layer": "higgs-2-d4-wide-debiased", "backbone": "higgs-2-d4-wide-debiased"},
        ),
    ],
    "Sinks": [
        Entry("none", 7.15, {"sink": 0}),
        Entry("4 tokens", 7.03),
        Entry("64 tokens", 7.01, {"sink": 64}),
    ],
    "Predictor inputs": [
        Entry("K_rec -> K, {K_rec, V_old} -> V", 7.03),
        Entry("without V predictor", 7.06, {"value_inputs": ()}),
        Entry("without K predictor", 7.50, {"key_inputs": ()}),
        Entry("without K_rec -> V", 7.04, {"value_inputs": ("v1",)}),
        Entry("without V_old -> V", 7.04, {"value_inputs": ("k0",)}),
        Entry("inputs from L-1 and L", 7.02, {"key_inputs": ("k1", "k2"), "value_inputs": ("v1", "v2", "k0")}),
        Entry("inputs only from L-1", 7.04, {"key_inputs": ("k2",), "value_inputs": ("v2", "k0")}),
    ],
    "Order of RoPE, HIGGS": [
        Entry("before RoPE", 7.03),
        Entry("after RoPE", 7.05, {"rope": "post_rope"}),
    ],
    "Order of RoPE, Quanto-like": [
        Entry("before RoPE", 10.90, {"backbone": "uniform-2"}),
        Entry("after RoPE", 10.33, {"backbone": "uniform-2", "rope": "post_rope"}),
    ],
    "Residual axis (blocks of 128 tokens)": [
        Entry("per token", 7.03, CHANNEL),
        Entry(
            "per channel",
            7.06,
            {"backbone": "higgs-2-channel-debiased", "first_layer": "higgs-4-channel-debiased", **CHANNEL},
        ),
    ],
    "Quantiser errors": [
        Entry("quantiser-specific", 7.03),
        Entry("quantiser-agnostic", 7.13, {"quantiser_agnostic": True}),
    ],
}


def key_of(entry: Entry) -> str:
    """Equal settings are fitted and run once."""
    return json.dumps([entry.preset, entry.settings], sort_keys=True)


def agrees(pairs: list[tuple[float, float]]) -> bool:
    """pairs (paper, ours): whether every pair the paper separates comes in its order."""
    return all((a[1] < b[1]) == (a[0] < b[0]) for a, b in combinations(pairs, 2) if abs(a[0] - b[0]) > 0.005)


def fitted(
    entry: Entry, loaded: Any, text: token_windows.Windows, args: argparse.Namespace
) -> tuple[Scheme, dict[str, Any]]:
    """The row's scheme, and what fitting it took."""
    if entry.preset:
        return Preset(**entry.settings).scheme(loaded.model), {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = fit(
            AquaKV(**entry.settings), WholeModel(loaded.model), text, Path(folder) / "x.kvcal.safetensors",
            model_record={"name": args.model}, revision=loaded.revision, device=loaded.model.device,
            options=FitOptions(batch=args.batch),
        )  # fmt: skip
        scheme = load_bundle(result.path).scheme
    facts: dict[str, Any] = {"fit_seconds": round(time.monotonic() - started, 1)}
    for name in ("key_explained_variance", "value_explained_variance"):
        facts[name] = result.bundle.metrics.get(name)
    return scheme, facts


def measure(
    entry: Entry, loaded: Any, text: token_windows.Windows, ids: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """One row, with the full-precision row it was compared with under "full"."""
    scheme, facts = fitted(entry, loaded, text, args)
    started = time.monotonic()
    makers = {"row": lambda: KVCalCache(scheme, loaded.model)}
    full, row = evaluate(loaded.model, ids, makers, step=32, batch=args.eval_batch)
    facts["eval_seconds"] = round(time.monotonic() - started, 1)
    return row.as_dict() | facts | {"full": full.as_dict()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All rows; each is written to NAME.json as it is ready, and a second call goes on from there."""
    loaded = open_model(args.model, None, dtype=args.dtype, device=args.device)
    text = token_windows.token_windows(
        loaded.tokenizer, args.calibration, windows=args.windows, holdout=args.windows // 8, length=args.length, seed=0
    )
    found = token_windows.evaluation_windows(loaded.tokenizer, args.text, windows=args.eval_windows, length=args.length)
    settings = {
        "model": Path(args.model).name, "revision": loaded.revision, "dtype": str(loaded.model.dtype),
        "device": loaded.model.device.type, "calibration": text.source, "calibration_sha256": text.sha256,
        "windows": args.windows, "text": found.source, "text_sha256": found.sha256,
        "eval_windows": len(found.ids), "length": args.length,
    }  # fmt: skip
    path = args.output.with_suffix(".json")
    rows: dict[str, Any] = {}
    if path.exists() and (before := json.loads(path.read_text()))["settings"] == settings:
        rows = before["rows"]
    groups = {name: group for name, group in GROUPS.items() if not args.groups or name in args.groups}
    for entry in (e for group in groups.values() for e in group):
        if key_of(entry) not in rows:
            rows[key_of(entry)] = measure(entry, loaded, text, found.ids, args)
            path.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
            seen = rows[key_of(entry)]
            print(entry.label, round(seen["perplexity"], 3), round(seen["kl"], 5), seen["eval_seconds"], flush=True)
    return labelled(settings, rows, groups)


def labelled(settings: dict[str, Any], rows: dict[str, Any], groups: dict[str, list[Entry]]) -> dict[str, Any]:
    """What a report is made of."""
    tables = {name: [rows[key_of(e)] | {"label": e.label, "paper": e.paper} for e in g] for name, g in groups.items()}
    return settings | {"full": next(iter(rows.values()))["full"], "groups": tables}


def sentences(groups: dict[str, Any], full: float) -> list[str]:
    """How much of HIGGS's gap AQUA-KV closes: against the published HIGGS, and like for like."""
    lines = []
    rows = {row["label"]: row["perplexity"] for row in groups.get("Bits", ())}
    for bits in (2, 3, 4) if rows else ():
        alone, best = rows[f"HIGGS {bits}"], rows[f"AQUA-KV (HIGGS {bits})"]
        closed = (alone - best) / (alone - full)
        lines.append(f"At {bits} bits AQUA-KV closes {closed:.1%} of HIGGS's gap; its loss is {best / full - 1:.2%}.")
    rows = {row["label"]: row["perplexity"] for row in groups.get(DEBIASING, ())}
    for name, without, behind in ALIKE if rows else ():
        closed = (rows[without] - rows[behind]) / (rows[without] - full)
        lines.append(f"Like for like, {name}, with and without predictors: {closed:.1%} of the gap.")
    return lines


def markdown(found: dict[str, Any]) -> str:
    full: dict[str, Any] = found["full"]
    lines = [
        f"Model `{found['model']}` ({found['dtype'].removeprefix('torch.')}), text `{found['text']}`, "
        f"{found['eval_windows']} windows of {found['length']} tokens in steps of 32; fitted on {found['windows']} "
        "windows of "
        f"`{found['calibration']}` (an eighth held out). Full precision: perplexity {full['perplexity']:.3f}.",
    ]
    lines += sentences(found["groups"], full["perplexity"])
    for name, rows in found["groups"].items():
        lines += ["", f"### {name}", "", "| row | bits a value | perplexity | KL | resident bytes | paper |"]
        lines.append("|---|---|---|---|---|---|")
        for row in rows:
            paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
            lines.append(
                f"| {row['label']} | {row['bits_per_value']:.3f} | {row['perplexity']:.3f} | {row['kl']:.5f} | "
                f"{row['resident_bytes']:,} | {paper} |"
            )
        told = [row for row in rows if row["paper"] is not None]
        if len(told) > 1:
            by = {name: agrees([(row["paper"], row[name]) for row in told]) for name in ("perplexity", "kl")}
            said = {name: "agrees" if same else "does not agree" for name, same in by.items()}
            lines += ["", f"Order {said['perplexity']} (by KL: {said['kl']})."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--calibration", default="embedded:calibration")
    parser.add_argument("--text", default="embedded:evaluation")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--eval-windows", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--eval-batch", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--groups", action="append", choices=list(GROUPS), help="only these; may be repeated")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="only write NAME.md again, from NAME.json")
    args = parser.parse_args()
    if args.report:
        kept = json.loads(args.output.with_suffix(".json").read_text())
        whole = {name: group for name, group in GROUPS.items() if all(key_of(e) in kept["rows"] for e in group)}
        text = markdown(labelled(kept["settings"], kept["rows"], whole))
    else:
        text = markdown(run(args))
    args.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
