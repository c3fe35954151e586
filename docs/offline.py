"""Hold a built site to no network: exit code 1 where a page would fetch something from elsewhere.

python docs/offline.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(https?:[^\"'> ]+)|@import[^;]*https?:|url\([\"']?https?:"
)


def main(site: Path) -> int:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    found = [
        f"{page.relative_to(site)}: {hit[0]}" for page in pages for hit in FETCHED.finditer(page.read_text("utf-8"))
    ]
    for line in found:
        print(line, file=sys.stderr)
    print(f"{len(pages)} files, {len(found)} that fetch from elsewhere")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
