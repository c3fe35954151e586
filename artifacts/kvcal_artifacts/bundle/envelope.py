"""The first bytes of a bundle file: safetensors' header, and in its metadata the kvcal header with its hash."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..checked import shown
from ..errors import CorruptBundle, IncompatibleBundle
from .canonical import canonical, sha256_text
from .header import FORMAT, VERSIONS

HEADER_LIMIT = 4_000_000  # bytes; the largest of 8 layers that kvcal wrote has 38,000
# brackets and braces in it, each of which takes far more memory than its byte; that one has 700
HEADER_PARTS = 100_000


def whole_file(path: Path) -> bytes:
    """The bytes of a file.

    What its first bytes do not explain is not read: it may take no place on a disk, and all of memory.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            start += file.read(_header_size(path, start, size))
            entries = _safetensors_header(path, start, size).values()
            explained = len(start) + max((_end(entry) for entry in entries), default=0)
            if size > explained:
                raise CorruptBundle(f"{path}: {size} bytes, its header explains {explained}")
            return start + file.read()
    except OSError as error:
        raise CorruptBundle(f"{path}: cannot be read: {error.strerror or error}") from error


def _end(entry: object) -> int:
    """Where a tensor ends, counted from the end of the header; 0 where the entry does not say."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    last = offsets[-1] if isinstance(offsets, list) and offsets else None
    return last if isinstance(last, int) else 0


def read_header(path: Path, data: bytes) -> dict[str, object]:
    """The kvcal header of a file's bytes, its hash checked."""
    outer = _safetensors_header(path, data, len(data))
    metadata = outer.get("__metadata__")
    if not isinstance(metadata, dict) or FORMAT not in metadata:
        raise IncompatibleBundle(f"{path}: a safetensors file, but not a kvcal bundle (no '{FORMAT}' metadata)")
    text = metadata[FORMAT]
    try:
        envelope = json.loads(text)
        header, stated = dict(envelope["header"]), envelope["sha256"]
        inner = canonical(header)
        actual = sha256_text(inner)
        plain = f'{{"header":{inner},"sha256":"{actual}"}}'
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptBundle(f"{path}: kvcal header is not readable ({error})") from error
    if actual != stated:
        raise CorruptBundle(f"{path}: header hash is {actual[:16]}…, file states {str(stated)[:16]}…: it was changed")
    if text != plain:  # 1E-05 for 1e-05: the same value, and yet a changed file
        raise CorruptBundle(f"{path}: header of {len(text)} characters is not the canonical one of {len(plain)}")
    version = header.get("version")
    if header.get("format") != FORMAT or type(version) is not int or version not in VERSIONS:
        raise IncompatibleBundle(
            f"{path}: format {shown(header.get('format'))} version {shown(version)}; this version reads "
            f"{FORMAT!r} versions {' and '.join(map(str, VERSIONS))}: update kvcal or write the bundle again"
        )
    return header


def _header_size(path: Path, start: bytes, whole: int) -> int:
    """Bytes of safetensors' header. start: the file's first bytes; whole: how many it has."""
    if len(start) < 8:
        raise CorruptBundle(f"{path}: {len(start)} bytes, too short for a bundle")
    size = int.from_bytes(start[:8], "little")
    if 8 + size > whole:
        raise CorruptBundle(f"{path}: header of {size} bytes in a file of {whole}: truncated or not safetensors")
    if size > HEADER_LIMIT:
        raise CorruptBundle(f"{path}: header of {size} bytes: a bundle's has at most {HEADER_LIMIT}")
    return size


def _safetensors_header(path: Path, data: bytes, whole: int) -> dict[str, object]:
    """Parse safetensors' header. data: the file's bytes, or at least its header; whole: how many the file has."""
    size = _header_size(path, data, whole)
    if (parts := data.count(b"[", 8, 8 + size) + data.count(b"{", 8, 8 + size)) > HEADER_PARTS:
        raise CorruptBundle(f"{path}: header of {parts} lists and objects: a bundle's has at most {HEADER_PARTS}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CorruptBundle(f"{path}: name {twice!r} occurs twice in the header")
        return dict(pairs)

    try:
        header: object = json.loads(data[8 : 8 + size], object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptBundle(f"{path}: header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CorruptBundle(f"{path}: header is not a JSON object")
    return header
