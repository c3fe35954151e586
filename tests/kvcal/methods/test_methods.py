"""The contract every method keeps: walks METHODS, each at its own defaults but for the settings in SMALL, and AQUA-KV
over every kind of codec that is learned from its residuals (CALIBRATED).

A method listed in METHODS is in here without an entry anywhere else. Its defaults must suit a model of head_dim 16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from kvcal.calibrate.driver import fit
from kvcal.calibrate.job import FitResult
from kvcal.capture.scan import WholeModel
from kvcal.methods import METHODS
from kvcal.methods.base import settings_of
from kvcal.methods.registry import CALIBRATED
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import IncompatibleBundle, NonFiniteError, UsageError
from tests.support.architectures import initialise
from tests.support.models_fixture import ROOT, SUFFIX, write_model
from tests.support.schemes import token_ids

# By the name of the setting, whatever method has it: short windows, and codebooks that a thousand vectors fill.
SMALL: dict[str, Any] = {"sink": 4, "recent": 16, "block": 32, "stages": (2, 2, 2), "sizes": (16, 16, 16), "high": 6}
LAYERS, LENGTH = 4, 132
PROMPT, STEP = 120, 6  # tokens of the first call and of the two behind it, which read what it packed

UNDER = {f"aqua-kv-{family.example}": family.example for family in CALIBRATED.values()}
ALL = [*METHODS, *UNDER]
every_method = pytest.mark.parametrize("name", ALL)


def method_of(name: str, **changes: Any) -> Any:
    """The method's defaults, made small where it has such settings."""
    kind = type_of(name)
    own = {f.name for f in fields(kind)}
    given = SMALL | ({"backbone": UNDER[name]} if name in UNDER else {}) | changes
    return kind(**{setting: value for setting, value in given.items() if setting in own})


def type_of(name: str) -> type[Any]:
    return METHODS["aqua-kv" if name in UNDER else name]


@dataclass
class Workshop:
    """A model folder, its text, and one fit of each method."""

    base: Path
    folder: Path
    fits: dict[str, FitResult]

    def model(self) -> Any:
        return load_model(resolve(str(self.folder)), dtype="float32", device="cpu").model

    def fit(
        self, method: Any, output: Path, model: Any = None, said: list[str] | None = None, **text: Any
    ) -> FitResult:
        windows: Any = SimpleNamespace(
            train=token_ids(6, LENGTH, seed=1), holdout=token_ids(2, LENGTH, seed=2), source="random",
            sha256="0" * 64, ids_sha256="1" * 64, tokens_read=0, bos=False, column=None, **text,
        )  # fmt: skip
        return fit(
            method, WholeModel(model or self.model()), windows, output, model_record={"name": "small"}, revision=None,
            device=torch.device("cpu"), say=(said if said is not None else []).append,
        )  # fmt: skip

    def usual(self, name: str) -> FitResult:
        """The method at SMALL settings, fitted once."""
        if name not in self.fits:
            self.fits[name] = self.fit(method_of(name), self.base / f"{name}{SUFFIX}")
        return self.fits[name]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    base = tmp_path_factory.mktemp("methods")
    return Workshop(base, write_model(base / "small", LAYERS), {})


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / f"x{SUFFIX}"


@torch.no_grad()
def logits(model: Any, cache: Any) -> Tensor:
    """(2, tokens, vocabulary) of three calls."""
    ids = token_ids(2, PROMPT + 2 * STEP, seed=3)
    parts = [ids[:, :PROMPT], ids[:, PROMPT : PROMPT + STEP], ids[:, PROMPT + STEP :]]
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@every_method
def test_what_a_method_declares(name: str) -> None:
    method = type_of(name)()
    assert type_of(method.name) is type_of(name) and "\n" not in name
    assert is_dataclass(method) and method.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert method.taps <= {"q", "k", "v"}
    assert method.frame in ("pre_rope", "post_rope")
    assert method == type_of(name)()


@every_method
def test_a_bundle_is_whole(name: str, shop: Workshop) -> None:
    """It reads back, verifies against its model, and says what was done."""
    result, method = shop.usual(name), method_of(name)
    bundle = load_bundle(result.path)
    assert bundle.to_bytes() == result.path.read_bytes() == result.bundle.to_bytes()
    bundle.check(shop.model())
    assert (bundle.scheme.windows, bundle.scheme.frame) == (method.windows, method.frame)
    assert len(bundle.scheme.layers) == LAYERS and None not in bundle.scheme.layers
    bundle.scheme.check_chain()
    assert [entry.name for entry in shop.base.iterdir() if entry.name.startswith(".")] == []
    for figure in ("key_relative_error", "output_error", "logit_error", "value_relative_error"):
        if figure in bundle.metrics:
            assert 0 <= bundle.metrics[figure] < 1.5, figure
            break
    else:
        pytest.fail(f"the bundle of {name} states no held-out error: {sorted(bundle.metrics)}")


@every_method
def test_settings_survive_in_provenance(name: str, shop: Workshop) -> None:
    record = load_bundle(shop.usual(name).path).provenance
    method = method_of(name)
    assert (record["method"], record["seed"], record["model"]) == (method.name, 0, {"name": "small"})
    assert record["settings"] == json.loads(json.dumps(settings_of(method)))
    assert record["settings"].keys() == {f.name for f in fields(method)}
    assert str(shop.base) not in json.dumps([record, shop.usual(name).bundle.metrics])


@every_method
def test_compression_happens(name: str, shop: Workshop) -> None:
    """The canary: fewer bytes than full precision takes, and other logits, but not any."""
    result, model = shop.usual(name), shop.model()
    full = logits(model, DynamicCache(config=model.config))
    with KVCalCache(result.bundle.scheme, model) as cache:
        found = logits(model, cache)
        blocks = cache.ledger.blocks
        assert blocks.tolist() == [(LENGTH - method_of(name).windows.sink - 16) // 32] * 2
        assert 0 < cache.nbytes("packed") * 8 < 16 * cache.packed_values()
        assert cache.bits_per_value() == pytest.approx(result.bundle.metrics["bits_per_value"], rel=0.15)
    assert torch.equal(found[:, :PROMPT], full[:, :PROMPT]), "a prompt attends to exact keys and values"
    change = float((found - full)[:, PROMPT:].norm() / full[:, PROMPT:].norm())
    assert 1e-4 < change < 1


FRESH = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from kvcal_artifacts import load_cache
folder, calls, output, *bundles = sys.argv[1:]
torch.set_num_threads(int(load_file(calls)["threads"]))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids, found = load_file(calls), {}
for bundle in bundles:
    with load_cache(bundle, model) as cache, torch.no_grad():
        parts = [model(ids[str(i)], past_key_values=cache).logits for i in range(len(ids) - 1)]
    found[bundle] = torch.cat(parts, 1)
assert not [name for name in sys.modules if name.split(".")[0] == "kvcal"], "the toolchain was imported"
save_file(found, output)
"""


@pytest.fixture(scope="module")
def fresh(shop: Workshop, request: pytest.FixtureRequest) -> dict[str, Tensor]:
    """What one other process, with the runtime alone, makes of the bundles of all methods under test."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    paths = {name: str(shop.usual(name).path) for name in ALL if name in asked}
    ids = token_ids(2, PROMPT + 2 * STEP, seed=3)
    parts = ids.split([PROMPT, STEP, STEP], 1)
    calls = {str(i): part.contiguous() for i, part in enumerate(parts)}
    save_file(calls | {"threads": torch.tensor(torch.get_num_threads())}, shop.base / "calls")
    path = os.pathsep.join([str(ROOT / "kernels"), str(ROOT / "artifacts"), os.environ.get("PYTHONPATH", "")])
    arguments = [str(shop.folder), str(shop.base / "calls"), str(shop.base / "logits"), *paths.values()]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *arguments], cwd=shop.base, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = load_file(shop.base / "logits")
    return {name: found[bundle] for name, bundle in paths.items()}


@every_method
def test_a_fresh_process_gives_the_same_logits(name: str, shop: Workshop, fresh: dict[str, Tensor]) -> None:
    model = shop.model()
    with KVCalCache(shop.usual(name).bundle.scheme, model) as cache:  # as fitted, never written
        assert torch.equal(fresh[name], logits(model, cache))


@every_method
def test_two_fits_give_the_same_bytes(name: str, shop: Workshop, output: Path) -> None:
    again = shop.fit(method_of(name), output)
    assert output.read_bytes() == shop.usual(name).path.read_bytes()
    assert again.sha256 == shop.usual(name).sha256
    assert [entry.name for entry in output.parent.iterdir()] == [output.name]


@contextmanager
def killed_at_checkpoint(number: int) -> Iterator[None]:
    """Ctrl-C where that file of a checkpoint would be put in place; settings do not count."""
    real, seen = os.replace, 0

    def replace_file(source: Any, target: Any) -> None:
        nonlocal seen
        seen += Path(target).parent.suffix == ".partial" and Path(target).name != "settings.json"
        if seen == number:
            raise KeyboardInterrupt
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace_file)
        yield


def collected(name: str) -> int:
    """Files of layers that are kept before what is fitted: a collection goes on only where it is whole."""
    return LAYERS if name == "vqkv" else 0


@every_method
def test_an_interrupted_fit_goes_on_and_gives_the_same_bytes(name: str, shop: Workshop, output: Path) -> None:
    number = 3 + collected(name)
    with pytest.raises(KeyboardInterrupt), killed_at_checkpoint(number):
        shop.fit(method_of(name), output)
    assert not output.exists()
    kept = list(output.parent.glob(".*/*.safetensors"))
    assert len(kept) == number - 1
    said: list[str] = []
    shop.fit(method_of(name), output, said=said)
    assert any(line.startswith("resuming after") for line in said), said
    assert output.read_bytes() == shop.usual(name).path.read_bytes()
    assert [entry.name for entry in output.parent.iterdir()] == [output.name]


@every_method
def test_other_settings_do_not_resume(name: str, shop: Workshop, output: Path) -> None:
    """What an interrupted run left is of its own settings."""
    with pytest.raises(KeyboardInterrupt), killed_at_checkpoint(2 + collected(name)):
        shop.fit(method_of(name, recent=24), output)
    said: list[str] = []
    shop.fit(method_of(name), output, said=said)
    assert not any(line.startswith("resuming") for line in said)
    assert output.read_bytes() == shop.usual(name).path.read_bytes()


@every_method
@pytest.mark.parametrize("role", ["k_proj", "v_proj"])
def test_a_model_with_a_nan_is_refused_in_one_line(name: str, role: str, shop: Workshop, output: Path) -> None:
    model = shop.model()
    with torch.no_grad():
        getattr(model.model.layers[2].self_attn, role).weight[3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 2") as raised:
        shop.fit(method_of(name), output, model)
    assert "\n" not in str(raised.value)
    assert list(output.parent.iterdir()) == []


@every_method
def test_windows_too_short_are_refused_in_one_line(name: str, shop: Workshop, output: Path) -> None:
    """Nothing behind the sink, or no whole block: before any work, and nothing is left behind."""
    own = method_of(name, sink=LENGTH)
    with pytest.raises(UsageError) as raised:
        shop.fit(own, output)
    assert "\n" not in str(raised.value)
    assert list(output.parent.iterdir()) == []


@every_method
def test_another_model_is_refused(name: str, shop: Workshop) -> None:
    """A twin of other weights, and one of another shape."""
    bundle, twin = load_bundle(shop.usual(name).path), shop.model()
    initialise(twin, seed=9)
    with pytest.raises(IncompatibleBundle) as raised:
        load_cache(bundle, twin)
    assert "\n" not in str(raised.value)
    other = write_model(shop.base / f"other-{name}", LAYERS - 1)
    with pytest.raises(IncompatibleBundle, match=rf"{LAYERS}.*{LAYERS - 1}|{LAYERS - 1}.*{LAYERS}"):
        load_cache(bundle, load_model(resolve(str(other)), dtype="float32", device="cpu").model)


def test_small_settings_are_known() -> None:
    """Each entry of SMALL is a setting of some method: a renamed one would otherwise go unnoticed."""
    known = {f.name for method in METHODS.values() for f in fields(method)}
    assert known >= SMALL.keys()
    assert all(METHODS[name] is method for name, method in ((m.name, m) for m in METHODS.values()))
    assert replace(method_of(next(iter(METHODS))), recent=24) != method_of(next(iter(METHODS)))
