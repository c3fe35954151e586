"""The journeys of docs/architecture.md: their stations are files, and none comes twice. A running program enters the
modules of journeys 1 and 5 in exactly that order, and those of 3 and 4 for the first time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from kvcal.cli.app import app
from kvcal.commands import workbench
from kvcal.methods.data_free import preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_cache
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.cache import KVCalCache
from tests.support import house as support
from tests.support.house import ROOT, SOURCE_ROOTS
from tests.support.models_fixture import write_model

MOST_STATIONS, MOST_WORDS, LINE = 8, 1000, 120


@dataclass(frozen=True)
class Journey:
    """stations: the text between two arrows. files: all that are named, in order."""

    stations: list[str]
    files: list[Path]


def journeys() -> dict[int, Journey]:
    """The journeys by their numbers, as docs/architecture.md has them: the first file of a package is named in full."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    found: dict[int, Journey] = {}
    for number, text in re.findall(r"^\*\*(\d)\. .*?\*\* (.*?)\n\n", page, re.M | re.S):
        package, files = "", []
        for station in re.findall(r"`([\w/]+\.py)`", text):
            first, _, rest = station.partition("/")
            package, inside = (first, rest) if first in SOURCE_ROOTS else (package, station)
            files.append(SOURCE_ROOTS[package] / package / inside)
        found[int(number)] = Journey(text.split("→"), files)
    return found


JOURNEYS = journeys()


def test_the_page_is_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert len(text.split()) <= MOST_WORDS
    assert [line for line in text.splitlines() if len(line) > LINE] == []


def test_there_are_five() -> None:
    assert sorted(JOURNEYS) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", JOURNEYS)
def test_a_journey_visits_few_files_and_none_twice(number: int) -> None:
    journey = JOURNEYS[number]
    assert [str(file) for file in journey.files if not file.is_file()] == []
    assert len(set(journey.files)) == len(journey.files)
    assert 2 <= len(journey.stations) <= MOST_STATIONS


class Visits:
    """Which of some files' functions a running program enters, one after the other.

    A call from a file to itself is none, nor by way of files that are not listed; nor is the attribute of a class that
    a property computes. A file left and entered again is listed twice.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files, self.order = {str(file): file for file in files}, list[Path]()
        self._names: dict[str, Path | None] = {}

    def _station(self, frame: FrameType) -> Path | None:
        name = frame.f_code.co_filename
        if name not in self._names:
            self._names[name] = self._files.get(str(Path(name).resolve()))
        return self._names[name]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (station := self._station(frame)) is None or _is_property(frame):
            return
        caller = frame.f_back
        while caller is not None and self._station(caller) is None:
            caller = caller.f_back
        inside = caller is not None and self._station(caller) == station
        if not inside and self.order[-1:] != [station]:
            self.order.append(station)

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)


def _is_property(frame: FrameType) -> bool:
    """Whether a frame computes or sets an attribute: a property of the first argument's class."""
    code = frame.f_code
    owner = type(frame.f_locals.get(code.co_varnames[0])) if code.co_argcount else object
    return isinstance(getattr(owner, code.co_name, None), property | cached_property)


@contextmanager
def visits(files: list[Path]) -> Iterator[Visits]:
    """The visits of the whole block."""
    seen = Visits(files)
    seen.begin()
    try:
        yield seen
    finally:
        seen.end()


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_model_of_a_folder_is_opened_as_the_page_says(layerwise: bool, tmp_path: Path) -> None:
    write_model(tmp_path)
    options = {"dtype": "float32", "device": "cpu", "random_weights": False, "seed": 0}
    files = JOURNEYS[1].files
    with visits(files) as seen:
        workbench.open_for_fit(str(tmp_path), None, layerwise=layerwise, **options)  # type: ignore[arg-type]
    absent = ("hub.py", "loading.py" if layerwise else "layerwise.py")  # a folder needs no hub, and one way is taken
    assert seen.order == [file for file in files if file.name not in absent]


def test_a_layer_of_a_decode_step_goes_as_the_page_says() -> None:
    """On the CPU, by the kernel's reference in torch, the first layer of the step that packs a block."""
    model: Any = load_model(resolve("tiny"), dtype="float32", device="cpu").model
    scheme = preset("kivi-4").scheme(model)
    windows, files = scheme.windows, JOURNEYS[5].files
    ids = torch.zeros(1, windows.sink + windows.recent + 3 * windows.block, dtype=torch.long)
    attention = model.model.layers[0].self_attn
    with KVCalCache(scheme, model, kernels="torch") as cache, torch.no_grad():
        model(ids[:, : -windows.block], past_key_values=cache)
        for start in range(windows.block):
            blocks, seen = cache.compressed_layers[0].block_slots, Visits(files)
            hooks = [
                attention.register_forward_pre_hook(lambda *_, seen=seen: seen.begin()),
                attention.register_forward_hook(lambda *_, seen=seen: seen.end()),
            ]
            try:
                model(ids[:, start : start + 1], past_key_values=cache)
            finally:
                seen.end()
                for hook in hooks:
                    hook.remove()
            if cache.compressed_layers[0].block_slots > blocks:
                assert seen.order == files
                return
    raise AssertionError("no step packed a block")


def first_entered(seen: Visits) -> list[str]:
    return [file.name for file in dict.fromkeys(seen.order)]


@pytest.mark.parametrize(("kernels", "absent"), [("torch", "verdicts.py"), ("auto", "fused.py")])
def test_a_bundle_reaches_attention_as_the_page_says(kernels: str, absent: str, tmp_path: Path) -> None:
    """On the CPU, where either the reference in torch attends, or a verdict is asked for; none reaches a launch."""
    model: Any = load_model(resolve("tiny"), dtype="float32", device="cpu").model
    path = tmp_path / "preset.kvcal.safetensors"
    Bundle(Fingerprint.of(model, None), preset("kivi-4").scheme(model), {}).write(path)
    files = [file for file in JOURNEYS[3].files if "kvcal_kernels" not in file.parts]
    ids = torch.zeros(1, 128, dtype=torch.long)
    with visits(files) as seen, load_cache(path, model, kernels=kernels) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    assert len(files) == len(JOURNEYS[3].files) - 2
    assert first_entered(seen) == [file.name for file in files if file.name != absent]


def test_a_preset_becomes_codecs_as_the_page_says(tmp_path: Path) -> None:
    files = JOURNEYS[4].files
    path = tmp_path / "preset.kvcal.safetensors"
    with visits(files) as seen:
        app(["preset", "kivi-4", "--model", "tiny", "--output", str(path)], standalone_mode=False)
    assert path.exists()
    assert first_entered(seen) == [file.name for file in files]


def test_a_return_is_seen() -> None:
    """A module that is left and entered again, a call that stays inside, and a property."""
    house, here = Path(str(support.__file__)), Path(__file__).resolve()

    class Station:
        @property
        def attribute(self) -> None:
            return None

    def back(node: Any) -> None:
        back_again(node)

    def back_again(node: Any) -> None:
        _ = Station().attribute

    with visits([house, here]) as seen:
        support.circles(Called({"a": set()}, back))
    assert seen.order == [house, here]
    with visits([house, here]) as seen:
        support.circles(Called({"a": set(), "b": set()}, lambda _: support.rooms("kvcal")))
    assert seen.order[:3] == [house, here, house]


class Called(dict[str, set[str]]):
    """Arrows that call a function when one is asked for."""

    def __init__(self, arrows: dict[str, set[str]], function: Callable[[Any], object]) -> None:
        super().__init__(arrows)
        self._function = function

    def __getitem__(self, module: str) -> set[str]:
        self._function(module)
        return super().__getitem__(module)
