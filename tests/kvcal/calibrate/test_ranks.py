"""Calibration by several processes: the bytes of one, whoever holds which windows; and one line where one fails."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcal.calibrate.driver import fit_together
from kvcal.calibrate.job import FitJob, FitOptions
from kvcal.capture import ranks as ranks_module
from kvcal.capture import scan
from kvcal.capture.ranks import ALONE, Ranks, ShareDoneError, _packed, _Unpickler, joined
from kvcal.capture.scan import Capture, WholeModel
from kvcal.capture.shards import SHARDS, Gathered, Shards, ShardSums, tree_sum
from kvcal.capture.spread import spread
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods import METHODS, VQKV, AquaKV, InnerQ, KVTuner, MixKVQ, Squat, codebooks, mlp, training_vectors
from kvcal.methods.codebooks import TRAINERS, Training
from kvcal.methods.registry import CALIBRATED, calibrated_name
from kvcal.methods.training_vectors import TrainingVectors, VectorShards
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_kernels.residual_vq.nearest import nearest
from tests.support.models_fixture import SMALL, SUFFIX, kvcal, write_model, write_text
from tests.support.ranks import agents_store, in_ranks

WINDOWS: dict[str, Any] = {"sink": 4, "recent": 16, "block": 8}
LEARNED = (
    "1:keys=transform-2.5", "1:values=vq-2-k16", "2:keys=squat-2-calibrated", "2:values=inner-2-symmetric-scaled",
    "0:keys=mixkvq-3", "0:values=higgs-2-wide-balanced",
)  # fmt: skip
VECTORS: dict[str, Any] = {"stages": (1, 1, 1), "sizes": (16, 8, 8), "high": 0, "vectors": 500, **WINDOWS}
ONCE: dict[str, int] = {"least": 1, "most": 1}
JOBS: dict[str, Any] = {
    "aqua-kv": AquaKV(predictor="reduced-rank", **WINDOWS),
    "learned": AquaKV(first_layer="", per_layer=LEARNED, **WINDOWS),
    "squat": Squat(group=8, search_ranks=(1, 2), **WINDOWS),
    "innerq": InnerQ(value="inner-2-hybrid", **WINDOWS),
    "kvtuner": KVTuner(max_bits=9, choices=(2, 4), group=8, **WINDOWS),
    "mixkvq": MixKVQ(group=8, value_group=8, **WINDOWS),
    "mlp": AquaKV(predictor="mlp", mlp_epochs=1, **WINDOWS),
    "vqkv": VQKV(**VECTORS | {"stages": (2, 1, 1), "high": 4}, training=Training(least=2, most=2)),
    "vqkv-closed-form": VQKV(**VECTORS, shared=False, training=Training("closed-form", **ONCE)),
    "vqkv-adam": VQKV(**VECTORS, training=Training("adam", **ONCE)),
}


def test_every_method_and_every_learned_codec_is_tried() -> None:
    assert {method.name for method in JOBS.values()} == METHODS.keys()
    assert {method.training.trainer for method in JOBS.values() if isinstance(method, VQKV)} == TRAINERS.keys()
    kinds = [calibrated_name(one.partition("=")[2]) for one in LEARNED]
    assert {kind[0] for kind in kinds if kind is not None} == CALIBRATED.keys()


@pytest.fixture
def agent() -> Iterator[int]:
    """The port of a store such as torchrun's agent has."""
    with agents_store() as port:
        yield port


@pytest.fixture(scope="module", autouse=True)
def few_are_enough() -> Iterator[None]:
    """What is divided from so many on, divided here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_vectors, "LEAST", 64)
        patch.setattr(training_vectors, "WORTH", {"cpu": 1})
        patch.setattr(codebooks, "ADAM_STEPS", 3)
        patch.setattr(mlp, "PART", 16)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "m", 3)
    write_text(folder / "words.txt")
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load_model(resolve(str(base / "m")), dtype="float32", device="cpu").model


TEXT = token_windows.random_windows(256, windows=7, length=60, holdout=2, seed=0)


def fitted(model: Any, folder: Path, ranks: Ranks, methods: dict[str, Any] = JOBS) -> dict[str, str]:
    """SHA-256 of each bundle."""
    folder.mkdir(exist_ok=True)
    results = fit_together(
        [FitJob(method, folder / f"{name}{SUFFIX}") for name, method in methods.items()],
        WholeModel(model),
        TEXT,
        model_record={"name": "m"},
        revision="r",
        device=torch.device("cpu"),
        options=FitOptions(batch=2, warn=False, ranks=ranks),
    )
    return {name: result.sha256 for name, result in zip(methods, results, strict=True)}


@pytest.fixture(scope="module")
def alone(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fitted(model, tmp_path_factory.mktemp("alone"), ALONE)


def share(model: Any, folder: Path) -> int:
    try:
        with joined("cpu") as ranks:
            fitted(model, folder, ranks)
    except ShareDoneError:
        return 3
    return 0


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_do_not_depend_on_how_many_processes_there_are(
    model: Any, alone: dict[str, str], tmp_path: Path, count: int
) -> None:
    ends = in_ranks(count, lambda: share(model, tmp_path / "out"), tmp_path)
    assert [code for code, _ in ends] == [0] + [3] * (count - 1), ends
    assert {
        path.name.removesuffix(SUFFIX): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").iterdir()
    } == alone


def layouts(value: object, name: str = "") -> dict[str, tuple[Any, ...]]:
    """Shape, strides and dtype of every tensor within, by its path, but for what is computed when it is first used."""
    if isinstance(value, torch.Tensor):
        return {name: (tuple(value.shape), value.stride(), value.dtype)}
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif type(value).__module__.startswith("kvcal") and hasattr(value, "__dict__"):
        parts = ((part, inner) for part, inner in vars(value).items() if part != "_memo")
    return {key: one for part, inner in parts for key, one in layouts(inner, f"{name}.{part}").items()}


@pytest.mark.parametrize("name", JOBS)
def test_a_fitted_codec_computes_with_what_its_bundle_holds(model: Any, tmp_path: Path, name: str) -> None:
    """Other ranks and resumed runs have it from there; a product of a matrix that lies by columns has other last bits
    on a GPU.
    """
    path = tmp_path / f"one{SUFFIX}"
    [result] = fit_together(
        [FitJob(JOBS[name], path)],
        WholeModel(model),
        TEXT,
        model_record={"name": "m"},
        revision="r",
        device=torch.device("cpu"),
        options=FitOptions(batch=2, warn=False),
    )
    fitted_layers, read = result.bundle.scheme.layers, load_bundle(path).scheme.layers
    for one, other in zip(fitted_layers, read, strict=True):
        assert layouts(vars(one)) == layouts(vars(other))
    assert layouts([vars(one) for one in fitted_layers]) or name in ("kvtuner", "mixkvq")  # which have no tensors


def share_with_nan(model: Any, folder: Path) -> int:
    """Rank 1 meets a NaN in its windows, when rank 0 has stored a layer."""
    check = scan.check_finite

    def found(x: torch.Tensor, what: str, rows: slice) -> None:
        if os.environ["RANK"] == "1" and what == "layer 1, key head":
            raise NonFiniteError("layer 1, key head 0: NaN or infinity in window 5")
        check(x, what, rows)

    scan.check_finite = found  # of this process, which ends
    try:
        with joined("cpu") as ranks:
            fitted(model, folder, ranks, {"aqua-kv": JOBS["aqua-kv"]})
    except KVCalError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


def test_a_nan_of_one_rank_leaves_nothing_to_resume(model: Any, tmp_path: Path) -> None:
    ends = in_ranks(2, lambda: share_with_nan(model, tmp_path / "out"), tmp_path)
    assert [code for code, _ in ends] == [1, 1]
    assert ends[1][1] == "NonFiniteError: layer 1, key head 0: NaN or infinity in window 5\n"
    assert ends[0][1].endswith("LinePrintedError: rank 0 of 2: another rank ended, whose line says why\n")
    assert not list((tmp_path / "out").iterdir())


SEARCHES = {
    "tune-bits": ["--objective", "kl", "--predict", "--codecs", "higgs-2,uniform-4", "--max-bits", "5"],
    "tune-thresholds": ["--objective", "attention", "--trials", "2", "--group", "8", "--max-bits", "9"],
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_by_two_processes_writes_the_bytes_of_one(base: Path, tmp_path: Path, name: str) -> None:
    words = [name, "--model", base / "m", "--text", base / "words.txt", *SMALL, "--windows", "5", "--holdout", "2"]
    words += ["--batch", "2", *SEARCHES[name], "--output"]
    one, two = (tmp_path / f"{name}-{number}{SUFFIX}" for number in (1, 2))
    assert kvcal(*words, one).code == 0
    logs = tmp_path / "logs"
    logs.mkdir()
    ends = in_ranks(2, lambda: kvcal(*words, two).code, logs)
    assert [code for code, _ in ends] == [0, 0], ends
    assert one.read_bytes() == two.read_bytes()
    assert {path.suffix for path in tmp_path.iterdir()} <= {"", ".safetensors", ".png"}  # no folder of a killed run


def test_searches_that_are_not_spread_are_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcal.capture.ranks.current", lambda: Ranks(0, 2))
    words = ["tune-thresholds", "--model", base / "m", "--objective", "task:arc_easy", "--output", tmp_path / "x"]
    line = "is not spread over processes, and torchrun started 2: give --objective attention or perplexity, or"
    assert line in kvcal(*words).complaint


def test_codewords_are_those_of_one_process_whoever_holds_the_vectors() -> None:
    """Sums by shard, added in float64, differ from one running sum in their last bits alone."""
    x = torch.randn(700, 8, generator=torch.Generator().manual_seed(0))
    book, some = x[:16].half(), TrainingVectors.of(x.clone())
    assert some.shards.count == 10
    count, total = some.sums(book)
    codes = nearest(x, book).long()
    assert torch.equal(count, codes.bincount(minlength=16))
    exact = torch.zeros(16, 8, dtype=torch.float64).index_add_(0, codes, x.double())
    assert torch.allclose(total.double(), exact, rtol=0, atol=1e-5)
    numbers = torch.tensor([699, 0, 350])
    assert torch.equal(some.rows(numbers), x[numbers])
    assert some.subtract(book) == len(codes.unique())
    assert torch.equal(some.local, x - book.float()[codes])


def test_every_vector_has_one_rank_and_none_lies_twice() -> None:
    for total in (1, 63, 128, 500, 5000):
        for count in (1, 2, 3, 8):
            x = torch.arange(total)
            every = [VectorShards(total, Ranks(rank, count)).select(x) for rank in range(count)]
            if VectorShards(total, Ranks(0, count)).divided:
                assert torch.equal(torch.cat(every).sort().values, x)
            else:
                assert all(torch.equal(one, x) for one in every)
            layers = [VectorShards(total, Ranks(0, count)).select(part, start) for start, part in _in_parts(x)]
            assert torch.equal(torch.cat(layers), every[0])


def _in_parts(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    start = 0
    for part in x.split(37):
        yield start, part
        start += len(part)


def test_a_tree_of_parts_is_added_in_one_order() -> None:
    parts = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    added = tree_sum(ALONE, 7, lambda part: parts[part], parts[0])
    p = parts
    assert torch.equal(added, ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + p[6]))


def test_every_window_has_one_rank_and_batches_stay_whole() -> None:
    for windows in (1, 5, 24, 50, 131):
        for batch in (1, 2, 7):
            for count in (1, 2, 3, 8):
                every = [Shards(windows, batch, Ranks(rank, count)) for rank in range(count)]
                chunks = [one.chunks(slice(0, windows)) for one in every]
                rows = sorted(row for one in chunks for part in one for row in range(part.start, part.stop))
                assert rows == list(range(windows))
                assert all(part.start % batch == 0 for one in chunks for part in one)
                assert every[0].count <= SHARDS
                for shards, mine in zip(every, chunks, strict=True):
                    places = [row for part in mine for row in range(windows)[shards.local(part)]]
                    if count > 1:
                        assert places == list(range(shards.local_windows))
                if windows * count > 24 * batch * count:  # there are as many shards for each
                    loads = [len(one) for one in chunks]
                    assert max(loads) - min(loads) <= 1


@dataclass
class Batch:
    rows: slice


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 24])
def test_work_is_dealt_out_evenly(ranks: int) -> None:
    """The paper's windows on a GPU: 112 batches of two to be fitted on, 16 held out. No rank has a batch more of either
    than another, nor of both, and with 2, 4 or 8 all have the same.
    """
    every = [Shards(256, 2, Ranks(rank, ranks), 224) for rank in range(ranks)]
    for rows in (slice(0, 224), slice(224, 256), slice(0, 256)):
        loads = [sum(part.stop - part.start for part in one.chunks(rows)) for one in every]
        assert sum(loads) == rows.stop - rows.start
        assert max(loads) - min(loads) <= (0 if ranks in (1, 2, 4, 8) else 2), rows


@given(st.integers(1, 90), st.integers(1, 5), st.integers(0, 90), st.integers(1, 24))
def test_every_window_has_one_rank_whatever_is_held_out(windows: int, batch: int, train: int, count: int) -> None:
    assume(count <= Shards(windows, batch).most_ranks)
    train = min(train, windows)
    every = [Shards(windows, batch, Ranks(rank, count), train) for rank in range(count)]
    assert [one.most_ranks for one in every] == [min(24, -(-windows // batch))] * count
    chunks = [one.chunks(slice(0, windows)) for one in every]
    assert all(chunks)  # no rank is idle
    rows = sorted(row for one in chunks for part in one for row in range(part.start, part.stop))
    assert rows == list(range(windows))
    spans = [every[0].span(shard) for shard in range(every[0].count)]
    assert [row for one in spans for row in range(one.start, one.stop)] == rows
    assert [every[0].of(row) for row in rows] == [n for n, one in enumerate(spans) for _ in range(one.start, one.stop)]
    if windows <= 24 * batch:  # a batch is a shard, as without held-out windows
        assert spans == [slice(first, min(first + batch, windows)) for first in range(0, windows, batch)]


def test_shards_come_in_their_order() -> None:
    shards, gathered = Shards(99, 2), ShardSums(Gathered)
    batches = (Batch(rows) for rows in shards.chunks(slice(3, 90)))
    for batch in gathered.over(batches, shards, slice(3, 90), lambda phase: _nothing()):
        gathered.part.tensors.append(torch.arange(batch.rows.start, batch.rows.stop))
    assert torch.cat(gathered.total.tensors).tolist() == list(range(3, 90))


AT_ONCE = (1, 200, 1 << 20)  # bytes of tensors that are sent as one


@dataclass
class Uneven:
    """Sums of every kind: tensors of several dtypes and sizes, none at all, and numbers."""

    rows: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    total: torch.Tensor = field(default_factory=lambda: torch.zeros(5))

    def add(self, rows: slice) -> None:
        self.rows += range(rows.start, rows.stop)
        self.tensors += [torch.full((rows.start % 3, 2), rows.start, dtype=torch.float64), torch.tensor(rows.start > 9)]
        self.total = self.total + torch.arange(5) * 0.1 * rows.stop

    def merge(self, other: Uneven) -> None:
        self.rows += other.rows
        self.tensors += other.tensors
        self.total = self.total + other.total


def passes(ranks: Ranks) -> list[Uneven]:
    """Sums of a pass over some of the windows for each of AT_ONCE."""
    found, shards = [], Shards(99, 2, ranks, 60)
    for at_once in AT_ONCE:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks_module, "SENT_AT_ONCE", at_once)
            sums = ShardSums(Uneven)
            rows = slice(3, 70)
            for batch in sums.over(map(Batch, shards.chunks(rows)), shards, rows, lambda phase: _nothing()):
                sums.part.add(batch.rows)
            found.append(sums.total)
    return found


def exchanged(folder: Path) -> int:
    with joined("cpu") as ranks:
        torch.save(passes(ranks), folder / f"{ranks.rank}.pt")
    return 0


def test_sums_are_those_of_one_process(tmp_path: Path) -> None:
    """Whatever a shard has, where the pass begins and ends, and however much is sent at once."""
    ends = in_ranks(3, lambda: exchanged(tmp_path), tmp_path)
    assert [code for code, _ in ends] == [0] * 3, ends
    right = passes(ALONE)
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for one, other in zip(found, right, strict=True):
            assert one.rows == other.rows == list(range(3, 70))
            assert all(torch.equal(*pair) for pair in zip(one.tensors, other.tensors, strict=True))
            assert [x.dtype for x in one.tensors] == [x.dtype for x in other.tensors]
            assert torch.equal(one.total, other.total)


@dataclass
class Written:
    """How what it sums up was added, in brackets."""

    text: str = ""

    def merge(self, other: Written) -> None:
        self.text = f"({self.text} + {other.text})" if self.text else other.text


@pytest.mark.parametrize(
    ("train", "rows", "how"),
    [
        (None, slice(0, 7), "(((0 + 1) + (2 + 3)) + ((4 + 5) + 6))"),
        (5, slice(0, 7), "((((0 + 1) + 2) + (3 + 4)) + (5 + 6))"),
        (5, slice(0, 5), "(((0 + 1) + 2) + (3 + 4))"),
        (5, slice(4, 6), "(4 + 5)"),
    ],
)
def test_halves_are_added_to_halves(train: int | None, rows: slice, how: str) -> None:
    shards, sums = Shards(7, 1, train=train), ShardSums(Written)
    for batch in sums.over(map(Batch, shards.chunks(rows)), shards, rows, lambda phase: _nothing()):
        sums.part.text = str(batch.rows.start)
    assert sums.total.text == how


@pytest.mark.parametrize(("count", "most"), [(1, 1), (2, 1), (3, 4), (4, 1), (6, 3), (8, 1), (12, 2), (24, 1)])
def test_ranks_send_few_sums_of_many_shards(count: int, most: int) -> None:
    sent = []

    class Listening(Ranks):
        def exchange(self, values: Any) -> Any:
            sent.append(len(values))
            return [list(values)]

    for rank in range(count):
        shards, sums = Shards(256, 2, Listening(rank, count), 224), ShardSums(Written)
        rows = slice(0, 224)
        with suppress(ValueError):  # what others sent is missing
            for batch in sums.over(map(Batch, shards.chunks(rows)), shards, rows, lambda phase: _nothing()):
                sums.part.text = str(batch.rows.start)
    assert len(sent) == count and max(sent) == most


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_more_processes_than_batches_are_refused(model: Any) -> None:
    ids = torch.cat((TEXT.train, TEXT.holdout))
    line = "5 ranks for 4 batches of windows: give --nproc-per-node 4 or less"
    with pytest.raises(UsageError, match=line):
        Capture(model, ids, device="cpu", batch=2, ranks=Ranks(0, 5))
    with pytest.raises(UsageError, match=line):
        evaluate(model, ids, {}, batch=2, ranks=Ranks(0, 5))
    with pytest.raises(UsageError, match="32 ranks: windows are shared by 24 at most; start 24 ranks or less"):
        Capture(model, ids[:1].expand(30, -1), device="cpu", batch=1, ranks=Ranks(0, 32))


def leaves_and_is_terminated() -> int:
    leave = torch.distributed.destroy_process_group

    def leave_slowly() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        leave()

    torch.distributed.destroy_process_group = leave_slowly
    try:
        with joined("cpu"):
            raise UsageError("wrong")
    except UsageError:
        return 7  # and prints its line
    return 0


def test_a_rank_that_fails_is_not_ended_before_it_prints(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to all ranks when one has ended, and once more when they do not end at once."""
    assert in_ranks(1, leaves_and_is_terminated, tmp_path) == [(7, "")]


@pytest.mark.parametrize("words", [("plan", "--model", "tiny"), ("names",)])
def test_a_command_that_is_not_spread_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    done = kvcal(*words)
    line = f"kvcal: `kvcal {words[0]}` is not spread over processes, and torchrun started 2: start it without torchrun"
    assert (done.code, done.complaint) == (2, line)
    monkeypatch.setenv("RANK", "1")
    waited: list[float] = []  # or torchrun might end rank 0 before it prints
    monkeypatch.setattr("kvcal.cli.launched.time.sleep", waited.append)
    done = kvcal(*words)
    assert (done.code, done.err, sum(waited) >= 10) == (2, "", True)


def test_what_shares_a_tensor_shares_it_where_it_is_sent() -> None:
    """Or grids of all layers take their bytes once for each layer, on ranks that did not fit them."""
    grid, other = torch.arange(4.0), torch.arange(4.0)
    data, tensors = _packed({"k": grid, "v": grid.view(4), "some": grid[:2], "other": other})
    assert [x.tolist() for x in tensors] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    received = _Unpickler(io.BytesIO(data), [x.clone() for x in tensors]).load()
    assert received["k"] is received["v"] and received["other"] is not received["k"]


SECONDS = 3  # that ranks wait


def broken(how: str) -> int:
    """What becomes of rank 0 where rank 1 ends, hangs, differs, or is not there at all."""
    os.environ["KVCAL_RANK_TIMEOUT"] = f"{SECONDS}"
    if how == "absent" and os.environ["RANK"] == "1":
        time.sleep(2 * SECONDS)
        return 1
    try:
        with joined("cpu") as ranks:
            if how == "differs":
                ranks.check_same({"text": "b" if ranks.rank else "a", "seed": 0})
            if ranks.rank:
                if how == "ends":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(2 * SECONDS)
            ranks.meet()
    except KVCalError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("ends", "rank 1 of 2 ended; torchrun's report says why"),
        pytest.param(
            "absent",
            f"rank 1 of 2 did not come within {SECONDS} s (KVCAL_RANK_TIMEOUT): it hangs, or has ended",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hangs",
            f"rank 1 of 2 did not come within {SECONDS} s (KVCAL_RANK_TIMEOUT): it hangs, or has ended",
            marks=pytest.mark.slow,
        ),
        ("differs", 'rank 1 has text "b", rank 0 has "a": all ranks need the same texts, models, versions and devices'),
    ],
)
def test_one_rank_says_what_is_wrong_with_another(tmp_path: Path, agent: int, how: str, line: str) -> None:
    ends = in_ranks(2, lambda: broken(how), tmp_path, timeout=20, port=agent)
    told = [text for _, text in ends if text and not text.startswith("LinePrintedError")]
    assert ends[0][0] == 1
    assert any(line in text for text in told), ends
    if how == "differs":
        assert [code for code, _ in ends] == [1, 1]
        assert len(told) == 1, ends


def late(hanging: int) -> int:
    """One rank of three hangs; rank 1 comes before the others that come."""
    os.environ["KVCAL_RANK_TIMEOUT"] = f"{SECONDS}"
    try:
        with joined("cpu") as ranks:
            ranks.meet()
            time.sleep({hanging: 4 * SECONDS, 1: 0}.get(ranks.rank, SECONDS / 2))
            if ranks.rank != hanging:
                ranks.meet()
    except KVCalError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 2])
def test_the_rank_that_hangs_is_named_whichever_waits_longest(tmp_path: Path, agent: int, hanging: int) -> None:
    """Of the others only rank 0 knows who is missing: rank 1 has waited longer, and must not end before it says so."""
    ends = in_ranks(3, lambda: late(hanging), tmp_path, timeout=20, port=agent)
    lines = [line for _, text in ends for line in text.splitlines() if line.startswith("RankEndedError")]
    limit = f"{2 * SECONDS} s (twice KVCAL_RANK_TIMEOUT)" if hanging == 0 else f"{SECONDS} s (KVCAL_RANK_TIMEOUT)"
    line = f"rank {hanging} of 3 did not come within {limit}: it hangs, or has ended"
    assert lines == [f"RankEndedError: {line}"], ends


def squared(number: int) -> int:
    if number > 3:
        raise UsageError(f"{number} is too large")
    return number**2


def attempt(number: int) -> int:
    """The first attempt loses rank 1 once both have met; the second is started as torchrun's agent restarts."""
    os.environ["KVCAL_RANK_TIMEOUT"] = "20"
    try:
        with joined("cpu") as ranks:
            ranks.meet()
            if number == 0 and ranks.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            print(ranks.agree(f"attempt {number}, {ranks.count} ranks"))
            for square in spread(ranks, range(9), squared):
                print(square)
    except KVCalError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


def test_processes_that_were_restarted_do_not_meet_the_dead(tmp_path: Path, agent: int) -> None:
    """As after `torchrun --max-restarts`: the agent's store holds what the first attempt wrote."""
    ends = in_ranks(2, lambda: attempt(0), tmp_path, port=agent)
    assert [code for code, _ in ends] == [1, -signal.SIGKILL], ends
    assert "rank 1 of 2 ended; torchrun's report says why" in ends[0][1]
    for count in (2, 3):  # rank 0 of before may be another node's now, and there may be more
        ends = in_ranks(count, lambda: attempt(1), tmp_path, port=agent)
        lines = {text.replace("LinePrintedError", "UsageError") for _, text in ends}
        assert lines == {f"attempt 1, {count} ranks\n0\n1\n4\n9\nUsageError: 4 is too large\n"}
        assert sum("LinePrintedError" in text for _, text in ends) == count - 1, ends
