"""The commands as scripts use them: stable names, JSON on stdout and nothing else, one line for every failure."""

from __future__ import annotations

import inspect
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from kvcal.cli import app
from kvcal.cli.help import GROUPS, METHODS, examples_of
from kvcal.models import configuration, loading, names, weights
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.scheme import HeavyHitters
from tests.support.models_fixture import (
    ROOT_COMMAND,
    SMALL,
    SUFFIX,
    Done,
    finished,
    kvcal,
    started,
    write_model,
    write_text,
)

ROW = [
    "name",
    "perplexity",
    "kl",
    "bits_per_value",
    "paper_bits",
    "cache_bytes",
    "window_bytes",
    "resident_bytes",
    "tokens",
]
LENGTH, WINDOWS, STEP = 260, 4, 32
SINK, RECENT, BLOCK = 4, 128, 32  # of presets
LAYERS, WIDTH = 4, 32  # of the model; WIDTH is that of its keys
PROMPT = "it was the same house on the hill that he had seen so often, and still he did not know "


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a model, another of its shape, a text, and a bundle for the model."""
    base = tmp_path_factory.mktemp("cli")
    write_model(base / "model", LAYERS)
    write_model(base / "other", LAYERS, seed=2)
    write_text(base / "words.txt")
    done = kvcal("fit-predictors", *named(base), *SMALL, "--output", base / f"fitted{SUFFIX}", "--json")
    assert done.code == 0, done.err
    return base


def named(base: Path) -> list[str]:
    return ["--model", str(base / "model"), "--text", str(base / "words.txt")]


@pytest.fixture(scope="module")
def bundle(base: Path) -> Path:
    return base / f"fitted{SUFFIX}"


# What scripts rely on.


@pytest.fixture(scope="module")
def evaluation(base: Path, bundle: Path) -> Done:
    """All kinds of rows, asked for in another order than the one they come in."""
    options = ["--bundle", bundle, "--preset", "uniform-2", "--preset", "exact", "--preset", "higgs-2"]
    return kvcal("eval", *named(base), "--length", LENGTH, "--windows", WINDOWS, "--step", STEP, *options, "--json")


@pytest.fixture(scope="module")
def rows(evaluation: Done) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in evaluation.json["rows"]}


def test_rows_of_an_evaluation(evaluation: Done) -> None:
    assert evaluation.code == 0, evaluation.err
    found = evaluation.json["rows"]
    assert [row["name"] for row in found] == ["full", "uniform-2", "exact", "higgs-2", "fitted"]
    for row in found:
        assert list(row)[: len(ROW)] == ROW
        assert row["tokens"] == WINDOWS * (LENGTH - 1)
    assert found[0]["kl"] == 0
    assert found[0]["bits_per_value"] == 16
    assert (found[0]["window_bytes"], found[0]["resident_bytes"]) == (0, 0)


def test_full_precision_is_the_perplexity_of_a_plain_forward(base: Path, rows: dict[str, dict[str, Any]]) -> None:
    """No cache, no steps: each window at once."""
    loaded = load_model(resolve(str(base / "model")), dtype="float32", device="cpu")
    ids = token_windows.evaluation_windows(
        loaded.tokenizer, str(base / "words.txt"), windows=WINDOWS, length=LENGTH
    ).ids
    with torch.no_grad():
        logits = loaded.model(input_ids=ids, use_cache=False).logits[:, :-1]
    nats = functional.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten())
    assert rows["full"]["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)


def test_the_exact_preset_loses_nothing(rows: dict[str, dict[str, Any]]) -> None:
    exact = rows["exact"]
    assert exact["kl"] < 1e-8  # full precision has longer calls: some CPUs round products of other shapes otherwise
    assert exact["perplexity"] == pytest.approx(rows["full"]["perplexity"], rel=1e-7)
    assert exact["bits_per_value"] == 32
    assert exact["cache_bytes"] > 0


@pytest.mark.parametrize(("name", "times"), [("higgs-2", 4), ("uniform-2", 3)])  # uniform: groups of 16, 4 bits
def test_two_bits_compress_and_cost_something(rows: dict[str, dict[str, Any]], name: str, times: int) -> None:
    """The canary: a row of a method that does nothing would look very good."""
    row, packed = rows[name], (LENGTH - SINK - RECENT) // BLOCK * BLOCK
    assert row["kl"] > 0
    assert row["perplexity"] != rows["full"]["perplexity"]
    share = row["bytes_at_16_bit"] * packed / LENGTH
    assert 0 < row["cache_bytes"] < share / times
    assert row["cache_bytes"] == pytest.approx(row["bits_per_value"] * 2 * LAYERS * WIDTH * packed / 8, rel=1e-6)
    assert row["window_bytes"] >= 2 * LAYERS * WIDTH * (LENGTH - packed) * 4
    assert row["bytes_at_16_bit"] == 2 * LAYERS * WIDTH * LENGTH * 2


def test_a_bundle_row_counts_its_predictors_apart(rows: dict[str, dict[str, Any]], bundle: Path) -> None:
    scheme, row = load_bundle(bundle).scheme, rows["fitted"]
    assert row["bits_per_value"] == pytest.approx(scheme.bits_per_value(), rel=0.01)
    assert row["resident_bytes"] == scheme.resident_bytes() > rows["higgs-2"]["resident_bytes"] > 0
    assert 0 < row["kl"] < rows["higgs-2"]["kl"]  # although more is packed: its recent window is 16


def test_steps_of_an_evaluation_do_not_matter_to_full_precision(base: Path, rows: dict[str, dict[str, Any]]) -> None:
    done = kvcal("eval", *named(base), "--length", LENGTH, "--windows", WINDOWS, "--step", 100, "--json")
    assert done.json["rows"][0]["perplexity"] == pytest.approx(rows["full"]["perplexity"], rel=1e-5)


def test_fit_predictors_reports_what_it_wrote(base: Path, tmp_path: Path) -> None:
    output = tmp_path / f"y{SUFFIX}"
    options = ["--windows", 6, "--length", 100, "--seed", 3, "--output", output, "--json"]
    done = kvcal("fit-predictors", *named(base), *options)
    assert done.code == 0, done.err
    assert done.json["bundle"] == str(output)
    assert done.json["bytes"] == output.stat().st_size
    assert (done.json["train_windows"], done.json["holdout_windows"], done.json["length"]) == (5, 1, 100)
    assert done.json["sha256"] == kvcal("verify", output, "--json").json["sha256"]
    assert done.err == f"text: {base / 'words.txt'}\n"


@pytest.mark.parametrize("command", ["fit-predictors", "fit-norms", "measure-subspaces", "train-codebooks"])
def test_what_is_fitted_can_keep_a_part_of_the_tokens(command: str, base: Path, tmp_path: Path) -> None:
    small = {
        "measure-subspaces": ["--group", 8],
        "train-codebooks": ["--stages", "1,1,1", "--sizes", "4,4,4", "--vectors", 400],
    }
    own = small.get(command, [])
    output = tmp_path / f"kept{SUFFIX}"
    done = kvcal(command, *named(base), *SMALL, *own, "--output", output, "--keep", 0.2, "--heavy", 0.25)
    assert done.code == 0, done.err
    assert load_bundle(output).scheme.selection == HeavyHitters(0.2, 0.25)
    assert "--keep 2" in kvcal(command, *named(base), *SMALL, *own, "--output", output, "--keep", 2).complaint


def test_defaults_are_the_embedded_model_and_a_name_made_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvcal("fit-predictors", "--windows", 3, "--length", 100)
    assert done.code == 0, done.err
    first, *warnings = done.err.splitlines()
    assert first == "text: embedded:calibration"
    assert warnings and all(line.startswith("warning: ") for line in warnings)  # three windows are too little
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-aqua-kv.kvcal.safetensors"]
    assert "tiny-aqua-kv.kvcal.safetensors" in done.out
    assert kvcal("verify", "tiny-aqua-kv.kvcal.safetensors", "--model", "tiny").code == 0


def test_the_output_of_a_folder_has_its_name(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kvcal("fit-predictors", *named(base), *SMALL).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model-aqua-kv.kvcal.safetensors"]


def test_verify(base: Path, bundle: Path) -> None:
    done = kvcal("verify", bundle, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["ok"] is True
    assert done.json["checked"] == [
        "format", "header hash", "tensor hashes", "tensors finite", "codecs", "layer chain",
    ]  # fmt: skip
    with_model = kvcal("verify", bundle, "--model", base / "model", "--json")
    assert with_model.json["checked"][-1] == f"model {base / 'model'}"
    assert " ".join(kvcal("verify", bundle).out.split()).startswith(f"{bundle}: good (format, header hash")


def test_verify_reads_two_layers_of_the_model(base: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = weights.FileWeights.get

    def noted(self: weights.FileWeights, name: str, *rest: Any) -> torch.Tensor:
        read.append(name)
        return get(self, name, *rest)

    monkeypatch.setattr(weights.FileWeights, "get", noted)
    assert kvcal("verify", bundle, "--model", base / "model").code == 0
    assert {name.split(".")[2] for name in read} == {"0", str(LAYERS - 1)}
    read.clear()
    assert kvcal("verify", bundle, "--model", base / "other").code == 4
    assert read == []  # the revisions differ: weights need not be looked at


def test_a_bundle_of_one_layer_is_of_its_model(base: Path, tmp_path: Path) -> None:
    one, path = write_model(tmp_path / "one", layers=1), tmp_path / f"one{SUFFIX}"
    mine = ["--model", one, "--text", base / "words.txt"]
    assert kvcal("fit-predictors", *mine, *SMALL, "--output", path).code == 0
    assert kvcal("verify", path, "--model", one).code == 0
    assert kvcal("eval", *mine, "--length", 64, "--windows", 1, "--bundle", path).code == 0


def test_verify_without_a_model_takes_nothing_about_one(bundle: Path) -> None:
    fails(kvcal("verify", bundle, "--revision", "main"), 2, "--revision", "give --model")
    fails(kvcal("verify", bundle, "--random-weights"), 2, "--random-weights", "give --model")


def test_random_weights_of_a_seed_from_fit_to_generate(base: Path, tmp_path: Path) -> None:
    path = tmp_path / f"random{SUFFIX}"
    mine = ["--model", base / "model", "--random-weights", "--seed", 5]
    short = ["--windows", 4, "--length", LENGTH]
    assert kvcal("fit-predictors", *mine, "--text", base / "words.txt", *short, "--output", path).code == 0
    assert kvcal("verify", path, *mine).code == 0
    fails(kvcal("verify", path, *mine[:-1], 6), 4, "random:5", "random:6")
    fails(kvcal("verify", path, *mine[:2]), 4, "random:5", "sha256:")
    done = kvcal("eval", *mine, "--text", base / "words.txt", "--length", LENGTH, "--bundle", path, "--json")
    assert done.json["random_weights"] is True and [row["name"] for row in done.json["rows"]] == ["full", "random"]
    assert kvcal("generate", *mine, "--bundle", path, "--prompt", PROMPT, "--tokens", 3).code == 0


def test_random_weights_of_a_model_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer either: random token ids to evaluate on, and no prompt to read."""
    geometry = configuration.geometry_config(names.resolve("qwen2.5-0.5b"))
    small = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "hidden_size": 56,
        "vocab_size": 300,
        "intermediate_size": 64,
    }
    for name, value in small.items():
        setattr(geometry, name, value)
    for module in (configuration, loading):
        monkeypatch.setattr(module, "geometry_config", lambda source: geometry)
        monkeypatch.setattr(module, "geometry", lambda source: SimpleNamespace(vocab=300, context=32768))
    mine = ["--model", "qwen2.5-0.5b", "--random-weights", "--preset", "higgs-2"]
    done = kvcal("eval", *mine, "--length", LENGTH, "--json")
    assert done.json["text"] == "random-tokens:0" and done.json["windows"] == 4, done.err
    assert done.json["rows"][1]["bits_per_value"] is not None
    fails(kvcal("generate", *mine, "--prompt", "a"), 2, "without a tokenizer")
    fails(kvcal("eval", *mine, "--text", __file__, "--length", LENGTH), 2, "without a tokenizer")


def test_generate_says_when_nothing_is_packed(base: Path) -> None:
    done = kvcal("generate", "--model", base / "model", "--preset", "higgs-2", "--prompt", "a", "--tokens", 2)
    assert "nothing packed yet" in done.err and "nan" not in done.err


def test_inspect_shows_settings_and_held_out_errors(bundle: Path) -> None:
    said = kvcal("inspect", bundle).out
    for part in (
        "backbone=higgs-2-wide-debiased-balanced",
        "predictor=linear",
        "key error 0.00",
        "weights",
        "sha256:",
    ):
        assert part in said


def test_inspect(bundle: Path) -> None:
    found = kvcal("inspect", bundle, "--json").json
    assert found["provenance"]["method"] == "aqua-kv"
    assert found["model"]["layers"] == len(found["layers"]) == LAYERS
    assert found["windows"] == {"sink": 4, "recent": 16, "block": 8}
    assert found["frame"] == "pre_rope"
    assert found["layers"][1]["key"].startswith("linear(k1) + scaled(calibrated) higgs(")
    assert found["layers"][1]["value"].startswith("linear(v1+k0) + higgs(")
    assert found["sha256"] == kvcal("verify", bundle, "--json").json["sha256"]
    table = kvcal("inspect", bundle)
    assert (table.code, table.err) == (0, "")
    for shown in (found["sha256"], "aqua-kv", "llama, 4 layers, 2 x 16", "file:words.txt", "linear(v1+k0) + higgs("):
        assert shown in table.out


def test_generate_in_a_fresh_process_gives_the_same_text(base: Path, bundle: Path) -> None:
    options = ["--model", base / "model", "--bundle", bundle, "--prompt", PROMPT, "--tokens", 8, "--json"]
    process = started("generate", *options, folder=base)
    here = kvcal("generate", *options)
    there = finished(process)
    assert (there.code, there.err) == (0, ""), there.err
    assert there.json["text"] == here.json["text"]
    assert here.json["new_tokens"] == 8
    assert here.json["text"].startswith(PROMPT)
    assert here.json["nbytes"]["packed"] > 0
    assert (here.json["name"], here.json["resident_bytes"]) == ("fitted", load_bundle(bundle).scheme.resident_bytes())


def test_generate_is_generate_through_the_cache(base: Path, bundle: Path) -> None:
    """What the documentation's Python lines do."""
    loaded = load_model(resolve(str(base / "model")), dtype="float32", device="cpu")
    tokenizer: Any = loaded.tokenizer
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with load_cache(bundle, loaded.model) as cache:
        out = loaded.model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    command = kvcal("generate", "--model", base / "model", "--bundle", bundle, "--prompt", PROMPT, "--tokens", 8)
    assert command.out == tokenizer.decode(out[0], skip_special_tokens=True) + "\n"
    assert "kB packed at 3.00 bits/value" in command.err


def test_a_sample_is_seeded_and_does_not_touch_the_global_generator(base: Path) -> None:
    options = ["--model", base / "model", "--preset", "higgs-4", "--prompt", "the ", "--tokens", 12, "--json"]
    state = torch.get_rng_state()
    first, again, other = (kvcal("generate", *options, "--sample", "--seed", seed).json["text"] for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_json_has_no_nan(base: Path) -> None:
    """Nothing is packed yet, so there are no bits per value."""
    found = kvcal(
        "generate", "--model", base / "model", "--preset", "higgs-2", "--prompt", "a", "--tokens", 1, "--json"
    )
    assert found.json["bits_per_value"] is None
    assert "NaN" not in found.out


COMMANDS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "fit-predictors": lambda base, bundle: [*named(base), *SMALL, "--output", base / f"z{SUFFIX}"],
    "fit-norms": lambda base, bundle: [*named(base), *SMALL, "--output", base / f"n{SUFFIX}"],
    "probe": lambda base, bundle: [*named(base), "--windows", 8, "--length", 20],
    "preset": lambda base, bundle: ["kivi-2", "--model", base / "model", "--output", base / f"p{SUFFIX}"],
    "inspect": lambda base, bundle: [bundle],
    "verify": lambda base, bundle: [bundle, "--model", base / "model"],
    "eval": lambda base, bundle: [*named(base), "--length", 64, "--windows", 1, "--bundle", bundle],
    "generate": lambda base, bundle: ["--model", base / "model", "--bundle", bundle, "--prompt", "a", "--tokens", 1],
    "models": lambda base, bundle: [],
    "names": lambda base, bundle: [],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_all_there_is_on_stdout(name: str, base: Path, bundle: Path) -> None:
    done = kvcal(name, *COMMANDS[name](base, bundle), "--json")
    assert done.code == 0, done.err
    assert isinstance(json.loads(done.out), dict)
    assert done.out.startswith("{\n") and done.out.endswith("}\n")
    assert all(line.startswith(("text: ", "warning: ", "note: ")) for line in done.err.splitlines()), done.err


@pytest.mark.parametrize("name", COMMANDS)
def test_without_json_there_is_something_to_read(name: str, base: Path, bundle: Path) -> None:
    done = kvcal(name, *COMMANDS[name](base, bundle))
    assert done.code == 0, done.err
    assert done.out.strip() and not done.out.startswith("{")


# What goes wrong is one line, and a code that scripts can tell apart.


def test_a_gated_model_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the README, on a machine that has nothing."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    since = time.monotonic()
    done = finished(started("fit-predictors", "--model", "llama-3.2-3b", folder=tmp_path))
    print(f"answered in {time.monotonic() - since:.1f} s")
    assert done.code == 5
    for part in ("meta-llama/Llama-3.2-3B", "HF_HUB_OFFLINE is set", "--random-weights"):
        assert part in done.complaint
    assert not list(tmp_path.glob("*.safetensors"))


def fails(done: Done, code: int, *parts: str) -> None:
    assert done.code == code, done.err
    for part in parts:
        assert part in done.complaint


@pytest.mark.parametrize("options", [["--keep", 0.2], ["--require-kernels", "--step", 1]], ids=str)
def test_options_of_rows_without_a_row(options: list[Any]) -> None:
    fails(kvcal("eval", *options), 2, f"{options[0]} applies only to bundles and presets, and there is none")


TEXTS: dict[str, tuple[Any, list[str]]] = {
    "empty.txt": (b"", ["file:empty.txt is empty"]),
    "blank.jsonl": (b"\n\n", ["file:blank.jsonl is empty"]),
    "short.txt": (b"too little", ["holds 10 tokens", "544"]),
    "latin.txt": (b"caf\xe9 " * 200, ["byte 3 is not UTF-8"]),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', ["line 2", "not JSON"]),
    "columns.jsonl": (b'{"body": "a"}\n', ["columns are body"]),
    "broken.parquet": (b"PAR1 and nothing more", ["not a parquet file"]),
    "none.txt": (None, ["no such file or folder"]),
    "folder": ("folder", ["holds no text"]),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("command", ["fit-predictors", "eval"])
def test_bad_texts(command: str, name: str, base: Path, tmp_path: Path) -> None:
    data, parts = TEXTS[name]
    path = tmp_path / name
    if data == "folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
    output = ["--output", tmp_path / f"x{SUFFIX}"] if command == "fit-predictors" else []
    size = SMALL if command == "fit-predictors" else ["--length", 544]
    fails(kvcal(command, "--model", base / "model", "--text", path, *size, *output), 1, *parts)
    assert not list(tmp_path.glob(f"*{SUFFIX}*"))


MODELS: dict[str, tuple[str, list[str]]] = {
    "unknown name": ("lama-3.2-3b", ["unknown model 'lama-3.2-3b'", "did you mean llama-3.2-3b"]),
    "no folder": ("./nowhere/model", ["no such folder"]),
    "no model in it": (".", ["no config.json"]),
    "hub, offline": ("somebody/something", ["somebody/something", "HF_HUB_OFFLINE is set"]),
    "empty name": ("", ["unknown model ''"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_bad_models(name: str, base: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, parts = MODELS[name]
    text = ["--text", base / "words.txt"]
    fails(kvcal("fit-predictors", "--model", model, *text), 5, *parts)
    fails(kvcal("eval", "--model", model, *text), 5, *parts)
    fails(kvcal("verify", bundle, "--model", model), 5, *parts)
    fails(kvcal("generate", "--model", model, "--preset", "higgs-2", "--prompt", "a"), 5, *parts)
    assert list(tmp_path.iterdir()) == []


def bad_bundle(kind: str, good: Path, folder: Path) -> Path:
    path, data = folder / f"bad{SUFFIX}", bytearray(good.read_bytes())
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "flipped":
        data[-100] ^= 1
        path.write_bytes(data)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    return path


BUNDLES = {
    "truncated": ["truncated"],
    "flipped": ["has hash", "header says"],
    "empty": ["0 bytes"],
    "missing": ["no such bundle file"],
    "folder": ["a folder, not a bundle file"],
    "pipe": ["a pipe, not a bundle file"],
}


@pytest.mark.parametrize("kind", BUNDLES)
def test_bad_bundles(kind: str, base: Path, bundle: Path, tmp_path: Path) -> None:
    path, parts = bad_bundle(kind, bundle, tmp_path), [f"bad{SUFFIX}", *BUNDLES[kind]]
    fails(kvcal("verify", path), 4, *parts)
    fails(kvcal("verify", path, "--model", base / "model", "--json"), 4, *parts)
    fails(kvcal("inspect", path), 4, *parts)
    fails(kvcal("eval", *named(base), "--length", 64, "--bundle", path), 4, *parts)
    fails(kvcal("generate", "--model", base / "model", "--bundle", path, "--prompt", "a"), 4, *parts)


def test_a_bundle_of_another_model(base: Path, bundle: Path) -> None:
    """The same architecture and shape: only the weights differ."""
    other = ["--model", base / "other"]
    for done in (
        kvcal("verify", bundle, *other),
        kvcal("eval", *other, "--text", base / "words.txt", "--length", 64, "--bundle", bundle),
        kvcal("generate", *other, "--bundle", bundle, "--prompt", "a"),
    ):
        fails(done, 4, "fitted was made for another model: weights revision: bundle 'sha256:", "', model 'sha256:")
    fails(kvcal("verify", bundle, "--model", "tiny"), 4, "layers: bundle 4, model 8", "head_dim: bundle 16, model 64")


def test_unknown_names(base: Path, bundle: Path) -> None:
    short = ["--length", 64]
    near = "did you mean higgs-4, higgs-3 or higgs-2? `kvcal names preset` lists all"
    fails(kvcal("eval", *named(base), *short, "--preset", "higgs-5"), 2, "'higgs-5'", near)
    fails(kvcal("eval", *named(base), *short, "--dtype", "int8"), 2, "int8", "auto, float32")
    fails(kvcal("verify", bundle, "--model", base / "model", "--device", "abacus"), 2, "abacus", "allowed are cpu")
    fails(kvcal("verify", bundle, "--model", base / "model", "--device", "meta"), 2, "meta", "allowed are cpu")
    generate = ["generate", "--model", base / "model", "--prompt"]
    fails(kvcal(*generate, "a"), 2, "one --bundle or one --preset")
    fails(kvcal(*generate, "a", "--preset", "higgs-2", "--bundle", bundle), 2, "one --bundle or one --preset")
    fails(kvcal(*generate, "", "--preset", "higgs-2"), 2, "--prompt is empty")


@pytest.mark.parametrize("name", ["full", "fitted"])
def test_two_rows_may_not_share_a_name(name: str, base: Path, bundle: Path, tmp_path: Path) -> None:
    twin = tmp_path / f"{name}{SUFFIX}"
    twin.write_bytes(bundle.read_bytes())
    options = ["--length", 64, "--preset", "higgs-2", "--bundle", bundle, "--bundle", twin]
    fails(kvcal("eval", *named(base), *options), 2, f"two rows would be called {name!r}")


def test_a_preset_named_twice_is_one_row(base: Path) -> None:
    done = kvcal("eval", *named(base), "--length", 64, "--windows", 1, "-p", "higgs-2", "-p", "higgs-2", "--json")
    assert [row["name"] for row in done.json["rows"]] == ["full", "higgs-2"]


@pytest.mark.parametrize(
    "arguments", [["eval", "--step", "0"], ["verify"], ["generate"], ["fit-predictors", "--windows", "1"], ["evil"]]
)
def test_what_cannot_be_read_is_a_usage_error(arguments: list[str]) -> None:
    done = kvcal(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Error: " in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit-predictors", "--windows", "1"], "Invalid value for '--windows'"),
        (["models", "--modle"], "No such option: --modle"),
        (["models", "--quiet"], "--quiet goes before the command: kvcal --quiet models"),
        (["modles"], "No such command 'modles'"),
        (["generate"], "Missing option '--prompt'"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = finished(started(*arguments, folder=tmp_path))
    assert done.code == 2
    assert said in done.complaint and "--help)" in done.complaint


def test_no_arguments_print_the_help(tmp_path: Path) -> None:
    done = finished(started(folder=tmp_path))
    assert done.code == 0 and "fit-predictors" in done.out and not done.err


def test_fit_without_a_method_prints_its_help(tmp_path: Path) -> None:
    done = finished(started("fit", folder=tmp_path))
    assert done.code == 0 and "aqua-kv" in done.out and not done.err


@pytest.mark.parametrize("method", METHODS)
def test_fit_takes_what_the_command_of_the_method_takes(method: str) -> None:
    """Options, defaults and help are the same, and so is what runs."""
    alias, command = ROOT_COMMAND.commands["fit"].commands[method], ROOT_COMMAND.commands[METHODS[method]]
    described = [
        [(p.name, p.opts, p.secondary_opts, p.default, p.help) for p in one.params] for one in (alias, command)
    ]
    assert described[0] == described[1]
    assert inspect.unwrap(alias.callback) is inspect.unwrap(command.callback)


def test_fit_writes_the_bundle_of_the_command(base: Path, tmp_path: Path) -> None:
    options = ["--model", base / "model", "--text", base / "words.txt", "--windows", 4, "--length", 68, "--json"]
    hashes = {
        words: kvcal(*words, *options, "--output", tmp_path / f"{words[-1]}{SUFFIX}").json["sha256"]
        for words in (("fit", "innerq"), ("fit-norms",))
    }
    assert len(set(hashes.values())) == 1


def test_every_command_stands_in_a_group_with_a_line_of_help() -> None:
    """Lines of `kvcal --help` and examples fit 80 columns; each command has two, which docs/check.py parses."""
    in_groups = [name for commands in GROUPS.values() for name in commands]
    assert len(in_groups) == len(set(in_groups))
    assert {*app.COMMANDS, "fit"} <= set(in_groups)
    assert all(len(line) <= 80 for line in kvcal("--help").out.splitlines())
    examples = {name: examples_of(name) for name in [*app.COMMANDS, "fit", *(f"fit {method}" for method in METHODS)]}
    assert all(len(lines) == 2 for lines in examples.values())
    assert not [line for lines in examples.values() for line in lines if len(f"  {line}") > 80]


def test_help_of_methods_is_whole_and_types_are_short() -> None:
    methods = kvcal("fit", "--help").out
    assert (
        "..." not in methods.partition("Methods:")[2]
        and "predictors for each layer" in methods
        and "kvcal fit squat" in methods
    )
    options = kvcal("eval", "--help").out
    assert "list[" not in options and "range" not in options and "9223372036854775807" not in options
    assert options.index("-m, --model") < options.index("--random-weights")


def test_an_output_that_cannot_be_is_noticed_before_the_model_is_read(base: Path, tmp_path: Path) -> None:
    late = ["fit-predictors", "--model", base / "model", "--text", base / "words.txt", "--dtype", "int8"]
    fails(kvcal(*late, "--output", tmp_path / "none" / "x"), 1, "none is not a folder")
    fails(kvcal(*late, "--output", tmp_path), 1, "is a folder: give a file name")
    fails(kvcal(*late, "--output", ""), 1, "--output '' or . is a folder: give a file name")
