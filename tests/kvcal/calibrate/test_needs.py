"""Too little text is said, in numbers, before the work; and a prediction that is worse than none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.calibrate import needs
from kvcal.calibrate.needs import ADVISED, few_vectors, too_little, worse_than_none
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.innerq import InnerQ
from kvcal.methods.kvtuner import KVTuner
from kvcal.methods.mixkvq import MixKVQ
from kvcal.methods.squat import Squat
from kvcal.methods.vqkv import VQKV
from kvcal.models import catalogue
from kvcal_artifacts.codecs import Shape
from tests.support.architectures import TINY, initialise
from tests.support.models_fixture import kvcal, write_text, write_tokenizer

SHAPE = Shape(2, 16, 32)  # 32 channels a token
GROUP = 3
PLAIN: dict[str, Any] = {"backbone": "higgs-2-wide-debiased", "first_layer": ""}  # learn nothing


def unpredicted(**codecs: Any) -> AquaKV:
    """Of no predictors, and no codecs that learn from text but those given."""
    return AquaKV(**PLAIN | codecs, key_inputs=(), value_inputs=())


@pytest.mark.parametrize(
    ("method", "least", "said"),
    [
        (AquaKV(value_inputs=()), 32, "predictors of keys from k1: {n} tokens for 32 inputs, advised are 128"),
        (AquaKV(key_inputs=()), 64, "predictors of values from v1 and k0: {n} tokens for 64 inputs, advised are 256"),
        (AquaKV(key_inputs=("k1", "v1", "k2"), value_inputs=(), predictor="mlp"), 96, "{n} tokens for 96 inputs"),
        (unpredicted(keys="transform-2"), 16, "codec transform-2: {n} tokens for 16 channels"),
        (unpredicted(keys="higgs-2-wide-balanced"), 16, "codec higgs-2-wide-balanced: {n}"),
        (unpredicted(per_layer=("1=vq-2-k16",)), 8, "codec vq-2-k16: {2n} vectors a layer"),
        (unpredicted(keys="squat-2-calibrated"), 16 / GROUP, "{3n} queries a head"),
        (unpredicted(keys="mixkvq-2.5"), 16, "codec mixkvq-2.5: {n} tokens for 16 channels"),
        (unpredicted(values="transform-2"), 16, "codec transform-2: {n} tokens for 16 channels"),
        (unpredicted(first_layer="higgs-4-wide-balanced"), 16, "codec higgs-4-wide-balanced: {n} tokens"),
        (InnerQ(), 16, "a factor for each key channel: {n} tokens for 16 channels a head, advised are 64"),
        (Squat(rank=5), 16 / GROUP, "subspaces of queries: {3n} queries a head for 16 channels a head, advised are 64"),
        (Squat(search_ranks=(2, 0)), 16 / GROUP, "{3n} queries a head for 16 channels a head"),
    ],
)  # fmt: skip
def test_what_is_fitted_on_too_little_says_so(method: Any, least: float, said: str) -> None:
    """least: tokens that would just determine it; four times as many are enough."""
    enough_of = -(-int(ADVISED * least * GROUP) // GROUP)
    enough_of = next(n for n in range(enough_of, enough_of + 3) if n >= ADVISED * least)
    assert too_little(method, SHAPE, GROUP, enough_of, 1) == []
    assert too_little(method, SHAPE, GROUP, 1, enough_of) == []
    n = enough_of - 1
    [line] = too_little(method, SHAPE, GROUP, 1, n)
    assert line.startswith("warning: too little text: ") and "give more --windows" in line
    assert said.format(n=n, **{"2n": 2 * n, "3n": 3 * n}) in line


@pytest.mark.parametrize(
    "method",
    [
        unpredicted(), AquaKV(**PLAIN, predictor="bias"), unpredicted(values="higgs-2-wide-balanced"),
        unpredicted(per_layer=("0:values=squat-2-calibrated", "1:values=mixkvq-2.5")), InnerQ(factors="none"),
        Squat(subspace="prompt"), MixKVQ(full=8, four=8),
    ],
)  # fmt: skip
def test_what_learns_nothing_by_text_needs_none(method: Any) -> None:
    assert too_little(method, SHAPE, GROUP, 1, 1) == []


def test_the_defaults_factors_need_tokens() -> None:
    """Of both codecs, the first layer's and the others'; their values learn nothing and double no line."""
    lines = too_little(AquaKV(key_inputs=(), value_inputs=()), SHAPE, GROUP, 1, 63)
    assert [line.split("codec ")[1].split(":")[0] for line in lines] == [AquaKV().backbone, AquaKV().first_layer]
    assert too_little(AquaKV(key_inputs=(), value_inputs=()), SHAPE, GROUP, 1, 64) == []


def test_a_choice_on_one_window() -> None:
    [line] = too_little(KVTuner(), SHAPE, GROUP, 1, 1000)
    assert "bits of each layer chosen on one window" in line
    assert too_little(KVTuner(), SHAPE, GROUP, 2, 1000) == []


def test_codebooks_with_few_vectors() -> None:
    method = VQKV(sizes=(16, 256, 64), vectors=5000)
    assert few_vectors(method, 1024) == []
    [line] = few_vectors(method, 1023)
    assert "codebooks of all layers: 1,023 vectors for 256 codewords, advised are 1,024" in line
    assert "codebooks of a layer" in few_vectors(VQKV(sizes=(16, 256, 64), vectors=5000, shared=False), 300)[0]


def test_worse_than_no_prediction() -> None:
    assert worse_than_none("x", [None, 0.0, 0.9]) is None
    line = worse_than_none("predicted keys", [None, -0.5, 0.9, -3.7])
    assert line is not None
    assert "predicted keys: held-out explained variance is below 0 in layers 1, 3 (lowest -3.7)" in line
    assert "in layer 2 (" in str(worse_than_none("x", [None, 0.1, -1.0]))
    assert ", ... (lowest" in str(worse_than_none("x", [-1.0] * 40))


def test_probes_worse_than_no_prediction_are_one_line() -> None:
    assert needs.probes_worse_than_none({"a": [0.1, None], "b": [None]}) is None
    assert "warning: probe b: held-out" in str(needs.probes_worse_than_none({"a": [0.1], "b": [0.2, -1.0]}))
    line = str(needs.probes_worse_than_none({"a": [-0.5, 0.1], "b": [0.2, -2.0], "c": [0.9, 0.9]}))
    assert (
        "warning: 2 of 3 probes, most of all b: held-out explained variance is below 0 in layer 1 (lowest -2)" in line
    )


def test_the_advice_is_where_least_squares_settles() -> None:
    """Of noise that n inputs say nothing of, the held-out error is 1 + p / (n - p) times its variance: seen here."""
    generator = torch.Generator().manual_seed(0)
    inputs = 40

    def error(tokens: int) -> float:
        x, y = (torch.randn(tokens + 4000, size, generator=generator, dtype=torch.float64) for size in (inputs, 20))
        weight = torch.linalg.lstsq(x[:tokens], y[:tokens]).solution
        return float((y[tokens:] - x[tokens:] @ weight).square().mean())

    assert error(ADVISED * inputs) < 1.4
    assert error(inputs + 4) > 5


# commands


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("enough")
    model = TINY["llama"](num_hidden_layers=3, vocab_size=258, bos_token_id=256, eos_token_id=257)
    initialise(model, 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(20)  # a layer says little of the next
    model.save_pretrained(base / "model")
    write_tokenizer(base / "model")
    write_text(base / "words.txt")
    return base


def warnings(done: Any) -> list[str]:
    assert done.code == 0, done.err
    return [line for line in done.err.splitlines() if line.startswith("warning: ")]


LITTLE = ["--windows", 2, "--length", 20, "--sink", 4]
MUCH = ["--windows", 9, "--length", 68, "--sink", 4]


@pytest.mark.parametrize("command", ["fit-predictors", "probe"])
def test_little_text_is_said_before_the_work(
    command: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 tokens for the 32 channels of a layer: worse than nothing."""
    named = ["--model", base / "model", "--text", base / "words.txt"]
    fitted = (
        ["--recent", 0, "--block", 8, "--output", tmp_path / "x.safetensors"] if command == "fit-predictors" else []
    )
    asked = ["--probe", "k=k1,v1", "--probe", "v=k0t3"] if command == "probe" else []
    found = warnings(kvcal(command, *named, *LITTLE, *fitted, *asked))
    assert "16 tokens for " in found[0] and "too little text" in found[0]
    assert any("held-out explained variance is below 0 in layer" in line for line in found)
    widest = {"fit-predictors": 64, "probe": 64}[command]
    much = warnings(kvcal(command, *named, *MUCH, *fitted, *asked))
    assert ADVISED * widest <= 8 * 64 and not any("too little text" in line for line in much)

    def stopped(*_: Any, **__: Any) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setattr(
        f"kvcal.{'calibrate.driver' if command == 'fit-predictors' else 'commands.probe'}.Capture", stopped
    )
    done = kvcal(command, *named, *LITTLE, *fitted, *asked, "--no-resume")
    assert ("too little text" in done.err and done.code == 70) or "stopped" in done.err


def test_little_text_for_codebooks_and_thresholds(base: Path, tmp_path: Path) -> None:
    named = ["--model", base / "model", "--text", base / "words.txt"]
    out = ["--output", tmp_path / "x.safetensors"]
    books = ["--sizes", "64,64,64", "--stages", "1,1,1", "--high-dims", 0, "--recent", 0, "--block", 8]
    found = warnings(kvcal("train-codebooks", *named, *LITTLE, *books, *out, "--vectors", 100))
    assert any("codebooks of all layers: 96 vectors for 64 codewords, advised are 256" in line for line in found)
    tuned = ["--windows", 2, "--length", 68, "--recent", 16, "--block", 32, "--trials", 1, "--objective", "attention"]
    # the outlier guard has words of its own: so little text, and random weights that a folder does not tell of
    of_guard = ("nats per token", "full precision itself")
    found = warnings(kvcal("tune-thresholds", *named, *tuned, *out))
    [line] = [line for line in found if not any(words in line for words in of_guard)]
    assert "thresholds chosen on one window" in line


def test_defaults_have_text_enough(base: Path) -> None:
    """What every preset of the catalogue calibrates on: nothing to say of any model's predictors."""
    for entry in catalogue.CATALOGUE.values():
        geometry, own = entry.geometry, entry.presets["aqua-kv"]
        shape = Shape(geometry.kv_heads, geometry.head_dim, 32)
        windows, tokens = own["windows"] - own["holdout"], own["length"] - 4
        assert too_little(AquaKV(), shape, 1, windows, tokens // 32 * 32) == []
    assert needs.few_tokens({"k=k1": 10}, 0) == []  # no token at all is an error, which says so
