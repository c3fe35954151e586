"""What `kvcal report` shows of a bundle's file, which anybody may have written: what is of another type is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from ..evaluate.errors import HeadErrors
from ..report.bundle_section import BundleFigures
from ..report.page import LENGTHS
from ..report.quantities import folded
from ..report.records import Table, is_number
from ..report.result_file import LARGEST
from .bundles import described, facts_of


def figures_of(bundle: Bundle, path: Path, errors: HeadErrors | None) -> BundleFigures:
    """A bundle's figures. path: of its file. errors: by head, where it records them."""
    facts = facts_of(described(bundle, path, None if errors is None else {"key": errors.key, "value": errors.value}))
    metrics = Table(bundle.metrics)
    return BundleFigures(
        bundle.name,
        {"made for": model_name(bundle)} | facts | {"bundle": path.name},
        [(row[0], *row[1]) for row in folded(enumerate(_codecs(bundle.scheme)))],
        _memory(bundle.scheme),
        list(_explained(metrics)),
        dict(_sensitivity(metrics)),
    )


def model_name(bundle: Bundle) -> str | None:
    """The hub id, else the name that is recorded of a bundle's model; None where neither is."""
    model = Table(bundle.provenance).table("model")
    return model.value("hub_id", str) or model.value("name", str)


def _codecs(scheme: Scheme) -> Iterator[tuple[str, float | None, str, float | None]]:
    """Codec and stored bits per value of keys, and of values, by layer."""
    for layer, pair in enumerate(scheme.layers):
        if pair is None:
            yield "left alone", None, scheme.skipped[layer], None
        else:
            key, value = pair.key, pair.value
            yield key.describe(), key.bits_per_value(), value.describe(), value.bits_per_value()


def _memory(scheme: Scheme) -> Sequence[tuple[int, float, float]]:
    """LENGTHS, and bytes of the compressed layers at 16 bits and in the scheme; empty where no chart can hold them."""
    pairs = [pair for pair in scheme.layers if pair is not None]
    points = [(length, 2.0 * length * _numbers(pairs), _bytes_at(scheme, pairs, length)) for length in LENGTHS]
    return points if all(is_number(one) and 0 < one < LARGEST for point in points for one in point[1:]) else []


def _numbers(pairs: Sequence[LayerCodecs]) -> int:
    """Numbers of keys and values of one token."""
    return sum(codec.shape.heads * codec.shape.dim for pair in pairs for codec in (pair.key, pair.value))


def _bytes_at(scheme: Scheme, pairs: Sequence[LayerCodecs], length: int) -> float:
    """Bytes of one sequence: what stays resident, whole blocks packed, other tokens at 16 bits."""
    tokens = length if scheme.selection is None else scheme.selection.budget(length)[0]
    windows, numbers = scheme.windows, _numbers(pairs)
    packed = max(0, tokens - windows.sink - windows.recent) // windows.block * windows.block
    return scheme.resident_bytes() + numbers * (packed * scheme.bits_per_value() / 8 + 2 * (tokens - packed))


def _explained(metrics: Table) -> Iterator[tuple[int, float | None, float | None]]:
    """Layer, and explained variance of its keys and values, of layers that record either."""
    for layer, row in enumerate(map(Table, metrics.value("layers", list) or [])):
        key, value = (row.value(f"{role}_explained_variance", float) for role in ("key", "value"))
        if key is not None or value is not None:
            yield layer, key, value


def _sensitivity(metrics: Table) -> Iterator[tuple[str, dict[str, float]]]:
    """What was stored in another codec, and the KL of each codec there."""
    recorded = metrics.table("sensitivity")
    for place in sorted(recorded.fields, key=_by_number):
        costs = {codec: cost for codec, cost in recorded.table(place).fields.items() if is_number(cost)}
        if costs:
            yield place, costs


def _by_number(place: str) -> list[tuple[int, str]]:
    """What sorts 2:keys before 10:keys: numbers by how many digits they have first."""
    parts = re.split(r"(\d+)", place)  # of text and numbers in turn
    return [(len(part) if at % 2 else 0, part) for at, part in enumerate(parts)]
