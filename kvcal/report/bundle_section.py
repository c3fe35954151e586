"""What a bundle's file holds, as a section of the page of `kvcal report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .colours import shades
from .html import figure, heat, heat_by_log, listed, section, table, wide
from .quantities import size
from .svg import Chart, Series, legend, text

EXACT = "16 bits"


@dataclass(frozen=True)
class BundleFigures:
    """What a page shows of a bundle. facts: names and values. layers: of runs of layers, their numbers, codec and
    stored bits per value of keys, and of values; None where there are no bits. memory: tokens, and bytes of the
    compressed layers at 16 bits and in the bundle's scheme; empty where no chart can hold them. explained: explained
    variance of keys and values by layer. sensitivity: by layer and role, KL of each codec alone.
    """

    name: str
    facts: Mapping[str, object]
    layers: Sequence[tuple[str, str, float | None, str, float | None]]
    memory: Sequence[tuple[int, float, float]]
    explained: Sequence[tuple[int, float | None, float | None]]
    sensitivity: Mapping[str, Mapping[str, float]]


def bundle_section(bundle: BundleFigures) -> str:
    """The section as HTML."""
    parts = [listed(bundle.facts), _codecs(bundle), _memory(bundle), _explained(bundle), _sensitivity(bundle)]
    return section(f"Bundle {bundle.name}", "What the file holds.", *filter(None, parts))


def _part(heading: str, words: str, *parts: str) -> str:
    return f"<h3>{text(heading)}</h3>\n<p>{words}</p>\n" + "\n".join(parts)


def _codecs(bundle: BundleFigures) -> str:
    columns = ["layers", "keys", "bits per value", "values", "bits per value"]
    rows = [
        [text(numbers), _words(keys), figure(key_bits, "{:.3f}"), _words(values), figure(value_bits, "{:.3f}")]
        for numbers, keys, key_bits, values, value_bits in bundle.layers
    ]
    words = "Stored bits count scales and zero points; of blocks that differ in size they are expected ones."
    return _part("Codecs", words, table(f"{bundle.name}: codecs", columns, rows))


def _words(value: str) -> str:
    """A cell of text that may be broken into lines."""
    return f'<td class="words">{text(value)}</td>'


def _memory(bundle: BundleFigures) -> str:
    if not bundle.memory:
        return ""
    colours = shades([EXACT, bundle.name])
    exact = Series(EXACT, [(length, whole, None) for length, whole, _ in bundle.memory], True, colours[EXACT])
    packed = [(length, nbytes, None) for length, _, nbytes in bundle.memory]
    series = [exact, Series(bundle.name, packed, True, colours[bundle.name])]
    chart = Chart.of("Memory against length", ("tokens", "size of one sequence"), series, (True, True), size)
    length, whole, nbytes = bundle.memory[-1]
    words = (
        "Compressed layers of one sequence: packed blocks at the stored bits per value, exact tokens at 16 bits, and "
        f"what stays resident. At {length:,} tokens {size(nbytes)} instead of {size(whole)}."
    )
    return _part("Memory against length", words, wide(f"{bundle.name}: chart of memory", chart), legend(series))


def _explained(bundle: BundleFigures) -> str:
    if not bundle.explained:
        return ""
    rows = [
        [str(layer), *(heat(None if one is None else 1 - one, figure(one, "{:.3g}")) for one in (keys, values))]
        for layer, keys, values in bundle.explained
    ]
    words = "Share of the variance of held-out keys and values that predictors explain; the rest is stored."
    columns = ["layer", "keys", "values"]
    return _part("Explained variance", words, table(f"{bundle.name}: explained variance", columns, rows))


def _sensitivity(bundle: BundleFigures) -> str:
    if not bundle.sensitivity:
        return ""
    codecs = list(dict.fromkeys(codec for costs in bundle.sensitivity.values() for codec in costs))
    cell = heat_by_log(cost for costs in bundle.sensitivity.values() for cost in costs.values())
    rows = [
        [text(place), *(cell(costs[codec]) if codec in costs else "–" for codec in codecs)]
        for place, costs in bundle.sensitivity.items()
    ]
    words = (
        "KL of the model with keys, or values, of one layer or of a group of its heads in a codec, and all else exact; "
        "nats per token."
    )
    return _part("Sensitivity", words, table(f"{bundle.name}: sensitivity", ["stored", *codecs], rows))
