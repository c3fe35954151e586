"""Write the table of verdicts in docs/lab/methods.md: each claim of methods.toml, a column for each model, from recorded rows.

    python docs/ablations/verdicts.py           # writes the table between its two marks
    python docs/ablations/verdicts.py --check   # exit code 1 where the page is not what the rows say

A verdict needs a difference over the same windows that Student's t tells from none at 95 %: more than 2.13 standard errors
with 16 windows, 2.36 with eight. Figures without a spread, which rows do not have by window, have no verdict: the cell says
so. Where docs/benchmarks/results/ has both rows of a claim, they are taken from there.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import run

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "lab" / "methods.md"
BEGIN, END = "<!-- verdicts.py writes this table -->\n", "<!-- end of the table -->\n"
MODELS = {
    "SmolLM2-135M": "methods-smollm2-135m.json",
    "Qwen2.5-Coder-0.5B": "methods-qwen25-coder-05b.json",
    "kvref-28m (toy)": "methods-kvref-28m.json",
}
RESULTS = {
    model: FOLDER.parent / "benchmarks" / "results" / file
    for model, file in {
        "SmolLM2-135M": "smollm2-135m.json",
        "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b.json",
    }.items()
}
Rows = dict[str, dict[str, Any]]


def main() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    fresh = f"{before}{BEGIN}{table()}{END}{after}"
    if "--check" in sys.argv[1:]:
        sys.exit(f"{PAGE}: run docs/ablations/verdicts.py" if fresh != page else 0)
    PAGE.write_text(fresh)


def table() -> str:
    recipe = tomllib.loads((FOLDER / "methods.toml").read_text())
    labelled = {model: measured(model, recipe) for model in MODELS}
    lines = ["| claim | " + " | ".join(MODELS) + " |", "|---" * (1 + len(MODELS)) + "|"]
    for claim in recipe["claim"]:
        cells = [verdict(claim, recipe, rows_with(claim, files)) for files in labelled.values()]
        lines.append(f"| {claim['text']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def measured(model: str, recipe: dict[str, Any]) -> list[Rows]:
    """The model's rows by label, of each file that has some: the one with most windows first. Its rows have the labels
    of results.toml, too.
    """
    files = [rows_by_label(recipe, run.json.loads((FOLDER / MODELS[model]).read_text()))]
    if model in RESULTS:
        file = run.json.loads(RESULTS[model].read_text())
        files.insert(0, rows_by_label(results_recipe(), file) | rows_by_label(recipe, file))
    return files


def results_recipe() -> dict[str, Any]:
    return tomllib.loads((FOLDER.parent / "benchmarks" / "results.toml").read_text())


def rows_with(claim: dict[str, Any], files: list[Rows]) -> Rows:
    """The rows of the first file that has the figure of both sides of a claim; of the last where a side is the best of
    many rows.
    """
    sides, by = (claim["better"], claim["worse"]), claim.get("by", "kl")
    if all(isinstance(side, str) for side in sides):
        for rows in files:
            if all(by in rows.get(side, {}) for side in sides):
                return rows
    return files[-1]


def rows_by_label(recipe: dict[str, Any], found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows with figures, by their labels and by `table.label`, in the order of the recipe. "attention": numbers of windows
    and tokens that their attention errors are of, where the file says it.
    """
    rows: dict[str, dict[str, Any]] = {}
    settings = found.get("settings", {})
    of = {}
    if "attention_windows" in settings:
        of = {"attention": (settings["attention_windows"], settings["attention_tokens"])}
    for table in recipe["table"]:
        for row in run.rows_of(table):
            figures = found["rows"].get(run.key_of(row))
            if figures is not None and "refused" not in figures:
                rows[row["label"]] = rows[f"{table['name']}.{row['label']}"] = figures | of
    return rows


def verdict(claim: dict[str, Any], recipe: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    by = claim.get("by", "kl")
    worse = claim["worse"]
    if not isinstance(worse, str):
        worse = run.best_of(worse, by, recipe, rows)
    first, second = rows.get(claim["better"], {}), rows.get(worse, {})
    if by not in first or by not in second:
        return "not measured"
    a, b = first[by], second[by]
    word = "no spread by window"
    figures = f"{run.COLUMNS[by][0]} {a:.3g}, {b:.3g} ({a / b - 1:+.0%})"
    spread = run.difference(first, second, by)
    if spread is not None:
        of = " of its logarithm" if by == "perplexity" else ""
        figures += f", difference{of} {spread.mean:+.2g} ± {spread.error:.2g}, {spread.windows} windows"
        figures += f", ratio {spread.ratio:.3g}"
        word = "open" if not spread.apart else "**holds**" if spread.mean < 0 else "**does not hold**"
    elif by == "logit_error" and "attention" in first:
        count, tokens = first["attention"]
        word = f"{'one window' if count == 1 else f'{count} windows'} of {tokens:,} tokens, no spread"
    bits = first["bits_per_value"], second["bits_per_value"]
    if abs(bits[0] / bits[1] - 1) >= 0.01:
        figures += f", {bits[0]:.3g} and {bits[1]:.3g} bits"
    if not isinstance(claim["worse"], str):
        figures += f" (the other: {worse.split('.', 1)[-1] if worse.startswith('One window') else worse})"
    return f"{word}: {figures}"


if __name__ == "__main__":
    main()
