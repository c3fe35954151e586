"""fit-predictors: same command same bytes, whatever interrupts it; and what it measured is what a cache does."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcal.capture.scan import Capture
from kvcal.cli.failure import explain
from kvcal.methods.aqua_kv import PREDICTOR_KINDS, AquaKV
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Context, Predicted
from kvcal_artifacts.errors import NonFiniteError, UsageError
from kvcal_artifacts.scheme import Scheme
from tests.support.models_fixture import (
    SMALL,
    SUFFIX,
    Done,
    denied,
    file_size_limit,
    finished,
    killed_at,
    kvcal,
    small_disk,
    started,
    wait_until,
    write_model,
    write_text,
)

LAYERS, LONG_LAYERS = 4, 16
LONG = ["--windows", "12", "--length", "260", "--block", "8"]


@dataclass(frozen=True)
class Given:
    """A model, a text, and the options that say so."""

    folder: Path
    text: Path

    @property
    def options(self) -> list[str]:
        return ["--model", str(self.folder), "--text", str(self.text)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    base = tmp_path_factory.mktemp("fit")
    return Given(write_model(base / "small", LAYERS), write_text(base / "words.txt"))


@pytest.fixture(scope="module")
def long(given: Given) -> Given:
    """More layers, and enough work in each that a process can be stopped between two of them."""
    return Given(write_model(given.folder.parent / "long", LONG_LAYERS), given.text)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / f"x{SUFFIX}"


def fit(given: Given, output: Path, *options: object) -> Done:
    return kvcal("fit-predictors", *given.options, *SMALL, "--output", output, "--json", *options)


def good(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(done.json)


@pytest.fixture(scope="module")
def usual(given: Given, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the plain small fit reports."""
    return good(fit(given, tmp_path_factory.mktemp("usual") / f"usual{SUFFIX}"))


@pytest.fixture(scope="module")
def model(given: Given) -> Any:
    return load_model(resolve(str(given.folder)), dtype="float32", device="cpu").model


def checkpoint(output: Path) -> Path:
    return output.parent / f".{output.name}.partial"


def fitted_layers(output: Path) -> list[Path]:
    return sorted(checkpoint(output).glob("layer-*.safetensors"))


# Same command, same bytes.


def test_the_same_command_gives_the_same_bytes(given: Given, usual: dict[str, Any], output: Path) -> None:
    again = good(fit(given, output))
    assert again["sha256"] == usual["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert again["layers"] == usual["layers"]
    assert [entry.name for entry in output.parent.iterdir()] == [output.name]


def test_another_seed_gives_other_bytes(given: Given, usual: dict[str, Any], output: Path) -> None:
    assert good(fit(given, output, "--seed", 1))["sha256"] != usual["sha256"]


def test_a_bundle_names_its_origin_and_no_path(given: Given, usual: dict[str, Any]) -> None:
    bundle = load_bundle(usual["bundle"])
    record = bundle.provenance
    assert record["method"] == "aqua-kv"
    assert record["settings"]["sink"] == 4
    assert record["model"]["name"] == "small"
    assert bundle.fingerprint.revision == record["model"]["revision"]
    assert record["text"]["source"] == "file:words.txt"
    assert record["text"]["sha256"] == hashlib.sha256(given.text.read_bytes()).hexdigest()
    assert str(given.folder.parent) not in json.dumps([record, bundle.metrics])


@pytest.mark.parametrize("options", [["--spill", "cpu"], ["--spill", "disk"], ["--layerwise"]], ids=" ".join)
def test_how_it_runs_changes_no_byte(given: Given, usual: dict[str, Any], output: Path, options: list[str]) -> None:
    assert good(fit(given, output, *options))["sha256"] == usual["sha256"]


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_change_only_last_bits(given: Given, usual: dict[str, Any], output: Path, batch: int) -> None:
    found = good(fit(given, output, "--batch", batch))
    for role in ("key", "value"):
        name = f"{role}_explained_variance"
        assert found[name] == pytest.approx(usual[name], abs=1e-5)


# Interrupted.


@pytest.fixture(scope="module")
def undisturbed(long: Given, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the long fit."""
    return str(good(fit(long, tmp_path_factory.mktemp("long") / f"x{SUFFIX}", *LONG))["sha256"])


def test_a_killed_fit_goes_on_and_gives_the_same_bytes(given: Given, output: Path, usual: dict[str, Any]) -> None:
    options = [*given.options, *SMALL, "--output", output]
    killed_at(f"{checkpoint(output)}/layer-0001*", "fit-predictors", *options, folder=output.parent)
    assert not output.exists()
    assert len(fitted_layers(output)) == 2
    again = fit(given, output)
    assert good(again)["sha256"] == usual["sha256"]
    assert again.json["resumed_layers"] == 2
    assert f"resuming after layer 1 of {LAYERS}" in again.err
    assert [entry.name for entry in output.parent.iterdir()] == [output.name]


def begun(long: Given, output: Path) -> subprocess.Popen[str]:
    """The long fit in a process of its own, one layer done."""
    process = started("fit-predictors", *long.options, *SMALL, *LONG, "--output", output, folder=output.parent)
    wait_until(lambda: bool(fitted_layers(output)), process)
    return process


@pytest.mark.parametrize("seconds", [0.27, 0.3, 0.33])
def test_control_c_while_importing_is_not_lost(long: Given, output: Path, seconds: float) -> None:
    """torch's extension module clears an exception raised while it is imported, some 0.2 to 0.35 s after the start."""
    process = started("fit-predictors", *long.options, *SMALL, *LONG, "--output", output, folder=output.parent)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    done = finished(process)
    assert not output.exists()
    assert done.code in (130, -signal.SIGINT), done  # the latter before Python itself has started
    assert done.code != 130 or done.err.splitlines()[-1] == "kvcal: interrupted"


SLOW_THREAD = """\
import threading, time, kvcal.cli
threading.Thread(target=time.sleep, args=(60,)).start()
kvcal.cli.main()
"""


def test_control_c_while_threads_end_prints_no_traceback(tmp_path: Path) -> None:
    """A thread that writes to a slow disk, say: Python waits for it when the command is over."""
    process = started("--version", folder=tmp_path, program=("-c", SLOW_THREAD))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("kvcal ")
    time.sleep(1)  # from the last line to where Python waits
    process.send_signal(signal.SIGINT)
    ended = finished(process)
    assert (ended.code, ended.err) == (130, "")


def test_control_c_is_one_line_and_keeps_the_checkpoint(long: Given, output: Path, undisturbed: str) -> None:
    process = begun(long, output)
    process.send_signal(signal.SIGINT)
    ended = finished(process)
    assert (ended.code, ended.complaint) == (130, "kvcal: interrupted")
    assert not output.exists()
    assert fitted_layers(output)
    assert good(fit(long, output, *LONG))["sha256"] == undisturbed


@pytest.fixture
def broken_off(given: Given, output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small fit, interrupted with layers 0 to 2 done."""
    whole = AquaKV.fit_layer

    def some(self: AquaKV, layer: int, *args: Any) -> Any:
        if layer == 3:
            raise KeyboardInterrupt
        return whole(self, layer, *args)

    monkeypatch.setattr(AquaKV, "fit_layer", some)
    ended = fit(given, output)
    monkeypatch.undo()
    assert (ended.code, ended.complaint) == (130, "kvcal: interrupted")
    assert len(fitted_layers(output)) == 3
    return output


def test_it_resumes_where_it_was(given: Given, usual: dict[str, Any], broken_off: Path) -> None:
    again = good(fit(given, broken_off))
    assert (again["resumed_layers"], again["sha256"]) == (3, usual["sha256"])
    assert again["layers"] == usual["layers"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_checkpoint_is_done_again(given: Given, usual: dict[str, Any], broken_off: Path, damage: str) -> None:
    file = fitted_layers(broken_off)[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"flipped": bytes(data), "cut": bytes(data[:-9]), "empty": b""}[damage])
    again = good(fit(given, broken_off))
    assert (again["resumed_layers"], again["sha256"]) == (1, usual["sha256"])


@pytest.mark.parametrize("settings", ["", "[]", "{}", "null"])
def test_a_checkpoint_of_unknown_settings_is_not_used(
    given: Given, usual: dict[str, Any], broken_off: Path, settings: str
) -> None:
    (checkpoint(broken_off) / "settings.json").write_text(settings)
    again = good(fit(given, broken_off))
    assert (again["resumed_layers"], again["sha256"]) == (0, usual["sha256"])


def test_other_settings_start_anew(given: Given, usual: dict[str, Any], broken_off: Path) -> None:
    again = fit(given, broken_off, "--ridge", 0.01)
    assert good(again)["resumed_layers"] == 0
    assert re.search(r"is of other settings \(\S*ridge was \S+, is 0.01\); starting anew", again.err), again.err
    assert again.json["sha256"] != usual["sha256"]


def test_no_resume_starts_anew(given: Given, usual: dict[str, Any], broken_off: Path) -> None:
    again = good(fit(given, broken_off, "--no-resume"))
    assert (again["resumed_layers"], again["sha256"]) == (0, usual["sha256"])


# What it measured is what a cache does.


def holdout(given: Given, count: int) -> Tensor:
    """The held-out windows of a fit of 8."""
    tokenizer = load_model(resolve(str(given.folder)), dtype="float32", device="cpu").tokenizer
    return token_windows.token_windows(tokenizer, str(given.text), windows=8, holdout=count, length=68, seed=0).holdout


def served(scheme: Scheme, model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What the packed blocks of a cache decode to, layer by layer, once it has seen these windows."""
    with KVCalCache(scheme, model) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        found: list[tuple[Tensor, Tensor]] = []
        for layer in cache.compressed_layers:
            below = {f"{r}{back}": found[-back][i] for back in (1, 2) if back <= len(found) for i, r in enumerate("kv")}
            context = Context(layer.index, **below)
            keys = layer.codecs.key.decode(layer.packed[0], context)
            context.k0 = keys
            found.append((keys, layer.codecs.value.decode(layer.packed[1], context)))
    return found


def relative_error(true: Tensor, decoded: Tensor) -> float:
    coded = true[:, :, 4 : 4 + decoded.shape[2]].double()
    return float((coded - decoded).square().sum() / coded.square().sum())


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ([], "float32", 1e-3),
        (["--frame", "post_rope"], "float32", 1e-3),
        (["--key-inputs", "k1,k2", "--value-inputs", "v1,k1,k0"], "float32", 1e-3),
        pytest.param(["--quantiser-agnostic", "--backbone", "uniform-2-channel"], "float32", 1e-3),
        ([], "bfloat16", 0.05),
        (["--residual", "squat-2", "--first-layer", ""], "float32", 1e-3),
        (["--residual", "squat-3", "--frame", "post_rope"], "float32", 1e-3),
        (["--residual", "mixkvq", "--first-layer", ""], "float32", 1e-3),
    ],
    ids=["default", "post_rope", "k2", "agnostic", "bfloat16", "squat", "squat-post_rope", "mixkvq"],
)
def test_training_sees_what_serving_does(
    given: Given, output: Path, options: list[str], dtype: str, tolerance: float
) -> None:
    """The errors on held-out windows in the bundle are those of blocks that a real cache packed and decoded."""
    good(fit(given, output, "--holdout", 3, "--recent", 0, "--dtype", dtype, *options))
    bundle, ids = load_bundle(output), holdout(given, 3)
    model = load_model(resolve(str(given.folder)), dtype=dtype, device="cpu").model
    decoded = served(bundle.scheme, model, ids)
    with Capture(model, ids, device="cpu") as capture:
        for taps, (keys, values), stated in zip(capture, decoded, bundle.metrics["layers"], strict=True):
            batch = next(taps.batches({"k", "v"}, bundle.scheme.frame))
            assert keys.shape[2] == 64
            for role, true, made in (("key", batch.k, keys), ("value", batch.v, values)):
                assert true is not None
                expected = pytest.approx(stated[f"{role}_relative_error"], rel=tolerance, abs=2e-6)
                assert relative_error(true, made) == expected, (taps.index, role)


def test_predictors_help_where_layers_are_alike(given: Given, usual: dict[str, Any], output: Path) -> None:
    """The canary: the plain backbone errs several times as much in every layer but the first."""
    plain = good(fit(given, output, "--key-inputs", "none", "--value-inputs", "none"))
    assert plain["bits_per_value"] == usual["bits_per_value"]
    assert plain["predictor_bytes"] < usual["predictor_bytes"]
    for index in range(1, LAYERS):
        for name in ("key_relative_error", "value_relative_error"):
            assert 0 < 3 * usual["layers"][index][name] < plain["layers"][index][name]
    assert plain["layers"][0] == usual["layers"][0]
    for role in ("key", "value"):
        assert 0.9 < usual[f"{role}_explained_variance"] < 1


def test_what_the_predictor_explains_is_what_the_codec_need_not(given: Given, usual: dict[str, Any]) -> None:
    """Two bits lose about an eighth of a variance (HIGGS d=2 n=16: 0.118), of the residual's instead of the key's."""
    for row in usual["layers"][1:]:
        for role in ("key", "value"):
            left = 1 - row[f"{role}_explained_variance"]
            assert row[f"{role}_relative_error"] < 0.5 * left


VARIANTS: dict[str, list[str]] = {
    "agnostic": ["--quantiser-agnostic"],
    "no key predictor": ["--key-inputs", "none"],
    "no value predictor": ["--value-inputs", "none"],
    "values from values": ["--value-inputs", "v1"],
    "two below": ["--key-inputs", "k1,k2", "--value-inputs", "v1,k0,v2,k2"],
    "only two below": ["--key-inputs", "k2"],
    "keys from values": ["--key-inputs", "k1,v1"],
    "post_rope": ["--frame", "post_rope"],
    "uniform": ["--backbone", "uniform-2", "--first-layer", "exact-16"],
    "per channel": ["--backbone", "uniform-2-channel", "--frame", "post_rope"],
    "squat": ["--residual", "squat-2"],
    "squat values as they are": ["--keys", "squat-2", "--values", "innerq-hybrid", "--frame", "post_rope"],
    "mixkvq": ["--residual", "mixkvq", "--first-layer", ""],
    "mixkvq's fixed tiers": ["--residual", "mixkvq-8-0", "--frame", "post_rope"],
    "mixkvq's thresholds and a layer apart": ["--residual", "mixkvq-3", "--per-layer", "-1=vq-2-k16"],
    "codebooks": ["--residual", "vq-2-k16", "--first-layer", ""],
    "codebooks alone": ["--residual", "vq-2-k16", "--key-inputs", "none", "--value-inputs", "none"],
    "factors": ["--keys", "higgs-2-balanced", "--values", "inner-2-hybrid", "--value-inputs", "v1,k1,k0"],
    "innerq's factors": ["--residual", "innerq-hybrid-plain-scaled", "--frame", "post_rope"],
    "squat's subspace": ["--keys", "squat-2-calibrated", "--values", "transform-2", "--predictor", "reduced-rank"],
    "d4": ["--backbone", "higgs-2-d4", "--first-layer", "higgs-3"],
    **{
        kind: ["--predictor", kind, *(("--mlp-epochs", "2") if kind.startswith("mlp") else ())]
        for kind in PREDICTOR_KINDS
        if kind != "linear"
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_a_bundle_that_generates(given: Given, output: Path, model: Any, name: str) -> None:
    reported = good(fit(given, output, *VARIANTS[name]))
    bundle, ids = load_bundle(output), holdout(given, 1)[:, :60]
    assert bundle.to_bytes() == output.read_bytes()
    with load_cache(bundle, model) as cache:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert out.shape == (1, 72)
        assert cache.bits_per_value() == pytest.approx(reported["bits_per_value"], rel=0.01)
        assert cache.nbytes("packed") > 0
        assert all(row["state"] == "applied" for row in cache.describe()["layers"])


def test_predictors_are_where_they_were_asked_for(given: Given, output: Path) -> None:
    good(fit(given, output, "--key-inputs", "k2", "--value-inputs", "none"))
    layers = load_bundle(output).scheme.layers
    inputs = [getattr(pair.key, "inputs", ()) for pair in layers if pair]
    assert inputs == [(), ("k1",), ("k2",), ("k2",)]  # layer 1 has but one layer below
    assert not any(isinstance(pair.value, Predicted) for pair in layers if pair)


# What goes wrong.


def spoilt(given: Given, folder: Path, tensor: str, value: float, where: Any = (3, 5)) -> Given:
    """The model with one weight, or those of `where`, of that value."""
    for file in given.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights[tensor][where] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Given(folder, given.text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_a_nan_in_a_layer_stops_it(given: Given, tmp_path: Path, part: str, value: float) -> None:
    bad = spoilt(given, tmp_path_of(tmp_path, "bad"), f"model.layers.2.{part}.weight", value)
    output = tmp_path_of(tmp_path, "out") / f"x{SUFFIX}"
    ended = fit(bad, output)
    assert ended.code == NonFiniteError.exit_code == 1
    assert "layer 2" in ended.complaint
    assert list(output.parent.iterdir()) == []  # to start again would end the same way


def test_a_layer_of_zeros_is_no_reason_to_stop(given: Given, tmp_path: Path) -> None:
    zeros = spoilt(given, tmp_path_of(tmp_path, "zeros"), "model.layers.1.self_attn.v_proj.weight", 0.0, ...)
    found = good(fit(zeros, tmp_path / f"x{SUFFIX}"))
    assert found["layers"][1]["value_relative_error"] == 0


def tmp_path_of(base: Path, name: str) -> Path:
    folder = base / name
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--length", "11"], "use --length 12 or more"),
        (["--holdout", "8"], "--holdout 8 of 8 windows leaves none"),
        (["--rank", "0"], "--rank applies only to predictors of reduced rank, and there is none"),
        (["--predictor", "bias", "--mlp-epochs", "4"], "--mlp-epochs applies only to MLP predictors"),
        (["--spill-dir", "."], "--spill-dir applies only to --spill disk, and --spill is device"),
        (["--spill", "tape"], "--spill tape: allowed are device, cpu and disk"),
        (["--frame", "mid_rope"], "--frame mid_rope: allowed are pre_rope, post_rope"),
        (["--backbone", "higgs-5"], "codec 'higgs-5' is not known; did you mean higgs-4, higgs-3 or higgs-2?"),
        (
            ["--residual", "vqkv"],
            "codec 'vqkv' needs a fit of its own (`kvcal train-codebooks`), its name alone is no codec; codebooks of "
            "residuals are vq-2 or vq-2-k4096",
        ),
        (["--per-layer", "0=vq-2-k7"], "a power of two from 2 to 65536"),
        (["--keys", "kivi-2-balanced"], "codes each key channel by itself"),
        (["--keys", "residual-vq"], "codec 'residual-vq' needs a fit of its own (`kvcal train-codebooks`)"),
        (["--values", "scaled"], "codec 'scaled' needs a fit of its own (`kvcal fit-norms`)"),
        (
            ["--residual", "kvtuner"],
            "(`kvcal tune-bits`), its name alone is no codec; bits of layers go into --per-layer",
        ),
        (["--predictor", "tree"], "predictor tree: allowed are linear"),
        (["--key-inputs", "k1,k0"], "key predictor input 'k0': allowed are k1"),
        (["--value-inputs", "q1"], "value predictor input 'q1'"),
        (["--ridge", "0"], "ridge 0.0: must be positive"),
        pytest.param(["--ridge", "nan"], "ridge nan: must be positive"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense(given: Given, output: Path, options: list[str], says: str) -> None:
    ended = fit(given, output, *options)
    assert ended.code == UsageError.exit_code == 2
    assert says in ended.complaint
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("limit", [2000, 20_000], ids=["checkpoint", "bundle"])
def test_a_full_disk_is_one_line_and_no_half_a_file(
    given: Given, usual: dict[str, Any], output: Path, limit: int
) -> None:
    """The limit is met by a layer's checkpoint, or only by the whole bundle at the end."""
    output.write_bytes(b"old")
    with file_size_limit(limit):
        ended = fit(given, output)
    assert ended.code == 1
    assert "cannot be written: File too large" in ended.complaint
    assert output.read_bytes() == b"old"
    assert not list(output.parent.rglob("*.tmp"))
    assert len(fitted_layers(output)) == (LAYERS if limit == 20_000 else 0)
    assert good(fit(given, output))["sha256"] == usual["sha256"]


def test_a_disk_that_is_really_full(given: Given, tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        ended = fit(given, disk / f"x{SUFFIX}")
        assert ended.code == 1
        assert "No space left on device" in ended.complaint
        assert not (disk / f"x{SUFFIX}").exists()


def test_no_permission_is_said_before_any_work(given: Given, output: Path) -> None:
    output.write_bytes(b"old")
    with denied(output.parent):
        ended = fit(given, output)
    assert ended.code == 1
    assert "cannot be written to (Permission denied)" in ended.complaint
    assert [(entry.name, entry.read_bytes()) for entry in output.parent.iterdir()] == [(output.name, b"old")]


@pytest.mark.parametrize("where", ["none/x", "."])
def test_an_output_that_cannot_be(given: Given, tmp_path: Path, where: str) -> None:
    ended = fit(given, tmp_path / where)
    assert ended.code == 1
    assert "folder" in ended.complaint
    assert list(tmp_path.iterdir()) == []


def test_interrupt_has_its_code() -> None:
    assert explain(KeyboardInterrupt()) == ("interrupted", 130)


def test_an_interrupt_while_a_class_is_made_is_an_interrupt() -> None:
    """Python before 3.12 raises a RuntimeError in its place."""

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises((RuntimeError, KeyboardInterrupt)) as raised:
        type("Made", (), {"field": Named()})
    assert explain(raised.value) == ("interrupted", 130)
    other = RuntimeError("cannot tidy up")
    other.__context__ = KeyboardInterrupt()
    assert explain(other)[1] == 1
