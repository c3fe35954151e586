"""Hold README.md, the site's pages and docstrings to short sentences and the field's words; lab notes are exempt.

    python docs/prose.py            # one line a finding; exit code 1 where there is one

Checked: no sentence of a paragraph, list item or table cell has more than 30 words, and no page has a word of PRIVATE.
Code, links' targets, equations and tables written by scripts do not count. Docstrings of what kvcal and kvcal_artifacts
make public are held to the 30 words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = (ROOT / "kvcal", ROOT / "artifacts" / "kvcal_artifacts")
LONGEST = 30
PRIVATE = {  # what nobody outside of this project writes -> what to write
    r"bits a value": "bits per value",
    r"tokens a second": "tokens per second",
    r"nats a token": "nats per token",
    r"a norm a token|a scale a group|one a layer": "one … per …",
    r"in place of": "instead of",
    r"in the place of": "instead of",
    r"but for": "except for",
    r"no more (than|as)": "no longer, at most",
    r"as it is\b": "unchanged",
    r"of which Python": "that Python",
    r"turned (keys|queries|by)": "rotated",
    r"backbone": "codec",
    r"before, (then|now)": "say when",
    r"worth its": "say what it costs",
    r"is told": "gets",
    r"the latter|the former": "name it",
    r"of one's own": "your own",
    r"made up for": "compensated",
}
GENERATED = re.compile(r"<!-- \w+ by method_pages\.py -->.*?<!-- end -->", flags=re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```", flags=re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^\$\$.*?^\$\$|^:::.*?(?=\n\n|\Z)|<!--.*?-->", flags=re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"(?:[^\n]+(?:\n(?![ \t]*(?:[-*|#]|\d+\.)|\n))?)+")  # lines up to a blank one or the next item
END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\w])|\s*→\s*")  # stations of a journey are sentences of their own
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|et al|cf|approx|Eq|Fig|No)\.", flags=re.IGNORECASE)


def pages() -> list[Path]:
    """Those that are held: written for readers, not kept as a log."""
    site = [
        DOCS / "index.md",
        DOCS / "architecture.md",
        DOCS / "decisions.md",
        DOCS / "benchmarks" / "index.md",
        DOCS / "reference" / "python.md",
        DOCS / "lab" / "index.md",
    ]
    return [
        ROOT / "README.md",
        *site,
        *sorted((DOCS / "guides").glob("*.md")),
        *sorted((DOCS / "methods").glob("*.md")),
    ]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of a page's prose; a paragraph, a list's item and a table's cell begin a sentence."""
    for pattern in (GENERATED, FENCE, BLOCK):
        text = pattern.sub(lambda found: re.sub(r"[^\n]+", "", found[0]), text)
    for item in ITEM.finditer(text):
        line = text.count("\n", 0, item.start()) + 1
        row = item[0].lstrip().startswith("|")
        for part in item[0].strip().strip("|").split("|") if row else [item[0]]:
            for sentence in END.split(ABBREVIATION.sub(r"\1", plain(part))):
                yield line, sentence.strip()


def plain(text: str) -> str:
    """Markdown without links' targets and marks; code counts as one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\$`[^`]*`\$|`[^`]*`", "code", text)
    return re.sub(r"[*_#>]+|^\s*[-|]\s+", " ", text)


def words_in(sentence: str) -> int:
    return len(re.findall(r"[\w'%×.,–-]*\w[\w'%×.,–-]*", sentence))


def findings(page: Path, text: str) -> Iterator[str]:
    name = page.relative_to(ROOT)
    for line, sentence in sentences(text):
        words = words_in(sentence)
        if words > LONGEST:
            yield f"{name}:{line}: {words} words, at most {LONGEST}: {sentence[:70]}…"
        for word, instead in PRIVATE.items():
            if found := re.search(word, sentence, flags=re.IGNORECASE):
                yield f"{name}:{line}: {found[0]!r}: write {instead!r}"


def public(prefix: str, node: ast.AST) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """A module, its classes and functions and their methods, by dotted names; without names that begin with "_"."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield prefix, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            if not child.name.startswith("_"):
                yield from public(f"{prefix}.{child.name}", child)
        elif not isinstance(child, ast.expr):
            yield from public(prefix, child)


def long_docstrings(module: str, source: str) -> Iterator[tuple[str, int, int, str]]:
    """(name, line, words, sentence) of the first sentence that is too long of each docstring that has one."""
    for name, node in public(module, ast.parse(source)):
        text = ast.get_docstring(node, clean=not isinstance(node, ast.Module)) or ""
        text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)  # code is indented
        for part in re.split(r"\n\s*\n", text):
            split = END.split(ABBREVIATION.sub(r"\1", plain(part)))
            if long := [sentence for sentence in split if words_in(sentence) > LONGEST]:
                yield name, node.body[0].lineno, words_in(long[0]), " ".join(long[0].split())
                break


def docstring_findings() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for name, line, words, sentence in long_docstrings(module, path.read_text("utf-8")):
                yield f"{path.relative_to(ROOT)}:{line}: {name}: {words} words, at most {LONGEST}: {sentence[:70]}…"


def main() -> int:
    found = [finding for page in pages() for finding in findings(page, page.read_text("utf-8"))]
    found += docstring_findings()
    for finding in found:
        print(finding, file=sys.stderr)
    print(f"{len(pages())} pages, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
