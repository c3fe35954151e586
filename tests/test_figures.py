"""Speeds on pages are those of the stored runs that the pages name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import ROOT

DOCS = ROOT / "docs"
ATTENTION, MODELS = DOCS / "benchmarks" / "decode_attention.md", DOCS / "benchmarks.md"


def run_of(page: Path, words: str) -> dict[str, Any]:
    """The file that the page's link of these words leads to."""
    [name] = re.findall(rf"\[{words}\]\(([^)]+\.json)\)", page.read_text("utf-8"))
    return dict(json.loads((page.parent / name).read_text()))


def attention() -> list[dict[str, Any]]:
    return list(run_of(ATTENTION, "What the script wrote")["rows"])


def models() -> list[dict[str, Any]]:
    return list(run_of(MODELS, "all rows")["rows"])


def cells(page: Path, head: str) -> Iterator[list[str]]:
    """The rows of the table whose head begins so."""
    _, _, table = page.read_text("utf-8").partition(f"\n| {head} |")
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip(" *") for cell in line.strip("|").split("|")]


def test_attention() -> None:
    known = {(row["scheme"], row["batch"], row["length"]): row for row in attention()}
    for scheme, bits, shape, taken, fraction, _, ratio, *_ in cells(ATTENTION, "scheme | stored bits"):
        batch, length = map(int, shape.split(" × "))
        row = known.pop((scheme, batch, length))
        assert [bits, taken] == [f"{row['stored_bits']:.2f}", f"{row['microseconds']:.1f}"]
        assert [fraction, ratio] == [f"{row[name]:.2f}" for name in ("fraction_of_copy", "ratio_to_fp16")]
    assert known == {}, "rows of the run that the page leaves out"


WHOLE = {"InnerQ Small": "innerq-small", "KIVI 2/2, G = 128": "kivi-2-g128", "uniform 4/4": "inner-4"}


def best(operation: str, scheme: str) -> dict[str, Any]:
    rows = [row for row in models() if (row["operation"], row["scheme"]) == (operation, scheme)]
    return max(rows, key=lambda row: float(row.get("tokens_per_second") or 0))


def test_whole_models() -> None:
    plain, alone = best("largest-batch", "fp16"), best("generate", "fp16")
    for name, _, batch, _, rate, times, _ in cells(MODELS, "32768 tokens a row"):
        if name in WHOLE:
            row = best("largest-batch", WHOLE[name])
            assert (int(batch), float(rate)) == (row["batch"], round(row["tokens_per_second"]))
            assert float(times) == round(row["tokens_per_second"] / plain["tokens_per_second"], 2)
    for name, taken, times, _ in cells(MODELS, "one row of 131072 tokens"):
        if name in WHOLE:
            row = best("generate", WHOLE[name])
            assert float(taken) == round(row["microseconds"] / 1000, 1)
            assert float(times) == round(row["tokens_per_second"] / alone["tokens_per_second"], 2)


def test_readme() -> None:
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    many = {row["scheme"]: row for row in attention() if (row["batch"], row["length"]) == (32, 32768)}
    for scheme in ("uniform 4/4", "uniform 2/2"):
        assert f"{many[scheme]['ratio_to_fp16']:.2f} ×" in text
    rates = [best("largest-batch", name) for name in ("innerq-small", "kivi-2-g128", "fp16")]
    for row in rates[:2]:
        assert f"{row['batch'] / rates[2]['batch']:.1f} ×" in text
        assert f"{row['tokens_per_second'] / rates[2]['tokens_per_second']:.1f} ×" in text
    alone = best("generate", "fp16")["tokens_per_second"]
    gains = [round(100 * (best("generate", name)["tokens_per_second"] / alone - 1)) for name in WHOLE.values()]
    assert f"gains {min(gains)} to {max(gains)} % only" in text
    grids = [row for name, row in many.items() if re.fullmatch("HIGGS .|TurboQuant.*", name)]
    for name, form in (
        ("fraction_of_copy", "{:.2f} to {:.2f} of memory's speed"),
        ("ratio_to_fp16", "{:.1f} to {:.1f} × FP16"),
    ):
        found = [row[name] for row in grids]
        assert form.format(min(found), max(found)) in text
