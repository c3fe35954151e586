"""The page of results.py: each claim's verdict with a column for each model, then each model's figures and tables.

Rows are those of results.toml and of the recorded files, docs/benchmarks/results/MODEL.json.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RECIPE = FOLDER / "results.toml"
sys.path.insert(0, str(FOLDER.parent / "ablations"))

import run  # noqa: E402
import verdicts  # noqa: E402

from kvcal.report.quantities import significant, size  # noqa: E402

Row = dict[str, Any]
BLOCK = 32  # tokens that a row packs at a time, unless it says otherwise


def read_recipe(path: Path = RECIPE) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def labelled(recipe: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Rows by TABLE.LABEL, in the order of the recipe."""
    for table in recipe["table"]:
        for row in run.rows_of(table):
            yield f"{table['name']}.{row['label']}", row


ABOUT = (
    "Every method at 2, 2.25, 3 and 4 stored bits and at its paper's setting, and a verdict on each paper's claim.",
    "",
    "- **KL** is in nats per token, to full precision of the same weights.",
    "- **±** is the standard error over windows of one text. Each row is one fit with one seed. What another text, "
    "another seed or other calibration windows would change was not measured, and is not in ±.",
    "- Median, 99 % and max are over tokens.",
    "- **Stored bits** count packed tokens. In brackets: bits as the paper counts them, where that differs.",
    "- **× smaller** is the whole cache at the windows' end beside one in 16 bits: packed tokens, exact ones and layers "
    "that are not packed, without what is resident.",
    "- **Resident** is what stays in memory beside packed tokens, once for all rows and lengths: codebooks, "
    "predictors, bases, factors. Equal stored bits are not equal memory.",
    "- **Same top** is the share of tokens after which the likeliest next token is full precision's.",
    "- **Fitted** on a text are AQUA-KV, transform, VQKV, MixKVQ, KVTuner-like, bits by KL, and InnerQ at 2, 2.25 and 4 "
    "bits or where its row says so. All others are not: SQuat's subspaces and InnerQ's factors are then of each row's "
    "own first tokens.",
    "- **Blocks** have 32 tokens, unless a line below the table says otherwise. Tokens stay exact until their block is "
    "full: of blocks of 128, 48 more on average, and 96 more at the end of these windows.",
    "- **Logit error** is the [relative error of attention scores](../evaluation.md#errors-of-attention-scores).",
    "- A table of bits leaves out what stores more than 0.15 bits above them.",
    "",
    "`wiki.txt` is [WikiText-2's test text](../texts.md#texts-of-these-pages). The page is what "
    "`python docs/benchmarks/results.py tables docs/benchmarks/results/*.json` prints from the recorded rows "
    "([how they are measured](../evaluation.md#results-on-pretrained-models)).",
)
RECORDED_HERE = (  # of the files beside this script, not of others' rows
    "- Weights came from GGUF files of 4 to 8 bits and were dequantised once.",
    "- Attention errors of SQuat before RoPE were measured on a CPU, where KIVI's equal those of the H100 to 1e-5.",
    "- Rows were measured at 8cfb961a. Those of the transform, of VQKV with 65,536 codewords and of Gemma are of 9b640dec,"
    " those of InnerQ fitted on text and of bits by KL with groups of 128 of 7e995b21. Those of bits by KL"
    " under predictors are of 5d0f4ee7 and d6629266, on an H200. Those at 2.0 bits or fewer are of 6928256b, Gemma's"
    " on a CPU.",
)
NOTES = {  # folder of a model -> figures of its rows that surprise
    "qwen2.5-coder-0.5b": (
        "AQUA-KV has a higher KL at 3.12 bits than at 2.21. Four of the 16 windows make up 73 % of it; the median over "
        "tokens is the same. The row of 2.21 bits has its first layer in 4 bits, that of 3.12 in 3. Whether that is why "
        "was not tested.",
        "Published HIGGS breaks this model, alone and under AQUA-KV: it drowns the keys' small channels in the outliers. "
        "Above a KL of about 0.3 more bits need not help: AQUA-KV over it has 0.482 with a first layer of 2 bits, and "
        "0.971 ± 0.16 with one of 4.",
    ),
    "gemma-3-270m": (
        "15 of its 18 layers slide over 512 tokens and stay exact: 3 are packed, and all figures are of these. A longer "
        "context has a larger share of packed tokens, and is made smaller by more.",
    ),
}
ABOUT_CLAIMS = (
    "A verdict compares two rows window by window. A claim holds, or does not hold, where Student's t tells the "
    "difference from none at 95 %: with 16 windows, where it is at least 2.13 times its standard error. Otherwise it is "
    "open. Figures: {places}."
)
COLUMNS = ("stored bits", "× smaller", "resident", "KL", "median", "99 %", "max", "same top", "perplexity")
NAMES = {  # folder of a model -> its name on the hub
    "smollm2-135m": "SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
    "gemma-3-270m": "Gemma-3-270M",
}


def tables(recipe: dict[str, Any], files: list[dict[str, Any]]) -> str:
    """The verdicts, and tables of each model, in Markdown; models in the order of NAMES, others behind them."""
    files = sorted(files, key=lambda one: [*NAMES, one["settings"]["model"]].index(one["settings"]["model"]))
    ours = recipe == read_recipe()  # what is said of this page's rows is not said of another recipe's
    lines = [
        "# Results on pretrained models",
        "",
        *(about(files) if ours else ()),
        *([""] if ours else []),
        *verdict_table(recipe, files),
    ]
    for one in files:
        refuse_other_tokens(one)
        lines += ["", *heading(one, notes=ours), *claim_figures(recipe, one), *of_tables(recipe, one["rows"])]
    return "\n".join(lines) + "\n"


def refuse_other_tokens(one: dict[str, Any]) -> None:
    """End where rows of a file were measured beside other full precisions: a tokenizer that was converted otherwise gives
    other tokens, and nothing in the settings tells.
    """
    beside = {key: row["full_perplexity"] for key, row in one["rows"].items() if "full_perplexity" in row}
    if not beside:
        return
    usual = statistics.median_low(beside.values())
    for key, value in beside.items():
        if not math.isclose(value, usual, rel_tol=1e-3):
            raise SystemExit(
                f"{one['settings']['model']}: full precision has perplexity {value:.6g} beside the row {key}, and {usual:.6g} "
                "beside most others: its weights or tokens were others; delete the row and measure it again"
            )


def about(files: list[dict[str, Any]]) -> Iterator[str]:
    """ABOUT, with RECORDED_HERE before its last paragraph where the files are those of docs/benchmarks/results."""
    recorded = {path.read_bytes() for path in (FOLDER / "results").glob("*.json")}
    here = all(one in map(json.loads, recorded) for one in files)
    end = len(ABOUT) - 2
    yield from (*ABOUT[:end], *(RECORDED_HERE if here else ()), *ABOUT[end:])


def name_of(one: dict[str, Any]) -> str:
    model = str(one["settings"]["model"])
    return NAMES.get(model, model)


def heading(one: dict[str, Any], notes: bool = True) -> list[str]:
    o = one["settings"]
    measured_rows = [row for row in one["rows"].values() if "refused" not in row]
    full = f"perplexity {significant(measured_rows[0]['full_perplexity'], 4)}; " if measured_rows else ""
    return [
        f"## {name_of(one)}",
        "",
        f"{o['windows']} windows of {o['length']:,} tokens of `{o['text'].removeprefix('file:')}`, fed {o['step']} at a "
        f"time. Full precision: {full}{o['dtype']}, {o['device']}. Rows that are fitted: on {o['fit_windows']} windows of "
        f"{o['fit_length']:,} tokens of `{o['calibration']}`, unless their command has another number; seed {o['seed']}. "
        f"Weights: `{o['revision'][:23]}`.",
        *(line for note in (NOTES.get(o["model"], ()) if notes else ()) for line in ("", note)),
        *(line for said in recorded_with(measured_rows) for line in ("", said)),
    ]


def recorded_with(rows: list[Row]) -> Iterator[str]:
    """Date, commit and versions of the rows that have recorded them, a line for each."""
    counts = Counter(tuple((name, one) for name, one in row.get("measured_with", {}).items()) for row in rows)
    for items, count in counts.items():
        if made := {name: one for name, one in items if one is not None}:
            rest = ", ".join(f"{name} {one}" for name, one in made.items() if name != "date")
            yield f"Recorded in the file of {count} row{'s' * (count > 1)}: measured on {made['date']}, {rest}."


def of_tables(recipe: dict[str, Any], rows: dict[str, Row]) -> list[str]:
    lines = []
    for table in recipe["table"]:
        shown, left_out, blocks = [], dict[str, list[str]](), dict[int, list[str]]()
        for row in run.rows_of(table):
            result = rows.get(run.key_of(row))
            if (reason := why_not(row, result)) is None:
                if (block := block_of(row["what"])) != BLOCK:
                    blocks.setdefault(block, []).append(row["label"])
                shown.append(f"| {row['label']} | " + " | ".join(cells(result)) + " |")
            else:
                kind, about = reason
                left_out.setdefault(kind, []).append(f"{row['label']}{about}")
        lines += ["", f"### {table['name']}"]
        if shown:
            lines += ["", f"| method | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|", *shown]
        for block, labels in sorted(blocks.items()):
            lines += ["", f"Blocks of {block} tokens: {'; '.join(labels)}."]
        for kind, labels in left_out.items():
            lines += ["", f"{kind}: {'; '.join(labels)}."]
    return lines


def why_not(row: Row, result: Row | None) -> tuple[str, str] | None:
    """Why a row has no figures, and what to say of it; None for a row that has some."""
    if result is None:
        return "Not measured", ""
    if "refused" in result:
        return "Refused", f" ({result['refused'].replace('|', '/')})"
    if result["bits_per_value"] is None:
        return "Nothing is packed at this length, and all tokens stay exact", ""
    if not within(row, result):
        return "More bits than the table's", f" ({significant(result['bits_per_value'])})"
    return None


def cells(result: Row) -> list[str]:
    stored, paper = significant(result["bits_per_value"]), result["paper_bits"]
    counted = stored if paper is None or significant(paper) == stored else f"{stored} ({significant(paper)})"
    kl, median, p99, most = (small(result[name]) for name in ("kl", "kl_median", "kl_p99", "kl_max"))
    error = f" ± {significant(result['kl_se'], 2)}" if result["kl_se"] and not kl.startswith("<") else ""
    same = "> 99.9 %" if 0.9995 <= result["same_top"] < 1 else f"{result['same_top'] * 100:.1f} %"
    perplexity = significant(result["perplexity"], 4)
    smaller = significant(result["smaller"], 2)
    return [counted, smaller, size(result["resident_bytes"]), f"{kl}{error}", median, p99, most, same, perplexity]


def block_of(what: Row) -> int:
    """Tokens that a row packs at a time: of its options, else the default of its preset or command."""
    from dataclasses import fields

    import kvcal.cli.app
    from kvcal.cli.signature import options_class
    from kvcal.methods.data_free import preset

    if "block" in what["options"]:
        return int(what["options"]["block"])
    if "command" in what:
        defaults = {one.name: one.default for one in fields(options_class(kvcal.cli.app.COMMANDS[what["command"]]))}
        block = defaults["block"] if defaults["block"] is not None else what["options"]["recent"]  # train-codebooks
        return int(block)
    return preset(what["preset"]).block if "preset" in what else BLOCK


def small(value: float) -> str:
    return significant(value) if value >= 1e-4 or value == 0 else "< 0.0001"


def within(row: Row, result: Row) -> bool:
    """Whether a row has no more stored bits than its table asks for."""
    bits = result["bits_per_value"]
    return not row["target"] or (bits is not None and bits <= row["target"] + run.ABOVE)


def verdict_table(recipe: dict[str, Any], files: list[dict[str, Any]]) -> list[str]:
    """Each claim's verdict, with a column for each model."""
    places = ", ".join(f"[{name_of(one)}](#{name_of(one).lower().replace('.', '')})" for one in files)
    lines = ["## Claims", "", ABOUT_CLAIMS.format(places=places), ""]
    lines += ["| claim | " + " | ".join(map(name_of, files)) + " |", "|---" * (1 + len(files)) + "|"]
    for claim in recipe["claim"]:
        of = [judged(claim, recipe, one["rows"]) for one in files]
        lines.append(f"| {claim['text']} | " + " | ".join(one.word if one else "not measured" for one in of) + " |")
    return lines


def claim_figures(recipe: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """The figures behind one model's verdicts."""
    columns = "claim", "verdict", "first", "second", "change", "difference ± error", "ratio"
    lines = [
        "",
        "### Figures of the claims",
        "",
        "KL of the row that a claim names first and of the other, unless a cell says otherwise; the change from the other "
        "to the first. Ratio: the difference over its error.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for claim in recipe["claim"]:
        if (of := judged(claim, recipe, one["rows"])) is not None:
            blocks = claim_blocks(claim, recipe, of)
            lines.append(f"| {claim['text']} | {' | '.join(claim_cells(of, blocks))} |")
    return lines


def claim_blocks(claim: dict[str, Any], recipe: dict[str, Any], of: verdicts.Verdict) -> tuple[int, int]:
    """Tokens that both rows of a claim pack at a time."""
    by_name = dict(labelled(recipe))
    by_label = by_name | {row["label"]: row for row in by_name.values()}
    worse = claim["worse"]
    sides = claim["better"], worse if isinstance(worse, str) else f"{worse['tables'][0]}.{of.other}"
    first, second = (block_of(by_label[side]["what"]) for side in sides)
    return first, second


def claim_cells(of: verdicts.Verdict, blocks: tuple[int, int]) -> list[str]:
    kind = "" if of.by == "kl" else f"{run.COLUMNS[of.by][0]} "
    bits = [f", {significant(one)} bits" if of.bits_differ else "" for one in of.bits]
    if blocks[0] != blocks[1]:
        bits = [f"{one}, block {block}" for one, block in zip(bits, blocks, strict=True)]
    first, second = f"{kind}{significant(of.first)}{bits[0]}", f"{kind}{significant(of.second)}{bits[1]}"
    spread, ratio = "–", "–"
    if of.spread is not None:
        spread = verdicts.with_error(of.spread.mean, of.spread.error)
        spread += " of its logarithm" if of.by == "perplexity" else ""
        ratio = significant(of.spread.ratio)
    other = f" ({of.other})" if of.other else ""
    return [of.word, first, f"{second}{other}", verdicts.change(of.first, of.second), spread, ratio]


def judged(claim: dict[str, Any], recipe: dict[str, Any], rows: dict[str, Row]) -> verdicts.Verdict | None:
    """One claim on one model; None where a row is not measured."""
    by_label = verdicts.rows_by_label(recipe, {"rows": rows})
    if isinstance(worse := claim["worse"], str):
        return verdicts.judged(claim, recipe, by_label)
    if (best := best_of(worse, recipe, by_label)) is None:
        return None
    of = verdicts.judged(claim | {"worse": best}, recipe, by_label)
    label = next(row["label"] for name, row in labelled(recipe) if name == best)
    return None if of is None else replace(of, other=label)


def best_of(which: dict[str, Any], recipe: dict[str, Any], by_label: dict[str, Row]) -> str | None:
    """TABLE.LABEL of the least KL among rows of these tables that have no more bits than the table asks for."""
    candidates = [
        name
        for name, row in labelled(recipe)
        if name.rpartition(f".{row['label']}")[0] in which["tables"]
        and row["label"] not in which["without"]
        and name in by_label
        and within(row, by_label[name])
    ]
    return min(candidates, key=lambda name: by_label[name]["kl"], default=None)
