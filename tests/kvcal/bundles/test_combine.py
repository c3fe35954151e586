"""`kvcal combine`: keys of one bundle, values of another, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.bundles.combine import combine
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import SUFFIX, Done, kvcal, write_model, write_text

LENGTH = ["--windows", 5, "--length", 96]
WINDOWS = ["--sink", 4, "--recent", 16, "--block", 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("combine")
    write_model(base / "model")
    write_model(base / "other", seed=2)
    write_text(base / "words.txt")
    return base


def fitted(base: Path, name: str, *options: Any, model: str = "model", windows: list[Any] = WINDOWS) -> Path:
    path = base / f"{name}{SUFFIX}"
    text = ["--text", base / "words.txt", *LENGTH]
    done = kvcal("fit-predictors", "--model", base / model, *text, *windows, *options, "--output", path)
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def usual(base: Path) -> Path:
    return fitted(base, "usual")


@pytest.fixture(scope="module")
def own_values(base: Path) -> Path:
    """Values predicted from the values below only."""
    return fitted(base, "own", "--backbone", "uniform-4", "--first-layer", "", "--value-inputs", "v1")


def refused(done: Done, code: int, *parts: str) -> None:
    assert done.code == code
    assert all(part in done.complaint for part in parts), done.complaint


def test_keys_of_one_values_of_the_other(base: Path, usual: Path, own_values: Path) -> None:
    path = base / f"both{SUFFIX}"
    done = kvcal("combine", usual, own_values, "--output", path, "--json")
    assert done.code == 0, done.err
    first, second, both = (load_bundle(p).scheme for p in (usual, own_values, path))
    for a, b, c in zip(first.layers, second.layers, both.layers, strict=True):
        assert a and b and c
        assert (c.key.describe(), c.value.describe()) == (a.key.describe(), b.value.describe())
    assert kvcal("verify", path, "--model", base / "model").code == 0
    rows = kvcal("eval", "--model", base / "model", "--text", base / "words.txt", "--length", 120, "--windows", 1,
                 "--bundle", path, "--json").json["rows"]  # fmt: skip
    assert rows[1]["bits_per_value"] == pytest.approx(done.json["bits_per_value"], rel=0.01)
    assert rows[1]["kl"] > 0
    again = base / f"again{SUFFIX}"
    assert kvcal("combine", usual, own_values, "--output", again).code == 0
    assert again.read_bytes() == path.read_bytes()


def test_what_cannot_be_combined(base: Path, usual: Path, own_values: Path) -> None:
    output = base / f"never{SUFFIX}"
    say = ["values of usual are predicted from keys as usual itself stores them", "layer 1", "k0"]
    refused(kvcal("combine", own_values, usual, "--output", output), 2, *say)
    crossed = fitted(base, "crossed", "--key-inputs", "k1,v1")
    refused(
        kvcal("combine", crossed, own_values, "--output", output), 2, "keys of crossed are predicted from values", "v1"
    )
    wide = fitted(base, "wide", windows=["--sink", 4, "--recent", 16, "--block", 16])
    refused(kvcal("combine", wide, own_values, "--output", output), 2, "block 16", "block 8", "--block")
    other = fitted(base, "elsewhere", model="other")
    refused(kvcal("combine", other, own_values, "--output", output), 4, "different models", "revision")
    refused(kvcal("combine", usual, base / "none", "--output", output), 4, "no such bundle")
    refused(kvcal("combine", usual, own_values, "--output", base), 1, "is a folder")
    assert not output.exists()


ALIKE = ["--sink", 4, "--recent", 16, "--block", 16]
TEXT = ["--text", "words.txt", "--windows", 5, "--length", 96]
MADE: dict[str, list[Any]] = {
    "aqua": ["fit-predictors", *TEXT],
    "aqua after rope": ["fit-predictors", *TEXT, "--frame", "post_rope", "--value-inputs", "v1"],
    "aqua crossed": ["fit-predictors", *TEXT, "--key-inputs", "k1,v1"],
    "aqua x vq": ["fit-predictors", *TEXT, "--residual", "vq-1-k16", "--value-inputs", "v1"],
    "aqua x transform": ["fit-predictors", *TEXT, "--residual", "transform-2"],
    "aqua x factors": ["fit-predictors", *TEXT, "--residual", "inner-2-symmetric-scaled"],
    "aqua x mixkvq": ["fit-predictors", *TEXT, "--residual", "mixkvq-3", "--key-inputs", "k2,k1"],
    "vq alone": ["fit-predictors", *TEXT, "--residual", "vq-1-k16", "--key-inputs", "none", "--value-inputs", "none"],
    "innerq": ["fit-norms", *TEXT],
    "squat": ["measure-subspaces", *TEXT, "--group", 16, "--frame", "pre_rope", "--queries", "pre_rope"],
    "vqkv": ["train-codebooks", *TEXT, "--stages", "2,1,1", "--sizes", "16,16,16", "--vectors", 200, "--high-dims", 6],
    "mixkvq": ["tune-thresholds", *TEXT, "--group", 16, "--tau-low", 1, "--tau-high", 4],
    "preset": ["preset", "innerq-hybrid", "--per-layer", "0=exact-16"],
}  # fmt: skip


def test_every_pair_of_methods_runs_or_says_why_not(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key codec beside each value codec: refused by what one half reads of its own other half, and by nothing
    else; all others answer with finite logits that are not the model's.
    """
    monkeypatch.chdir(base)
    bundles = {}
    for name, command in MADE.items():
        done = kvcal(*command, *ALIKE, "--model", "model", "--output", "made")
        assert done.code == 0, (name, done.err)
        bundles[name] = load_bundle(Path("made"))
    model = load_model(resolve("model"), dtype="float32", device="cpu").model
    ids = torch.randint(1, 250, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model(ids).logits[:, 70:]
    refused = set()
    for one, keys in bundles.items():
        for other, values in bundles.items():
            wanted = [
                any(pair and part(pair).needs & inputs for pair in found.scheme.layers)
                for found, part, inputs in (
                    (keys, lambda pair: pair.key, {"v1", "v2"}),
                    (values, lambda pair: pair.value, {"k0", "k1", "k2"}),
                )
            ]
            if any(wanted):
                with pytest.raises(UsageError, match=r"layer 1: the (keys|values) of .* are predicted from") as raised:
                    combine(keys, values, hashes=("0", "1"))
                assert "\n" not in str(raised.value)
                refused.add((one, other))
                continue
            made = combine(keys, values, hashes=("0", "1"))
            with KVCalCache(made.scheme, model) as cache, torch.no_grad():
                model(ids[:, :70], past_key_values=cache)
                logits = model(ids[:, 70:], past_key_values=cache).logits
                assert int(cache.ledger.blocks.min()) > 0
            assert bool(torch.isfinite(logits).all()) and not torch.equal(logits, full), (one, other)
    values_of_keys = {"aqua", "aqua crossed", "aqua x transform", "aqua x factors", "aqua x mixkvq"}
    assert refused == {(a, b) for a in MADE for b in MADE if a == "aqua crossed" or b in values_of_keys}


def test_bundles_of_two_models_are_told_apart_in_a_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which is the first, by so many differences as other refusals name, without hashes."""
    small, large = (tmp_path / f"{name}{SUFFIX}" for name in ("small", "large"))
    for path, model in ((small, base / "model"), (large, "tiny")):
        made = kvcal("preset", "uniform-4", "--model", model, "--config-only", "-o", path)
        assert made.code == 0, made.err
    combined = ("combine", small, large, "--output", tmp_path / f"never{SUFFIX}")
    line = "small and large were made for different models: layers: first 4, second 8; "
    assert kvcal(*combined).complaint.endswith(f"{line}head_dim: first 16, second 64")
    monkeypatch.setattr("kvcal.bundles.combine.NAMED", 1)
    assert kvcal(*combined).complaint.endswith(f"{line}and 1 more")
