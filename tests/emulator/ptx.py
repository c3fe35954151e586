"""PTX executed on the CPU: what Triton's compiler and inline assembly made of a kernel, without a GPU.

Numbers are those of the instructions (PTX ISA 8.7), but that tensor cores' sums have another order and approximate
functions (`ex2`, `rcp`, `sqrt`, `div.full`) are rounded to nearest. Threads of all programs of a batch go on together:
at each step those whose next instruction comes first. Found besides: accesses outside of the launch's storages or
misaligned; bytes that two threads touch, one writing, where no barrier puts one before the other (`Race`: lanes of a
warp need one, too; in global memory writes after reads pass, and so do other programs but at one instruction); shared
memory read that nothing wrote; barriers that some never reach; instructions of a warp that not all of its threads
reach; and numbers used before a copy was waited for: `cp.async` puts them there at the wait, or at once. An instruction
that is not known raises `Unknown`; nothing is skipped.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Active = Array | None  # places of the threads that take part; None: all
LANES = 32
# A stamp says who touched a byte, and when. From below: the lane and whether it was several, the barriers its warp had
# passed alone (20 bits), the warp and whether several, the program's time between two barriers, which no other program
# has.
MANY_LANES, ALONE, WARP, MANY_WARPS, TIME = 1 << 5, 1 << 6, 1 << 26, 1 << 31, 1 << 32
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


class Fault(RuntimeError):
    """What a GPU would stop at, or what is not defined there."""


class Race(Fault):
    """Two threads at one byte, one of them writing, without a barrier between."""


class Unknown(Fault):
    """An instruction that is not known here."""


def dtype(kind: str) -> Any:
    """numpy's type of a PTX type; bfloat16 and pairs are bits."""
    if kind == "pred":
        return np.bool_
    if kind in FLOATS:
        return FLOATS[kind]
    if kind == "bf16":
        return np.uint16
    if kind in ("f16x2", "bf16x2", "s16x2", "u16x2"):
        return np.uint32
    return (SIGNED if kind[0] == "s" else UNSIGNED)[int(kind[1:])]


def width(kind: str) -> int:
    return int(np.dtype(dtype(kind)).itemsize * 8)


@dataclass(frozen=True)
class Register:
    slot: int
    kind: str


@dataclass(frozen=True)
class Variable:
    """An address of shared memory; start: None for what is behind all that is declared."""

    start: int | None
    offset: int = 0


@dataclass(frozen=True)
class Place:
    """[base + offset]; base: None for a parameter, whose place is `offset`."""

    base: Register | None
    offset: int


@dataclass(frozen=True)
class Instruction:
    """name: its parts between dots. operands: Register, int, float, str (special register), Place, Variable, a tuple."""

    name: tuple[str, ...]
    operands: tuple[Any, ...]
    guard: Register | None
    unless: bool
    text: str


@dataclass
class Code:
    """A parsed kernel: registers' kinds by slot, instructions, places of labels, bytes of shared memory that it
    declares.
    """

    kinds: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, tuple[int, str]] = field(default_factory=dict)
    threads: int = 32
    declared: int = 0


class Reader:
    """Parses one entry of PTX text. Names of registers, labels and variables hold within their braces."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", "", text), flags=re.DOTALL)
        text = re.sub(r"^\s*\.(loc|file)\b[^\n]*$", "", text, flags=re.MULTILINE)
        self.code, self.scopes, self.waiting = Code(), [{}], []  # type: ignore[var-annotated]
        head = re.search(r"\.entry\s+\w+\s*\((.*?)\)([^{]*)\{", text, re.DOTALL)
        if not head:
            raise Unknown("no .entry in the PTX")
        self._shared(text[: head.start()])
        size = 0
        for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head[1]):
            step = width(kind) // 8
            size = -(-size // step) * step
            self.code.parameters[name] = size, kind
            size += step
        threads = re.search(r"\.reqntid\s+(\d+)((?:\s*,\s*1)*)\s*(?![\s,\d])", head[2])
        if not threads:
            raise Unknown(f"how many threads? {head[2].strip()}")
        self.code.threads = int(threads[1])
        self._body(text[head.end() :])

    def _shared(self, text: str) -> None:
        for aligned, name, count in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]", text):
            if not count:  # dynamic: behind all that is declared
                self.scopes[0][name] = Variable(None)
                continue
            self.code.declared = -(-self.code.declared // int(aligned)) * int(aligned)
            self.scopes[-1][name] = Variable(self.code.declared)
            self.code.declared += int(count)

    def _body(self, text: str) -> None:
        at, depth = 0, 1
        space = re.compile(r"\s*")
        label = re.compile(r"([$%\w]+):(?!:)")
        while depth:
            at = space.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                break
            if text[at] in "{}":
                if text[at] == "{":
                    self.scopes.append({})
                else:
                    self._leave()
                depth += 1 if text[at] == "{" else -1
                at += 1
            elif text[at] == ";":
                at += 1
            elif found := label.match(text, at):
                name = f"{found[1]}#{len(self.code.labels)}"
                self.scopes[-1][found[1]] = name
                self.code.labels[name] = len(self.code.instructions)
                at = found.end()
            else:
                end = text.index(";", at)
                self._statement(" ".join(text[at:end].split()))
                at = end + 1
        while len(self.scopes) > 1:
            self._leave()
        for number, name in self.waiting:
            self._target(number, name, self.scopes[0])

    def _leave(self) -> None:
        """Branches to labels further down in the same braces are settled as these end."""
        scope = self.scopes.pop()
        self.waiting = [(n, name) for n, name in self.waiting if not self._target(n, name, scope)]

    def _target(self, number: int, name: str, scope: dict[str, Any]) -> bool:
        if name not in scope:
            return False
        old = self.code.instructions[number]
        self.code.instructions[number] = Instruction(old.name, (scope[name],), old.guard, old.unless, old.text)
        return True

    def _look_up(self, name: str) -> Any:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            kind, names = text.split(None, 2)[1:]
            for name in names.split(","):
                name = name.strip()
                many = re.fullmatch(r"(.*)<(\d+)>", name)
                for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    self.scopes[-1][one] = Register(len(self.code.kinds), kind.strip("."))
                    self.code.kinds.append(kind.strip("."))
            return
        if text.startswith(".shared"):
            self._shared(text)
            return
        if text.startswith((".pragma", ".local")):
            if text.startswith(".local"):
                raise Unknown(text)
            return
        guard, unless, said = None, False, text
        if text.startswith("@"):
            name, text = text[1:].split(None, 1)
            unless = name.startswith("!")
            guard = self._look_up(name.lstrip("!"))
        opcode, _, rest = text.partition(" ")
        operands = tuple(self._operand(x) for x in _split(rest)) if rest else ()
        if opcode.startswith("bra"):
            self.waiting.append((len(self.code.instructions), rest.strip()))
        parts = tuple(opcode.replace("::", "_").split("."))
        self.code.instructions.append(Instruction(parts, operands, guard, unless, said))

    def _operand(self, text: str) -> Any:
        text = text.strip()
        if text.startswith("{"):
            return tuple(self._operand(x) for x in _split(text[1:-1]))
        if text.startswith("["):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            if base.endswith("]"):
                raise Unknown(text)
            found = self._look_up(base)
            if base in self.code.parameters:
                return Place(None, self.code.parameters[base][0] + int(offset or 0))
            if isinstance(found, Register):
                return Place(found, int(offset or "0", 0))
            if found is None:
                raise Unknown(f"address {text}")
            return Variable(found.start, int(offset or "0", 0))
        if "|" in text:
            return tuple(self._operand(x) for x in text.split("|"))
        if text.startswith("!"):
            return ("!", self._operand(text[1:]))
        if text.startswith(("0f", "0F")):
            return struct.unpack(">f", bytes.fromhex(text[2:]))[0]
        if text.startswith(("0d", "0D")):
            return struct.unpack(">d", bytes.fromhex(text[2:]))[0]
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return int(text.rstrip("U"), 0)
        if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
            return float(text)
        if text == "_":
            return None
        found = self._look_up(text)
        return text if found is None else found


def _split(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


class Memory:
    """Global memory: what may be touched, by its first address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.held: list[Array] = []
        self.owners: dict[int, Any] = {}
        self.stamps: dict[int, Array] = {}  # of the last write of each byte, where the launch has written
        self.times = 0  # between two barriers of a program, so far

    def add(self, start: int, held: Array, owner: Any = None) -> None:
        """held: uint8, over the bytes themselves; a range that is there already is not added. owner: kept alive."""
        if start in self.owners or not held.size:
            return
        at = bisect_right(self.starts, start)
        self.starts.insert(at, start)
        self.held.insert(at, held)
        self.owners[start] = owner

    def find(self, addresses: Array, size: int, said: str) -> list[tuple[Array | slice, Array, Array, int]]:
        """For each range: which of the addresses lie there, its bytes as numbers of `size`, their places, and its
        start.
        """
        if (addresses & np.uint64(size - 1)).any():
            raise Fault(f"{said}: misaligned, {int(addresses[(addresses % size) > 0][0]):#x} for {size} bytes")
        left: Array | slice = slice(None)
        found: list[tuple[Array | slice, Array, Array, int]] = []
        todo = addresses
        while todo.size:
            first = int(todo[0])
            at = bisect_right(self.starts, first) - 1
            if at < 0 or first + size > self.starts[at] + self.held[at].size:
                near = "" if at < 0 else f", {first - self.starts[at]} bytes into one of {self.held[at].size}"
                raise Fault(f"{said}: {first:#x} is in no tensor of the launch{near}")
            start, held = self.starts[at], self.held[at]
            within = todo - np.uint64(start)
            here = within <= held.size - size if held.size >= size else np.zeros(len(todo), bool)
            numbers = held[: held.size // size * size].view(UNSIGNED[size * 8])
            if here.all():
                found.append((left, numbers, (within >> np.uint64(size.bit_length() - 1)).astype(np.int64), start))
                break
            places = np.arange(len(addresses))[left]
            found.append((places[here], numbers, (within[here] // np.uint64(size)).astype(np.int64), start))
            left, todo = places[~here], todo[~here]
        return found

    def written(self, start: int) -> Array:
        """Stamps of the bytes from `start` on."""
        if start not in self.stamps:
            size = next(held.size for at, held in zip(self.starts, self.held, strict=True) if at == start)
            self.stamps[start] = np.zeros(-(-size // 8) * 8, np.int64)
        return self.stamps[start]


def apart(stamps: Array, own: Array) -> str:
    """How two threads differ of which nothing puts the one, of `stamps`, before the other, of `own`; else nothing."""
    x = stamps ^ own
    near = x < TIME
    if not near.any():
        return ""
    if (near & (x >= WARP)).any():
        return "warp"
    return "lane" if ((x > 0) & (x < ALONE)).any() else ""


@dataclass
class Shared:
    """Shared memory of all programs of a batch, one behind the other. wrote, read: stamps of each byte's last, 0 for
    none.
    """

    held: Array
    size: int
    wrote: Array
    read: Array


class Batch:
    """Threads of some programs, with their registers; runs a kernel's instructions until all have ended."""

    def __init__(
        self,
        machine: Machine,
        programs: Sequence[tuple[int, int, int]],
        grid: tuple[int, int, int],
        parameters: bytes,
        shared: int,
        memory: Memory,
    ) -> None:
        code = machine.code
        self.machine, self.memory, self.threads = machine, memory, code.threads
        self.n = len(programs) * code.threads
        self.every = np.arange(self.n)
        self.registers: list[Any] = [None] * len(code.kinds)
        self.parameters = parameters
        thread = np.tile(np.arange(code.threads, dtype=np.uint32), len(programs))
        self.program = np.repeat(np.arange(len(programs)), code.threads)
        number = np.array(programs, dtype=np.uint32)[self.program]
        self.special = {
            "%tid.x": thread, "%laneid": thread % 32, "%ntid.x": np.full(self.n, code.threads, np.uint32),
            "%warpid": thread // 32,
            "%dynamic_smem_size": np.full(self.n, shared - machine.dynamic, np.uint32),
            **{f"%ctaid.{x}": number[:, i] for i, x in enumerate("xyz")},
            **{f"%nctaid.{x}": np.full(self.n, grid[i], np.uint32) for i, x in enumerate("xyz")},
            **{f"%tid.{x}": np.zeros(self.n, np.uint32) for x in "yz"},
        }  # fmt: skip
        self.warp = (thread // 32).astype(np.int16)
        self.counter = np.zeros(self.n, np.int64)  # the next instruction
        self.state = np.zeros(self.n, np.int8)  # 0 runs, 1 waits at a barrier, 2 has ended
        self.stamp = thread.astype(np.int64) // LANES * WARP + thread % LANES
        self._next(np.full(len(programs), True))
        size = -(-shared // 1024) * 1024
        self.shared = Shared(
            np.full(size * len(programs), 0xFF, np.uint8), shared,
            *(np.zeros(size * len(programs) if machine.races else 0, np.int64) for _ in range(2)),
        )  # fmt: skip
        self.room = size
        self.base = (self.program * size).astype(np.int64)
        self.copies: list[tuple[Array, Array, Callable[[Array], None]]] = []  # threads, their groups, what is copied
        self.open: list[tuple[Array, Callable[[Array], None]]] = []
        self.groups = np.zeros(self.n, np.int64)  # committed by each thread

    def get(self, slot: int, a: Active) -> Array:
        held = self.registers[slot]
        if held is None:
            self.registers[slot] = held = self._unset(slot)
        return held if a is None else held[a]

    def _unset(self, slot: int) -> Array:
        kind = self.machine.code.kinds[slot]
        t = np.bool_ if kind == "pred" else UNSIGNED[width(kind)]
        return np.full(self.n, True if kind == "pred" else np.iinfo(t).max, t)

    def put(self, slot: int, a: Active, value: Array) -> None:
        """value: bits of the register's width; its own from now on."""
        if a is None:
            self.registers[slot] = value if value.shape == (self.n,) else np.broadcast_to(value, (self.n,)).copy()
            return
        if self.registers[slot] is None:
            self.registers[slot] = self._unset(slot)
        self.registers[slot][a] = value

    def run(self) -> None:
        steps, ends = self.machine.steps, self.machine.ends
        executed = 0
        while True:
            runs = self.state == 0
            if not runs.any():
                if (self.state == 2).all():
                    return
                self._release()
                continue
            at = int(self.counter[runs].min())
            here = runs & (self.counter == at)
            a = None if here.all() else self.every[here]
            if self.machine.counts is not None:
                self.machine.counts["instructions of warps"] += (ends[at] - at) * len(
                    np.unique(np.flatnonzero(here) // LANES)
                )
            end = ends[at]
            self.counter[here] = end
            for i in range(at, end):
                try:
                    steps[i](self, a)
                except Fault as error:
                    raise type(error)(f"{self.machine.code.instructions[i].text}: {error}") from None
            executed += end - at
            if executed > self.machine.most:
                raise Fault(f"more than {self.machine.most} instructions: a loop without an end?")

    def _release(self) -> None:
        """Programs of which every thread waits at one barrier go on. None has a thread that runs."""
        waits = (self.state == 1).reshape(-1, self.threads)
        free, at = waits.any(1), self.counter.reshape(-1, self.threads)
        if (free != waits.all(1)).any() or (at != at[:, :1])[free].any():
            raise Fault("a barrier that some threads never reach")
        self._next(free)
        self.state[np.repeat(free, self.threads)] = 0

    def _next(self, programs: Array) -> None:
        """Another time begins for these: what comes is after all that was."""
        times = np.zeros(len(programs), np.int64)
        times[programs] = self.memory.times + 1 + np.arange(programs.sum())
        self.memory.times += int(programs.sum())
        here = np.repeat(programs, self.threads)
        self.stamp[here] = (self.stamp % TIME + TIME * np.repeat(times, self.threads))[here]

    def whole(self, a: Active) -> Array:
        """Places of whole warps, [warps, 32]."""
        places = (self.every if a is None else a).reshape(-1)
        if len(places) % LANES:
            raise Fault("not all threads of a warp are here")
        warps = places.reshape(-1, LANES)
        if (warps != warps[:, :1] + np.arange(LANES)).any() or (warps[:, 0] % LANES).any():
            raise Fault("not all threads of a warp are here")
        return warps

    # Shared memory

    def at_shared(self, addresses: Array, a: Active, size: int, note: bool = True) -> Array:
        """Places among numbers of `size` bytes, of which one is read; checked. note: remember who read them."""
        places = self._places(addresses, a, size)
        if self.machine.races:
            own, wrote = self.stamps(a, places.ndim), self.shared.wrote.reshape(-1, size)[places]
            if not wrote.all():
                raise Fault("a read of shared memory that nothing wrote")
            if who := apart(wrote, own):
                raise Race(f"a read after another {who}'s write without a barrier")
            if note:
                self._read(places, own, size)
        return places

    def _read(self, places: Array, own: Array, size: int) -> None:
        flat, read = self.shared.read, self.shared.read.reshape(-1, size)
        x = read[places] ^ own
        if (x < TIME).any():  # others have read, too
            new = own | np.where((x > 0) & (x < ALONE), MANY_LANES, 0)
            new |= np.where((x >= WARP) & (x < TIME), MANY_WARPS, 0)
        else:
            new = np.broadcast_to(own, x.shape)
        read[places] = new
        x = read[places]
        if (x != new).any():  # of those that read one place at once, the last has it: to which the others are added
            x ^= own
            each = places[:, None] * size + np.arange(size)
            flat[each[(x > 0) & (x < ALONE)]] |= MANY_LANES
            flat[each[(x >= WARP) & (x < TIME)]] |= MANY_WARPS

    def to_shared(self, addresses: Array, a: Active, value: Array) -> None:
        """Writes unsigned numbers. Threads may write the same number to one place, as layouts with copies do."""
        size = value.dtype.itemsize
        places, held = self._places(addresses, a, size), self.shared.held.view(value.dtype)
        if self.machine.races:
            own = self.stamps(a)
            self._before(places, own, value)
            self.shared.wrote.reshape(-1, size)[places] = own
        held[places] = value
        if (held[places] != value).any():
            raise Race("two threads write different numbers at once")

    def about_to_write(self, addresses: Array, a: Active, value: Array) -> None:
        """What is put there later must be allowed now, and others may not read there any more: it may arrive at once."""
        if self.machine.races and not self.machine.early:
            size, own = value.dtype.itemsize, self.stamps(a)
            places, wrote = self._places(addresses, a, size), self.shared.wrote.reshape(-1, size)
            self._before(places, own, value)
            wrote[places] = np.where(wrote[places] > 0, own, 0)

    def _before(self, places: Array, own: Array, value: Array) -> None:
        """Whether who touched these places last did so before a write by `own`."""
        size, s = value.dtype.itemsize, self.shared
        other = s.held.view(value.dtype)[places] != value
        if not other.all():
            places, own = places[other], own[other]
        if who := apart(s.wrote.reshape(-1, size)[places], own):
            raise Race(f"two {who}s write, without a barrier between")
        if who := apart(s.read.reshape(-1, size)[places], own):
            raise Race(f"a write after another {who}'s read without a barrier")

    def stamps(self, a: Active, dimensions: int = 1) -> Array:
        """Of each thread, [threads, 1] for bytes of a number."""
        own = self.stamp if a is None else self.stamp[a]
        return own.reshape(-1, *[1] * dimensions)

    def count(self, a: Active, addresses: Array, size: int) -> None:
        """Cycles that shared memory is busy: 128 bytes of so many threads at a time, as often as the fullest of 32
        banks has other words. size: bytes of a thread.
        """
        counts = self.machine.counts
        if counts is None:
            return
        threads = self.every if a is None else a
        groups = threads // min(LANES, 128 // size) if size > 4 else threads // LANES
        words = addresses.astype(np.int64)[:, None] // 4 + np.arange(max(1, size // 4))
        for group in np.unique(groups):
            counts["shared, cycles"] += int(np.bincount(np.unique(words[groups == group]) % 32).max())
            counts["shared, at least"] += 1

    def _places(self, addresses: Array, a: Active, size: int) -> Array:
        addresses = addresses.astype(np.int64)
        if (addresses % size).any():
            raise Fault(f"misaligned, shared {int(addresses[addresses % size > 0][0])} for {size} bytes")
        if (addresses < 0).any() or (addresses + size > self.shared.size).any():
            raise Fault(f"shared memory has {self.shared.size} bytes, {int(addresses.max())} + {size} asked for")
        base = self.base if a is None else self.base[a]
        return (addresses + (base if addresses.ndim == 1 else base[:, None])) // size

    # Global memory. Programs may meet there, in which order they will, and a write may come after another's read: small
    # tiles have copies of a number that read, compute and write it all alike.

    def seen(self, a: Active, which: Array | slice, start: int, places: Array, size: int) -> None:
        """`which` of the threads read numbers at places of what begins at `start`."""
        if not self.machine.races or start not in self.memory.stamps:
            return
        wrote = self.memory.stamps[start].reshape(-1, size)[places]
        if who := apart(wrote, self.stamps(a)[which]):
            raise Race(f"a read of global memory after another {who}'s write without a barrier")

    def written(self, a: Active, which: Array | slice, start: int, places: Array, size: int, other: Array) -> None:
        """other: where the number is not what was there."""
        if not self.machine.races:
            return
        own, wrote = self.stamps(a)[which], self.memory.written(start).reshape(-1, size)
        if other.any() and (who := apart(wrote[places[other]], own[other])):
            raise Race(f"two {who}s write to global memory, without a barrier between")
        wrote[places] = own

    # Copies that arrive later

    def copy(self, a: Active, arrive: Callable[[Array], None]) -> None:
        """arrive: puts there what is of the threads it is given."""
        places = self.every if a is None else a
        if self.machine.early:
            arrive(places)
        else:
            self.open.append((places, arrive))

    def commit(self, a: Active) -> None:
        here = np.zeros(self.n, bool)
        here[self.every if a is None else a] = True
        self.groups[here] += 1
        left = []
        for threads, arrive in self.open:
            mine = here[threads]
            if mine.any():
                self.copies.append((threads[mine], self.groups[threads[mine]], arrive))
            if not mine.all():
                left.append((threads[~mine], arrive))
        self.open = left

    def wait(self, a: Active, pending: int) -> None:
        """All but the last `pending` groups of each thread have arrived."""
        due = np.full(self.n, -1, np.int64)
        places = self.every if a is None else a
        due[places] = self.groups[places] - pending
        left = []
        for threads, groups, arrive in self.copies:
            now = groups <= due[threads]
            if now.any():
                arrive(threads[now])
            if not now.all():
                left.append((threads[~now], groups[~now], arrive))
        self.copies = left


Step = Callable[[Batch, Active], None]


class Machine:
    """A kernel made ready to run.

    text: PTX of one entry. races: look for them in shared memory. early: copies of `cp.async` arrive at once, not at
    the wait. most: instructions of one batch before it counts as a loop without an end. counts: takes instructions of
    warps and cycles of shared memory.
    """

    def __init__(
        self,
        text: str,
        races: bool = True,
        early: bool = False,
        most: int = 20_000_000,
        counts: Counter[str] | None = None,
    ) -> None:
        from tests.emulator.ptx_instructions import step

        self.code, self.races, self.early, self.most, self.counts = Reader(text).code, races, early, most, counts
        self.dynamic = -(-self.code.declared // 1024) * 1024
        code = self.code
        self.steps: list[Step] = [step(self, one) for one in code.instructions]
        cuts = {*code.labels.values(), len(code.instructions)}
        cuts |= {
            i + 1 for i, one in enumerate(code.instructions) if one.name[0] in ("bra", "bar", "barrier", "ret", "exit")
        }
        ordered = sorted(cuts)
        self.ends = [ordered[bisect_right(ordered, i)] for i in range(len(code.instructions))]

    def launch(
        self, grid: tuple[int, int, int], values: Sequence[Any], shared: int, memory: Memory, lanes: int = 8192
    ) -> None:
        """values: one a parameter. shared: bytes of dynamic shared memory. lanes: threads of a batch of programs."""
        parameters = bytearray()
        if len(values) != len(self.code.parameters):
            raise Fault(f"{len(values)} values for {len(self.code.parameters)} parameters")
        for value, (at, kind) in zip(values, self.code.parameters.values(), strict=True):
            if isinstance(value, (float, np.floating)) and kind not in FLOATS:
                raise Fault(f"{value} for a parameter of kind {kind}")
            parameters += bytes(at - len(parameters))
            number = np.asarray(value if dtype(kind) in FLOATS.values() else int(value))
            if number.dtype.kind in "iu":
                number = np.asarray(int(value) & (1 << width(kind)) - 1).astype(UNSIGNED[width(kind)])
            parameters += number.astype(UNSIGNED[width(kind)] if number.dtype.kind in "iu" else dtype(kind)).tobytes()
        programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        many = max(1, lanes // self.code.threads)
        with np.errstate(all="ignore"):
            for first in range(0, len(programs), many):
                Batch(
                    self, programs[first : first + many], grid, bytes(parameters), self.dynamic + shared, memory
                ).run()
