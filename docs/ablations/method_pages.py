"""Write the tables of the pages in docs/methods/: a method's figures and the verdicts on its paper's claims.

    python docs/ablations/method_pages.py           # writes the tables between their marks
    python docs/ablations/method_pages.py --check   # exit code 1 where a page is not what the rows say

Rows are those of methods.toml that were measured on both pretrained models, or on one of them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import verdicts

from kvcal.methods.data_free import preset

FOLDER = Path(__file__).resolve().parent
PAGES = FOLDER.parent / "methods"
MODELS = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B")
INSTRUCT = {model: f"{model}-Instruct" for model in MODELS}  # the names of the hub, as pages head their columns
REGION = re.compile(r"(<!-- (figures|verdicts) by method_pages\.py -->\n).*?(<!-- end -->)", flags=re.DOTALL)

HIGGS_2 = ("HIGGS at 2", "HIGGS as published, `higgs-2-wide`")
KIVI_2 = ("KIVI 2", "`kivi-2`")
AQUA_2 = ("2 bits.AQUA-KV", "AQUA-KV over `higgs-2-wide-debiased-balanced`, first layer the same")
AQUA_TRANSFORM_2 = ("2 bits.AQUA-KV x transform", "AQUA-KV over `transform-2`, first layer the same")
ROWS: dict[str, list[tuple[str, str]]] = {  # page -> (label of methods.toml or results.toml, name in the table)
    "aqua-kv": [
        HIGGS_2,
        ("AQUA-KV, published HIGGS at 2", "AQUA-KV over it, first layer `higgs-2-wide`"),
        ("HIGGS debiased at 2", "HIGGS debiased, `higgs-2-wide-debiased`"),
        ("AQUA-KV at 2", "AQUA-KV over it, first layer the same"),
        AQUA_2,
        AQUA_TRANSFORM_2,
    ],
    "transform": [
        HIGGS_2,
        AQUA_2,
        ("2 bits.transform", "`transform-2` alone"),
        ("2 bits.AQUA-KV x transform, 2.0 bits or fewer", "AQUA-KV over `transform-1.87`, first layer the same"),
        (
            "2 bits.bits by KL under predictors, 2.0 bits or fewer",
            "the same predictors over `transform-1.5` to `transform-2.5`, by KL",
        ),
        AQUA_TRANSFORM_2,
        ("2.25 bits.AQUA-KV x transform", "AQUA-KV over `transform-2.25` and `transform-2`, first layer the same"),
        (
            "2.25 bits.bits by KL under predictors",
            "the same predictors over `transform-1.75` to `transform-2.75`, by KL",
        ),
        ("3 bits.transform", "`transform-2.9` alone"),
        ("3 bits.AQUA-KV x transform", "AQUA-KV over `transform-2.9`, first layer the same"),
    ],
    "higgs": [
        ("HIGGS at 2", "`higgs-2-wide`"),
        ("HIGGS debiased at 2", "`higgs-2-wide-debiased`"),
        ("HIGGS at 3", "`higgs-3-wide`"),
        ("TurboQuant 4/3", "`turboquant-4-3`"),
        ("HIGGS at 4", "`higgs-4-wide`"),
    ],
    "kivi": [
        KIVI_2,
        ("KIVI 2, no sink, recent 128", "`kivi-2`, windows of 128"),
        ("KIVI 2, sink 32, recent 96", "`kivi-2`, windows of 128 with a sink"),
        ("KIVI K2 V4", "`--keys kivi-2 --values kivi-4`"),
        ("KIVI K4 V2", "`--keys kivi-4 --values kivi-2`"),
        ("KIVI 4", "`kivi-4`"),
    ],
    "kvtuner": [
        KIVI_2,
        ("KVTuner-like at 3", "`--max-bits 3`, groups of 128"),
        ("KVTuner-like at 4", "`--max-bits 4`, groups of 128"),
    ],
    "mixkvq": [
        ("MixKVQ at 3", "`--max-bits 3`, groups of 128"),
        ("KVTuner-like at 3", "bits per layer (KVTuner), 3 bits"),
        ("MixKVQ at 4", "`--max-bits 4`"),
        ("KVTuner-like at 4", "bits per layer (KVTuner), 4 bits"),
        ("MixKVQ, 8 full and 16 of 4 bits", "8 channels exact, 16 at 4 bits"),
        ("error-only, 8 full and 16 of 4 bits", "the same, chosen without queries"),
    ],
    "squat": [KIVI_2, ("SQuat 2", "`squat-2`"), ("SQuat-pre 2", "`squat-pre-2`, keys before RoPE")],
    "innerq": [
        ("InnerQ K3 V2 symmetric", "`innerq-small`, not fitted"),
        ("InnerQ Small, fitted", "`fit innerq --variant small`"),
        ("InnerQ K3 V2 hybrid", "`innerq-hybrid`, not fitted"),
        ("InnerQ K3 V2 hybrid, fitted", "`fit innerq --variant hybrid`"),
        ("InnerQ Base", "`innerq-base`, not fitted"),
        ("InnerQ Base, fitted", "`fit innerq --variant base`"),
        KIVI_2,
        ("KIVI 2, sink 32, recent 96", "`kivi-2`, windows of 128 with a sink"),
    ],
    "vqkv": [
        ("VQKV, half the stages", "4, 8, 5 stages of 256 codewords"),
        ("VQKV, a quarter of the codewords", "7, 15, 10 stages of 64"),
        ("VQKV at 2", "7, 15, 10 stages of 256"),
        ("VQKV at 3", "11, 22, 15 stages of 256"),
        ("VQKV at 4", "15, 29, 20 stages of 256"),
        ("VQKV of 65536 at 2, 172 windows", "4, 7, 5 stages of 65,536, fitted on 172 windows"),
        ("VQKV of 65536 at 3, 172 windows", "6, 11, 7 stages of 65,536, fitted on 172 windows"),
    ],
    "h2o": [
        ("H2O + HIGGS", "H2O and `higgs-2-wide`"),
        ("H2O + AQUA-KV, published HIGGS", "H2O and AQUA-KV over it, first layer `higgs-2-wide`"),
        ("H2O + HIGGS debiased", "H2O and `higgs-2-wide-debiased`"),
        ("H2O + AQUA-KV", "H2O and `fit-predictors` by default, first layer `higgs-4-wide-debiased-balanced`"),
    ],
}
CLAIMS: dict[str, list[tuple[str, str, str, str]]] = {  # page -> (what is claimed, better, worse, figure)
    "aqua-kv": [
        ("AQUA-KV has less KL than HIGGS at the same bits", "AQUA-KV, published HIGGS at 2", "HIGGS at 2", "kl"),
        ("the same, both debiased", "AQUA-KV at 2", "HIGGS debiased at 2", "kl"),
    ],
    "transform": [
        ("under predictors less KL than alone", "2 bits.AQUA-KV x transform", "2 bits.transform", "kl"),
        ("less KL than HIGGS under predictors", "2 bits.AQUA-KV x transform", "2 bits.AQUA-KV", "kl"),
    ],
    "higgs": [("debiased has less KL than published", "HIGGS debiased at 2", "HIGGS at 2", "kl")],
    "kivi": [
        (
            "sinks help, 128 exact tokens in all (InnerQ)",
            "KIVI 2, sink 32, recent 96",
            "KIVI 2, no sink, recent 128",
            "kl",
        ),
        ("keys need more bits than values (MixKVQ)", "KIVI K4 V2", "KIVI K2 V4", "kl"),
    ],
    "kvtuner": [
        ("less KL than MixKVQ at 3 bits", "KVTuner-like at 3", "MixKVQ at 3", "kl"),
        ("less KL than MixKVQ at 4 bits", "KVTuner-like at 4", "MixKVQ at 4", "kl"),
    ],
    "mixkvq": [
        (
            "choosing by queries beats choosing by error alone",
            "MixKVQ, 8 full and 16 of 4 bits",
            "error-only, 8 full and 16 of 4 bits",
            "kl",
        ),
        ("less KL than bits per layer at 3 bits", "MixKVQ at 3", "KVTuner-like at 3", "kl"),
        ("less KL than bits per layer at 4 bits", "MixKVQ at 4", "KVTuner-like at 4", "kl"),
    ],
    "squat": [
        ("smaller logit error than KIVI at the same bits", "SQuat 2", "KIVI 2", "logit_error"),
        ("less KL than KIVI at the same bits", "SQuat 2", "KIVI 2", "kl"),
        ("keys before RoPE: less KL than KIVI", "SQuat-pre 2", "KIVI 2", "kl"),
    ],
    "innerq": [
        ("hybrid values have less KL than symmetric ones", "InnerQ K3 V2 hybrid", "InnerQ K3 V2 symmetric", "kl"),
        ("the same, both fitted", "InnerQ K3 V2 hybrid, fitted", "InnerQ Small, fitted", "kl"),
        ("less KL than KIVI with sinks, Base of 3.5 bits", "InnerQ Base", "KIVI 2, sink 32, recent 96", "kl"),
        ("the same, Base fitted", "InnerQ Base, fitted", "KIVI 2, sink 32, recent 96", "kl"),
        ("fitted on text less KL than on the row's first tokens", "InnerQ Small, fitted", "3 bits.InnerQ Small", "kl"),
    ],
    "vqkv": [
        (
            "64 codewords a stage instead of 256 cost less KL than half as many stages",
            "VQKV, a quarter of the codewords",
            "VQKV, half the stages",
            "kl",
        ),
        ("more stages over larger codebooks, at 2 bits", "VQKV at 2", "VQKV of 65536 at 2, 172 windows", "kl"),
        ("the same at 3 bits", "VQKV at 3", "VQKV of 65536 at 3, 172 windows", "kl"),
    ],
    "h2o": [
        ("AQUA-KV has less KL than HIGGS behind H2O", "H2O + AQUA-KV, published HIGGS", "H2O + HIGGS", "kl"),
        ("the same, both debiased", "H2O + AQUA-KV", "H2O + HIGGS debiased", "kl"),
    ],
}
Measured = Mapping[str, list[verdicts.Rows]]  # model -> rows by label, of each file


def main() -> None:
    stale = [page for page, text in fresh().items() if page.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"{', '.join(page.name for page in stale)}: run docs/ablations/method_pages.py" if stale else 0)
    for page, text in fresh().items():
        page.write_text(text, "utf-8")


def fresh() -> dict[Path, str]:
    """Each page with the tables that the rows give."""
    models = measured()
    pages = {}
    for name in ROWS:
        tables = {"figures": figures(ROWS[name], models), "verdicts": claims(CLAIMS[name], models)}
        page = PAGES / f"{name}.md"
        text, count = REGION.subn(
            lambda found, tables=tables: f"{found[1]}{tables[found[2]]}{found[3]}", page.read_text("utf-8")
        )
        if count != len(tables):
            sys.exit(f"{page}: {count} marks of tables, where {len(tables)} are wanted")
        pages[page] = text
    return pages


def measured() -> dict[str, Measured]:
    """What verdicts.py reads of both pretrained models."""
    recipe = tomllib.loads((FOLDER / "methods.toml").read_text("utf-8"))
    return {model: verdicts.measured(model, recipe) for model in MODELS}


def figures(rows: list[tuple[str, str]], models: Mapping[str, Measured]) -> str:
    exact = exact_tokens()
    lines = [
        "| scheme | exact tokens, first + newest | stored bits per value | "
        f"{' | '.join(f'KL on {model}' for model in INSTRUCT.values())} |",
        "|---|---|---|---|---|",
    ]
    for label, name in rows:
        measured_rows = [row_of(label, models[model]) for model in MODELS]
        bits = [f"{row['bits_per_value']:.2f}" for row in measured_rows if row]
        if len({*bits}) < 2:
            stored = bits[0] if bits else "–"
        else:
            stored = ", ".join(f"{each} on {model.split('-')[0]}" for each, model in zip(bits, MODELS, strict=True))
        cells = [f"{row['kl']:.3g} ({len(row['kl_windows'])})" if row else "not measured" for row in measured_rows]
        lines.append(f"| {name} | {exact[label]} | {stored} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def row_of(label: str, files: list[verdicts.Rows]) -> dict[str, Any] | None:
    """The row of most windows."""
    return next((rows[label] for rows in files if label in rows), None)


@cache
def exact_tokens() -> dict[str, str]:
    """label -> exact tokens at both ends of a row's cache: the preset's, else those of its options or 4 + 128, which is
    what pairs of codecs and commands that fit have without options.
    """
    recipes = [tomllib.loads((FOLDER / "methods.toml").read_text("utf-8")), verdicts.results_recipe()]
    tokens = {}
    tables = [table for recipe in recipes for table in recipe["table"]]
    for table, row in ((one, row) for one in tables for row in verdicts.run.rows_of(one)):
        what = json.loads(verdicts.run.key_of(row))
        windows = {"sink": 4, "recent": 128} | what["options"]
        if "preset" in what:
            own = preset(what["preset"])
            windows = {"sink": own.sink, "recent": own.recent} | what["options"]
        tokens[f"{table['name']}.{row['label']}"] = f"{windows['sink']} + {windows['recent']}"
        tokens.setdefault(row["label"], tokens[f"{table['name']}.{row['label']}"])
    return tokens


def claims(wanted: list[tuple[str, str, str, str]], models: Mapping[str, Measured]) -> str:
    lines = [f"| claim | {' | '.join(INSTRUCT.values())} |", "|---|---|---|"]
    for text, better, worse, by in wanted:
        claim = {"text": text, "better": better, "worse": worse, "by": by}
        cells = [verdicts.verdict(claim, {}, verdicts.rows_with(claim, models[model])) for model in MODELS]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
