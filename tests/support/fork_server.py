"""`kvcal` for shell scripts under test, without the seconds that importing torch takes each time.

One process imports everything once and forks for every command; `program()` is the script that stands for `kvcal` on
the path: it hands over its arguments, folder, environment and files, and ends with the command's exit code. What is
read from the environment at import (HF_ENDPOINT, …) is as the server was started with. On request there is a `python -`,
too, which runs a program from its standard input.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import pkgutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers",
    "transformers.cache_utils", "matplotlib.figure", "matplotlib.backends.backend_agg", "huggingface_hub.hf_api",
    "huggingface_hub.file_download", "rich.console",
)  # fmt: skip
CLIENT = """\
#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({place!r})
asked = json.dumps([[os.path.basename(sys.argv[0]), *sys.argv[1:]], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(4, "little")], [0, 1, 2])
server.sendall(asked)
sys.exit(server.recv(1)[0])
"""


@contextmanager
def forking(folder: Path, environment: Mapping[str, str], programs: Collection[str] = ("kvcal",)) -> Iterator[Path]:
    """A server with this environment; yields a folder for the path that holds `programs`, of kvcal and python."""
    place, tools = folder / "kvcal.socket", folder / "tools"
    tools.mkdir()
    for name in programs:
        program = tools / name
        program.write_text(CLIENT.format(python=sys.executable, place=str(place)))
        program.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, __file__, str(place)], env=dict(environment), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield tools
    finally:
        process.kill()
        process.wait()


def serve(place: str) -> None:
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
    from kvcal import commands
    from kvcal.cli import main
    from kvcal.cli.app import app

    for module in (*IMPORTED, *(f"kvcal.commands.{each.name}" for each in pkgutil.iter_modules(commands.__path__))):
        importlib.import_module(module)
    command = typer.main.get_command(app)  # each child would make it anew
    typer.main.get_command = lambda app: command
    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        command.main(["models", "--json"])  # typer imports more for the first command
    gc.freeze()  # what is imported: no child walks it, or copies its pages
    gc.enable()

    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes([_run(connection, main)]))


def exit_code(ended: SystemExit) -> int:
    """As Python exits: a message is printed and counts as a failure."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _run(connection: socket.socket, main: object) -> int:
    """One command in a child; its exit code."""
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    wanted, asked = int.from_bytes(size, "little"), b""
    while len(asked) < wanted:
        asked += connection.recv(wanted - len(asked))
    if child := os.fork():
        for file in files:
            os.close(file)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF
    code = 99
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        arguments, folder, environment = json.loads(asked)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        assert callable(main)
        if arguments[0] == "python":
            assert arguments[1:] == ["-"], arguments
            exec(compile(sys.stdin.read(), "-", "exec"), {"__name__": "__main__"})
        else:
            main()
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "artifacts")]
    serve(sys.argv[1])
