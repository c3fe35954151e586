"""The characters of a file: unpacked (.gz, .xz, .bz2, .zst), decoded from UTF-8, cut into lines, in bounded memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvcal_artifacts.errors import TextError

from ..report.extras import require
from .file_kinds import PACKED, check_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


Part = TypeVar("Part")

CHUNK = 1 << 20  # bytes read at a time
ROW = 1 << 25  # characters (Parquet: bytes) of one row, line or JSON value: 32 MiB, seven Bibles
RATIO, UNPACKED = 200, 1 << 24  # a packed file may grow this many times, or to so many bytes; text packs 3 to 50 times
XZ_MEMORY = 1 << 28  # bytes that an .xz file's dictionary may ask for; `xz -9` asks for 64 MiB


class Stream(Protocol):
    """Unpacked bytes."""

    def read(self, size: int, /) -> bytes: ...


def _opened(path: Path) -> AbstractContextManager[Stream]:
    """A stream of the unpacked bytes; a context manager with read()."""
    check_file(path)
    pack = path.suffix.lower()
    if pack == ".zst":
        require("pyarrow", str(path), "give the text unpacked")
        import pyarrow

        unpacked: AbstractContextManager[Stream] = pyarrow.input_stream(str(path), compression="zstd")
        return unpacked
    if pack == ".xz":
        return io.BufferedReader(_Xz(path))
    if pack == ".gz":
        return gzip.open(path)
    return bz2.open(path) if pack == ".bz2" else open(path, "rb")


class _Xz(io.RawIOBase):
    """What lzma.open reads, with a limit to the memory that the file may ask for."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115  closed with this
        self._decoder, self._ended = self._new(), False

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self._ended:
            fresh = self._decoder.eof
            raw = self._decoder.unused_data if fresh else b""
            if not raw and (fresh or self._decoder.needs_input):
                raw = self._file.read(CHUNK)
                self._ended = fresh and not raw
                if not raw and not fresh:
                    raise EOFError("the file ends before its last block does")
            if self._ended:
                break
            if fresh:
                self._decoder = self._new()
            try:
                got = self._decoder.decompress(raw, len(view))
            except lzma.LZMAError as error:
                if fresh and "emory" not in str(error):  # padding, or bytes behind the end, as lzma.open leaves them
                    self._ended = True
                    break
                raise
            if got:
                view[: len(got)] = got
                return len(got)
        return 0


def decoded(path: Path) -> Iterator[str]:
    """The text of a file, strictly UTF-8, every line end as \\n, a byte order mark dropped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    lines = io.IncrementalNewlineDecoder(decoder, translate=True)
    packed = path.suffix.lower() in PACKED
    done = 0
    with _opened(path) as stream:
        most = max(UNPACKED, RATIO * path.stat().st_size) if packed else None
        while True:
            raw = stream.read(CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                text = lines.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                at = done - pending + error.start
                raise TextError(f"{path}: byte {at:,} is not UTF-8; convert the file to UTF-8") from error
            if (at := raw.find(b"\0")) >= 0:
                raise TextError(f"{path}: byte {done + at:,} is 0: no plain text; convert the file to UTF-8 text")
            yield text
            done += len(raw)
            if not raw:
                return
            if most is not None and done > most:
                raise TextError(
                    f"{path}: unpacks to more than {done:,} bytes, {RATIO} times its size; text does not: unpack it "
                    "first",
                )


def lines_of(path: Path) -> Iterator[str]:
    """Yield lines without their ends."""
    waiting: list[str] = []
    size = number = 0
    for text in decoded(path):
        *whole, last = text.split("\n")
        if whole:
            yield "".join([*waiting, whole[0]])
            yield from whole[1:]
            number += len(whole)
            waiting, size = [], 0
        waiting.append(last)
        size += len(last)
        if size > ROW:
            raise TextError(f"{path} line {number + 1}: {too_long()}")
    yield "".join(waiting)


def too_long(unit: str = "characters") -> str:
    return f"one row of more than {ROW:,} {unit}; cut it into several, or give plain text"
