"""Which model is opened where a bundle is given and --model is not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kvcal.bundles.target_model import TargetModel, target_model
from kvcal.commands.target_model import with_model_of
from kvcal.pipeline.options import EvalOptions
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import IncompatibleBundle, UsageError
from tests.support.models_fixture import SUFFIX, kvcal, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, a bundle for it, and one for the embedded model."""
    base = tmp_path_factory.mktemp("made-for")
    write_model(base / "model")
    for name, model in (("local", base / "model"), ("embedded", "tiny")):
        done = kvcal("preset", "kivi-2", "--no-check", "--model", model, "--output", base / f"{name}{SUFFIX}")
        assert done.code == 0, done.err
    return base


@pytest.fixture
def bundle(base: Path) -> Bundle:
    return load_bundle(base / f"embedded{SUFFIX}")


def of_model(bundle: Bundle, **fields: object) -> Bundle:
    bundle.provenance["model"] = {
        "name": "tiny",
        "kind": "embedded",
        "revision": None,
        "random_weights": False,
    } | fields
    return bundle


SHORT = ["--windows", "1", "--length", "260"]


@pytest.mark.parametrize("words", [["eval", *SHORT], ["generate", "--prompt", "a"], ["compare", *SHORT]])
def test_a_folder_has_to_be_given(words: list[str], base: Path) -> None:
    done = kvcal(*words, "--bundle", base / f"local{SUFFIX}")
    assert done.code == 4 and done.out == ""
    assert done.err.splitlines()[-1] == "kvcal: local was made for model: give --model PATH"


@pytest.mark.parametrize(
    "words", [["eval", *SHORT], ["generate", "--prompt", "a"], ["verify"], ["inspect"], ["compare"]]
)
def test_another_model_is_answered_with_the_right_one(words: list[str], base: Path) -> None:
    place = [base / f"local{SUFFIX}"] if words[0] in ("verify", "inspect") else ["--bundle", base / f"local{SUFFIX}"]
    done = kvcal(*words, *place, "--model", "tiny")
    assert done.code == 4
    assert "was made for another model" in done.err and done.err.rstrip().endswith("made for model: give --model PATH")


def test_the_embedded_model_is_taken(base: Path) -> None:
    done = kvcal("generate", "--prompt", "The emperor", "--tokens", "2", "--json", "-b", base / f"embedded{SUFFIX}")
    assert done.code == 0 and done.json["text"].startswith("The emperor")


def test_bundles_of_two_models(base: Path) -> None:
    done = kvcal("eval", base / f"local{SUFFIX}", base / f"embedded{SUFFIX}", *SHORT)
    assert done.code == 2
    assert "local was made for model, embedded for tiny: give --model" in done.err


def test_a_hub_model_comes_with_its_commit(bundle: Bundle) -> None:
    commit = "0" * 40
    of_model(bundle, name="HuggingFaceTB/SmolLM2-135M", kind="hub", revision=commit)
    assert target_model(bundle) == TargetModel("HuggingFaceTB/SmolLM2-135M", False, commit, None)
    named = with_model_of(EvalOptions(), [bundle], ())
    assert (named.model, named.revision) == ("HuggingFaceTB/SmolLM2-135M", commit)
    assert with_model_of(EvalOptions(revision="v1"), [bundle], {"revision"}).revision == "v1"
    for given in (EvalOptions(), EvalOptions(model="other/model")):
        assert with_model_of(given, [bundle], {"model"}) == given


def test_random_weights_come_with_their_seed(bundle: Bundle) -> None:
    of_model(bundle, name="llama-3.2-1b", kind="hub", revision="random:7", random_weights=True)
    named = with_model_of(EvalOptions(), [bundle], ())
    assert (named.model, named.revision, named.random_weights, named.seed) == ("llama-3.2-1b", None, True, 7)


@pytest.mark.parametrize(
    "fields",
    [{"name": "../x", "kind": "hub"}, {"name": "/etc", "kind": "folder"}, {"kind": 7}, {"random_weights": "no"}],
)
def test_what_no_model_is_called_is_not_taken(fields: dict[str, object], bundle: Bundle) -> None:
    """The default stays, and the fingerprint decides."""
    of_model(bundle, **fields)
    assert target_model(bundle) is None and with_model_of(EvalOptions(), [bundle], ()) == EvalOptions()


def test_a_local_name_is_no_path(bundle: Bundle) -> None:
    of_model(bundle, name="here", kind="folder")
    with pytest.raises(IncompatibleBundle, match="was made for here: give --model PATH"):
        with_model_of(EvalOptions(), [bundle], ())
    with pytest.raises(UsageError, match="give --model"):
        with_model_of(EvalOptions(), [bundle, of_another(bundle)], ())


def of_another(bundle: Bundle) -> Bundle:
    another = Bundle(bundle.fingerprint, bundle.scheme, dict(bundle.provenance), path=Path(f"another{SUFFIX}"))
    return of_model(another, name="tiny")


def test_the_next_command_stands_last(base: Path, tmp_path: Path) -> None:
    """As it would be typed; it runs."""
    path = tmp_path / f"a b{SUFFIX}"
    done = kvcal("preset", "kivi-2", "--config-only", "--output", path, "--model", base / "model")
    words = shlex.split(done.out.splitlines()[-1].removeprefix("next: kvcal "))
    assert words == ["eval", str(path), "--model", str(base / "model")]
    assert kvcal(*words, *SHORT, "--text", "embedded:evaluation").code == 0
    joined = kvcal("combine", path, path, "--output", tmp_path / f"both{SUFFIX}").out.splitlines()[-1]
    assert kvcal(*shlex.split(joined.removeprefix("next: kvcal "))).code == 0
