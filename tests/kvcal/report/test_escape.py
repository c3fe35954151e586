"""What a stranger wrote reaches a terminal, Markdown, XML, a shell and Python as text, and nothing else."""

from __future__ import annotations

import ast
import html
import json
import re
import shutil
import subprocess
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from kvcal.bundles.card import make_card
from kvcal.models import hub
from kvcal.pipeline.gates import Check, junit_xml
from kvcal.pipeline.gates import markdown as gates_markdown
from kvcal.report.escape import block, code, link, markdown, python, shell
from kvcal.report.plots import head_errors_png
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import Scheme
from kvcal_artifacts.shown import message, shown
from tests.support.models_fixture import SUFFIX, Done, kvcal
from tests.support.pages import ROOT
from tests.support.schemes import scheme as some_scheme

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\r\n\x7f\u2028"
BAD = [one for one in ESCAPES if unicodedata.category(one) in ("Cc", "Cf", "Zl")]
BIDIRECTIONAL = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def test_every_control_character_is_escaped_and_nothing_printable_is() -> None:
    """Against Unicode's own tables."""
    for number in range(0x110000):
        one = chr(number)
        category = unicodedata.category(one)
        commands = category in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(one) in BIDIRECTIONAL
        if commands:
            assert shown(one).isascii() and shown(one) == one.encode("unicode_escape").decode()
        elif one.isprintable() or one in "\u200c\u200d":
            assert shown(one) == one
    assert shown("a\nb\tc\x1b", keep="\n\t") == "a\nb\tc\\x1b"


@given(st.text())
def test_what_is_shown_stays_as_it_is(text: str) -> None:
    assert shown(shown(text)) == shown(text)
    assert message(message(text)) == message(text)


def test_credentials_are_left_out() -> None:
    line = message(
        "https://anna:se@cret@hub.lab/api?x=1 and http://anna@h, hf_abcdefghijklmnopqrstuvwxyz0123456789 failed"
    )
    assert not any(word in line for word in ("anna", "se@", "cret", "abcdefgh"))
    assert "hub.lab/api?x=1" in line
    assert message("org/name@main, a@b.org") == "org/name@main, a@b.org"
    assert str(KVCalError("x\x1b[2J\nof https://u:p@h/")) == "x\\x1b[2J\\nof https://***@h/"


def test_an_endpoint_with_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://anna:secret@hub.lab:8443/hf")
    assert hub.why_unreachable() == "https://hub.lab:8443/hf cannot be reached"
    assert hub.public("https://hub.lab/x") == "https://hub.lab/x"


def test_only_two_modules_of_the_command_line_print() -> None:
    """Every other would forget to escape. `cli/__init__.py` prints a constant."""
    for path in (ROOT / "kvcal" / "cli").glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [node for node in calls if ast.unparse(node.func) in ("print", "typer.echo", "sys.stdout.write")]
        loose = [ast.unparse(node) for node in prints if "message(" not in ast.unparse(node)]
        constant = {"print('kvcal: interrupted', file=sys.stderr)", "print(error.ctx.get_help())",
                    "typer.echo(f'kvcal {__version__}')"}  # fmt: skip
        if path.name not in ("output.py", "failure.py"):
            assert set(loose) <= constant, f"{path.name} prints {loose}"


# Terminal.


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown") / f"clean{SUFFIX}"
    assert kvcal("preset", "kivi-2", "--config-only", "--output", path).code == 0
    return path


@pytest.fixture(scope="module")
def odd(clean: Path) -> Path:
    """A bundle that holds terminal escapes wherever text may stand; its name does, too."""
    bundle = load_bundle(clean)
    odd = clean.with_name(f"o{ESCAPES.replace(chr(0), '')}d{SUFFIX}")
    rewritten = _poisoned(bundle.provenance)
    text = {"source": f"file:{ESCAPES}", "sha256": ESCAPES, "train_windows": 1, "holdout_windows": 1, "length": 8}
    metrics = {f"loss{ESCAPES}": 0.5, "layers": [{ESCAPES: ESCAPES}]}
    Bundle(bundle.fingerprint, bundle.scheme, rewritten | {"text": text, ESCAPES: 1}, metrics).write(odd)
    return odd


def _poisoned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _poisoned(one) for name, one in value.items()}
    return f"{value}{ESCAPES}" if isinstance(value, str) else value


def harmless(done: Done) -> Done:
    for text in (done.out, done.err):
        assert [one for one in BAD if one in text.replace("\n", "")] == [] or "\n" in BAD
        assert not any(one in text for one in BAD if one != "\n"), ascii(text)
    assert "Traceback" not in done.err
    return done


def test_nothing_that_a_bundle_records_commands_a_terminal(odd: Path, clean: Path, tmp_path: Path) -> None:
    lines = harmless(kvcal("inspect", odd)).out.splitlines()
    assert any(line.strip().startswith("method") and r"kivi-2\x1b]0;owned" in line for line in lines)
    assert json.loads(harmless(kvcal("inspect", odd, "--json")).out)["provenance"]["method"] == f"kivi-2{ESCAPES}"
    assert harmless(kvcal("diff", clean, odd)).code == 7
    assert harmless(kvcal("verify", odd)).code == 0
    assert harmless(kvcal("card", odd)).code == 0
    assert harmless(kvcal("card", odd, "--output", tmp_path / "card.md")).code == 0
    assert harmless(kvcal("reproduce", odd)).code == 1
    harmless(kvcal("verify", odd, "--model", "tiny"))
    harmless(kvcal("combine", odd, odd, "--output", tmp_path / f"x{SUFFIX}", "--json"))
    harmless(kvcal("inspect", tmp_path / f"{ESCAPES}"))
    harmless(kvcal("preset", f"kivi{ESCAPES}"))
    harmless(kvcal("preset", "kivi-2", "--model", f"model{ESCAPES}"))
    harmless(kvcal("compare", "--bundle", odd, "--output", tmp_path / f"none{ESCAPES}" / "x.json"))
    (tmp_path / "r.toml").write_text('"\\u001b[2J" = 1\n')
    harmless(kvcal("build", tmp_path / "r.toml"))


# JUnit and Markdown of gates.


def test_gates_show_names_escaped() -> None:
    checks = [Check(f"<img src=x>|{ESCAPES}`", "canary", False, detail=f"[a](http://x) {ESCAPES}")]
    table = gates_markdown(checks)
    assert "<img" not in table and not any(one in table for one in BAD if one != "\n")
    assert len(table.splitlines()) == 5
    xml = junit_xml(checks).decode()
    assert not any(one in xml for one in BAD if one != "\n")
    [failure] = ElementTree.fromstring(xml).iter("failure")
    assert "<img src=x>" in failure.get("message", "") and r"\x1b[2J" in failure.get("message", "")


def test_a_title_of_dollars_is_no_formula() -> None:
    assert head_errors_png([[0.1]], [[0.1]], f"$\\frac{{x$ {ESCAPES}").startswith(b"\x89PNG")


# The card.

NASTY = [
    "<script>alert(1)</script>", "](http://evil.example) [x", "`; rm -rf ~; `", "$(touch owned)", "```\n# owned\n```", "a|b",
    '"); __import__("os").system("touch owned"); ("', "'; touch owned; '", "\n---\nlicense: mit\n---\n", "https://evil.example",
    "**b** _i_ ~~s~~ $x$ \\(y\\) &amp; www.evil.example", ESCAPES, "a\\", "#!", "-x", "\udc80", "name with spaces",
]  # fmt: skip


def render(text: str) -> str:
    """Of CommonMark what the card's prose uses: backslash escapes and entities."""
    return html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text))


@given(st.one_of(st.text(max_size=30), st.sampled_from(NASTY)))
@example("<b>\\<")
def test_markdown_shows_the_text_and_does_nothing(text: str) -> None:
    found = markdown(text)
    assert render(found) == shown(text)
    assert not re.search(r"[<>\n\r]", found)
    bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", found)
    assert not re.search(r"[`*\[\]~|]|://|(?<![^\W_])_", bare)


@given(st.one_of(st.text(max_size=30), st.sampled_from(NASTY)))
def test_code_and_blocks_end_where_they_should(text: str) -> None:
    span = code(text).replace("\\|", "|")
    ticks = re.match("`+", span)
    assert ticks is not None and span.endswith(ticks[0])
    assert ticks[0] not in re.findall("`+", span[len(ticks[0]) : -len(ticks[0])])
    first, *inside, last = block("bash", [shown(text)]).split("\n")
    assert last == first.removesuffix("bash") and not any(line.strip().startswith(last) for line in inside)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_reads_the_words_back() -> None:
    words = [*NASTY[:-2], "é", "\u2028", "x\x7f", "name with spaces"]
    line = shell(words)
    assert shown(line) == line
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert done.stdout.decode().split("\0")[:-1] == words


@given(st.one_of(st.text(max_size=30), st.sampled_from(NASTY)))
def test_python_reads_the_text_back(text: str) -> None:
    literal = python(text)
    assert ast.literal_eval(literal) == text
    assert "\n" not in literal and shown(literal) == literal


@pytest.mark.parametrize("nasty", NASTY)
def test_a_card_holds_strangers_text_as_text(nasty: str) -> None:
    made = some_scheme(tiny_shape(), "uniform-2")
    provenance = {
        "tool": nasty, "method": nasty, "settings": {nasty: nasty},
        "model": {"name": nasty, "hub_id": nasty, "kind": "hub", "revision": nasty, "random_weights": False},
        "text": {"source": nasty, "sha256": nasty, "train_windows": 1, "holdout_windows": 1, "length": 8},
        "other_text": {"source": nasty}, "versions": {nasty: nasty},
    }  # fmt: skip
    path = Path(nasty.replace("/", "") + SUFFIX)
    bundle = Bundle(Fingerprint(nasty, 1, 1, 32, {}, "0", nasty), made, provenance, {}, path)
    bundle.scheme.skipped[7] = nasty
    row = {
        "name": bundle.name,
        "perplexity": 1.0,
        "kl": 0.1,
        "bits_per_value": 2.0,
        "cache_bytes": 1,
        "sha256": "0" * 64,
    }
    evaluation = {"windows": 1, "length": 8, "step": 1, "dtype": nasty, "text": nasty, "rows": [row]}
    text = make_card(bundle, "0" * 64, repo="org/x", evaluation=evaluation, licence=nasty).text
    empty, front, body = text.split("---\n", 2)
    assert empty == "" and yaml.safe_load(front)["license"] == shown(nasty)
    assert len(re.findall("^---$", text, re.MULTILINE)) == 2
    prose, blocks = apart(body)
    assert len(blocks) == 3
    assert not re.search(r"<(?!/?a\b)\w|<script", prose), prose
    assert not re.search(r"(?<!\\)\]\((?!%|\w)", prose)
    assert sum(line.startswith("#") for line in prose.splitlines()) == 4
    assert [line for line in body.splitlines() if any(one in line for one in BAD)] == []
    program = next(lines for language, lines in blocks if language == "python")
    calls = [node for node in ast.walk(ast.parse("\n".join(program))) if isinstance(node, ast.Call)]
    assert sorted(ast.unparse(node.func) for node in calls) == ["load_bundle", "load_cache", "model.generate"]
    assert bundle.name + SUFFIX in [node.value for node in ast.walk(ast.parse("\n".join(program)))
                                    if isinstance(node, ast.Constant)]  # fmt: skip


def apart(body: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """Prose, and fenced blocks as a reader of CommonMark finds them."""
    prose: list[str] = []
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in body.split("\n"):
        ticks = re.match("`{3,}", line)
        if fence and ticks is not None and line.strip() == ticks[0] and len(ticks[0]) >= len(fence):
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
        elif ticks is not None and "`" not in line[len(ticks[0]) :]:
            fence = ticks[0]
            blocks.append((line[len(fence) :], []))
        else:
            prose.append(line)
    assert not fence
    return "\n".join(prose), blocks


def tiny_shape() -> Any:
    from tests.support.architectures import TINY

    return TINY["llama"](num_hidden_layers=1)


def test_a_plots_name_is_one_address() -> None:
    assert link("a b(1)<c>.errors.png") == "a%20b%281%29%3Cc%3E.errors.png"
    assert link("small-2.5_x+y.errors.png") == "small-2.5_x+y.errors.png"


def test_an_ordinary_card_reads_as_before() -> None:
    """Names of models, texts and presets need no escapes."""
    for text in (
        "HuggingFaceFW/fineweb-edu:sample-10BT:train@0a1b",
        "higgs-2-wide_debiased",
        "llama, 4 layers, 2 × 32, x",
    ):
        assert markdown(text) == text
    assert isinstance(some_scheme(tiny_shape(), "uniform-2"), Scheme)
