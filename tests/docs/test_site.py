"""The documentation site: its commands run, its tables are those of the recorded rows, its prose keeps the rules.

That it builds, strictly, `nox -s docs` says.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvcal.report.quantities import significant
from tests.docs.test_figures import BENCHMARKS, shows
from tests.support.fork_server import forking
from tests.support.pages import NEEDS, ROOT, asked, bash_blocks, run_page, sources

DOCS = ROOT / "docs"
GUIDES = ["engineer", "researcher", "recommend", "pipeline", "server", "vllm"]
QUICK = ["index", *(f"guides/{name}" for name in GUIDES), "reference/python"]
METHODS = sorted(f"methods/{page.stem}" for page in (DOCS / "methods").glob("*.md") if page.stem != "index")
HELD = ["benchmarks/index"]  # `kvcal bench` and doctor: by tests/kvcal/bench
BOTH = ("bash", "python")
WRITES = {  # what a walk ends with
    "guides/engineer": ["tiny-kivi-4.kvcal.safetensors"],
    "guides/researcher": ["six.json", "six.png", "aqua-kv.kvcal.safetensors", "kivi-2.json"],
    "guides/server": ["tiny-kivi-4.kvcal.safetensors", "serve.py"],
    "guides/pipeline": ["bundles/tiny-aqua.kvcal.safetensors", "gates.xml", "gates.md", "card/README.md"],
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a `kvcal` and a `python` that have imported everything already."""
    folder = tmp_path_factory.mktemp("site")
    with forking(folder, sources(folder), ("kvcal", "python")) as tools:
        yield tools


@pytest.mark.parametrize("page", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS)])
def test_commands_of_a_page_run(page: str, tmp_path: Path, tools: Path) -> None:
    """In order, in one folder, on the model that comes with kvcal."""
    done = run_page(DOCS / f"{page}.md", tmp_path, seconds=600, languages=BOTH, tools=tools)
    assert done and all(ran.out or ran.err for ran in done)
    for name in WRITES.get(page, []):
        assert (tmp_path / name).stat().st_size, name
    if page == "guides/researcher":
        rows = json.loads((tmp_path / "six.json").read_text())["rows"]
        assert len({row["name"] for row in rows} - {"fp32"}) >= 6, rows


def test_the_server_of_the_guide_answers(tmp_path: Path) -> None:
    """The page's own commands: bundle and server are written, started in one shell and asked from another."""
    long, short = asked(DOCS / "guides" / "server.md", tmp_path, ["100", "20"])
    assert long["text"] and long["cache_bytes"] > 0 and long["unpacked"] is None
    assert "nothing is packed yet" in short["unpacked"]


def test_the_researchers_table_is_that_of_its_rows() -> None:
    """The guide's table, of the rows that its picture was drawn from; of the six schemes that its commands name."""
    page = (DOCS / "guides" / "researcher.md").read_text("utf-8")
    rows = {row["name"]: row for row in json.loads((DOCS / "assets" / "six-on-tiny.json").read_text())["rows"]}
    table = page.partition("```\n                bits/")[2].partition("*:")[0]
    lines = {words[0]: words for line in table.splitlines() if len(words := line.strip("* ").split()) > 6}
    schemes = {"higgs-2", "turboquant-2", "aqua-kv", "innerq", "squat", "kivi-2"}
    assert lines.keys() == schemes | {"fp16", "name"} and schemes == rows.keys()
    for name in schemes:
        row, words = rows[name], lines[name]
        wanted = [f"{row['bits_per_value']:.2f}", significant(row["kl"])]
        wanted += [significant(100 * row["same_top"]), "%", f"{row['perplexity']:.2f}"]
        assert set(wanted) <= set(words), (name, wanted, words)


def test_every_page_with_commands_is_run() -> None:
    pages = [
        DOCS / "index.md",
        *(
            path
            for folder in ("guides", "methods", "benchmarks", "reference")
            for path in [*(DOCS / folder).glob("*.md")]
        ),
    ]
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in pages if bash_blocks(path, languages=BOTH)}
    lab = {
        path.relative_to(DOCS).with_suffix("").as_posix() for path in BENCHMARKS.glob("*.md") if path.stem != "index"
    }
    assert written - lab == {*QUICK, *METHODS, *HELD}


def test_walks_begin_with_the_install_of_the_readme() -> None:
    """An engineer's, a researcher's and a pipeline's."""
    install = "pip install -c constraints.txt '.[all]'"
    assert f"{install} && kvcal demo" in (ROOT / "README.md").read_text("utf-8")
    for name in ("engineer", "researcher", "pipeline"):
        text = (DOCS / "guides" / f"{name}.md").read_text("utf-8")
        assert text.index(install) < text.index(
            "kvcal plan" if name == "engineer" else "kvcal compare --" if name == "researcher" else "kvcal build"
        )


def test_a_block_that_needs_more_says_what(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f'# A\n\n```bash {NEEDS}a GPU"\nfalse\n```\n\n```bash\ntrue\n```\n\n```python\nprint(3)\n```\n')
    assert [ran.out for ran in run_page(page, tmp_path, languages=BOTH)] == ["", "3\n"]
    assert [block.code for block in bash_blocks(page)] == ["true\n"]


@pytest.mark.parametrize("script", ["ablations/method_pages.py", "figures.py"])
def test_tables_and_pictures_are_those_of_the_rows(script: str) -> None:
    done = subprocess.run([sys.executable, str(DOCS / script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_benchmarks_are_those_of_the_run() -> None:
    rows = json.loads((BENCHMARKS / "generation-2708de7.json").read_text())["rows"]
    page = BENCHMARKS / "index.md"
    many, one = {}, {}
    for scheme in ("fp16", "inner-4", "innerq-small", "kivi-2-g128"):
        graph, call, single = (
            best(rows, operation, scheme) for operation in ("largest-batch", "largest-batch-call", "generate")
        )
        name = "FP16, at its best" if scheme == "fp16" else f"`{scheme}`"
        bits = graph["stored_bits"] or 16
        of_one, of_many, of_call = (
            row["tokens_per_second"] / best(rows, row["operation"], "fp16")["tokens_per_second"]
            for row in (single, graph, call)
        )
        speeds = [[graph["tokens_per_second"]], [of_many], [call["tokens_per_second"]], [of_call]]
        many[name] = [[bits], [graph["batch"]], *speeds]
        one[name] = [[bits], [single["peak_bytes"] / 1e9], [single["tokens_per_second"]], [of_one]]
    shows(page, "scheme", many)
    shows(page, "scheme of one row", one)


def best(rows: list[dict[str, object]], operation: str, scheme: str) -> dict[str, object]:
    """The fastest path of a scheme."""
    found = [row for row in rows if (row["operation"], row["scheme"]) == (operation, scheme)]
    return max(found, key=lambda row: row["tokens_per_second"] or 0)  # type: ignore[arg-type, return-value]


GUARD = {  # first cell of a row of README's or the methods' page -> scheme of the guard's rows
    "kivi-4": "kivi-4",
    "innerq-small": "innerq-small",
    "fit-predictors": "aqua-kv (default)",
    "transform": "aqua-kv on transform-2, all layers",
}


@pytest.mark.parametrize("page", ["README.md", "docs/methods/index.md"])
def test_which_scheme_is_of_the_measured_rows(page: str) -> None:
    """KL to its digits, bits, and how many times smaller."""
    models = [json.loads((DOCS / "ablations" / "guard" / name).read_text())["rows"] for name in GUARD_FILES]
    checked = 0
    for line in (ROOT / page).read_text("utf-8").splitlines():
        found = re.search(r"\| (\d\.\d) \| (\d\.\d+), (\d\.\d+) \| (\d\.\d) \|", line)
        scheme = next((own for word, own in GUARD.items() if word in line), None)
        if found is None or scheme is None:
            continue
        rows = [next(row for row in rows if row["name"] == scheme) for rows in models]
        assert [found[2], found[3]] == [f"{row['kl']:.3f}" for row in rows], line
        assert abs(float(found[1]) - rows[0]["bits"]) < 0.1 and abs(float(found[1]) - rows[1]["bits"]) < 0.1, line
        assert 16 / rows[1]["bits"] - 0.05 <= float(found[4]) <= 16 / rows[0]["bits"] + 0.05, line
        checked += 1
    assert checked >= 3


GUARD_FILES = ("smollm2-135m.json", "qwen2.5-coder-0.5b.json")
RESULTS = {  # bits and scheme of a row of README's table of results -> label of results.toml
    ("1.9", "AQUA-KV over the transform, bits by layer"): "2 bits.bits by KL under predictors, 2.0 bits or fewer",
    ("2.0", "AQUA-KV over the transform"): "2 bits.AQUA-KV x transform, 2.0 bits or fewer",
    ("2.2", "AQUA-KV over the transform, bits by layer"): "2.25 bits.bits by KL under predictors",
    ("2.2", "AQUA-KV by default"): "2.25 bits.AQUA-KV",
    ("3.0", "KIVI of 2 bits with sinks, no text needed"): "KIVI 2, sink (InnerQ)",
    ("3.0", "AQUA-KV over the transform"): "3 bits.AQUA-KV x transform",
    ("4.0", "bits per layer (KVTuner)"): "4 bits.KVTuner-like",
    ("4.1", "AQUA-KV over HIGGS of 4 bits"): "4 bits.AQUA-KV",
}


def test_results_of_the_readme_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL and its error to the digits that stand there."""
    monkeypatch.syspath_prepend(str(DOCS / "ablations"))
    verdicts = importlib.import_module("verdicts")
    models = [
        verdicts.rows_by_label(verdicts.results_recipe(), json.loads(path.read_text("utf-8")))
        for path in verdicts.RESULTS.values()
    ]
    part = (ROOT / "README.md").read_text("utf-8").partition("## Results on public models")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "±" in line[:120]]
    shown = {(row[0], row[1]): row[2:] for row in cells if len(row) == 4}
    assert shown.keys() == RESULTS.keys()
    for key, label in RESULTS.items():
        for text, rows in zip(shown[key], models, strict=True):
            row = rows[label]
            for figure, name in zip(text.split(" ± "), ("kl", "kl_se"), strict=True):
                assert figure == f"{row[name]:.{len(figure.partition('.')[2])}f}", (label, name)
            assert abs(row["bits_per_value"] - float(key[0])) < 0.06, label


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("prose")


def test_prose_keeps_the_rules(prose: ModuleType) -> None:
    found = [line for page in prose.pages() for line in prose.findings(page, page.read_text("utf-8"))]
    found += prose.docstring_findings()
    assert not found, "\n".join(found)


def test_long_sentences_of_docstrings_are_seen(prose: ModuleType) -> None:
    long = "word " * 31
    source = "\n".join(
        (
            f'"""Short.\n\n    {long}\n"""',  # code is indented
            f"def f():\n    'One. {long}'\n    def _inner():\n        '{long}'",
            f"class A:\n    'Short.'\n    def method(self):\n        'Short.\\n\\n{long}'",
            f"def _private():\n    '{long}'",
        )
    )
    found = [(name, words) for name, _, words, _ in prose.long_docstrings("m", source)]
    assert found == [("m.f", 31), ("m.A.method", 31)]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("Short. " + "word " * 31 + "end.", "32 words"),
        ("- one\n- " + "word " * 31, ":4: 31 words"),
        ("| a | " + "word " * 31 + "|", "31 words"),
        ("It takes 2 bits a value.", "'bits a value'"),
        ("word " * 15 + "\n" + "word " * 16, "31 words"),
        ("word " * 20 + "e.g. " + "word " * 20, "41 words"),
    ],
)
def test_a_page_that_breaks_a_rule_is_seen(prose: ModuleType, text: str, finding: str) -> None:
    found = list(prose.findings(ROOT / "README.md", f"# Title\n\n{text}\n"))
    assert len(found) == 1 and finding in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "word " * 30,
        "```\n" + "bits a value " * 40 + "\n```",
        "`" + "bits a value " * 40 + "`",
        "word " * 20 + ". " + "Word " * 20,
    ],
)
def test_what_is_no_prose_is_left_alone(prose: ModuleType, text: str) -> None:
    assert not list(prose.findings(ROOT / "README.md", f"# Title\n\n{text}\n"))
