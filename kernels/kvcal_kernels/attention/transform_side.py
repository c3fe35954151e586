"""What the attention kernel over the transform codec knows of keys, or of values, when it is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout.transform import OCTET, PAIR_BYTES, QUAD, TIERS, TransformForm

ENTRIES = {4: 256, 3: 64, 2: 16}  # points of a tier's grid
REPLICAS = 128  # bytes that an entry takes in shared memory: once for every bank
Run = tuple[int, int, int]  # bits, byte of a run's first pair in its block, pairs


@dataclass(frozen=True)
class TransformSide:
    """The compile-time constants of keys or of values. runs: of 4 pairs of keys, of 8 of values, each of one tier.
    pieces: bytes of each tier and where they begin in a block. slots: where tiers are among a kernel's pointers.
    norm_at: byte of a block's norms. slot: bytes of a block in the ring. steps: products of 16 coordinates (keys), or
    tiles of 16 pairs (values).
    """

    runs: tuple[Run, ...]
    pieces: tuple[tuple[int, int], ...]
    places: tuple[int, ...]
    norm_at: int
    slot: int

    @property
    def steps(self) -> int:
        """Products over coordinates of keys, or tiles of values: two runs each."""
        return -(-len(self.runs) // 2)

    @property
    def inner(self) -> bool:
        """Probabilities are multiplied by norms before they are float16 (`softmax.slack`)."""
        return False

    @property
    def points(self) -> bool:
        """No grid in bytes."""
        return False

    @property
    def quads(self) -> bool:
        """No code stands for four channels (`rotation.value_channels`)."""
        return False


def side_of(form: TransformForm) -> TransformSide:
    """Return the constants of a form."""
    starts = {bits: at for (bits, _), (_, at) in zip(form.tiers, form.pieces, strict=True)}
    width = QUAD if form.role == "key" else OCTET
    runs = tuple((bits, starts[bits] + first * PAIR_BYTES[bits], count) for bits, first, count, _ in form.runs(width))
    places = tuple(TIERS.index(bits) for bits, _ in form.tiers)
    return TransformSide(runs, form.pieces, places, form.norm_at, form.block_bytes)


def table_places(keys: TransformForm, values: TransformForm) -> tuple[int, int, int]:
    """Return at which entry of the table in shared memory the points of 4, 3 and 2 bits begin, and -1 where no tier
    reads them.
    """
    used = {bits for form in (keys, values) for bits, _ in form.tiers}
    at, places = 0, []
    for bits, count in ENTRIES.items():
        places.append(at if bits in used else -1)
        at += count if bits in used else 0
    return places[0], places[1], places[2]


def table_entries(keys: TransformForm, values: TransformForm) -> int:
    """Return how many entries the table has."""
    used = {bits for form in (keys, values) for bits, _ in form.tiers}
    return sum(count for bits, count in ENTRIES.items() if bits in used)
