"""Calibration and evaluation of models spread by heads over two processes (tp_plan), and by layers (device_map)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.calibrate.driver import averages, fit
from kvcal.calibrate.job import FitOptions
from kvcal.capture.ranks import ALONE, Ranks, ShareDoneError, joined
from kvcal.capture.scan import WholeModel
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods import AquaKV, Squat
from kvcal.models.configuration import load_config
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.models.spread import Spread, divided, input_device, tied_together
from kvcal.models.structure import empty_model
from kvcal.text import token_windows
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import SMALL, SUFFIX, kvcal, write_model, write_text
from tests.support.ranks import in_ranks

LAYERS = 3
WINDOWS: dict[str, Any] = {"sink": 4, "recent": 16, "block": 8}
METHODS: dict[str, Any] = {"aqua": AquaKV(**WINDOWS), "squat": Squat(group=8, **WINDOWS)}
TEXT = token_windows.random_windows(256, windows=6, length=60, holdout=2, seed=0)
IDS = token_windows.random_windows(256, windows=3, length=60, holdout=1, seed=1).train
OFFLOADED = {
    "model.embed_tokens": "cpu",
    **{f"model.layers.{index}": "disk" if index == 1 else "cpu" for index in range(LAYERS)},
    **dict.fromkeys(("model.rotary_emb", "model.norm", "lm_head"), "cpu"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `m`, a text, and bundles of one process, by method."""
    base = tmp_path_factory.mktemp("spread")
    write_model(base / "m", LAYERS)
    write_text(base / "words.txt")
    fitted(loaded(base, Spread()), base)
    return base


def loaded(base: Path, spread: Spread) -> Any:
    return load_model(resolve(str(base / "m")), dtype="float32", device="cpu", spread=spread).model


def fitted(model: Any, folder: Path, ranks: Ranks = ALONE, methods: dict[str, Any] = METHODS) -> None:
    for name, method in methods.items():
        try:
            fit(
                method,
                WholeModel(model),
                TEXT,
                folder / f"{name}{SUFFIX}",
                model_record={"name": "m"},
                revision=None,
                device=torch.device("cpu"),
                options=FitOptions(batch=2, ranks=ranks),
            )
        except ShareDoneError:
            assert ranks.rank


def kls(model: Any, base: Path) -> list[float]:
    bundles = {name: load_bundle(base / f"{name}{SUFFIX}") for name in METHODS}
    makers: Any = {name: lambda one=one: load_cache(one, model) for name, one in bundles.items()}
    rows = evaluate(model, IDS, makers, step=8, batch=2)
    return [figure for row in rows for figure in (row.kl, row.bits_per_value, row.smaller)]


def process(base: Path, folder: Path) -> int:
    with joined("cpu", hold_one_model=True) as ranks:
        model = loaded(base, Spread(tp_plan="auto"))
        fitted(model, folder, ranks)
        if ranks.rank:
            kls(model, base)
        else:
            (folder / "kls.json").write_text(json.dumps(kls(model, base)))
        found = random_logits(base, Spread(tp_plan="auto"))
        torch.save(found, folder / f"random-{ranks.rank}.pt")
    return 0


def random_logits(base: Path, spread: Spread) -> torch.Tensor:
    """Logits of a model whose weights lie in no file."""
    source = resolve(str(base / "m"))
    one = load_model(source, dtype="float32", device="cpu", random_weights=True, spread=spread)
    with torch.no_grad():
        logits: torch.Tensor = one.model(IDS[:1]).logits
    return logits


def test_a_bundle_and_a_kl_of_two_processes_are_those_of_one(base: Path, tmp_path: Path) -> None:
    for code, said in in_ranks(2, lambda: process(base, tmp_path), tmp_path):
        assert code == 0, said
    for name in METHODS:
        found, wanted = (load_bundle(folder / f"{name}{SUFFIX}") for folder in (tmp_path, base))
        assert found.fingerprint == wanted.fingerprint and found.scheme.config() == wanted.scheme.config()
        for figure, right in averages(wanted.metrics["layers"]).items():
            assert averages(found.metrics["layers"])[figure] == pytest.approx(right, rel=0.05), (name, figure)
    one = loaded(base, Spread())
    right = kls(one, base)
    assert kls(one, tmp_path) == pytest.approx(right, rel=0.05, abs=1e-6)
    assert json.loads((tmp_path / "kls.json").read_text()) == pytest.approx(right, rel=0.02, abs=1e-6)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"random-{rank}.pt"), random_logits(base, Spread()))


def test_one_process_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="--tp-plan spreads heads over processes: start it by torchrun"):
        Spread.of(None, "auto")


COMMANDS: dict[str, list[str]] = {
    "eval": ["aqua", "--windows", "2", "--length", "60", "--step", "8", "--json"],
    "generate": ["--bundle", "aqua", "--prompt", "a house of words and more words", "--tokens", "20", "--json"],
}


def arguments(base: Path, name: str) -> list[str]:
    words = [str(base / f"aqua{SUFFIX}") if word == "aqua" else word for word in COMMANDS[name]]
    text = ["--text", str(base / "words.txt")] if name == "eval" else []
    return [name, *words, *text, "--model", str(base / "m")]


def commands(base: Path, folder: Path) -> int:
    code = 0
    for name in COMMANDS:
        done = kvcal(*arguments(base, name), "--tp-plan", "auto")
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        code |= done.code
        print(done.err)
        (folder / f"{name}-{os.environ['RANK']}.json").write_text(done.out)
    return code


def test_commands_of_two_processes_print_what_one_prints(base: Path, tmp_path: Path) -> None:
    for code, said in in_ranks(2, lambda: commands(base, tmp_path), tmp_path):
        assert code == 0, said
    for name in COMMANDS:
        assert (tmp_path / f"{name}-1.json").read_text() == ""
        found, wanted = json.loads((tmp_path / f"{name}-0.json").read_text()), kvcal(*arguments(base, name)).json
        if name == "eval":
            for one, other in zip(found["rows"], wanted["rows"], strict=True):
                numbers = [{k: v for k, v in row.items() if isinstance(v, float)} for row in (one, other)]
                assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-6)
        else:
            assert found["text"] == wanted["text"]


@pytest.mark.parametrize("kind", ["folder", "random weights"])
def test_layers_on_a_disk_give_the_same_bytes(base: Path, tmp_path: Path, kind: str) -> None:
    """By a device_map: weights come to the device when a layer runs."""
    options = [*SMALL, "--text", base / "words.txt", "--model", base / "m"]
    options += ["--random-weights"] if kind == "random weights" else []
    for name, more in (("whole", []), ("spread", ["--device-map", json.dumps(OFFLOADED)])):
        done = kvcal("fit-predictors", *options, *more, "--json", "--output", tmp_path / f"{name}{SUFFIX}")
        assert done.code == 0, done.err
        assert ("no KL is forecast, as it would say nothing" in done.err) == (kind == "random weights")
        assert {"import", "text", "weights", "forward", "method", "keep", "guard", "write"} <= done.json[
            "phases"
        ].keys()
    assert (tmp_path / f"whole{SUFFIX}").read_bytes() == (tmp_path / f"spread{SUFFIX}").read_bytes()


def test_a_disk_and_a_cache(base: Path) -> None:
    model = loaded(base, Spread(device_map=OFFLOADED))
    assert any(parameter.is_meta for parameter in model.parameters())
    assert kls(model, base) == kls(loaded(base, Spread()), base)


@pytest.mark.parametrize("away", ["meta", "disk"])
@pytest.mark.parametrize("kind", ["folder", "random weights"])
def test_a_tied_head_runs_where_the_embedding_is(base: Path, tmp_path: Path, kind: str, away: str) -> None:
    """As on two GPUs: the head's device in the map is another one. meta stands for it."""
    folder = write_model(tmp_path / "tied", 1, tie_word_embeddings=True)
    source, devices = resolve(str(folder)), {"model.embed_tokens": away}
    devices |= dict.fromkeys(("model.layers.0", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "random_weights": kind == "random weights"}
    model: Any = load_model(source, spread=Spread(device_map=devices), **options).model
    assert model.hf_device_map["lm_head"] == away
    assert {one.device.type for one in (model.get_input_embeddings().weight, model.lm_head.weight)} == {"meta"}
    if away == "disk":
        with torch.no_grad():
            whole: Any = load_model(source, **options).model
            assert torch.equal(model(IDS[:1]).logits, whole(IDS[:1]).logits)


@pytest.mark.parametrize(
    ("devices", "head"),
    [
        ({"model.embed_tokens": 1, "model.layers": 0, "lm_head": 0}, 1),
        ({"model": 0, "model.embed_tokens": 1, "lm_head": 0}, 1),
        ({"": 0, "lm_head": 1}, 0),
        ({"model": 1}, 1),
        ({"model.layers": 0, "lm_head": 1}, 1),
    ],
)
def test_a_map_gives_a_tied_head_its_embeddings_device(devices: dict[str, str | int], head: int) -> None:
    model = empty_model(load_config(resolve("tiny")), torch.float32)
    assert tied_together(model, devices) == devices | {"lm_head": head}
    untied = empty_model(load_config(resolve("tiny")), torch.float32)
    untied.config.tie_word_embeddings = False
    assert tied_together(untied, devices) == devices


ON_DISK: dict[str, list[str]] = {
    "fit": ["aqua-kv", *SMALL, "--text", "TEXT", "--output", f"fitted{SUFFIX}"],
    "eval": ["-p", "kivi-4", "--text", "TEXT", "--windows", "2", "--length", "60", "--task", "agreement"],
    "compare": ["-p", "kivi-4", "--text", "TEXT", "--windows", "2", "--length", "60"],
    "recommend": ["--text", "TEXT", "--windows", "4", "--length", "68", "--output", f"chosen{SUFFIX}"],
    "generate": ["-p", "kivi-4", "--prompt", "a house of words", "--tokens", "2"],
}


@pytest.mark.parametrize("command", ON_DISK)
def test_an_embedding_on_a_disk(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(base / "words.txt") if word == "TEXT" else word for word in ON_DISK[command]]
    words += ["--lengths", "64", "--limit", "1"] if command == "eval" else []
    done = kvcal(command, *words, "-m", base / "m", "--json", "--device-map", '{"model": "disk", "lm_head": "cpu"}')
    assert done.code == 0 and done.json.get("device", "cpu") == "cpu", done.err


def test_tokens_go_where_an_offloaded_embedding_is_brought(base: Path) -> None:
    model, whole = loaded(base, Spread(device_map={"": "disk"})), loaded(base, Spread())
    assert model.device.type == "meta" and input_device(model).type == "cpu"
    with load_cache("auto-4", model) as cache, load_cache("auto-4", whole) as other:
        assert cache.describe()["auto"] == other.describe()["auto"]


@pytest.mark.parametrize("more", [{}, {"model.layers.1": "cpu"}])
def test_a_whole_model_on_a_disk(base: Path, more: dict[str, str | int]) -> None:
    """Also one of which a layer stays in memory."""
    assert torch.equal(random_logits(base, Spread(device_map={"": "disk", **more})), random_logits(base, Spread()))


def test_devices_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = '{"a": "cpu", "b": "disk", "c": 1, "d": "cuda", "e": "cuda:1"}'
    assert Spread.of(text, None).device_map == json.loads(text)
    with pytest.raises(UsageError, match='"b" is given 2, which is no device here; allowed are "cpu", "disk", 0, 1'):
        Spread.of('{"a": 1, "b": 2}', None)


def test_a_map_is_divided_into_modules_apart(base: Path) -> None:
    model = empty_model(load_config(resolve(str(base / "m"))), torch.float32)
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), 0)
    layers = {f"model.layers.{index}": 1 for index in range(1, LAYERS)}
    assert divided(model, {"": "disk"}) == {"model": "disk", "lm_head": "disk"}
    assert divided(model, {"": 0, "model.layers": 1, "model.layers.0": "disk"}) == {
        **rest,
        **layers,
        "model.layers.0": "disk",
        "lm_head": 0,
    }
    assert divided(model, {"model.layers.0": 0, "nothing": 1}) == {"model.layers.0": 0, "nothing": 1}
    model.model.register_parameter("shift", torch.nn.Parameter(torch.zeros(1, device="meta")))
    assert divided(model, {"": 0, "model.norm": 1})["model"] == 0


@pytest.mark.parametrize(
    ("command", "words", "complaint"),
    [
        ("fit-predictors", ["--device-map", "gpus"], "--device-map gpus: allowed are auto, balanced,"),
        ("fit-predictors", ["--device-map", "auto", "--layerwise"], "--device-map and --layerwise: give one of them"),
        ("fit-predictors", ["--device-map", "auto", "--tp-plan", "auto"], "--device-map and --tp-plan: give one"),
        ("fit-predictors", ["--tp-plan", "auto"], "start it by torchrun --nproc-per-node N"),
        ("fit-predictors", ["--device-map", '{"nothing": "cpu"}', "--random-weights"], "has no module 'nothing'"),
        ("fit-predictors", ["--device-map", '{"model": "cpu"}', "--random-weights"], "no device for lm_head.weight"),
        ("fit-predictors", ["--device-map", '{"": 99}'], 'map: "" is given 99, which is no device here; allowed are'),
        ("fit-predictors", ["--device-map", '{"model": -1}'], 'allowed are "cpu", "disk"'),
        ("fit-predictors", ["--device-map", '{"model": "nowhere"}'], '"model" is given "nowhere", which is no device'),
    ],
)
def test_what_means_nothing_is_refused(
    base: Path, tmp_path: Path, command: str, words: list[str], complaint: str
) -> None:
    options = [*SMALL, "--text", base / "words.txt", "--model", base / "m", "--output", tmp_path / f"x{SUFFIX}"]
    done = kvcal(command, *options, *words)
    assert done.code == 2 and complaint in done.complaint
