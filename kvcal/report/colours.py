"""One colour for a method, in every plot. The colours are Okabe and Ito's and Tol's, which colour-blind readers tell
apart; methods that stand next to each other in tables differ in lightness too.
"""

from __future__ import annotations

COLOURS = {  # a word of a scheme's name -> colour; the first that is found counts
    "transform": "#882255",
    "aqua": "#0072b2",
    "fp16": "#222222",
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


def colour(scheme: str) -> str:
    """The colour of a scheme by its name, as `aqua-kv`, `kivi-2+higgs-2` (that of its keys) or `H2O + HIGGS`."""
    name = scheme.casefold()
    found = [(name.find(word), -len(word), shade) for word, shade in COLOURS.items() if word in name]
    if "transform" in name:
        return COLOURS["transform"]
    return min(found)[2] if found else OTHER
