"""Linear probes of the cache: against plain least squares on what Transformers' own cache holds, and the command."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal.evaluate import probe as probing
from kvcal.evaluate.probe import Probe, Settings, mean_explained, paper_probes, table
from kvcal.methods.regression import Gram, SharedGram
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.models.tokenizers import load_tokenizer
from kvcal.text import token_windows
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import Done, kvcal, write_model, write_text

LAYERS, LENGTH, TRAIN, HELD, SINK, RIDGE = 4, 60, 20, 4, 4, 1e-3
SMALL = ["--windows", str(TRAIN + HELD), "--holdout", str(HELD), "--length", str(LENGTH)]
PROBES = ("k=k1", "k=k3", "k=k0t2", "k=v0", "k=k1,k2,k3", "k=k1,v0t1", "v=v1,k0", "v=k2t1", "v=v0t1,v0t2,v0t3")


@dataclass(frozen=True)
class Given:
    folder: Path
    text: Path

    def run(self, *options: object) -> Done:
        return kvcal("probe", "--model", self.folder, "--text", self.text, *SMALL, *options)

    def found(self, *options: object) -> dict[str, Any]:
        done = self.run("--json", *options)
        assert done.code == 0, done.err
        return dict(done.json)


@pytest.fixture(scope="module")
def given_model(tmp_path_factory: pytest.TempPathFactory) -> Given:
    base = tmp_path_factory.mktemp("probe")
    return Given(write_model(base / "small", LAYERS), write_text(base / "words.txt"))


@pytest.fixture(scope="module")
def usual(given_model: Given) -> dict[str, Any]:
    return given_model.found()


def chosen(names: tuple[str, ...]) -> list[str]:
    return [part for name in names for part in ("--probe", name)]


def cached(given: Given, frame: str) -> dict[str, list[Tensor]]:
    """Role -> of each layer (windows, tokens, C) float64: Transformers' cache, keys before RoPE from the projection."""
    source = resolve(str(given.folder))
    model = load_model(source, dtype=torch.float32, device="cpu").model
    text = token_windows.token_windows(
        load_tokenizer(source), str(given.text), windows=TRAIN + HELD, holdout=HELD, length=LENGTH, seed=0
    )
    raw: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: raw.append(output.double()))
    with torch.no_grad():
        cache = model(torch.cat([text.train, text.holdout]), use_cache=True).past_key_values

    def flat(x: Tensor) -> Tensor:
        return x.double().transpose(1, 2).flatten(2)

    keys = raw if frame == "pre_rope" else [flat(layer.keys) for layer in cache.layers]
    return {"k": keys, "v": [flat(layer.values) for layer in cache.layers]}


def by_least_squares(cached: dict[str, list[Tensor]], name: str, layer: int) -> float:
    """The same score from a QR solution of the ridge problem's augmented rows, windows cut out by hand."""
    target, inputs = name.split("=")
    parts = []
    for one in inputs.split(","):
        role, below, before = one[0], int(one[1]), int(one[3:] or 0)
        parts.append(cached[role][layer - below][:, SINK - before : LENGTH - before])
    x = torch.cat([*parts, torch.ones_like(parts[0][..., :1])], -1)
    y = cached[target][layer][:, SINK:]
    fit_x, fit_y = x[:TRAIN].flatten(0, 1), y[:TRAIN].flatten(0, 1)
    damp = (RIDGE * fit_x.square().sum(0).mean()).sqrt() * torch.eye(fit_x.shape[1], dtype=torch.float64)
    rows, wanted = torch.cat([fit_x, damp]), torch.cat([fit_y, torch.zeros(len(damp), fit_y.shape[1]).double()])
    solution = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    held = y[TRAIN:].flatten(0, 1)
    left = held - x[TRAIN:].flatten(0, 1) @ solution
    return float((1 - left.square().sum(0) / (held - held.mean(0)).square().sum(0)).mean())


@pytest.mark.parametrize("frame", ["pre_rope", "post_rope"])
def test_scores_are_those_of_least_squares_on_the_cache_of_transformers(given_model: Given, frame: str) -> None:
    # 20 training windows: the last batch is cut.
    found = given_model.found("--frame", frame, *chosen(PROBES), "--batch", 3)
    known = cached(given_model, frame)
    for row in found["rows"]:
        for layer, score in enumerate(row["layers"]):
            if score is not None:
                assert score == pytest.approx(by_least_squares(known, row["probe"], layer), abs=2e-5), row["probe"]
    assert [sum(score is None for score in row["layers"]) for row in found["rows"]] == [1, 3, 0, 0, 3, 1, 1, 2, 0]


def test_only_keys_depend_on_the_frame(given_model: Given, usual: dict[str, Any]) -> None:
    turned = {row["probe"]: row["mean"] for row in given_model.found("--frame", "post_rope")["rows"]}
    plain = {row["probe"]: row["mean"] for row in usual["rows"]}
    assert turned["v=v1"] == plain["v=v1"]
    assert turned["k=k1"] != plain["k=k1"]


def test_all_that_the_paper_probes(usual: dict[str, Any]) -> None:
    assert [row["probe"] for row in usual["rows"]] == [probe.name for probe in paper_probes()]
    sets = {(row["target"], tuple(row["inputs"])) for row in usual["rows"]}
    for own, other in ("kv", "vk"):
        alone = [f"{own}1", f"{own}2", f"{own}3", f"{own}0t1", f"{own}0t2", f"{own}0t3", f"{other}0"]
        assert {(own, (name,)) for name in alone} < sets


def test_means(usual: dict[str, Any]) -> None:
    row = next(row for row in usual["rows"] if row["probe"] == "k=k1")
    assert row["mean"] == pytest.approx(sum(row["layers"][1:]) / (LAYERS - 1), abs=1e-6)
    assert row["mean_common"] == row["layers"][3]  # the only layer with three below it


def test_shallow_models_have_no_common_layer() -> None:
    settings = Settings((Probe("k", ("k3",)), Probe("k", ("v0",))))
    rows = table(settings, {0: {"k=v0": 0.5}, 1: {"k=v0": 0.7}})
    assert [(row["mean"], row["mean_common"]) for row in rows] == [(None, None), (0.6, None)]


def test_sums_that_are_shared_are_those_of_each_alone() -> None:
    x = {name: torch.randn(50, 3, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("bac")}
    wanted = [(("b", "a"), "c"), (("a",), "b"), (("c", "a"), "b")]
    shared = SharedGram(wanted, 3, "cpu")
    shared.add({name: y[:20] for name, y in x.items()})
    shared.add({name: y[20:20] for name, y in x.items()})
    shared.add({name: y[20:] for name, y in x.items()})
    for inputs, target in wanted:
        alone, found = Gram.empty(3 * len(inputs), 3, torch.device("cpu")), shared.gram(inputs, target)
        alone.add(torch.cat([x[name] for name in inputs], 1), x[target])
        for one, other in ((alone.xx, found.xx), (alone.xy, found.xy), (alone.yy, found.yy)):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert found.count == alone.count == 50


def test_dead_channels_do_not_count() -> None:
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    y = torch.stack([x[:, 0], torch.full((100,), 7.0)], 1)
    gram = Gram.empty(2, 2, torch.device("cpu"))
    gram.add(x, y)
    assert mean_explained(gram, torch.zeros(2, 2), torch.zeros(2)) == pytest.approx(
        1 - float(x[:, 0].square().sum() / x[:, 0].var(unbiased=False) / 100), abs=1e-6
    )


# The command.


def test_the_same_command_gives_the_same_figures_wherever_things_lie(given_model: Given, usual: dict[str, Any]) -> None:
    assert given_model.found("--spill", "disk", "--layerwise")["rows"] == usual["rows"]


def test_an_interrupted_run_goes_on(
    given_model: Given, usual: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, whole = tmp_path / "probes.json", probing._LayerRun.scores

    def some(self: probing._LayerRun) -> Any:
        if self.taps.index == 3:
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(probing._LayerRun, "scores", some)
    assert given_model.run("--output", output).code == 130
    monkeypatch.undo()
    again = given_model.found("--output", output)
    assert again["resumed_layers"] == 3
    assert again["rows"] == usual["rows"]
    assert given_model.found("--output", output)["resumed_layers"] == LAYERS
    measured = output.read_bytes()
    other = given_model.run("--output", output, "--ridge", 0.1)
    assert other.code == 2 and "rows are of ridge 0.001, not 0.1; give another name" in other.err
    assert output.read_bytes() == measured
    assert given_model.found("--output", output, "--ridge", 0.1, "--no-resume")["resumed_layers"] == 0


def test_files(given_model: Given, usual: dict[str, Any], tmp_path: Path) -> None:
    first, second, lines = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "a.csv"
    given_model.found("--plot", first, "--csv", lines)
    given_model.found("--plot", second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")
    read = list(csv.DictReader(lines.open()))
    for row in usual["rows"]:
        own = [r for r in read if (r["target"], r["inputs"]) == (row["target"], "+".join(row["inputs"]))]
        scores = {r["layer"]: float(r["explained_variance"]) for r in own}
        assert [scores.get(str(layer)) for layer in range(LAYERS)] == row["layers"]
        assert (scores["mean"], scores["mean_common"]) == (row["mean"], row["mean_common"])


def test_a_table_for_people(given_model: Given) -> None:
    done = given_model.run(*chosen(("v=v1,k0",)))
    assert done.code == 0 and "v1 + k0" in done.out


def test_bare_it_reads_the_embedded_model() -> None:
    done = kvcal("probe", "--windows", 3, "--length", 40, "--json", *chosen(("k=k1",)))
    assert done.code == 0, done.err
    assert (done.json["model"], done.json["text"], done.json["layers"]) == ("tiny", "embedded:calibration", 8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--probe", "k1"], "TARGET=INPUTS"),
        (["--probe", "q=k1"], "target 'q'"),
        (["--probe", "k=k0"], "the target itself"),
        (["--probe", "k=k1,k1"], "each once"),
        (["--probe", "k="], "one input or more"),
        (["--probe", "k=x1"], "input 'x1'"),
        (["--probe", "k=k1t0"], "input 'k1t0'"),
        (["--probe", "k=k1", "--probe", "k=k1"], "given twice"),
        (["--frame", "rope"], "--frame rope"),
        (["--ridge", "0"], "--ridge 0"),
        (["--spill", "tape"], "--spill tape"),
        (["--sink", str(LENGTH)], "larger --length"),
        (["--plot", "x.gif"], ".png"),
        (["--csv", "nowhere/x.csv"], "nowhere is not a folder"),
        (["--output", "nowhere/x.json"], "nowhere is not a folder"),
    ],
)
def test_options_that_make_no_sense(given_model: Given, options: list[str], says: str) -> None:
    done = given_model.run(*options)
    assert done.code != 0
    assert says in done.complaint


def test_a_deeper_layer_than_the_model_has_is_refused_before_it_is_read(
    given_model: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepest = given_model.found(*chosen((f"k=k{LAYERS - 1}",)))["rows"][0]["layers"]
    assert deepest[:-1] == [None] * (LAYERS - 1) and deepest[-1] is not None
    monkeypatch.setattr(
        "kvcal.models.loading.load_model", lambda *args, **kwargs: pytest.fail("the model was read before")
    )
    said = f"--probe k=k{LAYERS}: reads {LAYERS} layers below, and the model has {LAYERS} layers; read at most {LAYERS - 1}"
    assert said in given_model.run(*chosen(("k=k1", f"k=k{LAYERS}"))).complaint


def test_names() -> None:
    assert Probe.parse(" v = v1 , k0 ") == Probe("v", ("v1", "k0"))
    with pytest.raises(UsageError, match="layers below"):
        Probe("k", ("k",))
