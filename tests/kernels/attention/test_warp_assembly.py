"""The attention kernel's assembly for whole warps, which the interpreter does not run, computed for 32 lanes at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention.test_attention_kernel import assembly, plain
from tests.support.interpreted import needs_triton

LANE = torch.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4 * 2  # of an 8 x 8 part of a product's result: a lane has two neighbouring columns

pytestmark = needs_triton


def halves(register: Tensor) -> Tensor:
    return torch.stack([register & 0xFFFF, register >> 16 & 0xFFFF], -1).short().view(torch.float16)


def register(pairs: Tensor) -> Tensor:
    """float16 (32, 2) -> int64 (32,)."""
    low, high = (pairs.contiguous().view(torch.int16).long() & 0xFFFF).unbind(-1)
    return low | high << 16


class Warp:
    """Runs PTX of one warp: registers are tensors (32,), memory is bytes. A branch must be taken by all lanes or none."""

    def __init__(self, values: dict[str, Any], memory: bytes = b"") -> None:
        self.values = dict(values)
        self.memory = memory
        self.branched = False

    def read(self, text: str) -> Any:
        if text in self.values:
            return self.values[text]
        return torch.full((32,), float(text) if "." in text else int(text, 0))

    def at(self, text: str, size: int) -> Tensor:
        name, _, plus = text.strip("[] ").partition("+")
        places = self.read(name.strip()) + int(plus or 0)
        return torch.tensor([int.from_bytes(self.memory[p : p + size], "little") for p in places.tolist()])

    def transposed(self, x: Tensor) -> Tensor:
        part = torch.empty(8, 8, dtype=torch.float16)
        part[ROW[:, None], torch.stack([COLUMN, COLUMN + 1], -1)] = halves(x)
        turned = part.T.contiguous()
        return register(turned[ROW[:, None], torch.stack([COLUMN, COLUMN + 1], -1)])

    def result(self, name: str, o: list[str]) -> Any:
        """What an instruction leaves in its first operand; o: the others."""
        kind = name.split(".")[0]
        if kind == "ld":
            return self.at(o[0], 2)
        if kind == "mov" and o[0].startswith("{"):
            low, high = (self.read(x) for x in o[0].strip("{}").split("|"))
            return low | high << 16
        x = [self.read(part) for part in o]
        if kind == "prmt":
            return sum(((x[0] | x[1] << 32) >> 8 * (x[2] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
        if kind == "shfl":
            return x[0][LANE ^ x[1]]
        made = {
            "mov": lambda: x[0], "and": lambda: x[0] & x[1], "shr": lambda: x[0] >> x[1], "add": lambda: x[0] + x[1],
            "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1], "neg": lambda: -x[0], "max": lambda: torch.maximum(*x),
            "mad": lambda: x[0] * x[1] + x[2], "fma": lambda: x[0] * x[1] + x[2], "ex2": lambda: torch.exp2(x[0]),
            "movmatrix": lambda: self.transposed(x[0]), "selp": lambda: torch.where(x[2], x[0], x[1]),
        }  # fmt: skip
        if kind == "setp":
            return x[0] > x[1] if ".gt." in name else x[0] != x[1]
        return torch.full((32,), bool(x[0].any())) if kind == "vote" else made[kind]()

    def run(self, text: str) -> Warp:
        text = re.sub(r"\{(\$?\w+), (\$?\w+)\}", r"{\1|\2}", text.strip())
        text = text[1:-1] if text.startswith("{ ") else text
        for line in text.split(";"):
            line = re.sub(r"^\s*KVCAL_LOW:", "", line.strip("\n ")).strip()
            if line.startswith("@!p bra"):
                self.branched = not bool(self.read("p").any())
                if self.branched:
                    return self
            elif line and not line.startswith(".reg"):
                name, _, rest = line.partition(" ")
                target, *others = (part.strip() for part in rest.split(","))
                self.values[target] = self.result(name, others)
        return self


def lanes_of(x: Tensor) -> list[Tensor]:
    """(16, 8) -> registers of rows r and of rows r + 8."""
    return [register(x[half * 8 + ROW[:, None], torch.stack([COLUMN, COLUMN + 1], -1)]) for half in range(2)]


def operand(low: Tensor, high: Tensor) -> Tensor:
    """What a second operand (16, 8) is: a lane has of column lane // 4 rows 2c, 2c + 1 and, in its second register, 8
    more.
    """
    made = torch.empty(16, 8, dtype=torch.float16)
    for half, one in enumerate((low, high)):
        made[half * 8 + torch.stack([COLUMN, COLUMN + 1], -1), ROW[:, None]] = halves(one)
    return made


def test_probabilities_become_a_second_operand() -> None:
    from kvcal_kernels.attention import triton as fused

    p = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).half()
    first, second = lanes_of(p)
    found = Warp({"$2": first, "$3": second}).run(plain(fused.softmax._movmatrix)(False)).values
    assert torch.equal(operand(found["$0"], found["$1"]), p)


def test_mixed_rows_become_operands_of_eight_tokens_and_their_parity() -> None:
    """Scores come in the order of rows in which `_tile` reads mixed keys, as the addresses of `ldmatrix` say."""
    from kvcal_kernels.attention import triton as fused

    (names,) = assembly(fused.softmax.declare_parities)
    own = Warp({"%laneid": LANE}).run(names.replace("$0", "unused"))
    p = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).half()
    row = torch.arange(16)
    mixed = row & 8 | row >> 1 & 3 | (row & 1) << 2
    assert mixed[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    own.values |= {"$4": lanes_of(p[mixed])[0], "$5": lanes_of(p[mixed])[1]}
    found = own.run(plain(fused.softmax._movmatrix)(True)).values
    for group in range(2):
        wanted = torch.zeros(16, 8, dtype=torch.float16)
        for token in range(8):
            for column in range(8):
                wanted[2 * token + column % 2, column] = p[8 * group + token, column]
        assert torch.equal(operand(found[f"${2 * group}"], found[f"${2 * group + 1}"]), wanted)


@pytest.mark.parametrize(
    ("over", "slack", "headroom"),
    [(7.9, 8.0, 0.0), (8.1, 8.0, 0.0), (300.0, 8.0, 0.0), (-0.1, 0.0, 3.0), (0.1, 0.0, 3.0)],
)
def test_maxima_rise_only_where_a_score_passes_by_more_than_the_slack(
    over: float, slack: float, headroom: float
) -> None:
    """With what sums and outputs are worth afterwards: each times 2^(old maximum - new)."""
    from kvcal_kernels.attention import triton as fused

    count, g = 2, torch.Generator().manual_seed(1)
    scores = torch.randn(32, 8, generator=g, dtype=torch.float64)  # both rows of both halves, two columns
    unit = 0.5 + torch.rand(8, generator=g, dtype=torch.float64)[COLUMN[:, None] + torch.arange(2)]
    maximum = torch.full((8,), 2.0, dtype=torch.float64)
    scores[13, 6] = (2.0 + over) / unit[13, 0]  # second half, row r + 8, first of the lane's columns
    scores = torch.minimum(scores, (2.0 + over) / unit.repeat(1, 4))
    own = torch.randn(32, 4 * count, generator=g, dtype=torch.float64)
    m = maximum[COLUMN[:, None] + torch.arange(2)].repeat(1, 2)
    outputs = 4 * (1 + count)
    given = {f"${i}": x for i, x in enumerate(torch.cat([m, own], 1).unbind(1))}
    inputs = torch.cat([scores, unit.repeat(1, 2)], 1)
    given |= {f"${outputs + i}": x for i, x in enumerate(inputs.unbind(1))}
    warp = Warp(given).run(plain(fused.softmax._rising)(count, slack, headroom))
    found = torch.stack([warp.values[f"${i}"] for i in range(outputs)], 1)
    top = torch.full((8,), -torch.inf, dtype=torch.float64)
    for i in range(8):
        top.scatter_reduce_(0, COLUMN + i % 2, scores[:, i] * unit[:, i % 2], "amax")
    risen = torch.maximum(maximum, top + headroom) if over > slack else maximum
    assert warp.branched == (over < slack)
    fade = torch.exp2(maximum - risen)[COLUMN[:, None] + torch.arange(2)]
    assert torch.equal(found[:, :4], risen[COLUMN[:, None] + torch.arange(2)].repeat(1, 2))
    torch.testing.assert_close(found[:, 4:], own * fade.repeat(1, 2 * count), rtol=1e-12, atol=0)


@pytest.mark.parametrize("columns", [8, 16])
def test_queries_are_gathered_in_the_order_of_channels(columns: int) -> None:
    """Bytes of the order at 64, the table [channel][row] at 256: a lane gets of row n = lane // 4, and of n + 8 where
    there are more than 8, channels number 2c, 2c + 1, 2c + 8, 2c + 9 of the slice.
    """
    from kvcal_kernels.attention import triton as fused

    g = torch.Generator().manual_seed(2)
    order, q = torch.randperm(128, generator=g), torch.randn(128, columns, generator=g).half()
    table = bytes(q.view(torch.uint8).flatten().tolist())
    memory = bytes(64) + bytes(order.tolist()) + bytes(64) + table
    i = 3
    text = plain(fused.tiers._gathering)(64 + 16 * i, columns)
    warp = Warp({"$4": LANE % 4 * 2, "$12": 2 * ROW, "kvcal_fit": torch.full((32,), 256)}, memory).run(text)
    for pair in range(2):
        for half in range(columns // 8):
            channels = order[16 * i + 8 * pair + COLUMN[:, None] + torch.arange(2)]
            assert torch.equal(halves(warp.values[f"${2 * pair + half}"]), q[channels, (ROW + 8 * half)[:, None]])


def test_norms_of_a_lanes_rows_are_read() -> None:
    from kvcal_kernels.attention import triton as fused

    text = plain(fused.scales._rows_of_halves)(96)
    norms = torch.arange(1, 17).half()
    memory = bytes(96) + bytes(norms.view(torch.uint8).tolist())
    text = text.replace("cvt.f32.f16", "mov.b32")
    warp = Warp({f"${4 + i}": (ROW + i // 2 * 8) * 2 for i in range(4)}, memory).run(text)
    found = torch.stack([warp.values[f"${i}"] for i in range(4)], 1).short().view(torch.float16)
    assert torch.equal(found, norms[ROW[:, None] + torch.tensor([0, 0, 8, 8])])
