"""`import kvcal` in Python, and what other packages may add to it."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcal
from kvcal.evaluate.perplexity import Row
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.data_free import PRESETS, Preset
from kvcal_artifacts import load_cache
from kvcal_artifacts.bundle import load_bundle, read_header
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import IncompatibleBundle, KVCalError, UsageError
from tests.support.models_fixture import ROOT, SUFFIX, write_model, write_text
from tests.support.models_fixture import kvcal as command

SHORT = {"windows": 6, "holdout": 1, "length": 200}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("api")
    write_model(base / "model", 2)
    write_text(base / "words.txt")
    return base


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base / "model").eval()


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base / "model")


def python(script: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_kvcal_and_a_plan_import_no_torch() -> None:
    script = (
        "import sys, kvcal\nprint(sorted(set(sys.modules) & {'torch', 'transformers', 'numpy', 'typer', 'rich'}))\n"
        "plan = kvcal.plan('llama-3.1-8b', gpu='rtx-4090', context='32k')\n"
        "print('torch' in sys.modules, plan['context'], plan['rows'][0]['scheme'])\n"
        "import inspect\nparameters = list(inspect.signature(kvcal.evaluate).parameters)\n"
        "print('torch' in sys.modules, parameters[:4], kvcal.evaluate.__doc__.split(':')[0])\n"
        "import kvcal.evaluate\nprint(callable(kvcal.evaluate), callable(kvcal.cache), dir(kvcal)[1:])\n"
    )
    first, second, signature, third = python(script).splitlines()
    parameters = "['model', 'tokenizer', 'text', 'schemes']"
    assert signature == f"False {parameters} Perplexity and KL through the cache, as `kvcal eval` measures"
    assert (first, second) == ("[]", "False 32768 fp16")
    assert third == "True True ['cache', 'check_codec', 'evaluate', 'fit', 'plan', 'register']"


NO_MODEL = (
    "model is the text 'org/name', must be a loaded model (a torch.nn.Module): "
    "give AutoModelForCausalLM.from_pretrained('org/name')"
)
NO_TOKENIZER = (
    "tokenizer is the text 'org/name', must be a loaded tokenizer: give AutoTokenizer.from_pretrained('org/name')"
)
TEXT = "embedded:calibration"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, _: load_cache("auto-4", "org/name"), NO_MODEL),
        (lambda model, _: load_cache("kivi-4", model="org/name"), NO_MODEL),
        (lambda model, _: kvcal.cache("org/name", "kivi-4"), NO_MODEL),
        (lambda model, tokenizer: kvcal.fit("org/name", tokenizer, TEXT), NO_MODEL),
        (lambda model, tokenizer: kvcal.evaluate("org/name", tokenizer, TEXT, ["kivi-4"]), NO_MODEL),
        (lambda model, _: load_cache("kivi-4", None),
         "model is a NoneType, must be a loaded model (a torch.nn.Module): "
         "give AutoModelForCausalLM.from_pretrained(NAME)"),
        (lambda model, _: kvcal.fit(model, "org/name", TEXT), NO_TOKENIZER),
        (lambda model, _: kvcal.evaluate(model, "org/name", TEXT, ["kivi-4"]), NO_TOKENIZER),
        (lambda model, _: load_cache(model, "auto-4"),
         "bundle is a LlamaForCausalLM, a model: the order is load_cache(bundle, model)"),
        (lambda model, _: kvcal.cache("kivi-4", model),
         "scheme is a LlamaForCausalLM, a model: the order is kvcal.cache(model, scheme)"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_named(call: Any, said: str, model: Any, tokenizer: Any) -> None:
    with pytest.raises(UsageError) as raised:
        call(model, tokenizer)
    assert str(raised.value) == said


def test_a_plan_of_a_number_of_tokens_and_of_no_rows() -> None:
    def plan(**options: Any) -> Any:
        return kvcal.plan("llama-3.1-8b", gpu="rtx-4090", **options)

    assert plan(context=4096)["rows"] == plan(context="4k")["rows"]
    with pytest.raises(UsageError, match="--context '-1': not a whole number of tokens"):
        plan(context=-1)
    for rows in (0, -1, 65_537):
        with pytest.raises(UsageError, match=f"^batch={rows}: rows at a time must be from 1 to 65,536$"):
            plan(batch=rows)


def test_what_is_no_scheme_is_refused(model: Any) -> None:
    none: Any = None
    with pytest.raises(
        UsageError, match=r"^scheme is a NoneType, must be a preset's name, a bundle, its path or a Scheme$"
    ):
        kvcal.cache(model, none)


def test_one_scheme_alone_is_no_list(model: Any, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"^schemes='kivi-4': one scheme alone; give a list of them, as \['kivi-4'\]$"):
        kvcal.evaluate(model, tokenizer, "words.txt", "kivi-4")


def test_no_function_takes_options_by_the_way() -> None:
    from kvcal.commands import api

    for function in (api.cache, api.fit, api.evaluate, api.plan, api.register, api.check_codec, load_cache):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
        assert function.__doc__


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvcal' has no attribute 'fti'; it has __version__, cache"):
        kvcal.fti  # type: ignore[attr-defined]  # noqa: B018


def test_a_cache_of_whatever_says_what_to_store(model: Any, tmp_path: Path) -> None:
    path = tmp_path / f"kivi{SUFFIX}"
    with kvcal.cache(model, Preset("kivi-4", "kivi-4", sink=0, recent=32)) as made:
        scheme = made.scheme
    command("preset", "kivi-4", "--model", model.config._name_or_path, "--no-check", "--output", path)
    for given in ("kivi-4", PRESETS["kivi-4"], scheme, path, str(path), load_bundle(path)):
        with kvcal.cache(model, given, strict=True) as made:
            assert isinstance(made, KVCalCache) and made.strict
            assert (
                made.scheme.bits_per_value() == scheme.bits_per_value() == 5.5
            )  # 4, and 32 for 32 tokens or 16 channels
    with kvcal.cache(model, "auto-3", keep=0.5) as made:
        assert made.auto is not None and made.scheme.selection is not None
    with pytest.raises(UsageError, match="preset 'kivi-44' is not known; did you mean kivi-4"):
        kvcal.cache(model, "kivi-44")


def test_a_fit_is_that_of_the_command(base: Path, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    method = AquaKV(recent=32)
    bundle = kvcal.fit(model, tokenizer, base / "words.txt", method=method, output=tmp_path / f"a{SUFFIX}", **SHORT)
    again = kvcal.fit(model, tokenizer, str(base / "words.txt"), method=method, **SHORT)
    assert bundle.path == tmp_path / f"a{SUFFIX}" and again.path is None
    assert again.scheme.config() == bundle.scheme.config() and again.metrics == bundle.metrics
    arguments = ["--windows", 6, "--holdout", 1, "--length", 200, "--recent", 32]
    other = tmp_path / f"b{SUFFIX}"
    done = command(
        "fit-predictors", "--model", base / "model", "--text", base / "words.txt", *arguments, "--output", other
    )
    assert done.code == 0, done.err
    theirs = load_bundle(other)
    for mine, yours in zip(bundle.scheme.layers, theirs.scheme.layers, strict=True):
        assert mine is not None and yours is not None
        tensors = mine.key.tensors() | mine.value.tensors()
        assert tensors.keys() == (yours.key.tensors() | yours.value.tensors()).keys()
        assert all(torch.equal(x, (yours.key.tensors() | yours.value.tensors())[name]) for name, x in tensors.items())
    with kvcal.cache(model, bundle) as cache, torch.no_grad():
        out = model.generate(
            torch.arange(40)[None], past_key_values=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False
        )
        assert out.shape[1] == 80 and cache.nbytes("packed") > 0


def test_what_cannot_be_fitted_says_what_to_do(model: Any, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"'kivi-4' is a preset, which needs no fit: kvcal.cache\(model, 'kivi-4'\)"):
        kvcal.fit(model, tokenizer, "embedded:calibration", method="kivi-4")
    with pytest.raises(UsageError, match="method 'aqua-vk' is not known; allowed are aqua-kv, vqkv"):
        kvcal.fit(model, tokenizer, "embedded:calibration", method="aqua-vk")


def test_an_evaluation_is_that_of_the_command(base: Path, model: Any, tokenizer: Any) -> None:
    text, numbers = base / "words.txt", {"windows": 2, "length": 200}
    rows = kvcal.evaluate(model, tokenizer, text, ["kivi-2", "uniform-8"], **numbers)
    assert [type(row) for row in rows] == [Row] * 3
    done = command(
        "eval", "--model", base / "model", "--text", text, "--windows", 2, "--length", 200, "--json",
        "--preset", "kivi-2", "--preset", "uniform-8",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [(row.name, row.kl) for row in rows] == [(row["name"], row["kl"]) for row in done.json["rows"]]
    [_, mine] = kvcal.evaluate(model, tokenizer, text, {"mine": PRESETS["kivi-2"]}, **numbers)
    assert (mine.name, mine.kl) == ("mine", rows[1].kl)
    with pytest.raises(UsageError, match="two rows would have one name"):
        kvcal.evaluate(model, tokenizer, text, ["kivi-2", "kivi-2"], **numbers)
    with pytest.raises(UsageError, match="a Preset has no name"):
        kvcal.evaluate(model, tokenizer, text, [PRESETS["kivi-2"]], **numbers)


def test_a_bundle_of_another_model_is_refused(base: Path, model: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "other", 2, seed=5)
    command("preset", "kivi-4", "--model", tmp_path / "other", "--no-check", "--output", tmp_path / f"x{SUFFIX}")
    with pytest.raises(IncompatibleBundle):
        kvcal.cache(model, tmp_path / f"x{SUFFIX}")


def test_generate_says_that_a_prompt_is_too_short(base: Path) -> None:
    arguments = ["generate", "--model", base / "model", "--preset", "kivi-4", "--tokens", 4, "--json", "--prompt"]
    done = command(*arguments, "a b c")
    assert done.code == 0, done.err
    assert "note: nothing is packed yet: " in done.err and "the first block is packed at 64 (" in done.err
    assert done.json["unpacked"].startswith("nothing is packed yet: ")
    done = command(*arguments, "a b c " * 20)
    assert done.code == 0 and "nothing is packed" not in done.err and done.json["unpacked"] is None


PLUGIN = '''
import kvcal
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.data_free import Preset
from kvcal_artifacts.codecs import Float8


class AcmeCodec(Float8):
    """Float8 under another name."""

    name = "acme-float8"


class AcmeKV(AquaKV):
    name = "acme-kv"


def register():
    kvcal.register(
        codec=AcmeCodec,
        method=AcmeKV,
        backbones={"acme-8": lambda shape, role: AcmeCodec(shape, role, "e4m3fn")},
        presets={"acme": Preset("acme-8", "acme-8", recent=32)},
    )
'''
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "kvcal-acme"
version = "1"
[project.entry-points.kvcal]
acme = "kvcal_acme:register"
[tool.setuptools]
py-modules = ["kvcal_acme"]
"""


def test_the_page_shows_this_package() -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text("utf-8")
    assert f"```python\n{PLUGIN.strip()}\n```" in page and f"```toml\n{PROJECT.strip()}\n```" in page


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed a small package that brings a codec, a preset and a method."""
    base = tmp_path_factory.mktemp("plugin")
    (base / "kvcal_acme.py").write_text(PLUGIN)
    (base / "pyproject.toml").write_text(PROJECT)
    site = base / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(site), str(base)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def test_an_installed_package_brings_codecs_presets_and_methods(base: Path, installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), *sys.path])
    bundle = tmp_path / f"acme{SUFFIX}"
    script = (
        "import sys\nfrom kvcal.cli import main\n"
        f"sys.argv = ['kvcal', 'preset', 'acme', '--model', {str(base / 'model')!r}, '--no-check', '--json',\n"
        f"            '--output', {str(bundle)!r}]\nmain()\n"
    )
    assert '"bits_per_value": 8.0' in python(script, PYTHONPATH=path)
    script = (
        "import kvcal\nfrom kvcal_artifacts import load_bundle\n"
        f"print(load_bundle({str(bundle)!r}).scheme.layers[0].key.name)\n"
        "from kvcal.methods.composition import Composition\nComposition('acme-8', 'kivi-2')\n"
        "from kvcal.commands.api import _method\nprint(type(_method('acme-kv')).__name__)\n"
        "from kvcal.commands.names import run_names\n"
        "print(*(row['name'] for row in run_names(None, 'llama-3.1-8b') if row['name'].startswith('acme')))\n"
    )
    assert python(script, PYTHONPATH=path).split() == ["acme-float8", "AcmeKV", "acme", "acme-8"]
    header = read_header(bundle, bundle.read_bytes())
    assert header["codecs"] == {"acme-float8": {"package": "kvcal-acme", "version": "1"}}
    told = re.escape(
        f"{bundle}: codec 'acme-float8' is of package kvcal-acme 1, which is not installed: if you trust it, pip install "
        "kvcal-acme==1"
    )
    with pytest.raises(IncompatibleBundle, match=f"^{told}$"):
        load_bundle(bundle)
    done = command("verify", bundle)
    assert done.code == 4 and done.err.count("\n") == 1 and "pip install kvcal-acme==1" in done.err


def test_a_bundle_of_a_package_of_another_version(base: Path, installed: Path, tmp_path: Path) -> None:
    """One that no longer has the codec, and one that has it: the bundle opens, and a new one names the new version."""
    path = os.pathsep.join([str(installed), *sys.path])
    bundle = tmp_path / f"acme{SUFFIX}"
    script = (
        "import sys\nfrom kvcal.cli import main\n"
        f"sys.argv = ['kvcal', 'preset', 'acme', '--model', {str(base / 'model')!r}, '--no-check', '--json',\n"
        f"            '--output', {str(bundle)!r}]\nmain()\n"
    )
    python(script, PYTHONPATH=path)
    newer = tmp_path / "newer"
    shutil.copytree(installed, newer)
    [record] = newer.glob("kvcal_acme-1*.dist-info")
    metadata = (record / "METADATA").read_text().replace("Version: 1", "Version: 2")
    (record / "METADATA").write_text(metadata)
    record.rename(record.with_name("kvcal_acme-2.dist-info"))
    path = os.pathsep.join([str(newer), *sys.path])
    script = (
        f"from kvcal_artifacts.bundle import load_bundle, read_header\nbundle = load_bundle({str(bundle)!r})\n"
        f"print(read_header(bundle.path, bundle.to_bytes())['codecs']['acme-float8'])\n"
    )
    assert python(script, PYTHONPATH=path) == "{'package': 'kvcal-acme', 'version': '2'}"
    (newer / "kvcal_acme.py").write_text("def register():\n    pass\n")
    script = (
        f"from kvcal_artifacts import load_bundle\ntry:\n    load_bundle({str(bundle)!r})\n"
        "except Exception as error:\n    print(error)\n"
    )
    assert python(script, PYTHONPATH=path).endswith(
        "codec 'acme-float8' is of package kvcal-acme 1, and 2 has no such codec: if you trust it, pip install kvcal-acme==1"
    )


def test_an_installed_codec_is_checked_by_name(installed: Path) -> None:
    """By the name that bundles have, and by that of --keys; two of the page's commands."""
    path = os.pathsep.join([str(installed), *sys.path])
    for name in ("acme-float8", "acme-8"):
        script = f"import sys\nfrom kvcal.cli import main\nsys.argv = ['kvcal', 'check-codec', {name!r}]\nmain()\n"
        lines = python(script, PYTHONPATH=path).splitlines()
        assert {line.split()[0] for line in lines[:-1]} == {"good"} and len(lines) == 15
        assert lines[-1] == f"{name}: keeps the contract"


def test_a_package_that_fails_is_named(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "kvcal_acme.py").write_text("def register():\n    raise ValueError('no good')\n")
    path = os.pathsep.join([str(tmp_path), str(installed), *sys.path])
    script = (
        "import kvcal_artifacts.errors as errors\nfrom kvcal.methods.data_free import preset\npreset('kivi-4')\n"
        "try:\n    preset('acme')\nexcept errors.KVCalError as error:\n    print(error)\n"
    )
    line = "package kvcal-acme: its entry point kvcal:acme fails (ValueError: no good); mend or uninstall it"
    assert python(script, PYTHONPATH=path) == line


def test_a_taken_name_is_refused() -> None:
    class Other(AquaKV):
        pass

    from kvcal_artifacts.codecs import Exact, Float8

    class Taken(Float8):
        name = Exact.name

    for arguments, kind in (
        ({"method": Other}, "method 'aqua-kv'"),
        ({"codec": Taken}, "codec 'exact'"),
        ({"presets": {"kivi-4": Preset("kivi-2", "kivi-2")}}, "preset 'kivi-4'"),
        ({"backbones": {"kivi-4": lambda shape, role: None}}, "codec 'kivi-4'"),
    ):
        with pytest.raises(KVCalError, match=kind):
            kvcal.register(**arguments)  # type: ignore[arg-type]
    kvcal.register(method=AquaKV, codec=Exact, presets={"kivi-4": PRESETS["kivi-4"]})  # what is there already
