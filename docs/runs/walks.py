"""The three walks of the guides with an installed kvcal, from the clone that it was installed from.

    python docs/runs/walks.py CLONE     # with the Python that kvcal is installed for; `nox -s walks` makes both

Each page's blocks run in an empty folder, with nothing of the sources on the path. The engineer's walk goes on to the
server's page: the scheme that `kvcal plan` recommends for a card of 24 GB is the one that the server there loads, and an
answer over HTTP ends it. Blocks that need the hub, a GPU or vLLM are left out, and their number is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--context", "64k", "--json"]


def main(clone: Path) -> None:
    sys.path.insert(0, str(clone))
    from tests.support import pages

    program = Path(sys.executable).with_name("kvcal")
    environment = {"PYTHONPATH": "", "PATH": f"{program.parent}:/usr/bin:/bin"}
    for name in ("engineer", "researcher", "pipeline"):
        started = time.monotonic()
        page = clone / "docs" / "guides" / f"{name}.md"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            done = pages.run_page(
                page, folder, environment=environment, seconds=600, languages=("bash", "python"), tools=folder
            )
            said = ""
            if name == "engineer":
                planned = subprocess.run([program, *PLAN], capture_output=True, text=True, check=True, cwd=folder)
                scheme = json.loads(planned.stdout)["recommended"]
                server = clone / "docs" / "guides" / "server.md"
                assert f"kvcal preset {scheme} " in server.read_text("utf-8"), scheme
                [answer] = pages.asked(server, folder, ["100"], environment, folder)
                said = f", then {scheme} served: {len(answer['text'])} characters answered"
        left = page.read_text("utf-8").count(pages.NEEDS)
        print(
            f"{name}: {len(done)} blocks, 0 failed, {left} left out{said}, {time.monotonic() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
