"""The part of torchrun's store that belongs to the processes which are alive now.

The agent's store outlives the processes that it restarts, so a new process would read addresses of dead ones. Neither a
number of restarts nor a port names the attempt: agents of several nodes count for themselves, and keep their ports.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from kvcal_artifacts.bundle.canonical import sha256_text

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

NAME, NAMES, HERE, GO = "kvcal/name", "kvcal/names", "here", "go"
PAUSE = 0.02  # seconds between two looks at the store


class MissingRanksError(Exception):
    """Not all processes came in time. ranks: the numbers of those that are missing."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"ranks {ranks}")
        self.ranks = ranks


def attempt_store(store: Store, rank: int, count: int, seconds: float) -> Store:
    """A store that only the `count` processes of this attempt use, one of each rank; it is empty before.

    Each process writes down a name that no other has. Rank 0 publishes the names that it sees, again and again, until
    every process has answered that its own is among them. A process of before gives no answer. Raises
    MissingRanksError where that takes longer than so many seconds.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch may be built without

    mine, end = uuid.uuid4().hex, time.monotonic() + seconds
    store.set(f"{NAME}/{rank}", mine)
    while True:
        names = _names(store, count) if rank == 0 else _published(store)
        if rank == 0 and names:
            store.set(NAMES, ",".join(names))
        prefix = _prefix(names)
        if len(names) == count and names[rank] == mine:
            store.set(f"{prefix}/{HERE}/{rank}", "")
            if rank == 0 and store.check([f"{prefix}/{HERE}/{other}" for other in range(count)]):
                store.set(f"{prefix}/{GO}", "")
            if store.check([f"{prefix}/{GO}"]):
                return PrefixStore(prefix, store)
        if time.monotonic() > end:
            raise MissingRanksError(_missing(store, rank, count, prefix if mine in names else None))
        time.sleep(PAUSE)


def _names(store: Store, count: int) -> list[str]:
    """The names of all processes by rank; empty as long as one is missing."""
    keys = [f"{NAME}/{rank}" for rank in range(count)]
    return [name.decode() for name in store.multi_get(keys)] if store.check(keys) else []


def _published(store: Store) -> list[str]:
    return str(store.get(NAMES).decode()).split(",") if store.check([NAMES]) else []


def _prefix(names: list[str]) -> str:
    return f"kvcal/{sha256_text(','.join(names))}"


def _missing(store: Store, rank: int, count: int, prefix: str | None) -> list[int]:
    """The ranks that did not answer, or that left no name where none were asked; rank 0 where all did."""
    kind = NAME if prefix is None else f"{prefix}/{HERE}"
    return [other for other in range(count) if other != rank and not store.check([f"{kind}/{other}"])] or [0]
