"""`kvcal report`: one page that asks the network for nothing, whatever a file of a stranger holds."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvcal.report.colours import colour, shades
from kvcal.report.svg import Axis, Chart, Interval, Series, intervals, number
from kvcal_artifacts import load_bundle
from tests.support.models_fixture import kvcal
from tests.support.pages import ROOT

POSITION = {"first": 0, "last": 127, "kl": 0.01, "kl_se": None, "same_top": 1.0}
PAIR = {"score": 0.5, "full": 0.75, "difference": -0.25, "low": -0.5, "high": 0.0, "n": 4, "mcnemar": None}


def row(name: str, bits: float | None, kl: float, **more: Any) -> dict[str, Any]:
    sizes = {"cache_bytes": 1000, "window_bytes": 500, "resident_bytes": 0, "bytes_at_16_bit": 8192}
    return {"name": name, "bits_per_value": bits, "kl": kl, "perplexity": 12.5, **sizes, **more}


def speed(**other: Any) -> dict[str, Any]:
    """A row of `kvcal bench --json`."""
    words = {"operation": "attention", "scheme": "kivi-2", "model": "big", "device": "H100", "projected": False}
    numbers = {"batch": 1, "length": 4096, "microseconds": 12.34, "fraction_of_copy": 0.87, "ratio_to_fp16": 2.5}
    return words | numbers | other


def result(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "text": "t", "windows": 2, "length": 64, "rows": [row("full", 16.0, 0.0), *rows], **more}


class Page(HTMLParser):
    """Elements by name, with what they hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def made(tmp_path: Path, *results: dict[str, Any]) -> Page:
    files = []
    for place, one in enumerate(results):
        files.append(tmp_path / f"{place}.json")
        files[-1].write_text(json.dumps(one))
    done = kvcal("report", *files, "--output", tmp_path / "report.html", "--json")
    assert done.code == 0, done.err
    page = Page((tmp_path / "report.html").read_text())
    assert page.open == []
    return page


def test_a_page_has_every_section(tmp_path: Path) -> None:
    layer = {"key_head_errors": [0.1, 0.2], "value_head_errors": [0.3, 0.4]}
    needles = {"needle@64/0": 1.0, "needle@64/1": 0.5}
    rows = [
        row("a", 2.0, 0.1, positions=[POSITION], tasks={"gsm8k": PAIR}, needles=needles),
        row("b", 3.0, 0.2, positions=[POSITION]),
    ]
    times = [
        speed(),
        speed(fraction_of_copy=None, ratio_to_fp16=None, projected=True),
        speed(scheme="none", microseconds=None),
    ]
    page = made(tmp_path, result(*rows, layers={"a": [layer, {}, layer]}), {"model": "other", "rows": times})
    headings = "".join(page.words)
    for title in (
        "Figures", "Quality against bits", "KL by position", "Error by layer and head", "Needle map", "Tasks",
        "Memory against length", "Speed", "87%", "H100, projected",
    ):  # fmt: skip
        assert title in headings
    assert "none" not in page.words
    assert [tag for tag, _ in page.tags].count("svg") == 4
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg")


def test_one_question_is_a_dot_without_an_interval(tmp_path: Path) -> None:
    page = made(tmp_path, result(row("a", 2.0, 0.1, tasks={"gsm8k": PAIR | {"low": None, "high": None, "n": 1}})))
    tips = [word for word in page.words if word.startswith("gsm8k, a: ")]
    assert tips == ["gsm8k, a: -0.2500"]
    assert page.words.count("–") >= 2
    (tmp_path / "half.json").write_text(json.dumps(result(row("a", 2.0, 0.1, tasks={"t": PAIR | {"low": None}}))))
    half = kvcal("report", tmp_path / "half.json", "--output", tmp_path / "half.html")
    assert (half.code != 0, "an interval with one end" in half.err) == (True, True)


def test_it_asks_the_network_for_nothing(tmp_path: Path) -> None:
    page = made(tmp_path, result(row("a", 2.0, 0.1)))
    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(name in ("src", "href") for _, attributes in page.tags for name in attributes)
    assert not re.search(r"url\(|@import|https?:", (tmp_path / "report.html").read_text())
    policy = next(one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_names_of_strangers_stay_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\"'&\x1b[31m"
    rows = [row(name, 2.0, 0.1, positions=[POSITION], tasks={name: PAIR})]
    page = made(
        tmp_path,
        result(*rows, layers={name: [{"key_head_errors": [0.1], "value_head_errors": [0.1]}]}) | {"text": name},
    )
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in "".join(page.words)
    assert "\x1b" not in (tmp_path / "report.html").read_text()


def test_files_of_other_texts_do_not_compare(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result(row("a", 2.0, 0.1))))
    (tmp_path / "b.json").write_text(json.dumps(result(row("b", 2.0, 0.1)) | {"text": "other"}))
    done = kvcal("report", tmp_path / "a.json", tmp_path / "b.json", "--output", tmp_path / "x.html")
    assert (done.code, "text is 'other', of the files before it 't'" in done.err) == (2, True)
    assert not (tmp_path / "x.html").exists()


def test_tasks_of_several_files_are_on_one_page(tmp_path: Path) -> None:
    layers = {"a": [{"key_head_errors": [0.1, 0.2], "value_head_errors": [0.3, 0.4]}]}
    task = {"tasks": {"gsm8k": PAIR | {"packed": 0.85}}, "needles": {"needle@64/0": 1.0}}
    more = {"tasks": {"humaneval": PAIR}, "needles": {"needle@128/0": 0.5}}
    page = made(
        tmp_path, result(row("a", 2.0, 0.1, **task), layers=layers), result(row("a", 2.0, 0.1, **more), layers=layers)
    )
    assert {"gsm8k", "humaneval", "85.0 %", "64", "128"} <= set(page.words)
    assert page.words.count("a: keys") == 1


def test_of_another_text_only_tasks_are_taken(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(result(row("a", 2.0, 0.1))))
    files[1].write_text(json.dumps(result(row("a", 2.0, 0.7, tasks={"gsm8k": PAIR})) | {"length": 32}))
    done = kvcal("report", *files, "--output", tmp_path / "x.html")
    assert done.code == 0, done.err
    assert "b.json: length is 32, of the files before it 64: only its tasks are shown" in done.err + done.out
    words = Page((tmp_path / "x.html").read_text()).words
    assert ("gsm8k" in words, "0.10000" in words, "0.70000" in words) == (True, True, False)


@pytest.mark.parametrize("name", ["step", "dtype", "windows", "revision"])
def test_figures_of_other_settings_do_not_compare(tmp_path: Path, name: str) -> None:
    settings = {"step": 32, "dtype": "bfloat16", "windows": 2, "revision": "sha256:a"}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(result(row("a", 2.0, 0.1)) | settings))
    files[1].write_text(json.dumps(result(row("b", 2.0, 0.1)) | settings | {name: "x" if name != "windows" else 3}))
    done = kvcal("report", *files, "--output", tmp_path / "x.html")
    assert (done.code, f"b.json: {name} is " in done.err) == (2, True), done.err


def test_a_bundle_of_another_model_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "x.kvcal.safetensors"
    assert kvcal("preset", "kivi-2", "--model", "tiny", "--output", bundle).code == 0
    file = tmp_path / "a.json"
    file.write_text(json.dumps(result(row("a", 2.0, 0.1)) | {"revision": "sha256:0"}))
    done = kvcal("report", file, bundle, "--output", tmp_path / "x.html")
    assert (done.code, "was made for revision" in done.err) == (2, True)


@pytest.fixture(scope="module")
def preset_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "small.kvcal.safetensors"
    assert kvcal("preset", "kivi-2", "--model", "tiny", "--output", path).code == 0
    return path


def page_of(bundle: Path) -> Page:
    output = bundle.with_suffix(".html")
    done = kvcal("report", bundle, "--output", output)
    assert done.code == 0, done.err
    page = Page(output.read_text())
    assert page.open == []
    return page


def test_a_page_shows_what_a_bundles_file_holds(preset_bundle: Path) -> None:
    """Of one without errors by head, too. The cache has 992 packed tokens of 1,024, in 3 bits a value."""
    page = page_of(preset_bundle)
    words = "\n".join(page.words)
    for part in (
        "KV-cache compression of tiny", "Bundle small", "made for: tiny", "method: kivi-2", "sink 0, recent 32, block 32",
        "frame: post_rope", f"size: {preset_bundle.stat().st_size:,} B", "resident: 0 B", "0–7", "3.000", "uniform(bits=2, ",
        "At 131,072 tokens 101 MB instead of 537 MB.", "tokens 1,024, size of one sequence 893 kB",
    ):  # fmt: skip
        assert part in words, part
    assert not {"Explained variance", "Sensitivity"} & set(page.words)


def test_a_page_shows_what_a_bundle_records_of_its_search_and_fit(preset_bundle: Path, tmp_path: Path) -> None:
    """What is recorded as something else is left out, and text of strangers stays text."""
    bad, found = "<script>alert(1)</script>\x1b[31m", load_bundle(preset_bundle)
    layers = [{}, {"key_explained_variance": 0.25, "value_explained_variance": "x"}, 3, None]
    costs = {"0:keys": {"higgs-2": 0.5, bad: 0.125, "none": "x"}, bad: {"higgs-2": 0.25}, "1:keys": 3, "2:keys": {},
             "10:keys": {"kivi-2": 1}, "9:keys": {"kivi-2": 1}}  # fmt: skip
    scheme = replace(found.scheme, layers=(None, *found.scheme.layers[1:]), skipped={0: bad})
    model = {"name": bad, "hub_id": 3}
    other = replace(
        found,
        scheme=scheme,
        metrics={"layers": layers, "holdout_kl": 0.015, "sensitivity": costs},
        provenance={"model": model, "method": bad, "settings": {bad: bad}},
    )
    path = tmp_path / "other.kvcal.safetensors"
    other.write(path)
    page = page_of(path)
    cells = [word for word in page.words if word.strip()]
    start = cells.index("Explained variance")
    assert cells[start + 2 : start + 8] == ["layer", "keys", "values", "1", "0.25", "–"]
    start = cells.index("Sensitivity")
    safe = bad.replace("\x1b", "\\x1b")
    columns, dashes = [safe, "higgs-2", "kivi-2"], ["–", "–", "1"]
    rows = [["0:keys", "0.12", "0.5", "–"], ["9:keys", *dashes], ["10:keys", *dashes], [safe, "–", "0.25", "–"]]
    assert cells[start + 2 :] == ["stored", *columns, *itertools.chain(*rows)]
    assert "held-out: held-out KL 0.015" in cells and f"made for: {safe}" in cells and safe in cells
    assert ("left alone" in cells, "1–7" in cells) == (True, True)
    assert "script" not in {tag for tag, _ in page.tags} and "\x1b" not in path.with_suffix(".html").read_text()
    assert "At 131,072 tokens 88.2 MB instead of 470 MB." in "".join(cells)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"tasks": {"gsm8k": PAIR | {"score": 0.75}}}, "a has another result of gsm8k than the files before it"),
        ({"sha256": "b" * 64}, "a has sha256 bbbb"),
        ({"bits_per_value": 3.0}, "a has bits_per_value 3.0, in the files before it 2.0"),
    ],
)
def test_one_name_of_two_results_is_refused(tmp_path: Path, other: dict[str, Any], why: str) -> None:
    first = row("a", 2.0, 0.1, tasks={"gsm8k": PAIR}, sha256="a" * 64)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(files, (first, first | other), strict=True):
        path.write_text(json.dumps(result(one)))
    done = kvcal("report", *files, "--output", tmp_path / "x.html")
    assert (done.code, why in done.err) == (2, True), done.err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is no JSON, as of line 1, column 1"),
        ("[]", "it must be a table, is a list"),
        ("{}", "it has no rows"),
        ('{"rows": []}', "its list of rows is empty"),
        ('{"rows": 3}', "its rows must be a list, is a whole number"),
        ('{"rows": {"a": {}}}', "its rows must be a list, is a table"),
        ('{"rows": [[]]}', "row 1 must be a table, is a list"),
        ('{"rows": [{"name": "a"}]}', "row 1: it has no kl"),
        (result(row("a", 2.0, 0.1) | {"kl": "x"}), "row 2: kl: 'x' where a number belongs"),
        (result(row("a", 2.0, 0.1) | {"kl": None}), "row 2: kl: nothing where a number belongs"),
        (result(row("a", 2.0, 0.1) | {"kl": True}), "row 2: kl: true or false where a number belongs"),
        (result(row("a", 2.0, 0.1) | {"name": 3}), "row 2: name: 3 where text belongs"),
        (result(row("a", 2.0, 0.1, positions=[{}])), "row 2: positions: it has no kl_se"),
        (result(row("a", 2.0, 0.1, positions={})), "row 2: positions: it must be a list, is a table"),
        (result(row("a", 2.0, 0.1, tasks={"t": {}})), "row 2: task t: it has no low"),
        (result(row("a", 2.0, 0.1, tasks={"t": 3})), "row 2: task t: it must be a table, is a whole number"),
        (result(row("a", 2.0, 0.1, needles={"needle@x/0": 1})), "row 2: needles: 'needle@x/0' where needle@LENGTH/DEPTH"),
        (result(row("a", 2.0, 0.1, needles={"needle@4/x": 1})), "row 2: needles: 'needle@4/x' where needle@LENGTH/DEPTH"),
        (result(row("a", 2.0, 0.1), layers=[]), "layers must be a table, is a list"),
        (result(row("a", 2.0, 0.1), settings=3), "settings must be a table, is a whole number"),
        (result(row("a", float("nan"), 0.1)), "row 2: bits_per_value: nan where a number belongs"),
        ({"rows": [speed(length="x")]}, "row 1: length: 'x' where a number belongs"),
        ({"rows": [speed(projected=3)]}, "row 1: projected: 3 where true or false belongs"),
        ({"rows": [{"operation": "attention"}]}, "row 1: it has no microseconds"),
        ("[" * 100_000, "it has too many lists and tables within each other"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_one_line(tmp_path: Path, content: Any, why: str) -> None:
    """It says what the file is not, in no words of Python's."""
    (tmp_path / "a.json").write_text(content if isinstance(content, str) else json.dumps(content))
    done = kvcal("report", tmp_path / "a.json", "--output", tmp_path / "x.html")
    assert done.code == 1
    opening = "a.json: is no result of `kvcal eval --json`, `kvcal compare` or `kvcal bench --json` "
    assert f"{opening}({why}" in done.complaint
    assert "Error" not in done.complaint


def test_recorded_files_of_other_scripts_are_refused_plainly(tmp_path: Path) -> None:
    for path, why in (
        ("results/smollm2-135m.json", "its rows must be a list, is a table"),
        ("tasks-3bb539e3.json", "it has no rows"),
    ):
        done = kvcal("report", ROOT / "docs" / "benchmarks" / path, "--output", tmp_path / "x.html")
        assert (done.code, f"({why}); give such a file, or a bundle" in done.complaint) == (1, True), done.err


def test_a_page_is_an_html_file(tmp_path: Path) -> None:
    done = kvcal("report", tmp_path / "a.json", "--output", tmp_path / "x.pdf")
    assert (done.code, "must end in .html" in done.err) == (2, True)
    missing = kvcal("report", tmp_path / "a.json", "--output", tmp_path / "x.html")
    assert (missing.code, "a.json" in missing.err) == (2, True)


def test_axes_hold_what_is_drawn() -> None:
    axis = Axis.over("x", [0.001, 0.1], 0, 100, log=True)
    assert 0 < axis(0.001) < axis(0.01) < axis(0.1) < 100
    assert axis(1e-9) == 0
    assert 0.01 in axis.ticks
    plain = Axis.over("x", [2.0, 2.0], 100, 0)
    assert plain(2.0) == 50
    assert all(plain.low <= tick <= plain.high for tick in plain.ticks)
    chart = Chart.of("t", ("x", "y"), [Series("a", [(0.0, 1.0, None), (1.0, 1.0, 0.1)])], (True, False))
    assert str(chart).count("<circle") == 1  # zero has no logarithm
    one = Series("a", [(0.0, 1.0, None)])
    rows = [Interval(name, one, -1.0, 0.0, 1.0) for name in ("short", "short", "x" * 50)]
    drawn = intervals("t", "d", rows)
    assert (drawn.count("<circle"), drawn.count(">short<")) == (3, 1)
    assert f">{'x' * 16}…{'x' * 16}<" in drawn
    assert [number(x) for x in (0.001, 4096, 10_000.0, 2.5)] == ["0.001", "4,096", "10,000", "2.5"]


@pytest.mark.parametrize("size", [0.0003, 0.0425, 0.31, 0.1, 7.0, 1e-14, 1e90])
def test_an_axis_of_one_point_has_numbers(size: float) -> None:
    axis = Axis.over("y", [size], 300, 0, log=True)
    places = [axis(tick) for tick in axis.ticks]
    assert 2 <= len(places) <= 10
    assert places == sorted(set(places), reverse=True)
    assert min(axis.ticks) < size * 1.2 and max(axis.ticks) > size / 1.2


def test_a_page_of_one_row_has_no_backticks_and_numbers_on_both_axes(tmp_path: Path) -> None:
    page = made(tmp_path, result(row("a", 2.0, 0.0425)), {"rows": [speed()]})
    assert not [word for word in page.words if "`" in word]
    assert {"kvcal compare --wide", "kvcal bench"} <= set(page.words)
    text = (tmp_path / "report.html").read_text()
    chart = text[text.index('aria-label="KL against stored bits"') :].partition("</svg>")[0]
    assert chart.count('text-anchor="end">0.0') >= 2


def test_a_scheme_has_one_colour_in_every_chart(tmp_path: Path) -> None:
    rows = [
        row(name, bits, 0.1, positions=[POSITION]) for name, bits in (("kivi-2", 2.0), ("mine", 3.0), ("other", 3.5))
    ]
    page = made(tmp_path, result(*rows))
    styles = [attributes["style"] for _, attributes in page.tags if "series" in (attributes.get("class") or "").split()]
    charts = len({"quality", "positions", "memory"})
    for name in ("kivi-2", "mine", "other"):
        shade = shades(["full", "kivi-2", "mine", "other"])[name]
        assert styles.count(f"--light:{shade.light};--dark:{shade.dark}") == 2 * charts  # in the chart and its legend
    assert len(set(styles)) == 5  # full precision's and that of the front too
    assert shades(["kivi-2"])["kivi-2"].light == colour("kivi-2")


@pytest.mark.parametrize("kl", [1e308, 1.7e308, -1e308, 1e-320])
def test_a_number_that_no_axis_can_hold_is_one_line(kl: float, tmp_path: Path) -> None:
    """It names the file. Numbers near the limit are drawn."""
    rows = [{"name": "full", "kl": 0.0, "bits_per_value": 16}, {"name": "a", "kl": kl, "bits_per_value": 2.0}]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    done = kvcal("report", tmp_path / "a.json", "--output", tmp_path / "report.html")
    assert done.code == 1, done.err
    assert "a.json: is no result of `kvcal eval --json`" in done.complaint
    assert f"(row 2: kl: {kl} is of no size that a chart can show, 0 or from 1e-100 to 1e+100" in done.complaint
    assert not (tmp_path / "report.html").exists()
    other = [{"name": name, "kl": size, "bits_per_value": 2.0} for name, size in (("b", 1e100), ("c", 1e-100))]
    made(tmp_path, {"rows": [rows[0], *other]})
