"""The ready-made CI of docs/ci: every `run:` and `script:` is run here, in order, against a stand-in of the hub.

Not run: what `uses:` names (GitHub's own actions) and the runner itself; the expressions that fill variables are filled
here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from kvcal import __version__
from kvcal_artifacts import load_bundle
from tests.support.fork_server import ROOT, forking
from tests.support.hub_stand_in import WRITER, File, Hub, Repository, running
from tests.support.models_fixture import write_model, write_text
from tests.support.pages import bash_blocks, run_page

CI = ROOT / "docs" / "ci"
RECIPE = """\
output = "build"

[models.own]
model = "model"
text = "words.txt"

[bundles.aqua]
method = "aqua-kv"
windows = 6
length = 68
sink = 4
recent = 16
block = 8

[gates]
max_bits = 3.5

[evaluation]
text = "words.txt"
windows = 1
length = 68
"""
NAME, REPO = "own-aqua", "lab/ci-own-aqua"
GIVEN = {"recipe": "kvcal.toml", "output": "build", "model": "model", "evaluation": "--text words.txt --windows 1 --length 68",
         "gates": "--max-kl 5", "reproduce": "--text words.txt --model model", "repository": "lab/ci", "install": "kvcal",
         "python": "3.11", "runner": "a-label"}  # fmt: skip


@dataclass
class Place:
    """A checkout, and what runs in it. environment: without a way to the real hub."""

    folder: Path
    hub: Hub
    environment: dict[str, str]

    def run(self, script: str, variables: Mapping[str, str], code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script], cwd=self.folder, env={**self.environment, **variables},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub, and an environment whose `kvcal` and `pip` are at home here."""
    base = tmp_path_factory.mktemp("server")
    with running() as hub:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GITHUB_", "CI_"))}
        path = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "artifacts"), *_installed(base), own.get("PYTHONPATH", "")]
        own |= {
            "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "HOME": str(base),
            "HF_HOME": str(base / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,127.0.0.2",
            "HF_TOKEN": WRITER,
        }  # fmt: skip
        with forking(base, own) as tools:
            yield (
                hub,
                own | {"PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])},
            )


def _installed(base: Path) -> list[str]:
    """Where pip finds that kvcal is installed; from a source tree alone it would look for it in an index."""
    try:
        importlib.metadata.version("kvcal")
    except importlib.metadata.PackageNotFoundError:
        about = base / "installed" / f"kvcal-{__version__}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvcal\nVersion: {__version__}\n")
        return [str(about.parent)]
    return []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def place(server: tuple[Hub, dict[str, str]], model: Path, tmp_path: Path) -> Place:
    shutil.copytree(model, tmp_path / "model")
    write_text(tmp_path / "words.txt")
    (tmp_path / "kvcal.toml").write_text(RECIPE)
    server[0].repositories.clear()
    return Place(tmp_path, *server)


def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((CI / "github.yml").read_text())
    return found


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow()["jobs"]["bundles"]["steps"]
    return found


def filled(template: Any, given: Mapping[str, str]) -> str:
    """${{ inputs.NAME }} and ${{ secrets.HF_TOKEN }} as GitHub fills them; any other expression is an error here."""

    def value(match: re.Match[str]) -> str:
        kind, _, name = match[1].strip().partition(".")
        return {"inputs": given, "secrets": {"HF_TOKEN": WRITER}}[kind][name]

    return re.sub(r"\$\{\{(.*?)\}\}", value, str(template))


def variables(given: Mapping[str, str]) -> dict[str, str]:
    return {name: filled(template, given) for name, template in workflow()["jobs"]["bundles"]["env"].items()}


def published(place: Place) -> None:
    """What both templates leave: reports, a card, and the bundle on the hub with that card's figures."""
    repository = place.hub.repositories[REPO]
    tree = repository.commits[repository.branches["main"]]
    bundle = place.folder / "build" / f"{NAME}.kvcal.safetensors"
    assert tree[bundle.name].data == bundle.read_bytes()
    pushed = json.loads((place.folder / "reports" / f"{NAME}.pushed.json").read_text())
    assert pushed["commit"] == repository.branches["main"]
    card = (place.folder / "cards" / NAME / "README.md").read_text()
    assert "perplexity" in card and tree["README.md"].data.decode() == card
    for report in ("build.xml", f"{NAME}.xml"):
        root = ElementTree.parse(place.folder / "reports" / report).getroot()
        assert root.findall(".//testcase") and not root.findall(".//failure")


def test_github(place: Place) -> None:
    summary = place.folder / "summary.md"
    environment = variables(GIVEN) | {"GITHUB_STEP_SUMMARY": str(summary)}
    ran = 0
    for step in steps():
        if "run" in step:
            place.run(step["run"], environment)
            ran += 1
    assert ran == 5
    published(place)
    assert NAME in summary.read_text()
    kept = next(step for step in steps() if "upload-artifact" in step.get("uses", ""))
    for pattern in filled(kept["with"]["path"], GIVEN).split():
        assert list(place.folder.glob(pattern.rstrip("/"))), pattern


def gitlab() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Variables, and the lines of each job."""
    found = yaml.safe_load((CI / "gitlab.yml").read_text())
    own = {name.upper(): GIVEN[name] for name in ("model", "evaluation", "gates", "reproduce", "repository", "install")}
    jobs = {name: job for name, job in found.items() if isinstance(job, dict) and "script" in job}
    lines = {name: found[job["extends"]]["before_script"] + job["script"] for name, job in jobs.items()}
    return {name: str(value) for name, value in found["variables"].items()} | own, lines


def test_gitlab(place: Place) -> None:
    environment, jobs = gitlab()
    environment["PIP_CACHE_DIR"] = str(place.folder / "pip")
    assert list(jobs) == ["kvcal-bundles", "kvcal-publish"]
    for lines in jobs.values():
        place.run("\n".join(lines), environment)  # one shell a job, as the runner does
    published(place)
    for pattern in yaml.safe_load((CI / "gitlab.yml").read_text())["kvcal-bundles"]["artifacts"]["paths"]:
        assert list(place.folder.glob(pattern.replace("$OUTPUT", "build").rstrip("/"))), pattern


def both(given: Mapping[str, str]) -> dict[str, tuple[dict[str, str], list[str]]]:
    """What builds and gates in either template (installing and reproducing left out): variables and scripts."""
    scripts = {step["name"]: step["run"] for step in steps() if "run" in step}
    own, jobs = gitlab()
    lines = [line for line in jobs["kvcal-bundles"] if "pip install" not in line and "reproduce" not in line]
    return {
        "github": (variables(given), [scripts["Build what changed"], scripts["Figures, cards, gates"]]),
        "gitlab": (own | {name.upper(): given[name] for name in ("gates", "model")}, ["\n".join(lines)]),
    }


@pytest.mark.parametrize("template", ["github", "gitlab"])
def test_bundles_name_their_model(template: str, place: Place) -> None:
    """With no model given: one of the hub, fetched before, which is not the embedded one."""
    files = {
        path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in (place.folder / "model").iterdir()
    }
    place.hub.repositories["lab/small"] = repository = Repository()
    commit = repository.commit("main", files, "A model")
    fetched = Path(place.environment["HF_HOME"]) / "hub" / "models--lab--small" / "snapshots" / commit
    shutil.copytree(place.folder / "model", fetched, dirs_exist_ok=True)
    (place.folder / "kvcal.toml").write_text(RECIPE.replace('"model"', '"lab/small"'))
    environment, scripts = both(GIVEN | {"model": ""})[template]
    for script in scripts:
        place.run(script, environment)
    assert json.loads((place.folder / "reports" / f"{NAME}.json").read_text())["model"] == "lab/small"


@pytest.mark.parametrize("template", ["github", "gitlab"])
@pytest.mark.parametrize("gate", ["given", pytest.param("recipe", marks=pytest.mark.slow)])
def test_a_failed_gate_ends_the_job_before_it_publishes(template: str, gate: str, place: Place) -> None:
    """With the gates' own exit code, and a card and a report to read: the recipe's gates as those of the template.

    A bundle of an earlier run, which the recipe no longer has, comes with the cache and goes no further.
    """
    for folder in ("build", "kept"):
        (place.folder / folder).mkdir()
        (place.folder / folder / "own-gone.kvcal.safetensors").write_bytes(b"of an earlier run")
    if gate == "recipe":
        (place.folder / "kvcal.toml").write_text(RECIPE.replace("max_bits = 3.5", "max_bits = 1"))
    environment, scripts = both(GIVEN | ({"gates": "--max-kl 0.0000001"} if gate == "given" else {}))[template]
    for script in scripts[:-1]:
        place.run(script, environment)
    place.run(scripts[-1], environment, code=3)
    reports = place.folder / "reports"
    failed = {path.name for path in reports.glob("*.xml") if ElementTree.parse(path).findall(".//failure")}
    assert failed == {"build.xml" if gate == "recipe" else f"{NAME}.xml"}
    assert {path.name for path in reports.glob("*.xml")} == {"build.xml", f"{NAME}.xml"}
    assert [path.name for path in (place.folder / "kept").iterdir()] == [f"{NAME}.kvcal.safetensors"]
    assert [path.name for path in (place.folder / "cards").iterdir()] == [NAME]
    assert (place.folder / "cards" / NAME / "README.md").exists()
    assert not place.hub.repositories


def test_no_template_takes_what_lies_in_the_output_folder() -> None:
    """It comes from a cache; test_a_failed_gate_… shows that an old bundle there goes no further."""
    for file in CI.glob("*.yml"):
        assert not re.search(r"output.*/\*\.kvcal", file.read_text(), flags=re.IGNORECASE)


def test_an_evaluation_that_breaks_is_not_hidden_by_a_gate(place: Place) -> None:
    """Its own code at the end, and no card of figures that there are none of."""
    (place.folder / "kvcal.toml").write_text(RECIPE.replace("max_bits = 3.5", "max_bits = 1"))
    environment, scripts = both(GIVEN | {"model": "no-such-model"})["github"]
    place.run(scripts[0], environment)
    place.run(scripts[1], environment, code=5)
    assert not (place.folder / "cards" / NAME / "README.md").exists()
    assert ElementTree.parse(place.folder / "reports" / "build.xml").findall(".//failure")


def test_what_was_built_is_saved_whatever_comes_after() -> None:
    names = [step.get("uses", step.get("name")) for step in steps()]
    save = names.index("actions/cache/save@v4")
    assert save > names.index("Figures, cards, gates")  # with the gates' verdicts, which lie in the lock file
    restore = next(step for step in steps() if "cache/restore" in step.get("uses", ""))
    assert steps()[save]["if"] == "always()" and steps()[save]["with"]["key"] == restore["with"]["key"]
    assert names.index("Publish") > names.index("Figures, cards, gates")
    job = yaml.safe_load((CI / "gitlab.yml").read_text())["kvcal-bundles"]
    assert job["cache"]["when"] == job["artifacts"]["when"] == "always"


def test_a_damaged_bundle_is_not_published(place: Place) -> None:
    environment, scripts = both(GIVEN)["github"]
    publish = next(step["run"] for step in steps() if step.get("name") == "Publish")
    place.run(scripts[0], environment)
    bundle = place.folder / "kept" / f"{NAME}.kvcal.safetensors"
    (place.folder / "reports" / f"{NAME}.json").write_text('{"rows": []}')
    assert load_bundle(bundle)
    bundle.write_bytes(bundle.read_bytes()[:-1])
    place.run(publish, environment, code=4)
    assert not place.hub.repositories


# The page.


ELSEWHERE = {"Gates"}  # tests/kvcal/pipeline/test_build.py runs them, and measures there what the build measures here


def test_the_page_says_how_to_install() -> None:
    """From nothing: before the first block, as README.md does."""
    top = (ROOT / "docs" / "pipeline.md").read_text().partition("```bash")[0]
    (line,) = re.findall(r"`(pip install [^`]*)`", top)
    assert f"{line} && kvcal demo" in (ROOT / "README.md").read_text()
    assert line == "pip install -c constraints.txt '.[all]'" and (ROOT / "constraints.txt").exists()


def test_the_blocks_of_the_page_run(place: Place) -> None:
    """In order, in an empty folder: from nothing to a gated, published, fetched and reproduced bundle."""
    page, empty = ROOT / "docs" / "pipeline.md", place.folder / "empty"
    empty.mkdir()
    blocks = bash_blocks(page)
    assert len(blocks) == len(re.findall(r"^```bash$", page.read_text(), flags=re.MULTILINE))
    headings = {block.heading for block in blocks}
    assert headings == {"Recipe", "Build", "Gates", "Look", "Publish", "Pull", "Reproduce"}
    run_page(page, empty, headings - ELSEWHERE, environment=place.environment)
    (repository,) = place.hub.repositories
    assert repository == "my-org/tiny-aqua"
    for example in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        taken = yaml.safe_load(example)
        given = taken["jobs"]["bundles"]["with"] if "jobs" in taken else taken["variables"]
        assert given.get("install", given.get("INSTALL", "")).startswith("git+https://")
        known = set(GIVEN) if "jobs" in taken else set(yaml.safe_load((CI / "gitlab.yml").read_text())["variables"])
        assert set(given) <= known


# What the files say, beyond what they run.


def test_values_reach_the_shell_through_variables_only() -> None:
    """An input pasted into a script could carry a command."""
    for step in steps():
        assert "${{" not in step.get("run", "")


def test_both_ways_to_start_the_workflow_take_the_same_inputs() -> None:
    on = workflow()[True]  # YAML 1.1 reads `on` as true
    called, started = on["workflow_call"]["inputs"], on["workflow_dispatch"]["inputs"]
    assert {n: i.get("default") for n, i in called.items()} == {n: i.get("default") for n, i in started.items()}
    assert set(called) == set(GIVEN)
    used = re.findall(r"inputs\.(\w+)", (CI / "github.yml").read_text())
    assert set(used) == set(called)


def test_what_pip_installs_must_be_given(place: Place) -> None:
    """kvcal is in no index that every runner has."""
    for inputs in (one["inputs"] for one in workflow()[True].values()):
        assert [name for name, entry in inputs.items() if entry.get("required")] == ["install"]
        assert "default" not in inputs["install"]
    own, jobs = gitlab()
    for script in jobs.values():
        place.run(script[0], own | {"INSTALL": ""}, code=1)


def test_actions_are_pinned_and_the_token_may_only_read() -> None:
    assert workflow()["permissions"] == {"contents": "read"}
    for step in steps():
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w/-]+@v\d+", step["uses"])


def test_the_runner_is_an_input() -> None:
    (job,) = workflow()["jobs"].values()
    assert filled(job["runs-on"], GIVEN) == "a-label"
    assert workflow()[True]["workflow_call"]["inputs"]["runner"]["default"] == "ubuntu-latest"


def test_making_bundles_again_is_optional(place: Place) -> None:
    """What lies in kept/ is no bundle, which `kvcal reproduce` says where it runs."""
    (place.folder / "kept").mkdir()
    (place.folder / "kept" / "x.kvcal.safetensors").write_bytes(b"no bundle")
    step = next(step for step in steps() if "kvcal reproduce" in step.get("run", ""))
    assert step["if"] == "${{ inputs.reproduce != 'no' }}"
    place.run(step["run"], {"REPRODUCE": ""}, code=4)
    (line,) = [line for line in gitlab()[1]["kvcal-bundles"] if "kvcal reproduce" in line]
    place.run(line, {"REPRODUCE": ""}, code=4)
    place.run(line, {"REPRODUCE": "no"})


def test_only_the_default_branch_publishes() -> None:
    publish = next(step for step in steps() if step.get("name") == "Publish")
    assert "default_branch" in publish["if"]
    job = yaml.safe_load((CI / "gitlab.yml").read_text())["kvcal-publish"]
    assert "$CI_DEFAULT_BRANCH" in job["rules"][0]["if"] and job["needs"] == ["kvcal-bundles"]
