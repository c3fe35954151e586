"""Speeds on pages are those of the stored runs that the pages name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from kvcal.bench import devices, jetson, schemes
from kvcal.models.catalogue import CATALOGUE
from tests.support.pages import ROOT

DOCS = ROOT / "docs"
BENCHMARKS = DOCS / "benchmarks"
MODELS = DOCS / "lab" / "benchmarks.md"
LIMITS = DOCS / "lab" / "limits.md"
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d+(?:\.(\d+))?(?:e([-+]?\d+))?")


def page(name: str) -> Path:
    return BENCHMARKS / f"{name}.md"


def text_of(path: Path) -> str:
    """In one line."""
    return " ".join(path.read_text("utf-8").split())


def run_of(path: Path, words: str = "all of it") -> dict[str, Any]:
    """The file that the page's link of these words leads to."""
    [name] = set(re.findall(rf"\[{words}\]\(([^)]+\.json)\)", path.read_text("utf-8")))
    return dict(json.loads((path.parent / name).read_text()))


def cells(path: Path, head: str) -> Iterator[list[str]]:
    """The rows of the table whose head begins so."""
    _, _, table = path.read_text("utf-8").partition(f"\n| {head} |")
    assert table, f"{path.name} has no table that begins with | {head} |"
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip(" *") for cell in line.strip("|").split("|")]


def holds(cell: str, *values: float) -> bool:
    """Whether the numbers that a cell shows are these, to the digits that it shows. A percentage is of a hundredth."""
    found = list(NUMBER.finditer(cell))
    if len(found) != len(values):
        return False
    for number, value in zip(found, values, strict=True):
        shown, percent = float(number[0].replace("−", "-")), cell[number.end() :].lstrip().startswith("%")
        unit = 10.0 ** (int(number[2] or 0) - len(number[1] or ""))
        if abs(shown - (100 * value if percent else value)) > 0.5 * unit * (1 + 1e-9):
            return False
    return True


def shows(path: Path, head: str, wanted: Mapping[Any, Sequence[Any]], keys: int = 1) -> None:
    """The table's rows are `wanted`, by what is in their first `keys` cells; of each other cell the numbers in it, or
    its words. Where a row's first cell is empty, it is that of the row above.
    """
    left, above = dict(wanted), ""
    for row in cells(path, head):
        above = row[0] = row[0] or above
        name = row[0] if keys == 1 else tuple(row[:keys])
        assert name in left, f"{path.name}: {name} is not in the stored run"
        own = left.pop(name)
        assert len(row) >= keys + len(own), f"{path.name}: {row}"
        for cell, numbers in zip(row[keys:], own, strict=False):
            good = cell == numbers if isinstance(numbers, str) else holds(cell, *numbers)
            assert good, f"{path.name}, {name}: {cell!r} where the stored run has {numbers}"
    assert not left, f"{path.name} leaves out {list(left)}"


@pytest.mark.parametrize(
    ("cell", "values"),
    [
        ("282", [282.4]), ("0.50 (0.496)", [0.4958, 0.4958]), ("3.1e-4 (3.0e-4)", [3.14e-4, 2.96e-4]), ("−1.8 %", [-0.0182]),
        ("2514 + 78", [2514.1, 77.7]), ("+14 %", [0.14]), ("–", []), ("2.2 to 4.5 ×", [2.21, 4.49]),
    ],
)  # fmt: skip
def test_numbers_of_a_cell(cell: str, values: list[float]) -> None:
    assert holds(cell, *values)
    for i, value in enumerate(values):
        assert not holds(cell, *values[:i], 1.1 * value, *values[i + 1 :])
    assert not holds(cell, *values, 1.0) and not (values and holds(cell, *values[1:]))


def test_a_table_that_differs_is_seen(tmp_path: Path) -> None:
    made = tmp_path / "page.md"
    made.write_text("# x\n\n| who | µs | of copy |\n|---|---|---|\n| a | 10.6 | **0.5** |\n| | 7 | – |\n\nend | b |\n")
    table: dict[Any, Any] = {("a", "10.6"): [[0.52]], ("a", "7"): ["–"]}
    shows(made, "who", table, keys=2)
    for other in ({("a", "10.6"): [[0.62]]}, {("a", "7"): [[1.0]]}, {("b", "7"): []}):
        with pytest.raises(AssertionError):
            shows(made, "who", table | other, keys=2)
    with pytest.raises(AssertionError, match="not in the stored run"):
        shows(made, "who", {("a", "10.6"): [[0.52]]}, keys=2)
    with pytest.raises(AssertionError, match="no table"):
        list(cells(made, "whose"))


# Decode attention.


def attention() -> list[dict[str, Any]]:
    return list(run_of(page("decode_attention"), "What the script wrote")["rows"])


def at(batch: int, length: int) -> str:
    return f"{batch} × {length}"


def test_attention() -> None:
    wanted = {}
    for row in attention():
        taken, fraction, ratio = (row[name] for name in ("microseconds", "fraction_of_copy", "ratio_to_fp16"))
        shape = at(row["batch"], row["length"])
        wanted[row["scheme"], f"{row['stored_bits']:.2f}", shape] = (
            taken,
            fraction,
            ratio,
            row["error"],
            row["error_fp16"],
        )
    for scheme, bits, shape, taken, fraction, _, ratio, _, errors in cells(
        page("decode_attention"), "scheme | stored bits"
    ):
        own = wanted.pop((scheme, bits, shape))
        assert holds(f"{taken} {fraction} {ratio}", *own[:3]) and holds(errors, *own[3:]), (scheme, shape)
    assert not wanted, "rows of the run that the page leaves out"


NEWER = ("ffe395f", "5d6d194", "83a801a", "3a30158", "2708de7")


def test_bare_reads() -> None:
    """Of short contexts, beside what is wanted there."""
    rows = {at(r["batch"], r["length"]): r for r in attention() if r["scheme"] == "uniform 4/4"}
    ratios = {row[0]: float(row[-1]) for row in cells(page("decode_attention"), "batch × length | 241914a")}
    best = {shape: rows[shape]["ratio_to_fp16"] * rows[shape]["microseconds"] for shape in ratios}
    wanted: dict[Any, Any] = {
        shape: [
            [rows[shape]["bytes"] / 1e6],
            [rows[shape]["microseconds"]],
            [rows[shape]["bare_read"]],
            [best[shape] / own],
        ]
        for shape, own in ratios.items()
    }
    shows(page("decode_attention"), "batch × length | MB", wanted)


def test_short_contexts() -> None:
    """Of the commits whose runs are stored."""
    by = {}
    for commit in ("241914a", *NEWER):
        rows = json.loads((BENCHMARKS / f"decode_attention-{commit}.json").read_text())["rows"]
        by[commit] = {
            at(r["batch"], r["length"]): r
            for r in rows
            if r["scheme"] == "uniform 4/4" and r["length"] * r["batch"] < 2**20
        }
    seen = [row[0] for row in cells(page("decode_attention"), "batch × length | 241914a")]
    assert sorted(seen) == sorted(by["ffe395f"])
    for shape, old, _, *newer, _ in cells(page("decode_attention"), "batch × length | 241914a"):
        assert holds(old, by["241914a"][shape]["microseconds"])
        for commit, new in zip(NEWER, newer, strict=True):
            assert holds(new, by[commit][shape]["microseconds"], by[commit][shape]["ratio_to_fp16"])


def test_fp16_of_the_attention_run() -> None:
    """Which backends it had, and what they took."""
    said, stored = text_of(page("decode_attention")), run_of(page("decode_attention"), "What the script wrote")["fp16"]
    listed = re.search(r"Their µs \(cuDNN; FlashInfer; flash; then .*?\): (.*?)\. The wanted", said)
    rows = [f"sdpa {name}, heads as rows" for name in ("cudnn", "flash", "efficient", "math")]
    names = [f"{name} float16" for name in ("sdpa cudnn", "flashinfer", "sdpa flash", *rows, "sdpa math")]
    assert listed and all(sorted(taken) == sorted(names) for taken in stored.values())
    shapes = {shape.replace("x", "×"): taken for shape, taken in stored.items()}
    for part in listed[1].split("; "):
        shape, numbers = part.split(": ")
        taken = shapes.pop(shape)
        assert holds(numbers, *(taken[name] for name in names)), part
    assert not shapes


# Quantise and append.

QUANTISED = {  # rows of the page: operations and schemes
    "KIVI 2/2, G = 32": ("quantise", "KIVI 2/2 G=32"),
    "KIVI 2/2, G = 128": ("quantise", "KIVI 2/2 G=128"),
    "HIGGS 2, 3, 4: rotate, nearest": ("rotate+nearest", "HIGGS 2 (2, 16)", "HIGGS 3 (2, 64)", "HIGGS 4 (2, 256)"),
    "HIGGS 2, 3, 4: all of it, two launches a side": (
        "quantise",
        "HIGGS 2 (2, 16)",
        "HIGGS 3 (2, 64)",
        "HIGGS 4 (2, 256)",
    ),
    "SQuat's correction": ("correct", "SQuat"),
    "MixKVQ's choice": ("select", "MixKVQ"),
}
TURBO = "TurboQuant 3 (1, 8)"
APPENDED = {
    "InnerQ Base": "InnerQ Base 3/3", "KIVI G = 32": "KIVI 2/2 G=32", "KIVI G = 128 (a block of 128 tokens)": "KIVI 2/2 G=128",
    "HIGGS 2": "HIGGS 2 (2, 16)", "HIGGS 3": "HIGGS 3 (2, 64)", "HIGGS 4": "HIGGS 4 (2, 256)", "TurboQuant 3": TURBO,
}  # fmt: skip


def test_quantise() -> None:
    left = {(row["operation"], row["scheme"]): row for row in run_of(page("quantise"))["rows"]}
    for name, *shown in cells(page("quantise"), "32 rows of 4096 tokens"):
        operation, *schemes = QUANTISED.get(name, ("quantise", name))
        rows = [left.pop((operation, scheme)) for scheme in schemes if not name.startswith("TurboQuant")]
        if name == "TurboQuant 3: rotate, nearest; all of it, one launch":
            rows = [left.pop((operation, TURBO)) for operation in ("rotate+nearest", "quantise")]
        names = ("stored_bits", "microseconds", "fraction_of_copy", "fraction_of_issue")
        for cell, column in zip(shown, names, strict=True):
            values = [row[column] for row in rows]
            blank = column == "stored_bits" and not cell
            assert holds(cell, *([] if blank else values)), (name, cell, values)
    assert {operation for operation, _ in left} == {"append idle", "append due"}


def test_append() -> None:
    left = {(row["operation"], row["scheme"]): row["microseconds"] for row in run_of(page("quantise"))["rows"]}
    left = {name: taken for name, taken in left.items() if name[0].startswith("append")}
    for name, *shown in cells(page("quantise"), "append, 32 rows, one new token"):
        idle, due = (left.pop((f"append {when}", APPENDED.get(name, name))) for when in ("idle", "due"))
        block = 128 if "128 tokens" in name else 32
        assert holds(" ".join(shown), idle, due, ((block - 1) * idle + due) / block), name
    assert not left


def test_what_is_said_of_appends() -> None:
    taken = {(row["operation"], row["scheme"]): row["microseconds"] for row in run_of(page("quantise"))["rows"]}
    idle, due = ({s: t for (what, s), t in taken.items() if what == f"append {when}"} for when in ("idle", "due"))
    grids = [scheme for scheme in idle if re.match("HIGGS|TurboQuant", scheme)]
    slow = ["InnerQ Base, search", "SQuat"]
    integers = [scheme for scheme in idle if scheme not in grids and scheme not in slow]
    said = text_of(page("quantise"))
    least, most, packed, longest = (edge(t[s] for s in integers) for t in (idle, due) for edge in (min, max))
    waits = f"{least:.1f} to {most:.1f} µs where nothing is due and {packed:.0f} to {longest:.0f} where every row packs"
    assert f"integers take {waits}" in said
    ends = [edge(t[s] for s in grids) for t in (idle, due) for edge in (min, max)]
    assert "grids {:.1f} to {:.1f} and {:.0f} to {:.0f}.".format(*ends) in said
    assert f"takes {ends[0] - most:.1f} to {ends[1] - least:.1f} µs more than that of integers" in said
    mean = {s: (31 * idle[s] + due[s]) / 32 for s in idle}
    assert [s for s, taken in mean.items() if taken >= 10] == slow[1:]
    told = "of InnerQ's `search` (up to 34 scales of each group) {:.2f}, but for SQuat ({:.1f})"
    assert told.format(*(mean[s] for s in slow)) in said
    mean = {s: mean[s] for s in grids}
    assert (min(mean, key=mean.__getitem__), max(mean, key=mean.__getitem__)) == (TURBO, "HIGGS 4 (2, 256)")
    ends = f"of grids {min(mean.values()):.1f} (TurboQuant 3) to {max(mean.values()):.1f} (HIGGS 4)"
    assert f"Means are below 10 µs, {ends}, " in said


def test_warps_of_quantise() -> None:
    """Of integers that were tried with one and four warps."""
    ratios = {}
    for row in run_of(page("quantise"))["rows"]:
        by = {
            warps: min(t for t, w, *_ in row.get("tried", ()) if w == warps)
            for warps in {t[1] for t in row.get("tried", ())}
        }
        if 1 in by:
            ratios[row["scheme"]] = by[4] / by[1]
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    assert (least, most) == ("KIVI 2/2 G=128", "InnerQ Hybrid")
    said = f"{ratios[least]:.1f} (KIVI, G = 128) to {ratios[most]:.1f} times (hybrid) as long"
    assert said in text_of(page("quantise"))


# Dequantiser, nearest codeword.


def test_reconstruct() -> None:
    rows = run_of(page("dequantise"))["rows"]
    wanted: dict[Any, Any] = {}
    shapes = dict.fromkeys(at(row["batch"], row["length"]) for row in rows if "side" in row)
    for rotation in ("head", "token"):
        there = [row for row in rows if row.get("rotation") == rotation]
        for dtype, shape in ((dtype, shape) for dtype in ("float16", "bfloat16") for shape in shapes):
            own = {r["side"]: r for r in there if (r.get("dtype"), at(r["batch"], r["length"])) == (dtype, shape)}
            if own:
                keys, values, both = (own[side] for side in ("keys", "values", "both"))
                errors = [max(row[name] for row in (keys, values)) for name in ("error", "error_torch")]
                shown = [keys["microseconds"]], [values["microseconds"]], [both["fraction_of_matmul"]], [0.5], errors
                wanted[f"rotation over the {rotation}, {dtype}", shape] = shown
        decodes = [row for row in there if row.get("operation") == "decode"]
        taken = [r["microseconds"] for r in decodes]
        of_copy = sum(r["fraction_of_copy"] * r["microseconds"] for r in decodes) / sum(taken)
        errors = [max(r[name] for r in decodes) for name in ("error", "error_torch")]
        name = f"no predictor, rotation over the {rotation}, float16"
        wanted[name, at(8, 8192)] = [taken[0]], [taken[1]], [of_copy], "–", errors
    shows(page("dequantise"), "| rows × tokens", wanted, keys=2)


def test_nearest() -> None:
    rows = [row for row in run_of(page("dequantise"))["rows"] if row.get("operation") == "nearest"]
    wanted: dict[Any, Any] = {}
    for row in rows:
        taken, peer = row["microseconds"], row["flash_kmeans_microseconds"]
        assert peer > taken
        wanted[str(row["dimension"]), str(row["codewords"])] = (
            [taken], [row["fraction_of_matmul"]], [0.6] if row["dimension"] == 128 else "–", [peer], [peer / taken],
            [row["farther"], row["flash_kmeans_farther"]],
        )  # fmt: skip
    shows(page("dequantise"), "d | codewords", wanted, keys=2)
    by = {row["codewords"]: row["fraction_of_matmul"] for row in rows if row["dimension"] == 128}
    assert sorted(k for k, of in by.items() if of >= 0.6) == [65536]
    assert "the wanted 0.6 is met with 65536 codewords and missed with 4096" in text_of(page("dequantise"))


def test_ceilings_and_bare_products() -> None:
    run, said = run_of(page("dequantise")), text_of(page("dequantise"))
    of = run["ceilings"]
    assert f"product in that run {of['matmul'] / 1e12:.0f} TFLOP/s, copy {of['copy'] / 1e12:.2f} TB/s" in said
    bare: dict[tuple[str, str], list[str]] = {}
    for row in run["rows"]:
        if "bare_product_microseconds" in row and at(row["batch"], row["length"]) == at(8, 8192):
            bare.setdefault((row["dtype"], row["side"]), []).append(f"{row['bare_product_microseconds']:.0f}")
    (keys, values), others = (
        [" to ".join(sorted(set(bare[dtype, side]))) for side in ("keys", "values")]
        for dtype in ("float16", "bfloat16")
    )
    assert f"{keys} and {values} µs by torch ({others[0]} and {others[1]} in bfloat16) at 8 × 8192" in said


def test_cost_of_rotating_over_the_token() -> None:
    taken = {
        (row["side"], row["rotation"]): row["microseconds"]
        for row in run_of(page("dequantise"))["rows"]
        if row.get("dtype") == "bfloat16"
    }
    keys, values = (taken[side, "token"] - taken[side, "head"] for side in ("keys", "values"))
    found = re.search(r"costs (\d+) µs of keys and (\d+) of values", text_of(page("dequantise")))
    assert found and [float(each) for each in found.groups()] == pytest.approx([keys, values], abs=0.6)


# Vector codes.


def test_vector_codes() -> None:
    names = {"4k": "4096 codewords", "paper": "the paper's (65536, 16384)"}
    rows, wanted = run_of(page("vq_attention"))["rows"], {}
    for row in rows:
        parts = [row["decode_microseconds"], row["sdpa_microseconds"]]
        assert row["backend"] == "cudnn" and abs(row["ratio_to_one_pass"] - sum(parts) / row["microseconds"]) < 1e-3
        goal: Any = [3.0] if row["scheme"] == "4k" else "–"
        errors = [row["error"], row["error_float16"]]
        wanted[names[row["scheme"]], at(row["batch"], row["length"])] = (
            [row["microseconds"]], parts, [row["ratio_to_one_pass"]], goal, errors,
        )  # fmt: skip
    shows(page("vq_attention"), "codebooks | batch × length", wanted, keys=2)
    said = text_of(page("vq_attention"))
    for scheme, form in (
        ("paper", "{:.0f} µs (tables alone) of {:.0f} at 8 × 8192"),
        ("4k", "tables take {:.0f} of {:.0f} µs at 8 × 8192"),
    ):
        [row] = [r for r in rows if (r["scheme"], r["batch"], r["length"]) == (scheme, 8, 8192)]
        assert form.format(row["parts"]["tables_kernel"], row["microseconds"]) in said
    for form, ratios in (
        ("torch's own decode takes {:.0f} to {:.0f} times our one-pass decode",
         [r["torch_decode_microseconds"] / r["decode_microseconds"] for r in rows if "torch_decode_microseconds" in r]),
        ("the fused kernel is {:.0f} to {:.0f} times slower", [r["microseconds"] / r["sdpa_microseconds"] for r in rows]),
    ):  # fmt: skip
        assert form.format(min(ratios), max(ratios)) in said


def test_vector_codes_that_are_appended() -> None:
    rows = [row for row in run_of(page("quantise"), "that run")["rows"] if row["operation"].startswith("append")]
    names = {"4096 codewords": "4k", "the paper's": "paper"}
    taken = {(row["scheme"], row["batch"], row["operation"][7:]): row["microseconds"] for row in rows}
    assert all(row["error"] is None or abs(row["error"] - 1) < 5e-7 for row in rows)
    name = ""
    for who, batch, *shown in cells(page("quantise"), "append, one new token | rows"):
        name = names.get(who, name)
        idle, due = (taken.pop((name, int(batch), what)) for what in ("idle", "due"))
        assert holds(" ".join(shown), idle, due, (127 * idle + due) / 128), (name, batch)
    assert not taken


def test_runs_that_were_repeated() -> None:
    """By how much a later run of unchanged kernels differs from the page's."""
    names = ("operation", "scheme", "batch", "length", "side", "rotation", "dtype", "dimension", "codewords")

    def by_name(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {tuple(row.get(name) for name in names): row for row in json.loads(path.read_text())["rows"]}

    def apart(what: str, column: str) -> dict[tuple[Any, ...], float]:
        first, again = (by_name(BENCHMARKS / f"{what}-{commit}.json") for commit in ("25de13b", "f1b71ed"))
        assert first.keys() == again.keys()
        return {key: 100 * (again[key][column] / row[column] - 1) for key, row in first.items()}

    codes, ratios = (apart("vq_attention", column) for column in ("microseconds", "ratio_to_one_pass"))
    told = "every fused time is within {:.1f} % of these, every ratio within {:.1f} %."
    assert told.format(*(max(map(abs, one.values())) for one in (codes, ratios))) in text_of(page("vq_attention"))
    products = apart("reconstruct", "microseconds")
    less = [-products.pop(next(k for k in products if k[-2:] == key)) for key in ((80, 65536), (128, 65536))]
    told = (
        "within {:.1f} % of this one, but d = 80 with 65536 codewords, {:.1f} % less, and d = 128, {:.1f} % less (0.72)"
    )
    assert told.format(max(map(abs, products.values())), *less) in text_of(page("dequantise"))


# AQUA-KV's tokens a second.

AQUA, DECODED, FUSED, PLAIN = "aqua-kv-2", "higgs-2, decoded", "higgs-2, fused", "fp16"
CACHES = {"AQUA-KV": AQUA, "HIGGS, decoded": DECODED, "HIGGS, fused, eager": FUSED, "FP16, DynamicCache": PLAIN}
SHORT, LONG, LONGEST = 2048, 8192, 32768
CHOICE = "torch's choice, "
Turn = dict[str, dict[str, float]]  # cache -> a step, by the columns of the file; its place in the turn


def shape_of(length: int) -> dict[str, Any]:
    [one] = [shape for shape in run_of(page("aqua_tokens"))["shapes"] if shape["length"] == length]
    return dict(one)


def turns_of(length: int, name: str) -> list[Turn]:
    one, columns = shape_of(length)["passes"][name], run_of(page("aqua_tokens"))["columns"]
    found: list[Turn] = []
    for row in one["steps"]:
        step = dict(zip(columns, row, strict=True))
        if step["turn"] == len(found):
            found.append({})
        found[-1][one["caches"][step["cache"]]] = {**step, "place": len(found[-1])}
    return found


def calm(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if not any(step["packs"] for step in turn.values())]


def turn_by_turn(turns: Sequence[Turn]) -> float:
    return median(turn[DECODED]["wall"] / turn[AQUA]["wall"] - 1 for turn in turns)


def even(length: int, name: str, limit: float = 1.1) -> list[Turn]:
    """The turns without packing in which FP16 and the fused one took at most `limit` x their first decile."""
    low = {cache: one["low"] for cache, one in shape_of(length)["passes"][name]["summary"].items()}
    return [t for t in calm(turns_of(length, name)) if all(t[c]["wall"] <= limit * low[c] for c in (FUSED, PLAIN))]


def test_steps_in_turn() -> None:
    wanted: dict[str, list[Any]] = {name: [] for name in CACHES}
    for length, name in product((LONG, SHORT, LONGEST), ("first", "again")):
        steps = turns_of(length, name)
        for shown, cache in CACHES.items():
            ms = [turn[cache]["wall"] / 1e3 for turn in steps if not turn[cache]["packs"]]
            packing = [turn[cache]["wall"] / 1e3 for turn in steps if turn[cache]["packs"]]
            deciles = quantiles(ms, n=10, method="inclusive")
            share = [median(ms) + max(0.0, one - median(ms)) / 32 for one in packing]
            wanted[shown].append([median(ms), deciles[0], deciles[8], *share])
    shows(page("aqua_tokens"), "ms a step", wanted)


def test_aqua_kv_over_others() -> None:
    wanted: dict[str, list[Any]] = {}
    for length in (LONG, SHORT, LONGEST):
        for name, one in shape_of(length)["passes"].items():
            sums = one["summary"]
            ratio = {cache: own["step"] / sums[AQUA]["step"] - 1 for cache, own in sums.items()}
            row: list[Any] = [[ratio[DECODED]], [sums[DECODED]["median"] / sums[AQUA]["median"] - 1]]
            row.append([turn_by_turn(calm(turns_of(length, name)))])
            if FUSED in sums:
                kept = even(length, name)
                row += [[turn_by_turn(kept), len(kept)], [ratio[FUSED]], [ratio[PLAIN]]]
            wanted[f"{length}, {name}"] = row if FUSED in sums else [*row, "–", "–", "–"]
    shows(page("aqua_tokens"), "AQUA-KV over", wanted)


def test_steps_of_aqua_kv_are_the_hosts() -> None:
    apart = []
    for name in shape_of(LONG)["passes"]:
        for step in (step for turn in turns_of(LONG, name) for step in turn.values()):
            taken = [step[what] for what in ("wall", "host", "span", "busy")]
            apart.append(max(taken) - min(taken))
    assert 400 < max(apart) < 500 and "agree within 0.5 ms at 8192 tokens" in text_of(page("aqua_tokens"))


def test_plans_of_cudnn() -> None:
    """Who pays: the first step over a number of keys, by the place in the turn."""
    said = text_of(page("aqua_tokens"))
    plain = {
        length: [shape_of(length)["passes"][name]["summary"][PLAIN]["median"] / 1e3 for name in ("first", "again")]
        for length in (LONG, SHORT, LONGEST)
    }
    told = "{:.1f} ms, and {:.1f} over the same numbers again; at 2048 tokens {:.1f} and {:.1f}"
    assert told.format(*plain[LONG], *plain[SHORT]) in said
    paid = [f"{first - again:.0f}" for first, again in plain.values()]
    assert "{} ms of the host a step at 8192 tokens, {} at 2048, {} at 32768".format(*paid) in said
    assert "{} ms a step at 8192 tokens, {} at 2048".format(*paid) in text_of(ROOT / "CHANGELOG.md")
    assert "at 2048 tokens it takes {:.1f} ms with, {:.1f} without".format(*plain[SHORT]) in text_of(MODELS)
    once, again = (turns_of(LONG, CHOICE + name) for name in ("first", "again"))
    places = [
        [
            [step["wall"] / 1e3 for turn in of[3:] for step in turn.values() if step["place"] == place]
            for place in (0, 1)
        ]
        for of in (once, again)
    ]
    (first, other), known = places[0], places[1]
    told = f"In all {len(first)} turns of the first pass whose number is new (3 to {len(once) - 1};"
    assert told in said and {step["cache"] for turn in once[3:] for step in turn.values() if not step["place"]} == {
        0,
        1,
    }
    told = f"takes {min(first):.0f} to {max(first):.0f} ms, whichever it is, the other {min(other):.0f} to {max(other):.0f}"
    assert told in said
    both = [*known[0], *known[1]]
    told = f"both take {min(both):.0f} to {max(both):.0f}, by medians {median(known[0]):.1f} and {median(known[1]):.1f}"
    assert told in said
    packed = [[round(of[1][cache]["wall"] / 1e3) for cache in (AQUA, DECODED)] for of in (once, again)]
    assert "takes {} and {} in the first pass, {} and {} in the second".format(*packed[0], *packed[1]) in said
    own = [shape_of(LONG)["passes"]["first"]["summary"][cache]["median"] / 1e3 for cache in (AQUA, DECODED)]
    assert "neither pays: {:.1f} and {:.1f} ms in the first pass".format(*own) in said


def test_rows_of_aqua_kv() -> None:
    run, said, one = run_of(page("aqua_tokens")), text_of(page("aqua_tokens")), shape_of(LONG)
    [graph] = [row["microseconds"] / 1e3 for row in one["rows"] if row["path"].endswith("CUDA graph")]
    assert f"as a CUDA graph that one takes {graph:.2f} ms" in said
    rate, products = run["ceilings"]["matmul"], one["predictor_flops"]
    kernels = [one["device"][cache]["reconstruct_microseconds"] / 1e3 for cache in (AQUA, DECODED)]
    bound = f"{products / 1e12:.2f} TFLOP, {products / rate * 1e3:.2f} ms at torch's own {rate / 1e12:.0f} TFLOP/s"
    assert f"{bound}, and the kernel takes {kernels[0] - kernels[1]:.2f} ms more with them" in said
    busy = [one["device"][cache]["device_microseconds"] / 1e3 for cache in (AQUA, DECODED)]
    assert f"{busy[0] / busy[1] - 1:.0%} more:** {busy[0]:.2f} against {busy[1]:.2f} ms".replace("%", " %") in said
    shares = [
        [sums[cache]["step"] - sums[cache]["median"] for cache in (AQUA, DECODED)]
        for length in (LONG, SHORT)
        for sums in (own["summary"] for own in shape_of(length)["passes"].values())
    ]
    more = [(own - other) / 1e3 for own, other in shares]
    assert f"AQUA-KV's takes {min(more):.1f} to {max(more):.1f} ms a step more than HIGGS'" in said
    limits = text_of(LIMITS)
    passes = [one["passes"][name]["summary"] for name in ("first", "again")]
    over = [[sums[cache]["step"] / sums[AQUA]["step"] - 1 for sums in passes] for cache in (DECODED, FUSED)]
    steps = [sums[cache]["step"] / 1e3 for sums in passes for cache in (AQUA, DECODED)]
    assert f"at 8k are {-100 * over[0][0]:.1f} % below those of the same HIGGS" in limits
    assert f"{-100 * over[0][1]:.1f} % in the second" in limits
    assert "({:.1f} against {:.1f} and {:.1f} against {:.1f} ms a step)".format(*steps) in limits
    assert f"{-100 * over[1][0]:.0f} and {-100 * over[1][1]:.0f} % below those of fused HIGGS" in limits


def test_gpu_time_of_aqua_kv() -> None:
    """An older run's rows have what shapes have now."""
    wanted: dict[str, list[Any]] = {}
    for length in (SHORT, LONG, LONGEST):
        one = shape_of(length)
        busy = [one["device"][cache]["device_microseconds"] / 1e3 for cache in (AQUA, DECODED, FUSED, PLAIN)]
        kernels = [one["device"][cache]["reconstruct_microseconds"] / 1e3 for cache in (AQUA, DECODED)]
        numbers = [*busy, *kernels, one["flop_bound_microseconds"] / 1e3, kernels[0] - kernels[1]]
        wanted[str(length)] = [[number] for number in numbers]
    older = run_of(page("aqua_tokens"), "its file")["rows"]
    rows = {r["scheme"]: r for r in older if r["length"] == LONG and r["path"].endswith("; eager")}
    shows(page("aqua_tokens"), "tokens | AQUA-KV, GPU", wanted)
    then = [rows[cache]["device_microseconds"] / 1e3 for cache in (AQUA, DECODED, PLAIN)]
    now = [shape_of(LONG)["device"][cache]["device_microseconds"] / 1e3 for cache in (AQUA, DECODED)]
    less = [f"{b - a:.1f}" for a, b in zip(then, now, strict=False)]
    told = "{:.2f} and {:.2f} ms at 8192 tokens, {} and {} less than now; FP16 took {:.2f}"
    assert told.format(*then[:2], *less, then[2]) in text_of(page("aqua_tokens"))


# Whole models, limits.


def models() -> list[dict[str, Any]]:
    return list(run_of(MODELS, "all rows")["rows"])


WHOLE = {"InnerQ Small": "innerq-small", "KIVI 2/2, G = 128": "kivi-2-g128", "uniform 4/4": "inner-4"}


def best(operation: str, scheme: str) -> dict[str, Any]:
    rows = [row for row in models() if (row["operation"], row["scheme"]) == (operation, scheme)]
    return max(rows, key=lambda row: float(row.get("tokens_per_second") or 0))


def test_whole_models() -> None:
    plain, alone = best("largest-batch", "fp16"), best("generate", "fp16")
    called = best("largest-batch-call", "fp16")["tokens_per_second"]
    for name, _, batch, _, rate, times, _, own_rate, own_times in cells(MODELS, "32768 tokens a row"):
        if name in WHOLE:
            row, own = (best(operation, WHOLE[name]) for operation in ("largest-batch", "largest-batch-call"))
            assert (int(batch), float(rate)) == (row["batch"], round(row["tokens_per_second"]))
            assert float(times) == round(row["tokens_per_second"] / plain["tokens_per_second"], 2)
            assert own["batch"] == row["batch"] and float(own_rate) == round(own["tokens_per_second"])
            assert float(own_times) == round(own["tokens_per_second"] / called, 2)
    for name, taken, times, _ in cells(MODELS, "one row of 131072 tokens"):
        if name in WHOLE:
            row = best("generate", WHOLE[name])
            assert float(taken) == round(row["microseconds"] / 1000, 1)
            assert float(times) == round(row["tokens_per_second"] / alone["tokens_per_second"], 2)


def test_compiled_steps() -> None:
    rows = {row["scheme"] + row["path"].split("; ")[0][-5:]: row for row in run_of(MODELS, "one run")["rows"]}
    by = {name: next(row for key, row in rows.items() if key.startswith(own)) for name, own in WHOLE.items()}
    by |= {f"FP16, full cache, {name}": rows[f"fp16{name[-5:]}"] for name in ("cuDNN", "flash")}
    best = by["FP16, full cache, cuDNN"]["microseconds"]
    wanted = {
        name: [[row["microseconds"] / 1000], [best / row["microseconds"]], [row["logits_apart"]]]
        for name, row in by.items()
    }
    shows(MODELS, "one row of 131072 tokens, forward compiled", wanted)
    gains = [round(100 * (best / by[name]["microseconds"] - 1)) for name in WHOLE]
    assert f"{min(gains)} to {max(gains)} % with a compiled forward" in text_of(LIMITS)


def test_what_is_projected_beside_what_was_measured() -> None:
    rows = {row["scheme"]: row for row in attention() if (row["batch"], row["length"]) == (32, 32768)}
    names = (
        "uniform 4/4,InnerQ Small,uniform 2/2,KIVI 2/2 G=32,KIVI 2/2 G=128,MixKVQ G=32,HIGGS 2,HIGGS 3,TurboQuant 4/3"
    )
    names += ",KIVI 2/2 before RoPE"
    plain = rows["uniform 4/4"]["microseconds"] * rows["uniform 4/4"]["ratio_to_fp16"]
    wanted = [plain, *(rows[name]["microseconds"] for name in names.split(","))]
    projected, measured = (row[1:] for row in cells(MODELS, "| FP16 | uniform 4/4 | InnerQ Small"))
    assert all(holds(cell, own) for cell, own in zip(measured, wanted, strict=True))
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    benched = [
        schemes.named(name, geometry)
        for name in (
            "inner-4", "innerq-small", "inner-2", "kivi-2", "kivi-2-g128", "mixkvq-16-16", "higgs-2", "higgs-3",
            "turboquant-4-3", "squat-pre-2",
        )
    ]  # fmt: skip
    computed = [row.microseconds for row in jetson.projected(devices.device("h200"), benched, geometry, "m", 32, 32768)]
    assert all(holds(cell, float(own or 0)) for cell, own in zip(projected, computed, strict=True))


def test_quantised_caches_of_transformers() -> None:
    shown = {row[0][:22]: row for row in cells(MODELS, "32768 tokens a row")}
    for bits in (2, 4):
        run = json.loads((BENCHMARKS / f"generation-quanto-{bits}-f1b71ed.json").read_text())
        steps, called = run["rows"]
        plain, most = best("largest-batch", "fp16"), best("largest-batch-call", "fp16")
        cells_of = shown[f"QuantizedCache, {bits} bits"][2:]
        rate = "tokens_per_second"
        wanted = steps["batch"], steps["batch"] / plain["batch"], steps[rate], steps[rate] / plain[rate]
        wanted += steps["peak_bytes"] / 2**30, called[rate], called[rate] / most[rate]
        assert all(holds(cell, value) for cell, value in zip(cells_of, wanted, strict=True)), (cells_of, wanted)


def test_limits() -> None:
    text = text_of(LIMITS)
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
    grids = [row for name, row in many.items() if re.fullmatch("HIGGS .( in bytes)?|TurboQuant.*", name)]
    for name, form in (
        ("fraction_of_copy", "{:.2f} to {:.2f} of memory's speed"),
        ("ratio_to_fp16", "{:.1f} to {:.1f} × FP16"),
    ):
        found = [row[name] for row in grids]
        assert form.format(min(found), max(found)) in text


def test_versions() -> None:
    """The table of machines: what constraints.txt pins, and what the stored runs had."""
    pinned = dict(
        re.findall(r"^(torch|triton|transformers)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    without, on_a_gpu = (row[1:] for row in cells(LIMITS, "| torch"))
    assert without == [pinned[name] for name in ("torch", "triton", "transformers")]
    for path in sorted(BENCHMARKS.glob("*.json")):
        run = json.loads(path.read_text())
        stated = dict(zip(("torch", "triton", "transformers"), on_a_gpu, strict=True))
        assert all(run[name].startswith(told + ".") for name, told in stated.items() if name in run), path.name
