"""Tensors with one row a window that need not fit on the device: hidden states, reconstructions of a layer.

They live on the device, in pinned host memory, or in an unlinked memory-mapped file, which the system takes
back whatever becomes of the process. Reads on CUDA run one chunk ahead on a separate stream.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvcal_artifacts.errors import KVCalError

Where = Literal["device", "cpu", "disk"]
Pending = Callable[[], Tensor]  # a copy under way; called, it waits and gives the rows, where they are wanted

WRITES_IN_FLIGHT = 2  # chunks staged for a file at most; more would hold the memory that spilling saves


def to_host(x: Tensor) -> Pending:
    """Start copying a tensor to the host, while the device goes on; called, the result waits and gives it, contiguous.
    Until then x must not be changed.
    """
    if x.device.type != "cuda":
        return lambda: x.cpu().contiguous()
    try:
        pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
    except RuntimeError:  # a limit of locked memory
        return lambda: x.cpu().contiguous()
    copied = _download(x, pinned, torch.cuda.Stream(x.device))

    def take() -> Tensor:
        copied.synchronize()
        return pinned

    return take


class SpillStore:
    """A tensor (N, ...) read and written by rows; use it as a context manager or call `close`.

    What `read` and `stream` give may share the store's memory: do not change it in place; it is valid until
    the same rows are written. Before its first write a row is undefined.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device | str,
        where: Where = "device",
        spill_dir: Path | None = None,
        label: str = "spilled tensor",
    ) -> None:
        self.shape, self.dtype, self.where = tuple(shape), dtype, where
        self.device = torch.device(device)
        self._rows, self._link = _allocate(self.shape, dtype, self.device, where, spill_dir, label)

    def move(self, device: torch.device) -> None:
        """Give and take rows on another device from now on; those that lie on the device move there."""
        if device == self.device:
            return
        if self._link is not None:
            self._link.close()
        self.device = device
        if self.where == "device":
            self._rows = self._rows.to(device)
        else:
            self._link = None if device.type == "cpu" else _link(self._rows, self.where, device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice) -> Tensor:
        """Rows (n, ...) on the device."""
        return self._start(rows)()

    def stream(self, chunks: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk with its rows (n, ...) on the device, the next one being fetched meanwhile.

        Rows that were given out may be written while the stream goes on.
        """
        pending: deque[Pending] = deque()
        for index, here in enumerate(chunks):
            pending.extend(self._start(rows) for rows in chunks[index + len(pending) : index + 2])
            yield here, pending.popleft()()

    def write(self, rows: slice, x: Tensor) -> None:
        """Store x (n, ...), a tensor on the device."""
        if self._link is None:
            self._rows[rows].copy_(x)
        else:
            self._link.write(self._rows[rows], x)

    def close(self) -> None:
        """Give memory and disk space back."""
        if self._link is not None:
            self._link.close()
        self._rows = torch.empty(0, dtype=self.dtype, device="cpu")

    def __enter__(self) -> SpillStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, rows: slice) -> Pending:
        if self._link is None:
            here = self._rows[rows]
            return lambda: here
        return self._link.read(self._rows[rows])


def _allocate(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    where: Where,
    spill_dir: Path | None,
    label: str,
) -> tuple[Tensor, PinnedLink | StagedLink | None]:
    """Storage, and what moves its rows to the device where the storage is not directly readable there."""
    if where == "device":
        return torch.empty(shape, dtype=dtype, device=device), None
    rows = _mapped(shape, dtype, spill_dir, label) if where == "disk" else torch.empty(shape, dtype=dtype, device="cpu")
    return rows, None if device.type == "cpu" else _link(rows, where, device)


def _link(rows: Tensor, where: Where, device: torch.device) -> PinnedLink | StagedLink:
    return PinnedLink(device, rows) if where == "cpu" and _pin(rows) else StagedLink(device)


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, spill_dir: Path | None, label: str) -> Tensor:
    """A tensor over a file that no longer has a name.

    Its space is reserved now: a disk that fills up under a mapped file kills the process, without an error.
    """
    folder = Path(spill_dir) if spill_dir is not None else Path(tempfile.gettempdir())
    size = max(1, math.prod(shape) * dtype.itemsize)
    try:
        handle, name = tempfile.mkstemp(prefix="kvcal-", suffix=".spill", dir=folder)
    except OSError as error:
        raise KVCalError(f"{folder}: no room for the {label} there ({error.strerror})") from error
    try:
        _reserve(handle, size)
        raw = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(folder).free
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise KVCalError(
            f"{folder}: the {label} need {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free ({reason}); "
            "take another spill folder or fewer windows"
        ) from error
    finally:
        os.close(handle)
        os.unlink(name)
    return raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _reserve(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.truncate(handle, size)


def _pin(rows: Tensor) -> bool:
    """Page-lock a tensor where it is; torch's pinned allocator would round it up to a power of two."""
    runtime: Any = torch.cuda.cudart()
    # it fails on a limit of locked memory; pageable rows then go through small pinned buffers
    return int(runtime.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)) == 0


class PinnedLink:
    """Rows of page-locked memory to a CUDA device and back, in order, on a separate stream."""

    def __init__(self, device: torch.device, rows: Tensor) -> None:
        self._stream = torch.cuda.Stream(device)
        self._release = weakref.finalize(self, _unpin, self._stream, rows)

    def read(self, rows: Tensor) -> Pending:
        return _upload(rows, self._stream)

    def write(self, rows: Tensor, x: Tensor) -> None:
        _download(x, rows, self._stream)

    def close(self) -> None:
        self._release()


def _unpin(stream: torch.cuda.Stream, rows: Tensor) -> None:
    stream.synchronize()
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(rows.data_ptr())


class StagedLink:
    """Pageable or memory-mapped rows to a CUDA device and back through small pinned buffers.

    One worker thread does every access in the order asked, so that a read sees the writes before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvcal-spill")
        self._writes: deque[Future[None]] = deque()

    def read(self, rows: Tensor) -> Pending:
        upload = self._worker.submit(self._load, rows)
        return lambda: upload.result()()

    def write(self, rows: Tensor, x: Tensor) -> None:
        staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True, device="cpu")
        done = _download(x, staged, self._stream)
        self._writes.append(self._worker.submit(_store, rows, staged, done))
        while len(self._writes) > WRITES_IN_FLIGHT:
            self._writes.popleft().result()

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._writes.clear()

    def _load(self, rows: Tensor) -> Pending:
        staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True, device="cpu").copy_(rows)
        return _upload(staged, self._stream)


def _store(rows: Tensor, staged: Tensor, done: torch.cuda.Event) -> None:
    done.synchronize()
    rows.copy_(staged)


def _upload(pinned: Tensor, stream: torch.cuda.Stream) -> Pending:
    """Start copying page-locked rows to the stream's device; the result makes its caller's stream wait."""
    with torch.cuda.stream(stream):
        x = pinned.to(stream.device, non_blocking=True)
        ready = stream.record_event()

    def take() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        current.wait_event(ready)
        x.record_stream(current)
        return x

    return take


def _download(x: Tensor, pinned: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Start copying x to page-locked rows once the current stream has computed it."""
    stream.wait_stream(torch.cuda.current_stream(x.device))
    x.record_stream(stream)
    with torch.cuda.stream(stream):
        pinned.copy_(x, non_blocking=True)
        copied: torch.cuda.Event = stream.record_event()
    return copied
