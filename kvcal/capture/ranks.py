"""The processes that `torchrun` started for one calibration, and what they tell each other, by torch.distributed.

Tensors on a CPU go by gloo, those on GPUs by NCCL. Ranks that wait meet at gloo's monitored barrier first, which names
the rank that does not come.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed

from kvcal_artifacts.bundle.canonical import canonical
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError

from .attempt import MissingRanksError, attempt_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

T = TypeVar("T")
Form: TypeAlias = tuple[tuple[int, ...], torch.dtype, str]  # of a tensor: shape, dtype, kind of its device

TIMEOUT = "KVCAL_RANK_TIMEOUT"
SENT_AT_ONCE = 1 << 29  # bytes of tensors that are copied together, to be sent as one
SECONDS = 1800  # that ranks wait for each other: torch's default for gloo
# Other ranks wait for rank 0 so many times as long as rank 0 for them: it may come that late, wait for all, and only
# then name the one that is missing.
PATIENCE = 2
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun
AGAIN = "kvcal/again"  # the key that a rank sets whose error would come again
LINE = "kvcal/line"  # the key by which ranks settle who prints
GRACE = 5.0  # seconds in which another rank, which may know more, can print its line first
PAUSE = 0.05  # seconds between two looks whether it has
WAITS = "kvcal/waits"  # a key for each rank that has done its share and waits for rank 0's end
BEAT, TAG, BUSY = 1.0, 1 << 30, -1  # seconds between two messages of rank 0's, their tag, what they say before its end
MISSED = re.compile(r"[Rr]anks? (\d+) failed to pass monitoredBarrier")
ALL_MISSED = re.compile(r"[Rr]anks (\d+(?:, \d+)*) failed to pass monitoredBarrier")


class RankEndedError(KVCalError):
    """Another rank ended, or did not come in time."""


class SomeRankEndedError(RankEndedError):
    """Another rank ended, and this one does not know which."""


class ErrorAgainError(SomeRankEndedError):
    """Another rank ended with an error that would come again: a number of the model or its input that is not finite."""


@dataclass(frozen=True)
class Ranks:
    """One process of `count`, the one of number `rank`. control: the gloo group that barriers and objects go by, which
    waits PATIENCE times the timeout. store: of this attempt of all ranks.
    hold_one_model: they hold one model by heads (tp_plan) and run all windows together, instead of some windows each.

    Every method is to be called by all ranks, in the same order. With a count of 1 nothing is sent.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"
    timeout: float = SECONDS
    control: ProcessGroup | None = None
    hold_one_model: bool = False
    store: Store | None = None

    @property
    def of_windows(self) -> Ranks:
        """The processes that windows are shared among."""
        return ALONE if self.hold_one_model else self

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.count}"

    def broadcast(self, value: T | None, source: int) -> T:
        """What rank `source` gives here, on every rank; tensors lie on the device of the same kind, by rows. Other
        ranks give None.

        Raises RankEndedError where a rank ended, or does not come within the timeout.
        """
        if self.count == 1:
            assert value is not None
            return value
        self.meet()
        header: list[Any] = [None]
        tensors: list[Tensor] = []
        if self.rank == source:
            data, tensors = _packed(value)
            header = [(data, [(tuple(x.shape), x.dtype, x.device.type) for x in tensors])]
        with _named(self):
            distributed.broadcast_object_list(header, src=source, group=self.control)
            data, forms = header[0]
            if self.rank != source:
                tensors = [torch.empty(shape, dtype=dtype, device=self._on(kind)) for shape, dtype, kind in forms]
            for x in tensors:
                if x.numel():
                    distributed.broadcast(x.reshape(-1).view(torch.uint8), src=source)
        received: T = _Unpickler(io.BytesIO(data), tensors).load()  # on the source, too: tensors lie alike everywhere
        return received

    def exchange(self, values: Sequence[T]) -> list[list[T]]:
        """What every rank gives here, by the ranks' numbers, on every rank. One rank may give more values than another,
        or none. Tensors lie as `broadcast` says.

        One barrier and one list of what comes serve all. A rank's tensors go as one, SENT_AT_ONCE bytes at a time;
        those on a GPU and those on a CPU go apart. Raises RankEndedError as `broadcast`.
        """
        if self.count == 1:
            return [list(values)]
        self.meet()
        packed = [_packed(value) for value in values]
        mine = [(data, [(tuple(x.shape), x.dtype, x.device.type) for x in tensors]) for data, tensors in packed]
        headers: list[list[tuple[bytes, list[Form]]]] = [[]] * self.count
        by_rank: list[list[T]] = []
        with _named(self):
            distributed.all_gather_object(headers, mine, group=self.control)
            for source, header in enumerate(headers):
                forms = [form for _, some in header for form in some]
                to_send = [x for _, tensors in packed for x in tensors] if source == self.rank else []
                tensors = []
                for run in _sent_at_once(forms):
                    tensors += self._broadcast_as_one(forms[run], to_send[run], source)
                received: list[T] = []
                for data, some in header:
                    first, tensors = tensors[: len(some)], tensors[len(some) :]
                    received.append(_Unpickler(io.BytesIO(data), first).load())
                by_rank.append(received)
        return by_rank

    def _broadcast_as_one(self, forms: list[Form], to_send: list[Tensor], source: int) -> list[Tensor]:
        """The tensors of these forms that rank `source` is to send: they go in one buffer for each kind of
        device, and are copied out of it, so that no sum holds all of it.
        """
        places, ends = [], dict[str, int]()
        for shape, dtype, kind in forms:
            start = ends.get(kind, 0)
            ends[kind] = start + math.prod(shape) * dtype.itemsize
            places.append(slice(start, ends[kind]))
        buffers = {kind: torch.empty(end, dtype=torch.uint8, device=self._on(kind)) for kind, end in ends.items()}
        for (_, _, kind), place, x in zip(forms, places, to_send, strict=False):  # others send none
            buffers[kind][place] = x.reshape(-1).view(torch.uint8)
        for kind in sorted(buffers):
            if len(buffers[kind]):
                distributed.broadcast(buffers[kind], src=source)
        if to_send:
            return to_send
        return [
            buffers[kind][place].clone().view(dtype).view(shape)
            for (shape, dtype, kind), place in zip(forms, places, strict=True)
        ]

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of each rank, on every rank, in the order of the ranks; all have one shape and dtype, on the
        device of this rank or on the CPU.

        Raises RankEndedError as `broadcast`.
        """
        if self.count == 1:
            return [x]
        self.meet()
        flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
        received = [torch.empty_like(flat) for _ in range(self.count)]
        with _named(self):
            if flat.numel():
                distributed.all_gather(received, flat)
        return [one.view(x.dtype).view(x.shape) for one in received]

    def swap(self, parts: Tensor) -> Tensor:
        """Send the r-th of `parts` (count, ...) to rank r; returns those that all ranks send here, by their numbers, of
        the same shape and dtype.

        Raises RankEndedError as `broadcast`.
        """
        if self.count == 1:
            return parts
        self.meet()
        flat = parts.detach().contiguous().view(self.count, -1).view(torch.uint8)
        received = torch.empty_like(flat)
        with _named(self):
            if flat.numel():
                distributed.all_to_all_single(received, flat)
        return received.view(parts.dtype).view(parts.shape)

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return value if self.count == 1 else self.broadcast(value if self.rank == 0 else None, 0)

    def check_same(self, record: Mapping[str, Json]) -> None:
        """Raise UsageError, on every rank, where one has another record than rank 0: it would sum other numbers."""
        if self.count == 1:
            return
        self.meet()
        records: list[dict[str, Json]] = [{}] * self.count
        with _named(self):
            distributed.all_gather_object(records, dict(record), group=self.control)
        first = records[0]
        for rank, theirs in enumerate(records):
            for name in sorted({*first, *theirs}):
                value, expected = canonical(theirs.get(name)), canonical(first.get(name))
                if value != expected:
                    raise UsageError(
                        f"rank {rank} has {name} {value}, rank 0 has {expected}: all ranks need the same texts, "
                        "models, versions and devices"
                    )

    def meet(self) -> None:
        """Wait for all ranks. Raises RankEndedError that names the one that is missing, on rank 0; on the others where
        it is rank 0.
        """
        if self.count > 1:
            with _named(self, *(("rank 0", PATIENCE * self.timeout) if self.rank else ())):
                distributed.monitored_barrier(self.control, timedelta(seconds=self.timeout), wait_all_ranks=True)

    @property
    def would_come_again(self) -> bool:
        """Whether a rank ended with an error that would come again."""
        try:
            return self.store is not None and bool(self.store.check([AGAIN]))
        except RuntimeError:  # the store is gone
            return False

    def _on(self, kind: str) -> str:
        return "cpu" if kind == "cpu" else self.device


ALONE = Ranks()
_joined: list[Ranks] = []  # one per process while `joined`, as torch.distributed's group is


def current() -> Ranks:
    """The ranks that this process has joined; ALONE without any."""
    return _joined[-1] if _joined else ALONE


def leave_to_first() -> None:
    """Raise ShareDoneError on all ranks but rank 0, which alone goes on from here: what follows is written once. The
    others wait for its end in `joined`.
    """
    if current().rank:
        raise ShareDoneError


@contextmanager
def joined(device: str, hold_one_model: bool = False) -> Iterator[Ranks]:
    """Join the processes that torchrun started, as one of their ranks, until the end of the block. device: what
    `--device` says; each rank has a GPU of its own. hold_one_model: see Ranks. Ranks that are done wait until rank 0
    is, however long it works.

    Raises UsageError for devices that do not suffice, and RankEndedError where not all processes come or one ends too
    early. LinePrintedError stands for an error whose line another rank prints.
    """
    from torch.distributed.rendezvous import rendezvous  # not at the top: torch may be built without

    timeout = _timeout()
    kind = _rank_device(device)
    try:
        agents_store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        store = attempt_store(agents_store, rank, count, timeout)
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        os.environ.setdefault("NCCL_DEBUG_FILE", "/dev/stderr")  # of NCCL_DEBUG: stdout is the command's, as of --json
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
        )
        control = distributed.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE * timeout))
    except MissingRanksError as error:
        late = RankEndedError(_not_in_time(_who(error.ranks, count), timeout))
        first = _is_first(agents_store, f"{LINE}/{os.environ.get(RESTARTS, '0')}")
        raise (late if first else LinePrintedError(late)) from error
    except RuntimeError as error:
        raise RankEndedError(
            f"not all of the processes that torchrun started came ({_first_line(error)}): start them again; what they "
            "printed before says which ended"
        ) from error
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    _joined.append(Ranks(rank, count, kind, timeout, control, hold_one_model, store))
    try:
        with _until_first_ends(_joined[-1], store):
            yield _joined[-1]
    except (ShareDoneError, LinePrintedError):
        raise
    except _Terminated as error:
        before = _ignore_sigterm()
        ended = RankEndedError(
            "torchrun ended this rank, because another one ended or it was told to; its report says why"
        )
        raise (ended if _is_first(store) else LinePrintedError(ended)) from error
    except Exception as error:
        before = _ignore_sigterm()
        if isinstance(error, NonFiniteError):
            with suppress(RuntimeError):  # the store is gone
                store.set(AGAIN, "")
        if isinstance(error, SomeRankEndedError):
            _wait_for_line(store)
        if _is_first(store):
            raise
        raise LinePrintedError(error) from error
    finally:
        _joined.pop()
        signal.signal(signal.SIGTERM, before)
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _ignore_sigterm() -> signal.Handlers:
    """Ignore SIGTERM, as the process ends anyway and has a line to print: torchrun may send it more than once."""
    while True:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return signal.SIG_IGN
        except _Terminated:  # had come before
            continue


class LinePrintedError(KVCalError):
    """Another rank has printed the line for what failed here, too; the exit code is that of the error."""

    def __init__(self, error: Exception, exit_code: int | None = None) -> None:
        super().__init__(str(error))
        self.exit_code = int(getattr(error, "exit_code", 1)) if exit_code is None else exit_code


class ShareDoneError(Exception):
    """No error: this rank has done its share, and rank 0 alone writes and prints."""


@contextmanager
def _until_first_ends(ranks: Ranks, store: Store) -> Iterator[None]:
    """Keep ranks that have done their share within until rank 0 has ended.

    Then a rank 0 that is killed while it works alone ends all, and torchrun can start all anew. Raises LinePrintedError
    where rank 0 failed, RankEndedError where it was killed or is silent for PATIENCE times the timeout.
    """
    if ranks.rank:
        try:
            yield
        except ShareDoneError:
            _wait_for_first(ranks, store)
            raise
        _wait_for_first(ranks, store)
        return
    end = _FirstsEnd(ranks, store)
    code = 1
    try:
        yield
        code = 0
    except Exception as error:
        code = int(getattr(error, "exit_code", 1))
        raise
    finally:
        end.tell(code)


def _wait_for_first(ranks: Ranks, store: Store) -> None:
    try:
        store.set(f"{WAITS}/{ranks.rank}", "")
    except RuntimeError as error:
        raise RankEndedError(f"rank 0 of {ranks.count} ended; torchrun's report says why") from error
    code, limit = torch.tensor([BUSY], device="cpu", dtype=torch.int64), PATIENCE * ranks.timeout
    while code.item() == BUSY:
        try:
            with _named(ranks, "rank 0", limit):
                distributed.recv(code, src=0, group=ranks.control, tag=TAG)
        except SomeRankEndedError as error:  # nothing but rank 0 is waited for
            raise RankEndedError(f"rank 0 of {ranks.count} ended; torchrun's report says why") from error
    if code.item():
        raise LinePrintedError(KVCalError("rank 0 failed, and has printed why"), int(code.item()))


class _FirstsEnd:
    """Threads of rank 0 that tell each waiting rank every BEAT seconds that rank 0 is alive, and its end at last.

    Each rank has a thread for itself, so that a rank that is stopped keeps no other from hearing.
    """

    def __init__(self, ranks: Ranks, store: Store) -> None:
        self._ranks, self._store = ranks, store
        self._ended, self._code = threading.Event(), BUSY
        self._threads = [
            threading.Thread(target=self._beat, args=(rank,), name=f"beat-{rank}", daemon=True)
            for rank in range(1, ranks.count)
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, code: int) -> None:
        """Tell the others rank 0's exit code. With 0 wait for those that have not come yet, up to the timeout; with
        another they see that the connection closes.
        """
        self._code = code
        self._ended.set()
        end = time.monotonic() + (GRACE if code else self._ranks.timeout)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _beat(self, rank: int) -> None:
        try:
            while not self._store.check([f"{WAITS}/{rank}"]):
                if not self._ended.is_set():
                    self._ended.wait(BEAT)
                elif self._code:
                    return
                else:
                    time.sleep(PAUSE)
            while True:
                code = self._code
                message = torch.tensor([code], device="cpu", dtype=torch.int64)
                distributed.send(message, dst=rank, group=self._ranks.control, tag=TAG)
                if code != BUSY:
                    return
                self._ended.wait(BEAT)
        except (
            RuntimeError
        ):  # that rank has ended, or the store: torchrun tells, and the output is written nevertheless
            return


def _is_first(store: Store, key: str = LINE) -> bool:
    """Whether no other rank has asked yet; True, too, where the store is gone."""
    try:
        return int(store.add(key, 1)) == 1
    except RuntimeError:
        return True


def _wait_for_line(store: Store) -> None:
    """Wait GRACE seconds at most for another rank to print: where rank 0 names one, gloo ends the others at once."""
    end = time.monotonic() + GRACE
    try:
        while time.monotonic() < end and not store.check([LINE]):
            time.sleep(PAUSE)
    except RuntimeError:  # the store is gone
        return


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise _Terminated


class _Terminated(BaseException):
    """SIGTERM; no Exception, which what reads files and configurations would blame on them."""


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, str(SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{TIMEOUT}={text}: must be a number of seconds above 0")
    return seconds


def _rank_device(device: str) -> str:
    """ "cpu", or the name of this rank's GPU, which becomes the current one."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UsageError(f"--device {device}: under torchrun every rank has a GPU of its own; give cuda, cpu or auto")
    index, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= gpus:
        fewer = f"--nproc-per-node {gpus}, or " if gpus else ""
        raise UsageError(f"torchrun started more processes here than there are GPUs ({gpus}): give {fewer}--device cpu")
    torch.cuda.set_device(index)
    return f"cuda:{index}"


@contextmanager
def _named(ranks: Ranks, missing: str | None = None, seconds: float | None = None) -> Iterator[None]:
    """Turn errors of torch.distributed within the block into lines that name the rank that is missing.

    missing: its name where torch.distributed does not say it; None: one of the others. seconds: how long the call
    waits, by default the timeout.
    """
    missing = missing or (f"rank {1 - ranks.rank}" if ranks.count == 2 else "another rank")
    limit = seconds or ranks.timeout
    end = time.monotonic() + 0.9 * limit
    try:
        yield
    except RuntimeError as error:
        in_time = time.monotonic() < end  # torch.distributed says the same where a connection was closed
        match = ALL_MISSED.search(str(error)) or MISSED.search(str(error))
        if in_time and ranks.would_come_again:
            raise ErrorAgainError(f"{ranks}: another rank ended, whose line says why") from error
        if match is None and in_time:
            raise SomeRankEndedError(f"{ranks}: another rank ended; torchrun's report says which") from error
        who = f"{missing} of {ranks.count}"
        if match:
            who = _who([int(rank) for rank in match[1].split(", ")], ranks.count)
        if in_time:
            raise RankEndedError(f"{who} ended; torchrun's report says why") from error
        raise RankEndedError(_not_in_time(who, limit, twice=limit > ranks.timeout)) from error


def _who(ranks: list[int], count: int) -> str:
    """ "rank 1 of 4", or "ranks 1, 3 of 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {count}"


def _not_in_time(who: str, seconds: float, twice: bool = False) -> str:
    """The line for ranks that were waited for so long: the timeout, or twice as long."""
    setting = f"twice {TIMEOUT}" if twice else TIMEOUT
    why = "they hang, or have ended" if who.startswith("ranks ") else "it hangs, or has ended"
    return f"{who} did not come within {seconds:g} s ({setting}): {why}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Pickler(pickle.Pickler):
    """Leaves tensors out, to be sent by themselves. A tensor that stands in several places of the object is sent once,
    and stands in these places where it is received.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        # what a tensor reads -> its number, and the tensor, which keeps its memory from being another's
        self._numbers: dict[tuple[object, ...], tuple[int, Tensor]] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        read = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
        if read not in self._numbers:
            self._numbers[read] = len(self.tensors), value
            self.tensors.append(value.detach().contiguous())
        return self._numbers[read][0]


class _Unpickler(pickle.Unpickler):
    """Puts tensors back into what a _Pickler wrote. That comes from the processes of the same job, as torch's own
    objects do.
    """

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _sent_at_once(forms: Sequence[Form]) -> Iterator[slice]:
    """Runs of tensors of these forms that are sent as one: SENT_AT_ONCE bytes at most, or a single larger one."""
    start = total = 0
    for number, (shape, dtype, _) in enumerate(forms):
        size = math.prod(shape) * dtype.itemsize
        if number > start and total + size > SENT_AT_ONCE:
            yield slice(start, number)
            start, total = number, 0
        total += size
    if start < len(forms):
        yield slice(start, len(forms))


def _packed(value: object) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors
