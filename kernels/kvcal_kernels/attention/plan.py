"""The layout of a launch of decode attention: shapes, warps, programs, and how their results are merged. Plain numbers;
no Triton.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

from ..layout import Form
from ..layout.form import fits_int8_mma, looked_up
from ..layout.grids import ALIGNED, rotation_width
from .side import Side, side_of


def ring_follows_triton(warps: int, tables: int, slots: int) -> bool:
    """Return whether the ring lies behind the shared memory that Triton manages: with several warps, with tables, or
    where it takes most of 48 KB.
    """
    return warps > 1 or tables > 0 or slots > 24 * 1024


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()


def takes_int8_mma(keys: Form, values: Form, rows: int, warps: int, pairs: int = 0) -> bool:
    """Return whether the kernel multiplies 8-bit integers: formats of `fits_int8_mma`, where both bytes of all query
    rows are columns of one product. Grids in bytes, which no other path reads, take more rows four at a time.
    """
    if pairs or (rows > 4 and not (keys.in_bytes or values.in_bytes)):
        return False
    # of several warps the next block may be of another group each time
    return (keys.inner or warps == 1) and fits_int8_mma(keys, values)


def columns(keys: Form, values: Form, rows: int, in_bytes: bool) -> int:
    """Return the columns of a product for `rows` query rows. More rows take more programs, which read blocks
    that others have just read. The number is bounded by the registers that compiled code needs
    (docs/benchmarks/decode_attention.md).
    """
    if in_bytes or (keys.dim > 128 and not looked_up(keys, values)):
        return 8
    most = 32 if values.paired and keys.dim <= 128 else 16
    wide: int = power_of_two(rows) * (1 + values.paired)
    return min(max(wide, 8), most)


def splits_at_once(rows: int, dim: int, warps: int, plain: bool) -> int:
    """Return how many splits a program merges in one wait for memory. It is bounded by registers: 128 a thread spill
    with many rows or channels, and with grids, tiers and keys before RoPE they cost a program its place
    (docs/benchmarks/decode_attention.md).
    """
    registers = 128 if plain and rows <= 4 and dim <= 128 else 64
    at_once = max(1, registers * 32 * warps // (rows * power_of_two(dim)))
    return 1 << (at_once.bit_length() - 1)


def _of_one_grid(keys: Form, values: Form) -> bool:
    """Return whether keys and values may be points of one grid."""
    alike = keys.bits == values.bits and keys.in_bytes == values.in_bytes
    return alike and bool(keys.vector) and bool(values.vector)


class Settings(TypedDict):
    """Compile-time constants of attend_kernel that follow from shapes and warps; kernel.py says what they are."""

    HEADS: int
    RATIO: int
    QUERIES: int
    D: int
    N: int
    NW: int
    CHUNKS: int
    ROWS: int
    WIDTH: int
    PAIRED: int
    AT_ONCE: int
    KEYS: Side
    VALUES: Side
    PAIRS: int
    SLOTS: int
    SAME: bool
    STEP: int


@functools.lru_cache(256)
def settings(
    keys: Form,
    values: Form,
    heads: int,
    ratio: int,
    queries: int,
    warps: int,
    same: bool = True,
    pairs: int = 0,
    pages: bool = False,
) -> Settings:
    """Return the compile-time constants of attend_kernel that follow from the shapes and the warps. None follows from
    the batch, the length or the splits, so that a model's decode steps share one compiled kernel, or two (`chosen`).
    same: keys and values of one bit width are of one grid. pairs: Rope.pairs of keys before RoPE. pages: of the kernel
    over pages, which has no products of bytes. The dict is shared by all callers, who copy it before they change it.
    """
    rows = ratio * queries
    in_bytes = not pages and takes_int8_mma(keys, values, rows, warps, pairs)
    if (keys.in_bytes or values.in_bytes) and not in_bytes:
        raise ValueError(
            f"{keys} and {values}, {warps} warps a program: only products of bytes read grids in bytes; pack them "
            "otherwise",
        )
    each = 2 if values.paired or in_bytes else 1  # columns of a query row
    wide = columns(keys, values, rows, in_bytes)
    query_rows = min(power_of_two(rows), wide // each)
    plain = in_bytes or not (keys.vector or values.vector or keys.tiered or pairs)
    key_side, value_side = side_of(keys), side_of(values)
    if pairs:  # codes become numbers before they meet the query, and do not go through the ring
        key_side = replace(key_side, slot=0)
    slot, ring = key_side.slot + value_side.slot, RING_OF_FEW if in_bytes and warps > 1 else RING
    same = same and _of_one_grid(keys, values)
    step = ALIGNED if key_side.entries + (0 if same else value_side.entries) <= 320 else ALIGNED - 1  # at most 40 KB
    return {
        "HEADS": heads,
        "RATIO": ratio,
        "QUERIES": queries,
        "D": keys.dim,
        "N": wide,
        "NW": warps,
        "CHUNKS": -(-rows * each // wide),
        "ROWS": query_rows,
        "WIDTH": rotation_width(keys.dim),
        "PAIRED": 2 if in_bytes else int(values.paired),
        "AT_ONCE": splits_at_once(query_rows, keys.dim, warps, plain),
        "KEYS": key_side,
        "VALUES": replace(value_side, first=0 if same else key_side.entries << step),
        "PAIRS": pairs,
        "SLOTS": max(2, min(4, ring // slot)) if slot else 0,
        "SAME": same,
        "STEP": step,
    }


MOST_SPLITS = 192  # of a group, at most
SHORT = 1 << 20  # what `floor_divide` divides by a product of float32
SPARE = 1 << 14  # of that, for what is added to a row's blocks
MOST_AT_ONCE, MOST_WARPS = 32, 64  # programs, and their warps, that a multiprocessor runs at a time
RING = 8192  # bytes of a warp: blocks on their way are at least two, at most four
RING_OF_FEW = 16384  # with several warps and 8-bit products (timed in docs/benchmarks/decode_attention.md)
FEW = 200  # blocks a multiprocessor, below which programs may have several warps, see `chosen`
ALONE = 1 << 20  # `tail_cost` where exact tokens have separate programs


class Plan(NamedTuple):
    """How a group's tokens are split over programs. splits: programs. tail: how many of the last ones have exact
    tokens, `tail_tokens` of the sink or the window each. tail_cost: blocks of packed tokens that a split of the tail
    has fewer than the others; ALONE where it has none.
    """

    splits: int
    tail: int
    tail_tokens: int
    tail_cost: int

    def numbers(self) -> tuple[int, int, int, int]:
        """Return the kernel's packed_splits, tail_start, tail_cost and tail_total."""
        tail_start = self.splits - self.tail
        if self.tail_cost == ALONE:
            return tail_start, tail_start, ALONE, 0
        return self.splits, tail_start, self.tail_cost, self.tail * self.tail_cost


@functools.lru_cache(4096)
def plan(
    groups: int, blocks: int, windows: tuple[int, int], warps: int, slots: int, carried: bool, launch: Launch
) -> Plan:
    """Return the fastest plan for `groups` of query rows on a GPU that runs `slots` programs at a time. All programs
    take about equally long, so it counts in how many rounds they run. The last round takes as long as the others,
    however few programs it has. carried: whether programs of packed tokens may have exact ones, too.

    A multiprocessor gives programs of one warp to its four schedulers alternately, and waits for the one that is next.
    Short programs among long ones therefore leave slots that no program takes. So programs of a round begin together
    (the first splits of all groups, then their second ones) and take equally long
    (docs/benchmarks/decode_attention.md).
    """
    several = warps > 1
    start, merge_rate = (24, launch.merge_rate or 4) if several else (10, launch.merge_rate or 15)
    tile, iterations = 16 * warps, max(1, -(-blocks // warps))

    def carrying(count: int) -> tuple[int, int, int]:
        """Return the tail's splits, tokens of each, and iterations that they have fewer: a tile takes about four."""
        tiles = max(1, -(-sum(windows) // (tile * count)))
        while (tail := sum(-(-window // (tile * tiles)) for window in windows)) > count:
            tiles += 1
        return tail, tile * tiles, 4 * tiles if launch.tail_cost is None else launch.tail_cost // warps

    def apart(count: int) -> tuple[int, int]:
        """Return tokens of a split with exact tokens alone, and how many such splits there are."""
        tail_tokens, tail = tail_splits(windows, False, warps)
        return tail_splits(windows, True, warps) if groups * (count + tail) > slots else (tail_tokens, tail)

    def time(count: int, alone: bool) -> float:
        """Return the time of a launch with `count` splits, in iterations of a warp over one block."""
        rounds = -(-groups * count // slots)
        if not alone:
            tail, tail_tokens, tail_cost = carrying(count)
            each = start + max((iterations + tail * tail_cost) / count, 4 * (tail_tokens // tile))
            return rounds * each + each / 64 if several else rounds * math.ceil(each)
        tail_tokens, tail = apart(count)
        each, tiles = start + iterations / count, -(-tail_tokens // tile)
        late = groups * (count + tail) > slots * rounds  # they find no free slot until others end
        if several:
            behind = (each if rounds == 1 else start + 16) if late else 0
            return max(rounds * each + behind, start + 16) + each / 64
        each = math.ceil(each)
        return rounds * each + 4 * tiles if late else max(rounds * each, start + 5 * tiles - 2)

    least = min(MOST_SPLITS, -(-iterations // launch.iterations)) if launch.iterations else 1
    most = max(least, min(MOST_SPLITS, iterations, math.isqrt(merge_rate * iterations)))
    counts = [launch.splits] if launch.splits else range(least, most + 1)
    # tables in shared memory are busy all the time, also while others have exact tokens: only where those are most of
    # the work
    pays = not several or (iterations < 150 and 9 * groups > slots)
    both = carried and (pays if launch.tail_cost is None else launch.tail_cost != ALONE)
    ways = [(count, False) for count in counts if count > 1] if both else []
    if not ways or not (several or launch.tail_cost is not None):
        ways += [(count, True) for count in counts]
    count, alone = min(ways, key=lambda way: time(*way))  # of those that take as long the first
    if alone:
        tail_tokens, tail = apart(count)
        return Plan(count + tail, tail, tail_tokens, ALONE)
    tail, tail_tokens, tail_cost = carrying(count)
    return Plan(count, tail, tail_tokens, tail_cost * warps if launch.tail_cost is None else launch.tail_cost)


def rounded_blocks(blocks: int) -> int:
    """Round a number of blocks up by at most an eighth, so that few launches are prepared."""
    step = max(1, power_of_two(blocks) // 16)
    return max(1, -(-blocks // step) * step)


@functools.lru_cache(4096)
def merge_width_of(splits: int, at_once: int) -> int:
    """Return how many splits are merged first. It is all of them where a second round takes longer: reading `at_once`
    splits is a wait for memory, and a second round, which also writes and counts, costs about two more.
    """

    def waits(merge_width: int) -> int:
        """Return the waits for memory where so many splits are merged first."""
        each = math.ceil(merge_width / at_once)
        return each if merge_width >= splits else each + 2 + math.ceil(math.ceil(splits / merge_width) / at_once)

    best: int = min([splits, *range(at_once, splits, at_once)], key=waits)
    return best


def tail_splits(windows: tuple[int, int], crowded: bool, warps: int = 1) -> tuple[int, int]:
    """Return the sink or recent tokens of a program, and how many programs windows of so many tokens take, at most
    about 16. Few programs are best where multiprocessors have enough to do (`crowded`). Otherwise there are as many as
    finish before those of packed tokens, or one iteration of a warp where it is alone in its program.
    """
    least = 128 if crowded else 16 if warps == 1 else 32
    tail_tokens = max(1, -(-sum(windows) // (16 * least))) * least
    return tail_tokens, sum(-(-window // tail_tokens) for window in windows)


@dataclass(frozen=True)
class Launch:
    """Options of a launch. warps: blocks that a program takes at a time. stages: of the loads in flight that do not go
    through the ring. registers: of a thread at most; 0: the compiler's choice. The others replace what `plan` chooses,
    0 or None leaves it the choice. iterations: of a program at most. splits: programs of packed tokens. merge_width: of
    `merge_width_of`. tail_cost: `Plan.tail_cost`. merge_rate: splits that are merged in the time of an iteration.
    slots: blocks of a warp's ring over the transform codec; 0: as many as fit into `RING`.
    """

    warps: int = 1
    stages: int = 3
    iterations: int = 0
    registers: int = 0
    splits: int = 0
    merge_width: int = 0
    tail_cost: int | None = None
    merge_rate: int = 0
    slots: int = 0


def usual(keys: Form, values: Form, rows: int = 1, before_rope: bool = False) -> Launch:
    """Return the launch for `rows` query rows of a kv head where blocks are many. before_rope: keys are stored before
    RoPE. A warp alone in its program waits for no other. Tables of grids lie in shared memory once a program, so that
    there four warps share one. With 168 registers a multiprocessor runs 12 warps and nothing is spilled
    (docs/benchmarks/decode_attention.md).
    """
    # outputs of values without pairs, or of more rows, are as many more, and spill with 128 registers
    if looked_up(keys, values):
        wide = columns(keys, values, rows, False)
        enough = 128 if wide == 8 else 168 if wide == 16 and keys.dim <= 128 else 0
        return Launch(warps=4, registers=enough if values.paired else 0)
    if keys.dim > 128 or (rows > 8 and not (keys.in_bytes or values.in_bytes)):
        return Launch()
    if before_rope:
        # 176 and more are slower (docs/benchmarks/decode_attention.md); 3 bits spill with 192, outer groups with 208
        return Launch(registers=168 if keys.bits != 3 else 200 if keys.inner else 216)
    return Launch(registers=176 if keys.tiered else 168)


def launches(keys: Form, values: Form, rows: int = 1, before_rope: bool = False) -> tuple[Launch, ...]:
    """Return all launches that `chosen` takes: the usual one and, for integers that are multiplied as bytes, one of
    four warps a program.
    """
    launch = usual(keys, values, rows, before_rope)
    other = before_rope or keys.vector or values.vector or keys.dim > 128
    if launch.warps > 1 or other or not takes_int8_mma(keys, values, rows, 4):
        return (launch,)
    # 8 bits: with Triton's 32 KB 104 KB, where GPUs of compute capability 8.6 and 8.9 have 99
    if ring_bytes(settings(keys, values, 1, 1, 1, 4)) > 64 << 10:
        return (launch,)
    return launch, Launch(warps=4, registers=168, merge_rate=3)


def ring_bytes(constants: Settings) -> int:
    """Return the bytes of a ring that lies behind the shared memory that Triton manages; see `ring_address`."""
    keys, values = constants["KEYS"], constants["VALUES"]
    slots, tables = (keys.slot + values.slot) * constants["SLOTS"], keys.entries + values.entries
    return slots * constants["NW"] if ring_follows_triton(constants["NW"], tables, slots) else 0
