"""Hooks of the documentation site (mkdocs.yml): links to sources, and equations.

Pages link to files of the repository that the site does not hold: sources, tests, scripts. Those files are copied to
`source/` as text, so that the links work without a network. `` $`…`$ `` and blocks of `$$` become MathML, which
browsers draw by themselves.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TOKEN = re.compile(
    r"(?P<fence>^ *```.*?^ *```)|^\$\$\n(?P<block>.*?)\n\$\$$|\$`(?P<inline>[^`\n]+)`\$|(?P<code>`[^`\n]*`)"
    r"|\]\((?P<target>[^)\s]+)\)",
    flags=re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"(<pre.*?</pre>)|(?<=\d) (?=[%±])|(?<=±) (?=\d)", flags=re.DOTALL)
OPTION = re.compile(r"--[\w-]+")
CODE = re.compile(r'<code>[^<]*</code>|<div class="language-bash.*?</pre>', flags=re.DOTALL)
LOGS = ("ablations/", "benchmarks/", "lab/", "runs/")  # found in a search below the pages for readers
SHIM = "https://unpkg.com/iframe-worker/shim"  # search without a server; ours is a copy of 1.0.4


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """The page with links to `source/` and MathML; what stands in code stays as it is."""

    def changed(token: re.Match[str]) -> str:
        if token["block"]:
            return convert(token["block"], display="block")
        if token["inline"]:
            return f"<span>{convert(token['inline'])}</span>"  # at a line's start Markdown takes <math> for a block
        return f"]({_target(token['target'], page, config, files)})" if token["target"] else token[0]

    if page.file.src_uri.startswith(LOGS) and page.file.src_uri != "benchmarks/index.md":
        page.meta.setdefault("search", {"boost": 0.001})
    return TOKEN.sub(changed, markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Options, and a figure with its error or %, in one piece: a browser would break a line within them."""
    html = FIGURE.sub(lambda found: found[1] or "\u00a0", html)
    return CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Scripts of the theme from this site, and its search with a name for screen readers."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return output.replace(SHIM, posixpath.relpath("assets/iframe-worker/shim.js", posixpath.dirname(page.url) or "."))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The page of what is not there, likewise."""
    return output.replace(SHIM, "/assets/iframe-worker/shim.js")


def _target(target: str, page: Page, config: Any, files: Files) -> str:
    """Where a link leads on the site: itself, if the site holds what it names, else a copy under source/."""
    name = target.partition("#")[0]
    if not name or re.match(r"[a-z]+:", target):
        return target
    folder = posixpath.dirname(page.file.src_uri)
    inside = posixpath.normpath(posixpath.join(folder, name))
    path = Path(config.docs_dir) / inside
    own = files.get_file_from_path(inside)
    if (own and own.inclusion.is_included()) or not path.exists():
        return target  # mkdocs checks it; what exclude_docs names is not on the site
    if path.is_dir():
        path = path / "__init__.py"
    copied = f"source/{path.resolve().relative_to(ROOT).as_posix()}.txt"
    if files.get_file_from_path(copied) is None:
        files.append(File.generated(config, copied, abs_src_path=os.fspath(path.resolve())))
    return posixpath.relpath(copied, folder or ".")
