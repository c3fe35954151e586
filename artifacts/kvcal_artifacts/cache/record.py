"""What has happened to a cache since its construction or reset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..codecs.refusals import Refusals
from ..errors import KVCalError, NonFiniteError


@dataclass
class Record:
    """Counts and errors of a cache; a reset cache has a new record. The first three are counts that describe() shows.

    stage: of a forward that has changed the cache: its layers run, or its head does; None: it returned. broken: a
    forward that had changed the cache did not return. torn: one broke off while it evicted tokens. refusals: what could
    not be packed, to be raised at the forward's end; refused: the error that was. warned: the caller has had an error
    that says what is wrong.
    """

    returned_tokens: int = 0
    unforgotten: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "blocks": 0})
    decoded_steps: dict[str, int] = field(default_factory=dict)
    stage: Literal["layers", "head"] | None = None
    broken: bool = False
    torn: bool = False
    refusals: Refusals = field(default_factory=Refusals)
    refused: str | None = None
    warned: bool = False

    def copied(self) -> Record:
        """The record of a copy of the cache, which a forward that is under way does not concern."""
        return Record(
            self.returned_tokens,
            dict(self.unforgotten),
            dict(self.decoded_steps),
            broken=self.broken or self.stage == "layers",
            torn=self.torn,
            refused=self.refused,
        )

    def check_returned(self) -> None:
        """Raises KVCalError where a forward changed the cache and did not return.

        All layers then hold tokens of which the caller knows nothing.
        """
        if self.broken or self.stage == "layers":
            raise KVCalError(
                "the cache holds tokens of a forward that did not return: an earlier forward broke off; call reset() "
                "and start again"
            )

    def check_packed(self) -> None:
        """Raises NonFiniteError for what could not be packed, at the end of a forward, or later if it broke off."""
        try:
            self.refusals.check()
        except NonFiniteError as error:
            self.refused, self.warned = str(error), True
            raise

    def check_whole(self) -> None:
        """Raises KVCalError where an earlier forward left the cache in pieces."""
        if self.refused is not None:
            raise KVCalError(
                f"an earlier forward broke off; call reset() and start again. It ended with: {self.refused}"
            )
        if self.torn:
            raise KVCalError("an earlier forward broke off while it evicted tokens: call reset() and start again")
