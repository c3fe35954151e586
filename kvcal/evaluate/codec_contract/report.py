"""One codec held to every check, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcal_artifacts.codecs import Codec, Role, Shape
from kvcal_artifacts.errors import KVCalError

from . import checks, numbers
from .subject import Make, Subject, under_predictor

ROLES: tuple[Role, ...] = ("key", "value")
SHAPES = (Shape(2, 16, 8), Shape(1, 64, 32), Shape(3, 96, 32), Shape(2, 80, 16))

# By the name that is printed; the first paragraph of each function says what it holds the codec to.
CHECKS: dict[str, Callable[[Subject], None]] = {
    "round trip": numbers.round_trip,
    "hard inputs": numbers.hard_inputs,
    "chunking": checks.chunking,
    "truncation": checks.truncation,
    "deterministic": checks.deterministic,
    "stored bits": checks.stored_bits,
    "registered": checks.registered,
    "state": checks.state,
    "bundle": checks.in_bundle,
    "dtypes": checks.dtypes,
    "devices": checks.devices,
    "shapes": checks.other_shapes,
    "heads": checks.heads_alone,
}
LONGEST = 300  # characters of an error: torch adds a stack of C++ calls
CONSTRUCTED = "made from shape and role"


@dataclass(frozen=True)
class Outcome:
    """What a check came to. tried: at how many shapes and roles, alone and under a predictor. failure: the first, in
    one line; None where there is none. holds: what the check holds a codec to.
    """

    check: str
    passed: bool
    tried: int
    failure: str | None
    holds: str


def check_codec(codec: type[Codec] | Make) -> list[Outcome]:
    """Hold a codec to the contract that kvcal's codecs keep, an outcome per check.

    codec: a class that shape and role alone make, or a function of them as `kvcal.register(backbones=…)` takes it. It
    is tried for keys and values of four shapes, alone and under a predictor; what it refuses by a KVCalError when it is
    made is left out. Never raises for what the codec does: that is an outcome.
    """
    subjects, failure = _subjects(codec)
    outcomes = [Outcome(CONSTRUCTED, failure is None, len(subjects), failure, "Shape and role alone make the codec.")]
    if failure is None:
        pairs = [
            (str(subject) + where, Subject(make, subject.shape, subject.role))
            for subject in subjects
            for where, make in (("", codec), (", under a predictor", under_predictor(codec)))
        ]
        outcomes += [_outcome(name, check, pairs) for name, check in CHECKS.items()]
    return outcomes


def _subjects(codec: Make) -> tuple[list[Subject], str | None]:
    """The codec at each shape and role that it takes; or why there is none."""
    subjects, refusals = [], []
    for shape in SHAPES:
        for role in ROLES:
            subject = Subject(codec, shape, role)
            try:
                result: object = subject.codec()
            except KVCalError as error:
                refusals.append(str(error))
                continue
            except Exception as error:
                return [], f"{subject}: {_line(error)}"
            if not isinstance(result, Codec):
                return [], f"{subject}: a {type(result).__name__} is made, must be a kvcal_artifacts.codecs.Codec"
            subjects.append(subject)
    return subjects, None if subjects else f"every shape is refused: {refusals[0]}"


def _outcome(name: str, check: Callable[[Subject], None], subjects: list[tuple[str, Subject]]) -> Outcome:
    """One check over all subjects, to the first that fails it."""
    holds = " ".join((check.__doc__ or "").split("\n\n")[0].split())
    for tried, (where, subject) in enumerate(subjects, 1):
        try:
            with torch.no_grad():
                check(subject)
        except Exception as error:
            return Outcome(name, False, tried, f"{where}: {_line(error)}", holds)
    return Outcome(name, True, len(subjects), None, holds)


def _line(error: Exception) -> str:
    """An error in one line: its text, and its kind unless it says all."""
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return text if isinstance(error, (numbers.Broken, KVCalError)) else f"{type(error).__name__}: {text}"
