"""VQKV: trainers on data of known structure, the command's bytes whatever interrupts it, and what a cache makes of
them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from kvcal.calibrate.codebooks import Run, TrainPart
from kvcal.calibrate.sampled_vectors import Sample, collect
from kvcal.calibrate.stage_checkpoint import StageCheckpoint, _parts
from kvcal.capture.ranks import Ranks
from kvcal.capture.scan import Capture, WholeModel
from kvcal.methods import METHODS, codebooks
from kvcal.methods.codebooks import (
    TRAINERS,
    Adam,
    ClosedForm,
    StageReport,
    Training,
    distinct_codewords,
    holdout_error,
    last_fall,
    train_stage,
)
from kvcal.methods.hashing import hashed_normal, spread
from kvcal.methods.training_vectors import TrainingVectors, subtract
from kvcal.methods.vqkv import (
    SIZES,
    VQKV,
    band_split,
    default_sizes,
    head_scale,
    quantisers,
    reconstruction_errors,
    searches,
)
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import ResidualVQ, Shape
from kvcal_artifacts.codecs.residual_vq import no_codewords
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.files import Content, write_atomically
from kvcal_kernels.residual_vq.nearest import nearest
from tests.support.models_fixture import ROOT, SUFFIX, Done, killed_at, kvcal, write_model, write_text

# Data: directions of unlike variance, and clusters, as keys and values have them.


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(n: int, d: int = 16, seed: int = 0) -> Tensor:
    centre = torch.randint(0, 40, (n,), generator=torch.Generator().manual_seed(seed))
    return (normal(40, d, seed=99)[centre] * 2 + normal(n, d, seed=seed)) * torch.linspace(2, 0.2, d)


def trained(x: Tensor, held: Tensor, stages: int, size: int, training: Training) -> list[StageReport]:
    """A residual quantiser's reports; x and held become residuals."""
    energy, reports = float(held.double().square().sum()), []
    for stage in range(stages):
        book, report = train_stage(TrainingVectors.of(x), held, energy, stage, size, f"test:{stage}", training)
        report.used = subtract(x, book)
        subtract(held, book)
        reports.append(report)
    return reports


@pytest.fixture(scope="module")
def errors() -> dict[str, list[StageReport]]:
    return {
        name: trained(vectors(6000), vectors(2000, seed=1), 3, 64, Training(name, batch=1024, rate=5e-3, seed=0))
        for name in TRAINERS
    }


@pytest.mark.parametrize("name", TRAINERS)
def test_every_stage_lowers_the_error(errors: dict[str, list[StageReport]], name: str) -> None:
    found = [report.error for report in errors[name]]
    assert 0.8 > found[0] > found[1] > found[2] > 0
    for report in errors[name]:
        assert Training().least <= report.iterations <= Training().most
        assert 32 <= report.used <= 64


def test_free_codewords_do_better_than_projected_ones(errors: dict[str, list[StageReport]]) -> None:
    """docs/lab/methods.md: hence k-means is the default."""
    last = {name: reports[-1].error for name, reports in errors.items()}
    assert last["k-means"] < 0.8 * min(last["closed-form"], last["adam"])


def test_more_stages_help_more_than_larger_codebooks() -> None:
    """VQKV Table 4 in shape: eight stages of 32 hold as many numbers as two of 128 or one of 256."""
    found = {}
    for stages, size in ((8, 32), (2, 128), (1, 256)):
        reports = trained(vectors(4000), vectors(1000, seed=1), stages, size, Training("k-means"))
        found[stages] = reports[-1].error
    assert found[8] < 0.5 * found[2] < 0.5 * found[1]


@pytest.mark.parametrize("name", TRAINERS)
def test_training_is_repeatable_and_leaves_its_data_alone(name: str) -> None:
    x, held = vectors(700), vectors(100, seed=1)
    kept, training, wrapped = x.clone(), Training(name, least=2, most=2), TrainingVectors.of(x)
    with torch.random.fork_rng():
        first, _ = train_stage(wrapped, held, 1.0, 0, 32, "a", training)
        torch.rand(7)  # nothing is drawn from torch's generator
        again, _ = train_stage(wrapped, held, 1.0, 0, 32, "a", training)
    assert torch.equal(first, again)
    assert torch.equal(x, kept)
    assert not torch.equal(train_stage(wrapped, held, 1.0, 0, 32, "b", training)[0], first)


def test_stopping_rule() -> None:
    """The first iteration from `least` on that gains less than the tolerance is the last."""
    held, gains = vectors(50), [0.5, 0.005, 0.3, 0.2, 0.1, 0.009, 0.5]

    class Scripted:
        reseeded = 0

        def __init__(self, *args: Any) -> None:
            self.left, self.turn = 1.0, 0

        def start(self, x: Tensor) -> Tensor:
            return torch.zeros(2, 16)

        def improve(self, x: Tensor, book: Tensor) -> Tensor:
            self.left *= 1 - gains[self.turn]
            self.turn += 1
            return book

    def error(held: Tensor, book: Tensor, energy: float, ranks: Ranks) -> float:
        return made[-1].left if made else 1.0

    made: list[Any] = []

    def build(*args: Any) -> Any:
        made.append(Scripted())
        return made[-1]

    patch = pytest.MonkeyPatch()
    patch.setitem(TRAINERS, "k-means", build)
    patch.setattr(codebooks, "holdout_error", error)
    with patch.context():
        report = train_stage(TrainingVectors.of(held), held, 1.0, 0, 2, "x", Training("k-means"))[1]
        patch.undo()
    assert report.iterations == 6


def test_closed_form_solves_the_least_squares_problem() -> None:
    """W against torch's solver on the vectors themselves, one row a vector, in float64."""
    x, trainer = vectors(900), ClosedForm(32, "w", Training())
    book = trainer.start(TrainingVectors.of(x)).half()
    codes = nearest(x, book).long()
    chosen = trainer.frozen[codes].double()
    trainer.improve(TrainingVectors.of(x), book)
    direct = torch.linalg.lstsq(chosen, x.double()).solution.T
    assert torch.allclose(trainer.w, direct, rtol=1e-5, atol=1e-6)


def test_adam_follows_the_gradient_of_the_papers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 4 with autograd: |x - x̂|^2 + beta |q - sg(x)|^2 + gamma |x - sg(q)|^2, x̂ = W q and q standing for W q."""
    monkeypatch.setattr(codebooks, "ADAM_STEPS", 1)
    x, training = vectors(64), Training("adam", beta=0.7, gamma=0.3, batch=8)
    trainer = Adam(16, "a", training)
    book = trainer.start(TrainingVectors.of(x)).half()
    before = trainer.w.detach().clone().requires_grad_()
    seen: list[Tensor] = []
    monkeypatch.setattr(trainer.optimiser, "step", lambda: seen.append(trainer.w.grad.clone()))  # type: ignore[union-attr]
    trainer.improve(TrainingVectors.of(x), book)
    part = x[spread(64, 8, "a:batch:0")] / trainer.scale
    codes = nearest(part, (trainer.frozen @ before.detach().T).half()).long()
    made = trainer.frozen[codes] @ before.T
    loss = (part - made).square() + 0.7 * (made - part).square() + 0.3 * (part - made.detach()).square()
    loss.sum(-1).mean().backward()
    assert before.grad is not None
    assert torch.allclose(seen[0], before.grad, rtol=1e-4, atol=1e-6)


def test_adams_stages_start_near_where_they_end() -> None:
    """Its first codewords already leave less than the vectors, and its stages end near the closed form's, the minimum
    it walks to: from the identity 100 steps of rate 1e-3 gain too little, and the stopping rule ends a stage there.
    """
    x, held = vectors(6000), vectors(2000, seed=1)
    energy = float(held.double().square().sum())
    start = Adam(64, "start", Training("adam")).start(TrainingVectors.of(x)).half()
    assert holdout_error(held, start, energy) < 0.6
    ends = {name: trained(x.clone(), held.clone(), 2, 64, Training(name))[-1].error for name in ("closed-form", "adam")}
    assert ends["adam"] < 1.05 * ends["closed-form"]


@pytest.mark.parametrize("name", ["k-means", "closed-form"])
def test_dead_codewords_are_seeded_again(name: str) -> None:
    """Half of the first codewords lie where no vector is."""
    x = vectors(3000)
    trainer = TRAINERS[name](64, "dead", Training(name))
    book = trainer.start(TrainingVectors.of(x))
    book[::2] = 1000.0
    if isinstance(trainer, ClosedForm):
        trainer.frozen[::2] = torch.linalg.solve(trainer.w + 1e-3 * torch.eye(16), book[::2].double().T).T.float()
    made = trainer.improve(TrainingVectors.of(x), book.half())
    assert trainer.reseeded >= 32
    assert len(nearest(x, made.half()).unique()) > 48
    assert holdout_error(x, made.half(), 1.0) < holdout_error(x, book.half(), 1.0)


def test_too_few_kinds_of_vectors() -> None:
    """Constant data: one codeword does it, the error is float16's, and nothing breaks."""
    for value in (0.0, 0.3):
        x = torch.full((300, 8), value)
        for name in TRAINERS:
            training = Training(name, least=1, most=1 if name == "adam" else 6)
            report = trained(x.clone(), x.clone(), 2, 16, training)[-1]
            assert report.error <= (0.5 if name == "adam" else 1e-6) or value == 0.0


def test_codewords_of_few_kinds_become_others_and_err_no_more() -> None:
    x = vectors(500)
    for name, book in {
        "zeros": torch.zeros(32, 16),
        "one": x[:1].expand(32, 16),
        "twelve": x[torch.arange(32) % 12],
        "small": x[:32] * 1e-7,
    }.items():
        made = distinct_codewords(book.half(), "few")
        assert no_codewords(book.half()) and not no_codewords(made), name
        assert len(made.unique(dim=0)) == 32, name
        assert holdout_error(x, made, 1.0) <= holdout_error(x, book.half(), 1.0) * (1 + 1e-6), name
        assert torch.equal(distinct_codewords(made, "few"), made)
    kept = distinct_codewords(x[torch.arange(32) % 12].half(), "few")
    assert torch.equal(kept[:12], x[:12].half())
    zeros = distinct_codewords(torch.zeros(4, 16).half(), "zeros")
    assert float(zeros[nearest(x[:9] * 0, zeros).long()].abs().max()) == 0
    with pytest.raises(UsageError, match="of 65536 codewords differ, needs 32769; give smaller codebooks"):
        distinct_codewords(torch.zeros(65536, 1).half(), "narrow")


# Numbers without a generator.


def test_hashed_numbers_are_normal_and_fixed() -> None:
    x = hashed_normal(20_000, 16, "a")
    assert abs(float(x.mean())) < 0.01
    assert float(x.square().mean()) == pytest.approx(1, abs=0.01)
    assert float(x.double().pow(4).mean()) == pytest.approx(3, abs=0.05)
    assert abs(float((x * hashed_normal(20_000, 16, "b")).mean())) < 0.01
    digest = hashlib.sha256(hashed_normal(64, 16, "a").numpy().tobytes()).hexdigest()
    assert digest[:16] == "3e682b4d2ab76fac", "the frozen codebooks of every bundle change with this"


@pytest.mark.parametrize(("population", "count"), [(1, 1), (7, 7), (1000, 30), (10, 0), (4096, 4096)])
def test_spread_numbers_are_different(population: int, count: int) -> None:
    found = spread(population, count, "x").tolist()
    assert len(set(found)) == count
    assert all(0 <= i < population for i in found)
    with pytest.raises(ValueError, match="different numbers"):
        spread(population, population + 1, "x")


# Bands and scales.


def test_the_worst_pairs_form_the_high_band() -> None:
    error = torch.tensor([0.1, 0.9, 0.2, 0.0, 0.1, 0.1, 0.9, 0.0], dtype=torch.float64)
    energy = torch.ones(8, dtype=torch.float64)
    assert band_split(error, energy, 4, 8, "absolute") == [[0, 3, 4, 7], [1, 2, 5, 6]]  # pairs (i, i + 4)
    assert band_split(error, energy * torch.tensor([1, 100, 1, 1, 1, 100, 1, 1]), 2, 8, "relative")[1] == [2, 6]
    assert band_split(error, energy, 3, 4, "absolute")[1] == [
        1,
        3,
        6,
    ]  # partial RoPE: pairs (0, 2), (1, 3), then singles
    assert band_split(error, energy, 0, 8, "absolute") == [list(range(8))]
    with pytest.raises(UsageError, match=r"--high-dims 3.*must be even"):
        band_split(error, energy, 3, 8, "absolute")


def test_the_band_split_finds_what_is_badly_reconstructed() -> None:
    """Dimensions 5 and 13 are noise of little energy, which a quantiser of the whole leaves alone."""
    x = vectors(4000)
    x[:, [5, 13]] = 0.3 * normal(4000, 2, seed=8)
    error, energy = reconstruction_errors(TrainingVectors.of(x[:3000]), x[3000:].float(), "bands", Training())
    assert band_split(error, energy, 2, 16, "relative")[1] == [5, 13]


def test_scales() -> None:
    square = torch.tensor([[4.0, 4.0, 16.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    queries = torch.tensor([[1.0, 4.0, 0.25, 1.0], [1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    head = head_scale("head", square, queries)
    channel, query = head_scale("channel", square, queries), head_scale("query", square, queries)
    assert head is not None and channel is not None and query is not None
    assert head_scale("none", square, queries) is None
    assert head[0].tolist() == [pytest.approx(6**0.5, rel=1e-3)] * 4
    assert channel[0].tolist()[:3] == [2.0, 2.0, 4.0]
    assert query[0].tolist() == [1.0, 0.5, 2.0, 1.0]
    assert bool((channel > 0).all()) and float(query[1, 1]) > 100
    assert torch.equal(head_scale("query", square, None), head)  # type: ignore[arg-type]


def test_an_outlier_channel_and_one_that_queries_hardly_see_are_distinct_codewords() -> None:
    """As in Gemma-3-270M: the largest codeword of one channel times the scale of another is no key that there is."""
    keys, queries = normal(4096, 16, seed=1), torch.ones(1, 16, dtype=torch.float64)
    keys[:, 3] = 75 + 5 * keys[:, 3]
    queries[0, 3], queries[0, 9] = 26.0**2, 1e-6
    scale = head_scale("query", keys.double().square().mean(0, keepdim=True), queries)
    assert scale is not None
    x, rest, books = TrainingVectors.of(keys / scale.float()), keys[:512] / scale.float(), []
    for stage in range(3):
        book, _ = train_stage(x, rest, 1.0, stage, 64, f"gemma:{stage}", Training(most=5))
        x.subtract(book)
        subtract(rest, book)
        books.append(book)
    largest = float(torch.stack(books).abs().amax((1, 2)).sum() * scale.max())
    assert largest > 65504  # what was refused
    shape = Shape(1, 16, 8)
    codec = ResidualVQ(shape, "key", [range(16)], [torch.stack(books)], scale)
    again = ResidualVQ.from_state(shape, "key", codec.config(), codec.tensors())
    made = again.decode(again.encode(keys[None, None]))
    assert float((made - keys).square().sum()) < 0.01 * float(keys.square().sum())
    too_large = codec.tensors() | {"scale": scale.clone()}
    too_large["scale"][0, 3] = 100.0
    with pytest.raises(KVCalError, match=r"codebooks.0: codewords add up to \S+ in channel 3, must stay below 65504"):
        ResidualVQ.from_state(shape, "key", codec.config(), too_large)


def test_presets_are_the_papers() -> None:
    """Codes, Eq. 12's 82.8 %, 2.625 and 2.75 bits, and the parameters that Table 4 states (W included)."""
    found = {}
    for name, bits in (("8b", 2.625), ("3b", 2.75)):
        sizes = SIZES[name]
        method = VQKV(sizes.stages, sizes.sizes, sizes.high_for(128), sizes.vectors)
        assert method.paper_compression(128) == pytest.approx(0.828, abs=1e-3)
        coded = sum(stages * (size.bit_length() - 1) for stages, size in quantisers(method).values())
        assert coded / 256 == bits
        dims = {"value": 128, "low": 80, "high": 48}
        found[name] = sum(s * (k * dims[q] + dims[q] ** 2) for q, (s, k) in quantisers(method).items()) / 1e6
    assert found["8b"] == pytest.approx(184.85, abs=0.01)
    assert [default_sizes(int(n)) for n in (8.03e9, 3.2e9, 1.2e9, 1e7)] == ["8b", "3b", "medium", "small"]
    for name, sizes in SIZES.items():
        for dim in (64, 96, 256):
            stages = sizes.stages_for(dim)
            assert [s / dim for s in stages] == pytest.approx([s / 128 for s in sizes.stages], abs=0.5 / dim + 1e-9), (
                name
            )
            assert sizes.high_for(dim) == dim * 48 // 128


# The command.

LAYERS, HEADS, DIM = 4, 2, 16
OPTIONS = [
    "--windows", 8, "--length", 68, "--sink", 4, "--recent", 16, "--block", 8, "--vectors", 1500,
    "--stages", "3,2,2", "--sizes", "32,16,8",
]  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    base = tmp_path_factory.mktemp("vqkv")
    return ["--model", write_model(base / "small", LAYERS), "--text", write_text(base / "words.txt")]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / f"x{SUFFIX}"


def train(given: list[object], output: Path, *options: object) -> Done:
    return kvcal("train-codebooks", *given, *OPTIONS, "--output", output, "--json", *options)


def good(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(done.json)


@pytest.fixture(scope="module")
def usual(given: list[object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return good(train(given, tmp_path_factory.mktemp("usual") / f"usual{SUFFIX}"))


@pytest.fixture(scope="module")
def model(given: list[object]) -> Any:
    return load_model(resolve(str(given[1])), dtype="float32", device="cpu").model


def checkpoints(output: Path) -> list[Path]:
    return sorted((output.parent / f".{output.name}.partial").glob("*-*.safetensors"))


def without_times(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result["stage_rows"]]


def test_the_same_command_gives_the_same_bytes(given: list[object], usual: dict[str, Any], output: Path) -> None:
    again = good(train(given, output))
    assert again["sha256"] == usual["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert without_times(again) == without_times(usual)
    assert [entry.name for entry in output.parent.iterdir()] == [output.name]
    assert good(train(given, output, "--seed", 1))["sha256"] != usual["sha256"]


def test_what_it_reports(usual: dict[str, Any]) -> None:
    assert [(row["quantiser"], row["stage"]) for row in usual["stage_rows"]] == [
        *(("value", i) for i in range(3)), *(("low", i) for i in range(2)), *(("high", i) for i in range(2)),
    ]  # fmt: skip
    assert usual["bits_per_value"] == round((3 * 5 + 2 * 4 + 2 * 3) / 32, 4)
    assert usual["paper_bits_per_value"] == 16 * 7 / 32
    assert usual["paper_compression"] == 1 - 7 / 32
    assert usual["codebook_bytes"] == 2 * (3 * 32 * 16 + 2 * 16 * 10 + 2 * 8 * 6) + LAYERS * 2 * HEADS * DIM * 2
    assert usual["train_vectors"] == 1500
    assert usual["peak_bytes"] > 0
    for row in usual["stage_rows"]:
        assert row["iterations"] >= 5
        assert 0 < row["used"] <= 32


def test_codebooks_are_shared_in_the_file_and_in_memory(usual: dict[str, Any]) -> None:
    bundle = load_bundle(usual["bundle"])
    again = {pair.value.tensors()["codebooks.0"].data_ptr() for pair in bundle.scheme.layers if pair}
    assert len(again) == 1
    assert bundle.scheme.resident_bytes() == usual["codebook_bytes"]
    there = [bundle.scheme.on(i, torch.device("meta")) for i in range(LAYERS)]
    keys = [pair.key for pair in there]
    assert all(isinstance(key, ResidualVQ) for key in keys)
    assert all(key.tensors()["codebooks.1"] is keys[0].tensors()["codebooks.1"] for key in keys)
    assert usual["bytes"] < 2 * usual["codebook_bytes"] + 40_000  # the header names each tensor once a layer


def test_the_stated_error_is_what_the_codec_does(given: list[object], usual: dict[str, Any], model: Any) -> None:
    """All keys and values of the held-out windows, through encode and decode; the sample holds all of them here."""
    from kvcal.text import token_windows

    tokenizer = load_model(resolve(str(given[1])), dtype="float32", device="cpu").tokenizer
    ids = token_windows.token_windows(tokenizer, str(given[3]), windows=8, holdout=1, length=68, seed=0).holdout
    scheme = load_bundle(usual["bundle"]).scheme
    lost, whole = {"key": 0.0, "value": 0.0}, {"key": 0.0, "value": 0.0}
    with Capture(WholeModel(model), ids, device="cpu") as capture:
        for taps, pair in zip(capture, scheme.layers, strict=True):
            assert pair is not None
            for batch in taps.batches({"k", "v"}, "post_rope"):
                for role, codec, x in (("key", pair.key, batch.k), ("value", pair.value, batch.v)):
                    assert x is not None
                    part = x[:, :, 4:]
                    lost[role] += float((codec.decode(codec.encode(part)) - part).double().square().sum())
                    whole[role] += float(part.double().square().sum())
    for role in ("key", "value"):
        assert usual[f"{role}_relative_error"] == pytest.approx(lost[role] / whole[role], rel=1e-4)


def test_a_cache_runs_it(usual: dict[str, Any], model: Any) -> None:
    ids = torch.arange(1, 81)[None]
    with KVCalCache(load_bundle(usual["bundle"]).scheme, model) as cache, torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        after = model(ids[:, :1], past_key_values=cache).logits
        seen = cache.describe()
    assert bool(torch.isfinite(after).all()) and first.shape[1] == 80
    assert seen["bits_per_value"] == pytest.approx(usual["bits_per_value"], rel=0.01)


@pytest.mark.parametrize(
    "options",
    [["--per-layer"], ["--high-dims", 0], ["--scale", "head"], ["--scale", "none", "--trainer", "closed-form"]],
    ids=lambda options: " ".join(map(str, options)),
)
def test_variants(given: list[object], usual: dict[str, Any], output: Path, options: list[object]) -> None:
    found = good(train(given, output, *options))
    scheme = load_bundle(output).scheme
    assert found["sha256"] != usual["sha256"]
    assert 0 < found["key_relative_error"] < 1 and 0 < found["value_relative_error"] < 1
    books = {pair.key.tensors()["codebooks.0"].data_ptr() for pair in scheme.layers if pair}
    assert len(books) == (LAYERS if "--per-layer" in options else 1)
    bands = [pair.key.config()["bands"] for pair in scheme.layers if pair]
    assert all(len(found) == (1 if 0 in options else 2) for found in bands)
    scaled = [("scale" in pair.key.tensors(), "scale" in pair.value.tensors()) for pair in scheme.layers if pair]
    assert set(scaled) == {(False, False) if "none" in options else (True, True)}


def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    given: list[object], usual: dict[str, Any], output: Path
) -> None:
    arguments = ["train-codebooks", *given, *OPTIONS, "--json", "--output", output]
    killed_at(f"{output.parent}/.*.partial/*-*.safetensors", *arguments, folder=output.parent, number=2)
    assert not output.exists()
    done = checkpoints(output)
    assert len(done) == 2
    damaged = bytearray(done[1].read_bytes())
    damaged[-5] ^= 4
    done[1].write_bytes(damaged)
    again = kvcal(*arguments)
    assert good(again)["sha256"] == usual["sha256"]
    assert again.json["resumed_stages"] == 1
    assert "resuming after 2 stages" in again.err
    assert without_times(again.json) == without_times(usual)
    assert not checkpoints(output)


def test_control_c_keeps_the_checkpoint(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Run._stage

    def some(self: Run, job: str, *args: Any) -> Any:
        if job == "low":
            raise KeyboardInterrupt
        return plain(self, job, *args)

    monkeypatch.setattr(Run, "_stage", some)
    ended = train(given, output)
    monkeypatch.undo()
    assert ended.code == 130
    assert [path.stem for path in checkpoints(output)] == ["value-000", "value-001", "value-002"]
    other = train(given, output.with_name(f"y{SUFFIX}"))
    again = good(train(given, output))
    assert (again["resumed_stages"], again["sha256"]) == (3, usual["sha256"] if good(other) else "")


@pytest.mark.parametrize("after", [0, 2])
def test_a_full_disk_costs_the_resumption_not_the_training(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stages are written by a thread, so that the error comes with the next one."""

    def full(path: Path, data: Content) -> None:
        if "-" in path.name and len(checkpoints(output)) >= after:
            raise OSError(28, "No space left on device")
        write_atomically(path, data)

    monkeypatch.setattr("kvcal.calibrate.stage_checkpoint.write_atomically", full)
    done = train(given, output)
    assert done.err.count("stages are not kept from here on, a killed run trains them again: [Errno 28]") == 1
    assert (good(done)["sha256"], [entry.name for entry in output.parent.iterdir()]) == (usual["sha256"], [output.name])


def test_a_thread_that_does_not_start_holds_nothing_up(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never:
        def __init__(self, **options: Any) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvcal.calibrate.checkpoint.Thread", Never)
    assert good(train(given, output))["sha256"] == usual["sha256"]


def test_a_bundle_that_cannot_be_written_says_where_stages_wait(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Bundle, path: Path) -> str:
        raise KVCalError(f"{path}: cannot be written: No space left on device; nothing was changed there")

    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "write", full)
        ended = train(given, output)
    waiting = output.parent / f".{output.name}.partial"
    assert f"nothing was changed there (stages wait in {waiting}: start again to go on, or delete it)" in ended.err
    again = good(train(given, output))
    assert (again["resumed_stages"], again["sha256"]) == (len(usual["stage_rows"]), usual["sha256"])


def test_a_stage_of_another_shape_is_trained_again(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hash of its own: a checkpoint is as untrusted as any file."""
    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "write", lambda self, path: (_ for _ in ()).throw(KVCalError("full")))
        train(given, output)
    first = checkpoints(output)[0]
    with safe_open(first, framework="pt") as file:
        record = json.loads(file.metadata()["stage"])
    book = torch.zeros(8, 3).half()
    forged = {**record, "sha256": hashlib.sha256(book.numpy().tobytes()).hexdigest()}
    save_file({"codewords": book}, first, metadata={"stage": json.dumps(forged)})
    again = good(train(given, output))
    assert (again["resumed_stages"], again["sha256"]) == (len(usual["stage_rows"]) - 1, usual["sha256"])


def test_every_search_is_known_before_training(
    given: list[object], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU their kernels are compiled while layers are read."""
    asked: set[tuple[int, int]] = set()

    def spied(x: Tensor, book: Tensor) -> Tensor:
        asked.add((x.shape[1], len(book)))
        return nearest(x, book)

    monkeypatch.setattr("kvcal.methods.training_vectors.nearest", spied)
    parts: list[TrainPart] = []
    opened = TrainPart.open

    def kept(self: TrainPart, stack: ExitStack) -> None:
        parts.append(self)
        opened(self, stack)

    monkeypatch.setattr(TrainPart, "open", kept)
    good(train(given, output, "--sizes", "256,128,64"))
    [part] = parts
    compiled: list[tuple[int, int, torch.dtype]] = []
    monkeypatch.setattr(
        "kvcal.calibrate.codebooks.compile_for", lambda d, k, dtype, device: compiled.append((d, k, dtype))
    )
    part.scan = replace(part.scan, device=torch.device("cuda", 0))
    with ExitStack() as stack:
        opened(part, stack)
        for _ in range(100):
            if len(compiled) == 2 * len(asked):
                break
            time.sleep(0.05)
    assert asked == searches(part.method, part.shape.dim)
    assert set(compiled) == {(d, k, dtype) for d, k in asked for dtype in (torch.bfloat16, torch.float32)}


def interrupted_in_training(
    given: list[object], output: Path, monkeypatch: pytest.MonkeyPatch, *options: object
) -> Done:
    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_stage", killed)
        ended = train(given, output, *options)
    assert ended.code == 130 and not checkpoints(output)
    return ended


def kept_vectors(output: Path) -> list[Path]:
    return sorted((output.parent / f".{output.name}.partial").glob("vectors.*"))


@pytest.mark.parametrize("scale", [[], ["--scale", "none"]], ids=["head", "none"])
def test_collected_vectors_are_kept(
    given: list[object], output: Path, scale: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is not run again, and the file is the same as in one go."""
    whole = good(train(given, output.with_name(f"whole{SUFFIX}"), *scale))
    ended = interrupted_in_training(given, output, monkeypatch, *scale)
    numbers = 2 * DIM * (whole["train_vectors"] + whole["holdout_vectors"]) * 4
    size = sum(path.stat().st_size for path in kept_vectors(output))
    assert len(kept_vectors(output)) == LAYERS and numbers < size < 1.5 * numbers
    assert f"vectors of all {LAYERS} layers, " in ended.err and " MB, wait in " in ended.err
    monkeypatch.setattr(
        "kvcal.calibrate.driver.Capture", lambda *args, **kwargs: pytest.fail("the model was run again")
    )
    again = train(given, output, *scale)
    assert good(again)["sha256"] == whole["sha256"]
    assert f"resuming with the vectors of all {LAYERS} layers" in again.err and not kept_vectors(output)


@pytest.mark.parametrize("damage", ["missing", "cut off", "a bit"])
def test_damaged_vectors_are_collected_again(
    given: list[object], usual: dict[str, Any], output: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_in_training(given, output, monkeypatch)
    path = kept_vectors(output)[2]
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content if damage == "a bit" else content[:-9])
    if damage == "missing":
        path.unlink()
    again = train(given, output)
    assert good(again)["sha256"] == usual["sha256"] and "resuming" not in again.err


def test_a_model_with_a_nan_leaves_nothing(given: list[object], tmp_path: Path) -> None:
    broken, output = write_model(tmp_path / "broken", LAYERS), tmp_path / "out" / f"x{SUFFIX}"
    output.parent.mkdir()
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.2.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    ended = train([*given, "--model", broken], output)
    assert ended.code == 1 and "layer 2, key head 0: NaN" in ended.err and list(output.parent.iterdir()) == []


def test_a_disk_without_room_for_vectors_costs_only_them(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcal.calibrate.codebooks.shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    ended = interrupted_in_training(given, output, monkeypatch)
    assert "note: vectors are not kept" in ended.err and "half of the 0 MB free" in ended.err
    assert not kept_vectors(output) and good(train(given, output))["sha256"] == usual["sha256"]


def test_the_guard_comes_before_the_bundle(
    given: list[object], usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guard(source: Any, ids: torch.Tensor, schemes: dict[str, Any], device: Any, **other: Any) -> list[str]:
        assert list(schemes) == ["x"] and ids.shape == (1, 68)
        if not output.with_suffix(".go").exists():
            raise NonFiniteError("layer 2, key head 0: NaN or infinity in window 0")
        return ["warning: x will break"]

    monkeypatch.setattr("kvcal.calibrate.outlier_guard.warnings", guard)
    ended = train(given, output)
    assert ended.code == 1 and "layer 2, key head 0" in ended.err and not output.exists()
    output.with_suffix(".go").touch()
    again = train(given, output)
    assert good(again)["sha256"] == usual["sha256"] and "warning: x will break" in again.err
    assert again.json["resumed_stages"] == len(again.json["stage_rows"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--trainer", "lloyd"], "--trainer lloyd: allowed are k-means, closed-form, adam"),
        (["--sizes", "32,16"], "--sizes '32,16': three numbers"),
        (["--sizes", "32,16,12"], "three powers of two from 2 to 65536"),
        (["--stages", "3,0,2"], "three numbers of at least 1"),
        (["--vectors", 20], "--vectors 20: a codebook of 32 codewords needs at least as many"),
        (["--high-dims", 16], "--high-dims 16: a head has 16"),
        (["--high-dims", 5], "--high-dims 5: RoPE pairs stay together"),
        (["--preset", "70b"], "--preset '70b': allowed are 8b, 3b, medium, small"),
        (["--scale", "row"], "--scale row: allowed are none, head, channel, query"),
        (["--split-by", "size"], "--split-by size: allowed are relative, absolute"),
        (["--frame", "rope"], "--frame rope: allowed are pre_rope, post_rope"),
        (["--tolerance", 0], "--tolerance 0: must lie between 0 and 1"),
        (["--min-iterations", 60], "--min-iterations 60, --max-iterations 50: needs 1 <= min <= max"),
        (["--sink", 80], "windows of 68 tokens are all sink"),
        (["--vectors", 100000, "--sizes", "32768,16,16"], "vectors for codebooks of 32768 codewords: give more"),
        (["--vectors", 1500, "--per-layer", "--sizes", "512,16,16"], "375 vectors a layer for codebooks of 512"),
    ],
)
def test_errors_are_one_line(given: list[object], output: Path, options: list[object], complaint: str) -> None:
    done = train(given, output, *options)
    lines = [line for line in done.err.splitlines() if not line.startswith(("text: ", "note: "))]
    assert done.code == 1 or done.code == 2
    assert len(lines) == 1 and lines[0].startswith("kvcal: ") and complaint in lines[0], done.err
    assert not output.exists()


@pytest.mark.parametrize("options", [["--vectors", 100000, "--sizes", "32768,16,16"], ["--sink", 80]], ids=str)
def test_too_few_vectors_are_noticed_before_the_model_runs(
    given: list[object], output: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvcal.calibrate.sampled_vectors.Collection.sample", lambda *args: pytest.fail("vectors were collected")
    )
    assert train(given, output, *options).code == 2


@pytest.mark.parametrize("trainer", ["k-means", "closed-form", "adam"])
def test_a_bundle_of_a_text_of_one_word_opens(given: list[object], output: Path, tmp_path: Path, trainer: str) -> None:
    """Before RoPE all keys and values of the first layer are the same: a reader refuses codebooks of one codeword."""
    (tmp_path / "word.txt").write_text("the " * 9000)
    options = ["--per-layer", "--frame", "pre_rope", "--trainer", trainer, "--max-iterations", 5]
    good(train([*given[:2], "--text", tmp_path / "word.txt"], output, *options))
    for layer in load_bundle(output).scheme.layers:
        assert layer is not None
        for codec in (layer.key, layer.value):
            assert isinstance(codec, ResidualVQ)
            assert not any(no_codewords(stage) for book in codec.codebooks for stage in book)


def test_sample_is_of_the_tokens_behind_the_sink(model: Any) -> None:
    """Every key once where all are asked for, none of the sink, layer after layer."""
    ids = torch.randint(1, 250, (5, 20), generator=torch.Generator().manual_seed(3))
    method = VQKV(stages=(1, 1, 1), sizes=(2, 2, 2), high=4, vectors=10**6, scale="none", sink=3)
    with Capture(WholeModel(model), ids, device="cpu", batch=2) as capture:
        found = collect(method, capture, 4, HEADS)
    whole = LAYERS * 4 * HEADS * 17
    assert (found.keys.shape, found.holdout_keys.shape) == ((whole, DIM), (whole // 4, DIM))
    with Capture(WholeModel(model), ids, device="cpu") as capture:
        for taps in capture:
            for batch in taps.batches({"k", "v"}, "post_rope"):
                assert batch.k is not None and batch.v is not None
                here = found.train_of[taps.index]
                assert torch.allclose(found.keys[here], batch.k[:4, :, 3:].reshape(-1, DIM), atol=1e-6)
                held = found.holdout_of[taps.index]
                assert torch.allclose(found.holdout_values[held], batch.v[4:, :, 3:].reshape(-1, DIM), atol=1e-6)
    assert found.rotary == DIM


def test_fit_takes_it_as_any_method(given: list[object], usual: dict[str, Any], model: Any, output: Path) -> None:
    from kvcal.calibrate.driver import fit
    from kvcal.text import token_windows

    loaded = load_model(resolve(str(given[1])), dtype="float32", device="cpu")
    text = token_windows.token_windows(loaded.tokenizer, str(given[3]), windows=8, holdout=1, length=68, seed=0)
    method = METHODS["vqkv"](stages=(3, 2, 2), sizes=(32, 16, 8), high=6, vectors=1500, recent=16, block=8)
    found = fit(
        method, WholeModel(model), text, output, model_record={}, revision=None, device=torch.device("cpu"), seed=0
    )
    assert found.bundle.metrics["key_relative_error"] == usual["key_relative_error"]
    assert found.bundle.scheme.resident_bytes() == usual["codebook_bytes"]


def test_a_checkpoint_reads_back(tmp_path: Path) -> None:
    work = StageCheckpoint(tmp_path / f"x{SUFFIX}", {"a": 1}, True)
    assert work.load("low", 0, (4, 3)) is None
    book, report = normal(4, 3).half(), StageReport(0, 5, 0.25, [0.5, 0.25], 4, 1, 0.5)
    work.keep("low", book, report)
    work.settle()
    again = work.load("low", 0, (4, 3))
    assert again is not None
    assert torch.equal(again[0], book) and again[1] == report


def test_files_of_a_checkpoint_are_as_safetensors_writes_them() -> None:
    """Its `save` holds other threads up, so the parts are put together here."""
    tensors = {
        "keys": normal(5, 3).bfloat16(), "values": normal(5, 3).bfloat16(), "holdout_keys": normal(2, 3),
        "holdout_head": torch.arange(7), "scales.key": normal(1, 3).half(), "none": torch.zeros(0, 3),
    }  # fmt: skip
    metadata = {"stage": '{"a":"\u00e9"}'}
    assert b"".join(_parts(tensors, metadata)) == save(tensors, metadata=metadata)


def test_vectors_are_written_while_the_next_layer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = StageCheckpoint(tmp_path / f"x{SUFFIX}", {}, True)
    sample = Sample(normal(5, 2), normal(5, 2), normal(1, 2), normal(1, 2), torch.zeros(1), {"key": None})
    for layer in range(2):
        work.keep_sample(layer, sample)
    work.settle()
    again = work.sample(1, torch.device("cpu"))
    assert work.has_samples(2) and again is not None and torch.equal(again.keys, sample.keys)

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("kvcal.calibrate.stage_checkpoint.write_atomically", full)
    work.keep_sample(2, sample)
    with pytest.raises(OSError, match="no space left"):
        work.keep_sample(3, sample)
    work.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_errors_by_iteration_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a version before wrote: its stages' reports could not be completed."""
    output = tmp_path / f"x{SUFFIX}"
    with monkeypatch.context() as patch:
        patch.setattr(StageCheckpoint, "VERSION", 1)
        before = StageCheckpoint(output, {}, True)
        before.keep("low", normal(4, 3).half(), StageReport(0, 5, 0.25, [], 4, 1))
        before.settle()
    assert StageCheckpoint(output, {}, True).load("low", 0, (4, 3)) is None
    assert "other settings (stage_report was 1, is 2); starting anew" in capsys.readouterr().err


def stopped_rightly(errors: list[float], training: Training) -> bool:
    """By the rule as docs/lab/methods.md words it, told from the errors alone."""
    falls = [1 - after / before for before, after in itertools.pairwise(errors)]
    small = [number for number, fall in enumerate(falls, 1) if number >= training.least and fall < training.tolerance]
    return len(falls) == (small[0] if small else training.most)


@pytest.mark.parametrize("name", TRAINERS)
def test_errors_of_every_iteration_show_why_a_stage_ended(errors: dict[str, list[StageReport]], name: str) -> None:
    for report in errors[name]:
        assert len(report.errors) == report.iterations + 1
        assert report.error == min(report.errors[1:])
        assert stopped_rightly(report.errors, Training())
        assert not stopped_rightly(report.errors[:-1], Training())
        assert last_fall(report.errors) == 1 - report.errors[-1] / report.errors[-2]


def test_errors_of_every_iteration_are_in_the_bundle(usual: dict[str, Any]) -> None:
    kept = load_bundle(usual["bundle"]).metrics["stages"]
    assert [row["errors"] for row in kept] == [row["errors"] for row in usual["stage_rows"]]
    assert all(len(row["errors"]) == row["iterations"] + 1 and "seconds" not in row for row in kept)


def test_the_scale_report_says_why_each_stage_ended() -> None:
    """docs/ablations/vqkv_scale.py."""
    spec = importlib.util.spec_from_file_location("vqkv_scale", ROOT / "docs" / "ablations" / "vqkv_scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = {"quantiser": "low", "stage": 1, "iterations": 3, "errors": [0.9, 0.6, 0.5, 0.498], "error": 0.498, "used": 7,
           "reseeded": 2, "seconds": 1.23}  # fmt: skip
    metrics = dict.fromkeys(("train_vectors", "holdout_vectors", "bits_per_value", "paper_bits_per_value",
                             "paper_compression", "codebook_bytes"), 1)  # fmt: skip
    result = SimpleNamespace(stages=[row], bundle=SimpleNamespace(metrics=metrics), peak_bytes=0)
    assert "| low | 2 | 3 | 0.9000 | 0.4980 | 0.40% | 7 | 2 | 1.2 |" in list(module.table(result))
