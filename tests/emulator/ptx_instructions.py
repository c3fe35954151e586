"""What each instruction of PTX does, for many threads at once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.ptx import (
    ALONE,
    FLOATS,
    LANES,
    UNSIGNED,
    Active,
    Array,
    Batch,
    Fault,
    Instruction,
    Machine,
    Place,
    Race,
    Register,
    Step,
    Unknown,
    Variable,
    dtype,
    width,
)

Get = Callable[[Batch, Active], Array]
LANE = np.arange(LANES)
ROW, PAIR = LANE // 4, LANE % 4 * 2  # of an 8 x 8 part: a lane has two neighbours of a row


def step(machine: Machine, one: Instruction) -> Step:
    """What runs the instruction, under its guard."""
    try:
        made = MAKERS[one.name[0]](machine, one)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError, StopIteration) as error:
        raise Unknown(f"{one.text}: {type(error).__name__} {error}") from error
    if one.guard is None:
        return made
    slot, unless = one.guard.slot, one.unless

    def guarded(b: Batch, a: Active) -> None:
        p = b.get(slot, a) != unless
        if p.all():
            made(b, a)
        elif p.any():
            made(b, (b.every if a is None else a)[p])

    return guarded


# Operands


def reader(x: Any, kind: str, machine: Machine) -> Get:
    t = dtype(kind)
    if isinstance(x, Register):
        slot, wide = x.slot, width(x.kind) if x.kind != "pred" else 1
        if kind == "pred" or x.kind == "pred":
            return lambda b, a: b.get(slot, a)
        if wide == width(kind):
            return lambda b, a: b.get(slot, a).view(t)
        bits = UNSIGNED[width(kind)]
        return lambda b, a: b.get(slot, a).astype(bits).view(t)
    if isinstance(x, tuple) and x[0] == "!":
        own = reader(x[1], "pred", machine)
        return lambda b, a: ~own(b, a)
    if isinstance(x, Variable):
        x = (machine.dynamic if x.start is None else x.start) + x.offset
    if isinstance(x, str):
        return lambda b, a: (b.special[x] if a is None else b.special[x][a]).astype(t)
    if kind == "pred":
        constant = np.array([bool(x)])
    elif np.dtype(t).kind == "f":
        constant = np.array([x], t) if isinstance(x, float) else np.array([x], UNSIGNED[width(kind)]).view(t)
    elif isinstance(x, float):
        constant = np.array([x], np.float32 if width(kind) == 32 else np.float64).view(t)
    else:
        constant = np.array([x & (1 << width(kind)) - 1], np.uint64).astype(UNSIGNED[width(kind)]).view(t)
    return lambda b, a: constant


def writer(x: Any, kind: str) -> Callable[[Batch, Active, Array], None]:
    """The value is numpy's type of `kind`; a wider register takes it with its sign."""
    if x is None:
        return lambda b, a, value: None
    if not isinstance(x, Register):
        raise Unknown(f"a result in {x}")
    slot = x.slot
    if x.kind == "pred":
        return lambda b, a, value: b.put(slot, a, value.astype(np.bool_))
    bits, wide, own = UNSIGNED[width(x.kind)], width(x.kind), width(kind)
    if own == wide:
        return lambda b, a, value: b.put(slot, a, np.ascontiguousarray(value).view(bits))
    if own > wide:
        raise Unknown(f"{kind} in a register of {wide} bits")
    more: Any = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{wide // 8}")
    return lambda b, a, value: b.put(slot, a, _bits(value).astype(more).view(bits))


def _bits(value: Array) -> Array:
    return value if value.dtype.kind in "iu" else value.view(UNSIGNED[value.dtype.itemsize * 8])


def simple(kind: str, compute: Callable[..., Array], result: str = "") -> Callable[[Machine, Instruction], Step]:
    """All operands and the result of one type."""

    def make(machine: Machine, one: Instruction) -> Step:
        put = writer(one.operands[0], result or kind)
        gets = [reader(x, kind, machine) for x in one.operands[1:]]
        if len(gets) == 2:
            first, second = gets
            return lambda b, a: put(b, a, compute(first(b, a), second(b, a)))
        return lambda b, a: put(b, a, compute(*(get(b, a) for get in gets)))

    return make


def named(table: dict[str, Callable[..., Array]]) -> Callable[[Machine, Instruction], Step]:
    """By the instruction's first name; its type is the last."""

    def make(machine: Machine, one: Instruction) -> Step:
        only(one, ROUNDING)
        return typed(one, table[one.name[0]])(machine, one)

    return make


def only(one: Instruction, known: set[str], start: int = 1, end: int = -1) -> None:
    """What the name says besides is of these, or the instruction is not known."""
    if more := set(one.name[start:end]) - known:
        raise Unknown(f"{one.text}: {', '.join(sorted(more))}")


def typed(one: Instruction, compute: Callable[..., Array], result: str = "") -> Callable[[Machine, Instruction], Step]:
    """`simple` of the instruction's last type: pairs, bfloat16, and .ftz, too."""
    kind, own = one.name[-1], compute
    if "ftz" in one.name:
        own = lambda *x: flushed(compute(*map(flushed, x)))  # noqa: E731
    elif kind.startswith("bf16") and compute is fused:
        own = unrounded
    if kind in PARTS and not result:
        return simple(kind, in_parts(kind, own))
    if kind == "bf16" and result:
        return simple(kind, lambda *x: own(*map(from_bf16, x)), result)
    if kind == "bf16":
        return simple(kind, lambda *x: to_bf16(own(*map(from_bf16, x))))
    return simple(kind, own, result)


def flushed(x: Array) -> Array:
    """.ftz: floats too small for an exponent of their own become zeros of their sign."""
    if x.dtype.kind != "f":
        return x
    small = np.abs(x) < np.finfo(x.dtype).tiny
    return np.where(small, np.copysign(x.dtype.type(0), x), x) if small.any() else x


ROUNDING = {"rn", "ftz", "approx", "full", "lo"}
PARTS: dict[str, Any] = {"f16x2": np.float16, "s16x2": np.int16, "u16x2": np.uint16, "bf16x2": np.uint16}


def in_parts(kind: str, compute: Callable[..., Array]) -> Callable[..., Array]:
    def both(*x: Array) -> Array:
        parts = [np.ascontiguousarray(y).view(PARTS[kind]).reshape(-1, 2) for y in x]
        if kind == "bf16x2":
            made = to_bf16(compute(*(from_bf16(y) for y in parts)))
        else:
            made = compute(*parts).astype(PARTS[kind])
        return np.ascontiguousarray(made).view(np.uint32).reshape(-1)

    return both


def from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """Rounded to nearest; float64, too, rounded once."""
    if x.dtype == np.float64:
        x = odd(x)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    made = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), made)


def odd(x: Array) -> Array:
    """float64 to float32, made odd where it is not exact: rounding that again is as rounding once."""
    near = x.astype(np.float32)
    bits, wide = near.view(np.int32), near.astype(np.float64)
    even = np.isfinite(x) & (wide != x) & (bits & 1 == 0)
    return np.where(even, bits + np.where(np.abs(x) > np.abs(wide), 1, -1), bits).astype(np.int32).view(np.float32)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x y + z, rounded once"""
    return unrounded(x, y, z).astype(x.dtype)


def unrounded(x: Array, y: Array, z: Array) -> Array:
    """x y + z in float64, where the product of two float32 is exact; the sum is made odd where it is not, so that
    rounding it again is as rounding once.
    """
    if x.dtype == np.float64:
        raise Unknown("fma of float64")
    p, c = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    s = p + c
    t = s - p
    left = (p - (s - t)) + (c - t)
    bits = s.view(np.int64)
    even = np.isfinite(s) & (left != 0) & (bits & 1 == 0)
    toward = np.where((left > 0) == (s > 0), 1, -1)  # of what was cut off: one step away from zero, or towards it
    return np.where(even, np.where(toward > 0, bits | 1, bits - 1), bits).view(np.float64)


def divided(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return x / y
    zero = y == 0
    if zero.any():
        raise Fault("a division by zero")
    if x.dtype.kind == "u":
        return x // y
    return (np.sign(x) * np.sign(y) * (np.abs(x.astype(np.int64)) // np.abs(y.astype(np.int64)))).astype(x.dtype)


def remainder(x: Array, y: Array) -> Array:
    return (x.astype(np.int64) - divided(x, y).astype(np.int64) * y).astype(x.dtype)


def not_(x: Array) -> Array:
    return ~x


def lesser(x: Array, y: Array) -> Array:
    return np.fmin(x, y) if x.dtype.kind == "f" else np.minimum(x, y)


def greater(x: Array, y: Array) -> Array:
    return np.fmax(x, y) if x.dtype.kind == "f" else np.maximum(x, y)


def shift(left: bool) -> Callable[[Machine, Instruction], Step]:
    def make(machine: Machine, one: Instruction) -> Step:
        kind = one.name[-1]
        put, x, by = (
            writer(one.operands[0], kind),
            reader(one.operands[1], kind, machine),
            reader(one.operands[2], "u32", machine),
        )
        wide, t = width(kind), dtype(kind)

        def run(b: Batch, a: Active) -> None:
            value, n = x(b, a), by(b, a)
            most = np.minimum(n, wide - 1).astype(t)
            made = value << most if left else value >> most
            if left or t().dtype.kind == "u":
                made = np.where(n >= wide, t(0), made)
            put(b, a, made)

        return run

    return make


def multiply(machine: Machine, one: Instruction) -> Step:
    """mul and mad of integers: .lo, .hi, .wide; of floats as usual."""
    name, kind = one.name, one.name[-1]
    if dtype(kind)().dtype.kind == "f" or kind in PARTS or kind == "bf16":
        return named({"mul": operator.mul, "mad": fused})(machine, one)
    if name[1:-1] not in {("lo",), ("wide",), ("hi",)} or name[:2] == ("mad", "hi"):
        raise Unknown(one.text)
    if "wide" in name:
        result = kind[0] + str(2 * width(kind))
        more = dtype(result)
        return (
            simple(kind, lambda x, y: x.astype(more) * y.astype(more), result)(machine, one)
            if name[0] == "mul"
            else _mad_wide(machine, one, kind, result)
        )
    if "hi" in name:
        more = dtype(kind[0] + str(2 * width(kind)))
        return simple(kind, lambda x, y: (x.astype(more) * y.astype(more) >> width(kind)).astype(dtype(kind)))(
            machine, one
        )
    return simple(kind, operator.mul if name[0] == "mul" else lambda x, y, z: x * y + z)(machine, one)


def _mad_wide(machine: Machine, one: Instruction, kind: str, result: str) -> Step:
    put, more = writer(one.operands[0], result), dtype(result)
    x, y, z = (reader(v, k, machine) for v, k in zip(one.operands[1:], (kind, kind, result), strict=True))
    return lambda b, a: put(b, a, x(b, a).astype(more) * y(b, a).astype(more) + z(b, a))


COMPARE: dict[str, Callable[..., Array]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def compare(machine: Machine, one: Instruction) -> Step:
    how, kind = one.name[1], one.name[-1]
    if kind in PARTS:
        return _compare_parts(machine, one)
    only(one, {"ftz"}, 2)
    own = COMPARE.get(how)
    if kind in FLOATS or kind == "bf16":
        if how == "nan":
            own = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
        elif how == "num":
            own = lambda x, y: ~(np.isnan(x) | np.isnan(y))  # noqa: E731
        elif how == "ne":  # ordered: false where one is NaN
            own = lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y)  # noqa: E731
        elif how.endswith("u"):
            ordered = COMPARE[how[:-1]]
            own = lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)  # noqa: E731
    if own is None:
        raise Unknown(one.text)
    if kind[0] == "b" and kind != "bf16":
        return simple("u" + kind[1:], own, "pred")(machine, one)
    return typed(one, own, "pred")(machine, one)


def _compare_parts(machine: Machine, one: Instruction) -> Step:
    """p|q: of the lower and of the upper numbers."""
    how, kind = one.name[1], one.name[-1]
    only(one, set(), 2)
    own = COMPARE[how.removesuffix("u")]
    puts = [writer(x, "pred") for x in one.operands[0]]
    gets = [reader(x, "u32", machine) for x in one.operands[1:]]

    def run(b: Batch, a: Active) -> None:
        x, y = (np.array(get(b, a)).view(PARTS[kind]).reshape(-1, 2) for get in gets)
        made = own(x, y) | ((np.isnan(x) | np.isnan(y)) if how.endswith("u") else False)
        for i, put in enumerate(puts):
            put(b, a, made[:, i])

    if kind != "f16x2" or how in ("ne", "neu"):
        raise Unknown(one.text)
    return run


def select(machine: Machine, one: Instruction) -> Step:
    kind = one.name[-1]
    put = writer(one.operands[0], kind)
    x, y, p = (reader(v, k, machine) for v, k in zip(one.operands[1:], (kind, kind, "pred"), strict=True))
    return lambda b, a: put(b, a, np.where(p(b, a), x(b, a), y(b, a)))


def move(machine: Machine, one: Instruction) -> Step:
    kind, (to, x) = one.name[-1], one.operands
    if isinstance(to, tuple):  # parts of a register
        part = width(kind) // len(to)
        puts, get = [writer(one_, f"b{part}") for one_ in to], reader(x, f"u{width(kind)}", machine)

        def split(b: Batch, a: Active) -> None:
            value = get(b, a)
            for i, put in enumerate(puts):
                put(b, a, (value >> dtype(f"u{width(kind)}")(i * part)).astype(UNSIGNED[part]))

        return split
    put = writer(to, kind)
    if isinstance(x, tuple) and x[0] != "!":
        part, t = width(kind) // len(x), UNSIGNED[width(kind)]
        gets = [reader(v, f"u{part}", machine) for v in x]
        return lambda b, a: put(b, a, sum((get(b, a).astype(t) << t(i * part) for i, get in enumerate(gets)), t(0)))
    get = reader(x, kind, machine)
    return lambda b, a: put(b, a, np.array(get(b, a)))


def permute(machine: Machine, one: Instruction) -> Step:
    if len(one.name) > 2:
        raise Unknown(one.text)

    def bytes_(x: Array, y: Array, how: Array) -> Array:
        both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
        made = np.zeros(np.broadcast_shapes(x.shape, y.shape, how.shape), np.uint32)
        for i in range(4):
            nibble = how >> np.uint32(4 * i)
            byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64)) & np.uint64(255)).astype(
                np.uint32
            )
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            made |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return made

    return simple("u32", bytes_)(machine, one)


def logic3(machine: Machine, one: Instruction) -> Step:
    only(one, set())
    table = one.operands[-1]
    short = Instruction(one.name, one.operands[:-1], None, False, one.text)

    def compute(x: Array, y: Array, z: Array) -> Array:
        made = np.zeros(np.broadcast_shapes(x.shape, y.shape, z.shape), np.uint32)
        for i in range(8):
            if table >> i & 1:
                made |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return made

    return simple("u32", compute)(machine, short)


def byte_products(machine: Machine, one: Instruction) -> Step:
    """dp4a of unsigned bytes."""
    if one.name[1:] != ("u32", "u32"):
        raise Unknown(one.text)

    def compute(x: Array, y: Array, total: Array) -> Array:
        for i in range(0, 32, 8):
            total = total + (x >> np.uint32(i) & np.uint32(255)) * (y >> np.uint32(i) & np.uint32(255))
        return total

    return simple("u32", compute)(machine, one)


def funnel(machine: Machine, one: Instruction) -> Step:
    left = one.name[1] == "l"
    wrap = one.name[2] == "wrap"
    if one.name[1:] not in {(way, how, "b32") for way in "lr" for how in ("wrap", "clamp")}:
        raise Unknown(one.text)

    def compute(low: Array, high: Array, n: Array) -> Array:
        by = (n & np.uint32(31) if wrap else np.minimum(n, 32)).astype(np.uint64)
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        return ((both << by >> np.uint64(32)) if left else both >> by).astype(np.uint32)

    return simple("u32", compute)(machine, one)


def extract(machine: Machine, one: Instruction) -> Step:
    kind = one.name[-1]
    put, x = writer(one.operands[0], kind), reader(one.operands[1], kind, machine)
    at, count = (reader(v, "u32", machine) for v in one.operands[2:])
    wide = width(kind)

    def run(b: Batch, a: Active) -> None:
        bits, t = x(b, a).view(UNSIGNED[wide]).astype(np.uint64), np.uint64
        p, n = (at(b, a) & 255).astype(t), (count(b, a) & 255).astype(t)
        if (n == 0).any() or (n > 63).any() or (p + n > wide).any():
            raise Unknown("bfe of no bits, or of more than there are")
        one_more = t(1) << n
        made = bits >> p & one_more - t(1)
        if kind[0] == "s":
            made = np.where(made & one_more >> t(1), made - one_more, made)
        put(b, a, made.astype(UNSIGNED[wide]).view(dtype(kind)))

    return run


def counted(machine: Machine, one: Instruction) -> Step:
    """popc: how many bits are set."""
    kind = {"b32": "u32", "b64": "u64"}[one.name[-1]]
    wide = width(kind)

    def compute(x: Array) -> Array:
        return sum((x >> dtype(kind)(i) & dtype(kind)(1) for i in range(wide)), np.zeros(1, dtype(kind))).astype(
            np.uint32
        )

    put, get = writer(one.operands[0], "u32"), reader(one.operands[1], kind, machine)
    return lambda b, a: put(b, a, compute(get(b, a)))


def insert(machine: Machine, one: Instruction) -> Step:
    if one.name != ("bfi", "b32"):
        raise Unknown(one.text)

    def compute(x: Array, y: Array, at: Array, count: Array) -> Array:
        by, bits = (np.minimum(v & 255, 32).astype(np.uint64) for v in (at, count))
        mask = ((np.uint64(1) << bits) - np.uint64(1)) << by
        return (y.astype(np.uint64) & ~mask | x.astype(np.uint64) << by & mask).astype(np.uint32)

    return simple("u32", compute)(machine, one)


def convert(machine: Machine, one: Instruction) -> Step:
    """cvt.(how).to.from"""
    to, source, how = one.name[-2], one.name[-1], set(one.name[1:-2])
    if to == "tf32":  # halves go away from zero
        if how != {"rna"} or source != "f32":
            raise Unknown(one.text)
        return simple("u32", tf32)(machine, one)
    put = writer(one.operands[0], to)
    if to in ("f16x2", "bf16x2"):  # the first operand is the upper half
        half = dtype(to[:-2])
        if how != {"rn"} or source != "f32":
            raise Unknown(one.text)
        high, low = (reader(x, source, machine) for x in one.operands[1:])

        def pack(x: Array) -> Array:
            return (to_bf16(x) if half == np.uint16 else x.astype(half).view(np.uint16)).astype(np.uint32)

        return lambda b, a: put(b, a, pack(low(b, a)) | pack(high(b, a)) << np.uint32(16))
    get = reader(one.operands[1], source, machine)
    if unknown := how - {"rn", "rzi", "rni", "rmi", "rpi", "ftz"}:
        raise Unknown(f"{one.text}: {unknown}")
    t, flush = dtype(to), "ftz" in how

    def run(b: Batch, a: Active) -> None:
        x = get(b, a)
        if source == "bf16":
            x = from_bf16(x)
        if flush and source == "f32":
            x = flushed(x)
        if x.dtype.kind == "f" and how & set(INTEGRAL):
            x = INTEGRAL[next(iter(how & set(INTEGRAL)))](x)
        if to == "bf16":
            made = to_bf16(x.astype(np.float32))
        elif np.dtype(t).kind in "iu" and x.dtype.kind == "f":
            info = np.iinfo(t)
            wide = np.where(np.isnan(x), 0, x).astype(np.float64)
            limit = float(info.max) if width(to) < 64 else float(np.nextafter(float(info.max), 0))
            made = np.clip(wide, float(info.min), limit).astype(t)
        else:
            made = x.astype(t)
        put(b, a, flushed(made) if flush and to == "f32" else made)

    return run


def tf32(x: Array) -> Array:
    """Of a float's bits; halves go away from zero."""
    nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FFFFFFF), (x + np.uint32(0x1000)) & np.uint32(0xFFFFE000))


INTEGRAL: dict[str, Callable[[Array], Array]] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


# Memory


def address(place: Place, machine: Machine) -> Get:
    if isinstance(place, Variable):
        return reader(place, "u64", machine)
    if place.base is None:
        raise Unknown("an address without a register")
    get, offset = reader(place.base, f"u{width(place.base.kind)}", machine), place.offset
    if not offset:
        return lambda b, a: get(b, a).astype(np.uint64)
    return lambda b, a: (get(b, a).astype(np.int64) + offset).astype(np.uint64)


def each(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def known(one: Instruction, more: set[str]) -> str:
    """The kind of memory; what the instruction says besides must be among `more` or is of no matter to one batch."""
    passing = {"global", "shared", "param", "v2", "v4", "v8", "volatile", "relaxed", "acquire", "release", "gpu", "cta", "sys",
               "weak", "ca", "cg", "cs", "cv", "wb", "wt", "nc", "shared_cta"} | more  # fmt: skip
    for part in one.name[1:-1]:
        if part not in passing and not part.startswith(("L1", "L2")):
            raise Unknown(f"{one.text}: {part}")
    return next((p.replace("_cta", "") for p in one.name if p in ("global", "shared", "param", "shared_cta")), "")


def load(machine: Machine, one: Instruction) -> Step:
    space, kind = known(one, set()), one.name[-1]
    size = width(kind) // 8
    targets = each(one.operands[0])
    puts = [writer(x, kind) for x in targets]
    t = dtype(kind)
    if space == "param":
        at = one.operands[1].offset

        def from_launch(b: Batch, a: Active) -> None:
            for i, put in enumerate(puts):
                put(b, a, np.frombuffer(b.parameters[at + i * size : at + (i + 1) * size], t).copy())

        return from_launch
    where, many = address(one.operands[1], machine), len(targets)

    def run(b: Batch, a: Active) -> None:
        parts = fetch(b, a, where(b, a), space, size, many)
        for put, part in zip(puts, parts, strict=True):
            put(b, a, part.view(t))

    return run


def fetch(b: Batch, a: Active, at: Array, space: str, size: int, many: int = 1) -> list[Array]:
    """`many` numbers of `size` bytes, one behind the other, for each thread."""
    if space == "shared":
        at = np.broadcast_to(at, (b.n if a is None else len(a),))
        if (at % (size * many)).any():
            raise Fault(f"misaligned, shared {int(at[(at % (size * many)) > 0][0])} for {size * many} bytes")
        b.count(a, at, size * many)
        numbers = b.shared.held.view(UNSIGNED[size * 8])
        return [numbers[b.at_shared(at + np.uint64(i * size), a, size)] for i in range(many)]
    if space != "global":
        raise Unknown(f"memory '{space}'")
    at = np.broadcast_to(at, (b.n if a is None else len(a),))
    if many > 1 and (at % (size * many)).any():
        raise Fault(f"misaligned, {int(at[(at % (size * many)) > 0][0]):#x} for {size * many} bytes")
    made = [np.empty(len(at), UNSIGNED[size * 8]) for _ in range(many)]
    for i in range(many):
        for which, numbers, places, start in b.memory.find(at + np.uint64(i * size), size, "a read"):
            b.seen(a, which, start, places, size)
            made[i][which] = numbers[places]
    return made


def store(machine: Machine, one: Instruction) -> Step:
    space, kind = known(one, set()), one.name[-1]
    size, bits = width(kind) // 8, f"u{width(kind)}"
    where, gets = address(one.operands[0], machine), [reader(x, bits, machine) for x in each(one.operands[1])]

    def run(b: Batch, a: Active) -> None:
        keep(b, a, where(b, a), space, size, [get(b, a) for get in gets])

    return run


def keep(b: Batch, a: Active, at: Array, space: str, size: int, values: list[Array]) -> None:
    n, many = b.n if a is None else len(a), len(values)
    at = np.broadcast_to(at, (n,))
    if many > 1 and (at % (size * many)).any():
        raise Fault(f"misaligned, {int(at[(at % (size * many)) > 0][0]):#x} for {size * many} bytes")
    if space == "shared":
        b.count(a, at, size * many)
    for i, value in enumerate(values):
        value = np.broadcast_to(value, (n,))
        if space == "shared":
            b.to_shared(at + np.uint64(i * size), a, value)
            continue
        if space != "global":
            raise Unknown(f"memory '{space}'")
        for which, numbers, places, start in b.memory.find(at + np.uint64(i * size), size, "a write"):
            b.written(a, which, start, places, size, numbers[places] != value[which])
            numbers[places] = value[which]
            if (numbers[places] != value[which]).any():
                raise Race("two threads write different numbers at once")


def atomic(machine: Machine, one: Instruction) -> Step:
    returns = one.name[0] == "atom"
    space, kind = known(one, {"acq_rel", "add", "or", "and", "xor", "max", "min", "exch"}), one.name[-1]
    what = next(p for p in one.name if p in ATOMIC)
    kind = {"b32": "u32", "b64": "u64"}.get(kind, kind)
    if space != "global" or kind in PARTS:
        raise Unknown(one.text)
    t, size = dtype(kind), width(kind) // 8
    put = writer(one.operands[0], kind) if returns else None
    where, value = address(one.operands[returns], machine), reader(one.operands[returns + 1], kind, machine)
    compute = ATOMIC[what]

    def run(b: Batch, a: Active) -> None:
        n = b.n if a is None else len(a)
        at, x = np.broadcast_to(where(b, a), (n,)), np.broadcast_to(value(b, a), (n,))
        old = np.empty(n, t)
        for which, numbers, places, _ in b.memory.find(at, size, "an atomic access"):
            own, mine = numbers.view(t), np.arange(n)[which]
            for i, place in zip(mine, places, strict=True):
                old[i] = own[place]
                own[place] = compute(old[i], x[i])
        if put is not None:
            put(b, a, old)

    return run


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "or": operator.or_, "and": operator.and_, "xor": operator.xor, "max": max, "min": min,
    "exch": lambda old, new: new,
}  # fmt: skip


def copy(machine: Machine, one: Instruction) -> Step:
    """cp.async and its groups"""
    if one.name[1] != "async":
        raise Unknown(one.text)
    if one.name[2] == "commit_group":
        return lambda b, a: b.commit(a)
    if one.name[2] == "wait_group":
        pending = one.operands[0]
        return lambda b, a: b.wait(a, pending)
    if one.name[2] == "wait_all":

        def all_of_them(b: Batch, a: Active) -> None:
            b.commit(a)
            b.wait(a, 0)

        return all_of_them
    if one.name[2] not in ("ca", "cg") or one.name[3] not in ("shared", "shared_cta") or one.name[4] != "global":
        raise Unknown(one.text)
    only(one, {"L2_64B", "L2_128B", "L2_256B"}, 5, len(one.name))
    to, source, size = address(one.operands[0], machine), address(one.operands[1], machine), one.operands[2]
    filled = reader(one.operands[3], "u32", machine) if len(one.operands) > 3 else None
    word = min(size, 8)

    def run(b: Batch, a: Active) -> None:
        threads = b.every if a is None else a
        n = len(threads)
        at, came = np.broadcast_to(to(b, a), (n,)), np.broadcast_to(source(b, a), (n,))
        live = np.full(n, True)
        if filled is not None:
            count = np.broadcast_to(filled(b, a), (n,))
            if not np.isin(count, (0, size)).all():
                raise Unknown("a copy of a part")
            live = count > 0
        if (at % size).any() or (came[live] % size).any():
            raise Fault(f"misaligned for {size} bytes")
        held = np.zeros((n, size // word), UNSIGNED[word * 8])
        for i in range(size // word if live.any() else 0):
            part = np.zeros(int(live.sum()), UNSIGNED[word * 8])
            for which, numbers, places, start in b.memory.find(came[live] + np.uint64(i * word), word, "a copy's read"):
                b.seen(threads[live], which, start, places, word)
                part[which] = numbers[places]
            held[live, i] = part

        for i in range(size // word):
            b.about_to_write(at + np.uint64(i * word), a, held[:, i])

        def arrive(which: Array) -> None:
            rows = np.searchsorted(threads, which)
            for i in range(size // word):
                b.to_shared(at[rows] + np.uint64(i * word), which, held[rows, i])

        b.copy(a, arrive)

    return run


# Control


def branch(machine: Machine, one: Instruction) -> Step:
    target = machine.code.labels[one.operands[0]]

    def run(b: Batch, a: Active) -> None:
        b.counter[b.every if a is None else a] = target

    return run


def leave(machine: Machine, one: Instruction) -> Step:
    def run(b: Batch, a: Active) -> None:
        b.state[b.every if a is None else a] = 2

    return run


def barrier(machine: Machine, one: Instruction) -> Step:
    if one.name[1] == "warp":
        members = all_lanes(one, 0, machine)

        def together(b: Batch, a: Active) -> None:
            members(b, a)
            b.whole(a)
            b.stamp[b.every if a is None else a] += ALONE

        return together
    if one.name[1] != "sync" or one.operands not in ((0,), (0, machine.code.threads)):
        raise Unknown(one.text)

    def run(b: Batch, a: Active) -> None:
        b.whole(a)
        b.state[b.every if a is None else a] = 1

    return run


def nothing(machine: Machine, one: Instruction) -> Step:
    return lambda b, a: None


# Whole warps


def all_lanes(one: Instruction, at: int, machine: Machine) -> Callable[[Batch, Active], None]:
    """Refuses an instruction of some lanes only. at: the operand that says which."""
    mask = one.operands[at]
    get = reader(mask, "u32", machine)

    def check(b: Batch, a: Active) -> None:
        if (get(b, a) != np.uint32(0xFFFFFFFF)).any():
            raise Unknown(f"{one.text}: not all lanes of a warp")

    if isinstance(mask, int):
        check(None, None)  # type: ignore[arg-type]
        return lambda b, a: None
    return check


def shuffle(machine: Machine, one: Instruction) -> Step:
    how = one.name[2]
    to, ok = one.operands[0] if isinstance(one.operands[0], tuple) else (one.operands[0], None)
    put, flag = writer(to, "b32"), writer(ok, "pred")
    x, by, clamp = (reader(v, "u32", machine) for v in one.operands[1:4])
    members = all_lanes(one, 4, machine)

    def run(b: Batch, a: Active) -> None:
        members(b, a)
        warps = b.whole(a)
        value = np.broadcast_to(x(b, a), (warps.size,)).reshape(warps.shape)
        n = np.broadcast_to(by(b, a), (warps.size,)).reshape(warps.shape).astype(np.int64) & 31
        c = np.broadcast_to(clamp(b, a), (warps.size,)).reshape(warps.shape).astype(np.int64)
        segment, limit = c >> 8 & 31, c & 31
        low, high = LANE & segment, LANE & segment | limit & ~segment
        if how == "bfly":
            source = LANE ^ n
            fine = source <= high
        elif how == "idx":
            source = low | n & ~segment
            fine = source <= high
        elif how == "up":
            source = LANE - n
            fine = source >= high
        else:
            source = LANE + n
            fine = source <= high
        source = np.where(fine, source, LANE)
        put(b, a, np.take_along_axis(value, source, 1).reshape(-1))
        flag(b, a, fine.reshape(-1))

    return run


def vote(machine: Machine, one: Instruction) -> Step:
    how, kind = one.name[2], one.name[3]
    put, p = writer(one.operands[0], kind), reader(one.operands[1], "pred", machine)
    members = all_lanes(one, 2, machine)
    if one.name[1] != "sync" or how not in ("ballot", "any", "all"):
        raise Unknown(one.text)

    def run(b: Batch, a: Active) -> None:
        members(b, a)
        warps = b.whole(a)
        own = np.broadcast_to(p(b, a), (warps.size,)).reshape(warps.shape)
        if how == "ballot":
            made = (own.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32)
        else:
            made = own.any(1) if how == "any" else own.all(1)
        put(b, a, np.repeat(made, LANES))

    return run


def reduce(machine: Machine, one: Instruction) -> Step:
    how, kind = one.name[2], one.name[-1]
    kind = {"b32": "u32"}.get(kind, kind)
    put, x = writer(one.operands[0], kind), reader(one.operands[1], kind, machine)
    members = all_lanes(one, 2, machine)
    only(one, {"sync", how})
    compute: Any = {"min": np.minimum, "max": np.maximum, "add": np.add, "or": np.bitwise_or, "and": np.bitwise_and}[
        how
    ]

    def run(b: Batch, a: Active) -> None:
        members(b, a)
        warps = b.whole(a)
        own = np.broadcast_to(x(b, a), (warps.size,)).reshape(warps.shape)
        put(b, a, np.repeat(compute.reduce(own, axis=1).astype(own.dtype), LANES))

    return run


def turned(x: Array) -> Array:
    """[.., 32] registers of an 8 x 8 part of 16-bit numbers, as if its rows were columns."""
    halves = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], -1)
    part = np.zeros((*x.shape[:-1], 8, 8), np.uint32)
    part[..., ROW[:, None], np.stack([PAIR, PAIR + 1], -1)] = halves
    return part[..., PAIR, ROW] | part[..., PAIR + 1, ROW] << np.uint32(16)


def move_matrix(machine: Machine, one: Instruction) -> Step:
    put, x = writer(one.operands[0], "b32"), reader(one.operands[1], "u32", machine)

    def run(b: Batch, a: Active) -> None:
        warps = b.whole(a)
        put(b, a, turned(np.broadcast_to(x(b, a), (warps.size,)).reshape(warps.shape)).reshape(-1))

    return run


def matrices(machine: Machine, one: Instruction) -> Step:
    """ldmatrix, stmatrix: rows of 16 bytes, their addresses in the lanes 8 i to 8 i + 7 for part i."""
    loads, across = one.name[0] == "ldmatrix", "trans" in one.name
    count = int(next(p for p in one.name if p in ("x1", "x2", "x4"))[1:])
    if "m8n8" not in one.name or one.name[-1] != "b16":
        raise Unknown(one.text)
    place, vector = (one.operands[1], one.operands[0]) if loads else one.operands
    where, parts = address(place, machine), each(vector)
    if len(parts) != count:
        raise Unknown(one.text)
    puts = [writer(x, "b32") for x in parts] if loads else []
    gets = [] if loads else [reader(x, "u32", machine) for x in parts]

    def run(b: Batch, a: Active) -> None:
        warps = b.whole(a)
        at = np.broadcast_to(where(b, a), (warps.size,)).reshape(warps.shape)
        for i in range(count):
            rows = at[:, 8 * i : 8 * i + 8]
            if (rows % 16).any():
                raise Fault("misaligned for a row of 16 bytes")
            words = rows[:, ROW] + (LANE % 4 * 4).astype(np.uint64)  # of each lane
            b.count(a, words.reshape(-1), 4)
            if loads:
                value = b.shared.held.view(np.uint32)[b.at_shared(words.reshape(-1), a, 4)].reshape(warps.shape)
                puts[i](b, a, (turned(value) if across else value).reshape(-1))
            else:
                value = np.broadcast_to(gets[i](b, a), (warps.size,)).reshape(warps.shape)
                b.to_shared(words.reshape(-1), a, (turned(value) if across else value).reshape(-1))

    return run


FORMS = {
    "f16": (8, 16),
    "bf16": (8, 16),
    "tf32": (4, 8),
    "s8": (16, 32),
    "u8": (16, 32),
}  # how many numbers are contracted


def product(machine: Machine, one: Instruction) -> Step:
    """mma.sync of 16 x 8, k of 8 (tf32), 16 (16-bit floats) or 32 (bytes)."""
    shape = next(p for p in one.name if p.startswith("m16n8"))
    k = int(shape[6:])
    to, a_kind, b_kind, c_kind = one.name[-4:]
    only(one, {"satfinite"}, 6, -4)
    if one.name[3:6] != (shape, "row", "col") or c_kind != to:
        raise Unknown(one.text)
    if k not in FORMS.get(a_kind, ()) or to not in ("f32", "s32"):
        raise Unknown(one.text)
    d, a_, b_, c_ = one.operands
    puts = [writer(x, to) for x in d]
    left, right, start = ([reader(x, "u32", machine) for x in v] for v in (each(a_), each(b_), each(c_)))

    def run(b: Batch, a: Active) -> None:
        warps = b.whole(a)

        def held(gets: list[Get]) -> list[Array]:
            return [np.broadcast_to(get(b, a), (warps.size,)).reshape(warps.shape) for get in gets]

        x = first_operand(held(left), a_kind, k)
        y = second_operand(held(right), b_kind, k)
        c = result_of(held(start), to)
        made = multiplied(x, y, c, to, "satfinite" in one.name)
        for put, part in zip(puts, parts_of(made), strict=True):
            put(b, a, part.reshape(-1))

    return run


def multiplied(x: Array, y: Array, c: Array, to: str, clipped: bool) -> Array:
    if to == "f32":
        return np.matmul(x, y) + c
    made = np.matmul(x, y).astype(np.int64) + c
    return (np.clip(made, -(2**31), 2**31 - 1) if clipped else made).astype(np.int32)


def numbers(register: Array, kind: str) -> Array:
    """What lies in registers [W, 32] -> [W, 32, so many]."""
    r = np.ascontiguousarray(register)
    if kind == "f16":
        return r.view(np.float16).reshape(*r.shape, 2).astype(np.float32)
    if kind == "bf16":
        return from_bf16(r.view(np.uint16).reshape(*r.shape, 2))
    if kind == "tf32":
        return (r & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    return r.view(np.int8 if kind == "s8" else np.uint8).reshape(*r.shape, 4).astype(np.float64)


def first_operand(registers: list[Array], kind: str, k: int) -> Array:
    """[W, 16, k]: register i has rows from 8 (i mod 2), columns of half i div 2."""
    parts = [numbers(r, kind) for r in registers]
    each_ = parts[0].shape[-1]
    made = np.zeros((registers[0].shape[0], 16, k), parts[0].dtype)
    for i, part in enumerate(parts):
        columns = LANE[:, None] % 4 * each_ + np.arange(each_) + i // 2 * 4 * each_
        made[:, (ROW + i % 2 * 8)[:, None], columns] = part
    return made


def second_operand(registers: list[Array], kind: str, k: int) -> Array:
    """[W, k, 8]"""
    parts = [numbers(r, kind) for r in registers]
    each_ = parts[0].shape[-1]
    made = np.zeros((registers[0].shape[0], k, 8), parts[0].dtype)
    for i, part in enumerate(parts):
        rows = LANE[:, None] % 4 * each_ + np.arange(each_) + i * 4 * each_
        made[:, rows, ROW[:, None]] = part
    return made


def result_of(registers: list[Array], kind: str) -> Array:
    """[W, 16, 8] of four registers."""
    made = np.zeros((registers[0].shape[0], 16, 8), np.float32 if kind == "f32" else np.int64)
    for i, r in enumerate(registers):
        made[:, ROW + i // 2 * 8, PAIR + i % 2] = np.ascontiguousarray(r).view(
            np.float32 if kind == "f32" else np.int32
        )
    return made


def parts_of(made: Array) -> list[Array]:
    return [made[:, ROW + i // 2 * 8, PAIR + i % 2] for i in range(4)]


SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}  # bytes of a descriptor's mode


def warp_group(machine: Machine, one: Instruction) -> Step:
    """wgmma: the product is computed where it is issued; who reads its result before the wait is not found."""
    if one.name[1] != "mma_async":
        return nothing(machine, one)
    shape = one.name[4]
    n, k = (int(x) for x in shape[4:].split("k"))
    to, a_kind, b_kind = one.name[5:8]
    if not shape.startswith("m64") or to != "f32" or (a_kind, k) not in {("f16", 16), ("bf16", 16), ("tf32", 8)}:
        raise Unknown(one.text)
    d, a_, b_, scale, *rest = one.operands
    if len(d) != n // 2 or any(x != 1 for x in rest[:2]):
        raise Unknown(one.text)
    across = [bool(x) for x in rest[2:]]
    in_registers = isinstance(a_, tuple)
    puts, starts = [writer(x, "f32") for x in d], [reader(x, "f32", machine) for x in d]
    lefts = [reader(x, "u32", machine) for x in a_] if in_registers else []
    a_at = None if in_registers else reader(a_, "u64", machine)
    b_at, keeps = reader(b_, "u64", machine), reader(scale, "pred", machine)
    b_across = across[-1] if across else False
    a_across = across[0] if across and not in_registers else False

    def run(b: Batch, a: Active) -> None:
        warps = b.whole(a)
        if len(warps) % 4 or (b.warp[warps[::4, 0]] % 4).any():
            raise Fault("not all warps of a group are here")
        groups = len(warps) // 4
        every = np.broadcast_to

        def described(get: Get, rows: int, turn: bool, kind: str) -> Array:
            at = every(get(b, a), (warps.size,)).reshape(groups, -1)
            if (at != at[:, :1]).any():
                raise Fault("a descriptor that differs within a group of warps")
            return tile(b, warps.reshape(groups, -1)[:, 0], at[:, 0], rows, k, turn, kind)

        if in_registers:
            held = [every(get(b, a), (warps.size,)).reshape(warps.shape) for get in lefts]
            x = first_operand(held, a_kind, k).reshape(groups, 64, k)
        else:
            x = described(a_at, 64, a_across, a_kind)  # type: ignore[arg-type]
        y = described(b_at, n, b_across, b_kind)
        made = np.matmul(x, y.transpose(0, 2, 1)).reshape(groups * 4, 16, n)
        add = every(keeps(b, a), (warps.size,))
        for j in range(n // 8):
            for i, part in enumerate(parts_of(made[:, :, 8 * j : 8 * j + 8])):
                old = every(starts[4 * j + i](b, a), (warps.size,))
                puts[4 * j + i](b, a, np.where(add, old, np.float32(0)) + part.reshape(-1))

    return run


def tile(b: Batch, thread: Array, descriptor: Array, rows: int, k: int, across: bool, kind: str) -> Array:
    """[groups, rows, k] float32 from shared memory as a descriptor says. across: the rows are neighbours there, not k."""
    size = 4 if kind == "tf32" else 2
    start = ((descriptor & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)[:, None, None]
    leading = ((descriptor >> np.uint64(16) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)[:, None, None]
    stride = ((descriptor >> np.uint64(32) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)[:, None, None]
    modes = set((descriptor >> np.uint64(62)).tolist())
    if len(modes) != 1 or (descriptor >> np.uint64(49) & np.uint64(7)).any():
        raise Unknown("descriptors of several kinds, or with a base")
    wide = SWIZZLE[modes.pop()]
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    if not wide:
        raise Unknown("a descriptor without swizzle")
    if across:
        each_ = wide // size
        at = start + r // each_ * leading + c // 8 * stride + c % 8 * wide + r % each_ * size
    else:
        at = start + r // 8 * stride + r % 8 * wide + c * size
    at = at ^ (at >> 7 & wide // 16 - 1) << 4
    places = b.at_shared(at.reshape(len(at), -1), thread, size, note=False)
    held = b.shared.held.view(UNSIGNED[size * 8])[places].reshape(at.shape)
    if kind == "f16":
        return held.view(np.float16).astype(np.float32)
    return from_bf16(held) if kind == "bf16" else (held & np.uint32(0xFFFFE000)).view(np.float32)


def approximate(machine: Machine, one: Instruction) -> Step:
    """Functions of one number, rounded to nearest."""
    if one.name[1] not in ("approx", "rn"):
        raise Unknown(one.text)
    return named(FUNCTIONS)(machine, one)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "ex2": np.exp2, "lg2": np.log2,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


def least(machine: Machine, one: Instruction) -> Step:
    """min, max"""
    own = lesser if one.name[0] == "min" else greater
    extra = set(one.name[1:-1]) - {"ftz"}
    if extra == {"relu"} and one.name[-1] == "s32":
        return simple("s32", lambda x, y: np.maximum(own(x, y), 0))(machine, one)
    if extra == {"NaN"}:
        own = np.minimum if one.name[0] == "min" else np.maximum
        extra = set()
    if extra:
        raise Unknown(one.text)
    return typed(one, own)(machine, one)


ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": operator.add, "sub": operator.sub, "fma": fused, "div": divided, "rem": remainder, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "not": not_, "neg": operator.neg, "abs": np.abs,
}  # fmt: skip
MAKERS: dict[str, Callable[[Machine, Instruction], Step]] = {
    **dict.fromkeys(ARITHMETIC, named(ARITHMETIC)), **dict.fromkeys(("mul", "mad"), multiply),
    **dict.fromkeys(("min", "max"), least),
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), approximate), "shl": shift(True),
    "shr": shift(False), "setp": compare, "selp": select, "mov": move, "cvt": convert, "prmt": permute, "lop3": logic3,
    "dp4a": byte_products,
    "shf": funnel, "bfe": extract, "bfi": insert, "popc": counted, "ld": load, "st": store, "cp": copy, "bra": branch,
    "shfl": shuffle, "vote": vote, "redux": reduce, "movmatrix": move_matrix, "mma": product, "wgmma": warp_group,
    **dict.fromkeys(("atom", "red"), atomic), **dict.fromkeys(("ret", "exit"), leave),
    **dict.fromkeys(("bar", "barrier"), barrier), **dict.fromkeys(("fence", "membar"), nothing),
    **dict.fromkeys(("ldmatrix", "stmatrix"), matrices),
}  # fmt: skip
