"""Look at the built site in headless Chromium: each page, wide and narrow, light and dark, and one line a finding.

    nox -s site && python docs/runs/screenshots.py build/site --pictures build/pictures [--axe node_modules/axe-core]

Needs playwright and a Chromium; axe is npm's axe-core. Pages are opened as files, which 404.html is not made for. Every
request beyond the site is refused and reported. Reported too: messages of the console, what is wider than the page,
images that failed, raw markup, links inside the site that lead nowhere, and what axe calls serious. Exit code 1 where
there is a finding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Request, sync_playwright

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
LONGEST = 12_000  # pixels of a picture's height; the rest of a long page is measured, not drawn
IMPACTS = ("serious", "critical")
BROWSERS_DO = "scrollable-region-focusable"  # Chromium and Firefox focus what scrolls without being asked

# What reaches beyond the window, unless an ancestor scrolls by itself or hides what is beyond.
WIDE = """() => {
  const width = document.documentElement.clientWidth, found = [];
  const own = node => { for (let up = node; up && up !== document.body; up = up.parentElement)
    if (getComputedStyle(up).overflowX !== 'visible') return true; return false; };
  for (const node of document.querySelectorAll('.md-content *, .md-header *, .md-tabs *, .md-footer *')) {
    const box = node.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1) && !own(node))
      found.push(`${node.tagName.toLowerCase()} to ${Math.round(box.right)}: ${node.textContent.trim().slice(0, 50)}`);
  }
  if (document.documentElement.scrollWidth > width) found.push(`page scrolls to ${document.documentElement.scrollWidth}`);
  return found.slice(0, 5);
}"""
# Markdown that stands in the text as it was written.
MARKUP = """() => {
  const copy = document.querySelector('.md-content').cloneNode(true);
  copy.querySelectorAll('code, pre, math').forEach(node => node.remove());
  return (copy.textContent.match(/\\$`|`\\$|\\$\\$|\\*\\*|\\]\\(|^\\|.*\\|$|^#+ /gm) || []).slice(0, 3);
}"""
IMAGES = "() => [...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.src)"
LINKS = "() => [...document.querySelectorAll('a[href]')].map(one => one.href).filter(one => one.startsWith('file:'))"
ANCHORS = "() => [...document.querySelectorAll('[id], [name]')].map(one => one.id || one.getAttribute('name'))"


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("site", type=Path)
    options.add_argument("--pictures", type=Path)
    options.add_argument("--axe", type=Path, help="the folder of npm's axe-core")
    options.add_argument("--chromium", default="/usr/bin/chromium")
    options.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    options.add_argument("--only", default="", help="pages whose path has this")
    asked = options.parse_args()
    site = asked.site.resolve()
    pages = [page for page in sorted(site.rglob("*.html")) if asked.only in page.as_posix() and page.name != "404.html"]
    axe = (asked.axe / "axe.min.js").read_text("utf-8") if asked.axe else ""
    found = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=asked.chromium)
        for width in asked.widths:
            for scheme in SCHEMES:
                look = Look(browser, site, width, scheme, asked.pictures, axe)
                for page in pages:
                    found += shown(look.at(page))
                if not asked.only:
                    found += shown(look.search())
                look.close()
        found += shown(dead_links(look.links, look.anchors))
        browser.close()
    print(f"{len(pages)} pages, {len(asked.widths)} widths, {len(SCHEMES)} schemes, {found} findings")
    return 1 if found or not pages else 0


def shown(findings: Iterable[str]) -> int:
    lines = list(findings)
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return len(lines)


class Look:
    """One window: a width and a colour scheme."""

    def __init__(self, browser: Browser, site: Path, width: int, scheme: Any, pictures: Path | None, axe: str) -> None:
        self.site, self.width, self.scheme, self.pictures, self.axe = site, width, scheme, pictures, axe
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            has_touch=width < 600,
            reduced_motion="reduce",
        )
        self.messages: list[str] = []
        self.links: dict[str, set[str]] = {}
        self.anchors: dict[str, set[str]] = {}
        self.page = self.context.new_page()
        self.page.on("console", lambda line: self.messages.append(f"console {line.type}: {line.text[:200]}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {str(error)[:200]}"))
        self.page.on("requestfailed", lambda one: self.messages.append(f"failed: {one.url}"))
        self.page.on("request", self._request)
        self.context.route(lambda url: not url.startswith(("file:", "data:", "blob:")), lambda route: route.abort())

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.site.as_uri(), "data:", "blob:")):
            self.messages.append(f"fetches {request.url}")

    def at(self, path: Path) -> list[str]:
        name = path.relative_to(self.site).as_posix()
        self.messages.clear()
        self.page.goto(path.as_uri())
        self.page.wait_for_load_state("networkidle")
        found = [*self.messages]
        found += [f"wide: {line}" for line in self.page.evaluate(WIDE)]
        found += [f"markup: {line!r}" for line in self.page.evaluate(MARKUP)]
        found += [f"image: {line}" for line in self.page.evaluate(IMAGES)]
        if self.axe:
            found += violations(self.page, self.axe)
        self.links[path.as_uri()] = set(self.page.evaluate(LINKS))
        self.anchors[path.as_uri()] = set(self.page.evaluate(ANCHORS))
        if self.pictures:
            self._picture(name)
        return [f"{name} {self.width} {self.scheme}: {line}" for line in found]

    def _picture(self, name: str) -> None:
        assert self.pictures is not None
        target = self.pictures / f"{self.width}-{self.scheme}" / f"{name.removesuffix('.html').replace('/', '--')}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        height = min(self.page.evaluate("document.documentElement.scrollHeight"), LONGEST)
        clip: Any = {"x": 0, "y": 0, "width": self.width, "height": height}
        self.page.screenshot(path=target, full_page=True, clip=clip)

    def search(self) -> Iterator[str]:
        """The search of the first page, opened as a file, finds a method's page."""
        self.messages.clear()
        self.page.goto((self.site / "index.html").as_uri())
        if self.width < 600:
            self.page.locator("label.md-header__button[for=__search]").click()
        self.page.locator("input.md-search__input").press_sequentially("residual window")
        try:
            self.page.locator(".md-search-result__item a").first.wait_for(timeout=10_000)
        except Exception as error:
            yield f"search {self.width} {self.scheme}: {str(error).splitlines()[0]}"
        if self.pictures:
            self.page.wait_for_timeout(500)
            self.page.screenshot(path=self.pictures / f"search-{self.width}-{self.scheme}.png")
        yield from (f"search {self.width} {self.scheme}: {line}" for line in self.messages)

    def close(self) -> None:
        self.context.close()


def violations(page: Page, axe: str) -> Iterator[str]:
    page.evaluate(axe)
    for one in page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations"):
        if one["impact"] in IMPACTS and one["id"] != BROWSERS_DO:
            nodes = one["nodes"]
            yield f"axe {one['id']} ({one['impact']}, {len(nodes)}): {nodes[0]['html'][:120]!r}"


def dead_links(links: dict[str, set[str]], anchors: dict[str, set[str]]) -> Iterator[str]:
    """Links between pages whose file or heading is not there."""
    for page, targets in links.items():
        for target in sorted(targets):
            file, _, heading = target.partition("#")
            if not Path(file.removeprefix("file://")).exists():
                yield f"{page}: {target}: no such file"
            elif heading and file in anchors and heading not in anchors[file]:
                yield f"{page}: {target}: no such heading"


if __name__ == "__main__":
    sys.exit(main())
