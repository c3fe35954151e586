"""VQKV's Table 4 (number and size of codebooks), its trainers and our options on any model, through the cache.

    python docs/ablations/vqkv.py --model MODEL --calibration TEXT --text TEXT --length 4096 --output docs/ablations/NAME

Every row is one `kvcal train-codebooks`. Writes NAME.json (every figure; a second call goes on from it) and NAME.md. The
grid is the paper's with --size codewords in place of 64k: stages times 1.5 to 0.5, then codebooks of a quarter to a 64th.
"order agrees" means: both series come in the paper's order, and half the stages lose more than a quarter of the codewords.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcal import models
from kvcal.cli.defaults import defaults_of
from kvcal.commands.evaluation import run_eval
from kvcal.commands.train_codebooks import run_train_codebooks
from kvcal.methods.vqkv import SIZES, default_sizes

RULER = {1.5: 90.25, 1.25: 89.21, 1.0: 87.58, 0.75: 77.38, 0.5: 39.01}  # Table 4 by stages
RULER_BY_SIZE = {
    1: 87.77,
    4: 84.71,
    16: 76.93,
    64: 61.08,
}  # and by 64k over the size (rows F, G, H, I as Table 7 has them)


@dataclass(frozen=True)
class Entry:
    """One row: its label, what the paper has for it, options of train-codebooks."""

    label: str
    paper: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


def groups(stages: tuple[int, ...], size: int) -> dict[str, list[Entry]]:
    def told(numbers: tuple[float, ...]) -> str:
        return ",".join(str(max(1, round(n))) for n in numbers)

    sizes = {by: size // by for by in RULER_BY_SIZE if size // by >= 2}
    return {
        "Stages": [
            Entry(f"{factor:g} times", paper, {"stages": told(tuple(factor * s for s in stages))})
            for factor, paper in RULER.items()
        ],
        "Codewords": [
            Entry(f"{own} codewords", RULER_BY_SIZE[by], {"sizes": told((own,) * 3)}) for by, own in sizes.items()
        ],
        "Trainers": [Entry(name, None, {"trainer": name}) for name in ("k-means", "closed-form", "adam")],
        "Units": [Entry(name, None, {"scale": name}) for name in ("query", "none", "head", "channel")],
        "Bands": [
            Entry("two, by relative error"),
            Entry("two, by absolute error", None, {"split_by": "absolute"}),
            Entry("one", None, {"high_dims": 0, "stages": told((stages[0], stages[1] + stages[2], 1))}),
        ],
        "Sharing": [Entry("all layers"), Entry("each layer its own", None, {"per_layer": True})],
    }


def measure(entry: Entry, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One bundle, trained and run."""
    output = folder / "x.kvcal.safetensors"
    common = {"model": args.model, "device": args.device, "dtype": args.dtype}
    fit = {"text": args.calibration, "windows": args.windows, "length": args.length, "vectors": args.vectors}
    windows = {"recent": args.recent, "block": args.block, "preset": args.preset, "output": output}
    made = run_train_codebooks(
        defaults_of("train-codebooks") | common | fit | windows | entry.options, lambda line: None
    )
    seen = {"bundle": [output], "text": args.text, "windows": args.eval_windows, "length": args.length}
    full, row = run_eval(defaults_of("eval") | common | seen, lambda line: None)["rows"]
    output.unlink()
    kept = ("stages", "sizes", "paper_bits_per_value", "codebook_bytes", "key_relative_error", "value_relative_error")
    figures = {name: row[name] for name in ("perplexity", "kl", "bits_per_value")} | {n: made[n] for n in kept}
    return figures | {"seconds": made["seconds"], "full": full["perplexity"]}


def run(args: argparse.Namespace) -> dict[str, Any]:
    geometry = models.geometry(models.resolve(args.model))
    preset = SIZES[args.preset or default_sizes(geometry.parameters)]
    found = groups(preset.stages_for(geometry.head_dim), preset.sizes[0])
    found = {name: rows for name, rows in found.items() if not args.groups or name in args.groups}
    path = args.output.with_suffix(".json")
    settings = {n: v for n, v in vars(args).items() if n not in ("output", "groups", "device")}
    known = json.loads(path.read_text()) if path.exists() else {}
    rows: dict[str, Any] = known["rows"] if known.get("settings") == settings else {}
    for entry in [entry for group in found.values() for entry in group]:
        if (key := json.dumps(entry.options, sort_keys=True)) not in rows:
            started = time.monotonic()
            rows[key] = measure(entry, args, args.output.parent)
            path.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
            print(entry.label, round(rows[key]["kl"], 5), f"{time.monotonic() - started:.0f} s", flush=True)
    tables = {
        name: [rows[json.dumps(e.options, sort_keys=True)] | {"label": e.label, "paper": e.paper} for e in group]
        for name, group in found.items()
    }
    return {"settings": settings, "tables": tables}


def verdict(tables: dict[str, list[dict[str, Any]]]) -> str:
    series = [tables[name] for name in ("Stages", "Codewords") if name in tables]
    falling = [all(a["kl"] < b["kl"] for a, b in itertools.pairwise(s)) for s in series]
    if len(series) < 2:
        return ""
    half = next(row for row in tables["Stages"] if row["label"] == "0.5 times")
    quarter = tables["Codewords"][1]
    more = half["kl"] > quarter["kl"]
    told = f"half the stages ({half['codebook_bytes']:,} bytes of codebooks): KL {half['kl']:.5f}; a quarter of the "
    told += f"codewords ({quarter['codebook_bytes']:,} bytes): KL {quarter['kl']:.5f}"
    return f"Order {'agrees' if all(falling) and more else 'does not agree'}: {told}."


def markdown(found: dict[str, Any]) -> str:
    o = found["settings"]
    first = next(iter(found["tables"].values()))[0]
    vectors = o["vectors"] or "the preset's"
    lines = [
        f"Model `{o['model']}`, text `{o['text']}`, windows of {o['length']} tokens in steps of 32, recent {o['recent']}, "
        f"block {o['block']}; {vectors} vectors of `{o['calibration']}`. Full precision: perplexity {first['full']:.3f}.",
    ]
    for name, rows in found["tables"].items():
        lines += ["", f"### {name}", ""]
        lines.append("| row | stages V, low, high | codewords | bits | paper's count | codebooks | key error | value error | "
                     "perplexity | KL | seconds | paper |")  # fmt: skip
        lines.append("|---" * 12 + "|")
        for r in rows:
            stages, sizes = (", ".join(map(str, r[n])) for n in ("stages", "sizes"))
            lines.append(
                f"| {r['label']} | {stages} | {sizes} | {r['bits_per_value']:.3f} | {r['paper_bits_per_value']:.2f} | "
                f"{r['codebook_bytes']:,} | {r['key_relative_error']:.4f} | {r['value_relative_error']:.4f} | "
                f"{r['perplexity']:.3f} | {r['kl']:.5f} | {r['seconds']:.0f} | {r['paper'] or ''} |"
            )
    return "\n".join([*lines, "", verdict(found["tables"])]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--calibration", default="embedded:calibration")
    parser.add_argument("--text", default="embedded:evaluation")
    parser.add_argument("--preset", choices=list(SIZES))
    parser.add_argument("--vectors", type=int)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--eval-windows", type=int)
    parser.add_argument("--recent", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--groups", action="append", help="only these; may be repeated")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    text = markdown(run(args))
    args.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
