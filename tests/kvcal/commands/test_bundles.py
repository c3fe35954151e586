"""Bundles as artifacts: errors by layer and head, what differs between two, and the model card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from kvcal.bundles.diff import SECTIONS, compared
from kvcal.capture.scan import Capture, WholeModel
from kvcal.evaluate.errors import measured_head_errors, stored_head_errors
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts import load_bundle
from kvcal_artifacts.scheme import HeavyHitters
from tests.support.models_fixture import SMALL, SUFFIX, Done, kvcal, write_model, write_text

LAYERS, HEADS, SINK, BLOCK = 4, 2, 4, 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and bundles: fitted, another ridge, a preset, a search."""
    base = tmp_path_factory.mktemp("artifacts")
    write_model(base / "model", LAYERS)
    write_text(base / "words.txt")
    named = ["--model", base / "model", "--text", base / "words.txt"]
    made = [
        ("fit-predictors", *named, *SMALL, "--output", base / f"fitted{SUFFIX}"),
        ("fit-predictors", *named, *SMALL, "--ridge", 0.1, "--output", base / f"other{SUFFIX}"),
        ("preset", "kivi-2", "--model", base / "model", "--recent", 16, "--output", base / f"kivi{SUFFIX}"),
    ]
    for command in made:
        done = kvcal(*command)
        assert done.code == 0, done.err
    return base


@pytest.fixture(scope="module")
def bundle(base: Path) -> Path:
    return base / f"fitted{SUFFIX}"


# inspect.


def test_stored_errors_are_means_over_heads(bundle: Path) -> None:
    """Weighted by the heads' squares, so between the smallest and the largest."""
    metrics = load_bundle(bundle).metrics
    for row in metrics["layers"]:
        for role in ("key", "value"):
            heads = row[f"{role}_head_errors"]
            assert len(heads) == HEADS and min(heads) <= row[f"{role}_relative_error"] <= max(heads)
            assert len(set(heads)) == HEADS
    assert "key_head_errors" not in metrics  # a mean of lists has no meaning


def test_inspect_shows_errors_by_layer_and_head(bundle: Path) -> None:
    found = kvcal("inspect", bundle, "--json").json["head_errors"]
    stored = load_bundle(bundle).metrics["layers"]
    assert found["key"] == [row["key_head_errors"] for row in stored]
    assert found["from"] == "held-out windows of the fit"
    table = kvcal("inspect", bundle, "--wide").out
    assert f"{stored[2]['value_head_errors'][1]:.5f}" in table and "values 1" in table


def test_measured_errors_are_those_of_the_codec(base: Path) -> None:
    """KIVI's codec on the keys of a plain forward, head by head."""
    loaded = load_model(resolve(str(base / "model")), dtype="float32", device="cpu")
    ids = torch.arange(3 * 68).view(3, 68) * 7 % 256
    scheme = load_bundle(base / f"kivi{SUFFIX}").scheme
    found = measured_head_errors(loaded.model, scheme, ids)
    packed = slice(0, (68 - 16) // 32 * 32)
    with torch.no_grad(), Capture(WholeModel(loaded.model), ids, device=torch.device("cpu")) as capture:
        for taps in capture:
            pair = scheme.layers[taps.index]
            assert pair is not None
            (batch,) = taps.batches({"k", "v"}, "post_rope", advance=True)
            for codec, x, rows in ((pair.key, batch.k, found.key), (pair.value, batch.v, found.value)):
                assert x is not None
                exact = x[:, :, packed].double()
                error = (codec.encode_decode(x[:, :, packed])[1] - exact).square().sum((0, 2, 3))
                assert rows[taps.index] == pytest.approx((error / exact.square().sum((0, 2, 3))).tolist(), rel=1e-4)
    assert found.tokens == 3 * 32


def test_measuring_leaves_selection_out(base: Path) -> None:
    loaded = load_model(resolve(str(base / "model")), dtype="float32", device="cpu")
    ids = torch.arange(2 * 68).view(2, 68) * 7 % 256
    scheme = load_bundle(base / f"kivi{SUFFIX}").scheme
    kept = replace(scheme, selection=HeavyHitters(0.5))
    assert measured_head_errors(loaded.model, kept, ids) == measured_head_errors(loaded.model, scheme, ids)


def test_inspect_measures_with_a_model(base: Path, bundle: Path) -> None:
    named = ["--model", base / "model", "--text", base / "words.txt", "--windows", 2, "--length", 100]
    found = kvcal("inspect", base / f"kivi{SUFFIX}", *named, "--json")
    assert found.code == 0, found.err
    errors = found.json["head_errors"]
    assert errors["from"] == "measured on file:words.txt" and errors["tokens"] == 2 * 64
    assert all(0 < x < 1 for role in ("key", "value") for row in errors[role] for x in row)
    assert kvcal("inspect", bundle, *named, "--json").json["head_errors"]["from"].startswith("measured")


def test_a_plot_has_the_same_bytes_twice(base: Path, bundle: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    assert kvcal("inspect", bundle, "--plot", one).code == 0
    assert kvcal("inspect", bundle, "--plot", two).code == 0
    assert one.read_bytes() == two.read_bytes() and one.read_bytes().startswith(b"\x89PNG")
    named = ["--model", base / "model", "--text", base / "words.txt", "--windows", 1, "--length", 100]
    assert kvcal("inspect", base / f"kivi{SUFFIX}", *named, "--plot", two).code == 0
    assert one.read_bytes() != two.read_bytes()


def fails(done: Done, code: int, *parts: str) -> None:
    assert done.code == code, done.err
    assert all(part in done.complaint for part in parts), done.err


def test_inspect_refuses(base: Path, bundle: Path, tmp_path: Path) -> None:
    kivi = base / f"kivi{SUFFIX}"
    fails(kvcal("inspect", kivi, "--plot", tmp_path / "x.png"), 2, "stores no errors by head", "--model")
    fails(kvcal("inspect", bundle, "--plot", tmp_path / "x.gif"), 2, "must end in .png")
    fails(kvcal("inspect", bundle, "--windows", 3), 2, "--windows applies only to a measurement", "give --model")
    named = ["--model", base / "model", "--text", base / "words.txt"]
    fails(kvcal("inspect", kivi, *named, "--length", 40), 2, "40 tokens pack nothing", "--length 48")
    fails(kvcal("inspect", bundle, "--model", "tiny"), 4, "made for another model")
    assert not list(tmp_path.iterdir())


def test_a_bundle_of_before_has_no_errors_by_head(bundle: Path, tmp_path: Path) -> None:
    old = load_bundle(bundle)
    for row in old.metrics["layers"]:
        del row["key_head_errors"], row["value_head_errors"]
    old.write(tmp_path / "old")
    assert stored_head_errors(old.metrics) is None
    assert kvcal("inspect", tmp_path / "old", "--json").json["head_errors"] is None
    assert kvcal("inspect", tmp_path / "old").code == 0


# diff.


def test_a_bundle_and_itself(bundle: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    twin.write_bytes(bundle.read_bytes())
    done = kvcal("diff", bundle, twin)
    assert (done.code, done.out, done.err) == (0, "the same bytes\n", "")
    assert kvcal("diff", bundle, twin, "--json").json["same"] is True


def test_diff_names_the_setting_and_the_first_tensor(base: Path, bundle: Path) -> None:
    done = kvcal("diff", bundle, base / f"other{SUFFIX}", "--json")
    assert done.code == 7 and done.err == ""
    found = done.json
    assert found["settings"] == [{"what": "settings.ridge", "a": 0.001, "b": 0.1, "change": 0.099}]
    assert not (found["model"] or found["scheme"] or found["codecs"])
    assert found["first_tensor"] == found["tensors"][0]
    assert found["first_tensor"]["what"] == "layers.1.key.inner.factor"  # nothing predicts layer 0
    assert any(row["what"].startswith("layers.1.key.predictor.") for row in found["tensors"])
    assert found["metrics"]
    told = kvcal("diff", bundle, base / f"other{SUFFIX}")
    assert told.code == 7 and "settings.ridge: 0.001 -> 0.1" in told.out
    assert "layers.1.key.inner.factor" in told.out and "layers.1.key.predictor." in told.out


def test_diff_says_where_and_how_much(bundle: Path, tmp_path: Path) -> None:
    changed = load_bundle(bundle)
    weight = changed.scheme.layers[2].value.tensors()["predictor.weight"]  # type: ignore[union-attr]
    weight[3, 5] += 1
    changed.write(tmp_path / "changed")
    found = kvcal("diff", bundle, tmp_path / "changed", "--json").json
    (row,) = found["tensors"]
    assert row["what"] == "layers.2.value.predictor.weight"
    assert (row["differing"], row["at"]) == (1, [3, 5])
    assert row["largest"] == pytest.approx(1, rel=1e-2) and row["b"] - row["a"] == pytest.approx(1, rel=1e-2)
    assert not any(found[section] for section in SECTIONS if section != "tensors")


def test_diff_of_two_methods(base: Path, bundle: Path) -> None:
    found = kvcal("diff", bundle, base / f"kivi{SUFFIX}", "--json").json
    assert found["model"] == []
    assert {"what": "frame", "a": "pre_rope", "b": "post_rope"} in found["scheme"]
    assert any(row["what"] == "layers.0.key.codec" for row in found["codecs"])
    assert all(row["only_in"] == "a" for row in found["tensors"])
    assert any(row["what"] == "text" and row["only_in"] == "a" for row in found["settings"])


def test_layers_are_counted_not_spelled(bundle: Path, tmp_path: Path) -> None:
    """Layer 2 before layer 10."""
    from kvcal.bundles.diff import _place

    names = ["layers.10.key.a", "layers.2.value.a", "layers.2.key.b"]
    assert sorted(names, key=_place) == ["layers.2.key.b", "layers.2.value.a", "layers.10.key.a"]


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({"x": 1}, {"x": 1.0}, []),
        ({"x": 1}, {"x": True}, [{"what": "x", "a": 1, "b": True}]),
        ({"x": [1, 2]}, {"x": [1, 3]}, [{"what": "x.1", "a": 2, "b": 3, "change": 1}]),
        ({"x": [1]}, {"x": [1, 3]}, [{"what": "x", "a": [1], "b": [1, 3]}]),
        ({"x": None}, {}, [{"what": "x", "only_in": "a", "a": None}]),
    ],
)
def test_compared(a: Any, b: Any, found: Any) -> None:
    assert compared(a, b) == found


def test_diff_refuses_what_is_damaged(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(bundle.read_bytes()[:-1])
    fails(kvcal("diff", bundle, tmp_path / "bad"), 4, "bad")
    fails(kvcal("diff", bundle, tmp_path / "none"), 4, "no such bundle file")


# card.


@pytest.fixture(scope="module")
def evaluation(base: Path, bundle: Path) -> Path:
    options = ["--model", base / "model", "--text", base / "words.txt", "--length", 68, "--windows", 1, "--json"]
    done = kvcal("eval", bundle, *options)
    assert done.code == 0, done.err
    (base / "eval.json").write_text(done.out)
    return base / "eval.json"


def test_a_card_reads_as_a_model_card(bundle: Path, evaluation: Path, tmp_path: Path) -> None:
    place = tmp_path / "README.md"
    options = ["--repo", "lab/fitted", "--license", "mit", "--eval", evaluation, "--output", place]
    done = kvcal("card", bundle, *options)
    assert done.code == 0 and done.out.splitlines() == [
        str(place), str(tmp_path / "fitted.errors.png"), f"next: kvcal push {bundle} lab/fitted",
    ]  # fmt: skip
    data = ModelCard(place.read_text()).data
    assert (data.library_name, data.base_model, data.license) == ("kvcal", None, "mit")
    assert data.datasets is None and data.metrics == ["perplexity", "kl_divergence"]
    assert {"kv-cache", "quantization", "aqua-kv"} <= set(data.tags)
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    row = next(row for row in json.loads(evaluation.read_text())["rows"] if row["name"] == "fitted")
    assert results == {
        "perplexity": row["perplexity"],
        "kl_divergence": row["kl"],
        "bits_per_value": row["bits_per_value"],
    }


def test_a_card_has_tables_a_plot_and_the_commands(bundle: Path, evaluation: Path) -> None:
    text = kvcal("card", bundle, "--repo", "lab/fitted", "--eval", evaluation).out
    found = load_bundle(bundle)
    for part in (
        "kvcal pull lab/fitted",
        "kvcal fit-predictors --model model",
        "--text words.txt",
        f"kvcal reproduce fitted{SUFFIX} --text words.txt --model model",
        "![error by layer and head](fitted.errors.png)",
        found.provenance["text"]["sha256"],
        kvcal("verify", bundle, "--json").json["sha256"],
        "| full |",
        f"kvcal eval fitted{SUFFIX} --model model --text words.txt --windows 1 --length 68 --step 32 --dtype float32",
    ):
        assert part in text, part
    assert str(bundle.parent) not in text  # no path of this machine
    errors = found.metrics["layers"][3]["value_head_errors"]
    assert f"| {errors[0]:.5f} | {errors[1]:.5f} |" in text


def test_the_same_card_twice(bundle: Path) -> None:
    assert kvcal("card", bundle).out == kvcal("card", bundle).out


def test_a_card_of_a_preset_invents_nothing(base: Path) -> None:
    text = kvcal("card", base / f"kivi{SUFFIX}").out
    fields = yaml.safe_load(text.split("---")[1])
    assert not {"datasets", "metrics", "license", "model-index"} & set(fields)
    assert "Held-out" not in text and "kvcal preset kivi-2" in text


def test_the_embedded_model_has_a_licence_and_a_text(tmp_path: Path) -> None:
    options = ["--windows", 2, "--length", 200, "--output", tmp_path / f"t{SUFFIX}"]
    assert kvcal("fit-norms", *options).code == 0
    fields = yaml.safe_load(kvcal("card", tmp_path / f"t{SUFFIX}").out.split("---")[1])
    assert fields["license"] == "apache-2.0"
    assert not {"base_model", "datasets"} & set(fields)  # neither is on the hub


def test_models_and_texts_of_the_hub_are_named(bundle: Path, tmp_path: Path) -> None:
    known = load_bundle(bundle)
    known.provenance["model"] |= {"kind": "hub", "name": "org/base", "hub_id": "org/base"}
    known.provenance["text"]["source"] = "org/words:default:train"
    known.write(tmp_path / f"known{SUFFIX}")
    fields = yaml.safe_load(kvcal("card", tmp_path / f"known{SUFFIX}").out.split("---")[1])
    assert (fields["base_model"], fields["datasets"]) == ("org/base", ["org/words"])
    assert fields["base_model_relation"] == "quantized"


def test_a_bundle_of_unknown_origin_has_a_card(bundle: Path, tmp_path: Path) -> None:
    bare = load_bundle(bundle)
    bare.provenance.clear()
    bare.write(tmp_path / f"bare{SUFFIX}")
    done = kvcal("card", tmp_path / f"bare{SUFFIX}")
    assert done.code == 0 and "does not say which command made it" in done.out


def test_figures_of_another_file_of_the_same_name(base: Path, evaluation: Path, tmp_path: Path) -> None:
    """As after a rebuild: the old figures are not the new bundle's."""
    twin = tmp_path / f"fitted{SUFFIX}"
    twin.write_bytes((base / f"other{SUFFIX}").read_bytes())
    fails(kvcal("card", twin, "--eval", evaluation), 2, "figures of another file", "run `kvcal eval` again")
    old = json.loads(evaluation.read_text())
    assert [("sha256" in row) for row in old["rows"]] == [False, True]
    del old["rows"][1]["sha256"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    fails(kvcal("card", base / f"fitted{SUFFIX}", "--eval", tmp_path / "old.json"), 2, "no sha256")


def test_figures_that_are_not_finite(bundle: Path, evaluation: Path, tmp_path: Path) -> None:
    """--json writes them as null; they are said, and left out of the front matter."""
    found = json.loads(evaluation.read_text())
    found["rows"][1] |= {"perplexity": None, "kl": float("nan")}
    (tmp_path / "nan.json").write_text(json.dumps(found))
    done = kvcal("card", bundle, "--eval", tmp_path / "nan.json")
    assert done.code == 0, done.err
    assert "| fitted | not finite | not finite |" in done.out
    (result,) = yaml.safe_load(done.out.split("---")[1])["model-index"][0]["results"]
    assert [metric["type"] for metric in result["metrics"]] == ["bits_per_value"]


def test_one_window_is_singular(bundle: Path, evaluation: Path) -> None:
    assert "\n1 window of 68 tokens" in kvcal("card", bundle, "--eval", evaluation).out


def test_lines_are_quoted(bundle: Path, tmp_path: Path) -> None:
    spaced = load_bundle(bundle)
    spaced.provenance["text"]["source"] = "file:my words.txt"
    spaced.write(tmp_path / f"two words{SUFFIX}")
    text = kvcal("card", tmp_path / f"two words{SUFFIX}").out
    assert f"kvcal reproduce 'two words{SUFFIX}' --text 'my words.txt' --model model" in text
    assert f"kvcal verify 'two words{SUFFIX}' --model" in text


def test_a_card_of_random_weights_names_them(base: Path, tmp_path: Path) -> None:
    made = tmp_path / f"random{SUFFIX}"
    weights = ["--random-weights", "--seed", 5]
    options = ["--model", base / "model", *weights]
    assert kvcal("preset", "kivi-2", *options, "--recent", 16, "--output", made).code == 0
    done = kvcal("eval", made, *options, "--text", base / "words.txt", "--length", 68, "--windows", 1, "--json")
    assert done.code == 0, done.err
    (tmp_path / "eval.json").write_text(done.out)
    text = kvcal("card", made, "--eval", tmp_path / "eval.json").out
    for command in ("verify", "eval"):
        line = next(line for line in text.splitlines() if line.startswith(f"kvcal {command} "))
        assert "--random-weights --seed 5" in line
    assert "base_model" not in yaml.safe_load(text.split("---")[1])


def test_metrics_are_those_that_the_card_shows(bundle: Path, tmp_path: Path) -> None:
    """VQKV and MixKVQ keep no errors by head, so there is no table of them."""
    assert yaml.safe_load(kvcal("card", bundle).out.split("---")[1])["metrics"] == ["relative_squared_error"]
    other = load_bundle(bundle)
    for row in other.metrics["layers"]:
        del row["key_head_errors"], row["value_head_errors"]
    other.write(tmp_path / f"other{SUFFIX}")
    assert "metrics" not in yaml.safe_load(kvcal("card", tmp_path / f"other{SUFFIX}").out.split("---")[1])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"rows": [{"name": "fitted"}]}', "no windows"),
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "not what"),
        ('{"rows": []}', "none is fitted"),
        ("{}", "no rows"),
    ],
)
def test_figures_that_are_none(content: str | None, said: str, bundle: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "eval.json").write_text(content)
    fails(kvcal("card", bundle, "--eval", tmp_path / "eval.json"), 2, "--eval", said)
