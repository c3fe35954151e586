"""Which local files are texts: by their suffix, packed or not, and what of a folder is read."""

from __future__ import annotations

import stat
from pathlib import Path

from kvcal_artifacts.errors import TextError
from kvcal_artifacts.files import kind_of as what_is

PLAIN = (".txt", ".text", ".raw", ".tokens", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log", ".srt")
SOURCE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".cs", ".java", ".kt", ".scala", ".swift"),
    *(".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".hs", ".ml", ".f90"),
    *(".sh", ".sql"),
)
ROWS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".xz", ".bz2", ".zst")
_ROWS_AND_PACKED = f"{', '.join(ROWS)}, and all but .parquet also as {', '.join(PACKED[:-1])} and {PACKED[-1]}"
ALLOWED = f"plain text ({', '.join(PLAIN[:5])}, source code, or no suffix), {_ROWS_AND_PACKED}"
ALLOWED_IN_FOLDER = f"plain text ({', '.join(PLAIN[:5])}, or source code), {_ROWS_AND_PACKED}"
# A folder is read by the first of these that it holds: bundles name folders, so what was read of one stays the same.
FIRST = (".txt", ".raw", ".jsonl", ".parquet", ".txt.xz", ".raw.xz", ".jsonl.xz")
SECOND = (*ROWS, *(kind + pack for kind in (".txt", ".raw", *ROWS[:-1]) for pack in PACKED))
TIERS = (FIRST, SECOND, (*PLAIN, *SOURCE))


def kind_of(path: Path) -> str:
    """`text` or one of ROWS. Raises TextError for a name that is none of ALLOWED."""
    name = path.name.lower()
    pack = next((pack for pack in PACKED if name.endswith(pack)), "")
    suffix = Path(name.removesuffix(pack)).suffix
    if suffix == ".parquet" and pack:
        raise TextError(f"{path}: Parquet is packed inside and cannot be read from {pack}; unpack it first")
    if suffix in ROWS:
        return suffix
    if suffix in ("", *PLAIN, *SOURCE):
        return "text"
    raise TextError(f"{path}: {suffix}{pack} files are not read as text; allowed are {ALLOWED}; convert or rename it")


def looks_like_file(name: str) -> bool:
    """Whether a name that no file has was meant as one, and not as a data set."""
    return name.lower().endswith((*ROWS, *PACKED, *PLAIN))


def check_file(path: Path) -> None:
    """Raises TextError, without opening it, for what is no regular file: a pipe would be waited for, a device may have
    no end.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise TextError(f"{path}: {what_is(mode)}, not a file; write its text to a file and give that")


def folder_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of a folder's first tier that has any, and those left out, both in order; hidden ones are in neither.
    Pipes, devices and links that lead nowhere are left out, and so are files without a suffix: a folder of data holds
    many.
    """
    inside = ((path, path.relative_to(folder).parts) for path in folder.rglob("*") if not path.is_dir())
    files = sorted(path for path, parts in inside if not any(part.startswith(".") for part in parts))
    for tier in TIERS:
        if taken := [path for path in files if path.name.lower().endswith(tier) and path.is_file()]:
            return taken, [path for path in files if path not in set(taken)]
    return [], files
