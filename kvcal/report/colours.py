"""One colour for a method, in every plot, and a lighter one for its schemes of more bits. The colours are Okabe and
Ito's and Tol's, which colour-blind readers tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

COLOURS = {  # a word of a scheme's name -> colour; the first match counts
    "transform": "#882255",
    "aqua": "#0072b2",
    "fp16": "#222222",
    "full": "#222222",
    "exact": "#222222",
    "bf16": "#222222",
    "fp8": "#777777",
    "kivi": "#d55e00",
    "kvtuner": "#e69f00",
    "tune-bits": "#e69f00",
    "turboquant": "#44aa99",
    "higgs": "#009e73",
    "squat": "#cc79a7",
    "mixkvq": "#56b4e9",
    "inner": "#332288",
    "vq": "#999933",
    "quanto": "#bbbbbb",
    "uniform": "#bbbbbb",
}
OTHER = "#6b7783"
DARKEST = 0x40  # colours of no brighter channel are turned into a light grey on a dark page
LIGHTER = {"3": 0.25, "4": 0.45, "8": 0.6, "hybrid": 0.3, "base": 0.55}  # bits or variant in a name -> part of white


def colour(scheme: str) -> str:
    """The colour of a scheme by its name, as `aqua-kv`, `kivi-4+higgs-2` (that of its keys) or `H2O + HIGGS`."""
    name = scheme.casefold()
    matches = [(name.find(word), -len(word), word) for word in COLOURS if word in name]
    word = "transform" if "transform" in name else min(matches)[2] if matches else ""
    bits = re.search(rf"{word}[^\d+]*?(\d|hybrid|base)", name) if word else None
    return _lighter(COLOURS.get(word, OTHER), LIGHTER.get(bits[1], 0.0) if bits else 0.0)


class Shades(NamedTuple):
    """A colour as #rrggbb on a light page and on a dark one. dashed: another name has nearly the same."""

    light: str
    dark: str
    dashed: bool = False


def shades(names: Iterable[str]) -> dict[str, Shades]:
    """The colour of each name, lighter and dashed where a name before it has the same."""
    shown: dict[str, Shades] = {}
    counts: dict[str, int] = {}
    for name in dict.fromkeys(names):
        base = colour(name)
        count = counts[base] = counts.get(base, -1) + 1
        light = _lighter(base, min(0.5, 0.2 * count))
        brightest = max(int(base[place : place + 2], 16) for place in (1, 3, 5))
        dark = _lighter(light, 0.85 if brightest <= DARKEST else 0.4)
        shown[name] = Shades(light, dark, count > 0)
    return shown


def _lighter(shade: str, white: float) -> str:
    """A colour as #rrggbb, mixed with so much white."""
    parts = (int(shade[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
