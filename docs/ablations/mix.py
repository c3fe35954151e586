"""One calibration text out of several: so many characters from the start of each, interleaved.

    python docs/ablations/mix.py OUTPUT.txt FILE:CHARACTERS [FILE:CHARACTERS ...]

Files are those that `--calibration` takes (.txt, .raw, .jsonl, .parquet, .xz). A window of the result holds one or two
sources, and every stretch of it holds all in proportion, so that training and held-out windows come from all of them.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from kvcal.text.documents import open_documents
from kvcal.text.sources import resolve_text

PIECE = 16_384  # characters: about one window of 4096 tokens


def beginning(name: str, characters: int) -> str:
    documents, _ = open_documents(resolve_text(name))
    parts: list[str] = []
    held = 0
    for part in chain.from_iterable(chain(document, ["\n\n"]) for document in documents):
        parts.append(part)
        held += len(part)
        if held >= characters:
            break
    return "".join(parts)[:characters]


def interleaved(texts: list[str]) -> str:
    """Pieces of all texts, each spread evenly over the whole."""
    placed = []
    for order, text in enumerate(texts):
        count = max(1, len(text) // PIECE)
        size = -(-len(text) // count)
        placed += [((i + 0.5) / count, order, text[i * size : (i + 1) * size]) for i in range(count)]
    return "\n\n".join(text for _, _, text in sorted(placed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("sources", nargs="+", metavar="FILE:CHARACTERS")
    args = parser.parse_args()
    texts = []
    for name, _, characters in (item.rpartition(":") for item in args.sources):
        if not name or not characters.isdigit():
            parser.error("a source reads FILE:CHARACTERS")
        texts.append(beginning(name, int(characters)))
        short = "" if len(texts[-1]) == int(characters) else f", all there are ({int(characters):,} asked for)"
        print(f"{name}: {len(texts[-1]):,} characters{short}")
    args.output.write_text(interleaved(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
