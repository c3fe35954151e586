"""The attention kernel's block of 8-bit products (attention/triton/int8), which the interpreter does not run: its
assembly, bit by bit, for the 32 lanes of a warp, against float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcal_kernels.layout import Blocks, Form, decode, pack, unpack
from kvcal_kernels.layout.form import BYTE_DIMS
from kvcal_kernels.layout.grids import IN_BYTES
from tests.support.cases.attention_cases import random_codes, random_grid
from tests.support.interpreted import needs_triton

pytestmark = needs_triton

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4 * 2
Words = NDArray[np.uint32]


class Warp:
    """Runs PTX of one warp on its registers' bits. A branch must be taken by all lanes or none."""

    def __init__(self, registers: dict[str, Words], memory: bytes) -> None:
        self.registers: dict[str, Any] = {name: bits.astype(np.uint32) for name, bits in registers.items()}
        self.registers["%laneid"] = LANE.astype(np.uint32)
        self.memory = np.frombuffer(memory, np.uint8)
        self.branched: list[bool] = []

    def bits(self, text: str) -> Any:
        if text in self.registers:
            return self.registers[text]
        if "." in text or "e" in text:
            return np.full(32, float(text), np.float32).view(np.uint32)
        return np.full(32, int(text, 0) & 0xFFFFFFFF, np.uint32)

    def float(self, text: str) -> Any:
        return self.bits(text).view(np.float32)

    def at(self, text: str, count: int) -> NDArray[np.uint8]:
        """(32, count): bytes from each lane's address on, which must be a multiple of it."""
        name, _, plus = text.strip("[] ").partition("+")
        place = self.bits(name).astype(np.int64) + int(plus or 0)
        assert not (place % count).any(), text
        return self.memory[place[:, None] + np.arange(count)]

    def matrix(self, target: str, address: str) -> None:
        rows = self.at(address, 16).reshape(4, 8, 4, 4)  # matrix, row, lane's column, bytes
        for i, name in enumerate(target.split("|")):
            self.registers[name] = np.ascontiguousarray(rows[i]).reshape(32, 4).view(np.uint32)[:, 0]

    def product(self, kinds: str, out: str, a: str, b: str, c: str) -> None:
        def parts(names: str, kind: str) -> NDArray[np.int64]:
            found = np.stack([self.bits(x) for x in names.split("|")], 1)  # (32, registers)
            return found.copy().view(np.uint8 if kind == "u8" else np.int8).reshape(32, -1, 4).astype(np.int64)

        first, second = (parts(x, kind) for x, kind in zip((a, b), kinds.split("."), strict=True))
        left, right, total = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64), np.zeros((16, 8), np.int64)
        for lane in range(32):
            row, k = lane // 4, lane % 4 * 4
            for i in range(4):
                left[row + i % 2 * 8, k + i // 2 * 16 :][:4] = first[lane, i]
            for i in range(2):
                right[k + i * 16 :, row][:4] = second[lane, i]
            for i, name in enumerate(c.split("|")):
                total[row + i // 2 * 8, COLUMN[lane] + i % 2] = np.int32(self.bits(name)[lane])
        total += left @ right
        assert abs(total).max() < 2**31
        for i, name in enumerate(out.split("|")):
            self.registers[name] = total[ROW + i // 2 * 8, COLUMN + i % 2].astype(np.int32).view(np.uint32)

    def halves_product(self, out: str, a: str, b: str, c: str) -> None:
        left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, name in enumerate(a.split("|")):
            pair = self.bits(name).copy().view(np.float16).reshape(32, 2)
            for j in range(2):
                left[ROW + i % 2 * 8, COLUMN + i // 2 * 8 + j] = pair[:, j]
        for i, name in enumerate(b.split("|")):
            pair = self.bits(name).copy().view(np.float16).reshape(32, 2)
            for j in range(2):
                right[COLUMN + i * 8 + j, ROW] = pair[:, j]
        for i, name in enumerate(c.split("|")):
            total[ROW + i // 2 * 8, COLUMN + i % 2] = self.float(name)
        total += left @ right
        for i, name in enumerate(out.split("|")):
            self.registers[name] = total[ROW + i // 2 * 8, COLUMN + i % 2].astype(np.float32).view(np.uint32)

    def transposed(self, x: Words) -> Words:
        part = np.zeros((8, 8), np.uint32)
        part[ROW, COLUMN], part[ROW, COLUMN + 1] = x & 0xFFFF, x >> 16
        return part.T[ROW, COLUMN] | part.T[ROW, COLUMN + 1] << 16

    def run(self, text: str) -> Warp:
        text = re.sub(r"\{([^{};]*)\}", lambda m: m[1].replace(" ", "").replace(",", "|"), text)
        lines = [line.strip() for line in re.sub(r"[{}]", ";", re.sub(r"(KVCAL_\w+:)", r"; \1 ;", text)).split(";")]
        skip = ""
        for line in filter(None, lines):
            if line.startswith("KVCAL_"):
                skip = "" if line.rstrip(":") == skip else skip
            elif line.startswith("@!") and not skip:
                taken = ~self.registers[line[2:].split()[0]]
                assert taken.all() or not taken.any()
                skip = line.split()[-1] if taken.all() else ""
                self.branched += [bool(skip)] if line.endswith("KVCAL_BELOW") else []
            elif not skip and not line.startswith(".reg"):
                name, _, rest = line.partition(" ")
                self.do(name, [part.strip() for part in rest.split(",")])
        return self

    def do(self, name: str, o: list[str]) -> None:
        kind, own = name.split(".")[0], self.registers
        with np.errstate(all="ignore"):
            if kind == "ldmatrix":
                self.matrix(*o)
            elif kind == "ld":
                size = int(name.rsplit(".b", 1)[1]) // 8
                found = np.ascontiguousarray(self.at(o[1], size * (1 + (".v2" in name)))).view(f"u{size}")
                for i, target in enumerate(o[0].split("|")):
                    own[target] = found[:, i]
            elif kind == "mma" and name.endswith(".f32.f16.f16.f32"):
                assert name.startswith("mma.sync.aligned.m16n8k16.row.col.")
                self.halves_product(*o)
            elif kind == "mma":
                assert name.startswith("mma.sync.aligned.m16n8k32.row.col.s32.") and name.endswith(".s32")
                self.product(name.split(".s32.")[1].removesuffix(".s32"), *o)
            elif kind == "mov" and "|" in o[0]:
                for i, part in enumerate(o[0].split("|")):
                    own[part] = (own[o[1]] >> own[o[1]].dtype.type(16 * i)).astype(np.uint16)
            elif name == "cvt.f32.f16":
                own[o[0]] = own[o[1]].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
            elif name == "shfl.sync.bfly.b32":
                own[o[0]] = self.bits(o[1])[LANE ^ int(o[2])]
            elif name == "shfl.sync.idx.b32":
                own[o[0]] = self.bits(o[1])[self.bits(o[2])]
            elif name.endswith(".f16x2"):
                x = [self.bits(one).copy().view(np.float16).reshape(32, 2) for one in o[1:]]
                made = {"mul": lambda: x[0] * x[1], "abs": lambda: abs(x[0]), "max": lambda: np.fmax(*x)}[kind]()
                own[o[0]] = np.ascontiguousarray(made.astype(np.float16)).view(np.uint32)[:, 0]
            elif kind == "movmatrix":
                own[o[0]] = self.transposed(self.bits(o[1]))
            elif kind == "vote":
                own[o[0]] = np.full(32, own[o[1]].any())
            elif name == "setp.ne.s32":
                own[o[0]] = self.bits(o[1]) != self.bits(o[2])
            elif kind == "setp":
                assert name == "setp.gt.f32"
                own[o[0]] = self.float(o[1]) > self.float(o[2])
            elif kind == "prmt":
                both = self.bits(o[1]).astype(np.uint64) | self.bits(o[2]).astype(np.uint64) << np.uint64(32)
                which = [self.bits(o[3]).astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15) for i in range(4)]
                chosen = [both >> np.uint64(8) * (place & np.uint64(7)) & np.uint64(255) for place in which]
                signs = [x >> np.uint64(7) for x in chosen]
                chosen = [
                    np.where(place > 7, sign * np.uint64(255), x)
                    for place, sign, x in zip(which, signs, chosen, strict=True)
                ]
                own[o[0]] = sum(x << np.uint64(8 * i) for i, x in enumerate(chosen)).astype(np.uint32)
            elif kind == "lop3":
                a, b, c = (self.bits(x) for x in o[1:4])
                own[o[0]] = {0xE4: a & c | b & ~c, 0xEA: a & b | c}[int(o[4], 0)]
            elif ".f32" in name:
                own[o[0]] = self.floats(name, [self.float(x) for x in o[1:]]).astype(np.float32).view(np.uint32)
            else:
                own[o[0]] = self.integers(kind, [self.bits(x) for x in o[1:]])

    @staticmethod
    def floats(name: str, x: list[Any]) -> Any:
        wide = [one.astype(np.float64) for one in x]
        made: dict[str, Callable[[], Any]] = {
            "fma": lambda: wide[0] * wide[1] + wide[2], "mul": lambda: wide[0] * wide[1], "add": lambda: wide[0] + wide[1],
            "sub": lambda: wide[0] - wide[1], "max": lambda: np.fmax(*x), "abs": lambda: abs(x[0]), "neg": lambda: -x[0],
            "ex2": lambda: np.exp2(wide[0]), "mov": lambda: x[0], "cvt": lambda: np.ceil(x[0]),
            "rcp": lambda: 1 / wide[0], "lg2": lambda: np.log2(wide[0]),
        }  # fmt: skip
        assert name.split(".")[0] != "cvt" or name == "cvt.rpi.f32.f32"
        return made[name.split(".")[0]]()

    @staticmethod
    def integers(kind: str, x: list[Any]) -> Words:
        made: dict[str, Callable[[], Any]] = {
            "mov": lambda: x[0], "and": lambda: x[0] & x[1], "shr": lambda: x[0] >> x[1],
            "shl": lambda: x[0] << x[1], "add": lambda: x[0] + x[1], "xor": lambda: x[0] ^ x[1],
        }  # fmt: skip
        return made[kind]().astype(np.uint32)


def slot(keys: Blocks, values: Blocks, block: int) -> bytes:
    """A slot of the ring as `_copies` fills it: of each 32 bytes of words the halves change places in every other 128."""
    made = b""
    for blocks in (keys, values):
        words = blocks.words[0, 0, block].view(-1, 2, 8).clone()
        swapped = torch.arange(len(words)) // 4 % 2 == 1
        words[swapped] = words[swapped].flip(1)
        made += words.numpy().tobytes()
        made += blocks.scale[0, 0, block // blocks.form.scale_blocks].numpy().tobytes()
    return made


def about(form: Form) -> tuple[int, ...]:
    from kvcal_kernels.attention.side import side_of

    return side_of(form).codes


def numbers(blocks: Blocks) -> Tensor:
    """(T, D) float64 of the first head; of a grid as they are, rotated."""
    if blocks.grid is None:
        return decode(blocks)[0, 0].double()
    codes, norm, _ = unpack(blocks)
    return (blocks.grid.points.double()[codes].flatten(-2) * norm.double())[0, 0]


def channels(group: int, half: int, grid: bool) -> Tensor:
    """Of which a lane has register `half` of a second operand: (32, 4). Of a grid even, then odd ones of 64 neighbours."""
    quad = torch.from_numpy(COLUMN)[:, None]
    if grid:
        return group // 2 * 64 + group % 2 + 2 * (quad + half) + 16 * torch.arange(4)
    return group * 32 + half * 8 + quad + torch.tensor([0, 16, 1, 17])


def fragments(integers: Tensor, grid: bool) -> list[Words]:
    """Queries (rows, D), integers of 16 bits, as registers of second operands: of group g number 2 g and 2 g + 1."""
    rows, dim = integers.shape
    high = (integers + 128) >> 8
    parts = torch.zeros(8, dim, dtype=torch.int64)
    parts[0 : 2 * rows : 2], parts[1 : 2 * rows : 2] = high, integers - 256 * high
    made = []
    for group in range(dim // 32):
        for half in range(2):
            found = parts[torch.from_numpy(ROW)[:, None], channels(group, half, grid)] & 255
            made.append((found << torch.tensor([0, 8, 16, 24])).sum(1).numpy().astype(np.uint32))
    return made


FORMS = [(dim, bits, group, symmetric) for dim, group in ((128, 32), (128, 128), (64, 32), (96, 32), (256, 64))
         for bits in (2, 3, 4, 8) for symmetric in (True, False)]  # fmt: skip


@pytest.mark.parametrize(("dim", "bits", "group", "symmetric"), FORMS)
def test_a_warp_attends_over_blocks_of_bytes(dim: int, bits: int, group: int, symmetric: bool) -> None:
    attended(Form("key", dim, bits, group, True, symmetric), Form("value", dim, bits, 32, True, symmetric))


@pytest.mark.parametrize("bits", [(2, 8), (8, 3), (4, 2)])
@pytest.mark.parametrize("symmetric", [(True, False), (False, True)])
def test_a_warp_attends_over_bytes_of_two_forms(bits: tuple[int, int], symmetric: tuple[bool, bool]) -> None:
    attended(Form("key", 128, bits[0], 32, True, symmetric[0]), Form("value", 128, bits[1], 128, True, symmetric[1]))


OUTER = {
    bits: (Form("key", 128, bits, 128, False, False), Form("value", 128, bits, 128, False, False))
    for bits in (2, 3, 4, 8)
}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_warp_attends_over_bytes_of_outer_groups(bits: int) -> None:
    attended(*OUTER[bits])
    attended(OUTER[bits][0], Form("value", 128, 3, 32, True, bits == 4))
    attended(Form("key", 128, 3, 32, True, bits == 4), OUTER[bits][1])


def points(role: Any, dim: int, setting: tuple[int, int]) -> Form:
    return Form(role, dim, setting[0], vector=setting[1], in_bytes=True)


@pytest.mark.parametrize("dim", BYTE_DIMS)
@pytest.mark.parametrize(
    ("key", "value"), [*((x, x) for x in IN_BYTES), ((4, 1), (3, 1)), ((2, 2), (4, 1)), ((3, 1), (2, 2))]
)
def test_a_warp_attends_over_points_of_grids(dim: int, key: tuple[int, int], value: tuple[int, int]) -> None:
    attended(points("key", dim, key), points("value", dim, value))


@pytest.mark.parametrize("setting", IN_BYTES)
def test_a_warp_attends_over_points_beside_integers(setting: tuple[int, int]) -> None:
    attended(points("key", 128, setting), Form("value", 128, 3, 32))
    attended(points("key", 128, setting), Form("value", 128, 2, 128, False, False))
    attended(Form("key", 128, 2, 32, True, False), points("value", 128, setting))
    attended(Form("key", 128, 4, 128, False, False), points("value", 128, setting))


@pytest.mark.parametrize(
    "form",
    [(Form("key", 128, 2, 32), Form("value", 128, 2, 32)), (points("key", 128, (4, 1)), points("value", 128, (3, 1)))],
)
def test_a_code_in_another_place_is_seen(form: tuple[Form, Form]) -> None:
    held = [2 * (one.words + one.scales) for one in form]
    at = 2 * sum(held) + held[0] + 200  # of a value of the third block
    with pytest.raises(AssertionError, match="not close"):
        attended(*form, change=lambda memory: memory[:at] + bytes([memory[at] ^ 12]) + memory[at + 1 :])


def plain_fragments(q: Tensor) -> list[Words]:
    """Queries (rows, D) float16 as registers of second operands of 16 numbers: of slice i number 2 i and 2 i + 1."""
    made = []
    for first in range(0, q.shape[1], 8):
        channel = first + torch.from_numpy(COLUMN)[:, None] + torch.tensor([0, 1])
        pair = q[torch.from_numpy(ROW // 2)[:, None], channel].contiguous()
        made.append(pair.view(torch.int32)[:, 0].numpy().view(np.uint32))
    return made


def attended(key: Form, value: Form, change: Callable[[bytes], bytes] = lambda memory: memory) -> None:
    """Four query rows over eight blocks, the third far above the others, the last far below, against float64."""
    from kvcal_kernels.attention.triton.int8 import block, ptx
    from kvcal_kernels.attention.triton.int8 import scores as ptx_scores
    from kvcal_kernels.attention.triton.int8 import values as ptx_values

    g = torch.Generator().manual_seed(key.dim + key.bits)
    coded = [list(random_codes(form, 1, 1, 8, g)) for form in (key, value)]
    far = torch.ones(256)
    far[64:96], far[224:] = 24.0, 0.01
    if key.inner:
        coded[0][1] = (coded[0][1] * far[None, None, :, None]).half()
    if not value.inner or value.vector:
        coded[1][1][:, :, :48] = 0.0  # tokens whose numbers are all alike
    made = (random_grid(form, 1, g) for form in (key, value))
    keys, values = (pack(*own, form, grid) for own, form, grid in zip(coded, (key, value), made, strict=True))
    same = key.vector > 0 and (key.bits, key.vector) == (value.bits, value.vector)
    if keys.grid and same:
        values = replace(values, grid=keys.grid)
    dim, slices = key.dim, key.dim // 16
    q = torch.randn(4, dim, generator=g, dtype=torch.float64) * torch.tensor([[1.0], [0.01], [30.0], [0.0]])
    plain = (q / (2 * q.abs().amax(1, keepdim=True)).clamp_min(1e-30)).half()
    step = (q.abs().amax(1) / ptx.QUERY).clamp_min(1e-30).float()
    integers = (q / step.double()[:, None]).round().long()
    used = plain.double() if not key.inner else integers.double() * step.double()[:, None]
    scores = used @ numbers(keys).T
    spread = [3.0, 3.0, 60.0, 1.0] if key.inner else [3.0, 3.0, 8.0, 1.0]
    unit = (torch.tensor(spread) / scores.abs().amax(1).clamp_min(1e-9)).float()

    modes = [about(form)[4] for form in (key, value)]
    given: dict[str, list[Any]] = {}
    given["queries"] = fragments(integers, bool(key.vector)) if key.inner else []
    given["queries"] += [np.zeros(32, np.uint32)] * (-(slices if not key.inner else len(given["queries"])) % 4)
    given["queries"] += [np.zeros(32, np.uint32)] * (4 * -(-slices // 4) - len(given["queries"]))
    if key.inner and not key.vector:
        count = 4 * ptx_scores.beginning_tensors.fn(slices, key.pieces, key.bits, modes[0])
        registers = {f"${count + i}": x for i, x in enumerate(given["queries"])}
        begun = Warp(registers, b"").run(ptx_scores.beginning.fn(slices, key.pieces, key.bits, modes[0])).registers
        given["begins"] = [begun[f"${i}"] for i in range(count)]
    own = torch.from_numpy(LANE % 4)
    step *= 1.0 if keys.grid is None else keys.grid.unit
    base = (unit if not key.inner else unit * step)[own].numpy()
    for name, blocks in (("k_points", keys), ("v_points", values)):
        table = blocks.grid.table.tolist() if blocks.grid else []
        given[name] = [np.full(32, number & 0xFFFFFFFF) for number in table]
    high = LANE // 4 % 2 == 0
    rounded = np.where(high, ptx.MAGIC_FLOAT + 128, ptx.MAGIC_FLOAT).astype(np.float32)
    given["plain"] = plain_fragments(plain)
    given["base"] = [base.view(np.uint32), rounded.view(np.uint32), np.where(high, 0x51, 0x40), LANE * 0]
    given["about"] = [LANE * 0] * 4
    given["state"] = [np.full(32, -1e30, np.float32).view(np.uint32), LANE * 0, base.view(np.uint32), LANE * 0]
    given["acc"] = [LANE * 0] * (2 * slices)
    held, row = about(key)[-1], LANE & 15
    places = [row * 32 + ((LANE >> 4) ^ (row >> 2 & 1)) * 16]
    columns = (
        1 if key.vector else dim // key.group * (1 + modes[0]),
        1 if value.vector else slices * (1 + modes[1]),
    )
    places += [LANE % 4 * 8 if modes[0] == 2 else ROW * 2 * min(4, columns[0] & -columns[0])]
    places += [ROW // 2 * 8 + ROW % 2 * 2 if modes[1] == 2 else ROW * 2 * min(4, columns[1] & -columns[1])]
    given["places"] = [*places, (row ^ row >> 3) * 16]
    fixed = ptx_values.constants.fn(slices, value.tiles, value.bits, modes[1])
    given["constants"] = [np.full(32, one) for one in fixed for _ in range(4)]
    operands = block._operands.fn(slices, about(key), about(value), True, same)
    text = block.block.fn(slices, about(key), about(value), True, same)
    size = held + about(value)[-1]
    memory = change(b"".join(slot(keys, values, i) for i in range(8)))
    branched = []
    for i in range(8):
        given["slot"], given["renew"] = [np.full(32, i * size)] * 4, [np.full(32, int(i % key.scale_blocks == 0))] * 4
        names = [(name, j) for name, count, _ in operands for j in range(4 * count)]
        for live in (0, 1):  # first as where the warp has no block left
            given["live"] = [np.full(32, live)] * 4
            registers = {f"${k}": given[name][j].astype(np.uint32) for k, (name, j) in enumerate(names)}
            warp = Warp(registers, memory).run(text)
            if not live:
                assert all((warp.registers[name] == bits).all() for name, bits in registers.items())
        for k, (name, j) in enumerate(names):
            given[name][j] = warp.registers[f"${k}"]
        branched += warp.branched
    assert branched[0] is False
    assert branched[-1] is True
    if key.inner and key.symmetric:
        assert branched[2] is False
    state, acc = ([x.view(np.float32).astype(np.float64) for x in given[name]] for name in ("state", "acc"))
    total, shift = ([x[i == LANE % 4].sum() for i in range(4)] for x in (state[1], state[3]))
    out = np.zeros((4, dim))
    for c in range(slices // 2):
        for i in range(4):
            piece = 2 * c + i % 2
            place = ptx.field_place.fn(piece % ptx.pairs_of_word.fn(value.bits), value.bits)
            place = 1 / values.grid.unit if values.grid else place
            row = ROW + i // 2 * 8
            channel = 32 * c + 2 * row + i % 2 if value.vector > 1 else piece * 16 + row
            out[LANE % 4, channel] = acc[4 * c + i] / place / ptx.PROBABILITY
    if modes[1] == 2:
        out += np.array(shift)[:, None]
    powers = scores * unit.double()[:, None]
    wanted = torch.exp2(powers - powers.amax(1, keepdim=True))
    stored = numbers(values)
    wanted = (wanted / wanted.sum(1, keepdim=True)) @ stored
    # queries of outer groups times scales are float16; scores of up to 60 are float32, of grids after one sum of all
    # channels
    bound = 4e-4 if not key.inner else 6e-5 if key.vector else 3e-5
    found = torch.from_numpy(out / np.array(total)[:, None])
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(bound * stored.abs().amax()))
