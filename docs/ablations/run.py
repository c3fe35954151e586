"""Run a recipe: a TOML file of rows, each a scheme that is made by a kvcal command and measured as `kvcal compare`
does.

    python docs/ablations/run.py docs/ablations/methods.toml --model MODEL --calibration TEXT --text TEXT --output NAME

Writes NAME.json (every figure, with settings; a second call goes on from it) and NAME.md: the tables, whether each
table's order is the paper's, and each claim with its figures. `--jobs 4` makes rows in so many processes. `--task
gsm8k` adds a column with an lm-eval score through the compressed cache, for real weights. Rows of earlier versions have
the stored bits as the paper's count too: `python docs/ablations/paper_bits.py` mends both files without measuring.

A recipe has [[table]] with name, optional fit (options for all its rows) and paper ("score", "perplexity"; what the
rows' paper figures are), and in it rows:

    [[table.row]]
    label = "SQuat"
    command = "measure-subspaces"   # or fit-predictors, fit-norms, train-codebooks, tune-thresholds, tune-bits; else a preset
    options = {rank = 5}            # of that command; sink, recent, block and frame too
    preset = "kivi-2"               # or keys = "..." and values = "...": a scheme without data
    keep = 0.2                      # H2O
    paper = 72.71

`--rows 'VQKV|AQUA'` makes only rows whose labels match; `--add OTHER.json` takes rows that were measured elsewhere in
the same way, on whatever device: each row says its own. `--report` makes nothing and needs no model: it writes both
files from what NAME.json and the files of `--add` have; a row that none of them has is shown as "not run", and the text
says how many are.

A row with grid = {rank = [5, 10], strength = [1e-4, 1e-3]} is one for every combination, `paper` a list in that order.
A row with target = 2.0 stays empty unless its stored bits are at most 0.15 above. [[claim]] has text, better and worse
(labels; with `table.label` where a label is not unique), by = "kl", "logit_error", ... With worse = {tables = ["A",
"B"], bits = [2.0, 2.5]} it is the best of these tables' rows with so many stored bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import re
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvcal.evaluate.spread import Difference

ABOVE = 0.15  # stored bits above a row's target that still count as it
COLUMNS = {
    "bits_per_value": ("stored bits", "{:.3f}"), "paper_bits": ("paper's count", "{:.3f}"),
    "perplexity": ("perplexity", "{:.3f}"), "kl": ("KL", "{:.5f}"), "logit_error": ("logit error", "{:.4f}"),
    "output_error": ("output error", "{:.4f}"), "score": ("score", "{:.4f}"),
}  # fmt: skip
PAPERS_COUNT = (
    "Paper's count: bits a value as the method's own paper counts them. KIVI, Quanto, InnerQ, HIGGS, AQUA-KV, FP8: "
    "what is "
    "stored; SQuat, whose paper has no count, likewise. TurboQuant: its norm in 32 bits (InnerQ, Table 3), stored in "
    "16. "
    "VQKV: 16 bits a code, whatever the codebook's size (Eq. 12). MixKVQ: neither scales nor indices, its values "
    "included "
    "(Eq. 17). KVTuner: integers alone. H2O: of the tokens kept, no unused slots."
)
WHAT = ("preset", "keys", "values", "command", "options", "keep")


def rows_of(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows with grids spread out and the table's common options in place."""
    for row in table["row"]:
        axes = row.get("grid", {})
        papers = row.get("paper")
        for number, point in enumerate(itertools.product(*axes.values())):
            own = dict(zip(axes, point, strict=True))
            label = ", ".join([row["label"], *(f"{n.replace('_', ' ')} {v:g}" if isinstance(v, float) else
                                               f"{n.replace('_', ' ')} {v}" for n, v in own.items())])  # fmt: skip
            made = {name: row[name] for name in WHAT if name in row}
            made["options"] = {**table.get("fit", {}), **row.get("options", {}), **own}
            paper = papers[number] if isinstance(papers, list) else papers
            yield {"label": label, "paper": paper, "target": row.get("target"), "what": made}


def key_of(row: dict[str, Any]) -> str:
    """Rows that are made alike are made once."""
    return json.dumps(row["what"], sort_keys=True)


# Making and measuring a row, in a process that holds the model.

STATE: dict[str, Any] = {}


def prepare(args: dict[str, Any]) -> None:
    import torch

    from kvcal.commands.workbench import open_model
    from kvcal.text import token_windows

    torch.set_num_threads(args["threads"])
    loaded = open_model(args["model"], None, dtype=args["dtype"], device=args["device"])
    text = token_windows.evaluation_windows(
        loaded.tokenizer, args["text"], windows=args["eval_windows"], length=args["length"]
    )
    STATE.update(args=args, loaded=loaded, text=text)


def facts() -> dict[str, Any]:
    loaded, text, args = STATE["loaded"], STATE["text"], STATE["args"]
    return {
        "model": Path(args["model"]).name,
        "revision": loaded.revision,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "text": text.source,
        "text_sha256": text.sha256,
        "eval_windows": len(text.ids),
        "length": args["length"],
        "calibration": Path(args["calibration"]).name,
        "fit_windows": args["fit_windows"],
        "fit_length": args["fit_length"],
        "attention_windows": min(args["attention_windows"], len(text.ids)),
        "attention_tokens": args["attention_tokens"] or args["length"],
        "task": args["task"],
        "limit": args["limit"],
    }


def scheme_of(what: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """A preset or a bundle, and what its command told."""
    from dataclasses import replace

    from kvcal.methods.data_free import Preset, preset
    from kvcal_artifacts.bundle import load_bundle

    options = dict(what["options"])
    if (command := what.get("command", "preset")) == "preset":
        if "frame" in options:
            options["rope"] = options.pop("frame")
        if "preset" in what:
            return replace(preset(what["preset"]), **options), {}
        return Preset(what["keys"], what["values"], **options), {}
    output = folder / "row.kvcal.safetensors"
    told = run_command(command, options | {"output": output})
    return load_bundle(output), {n: v for n, v in told.items() if isinstance(v, (int, float)) and n != "bytes"}


def run_command(command: str, options: dict[str, Any]) -> dict[str, Any]:
    from importlib import import_module

    import kvcal.cli.app
    from kvcal.cli.signature import options_class
    from kvcal_artifacts.errors import UsageError

    args = STATE["args"]
    kind = options_class(kvcal.cli.app.COMMANDS[command])
    known = {one.name for one in fields(kind)}
    common = {
        "model": args["model"], "text": args["calibration"], "dtype": args["dtype"],
        "device": args["fit_device"] or args["device"], "windows": args["fit_windows"], "length": args["fit_length"],
    }  # fmt: skip
    if unknown := [name for name in options if name not in known]:
        raise UsageError(f"recipe: {command} has no option {unknown[0]}")
    name = command.replace("-", "_")
    made: dict[str, Any] = getattr(import_module(f"kvcal.commands.{name}"), f"run_{name}")(
        kind(**(common | options)), lambda line: None
    )
    return made


def made(what: dict[str, Any]) -> dict[str, Any]:
    """The row's scheme and what its command told; of one that cannot be made, the reason."""
    from kvcal_artifacts.errors import KVCalError

    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            scheme, told = scheme_of(what, Path(folder))
    except KVCalError as error:
        return {"refused": str(error)}
    return {"scheme": scheme, "told": told, "fit_seconds": round(time.monotonic() - started, 1)}


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of some rows, beside one run of full precision."""
    from kvcal.commands.compare import measure
    from kvcal.commands.workbench import cache_makers
    from kvcal_artifacts.scheme import HeavyHitters

    args, loaded, text = STATE["args"], STATE["loaded"], STATE["text"]
    settings = {n: args[n] for n in ("attention_windows", "attention_tokens")} | {
        "step": 32,
        "at_length": args["length"],
    }
    found, makers = [made(what) for what in rows], {}
    for number, (what, row) in enumerate(zip(rows, found, strict=True)):
        if "scheme" in row:
            selection = HeavyHitters(what["keep"], 0.5) if "keep" in what else None
            [makers[str(number)]] = cache_makers(
                loaded.model, {"row": row["scheme"]}, loaded.revision, selection
            ).values()
    started = time.monotonic()
    figures = measure(loaded, text.ids, makers, settings, args["eval_batch"])
    seconds = round((time.monotonic() - started) / max(1, len(figures)), 1)
    for number, seen in figures.items():
        row = found[int(number)]
        row |= seen | {"eval_seconds": seconds}
        if args["task"] is not None:
            row["score"] = score(row["scheme"])
        row["device"] = loaded.model.device.type
    return [{name: value for name, value in row.items() if name != "scheme"} for row in found]


def score(what: Any) -> float:
    from kvcal.evaluate.tasks import TaskScore, check_installed
    from kvcal_artifacts.bundle import Bundle

    check_installed()
    args, loaded = STATE["args"], STATE["loaded"]
    scheme = what.scheme if isinstance(what, Bundle) else what.scheme(loaded.model)
    task = TaskScore(loaded.model, loaded.tokenizer, [args["task"]], None, args["limit"], None, args["eval_batch"] or 1)
    return task.score(scheme)[0]


# All rows.


def run(recipe: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    own = {n: v for n, v in vars(args).items() if n not in ("recipe", "output", "jobs", "together", "rows", "add")}
    prepare(own)
    settings, path = facts(), args.output.with_suffix(".json")
    wanted = rows_by_key(recipe)
    known = earlier(path, settings) if path.exists() else {}
    for other in args.add:
        if not (more := earlier(other, settings)):
            raise SystemExit(f"{other}: no rows, or other settings than {settings}")
        known |= {key: figures for key, figures in more.items() if key in wanted}
    chosen = {key: row for key, row in wanted.items() if re.search(args.rows, row["label"])}
    missing = {key: row for key, row in chosen.items() if key not in known}
    labels = {key: row["label"] for key, row in missing.items()}

    def keep(key: str, figures: dict[str, Any]) -> None:
        known[key] = figures
        write(path, {"settings": settings, "rows": known})
        told = figures.get("refused") or f"{figures['bits_per_value']} bits, KL {figures['kl']:.5f}"
        spent = f"{figures.get('fit_seconds', 0)} + {figures.get('eval_seconds', 0)} s"
        print(f"{len(known)}/{len(wanted)} {labels[key]}: {told}, {spent}", flush=True)

    def keep_all(keys: tuple[str, ...], found: list[dict[str, Any]]) -> None:
        for key, figures in zip(keys, found, strict=True):
            keep(key, figures)

    keys_left = list(missing)
    groups = [tuple(keys_left[i : i + args.together]) for i in range(0, len(keys_left), args.together)]
    if not missing:
        write(path, {"settings": settings, "rows": known})
    if args.jobs == 1:
        for keys in groups:
            keep_all(keys, measured([missing[key]["what"] for key in keys]))
        return {"settings": settings, "rows": known}
    STATE.clear()
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), prepare, (own,))
    with pool:
        running = {pool.submit(measured, [missing[key]["what"] for key in keys]): keys for keys in groups}
        for done in as_completed(running):
            keep_all(running[done], done.result())
    return {"settings": settings, "rows": known}


def earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Rows of a file that were measured in this way; those that could not be made are tried again."""
    before = json.loads(path.read_text())
    if before["settings"] != settings:
        return {}
    return {key: figures for key, figures in before["rows"].items() if "refused" not in figures}


def rows_by_key(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {key_of(row): row for table in recipe["table"] for row in rows_of(table)}


def write(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.replace(path)


def gathered(recipe: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Rows that are there, in the recipe's order. Of a row that several files have, NAME.json's and then the first
    counts, and a figure before the reason why there is none.
    """
    path = args.output.with_suffix(".json")
    files = {name: json.loads(name.read_text()) for name in ([path] if path.exists() else []) + args.add}
    if not files:
        raise SystemExit(f"{path}: no such file, and no --add; --report makes no rows")
    settings = next(iter(files.values()))["settings"]
    known: dict[str, Any] = {}
    for name, one in files.items():
        if other := {n: v for n, v in one["settings"].items() if settings.get(n) != v}:
            raise SystemExit(
                f"{name}: was measured with {other}, {next(iter(files))} not; rows of one table must be alike"
            )
        known |= {k: row for k, row in one["rows"].items() if k not in known or "refused" in known[k]}
    found = {"settings": settings, "rows": {key: known[key] for key in rows_by_key(recipe) if key in known}}
    write(path, found)
    return found


# The report.


def agrees(pairs: list[tuple[float, float]], least: float) -> tuple[int, int]:
    """pairs (paper's loss, ours): how many of the pairs that the paper separates by more than `least` come in its
    order.
    """
    told = [(a, b) for a, b in itertools.combinations(pairs, 2) if abs(a[0] - b[0]) > least]
    return sum((a[1] < b[1]) == (a[0] < b[0]) for a, b in told), len(told)


def counted(rows: dict[str, dict[str, Any]]) -> str:
    """What the column of the paper's count is, and of which rows it is not there or not of the text measured."""
    by_calibration = any("paper_bits_from" in row for row in rows.values())
    unknown = any(row.get("paper_bits", 0) is None for row in rows.values())
    return (
        PAPERS_COUNT
        + " Of MixKVQ's searched thresholds, the channels are those of the calibration text." * (by_calibration)
        + " -: the tiers depend on the text, and the row does not say them." * unknown
    )


def uncompressed(dtype: str, perplexity: float) -> dict[str, Any]:
    """The run beside every row: an ordinary cache in the model's dtype. All that is measured against it is 0."""
    bits = 32 if dtype == "float32" else 16
    figures = {"bits_per_value": bits, "paper_bits": bits, "perplexity": perplexity}
    return figures | dict.fromkeys(("kl", "logit_error", "output_error"), 0.0)


def cell(row: dict[str, Any], column: str, form: str) -> str:
    value = row.get(column)
    return "-" if value is None else form.format(value)


def markdown(recipe: dict[str, Any], found: dict[str, Any]) -> str:
    o, rows = found["settings"], found["rows"]
    devices = "".join(f", {n}" for n in sorted({row["device"] for row in rows.values() if "device" in row}))
    asked = rows_by_key(recipe)
    left = f" {len(asked.keys() - rows)} of {len(asked)} rows are not run." if asked.keys() - rows else ""
    full = next(row["full_perplexity"] for row in rows.values() if "full_perplexity" in row)
    lines = [
        recipe.get("text", ""), "",
        f"Model `{o['model']}` ({o['dtype']}{devices}), text `{o['text']}`, {o['eval_windows']} windows of "
        f"{o['length']} "
        f"tokens in steps of 32 (attention errors: the first {o['attention_windows']}, {o['attention_tokens']} "
        "tokens); what "
        f"learns, learned from {o['fit_windows']} windows of {o['fit_length']} tokens of `{o['calibration']}`. "
        f"Full precision: perplexity {full:.3f}.{left}", "", counted(rows),
    ]  # fmt: skip
    columns = {n: c for n, c in COLUMNS.items() if n != "score" or o["task"]}
    by_label: dict[str, dict[str, Any]] = {}
    for table in recipe["table"]:
        lines += ["", f"### {table['name']}", ""]
        named = [c[0] for c in columns.values()]
        paper = table.get("paper")
        lines.append("| " + " | ".join(["row", *named, *([f"paper's {paper}"] if paper else [])]) + " |")
        lines.append("|---" * (1 + len(named) + bool(paper)) + "|")
        if table is recipe["table"][0]:
            cells = [cell(uncompressed(o["dtype"], full), name, form) for name, (_, form) in columns.items()]
            lines.append("| " + " | ".join(["full precision", *cells, *([""] if paper else [])]) + " |")
        pairs: dict[str, list[tuple[float, float]]] = {"perplexity": [], "kl": []}
        for row in rows_of(table):
            seen = rows.get(key_of(row), {"refused": "not run"})
            cells = [cell(seen, name, form) for name, (_, form) in columns.items()]
            if "refused" in seen:
                cells = [seen["refused"], *[""] * (len(columns) - 1)]
            elif row["target"] and (seen["bits_per_value"] is None or seen["bits_per_value"] > row["target"] + ABOVE):
                cells = [cells[0], *[""] * (len(columns) - 1)]
            else:
                by_label[row["label"]] = by_label[f"{table['name']}.{row['label']}"] = seen
                if row["paper"] is not None:
                    for name, pair in pairs.items():
                        pair.append((-row["paper"] if paper == "score" else row["paper"], seen[name]))
            told = [] if not paper else ["" if row["paper"] is None else f"{row['paper']:g}"]
            lines.append("| " + " | ".join([row["label"], *cells, *told]) + " |")
        if len(pairs["kl"]) > 1:
            counts = {name: agrees(pair, table.get("least", 0.0)) for name, pair in pairs.items()}
            said = {n: "agrees" if a == b else f"does not agree ({a} of {b} pairs)" for n, (a, b) in counts.items()}
            absent = sum(row["paper"] is not None for row in rows_of(table)) - len(pairs["kl"])
            of = f" Rows without a figure: {absent}." if absent else ""
            lines += ["", f"Order {said['perplexity']}; by KL: {said['kl']}.{of}"]
    if claims := [verdict(claim, recipe, by_label) for claim in recipe.get("claim", ())]:
        lines += ["", "### Claims", "", "| claim | figures | verdict |", "|---|---|---|", *claims]
    return "\n".join(lines).lstrip() + "\n"


def verdict(claim: dict[str, Any], recipe: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    by = claim.get("by", "kl")
    worst = claim["worse"] if isinstance(claim["worse"], str) else best_of(claim["worse"], by, recipe, rows)
    if absent := [name for name in (claim["better"], worst) if name not in rows]:
        return f"| {claim['text']} | {' and '.join(absent)}: no figure | open |"
    better, worse = rows[claim["better"]], rows[worst]
    a, b = better[by], worse[by]
    bits = f"{better['bits_per_value']:.3f} and {worse['bits_per_value']:.3f} bits"
    word = "holds" if a < b else "does not hold"
    spread = difference(better, worse, by)
    if spread is not None and not spread.apart:
        word = "open: the spread over windows explains the difference"
    more = better["bits_per_value"] / worse["bits_per_value"] - 1
    if abs(more) >= 0.01:
        word += f", with {abs(more):.0%} {'more' if more > 0 else 'fewer'} bits"
    told = f"{COLUMNS[by][0]} {a:.5f} against {b:.5f} ({a / b - 1:+.0%}), {bits}"
    if spread is not None:
        told += f", difference {spread.mean:+.5f} ± {spread.error:.5f} over windows, ratio {spread.ratio:.3g}"
    return f"| {claim['text']} | {claim['better']}: {told} ({worst}) | {word} |"


def difference(better: dict[str, Any], worse: dict[str, Any], by: str = "kl") -> Difference | None:
    """The paired difference of a figure over the same windows; None for rows that do not have it by window. Of
    perplexity that of its logarithm, the mean negative log-likelihood.
    """
    name = "nll_windows" if by == "perplexity" else f"{by}_windows"
    return Difference.of(better.get(name, []), worse.get(name, []))


def best_of(which: dict[str, Any], by: str, recipe: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """Label of the row of these tables that has the lowest figure among those with stored bits in the range."""
    low, high = which["bits"]
    tables = [table for table in recipe["table"] if table["name"] in which["tables"]]
    labels = [(row["label"], f"{table['name']}.{row['label']}") for table in tables for row in rows_of(table)]
    own = [short if rows.get(short) is rows.get(full) else full for short, full in labels if full in rows]
    bits = {label: rows[label]["bits_per_value"] for label in own}  # None: nothing was packed, or tokens were dropped
    there = [label for label, stored in bits.items() if stored is not None and low <= stored <= high]
    return min(there, key=lambda label: rows[label][by], default=f"a row of {low} to {high} bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--calibration", default="embedded:calibration")
    parser.add_argument("--text", default="embedded:evaluation")
    parser.add_argument("--fit-windows", type=int, default=96)
    parser.add_argument("--fit-length", type=int, default=2048)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--eval-windows", type=int)
    parser.add_argument("--eval-batch", type=int)
    parser.add_argument("--attention-windows", type=int, default=4)
    parser.add_argument("--attention-tokens", type=int, help="of each of these windows")
    parser.add_argument("--together", type=int, default=4, help="rows beside one run of full precision")
    parser.add_argument("--task", help="an lm-eval task; needs kvcal[tasks]")
    parser.add_argument("--limit", type=int, help="questions of the task, from the first")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fit-device", help="where rows are made, if not where they are measured")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each holds the model")
    parser.add_argument("--threads", type=int, default=1, help="of each process on a CPU")
    parser.add_argument("--rows", default="", help="a regular expression: only rows whose label has it")
    parser.add_argument("--add", type=Path, action="append", default=[], help="rows of another run's NAME.json")
    parser.add_argument("--output", type=Path, required=True, help="without suffix")
    parser.add_argument("--report", action="store_true", help="make no rows: write both files from rows that are there")
    args = parser.parse_args()
    recipe = tomllib.loads(args.recipe.read_text())
    report = vars(args).pop("report")
    found = gathered(recipe, args) if report else run(recipe, args)
    text = markdown(recipe, found)
    args.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
