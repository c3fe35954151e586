"""The three walks of the guides with an installed kvcal, from the clone that it was installed from.

    python docs/runs/walks.py CLONE     # with the Python that kvcal is installed for; `nox -s walks` makes both
    python docs/runs/walks.py CLONE --only researcher --model ./smollm2-135m --fit-text books.txt --text wiki.txt

Each page's blocks run in an empty folder, with nothing of the sources on the path. The engineer's walk goes on to the
server's page. The scheme that `kvcal plan` recommends for a card of 24 GB is the one that the server there loads, and
an answer over HTTP ends it. The researcher's ends with a table and a plot of six schemes. With `--model` its commands
are given that model and these texts, as section 4 of the page says. Blocks that need the hub, a GPU or vLLM are left
out, and their number is printed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGES = ("engineer", "researcher", "pipeline")
PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--context", "64k", "--json"]
PROGRAM = Path(sys.executable).with_name("kvcal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--only", choices=PAGES)
    parser.add_argument("--model", type=Path, help="a folder, for the researcher's commands")
    parser.add_argument("--fit-text", type=Path, help="a file, for commands that fit")
    parser.add_argument("--text", type=Path, help="a file, for commands that measure")
    options = parser.parse_args()
    sys.path.insert(0, str(options.clone.resolve()))
    for name in [options.only] if options.only else PAGES:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            said = walk(name, Path(temporary), options)
        print(f"{name}: {said}, {time.monotonic() - started:.0f} s", flush=True)


def walk(name: str, folder: Path, options: argparse.Namespace) -> str:
    from tests.support import pages

    guides = options.clone.resolve() / "docs" / "guides"
    programs = folder / ".programs"
    programs.mkdir()
    if name == "researcher" and options.model is not None:
        of_a_model(programs / "kvcal", *(path.resolve() for path in (options.model, options.fit_text, options.text)))
    environment = {"PYTHONPATH": "", "PATH": f"{programs}:{PROGRAM.parent}:/usr/bin:/bin"}
    page = guides / f"{name}.md"
    languages = ("bash", "python")
    done = pages.run_page(page, folder, environment=environment, seconds=1200, languages=languages, tools=programs)
    said = f"{len(done)} blocks, 0 failed, {page.read_text('utf-8').count(pages.NEEDS)} left out"
    if name == "engineer":
        planned = subprocess.run([PROGRAM, *PLAN], capture_output=True, text=True, check=True, cwd=folder)
        scheme = json.loads(planned.stdout)["recommended"]
        server = guides / "server.md"
        assert f"kvcal preset {scheme} " in server.read_text("utf-8"), scheme
        [answer] = pages.asked(server, folder, ["100"], environment, programs)
        said += f", then {scheme} served: {len(answer['text'])} characters answered"
    if name == "researcher":
        schemes = [row["name"] for row in json.loads((folder / "six.json").read_text("utf-8"))["rows"]]
        assert len(set(schemes)) >= 6 and (folder / "six.png").stat().st_size, schemes
        print("\n".join(ran.out for ran in done if "kvcal compare" in ran.block.code))
    return said


def of_a_model(program: Path, model: Path, fit_text: Path, text: Path) -> None:
    """Write a `kvcal` that adds model and text to the commands that take them."""
    real, model_, fit_, text_ = (shlex.quote(str(one)) for one in (PROGRAM, model, fit_text, text))
    program.write_text(
        f'#!/bin/sh\ncase "$1" in\npreset) set -- "$@" --model {model_} ;;\n'
        f'fit) set -- "$@" --model {model_} --text {fit_} ;;\n'
        f'compare | eval) set -- "$@" --model {model_} --text {text_} ;;\nesac\nexec {real} "$@"\n'
    )
    program.chmod(0o755)


if __name__ == "__main__":
    main()
