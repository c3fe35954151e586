"""Cases of appending vector codes: the Triton kernels against the reference and the codec, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.codecs import ResidualVQ, Shape
from kvcal_artifacts.paths.preflight import codebook_trials
from kvcal_kernels import quantise
from kvcal_kernels.residual_vq.attention import Band, Coded

CALL = 16
WINDOWS = quantise.Windows(4, 32, 32)


@dataclass(frozen=True)
class Case:
    """widths: dimensions of the bands of keys. prompt: real tokens of each row. steps: new tokens of each call."""

    heads: int = 2
    dim: int = 64
    widths: tuple[int, ...] = (40, 24)
    stages: int = 3
    size: int = 64
    windows: quantise.Windows = WINDOWS
    prompt: tuple[int, ...] = (66, 3)
    steps: tuple[int, ...] = (1, 1, 16, 5, 16, 1)
    dtype: torch.dtype = torch.float16
    room: int = 4
    scaled: bool = True

    def __str__(self) -> str:
        own = [(name, value) for name, value in vars(self).items() if value != getattr(Case(), name)]
        return ", ".join(f"{name} {value}" for name, value in own) or "plain"


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def codec_of(case: Case, role: Any) -> ResidualVQ:
    widths = case.widths if role == "key" else (case.dim,)
    order = torch.randperm(case.dim, generator=torch.Generator().manual_seed(3)).tolist()
    bands = [sorted(order[sum(widths[:i]) : sum(widths[: i + 1])]) for i in range(len(widths))]
    falling = 0.6 ** torch.arange(case.stages)[:, None, None]
    books = [(normal(case.stages, case.size, width, seed=i) * falling).half() for i, width in enumerate(widths)]
    scale = (normal(case.heads, case.dim, seed=5).abs() + 0.5).half() if case.scaled and role == "key" else None
    return ResidualVQ(Shape(case.heads, case.dim, case.windows.block), role, bands, books, scale)


@dataclass
class Held:
    """What a layer stores."""

    coded: tuple[Coded, Coded]
    sink: tuple[Tensor, Tensor]
    ring: tuple[Tensor, Tensor]
    counts: quantise.Counts
    flags: Tensor


def empty(case: Case, device: str = "cpu") -> Held:
    batch, windows = len(case.prompt), case.windows

    def exact(tokens: int) -> tuple[Tensor, Tensor]:
        made = [torch.zeros(batch, case.heads, tokens, case.dim, dtype=case.dtype, device=device) for _ in (0, 1)]
        return made[0], made[1]

    sides = []
    for role in ("key", "value"):
        codec = codec_of(case, role).to(torch.device(device))
        packed = {
            name: t.new_full((*t.shape[:2], case.room, *t.shape[3:]), 0xAB)
            for name, t in codec.empty(batch, torch.device(device)).items()
        }
        sides.append(codec.as_codes(packed))
    room = windows.ring_capacity(max(*case.steps, 16))
    flags = torch.zeros(case.heads, dtype=torch.int32, device=device)
    counts = quantise.Counts(batch, windows, device)
    return Held((sides[0], sides[1]), exact(windows.sink), exact(room), counts, flags)


def appended(module: Any, case: Case, device: str = "cpu", spoil: tuple[int, ...] | None = None) -> Held:
    """A prompt in calls of 16, then the steps. spoil: row, head, step, channel of an infinity."""
    held, batch = empty(case, device), len(case.prompt)
    calls = -(-max(case.prompt) // CALL)
    for number, count in enumerate((*[CALL] * calls, *case.steps)):
        k, v = (normal(batch, case.heads, count, case.dim, seed=2 * number + i).to(case.dtype) for i in (0, 1))
        v = v.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection gives it
        if spoil is not None and spoil[2] == number - calls:
            k[spoil[0], spoil[1], -1, spoil[3]] = torch.inf
        new = torch.full((batch,), count, dtype=torch.int32)
        if number < calls:  # the last calls of the prompt bring a shorter row's tokens
            new = (torch.tensor(case.prompt) - CALL * (calls - 1 - number)).clamp(0, CALL).int()
        quantise.advance(held.counts, new.to(device))
        module.append(*held.coded, held.sink, held.ring, held.counts, held.flags, k.to(device), v.to(device))
    return held


def wrong(module: Any, case: Case, device: str = "cpu") -> str | None:
    """None where the module stores what the reference does: all of it, rows that nothing was due in untouched."""
    from kvcal_kernels.residual_vq import append as vq_append

    found, exact = appended(module, case, device), appended(vq_append, case, device)
    if not torch.equal(found.counts.data, exact.counts.data):
        return "counts"
    for row, (sink, blocks, window) in enumerate(exact.counts.data[[4, 7, 6]].T.tolist()):
        ring = [(32 * blocks + j) % exact.ring[0].shape[2] for j in range(window)]
        for name, live in (("sink", list(range(sink))), ("ring", ring)):
            for own, other in zip(getattr(found, name), getattr(exact, name), strict=True):
                if not torch.equal(own[row][:, live], other[row][:, live]):
                    return name
    for role in (0, 1):
        for band, (own, other) in enumerate(zip(found.coded[role].bands, exact.coded[role].bands, strict=True)):
            if not torch.equal(own.codes, other.codes):
                share = float((own.codes != other.codes).double().mean())
                return f"codes of role {role}, band {band}: {share:.2g} of bytes differ"
    return None if torch.equal(found.flags, exact.flags) else "flags"


def small() -> list[Case]:
    plain = Case()
    return [
        plain,
        replace(plain, widths=(64,), scaled=False, dtype=torch.bfloat16, size=16),
        replace(plain, heads=1, dim=80, widths=(48, 32), size=512, stages=2, prompt=(70, 69, 0)),
        replace(
            plain, heads=1, size=2048, stages=1, windows=quantise.Windows(0, 8, 160), prompt=(160, 10), steps=(9, 16)
        ),
        replace(plain, heads=1, room=1, prompt=(100, 66)),
    ]


def main() -> None:
    from kvcal_kernels.residual_vq import append as vq_append

    for case in small():
        print(f"{case}: {wrong(vq_append.fast(), case)}")
    spoiled = [appended(module, Case(), spoil=(0, 1, 0, 7)) for module in (vq_append, vq_append.fast())]
    print([one.flags.tolist() for one in spoiled])
    place, pair = torch.device("cpu"), (codec_of(Case(), "key"), codec_of(Case(), "value"))
    passes = codebook_trials.codebook_append_trial(*pair, torch.float16, place)
    books: Any = Band.halves
    Band.halves = property(lambda band: books.func(band).roll(1, 1))  # type: ignore[assignment]
    print(f"canary: {wrong(vq_append.fast(), Case())}")
    print(f"{passes}, {codebook_trials.codebook_append_trial(*pair, torch.float16, place)}")


if __name__ == "__main__":
    main()
