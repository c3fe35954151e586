"""Hashes of files: a model's revision where no hub gives one, and whole files for records."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvcal_artifacts.files import open_regular

FULL_HASH_BYTES = 1 << 30
SAMPLE_BYTES = 4096


def content_revision(files: Iterable[Path]) -> str:
    """A revision for a folder: `sha256:…` over every byte up to 1 GiB, `sampled-sha256:…` beyond.

    Sampled means: of each file its name, size and header, and of each tensor the first 4096 bytes. Any
    training step changes that; a change of single values deep inside a tensor can escape it, and the prefix
    says so.
    """
    paths = sorted(files, key=lambda path: path.name)
    whole = sum(path.stat().st_size for path in paths) <= FULL_HASH_BYTES
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for piece in _whole(path) if whole else _samples(path):
            digest.update(piece)
    return f"{'sha256' if whole else 'sampled-sha256'}:{digest.hexdigest()}"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _whole(path):
        digest.update(piece)
    return digest.hexdigest()


def _whole(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb") as stream:
        while piece := stream.read(1 << 22):
            yield piece


def _samples(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb") as stream:
        size = stream.read(8)
        header = stream.read(int.from_bytes(size, "little"))
        yield size + header
        base = 8 + len(header)
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            stream.seek(base + begin)
            yield stream.read(min(SAMPLE_BYTES, end - begin))
