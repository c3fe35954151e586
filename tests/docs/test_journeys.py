"""The journeys of docs/architecture.md: their stations are files, none comes twice, and a running program comes to them
in that order.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from kvcal.commands import workbench
from kvcal.methods.data_free import preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts.cache import KVCalCache
from tests.support.house import ROOT, SOURCE_ROOTS
from tests.support.models_fixture import write_model

MOST_STATIONS = 8


def journeys() -> dict[int, list[Path]]:
    """The files of each journey by its number, as docs/architecture.md names them: the first of a package in full."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    files: dict[int, list[Path]] = {}
    for number, text in re.findall(r"^\*\*(\d)\. .*?\*\* (.*)$", page, re.M):
        package, files[int(number)] = "", []
        for station in re.findall(r"`([\w/]+\.py)`", text):
            first, _, rest = station.partition("/")
            package, inside = (first, rest) if first in SOURCE_ROOTS else (package, station)
            files[int(number)].append(SOURCE_ROOTS[package] / package / inside)
    return files


JOURNEYS = journeys()


def test_there_are_five() -> None:
    assert sorted(JOURNEYS) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", JOURNEYS)
def test_a_journey_visits_few_files_and_none_twice(number: int) -> None:
    files = JOURNEYS[number]
    assert [str(file) for file in files if not file.is_file()] == []
    assert len(set(files)) == len(files)
    assert 2 <= len(files) <= MOST_STATIONS


@contextmanager
def entered() -> Iterator[list[Path]]:
    """The files of functions that are called, each at its first call."""
    files: dict[str, None] = {}
    order: list[Path] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.setdefault(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield order
    finally:
        sys.setprofile(before)
        order += [Path(name).resolve() for name in files]


def opened(folder: Path) -> None:
    """A whole model of a folder. weights.py is left out: it also makes the empty model that a config is tried on."""
    write_model(folder)
    options = {"dtype": "float32", "device": "cpu", "random_weights": False, "seed": 0}
    with entered() as order:
        workbench.open_for_fit(str(folder), None, layerwise=False, **options)  # type: ignore[arg-type]
    _check(order, [file for file in JOURNEYS[1] if file.name not in ("layerwise.py", "weights.py")])


def decoded(folder: Path) -> None:
    """Steps on the CPU, by the kernel's reference in torch, up to one that packs a block."""
    model: Any = load_model(resolve("tiny"), dtype="float32", device="cpu").model
    scheme = preset("kivi-4").scheme(model)
    windows = scheme.windows
    ids = torch.zeros(1, windows.sink + windows.recent + 3 * windows.block, dtype=torch.long)
    with KVCalCache(scheme, model, kernels="torch") as cache, torch.no_grad():
        model(ids[:, : -windows.block], past_key_values=cache)
        for start in range(windows.block):
            blocks = cache.compressed_layers[0].block_slots
            with entered() as order:
                model(ids[:, start : start + 1], past_key_values=cache)
            if cache.compressed_layers[0].block_slots > blocks:
                return _check(order, JOURNEYS[5])
    raise AssertionError("no step packed a block")


def _check(order: list[Path], stations: list[Path]) -> None:
    assert [file for file in order if file in stations] == stations


@pytest.mark.parametrize("travel", [opened, decoded])
def test_a_program_comes_to_the_stations_in_their_order(travel: Callable[[Path], None], tmp_path: Path) -> None:
    travel(tmp_path)


def test_a_wrong_order_is_seen() -> None:
    with entered() as order:
        journeys()
    assert Path(__file__).resolve() in order
    with pytest.raises(AssertionError):
        _check(JOURNEYS[5], JOURNEYS[5][::-1])
