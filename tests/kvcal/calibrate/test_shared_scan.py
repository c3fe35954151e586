"""Several bundles from one scan: the bytes of separate runs, and one forward of each layer for all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvcal.calibrate.driver import fit, fit_together
from kvcal.calibrate.job import FitJob, FitOptions
from kvcal.calibrate.outlier_guard import Advice
from kvcal.capture.scan import WholeModel
from kvcal.methods import VQKV, AquaKV, InnerQ, KVTuner, MixKVQ, Squat
from kvcal.methods.codebooks import Training
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.hf import decoder_of
from tests.support.models_fixture import SUFFIX, write_model

LAYERS, WINDOWS = 3, {"sink": 4, "recent": 16, "block": 8}
METHODS: dict[str, Any] = {
    "aqua": AquaKV(**WINDOWS),
    "aqua-reach-2": AquaKV(backbone="uniform-2", first_layer="", key_inputs=("k1", "k2"), **WINDOWS),
    "squat": Squat(group=8, **WINDOWS),
    "innerq": InnerQ(key="uniform-2", value="uniform-2", **WINDOWS),
    "kvtuner": KVTuner(max_bits=9, group=8, **WINDOWS),
    "mixkvq": MixKVQ(group=8, value_group=8, **WINDOWS),
    "vqkv": VQKV(
        stages=(2, 2, 2), sizes=(16, 16, 16), high=0, vectors=200, training=Training(least=1, most=3), **WINDOWS
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_model(tmp_path_factory.mktemp("shared") / "m", LAYERS)
    return load_model(resolve(str(folder)), dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def text() -> token_windows.Windows:
    return token_windows.random_windows(256, windows=6, length=60, holdout=2, seed=0)


def keywords(model: Any) -> dict[str, Any]:
    return {
        "model_record": {"name": "m"},
        "revision": "r",
        "device": torch.device("cpu"),
        "options": FitOptions(batch=2),
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def jobs(folder: Path) -> list[FitJob]:
    return [FitJob(method, folder / f"{name}{SUFFIX}") for name, method in METHODS.items()]


@pytest.fixture(scope="module")
def alone(model: Any, text: token_windows.Windows, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {
        job.output.name: fit(job.method, WholeModel(model), text, job.output, **keywords(model)).sha256
        for job in jobs(folder)
    }


@pytest.mark.parametrize("turned", [False, True])
def test_a_shared_scan_gives_the_bytes_of_separate_runs(
    model: Any, text: token_windows.Windows, alone: dict[str, str], tmp_path: Path, turned: bool
) -> None:
    """Whichever comes last, whose last pass is the layer's own advance."""
    wanted = jobs(tmp_path)[:: -1 if turned else 1]
    results = fit_together(wanted, WholeModel(model), text, **keywords(model))
    assert {result.path.name: result.sha256 for result in results} == alone
    assert {path.name: sha256(path) for path in tmp_path.iterdir()} == alone  # and no checkpoint is left


def test_each_layer_runs_whole_once_for_all(model: Any, text: token_windows.Windows, tmp_path: Path) -> None:
    """All windows in the fit, and the held-out ones, joined, in the forecast: exact, and with what each scheme packs."""
    layer: nn.Module = decoder_of(model).layers[0]
    calls = []
    hook = layer.mlp.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    with hook:
        fit_together(jobs(tmp_path), WholeModel(model), text, **keywords(model))
    assert calls == [2, 2, 2] + [1] * (len(METHODS) + 2)  # exact once more, for the codebooks, which come later


class LoadCounter(WholeModel):
    """loads: how often each layer was."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.loads = [0] * LAYERS

    def load_layer(self, index: int) -> nn.Module:
        self.loads[index] += 1
        return super().load_layer(index)


def test_one_forecast_serves_all_bundles(
    model: Any, text: token_windows.Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is loaded for the fit, for the forecast, and for that of codebooks, which are trained after the scan;
    bundles of one name are told apart.
    """
    source, said = LoadCounter(model), []
    monkeypatch.setattr("kvcal.calibrate.outlier_guard.GRADES", ((0.0, "is said of all"),))
    monkeypatch.setattr(
        "kvcal.calibrate.outlier_guard.advice", lambda model, ids, schemes, device: dict.fromkeys(schemes, Advice(""))
    )
    (tmp_path / "other").mkdir()
    wanted = [*jobs(tmp_path), FitJob(METHODS["squat"], tmp_path / "other" / f"squat{SUFFIX}")]
    fit_together(wanted, source, text, **keywords(model), say=said.append)
    assert source.loads == [3] * LAYERS
    named = [line.split()[1] for line in said if "is said of all" in line]
    assert named == [*(str(job.output) for job in wanted if job.output.name != f"vqkv{SUFFIX}"), "vqkv"]


def test_the_forecast_is_of_held_out_text(
    model: Any, text: token_windows.Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        "kvcal.calibrate.outlier_guard.warnings",
        lambda model, ids, schemes, device, text, unfitted: seen.append(ids) or [],
    )
    fit_together(jobs(tmp_path)[:2], WholeModel(model), text, **keywords(model))
    assert len(seen) == 1 and torch.equal(seen[0], text.holdout)


def test_each_bundle_goes_on_from_its_own_checkpoint(
    model: Any, text: token_windows.Windows, alone: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off in the second method's second layer: one has two layers done, the other one."""
    wanted = jobs(tmp_path)[:3]

    def broken(self: Any, layer: int, taps: Any, carry: Any) -> Any:
        if layer == 1:
            raise KVCalError("pulled the plug")
        return original(self, layer, taps, carry)

    original = Squat.fit_layer
    monkeypatch.setattr(Squat, "fit_layer", broken)
    with pytest.raises(KVCalError, match=r"pulled the plug .*wait in"):
        fit_together(wanted, WholeModel(model), text, **keywords(model))
    monkeypatch.setattr(Squat, "fit_layer", original)
    done = {name: len(list((tmp_path / f".{name}{SUFFIX}.partial").glob("layer-*"))) for name in ("aqua", "squat")}
    assert done == {"aqua": 2, "squat": 1}
    results = fit_together(wanted, WholeModel(model), text, **keywords(model))
    assert [result.resumed_layers for result in results] == [2, 2, 1]
    assert all(result.sha256 == alone[result.path.name] for result in results)


def test_taps_of_another_reader_end_with_their_turn(model: Any, text: token_windows.Windows) -> None:
    from kvcal.capture.scan import Capture

    with Capture(WholeModel(model), text.train, device="cpu") as capture:
        for taps in capture:
            with taps.shared() as own:
                list(own.batches({"k"}, advance=True))
                with pytest.raises(KVCalError, match="was advanced"):
                    next(own.batches({"k"}))
            with pytest.raises(KVCalError, match="left behind"):
                next(own.batches({"k"}))
            before = torch.cat([batch.k for batch in taps.batches({"k"}) if batch.k is not None])
            assert len(before) == len(text.train)  # and the layer's input is still there
