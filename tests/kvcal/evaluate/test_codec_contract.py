"""The contract of codecs outside the registry: one that keeps it, and for each check one that does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping

import pytest
import torch
from torch import Tensor

import kvcal
from kvcal.evaluate.codec_contract import CHECKS, Make, Outcome, Subject, checks
from kvcal.evaluate.codec_contract.report import CONSTRUCTED
from kvcal.evaluate.codec_contract.subject import under_predictor
from kvcal_artifacts.codecs import CODECS, Codec, Context, Packed, Role, Shape, state_of
from kvcal_artifacts.codecs.base import EMPTY, Specs, on_device
from kvcal_artifacts.codecs.origins import origins_of
from kvcal_artifacts.codecs.refusals import to_half
from kvcal_artifacts.errors import KVCalError, UsageError
from tests.support.models_fixture import kvcal as command


class Halves(Codec):
    """Float16 numbers divided by a constant per channel, which keeps the contract."""

    name = "halves"
    head_tensors = ("unit",)

    def __init__(self, shape: Shape, role: Role, unit: Tensor | None = None, scale: float = 2.0) -> None:
        super().__init__(shape, role)
        self.unit = torch.ones(shape.heads, shape.dim).half() if unit is None else unit
        self.scale = scale

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        return {"raw": to_half(self.shape.blocks(x.float()) / (self.unit.float()[:, None, None] * self.scale), "key")}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        numbers: Tensor = packed["raw"].float() * (self.unit.float()[:, None, None] * self.scale)
        return numbers.flatten(2, 3)

    def config(self) -> Mapping[str, object]:
        return {"scale": self.scale}

    def tensors(self) -> dict[str, Tensor]:
        return {"unit": self.unit}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Halves:
        return cls(shape, role, tensors["unit"], float(config["scale"]))  # type: ignore[arg-type]

    def tensor_specs(self) -> Specs:
        return {"raw": ((self.shape.heads, self.shape.block, self.shape.dim), torch.float16)}

    def to(self, device: torch.device) -> Halves:
        if self.unit.device == device:
            return self
        return type(self)(self.shape, self.role, on_device(self.unit, device), self.scale)


class Halved(Halves):
    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return super().decode(packed) / 2


class Overflowing(Halves):
    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        return {"raw": (self.shape.blocks(x.float()) / self.scale).half()}


class OfTheCall(Halves):
    """Its bytes depend on how many blocks come at once."""

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        raw = super().encode(x)["raw"]
        return {"raw": raw + 0.01 * raw.shape[2]}


class OfTheCache(Halves):
    """Its numbers depend on how many blocks are there."""

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return super().decode(packed) + 0.01 * packed["raw"].shape[2]


class OfTheBatch(Halves):
    """A row's numbers depend on the others, and it says that they do not."""

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return super().decode(packed) + 1e-6 * packed["raw"].shape[0]

    def decoding(self) -> Hashable:
        return self.settings()


class Random(Halves):
    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        raw = super().encode(x)["raw"]
        return {"raw": raw + 0.01 * torch.randn(()).half()}


class Changing(Halves):
    """It changes its input."""

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        packed = super().encode(x)
        x.mul_(2)
        return packed


class Modest(Halves):
    def block_bytes(self) -> int:
        return super().block_bytes() // 2


class Misdeclared(Halves):
    def tensor_specs(self) -> Specs:
        return {"raw": ((self.shape.heads, self.shape.dim, self.shape.block), torch.float16)}


class Forgetful(Halves):
    """One setting is not in its state."""

    def __init__(self, shape: Shape, role: Role, unit: Tensor | None = None, scale: float = 3.0) -> None:
        super().__init__(shape, role, unit, scale)

    def config(self) -> Mapping[str, object]:
        return {"scale": 2.0}


class Unwritable(Halves):
    """A constant of a dtype that no bundle holds."""

    def tensors(self) -> dict[str, Tensor]:
        return {"unit": self.unit.double()}


class Narrow(Halves):
    """It computes in the dtype that it gets."""

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        return super().encode(x * 1.1)


class Staying(Halves):
    def to(self, device: torch.device) -> Halves:
        return self


class Unchecked(Halves):
    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        blocks = x.float()[:, : self.shape.heads].unfold(2, self.shape.block, self.shape.block).mT
        return {"raw": to_half(blocks / self.scale, "key")}


class ByNumber(Halves):
    """The first head is stored otherwise, also where it is another one that is stored alone."""

    def __init__(self, shape: Shape, role: Role, unit: Tensor | None = None, scale: float = 2.0) -> None:
        super().__init__(shape, role, unit, scale)
        self.power = 1.0 + 0.25 * (torch.arange(shape.heads) == 0)

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        return super().encode(x * self.power[:, None, None].to(x.device))


class Needy(Halves):
    """It has a setting without a default."""

    def __init__(self, shape: Shape, role: Role, unit: Tensor | None, scale: float) -> None:
        super().__init__(shape, role, unit, scale)


class Choosy(Halves):
    def __init__(self, shape: Shape, role: Role) -> None:
        raise KVCalError("never of this shape")


BROKEN = [
    (CONSTRUCTED, Needy, "TypeError"),
    (CONSTRUCTED, Choosy, "every shape is refused: never of this shape"),
    ("round trip", Halved, "relative squared error 0.25, allowed is"),
    ("hard inputs", Overflowing, "1e.30 come back as infinity or NaN"),
    ("chunking", OfTheCall, r"'raw' differs where blocks come in chunks cut at \[0, 1, 2, 3\]"),
    ("chunking", OfTheBatch, "decode gives a row other bits beside others"),
    ("truncation", OfTheCache, "the first 1 of 3 blocks decode to other numbers where the others are cropped"),
    ("deterministic", Random, "'raw' differs the second time that the same is encoded"),
    ("deterministic", Changing, "encode changes its input"),
    ("stored bits", Modest, r"block_bytes\(\) says 256"),
    ("stored bits", Misdeclared, "tensor_specs says"),
    ("state", Forgetful, "'raw' differs where the codec is read from its state"),
    ("bundle", Unwritable, "float64"),
    ("dtypes", Narrow, "for torch.bfloat16 and torch.float32"),
    ("devices", Staying, r"to\(device\) leaves constant 'unit' on cpu"),
    ("shapes", Unchecked, "is taken: refuse it, as Shape.blocks does"),
    ("heads", ByNumber, "a head that is stored alone decodes to other numbers"),
]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Codec]], None]:
    """Registers a codec for one test."""
    return lambda codec: monkeypatch.setitem(CODECS, codec.name, codec)


def by_check(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {outcome.check: outcome for outcome in outcomes}


def test_a_codec_from_outside_that_keeps_the_contract(listed: Callable[[type[Codec]], None]) -> None:
    listed(Halves)
    outcomes = by_check(kvcal.check_codec(Halves))
    assert list(outcomes) == [CONSTRUCTED, *CHECKS]
    assert [outcome.failure for outcome in outcomes.values()] == [None] * len(outcomes)
    assert {outcome.tried for name, outcome in outcomes.items() if name != CONSTRUCTED} == {16}  # alone and predicted


@pytest.mark.parametrize(("check", "codec", "failure"), BROKEN, ids=lambda x: getattr(x, "__name__", str(x)[:12]))
def test_a_broken_codec_fails_its_check(
    check: str, codec: type[Codec], failure: str, listed: Callable[[type[Codec]], None]
) -> None:
    listed(codec)
    outcome = by_check(kvcal.check_codec(codec))[check]
    assert not outcome.passed and outcome.failure is not None and "\n" not in outcome.failure
    assert re.search(failure, outcome.failure), outcome.failure


def test_every_check_can_fail() -> None:
    assert {check for check, _, _ in BROKEN} | {"registered"} == {CONSTRUCTED, *CHECKS}


@pytest.mark.parametrize("name", ["halves", "mixkvq"])
def test_a_device_stores_alike(name: str) -> None:
    """On a CPU in place of a GPU: what the check itself does."""
    make: Make = Halves if name == "halves" else CODECS[name]  # type: ignore[assignment]
    subject = Subject(make, Shape(2, 64, 32), "key")
    checks.stores_alike(subject, torch.device("cpu"))
    with pytest.raises(checks.Broken, match="'raw' differs on a GPU"):
        checks.stores_alike(Subject(Random, Shape(2, 64, 32), "key"), torch.device("cpu"))


def test_a_class_that_is_not_registered_says_so() -> None:
    outcomes = by_check(kvcal.check_codec(Halves))
    assert outcomes["registered"].failure is not None
    assert outcomes["registered"].failure.endswith("call kvcal.register(codec=Halves)")
    assert outcomes["round trip"].passed and not outcomes["bundle"].passed


def test_the_command_prints_a_line_per_check() -> None:
    done = command("check-codec", "kivi-2")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["good"] * (len(CHECKS) + 1) + ["kivi-2:"]
    done = command("check-codec", "uniform-1", "--json")  # one bit that keeps the largest number of a group
    assert done.code == 1 and not done.json["passed"]
    assert {row["check"] for row in done.json["checks"] if not row["passed"]} == {"round trip", "hard inputs"}


def test_names_that_cannot_be_checked() -> None:
    with pytest.raises(UsageError, match="codec 'squat' is made of another codec or of data"):
        kvcal.check_codec("squat")
    with pytest.raises(UsageError, match="codec 'kivi-22' is not known; did you mean kivi-2"):
        kvcal.check_codec("kivi-22")


def test_a_bundle_names_the_module_of_a_codec_without_a_package(listed: Callable[[type[Codec]], None]) -> None:
    listed(Halves)
    shape = Shape(2, 16, 8)
    inside = under_predictor(Halves)(shape, "key")
    assert origins_of([state_of(Halves(shape, "key"))]) == {"halves": {"package": "tests", "version": None}}
    assert origins_of([state_of(inside)]).keys() == {"halves"}, "codecs inside others, too"
    assert origins_of([state_of(CODECS["exact"](shape, "key"))]) == {}  # type: ignore[call-arg]
