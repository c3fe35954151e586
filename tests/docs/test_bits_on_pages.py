"""Bits per value that README.md and two lab pages state beside the name of a codec or preset are those that it reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcal.commands.demo import DEMO_PRESETS
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.data_free import PRESETS, Preset
from kvcal.methods.mixkvq import MixKVQ
from kvcal.methods.registry import codec_maker
from kvcal.models.configuration import geometry
from kvcal.models.geometry import Geometry
from kvcal.models.names import resolve
from kvcal.report.quantities import significant
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.errors import UsageError
from tests.support.pages import ROOT

PAGES = ("README.md", "docs/lab/kvref-28m.md", "docs/lab/methods.md")
BITS = ("bits", "bits a value", "bits per value", "bits, KL on tiny")  # heads of columns that state them
KVREF_LAYERS, KVREF = 10, (2, 64)  # kvref-28m: kv heads, head_dim; `tiny` has the same
NAME, NUMBER = r"`([^`]+)`", re.compile(r"\d+\.\d+")
BLOCK, LONG = 32, 128  # tokens of a block; of groups that are longer


def pair(key: str, value: str, block: int = BLOCK) -> float | None:
    """Bits a value of two codecs; None where one is learned, and has none before a fit."""
    shape = Shape(*KVREF, LONG if "g128" in key + value else block)
    try:
        made = [codec_maker(name)(shape, role) for name, role in ((key, "key"), (value, "value"))]  # type: ignore[arg-type]
    except UsageError:
        return None
    return sum(codec.bits_per_value() for codec in made) / 2


def reported(name: str) -> float | None:
    """Of a preset or codec. None for any other word, and for codecs that are learned."""
    own = PRESETS.get(name)
    if isinstance(own, MixKVQ):
        return pair("mixkvq", "mixkvq", own.block)
    return pair(own.key, own.value, own.block) if isinstance(own, Preset) else pair(name, name)


def under_aqua(residual: str, first: str, layers: int) -> float | None:
    """AQUA-KV's: one layer in `first`, the others in `residual`; balanced factors take no bits of a token."""
    both = [reported(name.removesuffix("-balanced")) for name in (residual, first)]
    return None if None in both else (both[0] * (layers - 1) + both[1]) / layers  # type: ignore[operator]


def named_in(cell: str, layers: int) -> list[float]:
    """What the names in a row's first cell report, in order.

    "`a` + `b`" and "keys `a`, values `b`" are keys and values of one row, "`a`, first layer `b`" is AQUA-KV's.
    "`innerq-hybrid`, `-small`" leaves out what both begin with.
    """
    if found := re.search(rf"{NAME}, first layer {NAME}", cell):
        bits = [under_aqua(found[1], found[2], layers)]
    elif found := re.search(rf"{NAME} \+ {NAME}|keys {NAME}.*values {NAME}", cell):
        key, value = (name for name in found.groups() if name)
        bits = [pair(key, value)]
    else:
        names = re.findall(NAME, cell)
        stem = names[0].partition("-")[0] if names else ""
        bits = [reported(stem + name if name.startswith("-") and not name.startswith("--") else name) for name in names]
    return [one for one in bits if one is not None]


def rows(page: Path) -> Iterator[tuple[str, str, int]]:
    """(first cell, cell of bits, layers of the model that it is of) of all tables that state bits."""
    head: list[str] = []
    for line in page.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = []
        elif not head:
            head = cells
        else:
            for column, name in enumerate(head):
                if name in BITS and column:
                    tiny = "tiny" in head[0] or "tiny" in name
                    cell = cells[column].partition(", ")[0] if "KL" in name else cells[column]
                    yield cells[0], cell, TINY.layers if tiny else KVREF_LAYERS


TINY: Geometry = geometry(resolve("tiny"))


def checked(page: str) -> Iterator[tuple[str, list[str], list[float]]]:
    """(first cell, bits as stated, bits as reported) where a cell of bits stands beside names."""
    for label, cell, layers in rows(ROOT / page):
        if (bits := named_in(label, layers)) and (stated := NUMBER.findall(cell)):
            yield label, stated, bits


@pytest.mark.parametrize("page", PAGES)
def test_bits_are_those_that_codecs_report(page: str) -> None:
    for label, stated, bits in checked(page):
        assert len(stated) == len(bits), label
        assert stated == [
            f"{one:.{len(said) - said.index('.') - 1}f}" for said, one in zip(stated, bits, strict=True)
        ], label


def test_the_tables_are_found() -> None:
    """So many rows of each page, among them those that went stale once."""
    found = {page: [label for label, *_ in checked(page)] for page in PAGES}
    assert (
        len(found["docs/lab/kvref-28m.md"]) >= 14
        and len(found["README.md"]) >= 2
        and len(found["docs/lab/methods.md"]) >= 16
    )
    assert any(label.startswith("`higgs-2` ") for label in found["docs/lab/methods.md"])
    assert sum("first layer" in label for label in found["docs/lab/kvref-28m.md"]) >= 4
    assert (TINY.kv_heads, TINY.head_dim) == KVREF


def test_the_demo_states_the_bits_of_its_rows() -> None:
    demo = (ROOT / "README.md").read_text("utf-8").partition("What `kvcal demo` printed here")[2]
    stated = {row[0]: row[1] for row in map(str.split, demo.splitlines()) if len(row) == 7 and "/" in row[6]}
    default = AquaKV()
    aqua = under_aqua(default.backbone, default.first_layer, TINY.layers)
    own = {name: reported(name) for name in DEMO_PRESETS} | {"tiny-aqua-kv": aqua}
    assert {name: stated[name] for name in own} == {name: significant(bits) for name, bits in own.items()}


def test_no_row_of_other_codecs_is_called_the_default() -> None:
    """Figures that were measured with other codecs than AQUA-KV's own must not bear its default's name."""
    default = AquaKV()
    for page in PAGES:
        for line in (ROOT / page).read_text("utf-8").splitlines():
            if line.startswith("|") and "AQUA-KV" in line.split("|")[1] and "default" in line.split("|")[1]:
                assert default.backbone in line.split("|")[1], line
