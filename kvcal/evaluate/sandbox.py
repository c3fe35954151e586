"""Programs that a model wrote, run where they can reach nothing: no network, no file of ours, little memory and time.

Linux namespaces of an unprivileged user (unshare of util-linux) give a program a separate process table and no
network device. Its root holds Python and its libraries, read-only, and an empty /tmp. The program itself then runs in a
second user namespace, in which none of that can be undone.
"""

from __future__ import annotations

import functools
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvcal_artifacts.errors import UsageError

SECONDS, MEGABYTES = 10, 1024
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")  # what a Python needs besides its folders

OUTER = """\
set -e
read_only() { echo ",$1," | sed 's/,rw,/,ro,/; s/,nosuid,/,/; s/^,//; s/$/nosuid/'; }
root=$1; shift; interpreter=$1; shift
mount --make-rprivate /
mount -t tmpfs -o size=16m tmpfs "$root"
for folder in "$@"; do
    [ -d "$folder" ] || continue
    mkdir -p "$root$folder"
    # where something is mounted below a folder, as in many containers, only all of it may be mounted again
    mount --bind "$folder" "$root$folder" 2> /dev/null || mount --rbind "$folder" "$root$folder"
done
while read -r _ _ _ _ point flags _; do
    case "$point" in "$root"/*) [ ! -e "$point" ] || mount -o "remount,bind,$(read_only "$flags")" "$point" ;; esac
done < /proc/self/mountinfo
mkdir -p "$root/tmp"
exec unshare --user --root="$root" --wd=/tmp "$interpreter" -I -c "$PROGRAM_RUNNER"
"""
RUNNER = f"""\
import resource, sys
for kind, most in ((resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_AS, {MEGABYTES << 20}),
                   (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (most, most))
mark, program = sys.stdin.readline(), sys.stdin.read()
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
sys.__stdout__.write("\\n" + mark)
"""


def passes(program: str) -> bool:
    """Whether a Python program ends by itself, without an error, within SECONDS and MEGABYTES. Its output is dropped.

    Raises UsageError where this machine cannot shut a program in.
    """
    check()
    return _runs(program)


@functools.cache
def check() -> None:
    """Raise UsageError unless a program that does nothing passes here."""
    if shutil.which("unshare") is None:
        raise UsageError("--allow-code: needs `unshare` of util-linux (Linux); run on such a machine, or leave it out")
    if not _runs(""):
        raise UsageError(
            "--allow-code: this machine lets no user make namespaces, so that generated programs could not be shut in; "
            "allow them (sysctl kernel.unprivileged_userns_clone=1, or a container with its own), or leave it out"
        )


def _runs(program: str) -> bool:
    """Whether the program comes to its end: one that leaves early, even with code 0, never prints the mark."""
    interpreter, mark = Path(sys.executable).resolve(), secrets.token_hex()
    folders = dict.fromkeys([*SYSTEM, sys.base_prefix, str(interpreter.parent.parent)])
    outer = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
    command = [*outer, "--kill-child", "sh", "-c", OUTER, "sh", "/mnt", str(interpreter), *folders]
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(
                command,
                input=f"{mark}\n{program}".encode(errors="replace"),
                stdout=output,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PROGRAM_RUNNER": RUNNER},
                timeout=2 * SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        output.seek(max(0, output.seek(0, 2) - len(mark) - 2))
        return output.read().strip() == mark.encode()
