"""Write the table of verdicts in docs/lab/methods.md: each claim of methods.toml, a column for each model, from recorded rows.

    python docs/ablations/verdicts.py           # writes the table between its two marks
    python docs/ablations/verdicts.py --check   # exit code 1 where the page is not what the rows say

A verdict needs a difference over the same windows that Student's t tells from none at 95 %: with eight windows, more than
2.36 standard errors. Figures without a spread, which rows do not have by window, have no verdict: the cell says so.
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
    labelled = {
        model: rows_by_label(recipe, run.json.loads((FOLDER / file).read_text())) for model, file in MODELS.items()
    }
    lines = ["| claim | " + " | ".join(MODELS) + " |", "|---" * (1 + len(MODELS)) + "|"]
    for claim in recipe["claim"]:
        cells = [verdict(claim, recipe, rows) for rows in labelled.values()]
        lines.append(f"| {claim['text']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
    if claim["better"] not in rows or worse not in rows:
        return "not measured"
    first, second = rows[claim["better"]], rows[worse]
    a, b = first[by], second[by]
    word = "no spread by window"
    figures = f"{run.COLUMNS[by][0]} {a:.3g}, {b:.3g} ({a / b - 1:+.0%})"
    spread = run.difference(first, second, by)
    if spread is not None:
        figures += f", difference {spread.mean:+.2g} ± {spread.error:.2g}, ratio {spread.ratio:.3g}"
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
