"""Every plot is a whole file or none: what lay there stays where a disk is full or a run is interrupted in the middle."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcal.report import plots
from kvcal_artifacts.errors import KVCalError
from tests.support.models_fixture import file_size_limit, small_disk

if TYPE_CHECKING:
    from matplotlib.transforms import Bbox

pytest.importorskip("matplotlib")

BENCHED = {
    "operation": "reconstruct", "scheme": "kivi-2", "batch": 1, "projected": False, "microseconds": 3.0,
    "ratio_to_fp16": None,
}  # fmt: skip
COMPARED = {"name": "kivi-2", "bits_per_value": 2.5, "kl": 0.1, "front": True}
PROBED = {"target": "k", "inputs": ["k1"], "mean": 0.5, "mean_common": 0.5, "layers": [None, 0.5]}
CURVE = {"window": [0.5, 0.0]}
DRAW: dict[str, Callable[[Path], None]] = {
    "plot_bench": lambda path: plots.plot_bench([BENCHED | {"length": n} for n in (1024, 2048)], "title", path),
    "plot_deviation": lambda path: plots.plot_deviation(
        {"ranks": [1, 2], "mean": CURVE, "layers": [CURVE]}, {"window": "same window"}, "title", path
    ),
    "plot_needle_maps": lambda path: plots.plot_needle_maps({"full": {"needle@64/0": 1.0}}, "title", path),
    "plot_probes": lambda path: plots.plot_probes([PROBED], "title", path),
    "plot_quality": lambda path: plots.plot_quality([COMPARED], "title", path),
}
every_plot = pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)


def test_every_plot_is_here() -> None:
    assert set(DRAW) == {name for name in vars(plots) if name.startswith("plot_")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where an older file lies."""
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")
    return path


def test_crosses_are_in_the_legend_where_there_are_some() -> None:
    from matplotlib.figure import Figure

    for paper, labels in (({}, 0), ({"paper_microseconds": 4.0}, 1)):
        axis = Figure().subplots()
        plots._bench_lines(
            axis, [BENCHED | {"length": n, "scheme": s} | paper for n in (1024, 2048) for s in ("a", "b")]
        )
        assert axis.get_legend_handles_labels()[1].count("the paper's figures") == labels


@every_plot
@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_formats(draw: Callable[[Path], None], suffix: str, begins: bytes, tmp_path: Path) -> None:
    """By the suffix; the same figures give the same bytes."""
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    draw(first)
    draw(second)
    assert first.read_bytes().startswith(begins) and first.read_bytes() == second.read_bytes()


def test_a_scheme_has_one_colour() -> None:
    from kvcal.report.colours import COLOURS, OTHER, colour

    assert colour("kivi-2+higgs-2") == colour("kivi-sink-2") == COLOURS["kivi"]
    assert colour("tiny-aqua-kv") == COLOURS["aqua"] != colour("AQUA-KV x transform") == COLOURS["transform"]
    assert colour("turboquant-2") == COLOURS["turboquant"] != colour("higgs-2") and colour("no such scheme") == OTHER
    assert len({colour(f"innerq-{variant}") for variant in ("small", "hybrid", "base")}) == 3
    assert len({colour(f"inner-{bits}") for bits in (2, 3, 4)}) == 3 and colour("innerq-small") == COLOURS["inner"]


def test_labels_do_not_lie_on_each_other() -> None:
    """Twelve points in one place: every label has a box of its own, within the axes."""
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    from kvcal.report.labels import label_points

    axis = Figure(figsize=(8, 5), dpi=100).subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    points = [(0.5 + 0.004 * n, 0.5) for n in range(12)]
    label_points(axis, points, [f"scheme {n}" for n in range(12)])
    labels = [child for child in axis.get_children() if isinstance(child, Annotation) and child.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) == 12
    for n, box in enumerate(boxes):
        assert axis.get_window_extent().contains(box.x0, box.y0)
        assert not any(box.overlaps(other) for other in boxes[:n]), labels[n].get_text()


SIX = ("s-kivi", "s-squat", "s-vqkv", "s-aqua-kv", "s-innerq", "s-higgs")


@pytest.mark.parametrize("kls", [[0.1] * 6, [0.1, 0.101, 0.102, 0.15, 0.2, 0.0004]], ids=["one place", "one x"])
def test_six_rows_of_equal_bits_are_all_seen(kls: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dot hides another, no label lies on a label, a dot or an error bar; all within the axes."""
    from matplotlib.collections import PathCollection
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    drawn = []
    monkeypatch.setattr(plots, "as_file", lambda figure, path: drawn.append(figure) or b"")
    rows = [
        COMPARED | {"name": name, "kl": kl, "kl_se": kl / 10, "front": False} for name, kl in zip(SIX, kls, strict=True)
    ]
    plots.plot_quality(rows, "title", tmp_path / "plot.png")
    [axis] = drawn[0].axes
    [dots] = [one for one in axis.collections if isinstance(one, PathCollection)]
    at = [axis.transData.transform(point) for point in dots.get_offsets()]
    assert min(math.dist(a, b) for n, a in enumerate(at) for b in at[:n]) > 8  # pixels: a dot has seven
    bars = [
        Bbox([axis.transData.transform((x, kl - 2 * kl / 10)), axis.transData.transform((x, kl + 2 * kl / 10))])
        for (x, _), kl in zip(dots.get_offsets(), kls, strict=True)
    ]
    labels = [child for child in axis.get_children() if isinstance(child, Annotation) and child.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert sorted(label.get_text() for label in labels) == sorted(SIX)
    for n, box in enumerate(boxes):
        others = [*boxes[:n], *(Bbox([(x - 3, y - 3), (x + 3, y + 3)]) for x, y in at), *bars]
        assert not any(box.overlaps(other) for other in others), labels[n].get_text()
        assert axis.get_window_extent().contains(box.x0, box.y0) and axis.get_window_extent().contains(box.x1, box.y1)
    assert "side by side" in axis.get_xlabel()


def test_rows_that_do_not_meet_stand_at_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.collections import PathCollection

    drawn = []
    monkeypatch.setattr(plots, "as_file", lambda figure, path: drawn.append(figure) or b"")
    rows = [COMPARED | {"name": name, "kl": kl} for name, kl in (("a", 0.1), ("b", 0.01), ("c", 0.001))]
    plots.plot_quality(rows, "title", tmp_path / "plot.png")
    [dots] = [one for one in drawn[0].axes[0].collections if isinstance(one, PathCollection)]
    assert [x for x, _ in dots.get_offsets()] == [2.5] * 3


def test_a_label_stands_nearest_to_its_own_point() -> None:
    """At the right edge, where only places to the left are free and another point lies there."""
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    from kvcal.report.labels import label_points

    axis = Figure(figsize=(8, 5), dpi=100).subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    points = [(0.66, 0.55), (0.75, 0.45), (0.9, 0.5)]
    texts = ["kivi-4 + higgs-2", "turboquant-4-3", "kivi-4 + kivi-2"]
    label_points(axis, points, texts)
    labels = [child for child in axis.get_children() if isinstance(child, Annotation) and child.get_text()]
    for label in labels:
        box, own = label.get_window_extent(), points[texts.index(label.get_text())]
        away = {point: _away(box, *axis.transData.transform(point)) for point in points}
        assert min(away, key=lambda point: away[point]) == own, label.get_text()


def _away(box: Bbox, x: float, y: float) -> float:
    return math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))


def assert_untouched(path: Path) -> None:
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@every_plot
def test_a_file_cut_off_in_the_middle_leaves_the_old_one(draw: Callable[[Path], None], path: Path) -> None:
    with file_size_limit(1000), pytest.raises(KVCalError, match=r"plot\.png: cannot be written: File too large"):
        draw(path)
    assert_untouched(path)


def test_a_full_disk_leaves_the_old_plot(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        (disk / "plot.png").write_bytes(b"old")
        with pytest.raises(KVCalError, match="cannot be written: No space left on device"):
            DRAW["plot_bench"](disk / "plot.png")
        assert_untouched(disk / "plot.png")


@every_plot
def test_an_interrupt_leaves_the_old_one(
    draw: Callable[[Path], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        draw(path)
    assert_untouched(path)


@every_plot
def test_a_link_stays_one_and_the_same_figures_give_the_same_bytes(draw: Callable[[Path], None], path: Path) -> None:
    link = path.with_name("link.png")
    link.symlink_to(path.name)
    draw(link)
    first = path.read_bytes()
    assert link.is_symlink() and first.startswith(b"\x89PNG") and first.endswith(b"IEND\xaeB`\x82")
    draw(path)
    assert path.read_bytes() == first
