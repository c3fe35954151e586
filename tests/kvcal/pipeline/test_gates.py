"""Gates: what passes, what fails with which code and figure, whom it blames; and the canary that no cheat survives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from kvcal.capture.scan import Capture
from kvcal.commands import evaluation
from kvcal.commands.evaluation import Watched
from kvcal.evaluate.canary import canary
from kvcal.evaluate.layers import LayerErrors, worst_layer
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods.data_free import DataFree, Preset
from kvcal.methods.mixkvq import MixKVQ
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.pipeline.gates import Check, junit_xml, markdown, raise_if_failed, report
from kvcal_artifacts import load_bundle
from kvcal_artifacts.cache import KVCalCache, KVCalLayer, reading
from kvcal_artifacts.errors import GateFailed, KVCalError
from kvcal_artifacts.scheme import HeavyHitters, Scheme
from tests.support.models_fixture import SMALL, SUFFIX, Done, kvcal, write_model, write_text

LAYERS, LENGTH, HARMED = 4, 100, 2
TEXT = ["--length", LENGTH, "--windows", 2, "--step", 16]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, a bundle whose predictors have scales, and the same with one layer's scales doubled; eight times
    as large (broken) they raise even a random model's perplexity.
    """
    base = tmp_path_factory.mktemp("gates")
    write_model(base / "model", LAYERS)
    write_text(base / "words.txt")
    options = ["--predictor", "linear-4bit", "--output", base / f"good{SUFFIX}"]
    done = kvcal("fit-predictors", *named(base), *SMALL, *options)
    assert done.code == 0, done.err
    harm(base / f"good{SUFFIX}", base / f"harmed{SUFFIX}", HARMED)
    harm(base / f"good{SUFFIX}", base / f"broken{SUFFIX}", HARMED, 8)
    return base


def named(base: Path) -> list[Any]:
    return ["--model", base / "model", "--text", base / "words.txt"]


def harm(bundle: Path, output: Path, layer: int, times: int = 2) -> None:
    """Enlarge the scales of one layer; hashes are those of the new content."""
    found = load_bundle(bundle)
    pair = found.scheme.layers[layer]
    assert pair is not None
    scales = [t for codec in (pair.key, pair.value) for n, t in codec.tensors().items() if n.endswith("scale")]
    assert len(scales) == 2
    for scale in scales:
        scale.mul_(times)
    found.write(output)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the embedded model, whose predictors have something to predict."""
    path = tmp_path_factory.mktemp("tiny") / f"tiny{SUFFIX}"
    options = ["--windows", 4, "--holdout", 1, "--length", 196, "--sink", 4, "--recent", 64]
    done = kvcal("fit-predictors", "--model", "tiny", *options, "--output", path)
    assert done.code == 0, done.err
    return path


def gate(base: Path, name: str, *options: Any) -> Done:
    return kvcal("eval", base / f"{name}{SUFFIX}", *named(base), *TEXT, *options)


def failures(path: Path) -> list[tuple[str, str]]:
    """(gate, message) of every failed test case; the counts must be right."""
    root = ElementTree.fromstring(path.read_bytes())
    found = [(case.get("name", ""), bad.get("message", "")) for case in root.iter("testcase") for bad in case]
    for element in [root, *root.iter("testsuite")]:
        assert element.get("tests") == str(len(list(element.iter("testcase"))))
        assert element.get("failures") == str(len(list(element.iter("failure"))))
    return found


def test_a_good_bundle_passes(base: Path, tmp_path: Path) -> None:
    limits = [
        "--max-ppl-increase",
        "1%",
        "--max-kl",
        0.01,
        "--max-bits",
        4,
        "--max-cache-bytes",
        1e6,
        "--max-layer-drift",
        3,
    ]
    done = gate(base, "good", *limits, "--junit", tmp_path / "j.xml", "--json")
    assert done.code == 0, done.err
    assert done.json["passed"] is True
    assert [check["gate"] for check in done.json["gates"]] == [
        "canary", "max-ppl-increase", "max-kl", "max-bits", "max-cache-bytes", "max-layer-drift",
    ]  # fmt: skip
    assert failures(tmp_path / "j.xml") == []
    row = done.json["rows"][1]
    seen = {check["gate"]: check["seen"] for check in done.json["gates"]}
    assert seen["max-kl"] == row["kl"]
    assert seen["max-bits"] == row["bits_per_value"]
    assert seen["max-cache-bytes"] == row["cache_bytes"] + row["window_bytes"]
    assert math.isclose(seen["max-ppl-increase"], row["perplexity"] / done.json["rows"][0]["perplexity"] - 1)


def test_a_harmed_layer_fails_and_is_named(base: Path, tmp_path: Path) -> None:
    """Its hashes are right: no check but a measurement can find it."""
    assert kvcal("verify", base / f"harmed{SUFFIX}").code == 0
    done = gate(base, "harmed", "--max-kl", 0.001, "--max-layer-drift", 3, "--junit", tmp_path / "j.xml", "--json")
    assert done.code == 3
    line = done.err.splitlines()[-1]
    assert line.startswith("kvcal: gate failed: harmed: max-kl ")
    assert f"layer {HARMED}, " in line
    assert "times the recorded" in line
    found = dict(failures(tmp_path / "j.xml"))
    assert set(found) == {"max-kl", "max-layer-drift"}
    for message in found.values():
        assert f"layer {HARMED}, " in message
        assert "relative error" in message
    drift = next(check for check in done.json["gates"] if check["gate"] == "max-layer-drift")
    assert drift["layer"] == HARMED
    assert f"{drift['seen']:.4g}, at most 3" in found["max-layer-drift"]
    rows = done.json["layers"]["harmed"]
    assert drift["seen"] > 3
    assert all(row["blocks_read"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("option", "limit", "says"),
    [
        ("--max-ppl-increase", 0, "max-ppl-increase"),
        ("--max-kl", 0, "max-kl"),
        ("--max-bits", 1, "layer 0 stores the most"),
        ("--max-cache-bytes", 10, "layer 0 stores the most"),
        ("--max-layer-drift", 0, "times the recorded"),
    ],
)
def test_every_gate_can_fail_and_names_a_layer(base: Path, tmp_path: Path, option: str, limit: Any, says: str) -> None:
    name = "broken" if option == "--max-ppl-increase" else "good"
    done = gate(base, name, option, limit, "--junit", tmp_path / "j.xml")
    assert done.code == 3
    [(seen, message)] = failures(tmp_path / "j.xml")
    assert seen == option.removeprefix("--")
    assert says in message
    assert "layer " in message
    assert message in done.err
    assert "FAILED" in done.out


def test_a_preset_is_held_to_gates_too(base: Path) -> None:
    done = kvcal("eval", *named(base), "--preset", "uniform-2", "--length", 260, "--windows", 1, "--max-bits", 2.4)
    assert done.code == 3
    assert "uniform-2: max-bits 4, at most 2.4 (layer 0 stores the most: 4 bits/value)" in done.err


def test_summary_is_appended_where_a_workflow_wants_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "step.md"
    step.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    done = gate(base, "good", "--max-kl", 0, "--summary", tmp_path / "own.md")
    assert done.code == 3
    own = (tmp_path / "own.md").read_text()
    assert own.startswith("### kvcal: 1 of 2 gates failed\n")
    assert "| good | max-kl |" in own
    assert step.read_text() == f"before\n{own}\n"


def test_the_same_checks_are_the_same_files() -> None:
    checks = [
        Check("a", "canary", True, detail="read"),
        Check("a", "max-kl", False, 0.5, 0.1, 3, 'layer 3 <&> "x"'),
        Check("b", "canary", True),
    ]
    assert junit_xml(checks) == junit_xml(list(checks))
    [failure] = ElementTree.fromstring(junit_xml(checks)).iter("failure")
    assert failure.get("message") == 'a: max-kl 0.5, at most 0.1 (layer 3 <&> "x")'
    assert markdown(checks).count("**failed**") == 1


def test_odd_names_break_no_report() -> None:
    checks = [Check("a\x01|b", "max-kl", False, 0.5, 0.1, 3, "layer 3 | \x0c\ud800\nx")]
    [failure] = ElementTree.fromstring(junit_xml(checks)).iter("failure")
    assert failure.get("message", "").startswith(r"a\x01|b: max-kl 0.5")
    row = markdown(checks).splitlines()[-1]
    assert row.replace("\\|", "").count("|") == 7
    assert r"a&#92;x01\|b" in row


def test_a_summary_stands_on_lines_of_its_own(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").write_text("before")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "s"))
    report([Check("a", "canary", True)], None, None)
    assert (tmp_path / "s").read_text().startswith("before\n### kvcal: all 1 gates passed\n")


def test_a_summary_that_cannot_be_written_hides_no_failed_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    bad, good = [Check("a", "max-kl", False, 0.5, 0.1)], [Check("a", "max-kl", True, 0.1, 0.5)]
    with pytest.raises(GateFailed, match=r"a: max-kl 0.5, at most 0.1; and \$GITHUB_STEP_SUMMARY .* cannot be written"):
        raise_if_failed(bad, report(bad, None, None))
    with pytest.raises(KVCalError, match="cannot be written") as caught:
        raise_if_failed(good, report(good, None, None))
    assert not isinstance(caught.value, GateFailed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-ppl-increase", "1x"], "--max-ppl-increase 1x: needs a share, as 1% or 0.01"),
        (["--max-ppl-increase", "-1%"], "--max-ppl-increase -1%: needs a share"),
        (["--max-kl", "nan"], "--max-kl nan: needs a number of at least 0"),
        (["--max-bits", "-1"], "--max-bits -1.0: needs a number of at least 0"),
        (["--max-kl", "1%"], "max-kl"),
        (
            ["--preset", "higgs-2", "--max-layer-drift", 2],
            "higgs-2: gate max-layer-drift: it records no relative error",
        ),
    ],
)
def test_limits_that_make_no_sense(base: Path, options: list[Any], says: str) -> None:
    done = gate(base, "good", *options)
    assert done.code == 2
    assert done.out == ""
    assert says in done.err.splitlines()[-1]


def test_a_gate_needs_a_bundle(base: Path) -> None:
    done = kvcal("eval", *named(base), *TEXT, "--max-kl", 1)
    assert done.code == 2
    assert "give a bundle, or --preset" in done.err


def test_a_report_that_cannot_be_written_is_said_before_the_work(base: Path, tmp_path: Path) -> None:
    done = gate(base, "good", "--max-kl", 1, "--junit", tmp_path / "no" / "j.xml")
    assert done.code == 1
    assert "no is not a folder" in done.complaint


def test_reports_of_no_gates_are_written_and_say_so(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for a file finds one; a job's page is not bothered."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    done = gate(base, "good", "--junit", tmp_path / "j.xml", "--summary", tmp_path / "s.md")
    assert done.code == 0, done.err
    root = ElementTree.fromstring((tmp_path / "j.xml").read_bytes())
    assert (root.get("tests"), root.get("failures"), len(root)) == ("0", "0", 0)
    assert (tmp_path / "s.md").read_text() == "### kvcal: there are no gates\n"
    assert not (tmp_path / "page.md").exists()


# What overflows.


@pytest.fixture
def overflowing(base: Path, tmp_path: Path) -> Path:
    """A bundle whose predictor in layer 1 is so far off that the residual's norm fits no float16."""
    found = load_bundle(base / f"good{SUFFIX}")
    pair = found.scheme.layers[1]
    assert pair is not None
    [scale] = [t for name, t in pair.value.tensors().items() if name.endswith("scale")]
    scale.fill_(4e3)  # 15 of them is nearly what a bundle may hold
    found.write(tmp_path / f"huge{SUFFIX}")
    return tmp_path / f"huge{SUFFIX}"


def test_what_overflows_fails_its_gate_and_others_are_judged(base: Path, tmp_path: Path, overflowing: Path) -> None:
    gates = ["--max-kl", 1, "--junit", tmp_path / "j.xml", "--json"]
    done = kvcal("eval", overflowing, base / f"good{SUFFIX}", *named(base), *TEXT, *gates)
    assert done.code == 3, done.err
    [(failed, message)] = failures(tmp_path / "j.xml")
    assert failed == "evaluation"
    assert message.startswith("huge: evaluation (layer 1: ")
    assert "does not fit float16" in message
    assert [(c["name"], c["passed"]) for c in done.json["gates"][1:]] == [("good", True), ("good", True)]
    assert [row["name"] for row in done.json["rows"]] == ["full", "good"]


def test_the_card_of_what_overflowed_says_so(base: Path, tmp_path: Path, overflowing: Path) -> None:
    done = kvcal("eval", overflowing, *named(base), *TEXT, "--max-kl", 9, "--json")
    assert done.code == 3
    (tmp_path / "eval.json").write_text(done.out)
    card = tmp_path / "card.md"
    assert kvcal("card", overflowing, "--eval", tmp_path / "eval.json", "--output", card).code == 0
    assert "The evaluation broke off: " in card.read_text() and "does not fit float16" in card.read_text()


def test_what_overflows_is_named_without_gates_too(base: Path, overflowing: Path) -> None:
    done = kvcal("eval", base / f"good{SUFFIX}", overflowing, *named(base), *TEXT)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("kvcal: huge: layer 1: ")
    assert "good" in done.out and "huge" not in done.out  # what could be measured is there


# Drift.


def drift_of(bundle: Path, junit: Path) -> tuple[int, str | None, str]:
    """Exit code, message of the gate as docs/pipeline.md has it, and all complaints; on other windows than the fit's."""
    options = ["--windows", 4, "--length", 196, "--step", 96, "--max-layer-drift", 1.25, "--junit", junit]
    done = kvcal("eval", bundle, "--model", "tiny", *options)
    message = next((message for gate, message in failures(junit) if gate == "max-layer-drift"), None)
    return done.code, message, done.err


def altered(bundle: Path, output: Path, layer: int, role: str, name: str, change: Any) -> Path:
    """One tensor changed in place; hashes are those of the new content."""
    found = load_bundle(bundle)
    pair = found.scheme.layers[layer]
    assert pair is not None
    change(getattr(pair, role).tensors()[name])
    found.write(output)
    return output


HARM: dict[str, tuple[int, str, str, Any, str]] = {  # layer, role, tensor, change, who is to blame
    "factor": (0, "key", "factor", lambda t: t[1, ::2].mul_(8), "layer 0, keys of head 1: "),
    "key head": (4, "key", "predictor.weight", lambda t: t[:, :64].zero_(), "layer 4, keys of head 0: "),
    "value head": (7, "value", "predictor.weight", lambda t: t[:, 64:].zero_(), "layer 7, values of head "),
    "values": (7, "value", "predictor.weight", lambda t: t.zero_(), "layer 7, values of head "),
}


def test_a_good_bundle_drifts_less(tiny: Path, tmp_path: Path) -> None:
    code, message, complaint = drift_of(tiny, tmp_path / "j.xml")
    assert (code, message) == (0, None), complaint


@pytest.mark.parametrize(
    "name",
    ["factor", "value head", *(pytest.param(name, marks=pytest.mark.slow) for name in ("key head", "values"))],
)
def test_harm_to_one_head_is_found_and_named(tiny: Path, tmp_path: Path, name: str) -> None:
    layer, role, tensor, change, who = HARM[name]
    harmed = altered(tiny, tmp_path / f"x{SUFFIX}", layer, role, tensor, change)
    code, message, complaint = drift_of(harmed, tmp_path / "j.xml")
    assert code == 3, complaint
    assert message is not None
    assert f"({who}" in message


def rows_with(name: str, value: Any) -> Any:
    return lambda rows: rows[1].update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            rows_with("key_relative_error", 1e9),
            "layer 1: key_relative_error holds 1000000000.0, not a number from 0 to 1",
        ),
        (rows_with("value_relative_error", "0.1"), "layer 1: value_relative_error holds '0.1'"),
        (rows_with("value_relative_error", -1), "layer 1: value_relative_error holds -1"),
        (rows_with("key_head_errors", [0.1, 2.0]), "layer 1: key_head_errors holds 2.0"),
        (rows_with("key_head_errors", [0.1, 0.1, 0.1]), "layer 1: key_head_errors is missing"),
        (lambda rows: rows[2].pop("value_head_errors"), "layer 2: value_head_errors is missing"),
        (lambda rows: rows[2].pop("value_relative_error"), "layer 2: value_relative_error is missing"),
        (lambda rows: rows.__delitem__(slice(1, None)), "layer 1: key_relative_error is missing"),
    ],
)
def test_recorded_errors_that_compare_with_nothing(base: Path, tmp_path: Path, change: Any, says: str) -> None:
    """Otherwise a layer would not be gated, or anything would be less than what is recorded."""
    found = load_bundle(base / f"good{SUFFIX}")
    change(found.metrics["layers"])
    found.write(tmp_path / f"x{SUFFIX}")
    done = kvcal("eval", tmp_path / f"x{SUFFIX}", *named(base), *TEXT, "--max-layer-drift", 3)
    assert done.code == 2, done.err
    assert f"x: gate max-layer-drift: {says}" in done.complaint


# The canary.


def test_windows_that_pack_nothing_prove_nothing(base: Path) -> None:
    """Without gates it is a note, with them a failure."""
    short = ["--length", 24, "--windows", 1]
    done = kvcal("eval", base / f"good{SUFFIX}", *named(base), *short, "--max-kl", 1)
    assert done.code == 3
    assert "good: canary (no block was packed before the last step" in done.err
    assert kvcal("eval", base / f"good{SUFFIX}", *named(base), *short).code == 0


@pytest.mark.parametrize("gates", [[], ["--max-kl", 1]])
def test_a_layer_that_does_not_read_what_it_packed_is_found(
    base: Path, monkeypatch: pytest.MonkeyPatch, gates: list[Any]
) -> None:
    honest = KVCalLayer.decode

    def cheat(self: KVCalLayer, packed: Any, context: Any) -> Any:
        keys, values = honest(self, packed, context)
        return (torch.ones_like(keys), torch.ones_like(values)) if self.index == 1 else (keys, values)

    monkeypatch.setattr(KVCalLayer, "decode", cheat)
    done = gate(base, "good", *gates)
    assert done.code == 3
    assert "layer 1: other packed blocks gave the same output, so what is packed was not read" in done.err


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load_model(resolve(str(base / "model")), dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(3))


SMALLER: dict[str, Any] = {"sink": 4, "recent": 16, "block": 8}
KINDS: dict[str, DataFree] = {
    "uniform": Preset("uniform-4", "uniform-4", **SMALLER),
    "pre-rope": Preset("uniform-4", "uniform-4", "pre_rope", **SMALLER),
    "exact": Preset("exact-32", "exact-32", **SMALLER),
    "innerq": Preset("innerq-base", "innerq-base", sink=4, recent=16, block=32),
    "squat": Preset("squat-2", "squat-2", sink=4, recent=16, block=32),
    "mixkvq": MixKVQ(group=8, value_group=8, **SMALLER),
}


def scheme_of(name: str, base: Path, model: Any) -> Scheme:
    if name == "chained":
        return load_bundle(base / f"good{SUFFIX}").scheme
    if name == "h2o":
        return KINDS["uniform"].scheme(model).keeping(HeavyHitters(0.6, 0.5))
    return KINDS[name].scheme(model)


@pytest.mark.parametrize(("name", "windows"), [*((name, 2) for name in [*KINDS, "chained", "h2o"]), ("h2o", 1)])
def test_the_canary_lives_whatever_the_codec(
    base: Path, model: Any, ids: torch.Tensor, name: str, windows: int
) -> None:
    scheme = scheme_of(name, base, model)
    found = canary(model, ids[:windows], lambda: KVCalCache(scheme, model), step=16)
    assert found.alive, str(found)
    assert found.layers == LAYERS
    assert found.blocks > 0


class Cheat:
    """Keeps exact copies of all keys and values, as attention takes them, and hands some out in the place of decoded
    ones.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, roles: tuple[int, ...], first: int, several: bool) -> None:
        honest = KVCalLayer._update

        def update(layer: Any, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            start, kept = layer.columns, layer.__dict__.setdefault("kept", [x[:, :, :0] for x in new])
            out = list(honest(layer, *new))
            layer.kept = [torch.cat(pair, 2) for pair in zip(kept, new, strict=True)]
            if start and layer.index == 2 and (new[0].shape[2] > 1 or not several):
                for role in roles:
                    out[role] = torch.cat([out[role][:, :, :first], layer.kept[role][:, :, first:]], 2)
            return out[0], out[1]

        monkeypatch.setattr(KVCalLayer, "_update", update)


CHEATS = {
    "in calls of several tokens": ((0, 1), 0, True, "keys"),
    "keys only": ((0,), 0, False, "keys"),
    "values only": ((1,), 0, False, "values"),
    "all but the first block": ((0, 1), 4 + 8, False, "keys"),
}


@pytest.mark.parametrize("gates", [[], ["--max-kl", 1]])
@pytest.mark.parametrize("name", CHEATS)
def test_exact_copies_in_the_place_of_blocks_are_found(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str, gates: list[Any]
) -> None:
    *how, role = CHEATS[name]
    Cheat(monkeypatch, *how)
    done = gate(base, "good", *gates)
    assert done.code == 3
    assert f"layer 2: attention received other {role} than the packed blocks decode to" in done.err


def test_copies_that_only_the_evaluation_gets_are_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of two windows, as the evaluation's and not the canary's."""
    honest = reading.materialise

    def cheat(self: KVCalLayer, plan: Any, keys: Any, values: Any) -> Any:
        out = honest(self, plan, keys, values)
        return (out[0], out[1] * 1.01) if len(keys) > 1 and self.index == 1 else out

    monkeypatch.setattr(reading, "materialise", cheat)
    done = gate(base, "good")
    assert done.code == 3
    assert "good: canary: layer 1: attention received other values than the packed blocks decode to" in done.err


def test_tasks_are_not_begun_where_the_canary_died(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take hours, and their answers would be of nothing."""
    honest, begun = reading.materialise, []

    def cheat(self: KVCalLayer, plan: Any, keys: Any, values: Any) -> Any:
        out = honest(self, plan, keys, values)
        return (out[0], out[1] * 1.01)

    monkeypatch.setattr(evaluation, "run_tasks", lambda *_: begun.append(1))
    monkeypatch.setattr(reading, "materialise", cheat)
    done = gate(base, "good", "--task", "agreement")
    assert done.code == 3
    assert "good: canary: layer" in done.err
    assert not begun


@pytest.mark.parametrize(("role", "name"), list(enumerate(("key", "value"))))
def test_one_block_that_decodes_to_the_same_whatever_it_holds(
    base: Path, model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, role: int, name: str
) -> None:
    honest = KVCalLayer.decode

    def cheat(self: KVCalLayer, packed: Any, context: Any) -> Any:
        made = list(honest(self, packed, context))
        made[role] = made[role].clone()
        if self.index == 1:
            made[role][:, :, -8:] = 1
        return tuple(made)

    monkeypatch.setattr(KVCalLayer, "decode", cheat)
    scheme = scheme_of("uniform", base, model)
    found = canary(model, ids, lambda: KVCalCache(scheme, model), step=16)
    assert not found.alive
    assert [(layer, role) for layer, role, _ in found.deaf] == [(1, name)]
    assert f"layer 1: block {found.deaf[0][2]} of {name}s decodes to the same" in str(found)


@pytest.mark.parametrize(("gates", "says"), [([], "canary: "), (["--max-kl", 1], "canary (")])
def test_blocks_that_the_evaluation_itself_did_not_read(
    base: Path, monkeypatch: pytest.MonkeyPatch, gates: list[Any], says: str
) -> None:
    """The canary's own caches may be honest while those that were measured were not."""
    honest = KVCalLayer.decode_all

    def cheat(self: KVCalLayer) -> Any:
        watch, self.cache.watch = self.cache.watch, None if self.index == 3 else self.cache.watch
        try:
            return honest(self)
        finally:
            self.cache.watch = watch

    monkeypatch.setattr(KVCalLayer, "decode_all", cheat)
    done = gate(base, "good", *gates)
    assert done.code == 3
    assert f"good: {says}layer 3: packed blocks were never read in the evaluation" in done.err


# What layers are said to err by.


@pytest.mark.parametrize("name", [*KINDS, "chained", "h2o"])
def test_watching_changes_no_figure(base: Path, model: Any, ids: torch.Tensor, name: str) -> None:
    scheme = scheme_of(name, base, model)

    def maker() -> KVCalCache:
        return KVCalCache(scheme, model)

    watched = Watched(maker, LENGTH)
    assert evaluate(model, ids, {"x": maker}, step=16) == evaluate(model, ids, {"x": watched}, step=16)
    assert len(watched.rows) == LAYERS
    for row in watched.rows:
        assert row["blocks_read"] > 0
        low = 0 if name == "exact" else 1e-6
        assert low <= row["key_relative_error"] < 1


def test_layer_errors_are_those_of_the_packed_tokens(model: Any, ids: torch.Tensor) -> None:
    """Of layer 0, whose inputs no compression has changed, against the codec itself."""
    scheme = KINDS["uniform"].scheme(model)
    watched = Watched(lambda: KVCalCache(scheme, model), LENGTH)
    evaluate(model, ids, {"x": watched}, step=20)
    with Capture(model, ids, device="cpu") as capture:
        layers = iter(capture)
        batch = next(iter(next(layers).batches({"k", "v"}, "post_rope")))
    pair = scheme.layers[0]
    assert pair is not None
    packed = slice(4, 4 + (LENGTH - 4 - 16) // 8 * 8)
    for role, codec, x in (("key", pair.key, batch.k), ("value", pair.value, batch.v)):
        assert x is not None
        made = codec.encode_decode(x[:, :, packed])[1]
        expected = float((made - x[:, :, packed]).square().sum() / x[:, :, packed].square().sum())
        assert watched.rows[0][f"{role}_relative_error"] == pytest.approx(expected, rel=1e-3)


def test_whom_to_blame() -> None:
    def row(layer: int, key: float | None, value: float | None) -> dict[str, Any]:
        return {"layer": layer, "key_relative_error": key, "value_relative_error": value}

    rows = [row(0, 0.5, 0.1), row(1, 0.02, 0.3)]
    recorded = [{"key_relative_error": 0.4, "value_relative_error": 0.1}, {"key_relative_error": 0.001}]
    blame = worst_layer(rows, recorded)
    assert blame is not None
    assert (blame.layer, blame.role, blame.drift) == (1, "key", pytest.approx(20))
    blame = worst_layer(rows, None)
    assert blame is not None
    assert (blame.layer, blame.role, blame.drift) == (0, "key", None)
    rows[0]["key_head_errors"], recorded[0]["key_head_errors"] = [0.2, 0.8], [0.4, 0.01]
    blame = worst_layer(rows, recorded)
    assert blame is not None
    assert (blame.layer, blame.role, blame.head, blame.drift) == (0, "key", 1, pytest.approx(80))
    assert str(blame) == "layer 0, keys of head 1: relative error 0.8, 80.0 times the recorded 0.01"
    assert worst_layer([row(0, None, None)], None) is None
    blame = worst_layer([row(0, 1e-6, 1e-6)], [{"key_relative_error": 0.0, "value_relative_error": 0.0}])
    assert blame is not None and blame.drift == pytest.approx(0.1)  # rounding of an exact codec is no drift
    assert LayerErrors(1).rows()[0]["key_relative_error"] is None
