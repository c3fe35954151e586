"""Times of two commits, cell by cell, from what docs/runs/old_and_new.sh wrote.

    python docs/benchmarks/old_and_new.py OUT OLD NEW [--json FILE]

OUT holds folders OLD-1, NEW-1, OLD-2, ... with the JSON files of the benchmarks. A cell is one row of a benchmark:
operation, scheme, batch, length. Its time is the least over a commit's turns; its spread is the largest difference
between two turns (or passes) of one commit, as a fraction of that time. A cell is called slower where new over old is
above 1.02 by more than the spread. Of eager steps, which other work of the host delays, a turn's least one counts.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

KEYS = ("operation", "scheme", "batch", "length", "max_length", "path")
ALLOWED = 1.02  # of the old commit's time, beyond the spread


@dataclass(frozen=True)
class Cell:
    """One measurement of both commits: the least times, new over old, and the spread as a fraction."""

    name: str
    old: float
    new: float
    unit: str
    ratio: float
    spread: float
    slower: bool


def times(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Name, unit and time of every row in a folder's JSON files."""
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            unit = "us" if "microseconds" in row else "ms"
            time = row.get("microseconds", row.get("least_ms", row.get("ms")))
            if time is None:
                continue
            words = [path.stem.split("-")[0]]
            words += [str(row[key])[:24] for key in KEYS if row.get(key) is not None]
            yield " · ".join(words), unit, float(time)


def collected(out: Path, name: str) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    folders = sorted(folder for folder in out.glob(f"{name}-*") if folder.name[len(name) + 1 :].isdigit())
    if not folders:
        raise SystemExit(f"{out}: no folder {name}-1; docs/runs/old_and_new.sh writes it")
    for folder in folders:
        for cell, unit, time in times(folder):
            found[cell, unit].append(time)
    return found


def cells(out: Path, old: str, new: str) -> list[Cell]:
    """Every cell that both commits have, the slowest of the new commit first."""
    before, after = collected(out, old), collected(out, new)
    made = []
    for (name, unit), first in before.items():
        if (name, unit) not in after:
            continue
        second = after[name, unit]
        spread = max((max(some) - min(some)) / min(some) for some in (first, second))
        ratio = min(second) / min(first)
        made.append(Cell(name, min(first), min(second), unit, ratio, spread, ratio > ALLOWED + spread))
    return sorted(made, key=lambda cell: -cell.ratio)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("old")
    options.add_argument("new")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    found = cells(chosen.out, chosen.old, chosen.new)
    for cell in found:
        print(
            f"{cell.ratio:6.3f}  spread {cell.spread:5.3f}  {cell.old:10.2f} {cell.new:10.2f} {cell.unit}  {cell.name}"
            + ("  SLOWER" if cell.slower else "")
        )
    missing = set(collected(chosen.out, chosen.old)) ^ set(collected(chosen.out, chosen.new))
    print(f"{len(found)} cells, {sum(c.slower for c in found)} slower, {len(missing)} that one commit alone has")
    for name, unit in sorted(missing):
        print(f"  one commit alone: {name} ({unit})")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1))


if __name__ == "__main__":
    main()
