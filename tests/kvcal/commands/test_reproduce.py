"""Every command that writes a bundle: run again from its provenance it gives the same bytes, or says what differs
first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.bundles.provenance import recorded
from kvcal.bundles.recorded_settings import FITS
from kvcal.cli.app import COMMANDS
from kvcal.cli.defaults import defaults_of
from kvcal.commands.reproduce import RUNS
from kvcal_artifacts import load_bundle
from tests.support.models_fixture import ROOT, SMALL, SUFFIX, Done, kvcal, write_model, write_text

TEXT = ["--windows", "6", "--length", "68"]
CACHE = ["--sink", "4", "--recent", "16", "--block", "8"]
WIDE = ["--recent", "16", "--block", "16", "--group", "16"]

# name -> command and options; MODEL, TEXT and the names of other bundles here are put in their places
MADE: dict[str, list[str]] = {
    "aqua": ["fit-predictors", *SMALL, "--backbone", "higgs-2", "--per-layer", "1:keys=uniform-4", "--value-inputs", "v1"],
    "norms": ["fit-norms", *TEXT, *CACHE, "--factors", "pair", "--exponent", "0.4", "--per-layer", "0:values=uniform-4"],
    "squat": ["measure-subspaces", *TEXT, "--rank", "2", "--recent", "8", "--block", "8", "--group", "8", "--seed", "3",
              "--other-text", "TEXT"],
    "searched": ["measure-subspaces", *TEXT, "--search", "--recent", "8", "--block", "8", "--group", "8"],
    "bits": ["tune-bits", *TEXT, *WIDE, "--max-bits", "6"],
    "tiers": ["tune-thresholds", *TEXT, *WIDE, "--trials", "2", "--max-bits", "12", "--objective", "attention"],
    "fixed": ["tune-thresholds", *TEXT, *WIDE, "--tau-low", "1.5", "--tau-high", "4"],
    "counted": ["tune-thresholds", *TEXT, *WIDE, "--full", "4", "--four", "4", "--round-up", "4"],
    "codebooks": ["train-codebooks", *TEXT, *CACHE, "--stages", "2,1,1", "--sizes", "16,16,16", "--vectors", "200",
                  "--high-dims", "8", "--trainer", "closed-form"],
    "preset": ["preset", "higgs-2", *CACHE],
    "kept": ["preset", "kivi-2", "--recent", "16", "--keep", "0.5"],
    "composed": ["preset", "--keys", "higgs-3", "--values", "mixkvq", "--per-layer", "0=exact-16", *CACHE],
    "changed": ["preset", "kivi-2", "--values", "uniform-4", "--per-layer", "1:keys=higgs-2"],
    "learned": ["fit-predictors", *SMALL, "--backbone", "vq-1-k16", "--values", "inner-2-symmetric"],
    "config": ["preset", "mixkvq", "--config-only"],
    "random": ["preset", "uniform-4", "--random-weights", "--seed", "5"],
    "both": ["combine", "norms", "preset"],
    "folded": ["fold", "--bundle", "norms"],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and text; `moved` holds them under other names."""
    base = tmp_path_factory.mktemp("reproduce")
    write_model(base / "model")
    write_text(base / "words.txt", 8000)
    (base / "moved").mkdir()
    shutil.copytree(base / "model", base / "moved" / "renamed")
    shutil.copy(base / "words.txt", base / "moved" / "other.txt")
    return base


def make(base: Path, name: str) -> Path:
    """The bundle of that name, made once."""
    output = base / f"{name}{SUFFIX}"
    if output.exists():
        return output
    command, *options = MADE[name]
    placed = [str(make(base, o)) if o in MADE else str(base / "words.txt") if o == "TEXT" else o for o in options]
    if command == "fold":
        placed += ["--output", str(base / f"model-{name}"), "--bundle-output", str(output)]
    else:
        placed += ["--output", str(output)]
    if command != "combine":
        placed += ["--model", str(base / "model")]
    if command not in ("combine", "fold", "preset"):
        placed += ["--text", str(base / "words.txt")]
    done = kvcal(command, *placed)
    assert done.code == 0, done.err
    return output


def again(base: Path, bundle: Path, *options: Any) -> Done:
    places = ["--model", base / "moved" / "renamed", "--text", base / "moved" / "other.txt"]
    return kvcal("reproduce", bundle, *places, *options)


@pytest.mark.parametrize("name", MADE)
def test_the_same_bytes_again(name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make(base, name)
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / f"kept{SUFFIX}"
    done = again(base, bundle, "--output", kept, "--json")
    assert done.code == 0, done.out + done.err
    assert kept.read_bytes() == bundle.read_bytes()
    assert done.json["same"] is True and done.json["sha256"] == done.json["again_sha256"]
    assert {path.name for path in tmp_path.iterdir()} <= {kept.name, "kept.front.png"}


def test_every_command_that_writes_a_bundle_is_among_them() -> None:
    assert {command for command, *_ in MADE.values()} == {*RUNS, "combine"}
    assert {command for command, _ in FITS.values()} < set(RUNS)
    writers = {name for name in COMMANDS if "output" in defaults_of(name) or name in ("combine", "fold")}
    # demo fits predictors; a bundle of recommend has the bytes of the command that it names, and is reproduced as such
    others = {"compare", "card", "probe", "pull", "reproduce", "demo", "recommend"}
    assert writers - others == {*RUNS, "combine"}


def test_the_line_is_the_command(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What card and report print, typed beside model and text, gives the same bytes."""
    monkeypatch.chdir(base)
    for name in ("aqua", "squat", "codebooks", "fixed", "composed", "changed"):
        was = recorded(load_bundle(make(base, name)))
        words = shlex.split(was.line(defaults_of(was.command), str(tmp_path / name)))
        assert words[0] == "kvcal" and kvcal(*words[1:]).code == 0, words
        assert (tmp_path / name).read_bytes() == make(base, name).read_bytes()


def test_bundles_of_a_recipe(base: Path, tmp_path: Path) -> None:
    """Made in one pass over the model; made again each alone."""
    (tmp_path / "kvcal.toml").write_text(
        f"""
        [models.own]
        model = "{base / "model"}"
        text = "{base / "words.txt"}"
        [defaults]
        windows = 6
        length = 68
        sink = 4
        recent = 16
        block = 8
        [bundles.aqua]
        method = "aqua-kv"
        [bundles.norms]
        method = "innerq"
        [bundles.both]
        method = "combine"
        keys = "norms"
        values = "plain"
        [bundles.plain]
        preset = "higgs-2"
        """
    )
    built = kvcal("build", tmp_path / "kvcal.toml")
    assert built.code == 0, built.err
    bundles = sorted(tmp_path.glob(f"*{SUFFIX}"))
    assert len(bundles) == 4
    for bundle in bundles:
        done = again(base, bundle)
        assert done.code == 0, f"{bundle.name}: {done.out}{done.err}"


def test_in_another_virtual_environment(base: Path, tmp_path: Path) -> None:
    """Its own interpreter and prefix; packages are those of this one, as their bytes decide sums."""
    bundle = make(base, "aqua")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    library = next((tmp_path / "venv" / "lib").iterdir()) / "site-packages"
    own = [ROOT, ROOT / "kernels", ROOT / "artifacts", *(p for p in sys.path if p.endswith("site-packages"))]
    (library / "here.pth").write_text("\n".join(map(str, own)))
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "2"}  # the recorded number of threads counts, not this
    command = [python, "-m", "kvcal.cli", "reproduce", bundle, "--model", base / "moved" / "renamed"]
    done = subprocess.run(
        [*map(str, command), "--text", str(base / "words.txt")], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bytes again" in done.stdout
    where = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert where.stdout.strip() == str(tmp_path / "venv") != sys.prefix


# What differs is named.


def altered(base: Path, name: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The bundle with another provenance; hashes are those of the new content."""
    bundle = load_bundle(make(base, name))
    change(bundle.provenance)
    bundle.write(folder / f"{name}{SUFFIX}")
    return folder / f"{name}{SUFFIX}"


ALTERED: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "ridge": ("aqua", lambda p: p["settings"].update(ridge=0.1), "layers.1.key.predictor."),
    "exponent": ("norms", lambda p: p["settings"].update(exponent=0.6), "layers.0.key.factor"),
    "seed": ("aqua", lambda p: p.update(seed=9), "layers.0.key.factor"),  # the first layer's, of other windows
    "rank": ("squat", lambda p: p["settings"].update(rank=3), "layers.0.key.calibrated"),
    "input": ("both", lambda p: p["keys"]["provenance"]["settings"].update(exponent=0.6), "layers.0.key.factor"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_setting_and_the_tensor_that_differs_first(what: str, base: Path, tmp_path: Path) -> None:
    name, change, tensor = ALTERED[what]
    done = again(base, altered(base, name, tmp_path, change), "--json")
    assert done.code == 7, done.err
    assert done.json["first_tensor"]["what"].startswith(tensor)
    assert not done.json["same"] and not done.json["tensors_same"]
    told = again(base, tmp_path / f"{name}{SUFFIX}")
    assert told.code == 7 and f"the first tensor that differs is {tensor}" in told.out


def test_a_setting_without_a_tensor(base: Path, tmp_path: Path) -> None:
    done = again(base, altered(base, "kept", tmp_path, lambda p: p["settings"].update(recent=24)))
    assert done.code == 7
    assert "every tensor is the same" in done.out and "windows.recent: 16 -> 24" in done.out


def test_another_environment_is_named(base: Path, tmp_path: Path) -> None:
    done = again(base, altered(base, "aqua", tmp_path, lambda p: p["versions"].update(torch="1.0")))
    assert done.code == 7
    assert "every tensor is the same" in done.out and "made elsewhere: versions.torch: 1.0 -> " in done.out


def test_another_text_is_named(base: Path, tmp_path: Path) -> None:
    """Under the recorded name, with other words."""
    text = (base / "words.txt").read_text()
    (tmp_path / "words.txt").write_text(text[::-1])
    done = kvcal(
        "reproduce", make(base, "norms"), "--model", base / "model", "--text", tmp_path / "words.txt", "--json"
    )
    assert done.code == 7
    assert "text.sha256" in [row["what"] for row in done.json["inputs"]]


def test_another_model_is_named(base: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=2)
    options = ["--model", tmp_path / "model", "--text", base / "words.txt", "--json"]
    done = kvcal("reproduce", make(base, "norms"), *options)
    assert done.code == 7
    assert {"model.revision", "revision"} <= {row["what"] for row in done.json["inputs"]}


def test_an_input_may_be_given(base: Path, tmp_path: Path) -> None:
    """Found by its hash; then nothing is fitted again, and no text is needed."""
    options = ["--model", base / "model", "--input", make(base, "norms"), "--input", make(base, "preset")]
    done = kvcal("reproduce", make(base, "both"), *options)
    assert done.code == 0 and "first " not in done.err


def test_an_input_that_is_none_of_those_recorded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All would be fitted again, for an hour, as if nothing had been given. One of several may be of another bundle."""
    both, wrong = make(base, "both"), make(base, "config")
    monkeypatch.setattr("kvcal.commands.reproduce.Rerun.make", lambda *given: pytest.fail("it began"))
    done = kvcal("reproduce", both, "--model", base / "model", "--input", wrong)
    assert done.code == 2
    assert f"--input {wrong}: the bundle was made from norms (sha256 " in done.complaint
    monkeypatch.undo()
    some = again(base, both, "--input", wrong, "--input", make(base, "norms"))
    assert some.code == 0 and "first preset" in some.err and "first norms" not in some.err


def test_what_is_missing_is_one_line(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(code: int, *parts: str, options: list[Any], bundle: Path | None = None) -> None:
        done = kvcal("reproduce", bundle or make(base, "norms"), *options)
        assert done.code == code, done.err
        line = done.err.splitlines()[-1]
        assert line.startswith("kvcal: ") and all(part in line for part in parts), line

    refused(2, "model folder called model", "--model", options=[])
    refused(2, "file:words.txt", "--text", options=["--model", base / "model"])
    refused(2, "nowhere: no such file or folder", options=["--model", "nowhere"])
    refused(2, "is the bundle itself", options=["--output", make(base, "norms")])
    bare = altered(base, "norms", tmp_path, lambda p: p.clear())
    refused(1, "provenance does not say how it was made", options=[], bundle=bare)
    odd = altered(base, "norms", tmp_path, lambda p: p["cpu"].update(threads=0))
    refused(1, "0 threads", options=["--model", base / "model"], bundle=odd)


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "threads": ("norms", lambda p: p["cpu"].update(threads=10**6), "1000000 threads: needs a whole number from 1 to 1024"),
    "no-number": ("aqua", lambda p: p["settings"].update(ridge="abc"), "--ridge"),
    "no-bool": ("norms", lambda p: p["settings"].update(powers_of_two="yes"), "must be true or false"),
    "none": ("aqua", lambda p: p["settings"].update(ridge=None), "--ridge"),
    "unknown": ("aqua", lambda p: p["settings"].update(colour="red"), "has colour, which"),
    "place": ("aqua", lambda p: p["settings"].update(output="elsewhere"), "has output, which"),
    "way": ("tiers", lambda p: p["settings"].update(storage="sqlite:///x.db"), "has storage, which"),
    "cpu": ("norms", lambda p: p.update(cpu=[1]), "does not say how it was made"),
    "climbing": ("norms", lambda p: p["model"].update(name="../../up"), "'../../up' is no name"),
    "root": ("folded", lambda p: p["model"].update(name="/tmp/up"), "'/tmp/up' is no name"),
    "text": ("norms", lambda p: p["text"].update(source="file:../../up.txt"), "'../../up.txt' is no name"),
    "part": ("both", lambda p: p["keys"].update(bundle="../up"), "'../up' is no name"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_provenance_is_a_file_and_may_say_anything(
    what: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, code 1, nothing run and nothing written elsewhere."""
    monkeypatch.chdir(tmp_path)
    name, change, said = WRONG[what]
    done = again(base, altered(base, name, tmp_path, change))
    assert done.code == 1, done.out + done.err
    line = done.err.splitlines()[-1]
    assert line.startswith("kvcal: ") and said in line and "Error:" not in line.removeprefix("kvcal: ")[:12], line
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}{SUFFIX}"]


def test_threads_are_put_back(base: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    again(base, altered(base, "norms", tmp_path, lambda p: p["cpu"].update(threads=2)))
    assert torch.get_num_threads() == before


def test_recorded_threads_are_at_most_the_cores(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plain = torch.set_num_threads

    def watched(count: int) -> None:
        taken.append(count)
        plain(min(count, 8))

    monkeypatch.setattr(torch, "set_num_threads", watched)
    done = again(base, altered(base, "norms", tmp_path, lambda p: p["cpu"].update(threads=1000)))
    cores = os.cpu_count() or 1
    assert f"note: recorded with 1000 threads, run with {cores}, this machine's cores: last bits may differ" in done.err
    assert taken and max(taken) <= max(cores, torch.get_num_threads())


def test_an_error_in_a_text_names_the_file_that_was_given(base: Path, tmp_path: Path) -> None:
    odd = altered(base, "norms", tmp_path, lambda p: p["settings"].update(column="words"))
    done = again(base, odd)
    last = done.err.splitlines()[-1]
    assert done.code in (1, 2) and f"{base / 'moved' / 'other.txt'}" in last and "kvcal-reproduce-" not in last, last
