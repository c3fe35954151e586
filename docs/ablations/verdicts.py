"""Write the table of verdicts in docs/lab/methods.md: each claim of methods.toml, a column for each model, from recorded rows.

    python docs/ablations/verdicts.py           # writes the table between its two marks
    python docs/ablations/verdicts.py --check   # exit code 1 where the page is not what the rows say

A verdict needs a difference over the same windows that Student's t tells from none at 95 %: more than 2.13 standard errors
with 16 windows, 2.36 with eight. Figures without a spread, which rows do not have by window, have no verdict: the cell says
so. Where docs/benchmarks/results/ has both rows of a claim, they are taken from there.
"""

from __future__ import annotations

import math
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run

from kvcal.evaluate.spread import Difference

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


@dataclass(frozen=True)
class Verdict:
    """One claim on one model. first, second: the figure of both rows; bits: stored bits per value of both; other: label of
    the second row where it is the best of many.
    """

    word: str
    by: str
    first: float
    second: float
    bits: tuple[float, float]
    spread: Difference | None
    other: str

    @property
    def bits_differ(self) -> bool:
        return abs(self.bits[0] / self.bits[1] - 1) >= 0.01


def judged(claim: dict[str, Any], recipe: dict[str, Any], rows: Rows) -> Verdict | None:
    """None where one of both rows has no such figure."""
    by, worse, other = claim.get("by", "kl"), claim["worse"], ""
    if not isinstance(worse, str):
        worse = run.best_of(worse, by, recipe, rows)
        other = worse.split(".", 1)[-1] if worse.startswith("One window") else worse
    first, second = rows.get(claim["better"], {}), rows.get(worse, {})
    if by not in first or by not in second:
        return None
    word = "no spread by window"
    spread = run.difference(first, second, by)
    if spread is not None:
        word = "open" if not spread.apart else "**holds**" if spread.mean < 0 else "**does not hold**"
    elif by == "logit_error" and "attention" in first:
        count, tokens = first["attention"]
        word = f"{'one window' if count == 1 else f'{count} windows'} of {tokens:,} tokens, no spread"
    return Verdict(word, by, first[by], second[by], (first["bits_per_value"], second["bits_per_value"]), spread, other)


def verdict(claim: dict[str, Any], recipe: dict[str, Any], rows: Rows) -> str:
    """The words and figures of one claim in one cell."""
    of = judged(claim, recipe, rows)
    if of is None:
        return "not measured"
    figures = f"{run.COLUMNS[of.by][0]} {of.first:.3g}, {of.second:.3g} ({change(of.first, of.second)})"
    if of.spread is not None:
        logarithm = " of its logarithm" if of.by == "perplexity" else ""
        figures += f", difference{logarithm} {with_error(of.spread.mean, of.spread.error)}"
        figures += f", {of.spread.windows} windows, ratio {of.spread.ratio:.3g}"
    if of.bits_differ:
        figures += f", {of.bits[0]:.3g} and {of.bits[1]:.3g} bits"
    if of.other:
        figures += f" (the other: {of.other})"
    return f"{of.word}: {figures}"


def change(first: float, second: float) -> str:
    """By how much the first is more or less than the second: +7 %, −81 %."""
    return f"{first / second - 1:+.0%}".replace("%", " %").replace("-", "−")


def with_error(mean: float, error: float) -> str:
    """A signed difference to the digits that two of its error have: −0.066 ± 0.0055, −2.00 ± 0.21."""
    decimals = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 2
    return f"{mean:+.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


if __name__ == "__main__":
    main()
