"""Names that public members of the cache and its layers had before they were renamed. They stay, without a warning.

Members that only other members used, as `turn` and `pending` were, are gone.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")

OF_CACHES = {
    "own_layers": "compressed_layers",
    "held": "contents",
    "leave_rooms": "grow_on_host",
    "returned_tokens": "record.returned_tokens",
    "rooms": "memory.storage",
    "shared_bytes": "memory.nbytes",
    "workspace": "memory.workspace",
}
OF_LAYERS = {"drop_turn": "drop_hand_off", "leave_room": "grow_on_host"}


def also_named(cls: type[T], former: dict[str, str]) -> None:
    """Give a class its members' former names: properties that read what each is called now.

    former: former names, and the attributes they stand for, dots between an attribute and one of its own.
    """
    for name, now in former.items():
        setattr(cls, name, property(attrgetter(now), doc=f"`{now}`, by the name it had before."))
