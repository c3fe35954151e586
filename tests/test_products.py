"""The attention kernel's block of 8-bit products (attention/products.py), which the interpreter does not run: its assembly, bit
by bit, for the 32 lanes of a warp, against float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_cases import random_codes
from interpreted import needs_triton
from kvcal_kernels.attention import Blocks, Form, decode, pack

pytestmark = needs_triton

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4 * 2
Words = NDArray[np.uint32]


class Warp:
    """Runs PTX of one warp on its registers' bits. A branch must be taken by all lanes or none."""

    def __init__(self, registers: dict[str, Words], memory: bytes) -> None:
        self.registers: dict[str, Any] = {name: bits.astype(np.uint32) for name, bits in registers.items()}
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

    def transposed(self, x: Words) -> Words:
        part = np.zeros((8, 8), np.uint32)
        part[ROW, COLUMN], part[ROW, COLUMN + 1] = x & 0xFFFF, x >> 16
        return part.T[ROW, COLUMN] | part.T[ROW, COLUMN + 1] << 16

    def run(self, text: str) -> Warp:
        text = re.sub(r"\{([^{};]*)\}", lambda m: m[1].replace(" ", "").replace(",", "|"), text)
        lines = [line.strip() for line in re.sub(r"[{}]", ";", text.replace("KVCAL_BELOW:", "; KVCAL_BELOW: ;")).split(";")]
        skip = False
        for line in filter(None, lines):
            if line == "KVCAL_BELOW:":
                skip = False
            elif line.startswith("@!"):
                taken = ~self.registers[line[2:].split()[0]]
                assert taken.all() or not taken.any()
                skip = bool(taken.all())
                self.branched.append(skip)
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
                own[o[0]] = np.ascontiguousarray(self.at(o[1], size)).view(f"u{size}")[:, 0]
            elif kind == "mma":
                assert name.startswith("mma.sync.aligned.m16n8k32.row.col.s32.") and name.endswith(".s32")
                self.product(name.split(".s32.")[1].removesuffix(".s32"), *o)
            elif kind == "mov" and "|" in o[0]:
                for i, part in enumerate(o[0].split("|")):
                    own[part] = (own[o[1]] >> own[o[1]].dtype.type(16 * i)).astype(np.uint16)
            elif name == "cvt.f32.f16":
                own[o[0]] = own[o[1]].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
            elif kind == "shfl":
                own[o[0]] = self.bits(o[1])[LANE ^ int(o[2])]
            elif kind == "movmatrix":
                own[o[0]] = self.transposed(self.bits(o[1]))
            elif kind == "vote":
                own[o[0]] = np.full(32, own[o[1]].any())
            elif kind == "setp":
                own[o[0]] = self.float(o[1]) > self.float(o[2])
            elif kind == "prmt":
                both = self.bits(o[1]).astype(np.uint64) | self.bits(o[2]).astype(np.uint64) << np.uint64(32)
                chosen = [both >> np.uint64(8 * (int(o[3], 0) >> 4 * i & 7)) & np.uint64(255) for i in range(4)]
                own[o[0]] = sum(x << np.uint64(8 * i) for i, x in enumerate(chosen)).astype(np.uint32)
            elif kind == "lop3":
                assert int(o[4], 0) == 0xE4
                mask = self.bits(o[3])
                own[o[0]] = self.bits(o[1]) & mask | self.bits(o[2]) & ~mask
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
        }  # fmt: skip
        assert name.split(".")[0] != "cvt" or name == "cvt.rpi.f32.f32"
        return made[name.split(".")[0]]()

    @staticmethod
    def integers(kind: str, x: list[Any]) -> Words:
        made: dict[str, Callable[[], Any]] = {
            "mov": lambda: x[0], "and": lambda: x[0] & x[1], "shr": lambda: x[0] >> x[1],
            "shl": lambda: x[0] << x[1], "add": lambda: x[0] + x[1],
        }  # fmt: skip
        return made[kind]().astype(np.uint32)


def slot(keys: Blocks, values: Blocks, block: int) -> bytes:
    """A slot of the ring as `_copies` fills it: halves of rows of words change places in every other four rows."""
    made = b""
    for blocks in (keys, values):
        words = blocks.words[0, 0, block].view(-1, 16, 2, 8).clone()
        swapped = torch.arange(16) // 4 % 2 == 1
        words[:, swapped] = words[:, swapped].flip(2)
        made += words.numpy().tobytes()
        made += blocks.scale[0, 0, block // blocks.form.scale_blocks].numpy().tobytes()
    return made


def about(form: Form) -> tuple[int, ...]:
    mode = 0 if form.symmetric else 1
    return form.pieces, form.tiles, form.words, form.bits, mode, form.group, 2 * (form.words + form.scales)


def fragments(integers: Tensor) -> list[Words]:
    """Queries (rows, D), integers of 16 bits, as registers of second operands: of group g number 2 g and 2 g + 1."""
    rows, dim = integers.shape
    high = (integers + 128) >> 8
    parts = torch.zeros(8, dim, dtype=torch.int64)
    parts[0 : 2 * rows : 2], parts[1 : 2 * rows : 2] = high, integers - 256 * high
    made = []
    for group in range(dim // 32):
        for half in range(2):
            channel = group * 32 + half * 8 + torch.from_numpy(COLUMN)[:, None] + torch.tensor([0, 16, 1, 17])
            found = parts[torch.from_numpy(ROW)[:, None], channel] & 255
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


def test_a_code_in_another_place_is_seen() -> None:
    form = Form("key", 128, 2, 32), Form("value", 128, 2, 32)
    with pytest.raises(AssertionError, match="(?s)not close"):
        attended(*form, change=lambda memory: memory[:100] + bytes([memory[100] ^ 12]) + memory[101:])


def attended(key: Form, value: Form, change: Callable[[bytes], bytes] = lambda memory: memory) -> None:
    """Four query rows over four blocks, the third far above the others, the last far below, against float64."""
    from kvcal_kernels.attention import products

    g = torch.Generator().manual_seed(key.dim + key.bits)
    keys, values = (pack(*random_codes(form, 1, 1, 4, g), form) for form in (key, value))
    dim, slices = key.dim, key.dim // 16
    q = torch.randn(4, dim, generator=g, dtype=torch.float64) * torch.tensor([[1.0], [0.01], [30.0], [0.0]])
    step = (q.abs().amax(1) / products.QUERY).clamp_min(1e-30).float()
    integers = (q / step.double()[:, None]).round().long()
    spread = torch.tensor([3.0, 3.0, 60.0, 1.0])
    plain_keys = decode(keys)[0, 0].double()
    scores = (integers.double() * step.double()[:, None]) @ plain_keys.T
    unit = (spread / scores.abs().amax(1).clamp_min(1e-9)).float()

    queries = fragments(integers)
    queries += [np.zeros(32, np.uint32)] * (-len(queries) % 4)
    modes = [0 if form.symmetric else 1 for form in (key, value)]
    count = 4 * products.beginning_tensors.fn(slices, key.pieces, key.bits, modes[0])
    given = {f"${count + i}": x for i, x in enumerate(queries)}
    begun = Warp(given, b"").run(products.beginning.fn(slices, key.pieces, key.bits, modes[0])).registers
    begins = [begun[f"${i}"] for i in range(count)]

    own = torch.from_numpy(LANE % 4)
    outputs = 4 + 2 * slices
    state = np.zeros((outputs, 32), np.float32)
    state[0], state[2] = -1e30, (unit * step)[own].numpy()
    held = about(key)[-1]
    widths = [2 * min(4, n & -n) for n in (dim // key.group * (1 + modes[0]), slices * (1 + modes[1]))]
    row = LANE & 15
    places = [row * 32 + ((LANE >> 4) ^ (row >> 2 & 1)) * 16, ROW * widths[0], ROW * widths[1], LANE * 0]
    text = products.block.fn(slices, about(key), about(value))
    size = held + about(value)[-1]
    fixed = products.constants.fn(slices, value.tiles, value.bits, modes[1])
    rest = [np.full(32, one) for one in fixed for _ in range(4)]
    memory = change(b"".join(slot(keys, values, i) for i in range(4)))
    branched = []
    registers = {f"${i}": state[i].view(np.uint32) for i in range(outputs)}
    for i in range(4):
        inputs = [np.full(32, i * size)] * 4 + places + queries + begins + rest
        registers |= {f"${outputs + j}": x.astype(np.uint32) for j, x in enumerate(inputs)}
        warp = Warp(registers, memory).run(text)
        registers = {f"${j}": warp.registers[f"${j}"] for j in range(outputs)}
        branched += warp.branched
    assert branched[0] is False
    found = np.stack([registers[f"${i}"].view(np.float32) for i in range(outputs)]).astype(np.float64)
    total = np.array([found[1, LANE % 4 == i].sum() for i in range(4)])
    out = np.zeros((4, dim))
    for c in range(slices // 2):
        for i in range(4):
            piece = 2 * c + i % 2
            place = products.field_place.fn(piece % products.pairs_of_word.fn(value.bits), value.bits)
            out[LANE % 4, piece * 16 + ROW + i // 2 * 8] = found[4 + 4 * c + i] / place / products.PROBABILITY
    weight = torch.exp2(scores * unit.double()[:, None] - (scores * unit.double()[:, None]).amax(1, keepdim=True))
    wanted = (weight / weight.sum(1, keepdim=True)) @ decode(values)[0, 0].double()
    own_size = decode(values)[0, 0].double().abs().amax()
    torch.testing.assert_close(torch.from_numpy(out / total[:, None]), wanted, rtol=0, atol=float(3e-5 * own_size))
