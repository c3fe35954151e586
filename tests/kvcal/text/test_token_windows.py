"""Token windows: the same seed the same windows, none overlapping another; and the pieces that are tokenised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal.text import files, unpacked
from kvcal.text.sources import EMBEDDED
from kvcal.text.token_stream import pieces
from kvcal.text.token_windows import evaluation_windows, random_windows, token_windows
from kvcal_artifacts.errors import UsageError
from tests.support.texts import PLAIN, START, WITH_BOS, Characters, numbered, write

pytestmark = pytest.mark.transformers


@given(
    windows=st.integers(1, 12),
    length=st.integers(2, 40),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 2**31),
    bos=st.booleans(),
)
def test_windows_never_overlap_and_repeat_with_the_seed(
    windows: int, length: int, share: float, seed: int, bos: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = tmp_path_factory.getbasetemp() / "distinct.txt"
    if not text.exists():
        text.write_text("".join(chr(START + i) for i in range(1200)), "utf-8")
    holdout = int(windows * share)
    options: dict[str, Any] = {"windows": windows, "length": length, "holdout": holdout, "seed": seed}
    first = token_windows(Characters(bos), str(text), **options)
    again = token_windows(Characters(bos), str(text), **options)
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.holdout, again.holdout)
    assert first.ids_sha256 == again.ids_sha256
    assert (first.train.shape, first.holdout.shape) == ((windows - holdout, length), (holdout, length))
    if bos:
        assert (torch.cat([first.train, first.holdout])[:, 0] == 0).all()
    train, held = first.train[:, bos:], first.holdout[:, bos:]
    seen = [*train.flatten().tolist(), *held.flatten().tolist()]
    assert len(set(seen)) == len(seen)  # no character of the text is in two windows
    assert ((torch.cat([train, held]).diff(dim=1)) == 1).all()  # each is one stretch of the text
    if holdout:  # from a part of its own, behind every training window
        assert train.max() < held.min()


def test_another_seed_chooses_other_windows() -> None:
    text = "embedded:calibration"
    one, two = (token_windows(WITH_BOS, text, windows=8, length=256, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.train, two.train)
    assert one.sha256 == two.sha256


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    token_windows(WITH_BOS, "embedded:calibration", windows=4, length=64, holdout=1)
    random_windows(50, windows=4, length=8)
    assert torch.equal(state, torch.get_rng_state())


def test_evaluation_windows_are_consecutive_and_do_not_depend_on_their_number() -> None:
    text = EMBEDDED["embedded:evaluation"].read_text("utf-8")
    three = evaluation_windows(WITH_BOS, "embedded:evaluation", windows=3, length=101)
    whole = evaluation_windows(WITH_BOS, "embedded:evaluation", windows=None, length=101)
    assert torch.equal(three.ids, whole.ids[:3])
    assert len(whole.ids) == len(text.encode()) // 100
    assert WITH_BOS.decode(three.ids[:, 1:].flatten()).encode() == text.encode()[:300]
    assert (whole.ids[:, 0] == 0).all()
    assert whole.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert len(evaluation_windows(PLAIN, "embedded:evaluation", windows=10**6, length=4000).ids) == 32


def test_random_windows() -> None:
    made = random_windows(100, windows=6, length=16, holdout=2, seed=3)
    assert made.train.shape == (4, 16)
    assert made.holdout.shape == (2, 16)
    assert made.source == "random-tokens:3"
    assert torch.equal(made.train, random_windows(100, windows=6, length=16, holdout=2, seed=3).train)


@pytest.mark.parametrize(("windows", "length", "holdout"), [(0, 8, 0), (4, 1, 0), (4, 8, 4), (4, 8, -1)])
def test_counts_that_make_no_sense(windows: int, length: int, holdout: int) -> None:
    with pytest.raises(UsageError):
        token_windows(WITH_BOS, "embedded:calibration", windows=windows, length=length, holdout=holdout)


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    token_windows(WITH_BOS, "embedded:calibration", windows=4, length=512, progress=lambda *step: seen.append(step))
    assert seen
    assert seen[-1][0] == seen[-1][1]


# pieces


@given(st.lists(st.text(alphabet="ab \n", max_size=60), max_size=8), st.integers(2, 40))
def test_pieces_are_the_documents_joined(texts: list[str], size: int) -> None:
    cut = list(pieces(([text] for text in texts), size))
    assert "".join(cut) == "\n\n".join(texts)
    assert all(0 < len(piece) <= size for piece in cut)


def test_pieces_are_cut_before_a_line_or_a_word() -> None:
    lines = list(pieces([["one two\n\nthree four\nfive six\nseven eight nine\n"]], 30))
    assert lines[0] == "one two\n\nthree four\nfive six\n"
    words = list(pieces([["one two three four five six seven"]], 14))
    assert words == ["one two three", " four five six", " seven"]


def test_large_files_are_read_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "large.txt", numbered(1_000_000))  # 7 MB
    taken: list[int] = []
    decoded = unpacked.decoded

    def counting(file: Path) -> Iterator[str]:
        for part in decoded(file):
            taken.append(len(part))
            yield part

    monkeypatch.setattr(files, "decoded", counting)
    token_windows(WITH_BOS, path, windows=2, length=64)
    assert sum(taken) < 3 << 20
